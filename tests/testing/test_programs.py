"""The stem itself: single-threaded, what a rank finds, and that nothing is left when one fails or is late."""

from __future__ import annotations

import os
import pathlib
import signal
import time

import pytest

from transfuse.testing.ranks import run_program, server_threads


@pytest.fixture
def program(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "program.py"


def test_single_threaded(program: pathlib.Path) -> None:
    """Also after programs with threads were forked from it."""
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "weight = torch.ones(400, 400, requires_grad=True)\n"
        "(weight @ weight).sum().backward()\n"
        "dist.all_reduce(weight.grad)\n"
        "print(weight.grad[0, 0].item())\n"
        "dist.destroy_process_group()\n"
    )
    assert server_threads() == 1
    for _ in range(2):
        assert [(rank.code, rank.out) for rank in run_program(program, 2)] == [(0, "1600.0\n")] * 2
    assert server_threads() == 1


def test_what_a_rank_finds(program: pathlib.Path) -> None:
    program.write_text(
        "import os, sys, torch\n"
        "assert __name__ == '__main__'\n"
        "print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'], os.environ['MINE'])\n"
        "print(sys.argv[1:], torch.get_num_threads(), os.path.samefile(sys.path[0], os.path.dirname(__file__)))\n"
        "print('to the side', file=sys.stderr)\n"
    )
    ended = run_program(program, 2, arguments=["--fast"], environment={"MINE": "yes"})
    assert [(rank.code, rank.err) for rank in ended] == [(0, "to the side\n")] * 2
    assert [rank.out for rank in ended] == [f"{rank} {rank} 2 yes\n['--fast'] 1 True\n" for rank in range(2)]


def test_a_program_that_is_nobodys_rank(program: pathlib.Path) -> None:
    program.write_text("import os\nprint('RANK' in os.environ)\nraise SystemExit('not today')\n")
    (ended,) = run_program(program)
    assert (ended.code, ended.out, ended.err) == (1, "False\n", "not today\n")


def test_one_failure_ends_all(program: pathlib.Path) -> None:
    program.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise ValueError('rank 1 is wrong')\n"
        "print('here', flush=True)\n"
        "time.sleep(1000)\n"
    )
    one, other = run_program(program, 2)
    assert one.code == -signal.SIGKILL
    assert other.code == 1
    assert "ValueError: rank 1 is wrong" in other.err


def test_late_ones_are_ended_with_what_they_started(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    program.write_text(
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pids').write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('here', flush=True)\n"
        "time.sleep(1000)\n"
    )
    (ended,) = run_program(program, timeout=2.0)
    assert (ended.code, ended.out) == (-signal.SIGKILL, "here\n")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    until = time.monotonic() + 20
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < until, "still there"
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False
