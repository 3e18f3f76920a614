"""Cohorts: sources that describe the same state, each of which holds its own shards of it.

One description stands for all of a cohort. Of its other members only their places in the meshes are known, and from
these what they hold. Sources of different cohorts may complete each other, if what they have in common agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from transfuse.holdings import Holding, Holdings, Listed, Spread
from transfuse.leaves import values
from transfuse.leaves.codec import Coordinate
from transfuse.leaves.distributed import ShardedTensorCodec
from transfuse.manifest import Leaf, Manifest
from transfuse.sharding import Block

__all__ = ["Cohort", "Who", "difference"]

Who = frozenset[int]


class Cohort:
    """A described state, and for each source of it the source's places in the meshes."""

    def __init__(self, manifest: Manifest, members: Mapping[int, Sequence[Coordinate]]) -> None:
        self.manifest = manifest
        self.members = dict(members)
        self.holdings = Holdings(manifest)
        self._everybody: Who = frozenset(members)
        #: For a mesh and some of its dimensions: the sources in each place along these.
        self._by_place: dict[tuple[int, tuple[int, ...]], dict[tuple[int, ...], Who]] = {}

    def who(self, holding: Holding, block: Block, place: Coordinate = None) -> Who:
        """The sources that hold a block that no cut divides; with a place, only those in that place of the mesh."""
        key = holding.who(block)
        if key is None:
            return frozenset()
        mesh, fixed = key
        if mesh < 0:
            return self._everybody
        fixed = fixed if place is None else place
        dims = tuple(d for d, there in enumerate(fixed) if there >= 0)
        found = self._by_place.get((mesh, dims))
        if found is None:
            found = self._by_place[mesh, dims] = self._sort(mesh, dims, len(fixed))
        return found.get(tuple(fixed[d] for d in dims), frozenset())

    def _sort(self, mesh: int, dims: tuple[int, ...], ndim: int) -> dict[tuple[int, ...], Who]:
        """The sources by their places along some dimensions of a mesh."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, places in self.members.items():
            own = places[mesh] if mesh < len(places) else None
            if own is not None and len(own) == ndim:
                found.setdefault(tuple(own[d] for d in dims), []).append(rank)
        return {place: frozenset(ranks) for place, ranks in found.items()}

    @cached_property
    def names(self) -> list[str]:
        """The path of each leaf."""
        return list(self.manifest.paths)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The leaf of each path."""
        return {path: leaf for leaf, path in enumerate(self.names)}

    def dtype(self, leaf: int, tensor: int) -> torch.dtype:
        manifest = self.manifest
        first, end = manifest.first_parts[leaf : leaf + 2].tolist()
        if first + tensor < end:
            return manifest.dtype_of(first + tensor)
        # A ShardedTensor of which the described rank holds nothing.
        return values.dtype_named(ShardedTensorCodec.read(manifest.detail(leaf)[2]).dtype)

    def shape(self, leaf: int) -> tuple[int, ...] | None:
        """The global shape of a leaf that is one tensor."""
        if self.manifest.kinds[leaf] == Leaf.VALUE or self.holdings.count(leaf) != 1:
            return None
        return self.holdings.of(leaf, 0).shape

    def is_value(self, leaf: int) -> bool:
        return self.manifest.kinds[leaf] == Leaf.VALUE

    def say(self, leaf: int) -> str:
        """A leaf in a few words, without what ranks of one state may have differently."""
        if self.is_value(leaf):
            return f"the value {_short(self.manifest.detail(leaf))}"
        shapes = [
            f"{self.dtype(leaf, k)} {list(self.holdings.of(leaf, k).shape)}" for k in range(self.holdings.count(leaf))
        ]
        sharded = shapes and isinstance(self.holdings.of(leaf, 0), (Spread, Listed))
        composite = self.manifest.kinds[leaf] == Leaf.COMPOSITE and not sharded
        detail = f" in {_short(self.manifest.detail(leaf))}" if composite else ""
        return ", ".join(shapes) + detail


def _short(plain: Any) -> str:
    text = repr(plain)
    return text if len(text) <= 200 else f"{text[:200]}…"


def difference(one: Cohort, other: Cohort) -> str | None:
    """In what two cohorts disagree, of all that they both have; None if they can complete each other."""
    for path, leaf in other.numbers.items():
        mine = one.numbers.get(path)
        if mine is not None:
            a, b = one.say(mine), other.say(leaf)
            if a != b:
                return f"leaf {path}: {a} against {b}"
    return None
