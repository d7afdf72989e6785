"""Galleries in files: written by several processes, killed and gone on with, searched by approximate indexes."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from omegaconf import DictConfig

from dml.bench.ranks import of_ranks
from dml.errors import UserError
from dml.inference import galleries, indexes
from dml.inference.embedding import Trained
from dml.inference.galleries import Draft, held_alone, read_gallery
from dml.inference.indexes import build, exact, tune
from dml.inference.streaming import write_gallery
from tests.runs import embed_images, photographs

pytestmark = pytest.mark.usefixtures("one_thread")

Configure = Callable[..., DictConfig]
Call = Callable[..., tuple[int, str]]
Full = Callable[[int], AbstractContextManager[None]]
TWO = ("method=abe", "method.M=2")


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_files(run: Path, tmp_path: Path, call: Call, dtype: str) -> None:
    files = photographs(tmp_path / "photos")
    out = tmp_path / "new" / "gallery.npy"
    options = ("embed", run, tmp_path / "photos", "-o", out, "--batch-size", "5", "--device", "cpu", "--dtype", dtype)
    code, said = call(*options)
    assert (code, said) == (0, f"{out}: 16 embeddings of 24 dimensions, {dtype}\n")
    assert names(out.parent) == ["gallery.json", "gallery.npy", "gallery.parquet"]
    expected = embed_images(run, files, device="cpu", batch_size=5)
    np.testing.assert_array_equal(np.load(out), expected.astype(dtype))
    assert pyarrow.parquet.read_table(out.with_suffix(".parquet"))["path"].to_pylist() == [str(file) for file in files]
    found = read_gallery(out)
    assert (found.weights, list(found.paths)) == (Trained.of(run).digest(), [str(file) for file in files])
    assert isinstance(found.embeddings, np.memmap)


def _two(run: Path, photos: Path, out: Path) -> int:
    write_gallery(run, [photos], out, batch_size=3, device="cpu")
    return torch.distributed.get_world_size()


@pytest.mark.exhaustive
def test_two_processes_write_what_one_does(run: Path, tmp_path: Path) -> None:
    photographs(tmp_path / "photos")
    write_gallery(run, [tmp_path / "photos"], tmp_path / "one.npy", batch_size=3, device="cpu")
    done = of_ranks(2, _two, run, tmp_path / "photos", tmp_path / "two.npy", folder=tmp_path / "ranks")
    assert done == [2, 2]
    assert (tmp_path / "one.npy").read_bytes() == (tmp_path / "two.npy").read_bytes()
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert one == two
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def _with_a_mistake(run: Path, photos: Path, out: Path, at: int, name: str) -> str:
    def raised(*_: object) -> None:
        raise UserError("this cannot be used")

    with pytest.MonkeyPatch.context() as patched:
        if torch.distributed.get_rank() == at:
            patched.setattr(name, raised)
        try:
            write_gallery(run, [photos], out, batch_size=3, device="cpu")
        except UserError as error:
            return str(error)
    return "nothing"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("at", "name"),
    [(1, "check_names"), (1, "check_norms"), (0, "Draft.begin"), (0, "Draft.finish"), (0, "held_alone")],
)
def test_a_mistake_that_one_process_meets_is_told_by_all(run: Path, tmp_path: Path, at: int, name: str) -> None:
    photographs(tmp_path / "photos")
    more = (f"dml.inference.streaming.{name}",)
    told = of_ranks(2, _with_a_mistake, run, tmp_path / "photos", tmp_path / "a.npy", at, *more, folder=tmp_path / "r")
    assert told == ["this cannot be used"] * 2


SLOW = """
import sys, time
from pathlib import Path
from dml.inference import streaming
from dml.inference.embedding import Trained
embed = Trained.embed
def slowly(self, images):
    time.sleep(0.3)
    return embed(self, images)
width = Trained.of(Path(sys.argv[1])).width
Trained.width = width
Trained.embed = slowly
streaming.MARKED_EVERY = 0
streaming.write_gallery(Path(sys.argv[1]), [Path(sys.argv[2])], Path(sys.argv[3]), batch_size=2, device="cpu")
"""


@pytest.mark.slow
def test_a_kill_costs_what_was_not_marked(run: Path, tmp_path: Path, call: Call) -> None:
    files = photographs(tmp_path / "photos")
    out, whole = tmp_path / "gallery.npy", tmp_path / "whole.npy"
    _, state, _, header = Draft.places(out)
    process = subprocess.Popen([sys.executable, "-c", SLOW, run, tmp_path / "photos", out])
    until = time.monotonic() + 60
    while not header.exists() or (np.load(state, mmap_mode="r") == 1).sum() < 4:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    left = int((np.load(state) == 1).sum())
    assert 4 <= left < 16
    options = (run, tmp_path / "photos", "--batch-size", "2", "--device", "cpu")
    code, said = call("embed", *options, "-o", out)
    assert (code, f"; {left} of them were there already" in said) == (0, True)
    assert call("embed", *options, "-o", whole)[0] == 0
    assert out.read_bytes() == whole.read_bytes()
    assert (tmp_path / "gallery.json").read_text() == (tmp_path / "whole.json").read_text()
    assert list(read_gallery(out).paths) == [str(file) for file in files]


KILLED = """
import os, sys
from pathlib import Path
from dml.inference.streaming import write_gallery
replace, out = os.replace, Path(sys.argv[3])
def killed(source, target):
    replace(source, target)
    if Path(target) == out:
        os._exit(9)
os.replace = killed
write_gallery(Path(sys.argv[1]), [Path(sys.argv[2])], out, batch_size=2, device="cpu")
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_kill_at_the_end_costs_nothing(run: Path, tmp_path: Path, call: Call, before: bool) -> None:
    """Not even if there is an older gallery, of fewer images."""
    files = photographs(tmp_path / "photos")
    out, whole = tmp_path / "gallery.npy", tmp_path / "whole.npy"
    options = (run, tmp_path / "photos", "--batch-size", "2", "--device", "cpu")
    if before:
        assert call("embed", run, *files[:4], "-o", out, "--device", "cpu")[0] == 0
    process = subprocess.run([sys.executable, "-c", KILLED, run, tmp_path / "photos", out], check=False)
    assert process.returncode == 9
    assert len([name for name in names(tmp_path) if re.fullmatch(r"\.gallery\.(json|parquet)\.\d+", name)]) == 2
    code, said = call("embed", *options, "-o", out)
    assert (code, "; 16 of them were there already" in said) == (0, True)
    assert call("embed", *options, "-o", whole)[0] == 0
    assert out.read_bytes() == whole.read_bytes()
    assert list(read_gallery(out).paths) == [str(file) for file in files]
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_another_line_begins_anew(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "gallery.npy"
    files = photographs(tmp_path / "photos", classes=1)
    files[3].write_text("no image")
    for _ in range(2):  # what was embedded before stays
        with pytest.raises(UserError, match=r"3\.png cannot be read .*: repair what cannot be read"):
            write_gallery(run, [tmp_path / "photos"], out, batch_size=1, device="cpu")
    assert np.load(Draft.places(out)[1]).tolist() == [1, 1, 1, 0]
    write_gallery(run, files[:2], out, batch_size=1, device="cpu")
    assert len(read_gallery(out).paths) == 2


def test_unreadable_images_are_left_out(run: Path, tmp_path: Path, call: Call) -> None:
    files = photographs(tmp_path / "photos", classes=1)
    for file in files[:2]:
        file.write_text("no image")
    out = tmp_path / "gallery.npy"
    code, said = call("embed", run, tmp_path / "photos", "-o", out, "--skip", "--batch-size", "3", "--device", "cpu")
    assert code == 0
    assert f"Left out: 2 images cannot be read: {files[0]}, {files[1]}." in said
    found = read_gallery(out)
    assert list(found.paths) == [str(file) for file in files[2:]]
    np.testing.assert_allclose(found.embeddings, embed_images(run, files[2:], device="cpu"), atol=1e-6)
    code, said = call("embed", run, *files[:2], "-o", tmp_path / "none.npy", "--skip")
    assert (code, "name others" in said) == (2, True)
    assert not list(tmp_path.glob("*none.npy*"))


def test_mistakes(run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = photographs(tmp_path / "photos", classes=1, each=1)
    out = tmp_path / "gallery.npy"
    for options, sentence in {
        ("-o", out, "--learners"): "--learners can be written to a .npz file only",
        ("-o", tmp_path / "vectors.npz", "--dtype", "float16"): "can be written by one process only, and in float32",
        ("-o", out, "--batch-size", "0"): "--batch-size=0",
    }.items():
        code, said = call("embed", run, file, *options)
        assert (code, sentence in said, said.count("\n")) == (2, True, 1)
    with held_alone(out), pytest.raises(UserError, match="being written by another process"):
        write_gallery(run, [file], out, device="cpu")
    odd = file.rename(file.parent / "\udcff.png")
    with monkeypatch.context() as patched:
        patched.setattr(Trained, "embed", None)  # it is told before anything is embedded
        code, said = call("embed", run, odd, "-o", out)
        assert (code, "is not UTF-8" in said, said.count("\n")) == (2, True, 1)
    assert names(tmp_path) == ["photos", "trained"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "by one process" in call("embed", run, odd, "-o", tmp_path / "vectors.npz")[1]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pip install '.[parquet]'" in call("embed", run, odd, "-o", out)[1]


def test_images_that_changed_are_embedded_again(run: Path, tmp_path: Path, call: Call) -> None:
    files = photographs(tmp_path / "photos", classes=1, each=6)
    whole = files[5].read_bytes()
    files[5].write_text("no image")
    out = tmp_path / "gallery.npy"
    options = (run, tmp_path / "photos", "--batch-size", "2", "--device", "cpu")
    assert call("embed", *options, "-o", out)[0] == 2
    files[5].write_bytes(whole)
    files[0].write_bytes(files[4].read_bytes())
    code, said = call("embed", *options, "-o", out)
    assert (code, "; 3 of them were there already" in said) == (0, True)
    assert call("embed", *options, "-o", tmp_path / "anew.npy")[0] == 0
    assert out.read_bytes() == (tmp_path / "anew.npy").read_bytes()
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_files_of_something_else_are_left_alone(
    run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs(tmp_path / "photos", classes=1, each=1)
    monkeypatch.setattr(Trained, "embed", None)  # it is told before anything is embedded
    others = [tmp_path / "cars.json", tmp_path / "planes.parquet", tmp_path / "list.json", run / "metrics.json"]
    for file, content in zip(others, ("no JSON", "a table", "[]", '{"test/recall@1": 1}'), strict=True):
        file.write_text(content)
        code, said = call("embed", run, tmp_path / "photos", "-o", file.with_suffix(".npy"))
        assert (code, f"{file} does not belong to a gallery" in said, said.count("\n")) == (2, True, 1)
        assert file.read_text() == content
        assert not file.with_suffix(".npy").exists()
    (tmp_path / "folder.npy").mkdir()
    assert "folder.npy is a folder" in call("embed", run, tmp_path / "photos", "-o", tmp_path / "folder.npy")[1]


def test_a_full_disk(run: Path, tmp_path: Path, call: Call, full_disk: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    photographs(tmp_path / "photos")
    out = tmp_path / "found" / "gallery.npy"
    options = ("embed", run, tmp_path / "photos", "-o", out, "--device", "cpu")
    sentence = f"dml: {out} cannot be written ({{}}): make room, or name another file with -o.\n"
    with full_disk(1000):
        assert call(*options) == (2, sentence.format(os.strerror(errno.EFBIG)))
    assert names(out.parent) == []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:  # without this, a write to mapped memory would kill the process
        patched.setattr("os.posix_fallocate", full)
        assert call(*options) == (2, sentence.format(os.strerror(errno.ENOSPC)))
    assert names(out.parent) == []


@pytest.mark.parametrize("skip", [False, True])
def test_a_disk_that_is_full_at_the_end(
    run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    """The older gallery stays, and so does what is done of the new one."""
    files = photographs(tmp_path / "photos")
    out = tmp_path / "gallery.npy"
    options = ("embed", run, tmp_path / "photos", "--device", "cpu", *(["--skip"] if skip else []), "-o")
    assert call("embed", run, *files[:8], "-o", out, "--device", "cpu")[0] == 0
    older = [out.with_suffix(suffix).read_bytes() for suffix in (".json", ".npy", ".parquet")]
    if skip:
        files[1].write_text("no image")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for part in ("pyarrow.parquet.write_table", "dml.inference.galleries.write_through"):
        with monkeypatch.context() as patched:
            patched.setattr(part, full)
            code, said = call(*options, out)
        assert (code, f"{out} cannot be written (No space left on device): make room" in said) == (2, True)
        assert [out.with_suffix(suffix).read_bytes() for suffix in (".json", ".npy", ".parquet")] == older
        assert len(read_gallery(out).paths) == 8
    code, said = call(*options, out)
    assert (code, f"; {16 - skip} of them were there already" in said) == (0, True)
    assert call(*options, tmp_path / "anew.npy")[0] == 0
    assert out.read_bytes() == (tmp_path / "anew.npy").read_bytes()
    assert list(read_gallery(out).paths) == [str(file) for file in files if not (skip and file == files[1])]
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_files_that_hold_no_gallery(run: Path, tmp_path: Path) -> None:
    photographs(tmp_path / "photos", classes=1)
    out = tmp_path / "gallery.npy"
    write_gallery(run, [tmp_path / "photos"], out, device="cpu")
    content, about = np.load(out), json.loads((tmp_path / "gallery.json").read_text())
    np.save(out, content[::-1])
    with pytest.raises(UserError, match=r"gallery\.npy was changed since it was written"):
        read_gallery(out)
    np.save(out, content * 2)
    (tmp_path / "gallery.json").write_text(json.dumps(about | {"embeddings": galleries.checksum_of(out)}))
    with pytest.raises(UserError, match="not of unit norm"):
        read_gallery(out)
    for damage in ("", "[]", "{}"):
        (tmp_path / "gallery.json").write_text(damage)
        with pytest.raises(UserError, match=r"damaged, or none of a run .*write it with python -m dml\.embed"):
            read_gallery(out)
    (tmp_path / "gallery.json").unlink()
    with pytest.raises(UserError, match=r"there is no .*gallery\.json"):
        read_gallery(out)


def clustered(count: int, width: int, dtype: str = "float32") -> np.ndarray:
    random = np.random.default_rng(0)
    points = random.normal(size=(count // 20, width))[np.arange(count) % (count // 20)]
    points += 0.7 * random.normal(size=points.shape)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    points[1] = points[0]  # a duplicate
    return points.astype(dtype)


def brute(points: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    cosines = queries.astype(float) @ points.astype(float).T
    rows = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(cosines, rows, 1), rows


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exact_search_goes_block_by_block(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(indexes, "blocks", lambda count: galleries.blocks(count, 7))
    points = clustered(100, 8, dtype)
    for k in (1, 10, 100):
        similarities, rows = exact(points)(points[2:30], k)
        expected, of = brute(points, points[2:30], k)
        np.testing.assert_allclose(similarities, expected, atol=1e-6)
        assert set(rows[rows != of].tolist()) <= {0, 1}  # duplicates, in either order


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("hnsw", "float32"), ("hnsw", "float16"), ("ivfpq", "float32")])
def test_recall_is_what_was_asked_for(kind: indexes.Kind, dtype: str) -> None:
    points = clustered(12_000, 16, dtype)
    index = build(kind, points)
    for least in (0.5, 0.99):
        measured = tune(index, 10, least)
        assert measured.recall >= least
        assert measured.effort == index.effort
        # Counted anew: of each sampled row, its neighbours but itself, by similarity.
        own = np.sort(np.random.default_rng(0).choice(len(points), measured.sample, replace=False))[:300]
        truth, rows = brute(points, points[own], 12)
        hits = 0
        found = index.search(points[own].astype(np.float32), 11)
        for query, row in enumerate(own):
            others = [c for c, r in zip(truth[query], rows[query], strict=True) if r != row][:10]
            mine = [s for s, r in zip(found[0][query], found[1][query], strict=True) if r != row][:10]
            hits += sum(s >= others[-1] - 1e-6 for s in mine)
        assert hits / 3000 == pytest.approx(measured.recall, abs=0.03)
    assert measured.effort > 1


def test_speeds_are_those_of_the_index_and_of_exact_search(monkeypatch: pytest.MonkeyPatch) -> None:
    points, timed, seconds = clustered(2000, 16), indexes._timed, iter((8.0, 2.0))
    monkeypatch.setattr(indexes, "_timed", lambda *given: (timed(*given)[0], next(seconds)))
    measured = tune(build("hnsw", points), 3, 0.1)
    assert (measured.sample, measured.exact_per_second, measured.per_second) == (1000, 125, 500)


def test_what_an_index_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    points = clustered(2000, 16)
    with pytest.raises(UserError, match="--index ivfpq needs 9984 images to learn its codes, but the gallery has 2000"):
        build("ivfpq", points)
    index = build("hnsw", points)
    monkeypatch.setattr(indexes, "HARDEST", 12)
    with pytest.raises(
        UserError, match=r"finds 0\.\d+ of the 10 nearest at its largest effort, less than --min-recall 1:"
    ):
        tune(index, 10, 1.0)
    with pytest.raises(UserError, match="the gallery has one image"):
        tune(build("hnsw", points[:1]), 1, 0.5)


@pytest.mark.slow
def test_a_search_in_a_gallery_file(run: Path, tmp_path: Path, call: Call) -> None:
    files = photographs(tmp_path / "photos")
    gallery, query = tmp_path / "gallery.npy", files[5]
    assert call("embed", run, tmp_path / "photos", "-o", gallery, "--device", "cpu")[0] == 0

    def rows(*options: str | Path, k: int = 4) -> list[tuple[str, str]]:
        code, said = call("search", run, *options, "-k", str(k), "--device", "cpu")
        assert code == 0, said
        return re.findall(r"^ *\d+ +(\S+) +(-?\d\.\d{4}) *$", said, re.MULTILINE)

    expected = rows(tmp_path / "photos", query, "-o", tmp_path / "of_images")
    assert len(expected) == 4
    assert rows(gallery, query, "-o", tmp_path / "flat") == expected
    assert names(tmp_path / "flat") == ["results.html"]
    found = tmp_path / "found"
    assert rows(gallery, query, "-o", found, "--index", "hnsw") == expected
    assert names(found) == ["index.faiss", "index.json", "results.html"]
    about = json.loads((found / "index.json").read_text())
    assert (about["kind"], about["recall"], about["min_recall"]) == ("hnsw", 1.0, 0.99)
    before = (found / "index.faiss").stat().st_mtime_ns
    assert rows(found, query) == expected
    assert (found / "index.faiss").stat().st_mtime_ns == before
    assert rows(found, query, k=3) == expected[:3]
    assert json.loads((found / "index.json").read_text())["k"] == 3
    assert rows(tmp_path / "of_images", query, "--index", "hnsw") == expected
    assert rows(tmp_path / "of_images", query) == expected

    options = ("search", run, found, query, "-k", "3", "--device", "cpu")
    code, said = call(*options, "--min-recall", "0")
    assert (code, "--min-recall=0.0 has to be above 0" in said) == (2, True)
    about = json.loads((found / "index.json").read_text())
    for changed, sentence in (
        ({"effort": 0}, "effort is 0"),
        ({"kind": "tree"}, "neither hnsw nor ivfpq"),
        ({"of": 1}, "of is 1"),
    ):
        (found / "index.json").write_text(json.dumps(about | changed))
        code, said = call(*options)
        assert (code, sentence in said, said.count("\n")) == (2, True, 1)
    (found / "index.json").write_text(json.dumps(about))
    content = (found / "index.faiss").read_bytes()
    (found / "index.faiss").write_bytes(content[:-9] + bytes(9))
    assert "changed since it was written" in call(*options)[1]
    (found / "index.faiss").write_bytes(content)
    assert call(*options)[0] == 0
    assert call("embed", run, *files[:8], "-o", gallery, "--device", "cpu")[0] == 0
    code, said = call(*options)
    assert (code, said.count("\n")) == (2, 1)
    assert "gallery.npy was changed since" in said
