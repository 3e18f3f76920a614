"""A cap on the source's rate: held by both routes, shared by receivers, and never in the way of stopping."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import transfuse
from moves import CPU, pair
from transfuse._limits import Limits
from transfuse._sizes import Sizes
from transfuse._wire.rate_limit import RateLimit
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Ranks

TIMEOUT = timedelta(seconds=10)


class Clock:
    """Time that passes only in sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("transfuse._wire.rate_limit.time", clock)
    return clock


def test_bytes_go_at_the_rate(clock: Clock) -> None:
    rate_limit = RateLimit(1000.0)
    for _ in range(50):
        rate_limit.take(100)
    assert clock.now - 1000.0 == pytest.approx(5.0, rel=0.02)


def test_a_pause_is_hardly_made_up_for(clock: Clock) -> None:
    rate_limit = RateLimit(1000.0)
    clock.now += 60
    for _ in range(10):
        rate_limit.take(100)
    assert clock.now - 1060.0 == pytest.approx(1.0, rel=0.06)


def test_without_a_rate_nothing_waits(clock: Clock) -> None:
    RateLimit(None).take(1 << 40)
    assert clock.now == 1000.0


def test_a_rate_makes_small_portions() -> None:
    assert RateLimit(None).at_once(100) == 100
    assert RateLimit(1000.0).at_once(100) == 50
    assert RateLimit(1.0).at_once(100) == 1


def test_who_stops_does_not_wait(clock: Clock) -> None:
    RateLimit(1.0).take(1000, lambda: clock.now > 1000.2)
    assert clock.now < 1001


def test_threads_share_one_rate() -> None:
    rate_limit, started = RateLimit(1e6), time.monotonic()

    def take() -> None:
        for _ in range(10):
            rate_limit.take(10_000)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started >= 0.3, "400 kB at 1 MB/s, less the credit"


@pytest.mark.parametrize(
    ("same_host", "receivers"),
    [([True], 1), ([False], 1), ([True] * 3, 3), ([False] * 3, 3), ([True, False, False], 3)],
)
def test_a_transfer_is_not_faster_than_its_cap(same_host: list[bool], receivers: int) -> None:
    """Faster would be wrong; how much slower it may be is for the benchmarks."""
    state, receivers = {"w": torch.randn(2 << 20)}, len(same_host)
    rate = 16e6

    def work(rank: int, pg: Any) -> Any:
        mine = rank == 0 or same_host[rank - 1]
        mover = transfuse.PGTransport(pg, TIMEOUT, CPU, same_host=mine, max_bytes_per_second=rate)
        if rank == 0:
            mover.send_checkpoint(list(range(1, receivers + 1)), state)
        else:
            assert_exact(state, mover.recv_checkpoint(0))
        assert mover.report is not None
        return mover.report

    with Ranks(receivers + 1) as ranks:
        sent = ranks.run(work)[0]
    assert sent.bytes == receivers * (8 << 20)
    assert sent.bytes / sent.seconds < 1.1 * rate


def test_an_interrupt_does_not_wait_for_the_pace() -> None:
    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if progress[1].bytes:
            raise RuntimeError("stop here")

    with pair() as two:
        started = time.monotonic()
        two.errors(
            {"w": torch.randn(16 << 20)},
            source={"progress": stop, "max_bytes_per_second": 4e6},
            same_host=False,
            timeout=timedelta(seconds=8),
        )
        assert time.monotonic() - started < 8


def test_a_cap_too_slow_for_the_timeout_is_refused() -> None:
    with pair() as two, pytest.raises(ValueError, match="max_bytes_per_second must be at least"):
        transfuse.PGTransport(two.ranks.pgs[0], timedelta(seconds=1), CPU, max_bytes_per_second=1000)


def test_bursts_are_small_under_a_cap() -> None:
    sizes = Sizes(Limits()).offered(1, rate=10e6)
    assert sizes.burst_bytes <= 10e6 * 0.05
    assert sizes.parcel_bytes <= sizes.burst_bytes
