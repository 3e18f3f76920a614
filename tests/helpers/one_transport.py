"""Workers that move a state from rank 0 to rank 1 again and again with one transport, while something happens to them.

The target of rank 1 lies between canaries: memory that nothing may write to. All times are of one clock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import transfuse
from several_hosts import Connection, connections
from transfuse.testing.exact import differences
from transfuse.testing.ranks import Fleet, announce

__all__ = [
    "STATE_BYTES", "Ended", "Left", "both", "fork_midway", "left", "look", "move", "opens", "set_up", "state",
]  # fmt: skip

LEAVES, NUMEL, GAP = 8, 1 << 18, 4096
STATE_BYTES = 4 * LEAVES * NUMEL
CANARY = -77.0


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"tensor{i}": torch.randn(NUMEL, generator=generator) for i in range(LEAVES)}


class Ended(NamedTuple):
    """How one transfer has ended at one end, and when."""

    error: str | None
    text: str
    at: float
    #: Leaves that are not as they were sent; at the receiver.
    wrong: list[str]
    #: How many connections the report counts.
    connections: int


class Left(NamedTuple):
    """What is there after a transfer."""

    #: Threads and descriptors beyond those that were there after the first transfer.
    tasks: int
    files: int
    #: Whether a canary is dead, and whether anything was written to the target after the call had ended.
    canaries: bool
    written: bool


class _Kept:
    """In a worker: what is kept from call to call."""

    transport: transfuse.PGTransport
    memory: torch.Tensor
    target: dict[str, torch.Tensor]
    #: Of the target, when the last call had ended.
    copy: torch.Tensor
    tasks: int
    files: int
    #: Called once, in the middle of the next transfer.
    midway: Callable[[], object] | None = None


def set_up(rank: int, seconds: float, options: dict[str, Any]) -> None:
    """Make the transport. Parcels are small, so that there are many."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(TRANSFUSE_PARCEL_BYTES=str(64 << 10), TRANSFUSE_BURST_BYTES=str(256 << 10))
    kept, size = _Kept, NUMEL + GAP
    kept.memory = torch.full((LEAVES * size + GAP,), CANARY)
    kept.target = {f"tensor{i}": kept.memory[GAP + i * size : (i + 1) * size] for i in range(LEAVES)}
    for tensor in kept.target.values():
        tensor.zero_()
    kept.copy = kept.memory.clone()
    group: Any = dist.group.WORLD
    options = {"same_host": False, "lanes": 1, "progress": _announce, **options}
    kept.transport = transfuse.PGTransport(group, timedelta(seconds=seconds), "cpu", lambda: kept.target, **options)


def _announce(progress: dict[int, transfuse.Progress]) -> None:
    if any(STATE_BYTES / 8 < one.bytes < STATE_BYTES for one in progress.values()):
        announce("moving")
        midway, _Kept.midway = _Kept.midway, None
        if midway is not None:
            midway()


def move(rank: int, seed: int) -> Ended:
    """One transfer. Interrupts take effect in the transport's call, and nowhere else."""
    kept, error, wrong, given = _Kept, None, list[str](), state(seed)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            if rank == 0:
                kept.transport.send_checkpoint([1], given)
            else:
                kept.transport.recv_checkpoint(0)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except (transfuse.TransfuseError, KeyboardInterrupt) as caught:
        error = caught
    at = time.monotonic()
    if rank == 1 and error is None:
        wrong = list(differences(given, kept.target, in_place=True))
    kept.copy = kept.memory.clone()
    report = kept.transport.report
    count = 0 if report is None else report.connections
    cause = error.causes.get(1, error) if isinstance(error, transfuse.SendFailed) else error
    return Ended(None if cause is None else type(cause).__name__, "" if cause is None else str(cause), at, wrong, count)


def opens(rank: int) -> set[Connection]:
    """The connections of this host."""
    return connections()


def look(rank: int) -> None:
    """Call this after a good transfer: what is there now may be there later."""
    _Kept.tasks, _Kept.files = _tasks(), _files()


def left(rank: int, seconds: float) -> Left:
    """What is left of what has ended, after at most ``seconds``."""
    kept, until = _Kept, time.monotonic() + seconds
    while time.monotonic() < until and (_tasks() > kept.tasks or _files() > kept.files):
        time.sleep(0.05)
    gaps = kept.memory.clone()
    for tensor in kept.target.values():
        start = tensor.storage_offset()
        gaps[start : start + NUMEL] = CANARY
    dead = not bool((gaps == CANARY).all())
    return Left(max(0, _tasks() - kept.tasks), max(0, _files() - kept.files), dead, not kept.memory.equal(kept.copy))


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def fork_midway(rank: int, seconds: float) -> None:
    """In the middle of the next transfer this process forks a child that does nothing for ``seconds``."""

    def fork() -> None:
        if os.fork() == 0:
            try:
                _let_go_of_parent()
                time.sleep(seconds)
            finally:
                os._exit(0)
        announce("forked")

    _Kept.midway = fork


def _let_go_of_parent() -> None:
    """Close what leads to the test, which would wait for this process too. Network connections stay."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")
            if what.startswith("pipe:") or (what.startswith("socket:") and _is_local(int(name))):
                os.close(int(name))


def _is_local(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as sock:
        return sock.family == socket.AF_UNIX


# ---------------------------------------------------------------------------------------------------- in the parent


def both(fleet: Fleet, function: Any, *args: Any, deadline: float = 60.0) -> list[Any]:
    fleet.start(function, *args)
    return [outcome.get() for outcome in fleet.outcomes(deadline)]
