"""A call that another rank does not make: the error of ranks that wait asks for it, and if the timeout is enough."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transfuse
from keeping import home  # noqa: F401
from transfuse.testing.ranks import Ranks, run_program

CPU, STATE, SECONDS = torch.device("cpu"), {"w": torch.zeros(3)}, 1.0
ENOUGH = "is timeout= long enough?"


def texts(call: Callable[[int, Any], Any], n: int = 2) -> list[str]:
    """The text of each rank's error."""
    with Ranks(n) as ranks:
        return [str(outcome.error) for outcome in ranks.outcomes(call)]


def test_both_send() -> None:
    said = texts(lambda rank, pg: transfuse.PGTransport(pg, SECONDS, CPU).send_checkpoint([1 - rank], STATE, step=1))
    for rank, text in enumerate(said):
        assert f"does rank {1 - rank} call recv_checkpoint() from this rank, or fetch? {ENOUGH}" in text


def test_both_receive() -> None:
    said = texts(lambda rank, pg: transfuse.PGTransport(pg, SECONDS, CPU).recv_checkpoint(1 - rank))
    for rank, text in enumerate(said):
        assert f"does rank {1 - rank} call send_checkpoint() for this rank, or serve? {ENOUGH}" in text


def test_one_rank_does_not_heal() -> None:
    def call(rank: int, pg: Any) -> Any:
        return transfuse.heal(lambda: STATE, step=1, group=pg, timeout=SECONDS) if rank != 1 else None

    for rank, text in enumerate(texts(call, 3)):
        if rank != 1:
            assert f"while healing; does rank 1 call heal()? {ENOUGH}" in text


RESTORE = """
import torch
import torch.distributed as dist
import transfuse

dist.init_process_group("gloo")
keep = transfuse.keep(lambda: {"w": torch.zeros(3)}, run="absent")
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 1:
    store.wait(["over"])
else:
    keep._agreement.seconds = 1  # Not the time in which a keeper must start.
    try:
        keep.restore()
    except transfuse.TransfuseError as error:
        print(error)
    store.set("over", "1")
"""


@pytest.mark.usefixtures("home")
def test_one_rank_does_not_restore(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "absent.py"
    program.write_text(RESTORE)
    first, second = run_program(program, 2)
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert f"while restoring; does rank 1 call restore()? {ENOUGH}" in first.out
