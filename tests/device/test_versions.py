"""Which version lies on a device: the digest of its content is that of main memory, and verify compares it there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transfuse
from device.moving import mine

pytestmark = pytest.mark.usefixtures("accelerator", "nothing_is_left")


def a_state(device: torch.device | str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    large = torch.randn(1000, 700, generator=generator)
    return {
        "large": large.to(device),
        "transposed": large[:30, :20].to(device).t().contiguous().t(),
        "small": [large[i, :5].to(device) for i in range(4)],
        "step": 3,
    }


def test_the_digest_is_that_of_main_memory() -> None:
    there, here, mixed = a_state(mine(0)), a_state("cpu"), a_state("cpu") | {"large": a_state(mine(1))["large"]}
    with transfuse.serve(here, step=3) as server:
        expected = server.version
    for state in (there, mixed):
        with transfuse.serve(state, step=3) as server:
            assert transfuse.fetch(server.address, version=True).version == expected
        with transfuse.serve(state, step=3) as server:
            assert server.version == expected


def test_verify_on_a_device() -> None:
    with transfuse.serve(a_state(mine(0)), step=3) as server:
        for device in ("cpu", mine(0), mine(1)):
            state = a_state(device)
            assert transfuse.verify(server.address, state)
            state["transposed"][3, 4] += 1
            assert list(transfuse.verify(server.address, state).differing) == ["['transposed']"]
    with transfuse.serve(a_state("cpu"), step=3) as server:
        narrow = {"large": a_state(mine(0))["large"].bfloat16()}
        rules = {"large": "large"}
        assert transfuse.verify(server.address, narrow, cast=True, map_path=rules)
        narrow["large"][5, 5] += 1
        assert not transfuse.verify(server.address, narrow, cast=True, map_path=rules)
