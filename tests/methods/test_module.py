"""What Lightning asks of a method, from Python; and what a step gives to losses."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn

from dml.errors import UserError
from dml.evaluation.interval import ENDS
from dml.losses import Loss
from dml.methods.base import Method, Output
from dml.methods.recipe import Recipe
from dml.runs.folder import RunFolder
from dml.training.run import prepare_run, run
from tests.conftest import TINY, loss_of, objective_of


def plain_trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:You are using a custom batch sampler")
def test_validate_and_predict_from_python(configure: Callable[..., DictConfig], capsys: object) -> None:
    """The metrics of the run's own evaluation, and the embeddings of `embed` in the order of the rows."""
    options = [*TINY, "method=abe", "trainer.max_steps=2", "protocol.clustering=false"]
    metrics = run(configure(*options), options)
    trained = torch.load(Path(configure().paths.output_dir) / "checkpoints" / "last.ckpt", weights_only=True)
    parts, _ = prepare_run(configure(*options), RunFolder(Path("unused")))
    parts.method.load_state_dict(trained["state_dict"])
    (found,) = plain_trainer().validate(parts.method, datamodule=parts.data, verbose=False)
    same = {name for name in metrics if name.startswith(("test/", "learners/")) and not name.endswith(ENDS)}
    assert found.keys() == same - {name for name in same if name.startswith(("test/nmi", "test/f1"))}
    for name, value in found.items():
        assert value == pytest.approx(metrics[name], abs=1e-6), name
    predicted = plain_trainer().predict(parts.method, datamodule=parts.data)
    assert predicted is not None
    embeddings = torch.cat([batch for batch in predicted if isinstance(batch, Tensor)])
    images = parts.data.test_images(parts.data.eval_rows[:5])
    with torch.inference_mode():
        expected = parts.method.eval().embed(images)
    torch.testing.assert_close(embeddings[:5], expected, rtol=1e-4, atol=1e-5)
    assert len(embeddings) == len(parts.data.eval_rows)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:You are using a custom batch sampler")
def test_a_trainer_without_a_number_of_steps_is_told(configure: Callable[..., DictConfig]) -> None:
    """Lightning's own default is epochs, and batches are drawn without end."""
    parts, _ = prepare_run(configure(*TINY), RunFolder(Path("unused")))
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    with pytest.raises(UserError, match="give the trainer max_steps, not epochs alone"):
        pl.Trainer(max_epochs=1, **options).fit(parts.method, datamodule=parts.data)


class NormLoss(nn.Module):
    """Wants the norms of the outputs, which images they are, and what a method computed; gives two terms."""

    def forward(self, embeddings: Tensor, labels: Tensor, norms: Tensor, index: Tensor) -> dict[str, Tensor]:
        self.seen = norms, index
        return {"pull": embeddings.sum(), "shorter": norms.square().mean()}


def test_a_loss_gets_what_it_names_and_returns_named_terms(method_of: Callable[..., Method]) -> None:
    method = method_of("method=abe", "method.M=2", "method.lambda_div=0")
    losses = [NormLoss(), NormLoss()]
    method.losses = nn.ModuleList(Loss(loss) for loss in losses)
    raw = torch.randn(4, 2, 12, requires_grad=True)
    terms = method.objective(Output(raw), {"label": torch.tensor([0, 0, 1, 1]), "index": torch.tensor([9, 4, 6, 2])})
    assert set(terms) == {"pull", "shorter"}
    norms = raw.norm(dim=-1)
    torch.testing.assert_close(terms["shorter"], norms.square().mean(0).sum())
    torch.testing.assert_close(losses[1].seen[0], norms[:, 1])
    assert losses[0].seen[1].tolist() == [9, 4, 6, 2]
    terms["shorter"].backward()
    assert raw.grad is not None
    torch.testing.assert_close(raw.grad, raw.detach() / 2)


@pytest.mark.parametrize(
    ("name", "returned", "said"),
    [
        (
            "learners",
            torch.zeros(4, 1, 24),
            r"learners\(\) of ABE returns Tensor: it has to return Output\(raw\), \[B,L,d\]",
        ),
        ("learners", None, r"learners\(\) of ABE returns NoneType"),
        ("objective", None, r"objective\(\) of ABE returns NoneType: it has to return a scalar, or named scalars"),
        ("objective", {}, r"objective\(\) of ABE returns no terms"),
        ("objective", torch.zeros(3), r"objective\(\) of ABE returns a tensor of shape \[3\]"),
        ("objective", {"metric": 0.5}, r"objective\(\) of ABE returns float"),
        ("new_modules", nn.Linear(2, 2), r"new_modules\(\) of ABE returns Linear: it has to return modules, as in"),
        ("new_modules", None, r"new_modules\(\) of ABE returns NoneType"),
    ],
)
def test_what_a_method_of_one_s_own_may_return_wrong(
    method_of: Callable[..., Method], monkeypatch: pytest.MonkeyPatch, name: str, returned: object, said: str
) -> None:
    method = method_of("method=abe")
    monkeypatch.setattr(method, name, lambda *_: returned)
    batch = torch.rand(4, 3, 32, 32), torch.tensor([0, 0, 1, 1])
    with pytest.raises(UserError, match=said):
        method.optimizer_alone() if name == "new_modules" else loss_of(method, *batch)


def test_an_objective_may_be_one_scalar(method_of: Callable[..., Method], monkeypatch: pytest.MonkeyPatch) -> None:
    method = method_of("method=abe")
    monkeypatch.setattr(method, "objective", lambda output, batch: output.raw.square().sum())
    assert loss_of(method, torch.rand(4, 3, 32, 32), torch.tensor([0, 0, 1, 1])) > 0


def test_the_ensemble_is_of_unit_norm_and_knows_its_raw_norm() -> None:
    raw = torch.randn(5, 3, 4)
    embeddings, norms = Output(raw).ensemble()
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(norms, raw.flatten(1).norm(dim=1))


@pytest.mark.parametrize("name", ["baseline", "diablo", "dces"])
def test_terms_of_any_name_pass_through_a_method(method_of: Callable[..., Method], name: str) -> None:
    method = method_of(f"method={name}", *(["method.K=1"] if name == "dces" else []))
    method.losses = nn.ModuleList([Loss(NormLoss())])
    raw = torch.randn(4, 3 if name == "diablo" else 1, 24 // (4 if name == "diablo" else 1))
    assert set(objective_of(method, raw, torch.tensor([0, 0, 1, 1]))) == {"pull", "shorter"}


@pytest.mark.parametrize("options", [["method=baseline"], ["method=abe", "method.M=2"]], ids=str)
def test_parameters_of_a_loss_that_finds_nothing_take_part(
    method_of: Callable[..., Method], options: list[str]
) -> None:
    """Under DDP every parameter has to, in every step: here the batch has no positive pair."""
    method = method_of(*options, "loss=margin")
    loss_of(method, torch.rand(4, 3, 32, 32), torch.arange(4)).backward()
    assert all(parameter.grad is not None for parameter in method.losses.parameters())


def test_a_method_replaces_no_term_of_a_loss(method_of: Callable[..., Method]) -> None:
    """Also a method that is not dml's own; terms of one loss for each learner are added up."""
    method = method_of("method=mheads", "method.M=2", "loss=margin")
    output = method.learners(torch.rand(6, 3, 32, 32))
    terms = method.objective(output, {"label": torch.arange(3).repeat(2), "index": torch.arange(6)})
    terms["mine"] = torch.zeros(())
    name = next(iter(terms))
    with pytest.raises(UserError, match=rf"^the loss names a term {name}, which the method uses itself"):
        terms[name] = torch.zeros(())


def test_a_loss_does_not_take_the_name_of_a_methods_own_term(method_of: Callable[..., Method]) -> None:
    class Apart(nn.Module):
        def forward(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"divergence": embeddings.sum()}

    method = method_of("method=abe", "method.M=2")
    method.losses = nn.ModuleList([Loss(Apart()), Loss(Apart())])
    with pytest.raises(UserError, match=r"^the loss names a term divergence, which the method uses itself: "):
        objective_of(method, torch.randn(4, 2, 12), torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("name", ["loss", "embeddings", "lr/backbone", "gradient_norm/head"])
def test_a_loss_does_not_take_the_name_of_something_that_is_logged(method_of: Callable[..., Method], name: str) -> None:
    class Named(nn.Module):
        def forward(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {name: embeddings.sum()}

    method = method_of("method=baseline")
    method.losses = nn.ModuleList([Loss(Named())])
    with pytest.raises(UserError, match=rf"^the loss names a term {name}, which every training logs: "):
        objective_of(method, torch.randn(4, 1, 24), torch.tensor([0, 0, 1, 1]))


def test_a_loss_that_needs_what_a_method_does_not_compute(method_of: Callable[..., Method]) -> None:
    class Bright(nn.Module):
        def forward(self, embeddings: Tensor, labels: Tensor, brightness: Tensor) -> Tensor:
            return embeddings.sum() * brightness.mean()

    method = method_of("method=baseline")
    method.losses = nn.ModuleList([Loss(Bright())])
    batch = {"label": torch.tensor([0, 1]), "index": torch.tensor([0, 1])}
    with pytest.raises(UserError, match=r"^Bright needs brightness, .* available are index, norms\.$"):
        method.objective(Output(torch.rand(2, 1, 24)), batch)
    method.objective(Output(torch.rand(2, 1, 24), brightness=torch.rand(2)), batch)


@pytest.mark.parametrize(
    ("precision", "clip", "fused"),
    [
        ("32-true", 1.0, True),
        ("bf16-true", 1.0, True),
        ("bf16-mixed", None, True),
        ("bf16-mixed", 1.0, False),
        ("16-mixed", None, False),
    ],
)
def test_what_lightning_clips_is_not_fused(
    method_of: Callable[..., Method],
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    clip: float | None,
    fused: bool,
) -> None:
    method = method_of("method=baseline")
    monkeypatch.setattr(Method, "device", torch.device("cuda"))
    monkeypatch.setattr(method, "_trainer", SimpleNamespace(precision=precision, gradient_clip_val=clip))
    assert method._fused() == ({"fused": True} if fused else {})


def test_lightning_does_not_clip_what_is_fused() -> None:
    """Once it does, the rule that is tested above has no reason any more."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], fused=True)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        MixedPrecision("bf16-mixed", "cpu").clip_gradients(optimizer, 1.0)


@pytest.mark.parametrize(
    ("device", "said", "fused"), [("cuda", {}, True), ("cpu", {}, None), ("cuda", {"foreach": True}, None)]
)
def test_optimizers_are_fused_on_a_gpu(
    method_of: Callable[..., Method], monkeypatch: pytest.MonkeyPatch, device: str, said: dict[str, bool], fused: bool
) -> None:
    given: dict[str, object] = {}

    def optimizer(
        groups: list[dict[str, object]], lr: float = 0.1, foreach: object = None, fused: object = None
    ) -> None:
        given.update(groups=groups, fused=fused, foreach=foreach)

    method = method_of("method=baseline")
    monkeypatch.setattr(Method, "device", torch.device(device))
    monkeypatch.setattr(Recipe, "optimizer_of", lambda self, groups, **options: self.optimizer(groups, **options))
    assert method.recipe is not None
    method.recipe = replace(method.recipe, optimizer=partial(optimizer, **said))
    method.optimizer_alone()
    assert given["fused"] is fused
    assert given["groups"]
