"""Leaves from tensors that are here: what is received, what lies in a keeper's slots, what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from transfuse._errors import UnsupportedLeaf
from transfuse._limits import Limits
from transfuse._state import trees
from transfuse._state.leaves import dense, values
from transfuse._state.leaves.codec import BuildContext, CannotCarry
from transfuse._state.leaves.registry import Registry
from transfuse._state.manifest import Leaf, Manifest


class Builder(NamedTuple):
    """Builds the leaves of a manifest. Errors name the leaf."""

    manifest: Manifest
    context: BuildContext
    registry: Registry

    def leaf(self, leaf: int, tensors: Iterable[torch.Tensor] = ()) -> Any:
        """A leaf: its value, or what its tensors make up."""
        if self.manifest.kinds[leaf] == Leaf.VALUE:
            return values.decode(self.manifest.detail(leaf))
        with self._naming(leaf):
            return self.registry.close(self.manifest.detail(leaf), iter(tensors), self.context)

    def examine(self, leaf: int, tensors: Iterable[torch.Tensor]) -> None:
        """Check the tensors that have landed for a composite leaf, before its target is written."""
        with self._naming(leaf):
            self.registry.examine(self.manifest.detail(leaf), iter(tensors), self.context)

    def checks_data(self, leaf: int) -> bool:
        """Whether :meth:`examine` looks at the data of this leaf."""
        return self.registry.checks_data(self.manifest.detail(leaf))

    def settle(self, leaf: int, target: Any) -> None:
        """Check and finish a target after all bytes have landed in it."""
        with self._naming(leaf):
            self.registry.settle(self.manifest.detail(leaf), target)

    @contextmanager
    def _naming(self, leaf: int) -> Iterator[None]:
        try:
            yield
        except CannotCarry as reason:
            raise UnsupportedLeaf(self.manifest.paths[leaf], str(reason)) from reason
        except ValueError as error:
            raise ValueError(f"leaf {self.manifest.paths[leaf]}: {error}") from error


def tensor_over(manifest: Manifest, row: int, storage: torch.UntypedStorage, offset: int | None = None) -> torch.Tensor:
    """A tensor of the manifest over a storage, with its flags. ``offset``: in items; None: as the manifest says."""
    tensors = manifest.tensors
    if offset is None:
        offset = int(tensors.offset[row]) if tensors.numel[row] else 0
    tensor = dense.over(storage, manifest.dtype_of(row), offset, tensors.shape(row), tensors.stride(row))
    return dense.dress(tensor, int(tensors.flags[row]))


def build_over(manifest: Manifest, memory: Sequence[torch.Tensor]) -> Any:
    """The state that a manifest describes, over memory that is there. ``memory``: for each tensor its storage."""
    builder = Builder(manifest, BuildContext(manifest.shared, manifest.coordinates), Registry(Limits()))
    first = manifest.first_tensors.tolist()
    leaves = [
        builder.leaf(leaf, (tensor_over(manifest, row, memory[row].untyped_storage()) for row in range(*rows)))
        for leaf, rows in enumerate(pairwise(first))
    ]
    return trees.unflatten(manifest.root, leaves)
