"""Generalized sum pooling over global average pooling: alone, in inference, and in a whole training step.

    python experiments/bench/gsp.py                                     # ResNet-50 at 224, some minutes on 2 cores
    python experiments/bench/gsp.py --backbone bn_inception --size 227 --out runs/bench_gsp
    python experiments/bench/gsp.py --device cuda --batch 32

Pooling alone is timed forward and backward on local embeddings of width 128, as in the paper's Figs. 7 and 9. There are
three ways: k rounds of Proposition 4.2 under automatic differentiation, which keeps every round in memory; the closed
form of Proposition 4.3 after k rounds; Newton's method. The memory kept for the backward pass is measured too.
Inference is timed on whole networks, as in Fig. 8.

The bound: the costs are one matrix product of B x m x n x d multiply-adds forward, and two of that size backward. For
[32, 64, 7x7] that is 39e6, less than a millisecond on a core that does 50e9 a second. The [B,m,n] numbers are read and
written about ten times (4 MB each time for [128, 128, 8x8]). A training step of ResNet-50 takes 3 x 4.1e9 multiply-adds
an image, so pooling should hardly show in it. The aims: pooling adds at most 3 % to a step (the paper: under 6 % of
inference), and Newton is faster than the closed form of 100 rounds.

Contenders take turns, so that a machine that slows down slows all of them; ratios are medians of the ratios within a
round. Run it on idle cores. --out writes the figures of each contender to metrics.json; those of pooling alone are of
the first shape.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from dml.bench.rows import device_option, make_folder, out_option, write_rows
from dml.bench.timing import in_turns, ratio
from dml.configuration.command_line import ending
from dml.configuration.composition import CONF, composed
from dml.methods.base import Method
from dml.models.gsp import GeneralizedSumPool
from dml.training.build import build_method

AIM = 0.03
SHAPES = ((32, 64, 7), (128, 128, 8))  # images, prototypes, cells a side
WIDTH = 128
ROUNDS = (10, 25, 50, 75, 100)
CLOSED, AUTOMATIC = "closed form, k {}", "automatic differentiation, k {}"
Figures = dict[str, dict[str, float]]  # contender -> metric -> value


class Loop(GeneralizedSumPool):
    """GSP whose rounds of Proposition 4.2 are differentiated by autograd."""

    def transport(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        cells = maps.flatten(2).transpose(1, 2)
        cells = cells / cells.norm(dim=-1, keepdim=True).clamp(min=1)
        prototypes = self.prototypes / self.prototypes.norm(dim=-1, keepdim=True).clamp(min=1)
        squares = prototypes.square().sum(-1)[:, None] + cells.square().sum(-1)[:, None]
        cost = (squares - 2 * prototypes @ cells.transpose(1, 2)).clamp(min=1e-12).sqrt()
        n, kappa = cost.shape[-1], torch.exp(-self.eps * cost)
        t = torch.ones_like(kappa[:, 0, :1])
        assert self.iterations is not None
        for _ in range(self.iterations):
            rho = 1 / n / (1 + t * kappa.sum(1))
            t = self.mu / (kappa @ rho[..., None]).sum(1)
        return (1 - n * rho) / self.mu, t[..., None] * kappa * rho[:, None]


def poolings(prototypes: int) -> dict[str, Callable[[Tensor], Tensor]]:
    def gsp(kind: type[GeneralizedSumPool], **options: object) -> GeneralizedSumPool:
        torch.manual_seed(0)
        return kind(WIDTH, m=prototypes, **options)  # type: ignore[arg-type]

    made: dict[str, Callable[[Tensor], Tensor]] = {
        "GAP": torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()),
        "Newton": gsp(GeneralizedSumPool),
    }
    for k in ROUNDS:
        made[CLOSED.format(k)] = gsp(GeneralizedSumPool, solver="fixed_point", iterations=k)
        made[AUTOMATIC.format(k)] = gsp(Loop, iterations=k)
    return made


def kept_for_backward(pool: Callable[[Tensor], Tensor], maps: Tensor) -> int:
    """Returns the bytes of the tensors that a forward pass saves, without its input. Shared memory counts once."""
    kept: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        result = pool(maps)  # kept alive while counting, so that no address is used twice
    kept.pop(maps.untyped_storage().data_ptr(), None)
    del result
    return sum(kept.values())


def alone(images: int, prototypes: int, side: int, repeats: int, device: torch.device) -> Figures:
    torch.manual_seed(0)
    maps = torch.randn(images, WIDTH, side, side, device=device, requires_grad=True)

    def job(pool: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            maps.grad = None
            pool(maps).square().sum().backward()

        return run

    made = {name: pool.to(device) for name, pool in poolings(prototypes).items()}  # type: ignore[attr-defined]
    times = in_turns({name: job(pool) for name, pool in made.items()}, repeats, device)
    print(f"\n[{images}, {prototypes} prototypes, {side}x{side}], forward and backward")
    print(f"{'':34}{'ms':>8} {'/ closed form, 100':>19} {'MiB kept':>9}")
    told: Figures = {}
    for name, taken in times.items():
        over = ratio(taken, times[CLOSED.format(100)])
        kept = kept_for_backward(made[name], maps) / 2**20
        told[name] = {"pooling/milliseconds": 1e3 * statistics.median(taken), "pooling/mebibytes": kept}
        print(f"{name:34}{told[name]['pooling/milliseconds']:8.2f} {over:19.2f} {kept:9.2f}")
    return told


def model_of(overrides: list[str], options: argparse.Namespace) -> Method:
    common = [f"backbone={options.backbone}", "backbone.weights=none", f"runtime.train_classes={options.batch}"]
    config = composed(*common, *overrides)
    torch.manual_seed(0)
    return build_method(config).to(options.device)


def inference(options: argparse.Namespace) -> Figures:
    """Times whole networks without gradients (Fig. 8)."""
    images = torch.rand(options.batch, 3, options.size, options.size, device=options.device)
    choices = {"GAP": ["method=baseline"], "Newton": ["method=gsp"]}
    for k in ROUNDS:
        choices[CLOSED.format(k)] = ["method=gsp", "head.solver=fixed_point", f"head.iterations={k}"]

    def job(overrides: list[str]) -> Callable[[], None]:
        method = model_of(overrides, options).eval()

        def run() -> None:
            with torch.inference_mode():
                method.embed(images)

        return run

    jobs = {name: job(overrides) for name, overrides in choices.items()}
    times = in_turns(jobs, 5 * options.repeats, options.device)
    print(f"\ninference of {options.backbone}, {options.batch} images at {options.size}")
    print(f"{'':34}{'ms/image':>8} {'over GAP':>9}")
    told: Figures = {}
    for name, taken in times.items():
        more = ratio(taken, times["GAP"]) - 1
        told[name] = {
            "inference/milliseconds": 1e3 * statistics.median(taken) / options.batch,
            "inference/increase": more,
        }
        print(f"{name:34}{told[name]['inference/milliseconds']:8.1f} {more:9.1%}")
    return told


def steps(options: argparse.Namespace) -> Figures:
    """Times whole training steps with the contrastive loss and Adam; GSP also with its zero-shot loss."""
    images = torch.rand(options.batch, 3, options.size, options.size, device=options.device)
    labels = torch.arange(options.batch, device=options.device) // 2
    choices = {
        "GAP": ["method=baseline", "loss=contrastive"],
        "Newton": ["method=gsp", "method.lambda_zs=0"],
        "Newton, zero-shot loss": ["method=gsp"],
    }

    def job(overrides: list[str]) -> Callable[[], None]:
        method = model_of(overrides, options)
        optimizer = method.optimizer_alone()

        def run() -> None:
            optimizer.zero_grad()
            terms = method.compute_terms({"image": images, "label": labels, "index": labels})
            torch.stack(list(terms.values())).sum().backward()
            optimizer.step()

        return run

    times = in_turns({name: job(overrides) for name, overrides in choices.items()}, options.repeats, options.device)
    print(f"\na training step of {options.backbone}, {options.batch} images at {options.size}")
    print(f"{'':34}{'s':>8} {'over GAP':>9}")
    told: Figures = {}
    for name, taken in times.items():
        more = ratio(taken, times["GAP"]) - 1
        told[name] = {"step/seconds": statistics.median(taken), "step/increase": more}
        print(f"{name:34}{told[name]['step/seconds']:8.3f} {more:9.1%}")
    print(f"aim: {AIM:.0%} at most")
    return told


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="of images, in pixels")
    parser.add_argument("--repeats", type=int, default=7)
    out_option(parser)
    device_option(parser)
    options = parser.parse_args()
    if options.batch < 4:
        parser.error("--batch has to be 4 or more, for two classes of two images")
    if options.repeats < 1 or options.size < 32:
        parser.error("--repeats has to be 1 or more, --size 32 or more")
    if options.backbone not in (known := sorted(path.stem for path in (CONF / "backbone").glob("*.yaml"))):
        parser.error(f"--backbone {options.backbone} is unknown: choose one of {', '.join(known)}")
    make_folder(options.out)
    print(f"{options.device}, {torch.get_num_threads()} threads, median of {options.repeats}")
    first, *_ = [alone(*shape, 5 * options.repeats, options.device) for shape in SHAPES]
    told: Figures = {}
    for found in (first, inference(options), steps(options)):
        for name, figures in found.items():
            told.setdefault(name, {}).update(figures)
    write_rows(options.out, told)


if __name__ == "__main__":
    main()
