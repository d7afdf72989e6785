"""`python -m dml.experiment COMMAND`: the tables and figures of the papers, published and measured.

Each table or figure is a file experiments/PAPER/NAME.yaml. NAME below is abe/table1, a whole paper (abe), or all.
Trainings are kept in --out. They can be resumed, and tables that need the same training share it.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dml.configuration.command_line import ending
from dml.configuration.defaults import EXPERIMENTS, LAUNCHERS
from dml.launch.arguments import Arguments


def arguments() -> Arguments:
    """Returns the parser of the command line: the subcommands with their options."""
    parser = Arguments(prog="python -m dml.experiment", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, said: str, names: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=said, description=f"{said[0].upper()}{said[1:]}.")
        one.add_argument("names", nargs=names, metavar="NAME", help="abe/table1, a paper (abe), or all")
        return one

    def several(one: argparse.ArgumentParser, name: str, value: str, said: str, **more: Any) -> None:
        """Adds an option of several values, which may be given several times."""
        one.add_argument(name, nargs="+", action="extend", default=[], metavar=value, help=said, **more)

    add("list", "list the experiments, and how much of each was measured", "*")
    run = add("run", "train the rows that are not trained yet", "+")
    smoke = add("smoke", "train one step of each row, on miniature data", "*")
    record = add("record", "keep the measured figures in experiments/, with commit and hardware", "+")
    report = add("report", "write a page with published figures, measured ones, and their difference", "*")
    table = add("table", "print what was measured as Markdown tables", "+")
    table.add_argument("--against", metavar="ROW", help="compare with this row of one experiment in place of its own")
    for one in (run, smoke):
        several(one, "--rows", "ROW", "only these rows, of one experiment")
    several(run, "--parts", "PART", "only these parts, of one experiment")
    for one in (run, record):
        what = "options to change in every row, such as a shorter training"
        several(one, "--set", "OPTION=VALUE", what, dest="changes")
    for one, what in (
        (run, "folder of trainings"),
        (record, "folder of trainings"),
        (report, "folder of trainings and page"),
    ):
        what += " (default: %(default)s)"
        one.add_argument("--out", type=Path, default=EXPERIMENTS, metavar="FOLDER", help=what)
    what = "seeds instead of the experiment's; a script that has none runs once"
    several(run, "--seeds", "SEED", what, type=int)
    run.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="basic",
        help="launcher of the seeds (default: %(default)s); searches and scripts run here",
    )
    run.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="trainings at the same time (default: %(default)s)"
    )
    run.add_argument("--missing", action="store_true", help="leave out what is recorded already, here or elsewhere")
    either = run.add_mutually_exclusive_group()
    either.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    either.add_argument("--record", action="store_true", help="record it afterwards")
    record.add_argument(
        "--sizes", action="store_true", help="record exact parameters and flops instead; needs no training"
    )
    return parser


@ending()
def main() -> None:
    options = vars(arguments().parse_args())
    command = options.pop("command")
    action: dict[str, Callable[..., None]]
    if command in ("list", "report", "table"):  # these do without Lightning, which takes seconds to import
        from dml.papers import shown

        action = {"list": shown.show, "report": shown.report, "table": shown.table}
    else:
        from dml.papers import actions

        action = {"run": actions.run, "smoke": actions.smoke, "record": actions.record}
    action[command](**options)


if __name__ == "__main__":
    main()
