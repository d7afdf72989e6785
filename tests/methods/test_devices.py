"""Steps of every method, loss, miner and head on a pretended device: nothing stays behind on the host, nothing is used
that `trainer.deterministic=true` forbids on a GPU, and CUDA's autocast leaves no operator two types that it refuses.

The device computes on the CPU (see `tests/pretended.py`), so figures are those of the CPU.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from dml.methods.base import Method
from dml.methods.gsp import GSP
from dml.training.build import build
from tests.components import components, on_transformers
from tests.conftest import TINY, loss_of
from tests.pretended import pretended

pytestmark = pytest.mark.usefixtures("one_thread")

MethodOf = Callable[..., Method]
STEPS = 2
BACKBONES = [name for name in components("backbone") if not name.startswith(("small", "timm"))]
POSITIONS = ("clip", "deit", "dinov2", "vit")  # learned, and resized here: nothing that can be deterministic on CUDA


def course(method: Method, device: str, side: int) -> list[Tensor]:
    """The loss of each of some steps, and the embeddings of other images, on the CPU."""
    method = method.to(device)
    optimizer, draw, found = method.optimizer_alone(), torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        torch.manual_seed(step)
        images, labels = torch.rand(10, 3, side, side, generator=draw), torch.arange(5).repeat(2)
        value = loss_of(method, images.to(device), labels.to(device))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(value.detach().cpu())
    with torch.no_grad():
        embeddings = method.eval().embed(torch.rand(4, 3, side, side, generator=draw).to(device))
    assert {x.device.type for x in (embeddings, *method.parameters(), *method.buffers())} == {device}
    return [*found, embeddings.cpu()]


def assert_at_home(
    method_of: MethodOf, *options: str, tolerance: float = 1e-5, deterministic: bool = True, side: int = 32
) -> None:
    plain = ("optimizer=sgd", "lr=1e-4")
    expected, method = course(method_of(*options, *plain), "cpu", side), method_of(*options, *plain)
    with pretended(indices=True, deterministic=deterministic):
        found = course(method, "meta", side)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", components("method"))
def test_a_method(method_of: MethodOf, name: str) -> None:
    assert_at_home(method_of, f"method={name}")


@pytest.mark.parametrize("name", components("loss"))
def test_a_loss(method_of: MethodOf, name: str) -> None:
    assert_at_home(method_of, "method=baseline", f"loss={name}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", components("miner"))
def test_a_miner(method_of: MethodOf, name: str) -> None:
    assert_at_home(method_of, "method=baseline", "loss=triplet", f"miner={name}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", components("head"))
def test_a_head(method_of: MethodOf, name: str) -> None:
    options = ["method=baseline", f"head={name}", "loss=abe_contrastive", *on_transformers(name)]
    assert_at_home(method_of, *options, deterministic=not name.startswith("cls"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone(method_of: MethodOf, name: str) -> None:
    """With one cell per image, whose batch norm makes rounding errors larger."""
    options = ["method=baseline", f"backbone={name}", "backbone.weights=none", "loss=abe_contrastive"]
    side = 28 if name.startswith("dinov2") else 32  # its patches have 14 pixels
    assert_at_home(method_of, *options, tolerance=0.01, deterministic=not name.startswith(POSITIONS), side=side)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("method=dces", "method.assignments_from=running", "loss=abe_contrastive"),
        ("method=deml", "method.balance=false"),
        ("method=gsp", "head.solver=fixed_point", "head.iterations=10"),
    ],
    ids=" ".join,
)
def test_options(method_of: MethodOf, options: tuple[str, ...]) -> None:
    assert_at_home(method_of, *options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["abe", "mheads_att", "deml", "diablo", "gsp"])
def test_plots(configure: Callable[..., DictConfig], name: str) -> None:
    parts = build(configure(*TINY, f"method={name}"))
    images = parts.data.test_images(parts.data.query_rows[:4])
    with pretended(), torch.no_grad():
        assert parts.method.to("meta").eval().plots(images.to("meta"), parts.data, [])


def forward(method: Method, device: str, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and the embeddings of other images, on the CPU."""
    method, draw = method.to(device), torch.Generator().manual_seed(0)
    images, labels = torch.rand(10, 3, 32, 32, generator=draw), torch.arange(5).repeat(2)
    mixed = functools.partial(torch.autocast, device, dtype or torch.bfloat16, enabled=dtype is not None)
    torch.manual_seed(0)
    with mixed():
        loss = loss_of(method, images.to(device), labels.to(device))
    with mixed(), torch.no_grad():
        embeddings = method.eval().embed(torch.rand(4, 3, 32, 32, generator=draw).to(device))
    return loss.detach().cpu(), embeddings.cpu()


def assert_mixes(method_of: MethodOf, *options: str) -> None:
    """A forward pass with CUDA's own autocast: which operators round is not the same as on the CPU."""
    loss, embeddings = forward(method_of(*options), "cpu", None)
    for dtype in (torch.bfloat16, torch.float16):
        method = method_of(*options)
        with pretended("cuda", indices=True):
            rounded, found = forward(method, "cuda", dtype)
        assert found.dtype == rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, loss, rtol=0.06, atol=0.01)
        assert torch.linalg.vector_norm(found - embeddings, dim=-1).max() <= (0.03 if dtype == torch.bfloat16 else 0.01)


@pytest.mark.parametrize("name", components("method"))
def test_a_method_in_mixed_precision(method_of: MethodOf, name: str) -> None:
    balance = ["method.balance=false"] if name in ("abe", "deml") else []  # it needs gradients
    assert_mixes(method_of, f"method={name}", *balance)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", components("loss"))
def test_a_loss_in_mixed_precision(method_of: MethodOf, name: str) -> None:
    assert_mixes(method_of, "method=baseline", f"loss={name}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", components("head"))
def test_a_head_in_mixed_precision(method_of: MethodOf, name: str) -> None:
    assert_mixes(method_of, "method=baseline", f"head={name}", "loss=abe_contrastive", *on_transformers(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", components("method"))
def test_a_method_on_a_transformer(method_of: MethodOf, name: str) -> None:
    """Whose maps carry tokens along."""
    options = [f"method={name}", *on_transformers("cls")]
    assert_at_home(method_of, *options, deterministic=False)
    assert_mixes(method_of, *options, *(["method.balance=false"] if name in ("abe", "deml") else []))


def test_cudas_autocast_is_at_work() -> None:
    """It gives float32 from softmax, as the CPU's does not."""
    layer, images = torch.nn.Linear(4, 4), torch.rand(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(images).softmax(-1).dtype == torch.bfloat16
    with pretended("cuda"), torch.autocast("cuda", torch.bfloat16):
        found = layer.to("cuda")(images.to("cuda"))
        weights = found.softmax(-1)
        assert (found.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
        with pytest.raises(RuntimeError, match="dtype"):
            found[torch.tensor([0], device="cuda")] = weights[:1]


def test_what_is_not_deterministic_is_seen() -> None:
    features = torch.rand(2, 3, 4, 4, requires_grad=True)
    with pretended(), pytest.raises(AssertionError, match="adaptive_max_pool2d_backward is not deterministic"):
        torch.nn.functional.adaptive_max_pool2d(features.to("meta"), 1).sum().backward()


def test_what_stays_behind_is_seen(method_of: MethodOf) -> None:
    images, labels = torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)
    with pretended(indices=True):
        method = method_of("method=gsp").to("meta")
        with pytest.raises(AssertionError, match="mixes devices"):
            loss_of(method, images, labels)
        assert isinstance(method, GSP)
        method.head.pooling.prototypes = torch.nn.Parameter(method.head.pooling.prototypes.detach().cpu())
        with pytest.raises(AssertionError, match="mixes devices"):
            loss_of(method, images.to("meta"), labels.to("meta"))
