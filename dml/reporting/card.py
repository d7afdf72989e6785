"""The card of a published embedding, as the Hugging Face hub shows it: method, data, figures, training, licences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined
from omegaconf import DictConfig

from dml.configuration.identity import label
from dml.reporting.table import columns, interval, tested_on
from dml.runs.about import settings
from dml.runs.collecting import below_untrained
from dml.runs.provenance import versions_line

# Licences that have an identifier on the hub. Another one is written as `other`, with its name.
IDENTIFIERS = (
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "gpl-3.0", "lgpl-3.0", "agpl-3.0", "mpl-2.0"),
    *("cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0", "openrail", "unlicense"),
)


@dataclass(frozen=True)
class Licences:
    """Licences in words.

    Attributes:
        weights: of the weights that are published.
        backbone: of the weights from which the backbone started.
        data: of the training images.
    """

    weights: str
    backbone: str
    data: str


@dataclass(frozen=True)
class Facts:
    """The facts from which a card is written.

    Attributes:
        name: of the model.
        place: from which it is loaded: the name of a folder, or an address.
        width: D, of the embedding.
        config: of the run.
        metrics: of the run, as in `metrics.json`.
        protocol: a description of the protocol.
        starts: of the training, as in `provenance.json`.
        licences: of weights, backbone and data.
        picture: its `file` and `caption`, or None.
    """

    name: str
    place: str
    width: int
    config: DictConfig
    metrics: Mapping[str, float]
    protocol: str
    starts: Sequence[Mapping[str, Any]]
    licences: Licences
    picture: Mapping[str, str] | None


def card(facts: Facts) -> str:
    """Returns the text of the card: front matter and Markdown."""
    text = files("dml.reporting").joinpath("card.md.jinja").read_text(encoding="utf-8")
    page = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    ).from_string(text)
    method, data, _ = label(facts.config)
    body = page.render(
        name=facts.name,
        place=facts.place,
        width=facts.width,
        method=method,
        data=data,
        tested=tested_on(facts.metrics),
        protocol=facts.protocol,
        figures=figures(facts.metrics),
        below=below_untrained(facts.metrics),
        settings=list(settings(facts.config).items()),
        starts=[{**start, "versions": versions_line(start)} for start in facts.starts],
        licences=facts.licences,
        picture=facts.picture,
    )
    return f"---\n{_front(facts).to_yaml()}\n---\n\n{body}"


def figures(metrics: Mapping[str, float]) -> list[str]:
    """Returns the lines of a Markdown table of a run's test: each metric with its interval and its untrained value."""
    lines = ["| | test | interval | untrained |", "|---|---:|---:|---:|"]
    for one in columns(metrics):
        ends, before = interval(metrics, one.name), metrics.get(f"untrained/{one.name}")
        cells = [one.title, one.written(metrics[f"test/{one.name}"]), " to ".join(ends), one.written(before)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _front(facts: Facts) -> ModelCardData:
    """Returns the front matter, which the hub and `dml.verify` read."""
    method, data, protocol = label(facts.config)
    licence = facts.licences.weights.lower()
    known = licence in IDENTIFIERS
    results = [
        EvalResult(
            task_type="image-retrieval",
            dataset_type=data,
            dataset_name=data,
            dataset_config=protocol,
            dataset_split="test",
            metric_type=one.name,
            metric_name=one.title,
            metric_value=facts.metrics[f"test/{one.name}"],
        )
        for one in columns(facts.metrics)
    ]
    return ModelCardData(
        library_name="dml",
        license=licence if known else "other",
        license_name=None if known else facts.licences.weights,
        pipeline_tag="image-feature-extraction",
        tags=["deep-metric-learning", "image-retrieval", method.lower()],
        model_name=facts.name,
        eval_results=results,
    )
