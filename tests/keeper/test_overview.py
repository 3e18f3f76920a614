"""One keeper shows all hosts: each is asked at its door, and those that do not answer are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ring_hosts import SECONDS, Job, Worker, until
from transfuse._keeper import frames, overview
from transfuse._keeper.overview import CommitPace
from transfuse._keeper.slot_file import Label


def hosts(worker: Worker) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(worker.link.ask(frames.Hosts(), frames.StatusReply, SECONDS).text)
    return told


def test_every_keeper_shows_the_others_though_the_leader_is_gone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "OVERVIEW_ASK_SECONDS", 0.5)
    for _ in range(3):
        job.add_host()
    workers = job.meet([0, 1, 2])
    assert [worker.status()["replicas"]["host"] for worker in workers] == [0, 1, 2]
    job.commit(1)
    job.until_confirmed(1)
    for mine, worker in enumerate(workers):
        seen = hosts(worker)
        assert [one["host"] for one in seen] == [host for host in range(3) if host != mine]
        for one in seen:
            assert (one["keeper"], one["confirmed_step"], one["commit"]["step"]) == ("alive", 1, 1)
            assert (one["attached"], one["draining"], one["trouble"]) == ([one["host"]], None, [])
            assert "address" not in one
            assert one["states"] == 2
            assert one["replicas_held"] == 1
    job.hosts[0].stop()
    until(job.hosts[0].has_ended)
    first, third = hosts(workers[1])
    assert (first["host"], first["keeper"], first["ranks"]) == (0, "unreachable", [0])
    assert first["door"] == job.peers[0].keepers[0]
    assert first["why"]
    assert (third["host"], third["keeper"], third["confirmed_step"]) == (2, "alive", 1)


def test_a_keeper_that_is_alone_knows_no_others(job: Job) -> None:
    job.add_host()
    (worker,) = job.meet([0])
    assert hosts(worker) == []
    assert worker.status()["commit"] == {"step": None, "seconds_ago": None, "per_second": 0.0}
    for step in (1, 2, 3):
        worker.commit(step)
    told = worker.status()["commit"]
    assert told["step"] == 3
    assert told["per_second"] > 0
    assert worker.status()["max_bytes"] is None


def test_the_pace_is_that_of_new_steps() -> None:
    pace = CommitPace()
    for step in (1, 1, 2, 1):  # Two ranks, and one that is late.
        pace.note(Label(1, step))
    assert pace.status()["step"] == 2
    assert len(pace._at) == 2


def test_trouble_is_told(job: Job) -> None:
    for _ in range(2):
        job.add_host()
    workers = job.meet([0, 1], slots=3)
    for step in (1, 2, 3):
        workers[0].commit(step)
    until(lambda: not workers[0].commit(4))
    why = "the last commit was left out for want of a free slot: rank 1 has not committed step 1, on other hosts"
    until(lambda: workers[0].status()["trouble"] == [why])
    # The other host sees it, too.
    assert hosts(workers[1])[0]["trouble"] == [why]
