"""Exported embeddings against the run's own."""

import builtins
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.export import Dim

from dml.errors import UserError
from dml.export import main
from dml.files import write_network
from dml.inference import export as exporting
from dml.inference.export import Embedding, as_onnx, as_torch, need_onnx, run_onnx, run_torch, traced
from dml.methods.base import Method
from dml.models.attention import ObjectAttention
from dml.runs.provenance import add_start
from tests.components import but_exhaustive
from tests.runs import untrained_run

pytestmark = pytest.mark.usefixtures("one_thread")

Configure = Callable[..., DictConfig]
MethodOf = Callable[..., Method]

FILES = ["config.yaml", "model.json", "model.onnx", "model.pt2", "model.safetensors"]

SIZE = 16  # pixels; tracing takes as long for larger images, comparing does not
EXHAUSTIVE = ("dces", "deml", "diablo", "mheads", "mheads_att", "mtails")  # to export, and made of what others are
# Less than by default, for every learner and every step of a solver is a part of the graph.
FEWER = {name: f"method.{letter}=2" for name, letter in {"dces": "K", "deml": "J", "diablo": "N"}.items()}
FEWER |= dict.fromkeys(("abe", "mheads", "mheads_att", "mtails"), "method.M=2") | {"gsp": "head.iterations=3"}


def options(name: str) -> list[str]:
    return [f"method={name}", *([FEWER[name]] if name in FEWER else [])]


def check(run: Callable[[Tensor], Tensor], method: Method) -> None:
    """Against the method itself, for other batch sizes than the traced one, also of images with an object."""
    images = torch.rand(5, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    images[1, :, 3:9, 4:12] = 1
    with torch.no_grad():
        learners = method.eval().embed(images)
    expected = torch.cat(list(learners.unbind(1)), dim=1) / learners.shape[1] ** 0.5
    torch.testing.assert_close(run(images), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(run(images[:1]), expected[:1], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", but_exhaustive("method", *EXHAUSTIVE))
def test_torch_of_every_method(method_of: MethodOf, tmp_path: Path, name: str) -> None:
    program = traced(Embedding(method_of(*options(name))), SIZE)
    (tmp_path / "model.pt2").write_bytes(as_torch(program))
    check(run_torch(tmp_path / "model.pt2"), method_of(*options(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", but_exhaustive("method", "baseline", *EXHAUSTIVE))
def test_onnx_of_every_method(method_of: MethodOf, tmp_path: Path, name: str) -> None:
    (tmp_path / "model.onnx").write_bytes(as_onnx(traced(Embedding(method_of(*options(name))), SIZE)))
    check(run_onnx(tmp_path / "model.onnx"), method_of(*options(name)))
    (shape,) = (node.type.tensor_type.shape for node in onnx.load(tmp_path / "model.onnx").graph.input)
    assert [size.dim_param or size.dim_value for size in shape.dim] == ["batch", 3, SIZE, SIZE]


@pytest.mark.slow
@pytest.mark.parametrize("locality", [None, 0.15])
def test_onnx_of_object_attention(tmp_path: Path, locality: float | None) -> None:
    """Without the rest of DeML, which takes a minute to export: an operator that writes into a view fails."""
    attention = ObjectAttention(locality)
    program = torch.export.export(attention, (torch.zeros(2, 3, 4, 5),), dynamic_shapes=({0: Dim("batch", min=1)},))
    (tmp_path / "model.onnx").write_bytes(as_onnx(program))
    maps = torch.rand(5, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(run_onnx(tmp_path / "model.onnx")(maps), attention(maps), atol=1e-6, rtol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gem", "vlad", "otp", "smk", "solar", "transformer", "gsop", "cbam", "delf"])
def test_torch_of_other_heads(method_of: MethodOf, tmp_path: Path, name: str) -> None:
    chosen = ["method=baseline", f"head={name}"]
    program = traced(Embedding(method_of(*chosen)), 32)
    (tmp_path / "model.pt2").write_bytes(as_torch(program))
    assert exporting.largest_difference(Embedding(method_of(*chosen)), run_torch(tmp_path / "model.pt2"), 32) < 1e-5


@pytest.mark.slow
def test_the_command(
    configure: Configure,
    method_of: MethodOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = method_of("method=baseline")
    run = untrained_run(configure, tmp_path / "trained", made, "method=baseline", f"image_size={SIZE}")
    monkeypatch.setattr("sys.argv", ["export", str(run)])
    main()
    said = capsys.readouterr().out
    folder = run / "export"
    assert sorted(file.name for file in folder.iterdir()) == FILES
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    module = torch.export.load(folder / "model.pt2").module()
    check(lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0]), made)
    check(module, made)

    content = json.loads((folder / "model.json").read_text())
    assert (content["method"], content["dim"], content["step"]) == ("Baseline", 24, 7)
    assert content["input"]["shape"] == ["B", 3, SIZE, SIZE]
    assert content["started_from"] == "unknown"
    assert content["preprocessing"]["options"] == {
        "resize": {"_target_": "torchvision.transforms.v2.Resize", "size": [SIZE, SIZE]}
    }
    assert "turned as its EXIF orientation says" in content["preprocessing"]["steps"][0]
    assert content["preprocessing"]["steps"][1].startswith(f"Resize(size=[{SIZE}, {SIZE}]")
    for file in ("model.pt2", "model.onnx"):
        apart = content["parity"][file]["largest_difference"]
        assert 0 <= apart < 1e-5
        assert f"{file}: largest difference from the network in float32 {apart:.1e}" in said


def test_it_says_from_which_weights_the_training_started(
    configure: Configure, method_of: MethodOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = untrained_run(configure, tmp_path / "trained", method_of("method=baseline"), "method=baseline")
    monkeypatch.setattr(exporting, "traced", lambda network, size: None)
    add_start(run, ["python"], "here")
    assert exporting.export(run, tmp_path / "out", ())["started_from"] == "random weights"
    source = {"file": "resnet50.pth", "sha256": None, "licence": "bsd-3-clause"}
    add_start(run, ["python"], "here", {"weights": source})
    exporting.export(run, tmp_path / "out", ())
    assert json.loads((tmp_path / "out" / "model.json").read_text())["started_from"] == source
    assert exporting.export(tmp_path / "out", tmp_path / "again", ())["started_from"] == source
    (tmp_path / "out" / "model.json").write_text("[1")
    with pytest.raises(UserError, match=r"model\.json is damaged"):
        exporting.export(tmp_path / "out", tmp_path / "torn", ())
    assert not (tmp_path / "torn").exists()


def test_what_computes_something_else_leaves_the_export_before(
    configure: Configure,
    method_of: MethodOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = untrained_run(configure, tmp_path / "trained", method_of("method=baseline"), "method=baseline")
    folder = tmp_path / "out"
    monkeypatch.setattr(exporting, "traced", lambda network, size: None)
    exporting.export(run, folder, ())
    (folder / "model.pt2").write_text("of an export before")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setitem(exporting.MAKE, "torch", (lambda program: b"", lambda path: lambda images: _wrong(images)))
    monkeypatch.setattr("sys.argv", ["export", str(run), "--format", "torch", "-o", str(folder)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert "model.pt2 would differ by" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def _wrong(images: Tensor) -> Tensor:
    return torch.full((len(images), 24), 24**-0.5)


@pytest.mark.parametrize("found", [torch.zeros(1, 3), torch.full((1, 24), torch.nan)])
def test_any_other_output_is_no_match(method_of: MethodOf, found: Tensor) -> None:
    network = Embedding(method_of("method=baseline"))
    assert exporting.largest_difference(network, lambda images: found.expand(len(images), -1), SIZE) == float("inf")


def test_only_an_export_is_replaced(
    configure: Configure, method_of: MethodOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = untrained_run(configure, tmp_path / "trained", method_of("method=baseline"), "method=baseline")
    monkeypatch.setattr(exporting, "traced", lambda network, size: None)
    (tmp_path / "link").symlink_to(run)
    others = {run: "holds the model", tmp_path / "link": "holds the model", run / "checkpoints": "holds the model"}
    kept = {"site": "config.yaml", "published": "config.yaml", "app": "model.json", "other": "model.onnx"}
    others |= {tmp_path / folder: f"{file} is not of a whole export" for folder, file in kept.items()}
    for folder, sentence in others.items():
        folder.mkdir(exist_ok=True)
        (folder / kept.get(folder.name, "config.yaml")).write_text("of something else")
        if folder.name == "published":
            for name in ("model.safetensors", "published.json"):
                (folder / name).write_text("of something else")
        before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        with pytest.raises(UserError, match=sentence):
            exporting.export(run, folder, ())
        assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
    again = tmp_path / "again"
    exporting.export(run, again, ())
    (again / "model.json").unlink()  # as after a kill
    (again / "model.onnx").write_text("of other weights")
    exporting.export(run, again, ())
    assert {file.name for file in again.iterdir()} == {"config.yaml", "model.safetensors", "model.json"}
    exporting.export(again, tmp_path / "of_an_export", ())
    with pytest.raises(UserError, match="holds the model"):
        exporting.export(again, again, ())


def test_a_full_disk_leaves_the_network_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_network(tmp_path, {"a": torch.zeros(2)}, {"of": "before"}, 1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_network(tmp_path, {"a": torch.ones(2)}, {"of": "after"}, 2)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_kill_leaves_no_network_of_two(tmp_path: Path) -> None:
    """At each renaming: the weights are those of the configuration beside them, or missing."""
    code = """
import os, sys, torch
from pathlib import Path
from dml.files import write_network
folder, left = Path(sys.argv[1]), int(sys.argv[2])
write_network(folder, {"a": torch.zeros(2)}, {"of": "before"}, 1)
def replace(*paths, done=os.replace):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    done(*paths)
os.replace = replace
write_network(folder, {"a": torch.ones(2)}, {"of": "after"}, 2)
"""
    for left, of in enumerate(("before", "after", "after")):
        folder = tmp_path / str(left)
        folder.mkdir()
        done = subprocess.run([sys.executable, "-c", code, folder, str(left)], check=False)
        assert done.returncode == (-9 if left < 2 else 0)
        assert (folder / "config.yaml").read_text() == f"of: {of}\n"
        weights = folder / "model.safetensors"
        if left == 2:
            assert load_file(weights)["a"].tolist() == [1, 1]
        else:
            assert not weights.exists()


def test_mistakes(
    configure: Configure,
    method_of: MethodOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["export", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "has no checkpoint checkpoints/last.ckpt" in capsys.readouterr().err

    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "onnxscript" else builtins)
    with pytest.raises(UserError, match=r"onnxscript, which is not installed: pip install '\.\[export\]'"):
        need_onnx()

    method = method_of("method=baseline")
    monkeypatch.setattr(method, "learners", lambda images: images[:, 0] if images.sum() > 1 else images[:, 1])
    with pytest.raises(UserError, match="Baseline cannot be exported by torch"):
        traced(Embedding(method), SIZE)
    run = untrained_run(configure, tmp_path / "trained", method_of("method=baseline"), "method=baseline")
    with pytest.raises(UserError, match="cannot be made"):
        exporting.export(run, Path("/proc/none"), ("torch",))
