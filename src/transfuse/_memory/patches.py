"""Patches: the items of a parcel that have changed, as positions and values, where that is shorter than the parcel.

A patch begins with the bytes of one item. Then come the gaps between the changed items, a byte each, and their values.
Every 256th item counts as changed, the first one too: so a gap always fits into its byte. Values overwrite, nothing is
added: applied to the bytes that it was made from, a patch gives the other ones bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from transfuse._memory import packing
from transfuse._memory.digest import wide_digest_of
from transfuse._memory.packing import Land
from transfuse._plan.parcels import Parcels
from transfuse._state.tensors import Bools

Bytes = npt.NDArray[np.uint8]

#: The largest items that are compared as one. Of a larger one, each half or quarter counts by itself.
MOST_ITEM = 4
#: An item counts as changed if its number is a multiple of this: then a gap fits into a byte.
STRIDE = 256


class Patch(NamedTuple):
    """A parcel's patch, and the digest that the parcel has with it."""

    number: int
    changes: bytes
    due: bytes


def item_of(parcels: Parcels, parcel: int) -> int:
    """The bytes of one item of a parcel: those of its smallest items."""
    chosen, _ = parcels.columns(parcel)
    return min(int(parcels.regions.item[chosen].min()), MOST_ITEM)


def patch_of(before: Bytes, after: Bytes, item: int) -> bytes | None:
    """What turns ``before`` into ``after``; None if it is not shorter than ``after``."""
    old, new = (data.view(f"u{item}") for data in (before, after))
    changed = old != new
    changed[::STRIDE] = True
    # Counted first: that is quick, and mostly enough where everything has changed.
    if int(np.count_nonzero(changed)) * (item + 1) >= len(after):
        return None
    at = np.flatnonzero(changed)
    return bytes([item]) + (np.diff(at) - 1).astype(np.uint8).tobytes() + new[at].tobytes()


def apply(patch: bytes, data: Bytes) -> None:
    """Write a patch into the bytes that it was made from. ``ValueError`` if it cannot be a patch of them."""
    item = patch[0] if patch else 0
    count, rest = divmod(len(patch), item + 1)
    if item not in (1, 2, MOST_ITEM) or rest or not count or len(data) % item:
        raise ValueError(f"a patch of {len(patch)} bytes, with items of {item}, for a parcel of {len(data)} bytes")
    gaps = np.frombuffer(patch, np.uint8, count - 1, 1)
    at = np.zeros(count, dtype=np.int64)
    np.cumsum(gaps, out=at[1:])
    at += np.arange(count)
    if at[-1] >= len(data) // item:
        raise ValueError(f"a patch writes to item {at[-1]} of {len(data) // item}")
    data.view(f"u{item}")[at] = np.frombuffer(patch, f"<u{item}", count, count)


def apply_all(
    parcels: Parcels, places: Land, patches: Sequence[Patch], seconds: float, *, writes: bool = True
) -> Bools:
    """Apply patches to parcels where they lie. Return which parcels then have the digests that are due.

    The others are to be fetched whole. With ``writes`` False nothing is written: it is only found out.
    ``seconds``: how long a copy to or from a device may take.
    """
    numbers = [patch.number for patch in patches]
    for number in numbers if writes else ():
        first = int(parcels.first[number])
        places.touch(range(first, first + int(parcels.count[number])))

    def patched(i: int, data: torch.Tensor, is_copy: bool) -> bool:
        mine = data if writes or is_copy else data.clone()
        apply(patches[i].changes, bytes_of(mine))
        if writes and is_copy:
            packing.unpack(places, parcels, numbers[i], mine)
        return wide_digest_of(mine) == patches[i].due

    return np.array(packing.visit(parcels, places, numbers, patched, seconds, writes=writes), dtype=bool)


def bytes_of(data: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor in main memory, without ``numpy()``: its storage may still be resized then."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * data.nbytes).from_address(data.data_ptr()))
