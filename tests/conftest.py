"""Fixtures that several test files share."""

import importlib
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from dml.bench.ranks import of_ranks
from dml.configuration.composition import composed
from dml.configuration.options import check
from dml.methods.base import Method, Output
from dml.training.build import build_method
from tests.runs import untrained_run

# Small enough for seconds, large enough that every part has something to do.
TINY = [
    "dataset=glyphs",
    "dataset.classes=24",
    "dataset.images_per_class=6",
    "dataset.size=32",
    "image_size=32",
    "head.dim=16",
    "method=baseline",
    "sampler.batch_size=16",
    "protocol.every=5",
    "trainer.max_steps=10",
    "trainer.checkpoint_every=5",
    "trainer.num_workers=0",
    "trainer.log_every=1",
    "trainer.accelerator=cpu",
    "report=false",  # its pictures take longer than the training
]


def objective_of(method: Method, embeddings: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The terms of a batch whose embeddings `[B,L,d]` are given."""
    return method.objective(
        Output(embeddings), {"label": labels, "index": torch.arange(len(labels), device=labels.device)}
    )


def loss_of(method: Method, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What is minimised on a batch."""
    rows = torch.arange(len(labels), device=labels.device)
    terms = method.compute_terms({"image": images, "label": labels, "index": rows})
    return torch.stack(list(terms.values())).sum()


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., DictConfig]:
    """`configure("method=abe", ...)` composes the configuration as the command line would."""

    def configure(*overrides: str) -> DictConfig:
        places = [f"paths.output_dir={tmp_path / 'run'}", f"paths.cache_dir={tmp_path / 'cache'}"]
        return composed(*places, *overrides)

    return configure


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tensors too small to share out: on a busy machine threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def method_of(configure: Callable[..., DictConfig]) -> Callable[..., Method]:
    """`method_of("method=abe", ...)`: an untrained method on the small backbone, 24 dimensions, always the same."""

    def method_of(*overrides: str) -> Method:
        small = ["dataset=glyphs", "backbone=small", "head.dim=24", "image_size=32", "runtime.train_classes=5"]
        config = configure(*small, *overrides)
        check(config)
        torch.manual_seed(0)
        return build_method(config)

    return method_of


@pytest.fixture
def run(configure: Callable[..., DictConfig], method_of: Callable[..., Method], tmp_path: Path) -> Path:
    """An untrained ABE-2 of 24 dimensions."""
    two = ("method=abe", "method.M=2")
    return untrained_run(configure, tmp_path / "trained", method_of(*two), *two)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real images; the test is skipped where `DML_DATA` names none."""
    if "DML_DATA" not in os.environ:
        pytest.skip("DML_DATA names no folder of real images")
    return Path(os.environ["DML_DATA"])


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`call("search", *options)`: the exit code of a command, and what it said."""

    def call(name: str, *options: str | Path) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", [name, *map(str, options)])
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            importlib.import_module(f"dml.{name}").main()
        except SystemExit as left:
            code = int(left.code or 0)
        said = capsys.readouterr()
        return code, said.out if code == 0 else said.err

    return call


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """`with full_disk(size):` writing beyond this size of a file fails, as on a full disk, without the file's name."""

    @contextmanager
    def full_disk(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)  # Python ignores the signal, so write() fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full_disk


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """`on_ranks(2, function, *arguments)`: what a top-level function returns in each of 2 real gloo processes."""

    def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return of_ranks(world_size, function, *arguments, folder=tmp_path / "ranks")

    return on_ranks


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`refuse(ending)`: folders whose paths end so cannot be listed. Permissions do not bind root, so the system's
    answer is made."""
    scandir = os.scandir

    def refuse(ending: str) -> None:
        def refusing(path: str) -> Any:
            if str(path).endswith(ending):
                raise PermissionError(13, "Permission denied", str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refusing)

    return refuse
