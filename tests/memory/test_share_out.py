"""Threads that take pieces of work from one supply."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from transfuse._memory import vm


@pytest.mark.parametrize("workers", [-1, 1, 2, 7])
def test_all_threads_together_get_each_piece_once(workers: int) -> None:
    got: list[int] = []
    names = set()

    def work(pieces: Iterator[int]) -> None:
        names.add(threading.current_thread().name)
        got.extend(list(pieces))

    vm.share_out(range(10_000), work, workers, "some-name")
    assert sorted(got) == list(range(10_000))
    assert names == {threading.current_thread().name} | ({"some-name"} if workers > 1 else set())


def test_the_first_error_ends_the_work_of_all_and_is_raised() -> None:
    begun = threading.Barrier(3)
    failed = threading.Event()
    after = []

    def work(pieces: Iterator[int]) -> None:
        for piece in pieces:
            if piece < 3:
                begun.wait(60)  # Each thread has one piece.
            if piece == 1:
                failed.set()
                raise ValueError("of piece 1")
            assert failed.wait(60)
            after.append(piece)

    with pytest.raises(ValueError, match="of piece 1"):
        vm.share_out(range(1_000_000), work, 3, "some-name")
    assert len(after) < 1_000_000


def test_fewer_threads_than_asked_for_do_all_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []
    got: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    vm.share_out(range(100), lambda pieces: got.extend(list(pieces)), 4, "some-name")
    assert sorted(got) == list(range(100))
    assert len(started) == 1
