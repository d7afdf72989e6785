"""What is said before several processes begin."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from dml.errors import UserError
from dml.folder import RunFolder
from dml.run import _check_folder_is_named
from dml.train import prepare
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


def test_batch_norm_sees_the_whole_batch_or_none(configure: Configure, tmp_path: Path) -> None:
    two = [*TINY, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match=r"freeze its statistics with backbone\.freeze=bn_statistics"):
        prepare(configure(*two), folder)
    assert prepare(configure(*two, "backbone.freeze=bn_statistics"), folder)[1].world_size == 2
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
    trainer = prepare(configure(*TINY, "backbone.freeze=bn_statistics"), RunFolder(tmp_path / "run"))[1]
    assert (trainer.num_devices, trainer.num_nodes) == (devices, nodes)


def test_a_task_of_slurm_starts_its_ranks_itself(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        *TINY, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "backbone.freeze=bn_statistics"
    )
    trainer = prepare(config, RunFolder(tmp_path / "run"))[1]
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    assert not environment.creates_processes_externally
    assert trainer.world_size == 2
