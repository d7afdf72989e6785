"""Parts for tests of `dml.bench.running`, in processes of their own: they import nothing heavy."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial

from dml.bench.results import LEFT_OUT, Figure, Goal, Record, Remark
from dml.bench.running import Task
from dml.errors import UserError


def good(task: Task) -> Iterator[Record]:
    assert task.folder.is_dir()
    yield Figure("speed", 950.5, "images/s", Goal(900))
    yield Figure("ratio", 1.25, "", Goal(1.1, at_most=True))
    yield Remark(LEFT_OUT, "what is not here.")


def raising(task: Task) -> Iterator[Record]:
    yield Figure("before", 1.0)
    print("what it printed")
    raise RuntimeError("broken\nand more lines")


def dying(task: Task) -> Iterator[Record]:
    yield Figure("before", 1.0)
    os.kill(os.getpid(), signal.SIGSEGV)


def hanging(task: Task) -> Iterator[Record]:
    """With a process of its own, whose number is its figure."""
    if (child := os.fork()) == 0:
        time.sleep(100)
        os._exit(0)
    yield Figure("child", child)
    time.sleep(100)


def in_pieces(task: Task) -> Iterator[Record]:
    def piece(name: str) -> Iterator[Record]:
        if name == "bad":
            raise UserError("The second is a mistake.")
        yield Figure(name, 2.0)

    yield from task.pieces({name: partial(piece, name) for name in ("first", "bad", "third")}, 0)
    yield from task.pieces({"fourth": partial(piece, "fourth")}, 10_000)
