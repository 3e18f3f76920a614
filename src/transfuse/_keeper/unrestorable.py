"""Leaves that a new process could not restore, as far as that can be known while a job commits.

Python objects are refused by every ``restore()`` that has not opted in to them, so the commit refuses them. Without
``load=`` there are others, of which the log warns.

A new process's ``state_dict()`` is not known here, and calling the job's own before the first step may change it. What
is known: torch's optimizers make their moments at their first step, so ``optimizer.state_dict()`` of a new process does
not have them; arrays and objects never land in place; and a value that has changed since the first commit differs
from what a new process begins with.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from transfuse._errors import UnsupportedLeaf
from transfuse._limits import Limits
from transfuse._state.leaves.registry import Registry
from transfuse._state.leaves.spec import Spec
from transfuse._state.manifest import Leaf, Manifest

logger = logging.getLogger("transfuse")

#: In what ``Optimizer.state_dict()`` returns, parameters have numbers; with names, the moments are made before.
_MOMENT = re.compile(r"(.*)\['state'\]\[\d+\]")


def objects_in(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """The path and the class of each leaf that only pickle can carry."""
    for leaf in np.flatnonzero(manifest.codes == Leaf.COMPOSITE).tolist():
        spec = Spec(*manifest.detail(leaf))
        if spec.codec == "object":
            yield manifest.paths[leaf], spec.meta


def refuse_objects(manifest: Manifest, given: str) -> None:
    """Raise for the first object in what the caller has given as this argument."""
    for path, name in objects_in(manifest):
        raise UnsupportedLeaf(
            path,
            f"a Python object in {given}, {name}, which restore() would refuse. Give what can say its state, by "
            "state_dict() and load_state_dict(), or convert it to plain data; or, if you trust what is kept, allow it "
            "with keep(weights_only_objects=True) and torch.serialization.add_safe_globals",
        )


class Unrestorable:
    """What a rank without ``load=`` has said about leaves that could not be restored."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._values: dict[str, Any] | None = None
        self._has_warned_of_values = False

    def look(self, manifest: Manifest) -> None:
        """Called at each commit. Warns once of leaves that have no place, and once of values that change."""
        if self._has_warned_of_values:
            return
        if self._values is None:
            self._values = _values(manifest)
            self._warn(manifest, _without_place(manifest))
            return
        now = _values(manifest)
        changed = [path for path, value in now.items() if path in self._values and self._values[path] != value]
        self._has_warned_of_values = bool(changed)
        self._warn(manifest, changed)

    def _warn(self, manifest: Manifest, paths: list[str]) -> None:
        if paths:
            logger.warning(
                "rank %d: %d of %d leaves could not be restored into a new process without load=: %s%s. Pass load= to "
                "keep(): restore() calls it with the whole state, for load_state_dict()",
                self._rank,
                len(paths),
                len(manifest),
                ", ".join(paths[:3]),
                ", …" if len(paths) > 3 else "",
            )


def _values(manifest: Manifest) -> dict[str, Any]:
    leaves = [leaf for leaf, kind in enumerate(manifest.kinds) if kind == Leaf.VALUE]
    return {manifest.paths[leaf]: manifest.detail(leaf) for leaf in leaves}


def _without_place(manifest: Manifest) -> list[str]:
    """Moments of an optimizer, and leaves that never land in place."""
    registry, paths = Registry(Limits()), list(manifest.paths)
    groups = {path.partition("['param_groups']")[0] for path in paths if "['param_groups']" in path}
    found = []
    for leaf, path in enumerate(paths):
        moment, kind = _MOMENT.match(path), manifest.kinds[leaf]
        is_blob = kind == Leaf.COMPOSITE and registry.is_blob(manifest.detail(leaf))
        if is_blob or (moment is not None and moment[1] in groups):
            found.append(path)
    return found
