"""Printing of tables to a terminal of any width."""

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
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


def print_columns(names: Sequence[Sequence[str]], columns: Mapping[str, Sequence[str]]) -> None:
    """Prints a table of figures, in several tables that begin alike if it does not fit into one.

    Args:
        names: of each row, one or several words that stand in columns of their own.
        columns: title -> the cell of each row.
    """

    def table_of(titles: Sequence[str]) -> Table:
        table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for _ in names[0]:
            table.add_column("", overflow="fold")
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        for words, *cells in zip(names, *(columns[title] for title in titles), strict=True):
            table.add_row(*words, *cells)
        return table

    print_in_blocks(list(columns), table_of)
