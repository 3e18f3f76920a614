"""A process group, and what its backend can do.

Facts about backends that this module, :mod:`.hub` and :mod:`.channel` are built around:

- gloo: a work handle completes only in ``wait()`` and cannot be cancelled, and a wait that expires closes *all* of
  this rank's connections in the group: hence waits do not expire by themselves, and the watch of the group's
  :class:`Hub` ends them only when no conversation of the group has any hope left.
- gloo: when a connection breaks, operations that have begun to move bytes are forgotten and their waits never end;
  only those that have not begun learn of it: hence nothing bulky is ever waited for. A short *mark* follows it, and
  receiving the mark proves that it is there; a peer's answer proves that what was sent before it has arrived.
- gloo: a message longer than the receive posted for it ends the process, a shorter one completes silently: hence
  lengths are always derived or announced first, never guessed.
- NCCL: tags are ignored and operations between two ranks run in the order in which they were posted, on both
  sides: hence conversations take strict turns, and without tags only one runs between two ranks at a time.
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

#: All offers travel on this tag, matched in call order; everything after on a tag of the transfer's own.
OFFER_TAG = 0x5446_0000
FIRST_TAG = 0x5500_0000
TAGS = 1 << 22
#: Links between two receivers of a chain have tags that the source draws by lot from this range.
FIRST_LINK_TAG = 0x6000_0000
LINK_TAGS = 1 << 28

# Random, so that two ranks that do not know theirs hardly ever give out the same tags at the same time.
_transfers = itertools.count(secrets.randbelow(TAGS))


class WorkLike(Protocol):
    def wait(self, timeout: timedelta) -> Any: ...


class ProcessGroupLike(Protocol):
    """What is asked of a process group. Ranks are ranks within the group."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike: ...


class Group:
    """A process group, and what is known about it."""

    def __init__(self, pg: ProcessGroupLike, device: torch.device) -> None:
        self.pg = pg
        self.device = device
        #: What all conversations over this group share, in whichever transport.
        self.hub = hub_of(pg)
        backend = _backend_name(pg, device)
        self.tagged = "gloo" in backend or "mpi" in backend
        #: torchft's groups in a child process: one pipe, one operation at a time, whichever the peer.
        self.serial = "baby" in backend
        #: These also move the memory of what they are given to where the child can see it: that must not be the
        #: caller's, of which addresses are known, and which others may be reading.
        self.moves_tensors = self.serial
        #: Whether a wait that expires breaks the connections to all ranks, not only to one.
        self.shares_fate = "gloo" in backend and not self.serial

    def rank(self) -> int | None:
        """This process's rank, if the group knows it."""
        group = self.pg
        while (inner := getattr(group, "parent", None)) is not None:
            group = inner
        # torchft's groups answer 0 on every rank; where they wrap one of torch's, that one knows.
        return None if type(group).__module__.startswith("torchft") else _call(group, "rank")

    def size(self) -> int | None:
        return _call(self.pg, "size")

    @contextmanager
    def turn(self, peer: int, source: int) -> Iterator[None]:
        """Hold the way to ``peer``. With tags transfers do not disturb each other and nobody waits."""
        if (self.tagged and not self.serial) or peer == self.rank():
            yield
        else:
            with self.hub.lanes.hold(-1 if self.serial else peer, source):
                yield

    @property
    def relays(self) -> bool:
        """Whether receivers may pass parcels on: without tags their links would get mixed up with other transfers."""
        return self.tagged and not self.serial and self.size() is not None

    def has(self, rank: int) -> bool:
        """Whether there is another such rank. gloo ends the process over one that does not exist."""
        size = self.size()
        return rank >= 0 and (size is None or rank < size) and rank != self.rank()

    def new_tag(self, peer: int) -> int:
        """A tag for a transfer to ``peer``: unique in this process, and apart from those that ``peer`` gives out."""
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
    """What the group calls its backend. Every kind of group says it in its own way, and some not at all."""
    with suppress(Exception):
        return str(pg._get_backend(device).name()).lower()
    with suppress(Exception):
        return str(pg.getBackendName()).lower()
    with suppress(Exception):
        return str(pg.name()).lower()
    return "unknown"
