"""Every number that may be set, and what follows from them: how large things are, and how long what waits.

``Limits()`` holds the defaults, ``Limits.from_environment()`` applies ``TRANSFUSE_<NAME>`` (upper case) to each
field. ``Sizes`` has every rule for a size of a transfer, ``Patience`` every share of the timeout. Numbers that follow
from how a module works stand in that module. This module imports nothing of the package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

__all__ = ["KIB", "MIB", "Limits", "allows_same_host"]

KIB = 1 << 10
MIB = 1 << 20


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes in bytes unless the name says otherwise."""

    #: Largest parcel. Small enough that four in flight overlap packing with the wire, large enough to fill it.
    parcel_bytes: int = 4 * MIB
    #: Smallest parcel a peer may announce: bounds the number of parcels that a hostile offer can cause.
    min_parcel_bytes: int = 16 * KIB
    #: With ``delta``, what is compared and kept or fetched as one.
    block_bytes: int = 128 * KIB
    #: Longer descriptions are sent only to receivers that ask for them.
    brief_bytes: int = 256 * KIB
    #: Bytes between two records, and so the grain in which progress is seen.
    burst_bytes: int = 24 * MIB
    #: Bursts under way per peer. What they hold comes even after a cancel.
    bursts_ahead: int = 2
    #: A link as slow as this is not taken for a dead one.
    slowest_bytes_per_second: int = 1 * MIB
    #: Smaller states are not worth a chain of receivers.
    min_relay_bytes: int = 4 * MIB
    #: In a chain bursts are not cut smaller than this.
    min_chained_bytes: int = 64 * KIB
    #: Memory beyond the tensors themselves that one end may use, however many peers it has.
    staging_bytes: int = 64 * MIB
    #: Longest control message that is accepted (a description takes well under 1 KiB a leaf).
    max_message_bytes: int = 256 * MIB
    #: Control messages travel in chunks of this size, so that an announced length alone allocates nothing.
    chunk_bytes: int = 1 * MIB
    #: Most bytes that one receive may allocate for fresh tensors.
    max_receive_bytes: int = field(default_factory=_physical_memory_bytes)
    #: Bytes and numpy values above this travel as storages rather than in the description.
    inline_bytes: int = 4 * KIB
    #: Largest pickled object that is sent to a receiver that may have opted in to ``weights_only_objects``.
    max_object_bytes: int = 16 * MIB
    #: Deepest nesting of a state.
    max_depth: int = 128
    #: Signs of life, one every quarter of the timeout, before a peer that only works is given up; every
    #: ``min_parcel_bytes`` that it says have arrived allow it one more.
    max_working_records: int = 400
    #: How often a parcel with a wrong digest is asked for again.
    max_repairs: int = 3

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) <= 0:
                raise ValueError(f"limit {item.name} must be positive, got {getattr(self, item.name)}")
        if self.min_parcel_bytes > self.parcel_bytes:
            raise ValueError(f"min_parcel_bytes {self.min_parcel_bytes} exceeds parcel_bytes {self.parcel_bytes}")
        if self.parcel_bytes % 16 or self.min_parcel_bytes % 16 or self.block_bytes % 16:
            raise ValueError("parcel sizes must be multiples of 16, the largest item")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Limits:
        """The defaults, overridden by ``TRANSFUSE_…`` variables."""
        values = {}
        for item in fields(cls):
            text = environ.get(f"TRANSFUSE_{item.name.upper()}")
            if text is not None:
                try:
                    values[item.name] = int(text)
                except ValueError:
                    raise ValueError(f"TRANSFUSE_{item.name.upper()} must be a whole number, got {text!r}") from None
        return cls(**values)


def allows_same_host(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment leaves the memory route on."""
    text = environ.get("TRANSFUSE_SAME_HOST", "1")
    if text not in ("0", "1"):
        raise ValueError(f"TRANSFUSE_SAME_HOST must be 0 or 1, got {text!r}")
    return text == "1"
