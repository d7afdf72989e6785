"""Memory and time of a training step in pieces (trainer.micro_batch), beside those of the plain step.

    python experiments/bench/micro_batches.py                     # MobileNetV2 at 128 pixels, some minutes on one core
    python experiments/bench/micro_batches.py --device cuda --backbone resnet50 --size 224

The bound of memory: a step keeps the activations of one piece and the outputs of all images. What grows with the batch
is small: the embeddings, the graph of each piece without its tensors (0.4 MiB with MobileNetV2) and the loss's N x N
similarities. The bound of time: a step in pieces passes forward through the network twice and backward once, a plain
step once each. A backward pass takes as long as two forward passes, so a step in pieces should take 4/3 of a plain one.
The aims: from the smallest batch to the largest the peak grows by at most 10 %, not counting the embeddings (4 bytes a
number, counted once), and a step takes at most 1.5 times the plain step of the same batch.

On a CPU the peak is the most memory that the process held during a step (VmHWM) minus what it held before (VmRSS), when
the images were already there. Each step is measured in a fresh process whose C library returns freed memory. On a GPU
the allocator counts. The steps that are timed take turns; ratios are medians of the ratios within a round. Run it on
idle cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from attention import method_of, peak, step_of
from tabulate import tabulate

from dml.bench.rows import device_option
from dml.bench.timing import in_turns, ratio
from dml.configuration.command_line import ending

METHODS = {
    "baseline": ("method=baseline", "loss=multi_similarity"),
    "ABE-4": ("method=abe", "method.M=4"),
}
GROWTH, SLOWER = 0.10, 1.5  # at most

# glibc keeps freed memory; with these settings it gives it back, so that a peak tells what was held at one time.
# Without them, peaks of the same step lie 40 % apart, and those of large batches in no order.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def step(method: str, batch: int, piece: int | None, given: argparse.Namespace) -> Callable[[], None]:
    """Builds a training step of a method.

    Args:
        piece: images of one piece; None: the plain step.
    """
    common = [f"backbone={given.backbone}", f"image_size={given.size}", f"head.dim={given.dim}"]
    made = method_of(*common, *METHODS[method], "backbone.batch_norm=running").to(given.device)
    made.micro_batch = piece
    images = torch.rand(batch, 3, given.size, given.size, device=given.device)
    return step_of(made, images, torch.arange(batch, device=given.device) // 4, given.precision)


def needed(method: str, batch: int, piece: int | None) -> float:
    """Measures the peak memory of a step in a process of its own, in GiB."""
    child = [sys.executable, *sys.argv, "--child", method, str(batch), str(piece or 0)]
    done = subprocess.run(child, check=True, capture_output=True, text=True, env=os.environ | RETURNED)
    return float(done.stdout)


def memory(method: str, given: argparse.Namespace) -> str:
    """Returns the table of peak memory, and by how much the peak grows over the batches."""
    lines, beside = [], []
    for batch in given.batches:
        found = needed(method, batch, given.piece)
        embeddings = 4 * batch * given.dim / 2**30
        beside.append(found - embeddings)
        plain = f"{needed(method, batch, None):.3f}" if batch <= given.plain else ""
        lines.append([method, f"{batch:,}", f"{found:.3f}", f"{embeddings:.4f}", plain])
    titles = [
        "method",
        "batch",
        f"peak in pieces of {given.piece}, GiB",
        "embeddings, GiB",
        "peak of a plain step, GiB",
    ]
    grown = f"{beside[-1] / beside[0] - 1:+.1%} without the embeddings (aim: {GROWTH:+.0%} at most)"
    return f"{tabulate(lines, headers=titles, tablefmt='github', disable_numparse=True)}\n\n{method}: {grown}"


def time(method: str, given: argparse.Namespace) -> str:
    """Times plain steps and steps in pieces in turns, at the batch `--plain`. Returns a sentence."""
    pieces = {"plain": None, "in pieces": given.piece}
    steps = {name: step(method, given.plain, piece, given) for name, piece in pieces.items()}
    times = in_turns(steps, given.rounds, given.device)
    each = {name: 1e3 * statistics.median(taken) / given.plain for name, taken in times.items()}
    slower = ratio(times["in pieces"], times["plain"])
    return (
        f"{method}, batch {given.plain}: {each['plain']:.2f} ms an image plain, {each['in pieces']:.2f} ms in pieces, "
        f"{slower:.2f} times (aim: {SLOWER} at most)"
    )


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="mobilenet_v2")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--size", type=int, default=128, help="of images, in pixels")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--piece", type=int, default=32)
    parser.add_argument("--plain", type=int, default=64, help="largest batch of a plain step, which is timed")
    parser.add_argument("--rounds", type=int, default=5)
    device_option(parser)
    parser.add_argument("--precision", choices=("32", "bf16"), default="32")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        method, batch, piece = given.child
        print(peak(step(method, int(batch), int(piece) or None, given), given.device))
        return
    print(f"{given.backbone} at {given.size}, {given.precision}, {given.device}, {torch.get_num_threads()} threads\n")
    for method in given.methods:
        print(memory(method, given), time(method, given), "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
