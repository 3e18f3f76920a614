"""The transports in use today: PyTorch's, and torchft's two."""

from __future__ import annotations

import socket
from typing import Any

from benchmarks.compare.peers.peer import CPU, TIMEOUT, Peer, world

__all__ = ["HTTPTransport", "TorchPGTransport", "TorchftPGTransport"]


class TorchPGTransport(Peer):
    key, name, package, bound = "torch", "torch PGTransport", "torch", "tcp"

    def prepare(self) -> None:
        from torch.distributed.checkpoint._pg_transport import PGTransport

        target = self.scene.target if self.scene.mode == "in place" else None
        self.transport = PGTransport(world(), TIMEOUT, CPU, target)

    def send(self) -> None:
        self.transport.send_checkpoint(list(self.scene.receivers), self.scene.state)

    def receive(self) -> Any:
        return self.transport.recv_checkpoint(0)


class TorchftPGTransport(Peer):
    key, name, package, bound = "torchft", "torchft PGTransport", "torchft", "tcp"
    module = "torchft.checkpointing"

    def prepare(self) -> None:
        from torchft.checkpointing.pg_transport import PGTransport

        target = self.scene.target if self.scene.mode == "in place" else None
        self.transport: Any = PGTransport(world(), TIMEOUT, CPU, target)

    def send(self) -> None:
        self.transport.send_checkpoint(list(self.scene.receivers), 1, self.scene.state, TIMEOUT)

    def receive(self) -> Any:
        return self.transport.recv_checkpoint(0, "", 1, TIMEOUT)


class HTTPTransport(Peer):
    key, name, package, bound = "http", "torchft HTTPTransport, 8 chunks", "torchft", "tcp"
    module = "torchft.checkpointing"
    modes = frozenset({"fresh"})

    def prepare(self) -> None:
        from torchft.checkpointing import http_transport

        self.transport: Any = http_transport.HTTPTransport(TIMEOUT, 8)
        # Its own address needs a resolver that knows this machine's name.
        here = self.transport.metadata().replace(socket.gethostname(), "localhost", 1)
        self.address = self.scene.tell(here)

    def send(self) -> None:
        self.transport.send_checkpoint(list(self.scene.receivers), 1, self.scene.state, TIMEOUT)

    def receive(self) -> Any:
        return self.transport.recv_checkpoint(0, self.address, 1, TIMEOUT)

    def tidy(self) -> None:
        # The next move's receivers wait until there is something to fetch.
        self.transport.disallow_checkpoint()

    def close(self) -> None:
        self.transport.shutdown(wait=False)
