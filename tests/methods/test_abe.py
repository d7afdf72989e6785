"""ABE and its relatives: the paper's sizes, its formulas a learner at a time, and what makes learners differ."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dml.errors import UserError
from dml.methods.abe import ABE, MHeads, MTails
from dml.methods.base import Method
from dml.training.complexity import complexity
from tests.conftest import loss_of, objective_of

pytestmark = pytest.mark.usefixtures("one_thread")
MethodOf = Callable[..., Method]
FAMILY = ["abe", "mheads", "mheads_att", "mtails"]
FROZEN = "backbone.batch_norm=running"

# Tables 1 and 8: method, M, total width, params in 1e7, flops in 1e9, as printed.
PUBLISHED = [
    ("baseline", 1, 512, "0.65", "1.58"),
    ("mheads", 2, 512, "1.18", "2.25"),
    ("mheads", 4, 512, "2.24", "3.60"),
    ("mheads", 8, 512, "4.36", "6.28"),
    ("abe", 1, 512, "0.97", "2.21"),
    ("abe", 2, 512, "0.98", "2.96"),
    ("abe", 4, 512, "1.05", "4.46"),
    ("abe", 8, 512, "1.20", "7.46"),
    ("abe", 1, 64, "0.92", "2.21"),
    ("abe", 2, 128, "0.96", "2.96"),
    ("abe", 4, 256, "1.04", "4.46"),
    ("mheads_att", 8, 512, "4.96", "7.46"),
    ("mtails", 8, 512, "1.08", "12.7"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "learners", "dim", "params", "flops"), PUBLISHED)
def test_the_sizes_of_tables_1_and_8(
    method_of: MethodOf, name: str, learners: int, dim: int, params: str, flops: str
) -> None:
    options = [] if name == "baseline" else [f"method.M={learners}"]
    method = method_of(f"method={name}", *options, f"head.dim={dim}", "backbone=googlenet_v1")
    size = complexity(method, 224)
    digits = len(flops.split(".")[1])
    assert (f"{size['params'] / 1e7:.2f}", f"{size['flops'] / 1e9:.{digits}f}") == (params, flops)


def definition(method: Method, images: Tensor) -> Tensor:
    """Section 3 and the appendix, a learner at a time: `B_m(x) = G_m(S_m(x) * A_m(S_m(x)))`."""
    assert isinstance(method, ABE | MHeads | MTails)
    learners = []
    for m in range(method.M):
        features = (method.spatials[m] if isinstance(method, MTails) else method.spatial)(images)
        masks = None if isinstance(method, MTails) else method.masks
        if masks is not None:
            rows = slice(m * masks.channels, (m + 1) * masks.channels)
            logits = torch.nn.functional.conv2d(masks.C(features), masks.A.weight[rows], masks.A.bias[rows])
            features = features * torch.sigmoid(logits)
        g = method.embeddings[m] if isinstance(method, MHeads) else method.embedding
        head = method.heads[m] if isinstance(method, MHeads) else method.head
        learners.append(head(g(features)))
    return torch.stack(learners, dim=1)


@pytest.mark.parametrize("name", FAMILY)
def test_stacked_learners_are_looped_learners(method_of: MethodOf, name: str) -> None:
    """Values and gradients, in double precision, batch norm frozen."""
    method = method_of(f"method={name}", "method.M=3", FROZEN).double()
    images = method.normalize(torch.rand(4, 3, 32, 32, dtype=torch.float64))
    outputs = [method.learners(images).raw, definition(method, images)]
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(outputs[0])
    parameters = [p for p in method.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad((out * weights).sum(), parameters) for out in outputs]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["abe", "mheads_att"])
def test_open_masks_and_one_learner_are_the_baseline(method_of: MethodOf, name: str) -> None:
    method = method_of(f"method={name}", "method.M=1").eval()
    baseline = method_of("method=baseline").eval()
    assert isinstance(method, ABE | MHeads)
    assert method.masks is not None
    with torch.no_grad():
        method.masks.A.weight.zero_()
        method.masks.A.bias.fill_(100.0)  # sigmoid(100) = 1
    baseline.head.load_state_dict((method.head if isinstance(method, ABE) else method.heads[0]).state_dict())
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(method.embed(images), baseline.embed(images), rtol=1e-4, atol=1e-6)


def test_attention_is_a_copy_that_starts_as_the_backbone(method_of: MethodOf) -> None:
    method = method_of("method=abe")
    assert isinstance(method, ABE)
    ours, theirs = method.masks.C.state_dict(), method.embedding.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {id(p) for p in method.masks.parameters()}.isdisjoint(id(p) for p in method.embedding.parameters())


def test_attention_layers_start_as_section_4_says(method_of: MethodOf) -> None:
    """Glorot & Bengio's uniform weights between one learner's features and its mask."""
    method = method_of("method=abe", "method.M=4")
    assert isinstance(method, ABE)
    layer, channels = method.masks.A, method.masks.channels
    bound = (6 / (layer.in_channels + channels)) ** 0.5
    for weight in layer.weight.detach().chunk(4):
        assert weight.abs().max() <= bound
        assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.03)
    assert not layer.bias.any()


def test_what_is_shared_and_what_is_not(method_of: MethodOf) -> None:
    heads, tails = method_of("method=mheads", "method.M=2"), method_of("method=mtails", "method.M=2")
    assert isinstance(heads, MHeads)
    assert isinstance(tails, MTails)
    for copies in (heads.embeddings, heads.heads, tails.spatials):
        first, second = ({id(p) for p in copy.parameters()} for copy in copies)
        assert first.isdisjoint(second)
    assert not any(torch.equal(p, q) for p, q in zip(*(s.parameters() for s in tails.spatials), strict=True) if p.any())


def test_every_tail_but_the_first_starts_with_noise_of_its_own(method_of: MethodOf) -> None:
    first, *others = method_of("method=mtails", "method.M=3", "method.perturbation=0.1").spatials
    kept = torch.cat([weight.detach().flatten() for weight in first.parameters()])
    noise = [torch.cat([weight.detach().flatten() for weight in one.parameters()])[kept != 0] for one in others]
    noise = [one / kept[kept != 0] - 1 for one in noise]
    for one in noise:
        assert abs(float(one.mean())) < 0.01
        assert float(one.std()) == pytest.approx(0.1, rel=0.1)
    assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 0.1


def distance_between_learners(method: Method) -> float:
    """After five steps from equal or nearly equal tails."""
    images, labels = torch.rand(8, 3, 32, 32), torch.arange(4).repeat(2)
    optimizer = method.optimizer_alone()
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(method, images, labels).backward()
        optimizer.step()
    first, second = method.embed(images).unbind(1)
    return float((first - second).detach().norm(dim=-1).mean())


def test_equal_tails_would_stay_equal(method_of: MethodOf) -> None:
    assert distance_between_learners(method_of("method=mtails", "method.M=2", "method.perturbation=0")) == 0
    assert distance_between_learners(method_of("method=mtails", "method.M=2")) > 0.01


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_the_divergence_loss_is_an_option_of_each(method_of: MethodOf, name: str, weight: float) -> None:
    options = ["method.M=2", f"method.lambda_div={weight}", "method.margin_div=3", "method.balance=false"]
    method = method_of(f"method={name}", *options)
    embeddings = method.embed(torch.rand(4, 3, 32, 32))
    terms = objective_of(method, embeddings, torch.tensor([0, 0, 1, 1]))
    assert set(terms) == ({"metric", "divergence"} if weight else {"metric"})
    if weight:
        squared = [(e[p] - e[q]).square().sum() for e in embeddings for p, q in ((0, 1), (1, 0))]
        torch.testing.assert_close(terms["divergence"], weight * sum((3 - s).clamp(min=0) for s in squared) / 4)


@pytest.mark.parametrize(
    ("name", "passes"), [("abe", 2), ("mheads", 4), ("mheads_att", 4), ("mtails", 2), ("diablo", 2)]
)
def test_checkpointing_computes_twice(method_of: MethodOf, name: str, passes: int) -> None:
    """The last stage of each G: once forward, once more for the backward pass."""
    learners = "method.N=2" if name == "diablo" else "method.M=2"
    method = method_of(f"method={name}", learners, "method.checkpointing=true")
    counted = []
    for part, module in method.named_modules():
        if part.endswith("block4") and not part.startswith(("masks", "phi")):
            module.register_forward_pre_hook(lambda *_: counted.append(1))
    method.embed(torch.rand(2, 3, 32, 32)).sum().backward()
    assert len(counted) == passes


@pytest.mark.parametrize("name", FAMILY)
def test_checkpointing_changes_no_gradient(method_of: MethodOf, name: str) -> None:
    def gradients(*overrides: str) -> list[Tensor]:
        method = method_of(f"method={name}", "method.M=2", *overrides).double()
        torch.manual_seed(1)
        images = torch.rand(4, 3, 32, 32, dtype=torch.float64)
        method.embed(images).pow(3).sum().backward()
        return [p.grad for p in method.parameters() if p.grad is not None]

    plain, lean = gradients(), gradients("method.checkpointing=true")
    assert len(plain) > 10
    for ours, theirs in zip(lean, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backbone", ["googlenet", "bn_inception", "resnet50"])
@pytest.mark.parametrize("name", FAMILY)
def test_other_backbones(method_of: MethodOf, name: str, backbone: str) -> None:
    method = method_of(f"method={name}", f"backbone={backbone}", "backbone.weights=none", "method.M=2").eval()
    with torch.inference_mode():
        assert method.embed(torch.rand(2, 3, 64, 64)).shape == (2, 2, 12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["method.branch=nowhere"], r"nowhere.*choose one of block1, block2, block3"),
        (["method.branch=block4"], r"block4.*choose one of block1, block2, block3"),
        (["method.attention_depth=3"], r"3 stages after 'block2': choose a depth of 1 to 2 \(block3, block4\)"),
        (["method.attention_depth=0"], "has to be at least 1"),
    ],
)
def test_stages_that_are_not_there(method_of: MethodOf, options: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        method_of("method=abe", *options)


@pytest.mark.parametrize("option", ["lambda_div", "margin_div", "perturbation"])
def test_numbers_that_are_none(method_of: MethodOf, option: str) -> None:
    for value in ("-1", "abc"):
        with pytest.raises(UserError, match=rf"method\.{option}={value} has to be (at least 0|a number)"):
            method_of("method=mtails", f"method.{option}={value}")


def test_attention_is_between_0_and_1(method_of: MethodOf) -> None:
    masks = method_of("method=abe", "method.M=3").eval().attention(torch.rand(2, 3, 32, 32))
    assert masks is not None
    assert masks.shape == (2, 3, 32, 8, 8)
    assert ((masks > 0) & (masks < 1)).all()
    assert method_of("method=mheads").attention(torch.rand(2, 3, 32, 32)) is None
