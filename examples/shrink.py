"""Four ranks train; one leaves, and three go on with weights and optimizer where the four stopped.

Every shard changes: tensors that were split in four are split in three. Ranks 0 to 2 are source and receiver at once,
rank 3 is only a source. The following losses equal exactly those of three ranks that load a checkpoint of the four.

torchrun --nproc-per-node 4 examples/shrink.py
(or python examples/shrink.py)
"""

import os
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor

from transfuse import PGTransport

BEFORE, AFTER = [0, 1, 2, 3], [0, 1, 2]


class Job:
    """A model and its optimizer, sharded over a mesh."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        # 100 rows are 25 each of four ranks, and 34, 34 and 32 of three.
        self.model = nn.Sequential(nn.Linear(32, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1))
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.mesh = mesh

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def train(self, steps: Iterable[int]) -> list[float]:
        losses = []
        for step in steps:
            # The same 120 samples for any number of ranks.
            samples = torch.randn(120, 32, generator=torch.Generator().manual_seed(step))
            batch = samples.chunk(self.mesh.size())[self.mesh.get_local_rank()]
            loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=self.mesh.get_group())
            losses.append(mean.item() / self.mesh.size())
        return losses


def move(before: Job, after: Job | None, group: dist.ProcessGroup) -> str:
    """Called by all ranks: a rank that is both sends in a thread of its own. What happened."""
    timeout, cpu = timedelta(seconds=60), torch.device("cpu")
    with ThreadPoolExecutor(1) as thread:
        sender = PGTransport(group, timeout, cpu)
        sending = thread.submit(sender.send_checkpoint, AFTER, before.state())
        if after is not None:
            receiver = PGTransport(group, timeout, cpu, after.state, strict=True)
            after.load(receiver.recv_checkpoint(BEFORE))
        sending.result()
    if after is None:
        return "has sent what it held"
    report = receiver.report
    assert report is not None
    mine = report.by_source.get(dist.get_rank(), 0)
    return f"has {report.bytes:,} bytes: {mine:,} of its own, {report.bytes - mine:,} from others"


def load_from_disk(before: Job, after: Job | None, folder: str) -> None:
    """The same with torch's own checkpoint, for comparison."""
    save(before.state(), checkpoint_id=folder)
    if after is not None:
        state = after.state()
        load(state, checkpoint_id=folder, process_group=after.mesh.get_group())
        after.load(state)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Paths of the leaves that differ in any bit."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [path]
        return [line for key in one for line in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, torch.Tensor):
        one, other = (each.to_local() if isinstance(each, DTensor) else each for each in (one, other))
        return [] if torch.equal(one.view(torch.int32), other.view(torch.int32)) else [path]
    return [] if one == other else [path]


def main() -> None:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    # Every rank takes part in making both meshes, also rank 3, which is in the first only.
    four, three = DeviceMesh("cpu", BEFORE), DeviceMesh("cpu", AFTER)
    before = Job(four, seed=0)
    before.train(range(10))

    after = Job(three, seed=1) if rank in AFTER else None
    line = move(before, after, group)
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if rank == 0:
        print("\n".join(f"rank {each} {line}" for each, line in enumerate(lines)))

    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    oracle = Job(three, seed=2) if rank in AFTER else None
    load_from_disk(before, oracle, folder[0])
    four_go_on = before.train(range(10, 20))
    if rank == 0:
        shutil.rmtree(folder[0])

    # From here on rank 3 is not needed.
    if after is not None and oracle is not None:
        wrong = differences(after.state(), oracle.state())
        if wrong:
            raise SystemExit(f"rank {rank}: other than in the checkpoint: {wrong}")
        losses, expected = after.train(range(10, 20)), oracle.train(range(10, 20))
        if losses != expected:
            raise SystemExit(f"rank {rank}: losses {losses}, from the checkpoint {expected}")
        # The same samples, summed in another order.
        if not torch.allclose(torch.tensor(losses), torch.tensor(four_go_on), rtol=1e-3):
            raise SystemExit(f"rank {rank}: losses {losses}, if the four had gone on {four_go_on}")
        if rank == 0:
            print(
                f"losses: {losses[0]:.3f} to {losses[-1]:.3f}; with four, {four_go_on[0]:.3f} to {four_go_on[-1]:.3f}"
            )
            print("shrunk: state and losses as from a checkpoint, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node=4", __file__])
