"""Steps as files: what was written is described again and equal; what is damaged or torn never counts."""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from keeping import Home, exact, home, threaded  # noqa: F401
from saving import LABEL, MIB, Committed, flip, places, state_of
from transfuse._errors import TransfuseError
from transfuse._keeper.restored import RestoredState, damage, describe_slots
from transfuse._keeper.slot_file import Label, SlotView
from transfuse._keeper.storage import Record, StepWriter, Storage
from transfuse._memory.building import build_over

pytestmark = pytest.mark.usefixtures("threaded")


@pytest.fixture
def committed(home: Home) -> Committed:  # noqa: F811
    return Committed(home, [state_of(0), state_of(1)])


def read(storage: Storage, label: Label = LABEL, *, backwards: bool = False) -> dict[int, RestoredState]:
    record = storage.record(label)
    views = {}
    for rank in sorted(storage.present(label, record), reverse=backwards):
        fd = storage.open(label, record, rank)
        views[rank] = SlotView(fd, writable=False)
        os.close(fd)
    return {rank: describe_slots(rank, views) for rank in range(record.world_size)}


def trees(found: Mapping[int, RestoredState]) -> list[Any]:
    return [build_over(one.state.manifest, one.state.tensors) for _, one in sorted(found.items())]


# ----------------------------------------------------------------------------------------------- written and read


@pytest.mark.parametrize("place", range(4))
def test_what_was_written_is_described_again_and_equal(
    committed: Committed, tmp_path: pathlib.Path, place: int
) -> None:
    storage = Storage.at(list(places(tmp_path))[place])
    storage.check()
    assert storage.labels() == []
    record = committed.write(storage)
    assert storage.labels() == [LABEL]
    assert storage.unfinished() == []
    assert storage.record(LABEL).files == record.files
    assert storage.present(LABEL, record) == [0, 1]
    found = read(storage)
    assert exact(trees(found), committed.states)
    assert not any(one.damaged() for one in found.values())
    # What both ranks hold is written once.
    assert sum(file.nbytes for file in record.files.values()) < 5 * MIB
    storage.remove(LABEL)
    assert storage.labels() == storage.unfinished() == []


@pytest.fixture
def bare(home: Home) -> Committed:  # noqa: F811
    return Committed(home, [state_of(0), state_of(1)], verify=False)


def test_what_the_commit_has_not_hashed_is_hashed_when_it_is_written(bare: Committed, tmp_path: pathlib.Path) -> None:
    committed, storage = bare, Storage.at(tmp_path)
    committed.write(storage)
    found = read(storage)
    assert exact(trees(found), committed.states)
    for one in found.values():
        assert all(any(digest) for digest in one.bundles.digests)
        assert not one.damaged()


def test_any_rank_may_write_what_several_hold(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    """As several hosts do it: rank 1 holds everything in its slot, and leaves to rank 0 what both hold."""
    one, storage = Committed(home, [state_of(0)]), Storage.at(tmp_path)
    (kept,) = one.kept
    brief = kept.brief
    assert brief is not None
    first = storage.write_rank(LABEL, kept.file, brief, brief.bundles.owners, lambda nbytes: None)
    other = type(brief)(1, 2, brief.bundles)
    second = storage.write_rank(
        LABEL, kept.file, other, np.zeros(len(brief.bundles), dtype=np.int64), lambda nbytes: None
    )
    storage.write_record(LABEL, Record.of(LABEL, 2, [first, second]))
    assert second.nbytes == second.head_bytes
    assert exact(trees(read(storage)), one.states * 2)


def test_newest_is_by_generation_then_step(tmp_path: pathlib.Path) -> None:
    storage = Storage.at(tmp_path)
    for folder in ("step-9-gen-1", "step-10-gen-1", "step-2-gen-3", "notes", "step-3-gen-3"):
        (tmp_path / folder).mkdir()
        if folder != "step-3-gen-3":
            (tmp_path / folder / "step.json").write_text("{}")
    (tmp_path / "step-8-gen-8").write_text("a file of this name")
    assert storage.labels() == [Label(3, 2), Label(1, 10), Label(1, 9)]
    assert storage.unfinished() == [Label(3, 3)]


def test_a_whole_step_is_not_overwritten(committed: Committed, tmp_path: pathlib.Path) -> None:
    storage = Storage.at(tmp_path)
    committed.write(storage)
    with pytest.raises(TransfuseError, match="step 7 of generation 1 is whole already"):
        committed.write(storage)


def test_files_of_others_stay(committed: Committed, tmp_path: pathlib.Path) -> None:
    storage = Storage.at(tmp_path)
    committed.write(storage)
    (tmp_path / "step-7-gen-1" / "notes.txt").write_text("mine")
    storage.remove(LABEL)
    assert [path.name for path in (tmp_path / "step-7-gen-1").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("place", [0, 3])
def test_the_writer_is_known(tmp_path: pathlib.Path, place: int) -> None:
    storage = Storage.at(list(places(tmp_path))[place])
    assert storage.writer() is None
    for beat in range(2):
        storage.take(StepWriter("a1b2", "host", 17, "now", beat))
        assert storage.writer() == StepWriter("a1b2", "host", 17, "now", beat)


# --------------------------------------------------------------------------------------------------------- damage


def _bytes_that_count(path: pathlib.Path, committed: Committed, record: Record) -> list[tuple[int, int]]:
    """The runs of a file that hold anything but the zeros between bundles."""
    if path.name == "step.json":
        return [(0, path.stat().st_size)]
    file = record.files[path.name]
    fd = os.open(path, os.O_RDONLY)
    brief = SlotView(fd, writable=False).brief()
    os.close(fd)
    runs = [(0, file.head_bytes)]
    for number in brief.own.values():
        start = int(brief.bundles.places[number])
        runs.append((start, start + int(brief.bundles.nbytes[number])))
    return runs


def test_a_flipped_bit_anywhere_is_found(committed: Committed, tmp_path: pathlib.Path) -> None:
    storage, draw = Storage.at(tmp_path), random.Random(3)
    record = committed.write(storage)
    for path in sorted((tmp_path / "step-7-gen-1").iterdir()):
        runs = [run for run in _bytes_that_count(path, committed, record) if run[1] > run[0]]
        for _ in range(60):
            low, high = draw.choice(runs)
            at, bit = draw.randrange(low, high), 1 << draw.randrange(8)
            flip(path, at, bit)
            if path.name == "step.json" or at < record.files[path.name].head_bytes:
                with pytest.raises(ValueError, match=re.escape(str(path))):
                    read(storage)
            else:
                states = list(read(storage).values())
                assert any(one.damaged() for one in states), (path, at)
                assert f"{path} is damaged: " in damage(states, str(path.parent))
            flip(path, at, bit)
    assert exact(trees(read(storage)), committed.states)


def test_damage_names_the_leaf(committed: Committed, tmp_path: pathlib.Path) -> None:
    storage = Storage.at(tmp_path)
    committed.write(storage)
    path = tmp_path / "step-7-gen-1" / "rank-1.slot"
    data = path.read_bytes()
    at = data.index(committed.states[1]["odd"].numpy().tobytes()[:64])
    flip(path, at + 10, 1)
    assert [one.damaged() for _, one in sorted(read(storage).items())] == [[], ["['odd']"]]


def test_ranks_that_share_the_work_of_comparing_leave_nothing_out(committed: Committed, tmp_path: pathlib.Path) -> None:
    """Each has the files where its own kernel has put them: what lies in front in one process is behind in another."""
    storage = Storage.at(tmp_path)
    record = committed.write(storage)
    folder = tmp_path / "step-7-gen-1"
    found = 0
    for path in sorted(folder.glob("*.slot")):
        for start, end in _bytes_that_count(path, committed, record)[1:]:
            if end > start:
                flip(path, start)
                # No gaps are left: the kernel lays one mapping below the other.
                gaps = [mmap.mmap(-1, 1 << 20) for _ in range(100)]
                processes = [list(read(storage, backwards=bool(part)).values()) for part in range(2)]
                wrong = [damage(states, str(folder), (part, 2)) for part, states in enumerate(processes)]
                assert sorted(map(bool, wrong)) == [False, True], (path, start)
                flip(path, start)
                found += len(gaps) == 100
    assert found >= 4


def test_a_file_that_is_missing_or_short_is_not_present(committed: Committed, tmp_path: pathlib.Path) -> None:
    storage = Storage.at(tmp_path)
    record = committed.write(storage)
    folder = tmp_path / "step-7-gen-1"
    os.truncate(folder / "rank-1.slot", 5000)
    assert storage.present(LABEL, record) == [0]
    with pytest.raises(ValueError, match=r"rank-1.slot is damaged: it has 5000 bytes instead of"):
        storage.open(LABEL, record, 1)
    (folder / "rank-0.slot").unlink()
    assert storage.present(LABEL, record) == []
    with pytest.raises(TransfuseError, match=r"rank-0.slot cannot be read.*Look whether it is mounted"):
        storage.open(LABEL, record, 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 2}, "it has format 2, and this version reads format 1"),
        ({"step": 8}, "its digest is wrong"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_a_record_of_another_kind_is_refused(
    committed: Committed, tmp_path: pathlib.Path, change: dict[str, Any], why: str
) -> None:
    storage = Storage.at(tmp_path)
    committed.write(storage)
    path = tmp_path / "step-7-gen-1" / "step.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=why) as caught:
        storage.record(LABEL)
    assert str(path) in str(caught.value)


def test_a_record_of_another_step_is_refused(committed: Committed, tmp_path: pathlib.Path) -> None:
    storage = Storage.at(tmp_path)
    committed.write(storage)
    (tmp_path / "step-7-gen-1").rename(tmp_path / "step-8-gen-1")
    with pytest.raises(ValueError, match="it is the record of step 7 of generation 1"):
        storage.record(Label(1, 8))


# --------------------------------------------------------------------------------------------------------- deaths


def _in_child(do: Callable[[], None]) -> int:
    """Do something in a fork of this process, and return the signal that has ended it, or 0."""
    pid = os.fork()
    if not pid:
        try:
            do()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _die_at_byte(nbytes: int) -> None:
    """The kernel ends this process as soon as a file would become longer than this."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def _die_at_change(count: int) -> None:
    """End at the moment before the n-th change of a folder."""
    left = count

    def look(event: str, arguments: Any) -> None:
        nonlocal left
        if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.soak)])
def test_a_step_whose_writer_dies_never_counts_unless_it_is_whole(
    committed: Committed, tmp_path: pathlib.Path, count: int
) -> None:
    draw = random.Random(count)
    largest = max(kept.file.nbytes for kept in committed.kept)
    deaths: list[Callable[[], None]] = [
        *(partial(_die_at_byte, draw.randrange(largest)) for _ in range(count)),
        *(partial(_die_at_byte, draw.randrange(2000)) for _ in range(3)),
        *(partial(_die_at_change, number) for number in range(26)),
    ]
    outcomes = set()
    for number, death in enumerate(deaths):
        (directory := tmp_path / str(number)).mkdir()

        def write(directory: pathlib.Path = directory, death: Callable[[], None] = death) -> None:
            death()
            committed.write(Storage.at(directory))

        ended = _in_child(write)
        storage = Storage.at(directory)
        if storage.labels():
            assert exact(trees(read(storage)), committed.states)
            outcomes.add("whole")
        else:
            assert ended
            outcomes.add("torn")
            # Another try gets through, whatever is there.
            committed.write(storage)
            assert exact(trees(read(storage)), committed.states)
        storage.remove(LABEL)
        assert list(directory.iterdir()) == []
    assert outcomes == {"whole", "torn"}


def test_a_step_whose_remover_dies_is_whole_or_does_not_count(committed: Committed, tmp_path: pathlib.Path) -> None:
    storage = Storage.at(tmp_path)
    for number in range(16):
        committed.write(storage)

        def remove(number: int = number) -> None:
            _die_at_change(number)
            storage.remove(LABEL)

        _in_child(remove)
        if storage.labels():
            assert exact(trees(read(storage)), committed.states)
        storage.remove(LABEL)
        assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------- what cannot be used


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 6 MiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_full_disk(committed: Committed, small_disk: pathlib.Path) -> None:
    storage = Storage.at(small_disk)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(4 * MIB))
    with pytest.raises(TransfuseError, match=r"small: step-7-gen-1/rank-\d.slot cannot be written.*keep fewer steps"):
        committed.write(storage)
    assert storage.labels() == []
    storage.remove(LABEL)
    assert list(small_disk.iterdir()) == [ballast]
    ballast.unlink()
    committed.write(storage)
    assert exact(trees(read(storage)), committed.states)


def test_a_file_system_that_can_only_be_read(small_disk: pathlib.Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    storage = Storage.at(small_disk)
    storage.check(writes=False)
    with pytest.raises(TransfuseError, match=r"small: cannot be used: .*Read-only.*Let user \d+ read and write there"):
        storage.check()


def test_a_directory_is_never_made(committed: Committed, tmp_path: pathlib.Path) -> None:
    for where in (tmp_path / "missing", f"local://{tmp_path}/missing"):
        storage = Storage.at(where)
        with pytest.raises(TransfuseError, match=r"missing.*Look whether it is mounted"):
            storage.check()
        with pytest.raises(TransfuseError, match=r"missing.*Look whether it is mounted"):
            committed.write(storage)
    (tmp_path / "file").write_text("")
    with pytest.raises(TransfuseError, match="Not a directory"):
        Storage.at(tmp_path / "file").check()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_writing_can_be_stopped_and_leaves_no_file(committed: Committed, tmp_path: pathlib.Path) -> None:
    class Stop(Exception):
        pass

    def stop(nbytes: int) -> None:
        raise Stop

    for where in places(tmp_path):
        storage = Storage.at(where)
        with pytest.raises(Stop):
            committed.write(storage, stop)
        assert storage.labels() == []
        storage.remove(LABEL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "why"), [("nosuch://x", "cannot be reached: Protocol not known"), ("s3://bucket/x", "Install s3fs")]
)
def test_a_url_that_nobody_knows(url: str, why: str) -> None:
    with pytest.raises(TransfuseError, match=f"the directory {url} .*{why}"):
        Storage.at(url)


def test_without_fsspec_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(TransfuseError, match=r"pip install 'transfuse\[remote\]'"):
        Storage.at("memory://x")
    Storage.at(tmp_path).check()


def test_torch_and_fsspec_are_not_imported() -> None:
    program = "import sys, transfuse._keeper.storage; sys.exit('torch' in sys.modules or 'fsspec' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
