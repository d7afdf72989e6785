"""Several trainings at once: that they share the machine, end as they should, and that it is said in a line each."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from dml.errors import INTERRUPTED, Interrupted
from dml.experiment import main
from dml.launch.at_once import Job, carry_out, seconds_left
from dml.launch.locks import free_place
from dml.process import cores, duration, runs_at_once, share_of_the_machine
from tests.conftest import TINY
from tests.test_faults import eventually

WAITS = f"trap 'echo told; exit {INTERRUPTED}' TERM USR1; echo ready; while :; do sleep 0.02; done"


def shell(folder: Path, *scripts: str) -> list[Job]:
    """Stand-ins for trainings."""
    return [Job(f"job {i}", ["sh", "-c", script], folder / str(i) / "log") for i, script in enumerate(scripts)]


def test_all_are_carried_out_and_one_that_fails_stops_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    said = "echo $OMP_NUM_THREADS $DML_AT_ONCE $CUDA_VISIBLE_DEVICES"
    jobs = shell(tmp_path, f"{said}; exit 3", *[f"{said}; sleep 0.2"] * 4)
    failed = carry_out(jobs, 2)
    assert [one.name for one in failed] == ["job 0"]
    written = [job.log.read_text().split() for job in jobs]
    assert {(threads, number) for threads, number, _ in written} == {(str(max(1, cores() // 2)), "2")}
    assert {device for _, _, device in written} == {"4", "7"}
    out, err = capfd.readouterr()
    assert err == f"dml: job 0 ended with exit code 3: see {jobs[0].log}\n"
    lines = out.splitlines()
    assert len(lines) == 5
    assert lines[0] == "job 0: failed; 1 of 5 done (1 failed)"
    assert lines[1].endswith("done in 0 seconds; 2 of 5 done (1 failed), about 0 seconds left")
    assert lines[-1].endswith("; 5 of 5 done (1 failed)")


def test_so_many_run_at_once_and_no_more(tmp_path: Path) -> None:
    """The first three wait for one another; each of all counts who else is running."""
    (tmp_path / "running").mkdir()
    (tmp_path / "met").mkdir()
    meet = f"touch {tmp_path}/met/$$; while [ $(ls {tmp_path}/met | wc -l) -lt 3 ]; do sleep 0.02; done"
    script = f"touch {tmp_path}/running/$$; {meet}; ls {tmp_path}/running | wc -l; sleep 0.1; rm {tmp_path}/running/$$"
    jobs = shell(tmp_path, *[script] * 6)
    assert carry_out(jobs, 3) == []
    assert all(1 <= int(job.log.read_text()) <= 3 for job in jobs)


def when_ready(jobs: Sequence[Job], number: int) -> None:
    def wait() -> None:
        assert eventually(lambda: all(job.log.exists() and "ready" in job.log.read_text() for job in jobs), 20)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_all_and_waits(tmp_path: Path, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    jobs = shell(tmp_path, *[WAITS] * 2, "echo begun")
    before = signal.getsignal(number)
    when_ready(jobs[:2], number)
    with pytest.raises(Interrupted, match=f"{signal.Signals(number).name}, passed on to all trainings"):
        carry_out(jobs, 2)
    assert [job.log.read_text().split() for job in jobs[:2]] == [["ready", "told"]] * 2
    assert not jobs[2].log.exists()
    assert signal.getsignal(number) == before
    assert capfd.readouterr() == ("", "")


def test_a_signal_to_one_of_them_stops_all(tmp_path: Path) -> None:
    jobs = shell(tmp_path, f"sleep 0.3; exit {INTERRUPTED}", WAITS)
    with pytest.raises(Interrupted):
        carry_out(jobs, 2)
    assert "told" in jobs[1].log.read_text()


def test_a_signal_meanwhile_reaches_the_one_that_is_being_started(tmp_path: Path) -> None:
    told = Job("job", ["sleep", "60"], tmp_path / "log", begin=lambda: os.kill(os.getpid(), signal.SIGTERM))
    start = time.monotonic()
    with pytest.raises(Interrupted, match="SIGTERM"):
        carry_out([told], 1)
    assert time.monotonic() - start < 30


def test_ctrl_c_waits_for_all(tmp_path: Path) -> None:
    jobs = shell(tmp_path, *[WAITS] * 2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        when_ready(jobs, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            carry_out(jobs, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert all("told" in job.log.read_text() for job in jobs)


def test_a_log_that_cannot_be_written_stops_all(tmp_path: Path) -> None:
    jobs = shell(tmp_path, "echo $$; exec sleep 60", "true")
    start = time.monotonic()
    (tmp_path / "1").write_text("no folder")
    with pytest.raises(OSError, match="exists"):
        carry_out(jobs, 2)
    started = jobs[0].log.read_text().strip()  # nothing where it was stopped before
    assert not started or not Path(f"/proc/{started}").exists()
    assert time.monotonic() - start < 30


def test_jobs_of_a_sweep_take_the_place_that_became_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with free_place(tmp_path, 3, 0) as first:
        second = free_place(tmp_path, 3, 1)
        assert (first, second.__enter__()) == (0, 1)
    with free_place(tmp_path, 3, 4) as third:
        assert third == 2  # not 4 % 3, which the second holds
        with free_place(tmp_path, 3, 5) as fourth:
            assert fourth == 0
    second.__exit__(None, None, None)

    def without_locks(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", without_locks)
    with free_place(tmp_path, 3, 5) as place:
        assert place == 2


def test_the_share_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    one = share_of_the_machine(5, 8)
    assert (one["OMP_NUM_THREADS"], one["CUDA_VISIBLE_DEVICES"]) == ("3", "1")  # one device is for all
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,GPU-a")
    assert [share_of_the_machine(i, 8)["CUDA_VISIBLE_DEVICES"] for i in range(4)] == ["0", "1", "GPU-a", "0"]
    assert share_of_the_machine(1, 8, several_devices=True)["CUDA_VISIBLE_DEVICES"] == "0,1,GPU-a"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("dml.process.NVIDIA", tmp_path / "gpus")
    monkeypatch.setattr("dml.process.DEVICES", tmp_path)
    assert "CUDA_VISIBLE_DEVICES" not in share_of_the_machine(1, 8)  # there is no GPU
    for minor in (0, 5, 6):
        information = tmp_path / "gpus" / f"0000:0{minor}:00.0" / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t NVIDIA H200\nBus Type: \t PCIe\nDevice Minor: \t {minor}\n")
    assert share_of_the_machine(2, 8)["CUDA_VISIBLE_DEVICES"] == "2"  # no file was made yet
    (tmp_path / "nvidia6").touch()
    assert "CUDA_VISIBLE_DEVICES" not in share_of_the_machine(1, 8)  # one was given to this container
    (tmp_path / "nvidia5").touch()
    assert [share_of_the_machine(i, 8)["CUDA_VISIBLE_DEVICES"] for i in range(3)] == ["0", "1", "0"]
    for said, expected in (("4", 4), ("", 1), ("x", 1), ("0", 1)):
        monkeypatch.setenv("DML_AT_ONCE", said)
        assert runs_at_once() == expected


def test_what_is_left() -> None:
    assert seconds_left([], [3.0], 4) is None
    assert seconds_left([10.0, 20.0], [], 0) is None
    assert seconds_left([10.0, 20.0], [5.0, 100.0], 2) == 10 + 0 + 30
    assert [duration(s) for s in (3.2, 90.1, 5400, 5401)] == ["3 seconds", "2 minutes", "90 minutes", "1.5 hours"]


ROWS = """
title: Little
source: nobody
overrides: [{options}]
seeds: [0, 1]
parts:
  glyphs: {{columns: {{R@1: {{metric: test/recall@1, scale: 100}}}}}}
rows:
  - {{name: sound, overrides: [lr=0.01]}}
  - {{name: broken, overrides: [sampler.batch_size=15]}}
"""


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    (tmp_path / "experiments" / "us").mkdir(parents=True)
    text = ROWS.format(options=", ".join([*TINY, f"paths.cache_dir={tmp_path / 'cache'}"]))
    (tmp_path / "experiments" / "us" / "table1.yaml").write_text(text)
    monkeypatch.setattr("dml.papers.catalogue.FOLDER", tmp_path / "experiments")

    def run(*options: str) -> None:
        monkeypatch.setattr("sys.argv", ["dml.experiment", "run", "us", "--out", str(tmp_path / "out"), *options])
        main()

    return run


def test_the_commands_of_a_dry_run(experiments: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    experiments("--jobs", "2", "--dry-run")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert all(line.startswith("python -m dml.run dataset=glyphs ") for line in printed)
    assert [line.partition("seed=")[2][0] for line in printed] == ["0", "1", "0", "1"]
    for wrong, said in ((["0"], "--jobs=0 has to be"), (["2", "--launcher", "joblib"], "leave out --launcher")):
        with pytest.raises(SystemExit) as left:
            experiments("--jobs", *wrong)
        assert left.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.exhaustive
def test_trainings_at_once(experiments: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two sound ones, beside two that end with a mistake; again, what failed is tried again and the rest skipped."""
    for done in (4, 2):
        with pytest.raises(SystemExit) as left:
            experiments("--jobs", "2")
        assert left.value.code == 1
        out, err = capfd.readouterr()
        assert f"4 trainings or scripts, {done} to do." in out
        assert f"; {done} of {done} done (2 failed)" in out
        assert err.count("ended with exit code 2: see ") == 2
    assert len(list((tmp_path / "out").glob("baseline_*/seed=?/metrics.json"))) == 2
    logs = {path: path.read_text() for path in (tmp_path / "out").glob("baseline_*/seed=?/output.log")}
    assert len(logs) == 4
    assert sum("sampler.batch_size=15 is not divisible" in text for text in logs.values()) == 2


@pytest.mark.exhaustive
def test_a_signal_stops_trainings_at_once(experiments: Callable[..., None], tmp_path: Path) -> None:
    def stop() -> None:
        assert eventually(lambda: len(list((tmp_path / "out").glob("*/seed=?/metrics.jsonl"))) == 2, 200)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(SystemExit) as left:
        experiments("--jobs", "2", "--rows", "sound", "--set", "trainer.max_steps=50000")
    assert left.value.code == INTERRUPTED
    assert time.monotonic() - start < 250
    assert len(list((tmp_path / "out").glob("*/seed=?/checkpoints/last.ckpt"))) == 2
    assert not list((tmp_path / "out").glob("*/seed=?/metrics.json"))
