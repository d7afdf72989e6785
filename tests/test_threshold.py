"""A run's threshold: chosen on validation classes where there are some, and used by a search."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig

from dml.evaluation.calibration import Calibration
from dml.evaluation.pairs import Pairs
from dml.figures.pairs import roc_and_calibration
from dml.inference.export import export
from dml.inference.threshold import choose
from dml.methods.base import Method
from tests.conftest import TINY
from tests.runs import embed_images, photographs, save_run

pytestmark = pytest.mark.usefixtures("one_thread")

Configure = Callable[..., DictConfig]
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def run_of(configure: Configure, method_of: Callable[..., Method], tmp_path: Path) -> Callable[..., Path]:
    """`run_of(*options)`: an untrained run on photographs of twelve classes."""

    def run_of(*options: str) -> Path:
        photographs(tmp_path / "photos", classes=12, each=3)
        own = ["dataset=folder", f"dataset.root={tmp_path / 'photos'}", "head.dim=24", "backbone=small", *options]
        config = configure(*(one for one in TINY if not one.startswith(("dataset", "head"))), *own)
        config.runtime = {"train_classes": 5, "embedding_dim": 24}
        return save_run(tmp_path / "run", config, method_of("method=baseline"))

    return run_of


def brute(run: Path, classes: Sequence[int], threshold: float, photos: Path) -> tuple[float, float]:
    files = sorted(photos.glob("*/*.png"))
    names = [f"class{c}" for c in classes]
    kept = [file for file in files if file.parent.name in names]
    points = embed_images(run, kept, device="cpu").astype(float)
    similar = points @ points.T >= threshold
    same = np.array([[a.parent == b.parent for b in kept] for a in kept])
    later = np.triu(np.ones_like(same), 1)
    return float(similar[later & ~same].mean()), float((~similar[later & same]).mean())


def pairs_of(run: Path, classes: list[int], photos: Path) -> Pairs:
    files = [file for c in classes for file in sorted((photos / f"class{c}").glob("*.png"))]
    labels = np.array([classes.index(int(file.parent.name.removeprefix("class"))) for file in files])
    return Pairs(embed_images(run, files, device="cpu"), labels)


def classes_of(run: Path, part: str) -> list[str]:
    from dml.inference.embedding import Trained
    from dml.inference.tested import Tested

    found = Tested.of(Trained.of(run))
    rows = found.rows(part)  # type: ignore[arg-type]
    assert rows is not None
    return sorted({found.records.class_names[label] for label in found.records.labels[rows]})


@pytest.mark.slow
@pytest.mark.parametrize("part", ["test", "validation"])
def test_it_is_chosen_and_tested(run_of: Callable[..., Path], tmp_path: Path, call: Call, part: str) -> None:
    run = run_of(*(["protocol=random_class_split", "protocol.split=0"] if part == "validation" else []))
    code, said = call("threshold", run, "--fmr", "0.05", "--device", "cpu")
    assert code == 0, said
    content = json.loads((run / "threshold.json").read_text())
    assert content["chosen_on"] == part
    assert ("this flatters it" in said) == (part == "test")
    assert f"on {part} classes" in said
    tested = [int(name.removeprefix("class")) for name in classes_of(run, "test")]
    assert len(tested) == 6
    photos = tmp_path / "photos"
    fmr, fnmr = brute(run, tested, content["threshold"], photos)
    assert (content["test"]["fmr"], content["test"]["fnmr"]) == pytest.approx((fmr, fnmr), abs=1e-9)
    chosen = [int(name.removeprefix("class")) for name in classes_of(run, part)]
    on_part = brute(run, chosen, content["threshold"], photos)[0]
    assert 0 <= 0.05 - on_part < 0.03
    fitted = Calibration.of(pairs_of(run, chosen, photos))
    assert content["calibration"]["chosen_on"] == part
    assert (content["calibration"]["slope"], content["calibration"]["offset"]) == pytest.approx(
        (fitted.slope, fitted.offset), rel=1e-6
    )
    reliability = fitted.on(pairs_of(run, tested, photos))
    assert (content["calibration"]["cllr"], content["calibration"]["error"]) == pytest.approx(
        (reliability.cllr, reliability.error), rel=1e-6
    )
    low, high = content["test"]["intervals"]["fmr"]
    assert low <= content["test"]["fmr"] <= high
    assert (run / "figures" / "threshold.png").stat().st_size > 10_000


@pytest.mark.slow
def test_distractors_are_no_class(run_of: Callable[..., Path], tmp_path: Path, call: Call) -> None:
    """Of a class of the gallery that no query has, two images are not two of one class: nobody knows what they are."""
    lines, roles = [], dict.fromkeys(range(4), "train") | dict.fromkeys(range(4, 12), "gallery")
    run = run_of("dataset.csv=" + str(tmp_path / "all.csv"), "protocol.every=5")
    for c, role in roles.items():
        for i in range(3):
            split = "query" if role == "gallery" and c < 10 and not i else role
            lines.append(f"class{c}/{i}.png,{'nobody' if c >= 10 else c},{split}")
    (tmp_path / "all.csv").write_text("\n".join(["path,label,split", *lines]) + "\n")
    code, said = call("threshold", run, "--fmr", "0.1", "--device", "cpu")
    assert code == 0, said
    content = json.loads((run / "threshold.json").read_text())["test"]
    assert content["pairs_of_one_class"] == 6 * 3
    assert content["pairs_of_two_classes"] == 18 * 17 // 2 - 18
    assert content["classes"] == 6


def test_the_picture_has_each_part_s_curve_from_the_largest_threshold_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step to the next point holds the rate of the threshold before: the other way round it would flatter."""
    drawn: list[tuple[Any, ...]] = []

    def kept(*given: Any) -> Figure:
        drawn.append(given)
        return roc_and_calibration(*given)

    random, points, labels = np.random.default_rng(0), {}, {}
    for part, count, apart in (("test", 90, 1.0), ("validation", 40, 3.0)):
        labels[part] = np.arange(count) % 5
        points[part] = np.round(random.normal(size=(count, 4)) + apart * random.normal(size=(5, 4))[labels[part]])
    trained = SimpleNamespace(digest=lambda: "weights", checkpoint=Path("last.ckpt"), step=7)
    images = SimpleNamespace(split=SimpleNamespace(monitor="validation"))
    monkeypatch.setattr("dml.inference.threshold.roc_and_calibration", kept)
    monkeypatch.setattr("dml.inference.threshold.Trained", SimpleNamespace(of=lambda *_: trained))
    monkeypatch.setattr("dml.inference.threshold.Tested", SimpleNamespace(of=lambda _: images))
    monkeypatch.setattr("dml.inference.threshold._pairs", lambda _, __, part, ___: Pairs(points[part], labels[part]))
    content = choose(tmp_path, 0.1)
    ((curves, chosen, _, least),) = drawn
    assert list(curves) == ["validation", "test"]
    for part, (fmr, fnmr) in curves.items():
        similar = points[part] @ points[part].T
        later, same = np.triu(np.ones_like(similar, bool), 1), labels[part][:, None] == labels[part]
        rates = [
            (np.mean(similar[later & ~same] >= one), np.mean(similar[later & same] < one))
            for one in (np.inf, *np.unique(similar[later])[::-1])
        ]
        assert np.stack([fmr, fnmr], axis=1) == pytest.approx(np.array(rates), abs=1e-12)
        match = similar >= content["threshold"]
        of_part = match[later & ~same].mean(), (~match[later & same]).mean()
        assert (chosen == pytest.approx(of_part, abs=1e-12)) == (part == "test")
    assert least == 1 / (later & ~same).sum()
    assert [point["asked"] for point in content["operating_points"]] == [0.1, 0.01, 0.001]  # the test resolves 1/3240


@pytest.mark.slow
def test_a_search_may_find_nothing(run_of: Callable[..., Path], tmp_path: Path, call: Call) -> None:
    run = run_of()
    photos = tmp_path / "photos"
    query = photos / "class3" / "0.png"
    options = ("search", run, photos, query, "-k", "5", "-o", tmp_path / "found", "--threshold")
    code, said = call(*options)
    assert (code, "choose one with python -m dml.threshold" in said) == (2, True)
    assert call("threshold", run, "--fmr", "0.05")[0] == 0
    content = json.loads((run / "threshold.json").read_text())
    all_found = call(*options[:-1])[1]
    similarities = [
        float(line.split()[-1]) for line in all_found.splitlines() if line.strip().endswith(tuple("0123456789"))
    ]
    middle = (similarities[1] + similarities[2]) / 2
    for threshold, count in ((middle, 2), (2.0, 0)):
        (run / "threshold.json").write_text(json.dumps(content | {"threshold": threshold}))
        code, said = call(*options)
        assert code == 0
        assert (said.count(".png") - 1, "no match" in said) == (count, count == 0)
        page = (tmp_path / "found" / "results.html").read_text()
        assert ("no match" in page) == (count == 0)
        assert f"Images below the threshold of {threshold:.4f} are left out." in page
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    weights = next(one for one in checkpoint["state_dict"].values() if isinstance(one, torch.Tensor))
    weights += 0.01
    torch.save(checkpoint, run / "checkpoints" / "last.ckpt")
    code, said = call(*options)
    assert (code, "was chosen for other weights" in said) == (2, True)


def test_mistakes(run_of: Callable[..., Path], tmp_path: Path, call: Call) -> None:
    run = run_of()
    for options, sentence in {
        ("--fmr", "0"): "--fmr=0.0 has to be above 0",
        ("--fmr", "1"): "--fmr=1.0 has to be below 1",
        ("--fmr", "nan"): "--fmr=",
        ("--fmr", "often"): "--fmr: invalid float value",
        ("--fmr", "1e-4"): "--fmr 0.0001: the 135 pairs of two test classes resolve no FMR below 0.0075",
        (): "required: --fmr",
    }.items():
        code, said = call("threshold", run, *options)
        assert code == 2
        assert said.startswith("dml: ")
        assert sentence in said
        assert said.count("\n") == 1
    export(run, tmp_path / "export", ("torch",))
    code, said = call("threshold", tmp_path / "export", "--fmr", "0.1")
    assert (code, said.count("\n")) == (2, 1)
    assert "is of an export, which knows no data: name its run" in said
    (tmp_path / "empty").mkdir()
    assert "has no checkpoint" in call("threshold", tmp_path / "empty", "--fmr", "0.1")[1]
    (tmp_path / "photos").rename(tmp_path / "elsewhere")
    code, said = call("threshold", run, "--fmr", "0.1")
    assert (code, said.count("\n")) == (2, 1)
    assert "photos" in said
    assert not (run / "threshold.json").exists()
    assert not (run / "figures").exists()


def test_a_checkpoint_cannot_name_just_anything(run_of: Callable[..., Path], tmp_path: Path, call: Call) -> None:
    run = run_of()
    path = run / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=True)
    state["config"]["dataset"] = {"_target_": "os.system", "command": f"touch {tmp_path / 'done'}"}
    torch.save(state, path)
    code, said = call("threshold", run, "--fmr", "0.1")
    assert (code, "asks for os.system" in said) == (2, True)
    assert not (tmp_path / "done").exists()
