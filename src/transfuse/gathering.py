"""A gathering: one receive from all its sources, and what their conversations have in common.

Each conversation hands in its offer and hears what was agreed on; then it asks for tasks until there are none. So a
source that dies, falls silent or answers wrongly costs what it owed, which becomes the others' tasks.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from transfuse import agreement, partial, places
from transfuse.accepting import Accepted, Wishes, accept
from transfuse.errors import PeerError, PeerTimeout, ProtocolError, SourceMutated, TransfuseError
from transfuse.ledger import Ledger
from transfuse.limits import Limits
from transfuse.matching import prepare
from transfuse.messages import Offer
from transfuse.partial import Partial
from transfuse.progress import Progress
from transfuse.report import Report
from transfuse.routes.group import Line
from transfuse.talks import Caller

__all__ = ["Compare", "Confirm", "Fetch", "Gathering"]

logger = logging.getLogger("transfuse")

#: How long a conversation sleeps at most before it looks whether the caller wants to stop.
SLICE_SECONDS = 0.1


@dataclass(frozen=True)
class Fetch:
    """Bring these parcels."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class Compare:
    """Find out which of these parcels, kept from an earlier receive, the source has too."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class Confirm:
    """Ask the source whether what it brought is still what it has."""


class _Kept(enum.Enum):
    """How far parcels that were kept have been compared with a source's."""

    UNCOMPARED = 0
    COMPARING = 1
    COMPARED = 2


class Gathering:
    """What the conversations of one receive share. Every method may be called from any of their threads."""

    def __init__(
        self,
        ranks: Sequence[int],
        wishes: Wishes,
        limits: Limits,
        device: torch.device,
        timeout: float,
        caller: Caller,
        report: Report,
        *,
        one_by_one: bool = False,
    ) -> None:
        self.ranks = tuple(ranks)
        self.wishes = wishes
        self.caller = caller
        self.report = report
        self.progress = {rank: Progress() for rank in ranks}
        #: Held while parcels are read from a source's memory: one reader uses all threads.
        self.reading = threading.Lock()
        self._limits = limits
        self._device = device
        self._timeout = timeout
        self._preparing = threading.Lock()
        self._prepared = False
        self._changed = threading.Condition()
        self._lines: dict[int, Line] = {}
        #: Sources of which nothing has been heard yet, and how long they are waited for once one has been.
        self._expected = set(ranks)
        self._one_by_one = one_by_one
        self._patience = 0.0 if one_by_one else timeout / 4
        self._decide_at = float("inf")
        self._deciding = False
        self._offers: dict[int, Offer] = {}
        self._dropped: dict[int, TransfuseError] = {}
        #: Sources whose offers were looked at when it was decided.
        self._compared: set[int] = set()
        self._accepted: Accepted | None = None
        self._ledger: Ledger | None = None
        self._kept = _Kept.COMPARED
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

    def prepare(self) -> None:
        """Take the target apart, once, while the sources describe their states."""
        with self._preparing:
            if self._prepared or self.wishes.failure is not None:
                return
            self._prepared = True
            with self.report.phase("prepare"):
                try:
                    self.wishes = replace(self.wishes, target=prepare(self.wishes.target, self._limits))
                except Exception as error:
                    self.wishes = replace(self.wishes, failure=error)

    def join(self, line: Line) -> None:
        """A conversation begins."""
        with self._changed:
            self._lines[line.peer] = line
            # In flight is only a receive for its first word.
            self.may_leave(line, line.abandon if self.several else None)

    def agree(self, line: Line, offer: Offer) -> None:
        """Hand in an offer, and wait until it is known what the sources agree on. Raises unless this one does."""
        rank = line.peer
        with self._changed:
            late = self._accepted is not None
            self._offers[rank] = offer
            self._expected.discard(rank)
            self._decide_at = min(self._decide_at, time.monotonic() + self._patience)
            self._changed.notify_all()
            decides = False
            while not decides and self._accepted is None and self._failure is None and rank not in self._dropped:
                self._check_caller()
                due = not self._expected or time.monotonic() >= self._decide_at
                if due and not self._deciding:
                    decides = self._deciding = True
                else:
                    self._changed.wait(SLICE_SECONDS)
        if decides:
            self._decide()
        elif late or (self._accepted is not None and rank not in self._compared):
            self._compare_late(rank, offer)
        with self._changed:
            if rank in self._dropped:
                raise self._dropped[rank]
            self._check(rank)
            self._present.add(rank)
            if offer.memory is not None and offer.max_bytes_per_second is None and self.wishes.same_host:
                self._readers.add(rank)
            self._changed.notify_all()

    def _decide(self) -> None:
        """Choose the sources that agree, and plan. In the thread of the first conversation that finds it due."""
        try:
            with self._changed:
                offers = dict(self._offers)
            chosen = self._choose(offers)
            if not chosen:
                return
            rank = next(iter(chosen))
            parcel_bytes = min(offer.parcel_bytes for offer in chosen.values())
            wishes = self.wishes
            resume = wishes.resume
            if resume is not None and not self._continues(resume, chosen[rank], parcel_bytes):
                logger.warning("the sources offer another state than the one to be resumed: everything is fetched")
                resume = None
            accepted = accept(
                chosen[rank],
                replace(wishes, resume=resume),
                self._limits,
                rank,
                self._device,
                self._fine(chosen[rank], parcel_bytes) if resume is None else resume.parcel_bytes,
            )
            ledger = Ledger(accepted.cut.nbytes, self._changed)
            if resume is not None:
                resume.spent = True
                self._keep(resume, accepted, ledger)
        except BaseException as error:
            self.fail(error)
            return
        self.report.leaves = len(accepted.manifest)
        self.report.step = accepted.offer.step if self.wishes.step is None else self.wishes.step
        with self._changed:
            self._accepted, self._ledger = accepted, ledger
            self._count()
            self._deciding = False
            self._changed.notify_all()

    def _choose(self, offers: dict[int, Offer]) -> dict[int, Offer]:
        """The sources that agree; those that are dropped learn of it."""
        chosen, dropped = agreement.choose(self.ranks, offers, self.wishes, self._limits)
        for rank, error in dropped.items():
            if self.several:
                logger.warning("source %d is not used: %s", rank, error)
        with self._changed:
            self._dropped.update(dropped)
            self._compared.update(offers)
            if not chosen:
                self._deciding = False  # Another may still come with the right step.
            self._changed.notify_all()
        return chosen

    def _fine(self, offer: Offer, parcel_bytes: int) -> int:
        """A size of parcels that lets several sources end together, and their staging be within its bounds."""
        if not self.several:
            return parcel_bytes
        sizes = offer.manifest.storage_nbytes
        total = float(np.frombuffer(sizes[: len(sizes) // 8 * 8], dtype="<i8").astype(float).sum())
        staged = self._limits.staging_bytes // (len(self.ranks) * offer.bursts_ahead)
        fair = max(int(min(total, 1e15)) // (32 * len(self.ranks)), self._limits.min_chained_bytes)
        timely = int(self._timeout / 4 * self._limits.slowest_bytes_per_second)
        return max(min(parcel_bytes, staged, fair, timely) // 16 * 16, self._limits.min_parcel_bytes)

    def _compare_late(self, rank: int, offer: Offer) -> None:
        """An offer that comes after the others have been agreed on."""
        error = agreement.why_not(rank, offer, self.accepted, self.wishes, self._limits)
        if error is not None:
            logger.warning("source %d is not used: %s", rank, error)
            with self._changed:
                self._dropped[rank] = error

    @staticmethod
    def _continues(resume: Partial, offer: Offer, parcel_bytes: int) -> bool:
        same = resume.step == offer.step and resume.manifest == offer.manifest.of_any_device()
        return same and resume.parcel_bytes <= parcel_bytes

    def _keep(self, resume: Partial, accepted: Accepted, ledger: Ledger) -> None:
        """Find what is still there of an earlier receive: what lies in its place has the digest that it had then."""
        if (resume.apart, resume.parts) != (accepted.apart, accepted.parts) or len(resume.landed) != len(accepted.cut):
            logger.warning("the target is another than that of the receive to be resumed: everything is fetched")
            return
        numbers = [n for n in np.flatnonzero(resume.landed).tolist() if self._lies_once(accepted, n)]
        found = places.digests_of(accepted.cut, accepted.landing, numbers)
        same = found == resume.digests[numbers]
        kept = np.array(numbers, dtype=np.int64)[same]
        ledger.keep(kept.tolist(), found[same])
        for first, count in zip(accepted.cut.first[kept].tolist(), accepted.cut.count[kept].tolist(), strict=True):
            accepted.landing.touch(range(first, first + count))
        self.report.kept_bytes = ledger.bytes_of(kept.tolist())
        if len(kept):
            self._kept = _Kept.UNCOMPARED

    @staticmethod
    def _lies_once(accepted: Accepted, number: int) -> bool:
        first, count = int(accepted.cut.first[number]), int(accepted.cut.count[number])
        return all(accepted.landing.lies_once(box) for box in range(first, first + count))

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
                    self._changed.wait(SLICE_SECONDS)
                    continue
            self._finish(rank)

    def _find_task(self, rank: int, nbytes: float) -> Fetch | Compare | Confirm | None:
        if self._kept is _Kept.UNCOMPARED:
            if self._offers[rank].digests:
                return Compare(self.claim_comparing())
            others = self._present | (set() if self._one_by_one else self._expected)
            if not any(other not in self._offers or self._offers[other].digests for other in others):
                # Nobody can say whether it is still what the sources have.
                self.compared(self.ledger.kept())
        if self._readers and not self.ledger.complete:
            return None
        numbers = self.ledger.take(rank, nbytes)
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
            numbers = self.ledger.take_run(rank, nbytes)
            self._count()
            return numbers

    def claim_comparing(self) -> Sequence[int]:
        """Parcels that were kept and that nobody has compared yet: the caller will."""
        with self._changed:
            if self._kept is not _Kept.UNCOMPARED:
                return ()
            self._kept = _Kept.COMPARING
            return self.ledger.kept()

    def compared(self, differing: Sequence[int] | None) -> None:
        """A source has said which parcels that were kept differ from its own. None: it never said."""
        with self._changed:
            self._kept = _Kept.UNCOMPARED if differing is None else _Kept.COMPARED
            if differing:
                self.ledger.unkeep(differing)
                self.report.kept_bytes -= self.ledger.bytes_of(differing)
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
            self._expected.discard(rank)
            self._present.discard(rank)
            self._readers.discard(rank)
            self._leavable.pop(rank, None)
            if self._ledger is not None:
                self._ledger.give_back(rank)
                if isinstance(error, SourceMutated):
                    self._ledger.disown(rank)
                self._count()
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

    def _is_over(self) -> bool:
        """Everything is here, and whoever brought it and is still here has said that it holds."""
        if self._ledger is None or self._result or not self._ledger.complete or self._kept is not _Kept.COMPARED:
            return False
        owing = {rank for rank in self._present if self._ledger.bytes_from(rank)}
        return owing <= self._confirmed

    def _finish(self, rank: int) -> None:
        """Build the state. A source is named for what may be wrong with it."""
        try:
            with self.report.phase("finish"):
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
        for cause in (self._failure, self._left.get(rank)):
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
            done = self._ledger is not None and self._ledger.complete and self._kept is _Kept.COMPARED
            for rank, leave in self._leavable.items():
                line = self._lines[rank]
                silent = 0.0 if line.waiting_since is None else now - max(line.waiting_since, line.heard_at)
                needed = not done and not self._present - {rank}
                if (over and rank in self._expected) or (silent > self._timeout / 2 and not needed):
                    self._left[rank] = PeerTimeout(rank, line.phase, silent)
                    leaving.append((rank, leave))
        for rank, leave in leaving:
            leave()
            self.lost(rank, self._left[rank])
            self.caller.leave(rank, self._left[rank])

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
            resume = self.wishes.resume
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
        error.received, error.missing = partial.account(
            accepted.manifest, accepted.cut, landed, accepted.apart, accepted.parts
        )
        if landed.any():
            digests, known = ledger.digests
            unknown = np.flatnonzero(landed & ~known).tolist()
            digests[unknown] = places.digests_of(accepted.cut, accepted.landing, unknown)
            error.partial = Partial(
                accepted.offer.step,
                accepted.offer.manifest.of_any_device(),
                accepted.parcel_bytes,
                accepted.apart,
                accepted.parts,
                landed,
                accepted.cut.nbytes,
                digests,
                accepted.landing.fresh,
                self.report.torn,
            )
