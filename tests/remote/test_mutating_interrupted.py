"""Ctrl-C at any moment of ``mutating()``: the state is not locked for good, and no reader gets an old step's number."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import transfuse
from interrupts import Interrupt
from transfuse.testing.ranks.threads import in_threads

MUTATING = ("server.py", "mutating")
#: Far longer than anything takes.
TIMEOUT = 40.0


class Training:
    def __init__(self) -> None:
        self.weight, self.step = torch.zeros(10), 0
        self.server = transfuse.serve(
            lambda: {"w": self.weight, "n": self.step}, step=lambda: self.step, timeout=TIMEOUT
        )

    def change(self) -> None:
        with self.server.mutating():
            self.weight += 1
            self.step += 1

    def interrupted(self, interrupt: Interrupt) -> None:
        with interrupt.armed():
            self.change()


def elsewhere(call: Any) -> Any:
    """What a call in another thread returns or raises."""
    (outcome,) = in_threads({0: call}, TIMEOUT).values()
    return outcome.error or outcome.value


def interrupt_at(places: range) -> int:
    done = 0
    for place in places:
        training, interrupt = Training(), Interrupt(place, MUTATING)
        error = elsewhere(lambda: training.interrupted(interrupt))  # noqa: B023
        if not interrupt.where:
            training.server.close()
            break
        done += 1
        assert isinstance(error, (KeyboardInterrupt, RuntimeError)), (interrupt.where, error)
        del error  # Its frames may hold the block.
        gc.collect()
        held = training.step
        state = elsewhere(lambda: transfuse.fetch(training.server.address, timeout=TIMEOUT / 4).state)  # noqa: B023
        if isinstance(state, transfuse.TransfuseError):
            assert "interrupted" in str(state), (interrupt.where, state)
        else:
            assert state["w"].tolist() == [state["n"]] * 10 == [held] * 10, (interrupt.where, state)
        assert elsewhere(training.change) is None, interrupt.where
        state = transfuse.fetch(training.server.address, step=held + 1).state
        assert state["w"].tolist() == [state["n"]] * 10, interrupt.where
        training.server.close()
    return done


def test_interrupted_at_some_places() -> None:
    assert interrupt_at(range(1, 1000, 5)) > 5


@pytest.mark.soak
def test_interrupted_at_every_place() -> None:
    assert interrupt_at(range(1, 1000)) > 50


def test_an_interrupted_callable_does_not_leave_an_old_step_beside_new_weights() -> None:
    weight, steps = torch.zeros(3), [0]

    def state() -> dict[str, torch.Tensor]:
        if steps[-1] == 1:
            raise KeyboardInterrupt
        return {"w": weight}

    with transfuse.serve(state, step=lambda: steps[-1], timeout=TIMEOUT) as server:
        steps.append(1)
        with pytest.raises(KeyboardInterrupt), server.mutating():
            weight += 1
        with pytest.raises(transfuse.TransfuseError, match="interrupted"):
            transfuse.fetch(server.address)
        with server.mutating():
            weight += 1
            steps.append(2)
        assert transfuse.fetch(server.address, step=2).state["w"].tolist() == [2.0] * 3
