"""The examples run as their docstrings say: forked, and in `make soak` by the real torchrun.

Those that torchrun restarts are run by it in any case.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from subprocess import PIPE
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forking
from example_outputs import ALONE, EXAMPLES, RANKS, RESTARTED, heal_ddp, heal_hsdp, reshard, shrink
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
@pytest.mark.parametrize("check", [reshard, heal_hsdp, shrink, *ALONE], ids=lambda check: check.__name__)
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


# ------------------------------------------------------------------------------ the recipe for a data loader


def made_by_keep(**options: Any) -> Any:
    specification = importlib.util.spec_from_file_location("examples_keep", EXAMPLES / "keep.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.Loader(list(range(23)), 1, 2, batch_size=3, **options)


# Processes that read ahead come from a fork server: a fork of pytest's own process may find a lock held for ever.
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_the_loader_goes_on_with_the_next_batch(workers: int) -> None:
    """Wherever it is left, also between two epochs, and however far its processes have read ahead."""
    undisturbed = [batch.tolist() for batch, _ in zip(made_by_keep(), range(8), strict=False)]
    assert len({tuple(batch) for batch in undisturbed}) == 8, "a new order each epoch"
    assert all(len({*itertools.chain(*undisturbed[at : at + 3])}) == 9 for at in (0, 3)), "nothing twice in an epoch"
    for left_after in (0, 1, 3, 4) if workers else range(8):
        how: dict[str, Any] = {"multiprocessing_context": "forkserver"} if workers else {}
        first, second = (made_by_keep(num_workers=workers, **how) for _ in range(2))
        seen = [batch.tolist() for _, batch in zip(range(left_after), first, strict=False)]
        second.load_state_dict(first.state_dict())
        seen += [batch.tolist() for _, batch in zip(range(8 - left_after), second, strict=False)]
        assert seen == undisturbed


def test_the_loader_draws_nothing_from_torchs_random_numbers() -> None:
    before = torch.get_rng_state()
    next(iter(made_by_keep()))
    assert torch.equal(torch.get_rng_state(), before)
