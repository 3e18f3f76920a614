"""A source fails in the middle. The receiver keeps what has arrived, and another source sends the rest.

torchrun --nproc-per-node 3 examples/resume.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist

import transfuse

SIZE, STEP = 16 << 20, 10


def fail_half_way(progress: dict[int, transfuse.Progress]) -> None:
    if progress[1].bytes > 2 * SIZE:
        raise RuntimeError("something is wrong with this source")


def send(rank: int, group: dist.ProcessGroup, timeout: timedelta, device: torch.device) -> None:
    state = {"weight": torch.arange(float(SIZE)), "bias": torch.ones(100)}
    # Slow the source down: on one host the transfer would be over before it could fail.
    slowly = {"same_host": False, "max_bytes_per_second": 2e8} if rank == 0 else {}
    progress = fail_half_way if rank == 0 else False
    transport = transfuse.PGTransport(group, timeout, device, progress=progress, **slowly)  # type: ignore[arg-type]
    try:
        transport.send_checkpoint([1], state, step=STEP)
    except RuntimeError as error:
        print(f"rank {rank} gave up: {error}", flush=True)


def receive(group: dist.ProcessGroup, timeout: timedelta, device: torch.device) -> None:
    target = {"weight": torch.zeros(SIZE), "bias": torch.zeros(100)}

    def state_dict() -> object:
        return target

    transport = transfuse.PGTransport(group, timeout, device, state_dict)
    try:
        transport.recv_checkpoint(0, step=STEP)
        raise SystemExit("rank 0 should have failed")
    except transfuse.TransfuseError as error:
        partial = error.partial  # None if nothing has arrived.
        print(f"torn: {list(error.torn)}")
    # Here, or with another transport on a new group.
    transport.recv_checkpoint(2, step=STEP, resume=partial)
    report = transport.report
    assert report is not None
    right = torch.equal(target["weight"], torch.arange(float(SIZE)))
    print(f"some was kept: {report.kept_bytes > 0}, the rest came: {report.bytes > 0}, everything is right: {right}")


def main() -> None:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    timeout, device = timedelta(seconds=60), torch.device("cpu")
    if rank == 1:
        receive(group, timeout, device)
    else:
        send(rank, group, timeout, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
