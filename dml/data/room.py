"""Finds how much memory is free for images, and raises an error if it is not enough."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from dml.errors import UserError

CGROUPS = Path("/sys/fs/cgroup")

# Files with the limit, the use, and the parts of the use that the system can free: cgroups version 2, then version 1.
KINDS = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


def check_room(images: str, needed: int, device: torch.device, word: str, remedy: str) -> None:
    """Raises UserError unless some images fit into the free memory of a device.

    Args:
        images: names the images in the message.
        needed: bytes of the images.
        device: whose memory is meant.
        word: value of `dataset.cache`, for the message.
        remedy: values of `dataset.cache` that the message proposes.
    """
    free = free_memory(device)
    if needed > free:
        where = "of memory" if device.type == "cpu" else f"on {device}"
        raise UserError(
            f"dataset.cache={word} needs {_size(needed)} for {images}, but {_size(free)} {where} are free: set "
            f"dataset.cache={remedy}, or a smaller image_size."
        )


def free_memory(device: torch.device) -> int:
    """Returns the free bytes of a GPU, or of the main memory that this process may use.

    Main memory is limited by the machine and by control groups (of a scheduler or a container). Pages that only hold
    files count as free.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for what comes next
        return torch.cuda.mem_get_info(device)[0] + kept
    return max(0, min([psutil.virtual_memory().available, *_of_groups()]))


def _of_groups() -> Iterator[int]:
    """Yields how many bytes are left below each control group's limit on this process."""
    own = Path("/proc/self/cgroup")  # exists on Linux only
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        limit, used, kept = KINDS[controllers == "memory"]
        root = CGROUPS / controllers
        for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
            if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
                counted = dict(one.split() for one in (folder / "memory.stat").read_text().splitlines())
                yield int(most) - int((folder / used).read_text()) + sum(int(counted.get(name, 0)) for name in kept)
            if folder == root:
                break


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.3f} MB"
