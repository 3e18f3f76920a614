"""The workers' processes, as the parent has them: started, ordered about, heard, killed, and all ended in the end."""

from __future__ import annotations

import itertools
import signal
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Self

from torch._C._distributed_c10d import TCPStore

from transfuse.cli.demo.job import work
from transfuse.cli.demo.words import Go, Lost, Over, Settings, Started, Word
from transfuse.cli.workers import Worker, WorkersFailed, interrupts_held, loopback_store

__all__ = ["Crew"]

#: Longer than anything takes here, such as starting all workers on a busy machine.
PATIENCE = timedelta(minutes=2)

#: How a worker ends that somebody has killed. One that ends otherwise has a fault, which a new one would have too.
KILLED = (-signal.SIGKILL, -signal.SIGTERM)


class Crew:
    """``settings.workers`` processes, and the store through which they form their groups."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._store: TCPStore | None = None
        self._workers: dict[int, Worker] = {}
        self._heard = time.monotonic()
        self._generations = itertools.count()

    def __enter__(self) -> Self:
        self._store = loopback_store(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def ranks(self) -> range:
        return range(self.settings.workers)

    def __contains__(self, rank: int) -> bool:
        return rank in self._workers

    def next_generation(self) -> int:
        """A number that no group has had before: the store remembers those that had one."""
        return next(self._generations)

    def start(self, rank: int) -> Started:
        """A fresh process for this rank, which has none."""
        assert self._store is not None
        assert rank not in self._workers
        with interrupts_held():
            worker = Worker(f"worker-{rank}", len(self.ranks), work, rank, self.settings, self._store.port)
            self._workers[rank] = worker
        return Started(worker.pid)

    def kill(self, rank: int) -> None:
        self._workers[rank].kill()

    def order(self, rank: int, order: Go | Over) -> None:
        # That it has died meanwhile will be heard.
        with suppress(OSError):
            self._workers[rank].connection.send(order)

    def hear(self, seconds: float) -> list[tuple[int, Word]]:
        """What has been said within so many seconds, at the latest. Who was killed is :class:`Lost`."""
        connections = {worker.connection: rank for rank, worker in self._workers.items()}
        words: list[tuple[int, Word]] = []
        for connection in wait(list(connections), seconds):
            assert isinstance(connection, Connection)
            rank = connections[connection]
            words.append((rank, self._word_of(rank)))
            self._heard = time.monotonic()
        if time.monotonic() - self._heard > PATIENCE.total_seconds():
            raise WorkersFailed(dict.fromkeys(self._workers, f"has said nothing for {PATIENCE.total_seconds():.0f} s"))
        return words

    def _word_of(self, rank: int) -> Word:
        worker = self._workers[rank]
        try:
            word = worker.connection.recv()
        except (EOFError, OSError):
            if worker.exit_code() not in KILLED:
                raise WorkersFailed({rank: f"died: {worker.last_words()}"}) from None
            del self._workers[rank]
            worker.end()
            return Lost(worker.last_words())
        if isinstance(word, Word):
            return word
        _, (cause, note) = word
        error = WorkersFailed({rank: cause})
        error.add_note(f"in worker {rank}:\n{note}")
        raise error

    def end(self) -> None:
        """Nobody is left when this returns."""
        with interrupts_held():
            for worker in self._workers.values():
                worker.kill()
            for worker in self._workers.values():
                worker.end()
            self._workers.clear()
