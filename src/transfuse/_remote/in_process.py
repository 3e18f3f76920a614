"""A server in the reader's own process: the usual conversation, in two threads, without a connection.

A worker restores a kept state from slots that are mapped into its own process.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch

from transfuse._errors import TransfuseError, as_utf8
from transfuse._state.manifest import Described
from transfuse._transport import PGTransport
from transfuse._wire.group import WorkLike
from transfuse._wire.handshake import READER, SERVER
from transfuse._wire.loopback import Loopback

logger = logging.getLogger("transfuse")


class _PairEnd:
    """One end of the pair, with the methods that a transport calls on a group."""

    outlives_waits = True

    def __init__(self, loopback: Loopback, rank: int) -> None:
        self._loopback, self._rank = loopback, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "stream"

    def meeting(self, rank: int) -> None:
        """There are no further connections within a process."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        return self._loopback.send(tensors[0], tag, by_source=self._rank == SERVER)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        return self._loopback.recv(tensors[0], tag, by_source=self._rank == SERVER)

    def cut(self, rank: int = 0) -> None:
        self._loopback.close()

    def close(self) -> None:
        """Break the connection: the other end's waits end, too."""
        self._loopback.close()


class InProcess:
    """Serves a described state to one reader, in a thread of this process."""

    def __init__(
        self, state: Described, name: str, *, step: int | None, timeout: timedelta, verify: bool | None
    ) -> None:
        self.name = name
        self._state, self._step = state, step
        loopback = Loopback()
        server = _PairEnd(loopback, SERVER)
        #: The reader's end.
        self.group = _PairEnd(loopback, READER)
        self._transport = PGTransport(
            server, timeout, torch.device("cpu"), relay=False, lanes=1, verify=verify, tls=False
        )
        self._thread = threading.Thread(target=self._send, name="transfuse-in-process", daemon=True)

    def __str__(self) -> str:
        return self.name

    def begin(self) -> _PairEnd:
        self._thread.start()
        return self.group

    def _send(self) -> None:
        try:
            with self._transport:
                self._transport.send_checkpoint([READER], self._state, step=self._step)
        except TransfuseError as error:
            # The reader has the cause, or is the cause.
            logger.debug("%s: %s", self.name, as_utf8(str(error)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.group.close()
        if self._thread.ident is not None:
            self._thread.join()
