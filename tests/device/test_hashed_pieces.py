"""A commit hashes what lies on a device and is kept by another rank: a piece at a time in main memory."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch

from device.moving import mine
from transfuse._keeper import copying
from transfuse._keeper.bundles import bundle
from transfuse._keeper.copying import StateMemory
from transfuse._limits import Limits
from transfuse._state.manifest import describe
from transfuse._tuning import PASSING_BYTES

pytestmark = pytest.mark.usefixtures("accelerator", "nothing_is_left")

MIB = 1 << 20


def digests(state: object, like: object = None) -> list[bytes]:
    """The digests of a state, in the bundles that ``like`` would have."""
    described = describe(state, Limits())
    bundles, storages = bundle(describe(like or state, Limits()).manifest, None, lambda path: False)
    return copying.copy(StateMemory([described]), bundles, storages, None, digests=True, seconds=60)


def resident(most: bool = False) -> int:
    """The bytes of main memory that this process has now, or the most that it has had since :func:`forget_most`."""
    found = re.search(rf"{'VmHWM' if most else 'VmRSS'}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def forget_most() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def test_digests_are_those_of_main_memory_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = [3, 400_000, 5 * MIB + 17, 1, MIB, MIB - 1, 2 * MIB, 12, 900_000, 900_000, 9 * MIB]
    here = {str(i): torch.randint(256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    there = {name: tensor.to(mine(1)) for name, tensor in here.items()}
    # Bundles of small storages lie in both.
    mixed = {name: (here if int(name) % 2 else there)[name] for name in here}
    expected = digests(here)
    for nbytes in (2 * MIB, 3 * MIB + 5, 64 * MIB):
        monkeypatch.setattr(copying, "PASSING_BYTES", nbytes)
        assert digests(there) == expected
        assert digests(mixed, like=here) == expected


def test_a_large_state_is_never_in_main_memory_at_once() -> None:
    held = {str(i): torch.full((96 * MIB,), i, dtype=torch.uint8, device=mine(0)) for i in range(4)}
    torch.accelerator.synchronize()
    digests({"w": torch.zeros(8 * MIB, dtype=torch.uint8, device=mine(0))})  # What happens once.
    forget_most()
    before = resident()
    digests(held)
    assert resident(most=True) - before < PASSING_BYTES + 64 * MIB < sum(map(torch.Tensor.numel, held.values()))
