"""What scripts of experiments/ have in common: `--out`, `--threads`, and their end as the smoke run sees it."""

import runpy
import sys
from pathlib import Path

import pytest

from dml.papers.catalogue import FOLDER
from dml.papers.smoke import _script
from tests.recorded import EXPERIMENTS

BENCH = FOLDER / "bench"
WITH_OUT = sorted(
    {training.overrides[0] for one in EXPERIMENTS.values() for training in one.trainings(seeds=[0]) if training.script}
)
NEEDED = {
    "repairs": ["--row", "a row"],
    "rounding": ["--row", "a row", "--instructions", "avx2"],
    "starts": ["--row", "a row"],
}


def call(script: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs a script in this process. Returns its exit code."""
    path = FOLDER.parent / script
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    return end.value.code


@pytest.mark.parametrize("script", WITH_OUT)
def test_a_folder_that_cannot_be_made_is_a_sentence(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert call(script, *NEEDED.get(Path(script).stem, ()), "--out", str(out), monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == f"dml: --out={out} cannot be written (Not a directory): choose a folder.\n"


def test_no_threads_are_a_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("experiments/bench/evaluation.py", "--threads", "0", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == "dml: --threads=0 has to be 1 or more.\n"


def test_the_smoke_run_takes_figures_by_row_and_says_why_a_script_failed(tmp_path: Path) -> None:
    before = list(sys.argv), list(sys.path)
    found = _script(("experiments/bench/evaluation.py",), ["--n", "200", "--repeats", "1"], tmp_path)
    assert found["dml"] == {"evaluation/seconds", "evaluation/over_product"}
    with pytest.raises(
        RuntimeError, match=r"(?s)experiments/bench/gsp\.py ended with 2: .*--batch has to be 4 or more"
    ):
        _script(("experiments/bench/gsp.py", "--batch", "2"), [], tmp_path)
    assert (sys.argv, sys.path) == before


def test_figures_are_medians_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    feeding = runpy.run_path(str(BENCH / "feeding.py"))
    columns = {"128": [1.0, 4.0, 2.0], "224": [1.0, 1.0, 1.0], "step": [2.0, 2.0, 2.0], "waits": [0.5, 0.1, 0.2]}
    twice = {name: [2 * value for value in values] for name, values in columns.items()}
    told = feeding["rows"]({"none": columns, "disk": twice})
    assert told["none"]["loader_at_128/images_a_second"] == 2.0
    assert told["disk"]["loader_at_128/over_none"] == 2.0
    assert told["none"]["step/waits"] == 0.2
