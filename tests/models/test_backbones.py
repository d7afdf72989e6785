"""Every YAML of conf/backbone against the contract of `Backbone`, and each architecture against another source."""

import copy
import functools
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
import torch.nn.functional as F
import torchvision
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dml.errors import UserError
from dml.models.backbones import Backbone, Stages
from dml.models.backbones.bn_inception import _HalvingMaxPool, bn_inception
from dml.models.backbones.googlenet import googlenet
from dml.models.backbones.googlenet_v1 import googlenet_v1
from dml.models.backbones.mobilenet_v2 import mobilenet_v2
from dml.models.backbones.normalize import caffe
from dml.models.backbones.resnet import resnet18, resnet50
from dml.models.backbones.resnet_cifar import resnet20
from dml.models.backbones.small import small
from dml.models.backbones.timm_model import timm_model
from dml.models.backbones.trained import choose_trained
from dml.models.stored import Stored
from dml.models.tokens import entering
from dml.training.complexity import counted
from dml.training.trainer import synchronised_norms

pytestmark = pytest.mark.usefixtures("one_thread")
CONF = sorted((Path(__file__).parents[2] / "conf" / "backbone").glob("*.yaml"))
SIZE = 96  # pixels; 3 cells at stride 32
BUILT: dict[str, Backbone] = {}
TRANSFORMERS = ("vit_tiny", "vit_small", "deit_small", "dinov2_small", "dinov2_base", "dinov3_small", "clip_base")
SHALLOW: dict[str, dict[str, Any]] = {name: {"options": {"depth": 4}} for name in TRANSFORMERS}
SHALLOW |= {name: {"options": {"depths": [1, 2, 2, 1]}} for name in ("swin_tiny", "convnext_tiny")}
SHALLOW |= {"timm": {"model_name": "test_resnet"}}
PATCHED = (*TRANSFORMERS, "swin_tiny")  # whose patches lie side by side in an image
LIKE_OTHERS = ("vit_small", "deit_small", "dinov2_base", "clip_base")  # in other sizes: with -m exhaustive


def instantiate(path: Path, **overrides: Any) -> Backbone:
    config = OmegaConf.create({"paths": {"data_dir": "unused"}, "backbone": OmegaConf.load(path)})
    config.backbone.update({"weights": "none", **overrides})
    return hydra.utils.instantiate(config.backbone)


@functools.cache
def untouched(path: Path) -> Backbone:
    return instantiate(path, **SHALLOW.get(path.stem, {}))


def build(path: Path) -> Backbone:
    """As the YAML says, but untrained and shallow, and of timm its smallest model: a copy, since weights take long to
    draw."""
    return copy.deepcopy(untouched(path))


def fitting(size: int, path: Path) -> int:
    """Pixels near `size` that the patches of a backbone divide."""
    return size // 14 * 14 if path.stem.startswith("dinov2") else size


def of_conf(*exhaustive: str) -> list[Any]:
    return [
        pytest.param(path, marks=pytest.mark.exhaustive if path.stem in exhaustive else (), id=path.stem)
        for path in CONF
    ]


@pytest.fixture(params=of_conf(*LIKE_OTHERS))
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def backbone(path: Path) -> Backbone:
    """One a YAML for all tests, in eval mode; tests that change it build their own."""
    if path.stem not in BUILT:
        torch.manual_seed(0)
        BUILT[path.stem] = vary_batch_norm(build(path)).eval()
    return BUILT[path.stem]


def vary_batch_norm(module: nn.Module) -> nn.Module:
    """Other running statistics and affine parameters than the initial ones, which would hide mistakes."""
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.running_mean, -0.2, 0.2)
            nn.init.uniform_(m.running_var, 0.5, 1.5)
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.uniform_(m.bias, -0.2, 0.2)
    return module


def images(size: int = SIZE) -> Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def flops(module: nn.Module, x: Tensor) -> float:
    """Multiply-adds of convolutions and linear layers."""
    with torch.no_grad(), counted() as counter:
        module(x)
    return counter.get_total_flops() / 2


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# --- the contract, for every YAML ---


def test_every_stage_has_the_channels_and_stride_that_it_states(backbone: Backbone, path: Path) -> None:
    assert backbone.in_channels == 3
    assert backbone.in_stride == 1
    x = images(fitting(SIZE, path))
    with torch.no_grad():
        for name, stage in backbone.stages.items():
            x = stage(x)
            cells = fitting(SIZE, path) // backbone.stride[name]
            assert x.shape == (2, backbone.out_channels[name], cells, cells), name
    assert x.shape[1] == backbone.dim
    assert all("." not in name for name in backbone.stages)


@pytest.mark.parametrize("at", ["first", "branch", "late_branch"])
def test_split_equals_whole_and_shares_parameters(backbone: Backbone, path: Path, at: str) -> None:
    at = next(iter(backbone.stages)) if at == "first" else getattr(backbone, at)
    lower, upper = backbone.split(at)
    x = images(fitting(SIZE, path))
    with torch.no_grad():
        assert torch.equal(upper(lower(x)), backbone(x))
    assert [*lower.stages, *upper.stages] == list(backbone.stages)
    assert lower.in_channels == 3
    assert (upper.in_channels, upper.in_stride) == (backbone.out_channels[at], backbone.stride[at])
    assert lower.out_channels | upper.out_channels == backbone.out_channels
    assert lower.stride | upper.stride == backbone.stride
    parts = {id(p) for part in (lower, upper) for p in part.parameters()}
    assert parts == {id(p) for p in backbone.parameters()}


def attention_stages(backbone: Backbone) -> tuple[str, str]:
    copied = backbone.copy_after(backbone.branch, backbone.attention_depth)
    names = list(copied.stages)
    return names[0], names[-1]


def test_copy_is_equal_and_independent(backbone: Backbone, path: Path) -> None:
    first, last = attention_stages(backbone)
    lower, upper = backbone.split(backbone.branch)
    run = upper if last == list(upper.stages)[-1] else upper.split(last)[0]
    copied = upper.copy_of(first, last)
    with torch.no_grad():
        x = lower(images(fitting(SIZE, path)))
        before = run(x)
        assert torch.equal(copied(x), before)
        for p in copied.parameters():
            p.zero_()
        assert torch.equal(run(x), before)
    assert {id(p) for p in copied.parameters()}.isdisjoint(id(p) for p in backbone.parameters())
    assert (copied.out_channels, copied.stride, copied.in_channels) == (run.out_channels, run.stride, run.in_channels)


def test_copy_keeps_resolution(backbone: Backbone) -> None:
    copied = backbone.copy_after(backbone.branch, backbone.attention_depth, keep_resolution=True)
    last = list(copied.stages)[-1]
    assert set(copied.stride.values()) == {copied.in_stride} == {backbone.stride[backbone.branch]}
    with torch.no_grad():
        y = copied(entering(next(iter(copied.stages.values())), torch.rand(1, copied.in_channels, 6, 5)))
    assert y.shape == (1, backbone.out_channels[last], 6, 5)


@pytest.mark.parametrize("branch", ["pool2", "inception3a", "inception3b", "pool3", "inception4a", "inception4b"])
def test_the_attention_of_figure_7(branch: str) -> None:
    """ABE, section 6.3: five inception blocks after every branching point, no pooling among them."""
    backbone = googlenet_v1()
    copied = backbone.copy_after(branch, 5, keep_resolution=True)
    names = list(backbone.stages)
    blocks = [name for name in names[names.index(branch) + 1 :] if name.startswith("inception")][:5]
    assert [name for name in copied.stages if name.startswith("inception")] == blocks
    assert list(copied.stages)[-1] == blocks[-1]
    with torch.no_grad():
        assert copied(torch.rand(1, backbone.out_channels[branch], 5, 4)).shape[2:] == (5, 4)


@pytest.mark.slow
def test_depths_of_attention() -> None:
    """ABE, figure 7a: 1 to 7 inception blocks; the poolings between them do not count."""
    ends = [list(googlenet_v1().copy_after("pool3", depth).stages)[-1] for depth in range(1, 8)]
    assert [end.removeprefix("inception") for end in ends] == ["4a", "4b", "4c", "4d", "4e", "5a", "5b"]
    for depth in (0, 8):
        with pytest.raises(UserError, match=rf"cannot copy {depth} stages after 'pool3': .* 1 to 7 \(inception4a, "):
            googlenet_v1().copy_after("pool3", depth)


@pytest.mark.slow
def test_where_the_default_attention_ends() -> None:
    """Where the attention copy ends: the last stage before the resolution falls, as inception4e of GoogLeNet."""
    ends = {
        "bn_inception": "inception4d",  # 4e halves the resolution
        "googlenet": "inception4e",
        "googlenet_v1": "inception4e",
        "mobilenet_v2": "features13",
        "resnet18": "layer3_1",
        "resnet20": "layer2_2",
        "resnet50": "layer3_5",
        "small": "block3",
        "swin_tiny": "layers_2_blocks_1",
        "convnext_tiny": "stages_2_blocks_1",
        "efficientnet_lite0": "blocks_4_2",
    }
    for path in CONF:
        if path.stem in ends:
            backbone = build(path)
            copied = backbone.copy_after(backbone.branch, backbone.attention_depth)
            assert list(copied.stages)[-1] == ends[path.stem], path.stem


def test_synchronised_batch_norm_keeps_the_activations_of_timms_layers() -> None:
    """torch's own function drops them."""
    net = build(next(path for path in CONF if path.stem == "efficientnet_lite0")).eval()
    images = torch.rand(1, 3, 64, 64)
    expected = net(images)
    changed = synchronised_norms(net).eval()
    assert any(isinstance(module, nn.SyncBatchNorm) for module in changed.modules())
    torch.testing.assert_close(changed(images), expected)


def synchronised(net: Backbone) -> Backbone:
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(converted, Backbone)
    return converted


@pytest.mark.parametrize("kind", ["batch", "running", "synchronised"])
def test_recomputed_activations_change_nothing(kind: str) -> None:
    kept, recomputed = small().double(), small().double()
    for net in (kept, recomputed):
        choose_trained(net, batch_norm="running" if kind == "running" else "batch")
    if kind == "synchronised":
        kept, recomputed = synchronised(kept), synchronised(recomputed)
    recomputed.load_state_dict(kept.state_dict())
    recomputed.checkpointing = True
    x = torch.rand(4, 3, 32, 32, dtype=torch.float64)
    for net in (kept, recomputed):
        for _ in range(2):
            net(x).square().sum().backward()
    state = zip(kept.state_dict().items(), recomputed.state_dict().values(), strict=True)
    assert [name for (name, value), other in state if not torch.equal(value, other)] == []
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(kept.parameters(), recomputed.parameters(), strict=True))


class _Made(TorchDispatchMode):
    """The storages that operations make, and how many bytes of them are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


def test_recomputing_saves_memory() -> None:
    """What the forward pass leaves alive for the backward pass: the stages' inputs instead of everything."""
    net = resnet18(weights="none")
    x = torch.rand(2, 3, 96, 96)
    alive = []
    for net.checkpointing in (False, True):
        with _Made() as made:
            out = net(x)
            alive.append(made.alive())
        out.sum().backward()
    assert alive[1] < 0.4 * alive[0]


@pytest.mark.parametrize("path", [path for path in CONF if path.stem not in PATCHED], ids=lambda path: path.stem)
def test_whole_copy_keeps_resolution(backbone: Backbone) -> None:
    """ABE's deepest attention runs to the last stage (figure 7a); no stride of any stage may remain."""
    names = list(backbone.stages)
    copied = backbone.copy_of(names[0], names[-1], keep_resolution=True)
    with torch.no_grad():
        assert copied(torch.rand(1, 3, 7, 9)).shape == (1, backbone.dim, 7, 9)
    assert backbone.stride[names[-1]] > 1  # the original keeps its own


def test_channels_last_gives_the_same(backbone: Backbone, path: Path) -> None:
    x, backbone = images(fitting(64, path)).double(), copy.deepcopy(backbone).double()
    turned = copy.deepcopy(backbone).to(memory_format=torch.channels_last)
    with torch.no_grad():
        y = turned(turned.normalize(x.contiguous(memory_format=torch.channels_last)))
        y = y.as_subclass(Tensor)
        torch.testing.assert_close(y, backbone(backbone.normalize(x)).as_subclass(Tensor), rtol=1e-9, atol=1e-9)
    if path.stem not in TRANSFORMERS:  # where other tokens lie between those of the patches
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_every_parameter_gets_a_gradient(path: Path) -> None:
    backbone = build(path).train()
    backbone(backbone.normalize(images(fitting(32, path)))).as_subclass(Tensor).sum().backward()
    assert all(p.grad is not None for p in backbone.parameters())


FROZEN = {"running": {"batch_norm": "running"}, "frozen": {"batch_norm": "frozen"}, "none": {"train": "none"}}


@pytest.mark.parametrize("freeze", FROZEN)
def test_frozen_batch_norm_survives_train_split_and_copies(path: Path, freeze: str) -> None:
    backbone = build(path).train()
    choose_trained(backbone, **FROZEN[freeze])
    first, last = attention_stages(backbone)
    parts: list[Stages] = [backbone, *backbone.split(backbone.branch), backbone.copy_of(first, last)]
    parts += [copy.deepcopy(part) for part in parts]
    holder = nn.ModuleList(parts).eval().train()  # as inside a method
    for part in parts:
        norms = [m for m in part.modules() if isinstance(m, nn.BatchNorm2d)]
        assert norms or not any(isinstance(m, nn.BatchNorm2d) for m in backbone.modules())
        assert all(not m.training for m in norms)
        assert all(p.requires_grad == (freeze == "running") for m in norms for p in m.parameters())
        convolutions = [m for m in part.modules() if isinstance(m, nn.Conv2d)]
        assert all(p.requires_grad == (freeze != "none") for m in convolutions for p in m.parameters())
    assert holder.training
    statistics = {key: value.clone() for key, value in backbone.state_dict().items() if "running" in key}
    backbone(images(fitting(64, path)))
    assert all(torch.equal(backbone.state_dict()[key], value) for key, value in statistics.items())


def test_batch_norm_is_free_by_default(path: Path) -> None:
    backbone = build(path).train()
    norms = [m for m in backbone.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(m.training and m.weight.requires_grad for m in norms)


def test_normalize_has_nothing_to_save(backbone: Backbone) -> None:
    assert not list(backbone.normalize.parameters())
    assert not backbone.normalize.state_dict()
    assert backbone.normalize(images()).shape == images().shape


# --- user errors ---


@pytest.mark.parametrize("at", ["pool9", "block4"])
def test_split_names_the_stages(at: str) -> None:
    with pytest.raises(UserError, match=f"{at}: cannot split there, choose one of block1, block2, block3\\."):
        small().split(at)


@pytest.mark.parametrize(("first", "last"), [("block1", "pool9"), ("pool9", "block1"), ("block3", "block2")])
def test_copy_names_the_stages(first: str, last: str) -> None:
    with pytest.raises(UserError, match="block1, block2, block3, block4"):
        small().copy_of(first, last)


def test_unknown_branch() -> None:
    stages = dict(small().stages.items())
    with pytest.raises(UserError, match="no stage 'block5'"):
        Backbone(stages, normalize=nn.Identity(), branch="block5", attention_depth=1, late_branch="block3")


def test_stride_that_cannot_be_taken_out() -> None:
    """Of a convolution that is neither padded nor one of patches side by side."""
    stages = {f"conv{i}": nn.Conv2d(3, 3, 3, stride=2 if i == 1 else 1) for i in range(3)}
    backbone = Backbone(stages, normalize=nn.Identity(), branch="conv0", attention_depth=1, late_branch="conv1")
    with pytest.raises(UserError, match="cannot keep the resolution"):
        backbone.copy_after("conv0", 1, keep_resolution=True)


def test_timm_model_without_weights() -> None:
    with pytest.raises(UserError, match=r"cannot give ghostnet_050 its weights.*backbone\.weights=none"):
        timm_model(model_name="ghostnet_050", weights="imagenet")


# --- against the libraries ---


def save_state(net: nn.Module, path: Path) -> str:
    torch.save(vary_batch_norm(net).state_dict(), path)
    return str(path)


def equals(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ours"), [("resnet18", resnet18), ("resnet50", resnet50)])
def test_resnet_equals_torchvision(name: str, ours, tmp_path: Path) -> None:
    net = torchvision.models.get_model(name, weights=None)
    backbone = ours(weights=save_state(net, tmp_path / "net.pth")).eval()
    net.fc = nn.Identity()
    with torch.no_grad():
        equals(backbone(images(64)).mean((2, 3)), net.eval()(images(64)))


def test_mobilenet_equals_torchvision(tmp_path: Path) -> None:
    net = torchvision.models.mobilenet_v2(weights=None)
    backbone = mobilenet_v2(weights=save_state(net, tmp_path / "net.pth")).eval()
    with torch.no_grad():
        equals(backbone(images(64)), net.features.eval()(images(64)))


@pytest.mark.slow
def test_googlenet_equals_torchvision(tmp_path: Path) -> None:
    """Whole, from the image: torchvision takes ImageNet's statistics off and then transforms its input."""
    net = torchvision.models.googlenet(weights=None, aux_logits=True, transform_input=True, init_weights=False)
    backbone = googlenet(weights=save_state(net, tmp_path / "net.pth")).eval()
    net.fc = nn.Identity()
    x = images(64)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        theirs = net.eval()((x - mean[:, None, None]) / std[:, None, None])
        equals(backbone(backbone.normalize(x)).mean((2, 3)), theirs)


# --- against published figures (one multiply-add = 1 flop) ---


def test_googlenet_v1_at_224() -> None:
    assert googlenet_v1()(torch.zeros(1, 3, 224, 224)).shape == (1, 1024, 7, 7)


def test_bn_inception_has_the_published_size() -> None:
    """11,295,240 parameters with the classifier, in pytorchcv's table of models (osmr/imgclsmob)."""
    assert size(bn_inception()) + size(nn.Linear(1024, 1000)) == 11_295_240


def test_resnet20_has_the_published_size() -> None:
    """0.27 M parameters with ten classes (He et al. 2016, table 6)."""
    assert round((size(resnet20()) + size(nn.Linear(64, 10))) / 1e6, 2) == 0.27


def test_small_leaves_6_x_6_cells() -> None:
    with torch.no_grad():
        assert small()(torch.zeros(2, 3, 48, 48)).shape == (2, 128, 6, 6)


@pytest.mark.slow
@pytest.mark.parametrize("path", of_conf("dinov2_base", "clip_base"))
def test_header_states_the_size(path: Path) -> None:
    header = path.read_text().splitlines()[0]
    stated = re.search(r"([\d.]+)e6 params, ([\d.]+)e9 flops at (\d+)", header)
    assert stated is not None, "the file does not begin with the size, as in 3.5e6 params, 0.3e9 flops at 224"
    params, work, pixels = stated.groups()
    backbone = instantiate(path).eval()
    assert f"{size(backbone) / 1e6:.{decimals(params)}f}" == params
    x = torch.zeros(1, 3, int(pixels), int(pixels))
    assert f"{flops(backbone, x) / 1e9:.{decimals(work)}f}" == work


def decimals(number: str) -> int:
    return len(number.partition(".")[2])


# --- against the layer tables, written once more with functions and the published keys ---

State = dict[str, Tensor]


def conv(state: State, key: str, x: Tensor, stride: int = 1) -> Tensor:
    """Convolution, batch norm if the file has one, ReLU."""
    weight = state[f"{key}.weight"]
    x = F.conv2d(x, weight, state[f"{key}.bias"], stride, padding=weight.shape[-1] // 2)
    if f"{key}_bn.weight" in state:
        norm = {name: state[f"{key}_bn.{name}"] for name in ("running_mean", "running_var", "weight", "bias")}
        x = F.batch_norm(x, **norm)
    return x.relu()


def max_pool(x: Tensor) -> Tensor:
    """Caffe: 3x3, stride 2, as many windows as begin inside; cells beyond the edge do not count."""
    n = -(-(x.shape[-1] - 3) // 2) + 1
    rows = [[x[..., 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].amax((2, 3)) for j in range(n)] for i in range(n)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def lrn(x: Tensor) -> Tensor:
    """Caffe: x / (1 + alpha / 5 * sum of squares over the 5 channels around)^beta."""
    sums = [x[:, max(0, c - 2) : c + 3].square().sum(1) for c in range(x.shape[1])]
    return x / (1 + 1e-4 / 5 * torch.stack(sums, 1)) ** 0.75


def random_state(shapes: State, generator: torch.Generator) -> State:
    """Scaled so that features stay of order one, and LRN sees large sums."""
    state = {}
    for key, value in shapes.items():
        fan_in = value[0].numel() if value.dim() == 4 else 1
        state[key] = torch.randn(value.shape, generator=generator) * (1.5 / fan_in) ** 0.5 * (1 if fan_in > 1 else 0.1)
        if key.endswith(("running_var", "_bn.weight")):
            state[key] = state[key].abs() + 0.5
    return state


def published_keys(backbone: Backbone, table: dict[str, str]) -> State:
    """Our tensors under the published names, by a table stage -> beginning of the name."""
    state = {}
    for key, value in backbone.state_dict().items():
        _, stage, rest = key.split(".", 2)
        if "num_batches" not in rest:
            state[table.get(stage, stage.replace("inception", "inception_")) + "_" + rest] = value
    return state


def test_googlenet_v1_equals_its_layer_table(tmp_path: Path) -> None:
    state = random_state(published_keys(googlenet_v1(), {"conv3": "conv2"}), torch.Generator().manual_seed(0))
    torch.save({**state, "loss3_classifier.weight": torch.zeros(1000, 1024)}, tmp_path / "caffe.pth")
    backbone = googlenet_v1(weights=str(tmp_path / "caffe.pth"))

    def inception(x: Tensor, name: str) -> Tensor:
        key = f"inception_{name}"
        b = conv(state, f"{key}_3x3", conv(state, f"{key}_3x3_reduce", x))
        c = conv(state, f"{key}_5x5", conv(state, f"{key}_5x5_reduce", x))
        d = conv(state, f"{key}_pool_proj", F.max_pool2d(x, 3, 1, padding=1))
        return torch.cat([conv(state, f"{key}_1x1", x), b, c, d], 1)

    x = images(72) * 255 - 120  # 72: ceil and floor differ at every pooling
    y = lrn(max_pool(conv(state, "conv1_7x7_s2", x, stride=2)))
    y = max_pool(lrn(conv(state, "conv2_3x3", conv(state, "conv2_3x3_reduce", y))))
    y = max_pool(inception(inception(y, "3a"), "3b"))
    for name in ("4a", "4b", "4c", "4d", "4e"):
        y = inception(y, name)
    y = inception(inception(max_pool(y), "5a"), "5b")
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), y, rtol=1e-3, atol=1e-3 * float(y.abs().max()))


@pytest.mark.slow
def test_bn_inception_equals_its_layer_table(tmp_path: Path) -> None:
    state = random_state(published_keys(bn_inception(), {"conv3": "conv2"}), torch.Generator().manual_seed(0))
    # As in the file in circulation, batch norm's vectors are [1, C] and there is a classifier.
    old = {key: value[None] if "_bn." in key else value for key, value in state.items()}
    torch.save({**old, "last_linear.bias": torch.zeros(1000)}, tmp_path / "caffe.pth")
    backbone = bn_inception(weights=str(tmp_path / "caffe.pth")).eval()

    def inception(x: Tensor, name: str) -> Tensor:
        key = f"inception_{name}"
        stride = 2 if name in ("3c", "4e") else 1
        b = conv(state, f"{key}_3x3", conv(state, f"{key}_3x3_reduce", x), stride)
        c = conv(state, f"{key}_double_3x3_1", conv(state, f"{key}_double_3x3_reduce", x))
        c = conv(state, f"{key}_double_3x3_2", c, stride)
        if stride == 2:
            return torch.cat([b, c, max_pool(x)], 1)
        pooled = F.max_pool2d(x, 3, 1, 1) if name == "5b" else F.avg_pool2d(x, 3, 1, 1)
        return torch.cat([conv(state, f"{key}_1x1", x), b, c, conv(state, f"{key}_pool_proj", pooled)], 1)

    y = max_pool(conv(state, "conv1_7x7_s2", images(64), stride=2))
    y = max_pool(conv(state, "conv2_3x3", conv(state, "conv2_3x3_reduce", y)))
    for name in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        y = inception(y, name)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images(64)), y, rtol=1e-3, atol=1e-3 * float(y.abs().max()))


@pytest.mark.parametrize("n", [5, 6, 7])
def test_halving_pool_has_the_size_of_a_padded_convolution(n: int) -> None:
    x = -images(n)
    y = _HalvingMaxPool()(x)
    assert y.shape == F.conv2d(x, torch.ones(1, 3, 3, 3), stride=2, padding=1).expand(2, 3, -1, -1).shape
    k = max_pool(x).shape[-1]
    assert torch.equal(y[..., :k, :k], max_pool(x))
    assert n % 2 or k == y.shape[-1]


def test_resnet20_shortcut_takes_every_second_cell() -> None:
    """Option A: with zero convolutions a block is its shortcut."""
    block = resnet20().stages["layer2_0"].eval()
    for p in block.parameters():
        nn.init.zeros_(p)
    x = torch.rand(1, 16, 8, 8)
    with torch.no_grad():
        y = block(x)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert not y[:, 16:].any()


def test_caffe_normalization() -> None:
    rgb = torch.tensor([1.0, 0.5, 0.0]).view(1, 3, 1, 1)
    bgr = caffe((104, 117, 123))(rgb).flatten()
    torch.testing.assert_close(bgr, torch.tensor([0 - 104, 127.5 - 117, 255 - 123]))


def test_networks_subtract_the_means_that_their_files_come_with() -> None:
    """Of B, G, R in 0..255: bvlc_googlenet's train_val.prototxt, and Cadene's settings of bn_inception."""
    grey = torch.full((1, 3, 1, 1), 1 / 255)
    for backbone, means in ((googlenet_v1(), [104, 117, 123]), (bn_inception(), [104, 117, 128])):
        torch.testing.assert_close(backbone.normalize(grey).flatten(), 1 - torch.tensor(means, dtype=torch.float32))


def test_resnet20_starts_as_its_paper_does_and_sees_cifars_colours() -> None:
    """Weights of the standard deviation that He et al. (2015) give for the backward pass."""
    torch.manual_seed(0)
    backbone = resnet20()
    weight = backbone.get_submodule("stages.layer3_0.conv1").weight.detach()
    assert tuple(weight.shape[:2]) == (64, 32)
    assert float(weight.std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
    # Of CIFAR-100's training images, by channel in 0..255, as published with many networks for it.
    mean, deviation = torch.tensor([129.3, 124.1, 112.4]) / 255, torch.tensor([68.2, 65.4, 70.4]) / 255
    seen = backbone.normalize(torch.stack([mean, mean + deviation])[:, :, None, None])[:, :, 0, 0]
    torch.testing.assert_close(seen, torch.tensor([[0.0] * 3, [1.0] * 3]), rtol=0, atol=0.01)


def test_googlenet_v1_starts_as_caffe_does() -> None:
    """Xavier filler: uniform in +-sqrt(3 / fan_in); bias 0.2."""
    stage = googlenet_v1().get_submodule("stages.conv3.3x3")
    bound = (3 / (64 * 9)) ** 0.5
    weight = stage.weight
    assert weight.abs().max() <= bound
    assert float(weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    assert bool((stage.bias == 0.2).all())


def test_untrained_googlenet_v1_tells_images_apart() -> None:
    """Without batch norm, signal and gradient must get through 22 layers at initialisation."""
    torch.manual_seed(0)
    backbone = googlenet_v1()
    x = backbone.normalize(images(64)).requires_grad_()
    y = backbone(x).mean((2, 3))
    y.sum().backward()
    y = y.detach()
    assert float((y[0] - y[1]).norm() / y.norm()) > 1e-3
    assert float(x.grad.norm()) > 1e-4


def test_googlenet_v1_normalizes_in_float32() -> None:
    norm = googlenet_v1().get_submodule("stages.pool1.norm1")
    x = torch.full((1, 8, 2, 2), 500.0)  # 500^2 is beyond half precision
    torch.testing.assert_close(norm(x.half()), lrn(x).half())


@pytest.mark.data
def test_imagenet_mobilenet_from_the_data_folder(data_dir: Path) -> None:
    """The library's features, loaded by the library, against ours, loaded by name."""
    backbone = mobilenet_v2(weights="imagenet", weights_dir=str(data_dir / "weights")).eval()
    net = torchvision.models.mobilenet_v2(weights=None)
    state = torch.load(data_dir / "weights" / "mobilenet_v2_features_imagenet.pth", weights_only=True)
    net.load_state_dict(state, strict=False)
    with torch.no_grad():
        equals(backbone(images()), net.features.eval()(images()))


def test_stored_features_lie_behind_no_stage_that_is_asked_for() -> None:
    stages = small()
    names = list(stages.stages)
    maps = stages.first(2)(torch.rand(2, 3, 16, 16))
    kept = Stored.of(maps.flatten(2).transpose(1, 2), names[1], 0, maps.shape[2])
    found = stages.tapped(kept, names[1:])[1]
    assert list(found) == names[1:]
    assert torch.equal(found[names[1]], maps)
    with pytest.raises(UserError, match=rf"keeps what stage {names[1]} gives, .* sees that of {names[0]}"):
        stages.tapped(kept, names[:1])
