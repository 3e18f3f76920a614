"""Tables: drawn by rich on a terminal; elsewhere aligned lines without wrapping or colour."""

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
    """A console that leaves a closed pipe to the command, which decides how to end."""

    def on_broken_pipe(self) -> None:
        raise


@dataclass(frozen=True)
class Column:
    """A column. ``wraps``: its cells may be broken over lines on a narrow terminal."""

    title: str
    right: bool = False
    wraps: bool = False


def count_leaves(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count:,} leaves"


def say(text: str = "") -> None:
    """Print a line. On a terminal it is broken at words."""
    if sys.stdout.isatty():
        Console(highlight=False).print(Text(text))
    else:
        print(text)


def show(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Print a table without its empty columns. ``styles`` of rows apply on terminals only."""
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
        # Fold, do not cut off: a name without its end names nothing.
        table.add_column(
            column.title, justify="right" if column.right else "left", overflow="fold", no_wrap=not column.wraps
        )
    for i, row in enumerate(rows):
        # As Text: otherwise rich would take brackets for markup.
        table.add_row(*map(Text, row), style=styles[i] if styles else None)
    Console(highlight=False).print(table)
