"""The two ways in which the kernel says what memory can be used."""

from __future__ import annotations

import ctypes
import mmap
import random

import numpy as np
import pytest

from transfuse._state import memory_maps
from transfuse._state.memory_maps import Mappings

PAGES = 16


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("write", [False, True])
def test_single_questions_and_the_list_agree(seed: int, write: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ranges over pages of all permissions, and over pages that are not mapped."""
    rng = random.Random(seed)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    size = PAGES * mmap.PAGESIZE
    base = libc.mmap(None, ctypes.c_size_t(size), 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_size_t(0))
    try:
        for page in range(PAGES):
            at = ctypes.c_void_p(base + page * mmap.PAGESIZE)
            how = rng.choice(["rw", "rw", "rw", "r", "none", "gone"])
            if how == "gone":
                assert libc.munmap(at, ctypes.c_size_t(mmap.PAGESIZE)) == 0
            else:
                assert libc.mprotect(at, ctypes.c_size_t(mmap.PAGESIZE), {"rw": 3, "r": 1, "none": 0}[how]) == 0
        starts = np.array([base + rng.randrange(size) for _ in range(100)])
        ends = np.array([min(start + rng.randrange(1, 3 * mmap.PAGESIZE), base + size) for start in starts.tolist()])
        single = Mappings().faults(starts, ends, write=write)
        assert set(np.flatnonzero(~memory_maps._are_usable(starts.tolist(), ends.tolist(), write)).tolist()) >= set(
            single
        )
        monkeypatch.setattr(memory_maps, "FEW", 0)
        assert Mappings().faults(starts, ends, write=write) == single
        assert 0 < len(single) < 100
    finally:
        libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(size))


def test_a_kernel_without_the_question_is_asked_for_its_list(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(1000)
    start, end = np.array([memory.ctypes.data, 4096]), np.array([memory.ctypes.data + memory.nbytes, 8192])
    expected = Mappings().faults(start, end, write=True)
    assert list(expected) == [1]
    monkeypatch.setattr(memory_maps, "_PROCMAP_QUERY", 0)
    assert not memory_maps._are_usable(start.tolist(), end.tolist(), write=True).any()
    assert Mappings().faults(start, end, write=True) == expected
