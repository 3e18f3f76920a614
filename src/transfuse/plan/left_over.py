"""Leaves that cannot land in a target, because they arrive fresh or are values that differ: ``load`` gets them."""

from __future__ import annotations

from collections.abc import Sequence

from transfuse.errors import StateError
from transfuse.plan.cohorts import Cohort
from transfuse.plan.match import Prepared
from transfuse.state import trees
from transfuse.state.leaves import values

__all__ = ["check_nothing_is_left_over"]


def check_nothing_is_left_over(cohorts: Sequence[Cohort], target: Prepared) -> None:
    """For callers without a ``load``: raise if some leaves cannot land in the target, and name them."""
    left = _left_over(cohorts, target)
    if left:
        raise StateError(
            f"{len(left)} leaves cannot land in what state_dict() returns, and there is no load= to get them: "
            f"{', '.join(left[:10])}{', …' if len(left) > 10 else ''}"
        )


def _left_over(cohorts: Sequence[Cohort], target: Prepared) -> list[str]:
    """Leaves that the target's own tree does not have, and values in which it differs.

    Leaves that only a later cohort has are received if the target has them, and not otherwise: other ranks' stages.
    """
    here = {path: number for number, path in enumerate(trees.paths(target.root))}
    left: dict[str, None] = {}
    for position, cohort in enumerate(cohorts):
        manifest = cohort.manifest
        for leaf, path in enumerate(manifest.paths):
            number = here.get(path)
            if number is None and position:
                continue
            if number is None or cohort.is_blob(leaf):
                left[path] = None
            elif cohort.is_value(leaf):
                try:
                    same = values.encode(target.leaves[number]) == manifest.detail(leaf)
                except Exception:
                    same = False
                if not same:
                    left[path] = None
    return list(left)
