"""The figures that a script of experiments/ gives for rows of an experiment, and the options that scripts share."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dml.errors import stop
from dml.files import write_atomically
from dml.process import end_with_parent


def out_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="folder that metrics.json is written to, with the figures of each row")


def threads_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, help="of PyTorch; default: OMP_NUM_THREADS, else one for each core")


def device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=_device, default=torch.device("cpu"), help="cpu or cuda; default: %(default)s")


def _device(word: str) -> torch.device:
    if word not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{word} is neither cpu nor cuda")
    if word == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("there is no GPU here, leave it out")
    return torch.device(word)


def set_threads(threads: int | None) -> None:
    """Sets the threads of PyTorch; a number below 1 ends the process with a sentence."""
    if threads is None:
        return
    if threads < 1:
        stop(f"--threads={threads} has to be 1 or more.")
    torch.set_num_threads(threads)


def make_folder(out: Path | None) -> None:
    """Makes the folder of `--out`. One that cannot be made ends the process with a sentence.

    The script ends with `dml.experiment` from then on, if that started it.
    """
    end_with_parent()
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"--out={out} cannot be written ({error.strerror}): choose a folder.")


def write_rows(out: Path | None, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes figures to `metrics.json` in the folder of `--out`, if there is one: row -> metric -> value."""
    if out is not None:
        write_atomically(out / "metrics.json", json.dumps(rows, indent=1) + "\n")
