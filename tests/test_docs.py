"""The documentation: its commands are run, composed or parsed; every option is in the reference; links hold.

A line before a block says what is done with it: `<!-- run -->`, `<!-- compose -->` or `<!-- skip: why -->`. The
blocks of a page that are run share a folder, one after another, with a run in `runs/first`; trainings among them are
made short.
"""

import argparse
import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from dml.__main__ import commands
from dml.configuration.composition import CONF, composed
from dml.papers.catalogue import find
from tests.runs import photographs

ROOT = CONF.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = ("run", "compose", "skip")
OF_HYDRA = ("dml.run", "dml.describe", "dml.data.prepare")

# What makes a training short.
SMALL = (
    *(
        "dataset.classes=24",
        "dataset.images_per_class=6",
        "sampler.batch_size=16",
        "trainer.max_steps=4",
        "head.dim=16",
    ),
    *(
        "trainer.checkpoint_every=2",
        "trainer.num_workers=0",
        "protocol.every=4",
        "report=false",
        "trainer.accelerator=cpu",
    ),
)

# Programs that blocks call beside Python's.
OTHERS = {"make", "pip", "source", "wandb", "torchrun", "srun", ".ci/run"}


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        mark: the line before it, without what makes it a comment; empty: there is none.
        language: bash or python.
    """

    page: Path
    line: int
    mark: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> Iterator[Block]:
    mark, fence = r"(?:^<!-- ((?:run|compose|skip)\b.*?) -->\n)?", r"^```(bash|python|shell|sh|console)\n(.*?)^```$"
    pattern = re.compile(mark + fence, re.MULTILINE | re.DOTALL)
    for page in PAGES:
        text = page.read_text()
        for found in pattern.finditer(text):
            if not found[3].lstrip().startswith("--8<--"):  # a file that is tested itself
                yield Block(page, text.count("\n", 0, found.start()) + 1, found[1] or "", found[2], found[3])


BLOCKS = list(blocks())
COMPOSED = [one for one in BLOCKS if one.mark == "compose" or (one.mark == "run" and one.language == "bash")]
RUN = {page: [one for one in BLOCKS if one.page == page and one.mark == "run"] for page in PAGES}
QUICK = ("docs/guides/embedding.md",)  # the others take minutes


def test_every_block_says_what_is_done_with_it() -> None:
    assert len(BLOCKS) > 40
    wrong = [str(one) for one in BLOCKS if one.mark.partition(":")[0] not in MARKED]
    assert wrong == []
    assert [str(one) for one in BLOCKS if one.mark.startswith("skip") and not one.mark.partition(": ")[2]] == []


def lines_of(block: Block) -> Iterator[list[str]]:
    """The words of each command, without remarks."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # of the environment
            words = words[1:]
        if words:
            yield words


class Parsed(BaseException):
    """The arguments of a command were parsed, and nothing was done."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options


def parsed(module: str, words: list[str]) -> argparse.Namespace:
    """What the parser of a command makes of its arguments. Raises UserError where it refuses them."""
    plain, mixed = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_intermixed_args

    def stop(self: argparse.ArgumentParser, *arguments: object) -> argparse.Namespace:
        raise Parsed(plain(self))

    def stop_mixed(self: argparse.ArgumentParser, *arguments: object) -> argparse.Namespace:
        raise Parsed(mixed(self))

    with (
        patch.object(argparse.ArgumentParser, "parse_args", stop),
        patch.object(argparse.ArgumentParser, "parse_intermixed_args", stop_mixed),
        patch.object(sys, "argv", [module, *words]),
    ):
        try:
            importlib.import_module(module).main()
        except Parsed as found:
            return found.options
    raise AssertionError(f"{module} parses nothing")


def first_of(override: Override) -> list[str]:
    """One override of those that a sweep makes of it; a range has none."""
    assert override.input_line is not None
    if not override.is_sweep_override():
        return [override.input_line]
    if override.is_interval_sweep():
        return []
    return [f"{override.get_key_element()}={next(override.sweep_string_iterator())}"]


def check_composes(words: list[str]) -> None:
    """Raises an error of Hydra's for a name that is not there."""
    many = "-m" in words
    words = [word for word in words if not word.startswith(("source=", "weights="))]
    if {"--help", "--cfg"} & set(words):
        return
    overrides = OverridesParser.create().parse_overrides([word for word in words if word != "-m"])
    composed(*(one for override in overrides for one in (first_of(override) if many else [override.input_line])))


def check_line(words: list[str]) -> None:
    """Raises an error for a name that is not there."""
    if "-m" in words and words[words.index("-m") + 1].startswith("dml"):
        place = words.index("-m") + 1
        module, rest = words[place], words[place + 1 :]
        assert module == "dml" or module in commands(), f"there is no command {module}"
        if module in OF_HYDRA:
            check_composes(rest)
        elif module != "dml":
            options = parsed(module, rest)
            if module == "dml.experiment":
                found = find(options.names)
                rows = {row for one in found for row in one.rows}
                assert set(getattr(options, "rows", [])) <= rows
                check_composes(getattr(options, "changes", []))
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), f"make has no target {words[1]}"
    elif words[0] == "python":
        assert (ROOT / words[1]).exists(), f"there is no {words[1]}"
    else:
        assert words[0] in OTHERS, f"{words[0]} is no program that readers have"


@pytest.mark.parametrize("block", COMPOSED, ids=str)
def test_commands_name_what_is_there(block: Block) -> None:
    for words in lines_of(block):
        check_line(words)


def test_a_name_that_is_gone_is_found() -> None:
    for line in ("dml.run method=nothing", "dml.nothing", "dml.run method.nothing=1", "dml.experiment run nothing"):
        with pytest.raises(Exception, match="nothing"):
            check_line(["python", "-m", *line.split()])


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "python"], ids=str)
def test_python_imports_what_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                assert hasattr(importlib.import_module(node.module), one.name), f"{node.module} has no {one.name}"


def script_of(page: Path) -> str:
    """Bash that does all that a page says, with trainings made short."""
    parts = [
        "set -euo pipefail",
        f"small=({shlex.join(SMALL)})",
        'python() { [ "$1 ${2-}" = "-m dml.run" ] && set -- "$@" "${small[@]}"; command "$PYTHON" "$@"; }',
    ]
    for block in RUN[page]:
        parts.append(block.text if block.language == "bash" else f"python - <<'END'\n{block.text}END")
    return "\n".join(parts)


def pages_that_run() -> Iterator[object]:
    for page, mine in RUN.items():
        if mine:
            name = str(page.relative_to(ROOT))
            yield pytest.param(page, id=name, marks=[] if name in QUICK else pytest.mark.exhaustive)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in `runs/first`, and a photograph."""
    folder = tmp_path_factory.mktemp("pages")
    photographs(folder / "photos", classes=1, each=1)[0].rename(folder / "query.jpg")
    done = carried_out(["-m", "dml.run", "paths.output_dir=runs/first", *SMALL], folder)
    assert done.returncode == 0, done.stderr
    return folder


def carried_out(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=surroundings(), capture_output=True, text=True, check=False
    )


def surroundings() -> dict[str, str]:
    return os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("page", [*pages_that_run()])
def test_what_a_page_says_runs(page: Path, runs: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", script_of(page)], cwd=runs, env=surroundings(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# The reference.


def test_every_option_is_explained() -> None:
    from conf_reference import GROUPS, files_of, read

    files = [read(CONF / "config.yaml"), *(one for group in GROUPS for one in files_of(group))]
    assert len(files) == len(list(CONF.rglob("*.yaml")))
    assert [f"{one.choice}: {option.name}" for one in files for option in one.options if not option.meaning] == []


def test_every_option_is_on_its_page() -> None:
    """Of all files of conf/, as YAML reads them."""
    import yaml
    from conf_reference import GROUPS, common_page, page

    pages = {group: page(group) for group in GROUPS} | {"": common_page()}

    def names(prefix: str, node: object) -> Iterator[str]:
        if isinstance(node, dict) and node:
            for name, below in node.items():
                if name not in ("_target_", "_partial_", "defaults", "hydra"):
                    yield from names(f"{prefix}.{name}", below)
        elif prefix:
            yield prefix.lstrip(".")

    for path in CONF.rglob("*.yaml"):
        group = "" if path.parent == CONF else path.relative_to(CONF).parts[0]
        everywhere = not group or "# @package _global_" in path.read_text()
        lacking = [
            name
            for name in names("" if everywhere else f".{group}", yaml.safe_load(path.read_text()) or {})
            if f"`{name}`" not in pages[group]
        ]
        assert lacking == [], path


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    from conf_reference import GROUPS
    from measured import PAPERS

    wanted = [str(page.relative_to(ROOT / "docs")) for page in PAGES[2:]]
    wanted += [f"reference/options/{group}.md" for group in GROUPS]
    wanted += [f"reproduction/{paper}.md" for paper in PAPERS]
    assert [one for one in wanted if f" {one}" not in contents] == []


def test_the_readme_is_a_screen_or_two() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_links_outside_the_site_hold(page: Path) -> None:
    """Those within the site are checked when it is built."""
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert [one for one in links if "://" not in one and not (ROOT / one).exists()] == []


@pytest.mark.exhaustive
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = carried_out(["-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)], ROOT)
    assert done.returncode == 0, done.stderr
