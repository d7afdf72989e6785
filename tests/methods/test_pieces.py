"""`trainer.micro_batch`: a batch embedded in pieces has the gradient of the whole, for every method and loss."""

import copy
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dml.configuration.composition import composed
from dml.errors import UserError
from dml.methods.base import Method
from dml.methods.dces import DCES, Schedule
from dml.methods.output import Output
from dml.methods.pieces import embed_in_pieces
from dml.models.gsp import GeneralizedSumPool
from dml.models.heads import LearnsLater
from dml.runs.folder import RunFolder
from dml.runs.log import read_metrics
from dml.training import run as train
from dml.training.build import build_method
from dml.training.trainer import trainer_of
from tests.components import components
from tests.conftest import TINY, loss_of
from tests.methods.test_compile import with_eager_backend
from tests.test_resume import outcome

pytestmark = pytest.mark.usefixtures("one_thread")

Configure = Callable[..., DictConfig]
Found = dict[str, Tensor]

METHODS = components("method")
LOSSES = ["contrastive", "multi_similarity", "margin", "proxy_anchor", "xbm"]
QUICK = [(name, LOSSES[i % len(LOSSES)]) for i, name in enumerate(METHODS)]
EXHAUSTIVE, SGD, ANOMALY = pytest.mark.exhaustive, "optimizer=sgd", "+trainer.detect_anomaly=true"
FROZEN = "backbone.batch_norm=running"
BATCH, PIECE = 16, 4
LABELS = torch.arange(BATCH) // 4
RUN = [*TINY, FROZEN, "protocol.clustering=false"]  # batches of 16


class Trained(nn.Module):
    """What DDP wraps."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.method, images, labels)


def exact(*options: str) -> Method:
    """An untrained method in double precision, always the same."""
    small = ["dataset=glyphs", "backbone=small", "head.dim=24", "image_size=32", "runtime.train_classes=5", FROZEN]
    torch.manual_seed(0)
    return build_method(composed(*small, *options)).double().train()


def drawn(step: int) -> Tensor:
    """The images of a step."""
    return torch.rand(BATCH, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def take_turns(method: Method, step: int) -> None:
    """In DCES the first step is that of a learner, the second that of the full embedding."""
    if isinstance(method, DCES):
        method.schedule = Schedule(period=1, merged_from=1 - step, whole_from=2)
        method.rows, method.clusters = np.arange(BATCH), np.ones(BATCH, np.int64)
        method.data = SimpleNamespace(batch_rows=[0])


def gradients(method: Method, micro_batch: int | None, steps: int = 2) -> Found:
    """Loss and gradients of each step, of which a memory has the one before: of this process, or of its group."""
    method.micro_batch = micro_batch
    trained, rank, world = Trained(method), 0, 1
    if torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        trained = DistributedDataParallel(trained)
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    found = {}
    for step in range(steps):
        take_turns(method, step)
        method.zero_grad()
        torch.manual_seed(step)
        loss = trained(drawn(step)[share], LABELS[share])
        loss.backward()
        found[f"loss of step {step}"] = loss.detach()
        found |= {f"{name} at step {step}": p.grad for name, p in method.named_parameters() if p.grad is not None}
    return found


def in_pieces(cases: list[tuple[str, str]]) -> list[Found]:
    return [gradients(exact(f"method={name}", f"loss={loss}"), PIECE) for name, loss in cases]


def assert_whole(cases: list[tuple[str, str]], found: list[Found]) -> None:
    """Against one process with the whole batch."""
    for (name, loss), ours in zip(cases, found, strict=True):
        whole = gradients(exact(f"method={name}", f"loss={loss}"), None)
        assert ours.keys() == whole.keys()
        if loss in ("margin", "proxy_anchor"):
            assert any(bool(value.any()) for what, value in whole.items() if what.startswith("losses."))
        for what, value in whole.items():
            apart = float((ours[what] - value).abs().max()) / max(float(value.abs().max()), 1e-3)
            assert apart < 1e-10, f"{name}, {loss}: {what} differs by {apart:.1g}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss"), QUICK)
def test_the_gradient_is_that_of_the_whole_batch(name: str, loss: str) -> None:
    assert_whole([(name, loss)], in_pieces([(name, loss)]))


@EXHAUSTIVE
def test_two_ranks(on_ranks: Callable[..., list[Any]]) -> None:
    """DDP averages once; what the method computes beside embeddings and the loss's parameters are those of all."""
    cases = [("gsp", "proxy_anchor")]
    for of_rank in on_ranks(2, in_pieces, cases):
        assert_whole(cases, of_rank)


@EXHAUSTIVE
@pytest.mark.parametrize("world", [1, 2])
def test_every_method_with_every_loss(on_ranks: Callable[..., list[Any]], world: int) -> None:
    cases = [(name, loss) for name in METHODS for loss in LOSSES]
    for of_rank in on_ranks(2, in_pieces, cases) if world > 1 else [in_pieces(cases)]:
        assert_whole(cases, of_rank)


@pytest.mark.parametrize(
    "options",
    [
        ["method=abe", "method.checkpointing=true"],
        ["method=baseline", "method.activation_decay=0.01"],
        ["method=deml", "method.adversary=hinge", "method.I=1"],
        ["method=gsp", "head.then=gemean", "head.solver=fixed_point"],
    ],
    ids=" ".join,
)
def test_other_ways_through_a_method(options: list[str]) -> None:
    whole = gradients(exact(*options), None, steps=1)
    torch.testing.assert_close(gradients(exact(*options), PIECE, steps=1), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_an_objective_knows_of_a_pass_its_output_alone(name: str) -> None:
    """Values and gradients, on a copy of the method through which no image went."""
    found = []
    for apart in (False, True):
        method = exact(f"method={name}")
        other = copy.deepcopy(method) if apart else method
        take_turns(other, 0)
        output = method.learners(method.normalized(drawn(0)))
        read = Output(output.raw.detach(), **{name: value.detach() for name, value in output.auxiliary.items()})
        tensors = [read.raw, *read.auxiliary.values()]
        for tensor in tensors:
            tensor.requires_grad_()
        torch.manual_seed(1)
        terms = other.objective(read, {"label": LABELS, "index": torch.arange(BATCH)})
        found.append((terms, torch.autograd.grad(sum(terms.values()), tensors)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Noisy(nn.Module):
    """Draws, and notes on how many images."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.passes = network, []

    def forward(self, images: Tensor) -> Tensor:
        self.passes.append(len(images))
        return torch.nn.functional.dropout(self.network(images), 0.5)


def test_the_second_pass_draws_what_the_first_drew() -> None:
    """By hand: all graphs kept, each piece with what it drew. What is drawn afterwards goes on behind the first."""
    found = []
    for by_hand in (False, True):
        network = Noisy(exact("method=baseline", "loss=margin").backbone)

        def learners(images: Tensor, network: Noisy = network) -> Output:
            return Output(network(images).flatten(1)[:, None])

        torch.manual_seed(3)
        if by_hand:
            output = Output.joined([learners(piece) for piece in drawn(0).split(5)])
        else:
            output = embed_in_pieces(learners, drawn(0), 5, [])
        output.embeddings[:8].sub(output.embeddings[8:]).square().sum().backward()
        found.append([output.raw.detach(), torch.rand(3), *(p.grad for p in network.parameters())])
        # The last piece comes first in the backward pass.
        assert network.passes == [5, 5, 5, 1] + ([] if by_hand else [1, 5, 5, 5])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


class Awaits(LearnsLater):
    """Waits for ever, and notes what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shown = nn.Parameter(torch.zeros(())), []

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.weight

    def resting(self) -> list[nn.Parameter]:
        return [self.weight]

    def summary(self, inputs: Tensor) -> Tensor:
        return inputs.detach()

    def look(self, seen: Tensor) -> None:
        self.shown.append(len(seen))


def test_what_waiting_modules_are_shown_changes_no_draw() -> None:
    found = []
    for waiting in (False, True):
        awaits = Awaits()

        def learners(images: Tensor, awaits: Awaits = awaits) -> Output:
            return Output(torch.nn.functional.dropout(awaits(images.flatten(1)), 0.5)[:, None])

        torch.manual_seed(3)
        output = embed_in_pieces(learners, drawn(0), 5, [awaits] if waiting else [])
        found.append([output.raw.detach(), torch.rand(3)])
        assert awaits.shown == ([BATCH] if waiting else [])
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Keeps(torch.autograd.Function):
    """Keeps a tensor for its backward pass, and notes how many such tensors there are at either pass."""

    made: ClassVar[list[weakref.ref[Tensor]]] = []
    alive: ClassVar[list[int]] = []

    @classmethod
    def note(cls) -> None:
        cls.alive.append(sum(one() is not None for one in cls.made))

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(kept := values + 1)
        Keeps.made.append(weakref.ref(kept))
        Keeps.note()
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.saved_tensors  # noqa: B018 (asks for the second pass)
        Keeps.note()
        return gradient


@pytest.mark.parametrize("size", [3, 12])
def test_one_piece_at_a_time_is_kept(size: int) -> None:
    Keeps.made.clear()
    Keeps.alive.clear()
    layers, images = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), torch.rand(12, 4)

    def learners(piece: Tensor) -> Output:
        for layer in layers:
            piece = Keeps.apply(layer(piece))
        return Output(piece[:, None])

    embed_in_pieces(learners, images, size, []).raw.sum().backward()
    assert len(Keeps.made) == 2 * 3 * (12 // size)
    assert max(Keeps.alive) == 3  # of three layers
    Keeps.alive.clear()
    learners(images).raw.sum().backward()
    assert len(Keeps.alive) == 2 * 3


def test_sums_of_pieces_are_not_rounded_to_half_precision() -> None:
    """A weight that autocast keeps rounded would get one gradient in bfloat16, added to piece by piece."""
    layer = nn.Linear(8, 8, bias=False)
    images = torch.rand(64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        output = embed_in_pieces(lambda piece: Output(layer(piece)[:, None]), images, 1, [])
    output.raw.sum().backward()
    rounded = images.bfloat16().float()  # each piece's own gradient
    torch.testing.assert_close(layer.weight.grad, rounded.sum(0).expand(8, 8), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["method=gsp"],
        ["method=diablo", "method.N=2", "method.shared_head=true", "head=gsp"],  # a head that a pass calls twice
        ["method=deml", "method.I=1", "method.J=2", "head=gsp"],  # that the adversary calls, too
        ["method=abe", "head=gsp"],
    ],
    ids=" ".join,
)
def test_prototypes_are_awaited_as_in_whole_batches(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dml.models.gsp.SEEDS", 40)
    found = []
    for micro_batch in (None, PIECE):
        method = exact(*options, "head.init=kcenter", "head.m=4", "head.init_steps=1")
        values = gradients(method, micro_batch, steps=4)
        pools = [module for module in method.modules() if isinstance(module, GeneralizedSumPool)]
        assert all(not pool.waiting and pool.looks for pool in pools)
        found.append((values, [(pool.kept, pool.steps, pool.prototypes.detach(), pool.pooled) for pool in pools]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


# Runs.


def trained(configure: Configure, folder: Path, *options: str) -> dict[str, Any]:
    chosen = [*RUN, "trainer.max_steps=4", "protocol.every=4", f"paths.output_dir={folder}", *options]
    train.run(configure(*chosen), chosen)
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (["method=abe", "trainer.precision=64-true", "trainer.gradient_clip_val=0.01"], 1e-9),
        pytest.param(
            ["method=dces", "method.K=2", "method.T=1", "trainer.precision=64-true", ANOMALY], 1e-9, marks=EXHAUSTIVE
        ),
        pytest.param(["method=gsp", "head.m=4", "trainer.precision=bf16-mixed", SGD], 1e-3, marks=EXHAUSTIVE),
    ],
    ids=["clipped", "dces", "bf16-mixed"],
)
def test_a_run_in_pieces_is_the_run_of_whole_batches(
    configure: Configure, tmp_path: Path, options: list[str], tolerance: float
) -> None:
    whole = trained(configure, tmp_path / "whole", *options)
    pieces = trained(configure, tmp_path / "pieces", *options, f"trainer.micro_batch={PIECE}")
    torch.testing.assert_close(pieces, whole, rtol=tolerance, atol=tolerance)


@EXHAUSTIVE
def test_two_processes_in_pieces_are_one_with_whole_batches(configure: Configure, tmp_path: Path) -> None:
    """The command line, Lightning's launcher and its DDP."""
    options = ["method=gsp", "head.m=4", "trainer.precision=64-true", "loss=proxy_anchor"]
    whole = trained(configure, tmp_path / "whole", *options)
    options = [*RUN, "trainer.max_steps=4", "protocol.every=4", *options, f"trainer.micro_batch={PIECE}"]
    options += ["trainer=ddp", "trainer.devices=2", "trainer.sync_batchnorm=false", "trainer.accelerator=cpu"]
    folders = [f"paths.output_dir={tmp_path / 'two'}", f"paths.cache_dir={tmp_path / 'cache'}"]
    subprocess.run([sys.executable, "-m", "dml.run", *options, *folders], check=True, capture_output=True)
    two = torch.load(tmp_path / "two" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(two, whole, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_with_compiled_learners(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["trainer.precision=64-true", f"trainer.micro_batch={PIECE}"]
    plain = trained(configure, tmp_path / "plain", *options)
    called = with_eager_backend(monkeypatch)
    torch.testing.assert_close(trained(configure, tmp_path / "compiled", *options, "trainer.compile=true"), plain)
    assert called == [PIECE] * 4 * 2 * (BATCH // PIECE)


@EXHAUSTIVE
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize("name", ["abe", "gsp", "deml"])
def test_with_inductor(configure: Configure, tmp_path: Path, name: str) -> None:
    options = [f"method={name}", "trainer.precision=64-true", f"trainer.micro_batch={PIECE}"]
    plain = trained(configure, tmp_path / "plain", *options)
    compiled = trained(configure, tmp_path / "compiled", *options, "trainer.compile=true")
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_stopped_and_resumed_equals_undisturbed(configure: Configure, tmp_path: Path) -> None:
    """A memory, draws of a miner and a side loss that is weighed in the first steps."""
    options = [
        *RUN,
        f"trainer.micro_batch={PIECE}",
        "method=abe",
        "loss=xbm",
        "loss.loss.memory_size=64",
        "trainer.checkpoint_every=4",
    ]
    train.run(configure(*options), options)
    config = configure(*options, f"paths.output_dir={tmp_path / 'again'}")
    folder = RunFolder(tmp_path / "again")
    parts, trainer = train.prepare_run(config, folder)
    folder.open(config, [])

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        if trainer.global_step == 6:  # two steps past a checkpoint
            raise Stop

    parts.method.on_train_batch_end = stop
    with pytest.raises(Stop):
        train.fit(config, folder, parts, trainer)
    train.run(config, options)
    one, other = outcome(tmp_path / "run"), outcome(tmp_path / "again")
    assert one[:2] == other[:2]
    assert all(torch.equal(one[2][name], value) for name, value in other[2].items())


@pytest.mark.slow
def test_a_run_goes_on_in_other_pieces(configure: Configure, tmp_path: Path) -> None:
    """A batch that did not fit into memory does not cost the run."""
    shorter = [*RUN, "trainer.max_steps=2"]
    train.run(configure(*shorter), shorter)
    longer = [*RUN, "trainer.max_steps=4", "trainer.micro_batch=8"]
    assert train.run(configure(*longer), longer)["run/steps"] == 4


@pytest.mark.slow
def test_terms_that_are_not_finite_are_named(configure: Configure, tmp_path: Path) -> None:
    options = [*RUN, f"trainer.micro_batch={PIECE}", "lr=1e30", "trainer.max_steps=4"]
    with pytest.raises(UserError, match=r"became (nan|inf) at step \d"):
        train.run(configure(*options), options)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) < 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([FROZEN, "trainer.micro_batch=7", "sampler.batch_size=32"], r"micro_batch=7 .* 32 images .* choose 4 or 8\."),
        ([FROZEN, "trainer.micro_batch=32"], r"micro_batch=32 does not divide the 16 images .* choose 16\."),
        (["trainer.micro_batch=8"], r"Batch norm .*: freeze its statistics with backbone\.batch_norm=running, or"),
        ([FROZEN, "trainer.micro_batch=8", "head=gsop"], r"Batch norm .*: choose another head, as this one has"),
        (["trainer.micro_batch=8", "head=gsop"], r"batch_norm=running, and choose another head"),
        (["trainer.micro_batch=0"], r"trainer\.micro_batch=0 has to be at least 1"),
        (["trainer.micro_batch=half"], r"trainer\.micro_batch=half"),
    ],
)
def test_what_is_refused(configure: Configure, tmp_path: Path, options: list[str], sentence: str) -> None:
    chosen = [*TINY, *options]
    with pytest.raises(UserError, match=sentence) as caught:
        train.run(configure(*chosen), chosen)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(". ") == 0
    assert not (tmp_path / "run").exists()


def test_a_device_has_its_share_of_the_batch(method_of: Callable[..., Method]) -> None:
    options = [*TINY, "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.micro_batch=16"]
    with pytest.raises(UserError, match=r"does not divide the 8 images that a device has .*: choose 8\."):
        trainer_of(composed(*options), method_of("method=baseline", FROZEN), [])


def test_without_it_nothing_is_done_twice(method_of: Callable[..., Method], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dml.methods.base.embed_in_pieces", None)
    method = method_of("method=baseline", "loss=multi_similarity")
    loss_of(method, torch.rand(4, 3, 32, 32), torch.tensor([0, 0, 1, 1])).backward()
