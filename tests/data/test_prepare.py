"""Fetching from a real server that misbehaves, and unpacking what should and should not be unpacked."""

import io
import json
import multiprocessing
import os
import shutil
import stat
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import DictConfig, OmegaConf

from dml import fetch as fetching
from dml.data import preparation as preparing
from dml.data.cars196 import cars196
from dml.data.miniatures import MAKERS
from dml.data.preparation import prepare
from dml.data.prepare import main
from dml.data.sop import sop
from dml.data.unpack import take
from dml.errors import UserError
from dml.fetch import fetch
from dml.files import alone

Configure = Callable[..., DictConfig]
CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8).tobytes()

ODD = ("/slow", "/slow_headers", "/waits", "/endless", "/huge")


class Server(BaseHTTPRequestHandler):
    """`/slow` (a byte at a time), `/slow_headers`, `/waits` (before it answers), `/endless` (without a length), `/huge`
    (10^15 bytes, it says); `/whole`, `/breaks` (after 100,000 bytes a time), `/breaks_without_ranges`, `/changes`
    (another file, another ETag, each time), `/page` (a login), `/busy` (503 twice), `/gone` (404); `/files/...` are
    files."""

    asked: ClassVar[list[tuple[str, str | None]]] = []
    files: ClassVar[dict[str, bytes]] = {}
    times: ClassVar[dict[str, int]] = {}

    def do_GET(self) -> None:
        name, wanted = self.path.partition("?")[0], self.headers.get("Range")
        self.asked.append((name, wanted))
        self.times[name] = self.times.get(name, 0) + 1
        content = self.files.get(name, CONTENT)
        mark = '"1"'
        if name in ODD:
            self.odd(name)
            return
        if name == "/gone":
            self.send_error(404)
            return
        if name == "/busy" and self.times[name] < 3:
            self.send_error(503)
            return
        if name == "/changes":
            content, mark = bytes([self.times[name]]) + CONTENT[1:], f'"{self.times[name]}"'
        start = 0
        if wanted and name != "/breaks_without_ranges" and self.headers.get("If-Range") == mark:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", mark)
        self.send_header("Content-Type", "text/html" if name == "/page" else "application/octet-stream")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        part = content[start:]
        if name.startswith("/breaks") or (name == "/changes" and self.times[name] == 1):
            often = self.times[name] >= 4 if name == "/breaks_without_ranges" else False
            part = part if often else part[:100_000]
        self.wfile.write(part)

    def odd(self, name: str) -> None:
        with suppress(OSError):  # the client has enough
            if name == "/slow_headers":
                self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Header: ")
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.01)
            if name == "/waits":
                time.sleep(1.2)
            self.send_response(200)
            if name in ("/waits", "/slow", "/huge"):
                self.send_header("Content-Length", str(10**15 if name == "/huge" else len(CONTENT)))
            self.end_headers()
            if name == "/waits":
                self.wfile.write(CONTENT)
            while name != "/waits":
                self.wfile.write(b"x" if name == "/slow" else bytes(10_000))
                time.sleep(0.01 if name == "/slow" else 0)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(fetching, "PAUSE", 0.01)
    for memory in (Server.asked, Server.files, Server.times):
        memory.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["whole", "breaks", "breaks_without_ranges", "changes", "busy"])
def test_a_file_arrives(server: str, tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    fetch(f"{server}/{name}", path)
    expected = bytes([2]) + CONTENT[1:] if name == "changes" else CONTENT
    assert path.read_bytes() == expected
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    ranges = [wanted for _, wanted in Server.asked]
    if name == "breaks":
        assert ranges == [None, "bytes=100000-", "bytes=200000-"]
    fetch(f"{server}/{name}", path)
    assert len(Server.asked) == len(ranges)  # it is there


def test_the_next_start_goes_on(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    monkeypatch.setattr(fetching, "ATTEMPTS", 2)
    with pytest.raises(UserError, match=r"cannot be fetched \(the connection broke off after 200000 of 300000 bytes\)"):
        fetch(f"{server}/breaks", path)
    assert not path.exists()
    fetch(f"{server}/breaks", path)
    assert path.read_bytes() == CONTENT
    assert [wanted for _, wanted in Server.asked] == [None, "bytes=100000-", "bytes=200000-"]


def test_what_another_address_left_is_not_gone_on_with(server: str, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"something else")
    (tmp_path / "file.part.json").write_text(json.dumps({"url": "http://elsewhere", "is": '"1"', "size": 99}))
    fetch(f"{server}/whole", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone", "answers 404"),
        ("page", "gives a web page and no file: the address is dead or wants a login"),
        ("whole", r"gives another file than the expected one \(its MD5 is \w+, expected 00\): it was not kept"),
    ],
)
def test_what_is_no_file(server: str, tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^{server}/{name} {said}"):
        fetch(f"{server}/{name}", tmp_path / "file", md5="00")
    assert not list(tmp_path.iterdir())


def test_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PAUSE", 0.0)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/x cannot be fetched"):
        fetch("http://127.0.0.1:9/x", tmp_path / "file")


@pytest.mark.parametrize("name", ["slow", "slow_headers"])
def test_a_byte_at_a_time_is_not_waited_for(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(fetching, "GRACE", 0.3)
    monkeypatch.setattr(fetching, "ATTEMPTS", 2)
    with pytest.raises(UserError, match=r"cannot be fetched \(.*\d+ bytes came in [01] seconds"):
        fetch(f"{server}/{name}", tmp_path / "file")
    assert len(Server.asked) == 2
    assert not (tmp_path / "file").exists()


@pytest.mark.slow
def test_a_server_may_take_its_time(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the grace, where much comes then."""
    monkeypatch.setattr(fetching, "GRACE", 1.0)
    fetch(f"{server}/waits", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert len(Server.asked) == 1


@pytest.mark.parametrize(
    ("name", "at_most", "said"),
    [
        (
            "endless",
            1_000_000,
            r"sends 0\.00 GB and more, and the file should have 0\.00 GB at most: it is a wrong file",
        ),
        ("endless", None, r"sends 0\.00 GB and more, and .* has 0\.00 GB to spare: free some disk space"),
        ("huge", 1_000_000, r"has 1000000\.00 GB, and the file should have 0\.00 GB at most"),
        ("huge", None, r"has 1000000\.00 GB, and .* to spare: free some disk space"),
        ("whole", 299_999, r"has 0\.00 GB, and the file should"),
    ],
)
def test_no_more_than_there_should_be(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at_most: int | None, said: str
) -> None:
    if name == "endless" and at_most is None:
        monkeypatch.setattr(fetching, "SPARE", shutil.disk_usage(tmp_path).free - 2_000_000)
    with pytest.raises(UserError, match=f"^{server}/{name} {said}"):
        fetch(f"{server}/{name}", tmp_path / "file", at_most=at_most)
    assert not list(tmp_path.iterdir())
    assert len(Server.asked) == 1


def test_as_much_as_there_may_be(server: str, tmp_path: Path) -> None:
    fetch(f"{server}/whole", tmp_path / "file", at_most=300_000)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("url", ["file:///dev/zero", "ftp://127.0.0.1/x", "data:,x"])
def test_only_from_web_servers(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match=r"can be fetched: give one that begins with http:// or https://"):
        fetch(url, tmp_path / "file")


# --- a data set from its archives ---


@pytest.fixture
def config_of(configure: Configure, tmp_path: Path) -> Callable[..., DictConfig]:
    """Of a data set that is to lie below `data ü`, counts not asked for."""

    def config_of(name: str, **download: Any) -> DictConfig:
        options = [f"dataset={name}", f"paths.data_dir='{tmp_path / 'data ü'}'", "dataset.strict=false"]
        config = configure(*options)
        OmegaConf.update(config, "download", download, merge=True)
        return config

    return config_of


def zipped(source: Path, path: Path, inside: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(source.rglob("*")):
            if file.is_file():
                archive.write(file, f"{inside}{file.relative_to(source).as_posix()}")
    return path


def tarred(source: Path, path: Path, inside: str = "", mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        archive.add(source, inside or ".")
    return path


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cub200", "zip"),
        ("cub200", "tgz"),
        ("cub200", "folder"),
        ("cars196", "tgz"),
        ("cars196_devkit", "zip"),
        ("sop", "zip"),
        ("inshop", "zip"),
        ("vehicleid", "tgz"),
        ("market1501", "zip"),
    ],
)
def test_official_archives(config_of: Callable[..., DictConfig], tmp_path: Path, name: str, kind: str) -> None:
    source = tmp_path / "my files"
    MAKERS[name](source)
    config = config_of(name.removesuffix("_devkit"))
    given = (
        {"zip": zipped, "tgz": tarred}[kind](source, tmp_path / f"a.{kind}", "name/") if kind != "folder" else source
    )
    root = prepare(config, [str(given)])
    assert root == Path(config.dataset.root)
    for file in source.rglob("*"):
        if file.is_file():
            assert (root / file.relative_to(source)).read_bytes() == file.read_bytes()
    card = json.loads((root / "dataset.json").read_text())
    assert card["dataset"] == name.removesuffix("_devkit")
    assert sum(part["images"] for part in card["parts"].values()) > 8
    assert left(root.parent) == [root.name]
    assert prepare(config) == root  # it is there


def test_several_archives_in_a_folder(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    """As In-Shop is handed out: the images in a zip, the list beside it."""
    MAKERS["inshop"](tmp_path / "made")
    source = tmp_path / "downloaded"
    (source / "Eval").mkdir(parents=True)
    os.rename(tmp_path / "made/Eval/list_eval_partition.txt", source / "Eval/list_eval_partition.txt")
    zipped(tmp_path / "made", source / "img.zip")
    root = prepare(config_of("inshop"), [str(source)])
    assert len(list(root.rglob("*.jpg"))) == 32
    assert (source / "img.zip").exists()  # the user's files stay


def test_from_a_mirror(config_of: Callable[..., DictConfig], tmp_path: Path, server: str) -> None:
    """The first is gone, the second breaks off: a resumed download, unpacked."""
    MAKERS["sop"](tmp_path / "made")
    with (tmp_path / "made" / "padding.bin").open("wb") as file:
        file.write(CONTENT)
    archive = zipped(tmp_path / "made", tmp_path / "a.zip", "Stanford_Online_Products/")
    Server.files["/breaks/a.zip"] = archive.read_bytes()
    files = [{"name": "a.zip", "mirrors": [f"{server}/gone", f"{server}/breaks/a.zip"]}]
    root = prepare(config_of("sop", files=files), [])
    assert len(list(root.rglob("*.JPG"))) == 48
    assert sum(name == "/breaks/a.zip" for name, _ in Server.asked) > 1
    assert left(root.parent) == [root.name]


def test_no_mirror_answers(config_of: Callable[..., DictConfig], server: str) -> None:
    files = [{"name": "a.zip", "mirrors": [f"{server}/gone", f"{server}/page"]}]
    with pytest.raises(UserError, match=r"answers 404.*web page.* By hand: .*CUB_200_2011\.tgz.* Then: python -m dml"):
        prepare(config_of("cub200", files=files), [])


def test_only_by_hand(config_of: Callable[..., DictConfig]) -> None:
    with pytest.raises(
        UserError, match=r"no public mirror .*img\.zip and Eval/list_eval_partition\.txt\. Then: python"
    ):
        prepare(config_of("inshop"), [])


# --- re-packagings ---


@pytest.mark.slow
def test_kaggle_with_folders_twice(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    """`cars_train/cars_train/`, and annotations of the devkit apart, one renamed by a browser."""
    made = tmp_path / "made"
    MAKERS["cars196_devkit"](made)
    expected = cars196(str(made), strict=False)
    kaggle = tmp_path / "kaggle"
    for part in ("cars_train", "cars_test"):
        (kaggle / part).mkdir(parents=True)
        os.rename(made / part, kaggle / part / part)
    annotations = tmp_path / "cars_test_annos_withlabels (1).mat"
    os.rename(made / "devkit/cars_test_annos_withlabels.mat", annotations)
    sources = [zipped(kaggle, tmp_path / "archive.zip"), tarred(made, tmp_path / "car_devkit.tgz", "."), annotations]
    root = prepare(config_of("cars196"), [str(source) for source in sources])
    found = cars196(str(root), crop="box", strict=False)
    assert [Path(path).name for path in found.paths] == [Path(path).name for path in expected.paths]
    assert found.class_names == expected.class_names


@pytest.mark.slow
def test_kaggle_by_class(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    """`names.csv anno_train.csv anno_test.csv car_data/car_data/train/<name>/<file>`."""
    made, kaggle = tmp_path / "made", tmp_path / "kaggle"
    MAKERS["cars196_devkit"](made)
    expected = cars196(str(made), crop="box", strict=False)
    pixels = {Path(p).parts[-2:]: expected.image(i).tobytes() for i, p in enumerate(expected.paths)}
    labels = {Path(p).parts[-2:]: expected.class_names[expected.labels[i]] for i, p in enumerate(expected.paths)}
    for part in ("train", "test"):
        lines = []
        for file in sorted((made / f"cars_{part}").iterdir()):
            label = labels[f"cars_{part}", file.name]
            lines.append(f"{file.name},3,{2 + int(file.stem) % 2 ^ 1},30,28,{label}")
            place = kaggle / "car_data/car_data" / part / f"A car no. {label}"
            place.mkdir(parents=True, exist_ok=True)
            os.rename(file, place / file.name)
        (kaggle / f"anno_{part}.csv").write_text("\n".join(lines) + "\n")
    (kaggle / "names.csv").write_text("\n".join(f"A car no. {i}" for i in range(1, 197)))
    root = prepare(config_of("cars196"), [str(zipped(kaggle, tmp_path / "archive.zip"))])
    found = cars196(str(root), crop="box", strict=False)
    assert {Path(p).parts[-2:]: found.class_names[found.labels[i]] for i, p in enumerate(found.paths)} == labels
    assert {Path(p).parts[-2:]: found.image(i).tobytes() for i, p in enumerate(found.paths)} == pixels


@pytest.mark.exhaustive
def test_hugging_face_cars(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    made, source = tmp_path / "made", tmp_path / "hub" / "data"
    MAKERS["cars196_devkit"](made)
    expected = cars196(str(made), strict=False)
    source.mkdir(parents=True)
    for part in ("train", "test"):
        rows = [i for i, path in enumerate(expected.paths) if f"cars_{part}" in path]
        images = [{"bytes": Path(expected.paths[i]).read_bytes(), "path": None} for i in rows]
        labels = [int(expected.class_names[expected.labels[i]]) - 1 for i in rows]
        pq.write_table(pa.table({"image": images, "label": labels}), source / f"{part}-00000-of-00001.parquet")
    root = prepare(config_of("cars196"), [str(source.parent)])
    found = cars196(str(root), strict=False)
    assert sorted((found.class_names[c], found.image(i).tobytes()) for i, c in enumerate(found.labels)) == sorted(
        (expected.class_names[c], expected.image(i).tobytes()) for i, c in enumerate(expected.labels)
    )
    with pytest.raises(UserError, match="without a class or a box"):
        cars196(str(root), crop="box", strict=False)


def test_hugging_face_sop(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    made, source = tmp_path / "made", tmp_path / "hub"
    MAKERS["sop"](made)
    source.mkdir()
    for part in ("train", "test"):
        rows = [line.split() for line in (made / f"Ebay_{part}.txt").read_text().splitlines()[1:]]
        table = {
            "image": [{"bytes": (made / row[3]).read_bytes(), "path": None} for row in rows],
            "class_id": [int(row[1]) for row in rows],
            "super_class_id": [int(row[2]) for row in rows],
            "path": [row[3] for row in rows],
        }
        pq.write_table(pa.table(table), source / f"{part}-00000-of-00001.parquet")
    root = prepare(config_of("sop"), [str(source)])
    found, expected = sop(str(root), strict=False), sop(str(made), strict=False)
    assert [Path(p).relative_to(root) for p in found.paths] == [Path(p).relative_to(made) for p in expected.paths]
    assert (found.labels == expected.labels).all()
    assert (found.roles == expected.roles).all()


def test_a_damaged_table(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [1], "name": ["x"]}), tmp_path / "train-0.parquet")
    with pytest.raises(UserError, match=r"train-0\.parquet has the columns image, name, and not label"):
        prepare(config_of("cars196"), [str(tmp_path / "train-0.parquet")])
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"train-0\.parquet is cut short or damaged"):
        prepare(config_of("cars196"), [str(tmp_path / "train-0.parquet")])


# --- archives that should not be unpacked ---


def zip_with(path: Path, *names: str, link: bool = False) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (stat.S_IFLNK | 0o777) << 16 if link else 0o644 << 16
            archive.writestr(entry, "/etc/passwd")
    return path


def tar_with(path: Path, *names: str, kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, "/etc/passwd", 3 if kind == tarfile.REGTYPE else 0
            archive.addfile(entry, io.BytesIO(b"bad"))
    return path


WICKED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "zip upwards": (lambda p: zip_with(p / "a.zip", "../../out"), "leads out of its folder"),
    "zip absolute": (lambda p: zip_with(p / "a.zip", "/tmp/out"), "leads out of its folder"),
    "zip backslash": (lambda p: zip_with(p / "a.zip", "..\\out"), "leads out of its folder"),
    "zip drive": (lambda p: zip_with(p / "a.zip", "C:/out"), "leads out of its folder"),
    "zip link": (lambda p: zip_with(p / "a.zip", "link", link=True), "holds a link"),
    "tar upwards": (lambda p: tar_with(p / "a.tgz", "x/../../out"), "leads out of its folder"),
    "tar absolute": (lambda p: tar_with(p / "a.tgz", "/tmp/out"), "leads out of its folder"),
    "tar link": (lambda p: tar_with(p / "a.tgz", "link", kind=tarfile.SYMTYPE), "holds a link or a device"),
    "tar hard link": (lambda p: tar_with(p / "a.tgz", "link", kind=tarfile.LNKTYPE), "holds a link or a device"),
    "tar device": (lambda p: tar_with(p / "a.tgz", "null", kind=tarfile.CHRTYPE), "holds a link or a device"),
    "tar twice": (lambda p: tar_with(p / "a.tgz", "images.txt", "images.txt"), "which exists already"),
}


@pytest.mark.parametrize("name", WICKED)
def test_wicked_archives(config_of: Callable[..., DictConfig], tmp_path: Path, name: str) -> None:
    (tmp_path / "given").mkdir()
    config = config_of("cub200")
    make, said = WICKED[name]
    with pytest.raises(UserError, match=said):
        prepare(config, [str(make(tmp_path / "given"))])
    assert not list(tmp_path.rglob("out"))
    assert left(Path(config.paths.data_dir)) == []


@pytest.mark.parametrize(
    ("kind", "share"), [("zip", 0.02), ("zip", 0.97), ("tgz", 0.02), ("tgz", 0.5), ("tgz", 0.97), ("tar", 0.5)]
)
def test_truncated_archives(config_of: Callable[..., DictConfig], tmp_path: Path, kind: str, share: float) -> None:
    MAKERS["cub200"](tmp_path / "made")
    path = tmp_path / f"a.{kind}"
    if kind == "zip":
        zipped(tmp_path / "made", path)
    else:
        tarred(tmp_path / "made", path, mode="w:gz" if kind == "tgz" else "w")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    config = config_of("cub200")
    with pytest.raises(UserError, match=r"cut short|what was unpacked does not hold|nowhere"):
        prepare(config, [str(path)])
    assert left(Path(config.paths.data_dir)) == []


def test_a_bomb(config_of: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GB of zeros in 2 MB, on a disk with less room."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("zeros", "w") as file:
        for _ in range(50):
            file.write(bytes(10**6))
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: os.terminal_size((0, 0)) and type("", (), {"free": 10**9 + 10**7})
    )
    with pytest.raises(UserError, match=r"^\S+a\.zip unpacks to 0\.1 GB and more, and .* has 0\.0 GB to spare"):
        prepare(config_of("cub200"), [str(tmp_path / "a.zip")])


@pytest.mark.parametrize("content", [b"<!DOCTYPE html><html>log in</html>", b"Rar!\x1a\x07 something", b""])
def test_what_is_no_archive(config_of: Callable[..., DictConfig], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"is a web page and no archive|is neither a zip nor a tar archive"):
        prepare(config_of("cub200"), [str(tmp_path / "a.zip")])


def test_a_pipe_is_not_waited_for(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.zip")
    with pytest.raises(UserError, match=r"a\.zip is neither a file nor a folder"):
        prepare(config_of("cub200"), [str(tmp_path / "a.zip")])


def test_another_data_set(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    MAKERS["sop"](tmp_path / "made")
    with pytest.raises(UserError, match=r"the sources hold .*Ebay_test\.txt.*, and nowhere images\.txt with"):
        prepare(config_of("cub200"), [str(tmp_path / "made")])


def test_a_part_of_the_data_set(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    """Nothing is left of it."""
    MAKERS["sop"](tmp_path / "made")
    config = config_of("sop")
    config.dataset.strict = True
    with pytest.raises(UserError, match=r"what was unpacked does not hold: .*published are 11318 with 59551"):
        prepare(config, [str(tmp_path / "made")])
    assert left(Path(config.paths.data_dir)) == []


def test_something_else_is_there(config_of: Callable[..., DictConfig]) -> None:
    config = config_of("cub200")
    root = Path(config.dataset.root)
    root.mkdir(parents=True)
    (root / "diary.txt").write_text("")
    with pytest.raises(UserError, match=r"CUB_200_2011 is there already, but: there is no .*images\.txt"):
        prepare(config)
    assert (root / "diary.txt").exists()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    MAKERS["cub200"](tmp_path / "made")

    def said(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["prepare", f"paths.data_dir={tmp_path / 'data'}", *options])
        try:
            main()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, out + err

    place = tmp_path / "data/CUB_200_2011"
    counts = "cub200, train 16 images of 4 classes, test 16 images of 4 classes.\n"
    options = ("dataset=cub200", "dataset.strict=false")
    assert said(*options, f"source={tmp_path / 'made'}") == (0, f"{place}: {counts}")
    assert said(*options) == (0, f"{place} is complete: {counts}")
    assert said("dataset=sop", "source=nowhere.zip")[0] == 2
    assert said("dataset=cub20")[0] == 2
    assert said("dataset=glyphs") == (
        2,
        "dml: this data set has no official layout to prepare: give dataset=NAME of a benchmark, as dataset=cub200.\n",
    )
    assert "dataset=cars196 source=archive.zip" in said("--help")[1]


@pytest.mark.parametrize("kind", ["one name in two folders", "an annotation beside a re-packaging", "links"])
def test_the_users_files_stay_as_they_are(config_of: Callable[..., DictConfig], tmp_path: Path, kind: str) -> None:
    """What is unpacked may share its bytes with them."""
    source = tmp_path / "mine"
    if kind == "one name in two folders":
        MAKERS["sop"](source)
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "Ebay_train.txt").write_text("other")
        with pytest.raises(UserError, match=r"two sources hold Ebay_train\.txt"):
            prepare(config_of("sop"), [str(source), str(tmp_path / "more")])
        assert (source / "Ebay_train.txt").read_text().startswith("image_id")
        assert (tmp_path / "more" / "Ebay_train.txt").read_text() == "other"
    elif kind == "an annotation beside a re-packaging":
        MAKERS["cars196_devkit"](source)
        before = (source / "devkit/cars_train_annos.mat").read_bytes()
        (source / "anno_train.csv").write_text("00001.jpg,1,2,3,4,95\n")
        config = config_of("cars196")
        config.dataset.strict = True
        with pytest.raises(UserError, match="does not hold"):
            prepare(config, [str(source)])
        assert (source / "devkit/cars_train_annos.mat").read_bytes() == before
    else:
        MAKERS["sop"](tmp_path / "elsewhere")
        source.mkdir()
        for name in ("Ebay_train.txt", "Ebay_test.txt", "chair_final", "lamp_final"):
            (source / name).symlink_to(Path("..") / "elsewhere" / name)
        root = prepare(config_of("sop"), [str(source)])
        assert len([path for path in root.rglob("*.JPG") if path.is_file()]) == 48


def test_as_inshop_is_handed_out(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    """`Img/img.zip`, hidden files of macOS in it, and `Eval/list_eval_partition.txt`."""
    MAKERS["inshop"](tmp_path / "made")
    source = tmp_path / "downloaded"
    (source / "Img").mkdir(parents=True)
    os.rename(tmp_path / "made/Eval", source / "Eval")
    for litter in ("__MACOSX/img/._x.jpg", "img/WOMEN/._x.jpg", ".DS_Store"):
        (tmp_path / "made" / litter).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / litter).write_bytes(b"litter")
    zipped(tmp_path / "made", source / "Img" / "img.zip")
    root = prepare(config_of("inshop"), [str(source)])
    assert len(list((root / "img").rglob("*.jpg"))) == 32
    assert not list(root.rglob("._*"))


def test_a_damaged_download_is_fetched_anew(config_of: Callable[..., DictConfig], tmp_path: Path, server: str) -> None:
    MAKERS["sop"](tmp_path / "made")
    whole = zipped(tmp_path / "made", tmp_path / "a.zip").read_bytes()
    config = config_of("sop", files=[{"name": "a.zip", "mirrors": [f"{server}/files/a.zip"]}])
    Server.files["/files/a.zip"] = whole[: len(whole) // 2]
    with pytest.raises(UserError, match=r"a\.zip is cut short or damaged"):
        prepare(config)
    Server.files["/files/a.zip"] = whole
    assert len(list(prepare(config).rglob("*.JPG"))) == 48


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/ä b.zip", "http://[x/a.zip"])
def test_odd_addresses(config_of: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(fetching, "PAUSE", 0.0)
    with pytest.raises(UserError, match=r"cannot be fetched|is no address|is no URL"):
        prepare(config_of("sop"), [url])


def test_nothing_to_prepare(configure: Configure) -> None:
    with pytest.raises(UserError, match="give dataset=NAME"):
        prepare(configure("dataset=glyphs"))


def prepare_slowly(config: DictConfig, source: str, log: Path) -> None:
    """Says in `log` when it began and ended to unpack."""
    unpack = preparing.take

    def slow(path: Path, staging: Path, beside: Sequence[Path]) -> None:
        with log.open("a") as file:
            file.write("begins ")
        time.sleep(0.2)
        unpack(path, staging, beside)
        with log.open("a") as file:
            file.write("ends ")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "take", slow)
        prepare(config, [source])


def test_several_at_once_and_no_lock_left(config_of: Callable[..., DictConfig], tmp_path: Path) -> None:
    MAKERS["cub200"](tmp_path / "made")
    config, context = config_of("cub200"), multiprocessing.get_context("fork")
    jobs = [
        context.Process(target=prepare_slowly, args=(config, str(tmp_path / "made"), tmp_path / "log"))
        for _ in range(4)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert (tmp_path / "log").read_text() == "begins ends "
    assert [path.name for path in (tmp_path / "data ü").iterdir()] == ["CUB_200_2011"]


def test_one_waits_for_a_lock_that_goes(tmp_path: Path) -> None:
    """Each of many holds it alone, though its file goes each time."""
    held, most, times = [0], [0], [0]
    guard = threading.Lock()

    def take() -> None:
        for _ in range(20):
            with alone(tmp_path / "lock"):
                with guard:
                    held[0] += 1
                    most[0] = max(most[0], held[0])
                    times[0] += 1
                time.sleep(0.001)
                with guard:
                    held[0] -= 1

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most[0], times[0]) == (1, 120)
    assert not list(tmp_path.iterdir())


def test_a_source_may_hold_the_place_of_the_data_set(tmp_path: Path) -> None:
    """And links that lead back to it."""
    source = tmp_path / "data"
    staging = source / ".set.unpacking"
    (source / "images").mkdir(parents=True)
    staging.mkdir()
    (source / "images" / "1.jpg").write_bytes(b"a picture")
    (source / "images" / "back").symlink_to(source)
    take(source, staging, (staging,))
    assert [str(path.relative_to(staging)) for path in sorted(staging.rglob("*"))] == ["images", "images/1.jpg"]


def test_options_are_checked_before_anything_is_fetched(config_of: Callable[..., DictConfig]) -> None:
    config = config_of("cub200")
    config.dataset.crop = "foo"
    with pytest.raises(UserError, match=r"dataset\.crop=foo"):
        prepare(config)
