"""torchrun with --max-restarts: a worker is killed, torchrun starts all of them again, and hardly a step is lost.

When one worker fails, torchrun ends the others too. A keeper process beside torchrun survives: every now and then it
copies the state of rank 0 out of rank 0's memory. Training stops only for the length of the copy. When the workers
start again, the keeper serves its copy to them. The final weights equal those of an undisturbed run, bit for bit.

python examples/elastic.py
"""

import os
import secrets
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

import transfuse

HOST, TIMEOUT = "127.0.0.1", timedelta(seconds=60)
RANKS, STEPS, FATAL_STEP = 2, 40, 25


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        # The model's tensors are in place. A new optimizer had none to receive into: its moments arrived fresh.
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def loss_of(model: nn.Module, step: int, rank: int) -> Any:
    # Data and dropout follow from step and rank, so there is no random state to be kept.
    torch.manual_seed(RANKS * step + rank)
    batch = torch.randn(32, 16)
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


# ------------------------------------------------------------------------------------- a worker, started by torchrun


def work() -> None:
    dist.init_process_group("gloo")
    rank, first_life = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    store = TCPStore(HOST, int(os.environ["KEEPER_PORT"]), is_master=False)
    token = os.environ["KEEPER_TOKEN"]
    job = Job()
    if store.check(["keeper"]):
        address = store.get("keeper").decode()
        job.load(transfuse.fetch(address, job.state, token=token, timeout=TIMEOUT))
        print(f"rank {rank} goes on with step {job.step}\n", end="", flush=True)
    # The keeper's copy does not change before all have it, because nobody has told it a new address yet.
    dist.barrier()
    with ExitStack() as stack:
        server = None
        if rank == 0:
            server = stack.enter_context(
                transfuse.serve(job.state, step=lambda: job.step, token=token, timeout=TIMEOUT)
            )
            store.set("worker", server.address)
        model = DistributedDataParallel(job.model)
        while job.step < STEPS:
            loss = loss_of(model, job.step, rank)
            if first_life and rank == 1 and job.step == FATAL_STEP:
                os.kill(os.getpid(), signal.SIGKILL)
            job.optimizer.zero_grad()
            loss.backward()
            # While the keeper reads, this waits; while this changes tensors, the keeper does.
            with server.mutating() if server else nullcontext():
                job.optimizer.step()
                job.step += 1
            time.sleep(0.05)  # Stands for the rest of a real step.
    if rank == 0:
        store.set("weights", ",".join(value.hex() for value in flat(job.model)))
    dist.destroy_process_group()


# --------------------------------------------------------------------------------------- the keeper, beside torchrun


def keep(store: TCPStore, token: str, done: threading.Event) -> None:
    """Keep a recent copy of rank 0's state until rank 0 is done."""
    kept: dict[str, Any] = {}
    with transfuse.serve(lambda: kept, step=lambda: kept["step"], token=token, timeout=TIMEOUT) as server:
        while not done.wait(0.1):
            if not store.check(["worker"]):
                continue
            try:
                # A new copy each time: the old one stays whole if the worker dies meanwhile.
                copy = transfuse.fetch(store.get("worker").decode(), token=token, timeout=TIMEOUT)
                with server.mutating():  # State and step of one copy, for whoever asks now.
                    kept = copy
                store.set("keeper", server.address)
            except transfuse.PeerError:
                pass  # It has died. After the restart there will be another address.


def main() -> None:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    token = secrets.token_hex(32)
    os.environ.update(KEEPER_PORT=str(store.port), KEEPER_TOKEN=token)
    # A new store for each restart: in a store that is kept, gloo finds the addresses of workers that are gone.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        keeper = thread.submit(keep, store, token, done)
        try:
            torchrun(["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3", __file__])
        finally:
            done.set()
        keeper.result()
    if store.get("weights").decode() != ",".join(value.hex() for value in expected()):
        raise SystemExit("other weights than in the undisturbed run")
    print("kept: the weights are those of the undisturbed run, bit for bit")


# ---------------------------------------------------------------------------------- what follows checks the above


def flat(model: nn.Module) -> list[float]:
    values: list[float] = torch.cat([tensor.flatten() for tensor in model.state_dict().values()]).tolist()
    return values


def expected() -> list[float]:
    """The same training without DDP, one rank after the other in this process."""
    job = Job()
    for step in range(STEPS):
        gradients = []
        for rank in range(RANKS):
            job.optimizer.zero_grad()
            loss_of(job.model, step, rank).backward()
            gradients.append([parameter.grad for parameter in job.model.parameters()])
        for parameter, *each in zip(job.model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack([part / RANKS for part in each if part is not None]).sum(0)
        job.optimizer.step()
    return flat(job.model)


if __name__ == "__main__":
    if "RANK" in os.environ:
        work()
    else:
        main()
