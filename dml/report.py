"""`python -m dml.report FOLDER...`: one table of all finished runs below folders, and plots over swept options.

Runs that differ only in seed, split, fold or repetition are one row, with mean and standard deviation. The folder of -o
gets summary.html, .md, .csv, .tex and .json, and figures/. Nothing is written into the folders of the runs.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.configuration.defaults import SUMMARY
from dml.launch.arguments import Arguments


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folder of runs or of a sweep")
    parser.add_argument(
        "-o", "--out", type=Path, default=SUMMARY, metavar="FOLDER", help="where to write (default: %(default)s)"
    )
    parser.add_argument(
        "--metric", default="test/recall@1", help="metric to draw over the swept options (default: %(default)s)"
    )
    parser.add_argument("--over", help="draw it over this swept option alone, for example method.M")
    options = parser.parse_args()
    from dml.reporting.summary import write_summary

    write_summary(options.folders, options.out, options.metric, options.over)


if __name__ == "__main__":
    main()
