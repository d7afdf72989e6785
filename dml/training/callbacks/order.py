"""The order of the callbacks, by which a run that was killed anywhere goes on exactly."""

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
    """Those of a run, in their order.

    Lightning's own were passed over: its validation loop runs before the callbacks of a step, so that ModelCheckpoint
    and EarlyStopping know neither the step's own evaluation nor what a method does after it, and a run that is killed
    between them would not be the same one when it is resumed.

    Raises:
        UserError: a patience without validation classes; a callback of the user's that a run cannot do with.
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
