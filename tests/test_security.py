"""Nothing that came from elsewhere runs code here, and no shell sees an option."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from dml.configuration.composition import CONF
from dml.errors import UserError
from dml.training.build import build_method
from dml.training.rebuild import _checked, load_method
from tests.conftest import TINY

SOURCES = [path for part in ("dml", "experiments") for path in (CONF.parent / part).rglob("*.py")]


@pytest.mark.parametrize(
    "forbidden", [r"weights_only=False", r"\bpickle\.loads?\(", r"shell=True", r"os\.system", r"\beval\("]
)
def test_no_source_has_it(forbidden: str) -> None:
    assert len(SOURCES) > 90
    # Of a checkpoint that is written, Lightning's option of this name says what is left out.
    kept = r"save_checkpoint\(.*weights_only=False"
    found = [
        f"{path}: {line}"
        for path in SOURCES
        for line in path.read_text().splitlines()
        if re.search(rf"(?<![.\w]){forbidden}" if forbidden.startswith(r"\beval") else forbidden, line)
        and not re.search(kept, line)
    ]
    assert found == []


def test_all_that_is_loaded_is_loaded_as_data() -> None:
    for path in SOURCES:
        for call in re.findall(r"torch\.load\([^\n]*", path.read_text()):
            assert "weights_only=True" in call, (path, call)


@pytest.fixture
def checkpoint(configure: Callable[..., DictConfig], tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint({"head": {...}})`: of an untrained run whose configuration says something else."""

    def checkpoint(said: dict[str, Any]) -> Path:
        config = configure(*TINY, "runtime.train_classes=12", "runtime.embedding_dim=16")
        state = build_method(config).state_dict()
        container = OmegaConf.to_container(config, resolve=True)
        assert isinstance(container, dict)
        path = tmp_path / "some.ckpt"
        torch.save({"config": container | said, "state_dict": state, "finished": True}, path)
        return path

    return checkpoint


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.exec",
        "torch.hub.load",
        "torch.nn.modules.module.torch.hub.load",
        "dml.files.write_atomically",
    ],
)
def test_a_checkpoint_that_asks_for_more_than_a_network_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, target: str
) -> None:
    assert load_method(checkpoint({})).embed(torch.rand(1, 3, 32, 32)).shape == (1, 1, 16)
    said = {
        "method": {
            "_target_": "dml.methods.baseline.Baseline",
            "normalize": {"_target_": target, "_args_": ["touch x"]},
        }
    }
    with pytest.raises(UserError, match=rf"asks for {re.escape(target)} at .*, where no file of conf"):
        load_method(checkpoint(said))


@pytest.mark.parametrize("reference", ["${evil}", "\\${evil}"])
def test_a_checkpoint_that_refers_to_what_is_not_looked_at_is_refused(
    checkpoint: Callable[..., Path], reference: str
) -> None:
    said = {"evil": {"_target_": "os.system", "_args_": ["touch x"]}}
    said |= {"head": {"_target_": "dml.models.heads.Head", "pooling": reference}}
    with pytest.raises(UserError, match="holds a reference"):
        load_method(checkpoint(said))


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"nonsense")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "b.ckpt")
    for name in ("a.ckpt", "b.ckpt", "none.ckpt"):
        with pytest.raises(UserError, match="no checkpoint of a run, or damaged"):
            load_method(tmp_path / name)


RESNET = {"_target_": "dml.models.backbones.resnet.resnet18", "weights": "http://127.0.0.1:9/x", "weights_dir": "there"}
HEAD = {"_target_": "dml.models.heads.Head", "dim": 16}
POOL = {"_target_": "torch.nn.AdaptiveAvgPool2d", "output_size": 1}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("head", HEAD | {"pooling": RESNET}),
        ("head", HEAD | {"pooling": POOL | {"output_size": RESNET}}),
        ("head", HEAD | {"pooling": [POOL, RESNET]}),
        ("head", RESNET),
        ("head", HEAD | {"pooling": {"_target_": "dml.models.heads.Head"}}),
        ("head", HEAD | {"pooling": {"_target_": "torch.nn.modules.module.torch.optim.Adam"}}),
        ("head", HEAD | {"pooling": {"_target_": "torch.nn.parallel.DistributedDataParallel"}}),
        ("head", HEAD | {"pooling": POOL, "other": POOL}),
        ("backbone", HEAD),
        ("backbone", {"_target_": "dml.models.backbones.small.small", "train": RESNET}),
        ("method", {"_target_": "dml.methods.baseline.Baseline", "warm_up": POOL}),
        ("method", {"_target_": "dml.methods.baseline.Baseline", "optimizer": POOL}),
        ("transform", {"test": RESNET}),
        ("transform", {"test": {"_target_": ["os.system"]}}),
        ("head", HEAD | {"pooling": {"_target_": "torch.nn.nowhere.Pool"}}),
    ],
)
def test_a_name_is_taken_only_where_its_kind_belongs(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, part: str, said: dict[str, Any]
) -> None:
    monkeypatch.setattr("dml.models.weights.fetch", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(UserError, match=r"asks for .* at [\w.]+, where no file of conf"):
        load_method(checkpoint({part: said}))


MINE = """
from os import system
from dml.models.heads import Head

class Own(Head):
    def __init__(self, pooling, in_channels, dim, weights=None):
        super().__init__(pooling, in_channels, dim)
        self.weights = weights
        if weights == [0]:
            {}["row"]
"""


def test_components_of_a_trusted_package_are_loaded_and_nothing_that_it_imports(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "heads_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    own = checkpoint({"head": HEAD | {"_target_": "heads_of_mine.Own", "pooling": POOL}})
    for others in ("", "heads_of", "heads_of_mine.Own", "torch,os"):
        monkeypatch.setenv("DML_TRUST", others)
        with pytest.raises(UserError, match=r"asks for heads_of_mine\.Own at head, where no file of conf.*DML_TRUST"):
            load_method(own)
    monkeypatch.setenv("DML_TRUST", " another, heads_of_mine")
    assert type(load_method(own).head).__name__ == "Own"
    mine = HEAD | {"_target_": "heads_of_mine.Own", "pooling": POOL}
    for given, taken in (("imagenet", "none"), ([0.3, 0.7], [0.3, 0.7]), (None, None)):  # a text names weights to fetch
        assert load_method(checkpoint({"head": mine | {"weights": given}})).head.weights == taken
    with pytest.raises(UserError, match=r"heads_of_mine\.py:\d+ failed: KeyError: 'row'"):
        load_method(checkpoint({"head": mine | {"weights": [0]}}))
    shell = {"_target_": "heads_of_mine.system", "command": "touch x"}
    with pytest.raises(UserError, match=r"asks for heads_of_mine\.system at head\.pooling, where no file of conf"):
        load_method(checkpoint({"head": HEAD | {"pooling": shell}}))
    with pytest.raises(UserError, match=r"asks for another\.Head at head, which cannot be imported .*PYTHONPATH"):
        load_method(checkpoint({"head": HEAD | {"_target_": "another.Head"}}))


def test_what_a_checkpoint_says_of_files_and_addresses_is_not_used(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dml.models.weights.fetch", lambda *_: pytest.fail("downloaded"))
    small = {"_target_": "dml.models.backbones.small.small", "weights_dir": str(tmp_path / "there")}
    for weights in ("http://127.0.0.1:9/x", "imagenet", "/etc/passwd", None, ["imagenet"]):
        assert (
            load_method(checkpoint({"backbone": small | {"weights": weights}})).embed(torch.rand(1, 3, 32, 32)).shape[2]
            == 16
        )
    with pytest.raises(UserError, match="cannot be rebuilt"):  # another network, without its weights
        load_method(checkpoint({"backbone": RESNET}))
    assert not (tmp_path / "there").exists()


def test_losses_and_optimizers_are_not_built(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.SGD, "__init__", lambda *_: pytest.fail("built"))
    said = {"_target_": "dml.methods.baseline.Baseline"}
    anything = {"_target_": "os.system", "command": "touch x"}
    own = {"optimizer": {"_target_": "torch.optim.SGD"}, "scheduler": anything, "callbacks": {"mine": anything}}
    loss = {"_target_": "dml.losses.Loss", "loss": {"_target_": "os.system", "command": "touch x"}}
    load_method(checkpoint({"loss": loss, "method": said, **own}))
    with pytest.raises(UserError, match="cannot be rebuilt"):
        load_method(checkpoint({"image_size": 32, "method": said | {"M": 4}}))


@pytest.mark.parametrize("said", [{"head": torch.zeros(2)}, {"head": {3: 4}}, {"image_size": {1, 2}}, {"transform": 3}])
def test_a_checkpoint_of_anything(checkpoint: Callable[..., Path], said: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"some\.ckpt"):
        load_method(checkpoint(said))


@pytest.mark.slow
def test_every_configuration_can_be_rebuilt(configure: Callable[..., DictConfig], tmp_path: Path) -> None:
    for group in ("head", "method", "backbone", "transform"):
        for file in (CONF / group).glob("*.yaml"):
            config = configure(*TINY, "runtime.train_classes=12", "runtime.embedding_dim=16", f"{group}={file.stem}")
            container = OmegaConf.to_container(config, resolve=True)
            assert isinstance(container, dict)
            for part in ("backbone", "head", "method"):
                _checked(container[part], part, tmp_path)
            _checked(container["transform"]["test"], "transform.test", tmp_path)


def test_operations_of_a_transform_have_names_of_the_users_choice(tmp_path: Path) -> None:
    def checked(target: str) -> None:
        _checked({"mine": {"_target_": target}}, "transform.test", tmp_path)

    checked("torchvision.transforms.v2.GaussianBlur")
    checked("dml.data.transforms.shorter_side")
    for target in ("os.system", "torchvision.transforms.v2.functional.crop", "dml.data.transforms.scaled"):
        with pytest.raises(UserError, match=f"asks for {target} at transform.*, where no file of conf"):
            checked(target)
