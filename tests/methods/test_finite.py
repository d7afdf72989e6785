"""Terms that become NaN or infinite are found late, and named as if they had been found at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig

from dml.errors import UserError
from dml.methods.base import Batch, Method, Output
from dml.methods.baseline import Baseline
from dml.methods.dces import DCES
from dml.methods.finite import FiniteTerms, NonFiniteLoss
from dml.runs.log import read_metrics
from dml.training.build import build
from dml.training.run import run
from tests.conftest import TINY

Configure = Callable[..., DictConfig]
NanAt = Callable[..., None]
RARE = ["trainer.log_every=100", "protocol.every=100", "trainer.checkpoint_every=100", "protocol.clustering=false"]
NAN, INF = float("nan"), float("inf")


def seen(*steps: dict[str, float]) -> FiniteTerms:
    finite = FiniteTerms()
    for number, values in enumerate(steps, start=1):
        with finite.step(number) as terms:
            terms.update({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})
    return finite


def fail(finite: FiniteTerms, step: int, value: float) -> None:
    with finite.step(step) as terms:
        terms["a"] = torch.tensor(value)
        raise IndexError("a miner's own words")


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([{"a": 1, "b": 1}, {"a": 1, "b": NAN}, {"a": INF, "b": INF}], "'b' became nan at step 2"),
        ([{"a": 1, "b": 1}, {"a": -INF, "b": NAN}, {"a": 1, "b": 1}], "'a' became -inf at step 2"),
        ([{"a": 1}, {"a": 1, "b": INF}, {"a": NAN}], "'b' became inf at step 2"),
        ([{"b": 1}, {"a": NAN, "b": 1}, {"b": NAN}], "'a' became nan at step 2"),
        ([{}, {"a": NAN}], "'a' became nan at step 2"),
    ],
)
def test_the_first_of_all_is_named(steps: list[dict[str, float]], sentence: str) -> None:
    with pytest.raises(NonFiniteLoss, match=f"^The loss term {sentence}: lower lr or set trainer.gradient_clip_val"):
        seen(*steps).check()


def test_finite_terms_of_any_size_pass() -> None:
    finite = seen({"a": 1e300, "b": 0}, {"a": -1e300})
    finite.check()
    with pytest.raises(IndexError, match="own words"):
        fail(finite, 3, 1.0)
    finite.check()


def test_what_fails_on_terms_that_are_not_finite() -> None:
    finite = FiniteTerms()
    for step in (7, 8):  # the second on what the first left
        with pytest.raises(NonFiniteLoss, match="'a' became nan at step 7") as caught:
            fail(finite, step, NAN)
        assert isinstance(caught.value.__cause__, IndexError)


def test_a_step_of_a_method(method_of: Callable[..., Method]) -> None:
    batch = {"image": torch.rand(2, 3, 32, 32), "label": torch.tensor([0, 0]), "index": torch.tensor([0, 1])}
    method = method_of("method=abe")
    method.objective = lambda *_: {"metric": torch.tensor(1.0), "divergence": torch.tensor(INF)}
    method.training_step(batch, 0)
    with pytest.raises(NonFiniteLoss, match="'divergence' became inf at step 1"):
        method.finite.check()

    def fails(output: Output, batch: Batch) -> dict[str, torch.Tensor]:
        raise IndexError(str(output.raw.isnan().any()))

    method = method_of("method=abe")
    method.objective = fails
    with pytest.raises(IndexError, match="False"):
        method.training_step(batch, 0)
    with pytest.raises(NonFiniteLoss, match="'embeddings' became nan at step 1"):
        method.training_step({**batch, "image": torch.full((2, 3, 32, 32), NAN)}, 0)


@pytest.fixture
def nan_at(monkeypatch: pytest.MonkeyPatch) -> NanAt:
    """Makes the loss of a step NaN; the weights that it leaves are NaN too."""

    def nan_at(step: int, kind: type[Method] = Baseline) -> None:
        proper = kind.objective

        def objective(method: Method, output: Output, batch: Batch) -> dict[str, torch.Tensor]:
            terms = proper(method, output, batch)
            return {name: t * NAN if method.global_step + 1 == step else t for name, t in terms.items()}

        monkeypatch.setattr(kind, "objective", objective)

    return nan_at


@pytest.mark.parametrize(
    ("due", "logged"),
    [
        ("trainer.log_every=3", []),
        ("trainer.checkpoint_every=3", [1]),  # the first step of a run with fewer steps than trainer.log_every
        ("protocol.every=3", [1]),
        ("trainer.max_steps=3", [1]),
        ("trainer.log_every=1", [1]),
    ],
)
def test_a_run_names_the_step_and_saves_nothing_behind_it(
    configure: Configure, tmp_path: Path, nan_at: NanAt, due: str, logged: list[int]
) -> None:
    nan_at(2)
    options = [*TINY, *RARE, due]
    with pytest.raises(UserError, match="'metric' became nan at step 2"):
        run(configure(*options), options)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [file.name for file in checkpoints.iterdir()] == ["non_finite.ckpt"]
    found = torch.load(checkpoints / "non_finite.ckpt", weights_only=True)["global_step"]
    assert found == (2 if due == "trainer.log_every=1" else 3)
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, *logged]


@pytest.mark.slow
def test_anomalies_in_the_backward_pass(configure: Configure, nan_at: NanAt) -> None:
    nan_at(2)
    options = [*TINY, *RARE, "+trainer.detect_anomaly=true"]
    with (
        pytest.warns(UserWarning, match="Error detected in|Anomaly Detection"),
        pytest.raises(UserError, match="'metric' became nan at step 2"),
    ):
        run(configure(*options), options)


@pytest.mark.slow
@pytest.mark.parametrize("assignments", ["fresh", "running"])
def test_clusters_between_two_logs(configure: Configure, nan_at: NanAt, assignments: str) -> None:
    nan_at(2, DCES)
    options = [*TINY, *RARE, "method=dces", "method.K=2", "method.T=1", f"method.assignments_from={assignments}"]
    options += ["trainer.max_steps=40"]
    with pytest.raises(UserError, match="'metric' became nan at step 2"):
        run(configure(*options), options)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:You are using a custom batch sampler")
def test_from_python_the_end_of_the_training_looks(configure: Configure, nan_at: NanAt) -> None:
    nan_at(2)
    parts = build(configure(*TINY))
    plain = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(**plain, max_steps=3, limit_val_batches=0, enable_model_summary=False)
    with pytest.raises(NonFiniteLoss, match="'metric' became nan at step 2"):
        trainer.fit(parts.method, datamodule=parts.data)
