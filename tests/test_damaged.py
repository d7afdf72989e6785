"""Run folders of which anything may have become since: every command says so in one sentence."""

import contextlib
import importlib
import io
import random
import shutil
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig

from dml.analysis.comparison import read_queries
from dml.errors import UserError
from dml.runs import provenance
from dml.runs.folder import RunFolder
from dml.runs.log import read_metrics
from dml.runs.reading import read_metrics_json
from dml.runs.scores import read_embeddings
from dml.training.run import run
from tests.conftest import TINY
from tests.runs import photographs

Configure = Callable[..., DictConfig]
Write = Callable[[Path], object]


def numbers(count: int = 6) -> dict[str, np.ndarray]:
    return {
        "paths": np.array([f"{i}.png" for i in range(count)]),
        "classes": np.array(["a", "b"] * (count // 2)),
        "best_rank": np.ones(count, np.int64),
        "map@r": np.full(count, 0.5),
    }


@pytest.mark.parametrize(
    "changed",
    [
        {name: values[:0] for name, values in numbers().items()},
        *({name: values[:-1]} for name, values in numbers().items()),
        *({name: np.array(["a"] * 6)} for name in ("best_rank", "map@r")),
        *({name: np.arange(6.0)} for name in ("paths", "classes", "best_rank", "map@r")),
        *({"map@r": np.full(6, value)} for value in (np.nan, np.inf, -0.1)),
        {"best_rank": np.full(6, -1)},
        {"classes": np.array([["a"]] * 6)},
        {"paths": np.array([None] * 6)},
    ],
    ids=str,
)
def test_queries_that_are_none(tmp_path: Path, changed: dict[str, np.ndarray]) -> None:
    np.savez(tmp_path / "queries.npz", **numbers())
    assert len(read_queries(tmp_path).paths) == 6
    np.savez(tmp_path / "queries.npz", **(numbers() | changed))
    with pytest.raises(UserError, match=r"queries\.npz is damaged, or none of a run \(.*\): repeat the run"):
        read_queries(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"embeddings": np.zeros((4, 2))},
        {"embeddings": np.full((4, 2), np.nan)},
        {"embeddings": np.ones(4)},
        {"embeddings": np.full((4, 2), "a")},
        {"labels": np.ones(4)},
        {"labels": np.ones(3, int)},
        {"gallery": np.ones((4, 2))},
    ],
    ids=str,
)
def test_embeddings_that_are_none(tmp_path: Path, changed: dict[str, np.ndarray]) -> None:
    whole = {"embeddings": np.ones((4, 2)), "labels": np.ones(4, int)}
    np.savez(tmp_path / "embeddings.npz", **whole)
    assert read_embeddings(tmp_path).keys() == whole.keys()
    np.savez(tmp_path / "embeddings.npz", **(whole | changed))
    with pytest.raises(UserError):
        read_embeddings(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0\0",
        "{",
        "[1]",
        "3",
        '{"a": "b"}',
        '{"a": true}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": 1' + "0" * 99 + "}",
    ],
)
def test_figures_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"metrics\.json is damaged, or none of a run"):
        read_metrics_json(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="damaged"):
        read_metrics_json(path)
    path.unlink()
    with pytest.raises(UserError, match="there is no"):
        read_metrics_json(path)


def test_lines_of_a_course_that_are_none_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": NaN}\n{"step": 2, "a"')
    assert len(read_metrics(path)) == 1  # what a kill cut short
    huge = f'{{"step": 1, "a": {"9" * 400}}}'  # no float
    for line in ("", "{", "3", "{}", '{"step": "a"}', '{"step": 1, "a": "b"}', '{"step": 1, "a": []}', "\0", huge):
        path.write_text(f'{line}\n{{"step": 3, "a": 1}}\n')
        assert read_metrics(path) == [{"step": 3, "a": 1}]


@pytest.mark.parametrize("text", ['{"a": 1}', "3", "[3]", '[{"command": 3}]', "\0"])
def test_starts_that_are_none_are_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / provenance.FILE).write_text(text)
    assert provenance.starts(tmp_path) == []


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[object, str]]:
    """`call("report", ...)`: the exit code of a command or the traceback that it ended with, and what it said."""

    def call(name: str, *options: object) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", [name, *map(str, options)])
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                importlib.import_module(f"dml.{name}").main()
            except SystemExit as left:
                return left.code or 0, said.getvalue()
            except BaseException:
                return traceback.format_exc(), said.getvalue()
        return 0, said.getvalue()

    return call


def damages(path: Path, seed: int) -> list[Write]:
    """What may become of a file: cut, NUL, of another type, with a byte turned, with huge numbers, gone."""
    content, draw = path.read_bytes(), random.Random(seed)
    turned = bytearray(content)
    for _ in range(3):
        turned[draw.randrange(len(turned))] ^= 1 << draw.randrange(8)
    found: list[Write] = [
        *(lambda p, n=n: p.write_bytes(content[:n]) for n in (0, 1, len(content) // 2, len(content) - 2)),
        lambda p: p.write_bytes(bytes(len(content))),
        lambda p: p.write_bytes(b"\xff\xfe" + content),
        lambda p: p.write_bytes(turned),
        lambda p: p.unlink(),
        lambda p: (p.unlink(), p.mkdir()),
        *(lambda p, t=t: p.write_text(t) for t in ("[]\n", "{}\n", "3\n", "null\n", '"a"\n', "a: [\n", "[{}]\n")),
    ]
    if path.suffix in (".json", ".jsonl", ".yaml"):
        text = path.read_text()
        for old, new in (("0", "9" * 400), ("0.", "1e999"), (": ", ": -"), (": ", ": {}"), ("1", "NaN"), (":", ": x")):
            changed = text.replace(old, new)
            found.append(lambda p, t=changed: p.write_text(t))
    return found


def fuzz(run: Path, call: Callable[..., tuple[object, str]], tmp_path: Path, names: Sequence[str], pick: int) -> None:
    images = photographs(tmp_path / "photos", classes=1, each=3)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    commands = [
        ("report", other, run, "-o", tmp_path / "summary"),
        ("compare", run, other, "--draws", 100, "--out", tmp_path / "comparison"),
        ("aggregate", other, "-o", tmp_path / "mlrc"),
        ("embed", other, *images, "-o", tmp_path / "vectors.npz"),
        ("search", other, images[0].parent, images[0], "-k", 1, "-o", tmp_path / "found"),
    ]
    wrong = []
    for name in names:
        file = other / name
        whole = file.read_bytes()
        for number, damage in enumerate(damages(file, seed=0)):
            if pick > 1 and number % pick:
                continue
            damage(file)
            for command in commands:
                code, said = call(*command)
                if code not in (0, 2) or (code == 2 and said.count("dml: ") != 1):
                    wrong.append(f"{name} {number} {command[0]}: {code}\n{said[-500:]}")
            if file.is_dir():
                file.rmdir()
            file.write_bytes(whole)
    assert not wrong, f"{len(wrong)} of them\n" + "\n".join(wrong[:4])


FILES = ["config.yaml", "metrics.json", "metrics.jsonl", "overrides.yaml", "provenance.json", "queries.npz"]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("protocol", ["conventional", "mlrc"])
def test_any_file_of_a_run(
    configure: Configure, tmp_path: Path, call: Callable[..., tuple[object, str]], protocol: str
) -> None:
    fold = ["protocol=mlrc", "protocol.fold=0", "protocol.repeat=0"] if protocol == "mlrc" else []
    options = [*TINY, "trainer.max_steps=2", "protocol.every=2", *fold]
    config = configure(*options)
    run(config, options)
    own = ["embeddings.npz"] if fold else ["checkpoints/last.ckpt"]
    fuzz(tmp_path / "run", call, tmp_path, [*FILES, *own], 1)
    assert RunFolder(tmp_path / "run").finished(config)
