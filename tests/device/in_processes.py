"""What tests run in processes of a fleet: transfers that lose a peer, and transfers beside an unused accelerator."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import transfuse
from device import phantom
from device.group import Waits, backend_of, device_group, hybrid_group
from device.simple_moves import MIB, bits, receive, send, state, zeros
from transfuse.testing.ranks import Ranks, announce, hear, store

__all__ = ["End", "Plan", "move_in_a_fork", "move_in_main_memory", "move_without_the_device", "take_part"]


@dataclass(frozen=True)
class Plan:
    """A transfer of several processes, of which one will be lost."""

    cpu: bool
    eager: bool
    sources: tuple[int, ...]
    receivers: tuple[int, ...]
    lost: int
    #: The lost rank never calls: it is lost before its first message.
    absent: bool = False
    in_place: bool = True
    seconds: float = 2.0
    waits: Waits = "nccl"
    #: Whether the others can go on with the same group afterwards. If not, they make a new one.
    same_group: bool = False
    #: Receivers map the sources' memory.
    mapped: bool = False


@dataclass
class End:
    """What one process saw. ``changed``: targets that were written to after the call had raised."""

    error: BaseException | None
    seconds: float
    exact: bool = False
    changed: tuple[str, ...] = ()
    process_would_end: bool = False
    #: Whether a later transfer without the lost rank was exact.
    again: bool = False


def take_part(rank: int, plan: Plan) -> End:
    """One rank's part. It says ``moving`` when bytes have moved, and ``ended`` after the call; then it waits."""
    phantom.load()
    pg = _group(rank, plan, "first")
    target = zeros(state("cpu")) if plan.in_place and rank in plan.receivers else None
    if plan.absent and rank == plan.lost:
        announce("moving")
        time.sleep(60)
    end = _move(rank, pg, plan, target)
    then = {} if target is None else bits(target)
    announce("ended")
    hear()
    # Give a late peer time to write.
    time.sleep(0.3)
    now = {} if target is None else bits(target)
    end.changed = tuple(name for name in now if now[name] != then[name])
    end.process_would_end = backend_of(pg).process_would_end
    if rank != plan.lost:
        end.again = _once_more(rank, pg, plan)
    return end


def _group(rank: int, plan: Plan, name: str, ranks: tuple[int, ...] = ()) -> Any:
    ranks = ranks or tuple(sorted({*plan.sources, *plan.receivers}))
    make = hybrid_group if plan.cpu else device_group
    bound = 0 if plan.eager else None
    return make(PrefixStore(name, store()), ranks.index(rank), len(ranks), 60.0, waits=plan.waits, bound=bound)


def _move(rank: int, pg: Any, plan: Plan, target: Any) -> End:
    announced: list[str] = []

    def show(progress: dict[int, transfuse.Progress]) -> None:
        peer = progress.get(plan.lost)
        moved = peer.bytes if peer is not None else max(one.bytes for one in progress.values())
        if moved and not announced:
            announced.append("moving")
            announce("moving")

    started = time.monotonic()
    error, exact = None, False
    try:
        if rank in plan.sources:
            # So slow that the peer is lost in the middle.
            rate = 6.0 * MIB * len(plan.receivers)
            limited: dict[str, Any] = {"max_bytes_per_second": rate, "device_memory": plan.mapped}
            send(pg, list(plan.receivers), state(), plan.seconds, progress=show, **limited)
        else:
            sources = list(plan.sources) if len(plan.sources) > 1 else plan.sources[0]
            got = receive(pg, sources, plan.seconds, target, progress=show, device_memory=plan.mapped)
            exact = bits(got) == bits(state("cpu"))
    except transfuse.TransfuseError as caught:
        error = caught
    return End(error, time.monotonic() - started, exact)


def _once_more(rank: int, pg: Any, plan: Plan) -> bool:
    """A transfer between two ranks that are left."""
    left = [one for one in (*plan.sources, *plan.receivers) if one != plan.lost]
    if len(left) < 2:
        return True
    source, receiver = left[0], left[-1]
    if rank not in (source, receiver):
        return True
    if not plan.same_group:
        pg, source, receiver = _group(rank, plan, "second", (source, receiver)), 0, 1
    if pg.rank() == source:
        send(pg, receiver, state(seed=3.0), 10.0)
        return True
    return bits(receive(pg, source, 10.0)) == bits(state("cpu", seed=3.0))


# ------------------------------------------------------------------------------------ beside an accelerator without use


def move_in_main_memory(rank: int) -> tuple[bool, bool]:
    """Whether a state arrives, and whether the accelerator has been initialised."""
    phantom.load()
    assert torch.accelerator.is_available()
    return _move_here(), phantom.is_initialized()


def move_in_a_fork(rank: int, used: bool) -> int:
    """How a forked child ends that moves a state in main memory, and uses the device unless the parent has used it."""
    phantom.load()
    if used:
        torch.ones(3, device="phantom").cpu()
    else:
        assert _move_here()
    child = os.fork()
    if not child:
        fine = False
        try:
            fine = _move_here() and (used or torch.ones(3, device="phantom").sum().item() == 3)
        finally:
            os._exit(0 if fine else 1)
    return os.waitpid(child, 0)[1]


def _move_here() -> bool:
    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            return send(pg, 1, {"w": torch.ones(100_000)}, 8.0, "cpu", same_host=False)
        return bool((receive(pg, 0, 8.0, None, "cpu", same_host=False)["w"] == 1).all())

    with Ranks(2) as ranks:
        return bool(ranks.run(work, deadline=12.0)[1])


def move_without_the_device(rank: int) -> tuple[set[str], bool, str] | None:
    """Rank 0 has the device, rank 1 does not: where its tensors lie, whether they are exact, and what is logged."""
    pg, said = dist.group.WORLD, list[str]()
    if rank == 0:
        phantom.load()
        send(pg, 1, {"w": torch.full((300_000,), 3.0, device="phantom"), "n": torch.ones(3)}, 15.0, "cpu")
        return None

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("transfuse").addHandler(Listening(logging.WARNING))
    got = receive(pg, 0, 15.0, None, "cpu")
    exact = bool((got["w"] == 3.0).all() and (got["n"] == 1).all())
    return {str(tensor.device) for tensor in got.values()}, exact, "\n".join(said)
