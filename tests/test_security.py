"""Nothing that came from elsewhere runs code here, and no shell sees an option."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from dml.build import build_method
from dml.command import CONF
from dml.errors import UserError
from dml.rebuild import load
from tests.conftest import TINY

SOURCES = [path for part in ("dml", "experiments") for path in (CONF.parent / part).rglob("*.py")]


@pytest.mark.parametrize(
    "forbidden", [r"weights_only=False", r"\bpickle\.loads?\(", r"shell=True", r"os\.system", r"\beval\("]
)
def test_no_source_has_it(forbidden: str) -> None:
    assert len(SOURCES) > 90
    # Of a checkpoint that is written, Lightning's option of this name says what is left out.
    kept = r"save_checkpoint\(.*weights_only=False"
    found = [
        f"{path}: {line}"
        for path in SOURCES
        for line in path.read_text().splitlines()
        if re.search(rf"(?<![.\w]){forbidden}" if forbidden.startswith(r"\beval") else forbidden, line)
        and not re.search(kept, line)
    ]
    assert found == []


def test_all_that_is_loaded_is_loaded_as_data() -> None:
    for path in SOURCES:
        for call in re.findall(r"torch\.load\([^\n]*", path.read_text()):
            assert "weights_only=True" in call, (path, call)


@pytest.fixture
def checkpoint(configure: Callable[..., DictConfig], tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint({"head": {...}})`: of an untrained run whose configuration says something else."""

    def checkpoint(said: dict[str, Any]) -> Path:
        config = configure(*TINY, "runtime.train_classes=12", "runtime.embedding_dim=16")
        state = build_method(config).state_dict()
        container = OmegaConf.to_container(config, resolve=True)
        assert isinstance(container, dict)
        path = tmp_path / "some.ckpt"
        torch.save({"config": container | said, "state_dict": state, "finished": True}, path)
        return path

    return checkpoint


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.exec",
        "torch.hub.load",
        "torch.nn.modules.module.torch.hub.load",
        "dml.files.replace_file",
    ],
)
def test_a_checkpoint_that_asks_for_more_than_a_network_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, target: str
) -> None:
    assert load(checkpoint({})).embed(torch.rand(1, 3, 32, 32)).shape == (1, 1, 16)
    said = {
        "method": {
            "_target_": "dml.methods.baseline.Baseline",
            "optimizer": {"_target_": target, "_args_": ["touch x"]},
        }
    }
    with pytest.raises(UserError, match=rf"asks for {re.escape(target)}, which builds no network"):
        load(checkpoint(said))


@pytest.mark.parametrize("reference", ["${evil}", "\\${evil}"])
def test_a_checkpoint_that_refers_to_what_is_not_looked_at_is_refused(
    checkpoint: Callable[..., Path], reference: str
) -> None:
    said = {"evil": {"_target_": "os.system", "_args_": ["touch x"]}}
    said |= {"head": {"_target_": "dml.models.heads.Head", "pooling": reference}}
    with pytest.raises(UserError, match="holds a reference"):
        load(checkpoint(said))


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"nonsense")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "b.ckpt")
    for name in ("a.ckpt", "b.ckpt", "none.ckpt"):
        with pytest.raises(UserError, match="no checkpoint of a run, or damaged"):
            load(tmp_path / name)
