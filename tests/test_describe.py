"""`python -m dml.describe` says what a run's metrics.json says, without data."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from dml.errors import UserError
from dml.methods.base import Method
from dml.training.complexity import complexity
from dml.training.description import describe, print_description
from tests.components import components

MethodOf = Callable[..., Method]


@pytest.mark.slow
def test_the_last_line_is_json(configure: Callable[..., DictConfig], capsys: pytest.CaptureFixture[str]) -> None:
    """ABE-8 512 of Table 1, and a data set that is not there."""
    options = ["method=abe", "method.M=8", "head.dim=512", "backbone=googlenet_v1", "image_size=224"]
    print_description(configure(*options, "dataset=folder", "loss=proxy_anchor"))
    printed = capsys.readouterr().out
    total = json.loads(printed.strip().splitlines()[-1])
    assert (total["learners"], total["dim"]) == (8, 512)
    assert (f"{total['params'] / 1e7:.2f}", f"{total['flops'] / 1e9:.2f}") == ("1.20", "7.46")
    assert "ABE on 224 x 224 pixels: 8 learners of 64, 1.20e7 parameters, 7.46e9 flops an image" in printed
    assert "spatial.inception3b" in printed
    assert "embedding.inception5b" in printed


def test_a_small_network(configure: Callable[..., DictConfig], capsys: pytest.CaptureFixture[str]) -> None:
    print_description(configure("method=baseline", "backbone=small", "head.dim=16", "image_size=32"))
    assert "pixels: 1 learner of 16, 1.46e5 parameters, 8.70e6 flops an image" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "said"),
    [("image_size=4", "larger"), ("image_size=abc", "whole number"), ("head.dim=-4", "at least 1")],
)
def test_mistakes(configure: Callable[..., DictConfig], option: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        print_description(configure(option))


@pytest.mark.slow
def test_it_takes_no_sweep() -> None:
    for options, said in {
        ("-m", "method.M=1,2"): "-m is for dml.run: give each option one value",
        ("sweep=M",): "sweep=M is for a sweep over method.M: start it with -m, or leave it out",
    }.items():
        done = subprocess.run(
            [sys.executable, "-m", "dml.describe", *options], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (2, f"dml: {said}.\n")


@pytest.mark.parametrize("name", components("method"))
def test_the_pieces_are_the_whole(method_of: MethodOf, name: str) -> None:
    method = method_of(f"method={name}", "loss=proxy_anchor")
    pieces, total = describe(method, 32)
    assert {name: total[name] for name in ("params", "trained_params", "flops")} == complexity(method, 32)
    assert sum(piece.params for piece in pieces) == total["params"]
    assert sum(piece.flops for piece in pieces) == total["flops"]
    assert total["dim"] == 24
    assert pieces[0].shape[-3:] == (16, 16, 16)
    assert method.training
