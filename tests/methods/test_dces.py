"""DCES: matching, who is trained when, what is clustered, and that K = 1 is the baseline."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.callbacks import Callback
from torch.nn import functional as F

from dml.data.samplers import Clusters
from dml.errors import UserError
from dml.evaluation import collecting
from dml.evaluation.clustering import kmeans
from dml.methods.base import Batch, Method, Output
from dml.methods.clusters import Remembered, blind_grouping, match_clusters, negative_distances, overlaps
from dml.methods.dces import DCES
from dml.runs.folder import RunFolder
from dml.runs.log import read_metrics
from dml.training import run as train
from dml.training.rebuild import load_method
from tests.conftest import TINY, objective_of

pytestmark = pytest.mark.usefixtures("one_thread")

# 72 training images of 12 classes, epochs of 4 steps, clusterings every 4.
SMALL = [*TINY, "method=dces", "method.K=2", "method.T=1", "protocol.every=100", "protocol.clustering=false"]
SMALL += ["trainer.max_steps=14", "method.full_embedding_from=0.7", "method.finetune_from=0.85"]  # steps 10 and 12
Configure = Callable[..., DictConfig]
SLOWER = ["scheduler=multistep", "scheduler.unit=step", "scheduler.milestones=[12]", "scheduler.gamma=0.5"]


class Watch(Callback):
    """What each iteration saw and changed."""

    def __init__(self) -> None:
        self.active: list[int | None] = []
        self.rows: list[np.ndarray] = []
        self.clusters: list[np.ndarray] = []
        self.gradients: list[dict[str, float]] = []
        self.changed: list[set[str]] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.before = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.rows.append(batch["index"].numpy())
        self.clusters.append(module.clusters.copy())

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        self.active.append(module.active)
        self.gradients.append(
            {name: 0.0 if p.grad is None else float(p.grad.abs().sum()) for name, p in module.named_parameters()}
        )

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.changed.append({name for name, p in module.named_parameters() if not torch.equal(p, self.before[name])})


def fit(config: DictConfig, *callbacks: Callback) -> tuple[DCES, Path]:
    folder = RunFolder(Path(config.paths.output_dir))
    parts, trainer = train.prepare_run(config, folder)
    trainer.callbacks[:0] = callbacks  # type: ignore[attr-defined]  # before what happens between steps
    folder.open(config, [])
    train.fit(config, folder, parts, trainer)
    assert isinstance(parts.method, DCES)
    return parts.method, folder.path


# Matching.


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_permuted_clusters_stay_with_their_learners(k: int) -> None:
    rng = np.random.default_rng(k)
    for _ in range(50):
        previous = rng.choice(k, 200, p=rng.dirichlet(np.ones(k)))
        current = rng.permutation(k)[previous]
        np.testing.assert_array_equal(match_clusters(previous, current, k), previous)


def test_the_matching_has_the_largest_total_overlap() -> None:
    """Against all permutations and sets."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        previous, current = rng.integers(0, 4, (2, 30))

        def total(clusters: np.ndarray, previous: np.ndarray = previous) -> float:
            overlap = 0.0
            for k in range(4):
                old, new = set(np.flatnonzero(previous == k)), set(np.flatnonzero(clusters == k))
                overlap += len(old & new) / len(old | new) if old | new else 0.0
            return overlap

        best = max(total(np.array(p)[current]) for p in itertools.permutations(range(4)))
        matched = match_clusters(previous, current, 4)
        assert matched.dtype == np.int64
        assert total(matched) == pytest.approx(best)
        # the same partition under other names
        assert {frozenset(np.flatnonzero(matched == k)) for k in range(4)} == {
            frozenset(np.flatnonzero(current == k)) for k in range(4)
        }


def test_overlap_is_over_union_not_in_images() -> None:
    """By intersections the new cluster 1 would stay with learner 1 (0 + 100 images against 50 + 49)."""
    previous = np.repeat([0, 1, 1], [50, 49, 100])
    current = np.repeat([1, 0, 1], [50, 49, 100])
    np.testing.assert_array_equal(match_clusters(previous, current, 2), 1 - current)


def test_overlaps_of_an_image_and_of_none() -> None:
    """Learner 0 has one image and keeps it; learner 1 has none before and after."""
    np.testing.assert_array_equal(overlaps(np.array([0]), np.array([0]), 2), [[1, 0], [0, 0]])


def test_small_integers_do_not_overflow() -> None:
    previous = np.arange(200, dtype=np.uint8) % 32
    np.testing.assert_array_equal(
        match_clusters(previous, np.flip(np.arange(32, dtype=np.uint8))[previous], 32), previous
    )


def test_empty_clusters_are_matched_too() -> None:
    np.testing.assert_array_equal(match_clusters(np.array([0, 0, 2]), np.array([1, 1, 1]), 3), [0, 0, 0])
    np.testing.assert_array_equal(match_clusters(np.array([1, 1, 1]), np.array([0, 0, 2]), 3)[:2], [1, 1])


def test_clusters_that_are_none() -> None:
    with pytest.raises(UserError, match="The clusters are numbered 0 to 3: number them within 0 to 2"):
        match_clusters(np.array([0, 3]), np.array([0, 1]), 3)
    with pytest.raises(UserError, match="with one number per image"):
        match_clusters(np.array([0, 1, 2]), np.array([0, 1]), 3)


# The network.


def test_learners_are_slices_of_one_linear_layer(method_of: Callable[..., Method]) -> None:
    one = method_of("method=baseline", "loss=margin").eval()
    four = method_of("method=dces", "method.K=4").eval()
    layer = one.head.projection
    four.backbone.load_state_dict(one.backbone.state_dict())
    weights = torch.cat([part.weight for part in four.slices])
    assert weights.shape == layer.weight.shape
    for part, weight, bias in zip(four.slices, layer.weight.chunk(4), layer.bias.chunk(4), strict=True):
        part.load_state_dict({"weight": weight, "bias": bias})
    images = torch.rand(3, 3, 32, 32)
    whole = one.learners(one.normalize(images)).raw[:, 0]
    torch.testing.assert_close(four.learners(four.normalize(images)).raw.flatten(1), whole)
    sizes = [
        sum(p.numel() for p in m.parameters()) - sum(p.numel() for p in m.losses.parameters()) for m in (one, four)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_one_learner_is_the_baseline_step_for_step(configure: Configure, tmp_path: Path) -> None:
    places = {name: f"paths.output_dir={tmp_path / name}" for name in ("baseline", "dces")}
    adam = ["optimizer=adam"]
    options = [*TINY, "loss=margin", "protocol.clustering=false", "trainer.max_steps=14"]
    train.run(configure(*options, "method=baseline", *adam, places["baseline"]), [])
    train.run(configure(*options, "method=dces", "method.K=1", "method.T=1", places["dces"]), [])
    one, other = (read_metrics(tmp_path / name / "metrics.jsonl") for name in places)
    other = [{name: value for name, value in record.items() if "clusters" not in name} for record in other]
    assert [record for record in other if len(record) > 1] == one
    states = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for name in places
    ]
    theirs = [value for value in states[0].values() if isinstance(value, torch.Tensor)]
    ours = [value for value in states[1].values() if isinstance(value, torch.Tensor)]
    assert len(ours) == len(theirs)
    assert sorted(float(t.double().sum()) for t in ours) == sorted(float(t.double().sum()) for t in theirs)


# An iteration.


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_an_iteration_trains_the_backbone_one_slice_and_its_loss(configure: Configure, optimizer: str) -> None:
    """Gradients of the other slices are zero, and momentum and decay move nothing of them either."""
    watch = Watch()
    options = [f"optimizer={optimizer}", "optimizer.weight_decay=0.1", *SLOWER]
    method, _ = fit(configure(*SMALL, *options), watch)
    assert set(watch.active[:10]) == {0, 1}
    assert watch.active[10:] == [None] * 4
    for step, active in enumerate(watch.active):
        touched = {name for name, size in watch.gradients[step].items() if size > 0}
        of_slices = {name for name in touched if name.startswith("head.projection")}
        moved = {name for name in watch.changed[step] if name.startswith(("head.projection", "losses"))}
        if active is None:
            assert of_slices == {f"head.projection.{k}.{part}" for k in range(2) for part in ("weight", "bias")}
            assert {name.split(".")[1] for name in moved if name.startswith("losses")} <= {"2"}
        else:
            clusters = watch.clusters[step][np.searchsorted(method.rows, watch.rows[step])]
            assert set(clusters.tolist()) == {active}  # the batch is of this learner's cluster
            assert of_slices == {f"head.projection.{active}.{part}" for part in ("weight", "bias")}
            assert {name.removeprefix("head.projection.").removeprefix("losses.")[0] for name in moved} == {str(active)}
        assert any(name.startswith("backbone") for name in watch.changed[step])
    assert any("losses.0" in name for changed in watch.changed for name in changed)  # beta is trained
    # From finetune_from on images come from all clusters, at a rate of its own.
    assert any(len(set(method.clusters[np.searchsorted(method.rows, rows)].tolist())) == 2 for rows in watch.rows[12:])
    assert watch.rates == [pytest.approx(1e-3)] * 12 + [pytest.approx(5e-4)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["triplet", "proxy_nca sampler=uniform", "multi_similarity", "xbm"])
def test_any_loss_trains_learners_and_the_merged_embedding(configure: Configure, loss: str) -> None:
    watch = Watch()
    options = [f"loss={loss.split()[0]}", *loss.split()[1:], "trainer.max_steps=8"]
    if loss == "xbm":
        options.append("loss.loss.memory_size=32")
    fit(configure(*SMALL, *options), watch)
    moved = {name.split(".")[1] for changed in watch.changed for name in changed if name.startswith("losses")}
    assert moved == ({"0", "1", "2"} if "proxy" in loss else set())


@pytest.mark.slow
def test_merged_losses_start_from_the_learners(method_of: Callable[..., Method]) -> None:
    proxies = method_of("method=dces", "method.K=3", "loss=proxy_nca")
    proxies._merge_losses()
    *learners, full = (loss.loss.proxies for loss in proxies.losses)
    assert full.shape == (5, 24)
    torch.testing.assert_close(full, torch.cat([F.normalize(p) for p in learners], dim=1))
    softmax = ["loss.loss._target_=pytorch_metric_learning.losses.NormalizedSoftmaxLoss", "~loss.loss.softmax_scale"]
    weights = method_of("method=dces", "method.K=3", "loss=proxy_nca", *softmax)  # [d,C]
    weights._merge_losses()
    *learners, full = (loss.loss.W for loss in weights.losses)
    torch.testing.assert_close(full, torch.cat([F.normalize(w, dim=0) for w in learners]))
    betas = method_of("method=dces", "method.K=3")
    with torch.no_grad():
        for k, loss in enumerate(betas.losses):
            loss.loss.beta.fill_(1.0 + k)
    betas._merge_losses()
    torch.testing.assert_close(betas.losses[3].loss.beta, torch.full((5,), 2.0))


@pytest.mark.slow
def test_losses_are_merged_when_the_slices_are(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    merged, merge = [], DCES._merge_losses

    def noted(self: DCES) -> None:
        merged.append(self.global_step)
        merge(self)

    monkeypatch.setattr(DCES, "_merge_losses", noted)
    fit(configure(*SMALL))
    assert merged == [10]


@pytest.mark.slow
def test_the_full_embedding_is_trained_at_unit_norm(method_of: Callable[..., Method]) -> None:
    method = method_of("method=dces", "method.K=4", "loss=abe_contrastive")
    embeddings = F.normalize(torch.randn(6, 4, 6), dim=-1)
    labels = torch.arange(6) // 2
    value = objective_of(method, embeddings, labels)["metric"]
    torch.testing.assert_close(value, method.losses[4](F.normalize(embeddings.flatten(1)), labels))


# Clustering.


@pytest.mark.slow
def test_clusters_are_those_of_the_embedding(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """What K-means is given is the concatenated embedding of the training images, without augmentation."""
    given: list[np.ndarray] = []

    def record(points: np.ndarray, k: int, *, seed: int) -> np.ndarray:
        given.append(points)
        return kmeans(points, k, seed=seed)

    monkeypatch.setattr("dml.methods.dces.kmeans", record)
    config = configure(*SMALL, "trainer.max_steps=4", "method.finetune_from=1", "method.full_embedding_from=1")
    parts, trainer = train.prepare_run(config, folder := RunFolder(Path(config.paths.output_dir)))
    parts.method.eval()
    images = parts.data.test_images(parts.split.train)
    with torch.inference_mode():
        expected = parts.method.embed(images).flatten(1)
    parts.method.train()
    folder.open(config, [])
    train.fit(config, folder, parts, trainer)
    assert len(given) == 1  # before step 0; nothing at the end
    torch.testing.assert_close(torch.as_tensor(given[0]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_released_space_is_that_of_normalised_features(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[np.ndarray] = []
    monkeypatch.setattr("dml.methods.dces.kmeans", lambda points, k, seed: given.append(points) or np.arange(72) % k)
    config = configure(*SMALL, "trainer.max_steps=2", "method.space=features", "method.match=none")
    fit(config)
    parts, _ = train.prepare_run(config, RunFolder(Path("unused")))
    images = parts.data.test_images(parts.split.train)
    start = parts.method.eval()
    with torch.inference_mode():
        features = start.backbone(start.normalize(images)).mean((2, 3))
    torch.testing.assert_close(torch.as_tensor(given[0]), F.normalize(features), rtol=1e-4, atol=1e-5)
    assert features.shape[1] != config.head.dim


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_running_assignments_take_what_training_saw_last(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """K-means is given the embeddings that training made, of the pass before step 0 where it has not seen an image."""
    passes: list[str] = []
    last: dict[int, np.ndarray] = {}
    embed_rows, objective = collecting.embed_rows, DCES.objective

    def count(*arguments: Any, **options: Any) -> Any:
        passes.append(arguments[2])
        return embed_rows(*arguments, **options)

    def spy(self: DCES, output: Output, batch: Batch) -> dict[str, torch.Tensor]:
        places = np.searchsorted(self.rows, batch["index"].numpy())
        for at, embedding in zip(places, output.embeddings.detach().flatten(1).float().numpy(), strict=True):
            last[int(at)] = embedding.copy()
        return objective(self, output, batch)

    def record(points: np.ndarray, k: int, *, seed: int) -> np.ndarray:
        for at, embedding in last.items():
            np.testing.assert_array_equal(points[at], embedding)
        seen.append(len(last))
        return kmeans(points, k, seed=seed)

    seen: list[int] = []
    monkeypatch.setattr("dml.methods.dces.embed_rows", count)
    monkeypatch.setattr("dml.methods.dces.kmeans", record)
    monkeypatch.setattr(DCES, "objective", spy)
    fit(configure(*SMALL, "method.assignments_from=running", f"trainer.precision={precision}"))
    assert passes == ["clustering at step 0"]
    assert len(seen) == 3
    assert 0 == seen[0] < 30 < seen[1] <= seen[2] < 72


@pytest.mark.slow
def test_clusters_last_for_t_epochs(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    plain = DCES._regroup
    monkeypatch.setattr(DCES, "_regroup", lambda self, step: [steps.append(step), plain(self, step)][1])
    fit(configure(*SMALL, "method.T=2"))  # epochs of 4 steps, all images from step 12 on
    assert steps == [0, 8]


@pytest.mark.slow
def test_unmatched_clusters_go_to_learners_as_they_come(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """K-means numbers the same clusters differently each time."""
    halves = np.arange(72) // 36
    for match, kept in (("none", False), ("iou", True)):
        coming = iter([halves, 1 - halves, halves])
        monkeypatch.setattr("dml.methods.dces.kmeans", lambda points, k, seed, coming=coming: next(coming))
        watch = Watch()
        place = f"paths.output_dir={Path(configure().paths.output_dir) / match}"
        fit(configure(*SMALL, f"method.match={match}", place), watch)
        assert np.array_equal(watch.clusters[4], halves) == kept


@pytest.mark.slow
def test_where_kmeans_finds_the_classes_the_clusters_before_stay(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    halves, classes = np.arange(72) // 36, np.arange(72) // 6
    coming = iter([halves, classes, halves])
    monkeypatch.setattr("dml.methods.dces.kmeans", lambda points, k, seed: next(coming))
    watch = Watch()
    fit(configure(*SMALL, "method.K=12", "head.dim=12"), watch)
    assert all(np.array_equal(clusters, halves) for clusters in watch.clusters)
    assert "no cluster holds two images of each of two classes" in caplog.text


def test_negative_distances_are_a_loop() -> None:
    rng = np.random.default_rng(0)
    points, clusters, labels = rng.normal(size=(12, 5)), rng.integers(0, 2, 12), np.arange(12) // 3
    within, between = negative_distances(points, clusters, labels, pairs=4000)
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    for found, inside in ((within, True), (between, False)):
        expected = {
            round(float(np.linalg.norm(unit[i] - unit[j])), 6)
            for i, j in itertools.combinations(range(12), 2)
            if labels[i] != labels[j] and (clusters[i] == clusters[j]) == inside
        }
        assert {round(distance, 6) for distance in found.tolist()} == expected


def grouping(config: DictConfig) -> list[int]:
    """The learner of each training image at the start."""
    method = train.prepare_run(config, RunFolder(Path("unused")))[0].method
    assert isinstance(method, DCES)
    found = method._blind_grouping(0)
    assert found is not None
    return found.tolist()


def test_a_class_belongs_to_the_run_that_its_middle_image_lies_in() -> None:
    """Classes of unequal sizes, an image at a time."""
    sizes = [4, 6, 2, 1, 1, 9, 1]  # of 24 images in 3 runs of 8
    labels = np.array([c for c, size in enumerate(sizes) for _ in range(size)])
    expected = []
    for c, size in enumerate(sizes):
        middle = sum(sizes[:c]) + size / 2
        expected += [next(run for run in range(3) if middle < 8 * (run + 1))] * size
    shuffled = np.random.default_rng(0).permutation(len(labels))
    found = blind_grouping("labels", 3, labels[shuffled], [0])
    assert found.tolist() == np.array(expected)[shuffled].tolist()
    assert expected != [next(run for run in range(3) if sum(sizes[:c]) < 8 * (run + 1)) for c in labels]


def test_an_image_that_occurs_twice_is_remembered_as_it_was_last() -> None:
    memory = Remembered(np.array([2, 5, 9]), torch.zeros(3, 2))
    memory.update(torch.tensor([9, 5, 9, 5, 9]), torch.arange(10.0).view(5, 2))
    assert memory.embeddings.tolist() == [[0, 0], [6, 7], [8, 9]]


def test_every_clustering_of_every_seed_draws_its_own_first_centres(
    method_of: Callable[..., Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, seeds = method_of("method=dces"), []
    monkeypatch.setattr("dml.methods.dces.kmeans", lambda points, k, seed: seeds.append(seed) or np.arange(4) % k)
    monkeypatch.setattr(DCES, "trainer", SimpleNamespace(is_global_zero=True))
    for seed, step in ((0, 0), (0, 4), (1, 0), (0, 0)):
        method.sampler = SimpleNamespace(seed=seed)
        method._cluster(np.zeros((4, 2), np.float32), step)
    assert seeds[0] == seeds[3]
    assert len(set(seeds)) == 3


@pytest.mark.slow
def test_groupings_of_table_6(configure: Configure) -> None:
    by_label = grouping(configure(*SMALL, "method.K=4", "head.dim=16", "method.grouping=labels"))
    assert by_label == np.repeat(np.arange(4), 18).tolist()  # 12 classes of 6, in order
    one, again, other = (grouping(configure(*SMALL, "method.grouping=random", f"seed={s}")) for s in (1, 1, 2))
    assert np.bincount(one).tolist() == [36, 36]
    assert one == again
    assert one != other


@pytest.mark.slow
def test_random_partitions_replace_clusterings(configure: Configure) -> None:
    """Table 6 has them in place of K-means, so every T epochs brings another one, and no image rests for good."""
    watch = Watch()
    method, folder = fit(configure(*SMALL, "method.grouping=random", "sampler.m=2"), watch)
    seen = {step: watch.clusters[step].tolist() for step in range(12)}
    assert [step for step in range(1, 12) if seen[step] != seen[step - 1]] == [4, 8]
    for clusters in seen.values():
        assert np.bincount(clusters).tolist() == [36, 36]
    logged = [record for record in read_metrics(folder / "metrics.jsonl") if "clusters/resting" in record]
    labels = method.sampler.labels
    for record in logged:
        clusters = np.array(seen[record["step"]])
        alone = [i for i in range(72) if ((labels == labels[i]) & (clusters == clusters[i])).sum() == 1]
        assert record["clusters/resting"] == pytest.approx(len(alone) / 72)
    assert any(record["clusters/resting"] > 0 for record in logged)


@pytest.mark.slow
def test_without_splitting_the_whole_embedding_learns_from_clusters(configure: Configure) -> None:
    watch = Watch()
    method, folder = fit(configure(*SMALL, "method.split_embedding=false"), watch)
    assert watch.active == [None] * 14
    assert method.embed(torch.rand(2, 3, 32, 32)).shape == (2, 1, 16)
    for step in range(12):
        clusters = watch.clusters[step][np.searchsorted(method.rows, watch.rows[step])]
        assert len(set(clusters.tolist())) == 1
    assert load_method(str(folder / "checkpoints" / "last.ckpt")).embed(torch.rand(1, 3, 32, 32)).shape == (1, 1, 16)


@pytest.mark.slow
def test_what_is_logged_and_drawn(configure: Configure) -> None:
    method, folder = fit(configure(*SMALL, "report=true"))
    grouped = [record for record in read_metrics(folder / "metrics.jsonl") if "clusters/0/images" in record]
    assert [record["step"] for record in grouped] == [0, 4, 8]
    for record in grouped:
        assert record["clusters/0/images"] + record["clusters/1/images"] == 72
    assert "clusters/iou" not in grouped[0]
    last = grouped[2]
    assert last["clusters/iou"] == pytest.approx((last["clusters/0/iou"] + last["clusters/1/iou"]) / 2)
    assert last["clusters/0/images"] == (method.clusters == 0).sum()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert 0 < metrics["run/seconds_between_steps"] < metrics["run/seconds"]
    assert {f"first/{m}/recall@1" for m in (1, 2)} | {"learners/correlation"} <= metrics.keys()
    drawn = {path.stem for path in (folder / "figures").glob("*.png")}
    assert {"clusters", "cluster_images", "negatives", "first", "easiest", "learners"} <= drawn
    page = (folder / "report.html").read_text()
    assert all(f'alt="{caption}' in page for caption in ("Number of training", "Distances of negative", "Queries"))


# Going on, and mistakes.


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["method.assignments_from=running"],
        pytest.param(["loss=proxy_nca", "sampler=uniform"], marks=pytest.mark.exhaustive),
    ],
)
def test_stopped_inside_a_period_and_resumed_equals_undisturbed(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """Stopped at steps of each phase; at 5 and 9 the last checkpoint is inside a period, at 8 on its border."""
    options = [*SMALL, *options, "trainer.checkpoint_every=1", *SLOWER]
    whole = configure(*options, f"paths.output_dir={tmp_path / 'whole'}")
    # Loading ahead in other processes changes nothing.
    broken = configure(*options, f"paths.output_dir={tmp_path / 'broken'}", "trainer.num_workers=2")
    train.run(whole, [])
    step = DCES.training_step
    stops = [5, 8, 9, 11, 13]

    def stopping(self: DCES, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if stops and self.global_step == stops[0]:
            stops.pop(0)
            raise RuntimeError("power cut")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(DCES, "training_step", stopping)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="power cut"):
            train.run(broken, [])
    train.run(broken, [])
    one, other = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "broken"))
    assert one == other
    one, other = (
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True) for name in ("whole", "broken")
    )
    for name, value in one["state_dict"].items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, other["state_dict"][name]), name
    for name, value in one["dces"].items():
        assert (value is None) == (name == "memory" and "running" not in " ".join(options))
        torch.testing.assert_close(value, other["dces"][name], rtol=0, atol=0)


@pytest.mark.slow
def test_mistakes_are_told(configure: Configure, method_of: Callable[..., Method]) -> None:
    for options, sentence in (
        (["method.K=5"], r"head\.dim=24 is the width of all 5 learners"),
        (["method.T=0"], r"method\.T=0 has to be at least 1"),
        (["method.T=1.5"], r"method\.T=1\.5 has to be a whole number"),
        (["method.grouping=kmean"], r"method\.grouping=kmean has to be 'kmeans', 'random' or 'labels'"),
        (["method.space=pixels"], r"method\.space=pixels has to be 'embedding' or 'features'"),
        (["method.match=dice"], r"method\.match=dice has to be 'iou' or 'none'"),
        (["method.finetune_from=1.5"], r"finetune_from=1\.5 has to be at most 1"),
        (["method.finetune_from=0.5"], r"full_embedding_from=0\.9 is after method\.finetune_from=0\.5"),
        (["method.assignments_from=running", "method.space=features"], r"running remembers embeddings"),
        (["method.split_embedding=no"], r"method\.split_embedding=no has to be true or false"),
    ):
        with pytest.raises(UserError, match=sentence):
            method_of("method=dces", *options)
    with pytest.raises(UserError, match=r"method\.K=80 is more than the 72 training images"):
        train.prepare_run(configure(*SMALL, "method.K=80", "head.dim=80"), RunFolder(Path("unused")))
    with pytest.raises(UserError, match="No cluster holds two images"):  # before anything is written
        train.prepare_run(
            configure(*SMALL, "method.K=12", "head.dim=12", "method.grouping=labels"), RunFolder(Path("unused"))
        )
    with pytest.raises(UserError, match=r"trainer\.accumulate_grad_batches cannot be used"):
        train.prepare_run(configure(*SMALL, "+trainer.accumulate_grad_batches=2"), RunFolder(Path("unused")))
    with pytest.raises(UserError, match=r"protocol\.slices=3 does not divide head\.dim=16"):
        train.prepare_run(configure(*SMALL, "protocol.slices=3"), RunFolder(Path("unused")))
    with pytest.raises(UserError, match="Pairs does not draw inside clusters"):
        train.prepare_run(configure(*SMALL, "sampler=abe_pairs", "sampler.batch_size=16"), RunFolder(Path("unused")))


@pytest.mark.slow
def test_missing_faiss_names_the_extra(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(UserError, match=r"faiss, which is not installed: pip install '\.\[cpu\]' or '\.\[gpu\]'"):
        train.prepare_run(configure(*SMALL), RunFolder(Path("unused")))
    for options in (["method.grouping=random"], ["method.K=1"]):  # need none
        train.prepare_run(configure(*SMALL, *options), RunFolder(Path("unused")))


@pytest.mark.slow
def test_fine_tuning_alone(configure: Configure) -> None:
    """Both shares 0: the slices are trained together from the start, on all images, and nothing is clustered."""
    method, folder = fit(configure(*SMALL, "method.full_embedding_from=0", "method.finetune_from=0", "report=true"))
    assert method.clusters is None
    assert isinstance(method.sampler, Clusters)
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_overfitting_sees_the_same_batches_of_the_same_learners(configure: Configure) -> None:
    """Six batches, a period of four, and 14 steps."""
    watch = Watch()
    fit(configure(*SMALL, "trainer.overfit_batches=6", "method.finetune_from=1", "method.full_embedding_from=1"), watch)
    for step in range(6, 14):
        np.testing.assert_array_equal(watch.rows[step], watch.rows[step - 6])
        assert watch.active[step] == watch.active[step - 6]
