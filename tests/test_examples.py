"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def torchrun(processes: int, name: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    # Quiet about threads, and never a name lookup.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, EXAMPLES / name], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
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
