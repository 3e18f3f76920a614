"""The harness itself: values and errors arrive, a death is noticed at once, nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from transfuse.testing.ranks import (
    Died,
    Fleet,
    Outcome,
    ProcessPool,
    Ranks,
    RanksFailed,
    RemoteError,
    announce,
    hear,
    listening,
    say,
)


def pass_on(rank: int, pg: dist.ProcessGroup) -> list[float]:
    """Rank 0's numbers, to rank 1."""
    t = torch.arange(3.0) if rank == 0 else torch.zeros(3)
    (pg.send([t], 1, 7) if rank == 0 else pg.recv([t], 0, 7)).wait()
    return t.tolist()


def test_threads_talk() -> None:
    with Ranks(2) as ranks, Ranks(2) as others:
        assert ranks.run(pass_on) == [[0, 1, 2]] * 2
        assert others.run(pass_on) == [[0, 1, 2]] * 2
        assert ranks.run(lambda rank, pg, a, b: (a, b, pg.rank(), pg.size()), "xy", [1, 2]) == [
            ("x", 1, 0, 2),
            ("y", 2, 1, 2),
        ]


def test_threads_report_each_error() -> None:
    def one_fails(rank: int, pg: dist.ProcessGroup) -> int:
        if rank == 1:
            raise KeyError("mine")
        return rank

    with Ranks(3) as ranks:
        outcomes = ranks.outcomes(one_fails)
        assert [o.value for o in outcomes] == [0, None, 2]
        assert isinstance(outcomes[1].error, KeyError)
        with pytest.raises(KeyError, match="mine"):
            outcomes[1].get()


def test_threads_raise_the_earliest_error() -> None:
    def fails(rank: int, pg: dist.ProcessGroup) -> None:
        time.sleep(0 if rank == 1 else 0.1)
        raise ValueError(f"from rank {rank}")

    with Ranks(2) as ranks, pytest.raises(ValueError, match="from rank 1") as caught:
        ranks.run(fails)
    assert any("rank 0, later" in note for note in caught.value.__notes__)


def test_threads_that_hang_are_named() -> None:
    release = threading.Event()
    with Ranks(2) as ranks, pytest.raises(AssertionError, match=r"ranks \[1\] still running after 0.2 s"):
        ranks.run(lambda rank, pg: release.wait() if rank else None, deadline=0.2)
    release.set()


def test_threads_time_out() -> None:
    with Ranks(2, timeout=0.2) as ranks:
        outcomes = ranks.outcomes(lambda rank, pg: pg.recv([torch.zeros(1)], 1, 0).wait() if rank == 0 else None)
    assert isinstance(outcomes[0].error, RuntimeError)
    assert outcomes[1].error is None


# Functions for workers


class UnpicklableError(Exception):
    def __init__(self, a: int, *, b: int) -> None:
        super().__init__(a, b)


def total(rank: int, addend: float) -> tuple[float, int, bool, int]:
    t = torch.tensor([rank + addend])
    dist.all_reduce(t)
    return t.item(), os.getpid(), threading.current_thread() is threading.main_thread(), torch.get_num_threads()


def fail_on(rank: int, who: int, how: str) -> int:
    if rank == who:
        if how == "unpicklable":
            raise UnpicklableError(1, b=2)
        if how == "return":
            return threading.Lock()  # type: ignore[return-value]
        if how == "timeout":
            dist.recv(torch.zeros(1), (rank + 1) % dist.get_world_size())
        if how == "exit":
            os._exit(3)
        if how == "hang":
            time.sleep(60)
        raise KeyError("mine")
    return rank


def large(rank: int, data: bytes) -> bytes:
    return data * 2


def environment(rank: int, name: str) -> str | None:
    return os.environ.get(name)


def stand(rank: int) -> int:
    """Announces, then waits for a word from rank 0, which sends it at once."""
    announce("here")
    t = torch.tensor([rank + 10])
    if rank == 0:
        for other in range(1, dist.get_world_size()):
            dist.send(t, other)
        return 0
    dist.recv(t, 0)
    return int(t.item())


def count(rank: int) -> None:
    while True:
        announce("tick")
        time.sleep(0.01)


def receive_from_1(rank: int) -> str:
    if rank == 1:
        announce("up")
        time.sleep(60)
    with pytest.raises(RuntimeError) as caught:
        dist.recv(torch.zeros(1), 1)
    return str(caught.value)


def test_pool_keeps_its_processes(pool4: ProcessPool) -> None:
    first, second = ([o.get() for o in pool4.run(total, addend)] for addend in (0, 1))
    assert [value for value, *_ in first] == [6.0] * 4
    assert [value for value, *_ in second] == [10.0] * 4
    assert [pid for _, pid, *_ in first] == [pid for _, pid, *_ in second] == pool4.pids
    assert all(main and threads == 1 for *_, main, threads in first)
    assert [o.get() for o in pool4.run(fail_on, 9, "", ranks=[2, 1])] == [2, 1]
    assert [o.get() for o in pool4.run(large, b"x" * 300_000)] == [b"x" * 600_000] * 4


def test_pool_reports_errors_and_goes_on(pool4: ProcessPool) -> None:
    pids = [o.get()[1] for o in pool4.run(total, 0)]
    for how, kind in (("raise", KeyError), ("unpicklable", RemoteError), ("return", RemoteError)):
        outcomes = pool4.run(fail_on, 1, how)
        assert [o.value for o in outcomes] == [0, None, 2, 3]
        error = outcomes[1].error
        # What cannot be pickled on the way back is a TypeError of pickle's own.
        assert isinstance(error, kind if how != "return" else (kind, TypeError)), error
    assert "fail_on" in "".join(getattr(pool4.run(fail_on, 1, "raise")[1].error, "__notes__", []))
    assert [o.get()[1] for o in pool4.run(total, 0)] == pids


def test_small_pool_recovers_from_timeout_death_and_hang() -> None:
    with ProcessPool(2, timeout=4.0, method="forkserver") as pool:
        pids = [o.get()[1] for o in pool.run(total, 0)]
        assert isinstance(pool.run(fail_on, 0, "timeout")[0].error, RuntimeError)
        assert [o.get()[1] for o in pool.run(total, 0)] == pids, "a broken group is renewed in place"

        began = time.monotonic()
        died = pool.run(fail_on, 1, "exit")[1].error
        assert time.monotonic() - began < 10
        assert isinstance(died, Died)
        assert (died.exitcode, died.signal) == (3, None)
        pids = [o.get()[1] for o in pool.run(total, 0)]

        with pytest.raises(AssertionError, match=r"(?s)ranks \[1\] still running after 0.3 s.*in fail_on"):
            pool.run(fail_on, 1, "hang", deadline=0.3)
        assert not set(pids) & {o.get()[1] for o in pool.run(total, 0)}
        left = pool.pids
    assert not any(alive(pid) for pid in left)


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_fleet_kill_is_noticed_at_once() -> None:
    with Fleet(3) as fleet:
        fleet.start(receive_from_1)
        fleet.wait_for(1, "up")
        began = time.monotonic()
        fleet.kill(1)
        outcomes = fleet.outcomes(20)
        assert time.monotonic() - began < 10
        died = outcomes[1].error
        assert isinstance(died, Died)
        assert died.signal == signal.SIGKILL
        assert str(died) == "rank 1 died with signal 9"
        assert "peer" in outcomes[0].get() or "Connection" in outcomes[0].get()
        with pytest.raises(AssertionError, match="did not announce 'more'; it ended"):
            fleet.wait_for(1, "more")
        fleet.kill(1)
        pids = fleet.pids
    assert not any(alive(pid) for pid in pids)


def test_fleet_freeze_and_thaw() -> None:
    with Fleet(2) as fleet:
        fleet.start(count, ranks=[1])
        fleet.wait_for(1, "tick")
        fleet.freeze(1)
        # All that it said before it stood still.
        time.sleep(0.05)
        fleet._until(lambda: True, 0)
        said = fleet.workers[1].reached["tick"]
        time.sleep(0.1)
        fleet._until(lambda: True, 0)
        assert fleet.workers[1].reached["tick"] == said
        with pytest.raises(AssertionError, match=r"(?s)ranks \[1\] still running.*in state T"):
            fleet.outcomes(0.1, ranks=[1])
        fleet.start(fail_on, 9, "", ranks=[0])
        assert fleet.outcomes(10, ranks=[0])[0].get() == 0
        fleet.workers[1].reached.clear()
        fleet.thaw(1)
        fleet.wait_for(1, "tick")
        fleet.freeze(1)
        pids = fleet.pids
    assert not any(alive(pid) for pid in pids), "a frozen process is cleaned up too"


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_fleet_runs_functions_in_turn(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_TEST", method)
    with Fleet(2, method=method) as fleet:
        fleet.start(stand)
        for rank in range(2):
            fleet.wait_for(rank, "here")
        assert [o.get() for o in fleet.outcomes()] == [0, 10]
        fleet.start(environment, "RANKS_TEST")
        assert [o.get() for o in fleet.outcomes()] == [method] * 2


# Words, failures, and ranks that start again


def tell_numbers(rank: int, count: int) -> None:
    for number in range(count):
        say((rank, number))


def tell_and_fail(rank: int, how: str) -> None:
    say("before")
    if rank == 1:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise LookupError("on purpose")
    dist.barrier()


def echo(rank: int) -> None:
    while (word := hear()) is not None:
        say(word)


def in_no_group(rank: int) -> bool:
    return dist.is_initialized()


def test_words_come_in_order_until_all_have_ended() -> None:
    with listening(2, tell_numbers, 50, method="forkserver") as words:
        said = list(words)
    assert sorted(rank for rank, _ in said) == [0] * 50 + [1] * 50
    for rank in range(2):
        assert [word for who, word in said if who == rank] == [(rank, number) for number in range(50)]


@pytest.mark.parametrize(
    ("how", "cause"), [("raise", "failed: LookupError: on purpose"), ("die", "died: signal SIGKILL")]
)
def test_who_listens_hears_of_failures(how: str, cause: str) -> None:
    heard = []
    with (
        listening(2, tell_and_fail, how, method="forkserver") as words,
        pytest.raises(RanksFailed, match=f"rank 1 {cause}") as caught,
    ):
        heard += [word for _, word in words]
    assert set(heard) <= {"before"}
    assert caught.value.causes[1] == cause
    assert how == "die" or any("in tell_and_fail" in note for note in caught.value.__notes__)


def test_a_rank_is_told_killed_and_started_again() -> None:
    with Fleet(2, group=False) as fleet:
        fleet.start(in_no_group)
        assert [outcome.get() for outcome in fleet.outcomes()] == [False, False]
        fleet.start(echo)
        fleet.tell(1, "a word")
        assert fleet.said(60) == (1, "a word")
        fleet.kill(1)
        rank, outcome = fleet.said(60) or (None, None)
        assert rank == 1
        assert isinstance(outcome, Outcome)
        assert isinstance(outcome.error, Died)
        before = fleet.pids
        assert fleet.restart(1) == fleet.pids[1] != before[1]
        assert fleet.pids[0] == before[0]
        # At once, while it still starts.
        fleet.start(echo, ranks=[1])
        fleet.tell(1, "another")
        assert fleet.said(60) == (1, "another")
        # What it has said is forgotten with it.
        fleet.tell(1, "a third")
        fleet.tell(0, "mine")
        fleet._until(lambda: len(fleet._words) == 2, 60)
        fleet.end(1)
        assert 1 not in fleet
        assert fleet.said(0) == (0, "mine")
        assert fleet.said(0) is None


def test_a_fleet_with_a_new_rank_gets_a_new_group() -> None:
    with Fleet(2) as fleet:
        fleet.kill(1)
        fleet._until(lambda: fleet.workers[1].dead, 30)
        assert not fleet.renew(30)
        fleet.restart(1)
        assert fleet.renew(60)
        fleet.start(total, 0)
        assert [outcome.get()[0] for outcome in fleet.outcomes()] == [1.0] * 2
