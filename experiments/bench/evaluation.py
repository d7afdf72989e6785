"""Time and memory of exact retrieval evaluation beside the bare similarity product and two libraries.

    python experiments/bench/evaluation.py              # the size of the SOP test set, a few minutes on 2 cores
    python experiments/bench/evaluation.py --memory     # peak memory at 512 dimensions against the bound

The bound: to score N queries against N items of D dimensions, an exact method without pruning needs 2 N^2 D
floating-point operations (9.4e11 for 60,502 x 128). It also writes and reads N^2 scores of 4 bytes (14.6 GB) at least
once; small blocks stay in cache. The bare product is that bound in practice. The aims: at most 1.5 times its time, and
less time than faiss takes to find the 1,001 nearest for Recall@1000.

dml gives Recall@1, 10, 100, 1000, R-Precision and MAP@R, pytorch-metric-learning Precision@1, R-Precision and MAP@R.
All contenders run in turn, `--repeats` times, and medians are printed. Run it on idle cores: our evaluation has many
short parallel steps. Where other processes share the cores, its threads wait for each other and lose more time than one
long product does. On a shared machine, `--threads 1` keeps the ratio meaningful.
"""

import argparse
import importlib.util
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from dml.bench.evaluation import KS, bare_product, embeddings_like_sop, faiss_search
from dml.bench.memory import resident
from dml.bench.rows import device_option, make_folder, out_option, set_threads, threads_option, write_rows
from dml.bench.timing import in_turns, ratio
from dml.configuration.command_line import ending
from dml.evaluation.metrics import evaluate

MEMORY_BOUND = 3.0  # GiB


def accuracy_calculator(points: Tensor, labels: Tensor) -> None:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    names = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    AccuracyCalculator(include=names, k="max_bin_count", device=points.device).get_accuracy(points, labels)


def compare(n: int, dim: int, repeats: int, device: torch.device, threads: int | None) -> dict[str, dict[str, float]]:
    """Times all contenders in turns. Returns their figures: contender -> metric -> value."""
    points, labels = (x.to(device) for x in embeddings_like_sop(n, dim))
    figures = evaluate(points, labels, ks=KS, clustering=False)
    print(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    jobs: dict[str, Callable[[], object]] = {
        "bare product": lambda: bare_product(points),
        "dml": lambda: evaluate(points, labels, ks=KS, clustering=False),
    }
    if importlib.util.find_spec("faiss"):
        if threads is not None:
            importlib.import_module("faiss").omp_set_num_threads(threads)  # its OpenMP is not PyTorch's
        jobs["faiss, exact search"] = lambda: faiss_search(points)
        jobs["pytorch-metric-learning"] = lambda: accuracy_calculator(points, labels)
    else:
        print("faiss is not installed. Its search is left out, and pytorch-metric-learning, which needs it, too.")
    times = in_turns(jobs, repeats, device, warm_up=0)
    bare = times["bare product"]
    print(f"\n{n:,} x {dim}, {device}, {torch.get_num_threads()} threads, median of {repeats}")
    told = {}
    for name, taken in times.items():
        told[name] = {"evaluation/seconds": statistics.median(taken), "evaluation/over_product": ratio(taken, bare)}
        print(f"{name:24} {told[name]['evaluation/seconds']:8.2f} s {ratio(taken, bare):7.2f} x the product")
    return told


def peak_memory(n: int, dim: int) -> int:
    """Measures an evaluation in a process of its own. Returns the exit code: 1 if it exceeds the bound, else 0."""
    command = [sys.executable, __file__, "--child", "--n", str(n), "--dim", str(dim)]
    peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"peak memory of the process, {n:,} x {dim} with Recall@1000: {peak:.2f} GiB, bound {MEMORY_BOUND:.2f} GiB")
    return int(peak > MEMORY_BOUND)


@ending()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=60_502, help="items (default: the SOP test set)")
    parser.add_argument("--dim", type=int, help="dimensions (default: 128, with --memory 512)")
    parser.add_argument("--repeats", type=int, default=3)
    device_option(parser)
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    threads_option(parser)
    out_option(parser)
    options = parser.parse_args()
    set_threads(options.threads)
    make_folder(options.out)
    dim = options.dim or (512 if options.memory or options.child else 128)
    if options.memory:
        return peak_memory(options.n, dim)
    if options.child:
        evaluate(*embeddings_like_sop(options.n, dim), ks=KS, clustering=False)
        print(resident("VmHWM"))
        return 0
    write_rows(options.out, compare(options.n, dim, options.repeats, options.device, options.threads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
