"""Digests: XXH3. They find damage by networks and memory, not forgery.

A digest of 64 bits tells whether a parcel has arrived as it was sent. A digest of 128 bits tells whether two parcels
are the same although neither is a copy of the other.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

#: The address and the length of bytes in main memory.
Run: TypeAlias = tuple[int, int]

WIDE_BYTES = 16
#: A column of digests of 128 bits.
WideDigests: TypeAlias = np.ndarray[Any, np.dtype[np.void]]


def digest_of(data: torch.Tensor | Run) -> int:
    """The 64-bit digest of the bytes of a contiguous uint8 tensor, on any device, or of bytes in main memory."""
    if isinstance(data, tuple):
        address, nbytes = data
        return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address))
    host = data.cpu()  # Kept until it has been hashed: it may be a copy that nothing else refers to.
    return xxhash.xxh3_64_intdigest(_memory(host))


def wide_digest_of(data: torch.Tensor | Run) -> bytes:
    """The 128-bit digest of the same."""
    if isinstance(data, tuple):
        address, nbytes = data
        return xxhash.xxh3_128_digest((ctypes.c_char * nbytes).from_address(address))
    host = data.cpu()
    return xxhash.xxh3_128_digest(_memory(host))


def _memory(host: torch.Tensor) -> Any:
    # By address: after numpy() a storage can never be resized again, and FSDP resizes its storages.
    return (ctypes.c_char * host.numel()).from_address(host.data_ptr())
