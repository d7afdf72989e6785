"""Hooks of mkdocs: pages generated from `conf/`, `experiments/` and the commands, and equations as MathML."""

import html
import re
from typing import Any

import command_reference
import conf_reference
import measured
import module_reference
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def made() -> dict[str, str]:
    """Returns the Markdown of each generated page: path in the site -> text."""
    pages = {f"reproduction/{paper}.md": measured.reproduction(paper) for paper in measured.PAPERS}
    pages["reference/options/config.md"] = conf_reference.common_page()
    pages |= {f"reference/options/{group}.md": conf_reference.page(group) for group in conf_reference.GROUPS}
    pages |= {f"reference/api/{name}.md": text for name, text in module_reference.pages().items()}
    pages["reference/commands.md"] = command_reference.page()
    return pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for place, text in made().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(text: str, **_: Any) -> str:
    """Inserts measured figures where a page asks for them."""
    return measured.filled(text)


def on_page_content(text: str, **_: Any) -> str:
    """Turns equations into MathML, which browsers draw by themselves."""

    def drawn(match: re.Match[str]) -> str:
        formula = re.sub(r"^\\[(\[]|\\[)\]]$", "", html.unescape(match[2]).strip())
        return convert(formula.strip(), display="block" if match[1] == "div" else "inline")

    return re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', drawn, text, flags=re.DOTALL)
