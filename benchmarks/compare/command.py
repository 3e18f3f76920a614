"""``python -m benchmarks.compare``: measure transfuse and the alternatives side by side on this machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.compare import machine, plot, table
from benchmarks.compare.cases import Case, cases
from benchmarks.compare.peers import LIMIT, OURS, PEERS, REFERENCE, Peer
from benchmarks.compare.record import record
from benchmarks.compare.results import Limit, Move, Outcome
from benchmarks.compare.run import Begun, measure
from transfuse._sizes import human_bytes
from transfuse.cli.console import Lines
from transfuse.cli.errors import Command
from transfuse.cli.options import available_bytes
from transfuse.testing.ranks import Late, RanksFailed

__all__ = ["app", "bench"]

SHARED_MEMORY = Path("/dev/shm")
#: Copies of the state: the source's, the receivers', and one in files or stores.
COPIES = 5
PROCESSES_BYTES = 1 << 30
LIMIT_BYTES = 512 << 20

QUICK_SCALE, QUICK_RUNS = 0.125, 3
QUICK_PEERS = (*OURS, REFERENCE, next(peer for peer in PEERS if peer.key == "torchft"))

#: A case and the peers that take part in it.
Entry = tuple[Case, list[type[Peer]]]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command(cls=Command)
def bench(
    runs: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Runs of each that count. Default: 5, with --quick 3.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Within a minute: an eighth of the sizes, fewer cases, few peers.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CASE/PEER", help="Only these, with wildcards: `gpt2`, `*/nixl`, `to?/torch*`. Repeatable."
        ),
    ] = None,
    scale: Annotated[
        float | None, typer.Option(min=1e-4, max=8, help="Part of the bytes to move. Default: 1, with --quick 0.125.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that one move of one peer may take before it is given up.")
    ] = 120,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw a picture here.")] = None,
) -> None:
    """Measure transfuse beside PyTorch's transport and others that are installed, on this machine.

    Processes on one host, a gloo group over loopback. Cases: one 1 GiB tensor, 64 × 16 MiB, 20,000 × 4 KiB, and
    GPT-2 small with AdamW, each in place and fresh; 256 MiB to one to four receivers. Peers take turns within a case;
    every move is compared bit for bit with the original; numbers are medians after a warm-up, beside what this
    machine can do at all (memcpy, process_vm_readv, TCP), measured in the same run.

    A peer that is absent, fails or hangs is reported in one line, and the others go on. Exit code 1 if a result was
    wrong. All of it takes some 20 minutes on two cores, and needs about 6 GiB of memory.
    """
    console = Lines(highlight=False)
    scale = scale if scale is not None else QUICK_SCALE if quick else 1.0
    runs = runs if runs is not None else QUICK_RUNS if quick else 5
    load = os.getloadavg()[0]
    try:
        for file in (json_file, plot_file):
            check_writable(file)
        with console.status("Looking for peers …"):
            entries, absent = choose(scale, quick, only or [])
        check_memory([case for case, _ in entries])
        announce(console, quick, scale, absent)
        outcomes, limits = run(console, entries, runs, scale, timeout)
    except KeyboardInterrupt:
        fail("interrupted; all workers have ended", 130)
    except BrokenPipeError:
        raise
    except (RanksFailed, Late, MemoryError, OSError) as error:
        fail(str(error))
    except LookupError as error:
        fail(str(error.args[0]), 2)
    took_part = [peer for peer in (*PEERS, LIMIT) if any(peer in peers for _, peers in entries)]
    table.show_notes(console, took_part, runs)
    settings = {"runs": runs, "scale": scale, "quick": quick, "only": only or [], "timeout_seconds": timeout}
    written = record(
        shlex.join(["python", "-m", "benchmarks.compare", *sys.argv[1:]]), settings, load, limits, absent, outcomes
    )
    if json_file is not None:
        json_file.write_text(json.dumps(written, indent=2) + "\n")
    if plot_file is not None:
        about = "{date}, {machine[cpus]} cores of {machine[processor]}, torch {versions[torch]}, medians of {runs}"
        plot_file.write_text(plot.draw(outcomes, about.format_map(written)))
    conclude(outcomes)


# ------------------------------------------------------------------------------------------------------ what takes part


def choose(scale: float, quick: bool, only: Sequence[str]) -> tuple[list[Entry], dict[type[Peer], str]]:
    """The cases with their peers, and which peers are absent, and why."""
    patterns = [one.partition("/") for one in only] or [("*", "", "*")]
    wanted = QUICK_PEERS if quick else PEERS

    def asked(case: Case, peer: type[Peer]) -> bool:
        pairs = ((c or "*", p or "*") for c, _, p in patterns)
        return any(fnmatchcase(case.key, c) and fnmatchcase(peer.key, p) for c, p in pairs)

    known = [case for case in cases(scale) if case.quick or not quick]
    chosen = [
        (case, [peer for peer in wanted if peer.fits(case.mode, case.receivers) and asked(case, peer)])
        for case in known
    ]
    for (one, _, peer_key), text in zip(patterns, only or ["*"], strict=True):
        fits = any(fnmatchcase(case.key, one or "*") for case in known)
        if not fits or not any(fnmatchcase(peer.key, peer_key or "*") for peer in wanted):
            raise LookupError(
                f"nothing is called {text!r}. Cases: {', '.join(case.key for case in known)}. "
                f"Peers: {', '.join(peer.key for peer in wanted)}."
            )
    named = [peer for peer in wanted if any(peer in peers for _, peers in chosen)]
    # Importing takes seconds: import each module once, all at the same time.
    modules = {peer.module: peer for peer in named}
    with ThreadPoolExecutor() as pool:
        reasons = dict(zip(modules, pool.map(lambda peer: peer.absent(), modules.values()), strict=True))
    absent = {peer: reason for peer in named if (reason := reasons[peer.module])}
    present = [(case, [peer for peer in peers if peer not in absent]) for case, peers in chosen]
    return [(case, [*peers, LIMIT]) for case, peers in present if peers], absent


def announce(console: Console, quick: bool, scale: float, absent: dict[type[Peer], str]) -> None:
    table.show_absent(console, absent)
    if quick:
        others = ", ".join(peer.name for peer in PEERS if peer not in QUICK_PEERS)
        table.say(
            console,
            f"Quick: {scale:g} of the sizes. Left out: one to three receivers, fresh receives but one, and {others}. "
            "Small sizes fit caches and flatter everyone: numbers to quote come from a run without --quick.",
        )


# ---------------------------------------------------------------------------------------------------------- the running


@dataclass
class Bar:
    """Shows the progress of the run on a terminal."""

    progress: Progress
    task: TaskID

    def __call__(self, said: Begun | Move) -> None:
        if isinstance(said, Begun):
            self.progress.update(self.task, description=f"{said.case}: {said.peer}")
        else:
            self.progress.advance(self.task)


def run(
    console: Console, entries: Sequence[Entry], runs: int, scale: float, timeout: float
) -> tuple[list[Outcome], dict[str, Limit]]:
    """Measure everything, and show each table as soon as it is complete."""
    with console.status("Measuring this machine's own limits …"):
        limits = machine.limits(max(1 << 20, int(LIMIT_BYTES * min(1.0, scale))))
    table.show_limits(console, limits)
    columns = (TextColumn("{task.description:<24}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    total = (runs + 1) * sum(len(peers) for _, peers in entries)
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    # Keep the path short: sockets are made in it, and their paths are limited.
    with (
        tempfile.TemporaryDirectory(prefix="tf-", dir=place, ignore_cleanup_errors=True) as folder,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        bar = Bar(progress, progress.add_task("starting", total=total))
        outcomes = measure(entries, runs, timeout, Path(folder), bar)
    for outcome in outcomes:
        table.show_outcome(console, outcome, limits)
    return outcomes, limits


def check_memory(chosen: Sequence[Case]) -> None:
    """Check the memory now, before the kernel kills a process in the middle."""
    needed = max(case.size()[0] * (COPIES + case.receivers - 1) for case in chosen) + PROCESSES_BYTES
    available = available_bytes()
    if available is not None and available < needed:
        raise MemoryError(
            f"this needs about {human_bytes(needed)} of memory, {human_bytes(available)} are available; "
            "choose less with --scale"
        )


def check_writable(file: Path | None) -> None:
    """Check now that the file can be written, not after twenty minutes."""
    if file is not None and not os.access(file if file.exists() else file.parent, os.W_OK):
        raise OSError(f"{file} cannot be written")


def conclude(outcomes: Sequence[Outcome]) -> None:
    wrong = [
        f"{outcome.case.key}/{result.peer.key}: {line}"
        for outcome in outcomes
        for result in outcome.results
        for line in result.wrong
    ]
    if wrong:
        fail("\n  ".join([f"{len(wrong)} difference(s) from what was sent:", *wrong[:10]]))


def fail(text: str, code: int = 1) -> NoReturn:
    print(f"bench: {text}", file=sys.stderr)
    raise typer.Exit(code)
