"""Reads weights from a .caffemodel (Caffe's protobuf format) under the names that backbones load.

The messages are the parts of Caffe's src/caffe/proto/caffe.proto that hold weights. The protobuf library reads them,
which tensorboard installs anyway; OpenCV's and Caffe's own readers are not used, since they need a whole framework.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from torch import Tensor

from dml.errors import UserError
from dml.models.weights import NOT_BACKBONE, SHOWN

LARGEST = 1 << 26  # bytes; bvlc_googlenet.caffemodel has 53,533,754
MOST = 4096  # layers; bvlc_googlenet.caffemodel has about 170

# Inner messages stay bytes until they are needed, so that a file with millions of empty ones takes no more memory.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Net": {"layer": (100, "repeated bytes"), "layers": (2, "repeated bytes")},
    "Layer": {"name": (1, "optional bytes"), "blobs": (7, "repeated bytes")},
    "V1Layer": {"name": (4, "optional bytes"), "blobs": (6, "repeated bytes")},
    "Blob": {
        **{name: (i, "optional int32") for i, name in enumerate(("num", "channels", "height", "width"), 1)},
        "data": (5, "repeated float"),
        "shape": (7, "optional bytes"),
        "double_data": (8, "repeated double"),
    },
    "Shape": {"dim": (1, "repeated int64")},
}


def read_caffemodel(path: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Reads the weights and biases of a backbone, unchanged: they expect inputs in B, G, R order and Caffe's range.

    Args:
        path: a file in the format with `layers` (V1, as published) or with `layer`.
        shapes: of each tensor wanted, under its layer's name with `/` written `_`: `conv1_7x7_s2.weight [64,3,7,7]`.

    Returns:
        A float32 tensor for each key of `shapes`.

    Raises:
        UserError: the file is no .caffemodel, cut short, larger than 64 MiB, or of another network (a layer is missing,
            repeated, unknown or of another shape; classifiers do not count), or a value is not finite.
    """
    wanted = list(dict.fromkeys(key.rpartition(".")[0] for key in shapes))
    found: dict[str, list[bytes]] = {}
    for name, blobs in _layers(path):
        key = name.replace("/", "_")
        if not blobs or f"{key}.".startswith(NOT_BACKBONE):
            continue
        if key in found:
            raise UserError(f"{path} is damaged: it has two layers named {name!r}.")
        found[key] = blobs
    for problem, names in (
        ("lacks", [name for name in wanted if name not in found]),
        ("has unknown", [name for name in found if name not in wanted]),
    ):
        if names:
            first = ", ".join(names[:SHOWN])
            raise UserError(
                f"{path} is of another network: it {problem} {len(names)} layers with weights ({first}, ...)."
            )
    tensors = {}
    for name in wanted:
        if len(found[name]) != 2:
            raise UserError(
                f"{path} is of another network: {name} has {len(found[name])} tensors, not weight and bias."
            )
        for kind, blob in zip(("weight", "bias"), found[name], strict=True):
            key = f"{name}.{kind}"
            tensors[key] = _tensor(blob, tuple(shapes[key]), f"{path}: {key}")
    return tensors


def _layers(path: Path) -> Iterator[tuple[str, list[bytes]]]:
    """Yields the name and the tensors of each layer."""
    if not path.is_file():
        raise UserError(f"{path} is no file: give the path of a .caffemodel.")
    if path.stat().st_size > LARGEST:
        raise UserError(f"{path} is larger than {LARGEST >> 20} MiB, too large for a GoogLeNet: it is a wrong file.")
    net = _parsed("Net", path.read_bytes(), f"{path}")
    if len(net.layer) + len(net.layers) > MOST:
        raise UserError(f"{path} is of another network: it has more than {MOST} layers.")
    for kind, layers in (("Layer", net.layer), ("V1Layer", net.layers)):
        for content in layers:
            layer = _parsed(kind, content, f"{path}")
            yield layer.name.decode(errors="replace"), list(layer.blobs)


def _tensor(content: bytes, shape: tuple[int, ...], place: str) -> Tensor:
    """Reads a tensor of `shape`; in the older format all have four dimensions, filled up with leading ones."""
    blob = _parsed("Blob", content, place)
    if blob.HasField("shape"):
        given, expected = tuple(_parsed("Shape", blob.shape, place).dim), shape
    else:
        given = (blob.num, blob.channels, blob.height, blob.width)
        expected = (1,) * (4 - len(shape)) + shape
    if given != expected:
        raise UserError(
            f"{place} is {list(given)[:8]} where {list(expected)} should be: the file is of another network."
        )
    values = blob.double_data or blob.data
    if len(values) != math.prod(shape):
        raise UserError(f"{place} has {len(values)} values where {math.prod(shape)} should be: the file is damaged.")
    tensor = torch.from_numpy(np.fromiter(values, np.float64, len(values))).float().view(shape)
    if not tensor.isfinite().all():
        raise UserError(f"{place} has values that are not finite: the file is damaged.")
    return tensor


def _parsed(kind: str, content: bytes, place: str) -> Any:
    message = _classes()[kind]()
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise UserError(f"{place} cannot be read: the file is cut short, or no .caffemodel.") from error
    return message


@cache
def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="caffemodel.proto", package="caffemodel", syntax="proto2")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            label, of = kind.upper().split()
            added = message.field.add(name=field, number=number)
            added.label = FieldDescriptorProto.Label.Value(f"LABEL_{label}")
            added.type = FieldDescriptorProto.Type.Value(f"TYPE_{of}")
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"caffemodel.{name}")) for name in MESSAGES}
