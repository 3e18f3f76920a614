"""The file in which the processes of a host count their transfers: several at once, killed, full, damaged."""

from __future__ import annotations

import fcntl
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

import transfuse
from keeping import until
from scraping import Scrape
from tampering import Tampering
from transfuse._metrics import shared_file
from transfuse._metrics.shared_file import SharedFile
from transfuse._report import Report
from transfuse.testing.ranks import Ranks, freeze

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=20)


@pytest.fixture
def path(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    path = tmp_path / "metrics.prom"
    monkeypatch.setenv("TRANSFUSE_METRICS", str(path))
    monkeypatch.setattr(shared_file, "METRICS_WRITE_SECONDS", 0.05)
    monkeypatch.setattr(shared_file, "_files", {})
    return path


def report(direction: Any = "receive", **numbers: Any) -> Report:
    found = Report(direction, (0,), **{"route": "group", "bytes": 1000, "seconds": 0.5, **numbers})
    found.moving_seconds = 0.25
    return found


def read(path: pathlib.Path) -> Scrape:
    return Scrape(path.read_text())


def move(rank: int, pg: Any, state: object, sources: int = 1) -> None:
    transport = transfuse.PGTransport(pg, TIMEOUT, CPU, same_host=False)
    if rank < sources:
        transport.send_checkpoint([sources], state)
    else:
        transport.recv_checkpoint(list(range(sources)) if sources > 1 else 0)


def test_what_transfers_count(path: pathlib.Path) -> None:
    state = {"w": torch.zeros(1000)}
    with Ranks(2) as ranks:
        ranks.run(lambda rank, pg: move(rank, pg, state))
    found = until(lambda: path.exists() and (now := read(path))("transfers_total") == 2 and now)
    for direction in ("send", "receive"):
        assert found("transfers_total", direction=direction, route="group", outcome="complete") == 1
        assert found("transfer_bytes_total", direction=direction, route="group") == 4000
        assert found("transfer_seconds_count", direction=direction) == 1
        assert found("transfer_seconds_bucket", direction=direction, le="+Inf") == 1
        moving = found("transfer_moving_seconds_total", direction=direction)
        assert moving is not None
        assert 0 < moving <= (found("transfer_seconds_sum", direction=direction) or 0)
    assert (found("transfer_lost_sources_total"), found("transfer_repaired_parcels_total")) == (0, 0)
    assert found("transfers_total", outcome="failed") == 0  # It is there before something fails.


def test_what_goes_wrong_in_transfers(path: pathlib.Path) -> None:
    damaged: list[bool] = []

    def damage(data: torch.Tensor) -> torch.Tensor:
        if data.nbytes > 100_000 and not damaged:
            damaged.append(True)
            data.view(torch.uint8)[5] ^= 1
        return data

    def work(rank: int, pg: Any) -> None:
        move(rank, Tampering(pg, damage) if rank == 0 else pg, {"w": torch.zeros(1 << 20, dtype=torch.uint8)})

    with Ranks(2) as ranks:
        ranks.run(work)
    found = until(lambda: path.exists() and (now := read(path))("transfers_total") == 2 and now)
    assert found("transfer_repaired_parcels_total", direction="receive") == 1
    counted = SharedFile(path)
    counted.note(report(failed={1: "it was lost", 2: "it is silent"}))
    counted.note(report(error="PeerLost: gone", route="", bytes=0, failed={0: "gone"}))
    counted.note(report("send", failed={3: "refused"}, error="SendFailed: 3", kept_bytes=0))
    found = until(lambda: (now := read(path))("transfers_total") == 5 and now)
    assert found("transfers_total", outcome="without_some", direction="receive") == 1
    assert found("transfers_total", outcome="failed", direction="receive", route="none") == 1
    assert (found("transfer_lost_sources_total"), found("transfer_lost_receivers_total")) == (3, 1)


# --------------------------------------------------------------------------------------------------- several processes


def forked(work: Callable[[], object]) -> int:
    """A process of its own that does this, and ends."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def count_many(number: int) -> None:
    """As a worker counts."""
    for _ in range(300):
        shared_file.note(report(bytes=number))
    shared_file._write_all()


def test_several_processes_count_in_one_file(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "METRICS_WRITE_SECONDS", 0.002)
    monkeypatch.setattr(shared_file, "METRICS_EXIT_SECONDS", 60.0)
    children = [forked(partial(count_many, number)) for number in (1, 2, 3, 4)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    found = read(path)
    assert found("transfers_total") == 1200
    assert found("transfer_bytes_total") == 300 * (1 + 2 + 3 + 4)
    assert sorted(one.name for one in path.parent.iterdir()) == ["metrics.lock", "metrics.prom"]


def count_for_ever() -> None:
    while True:
        shared_file.note(report(bytes=1))


def test_a_process_that_is_killed_leaves_the_file_whole(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "METRICS_WRITE_SECONDS", 0.0)
    last = 0.0
    for _ in range(5):
        child = forked(count_for_ever)
        try:
            until(path.exists)
            for _ in range(20):
                now = read(path)("transfers_total")
                assert now is not None
                assert now >= last
                last = now
            freeze(child)  # Perhaps it has the lock.
            assert read(path)("transfers_total") is not None
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    before = read(path)("transfers_total")
    assert before is not None
    counted = SharedFile(path)
    counted.note(report())
    until(lambda: read(path)("transfers_total") > before)  # type: ignore[operator]


@pytest.mark.soak  # A process that has to import torch. The two tests above have the same, but for the end by itself.
def test_what_a_process_counts_is_there_after_its_end(path: pathlib.Path) -> None:
    """Though it ends at once, and the file is written by another thread; what it forks counts nothing twice."""
    script = (
        "import os\n"
        "from transfuse._metrics import shared_file\n"
        "from transfuse._report import Report\n"
        "shared_file.METRICS_WRITE_SECONDS = 60.0\n"
        "for _ in range(5): shared_file.note(Report('send', (1,), route='memory', bytes=10))\n"
        "child = os.fork()\n"
        "if not child: raise SystemExit\n"
        "os.waitpid(child, 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    found = read(path)
    assert (found("transfers_total", route="memory"), found("transfer_bytes_total")) == (5, 50)


# --------------------------------------------------------------------------------------------------- files that are not


def said(caplog: pytest.LogCaptureFixture, pattern: str) -> int:
    return sum(re.search(pattern, one.getMessage()) is not None for one in caplog.records)


@pytest.mark.parametrize("text", ["not ours\n", "transfuse_transfers_total{direct", "transfuse_transfers_total x\n"])
def test_a_damaged_file_is_begun_anew(path: pathlib.Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    path.write_text(text)
    counted = SharedFile(path)
    for _ in range(3):
        counted.note(report())
    until(lambda: path.read_text().startswith("# HELP"))
    found = until(lambda: (now := read(path))("transfers_total") == 3 and now)
    assert found("transfer_bytes_total") == 3000
    assert said(caplog, "is begun anew, since it is damaged") == 1


@pytest.fixture
def full(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system without any room."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system here")
    try:
        (folder / "filler").write_bytes(bytes(60 << 10))
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.usefixtures("path")
def test_a_full_disk_is_told_once_and_nothing_is_lost(full: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    counted = SharedFile(full / "metrics.prom")
    for _ in range(4):
        counted.note(report())
        counted.write(1.0)
    assert said(caplog, r"cannot be written to .*metrics.prom: .*No space left on device; trying again") == 1
    assert sorted(one.name for one in full.iterdir()) == ["filler", "metrics.lock"]
    (full / "filler").unlink()
    until(lambda: (full / "metrics.prom").exists() and read(full / "metrics.prom")("transfers_total") == 4)


def test_a_process_that_holds_the_lock_for_good_stops_nobody(
    path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open(path.with_suffix(".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        counted = SharedFile(path)
        counted.note(report())
        until(lambda: said(caplog, "another process has locked"))
        assert not path.exists()
    until(path.exists)
    assert read(path)("transfers_total") == 1


def test_a_relative_path_is_refused_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSFUSE_METRICS", "metrics.prom")
    monkeypatch.setattr(shared_file, "_files", {})
    for _ in range(2):
        shared_file.note(report())
    assert said(caplog, "TRANSFUSE_METRICS must be an absolute path, got 'metrics.prom'") == 1
    assert list(tmp_path.iterdir()) == []
