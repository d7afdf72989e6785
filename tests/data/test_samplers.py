from collections import Counter
from itertools import islice

import numpy as np
import pytest

from dml.data.samplers import MPerClass, Pairs, Sampler, Uniform
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


def test_what_cannot_be_drawn_is_told() -> None:
    with pytest.raises(UserError, match=r"sampler\.batch_size=10 does not divide by sampler\.m=3"):
        MPerClass(LABELS, 10, 0, m=3)
    with pytest.raises(UserError, match=r"needs 8 classes and there are 6: set sampler\.batch_size to at most 24"):
        MPerClass(LABELS, 32, 0, m=4)
    with pytest.raises(UserError, match="batch_size=61 is more than the 60 training images"):
        Uniform(LABELS, 61, 0)
    with pytest.raises(UserError, match=r"sampler\.batch_size=10 does not divide by 4"):
        Pairs(LABELS, 10, 0)
    for labels in (np.zeros(8, int), np.arange(8), LABELS[:5]):
        with pytest.raises(UserError, match=r"pairs for a batch of 12 need two classes, 3 images .* and 6 in all"):
            Pairs(labels, 12, 0)
    sampler = Uniform(LABELS, 12, 0)
    sampler.world_size = 5
    with pytest.raises(UserError, match="batch_size=12 does not divide by the 5 devices"):
        iter(sampler)
