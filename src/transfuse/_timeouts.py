"""Timeouts: how the caller's timeout is split among everything that waits, in one table."""

from __future__ import annotations


class Patience:
    """Every wait: who waits for what, and how long, as a fraction of the timeout T or in seconds.

    ============================================  =====================  ===============================================
    what waits                                    how long               why
    ============================================  =====================  ===============================================
    the decision, for sources without an offer    T/4 after the first    the receive goes on with those that are here
    the same, if the caller chooses from a        T/2 after the first    the caller cannot choose what a late source has
    catalogue of all leaves
    the same, if sources come one by one          0                      the next one comes only after the first is done
    a receive without tags, for needed offers     T after the first      ranks may wait for each other's turns
    the same, for the turn of a lower source      T/4                    it may be absent
    a receive, for a silent source                T/2                    others bring its share, within the timeout
    the same if nobody else holds its share       0.9 T                  there is time left to tell the peers the cause
    between two signs of life                     T/4 of the shorter     three may be late before the peer gives up
                                                  timeout; 0.05 s least
    parcels on an accelerator, for completion     T without progress     every parcel that completes begins it anew
    a queue, for a peer that owes a message        T/2                    then other conversations may use the queue
    a lane, for the other end                     T/2                    the other connections bring its parcels
    a connection of our own                       1 s, T/4 at most       the group carries the bytes instead
    the same with ``tls=``                        10 s, T/4 at most      nothing else may carry the bytes
    a read over the network, for up to 4 MiB      T/4                    the group brings the rest
    a source, for what its devices have queued    T/4                    the group brings the bytes, in stream order
    a chain, for receivers that want the same     1 ns a byte saved,     a chain saves about as much; a late receiver is
                                                  0.25 to 1 s, T/2 most  served by the source
    a receiver, for its neighbour in a chain      T/4 (first) to T/2     the one next to a silent one notices first, and
                                                  (last)                 has parcels for the others before they do
    a receiver, until its neighbour has it all    T without progress     nobody else passes these parcels on
    ``fetch``, for the other servers to accept    T/2 after the first    a server that has accepted waits at most T
    ``fetch``, for the other servers' states      T/4 after the first    a server that is ready holds up its training
    a server, for a caller's handshake            10 s, T at most        the caller may be some other program
    a call that has been interrupted              1 s                    conversations that use no tensors tell the peer
    ``keep`` and ``restore``, for a directory     T/2, T/4               all ranks wait for what each host has to say
    any other wait                                slices of 0.1 s        between slices it checks for a stop
    ============================================  =====================  ===============================================
    """

    SLICE_SECONDS = 0.1
    GOODBYE_SECONDS = 1.0
    HANDSHAKE_SECONDS = 10.0
    LEAST_PULSE_SECONDS = 0.05
    CHAIN_SECONDS_PER_BYTE = 1e-9
    MIN_CHAIN_SECONDS, MAX_CHAIN_SECONDS = 0.25, 1.0
    CONNECTION_SECONDS = 1.0

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def storage(self, *, restores: bool) -> float:
        """How long a directory of steps may take to say what is there."""
        return self.timeout / (4 if restores else 2)

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

    @property
    def lane(self) -> float:
        """How long a lane waits for its other end."""
        return self.timeout / 2

    def connection(self, *, encrypted: bool = False) -> float:
        """How long two ends try to connect, in one direction."""
        return min(self.HANDSHAKE_SECONDS if encrypted else self.CONNECTION_SECONDS, self.timeout / 4)

    @property
    def remote_read(self) -> float:
        """How long one read of a source's memory over the network may take."""
        return self.timeout / 4

    @property
    def queued_work(self) -> float:
        """How long a source waits for work on its devices before others may open their memory."""
        return self.timeout / 4

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
