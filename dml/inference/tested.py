"""The images that a run was tested and validated on, as its trained weights embed them now."""

from dataclasses import dataclass

import numpy as np
import torch
from omegaconf import OmegaConf
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
from dml.inference.embedding import Trained, in_batches, opened
from dml.runs.reading import reading
from dml.training.rebuild import described


@dataclass(frozen=True)
class Tested:
    """Of a run: the records, and which rows its protocol tests and validates on."""

    records: Records
    split: Split

    @classmethod
    def of(cls, trained: Trained) -> "Tested":
        """Opens the data set that the run was trained on, where it lay then.

        Raises:
            UserError: the data is not there any more, or not as it was; a checkpoint that names what is no data set or
                no protocol.
        """
        path = trained.checkpoint
        config = described(path, "dataset", "protocol", "paths")
        with reading(path, "choose another with --checkpoint, or repeat the run"):
            check_plain({name: OmegaConf.to_container(config[name]) for name in ("dataset", "protocol")})
            protocol: Conventional = instantiate(config.protocol)
        records = readable(open_dataset(config), config.paths.cache_dir)
        return cls(records, protocol.split(records))

    def rows(self, part: EvaluatedPart) -> np.ndarray | None:
        """Of the records: queries and gallery of the test, or the validation images; None where there are none."""
        if part == "validation":
            return self.split.validation
        split = self.split
        return split.query if split.gallery is None else np.union1d(split.query, split.gallery)

    def embed(self, trained: Trained, rows: np.ndarray, batch_size: int) -> Tensor:
        """`[n]` rows -> `[n,D]` float32 of unit norm. Raises UserError for an image that cannot be read."""
        found = []
        batches = opened(trained.transform, in_batches(rows.tolist(), batch_size), self.records.opened)
        with tqdm(total=len(rows), desc="embedding", leave=False, disable=None) as bar:
            for batch in batches:
                images = []
                for row, image in batch:
                    if isinstance(image, str):
                        raise UserError(f"the image {self.records.paths[row]} cannot be read ({image}): repair it.")
                    images.append(image)
                learners = trained.embed(torch.stack(images))
                found.append(learners.flatten(1) / learners.shape[1] ** 0.5)
                bar.update(len(batch))
        return torch.cat(found)
