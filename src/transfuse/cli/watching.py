"""A live view of runs: drawn in place on a terminal; elsewhere a block of lines each time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

from transfuse.cli.keeper_table import COLUMNS, name_of, rows, trouble
from transfuse.cli.keepers import FoundRun
from transfuse.cli.tables import drawn, show

__all__ = ["watch"]


def watch(look: Callable[[], list[FoundRun]], interval: float, *, as_json: bool) -> bool:
    """Show what ``look`` finds at each interval, until all runs have ended. Returns whether there were any."""
    seen: list[FoundRun] = []
    view = _Blocks(as_json) if as_json or not sys.stdout.isatty() else _Picture()
    with view:
        while found := look():
            seen = found
            view.draw(found)
            time.sleep(interval)
    if seen and not as_json:
        names = ", ".join(name_of(one) for one in seen)
        print(f"{names}: the keeper has ended, and left nothing" if len(seen) == 1 else f"{names}: all have ended")
    return bool(seen)


class _Blocks:
    """A block each time."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def draw(self, found: Sequence[FoundRun]) -> None:
        if self._as_json:
            print(json.dumps([one.to_dict() for one in found]), flush=True)
            return
        print(time.strftime("%Y-%m-%d %H:%M:%S"))
        show(COLUMNS, [row for one in found for row in rows(one)])
        for line in (line for one in found for line in trouble(one)):
            print(line)
        print(flush=True)


class _Picture:
    """One picture, drawn again in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(highlight=False), auto_refresh=False)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def draw(self, found: Sequence[FoundRun]) -> None:
        from rich.console import Group
        from rich.text import Text

        table = drawn(COLUMNS, [row for one in found for row in rows(one)])
        lines = [Text(line, "yellow") for one in found for line in trouble(one)]
        clock = Text(f"{time.strftime('%H:%M:%S')}; Ctrl-C ends this view, and nothing else", "dim")
        self._live.update(Group(table, *lines, clock), refresh=True)
