"""A job that shards a model of peft by FSDP2, serves its adapter, and trains until told to stop. See test_adapters.

Rank r writes its address to ``DIR/address<r>``; rank 0 writes the adapter of every step to ``DIR/step<n>.pt``.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import transfuse
from adapters_made import IDS, adapted, peft


def main(folder: pathlib.Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = adapted()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5)
    step = 0

    def adapter() -> dict[str, Any]:
        return dict(peft.get_peft_model_state_dict(model, save_embedding_layers=False))

    def write_down() -> None:
        whole = {name: tensor.full_tensor() for name, tensor in adapter().items()}
        if rank == 0:
            part = folder / "part.pt"
            torch.save(whole, part)
            part.rename(folder / f"step{step}.pt")
        dist.barrier()

    model(IDS)  # A first pass, after which state_dict() is what it stays.
    write_down()
    with transfuse.serve(adapter, step=lambda: step) as server:
        part = folder / f"part{rank}"
        part.write_text(server.address)
        part.rename(folder / f"address{rank}")
        stop = torch.zeros(1)
        while not stop.item():
            optimizer.zero_grad()
            model(IDS, labels=IDS).loss.backward()
            if rank == 0 and (folder / "stop").exists():
                stop.fill_(1)
            dist.broadcast(stop, 0)
            with server.mutating():
                optimizer.step()
                step += 1
            # Between the steps of the servers: readers of this step may come before it is written down.
            write_down()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
