"""Divide and conquer the embedding space (Sanakoyeu, Tschernezki, Büchler & Ommer, CVPR 2019)."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.configuration.ranges import Count, Few, Share
from dml.data.datamodule import DataModule
from dml.data.samplers import Clusters
from dml.distributed import from_all_ranks
from dml.errors import UserError
from dml.evaluation.clustering import kmeans, need_faiss
from dml.evaluation.collecting import embed_rows
from dml.figures.course import clusters_over_steps, reclustered
from dml.figures.embeddings import distance_histograms
from dml.figures.galleries import cluster_images
from dml.figures.plot import Plot
from dml.methods.base import Batch, Method, NewHead, NewLoss, Output, share
from dml.methods.clusters import Remembered, blind_grouping, match_clusters, negative_distances, overlaps
from dml.models.backbones.stages import Backbone
from dml.models.heads import Slices

log = logging.getLogger("dml")


@dataclass(frozen=True)
class Schedule:
    """The phases of a training: slices on clusters, the full embedding on clusters, the full embedding on all images.

    Attributes:
        period: steps between two clusterings.
        merged_from: step from which the full embedding is trained.
        whole_from: step from which batches are drawn from all images.
    """

    period: int
    merged_from: int
    whole_from: int


class DCES(Method):
    """K learners, slices of one linear layer, each trained on the images of its own cluster (section 3).

    Every T epochs the training set is embedded and clustered, and clusters are matched to the learners that had most
    of their images. Each iteration draws one cluster, and trains the backbone, the slice of that cluster's learner and
    its loss. All that belongs to the other learners stays unchanged, including the optimizer's moments. At the end the
    slices are one embedding again, trained on all images with its own loss. That loss starts from the learners' losses:
    their proxies are concatenated, and other parameters (beta) averaged. With K = 1 this is the baseline, step for
    step.

    A cluster of a single class has no negatives: it is not drawn, and its images rest until the next clustering. So do
    images whose positives are all in other clusters.

    The released code differs from the paper. These options do what it does: it clusters normalised features
    (`space=features`); trains the full embedding from epoch 80 of 200 on clustered batches and from 190 on all images
    (`full_embedding_from`, `finetune_from`); does not train beta (`loss.loss.learn_beta=false`); decays weights
    (`optimizer.weight_decay=1e-4`); and keeps batch norm in evaluation mode (`backbone.batch_norm=running`).
    It matches by symmetric difference and then applies the inverted permutation. As its K-means always starts from the
    same images, many clusters keep their number and learner all the same. This is not available, nor its choice of the
    3 nearest negatives.

    Args:
        backbone, head, loss, dim: see `dml.methods.base`; the head is built once for the whole width and then cut.
        K: learners, and clusters.
        T: epochs between two clusterings.
        total_steps: steps of the training.
        full_embedding_from: share of the steps after which the full embedding is trained, on clustered batches until
            `finetune_from`.
        finetune_from: share of the steps after which batches are drawn from the whole training set; 1: never.
        grouping: `kmeans`; or from Table 6: `random`, another random partition of the images at each clustering, or
            `labels`, the classes in their order, cut into K runs of about equally many images.
        space: what is clustered: the `embedding`, all learners concatenated (section 3.3), or L2-normalised `features`
            before the linear layer.
        match: `iou` matches clusters to learners (`match_clusters`); `none` assigns them in K-means's numbering.
        split_embedding: false trains the whole embedding on the batches of clusters (Table 6, second row): L = 1.
        assignments_from: `fresh` embeds the training set for each clustering; `running` uses the embedding that
            training last computed of each image (augmented, by an older network), and is fresh only the first time.
        options: see `Method`.

    Raises:
        UserError: an option is out of range, or the learners cannot share the width.
    """

    counted_by = ("K",)
    rows: np.ndarray  # [N], rows of the records, ascending; arrays of length N are in this order
    sampler: Clusters
    data: DataModule

    def __init__(
        self,
        backbone: Backbone,
        head: NewHead,
        loss: NewLoss,
        dim: int,
        *,
        K: Few,
        T: Count,
        total_steps: Count,
        full_embedding_from: Share = 0.9,
        finetune_from: Share = 0.9,
        grouping: Literal["kmeans", "random", "labels"] = "kmeans",
        space: Literal["embedding", "features"] = "embedding",
        match: Literal["iou", "none"] = "iou",
        split_embedding: bool = True,
        assignments_from: Literal["fresh", "running"] = "fresh",
        **options: Any,
    ) -> None:
        width = share(dim, K, "method.K")
        if full_embedding_from > finetune_from:
            raise UserError(
                f"method.full_embedding_from={full_embedding_from} is after method.finetune_from={finetune_from}: both "
                "are shares of the training, so set the first to at most the second."
            )
        if (space, assignments_from) == ("features", "running"):
            raise UserError("method.assignments_from=running remembers embeddings: set method.space=embedding with it.")
        learners = K if split_embedding else 1
        losses = [loss(width) for _ in range(learners)] if learners > 1 else []
        super().__init__(normalize=backbone.normalize, losses=[*losses, loss(dim)], **options)
        self.backbone = backbone
        self.head = head(dim)
        if learners > 1 and self.head.projection.out_features != dim:
            raise UserError(
                "DCES slices the embedding, but this head makes it of one vector per prototype: choose another head."
            )
        self.head.projection = Slices(self.head.projection, learners)  # type: ignore[assignment]
        self.K, self.T, self.total_steps = K, T, total_steps
        self.full_embedding_from, self.finetune_from = full_embedding_from, finetune_from
        self.grouping, self.space, self.match, self.assignments_from = grouping, space, match, assignments_from
        self.active: int | None = None  # the learner trained in the last step, see `on_after_backward`
        self.schedule = Schedule(period=1, merged_from=0, whole_from=0)  # replaced in `attach`
        self.clusters: np.ndarray | None = None  # [N], the learner of each training image
        self.memory: Remembered | None = None  # with assignments_from=running
        self.negatives: tuple[Tensor, Tensor] | None = None  # at the last clustering, see `negative_distances`

    # The network.

    @property
    def slices(self) -> Slices:
        assert isinstance(self.head.projection, Slices)
        return self.head.projection

    def learners(self, images: Tensor) -> Output:
        return Output(self.head(self.backbone(images)).unflatten(1, (len(self.slices), -1)))

    def new_modules(self) -> Iterable[nn.Module]:
        return (self.head,)

    def projections(self) -> Iterable[nn.Linear]:
        return self.slices  # type: ignore[return-value]

    # An iteration.

    def objective(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """Computes the loss of the drawn cluster's learner on its slice, or that of the full embedding (eq. 3)."""
        if self.memory is not None:
            self.memory.update(batch["index"], output.embeddings.flatten(1))
        self.active = self._turn()
        if self.active is None:
            return self.metric(len(self.losses) - 1, output.ensemble(), output, batch)
        return self.metric(self.active, output.learner(self.active), output, batch)

    def _turn(self) -> int | None:
        """Returns the learner whose cluster the batch is from; None: the full embedding is trained."""
        if self.global_step >= self.schedule.merged_from or len(self.slices) == 1:
            return None
        assert self.clusters is not None
        # From the host's copy of the rows; a rank's part of the batch is from the same cluster as the whole.
        return int(self.clusters[np.searchsorted(self.rows, self.data.batch_rows[0])])

    def on_after_backward(self) -> None:
        """Removes the gradients of the other learners: with a gradient of zero, momentum and decay would move them."""
        super().on_after_backward()
        for k, part in enumerate(self.slices):
            if self.active not in (None, k):
                part.zero_grad()
        for k, loss in enumerate(self.losses):
            if k != (len(self.losses) - 1 if self.active is None else self.active):
                loss.zero_grad()

    # Between iterations.

    def attach(self, data: DataModule) -> None:
        super().attach(data)
        if data.train_images < self.K:
            raise UserError(f"method.K={self.K} is more than the {data.train_images} training images.")
        self.data, self.rows = data, data.train_rows
        assert (np.diff(self.rows) > 0).all()  # the order that a table of embeddings has
        self.schedule = Schedule(
            period=self.T * data.sampler.steps_per_epoch,
            merged_from=round(self.full_embedding_from * self.total_steps),
            whole_from=round(self.finetune_from * self.total_steps),
        )
        self.sampler = data.sampler = Clusters(data.sampler, self.schedule.period, self.schedule.whole_from)
        blind = self._blind_grouping(0)
        if blind is None and self.schedule.whole_from:
            need_faiss()
        # Checks now that the sampler's rule can draw inside clusters, and inside those that are known.
        self.sampler.regroup(np.zeros(data.train_images, np.int64) if blind is None else blind)

    def on_step_end(self, step: int) -> dict[str, float]:
        """Clusters every T epochs, and merges the losses when the slices are merged (Algorithm 1)."""
        if getattr(self.trainer, "overfit_batches", 0) and step:
            return {}  # the same batches are repeated, so they have to keep their learners
        if step == self.schedule.merged_from and len(self.losses) > 1:
            self._merge_losses()
        if step % self.schedule.period or step >= self.schedule.whole_from:
            return {}
        return self._regroup(step)

    def _regroup(self, step: int) -> dict[str, float]:
        previous, clusters = self.clusters, self._blind_grouping(step)
        embeddings = None
        if clusters is None:
            embeddings = self._embeddings(step)
            clusters = self._cluster(embeddings, step)
        if previous is not None and self.match == "iou":
            clusters = match_clusters(previous, clusters, self.K)
        try:
            self.sampler.regroup(clusters)
        except UserError:  # no cluster is left
            if previous is None:
                raise
            log.warning(
                "step %d: no cluster holds two images of each of two classes, so the previous clusters are kept: "
                "lower method.K.",
                step,
            )
            clusters = previous
        self.clusters = clusters
        if embeddings is not None:
            self.negatives = negative_distances(embeddings, clusters, self.sampler.labels)
        sizes = np.bincount(clusters, minlength=self.K)
        figures = {f"clusters/{k}/images": float(size) for k, size in enumerate(sizes)}
        figures["clusters/resting"] = 1 - self.sampler.drawn / len(clusters)
        if previous is not None:
            kept = np.diag(overlaps(previous, clusters, self.K))
            figures |= {f"clusters/{k}/iou": float(overlap) for k, overlap in enumerate(kept)}
            figures |= {"clusters/iou": float(kept.mean()), "clusters/moved": float((previous != clusters).mean())}
        return figures

    def _blind_grouping(self, step: int) -> np.ndarray | None:
        """Returns the learner `[N]` of each training image if it does not depend on embeddings, else None."""
        kind = "one" if self.K == 1 else self.grouping
        return blind_grouping(kind, self.K, self.sampler.labels, [self.sampler.seed, step, 2])

    def _embeddings(self, step: int) -> np.ndarray:
        """Returns the vectors to cluster, `[N,D]` float32, the same on every rank."""
        self.finite.check()
        if self.memory is not None:
            return self.memory.embeddings.cpu().numpy()
        of = None if self.space == "embedding" else self._unit_features
        table = embed_rows(self.trainer, self.rows, f"clustering at step {step}", of=of)
        with self.finite.step(step + 1) as seen:
            seen["embeddings"] = table.embeddings.sum()
        self.finite.check()
        embeddings = table.embeddings.flatten(1)
        if self.assignments_from == "running":
            self.memory = Remembered(self.rows, embeddings)
        return embeddings.cpu().numpy()

    def _cluster(self, embeddings: np.ndarray, step: int) -> np.ndarray:
        """Runs K-means on rank 0 and sends the result to all: `[N,D]` -> `[N]`, clusters as K-means numbers them."""
        found = None
        if self.trainer.is_global_zero:
            seed = int(np.random.SeedSequence([self.sampler.seed, step, 3]).generate_state(1)[0] >> 1)
            found = kmeans(embeddings, self.K, seed=seed)
        told = from_all_ranks(found)[0]
        assert told is not None
        return told

    def _unit_features(self, images: Tensor) -> Tensor:
        features = self.backbone(self.normalized(images))
        return F.normalize(features.mean((2, 3)))[:, None]

    @torch.no_grad()
    def _merge_losses(self) -> None:
        """Sets the parameters of the full embedding's loss from those of the learners' losses."""
        *learners, full = self.losses
        for name, parameter in full.named_parameters():
            parts: list[Tensor] = [loss.get_parameter(name) for loss in learners]
            if parts[0].shape == parameter.shape:
                parameter.copy_(torch.stack(parts).mean(0))
                continue
            # Proxies are [C,d], or [d,C] in losses with a softmax; the width of the embedding is the axis that differs.
            axis = next(i for i, (a, b) in enumerate(zip(parts[0].shape, parameter.shape, strict=True)) if a != b)
            parameter.copy_(torch.cat([F.normalize(part, dim=axis) for part in parts], dim=axis))

    def plots(self, images: Tensor, data: DataModule, log: Sequence[Mapping[str, Any]]) -> list[Plot]:
        """Draws the clusters over the training and at its end."""
        if self.clusters is None or self.K == 1:
            return []
        drawn = [
            Plot(
                "clusters",
                f"Number of training images in each learner's cluster{reclustered(log)}",
                clusters_over_steps(log),
            ),
            Plot(
                "cluster_images",
                "Random training images of each learner's last cluster",
                cluster_images(self.clusters, self.K, self.rows, data.records.open_image, data.records.class_of),
            ),
        ]
        if self.negatives is not None:
            drawn.append(
                Plot(
                    "negatives",
                    "Distances of negative pairs of training images at the last clustering, within a cluster and "
                    "between clusters",
                    distance_histograms(*self.negatives),
                )
            )
        return drawn

    # The checkpoint.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        clusters = None if self.clusters is None else torch.as_tensor(self.clusters)
        memory = None if self.memory is None else self.memory.embeddings
        checkpoint["dces"] = {"clusters": clusters, "memory": memory, "negatives": self.negatives}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["dces"]
        self.clusters = None if state["clusters"] is None else state["clusters"].numpy()
        self.memory = None if state["memory"] is None else Remembered(self.rows, state["memory"])
        self.negatives = state["negatives"]
        if self.clusters is not None:
            self.sampler.regroup(self.clusters)
