"""The rank's side of a :class:`~transfuse.testing.ranks.Fleet`: its loop, and calls for the functions that it runs."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from transfuse.testing.ranks.outcome import RemoteError
from transfuse.testing.ranks.worker import HOST

__all__ = ["RankStart", "announce", "hear", "say", "serve", "store"]


@dataclass(frozen=True)
class RankStart:
    """What a rank is told when it starts."""

    rank: int
    size: int
    #: Port of the store in the parent.
    port: int
    #: Timeout of the default group.
    timeout: float
    #: How long to wait for other ranks that start slowly.
    start: float
    #: The generation of the default group to join; None: no group is made.
    generation: int | None


def announce(name: str) -> None:
    """In a rank: tell the parent that this point is reached. The parent may be waiting in :meth:`Fleet.wait_for`."""
    _me().send("at", name)


def say(word: object) -> None:
    """In a rank: pass plain data to the parent, which takes it with :meth:`Fleet.said` or :meth:`Fleet.listen`."""
    _me().send("said", word)


def hear() -> Any:
    """In a rank: return the next :meth:`Fleet.tell`. For one thread at a time; EOFError when the parent is gone."""
    return pickle.loads(_me().connection.recv_bytes())


def store() -> TCPStore:
    """In a rank: the store in the parent, which outlives every rank."""
    return _me().store()


class _Rank:
    def __init__(self, connection: Connection[Any, Any], place: RankStart) -> None:
        self.connection, self.place = connection, place
        self._lock = threading.Lock()
        self._store: TCPStore | None = None

    def send(self, kind: str, payload: object) -> None:
        # Plain pickle by value: multiprocessing's pickler would put tensors into shared memory that nobody frees.
        data = pickle.dumps((kind, payload))
        # Any thread of a rank may send.
        with self._lock:
            self.connection.send_bytes(data)

    def store(self) -> TCPStore:
        if self._store is None:
            self._store = TCPStore(HOST, self.place.port, None, False, timedelta(seconds=self.place.start))
        return self._store

    def join(self, generation: int) -> None:
        """Leave the default group, and form the group of this generation with all other ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()
        place = self.place
        prefix = PrefixStore(f"generation{generation}", self.store())
        # Wait for all ranks before making the group, because its timeout may be shorter than a slow start.
        prefix.set(f"rank{place.rank}", "here")
        prefix.wait([f"rank{other}" for other in range(place.size)], timedelta(seconds=place.start))
        timeout = timedelta(seconds=place.timeout)
        dist.init_process_group("gloo", store=prefix, rank=place.rank, world_size=place.size, timeout=timeout)


_rank: _Rank | None = None


def _me() -> _Rank:
    assert _rank is not None, "this is for functions that run in a process of a Fleet"
    return _rank


def serve(connection: Connection[Any, Any], place: RankStart) -> None:
    """The main loop of a rank's process: run one function after the other, until the parent ends the process."""
    global _rank
    # A file without a name; the parent reads it by the number of the descriptor.
    stacks = os.memfd_create("stacks")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    me = _rank = _Rank(connection, place)
    try:
        if place.generation is not None:
            me.join(place.generation)
        me.send("up", stacks)
        while True:
            task, started = connection.recv_bytes(), time.monotonic()
            try:
                function, args = pickle.loads(task)
                run = me.join if function is None else partial(function, place.rank)
                value = run(*args)
                me.send("done", (value, time.monotonic() - started))
            except BaseException as error:
                me.send("failed", (_portable(error), time.monotonic() - started))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent has closed its end.
        os._exit(0)
    except BaseException as error:
        me.send("failed", (_portable(error), 0.0))
        # No teardown: tearing down a group waits for peers.
        os._exit(1)


def _portable(error: BaseException) -> BaseException:
    """The error as the parent will get it, with its traceback as a note; or a stand-in if it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error):
            error.add_note(f"in the worker:\n{text}")
            return error
    except Exception:
        pass
    return RemoteError(f"{type(error).__name__}: {error}", f"in the worker:\n{text}")
