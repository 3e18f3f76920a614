"""A process group, and what its backend can do.

Facts about backends that this module, :mod:`.switchboard` and :mod:`.channel` are built around:

- gloo: a work handle completes only in ``wait()`` and cannot be cancelled. A wait that expires closes *all* of this
  rank's connections in the group. So waits do not expire by themselves: the watch of the group's :class:`Switchboard`
  ends them, and only when every conversation of the group is overdue.
- gloo: when a connection breaks, operations that have begun to move bytes are forgotten, and their waits never end.
  Only operations that have not begun learn of it. So a bulky operation is never waited for. A short *mark* follows
  it, and receiving the mark proves that the bulk has arrived. A peer's answer proves that all that was sent before it
  has arrived.
- gloo: a message longer than the receive posted for it ends the process; a shorter one completes silently. So lengths
  are always derived or announced first, never guessed.
- gloo, reconfigured in place (torch 2.14 and later): ranks and size change, and receives that were posted before stay
  with the old connections. A process that has left the group can still send to them. So nothing is handed on from one
  configuration to the next.
- NCCL and its like: tags are ignored, and operations between two ranks run in the order in which they were posted, on
  both sides and for both directions. A group that was bound to a device (``device_id=``) has one such order for all
  its peers together. So both ranks agree whose transfer goes on before either of them posts an operation.
- NCCL: the first operation between two ranks makes their communicator inside ``send`` or ``recv``, which blocks until
  the other rank posts too. So it is posted in a thread that can be left behind.
- NCCL: ``wait(timeout)`` counts from posting, so a busy stream makes a healthy peer late; and when it expires, torch
  aborts the communicator and later ends the process. Other backends' ``wait`` blocks only the stream. So operations
  on accelerators are never waited for: we ask whether they are complete, with a deadline of our own.

A group made by ``init_process_group()`` on a machine with accelerators has two backends: gloo for main memory, and one
for the accelerator. Then all messages travel through main memory, by gloo, with tags and with what is known about its
failures. Only parcels travel on the accelerator's backend.

A conversation that has moved to a stream leaves its group, but for parcels on an accelerator. :meth:`Group.beside` is
the group as such a conversation sees it.
"""

from __future__ import annotations

import copy
import itertools
import queue
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from transfuse._memory.streams import with_index
from transfuse._tuning import ABORT_SECONDS, COLD_PAIRS
from transfuse._wire.switchboard import ALL, StuckOperation, configuration_of, switchboard_of
from transfuse._wire.turns import SourceOrder, Speaks

#: The headers of all offers travel on this tag, matched in call order. Everything else uses the transfer's own tag.
OFFER_TAG = 0x5446_0000
FIRST_TAG = 0x5500_0000
TAGS = 1 << 22
#: A link between two receivers of a chain has a random tag from this range, chosen by the source.
FIRST_LINK_TAG = 0x6000_0000
LINK_TAGS = 1 << 28

CPU = torch.device("cpu")

# Starts at random: two processes that do not know their ranks will hardly ever use the same tags at the same time.
_transfers = itertools.count(secrets.randbelow(TAGS))


class WorkLike(Protocol):
    def wait(self, timeout: timedelta) -> Any: ...


class SendsAndReceives(Protocol):
    """The methods of a process group that are used here. Ranks are ranks within the group."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike: ...


class HasStreams(Protocol):
    """What has a stream to each of its ranks. Channels write to the stream and read from it."""

    def stream_to(self, rank: int) -> Any: ...


ProcessGroupLike: TypeAlias = SendsAndReceives | HasStreams


class Group:
    """A process group, and the facts about it that a conversation depends on."""

    def __init__(self, pg: ProcessGroupLike, device: torch.device) -> None:
        self.pg: Any = pg
        #: Where parcels travel, with its index.
        self.device = with_index(device)
        #: The state that all conversations over this group share, whichever transport they belong to.
        self.switchboard = switchboard_of(pg)
        parcels = _backend_name(pg, self.device)
        _check(pg, parcels, self.device)
        beside = "" if self.device.type == "cpu" else _backend_of(pg, CPU)
        #: Where messages travel: in main memory if the group has a backend with tags for it.
        self.control = CPU if _has_tags(beside) else self.device
        messages = beside if _has_tags(beside) else parcels
        self.tagged = _has_tags(messages)
        #: torchft's groups in a child process: one pipe, so one operation at a time over all peers.
        self.serial = "baby" in messages
        #: Such groups also move a tensor's memory to where the child process can see it. So they must never get the
        #: caller's own tensors: their addresses are known, and other processes may be reading there.
        self.moves_tensors = self.serial
        #: Whether a wait that expires breaks the connections to all ranks, not only to one peer.
        self.shares_fate = "gloo" in messages and not self.serial
        #: Whether operations on tensors of ``device`` are asked for completion instead of being waited for.
        self.polls = self.device.type != "cpu" and not _has_tags(parcels) and not self.serial
        #: Whether parcels have a backend of their own, on which the two ranks agree about every request's turn.
        self.agrees = self.polls and self.tagged
        #: Whether all peers share one order of operations there.
        self.one_order = getattr(pg, "bound_device_id", None) is not None

    def beside(self, stream: HasStreams) -> Group:
        """This group for a conversation that goes on over a stream: only parcels on an accelerator stay here."""
        if self.device == CPU:
            return Group(stream, CPU)
        group = copy.copy(self)
        group.control, group.tagged, group.shares_fate, group.agrees = CPU, True, False, self.polls
        return group

    def in_present_configuration(self) -> Group:
        """This, or another one if the group has been reconfigured since: then ranks mean other processes."""
        same = self.switchboard.configuration == configuration_of(self.pg)
        return self if same else Group(self.pg, self.device)

    def rank(self) -> int | None:
        """This process's rank in the group; None if the group does not know it."""
        group = self.pg
        while (inner := getattr(group, "parent", None)) is not None:
            group = inner
        # torchft's groups answer 0 on every rank. If they wrap a group of torch, that group knows the rank.
        return None if type(group).__module__.startswith("torchft") else _call(group, "rank")

    def size(self) -> int | None:
        return _call(self.pg, "size")

    def host(self) -> str | None:
        """The address of this host that the group uses; None if it cannot be found out."""
        return self.switchboard.host()

    @contextmanager
    def turn(
        self, channel: Speaks, source: int, line: SourceOrder | None = None, *, several: bool = False
    ) -> Iterator[None]:
        """Reserve the group for a transfer with a channel's peer. With tags, transfers do not disturb each other.

        A channel that leaves the group for a stream gives its turn up before this block ends.

        ``line``: the sources of the receive that this transfer belongs to. ``several``: the call has several peers.
        """
        with channel.turn as held:
            if (self.tagged and not self.serial) or channel.peer == self.rank():
                pass
            elif self.serial or self.rank() is None:
                held.enter_context(self.switchboard.alone.hold(ALL if self.serial else channel.peer, source))
            else:
                with ExitStack() as waiting:
                    if line is not None:
                        waiting.callback(line.leave, source)
                        line.wait(source)
                    turns, crowded = self.switchboard.turns_with(channel.peer), several and self.one_order
                    held.enter_context(turns.hold(channel, sends=source == self.rank(), crowded=crowded))
            yield

    def queue(self, peer: int) -> AbstractContextManager[None]:
        """Reserve this rank's order of operations for parcels to or from ``peer``. Both ranks do, the lower one first.

        All ranks take queues in the same order, so no circle of ranks can wait for each other.
        """
        return self.switchboard.queues.hold(self._queue(peer), 0)

    def is_stuck(self, peer: int) -> bool:
        """Whether an operation that a silent peer never answered still blocks the queue of this peer."""
        return self.switchboard.is_stuck(peer) or self.switchboard.is_stuck(ALL)

    def avoids(self, peer: int) -> bool:
        """Whether parcels to or from this peer go through main memory. Ask with the queue held."""
        return self.is_stuck(peer) or (self._is_cold(peer) and self._has_enough())

    def leave_stuck(self, peer: int, operations: Sequence[StuckOperation]) -> None:
        """Leave operations behind that may never complete. Their memory is kept, and nothing is posted after them."""
        self.switchboard.leave_stuck(self._queue(peer), operations)

    def _queue(self, peer: int) -> int:
        """The queue of operations with a peer. While a pair's communicator is made, nothing else may be posted."""
        return ALL if self.one_order or (self._is_cold(peer) and not self._has_enough()) else peer

    def _is_cold(self, peer: int) -> bool:
        """Whether the pair of this rank and a peer has no communicator yet, and would get one of its own."""
        return not self.one_order and peer not in self.switchboard.connected

    def _has_enough(self) -> bool:
        """Whether this rank has as many communicators for pairs as it may have."""
        return len(self.switchboard.connected) >= COLD_PAIRS

    def abort(self, seconds: float) -> bool:
        """Abort the accelerator's communicators, so that nothing writes to the caller's memory any more.

        A backend may block there. False if it has not ended after this time, which may be shorter, or cannot abort.
        """
        ended: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def run() -> None:
            done = False
            with suppress(Exception):
                backend: Any = self.pg
                if hasattr(backend, "_get_backend"):
                    backend = backend._get_backend(self.device)
                backend.abort()
                done = True
            ended.put(done)

        threading.Thread(target=run, name="transfuse-abort", daemon=True).start()
        try:
            return ended.get(timeout=min(seconds, ABORT_SECONDS))
        except queue.Empty:
            return False

    @property
    def relays(self) -> bool:
        """Whether receivers may relay: without tags their parcels could meet another transfer's."""
        return self.tagged and not self.polls and not self.serial and self.size() is not None

    def has(self, rank: int) -> bool:
        """Whether ``rank`` is another rank of the group. gloo ends the process if it does not exist."""
        size = self.size()
        return rank >= 0 and (size is None or rank < size) and rank != self.rank()

    def new_tag(self, peer: int) -> int:
        """A tag for a transfer to ``peer``: unique in this process, and never one that ``peer`` itself chooses."""
        upward = (self.rank() or 0) < peer
        return FIRST_TAG + 2 * (next(_transfers) % TAGS) + upward


def valid_tag(tag: int) -> bool:
    return FIRST_TAG <= tag < FIRST_TAG + 2 * TAGS


def new_link_tag() -> int:
    return FIRST_LINK_TAG + secrets.randbelow(LINK_TAGS)


def valid_link_tag(tag: int) -> bool:
    return FIRST_LINK_TAG <= tag < FIRST_LINK_TAG + LINK_TAGS


def _call(pg: object, name: str) -> int | None:
    method = getattr(pg, name, None)
    if not callable(method):
        return None
    value = method()
    return value if isinstance(value, int) else None


def _backend_name(pg: Any, device: torch.device) -> str:
    """The name of the group's backend. Each kind of group has its own method for it, and some have none."""
    found = _backend_of(pg, device)
    if found:
        return found
    with suppress(Exception):
        return str(pg.getBackendName()).lower()
    with suppress(Exception):
        return str(pg.name()).lower()
    return "unknown"


def _backend_of(pg: Any, device: torch.device) -> str:
    """The name of the backend that a group has for this device; empty if the group has none, or does not say."""
    with suppress(Exception):
        return str(pg._get_backend(device).name()).lower()
    return ""


def _has_tags(backend: str) -> bool:
    """Whether two transfers between two ranks do not disturb each other. A stream carries one transfer at a time."""
    return "gloo" in backend or "mpi" in backend or backend == "stream"


def _present(types: Sequence[str]) -> str:
    """The first of these types of device that this process has."""
    accelerator = torch.accelerator.current_accelerator()
    here = ("cpu", None if accelerator is None else accelerator.type)
    return next((kind for kind in types if kind in here), types[0])


def devices_of(pg: Any) -> list[str]:
    """The types of device for which a group has a backend; none if it does not say."""
    return [torch.device(kind).type for kind in getattr(pg, "_device_types", ())]


def _check(pg: Any, backend: str, device: torch.device) -> None:
    """Refuse a device that the group's backend cannot send from."""
    can = ["cpu"] if backend == "gloo" else dist.Backend.backend_capability.get(backend)
    types = devices_of(pg)
    if isinstance(pg, dist.ProcessGroup) and types and not _backend_of(pg, device):
        has = ", ".join(f"{kind}: {_backend_of(pg, torch.device(kind))}" for kind in types)
        raise ValueError(
            f"device={device}: the group has no backend for it (it has {has}); pass device={_present(types)!r}, or "
            f"make the group with init_process_group('cpu:gloo,{device.type}:…')"
        )
    if can is not None and device.type not in can:
        raise ValueError(
            f"device={device}: the group's backend {backend} sends from {', '.join(can)} only; pass "
            f"device={_present(can)!r} (the state's tensors may be on any device), or a group with a backend "
            f"for {device.type}"
        )
