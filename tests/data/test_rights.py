"""What may not be read is told in a sentence, rather than passed over. By a child without root's rights."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from omegaconf import DictConfig

from dml.data.check import readable
from dml.data.dataset import open_dataset
from dml.data.miniatures import MAKERS
from dml.errors import UserError
from dml.inference.places import image_files
from dml.models.backbones.trained import backbone_of
from tests.runs import photographs

NOBODY = 65534


def _child(function: Callable[[], object], answer: Connection) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        function()
        answer.send("nothing")
    except UserError as error:
        answer.send(str(error))
    except BaseException as error:
        answer.send(repr(error))


def said(function: Callable[[], object]) -> str:
    """The UserError of a function that has no rights but everybody's."""
    context = multiprocessing.get_context("fork")
    ours, its = context.Pipe()
    child = context.Process(target=_child, args=(function, its))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    text = ours.recv()
    for end in (ours, its):
        end.close()
    assert isinstance(text, str)
    return text


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may read and write; pytest's own are root's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)
        for at, folders, _ in os.walk(name):  # so that it can be removed
            for folder in folders:
                os.chmod(Path(at, folder), 0o777)


@pytest.mark.parametrize(
    ("closed", "rights", "sentence"),
    [
        (".", 0o000, "photographs cannot be read (Permission denied)"),
        ("class1", 0o000, "class1 cannot be read (Permission denied)"),
        ("class1", 0o444, "class1/0.png (Permission denied)"),
        ("class1/2.png", 0o000, "1 of the 16 images of dataset folder cannot be read: "),
    ],
)
def test_a_folder(configure: Callable[..., DictConfig], place: Path, closed: str, rights: int, sentence: str) -> None:
    photographs(place / "photographs")
    os.chmod(place / "photographs" / closed, rights)
    config = configure("dataset=folder", f"dataset.root={place / 'photographs'}")
    assert sentence in said(lambda: readable(open_dataset(config), place / "cache"))
    os.chmod(place / "photographs" / closed, 0o755)
    assert said(lambda: readable(open_dataset(config), place / "cache")) == "nothing"


def test_a_folder_of_a_benchmark(configure: Callable[..., DictConfig], place: Path) -> None:
    MAKERS["cub200"](place / "CUB_200_2011")
    config = configure("dataset=cub200", f"paths.data_dir={place}", "dataset.strict=false")
    open_dataset(config)  # and imports what it takes, which the child may have no right to
    inner = place / "CUB_200_2011" / "images" / "100.Some_Bird"
    os.chmod(inner, 0o000)
    assert f"the folder {inner} cannot be read (Permission denied)" in said(lambda: open_dataset(config))


@pytest.mark.parametrize("closed", ["net.pth", "."])
def test_a_file_of_weights(configure: Callable[..., DictConfig], place: Path, closed: str) -> None:
    folder = place / "weights"
    folder.mkdir()
    (folder / "net.pth").touch()
    os.chmod(folder / closed, 0o000)
    config = configure("backbone=resnet18", f"backbone.weights={folder / 'net.pth'}")
    expected = (
        f"backbone: {folder / 'net.pth'} cannot be read (Permission denied): make it readable, or choose another."
    )
    assert said(lambda: backbone_of(config.backbone)) == expected


@pytest.mark.parametrize("name", ["images_background.zip", "."])
def test_a_zip(configure: Callable[..., DictConfig], place: Path, name: str) -> None:
    (place / "omniglot").mkdir()
    (place / "omniglot" / "images_background.zip").write_bytes(b"")
    os.chmod(place / "omniglot" / name, 0o000)
    config = configure("dataset=omniglot", f"paths.data_dir={place}")
    assert "(Permission denied)" in said(lambda: open_dataset(config))


def test_images_to_embed(place: Path) -> None:
    photographs(place / "photographs")
    os.chmod(place / "photographs" / "class1", 0o000)
    assert "class1 cannot be read (Permission denied)" in said(lambda: image_files([place / "photographs"]))
