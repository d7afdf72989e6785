"""Timing of work on a device, which may still go on when the Python call has returned."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch


def now(device: torch.device) -> float:
    """Waits until the device has done all its work. Returns seconds on a clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(job: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that a job takes."""
    start = now(device)
    job()
    return now(device) - start


def in_turns(
    jobs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, *, warm_up: int = 1, each: int = 1
) -> dict[str, list[float]]:
    """Times each job in each round. Jobs take turns, so that a machine that slows down slows all of them.

    Args:
        warm_up: calls before the first round.
        each: calls of a job that are timed together.

    Returns:
        Name of a job -> seconds of one call, for each round.
    """
    for job in jobs.values():
        for _ in range(warm_up):
            job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            times[name].append(seconds(partial(_often, job, each), device) / each)
    return times


def _often(job: Callable[[], object], times: int) -> None:
    for _ in range(times):
        job()


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median over rounds of the ratio `some / others`."""
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def peak(device: torch.device) -> int:
    """Returns the most bytes that tensors took since `forget_peak`; 0 on a device that does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def held(device: torch.device) -> int:
    """Returns the bytes that tensors take now; 0 on a device that does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
