"""Everything of a job is killed, keepers too: it goes on from storage, and its end is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import pathlib
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
from losses import Losses
from saved_training import SAVE_EVERY, train
from transfuse.testing.ranks import Fleet

pytestmark = pytest.mark.timeout(1500)

STEPS = 20


def undisturbed(tmp_path: pathlib.Path, steps: int = STEPS, ranks: int = 1, kind: str = "same") -> list[str]:
    """What a job that nobody disturbs has made in the end, by rank."""
    with Fleet(ranks) as fleet:
        fleet.start(train, "", str(tmp_path), steps, 0.0, None, kind)
        return [str(end) for _, end in (outcome.get() for outcome in fleet.outcomes(200))]


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


def is_there(folder: pathlib.Path, step: int) -> bool:
    return Losses(folder).look() >= step


def test_a_job_goes_on_from_storage_with_another_number_of_ranks(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    folder = tmp_path / "saved"
    folder.mkdir()
    with Fleet(2) as fleet:
        fleet.start(train, str(folder), str(tmp_path), STEPS, 0.02, "job")
        fleet.wait_for(0, "step 8", 100)
        until(partial(is_there, folder, 3))
        lose_everything(home, fleet, 2)
    before = Losses(folder).look()
    with Fleet(1) as fleet:
        fleet.start(train, str(folder), str(tmp_path), STEPS, 0.0, "job")
        ends = [outcome.get() for outcome in fleet.outcomes(120)]
    assert ends == [(before, *undisturbed(tmp_path))]
    assert starts(tmp_path) == [None, None, before]
    # The last step has been saved, too, before the keeper ended.
    until(lambda: not keepers_in(home.base))
    assert Losses(folder).look() == STEPS // SAVE_EVERY * SAVE_EVERY


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["same", "own"])
def test_a_job_survives_the_loss_of_everything_at_random_moments(
    home: Home,  # noqa: F811
    tmp_path: pathlib.Path,
    kind: str,
) -> None:
    """Twenty times, on one, two or four ranks; on two ranks if each has something of its own."""
    (folder := tmp_path / "saved").mkdir()
    losses, steps, seen = Losses(folder), 1000, 0
    for life in range(20):
        ranks = losses.chance.choice([1, 2, 4]) if kind == "same" else 2
        losses.begin(life)
        with Fleet(ranks) as fleet:
            fleet.start(train, str(folder), str(tmp_path), steps, 0.05, "job", kind)
            until(lambda: losses.has_come(_step(tmp_path)), 100)
            time.sleep(losses.chance.random() * 0.05)
            lose_everything(home, fleet, ranks)
        found, seen = starts(tmp_path)[seen:], seen + ranks
        losses.check(set(found))
    check_enough(losses)
    with Fleet(2) as fleet:
        fleet.start(train, str(folder), str(tmp_path), steps, 0.0, "job", kind)
        ends = [outcome.get() for outcome in fleet.outcomes(200)]
    assert ends == [(losses.newest, end) for end in undisturbed(tmp_path, steps, 2, kind)], losses.seed


def check_enough(losses: Losses) -> None:
    """Otherwise the test has not tried what it is for."""
    assert losses.restored >= 10, losses.seed
    assert losses.under_way >= 5, losses.seed


def _step(notes: pathlib.Path) -> int:
    with suppress(OSError, ValueError):
        return int((notes / "step 0").read_text())
    return 0


@pytest.mark.parametrize(
    ("lives", "steps", "kind", "ranks"),
    [
        pytest.param(1, 60, "own", 1, id="short", marks=pytest.mark.long),
        pytest.param(20, 1000, "own", 2, marks=pytest.mark.soak, id="own"),
        pytest.param(20, 1000, "same", 2, marks=pytest.mark.soak, id="same"),
    ],
)
def test_two_hosts_survive_the_loss_of_everything(
    tmp_path: pathlib.Path, lives: int, steps: int, kind: str, ranks: int
) -> None:
    """Both hosts at once, torchruns, workers and keepers. If nobody has anything of its own, one may go on alone."""
    (folder := tmp_path / "saved").mkdir()
    losses, seen = Losses(folder), 0

    def command(out: pathlib.Path) -> list[str]:
        return [saved_training.__file__, str(folder), str(out), str(steps), "0.05", kind]

    with host_job(2, command) as job:
        for life in range(lives):
            hosts = losses.chance.choice([1, 2, 2]) if kind == "same" else 2
            losses.begin(life)
            (job.out / "step 0").write_text("0")
            for host in range(hosts):
                job.start(host, str(hosts), port=PORT + life, ranks=ranks)
            job.wait_for(lambda: losses.has_come(job.step()), 0.002)
            time.sleep(losses.chance.random() * 0.02)
            job.lose(*range(hosts))
            found, seen = job.starts[seen:], seen + hosts * ranks
            losses.check({start["restored"] for start in found})
        if lives > 1:
            check_enough(losses)
        for host in range(2):
            job.start(host, "2", port=PORT + lives, ranks=ranks)
        job.wait()
        assert job.ends() == undisturbed(tmp_path, steps, 2 * ranks, kind), losses.seed
        assert {start["restored"] for start in job.starts[seen:]} == {losses.newest}
        # The last step has been saved, too, before the keepers ended.
        job.wait_for(lambda: not job.keepers())
    assert losses.look() == steps // SAVE_EVERY * SAVE_EVERY
