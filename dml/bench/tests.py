"""Runs the tests that need a GPU with pytest; in the small check on a CPU, a few that need none."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from dml.bench.results import FAILED, LEFT_OUT, Figure, Record, Remark
from dml.bench.running import Task
from dml.configuration.composition import CONF

NO_TESTS = 5  # pytest's exit code where it finds none


def measure(task: Task) -> Iterator[Record]:
    root = CONF.parent
    if not (root / "tests" / "conftest.py").exists():
        yield Remark(LEFT_OUT, f"there is no folder of tests beside {root}, as in a wheel: take a checkout.")
        return
    if importlib.util.find_spec("pytest") is None:
        yield Remark(LEFT_OUT, "pytest is not installed.")
        return
    told, (mark, *files) = task.folder / "tests.xml", task.sizes.tests
    files = files or marked(root / "tests", mark)
    # A file that cannot be imported for lack of a package is one failure; the others still run.
    asked = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={told}", "-m", mark]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *asked, *files],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    if done.returncode == NO_TESTS:
        yield Remark(FAILED, f"pytest -m '{mark}' found no test in {', '.join(files) or 'no file'}.")
    elif not told.exists():
        yield Remark(FAILED, f"pytest ended with exit code {done.returncode} and wrote no result.")
    else:
        yield from counted(told)


def marked(folder: Path, mark: str) -> list[str]:
    """Returns the test files that use a mark. Others are not collected: they may need packages that are not there."""
    return sorted(str(path) for path in folder.rglob("test_*.py") if f"pytest.mark.{mark}" in path.read_text())


def counted(told: Path) -> Iterator[Record]:
    """Reads what pytest wrote with --junitxml: how many tests passed, and which were skipped or failed."""
    passed, said = 0, []
    for case in ElementTree.parse(told).iter("testcase"):
        name = "::".join((case.get("classname", "").replace(".", "/"), case.get("name", "")))
        if any(case.find(kind) is not None for kind in ("failure", "error")):
            said.append(Remark(FAILED, f"{name}."))
        elif (skipped := case.find("skipped")) is not None:
            said.append(Remark(LEFT_OUT, f"{name}: {' '.join((skipped.get('message') or 'skipped').split())[:200]}"))
        else:
            passed += 1
    yield Figure("passed", passed, "tests")
    yield from said
