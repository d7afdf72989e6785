"""A protocol of several trainings: one command trains them all, each in its folder, and takes their mean."""

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from dml.configuration.trainings import settle
from dml.errors import UserError
from dml.launch.collection import _put_together, _to_do, run_all
from dml.reporting.summary import NEEDED
from dml.runs.folder import RunFolder
from dml.training.run import run
from tests.conftest import TINY

Configure = Callable[..., DictConfig]
OPTIONS = [
    *TINY,
    "protocol=random_class_split",
    "protocol.splits=2",
    "protocol.clustering=false",
    "trainer.max_steps=2",
]
SIZES = ["runtime.embedding_dim=1", "runtime.train_classes=1"]


@pytest.mark.exhaustive
def test_all_splits_one_after_another(configure: Configure, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run, (N=8)"  # a name that Hydra's grammar takes in quotes alone
    options = [*OPTIONS, f"paths.output_dir='{folder}'", f"paths.cache_dir={tmp_path}"]
    # As if killed after the second split: the first is missing.
    early = [*OPTIONS, "protocol.split=1", f"paths.output_dir='{folder / 'split_1'}'"]
    config = configure(*early)
    settle(config)
    run(config, early)
    kept = (folder / "split_1" / "metrics.json").stat().st_mtime_ns
    whole = (folder / "split_1" / "config.yaml").read_text().replace("split: 1", "split: null")
    (folder / "config.yaml").write_text(whole.replace(f"seed: {config.seed}", "seed: 0"))
    returned = run_all(configure(*options), options)
    assert "training 2 of 2" in capfd.readouterr().out
    assert (folder / "split_1" / "metrics.json").stat().st_mtime_ns == kept
    metrics = json.loads((folder / "metrics.json").read_text())
    assert returned == metrics
    each = [json.loads((folder / f"split_{i}" / "metrics.json").read_text()) for i in range(2)]
    for name in ("test/recall@1", "last/map@r", "untrained/recall@2"):
        assert metrics[name] == statistics.fmean(one[name] for one in each)
        assert metrics[f"{name}/std"] == statistics.stdev(one[name] for one in each)
    assert metrics["run/trainings"] == 2
    assert each[0]["data/train/classes"] == 6
    assert each[0]["untrained/map@r"] != each[1]["untrained/map@r"]  # the same test images, each with its own seed
    assert "2 runs of 1 configuration" in (folder / "summary.html").read_text()

    here = f"paths.output_dir='{folder}'"
    with pytest.raises(UserError, match=r"another configuration \(lr was 0.001, is 0.5"):
        run_all(configure(*OPTIONS, "lr=0.5", here), [])
    with pytest.raises(UserError, match=r"another configuration \(protocol.split was None, is 1"):
        run(configure(*OPTIONS, "protocol.split=1", here), [])

    fewer = [*OPTIONS, "protocol.splits=1", here]
    assert run_all(configure(*fewer), fewer)["run/trainings"] == 1
    assert "1 run of 1 configuration" in (folder / "summary.html").read_text()


def test_trainings_that_patience_ended_are_not_lengthened_and_nothing_is_written(
    configure: Configure, tmp_path: Path
) -> None:
    def folder_of(*options: str) -> RunFolder:
        config = configure(*OPTIONS, "trainer.max_steps=8", *options, *SIZES)
        settle(config)
        folder = RunFolder.of(config)
        folder.open(config, [])
        state = {"state_dict": {}, "config": OmegaConf.to_container(config, resolve=True), "finished": True}
        if options:
            torch.save(state | {"global_step": 4}, folder.last)
        return folder

    whole = folder_of()
    folder_of("protocol.split=1", f"paths.output_dir={whole.path / 'split_1'}")
    before = {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=r"split_1 holds a run that protocol\.patience ended at step 4 of 8, where it would"
    ):
        run_all(configure(*OPTIONS, "trainer.max_steps=12", f"paths.output_dir={whole.path}"), [])
    assert {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()} == before


def test_what_is_to_do_and_what_counts(configure: Configure, tmp_path: Path) -> None:
    """Trainings of the length that is asked for, in their own places; copies count nowhere."""
    config = configure(*OPTIONS, f"paths.output_dir={tmp_path / 'whole'}")
    whole = RunFolder(tmp_path / "whole")
    for i, recall in enumerate([0.25, 0.75]):
        one = configure(*OPTIONS, f"protocol.split={i}", *SIZES)
        part = RunFolder(whole.path / f"split_{i}")
        part.open(one, [])
        assert _to_do(config, whole) == ["split_0", "split_1"][i:]
        sizes = dict.fromkeys(["data/test/classes", "data/test/images", *NEEDED], 9.0)
        part.write_metrics(sizes | {"test/recall@1": recall, "run/steps": 2})
    assert _to_do(config, whole) == []
    longer = configure(*OPTIONS, "trainer.max_steps=3", f"paths.output_dir={tmp_path / 'whole'}")
    assert _to_do(longer, whole) == ["split_0", "split_1"]
    shutil.copytree(whole.path / "split_0", whole.path / "old" / "split_0")
    shutil.copytree(whole.path / "split_0", whole.path / "split_1" / "split_0")
    metrics = _put_together(config, whole)
    assert (metrics["run/trainings"], metrics["test/recall@1"]) == (2, 0.5)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("head.dim=0", r"head\.dim=0"),
        ("dataset.classes=2", "classes"),
        ("backbone.weights=/nowhere.pth", "/nowhere.pth"),
        ("trainer.precision=abc", "precision"),
        ("protocol.splits=0", r"protocol\.splits=0 has to be at least 1"),
        ("protocol.splits=abc", r"protocol\.splits=abc has to be a whole number"),
        ("protocol.seed=-1", r"protocol\.seed=-1 has to be at least 0"),
    ],
)
def test_a_mistake_is_found_before_anything_is_written(
    configure: Configure, tmp_path: Path, option: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        run_all(configure(*OPTIONS, option), [])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["1.5", "abc", "-1", "2"])
def test_a_split_that_is_none(configure: Configure, tmp_path: Path, split: str) -> None:
    with pytest.raises(UserError, match=rf"protocol\.split={split} "):
        run(configure(*OPTIONS, f"protocol.split={split}"), [])
    assert not (tmp_path / "run").exists()


def test_several_processes_at_once(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"start one training at a time, such as protocol\.split=0"):
        run_all(configure(*OPTIONS), [])
    assert not (tmp_path / "run").exists()
