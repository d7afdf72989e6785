"""GSP's synthetic study (section 2.1 and Fig. 3a): features are learned tokens, half from a background of all classes.

    python experiments/gsp/synthetic.py --out runs/gsp_synthetic        # minutes on one core

There are 16 classes of 4 tokens each and 4 background tokens, all vectors in [-0.3, 0.3]^d. A sample draws 50 tokens, a
share N(0.5, 0.1) of them from its class and the rest from the background. Its embedding is their average (GAP) or their
generalized sum pooling (GSP), not normalised. Tokens (and prototypes) are trained with a contrastive loss on batches of
16 classes x 4, with Adam at 1e-4, until MAP@R on validation samples has not risen for 30 epochs. The tokens that were
best there are scored on test samples.

The paper does not print the loss, the dimension (2 here, as Fig. 3a is drawn in a plane), the length of an epoch, nor
mu and eps of this study. The script writes hulls.png, the samples with the convex hull of each class, and metrics.json.
"""

import argparse
from pathlib import Path
from typing import Annotated

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic import Field
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import ContrastiveLoss
from scipy.spatial import ConvexHull
from torch import Tensor, nn
from tqdm import trange

from dml.bench.rows import make_folder, write_rows
from dml.configuration.command_line import ending
from dml.configuration.ranges import Count, Positive, Seed, check_value
from dml.evaluation.metrics import evaluate
from dml.files import atomic_path
from dml.models.gsp import GeneralizedSumPool

CLASSES, OWN, SHARED, SAMPLE = 16, 4, 4, 50
BOUND = 0.3


class Tokens(nn.Module):
    """Maps classes `[B]` to features `[B,d,50,1]` drawn from learned tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(CLASSES * OWN + SHARED, dim).uniform_(-BOUND, BOUND))

    def forward(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        share = 0.5 + 0.1 * torch.randn(len(classes), 1, generator=generator)
        mine = torch.arange(SAMPLE) < (share.clamp(0, 1) * SAMPLE).round()  # [B,50]
        of_class = classes[:, None] * OWN + torch.randint(OWN, mine.shape, generator=generator)
        of_all = CLASSES * OWN + torch.randint(SHARED, mine.shape, generator=generator)
        return self.tokens[torch.where(mine, of_class, of_all)].movedim(2, 1)[..., None]


def study(pooling: nn.Module, options: argparse.Namespace, title: str) -> tuple[dict[str, float], Tensor, Tensor]:
    """Trains and tests tokens with a pooling. Returns metrics, test samples `[N,d]` and their classes `[N]`."""
    torch.manual_seed(options.seed)
    tokens = Tokens(options.dim)
    draws, fresh = torch.Generator().manual_seed(options.seed), torch.Generator()
    model = nn.ModuleList([tokens, pooling])
    optimizer = torch.optim.Adam(model.parameters(), options.lr)
    distance = LpDistance(normalize_embeddings=False)
    loss = ContrastiveLoss(pos_margin=0.0, neg_margin=options.margin, distance=distance)
    batch, tested = torch.arange(CLASSES).repeat_interleave(4), torch.arange(CLASSES).repeat_interleave(50)

    def embed(classes: Tensor, generator: torch.Generator) -> Tensor:
        return pooling(tokens(classes, generator)).flatten(1)

    best, since, kept, chosen = -1.0, 0, model.state_dict(), 0
    bar = trange(options.epochs, desc=title)
    for epoch in bar:
        for _ in range(options.steps):
            optimizer.zero_grad()
            loss(embed(batch, draws), batch).backward()
            optimizer.step()
            with torch.no_grad():
                tokens.tokens.clamp_(-BOUND, BOUND)
        with torch.no_grad():
            samples = embed(tested, fresh.manual_seed(10_000 + epoch))
        value = evaluate(samples, tested, ks=(1,), clustering=False)["map@r"]
        since += 1
        if value > best:
            best, since, chosen = value, 0, epoch
            kept = {name: tensor.clone() for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
        bar.set_postfix(map_r=f"{value:.3f}", best=f"{best:.3f}")
        if since == 30:
            break
    model.load_state_dict(kept, strict=False)
    with torch.no_grad():
        samples = embed(tested, fresh.manual_seed(1))
    figures = evaluate(samples, tested, ks=(1,), clustering=False)
    return figures | {"best_epoch": chosen, "last_epoch": epoch}, samples, tested


def draw(panels: dict[str, tuple[dict[str, float], Tensor, Tensor]], path: Path) -> None:
    figure = Figure(figsize=(4.5 * len(panels), 4.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, (figures, samples, classes)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for c in range(CLASSES):
            points = samples[classes == c][:, :2].numpy()
            colour = matplotlib.colormaps["turbo"](c / (CLASSES - 1))
            axes.scatter(*points.T, s=3, color=colour)
            hull = points[ConvexHull(points, qhull_options="QJ").vertices]
            axes.fill(*hull.T, facecolor=(*colour[:3], 0.25), edgecolor=colour, linewidth=1)
        if samples.shape[1] > 2:
            axes.set(xlabel=f"the first two of {samples.shape[1]} dimensions")
        axes.set(title=f"{title}: MAP@R {figures['map@r']:.3f}, P@1 {figures['precision@1']:.3f}", aspect="equal")
    with atomic_path(path) as new:
        figure.savefig(new, format="png")


def check(options: argparse.Namespace) -> None:
    """Raises UserError for options that would fail later."""
    check_value("--dim", options.dim, Annotated[int, Field(ge=2, le=65536)])
    ranges = {"epochs": Count, "steps": Count, "seed": Seed, "lr": Positive, "margin": Positive}
    for name, annotation in ranges.items():
        check_value(f"--{name}", getattr(options, name), annotation)
    make_folder(options.out)


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gsp_synthetic"))
    parser.add_argument("--dim", type=int, default=2)
    parser.add_argument("--m", type=int, default=64, help="prototypes")
    parser.add_argument("--mu", type=float, default=0.3)
    parser.add_argument("--eps", type=float, default=20.0)
    parser.add_argument("--margin", type=float, default=0.3841, help="margin of negatives (that of C2 on CUB)")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=50, help="steps of an epoch")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    check(options)
    torch.manual_seed(options.seed)
    gsp = GeneralizedSumPool(options.dim, m=options.m, mu=options.mu, eps=options.eps)
    with torch.no_grad():
        gsp.prototypes.mul_(BOUND)  # into the range of the tokens
    poolings = {"GAP": nn.AdaptiveAvgPool2d(1), "GSP": gsp}
    panels = {name: study(pooling, options, name) for name, pooling in poolings.items()}
    draw(panels, options.out / "hulls.png")
    told = {name: figures for name, (figures, _, _) in panels.items()}
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    write_rows(options.out, {"settings": settings} | {f"{name} of tokens": of for name, of in told.items()})
    for name, figures in told.items():
        epochs = f"best epoch {figures['best_epoch']}, last {figures['last_epoch']}"
        print(f"{name}: MAP@R {figures['map@r']:.4f}, P@1 {figures['precision@1']:.4f}, {epochs}")
    print(options.out / "hulls.png")


if __name__ == "__main__":
    main()
