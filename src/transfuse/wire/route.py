"""A route: how a receiver pulls bytes out of a source's memory by itself, without the source's doing anything.

The group, which pushes, is what remains when no route can pull. A new route is one file that implements :class:`Route`,
one line in the table of :mod:`.routes`, and, since an older end does not know it, the wire's version.

At the source a route gives a :class:`Lease` for the length of one call, and the lease says in a few bytes of its own
what an offer tells receivers (an *entry*: msgpack, never a pickle). A receiver that knows the route opens the entry.
What it gets is a :class:`Puller`, or :class:`Unreadable` says why the route is of no use here. Parcels that were pulled
count once :meth:`Puller.recheck` has found that the lease was still good after the last byte of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from transfuse.memory.packing import Land
from transfuse.plan.parcels import Parcels
from transfuse.state.manifest import Described, Manifest

__all__ = ["Lease", "Malformed", "Pull", "Puller", "Route", "SourceEnded", "Unreadable"]


class Unreadable(Exception):
    """Why a source's memory cannot be read, or can no longer be."""


class SourceEnded(Unreadable):
    """The process whose memory it was is gone."""


class Malformed(ValueError):
    """An entry that no source writes: the receiver refuses the source."""


class Lease(Protocol):
    """A source's permission to pull from its memory, for the length of one call: from ``with`` until its end."""

    def __enter__(self) -> object: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End it, if :meth:`end` has not, and give back everything that it took, however the call went."""

    def export(self, described: Described) -> bytes | None:
        """What an offer says of this memory, for this route's own :meth:`Route.open`; None: nothing can be pulled."""

    def end(self) -> None:
        """The source may change its tensors from now on: every :meth:`Puller.recheck` after this fails."""


@dataclass(frozen=True)
class Pull:
    """What a route is told when it is opened: what there is to pull, where it goes, and who has to know."""

    #: The source's own description of its state.
    manifest: Manifest
    #: All parcels of this receive. Their boxes are places in the source's storages.
    cut: Parcels
    landing: Land
    #: How many bytes all buffers together may take.
    staging_bytes: int
    #: Told how many bytes were read, in all or in addition to those that ``went_on`` is told of: it waits as long as
    #: the source's rate demands.
    rate_limit: Callable[[int], object]
    #: Told how many bytes have newly landed; it waits, too. Both raise when the caller wants to stop.
    went_on: Callable[[int], object]
    #: How many bytes to move at a time so that they go evenly, given the most that are moved without a rate.
    at_once: Callable[[int], int]


class Puller(Protocol):
    """Pulls parcels from one source. Any call raises :class:`Unreadable` once that has become impossible."""

    def readable(self) -> Sequence[int]:
        """Numbers of the parcels that can be pulled, as far as is known."""

    def pull(self, numbers: Sequence[int]) -> Sequence[int]:
        """Bring these parcels to their places; the numbers of those that could not be brought."""

    def differing(self, numbers: Sequence[int]) -> Sequence[int]:
        """Look at the source's memory a second time; the numbers of those parcels that differ from what has landed."""

    def recheck(self) -> None:
        """Make sure that the lease is still good, and so that everything pulled until now was pulled under it."""

    def close(self) -> None: ...


class Route(Protocol):
    @property
    def name(self) -> str:
        """As offers and reports call it. In a report names are joined by a plus."""

    @property
    def same_host(self) -> bool:
        """Whether it reads within one host only: then ``same_host=False`` at either end forbids it."""

    def lease(self) -> Lease: ...

    def open(self, entry: bytes, pull: Pull) -> Puller:
        """Open what a source's lease has exported. Anybody may have written it.

        :class:`Unreadable` if nothing can be pulled here, :class:`Malformed` if no source writes such an entry.
        """
