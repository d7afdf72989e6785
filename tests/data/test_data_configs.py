"""Every YAML of dataset, transform and sampler composes and builds what its header says."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from PIL import Image

from dml.data.dataset import open_dataset
from dml.data.glyphs import glyphs

CONF = Path(__file__).parents[2] / "conf"
Configure = Callable[..., DictConfig]


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("name", names("transform"))
def test_every_transform(configure: Configure, name: str) -> None:
    config = configure("dataset=glyphs", f"transform={name}", "image_size=28")
    image = Image.new("RGB", (50, 40), (255, 255, 255))
    for transform in (instantiate(config.transform.train), instantiate(config.transform.test)):
        assert transform(image).shape == (3, 28, 28)


@pytest.mark.parametrize("name", names("sampler"))
def test_every_sampler(configure: Configure, name: str) -> None:
    config = configure(f"sampler={name}", "sampler.batch_size=16")
    sampler = instantiate(config.sampler, labels=np.repeat(np.arange(8), 10), seed=0)
    assert len(next(iter(sampler))) == 16


@pytest.mark.parametrize("name", names("dataset"))
def test_every_dataset_composes_with_its_transform_and_size(configure: Configure, name: str) -> None:
    config = configure(f"dataset={name}")
    transform, backbone = {
        "glyphs": ("jitter", "small"),
        "omniglot": ("jitter", "small"),
        "cifar_collage": ("stretch", "resnet20"),
        **dict.fromkeys(
            ("cub200", "cars196", "sop", "inshop", "vehicleid", "market1501"), ("shorter_crop", "resnet50")
        ),
    }.get(name, ("shorter_crop", "mobilenet_v2"))
    assert config.transform.train._target_.endswith(transform)
    assert config.backbone._target_.endswith(backbone)
    assert config.transform.test.size == config.image_size


def test_the_commandline_stands_above_a_dataset(configure: Configure) -> None:
    config = configure("dataset=birds100", "transform=pad_crop", "image_size=64")
    assert config.transform.train._target_.endswith("pad_crop")
    assert config.transform.train.size == 64


def test_the_default_dataset_is_what_its_defaults_say(configure: Configure) -> None:
    config = configure("dataset=glyphs", "dataset.images_per_class=2")
    records = open_dataset(config)
    assert len(records.class_names) == 160
    assert records.open_image(0).size == (48, 48)
    np.testing.assert_array_equal(records.open_image(5), glyphs(images_per_class=2).open_image(5))


@pytest.mark.data
@pytest.mark.parametrize(("name", "images"), [("omniglot", 32460), ("birds100", 5902), ("cars196", 16185)])
def test_the_real_datasets(configure: Configure, data_dir: Path, name: str, images: int) -> None:
    config = configure(f"dataset={name}", f"paths.data_dir={data_dir}")
    records = open_dataset(config)
    assert len(records) == images
    out = instantiate(config.transform.test)(records.image(int(records.query_rows[-1])))
    assert out.shape == (3, config.image_size, config.image_size)
    assert out.dtype == torch.float32
