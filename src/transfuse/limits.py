"""Every number that a user may set, and the sizes and waits that follow from these numbers.

``Limits()`` holds the defaults. ``Limits.from_environment()`` replaces each field by ``TRANSFUSE_<NAME>`` (upper case)
if that variable is set. ``Sizes`` has every rule for a size in a transfer, ``Patience`` every fraction of the timeout.
A constant that only one module needs stands in that module. This module imports nothing of the package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

__all__ = ["KIB", "MIB", "Limits", "Offered", "Patience", "Sizes", "allows_same_host"]

KIB = 1 << 10
MIB = 1 << 20


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes in bytes unless the name says otherwise."""

    #: Largest parcel. Small enough that packing and sending overlap with four in flight, large enough to fill the wire.
    parcel_bytes: int = 4 * MIB
    #: Smallest parcel a peer may announce: bounds the number of parcels that a hostile offer can cause.
    min_parcel_bytes: int = 16 * KIB
    #: Largest parcel with ``delta``: a parcel is compared as one, then kept or fetched as one.
    block_bytes: int = 128 * KIB
    #: An offer longer than this is first sent without its description; receivers that need the description ask for it.
    brief_bytes: int = 256 * KIB
    #: Bytes between two records. Progress is reported in steps of this size.
    burst_bytes: int = 24 * MIB
    #: Bursts under way per peer. Bursts that are under way still arrive after a cancel.
    bursts_ahead: int = 2
    #: Sizes are chosen so that a link as slow as this is not taken for a dead one.
    slowest_bytes_per_second: int = 1 * MIB
    #: Receivers of a smaller state form no chain: it would not pay.
    min_relay_bytes: int = 4 * MIB
    #: For a chain, or for several sources, parcels are not made smaller than this.
    min_chained_bytes: int = 64 * KIB
    #: Staging memory that one end may use besides the tensors themselves, for all its peers together.
    staging_bytes: int = 64 * MIB
    #: Longest control message that an end accepts. (A description takes well under 1 KiB a leaf.)
    max_message_bytes: int = 256 * MIB
    #: Control messages travel in chunks of this size, so that a peer that only announces a length causes no allocation.
    chunk_bytes: int = 1 * MIB
    #: Most bytes that one receive may allocate for fresh tensors.
    max_receive_bytes: int = field(default_factory=_physical_memory_bytes)
    #: Larger ``bytes`` and numpy values travel as storages, smaller ones in the description.
    inline_bytes: int = 4 * KIB
    #: Largest pickled object that a source sends. (Receivers accept objects only with ``weights_only_objects``.)
    max_object_bytes: int = 16 * MIB
    #: Deepest nesting of a state.
    max_depth: int = 128
    #: How many signs of life, one every quarter of the timeout, a peer may send without bytes before it is given up.
    #: Every ``min_parcel_bytes`` that the peer reports as arrived allow it one more.
    max_working_records: int = 400
    #: How often a parcel with a wrong digest is asked for again.
    max_repairs: int = 3

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) <= 0:
                raise ValueError(f"limit {item.name} must be positive, got {getattr(self, item.name)}")
        if self.min_parcel_bytes > self.parcel_bytes:
            raise ValueError(f"min_parcel_bytes {self.min_parcel_bytes} exceeds parcel_bytes {self.parcel_bytes}")
        if self.parcel_bytes % 16 or self.min_parcel_bytes % 16 or self.block_bytes % 16:
            raise ValueError("parcel sizes must be multiples of 16, the largest item")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Limits:
        """The defaults, overridden by ``TRANSFUSE_…`` variables."""
        values = {}
        for item in fields(cls):
            text = environ.get(f"TRANSFUSE_{item.name.upper()}")
            if text is not None:
                try:
                    values[item.name] = int(text)
                except ValueError:
                    raise ValueError(f"TRANSFUSE_{item.name.upper()} must be a whole number, got {text!r}") from None
        return cls(**values)


class Offered(NamedTuple):
    """The sizes that a source offers. A receiver may ask for smaller parcels and bursts."""

    parcel_bytes: int
    burst_bytes: int
    #: How many bytes of a burst may pass through staging.
    staged_bytes: int
    #: Bursts under way at a time.
    bursts_ahead: int


class Sizes:
    """Every rule for a size, with these limits and this timeout.

    ==================  ====================================  ==========================================================
    what                size                                  why
    ==================  ====================================  ==========================================================
    offered parcel      ``parcel_bytes``; in a chain of n     passed on parcel by parcel: filling the chain costs little
                        state / 16n
    offered burst       ``burst_bytes``; at most 0.05 s of    under a rate bytes go out evenly; a burst arrives within
                        the rate, timeout x slowest link      the timeout over the slowest link
    offered staging     ``staging_bytes`` / 2 / receivers     staging for all receivers stays within half of its bound
                        / ``bursts_ahead``
    parcel of several   state / 32n, staging / n, timeout     all sources end together; a source that needs half the
    sources             / 4 x slowest link                    timeout for one parcel would be taken for a silent one
    burst of several    state / 16n, staging / n, timeout     the same
    sources             / 4 x slowest link
    parcel of a delta   ``block_bytes`` at most               kept or fetched as one
    request             one source: everything; several:      the last requests end together
                        ``bursts_ahead`` bursts
    burst in a chain    one parcel, 4 MiB or 12 under way,    what has arrived goes on at once
                        3 at least
    comparison          256 MiB                               several sources share the work
    read from memory    512 MiB, timeout / 8 x rate           after each the lease is checked, and the bytes count
    ==================  ====================================  ==========================================================
    """

    #: Bytes that one request compares.
    COMPARE_BYTES = 256 * MIB
    #: Bytes that are read from a source's memory between two checks of its lease.
    READ_BYTES = 512 * MIB
    #: Most bytes and most parcels under way between two neighbours in a chain.
    CHAIN_BYTES, CHAIN_PARCELS = 4 * MIB, 12
    #: With a rate limit, a burst holds the bytes of this many seconds.
    RATED_BURST_SECONDS = 0.05

    def __init__(self, limits: Limits, timeout: float = float("inf")) -> None:
        self._limits = limits
        self._timeout = timeout

    def offered(self, receivers: int, *, chained_bytes: int | None = None, rate: float | None = None) -> Offered:
        """What a source offers to this many receivers. ``chained_bytes``: the state's size, if a chain is possible."""
        limits = self._limits
        parcel, burst = limits.parcel_bytes, limits.burst_bytes
        staged = limits.staging_bytes // (2 * max(receivers, 1) * limits.bursts_ahead)
        if chained_bytes is not None:
            parcel = min(parcel, max(limits.min_chained_bytes, chained_bytes // (16 * receivers)))
        if rate is not None:
            burst = min(burst, int(rate * self.RATED_BURST_SECONDS))
        burst = min(burst, limits.staging_bytes // limits.bursts_ahead)
        burst = max(int(min(burst, self._timeout * limits.slowest_bytes_per_second)), limits.min_parcel_bytes)
        staged = max(min(staged, burst), limits.min_parcel_bytes)
        parcel = max(min(parcel, staged) // 16 * 16, limits.min_parcel_bytes)
        return Offered(parcel, burst, staged, limits.bursts_ahead)

    def parcel(self, offered: int, total_bytes: int, *, sources: int, ahead: int, delta: bool = False) -> int:
        """The size of the parcels that a receiver asks for, at most what its sources ``offered``."""
        limits = self._limits
        if delta:
            offered = max(min(offered, limits.block_bytes), limits.min_parcel_bytes)
        if sources == 1:
            return offered
        fair = max(total_bytes // (32 * sources), limits.min_chained_bytes)
        finest = min(offered, self._staged(sources, ahead), fair, self._timely())
        return max(finest // 16 * 16, limits.min_parcel_bytes)

    def burst(self, offered: int, total_bytes: int, parcel_bytes: int, *, sources: int, ahead: int) -> int:
        """The size of the bursts that a receiver asks for. With several sources, all bursts pass through staging."""
        if sources == 1:
            return offered
        staged, fair = self._staged(sources, ahead), total_bytes // (16 * sources)
        return max(min(offered, staged, fair, self._timely()), min(parcel_bytes, staged), 1)

    def _staged(self, sources: int, ahead: int) -> int:
        return self._limits.staging_bytes // (sources * ahead)

    def _timely(self) -> int:
        """Bytes that arrive over the slowest link well before the receiver takes the source for silent."""
        return int(self._timeout / 4 * self._limits.slowest_bytes_per_second)

    @classmethod
    def chain_ahead(cls, parcel_bytes: int) -> int:
        """How many bursts of one parcel each are under way between two receivers of a chain."""
        return max(3, min(cls.CHAIN_BYTES // parcel_bytes, cls.CHAIN_PARCELS))

    def read(self, rate: float | None) -> int:
        """How many bytes of a source's memory are read before the lease is checked."""
        return self.READ_BYTES if rate is None else min(self.READ_BYTES, int(rate * self._timeout / 8))


class Patience:
    """Every wait: who waits for what, and how long, as a fraction of the timeout T or in seconds.

    ============================================  =====================  ===============================================
    what waits                                    how long               why
    ============================================  =====================  ===============================================
    the decision, for sources without an offer    T/4 after the first    the receive goes on with those that are here
    the same, if the caller chooses from a        T/2 after the first    the caller cannot choose what a late source has
    catalogue of all leaves
    the same, if sources come one by one          0                      the next one comes only after the first is done
    a receive, for a silent source                T/2                    others bring its share, within the timeout
    the same if nobody else holds its share       0.9 T                  there is time left to tell the peers the cause
    between two signs of life                     T/4 of the shorter     three may be late before the peer gives up
                                                  timeout; 0.05 s least
    a chain, for receivers that want the same     1 ns a byte saved,     a chain saves about as much; a late receiver is
                                                  0.25 to 1 s, T/2 most  served by the source
    a receiver, for its neighbour in a chain      T/4 (first) to T/2     the one next to a silent one notices first, and
                                                  (last)                 has parcels for the others before they do
    a receiver, until its neighbour has it all    T without progress     nobody else passes these parcels on
    ``fetch``, for the other servers to accept    T/2 after the first    a server that has accepted waits at most T
    ``fetch``, for the other servers' states      T/4 after the first    a server that is ready holds up its training
    a server, for a caller's handshake            10 s, T at most        the caller may be some other program
    a call that has been interrupted              1 s                    conversations that use no tensors tell the peer
    any other wait                                slices of 0.1 s        between slices it checks for a stop
    ============================================  =====================  ===============================================
    """

    SLICE_SECONDS = 0.1
    GOODBYE_SECONDS = 1.0
    HANDSHAKE_SECONDS = 10.0
    LEAST_PULSE_SECONDS = 0.05
    CHAIN_SECONDS_PER_BYTE = 1e-9
    MIN_CHAIN_SECONDS, MAX_CHAIN_SECONDS = 0.25, 1.0

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def decision(self, *, asks_for_all: bool = False, one_by_one: bool = False) -> float:
        """How long the receiver waits, from the first offer on, before it decides without the missing offers."""
        if one_by_one:
            return 0.0
        return self.timeout / (2 if asks_for_all else 4)

    def silent_source(self, *, needed: bool) -> float:
        """How long one of several sources may be silent; ``needed``: only this source holds its share."""
        return self.timeout * (0.9 if needed else 0.5)

    def pulse(self, peer_timeout: float) -> float:
        """Seconds between two signs of life. There is a minimum, however short a timeout the peer announces."""
        return max(min(self.timeout, peer_timeout) / 4, self.LEAST_PULSE_SECONDS)

    def chain_members(self, nbytes: int) -> float:
        """How long the first receiver that may join a chain waits for the others."""
        wait = min(max(nbytes * self.CHAIN_SECONDS_PER_BYTE, self.MIN_CHAIN_SECONDS), self.MAX_CHAIN_SECONDS)
        return min(wait, self.timeout / 2)

    def neighbour(self, position: int, receivers: int) -> float:
        """How long the receiver at this position of a chain waits for the neighbour before it."""
        return self.timeout * (0.25 + 0.25 * position / receivers)

    @staticmethod
    def neighbour_slice(patience: float) -> float:
        """Seconds between two checks whether a neighbour makes progress."""
        return max(0.01, min(patience / 8, 0.5))

    @property
    def other_servers(self) -> float:
        """How long ``fetch`` waits for the other servers to accept, once the first has."""
        return self.timeout / 2

    @property
    def other_states(self) -> float:
        """How long ``fetch`` waits for the states of the other servers, once the first server holds its state still."""
        return self.timeout / 4

    def signs_of_life(self, most: int, every: float) -> int:
        """How many signs of life are allowed at one every ``every`` seconds, if ``most`` are at one every T/4."""
        return int(most * max(1.0, self.timeout / 4 / every))

    @property
    def handshake(self) -> float:
        """How long a server waits for a caller's handshake."""
        return min(self.HANDSHAKE_SECONDS, self.timeout)


def allows_same_host(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment allows the memory route (``TRANSFUSE_SAME_HOST`` is not 0)."""
    text = environ.get("TRANSFUSE_SAME_HOST", "1")
    if text not in ("0", "1"):
        raise ValueError(f"TRANSFUSE_SAME_HOST must be 0 or 1, got {text!r}")
    return text == "1"
