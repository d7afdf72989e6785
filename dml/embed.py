"""`python -m dml.embed RUN IMAGES... -o vectors.npz`: what a trained run makes of any images.

N images, L learners, d width of one learner, D = L*d. A .npz file holds `embeddings [N,D]` float32 of unit norm, the
learners side by side; `paths [N]`, in the same order; `weights`, a digest of what they were embedded by; `checksum`, of
all that; and with --learners `learners [N,L,d]`, each of unit norm. With -o gallery.npy memory holds one batch at a
time: gallery.npy is `[N,D]`, gallery.parquet has the paths, gallery.json the digest. Killed, the same line goes on;
`torchrun --nproc-per-node 4 -m dml.embed ...` shares the images among four devices.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.errors import UserError
from dml.hub import folder_of
from dml.launch.arguments import Arguments, embedding_options, place
from dml.process import processes


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.embed", description=__doc__)
    parser.add_argument("run", type=place, metavar="RUN", help="folder of a run, or hf://owner/name")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGES", help="files, or folders of them")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="vectors.npz or gallery.npy")
    parser.add_argument("--learners", action="store_true", help="write the learners one by one too")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="of a .npy file")
    embedding_options(parser)
    options = parser.parse_args()
    run = folder_of(options.run)
    if options.out.suffix == ".npy":
        if options.learners:
            raise UserError("--learners goes into a .npz file: name one with -o.")
        from dml.inference.streaming import write_gallery

        write_gallery(
            run,
            options.images,
            options.out,
            checkpoint=options.checkpoint,
            batch_size=options.batch_size,
            device=options.device,
            skip=options.skip,
            dtype=options.dtype,
        )
        return
    if processes() > 1 or options.dtype != "float32":
        raise UserError(f"{options.out} is written by one process, in float32: name a .npy file with -o.")
    from dml.inference.embedding import write_embeddings

    write_embeddings(
        run,
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
