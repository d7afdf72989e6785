"""`python -m dml.search RUN GALLERY QUERY...`: the images of a gallery that a trained run sees nearest to others.

GALLERY is a folder of images, a file of python -m dml.embed, or the FOLDER of a search before, whose vectors are used
again. Similarities are cosines of whole embeddings. FOLDER gets results.html; of images vectors.npz; and index.faiss,
an index for other programs. A gallery.npy is read where it lies: exact search holds a block of it, --index hnsw the
vectors and their graph, ivfpq a thirtieth of them. The recall of these two is measured, and their effort raised until
it is --min-recall.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.configuration.defaults import INDEXES, MIN_RECALL
from dml.hub import folder_of, is_address
from dml.launch.arguments import Arguments, beside, embedding_options, place


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.search", description=__doc__)
    parser.add_argument("run", type=place, metavar="RUN", help="folder of a run, or hf://owner/name")
    parser.add_argument("gallery", type=Path, metavar="GALLERY", help="images, vectors.npz or the FOLDER of a search")
    parser.add_argument("queries", nargs="+", type=Path, metavar="QUERY", help="images, or folders of them")
    parser.add_argument("-k", type=int, default=10, help="nearest images of each query (default: %(default)s)")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FOLDER", help="default: GALLERY if it has an index, else RUN/search"
    )
    parser.add_argument("--index", choices=INDEXES, help="default: the one that GALLERY has, else flat, which is exact")
    parser.add_argument(
        "--min-recall", type=float, default=MIN_RECALL, help="of hnsw and ivfpq, measured (default: %(default)s)"
    )
    parser.add_argument("--threshold", action="store_true", help="leave out what dml.threshold says is no match")
    embedding_options(parser)
    options = parser.parse_args()
    from dml.inference.search import search

    search(
        folder_of(options.run),
        options.gallery,
        options.queries,
        options.out or (beside(options.run, "search") if is_address(options.run) else None),
        k=options.k,
        checkpoint=options.checkpoint,
        batch_size=options.batch_size,
        device=options.device,
        skip=options.skip,
        threshold=options.threshold,
        index=options.index,
        min_recall=options.min_recall,
    )


if __name__ == "__main__":
    main()
