"""Tables: drawn by rich on a terminal; elsewhere aligned lines, which nothing wraps or colours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Column", "Lines", "count_leaves", "say", "show"]


class Lines(Console):
    """A console that, where nobody reads its lines any more, leaves it to the command how to end."""

    def on_broken_pipe(self) -> None:
        raise


@dataclass(frozen=True)
class Column:
    """``wraps``: may be broken over lines where a terminal is narrow."""

    title: str
    right: bool = False
    wraps: bool = False


def count_leaves(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count:,} leaves"


def say(text: str = "") -> None:
    """A line. On a terminal broken at words."""
    if sys.stdout.isatty():
        Console(highlight=False).print(Text(text))
    else:
        print(text)


def show(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """A table without the columns in which nothing stands. ``styles`` of rows are for terminals."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
    if not rows:
        return
    if sys.stdout.isatty():
        _draw(columns, rows, styles)
        return
    lines = [[column.title for column in columns], *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for column, cell, width in zip(columns, line, widths, strict=True)
        )
        print("  ".join(cells).rstrip())


def _draw(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in columns:
        # Folded, not cut off: a name of which the end is missing names nothing.
        table.add_column(
            column.title, justify="right" if column.right else "left", overflow="fold", no_wrap=not column.wraps
        )
    for i, row in enumerate(rows):
        # As text: what stands in brackets would be rich's markup otherwise.
        table.add_row(*map(Text, row), style=styles[i] if styles else None)
    Console(highlight=False).print(table)
