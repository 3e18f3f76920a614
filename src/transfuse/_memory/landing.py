"""Where bytes land: the receiver's own tensors, or fresh memory.

A planner finds out where every region lands: :mod:`as_is` for a state that lands as it is, in columns, and
:mod:`assembled` for everything else, tensor by tensor. :class:`Landing` does the rest for both planners: it records
which regions have been written and which leaves have arrived, and with ``atomic`` it applies the copies at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from transfuse._memory.building import Builder
from transfuse._memory.fresh import FreshMemory
from transfuse._memory.packing import RegionPlace
from transfuse._plan.parcels import Parcels
from transfuse._plan.shares import Shares
from transfuse._state.leaves import dense
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry
from transfuse._state.manifest import Manifest
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools


class Copy(NamedTuple):
    """With ``atomic``: memory that is written instead of a target, and copied into the target at the end."""

    target: torch.Tensor
    tensor: torch.Tensor
    #: The sign bits to flip while the copy is written into the target.
    signs: dense.Signs | None
    #: Whether copy and target have the same bytes for each item, so that the copy may begin with the target's bytes.
    alike: bool


class Built(NamedTuple):
    """A built state, and the leaves (numbers in the manifest) whose targets must still be settled, with the targets."""

    state: Any
    settling: Sequence[tuple[int, Any]]


class Plan(Protocol):
    """Where every region lands. Regions are numbered as in ``cut.regions``.

    A plan chooses its own numbers for the tensors that regions land in, and for their leaves.
    """

    @property
    def manifest(self) -> Manifest: ...

    @property
    def cut(self) -> Parcels: ...

    @property
    def shares(self) -> Shares:
        """Which of the parcels each source can send."""

    @property
    def memory(self) -> FreshMemory: ...

    @property
    def atomic(self) -> bool:
        """Whether targets are written only at the end, from copies."""

    @property
    def fingerprint(self) -> int:
        """A digest of what lands where. A receive that resumes an earlier one must have the same."""

    # -- a row for each region

    @property
    def addresses(self) -> Ints:
        """The address of the region's first byte if its only place is one run of main memory; otherwise 0."""

    @property
    def lie_once(self) -> Bools:
        """Whether the region has one place only and is not repeated there: these bytes are the whole truth about it."""

    @property
    def convert(self) -> Bools:
        """Whether the receiver converts the region's items as they land."""

    @property
    def held(self) -> Bools:
        """Whether the region lies in a target, or in a copy that may begin with a target's bytes.

        Such memory may hold the right bytes already.
        """

    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        """Bytes ``[low, high)`` of a region as they lie in memory; None unless its only place is one run."""

    def places(self, region: int) -> list[RegionPlace]:
        """All places of a region, whatever their layout."""

    def tensors_of(self, regions: Bools) -> Bools:
        """Which tensors get bytes from these regions."""

    # -- a row for each tensor

    @property
    def placed(self) -> Bools:
        """Whether the tensor belongs to a target."""

    @property
    def leaf(self) -> Ints:
        """The leaf that the tensor belongs to, as an index into ``paths``."""

    @property
    def paths(self) -> Sequence[str]: ...

    def targets(self, tensors: Ints) -> tuple[list[torch.Tensor], list[Any]]:
        """The targets of these placed tensors, and for each the leaf of the target's tree that contains it."""

    def copies(self) -> Iterable[Copy]:
        """With ``atomic``, all copies of targets; otherwise none."""

    # -- the result

    def build(self, builder: Builder) -> Built:
        """Build the state from the landed bytes. With ``atomic`` no target is written yet."""


class Landing:
    """Where parcels land and what has been written so far; builds the result. One for each receive."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        #: For each region, whether some of its memory may have been written.
        self._touched: Bools = np.zeros(len(plan.cut.regions), dtype=bool)
        self._applied = False
        #: Whether something was written since autograd was told.
        self._untold = False
        self._built: Built | None = None

    @property
    def cut(self) -> Parcels:
        return self._plan.cut

    @property
    def shares(self) -> Shares:
        return self._plan.shares

    @property
    def fresh(self) -> FreshMemory:
        """The memory that a later receive of the same state may use again."""
        return self._plan.memory

    @property
    def fingerprint(self) -> int:
        return self._plan.fingerprint

    # -- places

    @property
    def addresses(self) -> Ints:
        return self._plan.addresses

    @property
    def lie_once(self) -> Bools:
        return self._plan.lie_once

    @property
    def convert(self) -> Bools:
        return self._plan.convert

    @cached_property
    def writes_targets(self) -> bool:
        """Whether parcels may land straight in the caller's memory: not with ``atomic``, and not without a target."""
        return not self._plan.atomic and bool(self._plan.placed.any())

    @property
    def held(self) -> Bools:
        return self._plan.held

    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        return self._plan.run(region, low, high)

    def places(self, region: int) -> list[RegionPlace]:
        return self._plan.places(region)

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
        targets, leaves = self._plan.targets(written)
        torch.autograd.graph.increment_version(targets + list(compress(leaves, map(is_not, leaves, targets))))

    def _written(self) -> Bools:
        """For each tensor, whether it is a target's and has been written to."""
        if self._applied:
            return self._plan.placed
        if self._plan.atomic:
            return np.zeros(len(self._plan.placed), dtype=bool)
        return self._plan.tensors_of(self._touched) & self._plan.placed

    # -- what has arrived

    def account(self, landed: Bools) -> tuple[Sequence[str], Sequence[str]]:
        """Paths of the leaves that have landed whole, and of all others. ``landed`` has one row for each parcel."""
        cut, late = self._plan.cut, ~landed
        # Find the regions of the parcels that have not landed. Each parcel is a run of regions.
        edges = np.zeros(len(cut.regions) + 1, dtype=np.int64)
        np.add.at(edges, cut.first[late], 1)
        np.add.at(edges, (cut.first + cut.count)[late], -1)
        tensors = self._plan.tensors_of(np.cumsum(edges)[:-1] > 0)
        paths = self._plan.paths
        missing = np.zeros(len(paths), dtype=bool)
        missing[self._plan.leaf[tensors]] = True
        return ChosenPaths(paths, ~missing), ChosenPaths(paths, missing)

    def paths_of(self, regions: Sequence[int]) -> list[str]:
        """Paths of the leaves that have bytes in these regions."""
        chosen = np.zeros(len(self._touched), dtype=bool)
        chosen[list(regions)] = True
        return self._paths_of(self._plan.tensors_of(chosen))

    def _paths_of(self, tensors: Bools) -> list[str]:
        return [self._plan.paths[leaf] for leaf in np.unique(self._plan.leaf[tensors]).tolist()]

    # -- copies

    def fill_copies(self) -> None:
        """With ``atomic``: copy the targets' bytes into their copies, where the two have the same layout."""
        for target, tensor, _, alike in self._plan.copies():
            if alike:
                dense.raw(tensor).copy_(dense.raw(target))

    def _apply_copies(self) -> None:
        """Write the targets. Called when everything has arrived and every step that can fail is done."""
        self._applied = self._plan.atomic
        self._untold = self._untold or self._applied
        for target, tensor, signs, _ in self._plan.copies():
            mine, theirs = dense.raw(target), dense.raw(tensor)
            if signs is not None:
                theirs = theirs.clone(memory_format=torch.contiguous_format)
                signs.flip(theirs.view(-1))
            for d in range(target.ndim):
                if target.stride(d) == 0:  # The source repeats this dimension too: one element stands for all.
                    mine, theirs = mine.narrow(d, 0, 1), theirs.narrow(d, 0, 1)
            mine.copy_(theirs)

    # -- the result

    def work_ahead(self, build_context: BuildContext, registry: Registry) -> None:
        """Do what :meth:`finish` and :meth:`bump_versions` would do later, once nothing lands any more."""
        self.bump_versions()
        if not self._plan.atomic:
            with suppress(Exception):  # ``finish`` will raise it.
                self._built = self._plan.build(Builder(self._plan.manifest, build_context, registry))

    def finish(self, build_context: BuildContext, registry: Registry) -> Any:
        """Build the state from the landed bytes; with ``atomic``, write the targets now."""
        builder = Builder(self._plan.manifest, build_context, registry)
        built = self._built or self._plan.build(builder)
        self._apply_copies()
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
