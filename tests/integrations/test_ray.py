"""Runs ``on_ray.py`` in one process: a cluster takes seconds to start, and each worker of xdist would start one."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
LIMIT = 900


@pytest.mark.long
@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("marks", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_with_a_real_ray(marks: str) -> None:
    pytest.importorskip("ray", reason="needs transfuse[ray]")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run(
        [*words, str(HERE / "on_ray.py")],
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed", done.stdout, re.M), done.stdout
