"""Which step is saved, who writes what and what goes, in random orders, without threads, files or network."""

from __future__ import annotations

import random

import pytest

from transfuse._keeper.bundle_table import BOXED, DIGEST_BYTES, KEY_BYTES, PLACED, PLAIN, PRIVATE, Bundles
from transfuse._keeper.frames import Held
from transfuse._keeper.questions import SaveState
from transfuse._keeper.restoring import HostHolding, Members, candidates_in
from transfuse._keeper.save_decisions import SaveDecisions, to_remove, writers
from transfuse._keeper.slot_file import Label


class Simulated:
    """A host: which candidates it holds, as its books would."""

    def __init__(self, every: int, slots: int) -> None:
        self.every, self.slots = every, slots
        self.at = 0
        self.held: dict[int, bool] = {}
        self.concluded: Label | None = None
        self.is_over = False

    def candidate(self) -> Label | None:
        least = -1 if self.concluded is None else self.concluded.step
        return min((Label(1, step) for step in self.held if step > least), default=None)

    def advance(self, chance: random.Random) -> None:
        """One rank begins the next step, or ends it; sometimes a step is left out."""
        if self.at in self.held and not self.held[self.at]:
            self.held[self.at] = True
            return
        self.at += 1
        if self.at % self.every == 0 and chance.random() > 0.1:
            self.held[self.at] = False
            first = self.candidate()
            for step in [step for step in sorted(self.held) if first is None or step > first.step][: -self.slots]:
                del self.held[step]  # Only the first one is held; others are overwritten.

    def state(self) -> SaveState:
        candidate = self.candidate()
        whole = candidate is not None and self.held[candidate.step]
        return SaveState(1, candidate, whole, Label(1, self.at) if self.at else None, self.is_over)


@pytest.mark.parametrize("seed", range(24))
def test_one_step_at_a_time_is_saved_that_all_hosts_hold_whole_and_there_is_always_another_one(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 4)
    every = chance.choice([1, 3, 7])
    hosts = [Simulated(every, chance.randint(1, 3)) for _ in range(count)]
    decisions, saved = SaveDecisions(count), list[Label]()
    for _ in range(4000):
        host = chance.choice(hosts)
        if host.at - min(one.at for one in hosts) < 5:
            host.advance(chance)  # In any job ranks wait for each other.
        if chance.random() < 0.5:
            continue
        heard = [number for number in range(count) if chance.random() < 0.8]
        states = {}
        for number in heard:
            known, told = hosts[number].concluded, decisions.concluded
            hosts[number].concluded = told if known is None or (told is not None and told > known) else known
            states[number] = hosts[number].state()
        before = decisions.saving
        decisions.hear(states)
        label = decisions.saving
        assert before is None or label == before, "one at a time"
        if label is not None and before is None:
            assert all(one.candidate() == label and one.held[label.step] for one in hosts)
            assert not saved or label > saved[-1]
        if label is not None and chance.random() < 0.2:
            saved.append(label)
            decisions.end(well=chance.random() < 0.8)
    assert len(saved) > 2, (saved, decisions.missed)
    assert saved[-1].step > max(host.at for host in hosts) / 3, "there is always another one"
    # The job ends with a step that all hosts commit.
    last = Label(1, (max(host.at for host in hosts) // every + 1) * every)
    for host in hosts:
        host.at, host.held[last.step], host.is_over = last.step, True, True
    for _ in range(3 * last.step):
        for host in hosts:
            host.concluded = decisions.concluded
        decisions.hear(dict(enumerate(host.state() for host in hosts)))
        decisions.end(well=True)
    assert decisions.ended == last, "the last one is saved, whatever was leapt over"


def test_nothing_is_decided_without_all_hosts() -> None:
    decisions = SaveDecisions(2)
    whole = SaveState(1, Label(1, 10), True, Label(1, 12))
    decisions.hear({0: whole})
    assert (decisions.saving, decisions.concluded) == (None, None)
    decisions.hear({0: whole, 1: SaveState(1, None, False, Label(1, 9))})
    assert (decisions.saving, decisions.concluded) == (None, None)
    decisions.hear({0: whole, 1: SaveState(1, Label(1, 10), False, Label(1, 10))})
    assert decisions.saving is None
    decisions.hear({0: whole, 1: whole})
    assert decisions.saving == Label(1, 10)


def test_what_a_host_has_passed_is_given_up_and_the_leap_grows_while_hosts_are_faster() -> None:
    decisions, leaps = SaveDecisions(2), []
    for step in (10, 30, 60, 90, 120):
        faster = step < 60
        at = Label(1, step + 3)
        decisions.hear({0: SaveState(1, Label(1, step), True, at), 1: SaveState(1, None, False, at)})
        assert decisions.concluded is not None
        leaps.append(decisions.concluded.step - at.step)
        beyond = Label(1, decisions.concluded.step + 1) if faster else at
        decisions.hear({0: SaveState(1, None, False, at), 1: SaveState(1, None, False, beyond)})
    assert leaps == [0, 1, 3, 1, 0]
    assert decisions.missed == 5


def test_what_was_leapt_over_has_another_chance_when_nobody_commits_any_more() -> None:
    decisions, at = SaveDecisions(2), Label(1, 60)
    decisions.hear({0: SaveState(1, Label(1, 57), True, at), 1: SaveState(1, at, True, at)})
    assert (decisions.saving, decisions.concluded) == (None, at)
    ended = SaveState(1, None, False, at, is_over=True)
    decisions.hear({0: ended, 1: SaveState(1, None, False, at)})
    assert decisions.concluded == at
    decisions.hear({0: ended, 1: ended})
    assert decisions.concluded is None
    decisions.hear({0: SaveState(1, Label(1, 57), True, at, True), 1: SaveState(1, at, True, at, True)})
    assert (decisions.saving, decisions.concluded) == (None, Label(1, 57))
    decisions.hear(dict.fromkeys((0, 1), SaveState(1, at, True, at, True)))
    assert decisions.saving == at
    decisions.end(well=False)
    decisions.hear(dict.fromkeys((0, 1), SaveState(1, None, False, at, True)))
    assert (decisions.saving, decisions.concluded, decisions.ended) == (None, at, at)


# ---------------------------------------------------------------------------------------------------- who writes what


def table(rank: int, rows: list[tuple[str, int, int, int, str]]) -> Bundles:
    """Rows: key, mode, bytes, who holds it in memory, contents."""
    bundles = Bundles.of(
        [key.encode().ljust(KEY_BYTES, b"\0") for key, *_ in rows],
        [nbytes for _, _, nbytes, _, _ in rows],
        [mode for _, mode, _, _, _ in rows],
    )
    digests = [what.encode().ljust(DIGEST_BYTES, b"\0") for *_, what in rows]
    owners = [owner for _, _, _, owner, _ in rows]
    places = [4096 if owner == rank else -1 for owner in owners]
    return bundles.laid(owners, places).hashed(digests)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(16))
def test_each_bundle_is_written_once_by_a_rank_that_has_it_and_the_load_is_even(seed: int) -> None:
    chance = random.Random(seed)
    hosts_count, each = chance.randint(1, 4), chance.randint(1, 3)
    hosts = {rank: rank // each for rank in range(hosts_count * each)}
    names = [f"w{n}" for n in range(chance.randint(1, 30))]
    sizes = {name: chance.randint(1, 1000) for name in names}
    tables = {}
    for rank, host in hosts.items():
        here = [one for one, where in hosts.items() if where == host]
        # On a host each is held by one rank; a plain one differs on one host.
        rows = [
            (
                name,
                (PLAIN, PLACED, BOXED)[n % 3],
                sizes[name],
                here[n % each],
                "other" if n % 7 == 6 and host == 0 else "x",
            )
            for n, name in enumerate(names)
        ]
        tables[rank] = table(rank, [*rows, (f"own{rank}", PRIVATE, 5, rank, str(rank))])
    found = writers(tables, hosts, together=True)
    written: dict[tuple[bytes, bytes], set[int]] = {}
    load = dict.fromkeys(hosts.values(), 0)
    for rank, one in tables.items():
        for number, writer in enumerate(found[rank].tolist()):
            theirs = tables[writer]
            where = theirs.keys.index(one.keys[number])
            assert theirs.owners[where] == writer, "who writes it has it"
            assert one.modes[number] == PLACED or theirs.digest(where) == one.digest(number)
            ground = b"" if one.modes[number] == PLACED else one.digest(number)
            written.setdefault((one.keys[number], ground), set()).add(writer)
            assert found[writer][where] == writer
    assert all(len(some) == 1 for some in written.values()), "once"
    for (key, _), (writer,) in written.items():
        load[hosts[writer]] += int(tables[writer].nbytes[tables[writer].keys.index(key)])
    shared = sum(sizes.values())
    assert max(load.values()) <= shared / hosts_count + max(sizes.values()) + sum(sizes.values()) / 7 + 50
    alone = writers(tables, hosts, together=False)
    assert all((alone[rank] == one.owners).all() for rank, one in tables.items()), "on disks of their own: as in memory"


# ------------------------------------------------------------------------------------------------------- what may go


@pytest.mark.parametrize("seed", range(16))
def test_the_newest_whole_steps_stay(seed: int) -> None:
    chance = random.Random(seed)
    steps = [Label(chance.randint(1, 3), step) for step in chance.sample(range(100), 12)]
    counted, unfinished = steps[:8], steps[8:]
    whole = chance.sample(counted, chance.randint(0, 8))
    keep = chance.randint(1, 4)
    gone = to_remove(whole, counted, unfinished, keep)
    newest = sorted(whole, reverse=True)[:keep]
    assert not set(gone) & set(newest)
    assert gone == sorted(gone)
    if not whole:
        assert not gone
    for label in counted:
        assert (label in gone) == (bool(newest) and label < newest[-1])
    for label in unfinished:
        assert (label in gone) == (bool(newest) and label < newest[0]), "one that is newer may be being written"


# ---------------------------------------------------------------------------------------------- what is restored first


def held(step: int, rank: int, *, whole: bool = True, saved: bool = False, record: str = "") -> Held:
    return Held(1, step, rank, 2, 10, whole, saved=saved, record=record)


def order(*hosts: list[Held]) -> list[tuple[int, dict[int, list[int]], set[int]]]:
    members = Members(None, [[host] for host in range(len(hosts))], 0, "", "")  # type: ignore[arg-type]
    rows = [HostHolding(states, True, "", storage="/data") for states in hosts]
    return [(one.label.step, one.holders, one.saved) for one in candidates_in(members, rows)]


def test_the_newest_whole_step_comes_first_and_memory_before_storage() -> None:
    memory = [held(5, 0), held(5, 1), held(4, 0), held(4, 1)]
    storage = [held(4, 0, saved=True), held(4, 1, saved=True), held(2, 0, saved=True), held(2, 1, saved=True)]
    assert order(memory + storage) == [
        (5, {0: [0], 1: [0]}, set()),
        (4, {0: [0], 1: [0]}, set()),
        (2, {0: [0], 1: [0]}, {0, 1}),
    ]


def test_each_rank_is_taken_from_memory_if_some_host_has_it_there() -> None:
    one = [held(4, 0), held(4, 0, saved=True), held(4, 1, saved=True)]
    two = [held(4, 0, saved=True), held(4, 1, saved=True)]
    assert order(one, two) == [(4, {0: [0], 1: [0, 1]}, {1})]


def test_newer_steps_that_memory_may_cover_come_before_one_that_needs_storage() -> None:
    memory = [held(9, 0), held(8, 1), held(1, 0)]
    storage = [
        held(6, 0, saved=True),
        held(6, 1, saved=True),
        held(7, 0, saved=True),
        held(7, 1, whole=False, saved=True),
    ]
    assert [step for step, *_ in order(memory + storage)] == [9, 8, 6, 7, 1]
    # Nothing changes where memory has a whole step.
    assert [step for step, *_ in order([held(9, 0), held(6, 0), held(6, 1), *storage[:2]])] == [6, 9]


def test_files_of_two_saves_are_never_put_together() -> None:
    """One host was away when a step of the same number was saved again."""
    one = [held(4, 0, saved=True, record="first"), held(4, 1, whole=False, saved=True, record="first")]
    two = [held(4, 0, whole=False, saved=True, record="second"), held(4, 1, saved=True, record="second")]
    assert order(one, two) == [(4, {0: [0]}, {0})]
