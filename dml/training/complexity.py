"""Measures the size and cost of an embedding: its parameters and flops."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dml.errors import OUT_OF_MEMORY, UserError, enough_memory, own_code
from dml.methods.base import Method


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


@contextmanager
def counted() -> Iterator[FlopCounterMode]:
    """Counts torch's flops inside the block; fused layers and attention, which some versions miss, are off there."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def complexity(method: Method, image_size: int, dim: int | None = None) -> dict[str, int]:
    """Measures the size of a method, and the cost of embedding one image.

    Args:
        method: to measure.
        image_size: side of the image in pixels.
        dim: D, the width that the learners share; None: any.

    Returns:
        `params`: the parameters of the network without those that only training needs, such as a loss's;
        `trained_params`: those of them that are trained; `flops`: multiply-adds of its convolutions and matrix
        products (one multiply-add = 1 flop, as in ABE's Table 1).

    Raises:
        UserError: the image is too small for the network, or does not fit into memory, or the embedding has another
            width. An error that arises in the user's own code passes.
    """
    training = method.training
    images = torch.zeros(1, 3, image_size, image_size, device=method.device)
    with enough_memory(), torch.inference_mode(), counted() as counter:
        try:
            embedding = method.eval().embed(images)
        except RuntimeError as error:  # torch raises it for a feature map that has shrunk to nothing
            if OUT_OF_MEMORY.search(str(error)) or own_code(error):
                raise
            raise UserError(
                f"image_size={image_size} does not fit the network ({_first_line(error)}): choose a larger one."
            ) from error
    method.train(training)
    if embedding.ndim != 3 or (dim is not None and embedding.shape[2] != dim // embedding.shape[1]):
        raise UserError(
            f"the embedding of an image has the shape {list(embedding.shape[1:])} (learners, width): a head has to "
            "return [B,d], with the d that it is given."
        )
    left_out = {id(p) for module in method.training_only() for p in module.parameters()}
    sizes = [(p.numel(), p.requires_grad) for p in method.parameters() if id(p) not in left_out]
    params, trained = sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)
    return {"params": params, "trained_params": trained, "flops": counter.get_total_flops() // 2}
