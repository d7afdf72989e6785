"""How commands end: one sentence for a mistake, quietly where nobody reads."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import HydraException
from PIL import Image

from dml import experiment, run
from dml.configuration.command_line import ending, hydra_sentence
from dml.configuration.composition import composed
from dml.data.dataset import open_dataset
from dml.errors import CTRL_C, INTERRUPTED, MISTAKE, UNREAD, Interrupted, UserError
from tests.conftest import TINY


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (UserError("a is wrong: b."), MISTAKE, "dml: a is wrong: b.\n"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), MISTAKE, "dml: a.txt cannot be written or read"),
        (OSError(27, "File too large"), MISTAKE, "dml: A file or the standard output cannot be written or read (File"),
        (Interrupted("SIGTERM"), INTERRUPTED, "dml: Stopped by SIGTERM"),
        (KeyboardInterrupt(), CTRL_C, ""),
        (SystemExit(1), 1, ""),
    ],
)
def test_exit_codes(raised: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, ending():
        raise raised
    assert left.value.code == code
    assert capsys.readouterr().err.startswith(said)


def test_names_that_are_no_text_are_printed() -> None:
    program = "from dml.configuration.command_line import ending\nwith ending(): print('a\\udcff.png')"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(Path(__file__).parents[1])}
    printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert printed.stdout == b"a\\udcff.png\n"


def test_what_is_wrong_in_the_code_keeps_its_traceback() -> None:
    for error in (ValueError("ours"), BrokenPipeError("of a worker")):
        with pytest.raises(type(error)), ending():
            raise error
    with pytest.raises(FileNotFoundError), ending(files=False):
        raise FileNotFoundError(2, "No such file or directory", "a.txt")


@pytest.mark.parametrize(
    "body",
    ["[print('x' * 99) for _ in range(9999)]", "print('x')", "[Console().print('x' * 99) for _ in range(999)]"],
    ids=["more than a pipe holds", "at the flush", "by rich"],
)
def test_nobody_reads(body: str) -> None:
    script = f"""
import sys
from rich.console import Console
from dml.configuration.command_line import ending
@ending()
def main():
    sys.stdin.read()
    {body}
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert process.communicate(b"")[1] == b""
    assert process.returncode == UNREAD


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["method=ABE"], r"method=ABE is unknown: did you mean abe\? --help lists all\.$"),
        (["loss=xxxxx"], "loss=xxxxx is unknown: choose abe_contrastive, angular, "),
        (["experiment=abe_car"], "experiment=abe_car is unknown: did you mean abe_"),
        (["trainer.max_stpes=1"], r"trainer\.max_stpes is no option: did you mean trainer\.max_steps\?$"),
        (["trainer.nonsense=1"], r"trainer\.nonsense is no option: choose among acc.*; .* with \+trainer\.nonsense="),
        (["metod=abe"], r"metod is no option: did you mean method\?$"),
        (["experimnt=abe_cars"], r"experimnt is no option: did you mean experiment\?$"),
        (["image_sise=64"], r"image_sise is no option: did you mean image_size\?$"),
        (["qqq=1"], r"qqq is no option: choose among backbone, .*dataset, .*, transform\.$"),
        (["lr=[1"], r"no viable alternative at input '\[1'"),
        (["seed=Tür"], r"seed=Tür cannot be read: .*, so write \"seed='Tür'\"\.$"),
    ],
)
def test_what_hydra_says_is_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(HydraException) as caught:
        composed(*overrides)
    said = hydra_sentence(caught.value)
    assert re.match(sentence, said)
    assert "\n" not in said


@pytest.mark.parametrize(("typed", "below"), [("~/my photos", "my photos"), ("~/photos", "photos"), ("~", "")])
def test_what_is_advised_for_the_home_folder_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, below: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "josé"))
    for name in ("a", "b"):
        (tmp_path / "josé" / below / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "josé" / below / name / "1.png")
    with pytest.raises(HydraException) as caught:
        composed("dataset=folder", f"dataset.root={typed}")
    (advised,) = shlex.split(hydra_sentence(caught.value).partition("so write ")[2].removesuffix("."))
    config = composed("dataset=folder", advised)
    assert config.dataset.root == str(tmp_path / "josé" / below).rstrip("/")
    assert len(open_dataset(config)) == 2


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("dataset=null", "A group of options takes the name of one of its files, as in dataset=glyphs"),
        ("method=3", "A group of options takes the name of one of its files"),
        ("~method", "method is missing, and every run has it: leave out ~method."),
        ("~report", "report is missing, and every run has it: leave out ~report."),
        ("~trainer.max_steps", "trainer.max_steps is missing: leave out ~trainer.max_steps."),
        ("~trainer.benchmark", "trainer.benchmark is missing: leave out ~trainer.benchmark."),
        ("lr=${lr}", "A reference ${...} among the options cannot be resolved"),
    ],
)
def test_what_a_run_cannot_do_without(
    typed: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run", *TINY, f"paths.output_dir={tmp_path / 'run'}", typed])
    with pytest.raises(SystemExit) as left:
        run.main()
    assert left.value.code == MISTAKE
    assert capsys.readouterr().err.startswith(f"dml: {sentence}")
    assert not (tmp_path / "run").exists()


def test_a_full_standard_output_is_named() -> None:
    script = "from dml.configuration.command_line import ending\nwith ending():\n    print('x')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = [sys.executable, "-c", script]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert done.stderr.startswith("dml: The standard output cannot be written or read (No space left on device)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["dml.run", "-m", "method=abe,ABE"], ["dml.describe", "method=ABE"]], ids=lambda command: command[0]
)
def test_an_unknown_choice_of_the_command_line(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (MISTAKE, "")
    assert done.stderr == "dml: method=ABE is unknown: did you mean abe? --help lists all.\n"


def test_an_unknown_choice_of_an_experiment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["experiment", "run", "abe/table1", "--set", "method=ABE", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        experiment.main()
    assert left.value.code == MISTAKE
    assert "method=ABE is unknown: did you mean abe?" in capsys.readouterr().err
