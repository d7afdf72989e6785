"""What is published of a run: loaded, checked, put on a stand-in of the hub, and altered."""

import errno
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import dml
from dml.configuration.composition import composed
from dml.errors import Unfaithful, UserError
from dml.evaluation.evaluator import Embedded
from dml.evaluation.protocol import Conventional
from dml.evaluation.reidentification import rank_across_cameras
from dml.evaluation.rounding import rank_bounds
from dml.evaluation.splits import Split
from dml.hub import _told, folder_of, front_matter, parted, upload
from dml.inference import tested
from dml.inference.embedding import Trained
from dml.inference.publish import _without_places, publish
from dml.inference.tested import portable
from dml.inference.verify import _again, _allowed, command, junk, verify
from dml.models.products import products
from dml.reporting.summary import write_summary
from dml.runs.scores import Queries
from dml.training.run import run as train
from tests.conftest import TINY
from tests.hub import TOKEN, Hub, Model, hub
from tests.runs import embed_images, photographs

pytestmark = pytest.mark.usefixtures("one_thread")

LICENCES = {"weights": "cc-by-4.0", "data": "none: rendered here", "backbone": None}

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of ABE-2 on rendered characters."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    options = [*TINY, "method=abe", "method.M=2"]
    places = [f"paths.output_dir={folder}", f"paths.cache_dir={folder.parent / 'cache'}", "paths.data_dir=/somewhere"]
    train(composed(*places, *options), options)
    return folder


@pytest.fixture
def published(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is published of it, with the folder of caches elsewhere."""
    monkeypatch.setenv("DML_CACHE", str(tmp_path / "cache"))
    publish(run, tmp_path / "published", LICENCES)
    return tmp_path / "published"


@pytest.fixture
def server() -> Iterator[Hub]:
    with hub() as one:
        yield one


def started(server: Hub, home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, whose hub is the stand-in: the client reads where it is at the start."""
    said = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DML_CACHE": str(home / "cache"), **said, **more}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=home, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def differences(place: Path) -> str:
    with pytest.raises(Unfaithful, match="differs from what it says") as caught:
        command(place, None, batch_size=64, device="cpu")
    return str(caught.value)


@pytest.mark.slow
def test_it_embeds_as_the_run_does(run: Path, published: Path, tmp_path: Path) -> None:
    files = photographs(tmp_path / "photos", classes=1)
    expected = embed_images(run, files, device="cpu", batch_size=2)
    embedder = dml.load(published, device="cpu")
    np.testing.assert_array_equal(embedder.embed(files, batch_size=2), expected)
    assert embedder.card["weights"] == dml.load(run, device="cpu").card["weights"]


def test_it_holds_nothing_that_runs_and_no_path_of_the_machine(published: Path, tmp_path: Path) -> None:
    names = ["README.md", "config.yaml", "metrics.json", "model.safetensors", "provenance.json", "published.json"]
    assert sorted(file.name for file in published.iterdir()) == [*names, "queries.npz"]
    for file in published.iterdir():
        assert not file.stat().st_mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        content = file.read_bytes()
        for place in ("/somewhere", str(tmp_path.parent.parent), str(Path.home()) + "/"):
            assert place.encode() not in content, file
    with np.load(published / "queries.npz", allow_pickle=False) as arrays:
        assert all(arrays[name].dtype != object for name in arrays.files)


def test_a_card_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\ndate: 2024-02-30\n---\n")
    assert front_matter(tmp_path / "README.md") == {}


def test_commands_hold_no_place_of_the_machine() -> None:
    expected = {
        "/home/me/python": "python",
        "dml.run": "dml.run",
        "dataset.root='/home/me/photos (2024)'": "dataset.root='photos (2024)'",
        "dataset.root=[/home/me/a,/home/me/b]": "dataset.root=[a,b]",
        "dataset.csv=../client/a.csv": "dataset.csv=a.csv",
        "hydra.searchpath=[file:///home/me/a, file:///home/me/b]": "hydra.searchpath=[a, b]",
        "x=[ /home/me]": "x=[ me]",
        "dataset={root: /home/me/a, csv: b/c}": "dataset={root: a, csv: c}",
        "dataset={root:/home/me/a}": "dataset={root:a}",
        "backbone.weights=https://me:secret@a.b:8/c/w.pth?token=secret#part": "backbone.weights=https://a.b:8/c/w.pth",
        "backbone={weights: https://a.b/w.pth?token=secret}": "backbone={weights: https://a.b/w.pth}",
        "+x={a: /home/me/b,c:1}": "+x={a: b,c:1}",
        "backbone.weights=file:///home/me/w.pth": "backbone.weights=w.pth",
        "backbone.weights=client/w.pth": "backbone.weights=w.pth",
        "backbone.weights=imagenet": "backbone.weights=imagenet",
        "backbone.weights=https://a.b/c/w.pth": "backbone.weights=https://a.b/c/w.pth",
        "backbone.weights=hf://me/model@v1": "backbone.weights=hf://me/model@v1",
        "sampler={a:1/2}": "sampler={a:1/2}",
        "lr=1e-3": "lr=1e-3",
        "head=a b": "head=a b",
    }
    found = _without_places({"command": shlex.join(expected), "date": "today"})
    assert shlex.split(found["command"]) == list(expected.values())
    assert found["date"] == "today"


def test_a_configuration_holds_no_place_of_the_machine() -> None:
    address = "https://me:secret@a.b/c/w.pth?token=secret"
    backbone = {"weights": "file:///home/me/w.pth", "weights_dir": "client", "more": ["./a", "b/c", address]}
    data = {"root": ["client/a", "/home/me/b"], "csv": None, "name": "b/c"}
    paths = {"data_dir": "/home/me/data", "cache_dir": "c", "output_dir": "o", "sweep_dir": "s"}
    found = portable({"backbone": backbone, "dataset": data, "paths": paths, "other": "/home/me/data/x/y"})
    more = ["data/a", "b/c", "https://a.b/c/w.pth"]
    assert found["backbone"] == {"weights": "data/w.pth", "weights_dir": "data/client", "more": more}
    assert found["dataset"] == {"root": ["data/a", "data/b"], "csv": None, "name": "b/c"}
    assert found["other"] == "data/x/y"


def test_its_card(run: Path, published: Path) -> None:
    card = ModelCard.load(published / "README.md")
    metrics = json.loads((run / "metrics.json").read_text())
    assert card.data.license == "cc-by-4.0"
    assert {one.metric_type: one.metric_value for one in card.data.eval_results}["map@r"] == metrics["test/map@r"]
    for said in (
        'dml.load("published")',
        f"| Recall@1 | {metrics['test/recall@1']:.4f} | {metrics['test/recall@1/low']:.4f} to ",
        "72 test images of 12 unseen classes",
        "python -m dml.run ",
        "loss: SquaredContrastive",
        "the training images: none: rendered here",
        "training began from random weights",
    ):
        assert said in card.text, said


def test_a_licence_that_the_hub_has_no_word_for(run: Path, tmp_path: Path) -> None:
    publish(run, tmp_path / "own", LICENCES | {"weights": "for the members\n  of our club"})
    data = ModelCard.load(tmp_path / "own" / "README.md").data
    assert (data.license, data.license_name) == ("other", "for the members of our club")
    assert verify(tmp_path / "own", device="cpu").differences == []


@pytest.mark.slow
def test_it_is_verified(run: Path, published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (run, published):
        command(place, None, batch_size=128, device="cpu")
        said = capsys.readouterr().out
        assert f"{place}: verified. The ranks of all 72 queries are as recorded" in said


@pytest.mark.slow
def test_it_is_the_same_training_as_the_run(
    run: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "both" / "run", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(published, tmp_path / "both" / "published")
    write_summary([tmp_path / "both"], tmp_path / "out")
    (row,) = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert row["runs"] == [str(tmp_path / "both" / "published")]
    said = capsys.readouterr().err
    assert f"Left out: {tmp_path / 'both' / 'run'}, the same training as {tmp_path / 'both' / 'published'}." in said


CHOSEN = [
    ["protocol=random_class_split", "protocol.split=0"],
    ["protocol.select=best_test"],
    ["method=gsp"],  # whose head has a state of its own
]


@pytest.mark.slow
@pytest.mark.parametrize("options", CHOSEN)
def test_it_is_the_checkpoint_that_the_figures_are_of(tmp_path: Path, options: list[str]) -> None:
    """Not the last one, and data that lay in a folder of any name is found below another."""
    photographs(tmp_path / "photos", classes=8, each=4)
    data = ["dataset=folder", f"dataset.root={tmp_path / 'photos'}", "backbone=small", "transform=plain"]
    places = [f"paths.output_dir={tmp_path / 'run'}", f"paths.cache_dir={tmp_path / 'cache'}"]
    tiny = [one for one in TINY if not one.startswith("dataset")]
    chosen = [*tiny, *data, *options, "sampler.batch_size=8", "lr=0.1", "protocol.clustering=false"]
    train(composed(*places, *chosen), chosen)
    publish(tmp_path / "run", tmp_path / "published", LICENCES)
    assert str(tmp_path) not in (tmp_path / "published" / "config.yaml").read_text()
    best = "The figures are of the best checkpoint on " in (tmp_path / "published" / "README.md").read_text()
    assert best == any(option.startswith("protocol") for option in options)
    assert verify(tmp_path / "published", tmp_path, device="cpu").differences == []
    publish(tmp_path / "published", tmp_path / "again", LICENCES)
    with pytest.raises(UserError, match=r"no folder .*empty/photos: name with --data the folder in which photos lies"):
        verify(tmp_path / "published", tmp_path / "empty", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_run_in_half_precision_is_verified(tmp_path: Path, precision: str) -> None:
    places = [f"paths.output_dir={tmp_path / 'run'}", f"paths.cache_dir={tmp_path / 'cache'}"]
    train(composed(*places, *TINY, f"trainer.precision={precision}", "trainer.max_steps=1"), [])
    found = verify(tmp_path / "run", device="cpu")
    assert found.differences == []
    assert "The ranks of all 72 queries are as recorded" in found.said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test/recall@1/low", "test/map@r/high"])
def test_ends_of_intervals_are_compared(run: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    (tmp_path / "run" / "metrics.json").write_text(json.dumps(metrics | {name: metrics[name] + 0.1}))
    (said,) = verify(tmp_path / "run", device="cpu").differences
    assert said.startswith("1 of ")
    assert f"figures are not what the weights give: {name} " in said


def test_how_far_a_figure_may_be_off() -> None:
    """Means over the queries by two of them, others by 0.002."""
    for name in (
        "recall@1",
        "learners/mean/recall@10",
        "precision@1",
        "recall@1/low",
        "map@r",
        "learners/0/r_precision",
    ):
        assert _allowed(name, 100) == 0.02
        assert _allowed(name, 10_000) == 0.002
    for name in ("learners/correlation", "learners/self_cosine"):
        assert _allowed(name, 100) == 0.002


def test_queries_in_any_order_and_without_a_positive_are_verified_as_the_training_tests_them() -> None:
    """A protocol may name its queries in any order, and a mean over a tenth of them is off by more for each."""
    draw = np.random.default_rng(0)
    labels = np.concatenate([np.repeat(np.arange(50), 2), np.arange(50, 1050)])
    learners = torch.as_tensor(draw.normal(size=(50, 1, 6))[labels % 50] + 0.3 * draw.normal(size=(1100, 1, 6)))
    learners = torch.nn.functional.normalize(learners.float(), dim=-1)
    split, protocol = Split(np.arange(0), draw.permutation(1100), None), Conventional(clustering=False)
    embedded = Embedded(learners, torch.as_tensor(labels), torch.arange(1100))  # as an evaluation collects them
    metrics, ranking = protocol.score(embedded, split, "test", final=True), protocol.ranking(split, embedded)
    assert ranking is not None
    assert (ranking.positives > 0).sum() == 100
    queries = Queries(np.arange(1100).astype(str), labels.astype(str), ranking.best_rank, ranking.values)
    trained: Any = SimpleNamespace(method=SimpleNamespace(device=torch.device("cpu"), groups=lambda: None))
    trained.config = SimpleNamespace(trainer=SimpleNamespace(precision="32-true", matmul="highest"))

    class Known(tested.Tested):
        def learners(self, trained: Trained, rows: np.ndarray, batch_size: int) -> torch.Tensor:
            return learners[rows]

    known = Known(cast(Any, SimpleNamespace(labels=labels)), split, protocol)
    for off, differs in ((0.0, False), (0.02, False), (0.03, True)):
        recorded = metrics | {"test/recall@1": metrics["test/recall@1"] - off}
        assert bool(_again(trained, known, recorded, queries, 64)[0]) == differs


def altered_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if name.endswith("weight"))
    weights[name] = weights[name] + 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "step": "10"})


def altered_figure(folder: Path) -> None:
    metrics = json.loads((folder / "metrics.json").read_text())
    metrics["test/map@r"] += 0.01
    (folder / "metrics.json").write_text(json.dumps(metrics))


def card_without_licence(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace("license: cc-by-4.0\n", ""))


def card_that_boasts(folder: Path) -> None:
    lines = (folder / "README.md").read_text().splitlines()
    told = ["| Recall@1 | 0.9999 |  |  |" if line.startswith("| Recall@1 |") else line for line in lines]
    (folder / "README.md").write_text("\n".join(told) + "\n")


def front_that_boasts(folder: Path) -> None:
    metrics = json.loads((folder / "metrics.json").read_text())
    text = (folder / "README.md").read_text()
    assert f"value: {metrics['test/map@r']}\n" in text
    (folder / "README.md").write_text(text.replace(f"value: {metrics['test/map@r']}\n", "value: 0.9\n"))


def card_with_two_values(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text + "\n| Recall@1 | 0.9999 |  |  |\n")


def missing_ranks(folder: Path) -> None:
    (folder / "queries.npz").unlink()


def ranks_that_nobody_names(folder: Path) -> None:
    missing_ranks(folder)
    manifest = json.loads((folder / "published.json").read_text())
    manifest["files"].pop("queries.npz")
    (folder / "published.json").write_text(json.dumps(manifest))


def no_figures(folder: Path) -> None:
    missing_ranks(folder)
    (folder / "metrics.json").write_text("{}")


WRONG: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "tensor": (
        altered_tensor,
        ["model.safetensors was altered: ", "queries have another rank than recorded, such as "],
    ),
    "figure": (
        altered_figure,
        [
            "metrics.json was altered",
            "the ranks in queries.npz make it",
            "test/map@r",
            "README.md has another value of MAP@R",
        ],
    ),
    "licence": (card_without_licence, ["README.md names no licence of the weights"]),
    "card": (card_that_boasts, ["README.md has another value of Recall@1 than metrics.json"]),
    "front": (front_that_boasts, ["the front matter of README.md says map@r 0.9, metrics.json "]),
    "second": (card_with_two_values, ["README.md has a second value of Recall@1"]),
    "ranks": (missing_ranks, ["queries.npz is missing"]),
    "unnamed": (ranks_that_nobody_names, ["queries.npz, the ranks of the queries, is missing"]),
    "figures": (no_figures, ["metrics.json was altered", "metrics.json has none of the figures that a test gives"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_was_altered_is_told(published: Path, name: str) -> None:
    alter, told = WRONG[name]
    alter(published)
    said = differences(published)
    for one in told:
        assert one in said, said


def test_altered_with_its_manifest(run: Path, published: Path) -> None:
    """The test images tell it then."""
    altered_tensor(published)
    manifest = json.loads((published / "published.json").read_text())
    manifest["files"].pop("model.safetensors")
    (published / "published.json").write_text(json.dumps(manifest))
    said = differences(published)
    assert "was altered" not in said
    assert "another rank than recorded" in said


@pytest.mark.slow
@pytest.mark.parametrize("word", ["highest", "high"])
def test_a_run_whose_products_were_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """On a device that rounds them in another way, cosines are off by a thousandth."""

    def rounded(trained: Trained, images: torch.Tensor) -> torch.Tensor:
        learners = embed(trained, images)
        return torch.nn.functional.normalize(learners + 1e-3 * torch.randn(learners.shape, generator=draw), dim=-1)

    places = [f"paths.output_dir={tmp_path / 'run'}", f"paths.cache_dir={tmp_path / 'cache'}"]
    with products("highest"):  # what training sets would stay
        train(composed(*places, *TINY, f"trainer.matmul={word}", "trainer.max_steps=1"), [])
    embed, draw = Trained.embed, torch.Generator().manual_seed(0)
    monkeypatch.setattr(Trained, "embed", rounded)
    found = verify(tmp_path / "run", device="cpu").differences
    assert any("another rank than recorded" in one for one in found) == (word == "highest")


def test_ranks_that_rounding_explains() -> None:
    """Against a loop that moves every cosine by the tolerance, for and against the query."""
    draw = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(40, 5, generator=draw, dtype=torch.float64), dim=1)
    labels, tolerance = torch.arange(40) // 4, 0.05
    labels[-1] = 99  # alone
    low, high = rank_bounds(points, labels, tolerance)
    for query in range(40):
        cosines = {i: float(points[query] @ points[i]) for i in range(40) if i != query}
        same = [cosine for i, cosine in cosines.items() if labels[i] == labels[query]]
        others = [cosine for i, cosine in cosines.items() if labels[i] != labels[query]]
        if not same:
            assert (low[query], high[query]) == (0, 0)
            continue
        best = sum(other - tolerance > max(same) + tolerance for other in others) + 1
        worst = sum(other + tolerance >= max(same) - tolerance for other in others) + 1
        assert (int(low[query]), int(high[query])) == (best, worst)
    apart = rank_bounds(points, labels, tolerance, gallery=points[:8], gallery_labels=labels[:8])
    assert apart[0][8:].max() == 0  # no positive there


def test_ranks_across_cameras() -> None:
    """Without a tolerance they are those of the protocol."""
    draw = torch.Generator().manual_seed(1)
    points = torch.nn.functional.normalize(torch.randn(60, 4, generator=draw), dim=1)
    labels, cameras = torch.randint(-1, 6, (60,), generator=draw), torch.randint(0, 3, (60,), generator=draw)
    labels[:20] = labels[:20].clamp(min=0)
    rows = torch.arange(60)
    parts = [Embedded(points[at, None], labels[at], rows[at]) for at in (rows[:20], rows[20:])]
    query, gallery = parts
    expected = rank_across_cameras(
        points[:20],
        labels[:20],
        cameras[:20],
        gallery=points[20:],
        gallery_labels=labels[20:],
        gallery_cameras=cameras[20:],
    ).best_rank
    low, high = rank_bounds(
        points[:20],
        labels[:20],
        0.0,
        gallery=points[20:],
        gallery_labels=labels[20:],
        left_out=junk(cameras.numpy(), query, gallery),
    )
    assert low.tolist() == high.tolist() == expected.tolist()
    assert expected.max() > 1


@pytest.mark.slow
def test_licences_are_not_made_up(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="under which licence you publish the weights: say it with --licence"):
        publish(run, tmp_path / "a", {"data": "mine"})
    with pytest.raises(UserError, match="the training images came: say it with --data-licence"):
        publish(run, tmp_path / "a", {"weights": "mit"})
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", Mock(side_effect=EOFError))  # Ctrl-D
    with pytest.raises(UserError, match="nothing is published until you say under which licence you publish"):
        publish(run, tmp_path / "a", {"data": "mine"})
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr("builtins.input", lambda question: "cc0-1.0")
    publish(run, tmp_path / "asked", {"data": "mine"})
    assert "license: cc0-1.0" in (tmp_path / "asked" / "README.md").read_text()
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "copy" / "provenance.json").unlink()  # nothing tells that training began from random weights
    with pytest.raises(UserError, match="the backbone's weights came: say it with --backbone-licence"):
        publish(tmp_path / "copy", tmp_path / "b", LICENCES)


def test_mistakes(run: Path, published: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: publish(tmp_path, tmp_path / "out", LICENCES), "is not the folder of a run"),
        (lambda: publish(run, tmp_path / "full", LICENCES), "is not empty, and holds nothing published"),
        (lambda: publish(run, tmp_path / "out", LICENCES, "me/model"), "me/model is no address of a model"),
        (lambda: publish(run, tmp_path / "out", {}, "hf://me/model@v1"), "leave @v1 out"),  # before it asks
        (lambda: publish(run, tmp_path / "out", {**LICENCES, "weights": " "}), "say it with --licence"),
        (lambda: verify(tmp_path / "full"), "neither the folder of a run nor of a published embedding"),
        (lambda: verify(run, tmp_path), "leave --data out"),
        (lambda: dml.load(published, "best_on_test"), "of one checkpoint only: leave --checkpoint best_on_test out"),
        (lambda: dml.load("hf://me"), "no address of a model: write hf://owner/name"),
        (lambda: dml.load("http://me/model"), "no address of a model"),
        (lambda: upload(published, [], "hf://me/model@v1", "x"), "leave @v1 out"),
        (lambda: dml.load(tmp_path / "nowhere"), "there is no folder"),
    ]
    for call, told in cases:
        with pytest.raises(UserError, match=told):
            call()
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "full" / "thesis.tex").exists()


@pytest.mark.slow
def test_what_was_interrupted_is_published_by_the_same_command(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dml.inference.publish.card", told)
        with pytest.raises(KeyboardInterrupt):
            publish(run, tmp_path / "published", LICENCES)
    with pytest.raises(UserError, match="neither the folder of a run nor of a published embedding"):
        verify(tmp_path / "published")
    publish(run, tmp_path / "published", LICENCES)
    assert not list((tmp_path / "published").glob(".*"))
    verify(tmp_path / "published")


def test_a_published_folder_is_not_published_into_itself(published: Path, tmp_path: Path) -> None:
    (published / "similarities.png").write_bytes(b"a picture")
    before = {file.name: file.read_bytes() for file in published.iterdir()}
    (tmp_path / "link").symlink_to(published)
    for folder in (published, tmp_path / "link"):
        with pytest.raises(UserError, match="holds what is to be published: name another folder with -o"):
            publish(published, folder, LICENCES)
        assert {file.name: file.read_bytes() for file in published.iterdir()} == before


def test_addresses(tmp_path: Path) -> None:
    assert parted("hf://me/a.model-1@refs/pr/2") == ("me/a.model-1", "refs/pr/2")
    assert parted("hf://me/model") == ("me/model", None)
    assert folder_of("runs/a") == Path("runs/a")
    assert folder_of(tmp_path) == tmp_path


@pytest.mark.exhaustive
def test_on_the_hub(run: Path, tmp_path: Path, server: Hub) -> None:
    address = "hf://me/characters"
    server.models["me/characters"] = Model()
    server.models["me/characters"].commit({"similarities.png": b"of an earlier run", "notes.txt": b"somebody's"}, set())
    licences = ["--licence", "cc-by-4.0", "--data-licence", "none"]
    publish(run, tmp_path / "out", {"weights": "cc-by-4.0", "data": "none"})
    (tmp_path / "out" / "search").mkdir()  # it was tried out
    (tmp_path / "out" / "search" / "vectors.npz").write_bytes(b"paths of this machine")
    (tmp_path / "out" / "threshold.json").write_text("{}")
    told = started(
        server, tmp_path, "-m", "dml.publish", str(run), "-o", str(tmp_path / "out"), *licences, "--to", address
    )
    assert told.returncode == 0, told.stderr
    assert f"On the hub: {server.endpoint}/me/characters" in told.stdout
    files = list(server.models["me/characters"].commits.values())[-1]
    assert files.pop("notes.txt") == b"somebody's"
    of_out = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir() if file.is_file()}
    assert files == {name: content for name, content in of_out.items() if name != "threshold.json"}

    photos = photographs(tmp_path / "photos", classes=1)
    places = [f"paths.output_dir={tmp_path / 'began'}", f"paths.cache_dir={tmp_path / 'cache'}"]
    options = [*places, *TINY, "backbone.train=none", f"backbone.weights={address}", "trainer.max_steps=1"]
    words = [address, str(tmp_path / "found.npy"), *map(str, photos), "--", *options]
    fetched = started(server, tmp_path, "-c", FETCHED, *words)
    assert fetched.returncode == 0, fetched.stderr
    assert f"{address}: verified" in fetched.stdout
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), embed_images(run, photos, device="cpu"))
    (start,) = json.loads((tmp_path / "began" / "provenance.json").read_text())
    assert start["weights"]["licence"] == "cc-by-4.0"

    asked = len(server.asked)
    offline = started(server, tmp_path, "-c", OFFLINE, address, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert len(server.asked) == asked


FETCHED = """
import sys
import dml, numpy
from dml.configuration.composition import composed
from dml.inference.verify import command
from dml.training.run import run
address, out, *rest = sys.argv[1:]
at = rest.index("--")
numpy.save(out, dml.load(address, device="cpu").embed(rest[:at]))
command(address, None, batch_size=128, device="cpu")
run(composed(*rest[at + 1:]), rest[at + 1:])
"""

OFFLINE = "import sys; from dml.hub import folder_of; assert (folder_of(sys.argv[1]) / 'model.safetensors').exists()"


REFUSED = {
    "folder_of('hf://me/nothing')": "hf://me/nothing: the hub has no such model",
    "folder_of('hf://me/gated')": "its owner restricts access",
    "folder_of('hf://me/empty@v9')": "the model has no such revision",
    "upload(Path('.'), [], 'hf://me/model', '')": "the hub asks who you are: log in",
}

CALLS = """
import sys
from pathlib import Path
from dml.errors import UserError
from dml.hub import folder_of, upload
for call in sys.argv[1:]:
    try:
        eval(call)
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_hub_that_refuses(tmp_path: Path, server: Hub) -> None:
    server.models["me/empty"] = Model()
    server.models["me/empty"].commit({"README.md": b""}, set())
    found = started(server, tmp_path, "-c", CALLS, *REFUSED, HF_TOKEN="wrong")
    assert found.returncode == 0, found.stderr
    for told, line in zip(REFUSED.values(), found.stdout.splitlines(), strict=True):
        assert told in line
    assert list(server.models) == ["me/empty"]


@pytest.mark.parametrize(
    ("error", "sending", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), False, "the hub's cache on this computer cannot be written"),
        (ConnectionError("nobody answers"), True, r"the hub cannot be reached \(nobody answers\): repeat the command"),
        (ConnectionError("nobody answers"), False, "nothing of the model is in its cache here"),
    ],
)
def test_what_is_in_the_way_of_the_hub(error: Exception, sending: bool, told: str) -> None:
    with pytest.raises(UserError, match=told), _told("hf://me/model", sending):
        raise error


@pytest.mark.slow
def test_a_hub_that_is_not_there(tmp_path: Path, server: Hub) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    found = started(server, tmp_path, "-m", "dml.verify", "hf://me/nothing", **nowhere)
    assert found.returncode == 2
    assert found.stderr.startswith("dml: hf://me/nothing: the hub cannot be reached, and nothing of the model is in")
    assert len(found.stderr.strip().splitlines()) == 1
