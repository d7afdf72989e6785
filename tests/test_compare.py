"""The paired bootstrap: its coverage, its sense, and what it refuses."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from omegaconf import DictConfig
from scipy.stats import sem, ttest_1samp

from dml.analysis.comparison import compare, names, over_classes, over_images, paired
from dml.analysis.sides import matched, runs_of
from dml.compare import main
from dml.errors import UserError
from dml.evaluation.interval import Spread
from dml.figures.summaries import difference_plot
from dml.runs.collecting import leaves
from dml.runs.folder import RunFolder

CLASSES = np.repeat(np.arange(60), 12)


def simulated(rng: np.random.Generator, difference: float) -> tuple[np.ndarray, np.ndarray]:
    """Two runs that differ by `difference` on average, by other amounts in each class."""
    of_class = rng.normal(0, 0.1, 60)[CLASSES]
    a = 0.5 + rng.normal(0, 0.1, 60)[CLASSES] + rng.normal(0, 0.2, len(CLASSES))
    return a, a + difference + of_class + rng.normal(0, 0.1, len(CLASSES))


@pytest.mark.slow
def test_coverage() -> None:
    """Near 95 % over classes. Over images it is far below, where differences are those of classes."""
    rng = np.random.default_rng(0)
    hits = {"classes": 0, "images": 0}
    rejected = 0
    for trial in range(400):
        a, b = simulated(rng, 0.03)
        for name, found in (
            ("classes", over_classes(a, b, CLASSES, draws=400, seed=trial)),
            ("images", over_images(a, b, draws=400, seed=trial)),
        ):
            hits[name] += found.low <= 0.03 <= found.high
        a, b = simulated(rng, 0.0)
        rejected += over_classes(a, b, CLASSES, draws=400, seed=trial).p < 0.05
    assert hits["classes"] / 400 == pytest.approx(0.95, abs=0.03)
    assert hits["images"] / 400 < 0.75
    assert rejected / 400 == pytest.approx(0.05, abs=0.03)


def test_a_literal_loop() -> None:
    """The draws are means over all queries of the classes drawn; classes differ in size."""
    rng = np.random.default_rng(3)
    classes = np.repeat(np.arange(7), [3, 9, 2, 5, 5, 1, 8])
    a, b = rng.random(33), rng.random(33)
    found = over_classes(a, b, classes, draws=4000)
    assert found.estimate == pytest.approx((b - a).mean())
    drawn = []
    for _ in range(4000):
        rows = np.concatenate([np.flatnonzero(classes == c) for c in rng.integers(7, size=7)])
        drawn.append((b - a)[rows].mean())
    assert np.quantile(found.draws, [0.025, 0.5, 0.975]) == pytest.approx(
        np.quantile(drawn, [0.025, 0.5, 0.975]), abs=0.015
    )
    half = 2.446912 * np.std(drawn) * (7 / 6) ** 0.5  # Student's t with 6 degrees of freedom, from a printed table
    assert (found.low, found.high) == pytest.approx((found.estimate - half, found.estimate + half), abs=0.015)
    assert (found.low > 0 or found.high < 0) == (found.p < 0.05)


def test_no_difference() -> None:
    """Of 60 classes all are alike: of others, up to a share of 0.06 may differ."""
    a = np.random.default_rng(0).random(len(CLASSES))
    found = over_classes(a, a, CLASSES, draws=200)
    other = 1 - 0.025 ** (1 / len(np.unique(CLASSES)))
    assert (found.estimate, found.p) == (0, 1)
    assert (found.low, found.high) == pytest.approx((-other, other))


def saved(folder: Path, precision: np.ndarray, **changes: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "paths": np.array([f"{c}/{i}.jpg" for i, c in enumerate(CLASSES)]),
        "classes": CLASSES.astype(str),
        "best_rank": np.where(precision > 0.5, 1, 3),
        "map@r": precision,
    }
    np.savez(folder / "queries.npz", **arrays | changes)
    return folder


def test_both_ways_of_drawing_take_the_seed_that_is_given(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    precision, other = rng.random((2, len(CLASSES)))
    sides = saved(tmp_path / "a", precision), saved(tmp_path / "b", other)
    found = compare(*sides, tmp_path / "out", draws=100, seed=5)["map@r"]
    assert found["images"].draws == pytest.approx(over_images(precision, other, 100, 5).draws)
    assert found["images"].draws != pytest.approx(over_images(precision, other, 100, 0).draws)
    assert found["classes"].draws == pytest.approx(over_classes(precision, other, CLASSES.astype(str), 100, 5).draws)


@pytest.mark.slow
def test_seeds_of_two_methods_do_not_overwrite_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    one, two, mine = (saved(tmp_path / name / "seed=2", rng.random(len(CLASSES))) for name in ("one", "two", "mine"))
    for other in (one, two):
        monkeypatch.setattr(sys, "argv", ["compare", str(other), str(mine), "--draws", "100"])
        main()
    assert sorted(path.name for path in mine.glob("compared_*")) == [
        "compared_with_one_seed=2",
        "compared_with_two_seed=2",
    ]
    assert names(one, mine) == ("one/seed=2", "mine/seed=2")
    assert names(one, Path("two/seed=3")) == ("one/seed=2", "two/seed=3")
    assert names(Path("runs/abe"), Path("mlrc/fold_0_repeat_1")) == ("runs/abe", "mlrc/fold_0_repeat_1")
    assert names(Path("runs/abe"), Path("runs/seeded")) == ("abe", "seeded")


@pytest.mark.slow
def test_names_are_shown_as_they_are(
    configure: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither `$` as formulas nor brackets as markup, in pictures and tables."""
    rng = np.random.default_rng(0)
    root = "/photos[old]/x[/b]"
    ours = ("dataset=folder", f'dataset.root="{root}"')

    def run(name: str, *options: str) -> Path:
        folder = tmp_path / name
        RunFolder(folder).open(configure("runtime.train_classes=3", *options), options)
        RunFolder(folder).write_metrics({"test/recall@1": 0.5})
        return saved(folder, rng.random(len(CLASSES)))

    a, b = run("a$%", *ours), run("b$%[/i]", "dataset=folder", "dataset.root=x")
    monkeypatch.setenv("COLUMNS", "200")
    compare(a, b, tmp_path / "out", draws=100)
    assert root in capsys.readouterr().out
    assert (tmp_path / "out" / "difference_map_r.png").stat().st_size > 5000
    no_text = os.fsdecode(b"MAP@R: c\xe9 minus d")
    difference_plot({"drawn": rng.random(9)}, 0.5, (0.4, 0.6), no_text).savefig(tmp_path / "c.png")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    precision = rng.random(len(CLASSES))
    better = np.clip(precision + 0.1 + rng.normal(0, 0.05, len(CLASSES)), 0, 1)
    alone = np.where(np.arange(len(CLASSES)) < 5, 0, 1)  # these queries have no positive
    ranks = [np.where(p > 0.5, 1, 3) * alone for p in (precision, better)]
    a = saved(tmp_path / "first", precision * alone, best_rank=ranks[0])
    b = saved(tmp_path / "second", better * alone, best_rank=ranks[1])
    monkeypatch.setattr(sys, "argv", ["compare", str(a), str(b), "--draws", "500"])
    main()
    said = capsys.readouterr().out
    assert f"{len(CLASSES) - 5} queries of 60 classes" in said
    assert "…" not in said  # every figure has room in 80 columns
    assert re.search(r"^ *MAP@R +over classes ", said, re.MULTILINE)
    monkeypatch.setenv("COLUMNS", "50")
    main()
    narrow = capsys.readouterr().out
    assert "…" not in narrow
    for figure in re.findall(r"[+-]?\d\.\d{4}", said):
        assert figure in narrow
    out = b / "compared_with_first"
    content = json.loads((out / "comparison.json").read_text())["metrics"]["map@r"]
    assert content["b"] - content["a"] == pytest.approx(content["classes"]["estimate"])
    assert content["a"] == pytest.approx(precision[5:].mean())
    assert content["classes"]["low"] > 0.05
    apart = {
        "classes": over_classes(precision[5:], better[5:], CLASSES[5:].astype(str), draws=500),
        "images": over_images(precision[5:], better[5:], draws=500),
    }
    for over, expected in apart.items():
        assert (content[over]["low"], content[over]["high"]) == pytest.approx((expected.low, expected.high))
    assert apart["classes"].low != pytest.approx(apart["images"].low)
    assert content["classes"]["p"] == pytest.approx(apart["classes"].p)
    assert content["classes"]["p"] < 1e-10
    assert "<0.0001" in said
    assert "0.0000" not in said
    assert content["classes"]["seeds"] == 0
    assert "without what another seed changes (give several runs)" in said
    assert sorted(path.name for path in out.iterdir()) == [
        "comparison.json",
        "difference_map_r.png",
        "difference_recall_1.png",
    ]


@pytest.mark.slow
def test_several_runs_stand_for_their_mean(
    tmp_path: Path, configure: Callable[..., DictConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    precisions = rng.random((5, len(CLASSES)))

    def run(side: str, row: int, *options: str) -> Path:
        folder = tmp_path / side / f"{row}"
        RunFolder(folder).open(configure(f"seed={row}", "runtime.train_classes=3", *options), [f"seed={row}", *options])
        RunFolder(folder).write_metrics({"test/recall@1": 0.5})
        return saved(folder, precisions[row])

    a, b = tmp_path / "a", tmp_path / "b"
    first = run("a", 0)
    for side, rows in (("a", (1,)), ("b", (2, 3, 4))):
        for row in rows:
            run(side, row)
    (run("b", 0) / "metrics.json").unlink()  # not finished
    both = paired(runs_of(a), runs_of(b))
    assert both.runs == (2, 3)
    one, other = both.values["map@r"]
    assert one == pytest.approx((precisions[0] + precisions[1]) / 2)
    assert other == pytest.approx(precisions[2:].mean(0))
    assert both.values["recall@1"][0] == pytest.approx((precisions[:2] > 0.5).mean(0))
    found = compare(a, b, tmp_path / "out", draws=200)["map@r"]["classes"]
    assert found.estimate == pytest.approx(precisions[2:].mean() - precisions[:2].mean())
    totals = precisions.mean(1)
    within = ((totals[:2] - totals[:2].mean()) ** 2).sum() + ((totals[2:] - totals[2:].mean()) ** 2).sum()
    assert both.spreads["map@r"] == Spread(pytest.approx(within / 3 * (1 / 2 + 1 / 3)), 3)
    alone = over_classes(*both.values["map@r"], both.classes, draws=200)
    assert (found.seeds, alone.seeds) == (3, 0)
    assert found.high - found.low > alone.high - alone.low
    assert "the spread over the runs" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"] == [2, 3]
    assert runs_of(first) == [first]
    run("b", 1, "lr=0.5")
    with pytest.raises(UserError, match=r"b holds runs of 2 configurations \(lr=0.5; the rest by default\)"):
        compare(a, b, tmp_path / "out")


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_chosen_by_a_pattern_or_by_links(
    tmp_path: Path, configure: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    precisions, sweep = np.random.default_rng(0).random(len(CLASSES)), tmp_path / "sweep[1]"
    for name in ("seed=0,lr=0.1", "seed=0,lr=0.15", "seed=1,lr=0.1", "seed=1,lr=0.15"):
        typed = name.split(",")
        RunFolder(sweep / name).open(configure(*typed, "runtime.train_classes=3"), typed)
        RunFolder(sweep / name).write_metrics({"test/recall@1": 0.5})
        saved(sweep / name, precisions)
    with pytest.raises(UserError, match=r"2 configurations \(lr=0.1; lr=0.15\).* such as '.*") as told:
        runs_of(sweep)
    pattern = Path(str(told.value).split("'")[1])  # not *lr=0.1*, which matches both
    assert runs_of(pattern) == [sweep / "seed=0,lr=0.1", sweep / "seed=1,lr=0.1"]
    (tmp_path / "linked").mkdir()
    for seed in (0, 1):
        (tmp_path / "linked" / str(seed)).symlink_to(sweep / f"seed={seed},lr=0.15")
    (tmp_path / "linked" / "circle").symlink_to(tmp_path / "linked")
    assert len(runs_of(tmp_path / "linked")) == 2
    (sweep / "latest").symlink_to(sweep / "seed=1,lr=0.15")
    (tmp_path / "sweep").symlink_to(sweep)
    for folder in (sweep, tmp_path / "linked" / ".." / "sweep[1]", tmp_path / "sweep"):
        assert len(leaves([folder])) == 4
        assert all(run.folder.name != "latest" for run in leaves([folder]))
    place = tmp_path / "sweep"
    monkeypatch.setattr("sys.argv", ["compare", f"{place}/*lr=0.1", f"{place}/*lr=0.15", "--draws", "100"])
    main()
    assert (sweep / "lr=0.15_compared_with_lr=0.1" / "comparison.json").exists()
    one = sweep / "seed=0,lr=0.15"
    monkeypatch.setattr("sys.argv", ["compare", f"{place}/*lr=0.1", str(one), "--draws", "100"])
    main()
    assert (one / "compared_with_sweep[1]_lr=0.1" / "comparison.json").exists()
    monkeypatch.setattr("sys.argv", ["compare", f"{place}/*lr=0.7*", f"{place}/*lr=0.15"])
    with pytest.raises(SystemExit, match="2"):
        main()


def test_folds_are_paired(tmp_path: Path, configure: Callable[..., DictConfig]) -> None:
    """A fold that is hard for both sides tells nothing of their difference; folders in another order change nothing."""
    rng = np.random.default_rng(1)
    gain, of_fold = 0.01 * rng.random((4, 2)), np.array([0.1, 0.5, 0.2, 0.9])

    def side(name: str, column: int, folds: Sequence[int], *options: str, repeats: int = 1) -> Path:
        for place, fold in enumerate(folds):
            for repeat in range(repeats):
                given = ["protocol=mlrc", f"protocol.fold={fold}", f"protocol.repeat={repeat}", *options]
                folder = tmp_path / name / f"{place}.{repeat}"
                RunFolder(folder).open(configure("runtime.train_classes=3", *given), given)
                RunFolder(folder).write_metrics({"test/map@r": 0.5})
                score = of_fold[fold] + gain[fold, column] + 0.05 * (repeat - (repeats - 1) / 2)
                saved(folder, np.full(len(CLASSES), score))
        return tmp_path / name

    a, b = side("a", 0, (0, 1, 2, 3)), side("b", 1, (3, 1, 0, 2), "lr=0.5")
    both = paired(runs_of(a), runs_of(b))
    steps = gain[:, 1] - gain[:, 0]
    standard_error = sem(steps)
    assert both.spreads["map@r"] == Spread(pytest.approx(standard_error**2), 3)
    found = over_classes(*both.values["map@r"], both.classes, draws=100, spread=both.spreads["map@r"])
    assert (found.estimate, found.p) == (pytest.approx(steps.mean()), pytest.approx(ttest_1samp(steps, 0).pvalue))
    twice = paired(runs_of(side("twice", 0, (2, 0, 1, 3), "protocol.repeats=2", repeats=2)), runs_of(b))
    assert twice.runs == (8, 4)
    assert twice.spreads["map@r"] == Spread(pytest.approx(standard_error**2), 3)
    short = side("short", 0, (0, 1, 2))
    apart = paired(runs_of(a), runs_of(short)).spreads["map@r"]
    assert apart is not None
    assert (apart.freedom, apart.variance > 100 * standard_error**2) == (5, True)


def test_mistakes(tmp_path: Path) -> None:
    precision = np.linspace(0, 1, len(CLASSES))
    a = saved(tmp_path / "a", precision)
    b = saved(tmp_path / "b", precision, paths=np.array([f"other/{i}" for i in range(len(CLASSES))]))
    with pytest.raises(UserError, match="were tested on different queries"):
        paired([a], [b])
    c = saved(tmp_path / "c", precision, best_rank=np.zeros(len(CLASSES), int))
    with pytest.raises(UserError, match="among different galleries"):
        paired([a], [c])
    d = saved(tmp_path / "d", precision, gallery=np.array("0123456789abcdef"))
    with pytest.raises(UserError, match="among different galleries"):
        paired([a], [d])
    assert paired([d], [saved(tmp_path / "e", precision, gallery=np.array("0123456789abcdef"))]).runs == (1, 1)
    (tmp_path / "linked").symlink_to(d)
    with pytest.raises(UserError, match="d is on both sides: name a side that does not hold it"):
        paired([a, d], [tmp_path / "linked"])
    with pytest.raises(UserError, match=r"there is no .*nowhere/queries\.npz"):
        paired([a], [tmp_path / "nowhere"])
    (a / "queries.npz").write_bytes(b"PK\x03")
    with pytest.raises(UserError, match=r"queries\.npz is damaged"):
        paired([a], [b])
    with pytest.raises(UserError, match="--draws=3"):
        compare(b, b, tmp_path / "out", draws=3)
    with pytest.raises(UserError, match=r"--draws=4000000000 .* at most 10000000"):
        compare(b, b, tmp_path / "out", draws=4 * 10**9)
    with pytest.raises(UserError, match="nothing to compare"):
        paired([c], [saved(tmp_path / "f", precision, best_rank=np.zeros(len(CLASSES), int))])
    with pytest.raises(UserError, match="--seed=-1"):
        compare(b, b, tmp_path / "out", seed=-1)
    with pytest.raises(UserError, match="one class"):
        over_classes(precision, precision, np.zeros(len(CLASSES)))


def test_runs_that_score_alike(tmp_path: Path) -> None:
    """Draws that are all the same have a picture too."""
    a, b = (saved(tmp_path / name, np.linspace(0, 1, len(CLASSES))) for name in "ab")
    found = compare(a, b, tmp_path / "out", draws=100)
    assert found["map@r"]["classes"].p == 1


def test_brackets_of_a_folder_are_no_pattern(tmp_path: Path) -> None:
    for name in ("a [x]/M=1", "a [x]/M=2", "a x/M=1"):
        (tmp_path / name).mkdir(parents=True)
    assert matched(tmp_path / "a [x]" / "M=*") == [tmp_path / "a [x]" / "M=1", tmp_path / "a [x]" / "M=2"]
    assert matched(tmp_path / "a [[]x]" / "M=[2]") == [tmp_path / "a [x]" / "M=2"]
    assert matched(tmp_path / "a*x*" / "M=1") == [tmp_path / "a [x]" / "M=1", tmp_path / "a x" / "M=1"]
    assert matched(tmp_path / "b" / "*") == []


@pytest.mark.slow
def test_the_picture_says_which_side_is_subtracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, tuple[float, float], str]] = []

    def kept(draws: Mapping[str, np.ndarray], estimate: float, ends: tuple[float, float], title: str) -> Figure:
        drawn.append((estimate, ends, title))
        return difference_plot(draws, estimate, ends, title)

    monkeypatch.setattr("dml.figures.summaries.difference_plot", kept)
    values = np.random.default_rng(0).random(len(CLASSES)) / 2
    a, b = saved(tmp_path / "low", values), saved(tmp_path / "high", values + 0.25 * values)
    found = compare(a, b, tmp_path / "out", draws=100)["map@r"]["classes"]
    estimate, ends, _ = next(one for one in drawn if one[2] == "MAP@R: high minus low")
    assert estimate == pytest.approx(values.mean() / 4)
    assert ends == (found.low, found.high)
