"""A kept state as it lies in mapped slots, described like a live one: so all that moves live states can move it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from transfuse._errors import TransfuseError
from transfuse._keeper.bundle_table import NO_DIGEST, PLAIN, Bundles, StoragePlaces
from transfuse._keeper.slot_file import SlotView, decode
from transfuse._keeper.storage import file_name
from transfuse._limits import Limits
from transfuse._memory.blocks import digests_at
from transfuse._memory.building import tensor_over
from transfuse._plan.holdings import Holdings, Listed
from transfuse._state.leaves import dense
from transfuse._state.leaves.spec import is_sharded, of_plain_tensors
from transfuse._state.manifest import Described, Leaf, Manifest, Wire
from transfuse._state.region import Ints


class Text(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The description of a slot's state, and of what belongs to the rank alone (``own``)."""

    manifest: Wire
    coordinates: list[Any]
    own: Wire | None
    storages: StoragePlaces


class Compared(msgspec.Struct, array_like=True, frozen=True):
    """Of a rank: by key, the digests of the bundles that are PLAIN; and the keys of all boxes that it has."""

    plain: dict[bytes, bytes]
    boxes: list[bytes]


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
        """Paths of the leaves whose bytes have changed since the commit. Empty also if no digests were kept.

        Those of what belongs to the rank alone begin with ``rank_state``.
        """
        return self.all_leaves_of([number for _, number in _wrong_bundles([self])])

    def all_leaves_of(self, bundles: Sequence[int]) -> list[str]:
        """As `leaves_of`, with those of what belongs to the rank alone."""
        return self.leaves_of(bundles) + [f"rank_state{path}" for path in self._own_leaves_of(bundles)]

    def leaves_of(self, bundles: Sequence[int]) -> list[str]:
        """Paths of the leaves that have bytes in these bundles."""
        return _leaves_in(self.state.manifest, self.of_storage, bundles)

    def _own_leaves_of(self, bundles: Sequence[int]) -> list[str]:
        if self.own is None:
            return []
        return _leaves_in(self.own.manifest, self.of_storage[len(self.state.manifest.storages) :], bundles)

    def entry(self, key: str) -> RestoredState:
        """One entry of the state alone. ``KeyError`` if it has none of this name."""
        state = self.state
        manifest, rows, used = state.manifest.entry(key)
        owners = np.zeros(len(used), dtype=np.int64)  # A storage's owner may be a tensor of another entry.
        owners[manifest.tensors.storage[::-1]] = np.arange(len(rows))[::-1]
        chosen = Described(
            manifest,
            [state.tensors[row] for row in rows.tolist()],
            state.windows[used],
            state.addresses[used],
            owners,
            state.pointers[rows],
            state.files,
        )
        return replace(self, state=chosen, own=None, of_storage=self.of_storage[used])

    def compared(self) -> Compared:
        """What has to be known of this rank to find out in what ranks may differ."""
        bundles = self.bundles
        plain = {bundles.keys[n]: bundles.digests[n] for n in np.flatnonzero(bundles.modes == PLAIN).tolist()}
        return Compared(plain, list(self._boxes))

    def leaf_digests(self, keys: Collection[bytes]) -> dict[str, bytes]:
        """The digests of single leaves in these bundles, and of these boxes."""
        state, manifest = self.state, self.state.manifest
        chosen = [number for number, key in enumerate(self.bundles.keys) if key in keys]
        storages = np.flatnonzero(np.isin(self.of_storage[: len(manifest.storages)], np.array(chosen, dtype=np.int64)))
        digests = digests_at(state.addresses[storages], manifest.storages.nbytes[storages], state.files)
        of = dict(zip(storages.tolist(), digests, strict=True))
        leaves = manifest.leaves_of(np.arange(len(manifest.tensors))).tolist()
        boxed = {row for _, row in self._boxes.values()}
        found = {
            manifest.paths[leaf]: of[storage]
            for row, (leaf, storage) in enumerate(zip(leaves, manifest.tensors.storage.tolist(), strict=True))
            if storage in of and row not in boxed
        }
        for key in self._boxes.keys() & set(keys):
            name, row = self._boxes[key]
            # Not those of its storage, which may hold other boxes, too.
            values = dense.raw(tensor_over(manifest, row, state.tensors[row].untyped_storage()))
            run, files = values.contiguous(), state.files if values.is_contiguous() else ()
            (found[name],) = digests_at(np.array([run.data_ptr()]), np.array([run.nbytes]), files)
        return found

    @cached_property
    def _boxes(self) -> dict[bytes, tuple[str, int]]:
        """By a digest of path and box: the name and the tensor of each box that a Block or ShardedTensor has here."""
        manifest, found = self.state.manifest, {}
        holdings = Holdings(manifest)
        for leaf in np.flatnonzero(manifest.codes == Leaf.COMPOSITE).tolist():
            detail = manifest.detail(leaf)
            held = holdings.of(leaf, 0) if is_sharded(detail) and of_plain_tensors(detail) else None
            if isinstance(held, Listed):
                for (row, _), box in zip(held.shards, held.blocks, strict=True):
                    name = f"{manifest.paths[leaf]} {box}"
                    if box.numel:
                        found[xxhash.xxh3_128_digest(name.encode(errors="surrogatepass"))] = name, row
        return found


def suspects(ranks: Sequence[Compared]) -> set[bytes]:
    """The keys of bundles and boxes in which ranks may differ, from what :meth:`RestoredState.compared` says."""
    seen: dict[bytes, set[bytes]] = {}
    for rank in ranks:
        for key, digest in rank.plain.items():
            seen.setdefault(key, set()).add(digest)
    # A bundle that only some ranks have may hold leaves that others have in other bundles.
    plain = {key for key, digests in seen.items() if len(digests) > 1 or any(key not in one.plain for one in ranks)}
    boxes = Counter(key for rank in ranks for key in rank.boxes)
    return plain | {key for key, count in boxes.items() if count > 1}


def differing_leaves(ranks: Iterable[Mapping[str, bytes]]) -> list[str]:
    """The leaves in which ranks differ, from what :meth:`RestoredState.leaf_digests` says of each."""
    leaves: dict[str, set[bytes]] = {}
    for rank in ranks:
        for path, digest in rank.items():
            leaves.setdefault(path, set()).add(digest)
    return sorted(path for path, digests in leaves.items() if len(digests) > 1)


def _leaves_in(manifest: Manifest, of_storage: Ints, bundles: Sequence[int]) -> list[str]:
    storages = np.flatnonzero(np.isin(of_storage[: len(manifest.storages)], np.array(bundles, dtype=np.int64)))
    rows = np.flatnonzero(np.isin(manifest.tensors.storage, storages))
    return [manifest.paths[leaf] for leaf in np.unique(manifest.leaves_of(rows)).tolist()]


def damage(states: Sequence[RestoredState], where: str, part: tuple[int, int] = (0, 1)) -> str:
    """What is damaged in states that lie in files: file and leaves. Empty: nothing.

    ``where``: the folder of the files. ``part``: this process looks at the i-th of n parts of the bundles: the others
    look at the rest.
    """
    wrong: dict[int, set[str]] = {}
    for one, number in _wrong_bundles(states, part):
        wrong.setdefault(int(one.bundles.owners[number]), set()).update(one.all_leaves_of([number]))
    return "; ".join(
        f"{where}/{file_name(owner)} is damaged: {len(leaves)} leaves differ from their digests: "
        f"{', '.join(sorted(leaves)[:10])}{', …' if len(leaves) > 10 else ''}"
        for owner, leaves in sorted(wrong.items())
    )


def _wrong_bundles(states: Sequence[RestoredState], part: tuple[int, int] = (0, 1)) -> list[tuple[RestoredState, int]]:
    """The bundles of which something is used, and whose bytes differ from their digests; of several that are the same
    bytes one.
    """
    # Several ranks' states have bundles in common. All processes sort them alike, wherever they lie in each.
    found = {
        (int(one.bundles.owners[number]), one.bundles.keys[number], digest): (one, number)
        for one in states
        for number in np.unique(one.of_storage).tolist()
        if (digest := one.bundles.digest(number)) not in (b"", NO_DIGEST)
    }
    index, parts = part
    chosen = sorted(found)[index::parts]
    addresses = np.array([one.addresses[number] for one, number in map(found.__getitem__, chosen)], dtype=np.int64)
    sizes = np.array([one.bundles.nbytes[number] for one, number in map(found.__getitem__, chosen)], dtype=np.int64)
    files = list({id(file): file for one in states for file in one.state.files}.values())
    digests = digests_at(addresses, sizes, files)
    return [found[key] for key, digest in zip(chosen, digests, strict=True) if key[2] != digest]


def describe_slots(rank: int, slots: Mapping[int, SlotView]) -> RestoredState:
    """Describe a rank's kept state. ``slots``: the rank's own, and those of the ranks that hold some of it."""
    try:
        return _describe(rank, slots)
    except (ValueError, KeyError, IndexError) as error:
        raise TransfuseError(f"the kept state of rank {rank} cannot be read: {error}") from error


def manifest_in(rank: int, slot: SlotView) -> Manifest:
    """What a rank has kept, from its own slot alone. No other rank's is needed, and no tensor is looked at."""
    try:
        text: Text = decode(_text, slot.text())
        return Manifest.decode(_on_cpu(text.manifest), Limits.from_environment(), _coordinates(text.coordinates))
    except (ValueError, KeyError, IndexError) as error:
        raise TransfuseError(f"the kept state of rank {rank} cannot be read: {error}") from error


def _describe(rank: int, slots: Mapping[int, SlotView]) -> RestoredState:
    text: Text = decode(_text, slots[rank].text())
    briefs = {one: view.brief() for one, view in slots.items()}
    mine = briefs[rank].bundles
    holders: list[SlotView] = []
    starts = np.zeros(len(mine), dtype=np.int64)
    digests = list(mine.digests)
    for number, (key, owner) in enumerate(zip(mine.keys, mine.owners.tolist(), strict=True)):
        holders.append(slots[owner])
        theirs, row = briefs[owner].bundles, briefs[owner].own[key]
        starts[number] = theirs.places[row]
        if digests and digests[number] == NO_DIGEST:
            digests[number] = theirs.digest(row) or NO_DIGEST  # The rank that has written it has hashed it.
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
    return RestoredState(rank, mine.hashed(digests), state, own, base + starts, bundle)


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
