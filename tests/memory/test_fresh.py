"""Fresh memory: storages cut out of blocks share nothing that was not shared, and go when their tensors go."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moves import CPU, Pair, pair
from transfuse._limits import KIB, MIB
from transfuse._memory import arena
from transfuse._memory.arena import ALIGNMENT, Arena
from transfuse._state.leaves.values import dtype_name
from transfuse._tuning import ARENA_LARGE_BYTES, ARENA_MAPPING_BYTES

#: All but the quantized, and those of less than a byte.
DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not re.match(r"torch\.(q|bits|u?int[1-7]$)", str(dtype))
    },
    key=str,
)


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with pair() as made:
        yield made


def of(sizes: list[int], needed: list[bool] | None = None) -> Arena:
    chosen = np.array(needed if needed is not None else [True] * len(sizes), dtype=bool)
    return Arena(np.array(sizes, dtype=np.int64), chosen, [CPU], np.zeros(len(sizes), dtype=np.int64))


SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(0, 2 * MIB),
    st.sampled_from([ARENA_LARGE_BYTES - 1, ARENA_LARGE_BYTES, ARENA_LARGE_BYTES + 1]),
)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=40))
def test_no_two_pieces_overlap_and_each_is_aligned(wanted: list[tuple[int, bool]]) -> None:
    sizes = [size for size, _ in wanted]
    made = of(sizes, [needed for _, needed in wanted])
    spans = []
    for number, (size, needed) in enumerate(wanted):
        assert (number in made) == needed
        if not needed:
            assert made.address[number] == 0
            continue
        storage = made.storage(number)
        assert storage is made.storage(number)
        assert storage.nbytes() == size
        memory = made.bytes_of(number)
        assert memory.numel() == size
        if size:
            assert made.address[number] == storage.data_ptr() == memory.data_ptr()
            assert made.address[number] % ALIGNMENT == 0
            spans.append((storage.data_ptr(), storage.data_ptr() + size))
        assert storage.resizable() == (size == 0 or size >= ARENA_LARGE_BYTES)
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(len(mapping) <= ARENA_MAPPING_BYTES for mapping in made.mappings)


def test_small_storages_take_few_mappings() -> None:
    made = of([4 * KIB] * 20_000)
    assert len(made.mappings) == 5


def test_no_memory_is_one_kind_of_error() -> None:
    with pytest.raises(RuntimeError):
        of([1 << 60])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 3), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_in_a_mapping(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert dtype_name(dtype)
    count = int(np.prod(shape, dtype=int))
    made = of([100, count * dtype.itemsize])
    tensor = made.tensor(int(made.mapping[1]), int(made.offset[1]), dtype, list(shape))
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
    assert tensor.stride() == torch.empty(shape, dtype=dtype).stride()
    assert tensor.untyped_storage().nbytes() == count * dtype.itemsize
    assert tensor.data_ptr() == made.address[1]
    assert tensor.storage_offset() == 0
    assert not tensor._is_view()


def test_storages_are_shared_if_and_only_if_they_were(two: Pair) -> None:
    base = torch.arange(1000.0)
    large = torch.arange(float(MIB))
    state = {
        "whole": base,
        "head": base[:10],
        "columns": base.view(10, 100)[:, ::2],
        "alone": torch.arange(3, dtype=torch.int16),
        "odd strides": torch.arange(5.0).as_strided((1, 5), (9, 1)),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.ones(3, 1).expand(3, 4),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "large": large,
        "large view": large[5:],
        "empty": torch.empty(0, 3),
        "empty too": torch.empty(0),
        "parameter": nn.Parameter(torch.ones(2, 2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "needs grad": torch.ones(2, requires_grad=True),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        **{f"small {i}": torch.full((i % 9 + 1,), i, dtype=torch.uint8) for i in range(200)},
    }
    arrived = two.move(state)
    assert list(arrived) == list(state)

    def groups(tree: dict[str, torch.Tensor]) -> list[list[str]]:
        found: dict[int, list[str]] = {}
        for name, tensor in tree.items():
            found.setdefault(tensor.untyped_storage()._cdata, []).append(name)
        return list(found.values())

    assert groups(arrived) == groups(state)
    for name, tensor in state.items():
        mine = arrived[name]
        assert torch.equal(mine, tensor), name
        assert (mine.dtype, mine.shape, mine.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert (type(mine), mine.requires_grad) == (type(tensor), tensor.requires_grad), name
    # Writing through one shows in those that share its storage, and nowhere else.
    before = {name: tensor.detach().clone() for name, tensor in arrived.items()}
    arrived["whole"].fill_(-1)
    changed = {name for name, tensor in arrived.items() if not torch.equal(tensor, before[name])}
    assert changed == {"whole", "head", "columns"}


def small(two: Pair) -> dict[str, Any]:
    arrived = two.move({f"w{i}": torch.full((4, 4), float(i)) for i in range(10)})
    assert isinstance(arrived, dict)
    return arrived


def test_a_small_tensor_is_like_any_other(two: Pair) -> None:
    """What is done with tensors after a restart; only its own 64 bytes are saved, pickled and copied."""
    tensor = small(two)["w3"]
    saved = io.BytesIO()
    torch.save(tensor, saved)
    assert len(saved.getvalue()) < 4 * KIB
    saved.seek(0)
    assert torch.equal(torch.load(saved), tensor)
    assert len(pickle.dumps(tensor)) < KIB
    copied = copy.deepcopy(tensor)
    assert copied.untyped_storage().nbytes() == 64
    tensor.numpy()[0, 0] = 7
    assert tensor[0, 0] == 7
    assert torch.utils.dlpack.from_dlpack(tensor).data_ptr() == tensor.data_ptr()
    tensor.set_(torch.ones(2))
    assert tensor.shape == (2,)


def test_a_small_storage_cannot_be_resized_but_a_large_one_can() -> None:
    made = of([32, ARENA_LARGE_BYTES])
    with pytest.raises(RuntimeError, match="not resizable"):
        made.storage(0).resize_(0)
    made.storage(1).resize_(0)
    assert made.storage(1).nbytes() == 0
    assert made.tensor(0, 0, torch.float32, [8]).resize_(4).shape == (4,)


def test_training_goes_on_with_fresh_tensors(two: Pair) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = build()
    step(model, optimizer)
    arrived = two.move({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, other_optimizer = build()
    other.load_state_dict(arrived["model"], assign=True)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    other_optimizer.load_state_dict(arrived["optimizer"])
    step(model, optimizer)
    step(other, other_optimizer)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def _double(tensor: torch.Tensor) -> None:
    tensor.mul_(2)


def test_small_tensors_move_to_shared_memory_alone(two: Pair) -> None:
    arrived = small(two)
    one, other = arrived["w3"], arrived["w4"]
    before = other.data_ptr()
    one.share_memory_()
    assert one.is_shared()
    assert one.untyped_storage().nbytes() == 64
    assert not other.is_shared()
    assert other.data_ptr() == before
    import torch.multiprocessing  # Teaches multiprocessing to pass tensors as handles.

    worker = multiprocessing.get_context("spawn").Process(target=_double, args=(one,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    assert torch.equal(one, torch.full((4, 4), 6.0))


RELEASE = """
import gc, os
import numpy as np, torch
from pathlib import Path
from transfuse._memory.arena import Arena
from transfuse._limits import MIB

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def filled(sizes):
    n = len(sizes)
    made = Arena(np.array(sizes), np.ones(n, dtype=bool), [torch.device("cpu")], np.zeros(n, dtype=np.int64))
    for i in range(n):
        made.bytes_of(i).fill_(1)
    return [torch.empty(0, dtype=torch.uint8).set_(made.storage(i)) for i in range(n)]

filled([100, 2 * MIB])
gc.collect()
before = resident()
tensors = filled([64 * 1024] * 2048 + [40 * MIB] * 4)
total = sum(t.nbytes for t in tensors)
assert resident() - before > 0.9 * total
kept = tensors[0]
del tensors
assert resident() - before < 16 * MIB + 24 * MIB, (resident() - before) / MIB
assert kept.eq(1).all()
del kept
assert resident() - before < 24 * MIB, (resident() - before) / MIB
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_goes_when_the_last_tensor_goes() -> None:
    """At once, without a collection; a survivor keeps its block and no more."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", RELEASE], check=True, timeout=100)


def test_a_system_without_huge_pages_gives_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        return -1

    monkeypatch.setattr(arena, "_madvise", refuse)
    monkeypatch.setattr(arena, "_MADV_HUGEPAGE", 12345)
    made = of([64 * KIB] * 100 + [3 * MIB] * 3)
    for number in range(103):
        made.bytes_of(number).fill_(number)
    assert all(bool(made.bytes_of(number).eq(number).all()) for number in range(103))


def test_modes_of_the_host_do_not_matter() -> None:
    """A default device, or deterministic mode, which fills whatever torch allocates."""
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"):
            made = of([64, 2 * MIB])
            assert made.storage(0).device.type == made.storage(1).device.type == "cpu"
            for dtype in (torch.float32, torch.bfloat16):
                assert made.tensor(0, 0, dtype, [2, 2]).device.type == "cpu"
    finally:
        torch.use_deterministic_algorithms(False)
