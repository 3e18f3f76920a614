"""The plan of a comparison: a target is read where a receive would write it, and nothing lands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transfuse._memory.assembled import Assembly
from transfuse._memory.building import Builder
from transfuse._memory.fresh import FreshTensors, MemorySupply
from transfuse._memory.landing import Built
from transfuse._options import Options
from transfuse._plan import parcels
from transfuse._plan.cohorts import Cohort
from transfuse._plan.compared_blocks import BYTES_DIFFER, ComparedBlocks, ComparedLeaves
from transfuse._plan.match import Prepared
from transfuse._plan.parcels import Parcels
from transfuse._plan.shares import Pieces, split
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry
from transfuse._state.tensors import Bools


class ComparedLanding(Assembly):
    """Where every parcel would land. Each parcel belongs to one leaf."""

    def __init__(
        self, cohorts: Sequence[Cohort], compared: ComparedBlocks, fresh: FreshTensors, pieces: Pieces, cut: Parcels
    ) -> None:
        super().__init__(cohorts, compared, fresh.memory, pieces, cut)
        self._compared = compared

    def build(self, builder: Builder) -> Built:
        return Built(None, [])

    def outcome(self, differing: Bools) -> ComparedLeaves:
        """How the target compares. ``differing``: the parcels that are not the same here as at their source."""
        compared, found = self._compared, dict(self._compared.differing)
        for path in self.paths_of(self.cut.first[differing].tolist()):
            found.setdefault(path, BYTES_DIFFER)
        return ComparedLeaves(compared.leaves, found, compared.not_compared, compared.only_here, compared.only_there)


def compared_landing(
    cohorts: Sequence[Cohort],
    prepared: Prepared,
    build_context: BuildContext,
    registry: Registry,
    options: Options,
    supply: MemorySupply,
    *,
    parcel_bytes: int,
) -> ComparedLanding:
    """Plan the comparison of a target with what these cohorts hold.

    Raises :class:`TargetMismatch` if rules do not apply, and :class:`NotCovered` if no source holds a block.
    """
    fresh = FreshTensors(cohorts[0].manifest, supply)
    fresh.allocate(np.zeros(len(cohorts[0].manifest.tensors), dtype=bool), {})
    compared = ComparedBlocks(cohorts, prepared, build_context, registry, options, fresh)
    compared.compare(options.map_path, options.strict)
    pieces = split(cohorts, compared.blocks)
    pieces.alone = True
    item = np.array([need.item for need in compared.blocks], dtype=np.int64)
    cut = parcels.cut(pieces.regions(item), parcel_bytes, all_staged=True)
    return ComparedLanding(cohorts, compared, fresh, pieces, cut)
