"""Digests of parcels: XXH3, 64 bits. It finds what networks and memory do to bytes; it does not stop a forger."""

from __future__ import annotations

import torch
import xxhash

__all__ = ["digest_of"]


def digest_of(data: torch.Tensor) -> int:
    """The digest of a uint8 tensor's bytes, wherever it lives."""
    return xxhash.xxh3_64_intdigest(data.cpu().numpy().data) if data.numel() else xxhash.xxh3_64_intdigest(b"")
