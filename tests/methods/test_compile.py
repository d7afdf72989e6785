"""`trainer.compile=true`: one graph without a break for every method, and trainings that are those without it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from dml.errors import UserError
from dml.methods.base import Method
from dml.training import run as train
from dml.training.compiling import compile_steps
from tests.components import but_exhaustive, components, on_transformers
from tests.conftest import TINY

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own compiler
]

Configure = Callable[..., DictConfig]
MethodOf = Callable[..., Method]

# What else changes the way through a network.
OPTIONS = [
    ["method=abe", "method.checkpointing=true"],
    ["method=abe", "method.checkpointing=true", "backbone.batch_norm=running"],
    ["method=deml", "method.checkpointing=true", "method.channel_attention=false", "method.shared_head=false"],
    ["method=diablo", "method.attention=post", "method.selection=feature", "method.checkpointing=true"],
    ["method=baseline", "backbone.train=none"],
    ["method=gsp", "head.solver=fixed_point"],
    ["method=gsp", "head.mu=1"],
    ["method=gsp", "head.then=gemean"],
]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step_of(method: Method, learners: Callable[[Tensor], Any], side: int = 32) -> dict[str, Tensor | None]:
    """What two steps leave: outputs, gradients, buffers."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(2):
        method.zero_grad()
        output = learners(method.normalized(torch.rand(4, 3, side, side, generator=draw)))
        if output.raw.requires_grad:
            (output.embeddings * torch.linspace(-1, 1, output.raw.shape[-1])).sum().backward()
    left: dict[str, Tensor | None] = {"raw": output.raw.detach(), **output.auxiliary, **dict(method.named_buffers())}
    return left | {f"gradient of {name}": parameter.grad for name, parameter in method.named_parameters()}


def assert_one_graph(method_of: MethodOf, *options: str, backend: str = "eager", side: int = 32) -> None:
    method = method_of(*options)
    expected = step_of(method, method.learners, side)
    method = method_of(*options)
    found = step_of(method, torch.compile(method.learners, fullgraph=True, dynamic=False, backend=backend), side)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", but_exhaustive("method", "abe", "deml", "gsp", "mheads_att", "mtails"))
def test_a_method_is_one_graph(method_of: MethodOf, name: str) -> None:
    assert_one_graph(method_of, f"method={name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", but_exhaustive("head", *(name for name in components("head") if name != "cls_avg")))
def test_a_head_is_one_graph(method_of: MethodOf, name: str) -> None:
    """One that sees both the class token and the map is tried always."""
    assert_one_graph(method_of, "method=baseline", f"head={name}", "loss=abe_contrastive", *on_transformers(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [*([f"method={name}"] for name in components("method")), *OPTIONS], ids=" ".join)
def test_gradients_of_a_graph(method_of: MethodOf, options: list[str]) -> None:
    """Forward and backward pass as graphs."""
    assert_one_graph(method_of, *options, backend="aot_eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", components("backbone"))
def test_a_backbone_is_one_graph(method_of: MethodOf, name: str) -> None:
    side = 28 if name.startswith("dinov2") else 32  # its patches have 14 pixels
    assert_one_graph(method_of, "method=baseline", f"backbone={name}", "backbone.weights=none", side=side)


def test_a_break_is_an_error(method_of: MethodOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    method = method_of("method=baseline")
    forward = method.head.forward

    def broken(features: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return forward(features)

    monkeypatch.setattr(method.head, "forward", broken)
    compiled = torch.compile(method.learners, fullgraph=True, dynamic=False, backend="eager")
    with pytest.raises(Exception, match="graph_break"):
        compiled(method.normalized(torch.rand(2, 3, 32, 32)))


def with_eager_backend(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has everything compiled without code being made. Returns batch sizes of the calls of what was compiled."""
    made, called = torch.compile, []

    def compiled(function: Callable[[Tensor], Any], *, options: dict[str, Any], **how: Any) -> Callable[[Tensor], Any]:
        inner = made(function, backend="eager", **how)

        def call(values: Tensor) -> Any:
            if values.dim() == 4:
                called.append(len(values))
            return inner(values)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    return called


def trained(configure: Configure, folder: Path, *options: str) -> dict[str, Any]:
    chosen = [*TINY, "trainer.max_steps=4", "protocol.every=2", f"paths.output_dir={folder}", *options]
    train.run(configure(*chosen), chosen)
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def assert_same_training(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["state_dict"].keys() == other["state_dict"].keys()
    torch.testing.assert_close(one["state_dict"], other["state_dict"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_steps_alone_are_compiled(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation is not, whose last batch is smaller; checkpoints are the same."""
    plain = trained(configure, tmp_path / "plain")
    called = with_eager_backend(monkeypatch)
    assert_same_training(trained(configure, tmp_path / "compiled", "trainer.compile=true"), plain)
    assert called == [16] * 4


@pytest.mark.slow
def test_what_counts_its_steps_waits(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prototypes that are still to come are counted on the host."""
    monkeypatch.setattr("dml.models.gsp.SEEDS", 40)
    options = ["method=gsp", "head.init=kcenter", "head.m=8"]
    plain = trained(configure, tmp_path / "plain", *options)
    called = with_eager_backend(monkeypatch)
    assert_same_training(trained(configure, tmp_path / "compiled", *options, "trainer.compile=true"), plain)
    assert called == [16]  # of four: there are prototypes after three batches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["+trainer.detect_anomaly=true"], r"detect_anomaly looks at single operators"),
        (["trainer.compile=maybe"], r"trainer\.compile=maybe"),
    ],
)
def test_what_it_does_not_go_with(configure: Configure, options: list[str], message: str) -> None:
    chosen = [*TINY, *options]
    with pytest.raises(UserError, match=message):
        train.run(configure(*chosen, *([] if "compile" in options[0] else ["trainer.compile=true"])), chosen)
    assert not Path(configure().paths.output_dir).exists()


def test_without_a_compiler(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/nowhere/g++"))
    chosen = [*TINY, "trainer.compile=true"]
    with (
        torch.compiler.config.patch(force_disable_caches=True),  # type: ignore[attr-defined]  # monkeypatch would leave it
        pytest.raises(UserError, match=r"trainer\.compile=true needs a C\+\+ compiler.*leave trainer\.compile out"),
    ):
        train.run(configure(*chosen), chosen)
    assert not Path(configure().paths.output_dir).exists()


def test_batch_norm_of_several_devices(method_of: MethodOf) -> None:
    """With a stand-in for the trainer: such batch norm runs on GPUs alone."""

    strategy = SimpleNamespace(root_device=torch.device("cuda"))
    trainer: Any = SimpleNamespace(world_size=2, _detect_anomaly=False, strategy=strategy)
    method = torch.nn.SyncBatchNorm.convert_sync_batchnorm(method_of("method=baseline")).train()
    with pytest.raises(UserError, match=r"freeze its statistics with backbone\.batch_norm=running"):
        compile_steps(method, trainer)


@pytest.mark.parametrize("name", ["abe", "gsp", "deml"])
@pytest.mark.parametrize(
    "accelerator", [pytest.param("cpu", marks=pytest.mark.exhaustive), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def test_a_training_by_inductor(configure: Configure, tmp_path: Path, name: str, accelerator: str) -> None:
    """In double precision: in single a rounded maximum or hinge is another gradient, and Adam goes by its sign."""
    options = [f"method={name}", "trainer.precision=64-true", f"trainer.accelerator={accelerator}"]
    plain = trained(configure, tmp_path / "plain", *options)
    assert_same_training(trained(configure, tmp_path / "compiled", *options, "trainer.compile=true"), plain)
