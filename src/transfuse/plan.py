"""The plan: which boxes travel, in which order. Pure; both ends derive the same one from manifest and want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transfuse.boxes import Box, Budget, cover
from transfuse.manifest import Ints, Manifest

__all__ = ["Boxes", "lay_out"]


@dataclass(eq=False)
class Boxes:
    """Columns of the boxes that travel. Most are one run of memory; the few others are in ``strided``."""

    storage: Ints
    start: Ints
    nbytes: Ints
    item: Ints
    #: A part that has this very box, in the same linear order, or -1 for a box made of several tangled parts.
    part: Ints
    strided: dict[int, Box]
    #: Further parts with the same box as ``part`` (tied weights).
    also: dict[int, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.storage)

    def box(self, i: int) -> Box:
        if i in self.strided:
            return self.strided[i]
        item = int(self.item[i])
        return Box(int(self.start[i]), item, (int(self.nbytes[i]) // item,), (1,))

    def members(self, i: int) -> tuple[int, ...]:
        """The parts that this box holds one to one; none for a tangle."""
        part = int(self.part[i])
        return () if part < 0 else (part, *self.also.get(i, ()))


def lay_out(manifest: Manifest, apart: Sequence[int] = (), wanted: Sequence[int] = ()) -> Boxes:
    """The boxes of all storages, each element once; of those ``apart`` only the boxes of the ``wanted`` parts."""
    parts = manifest.parts
    shown = parts.numel > 0
    users = np.bincount(parts.storage[shown], minlength=len(manifest.storages))
    simple = shown & parts.contiguous & (users[parts.storage] == 1)
    if apart:
        simple &= ~np.isin(parts.storage, np.array(apart, dtype=np.int64))
    fast = np.flatnonzero(simple)

    by_storage: dict[int, list[int]] = {}
    chosen = shown & ~simple
    if apart:
        keep = np.zeros(len(parts), dtype=bool)
        keep[np.array(wanted, dtype=np.int64)] = True
        chosen &= keep | ~np.isin(parts.storage, np.array(apart, dtype=np.int64))
    for part in np.flatnonzero(chosen).tolist():
        by_storage.setdefault(int(parts.storage[part]), []).append(part)
    slow: list[tuple[int, Box, tuple[int, ...]]] = []
    separate, budget = set(apart), Budget()
    for number, numbers in by_storage.items():
        boxes = [(part, *parts.box(part)) for part in numbers]
        if number in separate:
            same: dict[Box, list[int]] = {}
            for part, box, _ in boxes:
                same.setdefault(box, []).append(part)
            slow += [(number, box, tuple(members)) for box, members in same.items()]
        else:
            slow += [(number, box, members) for box, members in cover(boxes, budget)]

    storage = np.concatenate([parts.storage[fast], np.array([s for s, _, _ in slow], dtype=np.int64)])
    order = np.argsort(storage, kind="stable")
    count = len(fast)

    def column(quick: Ints, rest: list[int]) -> Ints:
        return np.concatenate([quick, np.array(rest, dtype=np.int64)])[order].astype(np.int64)

    result = Boxes(
        storage=storage[order].astype(np.int64),
        start=column(parts.start[fast], [box.start for _, box, _ in slow]),
        nbytes=column(parts.numel[fast] * parts.item[fast], [box.nbytes for _, box, _ in slow]),
        item=column(parts.item[fast], [box.item for _, box, _ in slow]),
        part=column(fast, [members[0] if members else -1 for _, _, members in slow]),
        strided={},
        also={},
    )
    for place, origin in enumerate(order.tolist()):
        if origin >= count:
            _, box, members = slow[origin - count]
            if not box.contiguous:
                result.strided[place] = box
            if len(members) > 1:
                result.also[place] = members[1:]
    return result
