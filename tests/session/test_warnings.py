"""Warnings as a user sees them who has configured no log: what was recovered, by which rank, and who says so."""

from __future__ import annotations

import logging
import os
import pathlib
import re

import pytest

import transfuse
from keeping import home  # noqa: F401
from transfuse.testing.ranks import run_program

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import transfuse

dist.init_process_group("gloo")
rank, group, cpu = dist.get_rank(), dist.group.WORLD, torch.device("cpu")
state = {"w": torch.full((4,), float(rank == 0))}
assert transfuse.heal(lambda: state, step=10 if rank == 0 else None, group=group) == 10
assert state["w"].eq(1).all()

transport = transfuse.PGTransport(group, 60, cpu, lambda: state)
if rank == 2:
    transport.recv_checkpoint([0, 1], step=3)
else:
    try:
        transport.send_checkpoint([2], state, step=3 + rank)
    except transfuse.SendFailed:
        assert rank == 1

keep = transfuse.keep(lambda: state, run="told")
keep.commit(29)
dist.barrier()
assert keep.restore() == 29
keep.close()
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("home")
def test_each_recovery_is_one_line_without_any_configuration(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "told.py"
    program.write_text(PROGRAM)
    ended = run_program(program, 3)
    for rank, one in enumerate(ended):
        assert one.code == 0, one.err
        said = [line for line in one.err.splitlines() if line.startswith("transfuse:")]
        restored = rf"transfuse: rank {rank} restored step 29 from the keeper of this host in \d+\.\d\d s"
        assert sum(re.fullmatch(restored, line) is not None for line in said) == 1
        healed = rf"transfuse: rank {rank} was healed: step 10 from rank 0 in \d+\.\d\d s"
        assert sum(re.fullmatch(healed, line) is not None for line in said) == (rank > 0)
        without = rf"transfuse: rank {rank}: receive from 0, 1, step 3: .*; without 1"
        assert sum(re.fullmatch(without, line) is not None for line in said) == (rank == 2)


@pytest.mark.parametrize(
    ("rank", "text", "told"),
    [
        (None, "source 2 is lost", "transfuse: source 2 is lost"),
        ("1", "source 2 is lost", "transfuse: rank 1: source 2 is lost"),
        ("1", "rank 1 goes on", "transfuse: rank 1 goes on"),
        ("1", "rank 1: no room", "transfuse: rank 1: no room"),
        ("1", "rank 10 is silent: 100 %", "transfuse: rank 1: rank 10 is silent: 100 %"),
    ],
)
def test_a_warning_says_who_speaks_once(
    rank: str | None, text: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert transfuse.__name__ in logging.root.manager.loggerDict
    monkeypatch.setattr(os, "environ", {} if rank is None else {"RANK": rank})
    logger = logging.getLogger("transfuse")
    logger.warning("%s", text)
    with caplog.at_level(logging.INFO, "transfuse"):
        logger.info("%s", text)
    assert caplog.messages == [told, text]
