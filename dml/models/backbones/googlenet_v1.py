"""The original GoogLeNet (Szegedy et al. 2015, CVPR), as Caffe's bvlc_googlenet: the base of ABE, DIABLO and DeML.

It differs from torchvision's: 5x5 branches, biases, no batch norm, local response normalisation, 3x3 pool4.
Layer table: BVLC/caffe, models/bvlc_googlenet/train_val.prototxt.
"""

from collections import OrderedDict

from torch import Tensor, nn

from dml.models.backbones.inception import Inception, caffe_names
from dml.models.backbones.normalize import caffe
from dml.models.backbones.stages import Backbone
from dml.models.weights import Published, load_weights

# in, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection (the paper's table 1)
TABLE = {
    "inception3a": (192, 64, 96, 128, 16, 32, 32),
    "inception3b": (256, 128, 128, 192, 32, 96, 64),
    "pool3": (),
    "inception4a": (480, 192, 96, 208, 16, 48, 64),
    "inception4b": (512, 160, 112, 224, 24, 64, 64),
    "inception4c": (512, 128, 128, 256, 24, 64, 64),
    "inception4d": (512, 112, 144, 288, 32, 64, 64),
    "inception4e": (528, 256, 160, 320, 32, 128, 128),
    "pool4": (),
    "inception5a": (832, 256, 160, 320, 32, 128, 128),
    "inception5b": (832, 384, 192, 384, 48, 128, 128),
}


PUBLISHED = Published(
    ("bvlc_googlenet.pth",),
    by_hand="make it with python -m dml.data.prepare weights=googlenet_v1 source=bvlc_googlenet.caffemodel, of Caffe's "
    "file (53.5 MB, http://dl.caffe.berkeleyvision.org/bvlc_googlenet.caffemodel)",
    sha1="405fc5acd08a3bb12de8ee5e23a96bec22f08204",  # BVLC/caffe, models/bvlc_googlenet/readme.md
)


def googlenet_v1(*, weights: str = "none", weights_dir: str | None = None) -> Backbone:
    """GoogLeNet of 2014: 480 x 14 x 14 after pool3 and 1024 x 7 x 7 at the end for 224 x 224 images.

    Args:
        weights: see `load_weights`. Published keys are Caffe's layer names with `/` written `_`, such as
            `conv1_7x7_s2.weight` or `inception_3a_5x5_reduce.bias`; `imagenet` is `bvlc_googlenet.pth` in
            `weights_dir`, which `dml.data.convert` makes of bvlc_googlenet.caffemodel. As in Caffe, the first
            convolution takes B, G, R; `normalize` reverses the channels.
    """
    stages: dict[str, nn.Module] = {
        "conv1": nn.Sequential(_conv("7x7_s2", 3, 64, stride=2)),
        "pool1": nn.Sequential(OrderedDict({"3x3_s2": _pool(), "norm1": _lrn()})),
        "conv2": nn.Sequential(_conv("3x3_reduce", 64, 64)),
        "conv3": nn.Sequential(_conv("3x3", 64, 192) | {"norm2": _lrn()}),
        "pool2": _pool(),
    }
    stages |= {name: _inception(*row) if row else _pool() for name, row in TABLE.items()}
    backbone = Backbone(
        stages,
        normalize=caffe((104, 117, 123)),
        branch="pool3",
        attention_depth=5,
        late_branch="pool4",
    )
    backbone.source = load_weights(
        backbone, weights, published=PUBLISHED, weights_dir=weights_dir, names=caffe_names(backbone.stages)
    )
    return backbone


def _inception(channels: int, c1: int, r3: int, c3: int, r5: int, c5: int, pool: int) -> Inception:
    return Inception(
        _conv("1x1", channels, c1),
        _conv("3x3_reduce", channels, r3) | _conv("3x3", r3, c3),
        _conv("5x5_reduce", channels, r5) | _conv("5x5", r5, c5),
        {"pool": nn.MaxPool2d(3, stride=1, padding=1)} | _conv("pool_proj", channels, pool),
    )


def _conv(name: str, channels: int, out: int, stride: int = 1) -> "OrderedDict[str, nn.Module]":
    """Makes Caffe's layer `name` and the ReLU after it; the name begins with the kernel size unless it is a 1x1."""
    kernel = 1 if name.endswith(("reduce", "proj")) else int(name[0])
    conv = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2)
    # Caffe's fillers: "xavier" draws from +-sqrt(3 / fan_in); the bias starts at 0.2.
    nn.init.kaiming_uniform_(conv.weight, nonlinearity="linear")
    nn.init.constant_(conv.bias, 0.2)  # type: ignore[arg-type]
    return OrderedDict({name: conv, f"relu_{name.removesuffix('_s2')}": nn.ReLU(inplace=True)})


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)  # Caffe rounds output sizes up


def _lrn() -> nn.LocalResponseNorm:
    return _LocalResponseNorm(5, alpha=1e-4, beta=0.75)


class _LocalResponseNorm(nn.LocalResponseNorm):
    """Computes in float32, since the squares of inputs in 0..255 leave the range of half precision.

    Locations are one axis, since PyTorch sums over channels by pooling in one dimension more than its input has, and
    `trainer.deterministic=true` refuses the gradient of three on a GPU.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float().flatten(2)).view_as(x).to(x.dtype)
