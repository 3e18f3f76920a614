"""Where bytes land: the receiver's own tensors, or fresh memory.

A subclass says where every region lands: :mod:`as_is` for a state that lands as it is, in columns, and
:mod:`assembled` for everything else, tensor by tensor. :class:`Landing` does the rest for both: it records which
regions have been written and which leaves have arrived. :mod:`held` stands in front of both, if no target may be
written before everything is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import torch

from transfuse._memory.building import Builder
from transfuse._memory.fresh import FreshMemory
from transfuse._memory.packing import RegionPlace
from transfuse._plan.parcels import Parcels
from transfuse._plan.shares import Shares
from transfuse._state.leaves.block import tensor_in
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry
from transfuse._state.manifest import Manifest
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools


class Built(NamedTuple):
    """A built state, and the leaves (numbers in the manifest) whose targets must still be settled, with the targets."""

    state: Any
    settling: Sequence[tuple[int, Any]]


class Landing(ABC):
    """Where every region lands, what has been written so far, and the result. One for each receive.

    A planner makes it: the columns of regions are numbered as in ``cut.regions``. It chooses its own numbers for the
    tensors that regions land in, and for their leaves.
    """

    manifest: Manifest
    cut: Parcels
    #: Which of the parcels each source can send.
    shares: Shares
    #: The memory that a later receive of the same state may use again.
    memory: FreshMemory

    # -- a row for each region

    @property
    @abstractmethod
    def addresses(self) -> Ints:
        """The address of the region's first byte if its only place is one run of main memory; otherwise 0."""

    @property
    @abstractmethod
    def has_single_place(self) -> Bools:
        """Whether the region has one place only and is not repeated there: these bytes are the whole truth about it."""

    @property
    @abstractmethod
    def convert(self) -> Bools:
        """Whether the receiver converts the region's items as they land."""

    @property
    @abstractmethod
    def held(self) -> Bools:
        """Whether the region lies in a target: such memory may hold the right bytes already."""

    @abstractmethod
    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        """Bytes ``[low, high)`` of a region as they lie in memory; None unless its only place is one run."""

    @abstractmethod
    def places(self, region: int) -> list[RegionPlace]:
        """All places of a region, whatever their layout."""

    @abstractmethod
    def tensors_of(self, regions: Bools) -> Bools:
        """Which tensors get bytes from these regions."""

    @property
    @abstractmethod
    def in_targets(self) -> Bools:
        """Whether the region has a place in a target."""

    @property
    @abstractmethod
    def also_fresh(self) -> Sequence[int]:
        """The regions that have a place in a target and another one in fresh memory."""

    @abstractmethod
    def fresh_places(self, region: int) -> list[RegionPlace]:
        """The places of a region that lie in fresh memory."""

    @abstractmethod
    def scratch(self, leaf: int) -> tuple[list[torch.Tensor], list[tuple[int, RegionPlace]]]:
        """Copies of the tensors in the target of a composite leaf, and the place in them of each of its regions."""

    # -- a row for each tensor

    @property
    @abstractmethod
    def placed(self) -> Bools:
        """Whether the tensor belongs to a target."""

    @property
    @abstractmethod
    def leaf(self) -> Ints:
        """The leaf that the tensor belongs to, as an index into ``paths``."""

    @property
    @abstractmethod
    def paths(self) -> Sequence[str]: ...

    @abstractmethod
    def targets(self, tensors: Ints) -> tuple[list[torch.Tensor], list[Any]]:
        """The targets of these placed tensors, and for each the leaf of the target's tree that contains it."""

    @property
    @abstractmethod
    def fingerprint(self) -> int:
        """A digest of what lands where. A receive that resumes an earlier one must have the same."""

    @abstractmethod
    def build(self, builder: Builder) -> Built:
        """Build the state from the landed bytes."""

    def begin(self) -> None:
        """Begin a receive: nothing has been written."""
        #: For each region, whether some of its memory may have been written.
        self._touched: Bools = np.zeros(len(self.cut.regions), dtype=bool)
        #: Whether something was written since autograd was told.
        self._untold = False
        #: The result, if it was built ahead of its time.
        self._ahead: Built | None = None

    @property
    def writes_targets(self) -> bool:
        """Whether parcels may land straight in the caller's memory."""
        return bool(self.placed.any())

    # -- what has been written

    def touch(self, regions: Sequence[int] | Ints | slice) -> None:
        """Record that memory of these regions is about to be written."""
        if isinstance(regions, range) and regions.step == 1:
            regions = slice(regions.start, regions.stop)
        self._untold = True
        self._touched[regions if isinstance(regions, slice) else np.asarray(regions, dtype=np.int64)] = True

    def torn(self) -> tuple[str, ...]:
        """Paths of the target leaves that have been written to."""
        return tuple(self._paths_of(self._written()))

    def bump_versions(self) -> None:
        """Tell autograd which targets have changed: the tensors themselves, and the composite leaves around them."""
        if not self._untold:
            return
        self._untold = False
        written = np.flatnonzero(self._written())
        if not len(written):
            return
        targets, leaves = self.targets(written)
        outer = list(map(tensor_in, leaves))
        torch.autograd.graph.increment_version(targets + list(compress(outer, map(is_not, outer, targets))))

    def _written(self) -> Bools:
        """For each tensor, whether it is a target's and has been written to."""
        return self.tensors_of(self._touched) & self.placed

    # -- what the targets have already

    @property
    def before(self) -> Landing:
        """Where a region lies that was in the targets before anything arrived."""
        return self

    # -- what has arrived

    def account(self, landed: Bools) -> tuple[Sequence[str], Sequence[str]]:
        """Paths of the leaves that have landed whole, and of all others. ``landed`` has one row for each parcel."""
        cut, late = self.cut, ~landed
        # Find the regions of the parcels that have not landed. Each parcel is a run of regions.
        edges = np.zeros(len(cut.regions) + 1, dtype=np.int64)
        np.add.at(edges, cut.first[late], 1)
        np.add.at(edges, (cut.first + cut.count)[late], -1)
        tensors = self.tensors_of(np.cumsum(edges)[:-1] > 0)
        paths = self.paths
        missing = np.zeros(len(paths), dtype=bool)
        missing[self.leaf[tensors]] = True
        return ChosenPaths(paths, ~missing), ChosenPaths(paths, missing)

    def paths_of(self, regions: Sequence[int]) -> list[str]:
        """Paths of the leaves that have bytes in these regions."""
        chosen = np.zeros(len(self._touched), dtype=bool)
        chosen[list(regions)] = True
        return self._paths_of(self.tensors_of(chosen))

    def _paths_of(self, tensors: Bools) -> list[str]:
        return [self.paths[leaf] for leaf in np.unique(self.leaf[tensors]).tolist()]

    # -- the result

    def work_ahead(self, build_context: BuildContext, registry: Registry) -> None:
        """Do what :meth:`finish` and :meth:`bump_versions` would do later, once nothing lands any more."""
        self.bump_versions()
        with suppress(Exception):  # ``finish`` will raise it.
            self._ahead = self.build(Builder(self.manifest, build_context, registry))

    def finish(self, build_context: BuildContext, registry: Registry) -> Any:
        """Build the state from the landed bytes."""
        builder = Builder(self.manifest, build_context, registry)
        built = self._ahead or self.build(builder)
        for leaf, target in built.settling:
            builder.settle(leaf, target)
        return built.state


class ChosenPaths(Sequence[str]):
    """Paths of some leaves. Each path is made only when it is read."""

    def __init__(self, paths: Sequence[str], chosen: Bools) -> None:
        self._paths = paths
        self._chosen = chosen
        self._numbers = np.flatnonzero(chosen)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return compress(self._paths, self._chosen.tolist())

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self._paths[int(number)] for number in self._numbers[i]]
        return self._paths[int(self._numbers[i])]

    def __reduce__(self) -> tuple[object, ...]:
        return tuple, (list(self),)
