"""The images on which a run was tested and validated, and their embeddings by its trained weights."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from dml.configuration.components import instantiate
from dml.configuration.options import check_plain
from dml.configuration.places import holds_path, without_secrets
from dml.data.check import readable
from dml.data.dataset import open_dataset
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import EvaluatedPart, Split
from dml.files import NETWORK
from dml.inference.embedding import Trained, in_batches, opened
from dml.runs.reading import reading
from dml.training.rebuild import described

DATA = "data"  # stands for the folder of data sets in a published configuration


@dataclass(frozen=True)
class Tested:
    """The data set of a run, and the rows on which its protocol tests and validates."""

    records: Records
    split: Split

    protocol: Conventional

    @classmethod
    def of(cls, trained: Trained, data: Path | None = None) -> "Tested":
        """Opens the data set on which the run was trained, at the place where it was then.

        Args:
            trained: the run.
            data: the folder of data sets, above the folder of the images, for a published embedding only; None:
                `$DML_DATA`, else `data`.

        Raises:
            UserError: the data is not there any more or was changed, the checkpoint names something that is no data set
                or no protocol, it is of an export, or `data` is given for a run, which knows its data set.
        """
        path = trained.checkpoint
        config = described(path, "dataset", "protocol", "paths")
        if path.name == NETWORK:
            config = located(config, data or Path(os.environ.get("DML_DATA", "data")))
        elif data is not None:
            raise UserError(f"{path} belongs to a run, which knows where its data is: leave --data out.")
        if not (config.dataset and config.protocol):
            raise UserError(f"{path} is of an export, which knows no data: name its run, or what dml.publish wrote.")
        with reading(path, "choose another with --checkpoint, or repeat the run"):
            check_plain({name: OmegaConf.to_container(config[name]) for name in ("dataset", "protocol")})
            protocol: Conventional = instantiate(config.protocol)
        try:
            records = readable(open_dataset(config), config.paths.cache_dir)
        except UserError as error:
            if path.name == NETWORK and (missing := _missing(config.dataset)):
                raise UserError(
                    f"there is no folder {missing}: name with --data the folder in which {missing.name} lies."
                ) from error
            raise
        return cls(records, protocol.split(records), protocol)

    def rows(self, part: EvaluatedPart) -> np.ndarray | None:
        """Returns the rows of the records of one part, ascending: queries and gallery of the test, or the validation
        images. None if the protocol has no validation images."""
        if part == "validation":
            return None if self.split.validation is None else np.sort(self.split.validation)
        split = self.split
        return np.sort(split.query) if split.gallery is None else np.union1d(split.query, split.gallery)

    def embed(self, trained: Trained, rows: np.ndarray, batch_size: int) -> Tensor:
        """Embeds rows `[n]`: returns `[n,D]` float32 of unit norm. Raises UserError if an image cannot be read."""
        learners = self.learners(trained, rows, batch_size)
        return learners.flatten(1) / learners.shape[1] ** 0.5

    def learners(self, trained: Trained, rows: np.ndarray, batch_size: int) -> Tensor:
        """Embeds rows `[n]`: returns `[n,L,d]` float32, each learner of unit norm. Raises UserError as `embed`."""
        found = []
        batches = opened(trained.transform, in_batches(rows.tolist(), batch_size), self.records.open_image)
        with tqdm(total=len(rows), desc="embedding", leave=False, disable=None) as bar:
            for batch in batches:
                images = []
                for row, image in batch:
                    if isinstance(image, str):
                        raise UserError(f"the image {self.records.paths[row]} cannot be read ({image}): repair it.")
                    images.append(image)
                found.append(trained.embed(torch.stack(images)))
                bar.update(len(batch))
        return torch.cat(found)


def _missing(dataset: DictConfig) -> Path | None:
    """Returns a folder of a data set that is not there."""
    root = OmegaConf.to_container(dataset).get("root")  # type: ignore[union-attr]
    roots = root if isinstance(root, list) else [root]
    return next((Path(one) for one in roots if isinstance(one, str) and not Path(one).is_dir()), None)


def portable(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a run's configuration without what looks like a path of the machine on which it ran, see `holds_path`:
    data sets are below `DATA`.

    Args:
        config: plain containers, without OmegaConf's references.
    """
    data_dir = str(config["paths"]["data_dir"])

    def walk(node: Any, option: str) -> Any:
        if isinstance(node, dict):
            return {name: walk(part, str(name)) for name, part in node.items()}
        if isinstance(node, list):
            return [walk(part, option) for part in node]
        if not isinstance(node, str):
            return node
        if node == data_dir or node.startswith(f"{data_dir}/"):
            return DATA + node[len(data_dir) :]
        if holds_path(option, node):
            return f"{DATA}/{Path(node).name}"
        return without_secrets(node) if "://" in node else node

    kept = {name: part for name, part in config.items() if name not in ("logger", "hydra", "debug")}
    paths = {"data_dir": DATA, "cache_dir": "cache", "output_dir": "runs", "sweep_dir": "runs"}
    return {**walk(kept, ""), "paths": paths}


def located(config: DictConfig, data: Path) -> DictConfig:
    """Returns a published configuration with the paths of this machine: data sets below `data`, and the cache.

    Args:
        config: as `portable` made it.
        data: the folder of data sets here.
    """

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: walk(part) for name, part in node.items()}
        if isinstance(node, list):
            return [walk(part) for part in node]
        below = isinstance(node, str) and (node == DATA or node.startswith(f"{DATA}/"))
        return f"{data}{node[len(DATA) :]}" if below else node

    plain = OmegaConf.to_container(config)
    assert isinstance(plain, dict)
    cache = os.environ.get("DML_CACHE", "cache")
    return OmegaConf.create({**plain, "dataset": walk(plain["dataset"]), "paths": {"cache_dir": cache}})
