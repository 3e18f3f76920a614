"""The table of a rank's bundles. Worker, keeper, slots and readers use this one; :mod:`.bundles` makes it.

A bundle's *mode* says on what ground two ranks may share one copy of it:

    PLAIN       only if their digests are equal: every rank may have values of its own (BatchNorm)
    PLACED      DTensors: ranks at the same place of the mesh hold the same shard
    DECLARED    the caller has declared that all ranks hold the same
    PRIVATE     never: it belongs to the rank (``own=``)
    BOXED       Blocks and ShardedTensors: ranks that hold the same boxes, and only if their digests are equal

Bundles with the same key have the same leaves, sizes and layout, and if they are PLACED or BOXED the
same place in the mesh or in the global tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from transfuse._state.region import Ints

PLAIN, PLACED, DECLARED, PRIVATE, BOXED = range(5)
#: The modes in which ranks share a bundle only if their digests are equal.
COMPARED = (PLAIN, BOXED)
KEY_BYTES = DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)
#: The most that a table takes for each bundle when it is encoded, and more than it takes for the rest.
ROW_BYTES = 64


class Bundles(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, dict=True):
    """The bundles of a rank. Columns travel as bytes; properties give them as numbers."""

    key_column: bytes
    nbytes_column: bytes
    mode_column: bytes
    #: Empty until the keeper has decided.
    owner_column: bytes = b""
    place_column: bytes = b""
    #: Empty if there are no digests.
    digest_column: bytes = b""

    @classmethod
    def of(cls, keys: Sequence[bytes], nbytes: Sequence[int] | Ints, modes: Sequence[int] | Ints) -> Bundles:
        return cls(b"".join(keys), _encode(nbytes, "<i8"), _encode(modes, "<u1"))

    def laid(self, owners: Ints, places: Ints) -> Bundles:
        """The same bundles, with the rank that holds each, and its place in this rank's slots (-1: it has none)."""
        return msgspec.structs.replace(self, owner_column=_encode(owners, "<i4"), place_column=_encode(places, "<i8"))

    def hashed(self, digests: Sequence[bytes]) -> Bundles:
        """The same bundles with these digests; without any if there are none."""
        return msgspec.structs.replace(self, digest_column=b"".join(digests))

    def __post_init__(self) -> None:
        rows, rest = divmod(len(self.key_column), KEY_BYTES)
        columns = (self.nbytes_column, 8), (self.mode_column, 1)
        later = (self.owner_column, 4), (self.place_column, 8), (self.digest_column, DIGEST_BYTES)
        if rest or any(len(column) != size * rows for column, size in columns):
            raise ValueError("the columns of a table of bundles have different lengths")
        if any(column and len(column) != size * rows for column, size in later):
            raise ValueError("the columns of a table of bundles have different lengths")
        if rows and self.nbytes.min() < 0:
            raise ValueError("a table of bundles has one of a negative size")

    def __len__(self) -> int:
        return len(self.mode_column)

    @cached_property
    def keys(self) -> list[bytes]:
        return _split(self.key_column)

    @cached_property
    def nbytes(self) -> Ints:
        return _decode(self.nbytes_column, "<i8")

    @cached_property
    def modes(self) -> Ints:
        return _decode(self.mode_column, "<u1")

    @cached_property
    def owners(self) -> Ints:
        return _decode(self.owner_column, "<i4")

    @cached_property
    def places(self) -> Ints:
        return _decode(self.place_column, "<i8")

    @cached_property
    def digests(self) -> list[bytes]:
        return _split(self.digest_column)

    def digest(self, number: int) -> bytes:
        return self.digests[number] if self.digest_column else b""


class StoragePlaces(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, dict=True):
    """For each storage of a state, then of what belongs to the rank alone: its bundle, and its place in the bundle."""

    bundle_column: bytes
    place_column: bytes

    @classmethod
    def of(cls, bundles: Sequence[int], places: Sequence[int]) -> StoragePlaces:
        return cls(_encode(bundles, "<i4"), _encode(places, "<i8"))

    def __post_init__(self) -> None:
        if len(self.bundle_column) % 4 or 2 * len(self.bundle_column) != len(self.place_column):
            raise ValueError("the columns of a table of storages have different lengths")

    @cached_property
    def bundles(self) -> Ints:
        return _decode(self.bundle_column, "<i4")

    @cached_property
    def places(self) -> Ints:
        return _decode(self.place_column, "<i8")


def _encode(column: Sequence[int] | Ints, code: str) -> bytes:
    return np.asarray(column, dtype=np.int64).astype(code).tobytes()


def _decode(column: bytes, code: str) -> Ints:
    return np.frombuffer(column, dtype=code).astype(np.int64)


def _split(column: bytes) -> list[bytes]:
    return [column[at : at + KEY_BYTES] for at in range(0, len(column), KEY_BYTES)]
