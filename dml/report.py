"""`python -m dml.report FOLDER...`: one table of all finished runs below some folders, and plots over what was swept.

Runs that differ in their seed, split, fold or repetition alone are one row: mean and standard deviation over them.
summary.html, .md, .csv, .tex and .json, and figures/, go to the folder of -o; none of the runs is written to.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.configuration.defaults import SUMMARY
from dml.launch.arguments import Arguments


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of runs or sweeps")
    parser.add_argument("-o", "--out", type=Path, default=SUMMARY, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--metric", default="test/recall@1", help="drawn over what was swept (default: %(default)s)")
    parser.add_argument("--over", help="the only swept option to draw it over, for example method.M")
    options = parser.parse_args()
    from dml.reporting.summary import write_summary

    write_summary(options.folders, options.out, options.metric, options.over)


if __name__ == "__main__":
    main()
