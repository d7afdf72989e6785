"""Every YAML of dataset, transform and sampler composes and builds what its header says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from dml.configuration.composition import CONF
from dml.data.dataset import open_dataset
from dml.data.glyphs import glyphs
from dml.data.transforms import transform_of
from tests.components import components

Configure = Callable[..., DictConfig]


@pytest.mark.parametrize("name", components("transform"))
def test_every_transform(configure: Configure, name: str) -> None:
    image = Image.new("RGB", (50, 40), (255, 255, 255))
    config = configure("dataset=glyphs", f"transform={name}", "image_size=28")
    for part in ("train", "test"):
        assert transform_of(config.transform[part])(image).shape == (3, 28, 28)


@pytest.mark.parametrize("name", components("sampler"))
def test_every_sampler(configure: Configure, name: str) -> None:
    config = configure(f"sampler={name}", "sampler.batch_size=16")
    sampler = instantiate(config.sampler, labels=np.repeat(np.arange(8), 10), seed=0)
    assert len(next(iter(sampler))) == 16


@pytest.mark.parametrize("name", components("dataset"))
def test_every_dataset_composes_with_its_transform_and_size(configure: Configure, name: str) -> None:
    """What the YAML asks for stands above the defaults of conf/config.yaml, whatever their order."""
    config = configure(f"dataset={name}")
    said = [one for one in OmegaConf.load(CONF / "dataset" / f"{name}.yaml").defaults if one != "_self_"]
    asked = {key.removeprefix("override /"): choice for one in said for key, choice in one.items()}
    assert {"transform", "backbone"} <= asked.keys()
    for group in ("transform", "backbone"):
        expected = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{asked[group]}.yaml"), resolve=False)
        found = OmegaConf.to_container(config[group], resolve=False)
        assert targets(found) == targets(expected)
    assert config.transform.test.resize.size in (config.image_size, [config.image_size] * 2)


def targets(node: Any) -> list[str]:
    """All that a configuration names to be called, in order."""
    if isinstance(node, dict):
        return [one for key, value in node.items() for one in ([value] if key == "_target_" else targets(value))]
    return [one for value in node for one in targets(value)] if isinstance(node, list) else []


def test_the_commandline_stands_above_a_dataset(configure: Configure) -> None:
    config = configure("dataset=birds100", "transform=pad_crop", "image_size=64")
    assert config.transform.train.resize._target_.endswith("pad_square")
    assert config.transform.train.crop.size == 64


@pytest.mark.slow
def test_the_default_dataset_is_what_its_defaults_say(configure: Configure) -> None:
    config = configure("dataset=glyphs", "dataset.images_per_class=2")
    records = open_dataset(config)
    assert len(records.class_names) == 160
    assert records.open_image(0).size == (48, 48)
    np.testing.assert_array_equal(records.open_image(5), glyphs(images_per_class=2).open_image(5))


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(("name", "images"), [("omniglot", 32460), ("birds100", 5902), ("cars196", 16185)])
def test_the_real_datasets(configure: Configure, data_dir: Path, name: str, images: int) -> None:
    config = configure(f"dataset={name}", f"paths.data_dir={data_dir}")
    records = open_dataset(config)
    assert len(records) == images
    out = transform_of(config.transform.test)(records.image(int(records.query_rows[-1])))
    assert out.shape == (3, config.image_size, config.image_size)
    assert out.dtype == torch.float32
