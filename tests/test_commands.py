"""The commands: that they are listed, say what they take at once, and end in the one way."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dml.__main__ as overview
from dml.configuration.composition import CONF
from dml.errors import MISTAKE
from dml.experiment import arguments

PACKAGE = CONF.parent / "dml"
HEAVY = {"torch", "matplotlib", "sklearn", "scipy"}


def has_main(path: Path) -> bool:
    """Whether a module defines `main` or gives that name to something."""
    body = ast.parse(path.read_text()).body
    made = [one.name for one in body if isinstance(one, ast.FunctionDef)]
    made += [getattr(target, "id", "") for one in body if isinstance(one, ast.Assign) for target in one.targets]
    return "main" in made


COMMANDS = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if has_main(path)
]
(SUBCOMMANDS,) = (action.choices for action in arguments()._actions if action.dest == "command")
LINES = [[name] for name in COMMANDS] + [["dml.experiment", str(name)] for name in SUBCOMMANDS or ()]

# Each in a process of its own, which is forked where nothing but what all share was imported.
SCRIPT = """
import contextlib, importlib, io, json, os, sys
import hydra
told = {}
for line in json.loads(sys.argv[1]):
    here, there = os.pipe()
    if os.fork() == 0:
        sys.argv, said, code = [line[0], *line[1:], "--help"], io.StringIO(), 0
        try:
            with contextlib.redirect_stdout(said):
                importlib.import_module(line[0]).main()
        except SystemExit as left:
            code = left.code or 0
        with os.fdopen(there, "w") as file:
            json.dump({"code": code, "said": said.getvalue(), "modules": sorted(sys.modules)}, file)
        os._exit(0)
    os.close(there)
    with os.fdopen(here) as file:
        told[" ".join(line)] = json.load(file)
    os.wait()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def helped() -> dict[str, dict[str, Any]]:
    """By command: the exit code of its `--help`, what that said, and the modules that it took."""
    script = [sys.executable, "-c", SCRIPT, json.dumps(LINES)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_help_takes_nothing_heavy(helped: dict[str, dict[str, Any]], line: list[str]) -> None:
    told = helped[" ".join(line)]
    assert told["code"] == 0
    assert HEAVY & set(told["modules"]) == set()
    assert "python -m dml" in told["said"]


def test_what_reads_results_does_without_lightning() -> None:
    """It takes as long to import as everything else together."""
    read = ["dml.papers.shown", "dml.analysis.comparison", "dml.analysis.mlrc", "dml.reporting.summary"]
    code = f"import sys, {', '.join(read)}; print('pytorch_lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_in_the_one_way(name: str) -> None:
    assert len(COMMANDS) > 8
    main = importlib.import_module(name).main
    assert main.__wrapped__ is not None  # by the decorator
    assert main.__code__.co_filename.endswith("contextlib.py")


def test_all_commands_are_listed_and_can_be_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dml"])
    overview.main()
    said = dict(re.findall(r"^python -m (\S+) +(.+\.)$", capsys.readouterr().out, re.MULTILINE))
    assert [*said, "dml.__main__"] == sorted([*COMMANDS], key=lambda name: (name == "dml.__main__", name))
    for name, sentence in said.items():
        first = (importlib.import_module(name).__doc__ or "").splitlines()[0]
        assert re.fullmatch(rf"`python -m {re.escape(name)}\b.*`: {re.escape(sentence)}", first)


@pytest.mark.parametrize(
    ("word", "said"), [("reprot", "there is no command 'reprot'"), ("report", "python -m dml.report")]
)
def test_a_word_after_dml(
    word: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dml", word])
    with pytest.raises(SystemExit) as left:
        overview.main()
    assert left.value.code == MISTAKE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dml.report", "dml.compare", "dml.embed", "dml.experiment"])
def test_what_is_lacking_is_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(name).main()
    assert left.value.code == MISTAKE
    said = capsys.readouterr().err
    assert re.fullmatch(rf"dml: the following arguments are required: .+; python -m {name} --help .+\.\n", said)
