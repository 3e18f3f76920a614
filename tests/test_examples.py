"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from subprocess import PIPE

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


pytestmark = pytest.mark.timeout(200)

#: Each process imports torch, and all share two cores with other tests.
SECONDS = 150


def run(*command: object) -> subprocess.CompletedProcess[str]:
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
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def torchrun(processes: int, name: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = run(*launcher, EXAMPLES / name)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_heal() -> None:
    assert torchrun(2, "heal.py").splitlines() == ["healed: ranks agree bit for bit"]


def test_fanout() -> None:
    # Three ranks write to one pipe: their lines may run into each other.
    output = torchrun(3, "fanout.py")
    assert "rank 1: received everything: True" in output
    assert "source: complete for ranks [1]" in output
    assert "rank 2: refused, target untouched: True" in output
    assert "source: rank 2 has nothing: PeerRefused" in output


def test_reshard() -> None:
    *moves, last = torchrun(5, "reshard.py").splitlines()
    assert last == "weights equal bit for bit, logits as in a single process"
    assert [line.split(" got ")[0] for line in moves] == [f"step {s}: rank {r}" for s in (5, 8) for r in (2, 3, 4)]
    got, kept = [], []
    for line in moves:
        *parts, here = map(float, re.findall(r"([\d.]+) KiB", line))
        got.append(sum(parts))
        kept.append(here)
    # The embedding is frozen: 2000 rows of 96 bfloat16, of which the ranks have 667, 667 and 666.
    assert kept == [0, 0, 0, 125.1, 125.1, 124.9]
    assert [a + b for a, b in zip(got[3:], kept[3:], strict=True)] == pytest.approx(got[:3], abs=0.2)


def test_heal_hsdp() -> None:
    *moves, loss, last = torchrun(4, "heal_hsdp.py").splitlines()
    assert last == "healed: every loss on every rank as in the undisturbed run"
    assert re.fullmatch(r"loss in step 10: [\d.]+, in the last [\d.]+", loss)
    # Weights and two moments of 50 of the 99 rows or of 49, with the last layer's only row at the first rank of a
    # replica; and six counters of steps, which every rank has.
    floats = [3 * (rows * 33 + rows * 100 + more) + 6 for rows, more in ((50, 100), (49, 0))]
    assert [line.split(", by")[0] for line in moves] == [
        f"rank {rank}: {4 * count:,} bytes" for rank, count in zip((2, 3), floats, strict=True)
    ]


def test_shrink() -> None:
    *moves, gone, losses, last = torchrun(4, "shrink.py").splitlines()
    assert last == "shrunk: state and losses as from a checkpoint, bit for bit"
    assert gone == "rank 3 has sent what it held"
    assert re.fullmatch(r"losses: [\d.]+ to [\d.]+; with four, [\d.]+ to [\d.]+", losses)
    found = [re.fullmatch(r"rank (\d) has ([\d,]+) bytes: ([\d,]+) of its own, ([\d,]+) from others", m) for m in moves]
    numbers = [[int(group.replace(",", "")) for group in match.groups()] for match in found if match is not None]
    # Weights and two moments of 34, 34 and 32 of the 100 rows, the last layer at rank 0; and six counters of steps.
    floats = [3 * (rows * 33 + rows * 101 + more) + 6 for rows, more in ((34, 101), (34, 0), (32, 0))]
    assert [row[:2] for row in numbers] == [[rank, 4 * count] for rank, count in enumerate(floats)]
    assert all(total == own + others for _, total, own, others in numbers)


@pytest.mark.soak
def test_without_torchrun() -> None:
    done = run(EXAMPLES / "heal_hsdp.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "healed: every loss on every rank as in the undisturbed run" in done.stdout
