"""What the pictures show, read back from what is drawn."""

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageColor
from torch.nn import functional as F

from dml.evaluation.evaluator import Embedded
from dml.evaluation.metrics import rank
from dml.figures import course, embeddings, fonts, galleries, maps, pairs, style, summaries
from dml.models.attention import crop_and_zoom
from dml.reporting.table import print_table

RIGHT = (np.array([True, True, True, False, True, True]),)  # of the queries of `table`


def white(row: int) -> Image.Image:
    return Image.new("RGB", (10, 10), "white")


@pytest.fixture
def table() -> Embedded:
    """Two classes far apart; row 3 lies among the other class."""
    directions = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0], [0.0, 1.1], [0.1, 1.0]])
    embeddings = F.normalize(torch.stack([directions, directions.flip(1)], dim=1), dim=-1)
    return Embedded(embeddings, torch.tensor([0, 0, 0, 0, 1, 1]), torch.arange(6))


def test_gallery_frames_right_and_wrong(table: Embedded) -> None:
    near = galleries.neighbours_of(table, None, None, k=2)
    sheet = galleries.retrieval_gallery(table, table, near, *RIGHT, white, str, count=6)
    pixels = np.asarray(sheet).reshape(-1, 3)
    for colour in (style.RIGHT, style.WRONG, style.GREY):
        assert (pixels == ImageColor.getrgb(colour)).all(1).sum() > 500


def test_lines_are_told_apart_without_colours() -> None:
    marks = [style.marks(i) for i in range(50)]
    assert all(a["marker"] != b["marker"] for a, b in pairwise(marks))
    assert len({(one["color"], one["marker"]) for one in marks}) == 50


def test_any_class_name_can_be_drawn() -> None:
    """matplotlib would read it as a formula, or refuse it."""
    names = {0: "a$_$b", 1: "\udce9t\udce9", 2: "c" * 60}
    drawn = maps.prototype_histograms(torch.rand(6, 4), torch.arange(3).repeat(2), names)
    drawn.savefig(io.BytesIO(), format="png")
    said = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert said == [r"a\$_\$b", r"\udce9t\udce9", "c" * 37 + "..."]


def test_a_name_of_several_lines_is_drawn_in_one(table: Embedded) -> None:
    """Pillow's layout refuses line breaks and separators."""
    near = galleries.neighbours_of(table, None, None, k=2)
    names = [between.join("abc") for between in ("\n", "\r", "\x1c", "\x85", "\u2029", " ")]
    sheets = [
        galleries.retrieval_gallery(table, table, near, *RIGHT, white, lambda _, name=name: name, count=6)
        for name in names
    ]
    assert all(sheet.tobytes() == sheets[-1].tobytes() for sheet in sheets)


def test_gallery_of_fewer_images_than_neighbours(table: Embedded) -> None:
    near = galleries.neighbours_of(table, None, None, k=99)
    sheet = galleries.retrieval_gallery(table, table, near, *RIGHT, white, str, count=99)
    assert sheet.width == 96 * 6 + 24  # five neighbours, none of them the query itself


def test_half_of_the_gallery_are_failures() -> None:
    right = torch.tensor([True] * 80 + [False] * 20)
    chosen = galleries._half_wrong(right, 10)
    assert len(set(chosen)) == 10
    assert sum(not right[i] for i in chosen) == 5
    assert len(galleries._half_wrong(torch.ones(4, dtype=torch.bool), 10)) == 4


def test_random_pairs_hold_both_kinds() -> None:
    labels = torch.tensor([3, 1, 3, 1, 1, 9])
    first, second = embeddings.random_pairs(labels, 4000, seed=0)
    assert (first != second).all()
    same = labels[first] == labels[second]
    assert same.float().mean() > 0.5  # half by design, and some by chance
    positives = {tuple(sorted(pair)) for pair in zip(first[same].tolist(), second[same].tolist(), strict=True)}
    assert positives == {(0, 2), (1, 3), (1, 4), (3, 4)}


def test_histogram_names_means(table: Embedded) -> None:
    (axes,) = embeddings.similarity_histograms(table).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    self_mean = float((table.embeddings[:, 0] * table.embeddings[:, 1]).sum(-1).mean())
    assert labels[2] == f"self pairs, mean {self_mean:.3f}"
    assert [label.split(",")[0] for label in labels] == ["positive pairs", "negative pairs", "self pairs"]


def test_classes_of_one_size_are_in_one_fifth() -> None:
    """Else those with the lowest shares, which come first, would be the smaller ones."""
    sizes, shares = [60] * 90 + [10] * 5 + [99] * 5, [*np.linspace(0, 1, 90), *[0.2] * 5, *[0.7] * 5]
    (axes,) = embeddings.class_sizes(sizes, shares, "Recall@1").axes
    mean = next(line for line in axes.lines if line.get_label() == "mean of a fifth of the classes")
    np.testing.assert_allclose(mean.get_xydata(), [[10, 0.2], [60, 0.5], [99, 0.7]])


def test_more_lines_than_colours_have_other_markers() -> None:
    (axes,) = course.recall_over_steps({f"line {i}": {0: 0.1, 5: 0.2} for i in range(13)}, "Recall@1 on test").axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 13
    assert axes.get_ylabel() == "Recall@1 on test"


def test_equal_rates_are_one_line() -> None:
    rates = [{f"train/lr/{name}": 1 / (i + 1) for name in ("backbone", "heads")} for i in range(3)]
    records = [{"step": i, "train/loss": 1.0} | rate for i, rate in enumerate(rates)]
    (panel,) = [axes for axes in course.curves(records).axes if axes.get_ylabel() == "learning rate"]
    assert [line.get_label() for line in panel.lines] == ["backbone, heads"]


def test_the_caption_says_which_learners_are_shown() -> None:
    images = torch.rand(1, 3, 8, 8)
    many = maps.attention_plot(images, torch.rand(1, 9, 2, 4, 4)).caption
    assert many.startswith("What each of the first 8 of 9 learners attends to")
    shown = maps.attention_plot(images, torch.rand(1, 2, 2, 4, 4), "each learner of the first scale").caption
    assert shown.startswith("What each learner of the first scale attends to")


def test_curves_follow_the_records() -> None:
    records = [
        {"step": 0, "test/recall@1": 0.1, "learners/mean/recall@1": 0.05},
        {"step": 1, "train/loss": 2.0},
        {"step": 2, "train/loss": 1.5},
        {"step": 2, "test/recall@1": 0.3, "learners/mean/recall@1": 0.2, "seen/recall@1": 0.7},
    ]
    several = [record | {"learners/1/recall@1": 0.1} if "test/recall@1" in record else record for record in records]
    single = course.curves(records).axes[1]
    assert [line.get_label() for line in single.lines] == ["embedding", "training images"]
    records = several
    loss, recall = course.curves(records).axes
    assert recall.lines[2].get_xydata().tolist() == [[2, 0.7]]
    assert recall.lines[2].get_label() == "training images"
    assert loss.lines[0].get_xydata().tolist() == [[1, 2.0], [2, 1.5]]
    assert recall.lines[0].get_xydata().tolist() == [[0, 0.1], [2, 0.3]]


def test_a_single_term_does_not_lie_under_their_sum() -> None:
    records = [{"step": step, "train/metric": 2.0, "train/loss": 2.0} for step in (1, 2)]
    (loss,) = course.curves(records).axes
    assert [line.get_label() for line in loss.lines] == ["loss"]
    (loss,) = course.curves([record | {"train/loss": 3.0} for record in records]).axes
    assert [line.get_label() for line in loss.lines] == ["metric", "loss"]


def test_rates_that_change_are_drawn() -> None:
    records = [{"step": step, "train/loss": 2.0, "train/lr/backbone": 0.1 / step} for step in (1, 2)]
    records = [record | {"train/lr/head": 1.0, "train/gradient_norm/all": 3.0} for record in records]
    loss, rates = course.curves(records).axes  # nothing was evaluated: there is no empty panel
    assert [line.get_label() for line in loss.lines] == ["loss"]
    assert [line.get_xydata().tolist() for line in rates.lines] == [[[1, 0.1], [2, 0.05]], [[1, 1.0], [2, 1.0]]]
    assert len(course.curves([record | {"train/lr/backbone": 0.1} for record in records]).axes) == 1
    assert course.constant_rates([record | {"train/lr/backbone": 0.1} for record in records]) == {
        "backbone": 0.1,
        "head": 1.0,
    }


def test_printed_table(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"test/recall@1": 0.51239, "test/precision@1": 0.51239, "untrained/recall@1": 0.1, "test/queries": 9.0}
    print_table(metrics | {"data/test/images": 9, "data/test/classes": 3})
    said = capsys.readouterr().out
    assert "0.5124" in said
    assert "Recall@1" in said
    assert "mean learner" not in said  # there is one learner
    assert "9 test images of 3 unseen classes" in " ".join(said.split())
    apart = {"data/query/images": 4, "data/query/classes": 2, "data/gallery/images": 5, "data/gallery/classes": 3}
    print_table(metrics | {"data/test/images": 9, "data/test/classes": 3} | apart)
    said = " ".join(capsys.readouterr().out.split())
    assert "4 queries of 2 unseen classes among 5 gallery images" in said
    assert "test images" not in said


def test_curves_on_validation_classes() -> None:
    records = [
        {"step": 0, "test/recall@1": 0.1, "learners/mean/recall@1": 0.05},
        {"step": 0, "validation/recall@1": 0.2},
        {"step": 1, "train/loss": 2.0},
        {"step": 2, "validation/recall@1": 0.4},
    ]
    _, recall = course.curves(records).axes
    assert [line.get_xydata().tolist() for line in recall.lines] == [[[0, 0.2], [2, 0.4]]]
    assert "validation" in recall.get_ylabel()


def test_attention_is_drawn_as_it_is() -> None:
    """The mean over channels, then the channel on which learners differ; all within one range."""
    weights = torch.full((2, 3, 4, 5, 6), 0.5)
    weights[:, :, 2] = torch.tensor([0.1, 0.5, 0.9])[:, None, None]
    drawn = maps.attention_maps(torch.rand(2, 3, 20, 24), weights, channels=1)
    grid = np.array(drawn.axes).reshape(4, 4)  # two images x (mean, channel), the image and three learners
    assert [axes.get_title() for axes in grid[0]] == ["", "learner 0", "learner 1", "learner 2"]
    assert grid[0, 0].get_ylabel() == "mean\n0.40 to 0.60"
    assert grid[3, 0].get_ylabel() == "channel 2\n0.10 to 0.90"
    for learner, value in enumerate((0.1, 0.5, 0.9)):
        grey, attention = grid[3, 1 + learner].images
        assert grey.get_array().shape == (20, 24)
        np.testing.assert_allclose(attention.get_array(), value)
        assert attention.get_clim() == pytest.approx((0.1, 0.9))


def test_attention_of_one_channel_is_drawn_once() -> None:
    drawn = maps.attention_maps(torch.rand(1, 3, 8, 8), torch.rand(1, 2, 1, 4, 4))
    assert len(drawn.axes) == 3
    assert drawn.axes[0].get_ylabel().startswith("mean")
    assert len(maps.attention_maps(torch.rand(1, 3, 8, 8), torch.rand(1, 1, 5, 4, 4)).axes) == 2  # one learner


def test_recall_and_cost() -> None:
    points = [summaries.Point("ABE", m, 1e6 * m, 1e9 * m, 0.1 * m, 0.01) for m in (4, 1, 2)]
    points.append(summaries.Point("MHeads", 2, 5e6, 2e9, 0.3, 0.0))
    figure = summaries.recall_and_cost(points)
    left, right = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ABE", "MHeads"]
    for axes in (left, right):
        np.testing.assert_allclose(axes.lines[0].get_xydata(), [[1, 0.1], [2, 0.2], [4, 0.4]])
        assert [note.get_text() for note in axes.texts] == ["1", "2", "4", "2"]


def test_recall_over_steps_has_a_line_a_configuration() -> None:
    figure = course.recall_over_steps({"method.K=2": {0: 0.1, 10: 0.3}, "x" * 200: {0: 0.2}})
    (axes,) = figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0, 0.1], [10, 0.3]])
    assert [text.get_text().replace("\n", "") for text in figure.legends[0].get_texts()] == ["method.K=2", "x" * 200]


def test_first_learners_has_a_line_a_k() -> None:
    metrics = {f"first/{m}/recall@{k}": 0.1 * m + 0.01 * k for m in (1, 2, 3) for k in (1, 4)}
    figure = embeddings.first_learners(metrics | {"first/2/map@r": 0.9})
    (axes,) = figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[1, 0.11], [2, 0.21], [3, 0.31]])
    np.testing.assert_allclose(axes.lines[1].get_ydata(), [0.14, 0.24, 0.34])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Recall@1", "Recall@4"]


def test_clusters_over_steps_stacks_sizes_and_follows_overlaps() -> None:
    records = [
        {"step": 0, "clusters/0/images": 30.0, "clusters/1/images": 10.0},
        {"step": 7, "train/loss": 1.0},
        {"step": 8, "clusters/0/images": 25.0, "clusters/1/images": 15.0}
        | {"clusters/0/iou": 0.8, "clusters/1/iou": 0.6, "clusters/iou": 0.7},
    ]
    sizes, kept = course.clusters_over_steps(records).axes
    assert [bar.get_height() for bar in sizes.patches] == [30, 25, 10, 15]  # type: ignore[attr-defined]
    assert [bar.get_y() for bar in sizes.patches] == [0, 0, 30, 25]  # type: ignore[attr-defined]
    assert [line.get_xydata().tolist() for line in kept.lines] == [[[8, 0.8]], [[8, 0.6]], [[8, 0.7]]]
    (alone,) = course.clusters_over_steps(records[:2]).axes  # a single clustering has no overlaps
    assert [bar.get_height() for bar in alone.patches] == [30, 10]  # type: ignore[attr-defined]
    assert "never again" in course.reclustered(records[:2])
    assert course.reclustered(records).startswith(", and its overlap")


def test_negative_distances_names_means() -> None:
    (axes,) = embeddings.distance_histograms(torch.tensor([0.5, 0.7]), torch.tensor([1.0, 1.2, 1.4])).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["within a cluster, mean 0.600", "between clusters, mean 1.200"]
    (axes,) = embeddings.distance_histograms(torch.tensor([]), torch.tensor([1.0])).axes
    assert len(axes.get_legend().get_texts()) == 1


def test_cluster_images_are_of_the_cluster() -> None:
    opened: list[int] = []
    clusters = np.array([0, 2, 0, 2, 0])

    def open_image(row: int) -> Image.Image:
        opened.append(row)
        return Image.new("RGB", (10, 10), "red")

    sheet = galleries.cluster_images(clusters, 4, np.array([10, 11, 12, 13, 14]), open_image, str, count=2)
    assert len(set(opened[:2]) & {10, 12, 14}) == 2
    assert set(opened[2:]) == {11, 13}
    assert sheet.size == (2 * 80, 4 * (20 + 72 + 18))  # a row of learners without images too


def test_easiest_queries_are_those_that_one_learner_alone_answers() -> None:
    """Angles of each learner; learner 0 answers 0 and 1, learner 1 answers 2 and 3, both 4 and 5."""
    angles = torch.tensor([[0.0, 0.0], [0.1, 3.0], [1.5, 1.6], [3.3, 1.7], [4.0, 4.0], [4.1, 4.1]])
    points, labels = torch.stack([angles.cos(), angles.sin()], -1), torch.tensor([0, 0, 1, 1, 2, 2])
    opened: list[int] = []

    def open_image(row: int) -> Image.Image:
        opened.append(row)
        return Image.new("RGB", (10, 10))

    best = np.stack([rank(points[:, i], labels).best_rank for i in range(2)])
    alone = [np.flatnonzero((best[i] == 1) & (best[1 - i] > 1)) for i in range(2)]
    assert [one.tolist() for one in alone] == [[0, 1], [2, 3]]
    galleries.easiest_queries(best, np.arange(6) + 20, open_image, str)
    hardest_first = [sorted(one, key=lambda q, i=i: -best[1 - i][q]) for i, one in enumerate(alone)]
    assert opened == [20 + int(q) for one in hardest_first for q in one]


def test_gallery_leaves_the_own_camera_out() -> None:
    angles = torch.tensor([0.0, 0.01, 0.02, 0.5])
    points = torch.stack([angles.cos(), angles.sin()], -1)[:, None]
    queries = Embedded(points[:1], torch.tensor([7]), torch.tensor([0]))
    gallery = Embedded(points[1:], torch.tensor([7, 8, 7]), torch.tensor([1, 2, 3]))
    assert galleries.neighbours_of(queries, gallery, None, k=2).indices.tolist() == [[0, 1]]
    found = galleries.neighbours_of(queries, gallery, np.array([5, 5, 5, 6]), k=2)
    assert found.indices.tolist() == [[1, 2]]
    assert found.distances[0] == pytest.approx([2 * np.sin(0.01), 2 * np.sin(0.25)], abs=1e-6)


def test_a_gallery_of_one_camera_and_class() -> None:
    """All of it is left out for a query of this camera and class; the picture shows what there is."""
    points = torch.nn.functional.normalize(torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    queries = Embedded(points[:2], torch.tensor([7, 7]), torch.tensor([0, 1]))
    gallery = Embedded(points[2:], torch.tensor([7, 7]), torch.tensor([2, 3]))
    found = galleries.neighbours_of(queries, gallery, np.array([5, 6, 5, 5]), k=8)
    assert found.indices.shape == (2, 1)


def test_of_equally_near_images_wrong_ones_are_shown_first() -> None:
    points = torch.ones(6, 1, 1)
    table = Embedded(points, torch.tensor([0, 0, 0, 1, 1, 1]), torch.arange(6))
    found = galleries.neighbours_of(table, None, None, k=5).indices
    assert found[0].tolist() == [3, 4, 5, 1, 2]
    assert found[4].tolist() == [0, 1, 2, 3, 5]
    assert galleries.neighbours_of(table, None, None, k=2).indices[0].tolist() == [3, 4]  # of more than are shown


def test_few_self_pairs_are_not_piled_up_at_the_edge() -> None:
    points = torch.nn.functional.normalize(torch.randn(60, 2, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    points[:, 1] = -points[:, 0]
    (axes,) = embeddings.similarity_histograms(Embedded(points, torch.arange(60) % 3, torch.arange(60))).axes
    assert axes.get_xlim()[0] == -1  # all self pairs are there, a thousandth of the others is not


def test_so_many_self_pairs_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    points = torch.nn.functional.normalize(torch.randn(50, 5, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    every = sorted(float(one[a] @ one[b]) for one in points for a in range(5) for b in range(a + 1, 5))
    assert sorted(embeddings._self_cosines(points).tolist()) == pytest.approx(every, abs=1e-6)
    monkeypatch.setattr(embeddings, "PAIRS", 60)
    drawn = embeddings._self_cosines(points)
    assert drawn.shape == (5 * 60,)
    assert all(min(abs(value - one) for one in every) < 1e-6 for value in drawn.tolist())


def test_object_regions_show_what_each_scale_sees() -> None:
    images = torch.rand(2, 3, 20, 20)
    regions = [(torch.rand(2, 20, 20), torch.tensor([[2, 4, 12, 14], [0, 0, 20, 20]]))] * 2
    grid = np.array(maps.object_regions(images, regions).axes).reshape(2, 5)
    assert [axes.get_title() for axes in grid[0]] == [
        "scale 0 sees",
        "and finds",
        "scale 1 sees",
        "and finds",
        "scale 2 sees",
    ]
    square = grid[0, 0].patches[0]
    assert (square.get_xy(), square.get_width(), square.get_height()) == ((2, 4), 10, 10)
    shown = [np.asarray(axes.images[0].get_array()) for axes in grid[:, 2]]
    first = crop_and_zoom(images, regions[0][1])
    for picture, expected in zip(shown, first, strict=True):
        np.testing.assert_allclose(picture, expected.permute(1, 2, 0), atol=1e-6)
    np.testing.assert_allclose(shown[1], images[1].permute(1, 2, 0), atol=1e-5)  # the whole image
    assert all(len(axes.patches) == 0 for axes in grid[:, 4])


def test_patterns_are_coloured_by_their_verdict() -> None:
    points = [summaries.PatternPoint(name, at, at - 1, at + 1) for name, at in (("a", 2), ("$b$", 0.5), ("c", -2))]
    drawn = summaries.patterns({"one": points[:2], "two": points[2:]})
    (axes,) = drawn.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "a", r"\$b\$", "two", "c"]
    assert [label.get_fontweight() for label in axes.get_yticklabels()] == [
        "bold",
        "normal",
        "normal",
        "bold",
        "normal",
    ]
    colours = [bar.lines[0].get_color() for bar in axes.containers]  # type: ignore[attr-defined]
    assert colours == [style.GREEN, style.GREY, style.RED]
    assert [bar.lines[0].get_ydata()[0] for bar in axes.containers] == [1, 2, 4]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["ABE-4", "DeML(1,4), one layer, the comparison's settings, without the adversary"])
def test_names_of_methods_leave_room_for_the_axes(name: str) -> None:
    rows = [summaries.MethodPoint("baseline", [0.5], None), summaries.MethodPoint(name, [0.4], (-0.1, -0.2, -0.05))]
    drawn = summaries.methods({"Cars196": rows}, "Recall@1", "baseline")
    drawn.canvas.draw()
    for axes in drawn.axes:
        label = axes.xaxis.label.get_window_extent()
        assert drawn.bbox.x0 <= label.x0
        assert label.x1 <= drawn.bbox.x1


def test_names_that_dejavu_lacks_are_drawn_in_a_font_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "G", "cat", "ellipsis"])
    builder.setupCharacterMap({ord("G"): "G", ord("猫"): "cat", ord("…"): "ellipsis"})
    pen = TTGlyphPen(None)
    for move, point in ((pen.moveTo, (100, 0)), (pen.lineTo, (900, 0)), (pen.lineTo, (900, 800))):
        move(point)
    pen.closePath()
    glyph = pen.glyph()
    builder.setupGlyf(dict.fromkeys((".notdef", "G", "cat", "ellipsis"), glyph))
    builder.setupHorizontalMetrics(dict.fromkeys((".notdef", "G", "cat", "ellipsis"), (1000, 100)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupOS2()
    builder.setupPost()
    builder.setupNameTable({"familyName": "Cats", "styleName": "Regular"})
    builder.save(tmp_path / "cats.ttf")
    monkeypatch.setattr(fonts, "_files", lambda: [tmp_path / "gone.ttf", tmp_path / "cats.ttf"])
    fonts._installed.cache_clear()
    own = fonts.FONTS / "DejaVuSans.ttf"
    assert fonts.font_for("Ɣ 2012") == own
    assert fonts.font_for("猫 G") == tmp_path / "cats.ttf"
    assert fonts.font_for("猫 x") == own  # none has both: boxes
    assert fonts.fitting("猫 G\n猫猫猫猫", 10, 45) == "猫 G…"
    fonts._installed.cache_clear()


def test_bars_of_learners_stand_beside_the_ensemble_before_and_after() -> None:
    metrics = {"learners/0/recall@1": 0.4, "learners/1/recall@1": 0.5, "test/recall@1": 0.6, "untrained/recall@1": 0.1}
    (axes,) = embeddings.learner_bars(metrics, 2).axes
    assert [bar.get_height() for bar in axes.patches] == [0.4, 0.5]  # type: ignore[attr-defined]
    lines = {line.get_label(): set(np.asarray(line.get_ydata()).tolist()) for line in axes.lines}
    assert lines == {"ensemble": {0.6}, "untrained ensemble": {0.1}}


def test_histograms_tell_positive_from_negative_pairs_of_every_learner() -> None:
    labels = torch.arange(40) % 4
    points = F.one_hot(labels).float()[:, None].expand(-1, 3, -1)  # classes at right angles, alike for all learners
    (axes,) = embeddings.similarity_histograms(Embedded(points, labels, torch.arange(40))).axes
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said[:2] == ["positive pairs, mean 1.000", "negative pairs, mean 0.000"]
    areas = [np.abs(_area(one)) for one in axes.patches]
    assert areas == pytest.approx([1] * len(areas))  # densities: there are fewer positive pairs


def _area(histogram: Any) -> float:
    x, y = histogram.get_xy().T
    return float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum() / 2)


def test_images_on_the_map_are_drawn_by_their_outcome() -> None:
    points, outcome = np.arange(12.0).reshape(6, 2), np.array([1, 0, -1, 1, 0, 1])
    (axes,) = embeddings.embedding_map(points, outcome, "any").axes
    drawn = {one.get_label(): np.asarray(one.get_offsets()).tolist() for one in axes.collections}
    assert drawn == {
        "no query here, or none with a positive": points[[2]].tolist(),
        "nearest image right": points[[0, 3, 5]].tolist(),
        "nearest image wrong": points[[1, 4]].tolist(),
    }


def test_a_metric_over_a_sweep_has_its_numbers_in_order() -> None:
    def line(*xs: float) -> list[summaries.Measured]:
        return [summaries.Measured(x, x / 10, 0.01 * x) for x in xs]

    figure = summaries.over({"ours": line(4, 1, 8), "theirs": line(2, 1)}, "M", "Recall@1", dashed=["theirs"])
    (axes,) = figure.axes
    ours, theirs = (bars.lines[0] for bars in axes.containers)  # type: ignore[attr-defined]
    np.testing.assert_allclose(ours.get_xydata(), [[1, 0.1], [4, 0.4], [8, 0.8]])
    assert (ours.get_linestyle(), theirs.get_linestyle()) == ("-", "--")
    ends = [segment[:, 1].tolist() for segment in axes.containers[0].lines[2][0].get_segments()]  # type: ignore[attr-defined]
    np.testing.assert_allclose(ends, [[0.09, 0.11], [0.36, 0.44], [0.72, 0.88]])
    assert axes.get_xscale() == "log"  # 1 to 8
    (axes,) = summaries.over({"ours": line(1, 2, 7)}, "M", "Recall@1").axes
    assert axes.get_xscale() == "linear"


def test_of_collections_the_independent_ones_have_a_circle() -> None:
    every, apart = [0.1, 0.2, 0.3, 0.4], [0.2, 0.4]
    (axes,) = summaries.collections([("ours", {"separated": (every, apart), "concatenated": (apart, every)})]).axes
    drawn = [np.asarray(one.get_offsets())[:, 0].tolist() for one in axes.collections]
    assert drawn == [every, apart, apart, every]
    assert [len(one.get_facecolor()) for one in axes.collections] == [1, 0, 1, 0]  # a circle is empty


def test_a_difference_is_drawn_with_its_own_interval() -> None:
    draws = {"over classes": np.linspace(-0.1, 0.3, 50), "over images": np.linspace(0, 0.2, 50)}
    (axes,) = summaries.difference_plot(draws, 0.1, (-0.05, 0.25), "Recall@1: b minus a").axes
    shown = {one.get_label(): one for one in (*axes.patches, *axes.lines)}
    span: Any = shown["95 % interval over classes"]
    assert (span.get_x(), span.get_x() + span.get_width()) == pytest.approx((-0.05, 0.25))
    line: Any = shown["difference +0.1000"]
    assert set(line.get_xdata()) == {0.1}


def test_methods_have_their_mean_and_the_ends_of_their_difference() -> None:
    rows = [
        summaries.MethodPoint("baseline", [50.0, 52.0], None),
        summaries.MethodPoint("better", [60.0, 61.0, 80.0], (16.0, 10.0, 20.0)),
        summaries.MethodPoint("worse", [40.0], (-11.0, -20.0, -5.0)),
        summaries.MethodPoint("open", [52.0], (1.0, -1.0, 2.0)),
    ]
    above, below = summaries.methods({"Cars196": rows}, "Recall@1", "baseline").axes
    dots, means = above.lines[::2], above.lines[1::2]
    assert [np.asarray(one.get_xdata()).tolist() for one in dots] == [row.values for row in rows]
    assert [np.asarray(one.get_xdata()).tolist() for one in means] == [[51, 51], [67, 67], [40, 40], [52, 52]]
    bars: Any = below.containers
    assert [bar.lines[0].get_color() for bar in bars] == [style.GREEN, style.RED, style.GREY]
    ends = [bar.lines[2][0].get_segments()[0].tolist() for bar in bars]
    assert ends == [[[10, 1], [20, 1]], [[-20, 2], [-5, 2]], [[-1, 3], [2, 3]]]


def test_the_bar_of_a_pattern_reaches_from_its_lower_to_its_upper_end() -> None:
    (axes,) = summaries.patterns({"one": [summaries.PatternPoint("a", 2.0, -1.0, 3.0)]}).axes
    (bar,) = axes.containers
    assert bar.lines[2][0].get_segments()[0].tolist() == [[-1, 1], [3, 1]]  # type: ignore[attr-defined]


def test_a_tick_is_on_what_is_right_and_a_cross_on_what_is_wrong(table: Embedded) -> None:
    near = galleries.neighbours_of(table, None, None, k=2)
    sheet = galleries.retrieval_gallery(table, table, near, *RIGHT, white, str, count=6)
    expected = {}
    for good in (True, False):
        picture = style.thumbnail(white(0), 88, style.RIGHT if good else style.WRONG)
        galleries.mark(picture, good)
        expected[good] = picture.tobytes()
    rows = galleries._half_wrong(torch.as_tensor(RIGHT[0]), 6)
    for y, query in enumerate(rows):
        for x, place in enumerate(near.indices[query]):
            left, top = 24 + (x + 1) * 96, 20 + y * 112
            shown = sheet.crop((left, top, left + 88, top + 88))
            assert shown.tobytes() == expected[bool(table.labels[place] == table.labels[query])]


def test_prototypes_are_sorted_by_their_share() -> None:
    shares = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.7, 0.1], [0.0, 0.4, 0.6]])
    (axes, _) = maps.prototype_histograms(shares, torch.tensor([4, 4, 2]), {2: "two", 4: "four"}).axes
    drawn = np.asarray(axes.images[0].get_array())
    np.testing.assert_allclose(drawn, [[0.4, 0.6, 0], [0.65, 0.2, 0.15]], atol=1e-6)  # classes 2 and 4
    assert [label.get_text() for label in axes.get_yticklabels()] == ["two", "four"]


def test_where_the_weight_of_pooling_is_high_the_prototype_s_colour_is_full() -> None:
    weights = torch.tensor([[[0.0, 2.0], [1.0, 1.0]]])
    dominant = torch.tensor([[[0, 1], [2, 1]]])
    figure = maps.pooling_weights(torch.rand(1, 3, 8, 8), weights, dominant, prototypes=4)
    colours = np.asarray(figure.axes[2].images[1].get_array())
    np.testing.assert_allclose(colours[..., 3], [[0, 1], [0.5, 0.5]])
    np.testing.assert_allclose(colours[..., :3], maps.prototype_colours(4)[dominant[0]], atol=1e-6)
    assert figure.axes[2].get_title() == "3 of 4 prototypes"


def test_true_matches_are_those_that_do_not_miss() -> None:
    rates = np.array([1e-4, 1e-2, 1.0]), np.array([0.5, 0.2, 0.0])
    bands = np.array([0.1, 0.9]), np.array([0.2, 0.8]), np.array([0.7, 0.3])
    left, right = pairs.roc_and_calibration({"test": rates}, (1e-2, 0.2), bands, least=1e-3).axes
    curve, point = left.lines
    np.testing.assert_allclose(curve.get_xydata(), [[1e-2, 0.8], [1, 1]])  # the images do not resolve 1e-4
    np.testing.assert_allclose(point.get_xydata(), [[1e-2, 0.8]])
    np.testing.assert_allclose(right.lines[1].get_xydata(), [[0.1, 0.2], [0.9, 0.8]])
    assert [bar.get_height() for bar in right.patches] == [0.7, 0.3]  # type: ignore[attr-defined]


def test_a_fifth_of_the_classes_has_a_mean() -> None:
    sizes = list(range(10, 0, -1))
    (axes,) = embeddings.class_sizes(sizes, [one / 10 for one in sizes], "Recall@1").axes
    mean = next(line for line in axes.lines if line.get_label() == "mean of a fifth of the classes")
    np.testing.assert_allclose(mean.get_xydata(), [[at, at / 10] for at in (1.5, 3.5, 5.5, 7.5, 9.5)])


def test_the_mean_learner_has_no_curve_on_validation_classes() -> None:
    """It is tested before the first step and after the last one alone."""
    tested = {"test/recall@1": 0.1, "learners/mean/recall@1": 0.05, "learners/1/recall@1": 0.05}
    records = [{"step": step} | tested for step in (0, 4)]
    records += [{"step": step, "validation/recall@1": 0.1 * step} for step in (0, 2, 4)]
    (recall,) = course.curves(records).axes
    assert [line.get_label() for line in recall.lines] == ["ensemble"]
    assert recall.lines[0].get_xdata().tolist() == [0, 2, 4]  # type: ignore[union-attr]


def test_recall_over_cost_has_its_deviation_over_runs() -> None:
    points = [summaries.Point("ABE", m, 1e6 * m, 1e9 * m, 0.1 * m, std) for m, std in ((1, 0.02), (2, None))]
    for axes in summaries.recall_and_cost(points).axes:
        bar, none = axes.containers[0].lines[2][0].get_segments()  # type: ignore[attr-defined]
        np.testing.assert_allclose(bar, [[1, 0.08], [1, 0.12]])
        assert len(none) == 0  # of one run


def test_the_queries_that_others_find_hardest_come_first() -> None:
    opened: list[int] = []

    def open_image(row: int) -> Image.Image:
        opened.append(row)
        return Image.new("RGB", (10, 10))

    best = np.array([[1, 1, 1, 1, 2], [2, 9, 4, 1, 1], [7, 3, 5, 1, 1]])
    galleries.easiest_queries(best, np.arange(5) + 20, open_image, str)
    assert opened == [22, 21, 20]  # the best of the others has rank 4, 3 and 2
