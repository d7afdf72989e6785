"""What was measured: trials of a search, metrics of trainings, differences between rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """One training of a search.

    Attributes:
        options: overrides that were tried.
        value: the criterion on validation classes; None: the training failed.
        seconds: that the training took; None: unknown.
    """

    options: list[str]
    value: float | None
    seconds: float | None


@dataclass(frozen=True)
class Tuned:
    """The result of a row's search.

    Attributes:
        key: `Search.key`. If the row is searched differently by now, the keys differ and the row counts as not tuned.
        changes: see `Measurement`.
        chosen: options of the best trial.
        trials: all trials of the search.
        command, commit, date, hardware, versions: what was run, when, on what, and with which packages.
    """

    row: str
    key: str
    changes: list[str]
    chosen: list[str]
    trials: list[Trial]
    command: str
    commit: str
    date: str
    hardware: str
    versions: str = ""  # older records have none

    @property
    def best(self) -> float:
        """Returns the criterion of the best trial."""
        return max(one.value for one in self.trials if one.value is not None)


@dataclass(frozen=True)
class Measurement:
    """The metrics of one training of a row.

    Attributes:
        key: `Training.key`. If the row has other options by now, the keys differ and the row counts as not measured.
        seed: None: it was counted without training, as parameters are.
        changes: overrides beside those of the row, as for a shorter training; empty: the paper's setting.
        metrics: those that its columns show.
        command, commit, date, hardware, versions, seconds: what was run, when, on what, with which packages, and how
            long it took.
    """

    row: str
    part: str
    key: str
    seed: int | None
    changes: list[str]
    metrics: dict[str, float]
    command: str
    commit: str
    date: str
    hardware: str
    versions: str = ""  # older records have none
    seconds: float | None = None


@dataclass(frozen=True)
class Compared:
    """By how much a metric of a row is above that of another row on the same queries (as `dml.compare`, by classes).

    Attributes:
        changes: see `Measurement`.
        metric: recall@1 or map@r, 0 to 1.
        against: the other row.
        estimate: the difference.
        low, high: bounds of its 95 % interval.
        p: of the test that there is no difference.
        runs: number of runs of the row, and of the other row; each query counts with its mean over the runs.
        seeds: degrees of freedom of the spread over seeds or folds that the interval contains; 0: it contains none.
    """

    row: str
    part: str
    changes: list[str]
    metric: str
    against: str
    estimate: float
    low: float
    high: float
    p: float
    runs: list[int]
    seeds: int = 0  # in older records no interval contains it
