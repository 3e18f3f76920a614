"""Transfers that something happens to midway."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

import transfuse
from moves import CPU, TIMEOUT
from tampering import Passing, Tampering
from transfuse._wire import messages
from transfuse.testing.ranks import Ranks, announce
from wires import over_streams

SHORT = timedelta(seconds=1.5)


def big_state() -> dict[str, torch.Tensor]:
    return {f"w{i:02}": torch.full((1 << 20,), float(i)) for i in range(80)}


def tampered(
    tamper: Any, state: object, target: object | None = None, timeout: timedelta = TIMEOUT
) -> tuple[Any, Any, Any]:
    """Send through a tampering group; outcomes and the receiver's report."""
    with Ranks(2) as ranks:
        reports = {}

        def work(rank: int, pg: Any) -> Any:
            if rank == 0:
                return transfuse.PGTransport(Tampering(pg, tamper), timeout, CPU).send_checkpoint([1], state)
            transport = transfuse.PGTransport(pg, timeout, CPU, None if target is None else lambda: target)
            try:
                return transport.recv_checkpoint(0)
            finally:
                reports[1] = transport.report

        sent, received = ranks.outcomes(work)
        return sent, received, reports[1]


class Slow(Passing):
    """A group whose receives of parcels take their time."""

    def __init__(self, pg: Any, seconds: float) -> None:
        super().__init__(pg)
        self._seconds = seconds

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if tensors[0].numel() > 1 << 16:
            time.sleep(self._seconds)
        return super().recv(tensors, rank, tag)


class Untagged:
    """A group that, like NCCL, ignores tags and runs what was posted for a pair in order."""

    def __init__(self, pg: Any) -> None:
        self._pg = pg

    def rank(self) -> int:
        return int(self._pg.rank())

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.send(tensors, rank, 0)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.recv(tensors, rank, 0)


# ---------------------------------------------------------------------------------------------- processes that die


def move_slowly(rank: int, count: int) -> Any:
    """Rank 0 sends ``count`` tensors of 4 MiB, the others receive in place; both announce when bytes move."""
    announced: list[int] = []

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if any(p.bytes for p in progress.values()) and not announced:
            announced.append(1)
            announce("moving")

    tensors = {f"w{i:03}": torch.full((1 << 20,), float(i + 1 if rank == 0 else 0)) for i in range(count)}
    world = cast(Any, dist.group.WORLD)
    transport = transfuse.PGTransport(world, timedelta(seconds=6), CPU, lambda: tensors, progress=show)
    dist.barrier()
    if rank == 0:
        transport.send_checkpoint(list(range(1, dist.get_world_size())), tensors)
        return None
    try:
        transport.recv_checkpoint(0)
    except transfuse.TransfuseError as error:
        touched = {f"['{name}']" for name, tensor in tensors.items() if tensor.any()}
        return type(error).__name__, str(error), touched, set(error.torn)
    return all(bool((tensor == i + 1).all()) for i, tensor in enumerate(tensors.values()))


def cancel_at(rank: int, pg: Any, state: Any, tick: int, who: str, tagged: bool) -> Any:
    ticks = []

    def show(progress: dict[int, transfuse.Progress]) -> None:
        ticks.append(1)
        if sum(p.bytes for p in progress.values()) >= tick << 16:
            raise RuntimeError("stop")

    wants = who == "both" or (who == "source") is (rank == 0)
    transport = transfuse.PGTransport(pg if tagged else Untagged(pg), TIMEOUT, CPU, progress=show if wants else False)
    return transport.send_checkpoint([1], state) if rank == 0 else transport.recv_checkpoint(0)


class Dying(Passing):
    """The world's group; its process dies when it begins to wait for the first answer to a burst."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD)
        self._headers = 0

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._headers += tensors[0].numel() == messages.BLOCK_BYTES
        # The first one is for the want. Before that, a source that proposes a stream hears the answer to it.
        if self._headers == 2 + over_streams():
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().recv(tensors, rank, tag)


def die_after_the_last_burst(rank: int) -> Any:
    timeout = timedelta(seconds=6)
    if rank == 0:
        transfuse.PGTransport(Dying(), timeout, CPU).send_checkpoint([1], {"w": torch.full((2 << 20,), 3.0)})
    own = torch.zeros(2 << 20)
    transfuse.PGTransport(cast(Any, dist.group.WORLD), timeout, CPU, lambda: {"w": own}).recv_checkpoint(0)
    return bool((own == 3.0).all())


class DamagedAnswer(Tampering):
    """A group that damages the first answer to a burst."""

    _left = 1

    def tamper(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if (
            self._left
            and tensor.numel() in (messages.HEADER_BYTES, messages.BLOCK_BYTES)
            and int(tensor[6]) == messages.Message.GOT
        ):
            self._left -= 1
            tensor[messages.HEADER_BYTES - 1] ^= 1
        return tensor
