"""What is said before several processes begin."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from omegaconf import DictConfig
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch import nn

from dml.errors import UserError, stop
from dml.launch.run import _check_folder_is_named
from dml.methods.base import Method
from dml.runs.folder import RunFolder
from dml.started import check_environment, of_slurm, processes
from dml.training.build import Parts
from dml.training.callbacks.course import Course
from dml.training.callbacks.evaluation import Evaluation
from dml.training.callbacks.steps import Timing
from dml.training.run import prepare_run, run
from dml.training.trainer import Bar, _environment
from tests.conftest import TINY

Configure = Callable[..., DictConfig]


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_NTASKS"])
def test_several_processes_need_the_name_of_their_folder(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("DML_OUTPUT_DIR", raising=False)
    _check_folder_is_named([])
    monkeypatch.setenv(variable, "1")
    _check_folder_is_named([])
    monkeypatch.setenv(variable, "2")
    _check_folder_is_named(["paths.output_dir=runs/a"])
    with pytest.raises(UserError, match=r"name their folder with paths\.output_dir=FOLDER"):
        _check_folder_is_named(["seed=1"])


@pytest.mark.slow
def test_batch_norm_sees_the_whole_batch_or_none(configure: Configure, tmp_path: Path) -> None:
    two = [*TINY, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match=r"freeze its statistics with backbone\.batch_norm=running"):
        prepare_run(configure(*two), folder)
    assert prepare_run(configure(*two, "backbone.batch_norm=running"), folder)[1].world_size == 2
    assert not folder.path.exists()


@pytest.mark.parametrize(
    ("environment", "devices", "nodes"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3", "WORLD_SIZE": "6"}, 2, 3),
        ({"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "1"}, 1, 1),
    ],
)
def test_torchrun_says_how_many(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    devices: int,
    nodes: int,
) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "a", **environment}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    options = ["backbone.batch_norm=running", "sampler.batch_size=24"]
    trainer = prepare_run(configure(*TINY, *options), RunFolder(tmp_path / "run"))[1]
    assert (trainer.num_devices, trainer.num_nodes) == (devices, nodes)


def test_a_task_of_slurm_starts_its_ranks_itself(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_slurm = {
        "NTASKS": "1",
        "JOB_ID": "7",
        "JOB_NAME": "x",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
        "NNODES": "1",
    }
    for name, value in of_slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    config = configure(
        *TINY, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "backbone.batch_norm=running"
    )
    trainer = prepare_run(config, RunFolder(tmp_path / "run"))[1]
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    assert not environment.creates_processes_externally
    assert trainer.world_size == 2
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}.items():  # in the rank that it starts
        monkeypatch.setenv(name, value)
    (environment,) = _environment()
    assert isinstance(environment, LightningEnvironment)
    environment.set_world_size(2)
    environment.set_global_rank(1)
    assert environment.local_rank() == 1
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        stop("told once")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_shell_of_slurm_is_one_process(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_NAME", "training")
    assert processes() == 4
    monkeypatch.setenv("SLURM_JOB_NAME", name)
    assert processes() == 1


def test_a_batch_that_the_devices_do_not_divide(configure: Configure, tmp_path: Path) -> None:
    options = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "backbone.batch_norm=running"]
    config = configure(*TINY, *options, "sampler=uniform", "sampler.batch_size=7")
    with pytest.raises(UserError, match="batch_size=7 is not divisible by the 2 devices"):
        prepare_run(config, RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5", "²"])
def test_a_number_of_processes_that_is_none(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"{name}={value} has to be a whole number"):
        check_environment()


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False), ("abc", True)])
def test_one_of_several_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, speaks: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit):
        stop("It is wrong.")
    assert ("It is wrong." in capsys.readouterr().err) == speaks


OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "a",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}
OF_SRUN = {
    "SLURM_NTASKS": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "x",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        *((OF_TORCHRUN, name) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK")),
        *((OF_SRUN, name) for name in ("SLURM_NNODES", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID")),
    ],
)
def test_variables_that_are_missing(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], missing: str
) -> None:
    for name, value in environment.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"but not {missing}: start all processes with (torchrun|srun)"):
        prepare_run(configure(*TINY, "backbone.batch_norm=running"), RunFolder(tmp_path / "run"))


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            [],
            r"RANK and WORLD_SIZE=2, but not from torchrun: start the processes",
        ),
        (
            {},
            ["trainer.num_nodes=2"],
            r"num_nodes=2 needs MASTER_ADDR, MASTER_PORT, NODE_RANK in the environment",
        ),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, ["trainer.num_nodes=2"], r"num_nodes=2 needs NODE_RANK in"),
    ],
)
def test_processes_of_which_nobody_says_how_many(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    options: list[str],
    said: str,
) -> None:
    """They would train beside each other in one folder, or wait without end."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        prepare_run(configure(*TINY, "backbone.batch_norm=running", *options), RunFolder(tmp_path / "run"))


def test_machines_that_were_set_by_hand(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.num_nodes=2", "backbone.batch_norm=running"]
    assert prepare_run(configure(*TINY, *two), RunFolder(tmp_path / "run"))[1].world_size == 2


def test_machines_with_different_numbers_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (OF_SRUN | {"SLURM_NTASKS": "3", "SLURM_NNODES": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--ntasks-per-node"):
        of_slurm()


def test_one_device_needs_no_other_to_see_its_batch(configure: Configure, tmp_path: Path) -> None:
    one = [*TINY, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.strategy=auto"]
    parts, trainer = prepare_run(configure(*one), RunFolder(tmp_path / "run"))
    assert trainer.world_size == 1
    assert not any(isinstance(module, nn.SyncBatchNorm) for module in parts.method.modules())


@pytest.mark.exhaustive
def test_ddp_on_one_processor(tmp_path: Path) -> None:
    """In a process of its own: DDP leaves its group and its environment behind."""
    one = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.max_steps=2"]
    command = [sys.executable, "-m", "dml.run", *TINY, *one, f"paths.output_dir={tmp_path / 'run'}"]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize(
    "option",
    [
        *("max_time=00:00:00:01", "fast_dev_run=true", "limit_train_batches=0", "limit_train_batches=1.0"),
        *("max_epochs=1", "min_steps=20", "barebones=true", "reload_dataloaders_every_n_epochs=1", "logger=false"),
        *("enable_checkpointing=true", "default_root_dir=x", "callbacks=[]", "val_check_interval=2", "profiler=simple"),
        *("accumulate_grad_batches=2", "accumulate_grad_batches=1", "inference_mode=false", "plugins=[]"),
    ],
)
def test_options_of_lightning_that_are_not_for_a_run(configure: Configure, tmp_path: Path, option: str) -> None:
    with pytest.raises(UserError, match=rf"trainer\.{option.partition('=')[0]} cannot be used"):
        prepare_run(configure(*TINY, f"+trainer.{option}"), RunFolder(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["+gradient_clip_algorithm=value", "+detect_anomaly=true", "overfit_batches=2"])
def test_options_of_lightning_that_are(configure: Configure, option: str) -> None:
    name = f"+trainer.{option[1:]}" if option.startswith("+") else f"trainer.{option}"
    options = [name, "trainer.max_steps=3", "trainer.gradient_clip_val=1.0", "protocol.clustering=false"]
    assert run(configure(*TINY, *options), options)["run/steps"] == 3


def test_what_lightning_says_of_its_options_when_it_begins(configure: Configure) -> None:
    with pytest.raises(UserError, match="Lightning refuses the options under 'trainer'"):
        run(configure(*TINY, "trainer.overfit_batches=0.001"), [])


def test_a_bar_counts_the_steps_of_this_process(method_of: Callable[..., Method]) -> None:
    method = method_of("method=baseline")
    method.terms = {"train/loss": torch.tensor(0.25)}
    bar = Bar(refresh_rate=10)
    timing = Timing()
    timing.seconds = 400.0  # before the resume
    trainer = SimpleNamespace(max_steps=600, global_step=500, is_global_zero=True, progress_bar_callback=bar)
    parts = SimpleNamespace(split=SimpleNamespace(monitor="test"))
    course = SimpleNamespace(evaluations_after=lambda step: 3)
    evaluation = Evaluation(cast(Course, course), timing, cast(Parts, parts))
    evaluation.seconds = 20.0
    trainer.callbacks = [timing, evaluation, bar]
    bar._trainer = trainer
    bar.on_train_start(trainer)
    shown = bar.train_progress_bar.format_dict
    assert (shown["n"], shown["total"], shown["initial"]) == (500, 600, 500)
    bar.train_progress_bar.start_t -= 1000  # evaluations
    for trainer.global_step in range(501, 521):
        timing.seconds += 0.5
        bar.on_train_batch_end(trainer, method)
    shown = bar.train_progress_bar.format_dict
    assert (shown["n"], shown["total"]) == (520, 600)
    assert shown["elapsed"] == pytest.approx(1000, abs=5)
    assert shown["rate"] == pytest.approx(2)  # 20 steps in 10 seconds of training, not 520 in 1,000
    assert re.search(r"<01:40, +2\.00it/s", str(bar.train_progress_bar))  # 80 steps and 3 evaluations
    assert "8%" not in str(bar.train_progress_bar)
    assert "loss=0.25" in str(bar.train_progress_bar)
    assert "Recall@1" not in str(bar.train_progress_bar)
    evaluation.recall = 0.66199
    trainer.global_step = 530
    bar.on_train_batch_end(trainer, method)
    assert "loss=0.25" in str(bar.train_progress_bar)
    assert ", Recall@1=0.662" in str(bar.train_progress_bar)
    parts.split.monitor = "validation"
    trainer.global_step = 540
    bar.on_train_batch_end(trainer, method)
    assert ", validation Recall@1=0.662" in str(bar.train_progress_bar)
    bar.train_progress_bar.close()


@pytest.mark.slow
def test_a_sweep_is_started_once(tmp_path: Path) -> None:
    """Under torchrun each process would wait for the others' jobs."""
    words = ["-m", "seed=1,2", f"paths.sweep_dir={tmp_path / 'sweep'}"]
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "dml.run", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "each would carry out the whole sweep: start one, without torchrun or srun" in done.stderr
    assert not (tmp_path / "sweep").exists()
