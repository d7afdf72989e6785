"""DIABLO against equations 5 to 13 written as loops, and what its architecture promises."""

import json
import math
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from dml.errors import UserError
from dml.methods.base import Method
from dml.methods.diablo import DIABLO
from dml.models.attention import Dictionary, select
from dml.training.complexity import complexity
from tests.conftest import objective_of

pytestmark = pytest.mark.usefixtures("one_thread")
MethodOf = Callable[..., Method]
KINDS = [(selection, attention) for selection in ("feature", "dimension") for attention in ("pre", "post")]


def diablo(method_of: MethodOf, *overrides: str) -> DIABLO:
    method = method_of("method=diablo", *overrides)
    assert isinstance(method, DIABLO)
    return method


def cosine(a: Tensor, b: Tensor) -> float:
    return float(sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(a * a) * sum(b * b)))


def test_dimension_wise_selection_is_equations_10_to_13() -> None:
    """A^(n)_ijk and H^(n)_ijk one entry at a time."""
    torch.manual_seed(0)
    images, entries, c, m, h, w, alpha = 2, 3, 4, 5, 2, 3, 7.0
    phi = torch.randn(images, m, h, w, dtype=torch.float64)
    features = torch.randn(images, c, h, w, dtype=torch.float64)
    dictionary = torch.randn(entries, c, m, dtype=torch.float64)
    selected = select(phi, dictionary, alpha) * features[:, None]
    for b, n, k, i, j in torch.cartesian_prod(*map(torch.arange, (images, entries, c, h, w))).tolist():
        powers = [math.exp(alpha * cosine(phi[b, :, i, j], dictionary[at, k])) for at in range(entries)]
        expected = powers[n] / sum(powers) * float(features[b, k, i, j])
        assert float(selected[b, n, k, i, j]) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_feature_wise_selection_is_equations_5_to_9() -> None:
    torch.manual_seed(0)
    images, entries, c, m, h, w, alpha = 2, 3, 4, 5, 2, 3, 7.0
    phi = torch.randn(images, m, h, w, dtype=torch.float64)
    features = torch.randn(images, c, h, w, dtype=torch.float64)
    dictionary = torch.randn(entries, 1, m, dtype=torch.float64)
    selected = select(phi, dictionary, alpha) * features[:, None]
    for b, i, j in torch.cartesian_prod(*map(torch.arange, (images, h, w))).tolist():
        powers = torch.tensor([math.exp(alpha * cosine(phi[b, :, i, j], dictionary[n, 0])) for n in range(entries)])
        kronecker = torch.kron(powers.double() / powers.sum(), features[b, :, i, j]).reshape(entries, c)
        torch.testing.assert_close(selected[b, :, :, i, j], kronecker, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("channels", [1, 3])
def test_gradient_of_the_selection(channels: int) -> None:
    torch.manual_seed(0)
    phi = torch.randn(2, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    dictionary = torch.randn(3, channels, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p, d: select(p, d, 5.0), (phi, dictionary))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_location_without_features_is_assigned_evenly(dtype: torch.dtype) -> None:
    phi = torch.randn(1, 4, 2, 2).relu().to(dtype)
    phi[:, :, 0, 0] = 0
    phi.requires_grad_()
    weights = select(phi, torch.randn(5, 3, 4, dtype=dtype), 10.0)
    torch.testing.assert_close(weights[:, :, :, 0, 0].float(), torch.full((1, 5, 3), 0.2), rtol=1e-2, atol=0)
    weights[:, 0].sum().backward()
    assert phi.grad is not None
    assert torch.isfinite(phi.grad).all()


@pytest.mark.parametrize(("selection", "attention"), KINDS)
def test_weights_sum_to_one_over_the_dictionary(method_of: MethodOf, selection: str, attention: str) -> None:
    options = [f"method.selection={selection}", f"method.attention={attention}", "method.N=6"]
    weights = (method := diablo(method_of, *options).eval()).weights(method.F(torch.rand(2, 3, 32, 32)))
    cells = 8 if attention == "pre" else 4
    channels = 1 if selection == "feature" else 32 if attention == "pre" else 128
    assert weights.shape == (2, 6, channels, cells, cells)
    torch.testing.assert_close(weights.sum(1), torch.ones(2, channels, cells, cells))
    assert weights.std(1).min() > 0  # and not evenly


@pytest.mark.parametrize(("selection", "attention"), KINDS)
def test_the_architecture_a_branch_at_a_time(method_of: MethodOf, selection: str, attention: str) -> None:
    """Section 3.1 and 3.2: eq. 1 to 4, pooling and an embedding layer a branch, values and gradients."""
    options = [f"method.selection={selection}", f"method.attention={attention}", "method.N=3"]
    method = diablo(method_of, *options, "backbone.batch_norm=running").double()
    images = method.normalize(torch.rand(3, 3, 32, 32, dtype=torch.float64))
    features = method.F(images)
    weights = select(method.phi(features), method.dictionary.entries, 10.0)
    looped = []
    for n in range(3):
        branch = method.psi(weights[:, n] * features) if attention == "pre" else weights[:, n] * method.psi(features)
        projection = method.heads[n].projection
        looped.append(branch.mean((2, 3)) @ projection.weight.T + projection.bias)
    outputs = [method.learners(images).raw, torch.stack(looped, dim=1)]
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-12)
    factor = torch.randn_like(outputs[0])
    parameters = list(method.parameters())
    for ours, theirs in zip(*(torch.autograd.grad((out * factor).sum(), parameters) for out in outputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_alpha_is_the_hardness(method_of: MethodOf) -> None:
    method = diablo(method_of, "method.N=3", "method.alpha=2.5").eval()
    features = method.F(torch.rand(2, 3, 32, 32))
    expected = select(method.phi(features), method.dictionary.entries, 2.5)
    torch.testing.assert_close(method.weights(features), expected)
    assert not torch.allclose(expected, select(method.phi(features), method.dictionary.entries, 10.0), rtol=1e-2)


@pytest.mark.parametrize(("selection", "attention"), KINDS)
def test_one_entry_is_the_baseline(method_of: MethodOf, selection: str, attention: str) -> None:
    """A softmax over one entry is 1 everywhere."""
    options = [f"method.selection={selection}", f"method.attention={attention}", "method.N=1"]
    method, baseline = diablo(method_of, *options).eval(), method_of("method=baseline").eval()
    baseline.head.load_state_dict(method.heads[0].state_dict())
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(method.embed(images), baseline.embed(images), rtol=1e-4, atol=1e-6)


def test_phi_is_independent_of_psi(method_of: MethodOf) -> None:
    for attention in ("pre", "post"):
        method = diablo(method_of, f"method.attention={attention}")
        ours, theirs = method.phi.state_dict(), method.psi.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert {id(p) for p in method.phi.parameters()}.isdisjoint(id(p) for p in method.psi.parameters())


def test_a_shared_head_is_one(method_of: MethodOf) -> None:
    own, shared = (diablo(method_of, f"method.shared_head={shared}").heads for shared in (False, True))
    assert len({id(head) for head in own}) == len(own) == len(shared) == 4
    assert len({id(head) for head in shared}) == 1
    method = diablo(method_of, "method.shared_head=true")
    grouped = [p for group in method.optimizer_alone().param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, method.parameters()))


def test_the_loss_sees_the_concatenation_of_unit_norm(method_of: MethodOf) -> None:
    method = diablo(method_of)
    seen: list[Tensor] = []
    method.losses = torch.nn.ModuleList([torch.nn.Identity()])
    method.losses[0].forward = lambda e, labels, **_: seen.append(e) or e.sum()
    embeddings = method.embed(torch.rand(2, 3, 32, 32))
    assert set(objective_of(method, embeddings, torch.tensor([0, 1]))) == {"metric"}
    torch.testing.assert_close(seen[0], embeddings.flatten(1) / 2)
    torch.testing.assert_close(seen[0].norm(dim=1), torch.ones(2))


@pytest.mark.slow
def test_the_cost_on_the_original_googlenet(method_of: MethodOf) -> None:
    """Each further branch costs 0.75e9 multiply-adds, 0.7e9 of them psi (section 4.1); all further parameters are phi,
    a copy of inception 4a to 4e, and the dictionary."""
    options = ["head.dim=512", "backbone=googlenet_v1"]
    baseline = complexity(method_of("method=baseline", *options), 224)
    one, two = (complexity(diablo(method_of, f"method.N={n}", *options), 224) for n in (1, 2))
    dictionary, cells = 480 * 832, 14 * 14
    branch = two["flops"] - one["flops"]
    assert (f"{branch / 1e9:.2f}", f"{(branch - dictionary * cells) / 1e9:.1f}") == ("0.75", "0.7")
    # In 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection (the table of GoogLeNet's paper); weights and biases.
    table = [
        (480, 192, 96, 208, 16, 48, 64),
        (512, 160, 112, 224, 24, 64, 64),
        (512, 128, 128, 256, 24, 64, 64),
        (512, 112, 144, 288, 32, 64, 64),
        (528, 256, 160, 320, 32, 128, 128),
    ]
    phi = sum((c + 1) * (a + r3 + r5 + p) + (9 * r3 + 1) * c3 + (25 * r5 + 1) * c5 for c, a, r3, c3, r5, c5, p in table)
    assert one["params"] - baseline["params"] == phi + dictionary
    assert two["params"] - one["params"] == dictionary  # embedding layers of half the width each


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_is_larger_than_the_weights() -> None:
    """Forward and backward; [B,N,c,m,h,w] would be m = 96 times as large."""
    images, entries, c, m, h, w = 2, 4, 32, 96, 8, 8
    phi = torch.randn(images, m, h, w, requires_grad=True)
    features = torch.randn(images, c, h, w, requires_grad=True)
    dictionary = Dictionary(entries, c, m, 10.0)
    with _Largest() as largest:
        (dictionary(phi) * features[:, None]).square().sum().backward()
    assert largest.elements == images * entries * c * h * w


def test_peak_memory_is_a_few_times_the_weights(tmp_path: Path) -> None:
    """Forward and backward at GoogLeNet's size; [B,N,c,m,h,w] would take 832 times the weights [B,N,c,h,w]."""
    weights = 4 * 8 * 480 * 14 * 14 * 4
    phi = torch.randn(4, 832, 14, 14, requires_grad=True)
    features = torch.randn(4, 480, 14, 14, requires_grad=True)
    dictionary = Dictionary(8, 480, 832, 10.0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        (dictionary(phi) * features[:, None]).square().sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    peak = max(accumulate(change for _, change in changes))
    assert 2 < peak / weights < 16


@pytest.mark.parametrize("backbone", ["googlenet", "bn_inception", "resnet50"])
@pytest.mark.parametrize("attention", ["pre", "post"])
def test_other_backbones(method_of: MethodOf, backbone: str, attention: str) -> None:
    options = [f"backbone={backbone}", "backbone.weights=none", "method.N=2", f"method.attention={attention}"]
    method = diablo(method_of, *options).eval()
    with torch.inference_mode():
        assert method.embed(torch.rand(2, 3, 64, 64)).shape == (2, 2, 12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["method.selection=both"], "selection=both has to be 'feature' or 'dimension'"),
        (["method.attention=during"], "attention=during has to be 'pre' or 'post'"),
        (["method.alpha=0"], r"method\.alpha=0 has to be above 0"),
        (["method.branch=nowhere"], r"nowhere.*choose one of block1, block2, block3"),
        (["method.attention_depth=3"], r"choose a depth of 1 to 2 \(block3, block4\)"),
        (["method.attention=post", "method.branch=block1", "method.attention_depth=1"], "ends phi at 'block2'"),
    ],
)
def test_mistakes(method_of: MethodOf, options: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        method_of("method=diablo", *options)
