"""The display during the demo: on a terminal a table of the workers, elsewhere one line for each event."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from examples.demo.run import Event
from examples.demo.words import (
    Begun,
    Done,
    Finished,
    Formed,
    Healed,
    Healing,
    Killed,
    Left,
    Loaded,
    Lost,
    Moving,
    Ready,
    Saved,
    Started,
    Warned,
)
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from transfuse._sizes import human_bytes
from transfuse.cli.console import Lines

__all__ = ["Screen", "spark"]

BARS = "▁▂▃▄▅▆▇█"
REFRESH_SECONDS = 0.1
STYLES = {
    "starting": "yellow",
    "waiting": "dim",
    "training": "green",
    "KILLED": "bold red",
    "restarting": "yellow",
    "healing": "bold cyan",
    "source": "cyan",
    "healed": "bold green",
    "finished": "blue",
}


@dataclass
class Row:
    """What the table shows of one worker."""

    pid: int = 0
    state: str = "starting"
    step: int | None = None
    loss: float | None = None
    lives: int = 0


class Screen:
    """Shows events. Quiet: shows nothing."""

    def __init__(self, workers: int, steps: int, *, quiet: bool) -> None:
        self.console: Console = Lines(quiet=quiet, highlight=False)
        self._steps = steps
        self._began = time.monotonic()
        self._rows = [Row() for _ in range(workers)]
        self._losses: dict[int, float] = {}
        self._moving: Moving | None = None
        self._moving_since = 0.0
        self._generations: dict[int, int] = {}
        self._live: Live | None = None
        self._due = 0.0

    def say(self, text: RenderableType = "") -> None:
        # Do not wrap lines that go to a file or pipe.
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Show the live view for the length of this block."""
        if not self.console.is_terminal or self.console.quiet:
            yield
            return
        # No refresh by a thread of rich's: it would interfere with lines that are printed meanwhile.
        with Live(get_renderable=self.render, console=self.console, transient=True, auto_refresh=False) as self._live:
            yield
        self._live = None

    def tick(self) -> None:
        """Redraw the live view if it is time."""
        if self._live is not None and time.monotonic() >= self._due:
            self._live.refresh()
            self._due = time.monotonic() + REFRESH_SECONDS

    def begin(self, title: str) -> None:
        """Begin the display of another run."""
        self._losses.clear()
        self._moving = None
        self.say(Text(title, style="bold"))

    # ---------------------------------------------------------------------------------------------------------- events

    def tell(self, event: Event) -> None:
        row, name = self._rows[event.rank], f"worker {event.rank}"
        match event.word:
            case Started(pid=pid):
                row.pid, row.lives = pid, row.lives + 1
                row.state = "starting" if row.lives == 1 else "restarting"
                if row.lives > 1:
                    self._line(event, f"{name} starts again as process {pid}")
            case Ready():
                row.state = "finished" if row.state == "finished" else "waiting"
            case Formed(generation=generation):
                self._count(event, generation)
            case Loaded(step=step):
                row.step = step
            case Healing(step=step, sources=sources):
                row.state = "healing"
                for source in sources:
                    self._rows[source].state = "source"
                self._moving_since = event.word.when
                many = f"workers {_list(sources)} at once" if len(sources) > 1 else f"worker {sources[0]}"
                self._line(event, f"{name} heals at step {step} from {many}", "cyan")
            case Moving():
                self._moving = event.word
            case Warned(text=text):
                self._line(event, f"{name}: {text}", "yellow")
            case Healed(step=step, report=report):
                row.state, row.step, self._moving = "healed", step, None
                parts = ", ".join(f"{human_bytes(n)} from {r}" for r, n in sorted(report.by_source.items()))
                took = f"{human_bytes(report.bytes)} in {report.seconds:.2f} s"
                self._line(event, f"{name} is healed, in place: {took} ({parts})", "bold green")
            case Begun(step=step):
                row.state = "healed" if row.state == "healed" else "training"
                row.step = step
            case Done(step=step, losses=losses):
                row.state, row.loss = "training", losses[event.rank]
                self._losses[step] = sum(losses) / len(losses)
            case Saved(bytes=size, seconds=seconds, step=step):
                took = f"{human_bytes(size)} in {seconds:.2f} s"
                self._line(event, f"{name} saves a file before step {step}: {took}", "dim")
            case Killed(step=step, healing=healing):
                row.state = "KILLED"
                where = "in the middle of the transfer" if healing else f"in the middle of step {step}"
                self._line(event, f"{name} (process {row.pid}) gets SIGKILL {where}", "bold red")
            case Lost(how=how):
                if row.state != "KILLED":
                    row.state = "KILLED"
                    self._line(event, f"{name} (process {row.pid}) died: {how}", "bold red")
            case Left(step=step):
                row.state = "waiting"
                self._line(event, f"{name} noticed, and keeps its state: step {step} is next", "yellow")
            case Finished():
                row.state = "finished"

    def _count(self, event: Event, generation: int) -> None:
        """Print a line once all workers are in the group, except for the first group of a run."""
        self._generations[generation] = self._generations.get(generation, 0) + 1
        if self._generations[generation] == len(self._rows):
            self._line(event, f"a group of all {len(self._rows)} workers is formed")

    def _line(self, event: Event, text: str, style: str = "") -> None:
        self.line(event.word.when, text, style)

    def line(self, when: float, text: str, style: str = "") -> None:
        """Say what happened at this moment."""
        self.say(Text.assemble((f"{when - self._began:6.2f} s  ", "dim"), (text, style)))

    # ---------------------------------------------------------------------------------------------------- the live view

    def render(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("worker", justify="right")
        table.add_column("state", min_width=max(map(len, STYLES)))
        table.add_column("step", justify="right", min_width=2 * len(str(self._steps)) + 1)
        table.add_column("loss", justify="right", min_width=6)
        if wide := self.console.width >= 50:
            table.add_column("process", justify="right", min_width=7)
        for rank, row in enumerate(self._rows):
            table.add_row(
                str(rank),
                Text(row.state, style=STYLES[row.state]),
                "" if row.step is None else f"{row.step}/{self._steps}",
                "" if row.loss is None else f"{row.loss:.4f}",
                *([str(row.pid or "")] if wide else []),
            )
        return Group(table, *self._transfer(), *self._curve())

    def _transfer(self) -> list[RenderableType]:
        moving = self._moving
        if moving is None or not moving.total_bytes:
            return []
        rate = moving.bytes / max(1e-3, moving.when - self._moving_since)
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            Text("transfer", style="cyan"),
            ProgressBar(moving.total_bytes, moving.bytes, width=30),
            f"{human_bytes(moving.bytes)} of {human_bytes(moving.total_bytes)}, {human_bytes(rate)}/s",
        )
        return [grid]

    def _curve(self) -> list[RenderableType]:
        if not self._losses:
            return []
        values = [loss for _, loss in sorted(self._losses.items())]
        most = max(10, self.console.width - 30)
        return [Text.assemble("loss  ", (spark(values[-most:]), "green"), f"  {values[-1]:.4f}")]


def spark(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """A curve in one line."""
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
