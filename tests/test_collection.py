"""A protocol of several trainings: one command trains them all, each in its folder, and takes their mean."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from dml.configuration.trainings import settle
from dml.errors import UserError
from dml.launch.collection import run_all
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
