"""The NIXL route: a receiver reads the source's memory through NIXL, on the same host or over the network.

The source registers its storages with its agent (:mod:`.nixl_agent`) and gives a :class:`NixlLease`. The receiver
opens the source's :class:`NixlEntry` with a :class:`NixlReader`. As on the memory route, the proof that a receiver
reads the right memory is the token (:mod:`.memory_route_read`).

A read that is given up may still write, so reads never go straight into targets. They land in staging, and the bytes
are copied from there once NIXL has said that the read is done. Staging of a read that was given up is never used again.
NIXL has no timeout: this route's own bounds every read, and then the group brings the rest.

NIXL hands an entry's metadata to UCX, which ends the process if they are malformed. What can be checked is checked, but
a receiver that asks for this route trusts the other ranks not to forge metadata, as with gloo's messages.
"""

from __future__ import annotations

import ctypes
import errno
import hmac
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from transfuse._memory import vm
from transfuse._memory.vm import Ranges
from transfuse._state.manifest import Described
from transfuse._timeouts import Patience
from transfuse._tuning import (
    NIXL_AGENT_SECONDS,
    NIXL_CHUNK_BYTES,
    NIXL_GOODBYE_SECONDS,
    NIXL_LEAST_CHUNK_BYTES,
    NIXL_LEAST_POLL_SECONDS,
    NIXL_MAX_METADATA_BYTES,
    NIXL_POLL_SECONDS,
    NIXL_SLOWEST_BYTES,
    NIXL_STOP_SECONDS,
)
from transfuse._wire import nixl_agent
from transfuse._wire.memory_route_read import RangeReader, Reading, TokenEntry, TokenLease, decode
from transfuse._wire.nixl_agent import Agent, NixlFailed, Transfer
from transfuse._wire.route import MalformedEntry, Pull, Unreadable

#: More storages than these are not registered: the group brings their bytes.
MOST_STORAGES = 1 << 17
#: How many reads are under way, and the most bytes and ranges of one.
SLOTS = 4
CHUNK_RANGES = 4096

_NAME = re.compile(r"transfuse-[0-9a-f]{32}")

logger = logging.getLogger("transfuse")


class NixlEntry(TokenEntry, msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a receiver must know to read a source's memory through NIXL."""

    #: NIXL's version. Agents of other versions may describe themselves in another way.
    version: str
    #: The name of the source's agent, and its metadata: how to connect, and the keys of the registered memory.
    agent: str
    metadata: bytes
    #: The XXH3-128 of the metadata.
    digest: bytes
    token_address: int
    token: bytes
    storages: bytes

    @classmethod
    def decode(cls, data: bytes) -> NixlEntry:
        entry = decode(_decoder, data, "memory for NIXL")
        if _NAME.fullmatch(entry.agent) is None or not 0 < len(entry.metadata) <= NIXL_MAX_METADATA_BYTES:
            raise MalformedEntry(
                f"a malformed description of memory for NIXL: {len(entry.metadata)} bytes of metadata of the agent "
                f"{entry.agent[:64]!r}"
            )
        if not hmac.compare_digest(entry.digest, _digest(entry.metadata)):
            raise MalformedEntry("a malformed description of memory for NIXL: the metadata have another digest")
        # This is how NIXL's metadata begin: the name must be the name that the entry gives.
        if not entry.metadata.startswith(_metadata_begin(entry.agent)):
            raise MalformedEntry(
                "a malformed description of memory for NIXL: the metadata are not of the agent it names"
            )
        return entry


# Made once, at import: if two threads make msgspec inspect a type at the same time, the process ends.
_decoder = msgspec.msgpack.Decoder(NixlEntry)


def _digest(metadata: bytes) -> bytes:
    return xxhash.xxh3_128_digest(metadata)


def _metadata_begin(agent: str) -> bytes:
    return b"nixlSerDes|Agent" + len(agent).to_bytes(8, "little") + agent.encode() + b"|"


class NixlLease(TokenLease):
    def __init__(self) -> None:
        super().__init__()
        self._agent: Agent | None = None
        self._storages: list[torch.UntypedStorage] = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        agent, self._agent = self._agent, None
        storages, self._storages = self._storages, []
        if agent is None:
            return
        if kind is not None:
            agent.keep_for_now((self._page, storages))
        with suppress(NixlFailed):
            agent.deregister([self._window])
            agent.drop_dead()

    def export(self, described: Described) -> bytes | None:
        if not described.addresses.any():
            return None
        try:
            return self._export(nixl_agent.get(NIXL_AGENT_SECONDS), described).encode()
        except NixlFailed as error:
            logger.info("this source does not offer the NIXL route: %s", error)
            return None

    def _export(self, agent: Agent, described: Described) -> NixlEntry:
        addresses = described.addresses.copy()
        nbytes = described.manifest.storages.nbytes
        here = np.flatnonzero(addresses > 0)
        if len(here) > MOST_STORAGES:
            # The largest are worth the most.
            here = np.sort(here[np.argsort(nbytes[here])[-MOST_STORAGES:]])
            addresses[np.setdiff1d(np.arange(len(addresses)), here)] = 0
        windows = list(zip(addresses[here].tolist(), nbytes[here].tolist(), strict=True))
        self._storages = [described.storages[number] for number in here.tolist()]
        agent.register_storages(windows, self._storages)
        agent.register([self._window])
        self._agent = agent
        metadata = agent.metadata([*dict.fromkeys(windows), self._window])
        return NixlEntry(
            version=agent.version,
            agent=agent.name,
            metadata=metadata,
            digest=_digest(metadata),
            token_address=self._window[0],
            token=self._token,
            storages=addresses.astype("<u8").tobytes(),
        )


class _Flight(NamedTuple):
    """A read that is under way: its slot of the staging, and the rows that it reads."""

    slot: int
    transfer: Transfer
    low: int
    high: int


class NixlReader(RangeReader):
    def __init__(self, entry: NixlEntry, pull: Pull) -> None:
        super().__init__(entry, len(pull.manifest.storages), "the source's memory, read through NIXL,")
        self._entry = entry
        self._patience = Patience(pull.timeout).remote_read
        self._check_stop = pull.rate_limit
        most = min(NIXL_CHUNK_BYTES, pull.staging_bytes // (4 * SLOTS), int(self._patience / 2 * NIXL_SLOWEST_BYTES))
        self._chunk = pull.at_once(max(most, NIXL_LEAST_CHUNK_BYTES))
        self._staging = np.empty((SLOTS, self._chunk), dtype=np.uint8)
        self._free = list(range(SLOTS))
        self._changed = threading.Condition()
        #: Whether a read was given up: then the staging is never freed.
        self._left = False
        self._open = False
        try:
            self._agent = nixl_agent.get(NIXL_AGENT_SECONDS)
            if entry.version != self._agent.version:
                raise NixlFailed(f"NIXL has version {self._agent.version} here, and {entry.version} at the source")
            self._agent.register([self._window])
            try:
                self._agent.connect(entry.agent, entry.metadata)
            except BaseException:
                self._agent.deregister([self._window])
                raise
        except NixlFailed as error:
            raise Unreadable(str(error)) from error
        self._open = True
        try:
            self.recheck()
        except BaseException:
            self.close()
            raise

    @property
    def _window(self) -> tuple[int, int]:
        return self._staging.ctypes.data, self._staging.nbytes

    def close(self) -> None:
        with self._changed:
            was_open, self._open = self._open, False
        if not was_open:
            return
        self._agent.disconnect(self._entry.agent)
        if not self._left:
            with suppress(NixlFailed):
                self._agent.deregister([self._window])

    def read(
        self,
        theirs: Ranges,
        mine: Ranges,
        *,
        begins: Callable[[int], object] = lambda upto: None,
        went_on: Callable[[int], object] = lambda nbytes: None,
    ) -> npt.NDArray[np.int64]:
        """Read ranges of the source's memory into our own. Return the rows whose memory here cannot be written."""
        split_theirs, split_mine, starts = vm.split(theirs, mine, self._chunk, CHUNK_RANGES)
        upto = np.concatenate([[0], np.cumsum(split_theirs[:, 1].astype(np.int64))])
        calls = deque(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
        flights: deque[_Flight] = deque()
        unwritable: list[int] = []
        try:
            while calls or flights:
                while calls and (slot := self._take(wait=not flights)) is not None:
                    low, high = calls.popleft()
                    flights.append(self._post(slot, split_theirs, low, high))
                flight = flights[0]
                self._wait(flight, time.monotonic() + self._patience)
                begins(int(upto[flight.high]))
                staged = self._staged(flight.slot, split_theirs[flight.low : flight.high])
                if not _copy(staged, split_mine[flight.low : flight.high]):
                    unwritable.extend(range(flight.low, flight.high))
                flights.popleft()
                self._give(flight)
                went_on(int(upto[flight.high] - upto[flight.low]))
        except NixlFailed as error:
            raise Unreadable(str(error)) from error
        finally:
            until = time.monotonic() + NIXL_GOODBYE_SECONDS
            for flight in flights:
                self._settle(flight, until)
        if not unwritable:
            return np.empty(0, dtype=np.int64)
        ends = np.cumsum(theirs[:, 1].astype(np.int64))
        return np.unique(np.searchsorted(ends, upto[np.array(unwritable)], side="right"))

    def _staged(self, slot: int, ranges: Ranges) -> Ranges:
        """Ranges of these lengths, one after the other in a slot of the staging."""
        sizes = ranges[:, 1]
        return vm.ranges(np.cumsum(sizes) - sizes + np.uint64(self._staging[slot].ctypes.data), sizes)

    def _take(self, *, wait: bool) -> int | None:
        """Take a slot that is free. ``wait`` for one if there is none; a read in another thread ends in time."""
        until = time.monotonic() + 2 * self._patience
        with self._changed:
            while not self._free:
                if not wait:
                    return None
                if self._left or time.monotonic() > until:
                    raise Unreadable("reads through NIXL were given up, and no staging is left")
                self._changed.wait(Patience.SLICE_SECONDS)
            return self._free.pop()

    def _give(self, flight: _Flight) -> None:
        """Free a read that is done, and its slot."""
        self._agent.release(flight.transfer.handle)
        self._free_slot(flight.slot)

    def _free_slot(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def _post(self, slot: int, theirs: Ranges, low: int, high: int) -> _Flight:
        try:
            handle = self._agent.prepare(self._entry.agent, theirs[low:high], self._staged(slot, theirs[low:high]))
        except BaseException:
            self._free_slot(slot)
            raise
        try:
            return _Flight(slot, self._agent.post(handle), low, high)
        except BaseException:
            self._leave(handle)
            raise

    def _wait(self, flight: _Flight, until: float, *, stops: bool = True) -> None:
        """Wait until a read is done. Raises if it fails, if it takes too long, or if the caller stops."""
        pause, look_at = NIXL_LEAST_POLL_SECONDS, time.monotonic() + NIXL_STOP_SECONDS
        while not self._agent.is_done(flight.transfer):
            now = time.monotonic()
            if now > until:
                raise NixlFailed(f"NIXL read nothing for {self._patience:.1f} s")
            if stops and now > look_at:
                self._check_stop(0)
                look_at = now + NIXL_STOP_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, NIXL_POLL_SECONDS)

    def _settle(self, flight: _Flight, until: float) -> None:
        """End a read whose bytes are no longer wanted: wait for a moment, then give it up."""
        try:
            self._wait(flight, until, stops=False)
        except NixlFailed:
            self._leave(flight.transfer.handle)
        else:
            self._give(flight)

    def _leave(self, handle: Any) -> None:
        """Give up a read: it may still write, so its staging is kept, registered, until the process ends."""
        self._left = True
        self._agent.leave(handle, self._staging)


def _copy(staged: Ranges, mine: Ranges) -> bool:
    """Copy within this process. Return whether our memory could be written."""
    try:
        if vm.AVAILABLE:
            vm.copy(staged, mine)
            return True
    except OSError as error:
        if error.errno == errno.EFAULT:
            return False
    # A container forbids the call that copies many ranges at once.
    for (source, nbytes), (target, _) in zip(staged.tolist(), mine.tolist(), strict=True):
        ctypes.memmove(target, source, nbytes)
    return True


class NixlRoute:
    name = "nixl"
    same_host = False
    opt_in = True
    #: NIXL has been seen to report reads as done that had brought nothing.
    compared = True

    def lease(self, seconds: float) -> NixlLease:
        return NixlLease()

    def open(self, entry: bytes, pull: Pull) -> Reading:
        return Reading(NixlReader(NixlEntry.decode(entry), pull), pull)
