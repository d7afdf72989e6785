"""`python -m dml.embed RUN IMAGES... -o vectors.npz`: what a trained run makes of any images.

N images, L learners, d width of one learner, D = L*d. The file holds `embeddings [N,D]` float32 of unit norm, the
learners side by side; `paths [N]`, in the same order; `weights`, a digest of what they were embedded by; `checksum`, of
all that; and with --learners `learners [N,L,d]`, each of unit norm.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.launch.arguments import Arguments, embedding_options


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.embed", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGES", help="files, or folders of them")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="for example vectors.npz")
    parser.add_argument("--learners", action="store_true", help="write the learners one by one too")
    embedding_options(parser)
    options = parser.parse_args()
    from dml.inference.embedding import write_embeddings

    write_embeddings(
        options.run,
        options.images,
        options.out,
        checkpoint=options.checkpoint,
        batch_size=options.batch_size,
        device=options.device,
        learners=options.learners,
        skip=options.skip,
    )


if __name__ == "__main__":
    main()
