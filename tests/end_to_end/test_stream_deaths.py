"""Ends of a stream that are killed, frozen, forked or interrupted in the middle of a transfer."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest

from one_transport import STATE_BYTES, Ended, Left, both, fork_midway, left, look, move, set_up
from transfuse.testing.ranks import Fleet
from wires import over_streams

pytestmark = pytest.mark.timeout(200)

SECONDS = 3.0
#: So slow that a transfer takes two seconds.
SLOWLY = {"max_bytes_per_second": STATE_BYTES / 2}
ENDS = pytest.mark.parametrize("end", [0, 1], ids=["source", "receiver"])
LANES = pytest.mark.parametrize("lanes", [1, 3])


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(2) as fleet:
        yield fleet


def begin(fleet: Fleet, seconds: float = SECONDS, **options: object) -> None:
    """One good transfer, and one that is in the middle."""
    both(fleet, set_up, seconds, {**SLOWLY, **options})
    ended_well(both(fleet, move, 0))
    both(fleet, look)
    fleet.start(move, 1)
    fleet.wait_for(1, "moving", 30)


def ended_well(ended: list[Ended]) -> None:
    for one in ended:
        assert (one.error, one.wrong) == (None, []), one.text


def nothing_is_left(fleet: Fleet, *ranks: int) -> None:
    fleet.start(left, 10.0, ranks=ranks)
    for outcome in fleet.outcomes(30, ranks):
        assert outcome.get() == Left(0, 0, canaries=False, written=False)


@ENDS
@LANES
def test_an_end_that_is_killed(fleet: Fleet, end: int, lanes: int) -> None:
    """The other one learns of it at once, long before its timeout."""
    begin(fleet, 60.0, lanes=lanes)
    fleet.kill(end)
    killed = time.monotonic()
    (ended,) = [outcome.get() for outcome in fleet.outcomes(50, [1 - end])]
    assert ended.error == "PeerLost", ended
    assert ended.at - killed < 20
    nothing_is_left(fleet, 1 - end)


@ENDS
@LANES
def test_an_end_that_is_frozen(fleet: Fleet, end: int, lanes: int) -> None:
    """The other one waits for its timeout, and no longer. Then nothing is written, also when the first one wakes up."""
    begin(fleet, lanes=lanes)
    fleet.freeze(end)
    frozen = time.monotonic()
    (ended,) = [outcome.get() for outcome in fleet.outcomes(60, [1 - end])]
    assert ended.error == "PeerTimeout", ended
    assert 0.8 * SECONDS < ended.at - frozen < SECONDS + 10
    fleet.start(left, 5.0, ranks=[1 - end])
    fleet.thaw(end)
    found = fleet.outcomes(60)
    other, seen = found[end].get(), found[1 - end].get()
    assert other.error in ("PeerTimeout", "PeerLost", "PeerRefused"), other
    assert not seen.canaries
    assert not seen.written
    if over_streams():
        nothing_is_left(fleet, 0, 1)
        ended_well(both(fleet, move, 2))


@ENDS
def test_an_end_that_is_frozen_for_less_than_the_timeout_is_waited_for(fleet: Fleet, end: int) -> None:
    begin(fleet, 12.0)
    fleet.freeze(end)
    time.sleep(4.0)
    fleet.thaw(end)
    ended_well([outcome.get() for outcome in fleet.outcomes(60)])


@ENDS
def test_a_fork_in_the_middle_disturbs_nobody(fleet: Fleet, end: int) -> None:
    both(fleet, set_up, 10.0, SLOWLY)
    ended_well(both(fleet, move, 0))
    both(fleet, fork_midway, 10.0)
    for seed in (1, 2):
        ended_well(both(fleet, move, seed))


@pytest.mark.usefixtures("needs_streams")
@ENDS
def test_a_child_does_not_hide_the_death_of_its_parent(fleet: Fleet, end: int) -> None:
    """It has copies of all descriptors of its parent but the streams: their other ends learn that they are closed."""
    both(fleet, set_up, 60.0, SLOWLY)
    fleet.start(fork_midway, 40.0, ranks=[end])
    for outcome in fleet.outcomes(30, [end]):
        outcome.get()
    fleet.start(move, 1)
    fleet.wait_for(end, "forked", 30)
    fleet.kill(end)
    killed = time.monotonic()
    (ended,) = [outcome.get() for outcome in fleet.outcomes(50, [1 - end])]
    assert ended.error == "PeerLost", ended
    assert ended.at - killed < 20


# ----------------------------------------------------------------------------------------------------------- interrupts

TOLD = ("PeerRefused", "PeerLost", "KeyboardInterrupt")


def interrupts_at_random(fleet: Fleet, end: int, times: int, seed: int, **options: object) -> None:
    """Ctrl-C at one end, at any moment, again and again. Each time the other end is told, and the next one succeeds."""
    chance = random.Random(seed)
    both(fleet, set_up, 20.0, {"max_bytes_per_second": 4 * STATE_BYTES, **options})
    ended_well(both(fleet, move, 0))
    both(fleet, look)
    interrupted = 0
    for number in range(times):
        fleet.start(move, number)
        time.sleep(chance.random() * 0.4)
        began = time.monotonic()
        fleet.signal(end, signal.SIGINT)
        ended = [outcome.get() for outcome in fleet.outcomes(60)]
        for one in ended:
            assert one.at - began < 15, one
        mine, other = ended[end], ended[1 - end]
        assert mine.error in ("KeyboardInterrupt", None), mine
        if mine.error is None:
            assert other.error is None, other  # It came too late.
        else:
            interrupted += 1
            assert other.error in (None, *TOLD), other
            assert other.wrong == []
        nothing_is_left(fleet, 0, 1)
        ended_well(both(fleet, move, 1000 + number))
    assert interrupted


@ENDS
@LANES
def test_interrupts_at_random_moments(fleet: Fleet, end: int, lanes: int) -> None:
    interrupts_at_random(fleet, end, 6, seed=end, lanes=lanes)


@pytest.mark.soak
@ENDS
@LANES
@pytest.mark.parametrize("seed", range(4))
def test_many_interrupts_at_random_moments(fleet: Fleet, end: int, lanes: int, seed: int) -> None:
    interrupts_at_random(fleet, end, 60, seed=seed, lanes=lanes)
