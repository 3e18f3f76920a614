"""Copies between devices and pinned memory: exact, few, and queued."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from device.moving import mine
from transfuse import TransfuseError, _tuning
from transfuse._memory import device_copies
from transfuse._memory.device_copies import PinnedPair, from_ordinary, to_device, to_host, to_ordinary

pytestmark = pytest.mark.usefixtures("accelerator", "nothing_is_left")

MIB = 1 << 20


def pinned(nbytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8).pin_memory()


def laid_out(sizes: list[int], align: int, devices: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, int]]]:
    """Random bytes in main memory, and runs of them on the devices in turn, each with its place."""
    torch.manual_seed(0)
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // align) * align
    expected = torch.zeros(end, dtype=torch.uint8)
    runs = []
    for number, (size, place) in enumerate(zip(sizes, places, strict=True)):
        expected[place : place + size] = torch.randint(1, 256, (size,), dtype=torch.uint8)
        runs.append((expected[place : place + size].to(mine(number % devices)), place))
    return expected, runs


@pytest.mark.parametrize("devices", [1, 2])
def test_runs_of_all_sizes_arrive_where_they_belong(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [1, 4096, 3 * MIB, 63, 64, 65, 0, MIB, MIB - 1, 17, *[1000] * 300]
    expected, runs = laid_out(sizes, 64, devices)
    for piece in (_tuning.DEVICE_PIECE_BYTES, 10_000):
        monkeypatch.setattr(device_copies, "DEVICE_PIECE_BYTES", piece)
        host = pinned(len(expected))
        to_host([(run, host[place : place + run.numel()]) for run, place in reversed(runs)])
        torch.accelerator.synchronize(mine(0))
        torch.accelerator.synchronize(mine(1))
        assert torch.equal(host, expected)
        back = [torch.zeros_like(run) for run, _ in runs]
        to_device([(b, host[place : place + b.numel()]) for b, (_, place) in zip(back, runs, strict=True)])
        assert all(torch.equal(b.cpu(), run.cpu()) for b, (run, _) in zip(back, runs, strict=True))


def test_what_lies_between_the_runs_of_a_device_is_left_alone() -> None:
    """A storage of main memory may lie there. Only what alignment leaves is overwritten, with zeros."""
    expected, runs = laid_out([100] * 9, 64, 1)
    expected.fill_(7)
    host = pinned(len(expected), 7)
    chosen = [runs[i] for i in (0, 1, 3, 4, 8)]
    to_host([(run, host[place : place + run.numel()]) for run, place in chosen])
    torch.accelerator.synchronize()
    for run, place in chosen:
        expected[place : place + 100] = run.cpu()
    for before in (0, 3):
        expected[128 * before + 100 : 128 * before + 128] = 0
    assert torch.equal(host, expected)


def test_copies_are_few_and_nobody_waits(device: ModuleType) -> None:
    small = torch.ones(1024, 4096, dtype=torch.uint8, device=mine(0)).unbind()
    large = torch.ones(2, 4 * MIB, dtype=torch.uint8, device=mine(1)).unbind()
    host = pinned(12 * MIB)
    torch.accelerator.synchronize()
    runs = list(zip(small, torch.split(host[: 4 * MIB], 4096), strict=True)) + list(
        zip(large, torch.split(host[4 * MIB :], 4 * MIB), strict=True)
    )
    for copy in (to_host, to_device):
        device.reset_counters()
        copy(runs)
        counted = device.counters()
        assert counted["host_syncs"] == 0
        assert counted["async_copies"] == 3
        assert counted["bytes_to_host"] + counted["bytes_to_device"] == 12 * MIB
    torch.accelerator.synchronize()


def test_pieces_bring_one_while_the_other_is_used() -> None:
    there = torch.arange(256, dtype=torch.uint8).repeat(4096).to(mine(1))
    pieces = PinnedPair(1 << 16, [there.device], 10.0)
    parts = list(range(0, there.numel(), 1 << 16))
    seen, brought = [], []

    def bring(low: int, buffer: torch.Tensor) -> None:
        brought.append(low)
        to_host([(there[low : low + (1 << 16)], buffer)])

    for low, data in pieces.ahead(parts, bring):
        seen.append(low)
        # The next one is on its way while this one is used, and no more than that.
        assert brought == parts[: len(seen) + 1]
        assert torch.equal(data, there.cpu()[low : low + (1 << 16)])
    assert seen == parts
    back = torch.zeros_like(there)
    for low in parts:
        with pieces.turn() as buffer:
            buffer.copy_(torch.arange(256, dtype=torch.uint8).repeat(256))
            to_device([(back[low : low + (1 << 16)], buffer)])
    assert torch.equal(back.cpu(), there.cpu())


@pytest.mark.parametrize("buffer_bytes", [1 << 12, 1 << 16, 1 << 23])
def test_ordinary_memory_passes_through_pinned_buffers(
    buffer_bytes: int, device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "DEVICE_STAGING_BYTES", buffer_bytes)
    torch.manual_seed(0)
    sizes = [1, 100, 0, 4096, 4095, 3 * (1 << 16) + 5, 64, *[70] * 50]
    here = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    there = [torch.zeros(size, dtype=torch.uint8, device=mine(i % 2)) for i, size in enumerate(sizes)]
    back = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    device.reset_counters()
    before = device.counters()["pinned_most_bytes"]
    from_ordinary(list(zip(there, here, strict=True)), 10.0)
    to_ordinary(list(zip(there, back, strict=True)), 10.0)
    assert all(map(torch.equal, back, here))
    counted = device.counters()
    assert counted["host_syncs"] == counted["pageable_bytes"] == 0
    assert counted["pinned_most_bytes"] - before <= 4 * buffer_bytes


def test_a_piece_that_does_not_come_is_not_awaited_for_ever(device: ModuleType) -> None:
    there = torch.ones(64, dtype=torch.uint8, device=mine(0))
    pieces = PinnedPair(64, [there.device], 0.1)
    with pieces.turn() as buffer:
        device.sleep(1.0)
        to_host([(there, buffer)])
    with pieces.turn():
        pass
    with pytest.raises(TransfuseError, match="phantom:0: the work that was queued"), pieces.turn():
        pass
