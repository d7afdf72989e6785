"""Nearest images of a gallery, against a brute-force search."""

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from omegaconf import DictConfig

from dml.inference.embedding import Trained
from dml.inference.search import search
from dml.methods.base import Method
from tests.runs import embed_images, photographs, untrained_run

pytestmark = pytest.mark.usefixtures("one_thread")

Configure = Callable[..., DictConfig]
MethodOf = Callable[..., Method]


Call = Callable[..., tuple[int, str]]
Full = Callable[[int], AbstractContextManager[None]]


def rows(said: str) -> list[tuple[str, float]]:
    """(path, similarity) of the lines of all tables."""
    return [(path, float(value)) for path, value in re.findall(r"^ *\d+ +(\S+) +(-?\d\.\d{4}) *$", said, re.MULTILINE)]


def test_search(run: Path, tmp_path: Path, call: Call) -> None:
    files = photographs(tmp_path / "photos")
    gallery, queries = files[:12], files[12:14]
    files[12].parent.rename(tmp_path / "queries")
    queries = [tmp_path / "queries" / file.name for file in queries]
    out = tmp_path / "found"
    code, said = call("search", run, tmp_path / "photos", *queries, "-k", "5", "-o", out, "--device", "cpu")
    assert code == 0
    cosines = embed_images(run, queries) @ embed_images(run, gallery).T
    order = np.argsort(-cosines, axis=1)[:, :5]
    expected = [(str(gallery[column]), cosines[q, column]) for q in range(2) for column in order[q]]
    assert [path for path, _ in rows(said)] == [path for path, _ in expected]
    np.testing.assert_allclose([value for _, value in rows(said)], [value for _, value in expected], atol=6e-5)
    assert sorted(file.name for file in out.iterdir()) == ["index.faiss", "results.html", "vectors.npz"]
    assert faiss.read_index(str(out / "index.faiss")).ntotal == 12

    page = (out / "results.html").read_text()
    assert page.count('src="data:image/jpeg;base64,') == 12
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.index(expected[0][0]) < page.index(expected[4][0])

    shutil.rmtree(tmp_path / "photos")
    (out / "results.html").unlink()
    assert rows(call("search", run, out, *queries, "-k", "5")[1]) == rows(said)
    assert (out / "results.html").read_text().count("not readable") == 10

    again = tmp_path / "again"
    assert rows(call("search", run, out / "vectors.npz", *queries, "-k", "5", "-o", again)[1]) == rows(said)
    assert (again / "index.faiss").read_bytes() == (out / "index.faiss").read_bytes()


def test_a_gallery_takes_no_search(run: Path, tmp_path: Path, call: Call) -> None:
    """It would never be read again as a folder of images."""
    files = photographs(tmp_path / "photos", classes=1)
    code, said = call("search", run, tmp_path / "photos", files[0], "-k", "1", "-o", tmp_path / "photos")
    assert (code, "photos is the gallery itself" in said) == (2, True)
    assert sorted(path.name for path in (tmp_path / "photos").iterdir()) == ["class0"]


def test_an_image_finds_itself(run: Path, tmp_path: Path, call: Call) -> None:
    """The names are no markup, and no tags."""
    files = photographs(tmp_path / "photos", classes=1)
    odd = files[1].rename(files[1].parent / "[red]<b>.png")
    code, said = call("search", run, tmp_path / "photos", odd, "-k", "1")
    assert code == 0
    assert rows(said) == [(str(odd), 1.0)]
    page = (run / "search" / "results.html").read_text()
    assert "[red]&lt;b&gt;.png" in page
    assert "<b>.png" not in page


def test_mistakes(run: Path, configure: Configure, method_of: MethodOf, tmp_path: Path, call: Call) -> None:
    files = photographs(tmp_path / "photos", classes=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no image")
    larger = ("method=baseline", "head.dim=32")
    wide = untrained_run(configure, tmp_path / "wide", method_of(*larger), *larger)
    other = untrained_run(configure, tmp_path / "other", method_of("method=baseline"), "method=baseline")
    for made, folder in ((wide, "wide_found"), (other, "other_found")):
        assert call("search", made, tmp_path / "photos", files[0], "-k", "1", "-o", tmp_path / folder)[0] == 0
    shutil.copytree(tmp_path / "other_found", tmp_path / "damaged")
    (tmp_path / "damaged" / "index.faiss").write_text("no index")
    out = tmp_path / "out"
    for options, sentence in {
        (run, tmp_path / "wide_found", files[0]): "vectors.npz has 32 dimensions, but the run's embedding 24",
        (
            run,
            tmp_path / "wide_found" / "vectors.npz",
            files[0],
        ): "vectors.npz has 32 dimensions, but the run's embedding 24",
        (run, tmp_path / "other_found", files[0]): "was embedded by other weights",
        (other, tmp_path / "damaged", files[0]): "index.faiss is not the index of vectors.npz",
        (run, tmp_path / "photos", tmp_path / "notes.txt"): "notes.txt cannot be read",
        (run, tmp_path / "photos", files[0], "-k", "5"): "-k 5 nearest images are asked for, but the gallery holds 4",
        (run, tmp_path / "photos", files[0], "-k", "0"): "-k=0",
        (run, tmp_path / "empty", files[0]): "empty has no images",
        (run, tmp_path / "nowhere", files[0]): "there is no gallery",
        (run, tmp_path / "photos", tmp_path / "nowhere"): "there is no image",
        (tmp_path / "empty", tmp_path / "photos", files[0]): "has no checkpoint",
        (run, tmp_path / "notes.txt", files[0]): "notes.txt is no gallery: name the folder of the images",
        (run, files[1], files[0]): "1.png is no gallery: name the folder of the images",
    }.items():
        code, said = call("search", *options, *(() if "-k" in options else ("-k", "1")), "-o", out)
        assert code == 2
        assert said.startswith("dml: ")
        assert sentence in said
        assert said.count("\n") == 1


@pytest.mark.slow
def test_what_was_changed_since_is_noticed(
    run: Path, configure: Configure, method_of: MethodOf, tmp_path: Path, call: Call
) -> None:
    files = photographs(tmp_path / "photos", classes=1)
    assert call("search", run, tmp_path / "photos", files[0], "-k", "1", "-o", tmp_path / "whole")[0] == 0
    two = ("method=abe", "method.M=2")
    method = method_of(*two)
    with torch.no_grad():
        next(method.parameters()).add_(0.01)  # of the same width
    other = untrained_run(configure, tmp_path / "other", method, *two)
    assert call("search", other, tmp_path / "photos", files[0], "-k", "1", "-o", tmp_path / "others")[0] == 0

    def flipped(at: int) -> None:
        content = bytearray((tmp_path / "some" / "index.faiss").read_bytes())
        content[at] ^= 1
        (tmp_path / "some" / "index.faiss").write_bytes(content)

    def of_the_other(name: str) -> None:
        shutil.copy(tmp_path / "others" / name, tmp_path / "some" / name)

    changes = [partial(flipped, at) for at in (0, 4, 20, -1, -40)]
    for change in [*changes, *(partial(of_the_other, name) for name in ("index.faiss", "vectors.npz"))]:
        shutil.copytree(tmp_path / "whole", tmp_path / "some")
        change()
        code, said = call("search", run, tmp_path / "some", files[0], "-k", "1")
        assert code == 2
        assert "is not the index of" in said or "other weights" in said
        assert said.count("\n") == 1
        shutil.rmtree(tmp_path / "some")
    code, said = call("search", other, tmp_path / "whole" / "vectors.npz", files[0], "-k", "1")
    assert (code, "other weights" in said) == (2, True)


def test_files_of_something_else_are_left_alone(
    run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = photographs(tmp_path / "photos", classes=1, each=2)
    monkeypatch.setattr(Trained, "embed", None)  # it is told before anything is embedded
    for name in ("index.json", "index.faiss", "vectors.npz", "results.html"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text('{"of": "something else"}')
        code, said = call("search", run, tmp_path / "photos", files[0], "-k", "1", "-o", folder)
        assert (code, f"{folder / name} was not written by dml.search" in said, said.count("\n")) == (2, True, 1)
        assert [(file.name, file.read_text()) for file in folder.iterdir()] == [(name, '{"of": "something else"}')]


def test_vectors_that_no_search_wrote_are_left_alone(run: Path, tmp_path: Path, call: Call) -> None:
    files = photographs(tmp_path / "photos")
    out, ending = tmp_path / "out", ("-k", "2", "--device", "cpu", "-o", tmp_path / "out")
    vectors = out / "vectors.npz"
    assert call("embed", run, tmp_path / "photos", "-o", vectors, "--device", "cpu", "--learners")[0] == 0
    before = vectors.read_bytes()
    code, said = call("search", run, files[0].parent, files[0], *ending)
    assert (code, f"{vectors} was not written by dml.search" in said) == (2, True)
    code, said = call("search", run, vectors, files[0], *ending)  # an index beside them is welcome
    assert (code, len(rows(said)), (out / "index.faiss").is_file()) == (0, 2, True)
    assert rows(call("search", run, out, files[0], *ending)[1]) == rows(said)
    assert call("search", run, files[0].parent, files[0], *ending)[0] == 2
    assert vectors.read_bytes() == before


@pytest.mark.parametrize("name", ["index.faiss", "results.html"])
def test_what_lies_beside_vectors_of_no_search_is_left_alone(run: Path, tmp_path: Path, call: Call, name: str) -> None:
    (tmp_path / "w").mkdir()
    files, vectors, own = photographs(tmp_path / "photos"), tmp_path / "w" / "vectors.npz", tmp_path / "w" / name
    assert call("embed", run, tmp_path / "photos", "-o", vectors, "--device", "cpu")[0] == 0
    own.write_text("of somebody else")
    for _ in range(2):
        code, said = call("search", run, vectors, files[0], "-k", "2", "-o", tmp_path / "w", "--device", "cpu")
        assert (code, f"{own} was not written by dml.search" in said, said.count("\n")) == (2, True, 1)
    assert own.read_text() == "of somebody else"
    own.unlink()
    for _ in range(2):  # what a search wrote is replaced
        assert call("search", run, vectors, files[0], "-k", "2", "-o", tmp_path / "w", "--device", "cpu")[0] == 0


@pytest.mark.slow
def test_a_search_in_a_gallery_file_leaves_another_search(run: Path, tmp_path: Path, call: Call) -> None:
    files, gallery = photographs(tmp_path / "photos"), tmp_path / "gallery.npy"
    ending, found = ("-k", "3", "--device", "cpu"), run / "search"
    code, said = call("search", run, tmp_path / "photos", files[0], *ending)
    assert code == 0
    assert call("embed", run, *files[:8], "-o", gallery, "--device", "cpu")[0] == 0
    code, told = call("search", run, gallery, files[0], *ending)
    assert (code, f"{found} keeps the index of another gallery" in told) == (0, True)
    code, again = call("search", run, found, files[0], *ending)
    assert rows(again) == rows(said)
    assert f"Gallery: the 16 images of the earlier search in {found}\n" in again
    (found / "index.faiss").unlink()  # the vectors make a search too
    assert rows(call("search", run, found, files[0], *ending)[1]) == rows(said)
    assert (found / "index.faiss").is_file()
    for kind, left in (("hnsw", True), ("flat", False)):  # but an index of this very gallery is replaced
        assert call("search", run, gallery, files[0], *ending, "--index", kind, "-o", tmp_path / "out")[0] == 0
        assert (tmp_path / "out" / "index.faiss").is_file() == left


def test_vectors_are_kept_if_an_index_fails(
    run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, out = photographs(tmp_path / "photos"), tmp_path / "new" / "out"
    options = ("search", run, tmp_path / "photos", files[0], "-k", "3", "--device", "cpu", "-o", out)
    with monkeypatch.context() as patched:
        patched.setattr(Trained, "embed", None)  # it is told before anything is embedded
        code, said = call(*options, "--index", "ivfpq")
        assert (code, "needs 9984 images to learn its codes, but the gallery has 16" in said) == (2, True)
        assert call(*options, "--batch-size", "0")[0] == 2
    assert not (tmp_path / "new").exists()
    with monkeypatch.context() as patched:
        patched.setattr("dml.inference.indexes.TIED", -9.0)  # nothing counts as found
        code, said = call(*options, "--index", "hnsw")
    assert (code, "less than --min-recall" in said, said.count("\n")) == (2, True, 1)
    assert sorted(file.name for file in out.iterdir()) == ["index.faiss", "vectors.npz"]
    expected = rows(call(*options[:-1], tmp_path / "anew")[1])
    shutil.rmtree(tmp_path / "photos" / "class3")
    assert rows(call("search", run, out, files[0], *options[4:8])[1]) == expected


def test_an_index_below_a_link_finds_its_gallery(run: Path, tmp_path: Path, call: Call) -> None:
    files, gallery = photographs(tmp_path / "photos"), tmp_path / "gallery.npy"
    assert call("embed", run, tmp_path / "photos", "-o", gallery, "--device", "cpu")[0] == 0
    (tmp_path / "disk" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "inner")
    found, ending = tmp_path / "link" / "found", ("-k", "2", "--device", "cpu")
    code, said = call("search", run, gallery, files[0], *ending, "--index", "hnsw", "-o", found)
    assert code == 0, said
    assert rows(call("search", run, found, files[0], *ending)[1]) == rows(said)
    assert rows(call("search", run, tmp_path / "disk" / "inner" / "found", files[0], *ending)[1]) == rows(said)


def test_a_recall_of_one(run: Path, tmp_path: Path) -> None:
    files, found = photographs(tmp_path / "photos"), tmp_path / "found"
    for place in (tmp_path / "photos", found):
        (result,) = search(run, place, files[:1], found, k=2, device="cpu", index="hnsw", min_recall=1)
        assert result.paths[0] == str(files[0])


def test_where_a_published_embedding_searches(
    run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the gallery if that has an index, else in a folder of the model's name."""
    monkeypatch.setattr("dml.search.folder_of", lambda place: run)
    monkeypatch.chdir(tmp_path)
    files, ending = photographs(tmp_path / "photos"), ("-k", "2", "--device", "cpu")
    code, said = call("search", "hf://me/model", tmp_path / "photos", files[0], *ending)
    assert (code, (tmp_path / "model" / "search" / "results.html").is_file()) == (0, True), said
    (tmp_path / "model" / "search").rename(tmp_path / "found")
    (tmp_path / "found" / "results.html").unlink()
    assert call("search", "hf://me/model", tmp_path / "found", files[0], *ending)[0] == 0
    assert (tmp_path / "found" / "results.html").is_file()
    assert not (tmp_path / "model" / "search").exists()


@pytest.mark.parametrize("more", [("--index", "flat"), ("--index", "hnsw", "-k", "2")])
@pytest.mark.parametrize("as_file", [True, False])
def test_a_search_that_writes_elsewhere_leaves_its_gallery(
    run: Path, tmp_path: Path, call: Call, more: tuple[str, ...], as_file: bool
) -> None:
    files = photographs(tmp_path / "photos")
    place, found, other = tmp_path / "photos", tmp_path / "found", tmp_path / "other"
    if as_file:
        place = tmp_path / "gallery.npy"
        assert call("embed", run, tmp_path / "photos", "-o", place, "--device", "cpu")[0] == 0
    ending = ("-k", "3", "--device", "cpu")
    assert call("search", run, place, files[0], *ending, "-o", found, "--index", "hnsw")[0] == 0
    before = {file.name: file.read_bytes() for file in found.iterdir()}
    code, said = call("search", run, found, files[0], *ending, "-o", other, *more)
    assert code == 0, said
    assert {file.name: file.read_bytes() for file in found.iterdir()} == before
    again = call("search", run, other if (other / "index.faiss").exists() else place, files[0], *ending, *more)
    assert rows(again[1]) == rows(said)
    (other / "index.faiss").write_text("of somebody else")
    (other / "index.json").write_text("{}")
    code, said = call("search", run, found, files[0], *ending, "-o", other, *more)
    assert (code, "was not written by dml.search" in said) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "hnsw"])
@pytest.mark.parametrize("before", ["flat", "hnsw"])
def test_an_index_stays_until_the_next_is_whole(
    run: Path, tmp_path: Path, call: Call, full_disk: Full, monkeypatch: pytest.MonkeyPatch, before: str, kind: str
) -> None:
    files = photographs(tmp_path / "photos")
    found, ending = tmp_path / "found", ("-k", "3", "--device", "cpu")
    assert call("search", run, files[0].parent, files[0], *ending, "-o", found, "--index", before)[0] == 0
    older = {file.name: file.read_bytes() for file in found.iterdir()}
    larger = ("search", run, tmp_path / "photos", files[0], *ending, "-o", found, "--index", kind)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with full_disk(1000):
        code, said = call(*larger)
    assert (code, f"{found} cannot be written (File too large): make room" in said, said.count("\n")) == (2, True, 1)
    assert {file.name: file.read_bytes() for file in found.iterdir()} == older
    with monkeypatch.context() as patched:
        patched.setattr("dml.inference.index_files.save_vectors", full)
        assert call(*larger)[0] == 2
    assert {file.name: file.read_bytes() for file in found.iterdir()} == older
    assert call("search", run, found, files[0], *ending)[0] == 0

    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if target.name == "index.faiss":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", killed)
        assert call(*larger)[0] == 130
    code, said = call("search", run, found, files[0], *ending)
    assert (code, said.count("\n")) == (2, 1)  # the older index, and the newer vectors
    expected = rows(call(*larger)[1])
    assert len(expected) == 3
    assert rows(call("search", run, found, files[0], *ending)[1]) == expected


def test_without_faiss(run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    files = photographs(tmp_path / "photos", classes=1, each=1)
    monkeypatch.setitem(sys.modules, "faiss", None)
    code, said = call("search", run, tmp_path / "photos", files[0], "-k", "1")
    assert code == 2
    assert "dml.search needs faiss, which is not installed: pip install '.[cpu]' or '.[gpu]'" in said
