"""One receiver and several sources, as threads; states for them, and groups that see each send."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import transfuse
from moves import CPU, TIMEOUT
from tampering import Passing
from transfuse.testing.ranks import Outcome, Ranks

MIB = 1 << 20


def state(scale: float = 1.0, mib: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Any] = {f"w{i:02}": torch.randn(MIB // 8, generator=generator) * scale for i in range(2 * mib)}
    return {**tensors, "tied": tensors["w03"], "view": tensors["w05"][10:500:2], "small": torch.arange(9), "lr": 0.1}


def blank(like: dict[str, Any]) -> dict[str, Any]:
    """A target of the same shape, in memory of its own, tied alike."""
    own = {name: torch.zeros_like(leaf) for name, leaf in like.items() if name.startswith("w")}
    return {
        **own,
        "tied": own["w03"],
        "view": own["w05"][10:500:2],
        "small": torch.zeros(9, dtype=torch.int64),
        "lr": 0,
    }


Work = Callable[[int, Any], Any]


def gather(
    sources: int,
    offered: Callable[[int], object] = lambda rank: state(),
    *,
    target: object | None = None,
    wrap: Callable[[int, Any], Any] = lambda rank, pg: pg,
    steps: Sequence[int | None] | None = None,
    step: int | None = None,
    timeout: timedelta = TIMEOUT,
    **options: Any,
) -> tuple[list[Outcome[Any]], Any]:
    """Ranks 0, 1, … are sources of the last one; the outcomes, and the receiver's report."""
    reports: list[Any] = []

    def work(rank: int, pg: Any) -> Any:
        if rank < sources:
            sender = transfuse.PGTransport(wrap(rank, pg), timeout, CPU)
            return sender.send_checkpoint([sources], offered(rank), step=None if steps is None else steps[rank])
        taker = transfuse.PGTransport(
            wrap(rank, pg), timeout, CPU, None if target is None else lambda: target, **options
        )
        try:
            return taker.recv_checkpoint(list(range(sources)), step=step)
        finally:
            reports.append(taker.report)

    with Ranks(sources + 1, 40) as ranks:
        return ranks.outcomes(work), reports[0]


class Wrapped(Passing):
    """A group of which a test sees every send before it is posted, and may put another tensor in its place."""

    def __init__(self, pg: Any, on_send: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__(pg)
        self._on_send = on_send

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        changed = self._on_send(tensors[0])
        return super().send(tensors if changed is None else [changed], rank, tag)


# --------------------------------------------------------------------------------------------------- death and silence


class Ending(Passing):
    """The world's group; its process ends itself, or freezes, at the send with a certain number."""

    def __init__(self, number: int, how: signal.Signals, after: float = 0.0) -> None:
        super().__init__(dist.group.WORLD)
        self._left, self._how, self._after = number, how, after

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._left -= 1
        if self._left == 0:
            time.sleep(self._after)  # what was sent before arrives first
            os.kill(os.getpid(), self._how)
        return super().send(tensors, rank, tag)
