"""A signal handler that calls what it interrupts: it is refused by name, and nothing is crossed or lost."""

from __future__ import annotations

import itertools
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import transfuse
from keeping import SECONDS, Home, home, until  # noqa: F401
from transfuse._errors import TransfuseError
from transfuse._keeper import client
from transfuse._keeper.client import Keep
from transfuse._keeper.process import Keeper

#: Seconds between two signals.
BETWEEN = 0.003
OnAlarm = Callable[[Callable[[], Any]], None]


@pytest.fixture
def keeper(home: Home) -> Keeper:  # noqa: F811
    return home.start()


@pytest.fixture
def on_alarm() -> Iterator[OnAlarm]:
    """Call something in a signal handler, every few milliseconds."""
    before = signal.getsignal(signal.SIGALRM)

    def start(what: Callable[[], Any]) -> None:
        def handle(number: int, frame: FrameType | None) -> None:
            what()

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, BETWEEN, BETWEEN)

    try:
        yield start
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call(keep: Keep, name: str, step: int) -> None:
    if name == "mutating":
        with keep.mutating():
            pass
    else:
        getattr(keep, name)(*([step] if name == "commit" else []))


@pytest.mark.parametrize("is_caught", [True, False])
def test_calls_inside_a_commit_are_refused_and_nothing_is_lost(
    home: Home,  # noqa: F811
    keeper: Keeper,
    on_alarm: OnAlarm,
    monkeypatch: pytest.MonkeyPatch,
    is_caught: bool,
) -> None:
    """``is_caught``: by the handler. Else the commit that was interrupted ends with it, anywhere."""
    monkeypatch.setattr(client, "KEEP_REVIVE_SECONDS", 0.01)
    # A handler that raises may do so in a finalizer, where Python can only report it. pytest's report is written in
    # Python, so the next signal would end it too, and pytest with it: a method written in C cannot be interrupted.
    monkeypatch.setattr(sys, "unraisablehook", deque[Any](maxlen=0).append)
    state = {"w": torch.zeros(1 << 18)}
    keep = transfuse.keep(lambda: state, run="job", timeout=SECONDS)
    names = itertools.cycle(["commit", "mutating", "restore", "look", "close"])
    refused: list[str] = []
    step = 0

    def handle() -> None:
        if not keep._call._under_way:
            return  # Between two commits nothing is refused.
        name = next(names)
        with pytest.raises(TransfuseError, match=f"{name}.. was called while commit.. is under way") as caught:
            call(keep, name, step)
        refused.append(str(caught.value))
        if not is_caught:
            raise caught.value

    on_alarm(handle)
    while len(refused) < 25:
        step += 1
        state["w"].fill_(step)
        try:
            report = keep.commit(step)
        except TransfuseError:
            assert not is_caught
            continue
        assert report is not None
        assert report.outcome == "committed" or not is_caught
    signal.setitimer(signal.ITIMER_REAL, 0)

    def commits() -> bool:
        nonlocal step
        step += 1
        state["w"].fill_(step)
        report = keep.commit(step)
        return report is not None and report.outcome == "committed"

    until(commits)  # The connection may have been cut in the middle of a word: then it is made anew.
    assert sum(kept.is_written for kept in keeper.books.all()) == 0
    state["w"].zero_()
    assert keep.restore() == step
    assert state["w"].eq(step).all()
    keep.close()
