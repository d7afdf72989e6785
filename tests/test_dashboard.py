"""The W&B workspace: wandb-workspaces accepts it, and it shows what runs log."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from dml.dashboard import main
from dml.runs.log import read_metrics
from dml.training.loggers import shareable
from dml.training.run import run
from tests.conftest import TINY


def dashboard(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    without = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")} | environment
    command = [sys.executable, "-m", "dml.dashboard", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=without)


def values(node: Any, name: str) -> list[Any]:
    """All values of a key, however deep."""
    if isinstance(node, list):
        return [value for part in node for value in values(part, name)]
    if not isinstance(node, dict):
        return []
    own = [node[name]] if node.get(name) is not None else []
    return own + [value for part in node.values() for value in values(part, name)]


def test_what_it_shows_is_what_runs_log(configure: Callable[..., DictConfig], tmp_path: Path) -> None:
    done = dashboard("--project", "p", "--print")
    assert done.returncode == 0, done.stderr
    workspace = json.loads(done.stdout)
    kinds = {kind for kind in values(workspace, "viewType") if isinstance(kind, str)}
    assert {"Run History Line Plot", "Bar Chart", "Scatter Plot", "Run Comparer", "Media Browser"} <= kinds
    shown = set(re.findall(r'[":]((?:test|learners|train|model|run)/[\w@/]+)"', done.stdout))
    options = [*TINY, "method=abe", "trainer.max_steps=2", "report=true"]
    config = configure(*options)
    logged = set(run(config, options))
    for record in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        logged |= record.keys()
    of_other_methods = {"train/adversary", "train/zero_shot"}
    assert {"test/recall@1", "learners/self_cosine", "model/flops", "train/divergence"} <= shown
    assert shown - logged == of_other_methods
    assert {"method/_target_", "head/dim", "lr"} <= shareable(config).keys()
    for name in ("method/_target_", "head/dim"):
        assert name in done.stdout
    for picture in ("gallery", "attention", "similarities", "learners"):
        assert f'"{picture}"' in done.stdout
        assert (tmp_path / "run" / "figures" / f"{picture}.png").exists()


@pytest.mark.parametrize(("project", "said"), [("", "is empty"), (" ", "is empty"), ("a/b", "holds /")])
def test_projects_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], project: str, said: str
) -> None:
    monkeypatch.setattr("sys.argv", ["dashboard", "--print", "--project", project])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_service_that_does_not_answer_is_told_in_a_sentence() -> None:
    done = dashboard("--project", "p", WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="a" * 40)
    assert done.returncode == 2
    assert "dml: W&B did not take the workspace" in done.stderr
    assert "Traceback" not in done.stderr
