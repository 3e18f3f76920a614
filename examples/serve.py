"""Readers outside the group: a job serves its live state, and processes outside the job fetch it.

    python examples/serve.py

A trainer trains. In the middle a newcomer fetches the state of that moment, trains on by itself, and serves too. At the
end a third process fetches from both at once. All agree bit for bit with a run that nobody joined.
"""

import multiprocessing
import os
import secrets
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import nn

import transfuse

TIMEOUT = timedelta(seconds=60)
MORE_STEPS = 50


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.step = 0
        self.reports: list[transfuse.Report] = []

    def serve(self) -> transfuse.Server:
        return transfuse.serve(
            self.state,
            step=lambda: self.step,
            token=os.environ["TRANSFUSE_TOKEN"],
            timeout=TIMEOUT,  # A reader that stalls holds training up for this time at most.
            on_report=self.reports.append,
        )

    def train(self, server: transfuse.Server, steps: int) -> None:
        for _ in range(steps):
            # Seeded by the step, so that every run sees the same data.
            batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(self.step))
            loss = (self.model(batch) - batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            with server.mutating():  # Waits until nobody reads; readers wait until it is left.
                self.optimizer.step()
                self.step += 1

    def join(self, address: str | list[str]) -> None:
        fetched = transfuse.fetch(address, self.state, token=os.environ["TRANSFUSE_TOKEN"], timeout=TIMEOUT)
        self.reports.append(fetched.report)
        assert fetched.step is not None
        self.step = fetched.step

    def check(self, address: str | list[str]) -> transfuse.Verified:
        return transfuse.verify(address, self.state, token=os.environ["TRANSFUSE_TOKEN"], timeout=TIMEOUT)


def train(parent: "Connection[str, str]") -> None:
    trainer = Trainer()
    with trainer.serve() as server:
        trainer.train(server, 1)  # A reader that joins now joins in the middle, however slow this machine is.
        parent.send(server.address)
        while not trainer.reports:
            trainer.train(server, 1)
        joined = trainer.reports[0].step
        assert joined is not None
        trainer.train(server, max(0, joined + MORE_STEPS - trainer.step))
        parent.send(str(trainer.step))
        parent.recv()  # Others may fetch until then.


def join(parent: "Connection[str, str]", address: str) -> None:
    trainer = Trainer()
    trainer.join(address)
    print(f"joined in the middle: {trainer.step > 0}", flush=True)
    with trainer.serve() as server:
        trainer.train(server, 1)  # A reader that joins now joins in the middle, however slow this machine is.
        parent.send(server.address)
        last = int(parent.recv())  # Where the other trainer has stopped.
        trainer.train(server, last - trainer.step)
        parent.send("done")
        parent.recv()


def main() -> None:
    os.environ["TRANSFUSE_TOKEN"] = secrets.token_hex(32)
    context = multiprocessing.get_context("spawn")
    parents, processes, addresses = [], [], list[str]()
    for work in (train, join):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(theirs, *addresses), daemon=True))
        processes[-1].start()
        parents.append(ours)
        addresses.append(ours.recv())

    parents[1].send(parents[0].recv())
    assert parents[1].recv() == "done"
    reader = Trainer()
    reader.join(addresses)  # From both at once: they are at the same step now.
    verified = reader.check(addresses)
    assert verified, verified
    alone = Trainer()
    with alone.serve() as server:
        alone.train(server, reader.step)
    for path, tensor in alone.model.state_dict().items():
        assert torch.equal(tensor, reader.model.state_dict()[path]), path
    print("fetched from both: equal bit for bit to a run that nobody joined")

    for parent, process in zip(parents, processes, strict=True):
        parent.send("goodbye")
        process.join()


if __name__ == "__main__":
    main()
