"""Steps of every method, loss, miner and head on a pretended device: nothing stays behind on the host.

The device computes on the CPU (see `tests/pretended.py`), so figures are those of the CPU.
"""

from collections.abc import Callable

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from dml.methods.base import Method
from dml.methods.gsp import GSP
from dml.training.build import build
from tests.components import components
from tests.conftest import TINY, loss_of
from tests.pretended import pretended

pytestmark = pytest.mark.usefixtures("one_thread")

MethodOf = Callable[..., Method]
STEPS = 2


def course(method_of: MethodOf, device: str, *options: str) -> list[Tensor]:
    """The loss of each of some steps, and the embeddings of other images, on the CPU."""
    method = method_of(*options, "optimizer=sgd", "lr=1e-4").to(device)
    optimizer, draw, found = method.optimizer_alone(), torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        torch.manual_seed(step)
        images, labels = torch.rand(10, 3, 32, 32, generator=draw), torch.arange(5).repeat(2)
        value = loss_of(method, images.to(device), labels.to(device))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(value.detach().cpu())
    with torch.no_grad():
        embeddings = method.eval().embed(torch.rand(4, 3, 32, 32, generator=draw).to(device))
    assert {x.device.type for x in (embeddings, *method.parameters(), *method.buffers())} == {device}
    return [*found, embeddings.cpu()]


def assert_at_home(method_of: MethodOf, *options: str) -> None:
    expected = course(method_of, "cpu", *options)
    with pretended(indices=True):
        found = course(method_of, "meta", *options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", components("method"))
def test_a_method(method_of: MethodOf, name: str) -> None:
    assert_at_home(method_of, f"method={name}")


@pytest.mark.parametrize("name", components("loss"))
def test_a_loss(method_of: MethodOf, name: str) -> None:
    assert_at_home(method_of, "method=baseline", f"loss={name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", components("miner"))
def test_a_miner(method_of: MethodOf, name: str) -> None:
    assert_at_home(method_of, "method=baseline", "loss=triplet", f"miner={name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in components("head") if not name.startswith("cls")])
def test_a_head(method_of: MethodOf, name: str) -> None:
    """Not those of the class token, whose maps are tensors of a class of their own."""
    assert_at_home(method_of, "method=baseline", f"head={name}", "loss=abe_contrastive")


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


@pytest.mark.parametrize("name", ["abe", "mheads_att", "deml", "diablo", "gsp"])
def test_plots(configure: Callable[..., DictConfig], name: str) -> None:
    parts = build(configure(*TINY, f"method={name}"))
    images = parts.data.test_images(parts.data.query_rows[:4])
    with pretended(), torch.no_grad():
        assert parts.method.to("meta").eval().plots(images.to("meta"), parts.data, [])


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
