"""CPU seconds of a training step and of a batch that is embedded, where freed memory is kept and where it is returned.

    python experiments/bench/freed_memory.py                      # MobileNetV2 at 96 pixels, minutes on one core
    python experiments/bench/freed_memory.py --methods abe deml

glibc takes blocks above 32 MiB from the system and returns them when they are freed; `dml.process.keep_freed_memory`,
which every training on a CPU calls, makes it keep them. The bound of what that can save is the time in the system: the
pages of each activation are cleared anew, 4 KiB a fault. It costs memory where freed blocks do not fit what comes next.

Both are measured in fresh processes that take turns, by their CPU time, of which the system's is also shown; ratios are
medians of the ratios within a round. The peak is the process's.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys

import torch
from attention import method_of, step_of
from tabulate import tabulate

from dml.bench.memory import resident
from dml.bench.rows import make_folder, out_option, set_threads, threads_option, write_rows
from dml.bench.timing import ratio
from dml.configuration.command_line import ending
from dml.process import keep_freed_memory

STEPS = 5


def taken() -> tuple[float, float]:
    """Returns the CPU seconds of this process until now: all, and those in the system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_stime


def child(given: argparse.Namespace, method: str, how: str) -> None:
    """Prints CPU seconds of a step and of a batch that is embedded, those in the system, and the peak in MiB."""
    if how == "kept":
        keep_freed_memory()
    options = [f"image_size={given.size}", "head.dim=128", "backbone.batch_norm=running", "loss=multi_similarity"]
    made = method_of(f"backbone={given.backbone}", f"method={method}", *options)
    images, labels = torch.rand(given.batch, 3, given.size, given.size), torch.arange(given.batch) // 4
    step = step_of(made, images, labels, "32")

    def embed() -> None:
        with torch.inference_mode():
            made.embed(images)

    found = []
    for job in (step, embed):
        job()
        before = taken()
        for _ in range(STEPS):
            job()
        found += [(after - start) / STEPS for after, start in zip(taken(), before, strict=True)]
    print(*found, resident("VmHWM") * 1024)


def rounds(given: argparse.Namespace, method: str) -> dict[str, float]:
    """Measures both in turns. Returns figures by name."""
    found: dict[str, list[list[float]]] = {"returned": [], "kept": []}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    for _ in range(given.rounds):
        for how, lines in found.items():
            asked = [sys.executable, *sys.argv, "--child", method, how]
            done = subprocess.run(asked, check=True, capture_output=True, text=True, env=clean)
            lines.append([float(figure) for figure in done.stdout.split()])
    columns = {how: list(zip(*lines, strict=True)) for how, lines in found.items()}
    told: dict[str, float] = {}
    for name, i in (("step", 0), ("step_in_system", 1), ("embedding", 2), ("embedding_in_system", 3), ("peak", 4)):
        told |= {f"{name}/{how}": statistics.median(columns[how][i]) for how in found}
        if i in (0, 2, 4):
            told[f"{name}/kept_over_returned"] = ratio(columns["kept"][i], columns["returned"][i])
    return told


def lines(method: str, told: dict[str, float]) -> list[list[str]]:
    """Returns the lines of a method in the table."""
    return [
        [
            f"{method}, {title}",
            *(f"{told[f'{name}/{how}']:.3g}" for how in ("returned", "kept")),
            f"{told[f'{name}_in_system/returned']:.2g}" if name != "peak" else "",
            f"{told[f'{name}/kept_over_returned']:.2f}",
        ]
        for name, title in (("step", "step"), ("embedding", "embedding"), ("peak", "peak, MiB"))
    ]


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="mobilenet_v2")
    parser.add_argument("--methods", nargs="+", default=["baseline", "abe", "deml"])
    parser.add_argument("--size", type=int, default=96, help="of images, in pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    threads_option(parser)
    out_option(parser)
    given = parser.parse_args()
    set_threads(given.threads)
    if given.child:
        child(given, *given.child)
        return
    make_folder(given.out)
    told = {method: rounds(given, method) for method in given.methods}
    write_rows(given.out, told)
    titles = ("", "returned, CPU s", "kept, CPU s", "of those returned, in the system", "kept / returned")
    print(f"{given.backbone} at {given.size}, batch {given.batch}, {torch.get_num_threads()} threads\n")
    table = [line for method, figures in told.items() for line in lines(method, figures)]
    print(tabulate(table, headers=titles, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
