"""Tables: drawn by rich on a terminal; elsewhere aligned lines without wrapping or colour, and rich is not imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Column", "count_leaves", "drawn", "printable", "say", "show"]


@dataclass(frozen=True)
class Column:
    """A column. ``wraps``: its cells may be broken over lines on a narrow terminal."""

    title: str
    right: bool = False
    wraps: bool = False


def count_leaves(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count:,} leaves"


def printable(text: str) -> str:
    """The text with every character escaped that a terminal might obey, or that UTF-8 cannot encode."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "") -> None:
    """Print a line. On a terminal it is broken at words."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        Console(highlight=False).print(Text(text))
    else:
        print(text)


def show(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Print a table without its empty columns. ``styles`` of rows apply on terminals only."""
    if not rows:
        return
    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(drawn(columns, rows, styles))
        return
    columns, rows = _without_empty(columns, rows)
    lines = [[column.title for column in columns], *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for column, cell, width in zip(columns, line, widths, strict=True)
        )
        print("  ".join(cells).rstrip())


def _without_empty(
    columns: Sequence[Column], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[Column], Sequence[Sequence[str]]]:
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def drawn(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> Table:
    """The table for a terminal, without its empty columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns, rows = _without_empty(columns, rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in columns:
        # Fold, do not cut off: a name without its end names nothing.
        table.add_column(
            column.title, justify="right" if column.right else "left", overflow="fold", no_wrap=not column.wraps
        )
    for i, row in enumerate(rows):
        # As Text: otherwise rich would take brackets for markup.
        table.add_row(*map(Text, row), style=styles[i] if styles else None)
    return table
