"""What methods start from on Cars196: how alike untrained learners are, and what a side loss weighs in the first steps.

    python experiments/bench/starts.py --row ABE-4 method=abe
    python experiments/bench/starts.py --row "DeML(1,8)" method=deml method.I=1 method.J=8 head.dim=512

In the setting of the comparison on Cars196. Before the first step, of some test images drawn at random:

- `untrained/self_cosine`: the mean cosine between two learners' embeddings of one image;
- `untrained/whole`: of DeML with several scales, the share of the images of which the second scale sees all;
- `untrained/side`: the mean side of what it sees, as a share of the image's.

After the first ten steps, of ABE, whose weight is measured in them:

- `side/over_metric`: the gradient of the divergence loss over that of the metric loss, on the learners' outputs. It is
  what a `method.lambda_div` of 1 would give with method.balance=false.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from dml.bench.rows import make_folder, write_rows
from dml.configuration.command_line import ending
from dml.configuration.composition import composed
from dml.data.datamodule import DataModule
from dml.errors import stop
from dml.evaluation.evaluator import self_cosine
from dml.methods.balance import STEPS, Balance
from dml.methods.base import Method, Output
from dml.methods.deml import DeML
from dml.training.build import build

COMMON = ("experiment=comparison_cars196", "trainer.num_workers=0")


@torch.inference_mode()
def untrained(method: Method, data: DataModule, images: int) -> dict[str, float]:
    """Embeds test images with an untrained method. Returns figures by name."""
    rows = np.random.default_rng(0).choice(data.query_rows, min(images, len(data.query_rows)), replace=False)
    found, sides = [], []
    method.eval()
    for part in tqdm(np.array_split(np.sort(rows), -(-len(rows) // 50)), "embedding", leave=False):
        seen = method.normalized(data.test_images(part))
        if isinstance(method, DeML) and method.I > 1:
            outputs, regions, _ = method.walk(seen)
            embeddings = Output(outputs).embeddings
            left, top, right, bottom = regions[0].boxes.double().unbind(1)
            height, width = seen.shape[2:]
            sides.append(torch.maximum((right - left) / width, (bottom - top) / height))
        else:
            embeddings = method.learners(seen).embeddings
        if embeddings.shape[1] > 1:
            found.append(embeddings)
    told = {}
    if found:
        told["untrained/self_cosine"] = self_cosine(torch.cat(found))
    if sides:
        side = torch.cat(sides)
        told |= {"untrained/side": float(side.mean()), "untrained/whole": float((side == 1).double().mean())}
    return told


def weighed(method: Method, data: DataModule, config: DictConfig) -> dict[str, float]:
    """Takes the steps in which a side loss is weighed. Returns what it weighs, if the method has such a loss."""
    balance = getattr(method, "balance", None)
    if not isinstance(balance, Balance):
        return {}
    torch.manual_seed(config.seed)
    optimizer, batches = method.train().optimizer_alone(), iter(data.train_dataloader())
    for _ in tqdm(range(STEPS), "steps", leave=False):
        optimizer.zero_grad()
        torch.stack(list(method.compute_terms(next(batches)).values())).sum().backward()
        optimizer.step()
    return {"side/over_metric": 1 / float(balance.weight)}


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder that metrics.json is written to, with the row's figures")
    parser.add_argument("--row", required=True, help="name of the row in metrics.json")
    parser.add_argument("--images", type=int, default=1000, help="of the test (default: %(default)s)")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of python -m dml.run")
    given = parser.parse_intermixed_args()
    if given.images < 1:
        stop(f"--images={given.images} has to be 1 or more.")
    make_folder(given.out)
    config = composed(*COMMON, *given.options)
    parts = build(config)
    told = untrained(parts.method, parts.data, given.images) | weighed(parts.method, parts.data, config)
    write_rows(given.out, {given.row: told})
    print("\n".join(f"{name}: {value:.4f}" for name, value in told.items()))


if __name__ == "__main__":
    main()
