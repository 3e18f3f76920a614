"""The examples run as their docstrings say: forked, and in `make soak` by the real torchrun.

Those that torchrun restarts are run by it in any case.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from subprocess import PIPE

import pytest
import torch.distributed as dist

import forking
from example_outputs import ALONE, EXAMPLES, RANKS, RESTARTED, heal_ddp, reshard, shrink
from transfuse.testing.ranks import run_program

pytestmark = pytest.mark.timeout(400)

#: For real processes, each of which imports torch, on two cores that they share with other tests.
SECONDS = 150


def run(*command: object) -> str:
    # Quiet about threads, and never a name lookup.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, *map(str, command)]
    with subprocess.Popen(words, env=environment, stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            # torchrun ends its workers when it is asked to end, not when it is killed.
            process.terminate()
            out, err = process.communicate()
            raise AssertionError(f"not done after {SECONDS} s:\n{out}{err}") from None
    assert process.returncode == 0, out + err
    return out


def torchrun(name: str, ranks: int, *options: str) -> str:
    return run("-m", "torch.distributed.run", *options, f"--nproc-per-node={ranks}", EXAMPLES / f"{name}.py")


def fork(name: str, ranks: int | None) -> str:
    program = EXAMPLES / f"{name}.py"
    if ranks is not None:
        ended = run_program(program, ranks)
    else:
        ended = run_program(pathlib.Path(forking.__file__), arguments=[str(program)])
    assert all(rank.code == 0 for rank in ended), "\n".join(map(str, ended))
    return "".join(rank.out for rank in ended)


@pytest.mark.parametrize("check", RANKS, ids=lambda check: check.__name__)
def test_forked(check: Callable[[str], None]) -> None:
    check(fork(check.__name__, RANKS[check]))


@pytest.mark.parametrize("check", ALONE, ids=lambda check: check.__name__)
def test_alone(check: Callable[[str], None]) -> None:
    check(fork(check.__name__, None))


@pytest.mark.soak
@pytest.mark.parametrize("check", RANKS, ids=lambda check: check.__name__)
def test_by_torchrun(check: Callable[[str], None]) -> None:
    check(torchrun(check.__name__, RANKS[check], "--standalone"))


# The real torchrun, twice.
@pytest.mark.soak
@pytest.mark.parametrize("standalone", [False, True])
@pytest.mark.parametrize("check", RESTARTED, ids=lambda check: check.__name__)
def test_restarted(check: Callable[[str], None], standalone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The path of a unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="tf") as directory:
        monkeypatch.setenv("TRANSFUSE_KEEPER_DIR", directory)
        check(torchrun(check.__name__, RESTARTED[check], "--max-restarts=3", *["--standalone"] * standalone))
        # The keeper has ended, or does so now.
        until = time.monotonic() + 30
        while list(pathlib.Path(directory).glob("*/socket")):
            assert time.monotonic() < until, "the keeper is still there"
            time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.parametrize("check", [reshard, shrink, *ALONE], ids=lambda check: check.__name__)
def test_without_torchrun(check: Callable[[str], None]) -> None:
    check(run(EXAMPLES / f"{check.__name__}.py"))


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch 2.14 or newer reconfigures a group in place")
def test_a_killed_rank_rejoins_the_group_of_the_survivors() -> None:
    heal_ddp(run(EXAMPLES / "rejoin.py"))


def test_docstrings_say_how_it_is_run() -> None:
    for check, ranks in RANKS.items():
        text = (EXAMPLES / f"{check.__name__}.py").read_text()
        assert f"torchrun --nproc-per-node {ranks} examples/{check.__name__}.py\n" in text
    for check, ranks in RESTARTED.items():
        text = (EXAMPLES / f"{check.__name__}.py").read_text()
        assert f"torchrun --nproc-per-node {ranks} --max-restarts 3 examples/{check.__name__}.py\n" in text
    for check in ALONE:
        assert f"python examples/{check.__name__}.py\n" in (EXAMPLES / f"{check.__name__}.py").read_text()
