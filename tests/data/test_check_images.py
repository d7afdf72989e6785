import dataclasses
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dml.data import check
from dml.data.check import check_images, readable
from dml.data.folder import folder
from dml.data.glyphs import glyphs
from dml.errors import UserError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three classes of three noisy JPEGs; the last file of each is truncated, empty, or text."""
    rng = np.random.default_rng(0)
    root = tmp_path / "tree"
    for name in "abc":
        (root / name).mkdir(parents=True)
        for n in range(3):
            Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(root / name / f"{n}.jpg")
    whole = (root / "a" / "2.jpg").read_bytes()
    (root / "a" / "2.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "b" / "2.jpg").write_bytes(b"")
    (root / "c" / "2.jpg").write_text("<html>404</html>")
    return root


def test_bad_rows_are_found_and_remembered(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, cache = folder(str(tree)), tmp_path / "cache"
    rows = np.arange(len(records))
    assert list(check_images(records, rows, cache)) == [2, 5, 8]
    assert list(check_images(records, rows[:4], cache)) == [2]
    monkeypatch.setattr("dml.data.folder.decode", lambda path: pytest.fail(f"{path} was opened again"))
    assert list(check_images(records, rows, cache)) == [2, 5, 8]
    assert not [p for p in cache.iterdir() if p.suffix != ".json"]


def test_every_core_decodes(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads meet at a barrier, which fewer would not pass."""
    monkeypatch.setattr("dml.data.check.cores", lambda: 9)
    records, barrier = folder(str(tree)), threading.Barrier(9)
    waiting = dataclasses.replace(records, open_image=lambda row: barrier.wait(10) and records.open_image(row))
    assert set(check_images(waiting, np.arange(9), tmp_path / "cache")) <= {2, 5, 8}
    assert not barrier.broken


def test_a_changed_file_is_looked_at_again(tree: Path, tmp_path: Path) -> None:
    def found() -> list[int]:
        return list(check_images(folder(str(tree)), np.arange(9), tmp_path / "cache"))

    assert found() == [2, 5, 8]
    (tree / "b" / "2.jpg").write_bytes((tree / "b" / "1.jpg").read_bytes())
    assert found() == [2, 8]
    same_size = b"x" * (tree / "a" / "0.jpg").stat().st_size
    (tree / "a" / "0.jpg").write_bytes(same_size)
    os.utime(tree / "a" / "0.jpg", (1, 1))
    assert found() == [0, 2, 8]


def test_stop_names_every_bad_file_and_the_remedy(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        readable(folder(str(tree)), tmp_path / "cache")
    sentence = str(caught.value)
    assert all(str(tree / name / "2.jpg") in sentence for name in "abc")
    assert "3 of the 9 images" in sentence
    assert "c/2.jpg (it is damaged, or none of JPEG, PNG, WEBP, BMP, GIF, TIFF)" in sentence
    assert "dataset.unreadable=skip" in sentence


def test_links_to_nothing_and_pipes_are_named(tree: Path, tmp_path: Path) -> None:
    (tree / "a" / "link.jpg").symlink_to(tmp_path / "not mounted" / "1.jpg")
    os.mkfifo(tree / "b" / "pipe.jpg")
    with pytest.raises(UserError) as caught:
        readable(folder(str(tree)), tmp_path / "cache")
    assert "5 of the 11 images" in str(caught.value)
    for name in ("a/link.jpg", "b/pipe.jpg"):
        assert str(tree / name) in str(caught.value)


def test_skip_leaves_them_out_by_name(tree: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"left out 3 images .*a/2\.jpg.*b/2\.jpg.*c/2\.jpg"):
        records = readable(folder(str(tree), unreadable="skip"), tmp_path / "cache")
    assert records.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert [records.image(i).size for i in range(6)] == [(40, 40)] * 6


def test_sound_and_rendered_images_pass_as_they_are(tree: Path, tmp_path: Path) -> None:
    for name in "abc":
        (tree / name / "2.jpg").unlink()
    for records in (folder(str(tree)), glyphs(classes=4, images_per_class=2, size=16)):
        assert readable(records, tmp_path / "cache") is records


@pytest.mark.parametrize("content", ["", "{", '["a"]', '{"a": 1}', "7", "[" * 100_000, b"\xff\xfe"])
def test_a_damaged_memory_is_none(tree: Path, tmp_path: Path, content: str | bytes) -> None:
    records = folder(str(tree))
    found = check_images(records, np.arange(len(records)), tmp_path / "cache")
    (memory,) = (tmp_path / "cache").iterdir()
    whole = memory.read_bytes()
    memory.write_bytes(content.encode() if isinstance(content, str) else content)
    assert check_images(records, np.arange(len(records)), tmp_path / "cache") == found
    assert memory.read_bytes() == whole


def test_what_may_pass_is_not_remembered(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights leave no trace in a file's size and time."""
    for name in "abc":
        (tree / name / "2.jpg").unlink()

    really = os.open

    def forbidden(path: str, *more: Any) -> int:
        if str(path).endswith(".jpg"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return really(path, *more)

    records = folder(str(tree))
    with monkeypatch.context() as patch:
        patch.setattr("dml.data.images.os.open", forbidden)
        with pytest.raises(UserError, match=r"6 of the 6 images .*a/0\.jpg \(Permission denied\), "):
            readable(records, tmp_path / "cache")
    assert readable(records, tmp_path / "cache") is records


def test_all_ranks_check_once(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits, and reads what the first has found."""
    checked: list[int] = []
    really = check._decode_all

    def slowly(*given: Any) -> dict[int, Exception]:
        checked.append(1)
        time.sleep(0.3)
        return really(*given)

    monkeypatch.setattr(check, "_decode_all", slowly)
    data = folder(str(tree))
    rows = np.arange(len(data))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: check_images(data, rows, tmp_path / "cache"), range(3)))
    assert len(checked) == 1
    assert found[0] == found[1] == found[2]
