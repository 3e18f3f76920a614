"""Bundles: the units in which a state is copied, compared and shared between the ranks of a host.

A bundle is one large storage, or several small ones of one device. What is known of each is in a table
(:mod:`.bundle_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from transfuse._keeper.bundle_table import BOXED, DECLARED, PLACED, PLAIN, PRIVATE, Bundles, StoragePlaces
from transfuse._keeper.slot_file import round_up
from transfuse._state.leaves.distributed import DTensorMeta
from transfuse._state.leaves.spec import Spec, is_dtensor, is_sharded
from transfuse._state.manifest import Manifest
from transfuse._tuning import BUNDLE_BYTES

#: Where a storage may begin in a bundle.
ALIGNMENT = 64

#: Tells by its path whether a leaf is declared to be the same on all ranks.
IsShared = Callable[[str], bool]


def bundle(manifest: Manifest, own: Manifest | None, is_shared: IsShared) -> tuple[Bundles, StoragePlaces]:
    """Put the storages of a state into bundles."""
    modes, words = _storages(manifest, is_shared, "state")
    sizes, devices = manifest.storages.nbytes.tolist(), manifest.storages.device.tolist()
    if own is not None:
        _, more = _storages(own, lambda path: False, "own")
        modes += [PRIVATE] * len(more)
        words += more
        sizes += own.storages.nbytes.tolist()
        devices += own.storages.device.tolist()
    result: list[tuple[int, int, Any]] = []
    of_storage, place = [], []
    #: For each mode and device, the last bundle.
    last: dict[tuple[int, int], int] = {}
    for mode, word, nbytes, device in zip(modes, words, sizes, devices, strict=True):
        room = nbytes if nbytes >= BUNDLE_BYTES else round_up(nbytes, ALIGNMENT)
        number = last.get((mode, device), -1)
        if number >= 0 and result[number][1] + room <= BUNDLE_BYTES:
            _, used, digest = result[number]
            place.append(used)
            digest.update(word)
            result[number] = (mode, used + room, digest)
        else:
            place.append(0)
            number = last[mode, device] = len(result)
            result.append((mode, room, xxhash.xxh3_128(word)))
        of_storage.append(number)
    bundles = Bundles.of(
        [digest.digest() for _, _, digest in result],
        [nbytes for _, nbytes, _ in result],
        [mode for mode, _, _ in result],
    )
    return bundles, StoragePlaces.of(of_storage, place)


def _storages(manifest: Manifest, is_shared: IsShared, tree: str) -> tuple[list[int], list[bytes]]:
    """For each storage its mode, and bytes that say which leaves it has, how they lie in it, and of which place."""
    tensors, paths = manifest.tensors, manifest.paths
    columns = np.stack([tensors.dtype, tensors.flags, tensors.offset, tensors.numel], axis=1)
    placed: dict[int, bool] = {}
    boxed: dict[int, bool] = {}
    declared: dict[int, bool] = {}
    # What belongs to the rank alone may have the same paths as the state.
    words: list[list[Any]] = [[tree, int(nbytes)] for nbytes in manifest.storages.nbytes.tolist()]
    leaves = manifest.leaves_of(np.arange(len(tensors))).tolist()
    for row, (storage, leaf) in enumerate(zip(tensors.storage.tolist(), leaves, strict=True)):
        detail = manifest.detail(leaf)
        placed[storage] = placed.get(storage, True) and is_dtensor(detail)
        boxed[storage] = boxed.get(storage, True) and is_sharded(detail)
        declared[storage] = declared.get(storage, True) and is_shared(paths[leaf])
        words[storage] += [paths[leaf], columns[row].tolist(), tensors.shape(row), tensors.stride(row)]
        if is_dtensor(detail):
            words[storage].append(_place(manifest, Spec(*detail)))
        elif is_sharded(detail):
            words[storage].append(Spec(*detail).meta)
    grounds = (PLACED, placed), (BOXED, boxed), (DECLARED, declared)
    modes = [next((mode for mode, true in grounds if true.get(number)), PLAIN) for number in range(len(words))]
    return modes, [msgspec.msgpack.encode(word) for word in words]


def _place(manifest: Manifest, spec: Spec) -> list[Any]:
    """The place of a DTensor's shard: the mesh, and this rank's coordinate along its dimensions that do not replicate.

    The mesh counts with its ranks: two meshes of one shape may hold models that have drifted apart (local SGD, stages).
    """
    meta = msgspec.convert(spec.meta, DTensorMeta)
    own: Sequence[int] | None = manifest.coordinates[meta.mesh] if meta.mesh < len(manifest.coordinates) else None
    mesh = msgspec.to_builtins(manifest.shared[meta.mesh])
    if own is None:
        return [meta.shape, meta.placements, mesh]
    where = [-1 if code[0] == REPLICATE else at for code, at in zip(meta.placements, own, strict=True)]
    return [meta.shape, meta.placements, mesh, where]


#: How a description says that a dimension of the mesh replicates.
REPLICATE = "R"
