"""`python -m dml.embed RUN IMAGES... -o vectors.npz`: the embeddings of any images by a trained run.

N images, L learners, d width of one learner, D = L*d. A .npz file holds `embeddings [N,D]` float32 of unit norm, which
are the learners side by side; `paths [N]`, in the same order; `weights`, a digest of the weights; `checksum`, of all
this; and with --learners `learners [N,L,d]`, each of unit norm.

With -o gallery.npy, memory holds one batch at a time: gallery.npy is `[N,D]`, gallery.parquet has the paths, and
gallery.json the digest. If the command is killed before it is done, the same command continues. `torchrun
--nproc-per-node 4 -m dml.embed ...` divides the images among four devices.

Paths are written as absolute ones. The command stops before it would replace a file of something else.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.errors import UserError
from dml.hub import folder_of
from dml.launch.arguments import Arguments, embedding_options, place
from dml.started import processes


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.embed", description=__doc__)
    parser.add_argument("run", type=place, metavar="RUN", help="folder of a run, or hf://owner/name")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGES", help="image files, or folders of them")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="vectors.npz or gallery.npy")
    parser.add_argument("--learners", action="store_true", help="also write the embedding of each learner")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="number type of a .npy file")
    embedding_options(parser)
    options = parser.parse_args()
    if options.out.suffix not in (".npz", ".npy"):
        raise UserError(f"-o {options.out} names neither a .npz nor a .npy file: end the name in one of these.")
    if options.out.suffix == ".npy":
        if options.learners:
            raise UserError("--learners can be written to a .npz file only: name one with -o.")
        from dml.inference.streaming import write_gallery

        write_gallery(
            folder_of(options.run),
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
        raise UserError(
            f"{options.out} can be written by one process only, and in float32: for more name a .npy file with -o."
        )
    from dml.inference.embedding import write_embeddings

    write_embeddings(
        folder_of(options.run),
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
