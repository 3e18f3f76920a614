"""Programs in processes of their own, with the imitation loaded: two ends whose counters are apart."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from transfuse.testing import ranks as ranks_module
from transfuse.testing.ranks import Ended

__all__ = ["BEGIN", "fork", "run_plain", "run_program", "run_several", "run_two"]

#: What a program of ``run_program`` starts with.
BEGIN = """
import json, os, sys
import torch, torch.distributed as dist
import transfuse
from device import group, phantom
torch.set_num_threads(1)
phantom.load()
phantom.set_available(True)
"""

_TWO = """
group.register()
rank = int(os.environ["RANK"])
dist.init_process_group("cpu:gloo,phantom:pccl")
pg = dist.group.WORLD
"""


def fork(program: str, ranks: int | None = None, arguments: Sequence[str] = ()) -> list[Ended]:
    """Run a program in forks of a process that has imported torch, and has used no device."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "program.py")
        path.write_text(program)
        return ranks_module.run_program(path, ranks, arguments=arguments)


def _said(ended: Ended) -> Any:
    assert ended.code == 0, ended.err[-4000:]
    return json.loads(ended.out.splitlines()[-1])


def run_program(program: str, *arguments: str) -> Any:
    """Run a program; return what it prints last, as JSON."""
    return _said(fork(BEGIN + program, arguments=arguments)[0])


def run_plain(program: str, *arguments: str) -> Any:
    """The same in a process that knows nothing of the imitation."""
    return _said(fork("import json, sys, torch, transfuse\n" + program, arguments=arguments)[0])


def run_two(program: str, *arguments: str) -> list[Any]:
    """Run a program as two ranks with the group ``pg``; return what each prints last, as JSON."""
    return run_several(2, program, *arguments)


def run_several(ranks: int, program: str, *arguments: str) -> list[Any]:
    """The same as this number of ranks."""
    return [_said(ended) for ended in fork(BEGIN + _TWO + program, ranks, arguments)]
