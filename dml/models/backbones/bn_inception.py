"""BN-Inception (Ioffe & Szegedy 2015, ICML), in the form of the Caffe port with weights bn_inception-52deb4733.pth.

Layer table: Cadene/pretrained-models.pytorch, pretrainedmodels/models/bninception.py.
"""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from dml.models.backbones.inception import Inception, caffe_names
from dml.models.backbones.normalize import caffe
from dml.models.backbones.stages import Backbone
from dml.models.weights import Published, load_weights

# in, 1x1, 3x3 reduce, 3x3, double 3x3 reduce, both of the double 3x3, pool projection
TABLE = {
    "inception3a": (192, 64, 64, 64, 64, 96, 32),
    "inception3b": (256, 64, 64, 96, 64, 96, 64),
    "inception3c": (320, 0, 128, 160, 64, 96, 0),  # no 1x1 and no projection: halves the resolution
    "inception4a": (576, 224, 64, 96, 96, 128, 128),
    "inception4b": (576, 192, 96, 128, 96, 128, 128),
    "inception4c": (576, 160, 128, 160, 128, 160, 128),
    "inception4d": (608, 96, 128, 192, 160, 192, 128),
    "inception4e": (608, 0, 128, 192, 192, 256, 0),
    "inception5a": (1056, 352, 192, 320, 160, 224, 128),
    "inception5b": (1024, 352, 192, 320, 192, 224, 128),
}
PUBLISHED = Published(
    ("bn_inception-52deb4733.pth",),  # the name has the beginning of its SHA-256, which is checked
    "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth",
)


class _HalvingMaxPool(nn.MaxPool2d):
    """3x3 max pooling with stride 2 to ceil(h / 2) cells, like the padded convolutions beside it.

    For an even side this is Caffe's pooling. For an odd side Caffe's gives one cell less, which could not be
    concatenated.
    """

    def __init__(self) -> None:
        super().__init__(3, stride=2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1), value=float("-inf")))


def bn_inception(*, weights: str = "none", weights_dir: str | None = None) -> Backbone:
    """BN-Inception: 576 x 14 x 14 after inception3c and 1024 x 7 x 7 at the end for 224 x 224 images.

    Args:
        weights: see `load_weights`. Published keys are Cadene's, such as `conv1_7x7_s2.weight`,
            `conv1_7x7_s2_bn.weight`, `inception_3a_double_3x3_1.weight`; `imagenet` is `bn_inception-52deb4733.pth`
            in `weights_dir`, downloaded if it is missing.
    """
    stages: dict[str, nn.Module] = {
        "conv1": nn.Sequential(_conv("7x7_s2", 3, 64, stride=2)),
        "pool1": nn.MaxPool2d(3, stride=2, ceil_mode=True),
        "conv2": nn.Sequential(_conv("3x3_reduce", 64, 64)),
        "conv3": nn.Sequential(_conv("3x3", 64, 192)),
        "pool2": nn.MaxPool2d(3, stride=2, ceil_mode=True),
    }
    stages |= {name: _inception(name, *row) for name, row in TABLE.items()}
    backbone = Backbone(
        stages,
        normalize=caffe((104, 117, 128)),
        branch="inception3c",
        attention_depth=4,
        late_branch="inception4e",
    )
    backbone.source = load_weights(
        backbone, weights, published=PUBLISHED, weights_dir=weights_dir, names=caffe_names(backbone.stages)
    )
    return backbone


def _inception(name: str, channels: int, c1: int, r3: int, c3: int, rd: int, cd: int, pool: int) -> Inception:
    stride = 1 if c1 else 2
    chains: list[dict[str, nn.Module]] = [
        _conv("3x3_reduce", channels, r3) | _conv("3x3", r3, c3, stride),
        _conv("double_3x3_reduce", channels, rd)
        | _conv("double_3x3_1", rd, cd)
        | _conv("double_3x3_2", cd, cd, stride),
    ]
    if stride == 2:
        return Inception(*chains, {"pool": _HalvingMaxPool()})
    pooling = nn.MaxPool2d(3, 1, padding=1) if name == "inception5b" else nn.AvgPool2d(3, 1, padding=1)
    return Inception(_conv("1x1", channels, c1), *chains, {"pool": pooling} | _conv("pool_proj", channels, pool))


def _conv(name: str, channels: int, out: int, stride: int = 1) -> "OrderedDict[str, nn.Module]":
    """Makes Caffe's layer `name`, with its batch norm and ReLU."""
    kernel = 1 if name.endswith(("reduce", "proj")) else int(name.removeprefix("double_")[0])
    conv = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2)
    # The port's own batch-norm momentum of 0.9 is Caffe's moving-average fraction; in torch's sense it is 0.1.
    return OrderedDict({name: conv, f"{name}_bn": nn.BatchNorm2d(out), f"relu_{name}": nn.ReLU(inplace=True)})
