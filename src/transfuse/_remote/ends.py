"""The two ends of a served conversation: the server is rank 0 of a group of two, the reader is rank 1.

The connection over which they met is the conversation's stream. Further ones (lanes) come through the server's own
port: the reader connects there again, with the same token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from transfuse._tls import TLS
from transfuse._wire.framed import AnySocket
from transfuse._wire.group import WorkLike
from transfuse._wire.handshake import SERVER, ControlConnection
from transfuse._wire.meeting import Expected, Meeting, dial
from transfuse._wire.messages import Place
from transfuse._wire.stream import Stream


class AtServer:
    """How a server gets further connections of its readers."""

    def __init__(self) -> None:
        self.expected = Expected()

    def place(self) -> Place | None:
        return None  # The reader knows it.

    def dial(self, place: Place | None, number: int, seconds: float) -> AnySocket:
        raise AssertionError("readers connect to the server")


class ToServer:
    """How a reader gets further connections to its server."""

    def __init__(self, address: str, key: bytes, tls: TLS | None = None) -> None:
        self._address, self._key, self._tls = address, key, tls
        self.expected = Expected()

    def place(self) -> Place | None:
        return None

    def dial(self, place: Place | None, number: int, seconds: float) -> AnySocket:
        return dial(self._address, self._key, number, seconds, self._tls)


class ServedStream(Stream):
    """A control connection as the stream of a conversation."""

    def __init__(self, control: ControlConnection, rank: int, seconds: float, meeting: Meeting) -> None:
        super().__init__(control.release(), seconds=seconds, rank=rank, size=2)
        self._meeting = meeting

    def meeting(self, rank: int) -> Meeting:
        return self._meeting


def server_end(control: ControlConnection, seconds: float, meeting: Meeting) -> ServedStream:
    return ServedStream(control, SERVER, seconds, meeting)


class ReaderEnd(Protocol):
    """The reader's end of a conversation with one server."""

    def meeting(self, rank: int) -> Meeting | None: ...

    def cut(self, rank: int = 0) -> None: ...

    def close(self) -> None: ...


class Servers:
    """Several servers as ranks of one group, for a transport that expects a process group.

    Rank ``i`` of ``count`` is the server of ``ends[i]``, if there is one; the reader is rank ``count``.
    """

    outlives_waits = True

    def __init__(self, ends: Mapping[int, ReaderEnd], count: int) -> None:
        self._ends = ends
        self._count = count

    def rank(self) -> int:
        return self._count

    def size(self) -> int:
        return self._count + 1

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "stream"

    def meeting(self, rank: int) -> Meeting | None:
        return self._ends[rank].meeting(rank)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        work: WorkLike = self._in_process(rank).send(tensors, SERVER, tag)
        return work

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        work: WorkLike = self._in_process(rank).recv(tensors, SERVER, tag)
        return work

    def _in_process(self, rank: int) -> Any:
        """An end that has no stream: a server in this process."""
        return self._ends[rank]

    def stream_to(self, rank: int) -> Stream | None:
        end = self._ends[rank]
        return end if isinstance(end, Stream) else None

    def cut(self, rank: int) -> None:
        self._ends[rank].cut()
