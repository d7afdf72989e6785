"""The scripts of experiments/gsp: what they compute, and that they resume."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dml.data.cifar import Cifar100

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "gsp"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gsp_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def few_images() -> Cifar100:
    rng = np.random.default_rng(0)
    classes = np.tile(np.arange(4), 30)
    images = rng.integers(0, 256, (120, 32, 32, 3), dtype=np.uint8)
    images[..., 0] = 60 * classes[:, None, None]
    train = np.arange(120) < 96
    return Cifar100(images, classes, classes // 2, train, list("abcd"), ["x", "y"])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_pretraining_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at the start of its last epoch it ends bit for bit as undisturbed; the backbone reads its weights."""
    pretrain = script("pretrain")
    options = {"epochs": 3, "batch": 24, "lr": 0.05, "weight_decay": 5e-4, "seed": 0}
    whole, stopped = tmp_path / "whole" / "net.pth", tmp_path / "stopped" / "net.pth"
    for path in (whole, stopped):
        path.parent.mkdir()
    accuracy = pretrain.train(few_images(), whole, **options)
    start = pretrain.Classifier.on_train_epoch_start

    def stop(self: Any) -> None:
        if self.current_epoch == 2:
            raise RuntimeError("stopped")
        start(self)

    monkeypatch.setattr(pretrain.Classifier, "on_train_epoch_start", stop)
    with pytest.raises(RuntimeError, match="stopped"):
        pretrain.train(few_images(), stopped, **options)
    assert not stopped.exists()
    monkeypatch.setattr(pretrain.Classifier, "on_train_epoch_start", start)
    assert pretrain.train(few_images(), stopped, **options) == accuracy
    assert stopped.with_suffix(".json").read_text() == whole.with_suffix(".json").read_text()
    one, other = (torch.load(path, weights_only=True) for path in (whole, stopped))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    pretrain.resnet20(weights=str(whole))


def test_crops_and_flips() -> None:
    """Each image of a training batch is the original shifted by up to 4 pixels, reflected at the border, or flipped."""
    pretrain = script("pretrain")
    images = np.arange(6 * 32 * 32 * 3, dtype=np.uint32).reshape(6, 32, 32, 3).astype(np.uint8)
    batches = pretrain.Batches(images, np.arange(6), 6, training=True, seed=0)
    ((moved, classes),) = list(batches)
    seen = set()
    for image, c in zip(moved.numpy(), classes, strict=True):
        padded = np.pad(images[c], ((4, 4), (4, 4), (0, 0)), mode="reflect").transpose(2, 0, 1)
        found = [
            (y, x, flip)
            for y in range(9)
            for x in range(9)
            for flip in (False, True)
            if np.array_equal(padded[:, y : y + 32, x : x + 32][:, :, :: -1 if flip else 1], image)
        ]
        assert found
        seen.update(found)
    assert len({flip for _, _, flip in seen}) == 2


def test_the_toy_problem() -> None:
    """Fig. 2: a linear program leaves red and blue cells out when mu is too small, the smoothed problem does not."""
    toy = script("toy")
    cells = toy.toy_map()
    wanted = np.zeros((10, 10), bool)
    wanted[:5, :5] = wanted[5:, 5:] = True
    hard, smooth = toy.weights(cells, 0.2, None), toy.weights(cells, 0.2, 5.0)
    assert hard.mean() == pytest.approx(1)
    assert (hard[wanted] < 0.01).sum() == 30
    assert hard[~wanted].max() < 1e-6
    assert smooth[wanted].min() > 0.5
    assert smooth[~wanted].max() < 0.1


def test_tokens_of_a_sample_are_of_its_class_or_of_all() -> None:
    synthetic = script("synthetic")
    tokens = synthetic.Tokens(2)
    classes = torch.arange(16)
    drawn = tokens(classes, torch.Generator().manual_seed(0))[..., 0].transpose(1, 2)  # [16,50,2]
    shares = []
    for c, sample in zip(classes.tolist(), drawn, strict=True):
        which = [int((tokens.tokens == feature).all(1).nonzero()[0, 0]) for feature in sample]
        mine = [4 * c <= token < 4 * c + 4 for token in which]
        assert all(own or token >= 64 for own, token in zip(mine, which, strict=True))
        shares.append(np.mean(mine))
    assert 0.4 < np.mean(shares) < 0.6
    assert np.std(shares) > 0.03


@pytest.mark.slow
def test_zero_shot_prediction_of_a_linear_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings that are linear in the attributes are predicted; unrelated ones are not."""
    monkeypatch.syspath_prepend(str(FOLDER))  # as when the script is started
    study = script("zero_shot")
    generator = torch.Generator().manual_seed(0)
    attributes = torch.rand(10, 3, generator=generator)
    linear = attributes @ torch.randn(3, 6, generator=generator)
    assert study.zero_shot(attributes, linear, 1e-6)["euclidean/precision@1"] > 0.99
    unrelated = study.zero_shot(attributes, torch.randn(10, 6, generator=generator), 1e-6)
    assert unrelated["euclidean/precision@1"] < 0.5
