"""Loads weights from a file, a URL or a published source into a module: checked, and without running pickled code."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from dml.errors import UserError
from dml.fetch import fetch
from dml.files import alone, folder_of_url, read_json, read_tensors, sha256_of
from dml.hub import SCHEME, folder_of, licence_of
from dml.models.of_run import Colours, colours, colours_of, configuration, of_backbone

# Keys of classifiers and auxiliary classifiers in published files (torchvision, Cadene, Caffe), not of the backbone.
NOT_BACKBONE = ("fc.", "classifier.", "last_linear.", "aux1.", "aux2.", "loss1_", "loss2_", "loss3_")
SHOWN = 3  # offending keys in a message
TORCHVISION = "BSD-3-Clause"  # licence of what it publishes
IN_FOLDER = ("model.safetensors", "pytorch_model.bin")  # in a folder of the hub, the preferred one first


@dataclass(frozen=True)
class Published:
    """The source of a backbone's ImageNet weights.

    Without a `url` the user has to put the file into `weights_dir`.

    Attributes:
        files: names of files to look for in `weights_dir`.
        url: of the first of these files.
        by_hand: how to get the file if there is no `url`; a clause without a full stop.
        sha1: of the file from which the weights are converted.
        licence: of the first file.
        package: name of a Python package that brings the first file, in its folder `models`.
    """

    files: tuple[str, ...]
    url: str | None = None
    by_hand: str = ""
    sha1: str | None = None
    licence: str = "unknown"
    package: str | None = None


@dataclass(frozen=True)
class Source:
    """The file that the weights of a network were loaded from.

    Attributes:
        file: its name, or the hub's name for weights that a library fetched.
        sha256: of the file; None: a library read it.
        licence: of the weights, if their source says it; else `unknown`.
        colours: of the images for which the weights are, if timm's configuration beside them says it, or the run that
            they are from had such ones.
    """

    file: str
    sha256: str | None
    licence: str
    colours: Colours | None = None

    def told(self) -> dict[str, Any]:
        """Returns what `provenance.json` says of the weights; colours only if they are known."""
        said = asdict(self)
        return said if self.colours else {name: value for name, value in said.items() if name != "colours"}


def load_weights(
    module: nn.Module,
    weights: str,
    *,
    published: Published | None,
    weights_dir: str | None,
    names: Mapping[str, str] | None = None,
    ignore: tuple[str, ...] = NOT_BACKBONE,
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> Source | None:
    """Loads `weights` into all parameters and buffers of `module`.

    Args:
        module: changed in place.
        weights: `none` leaves the module as it is; `imagenet`; a path; or a URL, downloaded once into a folder of its
            own in `weights_dir`. A file holds a state dict, bare or under `state_dict` as in a run's checkpoint, of
            which only the backbone's part is used. Its keys are the published ones or the module's own (`stages.`...).
            A folder is a snapshot of the hub, or a folder of the hub's cache that has snapshots;
            `hf://owner/name[@revision]` is fetched.
        published: the source of `imagenet`; None: there is none.
        weights_dir: folder of weight files; None: torch.hub's own.
        names: published key -> key of `module`, where they differ.
        ignore: beginnings of keys in the file that are left out.
        convert: converts the keys of other files to published ones.

    Returns:
        Where the weights are from; None for `none`.

    Raises:
        UserError: the file is missing, damaged, no checkpoint or of another network, or there is no source, or a
            download fails.
    """
    path = find_weights(weights, published=published, weights_dir=weights_dir)
    if path is None:
        return None
    is_users = not (weights == "imagenet" or "://" in weights)
    digest, state, said = _checked(path, is_users), read_tensors(path), _of_timm(path)
    run = configuration(state, path)
    seen = colours([said.get("mean"), said.get("std")]) or colours_of(run)
    source = Source(path.name, digest, _licence(path, published), seen)
    _fit(module, _weights(state, run, path), path, names or {}, ignore, convert)
    return source


def find_weights(weights: str, *, published: Published | None, weights_dir: str | None) -> Path | None:
    """Returns the local file that `weights` stands for, downloaded if necessary; None for `none`.

    Arguments and errors are those of `load_weights`.
    """
    folder = weights_folder(weights_dir)
    if weights == "none":
        return None
    if weights == "imagenet":
        return _imagenet(published, folder)
    if weights.startswith(SCHEME):
        for name in IN_FOLDER:  # a pickle is fetched only if there is nothing else
            folder = folder_of(weights, (name, "config.json", "README.md"))
            if (folder / name).is_file():
                break
        return _in_folder(folder)
    if "://" in weights:
        return _download(weights, folder_of_url(weights, folder))
    path = Path(weights).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if not path.is_file():
        raise UserError(f"backbone.weights={weights} is no file: set it to imagenet, none, a path or a URL.")
    return path


def _in_folder(folder: Path) -> Path:
    """Returns the weight file in a snapshot of the hub, or in a folder of the hub's cache that has snapshots."""
    if (snapshots := folder / "snapshots").is_dir():
        main, there = folder / "refs" / "main", sorted(snapshots.iterdir())
        named = [snapshots / main.read_text().strip()] if main.is_file() else there
        if len(named) != 1 or not named[0].is_dir():
            raise UserError(f"backbone.weights={folder} has {len(there)} snapshots: give the folder of one of them.")
        folder = named[0]
    for name in IN_FOLDER:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"backbone.weights={folder} is a folder without {' or '.join(IN_FOLDER)}: give a file of weights.")


def weights_folder(weights_dir: str | None) -> Path:
    """Returns the folder of weight files; None stands for torch.hub's own folder."""
    return Path(weights_dir).expanduser() if weights_dir else Path(torch.hub.get_dir()) / "checkpoints"


def _imagenet(published: Published | None, folder: Path) -> Path:
    if published is None:
        raise UserError("this backbone has no ImageNet weights: set backbone.weights=none or to the path of a file.")
    for place in (folder, _of_package(published.package)):
        for name in published.files:
            if place is not None and (place / name).is_file():
                return place / name
    if published.url is None:
        raise UserError(
            f"{folder / published.files[0]}, the file of this backbone's ImageNet weights, does not exist: "
            f"{published.by_hand}; or set backbone.weights to the path of a file or to none."
        )
    return _download(published.url, folder)


def _of_package(name: str | None) -> Path | None:
    """Returns the folder of weights in an installed package, without running any of its code."""
    spec = find_spec(name) if name else None
    return Path(spec.origin).parent / "models" if spec is not None and spec.origin else None


def _download(url: str, folder: Path) -> Path:
    try:
        name = Path(urlparse(url).path).name
    except ValueError as error:
        raise UserError(f"backbone.weights={url} is no URL ({error}).") from None
    if not name:
        raise UserError(f"backbone.weights={url} names no file: give the URL of one.")
    path = folder / name
    if path.is_file():
        return path
    by_hand = f"put the file at {path} by hand, or set backbone.weights=none"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder / f".{name}.lock"):
            fetch(url, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): {by_hand}.") from None
    except UserError as error:
        raise UserError(f"{error} Otherwise {by_hand}.") from None
    if not sha256_of(path).startswith(_hash_prefix(path) or ""):
        path.unlink()
        raise UserError(f"{url} does not match the hash in its name: try again, or another source.")
    return path


def _hash_prefix(path: Path) -> str | None:
    """Returns the beginning of the SHA-256 in a file's name, as in googlenet-1378be20.pth (torch.hub's convention).

    A date, as in net-20260131.pth, is no hash.
    """
    found = re.search(r"-(?!(?:19|20)\d\d[01]\d[0-3]\d\.)([a-f0-9]{8,})\.", path.name)
    return found.group(1) if found else None


def _checked(path: Path, is_users: bool) -> str:
    """Returns the file's SHA-256. Raises UserError if the name of its blob in the hub's cache says another.

    So may the file's own name, but not that of a user's file: there, digits may be anything, such as a step.
    """
    digest = sha256_of(path)
    blob = path.resolve().name
    said = (None if is_users else _hash_prefix(path)) or (blob if re.fullmatch("[a-f0-9]{64}", blob) else "")
    if not digest.startswith(said):
        raise UserError(f"{path} is damaged (its SHA-256 begins with {digest[:8]}): delete it and fetch it again.")
    return digest


def _licence(path: Path, published: Published | None) -> str:
    """Returns the licence of a file: that of a known source, or what the hub's card or timm's configuration says."""
    if published is not None and path.name == published.files[0]:
        return published.licence
    if (licence := licence_of(path.parent)) is not None:
        return licence
    said = _of_timm(path).get("license")
    return said if isinstance(said, str) and said else "unknown"


def _of_timm(path: Path) -> dict[str, Any]:
    """Returns what timm's configuration beside a file says of the weights; empty if there is none."""
    try:
        said = read_json(path.with_name("config.json"))["pretrained_cfg"]
    except (UserError, KeyError, TypeError):  # missing, or not in timm's format
        return {}
    return said if isinstance(said, dict) else {}


def _weights(state: Any, run: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """Returns the weights of the backbone in what a file holds."""
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if isinstance(state, dict):
        state = of_backbone(state, run, path)
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} holds no state dict (names to tensors): give a file that does.")
    return state


def _fit(
    module: nn.Module,
    state: dict[str, Tensor],
    path: Path,
    names: Mapping[str, str],
    ignore: tuple[str, ...],
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None,
) -> None:
    expected = module.state_dict()
    if any(key in expected for key in state):
        names = {}  # the file uses the module's own names
    elif convert is not None and {names.get(key) for key in state if not key.startswith(ignore)} != expected.keys():
        with suppress(Exception):  # for a file of another network it may raise anything
            state = convert(dict(state))
    published = {ours: theirs for theirs, ours in names.items()}
    given = {names.get(key, key): value for key, value in state.items() if not key.startswith(ignore)}
    # Files from before batch norm counted its batches lack the counter; nothing here reads it.
    missing = [key for key in expected.keys() - given.keys() if not key.endswith("num_batches_tracked")]
    unexpected = given.keys() - expected.keys()
    given = {key: _old_shape(value, expected[key]) for key, value in given.items() if key in expected}
    shapes = [key for key, value in given.items() if value.shape != expected[key].shape]
    for problem, keys in (("lacks", missing), ("has unknown", unexpected), ("has other shapes for", shapes)):
        if keys:
            first = ", ".join(sorted(published.get(key, key) for key in keys)[:SHOWN])
            raise UserError(
                f"{path} is not of this backbone: it {problem} {len(keys)} keys ({first}, ...): "
                "choose the backbone that the file was made for, or another file."
            )
    module.load_state_dict(given, strict=False)


def _old_shape(value: Tensor, expected: Tensor) -> Tensor:
    """Removes the first axis of batch norm's vectors [1, C] in files ported from Caffe (bn_inception-52deb4733.pth)."""
    return value.squeeze(0) if value.shape == (1, *expected.shape) else value
