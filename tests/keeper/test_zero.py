"""DeepSpeed's ZeRO-1, whose flat partitions are Blocks: what two ranks have committed goes on with three."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from keeping import SECONDS, Home, home  # noqa: F401

JOB = pathlib.Path(__file__).parents[1] / "helpers" / "zero_job.py"


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_zero_goes_on_with_other_numbers_of_ranks(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    # What DeepSpeed compiles, it compiles here: a build that was killed leaves a lock that others wait for.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    for ranks, mode, line in ((2, "commit", "committed: committed"), (3, "restore", "restored 3, wrong: []")):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launch, str(JOB), mode, str(tmp_path / "whole.pt")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=4 * SECONDS)
        assert done.returncode == 0, done.stderr[-4000:]
        for rank in range(ranks):
            assert f"rank {rank} {line}\n" in done.stdout
