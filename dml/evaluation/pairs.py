"""All pairs of some images by their similarity: which are of one class, above which similarity, without holding them.

N images, D width, C classes, G groups of classes, b bins.

Similarities are the float32 scalar products of embeddings: cosines, of unit vectors. A pair matches where its
similarity is at least the threshold. FMR, false match rate: the share of the pairs of different classes that match;
FNMR, false non-match rate: the share of the pairs of one class that do not (ISO/IEC 19795-1, section 4).

Exact order statistics without sorting N^2 / 2 numbers: float32 has 2^32 values, whose bits can be put in their order. A
first pass counts pairs by the upper 20 bits, a second one by the lower 12 where the wanted one lies. Each pass takes
N^2 D / 2 multiply-adds; the state is 2 x 2^20 counts (16 MiB), and as much for a block and its counts, whatever N. Of
what torch has, `kthvalue` and `quantile` hold and sort all.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dml.errors import UserError
from dml.evaluation.inputs import as_embeddings, as_labels
from dml.evaluation.scores import full_precision

UPPER, LOWER = 20, 12  # bits
ROWS, COLUMNS = 512, 2048  # of a block: similarities and keys stay in a cache

GROUPS = 2048  # of classes that are drawn together, where there are more: a matrix of them takes 32 MiB
BATCH = 500  # draws of a bootstrap at a time


@dataclass(frozen=True)
class Operating:
    """A point on the curve: the threshold at which the FMR is the largest that is not above the one asked for."""

    asked: float
    threshold: float
    fmr: float
    fnmr: float


@dataclass(frozen=True)
class Block:
    """Similarities `[r,c]` of rows against columns, places in the order of labels, in a buffer that the next block uses
    again; `same` and `different [r,c]` bool say which are pairs of either kind; None: all are of different classes."""

    rows: slice
    columns: slice
    scores: Tensor
    same: Tensor | None = None
    different: Tensor | None = None


class Pairs:
    """All pairs i < j of some images.

    Args:
        embeddings: `[N,D]`, on the device that is to compute.
        labels: `[N]` whole numbers.

    Attributes:
        same, different: how many pairs there are of one class and of two.
        counts: `[2,2^20]` int64, pairs of different classes and of one, by the upper bits of their similarity.

    Raises:
        UserError: as `dml.evaluation.metrics.rank`; no pair of one class, or none of two.
    """

    def __init__(self, embeddings: ArrayLike | Tensor, labels: ArrayLike | Tensor) -> None:
        points = as_embeddings(embeddings, "embeddings")
        classes, order = as_labels(labels, points, "labels").sort(stable=True)
        self.points = points[order].float()
        _, self.classes, sizes = classes.unique_consecutive(return_inverse=True, return_counts=True)
        self.sizes = sizes.cpu().numpy()
        self.end = sizes.cumsum(0)[self.classes]  # where the run of an image's class ends
        self.same = int((self.sizes * (self.sizes - 1) // 2).sum())
        self.different = len(points) * (len(points) - 1) // 2 - self.same
        if not self.same or not self.different:
            lack = "no two images are of one class" if not self.same else "all images are of one class"
            raise UserError(f"A threshold tells pairs of one class from pairs of two: here {lack}.")
        self.counts = self._count_upper()

    @full_precision()
    def _count_upper(self) -> np.ndarray:
        counts = torch.zeros(2, 1 << UPPER, dtype=torch.int64, device=self.points.device)
        for block in self._blocks():
            for kind, keys in enumerate(_keys(block)):
                upper = keys.bitwise_right_shift_(LOWER).add_(1 << UPPER - 1)
                if len(upper):
                    counts[kind] += torch.bincount(upper, minlength=1 << UPPER)
        return counts.cpu().numpy()

    def _blocks(self) -> Iterator[Block]:
        """The upper triangle. Every pass computes the same bits: its products have the same shapes."""
        count, device = len(self.points), self.points.device
        place = torch.arange(count, device=device)
        buffer = self.points.new_empty(ROWS * COLUMNS)
        for start in range(0, count, ROWS):
            rows = slice(start, min(start + ROWS, count))
            mixed = int(self.end[rows.stop - 1])  # columns before are of the rows' own classes too
            for first, stop in ((start, mixed), (mixed, count)):
                for at in range(first, stop, COLUMNS):
                    columns = slice(at, min(at + COLUMNS, stop))
                    shape = rows.stop - start, columns.stop - at
                    scores = buffer[: shape[0] * shape[1]].view(shape)
                    torch.mm(self.points[rows], self.points[columns].T, out=scores)
                    if at >= mixed:
                        yield Block(rows, columns, scores)
                        continue
                    later = place[rows, None] < place[columns]
                    equal = self.classes[rows, None] == self.classes[columns]
                    yield Block(rows, columns, scores, later & equal, later & ~equal)

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Thresholds, FMR and FNMR `[b]` at all edges between occupied bins, exact there; thresholds ascend."""
        used = np.flatnonzero(self.counts.sum(0))
        below = np.concatenate([np.zeros((2, 1), np.int64), self.counts[:, used].cumsum(1)], axis=1)
        edges = np.append(values_at(used << LOWER), np.inf)
        return edges, 1 - below[0] / self.different, below[1] / self.same

    def resolves(self) -> float:
        """The smallest FMR above 0."""
        return 1 / self.different

    @full_precision()
    def operating(self, fmrs: Sequence[float]) -> list[Operating]:
        """The points of some FMRs, each in 0..1 and at least `resolves()`: a second pass."""
        allowed = [math.floor(fmr * self.different * (1 + 1e-12)) for fmr in fmrs]
        # The largest similarity that must not match: so many pairs of different classes are above it at most.
        above = self.counts[0][::-1].cumsum()
        bins = [(1 << UPPER) - 1 - int(np.searchsorted(above, one, side="right")) for one in allowed]
        lower = self._count_lower(sorted(set(bins)))
        found = []
        for fmr, one, at in zip(fmrs, allowed, bins, strict=True):
            before = self.counts[:, at + 1 :].sum(1)
            within = lower[at][:, ::-1].cumsum(1)  # at or above a value of the bin
            place = int(np.searchsorted(within[0], one - before[0], side="right"))
            matching = before + (within[:, place - 1] if place else 0)
            forbidden = values_at(np.array([(at << LOWER) + (1 << LOWER) - 1 - place]))[0]
            threshold = np.nextafter(forbidden, np.float32(np.inf))
            rates = float(matching[0] / self.different), float(1 - matching[1] / self.same)
            found.append(Operating(fmr, float(threshold), *rates))
        return found

    def _count_lower(self, bins: Sequence[int]) -> dict[int, np.ndarray]:
        """By bin `[2,2^12]`, its pairs of either kind by their lower bits."""
        counts = {at: torch.zeros(2, 1 << LOWER, dtype=torch.int64, device=self.points.device) for at in bins}
        for block in self._blocks():
            for kind, keys in enumerate(_keys(block)):
                keys = keys[keys >= (bins[0] << LOWER) - (1 << 31)]  # few, where a small FMR is asked for
                upper = (keys >> LOWER) + (1 << UPPER - 1)
                for at, of_bin in counts.items():
                    lower = keys[upper == at] & ((1 << LOWER) - 1)
                    of_bin[kind] += torch.bincount(lower, minlength=1 << LOWER)
        return {at: of_bin.cpu().numpy() for at, of_bin in counts.items()}

    @full_precision()
    def at(self, threshold: float, seed: int = 0) -> "Matches":
        """Who matches at a threshold, by group of classes: one more pass.

        Args:
            seed: which classes are in a group, where there are more than `GROUPS`.
        """
        classes = len(self.sizes)
        groups = min(classes, GROUPS)
        group = np.random.default_rng(seed).permutation(classes) % groups if classes > groups else np.arange(classes)
        of_image = torch.as_tensor(group, device=self.points.device)[self.classes]
        false = torch.zeros(groups * groups, dtype=torch.int64, device=self.points.device)
        matching = torch.zeros(groups, dtype=torch.int64, device=self.points.device)
        for block in self._blocks():
            match = block.scores >= threshold
            wrong = match if block.different is None else match & block.different
            row, column = wrong.nonzero(as_tuple=True)
            row += block.rows.start
            column += block.columns.start
            places = of_image[row].mul_(groups).add_(of_image[column])
            false.index_add_(0, places, torch.ones_like(places))
            if block.same is not None:
                right = (match & block.same).sum(1)
                matching.index_add_(0, of_image[block.rows], right)
        counts = false.view(groups, groups).cpu().numpy()
        images = np.bincount(group, self.sizes, groups)
        different = np.outer(images, images)
        np.fill_diagonal(different, (images**2 - np.bincount(group, self.sizes.astype(float) ** 2, groups)) / 2)
        mirrored = counts + counts.T
        np.fill_diagonal(mirrored, counts.diagonal())
        same = np.bincount(group, self.sizes * (self.sizes - 1) / 2, groups)
        return Matches(same - matching.cpu().numpy(), same, mirrored.astype(float), different.astype(float), classes)


@dataclass(frozen=True)
class Matches:
    """Mistakes at a threshold, by group of classes.

    Attributes:
        missed, same: `[G]` float64, pairs of one class of the group that do not match, and all of these.
        false, different: `[G,G]` float64, symmetric, pairs of classes of two groups that match, and all of these; on
            the diagonal those of two classes of one group.
        classes: C; G is the smaller one of it and `GROUPS`.
    """

    missed: np.ndarray
    same: np.ndarray
    false: np.ndarray
    different: np.ndarray
    classes: int

    @property
    def fnmr(self) -> float:
        return float(self.missed.sum() / self.same.sum())

    @property
    def fmr(self) -> float:
        ones = np.ones((1, len(self.same)))
        return float((_drawn(self.false, ones) / _drawn(self.different, ones))[0])

    def intervals(self, draws: int, seed: int = 0, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Percentile intervals of `fmr` and `fnmr` by a bootstrap over classes, the threshold being what it is.

        A class that is drawn w times brings its images w times. A pair of two classes is there as often as the product
        of their two numbers; copies of one class are no pair of two. More than `GROUPS` classes are drawn by groups.
        """
        random, groups = np.random.default_rng(seed), len(self.same)
        found: dict[str, list[np.ndarray]] = {"fmr": [], "fnmr": []}
        for start in range(0, draws, BATCH):
            times = random.multinomial(groups, np.full(groups, 1 / groups), min(BATCH, draws - start)).astype(float)
            with np.errstate(invalid="ignore", divide="ignore"):  # a draw may have no pair of a kind
                found["fnmr"].append((times @ self.missed) / (times @ self.same))
                found["fmr"].append(_drawn(self.false, times) / _drawn(self.different, times))
        tail = (1 - level) / 2
        ends = {name: np.nanquantile(np.concatenate(of), [tail, 1 - tail]).tolist() for name, of in found.items()}
        return {name: (low, high) for name, (low, high) in ends.items()}


def _drawn(counts: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Pairs `[G,G]` of groups that are there `times [n,G]` times -> `[n]`."""
    own = counts.diagonal()
    return ((times @ counts * times).sum(1) - times**2 @ own) / 2 + times @ own


def _keys(block: Block) -> tuple[Tensor, Tensor]:
    """Similarities of the pairs of different classes and of those of one, as int32 in the order of their values; the
    block is used up."""
    bits = block.scores.add_(0.0).view(torch.int32)  # + 0 for -0, which equals it
    keys = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    if block.same is None or block.different is None:
        return keys.flatten(), keys.new_empty(0)
    return keys[block.different], keys[block.same]


def values_at(places: np.ndarray) -> np.ndarray:
    """Places 0..2^32-1 in the order of float32 values -> the values."""
    keys = (places - (1 << 31)).astype(np.int64)
    bits = np.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    return bits.astype(np.int64).astype(np.uint32).view(np.float32)
