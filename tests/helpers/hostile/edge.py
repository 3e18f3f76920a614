"""What is done with results, and memory that ends at memory that may not be read."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from hostile.classes import Scaled
from hostile.forging import _PAGE, INTS, _map_up_to_a_hole
from transfuse._errors import TransfuseError
from transfuse._limits import Limits
from transfuse._state import trees
from transfuse._state.leaves import dense
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry

# ----------------------------------------------------------------------------------------------------------- results

#: Tensors of more elements are not read: an expanded one may claim any number.
MAX_READ = 1 << 16


def touch(state: Any) -> None:
    """Use a received state as its owner would: read every element, convert what can be converted."""
    _, leaves = trees.flatten(state, max_depth=1000)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            _touch_tensor(leaf)
        elif isinstance(leaf, np.ndarray):
            leaf.tobytes()
            if leaf.size < MAX_READ:
                leaf.tolist()
        else:
            with contextlib.suppress(ValueError):  # more digits than Python prints
                repr(leaf)


def _touch_tensor(leaf: Tensor) -> None:
    with torch.no_grad():
        if isinstance(leaf, Scaled):
            _touch_tensor(leaf.numbers)
            _touch_tensor(leaf.scale)
        elif isinstance(leaf, DTensor):
            _touch_tensor(leaf._local_tensor)
        elif isinstance(leaf, ShardedTensor):
            for shard in leaf.local_shards():
                _touch_tensor(shard.tensor)
        elif leaf.is_nested:
            if leaf._values.numel() < MAX_READ and leaf._offsets.numel() < MAX_READ:  # type: ignore[attr-defined]
                with contextlib.suppress(RuntimeError):  # torch unbinds only what has no gaps
                    [piece.clone() for piece in leaf.unbind()]
        elif leaf.layout is not torch.strided:
            if leaf.numel() < MAX_READ and leaf._nnz() < MAX_READ:
                leaf.detach().to_dense()
        elif leaf.numel() < MAX_READ:
            dense.raw(leaf.detach()).clone()
            with contextlib.suppress(NotImplementedError, RuntimeError):  # not every dtype has every kernel
                leaf.detach().clone().resolve_conj().resolve_neg()


# --------------------------------------------------------------------------------------------- at the edge of memory


class Edge:
    """Memory that ends where the process may not read: one element too far is the end of the process."""

    def __init__(self) -> None:
        self._pages: list[int] = []
        self._used = 0

    def put(self, tensor: Tensor, gaps: bool = False) -> Tensor:
        """A copy of a small tensor that ends at the edge. It lives until the next :meth:`clear`.

        With gaps, every other element is none of the tensor's, and far from any index.
        """
        if gaps and tensor.ndim == 1:
            apart = self.put(torch.full((2 * len(tensor),), 1 << 30, dtype=tensor.dtype))[::2]
            return apart.copy_(tensor)
        size = tensor.numel() * tensor.element_size()
        assert size <= _PAGE
        if self._used == len(self._pages):
            self._pages.append(_map_up_to_a_hole(_PAGE))
        base = self._pages[self._used]
        self._used += 1
        if not size:
            return tensor.clone()
        window = (ctypes.c_ubyte * size).from_address(base + _PAGE - size)
        return torch.frombuffer(window, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)

    def clear(self) -> None:
        self._used = 0


def close_at_the_edge(seed: int, count: int) -> None:
    """Builds sparse and jagged tensors from forged indices that end at the edge, and uses those that can be built."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    edge, registry, built = Edge(), Registry(Limits()), 0
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        print(number, end="\r", file=sys.stderr, flush=True)
        edge.clear()
        torch.manual_seed(number)
        name, meta, children = _index_leaf(rng)
        tensors = [edge.put(child, not child.is_floating_point() and rng.random() < 0.1) for child in children]
        with contextlib.suppress(ValueError, TypeError, RuntimeError, TransfuseError):
            leaf = registry.close([name, 0, meta, [0] * len(tensors)], iter(tensors), BuildContext())
            built += 1
            touch([leaf])
    print(built)


def _index_leaf(rng: random.Random) -> tuple[str, Any, list[Tensor]]:
    """A composite leaf with index tensors, honest but for a few numbers."""
    rows, columns_ = rng.randrange(1, 5), rng.randrange(1, 6)
    layout = rng.choice(
        ["coo", "torch.sparse_csr", "torch.sparse_csc", "torch.sparse_bsr", "torch.sparse_bsc", "jagged"]
    )
    block = (rng.randrange(1, 3), rng.randrange(1, 3)) if "bs" in layout else (1, 1)
    shape = [rows * block[0], columns_ * block[1]]
    kind = rng.choice([torch.int64, torch.int64, torch.int32])
    cells = torch.ones(shape) * (torch.rand(shape) < 0.6)
    meta: Any
    if layout == "coo":
        made = cells.to_sparse()
        meta, children = [shape, rng.random() < 0.7], [made._indices(), made._values()]
    elif layout == "jagged":
        lengths = [rng.randrange(4) for _ in range(rows)]
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(kind)
        meta, children = [1, False, None, None], [torch.randn(sum(lengths), 2), offsets]
        if rng.random() < 0.3:
            meta, children = [1, True, None, None], [*children, torch.tensor(lengths, dtype=kind)]
    else:
        by_block = {"torch.sparse_bsr": cells.to_sparse_bsr, "torch.sparse_bsc": cells.to_sparse_bsc}
        plain = {"torch.sparse_csr": cells.to_sparse_csr, "torch.sparse_csc": cells.to_sparse_csc}
        made = by_block[layout](block) if layout in by_block else plain[layout]()
        row_wise = layout.endswith("r")
        indices = [made.crow_indices(), made.col_indices()] if row_wise else [made.ccol_indices(), made.row_indices()]
        meta, children = [layout, shape], [*(i.to(kind) for i in indices), made.values()]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        child = rng.choice([c for c in children if not c.is_floating_point()])
        if child.numel():
            low, high = torch.iinfo(child.dtype).min, torch.iinfo(child.dtype).max
            at = rng.randrange(child.numel())
            child.view(-1)[at] = min(max(rng.choice([*INTS, int(child.view(-1)[at]) + 1]), low), high)
    if rng.random() < 0.4:  # room for large indices
        sizes = meta[1] if layout.startswith("torch") else meta[0] if layout == "coo" else []
        if sizes:
            sizes[rng.randrange(len(sizes))] = rng.choice([1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1])
    return ("compressed" if layout.startswith("torch") else layout), meta, children
