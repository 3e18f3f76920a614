"""The README's programs, pasted into files and run.

The first is run forked, and in `make soak` by the real torchrun. The second is run by the real torchrun, which restarts
it, and forked without a kill.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keeping import Home, home  # noqa: F401
from transfuse.testing.ranks import run_program

README = (Path(__file__).parents[2] / "README.md").read_text()


def forked(script: Path) -> str:
    ended = run_program(script, 2)
    assert all(rank.code == 0 for rank in ended), "\n".join(map(str, ended))
    return "".join(rank.out for rank in ended)


def torchrun(script: Path, *words: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words, script.name]
    done = subprocess.run(
        command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + "".join(line for line in done.stderr.splitlines(True) if line.startswith("transfuse:"))


def program(name: str) -> str:
    block = re.search(rf"```python\n(# {re.escape(name)}\n.*?)```", README, re.S)
    assert block is not None
    return block[1]


def shown_after(command: str) -> list[str]:
    """The lines that the README shows below this command."""
    shown = re.search(rf"^{re.escape(command)}\n```.*?```text\n(.*?)```", README, re.S | re.M)
    assert shown is not None
    return shown[1].splitlines()


def test_the_readme_takes_three_minutes() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", [forked, pytest.param(torchrun, marks=pytest.mark.soak)])
def test_the_first_call_heals_a_worker(run: Callable[[Path], str], tmp_path: Path) -> None:
    script = tmp_path / "heal.py"
    # What the README does not show: the two ranks' weights and moments, compared bit for bit.
    script.write_text(program("heal.py") + COMPARE)
    output = run(script)
    assert "rank 0 goes on with step 1: " in output
    assert "rank 1 goes on with step 1: " in output
    assert "rank 1: True" in output


COMPARE = """
parameters = optimizer.param_groups[0]["params"]
mine = torch.cat([t.detach().flatten() for p in parameters for t in (p, optimizer.state[p]["exp_avg_sq"])])
both = [torch.empty_like(mine), torch.empty_like(mine)]
dist.all_gather(both, mine)
print(f"rank {dist.get_rank()}: {torch.equal(both[0].view(torch.int32), both[1].view(torch.int32))}")
"""


def test_the_third_call_serves(tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(program("serve.py"))
    done = subprocess.run(
        [sys.executable, "serve.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "step 1, 31400 bytes, equal: True\n", done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_second_call_survives_a_kill(home: Home, tmp_path: Path) -> None:  # noqa: F811
    """As printed, under torchrun; and the same without the kill: every bit of weights and moments is equal."""
    printed, survives = program("survive.py"), tmp_path / "survive.py"
    dies = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    assert printed.count(dies) == 1
    survives.write_text(printed + DIGEST)
    killed = torchrun(survives, "--max-restarts", "3").splitlines()
    survives.write_text(printed.replace(dies, "False") + DIGEST)
    assert last(killed) == last(forked(survives).splitlines())
    assert len(last(killed)) == 4
    # Times differ, and the last digits of a loss may differ between machines.
    shown = shown_after("torchrun --nproc-per-node 2 --max-restarts 3 survive.py")
    assert {without_numbers(line) for line in shown} == {
        without_numbers(line) for line in killed if "digest" not in line
    }


def without_numbers(line: str) -> str:
    return re.sub(r"\b(loss|in) [\d.]+", r"\1", line)


def last(lines: list[str]) -> list[str]:
    """The losses of the last step, and the digests of weights and moments."""
    return sorted(line for line in lines if "step 60" in line or "digest" in line)


DIGEST = """
import hashlib

moments = [value for state in optimizer.state.values() for value in state.values()]
data = b"".join(tensor.detach().numpy().tobytes() for tensor in [*model.state_dict().values(), *moments])
print(f"rank {rank} has the digest {hashlib.sha256(data).hexdigest()}\\n", end="", flush=True)
"""
