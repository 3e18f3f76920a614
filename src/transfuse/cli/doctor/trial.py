"""Try the routes: two processes of this machine move a state, once by each route."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import transfuse
from transfuse._limits import allows_streams
from transfuse._tuning import (
    DOCTOR_MEASURED_SECONDS,
    DOCTOR_STATE_BYTES,
    DOCTOR_TRANSFER_SECONDS,
    DOCTOR_TRIAL_SECONDS,
)
from transfuse._wire.group import Group
from transfuse._wire.meeting import own_port
from transfuse._wire.memory_route import MemoryEntry, MemoryLease, Reader
from transfuse._wire.route import Unreadable
from transfuse.cli.doctor import network
from transfuse.testing.ranks import Late, RanksFailed, listening, say

__all__ = ["TrialOutcome", "Tried", "try_routes"]

TIMEOUT = timedelta(seconds=DOCTOR_TRANSFER_SECONDS)
CPU = torch.device("cpu")

#: The prefix of gloo's messages: the line in gloo's source, and the check that failed there.
_CHECK = re.compile(r"^\[enforce fail at [^\]]*\] [^.]*\. ")


class Tried(NamedTuple):
    """The result for one route: how fast it is, or why it does not work."""

    route: str
    bytes_per_second: float | None
    reason: str = ""


class TrialOutcome(NamedTuple):
    tried: dict[str, Tried]
    #: The addresses where gloo listens by default.
    addresses: tuple[str, ...]
    #: Whether receivers can pass parcels on to each other over gloo.
    chains: bool
    #: Where this process listened for connections of its own. Empty: it did not.
    port: str
    #: Why the trial did not finish.
    error: str


class _Listens(NamedTuple):
    addresses: tuple[str, ...] = ()
    chains: bool = False
    port: str = ""


def try_routes() -> TrialOutcome:
    """Move a state by every route."""
    tried: dict[str, Tried] = {}
    listens, error = _Listens(), ""
    try:
        with listening(2, _work, os.environ.get(network.IFNAME_VARIABLE)) as words:
            for _, said in words:
                if isinstance(said, Tried):
                    tried[said.route] = said
                else:
                    listens = said
    except (RanksFailed, Late, RuntimeError, OSError) as failed:
        error = str(failed).split("\n")[0]
    return TrialOutcome(tried, *listens, error)


# ------------------------------------------------------------------------------------------------------- in the workers


def _work(rank: int, ifname: str | None) -> None:
    """Rank 0 sends a state. Rank 1 receives it and returns the result."""
    threading.Thread(target=_end_late, daemon=True).start()
    # Hide gloo's warnings on stderr: the doctor finds out the same and says it in better words.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    tell = say if rank == 1 else lambda _: None
    tell(_try_memory())
    os.environ.pop(network.IFNAME_VARIABLE, None)
    if ifname is not None:
        os.environ[network.IFNAME_VARIABLE] = ifname
    tell(_try_group(tell))


def _end_late() -> None:
    time.sleep(DOCTOR_TRIAL_SECONDS)
    os._exit(1)


def _try_memory() -> Tried:
    route, rate = _measure(dist.group.WORLD, same_host=True)
    if route == "memory":
        return Tried("memory", rate)
    return Tried("memory", None, _why_unreadable() or "the receiver did not use it, though it could have")


def _why_unreadable() -> str:
    """Read each other's memory directly, without a transfer around it, to learn why that fails."""
    data = torch.ones(1)
    with MemoryLease() as lease:
        told: list[Any] = [lease.describe(np.array([data.data_ptr()], dtype=np.int64)).encode()]
        dist.broadcast_object_list(told, src=0)
        reason = ""
        if dist.get_rank() == 1:
            try:
                Reader(MemoryEntry.decode(told[0]), 1).close()
            except Unreadable as error:
                reason = str(error)
        dist.barrier()
    return reason


def _try_group(tell: Callable[[object], None]) -> Tried:
    before = network.listening()
    try:
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        taken = {address for number, address in network.listening().items() if number not in before}
        known = Group(group, CPU)
        listens = _Listens(tuple(sorted(taken)), known.tagged)
        tell(listens)
        _, rate = _measure(group, same_host=False)
        place = own_port(known.host()).place() if allows_streams() else None
        tell(listens._replace(port="" if place is None else place.address))
    except (RuntimeError, transfuse.TransfuseError) as error:
        return Tried("group", None, _CHECK.sub("", str(error).strip().split("\n")[0]))
    return Tried("group", rate)


def _measure(group: Any, *, same_host: bool) -> tuple[str, float]:
    """The route that the state took, and the best of a few runs, in bytes per second."""
    state = {"state": torch.ones(DOCTOR_STATE_BYTES, dtype=torch.uint8)}
    transport = transfuse.PGTransport(group, TIMEOUT, CPU, lambda: state, same_host=same_host)
    route, best, until = "", 0.0, time.monotonic() + DOCTOR_MEASURED_SECONDS
    again = torch.ones(1)
    while again:
        if dist.get_rank() == 0:
            transport.send_checkpoint([1], state)
        else:
            transport.recv_checkpoint(0)
        report = transport.report
        assert report is not None
        route, best = report.route, max(best, report.bytes / report.seconds)
        again[0] = time.monotonic() < until
        # Rank 1 decides for both.
        dist.broadcast(again, src=1)
    return route, best
