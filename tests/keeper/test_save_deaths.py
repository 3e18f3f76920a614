"""Keepers that are killed in the middle of a save: never a step that counts and is not whole, and saving goes on."""

from __future__ import annotations

import os
import pathlib
import random
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from ring_hosts import SECONDS, Job, contents, until
from transfuse._keeper import frames
from transfuse._keeper.slot_file import Label, SlotView
from transfuse._keeper.storage import Storage
from transfuse._memory.blocks import digests_at

pytestmark = pytest.mark.timeout(4000)

NBYTES = 20 << 20


def check(folder: pathlib.Path, ranks: int) -> list[Label]:
    """Every step that counts is whole, byte for byte. Returns them, newest first."""
    storage = Storage.at(folder)
    for label in storage.labels():
        record = storage.record(label)
        assert storage.present(label, record) == list(range(ranks))
        for rank in range(ranks):
            fd = storage.open(label, record, rank)
            view = SlotView(fd, writable=False)
            os.close(fd)
            bundles = view.brief().bundles
            start, size = int(bundles.places[0]), int(bundles.nbytes[0])
            assert np.array_equal(view.bytes[start : start + size], contents(rank, label.step, NBYTES))
            assert digests_at(view.address + bundles.places, bundles.nbytes) == bundles.digests
    return storage.labels()


def has_written(folder: pathlib.Path, step: int, least: int) -> bool:
    """Whether there are this many bytes of a step, or it counts already."""
    found = 0
    for path in folder.glob(f"step-{step}-*/*"):
        with suppress(FileNotFoundError):
            found += NBYTES if path.name == "step.json" else path.stat().st_size
    return found > least


def kill_in_saves(job: Job, tmp_path: pathlib.Path, hosts: int, count: int, seed: int) -> None:
    folder, chance = tmp_path / "saved", random.Random(seed)
    folder.mkdir()
    for _ in range(hosts):
        job.add_host(processes=True)
    saves = frames.Saves(str(folder), 1, 2, SECONDS)
    kept: list[Label] = []
    for number in range(1, count + 1):
        for worker in job.workers:
            worker.link.close()
        for host in job.hosts if number > 1 else ():
            host.start_process()
        # As fast as a disk of 200 MB/s.
        job.meet(range(hosts), rate=2e8, sizes=[NBYTES] * hosts, saves=saves)
        job.commit(number)
        if chance.random() < 0.2:
            until(partial(has_saved, job, number), "a save that nobody stops")
            kept = [Label(job.generation, number), *kept[:1]]
        else:
            until(partial(has_written, folder, number, chance.randrange(hosts * NBYTES)), "a part of a save")
            time.sleep(chance.random() * 0.02)
        for host in chance.sample(job.hosts, hosts):
            assert host.child is not None
            host.child.end()
        now = check(folder, hosts)
        assert kept[:1] <= now[:1], (seed, number)
        kept = now


def has_saved(job: Job, step: int) -> bool:
    return bool(job.workers[0].status()["storage"]["saved"][:1] == [step])


@pytest.mark.processes
def test_a_keeper_that_is_killed_leaves_the_older_steps_whole(job: Job, tmp_path: pathlib.Path) -> None:
    kill_in_saves(job, tmp_path, hosts=1, count=5, seed=3)


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize("hosts", [1, 2])
def test_two_hundred_saves_with_kills_at_random_bytes(job: Job, tmp_path: pathlib.Path, hosts: int) -> None:
    kill_in_saves(
        job, tmp_path, hosts, count=200, seed=int(os.environ.get("TRANSFUSE_TEST_SEED", "0")) or time.time_ns()
    )
