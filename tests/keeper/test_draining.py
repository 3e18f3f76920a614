"""A keeper that is told to end: what is under way ends first, workers train on, and commits go on when it is back."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest
import torch

from commands import Running
from keeping import SECONDS, Home, home, same, threaded, until  # noqa: F401
from keeping import Job as ThreadedJob
from ring_hosts import Host, Job, Worker
from transfuse._errors import TransfuseError
from transfuse._keeper import frames
from transfuse._keeper.draining import Draining
from transfuse._keeper.frames import KeeperEnds, KeeperLost
from transfuse._keeper.runs import Process, WatchedProcess, watched
from transfuse._keeper.slot_file import Brief, Label, SlotView

LOG = "transfuse.keeper"


def write(worker: Worker, number: int, step: int) -> None:
    """The rest of a commit that was begun."""
    view, label = worker.slots[number], Label(worker.generation, step)
    view.begin(label)
    brief = msgspec.msgpack.encode(Brief(worker.rank, 1, worker.bundles))
    view.commit(label, brief, b"text")
    worker.link.ask(frames.Committed(number, *label), frames.Ack, SECONDS)


def told_to_end(host: Host) -> None:
    assert host.keeper is not None
    host.keeper.drain()
    until(lambda: host.keeper is not None and host.keeper.is_draining)


@pytest.fixture
def alone(job: Job) -> Worker:
    """The worker of a job of one host."""
    job.add_host()
    return job.meet([0])[0]


def test_the_commit_under_way_counts_and_no_other_begins(
    job: Job, alone: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG)
    assert alone.commit(1)
    number = alone.begin(2)
    assert number is not None
    told_to_end(job.hosts[0])
    until(lambda: "it waits for the commit of rank 0" in caplog.text)
    with pytest.raises(KeeperLost):
        Worker(job.hosts[0].directory, 1)
    write(alone, number, 2)
    until(job.hosts[0].has_ended)
    with pytest.raises(KeeperLost):
        alone.begin(3)
    assert (job.hosts[0].directory / "held").exists()
    assert '"step":2' in (job.hosts[0].directory / "held").read_text()
    assert "was told to end" in (job.hosts[0].directory / "held").read_text()


def test_a_worker_is_told_why_its_commit_is_not_taken(job: Job, alone: Worker) -> None:
    assert alone.commit(1)
    other = Worker(job.hosts[0].directory, 1)  # A reader keeps the keeper here.
    other.link.ask_for_files(frames.Open(alone.generation, 1, [0]), frames.Mapped, SECONDS)
    told_to_end(job.hosts[0])
    assert alone.status()["draining"] is not None
    with pytest.raises(KeeperEnds, match="the keeper of this host was told to end"):
        alone.begin(2)
    assert not job.hosts[0].has_ended()
    other.link.ask(frames.Ack(), frames.Ack, SECONDS)
    until(job.hosts[0].has_ended)
    other.link.close()


@pytest.mark.parametrize("how", ["told again", "late"])
def test_it_ends_at_once_when_told_again_or_late(
    job: Job, alone: Worker, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG)
    keeper = job.hosts[0].keeper
    assert keeper is not None
    assert alone.commit(1)
    assert alone.begin(2) is not None
    keeper._drain_seconds = 0.1 if how == "late" else SECONDS
    told_to_end(job.hosts[0])
    if how == "told again":
        until(lambda: "it waits for the commit of rank 0" in caplog.text)
        keeper.drain()
    until(job.hosts[0].has_ended)
    assert "the keeper ends at once" in caplog.text
    assert "It does not wait any more for the commit of rank 0" in caplog.text


def test_ranks_of_a_host_end_the_step_that_one_of_them_has_begun(job: Job, alone: Worker) -> None:
    assert alone.commit(4)
    keeper = job.hosts[0].keeper
    assert keeper is not None
    draining = Draining(keeper.books, SECONDS)
    generation = alone.generation
    assert [draining.takes(Label(generation, step)) for step in (3, 4, 5)] == [True, True, False]
    assert draining.waits_for([0], ring_works=True) == ""


@pytest.mark.processes
def test_what_is_replicated_ends_first_and_the_keeper_comes_back_at_its_port(job: Job) -> None:
    job.add_host()
    job.add_host(processes=True)
    workers = job.meet([0, 1])
    job.commit(1)
    job.until_confirmed(1)
    job.commit(2)
    child = job.hosts[1].child
    assert child is not None
    os.kill(child.pid, signal.SIGTERM)
    until(job.hosts[1].has_ended)
    until(partial(workers[0].has_confirmed, 2))  # It has not ended before.
    log = (job.hosts[1].directory / "log").read_text()
    assert "was told to end: no new commit is taken" in log
    assert "does not wait any more" not in log
    workers[1].link.close()
    # `come_back` asserts that the others find it where it was.
    job.come_back(1)
    job.commit(3)
    job.until_confirmed(3)
    assert "this host's keeper had kept steps up to step" in (job.hosts[1].directory / "log").read_text()


# ------------------------------------------------------------------------------------------------- `transfuse keep`


@pytest.fixture
def service(home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:  # noqa: F811
    """Workers of this process start no keeper."""
    monkeypatch.setenv("TRANSFUSE_KEEPER_START", "0")
    return home


@contextmanager
def foreground(*more: str) -> Iterator[Running]:
    with Running("keep", "--run", "job", *more) as keeper:
        keeper.line()
        yield keeper


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


@pytest.mark.processes
@pytest.mark.usefixtures("threaded")
def test_a_job_trains_on_without_its_keeper_and_commits_when_it_is_back(
    service: Home, caplog: pytest.LogCaptureFixture
) -> None:
    states = [{"w": torch.full((4,), float(rank))} for rank in range(2)]
    with ThreadedJob(2) as job:
        with foreground() as keeper:
            job.start(same(*states))
            assert job.commit(1) == ["committed"] * 2
            keeper.process.terminate()
            _, err, code = keeper.end()
        assert code == 0
        assert "the keeper was told to end: no new commit is taken" in err
        for step in range(2, 5):
            assert job.commit(step) == ["skipped"] * 2
        for rank in range(2):
            assert warnings_of(caplog, f"rank {rank} goes on without the keeper of its host, and looks for it") == 1
        assert len(list(service.directory("job").glob("socket"))) == 0  # Nobody has started another one.
        with foreground() as keeper:
            for rank in range(2):
                until(partial(warnings_of, caplog, f"rank {rank} has found the keeper of its host again"))
            assert job.commit(5) == ["committed"] * 2
            assert until(lambda: service.status("job")["confirmed_step"]) == 5
            job.all(lambda keep: keep.close())
            _, err, code = keeper.end()
    assert code == 0
    assert "had kept steps up to step 1" in err
    assert "was told to end. Commits of its job go on here" in err
    assert list(service.base.iterdir()) == []


def test_workers_that_start_no_keeper_say_what_is_missing(service: Home) -> None:
    with ThreadedJob(1, timeout=0.5) as job:
        with pytest.raises(TransfuseError, match=r"TRANSFUSE_KEEPER_START=0 says that workers start none") as caught:
            job.start([lambda: {"w": torch.ones(1)}])
        assert str(service.directory("job") / "socket") in str(caught.value)
    assert not (service.directory("job") / "socket").exists()


# ------------------------------------------------------------------------------- workers that cannot be seen from here


def other_pids() -> list[str]:
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("a namespace of pids needs root and unshare")
    # The keeper gets the signals: unshare stays in the foreground, and dies with it.
    return [unshare, "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.mark.processes
@pytest.mark.usefixtures("threaded")
def test_a_keeper_in_another_namespace_of_pids_knows_whether_its_workers_live(service: Home) -> None:
    """As in a pod whose containers do not share their processes."""
    with Running("keep", "--run", "job", under=other_pids()) as keeper:
        keeper.line()
        with ThreadedJob(1) as job:
            job.start([lambda: {"w": torch.ones(2)}])
            assert job.commit(3) == ["committed"]
            status = service.status("job")
            assert status["agents"]  # What has started this process lives.
            job.keeps[0].detach()
            until(lambda: service.status("job")["attached"] == [])
            (inside,) = (pid for pid, line in keeper.alive().items() if "unshare" not in line)
            os.kill(inside, signal.SIGTERM)
            _, err, _ = keeper.end()
            assert "was told to end" in err
    # Nobody is attached, but the job may be started again: the note stays.
    assert pathlib.Path(service.directory("job") / "held").exists()


def test_a_watched_process_is_alive_until_it_ends() -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        found = Process.of(child.pid)
        assert found is not None
        with watched([found]) as (fd,):
            seen = WatchedProcess.by(found, os.dup(fd))
        assert seen == found
        assert seen.alive()
        child.kill()
        child.wait()
        assert not seen.alive()
        with watched([found]) as none:
            assert none == []


def test_slots_are_read_while_it_drains(job: Job, alone: Worker) -> None:
    assert alone.commit(1)
    _, descriptors = alone.link.ask_for_files(frames.Open(alone.generation, 1, [0]), frames.Mapped, SECONDS)
    told_to_end(job.hosts[0])
    view = SlotView(descriptors[0], writable=False)
    os.close(descriptors[0])
    assert view.brief().rank == 0
    alone.link.ask(frames.Ack(), frames.Ack, SECONDS)
    until(job.hosts[0].has_ended)
