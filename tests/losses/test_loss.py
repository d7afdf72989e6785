"""The call form: float32 under mixed precision, parameters that are trained, a memory that survives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss, CrossBatchMemory
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner
from torch import nn
from torch.nn import functional as F

from dml.errors import UserError
from dml.losses import Loss, functional, pairwise, ranking


def unit(n: int, d: int = 8, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=-1)


def memory(size: int) -> Loss:
    return Loss(CrossBatchMemory(ContrastiveLoss(), embedding_size=8, memory_size=size))


class Recorder(nn.Module):
    """Keeps the dtype that it was given and that a product inside it has."""

    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.dtypes = embeddings.dtype, (embeddings @ embeddings.T).dtype
        return embeddings.sum()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda each: each, r"a tensor of shape \[4\]"),
        (lambda each: each[:, None] * each, r"a tensor of shape \[4, 4\]"),
        (lambda each: {"mine": each.mean(), "all": each}, r"a tensor of shape \[4\]"),
        (lambda each: {}, "no terms"),
        (lambda each: None, "NoneType"),
        (lambda each: 0.5, "float"),
        (lambda each: (each.mean(), each.mean()), "tuple"),
    ],
)
def test_a_loss_that_is_no_scalar_is_told(returned: Callable[[torch.Tensor], Any], said: str) -> None:
    class Mine(nn.Module):
        def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> Any:
            return returned(embeddings.sum(1))

    with pytest.raises(UserError, match=rf"^loss=Mine returns {said}: it has to return a scalar, or named scalars\."):
        Loss(Mine())(unit(4), torch.tensor([0, 0, 1, 1]))


def test_a_loss_gets_what_is_mined_by_the_name_of_its_parameter() -> None:
    """Wherever the parameter stands among the others, and whether or not it has a default."""

    class After(nn.Module):
        def forward(self, embeddings: torch.Tensor, labels: torch.Tensor, norms: torch.Tensor, pairs: Any) -> Any:
            return norms.sum() + len(pairs)

    class Keyword(nn.Module):
        def forward(self, embeddings: torch.Tensor, labels: torch.Tensor, *, indices_tuple: Any = None) -> Any:
            return embeddings.sum() * 0 + (0 if indices_tuple is None else len(indices_tuple))

    labels, norms = torch.tensor([0, 0, 1, 1]), torch.ones(4)
    assert Loss(After(), TripletMarginMiner())(unit(4), labels, norms=norms) == 4 + 3
    assert Loss(Keyword(), MultiSimilarityMiner())(unit(4), labels, norms=norms) == 4
    assert Loss(Keyword())(unit(4), labels) == 0
    with pytest.raises(UserError, match=r"^loss=After needs a miner: choose one, such as miner=multi_similarity\."):
        Loss(After())


OF_FUNCTIONS: list[tuple[type[nn.Module], Callable[..., torch.Tensor], dict[str, Any]]] = [
    (pairwise.SquaredContrastive, functional.contrastive, {"margin": 1.7}),
    (pairwise.CosineContrastive, functional.cosine_contrastive, {"margin": 0.2}),
    (pairwise.BinomialDeviance, functional.binomial_deviance, {"alpha": 3.0, "beta": 0.2, "gamma": 7.0}),
    (pairwise.Instance, functional.instance, {"gamma": 5.0}),
    (
        pairwise.RankedList,
        functional.ranked_list,
        {"alpha": 1.1, "margin": 0.3, "temperatures": (2.0, 5.0), "imbalance": 0.3},
    ),
    (ranking.SmoothAP, ranking.smooth_ap, {"temperature": 0.2}),
    (ranking.RecallAtK, ranking.recall_at_k, {"ks": (1, 3), "temperature": 0.2, "temperature_k": 0.7}),
]


@pytest.mark.parametrize(("module", "function", "options"), OF_FUNCTIONS)
def test_options_reach_the_function(
    module: type[nn.Module], function: Callable[..., torch.Tensor], options: dict[str, Any]
) -> None:
    """Each by its name, and each matters."""
    embeddings, labels = unit(12), torch.arange(4).repeat_interleave(3)
    expected = function(embeddings, labels, **options)
    torch.testing.assert_close(module(**options)(embeddings, labels), expected)
    for name in options:
        others = {key: value for key, value in options.items() if key != name}
        assert not torch.allclose(function(embeddings, labels, **others), expected, rtol=1e-4), name


def test_options_reach_multi_similarity() -> None:
    embeddings, labels = unit(12), torch.arange(4).repeat_interleave(3)
    positive, negative = functional.all_pairs(labels)
    expected = functional.multi_similarity(embeddings, positive, negative, 3.0, 11.0, 0.2)
    torch.testing.assert_close(pairwise.MultiSimilarity(alpha=3.0, beta=11.0, base=0.2)(embeddings, labels), expected)


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
