"""The table of routes, and what the two ends of a transfer ask it."""

from __future__ import annotations

from collections.abc import Container
from contextlib import ExitStack

from transfuse.state.manifest import Described
from transfuse.wire.memory_route import MemoryRoute
from transfuse.wire.route import Lease, Route

__all__ = ["ROUTES", "Leases", "usable"]

#: Every route that pulls, best first. A receiver pulls by each in turn what those before could not; the rest it asks
#: for over the group.
ROUTES: list[Route] = [MemoryRoute()]


def _allowed(*, same_host: bool) -> list[Route]:
    return [route for route in ROUTES if same_host or not route.same_host]


def usable(offered: Container[str], *, same_host: bool) -> list[Route]:
    """Routes that a source has offered, that this end knows, and that its caller allows."""
    return [route for route in _allowed(same_host=same_host) if route.name in offered]


class Leases:
    """A source's leases by all routes that its caller allows, from ``with`` until its end."""

    def __init__(self, *, same_host: bool) -> None:
        self._leases: dict[str, Lease] = {route.name: route.lease() for route in _allowed(same_host=same_host)}
        self._given = ExitStack()

    def __enter__(self) -> Leases:
        with ExitStack() as given:
            for lease in self._leases.values():
                given.enter_context(lease)
            self._given = given.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._given.close()

    def export(self, described: Described) -> dict[str, bytes]:
        """What an offer says of each route."""
        entries = {name: lease.export(described) for name, lease in self._leases.items()}
        return {name: entry for name, entry in entries.items() if entry is not None}

    def end(self) -> None:
        """The source may change its tensors from now on: nothing that is pulled after this passes for good."""
        with ExitStack() as ended:
            for lease in self._leases.values():
                ended.callback(lease.end)
