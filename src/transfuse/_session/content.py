"""The digest of a state's content: the same at the source, at a receiver and on storage.

It covers each leaf's name, and its value, or its dtype, shape, the blocks of it that this rank holds, and their bytes
in row-major order. It does not cover strides, offsets, ``requires_grad``, devices, meshes, kinds of containers, or the
order of keys: a receiver may have others. Ranks that hold other shards have other digests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from transfuse._memory import blocks
from transfuse._memory.mutation import MutationWatch
from transfuse._memory.packing import TensorPlaces, wide_digests_of
from transfuse._plan import parcels
from transfuse._plan.holdings import Holding, Holdings, Spread
from transfuse._plan.regions import Regions
from transfuse._report import Version
from transfuse._state import trees
from transfuse._state.leaves import dense, values
from transfuse._state.leaves.spec import is_sharded, of_plain_tensors
from transfuse._state.manifest import Described, Leaf, Manifest
from transfuse._state.region import Ints
from transfuse._tuning import HASHED_BLOCK_BYTES

_SIGNS = int(dense.Flags.CONJUGATE | dense.Flags.NEGATIVE)


def content_of(described: Described, seconds: float) -> bytes:
    """The digest. ``seconds``: how long a copy from a device may take."""
    manifest, bytes_of = described.manifest, _digests_of_tensors(described, seconds)
    holdings = Holdings(manifest)
    names = trees.dotted(manifest.root, longest=None)
    first = manifest.first_tensors.tolist()
    digest = xxhash.xxh3_128()
    for name, leaf in sorted(zip(names, range(len(manifest)), strict=True)):
        rows = range(first[leaf], first[leaf + 1])
        said = _said(manifest, holdings, leaf, rows)
        digest.update(
            msgspec.msgpack.encode(
                [name.encode(errors="surrogatepass"), *said, b"".join(bytes_of[row] for row in rows)]
            )
        )
    return digest.digest()


def _said(manifest: Manifest, holdings: Holdings, leaf: int, rows: range) -> list[Any]:
    """What the digest covers of a leaf beside the bytes of its tensors."""
    kind, detail = manifest.kinds[leaf], manifest.detail(leaf)
    if kind == Leaf.VALUE:
        return ["value", detail]
    if kind == Leaf.COMPOSITE and not (is_sharded(detail) and of_plain_tensors(detail)):
        return ["composite", detail, [_tensor(manifest, row) for row in rows]]
    holding = holdings.of(leaf, 0)
    shards = [blocks for _, blocks in holding.shards]
    return ["tensor", holding.shape, shards, _reduction(holding), [_tensor(manifest, row) for row in rows]]


def _reduction(holding: Holding) -> str:
    """Of a Partial DTensor the operation that makes values of what the ranks hold."""
    return str(holding.layout.placements) if isinstance(holding, Spread) and holding.layout.partial else ""


def _tensor(manifest: Manifest, row: int) -> list[Any]:
    return [values.dtype_name(manifest.dtype_of(row)), manifest.tensors.shape(row)]


def _digests_of_tensors(described: Described, seconds: float) -> list[bytes]:
    """A digest of each tensor's bytes, row by row; of a dimension of stride 0, those of one element."""
    tensors = described.manifest.tensors
    filled = np.flatnonzero(tensors.numel > 0)
    addresses = described.addresses[tensors.storage[filled]]
    in_place = tensors.contiguous[filled] & (addresses > 0) & (tensors.flags[filled] & _SIGNS == 0)
    result = [b""] * len(tensors)

    runs = filled[in_place]
    sizes = tensors.numel[runs] * tensors.item[runs]
    found = blocks.digests_at(addresses[in_place] + tensors.start[runs], sizes, described.files)
    for row, digest in zip(runs.tolist(), found, strict=True):
        result[row] = digest

    others = filled[~in_place].tolist()
    for row, digest in zip(others, _packed([described.tensors[row] for row in others], seconds), strict=True):
        result[row] = digest
    return result


def _packed(tensors: Iterable[torch.Tensor], seconds: float) -> Iterator[bytes]:
    """The same digests of tensors that are not one run of main memory."""
    views = [_without_repetition(dense.raw(tensor.resolve_conj().resolve_neg())) for tensor in tensors]
    item = np.array([view.element_size() for view in views], dtype=np.int64)
    nbytes = np.array([view.numel() for view in views], dtype=np.int64) * item
    nowhere = np.zeros(len(views), dtype=np.int64)
    each = np.arange(len(views))
    cut = parcels.cut(
        Regions(nowhere, each, nowhere, nbytes, item, nowhere - 1, strided={}, also={}),
        HASHED_BLOCK_BYTES,
        all_staged=True,
    )
    digests = wide_digests_of(cut, TensorPlaces(views), range(len(cut)), seconds)
    edges: Ints = np.searchsorted(cut.first, np.append(each, len(views)))
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        yield blocks.join(digests[low:high])


def _without_repetition(view: torch.Tensor) -> torch.Tensor:
    for dim, stride in enumerate(view.stride()):
        view = view.narrow(dim, 0, 1) if stride == 0 else view
    return view


class KnownContent:
    """The digest of one state's content, computed at most once until the state changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The digest of the description, a watch over its tensors, and the digest of the content.
        self._known: tuple[bytes, MutationWatch, bytes] | None = None

    def known(self, description: bytes) -> bytes:
        """The digest, if it was computed for this description and nothing has changed since; otherwise nothing."""
        known = self._known
        if known is None or known[0] != description or len(known[1].changed_rows()):
            return b""
        return known[2]

    def of(self, described: Described, seconds: float) -> bytes:
        """The digest."""
        description = described.manifest.encode().digest()
        with self._lock:
            found = self.known(description)
            if not found:
                watch = MutationWatch(described)
                found = content_of(described, seconds)
                self._known = description, watch, found
            return found


def version_of(step: int | None, contents: Iterable[bytes]) -> Version:
    """The version of what several sources hold together: each digest counts once, in any order.

    The digest is unknown if that of one source is.
    """
    found: Sequence[bytes] = sorted(set(contents))
    if not found or not found[0]:
        return Version(step)
    return Version(step, (found[0] if len(found) == 1 else xxhash.xxh3_128_digest(b"".join(found))).hex())
