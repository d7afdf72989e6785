"""Vectors of any images by a trained run."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from dml.embed import main
from dml.errors import UserError
from dml.evaluation import collecting
from dml.inference.embedding import Trained, embed_files
from dml.inference.galleries import read_gallery
from dml.inference.places import image_files
from dml.inference.vectors import Vectors, read_vectors, write_vectors
from dml.methods.base import Method
from dml.training.build import build
from tests.conftest import TINY
from tests.runs import embed_images, photographs, save_run, untrained_run

pytestmark = pytest.mark.usefixtures("one_thread")

Configure = Callable[..., DictConfig]
MethodOf = Callable[..., Method]
TWO = ("method=abe", "method.M=2")


def call(monkeypatch: pytest.MonkeyPatch, *options: str | Path) -> int:
    """The exit code of the command."""
    monkeypatch.setattr("sys.argv", ["embed", *map(str, options)])
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


@pytest.mark.parametrize("transform", ["plain", "shorter_crop"])
def test_embeddings_are_those_of_the_evaluation(configure: Configure, tmp_path: Path, transform: str) -> None:
    photographs(tmp_path / "photos")
    data = [
        "dataset=folder",
        "backbone=small",
        f"dataset.root={tmp_path / 'photos'}",
        "sampler.batch_size=4",
        f"transform={transform}",
    ]
    config = configure(*(option for option in TINY if not option.startswith("dataset")), *data, *TWO)
    parts = build(config)
    run = save_run(tmp_path / "trained", config, parts.method, "best_on_test")
    table = collecting.embed_batches(
        parts.method, parts.data.eval_dataloader(parts.data.query_rows), lambda batch: batch
    )
    files = [Path(path) for path in parts.records.paths[table.rows.numpy()]]
    found = embed_images(run, files, checkpoint="best_on_test", batch_size=3, device="cpu")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, table.embeddings.flatten(1) / 2**0.5, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_the_weights_are_those_of_the_figures(run: Path) -> None:
    """Of a run whose figures are of the best checkpoint, that one; the last while it has no figures."""
    last = run / "checkpoints" / "last.ckpt"
    assert Trained.of(run).checkpoint == last
    (run / "metrics.json").write_text('{"test/recall@1": 0.5, "best_on_test/step": 3}')
    assert Trained.of(run).checkpoint == last
    (run / "metrics.json").write_text('{"test/recall@1": 0.5, "last/recall@1": 0.4, "best_on_validation/step": 3}')
    with pytest.raises(UserError, match=r"has no checkpoint checkpoints/best_on_validation\.ckpt: it has last\."):
        Trained.of(run)
    best = shutil.copy(last, last.with_name("best_on_validation.ckpt"))
    assert Trained.of(run).checkpoint == best
    assert Trained.of(run, "last").checkpoint == last
    (run / "metrics.json").write_text("{")
    with pytest.raises(UserError, match=r"metrics\.json .*, or choose the weights with --checkpoint last\."):
        Trained.of(run)


def test_the_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = photographs(tmp_path / "photos", classes=2, each=2)
    for name in ("notes.txt", ".hidden.png", ".thumbs/0.png"):
        (tmp_path / "photos" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "photos" / name).write_text("no image")
    out = tmp_path / "new" / "vectors.npz"
    assert call(monkeypatch, run, files[3], tmp_path / "photos", "-o", out, "--learners", "--batch-size", "3") == 0
    expected = [files[3], *files[:3]]
    with np.load(out, allow_pickle=False) as content:
        assert content["paths"].tolist() == [str(file) for file in expected]
        assert (content["embeddings"].shape, content["learners"].shape) == ((4, 24), (4, 2, 12))
        np.testing.assert_allclose(np.linalg.norm(content["learners"], axis=2), 1, atol=1e-6)
        np.testing.assert_allclose(content["embeddings"], content["learners"].reshape(4, 24) / np.sqrt(2), atol=1e-7)
        np.testing.assert_allclose(content["embeddings"], embed_images(run, expected, device="cpu"), atol=1e-6)
    assert [file.name for file in out.parent.iterdir()] == ["vectors.npz"]


def test_unreadable_images(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = photographs(tmp_path / "photos", classes=1)
    files[0].write_bytes(files[0].read_bytes()[:60])
    files[2].write_text("no image")
    out = tmp_path / "vectors.npz"
    options = (run, tmp_path / "photos", "-o", out, "--batch-size", "1")
    assert call(monkeypatch, *options) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dml: 2 images cannot be read: {files[0]}, {files[2]}: ")
    assert said.count("\n") == 1
    assert not out.exists()
    assert call(monkeypatch, *options, "--skip") == 0
    assert f"Left out: 2 images cannot be read: {files[0]}, {files[2]}." in capsys.readouterr().out
    assert read_vectors(out).paths.tolist() == [str(files[1]), str(files[3])]
    with pytest.raises(UserError, match=r"0\.png cannot be read \(.*\): repair"):
        embed_images(run, files[:1])
    assert call(monkeypatch, run, files[0], "-o", out, "--skip") == 2
    assert "name others" in capsys.readouterr().err


def test_mistakes(
    run: Path,
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = photographs(tmp_path / "photos", classes=1, each=1)
    (tmp_path / "empty").mkdir()
    folder = tmp_path / "folder.npz"
    folder.mkdir()
    out = tmp_path / "new" / "below" / "vectors.npz"
    for options, sentence in {
        (tmp_path / "empty", files[0], "-o", out): "empty has no checkpoint checkpoints/last.ckpt: name the folder",
        (run, files[0], "-o", out, "--checkpoint", "best_on_test"): "best_on_test.ckpt: it has last.",
        (run, tmp_path / "empty", "-o", out): "empty has no images",
        (run, tmp_path / "nowhere", "-o", out): "there is no image or folder",
        (run, files[0], "-o", folder): "is a folder",
        (run, files[0], "-o", tmp_path / "vectors.NPZ"): "names neither a .npz nor a .npy file",
        (run, files[0], "-o", tmp_path / ".npz"): "names neither a .npz nor a .npy file",
        (run, files[0], "-o", "/proc/none/vectors.npz"): "/proc/none cannot be made",
        (run, files[0], "-o", out, "--batch-size", "0"): "--batch-size=0",
    }.items():
        assert call(monkeypatch, *options) == 2
        said = capsys.readouterr().err
        assert said.startswith("dml: ")
        assert sentence in said
        assert said.count("\n") == 1
    with pytest.raises(UserError, match="no images to embed"):
        embed_images(run, [])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no GPU"):
            embed_images(run, files, device="cuda")
    assert not (tmp_path / "new").exists()


def test_a_file_of_something_else_is_left_alone(
    run: Path, tmp_path: Path, call: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs(tmp_path / "photos", classes=1, each=1)
    np.savez(tmp_path / "own.npz", embeddings=np.eye(2))
    np.save(tmp_path / "labels.npy", np.arange(3))
    (tmp_path / "precious.jpg").write_text("a photograph")
    with monkeypatch.context() as patched:
        patched.setattr(Trained, "embed", None)  # it is told before anything is embedded
        for name, sentence in {
            "precious.jpg": "precious.jpg names neither a .npz nor a .npy file",
            "own.npz": "own.npz was not written by dml.embed",
            "labels.npy": "labels.npy does not belong to a gallery",
        }.items():
            before = (tmp_path / name).read_bytes()
            code, said = call("embed", run, tmp_path / "photos", "-o", tmp_path / name)
            assert (code, sentence in said, said.count("\n")) == (2, True, 1)
            assert (tmp_path / name).read_bytes() == before
    for _ in range(2):  # its own file is replaced
        assert call("embed", run, tmp_path / "photos", "-o", tmp_path / "vectors.npz", "--device", "cpu")[0] == 0


@pytest.mark.parametrize("out", ["vectors.npz", "gallery.npy"])
def test_paths_are_absolute(
    run: Path, tmp_path: Path, call: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    files = photographs(tmp_path / "photos", classes=1, each=2)
    monkeypatch.chdir(tmp_path)
    assert call("embed", run, "photos", "-o", out, "--device", "cpu")[0] == 0
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    found = read_vectors(tmp_path / out) if out.endswith("npz") else read_gallery(tmp_path / out)
    assert list(found.paths) == [str(file) for file in files]
    code, said = call("search", run, tmp_path / out, files[0], "-k", "2", "-o", "found", "--device", "cpu")
    assert (code, str(files[1]) in said) == (0, True)
    assert "not readable" not in Path("found/results.html").read_text()


@pytest.mark.filterwarnings("ignore:You passed .*16-mixed")  # Lightning says that the CPU takes bfloat16
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "32-true"])
def test_numbers_are_rounded_as_in_the_run(
    configure: Configure, method_of: MethodOf, tmp_path: Path, precision: str
) -> None:
    """By Lightning, whose trainer shows the images to the same network."""
    more = ("method=baseline", f"trainer.precision={precision}")
    run, images = untrained_run(configure, tmp_path / "trained", method_of(*more), *more), torch.rand(4, 3, 32, 32)

    class Shown(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.method = method_of(*more)

        def predict_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return self.method.embed(batch[0]).float()

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", precision=precision, **quiet)  # type: ignore[arg-type]
    shown = trainer.predict(Shown(), DataLoader(TensorDataset(images), batch_size=4))
    assert shown is not None
    expected = torch.nn.functional.normalize(torch.as_tensor(shown[0]), dim=-1)
    trained = Trained.of(run)
    found = trained.embed(images)
    assert found.dtype == next(trained.method.parameters()).dtype == torch.float32
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(4, 1), atol=1e-6, rtol=0)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    whole = Trained.of(run).method.embed(images)
    assert ((found - whole).abs().max() > 1e-5) == ("16" in precision)


def test_a_transform_that_could_do_anything_is_refused(run: Path, tmp_path: Path) -> None:
    files = photographs(tmp_path / "photos", classes=1, each=1)
    path = run / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=True)
    state["config"]["transform"]["test"] = {"_target_": "os.system", "command": f"touch {tmp_path / 'done'}"}
    torch.save(state, path)
    with pytest.raises(UserError, match=r"asks for os\.system"):
        embed_images(run, files)
    assert not (tmp_path / "done").exists()


def test_files_that_hold_no_vectors(tmp_path: Path) -> None:
    rows, names = np.eye(2, dtype=np.float32), np.array(["a", "b"])
    path = tmp_path / "vectors.npz"
    whole = Vectors(rows, names, "of these weights")
    write_vectors(path, whole)
    with np.load(path) as file:
        content = dict(file)
    assert read_vectors(path).weights == "of these weights"
    for changed, sentence in [
        ({"embeddings": None}, "embeddings"),
        ({"checksum": None}, "checksum"),
        ({"weights": None}, "weights"),
        ({"paths": names.astype(object)}, "Python objects"),
        ({"paths": names[:1]}, "it lacks a path"),
        ({"paths": names[::-1]}, "changed since"),
        ({"embeddings": rows[::-1]}, "changed since"),
        ({"embeddings": 2 * rows, "checksum": Vectors(2 * rows, names, whole.weights).checksum()}, "unit norm"),
        ({"weights": np.array("of others")}, "changed since"),
    ]:
        np.savez(path, **{name: value for name, value in (content | changed).items() if value is not None})
        with pytest.raises(UserError, match=f"vectors.npz is damaged, or none of a run .*{sentence}.*dml.embed"):
            read_vectors(path)
    path.write_text("no archive")
    with pytest.raises(UserError, match="damaged"):
        read_vectors(path)


def test_too_little_memory_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def embed(method: Method, images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trained = Trained.of(run, device="cpu")
    monkeypatch.setattr(type(trained.method), "embed", embed)
    with pytest.raises(
        UserError, match=r"too little memory for this: lower the batch size \(--batch-size\), or choose"
    ):
        trained.embed(torch.rand(2, 3, 32, 32))


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path: Path, refuse: Callable[[str], None]) -> None:
    photographs(tmp_path / "photos", classes=2, each=1)
    refuse("class1")
    with pytest.raises(UserError, match=r"the folder .*class1 cannot be read \(Permission denied\)"):
        image_files([tmp_path / "photos"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers(run: Path, tmp_path: Path, value: float) -> None:
    files = photographs(tmp_path / "photos", classes=1, each=1)
    path = run / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=True)
    name = next(name for name in state["state_dict"] if name.endswith(".weight"))
    state["state_dict"][name][0] = value
    torch.save(state, path)
    with pytest.raises(UserError, match=r"last\.ckpt .*are NaN or infinite"):
        embed_images(run, files)


def test_vectors_that_are_no_numbers(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights that are: buffers, or what overflows."""
    files = photographs(tmp_path / "photos", classes=1, each=3)
    trained = Trained.of(run)
    for value in (np.nan, 0.0):
        broken = torch.full((3, 2, 12), 12**-0.5)
        broken[1] = value
        monkeypatch.setattr(Trained, "embed", lambda self, images, broken=broken: broken)
        with pytest.raises(UserError, match=rf"NaN or not of unit norm for {re.escape(str(files[1]))}: its weights"):
            embed_files(trained, files)


def test_the_digest_is_of_the_weights_and_of_how_images_are_shown(run: Path) -> None:
    path = run / "checkpoints" / "last.ckpt"
    digest, state = Trained.of(run).digest(), torch.load(path, weights_only=True)
    torch.save(state | {"global_step": 9}, path)
    assert Trained.of(run).digest() == digest
    state["config"]["image_size"] = 40
    torch.save(state, path)
    assert Trained.of(run).digest() != digest


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A file name is bytes on Linux."""
    (file,) = photographs(tmp_path / "photos", classes=1, each=1)
    odd = file.rename(file.parent / "\udcff[b].PNG")
    assert image_files([tmp_path, odd]) == [odd]


def test_each_file_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photographs(tmp_path / "photos", classes=1, each=2)
    monkeypatch.chdir(tmp_path)
    places = [Path("photos"), tmp_path / "photos", Path("photos/../photos/class0/0.png")]
    assert image_files(places) == [Path("photos/class0/0.png"), Path("photos/class0/1.png")]


def test_links_to_folders_are_followed_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "b").mkdir(parents=True)
    (tmp_path / "elsewhere" / "b" / "1.jpg").write_bytes(b"")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "photos")
    assert image_files([tmp_path / "photos"]) == [tmp_path / "photos" / "link" / "b" / "1.jpg"]


@pytest.mark.exhaustive
def test_the_command_line(run: Path, tmp_path: Path) -> None:
    photographs(tmp_path / "photos", classes=1)
    (tmp_path / "photos" / "class0" / "1.png").write_text("no image")
    command = [sys.executable, "-m", "dml.embed", run, tmp_path / "photos", "-o", tmp_path / "v.npz", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "1.png cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
