"""All contenders, in the order in which tables show them."""

from __future__ import annotations

from transfuse.cli.bench.peers.bare import BareRead
from transfuse.cli.bench.peers.engines import Mooncake, Nixl
from transfuse.cli.bench.peers.files import DistributedCheckpoint, Safetensors, TorchSave
from transfuse.cli.bench.peers.object_store import Ray
from transfuse.cli.bench.peers.ours import Group, GroupUnverified, Memory
from transfuse.cli.bench.peers.peer import Mode, Peer, Scene, tensors_of
from transfuse.cli.bench.peers.transports import HTTPTransport, TorchftPGTransport, TorchPGTransport

__all__ = ["LIMIT", "OURS", "PEERS", "REFERENCE", "Mode", "Peer", "Scene", "tensors_of"]

OURS: tuple[type[Peer], ...] = (Memory, Group, GroupUnverified)

#: What the others' speed is given in multiples of.
REFERENCE: type[Peer] = TorchPGTransport

PEERS: tuple[type[Peer], ...] = (
    *OURS,
    TorchPGTransport,
    TorchftPGTransport,
    HTTPTransport,
    TorchSave,
    Safetensors,
    DistributedCheckpoint,
    Ray,
    Mooncake,
    Nixl,
)

#: Runs in turns with them, in every case.
LIMIT: type[Peer] = BareRead
