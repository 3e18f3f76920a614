"""Too few file descriptors are an error that says so: gloo would end the process."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import transfuse
from descriptor_limits import leaving
from moves import CPU
from transfuse.wire.handshake import connect, key_of, split_address
from transfuse.remote.pair_group import READER, PairGroup
from transfuse.testing.ranks import Fleet, ProcessPool
from transfuse.wire import file_descriptors

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=1)
FREE = range(25)
STATE = {"w": torch.arange(100_000.0), "step": 7}

FETCH = file_descriptors.CONTROL + file_descriptors.GROUP + file_descriptors.MARGIN
SERVE = FETCH + file_descriptors.LISTENER


def attempt(address: str | list[str], timeout: timedelta = LONG, *, same_host: bool = True) -> str:
    try:
        assert transfuse.fetch(address, timeout=timeout, same_host=same_host)["w"].equal(STATE["w"])
    except transfuse.TransfuseError as error:
        return f"{type(error).__name__}: {error}"
    return "fetched"


def refusal(purpose: str, needed: int, free: int) -> str:
    return f"LimitExceeded: {purpose} takes {needed} free file descriptors (8 of them to spare), and {free} are free: "


# ------------------------------------------------------------------------------------------------------- the reader


def read(rank: int, addresses: list[str]) -> list[str]:
    ended = []
    for free in FREE:
        with leaving(free):
            assert file_descriptors.free(100) == free
            ended.append(attempt(addresses[0] if len(addresses) == 1 else addresses))
    return ended


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("servers", [1, 2])
def test_a_reader_that_has_too_few_says_so(servers: int) -> None:
    needed = servers * (file_descriptors.CONTROL + file_descriptors.GROUP) + file_descriptors.MARGIN
    purpose = "fetching from a server" if servers == 1 else "fetching from 2 servers at once"
    with contextlib.ExitStack() as stack, Fleet(1) as fleet:
        addresses = [stack.enter_context(transfuse.serve(STATE, step=7)).address for _ in range(servers)]
        fleet.start(read, addresses)
        (ended,) = (outcome.get() for outcome in fleet.outcomes())
    for free in FREE:
        if free < needed:
            assert ended[free].startswith(refusal(purpose, needed, free))
            assert "ulimit -n" in ended[free]
        else:
            assert ended[free] == "fetched"


# ------------------------------------------------------------------------------------------------------- the server


def share(rank: int, value: str | None = None) -> str:
    """What rank 0 says, over connections that are there already."""
    told = [value]
    dist.broadcast_object_list(told, 0)
    assert told[0] is not None
    return told[0]


def serve_and_read(rank: int, same_host: bool) -> list[str]:
    """Rank 0 serves with ever more descriptors, rank 1 reads."""
    ended = []
    server = transfuse.serve(STATE, timeout=LONG) if rank == 0 else None
    address = share(rank, server.address if server else None)
    for free in FREE:
        with leaving(free) if server else contextlib.nullcontext():
            share(rank, "limited")
            if server is None:
                # With none at all it cannot even take the connection.
                ended.append(attempt(address, LONG if free else SHORT, same_host=same_host))
            dist.barrier()
    if server is None:
        ended.append(attempt(address))
    dist.barrier()
    if server is not None:
        server.close()
    return ended


@pytest.mark.parametrize("same_host", [True, False])
def test_a_server_that_has_too_few_tells_the_reader_and_goes_on(same_host: bool) -> None:
    with Fleet(2) as fleet:
        fleet.start(serve_and_read, same_host)
        _, ended = (outcome.get() for outcome in fleet.outcomes())
    assert ended[0].startswith("PeerTimeout: ")
    needed = file_descriptors.GROUP + file_descriptors.MARGIN
    for free in FREE[1:]:
        if free < FETCH:
            # The door takes one.
            assert refusal("serving a reader", needed, free - 1) in ended[free]
            assert ended[free].startswith("PeerRefused: ")
        else:
            assert ended[free] == "fetched"
    assert ended[-1] == "fetched"


def start(rank: int) -> list[str]:
    ended = []
    for free in FREE:
        with leaving(free):
            try:
                transfuse.serve(STATE).close()
                ended.append("served")
            except transfuse.LimitExceeded as error:
                ended.append(f"LimitExceeded: {error}")
    return ended


def test_a_server_that_could_serve_nobody_does_not_start() -> None:
    with Fleet(1) as fleet:
        fleet.start(start)
        (ended,) = (outcome.get() for outcome in fleet.outcomes())
    assert ended[SERVE:] == ["served"] * (len(FREE) - SERVE)
    for free in range(SERVE):
        assert ended[free].startswith(refusal("serving a state", SERVE, free))


def crowd_in(rank: int) -> str:
    """Rank 1 is a reader that takes its time, and strangers come while gloo waits for it."""
    server = transfuse.serve(STATE, timeout=LONG) if rank == 0 else None
    address = share(rank, server.address if server else None)
    ended = ""
    with leaving(FETCH) if server else contextlib.nullcontext(), contextlib.ExitStack() as stack:
        share(rank, "limited")
        if server is None:
            door = connect(address, key_of(None), 30.0, 0)
            stack.callback(door.close)
            # gloo's address: it has opened what it opens before it connects.
            assert door._socket.recv(1, socket.MSG_PEEK)
            for _ in range(40):
                stack.enter_context(socket.create_connection(split_address(address)))
            time.sleep(0.5)  # For the server to take as many as it likes.
            PairGroup(door, READER, 30.0, most_waits=0).close()
            stack.close()
            ended = attempt(address)
        dist.barrier()
    if server is not None:
        server.close()
    return ended


def test_strangers_do_not_take_what_gloo_needs() -> None:
    with Fleet(2) as fleet:
        fleet.start(crowd_in)
        assert [outcome.get() for outcome in fleet.outcomes()] == ["", "fetched"]


# -------------------------------------------------------------------------------------------------------- the counts


def exactly(rank: int, same_host: bool) -> list[str]:
    """Rank 0 serves and rank 1 reads, each with what it is said to take and nothing to spare."""
    setattr(file_descriptors, "MARGIN", 0)  # noqa: B010 - it is a constant
    server = transfuse.serve(STATE, timeout=LONG) if rank == 0 else None
    address = share(rank, server.address if server else None)
    ended = []
    for limited in (0, 1) * 4:
        with (
            leaving(file_descriptors.CONTROL + file_descriptors.GROUP) if rank == limited else contextlib.nullcontext()
        ):
            dist.barrier()
            if server is None:
                ended.append(attempt(address, same_host=same_host))
            dist.barrier()
            # Its end of the group goes in a thread of its own.
            while server is not None and server._listener.connections:
                time.sleep(0.01)
    if server is not None:
        server.close()
    return ended


@pytest.mark.parametrize("same_host", [True, False])
def test_a_group_takes_no_more_than_is_said(same_host: bool) -> None:
    with Fleet(2) as fleet:
        fleet.start(exactly, same_host)
        _, ended = (outcome.get() for outcome in fleet.outcomes())
    assert ended == ["fetched"] * 8


def keep_and_fork(rank: int) -> list[bool]:
    seen = []
    with leaving(12):
        (kept,) = file_descriptors.keep(4, "a test")
        seen.append(file_descriptors.spare())
        with pytest.raises(transfuse.LimitExceeded, match="12 are free, of which 4 are reserved"):
            file_descriptors.keep(1, "another")
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            seen.append(file_descriptors.spare())
            child = os.fork()
            if not child:
                os._exit(file_descriptors.spare())
            seen.append(bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
            kept.give_back()
            kept.give_back()
            seen.append(file_descriptors.spare())
        file_descriptors.check(4, "a test")
    return seen


def test_what_is_kept_is_nobody_elses_until_it_is_given_back() -> None:
    with Fleet(1) as fleet:
        fleet.start(keep_and_fork)
        assert [outcome.get() for outcome in fleet.outcomes()] == [[True, False, True, True]]


# --------------------------------------------------------------------------------------------------- within the group


def transfer(rank: int, same_host: bool) -> str:
    def move() -> str:
        transport = transfuse.PGTransport(cast(Any, dist.group.WORLD), LONG, CPU, same_host=same_host)
        if rank == 0:
            transport.send_checkpoint([1], STATE)
            return "sent"
        return "received" if transport.recv_checkpoint(0)["w"].equal(STATE["w"]) else "wrong"

    move()  # torch and numpy import some of their modules when they are first needed: that opens files.
    with leaving(0):
        return move()


@pytest.mark.parametrize("same_host", [True, False])
def test_a_transfer_within_a_group_needs_none(same_host: bool, pool4: ProcessPool) -> None:
    outcomes = pool4.run(transfer, same_host, ranks=[0, 1])
    assert [outcome.get() for outcome in outcomes] == ["sent", "received"]
