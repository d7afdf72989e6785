"""`python -m dml.data.prepare dataset=NAME [source=ARCHIVE,FOLDER,URL...]`: a benchmark into its official layout.

With weights=googlenet_v1 source=FILE.caffemodel: Caffe's weights into the file that the backbone loads.

Takes archives that are there already (zip, tar, Parquet; also as Kaggle and Hugging Face pack Cars196 and SOP), or
fetches from the mirrors in conf/dataset/NAME.yaml; unpacks, verifies by the dataset's own reader, and only then puts
the folder where dataset.root says, with a card, dataset.json. A download that broke off goes on with the next start.

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


@ending(files=False)
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
