"""Sparse tensors of every layout, and jagged nested tensors: index tensors beside values.

A peer's indices travel like any other data, but a wrong index makes later kernels read out of bounds. So received
indices are checked before the caller gets the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.nested._internal.nested_tensor import NestedTensor

from transfuse._state.leaves.codec import BuildContext, CannotCarry, Opened, Shared


class CooMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    sizes: tuple[int, ...]
    coalesced: bool


class CompressedMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    layout: str
    sizes: tuple[int, ...]


class JaggedMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    ragged_dim: int
    has_lengths: bool
    min_length: int | None
    max_length: int | None


def _differences(source: msgspec.Struct, target: msgspec.Struct) -> list[str]:
    return [
        f"{field}: source {getattr(source, field)}, target {getattr(target, field)}"
        for field in source.__struct_fields__
        if getattr(source, field) != getattr(target, field)
    ]


def _check_backed(indices: torch.Tensor) -> None:
    """Refuse indices with more elements than memory: a peer could make the check of these take for ever."""
    if type(indices) not in _PLAIN or indices.layout is not torch.strided:
        raise ValueError("the indices are not a plain tensor")
    if indices.numel() * indices.element_size() > indices.untyped_storage().nbytes():
        raise ValueError(f"{indices.numel()} indices have only {indices.untyped_storage().nbytes()} bytes of memory")


@contextmanager
def _harmless_if_wrong(*indices: torch.Tensor) -> Iterator[None]:
    """Zero the indices of a target if the check inside fails, so that no kernel follows wrong indices."""
    try:
        yield
    except ValueError:
        for index in indices:
            index.zero_()
        raise


def _check_sizes(sizes: tuple[int, ...]) -> None:
    if any(n < 0 for n in sizes):
        raise ValueError("a sparse tensor has a negative size")


class CooCodec:
    name = "coo"
    checks_data = True

    def takes(self, leaf: object) -> bool:
        return type(leaf) in _PLAIN and leaf.layout is torch.sparse_coo  # type: ignore[attr-defined]

    def open(self, leaf: torch.Tensor, shared: Shared) -> Opened:
        leaf = leaf.detach()
        return Opened(CooMeta(tuple(leaf.shape), leaf.is_coalesced()), [leaf._indices(), leaf._values()])

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        _check_sizes(msgspec.convert(meta, CooMeta).sizes)
        if children != 2:
            raise ValueError(f"a sparse tensor consists of 2 tensors (indices and values), got {children}")

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> torch.Tensor:
        m = msgspec.convert(meta, CooMeta)
        _check_backed(children[0])
        try:
            return torch.sparse_coo_tensor(  # type: ignore[call-arg]
                *children,
                m.sizes,  # type: ignore[arg-type]
                is_coalesced=m.coalesced,
                check_invariants=True,
            )
        except RuntimeError as error:
            raise ValueError(f"inconsistent sparse tensor: {error}") from error

    def differences(
        self, source: Any, target: CooMeta, build_context: BuildContext, target_shared: Shared
    ) -> list[str]:
        m = msgspec.convert(source, CooMeta)
        return [] if m.sizes == target.sizes else [f"shape: source {m.sizes}, target {target.sizes}"]

    def settle(self, meta: Any, target: torch.Tensor) -> None:
        bare = target.detach()
        with _harmless_if_wrong(bare._indices()):
            self.close(meta, [bare._indices(), bare._values()], BuildContext())
        target._coalesced_(msgspec.convert(meta, CooMeta).coalesced)


_LAYOUTS = {str(layout): layout for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _standard(index: torch.Tensor) -> torch.Tensor:
    """An index tensor with the strides that torch gives new ones."""
    if index.ndim and index.stride(-1) == 1 and index.is_contiguous():
        return index
    return index.clone(memory_format=torch.contiguous_format)


class CompressedCodec:
    """CSR, CSC, BSR and BSC."""

    name = "compressed"
    checks_data = True

    def takes(self, leaf: object) -> bool:
        return type(leaf) in _PLAIN and str(leaf.layout) in _LAYOUTS  # type: ignore[attr-defined]

    def open(self, leaf: torch.Tensor, shared: Shared) -> Opened:
        leaf = leaf.detach()
        if leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
            indices = [leaf.crow_indices(), leaf.col_indices()]
        else:
            indices = [leaf.ccol_indices(), leaf.row_indices()]
        return Opened(CompressedMeta(str(leaf.layout), tuple(leaf.shape)), [*indices, leaf.values()])

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        m = msgspec.convert(meta, CompressedMeta)
        _check_sizes(m.sizes)
        if children != 3 or m.layout not in _LAYOUTS:
            raise ValueError(f"a compressed sparse tensor of {children} tensors with layout {m.layout[:50]!a}")

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> torch.Tensor:
        m = msgspec.convert(meta, CompressedMeta)
        layout = _LAYOUTS[m.layout]
        compressed, plain, _ = children
        _check_backed(compressed)
        _check_backed(plain)
        # torch's own check walks from each compressed index to the next one before it has checked the next one.
        if compressed.numel() and (int(compressed.min()) < 0 or int(compressed.max()) > plain.shape[-1]):
            raise ValueError("inconsistent sparse tensor: compressed indices reach beyond the plain ones")
        try:
            # torch's check expects contiguous strides, which indices of one element need not have.
            compressed, plain = (_standard(index) for index in children[:2])
            torch._validate_sparse_compressed_tensor_args(compressed, plain, children[2], m.sizes, layout)
        except RuntimeError as error:
            raise ValueError(f"inconsistent sparse tensor: {error}") from error
        return torch.sparse_compressed_tensor(  # type: ignore[call-arg]
            *children,
            m.sizes,  # type: ignore[arg-type]
            layout=layout,
            check_invariants=False,
        )

    def differences(
        self, source: Any, target: CompressedMeta, build_context: BuildContext, target_shared: Shared
    ) -> list[str]:
        return _differences(msgspec.convert(source, CompressedMeta), target)

    def settle(self, meta: Any, target: torch.Tensor) -> None:
        children = self.open(target, Shared()).children
        with _harmless_if_wrong(*children[:2]):
            self.close(meta, children, BuildContext())


class JaggedCodec:
    """Nested tensors of jagged layout."""

    name = "jagged"
    checks_data = True

    def takes(self, leaf: object) -> bool:
        return isinstance(leaf, NestedTensor)

    def open(self, leaf: Any, shared: Shared) -> Opened:
        if leaf._lengths is not None and leaf._lengths.is_meta:
            raise CannotCarry("a nested tensor whose lengths are a meta tensor, without data; materialize them first")
        cache = {key: int(tensor.shape[0]) for key, tensor in leaf._metadata_cache.items()}
        meta = JaggedMeta(leaf._ragged_idx, leaf._lengths is not None, cache.get("min_seqlen"), cache.get("max_seqlen"))
        children = [leaf._values.detach(), leaf._offsets]
        return Opened(meta, children if leaf._lengths is None else [*children, leaf._lengths])

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        m = msgspec.convert(meta, JaggedMeta)
        if children != 2 + m.has_lengths:
            raise ValueError(f"a nested tensor consists of {2 + m.has_lengths} tensors, got {children}")

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> torch.Tensor:
        m = msgspec.convert(meta, JaggedMeta)
        values, offsets, lengths = [*children, None][:3]
        _check_jagged(m, values, offsets, lengths)
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, lengths, jagged_dim=m.ragged_dim, min_seqlen=m.min_length, max_seqlen=m.max_length
        )

    def differences(
        self, source: Any, target: JaggedMeta, build_context: BuildContext, target_shared: Shared
    ) -> list[str]:
        m = msgspec.convert(source, JaggedMeta)
        # The shortest and the longest length follow from the offsets, and these are data that will be overwritten.
        return _differences(
            JaggedMeta(m.ragged_dim, m.has_lengths, None, None),
            JaggedMeta(target.ragged_dim, target.has_lengths, None, None),
        )

    def settle(self, meta: Any, target: Any) -> None:
        m = msgspec.convert(meta, JaggedMeta)
        indices = [target._offsets] if target._lengths is None else [target._offsets, target._lengths]
        with _harmless_if_wrong(*indices):
            _check_jagged(m, target._values.detach(), target._offsets, target._lengths)
        cache = {}
        for key, length in (("min_seqlen", m.min_length), ("max_seqlen", m.max_length)):
            if length is not None:
                # torch stores a cached length as the size of an empty tensor.
                cache[key] = torch.empty(length, 0, device=target._values.device)
        target._metadata_cache.clear()
        target._metadata_cache.update(cache)


def _check_jagged(m: JaggedMeta, values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None) -> None:
    whole = (torch.int32, torch.int64)
    _check_backed(offsets)
    if lengths is not None:
        _check_backed(lengths)
    if offsets.ndim != 1 or not len(offsets) or offsets.dtype not in whole or not 0 < m.ragged_dim <= values.ndim:
        raise ValueError(
            f"the offsets of a nested tensor ({offsets.dtype}, shape {tuple(offsets.shape)}) do not fit its values "
            f"of {values.ndim} dimensions, ragged dimension {m.ragged_dim}"
        )
    steps = offsets.diff()
    # The range is checked as well, because the difference of two arbitrary offsets may wrap around.
    if int(offsets.min()) < 0 or int(offsets.max()) > values.shape[m.ragged_dim - 1] or bool((steps < 0).any()):
        raise ValueError("the offsets of a nested tensor reach beyond its values, or fall")
    if lengths is not None:
        if lengths.shape != steps.shape or lengths.dtype not in whole:
            raise ValueError("the lengths of a nested tensor do not fit its offsets: another number or dtype")
        if bool((lengths < 0).any()) or bool((lengths > steps).any()):
            raise ValueError("the lengths of a nested tensor reach beyond its offsets")
    real = steps if lengths is None else lengths
    for bound, found in ((m.min_length, real.min), (m.max_length, real.max)):
        if bound is not None and len(real) and bound != int(found()):
            raise ValueError("the cached lengths of a nested tensor differ from those of its offsets")
