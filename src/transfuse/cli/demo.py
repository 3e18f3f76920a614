"""``transfuse demo``: a training job's state moves between two processes, beside PyTorch's own transport."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from torch import nn
from torch.utils._pytree import tree_leaves

import transfuse
from transfuse.cli import compare
from transfuse.cli.workers import Workers, WorkersFailed
from transfuse.report import Report, human_bytes

__all__ = ["Outcome", "demo", "make_state"]

SEED = 2026
STEP = 1000

#: Copies of the state: the source's, the receiver's, and the receiver's own original to compare with.
COPIES = 3
PROCESSES_BYTES = 1 << 30


# ------------------------------------------------------------------------------------------------------------ the state


class Transformer(nn.Module):
    """A language model in GPT-2's proportions, its output layer tied to its embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32 * width, width)
        self.positions = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, norm_first=True)
            for _ in range(width // 64)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32 * width, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.tokens.weight

    @staticmethod
    def count(width: int) -> int:
        """How many parameters a model of this width has, roughly."""
        return width // 64 * 12 * width**2 + (32 * width + 1024) * width


def make_state(parameters: int, seed: int | None) -> dict[str, Any]:
    """What a training job would checkpoint, with random numbers, or zeros where ``seed`` is None."""
    width = min(range(64, 1 << 14, 64), key=lambda width: abs(Transformer.count(width) - parameters))
    # Without the usual initialisation, whose numbers would be overwritten at once.
    with torch.device("meta"):
        model = Transformer(width)
    model.to_empty(device="cpu").tie()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 * STEP)
    generator = torch.Generator()
    for parameter in model.parameters():
        average, square = torch.empty_like(parameter), torch.empty_like(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(float(STEP)), "exp_avg": average, "exp_avg_sq": square}
    state: dict[str, Any] = {
        # A plain dict: the state_dict's own class carries versions of modules that PyTorch's transport drops.
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": STEP if seed is not None else 0,
        "rng": {"torch": generator.get_state(), "numpy": np.random.default_rng(seed or 0).bit_generator.state},
    }
    if seed is None:
        for leaf in tree_leaves(state):
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()
        return state
    generator.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            moments = optimizer.state[parameter]
            parameter.normal_(0, 0.02, generator=generator)
            moments["exp_avg"].normal_(0, 1e-3, generator=generator)
            moments["exp_avg_sq"].uniform_(0, 1e-6, generator=generator)
    state["rng"]["torch"] = generator.get_state()
    return state


@dataclass(frozen=True)
class Facts:
    """About the state that moves."""

    parameters: int
    leaves: int
    #: Memory counted once, however many names it has; and what a second name would add.
    bytes: int
    tied_bytes: int


def facts_of(state: dict[str, Any]) -> Facts:
    leaves = tree_leaves(state)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    memory = {t.data_ptr(): t.nbytes for t in tensors}
    parameters = {t.data_ptr(): t.numel() for t in state["model"].values()}
    once = sum(memory.values())
    return Facts(sum(parameters.values()), len(leaves), once, sum(t.nbytes for t in tensors) - once)


# ---------------------------------------------------------------------------------------------------------- the workers


def work(say: Callable[[object], None], parameters: int, runs: int) -> None:
    """One end. The receiver does the talking: facts, then how far the first move is, then each move."""
    # The receiver makes the originals anew from the seed, so that what it compares with has not travelled.
    state = make_state(parameters, SEED)
    if dist.get_rank() != compare.RECEIVER:
        for _ in compare.race(state, None, runs):
            pass
        return
    say(facts_of(state))
    target = make_state(parameters, None)

    def show(progress: dict[int, transfuse.Progress]) -> None:
        (one,) = progress.values()
        say((one.bytes, one.total_bytes))

    for move in compare.race(state, target, runs, show):
        say(move)


# ----------------------------------------------------------------------------------------------------------- the screen


class Screen:
    """Shows what happens: on a terminal with a bar and tables, elsewhere as plain lines, and if quiet not at all."""

    def __init__(self, quiet: bool) -> None:
        self.console = Console(quiet=quiet, highlight=False)

    def say(self, text: str = "") -> None:
        # Lines of a file or pipe are not broken at anybody's width.
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    @contextmanager
    def bar(self, label: str, *columns: Any) -> Iterator[Callable[[int, int | None], None]]:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(30),
            TaskProgressColumn(),
            *columns,
            console=self.console,
            disable=not self.console.is_terminal,
        ) as progress:
            task = progress.add_task(label, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self.console.is_terminal:
            table = Table(*head, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
            table.show_header = any(head)
            for column in table.columns[1:] if any(head) else []:
                column.justify = "right"
            for row in rows:
                table.add_row(*row)
            self.console.print("", table, sep="\n")
            return
        lines = [head, *rows] if any(head) else rows
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        self.say(f"{title}:")
        for line in lines:
            self.say("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


# ---------------------------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Outcome:
    """What was measured."""

    facts: Facts
    runs: int
    report: Report
    results: dict[str, compare.Result]

    @property
    def verified(self) -> bool:
        return all(result.verified for result in self.results.values())

    @property
    def ratio(self) -> float:
        """PyTorch's time over ours."""
        return self.results[compare.TORCH].median / self.results[compare.OURS].median

    def to_dict(self) -> dict[str, Any]:
        return {
            "versions": {"transfuse": transfuse.__version__, "torch": torch.__version__},
            "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
            "state": {"parameters": self.facts.parameters, "leaves": self.facts.leaves, "bytes": self.facts.bytes},
            "runs": self.runs,
            "verified": self.verified,
            "moves": [result.to_dict() for result in self.results.values()],
            "torch_over_transfuse": self.ratio,
            "first_report": self.report.to_dict(),
        }


def demo(
    parameters: Annotated[
        float, typer.Option(min=0.1, max=5000, help="Size of the model in millions of parameters.")
    ] = 100,
    runs: Annotated[int, typer.Option(min=1, max=100, help="How many moves of each kind to measure.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the measurements, as JSON.")] = False,
) -> None:
    """Move a training job's state between two processes of this machine, in place.

    Rank 0 holds a transformer with AdamW's moments, scheduler and RNG state; rank 1 holds the same tensors full of
    zeros. The state moves by transfuse, from memory and over a gloo group, and by PyTorch's own PGTransport, and is
    compared bit for bit with the original after every move. Exit code 1 if anything differs.
    """
    screen = Screen(quiet=as_json)
    try:
        check_memory(parameters)
        outcome = run(int(parameters * 1e6), runs, screen)
    except KeyboardInterrupt:
        fail("interrupted; both workers have ended", 130)
    except (WorkersFailed, MemoryError, OSError) as error:
        fail(str(error))
    if as_json:
        print(json.dumps(outcome.to_dict(), indent=2))
    else:
        conclude(outcome, screen)
    if not outcome.verified:
        wrong = [line for result in outcome.results.values() for line in result.wrong]
        fail("\n  ".join([f"verification failed, {len(wrong)} difference(s):", *wrong[:10]]))


def fail(text: str, code: int = 1) -> NoReturn:
    print(f"transfuse demo: {text}", file=sys.stderr)
    raise typer.Exit(code)


def check_memory(parameters: float) -> None:
    """Better said now than by the kernel in the middle."""
    needed = COPIES * 12e6 * parameters + PROCESSES_BYTES
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    if available is not None and available < needed:
        raise MemoryError(
            f"{parameters:g} million parameters need about {human_bytes(needed)} of memory, "
            f"{human_bytes(available)} are available; choose fewer with --parameters"
        )


def run(parameters: int, runs: int, screen: Screen) -> Outcome:
    """Let the two workers do everything, and show it."""
    with Workers(2, work, parameters, runs) as workers:
        said = (body for _, body in workers)
        with screen.console.status("Starting two processes and filling tensors with random numbers …"):
            facts = next(said)
        screen.say(
            "Two processes on this machine, one gloo group. Rank 0 holds a transformer of "
            f"{facts.parameters / 1e6:.1f} million parameters with AdamW's moments, scheduler and RNG state: "
            f"{human_bytes(facts.bytes)} in {facts.leaves:,} leaves. Rank 1 holds the same tensors full of zeros and "
            "receives in place."
        )
        moves: list[compare.Move] = []
        with screen.bar("transfuse moves it", DownloadColumn(binary_units=True)) as advance:
            while not moves:
                match next(said):
                    case compare.Move() as move:
                        moves.append(move)
                    case (done, total):
                        advance(done, total)
        first = moves[0]
        assert first.report is not None
        if first.wrong:
            screen.say(f"[red]✗[/red] rank 1 found {len(first.wrong)} differences")
        else:
            screen.say(
                f"[green]✓[/green] rank 1 compared all {facts.leaves:,} leaves with the originals: equal bit for bit, "
                "and every tensor is its own"
            )
        screen.table("Rank 1's report of this move", ("", ""), first.report.rows())
        total = len(compare.NAMES) * (runs + 1)
        with screen.bar("now in turns with PyTorch's", MofNCompleteColumn()) as advance:
            advance(len(moves), total)
            for move in said:
                moves.append(move)
                advance(len(moves), total)
    return Outcome(facts, runs, first.report, compare.summarize(moves))


def conclude(outcome: Outcome, screen: Screen) -> None:
    """The comparison, and what it comes to."""
    torchs, ours = outcome.results[compare.TORCH], outcome.results[compare.OURS]
    rows = [
        (
            result.name,
            human_bytes(result.wire_bytes),
            f"{result.median * 1e3:,.0f} ms",
            f"{min(result.seconds) * 1e3:,.0f}-{max(result.seconds) * 1e3:,.0f} ms",
            f"{torchs.median / result.median:.2f}x",
            "exact" if result.verified else "DIFFERS",
        )
        for result in outcome.results.values()
    ]
    counted = f"Medians of {outcome.runs} runs in turns" if outcome.runs > 1 else "One run of each"
    screen.table(
        f"{counted}, after a warm-up; same state, processes and group",
        ("", "received", "median", "range", "speed", "bits"),
        rows,
    )
    if not outcome.verified:
        return
    verdict = (
        f"was {outcome.ratio:.2f} times as fast"
        if outcome.ratio >= 1
        else f"took {1 / outcome.ratio:.2f} times as long"
    )
    text = (
        f"By its {outcome.report.route} route transfuse {verdict} as PyTorch's PGTransport: "
        f"{ours.median * 1e3:,.0f} ms against {torchs.median * 1e3:,.0f} ms"
    )
    more, tied = torchs.wire_bytes - ours.wire_bytes, outcome.facts.tied_bytes
    if abs(more - tied) < 0.1 * tied:
        text += f". PGTransport moved the {human_bytes(tied)} of tied weights twice"
    screen.say(f"{text}.")
