"""A job on several ranks that shards its state, serves it, and trains until it is told to stop. See test_hub_servers.

Rank r writes its address to ``DIR/address<r>``. Every element is a known function of the step, and of its place.
"""

from __future__ import annotations

import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import transfuse

SECONDS = 60.0


def main(folder: pathlib.Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    # Rows that do not divide evenly, columns, replicas, tied weights, a plain tensor, and leaves that are no tensors.
    shards = {
        "layer.0.weight": distribute_tensor(torch.zeros(7, 300), mesh, [Shard(0)]),
        "layer.1.weight": distribute_tensor(torch.zeros(64, 9), mesh, [Shard(1)]),
        "layer.2.weight": distribute_tensor(torch.zeros(5), mesh, [Replicate()]),
        "layer.3.weight": torch.zeros(11),
    }
    tied = shards["layer.0.weight"]
    step = 0
    state = {"model": {**shards, "layer.9.weight": tied}, "optimizer": {"moment": torch.zeros(3), "lr": 0.1}}

    def fill() -> None:
        for i, tensor in enumerate(shards.values()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(step * 100 + i)

    fill()
    with transfuse.serve(state, step=lambda: step, timeout=SECONDS, token="between servers") as server:
        part = folder / f"part{rank}"
        part.write_text(server.address)
        part.rename(folder / f"address{rank}")
        stop = torch.zeros(1)
        while not stop.item():
            if rank == 0 and (folder / "stop").exists():
                stop.fill_(1)
            dist.broadcast(stop, 0)  # What a backward pass does: no rank is a whole step ahead of another.
            time.sleep(0.002)
            with server.mutating():
                step += 1
                fill()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
