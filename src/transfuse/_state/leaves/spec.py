"""A leaf's description on the wire, its *spec*: ``0`` for a plain tensor, or ``[codec, flags, meta, children]``.

Children are specs, too. Only the codec interprets ``meta``. This module answers what other modules ask about a leaf
without its codec: whether the leaf is a shard of a global tensor, and of which kind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: The names of the codecs whose leaves are shards of a global tensor.
DTENSOR, SHARDED_TENSOR, BLOCK = "dtensor", "sharded", "block"


class Spec(NamedTuple):
    """The spec of a leaf that is not a plain tensor, with named fields: ``Spec(*detail)``."""

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


def is_block(detail: Any) -> bool:
    """Whether the leaf with this spec (or value) is a Block."""
    return type(detail) is list and detail[:1] == [BLOCK]


def is_sharded(detail: Any) -> bool:
    """Whether the leaf with this spec (or value) is a shard of a global tensor."""
    return type(detail) is list and detail[:1] in ([DTENSOR], [SHARDED_TENSOR], [BLOCK])


def of_plain_tensors(detail: Any) -> bool:
    """Whether every child of this spec is a plain tensor."""
    return not any(Spec(*detail).children)
