"""The table of routes: which ones a source offers, and which ones a receiver can use."""

from __future__ import annotations

from collections.abc import Container
from contextlib import ExitStack
from types import TracebackType

from transfuse._options import Options
from transfuse._state.manifest import Described
from transfuse._wire.device_route import DeviceRoute
from transfuse._wire.memory_route import MemoryRoute
from transfuse._wire.nixl_route import NixlRoute
from transfuse._wire.route import Lease, Route

#: Every route that pulls, best first. A receiver tries them in this order, each for the parcels that the earlier ones
#: could not pull, and wants the rest over the group. What lies in main memory and what lies on devices is never in one
#: parcel, so the first two never compete.
ROUTES: list[Route] = [MemoryRoute(), DeviceRoute(), NixlRoute()]


def _allowed(options: Options) -> list[Route]:
    return [
        route
        for route in ROUTES
        if (options.same_host or not route.same_host) and (not route.opt_in or getattr(options, route.name))
    ]


def usable(offered: Container[str], options: Options) -> list[Route]:
    """The routes that the source has offered, this end knows, and this end's caller allows."""
    return [route for route in _allowed(options) if route.name in offered]


class Leases:
    """A source's leases on all routes that its caller allows, from ``with`` until its end."""

    def __init__(self, options: Options, seconds: float) -> None:
        """``seconds``: how long exports may wait for work that an accelerator has queued."""
        self._leases: dict[str, Lease] = {route.name: route.lease(seconds) for route in _allowed(options)}
        self._given = ExitStack()

    def __enter__(self) -> Leases:
        with ExitStack() as given:
            for lease in self._leases.values():
                given.enter_context(lease)
            self._given = given.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._given.__exit__(kind, error, at)

    def export(self, described: Described) -> dict[str, bytes]:
        """The entries of all routes, for an offer."""
        entries = {name: lease.export(described) for name, lease in self._leases.items()}
        return {name: entry for name, entry in entries.items() if entry is not None}

    def end(self) -> None:
        """End all leases: the source may now change its tensors, and no receiver accepts what it pulls after this."""
        with ExitStack() as ended:
            for lease in self._leases.values():
                ended.callback(lease.end)
