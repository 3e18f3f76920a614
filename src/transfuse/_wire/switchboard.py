"""The state that all conversations over one process group share in this process: a :class:`Switchboard` per group.

:func:`switchboard_of` finds a group's switchboard by the group's id, and ``Group`` passes it on. The switchboard refers
to the group, so while it exists no other group can have that id. A group that torch (2.14 and later) reconfigures in
place stays the same object, with other connections and other processes behind its ranks: each configuration has its
own switchboard.

A switchboard lives as long as a transport or a conversation uses it. It lives longer in four cases: a receive was left
behind for the next call to take over, memory was left behind to which a peer may still write, an operation on an
accelerator is stuck, or a thread was left behind in a wait on the group.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

import torch

from transfuse._tuning import WATCH_LINGER_SECONDS, WATCH_OWNER_SECONDS, WATCH_PAUSE_SECONDS
from transfuse._wire.interface import host_of
from transfuse._wire.loopback import Loopback
from transfuse._wire.turns import Turns

_take_reference = ctypes.pythonapi.Py_IncRef

#: The queue of operations beside which no other may be posted.
ALL = -1

MOST_LAST_MESSAGES = 400


class Watched(Protocol):
    """A conversation, as far as the watch knows it."""

    #: When the present wait began; None if the conversation is not in a wait.
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


class Waits(Protocol):
    """A send or a receive under way."""

    def wait(self) -> torch.Tensor: ...


class StuckOperation(Protocol):
    """An operation that was left behind, because its peer has fallen silent."""

    def is_complete(self) -> bool: ...


class _Queues:
    """One transfer at a time on each queue, as this rank alone decides. The lowest source rank goes first.

    The queue ``ALL`` excludes every other one.
    There is no timeout here: each transfer that is ahead is bounded by its own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy: set[int] = set()
        self._waiting: dict[int, list[tuple[int, int]]] = {}
        self._arrivals = itertools.count()

    @contextmanager
    def hold(self, queue: int, source: int) -> Iterator[None]:
        me = (source, next(self._arrivals))
        with self._changed:
            waiting = self._waiting.setdefault(queue, [])
            waiting.append(me)
            self._changed.wait_for(lambda: not self._excluded(queue) and min(waiting) == me)
            waiting.remove(me)
            self._busy.add(queue)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(queue)
                if not self._waiting.get(queue):
                    self._waiting.pop(queue, None)
                self._changed.notify_all()

    def _excluded(self, queue: int) -> bool:
        return bool(self._busy) if queue == ALL else not self._busy.isdisjoint((queue, ALL))


class Watch:
    """One thread that watches all conversations of a group, or all that are held over streams.

    It sends signs of life for conversations whose own end is working. On groups where one expired wait breaks all
    connections, it ends the waits once every conversation is overdue. Until then a late peer costs the others nothing
    and may still catch up.

    The thread stays for a moment after the last conversation: to start one takes longer than many conversations do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Held while the thread holds conversations. Reentrant: what the thread calls may remove one.
        self._passing = threading.RLock()
        self._channels: set[Watched] = set()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        #: Asked before the waits of these conversations are ended, which closes all connections of this rank: whether
        #: that may be done now. It is asked again until it says yes.
        self.before_break_off: Callable[[Sequence[Watched]], bool] | None = None

    def __len__(self) -> int:
        """How many conversations are watched."""
        return len(self._channels)

    def add(self, channel: Watched) -> None:
        with self._lock:
            self._channels.add(channel)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="transfuse-watch", daemon=True)
                thread.start()
                self._thread = thread
        if channel.pulse_seconds < 2 * WATCH_PAUSE_SECONDS:
            self._changed.set()

    def remove(self, channel: Watched) -> None:
        """Stop watching a conversation. Does nothing if it is not watched."""
        with self._lock:
            self._channels.discard(channel)
        with self._passing:
            # The thread does not hold it any more. It could hold the last reference to the group while the interpreter
            # ends.
            pass

    def _run(self) -> None:
        ends_at = time.monotonic() + WATCH_LINGER_SECONDS
        while True:
            with self._passing:
                with self._lock:
                    channels = list(self._channels)
                    if not channels and time.monotonic() >= ends_at:
                        self._thread = None
                        return
                pause = self._look_at(channels)
                if channels:
                    ends_at = time.monotonic() + WATCH_LINGER_SECONDS
                del channels
            self._changed.wait(pause)
            self._changed.clear()

    def _look_at(self, channels: Sequence[Watched]) -> float:
        """Do what is due now. Return how many seconds to pause."""
        for channel in channels:
            with suppress(Exception):  # Whatever happens to one conversation, the others are watched.
                channel.pulse()
        if (
            channels
            and channels[0].shares_fate
            and all(channel.overdue() for channel in channels)
            and any(channel.waiting_since is not None for channel in channels)
            and (self.before_break_off is None or self.before_break_off(channels))
        ):
            for channel in channels:
                channel.given_up = True
            for channel in channels:
                channel.break_off()
        return min([WATCH_PAUSE_SECONDS, *(channel.pulse_seconds / 2 for channel in channels)])


class PendingOffer:
    """A receive for the header of a peer's next offer. It cannot be cancelled: a caller that leaves hands it on."""

    _numbers = itertools.count()

    def __init__(self, posted: Waits, peer: int, owner: object) -> None:
        self.posted = posted
        self.peer = peer
        #: The order in which receives were posted. Offers arrive in the same order.
        self.number = next(self._numbers)
        self.done = threading.Event()
        self.data = b""
        self.error: Exception | None = None
        #: The conversation whose caller waits for this receive; None while nobody waits.
        self.owner: object | None = owner

    def wait(self) -> None:
        """Wait for the header, in the thread that posted the receive, whichever conversation will get the header."""
        try:
            self.data = bytes(self.posted.wait().cpu().numpy())
        except Exception as error:
            self.error = error
        self.done.set()

    def wait_for(self, owner: object) -> None:
        """Wait, in the new owner's thread, until the header has arrived or the new owner has been abandoned."""
        while self.owner is owner and not self.done.wait(WATCH_OWNER_SECONDS):
            pass


class Switchboard:
    """The state that the conversations over one process group share. Only :func:`switchboard_of` makes one."""

    def __init__(self, pg: object, configuration: str) -> None:
        #: While the switchboard refers to the group, no other group can have its id.
        self.pg = pg
        self.configuration = configuration
        self._pinned = False
        #: Receives for offers that nobody waits for, in the order in which they were posted.
        self._parked: list[PendingOffer] = []
        #: Abandoned conversations with silent peers. They keep the memory of their pending receives alive, because the
        #: peers may still write to it.
        self._left_behind: set[object] = set()
        #: Operations on the accelerator that silent peers have never answered, by queue.
        self._stuck: dict[int, list[StuckOperation]] = {}
        #: After a fork: the parent's pending receives, kept so that their memory stays.
        self._parents: list[PendingOffer] = []
        #: The last messages of conversations that have ended. gloo needs their memory until it has sent them.
        self._last_messages: deque[object] = deque(maxlen=MOST_LAST_MESSAGES)
        self._start()

    def _start(self) -> None:
        """Make everything that threads share."""
        self._lock = threading.Lock()
        #: Orders of operations on an accelerator; and of whole transfers, where ranks cannot agree whose turn it is.
        self.queues, self.alone = _Queues(), _Queues()
        self.watch = Watch()
        self._turns: dict[int, Turns] = {}
        self._loopback: ReferenceType[Loopback] | None = None
        self._host: tuple[str | None] | None = None
        #: Ranks with which an operation on the accelerator has been posted: both have made their communicator.
        self.connected: set[int] = set()
        with suppress(TypeError):  # A group of the caller's own, of which there can be no weak reference.
            self.connected = _connected.setdefault(self.pg, {}).setdefault(self.configuration, self.connected)

    def loop(self) -> Loopback:
        """The loopback of this rank. It lives while a conversation uses it; unread messages are lost with it."""
        with self._lock:
            loop = None if self._loopback is None else self._loopback()
            if loop is None:
                loop = Loopback()
                self._loopback = ref(loop)
            return loop

    def host(self) -> str | None:
        """See :meth:`transfuse._wire.group.Group.host`."""
        with self._lock:
            self._host = self._host or (host_of(self.pg),)
            return self._host[0]

    def turns_with(self, peer: int) -> Turns:
        """The turns between this rank and a peer, on a group without tags."""
        with self._lock:
            return self._turns.setdefault(peer, Turns())

    # ------------------------------------------------------------------------------------------- what is left behind

    def pin(self) -> None:
        """Never destroy this group: a thread may be left in a wait on it, and destroying it then ends the process.

        Groups with a true ``outlives_waits`` take care of this themselves, and are not pinned.
        """
        with self._lock:
            if self._pinned or getattr(self.pg, "outlives_waits", False):
                return
            self._pinned = True
            # An extra reference keeps the group even when the interpreter ends and clears all modules.
            _take_reference(ctypes.py_object(self.pg))
            self._keep()

    def keep_last(self, message: object) -> None:
        """Keep a send that nobody waits for, until many other conversations have ended."""
        with _finding:
            try:
                kept = _last_messages.setdefault(self.pg, self._last_messages)
            except TypeError:  # A group of the caller's own, of which there can be no weak reference.
                kept = self._last_messages
            kept.append(message)

    def leave_behind(self, channel: object) -> None:
        """Keep a conversation and its memory alive until :meth:`forget`."""
        with self._lock:
            self._left_behind.add(channel)
            self._keep()

    def forget(self, channel: object) -> None:
        with self._lock:
            self._left_behind.discard(channel)
            self._keep()

    def leave_stuck(self, queue: int, operations: Sequence[StuckOperation]) -> None:
        """Keep operations on the accelerator and their memory until they are complete, which may be never."""
        if operations:
            with self._lock:
                known = self._stuck.setdefault(queue, [])
                known.extend(operation for operation in operations if operation not in known)
                self._keep()

    def forget_complete(self) -> None:
        """Let go of operations that were left behind and have completed since."""
        for queue in list(self._stuck):
            self.is_stuck(queue)

    def is_stuck(self, queue: int) -> bool:
        """Whether operations that were left behind still block this queue."""
        with self._lock:
            left = [operation for operation in self._stuck.pop(queue, ()) if not operation.is_complete()]
            if left:
                self._stuck[queue] = left
            self._keep()
            return bool(left)

    def is_left_behind(self, channel: object) -> bool:
        return channel in self._left_behind

    def park(self, pending: PendingOffer) -> None:
        """The owner leaves: the next conversation with this peer takes the receive over."""
        with self._lock:
            if pending.owner is not None:
                pending.owner = None
                self._parked.append(pending)
                self._parked.sort(key=lambda pending: pending.number)
                self._keep()

    def adopt(self, peer: int, owner: object) -> PendingOffer | None:
        """Take over a receive that an earlier call has left behind; None if there is none that can still succeed."""
        with self._lock:
            found = None
            for pending in [*self._parked]:
                if pending.error is not None:
                    self._parked.remove(pending)
                elif found is None and pending.peer == peer:
                    self._parked.remove(pending)
                    pending.owner, found = owner, pending
            self._keep()
            return found

    def release(self, pending: PendingOffer, owner: object) -> bool:
        """Whether ``owner`` still owns the receive and takes its result. If not, a failed receive is dropped."""
        with self._lock:
            if pending.owner is owner:
                pending.owner = None
                return True
            if pending.error is not None:
                self._unpark(pending)
            return False

    def take_back(self, pending: PendingOffer) -> bool:
        """Whether nobody has taken over a receive that was left behind. From then on nobody can."""
        with self._lock:
            return self._unpark(pending)

    def _unpark(self, pending: PendingOffer) -> bool:
        found = pending in self._parked
        if found:
            self._parked.remove(pending)
            self._keep()
        return found

    def _keep(self) -> None:
        """Keep this switchboard alive while something left behind needs it, even if no transport uses the group."""
        if self._pinned or self._left_behind or self._parked or self._stuck:
            _kept.add(self)
        else:
            _kept.discard(self)

    def left(self) -> int:
        return len(self._left_behind)

    def start_again(self) -> None:
        """Start afresh in the child of a fork: it has only one thread, so nobody holds a lock or a queue.

        The parent's receives are kept but never handed on: what they receive arrives in the parent.
        """
        self._start()
        self._parents, self._parked = self._parked, []


#: Switchboards by the ids of their groups and by the groups' configurations.
_switchboards: WeakValueDictionary[tuple[int, str], Switchboard] = WeakValueDictionary()
#: Switchboards that must stay although nobody uses them.
_kept: set[Switchboard] = set()
#: By group: its last messages, which outlive its switchboard. That ends with the last transport on the group.
_last_messages: WeakKeyDictionary[Any, deque[object]] = WeakKeyDictionary()
#: By group and configuration: the ranks with which it has communicators. These outlive a switchboard, too.
_connected: WeakKeyDictionary[Any, dict[str, set[int]]] = WeakKeyDictionary()
_finding = threading.Lock()


def configuration_of(pg: Any) -> str:
    """A text that changes when torch reconfigures the group in place; empty if this group cannot be reconfigured.

    With each reconfiguration a group's handle changes: it includes the new configuration's number.
    """
    with suppress(Exception):  # torch before 2.14, groups with several backends, groups that are not torch's.
        if pg.supports_reconfigure:
            return str(pg.get_reconfigure_handle())
    return ""


def switchboard_of(pg: object) -> Switchboard:
    """The one switchboard of a process group in its present configuration."""
    configuration = configuration_of(pg)
    with _finding:
        for kept in list(_kept):
            kept.forget_complete()
        switchboard = _switchboards.get((id(pg), configuration))
        if switchboard is None:
            switchboard = _switchboards[id(pg), configuration] = Switchboard(pg, configuration)
        return switchboard


class Leftovers(NamedTuple):
    """How many groups of this process are watched now, and how many conversations were left behind."""

    watches: int
    left_behind: int


def leftovers() -> Leftovers:
    switchboards = list(_switchboards.values())
    return Leftovers(
        sum(len(switchboard.watch) > 0 for switchboard in switchboards),
        sum(switchboard.left() for switchboard in switchboards),
    )


#: Watches all conversations over streams.
_stream_watch = Watch()


def stream_watch() -> Watch:
    return _stream_watch


def _after_fork() -> None:
    global _finding, _stream_watch
    _finding, _stream_watch = threading.Lock(), Watch()
    for switchboard in list(_switchboards.values()):
        switchboard.start_again()


os.register_at_fork(after_in_child=_after_fork)
