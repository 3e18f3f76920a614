"""``keep()``, and what it returns: a worker commits its state to the keeper of its host, and restores it later."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, Self, Unpack

import msgspec
import numpy as np

from transfuse import _arguments
from transfuse._errors import TransfuseError, as_utf8
from transfuse._job.face import attribute_before, one_manner
from transfuse._keeper import frames, rendezvous, restoring, runs
from transfuse._keeper import view as keepers_view
from transfuse._keeper.attach import attach
from transfuse._keeper.bundle_table import ROW_BYTES
from transfuse._keeper.bundles import IsShared, bundle
from transfuse._keeper.commits import (
    AgreedLayout,
    ChangedTooEarly,
    CommitCopy,
    CommitReport,
    Committer,
    Footprint,
    Snapshot,
    timed,
)
from transfuse._keeper.device_commit import captures, check_no_capture, guess
from transfuse._keeper.frames import KeeperEnds, KeeperLink, KeeperLost
from transfuse._keeper.one_call import OneCall
from transfuse._keeper.settings import KeepSettings
from transfuse._keeper.slot_file import Label, SlotView
from transfuse._keeper.slot_policy import ranks_and_have
from transfuse._keeper.unkept import Unkept
from transfuse._keeper.unrestorable import Unrestorable, refuse_objects
from transfuse._limits import Limits
from transfuse._memory import pinning, streams
from transfuse._metrics import names
from transfuse._metrics.address import address_in_environment
from transfuse._metrics.reports import tell
from transfuse._options import FetchKeywords, check_names
from transfuse._report import Step
from transfuse._session.remembered import Remembered
from transfuse._state.region import Ints
from transfuse._tls import tls_of
from transfuse._tuning import COMMIT_ANSWER_SECONDS, COMMIT_PARTNER_SECONDS, KEEP_REVIVE_SECONDS, KEEPER_AGAIN_SECONDS
from transfuse._wire.interface import own_address
from transfuse._wire.roll_call import Agreement

logger = logging.getLogger("transfuse")

#: Of this number of commits and restores, the newest, the keeper is told when it is back.
UNTOLD = 1000


@one_manner
def keep(
    state: object = None,
    *,
    rank_state: object = None,
    load: Callable[[Any], object] | None = None,
    load_rank_state: Callable[[Any], object] | None = None,
    shared: bool | str | Sequence[str] | IsShared = False,
    run: str | None = None,
    group: Any = None,
    every: int = 1,
    slots: int | None = None,
    replicas: int = 1,
    max_bytes: int | None = None,
    reserve: int | None = None,
    max_bytes_per_second: float | None = None,
    directory: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    keep_saved: int = 2,
    linger: timedelta | float = 600,
    timeout: timedelta | float = 60,
    on_report: Callable[[CommitReport], object] | None = None,
    **options: Unpack[FetchKeywords],
) -> Keep:
    """Join the keeper of this host and run, or start it. Every rank calls this, after ``init_process_group``.

    A job of one process needs no group. Under torchrun, keep() forms the default group if there is none. A job that
    torchrun may restart forms its group by ``init_method="transfuse://"``: a group that could not be formed again is
    refused.

    Args:
        state: what is kept (:class:`State` says what it can be). Its ``state_dict()`` are called at each commit, and by
            :meth:`Keep.restore` only if there is something to restore: twice, since tensors that lie elsewhere the
            second time are copies. The bytes land in the tensors that they return. An object for which something could
            not land in place (moments of a new optimizer, copies, a value that differs) gets it by its
            ``load_state_dict``. Leave the state out if every commit is given its own, as by
            :class:`transfuse.dcp.KeeperWriter`.
        rank_state: what belongs to the rank itself (random number generators, data loader, counters), in the same
            forms. It is committed in the same slot, and restored to the rank of the same number. A
            :class:`transfuse.RNG` in ``state`` is rank state, too.
        load: for a ``state`` that is a callable: called by :meth:`Keep.restore` with the whole state.
        load_rank_state: the same for ``rank_state``.
        shared: which leaves hold the same values on all ranks: True for all, patterns (``"model.*"``), or a callable
            that gets a path. Ranks of one host share the copying of these, and nothing is hashed to find that out.
        run: the run's name. A later job of the same name goes on from this one's memory. None: ``TRANSFUSE_RUN``, an
            explicit ``--rdzv-id``, or the agent that started this worker.
        group: the process group. None: the default group.
        every: commit only steps that are a multiple of this.
        slots: how many steps of each rank the keeper has room for. None: 3, one more with replicas, and one more with
            ``save_every``.
        replicas: on how many other hosts each host's states are kept, too.
        max_bytes: the most memory that the keeper of this host may take. None: what is free.
        reserve: how many bytes this rank will commit. The keeper allocates its memory now, and refuses now what does
            not fit. None: at the first commit, when the size is known.
        max_bytes_per_second: the most that a keeper sends to other hosts, and the most that it writes to storage.
        directory: where steps are saved, and where :meth:`Keep.restore` looks for them when no memory has them any
            more: a path, or a URL of ``fsspec`` (``s3://…``). It has to be there: it is not made, since a mount that is
            missing must not look like a new run. One directory for each run.
        save_every: committed steps that are a multiple of this are written there by the keepers, while training goes
            on. None: nothing is written, and what is there is only read.
        keep_saved: how many of these stay there. Older ones are removed when a newer one is whole.
        linger: how long a keeper that holds steps stays when its job has ended without :meth:`Keep.close`.
        timeout: how long a call may go without progress.
        on_report: called with the :class:`CommitReport` of each commit, when it says all that training waited for:
            with ``commit(wait=False)`` by the next :meth:`Keep.mutating`, commit or close.
        **options: the options of ``fetch`` for :meth:`Keep.restore`: ``cast``, ``map_path``, ``strict``, … By default
            what is committed is hashed. With ``verify=True`` restoring compares the digests, too; with ``verify=False``
            only leaves that are not ``shared`` are hashed.
    """
    check_names(keep, options, FetchKeywords)
    settings = KeepSettings(**locals())
    address_in_environment()  # Refuse a wrong TRANSFUSE_KEEPER_METRICS here: a keeper could only log it.
    rendezvous.check_group(group)
    return Keep(settings)


def _check_saves(hosts: Sequence[str], of_all: Sequence[Any]) -> None:
    """Refuse ranks that were given different storage. Each host may have a disk of its own, under a name of its own."""
    for rank, (host, one) in enumerate(zip(hosts, of_all, strict=True)):
        here, first = hosts.index(host), of_all[0]
        for other, differs in (
            (0, (one is None) != (first is None) or (one is not None and one[1:3] != first[1:3])),
            (here, one is not None and one[0] != of_all[here][0]),
        ):
            if differs:
                given = "directory=, save_every= and keep_saved="
                mine, theirs = (None if some is None else tuple(some[:3]) for some in (one, of_all[other]))
                why = "give all ranks of a host the same" if other else "give all ranks the same"
                raise ValueError(f"rank {rank} keeps with {given} {mine}, and rank {other} with {theirs}: {why}")


#: Commits whose copies a device had not ended when their rank closed: it may still write to their slots.
_never_ended: list[CommitCopy] = []


class _NoRoom(TransfuseError):
    """The keeper has no room for a state that has changed, or came back and has no room any more."""


class _LeftOut(TransfuseError):
    """This step cannot be complete on this host."""


class Keep:
    """A worker's connection to the keeper of its host, made by :func:`keep`."""

    def __init__(self, settings: KeepSettings) -> None:
        self._settings, self._run = settings, settings.run
        self._tls = tls_of(settings.options.get("tls"))
        self._seconds = settings.timeout
        self._agreement = Agreement(settings.group, self._seconds)
        self.rank, self.world_size = self._agreement.rank, self._agreement.size
        self._committer = Committer(self.rank, self.world_size, settings.digests, self._ask, self._seconds)
        self._limits = Limits.from_environment()
        self._remembered, self._remembered_own = Remembered(), Remembered()
        self._link: KeeperLink | None = None
        self._asking = threading.RLock()
        self._call = OneCall()
        self._layout: AgreedLayout | None = None
        #: A structure, and the storages of such states that may change at any time. A new layout does not forget them.
        self._volatile_of: tuple[tuple[Any, ...], set[int]] = (), set()
        self._copying: threading.Thread | None = None
        #: The commit that goes on in that thread; and one whose copies a device has not ended in time.
        self._job: CommitCopy | None = None
        self._late: CommitCopy | None = None
        #: Where commits come after the blocks that have changed the state.
        self._marks = streams.ChangeMarks()
        #: Whether the job has changed its state on streams that did not wait.
        self._distrusts = False
        self._reviving: threading.Thread | None = None
        self._warned = self._warned_of_room = False
        self._unkept = Unkept(self.rank)
        #: None: objects and ``load=`` take what does not land; and after a ``restore()`` there is nothing to say.
        self._unrestorable = (
            Unrestorable(self.rank)
            if settings.state is not None and settings.state.is_made and settings.state.loads is None
            else None
        )
        #: Whether this rank has committed nothing yet, and the keeper was not lost either.
        self._is_new = True
        #: Whether it has been asked to allocate slots.
        self._needs_memory = False
        #: What the keeper has last said about replicas, and about storage.
        self._noted = self._unsaved = ""
        #: Whether :meth:`close` was called, and whether it has ended, or :meth:`detach` was called.
        self._closed = self._detached = False
        #: Ends the pause between two looks for a lost keeper.
        self._hurry = threading.Event()
        #: The newest step that was committed since the last :meth:`restore`.
        self._newest: int | None = None
        #: The newest step for which :meth:`commit` was called.
        self._reached: int | None = None
        #: The state of the last commit, and the versions of its tensors then.
        self._taken: Footprint | None = None
        #: The same state, and the versions of its tensors at the end of the last ``mutating()``.
        self._last: tuple[Footprint, list[int]] | None = None
        self._report: CommitReport | None = None
        #: What the keeper has not been told yet for its metrics. While it is lost, only the newest are kept.
        self._untold_commits: deque[frames.CommitNumbers] = deque(maxlen=UNTOLD)
        self._untold_restores: deque[frames.RestoreNumbers] = deque(maxlen=UNTOLD)
        #: From where the last :meth:`restore` got its step.
        self._source = names.NOWHERE
        #: The keepers of the job. Generation 0: not known yet.
        self._peers = frames.Peers(0, self.world_size, [], [], 0, "", 0, None)
        #: By rank of the job before: its ``rank_state``, after :meth:`restore`.
        self.rank_states: Mapping[int, Any] = {}
        try:
            self.members = self._agreement.together("joining the keepers", self._meet)
        except BaseException:
            self.detach()
            raise
        if settings.state is not None:
            settings.state.join(self._changing)
        keepers_view.watch(self, self._run.directory)

    # ------------------------------------------------------------------------------------------------- attaching

    def _meet(self) -> restoring.Members:
        """Attach to this host's keeper, and let all keepers of the job know each other."""
        agreement, link, failure, mine = self._agreement, None, "", b""
        found = agreement.gather(msgspec.msgpack.encode(self._run), "finding the run of the job")
        self._run = runs.agreed(self._run, [msgspec.msgpack.decode(row, type=runs.Run) for row in found])
        saves = self._settings.saves
        try:
            link, welcome = self._attach()
            generation = welcome.generation
            if saves is not None:
                # Steps of a run that only the storage remembers are older than all that it will commit.
                found_there = link.ask(frames.FindStorage(saves), frames.FoundStorage, self._seconds)
                generation = max(generation, found_there.generation)
            # The keeper's own secret, hashed: containers of one machine may have the same pids and paths.
            host = hashlib.sha256(welcome.token.encode()).hexdigest()
            mine = msgspec.msgpack.encode([host, generation, welcome.token, "", saves])
        except (TransfuseError, OSError) as error:
            failure = as_utf8(str(error))
            mine = msgspec.msgpack.encode(["", 0, "", failure, saves])
        self._link = link
        rows = [msgspec.msgpack.decode(row) for row in agreement.gather(mine, "finding the keepers of the job")]
        failures = {rank: row[3] for rank, row in enumerate(rows) if row[3]}
        if failures:
            raise TransfuseError("\n".join(f"rank {rank}: {why}" for rank, why in failures.items()))
        _check_saves([row[0] for row in rows], [row[4] for row in rows])
        hosts = list(dict.fromkeys(row[0] for row in rows))
        ranks = [[rank for rank, row in enumerate(rows) if row[0] == host] for host in hosts]
        index = hosts.index(rows[self.rank][0])
        token, address = rows[0][2], restoring.LOOPBACK
        doors = [""]
        if len(hosts) > 1:
            door = ""
            try:
                address = own_address()
                door = self._ask(frames.Expose(address, token), frames.Exposed).address
            except (TransfuseError, OSError) as error:
                failure = as_utf8(str(error))
            doors_by_rank = agreement.gather(door.encode(), "finding the keepers' addresses")
            doors = [doors_by_rank[some[0]].decode() for some in ranks]
        self._peers = frames.Peers(
            generation=max(row[1] for row in rows) + 1,
            world_size=self.world_size,
            keepers=doors,
            ranks=ranks,
            index=index,
            token=token,
            replicas=min(self._settings.replicas, len(hosts) - 1),
            rate=self._settings.max_bytes_per_second,
            saves=saves,
        )
        try:
            if not failure:
                self._ask(self._peers, frames.Ack)
            if self._settings.reserve is not None:
                self._ask(frames.Reserve(self._settings.reserve), frames.Ack)
        except TransfuseError as error:
            failure = as_utf8(str(error))
        refusals = agreement.gather(failure.encode(), "joining the keepers")
        if any(refusals):
            lines = [f"rank {rank}: {why.decode()}" for rank, why in enumerate(refusals) if why]
            raise TransfuseError("\n".join(lines))
        return restoring.Members(agreement, ranks, index, token, address, self._tls)

    def _attach(self) -> tuple[KeeperLink, frames.Welcome]:
        """Connect to this host's keeper, and say who this is. If the keeper was about to end, find or start another."""
        until = time.monotonic() + self._seconds
        while True:
            link = attach(self._run, self._seconds, lambda: not self._detached, tls=self._tls)
            try:
                return link, self._greet(link)
            except BaseException as error:
                link.close()
                if not isinstance(error, KeeperLost) or time.monotonic() > until:
                    raise
            time.sleep(KEEPER_AGAIN_SECONDS)

    def _greet(self, link: KeeperLink) -> frames.Welcome:
        settings, here = self._settings, runs.Process.of(os.getpid())
        assert here is not None
        run, agent = self._run, self._run.agent or here
        hello = frames.Hello(
            version=frames.VERSION,
            rank=self.rank,
            world_size=self.world_size,
            pid=here.pid,
            started=here.started,
            agent_pid=agent.pid,
            agent_started=agent.started,
            is_named=run.is_named,
            linger=settings.linger,
            max_bytes=settings.max_bytes,
            slots=settings.slots or 0,
            generation=self._peers.generation,
            stays=run.stays(settings.linger),
        )
        with runs.watched([here, agent]) as descriptors:
            welcome = link.ask_for_files(hello, frames.Welcome, self._seconds, descriptors)[0]
        if welcome.encrypts is not (self._tls is not None):
            does, given = ("encrypts", "without") if welcome.encrypts else ("does not encrypt", "with")
            raise TransfuseError(
                f"the keeper of this host {does}, and this worker was started {given} tls=: give both the same "
                "(TRANSFUSE_TLS_CERT, _KEY and _CA), or end the keeper: transfuse keep --stop"
            )
        return welcome

    def _ask(self, question: Any, expected: Any, seconds: float | None = None) -> Any:
        return self._ask_for_files(question, expected, seconds)[0]

    def _ask_for_files(self, question: Any, expected: Any, seconds: float | None = None) -> tuple[Any, list[int]]:
        with self._asking:
            if self._link is None:
                raise KeeperLost("the keeper of this host is lost")
            return self._link.ask_for_files(question, expected, self._seconds if seconds is None else seconds)

    # ---------------------------------------------------------------------------------------------- restoring

    def look(self) -> restoring.KeptStep | None:
        """The step that :meth:`restore` would try first, and what belonged to the ranks; None if there is none.

        Every rank calls this. Nothing is touched: neither the state nor the rank state.
        """

        def look() -> restoring.KeptStep | None:
            return self._agreement.together("looking at what is kept", lambda: restoring.look(access_of(self)))

        return self._call.run("look", look)

    def restore(self, *, missing_ok: bool = False) -> Step | None:
        """Restore the newest step that the keepers hold whole, in place, on all ranks. Every rank calls this.

        Returns the step; None if this run has never held one: then nothing was touched. Other numbers of ranks and
        other shardings than before are fine. If a step cannot be restored on some rank, all ranks go to the next older
        one. If none can be restored, all ranks raise the same error, and nothing was touched; with ``missing_ok`` they
        return None instead.
        """

        def restore() -> Step | None:
            return self._agreement.together("restoring", lambda: self._count_restore(missing_ok))

        return self._call.run("restore", restore)

    def _count_restore(self, missing_ok: bool) -> Step | None:
        """Restore, and count how it has ended."""
        began, outcome, step = time.monotonic(), names.FAILED, None
        self._source = names.NOWHERE
        try:
            step = self._restore(missing_ok)
            outcome = names.NOTHING if step is None else names.RESTORED
            return step
        finally:
            number = None if step is None else int(step)
            numbers = frames.RestoreNumbers(outcome, self._source, number, time.monotonic() - began)
            self._untold_restores.append(numbers)
            self._tell_numbers()

    def _restore(self, missing_ok: bool) -> Step | None:
        if self._settings.state is None:
            raise TransfuseError("restore() needs the state: keep(state)")
        began = time.monotonic()
        # A copy that goes on meanwhile would see half of what is restored.
        self._join()
        self._marks.hold_back()
        # Nor may a rank ask its keeper while another's commit is about to end: it would not count.
        self._agreement.gather(b"", "ending the commits that go on")
        self._last = None
        restored = restoring.restore(
            access_of(self),
            restoring.RestoreRequest(
                state=self._settings.state,
                load_rank_state=self._settings.rank_state.load,
                missing_ok=missing_ok,
                again=runs.how_to_come_again(self._settings.run, self._settings.linger),
            ),
        )
        if restored is None:
            return None
        self.rank_states, self._unrestorable, self._source = restored.rank_states, None, restored.source
        self._begin_anew()
        hosts = len(self.members.ranks)
        keepers = "the keeper of this host" if hosts == 1 else f"the keepers of {hosts} hosts"
        where, seconds = restored.came_from or keepers, time.monotonic() - began
        lost = f": at least {restored.lost} steps after it are lost" if restored.lost else ""
        logger.warning("rank %d restored step %d from %s in %.2f s%s", self.rank, restored.step, where, seconds, lost)
        return Step(restored.step, restored.report)

    def _begin_anew(self) -> None:
        """What is committed after a restore is another course than what was committed before: a new generation."""
        flags = self._agreement.gather(b"1" if self._newest is not None else b"", "ending the restore")
        if not any(flags):
            return
        self._peers = msgspec.structs.replace(self._peers, generation=self._peers.generation + 1)
        self._layout, self._newest, self._reached = None, None, None
        try:
            self._ask(self._peers, frames.Ack)
        except KeeperLost as error:
            self._lose(CommitReport(0), error)
        self._agreement.gather(b"", "beginning a new generation")

    # ---------------------------------------------------------------------------------------------- committing

    @property
    def own(self) -> NoReturn:
        raise attribute_before(self, "own", "rank_states")

    @property
    def report(self) -> CommitReport | None:
        """The report of the last commit. With ``wait=False`` it is filled in when the copy has ended."""
        return self._report

    def commit(self, step: int, *, wait: bool = True, state: object = None) -> CommitReport | None:
        """Commit the state of a step. Returns when this rank's state has been copied, not when it is replicated.

        With ``wait=False`` the copy goes on while the next forward and backward pass run; then change the state only
        within :meth:`mutating`, which waits for the copy. What was seen to change outside of it is copied at once.
        Steps must rise, except after :meth:`restore`. Returns None for steps that ``every=`` leaves out. ``state`` is
        committed in place of what ``state_dict`` returns. Do not call this in a signal handler: while a commit is under
        way that is refused, and between two commits it keeps a state in the middle of a step.
        """
        return self._call.run("commit", lambda: self._commit_step(step, wait=wait, state=state))

    def _commit_step(self, step: int, *, wait: bool, state: object) -> CommitReport | None:
        number = _arguments.whole("step", step)
        if self._closed:
            raise TransfuseError("commit() after close()")
        check_no_capture(streams.current())
        self._agreement.check_same_ranks()
        if state is None and self._settings.state is None:
            raise TransfuseError("commit() needs a state: keep(state), or commit(step, state=...)")
        if number % self._settings.every:
            return None
        if self._newest is not None and number < self._newest:
            raise ValueError(f"commit() of step {number} after step {self._newest}: steps must rise")
        report = CommitReport(number)
        self._end_copy(report, "the copy before")
        self._report = report
        try:
            self._commit(report, number, state, wait=wait)
        except KeeperLost as error:
            is_unexplained = not isinstance(error, KeeperEnds) and not isinstance(error.__cause__, TimeoutError)
            if self._is_new and self._needs_memory and is_unexplained:
                self._link = None
                raise self._out_of_memory(error) from error
            self._lose(report, error)
        if self._copying is None:
            self._tell(report)
        return report

    def _out_of_memory(self, error: KeeperLost) -> TransfuseError:
        return TransfuseError(
            f"rank {self.rank}: the keeper of this host was lost while it allocated memory for its first slots: "
            f"{error}. Most likely the kernel has ended it because memory ran out (dmesg tells). Set max_bytes= to "
            "what the keeper may take, lower slots=, or raise the memory limit of the control group. Nothing is kept"
        )

    def _commit(self, report: CommitReport, step: int, state: object, *, wait: bool) -> None:
        with self._asking:
            self._reached = step
            is_lost = self._link is None
        if is_lost:
            self._revive()
            report.leave_out("skipped", names.KEEPER_LOST, "the keeper of this host is lost")
            return
        if self._newest is not None and step <= self._newest:
            report.leave_out("skipped", names.NOT_NEWER, f"step {self._newest} has been committed already")
            return
        if not self._has_landed(ask=True):
            report.leave_out("skipped", names.DEVICE, "a device has not ended the copies of an earlier commit yet")
            return
        label = Label(self._peers.generation, step)
        state_is_ours = state is None
        self._marks.hold_back()
        with timed(report, "state_dict"):
            if state is None and self._settings.state is not None:
                state = self._settings.state.tree()
            own = self._settings.rank_state.tree()
        with timed(report, "describe"):
            taken = Snapshot(
                self._remembered.describe(state, self._limits),
                None if own is None else self._remembered_own.describe(own, self._limits),
            )
            structure = taken.structure
        if self._unrestorable is not None and state_is_ours and self.members.speaks:
            self._unrestorable.look(taken.described.manifest)
        try:
            with timed(report, "keeper"):
                layout, slot = self._begin(taken, structure, label)
        except _LeftOut as error:
            report.leave_out("skipped", names.PARTNER, str(error))
            return
        except _NoRoom as error:
            report.leave_out("skipped", names.NO_ROOM, str(error))
            if not self._warned_of_room:
                self._warned_of_room = True
                logger.warning("rank %d: the state is not kept any more, until there is room: %s", self.rank, error)
            return
        number = slot.number
        self._warn_of_replicas(report, slot.notes)
        self._warn_of_storage(report, slot.unsaved)
        self._unkept.hear(None if slot.complete is None else Label(*slot.complete), slot.why)
        if number is None:
            why = f": {slot.why}" if slot.why else ""
            why = f"all slots hold steps that are not complete everywhere yet{why}"
            report.leave_out("skipped", names.NO_SLOT, why)
            return
        if slot.absent:
            report.outcome, report.why = "pending", f"{ranks_and_have(slot.absent)} not called commit() yet"
        job = CommitCopy(self._committer, taken, layout, number, label, report)
        self._taken = Footprint(taken)
        try:
            with timed(report, "copy"):
                if job.begin(None if wait else self._volatile(taken, layout)):
                    job.finish()
                    self._newest = step
                    return
        except KeeperLost:
            self._late = job  # A device may still write to the slot.
            raise
        except BaseException:
            self._drop(job, ask=True)
            raise
        self._job = job
        then, report.outcome, report.why = (report.outcome, report.why), "pending", "the copy goes on"
        self._copying = threading.Thread(
            target=self._go_on, args=(job, step, then), name="transfuse-commit", daemon=True
        )
        self._copying.start()

    def _go_on(self, job: CommitCopy, step: int, then: tuple[str, str]) -> None:
        """The rest of a commit, while training goes on, in its own thread. ``then``: the outcome if all goes well."""
        report, began = job.report, time.perf_counter()
        try:
            if job.go_on():
                self._newest = step
                report.outcome, report.why = then
        except KeeperLost as error:
            self._lose(report, error)
        except BaseException as error:  # Whatever it is, devices may still write to the slot.
            cause = names.CHANGED if isinstance(error, ChangedTooEarly) else names.OTHER
            report.leave_out("dropped", cause, f"{type(error).__name__}: {error}")
            logger.warning("step %d was not kept: %s", report.step, report.why)
            self._distrusts = self._distrusts or isinstance(error, ChangedTooEarly)
            self._drop(job)
        finally:
            report.background_seconds = time.perf_counter() - began
            if job.has_landed(ask=False):
                self._job = None  # It holds the state.

    def _drop(self, job: CommitCopy, *, ask: bool = False) -> None:
        """Give the slot of a commit that does not count back to the keeper, as soon as no device writes to it."""
        self._late = job
        self._has_landed(ask=ask)

    def _has_landed(self, *, ask: bool) -> bool:
        """Whether no device writes to the slot of a commit that does not count any more. ``ask``: the devices."""
        late = self._late
        if late is not None:
            if not late.has_landed(ask=ask):
                return False
            self._late = None
            late.drop()
        return True

    def _begin(self, taken: Snapshot, structure: tuple[Any, ...], label: Label) -> tuple[AgreedLayout, frames.Slot]:
        """The layout for a state, and the slot that the keeper has for it."""
        layout = self._layout
        if layout is None or layout.structure != structure or not layout.fits(taken.text(layout.storages)):
            layout = self._lay(taken, structure, label)
        slot = self._ask(frames.Begin(*label), frames.Slot, COMMIT_ANSWER_SECONDS)
        if slot.renew:
            layout = self._lay(taken, structure, label)
            slot = self._ask(frames.Begin(*label), frames.Slot, COMMIT_ANSWER_SECONDS)
        return layout, slot

    def _warn_of_replicas(self, report: CommitReport, notes: str) -> None:
        """Say once, on each host that is concerned, what is wrong with its replicas."""
        report.unreplicated = notes
        if notes and notes != self._noted and self.members.speaks:
            logger.warning("rank %d commits step %d, but %s", self.rank, report.step, notes)
        self._noted = notes

    def _warn_of_storage(self, report: CommitReport, unsaved: str) -> None:
        """Say once that steps are not saved, and once that they are saved again."""
        report.unsaved = unsaved
        if unsaved and not self._unsaved and self.members.speaks:
            logger.warning("rank %d: %s. Training goes on, and the next one is another try", self.rank, unsaved)
        if self._unsaved and not unsaved and self.members.speaks:
            logger.warning("rank %d: steps are saved again", self.rank)
        self._unsaved = unsaved

    def _lay(self, taken: Snapshot, structure: tuple[Any, ...], label: Label) -> AgreedLayout:
        own = None if taken.own is None else taken.own.manifest
        if not self._settings.options.get("weights_only_objects"):
            refuse_objects(taken.described.manifest, "state")
            if own is not None:
                refuse_objects(own, "rank_state")
        bundles, storages = bundle(taken.described.manifest, own, self._settings.shared)
        # A rank that is alone on its host shares nothing.
        alone = len(self.members.ranks[self.members.host]) == 1
        digests = [] if alone else guess(self._committer.streams, taken.memory, bundles, storages, self._seconds)
        question = frames.Lay(
            *label,
            bundles.hashed(digests),
            len(taken.text(storages)) + ROW_BYTES * len(bundles),
            min(COMMIT_PARTNER_SECONDS, self._seconds / 2),
        )
        self._needs_memory = self._link is not None and not self._link.gone()
        try:
            laid, descriptors = self._ask_for_files(question, frames.Laid | frames.Slot)
        except KeeperLost:
            raise
        except TransfuseError as error:
            if self._is_new:
                raise  # Nothing has been kept yet, and the caller should know before hours of training are at stake.
            raise _NoRoom(str(error)) from error
        if isinstance(laid, frames.Slot):
            raise _LeftOut(laid.why)
        self._unkept.name(label.step, laid.absent, question.patience)
        self._warned_of_room = False
        try:
            views = {laid.first + i: SlotView(fd, writable=True, populate=True) for i, fd in enumerate(descriptors)}
        finally:
            for fd in descriptors:
                os.close(fd)
        for kind in {device.type for device in taken.memory.devices}:
            for view in views.values():
                view.is_pinned = pinning.register(view, view.address, view.nbytes, kind)
        if self._volatile_of[0] != structure:
            self._volatile_of = structure, set()
        self._layout = AgreedLayout(structure, laid.bundles, storages, views, self._volatile_of[1])
        return self._layout

    def _volatile(self, taken: Snapshot, layout: AgreedLayout) -> Ints | None:
        """The storages that must be copied before ``commit`` returns; None: all of them."""
        last, self._last = self._last, None
        if last is None or last[0].structure != taken.structure:
            return None
        now, before = np.array(taken.versions()), np.array(last[1])
        changed = taken.described.manifest.tensors.storage[now != before]
        layout.volatile |= set(changed.tolist())
        return np.array(sorted(layout.volatile), dtype=np.int64)

    @contextmanager
    def mutating(self) -> Iterator[None]:
        """Change the state within this block, after the copy that ``commit(wait=False)`` began.

        What lies in main memory has been copied when the block begins; what lies on accelerators is waited for there.

        This is :meth:`State.mutating`: all who read the same :class:`State` are waited for.
        """
        with self._changing() if self._settings.state is None else self._settings.state.mutating():
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self._call.run("mutating", self._wait_to_change)
        try:
            with self._committer.quiet.kept():
                yield
        finally:
            taken = self._taken
            self._marks.set([] if taken is None else taken.devices)
            with suppress(Exception):
                if taken is not None:
                    taken.calm = taken.versions()
                    self._last = taken, taken.calm

    def _wait_to_change(self) -> None:
        job, report = self._job, self._report
        if job is not None and captures(streams.current()):
            if self._committer.quiet.is_kept:
                return  # The block around this one has waited: a captured stream cannot wait for what is outside.
            raise TransfuseError(
                "mutating() was entered during the capture of a graph, while a commit is under way: enter it before "
                "the capture begins"
            )
        is_held = False
        if report is not None and job is not None and not self._distrusts:
            with timed(report, "the copy"):
                is_held = job.hold_back()
        if report is not None and not is_held:
            self._end_copy(report, "the copy")
        taken, layout = self._taken, self._layout
        if taken is not None and layout is not None and layout.structure == taken.structure:
            # What has changed since the commit, or since the last such block, has changed outside of one.
            layout.volatile |= taken.changed()

    def _end_copy(self, report: CommitReport, cause: str) -> None:
        """Wait for a copy that goes on, and note in this report for how long. Then the copy's own report is told."""
        thread, ended = self._copying, self._report
        if thread is None:
            return
        with timed(report, cause), self._committer.quiet.broken():
            thread.join()
        self._copying = self._job = None
        assert ended is not None
        self._tell(ended)

    def _join(self) -> None:
        """As `_end_copy`, where training is not what waits."""
        self._end_copy(CommitReport(0), "")

    def _let_go(self) -> None:
        """This rank uses its slots no more. What a device has not ended by then keeps them mapped for good."""
        self._join()
        self._taken = self._last = None
        late, self._late = self._late, None
        if late is not None:
            with self._committer.quiet.broken():
                if not self._committer.quiet.poll(late.has_landed, self._seconds):
                    _never_ended.append(late)

    def _tell(self, report: CommitReport) -> None:
        tell(report)
        self._untold_commits.append(report.numbers())
        self._tell_numbers()
        self._unkept.note(report)
        if report.outcome in ("committed", "pending"):
            self._is_new = False
        if self._settings.on_report is not None:
            self._settings.on_report(report)

    def _tell_numbers(self) -> None:
        """Tell the keeper what it counts for its metrics. If it cannot be told now, it is told another time."""
        if not self._asking.acquire(blocking=False):
            return
        try:
            link, commits, restores = self._link, self._untold_commits, self._untold_restores
            if link is None:
                return
            try:
                with suppress(KeeperLost):
                    link.send(frames.Numbers([*commits], [*restores]), COMMIT_ANSWER_SECONDS)
                    commits.clear()
                    restores.clear()
                    return
            except BaseException:
                link.close()
                raise
            link.close()  # Half of a frame may have been sent. The next question finds that the keeper is lost.
        finally:
            self._asking.release()

    # ------------------------------------------------------------------------------------------ a lost keeper

    def _lose(self, report: CommitReport, error: KeeperLost) -> None:
        """Go on without the keeper. One warning; commits go on when it is back."""
        report.leave_out("skipped", names.KEEPER_LOST, str(error))
        with self._asking:
            link, self._link = self._link, None
            self._layout, self._is_new = None, False
        if link is not None:
            link.close()
        if not self._warned:
            self._warned = True
            logger.warning(
                "rank %d goes on without the keeper of its host, and looks for it: %s. Until it is back, nothing is "
                "kept",
                self.rank,
                error,
            )
        self._revive()

    def _revive(self) -> None:
        if self._reviving is None or not self._reviving.is_alive():
            self._reviving = threading.Thread(target=self._look, name="transfuse-revive", daemon=True)
            try:
                self._reviving.start()
            except KeyError as error:
                # A signal handler has raised when the thread had begun, and what threading does then has failed.
                raise error.__context__ or error from None

    def _look(self) -> None:
        """Look for the keeper, or start it again, until it answers. If this rank closes meanwhile, tell it that."""
        while self._link is None and not self._detached:
            try:
                link, _ = self._attach()
                try:
                    if len(self._peers.keepers) > 1:
                        # A new keeper opens the door of the old one, which the keepers of the other hosts know.
                        link.ask(frames.Expose(self.members.address, self._peers.token), frames.Exposed, self._seconds)
                    link.ask(self._peers, frames.Ack, self._seconds)
                    with self._asking:
                        if self._closed:
                            if not self._detached:
                                link.ask(frames.Close(), frames.Ack, COMMIT_ANSWER_SECONDS)
                            link.close()
                            return
                        if self._reached is not None:
                            # The other ranks of this host need not wait for these.
                            left = frames.LeaveOut(self._peers.generation, self._reached)
                            link.ask(left, frames.Ack, COMMIT_ANSWER_SECONDS)
                        self._link = link
                except BaseException:
                    link.close()
                    raise
                logger.warning("rank %d has found the keeper of its host again", self.rank)
                self._warned = False
                return
            except (TransfuseError, OSError) as error:
                logger.debug("looking for the keeper: %s", error)
                if self._closed:
                    time.sleep(KEEPER_AGAIN_SECONDS)
                self._hurry.wait(KEEP_REVIVE_SECONDS)

    # -------------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """This rank has done its work. When all ranks of all hosts have closed, the keepers forget, and end."""
        self._call.run("close", self._close)

    def _close(self) -> None:
        if self._closed:
            return
        self._let_go()
        with self._asking:
            self._closed, link = True, self._link
            if link is not None:
                try:
                    link.ask(frames.Close(), frames.Ack, COMMIT_ANSWER_SECONDS)
                except TransfuseError as error:
                    logger.warning("rank %d says close() again: %s", self.rank, error)
                    link.close()
                    link = self._link = None
        if link is None:
            # Keepers of this host and of others wait for this rank: the one that comes back has to hear of it.
            self._hurry.set()
            self._revive()
            assert self._reviving is not None
            self._reviving.join(self._seconds)
            if self._reviving.is_alive():
                logger.warning(
                    "rank %d has closed, but the keeper of its host did not hear of it within %g s. It may stay: "
                    "transfuse keep --status lists it, transfuse keep --stop ends it",
                    self.rank,
                    self._seconds,
                )
        self.detach()

    def detach(self) -> None:
        """Leave the keeper as it is. It keeps what it has, as after the end of this process."""
        self._closed = self._detached = True
        keepers_view.forget(self)
        self._hurry.set()
        self._let_go()
        if self._settings.state is not None:
            self._settings.state.leave(self._changing)
        with self._asking:
            link, self._link = self._link, None
        self._layout = None
        if link is not None:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.detach()


def access_of(keep: Keep) -> restoring.Access:
    """How other modules of this room reach the keeper and the ranks of a ``Keep``, without a public name on it."""
    return restoring.Access(keep.members, keep._link, keep._asking, keep._seconds, keep._settings)
