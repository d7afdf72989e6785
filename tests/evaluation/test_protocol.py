"""Folds and selection: who is trained on, who is validated, which checkpoint is the result, and when training stops."""

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from PIL import Image

from dml.data.paths import Paths
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.evaluator import Embedded
from dml.evaluation.identities import OneImageGallery
from dml.evaluation.metrics import rank
from dml.evaluation.protocol import MLRC, Conventional, RandomClassSplit, Tuning
from dml.inference.embedding import Trained
from dml.launch.run import task
from dml.runs.log import read_metrics
from dml.runs.scores import read_queries
from dml.training.build import build
from dml.training.rebuild import load_method
from dml.training.run import run
from tests.conftest import TINY

Configure = Callable[..., DictConfig]


def records(train: int, test: int = 4, images: int = 3) -> Records:
    """Classes in an order that is not that of the rows."""
    classes = np.random.default_rng(0).permutation(np.repeat(np.arange(train + test), images))
    return Records(
        name="some",
        paths=Paths.of(f"{row}" for row in range(len(classes))),
        labels=classes.astype(np.int64),
        roles=np.where(classes < train, "train", "test"),
        class_names=[str(c) for c in range(train + test)],
        open_image=lambda row: Image.new("RGB", (4, 4)),
    )


SIZES = {  # documented: validation classes of each fold
    (100, "linspace"): [25, 25, 25, 25],
    (100, "mlrc"): [25, 25, 25, 25],
    (98, "linspace"): [24, 25, 24, 25],
    (98, "mlrc"): [24, 24, 24, 24],
    (11318, "linspace"): [2829, 2830, 2829, 2830],
    (7, "linspace"): [1, 2, 2, 2],
}


@pytest.mark.parametrize(("classes", "arithmetic"), SIZES)
def test_folds(classes: int, arithmetic: str) -> None:
    """Disjoint; with linspace every class is validated once, with the reality check's cut the last ones never are."""
    data = records(classes, images=2)
    whole, validated = set(data.train_rows.tolist()), []
    for fold in range(4):
        split = MLRC(fold=fold, repeat=0, arithmetic=arithmetic).split(data)
        assert split.validation is not None
        held = np.unique(data.labels[split.validation]).tolist()
        assert held == list(range(held[0], held[0] + SIZES[classes, arithmetic][fold]))  # neighbours in the order
        assert not set(data.labels[split.train].tolist()) & set(held)
        assert set(split.train.tolist()) | set(split.validation.tolist()) == whole
        assert split.query.tolist() == data.query_rows.tolist()
        validated += held
    expected = range(classes if arithmetic == "linspace" else classes // 4 * 4)
    assert sorted(validated) == list(expected)


def test_a_random_split_is_drawn_by_the_protocol_s_seed_and_its_number_in_this_order() -> None:
    """Runs of another version met the same splits: recorded figures are of them."""
    data = records(9)
    for seed, number in ((0, 1), (1, 0)):
        split = RandomClassSplit(seed=seed, split=number).split(data)
        order = np.random.default_rng([seed, number]).permutation(9)
        assert np.unique(data.labels[split.train]).tolist() == sorted(order[:5].tolist())


def test_one_image_galleries_are_drawn_from_queries_and_gallery_together() -> None:
    data = records(4)
    tested = data.query_rows
    roles = data.roles.astype("<U7")
    roles[tested] = np.where(np.arange(len(tested)) % 3, "query", "gallery")
    split = OneImageGallery().split(replace(data, roles=roles))
    assert (split.query.tolist(), split.gallery) == (tested.tolist(), None)


def folds_of(classes: int) -> list[list[int]]:
    return [MLRC(fold=i, repeat=0).split(records(classes)).train.tolist() for i in range(4)]


def test_folds_are_the_same_in_other_processes() -> None:
    mine = folds_of(22)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for theirs in pool.map(folds_of, [22, 22]):
            assert theirs == mine


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fold": 4, "repeat": 0}, "fold=4 is none of the 4 folds: they are 0 to 3"),
        ({"fold": 0, "repeat": 3, "repeats": 3}, "repeat=3 is none of the 3 repeats"),
        ({"fold": 0, "repeat": 0, "select": "best_test"}, "is selected on a fold"),
    ],
)
def test_folds_that_are_none(options: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        MLRC(**options)


def test_fewer_classes_than_folds() -> None:
    with pytest.raises(UserError, match="3 training classes: fewer than 4 folds"):
        MLRC(fold=0, repeat=0).split(records(3))


@pytest.mark.parametrize(("classes", "held"), [(100, range(75, 100)), (7, [6]), (2, [1])])
def test_the_last_quarter_for_validation(classes: int, held: list[int]) -> None:
    data = records(classes)
    split = Conventional(select="val_classes").split(data)
    assert split.validation is not None
    assert np.unique(data.labels[split.validation]).tolist() == list(held)
    assert sorted([*split.train, *split.validation]) == data.train_rows.tolist()
    with pytest.raises(UserError, match="1 training classes: too few"):
        Conventional(select="val_classes").split(records(1))


def test_a_search_never_meets_the_test() -> None:
    """It is compared by the classes that `select=val_classes` holds out, and trains on the others."""
    data = records(20)
    split, chosen = Tuning().split(data), Conventional(select="val_classes").split(data)
    assert split.train.tolist() == chosen.train.tolist()
    assert chosen.validation is not None
    assert split.query.tolist() == chosen.validation.tolist()
    assert split.gallery is None
    assert split.monitor == "test"
    assert not {*split.train.tolist(), *split.query.tolist()} & set(data.query_rows.tolist())
    with pytest.raises(UserError, match="the held-out classes are already the test: leave it out"):
        Tuning(select="val_classes").split(data)


def test_an_unknown_selection() -> None:
    with pytest.raises(
        UserError,
        match=r"criterion=map@r is no metric of this protocol on its test classes: choose one of recall@1.*, map\.",
    ):
        OneImageGallery(criterion="map@r").split(records(4))
    with pytest.raises(UserError, match="selected on a random half of the training classes: leave it out"):
        RandomClassSplit(split=0, select="val_classes")


def test_one_image_galleries_can_select_on_classes() -> None:
    split = OneImageGallery(select="val_classes", criterion="map@r").split(records(8))
    assert split.validation is not None
    assert len(split.validation) == 6
    assert split.monitor == "validation"


@pytest.mark.slow
@pytest.mark.parametrize("select", [pytest.param("last", marks=pytest.mark.exhaustive), "best_test", "val_classes"])
def test_what_is_the_result(configure: Configure, tmp_path: Path, select: str) -> None:
    """The figures under `test/` are those of the checkpoint that `select` says; its scores are written by query."""
    options = [*TINY, f"protocol.select={select}", "protocol.every=2", "lr=0.05", "trainer.max_steps=8", "seed=2"]
    config = configure(*options, "protocol.criterion=map@r")
    figures = run(config, options)
    folder = tmp_path / "run"
    watched = "validation" if select == "val_classes" else "test"
    log = read_metrics(folder / "metrics.jsonl")
    seen = {r["step"]: r[f"{watched}/map@r"] for r in log if f"{watched}/map@r" in r and r["step"]}
    best = figures[f"best_on_{watched}/step"]
    assert seen[best] == max(seen.values()) > seen[8]  # so that it makes a difference which one is taken
    name = "last.ckpt" if select == "last" else f"best_on_{watched}.ckpt"
    assert Trained.of(folder).checkpoint == folder / "checkpoints" / name
    method = load_method(str(folder / "checkpoints" / name))
    parts = build(configure(*options))
    images = parts.data.test_images(parts.split.query)
    with torch.inference_mode():
        embeddings = method.embed(images)
    table = Embedded(
        embeddings, torch.as_tensor(parts.records.labels[parts.split.query]), torch.as_tensor(parts.split.query)
    )
    expected = rank(table.embeddings.flatten(1), table.labels)
    assert figures["test/recall@1"] == pytest.approx((expected.best_rank == 1).mean(), abs=1e-3)
    assert figures["test/map@r"] == pytest.approx(expected.values["map@r"].mean(), abs=1e-3)
    assert ("last/map@r" in figures) == (select != "last")
    queries = read_queries(folder)
    assert (queries.best_rank == 1).mean() == figures["test/recall@1"]
    assert queries.metric("recall@x") is queries.metric("recall@1/more") is None
    assert queries.values["map@r"].mean() == pytest.approx(figures["test/map@r"], abs=1e-12)
    assert len(set(queries.classes.tolist())) == figures["data/test/classes"]
    assert json.loads((folder / "metrics.json").read_text()) == figures


@pytest.mark.slow
def test_patience(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training ends after as many evaluations without a better one; killed before, it goes on to the same end."""
    options = [
        *TINY,
        "protocol=mlrc",
        "protocol.fold=1",
        "protocol.repeat=0",
        "protocol.every=2",
        "protocol.patience=2",
    ]
    options += ["lr=0.05", "trainer.max_steps=60"]
    figures = run(configure(*options), options)
    steps, best = figures["run/steps"], figures["best_on_validation/step"]
    assert steps == best + 4 < 60
    log = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "validation/map@r" in r]
    assert [r["step"] for r in log] == list(range(0, steps + 1, 2))
    assert max(log[1:], key=lambda r: r["validation/map@r"])["step"] == best
    again = run(configure(*options), options)  # it knows that it is finished
    assert again == figures
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == steps

    class Killed(Exception):
        pass

    from dml.training.callbacks.report import Report

    whole = Report._test_the_best

    def killed(self: Report, trainer: object) -> None:
        raise Killed

    elsewhere = f"paths.output_dir={tmp_path / 'killed'}"
    monkeypatch.setattr(Report, "_test_the_best", killed)
    with pytest.raises(Killed):
        run(configure(*options, elsewhere), options)
    monkeypatch.setattr(Report, "_test_the_best", whole)
    resumed = run(configure(*options, elsewhere), options)
    for name in ("run/steps", "best_on_validation/step", "test/map@r", "last/map@r"):
        assert resumed[name] == figures[name]


def test_patience_needs_validation_classes(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"set protocol\.select=val_classes too"):
        run(configure(*TINY, "protocol.patience=2"), [])


def test_each_training_has_a_seed_of_its_own(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from hydra.types import RunMode

    seen = []
    fake = SimpleNamespace(overrides=SimpleNamespace(task=[], hydra=[]), mode=RunMode.RUN, sweeper={})
    monkeypatch.setattr("dml.launch.run.HydraConfig.get", lambda: fake)
    monkeypatch.setattr("dml.training.run.run", lambda config, overrides: seen.append(config.seed) or {})
    for repeat, fold, seed in ((0, 0, 5), (2, 0, 5), (0, 1, 5), (0, 0, 6), (0, 0, 5)):
        numbers = [f"protocol.repeat={repeat}", f"protocol.fold={fold}", f"seed={seed}"]
        task(configure(*TINY, "protocol=mlrc", "protocol.repeats=3", *numbers))
    for split in (0, 1):
        task(configure(*TINY, "protocol=random_class_split", f"protocol.split={split}", "seed=5"))
    assert seen[0] == seen[4]
    assert len(set(seen)) == len(seen) - 1


def test_a_protocol_ranks_as_it_scores() -> None:
    with pytest.raises(TypeError, match="Half overrides retrieval but not ranking"):
        type("Half", (Conventional,), {"retrieval": Conventional.retrieval})
