"""Real torchrun jobs whose ranks are killed: they go on from memory, and end as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

import kept_training
from keeping import Home, home, keepers_in, until  # noqa: F401
from kept_training import MOMENTS, Plan
from transfuse.testing.ranks import run_program

PLAIN: list[str] = []
ALONE = ["--standalone"]
C10D = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}"]
NAMED = [*C10D, "--rdzv-id", "a name"]
SECONDS = 240.0


# -------------------------------------------------------------------------------------------------- the tests


ENVIRON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def command(plan: Plan, ranks: int, arguments: list[str]) -> list[str]:
    """A torchrun of this plan."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pathlib.Path(plan.directory).mkdir(exist_ok=True)
    words = [word.format(port=port) for word in arguments]
    words += [f"--nproc-per-node={ranks}", f"--max-restarts={3 * len(plan.deaths)}", "--monitor-interval=0.05"]
    words += [kept_training.__file__, json.dumps(dataclasses.asdict(plan))]
    return [sys.executable, "-m", "torch.distributed.run", *words]


def run(plan: Plan, ranks: int = 2, arguments: list[str] = PLAIN, environ: dict[str, str] | None = None) -> Any:
    """A torchrun of this plan, as a context manager. Nothing may be left of it."""
    from commands import Running

    return Running(command=command(plan, ranks, arguments), environ={**ENVIRON, **(environ or {})})


def leave(plan: Plan, ranks: int, arguments: list[str]) -> list[list[dict[str, Any]]]:
    """Run to the end, and leave the keeper. Returns the notes of each rank."""
    words = command(plan, ranks, arguments)
    subprocess.run(words, env={**os.environ, **ENVIRON}, check=True, timeout=SECONDS, start_new_session=True)
    return notes(plan, ranks)


def finish(plan: Plan, ranks: int = 2, arguments: list[str] = PLAIN) -> list[list[dict[str, Any]]]:
    """Run to the end; return the notes of each rank."""
    with run(plan, ranks, arguments) as job:
        out, err = job.process.communicate(timeout=SECONDS + 60 * len(plan.deaths))
        assert job.process.returncode == 0, (out, err)
        job.until(lambda: not job.alive())
    assert len(list(pathlib.Path(plan.directory).glob("death*"))) == len(plan.deaths)
    return notes(plan, ranks)


def notes(plan: Plan, ranks: int) -> list[list[dict[str, Any]]]:
    return [
        [json.loads(line) for line in pathlib.Path(plan.directory, f"rank{rank}").read_text().splitlines()]
        for rank in range(ranks)
    ]


def check(plan: Plan, seen: list[list[dict[str, Any]]], undisturbed: list[list[dict[str, Any]]]) -> None:
    """It has ended as the undisturbed run has, all ranks have restored the same, at most one step was done again."""
    assert [some[-1] for some in seen] == [some[-1] for some in undisturbed]
    newest = [0 for _ in seen]
    lives = [[-1 if "restored" not in note else number for number, note in enumerate(some)] for some in seen]
    starts = [[number for number in some if number >= 0] for some in lives]
    for rank, some in enumerate(seen):
        for note in some:
            if "restored" in note:
                found = note["restored"] or 0
                assert newest[rank] - found <= (2 if plan.overlap else 1), (rank, note, some)
            elif note.get("outcome") == "committed" or plan.overlap:
                newest[rank] = note["step"]
    # Ranks that came to the end of their first restore have all restored the same, life by life, from the end on.
    restored = [[seen[rank][number]["restored"] for number in some] for rank, some in enumerate(starts)]
    shortest = min(map(len, restored))
    if not any(moment == "restore" for _, moment, _ in plan.deaths):
        assert len({tuple(some[-shortest:]) for some in restored}) == 1, restored


def nothing_left(home: Home) -> None:  # noqa: F811
    """Wait until no keeper is left, but that of the job whose agent is this process: it might start that job again."""
    ours = f"pid{os.getpid()}-"
    until(lambda: all(path.name.startswith(ours) for path in home.base.iterdir()) and len(keepers_in(home.base)) <= 1)


@pytest.mark.soak  # tests/house/test_readme.py kills a job under torchrun in the ordinary run.
def test_a_killed_job_goes_on_from_memory(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    plain = Plan(str(tmp_path / "plain"))
    killed = Plan(str(tmp_path / "killed"), deaths=[(1, "step", 4)])
    with run(killed) as job:
        # Forks of a process that has imported torch: they need no agent, since nobody dies.
        pathlib.Path(plain.directory).mkdir()
        words = [json.dumps(dataclasses.asdict(plain))]
        ended = run_program(pathlib.Path(kept_training.__file__), 2, arguments=words)
        assert [one.code for one in ended] == [0, 0], ended
        out, err, code = job.end()
        assert code == 0, (out, err)
    check(killed, notes(killed, 2), notes(plain, 2))
    assert [note["restored"] for note in notes(killed, 2)[0] if "restored" in note] == [None, 4]
    nothing_left(home)


def draw(seed: int, count: int, ranks: int) -> list[tuple[int, str, int]]:
    """Deaths at random moments. Steps rise, so that every death takes place."""
    chance, deaths, step = random.Random(seed), [], 0
    for _ in range(count):
        moment = chance.choice(MOMENTS)
        step += chance.randrange(2)
        # Restoring comes before the first step; a late death is a matter of milliseconds.
        when = chance.randrange(300) if moment == "late" else step
        deaths.append((chance.randrange(ranks), moment, when))
    return deaths


@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("arguments", [PLAIN, ALONE, NAMED], ids=["plain", "standalone", "c10d"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_job_survives_random_deaths(home: Home, tmp_path: pathlib.Path, kind: str, arguments: list[str]) -> None:  # noqa: F811
    count = int(os.environ.get("TRANSFUSE_TEST_DEATHS", "50"))
    seed = int(os.environ.get("TRANSFUSE_TEST_SEED", str(time.time_ns() % 10**6)))
    steps = 2 * count + 400
    plain = Plan(str(tmp_path / "plain"), kind=kind, steps=steps)
    killed = Plan(str(tmp_path / "killed"), kind=kind, steps=steps, deaths=draw(seed, count, 2))
    print("seed", seed, killed.deaths)
    check(killed, finish(killed, 2, arguments), finish(plain, 2, arguments))
    nothing_left(home)


# --------------------------------------------------------------------------------------------- named, and not


@pytest.mark.soak
@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4), (2, 1)])
def test_a_second_torchrun_of_a_named_run_has_another_number_of_ranks(
    home: Home,  # noqa: F811
    tmp_path: pathlib.Path,
    before: int,
    now: int,
) -> None:
    first = Plan(str(tmp_path / "first"), kind="fsdp", until=5, close=False)
    second = Plan(str(tmp_path / "second"), kind="fsdp", steps=5)
    one = leave(first, before, NAMED)
    other = finish(second, now, NAMED)
    assert [some[0] for some in other] == [{"restored": 5}] * now
    # Nothing was trained in between: all is as the first job has left it, on all ranks.
    assert {some[-1]["end"] for some in other} == {some[-1]["end"] for some in one}
    nothing_left(home)


@pytest.mark.soak
def test_ctrl_c_of_a_job_without_a_name_leaves_its_steps_for_a_while(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    plan = Plan(str(tmp_path / "plan"), steps=10**6, linger=5.0)
    with run(plan, 2, ALONE) as job:
        job.until(lambda: pathlib.Path(plan.directory, "rank0").exists() and notes(plan, 1)[0][-1].get("step", 0) > 5)
        assert keepers_in(home.base)
        os.kill(job.process.pid, signal.SIGINT)
        job.end()
        job.until(lambda: not job.alive())
        assert keepers_in(home.base)
    nothing_left(home)


@pytest.mark.soak
def test_a_run_in_use_is_refused(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    plan = Plan(str(tmp_path / "plan"), steps=10**6)
    with run(plan, 1, ALONE, {"TRANSFUSE_RUN": "mine"}) as job:
        job.until(lambda: pathlib.Path(plan.directory, "rank0").exists())
        with run(Plan(str(tmp_path / "other")), 1, ALONE, {"TRANSFUSE_RUN": "mine"}) as second:
            out, err, code = second.end()
        assert code != 0
        assert "belongs to the running agent" in out + err
        # The first job has noticed nothing.
        now = len(notes(plan, 1)[0])
        job.until(lambda: len(notes(plan, 1)[0]) > now + 5)


@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_job_that_overlaps_copies_survives_random_deaths(home: Home, tmp_path: pathlib.Path, kind: str) -> None:  # noqa: F811
    count = int(os.environ.get("TRANSFUSE_TEST_DEATHS", "10"))
    steps = 2 * count + 400
    plain = Plan(str(tmp_path / "plain"), kind=kind, steps=steps, overlap=True)
    killed = Plan(str(tmp_path / "killed"), kind=kind, steps=steps, overlap=True, deaths=draw(7, count, 2))
    check(killed, finish(killed), finish(plain))
    nothing_left(home)
