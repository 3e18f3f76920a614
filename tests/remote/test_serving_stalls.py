"""Readers that stall or die: they hold up training no longer than the timeout, and nothing is left of them."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time

import pytest

import transfuse
from serving import (
    CPU,
    DEADLINE,
    MOMENTS,
    SHORT,
    TOKEN,
    big_state,
    come_in,
    get_ready,
    go_as_far_as,
    nothing_is_left,
    own_files,
    own_tasks,
    some_state,
    wait_until,
)
from transfuse._limits import Limits
from transfuse._remote.ends import Servers
from transfuse._wire.channel import Channel
from transfuse._wire.group import OFFER_TAG, Group
from transfuse._wire.messages import Message
from transfuse.testing.exact import differences
from transfuse.testing.ranks import Fleet


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_who_stalls_or_dies_holds_up_training_no_longer_than_the_timeout(
    fault: int,
) -> None:
    state = big_state()
    with Fleet(len(MOMENTS)) as fleet, transfuse.serve(state, token=TOKEN, timeout=SHORT, max_readers=20) as server:
        assert not differences(state, transfuse.fetch(server.address, token=TOKEN).state)
        tasks, files = own_tasks(), own_files()
        fleet.start(go_as_far_as, server.address, fault)
        for rank in range(len(MOMENTS)):
            fleet.wait_for(rank, "there")
        started = time.monotonic()
        with server.mutating():
            state["model"]["w0"].add_(1)
        # The bound is for a busy machine: it would be as long as a reader's own timeout if nobody looked.
        assert time.monotonic() - started < 15
        for _ in range(3):
            with server.mutating():
                state["model"]["w0"].add_(1)
            assert not differences(state, transfuse.fetch(server.address, token=TOKEN).state)
        wait_until(lambda: not server._listener.connections)
        nothing_is_left(tasks, files)


def test_signs_of_life_alone_buy_no_time() -> None:
    """A reader that says again and again that it works, and takes nothing."""
    with transfuse.serve(some_state(), timeout=SHORT) as server, contextlib.ExitStack() as stack:
        stream = stack.enter_context(contextlib.closing(get_ready(come_in(server.address), server.address)))
        stop = threading.Event()

        def pretend() -> None:
            with Channel(Group(Servers({0: stream}, 1), CPU), 0, 5.0, Limits()) as channel:
                channel.expect(Message.OFFER, tag=OFFER_TAG)
                with contextlib.suppress(transfuse.PeerError):
                    while not stop.wait(0.2):
                        channel.send(Message.WORKING, note=0)
                        channel.settle()
                channel.broken = True

        pretending = threading.Thread(target=pretend, daemon=True)
        pretending.start()
        started = time.monotonic()
        with server.mutating():
            assert time.monotonic() - started < 15
        stop.set()
        pretending.join(DEADLINE)
        assert not differences(some_state(), transfuse.fetch(server.address).state)


@pytest.mark.soak
def test_many_readers_die_and_nothing_is_left_of_them() -> None:
    state = big_state()
    with transfuse.serve(state, token=TOKEN, timeout=SHORT, max_readers=20) as server:
        for turn in range(4):
            with Fleet(len(MOMENTS)) as fleet:
                fleet.start(go_as_far_as, server.address, signal.SIGKILL)
                for rank in range(len(MOMENTS)):
                    fleet.wait_for(rank, "there")
            with server.mutating():
                pass
            assert not differences(state, transfuse.fetch(server.address, token=TOKEN).state)
            wait_until(lambda: not server._listener.connections)
            if turn == 0:
                # The first fleet has started a server of its own to fork from.
                gc.collect()
                tasks, files = own_tasks(), own_files()
        nothing_is_left(tasks, files)
