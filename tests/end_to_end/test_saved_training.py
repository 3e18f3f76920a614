"""Everything of a job is killed, keepers too: it goes on from storage, and its end is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import signal
import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import saved_training
from host_jobs import PORT, host_job
from keeping import Home, home, keepers_in, until  # noqa: F401
from saved_training import SAVE_EVERY, train
from transfuse._keeper.storage import Storage
from transfuse.testing.ranks import Fleet

pytestmark = pytest.mark.timeout(1500)

STEPS = 20


def undisturbed(tmp_path: pathlib.Path, steps: int = STEPS) -> str:
    with Fleet(1) as fleet:
        fleet.start(train, "", str(tmp_path), steps)
        ((_, end),) = [outcome.get() for outcome in fleet.outcomes(120)]
        return str(end)


def starts(tmp_path: pathlib.Path) -> list[Any]:
    return [json.loads(line)["restored"] for line in (tmp_path / "starts").read_text().splitlines()]


def lose_everything(home: Home, fleet: Fleet, ranks: int) -> None:  # noqa: F811
    """Workers, keepers, and what these have noted: all hosts have lost power."""
    keepers = keepers_in(home.base)
    for rank in range(ranks):
        fleet.kill(rank)
    for pid in keepers:
        os.kill(pid, signal.SIGKILL)
    fleet.outcomes(60)

    def is_lost() -> bool:
        for pid in keepers_in(home.base):  # A worker that has outlived its keeper may have started another one.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not keepers_in(home.base)

    until(is_lost)
    shutil.rmtree(home.base)
    home.base.mkdir(mode=0o700)


def check_storage(folder: pathlib.Path) -> int:
    """Every step that counts is whole. Returns the newest; 0: there is none."""
    storage = Storage.at(folder)
    for label in storage.labels():
        record = storage.record(label)
        assert storage.present(label, record) == list(range(record.world_size))
        for rank in range(record.world_size):
            os.close(storage.open(label, record, rank))
    return max((label.step for label in storage.labels()[:1]), default=0)


def is_there(folder: pathlib.Path, step: int) -> bool:
    return check_storage(folder) >= step


def test_a_job_goes_on_from_storage_with_another_number_of_ranks(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    folder = tmp_path / "saved"
    folder.mkdir()
    with Fleet(2) as fleet:
        fleet.start(train, str(folder), str(tmp_path), STEPS, 0.02, "job")
        fleet.wait_for(0, "step 8", 100)
        until(partial(is_there, folder, 3))
        lose_everything(home, fleet, 2)
    before = check_storage(folder)
    with Fleet(1) as fleet:
        fleet.start(train, str(folder), str(tmp_path), STEPS, 0.0, "job")
        ends = [outcome.get() for outcome in fleet.outcomes(120)]
    assert ends == [(before, undisturbed(tmp_path))]
    assert starts(tmp_path) == [None, None, before]
    # The last step has been saved, too, before the keeper ended.
    until(lambda: not keepers_in(home.base))
    assert check_storage(folder) == STEPS // SAVE_EVERY * SAVE_EVERY


@pytest.mark.soak
def test_a_job_survives_the_loss_of_everything_at_random_moments(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    """Twenty times, on one, two or four ranks."""
    folder, seed = tmp_path / "saved", int(os.environ.get("TRANSFUSE_TEST_SEED", str(time.time_ns() % 10**6)))
    folder.mkdir()
    chance, steps = random.Random(seed), 120
    for _ in range(20):
        ranks = chance.choice([1, 2, 4])
        with Fleet(ranks) as fleet:
            fleet.start(train, str(folder), str(tmp_path), steps, 0.03, "job")
            before = check_storage(folder)
            fleet.wait_for(0, f"step {min(before + chance.randrange(1, 9), steps - 1)}", 100)
            time.sleep(chance.random() * 0.05)
            lose_everything(home, fleet, ranks)
        assert check_storage(folder) >= before, seed
    with Fleet(2) as fleet:
        fleet.start(train, str(folder), str(tmp_path), steps, 0.0, "job")
        ends = [outcome.get() for outcome in fleet.outcomes(120)]
    assert [end for _, end in ends] == [undisturbed(tmp_path, steps)] * 2, seed


@pytest.mark.soak
def test_two_hosts_survive_the_loss_of_everything_at_random_moments(tmp_path: pathlib.Path) -> None:
    """Both hosts, twenty times: torchruns, workers and keepers. It starts again on one of them, or on both."""
    folder, seed = tmp_path / "saved", int(os.environ.get("TRANSFUSE_TEST_SEED", str(time.time_ns() % 10**6)))
    folder.mkdir()
    chance, steps = random.Random(seed), 150

    def command(out: pathlib.Path) -> list[str]:
        return [saved_training.__file__, str(folder), str(out), str(steps), "0.05"]

    with host_job(2, command) as job:
        for life in range(20):
            hosts, before = chance.choice([1, 2, 2]), check_storage(folder)
            (job.out / "step 0").write_text(str(before))
            for host in range(hosts):
                job.start(host, str(hosts), port=PORT + life)
            job.wait_for_step(min(before + chance.randrange(1, 9), steps - 1))
            time.sleep(chance.random() * 0.1)
            for host in range(hosts):
                job.lose(host)
            assert check_storage(folder) >= before, seed
        newest = check_storage(folder)
        for host in range(2):
            job.start(host, "2", port=PORT + 20)
        job.wait()
        assert set(job.ends()) == {undisturbed(tmp_path, steps)}, seed
        assert {start["restored"] for start in job.starts[-4:]} == {newest}
    assert check_storage(folder) == steps // SAVE_EVERY * SAVE_EVERY
