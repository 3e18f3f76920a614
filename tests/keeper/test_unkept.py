"""Commits that keep nothing: the rank that does not commit is named, and every cause of skipping is told again."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transfuse
from keeping import SECONDS, Home, Job, home, same, threaded, until  # noqa: F401
from transfuse._errors import TransfuseError
from transfuse._keeper import allotment, client, unkept
from transfuse._keeper.frames import KeeperLost
from transfuse.testing.ranks import ProcessPool, freeze


class Heard(logging.Handler):
    """The warnings of this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def warnings() -> Iterator[list[str]]:
    heard = Heard()
    logging.getLogger("transfuse").addHandler(heard)
    try:
        yield heard.lines
    finally:
        logging.getLogger("transfuse").removeHandler(heard)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings come soon."""
    for name, value in (("UNKEPT_FIRST_SECONDS", 0.05), ("UNKEPT_AGAIN_SECONDS", 0.2), ("UNKEPT_WHILE_SECONDS", 0.1)):
        monkeypatch.setattr(unkept, name, value)


def commit_on_rank_0(rank: int, directory: str) -> tuple[list[tuple[str, str]], list[str], int | None]:
    """Everybody's habit: only rank 0 commits. Then the job begins again, and every rank commits."""
    os.environ["TRANSFUSE_KEEPER_DIR"] = directory
    for module, name, seconds in (
        (client, "COMMIT_PARTNER_SECONDS", 0.5),
        (unkept, "UNKEPT_FIRST_SECONDS", 0.1),
        (unkept, "UNKEPT_AGAIN_SECONDS", 0.2),
    ):
        setattr(module, name, seconds)
    state, told = {"w": torch.zeros(1000)}, []
    try:
        with warnings() as heard:
            keep = transfuse.keep(lambda: state, run="habit", timeout=SECONDS)
            assert keep.restore() is None
            for step in range(1, 9):
                state["w"].fill_(step)
                if rank == 0:
                    report = keep.commit(step)
                    assert report is not None
                    told.append((report.outcome, report.why))
                    time.sleep(0.1)
                dist.barrier()
            keep.detach()
        keep = transfuse.keep(lambda: state, run="habit", timeout=SECONDS)
        assert keep.restore() is None
        report = keep.commit(9)
        assert report is not None
        assert report.outcome == "committed"
        dist.barrier()
        restored = keep.restore()
        keep.close()
        return told, heard, restored
    finally:
        del os.environ["TRANSFUSE_KEEPER_DIR"]


@pytest.mark.processes
def test_only_rank_0_commits(home: Home, pool4: ProcessPool) -> None:  # noqa: F811
    first, *others = [one.get() for one in pool4.run(commit_on_rank_0, str(home.base), deadline=4 * SECONDS)]
    told, heard, step = first
    assert {one[2] for one in (first, *others)} == {9} == {step}
    assert all(one[:2] == ([], []) for one in others)
    # Nothing is complete, so nothing is called committed; and the keeper, which answers, is not blamed.
    assert [outcome for outcome, _ in told] == ["pending"] * 3 + ["skipped"] * 5
    assert all("ranks [1, 2, 3] have not" in why for _, why in told)
    named = [line for line in heard if "have not called commit(step 1) for 0.5 s; every rank calls commit()" in line]
    assert len(named) == 1
    assert "ranks [1, 2, 3]" in named[0]
    again = [line for line in heard if "no step has become complete" in line]
    assert len(again) >= 2
    assert "ranks [1, 2, 3] have not committed step 1. A job that is restarted now has none of these steps" in again[-1]
    assert not any("keeper" in line for line in heard)


@pytest.mark.usefixtures("threaded")
def test_the_rank_that_stops_to_commit_is_named(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    hurried: None,
) -> None:
    home.start()
    states = [{"w": torch.zeros(4)} for _ in range(2)]
    with Job(2) as job, warnings() as heard:
        job.start(same(*states))
        assert job.commit(1) == ["committed"] * 2

        def is_told(times: int) -> Callable[[], bool]:
            def commit() -> bool:
                step = job.keeps[0]._reached or 0
                job.keeps[0].commit(step + 1)
                return (
                    sum(
                        "rank 1 has not committed step 2. A job that is restarted now goes on from step 1" in one
                        for one in heard
                    )
                    >= times
                )

            return commit

        until(is_told(2))
        # As soon as steps are complete again, that is said, and nothing more.
        step = (job.keeps[0]._reached or 0) + 1
        for new in range(step, step + 4):
            job.commit(new)
        assert sum("steps become complete again" in one for one in heard) == 1
        count = len(heard)
        time.sleep(0.3)
        for new in range(step + 4, step + 8):
            assert job.commit(new) == ["committed"] * 2
        assert len(heard) == count


@pytest.mark.processes
@pytest.mark.usefixtures("threaded", "hurried")
def test_a_lost_keeper_is_told_again_and_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    state = {"w": torch.zeros(4)}
    with Job(1) as job, warnings() as heard:
        job.start(same(state))
        assert job.commit(1) == ["committed"]
        freeze(home.status()["pid"])
        monkeypatch.setattr("transfuse._keeper.client.COMMIT_ANSWER_SECONDS", 0.2)
        step = 1

        def is_told() -> bool:
            nonlocal step
            step += 1
            assert job.commit(step) == ["skipped"]
            time.sleep(0.02)
            return sum("no step has become complete" in one and "keeper" in one for one in heard) >= 2

        until(is_told)


@pytest.mark.usefixtures("threaded", "hurried")
def test_no_room_is_told_again_and_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    home.start()
    state: dict[str, Any] = {"w": torch.zeros(4)}
    with Job(1) as job, warnings() as heard:
        job.start(same(state))
        assert job.commit(1) == ["committed"]
        monkeypatch.setattr(allotment, "free_memory", lambda: 0)
        state["more"] = torch.zeros(1 << 20)
        step = 1

        def is_told() -> bool:
            nonlocal step
            step += 1
            assert job.commit(step) == ["skipped"]
            time.sleep(0.02)
            return sum("no step has become complete" in one and "memory are free" in one for one in heard) >= 2

        until(is_told)


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("first", [True, False])
def test_a_keeper_that_is_killed_while_it_allocates(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    first: bool,
) -> None:
    """At the first commit that is an error of all ranks, which speaks of memory; later it costs no training."""
    keeper = home.start()
    states: list[dict[str, Any]] = [{"w": torch.zeros(4)} for _ in range(2)]

    def is_killed(sizes: list[int]) -> list[Any]:
        for worker in list(keeper.workers.values()):
            worker.link.close()  # As the end of its process does.
        raise KeeperLost("the kernel ends it")

    with Job(2) as job:
        job.start(same(*states))
        if not first:
            assert job.commit(1) == ["committed"] * 2
        monkeypatch.setattr(allotment, "make_slots", is_killed)
        for rank, state in enumerate(states):
            state["more"] = torch.full((1 << 20,), float(rank))
        if not first:
            assert job.commit(2) == ["skipped"] * 2
            return
        for rank, error in enumerate(job.errors(lambda keep: keep.commit(2))):
            assert isinstance(error, TransfuseError)
            text = str(error)
            assert f"rank {rank}: the keeper of this host was lost while it allocated memory" in text
            assert "max_bytes=" in text
            assert "control group" in text


@pytest.mark.usefixtures("threaded", "hurried")
def test_a_calm_job_hears_nothing(home: Home) -> None:  # noqa: F811
    home.start()
    state = {"w": torch.zeros(4)}
    with Job(1) as job, warnings() as heard:
        job.start(same(state))
        for step in range(1, 6):
            assert job.commit(step) == ["committed"]
            time.sleep(0.1)  # Longer than until the first warning; as slow steps are.
    assert heard == []
