"""A training step reads nothing back from the device, for which it would have to wait.

Counted on the CPU: a read is a tensor that becomes a number or an array, or numbers that become a tensor, or an
operator whose output's size depends on values, over one whole step of Lightning's and of all callbacks, which neither
logs nor saves.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from pytorch_lightning.callbacks import Callback
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dml.methods.base import Method
from dml.runs.folder import RunFolder
from dml.training.run import fit, prepare_run
from tests.components import components, on_transformers
from tests.conftest import TINY, loss_of

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = 3  # there was a gradient before

# Of a step of each method with its own loss. A method or a loss that is not here reads nothing, and none may read more.
METHODS = {
    "dces": 5,  # its loss, margin
    "gsp": 6,  # its loss, contrastive
}
LOSSES = {
    "angular": 2,
    "arcface": 2,
    "circle": 15,
    "contrastive": 6,
    "cosface": 2,
    "dces/triplet": 6,
    "diablo/triplet": 3,
    "lifted_structure": 2,
    "margin": 5,
    "npairs": 6,
    "nt_xent": 2,
    "proxy_anchor": 5,
    "proxy_nca": 4,
    "recall_at_k": 1,
    "smooth_ap": 1,
    "subcenter_arcface": 2,
    "supcon": 7,
    "triplet": 6,
    "tuplet_margin": 2,
    "xbm": 13,
}

# Operators that cannot do without values, as torch.ops.aten names them; and those that are given a mask.
READS = {
    "_local_scalar_dense",
    "_linalg_check_errors",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}
# On the CPU these call no operator. What they bring to a device is waited for as well: such a copy ends before they do.
TO_HOST = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist}
TO_DEVICE = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy}

ON_HOST = ("torch/utils/data/", "dml/data/datamodule.py")  # images are made there, and a batch is there at first


class Reads(TorchDispatchMode):
    """Counts reads, by the line of code that asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> Any:
        self.to_host = _ToHost(self)
        self.to_host.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.to_host.__exit__(*raised)

    def note(self, name: str) -> None:
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
        if not any(part in place for place in places for part in ON_HOST):
            asking = [place for place in places if "/torch/" not in place and __file__ not in place]
            self.found.append(f"{name} at {asking[-1]}")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name in BY_MASK and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        by_mask = by_mask and (len(args) < 3 or args[2].ndim > 0)  # one number is filled in, which waits for nothing
        if name in READS or by_mask:
            self.note(name)
        return function(*args, **(kwargs or {}))


class _ToHost(TorchFunctionMode):
    """Has `Reads` count what calls no operator."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_list = function is torch.Tensor.__getitem__ and any(
            isinstance(i, list | np.ndarray) for i in _places(args[1])
        )
        if function in TO_HOST | TO_DEVICE or by_list:
            self.reads.note(function.__name__)
        return function(*args, **(kwargs or {}))


def _places(at: Any) -> tuple[Any, ...]:
    return at if isinstance(at, tuple) else (at,)


class Stop(Exception):
    """Ends a training."""


class OneStep(Callback):
    """Counts from the beginning of a step to that of the next one, and ends the training there."""

    def __init__(self) -> None:
        self.reads = Reads()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEP - 1:
            self.reads.__enter__()
        elif trainer.global_step == STEP:
            self.reads.__exit__(None, None, None)
            raise Stop


@pytest.mark.slow
@pytest.mark.parametrize("name", components("method"))
def test_a_whole_step(configure: Callable[..., DictConfig], tmp_path: Path, name: str) -> None:
    found = reads_of_a_step(configure, tmp_path, f"method={name}")
    assert len(found) == METHODS.get(name, 0), "\n".join(found)


@pytest.mark.slow
def test_a_step_that_remembers_embeddings(configure: Callable[..., DictConfig], tmp_path: Path) -> None:
    found = reads_of_a_step(
        configure, tmp_path, "method=dces", "method.assignments_from=running", "loss=abe_contrastive"
    )
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_a_step_with_what_the_trainer_adds(configure: Callable[..., DictConfig], tmp_path: Path) -> None:
    options = ["trainer.gradient_clip_val=1", "trainer.precision=bf16-mixed", "scheduler=plateau"]
    found = reads_of_a_step(configure, tmp_path, "method=abe", *options)
    assert not found, "\n".join(found)


def reads_of_a_step(configure: Callable[..., DictConfig], tmp_path: Path, *options: str) -> list[str]:
    config = configure(
        *TINY,
        *options,
        "protocol.every=1000",
        "protocol.clustering=false",
        "trainer.max_steps=1000",
        "trainer.checkpoint_every=1000",
        "trainer.log_every=1000",
        "optimizer=sgd",  # Adam counts its steps on the host
    )
    folder, one_step = RunFolder(tmp_path), OneStep()
    parts, trainer = prepare_run(config, folder)
    trainer.callbacks.insert(0, one_step)  # type: ignore[attr-defined]
    with pytest.raises(Stop):
        fit(config, folder, parts, trainer)
    return one_step.reads.found


@pytest.mark.parametrize("name", components("head"))
def test_a_head(method_of: Callable[..., Method], name: str) -> None:
    method = method_of("method=baseline", f"head={name}", "loss=abe_contrastive", *on_transformers(name))
    with Reads() as reads:
        loss_of(method, torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)).backward()
    assert not reads.found, "\n".join(reads.found)


@pytest.mark.parametrize("name", components("loss"))
def test_a_loss(method_of: Callable[..., Method], name: str) -> None:
    method = method_of("method=baseline", f"loss={name}")
    images, labels = torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)
    loss_of(method, images, labels).backward()
    with Reads() as reads:
        loss_of(method, images, labels).backward()
    assert len(reads.found) == LOSSES.get(name, 0), "\n".join(reads.found)


def test_reads_are_counted() -> None:
    values = torch.rand(4, requires_grad=True)
    for reads_once in (
        lambda: values.sum().item(),
        lambda: bool(values.any()),
        lambda: values[values > 0.5],
        lambda: (values > 0.5).nonzero(),
        lambda: values.detach().numpy(),
        lambda: values.tolist(),
        lambda: values.detach().long().unique(),
        lambda: values[[0, 2]],
        lambda: torch.tensor([1, 2], device="cpu"),
    ):
        with Reads() as reads:
            reads_once()
        assert len(reads.found) == 1
    chosen = values[values > 0.5].sum()
    with Reads() as reads:
        chosen.backward()
        torch.where(values > 0.5, values, 0).sum().backward()
    assert len(reads.found) == 1
