"""What all conversations over one process group share in this process: one :class:`Hub` for each group.

A hub is found by its group (:func:`hub_of`) and passed around by ``Group``. It refers to the group, so as long as
there is a hub, no other group has that group's id. A hub lives as long as a transport or a conversation uses it, and
longer in three cases: a receive was left behind that the next call takes over, memory was left behind that a peer may
still write to, or a thread was left behind in a wait on the group.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol
from weakref import ReferenceType, WeakValueDictionary, ref

import torch

from transfuse.wire.loopback import Loopback

__all__ = ["FirstWord", "Hub", "Leftovers", "Watched", "hub_of", "leftovers"]


_take_reference = ctypes.pythonapi.Py_IncRef


class Watched(Protocol):
    """A conversation, as the watch sees it."""

    #: Since when it has been in a wait; None outside of waits.
    waiting_since: float | None
    #: Set by the watch when it ends the waits of all conversations.
    given_up: bool

    @property
    def shares_fate(self) -> bool:
        """Whether a wait that expires breaks the connections to all ranks."""

    @property
    def pulse_seconds(self) -> float: ...

    def pulse(self) -> None: ...

    def overdue(self) -> bool: ...

    def break_off(self) -> None: ...


class _Waits(Protocol):
    def wait(self) -> torch.Tensor: ...


class _Lanes:
    """Without tags: one transfer at a time on each lane, the lower source rank first among those waiting.

    Those before are bounded each by their own timeout: they are waited for as long as it takes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy: set[int] = set()
        self._waiting: dict[int, list[tuple[int, int]]] = {}
        self._arrivals = itertools.count()

    @contextmanager
    def hold(self, lane: int, source: int) -> Iterator[None]:
        me = (source, next(self._arrivals))
        with self._changed:
            queue = self._waiting.setdefault(lane, [])
            queue.append(me)
            self._changed.wait_for(lambda: lane not in self._busy and min(queue) == me)
            queue.remove(me)
            self._busy.add(lane)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(lane)
                if not self._waiting.get(lane):
                    self._waiting.pop(lane, None)
                self._changed.notify_all()


class _Watch:
    """One thread that looks after all conversations of a group while there are any.

    It shows signs of life for those that hold the turn. And where connections share their fate, it ends waits, once
    every conversation is overdue: until then a peer that is late costs the others nothing, and may still catch up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: set[Watched] = set()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        return self._thread is not None

    def add(self, channel: Watched) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="transfuse-watch", daemon=True)
                thread.start()
                self._thread = thread
            self._channels.add(channel)

    def remove(self, channel: Watched) -> None:
        """Stop watching a conversation. Nothing happens if it is not watched any more."""
        with self._lock:
            if channel not in self._channels:
                return
            self._channels.discard(channel)
            ended = None
            if not self._channels:
                # From here on the thread finds that it is not the watch's any more, and ends.
                ended, self._thread = self._thread, None
        self._changed.set()
        if ended is not None:
            # A thread that outlived the call could be the last to hold the group while the interpreter ends.
            ended.join()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._lock:
                if self._thread is not me:
                    return
                channels = list(self._channels)
            for channel in channels:
                channel.pulse()
            if (
                channels[0].shares_fate
                and all(channel.overdue() for channel in channels)
                and any(channel.waiting_since is not None for channel in channels)
            ):
                for channel in channels:
                    channel.given_up = True
                for channel in channels:
                    channel.break_off()
            pause = min(0.1, min(channel.pulse_seconds / 2 for channel in channels))
            del channel, channels
            self._changed.wait(pause)
            self._changed.clear()


class FirstWord:
    """A receive for the header of a peer's next offer. It cannot be taken back: a caller that leaves hands it on."""

    _numbers = itertools.count()

    def __init__(self, posted: _Waits, peer: int, owner: object) -> None:
        self.posted = posted
        self.peer = peer
        #: What comes, comes in the order in which the receives were posted.
        self.number = next(self._numbers)
        self.done = threading.Event()
        self.data = b""
        self.error: Exception | None = None
        #: The conversation whose caller waits for it; None while nobody does.
        self.owner: object | None = owner

    def wait(self) -> None:
        """In the thread that has posted it, whoever gets what comes."""
        try:
            self.data = bytes(self.posted.wait().cpu().numpy())
        except Exception as error:
            self.error = error
        self.done.set()

    def wait_for(self, owner: object) -> None:
        """In the thread of a conversation that has taken it over: until it is there, or that one has been left."""
        while self.owner is owner and not self.done.wait(0.1):
            pass


class Hub:
    """What the conversations over one process group share. Made by :func:`hub_of` only."""

    def __init__(self, pg: object) -> None:
        #: As long as this is here, its id is not another group's.
        self.pg = pg
        self._pinned = False
        #: Receives for a first word that nobody waits for.
        self._parked: list[FirstWord] = []
        #: Conversations with peers that fell silent, and so the memory that is still under way on them: it must stay
        #: until it has come.
        self._left_behind: set[object] = set()
        #: Receives that this process was forked with.
        self._parents: list[FirstWord] = []
        self._start()

    def _start(self) -> None:
        """Everything that threads take part in."""
        self._lock = threading.Lock()
        self.lanes = _Lanes()
        self.watch = _Watch()
        self._loopback: ReferenceType[Loopback] | None = None

    def loop(self) -> Loopback:
        """The way from this rank to itself, as long as some conversation uses it: then what was not heard is gone."""
        with self._lock:
            loop = None if self._loopback is None else self._loopback()
            if loop is None:
                loop = Loopback()
                self._loopback = ref(loop)
            return loop

    # ------------------------------------------------------------------------------------------- what is left behind

    def pin(self) -> None:
        """A thread may be left in a wait on this group: never destroy it. Under a waiting thread that ends the process.

        But for groups that see to it themselves that they outlive every wait, and say so by ``outlives_waits``.
        """
        with self._lock:
            if self._pinned or getattr(self.pg, "outlives_waits", False):
                return
            self._pinned = True
            # Not even when the interpreter ends, and with it everything that a module holds.
            _take_reference(ctypes.py_object(self.pg))
            self._keep()

    def leave_behind(self, channel: object) -> None:
        """Keep a conversation, and with it its memory, until :meth:`forget`."""
        with self._lock:
            self._left_behind.add(channel)
            self._keep()

    def forget(self, channel: object) -> None:
        with self._lock:
            self._left_behind.discard(channel)
            self._keep()

    def is_left_behind(self, channel: object) -> bool:
        return channel in self._left_behind

    def park(self, word: FirstWord) -> None:
        """The word's owner leaves: whoever comes next for this peer gets it."""
        with self._lock:
            if word.owner is not None:
                word.owner = None
                self._parked.append(word)
                self._parked.sort(key=lambda word: word.number)
                self._keep()

    def adopt(self, peer: int, owner: object) -> FirstWord | None:
        """A receive that an earlier call has left behind, if there is one that can still bring something."""
        with self._lock:
            found = None
            for word in [*self._parked]:
                if word.error is not None:
                    self._parked.remove(word)
                elif found is None and word.peer == peer:
                    self._parked.remove(word)
                    word.owner, found = owner, word
            self._keep()
            return found

    def release(self, word: FirstWord, owner: object) -> bool:
        """What has come is taken by its owner, or was it left? Then a failure that nobody will hear of is dropped."""
        with self._lock:
            if word.owner is owner:
                word.owner = None
                return True
            if word.error is not None and word in self._parked:
                self._parked.remove(word)
                self._keep()
            return False

    def _keep(self) -> None:
        """Stay, although no transport uses this group, while something of it is still needed."""
        if self._pinned or self._left_behind or self._parked:
            _kept.add(self)
        else:
            _kept.discard(self)

    def left(self) -> int:
        return len(self._left_behind)

    def start_again(self) -> None:
        """In a child of a fork: of all threads only one has come along, and nobody else holds a lock or a lane.

        What the parent waits for is kept, and never handed on: its news will not come here.
        """
        self._start()
        self._parents, self._parked = self._parked, []


#: Hubs by the ids of their groups.
_hubs: WeakValueDictionary[int, Hub] = WeakValueDictionary()
#: Those that stay though nobody uses them.
_kept: set[Hub] = set()
_finding = threading.Lock()


def hub_of(pg: object) -> Hub:
    """The one hub of a process group."""
    with _finding:
        hub = _hubs.get(id(pg))
        if hub is None:
            hub = _hubs[id(pg)] = Hub(pg)
        return hub


class Leftovers(NamedTuple):
    """What is under way in this process, or was left behind: groups that are watched, and conversations."""

    watches: int
    left_behind: int


def leftovers() -> Leftovers:
    hubs = list(_hubs.values())
    return Leftovers(sum(hub.watch.runs for hub in hubs), sum(hub.left() for hub in hubs))


def _after_fork() -> None:
    global _finding
    _finding = threading.Lock()
    for hub in list(_hubs.values()):
        hub.start_again()


os.register_at_fork(after_in_child=_after_fork)
