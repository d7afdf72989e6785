"""Trains rows of GSP's Table 6 on CIFAR Collage and sets what was measured beside what was published.

    python experiments/gsp/table6.py --dry-run                                      # the commands of all rows
    python experiments/gsp/table6.py --rows GAP GSP --losses contrastive --backbones frozen --seeds 0
    python experiments/gsp/table6.py --collect                                      # train nothing

Needs CIFAR-100 and the weights of pretrain.py (see experiment=collage). Every training is a run folder below --out, so
that the same line again trains what is missing, and resumes what was interrupted. Options of `dml.run` that all
trainings share come after --set, as --set trainer.max_steps=1350. Ends with the table, and writes it into table6.json:
the mean of each row's seeds, each training's command, steps, date and machine.
"""

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from dml.command import stop
from dml.files import replace_file

HERE = Path(__file__).resolve().parent


def load() -> dict[str, Any]:
    return yaml.safe_load((HERE / "table6.yaml").read_text())


def command(
    table: dict[str, Any], row: str, loss: str, backbone: str, seed: int, shared: list[str], out: Path
) -> list[str]:
    options = [*table["rows"][row]["options"], *table["losses"][loss], *table["backbones"][backbone], f"seed={seed}"]
    return ["-m", "dml.run", *options, *shared, f"paths.output_dir={folder(out, row, loss, backbone)}.{seed}"]


def folder(out: Path, row: str, loss: str, backbone: str) -> Path:
    """Of the trainings, without `.<seed>`."""
    name = row.replace("+", "_").replace("(", "").replace(")", "").replace(" ", "_")
    return out / f"{name}.{loss}.{backbone}"


def collect(table: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """What the finished runs below `out` measured: a record a row, loss, backbone and number of steps; in percent."""
    found = []
    for row, loss, backbone in product(table["rows"], table["losses"], table["backbones"]):
        runs: dict[int, list[dict[str, Any]]] = {}
        for path in sorted(out.glob(f"{folder(out, row, loss, backbone).name}.*/metrics.json")):
            metrics = json.loads(path.read_text())
            runs.setdefault(int(metrics["run/steps"]), []).append(
                {
                    "seed": int(path.parent.name.rsplit(".", 1)[1]),
                    "map@r": round(100 * metrics["test/map@r"], 3),
                    "recall@1": round(100 * metrics["test/recall@1"], 3),
                    "best_on_test/map@r": round(100 * metrics["best_on_test/map@r"], 3),
                    "untrained/map@r": round(100 * metrics["untrained/map@r"], 3),
                    "date": time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime)),
                    "overrides": [o for o in _overrides(path.parent) if not o.startswith("paths.")],
                }
            )
        for steps, of_steps in sorted(runs.items()):
            values = [run["map@r"] for run in of_steps]
            record = {"row": row, "loss": loss, "backbone": backbone, "steps": steps}
            record |= {
                "published": table["rows"][row]["published"].get(loss),
                "mean": round(statistics.mean(values), 2),
            }
            record |= {"std": round(statistics.stdev(values), 2)} if len(values) > 1 else {}
            found.append(record | {"runs": of_steps})
    return found


def _overrides(run: Path) -> list[str]:
    return yaml.safe_load((run / "overrides.yaml").read_text())


def show(records: list[dict[str, Any]]) -> None:
    title = f"{'CIFAR Collage, MAP@R in %':28}{'loss':13}{'backbone':9}"
    print(f"{title}{'steps':>6}{'published':>11}{'measured':>10}{'std':>7}{'n':>3}")
    for record in records:
        std = f"{record['std']:.2f}" if "std" in record else ""
        published = "" if record["published"] is None else f"{record['published']:.2f}"
        print(
            f"{record['row']:28}{record['loss']:13}{record['backbone']:9}{record['steps']:6}{published:>11}"
            f"{record['mean']:10.2f}{std:>7}{len(record['runs']):3}"
        )


def main() -> None:
    table = load()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(table["rows"]), choices=list(table["rows"]), metavar="ROW")
    parser.add_argument("--losses", nargs="+", default=list(table["losses"]), choices=list(table["losses"]))
    backbones = list(table["backbones"])
    parser.add_argument("--backbones", nargs="+", default=["trained"], choices=backbones, help="default: trained")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="of dml.run, for all trainings")
    parser.add_argument("--out", type=Path, default=Path("runs/table6"))
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--collect", action="store_true", help="train nothing, write table6.json")
    options = parser.parse_args()
    for seed, row, loss, backbone in product(options.seeds, options.rows, options.losses, options.backbones):
        line = command(table, row, loss, backbone, seed, options.set, options.out)
        if options.dry_run:
            print(shlex.join(["python", *line]))
        elif not options.collect and (code := subprocess.run([sys.executable, *line], check=False).returncode):
            raise SystemExit(code)
    if options.dry_run:
        return
    records = collect(table, options.out)
    if not records:
        stop(f"{options.out} holds no finished trainings of this table.")
    machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    replace_file(HERE / "table6.json", json.dumps({"machine": machine, "measured": records}, indent=1) + "\n")
    show(records)


if __name__ == "__main__":
    main()
