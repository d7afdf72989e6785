"""Models of the Hugging Face hub: `hf://owner/name[@revision]` names one, and stands wherever a folder does.

Files of a model come into the hub's cache, once; `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` are obeyed.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from dml.errors import UserError

SCHEME = "hf://"

# Data alone: no pickle, no code.
DATA = ("*.safetensors", "*.json", "*.yaml", "*.npz", "*.png", "README.md")


def is_address(place: object) -> bool:
    """Whether a word is an address and no path."""
    return isinstance(place, str) and re.match(r"\w{2,}:/", place) is not None


def folder_of(place: str | Path, files: Sequence[str] = DATA) -> Path:
    """The folder of a place: of a path that path itself, of an address what was fetched of it.

    Args:
        files: patterns of the names that are wanted of an address.

    Raises:
        UserError: an address that is none; the hub does not have it, refuses, or cannot be reached while the cache has
            nothing of it.
    """
    if not is_address(place):
        return Path(place)
    name, revision = parted(str(place))
    with _told(str(place)):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))


def parted(address: str) -> tuple[str, str | None]:
    """`owner/name`, and the revision where there is one. Raises UserError for what is no address of a model."""
    found = re.fullmatch(rf"{SCHEME}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", address)
    if found is None:
        raise UserError(f"{address} is no address of a model: write hf://owner/name or hf://owner/name@revision.")
    return found[1], found[2]


def upload(folder: Path, address: str, message: str) -> str:
    """Makes the model where it is not there, and puts the folder's files into it as one commit.

    Returns:
        Where it can be looked at.

    Raises:
        UserError: as `folder_of`; an address with a revision; a hub that nobody is logged in to.
    """
    name, revision = parted(address)
    if revision is not None:
        raise UserError(f"{address}: a model is published as its next revision: leave @{revision} out.")
    with _told(address):
        from huggingface_hub import HfApi

        hub = HfApi()
        place = hub.create_repo(name, repo_type="model", exist_ok=True)
        hub.upload_folder(
            repo_id=name, folder_path=folder, repo_type="model", commit_message=message, allow_patterns=list(DATA)
        )
        return str(place)


def licence_of(folder: Path) -> str | None:
    """What the front matter of a model's card says; None where there is no card, or it says nothing."""
    said = front_matter(folder / "README.md")
    licence = said.get("license_name") if said.get("license") == "other" else said.get("license")
    return licence if isinstance(licence, str) and licence.strip() else None


def front_matter(card: Path) -> dict[str, object]:
    """The YAML at the beginning of a card; nothing where there is none that can be read."""
    try:
        found = re.match(r"---\n(.{0,65536}?)\n---\n", card.read_text(encoding="utf-8"), re.DOTALL)
        if found is None or any(getattr(event, "anchor", None) for event in yaml.parse(found[1], yaml.SafeLoader)):
            return {}  # a few anchors can stand for more than memory holds
        said = yaml.safe_load(found[1])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


@contextmanager
def _told(address: str) -> Iterator[None]:
    """Says what huggingface_hub raises in one sentence."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(f"{address}: its owner lets only some have it: ask on its page, then log in.") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{address}: the hub has no such model, or does not show it to you: check the name, or log in with "
            "`hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{address}: the model has no such revision: leave it out for the newest.") from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"{address}: nobody is logged in to the hub: `hf auth login`, or set HF_TOKEN.") from error
    except errors.HfHubHTTPError as error:
        status = int(getattr(error.response, "status_code", 0))
        what = {401: "asks who you are", 403: "does not allow it"}.get(status, f"answers {status}")
        raise UserError(f"{address}: the hub {what}: log in with `hf auth login`, or try again later.") from error
    except errors.HFValidationError as error:
        raise UserError(f"{address} is no address of a model ({_brief(error)}): write hf://owner/name.") from error
    except Exception as error:  # of the connection, of many kinds
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{address}: the hub cannot be reached, and nothing of the model is in its cache here ({_brief(error)}): "
            "try again with a network, or name a folder."
        ) from error


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:160].rstrip(".") or type(error).__name__
