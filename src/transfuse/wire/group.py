"""A process group, and what its backend can do.

Facts about backends that this module, :mod:`.hub` and :mod:`.channel` are built around:

- gloo: a work handle completes only in ``wait()`` and cannot be cancelled. A wait that expires closes *all* of this
  rank's connections in the group. So waits do not expire by themselves: the watch of the group's :class:`Hub` ends
  them, and only when every conversation of the group is overdue.
- gloo: when a connection breaks, operations that have begun to move bytes are forgotten, and their waits never end.
  Only operations that have not begun learn of it. So a bulky operation is never waited for. A short *mark* follows
  it, and receiving the mark proves that the bulk has arrived. A peer's answer proves that all that was sent before it
  has arrived.
- gloo: a message longer than the receive posted for it ends the process; a shorter one completes silently. So lengths
  are always derived or announced first, never guessed.
- NCCL: tags are ignored, and operations between two ranks run in the order in which they were posted, on both sides.
  So the two ends of a conversation take strict turns, and without tags only one conversation runs between two ranks
  at a time.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch

from transfuse.wire.hub import hub_of

__all__ = [
    "OFFER_TAG",
    "Group",
    "ProcessGroupLike",
    "WorkLike",
    "new_link_tag",
    "valid_link_tag",
    "valid_tag",
]

#: The headers of all offers travel on this tag, matched in call order. Everything else uses the transfer's own tag.
OFFER_TAG = 0x5446_0000
FIRST_TAG = 0x5500_0000
TAGS = 1 << 22
#: A link between two receivers of a chain has a random tag from this range, chosen by the source.
FIRST_LINK_TAG = 0x6000_0000
LINK_TAGS = 1 << 28

# Starts at random: two processes that do not know their ranks will hardly ever use the same tags at the same time.
_transfers = itertools.count(secrets.randbelow(TAGS))


class WorkLike(Protocol):
    def wait(self, timeout: timedelta) -> Any: ...


class ProcessGroupLike(Protocol):
    """The methods of a process group that are used here. Ranks are ranks within the group."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike: ...


class Group:
    """A process group, and the facts about it that a conversation depends on."""

    def __init__(self, pg: ProcessGroupLike, device: torch.device) -> None:
        self.pg = pg
        self.device = device
        #: The state that all conversations over this group share, whichever transport they belong to.
        self.hub = hub_of(pg)
        backend = _backend_name(pg, device)
        self.tagged = "gloo" in backend or "mpi" in backend
        #: torchft's groups in a child process: one pipe, so one operation at a time over all peers.
        self.serial = "baby" in backend
        #: Such groups also move a tensor's memory to where the child process can see it. So they must never get the
        #: caller's own tensors: their addresses are known, and other processes may be reading there.
        self.moves_tensors = self.serial
        #: Whether a wait that expires breaks the connections to all ranks, not only to one peer.
        self.shares_fate = "gloo" in backend and not self.serial

    def rank(self) -> int | None:
        """This process's rank in the group; None if the group does not know it."""
        group = self.pg
        while (inner := getattr(group, "parent", None)) is not None:
            group = inner
        # torchft's groups answer 0 on every rank. If they wrap a group of torch, that group knows the rank.
        return None if type(group).__module__.startswith("torchft") else _call(group, "rank")

    def size(self) -> int | None:
        return _call(self.pg, "size")

    @contextmanager
    def turn(self, peer: int, source: int) -> Iterator[None]:
        """Reserve the group for a transfer with ``peer``. With tags, transfers do not disturb each other: no wait."""
        if (self.tagged and not self.serial) or peer == self.rank():
            yield
        else:
            with self.hub.lanes.hold(-1 if self.serial else peer, source):
                yield

    @property
    def relays(self) -> bool:
        """Whether receivers may relay: without tags their messages could meet another transfer's."""
        return self.tagged and not self.serial and self.size() is not None

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
    with suppress(Exception):
        return str(pg._get_backend(device).name()).lower()
    with suppress(Exception):
        return str(pg.getBackendName()).lower()
    with suppress(Exception):
        return str(pg.name()).lower()
    return "unknown"
