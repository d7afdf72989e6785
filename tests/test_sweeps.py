"""`-m`: a folder and a process a job, whatever launches them; what fails is marked, what is done is kept."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from filelock import FileLock, Timeout
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf, open_dict, read_write

from dml.configuration.composition import AGAIN, CONF, composed, elsewhere, going_on
from dml.errors import INTERRUPTED, MISTAKE, UserError
from dml.launch.job import job
from dml.launch.locks import HELD, free_place, hold, is_over, turn
from dml.launch.search import settle_search, told_of_search, when_found
from dml.launch.sweep import NAME_BYTES, Sweep, job_name, job_of_a_sweep, remembered
from dml.process import SWEPT
from dml.runs.log import read_metrics
from dml.training.build import build_method
from tests.conftest import TINY

TINIER = [*TINY, "trainer.max_steps=2", "protocol.every=2", "protocol.clustering=false"]


def sweep(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dml.run", "-m", *TINIER, f"paths.sweep_dir={folder}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def figures(folder: Path) -> dict[str, float]:
    content: dict[str, float] = json.loads((folder / "metrics.json").read_text())
    return content


@pytest.mark.slow
def test_a_job_that_fails_is_marked(tmp_path: Path) -> None:
    done = sweep(tmp_path, "method=abe", "method.M=3,1")  # 3 learners cannot share 16 dimensions
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "all 3 learners together" in done.stderr
    assert f"Failed: {tmp_path / 'method.M=3'} (exit code 2)" in done.stderr
    assert "1 of the jobs failed" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("method*")) == ["method.M=1", "method.M=3.failed"]
    assert OmegaConf.load(tmp_path / "method.M=1" / "config.yaml").method.M == 1
    assert [row["label"] for row in json.loads((tmp_path / "summary.json").read_text())] == ["ABE"]


@pytest.mark.exhaustive
def test_the_same_sweep_again_does_what_is_missing(tmp_path: Path) -> None:
    assert sweep(tmp_path, "method=abe", "method.M=3,1").returncode == 1
    larger = sweep(tmp_path, "method=abe", "method.M=2,1")
    assert larger.returncode == 0  # 3 learners are not asked for any more
    assert larger.stdout.count("nothing was trained") == 1
    assert figures(tmp_path / "method.M=2")["run/steps"] == 2
    assert {row["label"] for row in json.loads((tmp_path / "summary.json").read_text())} == {"method.M=1", "method.M=2"}


@pytest.mark.exhaustive
def test_two_devices_a_job(tmp_path: Path) -> None:
    devices = ["trainer=ddp", "trainer.devices=2", "backbone.batch_norm=running"]
    done = sweep(tmp_path, *devices, "seed=1,2")
    assert done.returncode == 0, done.stderr
    for seed in (1, 2):
        folder = tmp_path / f"seed={seed}"
        assert OmegaConf.load(folder / "config.yaml").seed == seed
        assert figures(folder)["run/devices"] == 2
        steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl") if "train/loss" in record]
        assert steps == [1, 2]  # once, by one rank
    (row,) = json.loads((tmp_path / "summary.json").read_text())  # the seeds are one row
    assert len(row["runs"]) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "plugin",
    [
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=10", "hydra.launcher.cpus_per_task=1"],
    ],
    ids=["joblib", "submitit"],
)
def test_launchers(tmp_path: Path, plugin: list[str]) -> None:
    done = sweep(tmp_path, *plugin, "seed=1,2")
    assert done.returncode == 0, done.stderr
    for seed in (1, 2):
        assert figures(tmp_path / f"seed={seed}")["run/steps"] == 2
        assert "training" in (tmp_path / f"seed={seed}.log").read_text()


@pytest.mark.exhaustive
def test_optuna_maximises_and_survives_a_failure(tmp_path: Path) -> None:
    options = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4"]
    options += ["hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1", "hydra.sweeper.max_failure_rate=1"]
    options += ["protocol.select=val_classes", "lr=choice(1e-3,1e-2,1e30)"]
    done = sweep(tmp_path, *options)
    assert "1 of the jobs failed" in done.stderr
    assert "chooses on the test classes" not in done.stderr
    assert done.returncode == 1
    best = OmegaConf.load(tmp_path / "optimization_results.yaml")
    found = {file.parent.name: figures(file.parent) for file in tmp_path.glob("lr=*/metrics.json")}
    assert best.best_value == max(of["best_on_validation/recall@1"] for of in found.values())
    assert f"Best by recall@1 ({best.best_value:.4f}): lr={best.best_params.lr}" in done.stdout


OPTUNA = ["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "protocol=tuning"]
RATES = "lr=tag(log,interval(1e-4,1e-2))"


@pytest.mark.slow
def test_a_search_that_is_started_again_finds_its_trials(tmp_path: Path) -> None:
    """And a larger one continues it."""
    shorter = sweep(tmp_path, *OPTUNA, RATES, "hydra.sweeper.n_trials=1")
    assert shorter.returncode == 0, shorter.stderr
    (first,) = tmp_path.glob("lr=*/metrics.json")
    longer = sweep(tmp_path, *OPTUNA, RATES, "hydra.sweeper.n_trials=2")
    assert longer.returncode == 0, longer.stderr
    assert longer.stdout.count(f"{first.parent} already holds this run") == 1
    assert len(list(tmp_path.glob("lr=*/metrics.json"))) == 2


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_a_search_draws_by_the_seed_of_its_runs(sampler: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        options = ["hydra/sweeper=optuna", f"hydra/sweeper/sampler={sampler}", "seed=7"]
        config = compose("config", options, return_hydra_config=True)
    settle_search(config, [])
    assert random.random() == random.Random(7).random()
    assert OmegaConf.select(config.hydra.sweeper, "sampler.seed") == (7 if sampler == "tpe" else None)


@pytest.mark.parametrize("values", ["range(1,4)", "sort(range(1,4))"])
@pytest.mark.parametrize("place", ["typed", "overlay"])
def test_a_search_takes_no_range(place: str, values: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of `range(1,4)` Optuna's sweeper tries 4, too, and its grid sampler leaves out 0.5 of `range(0.1,0.6,0.1)`."""
    typed = [f"method.M={values}"] if place == "typed" else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", ["hydra/sweeper=optuna"], return_hydra_config=True)
    if not typed:
        with read_write(config), open_dict(config):
            config.hydra.sweeper.params = {"method.M": values}
    with pytest.raises(SystemExit):
        settle_search(config, OverridesParser.create().parse_overrides(typed))
    assert f"cannot take method.M={values} as a sweep does: write the values as a list" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_searches_of_two_seeds_differ_and_a_grid_finds_its_trials(tmp_path: Path) -> None:
    for seed in (0, 1):
        done = sweep(tmp_path / "range", *OPTUNA, RATES, "hydra.sweeper.n_trials=1", f"seed={seed}")
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "range").glob("lr=*/metrics.json"))) == 2
    grid = [*OPTUNA, "hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=1", "lr=1e-4,2e-4,3e-4,4e-4,5e-4"]
    for _ in range(2):
        again = sweep(tmp_path / "grid", *grid)
    assert again.stdout.count("already holds this run") == 1


@pytest.mark.exhaustive
def test_a_signal_stops_the_job_and_the_sweep(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dml.run", "-m", *TINY, "trainer.max_steps=5000", "seed=1,2"]
    command += [f"paths.sweep_dir={tmp_path}"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, deadline = tmp_path / "seed=1" / "metrics.jsonl", time.monotonic() + 60
    while not log.exists() or len(read_metrics(log)) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == INTERRUPTED
    assert (tmp_path / "seed=1" / "checkpoints" / "last.ckpt").exists()
    assert not (tmp_path / "seed=2").exists()
    assert not list(tmp_path.glob("*.failed"))


LAUNCHERS = {
    "basic": [],
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=10", "hydra.launcher.cpus_per_task=1"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["joblib", "submitit"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_to_the_sweep_stops_jobs_that_run_at_once(tmp_path: Path, launcher: str, number: int) -> None:
    """All write checkpoints; with submitit those that were not begun find that it is over."""
    command = [sys.executable, "-m", "dml.run", "-m", *TINY, "trainer.max_steps=100000", "seed=1,2,3"]
    command += [f"paths.sweep_dir={tmp_path}", *LAUNCHERS[launcher]]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    begun, deadline = [1, 2] if launcher == "joblib" else [1, 2, 3], time.monotonic() + 200
    logs = [tmp_path / f"seed={seed}" / "metrics.jsonl" for seed in begun]
    while not all(log.exists() and len(read_metrics(log)) > 5 for log in logs):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    run.send_signal(number)
    assert run.wait(90) == (INTERRUPTED if number == signal.SIGTERM else -number)

    def ended(seed: int) -> bool:
        """Nobody holds the folder of the job any more."""
        try:
            with FileLock(tmp_path / f"seed={seed}" / ".lock", timeout=0):
                return True
        except Timeout:
            return False

    while not all(map(ended, begun)):
        assert number == signal.SIGKILL
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for seed in begun:
        log = (tmp_path / f"seed={seed}" / "run.log").read_text()
        assert "Interrupted: SIGTERM at step" in log
    assert (tmp_path / "seed=3").exists() == (3 in begun)
    assert not list(tmp_path.glob("*.failed"))


class Jobs:
    """A launcher of jobs whose outcomes are given; None: one that failed."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return [
            JobReturn(overrides=one, status=JobStatus.COMPLETED, _return_value=None if "seed=1" in one else 0.5)
            for one in job_overrides
        ]


@pytest.fixture
def of_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if a sweep over the seed had begun in this process."""
    monkeypatch.setenv(SWEPT, "seed")
    fresh = {
        "folder": tmp_path,
        "failed": [],
        "held": None,
        "crashed": False,
        "launched": False,
        "criterion": "",
        "before": 0,
    }
    for name, value in fresh.items():
        monkeypatch.setattr(Sweep, name, value)
    return tmp_path


def test_a_failure_is_remembered_without_any_file(of_a_sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch = remembered(Jobs.launch)
    launch(Jobs(), [["seed=2"]], initial_job_idx=0)
    Sweep.conclude()
    launch(Jobs(), [["seed=1"], ["seed=2"], ["seed=1"]], initial_job_idx=0)
    with pytest.raises(SystemExit) as left:
        Sweep.conclude()
    assert left.value.code == 1
    assert (
        f"Failed: {of_a_sweep / 'seed=1'}\n1 of the jobs failed. Put that right, then repeat" in capsys.readouterr().err
    )


def test_a_table_that_cannot_be_written_is_told(
    of_a_sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dml.runs.collecting.leaves", lambda folders: ["a run"])

    def full(*_: object, remedy: str) -> None:
        raise UserError(f"{of_a_sweep} cannot be written (No space left on device): {remedy}.")

    monkeypatch.setattr("dml.reporting.summary.write_summary", full)
    monkeypatch.setattr(Sweep, "launched", True)
    with pytest.raises(SystemExit) as left:
        Sweep.conclude()
    assert left.value.code == MISTAKE
    said = f"put that right, then repeat the sweep with paths.sweep_dir={of_a_sweep}."
    assert capsys.readouterr().err.endswith(f"(No space left on device): {said}\n")


def test_a_search_says_what_it_found(of_a_sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told_of_search(of_a_sweep, "map@r", when_found(of_a_sweep)) == ""
    file = of_a_sweep / "optimization_results.yaml"
    file.write_text("name: optuna\nbest_params:\n  lr: 0.0015\n  method.M: ${sampler.m}\nbest_value: 0.18941\n")
    said = f"Best by map@r (0.1894): lr=0.0015 'method.M=${{sampler.m}}', see {file}\n"
    assert told_of_search(of_a_sweep, "map@r", 0) == said
    assert told_of_search(of_a_sweep, "map@r", when_found(of_a_sweep)) == ""  # an earlier search's
    Sweep.launched, Sweep.criterion, Sweep.before = True, "map@r", 0
    Sweep.conclude()
    assert "Best by map@r (0.1894)" in capsys.readouterr().out


def test_a_job_that_a_search_tries_again_may_succeed(of_a_sweep: Path) -> None:
    class Improving:
        values: ClassVar[list[float | None]] = [None, 0.5]

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            of: Any = {"status": JobStatus.COMPLETED, "_return_value": self.values.pop(0)}
            return [JobReturn(overrides=one, **of) for one in job_overrides]

    launch = remembered(Improving.launch)
    for failed in ([of_a_sweep / "seed=1"], []):
        launch(Improving(), [["seed=1"]], initial_job_idx=0)
        assert Sweep.failed == failed


def test_a_run_says_how_the_whole_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option of the outermost: of the sweep if one of its jobs has several trainings."""
    code = f"import os; print(os.environ.get('{AGAIN}'))"
    monkeypatch.setattr("dml.launch.job.typed", lambda *_: [sys.executable, "-c", code])
    monkeypatch.delenv(AGAIN, raising=False)
    assert going_on(tmp_path / "a b") == f"'paths.output_dir='\"'\"'{tmp_path / 'a b'}'\"'\"''"
    job([], tmp_path, tmp_path / "log")
    job([], tmp_path, tmp_path / "log", again="paths.output_dir=runs/mlrc")
    monkeypatch.setenv(AGAIN, "paths.sweep_dir=runs/sweep")
    job([], tmp_path, tmp_path / "log", again="paths.output_dir=runs/sweep/lr=1")
    told = ["None", "paths.output_dir=runs/mlrc", "paths.sweep_dir=runs/sweep"]
    assert (tmp_path / "log").read_text().split() == told
    assert going_on(tmp_path) == "paths.sweep_dir=runs/sweep"
    assert elsewhere() == "with paths.sweep_dir=FOLDER"
    monkeypatch.delenv(AGAIN)
    assert elsewhere() == "with paths.output_dir=FOLDER"


def test_ctrl_c_that_only_this_process_got_stops_the_job_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "trap 'echo told; exit 75' TERM; echo ready; for i in {1..600}; do sleep 0.1; done"
    monkeypatch.setattr("dml.launch.job.typed", lambda *_: ["setsid", "bash", "-c", waits])

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while not (tmp_path / "log").exists() or "ready" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # the job waits by now
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    thread = Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            job([], tmp_path, tmp_path / "log")
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "log").read_text().split() == ["ready", "told"]


def test_a_job_with_the_options_of_another_waits_for_it(of_a_sweep: Path) -> None:
    ended: list[str] = []

    def second() -> None:
        with turn(of_a_sweep / "lr=1"):
            ended.append("second")

    with turn(of_a_sweep / "lr=1"):
        thread = Thread(target=second)
        thread.start()
        time.sleep(0.3)
        ended.append("first")
    thread.join()
    assert ended == ["first", "second"]


def test_a_mark_that_cannot_be_written(of_a_sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"sweep": {"dir": str(of_a_sweep)}, "launcher": {"_target_": "a.BasicLauncher"}}
    monkeypatch.setattr("dml.launch.sweep.HydraConfig.get", lambda: OmegaConf.create(told))
    (of_a_sweep / "seed=1.failed").mkdir()
    monkeypatch.setattr("dml.launch.job.job", lambda *_: 2)
    assert job_of_a_sweep(OmegaConf.create(), ["seed=1"]) is None
    monkeypatch.setattr("dml.launch.job.job", lambda *_: 0)
    (of_a_sweep / "seed=1").mkdir()
    (of_a_sweep / "seed=1" / "metrics.json").write_text('{"test/recall@1": 0.5, "test/map@r": 0.5}')
    assert job_of_a_sweep(OmegaConf.create({"protocol": {"criterion": "map@r"}}), ["seed=1"]) == 0.5
    monkeypatch.setattr("dml.launch.job.job", lambda *_: 2)
    monkeypatch.setenv(SWEPT, "dataset.root")
    odd = os.fsdecode(b"dataset.root=\xff")
    assert job_of_a_sweep(OmegaConf.create(), [odd]) is None
    assert r"\udcff" in (of_a_sweep / f"{odd}.failed").read_text()
    told["sweep"]["dir"] = "/proc/none"
    with pytest.raises(UserError, match=r"/proc/none cannot be made .*paths\.sweep_dir=FOLDER"):
        job_of_a_sweep(OmegaConf.create(), ["seed=1"])


@pytest.mark.parametrize(
    ("launcher", "gpus", "devices", "expected"),
    [
        ({"n_jobs": 4}, "0", 1, ("4", "2", "0")),  # one GPU is for all of them
        ({"n_jobs": 4}, "0,1,2", 1, ("4", "2", "2")),
        ({"n_jobs": 4}, "0,1,2", 2, ("4", "2", "0,1,2")),
        ({"n_jobs": -1}, "0", 1, ("8", "1", "0")),
        ({}, "0,1", 1, None),
    ],
)
def test_jobs_at_once_share_the_machine(
    of_a_sweep: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: dict[str, int],
    gpus: str,
    devices: int,
    expected: tuple[str, ...] | None,
) -> None:
    """joblib's, which start here: threads, loader workers and GPUs. Of the others another scheduler knows."""
    told = {"sweep": {"dir": str(of_a_sweep)}, "job": {"num": 5}, "launcher": {"_target_": "a.Launcher", **launcher}}
    monkeypatch.setattr("dml.launch.sweep.HydraConfig.get", lambda: OmegaConf.create(told))
    monkeypatch.setattr("dml.launch.sweep.cores", lambda: 8)
    monkeypatch.setattr("dml.process.cores", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given: list[dict[str, str] | None] = []
    monkeypatch.setattr("dml.launch.job.job", lambda *all_given: given.append(all_given[-2]) or 2)
    with free_place(of_a_sweep, 4, 1):  # of a job that runs
        job_of_a_sweep(OmegaConf.create({"trainer": {"devices": devices}}), ["seed=1"])
    (env,) = given
    names = ("DML_AT_ONCE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    assert (env and tuple(env[name] for name in names)) == expected


def test_jobs_see_that_their_sweep_is_over(of_a_sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HELD, raising=False)
    assert not is_over()
    monkeypatch.setenv(HELD, "")
    held = hold(of_a_sweep)
    assert held is not None
    assert not is_over()
    held.release()  # as at the end of a process
    assert is_over()
    Path(os.environ[HELD]).unlink()
    assert is_over()


@pytest.mark.parametrize("held", [".seed=1.lock", ".place_0.lock"])
def test_a_job_that_waits_for_another_process_ends_with_its_sweep(
    of_a_sweep: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    told = {"sweep": {"dir": str(of_a_sweep)}, "job": {"num": 0}, "launcher": {"_target_": "a.Launcher", "n_jobs": 1}}
    monkeypatch.setattr("dml.launch.sweep.HydraConfig.get", lambda: OmegaConf.create(told))
    monkeypatch.setattr("dml.launch.job.job", lambda *_: pytest.fail("it began"))
    answers = iter([False, True])  # the sweep ends while the job waits
    for module in ("sweep", "locks"):
        monkeypatch.setattr(f"dml.launch.{module}.is_over", lambda: next(answers))
    with FileLock(of_a_sweep / held):
        assert job_of_a_sweep(OmegaConf.create({"trainer": {"devices": 1}}), ["seed=1"]) is None
    assert list(answers) == []


SEARCH = ["lr=interval(0.1,0.2)", "hydra/sweeper=optuna"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["lr=interval(0.1,0.2)"], "set hydra/sweeper=optuna"),
        (["seed=1,2", "hydra/launcher=submitit_slurm"], "srun"),
        pytest.param([*SEARCH, "hydra.sweeper.n_trials=0"], "hydra.sweeper.*", marks=pytest.mark.exhaustive),
        ([*SEARCH, "lr=0.1"], "lr is given twice, once as lr=interval(0.1,0.2): leave one of them out"),
        ([*SEARCH, "++hydra.sweeper.direction=minimize"], "leave hydra.sweeper.direction out"),
        (
            ["seed=1,2", "hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"],
            "hydra.launcher.tasks_per_node=2 would start a job of the sweep 2 times: leave it out",
        ),
        (["seed=range(0)"], "this sweep has no job"),
        (["seed=1,2", "paths.output_dir=runs/x"], "name the folder of a sweep with paths.sweep_dir=FOLDER"),
        (["hydra.sweeper.params.lr=3"], "hydra.sweeper.params is for the files of conf/sweep"),
    ],
)
def test_options_of_plug_ins_that_cannot_be(tmp_path: Path, options: list[str], said: str) -> None:
    done = sweep(tmp_path, *options)
    assert done.returncode == MISTAKE
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("dml: ")
    assert said in sentence
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_a_search_of_which_every_trial_fails(tmp_path: Path) -> None:
    options = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    options += ["hydra.sweeper.sampler.seed=0"]  # draws both values; twice the same would be one job
    done = sweep(tmp_path, *options, "hydra.sweeper.max_failure_rate=1", "method=abe", "method.M=choice(3,5)")
    assert done.returncode == 1
    assert "2 of the jobs failed" in done.stderr
    assert "dml: this search chooses on the test classes, which flatters its result: protocol=tuning" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_an_overlay_says_what_to_sweep_and_the_command_line_stands_above_it(tmp_path: Path) -> None:
    done = sweep(tmp_path, "sweep=K", "method=dces", "method.K=1,2", "method.T=1")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("method*")) == ["method.K=1", "method.K=2"]
    assert OmegaConf.load(tmp_path / "method.K=2" / "config.yaml").method["_target_"] == "dml.methods.dces.DCES"
    assert len(json.loads((tmp_path / "summary.json").read_text())) == 2
    assert (tmp_path / "figures" / "over_method.K.png").exists()


@pytest.mark.slow
def test_an_overlay_is_for_sweeps() -> None:
    alone = subprocess.run(
        [sys.executable, "-m", "dml.run", "sweep=I_J", "method.I=1"], capture_output=True, text=True, check=False
    )
    assert alone.returncode == 2
    assert alone.stderr == "dml: sweep=I_J is for a sweep over method.J: start it with -m, or leave it out.\n"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((CONF / "sweep").glob("*.yaml")), ids=lambda path: path.stem)
def test_overlays_sweep_options_that_their_method_has(path: Path) -> None:
    """Every combination composes and builds; the overlay also stands on an experiment."""
    params = OmegaConf.load(path).hydra.sweeper.params
    values = [[f"{name}={value}" for value in str(given).split(",")] for name, given in params.items()]
    for overrides in product(*values):
        config = composed(f"sweep={path.stem}", *overrides, "runtime.train_classes=4")
        build_method(config)
    on_photographs = composed("experiment=comparison_cars196", f"sweep={path.stem}")
    assert on_photographs.method["_target_"] == config.method["_target_"]
    assert on_photographs.dataset["_target_"] == "dml.data.cars196.cars196"


def test_names_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWEPT, "method.M,seed,dataset,new")
    assert job_name(["+new=1", "lr=2"]) == "+new=1"
    assert job_name(["method=abe", "method.M=2", "lr=1", "seed=3"]) == "method.M=2,seed=3"
    assert job_name(["lr=1"]) == "job"


NAMES = [
    [f"+note={one}", f"seed={other}"]
    for one, other in product(
        [
            "a/b",
            "a_b",
            "a%2Fb",
            "a,b",
            "[a,b]",
            "a",
            "x" * 300,
            "x" * 301,
            "\N{SNOWMAN}" * 40,
            "\N{SNOWMAN}" * 41,
            "\udcff",
        ],
        ["1", "2", "1,seed=2"],
    )
]


def test_different_jobs_have_different_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWEPT, "note,seed")
    names = [job_name(overrides) for overrides in NAMES]
    assert len(set(names)) == len(NAMES)
    for name in names:
        assert "/" not in name
        assert len(os.fsencode(name)) <= NAME_BYTES
    assert names[0] == "+note=a%2Fb,seed=1"
