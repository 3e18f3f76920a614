"""Boxes, plans and parcels against brute force."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfuse._limits import Limits
from transfuse._plan import parcels
from transfuse._plan.regions import lay_out
from transfuse._state.manifest import describe
from transfuse._state.region import Budget, Region, blocks, canonical, cover


def bytes_of(region: Region) -> list[int]:
    """All bytes of a box in linear order."""
    starts = np.array([region.start])
    for size, stride in zip(region.sizes, region.strides, strict=True):
        starts = (starts[:, None] + np.arange(size) * stride * region.item).ravel()
    return (starts[:, None] + np.arange(region.item)).ravel().tolist()


layouts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4)


@given(layouts)
def test_canonical_keeps_every_element(layout: list[tuple[int, int]]) -> None:
    sizes, strides = [n for n, _ in layout], [s for _, s in layout]
    form = canonical(sizes, strides)
    shown = set(bytes_of(Region(0, 1, tuple(sizes), tuple(strides)))) if 0 not in sizes else set()
    found = bytes_of(Region(0, 1, form.sizes, form.strides))
    assert set(found) == shown
    if not form.overlapping:
        assert len(found) == len(shown)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_blocks_are_the_range(sizes: list[int], data: st.DataObject) -> None:
    total = prod(sizes)
    low = data.draw(st.integers(0, total))
    high = data.draw(st.integers(low, total))
    index = np.arange(total).reshape(sizes)
    found: list[int] = []
    pieces = list(blocks(sizes, low, high))
    for first, shape in pieces:
        found += index[tuple(slice(f, f + n) for f, n in zip(first, shape, strict=True))].ravel().tolist()
    assert found == list(range(low, high))
    assert len(pieces) <= max(1, 2 * len(sizes))


def random_views(seed: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    base = torch.arange(int(rng.integers(1, 200)), dtype=torch.float32)
    views = []
    for _ in range(int(rng.integers(1, 6))):
        view = base
        if rng.random() < 0.8:
            start = int(rng.integers(0, len(base)))
            view = view[start : int(rng.integers(start, len(base) + 1)) : int(rng.integers(1, 4))]
        if len(view) % 2 == 0 and len(view) and rng.random() < 0.5:
            view = view.view(2, -1).t() if view.is_contiguous() else view
        if rng.random() < 0.2:
            view = view.expand(3, *view.shape)
        if rng.random() < 0.3 and len(base) >= 12:
            view = base.as_strided((3, 4), (int(rng.integers(0, 3)), int(rng.integers(0, 3))))
        if rng.random() < 0.2 and view.dtype is torch.float32:
            view = view.view(torch.int32)
        views.append(view)
    return views


@given(st.integers(0, 2**32))
@settings(max_examples=300)
def test_cover_holds_every_shown_byte_once(seed: int) -> None:
    views = random_views(seed)
    tensors, shown = [], set()
    for i, view in enumerate(views):
        form = canonical(view.shape, view.stride())
        region = Region(int(view.storage_offset()) * 4, 4, form.sizes, form.strides)
        tensors.append((i, region, form.overlapping))
        shown |= set(bytes_of(region))
    found: list[int] = []
    for region, members in cover(tensors, Budget()):
        found += bytes_of(region)
        for member in members:
            assert tensors[member][1] == region
    assert sorted(found) == sorted(shown), "a byte is missing, alien, or there twice"


@given(st.integers(0, 2**32), st.sampled_from([64, 4096]))
@settings(max_examples=200)
def test_parcels_carry_every_region_once(seed: int, parcel_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    state = [torch.zeros(int(rng.integers(0, 3000)), dtype=torch.uint8) for _ in range(8)] + random_views(seed)
    manifest = describe(state, Limits()).manifest
    regions = lay_out(manifest)
    cut = parcels.cut(regions, parcel_bytes)
    seen: dict[int, list[tuple[int, int]]] = {}
    for number in range(len(cut)):
        end = 0
        for extent in cut.extents(number):
            assert extent.position >= end
            assert extent.position % int(regions.item[extent.region]) == 0
            assert extent.low % int(regions.item[extent.region]) == 0
            end = extent.position + extent.high - extent.low
            seen.setdefault(extent.region, []).append((extent.low, extent.high))
        assert end == int(cut.nbytes[number]) <= parcel_bytes
    for region in range(len(regions)):
        ranges = seen[region]
        assert [low for low, _ in ranges] == [0] + [high for _, high in ranges[:-1]]
        assert ranges[-1][1] == int(regions.nbytes[region])
    most = parcels.Most(2 * parcel_bytes, 2 * parcel_bytes)
    bursts = parcels.bursts(cut, range(len(cut)), most)
    assert [n for burst in bursts for n in burst] == list(range(len(cut)))
    assert all(sum(int(cut.nbytes[n]) for n in burst) <= 2 * parcel_bytes for burst in bursts)


def test_a_fingerprint_tells_plans_apart() -> None:
    small, large = (describe([torch.zeros(n)], Limits()).manifest for n in (3, 4))
    one, same = (parcels.fingerprint(parcels.cut(lay_out(small), 64)) for _ in range(2))
    assert one == same
    assert one != parcels.fingerprint(parcels.cut(lay_out(large), 64))


@pytest.mark.parametrize(("steps", "apart"), [((2, 3, 2), False), ((16, 12, 16), True)])
def test_a_too_fine_tangle_travels_the_shorter_way(steps: tuple[int, ...], apart: bool) -> None:
    """Every box by itself if that is less than everything from the first byte to the last."""
    base = torch.zeros(400_000, dtype=torch.uint8)
    tensors = []
    for i, step in enumerate(steps):
        view = base[i::step]
        form = canonical(view.shape, view.stride())
        tensors.append((i, Region(int(view.storage_offset()), 1, form.sizes, form.strides), form.overlapping))
    found = cover(tensors, Budget())
    assert all(bool(members) is apart for _, members in found)
    covered = {byte for region, _ in found for byte in bytes_of(region)}
    assert covered >= {byte for _, region, _ in tensors for byte in bytes_of(region)}
    assert sum(region.nbytes for region, _ in found) <= len(base)
