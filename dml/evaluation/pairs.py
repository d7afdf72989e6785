"""Verification by a threshold: exact error rates over all pairs of some images, without holding the pairs.

N images, D width, C classes, G groups of classes, b bins.

Similarities are the float32 scalar products of embeddings, which are cosines for unit vectors. A pair matches if its
similarity is at least the threshold. FMR, the false match rate, is the share of the pairs of different classes that
match. FNMR, the false non-match rate, is the share of the pairs of one class that do not (ISO/IEC 19795-1, section 4).

Quantiles of N^2 / 2 similarities are exact here, and nothing is sorted. The 32 bits of a float32 value can be mapped to
integers in the order of the values. A first pass counts pairs by the upper 20 bits; a second one counts by the lower 12
bits in the bin where the wanted quantile lies. Each pass takes N^2 D / 2 multiply-adds. Whatever N is, memory is
2 x 2^20 counts (16 MiB) and as much for a block and its counts. torch's `kthvalue` and `quantile` would hold and sort
all pairs.
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
from dml.evaluation.interval import interval_of_share
from dml.evaluation.scores import full_precision

UPPER, LOWER = 20, 12  # bits of a similarity that the first and the second pass count by
ROWS, COLUMNS = 512, 2048  # of a block, small enough for similarities and keys to stay in a cache

GROUPS = 2048  # more classes than this are put into so many groups, whose matrix takes 32 MiB


@dataclass(frozen=True)
class Operating:
    """A point on the curve of FMR and FNMR: the threshold with the largest FMR that is not above the one asked for."""

    asked: float
    threshold: float
    fmr: float
    fnmr: float


@dataclass(frozen=True)
class Block:
    """Similarities of a block of pairs, in a buffer that the next block uses again.

    Attributes:
        rows, columns: of the images, which are sorted by label.
        scores: `[r,c]`, the similarities.
        same, different: `[r,c]` bool, which entries are pairs of one class and of different classes. None: all are
            pairs of different classes.
    """

    rows: slice
    columns: slice
    scores: Tensor
    same: Tensor | None = None
    different: Tensor | None = None


class Pairs:
    """All pairs i < j of some images.

    Args:
        embeddings: `[N,D]`, on the device that shall compute.
        labels: `[N]` whole numbers.

    Attributes:
        same, different: the number of pairs of one class and of different classes.
        counts: `[2,2^20]` int64, the number of pairs of different classes (row 0) and of one class (row 1), by the
            upper bits of their similarity.

    Raises:
        UserError: as `dml.evaluation.metrics.rank`; also if there is no pair of one class, or none of different
            classes, or if scalar products could exceed single precision.
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
            raise UserError(
                f"A threshold needs pairs of one class and pairs of different classes, but {lack}: give other images."
            )
        longest = float(torch.linalg.vector_norm(self.points, dim=1, dtype=torch.float64).max())
        if longest**2 > torch.finfo(torch.float32).max:
            raise UserError(f"Products of embeddings of length {longest:.3g} exceed single precision: normalise them.")
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
        """Yields the upper triangle in blocks. Every pass gives the same bits, since its products have the same
        shapes."""
        count, device = len(self.points), self.points.device
        place = torch.arange(count, device=device)
        buffer = self.points.new_empty(ROWS * COLUMNS)
        for start in range(0, count, ROWS):
            rows = slice(start, min(start + ROWS, count))
            mixed = int(self.end[rows.stop - 1])  # only columns before this one can share a class with the rows
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
        """Returns thresholds, FMR and FNMR, `[b]` each, at the edges of all occupied bins; they are exact there.
        Thresholds ascend."""
        used = np.flatnonzero(self.counts.sum(0))
        below = np.concatenate([np.zeros((2, 1), np.int64), self.counts[:, used].cumsum(1)], axis=1)
        edges = np.append(values_at(used << LOWER), np.inf)
        return edges, 1 - below[0] / self.different, below[1] / self.same

    def resolves(self) -> float:
        """Returns the smallest FMR above 0 that these pairs can have."""
        return 1 / self.different

    @full_precision()
    def operating(self, fmrs: Sequence[float]) -> list[Operating]:
        """Finds the thresholds of some FMRs, in a second pass. Each FMR has to be at least `resolves()` and below 1."""
        if not fmrs:
            return []
        # An FMR that is nearly 1 has to leave one pair that does not match: the threshold is above it.
        allowed = [min(math.floor(fmr * self.different * (1 + 1e-12)), self.different - 1) for fmr in fmrs]
        # At most `allowed` pairs of different classes may match. The threshold is just above the largest similarity
        # that must not match.
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
        """Counts the pairs of some bins by their lower bits: for each bin `[2,2^12]`, by kind as in `counts`."""
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
    def at(self, threshold: float) -> "Matches":
        """Counts matches at a threshold by groups of classes, in one more pass.

        If there are more than `GROUPS` classes, chance decides which of them form a group.

        Args:
            threshold: pairs match if their similarity is at least this.
        """
        classes = len(self.sizes)
        groups = min(classes, GROUPS)
        group = np.random.default_rng(0).permutation(classes) % groups if classes > groups else np.arange(classes)
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
    """Errors at a threshold, by groups of classes.

    Attributes:
        missed, same: `[G]` float64, by group: the number of pairs of one class that do not match, and of all pairs of
            one class.
        false, different: `[G,G]` float64, symmetric, by two groups: the number of pairs of different classes that
            match, and of all such pairs. The diagonal has pairs of two classes of one group.
        classes: C, the number of classes. G is C or `GROUPS`, whichever is smaller.
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
        return float(np.triu(self.false).sum() / np.triu(self.different).sum())

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Computes 95 % intervals of `fmr` and `fnmr` over classes, at the given threshold: see `interval_of_share`.

        Their standard errors are those of ratios of sums over classes. For FMR two pairs of classes are correlated if
        they share a class (Fafchamps and Gubert, Journal of Development Economics 2007). A bootstrap of classes takes
        a pair as often as the product of its classes' draws, and comes to intervals up to 1.7 times as wide where
        pairs err one by one, and to far too narrow ones where few match. If there are more than `GROUPS` classes,
        groups take their place.
        """
        groups = len(self.same)
        missed = self.missed - self.fnmr * self.same
        false = self.false - self.fmr * self.different
        alone = float((np.triu(false) ** 2).sum())  # as if all pairs were independent
        # Each group's errors squared hold those of its pairs, of which two groups have each.
        shared = float((false.sum(1) ** 2).sum() - (np.triu(false, 1) ** 2).sum())
        variances = {
            "fmr": max(shared, alone) / np.triu(self.different).sum() ** 2,
            "fnmr": float((missed**2).sum()) / self.same.sum() ** 2,
        }
        return {
            name: interval_of_share(getattr(self, name), (one * groups / (groups - 1)) ** 0.5, groups - 1)
            for name, one in variances.items()
        }


def _keys(block: Block) -> tuple[Tensor, Tensor]:
    """Returns the similarities of pairs of different classes and of pairs of one class, as int32 that sort as the
    values do. It overwrites the block's scores."""
    bits = block.scores.add_(0.0).view(torch.int32)  # adding 0 turns -0 into 0
    keys = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    if block.same is None or block.different is None:
        return keys.flatten(), keys.new_empty(0)
    return keys[block.different], keys[block.same]


def values_at(places: np.ndarray) -> np.ndarray:
    """Returns the float32 values at some places, 0..2^32-1, of the ascending order of all float32 values."""
    keys = (places - (1 << 31)).astype(np.int64)
    bits = np.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    return bits.astype(np.int64).astype(np.uint32).view(np.float32)
