"""Figures together and apart, and the protocol's split, against direct computation."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from dml.data.paths import Paths
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.evaluator import Embedded, Retrieval, correlation, score, self_cosine
from dml.evaluation.metrics import cluster, evaluate
from dml.evaluation.protocol import Conventional, RandomClassSplit
from dml.evaluation.splits import Split


def table(n: int = 30, learners: int = 3, seed: int = 0) -> Embedded:
    generator = torch.Generator().manual_seed(seed)
    embeddings = F.normalize(torch.randn(n, learners, 4, generator=generator), dim=-1)
    return Embedded(embeddings, torch.arange(n) % 5, torch.arange(n) * 2)


def by_class(given: Embedded, *ks: int) -> Retrieval:
    return lambda queries, _: evaluate(queries, given.labels, ks=ks, clustering=False)


def test_together_is_the_concatenation_and_apart_each_learner() -> None:
    given = table()
    figures = score(given, None, by_class(given, 1, 3), final=False)
    assert figures["test/recall@3"] == evaluate(given.embeddings.flatten(1), given.labels, ks=(3,))["recall@3"]
    alone = [evaluate(given.embeddings[:, i], given.labels, ks=(1,))["map@r"] for i in range(3)]
    assert [figures[f"learners/{i}/map@r"] for i in range(3)] == alone
    assert figures["learners/mean/map@r"] == pytest.approx(np.mean(alone))
    assert figures["learners/std/map@r"] == pytest.approx(np.std(alone))


def test_the_ensemble_distance_is_the_mean_of_the_learners() -> None:
    """ABE eq. 3: ranking by the concatenation is ranking by the mean squared distance."""
    embeddings = table(learners=4).embeddings.double()
    apart = torch.stack([torch.cdist(embeddings[:, i], embeddings[:, i]) ** 2 for i in range(4)]).mean(0)
    together = torch.cdist(embeddings.flatten(1), embeddings.flatten(1)) ** 2 / 4
    torch.testing.assert_close(together, apart)


def test_one_learner_is_the_whole() -> None:
    figures = score(table(learners=1), None, by_class(table(), 1), final=False)
    assert figures["learners/0/recall@1"] == figures["learners/mean/recall@1"] == figures["test/recall@1"]
    assert "learners/self_cosine" not in figures


def test_correlation_is_a_loop() -> None:
    given = table(learners=3).embeddings
    given[:, 1, 2] = 0.5  # without variance
    values = []
    for p, q in ((0, 1), (0, 2), (1, 2)):
        for a in range(4):
            for b in range(4):
                one, other = given[:, p, a].numpy(), given[:, q, b].numpy()
                values.append(abs(np.corrcoef(one, other)[0, 1]) if one.std() and other.std() else 0.0)
    assert correlation(given) == pytest.approx(np.mean(values), rel=1e-5)
    copied = given[:, :1].expand(-1, 2, -1)
    assert correlation(copied[:, :, :1]) == pytest.approx(1)


def test_the_first_learners_together() -> None:
    given = table(learners=3)
    figures = score(given, None, by_class(given, 1, 3), final=True)
    two = evaluate(given.embeddings[:, :2].flatten(1), given.labels, ks=(3,), clustering=False)
    assert figures["first/2/recall@3"] == two["recall@3"]
    assert figures["first/1/map@r"] == figures["learners/0/map@r"]
    assert figures["first/3/map@r"] == figures["test/map@r"]
    assert not any(name.startswith("first/4") for name in figures)
    assert not any(name.startswith("first") for name in score(given, None, by_class(given, 1), final=False))


GROUPS = {"scales/0": slice(0, 2), "scales/1": slice(2, 4)}


def test_groups_of_learners_are_tested_together() -> None:
    given = table(learners=4)
    figures = score(
        given, None, by_class(given, 1, 3), groups={"scales/0": slice(2), "scales/1": slice(2, None)}, final=False
    )
    for i, own in enumerate((slice(0, 2), slice(2, 4))):
        part = given.embeddings[:, own]
        expected = evaluate(part.flatten(1), given.labels, ks=(3,), clustering=False)
        assert figures[f"scales/{i}/recall@3"] == expected["recall@3"]
        assert figures[f"scales/{i}/map@r"] == expected["map@r"]
        cosine = (part[:, 0] * part[:, 1]).sum(-1).mean()
        assert figures[f"scales/{i}/self_cosine"] == pytest.approx(float(cosine), rel=1e-5)
    assert not any(name.startswith("scales") for name in score(given, None, by_class(given, 1), final=False))


def test_slices_of_a_single_learner() -> None:
    given = table(learners=1)
    figures = score(given, None, by_class(given, 1), slices=2, final=True)
    alone = [evaluate(given.embeddings[:, 0, i : i + 2], given.labels, ks=(1,))["recall@1"] for i in (0, 2)]
    assert [figures[f"slices/{i}/recall@1"] for i in range(2)] == alone
    assert figures["slices/mean/recall@1"] == pytest.approx(np.mean(alone))
    assert figures["slices/correlation"] == pytest.approx(correlation(given.embeddings.reshape(30, 2, 2)))
    assert figures["first/2/recall@1"] == figures["test/recall@1"]
    assert figures["learners/0/recall@1"] == figures["test/recall@1"]
    with pytest.raises(UserError, match=r"protocol\.slices=3 does not divide the embedding's width 4"):
        score(given, None, by_class(given, 1), slices=3, final=True)


def test_self_cosine_is_a_loop() -> None:
    embeddings = table(n=4).embeddings
    looped = [float(embeddings[i, p] @ embeddings[i, q]) for i in range(4) for p in range(3) for q in range(p + 1, 3)]
    assert self_cosine(embeddings) == pytest.approx(np.mean(looped), rel=1e-6)


def test_take_finds_rows_in_any_order() -> None:
    part = table().take(np.array([8, 2]))
    assert part.rows.tolist() == [2, 8]
    torch.testing.assert_close(part.embeddings, table().embeddings[[1, 4]])


def records(roles: list[str]) -> Records:
    labels = np.array([0 if role == "train" else 1 for role in roles], dtype=np.int64)
    names = Paths.of(str(i) for i in range(len(roles)))
    return Records("x", names, labels, np.array(roles), ["a", "b"], lambda row: Image.new("RGB", (4, 4)))


def test_conventional_splits_by_role() -> None:
    split = Conventional().split(records(["train", "test", "test", "train"]))
    assert (split.train.tolist(), split.query.tolist(), split.gallery) == ([0, 3], [1, 2], None)
    split = Conventional().split(records(["train", "query", "gallery", "gallery"]))
    assert split.gallery is not None
    assert (split.query.tolist(), split.gallery.tolist()) == ([1], [2, 3])


def test_queries_and_gallery_apart_are_scored_apart() -> None:
    given = table()
    protocol = Conventional(ks=[1], clustering=False)
    split = protocol.split(records(["train", "query", "gallery"]))
    split = type(split)(split.train, given.rows[:10].numpy(), given.rows[10:].numpy())
    figures = protocol.score(given, split, "test", final=True)
    whole = given.embeddings.flatten(1)
    direct = evaluate(
        whole[:10], given.labels[:10], gallery=whole[10:], gallery_labels=given.labels[10:], ks=(1,), clustering=False
    )
    assert figures["test/recall@1"] == direct["recall@1"]
    assert figures["test/queries"] == 10


def test_queries_and_gallery_apart_are_clustered_together() -> None:
    given = table()
    split = Split(given.rows[:0].numpy(), given.rows[:10].numpy(), given.rows[10:].numpy())
    figures = Conventional(ks=[1]).score(given, split, "test", final=True)
    alone = cluster(given.embeddings[:10].flatten(1), given.labels[:10])
    together = cluster(given.embeddings.flatten(1), given.labels)
    assert alone != together
    assert {name: figures[f"test/{name}"] for name in together} == together


def test_distractors_are_no_cluster() -> None:
    """A class of the gallery that no query has is of nobody in particular."""
    given = table(30)
    given.labels[20:] = 9
    split = Split(given.rows[:0].numpy(), given.rows[:10].numpy(), given.rows[10:].numpy())
    figures = Conventional(ks=[1]).score(given, split, "test", final=True)
    expected = cluster(given.embeddings[:20].flatten(1), given.labels[:20])
    assert {name: figures[f"test/{name}"] for name in expected} == expected


def test_intervals_in_epochs() -> None:
    assert Conventional(every=2, unit="epochs").interval(steps_per_epoch=7) == 14
    assert Conventional(every=2).interval(steps_per_epoch=7) == 2


def test_clustering_is_for_the_final_checkpoint() -> None:
    split = Split(np.array([0]), table().rows.numpy(), None)
    assert "test/nmi" in Conventional().score(table(), split, "test", final=True)
    assert "test/nmi" not in Conventional().score(table(), split, "test", final=False)


def many_classes(classes: int) -> Records:
    """Three images a training class, shuffled, and two test classes."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes + 2), 3))
    roles = np.where(labels < classes, "train", "test")
    names = Paths.of(str(i) for i in range(len(labels)))
    return Records(
        "x", names, labels, roles, [str(c) for c in range(classes + 2)], lambda row: Image.new("RGB", (4, 4))
    )


@pytest.mark.parametrize("classes", [10, 11])
def test_random_halves_of_the_training_classes(classes: int) -> None:
    data = many_classes(classes)
    conventional = Conventional().split(data)
    held_out = []
    for number in range(10):
        split = RandomClassSplit(split=number).split(data)
        assert split.validation is not None
        assert split.monitor == "validation"
        ours, theirs = (set(data.labels[rows].tolist()) for rows in (split.train, split.validation))
        assert (len(ours), len(theirs)) == ((classes + 1) // 2, classes // 2)
        assert ours | theirs == set(range(classes))
        assert sorted([*split.train, *split.validation]) == conventional.train.tolist()
        assert split.query.tolist() == conventional.query.tolist()
        again = RandomClassSplit(split=number).split(data)
        assert again.train.tolist() == split.train.tolist()
        held_out.append(frozenset(theirs))
    assert len(set(held_out)) > 5
    assert all(0 < sum(c in one for one in held_out) < 10 for c in range(classes))  # every class on both sides
    other = RandomClassSplit(split=0, seed=1).split(data)
    assert other.train.tolist() != RandomClassSplit(split=0).split(data).train.tolist()


def test_validation_figures_are_those_of_the_concatenation() -> None:
    given = table()
    split = Split(np.array([0]), given.rows.numpy(), None)
    figures = Conventional(ks=[1, 2]).score(given, split, "validation", final=True)
    direct = evaluate(given.embeddings.flatten(1), given.labels, ks=(1, 2), clustering=False)
    assert figures == {f"validation/{name}": value for name, value in direct.items()}


def test_splits_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"protocol\.split=10 is none of the 10 splits: they are 0 to 9"):
        RandomClassSplit(split=10)
    with pytest.raises(UserError, match="x has 1 training class: half of them cannot be held out"):
        RandomClassSplit(split=0).split(many_classes(1))
