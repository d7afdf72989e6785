"""Paths as a column: that they read as they were given, and what is said of their files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dml.data.paths import CHUNK, NO_FILE, Paths

ODD = ["", "a", "zé/\U0001f600", os.fsdecode(b"b\xff/\x80.jpg"), "U+0041 A 000", "a" * 300, "/", "\uf000"]


def test_a_column_reads_as_it_was_given() -> None:
    column = Paths.of(iter(ODD))
    assert (len(column), column.tolist(), list(column)) == (len(ODD), ODD, ODD)
    assert [column[row] for row in range(len(ODD))] == ODD
    assert column[-2] == "/"
    for rows in ([3, 3, 0], [], list(range(len(ODD)))[::-1]):
        assert column[np.array(rows, np.int64)].tolist() == [ODD[row] for row in rows]
    assert column[np.array([True, *[False] * 6, True])].tolist() == ["", "\uf000"]
    with pytest.raises(IndexError):
        column[len(ODD)]
    with pytest.raises(ValueError, match="zero byte"):
        Paths.of(["a\0b"])


def test_a_column_of_several_chunks() -> None:
    names = [f"{'é' * (i % 3)}{i}" for i in range(CHUNK + 10)]
    column = Paths.of(names)
    assert column.tolist() == names
    rows = np.random.default_rng(0).permutation(len(names))
    assert column[rows].tolist() == [names[row] for row in rows]


def test_what_is_said_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "a" / "1").write_bytes(b"four")
    os.utime(tmp_path / "a" / "1", (7, 7))
    (tmp_path / "link").symlink_to("a/1")
    (tmp_path / "hard").hardlink_to(tmp_path / "a" / "1")  # a file of its own, though it looks alike
    (tmp_path / "c").write_bytes(b"")
    (tmp_path / "c").chmod(0)
    same = [f"{tmp_path}/a/1", "a/1", "b/1", "./b//1", "a/../a/1", "nowhere/../a/1"]
    others = ["a/2", "b/3", "a/1/x", "nowhere/1", "nowhere/else/1", "c", "x", "hard"]
    column = Paths.of([*same, *others, "link"])
    files = column.files
    assert files.sizes.tolist() == [*[4] * 5, *[NO_FILE] * 6, 0, NO_FILE, 4, 4]
    assert files.times.tolist()[:5] == [7 * 10**9] * 5
    assert len(set(files.places[[*range(6), 14]].tolist())) == 1
    assert len({*files.places[5:14].tolist()}) == 9
    some = column[np.array([12, 1])]
    (tmp_path / "a" / "1").unlink()
    assert some.files.sizes.tolist() == [NO_FILE, 4]  # what was found then
    assert list(column.stamps(np.array([1, 6, 11]))) == [f"a/1\x004\x00{7 * 10**9}", f"c\x000\x00{files.times[11]}"]


@pytest.mark.parametrize("order", ["sorted", "random"])
@pytest.mark.exhaustive
def test_ten_million_images_of_a_million_classes(order: str) -> None:
    """Records, split, samplers, data module and a batch, in less than 4 GB and a minute or two on a busy core."""
    benchmark = Path(__file__).parents[2] / "experiments/bench/scale.py"
    command = [sys.executable, benchmark, "--here", "--images", "10000000", "--order", order]
    figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    print({name: round(value, 2) for name, value in figures.items()})
    assert figures["peak"] < 4
    assert sum(figures.values()) < 240
