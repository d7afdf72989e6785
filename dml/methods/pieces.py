"""Embeds a batch in pieces, with the same gradient as the whole batch at once (GradCache: Gao et al. 2021).

A step then needs the memory of one piece and of the outputs of all (experiments/bench/micro_batches.py). torch's
checkpoint does what the paper describes: the first pass over a piece keeps its output alone, the loss of the whole
batch is differentiated with respect to the outputs of all pieces, and the backward pass computes each piece a second
time, the last piece first. The paper writes two loops instead. With a single graph there is one backward pass, which
sums the gradients of all pieces. DDP therefore averages them once, and loss scaling, clipping and `detect_anomaly` work
as without pieces.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dml.methods.output import Output
from dml.models.heads import LearnsLater, looking_away

Learners = Callable[[Tensor], Output]


def embed_in_pieces(learners: Learners, images: Tensor, size: int, waiting: Sequence[LearnsLater]) -> Output:
    """Computes `learners(images)` in pieces, for networks in which no image influences the output of another.

    The second pass over a piece repeats the random draws of the first.

    Args:
        learners: images `[b,3,H,W]` -> their output.
        images: `[B,3,H,W]`.
        size: b, images in a piece; the last piece may be smaller.
        waiting: modules that do not learn yet and watch their inputs. They are shown the whole batch in an extra pass.
    """
    pieces = images.split(size)
    if waiting:
        _show(waiting, learners, pieces)

    def embed(piece: Tensor) -> Output:
        # Otherwise all pieces would share autocast's rounded weights, and sum their gradients in half precision.
        torch.clear_autocast_cache()
        with looking_away(waiting):
            return learners(piece)

    return Output.joined([checkpoint(embed, piece, use_reentrant=False) for piece in pieces])


@torch.no_grad()
def _show(waiting: Sequence[LearnsLater], learners: Learners, pieces: Sequence[Tensor]) -> None:
    """Shows waiting modules the inputs that a pass over the whole batch would give them, as often as it would."""
    seen: dict[nn.Module, list[Tensor]] = {module: [] for module in waiting}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, LearnsLater)
        seen[module].append(module.summary(inputs[0]))

    hooks = [module.register_forward_pre_hook(note) for module in waiting]
    devices = [piece.device for piece in pieces[:1] if piece.is_cuda]
    with torch.random.fork_rng(devices), looking_away(waiting):  # so that this pass changes no draw of the next ones
        for piece in pieces:
            learners(piece)
    for hook in hooks:
        hook.remove()
    for module in waiting:
        calls = len(seen[module]) // len(pieces)  # of the module in one pass
        for call in range(calls):
            if any(True for _ in module.resting()):  # it may stop waiting in between
                module.look(torch.cat(seen[module][call::calls]))
