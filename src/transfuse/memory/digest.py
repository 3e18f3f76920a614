"""Digests: XXH3. They find what networks and memory do to bytes; they do not stop a forger.

64 bits say that a parcel has arrived as it was sent. 128 bits say that two parcels, which may never have met, are the
same.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import xxhash

__all__ = ["WIDE_BYTES", "digest_of", "wide_digest_of"]

WIDE_BYTES = 16


def digest_of(data: torch.Tensor) -> int:
    """The digest of a contiguous uint8 tensor's bytes, wherever it lives."""
    return xxhash.xxh3_64_intdigest(_memory(data.cpu()))


def wide_digest_of(data: torch.Tensor) -> bytes:
    """The same in 128 bits."""
    return xxhash.xxh3_128_digest(_memory(data.cpu()))


def _memory(data: torch.Tensor) -> Any:
    # By address: numpy() would make the storage one that can never be resized again, as FSDP does with its own.
    return (ctypes.c_char * data.numel()).from_address(data.data_ptr())
