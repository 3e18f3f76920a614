"""Transfer engines, which read registered memory: NIXL and Mooncake. Tensors only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.compare.peers.peer import Peer

__all__ = ["Mooncake", "Nixl"]

#: Mooncake's queue takes 1,024 requests and refuses more.
BATCH = 512
NEIGHBOURS_BYTES = 64 << 10


class Nixl(Peer):
    key, name, package, module = "nixl", "NIXL, UCX", "nixl", "nixl._api"
    modes = frozenset({"in place"})
    whole = False
    note = "registered and described beforehand"

    def prepare(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        scene = self.scene
        # Both ends make progress only while they wait, so that no thread spins while other peers are measured.
        self.agent: Any = nixl_agent(f"rank{scene.rank}", nixl_agent_config(enable_prog_thread=False))
        own = list(scene.tensors.values())
        places = [(t.data_ptr(), t.nbytes, 0) for t in own]
        self.registered = self.agent.register_memory([(*place, "") for place in places], "DRAM")
        descriptors = self.agent.get_xfer_descs(places, "DRAM")
        card = self.agent.get_agent_metadata(), self.agent.get_serialized_descs(descriptors)
        metadata, remote = scene.tell(card if scene.sending else None)
        if not scene.sending:
            name = self.agent.add_remote_agent(metadata)
            remote = self.agent.deserialize_descs(remote)
            self.handle = self.agent.initialize_xfer("READ", descriptors, remote, name, b"done")

    def send(self) -> None:
        waiting = len(self.scene.receivers)
        while waiting:
            waiting -= sum(map(len, self.agent.get_new_notifs().values()))

    def receive(self) -> Any:
        state = self.agent.transfer(self.handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(self.handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended with {state}")
        return self.scene.state

    def close(self) -> None:
        if not self.scene.sending:
            self.agent.release_xfer_handle(self.handle)
        self.agent.deregister_memory(self.registered)


class Mooncake(Peer):
    key, name, bound = "mooncake", "Mooncake, TCP", "tcp"
    package, module = "mooncake-transfer-engine-non-cuda", "mooncake.engine"
    modes = frozenset({"in place"})
    whole = False
    note = "registered beforehand"

    def prepare(self) -> None:
        from mooncake.engine import TransferEngine

        self.engine: Any = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine does not initialize")
        own = list(self.scene.tensors.values())
        self.places, self.sizes = [t.data_ptr() for t in own], [t.nbytes for t in own]
        self.spans = _spans(zip(self.places, self.sizes, strict=True))
        if self.engine.batch_register_memory(*map(list, zip(*self.spans, strict=True))):
            raise RuntimeError("the engine does not register the tensors")
        self.source = self.scene.tell((f"127.0.0.1:{self.engine.get_rpc_port()}", self.places))

    def send(self) -> None:
        self.scene.meet()

    def receive(self) -> Any:
        name, remote = self.source
        for at in range(0, len(remote), BATCH):
            some = slice(at, at + BATCH)
            if self.engine.batch_transfer_sync_read(name, self.places[some], remote[some], self.sizes[some]):
                raise RuntimeError("the engine's read failed")
        self.scene.meet()
        return self.scene.state

    def close(self) -> None:
        self.engine.batch_unregister_memory([start for start, _ in self.spans])


def _spans(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbouring ranges: Mooncake's handshake lists every registered range, and takes minutes for thousands."""
    spans: list[tuple[int, int]] = []
    for start, size in sorted(places):
        first, length = spans[-1] if spans else (start, 0)
        if start - (first + length) > NEIGHBOURS_BYTES:
            spans.append((start, size))
        else:
            spans[-1:] = [(first, start + size - first)]
    return spans
