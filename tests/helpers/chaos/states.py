"""The states that scenarios move."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from chaos.scenarios import Make, Mode

# ---------------------------------------------------------------------------------------------------------- states

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def build(make: Make) -> dict[str, Any]:
    """The state, the same wherever it is built. Whatever bits there are: NaNs with payloads, negative zeros."""
    rng = np.random.default_rng(make.seed)
    weights = np.exp(rng.normal(0, 1.5, make.leaves))
    sizes = (weights / weights.sum() * make.nbytes).astype(int).tolist()
    leaves: list[Any] = []
    tensors: list[torch.Tensor] = []
    for size in sizes:
        dtype = _DTYPES[rng.integers(len(_DTYPES))]
        tensors.append(_tensor(rng, dtype, size // dtype.itemsize))
        leaves.append(tensors[-1])
    for _ in range(int(rng.integers(0, 4))):
        tied = tensors[rng.integers(len(tensors))]
        if rng.random() < 0.5 or tied.dim() != 1 or tied.requires_grad:
            leaves.append(tied)
        else:
            low, high = sorted(rng.integers(0, tied.numel() + 1, 2).tolist())
            leaves.append(tied[low:high])
    leaves.append(torch.Generator().manual_seed(make.seed).get_state())
    leaves += [int(rng.integers(1 << 40)), float(rng.normal()), None, True, "text ü", rng.bytes(9000), rng.bytes(5)]
    leaves.append(rng.integers(0, 9, (3, 4)))
    order = rng.permutation(len(leaves)).tolist()
    return _arrange(rng, [leaves[i] for i in order])


def _tensor(rng: np.random.Generator, dtype: torch.dtype, count: int) -> torch.Tensor:
    kind = rng.choice(["plain", "plain", "plain", "matrix", "strided", "transposed", "narrow", "parameter", "scalar"])
    if kind == "scalar":
        return _filled(rng, dtype, 1).reshape(())
    if kind == "strided":
        return _filled(rng, dtype, max(2 * count - 1, 0))[::2]
    if kind == "narrow":
        return _filled(rng, dtype, count + 11)[5 : count + 5]
    if kind in ("matrix", "transposed"):
        matrix = _filled(rng, dtype, count // 4 * 4).view(4, count // 4)
        return matrix if kind == "matrix" else matrix.t()
    tensor = _filled(rng, dtype, count)
    if kind == "parameter" and dtype.is_floating_point and dtype.itemsize > 1:
        return torch.nn.Parameter(tensor)
    return tensor


def _filled(rng: np.random.Generator, dtype: torch.dtype, count: int) -> torch.Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    data = torch.frombuffer(bytearray(rng.bytes(count * dtype.itemsize)), dtype=torch.uint8)
    if dtype == torch.bool:
        data &= 1
    return data.clone().view(dtype)


def _arrange(rng: np.random.Generator, leaves: list[Any]) -> dict[str, Any]:
    """Put leaves into containers in containers."""
    tree: dict[str, Any] = {}
    at = 0
    while at < len(leaves):
        some = leaves[at : at + int(rng.integers(1, 6))]
        at += len(some)
        name = f"n{at}"
        match int(rng.integers(5)):
            case 0:
                tree[name] = some
            case 1:
                tree[name] = tuple(some)
            case 2:
                tree[name] = collections.OrderedDict((f"k{i}", leaf) for i, leaf in enumerate(some))
            case 3:
                tree[name] = {"inner": [{i: leaf} for i, leaf in enumerate(some)], "empty": {}}
            case _:
                tree.update({f"{name}.{i}": leaf for i, leaf in enumerate(some)})
    return tree


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with their paths."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from walk(value, f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for i, value in enumerate(tree):
            yield from walk(value, f"{path}[{i}]")
    else:
        yield path, tree


def tensors_of(tree: Any) -> dict[str, torch.Tensor]:
    return {path: leaf for path, leaf in walk(tree) if isinstance(leaf, torch.Tensor)}


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of its elements, in their order."""
    return memory_of(tensor.detach().clone(memory_format=torch.contiguous_format)).numpy().tobytes()


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that it is in, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def invert(tree: Any) -> None:
    """Change every byte of every tensor, also of those that the memory of a view has besides."""
    done: set[int] = set()
    for tensor in tensors_of(tree).values():
        memory = memory_of(tensor.detach())
        if memory.numel() and memory.data_ptr() not in done:
            done.add(memory.data_ptr())
            memory ^= 1 if tensor.dtype == torch.bool else 0xFF


def apart(tree: Any) -> Any:
    """The same tree with tensors that share no memory and lie in it one after another."""
    if isinstance(tree, dict):
        return type(tree)((key, apart(value)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(apart(value) for value in tree)
    if isinstance(tree, torch.nn.Parameter):
        return torch.nn.Parameter(tree.detach().clone(memory_format=torch.contiguous_format))
    if isinstance(tree, torch.Tensor):
        return tree.clone(memory_format=torch.contiguous_format)
    return tree


def target_for(make: Make, mode: Mode) -> Any:
    """A target of which every byte differs from the source's."""
    tree = build(make)
    if mode == "apart":
        tree = apart(tree)
    invert(tree)
    return tree
