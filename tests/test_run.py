"""Whole runs, small: every head, method and logger in conf/ trains, evaluates and reports."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from dml.errors import UserError
from dml.evaluation.metrics import evaluate
from dml.runs.folder import RunFolder
from dml.runs.log import read_metrics
from dml.training.build import build
from dml.training.callbacks.best import BestCheckpoint
from dml.training.callbacks.course import Course
from dml.training.callbacks.evaluation import Evaluation
from dml.training.callbacks.steps import Timing
from dml.training.rebuild import load_method
from dml.training.run import run
from tests.components import but_exhaustive, components, on_transformers
from tests.conftest import TINY
from tests.runs import photographs

Configure = Callable[..., DictConfig]

# Of a kind with others that are tried, and tested in tests/losses and tests/models.
QUICK_LOSSES = ("margin", "arcface", "smooth_ap", "xbm")
EXHAUSTIVE_HEADS = (
    *("avg_max", "cbam", "crow", "delf", "gem", "gemax", "gsop"),
    *("max", "otp", "smk", "solar", "transformer", "weldon"),
)

FIXED_NAMES = {
    *(f"test/recall@{k}" for k in (1, 2, 4, 8)),
    *("test/precision@1", "test/r_precision", "test/map@r", "test/nmi", "test/f1"),
    *("learners/mean/recall@1", "learners/0/recall@1"),
    *("best_on_test/recall@1", "best_on_test/step", "untrained/recall@1"),
    *("data/train/images", "data/train/classes", "data/test/images", "data/test/classes"),
    *("model/params", "model/flops", "run/steps", "run/seconds", "run/images_per_second"),
}


def tiny_run(configure: Configure, *overrides: str) -> dict[str, float]:
    return run(configure(*TINY, *overrides), [*TINY, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("head", but_exhaustive("head", *EXHAUSTIVE_HEADS))
def test_every_head_trains(configure: Configure, head: str) -> None:
    options = [f"head={head}", "head.dim=16", "trainer.max_steps=2", *on_transformers(head)]
    assert tiny_run(configure, *options)["run/steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", but_exhaustive("method", "baseline", "mheads", "mheads_att", "mtails"))
def test_every_method_trains(configure: Configure, tmp_path: Path, method: str) -> None:
    assert tiny_run(configure, f"method={method}", "trainer.max_steps=2", "report=true")["run/steps"] == 2
    if method in ("abe", "mheads_att", "diablo", "deml"):
        assert (tmp_path / "run" / "figures" / "attention.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sampler", components("sampler"))
def test_every_sampler_trains(configure: Configure, sampler: str) -> None:
    assert tiny_run(configure, f"sampler={sampler}", "sampler.batch_size=16", "trainer.max_steps=2")["run/steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("transform", components("transform"))
def test_every_transform_trains(configure: Configure, transform: str) -> None:
    assert tiny_run(configure, f"transform={transform}", "trainer.max_steps=2")["run/steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("overlay", components("debug"))
def test_every_debug_overlay_runs(configure: Configure, overlay: str) -> None:
    steps = "trainer.max_steps=4"
    assert tiny_run(configure, f"debug={overlay}", steps)["run/steps"] == 4


@pytest.mark.parametrize("overlay", components("experiment"))
def test_every_experiment_composes(configure: Configure, overlay: str) -> None:
    config = configure(f"experiment={overlay}", "runtime.embedding_dim=8", "runtime.train_classes=4")
    assert OmegaConf.to_container(config, resolve=True)


@pytest.fixture(scope="module")
def abe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of ABE-4 in a process of its own, as a user starts it."""
    folder = tmp_path_factory.mktemp("abe") / "run"
    options = [*TINY, "method=abe", "protocol.ks=[1,2,4,8,1000]", "report=true", f"paths.output_dir={folder}"]
    done = subprocess.run([sys.executable, "-m", "dml.run", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Report: {folder}/report.html" in done.stdout.replace("\n", "")
    return folder


def test_metrics_have_the_fixed_names(abe_folder: Path) -> None:
    metrics = json.loads((abe_folder / "metrics.json").read_text())
    assert metrics.keys() >= FIXED_NAMES | {f"learners/{i}/recall@1" for i in range(4)} | {"test/recall@1000"}
    assert all(isinstance(value, int | float) for value in metrics.values())
    assert metrics["data/train/classes"] == metrics["data/test/classes"] == 12
    assert metrics["data/test/images"] == 72
    assert metrics["best_on_test/recall@1"] >= metrics["test/recall@1"]
    assert metrics["best_on_test/step"] in (5, 10)
    assert metrics["test/recall@1000"] == 1.0


def test_the_folder_is_the_contract(abe_folder: Path) -> None:
    names = {path.name for path in abe_folder.iterdir()}
    assert names == {
        *("config.yaml", "overrides.yaml", "metrics.jsonl", "metrics.csv", "metrics.json", "queries.npz"),
        *("checkpoints", "figures", "report.html", "run.log", "provenance.json"),
    }
    assert {path.name for path in (abe_folder / "checkpoints").iterdir()} == {
        *("last.ckpt", "previous.ckpt", "best_on_test.ckpt"),
    }
    assert OmegaConf.load(abe_folder / "config.yaml").method.M == 4
    assert "method=abe" in OmegaConf.load(abe_folder / "overrides.yaml")
    assert "Recall@1" in (abe_folder / "run.log").read_text()
    (start,) = json.loads((abe_folder / "provenance.json").read_text())
    assert start["command"].startswith("python -m dml.run ")
    assert "method=abe" in start["command"]
    assert torch.__version__.startswith(start["versions"]["torch"])
    assert re.fullmatch(r".+, \d+ cores, [A-Z0-9_ ]+", start["hardware"])
    assert start["commit"]
    assert start["numerics"] == {
        "precision": "32-true",
        "matmul": "highest",
        "compile": False,
        "deterministic": False,
    }


def test_the_report_is_one_file_with_its_pictures(abe_folder: Path) -> None:
    page = (abe_folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 6  # the page shows neighbours itself
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []  # nothing outside the file
    metrics = json.loads((abe_folder / "metrics.json").read_text())
    assert f"{metrics['test/recall@1']:.4f}" in page
    for name in ("curves", "gallery", "learners", "similarities", "attention", "first", "easiest"):
        with Image.open(abe_folder / "figures" / f"{name}.png") as picture:
            assert min(picture.size) > 300


@pytest.mark.slow
def test_names_that_are_not_utf8_have_a_report(configure: Configure, tmp_path: Path) -> None:
    photographs(tmp_path / "photos", each=6)
    for place in (*(tmp_path / "photos").glob("*/*.png"), *(tmp_path / "photos").iterdir()):
        place.rename(os.fsdecode(os.fsencode(place) + b"\xfc" + os.fsencode(place.suffix)))
    folder = [
        "dataset=folder",
        "backbone=small",
        f"dataset.root={tmp_path / 'photos'}",
        "transform=unchanged",
        "sampler.batch_size=8",
    ]
    options = [*(one for one in TINY if not one.startswith("dataset")), *folder, "report=true", "trainer.max_steps=2"]
    assert run(configure(*options), options)["data/test/images"] == 12
    assert "class2\\udcfc" in (Path(configure(*options).paths.output_dir) / "report.html").read_text()


def test_a_checkpoint_rebuilds_the_method(abe_folder: Path) -> None:
    path = abe_folder / "checkpoints" / "last.ckpt"
    method = load_method(str(path))
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in method.state_dict().items() if "extra" not in name)
    assert method.embed(torch.rand(2, 3, 32, 32)).shape == (2, 4, 4)


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    first = tiny_run(configure, "trainer.max_steps=2")
    assert tiny_run(configure, "trainer.max_steps=2") == first
    assert "finished: nothing was trained" in capsys.readouterr().out


@pytest.mark.slow
def test_the_seed_decides(configure: Configure, tmp_path: Path) -> None:
    def outcome(*overrides: str) -> list[dict[str, float]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        tiny_run(configure, "loss=margin", *overrides, f"paths.output_dir={folder}")
        return read_metrics(folder / "metrics.jsonl")

    one = outcome("seed=1", "trainer.num_workers=0")
    assert outcome("seed=1", "trainer.num_workers=2") == one
    assert outcome("seed=2", "trainer.num_workers=0") != one


@pytest.mark.slow
def test_the_best_on_validation_is_what_is_tested(configure: Configure, tmp_path: Path) -> None:
    """Each figure again from the checkpoints, by another way; no test image before the end."""
    options = [*TINY, "protocol=random_class_split", "protocol.split=1", "protocol.every=2", "lr=0.01"]
    options += ["method=abe", "protocol.clustering=false", "dataset.classes=40", "report=true"]
    metrics = run(configure(*options), options)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    validation = {r["step"]: r["validation/recall@1"] for r in records if "validation/recall@1" in r}
    assert list(validation) == [0, 2, 4, 6, 8, 10]
    assert [r["step"] for r in records if "test/recall@1" in r] == [0, 10]
    chosen = max((recall, -step) for step, recall in validation.items() if step)  # the first of equals
    assert (metrics["best_on_validation/recall@1"], -metrics["best_on_validation/step"]) == chosen
    assert metrics["best_on_validation/step"] < 10  # else this test says nothing
    data = build(configure(*options)).data
    for file, prefix in (("best_on_validation", "test"), ("last", "last")):
        method = load_method(str(tmp_path / "run" / "checkpoints" / f"{file}.ckpt"))
        with torch.inference_mode():
            parts = [(method.embed(b["image"]), b["label"]) for b in data.eval_dataloader(data.eval_rows)]
        embeddings, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        direct = evaluate(embeddings.flatten(1), labels, ks=(1, 2), clustering=False)
        assert metrics[f"{prefix}/recall@1"] == direct["recall@1"]
        assert metrics[f"{prefix}/map@r"] == pytest.approx(direct["map@r"], rel=1e-6)
    assert (metrics["data/train/classes"], metrics["data/test/classes"]) == (10, 20)
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"step {metrics['best_on_validation/step']}, the best on validation classes" in " ".join(page.split())


@pytest.mark.slow
def test_a_best_checkpoint_younger_than_the_last_one(configure: Configure, tmp_path: Path) -> None:
    """Killed between writing the two: what the best checkpoint says of itself holds."""
    options = [*TINY, "protocol=random_class_split", "protocol.split=0", "trainer.max_steps=2", "protocol.every=1"]
    metrics = run(configure(*options), options)
    folder = RunFolder(tmp_path / "run")
    config = configure(*options)
    course, parts = Course(config, every=1), build(config)
    best = BestCheckpoint(course, Evaluation(course, Timing(), parts), folder, parts.protocol)
    best.load_state_dict({"metrics": {"validation/recall@1": 0.0}, "step": 0, "before_the_end": None})
    best.on_train_start(cast(pl.Trainer, SimpleNamespace(global_step=1)), parts.method)
    assert best.step == torch.load(folder.best("validation"), weights_only=True)["global_step"] > 0
    assert best.metrics["validation/recall@1"] == metrics["best_on_validation/recall@1"]


@pytest.mark.slow
def test_tensorboard_gets_figures_and_pictures(configure: Configure, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny_run(configure, "logger=tensorboard", "trainer.max_steps=2", "report=true")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert "test/recall@1" in events.Tags()["scalars"]
    drawn = {path.stem for path in (tmp_path / "run" / "figures").glob("*.png")}
    assert {"curves", "gallery", "similarities", "map"} <= drawn == set(events.Tags()["images"])
    assert "hp_metric" not in events.Tags()["scalars"]
    final = json.loads((tmp_path / "run" / "metrics.json").read_text())["test/recall@1"]
    assert [one.value for one in events.Scalars("test/recall@1") if one.step == 2] == [pytest.approx(final)] * 2
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")
    tables = {name.removesuffix("/text_summary") for name in events.Tags()["tensors"]}
    assert {"report/result", "report/settings", "report/classes", "report/confusions"} <= tables


@pytest.mark.slow
def test_lightning_advises_no_workers(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of many cores it would, which is an error here."""
    monkeypatch.setattr("pytorch_lightning.trainer.connectors.data_connector.suggested_max_num_workers", lambda _: 16)
    run(configure(*TINY, "trainer.max_steps=1", "protocol.clustering=false"), [])


@pytest.mark.slow
def test_a_run_shorter_than_its_log_has_a_curve(configure: Configure, tmp_path: Path) -> None:
    tiny_run(configure, "trainer.log_every=50", "trainer.max_steps=3")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if "train/loss" in record] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_every_precision_trains(configure: Configure, precision: str) -> None:
    metrics = tiny_run(configure, f"trainer.precision={precision}", "loss=proxy_anchor", "trainer.max_steps=2")
    assert 0 <= metrics["test/recall@1"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("loss", but_exhaustive("loss", *(set(components("loss")) - set(QUICK_LOSSES))))
def test_a_training_that_diverges_stops_and_saves(configure: Configure, tmp_path: Path, loss: str) -> None:
    with pytest.raises(UserError, match=r"'.+' became (nan|inf|NaN or infinite) at step \d+: lower lr"):
        tiny_run(configure, "lr=1e30", f"loss={loss}", "protocol.every=3")
    saved = torch.load(tmp_path / "run" / "checkpoints" / "non_finite.ckpt", weights_only=True)
    assert saved["global_step"] >= 1
    assert "became" in (tmp_path / "run" / "run.log").read_text()
