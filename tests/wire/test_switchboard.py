"""One switchboard for each process group: found by the group, gone with it, and kept while something is left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch

from transfuse._limits import Limits
from transfuse._wire import switchboard
from transfuse._wire.channel import Channel
from transfuse._wire.group import Group
from transfuse._wire.switchboard import PendingOffer, switchboard_of

CPU = torch.device("cpu")


class Nowhere:
    """A group of which only the identity matters."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        raise RuntimeError("nobody is there")

    recv = send


class PairGroup(Nowhere):
    outlives_waits = True


class Word:
    """A receive that brings what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> torch.Tensor:
        assert self.come.wait(10)
        if self.error is not None:
            raise self.error
        return torch.tensor([7], dtype=torch.uint8)


def test_transports_on_one_group_share_its_switchboard() -> None:
    one, two = Nowhere(), Nowhere()
    assert Group(one, CPU).switchboard is Group(one, CPU).switchboard
    first, second = Group(one, CPU), Group(two, CPU)
    assert first.switchboard is not second.switchboard
    assert Channel(first, 3, 1.0, Limits()).group.switchboard is switchboard_of(one)


def test_a_switchboard_goes_with_its_group() -> None:
    """At once: a group's memory is not to wait until garbage is collected. Nor has the next group its switchboard."""
    gc.disable()
    try:
        seen: set[int] = set()
        for count in range(1000):
            if len(seen) < count:
                break  # A group has had the id of an earlier one.
            pg = Nowhere()
            group = Group(pg, CPU)
            assert group.switchboard.pg is pg
            with Channel(group, 0, 1.0, Limits()):
                pass
            alive, known = weakref.ref(pg), weakref.ref(group.switchboard)
            seen.add(id(pg))
            del pg, group
            assert alive() is None
            assert known() is None
        assert len(seen) < 1000, "ids were not reused: this has shown nothing"
    finally:
        gc.enable()


@pytest.mark.parametrize("left", ["a thread", "memory", "a receive"])
def test_a_switchboard_stays_while_something_is_left_behind(left: str) -> None:
    pg = Nowhere() if left == "a thread" else PairGroup()
    found = switchboard_of(pg)
    channel, word = object(), PendingOffer(Word(), 1, "first")
    before = switchboard.leftovers().left_behind
    if left == "a thread":
        found.pin()
    elif left == "memory":
        found.leave_behind(channel)
    else:
        found.park(word)
    number = id(found)
    del found
    gc.collect()
    found = switchboard_of(pg)
    assert id(found) == number
    if left == "a thread":
        return
    if left == "memory":
        assert switchboard.leftovers().left_behind == before + 1
        found.forget(channel)
    else:
        assert found.adopt(1, "second") is word
    gone = weakref.ref(found)
    del found
    assert gone() is None


def test_receives_are_handed_on_in_their_order_and_to_their_peer() -> None:
    found = switchboard_of(PairGroup())
    words = [PendingOffer(Word(), peer, "first") for peer in (1, 2, 1)]
    for word in reversed(words):
        found.park(word)
        found.park(word)  # It is there once.
    assert found.adopt(3, "me") is None
    assert found.adopt(1, "me") is words[0]
    assert found.adopt(1, "me") is words[2]
    assert found.adopt(1, "me") is None
    assert found.adopt(2, "me") is words[1]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_left_receive_brings_is_kept_unless_it_is_a_failure(fails: bool) -> None:
    pg, posted = PairGroup(), Word()
    posted.error = RuntimeError("closed") if fails else None
    word = PendingOffer(posted, 1, "first")
    switchboard_of(pg).park(word)
    posted.come.set()
    word.wait()
    assert not switchboard_of(pg).release(word, "first")
    adopted = switchboard_of(pg).adopt(1, "second")
    assert (adopted is None) == fails
    if adopted is not None:
        adopted.wait_for("second")
        assert switchboard_of(pg).release(adopted, "second")
        assert adopted.data == b"\x07"


def test_a_watch_runs_while_there_is_a_conversation() -> None:
    group = Group(Nowhere(), CPU)
    for _ in range(3):
        with Channel(group, 0, 1.0, Limits()) as first:
            with Channel(group, 1, 1.0, Limits()):
                assert len(group.switchboard.watch) == 2
            assert len(group.switchboard.watch) == 1
            group.switchboard.watch.remove(first)
            assert not len(group.switchboard.watch)
    while any(thread.name == "transfuse-watch" for thread in threading.enumerate()):  # It stays for a moment.
        time.sleep(0.1)


def test_a_child_of_a_fork_finds_no_lock_held_and_no_watch() -> None:
    group = Group(Nowhere(), CPU)
    with (
        group.turn(Channel(group, 1, 1.0, Limits()), 0),
        Channel(group, 1, 1.0, Limits()),
        group.switchboard._lock,
        switchboard._finding,
    ):
        child = os.fork()
        if not child:
            code = 1
            with suppress(BaseException):
                channel = Channel(group, 1, 1.0, Limits())
                with group.turn(channel, 0), channel:
                    assert len(group.switchboard.watch) == 1
                    assert switchboard_of(group.pg) is group.switchboard
                    group.switchboard.loop()
                code = 0
            os._exit(code)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0
            return
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child is stuck")
