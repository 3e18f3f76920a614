"""A kept state as it lies in mapped slots, described like a live one: so all that moves live states can move it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from transfuse._errors import TransfuseError
from transfuse._keeper.bundle_table import NO_DIGEST, Bundles, StoragePlaces
from transfuse._keeper.slots import SlotView, decode
from transfuse._limits import Limits
from transfuse._memory.blocks import digests_at
from transfuse._state.manifest import Described, Manifest, Wire
from transfuse._state.region import Ints


class Text(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The description of a slot's state, and of what belongs to the rank alone (``own``)."""

    manifest: Wire
    coordinates: list[Any]
    own: Wire | None
    storages: StoragePlaces


_text = msgspec.msgpack.Decoder(Text)


@dataclass(eq=False)
class RestoredState:
    """A rank's kept state, and what belongs to the rank alone. The slots stay mapped as long as it lives."""

    rank: int
    bundles: Bundles
    state: Described
    own: Described | None
    #: For each bundle, where it lies in this process; for each storage, its bundle.
    addresses: Ints
    of_storage: Ints

    def damaged(self) -> list[str]:
        """Paths of the leaves whose bytes have changed since the commit. Empty also if no digests were kept."""
        known = self.bundles.digests
        chosen = np.array([number for number, digest in enumerate(known) if digest != NO_DIGEST], dtype=np.int64)
        found = digests_at(self.addresses[chosen], self.bundles.nbytes[chosen], self.state.files)
        wrong = [int(n) for n, digest in zip(chosen.tolist(), found, strict=True) if digest != known[int(n)]]
        return self.leaves_of(wrong)

    def leaves_of(self, bundles: Sequence[int]) -> list[str]:
        """Paths of the leaves that have bytes in these bundles."""
        manifest = self.state.manifest
        storages = np.flatnonzero(np.isin(self.of_storage[: len(manifest.storages)], np.array(bundles, dtype=np.int64)))
        rows = np.flatnonzero(np.isin(manifest.tensors.storage, storages))
        return [manifest.paths[leaf] for leaf in np.unique(manifest.leaves_of(rows)).tolist()]


def describe_slots(rank: int, slots: Mapping[int, SlotView]) -> RestoredState:
    """Describe a rank's kept state. ``slots``: the rank's own, and those of the ranks that hold some of it."""
    try:
        return _describe(rank, slots)
    except (ValueError, KeyError, IndexError) as error:
        raise TransfuseError(f"the kept state of rank {rank} cannot be read: {error}") from error


def _describe(rank: int, slots: Mapping[int, SlotView]) -> RestoredState:
    text: Text = decode(_text, slots[rank].text())
    briefs = {one: view.brief() for one, view in slots.items()}
    mine = briefs[rank].bundles
    holders: list[SlotView] = []
    starts = np.zeros(len(mine), dtype=np.int64)
    for number, (key, owner) in enumerate(zip(mine.keys, mine.owners.tolist(), strict=True)):
        holders.append(slots[owner])
        starts[number] = briefs[owner].bundles.places[briefs[owner].own[key]]
        if not 0 < starts[number] <= slots[owner].nbytes - mine.nbytes[number]:
            raise ValueError("a bundle lies outside its slot")
    base = np.array([holder.address for holder in holders], dtype=np.int64)
    bundle, place = text.storages.bundles, text.storages.places
    described: list[Described | None] = []
    first = 0
    for wire, coordinates in ((text.manifest, text.coordinates), (text.own, [])):
        if wire is None:
            described.append(None)
            continue
        # The bytes are in main memory now, whatever the device was.
        manifest = Manifest.decode(_on_cpu(wire), Limits.from_environment(), _coordinates(coordinates))
        count = len(manifest.storages)
        chosen = slice(first, first + count)
        described.append(
            _over(manifest, [holders[b] for b in bundle[chosen].tolist()], starts[bundle[chosen]] + place[chosen])
        )
        first += count
    state, own = described
    assert state is not None
    return RestoredState(rank, mine, state, own, base + starts, bundle)


def _on_cpu(wire: Wire) -> Wire:
    return msgspec.structs.replace(wire, devices=["cpu"] * len(wire.devices))


def _coordinates(plain: Sequence[Any]) -> list[tuple[int, ...] | None]:
    return [None if one is None else tuple(one) for one in plain]


def _over(manifest: Manifest, holders: Sequence[SlotView], starts: Ints) -> Described:
    """A manifest over bytes in mapped slots: for each storage the slot, and where in it the storage begins."""
    sizes = manifest.storages.nbytes.tolist()
    memory = []
    for holder, start, size in zip(holders, starts.tolist(), sizes, strict=True):
        if start + size > holder.nbytes:
            raise ValueError("a storage lies outside its slot")
        memory.append(
            torch.frombuffer(holder.memory, dtype=torch.uint8, count=size, offset=start)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )
    rows = manifest.tensors.storage
    owners = np.zeros(len(sizes), dtype=np.int64)
    owners[rows[::-1]] = np.arange(len(rows))[::-1]
    pointers = np.array([tensor.data_ptr() for tensor in memory], dtype=np.int64)
    return Described(
        manifest,
        [memory[storage] for storage in rows.tolist()],
        np.zeros(len(sizes), dtype=np.int64),
        np.where(manifest.storages.nbytes > 0, pointers, 0),
        owners,
        pointers[rows] if len(rows) else np.zeros(0, dtype=np.int64),
        files=[holder.file for holder in dict.fromkeys(holders) if holder.file is not None],
    )
