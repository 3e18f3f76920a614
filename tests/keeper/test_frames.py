"""What a worker and its keeper say to each other: an answer belongs to its question, and nothing hangs."""

from __future__ import annotations

import os
import pathlib
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import torch

from keeping import SECONDS, Home, Job, home, same, threaded  # noqa: F401
from transfuse._keeper import frames
from transfuse._keeper.frames import KeeperLink, KeeperLost
from transfuse._keeper.process import Keeper


@pytest.fixture
def ends() -> Iterator[tuple[KeeperLink, KeeperLink]]:
    """The worker's end of a connection, and the keeper's."""
    worker, keeper = (KeeperLink(one) for one in socket.socketpair())
    yield worker, keeper
    worker.close()
    keeper.close()


def test_an_answer_that_comes_late_is_not_taken_for_that_to_the_next_question(
    ends: tuple[KeeperLink, KeeperLink],
) -> None:
    worker, keeper = ends
    with pytest.raises(KeeperLost):
        worker.ask(frames.Ack(), frames.Ack, 0.01)
    # It was frozen, and answers now.
    assert isinstance(keeper.hear(SECONDS)[0], frames.Ack)
    with suppress(KeeperLost):
        keeper.send(frames.Ack(), SECONDS)
    with pytest.raises(KeeperLost):
        worker.ask(frames.Close(), frames.Ack, SECONDS)


def test_names_on_the_wire_are_not_those_in_python() -> None:
    """A keeper outlives its workers: new ones still understand it."""
    assert msgspec.msgpack.encode(frames.Ack()) == msgspec.msgpack.encode(["Done"])
    assert msgspec.msgpack.encode(frames.StatusReply(b"{}")) == msgspec.msgpack.encode(["Told", b"{}"])


def test_a_worker_without_descriptors_says_so_at_once(ends: tuple[KeeperLink, KeeperLink]) -> None:
    worker, keeper = ends
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = [os.memfd_create("slot") for _ in range(10)]
    highest = max(int(one.name) for one in pathlib.Path("/proc/self/fd").iterdir())
    while files[-1] <= highest:
        files.append(os.dup(files[0]))  # No number below the limit is free.
    keeper.send(frames.Mapped(list(range(10))), SECONDS, files[:10])
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, hard))
    try:
        with pytest.raises(KeeperLost, match="no descriptors left"):
            worker.ask(frames.Open(1, 1, list(range(10))), frames.Mapped, 5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in files:
            os.close(fd)


@pytest.mark.usefixtures("threaded")
def test_a_keeper_that_cannot_start_a_thread_answers_the_next_worker(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper: Keeper = home.start()
    refused = threading.Event()

    class Thread(threading.Thread):
        def start(self) -> None:
            if self.name == "transfuse-keeper-in" and not refused.is_set():
                refused.set()
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(threading, "Thread", Thread)
    with Job(1, timeout=5.0) as job:
        job.start(same({"w": torch.zeros(4)}))
        assert refused.is_set()
        assert job.commit(1) == ["committed"]
    assert keeper.status()["confirmed_step"] == 1
