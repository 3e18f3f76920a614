"""The terminal for programs that draw on it all the time: the demo, the comparison."""

from __future__ import annotations

from rich.console import Console

__all__ = ["Lines"]


class Lines(Console):
    """A console that leaves a closed pipe to the command, which decides how to end."""

    def on_broken_pipe(self) -> None:
        raise
