"""DIABLO: dictionary-based attention block (Jacob et al., Pattern Recognition Letters 2020).

B images, N dictionary entries (each a branch, a learner), d = D/N width of one branch; F is the feature extractor,
phi the map whose output (m channels) is compared with the dictionary, psi the map that refines features (c channels
where they are selected from), as in section 3.1.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dml.configuration.ranges import Few, Positive
from dml.data.datamodule import DataModule
from dml.errors import UserError
from dml.figures.maps import attention_plot
from dml.figures.plot import Plot
from dml.methods.base import Batch, Method, NewHead, NewLoss, Output, share
from dml.models.attention import Dictionary
from dml.models.backbones.stages import Backbone, Stages
from dml.models.backbones.start import enlarge_input


class DIABLO(Method):
    """N branches; a softmax over a dictionary of N entries decides what goes into which (eq. 1-4, 8, 12).

    The loss is taken on the concatenation of the branches, scaled to unit norm so that the paper's margins mean for
    it what they mean for the baseline; no branch has a loss of its own and nothing pushes branches apart but the
    softmax (section 4.4).

    Args:
        backbone: split after the stage `branch` into F and psi.
        head, loss, dim: see `dml.methods.base`.
        N: size of the dictionary.
        selection: `feature`: an entry has one weight for all channels of a location (section 3.3); `dimension`: one
            for each channel (section 3.4).
        attention: `pre`: select from F, then refine each selection by the psi that all branches share (eq. 3, 4);
            `post`: refine, then select from psi (eq. 1, 2).
        alpha: hardness of the selection (eq. 7, 11).
        shared_head: one embedding layer for all branches; the paper: one each.
        branch: last stage of F; None: the backbone's own choice (GoogLeNet: pool3 for `pre`, pool4 for `post`).
        attention_depth: how many stages with weights phi copies; None: for `pre` the backbone's own choice
            (GoogLeNet: the five of inception4), for `post` all that follow F.
        checkpointing: the activations inside a stage of psi are computed twice rather than kept.
        options: see `Method`.

    Raises:
        UserError: an unknown choice, an alpha that is not positive, a stage that the backbone lacks, a depth beyond its
            stages or at which phi and psi differ in resolution, or a width that N branches cannot share.
    """

    counted_by = ("N",)

    def __init__(
        self,
        backbone: Backbone,
        head: NewHead,
        loss: NewLoss,
        dim: int,
        *,
        N: Few,
        selection: Literal["feature", "dimension"],
        attention: Literal["pre", "post"],
        alpha: Positive,
        shared_head: bool = False,
        branch: str | None = None,
        attention_depth: Few | None = None,
        checkpointing: bool = False,
        **options: Any,
    ) -> None:
        d = share(dim, N, "method.N")
        super().__init__(normalize=backbone.normalize, losses=[loss(dim)], **options)
        self.N, self.pre = N, attention == "pre"
        branch = branch or (backbone.branch if self.pre else backbone.late_branch)
        self.F, self.psi = backbone.split(branch)
        self.phi = _phi(backbone, branch, attention_depth, self.psi, self.pre)
        self.psi.checkpointing = checkpointing
        if self.pre:
            enlarge_input(self.psi, N)  # the dictionary starts at 1/N
        m = list(self.phi.out_channels.values())[-1]
        c = backbone.out_channels[branch] if self.pre else backbone.dim
        self.dictionary = Dictionary(N, c if selection == "dimension" else 1, m, alpha)
        self.heads = nn.ModuleList([head(d)] * N if shared_head else [head(d) for _ in range(N)])

    def learners(self, images: Tensor) -> Output:
        features = self.F(images)  # [B,c,h,w]
        weights = self.weights(features)  # [B,N,c or 1,h,w]
        if self.pre:
            selected = (weights * features[:, None]).flatten(0, 1)  # eq. 3
            refined = self.psi(selected.contiguous(memory_format=torch.channels_last))  # eq. 4
            branches = refined.unflatten(0, (-1, self.N))
        else:
            branches = weights * self.psi(features)[:, None]  # eq. 1, 2
        return Output(torch.stack([head(branches[:, n]) for n, head in enumerate(self.heads)], dim=1))

    def weights(self, features: Tensor) -> Tensor:
        """Features F `[B,c,h,w]` -> attention maps of the branches, `[B,N,c,h',w']` or `[B,N,1,h',w']` (block S)."""
        return self.dictionary(self.phi(features))

    def objective(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        return self.metric(0, output.ensemble(), output, batch)

    def plots(self, images: Tensor, data: DataModule, log: Sequence[Mapping[str, Any]]) -> list[Plot]:
        return [attention_plot(images, self.weights(self.F(self.normalized(images))))]

    def new_modules(self) -> Iterable[nn.Module]:
        return self.dictionary, self.heads


def _phi(backbone: Backbone, branch: str, depth: int | None, psi: Stages, pre: bool) -> Stages:
    """A copy of stages after F: at F's resolution where it weighs F's features, else at that of psi's output."""
    if pre:
        return backbone.copy_after(branch, backbone.attention_depth if depth is None else depth, keep_resolution=True)
    if depth is None:
        return copy.deepcopy(psi)
    phi = backbone.copy_after(branch, depth)
    if list(phi.stride.values())[-1] != list(psi.stride.values())[-1]:
        raise UserError(
            f"method.attention_depth={depth} ends phi at '{list(phi.stages)[-1]}', before psi's last change of "
            "resolution: choose a greater depth or a later method.branch."
        )
    return phi
