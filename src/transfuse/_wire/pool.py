"""A transport's streams that no transfer uses now. Its next transfers use them again."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from transfuse._tls import TLS
from transfuse._tuning import POOL_AGAIN_SECONDS
from transfuse._wire.group import Group
from transfuse._wire.meeting import Meeting, own_port
from transfuse._wire.messages import Place
from transfuse._wire.stream import Stream


class Pool:
    """The streams of one transport that no transfer uses now, in one configuration of its group."""

    def __init__(self, group: Group, *, allowed: bool = True, tls: TLS | None = None) -> None:
        """``allowed``: whether conversations over the group may go on over streams.

        ``tls``: how these are encrypted. Then conversations over the group must go on over streams.
        """
        self.group = group
        self.tls = tls
        self._allowed = allowed
        self._lock = threading.Lock()
        self._closed = False
        #: By the peer's rank, and whether this end is the source.
        self._idle: dict[tuple[int, bool], dict[int, Stream]] = {}
        #: How many connections to each peer are being made, and when that last failed.
        self._forming: Counter[int] = Counter()
        self._failed: dict[int, float] = {}
        self._told: set[int] = set()
        _pools.add(self)

    def can_move(self, peer: int) -> bool:
        """Whether a conversation with this peer that begins over the group may go on over a stream."""
        return self._allowed and not hasattr(self.group.pg, "stream_to") and self.can_form(peer)

    def must_move(self, peer: int) -> bool:
        """Whether a conversation with this peer that begins over the group must go on over a stream, or end."""
        return self.tls is not None and not hasattr(self.group.pg, "stream_to") and peer != self.group.rank()

    def can_form(self, peer: int) -> bool:
        """Whether a conversation with this peer that has a stream may get more of them."""
        return not self._closed and peer != self.group.rank()

    def meeting(self, peer: int) -> Meeting | None:
        """How this end and a peer get further connections; None if this end cannot."""
        own = getattr(self.group.pg, "meeting", None)
        if own is not None:
            found: Meeting | None = own(peer)
            return found
        return own_port(self.group.host(), self.tls)

    def place(self, peer: int) -> Place | None:
        meeting = self.meeting(peer)
        return None if meeting is None else meeting.place()

    def may_meet(self, peer: int) -> bool:
        """Whether to connect with this peer: not if that has just failed, and there is another way."""
        with self._lock:
            failed = self._failed.get(peer)
            return failed is None or self.tls is not None or time.monotonic() - failed > POOL_AGAIN_SECONDS

    def may_form(self, peer: int) -> bool:
        """Whether to form lanes with this peer: not if that has just failed, nor while others are formed."""
        with self._lock:
            forms = self._forming[peer] > 0
        return not forms and self.may_meet(peer)

    @contextmanager
    def forming(self, peer: int) -> Iterator[None]:
        with self._lock:
            self._forming[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._forming[peer] -= 1

    def give_up(self, peer: int, *, failed: bool = True) -> bool:
        """Do not try to connect with this peer for a while. Whether this has ``failed`` for the first time."""
        with self._lock:
            self._failed[peer] = time.monotonic()
            first = failed and peer not in self._told
            self._told |= {peer} if failed else set()
            return first

    def take(self, peer: int, *, is_source: bool) -> dict[int, Stream]:
        """Take all streams to a peer that are still good, by their numbers."""
        with self._lock:
            there = self._idle.pop((peer, is_source), {})
        dead = [number for number, stream in there.items() if not stream.is_alive()]
        for number in dead:
            there.pop(number).close()
        return there

    def keep(self, peer: int, stream: Stream, *, is_source: bool) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault((peer, is_source), {})[stream.number] = stream
                return
        stream.close()

    def in_configuration(self, group: Group) -> Pool:
        """Close, and go on with another pool for ``group``: behind a peer's rank there may be another process."""
        other = Pool(group, allowed=self._allowed, tls=self.tls)
        other._closed = self._closed
        self.close()
        return other

    def close(self) -> None:
        """Close all streams, now and those that come back later."""
        with self._lock:
            self._closed = True
            streams = [stream for some in self._idle.values() for stream in some.values()]
            self._idle.clear()
        for stream in streams:
            stream.close()

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._idle.values()))

    def _start_again(self) -> None:
        self._lock = threading.Lock()
        self._forming.clear()
        self._idle.clear()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._start_again()


os.register_at_fork(after_in_child=_after_fork)
