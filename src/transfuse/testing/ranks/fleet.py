"""Ranks as processes, from the parent's side: start them, run functions on them, listen, kill, and end them all."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import pathlib
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from torch._C._distributed_c10d import TCPStore

from transfuse.testing.ranks.inside import RankStart, serve
from transfuse.testing.ranks.outcome import Died, Late, Outcome, RanksFailed, RemoteError
from transfuse.testing.ranks.worker import Method, Worker, interrupts_held, loopback_environment, loopback_store

__all__ = ["Fleet", "ProcessPool", "listening", "threads_for"]

#: The first failure is often a consequence of another, so the parent listens this much longer before it reports.
GRACE_SECONDS = 1.0
#: A wait without a limit consists of waits of this length.
_HOUR = 3600.0


@dataclass
class _Member:
    """One rank's process, and what the parent knows of it."""

    rank: int
    process: Worker
    reader: threading.Thread | None = None
    #: Whether it waits for a function.
    up: bool = False
    busy: bool = False
    dead: bool = False
    outcome: Outcome[Any] = field(default_factory=Outcome)
    reached: collections.Counter[str] = field(default_factory=collections.Counter)
    #: The descriptor, in that process, of the file to which the stacks of its threads are written.
    stacks: int | None = None


class Fleet:
    """``n`` fresh processes: ``with Fleet(3) as fleet: fleet.start(fn, *args)``.

    Each has a default gloo group over loopback with this ``timeout`` in seconds, or none if ``group`` is False. They
    are forked from a server that has done nothing but import; ``method="spawn"`` starts processes that share nothing.
    ``start`` is how long it may take until all are up. See :class:`Worker` for ``interrupts``.
    """

    def __init__(
        self,
        n: int,
        *,
        timeout: float = 30.0,
        method: Method = "forkserver",
        group: bool = True,
        threads: int = 1,
        interrupts: bool = True,
        start: float = 100.0,
    ) -> None:
        self.n, self.timeout, self.method = n, timeout, method
        self._group, self._threads, self._interrupts, self._start_seconds = group, threads, interrupts, start
        #: The environment of all processes, also of those that are started later.
        self._environ = dict(os.environ) | loopback_environment()
        #: Generation of the default group.
        self.generation = 0
        self._members: dict[int, _Member] = {}
        self._store: TCPStore | None = None
        self._events: queue.SimpleQueue[tuple[_Member, str, Any]] = queue.SimpleQueue()
        self._words: collections.deque[tuple[int, Any]] = collections.deque()

    def __enter__(self) -> Self:
        self.launch()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, rank: int) -> bool:
        """Whether this rank has a process, dead or alive."""
        return rank in self._members

    @property
    def workers(self) -> list[_Member]:
        """What the parent knows of each rank, in the order of ranks."""
        return [self._members[rank] for rank in sorted(self._members)]

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.workers]

    @property
    def port(self) -> int:
        """Port of the store."""
        assert self._store is not None
        return self._store.port

    # ------------------------------------------------------------------------------------------------------- processes

    def open(self) -> None:
        """Make the store, but no process yet."""
        # In the parent's process, so that the store outlives every rank.
        self._store = loopback_store(timedelta(seconds=self._start_seconds))
        self._events, self.generation = queue.SimpleQueue(), 0
        self._words.clear()

    def launch(self) -> None:
        """Start all ranks, and wait until they are up."""
        self.open()
        try:
            for rank in range(self.n):
                self._add(rank, 0 if self._group else None)
            self.wait_until_up()
        except BaseException:
            self.close()
            raise

    def restart(self, rank: int) -> int:
        """Start a fresh process for this rank; return its pid. Does not wait until it is up.

        The process is in no group: :meth:`renew` makes a group of all ranks.
        """
        self.end(rank)
        return self._add(rank, None).process.pid

    def wait_until_up(self) -> None:
        """Wait until all ranks wait for functions. :class:`RanksFailed` says which could not be started, and why."""
        self._until(lambda: all(member.up or member.dead for member in self.workers), self._start_seconds)
        if failed := {member.rank: _error(member) for member in self.workers if member.dead}:
            raise RanksFailed.of(failed)
        if late := [member for member in self.workers if not member.up]:
            raise Late(f"ranks {[member.rank for member in late]} are not up after {self._start_seconds} s")

    def renew(self, deadline: float) -> bool:
        """Make a new default group of all ranks: an error may have closed connections for good.

        Returns False if that failed.
        """
        self._until(lambda: True, 0)
        if any(member.dead or member.busy for member in self.workers):
            return False
        self.generation += 1
        self._send(None, (self.generation,), None)
        try:
            return all(outcome.error is None for outcome in self.outcomes(deadline))
        except Late:
            return False

    def end(self, *ranks: int) -> None:
        """End the processes of these ranks, if they have one, and forget them with all that they have said."""
        with interrupts_held():
            members = [self._members.pop(rank) for rank in ranks if rank in self._members]
            for member in members:
                member.process.kill()
            for member in members:
                self._bury(member)
            self._words = collections.deque(pair for pair in self._words if pair[0] in self._members)

    def close(self) -> None:
        """End every process, frozen ones too, and wait for that."""
        with interrupts_held():
            for member in self._members.values():
                member.process.kill()
            for member in self._members.values():
                self._bury(member)
            self._members.clear()
            self._store = None

    def _add(self, rank: int, generation: int | None) -> _Member:
        assert rank not in self._members
        place = RankStart(rank, self.n, self.port, self.timeout, self._start_seconds, generation)
        with interrupts_held():
            process = Worker(
                serve,
                place,
                name=f"rank{rank}",
                method=self.method,
                environ=self._environ,
                threads=self._threads,
                interrupts=self._interrupts,
            )
            member = self._members[rank] = _Member(rank, process)
            member.reader = threading.Thread(target=self._read, args=(member, self._events), daemon=True)
            member.reader.start()
        return member

    @staticmethod
    def _bury(member: _Member) -> None:
        if member.reader is not None:
            # Wait until the thread has read everything and knows how the process ended.
            member.reader.join(10)
        member.process.end()

    @staticmethod
    def _read(member: _Member, events: queue.SimpleQueue[tuple[_Member, str, Any]]) -> None:
        """Read in one thread per rank, because a rank that is frozen in the middle of a message blocks its reader."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                data = member.process.connection.recv_bytes()
                try:
                    kind, payload = pickle.loads(data)
                except Exception as error:
                    kind, payload = "failed", (RemoteError(f"cannot be unpickled: {error!r}"), 0.0)
                events.put((member, kind, payload))
        events.put((member, "dead", member.process.wait()))

    # ------------------------------------------------------------------------------------------------------- functions

    def start(self, fn: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> None:
        """Start ``fn(rank, *args)``, a function of a module, in the main thread of all or some ranks; do not wait."""
        self._send(fn, args, ranks)

    def _send(self, fn: Callable[..., Any] | None, args: tuple[Any, ...], ranks: Iterable[int] | None) -> None:
        task = pickle.dumps((fn, args))
        for member in self._chosen(ranks):
            assert not member.busy, f"rank {member.rank} is still busy"
            if not member.dead:
                member.busy, member.outcome = True, Outcome()
                member.reached.clear()
                # If the rank has just died, its reader notices.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    member.process.connection.send_bytes(task)

    def outcomes(self, deadline: float = 60.0, ranks: Iterable[int] | None = None) -> list[Outcome[Any]]:
        """Wait until all or some ranks have ended; return their outcomes, with :class:`Died` among the errors.

        Raises :class:`Late`, which names the ranks that have not ended, and where they are.
        """
        __tracebackhide__ = True
        chosen = self._chosen(ranks)
        self._until(lambda: not any(member.busy for member in chosen), deadline)
        # From now on the value belongs to the caller.
        self._words.clear()
        if stuck := [member for member in chosen if member.busy]:
            others = {member.rank: member.outcome for member in chosen if not member.busy}
            stacks = "\n".join(f"rank {member.rank}:\n{self._stacks(member)}" for member in stuck)
            late = [member.rank for member in stuck]
            raise Late(f"ranks {late} still running after {deadline} s; the others: {others}\n{stacks}")
        return [member.outcome for member in chosen]

    # ----------------------------------------------------------------------------------------------------------- words

    def tell(self, rank: int, word: object) -> None:
        """Pass plain data to the function that runs on this rank, which takes it with :func:`hear`."""
        # If the rank has died meanwhile, its reader notices.
        with contextlib.suppress(OSError):
            self._members[rank].process.connection.send_bytes(pickle.dumps(word))

    def said(self, seconds: float = math.inf) -> tuple[int, Any] | None:
        """Return a rank and the next thing it said. A rank's last word is its function's :class:`Outcome`.

        Returns None if nothing is said within ``seconds``, or no function runs any more.
        """
        self._until(lambda: bool(self._words) or not any(member.busy for member in self.workers), seconds)
        return self._words.popleft() if self._words else None

    def listen(self) -> Iterator[tuple[int, Any]]:
        """Yield each rank and what it says with :func:`say`, until all functions have ended.

        Raises :class:`RanksFailed` if some have failed.
        """
        errors: dict[int, BaseException] = {}
        until = math.inf
        while (left := until - time.monotonic()) > 0 and (said := self.said(left)) is not None:
            rank, word = said
            if not isinstance(word, Outcome):
                if not errors:
                    yield rank, word
            elif word.error is not None:
                errors[rank] = word.error
                until = min(until, time.monotonic() + GRACE_SECONDS)
        if errors:
            raise RanksFailed.of(errors)

    def wait_for(self, rank: int, name: str, deadline: float = 30.0) -> None:
        """Wait until this rank announces this point. Each announcement satisfies one wait."""
        __tracebackhide__ = True
        member = self._members[rank]
        self._until(lambda: bool(member.reached[name]) or not member.busy, deadline)
        if not member.reached[name]:
            state = f"{deadline} s passed" if member.busy else f"it ended: {member.outcome}"
            raise AssertionError(f"rank {rank} did not announce {name!r}; {state}; announced: {dict(member.reached)}")
        member.reached[name] -= 1

    # --------------------------------------------------------------------------------------------------------- signals

    def kill(self, rank: int) -> None:
        """SIGKILL, without waiting for its effect."""
        self.signal(rank, signal.SIGKILL)

    def freeze(self, rank: int) -> None:
        """Stop the process, and return once all its threads stand still."""
        self._members[rank].process.freeze()

    def thaw(self, rank: int) -> None:
        self._members[rank].process.thaw()

    def signal(self, rank: int, number: int) -> None:
        self._members[rank].process.signal(number)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _chosen(self, ranks: Iterable[int] | None) -> list[_Member]:
        return self.workers if ranks is None else [self._members[rank] for rank in ranks]

    def _until(self, done: Callable[[], bool], deadline: float) -> None:
        """Process what the ranks say until ``done`` or the deadline."""
        until = time.monotonic() + deadline
        while True:
            # First process everything that is there, so that every announced state is known.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._take(*self._events.get_nowait())
            left = until - time.monotonic()
            if done() or left <= 0:
                return
            with contextlib.suppress(queue.Empty):
                self._take(*self._events.get(timeout=min(left, _HOUR)))

    def _take(self, member: _Member, kind: str, payload: Any) -> None:
        if self._members.get(member.rank) is not member:
            return  # Another process has taken its place.
        if kind == "up":
            member.up, member.stacks = True, payload
        elif kind == "at":
            member.reached[payload] += 1
        elif kind == "said":
            self._words.append((member.rank, payload))
        elif kind == "dead":
            member.dead = True
            # A value that arrived before the death counts: the function had ended.
            if member.busy or (not member.up and member.outcome.error is None):
                self._ended(member, Outcome(error=Died(member.rank, payload)))
        else:
            result, seconds = payload
            error = result if kind == "failed" else None
            self._ended(member, Outcome(None if kind == "failed" else result, error, seconds))

    def _ended(self, member: _Member, outcome: Outcome[Any]) -> None:
        member.busy, member.outcome = False, outcome
        self._words.append((member.rank, outcome))

    @staticmethod
    def _stacks(member: _Member) -> str:
        """The stacks of a rank's threads. A frozen process cannot answer."""
        member.process.signal(signal.SIGUSR1)
        file = pathlib.Path(f"/proc/{member.process.pid}/fd/{member.stacks}")
        text, until = "", time.monotonic() + 1
        with contextlib.suppress(OSError):
            while time.monotonic() < until and not text.endswith("\n"):
                time.sleep(0.01)
                text = file.read_text()
        return text or f"no answer; its process is in state {member.process.state}"


def _error(member: _Member) -> BaseException:
    return member.outcome.error or Died(member.rank, member.process.wait())


class ProcessPool(Fleet):
    """Processes for many functions, since importing torch takes 1.5 s. Started on first use.

    What a function leaves behind in its process stays for the next function: groups made by `new_group`, meshes,
    threads, globals. Only the default group is renewed, and only after a run in which a rank failed, because a peer's
    error or an expired wait closes connections for good. After a death or a missed deadline all processes are replaced.
    """

    def __init__(self, n: int, *, timeout: float = 30.0, method: Method = "spawn") -> None:
        super().__init__(n, timeout=timeout, method=method)
        self._suspect = False

    def __enter__(self) -> Self:
        return self

    def run(
        self, fn: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, deadline: float = 60.0
    ) -> list[Outcome[Any]]:
        """Run ``fn(rank, *args)``, a function of a module, on all or some ranks; return the outcome of each."""
        __tracebackhide__ = True
        self._refresh()
        # True until it is known that all went well: an exception here (a deadline, Ctrl-C) leaves it True.
        self._suspect = True
        self.start(fn, *args, ranks=ranks)
        outcomes = self.outcomes(deadline, ranks)
        self._suspect = any(outcome.error is not None for outcome in outcomes)
        return outcomes

    def _refresh(self) -> None:
        if self._suspect and self.workers and not self.renew(self.timeout):
            self.close()
        self._suspect = False
        if not self.workers:
            self.launch()


@contextlib.contextmanager
def listening(
    n: int, fn: Callable[..., None], *args: Any, timeout: float = 300.0, method: Method = "spawn"
) -> Iterator[Iterator[tuple[int, Any]]]:
    """Run ``fn(rank, *args)`` in ``n`` fresh processes that share the cores; yield what :meth:`Fleet.listen` yields.

    Ctrl-C in a terminal reaches only the parent. Leaving the ``with`` block ends every process that is still there.
    """
    threads = threads_for(n)
    with Fleet(n, timeout=timeout, method=method, threads=threads, interrupts=False, start=timeout) as fleet:
        fleet.start(fn, *args)
        yield fleet.listen()


def threads_for(n: int) -> int:
    """How many threads torch should use in each of ``n`` processes that share this machine's cores."""
    return max(1, (os.cpu_count() or 1) // n)
