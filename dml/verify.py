"""`python -m dml.verify PLACE [--data FOLDER]`: whether a published embedding is what its card says.

PLACE is a folder of dml.publish, hf://owner/name, or the folder of a run. Files and tensors are compared with their
digests, the card with the figures, and the figures with every query's rank. Then the test set is embedded again, and
all ranks are compared, and all figures of this test but NMI and F1; those of the untrained network, of other
checkpoints and of re-ranking are as the run wrote them. Other hardware rounds in another way: a rank that cosines off
by 1e-5 explain (1e-2 for a run in half precision or with trainer.matmul other than highest) does not count as a
difference, nor does a figure off by 0.002, or a share of the queries, such as Recall@K, off by two of them. The exit
code is 1 if anything differs.

The images of a published embedding are expected in FOLDER, below the name that their folder had: for a run with
dataset.root=photos, FOLDER is the folder above photos.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.configuration.defaults import EMBEDDED_AT_ONCE
from dml.launch.arguments import Arguments, place


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.verify", description=__doc__)
    parser.add_argument("place", type=place, metavar="PLACE", help="folder, or hf://owner/name")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="folder above that of the images (default: $DML_DATA, else data)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=EMBEDDED_AT_ONCE, help="images at a time (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto", help="default: %(default)s")
    options = parser.parse_args()
    from dml.inference.verify import command

    command(options.place, options.data, batch_size=options.batch_size, device=options.device)


if __name__ == "__main__":
    main()
