"""Chains: receivers that want the same parcels pass them on, so that the source sends each byte once.

The conversations of one send meet here after their wants. Those that want the same are lined up, neighbours on one
host next to each other; the source serves the first, and each serves the next.
"""

from __future__ import annotations

import functools
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import xxhash

from transfuse.wire.group import new_link_tag
from transfuse.wire.messages import Agreed, Link
from transfuse.wire.rate_limit import Pace

__all__ = ["Chains", "this_host"]

#: How long the first to come wait for the others: so many seconds for each byte that a chain would save, within bounds.
WAIT_SECONDS_PER_BYTE = 1e-9
MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.25, 1.0


@functools.cache
def this_host() -> int:
    """A number that two ranks of one host, and of one network within it, have in common. Only to order a chain by."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text())
        names.append(str(os.stat("/proc/self/ns/net").st_ino))
    return xxhash.xxh3_64_intdigest("\n".join(names).encode())


@dataclass
class _Member:
    rank: int
    key: Hashable
    host: int
    agreed: Agreed | None = None
    pace: Pace = field(default_factory=lambda: Pace(None))


class Chains:
    """Where the conversations of one send agree on who gets parcels from whom."""

    def __init__(self, ranks: Sequence[int], nbytes: int, timeout: float, share: float | None = None) -> None:
        self._changed = threading.Condition()
        #: Receivers of which nothing is known yet: a chain is made without them when the wait is over.
        self._expected = set(ranks)
        self._waiting: list[_Member] = []
        wait = min(max(nbytes * WAIT_SECONDS_PER_BYTE, MIN_WAIT_SECONDS), MAX_WAIT_SECONDS)
        self._wait = min(wait, timeout / 2)
        self._until = float("inf")
        self._timeout = timeout
        #: Bytes a second for each receiver, if they are limited: a chain goes at the sum of its members' shares.
        self._share = share

    def leave(self, rank: int) -> None:
        """This receiver will not be in any chain: nobody waits for it."""
        with self._changed:
            self._expected.discard(rank)
            self._changed.notify_all()

    def join(self, rank: int, key: Hashable, host: int) -> tuple[Agreed, Pace]:
        """Line up with those who want the same; what this receiver is told, and the pace of its whole chain."""
        me = _Member(rank, key, host)
        with self._changed:
            self._expected.discard(rank)
            if not self._waiting:
                self._until = time.monotonic() + self._wait
            self._waiting.append(me)
            self._changed.notify_all()
            while me.agreed is None:
                left = self._until - time.monotonic()
                if not self._expected or left <= 0:
                    self._line_up()
                    self._changed.notify_all()
                else:
                    self._changed.wait(left)
            return me.agreed, me.pace

    def _line_up(self) -> None:
        by_key: dict[Hashable, list[_Member]] = {}
        for member in sorted(self._waiting, key=lambda member: (member.host, member.rank)):
            by_key.setdefault(member.key, []).append(member)
        self._waiting.clear()
        for members in by_key.values():
            pace = Pace(None if self._share is None else self._share * len(members))
            tags = [new_link_tag() for _ in members]
            ids = [secrets.randbits(63) for _ in members]
            for i, member in enumerate(members):
                before = Link(members[i - 1].rank, tags[i], ids[i]) if i > 0 else None
                after = Link(members[i + 1].rank, tags[i + 1], ids[i + 1]) if i + 1 < len(members) else None
                # Whoever is next to a silent receiver notices first, and has parcels for the others before they do.
                patience = self._timeout * (0.25 + 0.25 * i / len(members))
                member.agreed, member.pace = Agreed(before, after, patience), pace
