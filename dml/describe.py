"""`python -m dml.describe`: the model of a configuration, without its data: stages, learners, parameters, flops.

One flop is one multiply-add, of one image at `image_size`. The last line is one JSON object with the totals.
"""

import json

from omegaconf import DictConfig

from dml.launch.entry import command
from dml.training.description import describe


def _task(config: DictConfig) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from dml.configuration.options import check
    from dml.training.build import build_method

    check(config, without=("dataset", "download"))

    config.backbone.weights = "none"  # sizes do not depend on them
    config.runtime.train_classes = 2  # known with the data; proxies are not counted
    method = build_method(config)
    parts, total = describe(method, config.image_size)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for title in ("output", "parameters", "flops"):
        table.add_column(title, justify="right", no_wrap=True)
    for part in parts:
        table.add_row(part.name, " x ".join(map(str, part.shape)), f"{part.params:,}", f"{part.flops:,}")
    Console().print(table)
    print(
        f"{type(method).__name__} on {config.image_size} x {config.image_size} pixels: {total['learners']} learners of "
        f"{total['dim'] // total['learners']}, {total['params'] / 1e7:.2f}e7 parameters, "
        f"{total['flops'] / 1e9:.2f}e9 flops an image (one multiply-add is one flop)"
    )
    print(json.dumps(total))


main = command(_task)


if __name__ == "__main__":
    main()
