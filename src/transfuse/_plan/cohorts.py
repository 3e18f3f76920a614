"""Cohorts: sources whose offers have one step and one likeness, each with its own shards of the state.

One manifest describes all sources of a cohort. Each source's coordinates in the meshes say what that source holds.
Sources of different cohorts may complete each other, if the leaves that both cohorts have agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch

from transfuse._limits import Limits
from transfuse._plan.holdings import Holding, Holdings, Listed, Spread
from transfuse._state.leaves import dense, values
from transfuse._state.leaves.codec import Coordinate
from transfuse._state.leaves.distributed import ShardedTensorCodec
from transfuse._state.leaves.layout import Box
from transfuse._state.leaves.registry import Registry
from transfuse._state.leaves.spec import Spec, is_sharded
from transfuse._state.manifest import Leaf, Manifest

SourceRanks = frozenset[int]


class Cohort:
    """A manifest, and for each source that it describes the source's coordinates in the meshes."""

    def __init__(self, manifest: Manifest, members: Mapping[int, Sequence[Coordinate]]) -> None:
        self.manifest = manifest
        self.members = dict(members)
        self.holdings = Holdings(manifest)
        self._registry = Registry(Limits())
        self._holds_none: dict[int, bool] = {}
        self._everybody: SourceRanks = frozenset(members)
        #: For a mesh and some of its dimensions: the sources at each coordinate along these dimensions.
        self._by_coordinate: dict[tuple[int, tuple[int, ...]], dict[tuple[int, ...], SourceRanks]] = {}

    def who(self, holding: Holding, block: Box, coordinate: Coordinate = None) -> SourceRanks:
        """The sources that hold a block that no cut divides; with ``coordinate``, only those at it in the mesh."""
        key = holding.who(block)
        if key is None:
            return frozenset()
        mesh, fixed = key
        if mesh < 0:
            return self._everybody
        if coordinate is not None:
            if len(coordinate) != len(fixed) or any(f not in (-1, i) for f, i in zip(fixed, coordinate, strict=True)):
                return frozenset()  # The sources at that coordinate do not hold the block.
            fixed = coordinate
        dims = tuple(d for d, there in enumerate(fixed) if there >= 0)
        found = self._by_coordinate.get((mesh, dims))
        if found is None:
            found = self._by_coordinate[mesh, dims] = self._sort(mesh, dims, len(fixed))
        return found.get(tuple(fixed[d] for d in dims), frozenset())

    def _sort(self, mesh: int, dims: tuple[int, ...], ndim: int) -> dict[tuple[int, ...], SourceRanks]:
        """The sources by their coordinates along some dimensions of a mesh."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinates in self.members.items():
            own = coordinates[mesh] if mesh < len(coordinates) else None
            if own is not None and len(own) == ndim:
                found.setdefault(tuple(own[d] for d in dims), []).append(rank)
        return {coordinate: frozenset(ranks) for coordinate, ranks in found.items()}

    @cached_property
    def names(self) -> list[str]:
        """The path of each leaf. A repeated path gets a number: long keys are cut short, so two paths may be equal."""
        seen: Counter[str] = Counter()
        names = []
        for path in self.manifest.paths:
            seen[path] += 1
            names.append(path if seen[path] == 1 else f"{path} ({seen[path]})")
        return names

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The leaf with each name of ``names``."""
        return {path: leaf for leaf, path in enumerate(self.names)}

    def dtype(self, leaf: int, tensor: int) -> torch.dtype:
        manifest = self.manifest
        first, end = manifest.first_tensors[leaf : leaf + 2].tolist()
        if first + tensor < end:
            return manifest.dtype_of(first + tensor)
        # A ShardedTensor of which the described rank holds no shard.
        return values.dtype_named(ShardedTensorCodec.read(Spec(*manifest.detail(leaf)).meta).dtype)

    def shape(self, leaf: int) -> tuple[int, ...] | None:
        """The global shape of a leaf that is one plain or sharded tensor; None for any other leaf."""
        kind = self.manifest.kinds[leaf]
        sharded = kind == Leaf.COMPOSITE and is_sharded(self.manifest.detail(leaf))
        return self.holdings.of(leaf, 0).shape if kind == Leaf.TENSOR or sharded else None

    def is_blob(self, leaf: int) -> bool:
        """Whether a leaf is a blob (a numpy array, an object): it travels as bytes, and the receiver gets a value."""
        return self.manifest.kinds[leaf] == Leaf.COMPOSITE and self._registry.is_blob(self.manifest.detail(leaf))

    def is_value(self, leaf: int) -> bool:
        return self.manifest.kinds[leaf] == Leaf.VALUE

    def say(self, leaf: int) -> str:
        """A leaf in a few words, without properties in which ranks of one state may differ."""
        if self.is_value(leaf):
            return f"the value {_short(self.manifest.detail(leaf))}"
        shapes = [self._say_tensor(leaf, k) for k in range(self.holdings.count(leaf))]
        sharded = shapes and isinstance(self.holdings.of(leaf, 0), (Spread, Listed))
        composite = self.manifest.kinds[leaf] == Leaf.COMPOSITE and not sharded
        detail = f" in {_short(self.manifest.detail(leaf))}" if composite else ""
        return ", ".join(shapes) + detail

    def _say_tensor(self, leaf: int, number: int) -> str:
        holding = self.holdings.of(leaf, number)
        words = f"{self.dtype(leaf, number)} {list(holding.shape)}"
        signs = self.signs(leaf, number)
        if signs:
            words += f" with sign bits {signs}"
        if isinstance(holding, Spread) and holding.layout.partial:
            # A rank's elements are operands of a reduction, so two descriptions must agree in the placements, too.
            words += f" as {holding.layout.placements} on mesh {holding.layout.mesh.shape}"
        return words

    def signs(self, leaf: int, number: int) -> int:
        """A tensor's conjugate and negative bits."""
        first, end = self.manifest.first_tensors[leaf : leaf + 2].tolist()
        if first + number >= end:
            return 0
        return int(self.manifest.tensors.flags[first + number]) & (dense.Flags.CONJUGATE | dense.Flags.NEGATIVE)

    def holds_none(self, leaf: int) -> bool:
        """Whether no source of the cohort holds an element of a sharded leaf: then nobody knows what it is tied to."""
        known = self._holds_none.get(leaf)
        if known is None:
            known = self._holds_none[leaf] = self._look_for_none(leaf)
        return known

    def _look_for_none(self, leaf: int) -> bool:
        first, end = self.manifest.first_tensors[leaf : leaf + 2].tolist()
        if self.shape(leaf) is None or self.manifest.tensors.numel[first:end].any():
            return False
        holding = self.holdings.of(leaf, 0)
        if isinstance(holding, Listed):
            return not any(block.numel for block in holding.blocks)
        if not isinstance(holding, Spread):
            return False
        coordinates = [own[holding.mesh] if holding.mesh < len(own) else None for own in self.members.values()]
        return all(own is None or 0 in holding.layout.local_shape(own) for own in coordinates)

    @cached_property
    def aliases(self) -> dict[int, int]:
        """For each leaf of one tensor that is the same memory as an earlier leaf (tied weights): the earlier leaf."""
        manifest, tensors = self.manifest, self.manifest.tensors
        result: dict[int, int] = {}
        if not len(tensors):
            return result
        used = np.bincount(tensors.storage, minlength=len(manifest.storages))
        first: dict[tuple[Any, ...], int] = {}
        for row in np.flatnonzero((used > 1)[tensors.storage] & (tensors.numel > 0)).tolist():
            leaf = manifest.leaf_of(row)
            if manifest.first_tensors[leaf + 1] - manifest.first_tensors[leaf] != 1:
                continue
            key = (
                int(tensors.storage[row]),
                int(tensors.offset[row]),
                int(tensors.dtype[row]),
                self.signs(leaf, 0),
                tensors.shape(row),
                tensors.stride(row),
                repr(manifest.detail(leaf)),
            )
            if key in first:
                result[leaf] = first[key]
            else:
                first[key] = leaf
        return result


def _short(plain: Any) -> str:
    text = repr(plain)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _packed(cohort: Cohort, leaf: int) -> bytes:
    """A leaf's detail as bytes. ``==`` takes 1 and True for equal, and a NaN for different from itself."""
    return msgspec.msgpack.encode(cohort.manifest.detail(leaf))


def difference(one: Cohort, other: Cohort) -> str | None:
    """The first leaf of both cohorts in which they disagree; None if the cohorts can complete each other."""
    for path, leaf in other.numbers.items():
        mine = one.numbers.get(path)
        if mine is not None:
            a, b = one.say(mine), other.say(leaf)
            if a != b:
                return f"leaf {path}: {a} against {b}"
            if one.shape(mine) is None and _packed(one, mine) != _packed(other, leaf):
                return f"leaf {path}: {a}, with different contents"
    return None
