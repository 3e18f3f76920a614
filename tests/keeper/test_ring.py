"""The ring: keepers of several hosts confirm a step together, go on after losses, and end together."""

from __future__ import annotations

import logging
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np
import pytest

from ring_hosts import SECONDS, Job, Worker, contents, rings, until
from transfuse._errors import TransfuseError
from transfuse._keeper import door, frames
from transfuse._keeper.runs import Process


def test_without_replicas_complete_on_all_hosts_is_enough(job: Job) -> None:
    for _ in range(2):
        job.add_host()
    workers = job.meet([0, 1], replicas=0)
    assert workers[0].commit(1)
    until(lambda: workers[0].status()["states"], "it is committed")
    assert workers[0].confirmed() is None
    assert workers[1].commit(1)
    job.until_confirmed(1)
    assert workers[0].read(1, 1) is None


def test_hosts_whose_slots_are_full_of_different_steps_begin_again_from_a_common_one(job: Job) -> None:
    for _ in range(2):
        job.add_host()
    workers = job.meet([0, 1], slots=3)
    for worker, first in zip(workers, (1, 11), strict=True):
        for step in range(first, first + 4):
            worker.commit(step)
    at = [4, 14]

    def advance() -> bool:
        for rank, worker in enumerate(workers):
            at[rank] += 1
            worker.commit(at[rank])
        return all(worker.confirmed() is not None for worker in workers)

    until(advance, "a step that both have")


def test_ranks_of_other_hosts_that_do_not_commit_are_named(job: Job) -> None:
    for _ in range(3):
        job.add_host()
    workers = job.meet([0, 1, 2], slots=3)
    for worker in workers[:2]:
        for step in (1, 2, 3):
            assert worker.commit(step)

    def names_rank_2(worker: Worker) -> bool:
        slot = worker.link.ask(frames.Begin(worker.generation, 4), frames.Slot, SECONDS)
        assert slot.number is None
        assert slot.complete is None
        return bool(slot.why == "rank 2 has not committed step 1, on other hosts")

    for worker in workers[:2]:
        until(partial(names_rank_2, worker), f"rank {worker.rank} hears who is missing")


def test_a_replaced_host_learns_what_is_confirmed_and_takes_part(job: Job) -> None:
    for _ in range(3):
        job.add_host()
    job.meet([0, 1])
    job.commit(3)
    job.until_confirmed(3)
    job.hosts[1].stop()
    workers = job.meet([0, 2])
    job.until_confirmed(3)
    assert workers[1].link.ask(frames.Inventory(), frames.HeldStates, SECONDS).has_held
    assert np.array_equal(workers[0].read(1, 3, job.generation - 1), contents(1, 3))
    job.commit(4)
    job.until_confirmed(4)
    assert np.array_equal(workers[1].read(0, 4), contents(0, 4))


def holds(worker: Worker, rank: int, step: int, generation: int) -> bool:
    return not worker.lacks(rank, step, generation)


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_replaced_host_gets_what_was_restored_at_once(job: Job, hosts: int) -> None:
    """Its own ranks' slots, and its neighbour's: so that the next host may be lost before a step is confirmed."""
    for _ in range(hosts + 1):
        job.add_host()
    job.meet(list(range(hosts)))
    job.commit(3)
    job.until_confirmed(3)
    before = job.generation
    job.hosts[1].stop()
    workers = job.meet([0, hosts, *range(2, hosts)])
    for worker in workers:
        worker.link.ask(frames.Restored(before, 3), frames.Ack, SECONDS)
    for rank in (0, 1):
        until(partial(holds, workers[1], rank, 3, before), f"rank {rank}'s slots are there")
        assert np.array_equal(workers[1].read(rank, 3, before), contents(rank, 3))

    def tells() -> bool:
        states = workers[1].status()["states"]
        return [(one["rank"], one["step"], one["replica"], one["host"], one["whole"]) for one in states] == [
            (0, 3, True, 0, True),
            (1, 3, False, 1, True),
        ]

    until(tells, "the status tells what it holds")
    # Nothing more is pulled, and slots do not run out.
    held = workers[1].status()["bytes"]
    for step in range(4, 9):
        job.commit(step)
        job.until_confirmed(step)
    assert workers[1].status()["bytes"] > held
    assert workers[1].lacks(1, 3, before)


def test_a_host_may_be_lost_after_the_other_was_replaced(job: Job) -> None:
    for _ in range(4):
        job.add_host()
    job.meet([0, 1])
    job.commit(3)
    job.until_confirmed(3)
    before = job.generation
    job.hosts[1].stop()
    workers = job.meet([0, 2])
    for worker in workers:
        worker.link.ask(frames.Restored(before, 3), frames.Ack, SECONDS)
    for rank in (0, 1):
        until(partial(holds, workers[1], rank, 3, before), f"rank {rank}'s slots are there")
    job.hosts[0].stop()
    workers = job.meet([3, 2])
    for rank in (0, 1):
        assert np.array_equal(workers[1].read(rank, 3, before), contents(rank, 3))


def test_all_keepers_end_when_all_ranks_of_all_hosts_have_closed(job: Job) -> None:
    for _ in range(3):
        job.add_host()
    workers = job.meet([0, 1, 2])
    job.commit(1)
    job.until_confirmed(1)
    for worker in workers[1:]:
        worker.close()
    assert workers[2].status()["closed"] == [2]
    assert not any(host.keeper is not None and host.keeper.ring.is_over() for host in job.hosts)
    workers[0].close()
    for host in job.hosts:
        until(host.has_ended, f"the keeper in {host.directory} ends")
    until(lambda: not rings(), "all threads of the ring have ended")


@contextmanager
def an_agent() -> Iterator[tuple[Process, subprocess.Popen[bytes]]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = Process.of(child.pid)
        assert found is not None
        try:
            yield found, child
        finally:
            child.kill()


def test_a_second_job_of_one_name_is_refused_though_its_hosts_are_swapped(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        job.add_host()
    with an_agent() as (first, running), an_agent() as (second, _):
        workers = job.meet([0, 1], agent=first)
        job.commit(1)
        job.until_confirmed(1)
        others = [Worker(job.hosts[1 - rank].directory, rank, agent=second) for rank in range(2)]
        token = secrets.token_hex(32)  # Of the keeper that their rank 0 has found.
        peers = [msgspec.structs.replace(one, generation=one.generation + 1) for one in reversed(job.peers)]

        def refused() -> None:
            for other, one in zip(others, peers, strict=True):
                with pytest.raises(TransfuseError, match=rf"of the run \S+ belongs to the running agent {first.pid}"):
                    other.expose(token)
                with pytest.raises(TransfuseError, match=f"belongs to the running agent {first.pid}"):
                    other.join(one)

        refused()
        # The first job has noticed nothing, and still is refused to the second one between two restarts.
        job.commit(2)
        job.until_confirmed(2)
        for worker in workers:
            worker.link.close()
        refused()
        running.kill()
        running.wait()
        with caplog.at_level(logging.INFO, "transfuse.keeper"):
            for other, one in zip(others, peers, strict=True):
                other.expose(token)
                other.join(one)
        assert f"agent {second.pid} takes this run over from agent {first.pid}" in caplog.text
        for other in others:
            other.link.close()


# ---------------------------------------------------------------------------------------- real processes, real kills


@pytest.mark.processes
def test_a_keeper_that_is_killed_or_frozen_holds_up_confirmations_until_it_is_back(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "DOOR_ASK_SECONDS", 2.0)
    job.add_host()
    host = job.add_host(processes=True)
    workers = job.meet([0, 1])
    job.commit(1)
    job.until_confirmed(1)
    assert host.child is not None
    # Frozen: the other host goes on committing, and nothing is confirmed.
    host.child.freeze()
    assert workers[0].commit(2)
    until(lambda: workers[0].status()["replicas"]["unreachable"] == [1], "the leader misses it")
    assert workers[0].confirmed() == 1
    host.child.thaw()
    assert workers[1].commit(2)
    job.until_confirmed(2)
    # Killed: what it held is lost, but not the replicas. It comes back in the same place.
    host.child.kill()
    host.child.wait()
    workers[1].link.close()
    assert workers[0].commit(3)
    assert np.array_equal(workers[0].read(1, 2), contents(1, 2))
    job.come_back(1)
    job.until_confirmed(2)
    assert workers[1].link.ask(frames.Inventory(), frames.HeldStates, SECONDS).has_held
    job.commit(4)
    job.until_confirmed(4)
    assert np.array_equal(workers[1].read(0, 4), contents(0, 4))


@pytest.mark.processes
@pytest.mark.soak
def test_kills_and_freezes_of_any_keeper(job: Job) -> None:
    for _ in range(3):
        job.add_host(processes=True)
    workers = job.meet([0, 1, 2])
    step = 0
    for victim, number in ((0, signal.SIGKILL), (1, signal.SIGSTOP), (2, signal.SIGKILL), (0, signal.SIGSTOP)):
        for _ in range(3):
            step += 1
            job.commit(step)
            job.until_confirmed(step)
        child = job.hosts[victim].child
        assert child is not None
        if number == signal.SIGSTOP:
            child.freeze()
        else:
            child.kill()
        step += 1
        for rank, worker in enumerate(workers):
            if rank != victim:
                assert worker.commit(step)
        assert workers[(victim + 1) % 3].confirmed() == step - 1
        if number == signal.SIGSTOP:
            child.thaw()
        else:
            child.wait()
            workers[victim].link.close()
            job.come_back(victim)
        for rank, worker in enumerate(workers):
            until(partial(worker.has_confirmed, step - 1), f"rank {rank} knows what is confirmed")
    for worker in workers:
        worker.close()
    for host in job.hosts:
        assert host.child is not None
        assert host.child.wait(SECONDS) == 0
