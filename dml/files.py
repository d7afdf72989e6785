"""Files: writing them whole or not at all, and reading files of strangers as data, so that no code in them is run."""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
import yaml
from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from dml.errors import UserError

log = logging.getLogger("dml")

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
NETWORK, CONFIG = "model.safetensors", "config.yaml"
MANIFEST = "published.json"  # of a published folder
LARGEST, DEEPEST = 1 << 20, 50  # bytes and levels of a YAML file; those of runs have some thousand bytes and 5 levels


def write_atomically(path: Path, content: str) -> None:
    """Writes a temporary file and renames it. A kill or a power cut leaves either the old or the new file, whole."""
    with atomic_path(path) as new:
        write_through(new, content)


def write_through(path: Path, content: str) -> None:
    """Writes a file and flushes it to the disk."""
    # Names of files may have bytes that are not UTF-8: Python's lone surrogates, which are written as escapes.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to. It is renamed to `path` at the end, or removed if writing failed."""
    # Processes in containers, or of several machines, may have the same number.
    new = path.with_name(f".{path.name}.{os.getpid()}{secrets.randbelow(10**8):08}")
    try:
        yield new
        os.replace(new, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # as of a full disk
            error.filename = str(path)
        new.unlink(missing_ok=True)
        raise


@contextmanager
def alone(path: Path, taken: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds a lock meanwhile, so that only one process at a time goes on. The lock ends with the process, however that
    ends.

    On a file system without locks nothing is held, and a warning is logged.

    Args:
        path: of the lock file, which is removed at the end.
        taken: called if another process holds the lock. It may raise an error; if it returns, this process waits.

    Raises:
        OSError: the file cannot be made.
    """
    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if taken is not None:
                taken()
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
            raise
        log.warning("%s cannot be locked (%s): make sure that no other process writes there.", path.parent, error)
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # some systems cannot remove open files
                path.unlink()
        lock.release()


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Goes through a folder as `os.walk` does, from the top, also through links to folders.

    A link to a folder that the way has already come through is left out, so that loops end.

    Raises:
        UserError: a folder may not be read.
    """
    ways: dict[str, tuple[str, ...]] = {os.fspath(root): (os.path.realpath(root),)}  # the real folders from the root
    for place, folders, files in os.walk(root, onerror=closed_folder, followlinks=True):
        way = ways.pop(place)
        for name in list(folders):
            path = os.path.join(place, name)
            real = os.path.realpath(path) if os.path.islink(path) else os.path.join(way[-1], name)
            if real in way:
                folders.remove(name)
            else:
                ways[path] = (*way, real)
        yield place, folders, files


def closed_folder(error: OSError) -> None:
    """Raises UserError for a folder that `os.walk` may not read and would silently skip; a missing one is ignored."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise UserError(
            f"the folder {error.filename} cannot be read ({error.strerror}): make it readable, or what lies in it "
            "would be missing"
        )


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def torn(folder: Path, suffix: str) -> list[Path]:
    """Returns temporary files of `atomic_path` that a kill left in a folder, for files whose names end in `suffix`."""
    left = re.compile(rf"\..+{re.escape(suffix)}\.\d+")
    return [path for path in folder.iterdir() if left.fullmatch(path.name) and path.is_file()]


def sound(path: Path) -> bool:
    """Returns whether a checkpoint exists and is whole, by the checksums of all its parts."""
    try:
        with ZipFile(path) as parts:
            return parts.testzip() is None
    except (OSError, BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError, zlib.error):
        return False


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Reads a file of `torch.save`, or a `.safetensors` file, to the CPU. Only tensors and plain containers are read,
    so no code in the file is run.

    Args:
        path: of the file.
        mmap: map the file into memory, so that parts are read when they are used.

    Raises:
        UserError: it cannot be read, or is no such file.
    """
    safe = path.suffix == ".safetensors"
    try:
        return load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}).") from error
    except SafetensorError as error:
        raise UserError(f"{path} is no safetensors file ({error}): use another.") from error
    except Exception as error:  # for a foreign file, torch's parsers raise errors of any kind
        raise UserError(
            f"{path} is not a checkpoint that torch.load reads with weights_only=True: use another."
        ) from error


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises UserError if it cannot be read or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not valid JSON.") from error


def read_yaml(path: Path) -> Any:
    """Reads a YAML file into plain containers; OmegaConf's references are not resolved.

    It refuses what no file of ours has. Anchors are refused because a few lines of them can stand for more values than
    fit into memory.

    Raises:
        UserError: the file cannot be read, is no YAML, has anchors, is larger than 1 MiB, or is nested deeper than 50
            levels.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path} is larger than {LARGEST >> 20} MiB, unlike any file of a run: it is not read.")
        text = path.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if getattr(event, "anchor", None):
                raise UserError(f"{path} has anchors, which no file of a run has: it is not read.")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise UserError(f"{path} is nested deeper than any file of a run: it is not read.")
        return OmegaConf.to_container(OmegaConf.create(text))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    except UserError:
        raise
    except Exception as error:  # yaml and OmegaConf raise almost anything for what is no mapping
        raise UserError(f"{path} is damaged: it is not valid YAML.") from error


def refers(node: Any) -> bool:
    """Returns whether plain containers hold a reference of OmegaConf's, which can grow as anchors can."""
    if isinstance(node, dict):
        return any(refers(part) for part in (*node.keys(), *node.values()))
    return any(map(refers, node)) if isinstance(node, list | tuple) else isinstance(node, str) and "${" in node


def folder_of_url(url: str, parent: Path) -> Path:
    """Returns the folder of what is downloaded from a URL: one for each, since many sources use the same file names."""
    return parent / hashlib.sha256(url.encode()).hexdigest()[:8]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of a run to the CPU; its tensors are read when they are used. A file that `write_network`
    wrote is returned in the form of a checkpoint.

    Raises:
        UserError: it is no checkpoint of a run, or is damaged.
    """
    if path.name == NETWORK:
        return _network(path)
    try:
        content = read_tensors(path, mmap=True)
    except UserError as error:
        raise UserError(f"{path} is no checkpoint of a run, or damaged: choose another.") from error
    parts = ("state_dict", "config", "finished")
    if not isinstance(content, dict) or not all(name in content for name in parts):
        raise UserError(f"{path} is no checkpoint of a run, or damaged: it lacks one of {', '.join(parts)}.")
    if not isinstance(content["state_dict"], dict) or not _of_a_run(content["config"]):
        raise UserError(f"{path} is no checkpoint of a run, or damaged: it has no configuration of a run.")
    return content


def write_network(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], step: int) -> None:
    """Writes a trained network without a pickle: `model.safetensors`, and `config.yaml`, from which the network is
    built again. If they cannot be written, older files stay as they are. A kill never leaves the configuration of one
    network beside the weights of another.

    Args:
        folder: where to write.
        tensors: by name, on the CPU; no two may share memory.
        config: plain containers, without OmegaConf's references.
        step: of the training, written into the metadata of the weights.
    """
    laid_out = {name: value.contiguous() for name, value in tensors.items()}
    with atomic_path(folder / NETWORK) as weights, atomic_path(folder / CONFIG) as settings:
        with weights.open("wb") as file:  # not save_file, whose file only its owner can read
            file.write(save(laid_out, metadata={"format": "pt", "step": str(step)}))
            file.flush()
            os.fsync(file.fileno())
        write_through(settings, OmegaConf.to_yaml(OmegaConf.create(config)))
        (folder / NETWORK).unlink(missing_ok=True)


def holds_network(folder: Path) -> bool:
    """Returns whether a folder has what `write_network` writes."""
    try:
        return (folder / NETWORK).is_file() and _of_a_run(read_yaml(folder / CONFIG))
    except UserError:
        return False


def _network(path: Path) -> dict[str, Any]:
    tensors, config = read_tensors(path), read_yaml(path.with_name(CONFIG))
    if not _of_a_run(config) or refers(config):
        raise UserError(f"{path.with_name(CONFIG)} is not the configuration of a run: fetch the folder again.")
    with safe_open(path, "pt") as file:
        step = (file.metadata() or {}).get("step", "0")
    return {
        "state_dict": tensors,
        "config": config,
        "finished": True,
        "global_step": int(step) if re.fullmatch(r"\d{1,12}", step) else 0,
    }


def _of_a_run(config: Any) -> bool:
    """Returns whether plain containers are the configuration of a run in the form in which it is saved."""
    parts = ("runtime", "method", "backbone", "head", "loss", "trainer", "paths", "protocol", "dataset")
    return isinstance(config, dict) and all(isinstance(config.get(part), dict) for part in parts)
