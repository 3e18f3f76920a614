"""The catalogue: all leaves that the sources have, for rules and for callers that choose their target by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from transfuse._plan.apply_rules import BlockPair
from transfuse._plan.cohorts import Cohort
from transfuse._state import trees
from transfuse._state.leaves import values


class Catalogue:
    """All leaves of all sources, by dotted path."""

    def __init__(self, cohorts: Sequence[Cohort]) -> None:
        self.cohorts = cohorts
        found: dict[str, tuple[int, int]] = {}
        self.names: list[str] = []
        #: For each leaf, the numbers of a cohort that has it and of the leaf in that cohort.
        self.leaves: list[tuple[int, int]] = []
        for number, cohort in enumerate(cohorts):
            for leaf, path in enumerate(trees.dotted(cohort.manifest.root)):
                if number and path in found:
                    continue  # An earlier cohort has this leaf too, and the two agree.
                found[path] = number, leaf
                self.names.append(path)
                self.leaves.append((number, leaf))

    @cached_property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """The global shape of each leaf; None for a leaf that is no tensor."""
        return [self.cohorts[number].shape(leaf) for number, leaf in self.leaves]

    def dtype(self, leaf: int) -> torch.dtype:
        number, own = self.leaves[leaf]
        return self.cohorts[number].dtype(own, 0)

    def value(self, leaf: int) -> Any:
        """The value of a leaf that is no tensor. ``ValueError`` for tensors, and for values that travel as parcels."""
        number, own = self.leaves[leaf]
        if not self.cohorts[number].is_value(own):
            raise ValueError(f"leaf {self.names[leaf]} is no plain value: its bytes come only with the parcels")
        return values.decode(self.cohorts[number].manifest.detail(own))


#: Chooses the target, and pairs blocks of the sources with blocks of the target.
Late = Callable[[Catalogue], tuple[object, list[BlockPair]]]
