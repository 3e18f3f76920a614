"""Pair groups: two ranks, the server (0) and the reader (1), formed over their control connection.

torch forms a group through a store. The store here holds no data of its own: a value that one end sets goes over the
control connection to the other end, which waits for it. So nobody else can read or write it, and the only open ports
are the server's and gloo's own, on the same address.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from transfuse.errors import PeerError, PeerLost, PeerTimeout, ProtocolError, TransfuseError
from transfuse.remote.handshake import Call, ControlConnection
from transfuse.wire.group import WorkLike
from transfuse.wire.pair import Pair, form, is_address

__all__ = ["READER", "SERVER", "PairGroup", "PairGroups", "ReaderEnd"]

SERVER, READER = 0, 1
PROOF_TAG = 0x5446_0001
PROOF_BYTES = 32


class _Exchange(Store):
    """A store in which each end holds the values that the other end has set."""

    def __init__(self, control: ControlConnection, seconds: float, most_waits: int) -> None:
        super().__init__()
        self._control = control
        self._seconds = seconds
        self._most_waits = most_waits
        self._values: dict[str, bytes] = {}
        self._mine: dict[str, bytes] = {}
        #: The error that a method raised: torch passes on only its text.
        self.failure: PeerError | None = None

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._mine[key] = data
        self._say(lambda: self._control.send(Call(key, data), self._seconds))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._mine[key] if key in self._mine else self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            while key not in self._mine and key not in self._values:
                self._say(self._hear)

    def _hear(self) -> None:
        call = self._control.expect(Call, self._seconds, "forming a group", self._most_waits)
        if not any(is_address(call.value, mine) for mine in self._mine.values()):
            raise ProtocolError(self._control.rank, f"{self._control.name} sent an address that gloo did not make")
        if call.key in self._mine or self._values:
            raise ProtocolError(self._control.rank, f"{self._control.name} sent its gloo address twice")
        self._values[call.key] = call.value

    def _say(self, operation: Callable[[], None]) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            operation()
        except PeerError as error:
            self.failure = error
            raise


class PairGroup(Pair):
    """A group of this end and the other. Both have proved that they are the ends of the control connection."""

    def __init__(self, control: ControlConnection, rank: int, seconds: float, most_waits: int) -> None:
        self.control = control
        self.peer = READER if rank == SERVER else SERVER
        store = _Exchange(control, seconds, most_waits)
        started = time.monotonic()
        try:
            gloo = form(store, rank, seconds, self.lane_device())
        except TransfuseError:
            raise
        except Exception as error:
            if store.failure is not None:
                raise store.failure from None
            took = time.monotonic() - started
            if took >= 0.9 * seconds:
                raise PeerTimeout(control.rank, f"connecting gloo with {control.name}", took) from error
            text = str(error).split("\n")[0]
            raise PeerLost(control.rank, f"{control.name}: gloo could not connect: {text}") from error
        super().__init__(gloo, self.peer)
        try:
            self._prove(rank, timedelta(seconds=seconds))
        except BaseException:
            self.close()
            raise

    def lane_device(self, rank: int = 0) -> Any:
        """A device of gloo that listens on the interface of the control connection only."""
        gloo: Any = dist.ProcessGroupGloo
        try:
            return gloo.create_device(hostname=self.control.local_host, lazy_init=False)
        except RuntimeError as error:
            text = str(error).split("\n")[0]
            raise TransfuseError(f"gloo cannot listen on {self.control.local_host} here: {text}") from error

    # The methods that a transport calls on a group.

    def rank(self) -> int:
        return SERVER if self.peer == READER else READER

    def size(self) -> int:
        return 2

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        return self._post_send(tensors, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        return self._post_recv(tensors, tag)

    def _prove(self, rank: int, timeout: timedelta) -> None:
        """Both ends prove themselves again, over the group: somebody else may have connected to gloo's port."""
        names = {SERVER: "server in the group", READER: "reader in the group"}
        mine = torch.frombuffer(bytearray(self.control.proof(names[rank])), dtype=torch.uint8)
        theirs = torch.zeros(PROOF_BYTES, dtype=torch.uint8)
        started = time.monotonic()
        try:
            if rank == READER:
                self.send([mine], self.peer, PROOF_TAG).wait(timeout)
            self.recv([theirs], self.peer, PROOF_TAG).wait(timeout)
            self._check(bytes(theirs.numpy()), names[self.peer])
            if rank == SERVER:
                self.send([mine], self.peer, PROOF_TAG).wait(timeout)
        except RuntimeError as error:
            took = time.monotonic() - started
            if took >= 0.9 * timeout.total_seconds():
                raise PeerTimeout(self.control.rank, f"proving to be there ({self.control.name})", took) from error
            raise PeerLost(self.control.rank, f"{self.control.name}: connection lost before its proof") from error

    def _check(self, proof: bytes, name: str) -> None:
        if not hmac.compare_digest(proof, self.control.proof(name)):
            raise ProtocolError(
                self.control.rank, f"somebody other than {self.control.name} has connected to gloo's port"
            )


class ReaderEnd(Protocol):
    """The reader's end of a pair."""

    def lane_device(self, rank: int = 0) -> Any: ...

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike: ...

    def close(self) -> None: ...


class PairGroups:
    """Several servers as ranks of one group, for a transport that expects a process group.

    Rank ``i`` of ``count`` is the server of ``groups[i]``, if there is one; the reader is rank ``count``.
    """

    outlives_waits = PairGroup.outlives_waits

    def __init__(self, groups: Mapping[int, ReaderEnd], count: int) -> None:
        self._groups = groups
        self._count = count

    def rank(self) -> int:
        return self._count

    def size(self) -> int:
        return self._count + 1

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "gloo"

    def lane_device(self, rank: int) -> Any:
        return self._groups[rank].lane_device()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        return self._groups[rank].send(tensors, SERVER, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        return self._groups[rank].recv(tensors, SERVER, tag)
