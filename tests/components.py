"""The components of conf/: a YAML is tested from the moment on that it is there."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from dml.configuration.composition import CONF
from dml.data.transforms import Transform, transform_of


def components(group: str) -> list[str]:
    """All of a group, with those of its folders; the `gsp/` ones take their values from experiments, and are others'
    otherwise."""
    folder = CONF / group
    found = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    return [name for name in found if not name.startswith("gsp/")]


def but_exhaustive(group: str, *exhaustive: str) -> list[Any]:
    """Parameters of a test: those named, which take long and have tests of their own, only with -m exhaustive."""
    found = components(group)
    assert set(exhaustive) <= set(found), f"conf/{group} has no {sorted(set(exhaustive) - set(found))}"
    return [pytest.param(name, marks=pytest.mark.exhaustive) if name in exhaustive else name for name in found]


def transform(name: str, part: str, size: int, sides: tuple[int, int] | None = None) -> Transform:
    """A transform of conf/transform, `train` or `test`, at a crop size, with other sides."""
    config = OmegaConf.create({"image_size": size, "transform": OmegaConf.load(CONF / "transform" / f"{name}.yaml")})
    steps = config.transform[part]
    if sides is not None:
        steps.resize.sides = list(sides)
    return transform_of(steps)


def on_transformers(head: str) -> list[str]:
    """Options of a head of the class token, which the small backbone has not; none of others."""
    wanted = ["backbone=timm", "backbone.model_name=test_vit", "backbone.weights=none"]
    return wanted if head.startswith("cls") else []
