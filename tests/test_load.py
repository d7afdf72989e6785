"""A run, or what was exported of it, as an object: the same bits either way."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from PIL import Image

import dml
from dml.data.images import pixels
from dml.errors import UserError
from dml.inference.embedding import Trained
from dml.inference.export import export
from dml.inference.places import shown_path
from dml.inference.search import search
from dml.methods.base import Method
from dml.models.products import products
from tests.runs import embed_images, photographs, untrained_run

pytestmark = pytest.mark.usefixtures("one_thread")

TWO = ("method=abe", "method.M=2")


@pytest.mark.slow
def test_a_run_and_what_was_exported_of_it(run: Path, tmp_path: Path) -> None:
    files = photographs(tmp_path / "photos", classes=1)
    export(run, tmp_path / "exported", ("torch",))
    expected = embed_images(run, files, device="cpu", batch_size=3)
    for place in (run, tmp_path / "exported", str(tmp_path / "exported")):
        embedder = dml.load(place, device="cpu")
        np.testing.assert_array_equal(embedder.embed(files, batch_size=3), expected)
        opened = [Image.open(file) for file in files]
        np.testing.assert_array_equal(embedder.embed(opened, batch_size=3), expected)
        assert torch.equal(embedder.transform(files[0]), Trained.of(run).transform(opened[0]))
        card = embedder.card
        assert (card["method"], card["dim"], card["image_size"], card["step"]) == ("ABE", 24, 32, 7)
        assert card["weights"] == Trained.of(run).digest()


def test_a_single_image_is_no_list(run: Path, tmp_path: Path) -> None:
    file, *_ = photographs(tmp_path / "photos", classes=1)
    embedder = dml.load(run, device="cpu")
    for images in (file, str(file), Image.new("RGB", (8, 8)), (one for one in [file]), [], {file}, {"a": file}):
        with pytest.raises(UserError, match="put a single image into a list"):
            embedder.embed(images)  # type: ignore[arg-type]
    for array in (np.zeros((8, 8, 3), np.uint8), torch.zeros(3, 8, 8)):
        with pytest.raises(UserError, match=rf"no {type(array).__name__}: for an array, PIL\.Image\.fromarray"):
            embedder.embed([file, array])  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["turned", "deep"])
def test_an_opened_picture_is_that_of_its_file(run: Path, tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(0)
    file = tmp_path / f"picture.{'jpg' if kind == 'turned' else 'png'}"
    if kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6  # a quarter turn
        Image.fromarray(random.integers(0, 256, (20, 40, 3), dtype=np.uint8)).save(file, exif=exif)
    else:
        Image.fromarray(random.integers(0, 65536, (20, 40), dtype=np.uint16)).save(file)
    embedder = dml.load(run, device="cpu")
    np.testing.assert_array_equal(embedder.embed([Image.open(file)]), embedder.embed([file]))
    assert torch.equal(embedder.transform(Image.open(file)), embedder.transform(file))
    with pytest.raises(UserError, match=r"\(a picture\) cannot be read \(its pixels are signed"):
        embedder.embed([Image.new("F", (20, 20))])


@pytest.mark.slow
@pytest.mark.parametrize("word", ["highest", "high", "medium"])
def test_products_are_rounded_as_in_the_run(
    configure: Callable[..., DictConfig],
    method_of: Callable[..., Method],
    tmp_path: Path,
    word: str,
) -> None:
    """And as before afterwards, in a program with settings of its own."""

    def settings() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    options, seen = ("method=baseline", f"trainer.matmul={word}"), []
    untrained_run(configure, tmp_path / "run", method_of(*options), *options)
    export(tmp_path / "run", tmp_path / "exported", ("torch",))
    for place in (tmp_path / "run", tmp_path / "exported"):
        trained = Trained.of(place)
        trained.method.backbone.register_forward_pre_hook(lambda *_: seen.append(settings()))
        for other in ("highest", "high"):
            with products(other):
                before = settings()
                trained.embed(torch.rand(2, 3, 32, 32))
                assert settings() == before
    assert seen == [(word, word != "highest")] * 4


@pytest.mark.slow
def test_commands_take_what_was_exported(run: Path, tmp_path: Path) -> None:
    files = photographs(tmp_path / "photos", classes=1)
    exported = tmp_path / "exported"
    export(run, exported, ("torch",))
    first = search(run, tmp_path / "photos", files[:1], tmp_path / "found", k=2, device="cpu")
    assert search(exported, tmp_path / "found", files[:1], k=2, device="cpu") == first
    export(exported, tmp_path / "again", ("torch",))
    assert Trained.of(tmp_path / "again").digest() == Trained.of(run).digest()
    with pytest.raises(UserError, match="holds the model that is to be exported"):
        export(exported, exported, ("torch",))
    assert str(tmp_path) not in (exported / "config.yaml").read_text()


def test_mistakes(run: Path, tmp_path: Path) -> None:
    (file,) = photographs(tmp_path / "photos", classes=1, each=1)
    embedder = dml.load(run, device="cpu")
    for images in ([], file, str(file)):
        with pytest.raises(UserError, match="embed takes a list of images"):
            embedder.embed(images)  # type: ignore[arg-type]
    file.write_text("no image")
    with pytest.raises(UserError, match=r"0\.png cannot be read"):
        embedder.embed([file])
    for place, sentence in {
        "hf://somebody": "is no address of a model",
        tmp_path / "nowhere": "there is no folder",
        file: "there is no folder",
        tmp_path / "photos": "has no checkpoint",
    }.items():
        with pytest.raises(UserError, match=sentence):
            dml.load(place)
    with pytest.raises(UserError, match="there is no folder aaa"):
        dml.load("a" * 300)
    with pytest.raises(UserError, match=r"0\.png cannot be read"):
        embedder.transform(file)
    with pytest.raises(UserError, match=r"\(a picture\) cannot be read \(it has no pixels\)"):
        embedder.embed([Image.new("RGB", (0, 0))])


def test_a_picture_that_comes_several_times(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow cannot read it in two threads at once: pixels would be wrong, or refused."""
    busy = Lock()

    def slowly(picture: Image.Image) -> Image.Image:
        assert busy.acquire(blocking=False)
        time.sleep(0.01)
        busy.release()
        return pixels(picture)

    monkeypatch.setattr("dml.inference.load.pixels", slowly)
    monkeypatch.setattr("dml.inference.embedding.cores", lambda: 8)
    (file,) = photographs(tmp_path / "photos", classes=1, each=1)
    found = dml.load(run, device="cpu").embed(deque([Image.open(file)] * 8))
    assert (found == found[0]).all()


def test_a_terminal_does_not_obey_the_name_of_a_file() -> None:
    assert shown_path("photos/\x1b[31ma\n\udce9.png") == "photos/\\x1b[31ma\\x0a\ufffd.png"


def test_weights_that_were_damaged_on_the_disk(run: Path) -> None:
    path = run / "checkpoints" / "last.ckpt"
    content = bytearray(path.read_bytes())
    with ZipFile(path) as parts:
        largest = max(parts.infolist(), key=lambda part: part.file_size)
    content[largest.header_offset + largest.file_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"last\.ckpt is damaged, .*some of it is not as it was written"):
        dml.load(run)


def test_statistics_that_are_no_numbers(run: Path) -> None:
    path = run / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    name = next(name for name in content["state_dict"] if name.endswith("running_mean"))
    content["state_dict"][name][0] = torch.nan
    torch.save(content, path)
    with pytest.raises(UserError, match=rf"its weights {name} are NaN or infinite"):
        dml.load(run)
