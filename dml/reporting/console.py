"""Tables in a terminal, however narrow it is."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_in_blocks(names: Sequence[str], table_of: Callable[[Sequence[str]], Table]) -> None:
    """Prints one table, or several below each other where its columns have no room side by side.

    Args:
        names: of the columns that may be apart, in their order.
        table_of: the table of some of them, with the column that every block begins with.
    """
    console = Console()
    endless = console.options.update(max_width=10_000)  # rich measures up to it
    block: list[str] = []
    for name in names:
        if block and Measurement.get(console, endless, table_of([*block, name])).maximum > console.width:
            console.print(table_of(block))
            block = []
        block.append(name)
    console.print(table_of(block))
