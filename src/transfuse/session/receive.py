"""A gathering: one receive from all its sources, and what their conversations have in common.

Each conversation hands in its offer and hears what was agreed on; then it asks for tasks until there are none. So a
source that dies, falls silent or answers wrongly costs what it owed, which becomes the others' tasks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transfuse.errors import (
    NotCovered,
    PeerError,
    PeerTimeout,
    ProtocolError,
    ReceiveFailed,
    SourceMutated,
    TransfuseError,
)
from transfuse.memory.assembly import Portion
from transfuse.phases import WAITING, Phase
from transfuse.plan.match import prepare
from transfuse.plan.parcels import Parcels
from transfuse.session import agreement
from transfuse.session.accepting import Accepted, Described, accept, read_description
from transfuse.session.context import Context, Request
from transfuse.session.ledger import Ledger
from transfuse.session.negotiation import Decide, Describe, Done, Negotiation, Wait
from transfuse.session.partial import Partial
from transfuse.state.tensors import Bools
from transfuse.wire.group import Line
from transfuse.wire.messages import Offer

__all__ = ["Compare", "Confirm", "Fetch", "Gathering"]

logger = logging.getLogger("transfuse")

#: How long a conversation sleeps at most before it looks whether the caller wants to stop.
SLICE_SECONDS = 0.1
#: So much is compared at a time, so that several sources share the work.
COMPARE_BYTES = 256 << 20


@dataclass(frozen=True)
class Fetch:
    """Bring these parcels."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class Compare:
    """Find out which of these parcels, of which something is here already, the source has too."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class Confirm:
    """Ask the source whether what it brought is still what it has."""


class Gathering:
    """What the conversations of one receive share. Every method may be called from any of their threads."""

    def __init__(self, request: Request, context: Context) -> None:
        self.request = request
        self.ranks = context.ranks
        self.caller = context.caller
        self.report = context.report
        self.progress = context.progress
        #: Held while parcels are read from a source's memory: one reader uses all threads.
        self.reading = threading.Lock()
        self._context = context
        self._limits = context.limits
        self._timeout = context.timeout
        self._preparing = threading.Lock()
        self._prepared = False
        self._changed = threading.Condition()
        self._lines: dict[int, Line] = {}
        self._one_by_one = context.one_by_one
        # Who asks for what there is wants to hear of all of it.
        patience = 0.0 if context.one_by_one else context.timeout / (2 if request.late is not None else 4)
        self._negotiation = Negotiation(context.ranks, patience)
        self._accepted: Accepted | None = None
        self._ledger: Ledger | None = None
        #: Parcels that an earlier receive has left.
        self._resumed: Bools | bool = False
        #: What each source can bring, where that is not everything.
        self._portions: dict[int, Portion] = {}
        #: Sources whose memory may yet be read at full speed. Nothing is asked for over the group before that.
        self._readers: set[int] = set()
        #: Sources that are here and have agreed; and those that have said that what they brought holds.
        self._present: set[int] = set()
        self._confirmed: set[int] = set()
        #: Sources all of whose memory in flight is staging: these can be left, and how.
        self._leavable: dict[int, Callable[[], object]] = {}
        self._left: dict[int, BaseException] = {}
        self._finishing = False
        self._failure: BaseException | None = None
        self._result: list[Any] = []

    # -- what is agreed on

    @property
    def several(self) -> bool:
        return len(self.ranks) > 1

    @property
    def accepted(self) -> Accepted:
        assert self._accepted is not None
        return self._accepted

    @property
    def ledger(self) -> Ledger:
        assert self._ledger is not None
        return self._ledger

    @contextmanager
    def phase(self, line: Line, phase: Phase) -> Iterator[None]:
        """A conversation is in a phase."""
        line.phase = self.progress[line.peer].phase = phase.doing
        with self.caller.phase(self.report, phase):
            yield

    def prepare(self, line: Line) -> None:
        """Take the target apart, once, while the sources describe their states."""
        with self._preparing:
            if self._prepared or self.request.failure is not None:
                return
            self._prepared = True
            with self.phase(line, Phase.PREPARE):
                try:
                    self.request = replace(self.request, target=prepare(self.request.target, self._limits))
                except Exception as error:
                    self.request = replace(self.request, failure=error)

    def join(self, line: Line) -> None:
        """A conversation begins."""
        with self._changed:
            self._lines[line.peer] = line
            # In flight is only a receive for its first word.
            self.may_leave(line, line.abandon if self.several else None)

    def agree(self, line: Line, offer: Offer, describe: Callable[[], Offer]) -> None:
        """Hand in an offer, and wait until it is known what the sources agree on. Raises unless this one does.

        If nobody has described this state yet, the source is asked to.
        """
        rank = line.peer
        with self._changed:
            self._negotiation.hand_in(rank, offer, time.monotonic())
            self._changed.notify_all()
        while not isinstance(turn := self._next_turn(line), Done):
            if isinstance(turn, Describe):
                self._describe(line, describe)
            else:
                self._decide(turn)
        if turn.late:
            self._compare_late(rank, offer)
        with self._changed:
            self._check(rank)
            self._present.add(rank)
            if offer.memory is not None and offer.max_bytes_per_second is None and self.request.options.same_host:
                self._readers.add(rank)
            self._changed.notify_all()

    def _next_turn(self, line: Line) -> Describe | Decide | Done:
        """Wait until this conversation has to do something for all of them, or it has been decided."""
        rank = line.peer
        with line.resting(), self._changed:
            self.progress[rank].phase = Phase.PLAN.doing
            while True:
                self._check(rank)
                self._check_caller()
                turn = self._negotiation.next_turn(rank, time.monotonic())
                if not isinstance(turn, Wait):
                    return turn
                self.progress[rank].phase = WAITING
                self._changed.wait(SLICE_SECONDS)

    def _describe(self, line: Line, describe: Callable[[], Offer]) -> None:
        """Ask this source what its state is like."""
        self.may_leave(line, line.abandon if self.several else None)
        try:
            whole = describe()
        finally:
            self.may_leave(line, None)
        left = self.left(line.peer)
        if left is not None:
            raise left
        described = read_description(whole, self._limits, line.peer)
        with self._changed:
            self._negotiation.hand_in_description(line.peer, described)
            self._changed.notify_all()

    def _decide(self, turn: Decide) -> None:
        """Choose the sources that agree, and plan. In the thread of the first conversation that finds it due."""
        try:
            choice = agreement.choose(self.ranks, turn.offers, turn.described, self.request)
            if choice.cohorts:
                accepted = self._accept(choice, turn.described)
                ledger = Ledger(accepted.cut.payload, self._changed)
                self._keep(accepted, ledger)
        except NotCovered as error:
            with self._changed:
                # Those that have not come yet, or came while it was planned, may hold it.
                hope = self._negotiation.may_still_change() and not self._one_by_one
                if hope:
                    self._negotiation.postpone()
                    self._changed.notify_all()
            if not hope:
                for rank, dropped in choice.dropped.items():
                    error.add_note(f"source {rank} is not used: {dropped}")
                self.fail(error)
            return
        except BaseException as error:
            self.fail(error)
            return
        for rank, dropped in choice.dropped.items():
            if self.several:
                logger.warning("source %d is not used: %s", rank, dropped)
        with self._changed:
            self._negotiation.decide(dropped=choice.dropped, stands=bool(choice.cohorts))
            if choice.cohorts:
                self.report.leaves = len(accepted.manifest)
                self.report.step = accepted.offer.step if self.request.step is None else self.request.step
                self._accepted, self._ledger = accepted, ledger
                self._present = choice.offers.keys() & self._negotiation.offers.keys()
                self._count()
            self._changed.notify_all()

    def _accept(self, choice: agreement.Choice, described: dict[bytes, Described]) -> Accepted:
        """Plan, going on from what an earlier receive has left if that is possible."""
        first = described[choice.offers[next(iter(choice.cohorts[0].members))].likeness].offer
        parcel_bytes = min(offer.parcel_bytes for offer in choice.offers.values())
        request, resume = self.request, self.request.resume
        if resume is not None and not self._continues(resume, first, parcel_bytes):
            logger.warning("the sources offer another state than the one to be resumed: everything is fetched")
            self.request = request = replace(request, resume=None)
            resume = None
        fine = self._fine(first, parcel_bytes) if resume is None else resume.parcel_bytes
        if not self._one_by_one:
            self._check_lacking(choice)
        return accept(choice.cohorts, choice.offers, first, request, self._context, fine)

    def _check_lacking(self, choice: agreement.Choice) -> None:
        """Raise if a tensor of the target is held by none of the chosen sources, but may be by one that is not used.

        A tensor that no source has at all keeps its values: ``strict`` is for those.
        """
        lacking = agreement.lacking(choice, self.request)
        if not lacking:
            return
        with self._changed:
            if self._negotiation.awaited:
                raise NotCovered([f"{path}: no source that has come so far has it" for path in lacking])
            unused = list(self._negotiation.unused(choice.dropped))
        blocks = [
            f"{path}: {name} may hold it, but is not there: {why}"
            for name, why in self.request.absent.items()
            for path in lacking
        ]
        for rank, why, manifest in unused:
            held = lacking if manifest is None else sorted(set(manifest.paths) & set(lacking))
            may = "may hold it, but is lost" if manifest is None else "holds it, but is not used"
            blocks += [f"{path}: source {rank} {may}: {why}" for path in held]
        if blocks:
            raise NotCovered(blocks)

    def portion(self, rank: int) -> Portion | None:
        """What a source can bring; None: everything."""
        assembled = self.accepted.assembled
        if assembled is None:
            return None
        with self._changed:
            known = self._portions.get(rank)
        if known is None:
            known = assembled.portion(rank)
            with self._changed:
                self._portions[rank] = known
        return known

    def _held(self, rank: int) -> Bools | None:
        portion = self._portions.get(rank)
        return None if portion is None else portion.held

    def _fine(self, offer: Offer, parcel_bytes: int) -> int:
        """A size of parcels that lets several sources end together, and their staging be within its bounds."""
        if self.request.options.delta:
            parcel_bytes = max(min(parcel_bytes, self._limits.block_bytes), self._limits.min_parcel_bytes)
        if not self.several:
            return parcel_bytes
        sizes = offer.described.storage_nbytes
        total = float(np.frombuffer(sizes[: len(sizes) // 8 * 8], dtype="<i8").astype(float).sum())
        staged = self._limits.staging_bytes // (len(self.ranks) * offer.bursts_ahead)
        fair = max(int(min(total, 1e15)) // (32 * len(self.ranks)), self._limits.min_chained_bytes)
        timely = int(self._timeout / 4 * self._limits.slowest_bytes_per_second)
        return max(min(parcel_bytes, staged, fair, timely) // 16 * 16, self._limits.min_parcel_bytes)

    def _compare_late(self, rank: int, offer: Offer) -> None:
        """An offer that comes after the others have been agreed on."""
        error = agreement.why_not(rank, offer, self.accepted, self.request)
        if error is not None:
            logger.warning("source %d is not used: %s", rank, error)
            with self._changed:
                self._negotiation.dropped[rank] = error

    @staticmethod
    def _continues(resume: Partial, offer: Offer, parcel_bytes: int) -> bool:
        same = resume.step == offer.step and resume.likeness == offer.likeness
        return same and resume.parcel_bytes <= parcel_bytes

    def _keep(self, accepted: Accepted, ledger: Ledger) -> None:
        """Find what may be here already: what an earlier receive has left, or all that the targets hold.

        Whether it is what the sources have, they will say.
        """
        cut, landing, resume = accepted.cut, accepted.landing, self.request.resume
        claimed: Bools = np.zeros(len(cut), dtype=bool)
        if resume is not None:
            resume.spent = True
            if resume.fingerprint == landing.fingerprint and len(resume.landed) == len(cut):
                claimed |= resume.landed & self._for_all_boxes(cut, landing.lie_once)
                self._resumed = claimed.copy()
                for number in np.flatnonzero(claimed).tolist():
                    landing.touch(range(int(cut.first[number]), int(cut.first[number] + cut.count[number])))
            else:
                logger.warning("target or sources are others than those of the receive to be resumed: all is fetched")
        if self.request.options.delta:
            landing.fill_aside()
            claimed |= self._for_all_boxes(cut, landing.held)
        if claimed.any():
            ledger.keep(np.flatnonzero(claimed))

    @staticmethod
    def _for_all_boxes(cut: Parcels, good: Bools) -> Bools:
        """For each parcel, whether all its boxes are good."""
        bad = np.concatenate([[0], np.cumsum(~good)]).astype(np.int64)
        result: Bools = bad[cut.first + cut.count] == bad[cut.first]
        return result

    # -- tasks

    def read_share(self, rank: int, nbytes: int, among: Any) -> Sequence[int]:
        """Parcels to be read from this source's memory."""
        with self._changed:
            self._check(rank)
            numbers = self.ledger.take(rank, nbytes, among)
            self._count()
            return numbers

    def done_reading(self, rank: int) -> None:
        with self._changed:
            self._readers.discard(rank)
            self._changed.notify_all()

    def next_task(self, line: Line, nbytes: float) -> Fetch | Compare | Confirm | None:
        """Wait until there is something for this source to do; None when the receive is over."""
        rank = line.peer
        while True:
            with self._changed:
                self._check(rank)
                if self._result:
                    return None
                self._check_caller()
                task = self._find_task(rank, nbytes)
                if task is not None:
                    return task
                if self._is_over() and not self._finishing:
                    self._finishing = True
                else:
                    self.progress[rank].phase = WAITING
                    self._changed.wait(SLICE_SECONDS)
                    continue
            self._finish(rank)

    def _find_task(self, rank: int, nbytes: float) -> Fetch | Compare | Confirm | None:
        held = self._held(rank)
        numbers = self.ledger.take_uncompared(rank, COMPARE_BYTES, held)
        if len(numbers):
            return Compare(numbers)
        if self._readers and not self.ledger.complete:
            # What can be read is read.
            assembled = self.accepted.assembled
            if assembled is None or held is None:
                return None
            held = held & ~assembled.covered_by(frozenset(self._readers))
        numbers = self.ledger.take(rank, nbytes, held)
        if len(numbers):
            self._confirmed.discard(rank)
            self._count()
            return Fetch(numbers)
        if self.ledger.complete and rank not in self._confirmed and self.ledger.bytes_from(rank):
            return Confirm()
        return None

    def more(self, rank: int, nbytes: float) -> range:
        """What a source that is bringing parcels may bring next."""
        with self._changed:
            if self._failure is not None or rank in self._left:
                return range(0)
            portion = self._portions.get(rank)
            numbers = self.ledger.take_run(rank, nbytes, None if portion is None else portion.numbers)
            self._count()
            return numbers

    def compared(self, rank: int, numbers: Sequence[int], same: Bools) -> None:
        """A source has said which parcels of which something is here are as it has them."""
        with self._changed:
            self.ledger.compared(rank, numbers, same)
            self.progress[rank].kept_bytes += self.ledger.bytes_of(np.asarray(numbers, dtype=np.int64)[same].tolist())
            self.report.kept_bytes = self.ledger.kept_bytes
            self._count()

    def release(self, rank: int) -> None:
        """Nothing is needed from this source."""
        with self._changed:
            self._present.discard(rank)
            self._readers.discard(rank)
            self._changed.notify_all()

    def confirmed(self, rank: int) -> None:
        with self._changed:
            self._confirmed.add(rank)
            self._changed.notify_all()

    def give_back(self, rank: int) -> None:
        """A source that was left brings nothing any more."""
        if self._ledger is not None:
            self._ledger.give_back(rank)

    # -- ends

    def lost(self, rank: int, error: BaseException) -> None:
        """A conversation has failed. What its source owes is wanted from others; what it brought stays, unless it has
        been changed meanwhile.
        """
        with self._changed:
            self._negotiation.lose(rank, error)
            self._present.discard(rank)
            self._readers.discard(rank)
            self._leavable.pop(rank, None)
            if self._ledger is not None:
                self._ledger.give_back(rank)
                if isinstance(error, SourceMutated):
                    self._ledger.disown(rank)
                self.progress[rank].bytes = self._ledger.bytes_from(rank)
                self._count()
                self._look_for_orphans(rank, error)
            self._changed.notify_all()
            # Only a source that is gone leaves a receive that is over: not a caller that wants none.
            stopped = self._failure is not None or self.caller.cause is not None or not isinstance(error, PeerError)
            over = self._is_over() and not self._finishing and not stopped
            self._finishing |= over
        if over:
            # Everything is here, and nobody else is left to notice.
            self._finish(rank)
        elif self.several and isinstance(error, PeerError):
            logger.warning("source %d is lost, the others bring what it owed: %s", rank, error)

    def _look_for_orphans(self, rank: int, error: BaseException) -> None:
        """End the receive if nobody else has what a lost source was to bring."""
        if self._accepted is None or self._accepted.assembled is None or self._failure is not None or not self.several:
            return
        here = self._accepted.assembled.covered_by(frozenset(self._present))
        if not (self.ledger.landed | here).all() and isinstance(error, TransfuseError):
            self._failure = ReceiveFailed({rank: error}, alone=True)

    def _is_over(self) -> bool:
        """Everything is here, and whoever brought it and is still here has said that it holds."""
        if self._ledger is None or self._result or not self._ledger.complete:
            return False
        owing = {rank for rank in self._present if self._ledger.bytes_from(rank)}
        return owing <= self._confirmed

    def _finish(self, rank: int) -> None:
        """Build the state. A source is named for what may be wrong with it."""
        try:
            with self.phase(self._lines[rank], Phase.FINISH):
                state = self._build(rank)
        except BaseException as error:
            self.fail(error)
            return
        with self._changed:
            self._result.append(state)
            self._changed.notify_all()

    def _build(self, rank: int) -> Any:
        """Build the state from what has landed, which may still be nonsense: indices of a sparse tensor are data."""
        try:
            return self.accepted.landing.finish(self.accepted.room, self.accepted.kinds)
        except TransfuseError:
            raise
        except Exception as error:
            raise ProtocolError(rank, f"rank {rank} sent data that cannot be built: {error}") from error

    def fail(self, error: BaseException) -> None:
        """The receive ends for a reason that no other source would mend."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def result(self) -> list[Any]:
        """The state, once it is there."""
        return self._result

    def _check(self, rank: int) -> None:
        """Raise what ends the receive, or this source's part in it."""
        for cause in (self._negotiation.dropped.get(rank), self._failure, self._left.get(rank)):
            if cause is not None:
                raise cause

    def _check_caller(self) -> None:
        if self.caller.cause is not None:
            raise self.caller.cause

    # -- sources that are silent

    def may_leave(self, line: Line, how: Callable[[], object] | None) -> None:
        """How this source could be left: nothing that it may still write is anything but staging. None: it cannot."""
        with self._changed:
            # Without tags what is left behind would be in the way of the next transfer.
            if how is not None and line.group.tagged and not line.group.serial:
                self._leavable[line.peer] = how
            else:
                self._leavable.pop(line.peer, None)

    def left(self, rank: int) -> BaseException | None:
        """Why this source was left, if it was. It gets no task any more."""
        with self._changed:
            return self._left.get(rank)

    def watch(self) -> None:
        """Called by the calling thread from time to time: leave sources that are silent while others are not."""
        now = time.monotonic()
        leaving: list[tuple[int, Callable[[], object]]] = []
        with self._changed:
            over = bool(self._result)
            done = self._ledger is not None and self._ledger.complete
            for rank, leave in self._leavable.items():
                line = self._lines[rank]
                silent = 0.0 if line.waiting_since is None else now - max(line.waiting_since, line.heard_at)
                needed = not done and not self._others_can(rank)
                # One that is needed gets nearly all the time there is, but the others are still told why it ends.
                most = self._timeout * (0.9 if needed else 0.5) if len(self._lines) > 1 or not needed else float("inf")
                if (over and rank in self._negotiation.awaited) or silent > most:
                    self._left[rank] = PeerTimeout(rank, line.phase, silent)
                    leaving.append((rank, leave))
        for rank, leave in leaving:
            leave()
            self.lost(rank, self._left[rank])
            self.caller.leave(rank, self._left[rank])

    def _others_can(self, rank: int) -> bool:
        """Whether the sources that are here can bring everything without this one."""
        others = self._present - {rank}
        if self._accepted is None:
            return not self._negotiation.uncovered and bool(self._negotiation.offers.keys() - {rank})
        if self._accepted.assembled is None:
            return bool(others)
        return bool((self.ledger.landed | self._accepted.assembled.covered_by(frozenset(others))).all())

    def park(self, rank: int) -> None:
        """The caller stops while this conversation is still going on."""
        line = self._lines.get(rank)
        if line is not None:
            line.park()

    def close(self) -> None:
        """Nothing lands any more: tell autograd what has."""
        if self._accepted is not None:
            self._accepted.landing.bump_versions()

    # -- accounts

    def _count(self) -> None:
        """Say in each source's progress what it is to bring; what nobody owes yet stands with the first."""
        if self._ledger is None:
            return
        total = self.accepted.cut.total_bytes - self.report.kept_bytes
        for rank in self.ranks[1:]:
            self.progress[rank].total_bytes = self._ledger.bytes_with(rank)
        rest = sum(self.progress[rank].total_bytes or 0 for rank in self.ranks[1:])
        self.progress[self.ranks[0]].total_bytes = total - rest

    def account_for(self, error: BaseException) -> None:
        """Say in an error what has become of the receive."""
        if self._accepted is None or self._ledger is None:
            resume = self.request.resume
            if resume is not None and isinstance(error, TransfuseError):
                error.partial, error.torn = resume, resume.torn  # It was not even looked at.
            return
        accepted, ledger = self._accepted, self._ledger
        self.report.torn = accepted.landing.torn()
        if not isinstance(error, TransfuseError):
            if self.report.torn:
                error.add_note(f"torn target leaves: {', '.join(self.report.torn[:100])}")
            return
        landed = ledger.landed
        error.torn = self.report.torn
        # What an earlier receive had left, and nobody has looked at, is still left.
        landed |= ledger.uncompared & self._resumed
        error.received, error.missing = accepted.landing.account(landed)
        if landed.any() and accepted.landing.stays:
            error.partial = Partial(
                accepted.offer.step,
                accepted.offer.likeness,
                accepted.parcel_bytes,
                accepted.landing.fingerprint,
                landed,
                accepted.cut.payload,
                accepted.landing.fresh,
                self.report.torn,
            )
