"""A run that ended goes on with more steps, to what the longer run alone comes to, to the last bit.

Only its best checkpoint may be another: that of the shorter run's end, if this was evaluated out of turn.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from dml.errors import UserError
from dml.runs.collecting import leaves
from dml.runs.folder import RunFolder
from dml.training.run import run
from tests.conftest import TINY
from tests.test_resume import outcome

Configure = Callable[..., DictConfig]
OPTIONS = [*TINY, "trainer.checkpoint_every=2", "lr=0.02", "loss=xbm", "loss.loss.memory_size=64"]
PLATEAU = ["scheduler=plateau", "scheduler.patience=0", "callbacks=ema"]
CHOSEN = ["protocol=random_class_split", "protocol.split=0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["protocol.every=2"],  # with an evaluation at the end of the shorter one
        pytest.param(["protocol.every=4", "trainer.log_every=2"], marks=pytest.mark.exhaustive),  # and without
        pytest.param(["protocol.every=3", *PLATEAU, *CHOSEN], marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_lengthened_run_is_the_longer_run(configure: Configure, tmp_path: Path, options: list[str]) -> None:
    def train(name: str, steps: int) -> Path:
        folder = tmp_path / name
        run(configure(*OPTIONS, *options, f"trainer.max_steps={steps}", f"paths.output_dir={folder}"), options)
        return folder

    alone = train("alone", 9)
    folder = train("lengthened", 6)
    assert train("lengthened", 9) == folder
    metrics, records, tensors = outcome(alone)
    again = outcome(folder)
    assert again[0] == metrics
    assert again[1] == records
    assert all(torch.equal(again[2][name], value) for name, value in tensors.items())
    first, second = json.loads((folder / "provenance.json").read_text())
    assert "lengthened" not in first
    assert second["lengthened"] == {"from_step": 6, "max_steps": [6, 9]}
    assert "lengthened at step 6 to 9 steps" in (folder / "run.log").read_text()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"trainer\.max_steps was 9, is 6"):
        train("lengthened", 6)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_lengthening_that_dies_leaves_the_shorter_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its first checkpoint; then neither figures nor configuration are those of the shorter one any more."""
    options = [*TINY, "protocol.select=best_test", "protocol.every=2", "trainer.checkpoint_every=100"]

    def train(steps: int) -> dict[str, float]:
        return run(configure(*options, f"trainer.max_steps={steps}"), [f"trainer.max_steps={steps}"])

    def dies(*_: object) -> None:
        raise RuntimeError("killed")

    train(2)
    (before,) = leaves([tmp_path / "run"])
    with monkeypatch.context() as broken:
        broken.setattr("dml.training.run.fit", dies)
        with pytest.raises(RuntimeError, match="killed"):
            train(6)
    (same,) = leaves([tmp_path / "run"])
    assert (same.config, same.overrides, same.metrics) == (before.config, before.overrides, before.metrics)
    best = tmp_path / "run" / "checkpoints" / "best_on_test.ckpt"
    for content, said in ((b"", "is damaged"), (None, "is gone")):
        aside = best.rename(tmp_path / "aside")
        if content is not None:
            best.write_bytes(content)
        log = (tmp_path / "run" / "metrics.jsonl").read_bytes()
        with pytest.raises(
            UserError, match=rf"best_on_test\.ckpt {said}, and this run tests that checkpoint at its end"
        ):
            train(6)
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == log
        aside.rename(best)
    train(6)
    (longer,) = leaves([tmp_path / "run"])
    assert (longer.config.trainer.max_steps, longer.metrics["run/steps"]) == (6, 6)
    assert longer.overrides == ["trainer.max_steps=6"]


@pytest.mark.slow
def test_a_schedule_that_depends_on_the_length(configure: Configure) -> None:
    options = [*TINY, "method=dces", "method.K=2", "method.grouping=random", "protocol.clustering=false"]
    run(configure(*options, "trainer.max_steps=3"), [])
    with pytest.raises(
        UserError, match=r"3 steps, which cannot be lengthened, since options depend on its length \(method\.total"
    ):
        run(configure(*options, "trainer.max_steps=6"), [])
    with pytest.raises(UserError, match=r"another configuration \(lr was"):
        run(configure(*options, "trainer.max_steps=6", "lr=0.5"), [])


def test_a_run_that_patience_ended(configure: Configure, tmp_path: Path) -> None:
    config = configure(*TINY, "trainer.max_steps=8", "runtime.embedding_dim=1", "runtime.train_classes=1")
    folder = RunFolder.of(config)
    folder.open(config, [])
    from omegaconf import OmegaConf

    container = OmegaConf.to_container(config, resolve=True)
    torch.save({"state_dict": {}, "config": container, "finished": True, "global_step": 4}, folder.last)
    with pytest.raises(
        UserError, match=r"protocol\.patience ended at step 4 of 8, where it would end with 12 steps too"
    ):
        folder.check(configure(*TINY, "trainer.max_steps=12"))
    folder.check(config)
