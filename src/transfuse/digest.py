"""Digests of parcels: XXH3, 64 bits. It finds what networks and memory do to bytes; it does not stop a forger."""

from __future__ import annotations

import ctypes

import torch
import xxhash

__all__ = ["digest_of"]


def digest_of(data: torch.Tensor) -> int:
    """The digest of a contiguous uint8 tensor's bytes, wherever it lives."""
    data = data.cpu()
    # By address: numpy() would make the storage one that can never be resized again, as FSDP does with its own.
    return xxhash.xxh3_64_intdigest((ctypes.c_char * data.numel()).from_address(data.data_ptr()))
