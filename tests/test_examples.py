"""The worked examples of the documentation: each is put where a contributor would put it, and used."""

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.errors import MissingConfigException
from PIL import Image
from torch.nn import functional as F

from dml.configuration.composition import CONF, composed
from dml.configuration.options import check
from dml.data.dataset import open_dataset
from dml.errors import UserError
from dml.evaluation import metric
from dml.evaluation.metrics import evaluate
from dml.inference.vectors import read_vectors
from dml.launch.wandb_sweep import sweep_of
from dml.training.build import build_method
from dml.training.run import run
from tests.conftest import TINY

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
FILES = sorted((EXAMPLES / "dml").rglob("*.py"))


@pytest.fixture(autouse=True)
def in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """`docs/examples/dml/x/y.py` is the module `dml.x.y`."""
    for path in FILES:
        name = ".".join(path.relative_to(EXAMPLES).with_suffix("").parts)
        spec = spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        monkeypatch.setattr(import_module(parent), last, module, raising=False)
        spec.loader.exec_module(module)


def configured(folder: Path, *options: str) -> list[str]:
    """The options of a small run, with the files of `docs/examples/conf` beside those of `conf`."""
    places = [f"paths.output_dir={folder / 'run'}", f"paths.cache_dir={folder / 'cache'}"]
    return [f"hydra.searchpath=[file://{EXAMPLES / 'conf'}]", *TINY, "trainer.max_steps=5", *places, *options]


def trained(folder: Path, *options: str) -> dict[str, float]:
    typed = configured(folder, *options)
    return run(composed(*typed), typed)


# --8<-- [start:method]
def test_learners_see_their_channels_alone(tmp_path: Path) -> None:
    config = composed(*configured(tmp_path, "method=subspaces", "method.M=2", "runtime.train_classes=5"))
    check(config)
    method = build_method(config)
    features = torch.randn(3, method.backbone.dim, 2, 2, requires_grad=True)
    method.backbone.forward = lambda images: features
    method.learners(torch.zeros(3, 3, 32, 32)).raw[:, 0].sum().backward()
    assert features.grad is not None
    touched = features.grad.abs().sum((0, 2, 3)) > 0
    assert torch.equal(touched, method.masks[0, :, 0, 0] > 0)
    assert touched.sum() == method.backbone.dim // 2


@pytest.mark.slow
def test_the_method_trains(tmp_path: Path) -> None:
    found = trained(tmp_path, "method=subspaces", "method.M=2")
    assert found["run/steps"] == 5
    assert found["learners/1/recall@1"] > 0  # there are two, each evaluated


# --8<-- [end:method]


# --8<-- [start:loss]
def test_the_loss_is_its_formula() -> None:
    from dml.losses.alignment import AlignmentUniformity

    embeddings, labels = F.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1), torch.tensor([0, 0, 1, 1, 1, 2])
    alike, spread = [], []
    for i in range(6):
        for j in range(6):
            if i != j:
                squared = float((embeddings[i] - embeddings[j]) @ (embeddings[i] - embeddings[j]))
                spread.append(np.exp(-2 * squared))
                alike += [squared] if labels[i] == labels[j] else []
    terms = AlignmentUniformity(t=2.0, weight=0.5)(embeddings, labels)
    assert float(terms["alignment"]) == pytest.approx(np.mean(alike))
    assert float(terms["uniformity"]) == pytest.approx(0.5 * np.log(np.mean(spread)))


def test_the_loss_trains(tmp_path: Path) -> None:
    assert trained(tmp_path, "loss=alignment")["run/steps"] == 5


# --8<-- [end:loss]


# --8<-- [start:data-set]
def test_the_data_set_is_what_its_card_says() -> None:
    records = open_dataset(composed(f"hydra.searchpath=[file://{EXAMPLES / 'conf'}]", "dataset=digits"))
    assert (len(records), len(records.train_rows), len(records.query_rows)) == (1797, 901, 896)
    assert records.image(0).size == (8, 8)
    assert records.image(0).mode == "RGB"


# --8<-- [end:data-set]


@pytest.mark.slow
def test_the_data_set_is_trained_on(tmp_path: Path) -> None:
    options = [one for one in TINY if not one.startswith(("dataset", "sampler"))]
    typed = [configured(tmp_path)[0], "dataset=digits", *options, f"paths.output_dir={tmp_path / 'run'}"]
    assert run(composed(*typed), typed)["data/test/images"] == 896


# --8<-- [start:metric]
def test_the_metric_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    from dml.evaluation.hit import HIT

    monkeypatch.setattr(metric, "METRICS", (*metric.METRICS, HIT))
    embeddings, labels = F.normalize(torch.randn(40, 3), dim=1), torch.arange(40) % 9
    similar = embeddings @ embeddings.T
    hits = []
    for query in range(40):
        others = [i for i in similar[query].argsort(descending=True).tolist() if i != query]
        number = int((labels == labels[query]).sum()) - 1
        hits.append(any(labels[i] == labels[query] for i in others[:number]))
    assert evaluate(embeddings, labels, clustering=False)["hit@r"] == pytest.approx(np.mean(hits))


# --8<-- [end:metric]


# --8<-- [start:protocol]
@pytest.mark.slow
def test_the_protocol_parts_classes(tmp_path: Path) -> None:
    found = trained(tmp_path, "protocol=fewer", "protocol.kept=0.5")
    assert found["data/train/classes"] == 6  # of 12
    assert found["data/test/classes"] == 12


def test_the_protocol_says_what_is_too_little(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"protocol\.kept=0\.05 leaves 1 of 12 classes"):
        trained(tmp_path, "protocol=fewer", "protocol.kept=0.05")


# --8<-- [end:protocol]


# --8<-- [start:backbone]
@pytest.mark.parametrize("method", ["baseline", "abe", "mtails", "diablo", "deml", "dces"])
def test_every_method_takes_the_backbone(tmp_path: Path, method: str) -> None:
    options = [f"method={method}", "backbone=all_conv", "image_size=32", "runtime.train_classes=5", "head.dim=16"]
    config = composed(*configured(tmp_path, *options))
    check(config)
    learners = build_method(config).eval().embed(torch.rand(2, 3, 32, 32))
    assert torch.allclose(learners.norm(dim=-1), torch.ones(learners.shape[:2]))


# --8<-- [end:backbone]


def test_a_sweep_of_wandb_finds_the_files_of_another_folder() -> None:
    place = f"hydra.searchpath=[file://{EXAMPLES / 'conf'}]"
    made = sweep_of("p", None, ["method=subspaces", place, "lr=1e-4,2e-4"])
    assert made["command"][4:6] == [place, "method=subspaces"]
    with pytest.raises(MissingConfigException):
        sweep_of("p", None, ["method=subspaces", "lr=1e-4,2e-4"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-m", "method.M=2"], marks=pytest.mark.slow, id="sweep"),
        pytest.param(["protocol=random_class_split", "protocol.splits=2"], marks=pytest.mark.exhaustive, id="protocol"),
    ],
)
def test_files_of_another_folder_are_found_by_every_training(tmp_path: Path, options: list[str]) -> None:
    """Of a sweep, and of a protocol; the method itself lies beside them, and embeds images where it is trusted."""
    (tmp_path / "mine.py").write_text("from dml.methods.abe import MHeads\n\n\nclass Mine(MHeads):\n    pass\n")
    (tmp_path / "conf" / "method").mkdir(parents=True)
    said = (CONF / "method" / "mheads.yaml").read_text().replace("dml.methods.abe.MHeads", "mine.Mine")
    assert "mine.Mine" in said
    (tmp_path / "conf" / "method" / "mine.yaml").write_text(said)
    places = [f"paths.output_dir={tmp_path / 'run'}", f"paths.cache_dir={tmp_path / 'cache'}"]
    if "-m" in options:
        places[0] = f"paths.sweep_dir={tmp_path / 'run'}"
    command = [sys.executable, "-m", "dml.run", *options, f"hydra.searchpath=[file://{tmp_path / 'conf'}]", *TINY]
    few = ["method=mine", "trainer.max_steps=1", *places]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}"}
    done = subprocess.run([*command, *few], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    trained = sorted(file.parent for file in (tmp_path / "run").glob("*/metrics.json"))
    assert trained
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    embed = [sys.executable, "-m", "dml.embed", trained[0], tmp_path / "a.png", "-o", tmp_path / "vectors.npz"]
    done = subprocess.run(embed, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    assert "asks for mine.Mine at method" in done.stderr
    done = subprocess.run(embed, capture_output=True, text=True, check=False, env=env | {"DML_TRUST": "mine"})
    assert done.returncode == 0, done.stderr
    assert read_vectors(tmp_path / "vectors.npz").embeddings.shape == (1, 16)
