"""The order of the callbacks, which lets a run that was killed anywhere be continued exactly."""

from omegaconf import DictConfig
from pytorch_lightning.callbacks import Callback

from dml.runs.folder import RunFolder
from dml.training.build import Parts
from dml.training.callbacks.best import BestCheckpoint
from dml.training.callbacks.checkpoints import Checkpoints
from dml.training.callbacks.course import Course
from dml.training.callbacks.evaluation import Evaluation
from dml.training.callbacks.forecast import Forecast
from dml.training.callbacks.gradient import FiniteWeights, FirstGradient
from dml.training.callbacks.report import Report
from dml.training.callbacks.steps import MethodStep, StepSeed, Timing, TrainingLog
from dml.training.callbacks.users import users_callbacks


def callbacks_of(config: DictConfig, folder: RunFolder, parts: Parts) -> list[Callback]:
    """Makes the callbacks of a run, in their order.

    Lightning's own callbacks are not used: its validation loop runs before the callbacks of a step. ModelCheckpoint and
    EarlyStopping would know neither the step's own evaluation nor what a method does after it, and a run killed between
    them would be another one when it is resumed.

    Raises:
        UserError: patience is set without validation classes, or a callback of the user cannot be used in a run.
    """
    course = Course(config, parts.protocol.interval(parts.data.sampler.steps_per_epoch))
    timing = Timing()
    evaluation = Evaluation(course, timing, parts)
    best = BestCheckpoint(course, evaluation, folder, parts.protocol)
    last: list[Callback] = [MethodStep(course, timing), Checkpoints(course, timing, folder)]
    return [
        course,
        StepSeed(config.seed),
        FirstGradient(config, parts.data),
        *users_callbacks(config),
        timing,
        TrainingLog(config.trainer.log_every, course),
        FiniteWeights(course),
        evaluation,
        best,
        Forecast(course, timing, evaluation),
        Report(course, evaluation, best, timing, folder, parts),
        *last,
    ]
