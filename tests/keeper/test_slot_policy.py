"""The keeper's books, in random orders, against a simple model: the newest confirmed step can always be restored."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from transfuse._keeper.bundle_table import DIGEST_BYTES, KEY_BYTES, PLACED, PLAIN, PRIVATE, Bundles
from transfuse._keeper.frames import Lay
from transfuse._keeper.slot_file import PAGE, Brief, Label, SlotFile
from transfuse._keeper.slot_policy import Books, Generation, Kept, slot_bytes

SLOTS = 3
TEXT_BYTES = 100


def key(name: str) -> bytes:
    return name.encode().ljust(KEY_BYTES, b"\0")


def digest(value: object) -> bytes:
    return str(value).encode().ljust(DIGEST_BYTES, b"\0")


@dataclass
class Host:
    """The workers of a host, as far as the books notice them; and what was written where, by file."""

    books: Books = field(default_factory=Books)
    generation: int = 0
    slots: int = SLOTS
    ranks: tuple[int, ...] = ()
    layouts: dict[int, Bundles] = field(default_factory=dict)
    #: By rank: the slot that it writes to.
    writing: dict[int, tuple[int, Label]] = field(default_factory=dict)
    #: The model: by file, the step and the values of the bundles that are in it. A file that is written holds nothing.
    memory: dict[int, tuple[Label, dict[bytes, object]]] = field(default_factory=dict)
    files: list[SlotFile] = field(default_factory=list)

    def start(self, ranks: Sequence[int], hosts: int = 1) -> None:
        self.generation += 1
        self.ranks = tuple(ranks)
        self.writing.clear()
        self.books.begin_generation(Generation(self.generation, len(self.ranks) * hosts, self.ranks, hosts))
        self.layouts.clear()

    def wanted(self, values: dict[str, object]) -> Lay:
        names = sorted(values)
        modes = [PRIVATE if name[0] == "p" else PLACED if name[0] == "s" else PLAIN for name in names]
        bundles = Bundles.of([key(name) for name in names], [PAGE] * len(names), modes)
        return Lay(self.generation, 0, bundles.hashed([digest(values[name]) for name in names]), TEXT_BYTES, 0.0)

    def lay(self, values: dict[int, dict[str, object]]) -> None:
        """These ranks ask for a layout together."""
        layouts = self.books.lay_out({rank: self.wanted(some) for rank, some in values.items()})
        for rank, layout in layouts.items():
            fresh = [SlotFile(slot_bytes(layout, TEXT_BYTES)) for _ in range(self.slots)]
            self.files += fresh
            self.forget(self.books.free_slots(rank, but=()))
            self.books.take_layout(rank, layout, (), fresh)
            self.layouts[rank] = layout

    def forget(self, files: Sequence[SlotFile]) -> None:
        for file in files:
            self.memory.pop(id(file), None)
            file.close()

    def begin(self, rank: int, step: int) -> tuple[int | None, bool]:
        label = Label(self.generation, step)
        number, renew = self.books.begin(rank, label)
        if number is not None:
            self.memory.pop(id(self.books.slot(rank, number).file), None)
            self.writing[rank] = number, label
        return number, renew

    def commit(self, rank: int, values: dict[str, object]) -> None:
        number, label = self.writing.pop(rank)
        layout, names = self.layouts[rank], sorted(values)
        brief = Brief(rank, len(self.ranks), layout.hashed([digest(values[name]) for name in names]))
        held = {key(n): values[n] for n, o in zip(names, layout.owners.tolist(), strict=True) if o == rank}
        self.memory[id(self.books.slot(rank, number).file)] = label, held
        self.books.commit(rank, number, label, brief)
        self.forget(self.books.free_ranks())

    def restored(self, rank: int, label: Label, names: Sequence[str]) -> dict[str, object] | None:
        """What a restore would read, from the model of the memory; None if something is missing."""
        needed = self.books.needed_for(rank, label)
        if needed is None:
            return None
        kept = self.books.find(rank, label)
        assert kept is not None
        assert kept.brief is not None
        found: dict[str, object] = {}
        bundles = kept.brief.bundles
        for name in names:
            owner = int(bundles.owners[bundles.keys.index(key(name))])
            theirs = self.books.find(owner, label)
            assert theirs is not None
            at, held = self.memory[id(theirs.file)]
            assert at == label
            found[name] = held[key(name)]
        return found


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    for file in made.files:
        file.close()


def values_of(rank: int, step: int, *, differ: bool = False) -> dict[str, object]:
    """Private, placed, and plain bundles; one of the plain ones differs between ranks if asked."""
    return {
        "private": (rank, step),
        f"shard {rank // 2}": (rank // 2, step),  # The key of a DTensor's bundle names its place.
        "plain": ("equal", step),
        "norm": (rank, step) if differ else ("norm", step),
    }


def begin(host: Host, rank: int, step: int, values: dict[int, dict[str, object]]) -> None:
    """As a worker does: it asks for a layout first if it has none, or has to renew it."""
    if rank in host.layouts and not host.begin(rank, step)[1]:
        return
    # After a restart all ranks of a host ask together.
    host.lay({rank: values[rank]} if host.layouts else values)
    host.begin(rank, step)


def run_step(host: Host, step: int, *, differ: bool = False) -> None:
    values = {rank: values_of(rank, step, differ=differ) for rank in host.ranks}
    for rank in host.ranks:
        begin(host, rank, step, values)
    for rank in host.ranks:
        if rank in host.writing:
            host.commit(rank, values[rank])


def test_ranks_share_what_is_equal_and_a_step_is_confirmed_when_all_have_it(host: Host) -> None:
    host.start([0, 1])
    values = {rank: values_of(rank, 1) for rank in (0, 1)}
    host.lay(values)
    everything = host.books.lay_out({0: host.wanted({f"p{n}": n for n in range(4)})})[0]
    sizes = [slot_bytes(layout, TEXT_BYTES) for layout in host.layouts.values()]
    assert max(sizes) < slot_bytes(everything, TEXT_BYTES)
    host.begin(0, 1)
    host.commit(0, values[0])
    assert host.books.confirmed is None
    host.begin(1, 1)
    host.commit(1, values[1])
    assert host.books.confirmed == Label(1, 1)
    for rank in (0, 1):
        assert host.restored(rank, Label(1, 1), list(values[rank])) == values[rank]


def test_bundles_that_begin_to_differ_are_kept_by_each_rank_from_then_on(host: Host) -> None:
    host.start([0, 1])
    run_step(host, 1)
    run_step(host, 2, differ=True)
    assert host.books.confirmed == Label(1, 1)  # Step 2 misses one rank's own.
    run_step(host, 3, differ=True)
    assert host.books.confirmed == Label(1, 3)
    for rank in (0, 1):
        values = values_of(rank, 3, differ=True)
        assert host.restored(rank, Label(1, 3), list(values)) == values


def test_steps_that_differ_again_and_again_do_not_fill_the_slots_of_their_owner(host: Host) -> None:
    host.start([0, 1])
    host.lay({rank: {f"x{n}": ("same", 0) for n in range(8)} for rank in (0, 1)})
    for step in range(1, 8):
        values: dict[int, dict[str, object]] = {
            r: {f"x{n}": (r, step) if n < step else ("same", step) for n in range(8)} for r in (0, 1)
        }
        for rank in (0, 1):
            if host.begin(rank, step)[1]:
                host.lay({rank: values[rank]})
                assert host.begin(rank, step)[0] is not None
        for rank in (0, 1):
            host.commit(rank, values[rank])
    assert host.books.begin(0, Label(1, 9))[0] is not None


def test_a_worker_that_dies_in_the_middle_of_a_commit_leaves_the_older_steps(host: Host) -> None:
    host.start([0, 1])
    run_step(host, 1)
    host.begin(0, 2)
    host.begin(1, 2)
    host.commit(1, values_of(1, 2))
    host.books.detach(0)
    assert host.books.confirmed == Label(1, 1)
    host.start([0, 1])
    for rank in (0, 1):
        assert host.restored(rank, Label(1, 1), ["private", "norm"]) is not None
    run_step(host, 2)
    assert host.books.confirmed == Label(2, 2)


def test_ranks_that_are_far_apart_come_to_a_common_step_again(host: Host) -> None:
    """With local SGD one rank was 13 steps ahead: it leaves out steps for want of slots, and so must the other."""
    host.start([0, 1])
    run_step(host, 1)
    for step in range(2, 15):
        if host.begin(0, step)[0] is not None:
            host.commit(0, values_of(0, step))
    for step in range(2, 40):
        if step > 14 and host.begin(0, step)[0] is not None:
            host.commit(0, values_of(0, step))
        if host.begin(1, step)[0] is not None:
            host.commit(1, values_of(1, step))
    assert host.books.confirmed is not None
    assert host.books.confirmed.step > 14


def test_a_step_that_other_hosts_may_have_confirmed_stays_over_a_restart(host: Host) -> None:
    host.start([0], hosts=2)
    run_step(host, 1)
    host.books.confirm(Label(1, 1))
    run_step(host, 2)
    host.books.agree(Label(1, 2))
    host.start([0], hosts=2)
    for step in range(3, 9):
        run_step(host, step)
        assert host.restored(0, Label(1, 2), ["private"]) is not None
        assert host.restored(0, Label(1, 1), ["private"]) is not None
    host.books.agree(None)
    host.books.agree(Label(2, 4))
    host.books.confirm(Label(2, 4))
    host.forget(host.books.free_ranks())
    assert host.books.labels()[-1].generation == 2


def test_below_a_floor_nothing_is_begun_and_what_is_there_may_go(host: Host) -> None:
    host.start([0], hosts=2)
    for step in range(1, 6):
        run_step(host, step)
    assert host.books.is_starved()
    assert [label.step for label in host.books.complete_labels()] == [3, 2, 1]
    host.books.agree(Label(1, 1), Label(1, 8))
    assert host.books.hopeful_labels() == []
    assert host.begin(0, 7) == (None, False)
    assert not host.books.is_starved()
    for step in (8, 9, 10):
        run_step(host, step)
    assert [label.step for label in host.books.complete_labels()] == [9, 8, 1]
    assert host.restored(0, Label(1, 1), ["private"]) is not None


def test_slots_of_ranks_that_left_and_replicas_go_once_a_newer_generation_is_confirmed(host: Host) -> None:
    host.start([0, 1], hosts=2)
    run_step(host, 1)
    kept = Kept(7, SlotFile(2 * PAGE), 2 * PAGE, 0, Label(1, 1), is_replica=True, brief=None)
    host.files.append(kept.file)
    host.books.replicas[7] = [kept]
    host.books.neighbours = frozenset([7])
    host.books.confirm(Label(1, 1))
    host.books.neighbours = frozenset()
    host.start([0])
    assert host.restored(1, Label(1, 1), ["private"]) is not None
    assert host.books.free_ranks() == []
    run_step(host, 2)
    assert host.books.confirmed == Label(2, 2)
    assert host.books.replicas == {}
    assert {kept.rank for kept in host.books.all()} == {0}


def test_the_oldest_candidate_stays_until_it_is_concluded(host: Host) -> None:
    host.books.save_every, host.slots = 2, SLOTS + 1
    host.start([0, 1])
    for step in range(1, 8):
        run_step(host, step)
        assert host.books.confirmed == Label(1, step)
    assert host.books.candidate() == Label(1, 2)
    assert host.books.is_saveable(Label(1, 2))
    for rank in (0, 1):
        assert host.restored(rank, Label(1, 2), ["plain"]) == {"plain": ("equal", 2)}
    host.books.concluded = Label(1, 2)
    # Those that came meanwhile were overwritten like any other step.
    assert host.books.candidate() == Label(1, 6)
    host.books.concluded = Label(1, 7)
    assert host.books.candidate() is None
    run_step(host, 9)
    assert host.books.candidate() is None
    run_step(host, 10)
    assert host.books.candidate() == Label(1, 10)
    host.start([0, 1])
    assert host.books.candidate() is None


def test_a_candidate_that_a_rank_has_left_out_is_none(host: Host) -> None:
    host.books.save_every, host.slots = 2, SLOTS + 1
    host.start([0, 1])
    run_step(host, 1)
    host.begin(0, 2)
    host.commit(0, values_of(0, 2))
    assert host.books.candidate() == Label(1, 2)
    assert not host.books.is_saveable(Label(1, 2))
    host.books.leave_out(1, Label(1, 2))
    assert host.books.candidate() is None
    run_step(host, 4)
    assert host.books.candidate() == Label(1, 4)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_the_newest_confirmed_step_can_be_restored(seed: int, host: Host) -> None:
    """Random commits, deaths, drops, differences and restarts. On several hosts somebody else confirms, later."""
    rng = random.Random(seed)
    hosts = rng.choice([1, 1, 2])
    host.books.save_every, host.slots = rng.choice([(None, SLOTS), (1, SLOTS + 1), (3, SLOTS + 1)])
    host.start(range(rng.randint(1, 4)), hosts)
    at = dict.fromkeys(host.ranks, 0)
    held: Label | None = None
    committed: dict[tuple[Label, int], dict[str, object]] = {}
    confirmations = 0
    for _ in range(400):
        rank, what = rng.choice(host.ranks), rng.random()
        differ = rng.random() < 0.2
        if what < 0.04:
            for one in host.ranks:
                host.books.detach(one)
            host.start(range(rng.randint(1, 4)), hosts)
            at = dict.fromkeys(host.ranks, 0)
        elif what < 0.08:
            host.books.detach(rank)
            host.writing.pop(rank, None)
        elif rank in host.writing and what < 0.15:
            host.books.drop(rank, host.writing.pop(rank)[0])
        elif rank in host.writing:
            label = host.writing[rank][1]
            values = values_of(rank, label.step, differ=hash((seed, label.step)) % 5 == 0 or differ)
            committed[label, rank] = values
            host.commit(rank, values)
        else:
            at[rank] += 1
            begin(host, rank, at[rank], {one: values_of(one, at[rank]) for one in host.ranks})
        if hosts > 1 and rng.random() < 0.1:
            complete = host.books.complete_labels()
            if host.books.agreed is not None:
                host.books.confirm(host.books.agreed)
                host.forget(host.books.free_ranks())
            elif complete:
                host.books.agree(rng.choice(complete))
        candidate = host.books.candidate()
        if held is not None and held.generation == host.generation and (host.books.floor or held) <= held:
            assert candidate == held, "a candidate that is whole stays until it is concluded"
            for one in host.ranks:
                assert host.restored(one, held, list(committed[held, one])) == committed[held, one]
        held = candidate if candidate is not None and host.books.is_saveable(candidate) else None
        if held is not None and rng.random() < 0.1:
            host.books.concluded = held
            held = None
        confirmed = host.books.confirmed
        if confirmed is not None:
            confirmations += 1
            ranks = [one for label, one in committed if label == confirmed]
            assert ranks
            for one in ranks:
                values = committed[confirmed, one]
                assert host.restored(one, confirmed, list(values)) == values, (confirmed, one)
    assert confirmations
