"""Moving a state between thread ranks, the short way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

import transfuse
from transfuse.testing.ranks import Outcome, Ranks

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=10)


class Pair:
    """Two ranks, each with its transports made on demand."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def outcomes(
        self,
        state: object,
        target: object | None = None,
        *,
        timeout: timedelta = TIMEOUT,
        source: dict[str, Any] | None = None,
        step: int | None = None,
        source_step: int | None = None,
        callback: Callable[[], object] | None = None,
        **options: Any,
    ) -> list[Outcome[Any]]:
        """Send from rank 0 to rank 1; the outcomes of both."""

        def work(rank: int, pg: Any) -> Any:
            if rank == 0:
                sender = transfuse.PGTransport(pg, timeout, CPU, **(source or {}))
                sender.send_checkpoint([1], state, step=source_step)
                return sender
            give = callback or (None if target is None else lambda: target)
            taker = transfuse.PGTransport(pg, timeout, CPU, give, **options)
            return taker.recv_checkpoint(0, step=step)

        return self.ranks.outcomes(work)

    def move(self, state: object, target: object | None = None, **options: Any) -> Any:
        """Send from rank 0 to rank 1; what arrived."""
        sent, received = self.outcomes(state, target, **options)
        value = received.get()
        sent.get()
        return value

    def errors(
        self, state: object, target: object | None = None, **options: Any
    ) -> tuple[BaseException, BaseException]:
        """Send what must fail at both ends; the two errors."""
        sent, received = self.outcomes(state, target, **options)
        assert received.error is not None, f"arrived all the same: {received.value!r}"
        assert sent.error is not None
        return sent.error, received.error


@contextmanager
def pair(timeout: float = 20.0) -> Iterator[Pair]:
    with Ranks(2, timeout) as ranks:
        yield Pair(ranks)
