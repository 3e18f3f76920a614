"""Calls that are interrupted, and what comes after them."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import transfuse
from gathering import MIB, state
from moves import CPU, TIMEOUT
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Ranks
from wires import is_of_a_transfer

pytestmark = pytest.mark.usefixtures("small_parcels")


# -------------------------------------------------------------------------------------------------------- cancellation


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def count_threads() -> None:
    """Other tests of this process may have left threads behind, in conversations with silent peers."""
    _before.clear()
    _before.update(filter(is_of_a_transfer, threading.enumerate()))


def our_threads() -> list[str]:
    """The threads of transfers that have begun in this test and are still there."""
    new = set(threading.enumerate()) - _before
    return [thread.name for thread in new if is_of_a_transfer(thread)]


@pytest.mark.usefixtures("group_route")
@pytest.mark.parametrize("who", ["receiver", "source"])
def test_an_exception_in_the_progress_callback_ends_the_transfer_at_all_ends(who: str) -> None:
    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if any(p.bytes for p in progress.values()):
            raise KeyError("stop")

    def work(rank: int, pg: Any) -> Any:
        show: Any = stop if (rank == 2) == (who == "receiver") and rank != 1 else False
        # Slow enough for the callback to see some of it long before it is over.
        slow: dict[str, Any] = {"max_bytes_per_second": 8.0 * MIB} if rank < 2 else {}
        transport = transfuse.PGTransport(pg, TIMEOUT, CPU, progress=show, **slow)
        if rank == 2:
            return transport.recv_checkpoint([0, 1])
        return transport.send_checkpoint([2], state())

    started = time.monotonic()
    with Ranks(3, 40) as ranks:
        first, second, received = ranks.outcomes(work)
        assert time.monotonic() - started < TIMEOUT.total_seconds() / 2
        if who == "receiver":
            assert isinstance(received.error, KeyError)
            assert isinstance(first.error, transfuse.SendFailed)
            assert isinstance(second.error, transfuse.SendFailed)
            assert "KeyError" in str(first.error)
        else:
            assert isinstance(first.error, KeyError)
            assert_exact(state(), received.get())
            second.get()
        assert our_threads() == []

        def again(rank: int, pg: Any) -> Any:
            transport = transfuse.PGTransport(pg, TIMEOUT, CPU)
            return transport.recv_checkpoint([0, 1]) if rank == 2 else transport.send_checkpoint([2], state())

        assert_exact(state(), ranks.outcomes(again)[2].get())


def test_the_first_word_after_an_interrupt_belongs_to_the_next_call() -> None:
    """The receive that was posted for it cannot be taken back."""
    go = threading.Event()

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            go.wait(20)
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint([1], {"w": torch.ones(10)})

        def stop(progress: dict[int, transfuse.Progress]) -> None:
            waited.append(progress[0].phase)
            if waited.count("waiting for the offer") == 3:
                raise KeyboardInterrupt

        def let_send(progress: dict[int, transfuse.Progress]) -> None:
            if progress[0].phase == "waiting for the offer":
                go.set()

        waited: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            transfuse.PGTransport(pg, TIMEOUT, CPU, progress=stop).recv_checkpoint(0)
        return transfuse.PGTransport(pg, TIMEOUT, CPU, progress=let_send).recv_checkpoint(0)

    with Ranks(2, 40) as ranks:
        sent, received = ranks.outcomes(work)
        assert bool((received.get()["w"] == 1).all())
        sent.get()
        deadline = time.monotonic() + 30
        while our_threads() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert our_threads() == []


def test_an_absent_source_costs_one_thread_however_often_it_stays_away() -> None:
    def work(rank: int, pg: Any) -> Any:
        for turn in range(4):
            mover = transfuse.PGTransport(pg, timedelta(seconds=1), CPU)
            if rank == 0:
                mover.send_checkpoint([1], {"w": torch.full((10,), float(turn))})
            elif rank == 1:
                assert float(mover.recv_checkpoint([0, 2])["w"][0]) == turn
        if rank == 1:
            time.sleep(0.5)
            return our_threads()
        return None

    with Ranks(3, 40) as ranks:
        _, threads, _ = ranks.outcomes(work)
        assert threads.get().count("transfuse-peer-2") == 1

        def late(rank: int, pg: Any) -> Any:
            """It comes after all, and its word is heard by the call that listens next."""
            mover = transfuse.PGTransport(pg, TIMEOUT, CPU)
            if rank == 2:
                return mover.send_checkpoint([1], {"w": torch.ones(10)})
            return mover.recv_checkpoint(2) if rank == 1 else None

        assert bool((ranks.outcomes(late)[1].get()["w"] == 1).all())
