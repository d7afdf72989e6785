"""`python -m dml.smoke [--gpu]`: whether everything works here, and how fast it is, in minutes.

Without --gpu it makes small checks on the CPU: every method trains a few steps; a run is compared with a bare loop of
its network; evaluation; GSP's layer and DeML's boxes are compared with plain ones; two processes with one; loaders.
With --gpu it makes the same checks at real sizes, compares them with the goals, and runs the tests that need a GPU;
figures and a drawing are kept in experiments/bench/gpu.json and gpu.png. It needs no data and no internet. A part that
fails is shown in the table, and the exit code is then 1.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.configuration.defaults import SMOKE_MINUTES, SMOKE_PARTS
from dml.errors import UserError
from dml.launch.arguments import Arguments


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.smoke", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="check at real sizes, on a CUDA device")
    parser.add_argument(
        "--minutes",
        type=float,
        default=SMOKE_MINUTES,
        help="time limit; parts that do not fit are left out (default: %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=SMOKE_PARTS, default=[], metavar="PART", help=", ".join(SMOKE_PARTS)
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE.json",
        help="where to keep the figures (default: see above; without --gpu nowhere)",
    )
    options = parser.parse_args()
    if not 0 < options.minutes < 10_000:
        raise UserError(f"--minutes {options.minutes:g} has to be more than 0 and less than 10000.")
    from dml.bench.check import check

    if not check(options.gpu, options.minutes, options.only, options.out):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
