"""Turns between two ranks of a group without tags: one transfer at a time, and both ranks agree which.

Without tags, operations between two ranks are matched by their order alone. If each rank chose for itself which of its
transfers goes first, both might begin to send, or both to receive, and neither would ever be answered. So before each
transfer the lower rank says which transfers it could begin now, and the higher rank says which of them it is. If there
is none that both have, the lower rank asks again a little later: each may get more to do.

A receive from several sources keeps the turns that it has while it waits for the others. If two receives could each
wait for a turn that the other one holds, neither would go on. So a receive asks for its turns one after another, from
the lowest source on: then some receive always has all that it needs.

In a group that is bound to a device all operations of a rank share one order. There several sources and several
receivers at once would wait for each other. Each rank says which of its transfers have several peers: a transfer that
has several at both ends is refused, at both ends.

A transfer that times out may leave operations behind that cannot be taken back, and everything after them would be
matched with them. So after such a failure the two ranks do not talk over this group any more.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from transfuse._errors import PeerLost, PeerTimeout, ProtocolError, TransfuseError
from transfuse._tuning import TURN_AGAIN_SECONDS
from transfuse._wire import messages
from transfuse._wire.messages import HEADER_BYTES, Message

CROWDED = (
    "several sources and several receivers at once would wait for each other in this group: it is bound to a device "
    "(device_id=), where all operations of a rank share one order, and has no gloo for messages. Use one source or one "
    "receiver at a time, or make the group with init_process_group('cpu:gloo,…')"
)


class _PostedOperation(Protocol):
    def wait(self) -> torch.Tensor: ...


class Speaks(Protocol):
    """A channel, as far as a turn needs it."""

    peer: int
    phase: str
    broken: bool
    timeout: float
    #: What the group has reserved for this conversation.
    turn: ExitStack

    @property
    def is_lower(self) -> bool:
        """Whether this rank is lower than its peer."""

    def leave_stuck(self) -> None: ...

    def post_send(self, tensor: torch.Tensor) -> _PostedOperation: ...

    def post_recv(self, tensor: torch.Tensor) -> _PostedOperation: ...

    def wire(self, data: bytes) -> torch.Tensor: ...

    def empty(self, count: int) -> torch.Tensor: ...


class _Way(enum.IntFlag):
    """Which rank of the two sends."""

    NONE = 0
    LOWER_SENDS = 1
    HIGHER_SENDS = 2


class SourceOrder:
    """The sources of one receive, in the order in which it asks for their turns."""

    def __init__(self, sources: Iterable[int], patience: float) -> None:
        self._changed = threading.Condition()
        #: Sources whose turn has not come yet.
        self._ahead = set(sources)
        #: A source that does not answer holds up the others only until then.
        self._until = time.monotonic() + patience

    def wait(self, source: int) -> None:
        """Wait until all lower sources have had their turn, or have failed."""
        with self._changed:
            while min(self._ahead) < source and (left := self._until - time.monotonic()) > 0:
                self._changed.wait(left)

    def leave(self, source: int) -> None:
        with self._changed:
            self._ahead.discard(source)
            self._changed.notify_all()


class _Waiting:
    def __init__(self, way: _Way, *, crowded: bool) -> None:
        self.way = way
        #: Whether this end has several peers at once, in a group with one order.
        self.crowded = crowded
        self.chosen = self.refused = False


class Turns:
    """The turns between this rank and one peer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: Transfers that wait for their turn, in the order in which they came.
        self._waiting: list[_Waiting] = []
        #: Whether a transfer has its turn, or a thread talks with the peer about the next one.
        self._busy = self._asking = False
        #: Why the two ranks cannot agree on anything any more.
        self._lost: BaseException | None = None

    @contextmanager
    def hold(self, channel: Speaks, *, sends: bool, crowded: bool = False) -> Iterator[None]:
        """Wait for the turn of a transfer with the channel's peer. ``sends``: this rank is the source.

        ``crowded``: this end has several peers at once, in a group in which all operations of a rank share one order.
        """
        me = _Waiting(_Way.LOWER_SENDS if sends == channel.is_lower else _Way.HIGHER_SENDS, crowded=crowded)
        with self._changed:
            self._waiting.append(me)
        try:
            self._await(me, channel)
        except BaseException:
            channel.leave_stuck()
            with self._changed:
                if me in self._waiting:
                    self._waiting.remove(me)
                self._changed.notify_all()
            raise
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                if channel.broken:
                    self._lost = PeerLost(channel.peer, "a transfer was cut off")
                self._changed.notify_all()

    def _await(self, me: _Waiting, channel: Speaks) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: me.chosen or me.refused or self._lost or not (self._busy or self._asking)
                )
                if me.refused:
                    raise TransfuseError(CROWDED)
                if me.chosen:
                    return
                if self._lost is not None:
                    raise PeerLost(
                        channel.peer,
                        f"rank {channel.peer}: an earlier transfer with it was cut off ({self._lost}), and without "
                        "tags nothing can follow it on this group: make a new group",
                    )
                self._asking = True
            try:
                self._ask(channel)
            except BaseException as error:
                with self._changed:
                    self._lost, self._asking = error, False
                    self._changed.notify_all()
                raise
            with self._changed:
                self._asking = False
                self._changed.notify_all()

    def _ask(self, channel: Speaks) -> None:
        """Agree with the peer on the next transfer. One thread does this for all transfers that wait."""
        channel.phase = "agreeing on whose turn it is"
        began = time.monotonic()
        while True:
            if time.monotonic() - began > channel.timeout:
                doing = f"{channel.phase} (do both ranks send, or both receive?)"
                raise PeerTimeout(channel.peer, doing, channel.timeout)
            if channel.is_lower:
                mine, crowded = self._possible()
                said = channel.post_send(channel.wire(messages.seal(Message.TURN, crowded, mine, b"")))
                way, crowded_there = self._hear(channel)
                said.wait()
            else:
                theirs, crowded_there = self._hear(channel)
                mine, crowded = self._possible()
                both = mine & theirs
                way = _Way.LOWER_SENDS & both or both
                channel.post_send(channel.wire(messages.seal(Message.TURN, crowded, way, b""))).wait()
            if way is not _Way.NONE:
                break
            if channel.is_lower:
                time.sleep(TURN_AGAIN_SECONDS)
        with self._changed:
            first = next((one for one in self._waiting if one.way is way), None)
            if first is None:
                raise ProtocolError(channel.peer, f"rank {channel.peer} chose a transfer that was not possible")
            self._waiting.remove(first)
            if way & crowded & crowded_there:
                first.refused = True
            else:
                first.chosen = self._busy = True

    def _possible(self) -> tuple[_Way, _Way]:
        """Which transfers this end could begin, and of which of these the first has several peers at this end."""
        with self._changed:
            first = {one.way: one for one in reversed(self._waiting)}
            return _Way(sum(first)), _Way(sum(way for way, one in first.items() if one.crowded))

    @staticmethod
    def _hear(channel: Speaks) -> tuple[_Way, _Way]:
        data = bytes(channel.post_recv(channel.empty(HEADER_BYTES)).wait().cpu().numpy())
        try:
            header = messages.open_header(data)
        except ValueError as error:
            raise ProtocolError(channel.peer, f"rank {channel.peer}, while {channel.phase}: {error}") from error
        if header.kind is not Message.TURN or header.note > 3:
            raise ProtocolError(channel.peer, f"rank {channel.peer} sent {header.kind.name} where TURN was due")
        return _Way(header.note), _Way(header.transfer & 3)
