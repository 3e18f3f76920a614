"""Too few file descriptors are an error that says so, and nothing else suffers."""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import transfuse
from descriptor_limits import leaving
from moves import CPU
from serving import wait_until
from transfuse._wire.handshake import split_address
from transfuse.testing.ranks import Fleet, ProcessPool

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=1)
FREE = range(8)
STATE = {"w": torch.arange(100_000.0), "step": 7}
NONE_FREE = "takes a file descriptor, and none is free: raise the limit of the process (ulimit -n, now "


def attempt(address: str | list[str], timeout: timedelta = LONG, *, same_host: bool = True) -> str:
    try:
        assert transfuse.fetch(address, timeout=timeout, same_host=same_host).state["w"].equal(STATE["w"])
    except transfuse.TransfuseError as error:
        return f"{type(error).__name__}: {error}"
    return "fetched"


def read(rank: int, addresses: list[str]) -> list[str]:
    attempt(addresses)  # torch and numpy import some of their modules when they are first needed: that opens files.
    ended = []
    for free in FREE:
        with leaving(free):
            ended.append(attempt(addresses[0] if len(addresses) == 1 else addresses))
    return ended


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("servers", [1, 2])
def test_a_reader_that_has_too_few_says_so(servers: int) -> None:
    """With enough for one of two servers, it goes on with that one."""
    with contextlib.ExitStack() as stack, Fleet(1) as fleet:
        addresses = [stack.enter_context(transfuse.serve(STATE, step=7)).address for _ in range(servers)]
        fleet.start(read, addresses)
        (ended,) = (outcome.get() for outcome in fleet.outcomes())
    assert NONE_FREE in ended[0]
    assert ended[servers + 1 :] == ["fetched"] * (len(FREE) - servers - 1)


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
    if server is None:
        attempt(address, same_host=same_host)
    for free in FREE:
        dist.barrier()
        if server is not None:  # The last reader's connection would be one more, as soon as it is closed.
            wait_until(lambda: not server._listener.connections)
        with leaving(free) if server else contextlib.nullcontext():
            share(rank, "limited")
            if server is None:
                # Linux has reserved one for the next connection: that one is a stranger's. With none besides, the
                # server cannot take the reader's.
                stranger = contextlib.nullcontext() if free else socket.create_connection(split_address(address))
                with stranger:
                    ended.append(attempt(address, LONG if free else SHORT, same_host=same_host))
            dist.barrier()
    if server is None:
        ended.append(attempt(address))
    dist.barrier()
    if server is not None:
        server.close()
    return ended


@pytest.mark.parametrize("same_host", [True, False])
def test_a_server_that_has_too_few_goes_on(same_host: bool) -> None:
    with Fleet(2) as fleet:
        fleet.start(serve_and_read, same_host)
        _, ended = (outcome.get() for outcome in fleet.outcomes())
    assert ended[0].startswith("PeerTimeout: ")
    assert ended[1:] == ["fetched"] * len(FREE)


def start(rank: int) -> list[str]:
    ended = []
    for free in (0, 1):
        with leaving(free):
            try:
                transfuse.serve(STATE).close()
                ended.append("served")
            except transfuse.LimitExceeded as error:
                ended.append(str(error))
    return ended


def test_a_server_that_cannot_listen_says_so() -> None:
    with Fleet(1) as fleet:
        fleet.start(start)
        (ended,) = (outcome.get() for outcome in fleet.outcomes())
    assert NONE_FREE in ended[0]
    assert ended[1] == "served"


def transfer(rank: int, same_host: bool) -> str:
    def move() -> str:
        transport = transfuse.PGTransport(cast(Any, dist.group.WORLD), LONG, CPU, same_host=same_host)
        with transport:
            if rank == 0:
                transport.send_checkpoint([1], STATE)
                return "sent"
            return "received" if transport.recv_checkpoint(0)["w"].equal(STATE["w"]) else "wrong"

    move()  # torch and numpy import some of their modules when they are first needed: that opens files.
    with leaving(0):
        return move()


@pytest.mark.parametrize("same_host", [True, False])
def test_a_transfer_within_a_group_needs_none(same_host: bool, pool4: ProcessPool) -> None:
    """Without one for a stream, its bytes go over the group."""
    outcomes = pool4.run(transfer, same_host, ranks=[0, 1])
    assert [outcome.get() for outcome in outcomes] == ["sent", "received"]
