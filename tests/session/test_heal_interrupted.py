"""Ctrl-C at any moment of heal(): the other ranks are told at once, and nothing of it is taken for a later call's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import transfuse
from interrupts import HEAL, Interrupt
from transfuse._errors import StateError, TransfuseError
from transfuse.testing.ranks import Outcome, Ranks

#: Far longer than anything takes: a rank that is not told waits for this long.
TIMEOUT = 40.0
SOURCE, BEHIND = 0, 2


def move(ranks: Ranks, value: float, victim: int, interrupt: Interrupt | None) -> list[Outcome[Any]]:
    """Two ranks at step 7 heal a third one; each rank returns its weights."""
    states = [{"w": torch.full((1000,), each), "b": torch.full((3,), each)} for each in (value, value, -1.0)]

    def work(rank: int, pg: Any) -> Any:
        def call() -> None:
            step = None if rank == BEHIND else 7
            assert transfuse.heal(lambda: states[rank], step=step, group=pg, timeout=TIMEOUT) == 7

        if interrupt is not None and rank == victim:
            with interrupt.armed():
                call()
        else:
            call()
        return states[rank]["w"]

    return ranks.outcomes(work, deadline=3 * TIMEOUT)


def is_of_no_more_use(error: BaseException | None) -> bool:
    return isinstance(error, TransfuseError) and "make a new group" in str(error)


def interrupt_at(victim: int, places: Iterator[int]) -> int:
    """Interrupt one rank at each of these places until there are no more; how often that was."""
    ranks, done = Ranks(3, timeout=TIMEOUT).__enter__(), 0
    for place in places:
        interrupt = Interrupt(place, HEAL)
        outcomes = move(ranks, float(place), victim, interrupt)
        if not interrupt.where:
            break
        done += 1
        what = f"interrupted at place {place}, {interrupt.where}: {[outcome.error for outcome in outcomes]}"
        assert isinstance(outcomes.pop(victim).error, (KeyboardInterrupt, TransfuseError)), what
        for other in outcomes:
            # A rank that was interrupted when all was done has told the others so before.
            assert other.error is None or (type(other.error) is StateError and "Interrupt" in str(other.error)), what
            assert other.seconds < TIMEOUT / 2, what
        again = move(ranks, 0.5, victim, None)
        if all(is_of_no_more_use(outcome.error) for outcome in again):
            ranks = Ranks(3, timeout=TIMEOUT).__enter__()
            continue
        for outcome in again:
            assert outcome.error is None, what
            assert torch.equal(outcome.get(), torch.full((1000,), 0.5)), what
    return done


def places_in(victim: int) -> int:
    counting = Interrupt(call=HEAL)
    with Ranks(3, timeout=TIMEOUT) as ranks:
        for outcome in move(ranks, 1.0, victim, counting):
            assert outcome.error is None
    return counting.count


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("victim", [SOURCE, BEHIND], ids=["source", "behind"])
def test_interrupted_at_some_places(victim: int) -> None:
    """Before the transfer, in the first round. Later places move from run to run: those are in soak."""
    assert places_in(victim) > 400
    assert interrupt_at(victim, iter([1, 30, 83, 140])) == 4
    assert "transfuse-roll-call-pulse" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.soak
@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("victim", [SOURCE, BEHIND], ids=["source", "behind"])
def test_interrupted_at_every_place(victim: int) -> None:
    assert interrupt_at(victim, iter(range(1, 1_000_000, 7))) > 50
