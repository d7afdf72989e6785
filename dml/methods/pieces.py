"""A batch embedded in pieces, for the gradient of the whole of it (GradCache: Gao et al. 2021).

The memory that a step takes is then that of a piece and of the outputs of all (experiments/bench/micro_batches.py).
torch's checkpoint is what the paper describes: a piece's first pass keeps its output alone; the loss of the whole batch
is differentiated by the outputs of all pieces; and the gradient of each piece's output asks for its second pass, the
last piece first. The paper's two loops were passed over. With one graph there is one backward pass, in which the
gradients of all pieces are summed, so that DDP averages them once, and scaled losses, clipping and `detect_anomaly` see
what they see without pieces.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dml.methods.output import Output
from dml.models.heads import LearnsLater, looking_away

Learners = Callable[[Tensor], Output]


def embed_in_pieces(learners: Learners, images: Tensor, size: int, waiting: Sequence[LearnsLater]) -> Output:
    """`learners(images)`, where no image of a batch has an influence on another's output.

    Random draws of a piece's second pass are those of its first.

    Args:
        learners: images `[b,3,H,W]` -> what the objective reads of them.
        images: `[B,3,H,W]`.
        size: b, of a piece; the last one may be smaller.
        waiting: the modules of the network that wait. They see the batch as a whole, in a pass of its own.
    """
    pieces = images.split(size)
    if waiting:
        _show(waiting, learners, pieces)

    def embed(piece: Tensor) -> Output:
        # Weights that autocast rounded for an earlier piece would sum the gradients of all pieces in half precision.
        torch.clear_autocast_cache()
        with looking_away(waiting):
            return learners(piece)

    return Output.joined([checkpoint(embed, piece, use_reentrant=False) for piece in pieces])


@torch.no_grad()
def _show(waiting: Sequence[LearnsLater], learners: Learners, pieces: Sequence[Tensor]) -> None:
    """Has modules look at what a pass over the whole batch would give them, as often as it would."""
    seen: dict[nn.Module, list[Tensor]] = {module: [] for module in waiting}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, LearnsLater)
        seen[module].append(module.summary(inputs[0]))

    hooks = [module.register_forward_pre_hook(note) for module in waiting]
    devices = [piece.device for piece in pieces[:1] if piece.is_cuda]
    with torch.random.fork_rng(devices), looking_away(waiting):  # draws are those of the passes that follow
        for piece in pieces:
            learners(piece)
    for hook in hooks:
        hook.remove()
    for module in waiting:
        calls = len(seen[module]) // len(pieces)  # of one pass
        for call in range(calls):
            if any(True for _ in module.resting()):  # still
                module.look(torch.cat(seen[module][call::calls]))
