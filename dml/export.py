"""`python -m dml.export RUN [-o FOLDER] [--format onnx|torch|both]`: a trained embedding that needs nothing of dml.

model.pt2 (`torch.export.load(path).module()`) and model.onnx map images `[B,3,H,W]` in 0..1, of the run's image_size,
to embeddings `[B,D]` of unit norm, for any B; mean and deviation of the backbone are inside. What was written is read
again and compared with the run on random images. model.json says what an image goes through before, and the rest.
"""

import argparse
import sys
from pathlib import Path

from dml.inference.embedding import CHECKPOINTS
from dml.inference.export import FILES, Unfaithful, export
from dml.launch.entry import ending


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dml.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--out", type=Path, metavar="FOLDER", help="default: RUN/export")
    parser.add_argument("--format", choices=("onnx", "torch", "both"), default="both", help="default: %(default)s")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="last", help="default: %(default)s")
    options = parser.parse_args()
    formats = tuple(FILES) if options.format == "both" else (options.format,)
    try:
        export(options.run, options.out or options.run / "export", formats, options.checkpoint)
    except Unfaithful as sentence:
        print(f"dml: {sentence}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
