"""`python -m dml.search RUN GALLERY QUERY...`: the images of a gallery that are nearest to others, by a trained run.

GALLERY is a folder of images, a file of python -m dml.embed, or the FOLDER of an earlier search, whose vectors are used
again. Similarities are cosines of whole embeddings. FOLDER gets results.html. Unless GALLERY is the folder of an
earlier search or a gallery.npy, it also gets vectors.npz and index.faiss, which other programs can read.

A gallery.npy is not loaded as a whole: exact search holds a block of it in memory, --index hnsw the vectors and their
graph, --index ivfpq about a twelfth of the vectors. The recall of these two indexes is measured, and their effort is
raised until it reaches --min-recall. They are written for any GALLERY. Vectors of a folder of images are written before
such an index is built, so they are kept even if it fails.
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
    parser.add_argument("queries", nargs="+", type=Path, metavar="QUERY", help="image files, or folders of them")
    parser.add_argument(
        "-k", type=int, default=10, help="how many images to find for each query (default: %(default)s)"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where to write (default: GALLERY if that is the FOLDER of a search, else RUN/search)",
    )
    parser.add_argument(
        "--index", choices=INDEXES, help="kind of index (default: that of GALLERY, else flat, which is exact)"
    )
    parser.add_argument(
        "--min-recall",
        type=float,
        default=MIN_RECALL,
        help="recall that hnsw and ivfpq have to reach (default: %(default)s)",
    )
    parser.add_argument(
        "--threshold", action="store_true", help="leave out images below the threshold of dml.threshold"
    )
    embedding_options(parser)
    options = parser.parse_args()
    from dml.inference.index_files import holds_search
    from dml.inference.search import search

    indexed = holds_search(options.gallery)
    search(
        folder_of(options.run),
        options.gallery,
        options.queries,
        options.out or (beside(options.run, "search") if is_address(options.run) and not indexed else None),
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
