"""All decisions of the ring in random orders, without threads or network."""

from __future__ import annotations

import random
import threading

import msgspec
import numpy as np
import pytest

from ring_hosts import TOKEN
from transfuse._keeper import frames, replicas, ring
from transfuse._keeper.bundle_table import KEY_BYTES, PRIVATE, Bundles
from transfuse._keeper.frames import Lay
from transfuse._keeper.freeing import Freeing
from transfuse._keeper.measured import counters
from transfuse._keeper.questions import HostState, LentSlot, Round
from transfuse._keeper.slot_file import PAGE, Brief, Label, SlotFile
from transfuse._keeper.slot_policy import Books, Generation

SLOTS = 3
SIZES = (4 * PAGE, 12 * PAGE)


def _close(files: list[SlotFile]) -> None:
    for file in files:
        file.close()


class FakeKeeper:
    """What the ring uses of a keeper."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.books = Books()
        self.freeing = Freeing()
        self.all_closed = False
        self.tls = None
        self.counted = counters()

    def room(self) -> int:
        return 1 << 40


class FakePeer:
    """A connection that sometimes breaks before, and sometimes after the question has arrived."""

    def __init__(self, index: int, simulation: Simulation) -> None:
        self.index, self._simulation = index, simulation
        self.is_lost = False

    def ask(self, question: Round) -> HostState | None:
        luck = self._simulation.luck()
        if luck < 0.1:
            return None
        answer = self._simulation.rings[self.index].follow(question)
        return None if luck < 0.2 else answer

    def close(self) -> None:
        pass


class Simulation:
    """Hosts with one rank each. Every action is one call of the real books or the real ring."""

    def __init__(self, seed: int, hosts: int) -> None:
        self._rng = random.Random(seed)
        self.is_calm = False
        self.generation = 0
        self.rings: list[ring.Ring] = []
        self.links: list[ring.GenerationLink] = []
        self.at = [0] * hosts
        self.laid = [False] * hosts
        for _ in range(hosts):
            self.rings.append(ring.Ring(FakeKeeper()))  # type: ignore[arg-type]
        #: The newest step that was ever confirmed, and whether no host was lost since: then one may be.
        self.newest: Label | None = None
        self.is_healthy = False
        self.restart()

    def luck(self) -> float:
        return 1.0 if self.is_calm else self._rng.random()

    def restart(self) -> None:
        """All workers start again, from the newest step that somebody holds."""
        self.generation += 1
        for index in range(len(self.rings)):
            self.join(index)
        self.at = [self.newest.step if self.newest is not None else 0] * len(self.rings)

    def join(self, index: int) -> None:
        hosts, one = len(self.rings), self.rings[index]
        one.store.books.begin_generation(Generation(self.generation, hosts, (index,), hosts))
        ranks = [[rank] for rank in range(hosts)]
        peers = frames.Peers(self.generation, hosts, [""] * hosts, ranks, index, TOKEN, 1, None)
        link = ring.GenerationLink(one, peers, [(index - 1) % hosts])
        link._others = [FakePeer(other, self) for other in range(1, hosts) if index == 0]  # type: ignore[misc]
        one._link = link
        self.links[index : index + 1] = [link]
        self.laid[index] = False

    def lose(self, index: int, *, restart: bool) -> None:
        """A keeper is killed. A new one takes its place, in the same generation or with a restart of all workers."""
        self.close(index)
        self.rings[index] = ring.Ring(FakeKeeper())  # type: ignore[arg-type]
        self.is_healthy = False
        if restart:
            self.restart()
        else:
            self.join(index)

    def close(self, index: int) -> None:
        for kept in self.rings[index].store.books.all():
            kept.file.close()

    def commit(self, index: int) -> None:
        books, self.at[index] = self.rings[index].store.books, self.at[index] + 1
        label = Label(self.generation, self.at[index])
        if not self.laid[index]:
            lay = Lay(*label, Bundles.of([bytes(KEY_BYTES)], [PAGE], [PRIVATE]), 10, 0.0)
            layout = books.lay_out({index: lay})[index]
            # As the keeper does: slots are used again, whatever they hold, or are made anew.
            slot_bytes = SIZES[0] if self.luck() < 0.7 else self._rng.choice(SIZES)
            reused = books.reusable(index, slot_bytes)[-SLOTS:]
            _close(books.free_slots(index, reused))
            books.take_layout(index, layout, reused, [SlotFile(slot_bytes) for _ in range(SLOTS - len(reused))])
            self.laid[index] = True
        number, _ = books.begin(index, label)
        if number is None:
            return
        file = books.slot(index, number).file
        file.begin(label)
        if self.luck() < 0.05:
            books.detach(index)
            return
        bundles = Bundles.of([bytes(KEY_BYTES)], [PAGE], [PRIVATE])
        brief = Brief(index, 1, bundles.laid(np.array([index]), np.array([PAGE])))
        file.commit(label, msgspec.msgpack.encode(brief), b"text")
        file.bytes[-PAGE:] = self.at[index] % 251
        books.commit(index, number, label, file.brief())
        _close(books.free_ranks())

    def pull(self, index: int) -> None:
        """As `ReplicaPuller._pull`, with a copy in place of the network."""
        link, source = self.links[index], (index - 1) % len(self.rings)
        label = link.puller.wanted()
        if label is None or label == link.puller.replicated:
            return
        theirs = self.rings[source].store.books.find(source, label)
        if theirs is None:
            return
        lent = [LentSlot(source, theirs.file.nbytes, bytes(theirs.file.memory[: replicas.HEAD_BYTES]))]
        chosen = self.rings[index].store.prepare(lent, [source])
        chosen[source].file.bytes[:PAGE] = 0
        if self.luck() < 0.2:
            chosen[source].is_written = False  # It broke.
            return
        chosen[source].file.bytes[PAGE:] = theirs.file.bytes[PAGE:]
        link.puller._count(lent, {source: chosen[source].file}, chosen, label)
        link.puller.replicated = label

    def check(self) -> None:
        """The newest step that was ever confirmed, or a newer one, is whole on the hosts that are there."""
        for one in self.rings:
            confirmed = one.store.books.confirmed
            if confirmed is not None and (self.newest is None or confirmed > self.newest):
                self.newest = confirmed
                # A host that was lost after the decision, and before we hear of it, may not be followed by another.
                self.is_healthy = all(other.store.books.is_complete(confirmed) for other in self.rings)
        if self.newest is None:
            return
        labels = {label for one in self.rings for label in one.store.books.labels() if label >= self.newest}
        held = {
            label: {
                kept.rank for one in self.rings for kept in one.store.books.all() if kept.label == label and kept.brief
            }
            for label in labels
        }
        assert any(ranks == set(range(len(self.rings))) for ranks in held.values()), (self.newest, held)

    def act(self) -> None:
        what, index = self._rng.random(), self._rng.randrange(len(self.rings))
        if what < 0.5:
            self.commit(index)
        elif what < 0.7:
            self.pull(index)
        elif what < 0.97 or self.is_calm:
            self.links[0]._round()
        elif what < 0.985:
            self.restart()
        elif self.is_healthy:
            self.lose(index, restart=self._rng.random() < 0.5)
        self.check()


@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(9, 200))])
def test_whatever_is_lost_the_newest_confirmed_step_is_whole_and_the_job_goes_on(seed: int) -> None:
    simulation = Simulation(seed, hosts=2 + seed % 3)
    for _ in range(500):
        simulation.act()
    # Nothing breaks any more: then a step of this generation is confirmed, whatever the slots hold now.
    simulation.is_calm = True
    for _ in range(2000):
        simulation.act()
        if simulation.newest is not None and simulation.newest.generation == simulation.generation:
            break
    else:
        raise AssertionError("no step is confirmed any more")
    for index in range(len(simulation.rings)):
        simulation.close(index)
