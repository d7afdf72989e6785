"""What the benchmark calculates of the global batch, against what is counted."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dml.losses.pairwise import MultiSimilarity


@pytest.fixture(scope="module")
def gathering() -> ModuleType:
    path = Path(__file__).parents[2] / "experiments/bench/gathering.py"
    spec = importlib.util.spec_from_file_location("gathering", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_flops_are_those_of_the_loss(gathering: ModuleType) -> None:
    """torch counts a multiply-add as two."""
    embeddings = F.normalize(torch.randn(96, 32)).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        MultiSimilarity()(embeddings, torch.arange(96) // 4).backward()
    assert counter.get_total_flops() == 2 * gathering.cost(ranks=3, batch=32, dim=32).loss


def test_bytes(gathering: ModuleType) -> None:
    alone, four = gathering.cost(1, 8, 16), gathering.cost(4, 8, 16)
    assert (alone.gathered, alone.summed, alone.seconds(1.0)) == (0, 0, 0)
    assert four.gathered == 3 * 8 * (16 * 4 + 8 + 8)
    assert four.matrix == 4 * 32 * 32
    assert gathering.kept(64) >= 4  # a matrix of float32 at least


def test_the_script_prints_a_table(
    gathering: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page about devices shows it as it is printed."""
    monkeypatch.setattr("sys.argv", ["gathering.py"])
    gathering.main()
    lines = capsys.readouterr().out.splitlines()
    assert {line.count("|") for line in lines} == {12}
    assert [line.split()[1] for line in lines[2:]] == ["8", "64", "512"]
