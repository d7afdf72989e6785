"""Every method on today's backbones: it is described, trains on one rank as on two, resumes and is exported."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from dml.bench.ranks import as_torchrun
from dml.errors import UserError
from dml.inference.export import export
from dml.methods.base import Method
from dml.training.build import build_method
from dml.training.callbacks.steps import StepSeed
from dml.training.complexity import complexity
from dml.training.description import describe
from dml.training.run import run
from tests.components import components
from tests.conftest import TINY
from tests.test_ranks import train_in_float64
from tests.test_resume import outcome

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training"),  # frozen batch norm means to be
]

Configure = Callable[..., DictConfig]

SHALLOW = {
    "vit_tiny": ["+backbone.options.depth=4"],
    "swin_tiny": ["+backbone.options.depths=[1,2,1,1]", "+backbone.options.embed_dim=24"],
    "convnext_tiny": ["+backbone.options.depths=[1,1,1,1]", "+backbone.options.dims=[24,48,96,192]"],
    "efficientnet_lite0": [],
}
# Less than by default: every learner and every step of a solver is computed, and is a part of a graph.
FEWER = {
    "abe": ["method.M=2"],
    "mheads": ["method.M=2"],
    "mheads_att": ["method.M=2"],
    "mtails": ["method.M=2"],
    "dces": ["method.K=2"],
    "deml": ["method.I=2", "method.J=2"],
    "diablo": ["method.N=2"],
    "gsp": ["head.m=8", "head.iterations=3"],
}
# One of each kind of network, and each kind of attention, beside the whole product.
QUICK = {("abe", "convnext_tiny"), ("diablo", "swin_tiny"), ("deml", "vit_tiny"), ("mtails", "efficientnet_lite0")}
PAIRS = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.exhaustive, id=" ".join(pair))
    for pair in itertools.product(components("method"), SHALLOW)
]


def options(method: str, backbone: str) -> list[str]:
    return [
        f"method={method}",
        f"backbone={backbone}",
        "backbone.weights=none",
        *SHALLOW[backbone],
        *FEWER.get(method, []),
    ]


def built(configure: Configure, method: str, backbone: str, *more: str) -> Method:
    config = configure(*TINY, *options(method, backbone), "runtime.train_classes=4", *more)
    torch.manual_seed(0)
    return build_method(config)


@pytest.mark.parametrize(("method", "backbone"), PAIRS)
def test_it_is_described(configure: Configure, method: str, backbone: str) -> None:
    made = built(configure, method, backbone)
    pieces, total = describe(made, 32)
    assert {name: total[name] for name in ("params", "trained_params", "flops")} == complexity(made, 32)
    assert sum(piece.params for piece in pieces) == total["params"]
    assert sum(piece.flops for piece in pieces) == total["flops"]


def _train(pairs: list[tuple[str, str]], folder: Path) -> dict[str, Any]:
    return {
        f"{method} {backbone}": train_in_float64(
            method, "contrastive", folder / backbone, *options(method, backbone), "trainer.max_steps=3"
        )
        for method, backbone in pairs
    }


def _as_a_rank(pairs: list[tuple[str, str]], folder: Path) -> dict[str, Any]:
    as_torchrun(one_machine=True)
    return _train(pairs, folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backbone", SHALLOW)
def test_two_ranks_are_one(on_ranks: Callable[..., list[Any]], tmp_path: Path, backbone: str) -> None:
    pairs = [(method, backbone) for method in components("method")]
    first, second = on_ranks(2, _as_a_rank, pairs, tmp_path / "two")
    for name, alone in _train(pairs, tmp_path / "one").items():
        assert len(alone["losses"]) == 3
        assert alone["losses"] == pytest.approx(first[name]["losses"], rel=1e-6, abs=1e-6), name
        for part, value in alone["state"].items():
            there = f"{name}: {part}"
            torch.testing.assert_close(second[name]["state"][part], first[name]["state"][part], rtol=0, atol=0)
            torch.testing.assert_close(first[name]["state"][part], value, rtol=1e-6, atol=1e-6, msg=there)


class Stopped(Exception):
    """A run that something outside ends."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("method", "backbone"), PAIRS)
def test_it_resumes_to_the_last_bit_and_is_exported(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, backbone: str
) -> None:
    chosen = [
        *TINY,
        *options(method, backbone),
        "trainer.max_steps=3",
        "protocol.every=3",
        "trainer.checkpoint_every=1",
    ]
    chosen += ["loss=contrastive", "protocol.clustering=false"]

    def train(name: str) -> Path:
        folder = tmp_path / name
        run(configure(*chosen, f"paths.output_dir={folder}"), chosen)
        return folder

    alone = train("alone")
    seed = StepSeed.on_train_batch_start

    def stop(self: StepSeed, trainer: Any, *arguments: Any) -> None:
        if trainer.global_step == 2:
            raise Stopped
        seed(self, trainer, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(StepSeed, "on_train_batch_start", stop)
        with pytest.raises(Stopped):
            train("stopped")
    metrics, records, tensors = outcome(alone)
    again = outcome(train("stopped"))
    assert again[0] == metrics
    assert again[1] == records
    assert [name for name, value in tensors.items() if not torch.equal(again[2][name], value)] == []

    if backbone == "vit_tiny":
        with pytest.raises(UserError, match=r"tokens beside its map cannot be exported.*: choose another backbone"):
            export(alone, tmp_path / "export")
        return
    content = export(alone, tmp_path / "export")
    assert set(content["parity"]) == {"model.pt2", "model.onnx"}
    assert all(0 <= file["largest_difference"] < 1e-4 for file in content["parity"].values())
