"""Publishing: a trained embedding as a folder that others can load, read and check, without a pickle and without code.

`model.safetensors` and `config.yaml` are the network. `metrics.json`, `queries.npz`, `embeddings.npz` and
`provenance.json` come from the run. `README.md` is the card. `published.json`, the manifest, is written last and has a
digest of each file and each tensor.
"""

import hashlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from torch import Tensor

from dml import __version__
from dml.configuration.places import holds_path, without_secrets
from dml.errors import UserError
from dml.files import (
    CONFIG,
    MANIFEST,
    NETWORK,
    atomic_path,
    load_checkpoint,
    sha256_of,
    write_atomically,
    write_network,
)
from dml.hub import model_of, upload
from dml.inference.embedding import Trained
from dml.inference.tested import portable
from dml.inference.vectors import writable
from dml.reporting.card import Facts, Licences, card
from dml.runs import provenance
from dml.runs.chosen import result
from dml.runs.folder import RunFolder
from dml.runs.scores import EMBEDDINGS, QUERIES

CARD, PICTURE = "README.md", "similarities.png"
BEGUN = ".publishing"  # marks a folder whose publishing began and has not ended

CAPTION = "Cosine similarity of positive and negative pairs of test images"

OF_RUN = ("metrics.json", QUERIES, EMBEDDINGS)

# A value, or a part of Hydra's lists and mappings, without quotes: the key, if there is one, and the rest.
PART = re.compile(r"(\s*(?:(?!file:)\w+:(?!//)\s*)?)([^\s\[\]{},'\"][^\[\]{},'\"]*)")


def publish(run: Path, folder: Path, licences: Mapping[str, str | None], to: str | None = None) -> None:
    """Runs the command: writes what is published of a finished run into a folder, and puts it on the hub.

    The weights are those of the checkpoint to which the run's figures belong.

    Args:
        run: the folder of a finished run.
        folder: where to write. It is made; files of an earlier call are replaced.
        licences: of `weights`, `backbone` and `data`. A licence that is None and that the run does not know is asked
            for, if the command runs at a terminal.
        to: an address on the hub, `hf://owner/name`; None: the hub gets nothing.

    Raises:
        UserError: `run` is not a finished run of one training, a licence is unknown, `folder` is `run`, is not empty
            and holds nothing published, or cannot be written. Also as `dml.hub.upload`.
    """
    if folder.resolve() == run.resolve():
        raise UserError(f"{folder} holds what is to be published: name another folder with -o.")
    settings = RunFolder(run).config()
    if settings is None:
        raise UserError(f"{run} is not the folder of a run: name one.")
    metrics = RunFolder(run).metrics()
    trained = Trained.of(run)
    config = load_checkpoint(trained.checkpoint)["config"]
    starts = [_without_places(start) for start in provenance.starts(run)]
    if to is not None:
        model_of(to)
    said = _licences(licences, starts)
    marks = (MANIFEST, BEGUN)
    if folder.exists() and any(folder.iterdir()) and not any((folder / mark).is_file() for mark in marks):
        raise UserError(f"{folder} is not empty, and holds nothing published: name another folder with -o.")
    writable(folder)
    name = folder.resolve().name if to is None else to.rpartition("/")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BEGUN).touch()
        (folder / MANIFEST).unlink(missing_ok=True)  # it is written last: a folder that has it is complete
        tensors = trained.weights()
        write_network(folder, tensors, portable(config), trained.step)
        for file in OF_RUN:
            _copy(run / file, folder / file)
        drawn = run / "figures" / PICTURE  # in a published folder it is beside the rest
        _copy(drawn if drawn.is_file() else run / PICTURE, folder / PICTURE)
        write_atomically(folder / provenance.FILE, json.dumps(starts, indent=1) + "\n")
        facts = Facts(
            name=name,
            place=to or folder.resolve().name,
            width=trained.width,
            config=settings,
            metrics=metrics,
            protocol=_in_a_sentence(settings.protocol, result(metrics)),
            starts=starts,
            licences=said,
            picture={"file": PICTURE, "caption": CAPTION} if (folder / PICTURE).is_file() else None,
        )
        write_atomically(folder / CARD, card(facts))
        manifest = _manifest(folder, trained, tensors)
        write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        (folder / BEGUN).unlink()
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): name another folder with -o.") from error
    print(f"Published: {folder}\nLook at {folder / CARD}, and check it: python -m dml.verify {folder}")
    if to is not None:
        files = [*manifest["files"], CARD, MANIFEST]
        gone = [file for file in (*OF_RUN, PICTURE) if file not in files]
        print(f"On the hub: {upload(folder, files, to, f'{name}, step {trained.step}', gone)}")


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns, by name, the SHA-256 of each tensor's type, shape and numbers."""
    return {
        name: hashlib.sha256(
            f"{value.dtype}{list(value.shape)}".encode() + value.contiguous().numpy().tobytes()
        ).hexdigest()
        for name, value in tensors.items()
    }


def _manifest(folder: Path, trained: Trained, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    files = [NETWORK, CONFIG, provenance.FILE, *OF_RUN, PICTURE]
    return {
        "dml": __version__,
        "weights": trained.digest(),
        "step": trained.step,
        "files": {file: sha256_of(folder / file) for file in files if (folder / file).is_file()},
        "tensors": digests_of(tensors),
    }


def _copy(source: Path, target: Path) -> None:
    """Copies a file. If there is none, the one of an earlier call is removed."""
    if not source.is_file():
        target.unlink(missing_ok=True)
        return
    with atomic_path(target) as new:
        shutil.copyfile(source, new)


def _licences(given: Mapping[str, str | None], starts: list[dict[str, Any]]) -> Licences:
    """Collects the licences from the options, from the run, and from the user at the terminal.

    Raises:
        UserError: one is missing, and there is no terminal to ask at.
    """
    began = next((start["weights"] for start in reversed(starts) if isinstance(start.get("weights"), dict)), None)
    known = {"backbone": None if began is None else began.get("licence")}
    if starts and began is None:
        known["backbone"] = "none: training began from random weights"
    questions = {
        "weights": ("--licence", "under which licence you publish the weights"),
        "backbone": ("--backbone-licence", "under which licence the backbone's weights came"),
        "data": ("--data-licence", "under which licence or terms the training images came"),
    }
    found = {}
    for name, (option, question) in questions.items():
        said = " ".join((given.get(name) or "").split()) or known.get(name)  # the card has it in one line
        if said in (None, "", "unknown"):
            if not sys.stdin.isatty():
                raise UserError(f"neither the command nor the run says {question}: say it with {option}.")
            try:
                said = input(f"Please say {question}: ").strip()
            except EOFError:  # Ctrl-D
                said = ""
            if not said:
                raise UserError(f"nothing is published until you say {question}: say it with {option}.")
        found[name] = str(said)
    return Licences(**found)


def _without_places(start: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a start of the run's provenance in which the command has names instead of paths of the machine, see
    `holds_path`."""
    words = []
    for word in shlex.split(str(start["command"])):
        option, equals, value = word.partition("=") if "=" in word else ("", "", word)
        parts = partial(_without_place, option.rpartition(".")[2])
        words.append(option + equals + PART.sub(parts, value))
    return {**start, "command": shlex.join(words)}


def _without_place(option: str, part: re.Match[str]) -> str:
    """Returns a part of an option's value as it is, or only its name if it is a path."""
    key, value = part[1], part[2]
    if "://" in value and not value.startswith("file:"):
        return key + without_secrets(value)
    return key + Path(value).name if holds_path(key.strip().rstrip(":") or option, value) else part[0]


def _in_a_sentence(protocol: Any, checkpoint: str) -> str:
    said = str(get_object(str(protocol._target_)).__doc__ or "").strip().partition("\n\n")[0]
    chosen = {
        "last": "The figures are of the last checkpoint.",
        "best_on_test": "The figures are of the best checkpoint on the test set, which flatters them.",
        "best_on_validation": "The figures are of the best checkpoint on validation classes, which are not tested.",
    }
    return f"{' '.join(said.split())} {chosen[checkpoint]}"
