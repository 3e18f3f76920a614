"""Generations: the groups of a job that goes on when a worker has died or joined, for jobs without torchrun.

``regroup``, in each worker, forms the next group over a store that outlives them. Each call posts a ticket of its own.
A generation is a list of tickets, one of each rank, none of which an earlier generation has used; the rank that first
sees such a list writes it down, all at once (``compare_set``). So a rank that dies on the way and comes back has
another ticket, and those that wait for the old one see that and begin again.

``supervise`` starts workers, and starts those again that die.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from transfuse import _arguments
from transfuse._errors import PeerLost, TransfuseError
from transfuse._tuning import REGROUP_LOOK_SECONDS, SUPERVISE_LOOK_SECONDS

logger = logging.getLogger("transfuse")

HOST = "127.0.0.1"

#: Groups that have lost a member. To free one would wait for its operations, and gloo may never end them.
_left: list[object] = []

#: Since when a rank of this process has waited for the others: also over several calls that gave up.
_waits_since: dict[int, float] = {}


class _Ticket(msgspec.Struct, array_like=True, frozen=True):
    """What a rank posts when it wants the next group."""

    name: str
    #: 0: the rank has left with an error.
    size: int
    #: Since when the rank has waited for the others, by the clock of its host; of a rank that has left, when it left.
    at: float


class _AgreedTickets(msgspec.Struct, array_like=True, frozen=True):
    number: int
    tickets: list[str]


def regroup(
    store: Store, rank: int, size: int, *, timeout: timedelta | float = 60, backend: str = "gloo"
) -> dist.ProcessGroup:
    """Form the next default group of a job, when it starts, and each time that a worker has died or joined.

    Every rank calls this: the survivors when a collective, :func:`heal` or training has failed because somebody is
    gone, and the newcomer when it starts. It leaves the group before, and returns when all ranks are in the new one.

    Args:
        store: outlives every rank, and is this job's alone: a ``TCPStore`` of a process that stays, for instance.
        rank: this rank's number in the new group.
        size: how many ranks the new group has. All ranks say the same.
        timeout: how long to wait for the others, and the timeout of the group's own operations: a survivor that waits
            for a dead rank in a collective notices it after this time at the latest.
        backend: as in ``init_process_group``.

    Raises :class:`PeerLost` if some ranks do not come in time, and names them.
    """
    seconds = _arguments.duration(timeout).total_seconds()
    rank, size = _arguments.whole("rank", rank), _arguments.whole("size", size)
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below size, got rank {rank} and size {size}")
    if dist.is_initialized():
        _left.append(dist.group.WORLD)
        dist.destroy_process_group()
    try:
        return _join_next(store, rank, size, seconds, backend)
    except BaseException:
        with suppress(Exception):  # The others shall not count on this rank until it comes again.
            _post(store, rank, _Ticket("", 0, time.time()))
        raise


def _join_next(store: Store, rank: int, size: int, seconds: float, backend: str) -> dist.ProcessGroup:
    until = time.monotonic() + seconds
    while True:
        ticket = _Ticket(f"{rank}-{uuid.uuid4()}", size, _waits_since.setdefault(rank, time.time()))
        _post(store, rank, ticket)
        generation = _await_generation(store, rank, ticket, until, seconds)
        _waits_since.pop(rank, None)
        if not _all_there(store, generation, rank, until, seconds):
            continue
        prefix = PrefixStore(f"generation {generation.number}", store)
        # Torch counts the groups that a process could not form, too, and the count is a part of the next one's name: a
        # newcomer has counted none, and would look for the others under another name for ever.
        c10d._world.group_count = 0
        try:
            dist.init_process_group(
                backend, store=prefix, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
            )
        except RuntimeError as error:
            # Somebody has died just now.
            if time.monotonic() > until:
                raise TransfuseError(f"generation {generation.number} could not be formed: {error}") from error
            continue
        if generation.number > 1:
            logger.warning("rank %d is in generation %d", rank, generation.number)
        group = dist.group.WORLD
        assert group is not None
        return group


def _post(store: Store, rank: int, ticket: _Ticket) -> None:
    store.set(f"ticket {rank}", msgspec.json.encode(ticket).decode())


def _tickets(store: Store, size: int) -> dict[int, _Ticket]:
    """The newest ticket of each rank that has posted one."""
    there = [rank for rank in range(size) if store.check([f"ticket {rank}"])]
    return {rank: msgspec.json.decode(store.get(f"ticket {rank}"), type=_Ticket) for rank in there}


def _current(store: Store) -> tuple[bytes, _AgreedTickets]:
    if not store.check(["generation"]):
        return b"", _AgreedTickets(0, [])
    data = store.get("generation")
    return data, msgspec.json.decode(data, type=_AgreedTickets)


def _await_generation(store: Store, rank: int, mine: _Ticket, until: float, seconds: float) -> _AgreedTickets:
    """The generation that this ticket is in, once there is one."""
    while True:
        data, now = _current(store)
        if mine.name in now.tickets:
            return now
        tickets = _tickets(store, mine.size)
        # A ticket for another size may be one that its rank is about to give up: not all ranks see at the same time
        # that a worker has left.
        coming = {each for each, one in tickets.items() if one.size and one.name not in now.tickets}
        late = [each for each in range(mine.size) if each not in coming or tickets[each].size != mine.size]
        if not late:
            found = _AgreedTickets(now.number + 1, [tickets[each].name for each in range(mine.size)])
            # Only one of the ranks that see this at the same time succeeds, and all see what it has written.
            store.compare_set("generation", data.decode(), msgspec.json.encode(found).decode())
            continue
        if time.monotonic() > until:
            names = ", ".join(map(str, late))
            others = [f"rank {each} says size={tickets[each].size}" for each in late if each in coming]
            why = ", ".join(others) or "were they started again, and do all survivors leave the old group?"
            raise PeerLost(
                late[0], f"ranks {names} have not called regroup() with size={mine.size} in {seconds:g} s: {why}"
            )
        time.sleep(REGROUP_LOOK_SECONDS)


def _all_there(store: Store, generation: _AgreedTickets, rank: int, until: float, seconds: float) -> bool:
    """Wait until all have seen that they are in this generation. False: one has a new ticket, so it was lost."""
    store.set(f"generation {generation.number} has {rank}", "")
    keys = [f"generation {generation.number} has {each}" for each in range(len(generation.tickets))]
    while not store.check(keys):
        tickets = _tickets(store, len(generation.tickets))
        if any(ticket.name not in generation.tickets for ticket in tickets.values()):
            return False
        if time.monotonic() > until:
            lost = next(each for each, key in enumerate(keys) if not store.check([key]))
            raise PeerLost(lost, f"rank {lost} called regroup(), and was lost before the group was formed")
        time.sleep(REGROUP_LOOK_SECONDS)
    return True


def supervise(
    work: Callable[..., object],
    size: int,
    *args: Any,
    restarts: int = 3,
    patience: timedelta | float = 90,
    method: str = "spawn",
) -> None:
    """Run ``work(store, rank, size, *args)`` in ``size`` processes of this host, and start those again that die.

    A rank that ends with another code than 0, or is killed, is started again, ``restarts`` times in all. It calls
    :func:`regroup` then, as the survivors do. A rank that has not come to :func:`regroup` although another one has
    waited there for ``patience`` seconds, in one call or several, is stuck in the old group: it is killed, and started
    again. Let ``patience`` be longer than the timeout of :func:`regroup`: survivors may wait that long for a rank that
    died while the group was formed. Returns when every rank has ended with 0. Raises :class:`TransfuseError`, and ends
    all ranks, when there are no more restarts.

    Args:
        method: how processes start, as in ``multiprocessing.get_context``.
    """
    seconds = _arguments.duration(patience, "patience").total_seconds()
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context: Any = multiprocessing.get_context(method)
    left, since = restarts, dict[int, float]()

    def start(rank: int) -> Any:
        since[rank] = time.time()
        # No daemon: a rank may have processes of its own, as data loaders do.
        process = context.Process(target=_work, args=(work, store.port, rank, size, args))
        process.start()
        return process

    running: dict[int, Any] = {}
    try:
        for rank in range(size):
            running[rank] = start(rank)
        while running:
            multiprocessing.connection.wait(
                [process.sentinel for process in running.values()], timeout=SUPERVISE_LOOK_SECONDS
            )
            for rank in _stuck(store, size, time.time() - seconds):
                if rank in running and since[rank] < time.time() - seconds:
                    logger.warning("rank %d is stuck in the old group, and is ended", rank)
                    running[rank].kill()
                    running[rank].join()
            for rank, process in list(running.items()):
                code = process.exitcode  # Asked once: the process may end between two questions.
                if code == 0:
                    del running[rank]
                elif code is not None:
                    if not left:
                        raise TransfuseError(f"rank {rank} ended with {code}, and all {restarts} restarts are used up")
                    left -= 1
                    logger.warning("rank %d ended with %s: it is started again, %d restarts are left", rank, code, left)
                    running[rank] = start(rank)
    finally:
        for process in running.values():
            process.kill()
        for process in running.values():
            process.join()


def _work(work: Callable[..., object], port: int, rank: int, size: int, args: tuple[Any, ...]) -> None:
    work(TCPStore(HOST, port, is_master=False), rank, size, *args)


def _stuck(store: Store, size: int, before: float) -> list[int]:
    """Ranks that have not come, although some other rank has waited for them since ``before``."""
    _, now = _current(store)
    unused = {rank: ticket for rank, ticket in _tickets(store, size).items() if ticket.name not in now.tickets}
    if not any(ticket.size and ticket.at <= before for ticket in unused.values()):
        return []
    # A rank that has just left with an error may be about to come again.
    come = {rank for rank, ticket in unused.items() if ticket.size or ticket.at > before}
    return [rank for rank in range(size) if rank not in come]
