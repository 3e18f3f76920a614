"""The cases: a handful of states, each sent to some receivers, in place or fresh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.compare.peers import Mode, tensors_of

__all__ = ["Case", "cases", "fill"]

KIB, MIB = 1 << 10, 1 << 20
SEED = 2026
STEP = 1000
WIDTH, CONTEXT, VOCABULARY, BLOCKS = 768, 1024, 50257, 12


@dataclass(frozen=True)
class Case:
    """One state, and how it is moved."""

    #: Its name for ``--only``, and for tables.
    key: str
    title: str
    #: Makes the state with uninitialized tensors; see :meth:`state`.
    make: Callable[[], dict[str, Any]]
    mode: Mode = "in place"
    receivers: int = 1
    #: Whether the picture shows it.
    pictured: bool = True
    #: Whether ``--quick`` runs it.
    quick: bool = True

    def state(self) -> dict[str, Any]:
        """The state, always with the same values."""
        return fill(self.make())

    @property
    def full_title(self) -> str:
        to = f"to {self.receivers} receivers, " if self.receivers > 1 else ""
        return f"{self.title}, {to}{self.mode}"

    def size(self) -> tuple[int, int]:
        """How many bytes the state has, with shared memory counted once, and in how many tensors."""
        with torch.device("meta"):
            tensors = {id(leaf): leaf for leaf in _leaves(self.make())}
        return sum(t.nbytes for t in tensors.values()), len(tensors)


def cases(scale: float = 1.0) -> list[Case]:
    """All cases, scaled to about this fraction of their bytes. Small tensors keep their size and become fewer."""
    gib, some = _floats(1024 * MIB * scale), _floats(16 * MIB * scale)
    many = max(1, round(20_000 * scale))
    quarter = partial(tensors, 16, _floats(16 * MIB * scale))
    single = [
        Case("1gib", f"one tensor of {_size(gib)}", partial(tensors, 1, gib)),
        Case("64x16mib", f"64 tensors of {_size(some)}", partial(tensors, 64, some)),
        Case("20000x4kib", f"{many:,} tensors of 4 KiB", partial(tensors, many, KIB)),
        Case("gpt2", "GPT-2 small with AdamW" if scale == 1 else f"GPT-2 with AdamW × {scale:g}", partial(gpt2, scale)),
    ]
    fresh = [
        replace(case, key=f"{case.key}-fresh", mode="fresh", pictured=first, quick=first)
        for case, first in zip(single, (True, False, False, False), strict=True)
    ]
    several = [
        Case(f"to{n}", f"16 tensors of {_size(some)}", quarter, receivers=n, pictured=n == 4, quick=n == 4)
        for n in (1, 2, 3, 4)
    ]
    return [*single, *fresh, *several]


def tensors(count: int, floats: int) -> dict[str, Any]:
    return {f"tensor{i}": torch.empty(floats) for i in range(count)}


def gpt2(scale: float) -> dict[str, Any]:
    """A checkpoint of GPT-2 small in training: 124 million parameters, tied embeddings, AdamW's moments and steps."""
    model = {name: torch.empty(shape) for name, shape in _parameters(scale)}
    moments = {
        index: {"step": torch.empty(()), "exp_avg": torch.empty_like(p), "exp_avg_sq": torch.empty_like(p)}
        for index, p in enumerate(model.values())
    }
    options = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(moments)}
    return {
        "model": {**model, "lm_head.weight": model["transformer.wte.weight"]},
        "optimizer": {"state": moments, "param_groups": [options]},
        "step": STEP,
    }


def _parameters(scale: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    # One block is at least an eighth of the model; for smaller scales the model gets narrower.
    width = WIDTH if scale >= 1 / 8 else 64 * max(1, round(WIDTH / 64 * scale * 8))
    yield "transformer.wte.weight", (max(1, round(VOCABULARY * scale)), width)
    yield "transformer.wpe.weight", (CONTEXT, width)
    layers = {"attn.c_attn": 3 * width, "attn.c_proj": width, "mlp.c_fc": 4 * width, "mlp.c_proj": width}
    for block in range(max(1, round(BLOCKS * scale))):
        at = f"transformer.h.{block}"
        for norm in ("ln_1", "ln_2"):
            yield f"{at}.{norm}.weight", (width,)
            yield f"{at}.{norm}.bias", (width,)
        for name, out in layers.items():
            yield f"{at}.{name}.weight", (4 * width if name == "mlp.c_proj" else width, out)
            yield f"{at}.{name}.bias", (out,)
    yield "transformer.ln_f.weight", (width,)
    yield "transformer.ln_f.bias", (width,)


def fill(state: dict[str, Any]) -> dict[str, Any]:
    """Fill with random bits: quicker to make than random numbers, and as good for a transfer."""
    generator = torch.Generator().manual_seed(SEED)
    for tensor in tensors_of(state).values():
        tensor.view(torch.int32).random_(generator=generator)
    return state


def _leaves(state: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def _floats(size: float) -> int:
    return max(1, round(size / 4))


def _size(floats: int) -> str:
    size = 4 * floats
    if size >= 1024 * MIB and size % (1024 * MIB) == 0:
        return f"{size // (1024 * MIB)} GiB"
    return f"{size / MIB:.3g} MiB" if size >= MIB else f"{size / KIB:.3g} KiB"
