"""Plain strided tensors: which can be carried, their flags, their raw memory, and how they are built again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from transfuse._state.leaves.codec import CannotCarry, tensor_type

#: For each item size, the dtype as which raw memory is read and written: copying these dtypes never changes bits.
ITEM_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


#: Named tensors exist only in older torch.
_has_names = getattr(torch.Tensor, "has_names", None)


class Flags:
    """A tensor's properties beside its memory. (Plain ints: each use of an enum member costs a microsecond.)"""

    PARAMETER = 1
    BUFFER = 2
    NOT_PERSISTENT = 4
    REQUIRES_GRAD = 8
    CONJUGATE = 16
    NEGATIVE = 32


def is_quantized(dtype: torch.dtype) -> bool:
    return dtype in (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


@lru_cache
def converts(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether torch can convert items of dtype ``one`` into dtype ``other``."""
    try:
        torch.zeros(1, dtype=other).copy_(torch.zeros(1, dtype=one))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def is_plain(leaf: object) -> bool:
    cls = type(leaf)
    return (cls is torch.Tensor or cls is nn.Parameter) and leaf.layout is torch.strided  # type: ignore[attr-defined]


def check(tensor: torch.Tensor) -> None:
    """Refuse tensors without ordinary memory that could be sent."""
    if tensor.is_quantized:
        raise CannotCarry(
            f"a quantized tensor ({tensor.dtype}); send int_repr(), q_scale() and q_zero_point(), or use torchao"
        )
    if tensor.device.type == "meta":
        raise CannotCarry('a meta tensor has no data; materialize it first, for example with to_empty(device="cpu")')
    if tensor.is_nested:
        raise CannotCarry("a nested tensor of strided layout; use layout=torch.jagged")
    if _has_names is not None and _has_names(tensor):
        raise CannotCarry("a named tensor; drop the names with rename(None)")
    if tensor._is_zerotensor():
        raise CannotCarry("a tensor of zeros that has no memory (torch._efficientzerotensor); clone() it first")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise CannotCarry("a tensor inside a torch.func transform; send it from outside")


def check_initialized(leaf: object) -> None:
    """Refuse parameters and buffers of lazy modules that have no shape yet."""
    if isinstance(leaf, torch.Tensor) and is_lazy(leaf):
        raise CannotCarry(
            f"an {type(leaf).__name__} of a lazy module has no shape yet; run a forward pass first, which gives it one"
        )


#: The problem with a tensor that has elements but no memory for them. The braces take the owner: "its", "the target's".
FREED = "{} storage has been freed or shrunk (an unsharded FSDP parameter?)"


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage holds all its elements: FSDP frees storages of parameters that are not gathered."""
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return bool((tensor.storage_offset() + reach) * tensor.element_size() <= tensor.untyped_storage().nbytes())


def is_ordinary(leaf: object) -> bool:
    """Whether a leaf is a plain tensor that can be carried and, if it has elements, has memory."""
    if not isinstance(leaf, torch.Tensor) or not is_plain(leaf):
        return False
    try:
        check(leaf)
    except CannotCarry:
        return False
    return leaf.numel() == 0 or leaf.data_ptr() != 0


def role_of(tensor: torch.Tensor) -> int:
    """The flags that every tensor has, composites included."""
    flags = 0
    if tensor.requires_grad:
        flags |= Flags.REQUIRES_GRAD
    if isinstance(tensor, nn.Parameter):
        flags |= Flags.PARAMETER
    elif getattr(tensor, "_is_buffer", False):
        flags |= Flags.BUFFER
        if not getattr(tensor, "persistent", True):
            flags |= Flags.NOT_PERSISTENT
    return flags


def flags_of(tensor: torch.Tensor) -> int:
    """The flags of a plain tensor."""
    flags = role_of(tensor)
    if tensor.is_conj():
        flags |= Flags.CONJUGATE
    if tensor.is_neg():
        flags |= Flags.NEGATIVE
    return flags


def over(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, sizes: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A tensor over ``storage``, without a copy and without autograd history."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, tuple(sizes), tuple(strides))


def offset_of(tensor: torch.Tensor) -> int:
    """A tensor's offset in items. (torch declares a type that may be symbolic; live tensors have ints.)"""
    return int(tensor.storage_offset())


def start_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's first item, whatever its conjugate or negative bits."""
    return tensor.untyped_storage().data_ptr() + offset_of(tensor) * tensor.element_size()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory and shape as bare bits: no dtype, no conjugate or negative bit, no gradient."""
    item = ITEM_TYPES[tensor.element_size()]
    return over(tensor.untyped_storage(), item, offset_of(tensor), tensor.size(), tensor.stride())


def dress(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """Give a rebuilt tensor its flags. ``ValueError`` if they do not fit it."""
    if flags & Flags.CONJUGATE:
        if not tensor.is_complex():
            raise ValueError(f"a conjugate bit on a tensor of {tensor.dtype}, which is not complex")
        tensor = tensor.conj()
    if flags & Flags.NEGATIVE:
        tensor = torch._neg_view(tensor)
    requires_grad = bool(flags & Flags.REQUIRES_GRAD)
    if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"requires_grad on a tensor of {tensor.dtype}, which has no gradients")
    if flags & Flags.PARAMETER:
        return nn.Parameter(tensor, requires_grad)
    if flags & Flags.BUFFER:
        buffer = nn.Buffer(tensor, persistent=not flags & Flags.NOT_PERSISTENT)
        return buffer.requires_grad_() if requires_grad else buffer
    return tensor.requires_grad_() if requires_grad else tensor


def refuse_subclass(tensor: torch.Tensor) -> CannotCarry:
    check_initialized(tensor)
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return CannotCarry(f"a tensor of layout {tensor.layout} has no codec; convert it with to_dense()")
    return CannotCarry(
        f"tensor subclass {tensor_type(tensor)} has no codec: give it __tensor_flatten__ and __tensor_unflatten__, "
        "or send the plain tensors that it consists of"
    )


@dataclass(frozen=True)
class Signs:
    """The conjugate and negative bits in which source and target differ: the target's memory holds the other sign."""

    dtype: torch.dtype
    conjugate: bool
    negative: bool

    def flip(self, items: torch.Tensor) -> None:
        """Change the sign of raw items in place, as bits (torch's own negation would quiet NaNs)."""
        if not self.dtype.is_complex and not self.dtype.is_floating_point:
            items.view(_SIGNED[items.element_size()]).neg_()
            return
        width = items.element_size() // (2 if self.dtype.is_complex else 1)
        numbers = items.view(_SIGNED[width])
        if self.negative:
            numbers.bitwise_xor_(torch.iinfo(numbers.dtype).min)
        if self.conjugate:
            numbers[..., 1::2].bitwise_xor_(torch.iinfo(numbers.dtype).min)


def signs_between(tensor: torch.Tensor, source_flags: int) -> Signs | None:
    """The signs to flip in items from a tensor with ``source_flags``, so that ``tensor`` gets the same values."""
    differ = flags_of(tensor) ^ source_flags
    conjugate, negative = bool(differ & Flags.CONJUGATE), bool(differ & Flags.NEGATIVE)
    return Signs(tensor.dtype, conjugate, negative) if conjugate or negative else None


_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
