"""The leader of a job's keepers has steps saved: it asks who has which candidate, and orders what is to be written.

Nothing here waits for storage: orders are carried out by :mod:`.saving`, and the leader asks how they are going. What
goes wrong costs one step: it is given up, its slots are let go, and the next candidate is another try.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from transfuse._errors import TransfuseError, as_utf8
from transfuse._keeper import frames
from transfuse._keeper.door import ask, connect
from transfuse._keeper.questions import (
    Answer,
    SaveBegin,
    SaveLook,
    SaveProgress,
    SavePrune,
    SaveQuestion,
    SaveRecord,
    SaveRound,
    SaveState,
    SaveWrite,
)
from transfuse._keeper.save_decisions import SaveDecisions, writers
from transfuse._keeper.saved_steps import SavedSteps, silent
from transfuse._keeper.saving import SaveOrder, SaveStopped, SaveTask, SavingHost
from transfuse._keeper.slot_file import Label
from transfuse._keeper.slot_policy import Books
from transfuse._keeper.storage import Record
from transfuse._keeper.writing_mark import WritingMark
from transfuse._sizes import human_bytes
from transfuse._tls import TLS
from transfuse._tuning import (
    DOOR_ASK_SECONDS,
    DOOR_FIRST_PAUSE_SECONDS,
    DOOR_LONGEST_PAUSE_SECONDS,
    RING_SILENCE_SECONDS,
    SAVE_LAST_SECONDS,
    SAVE_POLL_SECONDS,
    SAVE_ROUND_SECONDS,
    SAVE_SILENCE_SECONDS,
)
from transfuse._wire.handshake import ControlConnection, key_of

logger = logging.getLogger("transfuse.keeper")
_A = TypeVar("_A", bound=Answer)


class Saver:
    """A keeper's part in saving, for its process: generation by generation."""

    def __init__(
        self, changed: threading.Condition, books: Books, tls: TLS | None, all_closed: Callable[[], bool]
    ) -> None:
        """``changed``: the keeper's lock. The methods below do not wait for storage, unless they say so.

        ``tls``: how it talks to the keepers of other hosts. ``all_closed``: whether all ranks of this host have closed;
        called under the lock.
        """
        self._changed, self._books, self._tls, self._all_closed = changed, books, tls, all_closed
        self._lock = threading.Lock()
        self._host: SavingHost | None = None
        self._leader: SaveLeader | None = None
        self._peers: frames.Peers | None = None
        self._known: list[Label] = []
        #: How the last save of an earlier generation went.
        self._last: dict[str, Any] = {}
        #: Where steps are on storage, for workers that restore.
        self.steps: SavedSteps | None = None
        self._restored: Label | None = None
        #: What the leader has last said: the newest saved step, and what is wrong.
        self._heard: SaveRound | None = None

    def find(self, saves: frames.Saves) -> int:
        """Refuse storage that cannot be used. Returns the highest generation there. This waits, within a deadline."""
        self._known, generation = SavedSteps(saves).find()
        return generation

    def join(self, peers: frames.Peers) -> None:
        """A generation begins."""
        with self._lock:
            if self._peers is not None and (self._peers == peers or self._peers.generation > peers.generation):
                return
            self._peers, saves = peers, peers.saves
            mark = self._pass_mark_on(peers)
            self._end()
            if self.steps is not None:
                self.steps.forget()
            self.steps = None if saves is None else SavedSteps(saves)
            every = None if saves is None else saves.every
            with self._changed:
                self._books.save_every = every
            if self.steps is None or every is None:
                if mark is not None:
                    mark.stop()
                return
            leads = peers.index == 0
            self._host = SavingHost(
                self._changed, self._books, self.steps, peers.rate, leads=leads, all_closed=self._all_closed
            )
            self._host.saved, self._host.restored, self._host.mark = self._known, self._restored, mark
            if leads:
                self._leader = SaveLeader(self._host, peers, self._tls)
                self._leader.start()

    def _pass_mark_on(self, peers: frames.Peers) -> WritingMark | None:
        """The leader's mark, if it goes on to lead: nobody has to wait until that is known to have ended."""
        host, saves = self._host, peers.saves
        if host is None or saves is None or peers.index or not host.leads or host.steps.where != saves.directory:
            return None
        mark, host.mark = host.mark, None
        return mark

    def note_restored(self, label: Label) -> None:
        """All ranks have restored this step."""
        with self._lock:
            self._restored = label
            if self._host is not None:
                self._host.restored = label
            if self.steps is not None:
                self.steps.forget()

    def wake(self) -> None:
        """Something was committed, or all ranks have closed."""
        leader = self._leader
        if leader is not None:
            leader.wake()

    def is_busy(self) -> bool:
        """Whether the end of the job has to wait until its last step is saved."""
        leader = self._leader
        return leader is not None and leader.is_busy()

    def trouble(self) -> str:
        """Why nothing is saved now; empty if all is well. Only the leader's workers are told."""
        leader = self._leader
        return "" if leader is None else leader.trouble

    def visit(self) -> SaveVisit:
        """The leader, which is another keeper, has connected."""
        return SaveVisit(self)

    def hear(self, question: SaveRound) -> SaveState:
        """The leader asks how it is here."""
        host = self._host
        if host is not None and self._peers is not None and question.generation == self._peers.generation:
            self._heard = question
        return state_of(self._changed, self._books, question, self._all_closed)

    def task(self) -> SaveTask:
        host = self._host
        if host is None:
            raise TransfuseError("this keeper does not save steps")
        return SaveTask(host)

    def status(self) -> dict[str, Any] | None:
        """Called under the keeper's lock. None: nothing is saved, or read."""
        peers, leader, host, heard = self._peers, self._leader, self._host, self._heard
        if peers is None or peers.saves is None:
            return None
        saves = peers.saves
        told = {"directory": saves.directory, "every": saves.every, "keep": saves.keep}
        candidate = self._books.candidate()
        told |= {"candidate": None if candidate is None else candidate.step}
        if leader is not None:
            return {**told, "last": self._last, **leader.status()}
        newest = None if heard is None or heard.saved is None else heard.saved.step
        saved = [label.step for label in (self._known if host is None else host.saved)]
        return {**told, "saved": [newest] if newest is not None else saved, "trouble": heard.trouble if heard else ""}

    def _end(self) -> None:
        leader, host = self._leader, self._host
        self._leader = self._host = self._heard = None
        if leader is not None:
            self._last = leader.last or self._last
            leader.stop()
        if host is not None:
            self._known = host.saved
            host.stop()

    def close(self, until: float) -> None:
        with self._lock:
            leader, host = self._leader, self._host
            self._end()
            if self.steps is not None:
                self.steps.forget()
        if leader is not None:
            leader.join(until)
        if host is not None:
            host.join(until)


def state_of(
    changed: threading.Condition, books: Books, question: SaveRound, all_closed: Callable[[], bool]
) -> SaveState:
    """What this host has to save."""
    with changed:
        concluded, known, is_over = question.concluded, books.concluded, all_closed()
        # It goes back only when the job has ended: a leader that was started again has not concluded anything yet.
        is_news = known is None or (concluded is not None and concluded > known)
        if question.generation == books.generation and (is_news or is_over):
            books.concluded = concluded
        candidate = books.candidate()
        is_whole = candidate is not None and books.is_saveable(candidate)
        return SaveState(books.generation, candidate, is_whole, books.reached(), is_over)


class SaveVisit:
    """Answers the leader's connection. What it holds is held as long as the connection lasts."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._task: SaveTask | None = None

    def answer(self, question: SaveQuestion) -> Answer:
        if isinstance(question, SaveRound):
            return self._saver.hear(question)
        if isinstance(question, SaveBegin):
            self.end()
            self._task = self._saver.task()
        if self._task is None:
            raise TransfuseError("nothing is being saved here")
        return self._task.order(question)

    def may_stay(self, seconds: float) -> bool:
        """Whether a leader that has said nothing for these seconds may be alive."""
        return seconds <= RING_SILENCE_SECONDS

    def end(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.end()


# ---------------------------------------------------------------------------------------------------------- members


class _SavingMember(Protocol):
    """A host, as its leader sees it."""

    index: int

    def hear(self, question: SaveRound) -> SaveState | None:
        """Its state; None if it cannot be reached now."""

    def order(self, question: SaveOrder | SaveLook) -> SaveProgress:
        """Have it carry out an order. Raises if it cannot be reached, or refuses."""

    def let_go(self) -> None:
        """The save has ended."""

    def close(self) -> None: ...


class _OwnHost:
    """The leader's own host."""

    def __init__(self, index: int, host: SavingHost) -> None:
        self.index, self._host = index, host
        self._task: SaveTask | None = None

    def hear(self, question: SaveRound) -> SaveState | None:
        return state_of(self._host.changed, self._host.books, question, self._host.all_closed)

    def order(self, question: SaveOrder | SaveLook) -> SaveProgress:
        if isinstance(question, SaveBegin):
            self._task = SaveTask(self._host)
        assert self._task is not None
        return self._task.order(question)

    def let_go(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.end()

    close = let_go


class _FarHost:
    """Another host."""

    def __init__(self, index: int, address: str, key: bytes, tls: TLS | None) -> None:
        self.index, self._address, self._key, self._tls = index, address, key, tls
        self._control: ControlConnection | None = None
        self._pause, self._again = DOOR_FIRST_PAUSE_SECONDS, 0.0

    def hear(self, question: SaveRound) -> SaveState | None:
        if time.monotonic() < self._again:
            return None
        try:
            state = self._ask(question, SaveState)
        except (TransfuseError, OSError, ValueError):
            # The ring says it: its leader asks the same keepers.
            self._again = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, DOOR_LONGEST_PAUSE_SECONDS)
            return None
        self._pause = DOOR_FIRST_PAUSE_SECONDS
        return state

    def order(self, question: SaveOrder | SaveLook) -> SaveProgress:
        return self._ask(question, SaveProgress)

    def _ask(self, question: SaveQuestion, expected: type[_A]) -> _A:
        try:
            control = self._control
            if control is None:
                control = self._control = connect(self._address, self._key, DOOR_ASK_SECONDS, self.index, self._tls)
            answer = ask(control, question, DOOR_ASK_SECONDS)
            if not isinstance(answer, expected):
                raise TransfuseError(f"it answered with {type(answer).__name__}")
            return answer
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()

    let_go = close


# ----------------------------------------------------------------------------------------------------------- leader


class SaveLeader:
    """Has the steps of one generation saved, on all hosts."""

    def __init__(self, host: SavingHost, peers: frames.Peers, tls: TLS | None) -> None:
        assert peers.saves is not None
        self._host, self._peers, self._saves = host, peers, peers.saves
        key = key_of(peers.token)
        self._members: list[_SavingMember] = [
            _OwnHost(index, host) if index == peers.index else _FarHost(index, address, key, tls)
            for index, address in enumerate(peers.keepers)
        ]
        self._decisions = SaveDecisions(len(self._members))
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._lead, name="transfuse-save-lead", daemon=True)
        self.trouble = ""
        self._lost = 0
        self._newest: Label | None = max(host.saved, default=None)
        self.last: dict[str, Any] = {}
        self._progress: dict[int, int] = {}
        self._quiet_since: float | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._host.stop()
        self._news.set()

    def join(self, until: float) -> None:
        self._thread.join(max(0.0, until - time.monotonic()))

    def wake(self) -> None:
        self._news.set()

    def is_busy(self) -> bool:
        """Whether a step is being saved, or waits for it. One that other hosts do not get does not wait for good."""
        if self._host.stopped.is_set():
            return False
        if self._decisions.saving is not None:
            self._quiet_since = None  # What comes after it waits anew.
            return True
        with self._host.changed:
            # What was leapt over has another chance when all have closed.
            is_over = self._decisions.is_over or not self._host.all_closed()
            concluded = self._decisions.concluded if is_over else self._decisions.ended
            candidate = self._host.books.candidate_after(concluded)
            waits = candidate is not None and self._host.books.is_saveable(candidate)
        now = time.monotonic()
        self._quiet_since = None if not waits else self._quiet_since or now
        return self._quiet_since is not None and now - self._quiet_since <= SAVE_LAST_SECONDS

    def status(self) -> dict[str, Any]:
        decisions = self._decisions
        return {
            "saved": [label.step for label in self._host.saved],
            "saving": None if decisions.saving is None else decisions.saving.step,
            "written_bytes": sum(self._progress.values()),
            "missed": decisions.missed,
            "failed": decisions.failed,
            "trouble": self.trouble,
        } | ({"last": self.last} if self.last else {})

    def _lead(self) -> None:
        while not self._host.stopped.is_set():
            try:
                self._round()
            except Exception:
                logger.exception("a round of saving failed")
            if self._decisions.saving is None:
                self._news.wait(SAVE_ROUND_SECONDS)
                self._news.clear()
        for member in self._members:
            member.close()

    def _round(self) -> None:
        decisions, generation = self._decisions, self._peers.generation
        question = SaveRound(generation, decisions.concluded, self._newest, self.trouble)
        states: dict[int, SaveState] = {}
        for member in self._members:
            if self._host.stopped.is_set():
                return
            state = member.hear(question)
            if state is not None and state.generation == generation:
                states[member.index] = state
        before = decisions.missed
        decisions.hear(states)
        if decisions.missed > before:
            logger.info("a step that was to be saved is not complete on all hosts: another one is saved")
        if decisions.saving is not None:
            self._save(decisions.saving)

    def _save(self, label: Label) -> None:
        began = time.monotonic()
        self._progress.clear()
        is_well = False
        try:
            nbytes = self._write(label)
            is_well = True
        except SaveStopped:
            logger.info("step %d is not saved: the keeper ends, or the job has been started again", label.step)
        except (TransfuseError, OSError, ValueError) as error:
            self._complain(label, as_utf8(str(error)))
        except Exception as error:
            logger.exception("step %d could not be saved", label.step)
            self._complain(label, f"{type(error).__name__}: {error}")
        finally:
            for member in reversed(self._members):  # The leader's host comes last: it removes what does not count.
                with suppress(TransfuseError, OSError):
                    member.let_go()
            self._decisions.end(well=is_well)
            with self._host.changed:
                self._host.books.concluded = label
            self._news.set()  # Until they hear of it, other hosts do not hold the next candidate.
        if is_well:
            self._tell(label, nbytes, time.monotonic() - began)

    def _tell(self, label: Label, nbytes: int, seconds: float) -> None:
        more = ""
        if self.trouble:
            more = f"; saving goes on, after {self._lost} steps that were not saved"
        elif self.last and (skipped := (label.step - self.last["step"]) // (self._saves.every or 1) - 1) > 0:
            more = f"; {skipped} steps since step {self.last['step']} were left out"
        self.trouble, self._lost = "", 0
        self.last = {"step": label.step, "bytes": nbytes, "seconds": round(seconds, 3), "at": time.time()}
        where = self._saves.directory
        logger.info("step %d is saved in %s: %s in %.2f s%s", label.step, where, human_bytes(nbytes), seconds, more)

    def _complain(self, label: Label, why: str) -> None:
        self._lost += 1
        line = f"step {label.step} is not saved: {why}"
        # Once, until a step is saved again.
        (logger.debug if self.trouble else logger.warning)("%s. The next one is another try", line)
        self.trouble = self.trouble or line

    def _write(self, label: Label) -> int:
        """Save a step. Returns its bytes."""
        here, others = self._members[self._peers.index], [m for m in self._members if m.index != self._peers.index]
        begun = self._order({here: SaveBegin(*label, "")})
        mark = self._host.mark
        if mark is None:
            raise SaveStopped("the job has been started again")
        begun |= self._order(dict.fromkeys(others, SaveBegin(*label, mark.name)))
        together = all(one.sees for one in begun.values())
        tables = {table.rank: table.bundles for one in begun.values() for table in one.tables}
        hosts = {table.rank: member.index for member, one in begun.items() for table in one.tables}
        if sorted(tables) != list(range(self._peers.world_size)):
            raise TransfuseError(f"the keepers hold ranks {sorted(tables)} of {self._peers.world_size}")
        owners = writers(tables, hosts, together=together)
        orders = {
            member: SaveWrite({table.rank: owners[table.rank].astype("<i4").tobytes() for table in one.tables})
            for member, one in begun.items()
        }
        written = self._order(orders)
        record = Record.of(label, self._peers.world_size, [file for one in written.values() for file in one.files])
        # On all hosts, before anything older goes: a step counts when all that see it have its record.
        self._order(dict.fromkeys(self._members, SaveRecord(record, together)))
        self._newest = label
        with suppress(TransfuseError, OSError, ValueError):
            self._order(dict.fromkeys(self._members, SavePrune(self._saves.keep, together)))
        return sum(file.nbytes for file in record.files.values())

    def _order(self, orders: Mapping[_SavingMember, SaveOrder]) -> dict[_SavingMember, SaveProgress]:
        """Have orders carried out, side by side. Raises what went wrong on a host."""
        first: dict[_SavingMember, SaveProgress] = {}
        done: dict[_SavingMember, SaveProgress] = {}
        for member, order in orders.items():
            first[member] = self._ask(member, order)
        waiting = dict(first)
        while True:
            for member, progress in waiting.items():
                self._progress[member.index] = progress.nbytes
                if self._host.stopped.is_set():
                    raise SaveStopped("the keeper ends")
                if progress.failure:
                    raise TransfuseError(self._on(member, progress.failure))
                if progress.is_done:
                    done[member] = progress
                elif progress.silent > SAVE_SILENCE_SECONDS:
                    raise TransfuseError(
                        self._on(member, str(silent(self._saves.directory, round(progress.silent, 1))))
                    )
            if len(done) == len(orders):
                break
            if self._host.stopped.wait(SAVE_POLL_SECONDS):
                raise SaveStopped("the keeper ends")
            waiting = {member: self._ask(member, SaveLook()) for member in orders if member not in done}
        return {member: _with_tables(one, first[member]) for member, one in done.items()}

    def _ask(self, member: _SavingMember, question: SaveOrder | SaveLook) -> SaveProgress:
        try:
            return member.order(question)
        except (TransfuseError, OSError, ValueError) as error:
            raise TransfuseError(self._on(member, str(error))) from error

    def _on(self, member: _SavingMember, why: str) -> str:
        return why if len(self._members) == 1 else f"host {member.index}: {why}"


def _with_tables(progress: SaveProgress, first: SaveProgress) -> SaveProgress:
    """The answer to an order that took a while. The tables came with the first one."""
    progress.tables = first.tables
    return progress
