"""The measurements as tables: drawn by rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.compare.peers import LIMIT, OURS, REFERENCE, Peer
from benchmarks.compare.results import Limit, Outcome, Result
from transfuse._sizes import human_bytes

__all__ = ["show_absent", "show_limits", "show_notes", "show_outcome"]


def show_limits(console: Console, limits: dict[str, Limit]) -> None:
    rows = [(limit.name, rate(limit.bytes_per_second)) for limit in limits.values()]
    _table(console, "This machine's own limits", ("", "speed"), rows)


def show_absent(console: Console, absent: dict[type[Peer], str]) -> None:
    for peer, reason in absent.items():
        say(console, f"absent: {peer.name}: {reason}")


def show_outcome(console: Console, outcome: Outcome, limits: dict[str, Limit]) -> None:
    rows = [_row(outcome, result, limits) for result in outcome.results]
    title = f"{outcome.case.full_title} ({human_bytes(outcome.bytes)}) [{outcome.case.key}]"
    head = ("", "median", "range", "CPU", "rate", f"vs {REFERENCE.name}", "of its limit", "bits")
    _table(console, title, head, rows, [result.peer in OURS for result in outcome.results])


def show_notes(console: Console, peers: Sequence[type[Peer]], runs: int) -> None:
    """How to read the tables."""
    say(console)
    sockets = ", ".join(peer.key for peer in peers if peer.bound == "tcp")
    counted = f"Medians of {runs} runs" if runs > 1 else "One run of each"
    say(
        console,
        f"{counted}, peers in turns, after a warm-up. Time is from a barrier until the last rank has returned, CPU "
        "what all ranks used in that time. Memory that is received into was touched and warm; fresh memory was not. "
        "Bits: every move, warm-ups included, was compared with the original. Limits: bare process_vm_readv of the "
        "same tensors, in turns with the others"
        + (f"; for contenders that use sockets ({sockets}), one TCP stream." if sockets else "."),
    )
    if any(not peer.whole and peer is not LIMIT for peer in peers):
        say(console, "† carries tensors only: no tree, no values, no description.")
    for peer in peers:
        if peer.note:
            say(console, f"{peer.name}: {peer.note}.")


def _row(outcome: Outcome, result: Result, limits: dict[str, Limit]) -> tuple[str, ...]:
    name = result.peer.name + ("" if result.peer.whole or result.peer is LIMIT else " †")
    if result.failed:
        return name, "failed", "", "", "", "", "", result.failed
    if result.wrong or result.median is None:
        return name, "wrong", "", "", "", "", "", f"DIFFERS: {result.wrong[0]}"
    speed, part = outcome.speed(result), outcome.of_limit(result, limits)
    # Name the route if it is not the one that was asked for.
    routes = ", ".join(sorted(result.routes - {result.peer.key.partition("-")[0]}))
    return (
        f"{name} (took: {routes})" if routes else name,
        duration(result.median),
        span(result.seconds),
        duration(result.cpu_median or 0.0),
        rate(outcome.bytes * outcome.case.receivers / result.median),
        f"{speed:.2f}x" if speed else "-",
        f"{part:.2f}" if part else "-",
        "exact",
    )


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def span(seconds: Sequence[float]) -> str:
    low, high = duration(min(seconds)), duration(max(seconds))
    return f"{low.removesuffix(' ms')}-{high}"


def rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def say(console: Console, text: str = "") -> None:
    # Do not wrap lines that go to a file or pipe.
    console.print(text, soft_wrap=not console.is_terminal, markup=False, highlight=False)


def _table(
    console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], ours: Sequence[bool] = ()
) -> None:
    if console.is_terminal:
        table = Table(title=title.replace("[", r"\["), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for index, name in enumerate(head):
            table.add_column(name, justify="right" if 0 < index < 7 else "left", overflow="fold")
        for index, row in enumerate(rows):
            cells = [cell.replace("[", r"\[") for cell in row]
            table.add_row(*cells, style="bold green" if ours and ours[index] else None)
        console.print("", table, sep="\n")
        return
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    say(console, f"\n{title}:")
    for line in (head, *rows):
        say(console, "  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())
