"""Fingerprints that a device makes are those of the same bytes in main memory, and no ordinary change keeps them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from device import kind
from transfuse._keeper import fingerprints
from transfuse._keeper.bundles import bundle
from transfuse._keeper.copying import StateMemory
from transfuse._limits import Limits
from transfuse._memory import streams
from transfuse._state.manifest import describe
from transfuse._tuning import FINGERPRINT_PIECE_BYTES

pytestmark = pytest.mark.usefixtures("accelerator")


def test_they_are_those_of_the_same_bytes_in_main_memory() -> None:
    """Sizes and places of all kinds: views that begin anywhere, rows that are not full, several pieces."""
    sizes = [3, 700, 0, 65_537, (1 << 20) + 1, 2 * FINGERPRINT_PIECE_BYTES + 5, FINGERPRINT_PIECE_BYTES, 12]
    generator = torch.Generator().manual_seed(0)
    expected = [
        torch.randint(0, 256, (size + i,), dtype=torch.uint8, generator=generator) for i, size in enumerate(sizes)
    ]
    described = describe({str(i): one.to(kind.KIND)[i:] for i, one in enumerate(expected)}, Limits())
    memory = StateMemory([described])
    bundles, storages = bundle(described.manifest, None, lambda path: False)
    own = streams.OwnStreams()
    own.follow(memory.devices)
    with own.entered(memory.devices):
        found = fingerprints.queue(memory, bundles, storages, np.arange(len(bundles)))
        streams.complete(30)
    flat = [np.zeros(nbytes, dtype=np.uint8) for nbytes in bundles.nbytes.tolist()]
    for storage, (number, at) in enumerate(zip(storages.bundles.tolist(), storages.places.tolist(), strict=True)):
        data = memory.bring(storage).cpu().numpy()
        flat[number][at : at + len(data)] = data
    seen = [0] * len(bundles)
    for _, pieces, sums in found:
        for piece, row in zip(pieces, sums.numpy(), strict=True):
            data = flat[piece.number][piece.low :][: piece.nbytes]
            assert np.array_equal(fingerprints.sums_of(data), row)
            seen[piece.number] += piece.nbytes
    assert seen == bundles.nbytes.tolist()
    assert sum(len(pieces) for _, pieces, _ in found) > len(bundles)


def _swapped(data: torch.Tensor) -> torch.Tensor:
    rows = data.view(-1, 128)
    rows[[3, 9]] = rows[[9, 3]]
    return data


def _up_and_down(data: torch.Tensor) -> torch.Tensor:
    words = data.view(torch.int64)
    words[128] += 1
    words[256] -= 1
    return data


def _one_bit(data: torch.Tensor) -> torch.Tensor:
    data.view(torch.uint8)[12_345].bitwise_xor_(1)
    return data


def _signs(data: torch.Tensor) -> torch.Tensor:
    data[100 : 100 + 2 * 128 : 128].neg_()
    return data


_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one bit": _one_bit,
    "the signs of two in a column": _signs,
    "all signs": torch.neg,
    "two rows change places": _swapped,
    "a roll by a row": lambda data: data.roll(128),
    "one up and one down": _up_and_down,
    "the order": lambda data: data.flip(0),
    "a step": lambda data: data * 1.001,
}


@pytest.mark.parametrize("how", _CHANGES)
def test_a_change_has_other_sums(how: str) -> None:
    data = torch.randn(1 << 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = fingerprints.sums_of(data.view(torch.uint8).numpy())
    changed = _CHANGES[how](data)
    assert not np.array_equal(fingerprints.sums_of(changed.view(torch.uint8).numpy()), before)
