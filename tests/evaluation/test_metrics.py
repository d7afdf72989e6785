"""Every figure against a Python loop written from its definition, and against pytorch-metric-learning."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from dml.errors import UserError
from dml.evaluation.layout import Layout
from dml.evaluation.metrics import Ranking, evaluate, rank
from dml.evaluation.scores import CHUNK, LANES, TILE, Space, Strip, each_strip


def by_definition(queries, labels, gallery=None, gallery_labels=None) -> Ranking:
    """Ranks by squared distances in float64; of equal ones the negatives first."""
    items, item_labels = (queries, labels) if gallery is None else (gallery, gallery_labels)
    figures = []
    for i, (query, label) in enumerate(zip(queries, labels, strict=True)):
        near = []
        for j, (item, item_label) in enumerate(zip(items, item_labels, strict=True)):
            if gallery is None and i == j:
                continue
            distance = sum((float(a) - float(b)) ** 2 for a, b in zip(query, item, strict=True))
            near.append((distance, bool(item_label == label)))
        positive = [is_positive for _, is_positive in sorted(near)]
        count = sum(positive)
        if count == 0:
            figures.append((0, 0.0, 0.0, 0))
            continue
        precisions = [sum(positive[: r + 1]) / (r + 1) * positive[r] for r in range(count)]
        figures.append(
            (positive.index(True) + 1, sum(positive[:count]) / count, sum(precisions) / count, count),
        )
    best, r_precision, average_precision, count = zip(*figures, strict=True)
    best = np.array(best)
    values = {
        "precision@1": (best == 1) * 1.0,
        "r_precision": np.array(r_precision),
        "map@r": np.array(average_precision),
    }
    return Ranking(best, values, np.array(count))


def assert_same(actual: Ranking, expected: Ranking) -> None:
    np.testing.assert_array_equal(actual.best_rank, expected.best_rank)
    np.testing.assert_array_equal(actual.positives, expected.positives)
    np.testing.assert_array_equal(actual.values["r_precision"], expected.values["r_precision"])
    np.testing.assert_allclose(actual.values["map@r"], expected.values["map@r"], rtol=0, atol=1e-14)


def assert_identical(one: Ranking, other: Ranking) -> None:
    for name in ("best_rank", "positives"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.values.keys() == other.values.keys()
    for name in one.values:
        np.testing.assert_array_equal(one.values[name], other.values[name], err_msg=name)


def points(n: int, d: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d))


def small_integers(n: int, d: int, seed: int) -> np.ndarray:
    """Many distances that are equal between different vectors; of powers of two of them even the mean is exact."""
    return np.random.default_rng(seed).integers(-2, 3, (n, d)).astype(np.float32)


@pytest.mark.parametrize("classes", [1, 2, 5, 40, 100])
@pytest.mark.parametrize("make", [points, small_integers])
def test_self_retrieval_is_that_of_the_definition(make, classes):
    embeddings = make(128, 3, seed=classes)
    labels = np.random.default_rng(classes).integers(0, classes, 128)
    assert_same(rank(embeddings, labels), by_definition(embeddings, labels))


@pytest.mark.parametrize("classes", [1, 2, 5, 40, 100])
@pytest.mark.parametrize("make", [points, small_integers])
def test_separate_gallery_is_that_of_the_definition(make, classes):
    queries, gallery = make(50, 3, seed=classes), make(64, 3, seed=classes + 1)
    draw = np.random.default_rng(classes)
    labels, gallery_labels = draw.integers(0, classes, 50), draw.integers(0, classes, 64)
    expected = by_definition(queries, labels, gallery, gallery_labels)
    assert_same(rank(queries, labels, gallery=gallery, gallery_labels=gallery_labels), expected)


@pytest.mark.parametrize("n", [LANES - 1, LANES, LANES + 1, TILE + 1, 5 * LANES + 3])
def test_sizes_around_lanes_and_tiles(n):
    """Above 5 lanes' lengths with small classes, the search through lane maxima is the one at work."""
    embeddings, labels = points(n, 2, seed=n), np.arange(n) // 3
    assert_same(rank(embeddings, labels), by_definition(embeddings, labels))


def test_classes_of_very_different_sizes():
    labels = np.repeat([5, -1, 7, 0, 9], [90, 1, 2, 30, 5])
    labels = np.random.default_rng(0).permutation(labels)
    embeddings = points(128, 2, seed=1)
    assert_same(rank(embeddings, labels), by_definition(embeddings, labels))


def test_a_copy_of_the_query_in_a_separate_gallery_is_a_hit():
    embeddings, labels = points(10, 4, seed=0), np.arange(10)
    ranking = rank(embeddings, labels, gallery=embeddings, gallery_labels=labels)
    np.testing.assert_array_equal(ranking.best_rank, np.ones(10))


def test_the_query_is_excluded_by_index_and_not_as_the_nearest():
    """0 and 1 are one point of two classes, and 0's class mate is far: dropping the nearest item may drop item 1."""
    ranking = rank(np.array([[0.0], [0.0], [8.0], [9.0]]), np.array([0, 1, 0, 1]))
    np.testing.assert_array_equal(ranking.best_rank, [2, 3, 3, 3])


@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize(("n", "d"), [(64, 3), (301, 17), (777, 128), (300, 512)])
def test_collapsed_embedding_scores_nothing(n, d, scale):
    embeddings = np.broadcast_to(points(1, d, seed=0).astype(np.float32) * scale, (n, d))
    figures = evaluate(embeddings, np.arange(n) // 4, clustering=False)
    assert figures["recall@8"] == figures["r_precision"] == figures["map@r"] == 0


@pytest.mark.parametrize("d", [2, 31, 128, 512])
def test_exact_duplicates_tie_wherever_they_are_stored(d):
    """Each vector twice in each of two classes: one positive as near as two negatives, which go first."""
    vectors = points(150, d, seed=d).astype(np.float32)
    labels = np.stack([2 * np.arange(150), 2 * np.arange(150) + 1] * 2)
    embeddings, labels = np.concatenate([vectors] * 4), labels.ravel()
    shuffle = np.random.default_rng(0).permutation(600)
    ranking = rank(embeddings[shuffle], labels[shuffle])
    np.testing.assert_array_equal(ranking.best_rank, np.full(600, 3))


def test_tied_positives_follow_one_another():
    """A query at 0; at distance 1 two positives and one negative: ranks 2 and 3 after it; R = 3, the third has 4."""
    gallery, classes = np.array([[1.0], [-1.0], [1.0], [5.0], [-6.0]]), np.array([1, 1, 0, 1, 0])
    ranking = rank(np.zeros((1, 1)), np.array([1]), gallery=gallery, gallery_labels=classes)
    assert ranking.best_rank == 2
    np.testing.assert_allclose(ranking.values["r_precision"], 2 / 3)
    np.testing.assert_allclose(ranking.values["map@r"], (1 / 2 + 2 / 3) / 3)


@pytest.mark.parametrize("far", [-6.0, -7.0, -9.0, -14.0, 1e7])
def test_what_is_equally_near_ties_whatever_else_is_in_the_gallery(far: float) -> None:
    """Moving all points by a mean that is no whole number would make unequal scores of equal distances."""
    gallery, classes = np.array([[1.0], [-1.0], [1.0], [5.0], [far]]), np.array([1, 1, 0, 1, 0])
    ranking = rank(np.zeros((1, 1)), np.array([1]), gallery=gallery, gallery_labels=classes)
    assert ranking.best_rank == 2
    np.testing.assert_allclose(ranking.values["map@r"], (1 / 2 + 2 / 3) / 3)


@pytest.mark.parametrize("values", [(-1, 1), (0, 1), (-3, -2, 5)])
def test_codes_of_whole_numbers_tie_exactly(values: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 6)
    codes = rng.choice(values, (20, 12))[labels]
    codes = np.where(rng.random(codes.shape) < 0.25, rng.choice(values, codes.shape), codes)
    distances = ((codes[:, None] - codes) ** 2).sum(2)
    same = (labels[:, None] == labels) & ~np.eye(len(labels), dtype=bool)
    best = np.where(same, distances, distances.max() + 1).min(1)
    nearer = (distances <= best[:, None]) & (labels[:, None] != labels)
    assert ((distances == best[:, None]) & (labels[:, None] != labels)).any()
    assert rank(codes.astype(np.float32), labels).best_rank.tolist() == (nearer.sum(1) + 1).tolist()


def test_an_outlier_takes_no_digits_from_the_others() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(200) // 10
    embeddings = (rng.normal(size=(20, 16))[labels] + rng.normal(size=(200, 16))).astype(np.float32)
    embeddings[0] = 1e7
    distances = ((embeddings[:, None].astype(float) - embeddings) ** 2).sum(2)
    np.fill_diagonal(distances, np.inf)
    nearest = labels[distances.argmin(1)] == labels
    assert ((rank(embeddings, labels).best_rank == 1) == nearest)[1:].all()


def test_queries_without_positive_are_counted_and_left_out():
    embeddings = np.array([[0.0], [1.0], [5.0], [5.5], [20.0]])
    labels = np.array([0, 0, 1, 2, 1])
    figures = evaluate(embeddings, labels, ks=(1, 2, 3), clustering=False)
    assert figures["queries"] == 5
    assert figures["queries_without_positive"] == 1
    # Best ranks: 1 and 1 of class 0; 4 of the item at 5 (0.5, 4, 5, 15); 2 of that at 20 (14.5, 15).
    assert figures["recall@1"] == figures["precision@1"] == 2 / 4
    assert figures["recall@2"] == figures["recall@3"] == 3 / 4
    assert rank(embeddings, labels).best_rank.tolist() == [1, 1, 4, 0, 2]


def test_no_positive_at_all_is_a_mistake():
    with pytest.raises(UserError, match="None of the 4 queries"):
        evaluate(points(4, 2, seed=0), np.arange(4))


def test_recall_beyond_the_gallery_is_one():
    assert evaluate(points(20, 2, seed=0), np.arange(20) // 2, ks=(1000,), clustering=False)["recall@1000"] == 1


def test_only_equality_of_labels_counts():
    embeddings, labels = points(90, 4, seed=0), np.random.default_rng(0).integers(0, 20, 90)
    odd = np.array([-(2**63), 2**63 - 1, -1, 0, *np.random.default_rng(1).integers(-(2**62), 2**62, 16)])
    assert_identical(rank(embeddings, odd[labels]), rank(embeddings, labels))


def test_block_size_changes_nothing():
    embeddings = torch.randn(2 * TILE + 45, 19, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(len(embeddings)) // 5
    whole = rank(embeddings, labels, block=10_000)
    for block in (1, 7, TILE, TILE + 1):
        assert_identical(rank(embeddings, labels, block=block), whole)


def test_scores_have_the_same_bits_for_every_block_and_order_of_queries():
    embeddings = torch.randn(3 * TILE + 5, 33, generator=torch.Generator().manual_seed(0))
    space = Space.of(embeddings, embeddings)

    def scores(rows: torch.Tensor, block: int) -> torch.Tensor:
        result = torch.empty(len(rows), len(space.gallery))
        for at, of_rows in each_strip(space, rows, block, lambda _, strip: strip.scores.clone()):
            result[at] = of_rows
        return result

    rows = torch.arange(len(embeddings))
    expected = scores(rows, 1)
    for order, block in itertools.product((rows, rows.flip(0)), (1, 200, 1000)):
        assert torch.equal(scores(order, block), expected)


@pytest.mark.parametrize("chunk", [4 * LANES, 17 * LANES, 40 * LANES])
def test_the_largest_through_lane_maxima(chunk):
    """Few distinct values, so that lanes tie; what is hidden is not among them."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 99, (6, 40 * LANES), generator=draw).float()
    maxima = torch.cat([part.unflatten(1, (LANES, -1)).amax(1) for part in scores.split(chunk, 1)], 1)
    strip = Strip(scores.clone(), maxima, chunk)
    for hidden in (1, 15, 1, 300):
        columns = scores.topk(hidden).indices
        scores.scatter_(1, columns, -np.inf)
        strip.hide(columns)
        for k in (1, 3, 20, 21, 500):
            assert torch.equal(strip.largest(k), scores.sort(1, descending=True).values[:, :k])


def test_a_gallery_of_several_chunks_is_that_of_the_definition():
    """Two queries: a loop over a gallery of more than one product's columns."""
    gallery, labels = points(2 * CHUNK + 70, 3, seed=0), np.random.default_rng(0).integers(0, 900, 2 * CHUNK + 70)
    queries, asked = points(2, 3, seed=1), labels[[5, -3]]
    expected = by_definition(queries, asked, gallery, labels)
    assert_same(rank(queries, asked, gallery=gallery, gallery_labels=labels), expected)


@pytest.mark.parametrize("classes", [3, 100])
def test_threads_change_nothing_and_are_given_back(classes):
    embeddings = torch.randn(9 * TILE + 5, 7, generator=torch.Generator().manual_seed(0))
    labels, before = torch.arange(len(embeddings)) % classes, torch.get_num_threads()
    try:
        rankings = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with torch.inference_mode(threads == 3):
                rankings.append(rank(embeddings.clone(), labels))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert_identical(*rankings)


def test_a_failure_in_a_thread_is_told_and_ends_the_others():
    embeddings, before = torch.randn(200 * TILE, 2), torch.get_num_threads()
    visited = []

    def fails(at: torch.Tensor, strip: Strip) -> None:
        visited.append(at)
        raise RuntimeError("broken")

    try:
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="broken"):
            each_strip(Space.of(embeddings, embeddings[:9]), torch.arange(len(embeddings)), None, fails)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert len(visited) <= 2


@pytest.mark.parametrize("separate", [False, True])
def test_one_layout_serves_all_embeddings_of_the_images(separate):
    labels, others = torch.arange(90) % 7, torch.arange(60) % 9 if separate else None
    layout = Layout.of(labels, others)
    for seed in range(3):
        embeddings, gallery = points(90, 4, seed), points(60, 4, 10 + seed) if separate else None
        direct = rank(embeddings, labels, gallery=gallery, gallery_labels=others)
        assert_identical(rank(embeddings, layout, gallery=gallery), direct)
    with pytest.raises(UserError, match="give a gallery exactly if the layout was made with one"):
        rank(points(90, 4, 0), layout, gallery=None if separate else points(60, 4, 0))
    with pytest.raises(UserError, match="The layout is of 90 queries"):
        rank(points(89, 4, 0), layout, gallery=points(60, 4, 0) if separate else None)


@pytest.mark.parametrize("separate", [False, True])
def test_figures_of_pytorch_metric_learning(separate):
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 12, (200,), generator=draw)
    embeddings = torch.randn(12, 8, generator=draw)[labels] + torch.randn(200, 8, generator=draw)
    gallery = (embeddings[120:], labels[120:]) if separate else (None, None)
    queries = (embeddings[:120], labels[:120]) if separate else (embeddings, labels)
    figures = evaluate(*queries, gallery=gallery[0], gallery_labels=gallery[1], clustering=False)
    names = {
        "precision@1": "precision_at_1",
        "r_precision": "r_precision",
        "map@r": "mean_average_precision_at_r",
    }
    reference = AccuracyCalculator(include=tuple(names.values()), k="max_bin_count", device=torch.device("cpu"))
    expected = reference.get_accuracy(*queries, *gallery) if separate else reference.get_accuracy(*queries)
    assert 0.2 < figures["map@r"] < 0.9
    for ours, theirs in names.items():
        assert figures[ours] == pytest.approx(expected[theirs], abs=1e-6)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_number_types(kind):
    exact = torch.as_tensor(small_integers(64, 3, seed=0)).to(kind)
    labels = np.random.default_rng(0).integers(0, 9, 64)
    assert_same(rank(exact, labels), by_definition(exact.tolist(), labels))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_very_small_and_very_large_embeddings(scale):
    embeddings = points(100, 4, seed=0).astype(np.float32)
    labels = np.random.default_rng(0).integers(0, 9, 100)
    assert_same(rank(embeddings * np.float32(scale), labels), by_definition(embeddings, labels))


def test_a_large_common_component_costs_no_digits():
    """As of an untrained network: all embeddings within 1e-3 of one direction."""
    embeddings = (100 + 1e-3 * points(200, 6, seed=0)).astype(np.float32)
    labels = np.arange(200) // 4
    exact = embeddings.astype(np.float64) - 100
    assert_same(rank(embeddings, labels), by_definition(exact, labels))


def test_inputs_are_left_as_they_were_and_may_be_read_only():
    embeddings, labels = points(64, 3, seed=0), np.arange(64) // 2
    before = embeddings.copy()
    embeddings.flags.writeable = labels.flags.writeable = False
    reverse = rank(embeddings[::-1], labels[::-1])
    np.testing.assert_array_equal(reverse.best_rank[::-1], rank(embeddings, labels).best_rank)
    np.testing.assert_array_equal(embeddings, before)


@pytest.fixture
def low_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("low_precision")
def test_precision_of_training_does_not_reach_evaluation(monkeypatch):
    """Which products a lower precision changes depends on the processor, so the setting itself is looked at."""
    embeddings, labels = points(100, 64, seed=0).astype(np.float32), np.arange(100) // 4
    product, seen = torch.mm, set()

    def spy(*operands: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.add(torch.get_float32_matmul_precision())
        return product(*operands, out=out)

    monkeypatch.setattr(torch, "mm", spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = rank(torch.as_tensor(embeddings).requires_grad_(), labels)
    assert_same(actual, by_definition(embeddings, labels))
    assert seen == {"highest"}
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_named_by_row(value):
    broken = points(9, 3, seed=0)
    broken[4, 1] = value
    good, labels = points(9, 3, seed=1), np.arange(9) // 2
    with pytest.raises(UserError, match="Row 4 of embeddings"):
        rank(broken, labels)
    with pytest.raises(UserError, match="Row 4 of gallery"):
        rank(good, labels, gallery=broken, gallery_labels=labels)


@pytest.mark.parametrize(
    ("embeddings", "labels", "others", "message"),
    [
        (np.zeros(4), np.zeros(4, int), {}, r"embeddings has shape \[4\]"),
        (np.zeros((0, 2)), np.zeros(0, int), {}, "at least one row"),
        (np.zeros((4, 2)), np.zeros(3, int), {}, r"labels has shape \[3\] beside 4 embeddings"),
        (np.zeros((4, 2)), np.zeros(4), {}, "labels holds torch.float64"),
        (np.zeros((4, 2)), np.zeros(4, int), {"gallery": np.zeros((4, 2))}, "belong together"),
        (np.zeros((4, 2)), np.zeros(4, int), {"gallery_labels": np.zeros(4, int)}, "belong together"),
        (
            np.zeros((4, 2)),
            np.zeros(4, int),
            {"gallery": np.zeros((4, 3)), "gallery_labels": np.zeros(4, int)},
            "Queries have 2 dimensions and the gallery 3",
        ),
        (np.zeros((4, 2)), np.zeros(4, int), {"ks": (1, 0)}, "a K in ks=0 has to be"),
        *(
            (np.zeros((4, 2)), np.zeros(4, int), {"ks": ks}, said)
            for ks, said in [
                ((1.5,), r"a K in ks=1\.5"),
                ((-1,), "a K in ks=-1"),
                ((True,), "a K in ks=True"),
                ("12", "a K in ks='1'"),
                (5, "ks=5 has to be a sequence"),
                ((1, 2, 1), r"ks=\[1, 2, 1\] names a K twice"),
            ]
        ),
        *((np.zeros((4, 2)), np.zeros(4, int), {"block": b}, f"block={b}") for b in (0, -1, 1.5, True)),
        *((np.zeros((4, 2)), np.zeros(4, int), {"seed": s}, f"seed={s}") for s in (-1, 0.5, 2**32)),
        (np.zeros((4, 2)), np.array(list("aabb")), {}, "labels holds <U1"),
        (np.zeros((4, 2)), np.array([0, 0, "b", None], object), {}, "labels holds object"),
        (np.zeros((4, 2)), np.zeros(4, bool), {}, r"labels holds torch\.bool"),
        (np.zeros((4, 2)), np.zeros(4, complex), {}, r"labels holds torch\.complex128"),
        (np.zeros((4, 2)), np.full(4, 2**64 - 1, np.uint64), {}, "beyond int64"),
        (np.zeros((4, 2)), torch.zeros(4, dtype=torch.int64).to_sparse(), {}, "labels is a tensor of layout"),
        (np.zeros((4, 2), bool), np.zeros(4, int), {}, r"embeddings holds torch\.bool"),
        (np.zeros((4, 2), complex), np.zeros(4, int), {}, r"embeddings holds torch\.complex128"),
        (np.full((4, 2), "a"), np.zeros(4, int), {}, "embeddings holds <U1"),
        (np.zeros((4, 2), object), np.zeros(4, int), {}, "embeddings holds object"),
        ([[0.0], [0.0, 1.0]], np.zeros(2, int), {}, "embeddings is no array of numbers"),
        (None, np.zeros(2, int), {}, "embeddings holds object"),
        (np.full((4, 2), 1e200), np.zeros(4, int), {}, "embeddings holds values beyond 3.4e"),
    ],
)
def test_what_does_not_fit_is_a_mistake(embeddings, labels, others, message):
    with pytest.raises(UserError, match=message):
        evaluate(embeddings, labels, **others)


KINDS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", ">i4"]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_of_any_width_are_labels_and_embeddings(kind):
    embeddings, labels = np.abs(small_integers(40, 3, seed=0)), np.arange(40) // 4
    expected = evaluate(embeddings, labels)
    assert evaluate(embeddings.astype(kind), labels.astype(kind), ks=np.array([1, 2, 4, 8])) == expected
    if kind != ">i4":
        assert evaluate(torch.as_tensor(embeddings.astype(kind)), torch.as_tensor(labels.astype(kind))) == expected


@pytest.mark.parametrize("kind", ["float16", "float32", "longdouble", ">f8"])
def test_floats_of_any_width_are_embeddings(kind):
    embeddings, labels = small_integers(40, 3, seed=0), np.arange(40) // 4
    assert evaluate(embeddings.astype(kind), labels) == evaluate(embeddings, labels)


@pytest.mark.exhaustive
def test_memory_at_the_size_of_sop_stays_within_its_bound():
    benchmark = Path(__file__).parents[2] / "experiments/bench/evaluation.py"
    assert subprocess.run([sys.executable, benchmark, "--memory"], check=False).returncode == 0
