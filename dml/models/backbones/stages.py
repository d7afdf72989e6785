"""A network as a sequence of named stages that can be split and copied at any name.

Shapes: B images, C channels, h x w cells; a stage maps [B, C, h, w] to [B, C', h', w'].
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from dml.errors import UserError
from dml.models.backbones.normalize import Normalize
from dml.models.of_run import Colours
from dml.models.stored import Stored
from dml.models.tokens import entering
from dml.models.weights import Source

PROBE = 64  # pixels; a multiple of every stride in use, so that size / output size is the stride
SMALL_PROBE = 8  # cells; enough to see whether a resolution is kept


def small_probe(stages: "Stages") -> int:
    """Returns how many cells a side of a blank input for some stages has; with fixed windows it follows from these."""
    return max(SMALL_PROBE, stages.pixels // max(1, stages.in_stride))  # a stride of 0 stands for no whole number


class Stages(nn.Module):
    """A sequence of named stages, a whole network or a part of one.

    Attributes:
        stages: the stages in forward order; names have no dots.
        in_channels: channels that the first stage takes.
        in_stride: image pixels per cell of the first stage's input.
        out_channels: channels after each stage.
        stride: image pixels per cell after each stage (counted from the image, also after a split).
        behind: how many stages with weights follow each stage in the whole network.
        frozen_statistics: batch norm uses its running statistics and never updates them.
        checkpointing: keep only a stage's input for the backward pass, and compute the rest again there.
        pixels: side of the smallest images, if the backbone only takes multiples of it; else 1.
    """

    pixels = 1

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        *,
        in_channels: int,
        in_stride: int,
        out_channels: Mapping[str, int],
        stride: Mapping[str, int],
        behind: Mapping[str, int],
        frozen_statistics: bool = False,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleDict(stages)
        self.in_channels = in_channels
        self.in_stride = in_stride
        self.out_channels = {name: out_channels[name] for name in stages}
        self.stride = {name: stride[name] for name in stages}
        self.behind = {name: behind[name] for name in stages}
        self.frozen_statistics = frozen_statistics
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """Applies all stages: [B, C, h, w] -> [B, C', h', w']."""
        return self.tapped(x, ())[0]

    def tapped(self, x: Tensor, names: Collection[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Does the same as `forward`, and also returns the outputs of the stages in `names`; others are ignored.

        Raises:
            UserError: features are stored that lie behind one of these stages.
        """
        taps = {}
        passed = -1
        if isinstance(x, Stored):  # the first stages have been applied already
            order = list(self.stages)
            passed = order.index(x.stage)
            if lost := set(names) & set(order[:passed]):
                raise UserError(
                    f"dataset.cache=features keeps what stage {x.stage} gives, but the method also sees that of "
                    f"{min(lost)}: train more stages with backbone.train=last:N, or choose another dataset.cache."
                )
            x = x.map()
            if order[passed] in names:
                taps[order[passed]] = x
        for name, stage in islice(self.stages.items(), passed + 1, None):
            x = _recomputed(stage, x) if self.checkpointing and torch.is_grad_enabled() else stage(x)
            if name in names:
                taps[name] = x
        return x, taps

    def train(self, mode: bool = True) -> "Stages":
        """Sets the mode as `nn.Module.train`, but keeps frozen stages and frozen batch-norm statistics in eval mode."""
        super().train(mode)
        for stage in self.stages.values():
            trained = [parameter.requires_grad for parameter in stage.parameters()]
            if trained and not any(trained):
                stage.eval()
        if self.frozen_statistics:
            for norm in batch_norms(self):
                norm.eval()
        return self

    def follows_batches(self, name: str) -> bool:
        """Says whether the batch norm of a stage takes its statistics from the training batches."""
        stage = self.stages[name]
        trained = any(parameter.requires_grad for parameter in stage.parameters())
        return trained and not self.frozen_statistics and any(True for _ in batch_norms(stage))

    def first(self, count: int) -> "Stages":
        """Returns the first `count` stages. They share this module's parameters."""
        return self._part(list(self.stages)[:count])

    def split(self, at: str) -> tuple["Stages", "Stages"]:
        """Returns the stages up to and including `at`, and the rest. Both share this module's parameters.

        Raises:
            UserError: `at` is no stage, or the last one.
        """
        names = list(self.stages)
        if at not in names[:-1]:
            raise UserError(f"method.branch={at}: cannot split there, choose one of {', '.join(names[:-1])}.")
        cut = names.index(at) + 1
        return self._part(names[:cut]), self._part(names[cut:])

    def copy_after(self, at: str, depth: int, *, keep_resolution: bool = False) -> "Stages":
        """Makes an independent copy of the stages after `at`, up to the `depth`-th one with weights.

        Args:
            at: name of a stage.
            depth: number of stages with weights; poolings do not count.
            keep_resolution: see `copy_of`.

        Raises:
            UserError: `at` is no stage or the last one, fewer than `depth` stages with weights follow it, or as
                `copy_of`.
        """
        _, rest = self.split(at)
        deep = [name for name, stage in rest.stages.items() if any(True for _ in stage.parameters())]
        if not 1 <= depth <= len(deep):
            raise UserError(
                f"cannot copy {depth} stages after '{at}': choose a depth of 1 to {len(deep)} ({', '.join(deep)})."
            )
        return rest.copy_of(next(iter(rest.stages)), deep[depth - 1], keep_resolution=keep_resolution)

    def copy_of(self, first: str, last: str, *, keep_resolution: bool = False) -> "Stages":
        """Makes an independent copy, weights included, of the stages from `first` to `last`.

        Args:
            first, last: names of stages.
            keep_resolution: remove every stride from the copy, so that h' = h and w' = w: strided convolutions get
                stride 1 and strided poolings are removed, as ABE does in its attention module (section 6.3). Patches
                without overlap, such as ConvNeXt's of 2 x 2 cells, then begin at every cell, and the right and lower
                edges are padded with the last cell.

        Raises:
            UserError: the names are no stages in forward order, or a stride cannot be removed (a layer shrinks its
                input by other means than a padded convolution or a pooling).
        """
        names = list(self.stages)
        if first not in names or last not in names or names.index(first) > names.index(last):
            raise UserError(f"cannot copy stages '{first}' to '{last}': the stages are, in order, {', '.join(names)}.")
        part = copy.deepcopy(self._part(names[names.index(first) : names.index(last) + 1]))
        if keep_resolution:
            _take_strides_out(part)
            _, stride = measure_stages(dict(part.stages.items()), part.in_channels, small_probe(part))
            if set(stride.values()) != {1}:
                raise UserError(
                    f"stages '{first}' to '{last}' cannot keep the resolution of their input: choose a later branch "
                    "or an earlier end for the attention, or another backbone."
                )
            part.stride = dict.fromkeys(part.stages, part.in_stride)
        return part

    def _part(self, names: list[str]) -> "Stages":
        before = list(self.stages)[: list(self.stages).index(names[0])]
        part = Stages(
            {name: self.stages[name] for name in names},
            in_channels=self.out_channels[before[-1]] if before else self.in_channels,
            in_stride=self.stride[before[-1]] if before else self.in_stride,
            out_channels=self.out_channels,
            stride=self.stride,
            behind=self.behind,
            frozen_statistics=self.frozen_statistics,
        )
        part.training = self.training
        part.checkpointing = self.checkpointing
        part.pixels = self.pixels
        return part


class Backbone(Stages):
    """The stages of a whole network, from normalised images [B, 3, H, W] to features [B, dim, h, w].

    Args:
        stages: the network, cut into stages; channels and strides are measured.
        normalize: RGB images in [0, 1] -> what the weights expect. The method calls it, `forward` does not.
        branch: the stage after which attention methods branch by default.
        attention_depth: how many stages with weights an attention module copies from there on by default.
        late_branch: the stage after which methods that attend to late features branch by default.
        probe: side in pixels of the blank image on which channels and strides are measured, a multiple of every stride.

    Raises:
        UserError: `branch` or `late_branch` is no stage.

    Attributes:
        source: of its weights; None: they are random.
        colours: mean and deviation by which images are normalised, where those of the architecture are replaced by what
            the file of the weights says; None: they are not.
        class_token: whether the map carries a class token along, as the first one.
        probe: as given.
    """

    class_token = False
    source: Source | None = None
    colours: Colours | None = None

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        *,
        normalize: nn.Module,
        branch: str,
        attention_depth: int,
        late_branch: str,
        probe: int = PROBE,
    ) -> None:
        for name in (branch, late_branch):
            if name not in stages:
                raise UserError(f"the backbone has no stage '{name}': its stages are {', '.join(stages)}.")
        out_channels, stride = measure_stages(stages, 3, probe)
        super().__init__(
            stages,
            in_channels=3,
            in_stride=1,
            out_channels=out_channels,
            stride=stride,
            behind=_behind(stages),
        )
        self.probe = probe
        self.normalize = normalize
        self.branch = branch
        self.attention_depth = attention_depth
        self.late_branch = late_branch
        self.train()

    def normalize_by(self, colours: Colours) -> None:
        """Replaces mean and deviation of the architecture by those for which the weights are."""
        self.normalize = Normalize(*colours)
        self.colours = colours

    @property
    def dim(self) -> int:
        """Channels of the last stage."""
        return list(self.out_channels.values())[-1]


def _behind(stages: Mapping[str, nn.Module]) -> dict[str, int]:
    deep = [any(True for _ in stage.parameters()) for stage in stages.values()]
    return {name: sum(deep[i + 1 :]) for i, name in enumerate(stages)}


def published_names(published: Mapping[str, Tensor], backbone: Backbone) -> dict[str, str]:
    """Returns keys of a network's `state_dict(keep_vars=True)` -> keys of `backbone`, which has the same tensors."""
    ours = {id(tensor): key for key, tensor in backbone.state_dict(keep_vars=True).items()}
    return {key: ours[id(t)] for key, t in published.items() if id(t) in ours}


def _recomputed(stage: nn.Module, x: Tensor) -> Tensor:
    """Computes `stage(x)`; its intermediate results are dropped and computed again in the backward pass."""
    if torch.compiler.is_compiling():  # in a compiled graph the second pass leaves running statistics alone by itself
        compiled: Tensor = checkpoint(stage, x, use_reentrant=False)
        return compiled
    out: Tensor = checkpoint(
        stage, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _running_statistics_kept(stage))
    )
    return out


@contextmanager
def _running_statistics_kept(stage: nn.Module) -> Iterator[None]:
    """Keeps the running statistics of batch norm unchanged in the second pass over a batch."""
    norms = [(norm, norm.momentum, norm.num_batches_tracked) for norm in batch_norms(stage) if norm.training]
    for norm, _, seen in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None if seen is None else seen.clone()
    try:
        yield
    finally:
        for norm, momentum, seen in norms:
            norm.momentum, norm.num_batches_tracked = momentum, seen


def batch_norms(module: nn.Module) -> Iterable[_BatchNorm]:
    return (m for m in module.modules() if isinstance(m, _BatchNorm))


@torch.no_grad()
def measure_stages(
    stages: Mapping[str, nn.Module], in_channels: int, size: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Measures channels, and input cells per output cell, after each stage, on a blank [1, in_channels, size, size].

    A stride of 0 says that the output's side is no whole fraction of the input's.
    """
    run = nn.ModuleList(stages.values())
    training = [(module, module.training) for module in run.modules()]
    run.eval()  # running statistics stay as they are
    parameter = next(run.parameters(), torch.empty(0))
    x = torch.zeros(1, in_channels, size, size, dtype=parameter.dtype, device=parameter.device)
    x = entering(run[0], x)
    channels, stride = {}, {}
    for name, stage in stages.items():
        x = stage(x)
        channels[name] = x.shape[1]
        stride[name] = size // x.shape[2] if size % x.shape[2] == 0 else 0
    for module, mode in training:
        module.training = mode
    return channels, stride


def _take_strides_out(module: nn.Module) -> None:
    """Removes all strides inside a module, in place; modules other than convolutions and poolings may have a method
    `keep_resolution()`."""
    for name, child in module.named_children():
        if isinstance(child, (nn.MaxPool2d, nn.AvgPool2d)) and child.stride not in (1, (1, 1)):
            setattr(module, name, nn.Identity())
        elif isinstance(child, nn.Conv2d):
            if type(child) is nn.Conv2d and child.padding == (0, 0) and child.stride == child.kernel_size != (1, 1):
                below, right = (side - 1 for side in child.kernel_size)
                setattr(module, name, nn.Sequential(nn.ReplicationPad2d((0, right, 0, below)), child))
            child.stride = (1, 1)
        elif callable(take_out := getattr(child, "keep_resolution", None)):
            take_out()
        else:
            _take_strides_out(child)
