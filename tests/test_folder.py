"""The folder of a run: who may write there, and what is done about what lies there damaged."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from dml.errors import Interrupted, UserError
from dml.files import read_yaml, write_atomically
from dml.launch.sweep import Sweep
from dml.runs.folder import FORMAT, RunFolder
from dml.runs.log import log, logged, read_metrics
from dml.runs.starts import note_start
from dml.training import run as training
from dml.training.loggers import FolderLogger
from dml.training.run import run
from tests.conftest import TINY

Configure = Callable[..., DictConfig]
SIZES = ["runtime.embedding_dim=1", "runtime.train_classes=1"]
SHORT = [*TINY, "trainer.max_steps=2", "trainer.checkpoint_every=1", "protocol.every=2", "protocol.clustering=false"]


def begin(configure: Configure, *overrides: str, step: int = 2, finished: bool = True) -> RunFolder:
    """A folder with a checkpoint, as if trained to some step."""
    config = configure(*SHORT, *SIZES, *overrides)
    folder = RunFolder.of(config)
    folder.open(config, list(overrides))
    save(folder.last, config, step, finished)
    folder.write_metrics({"test/recall@1": 0.5})
    return folder


def save(path: Path, config: DictConfig, step: int, finished: bool) -> None:
    container = OmegaConf.to_container(config, resolve=True)
    saved = {"state_dict": {}, "config": container, "finished": finished, "global_step": step, "format": FORMAT}
    torch.save(saved, path)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_is_refused_has_written_nothing(configure: Configure, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    config = configure(*SHORT, *SIZES)
    with folder.locked():
        folder.open(config, [])
        before = content(folder.path)
        # Not trained yet, so that another configuration may take its place, but for the lock.
        with pytest.raises(UserError, match="being trained by another process"):
            run(configure(*SHORT, "lr=0.5"), ["lr=0.5"])
        assert content(folder.path) == before


@pytest.mark.slow
def test_what_another_process_did_meanwhile_is_seen(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(config: DictConfig, folder: RunFolder) -> Any:
        prepared = before(config, folder)
        begin(configure, "lr=0.25")
        return prepared

    before = training.prepare_run
    monkeypatch.setattr(training, "prepare_run", prepare)
    with pytest.raises(UserError, match=r"another configuration \(lr was 0.25, is 0.5"):
        run(configure(*SHORT, "lr=0.5"), [])
    assert RunFolder(tmp_path / "run").config().lr == 0.25


def test_the_checkpoint_says_what_run_it_is(configure: Configure) -> None:
    folder = begin(configure, "lr=0.25")
    folder.config_file.write_text(folder.config_file.read_text().replace("lr: 0.25", "lr: 0.5"))
    folder.check(configure(*SHORT, "lr=0.25"))
    assert folder.finished(configure(*SHORT, "lr=0.25"))
    with pytest.raises(UserError, match=r"lr was 0.25, is 0.5\): repeat its options to resume it, or"):
        folder.check(configure(*SHORT, "lr=0.5"))
    with pytest.raises(
        UserError, match=r"method.newer was not there, is 1\): .* with the version of dml that began it"
    ):
        folder.check(configure(*SHORT, "lr=0.25", "+method.newer=1"))


@pytest.mark.parametrize("name", ["metrics.json", "model.safetensors"])
def test_results_without_a_checkpoint_stay(configure: Configure, name: str) -> None:
    """Those of a run whose checkpoints were removed to save room, or of a published model."""
    folder = begin(configure, "lr=0.25")
    folder.last.unlink()
    folder.forget_results()
    folder.check(configure(*SHORT, "lr=0.5"))  # there is nothing to lose
    (folder.path / name).write_text("a result")
    before = content(folder.path)
    for rate in ("lr=0.25", "lr=0.5"):
        with pytest.raises(UserError, match=rf"{name} of a run, but no checkpoint .* would be lost: name another"):
            run(configure(*SHORT, rate), [rate])
    assert content(folder.path) == before


def test_results_of_a_shorter_training_go(configure: Configure) -> None:
    folder = begin(configure)
    for name in ("metrics.json", "queries.npz", "embeddings.npz", "report.html"):
        (folder.path / name).write_text("a result")
    before = set(content(folder.path))
    folder.forget_results()
    gone = before - set(content(folder.path))
    assert {Path(name).name for name in gone} == {"metrics.json", "queries.npz", "embeddings.npz", "report.html"}


def test_a_log_that_cannot_be_written_is_told(configure: Configure, tmp_path: Path) -> None:
    folder = begin(configure)
    folder.last.unlink()
    folder.forget_results()
    (tmp_path / "run" / "run.log").unlink(missing_ok=True)
    (tmp_path / "run" / "run.log").mkdir()
    with pytest.raises(UserError, match=r"run\.log cannot be written \(Is a directory\): correct its permissions"):
        run(configure(*SHORT), [])


def test_a_log_of_names_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("dml"), "propagate", False)  # pytest's own processes cannot send such a name
    with logged(tmp_path):
        log.warning("a\udcff.png cannot be read")
    assert "a\\udcff.png cannot be read" in (tmp_path / "run.log").read_text()


def test_a_signal_while_a_checkpoint_is_read_is_no_damage(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*_: Any, **__: Any) -> None:
        raise Interrupted("SIGTERM")

    folder = begin(configure)
    before = content(folder.path)
    monkeypatch.setattr(torch, "load", told)
    with pytest.raises(Interrupted):
        folder.checkpoint()
    assert content(folder.path) == before


def test_other_ranks_write_nothing(configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pytorch_lightning.utilities.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    folder, config = RunFolder(tmp_path / "run"), configure(*SHORT, *SIZES)
    with folder.locked():
        folder.open(config, [])
        note_start(folder, config, [])
        folder.check(config)  # also while the first has written nothing but its log
        (folder.path / "run.log").write_text("begun")
        folder.check(config)
    assert [path.name for path in folder.path.iterdir()] == ["run.log"]


def test_files_of_others_stay(configure: Configure) -> None:
    folder = begin(configure)
    checkpoints = folder.last.parent
    (checkpoints / ".ipynb_checkpoints").mkdir()
    (checkpoints / ".notes").write_text("mine")
    (checkpoints / ".last.ckpt.17").write_bytes(b"torn")
    folder.open(configure(*SHORT, *SIZES), [])
    assert {path.name for path in checkpoints.iterdir()} == {".ipynb_checkpoints", ".notes", "last.ckpt"}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _something_else(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)


def _of_no_run(path: Path) -> None:
    torch.save({"state_dict": {}, "config": {"site": "mine"}, "finished": True}, path)


@pytest.mark.parametrize("damage", [_cut, _something_else, _of_no_run])
def test_the_checkpoint_before_one_that_cannot_be_read(
    configure: Configure, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = begin(configure)
    config = configure(*SHORT, *SIZES)
    save(folder.previous, config, 1, finished=False)
    damage(folder.last)
    kept = folder.last.read_bytes()
    folder.check(config)
    assert folder.checkpoint() == folder.previous
    assert not folder.finished(config)
    folder.open(config, [])
    assert "the run continues from the one before it" in caplog.text
    assert (folder.last.parent / "damaged.ckpt").read_bytes() == kept
    damage(folder.previous)
    with pytest.raises(UserError, match=r"No checkpoint in .* is whole .*previous\.ckpt"):
        folder.check(config)


def test_a_checkpoint_without_permission(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begin(configure)
    save(folder.previous, configure(*SHORT, *SIZES), 1, finished=False)
    load = torch.load

    def forbidden(path: Path, **options: Any) -> Any:
        if path == folder.last:
            raise PermissionError(13, "Permission denied", str(path))
        return load(path, **options)

    monkeypatch.setattr(torch, "load", forbidden)
    assert folder.checkpoint() == folder.previous


@pytest.mark.parametrize(
    "text", ["", "\0\0\0\0", "[1]", '{"a": "b"}', '{"a": NaN}', '{"a": true}', '{"test/recall@1": 0.5', "[" * 100_000]
)
def test_damaged_figures_are_told(configure: Configure, text: str) -> None:
    folder = begin(configure)
    (folder.path / "metrics.json").write_text(text)
    with pytest.raises(UserError, match=r"has lost its metrics\.json .*delete checkpoints/last\.ckpt"):
        folder.finished(configure(*SHORT, *SIZES))


def test_torn_lines_are_left_out_for_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = [{"step": step, "train/loss": 0.5} for step in (1, 2, 3)]
    first, second, third = (json.dumps(record).encode() for record in whole)
    torn = [b"\0" * 40, second[:9], b"\xff\xfe", b'{"loss": 1}', b'"step"', b'{"step": "2"}', b"[" * 100_000]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([first, *torn, second, third, b'{"step": 4']))
    assert read_metrics(tmp_path / "metrics.jsonl") == whole
    FolderLogger(tmp_path).forget_after(2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == first + b"\n" + second + b"\n"
    assert "7 lines of" in caplog.text


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (BOMB, "has anchors"),
        ("[" * 100_000, "nested deeper"),
        ("a: b\n" * 300_000, "larger than 1 MiB"),
        ("a: ${b}${b}\nb: ${c}${c}\nruntime: {}\nmethod: {}\n", "holds references"),
        ("a: [", "is damaged"),
    ],
    ids=["anchors", "depth", "size", "references", "syntax"],
)
def test_a_configuration_that_no_run_writes_is_refused_at_once(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    began = time.monotonic()
    with pytest.raises(UserError, match=sentence):
        RunFolder(tmp_path).config()
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("content", ["3\n", "true", "!!bool foo", "- a: ["])
def test_yaml_of_something_else(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml is damaged: it is not valid YAML\.$"):
        read_yaml(file)


def test_nothing_stays_of_what_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "page.html", "text")
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_a_configuration_is_read_as_it_was_written(configure: Configure, tmp_path: Path) -> None:
    config = configure(*SHORT, *SIZES, "lr=1e-7", "+method.note='2024-01-01'", "+method.other='1e-7'")
    folder = RunFolder(tmp_path / "run")
    folder.name(config, ["lr=1e-7", "+method.note='${lr}'"])
    assert folder.config() == OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert folder.overrides() == ["lr=1e-7", "+method.note='${lr}'"]
    assert isinstance(read_yaml(folder.config_file), dict)


@pytest.mark.parametrize(
    ("typed", "name"), [("2026", "2026"), ("2026_10", "2026_10"), ("1e5", "1e5"), ("true", "true"), ("a", "a")]
)
def test_a_folder_has_the_name_that_was_typed(configure: Configure, typed: str, name: str) -> None:
    config = configure(f"paths.output_dir={typed}")
    assert RunFolder.of(config, [f"paths.output_dir={typed}"]).path == Path(name)
    assert config.paths.output_dir == name


@pytest.mark.parametrize("option", ["output_dir=null", "output_dir=[a]", "cache_dir=null", "data_dir=''"])
def test_what_names_no_folder(configure: Configure, option: str) -> None:
    with pytest.raises(UserError, match=rf"paths\.{option.partition('=')[0]}=.* is no folder: name one"):
        run(configure(*SHORT, f"paths.{option}"), [f"paths.{option}"])


@pytest.mark.parametrize("call", ["iterdir", "exists", "mkdir", "open"])
def test_a_folder_without_permission(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    if call == "iterdir":
        (tmp_path / "run").mkdir()
    plain = getattr(Path, call)

    def forbidden(path: Path, *args: Any, **options: Any) -> Any:
        if "run" in path.parts[-2:] and str(tmp_path) in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **options)

    config = configure(*SHORT, *SIZES)
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(Path, call, forbidden)
    with pytest.raises(UserError, match=r"Permission denied.*paths\.output_dir=FOLDER"):  # noqa: PT012
        folder.check(config)
        with folder.locked():
            folder.open(config, [])


def test_a_sweep_whose_place_names_no_folder(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Sweep().on_multirun_start(configure("paths.sweep_dir=null"))
    assert "paths.sweep_dir=null is no folder: name one." in capsys.readouterr().err


def test_a_checkpoint_of_another_version_is_not_trained_on(configure: Configure) -> None:
    folder = begin(configure, finished=False)
    config = configure(*SHORT, *SIZES)
    saved = torch.load(folder.last, weights_only=True)
    del saved["format"]
    torch.save(saved, folder.last)
    with pytest.raises(
        UserError, match=r"last\.ckpt was written by another version of dml, and only that version can continue it"
    ):
        folder.finished(config)
