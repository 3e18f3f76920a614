"""Lanes: further connections between a source and a receiver, beside the group's own.

One connection uses one core at each end, and clouds limit the rate of each connection. So two ends that move much form
lanes: private pairs of gloo (:mod:`.pair`). They exchange gloo's addresses and a secret over the conversation that they
already have. Over each new lane both ends then prove that they know the secret, before anything else moves: somebody
else may have connected to the port. Nobody waits for a lane that is being formed, and a lane that fails costs only what
was under way on it.

A transport keeps its lanes for its next transfers in a :class:`Pool`. If lanes to a peer cannot be formed, none are
formed for a while. After a fork the child drops its lanes, and never closes them: gloo's threads are not there.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import queue
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from transfuse.errors import TransfuseError
from transfuse.timeouts import Patience
from transfuse.wire import file_descriptors
from transfuse.wire.group import CPU, Group, WorkLike
from transfuse.wire.messages import SECRET_BYTES, Address, Lanes
from transfuse.wire.pair import Pair, form, host_of, is_address

__all__ = ["Entrance", "Lane", "NotWanted", "Pool", "accept", "enter", "new_secret"]

PROOF_TAG = 0x5446_0003
PROOF_BYTES = 32
#: Seconds in which gloo has told its address. It only has to listen.
LISTEN_SECONDS = 1.0
#: Seconds until lanes to a peer are tried again after they could not be formed.
AGAIN_SECONDS = 60.0
SOURCE, RECEIVER = 0, 1


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def new_number() -> int:
    """A number for a new lane."""
    return 1 + secrets.randbits(61)


class NotWanted(TransfuseError):
    """The other end does not want this lane, or the transfer was over before it was formed."""


class Lane(Pair):
    """A lane that has been formed and proved. To a channel it looks like the group itself."""

    #: Waits may expire by themselves: that closes this lane, and no other connection.
    has_one_peer = True

    def __init__(self, gloo: Any, number: int, group: Group, *, is_source: bool) -> None:
        super().__init__(gloo, RECEIVER if is_source else SOURCE)
        #: A random number by which both ends know this lane.
        self.number = number
        #: Of the configuration in which this lane was formed. If the group is reconfigured, the lane's pool closes.
        self._rank, self._size = group.rank(), group.size()

    def rank(self) -> int | None:
        return self._rank

    def size(self) -> int | None:
        return self._size

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        return self._post_send(tensors, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        return self._post_recv(tensors, tag)

    def prove(self, key: bytes, *, is_source: bool, seconds: float) -> None:
        """Prove to the other end that this end knows the key, and check its proof. The receiver begins."""
        timeout = timedelta(seconds=seconds)
        mine, theirs = (_proof(key, self.number, by_source=by) for by in (is_source, not is_source))
        heard = torch.zeros(PROOF_BYTES, dtype=torch.uint8)
        said = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if not is_source:
            self._post_send([said], PROOF_TAG).wait(timeout)
        self._post_recv([heard], PROOF_TAG).wait(timeout)
        if not hmac.compare_digest(bytes(heard.numpy()), theirs):
            raise TransfuseError("somebody else has connected to gloo's port")
        if is_source:
            self._post_send([said], PROOF_TAG).wait(timeout)

    def drop(self) -> None:
        """Keep gloo for good: in the child of a fork its threads are missing, and it must not be destroyed."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))


def _proof(key: bytes, number: int, *, by_source: bool) -> bytes:
    return hmac.digest(key, f"transfuse lane {number} {'source' if by_source else 'receiver'}".encode(), "sha256")


class _Swap(Store):
    """A store for two: this end's address goes out, and the other end's address comes in."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.out: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        #: Both ends' addresses by gloo's keys.
        self._values: dict[str, bytes] = {}
        self._came = threading.Event()

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = data = value.encode() if isinstance(value, str) else bytes(value)
        self.out.put((key, data))

    def bring(self, address: Address | None) -> None:
        """Pass on the other end's address, or None if there will be none."""
        mine = next(iter(self._values.values()), b"")
        if address is not None and address.key not in self._values and is_address(address.value, mine):
            self._values[address.key] = address.value
        self._came.set()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not (set(keys) <= self._values.keys() or self._came.wait(self._seconds)) or set(keys) - self._values.keys():
            raise RuntimeError("the other end has sent no address of gloo")


class Entrance:
    """How one end gets one lane: a lane that is there already, or one that is formed now."""

    def __init__(
        self, pool: Pool, peer: int, number: int, patience: Patience, *, is_source: bool, lane: Lane | None = None
    ) -> None:
        self.number = number
        self._peer = peer
        self._pool = pool
        self._patience = patience
        self._is_source = is_source
        self._lane = lane
        self._store = _Swap(patience.timeout)
        #: The other end's answer: the key, or empty if the other end does not want the lane.
        self._key: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answered = False
        self._wanted = False

    @property
    def is_new(self) -> bool:
        return self._lane is None

    def address(self) -> Address | None:
        """This end's address, once gloo listens; None if it cannot. Another thread must be in :meth:`lane`."""
        try:
            said = self._store.out.get(timeout=LISTEN_SECONDS)
        except queue.Empty:
            return None
        return None if said is None else Address(self.number, *said)

    def connect(self, address: Address | None, key: bytes, *, known: bool = False) -> None:
        """Go on with the other end's answer: its address and the key of both ends, or that it knows the lane already.

        Neither: it does not want this lane. Only the first call counts.
        """
        if self._answered:
            return
        self._answered = True
        self._wanted = known if self._lane is not None else address is not None
        self._key.put(key if self._wanted else b"")
        self._store.bring(address)

    def lane(self) -> Lane:
        """The lane, formed and proved. Run this in the lane's own thread."""
        if self._lane is not None:
            return self._use_again(self._lane)
        with self._pool.forming(self._peer):
            return self._form()

    def _form(self) -> Lane:
        group, is_source = self._pool.group, self._is_source
        try:
            (kept,) = file_descriptors.keep(file_descriptors.GROUP, "making a further connection")
            with kept:
                device = _device(group.pg, self._peer)
                gloo = form(self._store, SOURCE if is_source else RECEIVER, self._patience.lane_connection, device)
        except Exception as error:
            if self._answered and not self._wanted:
                raise NotWanted("the other end does not want this connection") from None
            raise TransfuseError(str(error).split("\n")[0]) from error
        finally:
            device = None  # Errors refer to this frame, and the device listens while it exists.
            self._store.out.put(None)
        lane = Lane(gloo, self.number, group, is_source=is_source)
        try:
            key = self._key.get(timeout=self._patience.timeout)
            if not key:
                raise NotWanted("the other end does not want this connection")
            lane.prove(key, is_source=is_source, seconds=self._patience.lane)
        except NotWanted:
            lane.close()
            raise
        except Exception as error:
            lane.close()
            raise TransfuseError(f"no proof over the new connection: {str(error).splitlines()[0]}") from error
        return lane

    def _use_again(self, lane: Lane) -> Lane:
        with suppress(queue.Empty):
            if self._key.get(timeout=self._patience.timeout):
                return lane
        lane.close()
        raise NotWanted("the other end does not have this connection any more")


def _device(pg: Any, peer: int) -> Any:
    """A device of gloo at the same address as the group's own."""
    own: Callable[[int], Any] | None = getattr(pg, "lane_device", None)
    if callable(own):
        return own(peer)
    gloo: Any = dist.ProcessGroupGloo
    # The group's address may be another one than the host's name or GLOO_SOCKET_IFNAME say now.
    with suppress(Exception):  # Groups that wrap others may not have all of this.
        backend = pg._get_backend(CPU) if hasattr(pg, "_get_backend") else pg
        if host := host_of(backend.options._devices[0]):
            return gloo.create_device(hostname=host, lazy_init=False)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return gloo.create_device(interface=interface, lazy_init=False)
    return gloo.create_default_device(lazy_init=False)


class Pool:
    """The lanes of one transport that no transfer uses now, in one configuration of its group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._closed = False
        #: By the peer's rank, and whether this end is the source.
        self._lanes: dict[tuple[int, bool], dict[int, Lane]] = {}
        #: How many lanes to each peer are being formed, and when they last could not be.
        self._forming: Counter[int] = Counter()
        self._failed: dict[int, float] = {}
        _pools.add(self)

    def can(self, peer: int) -> bool:
        """Whether lanes to this peer are possible at all."""
        group = self.group
        direct = group.shares_fate and group.device == CPU and group.tagged
        return direct and not self._closed and peer != group.rank()

    def may_form(self, peer: int) -> bool:
        """Whether to form new lanes to this peer: not while others are being formed or if that has just failed."""
        with self._lock:
            failed = self._failed.get(peer)
            again = failed is None or time.monotonic() - failed > AGAIN_SECONDS
            return again and not self._forming[peer]

    @contextmanager
    def forming(self, peer: int) -> Iterator[None]:
        with self._lock:
            self._forming[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._forming[peer] -= 1

    def give_up(self, peer: int) -> bool:
        """Form no lanes to this peer for a while. Whether this is the first time."""
        with self._lock:
            first = peer not in self._failed
            self._failed[peer] = time.monotonic()
            return first

    def take(self, peer: int, *, is_source: bool) -> dict[int, Lane]:
        """Take all lanes to a peer, by their numbers."""
        with self._lock:
            return self._lanes.pop((peer, is_source), {})

    def keep(self, peer: int, lane: Lane, *, is_source: bool) -> None:
        with self._lock:
            if not self._closed:
                self._lanes.setdefault((peer, is_source), {})[lane.number] = lane
                return
        lane.close()

    def in_configuration(self, group: Group) -> Pool:
        """Close, and go on with another pool for ``group``: behind a peer's rank there may be another process."""
        other = Pool(group)
        other._closed = self._closed
        self.close()
        return other

    def close(self) -> None:
        """Close all lanes, now and those that come back later."""
        with self._lock:
            self._closed = True
            lanes = [lane for some in self._lanes.values() for lane in some.values()]
            self._lanes.clear()
        for lane in lanes:
            lane.close()

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._lanes.values()))

    def _start_again(self) -> None:
        self._lock = threading.Lock()
        self._forming.clear()
        for some in self._lanes.values():
            for lane in some.values():
                lane.drop()
        self._lanes.clear()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._start_again()


os.register_at_fork(after_in_child=_after_fork)


def enter(pool: Pool, peer: int, count: int, patience: Patience) -> list[Entrance]:
    """At the receiver: the entrances of ``count`` lanes, or fewer if no new ones are formed now."""
    there = pool.take(peer, is_source=False)
    entrances: list[Entrance] = []
    while there and len(entrances) < count:
        number, lane = there.popitem()
        entrances.append(Entrance(pool, peer, number, patience, is_source=False, lane=lane))
    for lane in there.values():
        pool.keep(peer, lane, is_source=False)
    if pool.may_form(peer):
        new = range(count - len(entrances))
        entrances += [Entrance(pool, peer, new_number(), patience, is_source=False) for _ in new]
    return entrances


def accept(pool: Pool, peer: int, wanted: Lanes, patience: Patience) -> list[Entrance]:
    """At the source: the entrances of the lanes that the receiver wants."""
    known = pool.take(peer, is_source=True)
    mine = [
        Entrance(pool, peer, number, patience, is_source=True, lane=known.pop(number))
        for number in wanted.known
        if number in known
    ]
    for lane in known.values():
        lane.close()  # The receiver no longer has it.
    new = wanted.new if pool.may_form(peer) else ()
    return mine + [Entrance(pool, peer, one.number, patience, is_source=True) for one in new]
