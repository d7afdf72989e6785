"""`python -m dml.dashboard --project P`: a W&B workspace with the panels that compare methods.

Runs are shown by group: those that differ in their repetition alone are one line with its standard deviation. With no
key at hand, or with --print, the workspace is built and checked, and its definition printed.
"""

from dml.configuration.command_line import ending
from dml.launch.arguments import Arguments


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.dashboard", description=__doc__)
    parser.add_argument("--project", required=True, help="W&B project, as in logger.wandb.project")
    parser.add_argument("--entity", help="user or team; default: yours")
    parser.add_argument("--name", default="Methods compared", help="of the workspace")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the definition, send nothing")
    options = parser.parse_args()
    from dml.reporting.dashboard import send

    send(options.project, options.entity, options.name, options.only_print)


if __name__ == "__main__":
    main()
