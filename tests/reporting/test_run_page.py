"""The page of a run: what it says, and what a browser makes of it."""

import dataclasses
import html
import io
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from torch.nn import functional as F

from dml.configuration.composition import CONF
from dml.data.paths import Paths
from dml.data.records import Records
from dml.evaluation.evaluator import Embedded
from dml.evaluation.identities import OneImageGallery
from dml.evaluation.interval import intervals
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import Split
from dml.figures.embeddings import embedding_map
from dml.figures.sprites import sprites
from dml.reporting.explorer import explorer
from dml.reporting.report import Table, _examples, _of_learners, write_report
from dml.reporting.retrieved import Retrieved
from dml.runs.folder import RunFolder
from dml.runs.starts import note_start
from tests.conftest import TINY

EVIL = "</script><b>&amp;\"'"


def made(images: int, classes: int, learners: int = 2) -> Retrieved:
    """Images of one colour a class, embedded around a point a class, some of them nearer to another's."""
    random = np.random.default_rng(0)
    labels = np.sort(np.arange(images) % classes)
    colours = random.integers(0, 256, (classes, 3))
    records = Records(
        "made",
        Paths.of(f"{row}.png" for row in range(images)),
        labels,
        np.array(["test"] * images),
        [f"class {c} {EVIL if c == 0 else ''}".strip() for c in range(classes)],
        lambda row: Image.new("RGB", (40, 30), tuple(int(c) for c in colours[labels[row]])),
    )
    points = torch.as_tensor(random.normal(size=(classes, learners, 8)))[torch.as_tensor(labels)]
    points = points + 0.8 * torch.as_tensor(random.normal(size=(images, learners, 8)))
    embedded = Embedded(F.normalize(points.float(), dim=-1), torch.as_tensor(labels), torch.arange(images))
    split, protocol = Split(np.arange(0), np.arange(images), None), Conventional()
    return Retrieved(embedded, records, split, protocol, protocol.ranking(split, embedded))


def page(folder: Path, config: DictConfig, tested: Retrieved) -> tuple[Path, dict[str, Table]]:
    """`report.html` of what was tested."""
    scores = tested.protocol.score(tested.embedded, tested.split, "test", final=False)
    if tested.ranking is not None:
        scores |= {f"test/{name}": value for name, value in intervals(tested.ranking, tested.labels, 500).items()}
    metrics = scores | {"untrained/recall@1": 0.9999, "best_on_test/step": 10, "best_on_test/recall@1": 0.5}
    metrics |= {"data/train/images": 9, "data/train/classes": 3, "data/test/images": 9, "data/test/classes": 3}
    metrics |= {"model/params": 1, "model/flops": 2, "run/steps": 10, "run/seconds": 1, "run/images_per_second": 3}
    (folder / "figures").mkdir(parents=True)
    options = OmegaConf.to_container(config, resolve=False)
    assert isinstance(options, dict)
    log: list[dict[str, Any]] = [{"step": 0, "test/recall@1": 0.5}, {"step": 10, "train/loss": 1.0}]
    _, tables = write_report(folder, {str(k): v for k, v in options.items()}, metrics, tested, log, [])
    return folder / "report.html", tables


@pytest.fixture
def config(configure: Callable[..., DictConfig]) -> DictConfig:
    return configure(*TINY, "runtime.train_classes=3", "runtime.embedding_dim=8")


def test_classes_and_confusions_by_a_slow_loop() -> None:
    tested = made(60, 5)
    points, labels = tested.embedded.embeddings.flatten(1).double(), tested.labels
    distances = torch.cdist(points, points)
    distances.fill_diagonal_(torch.inf)
    first = labels[distances.argmin(1).numpy()]
    for one in tested.classes:
        own = labels == one.label
        assert (one.queries, one.recall) == (own.sum(), pytest.approx((first[own] == one.label).mean()))
    assert [one.recall for one in tested.classes] == sorted(one.recall for one in tested.classes)
    assert sum(one.count for one in tested.confusions) == (first != labels).sum() > 0
    worst = tested.confusions[0]
    a, b = (tested.records.class_names.index(name) for name in worst.names)
    assert worst.count == sum((x, y) in ((a, b), (b, a)) for x, y in zip(labels, first, strict=True))


def test_a_query_without_another_image_of_its_class_does_not_count() -> None:
    """Whether the protocol has a ranking or not."""
    tested = made(61, 60)  # 59 classes of one image, and one of two
    for one in (tested, dataclasses.replace(tested, ranking=None)):
        assert one.counted.tolist() == (np.bincount(one.labels)[one.labels] > 1).tolist()
        assert [found.queries for found in one.classes] == [2]
    outcome = explorer(tested).outcome
    assert [(outcome == kind).sum() for kind in (-1, 0, 1)] == [59, *(np.bincount(tested.right[:2], minlength=2))]
    drawn = embedding_map(np.random.default_rng(0).normal(size=(61, 2)), outcome, "as drawn by chance")
    sizes = {one.get_label(): len(one.get_offsets()) for one in drawn.axes[0].collections}
    assert sizes.pop("no query here, or none with a positive") == 59
    assert sum(sizes.values()) == 2


@pytest.mark.slow
def test_classes_are_not_called_by_the_protocol_s_figure_where_it_draws_galleries(
    tmp_path: Path, config: DictConfig
) -> None:
    whole = made(61, 5)
    tested = dataclasses.replace(whole, protocol=OneImageGallery(ks=[1, 5]), ranking=None)
    file, tables = page(tmp_path / "run", config, tested)
    assert tables["classes"].columns[2] == "nearest of all others is right"
    text = file.read_text()
    assert "these shares are not the figures above" in text
    assert "<th>queries</th><th>nearest of all others is right</th>" in text
    file, tables = page(tmp_path / "other", config, whole)
    assert tables["classes"].columns[2] == "Recall@1"
    assert "not the figures above" not in file.read_text()


@pytest.mark.slow
def test_the_command_to_copy_has_the_folders_that_were_typed(tmp_path: Path, config: DictConfig) -> None:
    run = RunFolder(tmp_path / "run")
    typed = ["method=baseline", "paths.data_dir=/x", "paths.output_dir=runs/other", "paths.cache_dir='/my cache'"]
    run.name(config, typed)
    note_start(run, config, typed)
    file, _ = page(run.path, config, made(60, 5))
    (command,) = re.findall(r'<code id="command">(.*?)</code>', file.read_text())
    places = ["paths.data_dir=/x", "paths.cache_dir='/my cache'", f"paths.output_dir={run.path}"]
    assert shlex.split(html.unescape(command)) == ["python", "-m", "dml.run", "method=baseline", *places]
    assert "/x" not in (run.path / "provenance.json").read_text()  # which is published


def test_what_a_learner_adds() -> None:
    tested = made(60, 5, learners=3)
    for i, without in enumerate(tested.recall_without):
        others = tested.embedded.embeddings[:, [j for j in range(3) if j != i]].flatten(1).double()
        distances = torch.cdist(others, others)
        distances.fill_diagonal_(torch.inf)
        assert without == pytest.approx((tested.labels[distances.argmin(1).numpy()] == tested.labels).mean())
    assert made(60, 5, learners=1).recall_without == []


def test_a_page_with_more_images_than_it_may_hold_has_some_queries_and_all_their_neighbours() -> None:
    found = explorer(made(90, 5), most=45)
    assert found.images <= 45
    assert (found.queries, found.left_out) == (5, 85)
    assert len(found.data["neighbours"]) == 5 * 8
    assert max(found.data["neighbours"]) < found.images


@pytest.mark.slow
def test_the_page_says_what_is_asked_of_it(tmp_path: Path, config: DictConfig) -> None:
    file, tables = page(tmp_path / "run", config, made(60, 5))
    text = file.read_text()
    assert re.findall(r'(?:src|href)="(?!data:|#)', text) == []
    assert "http" not in re.sub(r"<script type=.*?</script>", "", text, flags=re.DOTALL)
    assert EVIL not in text
    for part in ("95 % interval over test classes", "below the untrained network", "MPerClass", "paths.output_dir="):
        assert part in text
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert data["classes"][0] == f"class 0 {EVIL}"
    assert list(tables) == ["result", "settings", "learners", "classes", "confusions"]
    assert tables["learners"].columns[-1] == "it adds"
    (ends,) = [row for row in tables["result"].rows if row[0] == "95% interval"]
    of = dict(zip(tables["result"].columns, ends, strict=True))
    assert of["Recall@2"] == ""
    for name in ("Recall@1", "MAP@R"):
        assert re.fullmatch(r"[01]\.\d{4}–[01]\.\d{4}", of[name])
        assert f"<td>{of[name]}</td>" in text


@pytest.mark.slow
def test_the_documentation_names_the_sections_and_words_of_the_page(tmp_path: Path, config: DictConfig) -> None:
    templates = CONF.parent / "dml" / "reporting"
    source = (templates / "report.html.jinja").read_text()
    source = source.replace('{% include "explorer.html.jinja" %}', (templates / "explorer.html.jinja").read_text())
    sections = re.findall(r"<h2.*?>(.*?)</h2>", source.replace("{{ about.method }}", "the method"))
    said = (CONF.parent / "docs" / "start" / "report.md").read_text()
    bold = [one for one in re.findall(r"\*\*(.+?)\*\*", said) if one not in ("Recall@1", "Curves")]
    assert bold == sections
    file, _ = page(tmp_path / "run", config, made(60, 5))
    words = re.findall(r"^\| ([^|]+?) \|", said, re.MULTILINE)[1:]
    text = file.read_text().replace("Recall@2", "Recall@K")
    for word in {word for line in words for word in line.split(", ")} - {"NMI", "F1"}:  # not asked for here
        assert word in text, word


@pytest.fixture
def browser() -> Iterator[Any]:
    """Headless Chromium; the test is skipped where it or selenium is not installed."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium with its chromedriver is installed")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield opened
    finally:
        opened.quit()


def of_width(browser: Any, width: int) -> None:
    sizes = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)


@pytest.mark.browser
def test_a_reader_clicks_through_the_page(tmp_path: Path, config: DictConfig, browser: Any) -> None:
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.support.ui import Select

    tested = made(200, 10)
    file, _ = page(tmp_path / "run", config, tested)
    of_width(browser, 1280)
    browser.get(file.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
    wrong = int((~tested.right).sum())
    count = browser.find_element("id", "count")
    assert count.text == f"200 of 200 queries, {wrong} wrong"
    # A filter by failure, then by class.
    Select(browser.find_element("id", "by-result")).select_by_value("wrong")
    assert count.text == f"{wrong} of 200 queries, {wrong} wrong"
    assert len(browser.find_elements("css selector", "#wall .query")) == min(60, wrong)
    worst = tested.classes[0]
    Select(browser.find_element("id", "by-class")).select_by_value(str(worst.label))
    expected = np.flatnonzero((tested.labels == worst.label) & ~tested.right)
    assert count.text == f"{len(expected)} of 200 queries, {len(expected)} wrong"
    # By learner: those that learner 0 alone has right.
    for name in ("by-result", "by-class"):
        Select(browser.find_element("id", name)).select_by_value("")
    assert tested.best_of_learners is not None
    alone = (tested.best_of_learners[0] == 1) & (tested.best_of_learners[1] != 1)
    Select(browser.find_element("id", "by-learner")).select_by_value("alone 0")
    assert count.text.startswith(f"{int(alone.sum())} of 200 ")
    Select(browser.find_element("id", "by-learner")).select_by_value("")
    # A query's neighbours, by pointing at it.
    query = browser.find_elements("css selector", "#wall .query")[7]
    ActionChains(browser).move_to_element(query).perform()
    names = [one.text for one in browser.find_elements("css selector", "#panel .near .name")]
    places = tested.neighbours.indices[int(query.get_attribute("data-query"))]
    assert [name[2:] for name in names] == [tested.records.class_of(int(place)) for place in places]
    # The map, by keys and by pointing at its middle.
    before = browser.find_element("id", "panel").get_attribute("data-query")
    canvas = browser.find_element("id", "map")
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert browser.find_element("id", "panel").get_attribute("data-query") != before
    Select(browser.find_element("id", "colour")).select_by_value("class")
    # More of the wall, and the command.
    browser.find_element("id", "more").click()
    assert len(browser.find_elements("css selector", "#wall .query")) == 120
    browser.find_element("css selector", "[data-copy]").click()
    time.sleep(0.2)
    assert browser.find_element("css selector", "[data-copy]").text == "Copied"
    for width in (375, 1280):
        of_width(browser, width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        widths = "return [...document.querySelectorAll('.scroll > img')].map(image => image.clientWidth)"
        shown = browser.execute_script(widths)
        assert min(shown) > 300
        assert set(shown) == {608} if width == 375 else max(shown) <= 960  # its words are read; it scrolls
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.browser
@pytest.mark.exhaustive
def test_a_page_of_8131_images_opens_in_3_seconds(tmp_path: Path, config: DictConfig, browser: Any) -> None:
    """As many as the test of Cars196 has, of noise, which JPEG compresses less than photographs."""
    tested = made(8131, 98)
    noise = [np.random.default_rng(i).integers(0, 256, (24, 32, 3), np.uint8) for i in range(16)]
    pictures = [Image.fromarray(pixels).resize((160, 120)) for pixels in noise]
    object.__setattr__(tested.records, "open_image", lambda row: pictures[row % 16])
    file, _ = page(tmp_path / "run", config, tested)
    assert file.stat().st_size < 30_000_000
    of_width(browser, 1280)
    began = time.monotonic()
    browser.get(file.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
    assert time.monotonic() - began < 3


def test_distractors_are_no_pairs_of_one_class() -> None:
    whole = made(12, 3)
    queries, gallery = np.arange(0, 8, 2), np.arange(1, 12, 2)  # of classes 0 and 1; class 2 is in the gallery alone
    tested = Retrieved(whole.embedded, whole.records, Split(np.arange(0), queries, gallery), whole.protocol, None)
    assert tested.of_classes.labels.tolist() == [0] * 4 + [1] * 4
    assert tested.of_classes.rows.tolist() == list(range(8))


def test_confusions_are_a_share_of_both_classes_queries_and_the_most_frequent_is_first() -> None:
    tested = made(202, 40)
    points = tested.embedded.embeddings.flatten(1).double()
    distances = torch.cdist(points, points).fill_diagonal_(torch.inf)
    labels, first = tested.labels, tested.labels[distances.argmin(1).numpy()]
    names, sizes = tested.records.class_names, np.bincount(tested.labels)
    assert len(set(sizes)) > 1
    assert len(tested.confusions) > 1
    for one in tested.confusions:
        a, b = (names.index(name) for name in one.names)
        confused = ((labels == a) & (first == b)) | ((labels == b) & (first == a))
        assert one.examples == tuple(np.flatnonzero(confused))
        assert one.share == confused.sum() / (sizes[a] + sizes[b])
    counts = [one.count for one in tested.confusions]
    assert counts == sorted(counts, reverse=True)
    for of_class in tested.classes:
        taken = np.bincount(first[(labels == of_class.label) & (first != of_class.label)], minlength=40)
        assert taken.max() == (taken[names.index(of_class.taken_for)] if of_class.taken_for else 0)


def test_the_ensemble_without_a_learner_is_judged_by_queries_that_have_a_positive() -> None:
    tested = made(61, 45, learners=2)  # 29 classes of one image, and 16 of two
    assert (~tested.counted).sum() == 29
    assert tested.best_of_learners is not None
    alone = (tested.best_of_learners[:, tested.counted] == 1).mean(1)
    assert tested.recall_without == pytest.approx(alone[::-1])  # without one of two, the other is left


@pytest.mark.slow
def test_the_page_has_the_mean_cosine_over_learners_and_the_ranks_of_its_queries() -> None:
    tested = made(200, 40, learners=3)
    data, place = (found := explorer(tested, most=99)).data, found.place
    every = sorted({*data["neighbours"], *place.values()})
    assert every == list(range(found.images))
    near = np.array(data["neighbours"]).reshape(len(place), -1)
    assert len(set(data["rank"])) > 1
    for at, (query, _) in enumerate(place.items()):
        neighbours = tested.neighbours.indices[query]
        cosines = (tested.embedded.embeddings[query] * tested.embedded.embeddings[neighbours]).sum(-1).mean(1)
        shown = data["cosines"][at * near.shape[1] : (at + 1) * near.shape[1]]
        np.testing.assert_allclose(np.array(shown) / 1000, cosines, atol=6e-4)
        assert tested.ranking is not None
        assert data["rank"][at] == tested.ranking.best_rank[query]
        shown_classes = [data["classes"][data["classOf"][image]] for image in near[at]]
        assert shown_classes == [tested.records.class_names[label] for label in tested.labels[neighbours]]


def test_a_learner_adds_what_the_ensemble_lacks_without_it() -> None:
    tested = made(60, 5, learners=3)
    metrics = tested.protocol.score(tested.embedded, tested.split, "test", final=False)
    table = _of_learners(metrics, tested)
    assert list(table.columns[-3:]) == ["right alone", "ensemble without it", "it adds"]
    assert tested.best_of_learners is not None
    right = tested.best_of_learners == 1
    for i, row in enumerate(table.rows):
        others = [right[j] for j in range(3) if j != i]
        assert row[-3] == sum(mine and not a and not b for mine, a, b in zip(right[i], *others, strict=True))
        assert float(row[-1]) == pytest.approx(metrics["test/recall@1"] - float(row[-2]), abs=1e-4)
    assert len({row[-1] for row in table.rows}) > 1


def test_examples_of_a_class_are_its_wrong_queries() -> None:
    tested = made(60, 5)
    shown = explorer(tested)
    found = _examples(tested, shown)
    assert set(found) == {one.label for one in tested.classes if one.recall < 1}
    for label, images in found.items():
        wrong = np.flatnonzero((tested.labels == label) & ~tested.right)
        assert images == wrong[:4].tolist()  # all images are on the page, in their order


def test_thumbnails_fill_their_sheets_row_by_row() -> None:
    found = sprites(lambda row: Image.new("RGB", (30, 30), (row, 255 - row, 128)), range(0, 200, 10))
    (sheet,) = (Image.open(io.BytesIO(content)) for content in found.sheets)
    assert sheet.size == (16 * found.side, 2 * found.side)
    for at in range(20):
        column, line = at % 16, at // 16
        middle = sheet.getpixel((column * found.side + found.side // 2, line * found.side + found.side // 2))
        assert middle == pytest.approx((10 * at, 255 - 10 * at, 128), abs=4)
