"""Compared blocks: which blocks of the sources' state are compared with which of a target, leaf by leaf.

As for a receive, but nothing is refused: what does not fit is what differs. Nothing arrives fresh. Values are compared
here, since the sources' descriptions have them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from transfuse._errors import TargetMismatch, UnsupportedLeaf
from transfuse._plan.catalogue import Catalogue
from transfuse._plan.destinations import Destination
from transfuse._plan.needed_blocks import NeededBlocks
from transfuse._rules import MapPath
from transfuse._state import live_tensors, trees
from transfuse._state.leaves import values
from transfuse._state.leaves.codec import CannotCarry
from transfuse._state.memory_maps import Mappings

#: The most letters of a value in what is said of it.
MOST_LETTERS = 60
BYTES_DIFFER = "its bytes differ"


class ComparedLeaves(NamedTuple):
    """How a target compares with the sources' state."""

    #: How many leaves both have.
    leaves: int
    #: Leaves that both have and that are not the same, and why; and leaves that cannot be compared, and why.
    differing: dict[str, str]
    not_compared: dict[str, str]
    #: Leaves that only the target has, and leaves that only the sources have.
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]


class ComparedBlocks(NeededBlocks):
    """Each block has one destination, so that it says of which leaf it is."""

    def compare(self, map_path: MapPath | None, strict: bool | None) -> None:
        """Pair leaves with targets. ``strict`` says which leaves that only one side has are reported."""
        self.differing: dict[str, str] = {}
        self.not_compared: dict[str, str] = {}
        #: Destinations in which a receive would widen what arrives. They are narrowed to be compared.
        self.widened: dict[int, Destination] = {}
        if map_path is None:
            found = trees.merge(self.manifest.root, self.prepared.root)
            for conflict in found.conflicts:
                path, _, said = conflict.rpartition(": source has ")
                self.differing[path] = f"source has {said}"
            alone, others, only_there = self._pair_by_path(found)
            here = [*found.only_in_target, *found.beyond]
            names = self.cohorts[0].names
            there = [*(names[leaf] for leaf in alone), *only_there]
            self.leaves = len(self.manifest) - len(alone) + len(others)
        else:
            sources = Catalogue(self.cohorts)
            linked = self._pair_by_rules(map_path, sources)
            if linked.problems:
                raise TargetMismatch(linked.problems)
            here, others = linked.untouched, set()
            unused = [one for one in linked.unused if one not in linked.left_out] if strict else []
            there = [sources.names[one] for one in unused]
            self.leaves = len({one.target for one in linked.links})
        if strict is False:
            here, there = [], []
        self.only_here = tuple(self._paths[leaf] for leaf in here if leaf not in others)
        self.only_there = tuple(dict.fromkeys(there))
        self._check_readable()

    def _check_readable(self) -> None:
        tensors = live_tensors.read_any([destination.tensor for destination in self.destinations])
        for number, why in tensors.faults(np.arange(len(tensors)), Mappings(), write=False).items():
            raise UnsupportedLeaf(self.path_of(self.destinations[number]), f"its memory cannot be read: {why}")

    def _pair(self, number: int, leaf: int, partner: int, link: Any = None) -> None:
        cohort, target = self.cohorts[number], self.prepared.leaves[partner]
        detail = cohort.manifest.detail(leaf)
        if cohort.is_value(leaf) and not isinstance(target, torch.Tensor):
            self._compare_values(partner, detail, target)
        elif cohort.is_blob(leaf) and not isinstance(target, torch.Tensor):
            self._compare_blobs(number, leaf, partner, target)
        else:
            super()._pair(number, leaf, partner, link)

    def _compare_values(self, partner: int, theirs: Any, target: Any) -> None:
        try:
            mine = values.encode(target)
        except values.Unencodable as reason:
            self._problem(partner, f"value: source {_shown(values.decode(theirs))}, here {reason}")
            return
        if msgspec.msgpack.encode(mine) != msgspec.msgpack.encode(theirs):
            self._problem(partner, f"value: source {_shown(values.decode(theirs))}, here {_shown(target)}")

    def _compare_blobs(self, number: int, leaf: int, partner: int, target: Any) -> None:
        """Numpy arrays, long texts and objects: the target is opened as a source's leaf is."""
        theirs, tensors = self.cohorts[number].manifest.detail(leaf), list[torch.Tensor]()
        try:
            mine = self.registry.open(target, tensors, self._shared)
        except CannotCarry as reason:
            self._problem(partner, f"value: here {reason}")
            return
        if msgspec.msgpack.encode(mine) != msgspec.msgpack.encode(theirs):
            self._problem(partner, f"value: source {_shown(theirs)}, here {_shown(mine)}")
            return
        self._land_whole((number, leaf, 0), partner, tensors[0])

    def _need(self, asked: Any, item: int, destination: Destination, at: tuple[int, ...]) -> None:
        wire = destination.wire
        if wire is not None and wire.itemsize < destination.item and wire is not torch.float8_e8m0fnu:
            self.widened[id(destination)] = destination
        elif wire is not None:
            # Several items become the same one, so what lies here does not say what there was.
            self.not_compared[self.path_of(destination)] = f"it arrives as {wire}, and is rounded here"
            return
        self._known.clear()  # No two leaves share a block.
        super()._need(asked, item, destination, at)

    def _problem(self, partner: int, text: str) -> None:
        self.differing.setdefault(self._paths[partner], text)

    def path_of(self, destination: Destination) -> str:
        """The path of the target's leaf that a destination belongs to."""
        return self._paths[destination.leaf]

    @cached_property
    def _paths(self) -> list[str]:
        return list(trees.paths(self.prepared.root))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"
