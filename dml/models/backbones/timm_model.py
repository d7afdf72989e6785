"""Networks of timm that give a map: sequences of blocks, and transformers, whose maps carry their tokens along."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import timm
import torch
from omegaconf import OmegaConf
from timm.layers import DropPath
from timm.models.maxxvit import MaxxVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn

from dml.configuration.ranges import Pixels
from dml.errors import UserError
from dml.models.backbones.normalize import Normalize
from dml.models.backbones.sequence import Entrance, cut_sequence
from dml.models.backbones.stages import PROBE, Backbone, measure_stages, published_names
from dml.models.backbones.transformer import SEQUENCES, cut
from dml.models.weights import Published, Source, load_weights

REMEDY = (
    "choose a network of blocks, such as resnet50d, regnety_008, efficientnet_b0, convnext_tiny or "
    "swin_tiny_patch4_window7_224, or a transformer of one resolution, such as vit_small_patch16_224"
)
PATCHES = 4  # on a side of the blank image on which a transformer is measured
# Options of timm.create_model that name files, or make something else than a network for images.
NO_OPTIONS = {
    *("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "state_dict"),
    *("features_only", "scriptable", "exportable", "no_jit", "device", "dtype"),
    *("dynamic_img_size", "strict_img_size"),  # see `of_timm`
}
SHIFTED = (SwinTransformer, SwinTransformerV2)


def timm_model(
    *,
    model_name: str,
    weights: str = "imagenet",
    weights_dir: str | None = None,
    probe: Pixels | None = None,
    options: dict[str, Any] | None = None,
) -> Backbone:
    """Network `model_name` of timm with its final norm; modules after the map are left out.

    A transformer has a stage `patches` and then one stage per block; the final norm is in the last one. The map carries
    the class and register tokens along (`dml.models.tokens`). Attention methods branch after a third of the blocks and
    copy the next quarter; methods that branch late do so before the last sixth.

    In other networks the stages are blocks and the layers between them, with timm's names, such as layer2_3 or
    stages_1_downsample (`sequence.cut_sequence`). Attention methods branch at a quarter of the last stride, as after
    ResNet's layer2, and copy the stages up to half of it, such as layer3; methods that branch late do so after these.

    Stochastic depth, which timm's Swin has, is switched off, so that a step does not depend on the number of ranks.

    Args:
        model_name: timm's name of the network.
        weights: `imagenet` is timm's own for the model (or for its tag, as in NAME.TAG), cached in `weights_dir`; for
            others see `load_weights`. Published keys are those of timm's model, or those that timm converts to them.
        weights_dir: see `load_weights`.
        probe: side in pixels of the blank image on which stages are measured; data sets of characters use it as their
            size too. None: 64, or what the network asks for.
        options: of timm.create_model, as {depth: 6}.

    Raises:
        UserError: there is no such model, it has no weights, refuses the options, gives no map, or is no sequence of
            blocks (HRNet, ...).
    """
    return of_timm(model_name, weights, weights_dir, probe, options)


def of_timm(
    model_name: str,
    weights: str,
    weights_dir: str | None,
    probe: int | None = None,
    options: Mapping[str, Any] | None = None,
    published: Published | None = None,
    other_names: Callable[[Any], Mapping[str, str]] | None = None,
) -> Backbone:
    """Makes a network as `timm_model` does, with another source of `imagenet` weights.

    Args:
        model_name, weights, weights_dir, probe, options: see `timm_model`.
        published: the source of `imagenet`; None: timm's own.
        other_names: timm's network -> (keys of that source -> timm's keys).
    """
    plain = _plain(model_name, options)
    if isinstance(plain, SEQUENCES):
        sizes: dict[str, Any] = {"dynamic_img_size": True}
    else:
        sizes = {"strict_img_size": False} if isinstance(plain, SHIFTED) else {}
    own = weights == "imagenet" and published is None
    net = _made(model_name, pretrained=own, cache_dir=weights_dir, **sizes, **_plain_options(options))
    if not (options or {}).get("drop_path_rate"):
        for module in net.modules():
            if isinstance(module, DropPath):
                module.drop_prob = 0.0
    config, tensors = net.pretrained_cfg, net.state_dict(keep_vars=True)
    others = other_names(net) if other_names is not None else {}
    normalize = Normalize(config["mean"], config["std"])
    of_family = _transformer if isinstance(plain, SEQUENCES) else _sequence
    backbone = of_family(net, model_name, normalize, probe)
    if own:
        place = str(config.get("hf_hub_id") or config.get("url") or model_name)
        backbone.source = Source(place, None, str(config.get("license") or "unknown"))
        return backbone
    names = published_names(tensors, backbone)
    rest = tuple(key for key in tensors if key not in names)
    rest += tuple(theirs for theirs, timms in others.items() if timms in rest)

    def converted(state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Converts the keys of other files with timm's own function."""
        convert = getattr(sys.modules[type(plain).__module__], "checkpoint_filter_fn", None)
        return state if convert is None else convert(state, plain)

    backbone.source = load_weights(
        backbone,
        weights,
        published=published,
        weights_dir=weights_dir,
        names=names | {theirs: names[timms] for theirs, timms in others.items() if timms in names},
        ignore=rest,
        convert=converted,
    )
    if backbone.source is not None and backbone.source.colours is not None:
        backbone.normalize_by(backbone.source.colours)
    return backbone


def _plain_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the options as plain values. Raises UserError for one that does not describe the architecture."""
    for name in (options or {}).keys() & NO_OPTIONS:
        raise UserError(
            f"backbone.options.{name} is no option of an architecture that can be set: remove it, and choose weights "
            "with backbone.weights."
        )
    return {str(name): OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for name, v in (options or {}).items()}


def _plain(model_name: str, options: Mapping[str, Any] | None) -> Any:
    """Makes timm's network without weights."""
    if not timm.is_model(model_name):
        raise UserError(f"timm has no model '{model_name}': {REMEDY}.")
    plain = _plain_options(options)
    try:
        with torch.device("meta"):
            return timm.create_model(model_name, **plain)
    except Exception as error:  # timm's networks raise errors of any kind
        said = " ".join(str(error).split()) or type(error).__name__
        if not options:
            raise UserError(f"timm cannot make {model_name} ({said}): {REMEDY}.") from None
        raise UserError(
            f"backbone.options: timm's {model_name} refuses them ({said}): correct or remove them."
        ) from None


def _made(model_name: str, **options: Any) -> Any:
    """Makes timm's network with weights. Raises UserError if timm cannot get the weights."""
    try:
        return timm.create_model(model_name, **options)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"timm cannot give {model_name} its weights ({str(error).rstrip('.')}): set backbone.weights=none or to "
            "the path of a file."
        ) from None


def _transformer(net: Any, name: str, normalize: nn.Module, probe: int | None) -> Backbone:
    """Makes the backbone of a transformer, whose blocks all have one resolution."""
    patch, blocks = net.patch_embed.feat_ratio(), len(net.blocks)
    if probe is not None and probe % patch:
        raise UserError(
            f"backbone.probe={probe} is no multiple of a patch's {patch} pixels: change it, or leave it out."
        )
    if blocks < 2:
        raise UserError(f"{name} has one block, and methods part a network in two: set backbone.options.depth to more.")
    backbone = Backbone(
        cut(net, name),
        normalize=normalize,
        branch=f"block{max(1, blocks // 3) - 1}",
        attention_depth=max(1, blocks // 4),
        late_branch=f"block{blocks - max(1, blocks // 6) - 1}",
        probe=probe or PATCHES * patch,
    )
    backbone.class_token = getattr(net, "cls_token", None) is not None
    return backbone


def _sequence(net: Any, name: str, normalize: nn.Module, probe: int | None) -> Backbone:
    """Makes the backbone of a network whose resolution falls from stage to stage."""
    pixels, why = _sides(net, name)
    chosen, probe = probe, probe or max(PROBE, pixels)
    try:
        stages = cut_sequence(net, probe)
        _, stride = measure_stages(stages, 3, probe)
        if chosen and stride != measure_stages(stages, 3, 2 * probe)[1]:
            raise UserError(
                f"backbone.probe={chosen} is no multiple of all strides of {name}: raise it, or leave it out."
            )
        if 0 in stride.values():
            raise ValueError("its strides are no whole numbers")
    except UserError:
        raise
    except (RuntimeError, AssertionError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"timm's {name} is no chain of blocks from the image to a map ({' '.join(str(error).split())}): {REMEDY}."
        ) from None
    first, names = next(iter(stages)), list(stages)
    if pixels > 1:
        stages[first] = Entrance(stages[first], pixels, why)
    late = _last_at(stride, max(2, stride[names[-1]] // 2))
    branch = _last_at(stride, max(1, stride[late] // 2))
    between = names[names.index(branch) + 1 : names.index(late) + 1]
    depth = sum(any(True for _ in stages[one].parameters()) for one in between)
    backbone = Backbone(
        stages,
        normalize=normalize,
        branch=branch,
        attention_depth=max(1, depth),
        late_branch=late,
        probe=probe,
    )
    backbone.pixels = pixels
    return backbone


def _last_at(stride: Mapping[str, int], most: int) -> str:
    """Returns the last stage with at most a stride of `most`, the very last one excepted; else the first one."""
    names = list(stride)
    return next((name for name in reversed(names[:-1]) if stride[name] <= most), names[0])


def _sides(net: Any, name: str) -> tuple[int, str]:
    """Returns the number of which the images' sides have to be multiples, and why."""
    pixels: int
    if type(net) in SHIFTED:
        pixels = net.patch_embed.patch_size[0]
        return pixels, f"{name} cuts images into patches of {pixels} pixels"
    windows = {m.partition_size[0] for m in net.modules() if hasattr(m, "partition_size")}
    if type(net) is MaxxVit and windows:
        pixels = max(windows) * net.feature_info[-1]["reduction"]
        return pixels, f"{name} divides maps into windows of {max(windows)} cells, images into {pixels} pixels"
    return 1, ""
