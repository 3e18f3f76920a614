"""Sizes: every rule for the size of a parcel, a burst or a read, in one table."""

from __future__ import annotations

from typing import NamedTuple

from transfuse._limits import MIB, Limits
from transfuse._timeouts import Patience

#: The most runs of memory that the kernel takes in one call (its ``IOV_MAX``).
MOST_RUNS = 1024


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
    the same, with a    four times ``block_bytes``            of a larger parcel, too, only what has changed travels
    source's history
    request             one source: everything; several:      the last requests end together
                        ``bursts_ahead`` bursts
    request on streams  what is left / 2 / connections of     few requests at first, small ones at the end, so that all
                        all sources; a burst to 64 MiB        connections end together
    round on a stream   16 MiB, a burst at most               one record and one entry in the ledger for each
    call on a stream    4 MiB                                 what one call moves is hashed while it is in the cache
    burst in a chain    one parcel, 4 MiB or 12 under way,    what has arrived goes on at once; one answer for half
                        3 at least                            of those under way
    connections         between hosts 4, from 8 MiB on; on    one connection uses one core, and clouds limit its rate;
                        one host one for each core, 3 at      over the slowest link a parcel arrives on each of them
                        most, from 64 MiB on;                 before one is taken for a silent one
                        timeout / 2 x slowest link / parcel
    burst with lanes    1 / connections of a burst, state /   staging stays within its bound, all connections end
                        4 / connections; timeout / 2 x        together; the same
                        slowest link / connections / ahead
    comparison          256 MiB                               several sources share the work
    the same, with a    32 MiB                                the answer brings patches, which are in memory together
    source's history
    read from memory    512 MiB, timeout / 8 x rate           after each the lease is checked, and the bytes count
    read over the       4 MiB, staging / 16, timeout / 8 x    it is staged, and arrives in time over the slowest link;
    network             1 MiB                                 four are under way
    the same, between   32 MiB                                several sources share the work
    two checks
    ==================  ====================================  ==========================================================
    """

    #: Bytes that one request compares.
    COMPARE_BYTES = 256 * MIB
    #: Of how many blocks a parcel consists with ``delta``: without patches, and with them.
    BLOCKS, PATCHED_BLOCKS = 1, 4
    #: Bytes that one request compares, if the answer may bring patches.
    PATCHED_BYTES = 32 * MIB
    #: Bytes that are read from a source's memory between two checks of its lease.
    READ_BYTES = 512 * MIB
    #: The same, if the bytes cross the network.
    REMOTE_READ_BYTES = 32 * MIB
    #: Most bytes of one request on one of several streams.
    REQUEST_BYTES = 64 * MIB
    #: Bytes that one record follows on a stream, and bytes that one call moves.
    ROUND_BYTES, CALL_BYTES = 16 * MIB, 4 * MIB
    #: Most bytes and most parcels under way between two neighbours in a chain.
    CHAIN_BYTES, CHAIN_PARCELS = 4 * MIB, 12
    #: The least bytes for which lanes pay, on one host and between hosts.
    LANES_BYTES, FAR_LANES_BYTES = 64 * MIB, 8 * MIB
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

    def parcel(self, offered: int, total_bytes: int, *, sources: int, ahead: int, blocks: int = 0) -> int:
        """The size of the parcels that a receiver asks for, at most what its sources ``offered``.

        ``blocks``: with ``delta``, of how many blocks a parcel consists.
        """
        limits = self._limits
        if blocks:
            offered = max(min(offered, blocks * limits.block_bytes), limits.min_parcel_bytes)
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

    def shared_burst(self, burst: int, total_bytes: int, parcel_bytes: int, *, connections: int, ahead: int) -> int:
        """The size of the bursts on each of several connections, of which a single one would have ``burst``."""
        if connections == 1:
            return burst
        fair, timely = total_bytes // (4 * connections), int(self.before_silence() / (connections * ahead))
        return max(min(burst // connections, fair, timely), min(parcel_bytes, burst))

    @classmethod
    def request(cls, left_bytes: int, burst_bytes: int, takers: int) -> int:
        """How many bytes one of several streams is asked for at a time."""
        return max(min(left_bytes // (2 * takers), cls.REQUEST_BYTES), burst_bytes)

    def before_silence(self) -> float:
        """Bytes that arrive over the slowest link before a connection is taken for a silent one."""
        return Patience(self._timeout).lane * self._limits.slowest_bytes_per_second

    def _staged(self, sources: int, ahead: int) -> int:
        return self._limits.staging_bytes // (sources * ahead)

    def _timely(self) -> int:
        """Bytes that arrive over the slowest link well before the receiver takes the source for silent."""
        return int(self._timeout / 4 * self._limits.slowest_bytes_per_second)

    @classmethod
    def chain_ahead(cls, parcel_bytes: int) -> int:
        """How many bursts of one parcel each are under way between two receivers of a chain."""
        return max(3, min(cls.CHAIN_BYTES // parcel_bytes, cls.CHAIN_PARCELS))

    @staticmethod
    def chain_answered(ahead: int) -> int:
        """For how many of these bursts one answer is."""
        return ahead // 2

    def read(self, rate: float | None, *, same_host: bool) -> int:
        """How many bytes of a source's memory are read before the lease is checked."""
        most = self.READ_BYTES if same_host else self.REMOTE_READ_BYTES
        return most if rate is None else min(most, int(rate * self._timeout / 8))


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
