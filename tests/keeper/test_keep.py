"""``keep`` and ``restore``: all ranks get the same step, exactly and in place; or the same error, and nothing else."""

from __future__ import annotations

import errno
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import transfuse
from keeping import SECONDS, Home, Job, exact, home, keepers_in, same, snapshot, threaded, until  # noqa: F401
from transfuse._errors import StateError, TransfuseError
from transfuse._keeper import allotment, client, restored, restoring, runs
from transfuse._keeper.attach import LOG_NAME, SOCKET_NAME
from transfuse._keeper.files import HELD_NAME, TOKEN_NAME
from transfuse._keeper.process import Keeper
from transfuse.cli.keepers import list_keepers
from transfuse.testing.ranks import ProcessPool, freeze

pytestmark = pytest.mark.usefixtures("threaded")


@pytest.fixture
def keeper(home: Home) -> Keeper:  # noqa: F811
    return home.start()


def state_of(rank: int, step: int) -> dict[str, Any]:
    """A state that says whose it is, and of which step."""
    return {"shared": torch.full((1000,), float(step)), "bn": torch.full((7,), 100.0 * rank + step)}


def commit(n: int, *steps: int, own: bool = False, make: Callable[[int, int], Any] = state_of, **options: Any) -> None:
    """A job that commits these steps, and is killed."""
    with Job(n, **options) as job:
        now = [make(rank, steps[0]) for rank in range(n)]
        owns = [{"rank_state": lambda rank=rank: {"rank": rank}} if own else {} for rank in range(n)]
        job.start(same(*now), owns)
        for step in steps:
            for rank in range(n):
                for name, value in make(rank, step).items():
                    if isinstance(value, torch.Tensor):
                        now[rank][name].copy_(value)
                    else:
                        now[rank][name] = value
            assert job.commit(step) == ["committed"] * n


def test_the_first_start_touches_nothing_and_asks_for_no_state(keeper: Keeper) -> None:
    def state() -> Any:
        raise AssertionError("get_state_dict on a fresh optimizer runs a step")

    with Job(2) as job:
        job.start([state, state])
        assert job.restore() is None
        assert job.restore(missing_ok=True) is None


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_rank_gets_its_own_in_place(keeper: Keeper, n: int) -> None:
    commit(n, 1, 2, 3)
    for start in range(2):
        targets = [state_of(99, 0) for _ in range(n)]
        pointers = [[leaf.data_ptr() for leaf in target.values()] for target in targets]
        with Job(n) as job:
            job.start(same(*targets))
            for _ in range(start + 1):
                for target in targets:
                    target["bn"].zero_()
                assert job.restore() == 3
                assert exact(targets, [state_of(rank, 3) for rank in range(n)])
        assert pointers == [[leaf.data_ptr() for leaf in target.values()] for target in targets]


def test_a_leaf_without_a_place_is_named_and_nothing_is_touched_on_any_rank(keeper: Keeper) -> None:
    commit(3, 1, 2)
    targets: list[Any] = [state_of(9, 0) for _ in range(3)]
    del targets[1]["bn"]
    before = snapshot(targets)
    with Job(3) as job:
        job.start(same(*targets))
        errors = job.errors(lambda keep: keep.restore())
        assert len({str(error) for error in errors}) == 1
        assert all(isinstance(error, StateError) for error in errors)
        text = str(errors[0])
        assert "rank 1: 1 leaves cannot land" in text
        assert "['bn']" in text
        assert "['shared']" not in text
        assert "steps 2, 1: " in text
        assert exact(targets, before)
        assert job.restore(missing_ok=True) is None
        assert exact(targets, before)
        # The slots are whole, and the connection as well.
        targets[1]["bn"] = torch.zeros(7)
        assert job.restore() == 2
        assert exact(targets, [state_of(rank, 2) for rank in range(3)])


def test_values_that_differ_need_load(keeper: Keeper) -> None:
    def make(rank: int, step: int) -> dict[str, Any]:
        return {"w": torch.full((3,), float(step)), "lr": 0.1 * step, "name": "same"}

    commit(2, 1, 2, make=make)
    targets = [{**make(rank, 1), "lr": 0.0} for rank in range(2)]
    before = snapshot(targets)
    with Job(2) as job:
        job.start(same(*targets))
        errors = job.errors(lambda keep: keep.restore())
        assert len({str(error) for error in errors}) == 1
        assert "['lr']" in str(errors[0])
        assert "['name']" not in str(errors[0])
        assert "load=" in str(errors[0])
        assert exact(targets, before)
    got: list[Any] = []
    with Job(2, load=got.append) as job:
        job.start(same(*targets))
        assert job.restore() == 2
    assert exact(got, [make(0, 2)] * 2)
    # Without load= a step whose values are the target's own can be restored: here the older one.
    targets = [make(rank, 1) for rank in range(2)]
    with Job(2) as job:
        job.start(same(*targets))
        assert job.restore() == 1


@pytest.mark.parametrize("fails", ["state_dict", "shape", "load", "load_rank_state"])
def test_if_one_rank_fails_all_do(keeper: Keeper, fails: str) -> None:
    commit(3, 1, 2, own=True)
    targets: list[Any] = [state_of(9, 0) for _ in range(3)]
    if fails == "shape":
        targets[2]["bn"] = torch.zeros(8)
    before = snapshot(targets)

    def fail(*_: Any) -> Any:
        raise RuntimeError("this is out of order")

    states = same(*targets)
    if fails == "state_dict":
        states[2] = fail
    with Job(3) as job:
        job.start(states, [{}, {}, {fails: fail} if fails in ("load", "load_rank_state") else {}])
        errors = job.errors(lambda keep: keep.restore())
        assert all(error is not None for error in errors)
        if fails in ("state_dict", "shape"):
            assert len({str(error) for error in errors}) == 1
            assert exact(targets, before)
        assert all(("out of order" in str(error)) or fails == "shape" for error in errors)
        if fails in ("load", "load_rank_state"):
            assert isinstance(errors[2], RuntimeError)
            assert "rank 2" in str(errors[0])
            assert "End this process" in str(errors[0])


def test_a_rank_that_cannot_map_its_slots_tells_the_others(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(2, 1)
    targets = [state_of(9, 0) for _ in range(2)]
    before = snapshot(targets)

    def describe_slots(rank: int, slots: Any) -> Any:
        if rank == 1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return restored.describe_slots(rank, slots)

    monkeypatch.setattr(restoring, "describe_slots", describe_slots)
    with Job(2, timeout=5.0) as job:
        job.start(same(*targets))
        errors = job.errors(lambda keep: keep.restore())
        assert len({str(error) for error in errors}) == 1, errors
        assert "step 1: rank 1: OSError: [Errno 12]" in str(errors[0])
        assert exact(targets, before)


def flip(keeper: Keeper, rank: int, step: int) -> None:
    """Damage one byte of a kept state."""
    for kept in keeper.books.all():
        if kept.label is not None and kept.label.step == step and kept.rank == rank:
            needle = torch.full((1,), 100.0 * rank + step).numpy().tobytes()
            at = bytes(kept.file.memory).rindex(needle)
            kept.file.memory[at] ^= 1


def test_a_damaged_step_is_found_and_the_older_one_is_restored(keeper: Keeper) -> None:
    commit(2, 1, 2, 3)
    flip(keeper, 1, 3)
    targets = [state_of(9, 0) for _ in range(2)]
    with Job(2, verify=True) as job:
        job.start(same(*targets))
        assert job.restore() == 2
        assert exact(targets, [state_of(rank, 2) for rank in range(2)])
        # What is committed now counts, though a higher step is there.
        assert job.commit(3) == ["committed"] * 2
    flip(keeper, 0, 1)
    with Job(2, verify=True) as job:
        job.start(same(*targets))
        assert job.restore() == 3
        assert exact(targets, [state_of(rank, 2) for rank in range(2)])


# ------------------------------------------------------------------------------------- other numbers of ranks


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4), (4, 1), (1, 3)])
@pytest.mark.parametrize("shared", [False, True])
def test_equal_leaves_go_to_any_number_of_ranks(keeper: Keeper, before: int, now: int, shared: bool) -> None:
    def make(rank: int, step: int) -> dict[str, Any]:
        return {"w": torch.full((300_000,), float(step)), "b": torch.full((3,), -1.0 * step), "n": 5}

    commit(before, 1, 2, make=make, own=True, shared=shared)
    targets = [make(0, 0) for _ in range(now)]
    with Job(now) as job:
        job.start(same(*targets))
        assert job.restore() == 2
        assert exact(targets, [make(0, 2)] * now)
        assert all(dict(keep.rank_states) == {rank: {"rank": rank} for rank in range(before)} for keep in job.keeps)
        for step in range(3, 9):
            assert job.commit(step) == ["committed"] * now
    with Job(before) as job:
        targets = [make(0, 0) for _ in range(before)]
        job.start(same(*targets))
        assert job.restore() == 8
        assert exact(targets, [make(0, 2)] * before)


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 3), (2, 1)])
def test_leaves_that_differed_are_named_if_the_number_of_ranks_changes(keeper: Keeper, before: int, now: int) -> None:
    commit(before, 1, 2)
    targets = [state_of(9, 0) for _ in range(now)]
    untouched = snapshot(targets)
    with Job(now) as job:
        job.start(same(*targets))
        errors = job.errors(lambda keep: keep.restore())
        assert len({str(error) for error in errors}) == 1
        text = str(errors[0])
        assert "['bn']" in text
        assert "['shared']" not in text
        assert f"the {before} ranks" in text
        assert "rank_state=" in text
        assert exact(targets, untouched)


def test_values_that_differed_are_named_too(keeper: Keeper) -> None:
    def make(rank: int, step: int) -> dict[str, Any]:
        return {"w": torch.full((3,), float(step)), "seed": rank, "step": step}

    commit(2, 1, make=make)
    got: list[Any] = []
    with Job(1, load=got.append) as job:
        job.start(same(make(0, 0)))
        with pytest.raises(StateError, match="seed"):
            job.restore()
    assert got == []


def test_a_rank_never_gets_what_belonged_to_another_one(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 has committed a step: that is no state for rank 1."""
    monkeypatch.setattr("transfuse._keeper.client.COMMIT_PARTNER_SECONDS", 0.2)
    with Job(2) as job:
        job.start(same(*[state_of(rank, 5) for rank in range(2)]))
        job.keeps[0].commit(5)
    targets = [state_of(9, 0) for _ in range(2)]
    before = snapshot(targets)
    with Job(2) as job:
        job.start(same(*targets))
        # No step was ever complete, so this is a first start.
        assert job.restore() is None
        assert exact(targets, before)
        assert job.commit(6) == ["committed"] * 2
        assert job.restore() == 6


# ------------------------------------------------------------------------------------------------ several jobs


def test_two_runs_never_meet(home: Home) -> None:  # noqa: F811
    for name in ("a", "b"):
        home.start(name)
    commit(1, 1, run="a")
    commit(1, 7, run="b")
    for name, step in (("a", 1), ("b", 7)):
        target = state_of(9, 0)
        with Job(1, run=name) as job:
            job.start(same(target))
            assert job.restore() == step
        assert exact(target, state_of(0, step))


def test_one_process_may_keep_one_thing_after_the_other(home: Home) -> None:  # noqa: F811
    """The keeper of a run that is closed ends, and the next of the same name gets another, at once."""
    for start in range(3):
        keeper = home.start()
        state = state_of(0, start)
        with Job(1) as job:
            job.start(same(state))
            assert job.restore() is None
            job.commit(start)
            job.all(lambda keep: keep.close())
        assert home.ended(keeper)
    assert list(home.base.iterdir()) == []


def test_a_rank_is_attached_once(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfuse._keeper.process.KEEPER_CHANGE_SECONDS", 0.2)
    with Job(1) as job, Job(1) as second:
        job.start(same(state_of(0, 0)))
        with pytest.raises(TransfuseError, match="rank 0 of this run is attached already, by this process"):
            second.start(same(state_of(0, 0)))
        assert job.commit(1) == ["committed"]


def test_commits_leak_nothing(home: Home, keeper: Keeper) -> None:  # noqa: F811
    def used() -> tuple[int, int, int]:
        descriptors = len(list(pathlib.Path("/proc/self/fd").iterdir()))
        maps = pathlib.Path("/proc/self/maps").read_text().count("transfuse-slot")
        return descriptors, maps, threading.active_count()

    states, first = [state_of(rank, 0) for rank in range(2)], used()
    with Job(2) as job:
        job.start(same(*states))

        def some(first: int) -> None:
            for step in range(first, first + 50):
                for state in states:
                    state["shared"].add_(1)
                job.commit(step, wait=step % 2 == 0)
                with job.keeps[0].mutating(), job.keeps[1].mutating():
                    pass

        some(0)
        before = used()
        some(50)
        until(lambda: all(now <= then for now, then in zip(used(), before, strict=True)))
        job.all(lambda keep: keep.close())
    assert home.ended(keeper)
    # What is left are the keeper's own, which end with its process.
    until(lambda: used()[1] <= first[1] + len(list(keeper.books.all())))
    assert list(home.base.iterdir()) == []


# ------------------------------------------------------------------------------- a keeper in a process of its own


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost keeper is found lost, and looked for, at once."""
    monkeypatch.setattr(client, "KEEP_REVIVE_SECONDS", 0.05)


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def commit_until(job: Job, step: int, outcome: str) -> int:
    """Commit one step after the other until one has this outcome on all ranks; return it."""

    def one() -> bool:
        nonlocal step
        step += 1
        return job.commit(step) == [outcome] * job.n

    until(one)
    return step


@pytest.mark.processes
@pytest.mark.usefixtures("impatient")
def test_a_killed_keeper_costs_a_warning(home: Home, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2) as job:
        job.start(same(*states))
        assert job.commit(1) == ["committed"] * 2
        (pid,) = keepers_in(home.base)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not keepers_in(home.base))
        assert job.commit(2) == ["skipped"] * 2
        assert warnings(caplog, "goes on without the keeper") == 2
        until(lambda: warnings(caplog, "has found the keeper of its host again") == 2)
        # Who starts again now does not begin from nothing: this run has held steps.
    with Job(2) as job:
        job.start(same(*states))
        errors = job.errors(lambda keep: keep.restore())
        assert all(isinstance(error, StateError) for error in errors), errors
        assert job.restore(missing_ok=True) is None
        step = commit_until(job, 2, "committed")
    with Job(2) as job:
        job.start(same(*states))
        assert job.restore() == step
        job.all(lambda keep: keep.close())
    until(lambda: not keepers_in(home.base) and not list(home.base.iterdir()))
    until(lambda: not zombies())


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_keeper_that_is_lost_before_the_restore_is_no_reason_to_begin_anew(keeper: Keeper, is_frozen: bool) -> None:
    """Nobody can say then that the run has never kept a step."""
    commit(2, 1, 2)
    targets = [state_of(9, 0) for _ in range(2)]
    before = snapshot(targets)
    with Job(2, timeout=4.0 if is_frozen else SECONDS) as job, ExitStack() as stack:
        job.start(same(*targets))
        if is_frozen:
            stack.enter_context(keeper._changed)  # It does not answer.
        else:
            link = job.keeps[0]._link
            assert link is not None
            link.close()
        errors = job.errors(lambda keep: keep.restore())
        assert all(isinstance(error, StateError) for error in errors), errors
        (text,) = {str(error) for error in errors}
        assert "it is not known whether this run has kept steps" in text
        silent = f"process {os.getpid()} has not answered within 2 s: it was stopped" if is_frozen else ""
        assert f"host 0: the connection to the keeper broke: {silent}" in text
        assert job.restore(missing_ok=True) is None
        assert exact(targets, before)


@pytest.mark.usefixtures("keeper")
def test_another_model_is_named_also_if_some_leaves_differed_between_ranks() -> None:
    """Statistics of BatchNorm, say."""
    with Job(2) as job:
        job.start(same(*({"w": torch.ones(4), "mean": torch.full((2,), float(rank))} for rank in range(2))))
        assert job.commit(1) == ["committed"] * 2
    with Job(2) as job:
        job.start(same(*({"w": torch.zeros(6), "mean": torch.zeros(2)} for _ in range(2))))
        errors = job.errors(lambda keep: keep.restore())
    (text,) = {str(error) for error in errors}
    assert re.search(r"ranks 0, 1: TargetMismatch: .*\['w'\]: shape: source \(4,\), target \(6,\)", text, re.S), text
    assert "1 leaves differed between the 2 ranks that committed them: ['mean']" in text
    assert "start the missing hosts" not in text


def test_a_rank_that_cannot_open_a_slot_tells_the_others(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(2, 1, 2)
    targets = [state_of(9, 0) for _ in range(2)]
    before = snapshot(targets)

    def describe_slots(rank: int, *args: Any) -> Any:
        if rank == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return restored.describe_slots(rank, *args)

    monkeypatch.setattr(restoring, "describe_slots", describe_slots)
    with Job(2) as job:
        job.start(same(*targets))
        errors = job.errors(lambda keep: keep.restore())
        assert all(isinstance(error, StateError) for error in errors), errors
        (text,) = {str(error) for error in errors}
        assert "rank 1: OSError: [Errno 24] Too many open files" in text
        assert exact(targets, before)


@pytest.mark.processes
def test_a_keeper_that_does_not_answer_is_not_taken_for_one_that_holds_nothing(home: Home) -> None:  # noqa: F811
    """It is killed between ``keep()`` and ``restore()``: the job must not begin at 0."""
    states = [state_of(rank, 0) for rank in range(2)]
    commit(2, 1, 2)
    with Job(2) as job:
        job.start(same(*states))
        (pid,) = keepers_in(home.base)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not keepers_in(home.base))
        before = snapshot(states)
        errors = job.errors(lambda keep: keep.restore())
        assert all(isinstance(error, StateError) for error in errors), errors
        assert len({str(error) for error in errors}) == 1
        assert "it is not known whether this run has kept steps" in str(errors[0])
        assert "host 0: " in str(errors[0])
        assert job.restore(missing_ok=True) is None
        assert exact(states, before)


@pytest.mark.processes
@pytest.mark.parametrize("early", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_keeper_that_was_killed_hears_of_every_close(home: Home, early: int) -> None:  # noqa: F811
    """Ranks close before it is killed, and while nobody has found it again: it comes back, and ends."""
    states = [state_of(rank, 0) for rank in range(3)]
    with Job(3) as job:
        job.start(same(*states))
        assert job.commit(1) == ["committed"] * 3
        for keep in job.keeps[:early]:
            keep.close()
        (pid,) = keepers_in(home.base)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not keepers_in(home.base))
        report = job.keeps[2].commit(2)  # This rank misses it, and looks for it every 5 s. The others have not noticed.
        assert report is not None
        assert report.outcome == "skipped"
        job.all(lambda keep: keep.close())
    until(lambda: not keepers_in(home.base) and not list(home.base.iterdir()))


@pytest.mark.usefixtures("impatient")
def test_ranks_that_find_their_keeper_again_one_after_the_other_still_share(home: Home, keeper: Keeper) -> None:  # noqa: F811
    states = [{"w": torch.ones(1 << 20)} for _ in range(2)]
    with Job(2) as job:
        job.start(same(*states))
        assert job.commit(1) == ["committed"] * 2
        keeper.stop()
        assert home.ended(keeper)
        for worker in list(keeper._workers.values()):
            worker.link.close()  # As the end of its process does.
        home.start()
        first, second = job.keeps
        step = 1

        def is_alone() -> bool:
            nonlocal step
            step += 1
            report = first.commit(step)
            return report is not None and report.why == "ranks [1] of this host do not commit this step"

        until(is_alone)
        assert first.commit(step + 1) is not None
        assert second.commit(step + 1) is not None  # It has not missed its keeper before.
        commit_until(job, step + 1, "committed")
        copied = sum(keep.report.copied_bytes for keep in job.keeps if keep.report is not None)
        assert copied == 4 << 20
        assert home.status()["bytes"] < 4 * (5 << 20)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("has_kept", [True, False])
def test_a_keeper_that_comes_back_and_finds_no_room_costs_a_warning_and_no_training(
    home: Home,  # noqa: F811
    keeper: Keeper,
    has_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel has ended it because memory ran out, and training has taken what was free since then."""
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2) as job:
        job.start(same(*states))
        if has_kept:
            assert job.commit(1) == ["committed"] * 2
        keeper.stop()
        assert home.ended(keeper)
        for worker in list(keeper._workers.values()):
            worker.link.close()  # As the end of its process does.
        monkeypatch.setattr(allotment, "free_memory", lambda: 0)
        home.start()
        step = 1

        def is_refused() -> bool:
            nonlocal step
            step += 1
            assert job.commit(step) == ["skipped"] * 2
            return all("of memory are free" in keep.report.why for keep in job.keeps if keep.report is not None)

        until(is_refused)
        assert job.commit(step + 1) == ["skipped"] * 2
        assert warnings(caplog, "is not kept any more, until there is room") == 2
        assert warnings(caplog, "goes on without the keeper") == 2
        monkeypatch.undo()
        monkeypatch.setenv("TRANSFUSE_KEEPER_DIR", str(home.base))
        step = commit_until(job, step + 1, "committed")
    assert home.status()["confirmed_step"] == step


def zombies() -> list[int]:
    """Children of this process that have ended and that nobody has waited for."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z" and int(parent) == os.getpid():
                    found.append(int(entry.name))
    return found


@pytest.mark.processes
@pytest.mark.usefixtures("impatient")
def test_a_keeper_is_frozen_and_shouted_at_and_its_socket_is_deleted(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2) as job:
        job.start(same(*states))
        (pid,) = keepers_in(home.base)
        path = str(home.directory("job") / SOCKET_NAME)
        chance = random.Random(0)
        for size in (0, 1, 7, 8, 9, 100, 100_000):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
                with suppress(OSError):
                    sock.sendall(chance.randbytes(size))
        with socket.socket(socket.AF_UNIX) as sock:
            # A frame that is never complete.
            sock.connect(path)
            sock.sendall(b"\xff\xff\x00\x00\x00\x00\x00\x00" + bytes(100))
            assert job.commit(1) == ["committed"] * 2
        monkeypatch.setattr(client, "COMMIT_ANSWER_SECONDS", 0.5)
        freeze(pid)
        assert job.commit(2) == ["skipped"] * 2
        assert warnings(caplog, "goes on without the keeper") == 2
        os.kill(pid, signal.SIGCONT)
        monkeypatch.setattr(client, "COMMIT_ANSWER_SECONDS", SECONDS)
        step = commit_until(job, 2, "committed")
        assert keepers_in(home.base) == [pid]
        # By a cleaner of /tmp. At once: the keeper makes again what is gone while the rest is being deleted.
        shutil.rmtree(pathlib.Path(path).parent.rename(home.base / "gone"))
        assert job.commit(step + 1) == ["committed"] * 2
    until(lambda: pathlib.Path(path).exists())
    until(lambda: (pathlib.Path(path).parent / HELD_NAME).exists())
    assert [run.name for run in runs.list_runs()] == ["job"]
    with Job(2) as job:
        job.start(same(*states))
        assert job.restore() == step + 1
        assert keepers_in(home.base) == [pid]


@pytest.mark.processes
def test_a_keeper_runs_without_torch_until_somebody_reads_from_it(home: Home) -> None:  # noqa: F811
    commit(2, 1, 2)
    (pid,) = keepers_in(home.base)
    maps = pathlib.Path(f"/proc/{pid}/maps")
    targets = [state_of(9, 0) for _ in range(2)]
    with Job(2) as job:
        job.start(same(*targets))
        assert job.restore() == 2
        assert exact(targets, [state_of(rank, 2) for rank in range(2)])
        assert job.commit(3) == ["committed"] * 2
    assert "libtorch" not in maps.read_text()
    token = (home.directory("job") / TOKEN_NAME).read_text()
    fetched = transfuse.fetch(home.status()["address"], token=token, timeout=SECONDS)
    assert exact(fetched.state, targets[0])
    assert "libtorch" in maps.read_text()


JOB = """
import os, time, torch, torch.distributed as dist, transfuse
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
keep = transfuse.keep(lambda: {"w": torch.ones(3)}, linger=0.5)
keep.commit(1)
child = os.fork()
if not child:
    # A data loader's process, which has inherited the connection to the keeper, and is left behind.
    print(os.getpid(), flush=True)
    time.sleep(1000)
os._exit(0)
"""


@pytest.mark.processes
@pytest.mark.parametrize("name", ["", pytest.param("a name", marks=pytest.mark.soak)])
def test_when_the_agent_is_gone_the_keeper_ends(home: Home, name: str) -> None:  # noqa: F811
    """After a while, whether the run has a name or not; though a child of the worker holds its connection open."""
    agent = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
    environment = {**os.environ, **({"TRANSFUSE_RUN": name} if name else {})}
    command = [sys.executable, "-c", agent, "-c", JOB]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert process.wait(2 * SECONDS) == 0
            until(lambda: not keepers_in(home.base) and (name or not list(home.base.iterdir())))
            # A named run that was not closed is remembered.
            assert [run.name for run in runs.list_runs()] == [name] * bool(name)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
            # Shown if this fails: whom a keeper that is left takes for alive, and what it has logged.
            print(keepers_in(home.base), [one.to_dict() for one in list_keepers(SECONDS)])
            print(*(log.read_text() for log in home.base.glob(f"*/{LOG_NAME}")))


# ------------------------------------------------------------------------------------------------------ DTensors


def reshard(rank: int, base: str) -> list[Any]:
    """One run over and over, each time on another mesh; what every start has found."""
    os.environ["TRANSFUSE_KEEPER_DIR"] = base
    meshes: list[tuple[list[Any], list[Any]]] = [
        ([[0, 1], [2, 3]], [Replicate(), Shard(0)]),
        ([0, 1], [Shard(0)]),
        ([0, 1, 2, 3], [Shard(1)]),
        ([0, 1, 2, 3], [Shard(0)]),
        ([0], [Shard(0)]),
        ([0, 1, 2], [Shard(0)]),
    ]
    found = []
    for number, (ranks, placements) in enumerate(meshes):
        mesh = DeviceMesh("cpu", ranks)
        members = mesh.mesh.flatten().tolist()
        group = dist.new_group(members)
        if rank in members:
            found.append(_start_on(rank, base, number, mesh, placements, group))
        dist.barrier()
    return found


def _start_on(rank: int, base: str, number: int, mesh: DeviceMesh, placements: list[Any], group: Any) -> Any:
    whole = torch.arange(1001 * 515, dtype=torch.float32).reshape(1001, 515)
    state = {
        "w": distribute_tensor(torch.zeros(1001, 515), mesh, placements),
        "plain": torch.zeros(5),
    }
    with transfuse.keep(lambda: state, run="mesh", group=group, timeout=SECONDS, shared="*plain*") as keep:
        step = keep.restore()
        held = cast(DTensor, state["w"]).full_tensor()
        right = step is None or bool(held.eq(whole + step).all() and state["plain"].eq(step).all())
        for new in range(10 * number + 1, 10 * number + 4):
            with torch.no_grad():
                state["w"].copy_(distribute_tensor(whole + new, mesh, placements))
            state["plain"].fill_(new)
            report = keep.commit(new)
            assert report is not None
            assert report.outcome == "committed"
            copied = report.copied_bytes
        keep.detach()
        return step, right, copied


@pytest.mark.processes
def test_other_meshes_get_what_they_need(home: Home, pool4: ProcessPool) -> None:  # noqa: F811
    results = [outcome.get() for outcome in pool4.run(reshard, str(home.base), deadline=4 * SECONDS)]
    assert [step for step, _, _ in results[0]] == [None, 3, 13, 23, 33, 43]
    assert all(right for some in results for _, right, _ in some)
    # Replicas are kept once: what all ranks have copied on the first mesh is one tensor, and a little.
    nbytes = 1001 * 515 * 4
    assert nbytes <= sum(some[0][2] for some in results) <= nbytes + 4096


def commit_boxes(rank: int, base: str, saved: str) -> list[Any]:
    """Blocks, an empty one among them, and a ShardedTensor: on two ranks, two with other boxes, three, two, and one."""
    os.environ["TRANSFUSE_KEEPER_DIR"] = base
    found: list[Any] = []
    for number, edges in enumerate([[0, 5, 12], [0, 12, 12], [0, 2, 3, 12], [0, 7, 12], [0, 12]]):
        ranks = len(edges) - 1
        group = dist.new_group(list(range(ranks)))
        if rank < ranks:
            found.append(_start_with_boxes(rank, number, edges, group, saved))
        dist.barrier()
    return found


def _start_with_boxes(rank: int, number: int, edges: list[int], group: Any, saved: str) -> Any:
    (low, high), whole = edges[rank : rank + 2], torch.arange(24.0).reshape(12, 2)
    # As ZeRO has it: parts of several flattened leaves in one buffer.
    flat = torch.zeros(4 * (high - low))
    parts = [flat[: 2 * (high - low)], flat[2 * (high - low) :].view(high - low, 2)]
    local = torch.zeros(high - low, 2)
    shards = [LocalShard.from_tensor_and_offsets(local, [low, 0], rank)] if high > low else []
    state = {
        "flat": transfuse.Block(parts[0], start=(2 * low,), shape=(24,)),
        "rows": transfuse.Block(parts[1], start=(low, 0), shape=(12, 2)),
        "sharded": init_from_local_shards(shards, 12, 2, process_group=group),
        "plain": torch.zeros(5),
    }
    options: dict[str, Any] = {"directory": saved, "save_every": 1} if number == 3 else {}
    with transfuse.keep(lambda: state, run="boxes", group=group, timeout=SECONDS, **options) as keep:
        step = keep.restore()
        right = step is None or (
            torch.equal(parts[0], whole.flatten()[2 * low : 2 * high] + step)
            and torch.equal(parts[1], whole[low:high] + step)
            and torch.equal(local, whole[low:high] - step)
            and bool(state["plain"].eq(step).all())
        )
        for new in range(10 * number + 1, 10 * number + 3):
            parts[0].copy_(whole.flatten()[2 * low : 2 * high] + new)
            parts[1].copy_(whole[low:high] + new)
            local.copy_(whole[low:high] - new)
            state["plain"].fill_(new)
            report = keep.commit(new)
            assert report is not None
            assert report.outcome == "committed"
        keep.close() if options else keep.detach()
        return step, right


@pytest.mark.processes
def test_blocks_and_sharded_tensors_are_divided_anew(
    home: Home,  # noqa: F811
    pool4: ProcessPool,
    tmp_path: pathlib.Path,
) -> None:
    """Also from storage: the fourth start saves its steps and closes, so the last one begins anew."""
    results = [
        outcome.get() for outcome in pool4.run(commit_boxes, str(home.base), str(tmp_path), deadline=4 * SECONDS)
    ]
    assert [step for step, _ in results[0]] == [None, 2, 12, 22, None]
    assert all(right for some in results for _, right in some)
    whole = torch.arange(24.0).reshape(12, 2)
    rows = transfuse.Block(torch.zeros(5, 2), start=(4, 0), shape=(12, 2))
    sharded = torch.zeros(12, 2)
    target = {"rows": rows, "sharded": sharded}
    fetched = transfuse.fetch(f"file://{tmp_path}", target)
    assert fetched.step == 32
    assert torch.equal(rows.tensor, whole[4:9] + 32)
    assert torch.equal(sharded, whole - 32)
    assert fetched.report.bytes == rows.tensor.nbytes + sharded.nbytes


def test_two_ranks_that_held_other_values_of_one_box_are_named(keeper: Keeper) -> None:
    """The same ranks get theirs back. For others nobody can say whose are meant."""

    def make(rank: int, step: int) -> dict[str, Any]:
        values = torch.full((4,), float(step + 100 * rank))
        return {
            "drifted": transfuse.Block(values, start=(2,), shape=(6,)),
            "rest": transfuse.Block(torch.full((1 + rank,), float(step)), start=(rank,), shape=(3,)),
        }

    commit(2, 1, make=make)
    for now in (2, 3):
        targets = [make(rank % 2, 0) for rank in range(now)]
        with Job(now) as job:
            job.start(same(*targets))
            if now == 2:
                assert job.restore() == 1
                assert [one["drifted"].tensor.tolist() for one in targets] == [[1.0] * 4, [101.0] * 4]
                continue
            errors = {str(error) for error in job.errors(lambda keep: keep.restore())}
            (text,) = errors
            assert "1 leaves differed between the 2 ranks that committed them: ['drifted'] [2:6]" in text
