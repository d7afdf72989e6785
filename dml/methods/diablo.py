"""DIABLO: dictionary-based attention block (Jacob et al., Pattern Recognition Letters 2020).

B images, N dictionary entries (one per branch, which is a learner), d = D/N width of one branch. As in section 3.1, F
is the feature extractor, the output of phi (m channels) is compared with the dictionary, and psi refines the features;
the features to select from have c channels.
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
    """N branches; a softmax over a dictionary of N entries decides which features go into which (eq. 1-4, 8, 12).

    The loss is computed on the concatenation of the branches. That is scaled to unit norm, so that the paper's margins
    have the same meaning as for the baseline. No branch has its own loss, and only the softmax pushes branches apart
    (section 4.4).

    Args:
        backbone: split after the stage `branch` into F and psi.
        head, loss, dim: see `dml.methods.base`.
        N: size of the dictionary.
        selection: `feature`: an entry has one weight for all channels of a location (section 3.3); `dimension`: one
            for each channel (section 3.4).
        attention: `pre`: select from F's output, then refine each selection by psi, which all branches share (eq. 3,
            4); `post`: refine first, then select from psi's output (eq. 1, 2).
        alpha: hardness of the selection (eq. 7, 11).
        shared_head: true: one embedding layer for all branches; false, as in the paper: one for each.
        branch: last stage of F; None: the backbone's own choice (GoogLeNet: pool3 for `pre`, pool4 for `post`).
        attention_depth: how many stages with weights phi copies; None: for `pre` the backbone's own choice
            (GoogLeNet: the five of inception4), for `post` all that follow F.
        checkpointing: compute the activations inside a stage of psi twice instead of keeping them.
        options: see `Method`.

    Raises:
        UserError: the backbone has no stage `branch`, too few stages follow it, phi and psi would differ in resolution,
            or N branches cannot share the width.
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
        """Computes the attention maps of the branches from F's output `[B,c,h,w]` (block S).

        Returns:
            `[B,N,c,h',w']` with `selection=dimension`, `[B,N,1,h',w']` with `selection=feature`.
        """
        return self.dictionary(self.phi(features))

    def objective(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        return self.metric(0, output.ensemble(), output, batch)

    def plots(self, images: Tensor, data: DataModule, log: Sequence[Mapping[str, Any]]) -> list[Plot]:
        return [attention_plot(images, self.weights(self.F(self.normalized(images))))]

    def new_modules(self) -> Iterable[nn.Module]:
        return self.dictionary, self.heads


def _phi(backbone: Backbone, branch: str, depth: int | None, psi: Stages, pre: bool) -> Stages:
    """Copies the stages after F for phi: at F's resolution if F's output is weighted, else at that of psi's output."""
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
