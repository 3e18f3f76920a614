"""transfuse, by each of its routes."""

from __future__ import annotations

from typing import Any, ClassVar

import transfuse
from benchmarks.compare.peers.peer import CPU, TIMEOUT, Peer, world

__all__ = ["Group", "GroupUnverified", "Memory"]


class Memory(Peer):
    key, name, package = "memory", "transfuse, memory route", "transfuse"
    options: ClassVar[dict[str, Any]] = {}

    def prepare(self) -> None:
        target = self.scene.target if self.scene.mode == "in place" else None
        self.transport = transfuse.PGTransport(world(), TIMEOUT, CPU, target, **self.options)

    def send(self) -> None:
        self.transport.send_checkpoint(self.scene.receivers, self.scene.state)

    def receive(self) -> Any:
        return self.transport.recv_checkpoint(0)

    def route(self) -> str | None:
        report = self.transport.report
        return report.route if report is not None else None


class Group(Memory):
    key, name, bound = "group", "transfuse, group route", "tcp"
    options: ClassVar[dict[str, Any]] = {"same_host": False}


class GroupUnverified(Memory):
    key, name, bound = "group-unverified", "transfuse, group route, verify=False", "tcp"
    options: ClassVar[dict[str, Any]] = {"same_host": False, "verify": False}
