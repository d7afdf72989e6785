"""DeML: decoupled metric learning with hybrid attention (Chen & Deng, CVPR 2019).

B images, I scales, J learners a scale, d width of one learner. Names are the paper's: F the trunk up to pool3, G what
follows, OAM the object attention between two scales, CAM the channel attention of a learner.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dml.configuration.ranges import Few, NotNegative, Size, check_value
from dml.data.datamodule import DataModule
from dml.errors import UserError
from dml.figures.maps import attention_plot, object_regions
from dml.figures.plot import Plot
from dml.losses import functional
from dml.methods.balance import Balance
from dml.methods.base import Batch, Method, NewHead, NewLoss, Output
from dml.models.attention import ChannelAttention, ObjectAttention, crop_and_zoom, object_boxes
from dml.models.backbones.stages import Backbone, Stages
from dml.models.backbones.start import enlarge_input
from dml.models.heads import Head, looking_away


@dataclass(frozen=True)
class Region:
    """Where one scale found the object.

    Attributes:
        proposal: `[B,H,W]`, how much is there.
        boxes: `[B,4]`, left, top, right, bottom of what the next scale sees.
    """

    proposal: Tensor
    boxes: Tensor


class Scale(nn.Module):
    """The trunk of one scale and its J learners: `CA_j(G(CAM_j(F(x))))`, with G shared (section 3).

    Args:
        lower, upper: F and G.
        cams: one a learner; none: the learners see F's output itself.
        heads: one a learner.
        layers: stages that object attention looks at.
    """

    def __init__(
        self, lower: Stages, upper: Stages, cams: Iterable[nn.Module], heads: Iterable[Head], layers: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.F, self.G, self.layers = lower, upper, layers
        self.cams, self.heads = nn.ModuleList(cams), nn.ModuleList(heads)

    def proposals(self, maps: Tensor) -> Tensor:
        """F's output `[B,C,h,w]` -> channel attention proposals `[B,J,C,h,w]`."""
        return torch.stack([cam(maps) for cam in self.cams], dim=1)

    def for_the_adversary(self, branches: Tensor) -> Tensor:
        """G's outputs `[B,J,C,h,w]` -> learner outputs `[B,J,d]` once more, by layers that get no gradient of it and
        keep their statistics: eq. 4 is a game between the adversary and f, g and the CAMs."""
        outputs = []
        for j, head in enumerate(self.heads):
            weights = {name: weight.detach() for name, weight in head.named_parameters()}
            statistics = {name: buffer.clone() for name, buffer in head.named_buffers()}
            with looking_away(head.modules()):
                outputs.append(functional_call(head, weights | statistics, branches[:, j]))
        return torch.stack(outputs, dim=1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Normalised images -> learner outputs `[B,J,d]`, G's `[B,J,C,h,w]`, and the layers' maps, each `[B,C,h,w]`.

        Above the channel attention each learner has maps of its own: object attention looks at their mean.
        """
        maps, below = self.F.tapped(images, self.layers)
        proposals = self.proposals(maps)
        batch = proposals.flatten(0, 1).contiguous(memory_format=torch.channels_last)  # [B*J,C,h,w]
        features, above = self.G.tapped(batch, self.layers)
        branches = features.unflatten(0, proposals.shape[:2])
        outputs = torch.stack([head(branches[:, j]) for j, head in enumerate(self.heads)], dim=1)
        taps = [*below.values(), *(tap.detach().unflatten(0, proposals.shape[:2]).mean(1) for tap in above.values())]
        return outputs, branches, taps


class Adversary(nn.Module):
    """The network that pulls a scale's learners together (Fig. 3c, eq. 4): `[N,J,d] -> [N,J,width]`, in float32.

    The paper gives its place, not its layers. Here: one orthogonal layer and a leaky ReLU. Layers that are free learn
    within a hundred steps to map everything to one point, which is the least that eq. 4 can be, and from there on
    neither side has a gradient. An orthogonal layer keeps all distances, and the leaky ReLU shrinks them at most to a
    tenth: to choose which ones is the adversary's play, and it never ends.

    torch's `parametrizations.orthogonal` was passed over: weight decay moves what it takes for signs, and the layer is
    zero from then on.

    Args:
        dim: d.
        width: d or more.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dim))  # spans the layer's columns; its scale does not matter

    def layer(self) -> Tensor:
        """`[width,d]` with orthonormal columns."""
        columns, upper = torch.linalg.qr(self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)))
        return columns * upper.diagonal().sign()  # without the signs it would jump where one changes

    def forward(self, embeddings: Tensor) -> Tensor:
        return F.leaky_relu(F.linear(embeddings, self.layer()), 0.1)


class DeML(Method):
    """I scales of J learners. Each scale sees what the one before found to be the object, enlarged.

    Every scale has a trunk of its own, and all are trained together; no gradient passes the crop. The learners of a
    scale are kept apart by an adversary: it maps them to where they agree (eq. 4), and by a reversed gradient F, G
    and the CAMs, not the learners' own layers, are trained to make them differ there (section 3.2). Learner i*J + j is
    CA(i,j). The adversary is given the learners' outputs at unit norm, where eq. 4 has them as they are: by length
    alone learners would differ without end.

    The released code differs: it has no adversary in use, but a contrastive hinge between the learners of a scale
    (`adversary=hinge`).

    Args:
        backbone: split into F and G after the stage `branch`; every scale starts from a copy.
        head, loss, dim: see `dml.methods.base`. A learner has floor(dim / (I J)) dimensions.
        I, J: scales, and learners of each.
        channel_attention: false leaves the CAMs out.
        adversary: `grl`, eq. 4 behind a gradient reversal layer; `hinge`, what the squared distances of learners lack
            to 2 (the released code, with weight 0.2); or `none`.
        lambda_adv: weight of eq. 4 (lambda_0), or of the hinge.
        balance: the weight is the ratio of its gradient to the metric loss's (see `Balance`), not eq. 5's as printed.
        adversary_width: of its layer, a learner's dimensions or more; None: twice as many.
        object_layers: stages whose maps object attention walks on; None: the last one, and, where there is one, the
            last at a higher resolution (GoogLeNet: inception4e and inception5b, as in the paper).
        branch: last stage of F; None: the backbone's own (GoogLeNet: pool3, as in the paper).
        checkpointing: the activations inside a stage are computed twice rather than kept.
        options: see `Method`.

    Raises:
        UserError: I or J below 1, a width that leaves a learner no dimension, an unknown adversary, or a stage that the
            backbone lacks.
    """

    counted_by = ("I", "J")

    def __init__(
        self,
        backbone: Backbone,
        head: NewHead,
        loss: NewLoss,
        dim: int,
        *,
        I: Few,  # noqa: E741 (the paper's name)
        J: Few,
        channel_attention: bool = True,
        adversary: Literal["grl", "hinge", "none"] = "grl",
        lambda_adv: NotNegative = 1.0,
        balance: bool = True,
        adversary_width: Size | None = None,
        object_layers: list[str] | None = None,
        branch: str | None = None,
        checkpointing: bool = False,
        **options: Any,
    ) -> None:
        d = dim // (I * J)
        if d < 1:
            raise UserError(f"head.dim={dim} leaves the {I * J} learners no dimension: make it {I * J} or more.")
        played = adversary == "grl" and J > 1
        width = 2 * d if adversary_width is None else adversary_width
        if played:
            check_value("method.adversary_width", width, Annotated[int, Field(ge=d, le=65536)])
        super().__init__(normalize=backbone.normalize, losses=[loss(d) for _ in range(I * J)], **options)
        self.I, self.J, self.adversary, self.lambda_adv = I, J, adversary, lambda_adv
        self.balance = Balance() if balance and lambda_adv and adversary != "none" and J > 1 else None
        branch = branch or backbone.branch
        layers = _object_layers(backbone, object_layers)
        self.scales = nn.ModuleList()
        for _ in range(I):
            lower, upper = copy.deepcopy(backbone).split(branch)
            lower.checkpointing = upper.checkpointing = checkpointing
            channels = backbone.out_channels[branch]
            cams = [ChannelAttention(channels) if channel_attention else nn.Identity() for _ in range(J)]
            if channel_attention:
                enlarge_input(upper, 2)  # its weights start near 1/2
            self.scales.append(Scale(lower, upper, cams, [head(d) for _ in range(J)], layers))
        self.object_attention = ObjectAttention()
        self.channel_attention = channel_attention
        self.adversaries = nn.ModuleList([Adversary(d, width) for _ in range(I)] if played else [])

    def groups(self) -> dict[str, slice]:
        """The learners of each scale (Table 2)."""
        return {f"scales/{i}": slice(i * self.J, (i + 1) * self.J) for i in range(self.I)} if self.I > 1 else {}

    def learners(self, images: Tensor) -> Output:
        outputs, _, branches = self.walk(images)
        if not self.adversaries or not torch.is_grad_enabled():
            return Output(outputs)
        played = []
        for scale, of_scale in zip(self.scales, branches, strict=True):
            assert isinstance(scale, Scale)
            played.append(scale.for_the_adversary(of_scale))
        return Output(outputs, played=torch.cat(played, dim=1))

    def walk(self, images: Tensor) -> tuple[Tensor, list[Region], list[Tensor]]:
        """Normalised images -> outputs of all learners `[B,I*J,d]`, where each scale but the last found the object
        that the next one looks at, and G's outputs in each scale, `[B,J,C,h,w]`."""
        outputs, regions, branches = [], [], []
        for i, scale in enumerate(self.scales):
            of_scale, of_branches, maps = scale(images)
            outputs.append(of_scale)
            branches.append(of_branches)
            if i + 1 < self.I:
                proposal = torch.stack([_resized(self.object_attention(layer), images) for layer in maps]).mean(0)
                regions.append(Region(proposal, object_boxes(proposal)))
                images = crop_and_zoom(images, regions[-1].boxes)
        return torch.cat(outputs, dim=1), regions, branches

    def objective(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """Eq. 5, the mean of the learners' losses, and what keeps the learners of a scale apart (eq. 4)."""
        terms = {name: term / (self.I * self.J) for name, term in super().objective(output, batch).items()}
        of_scales = output.embeddings.unflatten(1, (self.I, self.J)).unbind(1)
        sides = {}  # losses, and the outputs that they are on
        if self.adversaries:
            played = F.normalize(output.auxiliary["played"].to(output.raw.dtype), dim=-1)
            opponents = zip(self.adversaries, played.unflatten(1, (self.I, self.J)).unbind(1), strict=True)
            mapped = [net(functional.reverse(e)) for net, e in opponents]
            sides["adversary"] = (
                torch.stack([functional.discrepancy(m) for m in mapped]).sum(),
                output.auxiliary["played"],
            )
        if self.adversary == "hinge" and self.J > 1:
            apart = [functional.divergence(e, margin=2.0) for e in of_scales]
            sides["hinge"] = torch.stack(apart).sum(), output.raw
        for name, (side, seen) in sides.items():
            if self.balance is not None:
                side = self.balance(terms["metric"], output.raw, side, seen, self.global_step)
            terms[name] = self.lambda_adv * side
        return terms

    def on_step_end(self, step: int) -> dict[str, float]:
        return {} if self.balance is None else self.balance.figures(step)

    def attention(self, images: Tensor) -> Tensor:
        """Normalised images -> the channel attention proposals of the first scale `[B,J,C,h,w]` (Fig. 4b)."""
        first = self.scales[0]
        assert isinstance(first, Scale)
        maps: Tensor = first.F(images)
        return first.proposals(maps)

    def plots(self, images: Tensor, data: DataModule, log: Sequence[Mapping[str, Any]]) -> list[Plot]:
        """As the paper's Fig. 4."""
        drawn, seen = [], self.normalized(images)
        if self.I > 1:
            found = [(region.proposal.float().cpu(), region.boxes.cpu()) for region in self.walk(seen)[1]]
            drawn.append(
                Plot(
                    "regions",
                    "What each scale sees of some test images, how much of the object it finds where (bright is much), "
                    "and the square that the next scale sees enlarged",
                    object_regions(images.float().cpu(), found),
                )
            )
        return [*drawn, attention_plot(images, self.attention(seen))] if self.channel_attention else drawn

    def new_modules(self) -> Iterable[nn.Module]:
        """The learners alone: "10 times learning rate for the learners" (section 4)."""
        for scale in self.scales:
            assert isinstance(scale, Scale)
            yield scale.heads

    def openings(self) -> Sequence[Stages]:
        if self.I > 1:
            raise UserError(
                f"dataset.cache=features keeps features of whole images, and the scales of method.I={self.I} look at "
                "parts of them: set method.I=1, or another dataset.cache."
            )
        return super().openings()

    def training_only(self) -> Iterable[nn.Module]:
        return (*super().training_only(), self.adversaries)


def _resized(maps: Tensor, images: Tensor) -> Tensor:
    """`[B,h,w]` -> `[B,H,W]` of the images."""
    return F.interpolate(maps[:, None], images.shape[2:], mode="bilinear", align_corners=False).squeeze(1)


def _object_layers(backbone: Backbone, names: list[str] | None) -> tuple[str, ...]:
    stages = list(backbone.stages)
    if names is None:
        finer = [name for name in stages if backbone.stride[name] < backbone.stride[stages[-1]]]
        return (*finer[-1:], stages[-1])  # a transformer has one resolution
    if isinstance(names, str) or not isinstance(names, Sequence) or not names or not set(names) <= set(stages):
        raise UserError(
            f"method.object_layers={names} has to be a list of stages of the backbone, as [{stages[-1]}]: they are "
            f"{', '.join(stages)}."
        )
    return tuple(names)
