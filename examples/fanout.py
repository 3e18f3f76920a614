"""One source, several receivers, and one receiver refuses. The others get everything; the source knows who refused.

torchrun --nproc-per-node 3 examples/fanout.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from transfuse import PGTransport, SendFailed, TargetMismatch


def main() -> None:
    dist.init_process_group("gloo")
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    weights = torch.arange(1_000_000.0)
    device, timeout = torch.device("cpu"), timedelta(seconds=60)

    if rank == 0:
        transport = PGTransport(group, timeout, device)
        try:
            transport.send_checkpoint(range(1, size), {"weights": weights})
        except SendFailed as failed:
            print(f"source: complete for ranks {list(failed.completed)}")
            for receiver, cause in failed.causes.items():
                print(f"source: rank {receiver} has nothing: {type(cause).__name__}: {cause}")
    else:
        # The last rank was started with another configuration: its tensor is too short.
        target = torch.zeros(len(weights) if rank < size - 1 else 10)
        transport = PGTransport(group, timeout, device, state_dict=lambda: {"weights": target})
        try:
            transport.recv_checkpoint(0)
            print(f"rank {rank}: received everything: {torch.equal(target, weights)}")
        except TargetMismatch as mismatch:
            print(f"rank {rank}: refused, target untouched: {not target.any()}: {mismatch.mismatches[0]}")
    # No rank leaves while others still talk.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
