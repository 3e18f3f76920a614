"""Ctrl-C at any moment of a send or a receive: the other end is told, and the next transfer is good."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import transfuse
from interrupts import Interrupt
from moves import CPU
from transfuse import _workers
from transfuse._errors import PeerRefused, SendFailed, TransfuseError
from transfuse._wire.switchboard import PendingOffer
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Outcome, Ranks

#: Far longer than anything takes: an end that is not told waits for this long.
TIMEOUT = 40.0
SOURCE, RECEIVER = 0, 1


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, timeout=TIMEOUT) as two:
        yield two


def some_state(value: float) -> dict[str, Any]:
    model = OrderedDict((f"w{i}", torch.full((100,), value + i)) for i in range(3))
    model._metadata = {"version": 1}  # type: ignore[attr-defined]
    return {"model": model, "step": 7, "name": "x"}


class Two:
    """A source and a receiver in place, which stay for all transfers."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.target = some_state(-9.0)
        self._source = transfuse.PGTransport(ranks.pgs[SOURCE], TIMEOUT, CPU)
        self._receiver = transfuse.PGTransport(ranks.pgs[RECEIVER], TIMEOUT, CPU, lambda: self.target)

    def move(self, state: Any, at: dict[int, Interrupt]) -> list[Outcome[Any]]:
        def work(rank: int, _: Any) -> Any:
            interrupt = at.get(rank)
            if interrupt is None:
                return self._call(rank, state)
            with interrupt.armed():
                return self._call(rank, state)

        return self._ranks.outcomes(work, deadline=2 * TIMEOUT)

    def _call(self, rank: int, state: Any) -> Any:
        if rank == SOURCE:
            return self._source.send_checkpoint(RECEIVER, state)
        return self._receiver.recv_checkpoint(SOURCE)


def _is_told(error: BaseException | None) -> bool:
    """Whether the end that was not interrupted ended well, or knows that the other one was interrupted."""
    if isinstance(error, SendFailed):
        return all(map(_is_told, error.causes.values()))
    return error is None or (isinstance(error, PeerRefused) and error.kind == "KeyboardInterrupt")


def interrupt_at(ranks: Ranks, end: int, places: Iterator[int]) -> int:
    """Interrupt one end at each of these places until there are no more; how often that was."""
    two, done = Two(ranks), 0
    for place in places:
        interrupt = Interrupt(place)
        outcomes = two.move(some_state(float(place)), {end: interrupt})
        if not interrupt.where:
            assert_exact(some_state(float(place)), outcomes[RECEIVER].get(), in_place=True)
            break
        done += 1
        own, other = outcomes[end], outcomes[1 - end]
        what = f"interrupted at place {place}, {interrupt.where}: {own.error!r} and {other.error!r}"
        assert isinstance(own.error, (KeyboardInterrupt, TransfuseError)), what
        assert _is_told(other.error), what
        assert other.seconds < TIMEOUT / 2, what
        sent, received = two.move(some_state(0.5), {})
        assert sent.error is None, what
        assert_exact(some_state(0.5), received.get(), in_place=True)
    return done


def places_in(ranks: Ranks, end: int) -> int:
    counting = Interrupt()
    for outcome in Two(ranks).move(some_state(1.0), {end: counting}):
        assert outcome.error is None
    return counting.count


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("end", [SOURCE, RECEIVER], ids=["source", "receiver"])
def test_interrupted_at_some_places(ranks: Ranks, end: int) -> None:
    all_places = places_in(ranks, end)
    assert all_places > 100
    few = [1, 2, 3, 5, 8, *range(13, all_places // 2, all_places // 24)]
    assert interrupt_at(ranks, end, iter(few)) >= 10


@pytest.mark.soak
@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("end", [SOURCE, RECEIVER], ids=["source", "receiver"])
def test_interrupted_at_every_place(ranks: Ranks, end: int) -> None:
    assert interrupt_at(ranks, end, iter(range(1, 1_000_000))) > 100


def test_a_receiver_that_left_before_the_offer_tells_the_source(ranks: Ranks) -> None:
    gone = threading.Event()

    def leave(_: Any) -> None:
        raise KeyboardInterrupt

    def work(rank: int, pg: Any) -> Any:
        if rank == SOURCE:
            assert gone.wait(TIMEOUT)
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint(RECEIVER, some_state(1.0))
        try:
            return transfuse.PGTransport(pg, TIMEOUT, CPU, progress=leave).recv_checkpoint(SOURCE)
        finally:
            gone.set()

    sent, received = ranks.outcomes(work, deadline=2 * TIMEOUT)
    assert isinstance(received.error, KeyboardInterrupt)
    assert isinstance(sent.error, SendFailed)
    assert _is_told(sent.error)
    sent, received = Two(ranks).move(some_state(2.0), {})
    assert_exact(some_state(2.0), received.get(), in_place=True)


def test_interrupted_twice_before_the_offer(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next receive gets the offer, and not the thread that the interrupted one has left behind."""
    waits, left, wait = threading.Event(), threading.Event(), PendingOffer.wait

    def wait_and_say_so(word: PendingOffer) -> None:
        waits.set()
        wait(word)

    def leave() -> None:
        assert waits.wait(TIMEOUT)
        raise KeyboardInterrupt

    monkeypatch.setattr(PendingOffer, "wait", wait_and_say_so)

    def work(rank: int, pg: Any) -> Any:
        transport = transfuse.PGTransport(pg, TIMEOUT, CPU)
        if rank == SOURCE:
            assert left.wait(TIMEOUT)
            return transport.send_checkpoint(RECEIVER, some_state(1.0))
        with pytest.raises(KeyboardInterrupt):
            transport.receive(SOURCE, watch=leave)
        left.set()
        return transport.recv_checkpoint(SOURCE)

    sent, received = ranks.outcomes(work, deadline=2 * TIMEOUT)
    assert_exact(some_state(1.0), received.get())
    assert sent.error is None


def test_an_error_of_progress_after_everything_has_arrived_says_so(ranks: Ranks) -> None:
    target = some_state(-1.0)

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if all(one.phase == "done" for one in progress.values()):
            raise ValueError("the last word")

    def work(rank: int, pg: Any) -> Any:
        if rank == SOURCE:
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint(RECEIVER, some_state(1.0))
        return transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target, progress=show).recv_checkpoint(SOURCE)

    sent, received = ranks.outcomes(work)
    assert sent.error is None
    assert isinstance(received.error, ValueError)
    assert any("the targets hold the new state" in note for note in received.error.__notes__)
    assert_exact(some_state(1.0)["model"]["w1"], target["model"]["w1"])


def test_a_second_interrupt_tells_nobody_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver would take a second refusal for the answer to its next receive."""
    run, interrupts = _workers.run, iter([KeyboardInterrupt("the second")])

    def run_but_once(work: Callable[[_workers.Job], object], name: str) -> _workers.Job:
        if name == "transfuse-peer-2" and (interrupt := next(interrupts, None)) is not None:
            raise interrupt
        return run(work, name)

    def gone() -> Any:
        raise KeyboardInterrupt("the first")

    with Ranks(3, timeout=TIMEOUT) as three:
        transports = [transfuse.PGTransport(pg, TIMEOUT, CPU) for pg in three.pgs]
        monkeypatch.setattr(_workers, "run", run_but_once)

        def move(rank: int, state: Any) -> Any:
            if rank == SOURCE:
                return transports[rank].send([1, 2], state)
            return transports[rank].recv_checkpoint(SOURCE)

        sent, *received = three.outcomes(lambda rank, _: move(rank, gone), deadline=2 * TIMEOUT)
        assert isinstance(sent.error, KeyboardInterrupt)
        assert all(_is_told(one.error) and one.error is not None for one in received), received
        assert next(interrupts, None) is None
        sent, *received = three.outcomes(lambda rank, _: move(rank, lambda: some_state(3.0)), deadline=2 * TIMEOUT)
        for one in received:
            assert_exact(some_state(3.0), one.get())
        assert sent.error is None
