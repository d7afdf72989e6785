"""What was measured, as Markdown: experiments, figures of before they had records, and what scripts calculate."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from tabulate import tabulate

from dml.papers.catalogue import FOLDER, find, read_experiment
from dml.papers.page import section

NOTHING_TRAINED = Path("runs/nowhere")  # pictures of runs are no part of the site

PAPERS = {
    "abe": "ABE",
    "dces": "DCES",
    "diablo": "DIABLO",
    "deml": "DeML",
    "gsp": "GSP",
    "comparison": "All methods under one budget",
    "patterns": "The papers' patterns on Cars196",
    "losses": "All losses",
}


def reproduction(paper: str) -> str:
    """All tables and figures of a paper, a page."""
    found = find([paper])
    measured = sum(bool(one.measured) for one in found)
    lines = [f"# {PAPERS[paper]}: published and measured", ""]
    lines += [f"Tables and figures here: {len(found)}. Something was measured for {measured} of them.", ""]
    for one in found:
        lines += [f"## {one.name}: {one.title} {{ #{anchor(one.name)} }}", "", shown(one.name), ""]
    return "\n".join(lines)


def anchor(name: str) -> str:
    """Of an experiment on the page of its paper."""
    return name.replace("/", "-")


def shown(name: str) -> str:
    """One experiment as HTML without blank lines, which would end it in Markdown."""
    text = section(read_experiment(name), NOTHING_TRAINED)
    lines = "\n".join(line for line in text.splitlines() if line.strip())
    return f'<div class="experiment">\n{lines}\n</div>'


def experiments(names: str) -> str:
    """Some experiments, in the page of a method."""
    parts = []
    for name in names.split():
        place = f"../reproduction/{name.split('/')[0]}.md#{anchor(name)}"
        parts += [f"### {read_experiment(name).title}", shown(name), f"[Among the others of its paper]({place})"]
    return "\n\n".join(parts)


def earlier(name: str) -> str:
    """Tables of experiments/earlier.json, whose commands and commits were not kept."""
    kept = json.loads((FOLDER / "earlier.json").read_text())
    parts = []
    for one in kept["tables"][name]:
        table = tabulate(one["rows"], one["columns"], tablefmt="github", disable_numparse=True)
        parts += [f"**{one['title']}.** {one['about']}", table]
    return "\n\n".join([*parts, f"/// details | When these were measured\n{kept['about']}\n///"])


def output(script: str) -> str:
    """What a script calculates, which needs no training."""
    said = io.StringIO()
    with patch.object(sys, "argv", [script]), contextlib.redirect_stdout(said):
        runpy.run_path(str(FOLDER.parent / script), run_name="__main__")
    return said.getvalue()


ASKED = {"experiments": experiments, "earlier": earlier, "output": output}


def filled(text: str) -> str:
    """A page, with what it asks for in lines of their own: `<!-- experiments: abe/table1 abe/table8 -->`.

    Raises:
        UserError, KeyError, OSError: what is not there.
    """
    pattern = rf"^<!-- ({'|'.join(ASKED)}): (.*) -->$"
    return re.sub(pattern, lambda match: ASKED[match[1]](match[2]), text, flags=re.MULTILINE)
