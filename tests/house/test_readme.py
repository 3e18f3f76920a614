"""The ten lines of the README, pasted into two files and run: forked, and in `make soak` by the real torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from transfuse.testing.ranks import run_program

README = (Path(__file__).parents[2] / "README.md").read_text()


def forked(script: Path) -> str:
    ended = run_program(script, 2)
    assert all(rank.code == 0 for rank in ended), "\n".join(map(str, ended))
    return "".join(rank.out for rank in ended)


def torchrun(script: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script.name]
    done = subprocess.run(
        words, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(200)
@pytest.mark.parametrize("run", [forked, pytest.param(torchrun, marks=pytest.mark.soak)])
def test_the_ten_lines_heal_a_worker(run: Callable[[Path], str], tmp_path: Path) -> None:
    files = re.findall(r"^# (\w+\.py)\n", README, re.M)
    assert files == ["job.py", "heal.py"]
    for name in files:
        block = re.search(rf"```python\n(# {re.escape(name)}\n.*?)```", README, re.S)
        assert block is not None
        (tmp_path / name).write_text(block[1])
    assert len((tmp_path / "heal.py").read_text().splitlines()) <= 16
    assert re.search(r"^torchrun --nproc-per-node 2 heal\.py$", README, re.M)
    # What the README does not show: the two ranks' weights, compared bit for bit.
    (tmp_path / "heal.py").write_text((tmp_path / "heal.py").read_text() + COMPARE)
    output = run(tmp_path / "heal.py")
    assert "rank 1: True" in output
    shown = re.search(r"^torchrun .*?```.*?```text\n(.*?)```", README, re.S | re.M)
    assert shown is not None
    # The report has the rows that the README shows, whatever the times.
    rows = [line.split("  ")[0].strip() for line in shown[1].splitlines()]
    for row in rows:
        assert re.search(rf"^ *{re.escape(row)} ", output, re.M), row


COMPARE = """
parameters = optimizer.param_groups[0]["params"]
mine = torch.cat([t.detach().flatten() for p in parameters for t in (p, optimizer.state[p]["exp_avg_sq"])])
both = [torch.empty_like(mine), torch.empty_like(mine)]
dist.all_gather(both, mine)
print(f"rank {dist.get_rank()}: {torch.equal(both[0].view(torch.int32), both[1].view(torch.int32))}")
"""
