"""All peers, in the order in which tables show them."""

from __future__ import annotations

from benchmarks.compare.peers.bare import BareRead
from benchmarks.compare.peers.engines import Mooncake, Nixl
from benchmarks.compare.peers.files import DistributedCheckpoint, Safetensors, TorchSave
from benchmarks.compare.peers.object_store import Ray
from benchmarks.compare.peers.ours import Group, GroupUnverified, Memory
from benchmarks.compare.peers.peer import Mode, Peer, Scene, tensors_of
from benchmarks.compare.peers.transports import HTTPTransport, TorchftPGTransport, TorchPGTransport

__all__ = ["LIMIT", "OURS", "PEERS", "REFERENCE", "Mode", "Peer", "Scene", "tensors_of"]

OURS: tuple[type[Peer], ...] = (Memory, Group, GroupUnverified)

#: The peer to which the others' speeds are compared.
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

#: The limit of this machine. It runs in turns with the peers, in every case.
LIMIT: type[Peer] = BareRead
