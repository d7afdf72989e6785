"""`python -m dml.export RUN [-o FOLDER] [--format onnx|torch|both]`: a trained embedding that can be used without dml.

model.pt2 (`torch.export.load(path).module()`) and model.onnx map images `[B,3,H,W]` in 0..1, of the run's image_size,
to embeddings `[B,D]` of unit norm, for any B. They include the normalisation by the backbone's mean and deviation. Each
file is read again and compared with the run on random images. model.json describes the model, and how to prepare an
image for it.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.configuration.defaults import CHECKPOINT, CHECKPOINTS
from dml.hub import folder_of
from dml.launch.arguments import Arguments, beside, place


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.export", description=__doc__)
    parser.add_argument("run", type=place, metavar="RUN", help="folder of a run, or hf://owner/name")
    parser.add_argument("-o", "--out", type=Path, metavar="FOLDER", help="where to write (default: RUN/export)")
    parser.add_argument("--format", choices=("onnx", "torch", "both"), default="both", help="default: %(default)s")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, help=CHECKPOINT)
    options = parser.parse_args()
    from dml.inference.export import export

    formats = ("torch", "onnx") if options.format == "both" else (options.format,)
    export(folder_of(options.run), options.out or beside(options.run, "export"), formats, options.checkpoint)


if __name__ == "__main__":
    main()
