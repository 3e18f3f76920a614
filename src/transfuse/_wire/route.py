"""A route: a way for a receiver to pull bytes out of a source's memory while the source does nothing.

When no route can pull, the source pushes over the group. To add a route, write one file that implements :class:`Route`,
and add one line to the table in :mod:`.route_table`. An end that does not know a route ignores it.

At the source a route gives a :class:`Lease` for the length of one call. The lease exports an *entry*: the few bytes
that the offer tells receivers about this route (msgpack, never a pickle). A receiver that knows the route opens the
entry and gets a :class:`Puller`, or :class:`Unreadable` says why the route does not work here. Pulled parcels count
only after :meth:`Puller.recheck` has found the lease still good after their last byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from transfuse._memory.packing import Land
from transfuse._plan.parcels import Parcels
from transfuse._state.manifest import Described, Manifest


class Unreadable(Exception):
    """Says why a source's memory cannot be read, or can no longer be read."""


class SourceEnded(Unreadable):
    """The source's process is gone, and its memory with it."""


class MalformedEntry(ValueError):
    """An entry that no honest source writes. The receiver refuses the source."""


class Lease(Protocol):
    """A source's permission to pull from its memory, for the length of one call: from ``with`` until its end."""

    def __enter__(self) -> object: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the lease, if :meth:`end` has not, and give back everything that it took, even after an error."""

    def export(self, described: Described) -> bytes | None:
        """The entry for an offer, which :meth:`Route.open` of this route reads; None: nothing can be pulled."""

    def end(self) -> None:
        """End the lease: the source may now change its tensors, and every later :meth:`Puller.recheck` fails."""


@dataclass(frozen=True)
class Pull:
    """The arguments of :meth:`Route.open`: what to pull, where it lands, and whom to tell."""

    #: The source's own description of its state.
    manifest: Manifest
    #: All parcels of this receive. Their regions lie in the source's storages.
    cut: Parcels
    landing: Land
    #: How many bytes all buffers together may take.
    staging_bytes: int
    #: Called with bytes that were read but have not newly landed (a second read, for example). It waits as long as the
    #: source's rate limit demands.
    rate_limit: Callable[[int], object]
    #: Called with bytes that have newly landed. It waits for the rate limit too. Both raise when the caller stops.
    went_on: Callable[[int], object]
    #: How many bytes to move at a time so that they flow evenly, given the most to move without a rate limit.
    at_once: Callable[[int], int]
    #: How many seconds queued work of an accelerator may take.
    timeout: float


class Puller(Protocol):
    """Pulls parcels from one source. Every call may raise :class:`Unreadable`."""

    def readable(self) -> Sequence[int]:
        """Numbers of the parcels that can probably be pulled."""

    def pull(self, numbers: Sequence[int]) -> Sequence[int]:
        """Pull these parcels to their places. Return the numbers of the parcels that could not be pulled."""

    def differing(self, numbers: Sequence[int]) -> Sequence[int]:
        """Read these parcels from the source a second time. Return the numbers that differ from what has landed."""

    def recheck(self) -> None:
        """Raise unless the lease is still good. If it is, everything pulled until now was pulled under the lease."""

    def close(self) -> None: ...


class Route(Protocol):
    @property
    def name(self) -> str:
        """The name in offers and reports. Reports join the names of several routes with a plus."""

    @property
    def same_host(self) -> bool:
        """Whether the route works within one host only. If so, ``same_host=False`` at either end forbids it."""

    @property
    def opt_in(self) -> bool:
        """Whether the route is used only where the caller asks for it, by the option that has the route's name."""

    @property
    def compared(self) -> bool:
        """Whether what was pulled counts only once the source's digests have been compared, unless verify=False."""

    def lease(self, seconds: float) -> Lease:
        """``seconds``: how long the export may wait for work that an accelerator has queued."""

    def open(self, entry: bytes, pull: Pull) -> Puller:
        """Open the entry of a source's lease. Do not trust the entry: anybody may have written it.

        Raises :class:`Unreadable` if nothing can be pulled here, :class:`MalformedEntry` if no honest source writes
        such an entry.
        """
