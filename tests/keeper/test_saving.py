"""Steps on storage: written by the keepers beside training, and restored when no memory has them any more."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

import transfuse
from keeping import SECONDS, Home, Job, exact, home, keepers_in, same, threaded, until  # noqa: F401
from saving import flip, seal
from transfuse._errors import StateError, TransfuseError
from transfuse._keeper import save_leader, saving, storage, writing_mark
from transfuse._keeper.frames import KeeperLost
from transfuse._keeper.process import Keeper
from transfuse._keeper.slot_file import Label
from transfuse._keeper.storage import Storage

pytestmark = pytest.mark.usefixtures("threaded")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers that are threads of this process need not be patient."""
    monkeypatch.setattr(writing_mark, "WRITER_SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(writing_mark, "WRITER_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(saving, "WRITER_SIGHT_SECONDS", 0.05)
    monkeypatch.setattr(save_leader, "SAVE_ROUND_SECONDS", 0.02)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    made = tmp_path / "saved"
    made.mkdir()
    return made


def state_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"shared": torch.full((3000,), float(step)), "bn": torch.full((70,), 100.0 * rank + step)}


def saved(home: Home, run: str = "job") -> list[int]:  # noqa: F811
    """The steps that a keeper knows to be saved, newest first."""
    try:
        told = home.status(run)["storage"]
    except KeeperLost:
        return []
    return [] if told is None else list(told["saved"])


def is_saved(home: Home, step: int) -> bool:  # noqa: F811
    return not step or step in saved(home)


def kill(home: Home) -> None:  # noqa: F811
    """Everything is lost: the keepers' processes, and what they have noted."""
    for pid in keepers_in(home.base):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not keepers_in(home.base))
    shutil.rmtree(home.base)
    home.base.mkdir(mode=0o700)


def fill(states: Sequence[dict[str, torch.Tensor]], step: int) -> None:
    for rank, state in enumerate(states):
        for name, value in state_of(rank, step).items():
            state[name].copy_(value)


def train(job: Job, states: Sequence[dict[str, torch.Tensor]], *steps: int) -> None:
    for step in steps:
        fill(states, step)
        job.commit(step)


@pytest.mark.processes
@pytest.mark.parametrize("n", [1, 3])
def test_what_was_saved_is_restored_when_all_keepers_are_gone(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    n: int,
) -> None:
    states = [state_of(rank, 0) for rank in range(n)]
    with Job(n, directory=folder, save_every=2) as job:
        job.start(same(*states), [{"rank_state": lambda rank=rank: {"rank": rank}} for rank in range(n)])
        for step in (1, 2, 3, 4):
            train(job, states, step)
            until(partial(is_saved, home, step // 2 * 2))
        train(job, states, 5)
        pid = home.status()["pid"]
        assert b"torch" not in pathlib.Path(f"/proc/{pid}/maps").read_bytes(), "a keeper saves without torch"
    assert Storage.at(folder).labels() == [Label(1, 4), Label(1, 2)]
    kill(home)
    targets = [state_of(9, 0) for _ in range(n)]
    with Job(n, directory=str(folder), save_every=2) as job:
        job.start(same(*targets), [{"rank_state": lambda: {"rank": -1}} for _ in range(n)])
        assert job.restore() == 4
        assert exact(targets, [state_of(rank, 4) for rank in range(n)])
        assert [keep.rank_states[rank] for rank, keep in enumerate(job.keeps)] == [{"rank": rank} for rank in range(n)]
        assert f"restored step 4 from storage {folder}" in caplog.text
        # The generation goes on: what is committed now is newer than all that is there.
        train(job, states, 5, 6)
        until(lambda: 6 in saved(home))
        assert Storage.at(folder).labels() == [Label(2, 6), Label(1, 4)]
        job.all(lambda keep: keep.close())


# ------------------------------------------------------------------------------------------- threads of this process


@pytest.fixture
def mount() -> Iterator[pathlib.Path]:
    """A file system of 2 MiB."""
    with tempfile.TemporaryDirectory(prefix="small") as name:
        where = pathlib.Path(name)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(where)], capture_output=True, text=True, check=False
        )
        if made.returncode:
            pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
        try:
            yield where
        finally:
            subprocess.run(["umount", "-l", str(where)], check=True)


def lose(home: Home, keeper: Keeper, run: str = "job") -> Keeper:  # noqa: F811
    """A keeper ends with all that it has in memory, and another one comes in its place."""
    keeper.stop()
    assert home.ended(keeper)
    shutil.rmtree(home.directory(run))
    return home.start(run)


def warnings(caplog: pytest.LogCaptureFixture, name: str = "transfuse") -> list[str]:
    found = [one.getMessage() for one in caplog.records if one.name == name and one.levelno >= logging.WARNING]
    return [text.removeprefix("transfuse: ") for text in found]


def step_after(job: Job, states: Sequence[dict[str, torch.Tensor]], step: int, fact: Any) -> int:
    """Train from this step on until something is so. Returns the last step."""

    def train_on() -> Any:
        nonlocal step
        step += 1
        train(job, states, step)
        return fact()

    until(train_on)
    return step


def test_memory_that_is_newer_than_storage_comes_first(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeper = home.start()
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2, directory=folder, save_every=2) as job:
        job.start(same(*states))
        train(job, states, 1, 2)
        until(lambda: saved(home) == [2])
        train(job, states, 3)
    targets = [state_of(9, 0) for _ in range(2)]
    with Job(2, directory=folder, save_every=2) as job:
        job.start(same(*targets))
        assert job.restore() == 3
        assert exact(targets, [state_of(rank, 3) for rank in range(2)])
        assert "from the keeper of this host" in caplog.text
    lose(home, keeper)
    with Job(2, directory=folder) as job:
        job.start(same(*targets))
        assert job.restore() == 2
        assert exact(targets, [state_of(rank, 2) for rank in range(2)])


def test_another_number_of_ranks_gets_what_all_have_in_common(home: Home, folder: pathlib.Path) -> None:  # noqa: F811
    keeper = home.start()
    states = [{"w": torch.full((5000,), 7.0), "n": 3} for _ in range(3)]
    with Job(3, directory=folder, save_every=1) as job:
        job.start(same(*states), [{"rank_state": lambda rank=rank: {"rank": rank}} for rank in range(3)])
        job.commit(1)
        until(lambda: saved(home) == [1])
    files = Storage.at(folder).record(Label(1, 1)).files.values()
    assert sum(file.nbytes for file in files) < 3 * 5000 * 4, "what all have is written once"
    for n in (1, 2):
        keeper = lose(home, keeper)
        targets = [{"w": torch.zeros(5000), "n": 3} for _ in range(n)]
        with Job(n, directory=folder) as job:
            job.start(same(*targets))
            assert job.restore() == 1
            assert exact(targets, [{"w": torch.full((5000,), 7.0), "n": 3}] * n)
            assert job.keeps[0].rank_states == {rank: {"rank": rank} for rank in range(3)}


def save_two(home: Home, folder: pathlib.Path, n: int = 2) -> Keeper:  # noqa: F811
    """A job that has saved steps 1 and 2, and is lost."""
    keeper = home.start()
    states = [state_of(rank, 0) for rank in range(n)]
    with Job(n, directory=folder, save_every=1) as job:
        job.start(same(*states))
        for step in (1, 2):
            train(job, states, step)
            until(partial(is_saved, home, step))
    return lose(home, keeper)


DAMAGES = ["a bundle", "a head", "a record", "a short file", "a missing file", "a missing record"]


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_step_is_named_and_the_next_older_one_is_taken(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    save_two(home, folder)
    newest = folder / "step-2-gen-1"
    path = newest / ("step.json" if "record" in what else "rank-1.slot")
    data = bytearray(path.read_bytes())
    at = {"a bundle": len(data) - 10, "a head": 4096 + 40, "a record": len(data) // 2}.get(what)
    if at is not None:
        data[at] ^= 1
        path.write_bytes(data)
    elif what == "a short file":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    targets = [state_of(9, 0) for _ in range(2)]
    with Job(2, directory=folder, save_every=1) as job:
        job.start(same(*targets))
        assert job.restore() == 1
        assert exact(targets, [state_of(rank, 1) for rank in range(2)])
        said = " ".join(warnings(caplog))
        if what != "a missing record":  # Then it was never whole.
            assert str(newest) in said
            assert path.name in said
        if what == "a bundle":
            assert "['bn']" in said
            assert re.search(rf"restored step 1 from storage {folder} in .* s: at least 1 steps after it", said)
        # What was restored stays, and the damaged one does not count.
        train(job, targets, 5)
        until(lambda: 5 in saved(home))
        assert {Label(1, 1), Label(2, 5)} <= set(Storage.at(folder).labels())


def test_it_is_said_how_many_steps_are_lost_if_a_keeper_has_noted_what_it_held(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeper, states = home.start(), [state_of(0, 0)]
    with Job(1, directory=folder, save_every=2) as job:
        job.start(same(*states))
        train(job, states, 1, 2)
        until(partial(is_saved, home, 2))
        train(job, states, 3)
        keeper.drain()
        assert home.ended(keeper)
        home.start()
    with Job(1, directory=folder) as job:
        job.start(same(*states))
        assert job.restore() == 2
    assert re.search(r"restored step 2 from storage .* s: at least 1 steps after it are lost", caplog.text)


def test_what_comes_from_storage_is_compared_with_its_digests_whatever_verify_says(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
) -> None:
    """And it has digests, though commits without ``verify`` hash nothing that is shared."""
    keeper, states = home.start(), [state_of(0, 0) for _ in range(2)]
    options: dict[str, Any] = {"directory": folder, "save_every": 1, "verify": False, "shared": True}
    with Job(2, **options) as job:
        job.start(same(*states))
        for step in (1, 2):
            for state in states:
                fill([state], step)
            job.commit(step)
            until(partial(is_saved, home, step))
    lose(home, keeper)
    (path,) = [one for one in (folder / "step-2-gen-1").glob("*.slot") if one.stat().st_size > 12000]
    flip(path, path.stat().st_size - 10)
    with Job(2, **options) as job:
        job.start(same(*states))
        assert job.restore() == 1
        assert exact(states, [state_of(0, 1)] * 2)


@pytest.mark.parametrize("what", ["step.json", "rank-0.slot"])
def test_what_fetch_finds_behind_many_damaged_steps_restore_finds_too(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
    what: str,
) -> None:
    """More of them than a keeper tells at once: a job that could go on does, and so does a reader."""
    save_two(home, folder, 1)
    shutil.rmtree(folder / "step-2-gen-1")
    for step in range(2, 14):
        torn = folder / f"step-{step}-gen-1"
        shutil.copytree(folder / "step-1-gen-1", torn)
        seal(torn / "step.json", step=step)
        (torn / what).write_bytes((torn / what).read_bytes()[:-1])
    target = state_of(9, 0)
    assert transfuse.fetch(f"file://{folder}", target).step == 1
    target = state_of(9, 0)
    with Job(1, directory=folder) as job:
        job.start(same(target))
        assert job.restore() == 1
        assert exact(target, state_of(0, 1))


def test_a_run_that_has_only_damaged_steps_does_not_begin_at_0(home: Home, folder: pathlib.Path) -> None:  # noqa: F811
    save_two(home, folder, 1)
    for path in folder.glob("*/rank-0.slot"):
        path.write_bytes(path.read_bytes()[:-1])
    target = state_of(9, 0)
    with Job(1, directory=folder) as job:
        job.start(same(target))
        (error,) = job.errors(lambda keep: keep.restore())
        assert isinstance(error, StateError)
        assert "this run has kept steps, and none of them can be restored now" in str(error)
        assert "rank-0.slot" in str(error)
        assert exact(target, state_of(9, 0))
        assert job.restore(missing_ok=True) is None


def test_a_directory_that_is_not_there_is_refused_on_all_ranks(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    home.start()
    for where, told in ((tmp_path / "missing", "mounted"), (pathlib.Path(__file__), "directory")):
        with Job(2, directory=where, save_every=1) as job, pytest.raises(TransfuseError, match=told) as raised:
            job.start(same({}, {}))
        assert str(where) in str(raised.value)
        assert "rank 1" in str(raised.value)
    with Job(2, directory=tmp_path) as job, pytest.raises(ValueError, match="rank 1 keeps with directory="):
        job.start(same({}, {}), [{}, {"save_every": 3}])
    for wrong in (
        {"save_every": 3},
        {"directory": tmp_path, "save_every": 0},
        {"directory": tmp_path, "keep_saved": 0},
    ):
        with Job(1, **wrong) as job, pytest.raises(ValueError, match=r"save_every=|save_every must|keep_saved"):
            job.start(same({}))


def no_parts(folder: pathlib.Path) -> bool:
    """Whether nothing is half-written there. Keepers may be removing folders meanwhile."""
    with suppress(FileNotFoundError):
        return not list(folder.glob("*/*.tmp"))
    return False


def test_a_full_disk_costs_a_warning_and_saving_goes_on_when_there_is_room(
    home: Home,  # noqa: F811
    mount: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    home.start()
    states = [{"w": torch.zeros(50_000)} for _ in range(2)]

    def go(job: Job, step: int, fact: Any) -> int:
        while not fact():
            step += 1
            for rank, state in enumerate(states):
                state["w"].fill_(10.0 * step + rank)
            assert job.commit(step) == ["committed"] * 2
        return step

    with Job(2, directory=mount, save_every=1, keep_saved=2) as job:
        job.start(same(*states))
        step = go(job, 0, lambda: len(saved(home)) == 2)
        with suppress(OSError), open(mount / "somebody's", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 14))
        step = go(job, step, lambda: warnings(caplog))
        before = Storage.at(mount).labels()
        step = go(job, step + 100, lambda: (home.status()["storage"]["failed"] or 0) > 3)
        assert Storage.at(mount).labels() == before, "the older steps stay"
        until(lambda: no_parts(mount))
        (told,) = warnings(caplog)
        assert "No space left on device" in told
        assert "Make room there" in told
        (mount / "somebody's").unlink()
        step = go(job, step, lambda: saved(home)[0] > step)
        step = go(job, step, lambda: len(warnings(caplog)) > 1)
        assert warnings(caplog)[1:] == ["rank 0: steps are saved again"]


def hang(monkeypatch: pytest.MonkeyPatch, file: str) -> threading.Event:
    """To open files of this name waits, as on a mount whose server is gone, until the event is set."""
    answers, open_file = threading.Event(), storage._open

    def open_when_it_answers(name: str, flags: int, folder: int) -> int:
        if name == file:
            answers.wait()
        return open_file(name, flags, folder)

    monkeypatch.setattr(storage, "_open", open_when_it_answers)
    return answers


def test_a_storage_that_never_answers_costs_no_commit(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_leader, "SAVE_SILENCE_SECONDS", 0.3)
    home.start()
    states = [state_of(0, 0)]
    answers = hang(monkeypatch, "writer.json")
    with Job(1, directory=folder, save_every=2, timeout=5) as job:
        job.start(same(*states))
        step = step_after(job, states, 0, lambda: warnings(caplog))
        assert "has not answered" in warnings(caplog)[0]
        assert str(folder) in warnings(caplog)[0]
        for _ in range(20):
            step += 1
            fill(states, step)
            assert job.commit(step) == ["committed"]
        # It comes back: the thread that hung learns of it, and the next step is saved.
        answers.set()
        step_after(job, states, step, lambda: saved(home) and len(warnings(caplog)) > 1)
        assert warnings(caplog)[1:] == ["rank 0: steps are saved again"]


def test_a_restore_from_storage_that_never_answers_says_so(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_two(home, folder, 1)
    answers = hang(monkeypatch, "step.json")
    with Job(1, directory=folder, timeout=4) as job:
        job.start(same(state_of(0, 0)))
        (error,) = job.errors(lambda keep: keep.restore())
        assert f"the directory {folder} has not answered" in str(error)
        assert "Nothing was touched" in str(error)
    answers.set()


def test_two_jobs_on_one_directory_are_told_and_the_second_one_waits(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing_mark, "WRITER_AGAIN_SECONDS", 0.1)
    keepers = {run: home.start(run) for run in ("one", "two")}
    states = {run: [state_of(0, 0)] for run in keepers}
    with (
        Job(1, run="one", directory=folder, save_every=1) as first,
        Job(1, run="two", directory=folder, save_every=1) as second,
    ):
        first.start(same(*states["one"]))
        step = step_after(first, states["one"], 0, lambda: saved(home, "one"))
        second.start(same(*states["two"]))
        step_after(second, states["two"], 1000, lambda: warnings(caplog))
        (told,) = warnings(caplog)
        assert "another job writes to the directory" in told
        assert f"process {os.getpid()}" in told
        assert "Give each run a directory= of its own" in told
        step = step_after(first, states["one"], step, lambda: saved(home, "one")[0] > step)
        assert all(label.step < 1000 for label in Storage.at(folder).labels())
        first.all(lambda keep: keep.close())
        assert home.ended(keepers["one"])
        step_after(second, states["two"], 2000, lambda: saved(home, "two") and len(warnings(caplog)) > 1)
        assert warnings(caplog)[1:] == ["rank 0: steps are saved again"]


def test_the_last_step_of_a_job_is_saved_before_its_keeper_ends(home: Home, folder: pathlib.Path) -> None:  # noqa: F811
    keeper = home.start()
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2, directory=folder, save_every=4, max_bytes_per_second=100_000) as job:
        job.start(same(*states))
        train(job, states, 1, 2, 3, 4)
        job.all(lambda keep: keep.close())
        assert home.ended(keeper)
    assert Storage.at(folder).labels() == [Label(1, 4)]


@pytest.mark.parametrize("keep", [1, 3])
def test_older_steps_go_and_what_has_no_record_with_them(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
    keep: int,
) -> None:
    home.start()
    (folder / "step-1-gen-0").mkdir()
    (folder / "step-1-gen-0" / "rank-0.slot").write_bytes(b"torn")
    (folder / "notes").write_text("of the user")
    states = [state_of(0, 0)]
    with Job(1, directory=folder, save_every=1, keep_saved=keep) as job:
        job.start(same(*states))
        for step in range(1, 6):
            train(job, states, step)
            until(partial(is_saved, home, step))
    assert Storage.at(folder).labels() == [Label(1, step) for step in range(5, 5 - keep, -1)]
    assert sorted(path.name for path in folder.glob("step-*")) == [f"step-{n}-gen-1" for n in range(6 - keep, 6)]
    assert (folder / "notes").exists()


# ---------------------------------------------------------------------------------------------------- several hosts


HOSTS = [{"run": "a"}, {"run": "b"}]


def equal_state(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((300_000,), float(step + n)) for n, name in enumerate("vwxyz")}


def commit_until_saved(home: Home, job: Job, step: int, states: Sequence[dict[str, torch.Tensor]], make: Any) -> int:  # noqa: F811
    """Commit one step after the other, until one of them is saved. Returns it."""
    first = step

    def is_saved() -> Any:
        nonlocal step
        step += 1
        for rank, state in enumerate(states):
            for name, value in make(rank, step).items():
                state[name].copy_(value)
        job.commit(step)
        return [one for one in saved(home, "a") if one > first]

    found: list[int] = until(is_saved)
    return found[0]


def lose_hosts(home: Home, *keepers: Keeper) -> None:  # noqa: F811
    for keeper in keepers:
        keeper.stop()
        assert home.ended(keeper)
        shutil.rmtree(keeper.directory, ignore_errors=True)


def test_hosts_that_see_one_directory_write_what_they_have_in_common_once(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
) -> None:
    keepers = [home.start(host) for host in ("a", "b")]
    states = [equal_state(0) for _ in range(2)]
    with Job(2, directory=folder, save_every=2) as job:
        job.start(same(*states), HOSTS)
        step = commit_until_saved(home, job, 0, states, lambda rank, step: equal_state(step))
        label = Storage.at(folder).labels()[0]
        sizes = [file.nbytes for file in Storage.at(folder).record(label).files.values()]
        assert sum(sizes) < 6 * 1_200_000
        assert min(sizes) > 2 * 1_200_000, "each host writes a part"
    lose_hosts(home, *keepers)
    targets = [equal_state(-1) for _ in range(3)]
    for host in ("c", "d"):
        home.start(host)
    with Job(3, directory=folder, save_every=2) as job:
        job.start(same(*targets), [{"run": host} for host in ("c", "c", "d")])
        assert job.restore() == label.step >= step
        assert exact(targets, [equal_state(label.step)] * 3)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_disks_of_their_own_hold_what_their_hosts_have(home: Home, tmp_path: pathlib.Path, lost: str) -> None:  # noqa: F811
    disks = {host: tmp_path / host for host in "ab"}
    for disk in disks.values():
        disk.mkdir()
    keepers = {host: home.start(host) for host in "ab"}
    where = [{"run": host, "directory": disks[host]} for host in "ab"]
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2, save_every=1, keep_saved=1, replicas=0) as job:
        job.start(same(*states), where)
        step = commit_until_saved(home, job, 0, states, state_of)
        commit_until_saved(home, job, step + 10_000, states, state_of)
        until(lambda: home.status("a")["storage"]["candidate"] is None)
    names = {host: sorted(path.name for path in disk.glob("step-*/*")) for host, disk in disks.items()}
    assert names == {"a": ["rank-0.slot", "step.json"], "b": ["rank-1.slot", "step.json"]}
    assert Storage.at(disks["a"]).labels() == Storage.at(disks["b"]).labels()
    lose_hosts(home, *keepers.values())
    for host in "ab":
        home.start(host)
    step = Storage.at(disks["a"]).labels()[0].step
    # The hosts have changed places: each rank's file is on the other one.
    targets = [state_of(9, 0) for _ in range(2)]
    with Job(2, save_every=1, keep_saved=1, replicas=0) as job:
        job.start(same(*targets), [{"run": "b", "directory": disks["b"]}, {"run": "a", "directory": disks["a"]}])
        assert job.restore() == step
        assert exact(targets, [state_of(rank, step) for rank in range(2)])
    # Without one of them the step is not whole, and nobody begins at 0.
    with Job(1, replicas=0) as job:
        job.start(same(state_of(9, 0)), [{"run": "c", "directory": disks["a" if lost == "b" else "b"]}])
        (error,) = job.errors(lambda keep: keep.restore())
        assert isinstance(error, StateError)
        assert f"rank-{int(lost == 'b')}.slot cannot be read" in str(error)


def _counts(disk: pathlib.Path, step: int) -> bool:
    return Label(1, step) in Storage.at(disk).labels()


def test_damage_on_the_disk_of_another_host_is_named_and_the_older_step_is_taken(
    home: Home,  # noqa: F811
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The keeper there compares what it serves: no byte of it reaches a rank."""
    disks = {host: tmp_path / host for host in "ab"}
    for disk in disks.values():
        disk.mkdir()
    keepers = {host: home.start(host) for host in "ab"}
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2, save_every=1, replicas=0) as job:
        job.start(same(*states), [{"run": host, "directory": disks[host]} for host in "ab"])
        for step in (1, 2):
            train(job, states, step)
            for disk in disks.values():
                until(partial(_counts, disk, step))
    lose_hosts(home, *keepers.values())
    for host in "ab":
        home.start(host)
    path = disks["a"] / "step-2-gen-1" / "rank-0.slot"
    flip(path, path.stat().st_size - 10)
    targets = [state_of(9, 0) for _ in range(2)]
    with Job(2, replicas=0) as job:
        # The hosts have changed places: rank 0 is on the second one.
        job.start(same(*targets), [{"run": "b", "directory": disks["b"]}, {"run": "a", "directory": disks["a"]}])
        assert job.restore() == 1
        assert exact(targets, [state_of(rank, 1) for rank in range(2)])
    assert f"{path} is damaged: 2 leaves differ from their digests: ['bn'], ['shared']" in caplog.text


def test_the_memory_of_one_host_and_the_storage_of_the_other_make_a_step_whole(
    home: Home,  # noqa: F811
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without replicas. The second host is lost with its memory, and what it has saved is still on its disk."""
    disks = {host: tmp_path / host for host in "ab"}
    for disk in disks.values():
        disk.mkdir()
    keepers = {host: home.start(host) for host in "ab"}
    where = [{"run": host, "directory": disks[host]} for host in "ab"]
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2, save_every=1, replicas=0) as job:
        job.start(same(*states), where)
        fill(states, 1)
        job.commit(1)
        until(lambda: saved(home, "a") == [1])
    lose_hosts(home, keepers["b"])
    home.start("b")
    targets = [state_of(9, 0) for _ in range(2)]
    # What the first host has saved is damaged: its memory is what counts.
    path = disks["a"] / "step-1-gen-1" / "rank-0.slot"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with Job(2, save_every=1, replicas=0) as job:
        job.start(same(*targets), where)
        assert job.restore() == 1
        assert exact(targets, [state_of(rank, 1) for rank in range(2)])
        assert f"rank 0 restored step 1 from memory and storage {disks['b']}" in caplog.text


@pytest.mark.parametrize("moment", ["SaveWrite", "SaveRecord"])
def test_a_host_that_is_lost_in_the_middle_of_a_save_costs_that_step(
    home: Home,  # noqa: F811
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    order, lost = saving.SaveTask.order, threading.Event()

    def order_and_lose(task: saving.SaveTask, question: Any) -> Any:
        if lost.is_set() and type(question).__name__ == moment and not task._host.leads:
            lost.clear()
            raise ConnectionResetError("the host is lost")
        return order(task, question)

    monkeypatch.setattr(saving.SaveTask, "order", order_and_lose)
    for host in "ab":
        home.start(host)
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2, directory=folder, save_every=1, keep_saved=2) as job:
        job.start(same(*states), HOSTS)
        step = commit_until_saved(home, job, 0, states, state_of)
        lost.set()
        step_after(job, states, step + 10_000, lambda: home.status("a")["storage"]["failed"])
        newest = Storage.at(folder).labels()[0]
        assert newest.step >= step
        commit_until_saved(home, job, newest.step + 20_000, states, state_of)
        for label in Storage.at(folder).labels():
            assert Storage.at(folder).present(label, Storage.at(folder).record(label)) == [0, 1]


def test_the_last_step_is_saved_on_all_hosts_before_their_keepers_end(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    disks = {host: tmp_path / host for host in "ab"}
    for disk in disks.values():
        disk.mkdir()
    keepers = [home.start(host) for host in "ab"]
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2, save_every=4, max_bytes_per_second=100_000) as job:
        job.start(same(*states), [{"run": host, "directory": disks[host]} for host in "ab"])
        train(job, states, 1, 2, 3, 4)
        job.all(lambda keep: keep.close())
        assert all(home.ended(keeper) for keeper in keepers)
    assert [Storage.at(disk).labels() for disk in disks.values()] == [[Label(1, 4)]] * 2


def test_a_file_system_that_becomes_read_only_costs_a_warning(
    home: Home,  # noqa: F811
    mount: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    home.start()
    states = [state_of(0, 0)]
    with Job(1, directory=mount, save_every=1) as job:
        job.start(same(*states))
        step = step_after(job, states, 0, lambda: saved(home))
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        step = step_after(job, states, step, lambda: warnings(caplog))
        assert "Read-only file system" in warnings(caplog)[0]
        assert "read and write there" in warnings(caplog)[0]
        subprocess.run(["mount", "-o", "remount,rw", str(mount)], check=True)
        step_after(job, states, step, lambda: len(warnings(caplog)) > 1)
        assert warnings(caplog)[1:] == ["rank 0: steps are saved again"]


def test_a_url_of_fsspec_is_a_directory_like_any_other(home: Home) -> None:  # noqa: F811
    pytest.importorskip("fsspec")
    where = f"memory://saved-{os.getpid()}"
    keeper = home.start()
    states = [state_of(rank, 0) for rank in range(2)]
    with Job(2, directory=where, save_every=1) as job:
        job.start(same(*states))
        step = step_after(job, states, 0, lambda: saved(home))
        until(lambda: home.status()["storage"]["candidate"] is None)
    step = Storage.at(where).labels()[0].step
    lose(home, keeper)
    targets = [state_of(9, 0) for _ in range(2)]
    with Job(2, directory=where) as job:
        job.start(same(*targets))
        assert job.restore() == step
        assert exact(targets, [state_of(rank, step) for rank in range(2)])
