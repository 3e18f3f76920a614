"""Hosts for tests of the ring: each is a keeper with a directory of its own on loopback, and one rank.

Workers write their slots as the real client does.
"""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from transfuse._errors import TransfuseError
from transfuse._keeper import frames, process
from transfuse._keeper.attach import SOCKET_NAME, Lock
from transfuse._keeper.bundle_table import KEY_BYTES, PRIVATE, Bundles
from transfuse._keeper.frames import KeeperLink, KeeperLost
from transfuse._keeper.process import Keeper
from transfuse._keeper.runs import Process
from transfuse._keeper.slot_file import Brief, Label, SlotView
from transfuse.testing import ranks

__all__ = ["NBYTES", "SECONDS", "TOKEN", "Host", "Job", "Worker", "contents", "rings", "until"]

SECONDS = 30.0
TOKEN = secrets.token_hex(32)
NBYTES = 1 << 20
LOOPBACK = "127.0.0.1"


def until(fact: Callable[[], object], what: str = "") -> Any:
    """Wait for a fact, and return it."""
    deadline = time.monotonic() + SECONDS
    while not (result := fact()):
        assert time.monotonic() < deadline, f"it never came to be: {what}"
        time.sleep(0.02)
    return result


def contents(rank: int, step: int, nbytes: int = NBYTES) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What a rank commits: the first half is the same at every step."""
    frozen = np.random.default_rng(rank).integers(0, 256, nbytes // 2, dtype=np.uint8)
    return np.concatenate(
        [frozen, np.random.default_rng((rank, step)).integers(0, 256, nbytes - nbytes // 2, dtype=np.uint8)]
    )


class Worker:
    """One rank's worker: it commits one private bundle."""

    def __init__(
        self,
        directory: pathlib.Path,
        rank: int,
        *,
        slots: int = 4,
        max_bytes: int | None = None,
        agent: Process | None = None,
    ) -> None:
        self.rank = rank
        self.link = KeeperLink.to(str(directory / SOCKET_NAME), SECONDS)
        me = Process.of(os.getpid())
        assert me is not None
        hello = frames.Hello(
            version=frames.VERSION,
            rank=rank,
            world_size=1,
            pid=me.pid,
            started=me.started,
            agent_pid=(agent or me).pid,
            agent_started=(agent or me).started,
            is_named=True,
            linger=600.0,
            max_bytes=max_bytes,
            slots=slots,
        )
        self.welcome = self.link.ask(hello, frames.Welcome, SECONDS)
        self.generation = 0
        self.slots: dict[int, SlotView] = {}
        self.place = 0
        self.nbytes = NBYTES

    def expose(self, token: str = TOKEN) -> str:
        return self.link.ask(frames.Expose(LOOPBACK, token), frames.Exposed, SECONDS).address

    def join(self, peers: frames.Peers) -> None:
        self.generation = peers.generation
        self.link.ask(peers, frames.Ack, SECONDS)
        self.slots.clear()

    def lay(self, step: int) -> None:
        bundles = Bundles.of([f"rank {self.rank}".encode().ljust(KEY_BYTES)], [self.nbytes], [PRIVATE])
        question = frames.Lay(self.generation, step, bundles, 200, SECONDS)
        laid, descriptors = self.link.ask_for_files(question, frames.Laid, SECONDS)
        self.bundles, self.place = laid.bundles, int(laid.bundles.places[0])
        for number, fd in enumerate(descriptors, laid.first):
            self.slots[number] = SlotView(fd, writable=True)
            os.close(fd)

    def begin(self, step: int) -> int | None:
        for _ in range(2):
            slot = self.link.ask(frames.Begin(self.generation, step), frames.Slot, SECONDS)
            if not slot.renew:
                return slot.number
            self.lay(step)
        raise AssertionError("the keeper wants one layout after another")

    def commit(self, step: int) -> bool:
        """Commit a step; False if no slot was free."""
        number = self.begin(step)
        if number is None:
            return False
        view, label = self.slots[number], Label(self.generation, step)
        view.begin(label)
        view.bytes[self.place : self.place + self.nbytes] = contents(self.rank, step, self.nbytes)
        brief = Brief(self.rank, 1, self.bundles)
        view.commit(label, msgspec.msgpack.encode(brief), b"text")
        self.link.ask(frames.Committed(number, *label), frames.Ack, SECONDS)
        return True

    def status(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.link.ask(frames.Status(), frames.StatusReply, SECONDS).text)
        return result

    def confirmed(self) -> int | None:
        step: int | None = self.status()["confirmed_step"]
        return step

    def has_confirmed(self, step: int) -> bool:
        return self.confirmed() == step

    def has_agreed(self, step: int) -> bool:
        return bool(self.status()["replicas"]["agreed_step"] == step)

    def lacks(self, rank: int, step: int, generation: int) -> bool:
        return self.read(rank, step, generation) is None

    def read(self, rank: int, step: int, generation: int | None = None) -> Any:
        """A rank's bytes of a step as this keeper holds them, in a slot or a replica."""
        label = Label(self.generation if generation is None else generation, step)
        try:
            opened = self.link.ask_for_files(frames.Open(*label, [rank]), frames.Mapped, SECONDS)
        except KeeperLost:
            raise
        except TransfuseError:
            return None
        (fd,) = opened[1]
        view = SlotView(fd, writable=False)
        os.close(fd)
        bundles = view.brief().bundles
        place, size = int(bundles.places[0]), int(bundles.nbytes[0])
        data = view.bytes[place : place + size].copy()
        self.link.ask(frames.Ack(), frames.Ack, SECONDS)
        return data

    def close(self) -> None:
        self.link.ask(frames.Close(), frames.Ack, SECONDS)


@dataclass
class Host:
    """A keeper in a thread of this process, or in a process of its own."""

    directory: pathlib.Path
    keeper: Keeper | None = None
    child: ranks.Worker | None = None

    def start(self) -> None:
        lock = Lock.take(self.directory)
        assert lock is not None
        self.keeper = Keeper(lock)
        threading.Thread(target=self.keeper.run, name="keeper", daemon=True).start()

    def start_process(self) -> None:
        if self.child is not None:
            self.child.end()
        with suppress(FileNotFoundError):
            (self.directory / SOCKET_NAME).unlink()
        self.child = ranks.Worker(_run_keeper, str(self.directory), name="keeper", method="forkserver")

    def wait(self) -> None:
        path = str(self.directory / SOCKET_NAME)

        def answers() -> bool:
            with suppress(KeeperLost):
                KeeperLink.to(path, SECONDS).close()
                return True
            return False

        until(answers, f"a keeper in {self.directory}")

    def stop(self) -> None:
        if self.keeper is not None:
            self.keeper.stop()
            self.keeper.close()
        if self.child is not None:
            self.child.end()

    def has_ended(self) -> bool:
        return not (self.directory / SOCKET_NAME).exists()


def _run_keeper(_: object, directory: str) -> None:
    log = os.open(pathlib.Path(directory) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    lock = Lock.take(pathlib.Path(directory))
    assert lock is not None
    os._exit(process.main([directory, str(lock.fd)]))  # As `python -m transfuse._keeper.process` does.


@dataclass
class Job:
    """Hosts with one rank each; they meet as the ranks of a job do."""

    path: pathlib.Path
    hosts: list[Host] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    generation: int = 0
    peers: list[frames.Peers] = field(default_factory=list)

    def add_host(self, *, processes: bool = False) -> Host:
        host = Host(self.path / f"host{len(self.hosts)}")
        host.directory.mkdir()
        host.start_process() if processes else host.start()
        self.hosts.append(host)
        return host

    def meet(
        self,
        hosts: Sequence[int],
        *,
        replicas: int = 1,
        rate: float | None = None,
        sizes: Sequence[int] = (),
        saves: frames.Saves | None = None,
        **of: Any,
    ) -> list[Worker]:
        """Workers start on these hosts. Rank i is the worker of the i-th of them."""
        for worker in self.workers:
            worker.link.close()
        limits: Sequence[int | None] = of.pop("limits", [None] * len(hosts))
        self.workers = []
        for rank, host in enumerate(hosts):
            self.hosts[host].wait()
            self.workers.append(Worker(self.hosts[host].directory, rank, max_bytes=limits[rank], **of))
        known = [worker.welcome.generation for worker in self.workers]
        if saves is not None:
            ask = frames.FindStorage(saves)
            known += [worker.link.ask(ask, frames.FoundStorage, SECONDS).generation for worker in self.workers]
        self.generation = max(known) + 1
        doors = [worker.expose() for worker in self.workers]
        count = len(hosts)
        each = [[rank] for rank in range(count)]
        self.peers = [
            frames.Peers(self.generation, count, doors, each, index, TOKEN, replicas, rate, saves)
            for index in range(count)
        ]
        for worker, peers in zip(self.workers, self.peers, strict=True):
            worker.join(peers)
        for worker, nbytes in zip(self.workers, sizes, strict=False):
            worker.nbytes = nbytes
        return self.workers

    def commit(self, step: int) -> None:
        for worker in self.workers:
            assert worker.commit(step)

    def come_back(self, number: int) -> Worker:
        """A keeper is started again in its directory, and its worker attaches again, in the same generation."""
        host = self.hosts[number]
        host.start_process()
        host.wait()
        worker = Worker(host.directory, number)
        assert worker.expose() == self.peers[0].keepers[number]
        worker.join(self.peers[number])
        self.workers[number] = worker
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.link.close()
        for host in self.hosts:
            host.stop()

    def until_confirmed(self, step: int) -> None:
        for worker in self.workers:
            until(partial(worker.has_confirmed, step), f"rank {worker.rank} hears of step {step}")


def rings() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("transfuse-ring")]
