"""The Lightning side of a method: steps of training, validation and prediction."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, Trainer
from torch import Tensor

from dml.data.samplers import Sampler
from dml.evaluation.collecting import Collector
from dml.evaluation.evaluator import score
from dml.evaluation.layout import Layout
from dml.evaluation.metrics import evaluate
from dml.methods.finite import FiniteTerms
from dml.methods.optimized import Optimized
from dml.methods.output import Batch


class TrainedModule(Optimized):
    """The Lightning steps below `Method`, which defines what is embedded and minimised.

    `trainer.fit` (with `max_steps`), `trainer.validate(method, data)` and `trainer.predict(method, data)` work from
    Python, with a `DataModule`; runs of `python -m dml.run` are evaluated by callbacks.

    A step reads nothing back from the device, so the device never has to wait. Whether its terms are finite is known
    only when `finite` is checked, as callbacks do before they log, evaluate or save.
    """

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, Tensor] = {}  # of the last training step, to be logged or shown
        self.finite = FiniteTerms()  # of this training
        self._collected = [Collector()]  # in a list, so that it is not registered as a part of the network

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies networks and losses, but shares the trainer and the data that a method may hold."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        shared = (Trainer, LightningDataModule, Sampler)
        memo |= {id(value): value for value in vars(self).values() if isinstance(value, shared)}
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def embed(self, images: Tensor) -> Tensor:
        """Embeds images `[B,3,H,W]` in [0,1]: learners `[B,L,d]`, each row of unit norm."""
        raise NotImplementedError(f"{type(self).__name__} has to define embed()")

    def compute_terms(self, batch: Batch) -> dict[str, Tensor]:
        """Computes the terms of the objective; each rank is given its part of the batch."""
        raise NotImplementedError(f"{type(self).__name__} has to define compute_terms()")

    def groups(self) -> Mapping[str, slice]:
        """Returns name -> learners that are also evaluated together."""
        return {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        terms = self.compute_terms(batch)
        total = torch.stack(list(terms.values())).sum()
        self.terms = {f"train/{name}": value.detach() for name, value in {**terms, "loss": total}.items()}
        return total

    def on_train_start(self) -> None:
        self.finite = FiniteTerms()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.finite.step(self.global_step + 1):  # trainer.detect_anomaly fails on NaN
            super().backward(loss, *args, **kwargs)

    def on_train_epoch_end(self) -> None:
        """Checks the terms before a trainer without our callbacks saves anything."""
        self.finite.check()

    def on_validation_start(self) -> None:
        self.finite.check()

    def on_validation_epoch_start(self) -> None:
        self._collected = [Collector().to(self.device)]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._collected[0].update(self.embed(batch["image"]), batch["label"], batch["index"])

    def on_validation_epoch_end(self) -> None:
        """Logs Recall@K, P@1, R-Precision and MAP@R of the test images as `test/...`, of each learner too."""
        if self.trainer.sanity_checking:  # it has seen two batches only
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        embedded = self._collected[0].embedded()
        queries = embedded.take(data.query_rows)
        gallery = None if data.gallery_rows is None else embedded.take(data.gallery_rows)
        layout = Layout.of(queries.labels, None if gallery is None else gallery.labels)

        def retrieval(of_queries: Tensor, of_gallery: Tensor | None) -> dict[str, float]:
            return evaluate(of_queries, layout, gallery=of_gallery, shared=True, clustering=False)

        metrics = score(queries, gallery, retrieval, groups=self.groups(), final=False)
        self.log_dict(metrics, rank_zero_only=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Embeds the images of a batch: `[B,L,d]`."""
        return self.embed(batch["image"])
