"""Process groups that see or change what leaves them, and what leaves by the streams of their conversations."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch

from transfuse._wire.channel import Channel
from transfuse._wire.lanes import Entrance
from transfuse._wire.stream import Part, Stream

__all__ = ["Passing", "Tampering"]


class Passing:
    """A gloo group that passes everything on as it is. Subclasses do not.

    Its ``send`` and ``recv`` are also called for what a stream moves instead of the group: all parts of one call, one
    after another, and then the stream moves what they were called with.
    """

    def __init__(self, pg: Any) -> None:
        self._pg = pg

    def rank(self) -> int:
        return int(self._pg.rank())

    def size(self) -> int:
        return int(self._pg.size())

    def name(self) -> str:
        return "gloo"

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return _gathered(tensors) or self._pg.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return _gathered(tensors) or self._pg.recv(tensors, rank, tag)


class Tampering(Passing):
    """A group whose ``send`` lets :meth:`tamper` change a copy of the bytes that leave for a rank."""

    def __init__(self, pg: Any, tamper: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__(pg)
        self._tamper = tamper

    def tamper(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor if self._tamper is None else self._tamper(tensor)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return super().send([self.tamper(tensors[0].clone(), rank)], rank, tag)


# ------------------------------------------------------------------------------------------------------------- streams


class _Gathered:
    def wait(self, timeout: timedelta) -> bool:
        raise AssertionError("a stream does not wait for single parts")


#: To whom each stream of a conversation over such a group leads.
_streams: WeakKeyDictionary[Stream, tuple[Passing, int]] = WeakKeyDictionary()
_now = threading.local()


def _gathered(tensors: list[torch.Tensor]) -> _Gathered | None:
    parts: list[torch.Tensor] | None = getattr(_now, "parts", None)
    if parts is None:
        return None
    parts.append(tensors[0])
    return _Gathered()


def _parts_of(stream: Stream, parts: Sequence[Part], way: str) -> Sequence[Part]:
    """What a stream moves in the place of these parts."""
    if stream not in _streams:
        return parts
    group, peer = _streams[stream]
    gathered: list[torch.Tensor] = []
    _now.parts = gathered
    try:
        for part in parts:
            tensor = _as_tensor(part)
            if tensor.numel():
                getattr(group, way)([tensor], peer, 0)
    except OSError:
        raise
    except Exception as error:
        raise ConnectionAbortedError(str(error)) from error  # Whatever a group raises, its connection is lost.
    finally:
        del _now.parts
    return gathered


def _as_tensor(part: Part) -> torch.Tensor:
    if isinstance(part, torch.Tensor):
        return part
    data: Any = (ctypes.c_uint8 * part[1]).from_address(part[0]) if isinstance(part, tuple) else part
    if not len(data):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8)


def _belongs(stream: Stream, pg: object, peer: int) -> None:
    if isinstance(pg, Passing):
        _streams[stream] = pg, peer


_move_to, _form, _write, _read = Channel.move_to, Entrance.form, Stream.write, Stream.read


def _moving_to(channel: Channel, stream: Stream) -> None:
    _belongs(stream, channel.home.pg, channel.peer)
    _move_to(channel, stream)


def _forming(entrance: Entrance, *args: Any) -> Stream:
    lane = _form(entrance, *args)
    _belongs(lane, entrance._pool.group.pg, entrance._peer)
    return lane


def _writing(stream: Stream, parts: Sequence[Part]) -> None:
    _write(stream, _parts_of(stream, parts, "send"))


def _reading(stream: Stream, parts: Sequence[Part], seconds: float) -> None:
    _read(stream, _parts_of(stream, parts, "recv"), seconds)


def _install() -> None:
    for owner, name, function in (
        (Channel, "move_to", _moving_to),
        (Entrance, "form", _forming),
        (Stream, "write", _writing),
        (Stream, "read", _reading),
    ):
        setattr(owner, name, function)


_install()
