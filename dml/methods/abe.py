"""ABE-M: attention-based ensemble (Kim et al., ECCV 2018), and the ensembles to which its paper compares it.

B images, M learners, d = D/M width of one learner. Names are the paper's: S the spatial feature extractor and G the
global feature embedding function (section 3.3), A_m = sigmoid(A'_m(C)) the attention modules with their shared part
C (section 4).

    ABE                          G(S(x) * A_m(S(x)))         eq. 7, all shared but A'_m
    MHeads                       G_m(S(x))                   eq. 4, Fig. 1a
    MHeads(attention=True)       G_m(S(x) * A_m(S(x)))       appendix, Fig. 8a
    MTails                       G(S_m(x))                   eq. 5, appendix, Fig. 8b
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dml.configuration.ranges import Few, NotNegative, Share
from dml.data.datamodule import DataModule
from dml.errors import UserError
from dml.figures.maps import attention_plot
from dml.figures.plot import Plot
from dml.losses import functional
from dml.methods.balance import Balance
from dml.methods.base import Batch, Method, NewHead, NewLoss, Output, share
from dml.models.backbones.stages import Backbone, Stages
from dml.models.backbones.start import enlarge_input
from dml.models.heads import Head


class Ensemble(Method):
    """The base class of ensembles whose M learners separate at one branching point, trained with eq. 8.

    Args:
        backbone: split into S and G after the stage `branch`.
        loss, dim: see `dml.methods.base`.
        M: number of learners.
        lambda_div: weight of the divergence loss (eq. 8); 0 leaves it out.
        balance: `lambda_div` is the ratio of the divergence loss's gradient to the metric loss's (see `Balance`), and
            not the weight of eq. 8 as printed.
        margin_div: margin of the divergence loss (eq. 9).
        branch: last stage of S; None: the backbone's own choice (GoogLeNet: pool3, as in the paper).
        checkpointing: compute the activations inside a stage of G twice instead of keeping them for every learner.
        options: see `Method`.

    Raises:
        UserError: the backbone has no stage `branch`, or M learners cannot share the width.
    """

    counted_by = ("M",)

    def __init__(
        self,
        backbone: Backbone,
        loss: NewLoss,
        dim: int,
        *,
        M: Few,
        lambda_div: NotNegative,
        balance: bool,
        margin_div: NotNegative,
        branch: str | None,
        checkpointing: bool,
        **options: Any,
    ) -> None:
        d = share(dim, M, "method.M")
        super().__init__(normalize=backbone.normalize, losses=[loss(d) for _ in range(M)], **options)
        self.M, self.d, self.lambda_div, self.margin_div = M, d, lambda_div, margin_div
        self.balance = Balance() if balance and lambda_div and M > 1 else None
        self.branch = branch or backbone.branch
        self.spatial, self.embedding = backbone.split(self.branch)  # S and G of the paper
        self.embedding.checkpointing = checkpointing

    def objective(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """Eq. 8: the learners' metric losses, and the divergence loss that keeps them apart."""
        terms = super().objective(output, batch)
        if self.lambda_div:
            metric = torch.stack(list(terms.values())).sum()
            divergence = functional.divergence(output.embeddings, self.margin_div)
            if self.balance is not None:
                divergence = self.balance(metric, output.raw, divergence, output.raw, self.global_step)
            terms["divergence"] = self.lambda_div * divergence
        return terms

    def on_step_end(self, step: int) -> dict[str, float]:
        return {} if self.balance is None else self.balance.figures(step)

    def attention(self, images: Tensor) -> Tensor | None:
        """Computes the attention masks of normalised images, `[B,M,C,h,w]`; None: the ensemble has none."""
        return None

    def plots(self, images: Tensor, data: DataModule, log: Sequence[Mapping[str, Any]]) -> list[Plot]:
        masks = self.attention(self.normalized(images))
        return [] if masks is None else [attention_plot(images, masks)]


class Attention(nn.Module):
    """The attention A_1 .. A_M: masks `sigmoid(A'_m(C(S)))` over the output of S (section 4, "we simplify attention
    module").

    C is a second copy of the stages after S. All learners share it, and it has no pooling, so that masks have the
    resolution of S (section 6.3). A'_m is a 1x1 convolution with bias to the channels of S.

    Args:
        backbone: its stages are copied.
        branch: last stage of S.
        depth: how many stages with weights C copies (section 6.3, inception blocks); None: the backbone's own choice
            (GoogLeNet: the five of inception4).
        M: number of learners.

    Raises:
        UserError: `depth` is more than the stages that follow `branch`.
    """

    def __init__(self, backbone: Backbone, branch: str, depth: int | None, M: int) -> None:
        super().__init__()
        self.C = backbone.copy_after(branch, backbone.attention_depth if depth is None else depth, keep_resolution=True)
        self.M, self.channels = M, backbone.out_channels[branch]
        self.A = nn.Conv2d(list(self.C.out_channels.values())[-1], M * self.channels, kernel_size=1)  # A'_1 .. A'_M
        for weight in self.A.weight.chunk(M):
            nn.init.xavier_uniform_(weight)  # Glorot & Bengio (section 4), with the fans of one learner's layer
        nn.init.zeros_(self.A.bias)  # type: ignore[arg-type]

    def forward(self, spatial: Tensor) -> Tensor:
        """Computes masks in (0,1) `[B,M,C,h,w]` from `S(x) [B,C,h,w]`."""
        return torch.sigmoid(self.A(self.C(spatial))).unflatten(1, (self.M, self.channels))


class ABE(Ensemble):
    """ABE-M: learners `G(S(x) * A_m(S(x)))` that share everything but their attention masks (eq. 7).

    Args:
        head: G's last layer, which all learners share too.
        attention_depth: see `Attention`.
        backbone, loss, dim, M, options: see `Ensemble`.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: NewHead,
        loss: NewLoss,
        dim: int,
        *,
        M: Few,
        attention_depth: Few | None = None,
        **options: Any,
    ) -> None:
        super().__init__(backbone, loss, dim, M=M, **options)
        self.head = head(self.d)
        self.masks = Attention(backbone, self.branch, attention_depth, M)
        enlarge_input(self.embedding, 2)  # masks start near 1/2

    def learners(self, images: Tensor) -> Output:
        spatial = self.spatial(images)  # [B,C,h,w]
        return Output(stacked(self.embedding, self.head, spatial[:, None] * self.masks(spatial)))

    def attention(self, images: Tensor) -> Tensor:
        return self.masks(self.spatial(images))

    def new_modules(self) -> Iterable[nn.Module]:
        return self.masks.A, self.head


class MHeads(Ensemble):
    """M-heads: learners `G_m(S(x))`; with attention `G_m(S(x) * A_m(S(x)))`. The paper trains both without eq. 9.

    All G_m start from the backbone's weights and differ at first only in their randomly drawn last layers.

    Args:
        head: the last layer of one G_m.
        attention: put a mask before each G_m (M-heads+att, appendix).
        attention_depth: see `Attention`.
        backbone, loss, dim, M, options: see `Ensemble`.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: NewHead,
        loss: NewLoss,
        dim: int,
        *,
        M: Few,
        attention: bool = False,
        attention_depth: Few | None = None,
        **options: Any,
    ) -> None:
        super().__init__(backbone, loss, dim, M=M, **options)
        self.embeddings = nn.ModuleList([self.embedding, *(copy.deepcopy(self.embedding) for _ in range(M - 1))])
        del self.embedding
        self.heads = nn.ModuleList(head(self.d) for _ in range(M))
        self.masks = Attention(backbone, self.branch, attention_depth, M) if attention else None
        for embedding in self.embeddings if attention else ():
            assert isinstance(embedding, Stages)
            enlarge_input(embedding, 2)  # masks start near 1/2

    def learners(self, images: Tensor) -> Output:
        spatial = self.spatial(images)  # [B,C,h,w]
        inputs = [spatial] * self.M if self.masks is None else (spatial[:, None] * self.masks(spatial)).unbind(1)
        learners = zip(self.heads, self.embeddings, inputs, strict=True)
        return Output(torch.stack([head(embedding(features)) for head, embedding, features in learners], dim=1))

    def attention(self, images: Tensor) -> Tensor | None:
        return None if self.masks is None else self.masks(self.spatial(images))

    def new_modules(self) -> Iterable[nn.Module]:
        return (self.heads,) if self.masks is None else (self.masks.A, self.heads)


class MTails(Ensemble):
    """M-tails: learners `G(S_m(x))`, with one embedding function above M spatial feature extractors.

    Args:
        head: G's last layer, which all learners share too.
        perturbation: each trained weight w of S_2 .. S_M starts at `w * (1 + perturbation * normal)`. Equal tails would
            get equal gradients (that of eq. 9 is zero at distance zero) and stay equal; the paper does not say how its
            tails come to differ.
        backbone, loss, dim, M, options: see `Ensemble`.

    Raises:
        UserError: M > 1, and none of S's weights is trained, so that learners stay equal; see also `Ensemble`.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: NewHead,
        loss: NewLoss,
        dim: int,
        *,
        M: Few,
        perturbation: Share = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(backbone, loss, dim, M=M, **options)
        if M > 1 and not any(weight.requires_grad for weight in self.spatial.parameters()):
            raise UserError(
                f"method=mtails learns {M} copies of the stages up to method.branch={self.branch}, but backbone.train "
                "freezes these stages, so all learners would stay equal: train them, or choose method=mheads."
            )
        self.spatials = nn.ModuleList([self.spatial, *(copy.deepcopy(self.spatial) for _ in range(M - 1))])
        del self.spatial
        self.head = head(self.d)
        with torch.no_grad():
            for weight in self.spatials[1:].parameters():
                if weight.requires_grad:
                    weight.mul_(1 + perturbation * torch.randn_like(weight))

    def learners(self, images: Tensor) -> Output:
        features = torch.stack([spatial(images) for spatial in self.spatials], dim=1)  # [B,M,C,h,w]
        return Output(stacked(self.embedding, self.head, features))

    def new_modules(self) -> Iterable[nn.Module]:
        return (self.head,)


def stacked(embedding: Stages, head: Head, features: Tensor) -> Tensor:
    """Applies the shared G to all learners in one pass, stacked on the batch axis: `[B,M,C,h,w]` -> `[B,M,d]`."""
    batch = features.flatten(0, 1).contiguous(memory_format=torch.channels_last)  # [B*M,C,h,w]
    outputs: Tensor = head(embedding(batch))
    return outputs.unflatten(0, features.shape[:2])
