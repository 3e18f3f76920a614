"""Messages from a rank to itself. A rank that is source and receiver at once may hold some of what it needs.

Backends do not send to their own rank. This class looks like a backend that does. The two conversations run in two
threads of one process, and meet here because they use the same group.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch

#: A tag, and whether the source is the sender. Both ends have the same rank, so the rank does not tell.
Way = tuple[int, bool]


class _Mail:
    """One message: its tensor, once it has been sent, and whether the connection was closed before."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        #: On an accelerator: when the tensor holds the message, on the stream of the thread that sent it.
        self.written: torch.Event | None = None
        self.lost = False


class _Sent:
    """A finished send: the tensor has been copied."""

    def wait(self, timeout: timedelta) -> bool:
        return True


class _LoopbackReceive:
    def __init__(self, loop: Loopback, mail: _Mail, into: torch.Tensor) -> None:
        self._loopback, self._mail, self._into = loop, mail, into

    def wait(self, timeout: timedelta) -> bool:
        self._loopback.await_mail(self._mail, timeout.total_seconds())
        assert self._mail.tensor is not None
        if self._mail.tensor.numel() != self._into.numel():
            raise RuntimeError(f"expected {self._into.numel()} bytes, got {self._mail.tensor.numel()}")
        if self._mail.written is not None:
            stream = torch.accelerator.current_stream(self._mail.tensor.device)
            stream.wait_event(self._mail.written)
            self._mail.tensor.record_stream(stream)
        self._into.copy_(self._mail.tensor)
        return True


class Loopback:
    """A connection from a rank of a group to itself. Like gloo's, it breaks for all when one wait expires."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: dict[Way, list[_Mail]] = {}
        self._awaited: dict[Way, list[_Mail]] = {}
        self._closed = False

    def close(self) -> None:
        """End all waits, now and from now on. What was sent before can still be received."""
        with self._changed:
            self._closed = True
            self._lose_all()

    def _lose_all(self) -> None:
        for waiting in self._awaited.values():
            for other in waiting:
                other.lost = True
        self._awaited.clear()
        self._changed.notify_all()

    def send(self, tensor: torch.Tensor, tag: int, *, by_source: bool) -> _Sent:
        mail = self._meet((tag, by_source), self._awaited, self._sent)
        copy = tensor.clone()
        if copy.device.type != "cpu":
            mail.written = torch.accelerator.current_stream(copy.device).record_event()
        with self._changed:
            mail.tensor = copy
            self._changed.notify_all()
        return _Sent()

    def recv(self, tensor: torch.Tensor, tag: int, *, by_source: bool) -> _LoopbackReceive:
        """Receive the message that the other end sends."""
        return _LoopbackReceive(self, self._meet((tag, not by_source), self._sent, self._awaited), tensor)

    def _meet(self, way: Way, theirs: dict[Way, list[_Mail]], ours: dict[Way, list[_Mail]]) -> _Mail:
        """The oldest message that the other end has posted, or a new one for the other end to find."""
        with self._changed:
            if theirs.get(way):
                mail = theirs[way].pop(0)
                if not theirs[way]:
                    del theirs[way]
                return mail
            mail = _Mail()
            mail.lost = self._closed
            ours.setdefault(way, []).append(mail)
            return mail

    def await_mail(self, mail: _Mail, seconds: float) -> None:
        with self._changed:
            here = self._changed.wait_for(lambda: mail.tensor is not None or mail.lost, seconds)
            if mail.tensor is not None:
                return
            if not here:
                self._lose_all()
                self._sent.clear()
        raise RuntimeError("the wait timed out" if not here else "the connection was closed")
