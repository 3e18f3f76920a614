"""Timeouts: how the caller's timeout is split among everything that waits, in one table."""

from __future__ import annotations

__all__ = ["Patience"]


class Patience:
    """Every wait: what waits how long, as a share of the timeout T or in seconds.

    ============================================  =====================  ===============================================
    what waits                                    how long               why
    ============================================  =====================  ===============================================
    the decision, for sources without an offer    T/4 after the first    the receive goes on with those that are here
    the same, for who chooses from what there is  T/2 after the first    what is missing then would be left out
    the same, sources that come one by one        0                      the next one comes only after the first is done
    a receive, for a silent source                T/2                    others bring its share, within the timeout
    the same if nobody else holds its share       0.9 T                  its receivers can still be told why it ends
    between two signs of life                     T/4 of the shorter     three may be late before the peer gives up
                                                  timeout; 0.05 s least
    a chain, for receivers that want the same     1 ns a byte saved,     a chain saves about so much; a late receiver is
                                                  0.25 to 1 s, T/2 most  served by the source
    a receiver, for its neighbour in a chain      T/4 (first) to T/2     who is next to a silent one notices first, and
                                                  (last)                 has parcels for the others before they do
    a receiver, until its neighbour has it all    T without progress     nobody else passes these parcels on
    ``fetch``, for the other servers' doors       T/2 after the first    who has been met waits for a word, T at most
    ``fetch``, for the other servers' states      T/4 after the first    who is ready holds up its training
    a server, for a caller that says nothing      10 s, T at most        it may be no caller of this library
    a caller that has been interrupted            1 s                    conversations that hold no tensors say goodbye
    any other wait                                slices of 0.1 s        then it looks whether the caller wants to stop
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
        """How long the first offer waits for the others before it is decided without them."""
        if one_by_one:
            return 0.0
        return self.timeout / (2 if asks_for_all else 4)

    def silent_source(self, *, needed: bool) -> float:
        """How long one of several sources may be silent."""
        return self.timeout * (0.9 if needed else 0.5)

    def pulse(self, peer_timeout: float) -> float:
        """Seconds between two signs of life: not more often than this, whatever the peer says that it needs."""
        return max(min(self.timeout, peer_timeout) / 4, self.LEAST_PULSE_SECONDS)

    def chain_members(self, nbytes: int) -> float:
        """How long the first receiver that could be in a chain waits for the others."""
        wait = min(max(nbytes * self.CHAIN_SECONDS_PER_BYTE, self.MIN_CHAIN_SECONDS), self.MAX_CHAIN_SECONDS)
        return min(wait, self.timeout / 2)

    def neighbour(self, position: int, receivers: int) -> float:
        """How long the receiver at this position of a chain waits for the one before it."""
        return self.timeout * (0.25 + 0.25 * position / receivers)

    @staticmethod
    def neighbour_slice(patience: float) -> float:
        """How often it is looked whether a neighbour makes progress."""
        return max(0.01, min(patience / 8, 0.5))

    @property
    def other_servers(self) -> float:
        """How long ``fetch`` waits for the doors of the other servers once one has let it in."""
        return self.timeout / 2

    @property
    def other_states(self) -> float:
        """How long ``fetch`` waits for the states of the other servers once one holds still."""
        return self.timeout / 4

    def signs_of_life(self, most: int, every: float) -> int:
        """How many are believed that come so often, if ``most`` of those are that come every quarter of the timeout."""
        return int(most * max(1.0, self.timeout / 4 / every))

    @property
    def handshake(self) -> float:
        """How long a server waits for a caller's handshake."""
        return min(self.HANDSHAKE_SECONDS, self.timeout)
