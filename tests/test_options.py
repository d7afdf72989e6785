"""Options are compared with what takes them, before anything is built or written."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from dml.configuration.components import instantiate
from dml.configuration.composition import CONF
from dml.configuration.composition import composed as compose
from dml.configuration.options import check, check_plain, filled, parameters
from dml.errors import Interrupted, UserError, causes, enough_memory, no_permission, no_room
from dml.training.build import build_method
from dml.training.complexity import complexity
from tests.conftest import TINY

GROUPS = ("backbone", "callbacks", "dataset", "head", "loss", "method", "miner", "optimizer", "protocol", "sampler")
GROUPS += ("rerank", "scheduler", "trainer", "transform")
CHOICES = {
    group: [
        f"{group}={file.relative_to(CONF / group).with_suffix('').as_posix()}"
        for file in sorted((CONF / group).rglob("*.yaml"))
    ]
    for group in GROUPS
}
# A file of each group at once, since composing takes longer than comparing.
TOGETHER = [[choice for choice in one if choice] for one in zip_longest(*CHOICES.values())]
# Set once a configuration is composed, so that its choice of files is kept for the next one.
TUNED = {
    "c2": {"pos_margin": 0.2, "neg_margin": 0.3},
    "ms": {"alpha": 2, "beta": 40, "lambda": 0.5},
    "triplet": 0.1,
    "xbm": 1600,
}


def composed(*overrides: str) -> DictConfig:
    config = compose(*overrides)
    OmegaConf.set_struct(config, False)
    config.tuned = TUNED
    return config


def root_of(*choices: str) -> list[str]:
    return ["dataset.root=photos"] if "dataset=folder" in choices else []


def values(node: Any, option: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Options below a node: dotted name, value, and the node that holds it."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from values(value, f"{option}.{name}")
        else:
            yield f"{option}.{name}", value, node


def wrong(value: Any) -> list[Any]:
    nowhere = [float("nan"), float("inf"), [[]], {"a": 1}]
    if isinstance(value, bool):
        return [*nowhere, "no", "abc", 2]
    return [*nowhere, "abc", 1e300, -1e300, True] if isinstance(value, int | float) else [*nowhere, True]


@pytest.mark.parametrize("choices", TOGETHER, ids=lambda choices: choices[0])
def test_every_option_has_a_type_and_every_number_a_range(choices: list[str]) -> None:
    """A glob: a new file is covered the moment it is there."""
    container = filled(composed(*choices, *root_of(*choices)))
    check_plain(container)
    for group in (choice.partition("=")[0] for choice in choices):
        for option, value, node in values(container[group], group):
            if value is None:
                continue
            name = option.rpartition(".")[2]
            for bad in wrong(value):
                node[name] = bad
                with pytest.raises(UserError, match=f"^{re.escape(option)}") as caught:
                    check_plain(container)
                assert "\n" not in str(caught.value)
            node[name] = value


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("image_sise", 64, "image_sise is no option: did you mean image_size."),
        ("schedule", "cosine", "schedule is no option: did you mean scheduler."),
        ("scheduler", "cosine", "scheduler=cosine is no component: choose a file of conf/scheduler."),
        ("scheduler.gama", 0.5, "scheduler.gama is no option of StepLR: did you mean gamma."),
        ("scheduler.T_max", 7, "scheduler.T_max cannot be set by hand"),
        ("scheduler.unit", "epochs", "scheduler.unit=epochs has to be 'step' or 'epoch'"),
        ("scheduler.warm_up", 0.5, "scheduler.warm_up=0.5 has to be a whole number"),
        ("scheduler.milestones", [], "scheduler.milestones=[] has to"),
        ("optimizer", None, "optimizer=null is no component"),
        ("optimizer.lr", "x", "optimizer.lr=x has to be a number"),
        ("optimizer.lr", -1, "optimizer.lr=-1 has to be above 0"),
        ("optimizer.foo", 1, "optimizer.foo is no option of AdamW"),
        ("callbacks", "ema", "callbacks=ema is no component: choose a file of conf/callbacks."),
        ("callbacks.ema.decai", 0.9, "callbacks.ema.decai is no option of ExponentialAveraging: did you mean decay."),
        ("callbacks.ema.decay", 1.5, "callbacks.ema.decay=1.5 has to be below 1"),
        ("miner.epsilom", 1, "miner.epsilom is no option of MultiSimilarityMiner: did you mean epsilon."),
        ("method.head", 3, "method.head cannot be set by hand"),
        ("loss.miner", None, "loss.miner cannot be set by hand"),
        ("sampler.seed", 3, "sampler.seed cannot be set by hand"),
        ("head.in_channels", 3, "head.in_channels cannot be set by hand"),
        ("head._target_", "dml.models.heads.Haed", "head._target_=dml.models.heads.Haed names nothing"),
        ("head._target_", 3, "head._target_=3 names nothing"),
        ("head._target_", "math.pi", "head._target_=math.pi is no class and no function"),
        ("head._args_", [1], "head._args_ cannot be set"),
        ("head.pooling", 3, "head.pooling=3 has to be a component"),
        ("head", None, "head=null is no component"),
        ("method", "abe", "method=abe is no component"),
        ("method.attention", "no", "method.attention=no has to be"),
        ("loss.loss.learn_beta", "no", "loss.loss.learn_beta=no has to be true or false"),
        ("trainer.deterministic", "no", "trainer.deterministic=no has to be true or false or 'warn'"),
        ("loss.lr_factor", -1, "loss.lr_factor=-1 has to be above 0"),
        ("loss.loss.alpha", 0, "loss.loss.alpha=0 has to be above 0"),
        ("loss.loss.margin", float("nan"), "loss.loss.margin=NaN has to be a finite number"),
        ("miner.epsilon", float("nan"), "miner.epsilon=NaN has to be a finite number"),
        ("protocol.every", 2.5, "protocol.every=2.5 has to be a whole number"),
        ("protocol.every", float("nan"), "protocol.every=NaN has to be a whole number"),
        ("protocol.ks", [1, 1.5], "protocol.ks=[1, 1.5] has to be ([1] of it) a whole number"),
        ("protocol.ks", [0, 1], "protocol.ks=[0, 1] has to be ([0] of it) at least 1"),
        ("protocol.batch_size", float("nan"), "protocol.batch_size=NaN has to be a whole number"),
        ("optimizer.weight_decay", -1, "optimizer.weight_decay=-1 has to be at least 0"),
        ("transform.test.resize.size", [0, 1], "transform.test.resize.size=[0, 1] has to be"),
        (
            "transform.train.move.translate",
            [0, 2],
            "transform.train.move.translate=[0, 2] has to be ([1]",
        ),
        ("transform.train.move.angle", 3, "transform.train.move.angle is no option of RandomAffine"),
        (
            "transform.train.move._target_",
            "torchvision.transforms.v2.Spin",
            "transform.train.move._target_=torchvision",
        ),
        ("transform.train", None, "transform.train=null is no list of operations"),
        ("head.pooling.output_size", "abc", "head.pooling.output_size=abc has to be a whole number"),
        ("head.pooling.output_size", 2, "head.pooling.output_size=2 has to be at most 1"),
        ("trainer.gradient_clip_val", float("nan"), "trainer.gradient_clip_val=NaN has to be a finite number"),
        ("method.lambda_zs", 1.5, "method.lambda_zs=1.5 has to be at most 1"),
        ("head.mu", 0, "head.mu=0 has to be above 0"),
        ("head.dim", 0, "head.dim=0 has to be at least 1"),
        ("head.solver", "simplex", "head.solver=simplex has to be 'newton' or 'fixed_point'"),
        ("head.iterations", 0, "head.iterations=0 has to be at least 1"),
        ("protocol.folds", 1, "protocol.folds=1 has to be at least 2"),
        ("protocol.patience", 0, "protocol.patience=0 has to be at least 1"),
        ("dataset.unreadable", "ignore", "dataset.unreadable=ignore has to be 'stop' or 'skip'"),
        ("seed", "abc", "seed=abc has to be a whole number"),
        ("image_size", None, "image_size=null has to be a whole number"),
    ],
)
def test_the_sentence(option: str, value: Any, sentence: str) -> None:
    chosen = {
        "method.attention": ["method=mheads_att"],
        "method.lambda_zs": ["method=gsp"],
        "head.mu": ["head=gsp"],
        "head.dim": ["head=gsp"],
        "head.solver": ["head=gsp"],
        "head.iterations": ["head=gsp"],
        "protocol.folds": ["protocol=mlrc"],
        "dataset.unreadable": ["dataset=birds100"],
        "scheduler.gama": ["scheduler=step"],
        "scheduler.T_max": ["scheduler=cosine"],
        "scheduler.milestones": ["scheduler=multistep"],
        "callbacks.ema.decai": ["callbacks=ema"],
        "callbacks.ema.decay": ["callbacks=ema"],
        "loss.loss.learn_beta": ["method=baseline", "loss=margin"],
        "loss.loss.margin": ["method=baseline", "loss=margin"],
    }
    config = composed(*chosen.get(option, ["method=baseline"]))
    check(config)
    OmegaConf.update(config, option, value, force_add=True)
    with pytest.raises(UserError) as caught:
        check(config)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("option", ["num_classes", "embedding_size"])
def test_what_follows_from_the_data_cannot_be_chosen(option: str) -> None:
    said = (
        f"loss.loss.{option}=3 cannot be chosen, since it follows from the data: leave it out (its file has ${{runtime."
    )
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        check(composed("loss=arcface", f"loss.loss.{option}=3"))
    check(composed("loss=arcface"))


def test_a_remark_may_be_anything() -> None:
    check(composed("+note=a/b"))


# Files that choose something else than the default of what takes it, as a variant of their group does.
VARIANTS = {
    ("backbone", "probe"),
    ("backbone", "weights_dir"),
    ("dataset", "name"),
    ("dataset", "size"),
    ("head", "prototypes"),
    ("loss", "lr_factor"),
    ("method/deml", "activation_decay"),
    ("method/deml", "head_lr_factor"),
    ("protocol/market1501", "ks"),
    ("protocol/mlrc", "clustering"),
    ("protocol/mlrc", "patience"),
    ("protocol/tuning", "clustering"),
    ("protocol/tuning", "criterion"),
    ("protocol/vehicleid", "ks"),
}


def defaults(target: str) -> dict[str, Any]:
    """Parameter -> default of a component, with those of the bases that get its `**options`."""
    taker = get_object(target)
    calls = [taker]
    if isinstance(taker, type):
        calls = [vars(base)["__init__"] for base in inspect.getmro(taker) if "__init__" in vars(base)]
    found: dict[str, Any] = {}
    for call in calls:
        some = inspect.signature(call).parameters.values()
        found = {one.name: one.default for one in some if one.default is not one.empty} | found
        if not any(one.kind is one.VAR_KEYWORD for one in some):
            break
    return found


def made_here(node: Any) -> Iterator[dict[str, Any]]:
    """Nodes of a file that make a component of this package."""
    if isinstance(node, dict):
        if str(node.get("_target_")).startswith("dml."):
            yield node
        for one in node.values():
            yield from made_here(one)


OURS = [file for file in sorted(CONF.glob("*/*.yaml")) if any(made_here(yaml.safe_load(file.read_text())))]


@pytest.mark.parametrize("file", OURS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_an_option_has_the_same_default_in_its_file_and_in_python(file: Path) -> None:
    group, name = file.parent.name, f"{file.parent.name}/{file.stem}"
    for node in made_here(yaml.safe_load(file.read_text())):
        of_python = defaults(node["_target_"])
        for option in (node.keys() & of_python.keys()) - {one for place, one in VARIANTS if place in (group, name)}:
            here, there = node[option], of_python[option]
            assert here == (list(there) if isinstance(there, tuple) else there), f"{node['_target_']}: {option}"


def test_options_that_are_passed_on_are_known() -> None:
    assert {"lambda_div", "checkpointing", "warm_up"} <= parameters("dml.methods.abe.ABE").keys()
    assert {"m", "mu", "eps", "dim"} <= parameters("dml.models.gsp.GSPHead").keys()
    assert {"margin", "embedding_reg_weight"} <= parameters("pytorch_metric_learning.losses.MarginLoss").keys()
    assert "collect_stats" in parameters("pytorch_metric_learning.losses.MarginLoss")


def told_to_stop() -> None:
    raise Interrupted("SIGTERM")


def test_a_signal_while_a_component_is_made_is_a_signal() -> None:
    with pytest.raises(Interrupted, match="SIGTERM"):
        instantiate(OmegaConf.create({"_target_": f"{__name__}.told_to_stop"}))
    inner = {"_target_": f"{__name__}.told_to_stop"}
    with pytest.raises(Interrupted, match="SIGTERM"):
        instantiate(OmegaConf.create({"_target_": "builtins.dict", "inner": inner}))


def test_too_little_memory_is_told() -> None:
    with pytest.raises(UserError, match="too little memory"), enough_memory():
        torch.empty(2**48)
    with pytest.raises(ZeroDivisionError), enough_memory():
        1 / 0  # noqa: B018


def test_causes_end_where_they_lead_in_a_circle() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert list(causes(first)) == [first, second]
    assert not no_room(first)
    assert no_permission(second) is None


OWN = """
from dml.methods.baseline import Baseline


class Mine(Baseline):
    def __init__(self, fault=None, **options):
        super().__init__(**options)
        self.fault = fault
        if fault == "key":
            {}["k"]
        if fault == "type":
            None + 1
        if fault == "chain":
            try:
                {}["row"]
            except KeyError as error:
                raise RuntimeError("no such row") from error
        if fault == "value":
            raise ValueError("fault=value is refused")

    def learners(self, images):
        if self.fault == "shape":
            return images @ images.new_zeros(2, 2)
        return super().learners(images)
"""


@pytest.mark.parametrize(
    ("fault", "raised", "said"),
    [
        ("key", KeyError, "k"),
        ("type", TypeError, "unsupported operand"),
        ("chain", RuntimeError, "no such row"),
        ("value", UserError, r"^method: fault=value is refused \(.*own_fault\.py:19\)\.$"),
        ("shape", RuntimeError, "must match|cannot be multiplied|Expected size"),
    ],
)
def test_faults_of_own_code_are_not_taken_for_options_that_a_library_refuses(
    configure: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    raised: type,
    said: str,
) -> None:
    (tmp_path / "own_fault.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_fault", raising=False)
    config = configure(*TINY, "runtime.train_classes=12")
    config.method = {"_target_": "own_fault.Mine", "warm_up": 0, "fault": fault}
    with pytest.raises(raised, match=said) as found:
        complexity(build_method(config), 32)
    assert not isinstance(found.value, UserError) or raised is UserError
    if fault == "chain":
        assert isinstance(found.value.__cause__, KeyError)
