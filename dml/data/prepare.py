"""`python -m dml.data.prepare dataset=NAME [source=ARCHIVE,FOLDER,URL...]`: a benchmark into its official layout.

With weights=googlenet_v1 source=FILE.caffemodel it converts Caffe's weights into the file that the backbone loads.

It takes archives that you have (zip, tar, Parquet; also Cars196 and SOP as Kaggle and Hugging Face pack them), or
fetches them from the mirrors in conf/dataset/NAME.yaml. It unpacks them, verifies the result with the dataset's own
reader, and only then moves the folder to dataset.root, with a summary in dataset.json. A broken download continues at
the next start.

    python -m dml.data.prepare dataset=cub200
    python -m dml.data.prepare dataset=cars196 source=archive.zip,car_devkit.tgz
    python -m dml.data.prepare dataset=sop source=https://mirror.example/Stanford_Online_Products.zip
    python -m dml.data.prepare weights=googlenet_v1 source=bvlc_googlenet.caffemodel
"""

import sys

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from dml.configuration.command_line import ending, hydra_sentence
from dml.configuration.composition import composed
from dml.errors import UserError


@ending()
def main() -> None:
    typed = sys.argv[1:]
    if not typed or {"-h", "--help"} & set(typed):
        print(__doc__)
        raise SystemExit(0 if typed else 2)
    sources = [one for a in typed if a.startswith("source=") for one in a.removeprefix("source=").split(",") if one]
    weights = [a.removeprefix("weights=") for a in typed if a.startswith("weights=")]
    overrides = [a for a in typed if not a.startswith(("source=", "weights="))]
    from dml.data.convert import convert
    from dml.data.preparation import prepare

    try:
        if weights:
            convert(weights[-1], composed(*overrides, f"backbone={weights[-1]}"), sources)
        else:
            prepare(composed(*overrides), sources)
    except (HydraException, OmegaConfBaseException) as mistake:
        raise UserError(hydra_sentence(mistake)) from mistake


if __name__ == "__main__":
    main()
