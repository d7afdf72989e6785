"""Models on the Hugging Face hub. An address `hf://owner/name[@revision]` can be given wherever a folder can.

Files are downloaded once, into the hub's cache. `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` are obeyed.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from dml.errors import UserError, no_permission, no_room

SCHEME = "hf://"

# Only data is fetched: no pickle, no code.
DATA = ("*.safetensors", "*.json", "*.yaml", "*.npz", "*.png", "README.md")


def is_address(place: object) -> bool:
    """Returns whether a word is an address and not a path."""
    return isinstance(place, str) and re.match(r"\w{2,}:/", place) is not None


def folder_of(place: str | Path, files: Sequence[str] = DATA) -> Path:
    """Returns the folder of a place: a path as it is, and for an address the folder with the fetched files.

    Args:
        place: a path, or an address.
        files: patterns of the names of files to fetch.

    Raises:
        UserError: the address is malformed; or the hub does not have the model, refuses, or cannot be reached and the
            cache has nothing of the model.
    """
    if not is_address(place):
        return Path(place)
    name, revision = parted(str(place))
    with _told(str(place)):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))


def parted(address: str) -> tuple[str, str | None]:
    """Splits an address into `owner/name` and the revision, if any. Raises UserError if it is no address of a model."""
    found = re.fullmatch(rf"{SCHEME}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", address)
    if found is None:
        raise UserError(f"{address} is no address of a model: write hf://owner/name or hf://owner/name@revision.")
    return found[1], found[2]


def model_of(address: str) -> str:
    """Returns `owner/name` of an address to publish to. Raises UserError if it is no such address, or has a
    revision."""
    name, revision = parted(address)
    if revision is not None:
        raise UserError(f"{address}: a model is always published as its next revision; leave @{revision} out.")
    return name


def upload(folder: Path, files: Sequence[str], address: str, message: str, gone: Sequence[str] = ()) -> str:
    """Uploads files of a folder to the hub as one commit. The model is made if it does not exist.

    Args:
        folder: with the files.
        files: their names; other files of the folder stay here.
        address: of the model, without a revision.
        message: of the commit.
        gone: names of files that the model must not keep from earlier commits.

    Returns:
        The URL of the model.

    Raises:
        UserError: as `folder_of` and `model_of`; also if nobody is logged in to the hub.
    """
    name = model_of(address)
    with _told(address, sending=True):
        from huggingface_hub import HfApi

        hub = HfApi()
        place = hub.create_repo(name, repo_type="model", exist_ok=True)
        hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            repo_type="model",
            commit_message=message,
            allow_patterns=list(files),
            delete_patterns=list(gone) or None,
        )
        return str(place)


def licence_of(folder: Path) -> str | None:
    """Returns the licence in the front matter of a model's card; None if there is no card, or no licence in it."""
    said = front_matter(folder / "README.md")
    licence = said.get("license_name") if said.get("license") == "other" else said.get("license")
    return licence if isinstance(licence, str) and licence.strip() else None


def front_matter(card: Path) -> dict[str, object]:
    """Returns the YAML at the beginning of a card; empty if there is none that can be read."""
    try:
        found = re.match(r"---\n(.{0,65536}?)\n---\n", card.read_text(encoding="utf-8"), re.DOTALL)
        if found is None or any(getattr(event, "anchor", None) for event in yaml.parse(found[1], yaml.SafeLoader)):
            return {}  # a few anchors can stand for more values than fit into memory
        said = yaml.safe_load(found[1])
    except (OSError, ValueError, LookupError, AttributeError, TypeError, yaml.YAMLError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


@contextmanager
def _told(address: str, sending: bool = False) -> Iterator[None]:
    """Turns errors of huggingface_hub into UserErrors, of an upload if `sending`."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"{address}: its owner restricts access: ask for it on the model's page, then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{address}: the hub has no such model, or does not show it to you: check the name, or log in with "
            "`hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{address}: the model has no such revision: leave it out for the newest.") from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError(
            f"{address}: nobody is logged in to the hub: log in with `hf auth login`, or set HF_TOKEN."
        ) from error
    except errors.HfHubHTTPError as error:
        status = int(getattr(error.response, "status_code", 0))
        what = {401: "asks who you are", 403: "does not allow it"}.get(status, f"answers {status}")
        raise UserError(f"{address}: the hub {what}: log in with `hf auth login`, or try again later.") from error
    except errors.HFValidationError as error:
        raise UserError(f"{address} is no address of a model ({_brief(error)}): write hf://owner/name.") from error
    except Exception as error:  # errors of the connection are of many kinds
        if isinstance(error, UserError):
            raise
        if no_room(error) or no_permission(error) is not None:
            raise UserError(
                f"{address}: the hub's cache on this computer cannot be written ({_brief(error)}): make room, or name "
                "another folder for it with HF_HOME."
            ) from error
        if sending:
            raise UserError(
                f"{address}: the hub cannot be reached ({_brief(error)}): repeat the command with a network."
            ) from error
        raise UserError(
            f"{address}: the hub cannot be reached, and nothing of the model is in its cache here ({_brief(error)}): "
            "try again with a network, or name a folder."
        ) from error


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:160].rstrip(".") or type(error).__name__
