"""Restore a job's state from what all reachable keepers hold. All ranks decide together, and none is touched alone.

every rank        what its keeper holds                              gathered: all ranks choose the same step
one of each host  addresses at which other hosts can fetch it        gathered, if somebody needs them
every rank        plans, checks its targets; from other hosts it     asked before a target is touched: if one rank
                  also receives, aside                               cannot, all go to the next older step
every rank        lands                                              gathered: the same result, or the same error
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from transfuse._errors import NotCovered, StateError, TargetMismatch, TransfuseError, as_utf8
from transfuse._job.face import attribute_before
from transfuse._job.receipt import Receipt
from transfuse._job.state import State
from transfuse._keeper import frames
from transfuse._keeper.bundle_table import PLAIN
from transfuse._keeper.frames import Held, KeeperLink
from transfuse._keeper.restored import (
    Compared,
    RestoredState,
    damage,
    describe_slots,
    differing_leaves,
    suspects,
)
from transfuse._keeper.saved_steps import silent
from transfuse._keeper.settings import KeepSettings
from transfuse._keeper.slot_file import Label, SlotView
from transfuse._keeper.storage import file_name, folder_of
from transfuse._metrics import names
from transfuse._plan.holdings import Holdings, Whole
from transfuse._remote.client import FetchSettings, fetch_if
from transfuse._remote.in_process import InProcess
from transfuse._report import Report
from transfuse._state.leaves.layout import Box, numel_of_all
from transfuse._state.manifest import Described
from transfuse._tls import TLS
from transfuse._wire.roll_call import Agreement, Failure

logger = logging.getLogger("transfuse")

LOOPBACK = "127.0.0.1"
#: The most characters of a reason, and the most reasons, in an error.
MOST, MOST_REASONS = 2000, 5


class Members(NamedTuple):
    """The ranks of the job, by host."""

    agreement: Agreement
    ranks: list[list[int]]
    #: This host's number.
    host: int
    token: str
    #: This host's address, for the others.
    address: str
    #: How all that goes between hosts is encrypted.
    tls: TLS | None = None

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.ranks) if rank in ranks)

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for its host."""
        return self.agreement.rank == self.ranks[self.host][0]


class Access(NamedTuple):
    """How a rank reaches the keeper of its host, and the other ranks."""

    members: Members
    #: None: the keeper is lost.
    link: KeeperLink | None
    asking: threading.RLock
    seconds: float
    settings: KeepSettings

    def ask(self, question: Any, expected: Any, seconds: float | None = None) -> tuple[Any, list[int]]:
        if self.link is None:
            raise TransfuseError("the keeper of this host is lost")
        with self.asking:
            return self.link.ask_for_files(question, expected, self.seconds if seconds is None else seconds)


@dataclass(frozen=True, kw_only=True)
class RestoreRequest:
    """What the caller wants restored."""

    state: State
    #: Takes what belonged to this rank alone.
    load_rank_state: Callable[[Any], object] | None
    missing_ok: bool
    #: How a corrected program comes to the same keepers.
    again: str = ""


class KeptStep(NamedTuple):
    """A step that the keepers hold."""

    step: int
    #: By rank of the job that committed it: its ``rank_state``. In a job of as many ranks, only this rank's.
    rank_states: Mapping[int, Any]
    #: How many ranks have committed it.
    ranks: int
    #: Of the transfer that has restored it.
    report: Report | None = None
    #: From where this rank has got it, as the metrics name it.
    source: str = ""
    #: Where it was, if not only in memory; and how many steps after it are known to be lost.
    came_from: str = ""
    lost: int = 0

    @property
    def own(self) -> NoReturn:
        raise attribute_before(self, "own", "rank_states")


class HostHolding(msgspec.Struct, array_like=True):
    """What a host's keeper holds, as its first rank tells the others."""

    states: list[Held]
    has_held: bool
    failure: str
    #: As in ``frames.HeldStates``.
    past: str = ""
    notes: str = ""
    storage: str = ""
    trouble: str = ""
    newest: int = -1


@dataclass(eq=False)
class Candidate:
    """A step that may be restored: who holds which rank's state of it."""

    label: Label
    world_size: int
    #: By rank of the job before: the hosts whose keepers hold its state whole, in memory, or else on storage.
    holders: dict[int, list[int]] = field(default_factory=dict)
    #: The ranks whose states only storage has, and where that is.
    saved: set[int] = field(default_factory=set)
    storage: str = ""

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.holders]

    @property
    def is_all_saved(self) -> bool:
        """Whether nothing of it is in memory."""
        return self.saved == set(self.holders)

    @property
    def came_from(self) -> str:
        """Where its bytes are, if not only in memory."""
        if not self.saved:
            return ""
        return f"storage {self.storage}" if self.is_all_saved else f"memory and storage {self.storage}"


class Forbidden(TransfuseError):
    """Some rank cannot restore this step. No rank has been touched."""

    def __init__(self, why: str, kinds: Iterable[str] = ()) -> None:
        super().__init__(why)
        #: The classes of the ranks' errors.
        self.kinds = frozenset(kinds)

    @property
    def why(self) -> str:
        """The reasons alone: nothing was received that could be of use."""
        return str(self.args[0])


class Unfit(Forbidden):
    """The step is whole, and does not fit this job: what a rank's ``state_dict`` returns, or the number of ranks."""


def restore(access: Access, request: RestoreRequest) -> KeptStep | None:
    """Restore the newest step that can be restored on all ranks; None if there never was one."""
    members, agreement, holdings = access.members, access.members.agreement, gather_holdings(access)
    candidates = candidates_in(members, holdings)
    # A step that some ranks have never committed is no loss: nobody was told that it is kept.
    has_held = any(one.has_held for one in holdings) or any(not candidate.missing for candidate in candidates)
    reasons: list[str] = [one.failure for one in holdings if one.failure]
    reasons += [f"host {members.host_of(rank)}: {one.trouble}" for rank, one in enumerate(holdings) if one.trouble]
    if reasons and not has_held and not request.missing_ok:
        raise StateError(
            f"{not_known(reasons, access.seconds)}\nStart the job again, load a checkpoint, or begin anew with "
            "restore(missing_ok=True). Nothing was touched"
        )
    if not has_held:
        # Only steps that some ranks have never committed. Nothing is called that could touch the state.
        candidates = []
    steps: dict[str, list[int]] = {}
    is_unfit, is_mismatch = False, not reasons
    for candidate in candidates:
        try:
            restored = _attempt(access, request, candidate)
            mine = holdings[agreement.rank]
            if mine.notes:
                logger.warning("rank %d has restored step %d: %s", agreement.rank, restored.step, mine.notes)
            if mine.trouble:
                logger.warning("rank %d has restored step %d: %s", agreement.rank, restored.step, mine.trouble)
            steps |= _torn(members, holdings, candidate.label)
            if steps:
                lines = _lines([f"{_numbered('step', numbers)}: {why}" for why, numbers in steps.items()])
                logger.warning("step %d is restored: newer ones cannot be restored:%s", restored.step, lines)
            return restored._replace(came_from=candidate.came_from, lost=_lost_since(candidate, holdings))
        except Forbidden as error:
            is_unfit = is_unfit or isinstance(error, Unfit)
            is_mismatch = is_mismatch and TargetMismatch.__name__ in error.kinds
            steps.setdefault(error.why, []).append(candidate.label.step)
    reasons += [f"step {numbers[0]}: {why}" for why, numbers in _torn(members, holdings).items()]
    reasons += [f"{_numbered('step', numbers)}: {why}" for why, numbers in steps.items()]
    if not has_held or request.missing_ok:
        return None
    if steps and is_mismatch:
        raise TargetMismatch(
            reasons,
            intro="this run has kept steps, and none of them fits what state_dict() returns now",
            advice="What you can do: start the job with the model and the optimizer that were kept, or do what is said "
            f"above, and start it again: the kept steps are whole{request.again}",
        )
    reasons += [f"host {members.host_of(rank)}: {one.past}" for rank, one in enumerate(holdings) if one.past]
    lines = _lines(reasons or ["no keeper holds a step any more"])
    answered = len(members.ranks) - sum(bool(one.failure) for one in holdings)
    hosts = "" if answered == len(members.ranks) else "start the missing hosts again, "
    anew = "begin anew with restore(missing_ok=True), or give a new training another name (run=)"
    cure = f"{hosts}load a checkpoint, {anew}"
    if is_unfit:
        cure = f"{hosts}correct the program as said above, and start it again: the kept steps are whole{request.again}"
    raise StateError(
        f"this run has kept steps, and none of them can be restored now ({answered} of {len(members.ranks)} hosts "
        f"answered, within {access.seconds:g} s):{lines}\nNothing was touched. What you can do: {cure}"
    )


def _torn(members: Members, holdings: Sequence[HostHolding], since: Label | None = None) -> dict[str, list[int]]:
    """The steps on storage that are newer, and of which files are missing on all hosts: what to say, and which."""
    whole: dict[Label, set[int]] = {}
    known: dict[Label, tuple[int, str]] = {}
    for ranks in members.ranks:
        one = holdings[ranks[0]]
        for held in one.states:
            label = Label(held.generation, held.step)
            if held.saved and (since is None or label > since):
                known[label] = held.world_size, one.storage
            if held.whole:
                whole.setdefault(label, set()).add(held.rank)
    found: dict[str, list[int]] = {}
    for label, (count, where) in sorted(known.items(), reverse=True):
        missing = [file_name(rank) for rank in range(count) if rank not in whole.get(label, ())]
        if missing:
            names = f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}"
            found[f"{where}/{folder_of(label)}: {names} cannot be read, or has another size than in the record"] = [
                label.step
            ]
    return found


def _lost_since(candidate: Candidate, holdings: Sequence[HostHolding]) -> int:
    """How many steps after one that was saved are known to be lost."""
    if not candidate.saved:
        return 0
    label = candidate.label
    steps = [held.step for one in holdings for held in one.states if held.generation >= label.generation]
    return max(0, max([one.newest for one in holdings] + steps) - label.step)


def look(access: Access) -> KeptStep | None:
    """The newest step that is whole, and what belonged to the ranks. No state is touched."""
    request = RestoreRequest(state=State({}), load_rank_state=None, missing_ok=True)
    for candidate in candidates_in(access.members, gather_holdings(access)):
        if candidate.missing:
            continue
        with ExitStack() as stack, suppress(Forbidden):
            return Attempt(access, request, candidate, stack).look()
    return None


def not_known(reasons: Sequence[str], seconds: float) -> str:
    """What to say if keepers or storage do not answer, and the others know of no step: those may have held some."""
    lines, who = _lines(reasons), "a keeper, or the storage,"
    return f"it is not known whether this run has kept steps: {who} has not answered within {seconds:g} s:{lines}"


def _lines(reasons: Sequence[str]) -> str:
    shown = [reason if len(reason) <= MOST else f"{reason[:MOST]} …" for reason in reasons[:MOST_REASONS]]
    if len(reasons) > MOST_REASONS:
        shown.append(f"… and {len(reasons) - MOST_REASONS} more")
    return "".join(f"\n  {reason}" for reason in shown)


def _numbered(what: str, numbers: Sequence[int]) -> str:
    """For example "rank 0", "steps 3, 2, 1"."""
    return f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _of_ranks(failures: Mapping[int, Failure]) -> str:
    """What has gone wrong on which ranks, each reason once."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        ranks.setdefault(failure.text, []).append(rank)
    return "; ".join(f"{_numbered('rank', some)}: {why}" for why, some in ranks.items())


def _attempt(access: Access, request: RestoreRequest, candidate: Candidate) -> KeptStep:
    with ExitStack() as stack:
        attempt = Attempt(access, request, candidate, stack)
        try:
            return attempt.run()
        except Forbidden as error:
            # As many ranks as before, but other shards. All ranks have heard the same reasons.
            if not attempt.same or not error.kinds & {NotCovered.__name__, TargetMismatch.__name__}:
                raise
            alone = error
    with ExitStack() as stack:
        attempt = Attempt(access, request, candidate, stack)
        attempt.same = False
        try:
            return attempt.run()
        except Forbidden as error:
            if error.why == alone.why:
                raise alone from error
            kind = Unfit if isinstance(alone, Unfit) else Forbidden
            why = f"{alone.why}\n  If other shards are wanted, from all ranks together: {error.why}"
            raise kind(why, alone.kinds | error.kinds) from error


def gather_holdings(access: Access) -> list[HostHolding]:
    """By rank: what the keeper of its host holds. Every rank calls this."""
    members, holding = access.members, HostHolding([], False, "")
    if members.speaks:
        try:
            # The other ranks wait for this one as long as the timeout: it has to know before.
            answer, _ = access.ask(frames.Inventory(), frames.HeldStates, access.seconds / 2)
            more = answer.past, answer.notes, answer.storage, answer.trouble, answer.newest
            holding = HostHolding(answer.states, answer.has_held, "", *more)
        except TransfuseError as error:
            holding.failure = f"host {members.host}: {as_utf8(str(error))}"
    rows = members.agreement.gather(msgspec.msgpack.encode(holding), "gathering what the keepers hold")
    return [msgspec.msgpack.decode(row, type=HostHolding) for row in rows]


def candidates_in(members: Members, holdings: Sequence[HostHolding]) -> list[Candidate]:
    """The steps to try, best first: whole ones before those of which ranks are missing, newest first.

    But before one that needs storage come newer ones that memory alone may cover.
    """
    found: dict[Label, Candidate] = {}
    records: dict[Label, str] = {}
    # Memory comes first, rank by rank.
    for is_saved in (False, True):
        for host, ranks in enumerate(members.ranks):
            for held in holdings[ranks[0]].states:
                label = Label(held.generation, held.step)
                candidate = found.setdefault(label, Candidate(label, held.world_size))
                if not held.whole or held.saved != is_saved:
                    continue
                if is_saved and held.record != records.setdefault(label, held.record):
                    continue  # Of another save, which has not come to its end on all hosts.
                if is_saved and held.rank not in candidate.holders:
                    candidate.saved.add(held.rank)
                    candidate.storage = holdings[ranks[0]].storage
                if not is_saved or held.rank in candidate.saved:
                    candidate.holders.setdefault(held.rank, []).append(host)
    usable = [candidate for candidate in found.values() if candidate.holders]
    best = max((one.label for one in usable if not one.missing), default=None)
    needs_storage = best is not None and bool(found[best].saved)

    def comes_first(one: Candidate) -> bool:
        in_memory = len(one.saved) < len(one.holders)
        return not one.missing or (needs_storage and best is not None and one.label > best and in_memory)

    return sorted(usable, key=lambda one: (comes_first(one), one.label), reverse=True)


class Attempt:
    """Restore one step, or raise :class:`Forbidden` on all ranks."""

    def __init__(self, access: Access, request: RestoreRequest, candidate: Candidate, stack: ExitStack) -> None:
        self._access, self._members, self._agreement = access, access.members, access.members.agreement
        self._request, self._candidate, self._stack = request, candidate, stack
        self._options = access.settings.options
        #: Whether every rank gets the state of the rank of the same number.
        self.same = candidate.world_size == self._agreement.size and not candidate.missing
        self._voted = False
        self._state: Any = None
        self._receipt: Receipt | None = None
        self._report: Report | None = None

    def look(self) -> KeptStep:
        """Only what belonged to the ranks."""
        return KeptStep(self._candidate.label.step, self._begin()[2], self._candidate.world_size)

    def _begin(self) -> tuple[list[int], dict[int, RestoredState], dict[int, Any], dict[int, frames.Address]]:
        """Whose states this rank needs, those of them that are here, what belonged to ranks, who serves the others."""
        sources = [self._agreement.rank] if self.same else sorted(self._candidate.holders)
        local = [rank for rank in sources if self._members.host in self._candidate.holders[rank]]
        failure: Failure | None = None
        restored: dict[int, RestoredState] = {}
        own: dict[int, Any] = {}
        try:
            restored = self.open(local)
            own = self._own(restored)
        except Exception as reason:
            # Whatever it is, descriptors or memory perhaps: the other ranks wait for a word.
            failure = Failure.of(reason, str(reason) if isinstance(reason, TransfuseError) else None)
        elsewhere = self.serve(failure)
        self._own_elsewhere(own, [elsewhere[rank] for rank in sources if rank not in local and rank in elsewhere])
        return sources, restored, own, elsewhere

    def run(self) -> KeptStep:
        sources, restored, own, elsewhere = self._begin()
        local = list(restored)
        if not self.same:
            self._compare(restored)
        self._check_sources(elsewhere)
        here = [self._stack.enter_context(self._serve_here(restored[rank])) for rank in local]
        remote = [elsewhere[rank].address for rank in sources if rank not in local and rank in elsewhere]
        error = self._land([*here, *remote], atomic=bool(remote))
        if error is None:
            with self._agreement.quiet():
                error = self._load(own)
        self._agree(error)
        if self._members.speaks:
            # Hosts that were replaced get replicas of it at once.
            with suppress(TransfuseError):
                self._access.ask(frames.Restored(*self._candidate.label), frames.Ack)
        source = names.MIXED if here and remote else names.LOCAL if here else names.REMOTE
        if self._candidate.saved:
            source = names.STORAGE if self._candidate.is_all_saved else names.MEMORY_AND_STORAGE
        return KeptStep(self._candidate.label.step, own, self._candidate.world_size, self._report, source)

    def open(self, ranks: Sequence[int]) -> dict[int, RestoredState]:
        """Map the states of these ranks, which this host's keeper holds."""
        if not ranks:
            return {}
        self._stack.callback(self._release)
        mapped, descriptors = self._await_mapped(ranks)
        try:
            views = [SlotView(fd, writable=False) for fd in descriptors]
        finally:
            for fd in descriptors:
                os.close(fd)
        slots = dict(zip(mapped.ranks, views[: len(mapped.ranks)], strict=True))
        files = dict(zip(mapped.saved, views[len(mapped.ranks) :], strict=True))
        restored = {rank: describe_slots(rank, files if rank in mapped.from_files else slots) for rank in ranks}
        # The other ranks of this host have opened the same, or each its own.
        here = self._members.ranks[self._members.host]
        part = (0, 1) if self.same else (here.index(self._agreement.rank), len(here))
        wrong = damage([restored[rank] for rank in mapped.from_files], mapped.folder, part)
        if wrong:
            raise TransfuseError(wrong)
        if self._options.get("verify"):
            for rank, one in restored.items():
                damaged = one.damaged()
                if damaged:
                    raise TransfuseError(
                        f"the kept state of rank {rank} is damaged: {len(damaged)} leaves differ from their digests: "
                        f"{', '.join(damaged[:10])}"
                    )
        return restored

    def _await_mapped(self, ranks: Sequence[int]) -> tuple[frames.Mapped, list[int]]:
        """Ask until the files on storage are open."""
        question, done, heard_at = frames.Open(*self._candidate.label, list(ranks)), -1, time.monotonic()
        while True:
            mapped, descriptors = self._access.ask(question, frames.Mapped | frames.Opening)
            if isinstance(mapped, frames.Mapped):
                return mapped, descriptors
            if mapped.done != done:
                done, heard_at = mapped.done, time.monotonic()
            if time.monotonic() - heard_at > self._access.seconds:
                raise silent(self._candidate.storage, self._access.seconds)

    def _release(self) -> None:
        with suppress(TransfuseError):
            self._access.ask(frames.Ack(), frames.Ack)

    def serve(self, failure: Failure | None) -> dict[int, frames.Address]:
        """Have what other hosts need served by this host's keeper. Returns the addresses of all, by rank."""
        members, candidate = self._members, self._candidate
        if len(members.ranks) == 1 or self._all_local():
            self.agree_to("opening the kept states", failure)
            return {}
        addresses: list[frames.Address] = []
        if members.speaks and not failure:
            try:
                everywhere = len(members.ranks)
                saved = [
                    rank
                    for rank in sorted(candidate.saved)
                    if members.host in candidate.holders[rank] and len(candidate.holders[rank]) < everywhere
                ]
                question = frames.Serve(*candidate.label, members.address, members.token, saved)
                self._stack.callback(self._release)
                addresses = self._access.ask(question, frames.Serving)[0].addresses
            except TransfuseError as error:
                failure = Failure.of(error, str(error))
        rows = self.agree_to("opening the kept states", failure, msgspec.msgpack.encode(addresses))
        found: dict[int, frames.Address] = {}
        for row in rows:
            for one in msgspec.msgpack.decode(row, type=list[frames.Address]):
                found.setdefault(one.rank, one)
        return found

    def _check_sources(self, elsewhere: Mapping[int, frames.Address]) -> None:
        """If every rank gets its own: refuse, on all ranks, if some rank's state is neither on its host nor served."""
        hosts = enumerate(self._members.ranks) if self.same else ()
        nowhere = [
            rank
            for host, ranks in hosts
            for rank in ranks
            if host not in self._candidate.holders[rank] and rank not in elsewhere
        ]
        if nowhere:
            raise Forbidden(f"no keeper that holds the state of ranks {nowhere} can be reached")

    def _all_local(self) -> bool:
        """Whether every rank finds its own state on its own host."""
        if not self.same:
            return False
        return all(
            host in self._candidate.holders[rank] for host, ranks in enumerate(self._members.ranks) for rank in ranks
        )

    def agree_to(self, what: str, failure: Failure | None, data: bytes = b"") -> list[bytes]:
        """Gather data; raise on all ranks if one has failed."""
        rows = self._agreement.gather(msgspec.msgpack.encode([failure, data]), what)
        decoded = [msgspec.msgpack.decode(row, type=tuple[Failure | None, bytes]) for row in rows]
        failures = {rank: failure for rank, (failure, _) in enumerate(decoded) if failure is not None}
        if failures:
            raise Forbidden(_of_ranks(failures), (failure.kind for failure in failures.values()))
        return [row for _, row in decoded]

    def _compare(self, restored: Mapping[int, RestoredState]) -> None:
        """With another number of ranks: leaves in which the ranks differed cannot be given to anybody."""
        mine = restored if self._members.speaks else {}
        lost = self._find_lost(mine)
        self.agree_to("looking for what is lost", Failure(text=lost) if lost else None)
        if self._candidate.missing:
            self._check_coverage(mine)
        rows = self.agree_to(
            "comparing the kept states", None, msgspec.msgpack.encode([one.compared() for one in mine.values()])
        )
        states = [state for row in rows for state in msgspec.msgpack.decode(row, type=list[Compared])]
        doubtful = suspects(states)
        if not doubtful:
            return
        details = [one.leaf_digests(doubtful) for one in mine.values()]
        rows = self.agree_to("comparing the kept leaves", None, msgspec.msgpack.encode(details))
        differing = differing_leaves(
            leaf for row in rows for leaf in msgspec.msgpack.decode(row, type=list[dict[str, bytes]])
        )
        if differing:
            count, now = self._candidate.world_size, self._agreement.size
            kind = Forbidden if self._candidate.missing else Unfit
            raise kind(
                f"{len(differing)} leaves differed between the {count} ranks that committed them: "
                f"{', '.join(differing[:10])}{', …' if len(differing) > 10 else ''}. Nobody can say whose the "
                f"{now} ranks of now should get: {'' if count == now else f'start {count} ranks, or '}"
                "commit them with rank_state=, and choose from keep.rank_states"
            )

    def _find_lost(self, restored: Mapping[int, RestoredState]) -> str:
        """If ranks are missing, name the leaves of which every rank may have had values of its own."""
        if not self._candidate.missing:
            return ""
        if self._candidate.world_size == self._agreement.size and any(one.own is not None for one in restored.values()):
            return f"what belonged to ranks {self._candidate.missing} alone (rank_state=) is lost"
        for one in restored.values():
            plain = np.flatnonzero(one.bundles.modes == PLAIN)
            leaves = one.leaves_of(plain.tolist())
            if leaves:
                return (
                    f"what ranks {self._candidate.missing} had committed is not here, and may have differed in "
                    f"{len(leaves)} leaves: {', '.join(leaves[:10])}{', …' if len(leaves) > 10 else ''}. Declare with "
                    "shared= what is the same on all ranks"
                )
        return ""

    def _check_coverage(self, restored: Mapping[int, RestoredState]) -> None:
        """If ranks are missing, name the leaves whose shards only they had. Nobody's ``state_dict`` was called yet."""
        rows = self.agree_to(
            "looking for lost shards", None, msgspec.msgpack.encode([_shards(one) for one in restored.values()])
        )
        held: dict[str, tuple[int, set[Box]]] = {}
        for row in rows:
            for shards in msgspec.msgpack.decode(row, type=list[dict[str, tuple[int, list[Box]]]]):
                for path, (numel, blocks) in shards.items():
                    held.setdefault(path, (numel, set()))[1].update(blocks)
        lost = [path for path, (numel, blocks) in held.items() if numel_of_all(blocks) < numel]
        if lost:
            raise Forbidden(
                f"only ranks {self._candidate.missing}, whose state is not here, had shards of {len(lost)} leaves: "
                f"{', '.join(sorted(lost)[:10])}{', …' if len(lost) > 10 else ''}"
            )

    def _serve_here(self, restored: RestoredState) -> InProcess:
        """Serve a mapped state to this process itself: from there on it is a source like any other."""
        return self._in_process(restored.state, f"the kept state of rank {restored.rank}", self._candidate.label.step)

    def _in_process(self, state: Described, name: str, step: int | None = None) -> InProcess:
        timeout, verify = timedelta(seconds=self._access.seconds), self._options.get("verify")
        return InProcess(state, name, step=step, timeout=timeout, verify=verify)

    def _own(self, restored: Mapping[int, RestoredState]) -> dict[int, Any]:
        """What belonged to the ranks themselves, in fresh tensors."""
        found: dict[int, Any] = {}
        for rank, one in restored.items():
            if one.own is not None:
                with self._in_process(one.own, f"what belongs to rank {rank} alone") as server:
                    found[rank] = self._fetch_own(server)
        return found

    def _own_elsewhere(self, own: dict[int, Any], addresses: Sequence[frames.Address]) -> None:
        """The same for ranks whose states other hosts hold. All ranks come here, or none."""
        if len(self._members.ranks) == 1 or self._all_local():
            return
        failure: Failure | None = None
        try:
            own.update({one.rank: self._fetch_own(one.own) for one in addresses if one.own})
        except Exception as error:
            failure = Failure.of(error)
        self.agree_to("fetching what belongs to single ranks", failure)

    def _fetch_own(self, address: str | InProcess) -> Any:
        objects = self._options.get("weights_only_objects", False)
        return fetch_if(None, self._asked([address], options={"weights_only_objects": objects})).state

    def _asked(self, addresses: Sequence[str | InProcess], **more: Any) -> FetchSettings:
        members, seconds = self._members, self._access.seconds
        more["options"] = {**more.get("options", {}), "tls": members.tls or False}
        return FetchSettings(address=addresses, token=members.token, timeout=seconds, **more)

    def _land(self, addresses: Sequence[str | InProcess], *, atomic: bool) -> BaseException | None:
        """Plan, vote, and land. Returns what went wrong after the vote; raises :class:`Forbidden` if it is lost."""
        options: Any = {**self._options}
        options["atomic"] = atomic or options.get("atomic", False)
        if not atomic:
            options["verify"] = False  # Nothing leaves this process, and `_open` has compared the digests if asked to.
        try:
            if not addresses:
                raise TransfuseError("no keeper that holds this rank's state can be reached")
            with self._agreement.quiet():
                receipt = self._receipt = Receipt(self._request.state)
            if options.get("mesh") is None:
                options["mesh"] = receipt.mesh()
            step = self._candidate.label.step
            asked = self._asked(addresses, state=lambda: receipt.target, step=step, options=options)
            permit = partial(receipt.permit, options=self._options, vote=self._vote_of)
            fetched = fetch_if(permit, asked)
            self._state, self._report = fetched.state, fetched.report
        except Forbidden:
            raise
        except BaseException as error:
            if not self._voted:
                if not isinstance(error, Exception):
                    with suppress(Exception):
                        self._vote(Failure.of(error, f"interrupted by {type(error).__name__}"))
                    raise
                self._vote(Failure.of(error))
            return error
        return None

    def _vote_of(self, error: Exception | None) -> None:
        text = str(error) if isinstance(error, StateError) else None
        self._vote(None if error is None else Failure.of(error, text))

    def _vote(self, failure: Failure | None) -> None:
        self._voted = True
        try:
            self.agree_to("voting on the step", failure)
        except Forbidden as error:
            raise Unfit(error.why, error.kinds) from None

    def _load(self, own: Mapping[int, Any]) -> BaseException | None:
        """Hand over what does not land in place."""
        try:
            if self._receipt is not None:
                self._receipt.load(self._state)
            rank, load = self._agreement.rank, self._request.load_rank_state
            if load is not None and self._candidate.world_size == self._agreement.size and rank in own:
                load(own[rank])
        except Exception as error:
            return error
        return None

    def _agree(self, error: BaseException | None) -> None:
        """Tell the others how it has ended. If one has failed, all raise."""
        try:
            self.agree_to("ending the restore", None if error is None else Failure.of(error))
        except Forbidden as all_of_them:
            if error is not None:
                raise error from None
            raise StateError(
                f"step {self._candidate.label.step} was restored here, but not everywhere: {all_of_them}. End this "
                "process: the ranks are at different states"
            ) from all_of_them


def _shards(restored: RestoredState) -> dict[str, tuple[int, list[Box]]]:
    """For each sharded leaf: how many elements it has in all, and the blocks of it that this state holds."""
    manifest, found = restored.state.manifest, {}
    holdings = Holdings(manifest)
    for leaf, path in enumerate(manifest.paths):
        for number in range(holdings.count(leaf)):
            holding = holdings.of(leaf, number)
            if isinstance(holding, Whole):
                continue
            blocks = [
                Box(tuple(low for low, _ in runs), tuple(length for _, length in runs))
                for _, dims in holding.shards
                for runs in product(*dims)
            ]
            found[path] = math.prod(holding.shape), [block for block in blocks if block.numel]
    return found
