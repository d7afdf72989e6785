"""Metrics are counted where the embeddings lie: on a GPU, and on a pretended device that a CPU has too."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dml.evaluation import metrics, scores
from dml.evaluation.collecting import Collector
from dml.evaluation.evaluator import Embedded, correlation, score, self_cosine
from dml.evaluation.layout import Layout
from dml.evaluation.metrics import Ranking, evaluate, rank
from dml.evaluation.neighbours import nearest
from dml.evaluation.reidentification import across_cameras, one_image_gallery
from dml.evaluation.scores import TILE, room
from tests.pretended import pretended, there

pytestmark = pytest.mark.usefixtures("one_thread")


def images(n: int = 300, learners: int = 3, classes: int = 40) -> tuple[Tensor, Tensor]:
    """Unit-norm learners `[n,learners,8]` and labels `[n]`; a class has 6 to 8 images, one has 1."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % classes
    labels[-1] = classes
    centres = torch.randn(classes + 1, learners, 8, generator=draw)
    return normalize(centres[labels] + torch.randn(n, learners, 8, generator=draw), dim=-1), labels


def everything(to: Callable[[Tensor], Tensor], *, clustering: bool = True) -> dict[str, Any]:
    """What each function finds in the same images, moved by `to`."""
    learners, labels = images()
    cameras = torch.arange(len(labels)) // 3 % 3
    points, wide = to(learners.flatten(1)), to(learners)
    labels, cameras = to(labels), to(cameras)
    apart = {"gallery": points[100:], "gallery_labels": labels[100:]}
    large = to(torch.arange(300) % 2)
    embedded = Embedded(wide, labels, to(torch.arange(300)))
    layout = Layout.of(labels)

    def retrieval(queries: Tensor, _: Tensor | None) -> dict[str, float]:
        return evaluate(queries, layout, clustering=False)

    return {
        "evaluate": evaluate(points, labels, clustering=clustering),
        "rank": rank(points, labels),
        "rank of large classes": rank(points, large),
        "rank of a gallery": rank(points[:100], labels[:100], **apart),
        "nearest": nearest(points, k=5),
        "cameras": across_cameras(
            points[:100], labels[:100], cameras[:100], **apart, gallery_cameras=cameras[100:], ks=(1,)
        ),
        "one image": one_image_gallery(points, labels, draws=2),
        "score": score(embedded, None, retrieval, groups={"first": slice(0, 2)}, final=True),
        "correlation": correlation(wide),
        "self cosine": self_cosine(wide),
    }


def assert_close(found: Any, expected: Any, name: str) -> None:
    if isinstance(expected, Ranking):
        found, expected = vars(found), vars(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key in expected:
            assert_close(found[key], expected[key], f"{name} {key}")
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_everything_is_computed_on_one_device() -> None:
    expected = everything(lambda values: values, clustering=False)
    with pretended():
        found = everything(there, clustering=False)
    assert_close(found, expected, "")


def test_what_mixes_devices_is_seen() -> None:
    """The test above can fail: labels that stayed behind, and an index."""
    with pretended(), pytest.raises(AssertionError, match="mixes devices"):
        there(torch.arange(3)) + torch.arange(3)
    with pretended(), pytest.raises(AssertionError, match="mixes devices"):
        there(torch.arange(3))[torch.tensor([0, 1])]


def test_a_ranking_leaves_the_device_at_its_end() -> None:
    points, labels = torch.randn(3 * TILE, 4), torch.arange(3 * TILE) // 4
    with pretended() as one:
        rank(there(points), there(labels), block=TILE)
    with pretended() as blocks:
        rank(there(points), there(labels), block=3 * TILE)
    results = 2 + len(rank(points, labels).values)  # best ranks, positives, and each metric
    assert len(one.left) == len(blocks.left) == results


def test_collected_embeddings_stay_where_they_were_made() -> None:
    learners, labels = images(12)
    with pretended() as mode:
        collector = Collector()
        for rows in ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 0, 0]):
            collector.update(*(there(x[rows]) for x in (learners, labels, torch.arange(12))))
        embedded = collector.embedded()
        part = embedded.take(np.array([3, 7]))
        assert not mode.left
        here = part.cpu()
    assert embedded.embeddings.device.type == embedded.rows.device.type == "meta"
    assert here.embeddings.device.type == "cpu"
    assert torch.equal(here.embeddings, learners[[3, 7]])
    assert here.rows.tolist() == [3, 7]


def test_each_image_is_collected_once_in_the_order_of_rows() -> None:
    learners, labels = images(12)
    rows = torch.tensor([7, 3, 3, 0, 7])
    collector = Collector()
    collector.update(learners[rows], labels[rows], rows)
    embedded = collector.embedded()
    assert embedded.rows.tolist() == [0, 3, 7]
    assert torch.equal(embedded.embeddings, learners[[0, 3, 7]])


def test_blocks_follow_the_free_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room(torch.device("cpu"), 4000) == TILE
    for free, expected in ((0, TILE), (4 * 4000 * (3 * TILE + 1), 3 * TILE), (10**15, scores.MOST)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 2 * free))
        assert room(torch.device("cuda"), 4000) == expected


@pytest.mark.parametrize("classes", [2, 100])
def test_little_memory_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, classes: int) -> None:
    learners, labels = images(5 * TILE + 3)[0].flatten(1), torch.arange(5 * TILE + 3) % classes
    expected = vars(rank(learners, labels))
    for size in (3 * TILE, scores.MOST):
        asked: list[int] = []
        monkeypatch.setattr(metrics, "room", lambda _, of_query, size=size, asked=asked: asked.append(of_query) or size)
        for name, values in vars(rank(learners, labels)).items():
            np.testing.assert_equal(values, expected[name], err_msg=name)
        largest = int(np.bincount(labels).max())
        assert asked == [4 * len(labels) + 64 * largest]  # beside the scores, what is held of the positives


@pytest.mark.parametrize("block", [2 * TILE, 8 * TILE, 64 * TILE])
def test_a_block_changes_no_bit_where_classes_differ_in_size(block: int) -> None:
    """The longest class of a block must not decide in which order precisions are added."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(50), torch.randint(2, 39, (50,), generator=generator))
    centres = torch.randn(50, 16, generator=generator)
    learners = centres[labels] + 0.6 * torch.randn(len(labels), 16, generator=generator)
    expected = vars(rank(learners, labels))
    for name, values in vars(rank(learners, labels, block=block)).items():
        np.testing.assert_equal(values, expected[name], err_msg=name)


@pytest.mark.gpu
def test_everything_on_a_gpu_is_that_on_the_cpu() -> None:
    """`evaluate` with clustering, rankings, cameras, a gallery of one image each, learners' figures."""
    assert_close(everything(lambda values: values.cuda()), everything(lambda values: values), "")


@pytest.mark.gpu
def test_ties_on_a_gpu_are_those_on_the_cpu() -> None:
    """Small integers: many different embeddings at the same distance, and a mean that is exact. A GPU adds up the
    precisions of MAP@R in another order."""
    points = torch.randint(-2, 3, (512, 5), generator=torch.Generator().manual_seed(0)).float()
    for classes in (2, 128):
        labels = torch.arange(512) % classes
        found, expected = rank(points.cuda(), labels), rank(points, labels)
        np.testing.assert_equal(found.best_rank, expected.best_rank)
        np.testing.assert_equal(found.positives, expected.positives)
        assert found.values.keys() == expected.values.keys()
        for metric, values in expected.values.items():
            np.testing.assert_allclose(found.values[metric], values, rtol=1e-14, err_msg=metric)


@pytest.mark.gpu
def test_a_block_changes_no_bit_on_a_gpu() -> None:
    points, labels = torch.randn(5 * TILE + 7, 33).cuda(), torch.arange(5 * TILE + 7) // 5
    found, expected = rank(points, labels, block=1), rank(points, labels)
    for name, values in vars(expected).items():
        np.testing.assert_equal(vars(found)[name], values, err_msg=name)
