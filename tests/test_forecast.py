"""What is said of a run's length before it starts in earnest."""

import re
import resource
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dml.training.callbacks.course import Course
from dml.training.callbacks.evaluation import Evaluation
from dml.training.callbacks.forecast import Forecast, forecast
from dml.training.callbacks.steps import Timing


def test_it_is_said_once_and_of_what_is_to_come(capsys: pytest.CaptureFixture[str]) -> None:
    timing, course = Timing(), SimpleNamespace(last_step=1000, every=300, config={"report": True})
    course.evaluations_after = lambda step: Course.evaluations_after(cast(Course, course), step)
    callback = Forecast(cast(Course, course), timing, cast(Evaluation, SimpleNamespace(seconds=30.0)))
    trainer: Any = SimpleNamespace(global_step=500, is_global_zero=True)
    trainer.strategy = SimpleNamespace(root_device=torch.device("cpu"))
    callback.on_train_start(trainer, cast(Any, None))
    for trainer.global_step in range(501, 520):
        timing.seconds += 100 if trainer.global_step == 501 else 2  # the first step is slow
        callback.on_train_batch_end(trainer, cast(Any, None), None, None, 0)
    said = capsys.readouterr().err
    assert said.count("About") == 1
    assert "About 18 minutes: 494 steps of 2 s, 3 evaluations of 30 s, then the report. It takes at least" in said
    (known,) = re.findall(r"at least ([\d.]+) GB of memory in each process, its peak so far; the report may add", said)
    assert float(known) == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, abs=0.2)


def test_evaluations_to_come_are_counted_as_they_come() -> None:
    for last, every in ((1000, 300), (900, 300), (5, 100)):
        course = cast(Course, SimpleNamespace(last_step=last, every=every))
        for step in (*range(0, last, 7), last):
            to_come = sum(s == last or s % every == 0 for s in range(step + 1, last + 1))
            assert Course.evaluations_after(course, step) == to_come


def test_words() -> None:
    assert (
        forecast(10, 0.5, 1, None, reports=True)
        == "About 5 seconds: 10 steps of 0.5 s, 1 evaluation of unknown length, then the report"
    )
    assert forecast(2, 0.5, 0, None, reports=False) == "About 1 second: 2 steps of 0.5 s"
