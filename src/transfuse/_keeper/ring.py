"""The ring: the keepers of a job's hosts agree on a step, and each pulls its neighbours' slots of that step.

    follower                                          leader: the keeper of the first host
      | <- Round: confirmed, agreed, floor, over ------ |  every 0.2 s, and at once when something was decided
      | -- HostState: what is complete, replicated … -> |

The leader tells everybody its decisions (:mod:`transfuse._keeper.decisions`) with every round, so nothing is lost when
a message or a keeper is. Host i pulls the agreed step from hosts i-1 … i-replicas (:mod:`transfuse._keeper.replicas`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from transfuse._errors import TransfuseError
from transfuse._keeper import files, frames, overview
from transfuse._keeper.decisions import Decisions
from transfuse._keeper.door import Door, Peer
from transfuse._keeper.questions import Answer, HostState, Lend, Lent, Look, Looked, Question, Round, SaveQuestion
from transfuse._keeper.replicas import Loan, Loans, ReplicaPuller, ReplicaStore
from transfuse._keeper.slot_file import Label
from transfuse._keeper.slot_policy import ranks_and_have
from transfuse._tuning import (
    DRAIN_RING_SECONDS,
    RING_CLOSE_SECONDS,
    RING_IDLE_SECONDS,
    RING_OVER_SECONDS,
    RING_ROUND_SECONDS,
    RING_SILENCE_SECONDS,
)
from transfuse._wire.handshake import key_of

if TYPE_CHECKING:
    from transfuse._keeper.process import Keeper
    from transfuse._keeper.save_leader import SaveVisit

logger = logging.getLogger("transfuse.keeper")

#: The most steps that a keeper lists. It holds only a few slots.
MAX_LABELS = 64


class Ring:
    """A keeper's part in the ring. ``join`` links it to the other keepers, for one generation."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        #: How it talks to the keepers of other hosts.
        self.tls = keeper.tls
        self.store = ReplicaStore(keeper.changed, keeper.books, keeper.freeing, keeper.room, keeper.counted)
        #: Guards the fields below. The keeper's lock may be held when this one is taken, never the other way round.
        self._lock = threading.Lock()
        self._door: Door | None = None
        self._link: GenerationLink | None = None
        self._over = False
        self._is_closed = False
        #: How many hosts' replicas this keeper is to hold.
        self.replicas = 0
        #: Whether a keeper of this run is known to have held a step that was complete on all hosts.
        self.has_held = False

    # -- for the keeper's process

    def listens(self, host: str, token: str) -> bool:
        """Whether the door is open on this address, for keepers that know this token."""
        with self._lock:
            return self._door is not None and (self._door.host, self._door.token) == (host, token)

    def listen(self, host: str, token: str) -> str:
        """Open the door for the keepers of other hosts, on this address only. Returns ``host:port``."""
        with self._lock:
            door = self._door
            if door is not None and (door.host, door.token) == (host, token):
                return door.address
            if door is not None:
                door.close()
            self._door = None
            if self._is_closed:
                raise TransfuseError("this keeper is ending")
            self._door = Door(host, token, self._port_before(), lambda: _KeeperVisit(self), self.tls)
            files.write(self._keeper.directory, files.PORT_NAME, str(self._door.port))
            return self._door.address

    def _port_before(self) -> int:
        """The port of this directory's last keeper: where the others look for it."""
        with suppress(OSError, ValueError):
            port = int((self._keeper.directory / files.PORT_NAME).read_text())
            return port if 0 < port < 1 << 16 else 0
        return 0

    def join(self, peers: frames.Peers) -> None:
        """Link this keeper to these. What an earlier link was doing is abandoned."""
        hosts, index = len(peers.keepers), peers.index
        if len(peers.ranks) != hosts or not 0 <= index < hosts or peers.replicas < 0:
            raise TransfuseError("the list of the job's keepers is inconsistent")
        with self._lock:
            before = self._link
            if before is not None and (before.peers == peers or before.peers.generation > peers.generation):
                return
            self._over = False
            self.replicas = min(peers.replicas, hosts - 1)
            sources = [(index - distance) % hosts for distance in range(1, self.replicas + 1)]
            link = GenerationLink(self, peers, sources) if hosts > 1 and not self._is_closed else None
            self._link = link
        if before is not None:
            before.stop()
        with self.store.changed:
            self.store.books.neighbours = frozenset(rank for source in sources for rank in peers.ranks[source])
        if link is not None:
            link.start()

    def wake(self) -> None:
        """Something has changed here that the leader should look at."""
        with self._lock:
            link = self._link
        if link is not None:
            link.wake()

    def notes(self) -> str:
        """What the users of this host should know about its replicas; empty if all is well."""
        with self._lock:
            link = self._link
        return "" if link is None else link.notes()

    def why_incomplete(self, label: Label) -> str:
        """What a step waits for that all ranks of this host have committed."""
        with self._lock:
            link = self._link
        return "" if link is None else link.why_incomplete(label)

    def works(self) -> bool:
        """Whether the keepers of all hosts answer, as far as this one knows: without them no step is confirmed."""
        with self._lock:
            link = self._link
        return link is not None and link.works()

    def is_over(self) -> bool:
        """Whether all ranks of all hosts have closed."""
        return self._over

    def host_of(self, rank: int) -> int | None:
        """The host that a rank is on now; None if there is no such rank any more."""
        with self._lock:
            link = self._link
        ranks = [] if link is None else link.peers.ranks
        return next((host for host, some in enumerate(ranks) if rank in some), 0 if link is None else None)

    def status(self) -> dict[str, Any]:
        with self._lock:
            link, door = self._link, self._door
        if link is None:
            return {"hosts": 1, "replicas": 0}
        return {"door": None if door is None else door.address, **link.status()}

    def look(self) -> bytes:
        """How this keeper is, for other hosts."""
        return overview.short(self._keeper.status())

    def others(self) -> list[dict[str, Any]]:
        """How the keepers of the other hosts are. No lock is held while they are asked."""
        with self._lock:
            link = self._link
        return [] if link is None else overview.others(link.peers, self.tls)

    def neighbours(self) -> tuple[int, int]:
        """How many other hosts the job has, and the keepers of how many of them answer, as far as this one knows."""
        with self._lock:
            link = self._link
        return (0, 0) if link is None else link.neighbours()

    @property
    def puller(self) -> ReplicaPuller | None:
        """What pulls replicas to this host, in this generation."""
        with self._lock:
            return None if self._link is None else self._link.puller

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            link, door, self._link, self._door = self._link, self._door, None, None
        until = time.monotonic() + RING_CLOSE_SECONDS
        if link is not None:
            link.stop()
            link.join(until)
        if door is not None:
            door.close()
            door.join(until)

    # -- for links and visits

    def set_over(self) -> None:
        self._over = True

    def follow(self, decided: Round) -> HostState:
        """Follow the leader's decisions, and say how this keeper is."""
        with self._lock:
            link = self._link
        if link is not None and link.peers.index != 0:
            link.apply(decided)
        return self.state(link)

    def state(self, link: GenerationLink | None) -> HostState:
        closed = self._keeper.all_closed
        with self.store.changed:
            books = self.store.books
            return HostState(
                books.generation if link is None else link.peers.generation,
                books.confirmed,
                books.complete_labels()[:MAX_LABELS],
                books.hopeful_labels()[:MAX_LABELS],
                books.reached(),
                books.is_starved(),
                None if link is None else link.puller.replicated,
                link is not None and link.puller.without_room,
                closed,
                self.has_held,
                books.restored,
                books.held_of(books.restored) if books.restored is not None else [],
            )

    def confirm(self, label: Label) -> None:
        changed, books = self.store.changed, self.store.books
        with changed:
            if books.confirmed is None or label > books.confirmed:
                books.confirm(label)
                self.store.freeing.add(books.free_ranks())
                changed.notify_all()
        self.has_held = True

    def save_visit(self) -> SaveVisit:
        """The leader has connected, to have a step saved."""
        return self._keeper.saver.visit()

    def lend(self, label: Label, ranks: Sequence[int]) -> Loan:
        """Serve these ranks' slots of a step, or those of this host, to a keeper that replicates them."""
        with self._lock:
            link, door = self._link, self._door
        if (
            link is None
            or door is None
            or (label.generation != link.peers.generation and label != self.store.books.restored)
        ):
            raise TransfuseError(f"this keeper is not at generation {label.generation}")
        return link.loans.lend(label, door.host, ranks)


class _KeeperVisit:
    """Answers one connection of another keeper. What it borrows is lent as long as the connection lasts."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._loan: Loan | None = None
        #: What it has saved, if it is the leader that sees to saving.
        self._save: SaveVisit | None = None

    def answer(self, question: Question) -> Answer:
        if isinstance(question, SaveQuestion):
            self._save = self._save or self._ring.save_visit()
            return self._save.answer(question)
        if isinstance(question, Look):
            return Looked(self._ring.look())
        return self._lend(question) if isinstance(question, Lend) else self._ring.follow(question)

    def _lend(self, question: Lend) -> Lent:
        if self._loan is not None:
            raise TransfuseError("this connection has borrowed already")
        self._loan = self._ring.lend(Label(question.generation, question.step), question.ranks)
        return self._loan.describe()

    def may_stay(self, silent: float) -> bool:
        if self._save is not None:
            return self._save.may_stay(silent)
        return silent <= RING_IDLE_SECONDS if self._loan is None else not self._loan.is_in_vain()

    def end(self) -> None:
        if self._loan is not None:
            self._loan.give_back()
        if self._save is not None:
            self._save.end()


class GenerationLink:
    """This keeper's part in the ring during one generation."""

    def __init__(self, ring: Ring, peers: frames.Peers, sources: Sequence[int]) -> None:
        self._ring = ring
        self.peers = peers
        self._sources = sources
        self._stopped, self._news = threading.Event(), threading.Event()
        self.loans = Loans(ring.store, peers.ranks[peers.index], peers.rate, ring.tls)
        self.puller = ReplicaPuller(
            ring.store,
            peers,
            sources,
            stopped=self._stopped,
            on_idle=self._watch_leader,
            on_replicated=self._news.set,
            tls=ring.tls,
        )
        self._heard_at = time.monotonic()
        #: The leader's last decisions.
        self._heard: Round | None = None
        self._is_lonely = False
        self._threads: list[threading.Thread] = []
        # The leader's.
        hosts, key = len(peers.keepers), key_of(peers.token)
        others = [index for index in range(hosts) if index != peers.index]
        self._others = [Peer(index, peers.keepers[index], key, ring.tls) for index in others if peers.index == 0]
        self._decisions = Decisions(
            peers.generation, hosts, replicates=bool(sources), ranks=peers.ranks, copies=1 + len(sources)
        )
        self._over_since: float | None = None
        #: The others that have been told that it is over.
        self._told: set[int] = set()

    def start(self) -> None:
        work = [("pull", self.puller.run)] if self._sources or self.peers.index else []
        if self.peers.index == 0:
            work.append(("lead", self._lead))
        for name, target in work:
            thread = threading.Thread(target=target, name=f"transfuse-ring-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._news.set()
        self.puller.wake()
        for peer in self._others:
            peer.close()

    def join(self, until: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def wake(self) -> None:
        self._news.set()

    def status(self) -> dict[str, Any]:
        """Called under the keeper's lock."""
        books, puller, index = self._ring.store.books, self.puller, self.peers.index
        result = {
            "hosts": len(self.peers.keepers),
            "host": index,
            "replicas": len(self._sources),
            "replicated_step": None if puller.replicated is None else puller.replicated.step,
            "agreed_step": None if books.agreed is None else books.agreed.step,
            "bytes": sum(kept.nbytes for copies in books.replicas.values() for kept in copies),
            "without_room": puller.without_room,
            "last_pull": puller.last_pull,
        }
        if index:
            return {**result, "leader_heard_seconds_ago": round(time.monotonic() - self._heard_at, 1)}
        lost = [peer.index for peer in self._others if peer.is_lost]
        return {**result, "unreachable": lost, "hosts_without_room": self._decisions.decided.bare}

    # -- everybody

    def works(self) -> bool:
        if self.peers.index == 0:
            return not any(peer.is_lost for peer in self._others)
        heard, silent = self._heard, time.monotonic() - self._heard_at
        return heard is not None and silent < DRAIN_RING_SECONDS and not heard.lost

    def neighbours(self) -> tuple[int, int]:
        others = len(self.peers.keepers) - 1
        if self.peers.index == 0:
            return others, sum(not peer.is_lost for peer in self._others)
        heard = self._heard
        if heard is None or self._is_lonely:
            # The others say how they are to the leader alone.
            return others, 0
        return others, others - len([host for host in heard.lost if host != self.peers.index])

    def notes(self) -> str:
        """What the users of this host should know about its replicas; empty if all is well."""
        index, hosts = self.peers.index, len(self.peers.keepers)
        notes = []
        if self.puller.without_room:
            sources = ", ".join(map(str, self._sources))
            notes.append(f"host {index} has no room for replicas of host {sources} ({self.puller.why_without_room})")
        # The leader hears of everybody. It has heard itself last.
        heard = self._decisions.decided if index == 0 else self._heard
        if heard is not None:
            holders = {(index + distance) % hosts for distance in range(1, len(self._sources) + 1)}
            bare = sorted(holders & set(heard.bare))
            if bare:
                notes.append(
                    f"host {index} has no replica on hosts {bare}, which have no room: its state is lost with it"
                )
            lost = [] if self._is_lonely else [host for host in heard.lost if host != index]
            if lost and heard.settled:
                notes.append(f"the keepers of hosts {lost} cannot be reached: no step is confirmed until they are back")
        if self._is_lonely:
            notes.append("the keeper of host 0, which leads, is silent: no step is confirmed until it is back")
        return "; ".join(notes)

    def why_incomplete(self, label: Label) -> str:
        """What a step waits for that all ranks of this host have committed."""
        heard = self._decisions.decided if self.peers.index == 0 else self._heard
        behind = [] if heard is None else [rank for host in heard.behind for rank in self.peers.ranks[host]]
        if behind:
            return f"{ranks_and_have(behind)} not committed step {label.step}, on other hosts"
        return f"step {label.step} is not replicated yet"

    def apply(self, decided: Round) -> None:
        """Follow the leader's decisions."""
        ring, books = self._ring, self._ring.store.books
        if decided.confirmed is not None:
            ring.confirm(decided.confirmed)
        ring.has_held = ring.has_held or decided.has_held
        if decided.generation != self.peers.generation:
            return
        self._heard_at, self._heard = time.monotonic(), decided
        if decided.settled:
            with ring.store.changed:
                # The workers of a still newer generation may have come meanwhile.
                if books.generation == decided.generation:
                    books.agree(decided.agreed, decided.floor)
            self.puller.refill(decided.restored, [one for one in decided.refill if one.host == self.peers.index])
            self.puller.wake()
        if decided.over and self.peers.index:
            ring.set_over()

    def _watch_leader(self) -> None:
        is_silent = not self._ring.is_over() and time.monotonic() - self._heard_at > RING_SILENCE_SECONDS
        if is_silent and not self._is_lonely:
            logger.warning("the keeper of host 0, which leads, is silent: no step is confirmed until it is back")
        self._is_lonely = is_silent

    # -- the leader

    def _lead(self) -> None:
        while not self._stopped.is_set():
            try:
                is_new = self._round()
            except Exception:
                logger.exception("a round of the keepers failed")
                is_new = False
            if not is_new:
                self._news.wait(RING_ROUND_SECONDS)
                self._news.clear()
        for peer in self._others:
            peer.close()

    def _round(self) -> bool:
        """Tell everybody what is decided, hear how they are, decide. Returns whether something new was decided."""
        decided = self._decisions.decided
        states: dict[int, HostState] = {}
        others: list[HostState] = []
        for peer in self._others:
            if self._stopped.is_set():
                return False
            if peer.index in self._told:
                continue
            state = peer.ask(decided)
            if state is None:
                continue
            if decided.over:
                self._told.add(peer.index)  # It ends now.
            if state.generation == self.peers.generation:
                states[peer.index] = state
            else:
                others.append(state)
        if self._stopped.is_set():
            return False
        if states or others:
            # Others first: what only the leader knew to be confirmed would be lost with it, and older ones are gone.
            self.apply(decided)
        states[0] = self._ring.state(self)
        is_new = self._decisions.hear(states, others)
        self._end()
        return is_new

    def _end(self) -> None:
        """End once all have been told that it is over."""
        if not self._decisions.decided.over:
            self._over_since = None
            self._told.clear()
            return
        now = time.monotonic()
        if self._over_since is None:
            self._over_since = now
            self._news.set()
        elif len(self._told) == len(self._others) or now - self._over_since > RING_OVER_SECONDS:
            self._ring.set_over()
