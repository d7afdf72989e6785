"""Re-identification against a literal loop over queries and ranked images."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from PIL import Image
from torch.nn import functional as F

from dml.analysis.comparison import paired
from dml.data.paths import Paths
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.evaluator import Embedded
from dml.evaluation.identities import AcrossCameras, OneImageGallery
from dml.evaluation.reidentification import across_cameras, one_image_gallery
from dml.evaluation.splits import Split
from dml.training.run import run
from tests.conftest import TINY

pytestmark = pytest.mark.usefixtures("one_thread")


def street(seed: int, queries: int = 40, gallery: int = 150) -> dict[str, np.ndarray]:
    """Identities 1..12 seen by 3 cameras; in the gallery also distractors (0) and junk (-1)."""
    rng = np.random.default_rng(seed)
    return {
        "embeddings": rng.normal(size=(queries, 6)),
        "labels": rng.integers(1, 13, queries),
        "cameras": rng.integers(0, 3, queries),
        "gallery": rng.normal(size=(gallery, 6)),
        "gallery_labels": rng.integers(-1, 13, gallery),
        "gallery_cameras": rng.integers(0, 3, gallery),
    }


def literal(seen: dict[str, np.ndarray], ks: tuple[int, ...]) -> dict[str, float]:
    """The toolkit's loop: down the ranking, junk stepped over."""
    hits: dict[int, list[bool]] = {k: [] for k in ks}
    average, toolkit, without = [], [], 0
    for q, point in enumerate(seen["embeddings"]):
        distance = np.linalg.norm(seen["gallery"] - point, axis=1)
        identity, camera = seen["labels"][q], seen["cameras"][q]
        is_good = (seen["gallery_labels"] == identity) & (seen["gallery_cameras"] != camera)
        is_junk = (seen["gallery_labels"] == -1) | (
            (seen["gallery_labels"] == identity) & (seen["gallery_cameras"] == camera)
        )
        good = int(is_good.sum())
        if good == 0:
            without += 1
            continue
        place = found = 0
        first = None
        area = precisions = old_recall = 0.0
        old_precision = 1.0
        for item in np.lexsort((is_good, distance)):  # of equally near ones the wrong one first
            if is_junk[item]:
                continue
            place += 1
            if is_good[item]:
                found += 1
                first = first or place
                precisions += found / place
            recall, precision = found / good, found / place
            area += (recall - old_recall) * (old_precision + precision) / 2
            old_recall, old_precision = recall, precision
        assert first is not None
        for k in ks:
            hits[k].append(first <= k)
        average.append(precisions / good)
        toolkit.append(area)
    return {f"recall@{k}": float(np.mean(hits[k])) for k in ks} | {
        "map": float(np.mean(average)),
        "map_toolkit": float(np.mean(toolkit)),
        "queries": float(len(seen["labels"])),
        "queries_without_positive": float(without),
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block", [1, 128])
def test_across_cameras_is_the_toolkits_loop(seed: int, block: int) -> None:
    seen = street(seed)
    if seed == 3:  # ties, and queries that nobody else has
        seen["gallery"] = seen["gallery"][np.arange(150) % 6]
        seen["labels"][:3] = 77
    found = across_cameras(**seen, ks=(1, 5, 10), block=block)
    assert found == pytest.approx(literal(seen, (1, 5, 10)), abs=1e-12)


def test_a_ranking_by_hand() -> None:
    """Nearest first: own camera (junk), wrong, right, nobody's (junk), distractor, right: ranks 2 and 4."""
    found = across_cameras(
        np.zeros((1, 1)),
        np.array([7]),
        np.array([1]),
        gallery=np.arange(1.0, 7)[:, None],
        gallery_labels=np.array([7, 8, 7, -1, 0, 7]),
        gallery_cameras=np.array([1, 1, 2, 2, 2, 3]),
        ks=(1, 2),
    )
    assert (found["recall@1"], found["recall@2"]) == (0, 1)
    assert found["map"] == pytest.approx((1 / 2 + 2 / 4) / 2)
    assert found["map_toolkit"] == pytest.approx(((1 / 2 + 0) / 2 + (2 / 4 + 1 / 3) / 2) / 2)


def test_nobody_from_another_camera_is_told() -> None:
    seen = street(0)
    seen["cameras"][:], seen["gallery_cameras"][:] = 1, 1
    with pytest.raises(UserError, match="None of the 40 queries has an image of its identity from another camera"):
        across_cameras(**seen)
    with pytest.raises(UserError, match="gallery_cameras has shape"):
        across_cameras(**seen | {"gallery_cameras": np.zeros(3, int)})


def test_one_image_gallery_is_a_loop_over_draws() -> None:
    rng = np.random.default_rng(0)
    labels = np.concatenate([rng.integers(0, 9, 60), [20]])  # the last is alone in its class
    points = rng.normal(size=(61, 5))
    found = one_image_gallery(points, labels, ks=(1, 3), draws=4, seed=5)
    galleries, ranks, firsts = set(), [], []
    for draw in range(4):
        order = np.random.default_rng([5, draw]).permutation(61)
        chosen = {}
        for image in order:  # the first of each class in a random order
            chosen.setdefault(labels[image], image)
        assert len(chosen) == 10
        galleries.add(tuple(sorted(chosen.values())))
        here = []
        for query in set(range(61)) - set(chosen.values()):
            distance = {c: np.linalg.norm(points[query] - points[image]) for c, image in chosen.items()}
            here.append(1 + sum(distance[c] < distance[labels[query]] for c in chosen))
        assert len(here) == 51
        ranks += here
        firsts.append(np.mean(np.array(here) == 1))
    assert len(galleries) == 4
    assert found["recall@1"] == pytest.approx(np.mean(np.array(ranks) <= 1))
    assert found["recall@3"] == pytest.approx(np.mean(np.array(ranks) <= 3))
    assert found["map"] == pytest.approx(np.mean(1 / np.array(ranks)))
    assert found["std_over_draws"] == pytest.approx(np.std(firsts, ddof=1))
    assert (found["queries"], found["queries_without_positive"]) == (51, 0)


def test_images_that_are_all_alone_are_told() -> None:
    with pytest.raises(UserError, match="Each of the 5 images is alone"):
        one_image_gallery(np.eye(5), np.arange(5))


def market(roles: list[str], cameras: list[int] | None) -> Records:
    names = Paths.of(str(i) for i in range(len(roles)))
    labels = np.array([0 if role == "train" else 1 + i % 2 for i, role in enumerate(roles)])
    where = None if cameras is None else np.array(cameras)
    return Records(
        "m", names, labels, np.array(roles), ["a", "b", "c"], lambda _: Image.new("RGB", (4, 4)), cameras=where
    )


def test_the_protocol_hands_the_cameras_of_the_rows_over() -> None:
    records = market(["train", "query", "query", "gallery", "gallery", "gallery", "gallery"], [9, 0, 0, 0, 1, 2, 1])
    protocol = AcrossCameras(ks=[1], clustering=False)
    split = protocol.split(records)
    points = F.normalize(torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    table = Embedded(points, torch.as_tensor(records.labels[1:]), torch.arange(1, 7))
    figures = protocol.score(table, split, "test", final=True)
    direct = across_cameras(
        points.flatten(1)[:2],
        records.labels[1:3],
        [0, 0],
        gallery=points.flatten(1)[2:],
        gallery_labels=records.labels[3:],
        gallery_cameras=[0, 1, 2, 1],
        ks=(1,),
    )
    assert {f"test/{name}": value for name, value in direct.items()}.items() <= figures.items()
    ranking = protocol.ranking(split, table)
    found = ranking.positives > 0
    assert (ranking.best_rank[found] == 1).mean() == direct["recall@1"]
    assert ranking.values["map"][found].mean() == pytest.approx(direct["map"])
    assert records.subset(np.array([0, 2, 4])).cameras.tolist() == [9, 0, 1]


def test_draws_and_seed_are_the_protocol_s() -> None:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(8).repeat_interleave(4)
    points = F.normalize(torch.randn(8, 4, generator=random)[labels] + torch.randn(32, 4, generator=random), dim=-1)
    embedded = Embedded(points[:, None], labels, torch.arange(32))
    split = Split(np.arange(0), np.arange(32), None)
    found = OneImageGallery(ks=[1, 5], draws=3, seed=5).retrieval(split, embedded, None)(points, None)
    assert found == one_image_gallery(points, labels, ks=[1, 5], draws=3, seed=5)
    assert found != one_image_gallery(points, labels, ks=[1, 5], draws=10, seed=0)


def test_data_without_cameras_or_gallery_is_told() -> None:
    with pytest.raises(UserError, match="m has no cameras: evaluate it with protocol=conventional"):
        AcrossCameras().split(market(["train", "query", "gallery", "gallery"], None))
    with pytest.raises(UserError, match="m has no gallery apart from its queries"):
        AcrossCameras().split(market(["train", "test", "test", "test"], [0, 1, 2, 3]))
    with pytest.raises(UserError, match="is alone in its class"):
        OneImageGallery().split(market(["train", "test", "test"], None))


def two_cameras(**_: object) -> Records:
    """Grey squares of a class's shade, each class before two cameras: a data set for a whole run."""
    labels = np.repeat(np.arange(16), 6)
    roles = np.where(labels < 8, "train", np.where(np.arange(96) % 3 == 0, "query", "gallery"))

    def open_image(row: int) -> Image.Image:
        return Image.new("RGB", (32, 32), (16 * int(labels[row]), 255 - 16 * int(labels[row]), 128 + row % 6))

    names = Paths.of(f"{i}.png" for i in range(96))
    return Records("streets", names, labels, roles, [str(c) for c in range(16)], open_image, cameras=np.arange(96) % 2)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["market1501", "vehicleid"])
def test_a_run_under_the_protocol(configure: Callable[..., DictConfig], tmp_path: Path, protocol: str) -> None:
    data = ["~dataset.classes", "~dataset.images_per_class", "~dataset.size", "~dataset.seed"]
    data += [f"dataset._target_={__name__}.two_cameras"]
    options = [*TINY, *data, "method=dces", "method.K=2", f"protocol={protocol}", "trainer.max_steps=4"]
    metrics = run(configure(*options), [])
    assert 0 <= metrics["learners/mean/map"] <= 1
    assert metrics.get("data/query/images") == (16 if protocol == "market1501" else None)
    assert metrics["test/queries"] == (16 if protocol == "market1501" else 40)
    assert ("test/map_toolkit" in metrics) == (protocol == "market1501")
    if protocol == "market1501":
        for name in ("recall@1", "map"):
            assert metrics[f"test/{name}/low"] <= metrics[f"test/{name}"] <= metrics[f"test/{name}/high"]
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert list(paired([tmp_path / "run"], [tmp_path / "copy"]).values) == ["recall@1", "map"]
