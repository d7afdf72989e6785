"""Trains the same run with other instructions of the processor, which add up in another order.

    python experiments/bench/rounding.py --row "AVX2" --instructions avx2
    python experiments/bench/rounding.py --row "the widest" --instructions widest trainer.max_steps=100

torch and the libraries that it calls, oneDNN and MKL, take the widest instructions that a processor has, unless a
variable of each says otherwise. The run is `python -m dml.run method=baseline`, tested every 100 steps. `metrics.json`
has a row, with the figures of each evaluation by its number, `curve/1/recall@1`; 0 is the untrained network.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dml.bench.rows import make_folder, write_rows
from dml.configuration.command_line import ending
from dml.configuration.composition import output_dir
from dml.process import started_from_here
from dml.runs.log import read_metrics

COMMON = ("method=baseline", "protocol.every=100", "report=false")
SHOWN = ("recall@1", "map@r")
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
CHOSEN = {"widest": {}, "avx2": AVX2}


def measured(instructions: str, options: list[str], folder: Path) -> dict[str, float]:
    """Trains in a folder, in a process of its own, since libraries choose when they are loaded. Returns named figures.

    Raises:
        SystemExit: the training failed, with its exit code; it has said why.
    """
    command = [sys.executable, "-m", "dml.run", *COMMON, *options, output_dir(folder)]
    with started_from_here():
        inherited = {name: value for name, value in os.environ.items() if name not in AVX2}
        if code := subprocess.run(command, check=False, env=inherited | CHOSEN[instructions]).returncode:
            sys.exit(code)
    evaluations = [line for line in read_metrics(folder / "metrics.jsonl") if f"test/{SHOWN[0]}" in line]
    return {f"curve/{i}/{name}": line[f"test/{name}"] for i, line in enumerate(evaluations) for name in SHOWN}


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder that metrics.json is written to, with the row's figures")
    parser.add_argument("--row", required=True, help="name of the row in metrics.json")
    parser.add_argument("--instructions", choices=[*CHOSEN], required=True)
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of python -m dml.run")
    given = parser.parse_intermixed_args()
    make_folder(given.out)
    with tempfile.TemporaryDirectory() as folder:
        told = measured(given.instructions, given.options, Path(folder) / "run")
    write_rows(given.out, {given.row: told})
    print("\n".join(f"{name}: {value:.4f}" for name, value in told.items()))


if __name__ == "__main__":
    main()
