"""Where figures go while a run lasts: always its folder, and W&B or TensorBoard where asked for."""

import csv
import io
import json
import os
import secrets
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from dml.files import replace_file


class FolderLogger(Logger):
    """`metrics.jsonl`, a line a record, and `metrics.csv`, the same as a table.

    Lightning's CSVLogger was passed over: it empties the file of the run that it resumes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "metrics.jsonl"

    @property
    def name(self) -> str:
        return "folder"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the folder has its config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step} | metrics) + "\n")

    @rank_zero_only
    def forget_after(self, step: int) -> None:
        """Drops what a killed run wrote after its last checkpoint, the step of which is given: it comes again."""
        if self.path.exists():
            kept = [json.dumps(record) + "\n" for record in read_metrics(self.path) if record["step"] <= step]
            replace_file(self.path, "".join(kept))

    @rank_zero_only
    def save(self) -> None:
        """Writes `metrics.csv` anew."""
        records = read_metrics(self.path) if self.path.exists() else []  # Lightning calls this too, at any time
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(dict.fromkeys(name for record in records for name in record)))
        writer.writeheader()
        writer.writerows(records)
        replace_file(self.path.parent / "metrics.csv", table.getvalue())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a last line that was cut short by a kill is left out."""
    records = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records


def wandb_logger(folder: str, project: str, group: str | None) -> WandbLogger:
    """A W&B run whose id lies in the run's folder, so that a resumed run goes on in it.

    In the mode that `WANDB_MODE` says; without one online where a key is at hand, else offline.
    """
    import wandb

    id_file = Path(folder) / "wandb_id"
    if not id_file.exists():
        replace_file(id_file, secrets.token_hex(4))
    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
    return WandbLogger(
        name=Path(folder).name,
        save_dir=folder,
        id=id_file.read_text().strip(),
        project=project,
        group=group,
        # Not Lightning's offline=True: it sets an environment variable for good, and to a word that W&B gave up.
        mode=mode,
        resume="allow" if mode == "online" else None,
    )


@rank_zero_only
def log_pictures(loggers: list[Logger], pictures: dict[str, Path], step: int) -> None:
    """PNG files by name, for those loggers that show pictures."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            for name, path in pictures.items():
                logger.log_image(key=name, images=[str(path)])
        elif isinstance(logger, TensorBoardLogger):
            import numpy as np
            from PIL import Image

            for name, path in pictures.items():
                pixels = np.asarray(Image.open(path).convert("RGB"))
                logger.experiment.add_image(name, pixels, step, dataformats="HWC")
