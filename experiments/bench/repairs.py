"""What each repair of a method's start buys: a training with it, and one without it.

    python experiments/bench/repairs.py --row DIABLO --out runs/repairs method=diablo
    python experiments/bench/repairs.py --row "DIABLO, start not scaled" --without start --out runs/other method=diablo

The repairs, and what was there before:

- start: convolutions behind an attention that averages 1/2 or 1/N are scaled by its inverse
  (`dml.models.backbones.start`); before, they stayed as the weights had them;
- dictionary: entries of unit norm that start nearly alike (`dml.models.attention.Dictionary`); before, normal numbers.

A weight of a side loss that is carried over from a paper's loss needs no script: method.balance=false.
The setting is the comparison's on Cars196 at 64 pixels, in batches of 32, for 3,000 steps, with figures of the test
every 500.
`metrics.json` has a row, with the figures of each evaluation by its number, `curve/1/recall@1`; 0 is the untrained
network.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from dml.bench.rows import make_folder, write_rows
from dml.configuration.command_line import ending
from dml.configuration.composition import composed, output_dir
from dml.models.attention import Dictionary
from dml.training.run import run

COMMON = (
    "experiment=comparison_cars196",
    "image_size=64",
    "sampler.batch_size=32",
    "trainer.max_steps=3000",
    "protocol.every=500",
    "report=false",
)
SHOWN = ("recall@1", "map@r")


@contextmanager
def unscaled() -> Iterator[None]:
    """Leaves stages behind an attention as the weights have them."""
    with ExitStack() as stack:
        for method in ("abe", "deml", "diablo"):
            stack.enter_context(patch(f"dml.methods.{method}.enlarge_input"))
        yield


@contextmanager
def normal_entries() -> Iterator[None]:
    """Draws the entries of dictionaries from the normal distribution."""
    made = Dictionary.__init__

    def init(self: Dictionary, *given: Any) -> None:
        made(self, *given)
        nn.init.normal_(self.entries)

    with patch.object(Dictionary, "__init__", init):
        yield


REPAIRS: dict[str, Callable[[], AbstractContextManager[None]]] = {"start": unscaled, "dictionary": normal_entries}


def measured(without: list[str], options: list[str], out: Path) -> dict[str, float]:
    """Trains with some repairs taken back. Returns figure -> value of one row; raises UserError as `run` does."""
    overrides = [*COMMON, *options, output_dir(out / "run")]
    with ExitStack() as stack:
        for name in without:
            stack.enter_context(REPAIRS[name]())
        metrics = run(composed(*overrides), overrides)
    figures = {name: value for name, value in metrics.items() if name.startswith(("model/", "run/"))}
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if f"test/{SHOWN[0]}" in line]
    figures |= {f"curve/{i}/{name}": line[f"test/{name}"] for i, line in enumerate(evaluations) for name in SHOWN}
    return figures


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/repairs"))
    parser.add_argument("--row", required=True, help="name of the row in metrics.json")
    parser.add_argument("--without", action="append", default=[], choices=sorted(REPAIRS), help="a repair to take back")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of python -m dml.run")
    given = parser.parse_intermixed_args()
    make_folder(given.out)
    figures = measured(given.without, given.options, given.out)
    write_rows(given.out, {given.row: figures})
    print("\n".join(f"{name}: {value:.4f}" for name, value in figures.items() if name.startswith("curve/")))


if __name__ == "__main__":
    main()
