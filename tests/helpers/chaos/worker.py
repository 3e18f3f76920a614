"""What a worker does, and what it finds afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import pathlib
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import transfuse
from chaos.scenarios import KIB, MIB, Fault, Plant, Scenario
from chaos.states import build, memory_of, raw, target_for, tensors_of, walk
from chaos.wires import Boom, Wire
from transfuse._session import receive_from_one as receiver_module
from transfuse._session.relay import this_host
from transfuse._wire import meeting, switchboard
from transfuse.testing.exact import differences
from transfuse.testing.ranks import announce
from wires import threads_left

# --------------------------------------------------------------------------------------------- what a worker does


class _Held:
    """What a worker keeps between its tasks."""

    def __init__(self) -> None:
        self.files = 0
        self.state: Any = None
        self.target: Any = None
        self.result: Any = None
        self.partial: Any = None
        self.kept: dict[str, bytes] = {}
        self.planted: Any = None


_held = _Held()


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def prepare(rank: int, plan: Scenario) -> int:
    """Build what this rank has; how many bytes its tensors have."""
    global _held
    faulthandler.enable()
    _held = _Held()
    _held.state = build(plan.make)
    if rank >= plan.sources:
        mode = plan.receivers[rank - plan.sources].mode
        _held.target = None if mode == "fresh" else target_for(plan.make, mode)
    os.environ.update(
        TRANSFUSE_SAME_HOST="1" if plan.memory else "0",
        TRANSFUSE_PARCEL_BYTES=str(plan.parcel_bytes),
        TRANSFUSE_BURST_BYTES=str(plan.burst_bytes),
        TRANSFUSE_MIN_RELAY_BYTES=str(64 * KIB),
    )
    setattr(receiver_module, "this_host", (lambda: 1000 + rank) if plan.hosts else _this_host)  # noqa: B010
    meeting.own_port("127.0.0.1")  # A process that has met others listens from then on.
    _held.files = _files()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(_held.state).values())


_this_host = this_host


@dataclasses.dataclass
class Evidence:
    """What a worker says of its own call."""

    seconds: float = 0.0
    error: BaseException | None = None
    struck: bool = False
    damaged: int = 0
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: A receiver that returned: what differs.
    differences: list[str] = dataclasses.field(default_factory=list)
    #: A receiver that raised: target leaves that are not what they were, and those that are what the source has.
    changed: list[str] = dataclasses.field(default_factory=list)
    whole: list[str] = dataclasses.field(default_factory=list)
    leaves: list[str] = dataclasses.field(default_factory=list)
    targets: list[str] = dataclasses.field(default_factory=list)
    #: Bytes that belong to no leaf and changed all the same.
    strays: int = 0


def act(rank: int, plan: Scenario, pids: list[int], payload: int) -> Evidence:
    """Send or receive, with whatever happens to it."""
    fault, evidence = plan.fault, Evidence()
    sends = rank < plan.sources
    share = payload * (len(plan.receivers) / plan.sources if fault.victim < plan.sources else 1)
    calls = 0

    def strike() -> None:
        evidence.struck = True
        if fault.kind == "kill":
            os.kill(pids[fault.victim], signal.SIGKILL)
        elif fault.kind == "freeze":
            announce("struck")
            os.kill(pids[fault.victim], signal.SIGSTOP)
        elif fault.kind == "mutate":
            _mutate(fault)

    def show(progress: dict[int, transfuse.Progress]) -> None:
        nonlocal calls
        calls += 1
        if fault.kind == "raise" and fault.victim == rank and calls >= fault.at * (10 if fault.when == "bytes" else 1):
            evidence.struck = True
            raise Boom
        if fault.when == "progress" and rank == plan.sources and not evidence.struck:
            done = sum(one.bytes for one in progress.values())
            if done >= fault.at * payload:
                strike()

    watches = (fault.kind == "raise" and fault.victim == rank) or (fault.when == "progress" and rank == plan.sources)
    options: dict[str, Any] = {"verify": plan.verify, "progress": show if watches else False}
    wire = Wire(dist.group.WORLD, plan, rank, strike, int(share))
    if sends:
        if plan.paced is not None:
            options["max_bytes_per_second"] = max(payload / plan.paced, 1.0) * len(plan.receivers) + 1 * MIB
    else:
        options["atomic"] = plan.receivers[rank - plan.sources].atomic
        if _held.target is not None:
            options["state_dict"] = lambda: _held.target
    transport = transfuse.PGTransport(wire, timedelta(seconds=plan.timeout), torch.device("cpu"), **options)
    if fault.when == "start" and wire.mine:
        strike()
    resume, _held.partial = _held.partial, None
    started = time.monotonic()
    try:
        if sends:
            transport.send_checkpoint(list(range(plan.sources, plan.size)), _held.state, step=7)
        else:
            ranks = list(range(plan.sources))
            _held.result = transport.recv_checkpoint(ranks[0] if len(ranks) == 1 else ranks, step=7, resume=resume)
    except Exception as error:
        evidence.error = error
        _held.partial = getattr(error, "partial", None)
    evidence.seconds = time.monotonic() - started
    if wire.timer is not None:
        wire.timer.cancel()
        wire.timer.join()
    if fault.when == "end" and wire.mine:
        strike()
    evidence.struck |= wire.struck
    evidence.damaged = wire.damaged
    evidence.report = transport.report.to_dict() if transport.report is not None else {}
    transport.close()  # Its streams are kept for the next transfer, and there is none.
    _plant(plan, evidence, ("byte", "stray", "thread", "file", "torn", "received", "missing", "completed", "slow"))
    if not sends:
        _look(plan, rank, evidence)
    _plant(plan, evidence, ("late",))
    if evidence.error is not None:
        evidence.error.__traceback__ = evidence.error.__context__ = evidence.error.__cause__ = None
    return evidence


def _plant(plan: Scenario, evidence: Evidence, now: Sequence[Plant]) -> None:
    """Make something wrong, if that is what the scenario is for and this is the time for it."""
    mine = tensors_of(_held.result) or tensors_of(_held.target)
    error = evidence.error
    if plan.plant not in now:
        return
    if plan.plant in ("byte", "late") and mine:
        tensor = max(mine.values(), key=lambda tensor: tensor.numel()).detach()
        memory_of(tensor)[tensor.storage_offset() * tensor.element_size()] ^= 1
    elif plan.plant == "stray" and mine:
        tensor = next(tensor for tensor in mine.values() if tensor.storage_offset() == 5)
        memory_of(tensor.detach())[0] ^= 1
    elif plan.plant == "thread":
        threading.Thread(target=time.sleep, args=(1.5,), name="transfuse-planted", daemon=True).start()
    elif plan.plant == "file":
        _held.planted = open("/dev/null")  # noqa: SIM115
    elif plan.plant == "slow":
        evidence.seconds += 100
    elif plan.plant == "completed" and isinstance(error, transfuse.SendFailed):
        error.completed, error.causes = (*error.completed, *error.causes), {}
    elif plan.plant == "torn" and isinstance(error, transfuse.TransfuseError):
        error.torn = ()
    elif plan.plant == "received" and isinstance(error, transfuse.TransfuseError):
        error.received, error.missing = [*error.received, *error.missing], []
    elif plan.plant == "missing" and isinstance(error, transfuse.TransfuseError):
        error.missing = list(error.missing)[1:]


def _mutate(fault: Fault) -> None:
    """Write to the source's tensors, as an optimizer would, or as somebody does of whom torch knows nothing."""
    with torch.no_grad():
        for tensor in tensors_of(_held.state).values():
            memory = memory_of(tensor.detach())
            if not memory.numel():
                continue
            if fault.seed % 2 and tensor.dtype != torch.bool:
                np.frombuffer(memory.numpy(), dtype=np.uint8)[:] ^= 0x55
            else:
                tensor.copy_(tensor.clone().fill_(1))


def _look(plan: Scenario, rank: int, evidence: Evidence) -> None:
    """Compare what this receiver has with what it should have."""
    mode, source = plan.receivers[rank - plan.sources].mode, build(plan.make)
    mine = tensors_of(_held.target) if _held.target is not None else {}
    theirs = tensors_of(source)
    evidence.targets = list(mine)
    evidence.leaves = [path for path, _ in walk(source)]
    if evidence.error is None:
        evidence.differences = differences(source, _held.result, in_place=mode != "fresh")
        got = tensors_of(_held.result)
        for path, tensor in mine.items():
            if got[path].data_ptr() != tensor.data_ptr():
                evidence.differences.append(f"{path}: is not the receiver's own tensor")
    if mine:
        old = target_for(plan.make, mode)
        before = tensors_of(old)
        for path, tensor in mine.items():
            now = raw(tensor)
            if now != raw(before[path]):
                evidence.changed.append(path)
            if now == raw(theirs[path]):
                evidence.whole.append(path)
            elif evidence.error is None:
                evidence.differences.append(f"{path}: raw bytes differ")
        evidence.strays = _strays(mine, before, theirs)
    _held.kept = {path: raw(tensor) for path, tensor in tensors_of(_held.result).items()} or {
        path: raw(tensor) for path, tensor in mine.items()
    }


def _strays(mine: dict[str, torch.Tensor], before: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> int:
    """How many bytes have changed that belong to no leaf."""
    olds = {path: memory_of(tensor.detach()).clone() for path, tensor in before.items()}
    with torch.no_grad():
        for path, tensor in before.items():
            tensor.detach().copy_(theirs[path])
    count = 0
    for path, tensor in mine.items():
        old, new, now = olds[path], memory_of(before[path].detach()), memory_of(tensor.detach())
        count += int(((now != old) & (new == old)).sum())
    return count


@dataclasses.dataclass
class Leftovers:
    """What a worker has after all has ended."""

    threads: list[str]
    files: int
    #: Tensors that have changed since the call returned.
    late: list[str]
    watches: int
    left_behind: int
    children: list[str]


def inspect(rank: int, plan: Scenario, allowed: int, patience: float) -> Leftovers:
    """Look for leftovers; those that go away within the patience are none."""
    until = time.monotonic() + patience
    while True:
        left = Leftovers(threads_left(), _files() - _held.files, [], *switchboard.leftovers(), _children())
        clean = len(left.threads) <= allowed and left.files <= 0 and left.left_behind <= allowed
        if clean or time.monotonic() > until:
            break
        time.sleep(0.02)
    now = tensors_of(_held.result) or tensors_of(_held.target)
    left.late = [path for path, data in _held.kept.items() if raw(now[path]) != data]
    return left


def _children() -> list[str]:
    found = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # A thread that has just ended.
            found.append((task / "children").read_text().strip())
    return [text for text in found if text]
