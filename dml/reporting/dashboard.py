"""A W&B workspace with panels that compare methods, and a W&B report with the same panels, to write text between.

Runs are shown by group: runs that differ only in their repetition are one line with its standard deviation.
"""

import json
import warnings
from typing import Any

import wandb

from dml.errors import UserError
from dml.evaluation.metric import HEADLINE, METRICS, RERANKED, metric

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # pydantic warns about wandb-workspaces
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError:
        raise UserError("wandb-workspaces is not installed: pip install '.[dashboard]'.") from None

STEP = "trainer/global_step"


def sections() -> list[ws.Section]:
    """Returns the sections with their panels, the most important first. Metrics have their names of `metrics.json`."""

    def course(title: str, *names: str) -> wr.LinePlot:
        return wr.LinePlot(
            title=title,
            x=STEP,
            y=list(names),
            aggregate=True,
            groupby_aggfunc="mean",
            groupby_rangefunc="stddev",
            smoothing_type="none",
        )

    def bars(title: str, *names: str) -> wr.BarPlot:
        return wr.BarPlot(title=title, metrics=list(names), groupby_aggfunc="mean", groupby_rangefunc="stddev")

    def points(x: str) -> wr.ScatterPlot:
        title = f"{headline.title} over {metric(x).title}"
        return wr.ScatterPlot(title=title, x=wr.SummaryMetric(x), y=wr.SummaryMetric(test), log_x=True)

    headline, test = metric(HEADLINE), f"test/{HEADLINE}"
    tested = [one for one in METRICS if "test" in one.places]
    between = [one for one in METRICS if "learners" in one.places]

    return [
        ws.Section(
            name="Retrieval",
            is_open=True,
            panels=[
                *(bars(f"{one.title} on test classes, of the result", f"test/{one.name}") for one in tested),
                course(f"{headline.title} on test classes", test),
                *(course(f"{one.title} on validation classes", f"validation/{one.name}") for one in tested),
                bars("The ensemble and its mean learner", test, f"learners/mean/{HEADLINE}"),
                bars("Plain and re-ranked", test, f"{RERANKED}/{HEADLINE}"),
            ],
        ),
        ws.Section(
            name="Learners",
            panels=[
                course("Mean learner", f"learners/mean/{HEADLINE}"),
                *(course(f"Between learners: {one.title}", f"learners/{one.name}") for one in between),
                wr.WeavePanelSummaryTable(table_name="learner_metrics"),
            ],
        ),
        ws.Section(
            name="Cost",
            panels=[
                *(points(name) for name in ("model/params", "model/flops", "run/seconds")),
                bars(metric("run/images_per_second").title, "run/images_per_second"),
            ],
        ),
        ws.Section(
            name="Pictures",
            panels=[
                wr.MediaBrowser(title=title, media_keys=[name], num_columns=2)
                for name, title in {
                    "gallery": "Retrieved images",
                    "attention": "Attention",
                    "similarities": "Similarities of pairs",
                    "learners": "Learners",
                }.items()
            ],
        ),
        ws.Section(
            name="Training",
            panels=[
                course("Loss", "train/loss"),
                course("Metric loss", "train/metric"),
                course("Divergence (ABE)", "train/divergence"),
                course("Adversary (DeML)", "train/adversary"),
                course("Zero-shot loss (GSP)", "train/zero_shot"),
            ],
        ),
        ws.Section(
            name="Configurations",
            panels=[
                wr.RunComparer(diff_only=True),
                wr.ParameterImportancePlot(with_respect_to=test),
                wr.ParallelCoordinatesPlot(
                    columns=[
                        wr.ParallelCoordinatesPlotColumn(metric=wr.Config("method/_target_")),
                        wr.ParallelCoordinatesPlotColumn(metric=wr.Config("head/dim")),
                        wr.ParallelCoordinatesPlotColumn(metric=wr.Config("lr"), log=True),
                        wr.ParallelCoordinatesPlotColumn(metric=wr.SummaryMetric(test)),
                    ]
                ),
            ],
        ),
    ]


def workspace(project: str, entity: str, name: str) -> ws.Workspace:
    """Makes the workspace. wandb-workspaces checks it; nothing is sent."""
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=sections(),
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=50),
        runset_settings=ws.RunsetSettings(groupby=[ws.Metric("Group")]),
    )


def report(project: str, entity: str, name: str) -> wr.Report:
    """Makes the report: the panels below headings, with the project's runs by group. Nothing is sent."""
    blocks: list[Any] = [wr.P("Runs that differ only in their repetition are one line: mean and standard deviation.")]
    for section in sections():
        # A run set without a project takes the report's, which need not exist yet.
        runs = wr.Runset(name="Methods", groupby=["group"])
        blocks += [wr.H2(section.name), wr.PanelGrid(runsets=[runs], panels=list(section.panels))]
    return wr.Report(project=project, entity=entity, title=name, blocks=blocks, width="fluid")


def definitions(of_workspace: ws.Workspace, of_report: wr.Report) -> dict[str, Any]:
    """Returns the definitions that are sent to W&B, as plain containers."""
    models = {"workspace": of_workspace._to_model(), "report": of_report._to_model()}
    return {kind: json.loads(model.model_dump_json(by_alias=True)) for kind, model in models.items()}


def send(project: str, entity: str | None, name: str, only_print: bool = False) -> None:
    """Runs the command: sends workspace and report and prints their addresses.

    Args:
        project: of W&B.
        entity: user or team; None: that of the key.
        name: of the workspace and the report.
        only_print: print the definitions and send nothing; the same happens without a key.

    Raises:
        UserError: the service does not answer, or refuses, or the key has no entity.
    """
    try:
        if only_print or not wandb.login(prompt=False):
            named = project, entity or "entity", name
            print(json.dumps(definitions(workspace(*named), report(*named)), indent=1))
            return
        entity = entity or wandb.Api().default_entity
        if entity is None:
            raise UserError("W&B names no user or team of this key: give one with --entity.")
        named = project, entity, name
        urls = workspace(*named).save().url, report(*named).save().url
    except UserError:
        raise
    except Exception as error:  # raised by any layer of wandb's
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"W&B did not take the workspace or the report ({said}): --print shows what would be sent."
        ) from error
    print(*urls, sep="\n")
