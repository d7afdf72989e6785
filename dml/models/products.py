"""How a GPU rounds the factors of float32 products and convolutions: `trainer.matmul`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_products(matmul: str) -> None:
    """Sets it for the process: `highest` (float32), `high` (TF32) or `medium` (bfloat16 for products)."""
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul != "highest"  # torch allows TF32 unless it is told


@contextmanager
def products(matmul: str) -> Iterator[None]:
    """Sets it meanwhile; see `set_products`."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_products(matmul)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
