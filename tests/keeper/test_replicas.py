"""Replicas: every host holds its own and its neighbours' bytes of the confirmed step."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import transfuse
from ring_hosts import NBYTES, SECONDS, TOKEN, Job, contents, until
from transfuse._keeper import door, frames, replicas, transfers
from transfuse._keeper.questions import Answer, Lend, LentSlot, Question
from transfuse._keeper.slot_file import PAGE, Label, room_for
from transfuse._wire.handshake import key_of


@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_each_host_holds_its_own_and_its_neighbours_bytes_of_the_confirmed_step(job: Job, steps: int) -> None:
    for _ in range(3):
        job.add_host()
    workers = job.meet([0, 1, 2])
    for step in range(1, steps + 1):
        job.commit(step)
        job.until_confirmed(step)
        for rank, worker in enumerate(workers):
            for held in (rank, (rank - 1) % 3):
                assert np.array_equal(worker.read(held, step), contents(held, step))
            assert worker.read((rank + 1) % 3, step) is None
            # The third pull is the first that finds an older replica: its frozen half did not travel again.
            kept = worker.status()["replicas"]["last_pull"]["kept_bytes"]
            assert kept >= NBYTES // 4 if step == 3 else step > 3 or kept == 0
    for worker in workers:
        status = worker.status()["replicas"]
        assert (status["hosts"], status["replicas"], status["without_room"]) == (3, 1, False)
        replicas = [state for state in worker.status()["states"] if state["replica"]]
        assert len(replicas) == 2
        assert status["bytes"] == sum(state["bytes"] for state in replicas)


def test_a_step_is_confirmed_only_when_it_is_replicated_everywhere(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = threading.Event()
    fetch = transfuse.fetch

    def wait_and_fetch(*arguments: Any, **named: Any) -> Any:
        assert allowed.wait(SECONDS)
        return fetch(*arguments, **named)

    monkeypatch.setattr(transfers, "fetch", wait_and_fetch)
    for _ in range(2):
        job.add_host()
    workers = job.meet([0, 1], slots=3)
    job.commit(1)
    for worker in workers:
        until(partial(worker.has_agreed, 1), "step 1 is agreed on")
    job.commit(2)
    job.commit(3)
    for worker in workers:
        assert not worker.commit(4)  # All slots hold steps that are not confirmed.
        assert worker.confirmed() is None
        assert np.array_equal(worker.read(worker.rank, 1), contents(worker.rank, 1))
    allowed.set()
    job.until_confirmed(3)
    assert workers[0].read(1, 2) is None  # Step 3 was the newest that was complete: nobody replicated step 2.


def test_two_replicas_share_a_rate_limit(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[int, float]] = []
    serve = transfuse.serve

    def note_and_serve(*arguments: Any, **named: Any) -> Any:
        served.append((named["step"], named["max_bytes_per_second"]))
        return serve(*arguments, **named)

    monkeypatch.setattr(transfers, "serve", note_and_serve)
    for _ in range(3):
        job.add_host()
    workers = job.meet([0, 1, 2], replicas=2, rate=8e6)
    job.commit(1)
    job.until_confirmed(1)
    for worker in workers:
        for rank in range(3):
            assert np.array_equal(worker.read(rank, 1), contents(rank, 1))
    # A host that comes while another one pulls reads from the same server, which limits both together.
    assert set(served) == {(1, 8e6)}
    assert 3 <= len(served) <= 6


def test_what_is_replicated_does_not_depend_on_its_size_staying_the_same(job: Job) -> None:
    for _ in range(2):
        job.add_host()
    workers = job.meet([0, 1])
    job.commit(1)
    job.until_confirmed(1)
    for worker in workers:
        worker.nbytes = NBYTES // 2
        worker.lay(2)
    for step in (2, 3):
        job.commit(step)
        job.until_confirmed(step)
        assert np.array_equal(workers[0].read(1, step), contents(1, step, NBYTES // 2))
    sizes = {state["bytes"] for state in workers[0].status()["states"] if state["replica"]}
    assert len(sizes) == 1


def test_a_host_without_room_confirms_without_replicas_and_says_so_once(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        job.add_host()
    small = NBYTES // 8
    workers = job.meet([0, 1], sizes=[small, 4 * NBYTES], limits=[4 * NBYTES, None])
    with caplog.at_level(logging.WARNING, "transfuse.keeper"):
        for step in (1, 2, 3):
            job.commit(step)
            job.until_confirmed(step)
    assert len([record for record in caplog.records if "no replicas on this host" in record.message]) == 1
    status = workers[0].status()
    assert status["replicas"]["without_room"]
    assert status["replicas"]["hosts_without_room"] == [0]
    assert status["bytes"] <= 4 * NBYTES
    assert not any(state["replica"] for state in status["states"])
    assert np.array_equal(workers[1].read(0, 3), contents(0, 3, small))


def test_a_restart_in_the_middle_of_a_pull_abandons_it_and_leaves_the_confirmed_replica(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, torn, allowed = transfuse.fetch, threading.Event(), threading.Event()

    def tear(address: str, target: dict[str, Any], **named: Any) -> Any:
        if named["step"] != 2:
            return fetch(address, target, **named)
        for tensor in target.values():
            tensor[: len(tensor) // 2] = 7
        torn.set()
        assert allowed.wait(SECONDS)
        named["progress"]({})
        raise AssertionError("the pull was not abandoned")

    monkeypatch.setattr(transfers, "fetch", tear)
    for _ in range(2):
        job.add_host()
    job.meet([0, 1])
    job.commit(1)
    job.until_confirmed(1)
    job.commit(2)
    assert torn.wait(SECONDS)
    workers = job.meet([0, 1])
    first = job.generation - 1
    for worker in workers:
        assert np.array_equal(worker.read(1 - worker.rank, 1, first), contents(1 - worker.rank, 1))
        assert worker.read(1 - worker.rank, 2, first) is None  # Torn: it has no header.
        assert np.array_equal(worker.read(worker.rank, 2, first), contents(worker.rank, 2))
    allowed.set()
    job.commit(3)
    job.until_confirmed(3)
    for worker in workers:
        assert np.array_equal(worker.read(1 - worker.rank, 3), contents(1 - worker.rank, 3))


def test_replicas_that_are_there_after_a_restart_need_no_more_room(job: Job) -> None:
    for _ in range(2):
        job.add_host()
    # Just enough: the slots of the rank, and two replicas of its neighbour's.
    slot_bytes = PAGE + room_for(200) + NBYTES
    job.meet([0, 1], limits=[6 * slot_bytes] * 2)
    for step in (1, 2):
        job.commit(step)
        job.until_confirmed(step)
    assert job.workers[0].status()["bytes"] == 6 * slot_bytes
    workers = job.meet([0, 1], limits=[6 * slot_bytes] * 2)
    job.commit(3)
    job.until_confirmed(3)
    assert not workers[0].status()["replicas"]["without_room"]
    assert np.array_equal(workers[0].read(1, 3), contents(1, 3))


@pytest.mark.parametrize("more", [12, pytest.param(100, marks=pytest.mark.soak)])
def test_many_steps_leave_no_descriptor_thread_or_memory_behind(job: Job, more: int) -> None:
    for _ in range(2):
        job.add_host()
    workers = job.meet([0, 1])

    def used() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), workers[0].status()["bytes"]

    def take(steps: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        for step in steps:
            job.commit(step)
            job.until_confirmed(step)
            yield used()

    # A pull between two looks, or none: what a few steps ever use is what they may use.
    few = 6
    before = [max(each) for each in zip(*take(range(1, 1 + few)), strict=True)]
    for _ in take(range(1 + few, 1 + few + more)):
        pass
    # Threads and descriptors of the last pull may take a moment to go, so look more than once.
    try:
        until(lambda: all(now <= then for now, then in zip(used(), before, strict=True)))
    except AssertionError:
        pytest.fail(f"before: {before}, now: {used()} descriptors, threads and bytes\n{threading.enumerate()}")


def test_replicas_of_a_host_that_left_stay_until_a_newer_step_is_confirmed(job: Job) -> None:
    for _ in range(3):
        job.add_host()
    workers = job.meet([0, 1, 2])
    job.commit(7)
    job.until_confirmed(7)
    first = job.generation
    workers[1].link.close()
    job.hosts[1].stop()
    # Host 2 is rank 1 now, and holds what rank 1 of before had committed on the host that is lost.
    workers = job.meet([0, 2])
    assert workers[1].link.ask(frames.Inventory(), frames.HeldStates, SECONDS).has_held
    assert np.array_equal(workers[1].read(1, 7, first), contents(1, 7))
    assert np.array_equal(workers[0].read(0, 7, first), contents(0, 7))
    assert np.array_equal(workers[0].read(2, 7, first), contents(2, 7))
    job.commit(8)
    job.until_confirmed(8)
    # Nobody has rank 2 any more, and host 2 has rank 1 itself.
    for worker, rank in ((workers[0], 2), (workers[1], 2), (workers[1], 1)):
        until(partial(worker.lacks, rank, 7, first), "what is older, and whose place is not used again, is given up")
    # One host is left: it goes on alone, and confirms by itself.
    job.hosts[2].stop()
    (worker,) = job.meet([0])
    assert np.array_equal(worker.read(1, 8, job.generation - 1), contents(1, 8))
    assert worker.commit(9)
    assert worker.confirmed() == 9
    assert worker.read(1, 8, job.generation - 1) is None


def test_a_host_of_a_thousand_ranks_lends_its_slots_in_one_answer() -> None:
    numbers, head = range(1 << 31, (1 << 31) + 1000), bytes(replicas.HEAD_BYTES)
    slots = [LentSlot(rank, 1 << 40, head) for rank in numbers]
    server: Any = SimpleNamespace(address="[fe80:1234:5678:9abc:def0:1234:5678:9abc]:65535")
    loan = replicas.Loan(Label(1, 1), server, TOKEN, slots, [], Any)  # type: ignore[arg-type]

    class Lender:
        def answer(self, question: Question) -> Answer:
            assert isinstance(question, Lend)
            return loan.describe()

        def may_stay(self, silent: float) -> bool:
            return True

        def end(self) -> None:
            pass

    lender = door.Door("127.0.0.1", TOKEN, 0, Lender)
    control = door.connect(lender.address, key_of(TOKEN), SECONDS, 0, None)
    try:
        lent = replicas._borrow(control, 0, Label(1, 1), numbers)
        assert (lent.address, lent.token, lent.slots) == (server.address, TOKEN, slots)
    finally:
        control.close()
        lender.close()
        lender.join(time.monotonic() + SECONDS)
