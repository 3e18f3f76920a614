"""Write a state of this process as a step of one rank, without a keeper. The bytes are in memory twice meanwhile."""

from __future__ import annotations

import msgspec
import numpy as np

from transfuse._errors import StateError
from transfuse._keeper import copying
from transfuse._keeper.bundle_table import ROW_BYTES
from transfuse._keeper.bundles import bundle
from transfuse._keeper.commits import Snapshot
from transfuse._keeper.saved import SavedStep
from transfuse._keeper.slot_file import Brief, Label, SlotFile
from transfuse._keeper.slot_policy import place, slot_bytes
from transfuse._keeper.storage import Record, Storage
from transfuse._limits import Limits
from transfuse._state.manifest import describe


def next_label(storage: Storage, step: int) -> Label:
    """The label of a step that is the newest one of a directory from now on."""
    there = storage.labels()
    taken = [label for label in there if label.step == step]
    if taken:
        raise StateError(
            f"step {step} is in {storage.where} already: choose another directory, or remove the folder "
            f"step-{step}-gen-{taken[0].generation}"
        )
    return Label(there[0].generation if there else 0, step)


def save_once(state: object, storage: Storage, label: Label) -> SavedStep:
    """Write a state. It counts when all of it is there."""
    taken = Snapshot(describe(state, Limits.from_environment()), None)
    bundles, storages = bundle(taken.described.manifest, None, lambda path: False)
    text = taken.text(storages)
    layout = place(0, bundles, len(text) + ROW_BYTES * (len(bundles) + 1), np.zeros(len(bundles), dtype=np.int64))
    slot = SlotFile(slot_bytes(layout, len(text)))
    try:
        digests = copying.copy(taken.memory, layout, storages, slot, digests=True, seconds=0)
        brief = Brief(0, 1, layout.hashed(digests))
        slot.commit(label, msgspec.msgpack.encode(brief), text)
        file = storage.write_rank(label, slot, brief, layout.owners, lambda nbytes: None)
    finally:
        slot.close()
    storage.write_record(label, Record.of(label, 1, [file]))
    return SavedStep(storage, label, storage.record(label))
