"""MLRC's collections against a literal enumeration, from real runs and from made ones."""

import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf
from scipy.stats import ttest_1samp

from dml.analysis.mlrc import aggregate, half_width, write_aggregate
from dml.configuration.trainings import trainings_of
from dml.errors import UserError
from dml.figures import summaries
from dml.launch.collection import run_all
from tests.conftest import TINY

Configure = Callable[..., DictConfig]
LABELS = np.repeat(np.arange(6), 7)


@pytest.fixture
def made(configure: Configure, tmp_path: Path) -> Path:
    """Twelve run folders with embeddings of noise around a point a class, more noise in later folds."""
    root = tmp_path / "made"
    base = configure(*TINY, "protocol=mlrc", "method=gsp", "loss=proxy_nca", "protocol.fold=0", "protocol.repeat=0")
    for fold, repeat in itertools.product(range(4), range(3)):
        folder = root / f"{fold}.{repeat}"
        folder.mkdir(parents=True)
        config = base.copy()
        # Folds of Cars196 train on 74 or 73 classes, which the method and the loss know.
        config.runtime.update(train_classes=74 - fold % 2, embedding_dim=1)
        config.protocol.update(fold=fold, repeat=repeat, repeats=3 if repeat else 1)
        config.seed = 10 * repeat + fold
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
        (folder / "overrides.yaml").write_text(OmegaConf.to_yaml([f"protocol.fold={fold}", "lr=0.1", "+note=[/x]"]))
        (folder / "metrics.json").write_text("{}")
        rng = np.random.default_rng([fold, repeat])
        points = np.random.default_rng(1).normal(size=(6, 5))[LABELS] + (0.6 + 0.3 * fold) * rng.normal(size=(42, 5))
        np.savez(folder / "embeddings.npz", embeddings=points.astype(np.float32), labels=LABELS)
    return root


def literal(embeddings: np.ndarray) -> dict[str, float]:
    """P@1, R-Precision and MAP@R by their definitions, one query at a time."""
    p1, rp, mapr = [], [], []
    for i in range(len(LABELS)):
        order = np.argsort(np.linalg.norm(embeddings - embeddings[i], axis=1), kind="stable")
        right = [LABELS[j] == LABELS[i] for j in order if j != i]
        r = 6
        p1.append(float(right[0]))
        rp.append(sum(right[:r]) / r)
        mapr.append(sum(sum(right[: k + 1]) / (k + 1) for k in range(r) if right[k]) / r)
    return {"precision@1": statistics.mean(p1), "r_precision": statistics.mean(rp), "map@r": statistics.mean(mapr)}


@pytest.mark.slow
def test_all_collections(made: Path) -> None:
    (one,) = aggregate([made])
    unit = {}
    for fold, repeat in itertools.product(range(4), range(3)):
        raw = np.load(made / f"{fold}.{repeat}" / "embeddings.npz")["embeddings"].astype(float)
        unit[fold, repeat] = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    assert len(one.collections) == 81
    expected: dict[str, list[float]] = {}
    repeats: dict[str, list[float]] = {}
    for a, b, c, d in itertools.product(range(3), repeat=4):
        parts = [unit[0, a], unit[1, b], unit[2, c], unit[3, d]]
        beside = np.concatenate(parts, axis=1)
        alone = [literal(part) for part in parts]
        found = one.collections[(0, a), (1, b), (2, c), (3, d)]
        for name, value in literal(beside / np.linalg.norm(beside, axis=1, keepdims=True)).items():
            both = {
                f"separated/{name}": statistics.mean(of[name] for of in alone),
                f"concatenated/{name}": value,
            }
            for key, figure in both.items():
                assert found[key] == pytest.approx(figure, abs=1e-9)
                expected.setdefault(key, []).append(figure)
                if a == b == c == d:
                    repeats.setdefault(key, []).append(figure)
    summary = one.summary()
    assert (summary["collections"], summary["repeats"]) == (81, 3)
    for key, values in expected.items():
        assert summary[f"{key}/mean"] == pytest.approx(statistics.mean(values))
        assert summary[f"{key}/std"] == pytest.approx(statistics.stdev(values))
        assert summary[f"{key}/repeats/mean"] == pytest.approx(statistics.mean(repeats[key]))
        assert summary[f"{key}/repeats/half_width"] == pytest.approx(half_width(repeats[key]))
    assert summary["concatenated/map@r/mean"] > summary["separated/map@r/mean"]


def test_the_interval_is_students() -> None:
    values = [0.31, 0.35, 0.3, 0.37]
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    assert half_width(values) == pytest.approx((high - low) / 2)


@pytest.mark.slow
def test_the_interval_covers() -> None:
    """Nineteen times in twenty, with three repetitions too; the spread of 81 collections would not."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4000, 3))
    hits = [abs(statistics.fmean(of)) <= half_width(of.tolist()) for of in draws]
    assert statistics.fmean(hits) == pytest.approx(0.95, abs=0.012)


@pytest.mark.slow
def test_files(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = write_aggregate([made], made)
    said = " ".join(capsys.readouterr().out.split())
    assert "lr=0.1 +note=[/x]: 12 trainings, 4 folds" in said
    assert "concatenated 20-d, 81 collections" in said
    assert "separated 5-d, 3 repetitions" in said
    (content,) = json.loads((made / "mlrc.json").read_text())
    assert content["summary"]["collections"] == 81
    assert len(content["collections"]) == 81
    assert figures["mlrc/concatenated/map@r/mean"] == content["summary"]["concatenated/map@r/mean"]
    assert (made / "figures" / "collections.png").stat().st_size > 5000


def test_configurations_are_told_apart(made: Path) -> None:
    """By what differs, in pictures too, whose labels have little room; and by number if they were typed alike."""
    common = [f"protocol.repeats=3 protocol.validation={'x' * 60}"]
    for name, options in (("a", ["method=abe"]), ("b", ["method=gsp"]), ("c", ["method=gsp"])):
        for fold in range(4):
            folder = made.parent / "several" / name / str(fold)
            shutil.copytree(made / f"{fold}.0", folder)
            config = OmegaConf.load(folder / "config.yaml")
            config.trainer.matmul = {"a": "highest", "b": "high", "c": "medium"}[name]
            (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
            (folder / "overrides.yaml").write_text(OmegaConf.to_yaml([*common, *options, f"protocol.fold={fold}"]))
    found = aggregate([made.parent / "several"])
    assert [one.label for one in found] == ["method=abe", "method=gsp", "method=gsp (2)"]
    lines = [(one.label, {"concatenated": ([0.1], [0.1])}) for one in found]
    (axes,) = summaries.collections(lines).axes
    shown = [text.get_text().replace("\n", " ") for text in axes.get_yticklabels()]
    assert shown == [f"{one.label}, concatenated" for one in found]


@pytest.mark.slow
def test_some_trainings_are_lacking(made: Path) -> None:
    shutil.rmtree(made / "2.1")
    (one,) = aggregate([made])
    assert len(one.collections) == 3 * 3 * 2 * 3
    assert len(one.independent) == 2
    for repeat in (0, 2):
        shutil.rmtree(made / f"2.{repeat}")
    with pytest.raises(UserError, match="no training of fold 2 has finished"):
        aggregate([made])


@pytest.mark.slow
def test_one_repetition(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for fold, repeat in itertools.product(range(4), (1, 2)):
        shutil.rmtree(made / f"{fold}.{repeat}")
    figures = write_aggregate([made], made)
    assert "One collection: a spread needs several repetitions." in " ".join(capsys.readouterr().out.split())
    assert "mlrc/separated/map@r/std" not in figures
    assert not any(math.isnan(value) for value in figures.values())


@pytest.mark.slow
def test_trainings_that_start_alike(made: Path) -> None:
    path = made / "3.2" / "config.yaml"
    path.write_text(path.read_text().replace("seed: 23\n", "seed: 10\n"))
    with pytest.raises(UserError, match=r"0\.1 and .*3\.2 have the same seed, so their networks start alike"):
        aggregate([made])


@pytest.mark.slow
def test_more_collections_than_can_be_counted(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_aggregate([made], made / "out")
    assert "81 collections: mean±std (n - 1) over every choice of one" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("dml.analysis.mlrc.MOST", 20)
    (one,) = aggregate([made])
    assert 10 < len(one.collections) <= 23
    write_aggregate([made], made / "out")
    said = " ".join(capsys.readouterr().out.split())
    assert f"{len(one.collections)} collections: mean±std (n - 1) over as many of 81 choices, drawn at random," in said
    assert "…" not in said
    assert len(one.independent) == 3
    shutil.rmtree(made / "0.0")  # repetitions 1 and 2 are whole
    (one,) = aggregate([made])
    assert len(one.independent) == 2


@pytest.mark.slow
def test_mistakes(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "0.0", made / "again")
    with pytest.raises(UserError, match=r"are both fold 0, repetition 0: name one of them"):
        aggregate([made])
    shutil.rmtree(made / "again")
    content = dict(np.load(made / "1.1" / "embeddings.npz"))
    np.savez(made / "1.1" / "embeddings.npz", **content | {"labels": content["labels"][::-1]})
    with pytest.raises(UserError, match="were tested on different images"):
        aggregate([made])
    (made / "1.1" / "embeddings.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"embeddings\.npz is damaged"):
        aggregate([made])
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="no finished training of protocol=mlrc"):
        aggregate([tmp_path / "none"])


def test_what_is_left_open(configure: Configure) -> None:
    """All trainings, the repetitions of a fold, or the folds of a repetition."""
    options = ["protocol=mlrc", "protocol.repeats=3"]
    every = trainings_of(configure(*options))
    assert len(every) == 12
    assert every["repeat_1_fold_3"] == ["protocol.repeat=1", "protocol.fold=3"]
    assert list(trainings_of(configure(*options, "protocol.fold=2"))) == ["repeat_0", "repeat_1", "repeat_2"]
    assert list(trainings_of(configure(*options, "protocol.repeat=2"))) == ["fold_0", "fold_1", "fold_2", "fold_3"]
    assert trainings_of(configure(*options, "protocol.repeat=2", "protocol.fold=1")) == {}


@pytest.mark.exhaustive
def test_all_folds_in_one_go(configure: Configure, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Real trainings: one command, then a table."""
    options = [*TINY, "protocol=mlrc", "protocol.patience=2", f"paths.output_dir={tmp_path / 'run'}"]
    options += [f"paths.cache_dir={tmp_path}", "lr=0.01"]
    metrics = run_all(configure(*options), options)
    assert metrics["run/trainings"] == 4
    assert metrics["mlrc/collections"] == 1
    each = [json.loads((tmp_path / f"run/repeat_0_fold_{i}/metrics.json").read_text()) for i in range(4)]
    assert metrics["mlrc/separated/map@r/mean"] == pytest.approx(statistics.fmean(one["test/map@r"] for one in each))
    assert "concatenated 64-d" in capfd.readouterr().out
