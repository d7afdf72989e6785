"""dataset.cache=features: the figures of a run through the frozen stages, which see each image once."""

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig

from dml.configuration.composition import composed
from dml.data.datamodule import DataModule
from dml.data.features import KeptFeatures
from dml.data.loading import Copies
from dml.errors import UserError
from dml.models.backbones.stem import Stem
from dml.training.build import Parts, build
from dml.training.run import run
from tests.conftest import TINY
from tests.data.test_cache import photographs
from tests.data.test_on_device import attached

pytestmark = pytest.mark.usefixtures("one_thread")

Configure = Callable[..., DictConfig]
VIT = ["backbone=timm", "backbone.model_name=test_vit", "backbone.weights=none"]
STILL = ["transform=unchanged", "dataset.cache=features"]


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    photographs(tmp_path / "data", classes=8)
    tiny = [option for option in TINY if not option.startswith("dataset")]
    common = ["dataset=folder", f"dataset.root={tmp_path / 'data'}", "backbone=small", *tiny]
    return [*common, "sampler.batch_size=8", "trainer.max_steps=4", "protocol.every=2"]


def stem_of(parts: Parts) -> Stem:
    return Stem.of(parts.method.normalize, parts.method.openings())


def stored(config: DictConfig) -> tuple[Parts, DataModule]:
    """The parts of a run, whose features are there."""
    parts = build(config)
    parts.method.eval()
    parts.data.store_features(stem_of(parts), torch.device("cpu"), torch.no_grad)
    return parts, attached(parts.data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [
        ["method=baseline", "backbone.train=none"],
        ["method=abe", "method.M=2", "backbone.train=last:2"],
        ["method=mtails", "method.M=2", "method.branch=block3", "backbone.train=last:2"],
        ["method=deml", "method.I=1", "method.J=2", "backbone.train=last:1"],
        ["method=dces", "method.K=2", "backbone.train=last:1"],
        ["method=diablo", "method.N=2", "backbone.train=last:2", *VIT],
        ["method=gsp", "head.iterations=3", "backbone.train=none", *VIT],
    ],
    ids=lambda choice: "-".join(choice[:1]),
)
def test_figures_are_those_without_it(
    configure: Configure, tmp_path: Path, options: list[str], choice: list[str]
) -> None:
    def trained(cache: str) -> tuple[dict[str, float], dict[str, Any]]:
        place = tmp_path / cache
        these = [*options, *choice, "transform=unchanged", f"dataset.cache={cache}", f"paths.output_dir={place}"]
        metrics = run(configure(*these), these)
        state = torch.load(place / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
        return metrics, state

    (kept, weights), (plain, others) = trained("features"), trained("none")
    assert [name for name in plain if name.startswith("test/") and kept[name] != pytest.approx(plain[name])] == []
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("network", [["backbone=small"], VIT])
def test_batches_are_what_the_stem_makes_of_the_images(
    configure: Configure, options: list[str], network: list[str]
) -> None:
    options = [*options, *network, "backbone.train=last:1"]
    _, data = stored(configure(*options, *STILL))
    plain = build(configure(*options, "transform=unchanged"))
    stem, images = stem_of(plain), attached(plain.data)
    with torch.no_grad():
        for found, seen in islice(zip(data.train_dataloader(), images.train_dataloader(), strict=False), 3):
            torch.testing.assert_close(found["image"], stem.features(seen["image"]))
            assert torch.equal(found["index"], seen["index"])
        for found, seen in zip(
            data.eval_dataloader(data.eval_rows), images.eval_dataloader(data.eval_rows), strict=True
        ):
            learners = plain.method.eval().embed(found["image"])
            torch.testing.assert_close(learners, plain.method.embed(seen["image"]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_copies_are_drawn_once_and_each_is_used(configure: Configure, options: list[str]) -> None:
    options = [*options, "backbone.train=none", "transform=resized_crop", "transform.copies=3"]
    parts, data = stored(configure(*options, "dataset.cache=features"))
    rows = np.sort(parts.records.train_rows)
    images = Copies(rows, 3, parts.records, data.train_transform, None, torch.device("cpu"), None, None)
    stem, used = stem_of(parts), set()
    for batch in islice(data.train_dataloader(), 12):
        for row, features in zip(batch["index"].tolist(), batch["image"], strict=True):
            at = int(rows.searchsorted(row)) * 3
            drawn = torch.stack([images[at + copy]["image"] for copy in range(3)]) / 255
            apart = (stem.features(drawn) - features).abs().amax((1, 2))
            assert apart.min() < 1e-5
            used.add((row, int(apart.argmin())))
    assert {copy for _, copy in used} == {0, 1, 2}
    again = next(iter(attached(data).train_dataloader()))["image"]
    assert torch.equal(again, next(iter(data.train_dataloader()))["image"])


@pytest.mark.slow
def test_it_is_computed_once_and_goes_on_after_a_kill(
    configure: Configure, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*options, "backbone.train=none", *STILL, "protocol.batch_size=8"]
    seen: list[int] = []
    compute = Stem.features

    def counted(self: Stem, images: torch.Tensor) -> Any:
        seen.append(len(images))
        if len(seen) == stop:
            raise KeyboardInterrupt
        return compute(self, images)

    monkeypatch.setattr(Stem, "features", counted)
    stop = 4  # a blank image, and two batches before
    with pytest.raises(KeyboardInterrupt):
        stored(configure(*options))
    (folder,) = (tmp_path / "cache").glob("features-*")
    half = (folder / "features.part").read_bytes()
    stop = 0
    seen.clear()
    stored(configure(*options))
    assert sum(seen) == 1 + 48 - 16
    whole = (folder / "features").read_bytes()
    assert whole[: len(half)] == half
    seen.clear()
    stored(configure(*options, "lr=0.5"))
    assert not seen
    (folder / "features").write_bytes(whole[:100])  # damaged: it is made again
    stored(configure(*options))
    assert (folder / "features").read_bytes() == whole
    os.utime(next((tmp_path / "data").rglob("*.jpg")), (1, 1))  # another file
    stored(configure(*options))
    assert len(list((tmp_path / "cache").glob("features-*"))) == 2


@pytest.mark.slow
def test_other_weights_are_other_features(configure: Configure, options: list[str]) -> None:
    first, second = (stem_of(build(configure(*options, "backbone.train=none", f"seed={seed}"))) for seed in (0, 1))
    assert first.fingerprint() != second.fingerprint()
    shorter = stem_of(build(configure(*options, "backbone.train=last:1")))
    assert shorter.fingerprint() != first.fingerprint()
    assert stem_of(build(configure(*options, "backbone.train=none"))).fingerprint() == first.fingerprint()


def test_another_precision_of_products_is_another_store(configure: Configure, options: list[str]) -> None:
    def kept(matmul: str) -> KeptFeatures | None:
        return build(configure(*options, "backbone.train=none", *STILL, f"trainer.matmul={matmul}")).data.features

    found = [kept("highest"), kept("medium"), kept("highest")]
    assert found[0] == found[2] != found[1]


@pytest.mark.exhaustive
def test_two_processes_are_one(on_ranks: Callable[..., list[Any]], tmp_path: Path, options: list[str]) -> None:
    chosen = [*options, "backbone.train=none", *STILL, f"paths.cache_dir={tmp_path / 'cache'}"]
    halves = on_ranks(2, _on_rank, chosen)
    _, data = stored(composed(*chosen))
    alone = torch.stack([batch["image"] for batch in islice(data.train_dataloader(), 2)])
    torch.testing.assert_close(torch.cat(halves, 1), torch.as_tensor(alone))


def _on_rank(options: list[str]) -> torch.Tensor:
    rank = torch.distributed.get_rank()
    parts = build(composed(*options))
    parts.data.store_features(stem_of(parts), torch.device("cpu"), torch.no_grad)
    batches = islice(attached(parts.data, rank=rank, world_size=2).train_dataloader(), 2)
    return torch.stack([torch.Tensor(batch["image"]) for batch in batches])


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (["transform=resized_crop", "backbone.train=none"], r"transform\.train is random: set transform\.copies=8"),
        (["transform=unchanged", "transform.copies=2", "backbone.train=none"], r"all copies would be the same"),
        (["transform=unchanged"], r"the first stage is trained: set backbone\.train=none or last:N"),
        (["transform=unchanged", "backbone.train=lora"], r"the first stage is trained"),
        (["transform=unchanged", "backbone.train=none", "method=deml", "method.J=2"], r"set method\.I=1"),
        (["transform=unchanged", "backbone.train=none", "trainer.compile=true"], r"leave one of them out"),
    ],
)
def test_what_it_does_not_go_with_is_told(
    configure: Configure, options: list[str], choice: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(configure(*options, *choice, "dataset.cache=features"))


def test_images_without_files_are_refused(configure: Configure) -> None:
    with pytest.raises(UserError, match="do not lie in files of their own"):
        build(configure(*TINY, "backbone.train=none", *STILL))
