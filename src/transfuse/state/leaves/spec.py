"""A leaf's description, its *spec*, as it travels: ``0`` for a plain tensor, or ``[codec, flags, meta, children]``.

Children are specs again. What a spec's ``meta`` means is its codec's own business; what others may know of a leaf
without asking its codec is here: whether it is a shard of a global tensor, and of what.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["DTENSOR", "SHARDED_TENSOR", "Spec", "is_dtensor", "is_sharded", "is_sharded_tensor", "of_plain_tensors"]

#: The names of the codecs whose leaves are shards of a global tensor.
DTENSOR, SHARDED_TENSOR = "dtensor", "sharded"


class Spec(NamedTuple):
    """The spec of a leaf that is not a plain tensor, with names: ``Spec(*detail)``."""

    codec: str
    flags: int
    meta: Any
    children: list[Any]


def is_dtensor(detail: Any) -> bool:
    """Whether the leaf with this spec (or value) is a DTensor."""
    return type(detail) is list and detail[:1] == [DTENSOR]


def is_sharded_tensor(detail: Any) -> bool:
    """Whether the leaf with this spec (or value) is a ShardedTensor."""
    return type(detail) is list and detail[:1] == [SHARDED_TENSOR]


def is_sharded(detail: Any) -> bool:
    """Whether the leaf with this spec (or value) is a shard of a global tensor."""
    return type(detail) is list and detail[:1] in ([DTENSOR], [SHARDED_TENSOR])


def of_plain_tensors(detail: Any) -> bool:
    """Whether every child of this spec is a plain tensor."""
    return not any(Spec(*detail).children)
