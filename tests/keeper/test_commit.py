"""What ``commit`` keeps: every byte of every kind of state, shared or not, at once or while training goes on."""

from __future__ import annotations

import gc
import os
import pathlib
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import transfuse
from keeping import SECONDS, Home, Job, exact, home, same, snapshot, threaded  # noqa: F401
from transfuse._errors import PeerRefused, TransfuseError
from transfuse._keeper import copying
from transfuse._keeper.process import Keeper
from transfuse._keeper.slot_file import SlotFile

pytestmark = pytest.mark.usefixtures("threaded")
MIB = 1 << 20


@pytest.fixture
def keeper(home: Home) -> Keeper:  # noqa: F811
    return home.start()


def zeros_like(tree: Any) -> Any:
    """A tree of the same structure, with none of its bytes; what refers to one memory still does."""
    seen: dict[int, torch.Tensor] = {}

    def visit(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            base = one.untyped_storage()
            if base.data_ptr() not in seen or not base.nbytes():
                seen[base.data_ptr()] = torch.zeros(base.nbytes(), dtype=torch.uint8)
            memory = seen[base.data_ptr()].untyped_storage()
            return torch.empty(0, dtype=one.dtype).set_(memory, one.storage_offset(), one.shape, one.stride())
        if isinstance(one, dict):
            return {key: visit(value) for key, value in one.items()}
        if isinstance(one, list):
            return [visit(value) for value in one]
        return one

    return visit(tree)


def restored(n: int, targets: list[Any], **options: Any) -> int | None:
    """Start the job again, and restore into the targets, in place."""
    pointers = [leaf.data_ptr() for leaf in leaves(targets)]
    with Job(n, **options) as job:
        job.start(same(*targets))
        step = job.restore()
    assert [leaf.data_ptr() for leaf in leaves(targets)] == pointers
    return step


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from leaves(value)


# ------------------------------------------------------------------------------------------- all kinds of states


def sized(*sizes: int) -> dict[str, torch.Tensor]:
    return {f"{number}": torch.randint(256, (size,), dtype=torch.uint8) for number, size in enumerate(sizes)}


def _tied() -> dict[str, Any]:
    weight = torch.randn(64, 32)
    base = torch.randn(100, 100)
    return {"a": weight, "b": weight, "view": base[10:20, 3:50], "column": base[:, 7], "turned": base.t()}


KINDS: dict[str, Callable[[], Any]] = {
    "around a bundle": lambda: sized(*(MIB + extra for extra in (-64, -63, -4, -1, 0, 1, 4, 64)), 5, MIB - 1, 0, 3),
    "one a byte smaller": lambda: sized(MIB - 1),
    "many bundles": lambda: sized(*(MIB // 2 + 1 for _ in range(9))),
    "small": lambda: {f"{n}": torch.randn(n % 7) for n in range(5000)},
    "large": lambda: {"a": torch.randn(5 * MIB + 3), "b": torch.randn(3)},
    "empty": lambda: {"a": torch.empty(0), "b": torch.empty(3, 0), "c": torch.randn(2), "d": torch.empty(0)},
    "only empty": lambda: {"a": torch.empty(0)},
    "views and ties": _tied,
    "dtypes": lambda: {
        "bf16": torch.randn(1001).bfloat16(),
        "complex": torch.randn(77, dtype=torch.complex64),
        "bool": torch.randn(33) > 0,
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "f8": torch.randn(65).to(torch.float8_e4m3fn),
    },
    "no tensors": lambda: {"step": 7, "name": "x", "list": [1, 2.5, None, True]},
    "nothing": dict,
    "nested": lambda: {"list": [torch.randn(3), {"x": torch.randn(2)}], "value": 3},
}


@pytest.mark.parametrize(("kind", "n"), [(kind, n) for kind in KINDS for n in (1, 2) if (kind, n) != ("small", 2)])
def test_every_kind_of_state_comes_back(keeper: Keeper, kind: str, n: int) -> None:
    states = [KINDS[kind]() for _ in range(n)]
    with Job(n) as job:
        job.start(same(*states))
        assert job.restore() is None
        assert job.commit(1) == ["committed"] * n
    targets = [zeros_like(state) for state in states]
    assert restored(n, targets, verify=True) == 1
    assert exact(targets, states)


# ------------------------------------------------------------------------------------------------ steps and values


def test_values_that_grow_do_not_overwrite_the_bytes_behind_them(keeper: Keeper) -> None:
    state: dict[str, Any] = {"log": "", "w": torch.randn(1000)}
    with Job(1) as job:
        job.start(same(state))
        for step in range(1, 6):
            state["log"] = "x" * 60_000 * step
            assert job.commit(step) == ["committed"]
    got: list[Any] = []
    with Job(1, load=got.append, verify=True) as job:
        job.start(same({"log": "", "w": torch.zeros(1000)}))
        assert job.restore() == 5
    assert exact(got[0], state)


def test_a_structure_may_change_between_commits(keeper: Keeper) -> None:
    state: dict[str, Any] = {"w": torch.randn(3)}
    with Job(1) as job:
        job.start(same(state))
        for step in range(1, 12):
            state[f"moment{step}"] = torch.randn(step * 1000)
            if step > 4:
                del state[f"moment{step - 4}"]
            state["w"].add_(1)
            assert job.commit(step) == ["committed"]
    got: list[Any] = []
    with Job(1, load=got.append, verify=True) as job:
        job.start(same({"w": torch.zeros(3)}))
        assert job.restore() == 11
    assert exact(got[0], state)


def test_a_step_is_not_committed_twice_and_steps_do_not_go_back(keeper: Keeper) -> None:
    states = [{"w": torch.full((4,), float(rank))} for rank in range(2)]
    with Job(2) as job:
        job.start(same(*states))
        for step in (1, 2, 3):
            job.commit(step)
        kept = snapshot(states)
        for state in states:
            state["w"].add_(1)
        assert job.commit(3) == ["skipped", "skipped"]
        for error in job.errors(lambda keep: keep.commit(2)):
            assert isinstance(error, ValueError)
            assert "step 2" in str(error)
            assert "step 3" in str(error)
    targets = [{"w": torch.zeros(4)} for _ in range(2)]
    assert restored(2, targets) == 3
    assert exact(targets, kept)


def test_after_restore_steps_begin_anew(keeper: Keeper) -> None:
    """Steps that were committed after the restored one are of another past."""
    state = {"w": torch.zeros(4)}
    with Job(1) as job:
        job.start(same(state))
        for step in range(1, 6):
            state["w"].fill_(step)
            job.commit(step)
        assert job.restore() == 5
        state["w"].fill_(6)
        assert job.commit(6) == ["committed"]
        assert job.restore() == 6
        assert state["w"].eq(6).all()
        assert job.commit(7) == ["committed"]
        with pytest.raises(ValueError, match="step 6 after step 7: steps must rise"):
            job.commit(6)
        assert job.restore() == 7
    target = {"w": torch.zeros(4)}
    assert restored(1, [target]) == 7


def test_every(keeper: Keeper) -> None:
    state = {"w": torch.zeros(4)}
    with Job(1, every=3) as job:
        job.start(same(state))
        for step in range(8):
            state["w"].fill_(step)
            assert job.commit(step) == (["committed"] if step % 3 == 0 else [])
    assert restored(1, [state]) == 6
    assert state["w"].eq(6).all()


# ------------------------------------------------------------------------------------------------- room for slots


def test_a_restart_needs_no_more_memory(home: Home, keeper: Keeper) -> None:  # noqa: F811
    states = [{"w": torch.randn(MIB)} for _ in range(2)]
    with Job(2, slots=3) as job:
        job.start(same(*states))
        job.commit(1)
        held = home.status()["bytes"]
    for start in range(2, 5):
        with Job(2, slots=3, max_bytes=held) as job:
            job.start(same(*states))
            assert job.restore() == (1 if start == 2 else start * 10 - 6)
            for step in range(start * 10, start * 10 + 5):
                for state in states:
                    state["w"].add_(1)
                assert job.commit(step) == ["committed"] * 2
            assert home.status()["bytes"] <= held
            kept = snapshot(states)
    targets = [zeros_like(state) for state in states]
    assert restored(2, targets, slots=3, max_bytes=held) == 44
    assert exact(targets, kept)


def test_what_does_not_fit_is_refused_with_the_arithmetic(keeper: Keeper) -> None:
    with Job(1, max_bytes=10 * MIB, reserve=4 * MIB, slots=3) as job, pytest.raises(TransfuseError) as caught:
        job.start(same({"w": torch.zeros(MIB)}))
    assert "3 slots of" in str(caught.value)
    assert "max_bytes=10.0 MiB" in str(caught.value)
    with Job(1, max_bytes=10 * MIB, slots=3) as job:
        job.start(same({"w": torch.zeros(MIB)}))
        with pytest.raises(TransfuseError, match=r"3 slots of .* = .*max_bytes=10.0 MiB"):
            job.commit(1)


def test_reserved_memory_counts(home: Home, keeper: Keeper) -> None:  # noqa: F811
    state = {"w": torch.zeros(2 * MIB)}
    with Job(1, reserve=8 * MIB, slots=3) as job:
        job.start(same(state))
        held = home.status()["bytes"]
        assert held >= 3 * 8 * MIB
        job.commit(1)
        assert home.status()["bytes"] == held
    with Job(2, reserve=8 * MIB, slots=3, max_bytes=2 * held - 1) as job:
        errors = job.ranks.outcomes(
            lambda rank, pg: transfuse.keep(lambda: state, run="job", group=pg, **job.options), deadline=2 * SECONDS
        )
    refused = [str(outcome.error) for outcome in errors if outcome.error is not None]
    assert refused
    assert all("already, which is more than max_bytes" in text for text in refused)


def test_what_was_reserved_for_ranks_that_do_not_come_again_is_given_back(home: Home, keeper: Keeper) -> None:  # noqa: F811
    state = {"w": torch.zeros(2 * MIB)}
    held = []
    for ranks in (2, 1):
        with Job(ranks, reserve=8 * MIB, slots=3) as job:
            job.start(same(*[state] * ranks))
            held.append(home.status()["bytes"])
    assert held[0] == 2 * held[1]


def test_if_descriptors_run_out_slots_that_were_made_are_given_back(home: Home, keeper: Keeper) -> None:  # noqa: F811
    def descriptors() -> int:
        return sum("transfuse-slot" in os.readlink(one) for one in links() if os.path.islink(one))

    def links() -> list[pathlib.Path]:
        return list(pathlib.Path("/proc/self/fd").iterdir())

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Job(1, slots=200) as job:
        job.start(same({"w": torch.zeros(4)}))
        gc.collect()  # Keepers of other tests.
        before = descriptors()
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(one.name) for one in links()) + 60, hard))
        try:
            with pytest.raises(TransfuseError, match="Too many open files"):
                job.commit(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert descriptors() == before
        assert job.commit(2) == ["committed"]


def test_a_rank_far_ahead_leaves_out_steps_and_loses_none(home: Home, keeper: Keeper) -> None:  # noqa: F811
    states = [{"w": torch.zeros(4)} for _ in range(2)]
    with Job(2, slots=3) as job:
        job.start(same(*states))
        fast, slow = job.keeps
        job.commit(1)
        outcomes = []
        for step in range(2, 8):
            states[0]["w"].fill_(step)
            report = fast.commit(step)
            assert report is not None
            outcomes.append(report.outcome)
        assert outcomes == ["committed", "committed", "skipped", "skipped", "skipped", "skipped"]
        states[1]["w"].fill_(2)
        assert slow.commit(2).outcome == "committed"  # type: ignore[union-attr]
        assert home.status()["confirmed_step"] == 2
        for step in range(3, 20):
            for state in states:
                state["w"].fill_(step + 10)
            job.commit(step + 10)
        newest = home.status()["confirmed_step"]
        assert newest == 29
    targets = [zeros_like(state) for state in states]
    assert restored(2, targets) == 29
    assert exact(targets, states)


def test_readers_of_the_keeper_do_not_use_up_its_slots(home: Home, keeper: Keeper) -> None:  # noqa: F811
    state = {"w": torch.zeros(1000)}
    with Job(1, slots=3) as job:
        job.start(same(state))
        for step in range(1, 12):
            state["w"].fill_(step)
            assert job.commit(step) == ["committed"]
            got = transfuse.fetch(home.status()["address"], token=keeper.token).state
            assert got["w"].eq(step).all()


class Pair(NamedTuple):
    """A class of the job's own, which a keeper's process has not imported."""

    a: torch.Tensor
    b: int


def test_readers_that_a_keeper_cannot_serve_do_not_use_up_its_slots(
    home: Home,  # noqa: F811
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"pair": Pair(torch.zeros(1000), 1)}
    with Job(1, slots=3) as job:
        job.start(same(state))
        for step in range(1, 6):
            state["pair"].a.fill_(step)
            assert job.commit(step) == ["committed"]
            with monkeypatch.context() as patch:
                patch.delitem(sys.modules, Pair.__module__)
                with pytest.raises(PeerRefused, match="is not imported here"):
                    transfuse.fetch(home.status()["address"], token=keeper.token)


@pytest.mark.parametrize("declared", [False, True])
def test_slots_are_used_again_for_another_structure(home: Home, keeper: Keeper, declared: bool) -> None:  # noqa: F811
    """What lay in a slot before is not hashed with the padding between storages: equal ranks still share."""
    first = [sized(*(3000 + number for number in range(40))) for _ in range(2)]
    with Job(2, slots=3, shared=declared) as job:
        job.start(same(*first))
        for step in range(1, 7):
            job.commit(step)
    torch.manual_seed(1)
    small = {f"{number}": torch.randn(1 + number % 5) for number in range(300)}
    states = [snapshot(small) for _ in range(2)]
    with Job(2, slots=3, shared=declared) as job:
        job.start(same(*states))
        for step in range(7, 12):
            for state in states:
                state["0"].add_(1)
            assert job.commit(step) == ["committed"] * 2
            assert home.status()["confirmed_step"] == step
        shared = [keep.report.shared_bytes for keep in job.keeps if keep.report is not None]
        assert sum(shared) > 0
    targets = [zeros_like(state) for state in states]
    assert restored(2, targets, verify=True) == 11
    assert exact(targets, states)


def test_many_values_that_grow(keeper: Keeper) -> None:
    state: dict[str, Any] = {"w": torch.randn(1000)}
    with Job(1) as job:
        job.start(same(state))
        for step in range(1, 6):
            state.update({f"name{number}": "x" * 50 * step for number in range(3000)})
            assert job.commit(step) == ["committed"]
    got: list[Any] = []
    with Job(1, load=got.append, verify=True) as job:
        job.start(same({"w": torch.zeros(1000)}))
        assert job.restore() == 5
    assert exact(got[0], state)


# ---------------------------------------------------------------------------------------------------- who holds what


def newest_is_whole(job: Job, step: int, states: list[Any], **options: Any) -> None:
    """The job is started again: what comes back is this step, exactly."""
    job.__exit__()
    targets = [zeros_like(state) for state in states]
    assert restored(len(states), targets, verify=True, **options) == step
    assert exact(targets, states)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("declared", [False, True])
def test_ranks_of_a_host_share_what_is_equal(home: Home, keeper: Keeper, n: int, declared: bool) -> None:  # noqa: F811
    torch.manual_seed(0)
    base = {f"{number}": torch.randn(MIB) for number in range(4)}
    states = [snapshot(base) for _ in range(n)]
    with Job(n, slots=3, shared=declared) as job:
        job.start(same(*states))
        for step in range(1, 4):
            for state in states:
                state["1"].add_(1)
            job.commit(step)
        reports = [keep.report for keep in job.keeps if keep.report is not None]
        assert sum(report.copied_bytes for report in reports) == 16 * MIB
        # They share the work, too.
        assert max(report.copied_bytes for report in reports) == 16 * MIB // n
        assert home.status()["bytes"] < 3 * (16 * MIB + n * MIB)
        newest_is_whole(job, 3, states)


def test_what_begins_to_differ_is_kept_by_each(home: Home, keeper: Keeper) -> None:  # noqa: F811
    """BatchNorm: equal at first, different later. Every step that counts comes back exactly."""
    states: list[Any] = [{"w": torch.zeros(2 * MIB), "bn": torch.zeros(8)} for _ in range(3)]
    for last in range(1, 7):
        with Job(3) as job:
            job.start(same(*states))
            for step in range(1, last + 1):
                for rank, state in enumerate(states):
                    state["w"].fill_(step)
                    state["bn"].fill_(step * rank if step >= 3 else step)
                job.commit(step)
            confirmed = home.status()["confirmed_step"]
            # The step at which they turn out to differ cannot be kept; the next one can.
            assert confirmed == (2 if last == 3 else last)
        targets = [zeros_like(state) for state in states]
        assert restored(3, targets, verify=True) == confirmed
        for rank, state in enumerate(targets):
            assert state["w"].eq(confirmed).all()
            assert state["bn"].eq(confirmed * rank if confirmed >= 3 else confirmed).all()


@pytest.mark.parametrize("declared", [False, True])
def test_one_rank_changes_its_structure(
    home: Home,  # noqa: F811
    keeper: Keeper,
    declared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank no longer has what another one shares with it: the other keeps its own, and steps are whole again."""
    # Nobody waits for a rank that has come to the step without asking for a layout.
    monkeypatch.setattr("transfuse._keeper.client.COMMIT_PARTNER_SECONDS", 10 * SECONDS)
    states: list[dict[str, Any]] = [{"a": torch.randn(MIB), "b": torch.randn(MIB)} for _ in range(2)]
    states[1] = snapshot(states[0])
    with Job(2, shared=declared) as job:
        job.start(same(*states))
        job.commit(1)
        # Rank 0 holds one of the two for both.
        for name in ("a", "b"):
            states[0][name] = torch.randn(MIB + 1)
        for step in range(2, 6):
            for state in states:
                state["a"].add_(1)
            job.commit(step)
        assert home.status()["confirmed_step"] == 5
        newest_is_whole(job, 5, states)


def test_own_belongs_to_the_rank(keeper: Keeper) -> None:
    states = [{"w": torch.zeros(4)} for _ in range(2)]
    owned = [{"rng": torch.tensor([rank]), "at": rank} for rank in range(2)]
    with Job(2) as job:
        job.start(same(*states), [{"rank_state": lambda rank=rank: owned[rank]} for rank in range(2)])
        job.commit(1)
    got: list[Any] = [[], []]
    with Job(2) as job:
        job.start(same(*states), [{"load_rank_state": got[rank].append} for rank in range(2)])
        assert job.restore() == 1
        assert exact(dict(job.keeps[0].rank_states), {0: owned[0]}) or exact(
            dict(job.keeps[0].rank_states), dict(enumerate(owned))
        )
    assert exact(got, [[owned[0]], [owned[1]]])
    with Job(1) as job:
        job.start(same(states[0]), [{"load_rank_state": got[0].append}])
        assert job.restore() == 1
        assert exact(dict(job.keeps[0].rank_states), dict(enumerate(owned)))
    assert len(got[0]) == 1, "the number of ranks has changed: the caller chooses"


class Note:
    """An object that only pickle can carry."""

    text = "x"


@pytest.mark.parametrize("given", ["state", "rank_state"])
def test_an_object_that_restore_would_refuse_is_refused_by_the_first_commit(keeper: Keeper, given: str) -> None:
    """It was committed without a word, and no restart could have it."""
    found: list[dict[str, Any]] = []
    options: dict[str, Any] = {"load": found.append, "load_rank_state": found.append}
    tree = {"more": [{"note": Note()}], "w": torch.ones(3)}
    states = same({"w": torch.ones(3)} if given == "rank_state" else tree)
    if given == "rank_state":
        options[given] = lambda: tree
    with Job(1) as job:
        job.start(states, [options])
        (error,) = job.errors(lambda keep: keep.commit(1))
        assert isinstance(error, transfuse.UnsupportedLeaf)
        assert error.path == "['more'][0]['note']"
        assert f"a Python object in {given}, test_commit.Note, which restore() would refuse" in str(error)
        assert "state_dict() and load_state_dict()" in str(error)
        assert "keep(weights_only_objects=True)" in str(error)
        tree["more"] = [1]
        assert job.commit(2) == ["committed"]
        tree["more"] = [Note()]
        assert isinstance(job.errors(lambda keep: keep.commit(3))[0], transfuse.UnsupportedLeaf), "also later"
    options["weights_only_objects"] = True
    with torch.serialization.safe_globals([Note]):
        with Job(1) as job:
            job.start(states, [options])
            assert job.restore() == 2
            assert job.commit(3) == ["committed"]
        with Job(1) as job:
            job.start(states, [options])
            (kept,) = job.all(lambda keep: keep.look())
            assert kept is not None
            assert job.restore() == 3
    arrived = [each["more"][0] for each in (*found, *kept.rank_states.values()) if "more" in each]
    assert [type(one) for one in arrived] == ([int, Note] if given == "state" else [int, Note, Note])


# ------------------------------------------------------------------------------------------ while training goes on


class Gate:
    """Holds copies that training does not wait for, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.waits = threading.Event(), threading.Event()
        self.open.set()
        copy = copying.copy

        def gated(*args: Any, **options: Any) -> list[bytes]:
            if threading.current_thread().name == "transfuse-commit":
                self.waits.set()
                assert self.open.wait(SECONDS)
            return copy(*args, **options)

        monkeypatch.setattr(copying, "copy", gated)

    def shut(self) -> None:
        self.open.clear()
        self.waits.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def forward(model: torch.nn.Module) -> None:
    model(torch.randn(8, 512)).square().mean().backward()


def test_training_goes_on_while_a_step_is_copied(home: Home, keeper: Keeper, gate: Gate) -> None:  # noqa: F811
    model, optimizer, state = training()
    with Job(1) as job:
        job.start([state])
        (keep,) = job.keeps
        outcomes = []
        for step in range(1, 9):
            gate.shut()
            forward(model)
            # What runs outside mutating() does not wait; mutating() does.
            opening = threading.Timer(0.02, gate.open.set)
            opening.start()
            with keep.mutating():
                assert keep.report is None or keep.report.outcome in ("committed", "dropped")
                optimizer.step()
            kept = snapshot(state())
            opening.join()
            gate.shut()
            report = keep.commit(step, wait=False)
            assert report is not None
            outcomes.append(report)
        assert (outcomes[-1].outcome, outcomes[-1].why) == ("pending", "the copy goes on")
        assert outcomes[-1].line().startswith("step 8 pending: the copy goes on; copied ")
        gate.open.set()
        # Every copy that went on meanwhile waits for its gate; the first one is made at once.
        assert gate.waits.is_set()
        with keep.mutating():
            pass
        assert [report.outcome for report in outcomes].count("dropped") <= 1
        assert outcomes[-1].outcome == "committed"
        assert home.status()["confirmed_step"] == 8
    got: list[Any] = []
    with Job(1, load=got.append, verify=True) as job:
        job.start([training()[2]])
        assert job.restore() == 8
    assert exact(got[0], kept)


def test_what_changes_outside_mutating_is_never_torn(home: Home, keeper: Keeper, gate: Gate) -> None:  # noqa: F811
    """It drops the step at which that is found out, and is copied at once from then on."""
    state = {"w": torch.zeros(MIB), "ema": torch.zeros(MIB)}
    with Job(1) as job:
        job.start(same(state))
        (keep,) = job.keeps
        outcomes = []
        for step in range(1, 7):
            with keep.mutating():
                state["w"].fill_(step)
            gate.shut()
            report = keep.commit(step, wait=False)
            if step >= 3:
                state["ema"].fill_(step)
            gate.open.set()
            keep._join()
            assert report is not None
            outcomes.append(report.outcome)
            if report.outcome == "dropped":
                assert "['ema'] changed outside mutating()" in report.why
        assert outcomes == ["committed", "committed", "dropped", "committed", "committed", "committed"]
        assert home.status()["confirmed_step"] == 6
    target = zeros_like(state)
    assert restored(1, [target], verify=True) == 6
    assert target["w"].eq(6).all()
    assert target["ema"].eq(5).all()


def test_what_always_changes_outside_mutating_is_seen_before_the_first_copy(
    home: Home,  # noqa: F811
    keeper: Keeper,
    gate: Gate,
) -> None:
    model, optimizer, state = training()
    with Job(1) as job:
        job.start([state])
        (keep,) = job.keeps
        for step in range(1, 6):
            forward(model)
            with keep.mutating():
                optimizer.step()
            gate.shut()
            report = keep.commit(step, wait=False)
            forward(model)
            gate.open.set()
            keep._join()
            assert report is not None
            assert report.outcome == "committed", report.line()


def test_without_mutating_everything_is_copied_at_once(home: Home, keeper: Keeper, gate: Gate) -> None:  # noqa: F811
    state = {"w": torch.zeros(MIB)}
    gate.shut()
    with Job(1) as job:
        job.start(same(state))
        for step in range(1, 5):
            state["w"].fill_(step)
            assert job.commit(step, wait=False) == ["committed"]
            assert home.status()["confirmed_step"] == step
    target = zeros_like(state)
    assert restored(1, [target]) == 4
    assert target["w"].eq(4).all()


def test_own_is_copied_at_once(home: Home, keeper: Keeper, gate: Gate) -> None:  # noqa: F811
    state, own = {"w": torch.zeros(MIB)}, {"rng": torch.zeros(5000, dtype=torch.uint8)}
    got: list[Any] = []
    with Job(1, rank_state=lambda: own, load_rank_state=got.append) as job:
        job.start(same(state))
        (keep,) = job.keeps
        for step in range(1, 5):
            with keep.mutating():
                state["w"].fill_(step)
            own["rng"].fill_(step)
            gate.shut()
            keep.commit(step, wait=False)
            own["rng"].fill_(99)
            gate.open.set()
            keep._join()
        assert home.status()["confirmed_step"] == 4
    with Job(1, rank_state=lambda: own, load_rank_state=got.append) as job:
        job.start(same(state))
        assert job.restore() == 4
    assert got[0]["rng"].eq(4).all()


def test_a_state_that_outgrows_its_room_is_no_longer_kept_and_training_goes_on(
    home: Home,  # noqa: F811
    keeper: Keeper,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = {"w": torch.ones(MIB)}
    with Job(1, slots=3, max_bytes=14 * MIB) as job:
        job.start(same(state))
        assert job.commit(1) == ["committed"]
        state["more"] = torch.ones(MIB)
        for step in (2, 3):
            assert job.commit(step) == ["skipped"]
            assert "max_bytes=14.0 MiB" in job.keeps[0].report.why  # type: ignore[union-attr]
        assert sum("is not kept any more" in record.getMessage() for record in caplog.records) == 1
        del state["more"]
        assert job.commit(4) == ["committed"]
        newest_is_whole(job, 4, [state])


def test_restore_waits_for_a_copy_that_goes_on(home: Home, keeper: Keeper, gate: Gate) -> None:  # noqa: F811
    state = {"w": torch.zeros(MIB)}
    with Job(1) as job:
        job.start(same(state))
        (keep,) = job.keeps
        for step in (1, 2):
            with keep.mutating():
                state["w"].fill_(step)
            gate.shut()
            keep.commit(step, wait=False)
            threading.Timer(0.05, gate.open.set).start()
        assert keep.restore() == 2
        assert keep.report is not None
        assert keep.report.outcome == "committed"
        assert state["w"].eq(2).all()


def test_a_report_says_all_that_training_waited_for(home: Home, keeper: Keeper, gate: Gate) -> None:  # noqa: F811
    """With wait=False it is told when training has waited for the copy, not before."""
    state, told = {"w": torch.zeros(MIB)}, []
    with Job(1, on_report=lambda report: told.append((report.step, dict(report.stalled)))) as job:
        job.start(same(state))
        (keep,) = job.keeps
        for step in (1, 2, 3):
            with keep.mutating():
                state["w"].fill_(step)
            gate.shut()
            keep.commit(step, wait=False)
            assert [one for one, _ in told] == list(range(1, max(2, step)))  # The first is copied at once.
            if step > 1:
                threading.Timer(0.1, gate.open.set).start()
        keep.commit(4, wait=False)  # Without mutating() the next commit waits, and its own report says so.
        assert [one for one, _ in told] == [1, 2, 3, 4]
    stalls = dict(told)
    assert stalls[2]["the copy"] >= 0.05
    assert "the copy" not in stalls[3]
    assert stalls[4]["the copy before"] >= 0.05


def test_to_give_memory_back_keeps_no_worker_waiting(
    home: Home,  # noqa: F811
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To unmap tens of GiB takes longer than a worker waits for an answer."""
    close, may_close, closes = SlotFile.close, threading.Event(), threading.Event()

    def slow(file: SlotFile) -> None:
        closes.set()
        assert may_close.wait(SECONDS)
        close(file)

    monkeypatch.setattr(SlotFile, "close", slow)
    states = [{"w": torch.ones(MIB)}, {"w": torch.zeros(MIB)}]
    with Job(2) as job:
        job.start(same(*states))
        assert job.commit(1) == ["committed"] * 2
        states[0]["more"] = torch.ones(4 * MIB)
        one, other = job.keeps
        other.commit(2)
        grows = threading.Thread(target=one.commit, args=(2,))
        grows.start()  # Its new slots wait for the memory of the old ones. Nobody else does.
        assert closes.wait(SECONDS)
        report = other.commit(3)
        assert report is not None
        assert report.outcome == "committed", report.why
        assert home.status()["attached"] == [0, 1]
        may_close.set()
        grows.join(SECONDS)
        assert one.report is not None
        assert one.report.outcome == "committed"
