"""Traceable wrapper subclasses (torchao's quantized tensors, float8 weights), opened by ``__tensor_flatten__``."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from transfuse._state import class_names
from transfuse._state.leaves import values
from transfuse._state.leaves.codec import BuildContext, CannotCarry, Opened, Shared
from transfuse._state.leaves.dtensors import is_dtensor_class


class WrapperMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    cls: str
    attributes: tuple[str, ...]
    context: Any
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def allowed(cls: type) -> bool:
    """Whether a peer may name ``cls``: only if it is in torch's allow-list in this process."""
    return any(
        (entry[0] if isinstance(entry, tuple) else entry) is cls for entry in torch.serialization.get_safe_globals()
    )


class WrapperCodec:
    name = "wrapper"
    checks_data = False

    def takes(self, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and is_traceable_wrapper_subclass(leaf)

    def open(self, leaf: Any, shared: Shared) -> Opened:
        attributes, context = leaf.__tensor_flatten__()
        children = [getattr(leaf, name) for name in attributes]
        if odd := [
            name for name, child in zip(attributes, children, strict=True) if not isinstance(child, torch.Tensor)
        ]:
            raise CannotCarry(
                f"tensor subclass {type(leaf).__qualname__}: its attributes {', '.join(odd)} are not tensors; leave "
                "them out of its __tensor_flatten__"
            )
        try:
            name, encoded = class_names.name_of(type(leaf)), values.encode(context)
        except (ValueError, values.Unencodable) as error:
            raise CannotCarry(
                f"tensor subclass {type(leaf).__qualname__}: its name or context cannot be carried: {error}"
            ) from error
        return Opened(WrapperMeta(name, tuple(attributes), encoded, tuple(leaf.shape), tuple(leaf.stride())), children)

    def _read(self, meta: Any, children: int) -> WrapperMeta:
        m = msgspec.convert(meta, WrapperMeta)
        if len(m.attributes) != children or len(set(m.attributes)) != children or len(m.sizes) != len(m.strides):
            raise ValueError(f"a wrapper tensor names {len(m.attributes)} attributes for its {children} tensors")
        if any(n < 0 for n in (*m.sizes, *m.strides)):
            raise ValueError("a wrapper tensor has a negative size or stride")
        return m

    def _class(self, m: WrapperMeta) -> Any:
        try:
            cls = class_names.find(m.cls)
        except LookupError as error:
            raise CannotCarry(
                f"tensor subclass {m.cls} is not imported here ({error}); import it, or receive in place"
            ) from None
        if not allowed(cls):
            raise CannotCarry(
                f"tensor subclass {m.cls} is not allowed here; call torch.serialization.add_safe_globals("
                f"[{cls.__name__}]), or receive in place"
            )
        if not issubclass(cls, torch.Tensor) or not hasattr(cls, "__tensor_unflatten__"):
            raise ValueError(f"{m.cls} is not a traceable tensor subclass")
        if is_dtensor_class(cls) or issubclass(cls, NestedTensor):
            raise ValueError(f"{m.cls} has a codec of its own")
        return cls

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        m = self._read(meta, children)
        self._class(m)
        values.decode(m.context)

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> torch.Tensor:
        m = self._read(meta, len(children))
        inner = dict(zip(m.attributes, children, strict=True))
        try:
            built = self._class(m).__tensor_unflatten__(inner, values.decode(m.context), torch.Size(m.sizes), m.strides)
        except CannotCarry:
            raise
        except Exception as error:
            raise ValueError(f"{m.cls} cannot be built from what arrived: {error!r}") from error
        if not isinstance(built, torch.Tensor):
            raise ValueError(f"{m.cls}.__tensor_unflatten__ returned {type(built)}, expected a tensor")
        return built

    def differences(
        self, source: Any, target: WrapperMeta, build_context: BuildContext, target_shared: Shared
    ) -> list[str]:
        m = msgspec.convert(source, WrapperMeta)
        found = []
        if m.cls != target.cls:
            return [f"type: source {m.cls}, target {target.cls}"]
        if m.sizes != target.sizes:
            found.append(f"shape: source {m.sizes}, target {target.sizes}")
        if m.attributes != target.attributes:
            found.append(f"parts: source {m.attributes}, target {target.attributes}")
        if not found and msgspec.msgpack.encode(m.context) != msgspec.msgpack.encode(target.context):
            found.append(f"context: source {values.decode(m.context)}, target {values.decode(target.context)}")
        return found

    def settle(self, meta: Any, target: Any) -> None:
        pass
