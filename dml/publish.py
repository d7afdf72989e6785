"""`python -m dml.publish RUN -o FOLDER [--to hf://owner/name]`: a trained embedding that others can load and check.

FOLDER gets the weights as safetensors, the configuration, the run's figures, every query's rank, and a model card that
is written from the run. It holds nothing executable. Of values that begin like a path, and of dataset.root, dataset.csv
and backbone.weights, only the name is kept; look for paths in other values yourself. A licence that neither you nor the
run states is asked for. `dml.load(FOLDER)` embeds with it, `python -m dml.verify FOLDER` checks it, and `--to` puts it
on the Hugging Face hub.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.launch.arguments import Arguments


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.publish", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FOLDER", help="folder to write to; it is made"
    )
    parser.add_argument("--to", metavar="hf://OWNER/NAME", help="also put it on the hub")
    parser.add_argument("--licence", metavar="NAME", help="licence of the weights you publish, such as cc-by-4.0")
    parser.add_argument("--data-licence", metavar="NAME", help="licence or terms of the training images")
    parser.add_argument(
        "--backbone-licence", metavar="NAME", help="licence of the pre-trained weights, if the run does not know it"
    )
    options = parser.parse_args()
    from dml.inference.publish import publish

    licences = {"weights": options.licence, "data": options.data_licence, "backbone": options.backbone_licence}
    publish(options.run, options.out, licences, options.to)


if __name__ == "__main__":
    main()
