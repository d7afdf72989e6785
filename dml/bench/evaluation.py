"""Time of the exact retrieval metrics, beside a search by faiss and the bare matrix product of all embeddings."""

import importlib.util
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dml.bench.results import LEFT_OUT, Figure, Goal, Record, Remark
from dml.bench.running import Task
from dml.bench.timing import in_turns, ratio
from dml.evaluation.metrics import evaluate
from dml.evaluation.scores import TILE

KS = (1, 10, 100, 1000)
GOAL = Goal(1.0, at_most=True)  # seconds, for SOP's test set at 512 dimensions
NOISE = {128: 1.45, 512: 2.35}  # by width, relative to a unit vector: gives a Recall@1 near 0.7 for 60,502 items


def embeddings_like_sop(n: int, dim: int) -> tuple[Tensor, Tensor]:
    """Samples embeddings `[n,dim]` of unit norm and labels `[n]`: shuffled clusters of 2 to 12 items, as SOP has."""
    generator = torch.Generator().manual_seed(0)
    # Most products have few images: the smaller of two draws has a mean of 5.2, classes of SOP's test set of 5.3.
    sizes = torch.randint(2, 13, (2, n), generator=generator).amin(0)
    labels = torch.repeat_interleave(torch.arange(n), sizes)[:n]
    centres = normalize(torch.randn(n, dim, generator=generator))
    noise = NOISE[min(NOISE, key=lambda known: abs(known - dim))] / dim**0.5
    points = normalize(centres[labels] + noise * torch.randn(n, dim, generator=generator))
    shuffle = torch.randperm(n, generator=generator)
    return points[shuffle], labels[shuffle]


def bare_product(points: Tensor) -> None:
    """Computes the product of all embeddings in the same blocks as `evaluate`, and drops the result."""
    strip = points.new_empty(TILE, len(points))
    for block in points.split(TILE):
        torch.mm(block, points.T, out=strip[: len(block)])


def faiss_search(points: Tensor) -> str:
    """Finds the 1001 nearest, as Recall@1000 needs. Returns where: "GPU" if embeddings and faiss have one, or "CPU"."""
    import faiss

    vectors, k = points.cpu().numpy(), min(KS[-1] + 1, len(points))
    on_gpu = points.device.type == "cuda" and hasattr(faiss, "GpuIndexFlatL2") and faiss.get_num_gpus() > 0
    index = (
        faiss.GpuIndexFlatL2(faiss.StandardGpuResources(), vectors.shape[1])
        if on_gpu
        else faiss.IndexFlatL2(vectors.shape[1])
    )
    index.add(vectors)
    index.search(vectors, k)
    return "GPU" if on_gpu else "CPU"


def measure(task: Task) -> Iterator[Record]:
    sizes = task.sizes
    device = sizes.where()
    points, labels = (x.to(device) for x in embeddings_like_sop(sizes.items, sizes.width))
    jobs: dict[str, Callable[[], object]] = {
        "product": lambda: bare_product(points),
        "ours": lambda: evaluate(points, labels, ks=KS, clustering=False),
    }
    said = f"{sizes.items:,} x {sizes.width}"
    times = in_turns(jobs, min(sizes.repeats, 5), device)
    yield Figure(f"{said}, Recall@1 to 1000, R-Precision, MAP@R", statistics.median(times["ours"]), "s", GOAL)
    yield Figure(f"{said}, bare product", statistics.median(times["product"]), "s")
    yield Figure(f"{said}, ours / bare product", ratio(times["ours"], times["product"]))
    if importlib.util.find_spec("faiss") is None:
        yield Remark(LEFT_OUT, "faiss is not installed.")
        return
    where = faiss_search(points)
    taken = in_turns({"faiss": lambda: faiss_search(points)}, 1, device, warm_up=0)["faiss"][0]
    yield Figure(f"{said}, faiss on the {where}, the nearest 1001", taken, "s")
    yield Figure(f"ours / faiss on the {where}", statistics.median(times["ours"]) / taken)
