"""Replicas: a keeper pulls the agreed step of its neighbours' slots into slots of its own, and lends its own to others.

    puller                                             lender
      | -- Lend: a step --------------------------------> |  pins the slots, and serves them while the connection lasts
      | <- Lent: an address, the headers of the slots --- |
      | <- transfuse.fetch: all bytes but the headers --- |
      | closes the connection --------------------------> |  unpins them

Slots travel as raw bytes, through :func:`transfuse.serve` and :func:`transfuse.fetch`, with digests. The header of a
slot does not: the puller writes it last, as a worker does, so a torn replica counts as nothing.

**When a pull compares first** (``delta``). Of two replicas of a rank, one holds the confirmed step, and the other an
older one, which the pull overwrites. What is equal in that one need not travel: both ends hash all bytes and compare.
Nothing is equal when all parameters are trained, most when most are frozen. On 2 busy cores (2026-11-17, torch 2.13,
loopback, 256 MiB) a pull took 0.35 s, and with ``delta`` 0.57, 0.59, 0.25 and 0.16 s where 0, 50, 90 and 100 % were
equal: to compare costs about 0.8 ms for each MiB, which is what 10 Gbit/s take to bring it; 400 Mbit/s take 21 ms. So
it depends on the state, the network and the rate limit, and is measured: a pull compares when there is an older
replica and comparing was the faster way the last time; every `TRY_AGAIN` pulls the other way is tried again. No bytes
are copied from the confirmed replica to make the older one more similar: what is frozen is equal in both.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transfuse._errors import TransfuseError
from transfuse._keeper import frames
from transfuse._keeper.door import ask, connect
from transfuse._keeper.freeing import Freeing
from transfuse._keeper.questions import Lend, Lent, LentSlot, Refill
from transfuse._keeper.slot_file import Brief, Label, SlotView, make_slots
from transfuse._keeper.slot_policy import Books, Kept
from transfuse._metrics import names
from transfuse._metrics.samples import Samples
from transfuse._progress import Progress
from transfuse._sizes import human_bytes
from transfuse._tls import TLS
from transfuse._tuning import (
    DOOR_ASK_SECONDS,
    DOOR_FIRST_PAUSE_SECONDS,
    DOOR_LONGEST_PAUSE_SECONDS,
    REPLICA_LOOK_SECONDS,
)
from transfuse._wire.handshake import ControlConnection, key_of

if TYPE_CHECKING:
    from transfuse._remote.server import Server
    from transfuse._report import Report

logger = logging.getLogger("transfuse.keeper")

#: The bytes of a slot's header.
HEAD_BYTES = 64
#: How many replicas of a rank there are: one that is confirmed, and one that is being pulled.
COPIES = 2
#: See the top of this file.
TRY_AGAIN = 8


class _PullAbandoned(TransfuseError):
    """A pull that is no longer wanted."""


class _NoRoomForReplica(TransfuseError):
    """There is not enough memory for replicas."""


class _Busy(TransfuseError):
    """Somebody reads the replicas, or an abandoned pull has not ended yet."""


class ReplicaStore:
    """The slots and replicas of this keeper, and the lock that guards them."""

    def __init__(
        self, changed: threading.Condition, books: Books, freeing: Freeing, room: Callable[[], int], counted: Samples
    ) -> None:
        #: The keeper's lock. Nobody talks to the network while holding it.
        self.changed = changed
        self.books, self.freeing, self.counted = books, freeing, counted
        self._room = room
        self._complained_of_room = False

    def pin(self, label: Label, ranks: Sequence[int]) -> dict[int, Kept]:
        """Find these ranks' slots of a step, and keep them from being overwritten until `unpin`."""
        with self.changed:
            found = {rank: self.books.find(rank, label) for rank in ranks}
            missing = [rank for rank, kept in found.items() if kept is None]
            if missing:
                raise TransfuseError(f"step {label.step} of ranks {missing} is not here")
            whole = {rank: kept for rank, kept in found.items() if kept is not None}
            for kept in whole.values():
                kept.pins += 1
            return whole

    def unpin(self, slots: Iterable[Kept]) -> None:
        with self.changed:
            for kept in slots:
                kept.pins -= 1

    def prepare(self, lent: Sequence[LentSlot], ranks: Sequence[int], copies: int = COPIES) -> dict[int, Kept]:
        """Choose the replicas to pull into, which hold nothing from now on. Allocate what is missing.

        Raises :class:`_NoRoomForReplica`.
        """
        if sorted(slot.rank for slot in lent) != sorted(ranks):
            raise TransfuseError(f"slots of ranks {sorted(slot.rank for slot in lent)} are lent, not of {ranks}")
        with self.changed:
            for slot in lent:
                self.freeing.add(self.books.free_replicas(slot.rank, slot.nbytes))
        self.freeing.settle()
        with self.changed:
            short = {slot: copies - len(self._copies(slot)) for slot in lent}
            need, room = sum(slot.nbytes * max(count, 0) for slot, count in short.items()), self._room()
        if need > room:
            raise _NoRoomForReplica(
                f"the replicas of ranks {sorted(ranks)} need {human_bytes(need)} more, and there is room for "
                f"{human_bytes(max(room, 0))} (max_bytes, or free memory)"
            )
        # To allocate takes time, so the keeper's lock is free meanwhile. Only one thread pulls in a generation.
        wanted = [slot for slot, count in short.items() for _ in range(count)]
        files = make_slots([slot.nbytes for slot in wanted])
        with self.changed:
            for slot, file in zip(wanted, files, strict=True):
                kept = Kept(slot.rank, file, slot.nbytes, 0, is_replica=True)
                self.books.replicas.setdefault(slot.rank, []).append(kept)
            chosen: dict[int, Kept] = {}
            for slot in lent:
                free = [kept for kept in self._copies(slot) if self.books.may_replace(kept)]
                if not free:
                    raise _Busy(f"both replicas of rank {slot.rank} are in use")
                chosen[slot.rank] = min(free, key=lambda kept: kept.label or Label(-1, -1))
            for kept in chosen.values():
                kept.label, kept.brief, kept.is_written = None, None, True
        return chosen

    def _copies(self, slot: LentSlot) -> list[Kept]:
        return [kept for kept in self.books.replicas.get(slot.rank, ()) if kept.nbytes == slot.nbytes]

    def complain_of_room(self, error: Exception) -> None:
        if not self._complained_of_room:
            self._complained_of_room = True
            logger.warning("no replicas on this host, steps are confirmed without them: %s", str(error))


# ---------------------------------------------------------------------------------------------------------- lending


@dataclass(eq=False)
class Loan:
    """A step that this host serves to other keepers."""

    label: Label
    server: Server
    token: str
    slots: Sequence[LentSlot]
    kept: Sequence[Kept]
    loans: Loans
    borrowers: int = 0

    def describe(self) -> Lent:
        """What to tell a puller."""
        return Lent(self.server.address, self.token, list(self.slots))

    def is_in_vain(self) -> bool:
        """Whether the step has been given up."""
        with self.loans.store.changed:
            books, label = self.loans.store.books, self.label
            if label == books.restored:
                return False
            if label.generation != books.generation or (books.confirmed is not None and books.confirmed >= label):
                return True
            return books.agreed is not None and books.agreed != label

    def give_back(self) -> None:
        """One borrower less."""
        self.loans.give_back(self)


@dataclass(eq=False)
class Loans:
    """What this host serves to other keepers: one server for each step, so that a rate limit holds for all together."""

    store: ReplicaStore
    #: The ranks of this host, and how many bytes a second it may send.
    ranks: Sequence[int]
    rate: float | None
    tls: TLS | None = None
    _open: dict[tuple[Label, tuple[int, ...]], Loan] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lend(self, label: Label, host: str, ranks: Sequence[int] = ()) -> Loan:
        """Serve these ranks' slots of a step, or this host's, until all borrowers have given it back."""
        kept = self.store.pin(label, ranks or self.ranks)
        key = label, tuple(kept)
        try:
            with self._lock:
                loan = self._open.get(key)
                if loan is None:
                    loan = self._open[key] = self._serve(label, kept, host)
                loan.borrowers += 1
                return loan
        finally:
            self.store.unpin(kept.values())

    def _serve(self, label: Label, kept: Mapping[int, Kept], host: str) -> Loan:
        from transfuse._keeper import transfers

        # Mappings of our own: they may outlive the slots.
        views = {rank: SlotView(one.file.fd, writable=False) for rank, one in kept.items()}
        token = secrets.token_hex(32)
        server = transfers.serve_slots(views, host, token, label.step, self.rate, self.tls)
        slots = [LentSlot(rank, view.nbytes, bytes(view.memory[:HEAD_BYTES])) for rank, view in views.items()]
        with self.store.changed:
            for one in kept.values():
                one.pins += 1
        return Loan(label, server, token, slots, list(kept.values()), self)

    def give_back(self, loan: Loan) -> None:
        with self._lock:
            loan.borrowers -= 1
            if loan.borrowers:
                return
            del self._open[loan.label, tuple(kept.rank for kept in loan.kept)]
        loan.server.close(cancel=True)
        self.store.unpin(loan.kept)


def _borrow(control: ControlConnection, source: int, label: Label, ranks: Sequence[int]) -> Lent:
    """Ask a host for its slots of a step."""
    lent = ask(control, Lend(label.generation, label.step, list(ranks)), 2 * DOOR_ASK_SECONDS)
    if not isinstance(lent, Lent):
        raise TransfuseError(f"host {source} answered with {type(lent).__name__}")
    return lent


# ---------------------------------------------------------------------------------------------------------- pulling


class ReplicaPuller:
    """Pulls the agreed step from these hosts, in a generation. ``wake`` it when another step may be agreed."""

    def __init__(
        self,
        store: ReplicaStore,
        peers: frames.Peers,
        sources: Sequence[int],
        *,
        stopped: threading.Event,
        on_idle: Callable[[], None],
        on_replicated: Callable[[], None],
        tls: TLS | None = None,
    ) -> None:
        self._tls = tls
        self._store, self._peers, self._sources = store, peers, sources
        self._key = key_of(peers.token)
        self._stopped, self._on_idle, self._on_replicated = stopped, on_idle, on_replicated
        self._news = threading.Event()
        self._delta_choices: dict[int, _DeltaChoice] = {}
        self._refill: tuple[Label | None, list[Refill]] = None, []
        #: The step whose replicas are here, or could not be for want of memory (``without_room``).
        self.replicated: Label | None = None
        self.without_room, self.why_without_room = False, ""
        self.last_pull: dict[str, Any] = {}

    def wake(self) -> None:
        self._news.set()

    def run(self) -> None:
        """Pull, until ``stopped``."""
        if self._sources:
            from transfuse._keeper import transfers  # noqa: F401 - now: it takes a while, and the lender needs it, too
        pause, has_complained = DOOR_FIRST_PAUSE_SECONDS, False
        while not self._stopped.is_set():
            label = self.wanted()
            if label is None or label == self.replicated:
                if label is None and self._pull_restored():
                    continue
                self._news.wait(REPLICA_LOOK_SECONDS)
                self._news.clear()
                self._on_idle()
                continue
            try:
                for source in self._sources:
                    self._pull(source, label, self._peers.ranks[source])
                self.without_room = False
            except _PullAbandoned:
                continue
            except _Busy:
                self._stopped.wait(DOOR_FIRST_PAUSE_SECONDS)
                continue
            except _NoRoomForReplica as error:
                if not self.without_room:
                    self.without_room, self.why_without_room = True, str(error)
                self._store.complain_of_room(error)
            except Exception as error:
                if self._stopped.is_set() or self.wanted() != label:
                    continue
                self._store.counted.add(names.PULLS, outcome=names.FAILED)
                if not has_complained:
                    logger.warning("replicas of step %d could not be pulled; trying again: %s", label.step, str(error))
                has_complained = True
                self._stopped.wait(pause)
                pause = min(2 * pause, DOOR_LONGEST_PAUSE_SECONDS)
                continue
            self.replicated, pause, has_complained = label, DOOR_FIRST_PAUSE_SECONDS, False
            self._on_replicated()

    def wanted(self) -> Label | None:
        """The step to pull."""
        with self._store.changed:
            books = self._store.books
            return books.agreed if books.generation == self._peers.generation else None

    def refill(self, label: Label | None, orders: Sequence[Refill]) -> None:
        """What the leader wants pulled of the step that was restored."""
        self._refill = label, list(orders)

    def _pull_restored(self) -> bool:
        """Pull what this host lacks of the step that was restored. Returns whether that was possible."""
        label, orders = self._refill
        if label is None or not orders:
            return False
        self._refill = None, []
        try:
            for order in orders:
                with self._store.changed:
                    # The leader may not have heard yet what has been pulled since it last asked.
                    lacking = [rank for rank in order.ranks if self._store.books.find(rank, label) is None]
                if lacking:
                    self._pull(order.source, label, lacking, copies=1)
                with self._store.changed:
                    for rank in set(order.ranks) & set(self._peers.ranks[self._peers.index]):
                        self._store.books.adopt(rank, label)
        except Exception as error:
            # The leader says it again, if it is still so.
            logger.info("what was restored, step %d, could not be replicated: %s", label.step, error)
            return False
        return True

    def _is_wanted(self, label: Label) -> bool:
        wanted = self.wanted()
        return wanted == label or (wanted is None and label == self._store.books.restored)

    def _pull(self, source: int, label: Label, ranks: Sequence[int], copies: int = COPIES) -> None:
        """Pull these ranks' slots of a step from a host."""
        store = self._store
        with store.changed:
            if all(any(kept.label == label for kept in store.books.replicas.get(rank, ())) for rank in ranks):
                return
        started = time.monotonic()
        control = connect(self._peers.keepers[source], self._key, DOOR_ASK_SECONDS, source, self._tls)
        try:
            lent = _borrow(control, source, label, ranks)
            chosen = store.prepare(lent.slots, ranks, copies)
            try:
                report = self._fetch(source, lent, chosen, label)
            finally:
                with store.changed:
                    for kept in chosen.values():
                        kept.is_written = False
        finally:
            control.close()
        seconds = time.monotonic() - started
        self.last_pull = {
            "host": source,
            "step": label.step,
            "bytes": report.bytes,
            "kept_bytes": report.kept_bytes,
            "seconds": round(seconds, 3),
        }
        store.counted.add(names.PULLS, outcome=names.COMPLETE)
        store.counted.observe(names.PULL_TIMES, seconds)
        store.counted.add(names.PULLED, report.bytes)

    def _fetch(self, source: int, lent: Lent, chosen: Mapping[int, Kept], label: Label) -> Report:
        from transfuse._keeper import transfers

        views = {rank: SlotView(kept.file.fd, writable=True) for rank, kept in chosen.items()}
        # An older replica ends here: its header goes first, and the new one comes last.
        is_old = all(view.contents() is not None for view in views.values())
        for view in views.values():
            view.memory[:HEAD_BYTES] = bytes(HEAD_BYTES)
        choice = self._delta_choices.setdefault(source, _DeltaChoice())

        def look(_: Mapping[int, Progress]) -> None:
            if self._stopped.is_set() or not self._is_wanted(label):
                raise _PullAbandoned(f"step {label.step} is no longer wanted")

        compares = is_old and choice.compares()
        report = transfers.fetch_slots(
            lent.address,
            views,
            token=lent.token,
            step=label.step,
            rate=self._peers.rate,
            compares=compares,
            tls=self._tls,
            look=look,
        )
        choice.learn(report, compares)
        self._count(lent.slots, views, chosen, label)
        return report

    def _count(
        self, lent: Sequence[LentSlot], views: Mapping[int, SlotView], chosen: Mapping[int, Kept], label: Label
    ) -> None:
        """Write the headers: from now on the replicas count."""
        briefs: dict[int, Brief] = {}
        for slot in lent:
            view = views[slot.rank]
            view.memory[:HEAD_BYTES] = slot.head
            contents, brief = view.contents(), None
            with suppress(ValueError):
                brief = view.brief()
            if contents is None or brief is None or contents.label != label or brief.rank != slot.rank:
                view.memory[:HEAD_BYTES] = bytes(HEAD_BYTES)
                raise TransfuseError(f"what was pulled as step {label.step} of rank {slot.rank} is something else")
            briefs[slot.rank] = brief
        with self._store.changed:
            for rank, kept in chosen.items():
                kept.label, kept.brief, kept.is_written = label, briefs[rank], False
            self._store.changed.notify_all()


@dataclass
class _DeltaChoice:
    """Whether to compare with an older replica before pulling: whichever way was faster, for each byte of the slots."""

    #: Seconds for each byte: pulled at once, and compared first.
    _plain: float | None = None
    _compared: float | None = None
    _pulls: int = 0

    def compares(self) -> bool:
        self._pulls += 1
        if self._plain is None or self._compared is None:
            return self._compared is None
        return (self._compared < self._plain) != (self._pulls % TRY_AGAIN == 0)

    def learn(self, report: Report, compared: bool) -> None:
        cost = report.seconds / max(report.bytes + report.kept_bytes, 1)
        if compared:
            self._compared = cost
        else:
            self._plain = cost
