"""What Lightning asks of a method: steps of training, validation and prediction, and the optimizer."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from dml.evaluation.evaluator import Collector, score
from dml.evaluation.layout import Layout
from dml.evaluation.metrics import evaluate
from dml.losses import Loss
from dml.methods.finite import FiniteTerms
from dml.methods.output import Batch
from dml.models.heads import LearnsLater


class TrainedModule(LightningModule):
    """The plumbing below `Method`, which says what is embedded and minimised.

    `trainer.fit`, `trainer.validate(method, data)` and `trainer.predict(method, data)` work from Python, with a
    `DataModule`; runs of `python -m dml.run` are evaluated by callbacks.

    A step reads nothing back from the device, which then never waits for it: whether its terms are finite is known to
    the device alone until someone checks `finite`, as callbacks do before they log, evaluate or save.
    """

    losses: nn.ModuleList
    make_optimizer: Callable[..., torch.optim.Optimizer]
    lr: float
    head_lr_factor: float
    rests_until: int  # step
    sets_lr = ""  # the option by which the method changes the learning rate while it trains

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, Tensor] = {}  # of the last training step, for whoever logs or shows them
        self.finite = FiniteTerms()  # of this training
        self._collected = [Collector()]  # in a list: it is no part of the network

    def embed(self, images: Tensor) -> Tensor:
        """Images `[B,3,H,W]` in [0,1] -> learners `[B,L,d]`, each row of unit norm."""
        raise NotImplementedError

    def compute_terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms of the objective on this rank's part of a batch."""
        raise NotImplementedError

    def new_modules(self) -> Iterable[nn.Module]:
        """Modules that start from random values, trained with `lr * head_lr_factor`."""
        return ()

    def groups(self) -> Mapping[str, slice]:
        """Learners that are tested together too."""
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
        """Before a trainer without our callbacks saves anything."""
        self.finite.check()

    def on_validation_start(self) -> None:
        self.finite.check()

    def on_validation_epoch_start(self) -> None:
        self._collected = [Collector().to(self.device)]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._collected[0].update(self.embed(batch["image"]), batch["label"], batch["index"])

    def on_validation_epoch_end(self) -> None:
        """Logs Recall@K, P@1, R-Precision and MAP@R of the data's test images, as `test/...`, and the learners'."""
        if self.trainer.sanity_checking:  # it has seen two batches alone
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
        """`[B,L,d]`."""
        return self.embed(batch["image"])

    def on_after_backward(self) -> None:
        """What rests gets no gradient: with one of zero, decay and momentum would move it all the same."""
        if self.global_step < self.rests_until:
            for parameter in self._backbone():
                parameter.grad = None
        for module in self._waiting():
            for parameter in module.resting():
                parameter.grad = None

    def _waiting(self) -> list[LearnsLater]:
        """Parts of the method that leave parameters as they are for the time being."""
        later = (module for module in self.modules() if isinstance(module, LearnsLater))
        return [module for module in later if any(True for _ in module.resting())]

    def _backbone(self) -> list[nn.Parameter]:
        """Parameters of neither a new module nor a loss."""
        others = {id(p) for module in (*self.new_modules(), self.losses) for p in module.parameters()}
        return [p for p in self.parameters() if id(p) not in others]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Parameter groups: backbone, fresh modules, and one for the parameters of each loss, with their own rates."""
        fresh = {id(p): p for module in self.new_modules() for p in module.parameters()}
        groups: list[dict[str, Any]] = [
            {"params": self._backbone(), "lr": self.lr},
            {"params": list(fresh.values()), "lr": self.lr * self.head_lr_factor},
        ]
        for loss in self.losses:
            assert isinstance(loss, Loss)
            # Proxies and beta are no weights: decay would pull them to zero.
            groups.append({"params": list(loss.parameters()), "lr": self.lr * loss.lr_factor, "weight_decay": 0.0})
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        return self.make_optimizer([group for group in groups if group["params"]], **self._fused())

    def _fused(self) -> dict[str, bool]:
        """On a GPU one kernel a step in place of several a tensor, where the optimizer has it and nothing was said."""
        makes = getattr(self.make_optimizer, "func", self.make_optimizer)  # of a partial
        said = getattr(self.make_optimizer, "keywords", {})
        scaled = self._trainer is not None and self._trainer.precision == "16-mixed"  # Lightning cannot clip there
        has = "fused" in inspect.signature(makes).parameters and not {"fused", "foreach"} & said.keys()
        return {"fused": True} if self.device.type == "cuda" and has and not scaled else {}
