"""Migrate from PyTorch's own PGTransport: first one end at a time on PyTorch's wire, then both ends to the new wire.

torchrun --nproc-per-node 2 examples/from_pgtransport.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._pg_transport import PGTransport as TorchPGTransport

import transfuse
import transfuse.dropin.torch

TIMEOUT, CPU = timedelta(seconds=60), torch.device("cpu")
STATE = {"weight": torch.arange(1_000_000.0), "step": 7}


def before(group: dist.ProcessGroup, target: dict[str, object]) -> None:
    if dist.get_rank() == 0:
        transport = TorchPGTransport(group, TIMEOUT, CPU)
        transport.send_checkpoint([1], STATE)
    else:
        transport = TorchPGTransport(group, TIMEOUT, CPU, state_dict=lambda: target)
        transport.recv_checkpoint(0)


def receiver_first(group: dist.ProcessGroup, target: dict[str, object]) -> None:
    if dist.get_rank() == 0:
        TorchPGTransport(group, TIMEOUT, CPU).send_checkpoint([1], STATE)
    else:
        transport = transfuse.dropin.torch.PGTransport(group, TIMEOUT, CPU, state_dict=lambda: target)
        transport.recv_checkpoint(0)


def source_first(group: dist.ProcessGroup, target: dict[str, object]) -> None:
    if dist.get_rank() == 0:
        transfuse.dropin.torch.PGTransport(group, TIMEOUT, CPU).send_checkpoint([1], STATE)
    else:
        TorchPGTransport(group, TIMEOUT, CPU, state_dict=lambda: target).recv_checkpoint(0)


def after(group: dist.ProcessGroup, target: dict[str, object]) -> None:
    if dist.get_rank() == 0:
        transport = transfuse.PGTransport(group, TIMEOUT, CPU)
        transport.send_checkpoint([1], STATE)
    else:
        transport = transfuse.PGTransport(group, TIMEOUT, CPU, state_dict=lambda: target)
        transport.recv_checkpoint(0)


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    for way in (before, receiver_first, source_first, after):
        target: dict[str, object] = {"weight": torch.zeros(1_000_000), "step": 0}
        way(group, target)
        weight = target["weight"]
        assert isinstance(weight, torch.Tensor)
        if dist.get_rank() == 1:
            print(f"{way.__name__}: equal: {torch.equal(weight, STATE['weight'])}")  # type: ignore[arg-type]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
