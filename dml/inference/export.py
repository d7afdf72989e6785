"""Export of a trained embedding as one file that can be used without dml.

model.pt2 and model.onnx map images `[B,3,H,W]` in 0..1, of the run's image_size, to embeddings `[B,D]` of unit norm,
for any B. They include the normalisation by the backbone's mean and deviation. Each file is read again after writing,
and its embeddings are compared with the run's.
"""

import io
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dml.data.transforms import PadSquare, Transform
from dml.errors import Unfaithful, UserError
from dml.files import CONFIG, MANIFEST, NETWORK, atomic_path, holds_network, read_json, write_atomically, write_network
from dml.inference.embedding import Trained
from dml.inference.vectors import writable
from dml.methods.base import Method
from dml.models.backbones.trained import merge_adapters
from dml.models.backbones.transformer import Block
from dml.runs import provenance

FILES, ABOUT = {"torch": "model.pt2", "onnx": "model.onnx"}, "model.json"
NAMES = (CONFIG, NETWORK, ABOUT, *FILES.values())  # of all files of an export

PACKAGES = ("onnx", "onnxscript", "onnxruntime")

TRACED, COMPARED = 2, (1, 5)  # batch sizes with which the network is traced, and with which files are compared

TOLERANCE = 1e-4  # of a value of an embedding

INPUT, OUTPUT = "images", "embeddings"

Exported = Callable[[Tensor], Tensor]


class Embedding(nn.Module):
    """A method as a plain network in evaluation mode: images `[B,3,H,W]` in 0..1 -> `[B,D]` of unit norm."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        # torch.export.save warns of weights in another memory format.
        merge_adapters(method)
        self.method = method.eval().requires_grad_(False).to(memory_format=torch.contiguous_format)

    def forward(self, images: Tensor) -> Tensor:
        learners = self.method.embed(images)
        return learners.flatten(1) / learners.shape[1] ** 0.5


def need_onnx() -> None:
    """Raises UserError if a package that ONNX needs is not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(
            f"ONNX needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install '.[export]', or export with --format torch."
        )


def traced(network: Embedding, image_size: int) -> ExportedProgram:
    """Traces the network: returns its graph for images of one size, in batches of any size.

    Raises:
        UserError: torch cannot trace the network, for example a transformer with class or register tokens.
    """
    if any(isinstance(module, Block) and module.count for module in network.modules()):
        raise UserError(
            "A transformer that has class or register tokens beside its map cannot be exported, since torch.export "
            "does not trace them: choose another backbone, such as swin_tiny or convnext_tiny."
        )
    images = torch.zeros(TRACED, 3, image_size, image_size)
    try:
        with torch.no_grad():
            return torch.export.export(network, (images,), dynamic_shapes=({0: Dim("batch", min=1)},))
    except Exception as error:  # torch's, of many kinds
        raise UserError(f"{type(network.method).__name__} cannot be exported by torch: {_brief(error)}.") from error


def as_torch(program: ExportedProgram) -> bytes:
    """Returns the bytes of a file that `torch.export.load` reads."""
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def as_onnx(program: ExportedProgram) -> bytes:
    """Returns the bytes of an ONNX model. Raises UserError if an operator has no counterpart in ONNX."""
    need_onnx()
    try:
        made = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: "batch"},),
        )
    except Exception as error:  # the exporter's, of many kinds
        raise UserError(
            f"this network cannot be exported to ONNX ({_brief(error)}): export with --format torch alone."
        ) from error
    assert made is not None
    content: bytes = made.model_proto.SerializeToString()
    return content


def run_torch(path: Path) -> Exported:
    """Loads a file of `as_torch`: returns a function from images `[B,3,S,S]` to embeddings `[B,D]`."""
    with path.open("rb") as file:
        module = torch.export.load(io.BytesIO(file.read())).module()

    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = module(images)
        return found

    return run


def run_onnx(path: Path) -> Exported:
    """Loads a file of `as_onnx`: returns a function from images `[B,3,S,S]` to embeddings `[B,D]`, on the CPU."""
    session = import_module("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

    return run


MAKE: dict[str, tuple[Callable[[ExportedProgram], bytes], Callable[[Path], Exported]]] = {
    "torch": (as_torch, run_torch),
    "onnx": (as_onnx, run_onnx),
}


def largest_difference(network: Embedding, run: Exported, image_size: int) -> float:
    """Embeds the same random images, in batches of `COMPARED` sizes, by the network and by an exported file.

    Returns:
        The largest absolute difference; infinity if shapes differ or a value is not finite.
    """
    random = torch.Generator().manual_seed(0)
    largest = 0.0
    for count in COMPARED:
        images = torch.rand(count, 3, image_size, image_size, generator=random)
        with torch.no_grad():
            expected = network(images)
        found = run(images)
        if found.shape != expected.shape or not torch.isfinite(found).all():
            return float("inf")
        largest = max(largest, float((found - expected).abs().max()))
    return largest


def write(kind: str, program: ExportedProgram, network: Embedding, image_size: int, path: Path) -> float:
    """Writes the network in a format, and compares what was written with the network.

    Args:
        kind: `torch` or `onnx`.
        program: the traced network.
        network: the same network, to compare with.
        image_size: S, in pixels.
        path: where to write.

    Returns:
        The largest difference, see `largest_difference`.

    Raises:
        UserError: as `as_onnx`.
        Unfaithful: the difference is above `TOLERANCE`.
    """
    make, runs = MAKE[kind]
    path.write_bytes(make(program))
    apart = largest_difference(network, runs(path), image_size)
    if not apart <= TOLERANCE:
        raise Unfaithful(
            f"{FILES[kind]} would differ by {apart:.2g} from the network's embeddings of random images, more than "
            f"{TOLERANCE:.0e}: nothing was exported."
        )
    return apart


def configuration_of(trained: Trained) -> dict[str, Any]:
    """Returns only those parts of a configuration that `Trained.of` needs, without any path of the user's."""
    said = OmegaConf.to_container(trained.config, resolve=True)
    assert isinstance(said, dict)
    return {name: {} for name in ("trainer", "paths", "protocol", "dataset")} | {str(k): v for k, v in said.items()}


# What a name of ours means; other steps are torchvision's.
MEANT = {
    PadSquare: "the longer side resized to the first number, bilinearly and antialiased, then padded on both sides to "
    "a square of the given colour: "
}


def described(transform: Transform) -> list[str]:
    """Returns the steps that turn a picture into an input, one line each."""
    steps = [*([] if transform.first is None else [transform.first]), *transform.moves]
    return [
        "the first frame as RGB, without transparency, turned as its EXIF orientation says; of 16 bits the upper 8",
        *(MEANT.get(type(step), "") + " ".join(repr(step).split()) for step in steps),
        "RGB levels 0..255 times 1/255, as float32 [3,S,S]",
    ]


def export(
    run: Path, folder: Path, formats: tuple[str, ...] = tuple(FILES), checkpoint: str | None = None
) -> dict[str, Any]:
    """Runs the command: writes a run's embedding in some formats, and `model.json`.

    Args:
        run, checkpoint: see `Trained.of`.
        folder: where to write.
        formats: some of `torch` and `onnx`.

    Returns:
        The content of `model.json`.

    Raises:
        UserError: there is no such run or checkpoint, packages are missing, the network cannot be exported, or the
            folder is the run's own, has files of these names that are not of an export, or cannot be written.
        Unfaithful: see `write`.
    """
    if "onnx" in formats:
        need_onnx()
    trained = Trained.of(run, checkpoint)
    if folder.resolve() in (run.resolve(), trained.checkpoint.parent.resolve()):
        raise UserError(f"{folder} holds the model that is to be exported: name another folder with -o.")
    foreign = [] if _of_an_export(folder) else [name for name in NAMES if (folder / name).exists()]
    if foreign:
        raise UserError(
            f"{folder / foreign[0]} is not of a whole export and would be replaced: name another folder with -o."
        )
    writable(folder)
    weights = trained.weights()  # copied before `Embedding` merges adapters
    network, size = Embedding(trained.method), int(trained.config.image_size)
    content: dict[str, Any] = {
        "method": type(trained.method).__name__,
        "checkpoint": trained.checkpoint.name,
        "step": trained.step,
        "started_from": _started_from(run),
        "input": {
            "name": INPUT,
            "shape": ["B", 3, size, size],
            "type": "float32",
            "range": [0, 1],
            "colours": "RGB; mean and deviation are inside the network",
        },
        "preprocessing": {
            "steps": described(trained.transform),
            "options": OmegaConf.to_container(trained.config.transform.test, resolve=True),
        },
        "output": {"name": OUTPUT, "shape": ["B", trained.width], "type": "float32", "norm": 1},
        "dim": trained.width,
        "torch": torch.__version__,
    }
    program, parity = traced(network, size), {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as made:  # an earlier export stays until all of this one is made
            for kind in formats:
                new = made.enter_context(atomic_path(folder / FILES[kind]))
                apart = write(kind, program, network, size, new)
                parity[FILES[kind]] = {"batches": list(COMPARED), "largest_difference": apart}
            for name in (ABOUT, *FILES.values()):  # those of other weights must not stay
                (folder / name).unlink(missing_ok=True)
            # First, since it marks the folder as an export's.
            write_network(folder, weights, configuration_of(trained), trained.step)
        for name, one in parity.items():
            said = f"largest difference from the network in float32 {one['largest_difference']:.1e}"
            print(f"{folder / name}: {said} on {sum(COMPARED)} random images")
        content["parity"] = parity
        write_atomically(folder / ABOUT, json.dumps(content, indent=1) + "\n")  # last: a folder that has it is complete
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): name another with -o.") from error
    return content


def _started_from(run: Path) -> dict[str, Any] | str:
    """Returns file, digest and licence of the weights from which a training started, as its `provenance.json` says, or
    what an export of it says."""
    starts = provenance.starts(run)
    if not starts and (run / ABOUT).exists():
        about = read_json(run / ABOUT)
        return about.get("started_from", "unknown") if isinstance(about, dict) else "unknown"
    found: list[dict[str, Any]] = [start["weights"] for start in starts if isinstance(start.get("weights"), dict)]
    return found[-1] if found else "random weights" if starts else "unknown"


def _of_an_export(folder: Path) -> bool:
    """Returns whether an earlier export, perhaps one that was killed, wrote what is in a folder."""
    return holds_network(folder) and not (folder / MANIFEST).exists()


def _brief(error: BaseException) -> str:
    """Returns the first line of the error that caused all others, without colours and full stop."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in re.sub(r"\x1b\[\d+m", "", str(error)).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
