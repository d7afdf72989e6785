"""Time and memory of exact retrieval evaluation beside the bare similarity product and two libraries.

    python experiments/bench/evaluation.py              # the size of the SOP test set, a few minutes on 2 cores
    python experiments/bench/evaluation.py --memory     # peak memory at 512 dimensions against the bound

The bound: N queries against N items of D dimensions are 2 N^2 D floating-point operations that no exact method
without pruning avoids (9.4e11 for 60,502 x 128), and N^2 scores of 4 bytes (14.6 GB) that have to be written and
read at least once, in cache where a block is small enough. The bare product is that bound in practice; the aims are
1.5 times it at most, and less time than faiss takes to find the 1,001 nearest for Recall@1000.

All contenders run in turn, `--repeats` times, and medians are printed. Run it on idle cores: ours has many short
parallel steps, whose threads wait for one another where other processes share the cores, and loses more than one
long product does. On a shared machine OMP_NUM_THREADS=1 keeps the ratio meaningful.
"""

import argparse
import importlib.util
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dml.evaluation.metrics import evaluate
from dml.evaluation.scores import TILE

KS = (1, 10, 100, 1000)
MEMORY_BOUND = 3.0  # GiB
NOISE = {128: 1.45, 512: 2.35}  # of a unit vector: Recall@1 near 0.7 for 60,502 items


def embeddings_like_sop(n: int, dim: int) -> tuple[Tensor, Tensor]:
    """Unit-norm clusters of 2 to 12 items like SOP's products, shuffled: `[n,dim]`, `[n]`."""
    generator = torch.Generator().manual_seed(0)
    # Most products have few images: the smaller of two draws has mean 5.2, SOP's test set 5.3.
    sizes = torch.randint(2, 13, (2, n), generator=generator).amin(0)
    labels = torch.repeat_interleave(torch.arange(n), sizes)[:n]
    centres = normalize(torch.randn(n, dim, generator=generator))
    noise = NOISE[min(NOISE, key=lambda known: abs(known - dim))] / dim**0.5
    points = normalize(centres[labels] + noise * torch.randn(n, dim, generator=generator))
    shuffle = torch.randperm(n, generator=generator)
    return points[shuffle], labels[shuffle]


def bare_product(points: Tensor) -> None:
    """The same blocks as ours, the result dropped."""
    strip = points.new_empty(TILE, len(points))
    for block in points.split(TILE):
        torch.mm(block, points.T, out=strip[: len(block)])


def faiss_search(points: Tensor) -> None:
    import faiss

    vectors = points.cpu().numpy()
    index = faiss.IndexFlatL2(vectors.shape[1])
    index.add(vectors)
    index.search(vectors, KS[-1] + 1)


def accuracy_calculator(points: Tensor, labels: Tensor) -> None:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    names = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    AccuracyCalculator(include=names, k="max_bin_count", device=points.device).get_accuracy(points, labels)


def seconds(job: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    job()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def compare(n: int, dim: int, repeats: int, device: torch.device) -> None:
    points, labels = (x.to(device) for x in embeddings_like_sop(n, dim))
    figures = evaluate(points, labels, ks=KS, clustering=False)
    print(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    jobs: dict[str, Callable[[], object]] = {
        "bare blockwise product": lambda: bare_product(points),
        "dml: Recall@1..1000, RP, MAP@R": lambda: evaluate(points, labels, ks=KS, clustering=False),
    }
    if importlib.util.find_spec("faiss"):
        jobs["faiss IndexFlatL2, top 1001"] = lambda: faiss_search(points)
        jobs["pytorch-metric-learning: P@1, RP, MAP@R"] = lambda: accuracy_calculator(points, labels)
    else:
        print("faiss is not installed: its search and pytorch-metric-learning, which needs it, are left out")
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            times[name].append(seconds(job, device))
    bare = times["bare blockwise product"]
    print(f"\n{n:,} x {dim}, {device}, {torch.get_num_threads()} threads, median of {repeats}")
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, bare, strict=True))
        print(f"{name:42} {statistics.median(taken):8.2f} s {ratio:7.2f} x the product")


def peak_memory(n: int, dim: int) -> int:
    """Exit code of the check: 1 where the evaluation in a process of its own exceeds the bound."""
    command = [sys.executable, __file__, "--child", "--n", str(n), "--dim", str(dim)]
    peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"peak memory of the process, {n:,} x {dim} with Recall@1000: {peak:.2f} GiB, bound {MEMORY_BOUND:.2f} GiB")
    return int(peak > MEMORY_BOUND)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=60_502, help="items (default: the SOP test set)")
    parser.add_argument("--dim", type=int, help="dimensions (default: 128, with --memory 512)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    dim = options.dim or (512 if options.memory or options.child else 128)
    if options.memory:
        return peak_memory(options.n, dim)
    if options.child:
        evaluate(*embeddings_like_sop(options.n, dim), ks=KS, clustering=False)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return 0
    compare(options.n, dim, options.repeats, options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
