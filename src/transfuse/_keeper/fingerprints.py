"""Fingerprints of bundles: sums that show whether bytes on a device are those that lie elsewhere.

A device makes them where the bundles lie, and adds and multiplies integers alone, so main memory gives the same sums
for the same bytes. Words of 32 bits are weighed by random numbers of 64 bits and added up in columns: two contents that
differ have the same sums with a chance of 1 in 2**32 at most. That holds for bytes that nobody has chosen by these
weights, so fingerprints replace no digest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from transfuse._keeper.bundle_table import Bundles, StoragePlaces
from transfuse._keeper.copying import StateMemory
from transfuse._state.region import Ints
from transfuse._tuning import FINGERPRINT_PIECE_BYTES

#: Words of a row: a piece of memory has as many sums, one for each column.
COLUMNS = 256
_ROW_BYTES = 4 * COLUMNS


class FingerprintedPiece(NamedTuple):
    """Bytes ``[low, low + nbytes)`` of a bundle."""

    number: int
    low: int
    nbytes: int


class DeviceFingerprints(NamedTuple):
    """The pieces of bundles on one device, and their sums, which that device writes to pinned memory."""

    device: torch.device
    pieces: list[FingerprintedPiece]
    sums: torch.Tensor


@cache
def _weights() -> torch.Tensor:
    """A weight for each row of a piece. All processes have the same."""
    rows = FINGERPRINT_PIECE_BYTES // _ROW_BYTES
    return torch.from_numpy(np.random.default_rng(1).integers(-(1 << 63), 1 << 63, (rows, 1)))


def queue(
    memory: StateMemory,
    bundles: Bundles,
    storages: StoragePlaces,
    numbers: Ints,
    bring: Callable[[int], torch.Tensor] | None = None,
) -> list[DeviceFingerprints]:
    """Queue what makes the fingerprints of these bundles, each of which lies on one device, and brings them here.

    This thread has entered streams on the devices. ``bring``: returns the bytes of a storage, if they have been found
    already. Raises ``torch.OutOfMemoryError`` if a device is full.
    """
    found: defaultdict[torch.device, list[tuple[FingerprintedPiece, torch.Tensor]]] = defaultdict(list)
    weights: dict[torch.device, torch.Tensor] = {}
    order = np.argsort(storages.bundles, kind="stable")
    first = np.searchsorted(storages.bundles[order], [*range(len(bundles)), len(bundles)])
    for number in numbers.tolist():
        mine = [one for one in order[first[number] : first[number + 1]].tolist() if memory.nbytes[one]]
        data = list(map(bring or memory.bring, mine))
        device = data[0].device
        if device not in weights:
            weights[device] = _weights().pin_memory().to(device, non_blocking=True)
        for piece, words in _pieces(number, int(bundles.nbytes[number]), data, storages.places[mine].tolist()):
            found[device].append((piece, (words * weights[device][: len(words)]).sum(0)))
    result = []
    for device, pairs in found.items():
        pinned = torch.empty((len(pairs), COLUMNS), dtype=torch.int64, pin_memory=True)
        pinned.copy_(torch.stack([sums for _, sums in pairs]), non_blocking=True)
        result.append(DeviceFingerprints(device, [piece for piece, _ in pairs], pinned))
    return result


def _pieces(
    number: int, nbytes: int, data: list[torch.Tensor], places: Sequence[int]
) -> Iterator[tuple[FingerprintedPiece, torch.Tensor]]:
    """Rows of words, where they lie if that is possible. What lies between two storages, and after the last, is 0."""
    for low in range(0, nbytes, FINGERPRINT_PIECE_BYTES):
        size = min(nbytes - low, FINGERPRINT_PIECE_BYTES)
        # Either one large storage, a piece at a time, or several small ones, which fit in whole.
        parts = [data[0][low : low + size]] if len(data) == 1 else data
        if len(data) > 1 or parts[0].numel() % _ROW_BYTES or parts[0].storage_offset() % 4:
            words = torch.zeros(-(-size // _ROW_BYTES) * _ROW_BYTES, dtype=torch.uint8, device=data[0].device)
            starts = [0] if len(data) == 1 else places
            sizes = [part.numel() for part in parts]
            gaps = [
                after - at - own for (at, after), own in zip(pairwise([*starts, words.numel()]), sizes, strict=True)
            ]
            split = words.split_with_sizes([one for pair in zip(sizes, gaps, strict=True) for one in pair])
            torch._foreach_copy_(split[::2], parts)
        else:
            words = parts[0]
        yield FingerprintedPiece(number, low, size), words.view(torch.int32).view(-1, COLUMNS)


def sums_of(data: npt.NDArray[np.uint8]) -> Ints:
    """The sums of a piece that lies in main memory."""
    if len(data) % _ROW_BYTES:
        data = np.concatenate([data, np.zeros(-len(data) % _ROW_BYTES, dtype=np.uint8)])
    words = data.view(np.int32).reshape(-1, COLUMNS)
    sums: Ints = np.einsum("r,rc->c", _weights().numpy()[: len(words), 0], words)
    return sums


def short(found: Sequence[DeviceFingerprints]) -> dict[int, bytes]:
    """For each bundle, 16 bytes of its fingerprint, once the devices have written the sums."""
    hashes: defaultdict[int, xxhash.xxh3_128] = defaultdict(xxhash.xxh3_128)
    for _, pieces, sums in found:
        for piece, row in zip(pieces, sums.numpy(), strict=True):
            hashes[piece.number].update(row.tobytes())
    return {number: hashed.digest() for number, hashed in hashes.items()}
