"""What mkdocs does besides: pages made of `conf/`, of `experiments/` and of the commands, and equations as MathML.

A page of `docs/` asks for what is measured with a line of its own, `<!-- experiments: abe/table1 abe/table8 -->`.
"""

import html
import re
from pathlib import Path
from typing import Any

import command_reference
import conf_reference
import module_reference
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from dml.papers.catalogue import find, names, read_experiment
from dml.papers.page import markdown, section

NOTHING_TRAINED = Path("runs/nowhere")  # pictures of runs are no part of the site

PAPERS = {
    "abe": "ABE",
    "dces": "DCES",
    "deml": "DeML",
    "diablo": "DIABLO",
    "gsp": "GSP",
    "comparison": "All methods under one budget",
    "losses": "All losses",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made."""
    pages = {f"reproduction/{paper}.md": reproduction(paper) for paper in PAPERS}
    pages["reference/options/config.md"] = conf_reference.common_page()
    pages |= {f"reference/options/{group}.md": conf_reference.page(group) for group in conf_reference.GROUPS}
    pages |= {f"reference/api/{name}.md": text for name, text in module_reference.pages().items()}
    pages["reference/commands.md"] = command_reference.page()
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def reproduction(paper: str) -> str:
    """Markdown of all tables and figures of a paper."""
    found = find([paper])
    measured = sum(bool(one.measured) for one in found)
    lines = [f"# {PAPERS[paper]}: published and measured", ""]
    lines += [f"{len(found)} tables and figures; something was measured here for {measured} of them.", ""]
    for one in found:
        lines += [f"## {one.name}: {one.title} {{ #{one.name.replace('/', '-')} }}", "", shown(one.name), ""]
    return "\n".join(lines)


def shown(name: str) -> str:
    """One experiment as HTML without blank lines, which would end it in Markdown."""
    text = section(read_experiment(name), NOTHING_TRAINED)
    lines = "\n".join(line for line in text.splitlines() if line.strip())
    return f'<div class="experiment">\n{lines}\n</div>'


def on_page_markdown(text: str, **_: Any) -> str:
    """Puts what was measured where a page asks for it.

    Raises:
        KeyError: an experiment that is not there.
    """

    def wanted(match: re.Match[str]) -> str:
        parts = []
        for name in match[2].split():
            if name not in names():
                raise KeyError(f"there is no experiment {name}")
            one = read_experiment(name)
            if match[1] == "table":
                parts.append(markdown(one))
            else:
                place = f"../reproduction/{name.split('/')[0]}.md#{name.replace('/', '-')}"
                parts.append(f"### {one.title}\n\n{shown(name)}\n\n[All of it, with its sources]({place})\n")
        return "\n".join(parts)

    return re.sub(r"^<!-- (experiments|table): (.*) -->$", wanted, text, flags=re.MULTILINE)


def on_page_content(text: str, **_: Any) -> str:
    """Equations as MathML, which browsers draw by themselves."""

    def drawn(match: re.Match[str]) -> str:
        tag, inner = match[1], html.unescape(match[2]).strip()
        formula = inner.removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]").strip()
        return convert(formula, display="block" if tag == "div" else "inline")

    return re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', drawn, text, flags=re.DOTALL)
