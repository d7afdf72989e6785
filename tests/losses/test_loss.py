"""The call form: float32 under mixed precision, parameters that are trained, a memory that survives."""

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss, CrossBatchMemory
from torch import nn
from torch.nn import functional as F

from dml.errors import UserError
from dml.losses import Loss


def unit(n: int, d: int = 8, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=-1)


def memory(size: int) -> Loss:
    return Loss(CrossBatchMemory(ContrastiveLoss(), embedding_size=8, memory_size=size))


class Recorder(nn.Module):
    """Keeps the dtype that it was given and that a product inside it has."""

    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.dtypes = embeddings.dtype, (embeddings @ embeddings.T).dtype
        return embeddings.sum()


def test_runs_in_float32_under_autocast() -> None:
    recorder = Recorder()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Loss(recorder)(unit(4).bfloat16(), torch.arange(4))
    assert recorder.dtypes == (torch.float32, torch.float32)


def test_memory_survives_a_checkpoint() -> None:
    labels = torch.arange(4) % 2
    written = memory(12)
    for seed in range(4):  # past the end: the oldest entries are overwritten
        written(unit(4, seed=seed), labels)
    read = memory(12)
    read.load_state_dict(written.state_dict())
    batch = unit(4, seed=9)
    assert written(batch, labels).item() == read(batch, labels).item()
    assert torch.equal(written.loss.embedding_memory, read.loss.embedding_memory)


def test_memory_smaller_than_the_batch_is_told() -> None:
    with pytest.raises(UserError, match=r"holds 3 embeddings but a batch has 4: set loss\.loss\.memory_size"):
        memory(3)(unit(4), torch.arange(4))


def test_a_memory_that_waits() -> None:
    """GSP section 1.6.7: the loss of the batch alone at first; how long is in the checkpoint."""
    torch.manual_seed(0)
    waiting = Loss(CrossBatchMemory(ContrastiveLoss(), embedding_size=8, memory_size=40), memory_from=2)
    batches = [F.normalize(torch.randn(10, 8), dim=1) for _ in range(4)]
    labels = torch.arange(5).repeat(2)
    for batch in batches[:2]:
        torch.testing.assert_close(waiting(batch, labels), ContrastiveLoss()(batch, labels))
        again = memory(40)
        again.memory_from = 2
        again.load_state_dict(waiting.state_dict())
        assert again.batches == waiting.batches
    fresh = memory(40)
    for batch in batches[2:]:
        torch.testing.assert_close(waiting(batch, labels), fresh(batch, labels))
    with pytest.raises(UserError, match=r"loss\.memory_from=3"):
        Loss(ContrastiveLoss(), memory_from=3)
    with pytest.raises(UserError, match=r"loss\.add_batch=true needs a loss with a memory"):
        Loss(ContrastiveLoss(), add_batch=True)
