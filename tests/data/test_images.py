"""Which files are opened at all, and that what is read of them is what a person would see."""

import os
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dml.data.cache import build_cache
from dml.data.check import readable
from dml.data.folder import folder
from dml.data.images import decode, quiet
from dml.errors import UserError
from dml.inference.embedding import opened, picture_of
from dml.inference.places import image_files
from tests.components import components, transform

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n%%EOF\n"
RAMP = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
TURN = {
    1: lambda p: p,
    2: np.fliplr,
    3: lambda p: np.rot90(p, 2),
    4: np.flipud,
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: np.rot90(p, 2).swapaxes(0, 1),
    8: lambda p: np.rot90(p, 1),
}


def tiff(path: Path, pixels: bytes, bits: int, kind: int = 1, photometric: int = 1, side: int = 8) -> str:
    """A grey picture as no writer of PIL's makes it."""
    tags = {256: side, 257: side, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: side, 279: len(pixels)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in (tags | {339: kind}).items())
    directory = struct.pack("<H", len(tags) + 1) + entries + bytes(4)
    path.write_bytes(b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + directory)
    return str(path)


def png(path: Path, width: int, height: int) -> Path:
    """All black, of few bytes whatever its size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + (width + 7) // 8) * height), 9)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    return path


@pytest.mark.parametrize("turn", TURN)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.jpg", {}),
        ("a.png", {}),
        ("a.webp", {"lossless": True}),
        ("a.tif", {}),
        ("b.tif", {"compression": "tiff_lzw"}),
    ],
)
def test_pictures_stand_upright(tmp_path: Path, turn: int, name: str, options: dict[str, str]) -> None:
    pixels = np.zeros((24, 40, 3), np.uint8)
    pixels[:8, :16], pixels[16:, :8] = 255, 128
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.fromarray(pixels).save(tmp_path / name, exif=exif, **options)
    found = np.asarray(decode(str(tmp_path / name)))
    expected = TURN[turn](pixels)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() < 8  # JPEG


@pytest.mark.parametrize("turn", TURN)
@pytest.mark.parametrize(("name", "options"), [("a.png", {}), ("a.tif", {}), ("b.tif", {"compression": "tiff_lzw"})])
def test_a_box_is_of_the_stored_pixels(tmp_path: Path, turn: int, name: str, options: dict[str, str]) -> None:
    """Also of TIFF files, which PIL turns before they can be cut."""
    exif = Image.Exif()
    exif[0x0112] = turn
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / name, exif=exif, **options)
    assert np.array_equal(decode(str(tmp_path / name), (3, 5, 13, 20)), TURN[turn](pixels[5:20, 3:13]))
    with pytest.raises(ValueError, match="lies outside its 40 x 24 pixels"):
        decode(str(tmp_path / name), (3, 24, 13, 30))


@pytest.mark.parametrize("box", [(40, 0, 50, 10), (0, 24, 10, 30)])
def test_a_box_outside_the_image_is_told(tmp_path: Path, box: tuple[int, int, int, int]) -> None:
    Image.fromarray(np.zeros((24, 40, 3), np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"its box, from \d+ \d+, lies outside its 40 x 24 pixels"):
        decode(str(tmp_path / "a.png"), box)


def test_damaged_metadata_does_not_matter(tmp_path: Path) -> None:
    Image.fromarray(RAMP).save(tmp_path / "a.png", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    with quiet():
        assert np.array_equal(np.asarray(decode(str(tmp_path / "a.png")))[..., 0], RAMP)


@pytest.mark.parametrize("name", ["8", "12", "16", "16, white is 0", "16 of PNG"])
def test_all_levels_come_down_to_256(tmp_path: Path, name: str) -> None:
    deep = RAMP.astype("<u2") << 8
    if name == "12":
        pairs = (RAMP.astype(int) << 4).reshape(-1, 2)
        packed = [(a >> 4, (a & 15) << 4 | b >> 8, b & 255) for a, b in pairs.tolist()]
        path = tiff(tmp_path / "a.tif", bytes(np.array(packed, np.uint8).tobytes()), 12)
    elif name == "16 of PNG":
        Image.fromarray(deep).save(tmp_path / "a.png")
        path = str(tmp_path / "a.png")
    elif name == "8":
        path = tiff(tmp_path / "a.tif", RAMP.tobytes(), 8)
    else:
        path = tiff(
            tmp_path / "a.tif", (65535 - deep if "white" in name else deep).tobytes(), 16, 1, "white" not in name
        )
    found = np.asarray(decode(path))
    assert np.array_equal(found, np.repeat(RAMP[..., None], 3, 2))


@pytest.mark.parametrize("kind", ["float32", "int32", "int16", "int8", "uint32"])
def test_pixels_of_no_known_range_are_refused(tmp_path: Path, kind: str) -> None:
    pixels = (RAMP.astype(kind) / 255 if kind == "float32" else RAMP >> 1).astype(kind)
    sort = {"f": 3, "i": 2, "u": 1}[pixels.dtype.kind]
    with pytest.raises(ValueError, match="and their range is unknown: save it with 8 or 16 bits"):
        decode(tiff(tmp_path / "a.tif", pixels.tobytes(), pixels.itemsize * 8, sort))


def test_no_other_format_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL would hand PostScript to Ghostscript."""
    started: list[object] = []
    monkeypatch.setattr(subprocess, "check_call", lambda *a, **k: started.append(a))
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")
    (tmp_path / "x.jpg").write_bytes(POSTSCRIPT)
    Image.fromarray(RAMP).save(tmp_path / "y.jpg", format="PPM")
    for name in ("x.jpg", "y.jpg"):
        with pytest.raises(ValueError, match="it is damaged, or none of JPEG, PNG, WEBP, BMP, GIF, TIFF"):
            decode(str(tmp_path / name))
    assert not started


def tree(root: Path, wrong: Callable[[Path], object]) -> Path:
    """Two classes of two pictures and, as the last of the second, one that is wrong."""
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(RAMP).save(root / name / f"{i}.png")
    wrong(root / "b" / "2.png")
    return root


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")), "it is no regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
    "PostScript": (lambda path: path.write_bytes(POSTSCRIPT), "it is damaged, or none of JPEG"),
    "float": (lambda path: tiff(path, RAMP.astype("<f4").tobytes(), 32, 3), "and their range is unknown"),
    "narrow": (lambda path: png(path, 1, 65_000), "1 x 65000 pixels are more than 100 times as long as wide"),
    "bomb": (lambda path: png(path, 30_000, 30_000), r"Image size \(900000000 pixels\) exceeds limit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wherever_images_are_opened(tmp_path: Path, name: str) -> None:
    """In a data set, its check and cache, and among the images of python -m dml.embed and dml.search."""
    make, said = WRONG[name]
    root = tree(tmp_path / "photographs", make)
    records = folder(str(root))
    assert len(records) == 5
    with pytest.raises(UserError, match=rf"1 of the 5 images .*b/2\.png \(.*{said}"):
        readable(records, tmp_path / "cache")
    with pytest.raises(UserError, match=rf"b/2\.png cannot be read \(.*{said}"):
        build_cache(records, np.arange(5), transform("plain", "test", 8), "", tmp_path / "cache")
    ((*_, (path, told)),) = opened(transform("plain", "test", 8), [image_files([root])], picture_of)
    assert path == root / "b" / "2.png"
    assert isinstance(told, str)
    assert said.replace("\\", "") in told


@pytest.mark.parametrize("size", [(1, 100), (100, 1), (3, 250)])
def test_the_narrowest_that_are_taken(tmp_path: Path, size: tuple[int, int]) -> None:
    image = decode(str(png(tmp_path / "a.png", *size)))
    for name in components("transform"):
        for part in ("train", "test"):
            assert transform(name, part, 32)(image).shape == (3, 32, 32)
