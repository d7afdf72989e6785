"""The images that a run was tested and validated on, as its trained weights embed them now."""

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

DATA = "data"  # stands for the folder of data sets in what is published

PLACES = ("root", "csv")  # options of data sets that are paths, whatever they look like


@dataclass(frozen=True)
class Tested:
    """Of a run: the records, and which rows its protocol tests and validates on."""

    records: Records
    split: Split

    protocol: Conventional

    @classmethod
    def of(cls, trained: Trained, data: Path | None = None) -> "Tested":
        """Opens the data set that the run was trained on, where it lay then.

        Args:
            data: the folder of data sets, of what was published; None: `$DML_DATA`, else `data`.

        Raises:
            UserError: the data is not there any more, or not as it was; a checkpoint that names what is no data set or
                no protocol.
        """
        path = trained.checkpoint
        config = described(path, "dataset", "protocol", "paths")
        if path.name == NETWORK:
            config = located(config, data or Path(os.environ.get("DML_DATA", "data")))
        elif data is not None:
            raise UserError(f"{path} is of a run, which knows where its data lies: leave --data out.")
        with reading(path, "choose another with --checkpoint, or repeat the run"):
            check_plain({name: OmegaConf.to_container(config[name]) for name in ("dataset", "protocol")})
            protocol: Conventional = instantiate(config.protocol)
        records = readable(open_dataset(config), config.paths.cache_dir)
        return cls(records, protocol.split(records), protocol)

    def rows(self, part: EvaluatedPart) -> np.ndarray | None:
        """Of the records: queries and gallery of the test, or the validation images; None where there are none."""
        if part == "validation":
            return self.split.validation
        split = self.split
        return split.query if split.gallery is None else np.union1d(split.query, split.gallery)

    def embed(self, trained: Trained, rows: np.ndarray, batch_size: int) -> Tensor:
        """`[n]` rows -> `[n,D]` float32 of unit norm. Raises UserError for an image that cannot be read."""
        learners = self.learners(trained, rows, batch_size)
        return learners.flatten(1) / learners.shape[1] ** 0.5

    def learners(self, trained: Trained, rows: np.ndarray, batch_size: int) -> Tensor:
        """`[n]` rows -> `[n,L,d]` float32, each learner of unit norm. Raises as `embed`."""
        found = []
        batches = opened(trained.transform, in_batches(rows.tolist(), batch_size), self.records.opened)
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


def portable(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration without places of the machine that it ran on: data sets lie below `DATA`.

    Args:
        config: plain containers, without references.
    """
    data_dir = str(config["paths"]["data_dir"])

    def walk(node: Any, is_place: bool) -> Any:
        if isinstance(node, dict):
            return {name: walk(part, name in PLACES) for name, part in node.items()}
        if isinstance(node, list):
            return [walk(part, is_place) for part in node]
        if not isinstance(node, str):
            return node
        if node == data_dir or node.startswith(f"{data_dir}/"):
            return DATA + node[len(data_dir) :]
        if is_place or os.path.isabs(os.path.expanduser(node)):
            return f"{DATA}/{Path(node).name}"
        return node

    kept = {name: part for name, part in config.items() if name not in ("logger", "hydra", "debug")}
    paths = {"data_dir": DATA, "cache_dir": "cache", "output_dir": "runs", "sweep_dir": "runs"}
    return {**walk(kept, is_place=False), "paths": paths}


def located(config: DictConfig, data: Path) -> DictConfig:
    """The part of a published configuration that says where data lies, as it is here."""

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
