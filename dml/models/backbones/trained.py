"""Chooses which part of a backbone is trained: all, its last stages, its norms, adapters beside its layers, or none."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from omegaconf import DictConfig
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dml.configuration.components import instantiate, without
from dml.configuration.options import BACKBONE
from dml.errors import UserError
from dml.models.backbones.stages import Backbone, measure_stages

NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
ADAPTER = "lora"  # its name in peft's layers


def backbone_of(config: DictConfig) -> Backbone:
    """Makes the backbone that a file of `conf/backbone` describes, and freezes what `backbone.train` excludes.

    Raises:
        UserError: the backbone refuses its options, it is none, or as `choose_trained`.
    """
    own = {name: config[name] for name in BACKBONE if name in config}
    backbone = instantiate(without(config, own))
    if not isinstance(backbone, Backbone):
        raise UserError(
            f"backbone: {config._target_} returns {type(backbone).__name__}: it has to return a Backbone of "
            "dml.models.backbones.stages."
        )
    choose_trained(backbone, **own)
    return backbone


def choose_trained(
    backbone: Backbone,
    *,
    train: str = "all",
    batch_norm: Literal["batch", "running", "frozen"] = "batch",
    lora_rank: int = 8,
    lora_alpha: float = 16.0,
    lora_layers: Sequence[str] | None = None,
) -> None:
    """Freezes what is not trained, after the weights are loaded; the copies of stages that methods make are frozen too.

    Args:
        backbone: changed in place.
        train: `all`; `none`; `last:N`, the last N stages with weights; `norm`, the weights and biases of the norms; or
            `lora`, low-rank adapters (Hu et al. 2022) beside the linear layers, or beside the convolutions if there are
            no linear layers. Layers whose weights are used in another way than by the layer itself have none.
        batch_norm: `batch` uses the statistics of the batch and updates the running ones; `running` uses the running
            statistics and keeps them; `frozen` does so too, and trains neither weight nor bias of batch norm. Stages
            that are not trained, and all stages with adapters, use running statistics in any case.
        lora_rank, lora_alpha: r and alpha of the adapters, which add alpha / r * B A x.
        lora_layers: ends of the names of the layers that get adapters; None: the layers named under `train`.

    Raises:
        UserError: `train` is unknown, there are fewer stages than N, no norm that is trained, or no layer of such a
            name, a layer can have no adapter, or peft is missing.
    """
    last = re.fullmatch(r"last:([1-9]\d*)", train)
    if last is None and train not in ("all", "none", "norm", "lora"):
        raise UserError(f"backbone.train={train} is unknown: choose all, none, last:N (N stages), norm or lora.")
    backbone.frozen_statistics = batch_norm != "batch" or train in ("none", "lora")
    if last is not None:
        _freeze(backbone, _before_last(backbone, int(last[1]), train))
    elif train != "all":
        backbone.requires_grad_(False)
    if train == "norm":
        for norm in _norms(backbone):
            norm.requires_grad_(True)
    if train == "lora":
        _adapt(backbone, lora_rank, lora_alpha, lora_layers)
    if batch_norm == "frozen":
        for module in backbone.modules():
            if isinstance(module, _BatchNorm):
                module.requires_grad_(False)
    if train == "norm" and not any(one.requires_grad for one in backbone.parameters()):
        raise UserError(
            "backbone.train=norm trains nothing with backbone.batch_norm=frozen, as the backbone has no other norm: "
            "choose backbone.batch_norm=running, or backbone.train=none."
        )
    backbone.train(backbone.training)


def _before_last(backbone: Backbone, count: int, train: str) -> list[str]:
    """Returns the names of the stages before the last `count` stages with weights."""
    deep = [name for name, stage in backbone.stages.items() if any(True for _ in stage.parameters())]
    if count > len(deep):
        raise UserError(
            f"backbone.train={train}: the backbone has {len(deep)} stages with weights ({', '.join(deep)}): choose at "
            "most as many, or backbone.train=all."
        )
    names = list(backbone.stages)
    return names[: names.index(deep[-count])]


def _freeze(backbone: Backbone, names: Iterable[str]) -> None:
    for name in names:
        backbone.stages[name].requires_grad_(False)


def _norms(backbone: Backbone) -> list[nn.Module]:
    from timm import layers  # its norms without a mean are no nn.RMSNorm

    kinds = (
        *(*NORMS, layers.RmsNorm, layers.RmsNorm2d, layers.SimpleNorm, layers.SimpleNorm2d),
        *(layers.RmsNormFp32, layers.RmsNorm2dFp32, layers.SimpleNormFp32, layers.SimpleNorm2dFp32),
    )
    found: list[nn.Module] = [module for module in backbone.modules() if isinstance(module, kinds)]
    if not any(True for norm in found for _ in norm.parameters()):
        raise UserError("backbone.train=norm: the backbone has no norm with weights: choose all, last:N or lora.")
    return found


def _adapt(backbone: Backbone, rank: int, alpha: float, layers: Sequence[str] | None) -> None:
    """Puts peft's adapters beside layers. At the start their output is zero."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError("backbone.train=lora needs peft, which is not installed: pip install '.[lora]'.") from error
    can = _adaptable(backbone)
    chosen = _linear(can) if layers is None else _named(backbone, layers, can)
    options: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "target_modules": chosen}
    inject_adapter_in_model(LoraConfig(**options), backbone, adapter_name=ADAPTER)
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad_(f".{ADAPTER}." in name)


def _adaptable(backbone: Backbone) -> dict[str, nn.Module]:
    """Returns by name the layers beside which an adapter does what it should.

    Some attentions never call a layer, and use its weights themselves, which passes over an adapter. Some convolutions
    standardise their weights, and would do so to those of an adapter.
    """
    from timm.layers import Conv2dSame

    plain = {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear) or (type(module) in (nn.Conv2d, Conv2dSame) and module.groups == 1)
    }
    called: set[nn.Module] = set()
    hooks = [module.register_forward_hook(lambda layer, *_: called.add(layer)) for module in plain.values()]
    try:
        measure_stages(dict(backbone.stages.items()), 3, backbone.probe)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: module for name, module in plain.items() if module in called}


def _linear(can: Mapping[str, nn.Module]) -> list[str]:
    """Returns the names of all linear layers, or of all convolutions if there is no linear layer."""
    for kind in (nn.Linear, nn.Conv2d):
        found = [name for name, module in can.items() if isinstance(module, kind)]
        if found:
            return found
    raise UserError(
        "backbone.train=lora: the backbone has neither a linear layer nor a convolution that can have an adapter: "
        "choose all, last:N or norm."
    )


def _named(backbone: Backbone, layers: Sequence[str], can: Mapping[str, nn.Module]) -> list[str]:
    modules = {name: module for name, module in backbone.named_modules() if not any(True for _ in module.children())}
    chosen = []
    for end in layers:
        found = [name for name in modules if f".{name}".endswith(f".{end}")]
        fit = [name for name in found if name in can]
        if not found or len(fit) < len(found):
            no = next((name for name in found if name not in fit), "")
            what = f"{no} can have no adapter" if found else "no layer of the backbone has this name"
            ends = sorted({name.rpartition(".")[2] for name in can})
            raise UserError(
                f"backbone.lora_layers={list(layers)}: {what} ({end}): choose linear layers or plain convolutions, by "
                f"the ends of their names, such as {', '.join(ends[:6])}."
            )
        chosen += fit
    return chosen


def merge_adapters(module: nn.Module) -> None:
    """Adds the learned adapters to the weights of their layers, and removes them."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if hasattr(child, "lora_A"):  # a layer of peft; peft itself is only imported for backbones with adapters
                layer: Any = child
                layer.merge()
                setattr(parent, name, layer.get_base_layer())
