"""Where bytes land: the receiver's own tensors, or fresh memory.

A subclass says where every region lands: :mod:`as_is` for a state that lands as it is, in columns, and
:mod:`assembled` for everything else, tensor by tensor. :class:`Landing` does the rest for both: it records which
regions have been written and which leaves have arrived, and with ``atomic`` it applies the copies at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import torch

from transfuse._memory import device_copies
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
    #: Whether targets are written only at the end, from copies.
    atomic: bool

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
        """Whether the region lies in a target, or in a copy that may begin with a target's bytes.

        Such memory may hold the right bytes already.
        """

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

    @abstractmethod
    def copies(self) -> Iterable[Copy]:
        """With ``atomic``, all copies of targets; otherwise none."""

    @property
    @abstractmethod
    def fingerprint(self) -> int:
        """A digest of what lands where. A receive that resumes an earlier one must have the same."""

    @abstractmethod
    def build(self, builder: Builder) -> Built:
        """Build the state from the landed bytes. With ``atomic`` no target is written yet."""

    def begin(self) -> None:
        """Begin a receive: nothing has been written."""
        #: For each region, whether some of its memory may have been written.
        self._touched: Bools = np.zeros(len(self.cut.regions), dtype=bool)
        self._applied = False
        #: Whether something was written since autograd was told.
        self._untold = False
        #: The result, if it was built ahead of its time.
        self._ahead: Built | None = None

    @property
    def writes_targets(self) -> bool:
        """Whether parcels may land straight in the caller's memory: not with ``atomic``, and not without a target."""
        return not self.atomic and bool(self.placed.any())

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
        torch.autograd.graph.increment_version(targets + list(compress(leaves, map(is_not, leaves, targets))))

    def _written(self) -> Bools:
        """For each tensor, whether it is a target's and has been written to."""
        if self._applied:
            return self.placed
        if self.atomic:
            return np.zeros(len(self.placed), dtype=bool)
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

    # -- copies

    def fill_copies(self, seconds: float) -> None:
        """With ``atomic``: copy the targets' bytes into their copies, where the two have the same layout.

        ``seconds``: how long copies between a device and main memory may be under way.
        """
        runs: list[device_copies.Run] = []
        for target, tensor, _, alike in self.copies():
            if not alike:
                continue
            mine, theirs = dense.raw(target), dense.raw(tensor)
            run = _run_between(mine, theirs)
            if run is None:
                theirs.copy_(mine)
            else:
                runs.append(run)
        if runs:
            device_copies.to_ordinary(runs, seconds)

    def _apply_copies(self, seconds: float) -> None:
        """Write the targets. Called when everything has arrived and every step that can fail is done."""
        self._applied = self.atomic
        self._untold = self._untold or self._applied
        runs: list[device_copies.Run] = []
        for target, tensor, signs, _ in self.copies():
            mine, theirs = dense.raw(target), dense.raw(tensor)
            if signs is not None:
                theirs = theirs.clone(memory_format=torch.contiguous_format)
                signs.flip(theirs.view(-1))
            for d in range(target.ndim):
                if target.stride(d) == 0:  # The source repeats this dimension too: one element stands for all.
                    mine, theirs = mine.narrow(d, 0, 1), theirs.narrow(d, 0, 1)
            run = _run_between(mine, theirs)
            if run is None:
                mine.copy_(theirs)
            else:
                runs.append(run)
        if runs:
            device_copies.from_ordinary(runs, seconds)

    # -- the result

    def work_ahead(self, build_context: BuildContext, registry: Registry) -> None:
        """Do what :meth:`finish` and :meth:`bump_versions` would do later, once nothing lands any more."""
        self.bump_versions()
        if not self.atomic:
            with suppress(Exception):  # ``finish`` will raise it.
                self._ahead = self.build(Builder(self.manifest, build_context, registry))

    def finish(self, build_context: BuildContext, registry: Registry, seconds: float) -> Any:
        """Build the state from the landed bytes; with ``atomic``, write the targets now. ``seconds`` as above."""
        builder = Builder(self.manifest, build_context, registry)
        built = self._ahead or self.build(builder)
        self._apply_copies(seconds)
        for leaf, target in built.settling:
            builder.settle(leaf, target)
        return built.state


def _run_between(mine: torch.Tensor, theirs: torch.Tensor) -> device_copies.Run | None:
    """The bytes of a tensor on a device and of its copy in main memory, if both are one run with the same order."""
    if mine.is_cpu or not theirs.is_cpu:
        return None
    shape = [(size, a, b) for size, a, b in zip(mine.shape, mine.stride(), theirs.stride(), strict=True) if size > 1]
    if any(a != b for _, a, b in shape) or 1 + sum((size - 1) * a for size, a, _ in shape) != mine.numel():
        return None
    return _bytes_of(mine), _bytes_of(theirs)


def _bytes_of(run: torch.Tensor) -> torch.Tensor:
    nbytes, offset = run.numel() * run.element_size(), dense.offset_of(run) * run.element_size()
    return dense.over(run.untyped_storage(), torch.uint8, offset, (nbytes,), (1,))


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
