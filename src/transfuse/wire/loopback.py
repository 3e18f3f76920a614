"""What a rank sends to itself: a rank that is source and receiver at once also holds what it needs.

Backends do not send to their own rank. This looks like one that does: two conversations of one process, each in a
thread of its own, meet here if they use the same group.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch

__all__ = ["Loopback"]

#: A tag, and whether the source sends: both ends are one rank.
Way = tuple[int, bool]


class _Mail:
    """A message of one tag: what was sent, and whether it is here."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.lost = False


class _Sent:
    """A send that is done: what was sent has been copied."""

    def wait(self, timeout: timedelta) -> bool:
        return True


class _Receive:
    def __init__(self, loop: Loopback, mail: _Mail, into: torch.Tensor) -> None:
        self._loopback, self._mail, self._into = loop, mail, into

    def wait(self, timeout: timedelta) -> bool:
        self._loopback.await_mail(self._mail, timeout.total_seconds())
        assert self._mail.tensor is not None
        if self._mail.tensor.numel() != self._into.numel():
            raise RuntimeError(f"{self._mail.tensor.numel()} bytes came where {self._into.numel()} were expected")
        self._into.copy_(self._mail.tensor)
        return True


class Loopback:
    """The way from a rank of a group to itself. Like a connection, it breaks for all when a wait on it expires."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: dict[Way, list[_Mail]] = {}
        self._awaited: dict[Way, list[_Mail]] = {}

    def send(self, tensor: torch.Tensor, tag: int, *, by_source: bool) -> _Sent:
        mail = self._meet((tag, by_source), self._awaited, self._sent)
        mail.tensor = tensor.clone()
        with self._changed:
            self._changed.notify_all()
        return _Sent()

    def recv(self, tensor: torch.Tensor, tag: int, *, by_source: bool) -> _Receive:
        """Receive what the other of the two ends sends."""
        return _Receive(self, self._meet((tag, not by_source), self._sent, self._awaited), tensor)

    def _meet(self, way: Way, theirs: dict[Way, list[_Mail]], ours: dict[Way, list[_Mail]]) -> _Mail:
        """The first message that the other side has posted, or a new one that it will find: in order, as on a wire."""
        with self._changed:
            if theirs.get(way):
                mail = theirs[way].pop(0)
                if not theirs[way]:
                    del theirs[way]
                return mail
            mail = _Mail()
            ours.setdefault(way, []).append(mail)
            return mail

    def await_mail(self, mail: _Mail, seconds: float) -> None:
        with self._changed:
            here = self._changed.wait_for(lambda: mail.tensor is not None or mail.lost, seconds)
            if mail.tensor is not None:
                return
            if not here:
                for waiting in self._awaited.values():
                    for other in waiting:
                        other.lost = True
                self._awaited.clear()
                self._sent.clear()
                self._changed.notify_all()
        raise RuntimeError("the wait timed out" if not here else "the connection was closed")
