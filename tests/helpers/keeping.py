"""Keepers for tests: one in a thread of this process for conversations, real ones for kills, and none left behind."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist

import transfuse
from transfuse._keeper import frames, runs
from transfuse._keeper.attach import SOCKET_NAME, Lock
from transfuse._keeper.client import Keep
from transfuse._keeper.frames import KeeperLink
from transfuse._keeper.process import Keeper
from transfuse._tls import Encryption
from transfuse.testing.ranks import Ranks

__all__ = [
    "SECONDS",
    "Home",
    "Job",
    "exact",
    "keepers_in",
    "same",
    "snapshot",
    "until",
]

#: A deadline for anything that normally takes a moment.
SECONDS = 60.0
T = TypeVar("T")


def until(fact: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Wait for a fact, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := fact()):
        assert time.monotonic() < deadline, f"not seen within {seconds:g} s"
        time.sleep(0.01)
    return found


def keepers_in(base: pathlib.Path) -> list[int]:
    """The pids of all living keepers, and of their starters, whose directories are in this one."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"transfuse._keeper.process" in words and any(
                    word.startswith(os.fsencode(base) + b"/") for word in words
                ):
                    found.append(int(entry.name))
    return sorted(found)


class Home:
    """A directory for keepers. Whatever happens in a test, no keeper of it is left."""

    def __init__(self) -> None:
        # Short: the path of a unix socket has at most 107 bytes.
        self.base = pathlib.Path(tempfile.mkdtemp(prefix="keep", dir="/tmp"))
        self._threads: list[tuple[Keeper, threading.Thread]] = []

    def directory(self, run: str | None) -> pathlib.Path:
        return runs.make_directory(runs.find_run(run))

    def start(self, run: str | None = "job", tls: Encryption = None) -> Keeper:
        """A keeper in a thread of this process."""
        lock = Lock.take(self.directory(run))
        assert lock is not None
        keeper = Keeper(lock, tls=tls)
        thread = threading.Thread(target=keeper.run, name="keeper", daemon=True)
        thread.start()
        self._threads.append((keeper, thread))
        return keeper

    def status(self, run: str | None = "job") -> dict[str, Any]:
        link = KeeperLink.to(str(self.directory(run) / SOCKET_NAME), SECONDS)
        try:
            return cast(dict[str, Any], json.loads(link.ask(frames.Status(), frames.StatusReply, SECONDS).text))
        finally:
            link.close()

    def ended(self, keeper: Keeper, seconds: float = SECONDS) -> bool:
        """Whether a keeper in a thread ends by itself."""
        (thread,) = [thread for one, thread in self._threads if one is keeper]
        thread.join(seconds)
        return not thread.is_alive()

    def close(self) -> None:
        for keeper, thread in self._threads:
            keeper.stop()
            thread.join(SECONDS)
            for kept in keeper.books.all():  # A keeper's process gives them back by its end.
                if kept.file.fd >= 0:
                    os.close(kept.file.fd)
                    kept.file.fd = -1
        deadline = time.monotonic() + SECONDS
        while (left := keepers_in(self.base)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.base, ignore_errors=True)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    made = Home()
    monkeypatch.setenv("TRANSFUSE_KEEPER_DIR", str(made.base))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads."""
    lock, make = threading.Lock(), runs.make_directory

    def make_directory(run: runs.Run) -> pathlib.Path:
        with lock:  # Each process has a file of its own, but each thread has not.
            return make(run)

    monkeypatch.setattr(runs, "make_directory", make_directory)


class Job:
    """Ranks as threads, which join a keeper. A job that is left without ``close()`` is like one that was killed."""

    def __init__(self, n: int, run: str = "job", **options: Any) -> None:
        self.n, self.name, self.options = n, run, options
        self.ranks = Ranks(n, timeout=SECONDS)
        self.keeps: list[Keep] = []

    def __enter__(self) -> Job:
        self.ranks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for keep in self.keeps:
            keep.detach()
        self.ranks.__exit__()

    def start(self, states: Sequence[Callable[[], Any]], per_rank: Sequence[dict[str, Any]] | None = None) -> None:
        """Every rank calls ``keep``, with its own state."""
        more = per_rank or [{} for _ in states]

        def one(rank: int, pg: dist.ProcessGroup, state: Callable[[], Any], options: dict[str, Any]) -> Keep:
            options = {"timeout": SECONDS, "run": self.name, **self.options, **options}
            return transfuse.keep(state, group=pg, **options)

        self.keeps = self.ranks.run(one, states, more)

    def all(self, fn: Callable[[Keep], T]) -> list[T]:
        """Call something on all ranks at once; the first error is raised."""
        return self.ranks.run(lambda rank, pg: fn(self.keeps[rank]), deadline=2 * SECONDS)

    def errors(self, fn: Callable[[Keep], Any]) -> list[BaseException | None]:
        """As ``all``, but return each rank's error."""
        outcomes = self.ranks.outcomes(lambda rank, pg: fn(self.keeps[rank]), deadline=2 * SECONDS)
        return [outcome.error for outcome in outcomes]

    def commit(self, step: int, *, wait: bool = True) -> list[str]:
        return [report.outcome for report in self.all(lambda keep: keep.commit(step, wait=wait)) if report is not None]

    def restore(self, **options: Any) -> int | None:
        (step,) = set(self.all(lambda keep: keep.restore(**options)))
        return step


def same(*states: Any) -> list[Callable[[], Any]]:
    """For each rank a callback that always returns its state."""

    def always(state: Any) -> Callable[[], Any]:
        return lambda: state

    return [always(state) for state in states]


def snapshot(tree: Any) -> Any:
    """A copy of a tree that shares nothing with it."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: snapshot(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [snapshot(value) for value in tree]
    return tree


def exact(one: Any, other: Any) -> bool:
    """Whether two trees are equal bit for bit, dtypes and shapes included."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and _bits(one) == _bits(other)
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(exact(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(exact, one, other))
    return type(one) is type(other) and bool(one == other)


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return b"" if flat.numel() == 0 else flat.view(torch.uint8).numpy().tobytes()
