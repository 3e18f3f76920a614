"""For calls that bring a whole state: leaves of the source that have no place in the target, before it is written.

Some of them are for somebody to take: leaves that arrive fresh, and values that differ. Others say that the target is
another model or another optimizer than the source's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from transfuse._errors import TargetMismatch
from transfuse._options import FetchKeywords, OptionKeywords
from transfuse._plan.cohorts import Cohort
from transfuse._plan.match import Prepared
from transfuse._state import trees
from transfuse._state.leaves import values
from transfuse._state.leaves.block import is_tensor

#: How an error about removed leaves begins.
LOST = "the target lacks tensors that the source has beside others that fit"


class Unplaced(NamedTuple):
    """A leaf that cannot land in the target's own memory."""

    path: str
    #: Whether it is a plain value, not a tensor.
    is_value: bool
    #: Whether only the target has it, where its list goes on and the source's has ended.
    is_beyond: bool = False


def check_nothing_was_removed(
    cohorts: Sequence[Cohort], target: Prepared, options: FetchKeywords | OptionKeywords
) -> None:
    """Raise if a mapping of the source has tensors that land in the target, and others for which it has no place.

    So a layer was removed, or an optimizer keeps less for each parameter. An optimizer that is new, or has stepped with
    some of its parameters only, lacks whole containers. At the root a caller puts together what it likes, so there only
    a module's own state dict counts. Stages that complete each other have leaves of other ranks.
    """
    if len(cohorts) > 1 or options.get("strict") is False or options.get("map_path") is not None:
        return
    cohort = cohorts[0]
    manifest = cohort.manifest
    partner = trees.merge(manifest.root, target.root).partner
    if -1 not in partner:
        return
    removed: list[int] = []
    for node, leaves in trees.mappings(manifest.root):
        if node is manifest.root and not (node.kind is trees.Kind.ORDERED_DICT and node.extra is not None):
            continue
        tensors = [leaf for leaf in leaves if not cohort.is_value(leaf) and not cohort.is_blob(leaf)]
        if any(partner[leaf] >= 0 for leaf in tensors):
            removed += [leaf for leaf in tensors if partner[leaf] < 0]
    if removed:
        raise TargetMismatch(
            [f"{manifest.paths[leaf]}: missing in the target" for leaf in removed],
            intro=LOST,
            advice="Were layers removed, or is an optimizer made with other arguments? Go on with the model and the "
            "optimizer that the source has, or give load= that takes these leaves, and strict=False",
        )


def unplaced(cohorts: Sequence[Cohort], target: Prepared) -> list[Unplaced]:
    """Leaves that the target's own tree does not have, values in which it differs, and ends of lists that are longer.

    Leaves that only a later cohort has are received if the target has them, and not otherwise: other ranks' stages.
    """
    left: dict[str, bool] = {}
    for position, cohort in enumerate(cohorts):
        manifest = cohort.manifest
        partner = trees.merge(manifest.root, target.root).partner
        for leaf, (path, number) in enumerate(zip(manifest.paths, partner, strict=True)):
            if number < 0 and position:
                continue
            if number < 0 or cohort.is_blob(leaf):
                differs = True
            else:
                differs = cohort.is_value(leaf) and not _is_the_same(manifest.detail(leaf), target.leaves[number])
            if differs:
                left[path] = cohort.is_value(leaf) or cohort.is_blob(leaf)
    paths = trees.paths(target.root)
    beyond = {
        paths[leaf]: not is_tensor(target.leaves[leaf])
        for leaf in trees.merge(cohorts[0].manifest.root, target.root).beyond
    }
    return [
        *(Unplaced(path, is_value) for path, is_value in left.items()),
        *(Unplaced(path, is_value, is_beyond=True) for path, is_value in beyond.items()),
    ]


def _is_the_same(encoded: object, value: object) -> bool:
    """Whether a value is the encoded one, by its bytes on the wire: for Python, True equals 1, and no NaN itself."""
    try:
        return msgspec.msgpack.encode(values.encode(value)) == msgspec.msgpack.encode(encoded)
    except Exception:
        return False
