"""Directories that somebody else has written: every file, name and number in them is untrusted until it is checked."""

from __future__ import annotations

import os
import pathlib
import random
import stat
import struct
from typing import Any

import pytest
import torch

import transfuse
from keeping import Home, exact, home, threaded  # noqa: F401
from saving import LABEL, Committed, seal, seal_file, seal_slot
from transfuse._errors import StateError, TransfuseError
from transfuse._keeper.frames import Saves
from transfuse._keeper.saved_steps import SavedSteps
from transfuse._keeper.slot_file import Label
from transfuse._keeper.storage import StepWriter, Storage

pytestmark = [pytest.mark.usefixtures("threaded"), pytest.mark.timeout(60)]

STATE = {"w": torch.arange(3000.0), "more": [torch.ones(7), {"n": 4, "text": "x"}], "b": torch.zeros(0)}


@pytest.fixture
def committed(home: Home) -> Committed:  # noqa: F811
    return Committed(home, [{**STATE, "mine": torch.full((9,), rank)} for rank in range(2)])


@pytest.fixture
def steps(committed: Committed, tmp_path: pathlib.Path) -> pathlib.Path:
    """Steps 6 and 7 of two ranks."""
    (directory := tmp_path / "steps").mkdir()
    for step in (6, 7):
        committed.write(Storage.at(directory), label=Label(1, step))
    return directory


def check_passed_over(steps: pathlib.Path, why: str) -> None:
    """Step 7 is not used, step 6 is, and a job that restores sees the same."""
    target = {"w": torch.zeros(3000)}
    assert transfuse.fetch(f"file://{steps}", target, map_path=lambda path: path if path == "w" else None).step == 6
    assert exact(target["w"], STATE["w"])
    with pytest.raises(StateError, match=why) as caught:
        transfuse.fetch(f"file://{steps}?step=7")
    assert "step-7-gen-1" in str(caught.value)


FILES = {
    f"rank-{rank}.slot": {"rank": rank, "nbytes": 9000, "head_bytes": 5000, "head_digest": ""} for rank in range(2)
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"world_size": 10**12}, "it does not name one file for each of 1000000000000 ranks"),
        ({"world_size": 10**30}, "it does not name one file for each of 10{30} ranks"),
        ({"world_size": -2}, "it does not name one file for each of -2 ranks"),
        ({"files": {"../../etc/passwd": FILES["rank-0.slot"], "rank-1.slot": FILES["rank-1.slot"]}}, "one file for"),
        ({"files": {"rank-0.slot": FILES["rank-1.slot"], "rank-1.slot": FILES["rank-0.slot"]}}, "one file for each"),
        ({"files": {**FILES, "rank-1.slot": FILES["rank-1.slot"] | {"nbytes": -9}}}, "5000 bytes of its -9 as head"),
        ({"files": {**FILES, "rank-0.slot": FILES["rank-0.slot"] | {"head_bytes": 9001}}}, "9001 bytes of its 9000 as"),
        (
            {"files": {**FILES, "rank-0.slot": FILES["rank-0.slot"] | {"head_bytes": -1}}},
            "-1 bytes of its 9000 as head",
        ),
    ],
)
def test_a_sealed_record_that_names_nonsense(steps: pathlib.Path, changes: dict[str, Any], why: str) -> None:
    seal(steps / "step-7-gen-1" / "step.json", **changes)
    check_passed_over(steps, why)


def test_a_record_and_a_head_are_not_read_beyond_the_longest_message(steps: pathlib.Path) -> None:
    """Sparse files: they take no room, and would take all memory."""
    folder = steps / "step-7-gen-1"
    os.truncate(folder / "rank-0.slot", 1 << 40)
    files = {**FILES, "rank-0.slot": {"rank": 0, "nbytes": 1 << 40, "head_bytes": 1 << 40, "head_digest": "0" * 32}}
    seal(folder / "step.json", files=files)
    check_passed_over(steps, r"1099511627776 bytes of its 1099511627776 as head.*TRANSFUSE_MAX_MESSAGE_BYTES")
    os.truncate(folder / "step.json", 1 << 40)
    check_passed_over(steps, "step.json cannot be read: .*more than 268435456 bytes .TRANSFUSE_MAX_MESSAGE_BYTES")


@pytest.mark.parametrize("nbytes", [0, 1, 40, 63, 64, 4095, 4096])
def test_a_file_that_is_no_slot(steps: pathlib.Path, nbytes: int) -> None:
    seal_file(steps / "step-7-gen-1" / "rank-0.slot", bytes(range(256)) * 16 if nbytes == 4096 else bytes(nbytes))
    check_passed_over(steps, "rank-0.slot" if nbytes < 4096 else "a slot that should hold a state holds none")


@pytest.mark.parametrize("name", ["step.json", "rank-0.slot"])
def test_nothing_but_regular_files_is_opened(steps: pathlib.Path, name: str) -> None:
    """A FIFO would never answer; a link leads to files of others."""
    path = steps / "step-7-gen-1" / name
    path.rename(steps / "elsewhere")
    os.mkfifo(path)
    check_passed_over(steps, "is no regular file|files of ranks .0. are missing")
    path.unlink()
    path.symlink_to(steps / "elsewhere")
    check_passed_over(steps, "transfuse follows none|files of ranks .0. are missing")


def test_a_fifo_is_no_writer(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "writer.json")
    with pytest.raises(TransfuseError, match=r"writer.json cannot be read: .*is no regular file"):
        Storage.at(tmp_path).writer()
    Storage.at(tmp_path).take(StepWriter("a", "host", 1, "now", 0))
    assert Storage.at(tmp_path).writer() == StepWriter("a", "host", 1, "now", 0)


def test_a_folder_that_is_a_link_is_no_step(committed: Committed, steps: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Otherwise a keeper would write and remove files wherever somebody who may write to the directory wants it."""
    elsewhere, storage = tmp_path / "elsewhere", Storage.at(steps)
    (steps / "step-7-gen-1").rename(elsewhere)
    (steps / "step-7-gen-1").symlink_to(elsewhere, target_is_directory=True)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    assert storage.labels() == [Label(1, 6)]
    assert storage.unfinished() == []
    for do in (lambda: storage.remove(LABEL), lambda: storage.record(LABEL), lambda: committed.write(storage)):
        with pytest.raises(TransfuseError, match=r"step-7-gen-1.*transfuse follows none"):
            do()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    # The directory itself may be reached through a link: its owner has chosen it.
    (tmp_path / "link").symlink_to(steps, target_is_directory=True)
    assert Storage.at(tmp_path / "link").labels() == [Label(1, 6)]


def test_only_the_names_that_are_written_are_steps(committed: Committed, tmp_path: pathlib.Path) -> None:
    for name in ("step-007-gen-1", "step-7-gen-01", "step-٣-gen-1", "step-7-gen-9999999999999999999", "step--1-gen-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "step.json").write_text("{}")
    (tmp_path / "step-0-gen-1").mkdir()
    storage = Storage.at(tmp_path)
    assert storage.labels() == []
    assert storage.unfinished() == [Label(1, 0)]
    assert SavedSteps(Saves(str(tmp_path), None, 2, 10.0)).find() == ([], 1)
    with pytest.raises(ValueError, match="has no name that a folder may have"):
        committed.write(storage, label=Label(10**18, 7))


@pytest.mark.parametrize("mask", [0o022, 0o000])
def test_nobody_else_reads_the_weights(committed: Committed, tmp_path: pathlib.Path, mask: int) -> None:
    storage = Storage.at(tmp_path)
    before = os.umask(mask)
    try:
        committed.write(storage)
        storage.take(StepWriter("a", "host", 1, "now", 0))
    finally:
        os.umask(before)
    files = ("rank-0.slot", "rank-1.slot", "step.json", "writer.json")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"step-7-gen-1": 0o700} | dict.fromkeys(files, 0o600)


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.soak)])
def test_a_changed_description_with_right_digests_is_refused_or_harmless(steps: pathlib.Path, count: int) -> None:
    """Whatever table and description say: a typed error, or a state that lies within the files."""
    path, draw, refused = steps / "step-7-gen-1" / "rank-0.slot", random.Random(count), 0
    good = path.read_bytes()
    brief, text = struct.unpack_from("<QQ", good, 32)
    head_bytes = 4096 + brief + text
    for _ in range(count):
        data = bytearray(good)
        for _ in range(draw.choice([1, 1, 2, 8])):
            at = draw.choice([draw.randrange(4096, head_bytes), draw.randrange(4096, 4096 + brief), draw.randrange(64)])
            data[at] = draw.choice([0, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        seal_slot(data)
        seal_file(path, bytes(data), head_bytes)
        try:
            transfuse.fetch(f"file://{steps}?step=7&rank=0")
        except TransfuseError:
            refused += 1
    assert refused > count // 3
