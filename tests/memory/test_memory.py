"""No hidden memory: beyond the tensors, each end stays within the staging budget plus 1 KiB a leaf."""

from __future__ import annotations

import gc
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import transfuse
from moves import CPU, pair
from transfuse._limits import KIB, MIB
from transfuse.testing.ranks import Fleet

#: How many tensors of how many floats. Several times the staging budget, or enough that each one's cost shows.
SHAPES = {
    "one tensor": (1, 96 * MIB),
    "many tensors": (50_000, 256),
    "large tensors": (96, MIB),
    "columns": (4, 16 * MIB),
}


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * KIB
    raise LookupError(field)


def build(count: int, size: int, fill: float, columns: bool) -> dict[str, torch.Tensor]:
    if columns:
        # Not one run of memory: every byte passes through staging.
        return {f"layer.{i}.weight": torch.full((size // 512, 1024), fill)[:, ::2] for i in range(count)}
    return {f"layer.{i}.weight": torch.full((size,), fill) for i in range(count)}


def peak(rank: int, shape: str, fresh: bool, same_host: bool) -> tuple[int, int, bool]:
    """(bytes at the peak beyond those before, leaves, whether all arrived)."""
    count, size = SHAPES[shape]
    columns = shape == "columns"
    own = build(count, size, 1.0 if rank == 0 else 0.0, columns) if rank == 0 or not fresh else {}
    world = cast(Any, dist.group.WORLD)
    small = {"warm up": torch.ones(3 * MIB), "packed": [torch.ones(3)] * 5}
    make = partial(transfuse.PGTransport, world, timedelta(seconds=60), CPU, same_host=same_host)
    transport, warm = make(None if fresh else lambda: own), make()
    if rank == 0:
        warm.send_checkpoint([1], small)
    else:
        warm.recv_checkpoint(0)
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    if rank == 0:
        transport.send_checkpoint([1], own)
        arrived = own
    else:
        arrived = transport.recv_checkpoint(0)
    extra = status("VmHWM") - before
    if rank == 1 and fresh:
        extra -= sum(t.nbytes for t in arrived.values())
    complete = len(arrived) == count and all(bool((t == 1).all()) for t in arrived.values())
    return extra, count, complete


@pytest.mark.parametrize("same_host", [False, True], ids=["group", "memory"])
@pytest.mark.parametrize(
    ("shape", "fresh"),
    [
        ("one tensor", False),
        ("many tensors", False),
        ("large tensors", False),
        ("columns", False),
        ("one tensor", True),
    ],
)
def test_peak_beyond_the_tensors(shape: str, fresh: bool, same_host: bool) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's /proc/self/clear_refs")
    with Fleet(2) as fleet:
        fleet.start(peak, shape, fresh, same_host)
        outcomes = fleet.outcomes(deadline=100)
    for rank, outcome in enumerate(outcomes):
        extra, leaves, complete = outcome.get()
        assert complete
        allowed = 64 * MIB + leaves * KIB
        print(f"{shape}: rank {rank} used {extra / MIB:.1f} MiB of {allowed / MIB:.1f} MiB")
        assert extra <= allowed, (
            f"rank {rank} used {extra / MIB:.1f} MiB beyond its tensors, {allowed / MIB:.1f} allowed"
        )


def test_a_transfer_leaves_storages_that_can_be_resized() -> None:
    """FSDP frees and refills storages by resizing them: hashing must not forbid that."""
    sent, own = {"w": torch.ones(1 << 19)}, {"w": torch.zeros(1 << 19)}
    with pair() as two:
        two.move(sent, own, same_host=False)
        fresh = two.move(sent, same_host=False)
    for state in (sent, own, fresh):
        assert state["w"].untyped_storage().resizable()
        state["w"].untyped_storage().resize_(0)
