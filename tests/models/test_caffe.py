"""A .caffemodel, written by hand in both formats, becomes weights that give what Caffe would; others are refused."""

import re
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dml.data.prepare import main
from dml.errors import UserError
from dml.models.backbones.googlenet_v1 import TABLE, googlenet_v1
from dml.models.caffe import LARGEST, read_caffemodel

Blobs = dict[str, tuple[np.ndarray, np.ndarray]]


def layer_table() -> dict[str, tuple[int, ...]]:
    """Weights of train_val.prototxt by its layers' names."""
    table = {"conv1/7x7_s2": (64, 3, 7, 7), "conv2/3x3_reduce": (64, 64, 1, 1), "conv2/3x3": (192, 64, 3, 3)}
    for stage, row in TABLE.items():
        if row:
            c, c1, r3, c3, r5, c5, pool = row
            name = stage.replace("inception", "inception_")
            table |= {f"{name}/1x1": (c1, c, 1, 1), f"{name}/3x3_reduce": (r3, c, 1, 1), f"{name}/3x3": (c3, r3, 3, 3)}
            table |= {f"{name}/5x5_reduce": (r5, c, 1, 1), f"{name}/5x5": (c5, r5, 5, 5)}
            table |= {f"{name}/pool_proj": (pool, c, 1, 1)}
    return table


@cache
def random_blobs() -> Blobs:
    random = np.random.default_rng(0)
    return {
        name: (
            random.normal(0, (1.5 / np.prod(shape[1:])) ** 0.5, shape).astype("<f4"),
            random.normal(0, 1, shape[0]).astype("<f4"),
        )
        for name, shape in layer_table().items()
    }


# --- protobuf's wire format ---


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def inside(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def old_blob(values: np.ndarray) -> bytes:
    """num, channels, height, width; a vector is 1 x 1 x 1 x n."""
    shape = (1,) * (4 - values.ndim) + values.shape
    return b"".join(varint(i << 3) + varint(n) for i, n in enumerate(shape, 1)) + inside(5, values.tobytes())


def new_blob(values: np.ndarray) -> bytes:
    """The shape in a message of its own; vectors as doubles, to have read those too."""
    shape = inside(7, inside(1, b"".join(varint(n) for n in values.shape)))
    return shape + (inside(5, values.tobytes()) if values.ndim > 1 else inside(8, values.astype("<f8").tobytes()))


def old_layer(name: str, *blobs: np.ndarray) -> bytes:
    content = inside(2, b"data") + inside(4, name.encode()) + varint(5 << 3) + varint(4)
    return inside(2, content + b"".join(inside(6, old_blob(blob)) for blob in blobs))


def new_layer(name: str, *blobs: np.ndarray) -> bytes:
    content = inside(1, name.encode()) + inside(2, b"Convolution")
    return inside(100, content + b"".join(inside(7, new_blob(blob)) for blob in blobs))


def caffemodel(blobs: Blobs, layer: Callable[..., bytes] = old_layer) -> bytes:
    """With layers that have no weights, and classifiers."""
    head = np.zeros((10, 1024), "<f4"), np.zeros(10, "<f4")
    layers = [layer("data"), *(layer(name, *both) + layer(f"{name}_relu") for name, both in blobs.items())]
    return inside(1, b"GoogleNet") + b"".join(layers) + layer("loss1/fc", *head) + layer("loss3/classifier", *head)


# --- Caffe's GoogLeNet, slowly ---


def caffes(blobs: Blobs, pixels: np.ndarray) -> Tensor:
    """`[B,H,W,3]` R, G, B in 0..255 -> the last inception block's output, in double precision."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight, bias = (torch.from_numpy(blob.astype(float)) for blob in blobs[name])
        return F.conv2d(x, weight, bias, stride, padding=weight.shape[-1] // 2).relu()

    def pool(x: Tensor) -> Tensor:
        n = -(-(x.shape[-1] - 3) // 2) + 1
        rows = [[x[..., 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].amax((2, 3)) for j in range(n)] for i in range(n)]
        return torch.stack([torch.stack(row, -1) for row in rows], -2)

    def lrn(x: Tensor) -> Tensor:
        sums = [x[:, max(0, c - 2) : c + 3].square().sum(1) for c in range(x.shape[1])]
        return x / (1 + 1e-4 / 5 * torch.stack(sums, 1)) ** 0.75

    def inception(name: str, x: Tensor) -> Tensor:
        at = f"inception_{name}"
        b = conv(f"{at}/3x3", conv(f"{at}/3x3_reduce", x))
        c = conv(f"{at}/5x5", conv(f"{at}/5x5_reduce", x))
        around = F.max_pool2d(x, 3, 1, padding=1)
        return torch.cat([conv(f"{at}/1x1", x), b, c, conv(f"{at}/pool_proj", around)], 1)

    bgr = pixels[..., ::-1].astype(float) - np.array([104, 117, 123])
    y = lrn(pool(conv("conv1/7x7_s2", torch.from_numpy(bgr.transpose(0, 3, 1, 2).copy()), stride=2)))
    y = pool(lrn(conv("conv2/3x3", conv("conv2/3x3_reduce", y))))
    y = pool(inception("3b", inception("3a", y)))
    for name in ("4a", "4b", "4c", "4d", "4e"):
        y = inception(name, y)
    return inception("5b", inception("5a", pool(y)))


# --- the command ---


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes `content` to a file and converts that; returns where the weights should be."""

    def prepared(content: bytes | None, *options: str, name: str = "bvlc_googlenet.caffemodel") -> Path:
        given = [] if content is None else [f"source={tmp_path / name}"]
        if content is not None:
            (tmp_path / name).write_bytes(content)
        places = ["weights=googlenet_v1", f"paths.data_dir={tmp_path / 'data'}"]
        monkeypatch.setattr(sys, "argv", ["prepare", *places, *given, *options])
        main()
        return tmp_path / "data" / "weights" / "bvlc_googlenet.pth"

    return prepared


@pytest.mark.slow
@pytest.mark.parametrize("layer", [old_layer, new_layer])
def test_converted_weights_give_what_caffe_gives(
    prepared: Callable[..., Path], layer: Callable[..., bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    blobs = random_blobs()
    path = prepared(caffemodel(blobs, layer))
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert "114 tensors of bvlc_googlenet.caffemodel, which differs from the published file" in capsys.readouterr().out
    backbone = googlenet_v1(weights="imagenet", weights_dir=str(path.parent)).double()
    pixels = np.random.default_rng(1).integers(0, 256, (2, 71, 71, 3), np.uint8)  # 71: poolings round up
    images = torch.from_numpy(pixels.transpose(0, 3, 1, 2) / 255.0)
    expected = caffes(blobs, pixels)
    with torch.no_grad():
        found = backbone(backbone.normalize(images))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert float(expected.std()) > 1e-3


@pytest.mark.slow
def test_what_is_there_stays(prepared: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    blobs = random_blobs()
    path = prepared(caffemodel(blobs))
    before = path.read_bytes()
    prepared(None)
    assert "is there already" in capsys.readouterr().out
    assert path.read_bytes() == before
    path.write_bytes(before[:1000])
    refused(prepared, None, "is not a checkpoint", capsys)
    assert path.stat().st_size == 1000


def refused(
    prepared: Callable[..., Path], content: bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2 and one line."""
    with pytest.raises(SystemExit) as left:
        prepared(content)
    told = capsys.readouterr().err
    assert left.value.code == 2
    assert said in told
    assert told.count("\n") == 1


SHAPES = {
    f"{name.replace('/', '_')}.{kind}": torch.Size(shape[: 4 if kind == "weight" else 1])
    for name, shape in layer_table().items()
    for kind in ("weight", "bias")
}


def unread(folder: Path, content: bytes, said: str) -> None:
    (folder / "net.caffemodel").write_bytes(content)
    with pytest.raises(UserError, match=re.escape(said)) as told:
        read_caffemodel(folder / "net.caffemodel", SHAPES)
    assert "\n" not in str(told.value)


def changed(**layers: tuple[np.ndarray, ...]) -> Blobs:
    return {**random_blobs(), **{name.replace("__", "/"): blobs for name, blobs in layers.items()}}


@pytest.mark.slow
def test_files_of_other_networks_are_refused(tmp_path: Path) -> None:
    blobs = random_blobs()
    weight, bias = blobs["inception_3a/1x1"]
    alexnet = {"conv1": (np.zeros((96, 3, 11, 11), "<f4"), np.zeros(96, "<f4"))}
    normed = {**blobs, "conv1/7x7_s2_bn": (bias, bias)}
    few = {name: both for name, both in blobs.items() if name != "inception_4e/5x5"}
    nan = weight.copy()
    nan[3] = np.nan
    for content, said in (
        (caffemodel(alexnet), "lacks 57 layers with weights (conv1_7x7_s2, "),
        (caffemodel(few), "lacks 1 layers with weights (inception_4e_5x5, "),
        (caffemodel(normed), "has unknown 1 layers with weights (conv1_7x7_s2_bn, "),
        (caffemodel(changed(inception_3a__1x1=(weight[:9], bias))), "weight is [9, 192, 1, 1] where [64, 192, 1, 1]"),
        (caffemodel(changed(inception_3a__1x1=(weight, bias[:9])), new_layer), "bias is [9] where [64]"),
        (caffemodel(changed(inception_3a__1x1=(weight,))), "inception_3a_1x1 has 1 tensors"),
        (caffemodel(changed(inception_3a__1x1=(nan, bias))), "inception_3a_1x1.weight has values that are not finite"),
        (caffemodel(blobs) + old_layer("conv1/7x7_s2", weight, bias), "two layers named 'conv1/7x7_s2'"),
        (caffemodel({}), "lacks 57 layers"),
        (b"", "lacks 57 layers"),
    ):
        unread(tmp_path, content, said)


@pytest.mark.slow
def test_damaged_and_hostile_files_are_refused(tmp_path: Path) -> None:
    whole = caffemodel(random_blobs())
    long = inside(4, b"conv1/7x7_s2") + inside(6, b"\x2a" + varint(2**40))  # floats of a terabyte, it says
    long += inside(6, b"")
    wide = b"".join(varint(i << 3) + varint(2**31 - 1) for i in range(1, 5)) + inside(5, struct.pack("<f", 1.0))
    other = {name: both for name, both in random_blobs().items() if name != "conv1/7x7_s2"}
    claims = inside(2, inside(4, b"conv1/7x7_s2") + inside(6, wide) + inside(6, wide))
    short = np.zeros((64, 3, 7, 7), "<f4")
    few = inside(6, old_blob(short)[: -short.nbytes - 4] + inside(5, short.tobytes()[:40])) + inside(6, b"")
    for content, said in (
        (whole[:-1], "cut short"),
        (whole[: len(whole) // 2], "cut short"),
        (b"<html><body>Log in</body></html>", "cut short, or no .caffemodel"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "cut short, or no .caffemodel"),
        (b"\x12" + varint(2**62), "cut short"),
        (b"\x12" + b"\xff" * 20, "cut short"),
        (inside(2, long) + caffemodel(other), "cut short"),
        (claims + caffemodel(other), "conv1_7x7_s2.weight is [2147483647, 2147483647, "),
        (inside(2, inside(4, b"conv1/7x7_s2") + few) + caffemodel(other), "weight has 10 values where 9408 should be"),
        (inside(2, b"") * 5000, "more than 4096 layers"),
        (inside(2, inside(4, b"\xff\xfe")) + whole[:-1], "cut short"),
    ):
        unread(tmp_path, content, said)


@pytest.mark.slow
def test_mistakes_leave_nothing(
    prepared: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refused(prepared, caffemodel(random_blobs())[:-1], "cut short", capsys)
    huge = tmp_path / "huge.caffemodel"
    with huge.open("wb") as file:
        file.truncate(LARGEST + 1)
    for options, said in (
        ([f"source={huge}"], "is larger than 64 MiB"),
        ([f"source={tmp_path / 'nothing'}"], "is neither a file, a folder nor a URL"),
        ([f"source={tmp_path}"], "is no file"),
        (["source=a,b"], "takes exactly one source"),
        ([], "takes exactly one source=FILE: make it with python -m dml.data.prepare weights=googlenet_v1 source="),
        (["weights=resnet50"], "weights=resnet50 needs no conversion from a .caffemodel: choose googlenet_v1"),
        (["weights=resnet51"], "backbone=resnet51 is unknown: did you mean resnet50"),
    ):
        with pytest.raises(SystemExit) as left:
            prepared(None, *options)
        assert left.value.code == 2
        assert said in capsys.readouterr().err
    assert not list((tmp_path / "data").rglob("*.*"))
