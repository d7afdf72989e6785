"""Protocols of re-identification: persons across cameras, and vehicles in a gallery with one image of each."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dml.configuration.ranges import Few, Seed
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.evaluator import Embedded, Retrieval
from dml.evaluation.metrics import Ranking
from dml.evaluation.protocol import Conventional
from dml.evaluation.reidentification import across_cameras, one_image_gallery, rank_across_cameras
from dml.evaluation.splits import Split


class AcrossCameras(Conventional):
    """Market-1501's protocol: CMC and mAP, without gallery images of the query's identity from the query's camera.

    See `dml.evaluation.reidentification.across_cameras`. Options are those of `Conventional`.
    """

    of_test = ("map", "map_toolkit")
    one_gallery = False

    def parted(self, records: Records) -> Split:
        """Splits as `Conventional` does, and adds the cameras.

        Raises:
            UserError: the data set has no cameras, or no gallery apart from its queries.
        """
        if records.cameras is None or records.gallery_rows is None:
            lacks = "cameras" if records.cameras is None else "gallery apart from its queries"
            raise UserError(f"{records.name} has no {lacks}: evaluate it with protocol=conventional.")
        return replace(super().parted(records), cameras=records.cameras)

    def retrieval(self, split: Split, queries: Embedded, gallery: Embedded | None) -> Retrieval:
        assert gallery is not None
        known = self._known(split, queries, gallery)

        def measure(query_points: Tensor, gallery_points: Tensor | None) -> dict[str, float]:
            assert gallery_points is not None
            return across_cameras(query_points, gallery=gallery_points, **known, ks=self.ks, shared=True)

        return measure

    def ranking(self, split: Split, embedded: Embedded) -> Ranking:
        assert split.gallery is not None
        queries, gallery = embedded.take(split.query), embedded.take(split.gallery)
        known = self._known(split, queries, gallery)
        return rank_across_cameras(queries.embeddings.flatten(1), gallery=gallery.embeddings.flatten(1), **known)

    def _known(self, split: Split, queries: Embedded, gallery: Embedded) -> dict[str, Any]:
        assert split.cameras is not None
        cameras = torch.as_tensor(split.cameras, device=queries.rows.device)
        of_gallery = {"gallery_labels": gallery.labels, "gallery_cameras": cameras[gallery.rows]}
        return {"labels": queries.labels, "cameras": cameras[queries.rows]} | of_gallery


class OneImageGallery(Conventional):
    """PKU VehicleID's protocol: one random image of each test class is the gallery, all others are queries.

    See `dml.evaluation.reidentification.one_image_gallery`.

    Args:
        draws: how many random galleries are drawn; metrics are averaged over them.
        seed: of the draws. Every method and every training seed meets the same galleries.
        options: see `Conventional`.

    Raises:
        UserError: as `Conventional`.
    """

    of_test = ("map",)
    one_gallery = False

    def __init__(self, *, draws: Few = 10, seed: Seed = 0, **options: Any) -> None:
        super().__init__(**options)
        self.draws, self.seed = draws, seed

    def parted(self, records: Records) -> Split:
        """Makes all test images queries, also those that the data set has as its gallery: each draw splits them anew.

        Raises:
            UserError: every test image is alone in its class.
        """
        whole = super().parted(records)
        rows = whole.query if whole.gallery is None else np.sort(np.concatenate([whole.query, whole.gallery]))
        if len(np.unique(records.labels[rows])) == len(rows):
            raise UserError(
                f"Every test image of {records.name} is alone in its class, so none is left as a query: give at least "
                "one class two images."
            )
        return replace(whole, query=rows, gallery=None)

    def retrieval(self, split: Split, queries: Embedded, gallery: Embedded | None) -> Retrieval:
        def measure(query_points: Tensor, _: Tensor | None) -> dict[str, float]:
            return one_image_gallery(
                query_points, queries.labels, ks=self.ks, draws=self.draws, seed=self.seed, shared=True
            )

        return measure

    def ranking(self, split: Split, embedded: Embedded) -> None:
        return None
