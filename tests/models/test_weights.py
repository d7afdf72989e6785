"""Weights: every source, and one sentence for every way in which a file can be wrong."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest
import timm
import torch
import torchvision
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import nn

from dml.errors import UserError
from dml.files import write_network
from dml.inference.embedding import Trained
from dml.inference.export import configuration_of
from dml.methods.base import Method
from dml.methods.baseline import Baseline
from dml.models.backbones.bn_inception import bn_inception
from dml.models.backbones.googlenet_v1 import googlenet_v1
from dml.models.backbones.mobilenet_v2 import mobilenet_v2
from dml.models.backbones.resnet_cifar import resnet20
from dml.models.backbones.small import small
from dml.models.backbones.timm_model import timm_model
from dml.models.weights import Published, Source, find_weights, load_weights
from dml.training.build import build
from tests.conftest import TINY
from tests.runs import save_run

Configure = Callable[..., DictConfig]
VIT = ["backbone=timm", "backbone.model_name=test_vit"]


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A file of random weights whose name bears its hash."""
    torch.save(net().state_dict(), tmp_path / "net.pth")
    digest = hashlib.sha256((tmp_path / "net.pth").read_bytes()).hexdigest()
    return (tmp_path / "net.pth").rename(tmp_path / f"net-{digest[:8]}.pth")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as httpd:
        thread = Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def assert_loaded(module: nn.Module, path: Path) -> None:
    expected = torch.load(path, weights_only=True)
    assert all(torch.equal(value, expected[key]) for key, value in module.state_dict().items())


def test_none_leaves_the_module_alone() -> None:
    module = net()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    load_weights(module, "none", published=None, weights_dir=None)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_path(published: Path) -> None:
    module = net()
    load_weights(module, str(published), published=None, weights_dir=None)
    assert_loaded(module, published)


def test_imagenet_is_downloaded_once(published: Path, server: str, tmp_path: Path) -> None:
    source = Published((published.name,), f"{server}/{published.name}")
    folder = tmp_path / "not" / "yet"
    module = net()
    load_weights(module, "imagenet", published=source, weights_dir=str(folder))
    assert_loaded(module, published)
    nowhere = Published((published.name,), f"http://127.0.0.1:1/{published.name}")
    again = net()
    load_weights(again, "imagenet", published=nowhere, weights_dir=str(folder))
    assert_loaded(again, published)


def test_imagenet_under_another_file_name(published: Path) -> None:
    source = Published(("net-00000000.pth", published.name), "http://127.0.0.1:1/net-00000000.pth")
    module = net()
    load_weights(module, "imagenet", published=source, weights_dir=str(published.parent))
    assert_loaded(module, published)


def test_url(published: Path, server: str, tmp_path: Path) -> None:
    module = net()
    load_weights(module, f"{server}/{published.name}", published=None, weights_dir=str(tmp_path / "new"))
    (downloaded,) = (tmp_path / "new").rglob(published.name)
    assert_loaded(module, downloaded)


def test_two_urls_may_end_alike(published: Path, server: str, tmp_path: Path) -> None:
    others = {}
    for name in ("a", "b"):
        (published.parent / name).mkdir()
        others[name] = published.parent / name / "model.pth"
        torch.save(net().state_dict(), others[name])
    for name in ("a", "b", "a"):
        module = net()
        load_weights(module, f"{server}/{name}/model.pth", published=None, weights_dir=str(tmp_path / "new"))
        assert_loaded(module, others[name])


@pytest.mark.parametrize(("url", "said"), [("http://127.0.0.1/", "names no file"), ("http://[a/b.pth", "is no URL")])
def test_a_url_of_no_file(tmp_path: Path, url: str, said: str) -> None:
    fails(said, url, None, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_torch_hubs_folder_by_default(published: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    shutil.copy(published, tmp_path / "hub" / "checkpoints")
    module = net()
    load_weights(module, "imagenet", published=Published((published.name,)), weights_dir=None)
    assert_loaded(module, published)


def test_a_run_s_checkpoint(tmp_path: Path) -> None:
    source, target = small(), small()
    state = {f"backbone.{key}": value for key, value in source.state_dict().items()}
    torch.save({"state_dict": {**state, "head.weight": torch.zeros(2)}, "epoch": 3}, tmp_path / "last.ckpt")
    load_weights(target, str(tmp_path / "last.ckpt"), published=None, weights_dir=None)
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in target.state_dict().items())


@pytest.mark.slow
def test_own_names_where_published_ones_differ(tmp_path: Path) -> None:
    source = mobilenet_v2(weights="none")
    torch.save(source.state_dict(), tmp_path / "ours.pth")
    target = mobilenet_v2(weights=str(tmp_path / "ours.pth"))
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in target.state_dict().items())


def test_file_from_before_batch_norm_counted(tmp_path: Path) -> None:
    state = {key: value for key, value in net().state_dict().items() if "num_batches" not in key}
    torch.save(state, tmp_path / "old.pth")
    module = net()
    load_weights(module, str(tmp_path / "old.pth"), published=None, weights_dir=None)
    assert torch.equal(module.state_dict()["0.weight"], state["0.weight"])


# --- the hub's folders, and what is known of a file ---


def hub(folder: Path, state: dict[str, torch.Tensor], licence: str | None = None) -> Path:
    """A cache as the hub's library makes it: snapshots of links to files that are named by their SHA-256."""
    snapshot = folder / "models--timm--net" / "snapshots" / "0123abcd"
    blobs = folder / "models--timm--net" / "blobs"
    for made in (snapshot, blobs, folder / "models--timm--net" / "refs"):
        made.mkdir(parents=True)
    save_file(state, folder / "new")
    blob = (folder / "new").rename(blobs / hashlib.sha256((folder / "new").read_bytes()).hexdigest())
    (snapshot / "model.safetensors").symlink_to(blob)
    (snapshot / "pytorch_model.bin").write_bytes(b"the other one is read")
    (folder / "models--timm--net" / "refs" / "main").write_text("0123abcd")
    said = {"license": licence, "mean": [0.4, 0.5, 0.6], "std": [1, 1, 1]} if licence else {}
    (snapshot / "config.json").write_text(json.dumps({"pretrained_cfg": said}))
    return snapshot


@pytest.mark.parametrize("what", ["file", "snapshot", "cache"])
def test_a_folder_of_the_hub(what: str, tmp_path: Path) -> None:
    state, module = net().state_dict(), net()
    snapshot = hub(tmp_path, state, "apache-2.0")
    place = {"file": snapshot / "model.safetensors", "snapshot": snapshot, "cache": snapshot.parents[1]}[what]
    source = load_weights(module, str(place), published=None, weights_dir=None)
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    blob = (snapshot / "model.safetensors").resolve()
    assert source == Source("model.safetensors", blob.name, "apache-2.0", ([0.4, 0.5, 0.6], [1.0, 1.0, 1.0]))
    assert source.told().keys() == {"file", "sha256", "licence", "colours"}
    assert Source("a.pth", None, "mit").told() == {"file": "a.pth", "sha256": None, "licence": "mit"}


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    state, module = net().state_dict(), net()
    torch.save(state, tmp_path / "pytorch_model.bin")
    source = load_weights(module, str(tmp_path), published=None, weights_dir=None)
    assert torch.equal(module.state_dict()["0.weight"], state["0.weight"])
    assert source is not None
    assert source.licence == "unknown"


def test_colours_are_those_that_the_weights_are_for(tmp_path: Path) -> None:
    """Not those of the network's own weights, which may have other colours."""
    vit = timm.create_model("test_vit")
    for licence, mean in (("mit", [0.4, 0.5, 0.6]), ("", list(vit.pretrained_cfg["mean"]))):
        snapshot = hub(tmp_path / (licence or "none"), vit.state_dict(), licence)
        backbone = timm_model(model_name="test_vit", weights=str(snapshot))
        assert torch.allclose(dict(backbone.normalize.named_buffers())["mean"].flatten(), torch.tensor(mean))


def test_colours_stay_those_of_the_weights_that_a_run_started_from(configure: Configure, tmp_path: Path) -> None:
    """In a checkpoint that is rebuilt, and in a network that starts from it."""
    torch.manual_seed(0)
    snapshot = hub(tmp_path, timm.create_model("test_vit").state_dict(), "mit")
    config = configure(*TINY, *VIT, f"backbone.weights={snapshot}")
    method = build(config).method.eval()
    run = save_run(tmp_path / "run", config, method)
    images = torch.rand(2, 3, 32, 32)
    tensors = {name: value for name, value in method.state_dict().items() if not name.startswith("losses.")}
    (tmp_path / "exported").mkdir()
    write_network(tmp_path / "exported", tensors, configuration_of(Trained.of(run)), 7)
    for place in (run, tmp_path / "exported"):
        again = Trained.of(place).method
        assert torch.equal(again.embed(images), method.embed(images))
    plain = configure(*TINY, *VIT, "backbone.weights=none")
    assert not torch.allclose(method.normalized(images), build(plain).method.normalized(images))
    for weights in (run / "checkpoints" / "last.ckpt", tmp_path / "exported"):
        started = build(configure(*TINY, *VIT, f"backbone.weights={weights}")).method
        assert torch.equal(method.normalized(images), started.normalized(images))


@pytest.mark.parametrize("lora", [4, 8])
def test_a_run_with_adapters_is_a_start(configure: Configure, tmp_path: Path, lora: int) -> None:
    """Of a network with convolutions, and of one with linear layers."""
    options = [*TINY, "backbone.train=lora", f"backbone.lora_rank={lora}"]
    for name, net in {"convolutions": [], "linear": [*VIT, "backbone.weights=none"]}.items():
        config = configure(*options, *net)
        method = build(config).method.eval()
        for key, parameter in method.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(parameter, std=0.05)
        run = save_run(tmp_path / name, config, method)
        file = run / "checkpoints" / "last.ckpt"
        started: Any = build(configure(*TINY, *net, f"backbone.weights={file}")).method.eval()
        seen, whole = method.normalized(torch.rand(2, 3, 32, 32)), method
        assert isinstance(whole, Baseline)
        torch.testing.assert_close(started.backbone(seen), whole.backbone(seen), rtol=1e-5, atol=1e-5)
        state = torch.load(file, weights_only=True)
        torch.save({"state_dict": state["state_dict"]}, tmp_path / "bare.pth")
        with pytest.raises(UserError, match=r"bare\.pth has adapters, and no configuration that says their scale: "):
            build(configure(*TINY, *net, f"backbone.weights={tmp_path / 'bare.pth'}"))


@pytest.mark.slow
def test_what_timm_leaves_out_of_files_of_the_hub_is_left_out(tmp_path: Path) -> None:
    vit = timm.create_model("test_vit")
    snapshot = hub(tmp_path, vit.state_dict() | {"mask_token": torch.zeros(1)})
    ours = timm_model(model_name="test_vit", weights=str(snapshot)).state_dict()
    assert torch.equal(ours["stages.block3.block.mlp.fc1.weight"], vit.blocks[3].mlp.fc1.weight)
    options = {"depths": [1, 1, 1, 1]}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **options)
    torch.save(swin.state_dict() | {"layers.1.blocks.0.attn_mask": torch.zeros(1)}, tmp_path / "swin.pth")
    ours = timm_model(
        model_name="swin_tiny_patch4_window7_224", weights=str(tmp_path / "swin.pth"), options=options
    ).state_dict()
    merging = swin.layers[1].downsample.reduction.weight
    assert torch.equal(ours["stages.layers_1_downsample.body.body.reduction.weight"], merging)


def test_a_damaged_blob_of_the_hub(tmp_path: Path) -> None:
    snapshot = hub(tmp_path, net().state_dict())
    blob = (snapshot / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    fails(r"model\.safetensors is damaged \(its SHA-256", str(snapshot))


def test_folders_that_are_no_choice(tmp_path: Path) -> None:
    fails(r"is a folder without model\.safetensors or pytorch_model\.bin: give a file", str(tmp_path))
    cache = hub(tmp_path, net().state_dict()).parents[1]
    (cache / "refs" / "main").unlink()
    (cache / "snapshots" / "4567").mkdir()
    fails(r"has 2 snapshots: give the folder of one of them", str(cache))


def test_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "net.safetensors").write_bytes(b"hello, this is none")
    fails(r"net\.safetensors is no safetensors file", str(tmp_path / "net.safetensors"))


def test_the_licence_is_that_of_the_published_file(published: Path, tmp_path: Path) -> None:
    source = Published((published.name, "copy.pth"), licence="BSD-3-Clause")
    found = load_weights(net(), "imagenet", published=source, weights_dir=str(published.parent))
    digest = hashlib.sha256(published.read_bytes()).hexdigest()
    assert found == Source(published.name, digest, "BSD-3-Clause")
    shutil.copy(published, tmp_path / "copy.pth")
    other = load_weights(net(), str(tmp_path / "copy.pth"), published=source, weights_dir=None)
    assert other == Source("copy.pth", digest, "unknown")  # nothing says that it is the same
    assert load_weights(net(), "none", published=source, weights_dir=None) is None


def test_a_day_in_a_name_is_no_hash(published: Path) -> None:
    dated = published.rename(published.with_name("net-20260131.pth"))
    load_weights(net(), "imagenet", published=Published((dated.name,)), weights_dir=str(dated.parent))
    undated = dated.rename(dated.with_name("net-20269931.pth"))
    fails("is damaged", "imagenet", Published((undated.name,)), undated.parent)


@pytest.mark.parametrize("name", ["step-00012000.pth", "model-1200000000.pth"])
def test_a_step_in_a_users_name_is_no_hash(published: Path, name: str) -> None:
    module = net()
    own = published.rename(published.with_name(name))
    load_weights(module, str(own), published=None, weights_dir=None)
    assert_loaded(module, own)


# --- the backbone of a run ---


@pytest.mark.parametrize(
    "options", [["method=baseline"], ["method=abe", "loss=xbm"], ["method=diablo"], ["method=gsp"]]
)
def test_the_backbone_of_a_run(options: list[str], method_of: Callable[..., Method], tmp_path: Path) -> None:
    """Whole or in parts, beside heads, masks, losses and what losses keep that is no tensor."""
    method = method_of(*options)
    expected = {name: value + 1 for name, value in small().state_dict().items()}
    state = method.state_dict()
    for name in expected:
        place = [key for key in state if key.endswith(f".{name}")][0]  # noqa: RUF015
        state[place] = expected[name]
    torch.save({"state_dict": state, "config": {}, "finished": True}, tmp_path / "last.ckpt")
    if options == ["method=diablo"]:  # F, psi and phi, which repeats some of psi's stages
        fails("no single backbone", str(tmp_path / "last.ckpt"))
        return
    found = small(weights=str(tmp_path / "last.ckpt")).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("method", ["mheads", "mtails", "deml"])
def test_a_run_with_several_backbones(method: str, method_of: Callable[..., Method], tmp_path: Path) -> None:
    torch.save({"state_dict": method_of(f"method={method}").state_dict()}, tmp_path / "last.ckpt")
    fails(
        r"last\.ckpt is of a method that has no single backbone \(there is a stage block", str(tmp_path / "last.ckpt")
    )


def test_a_run_with_another_backbone(method_of: Callable[..., Method], tmp_path: Path) -> None:
    torch.save({"state_dict": method_of("method=baseline").state_dict()}, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"is not of this backbone: it lacks \d+ keys"):
        resnet20(weights=str(tmp_path / "last.ckpt"))


# --- what can be wrong ---


def fails(match: str, weights: str, source: Published | None = None, folder: Path | None = None) -> None:
    with pytest.raises(UserError, match=match) as caught:
        load_weights(net(), weights, published=source, weights_dir=str(folder) if folder else None)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    fails(r"backbone\.weights=imagnet is no file: set it to imagenet, none, a path or a URL", "imagnet")
    fails("is a folder without", str(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"no weights here", b"\x80\x02}q\x00.", b"\0" * 99, b"PK\x03\x04 cut off"]
)
def test_not_a_checkpoint(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.pth").write_bytes(content)
    fails(r"net\.pth is not a checkpoint", str(tmp_path / "net.pth"))


class Unsafe:
    def __reduce__(self) -> tuple:
        return Path.touch, (Path("/dev/null"),)


def test_pickled_code_is_refused(tmp_path: Path) -> None:
    torch.save({"0.weight": Unsafe()}, tmp_path / "net.pth")
    fails(r"net\.pth is not a checkpoint.*weights_only", str(tmp_path / "net.pth"))


@pytest.mark.parametrize("content", [{}, [torch.zeros(1)], {"epoch": 3}])
def test_no_state_dict(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "net.pth")
    fails(r"net\.pth holds no state dict", str(tmp_path / "net.pth"))


def test_other_keys(tmp_path: Path) -> None:
    state = net().state_dict()
    torch.save({key: value for key, value in state.items() if not key.startswith("0")}, tmp_path / "a.pth")
    fails(r"a\.pth is not of this backbone: it lacks 2 keys \(0\.bias, 0\.weight, \.\.\.\)", str(tmp_path / "a.pth"))
    torch.save({**state, "9.weight": torch.zeros(1), "fc.weight": torch.zeros(1)}, tmp_path / "b.pth")
    fails(r"b\.pth .* has unknown 1 keys \(9\.weight", str(tmp_path / "b.pth"))
    torch.save({**state, "0.weight": torch.zeros(5, 3, 1, 1)}, tmp_path / "c.pth")
    fails(r"c\.pth .* has other shapes for 1 keys \(0\.weight", str(tmp_path / "c.pth"))


def test_another_network_is_named_by_published_keys(tmp_path: Path) -> None:
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), tmp_path / "resnet18.pth")
    with pytest.raises(UserError, match=r"resnet18\.pth .* lacks 260 keys \(features\.0\.0\.weight"):
        mobilenet_v2(weights=str(tmp_path / "resnet18.pth"))


def test_damaged_local_copy(published: Path, server: str, tmp_path: Path) -> None:
    folder, url = tmp_path / "folder", f"{server}/{published.name}"
    for weights in ("imagenet", url):
        source = Published((published.name,), url)
        load_weights(net(), weights, published=source, weights_dir=str(folder))
    copies = list(folder.rglob(published.name))
    assert len(copies) == 2
    for copy in copies:
        copy.write_bytes(published.read_bytes() + b"!")
    fails(f"{published.name} is damaged .*delete it", "imagenet", source, folder)
    fails(f"{published.name} is damaged .*delete it", url, None, folder)


def test_download_with_another_hash(published: Path, server: str, tmp_path: Path) -> None:
    wrong = published.rename(published.with_name("net-00000000.pth"))
    folder = tmp_path / "folder"
    source = Published((wrong.name,), f"{server}/{wrong.name}")
    fails(r"net-00000000\.pth does not match the hash in its name", "imagenet", source, folder)
    assert not list(folder.iterdir())


def test_a_broken_download_is_not_taken_for_the_file(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = published.read_bytes()
    cut = [len(content) // 2, len(content)]  # what is sent of the file, by request

    class Breaks(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: cut.pop(0)])

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr("dml.fetch.PAUSE", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Breaks) as httpd:
        thread = Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        module = net()
        load_weights(module, f"http://127.0.0.1:{httpd.server_port}/a.pth", published=None, weights_dir=str(tmp_path))
        httpd.shutdown()
        thread.join()
    assert_loaded(module, published)
    assert not cut


def test_download_impossible(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dml.fetch.PAUSE", 0)
    name = "net-00000000.pth"
    remedy = rf"put the file at .*{name} by hand, or set backbone\.weights=none"
    fails(f"answers 404 .*{remedy}", "imagenet", Published((name,), f"{server}/{name}"), tmp_path)
    fails(f"http://127.* cannot be fetched .*{remedy}", f"http://127.0.0.1:1/{name}", None, tmp_path)
    (tmp_path / "a_file").touch()
    fails(f"cannot be written .*{remedy}", f"{server}/{name}", None, tmp_path / "a_file")


def test_weights_that_have_to_be_made(tmp_path: Path) -> None:
    said = rf"{tmp_path}/bvlc_googlenet\.pth, .* does not exist: make it with .* path of a file"
    with pytest.raises(UserError, match=said):
        googlenet_v1(weights="imagenet", weights_dir=str(tmp_path))


def test_bn_inception_is_downloaded_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("dml.models.weights.fetch", lambda *given: asked.append(given) or given[1].touch())
    with pytest.raises(UserError, match="does not match the hash in its name"):
        bn_inception(weights="imagenet", weights_dir=str(tmp_path))
    name = "bn_inception-52deb4733.pth"
    url = f"http://data.lip6.fr/cadene/pretrainedmodels/{name}"
    assert asked == [(url, tmp_path / name)]
    assert not (tmp_path / name).exists()


def test_no_imagenet_weights_at_all() -> None:
    with pytest.raises(UserError, match=r"has no ImageNet weights: set backbone\.weights=none"):
        small(weights="imagenet")


def test_timm_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"timm cannot give test_resnet its weights .*backbone\.weights=none"):
        timm_model(model_name="test_resnet", weights="imagenet", weights_dir=str(tmp_path))


@pytest.mark.parametrize("there", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_is_fetched_only_if_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    asked: list[str] = []

    def fetched(place: str, files: tuple[str, ...]) -> Path:
        asked.extend(files)
        for name in {there} & set(files):
            (tmp_path / name).touch()
        return tmp_path

    monkeypatch.setattr("dml.models.weights.folder_of", fetched)
    assert find_weights("hf://me/model", published=None, weights_dir=None) == tmp_path / there
    assert ("pytorch_model.bin" in asked) == (there == "pytorch_model.bin")
