"""Tensors elsewhere than on the wire's device. What needs an accelerator is marked ``gpu`` and has run nowhere yet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import transfuse
from moves import TIMEOUT
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import ProcessPool, Ranks


def state(device: torch.device | str) -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(3_000_000, device=device)
    return {
        "w": weight,
        "tied": weight,
        "t": torch.randn(500, 700, device=device).t(),
        "steps": torch.randn(9_000_000, device=device)[::3],
        "p": nn.Parameter(torch.randn(7, device=device)),
        "small": [torch.randn(5, device=device) for _ in range(10)],
        "cpu": torch.randn(5),
    }


def test_a_wire_on_another_device_stages_every_byte() -> None:
    """``cpu:0`` is not ``cpu`` as far as devices compare: the stand-in for an accelerator on a machine without one."""
    wire = torch.device("cpu", 0)
    sent = state("cpu")
    assert sent["w"].device != wire
    own = {k: torch.zeros_like(v) for k, v in sent.items() if isinstance(v, torch.Tensor)}

    def work(rank: int, pg: Any) -> Any:
        transport = transfuse.PGTransport(pg, TIMEOUT, wire)
        if rank == 0:
            transport.send_checkpoint([1], sent)
            transport.send_checkpoint([1], sent)
            return None
        fresh = transport.recv_checkpoint(0)
        return fresh, transfuse.PGTransport(pg, TIMEOUT, wire, lambda: own).recv_checkpoint(0)

    with Ranks(2) as ranks:
        _, arrived = ranks.run(work)
    fresh, in_place = arrived
    assert_exact(sent, in_place, in_place=True)
    assert in_place["w"] is own["w"]
    for mine, theirs in zip(torch.utils._pytree.tree_leaves(sent), torch.utils._pytree.tree_leaves(fresh), strict=True):
        assert torch.equal(mine, theirs)


def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        pytest.skip("torch finds no accelerator here")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["cpu", "accelerator"])
def test_accelerator_tensors_over_gloo(wire: str) -> None:
    """gloo moves host memory; with the wire on the host, accelerator tensors pass through staging."""
    if wire == "accelerator":
        pytest.skip("gloo takes accelerator tensors only where its build has a transport for them")
    sent = state(accelerator())
    own = {k: torch.zeros_like(v) for k, v in sent.items() if isinstance(v, torch.Tensor)}

    def work(rank: int, pg: Any) -> Any:
        cpu = torch.device("cpu")
        if rank == 0:
            return transfuse.PGTransport(pg, TIMEOUT, cpu).send_checkpoint([1], sent)
        arrived = transfuse.PGTransport(pg, TIMEOUT, cpu, lambda: own).recv_checkpoint(0)
        # Visible to the caller's stream without a further synchronisation.
        return {k: v.clone() for k, v in arrived.items() if isinstance(v, torch.Tensor)}

    with Ranks(2) as ranks:
        _, arrived = ranks.run(work)
    for name, tensor in arrived.items():
        assert torch.equal(tensor, sent[name]), name


def over_nccl(rank: int) -> bool:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = cast(Any, dist.new_group([0, 1], backend="nccl"))
    sent = state(device)
    if rank == 0:
        transfuse.PGTransport(group, timedelta(seconds=60), device).send_checkpoint([1], sent)
        return True
    own = {k: torch.zeros_like(v) for k, v in sent.items() if isinstance(v, torch.Tensor)}
    arrived = transfuse.PGTransport(group, timedelta(seconds=60), device, lambda: own).recv_checkpoint(0)
    return all(torch.equal(arrived[k], sent[k]) for k in own)


@pytest.mark.gpu
def test_accelerator_tensors_over_nccl(pool4: ProcessPool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    assert all(outcome.get() for outcome in pool4.run(over_nccl, ranks=[0, 1]))
