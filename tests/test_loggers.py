"""What is written where, read back."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

from dml.loggers import FolderLogger, read_metrics
from dml.train import run
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


@pytest.mark.usefixtures("offline")
def test_wandb_offline_holds_config_figures_and_pictures(configure: Callable[..., DictConfig], tmp_path: Path) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    metrics = run(configure(*TINY, "logger=wandb", "trainer.max_steps=2"), [])
    assert wandb.run is None  # finished
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert (tmp_path / "run" / "wandb_id").read_text() in file.name
    config, history = {}, []
    for data in leveldb_records(file.read_bytes()):
        record = Record.FromString(data)
        for item in record.config.update:
            config[item.key] = json.loads(item.value_json)
        if items := record.history.item:
            history.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    assert config["head"]["dim"] == 16
    names = {name for record in history for name in record}
    assert {"test/recall@1", "train/loss", "curves", "gallery", "similarities"} <= names
    assert [record["test/recall@1"] for record in history if "test/recall@1" in record][-1] == metrics["test/recall@1"]
