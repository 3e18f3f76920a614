"""The caller's options: each once, with its type and default, and the check that refuses impossible values.

:class:`Options` holds the values; all code inside the package reads them there. :class:`OptionKeywords` has the same
names, for calls that take options as keywords and pass them on (``**options: Unpack[OptionKeywords]``), so that type
checkers and editors know the names. :class:`FetchKeywords` and :class:`ServeKeywords` are the subsets that ``fetch``
and ``serve`` take. ``CONTRIBUTING.md`` says how to add an option; ``tests/session/test_options.py`` compares places.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TypedDict

from torch.distributed.device_mesh import DeviceMesh

from transfuse import _arguments, _rules
from transfuse._limits import Limits, allows_same_host, allows_streams, asks_for_nixl, port_range
from transfuse._progress import Show
from transfuse._rules import MapPath
from transfuse._state.leaves.codec import MeshDescription
from transfuse._tls import Encryption, check_tls

#: The most connections between two ends.
MOST_LANES = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a transport. :class:`transfuse.PGTransport` explains each of them to users."""

    #: Both ends: receivers on the source's host may read the source's memory. ``TRANSFUSE_SAME_HOST=0`` forbids it.
    same_host: bool = True
    #: Both ends: receivers on the source's host may map the memory of the source's accelerators, and copy it there.
    device_memory: bool = False
    #: Both ends: receivers may read the source's memory through NIXL. None: if ``TRANSFUSE_NIXL`` is 1.
    nixl: bool | None = None
    #: Both ends: check the bytes that have landed. None: on the NIXL route, and on the group
    #: route if the tensors are on the CPU.
    verify: bool | None = None
    #: Receivers: keep parcels that the targets hold already, if they equal the source's.
    delta: bool = False
    #: Receivers: convert floating values for targets of another floating type.
    cast: bool = False
    #: Receivers: rules that translate the source's names into the target's.
    map_path: MapPath | None = None
    #: Receivers: write to no target before everything has arrived and been verified.
    atomic: bool = False
    #: Receivers: refuse leaves of the target that no source has (None), leaves that only one side has (True), or
    #: neither (False).
    strict: bool | None = None
    #: Receivers: the DeviceMesh for DTensors that arrive fresh, or a function that makes one.
    mesh: DeviceMesh | Callable[[MeshDescription], DeviceMesh] | None = None
    #: Receivers: accept Python objects that ``torch.load(weights_only=True)`` accepts.
    weights_only_objects: bool = False
    #: Both ends: receivers that want the same parcels may pass them on to each other.
    relay: bool = True
    #: Both ends: conversations that begin over the group go on over connections of our own.
    streams: bool = True
    #: Both ends: how many connections a source and a receiver use. None: as many as pay.
    lanes: int | None = None
    #: Sources: the most bytes per second that a source sends, to all its receivers together. None: no limit.
    max_bytes_per_second: float | None = None
    #: Sources: how many versions of what was given out a source remembers, so that ``delta`` moves only what changed.
    history: int = 0
    #: Receivers: the most bytes that one receive may allocate for fresh tensors. None: what :class:`Limits` says.
    max_receive_bytes: int | None = None
    #: Both ends: how connections of our own are encrypted. None: as the environment says. False: they are not.
    tls: Encryption = None
    #: Both ends: True for a bar, or a function that is called with the progress.
    progress: bool | Show = False

    def check(self, timeout: timedelta, limits: Limits, *, in_place: bool) -> Options:
        """Refuse options that cannot work with this timeout and these limits, or without a target if not ``in_place``.

        Returns the options that apply: numbers as plain int and float, ``same_host`` and ``streams`` only if the
        environment allows them, ``nixl`` and ``tls`` also if the environment asks for them.
        """
        flags = {item.name: getattr(self, item.name) for item in fields(self) if item.type == "bool"}
        _arguments.check_flags(**flags)
        _arguments.check_choices(verify=self.verify, strict=self.strict)
        nixl = True if self.nixl is None and asks_for_nixl() else self.nixl
        _arguments.check_nixl(nixl)
        _arguments.check_mesh(self.mesh)
        _arguments.check_progress(self.progress)
        most = self.max_receive_bytes
        if most is not None:
            most = _arguments.whole("max_receive_bytes", most, "an int, a number of bytes, or None")
        lanes = self.lanes
        if lanes is not None:
            lanes = _arguments.whole("lanes", lanes, "an int, a number of connections, or None")
            if not 1 <= lanes <= MOST_LANES:
                raise ValueError(f"lanes must be from 1 to {MOST_LANES}, got {lanes}")
        history = _arguments.whole("history", self.history, "0 or 1, a number of versions")
        if history not in (0, 1):
            raise ValueError(f"history must be 0 or 1, got {history}: a source remembers one version at most")
        if self.map_path is not None and not in_place:
            raise ValueError("map_path= translates names into those of a target: it needs state_dict=")
        _rules.check(self.map_path)
        tls = check_tls("tls", self.tls)
        streams = self.streams and allows_streams(encrypted=bool(tls))
        if tls and not streams:
            raise ValueError(
                "tls= encrypts connections of our own, and streams=False (or TRANSFUSE_STREAMS=0) leaves everything to "
                "the process group, which does not encrypt: leave one of them out, or pass tls=False"
            )
        port_range()  # Refuse a wrong TRANSFUSE_PORT here, not in the first transfer.
        held = replace(
            self,
            same_host=self.same_host and allows_same_host(),
            streams=streams,
            tls=tls,
            nixl=nixl,
            max_bytes_per_second=self._rate(timeout, limits),
            max_receive_bytes=most,
            lanes=lanes,
            history=history,
        )
        held.apply_to(limits)  # Limits refuses a max_receive_bytes that is not positive.
        return held

    def apply_to(self, limits: Limits) -> Limits:
        """These limits, with the caller's ``max_receive_bytes`` in place of the environment's."""
        return limits if self.max_receive_bytes is None else replace(limits, max_receive_bytes=self.max_receive_bytes)

    def _rate(self, timeout: timedelta, limits: Limits) -> float | None:
        if self.max_bytes_per_second is None:
            return None
        rate = _arguments.number("max_bytes_per_second", self.max_bytes_per_second, "a number of bytes, or None")
        slowest = slowest_rate(limits, timeout.total_seconds())
        if not slowest <= rate < float("inf"):
            raise ValueError(
                f"max_bytes_per_second must be at least {slowest:.0f} with a timeout of {timeout}, and finite, "
                f"got {rate:g}"
            )
        return rate


def slowest_rate(limits: Limits, seconds: float) -> float:
    """The slowest rate for a receiver, in bytes per second, at which bytes arrive within a timeout of ``seconds``."""
    return limits.min_parcel_bytes * 8 / seconds


# Each name is in exactly one of these three: type checkers refuse a name that two bases share.


class _BothEnds(TypedDict, total=False):
    same_host: bool
    device_memory: bool
    nixl: bool | None
    verify: bool | None
    lanes: int | None
    tls: Encryption


class _Sources(TypedDict, total=False):
    max_bytes_per_second: float | None
    history: int


class _Receivers(TypedDict, total=False):
    delta: bool
    cast: bool
    map_path: MapPath | None
    atomic: bool
    strict: bool | None
    mesh: DeviceMesh | Callable[[MeshDescription], DeviceMesh] | None
    weights_only_objects: bool
    max_receive_bytes: int | None
    progress: bool | Show


class ServeKeywords(_BothEnds, _Sources, total=False):
    """The options of ``serve``."""


class FetchKeywords(_BothEnds, _Receivers, total=False):
    """The options of ``fetch``."""


class VerifyKeywords(TypedDict, total=False):
    """The options of ``verify``: those of ``fetch`` that say what is compared with what, and how it is reached."""

    cast: bool
    map_path: MapPath | None
    strict: bool | None
    tls: Encryption
    progress: bool | Show


class OptionKeywords(_BothEnds, _Sources, _Receivers, total=False):
    """All options, as keywords."""

    relay: bool
    streams: bool


def check_names(call: Callable[..., object], given: Iterable[str], keywords: type) -> None:
    """Refuse an option that this call does not take, as Python does for keywords in a signature."""
    for name in given:
        if name not in keywords.__annotations__:
            own = [one.name for one in inspect.signature(call).parameters.values() if one.kind is one.KEYWORD_ONLY]
            known = ", ".join([*own, *keywords.__annotations__])
            raise TypeError(f"{call.__name__}() got an unexpected keyword argument {name!r}; its options are {known}")
