"""The registry of codecs: which codec handles a leaf, and how any leaf is opened into tensors and closed again.

A leaf's description is its spec (``spec.py``). The tensors of a leaf that is no plain tensor are numbered
depth-first, in the order of the spec's children.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from transfuse._limits import Limits
from transfuse._state.leaves import dense
from transfuse._state.leaves.blobs import ArrayCodec, ObjectCodec, TextCodec
from transfuse._state.leaves.block import BlockCodec, is_tensor
from transfuse._state.leaves.codec import BuildContext, CannotCarry, Codec, Shared, tensor_type
from transfuse._state.leaves.distributed import DTensorCodec, ShardedTensorCodec
from transfuse._state.leaves.sparse import CompressedCodec, CooCodec, JaggedCodec
from transfuse._state.leaves.spec import Spec
from transfuse._state.leaves.subclass import WrapperCodec

#: Composites may hold composites (a DTensor of quantized tensors), but no deeper than this.
MAX_NESTING = 8


class _Read(NamedTuple):
    """A spec that has been read and checked."""

    codec: Codec
    flags: int
    meta: Any
    children: list[Any]


class Registry:
    """All codecs, in the order in which they are asked."""

    def __init__(self, limits: Limits) -> None:
        self._codecs: list[Codec] = [
            DTensorCodec(),
            ShardedTensorCodec(),
            BlockCodec(),
            CooCodec(),
            CompressedCodec(),
            JaggedCodec(),
            WrapperCodec(),
            ArrayCodec(),
            TextCodec(limits.inline_bytes),
            ObjectCodec(limits.max_object_bytes),
        ]
        self._by_name = {codec.name: codec for codec in self._codecs}

    def is_value(self, leaf: object) -> bool:
        """Whether a leaf goes into the manifest as a value, provided that it can be encoded."""
        return not is_tensor(leaf) and not self._by_name["text"].takes(leaf)

    def open(self, leaf: Any, tensors: list[torch.Tensor], shared: Shared) -> Any:
        """The spec of a leaf that is not a value. Its tensors are appended to ``tensors``."""
        if isinstance(leaf, AsyncCollectiveTensor):
            leaf = leaf.wait()
        if dense.is_plain(leaf):
            dense.check(leaf)
            tensors.append(leaf)
            return 0
        for codec in self._codecs:
            if codec.takes(leaf):
                opened = codec.open(leaf, shared)
                flags = dense.role_of(leaf) if isinstance(leaf, torch.Tensor) else 0
                specs = [self.open(child, tensors, shared) for child in opened.children]
                return [codec.name, flags, opened.meta, specs]
        if isinstance(leaf, torch.Tensor):
            raise dense.refuse_subclass(leaf)
        cls = type(leaf)
        raise CannotCarry(
            f"{cls.__module__}.{cls.__qualname__} is a {cls.__mro__[-2].__name__} but not a registered container, "
            "so transfuse cannot see what it holds; convert it to a plain container, or register it with "
            "torch.utils._pytree"
        )

    def promise(self, spec: Any, build_context: BuildContext, depth: int = 0) -> int:
        """Check, before a byte moves, that a received spec can be closed. Returns the number of its tensors."""
        if type(spec) is int and spec == 0:
            return 1
        codec, flags, meta, children = self._read(spec)
        if depth >= MAX_NESTING or not 0 <= flags < dense.Flags.CONJUGATE:
            raise ValueError(f"malformed leaf: flags {flags} at depth {depth} (depth must be below {MAX_NESTING})")
        codec.promise(meta, len(children), build_context)
        return sum(self.promise(child, build_context, depth + 1) for child in children)

    def count(self, spec: Any, depth: int = 0) -> int:
        """The number of tensors of a spec."""
        if type(spec) is int and spec == 0:
            return 1
        if depth >= MAX_NESTING:
            raise ValueError(f"malformed leaf: nested deeper than {MAX_NESTING}")
        return sum(self.count(child, depth + 1) for child in self._read(spec).children)

    def _read(self, spec: Any) -> _Read:
        """Read an untrusted spec and find its codec; ``ValueError`` for what no codec writes."""
        if type(spec) is not list or len(spec) != len(Spec._fields):
            raise ValueError("malformed leaf: its spec is not [codec, flags, meta, children]")
        codec, flags, meta, children = Spec(*spec)
        if type(flags) is not int or type(children) is not list:
            raise ValueError("malformed leaf: flags must be an int and children a list")
        if type(codec) is not str or codec not in self._by_name:
            raise ValueError(f"unknown kind of leaf {codec!r}")
        return _Read(self._by_name[codec], flags, meta, children)

    def is_blob(self, spec: Any) -> bool:
        """Whether a leaf is a blob: bytes inside, which are never written into a target but replace its leaf."""
        return type(spec) is not int and isinstance(self._read(spec).codec, (ArrayCodec, TextCodec, ObjectCodec))

    def close(self, spec: Any, tensors: Iterator[Any], build_context: BuildContext) -> Any:
        """Build a leaf from its tensors after these have arrived."""
        if type(spec) is int:
            return next(tensors)
        codec, flags, meta, children = self._read(spec)
        leaf = codec.close(meta, [self.close(child, tensors, build_context) for child in children], build_context)
        return dense.dress(leaf, flags) if isinstance(leaf, torch.Tensor) else leaf

    def fit(
        self, spec: Any, target: Any, build_context: BuildContext, shared: Shared
    ) -> tuple[list[torch.Tensor | None], list[str]]:
        """Match a received spec with a target leaf: the target's tensors in the spec's order, and what does not fit.

        An entry is None if the bytes of that tensor do not go into the target, because the leaf is a blob.
        """
        if isinstance(target, AsyncCollectiveTensor):
            target = target.wait()
        dense.check_initialized(target)
        if type(spec) is int:
            if not dense.is_plain(target):
                return [], [f"kind: source is a tensor, target is {_name(target)}"]
            dense.check(target)
            return [target], []
        codec, _, meta, children = self._read(spec)
        if self.is_blob(spec):
            if is_tensor(target):
                return [], [f"kind: source is a {codec.name}, target is {_name(target)}"]
            return [None] * self.count(spec), []
        owner = None if dense.is_plain(target) else next((c for c in self._codecs if c.takes(target)), None)
        if owner is not codec:
            return [], [f"kind: source is a {codec.name}, target is {_name(target)}"]
        opened = codec.open(target, shared)
        if found := codec.differences(meta, opened.meta, build_context, shared):
            return [], found
        if len(children) != len(opened.children):
            return [], [f"parts: source has {len(children)}, target {len(opened.children)}"]
        result: list[torch.Tensor | None] = []
        problems: list[str] = []
        for child, inner in zip(children, opened.children, strict=True):
            fitted, why = self.fit(child, inner, build_context, shared)
            result += fitted
            problems += why
        return result, problems

    def examine(self, spec: Any, tensors: Iterator[Any], build_context: BuildContext) -> None:
        """Check data that landed beside its target (``atomic``): ``ValueError`` if :meth:`settle` would refuse it."""
        if type(spec) is int:
            next(tensors)
            return
        codec, _, meta, children = self._read(spec)
        if codec.checks_data:
            codec.close(meta, [self.close(child, tensors, build_context) for child in children], build_context)
            return
        for child in children:
            self.examine(child, tensors, build_context)

    def checks_data(self, spec: Any) -> bool:
        """Whether :meth:`examine` looks at the data of this leaf."""
        if type(spec) is int:
            return False
        codec, _, _, children = self._read(spec)
        return codec.checks_data or any(map(self.checks_data, children))

    def settle(self, spec: Any, target: Any) -> None:
        """Check and finish a target after all bytes have landed in it."""
        if type(spec) is int:
            return
        codec, _, meta, children = self._read(spec)
        if self.is_blob(spec):
            return
        for child, inner in zip(children, codec.open(target, Shared()).children, strict=True):
            self.settle(child, inner)
        codec.settle(meta, target)


def _name(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a {leaf.layout} {tensor_type(leaf)}" if leaf.layout is not torch.strided else f"a {tensor_type(leaf)}"
    return f"a {type(leaf).__name__}" if is_tensor(leaf) else f"a value of type {type(leaf).__name__}"
