"""A job of two hosts whose keepers are killed, cut off or full: warnings, and the state survives.

Every rank is a thread, and a host is a keeper: ranks with other names of the run have other keepers.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transfuse
from keeping import SECONDS, Home, Job, exact, home, keepers_in, same, threaded, until  # noqa: F401
from transfuse._errors import StateError
from transfuse._keeper import client, door, frames
from transfuse._keeper.frames import KeeperLost
from transfuse.testing.ranks import ProcessPool

pytestmark = pytest.mark.usefixtures("threaded", "impatient")
MIB = 1 << 20


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "KEEP_REVIVE_SECONDS", 0.05)


def on(*hosts: str) -> list[dict[str, Any]]:
    """Options for ranks on these hosts."""
    return [{"run": host} for host in hosts]


def fill(states: list[dict[str, torch.Tensor]], step: int) -> None:
    for rank, state in enumerate(states):
        state["w"].fill_(100 * step + rank)


def commit_until_confirmed(home: Home, job: Job, states: list[dict[str, torch.Tensor]], step: int, *hosts: str) -> int:  # noqa: F811
    """Commit one step after the other, until both hosts know that one of these is confirmed. Returns the newest."""
    first = step

    def is_confirmed() -> bool:
        nonlocal step
        step += 1
        fill(states, step)
        job.commit(step)
        try:
            steps = [home.status(host)["confirmed_step"] for host in hosts]
        except KeeperLost:
            return False
        return all(one is not None and one > first for one in steps)

    until(is_confirmed, 2 * SECONDS)
    return step


def warned(caplog: pytest.LogCaptureFixture, text: str) -> int:
    # Not the reports of commits, which say it too, at level INFO.
    said = [one for one in caplog.records if one.name == "transfuse" and one.levelno >= logging.WARNING]
    return sum(text in record.getMessage() for record in said)


@pytest.mark.soak
@pytest.mark.processes
def test_a_killed_keeper_comes_back_and_a_host_that_is_lost_later_is_restored(
    home: Home,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    states = [{"w": torch.zeros(5000)} for _ in range(2)]
    with Job(2) as job:
        job.start(same(*states), on("a", "b"))
        step = commit_until_confirmed(home, job, states, 0, "a", "b")
        pid = home.status("b")["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in keepers_in(home.base))
        step = commit_until_confirmed(home, job, states, step, "a", "b")
        assert warned(caplog, "goes on without the keeper") == 1
        assert warned(caplog, "has found the keeper of its host again") == 1
        lost = home.status("b")
        os.kill(lost["pid"], signal.SIGKILL)  # Now the host is lost, and another one takes its place.
        confirmed = lost["confirmed_step"]
    targets = [{"w": torch.zeros(5000)} for _ in range(2)]
    with Job(2) as job:
        job.start(same(*targets), on("a", "c"))
        restored = job.restore()
        assert restored is not None
        assert restored >= confirmed
        fill(states, restored)
        assert exact(targets, states)
        commit_until_confirmed(home, job, states, step, "a", "c")
        job.all(lambda keep: keep.close())
    until(lambda: {"a", "c"} & {path.name for path in home.base.iterdir()} == set())


def test_a_host_without_room_for_replicas_is_named_on_both_hosts(home: Home, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    for host in ("a", "b"):
        home.start(host)
    states = [{"w": torch.zeros(MIB // 4)}, {"w": torch.zeros(2 * MIB)}]
    with Job(2) as job:
        # Room for four slots of its own on host 0, and for the replicas of a host like it.
        job.start(same(*states), [{"run": "a", "max_bytes": 8 * MIB}, {"run": "b"}])
        step = commit_until_confirmed(home, job, states, 0, "a", "b")
        for _ in range(3):
            step = commit_until_confirmed(home, job, states, step, "a", "b")
        reports = [keep.report for keep in job.keeps]
        assert all(report is not None for report in reports)
        here, there = (report.unreplicated for report in reports if report is not None)
        assert "host 0 has no room for replicas of host 1" in here
        assert "max_bytes" in here
        assert there == "host 1 has no replica on hosts [0], which have no room: its state is lost with it"
        assert reports[1] is not None
        assert there in reports[1].line()
        assert warned(caplog, "host 0 has no room") == 1
        assert warned(caplog, "host 1 has no replica") == 1


def test_a_keeper_that_cannot_be_reached_costs_a_warning(
    home: Home,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "LONGEST_PAUSE", 0.2)
    keepers = [home.start(host) for host in ("a", "b")]
    states = [{"w": torch.zeros(5000)} for _ in range(2)]
    with Job(2) as job:
        job.start(same(*states), on("a", "b"))
        step = commit_until_confirmed(home, job, states, 0, "a", "b")
        cut = keepers[1].ring._door
        assert cut is not None
        cut.close()
        cut.join(0.0)
        before = home.status("a")["confirmed_step"]

        def is_noticed() -> bool:
            nonlocal step
            step += 1
            job.commit(step)  # Training goes on, whether there is a slot or not.
            return warned(caplog, "the keepers of hosts [1] cannot be reached") > 0

        until(is_noticed)
        for _ in range(10):
            step += 1
            job.commit(step)
        assert warned(caplog, "cannot be reached") == 1
        assert home.status("a")["confirmed_step"] <= before + 1
        keepers[1].ring._door = None
        assert keepers[1].ring.listen(cut.host, cut.token) == cut.address
        step = commit_until_confirmed(home, job, states, step, "a", "b")


def lose_shards(rank: int, base: str) -> list[Any]:
    """A job on two hosts without replicas loses one of them. Returns what ``restore`` does, and what it has called."""
    os.environ["TRANSFUSE_KEEPER_DIR"] = base
    mesh = init_device_mesh("cpu", (4,))
    # Ranks 0 and 1 have all of one leaf's elements, some twice; and of another as many, but not all.
    covered, uncovered = [(0, 5), (3, 8), (6, 8), (0, 2)][rank], [(0, 5), (1, 5), (5, 8), (0, 2)][rank]
    state = {
        "w": distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)]),
        "covered": transfuse.Block(torch.arange(*map(float, covered)), start=covered[:1], shape=(8,)),
        "uncovered": transfuse.Block(torch.arange(*map(float, uncovered)), start=uncovered[:1], shape=(8,)),
    }
    options: dict[str, Any] = {"replicas": 0, "timeout": SECONDS}
    with transfuse.keep(lambda: state, run=f"host{rank // 2}", **options) as keep:
        keep.commit(1)
        until(lambda: json.loads(keep._ask(frames.Status(), frames.StatusReply).text)["confirmed_step"] == 1)
        dist.barrier()
        keep.detach()
    calls: list[str] = []

    def touching() -> Any:
        calls.append("get_state_dict on a fresh optimizer runs a step")
        return state

    found: list[Any] = []
    with transfuse.keep(touching, run=f"host{rank // 2 * 2}", **options) as keep:  # Ranks 2 and 3 are on a new host.
        try:
            keep.restore()
        except StateError as error:
            found.append(str(error))
        found += [keep.restore(missing_ok=True), calls]
    return found


@pytest.mark.processes
def test_a_restore_that_lacks_shards_does_not_even_ask_for_the_state(home: Home, pool4: ProcessPool) -> None:  # noqa: F811
    results = [outcome.get() for outcome in pool4.run(lose_shards, str(home.base), deadline=4 * SECONDS)]
    for error, step, calls in results:
        assert "only ranks [2, 3], whose state is not here, had shards of 2 leaves: ['uncovered'], ['w']" in error
        assert "Nothing was touched" in error
        assert step is None
        assert calls == []
