"""Tests that configurations whose choices of files are kept are the ones that Hydra composes."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError

from dml.configuration.composition import CONF, composed, folder_option


def by_hydra(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("method=deml", "dataset=cars196", "trainer.max_steps=7", "trainer.max_steps=9"),
        ("trainer.max_steps=7", "method=dces", "experiment=abe_cars", "method.K=3"),  # values before a choice
        ("method=abe", "method.M=null", "paths.data_dir='a, b=c'", "image_size=1e2", "backbone.train=last:2"),
        ("backbone.lora_layers=[qkv,fc1]", "head.dim=${method.M}", "seed=0x10"),
        ("experiment=gsp_cars", "tuned.c2={pos_margin: 0.5}"),  # its other margin stays
        ("+new.option=1", "~report", "hydra.job.name=a", "+method.own={a: 1}"),
        ("loss=triplet", "miner=none", "loss=gsp/c2"),
    ],
)
def test_a_configuration_is_the_one_that_hydra_composes(overrides: tuple[str, ...]) -> None:
    wanted = OmegaConf.to_yaml(by_hydra(*overrides))
    for _ in range(2):
        config = composed(*overrides)
        assert OmegaConf.to_yaml(config) == wanted
        with pytest.raises(ConfigAttributeError):  # as strict as Hydra's
            config.method.unknown = 1


MISTAKES = [
    *("method.unknown=1", "unknown=1", "method=unknown", "method.M=1,2", "method.M.x=1", "method.M=[", "="),
    *("loss@x=margin", "miner={a: 1}", "+method.M=1", "~unknown", "seed.x=1", "hydra.unknown=1"),
]


@pytest.mark.parametrize("override", MISTAKES)
def test_mistakes_are_told_in_hydras_words(override: str) -> None:
    with pytest.raises(HydraException) as wanted:
        by_hydra("method=abe", override)
    with pytest.raises(HydraException) as raised:
        composed("method=abe", override)
    assert (raised.type, str(raised.value)) == (wanted.type, str(wanted.value))


def test_a_configuration_that_is_changed_changes_no_other(tmp_path: Path) -> None:
    first = composed("method=abe", folder_option("output_dir", tmp_path / "a b"))
    assert Path(first.paths.output_dir) == tmp_path / "a b"
    first.method.M = 77
    first.dataset.size = 8
    assert OmegaConf.to_yaml(composed("method=abe")) == OmegaConf.to_yaml(by_hydra("method=abe"))
