from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import pytest

from dml.data.samplers import Clusters, MPerClass, Pairs, Sampler, Uniform
from dml.errors import UserError

LABELS = np.random.default_rng(0).permutation(np.repeat([3, 5, 8, 9, 11, 40], 10))  # 60 images, 6 classes


def each(seed: int = 0) -> list[Sampler]:
    return [MPerClass(LABELS, 12, seed, m=3), Uniform(LABELS, 12, seed), Pairs(LABELS, 12, seed)]


def take(sampler: Sampler, steps: int) -> list[list[tuple[int, int, int]]]:
    return list(islice(iter(sampler), steps))


def test_m_per_class_composition() -> None:
    sampler = MPerClass(LABELS, batch_size=12, seed=0, m=3)
    assert sampler.steps_per_epoch == 5
    seen = Counter()
    for batch in (batch for epoch in range(40) for batch in sampler.epoch(epoch)):
        assert batch.dtype == np.int64
        assert len(set(batch.tolist())) == 12  # no image twice
        classes = LABELS[batch].reshape(4, 3)
        assert (classes == classes[:, :1]).all()
        assert len(set(classes[:, 0].tolist())) == 4
        seen.update(batch.tolist())
    # 200 batches x 12 over 60 images: 40 expected each
    assert set(seen) == set(range(60))
    assert max(abs(n - 40) for n in seen.values()) < 25


def test_a_small_class_repeats_as_little_as_possible() -> None:
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 1, 2])
    sampler = MPerClass(labels, batch_size=15, seed=0, m=5)
    assert sampler.steps_per_epoch == 1  # fewer images than a batch
    batches = [batch.tolist() for epoch in range(20) for batch in sampler.epoch(epoch)]
    for batch in batches:
        counts = Counter(batch)
        assert sorted(counts[i] for i in (0, 1, 2)) == [1, 2, 2]
        assert [counts[i] for i in range(3, 8)] == [1] * 5
        assert counts[8] == 5
    assert len({tuple(sorted(batch)) for batch in batches}) == 3  # which image comes once varies


def test_uniform_is_a_permutation_without_the_rest() -> None:
    sampler = Uniform(LABELS[:50], batch_size=12, seed=0)
    first, second = (np.concatenate(list(sampler.epoch(e))) for e in (0, 1))
    assert sampler.steps_per_epoch == 4
    assert len(first) == len(set(first.tolist())) == 48
    assert set(first.tolist()) < set(range(50))
    assert first.tolist() != second.tolist()


def test_pairs_are_half_positive_half_negative() -> None:
    labels = np.append(LABELS, 77)  # one image alone in its class
    sampler = Pairs(labels, batch_size=16, seed=0)
    assert sampler.steps_per_epoch == 3
    firsts, positives, negatives = Counter(), Counter(), Counter()
    for batch in (batch for epoch in range(400) for batch in sampler.epoch(epoch)):
        assert batch.shape == (16,)
        first, second = batch[:8], batch[8:]
        assert len(set(first.tolist())) == 8
        assert (first != second).all()
        assert (labels[first[:4]] == labels[second[:4]]).all()
        assert (labels[first[4:]] != labels[second[4:]]).all()
        firsts.update(first.tolist())
        positives.update(second[:4].tolist())
        negatives.update(second[4:].tolist())
    # 1,200 batches: about 1,200 * 8 / 61 = 157 times first and 1,200 * 4 / 60 = 80 times as partner, for each image.
    assert set(firsts) == set(negatives) == set(range(61))
    assert set(positives) == set(range(60))
    assert max(abs(n - 157) for image, n in firsts.items() if image != 60) < 60
    assert max(abs(n - 80) for counts in (positives, negatives) for n in counts.values()) < 40


@pytest.mark.slow
def test_partners_are_uniform() -> None:
    """Over the other images of the class, and over all images of other classes, unequal in size."""
    labels = np.array([5, 2, 2, 9, 9, 9, 9, 2])
    sampler = Pairs(labels, batch_size=8, seed=0)
    seen: dict[str, Counter[tuple[int, int]]] = {"positive": Counter(), "negative": Counter()}
    for epoch in range(6000):
        for batch in sampler.epoch(epoch):
            for i, kind in enumerate(("positive", "positive", "negative", "negative")):
                seen[kind][int(batch[i]), int(batch[i + 4])] += 1
    for kind, same in (("positive", True), ("negative", False)):
        for image in range(8):
            partners = [j for j in range(8) if j != image and (labels[j] == labels[image]) == same]
            counts = np.array([seen[kind][image, j] for j in partners])
            assert sum(n for (i, _), n in seen[kind].items() if i == image) == counts.sum()
            assert all(abs(counts - counts.sum() / max(1, len(counts))) < 6 * np.sqrt(counts + 1))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_epoch_is_a_function_of_seed_and_number(which: int) -> None:
    one, same, other = each(7)[which], each(7)[which], each(8)[which]
    np.random.seed(1)  # noqa: NPY002 (the global generator must not matter)
    last = np.stack(list(one.epoch(3)))
    take(same, 17)
    np.testing.assert_array_equal(np.stack(list(same.epoch(3))), last)
    assert not np.array_equal(np.stack(list(other.epoch(3))), last)
    assert not np.array_equal(np.stack(list(one.epoch(4))), last)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_stream_is_the_epochs_in_turn(which: int) -> None:
    sampler = each()[which]
    batches = [batch for epoch in range(3) for batch in sampler.epoch(epoch)]
    expected = [[(int(p), step, place) for place, p in enumerate(batch)] for step, batch in enumerate(batches)]
    assert take(sampler, 15) == expected


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("start", [0, 3, 5, 12])
def test_a_resumed_stream_goes_on_as_if_never_stopped(which: int, start: int) -> None:
    whole, resumed = each()[which], each()[which]
    resumed.start_step = start
    assert take(resumed, 6) == take(whole, start + 6)[start:]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_two_ranks_share_the_batch_of_one(which: int) -> None:
    whole, first, second = each()[which], each()[which], each()[which]
    for rank, sampler in enumerate((first, second)):
        sampler.rank, sampler.world_size = rank, 2
    halves = zip(take(first, 12), take(second, 12), strict=True)
    assert [a + b for a, b in halves] == take(whole, 12)


@pytest.mark.parametrize("count", [11, 13])
def test_a_sampler_of_ones_own_that_draws_too_few_or_too_many_is_told(count: int) -> None:
    class Mine(Uniform):
        def epoch(self, epoch: int) -> Iterator[np.ndarray]:
            yield np.arange(count)

    with pytest.raises(UserError, match=rf"^Mine draws a batch of {count} images, where sampler\.batch_size=12: "):
        take(Mine(LABELS, 12, 0), 1)


def test_what_cannot_be_drawn_is_told() -> None:
    with pytest.raises(UserError, match=r"sampler\.batch_size=10 is not divisible by sampler\.m=3"):
        MPerClass(LABELS, 10, 0, m=3)
    with pytest.raises(UserError, match=r"needs 8 classes and there are 6: set sampler\.batch_size to at most 24"):
        MPerClass(LABELS, 32, 0, m=4)
    with pytest.raises(UserError, match="batch_size=61 is more than the 60 training images"):
        Uniform(LABELS, 61, 0)
    with pytest.raises(UserError, match=r"sampler\.batch_size=10 is not divisible by 4"):
        Pairs(LABELS, 10, 0)
    for labels in (np.zeros(8, int), np.arange(8), LABELS[:5]):
        with pytest.raises(UserError, match=r"pairs for a batch of 12 need two classes, 3 images .* and 6 in all"):
            Pairs(labels, 12, 0)
    sampler = Uniform(LABELS, 12, 0)
    sampler.world_size = 5
    with pytest.raises(UserError, match="batch_size=12 is not divisible by the 5 devices"):
        iter(sampler)


CLUSTERS = np.where(LABELS < 10, LABELS % 2, 2)  # class 8 | classes 3, 5 and 9 | classes 11 and 40
RULES = [lambda: MPerClass(LABELS, 12, 5, m=3), lambda: Uniform(LABELS, 12, 5)]


def clustered(rule: Sampler, learner: np.ndarray = CLUSTERS, period: int = 10, whole_from: int = 30) -> Clusters:
    sampler = Clusters(rule, period, whole_from)
    sampler.regroup(learner)
    return sampler


def drawn(sampler: Clusters, start: int = 0) -> np.ndarray:
    """What a period, or what is left of it, draws."""
    sampler.start_step = start
    return np.array([[place[0] for place in batch] for batch in islice(iter(sampler), 1000)])


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_is_of_one_cluster_and_clusters_are_drawn_uniformly(rule: Callable[[], Sampler]) -> None:
    sampler = clustered(rule(), period=1000, whole_from=900)
    batches = drawn(sampler)
    assert len(batches) == 900  # ends where all images come
    learners = CLUSTERS[batches]
    assert (learners == learners[:, :1]).all()
    counts = Counter(learners[:, 0].tolist())
    assert set(counts) == {1, 2}  # 0 has a single class: no negatives
    assert abs(counts[1] - 450) < 4 * np.sqrt(225)
    assert set(batches.flatten().tolist()) == set(np.flatnonzero(CLUSTERS > 0).tolist())


@pytest.mark.parametrize("rule", RULES)
def test_from_its_step_on_all_images_come_as_without_clusters(rule: Callable[[], Sampler]) -> None:
    sampler, plain = clustered(rule()), rule()
    sampler.start_step = 30
    assert take(sampler, 12) == take(plain, 42)[30:]


@pytest.mark.parametrize("rule", RULES)
def test_one_cluster_is_the_rule_itself_over_all_periods(rule: Callable[[], Sampler]) -> None:
    sampler, plain = clustered(rule(), np.zeros(60, int)), rule()
    ours = np.concatenate([drawn(sampler, start) for start in (0, 10, 20)])
    np.testing.assert_array_equal(ours, [[place[0] for place in batch] for batch in take(plain, 30)])


@pytest.mark.parametrize("rule", RULES)
def test_a_period_goes_on_from_anywhere_and_ends_with_itself(rule: Callable[[], Sampler]) -> None:
    sampler = clustered(rule())
    whole = drawn(sampler, 10)
    assert len(whole) == 10
    longer = [clustered(rule(), period=40, whole_from=80) for _ in range(2)]
    orders = [CLUSTERS[drawn(one, start)[:, 0]].tolist() for one, start in zip(longer, (0, 40), strict=True)]
    assert orders[0] != orders[1]  # each period draws clusters in an order of its own
    for start in (11, 14, 19):
        np.testing.assert_array_equal(drawn(clustered(rule()), start), whole[start - 10 :])
    assert not np.array_equal(drawn(sampler, 0), whole)
    halves = []
    for rank in range(2):
        part = clustered(rule())
        part.rank, part.world_size = rank, 2
        halves.append(drawn(part, 10))
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), whole)


def test_a_cluster_smaller_than_a_batch() -> None:
    """Of two classes; one has two images: classes come again with further images, images only once all have come."""
    labels = np.array([0] * 7 + [1, 1] + [c for c in range(2, 8) for _ in range(2)])
    learner = np.where(labels < 2, 0, 1)
    for batch in drawn(clustered(MPerClass(labels, 12, 0, m=3), learner, period=40, whole_from=40)):
        counts = Counter(batch.tolist())
        if learner[batch[0]] == 0:
            assert sum(counts[i] for i in range(7)) == 6  # half of the four places of three
            assert max(counts[i] for i in range(7)) == 1
            assert (counts[7], counts[8]) == (3, 3)
        else:  # classes of two images each
            assert sorted(counts.values()) == [1, 1, 1, 1, 2, 2, 2, 2]
    for batch in drawn(clustered(Uniform(labels, 12, 0), learner, period=40, whole_from=40)):
        counts = Counter(batch.tolist())
        assert len(counts) == (9 if learner[batch[0]] == 0 else 12)
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("rule", RULES)
def test_an_image_without_a_positive_in_its_cluster_rests(rule: Callable[[], Sampler]) -> None:
    alone = [np.argmax(c == LABELS) for c in np.unique(LABELS)]  # one of each class
    learner = np.where(np.isin(np.arange(len(LABELS)), alone), 1, 0)
    sampler = clustered(rule(), learner, period=40, whole_from=80)
    assert set(drawn(sampler).flatten().tolist()).isdisjoint(alone)
    sampler.regroup(CLUSTERS)
    assert not set(drawn(sampler, 40).flatten().tolist()).isdisjoint(alone)
    with pytest.raises(UserError, match=r"No cluster holds two images of each of two classes: lower method\.K"):
        clustered(MPerClass(LABELS, 12, 0, m=3), np.arange(len(LABELS)))


def test_empty_clusters_and_those_of_one_class_are_not_drawn() -> None:
    learner = np.where(LABELS == 3, 0, 4)  # 1, 2 and 3 are empty
    assert set(learner[drawn(clustered(MPerClass(LABELS, 12, 0, m=3), learner))].flatten().tolist()) == {4}
    with pytest.raises(UserError, match=r"No cluster holds two images of each of two classes"):
        clustered(MPerClass(LABELS, 12, 0, m=3), LABELS)


def test_a_rule_that_does_not_draw_inside_clusters_is_told() -> None:
    with pytest.raises(UserError, match="Pairs does not draw inside clusters: choose sampler=m_per_class or"):
        clustered(Pairs(LABELS, 12, 0))


@pytest.mark.parametrize("images", [40, 700])
def test_the_second_of_a_pair_is_drawn_among_all_images_but_the_first(images: int) -> None:
    """As if a list of those were made at every step."""
    labels = np.random.default_rng(5).integers(6, size=images)
    sampler = Pairs(labels, batch_size=32, seed=2)
    rng = np.random.default_rng([2, 0])
    for batch in sampler.epoch(0):
        first = rng.choice(sampler.paired, 8, replace=False)
        second = rng.choice(np.setdiff1d(np.arange(images), first), 8, replace=False)
        assert batch[:16].tolist() == [*first, *second]
        sampler._positives(first, rng)
        sampler._negatives(second, rng)


def test_a_class_gives_its_own_images() -> None:
    """A batch by the rule itself, with the positions of every class in a list."""
    labels = np.random.default_rng(6).permutation(np.repeat([-3, 4, 9, 20], [2, 5, 9, 1]))
    members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    rng = np.random.default_rng([1, 0])
    for batch in MPerClass(labels, batch_size=8, seed=1, m=4).epoch(0):
        classes = rng.choice(4, 2, replace=False)
        assert batch.tolist() == np.concatenate([np.resize(rng.permutation(members[c]), 4) for c in classes]).tolist()


def test_another_seed_draws_clusters_in_another_order() -> None:
    """Else trainings that differ in their seed alone would train the same learners at the same steps."""
    learner = np.isin(LABELS, [3, 8, 11]).astype(int)
    orders = []
    for seed in (0, 1):
        sampler = clustered(Uniform(LABELS, 12, seed), learner, period=30)
        orders.append([int(learner[batch[0]]) for batch in drawn(sampler)])
    assert len(orders[0]) == 30
    assert orders[0] != orders[1]


def test_an_image_that_is_alone_in_its_class_is_drawn_as_a_negative() -> None:
    """No clustering can give it a positive, so it does not wait for one."""
    labels = np.array([*LABELS, 99])
    sampler = clustered(Uniform(labels, 12, 0), np.zeros(61, int))
    assert sampler.drawn == 61
    assert 60 in drawn(sampler)
