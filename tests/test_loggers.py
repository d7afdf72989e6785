"""What is written where, read back."""

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dml.errors import UserError
from dml.files import load_checkpoint
from dml.models.backbones.trained import backbone_of
from dml.process import SWEPT
from dml.reporting.report import Table
from dml.runs.folder import RunFolder
from dml.runs.log import read_metrics
from dml.training.loggers import FolderLogger, _as_text, forget_after, shareable, wandb_logger
from dml.training.run import run
from tests.conftest import TINY


def test_records_are_forgotten_after_a_step(tmp_path: Path) -> None:
    logger = FolderLogger(tmp_path)
    for step in (1, 2, 2, 3):
        logger.log_metrics({"a": step / 3}, step)
    with logger.path.open("a") as file:
        file.write('{"step": 4, "a"')  # cut short by a kill
    logger.forget_after(2)
    assert [record["step"] for record in read_metrics(logger.path)] == [1, 2, 2]
    assert read_metrics(logger.path)[0]["a"] == 1 / 3  # to the last bit


def test_tensorboard_shows_a_step_once(tmp_path: Path) -> None:
    """Also the steps that a run took between its last checkpoint and a kill, and takes again."""
    for resumed_at, steps in ((-1, range(8)), (5, range(6, 10)), (9, range(10, 12))):
        logger = TensorBoardLogger(tmp_path, name="", version="tensorboard")
        forget_after([logger], resumed_at)
        for step in steps:
            logger.log_metrics({"loss": resumed_at + step / 100}, step)
        logger.experiment.flush()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = [-1 + s / 100 for s in range(6)] + [5 + s / 100 for s in range(6, 10)] + [9 + s / 100 for s in (10, 11)]
    assert [event.step for event in events.Scalars("loss")] == list(range(12))
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(expected)


def test_csv_has_a_column_a_figure(tmp_path: Path) -> None:
    logger = FolderLogger(tmp_path)
    logger.log_metrics({"loss": 0.5}, 1)
    logger.log_metrics({"recall": 0.25}, 2)
    logger.save()
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,loss,recall", "1,0.5,", "2,,0.25"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Records of a `.wandb` file: seven bytes of W&B's own, then LevelDB's log format in blocks of 32 KiB."""
    at, parts = 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no room for a header: the block is padded
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_back(folder: Path) -> tuple[list[Any], bytes]:
    """All records of the only W&B run below a folder, and what of it is sent, as bytes."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    wandb.teardown()  # its process writes the last records after the run has finished
    files = sorted((folder / "wandb").glob("*run-*/*.wandb"))
    content = [file.read_bytes() for file in files]
    records = [Record.FromString(data) for one in content for data in leveldb_records(one)]
    # Of an artifact its record says where to fetch it from, on this machine.
    told = [record.SerializeToString() for record in records if not record.HasField("artifact")]
    told += [path.read_bytes() for path in (folder / "wandb").glob("*run-*/files/**/*") if path.is_file()]
    return records, b"".join(told)


def test_what_is_shared_names_no_place(configure: Callable[..., DictConfig]) -> None:
    """Of relative paths the name alone is told, too, and of an address neither user nor query."""
    expected = {
        "dataset.root": ("../alice/photos", ".../photos"),
        "dataset.csv": ("lists/secret.csv", ".../secret.csv"),
        "backbone.weights": ("client/best.ckpt", ".../best.ckpt"),
        "+a": ("https://me:pass@a.b/w.pth?token=1", "https://a.b/w.pth"),
        "+b": ("/home/me/c", ".../c"),
        "+c": ("x/y", "x/y"),
    }
    options = [f"{name}='{given}'" for name, (given, _) in expected.items()]
    found = shareable(configure("dataset=folder", "runtime.train_classes=3", "runtime.embedding_dim=8", *options))
    for name, (_, told) in expected.items():
        assert found[name.lstrip("+").replace(".", "/")] == told


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_wandb_offline_holds_what_compares_runs(configure: Callable[..., DictConfig], tmp_path: Path) -> None:
    import wandb

    place, weights = tmp_path / "sweep" / "first", tmp_path / "private" / "small.pth"
    options = [*TINY, "method=abe", "method.M=2", "logger=wandb", "trainer.max_steps=2", "seed=3", "report=true"]
    weights.parent.mkdir()
    torch.save(backbone_of(configure(*options).backbone).state_dict(), weights)
    options += [f"backbone.weights={weights}", f"paths.output_dir={place}"]
    metrics = run(configure(*options), options)
    assert wandb.run is None  # finished
    records, kept = read_back(place)
    (begun,) = [record.run for record in records if record.HasField("run")]
    assert begun.run_id == (place / "wandb_id").read_text()
    assert begun.run_group.startswith("ABE-glyphs-")
    assert begun.job_type == "seed 3"
    assert begun.host == ""
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    assert set(begun.tags) == {"ABE", "glyphs", "Conventional"}
    config, history, summary = {}, [], {}
    for record in records:
        config |= {item.key: json.loads(item.value_json) for item in record.config.update}
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        summary |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update}
        if items := record.history.item:
            history.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    config.pop("_wandb", None)
    assert config["head/dim"] == 16
    assert config["backbone/weights"] == ".../small.pth"
    assert config["runtime/train_classes"] == 12
    assert not any(isinstance(value, dict) and value for value in config.values())  # flat
    assert not any(name.startswith(("paths", "logger")) for name in config)
    for private in (
        str(tmp_path),
        str(Path.home()),
    ):
        assert private.encode() not in kept, private
    names = {name for record in history for name in record}
    assert {"test/recall@1", "train/loss", "curves", "gallery", "attention", "similarities", "learners"} <= names
    assert [record["test/recall@1"] for record in history if "test/recall@1" in record][-1] == metrics["test/recall@1"]
    assert summary["best_on_test/recall@1"] == metrics["best_on_test/recall@1"]
    (table,) = (place / "wandb").rglob("learner_metrics*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"][:2] == ["learner", "recall@1"]
    assert [row[1] for row in content["data"]] == [metrics[f"learners/{i}/recall@1"] for i in range(2)]


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_wandb_has_the_pictures_and_tables_of_the_page_and_keeps_artifacts(
    configure: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_ARTIFACT_DIR", str(tmp_path / "artifacts"))
    place = tmp_path / "run"
    (place / "checkpoints").mkdir(parents=True)
    (place / "checkpoints" / "damaged.ckpt").write_text("of an earlier attempt")
    (place / "config.yaml").write_text("runtime: {}\nmethod: {}\n")
    options = [*TINY, "method=abe", "method.M=2", "logger=wandb", "logger.wandb.artifacts=true", "trainer.max_steps=2"]
    options += ["report=true", "rerank=alpha_qe"]
    run(configure(*options), options)
    records, _ = read_back(place)
    names = {item.key or item.nested_key[0] for record in records for item in record.history.item}
    assert {path.stem for path in (place / "figures").glob("*.png")} <= names
    tables = {"result", "reranked", "settings", "learners", "classes", "confusions"}
    assert {f"report_{table}" for table in tables} <= names
    kept = {one.type: one for one in (record.request.log_artifact.artifact for record in records) if one.type}
    kept |= {record.artifact.type: record.artifact for record in records if record.HasField("artifact")}
    identity = (place / "wandb_id").read_text()
    assert {kept[kind].name for kind in ("model", "test")} == {f"checkpoints-{identity}", f"test-{identity}"}
    sent = {
        kind: {entry.path: Path(entry.local_path) for entry in kept[kind].manifest.contents}
        for kind in ("model", "test")
    }
    assert sent["model"].keys() == {"last.ckpt", "best_on_test.ckpt", "config.yaml"}
    assert sent["test"].keys() == {"queries.npz", "metrics.json", *(f"{table}.table.json" for table in tables)}
    for name, original in (("last.ckpt", place / "checkpoints" / "last.ckpt"), ("config.yaml", place / "config.yaml")):
        assert sent["model"][name].read_bytes() == original.read_bytes()
    assert load_checkpoint(sent["model"]["last.ckpt"])["finished"]
    assert sent["test"]["queries.npz"].read_bytes() == (place / "queries.npz").read_bytes()
    assert json.loads(sent["test"]["reranked.table.json"].read_text())["columns"][1:3] == ["plain", "re-ranked"]


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_a_run_that_broke_off_is_failed(configure: Callable[..., DictConfig], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="became nan at step 2"):
        run(configure(*TINY, "logger=wandb", "lr=1e30", "trainer.max_steps=9"), [])
    records, _ = read_back(tmp_path / "run")
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1]


@pytest.mark.usefixtures("offline")
def test_other_ranks_need_no_configuration_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one may not have written it yet."""
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    wandb_logger(str(tmp_path / "run"), "dml")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("offline")
def test_tags_are_those_that_wandb_takes(
    configure: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWEPT, "1")
    sweep = tmp_path / ("n" * 70)
    sweep.mkdir()
    monkeypatch.chdir(sweep)
    config = configure(*TINY, "runtime.train_classes=12", "runtime.embedding_dim=16")
    RunFolder(Path("job")).open(config, [])
    assert wandb_logger("job", "dml")._wandb_init["tags"] == ["Baseline", "glyphs", "Conventional", "n" * 64]


@pytest.mark.usefixtures("offline")
def test_runs_that_differ_in_their_seed_are_a_group_and_a_restart_is_the_same_run(
    configure: Callable[..., DictConfig], tmp_path: Path
) -> None:
    groups = []
    for options in (["seed=1"], ["seed=2"], ["seed=2", "head.dim=8"]):
        folder = tmp_path / str(len(groups))
        config = configure(*TINY, *options, f"paths.output_dir={folder}", "runtime.train_classes=12")
        RunFolder(folder).open(config, options)
        first = wandb_logger(str(folder), "dml")
        again = wandb_logger(str(folder), "dml")
        assert first._wandb_init["id"] == again._wandb_init["id"]
        groups.append(first._wandb_init["group"])
    assert groups[0] == groups[1] != groups[2]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("offline")
def test_a_service_that_does_not_answer_holds_nothing_up(
    configure: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MODE": "online", "BASE_URL": "http://127.0.0.1:9", "API_KEY": "a" * 40}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setattr("dml.training.loggers.SECONDS", 2)
    metrics = run(configure(*TINY, "logger=wandb", "trainer.max_steps=2"), [])
    assert metrics["run/steps"] == 2
    assert "W&B does not answer" in (tmp_path / "run" / "run.log").read_text()
    (offline,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert (tmp_path / "run" / "wandb_id").read_text() in offline.name
    assert b"a" * 40 not in b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("mode", "project", "said"),
    [
        ("offline", "a/b", "logger.wandb.project=a/b is not possible: Invalid project name 'a/b': cannot contain"),
        ("offline", "a" * 200, "exceeded 128 characters"),
        ("bogus", "dml", "WANDB_MODE=bogus is no mode of W&B: unset it, or choose offline or disabled."),
    ],
)
def test_settings_that_wandb_refuses_are_told_before_anything_is_written(
    configure: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    project: str,
    said: str,
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(UserError, match=re.escape(said)):
        run(configure(*TINY, "logger=wandb", f"logger.wandb.project={project}"), [])
    assert not list(tmp_path.iterdir())


def test_tables_of_tensorboard_keep_names_and_digits() -> None:
    """Names of classes may look like numbers, or hold a bar."""
    text = _as_text(Table(["class", "Recall@1"], [["007", 0.5], ["7", 0.41], ["1e5", "+0.0000"], ["a|b", 1.0]]))
    cells = [line.strip("| ").split(" | ") for line in text.replace("\\|", "/").splitlines()]
    assert [[cell.strip() for cell in row] for row in cells if "--" not in row[0]] == [
        ["class", "Recall@1"],
        ["007", "0.5000"],
        ["7", "0.4100"],
        ["1e5", "+0.0000"],
        ["a/b", "1.0000"],
    ]
