"""The keeper's process: one for each host and run. It outlives the workers, and answers them over a unix socket.

``python -m transfuse._keeper.process DIRECTORY LOCK`` is what a worker starts, detached; ``transfuse keep`` runs the
same in the foreground. The directory belongs to the run (:mod:`transfuse._keeper.runs`).
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from transfuse._errors import TransfuseError, as_utf8
from transfuse._keeper import files, frames
from transfuse._keeper.allotment import Allotment, Tenant
from transfuse._keeper.attach import CANNOT_WRITE, SOCKET_NAME, Lock, cannot_write
from transfuse._keeper.draining import TOLD_TO_END, Draining
from transfuse._keeper.frames import Address, Frame, KeeperEnds, KeeperLink, KeeperLost
from transfuse._keeper.freeing import Freeing
from transfuse._keeper.measured import Measured, count, counters
from transfuse._keeper.overview import CommitPace
from transfuse._keeper.readers import Readers
from transfuse._keeper.ring import Ring
from transfuse._keeper.runs import RUN_FILE, Process, Run, remake_directory
from transfuse._keeper.save_leader import Saver
from transfuse._keeper.saved_steps import FoundSteps
from transfuse._keeper.slot_file import Label
from transfuse._keeper.slot_policy import Books, Generation, ranks_and_have
from transfuse._keeper.worker import ConnectedWorker, uid_of
from transfuse._metrics.address import VARIABLE, MetricsAddress, address_in_environment
from transfuse._timeouts import Patience
from transfuse._tls import Encryption, tls_of
from transfuse._tuning import (
    DRAIN_LOOK_SECONDS,
    DRAIN_SECONDS,
    HANDSHAKE_WAIT_SECONDS,
    KEEPER_ANSWER_SECONDS,
    KEEPER_CHANGE_SECONDS,
    KEEPER_FIRST_SECONDS,
    KEEPER_LOOK_SECONDS,
    KEEPER_METRICS_SECONDS,
    KEEPER_NOTE_SECONDS,
    KEEPER_PEER_SECONDS,
    KEEPER_SERVE_SECONDS,
    RING_CLOSE_SECONDS,
)
from transfuse._wire.accepting import Accepting
from transfuse._wire.handshake import READER, ControlConnection, ReaderRefused, Wait, key_of
from transfuse._wire.listener import Listener

if TYPE_CHECKING:
    from transfuse._metrics.endpoint import MetricsEndpoint
    from transfuse._remote.server import Server

logger = logging.getLogger("transfuse.keeper")

#: Slots of a rank that did not say how many it wants.
SLOTS = 3
#: What the keeper's ``oom_score_adj`` is raised to.
OOM_SCORE = "500"


class Keeper:
    """Answers workers until nobody needs it any more."""

    def __init__(
        self,
        lock: Lock,
        *,
        in_foreground: bool = False,
        linger: float | None = None,
        drain: float = DRAIN_SECONDS,
        metrics: MetricsAddress | None = None,
        tls: Encryption = None,
    ) -> None:
        """``lock``: of the run's directory. The keeper holds it, so there is no other one, until its files are removed.

        ``linger``: in the foreground, how long it stays when workers and agents have ended. None: for ever. ``drain``:
        how long it waits for what is under way when it was told to end. ``metrics``: where it answers questions about
        its metrics; None: where its environment says. ``tls``: for all that it says to other hosts and to readers.
        None: as the environment says.
        """
        self.tls = tls_of(tls)
        self._lock, self.directory = lock, lock.directory
        directory = self.directory
        self._in_foreground, self._linger = in_foreground, linger
        self.token = secrets.token_hex(32)
        self.books = Books()
        self.freeing = Freeing()
        self.changed = threading.Condition()
        self._readers = Readers(self.changed, self.books)
        self.workers: dict[int, ConnectedWorker] = {}
        self.allotment = Allotment(self.changed, self.books, self.freeing, attached=self.workers)
        #: By rank: the agent that started its worker, and the worker itself.
        self._agents: dict[int, Process] = {}
        self._processes: dict[int, Process] = {}
        #: By rank: the processes that have closed this generation.
        self._closed: dict[int, Process | None] = {}
        #: When all ranks of all hosts had closed, and the step at which the run has ended. It may go on.
        self._ended_since: float | None = None
        self._ended_at: int | None = None
        #: Who has made the newest commit, when, and in which generation.
        self._commit: tuple[Process, float, int] | None = None
        self._pace = CommitPace()
        #: What a keeper of this run before this one has held, and the step that this one has noted as held, and when.
        self._past = files.read_past(directory)
        self._noted: tuple[int | None, float] | None = None
        #: Whether nobody has come for too long after the job of a named run had ended without closing.
        self._is_forsaken = ""
        self._hello: frames.Hello | None = None
        self._since = time.monotonic()
        self._alone_since: float | None = None
        self._over = threading.Event()
        #: How often it was told to end, and how it does so.
        self._orders, self._drain_seconds = 0, drain
        self._draining: Draining | None = None
        #: What is counted for metrics, and where they are told.
        self.counted = counters()
        self.measured = Measured(self)
        self._metrics_address = address_in_environment() if metrics is None else metrics
        self._endpoint: MetricsEndpoint | None = None
        self._endpoint_again = 0.0
        #: How many ranks are being given slots.
        self._laying = 0
        self.ring = Ring(self)
        self.saver = Saver(self.changed, self.books, self.tls, self._all_closed)
        #: What the directory says about the run, in case that the directory is deleted.
        self._note = b""
        with suppress(FileNotFoundError):
            self._note = (directory / RUN_FILE).read_bytes()
        lock.note(os.getpid())
        #: Where readers come, and what answers them once the first has come.
        self._listener = Listener(
            ("127.0.0.1", 0),
            key_of(self.token),
            self._attend,
            name="server",
            rank=READER,
            prove_seconds=Patience(KEEPER_SERVE_SECONDS).handshake,
            tls=self.tls,
        )
        self._server: Server | None = None
        self._serving = threading.Lock()
        self._listener.start()
        try:
            self._accepting = self._bind()
        except BaseException:
            self._listener.close(cancel=True)
            raise

    def _bind(self) -> Accepting[KeeperLink]:
        """Write what workers need to find this keeper, and listen for them."""
        path = self.directory / SOCKET_NAME
        with suppress(KeeperLost):
            KeeperLink.to(str(path), KEEPER_ANSWER_SECONDS).close()
            raise TransfuseError(f"another keeper listens at {path}")
        files.write(self.directory, files.TOKEN_NAME, self.token)
        files.write(self.directory, files.ADDRESS_NAME, self.address)
        with suppress(FileNotFoundError):
            path.unlink()  # Of a keeper that was killed: nobody listens there.
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            made.bind(str(path))
            made.listen(128)
        except BaseException:
            made.close()
            raise
        return Accepting(made, self._admit, self._talk, name="keeper", complain=_complain)

    # ------------------------------------------------------------------------------------------------ its life

    def run(self) -> None:
        """Answer workers until it is over."""
        self._accepting.start()
        if self._past is not None:
            logger.info("%s. Commits of its job go on here", self._past.tell(None))
        self._try_to_be_measured()
        while not self._over.wait(KEEPER_LOOK_SECONDS):
            if self._orders:
                self._drain()
                break
            self._mend_files()
            self._try_to_be_measured()
            with self.changed:
                self.measured.look_at_steps()
                self._bury()
                self._note_held()
                self._note_end()
                why = self._why_end()
                if why is not None:
                    self._over.set()  # From now on no worker is welcome: it finds, or starts, another keeper.
                    logger.info("the keeper ends: %s", why)
        self.close()

    def drain(self) -> None:
        """End when what is under way has ended; the second time: at once. A signal handler: it takes no lock."""
        self._orders += 1

    def _drain(self) -> None:
        """Take no new commits, wait for what is under way, and end."""
        with self.changed:
            draining = self._draining = Draining(self.books, self._drain_seconds)
            draining.job_runs = self._job_runs()
        logger.info("the keeper %s: no new commit is taken", TOLD_TO_END)
        told = ""
        while waits_for := self._drains():
            if self._orders > 1 or draining.is_late:
                why = "told so again" if self._orders > 1 else f"{self._drain_seconds:g} s are over"
                logger.warning("the keeper ends at once, %s. It does not wait any more for %s", why, waits_for)
                break
            if waits_for != told:
                told = waits_for
                logger.info("it waits for %s", told)
            time.sleep(DRAIN_LOOK_SECONDS)
        self._over.set()
        logger.info("the keeper ends, %.1f s after it was told to", draining.seconds)

    def _drains(self) -> str:
        """What a keeper that was told to end still waits for."""
        ring_works = self.ring.works()
        if self.saver.is_busy():
            return "a step that is being saved"
        with self.changed:
            assert self._draining is not None
            self._bury()
            if self._laying:
                return "a rank that asks for slots"
            return self._draining.waits_for(self.workers, ring_works=ring_works)

    @property
    def is_draining(self) -> bool:
        """Whether the keeper ends, or was told to."""
        return self._over.is_set() or self._draining is not None

    def _check_open(self, *, takes: bool = False) -> None:
        """Raise for a worker that wants to begin something new here, but for what the draining keeper ``takes``."""
        if self.is_draining and (self._over.is_set() or not takes):
            raise KeeperEnds(TOLD_TO_END if self._draining is not None else "has ended")

    @property
    def _has_held(self) -> bool:
        """Whether this run has held a complete step: in this process, or in a keeper before it that is gone."""
        return self._past is not None or self._noted is not None or self.ring.has_held or self._step is not None

    @property
    def _step(self) -> int | None:
        return None if self.books.confirmed is None else self.books.confirmed.step

    def _note_held(self, why: str = "") -> None:
        """Note now and then which step this run has held: if this process is gone, the run must not begin anew.

        ``why``: this process is about to end, for this reason. Called under the lock.
        """
        now, step = time.monotonic(), self._step
        if step is None and not self.ring.has_held:
            return
        if why or self._noted is None or (self._noted[0] != step and now - self._noted[1] > KEEPER_NOTE_SECONDS):
            self._noted = step, now
            with suppress(OSError):
                files.note_past(self.directory, step, why)

    def _note_end(self) -> None:
        """Note that all ranks of all hosts have closed. Only the newest step is kept from now on."""
        if self._has_ended() and self._ended_since is None:
            self._ended_since, self._ended_at = time.monotonic(), self._step
            self.freeing.add(self.books.free_all())

    # -- metrics

    def be_measured(self) -> None:
        """Answer questions about metrics, if the operator wants that. Raises ``OSError`` if it is not possible."""
        if self._metrics_address is None or self._endpoint is not None or self.is_draining:
            return
        from transfuse._metrics.endpoint import MetricsEndpoint  # Most keepers need no HTTP.

        self._endpoint = MetricsEndpoint(self._metrics_address, metrics=self.measured.text, health=self.measured.health)
        logger.info("metrics and health: %s", self._endpoint.address)

    def _try_to_be_measured(self) -> None:
        """As `be_measured`, now and then. What keeps states does not end because a port is taken."""
        now = time.monotonic()
        if now < self._endpoint_again:
            return
        try:
            self.be_measured()
        except OSError as error:
            if not self._endpoint_again:
                logger.warning("%s", cannot_be_measured(self._metrics_address, error))
            self._endpoint_again = now + KEEPER_METRICS_SECONDS

    @property
    def metrics(self) -> str | None:
        """Where it tells its metrics; None: nowhere."""
        return None if self._endpoint is None else self._endpoint.address

    @property
    def run_name(self) -> str:
        """The run's name; the name of its directory, if it has none."""
        run = self._run()
        return run.name if run is not None and run.is_named else self.directory.name

    @property
    def max_bytes(self) -> int | None:
        """The most that the keeper may hold, if a worker has said so."""
        return None if self._hello is None else self._hello.max_bytes

    def _bury(self) -> None:
        """Close the connections of workers that are dead: children that they have forked may hold them open."""
        for worker in self.workers.values():
            if worker.is_visible and worker.process is not None and not worker.process.alive():
                worker.link.close()

    def _mend_files(self) -> None:
        """Make again what was deleted, by a cleaner of /tmp: else the next worker starts an empty keeper."""
        is_locked = self._lock.counts()
        if is_locked and (self.directory / SOCKET_NAME).exists():
            return
        try:
            if not is_locked:
                remake_directory(self.directory, self._note)
                if (lock := Lock.take(self.directory)) is None:
                    return  # A worker is starting another keeper there.
                self._lock.close()
                self._lock = lock
                lock.note(os.getpid())
            before, self._accepting = self._accepting, self._bind()
            before.close()
            self._accepting.start()
            self._noted = None  # It is noted again at once.
        except (OSError, TransfuseError) as error:
            logger.warning("files of this keeper were deleted, and cannot be made again: %s", error)

    def stop(self) -> None:
        self._over.set()

    @property
    def address(self) -> str:
        """Where readers on this host find the newest complete step."""
        return self._listener.address

    def close(self) -> None:
        self._over.set()
        self.saver.close(time.monotonic() + RING_CLOSE_SECONDS)
        # First: the keeper that comes after this one opens its door at the same port.
        self.ring.close()
        self._remove_files()
        # Workers notice now, and not at their next commit.
        for link in self._accepting.close().values():
            link.close()
        with self._serving:
            server = self._server
        (server or self._listener).close(cancel=True)
        if self._endpoint is not None:
            self._endpoint.close()

    def _remove_files(self) -> None:
        """Remove the directory and what is in it, and give the lock back. Another keeper's files are left alone.

        A job that has kept steps and runs on must not begin at 0 when it is restarted: the note of it stays.
        """
        with self._lock as lock:
            if not lock.counts():
                return
            with self.changed:
                draining = self._draining
                self._note_held(self._is_forsaken or (f"it {TOLD_TO_END}" if draining is not None else ""))
                job_runs = self._job_runs() or (draining is not None and draining.job_runs)
                is_remembered = self._has_held and (bool(self._is_forsaken) or job_runs)
            files.remove_files(self.directory, with_note=not is_remembered)

    def _job_runs(self) -> bool:
        """Whether somebody is there who has not closed: workers, or an agent that may start some."""
        is_there = bool(self.workers) or any(agent.alive() for agent in self._agents.values())
        return is_there and not self._has_ended() and self._why_end() is None

    def _has_ended(self) -> bool:
        """Whether all ranks of all hosts have closed. A worker that has not belongs to the next job."""
        return all(worker.has_closed for worker in self.workers.values()) and (
            self.ring.is_over() or (self._all_closed() and self.books.is_alone() and not self.saver.is_busy())
        )

    def _may_be_restarted(self) -> bool:
        """Whether the agent of a run that has ended may start it again, as torchrun does after any error."""
        hello, since = self._hello, self._ended_since
        if hello is None or since is None or self._ended_at is None or time.monotonic() - since > hello.stays:
            return False
        return any(agent.alive() for agent in self._agents.values() if agent not in self._processes.values())

    def _why_end(self) -> str | None:
        """Why the keeper is no longer needed; None: it is."""
        with self.changed:
            hello, now = self._hello, time.monotonic()
            if self._has_ended():
                return None if self._may_be_restarted() else "all ranks have closed"
            if self.workers:
                self._alone_since = None
                return None
            if hello is None:
                gone = now - self._since > KEEPER_FIRST_SECONDS
                return "no worker has come" if gone and not self._in_foreground else None
            if any(agent.alive() for agent in self._agents.values()):
                self._alone_since = None
                return None
            if not self._in_foreground and not hello.is_named and not (self._has_held or self.ring.has_held):
                return "the agent that started the workers is gone, and nothing is kept"
            linger = self._linger if self._in_foreground else hello.linger
            self._alone_since = now if self._alone_since is None else self._alone_since
            if linger is None or now - self._alone_since <= linger:
                return None
            why = f"nobody has come for {linger:g} s"
            # Nobody can begin a run without a name by mistake again: nothing has to be remembered of it.
            self._is_forsaken = why if hello.is_named or self._in_foreground else ""
            return why

    def _all_closed(self) -> bool:
        generation = self.books.current()
        return generation is not None and self._closed.keys() >= set(generation.ranks)

    @property
    def all_closed(self) -> bool:
        """Whether all ranks of this host have closed, and nothing of the job is being saved."""
        with self.changed:
            return self._all_closed() and not self.saver.is_busy()

    # -------------------------------------------------------------------------------------------------- workers

    def _admit(self, sock: socket.socket, where: object) -> KeeperLink | None:
        # The directory keeps others out. This is for a directory that was opened up later.
        return KeeperLink(sock) if uid_of(sock) in (os.getuid(), 0) else None

    def _talk(self, link: KeeperLink) -> None:
        worker = ConnectedWorker(link)
        try:
            while True:
                question, descriptors = link.hear(None)
                try:
                    if isinstance(question, frames.Hello):
                        worker.meet(question, descriptors)
                finally:
                    for fd in descriptors:
                        os.close(fd)
                if isinstance(question, frames.Numbers):
                    count(self.counted, question)
                    continue
                try:
                    answer, files = self._answer(worker, question)
                except KeeperEnds as error:
                    link.send(frames.Ends(str(error)), KEEPER_ANSWER_SECONDS)
                    return
                except KeeperLost:
                    raise
                except Exception as error:
                    if not isinstance(error, TransfuseError):
                        logger.exception("a question of a worker could not be answered")
                    answer, files = frames.Refused(f"{error}" or type(error).__name__), []
                link.send(answer, KEEPER_ANSWER_SECONDS, files)
        except KeeperLost:
            pass
        finally:
            self._detach(worker)

    def _detach(self, worker: ConnectedWorker) -> None:
        self._release(worker)
        with self.changed:
            if worker.hello is not None and self.workers.get(worker.hello.rank) is worker:
                rank = worker.hello.rank
                del self.workers[rank]
                self.allotment.forget(rank)
                self.books.detach(rank)
                self.changed.notify_all()

    def _release(self, worker: ConnectedWorker) -> None:
        for server in worker.servers:
            server.close(cancel=True)
        worker.servers = []
        worker.close_files()
        self._readers.unpin(worker.pinned)

    def _answer(self, worker: ConnectedWorker, question: Frame) -> tuple[Frame, list[int]]:
        for kind, answer in _ANSWERS.items():
            if isinstance(question, kind):
                result = answer(self, worker, question)
                return result if isinstance(result, tuple) else (result, [])
        raise TransfuseError(f"{type(question).__name__} is no question")

    def _hear_hello(self, worker: ConnectedWorker, hello: frames.Hello) -> Frame:
        if hello.version != frames.VERSION:
            raise TransfuseError(
                f"the keeper of this run speaks version {frames.VERSION}, this worker version {hello.version}: end the "
                "keeper (transfuse keep --stop), or use the version of transfuse that started it"
            )
        assert worker.process is not None
        assert worker.agent is not None
        process, agent = worker.process, worker.agent
        with self.changed:
            if self.is_draining:
                raise KeeperLost("the keeper ends just now")
            if not hello.generation and self._closed.get(hello.rank) == process:
                self._end_for(worker)
            before, here = self._agents.get(hello.rank), self._processes.get(hello.rank)
            if before not in (None, agent) and before.alive() and here is not None and here.alive():
                raise _belongs(hello.rank, self.directory.name, before)
            until = time.monotonic() + KEEPER_CHANGE_SECONDS
            while (
                (other := self.workers.get(hello.rank)) is not None and other is not worker and time.monotonic() < until
            ):
                self.changed.wait(KEEPER_PEER_SECONDS)
            if other is not None and other is not worker:
                same = self._processes.get(hello.rank) == process
                by = "this process: keep it once" if same else "another process"
                raise TransfuseError(f"rank {hello.rank} of this run is attached already, by {by}")
            writer = self._processes.get(hello.rank)
            worker.is_only_writer = writer is None or writer == process or not writer.alive()
            self.workers[hello.rank] = worker
            self._processes[hello.rank] = process
            worker.hello = self._hello = hello
            self.changed.notify_all()
            return frames.Welcome(self.token, self.books.generation, self.address, os.getpid(), self.tls is not None)

    def _end_for(self, worker: ConnectedWorker) -> None:
        """A process that has closed begins another training: this keeper ends, once all ranks have closed."""
        while not self._has_ended() and not worker.link.gone():
            self.changed.wait(KEEPER_PEER_SECONDS)
        if self._has_ended():
            self._over.set()
        raise KeeperLost("the keeper ends just now")

    def _meet_peers(self, worker: ConnectedWorker, peers: frames.Peers) -> Frame:
        rank, ranks = self._rank_of(worker), tuple(peers.ranks[peers.index])
        with self.changed:
            self._wait_for_others(worker, lambda: peers.generation > self.books.generation)
            if peers.generation > self.books.generation:
                self._check_open()
                self._take_over(worker)
                self.allotment.begin_generation(ranks)
                self._closed = dict.fromkeys(files.closed_before(self.directory, peers.generation))
                self._ended_since = None
            self.books.begin_generation(Generation(peers.generation, peers.world_size, ranks, len(peers.keepers)))
            assert worker.agent is not None
            self._agents[rank], worker.has_joined = worker.agent, True
            self.changed.notify_all()
        self.ring.join(peers)
        self.saver.join(peers)
        return frames.Ack()

    def _find_storage(self, worker: ConnectedWorker, question: frames.FindStorage) -> Frame:
        return frames.FoundStorage(self.saver.find(question.saves))

    def _wait_for_others(self, worker: ConnectedWorker, begins_anew: Callable[[], bool]) -> None:
        """Before a worker begins something new here: wait for the job before to go. Refuse if it runs, or its agent.

        Ranks do not tell two jobs of one name apart: the second one may have other ranks on this host.
        """
        until = time.monotonic() + KEEPER_CHANGE_SECONDS
        while not worker.has_joined and begins_anew():
            newcomers = {one.agent for one in self.workers.values() if not one.has_joined}
            for rank, agent in self._agents.items():
                if agent not in newcomers and agent.alive():
                    raise _belongs(rank, self.directory.name, agent)
            others = [rank for rank, one in self.workers.items() if one.has_joined]
            if not others:
                return
            if time.monotonic() > until:
                raise TransfuseError(f"rank {others[0]} of this run is attached already, by another process")
            self.changed.wait(KEEPER_PEER_SECONDS)

    def _take_over(self, worker: ConnectedWorker) -> None:
        """A new generation begins. Note it if another agent has started it."""
        assert worker.agent is not None
        if self._agents and not worker.has_joined and worker.agent not in self._agents.values():
            before = next(iter(self._agents.values()))
            logger.info("agent %d takes this run over from agent %d, which has ended", worker.agent.pid, before.pid)
        self._agents.clear()

    def _expose(self, worker: ConnectedWorker, question: frames.Expose) -> Frame:
        with self.changed:
            self._wait_for_others(worker, lambda: not self.ring.listens(question.host, question.token))
        return frames.Exposed(self.ring.listen(question.host, question.token))

    # -- layouts

    def _lay(self, worker: ConnectedWorker, lay: frames.Lay) -> tuple[Frame, list[int]]:
        with self.changed:
            draining = self._draining
            self._check_open(takes=draining is not None and draining.takes(Label(lay.generation, lay.step)))
            self._laying += 1
        try:
            return self.allotment.lay(self._tenant(worker), lay)
        finally:
            with self.changed:
                self._laying -= 1

    def _reserve(self, worker: ConnectedWorker, reserve: frames.Reserve) -> Frame:
        self.allotment.reserve(self._tenant(worker), reserve.nbytes)
        return frames.Ack()

    def _tenant(self, worker: ConnectedWorker) -> Tenant:
        if worker.hello is None:
            raise TransfuseError("say Hello first")
        hello, replicas = worker.hello, self.ring.replicas
        # The last complete step, one being written, one between; one more for replicas, and one that is being saved.
        slots = hello.slots or SLOTS + bool(replicas) + bool(self.books.save_every)
        return Tenant(hello.rank, slots, hello.max_bytes, replicas, worker.is_only_writer)

    def room(self) -> int:
        """How many bytes more the keeper may take. Called under the lock."""
        return self.allotment.room(self.max_bytes)

    # -- commits

    def _begin(self, worker: ConnectedWorker, begin: frames.Begin) -> Frame:
        rank = self._rank_of(worker)
        with self.changed:
            if begin.generation != self.books.generation:
                raise TransfuseError(
                    f"rank {rank} commits for generation {begin.generation}, but the job is at "
                    f"{self.books.generation}: it was started again without this process"
                )
            label, draining = Label(begin.generation, begin.step), self._draining
            self._check_open(takes=draining is not None and draining.takes(label))
            number, renew = self.books.begin(rank, label)
            why, complete = self._why_incomplete(rank), self.books.newest_everywhere()
            absent, unsaved = self.allotment.absent, self.saver.trouble()
            return frames.Slot(number, renew, why, self.ring.notes(), complete, absent, unsaved)

    def _why_incomplete(self, rank: int) -> str:
        """What a rank's oldest step that is not confirmed waits for. Called under the lock."""
        found = self.books.waits_for(rank)
        if found is None:
            return ""
        label, missing = found
        if missing:
            return f"{ranks_and_have(missing)} not committed step {label.step}"
        if not self.books.is_complete(label):
            return f"the ranks of this host refer to contents of step {label.step} that differ"
        return self.ring.why_incomplete(label)

    def _committed(self, worker: ConnectedWorker, committed: frames.Committed) -> Frame:
        rank, label = self._rank_of(worker), Label(committed.generation, committed.step)
        with self.changed:
            kept = self.books.slot(rank, committed.number)
            contents = kept.file.contents()
            if contents is None or contents.label != label:
                raise TransfuseError(f"slot {committed.number} of rank {rank} does not hold step {committed.step}")
            is_complete = self.books.commit(rank, committed.number, label, kept.file.brief())
            self._pace.note(label)
            self.measured.committed(label, is_complete=is_complete)
            self._commit, self._ended_at = (self._processes[rank], time.time(), label.generation), None
            self._note_held()
            self.freeing.add(self.books.free_ranks())
            self.changed.notify_all()
        self.ring.wake()
        self.saver.wake()
        return frames.Ack()

    def _drop(self, worker: ConnectedWorker, drop: frames.Drop) -> Frame:
        with self.changed:
            self.books.drop(self._rank_of(worker), drop.number)
        return frames.Ack()

    def _leave_out(self, worker: ConnectedWorker, left: frames.LeaveOut) -> Frame:
        with self.changed:
            self.books.leave_out(self._rank_of(worker), Label(left.generation, left.step))
            self.changed.notify_all()
        return frames.Ack()

    # -- restoring

    def _inventory(self, worker: ConnectedWorker, _: frames.Inventory) -> Frame:
        steps = self.saver.steps
        found = FoundSteps() if steps is None else steps.look()  # It may take a while: no lock is held.
        with self.changed:
            states = self.books.holdings()
            past = "" if self._past is None or states else self._past.tell(self._run())
            newest = -1 if self._past is None or self._past.step is None else self._past.step
            return frames.HeldStates(
                states + found.states,
                self._has_held or found.has_held,
                past,
                self._notes(worker),
                "" if steps is None else steps.where,
                found.trouble,
                newest,
            )

    def _run(self) -> Run | None:
        """The run, as its directory says."""
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(self._note, type=Run)
        return None

    def _notes(self, worker: ConnectedWorker) -> str:
        """What a worker should know that goes on from what is here. Called under the lock."""
        stop = f"transfuse keep --stop {os.getpid()}"
        if self._ended_at is not None:
            return (
                f"this run has ended at step {self._ended_at}: all ranks have closed it. It was started again, and "
                f"goes on from its end: no step is trained again. For another training choose another name, or {stop}"
            )
        hello, commit = worker.hello, self._commit
        if hello is None or hello.is_named or hello.stays or commit is None or commit[2] == self.books.generation:
            return ""
        process, at, _ = commit
        if process == self._processes[hello.rank]:
            return ""
        return (
            f"process {process.pid} has committed it at {files.local_time(at)}. This run has no name, and process "
            f"{hello.agent_pid} has started the same command before. If this is another job, name it (run=, or "
            f"TRANSFUSE_RUN); to begin anew, end the keeper: {stop}"
        )

    def _open(self, worker: ConnectedWorker, question: frames.Open) -> tuple[Frame, list[int]]:
        label, steps = Label(question.generation, question.step), self.saver.steps
        with self.changed:
            needed = {rank: self.books.needed_for(rank, label) for rank in question.ranks}
        elsewhere = [rank for rank, some in needed.items() if some is None]
        files: Mapping[int, int] = {}
        if elsewhere:
            if steps is None:
                raise TransfuseError(f"step {label.step} of ranks {elsewhere} is not here, or not whole")
            opened = worker.open_files(steps, label, elsewhere)
            if opened is None:
                return frames.Opening(steps.opened), []
            files = opened
        with self.changed:
            ranks: set[int] = set()
            for rank in question.ranks:
                if rank in elsewhere:
                    continue
                some = self.books.needed_for(rank, label)
                if some is None:
                    raise TransfuseError(f"step {label.step} of rank {rank} is not here any more")
                ranks |= set(some)
            found = [(rank, self.books.find(rank, label)) for rank in sorted(ranks)]
            for _, kept in found:
                assert kept is not None
                kept.pins += 1
                worker.pinned.append(kept)
        folder = "" if steps is None else steps.folder(label)
        mapped = frames.Mapped([rank for rank, _ in found], list(files), elsewhere, folder)
        return mapped, [*(kept.file.fd for _, kept in found if kept is not None), *files.values()]

    def _restored(self, worker: ConnectedWorker, restored: frames.Restored) -> Frame:
        with self.changed:
            self.books.restored = Label(restored.generation, restored.step)
        self.saver.note_restored(Label(restored.generation, restored.step))
        self.ring.wake()
        return frames.Ack()

    def _serve(self, worker: ConnectedWorker, question: frames.Serve) -> Frame:
        """Serve every rank's state of a step that is whole here, for workers on other hosts."""
        label = Label(question.generation, question.step)
        addresses: list[Address] = []
        ranks, steps = self._readers.ranks_of(label), self.saver.steps
        if not ranks and not question.saved:
            return frames.Serving(addresses)  # A new host's keeper does not make all others wait for torch.
        from transfuse._keeper import transfers

        found = {rank: self._readers.pin(worker.pinned, rank, label) for rank in ranks}
        if question.saved and steps is not None:
            found |= transfers.read_files(steps, label, question.saved)
        for rank, restored in found.items():
            if restored is None:
                continue
            served = partial(
                transfers.serve,
                host=question.host,
                token=question.token,
                max_readers=16,
                timeout=KEEPER_SERVE_SECONDS,
                tls=self.tls or False,
            )
            server = served(restored.state, step=label.step)
            worker.servers.append(server)
            own = ""
            if restored.own is not None:
                worker.servers.append(served(restored.own))
                own = worker.servers[-1].address
            addresses.append(Address(rank, server.address, own))
        return frames.Serving(addresses)

    def _attend(self, control: ControlConnection) -> None:
        """Answer a reader that has proved the token. The first one waits until torch is imported, and is told so."""
        made = threading.Thread(target=self._make_server, name="transfuse-keeper-server", daemon=True)
        try:
            if self._server is None:
                made.start()
            while made.is_alive():
                control.send(Wait(), KEEPER_SERVE_SECONDS)
                made.join(HANDSHAKE_WAIT_SECONDS)
            if self._server is None or self.is_draining:
                cause = "the keeper ends just now" if self.is_draining else "torch failed: see the keeper's log"
                control.send(ReaderRefused("TransfuseError", cause), KEEPER_SERVE_SECONDS)
                return
        except TransfuseError as error:
            logger.warning("reader %s: %s", control.name, as_utf8(str(error)))
            return
        self._server.answer(control)

    def _make_server(self) -> None:
        from transfuse._keeper import transfers

        with self._serving:
            if self._server is None and not self._over.is_set():
                newest, step = self._readers.newest, self._readers.newest_step
                self._server = transfers.serve_newest(
                    self._listener, self.token, newest, step, KEEPER_SERVE_SECONDS, self.tls
                )

    def _done(self, worker: ConnectedWorker, _: frames.Ack) -> Frame:
        self._release(worker)
        return frames.Ack()

    def _close(self, worker: ConnectedWorker, _: frames.Close) -> Frame:
        with self.changed:
            worker.has_closed = True
            rank = self._rank_of(worker)
            self._closed[rank] = self._processes[rank]
            files.note_closed(self.directory, self.books.generation, self._closed)
            self.changed.notify_all()
        self.ring.wake()
        self.saver.wake()
        return frames.Ack()

    def _rank_of(self, worker: ConnectedWorker) -> int:
        if worker.hello is None:
            raise TransfuseError("say Hello first")
        return worker.hello.rank

    # -- what it says about itself

    def _status(self, worker: ConnectedWorker, _: frames.Status) -> Frame:
        return frames.StatusReply(json.dumps(self.status()).encode())

    def _hosts(self, worker: ConnectedWorker, _: frames.Hosts) -> Frame:
        return frames.StatusReply(json.dumps(self.ring.others()).encode())

    def _trouble(self) -> list[str]:
        """What somebody should know who looks at this keeper. Called under the lock."""
        generation, found = self.books.current(), [self.ring.notes()]
        ranks = () if generation is None else generation.ranks
        gone = [rank for rank in ranks if rank not in self.workers and rank not in self._closed]
        if gone and self.workers:
            found.append(f"{ranks_and_have(gone)} no worker here now")
        if self.allotment.absent:
            found.append(f"{ranks_and_have(self.allotment.absent)} not called commit() yet")
        if self.books.is_starved():
            why = next((why for why in map(self._why_incomplete, ranks) if why), "its steps are not complete")
            found.append(f"the last commit was left out for want of a free slot: {why}")
        return [one for one in found if one]

    def status(self) -> dict[str, Any]:
        with self.changed:
            books = self.books
            newest = books.newest_complete()
            return {
                "pid": os.getpid(),
                "address": self.address,
                "encrypts": self.tls is not None,
                "directory": str(self.directory),
                "generation": books.generation,
                "attached": sorted(self.workers),
                "closed": sorted(self._closed),
                "ended_step": self._ended_at,
                "agents": sorted({agent.pid for agent in self._agents.values() if agent.alive()}),
                "confirmed_step": None if books.confirmed is None else books.confirmed.step,
                "complete": None if newest is None else {"generation": newest.generation, "step": newest.step},
                "commit": self._pace.status(),
                "bytes": self.allotment.nbytes,
                "max_bytes": self.max_bytes,
                "draining": None if self._draining is None else round(self._draining.seconds, 1),
                "trouble": self._trouble(),
                "metrics": self.metrics,
                "states": [
                    {
                        "rank": held.rank,
                        "generation": held.generation,
                        "step": held.step,
                        "bytes": held.nbytes,
                        "whole": held.whole,
                        "replica": held.replica,
                        "host": self.ring.host_of(held.rank),
                    }
                    for held in sorted(books.holdings(), key=lambda held: (held.rank, held.generation, held.step))
                ],
                "replicas": self.ring.status(),
                "storage": self.saver.status(),
            }


_ANSWERS: Mapping[type, Callable[..., Any]] = {
    frames.Hello: Keeper._hear_hello,
    frames.FindStorage: Keeper._find_storage,
    frames.Expose: Keeper._expose,
    frames.Peers: Keeper._meet_peers,
    frames.Reserve: Keeper._reserve,
    frames.Lay: Keeper._lay,
    frames.Begin: Keeper._begin,
    frames.Committed: Keeper._committed,
    frames.Drop: Keeper._drop,
    frames.LeaveOut: Keeper._leave_out,
    frames.Inventory: Keeper._inventory,
    frames.Open: Keeper._open,
    frames.Serve: Keeper._serve,
    frames.Restored: Keeper._restored,
    frames.Ack: Keeper._done,
    frames.Close: Keeper._close,
    frames.Status: Keeper._status,
    frames.Hosts: Keeper._hosts,
}


def _complain(what: str, error: Exception) -> None:
    logger.warning("the keeper %s of a worker: %s", what, error)


def cannot_be_measured(where: MetricsAddress | None, error: OSError) -> str:
    """What to say if nobody can be answered at an address."""
    return (
        f"no metrics and no health of this keeper: nobody can listen at {where}: {error}. Several keepers of a host "
        f"need a port each: give a range of them (:9400-9499, in {VARIABLE} or --metrics)"
    )


def _belongs(rank: int, run: str, agent: Process) -> TransfuseError:
    return TransfuseError(
        f"rank {rank} of the run {run} belongs to the running agent {agent.pid}: give this job a name of its own "
        "(run=), or end the other one first"
    )


def detach() -> None:
    """Detach from the launcher: use all cores and any number of threads, and be the first to go if memory runs out."""
    os.chdir("/")
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    go_before_training()


def go_before_training() -> None:
    """Tell the kernel to end this process before training, if memory runs out."""
    with suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def main(argv: list[str]) -> int:
    """Run a keeper in a directory, whose lock is the inherited descriptor of this number."""
    detach()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("transfuse").setLevel(logging.WARNING)
    logger.setLevel(logging.INFO)
    lock = Lock.inherit(pathlib.Path(argv[0]), int(argv[1]))
    try:
        keeper = Keeper(lock)
    except OSError as error:
        logger.info("%s", cannot_write(lock.directory, error))
        return CANNOT_WRITE
    except ValueError as error:
        logger.info("%s", error)  # Of the environment: the worker that has started this one quotes it.
        return os.EX_CONFIG
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: keeper.drain())
    logger.info("keeper %d serves %s", os.getpid(), argv[0])
    keeper.run()
    return 0


if __name__ == "__main__":
    # No wait for threads that readers have left behind.
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
