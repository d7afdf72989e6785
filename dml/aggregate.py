"""`python -m dml.aggregate FOLDER...`: the result of MLRC's trainings, all folds together.

A collection has one training of each fold. Its metrics are either the mean of those of its trainings (separated), or
those of one embedding that has the embeddings of its trainings side by side (concatenated).
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.configuration.defaults import SUMMARY
from dml.launch.arguments import Arguments


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.aggregate", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folder of runs or of a sweep")
    parser.add_argument(
        "-o", "--out", type=Path, default=SUMMARY, metavar="FOLDER", help="where to write (default: %(default)s)"
    )
    options = parser.parse_args()
    from dml.analysis.mlrc import write_aggregate

    write_aggregate(options.folders, options.out)


if __name__ == "__main__":
    main()
