"""Printing of tables to a terminal of any width."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_in_blocks(names: Sequence[str], table_of: Callable[[Sequence[str]], Table]) -> None:
    """Prints a table. If its columns do not fit side by side, it prints several tables below each other.

    Args:
        names: of the columns that may be in different tables, in their order.
        table_of: makes the table of some columns; it adds those that every table begins with.
    """
    console = Console()
    endless = console.options.update(max_width=10_000)  # rich measures no further than this width
    block: list[str] = []
    for name in names:
        if block and Measurement.get(console, endless, table_of([*block, name])).maximum > console.width:
            console.print(table_of(block))
            block = []
        block.append(name)
    console.print(table_of(block))
