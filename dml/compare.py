"""`python -m dml.compare RUN_A RUN_B`: by how much two runs differ on the same queries, and how sure that is.

It makes a paired bootstrap over test classes, and one over images. Images of one class are not independent, and another
test set would bring other classes. So the interval over classes is the one to report; the one over images is too
narrow. For a folder of several runs (seeds or folds), each query counts with its mean over the runs. If a side has
several, the interval over classes contains how much runs differ, too (fold by fold if both have the same folds); of one
run each it does not.

The runs of a sweep are chosen by patterns in quotes, which folders match:

    python -m dml.compare 'runs/sweep/*method=baseline*' 'runs/sweep/*method=abe*'
"""

import re
from pathlib import Path

from dml.configuration.command_line import ending
from dml.configuration.defaults import DRAWS
from dml.hub import folder_of
from dml.launch.arguments import Arguments, beside, place


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.compare", description=__doc__)
    parser.add_argument(
        "a",
        type=place,
        metavar="RUN_A",
        help="folder of a finished run or of several, or a pattern of folders in quotes, or hf://owner/name",
    )
    parser.add_argument("b", type=place, metavar="RUN_B")
    parser.add_argument("--draws", type=int, default=DRAWS, help="draws of the bootstrap (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, help="folder to write to (default: compared_with_<RUN_A> in or beside RUN_B)"
    )
    options = parser.parse_args()
    from dml.analysis.comparison import compare, names

    name, _ = names(*(beside(one, "").resolve() for one in (options.a, options.b)))
    out = options.out or beside(options.b, f"compared_with_{re.sub(r'[*?]', '', name.replace('/', '_'))}")
    if options.out is None and isinstance(options.b, Path) and not options.b.exists():  # a pattern
        above = next(folder for folder in out.parents if folder.is_dir())
        out = above / re.sub(r"[*?]", "", f"{out.parent.name}_{out.name}")
    compare(folder_of(options.a), folder_of(options.b), out, options.draws, options.seed)


if __name__ == "__main__":
    main()
