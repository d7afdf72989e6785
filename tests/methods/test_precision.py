"""Steps of every method in bfloat16, on a GPU and compiled, against those in float32 on the CPU; runs on a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from dml.configuration.composition import composed
from dml.errors import UserError
from dml.methods.base import Method
from dml.training import run as train
from dml.training.trainer import trainer_of
from tests.components import components
from tests.conftest import TINY, loss_of

pytestmark = pytest.mark.usefixtures("one_thread")

MethodOf = Callable[..., Method]
Configure = Callable[..., DictConfig]

STEPS = 3
HALF = 0.02  # of bfloat16, of a loss and of an embedding's unit length: its numbers have 8 bits, one in 256
MOVED = 0.05  # of a loss of DeML: the second scale sees a box that rounding can move by some pixels


def course(method_of: MethodOf, name: str, device: str, *, half: bool = False, compiled: bool = False) -> list[Tensor]:
    """The loss of each of some steps, then the embeddings of other images `[4,L,d]`."""
    loss = ["loss=abe_contrastive"] if name == "dces" else []  # its own draws from the device's generator
    method = method_of(f"method={name}", *loss, "optimizer=sgd", "optimizer.momentum=0", "lr=1e-4").to(device)
    if compiled:
        torch._dynamo.reset()
        method.compiled_learners = torch.compile(method.learners, fullgraph=True, dynamic=False)
    optimizer, draw, losses = method.optimizer_alone(), torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        torch.manual_seed(step)
        images, labels = torch.rand(10, 3, 32, 32, generator=draw), torch.arange(5).repeat(2)
        with torch.autocast(device, torch.bfloat16, enabled=half):
            value = loss_of(method, images.to(device), labels.to(device))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.detach().cpu())
    with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=half):
        embeddings = method.eval().embed(torch.rand(4, 3, 32, 32, generator=draw).to(device)).cpu()
    # Not those of DeML's second scale, as with MOVED.
    return [*losses, embeddings[:, next(iter(method.groups().values()), slice(None))]]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float, of_losses: float | None = None) -> None:
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        assert torch.isfinite(one)
        assert abs(one - other) <= (of_losses or tolerance) * max(1, abs(other))
    assert found[-1].dtype == torch.float32
    torch.testing.assert_close(torch.linalg.vector_norm(found[-1], dim=-1), torch.ones(found[-1].shape[:2]))
    assert torch.linalg.vector_norm(found[-1] - expected[-1], dim=-1).max() <= tolerance


@pytest.mark.parametrize("name", components("method"))
def test_bfloat16(method_of: MethodOf, name: str) -> None:
    found, expected = course(method_of, name, "cpu", half=True), course(method_of, name, "cpu")
    assert_close(found, expected, HALF, MOVED if name == "deml" else HALF)


@pytest.fixture
def no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", components("method"))
@pytest.mark.parametrize(
    ("how", "tolerance"), [({}, 1e-4), ({"half": True}, HALF), ({"compiled": True}, 1e-4)], ids=str
)
@pytest.mark.usefixtures("no_tf32")
def test_a_gpu(method_of: MethodOf, name: str, how: dict[str, bool], tolerance: float) -> None:
    assert_close(course(method_of, name, "cuda", **how), course(method_of, name, "cpu"), tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["abe", "gsp"])
def test_compiled(method_of: MethodOf, name: str) -> None:
    assert_close(course(method_of, name, "cpu", compiled=True), course(method_of, name, "cpu"), 1e-4)


RESUMED = [
    ["method=baseline"],
    ["method=abe"],
    ["method=dces", "method.T=100", "method.total_steps=6"],
    ["method=deml"],
    ["method=gsp"],
    ["method=gsp", "trainer.precision=bf16-mixed"],
]


def assert_resumed_exactly(configure: Configure, folder: Path, accelerator: str, options: list[str]) -> None:
    def state(name: str, *ends: int) -> Any:
        for steps in ends:
            chosen = [*TINY, *options, "trainer.deterministic=true", f"trainer.accelerator={accelerator}"]
            chosen += ["protocol.every=3", f"paths.output_dir={folder / name}", f"trainer.max_steps={steps}"]
            train.run(configure(*chosen), chosen)
        return torch.load(folder / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]

    torch.testing.assert_close(state("resumed", 3, 6), state("at once", 6), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", RESUMED, ids=" ".join)
def test_a_resumed_run_is_exact_on_a_gpu(configure: Configure, tmp_path: Path, options: list[str]) -> None:
    assert_resumed_exactly(configure, tmp_path, "gpu", options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", RESUMED, ids=" ".join)
def test_a_resumed_run_is_exact(configure: Configure, tmp_path: Path, options: list[str]) -> None:
    assert_resumed_exactly(configure, tmp_path, "cpu", options)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_bfloat16_needs_a_gpu_that_has_it(
    configure: Configure, method_of: MethodOf, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """A stand-in for the GPU."""
    monkeypatch.setattr("dml.training.trainer.device_of", lambda trainer: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Turing")
    config = configure(*TINY, "trainer.precision=bf16-mixed")
    if capability >= (8, 0):
        trainer_of(config, method_of("method=baseline"), [])
        return
    with pytest.raises(UserError, match=r"bf16-mixed: Turing \(compute capability 7\.5\).*16-mixed or 32-true"):
        trainer_of(config, method_of("method=baseline"), [])


@pytest.mark.parametrize(("word", "rounds"), [("highest", False), ("high", True), ("medium", True)])
def test_matmul_is_of_convolutions_too(
    method_of: MethodOf, monkeypatch: pytest.MonkeyPatch, word: str, rounds: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not rounds)
    before = torch.get_float32_matmul_precision()
    try:
        trainer_of(composed(*TINY, f"trainer.matmul={word}"), method_of("method=baseline"), [])
        assert torch.backends.cudnn.allow_tf32 == rounds
        assert torch.get_float32_matmul_precision() == word
    finally:
        torch.set_float32_matmul_precision(before)
