"""Two replicas train under torchft's Manager. One is killed, starts again, and heals from the other one's memory.

python examples/torchft_heal.py

It needs ``pip install 'transfuse[torchft]'``. It starts the lighthouse and both replicas, and ends by itself.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

# Set before torchft is imported, which otherwise logs every quorum.
os.environ["RUST_LOG"] = os.environ.get("RUST_LOG", "error")

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from transfuse.dropin.torchft import PGTransport

#: How many steps the two take together, and after how many of them replica 1 is killed.
STEPS, FATAL = 40, 15
TIMEOUT = timedelta(seconds=60)
#: How long a process may take. Most of that goes into importing torch.
PATIENCE_SECONDS = 90


def train(replica: int, lighthouse: str, life: int, result: str) -> None:
    """One replica: a group of a single process, as with data parallelism alone."""
    torch.manual_seed(os.getpid())  # Every replica starts with other weights, and gets those of the first.
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))
    adam = torch.optim.AdamW(model.parameters())
    together = 0

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict(), "together": together}

    def load_state_dict(state: dict[str, Any]) -> None:
        nonlocal together
        model.load_state_dict(state["model"])
        # AdamW has no moments before its first step: they arrived fresh, and it has yet to take them.
        adam.load_state_dict(state["optimizer"])
        together = state["together"]

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pg = ProcessGroupGloo(timeout=TIMEOUT)
    transport = PGTransport[dict[str, Any]](
        pg,
        TIMEOUT,
        torch.device("cpu"),
        # The Manager sends its own tree, with the user's state in this place.
        state_dict=lambda: {"user": {"default": state_dict()}},
        # A replica that nobody could heal must not go on with half of somebody else's weights.
        atomic=True,
    )
    manager = Manager(
        pg=pg,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        # Heal before the forward pass, and not while it reads the weights.
        use_async_quorum=False,
        checkpoint_transport=transport,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        replica_id=f"replica{replica}",
        lighthouse_addr=lighthouse,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
    )
    optimizer = Optimizer(manager, adam)

    received, alone = None, False
    while together < STEPS:
        optimizer.zero_grad()  # Forms the quorum, and heals replicas that are behind.
        report, step = transport.report, manager.current_step()
        if report is not None and report.direction == "receive" and report is not received:
            received = report
            print(f"replica {replica} received step {step}: {report.bytes:,} bytes, {report.route} route", flush=True)
        batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(2 * step + replica))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        time.sleep(0.02)  # A larger model would take longer.
        if replica == 1 and life == 1 and together == FATAL:
            print(f"replica 1 is in the middle of step {step}", flush=True)
            time.sleep(PATIENCE_SECONDS)  # So that it is killed in this step, on any machine.
        for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
            work.wait()
        optimizer.step()  # Only if nothing has gone wrong.
        if manager.current_step() == step:
            print(f"replica {replica} discards step {step}", flush=True)
        elif manager.num_participants() == 2:
            together, alone = together + 1, False
        elif together and not alone:
            alone = True
            print(f"replica {replica} takes step {step} alone", flush=True)

    torch.save({"step": manager.current_step(), **state_dict()}, result)
    manager.shutdown()
    pg.shutdown()


def end_with_parent() -> None:
    """End this process when the process that started it ends: nothing is ever written to standard input."""
    sys.stdin.read()
    os._exit(1)


def equal(one: Any, other: Any) -> bool:
    """Whether two states are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


class Replica:
    """A replica's process. Its lines are printed here; torchft's log goes to a file."""

    def __init__(self, number: int, lighthouse: str, life: int, folder: Path) -> None:
        self.name = f"replica{number}"
        self.result, self.log = folder / f"{self.name}.pt", folder / f"{self.name}-{life}.log"
        #: Set when the replica stands still in the step in which it is to be killed, or has ended.
        self.ready = threading.Event()
        words = [sys.executable, __file__, str(number), lighthouse, str(life), str(self.result)]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | os.environ
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._lines = threading.Thread(target=self._pass_on)
        self._lines.start()

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(line, end="", flush=True)
            if "in the middle" in line:
                self.ready.set()
        self.ready.set()

    def finish(self) -> Any:
        """The state that the replica has saved."""
        if self.process.wait(PATIENCE_SECONDS) != 0:
            raise SystemExit(f"{self.name} ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
        return torch.load(self.result)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._lines.join()


def main() -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
    replicas: list[Replica] = []
    with tempfile.TemporaryDirectory() as folder:

        def start(number: int, life: int) -> Replica:
            replicas.append(Replica(number, lighthouse.address(), life, Path(folder)))
            return replicas[-1]

        try:
            survivor, victim = start(0, life=1), start(1, life=1)
            victim.ready.wait(PATIENCE_SECONDS)
            victim.process.kill()
            print("replica 1 killed, and started again", flush=True)
            restarted = start(1, life=2)
            states = [restarted.finish(), survivor.finish()]
        finally:
            for replica in replicas:
                replica.end()
            lighthouse.shutdown()
    if not equal(*states):
        raise SystemExit("the replicas disagree")
    print(f"both at step {states[0]['step']}, weights and moments equal bit for bit")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        threading.Thread(target=end_with_parent, daemon=True).start()
        train(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
