"""A job that shards its model with FSDP2, serves ``model.state_dict``, and always computes. See test_hub_servers.

Rank r writes its address to ``DIR/address<r>``. Every element is a known function of the step, and of its parameter.
"""

from __future__ import annotations

import pathlib
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import transfuse

LAYERS, WIDTH = 6, 48


def main(folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model = torch.nn.Sequential(OrderedDict(layer=layers))
    fully_shard(model, mesh=mesh)
    step = 0

    def fill() -> None:
        for i, parameter in enumerate(model.parameters()):
            assert isinstance(parameter, DTensor)
            parameter.to_local().detach().fill_(step * 100 + i)

    fill()
    with transfuse.serve(model.state_dict, step=lambda: step, timeout=60, token="between servers") as server:
        part = folder / f"part{rank}"
        part.write_text(server.address)
        part.rename(folder / f"address{rank}")
        stop = torch.zeros(1)
        while not stop.item():
            for _ in range(3):
                model(torch.ones(4, WIDTH)).sum().backward()
            stop.fill_(rank == 0 and (folder / "stop").exists())
            dist.all_reduce(stop)
            with server.mutating():
                step += 1
                fill()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
