"""The plan of a comparison: a target is read where a receive would write it, and nothing lands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

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
from transfuse._state.leaves import dense
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry
from transfuse._state.tensors import Bools
from transfuse._tuning import WIDENED_ITEMS


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
        not_compared = dict(compared.not_compared)
        for destination in compared.widened.values():
            path, wire = compared.path_of(destination), destination.wire
            assert wire is not None
            match _was_widened(destination.tensor.detach(), wire):
                case False:
                    found.setdefault(path, f"it holds values that {wire} does not have")
                case None:
                    found.pop(path, None)
                    not_compared[path] = f"it arrives as {wire}, and holds NaNs that may have been other ones there"
        return ComparedLeaves(compared.leaves, found, not_compared, compared.only_here, compared.only_there)


@torch.no_grad()
def _was_widened(tensor: torch.Tensor, wire: torch.dtype) -> bool | None:
    """Whether each item of a tensor may have been widened from ``wire``; None if only for NaNs nobody can tell."""
    result: bool | None = True
    rows = tensor.reshape(1) if not tensor.ndim else tensor.view(-1) if tensor.is_contiguous() else tensor
    step = max(WIDENED_ITEMS * len(rows) // max(rows.numel(), 1), 1)
    for low in range(0, len(rows), step):
        part = rows[low : low + step]
        other = dense.raw(part) != dense.raw(part.to(wire).to(part.dtype))
        if other.any():
            if not part[other].isnan().all():
                return False
            result = None
    return result


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
