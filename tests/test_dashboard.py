"""The W&B workspace: wandb-workspaces accepts it, and it shows what runs log."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig

from dml.dashboard import main
from dml.errors import UserError
from dml.evaluation.metric import metric
from dml.reporting import dashboard as module
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


@pytest.mark.slow
def test_what_it_shows_is_what_runs_log(configure: Callable[..., DictConfig], tmp_path: Path) -> None:
    done = dashboard("--project", "p", "--print")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    kinds = {kind: [one for one in values(made[kind], "viewType") if one != "runs"] for kind in made}
    panels = {"Run History Line Plot", "Bar Chart", "Scatter Plot", "Run Comparer", "Media Browser"}
    assert panels <= set(kinds["workspace"])
    assert sorted(kinds["workspace"]) == sorted(kinds["report"])
    grids = [block for block in made["report"]["spec"]["blocks"] if block["type"] == "panel-grid"]
    assert len(grids) == 6
    assert all(runs["grouping"] == [{"section": "run", "name": "group"}] for runs in values(grids, "runSets")[0])
    shown = set(re.findall(r'[":]((?:test|learners|train|model|run|rerank)/[\w@/]+)"', done.stdout))
    options = [*TINY, "method=abe", "trainer.max_steps=2", "report=true", "rerank=alpha_qe"]
    config = configure(*options)
    logged = set(run(config, options))
    for record in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        logged |= record.keys()
    of_others = {"train/adversary", "train/zero_shot", "test/map"}  # methods and protocols
    assert {"test/recall@1", "rerank/recall@1", "learners/self_cosine", "model/flops", "train/divergence"} <= shown
    assert shown - logged == of_others
    assert {"method/_target_", "head/dim", "lr"} <= shareable(config).keys()
    for name in ("method/_target_", "head/dim"):
        assert name in done.stdout
    for picture in ("gallery", "attention", "similarities", "learners"):
        assert f'"{picture}"' in done.stdout
        assert (tmp_path / "run" / "figures" / f"{picture}.png").exists()


def test_panels_show_means_with_their_deviation_and_what_their_titles_say() -> None:
    panels: dict[str, Any] = {
        one.title: one for section in module.sections() for one in section.panels if hasattr(one, "title")
    }
    for one in panels.values():
        if hasattr(one, "groupby_aggfunc"):
            assert (one.groupby_aggfunc, one.groupby_rangefunc) == ("mean", "stddev"), one.title
    cost = panels[f"Recall@1 over {metric('model/flops').title}"]
    assert (cost.x.name, cost.y.name) == ("model/flops", "test/recall@1")
    for place in ("test", "validation"):
        assert panels[f"Recall@1 on {place} classes"].y == [f"{place}/recall@1"]


@pytest.mark.parametrize(("project", "said"), [("", "is empty"), (" ", "is empty"), ("a/b", "holds /")])
def test_projects_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], project: str, said: str
) -> None:
    monkeypatch.setattr("sys.argv", ["dashboard", "--print", "--project", project])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    for name in [name for name in sys.modules if name.startswith(("wandb_workspaces.", "dml.reporting.dashboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.argv", ["dashboard", "--print", "--project", "p"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "dml: wandb-workspaces is not installed: pip install '.[dashboard]'.\n"


@pytest.fixture
def sweep_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`sweep_file("lr=1,2")`: the content of the file that the command writes."""

    def sweep_file(*overrides: str) -> dict[str, Any]:
        path = tmp_path / "sweep.yaml"
        monkeypatch.setattr("sys.argv", ["dashboard", "--project", "p", "--sweep-file", str(path), *overrides])
        main()
        content: dict[str, Any] = yaml.safe_load(path.read_text())
        return content

    return sweep_file


@pytest.mark.exhaustive
def test_a_sweep_of_hydra_s_runs_under_an_agent_of_wandb_s(
    tmp_path: Path, sweep_file: Callable[..., dict[str, Any]]
) -> None:
    """The command is put together by W&B's own functions, as its agent does it, and run without W&B's service."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    made = sweep_file(*TINY, "trainer.max_steps=2", "head.dim=8,16", "seed=range(0,3)")
    assert made["method"] == "grid"
    assert made["metric"] == {"name": "test/recall@1", "goal": "maximize"}
    assert made["parameters"] == {"head.dim": {"values": [8, 16]}, "seed": {"values": [0, 1, 2]}}
    chosen = {name: {"value": values["values"][-1]} for name, values in made["parameters"].items()}
    known = create_sweep_command_args({"args": chosen}) | {"interpreter": [sys.executable], "env": ["/usr/bin/env"]}
    command: list[str] = []
    for word in create_sweep_command(made["command"]):
        command += known[word[2:-1]] if word.startswith("${") and word.endswith("}") else [word]
    of_agent = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "r1", "WANDB_MODE": "offline"}
    env = os.environ | of_agent | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "wandb_s1" / "r1"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["head"]["dim"], config["seed"]) == (16, 2)
    assert (run / "wandb_id").read_text() == "r1"
    assert len(list((run / "wandb").glob("offline-run-*-r1"))) == 1


@pytest.mark.slow
def test_a_search_on_the_test_classes_is_told(
    sweep_file: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    told = "this search chooses on the test classes"
    assert sweep_file("lr=interval(1e-5,1e-3)", "protocol.criterion=map@r")["metric"]["name"] == "test/map@r"
    assert told in capsys.readouterr().err
    assert sweep_file("lr=interval(1e-5,1e-3)", "protocol=tuning")["metric"]["name"] == "test/map@r"
    sweep_file("lr=interval(1e-5,1e-3)", "protocol.select=val_classes")
    sweep_file("lr=interval(1e-5,1e-3)", "protocol=mlrc", "protocol.fold=0", "protocol.repeat=0")
    sweep_file("lr=1e-5,1e-3")  # a grid chooses nothing
    assert told not in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_of_hydra_s_is_one_of_wandb_s(sweep_file: Callable[..., dict[str, Any]]) -> None:
    ranges = ["lr=tag(log,interval(1e-5,1e-3))", "method.M=int(interval(1,8))"]
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=30", "protocol.select=val_classes"]
    made = sweep_file("method=abe", *ranges, *search, "protocol.criterion=map@r")
    assert (made["method"], made["run_cap"]) == ("bayes", 30)
    assert made["metric"]["name"] == "best_on_validation/map@r"
    assert made["parameters"]["lr"] == {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-3}
    assert made["parameters"]["method.M"] == {"distribution": "int_uniform", "min": 1, "max": 8}
    assert not any("hydra" in word for word in made["command"])
    overlay = sweep_file("sweep=K", "seed=0,1")
    assert overlay["parameters"] == {"seed": {"values": [0, 1]}, "method.K": {"values": [1, 2, 4, 8]}}
    assert sweep_file("sweep=K", "method.K=1,2")["parameters"]["method.K"]["values"] == [1, 2]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["lr=0.1"], "nothing is swept: give an option several values"),
        (["mehtod=abe,dces"], "mehtod is no option: did you mean method?"),
        (["method=abe", "method.M=0,1"], "method.M=0 "),
        (["method=glob(*)"], "W&B has no such range"),
        (["method=abe", "method.M=tag(log,int(interval(1,8)))"], "W&B has no such range"),
        (["protocol=random_class_split", "seed=1,2"], "sweep it too, protocol.split=0,1,2,3,4,5,6,7,8,9"),
    ],
)
def test_sweeps_that_cannot_be_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    said: str,
) -> None:
    file = tmp_path / "sweep.yaml"
    monkeypatch.setattr("sys.argv", ["dashboard", "--project", "p", "--sweep-file", str(file), *overrides])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.exhaustive
def test_a_service_that_does_not_answer_is_told_in_a_sentence() -> None:
    done = dashboard("--project", "p", WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="a" * 40)
    assert done.returncode == 2
    assert "dml: W&B did not take the workspace" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_without_an_entity_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.wandb, "login", lambda prompt: True)
    monkeypatch.setattr(module.wandb, "Api", lambda: SimpleNamespace(default_entity=None))
    with pytest.raises(UserError, match="no user or team of this key: give one with --entity"):
        module.send("project", None, "name")
