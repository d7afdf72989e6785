"""Measured figures as Markdown: experiments, and the output of scripts."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from dml.errors import UserError
from dml.papers.catalogue import FOLDER, find, read_experiment
from dml.papers.drawing import glance
from dml.papers.page import section

NOTHING_TRAINED = Path("runs/nowhere")  # the site does not show pictures of runs

PAPERS = {
    "abe": "ABE",
    "dces": "DCES",
    "diablo": "DIABLO",
    "deml": "DeML",
    "gsp": "GSP",
    "comparison": "All methods, tuned alike",
    "patterns": "The papers' patterns on Cars196",
    "losses": "All losses",
    "speed": "Speed and memory",
}


def reproduction(paper: str) -> str:
    """Returns the page with all tables and figures of a paper."""
    found = find([paper])
    measured = sum(bool(one.measured) for one in found)
    lines = [f"# {PAPERS[paper]}: published and measured", ""]
    lines += [f"Tables and figures here: {len(found)}. Something was measured for {measured} of them.", ""]
    for one in found:
        lines += [f"## {one.name}: {one.title} {{ #{anchor(one.name)} }}", "", shown(one.name), ""]
    return "\n".join(lines)


def anchor(name: str) -> str:
    """Returns the anchor of an experiment on the page of its paper."""
    return name.replace("/", "-")


def shown(name: str) -> str:
    """Returns one experiment as HTML, without blank lines: these would end the HTML in Markdown."""
    text = section(read_experiment(name), NOTHING_TRAINED)
    lines = "\n".join(line for line in text.splitlines() if line.strip())
    return f'<div class="experiment">\n{lines}\n</div>'


def experiments(names: str) -> str:
    """Returns some experiments, for the page of a method."""
    parts = []
    for name in names.split():
        place = f"../reproduction/{name.split('/')[0]}.md#{anchor(name)}"
        parts += [f"### {read_experiment(name).title}", shown(name), f"[With the others of its page]({place})"]
    return "\n\n".join(parts)


def output(script: str) -> str:
    """Runs a script that needs no training, and returns what it prints."""
    said = io.StringIO()
    with patch.object(sys, "argv", [script]), contextlib.redirect_stdout(said):
        runpy.run_path(str(FOLDER.parent / script), run_name="__main__")
    return said.getvalue()


def patterns(names: str) -> str:
    """Returns a picture of all patterns of some experiments, and how many of them show."""
    found = glance(find(names.split()))
    if found is None:
        raise UserError(f"no pattern of {names} was measured")
    said, picture = found
    return f'{said}\n\n<img src="{picture}" alt="Differences that the papers report, as they were measured here">'


ASKED = {"experiments": experiments, "output": output, "patterns": patterns}


def filled(text: str) -> str:
    """Replaces the lines of a page that ask for something, such as `<!-- experiments: abe/table1 abe/table8 -->`.

    Raises:
        UserError, KeyError, OSError: what a line asks for does not exist.
    """
    pattern = rf"^<!-- ({'|'.join(ASKED)}): (.*) -->$"
    return re.sub(pattern, lambda match: ASKED[match[1]](match[2]), text, flags=re.MULTILINE)
