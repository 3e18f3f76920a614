"""Patches: the items that have changed, and nothing else, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfuse._memory.patches import MOST_ITEM, STRIDE, apply, patch_of


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """The bytes of a parcel before and after some items of it were written, and the size of an item."""
    item = draw(st.sampled_from([1, 2, 4]))
    count = draw(st.integers(1, 3 * STRIDE + 5))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    before = random.integers(0, 256, count * item, dtype=np.uint8)
    after = before.copy()
    share = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    chosen = random.random(count) < share
    after.view(f"u{item}")[chosen] = random.integers(0, 256, int(chosen.sum()))
    return before, after, item


@given(versions())
def test_a_patch_gives_the_other_bytes_or_is_not_worth_it(both: tuple[np.ndarray, np.ndarray, int]) -> None:
    before, after, item = both
    patch = patch_of(before, after, item)
    changed = int((before.view(f"u{item}") != after.view(f"u{item}")).sum())
    if patch is None:
        # Positions and values would have been as long.
        assert (changed + -(-len(after) // item // STRIDE)) * (item + 1) >= len(after)
        return
    assert len(patch) < len(after) + item
    data = before.copy()
    apply(patch, data)
    assert data.tobytes() == after.tobytes()


@given(versions(), st.binary(max_size=40), st.integers(0, 1 << 30))
def test_a_hostile_patch_writes_inside_the_parcel_or_is_refused(
    both: tuple[np.ndarray, np.ndarray, int], noise: bytes, seed: int
) -> None:
    before, after, item = both
    random = np.random.default_rng(seed)
    honest = patch_of(before, after, item) or bytes([item])
    forged = bytearray(honest + noise)
    for at in random.integers(0, len(forged), 4).tolist():
        forged[at] = int(random.integers(0, 256))
    around = np.concatenate([np.full(64, 7, np.uint8), before, np.full(64, 7, np.uint8)])
    try:
        apply(bytes(forged), around[64 : 64 + len(before)])
    except ValueError as error:
        assert "patch" in str(error)  # noqa: PT017
    assert (around[:64] == 7).all()
    assert (around[-64:] == 7).all()


@pytest.mark.parametrize(
    ("patch", "nbytes"),
    [
        (b"", 16),
        (b"\x02", 16),
        (b"\x03\0\0\0", 16),
        (b"\x08" + bytes(8), 16),
        (b"\x02\0\0", 15),
        (b"\x02\0", 16),
        (bytes([2, 255]) + bytes(4), 16),
        (bytes([1]) + bytes(16) + bytes(17), 16),
    ],
)
def test_what_is_no_patch_of_a_parcel(patch: bytes, nbytes: int) -> None:
    with pytest.raises(ValueError, match="patch"):
        apply(patch, np.zeros(nbytes, np.uint8))


def test_items_are_those_that_the_wire_knows() -> None:
    assert MOST_ITEM == 4
    one = np.zeros(4 * STRIDE, np.uint8)
    other = one.copy()
    other[-1] = 1
    # One item changed, beside one of every 256.
    assert patch_of(one, other, 1) == bytes([1, 255, 255, 255, 254]) + bytes([0, 0, 0, 0, 1])
