"""The hardware and the package versions that figures were measured with."""

import platform
import subprocess
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from dml.errors import UserError
from dml.runs.provenance import hardware

MISSING = "missing"

# pip's name of a package -> its module.
PACKAGES = {
    "torch": "torch",
    "pytorch-lightning": "pytorch_lightning",
    "torchmetrics": "torchmetrics",
    "torchvision": "torchvision",
    "faiss": "faiss",
    "timm": "timm",
    "pytorch-metric-learning": "pytorch_metric_learning",
    "hydra-core": "hydra",
    "omegaconf": "omegaconf",
}


def check_device(device: str) -> None:
    """Raises UserError if the device is a GPU and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise UserError(
            f"--gpu needs a CUDA device, and torch {torch.__version__} ({built}) finds none: look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or leave --gpu out for the small check on the CPU."
        )


def about(device: str) -> dict[str, Any]:
    """Describes the machine.

    Returns:
        `hardware`: name; for a GPU also memory in GiB, compute capability and number of GPUs. `versions`: package ->
        version; for a GPU also of the driver, CUDA and cuDNN.
    """
    machine: dict[str, Any] = {"name": hardware(device)}
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    versions["torch"] = torch.__version__  # with the build, as in +cu124
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine |= {
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "devices": torch.cuda.device_count(),
        }
        versions |= {
            "driver": _driver(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return {"hardware": machine, "versions": versions}


def _version(name: str) -> str:
    """Returns the version of a package: that of pip, else the `__version__` of the module."""
    module = PACKAGES[name]
    if find_spec(module) is None:
        return MISSING
    with suppress(PackageNotFoundError):
        return version(name)
    try:
        return str(getattr(import_module(module), "__version__", "unknown"))
    except Exception as error:  # a package that does not fit the others may raise anything
        return f"cannot be imported ({type(error).__name__})"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.splitlines()[0].strip() if said.strip() else "unknown"
