"""The loop with pytorch-metric-learning, beside the baseline that it is compared to."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torchvision.transforms import v2

from dml.configuration.composition import composed
from dml.data.dataset import open_dataset
from dml.data.miniatures import cars196
from dml.papers.catalogue import read_experiment
from dml.training.build import build


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    path = Path(__file__).parents[2] / "experiments/bench/peer.py"
    spec = importlib.util.spec_from_file_location("peer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_images_are_random_and_test_images_are_not(peer: ModuleType, tmp_path: Path) -> None:
    cars196(tmp_path)
    config, _, _ = peer.settings(read_experiment(peer.COMPARISON), None, None)
    config.dataset.update(root=str(tmp_path), strict=False)
    train, test = peer.opened(open_dataset(config), 28)

    def differ(images: torch.utils.data.Dataset) -> bool:
        return any(not torch.equal(images[0][0], images[0][0]) for _ in range(20))

    assert differ(train)
    assert not differ(test)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("scheduler", [pytest.param("constant", marks=pytest.mark.exhaustive), "cosine"])
def test_the_same_batches_train_the_same_network(peer: ModuleType, data_dir: Path, scheduler: str) -> None:
    """From the same weights and on the same batches, the losses of the first steps agree with the baseline's."""
    config, lr, factor = peer.settings(read_experiment(peer.COMPARISON), None, None)
    steps = 3
    config.sampler.batch_size = 16
    config.dataset.cache = "none"
    config.paths.data_dir = str(data_dir)
    config.trainer.max_steps = steps
    config.scheduler = composed(f"scheduler={scheduler}").scheduler
    parts = build(config)
    ours, theirs = (
        parts.method.train(),
        peer.Network(config.head.dim, Path(config.backbone.weights_dir) / peer.WEIGHTS, "torch").train(),
    )
    theirs.head.load_state_dict(ours.head.projection.state_dict())
    optimizer = ours.optimizer_alone()
    schedule = ours.recipe.schedule_of(optimizer, steps_per_epoch=1)
    step = peer.stepper(theirs, config, lr, factor, steps if scheduler == "cosine" else None)
    normalize = v2.Normalize(**peer.IMAGENET)
    batches = iter(parts.data.train_dataloader())
    for _ in range(steps):
        batch = next(batches)
        optimizer.zero_grad()
        loss = sum(ours.compute_terms(batch).values())
        loss.backward()
        optimizer.step()
        schedule.step(loss)
        torch.testing.assert_close(step(normalize(batch["image"]), batch["label"]), loss.detach(), rtol=1e-4, atol=0)
