"""DeML: decoupled metric learning with hybrid attention (Chen & Deng, CVPR 2019).

B images, I scales, J learners per scale, d width of one learner. Names are the paper's: F is the trunk up to pool3, G
the stages after it, OAM the object attention between two scales, CAM the channel attention of a learner.
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
from dml.methods.balance import ratios
from dml.methods.base import Batch, Method, NewHead, NewLoss, Output
from dml.methods.output import Terms
from dml.models.attention import ChannelAttention, ObjectAttention, crop_and_zoom, object_boxes
from dml.models.backbones.stages import Backbone, Stages
from dml.models.backbones.start import enlarge_input
from dml.models.heads import Head, looking_away


@dataclass(frozen=True)
class Region:
    """The regions in which one scale found the objects.

    Attributes:
        proposal: `[B,H,W]`, how strongly object attention marks each pixel.
        boxes: `[B,4]`, left, top, right, bottom of the part that the next scale sees.
    """

    proposal: Tensor
    boxes: Tensor


class Scale(nn.Module):
    """The trunk of one scale and its J learners: `CA_j(G(CAM_j(F(x))))`, with G shared (section 3).

    Args:
        lower, upper: F and G.
        cams: one per learner; identities if there is no channel attention.
        heads: one per learner, or J times the one that they share.
        layers: the stages whose maps object attention uses.
    """

    def __init__(
        self, lower: Stages, upper: Stages, cams: Iterable[nn.Module], heads: Iterable[Head], layers: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.F, self.G, self.layers = lower, upper, layers
        self.cams, self.heads = nn.ModuleList(cams), nn.ModuleList(heads)

    def proposals(self, maps: Tensor) -> Tensor:
        """Computes channel attention proposals `[B,J,C,h,w]` of F's output `[B,C,h,w]`."""
        return torch.stack([cam(maps) for cam in self.cams], dim=1)

    def for_the_adversary(self, branches: Tensor) -> Tensor:
        """Computes the learner outputs `[B,J,d]` of G's outputs `[B,J,C,h,w]` once more, for the adversary.

        The learners' layers get no gradient from it and keep their statistics, since eq. 4 is a game between the
        adversary on one side and f, g and the CAMs on the other.
        """
        outputs = []
        for j, head in enumerate(self.heads):
            weights = {name: weight.detach() for name, weight in head.named_parameters()}
            statistics = {name: buffer.clone() for name, buffer in head.named_buffers()}
            with looking_away(head.modules()):
                outputs.append(functional_call(head, weights | statistics, branches[:, j]))
        return torch.stack(outputs, dim=1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Computes learner outputs `[B,J,d]`, G's outputs `[B,J,C,h,w]` and the maps of `layers`, each `[B,C,h,w]`.

        After the channel attention each learner has maps of its own; object attention uses their mean.

        Args:
            images: `[B,3,H,W]`, normalised.
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

    The paper gives its place but not its layers. Here it is one orthogonal layer and a leaky ReLU. Unconstrained layers
    learn within a hundred steps to map everything to one point, which is the minimum of eq. 4, and from then on neither
    side has a gradient. An orthogonal layer keeps all distances, and the leaky ReLU shrinks them at most to a tenth:
    the adversary can only choose which ones, so the game does not end.

    torch's `parametrizations.orthogonal` is not used: weight decay changes the parameters that it uses as signs, and
    the layer becomes zero.

    Args:
        dim: d.
        width: of the layer's output, d or more.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        # It spans the layer's columns. They have unit norm, since rates such as the paper's 1e-5 would hardly turn
        # longer ones.
        self.weight = nn.Parameter(F.normalize(torch.randn(width, dim), dim=0))

    def layer(self) -> Tensor:
        """Returns the layer's weight, `[width,d]` with orthonormal columns."""
        columns, upper = torch.linalg.qr(self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)))
        return columns * upper.diagonal().sign()  # without the signs the layer would jump when one changes

    def forward(self, embeddings: Tensor) -> Tensor:
        return F.leaky_relu(F.linear(embeddings, self.layer()), 0.1)


class DeML(Method):
    """I scales of J learners. Each scale sees, enlarged, the region in which the scale before it found the object.

    Every scale has its own trunk, and all are trained together; no gradient passes through the crop. An adversary keeps
    the learners of a scale apart: it maps them so that they agree (eq. 4), and through a reversed gradient F, G and the
    CAMs, but not the learners' own layers, are trained to make them differ there (section 3.2). Learner i*J + j is
    CA(i,j). Eq. 4 takes the learners' outputs without normalisation; here they have unit norm, since by length alone
    learners could differ without limit.

    The learners of a scale share their layer, as they share G: "the only differentiating parts are CAMs" (section 3.2).
    The released code uses a contrastive hinge between them instead of the adversary (`adversary=hinge`).

    Args:
        backbone: split into F and G after the stage `branch`; every scale starts from a copy.
        head, loss, dim: see `dml.methods.base`. A learner has floor(dim / (I J)) dimensions.
        I, J: number of scales, and of learners in each scale.
        channel_attention: false leaves the CAMs out.
        shared_head: true: the learners of a scale have one embedding layer; false: one each, as eq. 6 may be read,
            which has parameters for each learner.
        adversary: `grl`: eq. 4 behind a gradient reversal layer; `hinge`: half the square of 2 minus the distance of
            two learners (the released code, with weight 0.2); or `none`.
        lambda_adv: weight of eq. 4 (lambda_0), or of the hinge.
        balance: `lambda_adv` is, in each scale and at each step, the ratio of this loss's gradient to the metric
            loss's (see `ratios`), and not the weight of eq. 4 as printed.
        adversary_width: width of the adversary's layer, at least that of a learner; None: twice that of a learner.
        object_layers: stages on whose maps object attention walks; None: the last one, and the last one of a higher
            resolution if there is one (GoogLeNet: inception4e and inception5b, as in the paper).
        locality: width of the surroundings with which object attention compares a cell, as a share of the map's longer
            side; None: eq. 2, which compares it with all cells (see `object_attention`).
        branch: last stage of F; None: the backbone's own choice (GoogLeNet: pool3, as in the paper).
        checkpointing: compute the activations inside a stage twice instead of keeping them.
        options: see `Method`.

    Raises:
        UserError: the width leaves a learner no dimension, the adversary's layer is too narrow, or nothing of what it
            trains learns; or the backbone has no such stage.
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
        shared_head: bool = True,
        adversary: Literal["grl", "hinge", "none"] = "grl",
        lambda_adv: NotNegative = 0.1,
        balance: bool = True,
        adversary_width: Size | None = None,
        object_layers: list[str] | None = None,
        locality: Annotated[float, Field(ge=0.01, le=1)] | None = None,
        branch: str | None = None,
        checkpointing: bool = False,
        **options: Any,
    ) -> None:
        d = dim // (I * J)
        if d < 1:
            raise UserError(
                f"head.dim={dim} leaves no dimension for each of {I * J} learners: make it {I * J} or more."
            )
        if J > 1 and shared_head and not channel_attention:
            raise UserError(
                f"method.channel_attention=false method.shared_head=true make the {J} learners of a scale one and the "
                "same: change one of the two, or set method.J=1."
            )
        played = adversary == "grl" and J > 1
        if played and not channel_attention and not any(one.requires_grad for one in backbone.parameters()):
            raise UserError(
                "backbone.train=none method.channel_attention=false leave method.adversary=grl nothing to keep apart: "
                "change one of the three."
            )
        width = 2 * d if adversary_width is None else adversary_width
        if played:
            check_value("method.adversary_width", width, Annotated[int, Field(ge=d, le=65536)])
        super().__init__(normalize=backbone.normalize, losses=[loss(d) for _ in range(I * J)], **options)
        self.I, self.J, self.adversary, self.lambda_adv = I, J, adversary, lambda_adv
        self.balance = balance
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
            heads = [head(d)] * J if shared_head else [head(d) for _ in range(J)]
            self.scales.append(Scale(lower, upper, cams, heads, layers))
        self.object_attention = ObjectAttention(locality)
        self.channel_attention = channel_attention
        self.adversaries = nn.ModuleList([Adversary(d, width) for _ in range(I)] if played else [])

    def groups(self) -> dict[str, slice]:
        """Returns the learners of each scale, which are also evaluated together (Table 2)."""
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
        """Passes normalised images through all scales.

        Returns:
            The outputs of all learners `[B,I*J,d]`; the region that each scale but the last found for the next one; and
            G's outputs in each scale, `[B,J,C,h,w]`.
        """
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
        """Computes the mean of the learners' losses (eq. 5) and what keeps the learners of a scale apart (eq. 4)."""
        terms = Terms({name: term / (self.I * self.J) for name, term in super().objective(output, batch).items()})
        metric = torch.stack(list(terms.values())).sum()
        name, seen = "hinge", output.raw
        if self.adversaries:
            name, seen = "adversary", output.auxiliary["played"]
        elif self.adversary != "hinge" or self.J == 1:
            return terms
        of_scales = self._apart(seen)
        if self.balance:
            # At each step, since learners that share a layer start nearly alike, where this loss has nearly no
            # gradient. In each scale, since one whose learners differ already would hide another whose do not.
            of_scales = of_scales * ratios(metric, output.raw, of_scales.sum(), seen, self.I)
        terms[name] = self.lambda_adv * of_scales.sum()
        return terms

    def _apart(self, outputs: Tensor) -> Tensor:
        """Computes what keeps the learners of each scale apart, `[I]`, from raw outputs `[B,I*J,d]`: eq. 4 or hinge."""
        unit = F.normalize(outputs.to(torch.promote_types(outputs.dtype, torch.float32)), dim=-1)
        of_scales = unit.unflatten(1, (self.I, self.J)).unbind(1)
        if not self.adversaries:
            return torch.stack([functional.repulsion(e) for e in of_scales])
        played = [net(functional.reverse(e)) for net, e in zip(self.adversaries, of_scales, strict=True)]
        return torch.stack([functional.discrepancy(one) for one in played])

    def attention(self, images: Tensor) -> Tensor:
        """Computes the first scale's channel attention proposals `[B,J,C,h,w]` of normalised images (Fig. 4b)."""
        first = self.scales[0]
        assert isinstance(first, Scale)
        maps: Tensor = first.F(images)
        return first.proposals(maps)

    def plots(self, images: Tensor, data: DataModule, log: Sequence[Mapping[str, Any]]) -> list[Plot]:
        """Draws pictures like the paper's Fig. 4."""
        drawn, seen = [], self.normalized(images)
        if self.I > 1:
            found = [(region.proposal.float().cpu(), region.boxes.cpu()) for region in self.walk(seen)[1]]
            drawn.append(
                Plot(
                    "regions",
                    "The part of some test images that each scale sees, where it finds the object (bright is strong), "
                    "and the square that the next scale sees enlarged",
                    object_regions(images.float().cpu(), found),
                )
            )
        if self.channel_attention:
            shown = "each learner" if self.I == 1 else "each learner of the first scale"
            drawn.append(attention_plot(images, self.attention(seen), shown))
        return drawn

    def new_modules(self) -> Iterable[nn.Module]:
        """Returns the learners' heads alone: "10 times learning rate for the learners" (section 4)."""
        for scale in self.scales:
            assert isinstance(scale, Scale)
            yield scale.heads

    def openings(self) -> Sequence[Stages]:
        if self.I > 1:
            raise UserError(
                f"dataset.cache=features keeps features of whole images, but the later scales of method.I={self.I} see "
                "parts of them: set method.I=1, or another dataset.cache."
            )
        return super().openings()

    def training_only(self) -> Iterable[nn.Module]:
        return (*super().training_only(), self.adversaries)


def _resized(maps: Tensor, images: Tensor) -> Tensor:
    """Resizes maps `[B,h,w]` to the size of the images, `[B,H,W]`."""
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
