"""DeML: widths, scales, the game of the adversary, and that DeML(1,1) without channel attention is its baseline."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from omegaconf import DictConfig
from torch.nn import functional as F

from dml.data.datamodule import DataModule
from dml.errors import UserError
from dml.evaluation.collecting import embed_batches
from dml.evaluation.evaluator import self_cosine
from dml.evaluation.metrics import evaluate
from dml.losses import functional
from dml.methods.base import Method
from dml.methods.deml import Adversary
from dml.methods.output import Output
from dml.models.attention import crop_and_zoom, object_attention
from dml.runs.folder import RunFolder
from dml.runs.log import read_metrics
from dml.training.rebuild import load_method
from dml.training.run import prepare_run, run
from tests.conftest import TINY, objective_of

pytestmark = pytest.mark.usefixtures("one_thread")
MethodOf = Callable[..., Method]


def deml(method_of: MethodOf, *options: str) -> Any:
    """With the paper's loss, which the tests write out."""
    return method_of("method=deml", "loss=deml/binomial", *options)


def test_nine_learners_of_512_have_56_dimensions(method_of: MethodOf) -> None:
    method = deml(method_of, "method.I=3", "method.J=3", "head.dim=512").eval()
    embeddings = method.embed(torch.rand(2, 3, 32, 32))
    assert embeddings.shape == (2, 9, 56)
    assert len(method.losses) == 9


def test_learners_are_those_of_the_scales_in_turn(method_of: MethodOf) -> None:
    """By hand: each scale on what the one before found, each learner behind its channel attention, one G a scale."""
    method = deml(method_of, "method.I=3", "method.J=2").eval()
    images = torch.rand(2, 3, 32, 32)
    images[0, :, 4:16, 10:22] += 2
    seen, rows = method.normalize(images), []
    regions = method.walk(seen)[1]
    assert len(regions) == 2
    for i, scale in enumerate(method.scales):
        maps = scale.F(seen)
        rows += [scale.heads[j](scale.G(scale.cams[j](maps))) for j in range(2)]
        if i < 2:
            seen = crop_and_zoom(seen, regions[i].boxes)
    torch.testing.assert_close(method.embed(images), F.normalize(torch.stack(rows, 1), dim=-1), rtol=1e-4, atol=1e-5)
    assert {id(p) for p in method.scales[0].parameters()}.isdisjoint(id(p) for p in method.scales[1].parameters())
    assert method.groups() == {f"scales/{i}": slice(2 * i, 2 * i + 2) for i in range(3)}
    assert method_of("method=deml", "method.I=1", "method.J=4").groups() == {}  # a single scale is all learners


def test_scales_start_from_the_same_trunk(method_of: MethodOf) -> None:
    method = deml(method_of, "method.I=2")
    for one, other in zip(method.scales[0].G.parameters(), method.scales[1].G.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_object_attention_looks_at_the_layers_asked_for(method_of: MethodOf) -> None:
    assert deml(method_of).scales[0].layers == ("block2", "block4")
    assert deml(method_of, "backbone=googlenet_v1", "image_size=64").scales[0].layers == ("inception4e", "inception5b")
    chosen = deml(method_of, "method.object_layers=[block3]").eval()
    assert len(chosen.walk(torch.rand(2, 3, 32, 32))[1]) == 1


def test_one_scale_of_one_learner_without_channel_attention_is_the_baseline(method_of: MethodOf) -> None:
    """U_d with L_act: the same parameters, loss terms and gradients."""
    loss = ["loss=deml/binomial", "method.activation_decay=0.014"]
    one = method_of("method=baseline", *loss)
    other = deml(method_of, "method.I=1", "method.J=1", "method.channel_attention=false")
    assert sum(p.numel() for p in one.parameters()) == sum(p.numel() for p in other.parameters())
    for scale in (other.scales[0],):
        merged = {**scale.F.stages, **scale.G.stages}
        for name, stage in one.backbone.stages.items():
            merged[name].load_state_dict(stage.state_dict())
        scale.heads[0].load_state_dict(one.head.state_dict())
    batch = {"image": torch.rand(8, 3, 32, 32), "label": torch.arange(8) // 2, "index": torch.arange(8)}
    losses = []
    for method in (one, other):
        method.log = lambda *_, **__: None
        method.training_step(batch, 0).backward()
        losses.append({name: float(value) for name, value in method.terms.items()})
    assert losses[0] == pytest.approx(losses[1])
    assert set(losses[0]) == {"train/metric", "train/activation", "train/loss"}
    assert losses[0]["train/activation"] > 0
    theirs, ours = (
        sorted(float(p.grad.double().norm()) for p in m.parameters() if p.grad is not None) for m in (one, other)
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_activation_decay_is_that_of_outputs_before_they_are_normalised(method_of: MethodOf) -> None:
    """Normalised ones have a constant length, and so no gradient."""
    method = deml(method_of, "method.adversary=none", "method.activation_decay=0.3", "method.unit_rows=0.7")
    method.log = lambda *_, **__: None
    batch = {"image": torch.rand(8, 3, 32, 32), "label": torch.arange(8) // 2, "index": torch.arange(8)}
    method.training_step(batch, 0)
    outputs = method.train().learners(method.normalized(batch["image"])).raw
    weights = [scale.heads[0].projection.weight for scale in method.scales]  # that all learners of a scale share
    expected = 0.3 / 2 * outputs.square().sum(-1).mean()
    expected = expected + 0.7 * sum(((w @ w.T - torch.eye(len(w))) ** 2).trace() for w in weights)
    assert method.terms["train/activation"].item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("locality", [None, 0.15])
def test_the_proposal_is_the_mean_over_layers_and_learners(method_of: MethodOf, locality: float | None) -> None:
    option = [] if locality is None else [f"method.locality={locality}"]
    method = deml(method_of, "method.I=2", "method.J=3", *option).eval()
    for cam in method.scales[0].cams:  # so that learners differ
        torch.nn.init.normal_(cam.W2.weight)
    seen = method.normalize(torch.rand(2, 3, 32, 32))
    scale = method.scales[0]
    maps, below = scale.F.tapped(seen, scale.layers)
    above = [scale.G.tapped(cam(maps), scale.layers)[1] for cam in scale.cams]
    layers = [*below.values(), *(torch.stack([one[name] for one in above]).mean(0) for name in above[0])]
    assert len(layers) == 2
    walked = [object_attention(layer, locality=locality)[:, None] for layer in layers]
    resized = [F.interpolate(one, (32, 32), mode="bilinear", align_corners=False)[:, 0] for one in walked]
    found = method.walk(seen)[1][0].proposal
    torch.testing.assert_close(found, (resized[0] + resized[1]) / 2, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(resized[0], resized[1], rtol=1e-2)


def test_the_game_has_no_term_without_an_opponent(method_of: MethodOf) -> None:
    labels = torch.arange(6) // 2
    for options in (["method.J=1"], ["method.adversary=none"]):
        method = deml(method_of, *options)
        terms = objective_of(method, torch.randn(6, 2 * method.J, 3), labels)
        assert set(terms) == {"metric"}
        assert len(method.adversaries) == 0


def test_metric_is_the_mean_over_learners(method_of: MethodOf) -> None:
    method = deml(method_of, "method.adversary=none")
    embeddings, labels = F.normalize(torch.randn(6, 8, 3), dim=-1), torch.arange(6) // 2
    apart = [functional.binomial_deviance(embeddings[:, i], labels, 2.0, 0.5, 35.0) for i in range(8)]
    torch.testing.assert_close(objective_of(method, embeddings, labels)["metric"], torch.stack(apart).mean())


def test_discrepancy_is_equation_4() -> None:
    mapped = torch.randn(5, 3, 4, dtype=torch.float64)
    total = sum(
        float((mapped[n, j] - mapped[n, k]).square().sum()) for n in range(5) for j in range(3) for k in range(3)
    )
    assert functional.discrepancy(mapped).item() == pytest.approx(total / 5, rel=1e-12)
    assert functional.discrepancy(mapped[:, :1]).item() == pytest.approx(0, abs=1e-12)


def test_both_sides_of_the_game_against_finite_differences(method_of: MethodOf) -> None:
    """The adversary goes down the discrepancy, learners go up it, each at the scale lambda_adv."""
    torch.manual_seed(0)
    method = deml(method_of, "method.I=1", "method.J=3", "method.lambda_adv=0.7", "method.balance=false").double()
    net: Adversary = method.adversaries[0]
    embeddings = F.normalize(torch.randn(4, 3, 8, dtype=torch.float64), dim=-1).requires_grad_()
    labels = torch.arange(4) // 2

    def played() -> torch.Tensor:
        batch = {"label": labels, "index": torch.arange(len(labels))}
        return method.objective(Output(embeddings, played=embeddings), batch)["adversary"]

    method.zero_grad()
    value = played()
    assert value.item() == pytest.approx(0.7 * functional.discrepancy(net(embeddings)).item())
    value.backward()
    step = 1e-6
    (weight,) = net.parameters()
    for parameter, sign in ((weight, 1), (embeddings, -1)):
        gradient = parameter.grad
        assert gradient is not None
        for at in ((0, 0), (1, 2), (2, 1)):
            with torch.no_grad():
                parameter[at].add_(step)
                above = played()
                parameter[at].sub_(2 * step)
                below = played()
                parameter[at].add_(step)
            slope = float((above - below).sum()) / (2 * step)
            if parameter is embeddings:  # at a row of numbers: each was moved
                assert float(gradient[at].sum()) == pytest.approx(sign * slope, rel=1e-4, abs=1e-7)
            else:
                assert float(gradient[at]) == pytest.approx(sign * slope, rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_the_game_is_between_the_adversary_and_f_g_and_the_cams(method_of: MethodOf) -> None:
    """Section 3.2: max over f, g, CAMs; min over the adversary. The learners' layers take no part in eq. 4."""
    method = deml(
        method_of, "method.I=2", "method.J=3", "method.lambda_adv=0.7", "method.balance=false", "head=gsop"
    ).double()
    batch = {"image": torch.rand(4, 3, 32, 32).double(), "label": torch.arange(4) // 2, "index": torch.arange(4)}
    statistics = [buffer.clone() for buffer in method.scales.buffers()]
    once = method.learners(method.normalize(batch["image"]))
    after = [buffer.clone() for buffer in method.scales.buffers()]
    for buffer, before in zip(method.scales.buffers(), statistics, strict=True):
        buffer.copy_(before)
    with torch.no_grad():
        method.learners(method.normalize(batch["image"]))  # nothing is played: one pass
    assert all(torch.equal(a, b) for a, b in zip(method.scales.buffers(), after, strict=True))
    torch.testing.assert_close(once.auxiliary["played"], once.raw)

    terms = method.compute_terms(batch)
    terms["adversary"].backward()
    got = {name: p.grad for name, p in method.named_parameters()}
    method.zero_grad()
    unit = F.normalize(method.learners(method.normalize(batch["image"])).raw, dim=-1).unflatten(1, (2, 3)).unbind(1)
    apart = [functional.discrepancy(net(e)) for net, e in zip(method.adversaries, unit, strict=True)]
    value = 0.7 * torch.stack(apart).sum()
    value.backward()
    torch.testing.assert_close(value, terms["adversary"])
    players = {"adversaries": 0, "F": 0, "G": 0, "cams": 0, "heads": 0}
    for name, parameter in method.named_parameters():
        kind = name.split(".")[0] if name.startswith("adversaries") else name.split(".")[2]
        plain, here = parameter.grad, got[name]
        if kind == "heads":
            assert here is None, name
            players[kind] += plain is not None and bool(plain.any())  # it would reach them
            continue
        assert plain is not None, name
        torch.testing.assert_close(here, plain if kind == "adversaries" else -plain, rtol=1e-6, atol=1e-9)
        players[kind] += bool(plain.any())
    assert all(players.values()), players


def test_playing_moves_learners_apart_and_never_ends() -> None:
    """Free embeddings instead of a network: what the reversed gradient does to them, the adversary playing along."""
    torch.manual_seed(0)
    net = Adversary(8, 32)
    common = F.normalize(torch.randn(64, 1, 8), dim=-1)
    embeddings = (common + 0.1 * torch.randn(64, 4, 8)).requires_grad_()
    optimizer = torch.optim.Adam([embeddings, *net.parameters()], lr=1e-2, weight_decay=2e-4)

    def agreement() -> float:
        unit = F.normalize(embeddings.detach(), dim=-1)
        return float(((unit.sum(1).square().sum(-1) - 4) / 12).mean())

    before = agreement()
    for _ in range(200):
        optimizer.zero_grad()
        value = functional.discrepancy(net(functional.reverse(F.normalize(embeddings, dim=-1))))
        value.backward()
        optimizer.step()
    assert before > 0.8
    assert agreement() < 0
    assert value.item() > 1  # of 32 at most
    weight = net.layer()
    torch.testing.assert_close(weight.T @ weight, torch.eye(8), rtol=0, atol=1e-4)
    # The adversary's part: against fixed learners it brings the discrepancy down.
    fixed = F.normalize(torch.randn(64, 4, 8), dim=-1)
    alone = torch.optim.Adam(net.parameters(), lr=1e-2)
    start = functional.discrepancy(net(fixed)).item()
    for _ in range(50):
        alone.zero_grad()
        functional.discrepancy(net(fixed)).backward()
        alone.step()
    assert 0.01 * functional.discrepancy(fixed).item() < functional.discrepancy(net(fixed)).item() < 0.9 * start


def test_an_adversary_is_orthogonal_columns_and_a_leaky_relu() -> None:
    """Its columns are those of Gram and Schmidt, with the sign of the weight that they come from."""
    torch.manual_seed(0)
    net, embeddings = Adversary(3, 5), torch.randn(4, 2, 3)
    columns: list[torch.Tensor] = []
    for column in net.weight.detach().T:
        rest = column - sum(((column @ other) * other for other in columns), torch.zeros(5))
        columns.append(rest / rest.norm())
    torch.testing.assert_close(net.layer(), torch.stack(columns, dim=1), rtol=1e-4, atol=1e-5)
    outputs = embeddings @ torch.stack(columns)
    torch.testing.assert_close(net(embeddings), torch.where(outputs > 0, outputs, outputs / 10), rtol=1e-4, atol=1e-5)
    assert (net(embeddings) < 0).any()


def test_hinge_is_the_released_codes(method_of: MethodOf) -> None:
    method = deml(
        method_of, "method.adversary=hinge", "method.I=2", "method.J=2", "method.lambda_adv=0.2", "method.balance=false"
    )
    embeddings, labels = F.normalize(torch.randn(5, 4, 6), dim=-1), torch.tensor([0, 0, 1, 1, 1])
    by_hand = 0.0
    for n in range(5):
        for a, b in ((0, 1), (2, 3)):
            by_hand += max(0.0, 2 - math.dist(embeddings[n, a].tolist(), embeddings[n, b].tolist())) ** 2 / 2 / 5
    assert objective_of(method, embeddings, labels)["hinge"].item() == pytest.approx(0.2 * by_hand, rel=1e-5)


@pytest.mark.slow
def test_learners_of_a_scale_share_their_layer_unless_told_otherwise(method_of: MethodOf) -> None:
    options = ["method.I=2", "method.J=3"]
    shared, own = (deml(method_of, *options, f"method.shared_head={shared}") for shared in (True, False))
    for method, layers in ((shared, 2), (own, 6)):
        assert len(set(method.projections())) == layers
        assert len({id(p) for scale in method.scales for p in scale.heads.parameters()}) == 2 * layers
        grouped = [p for group in method.optimizer_alone().param_groups for p in group["params"]]
        assert sorted(map(id, grouped)) == sorted(map(id, method.parameters()))
    # Only channel attention tells learners with one layer apart.
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        alike = [self_cosine(method.eval().embed(images)[:, :3]) for method in (shared, own)]
    assert alike[0] > 0.9 > 0.8 > alike[1]


def test_an_adversary_turns_at_the_papers_rate() -> None:
    torch.manual_seed(0)
    net, embeddings = Adversary(64, 128), F.normalize(torch.randn(16, 4, 64), dim=-1)
    torch.testing.assert_close(net.weight.norm(dim=0), torch.ones(64))
    before, optimizer = net.layer().detach(), torch.optim.Adam(net.parameters(), lr=1e-5)
    for _ in range(100):
        optimizer.zero_grad()
        functional.discrepancy(net(embeddings)).backward()
        optimizer.step()
    turned = float((net.layer().detach() - before).norm() / before.norm())
    assert turned > 0.005  # with entries of N(0,1) it would be a tenth of that


def test_activation_decay_is_equation_6() -> None:
    torch.manual_seed(0)
    outputs = torch.randn(5, 3, 4, dtype=torch.float64)
    weights = [torch.randn(4, 7, dtype=torch.float64) for _ in range(3)]
    decay = 0.014 / (2 * 3 * 5) * float(outputs.square().sum())
    for weight in weights:
        apart = weight @ weight.T - torch.eye(4, dtype=torch.float64)
        decay += 0.25 * float(torch.trace(apart * apart))
    assert functional.activation_decay(outputs, weights, 0.014, 0.25).item() == pytest.approx(decay, rel=1e-12)


@pytest.mark.slow
def test_figures_of_the_scales_and_pictures_of_the_boxes(configure: Callable[..., DictConfig]) -> None:
    options = ["method=deml", "method.I=2", "method.J=2", "trainer.max_steps=6", "protocol.every=6"]
    config = configure(*TINY, *options, "protocol.seen=true", "report=true")
    metrics = run(config, [])
    method, data = (
        load_method(f"{config.paths.output_dir}/checkpoints/last.ckpt"),
        prepare_run(config, RunFolder(Path("x")))[0].data,
    )
    table = embed_batches(method, data.eval_dataloader(data.train_rows), lambda batch: batch)
    expected = evaluate(table.embeddings.flatten(1), table.labels, ks=(1,), clustering=False)["recall@1"]
    assert metrics["seen/recall@1"] == pytest.approx(expected, abs=0.02)
    folder = Path(config.paths.output_dir)
    assert {f"scales/{i}/recall@1" for i in range(2)} <= metrics.keys()
    records = read_metrics(folder / "metrics.jsonl")
    terms = next(record for record in records if "train/loss" in record)
    assert {"train/metric", "train/adversary", "train/activation"} <= terms.keys()
    played = [record["train/adversary"] for record in records if "train/adversary" in record]
    assert len(played) == 6
    assert min(played) > 0
    page = (folder / "report.html").read_text()
    assert 'alt="The part of some test images that each scale sees' in page
    assert 'alt="What each learner of the first scale attends to' in page
    assert "<th>scale</th>" in page


def test_mistakes_are_told(method_of: MethodOf) -> None:
    for options, sentence in (
        (["method.I=0"], r"method\.I=0 has to be at least 1"),
        (["method.J=0"], r"method\.J=0 has to be at least 1"),
        (["method.I=5", "method.J=5"], r"head\.dim=24 leaves no dimension for each of 25 learners: make it 25 or more"),
        (["method.object_layers=[conv9]"], r"object_layers=\['conv9'\] has to be a list of stages .* block1, block2"),
        (["method.object_layers=block4"], r"object_layers=block4 has to be a list"),
        (["method.channel_attention=no"], r"method\.channel_attention=no has to be true or false"),
        (["method.channel_attention=false"], "method.shared_head=true make the 4 learners of a scale one and the same"),
        (["method.adversary=chess"], r"method\.adversary=chess has to be 'grl', 'hinge' or 'none'"),
        (["method.adversary_width=2"], r"method\.adversary_width=2 has to be at least 3"),
        (["method.lambda_adv=-1"], r"method\.lambda_adv=-1"),
        (["method.activation_decay=-1"], r"method\.activation_decay=-1"),
    ):
        with pytest.raises(UserError, match=sentence):
            deml(method_of, *options)


def test_a_width_for_the_adversary_is_no_trouble_where_none_plays(method_of: MethodOf) -> None:
    assert len(deml(method_of, "method.J=1", "method.adversary_width=1").adversaries) == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [["trainer.precision=bf16-true"], ["method.checkpointing=true"]])
def test_half_precision_and_checkpointing(
    configure: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    few = ["method=deml", "method.J=2", "trainer.max_steps=2", "protocol.clustering=false", "method.activation_decay=0"]
    metrics = run(configure(*TINY, *few, *options), [])
    assert metrics["run/steps"] == 2


@pytest.mark.slow
def test_no_pictures_of_what_there_is_not(method_of: MethodOf) -> None:
    def plots(*options: str) -> list[str]:
        method = deml(method_of, *options).eval()
        with torch.inference_mode():
            return [plot.name for plot in method.plots(torch.rand(1, 3, 32, 32), cast(DataModule, None), [])]

    assert plots() == ["regions", "attention"]
    assert plots("method.channel_attention=false", "method.shared_head=false") == ["regions"]
    assert plots("method.I=1") == ["attention"]
    assert deml(method_of).attention(torch.rand(1, 3, 32, 32)).shape == (1, 4, 32, 8, 8)
