"""Honest messages to begin with: one of every kind, and offers of states of many kinds."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import fractions
import pathlib
import uuid
import warnings
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from transfuse import Block
from transfuse._limits import Limits
from transfuse._plan import parcels
from transfuse._plan.holdings import Holdings
from transfuse._plan.regions import lay_out
from transfuse._plan.wanted_blocks import WantedBlocks, regions_in
from transfuse._state import manifest
from transfuse._state.leaves.layout import Box, blocks_of
from transfuse._wire import messages
from transfuse._wire.device_route import DeviceEntry
from transfuse._wire.memory_route import MemoryLease
from transfuse._wire.messages import Message

__all__ = ["OFFERS", "STATES", "Point", "offer_of", "seeds_for"]

PARCEL = 65536
LEASE = MemoryLease()
LEASE.__enter__()  # It lasts as long as this process.


class Point(NamedTuple):
    x: Any
    y: Any


def _states() -> dict[str, Any]:
    torch.manual_seed(7)
    base, shared = torch.arange(48.0).reshape(6, 8), torch.randn(4, 4)
    ordered = OrderedDict([("w", torch.randn(2))])
    ordered._metadata = OrderedDict([("", {"version": 1})])  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Sparse and nested tensors say that they are young.
        return {
            "flat": {"w": torch.zeros(100, dtype=torch.uint8), "v": torch.randn(3, 5)},
            "dense": [base[:, ::2], base.t(), base[1:3], torch.randn(1, 3).expand(4, 3), torch.empty(0, 3)],
            "kinds": {
                "p": nn.Parameter(torch.randn(2)),
                "b": nn.Buffer(torch.randn(2)),
                "c": torch.randn(2, dtype=torch.complex64).conj(),
                "n": torch._neg_view(torch.randn(2)),
            },
            "tied": {"a": shared, "b": shared.t(), "c": shared.view(-1)[3:9]},
            "tangled": (base.view(-1).as_strided((4, 6), (3, 2)), base.view(-1)[3:9]),
            "sparse": {"coo": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr()},
            "jagged": [torch.nested.nested_tensor_from_jagged(torch.randn(5, 2), torch.tensor([0, 2, 5]))],
            "blobs": {"a": np.arange(6.0).reshape(2, 3), "b": bytes(5000), "s": "é" * 5000},
            "trees": {
                "ordered": ordered,
                "point": Point(torch.randn(2), [1, None]),
                "default": defaultdict(list, {0: torch.randn(1)}),
                "deque": deque([torch.randn(1), 5], maxlen=4),
            },
            "values": [
                None, True, -5, 0.1, b"abc", "äöü", 1 << 100, 1 - 2j, bytearray(b"x"), {1, (2, 3)}, frozenset({1.5}),
                range(1, 10, 3), slice(None, 5), ..., datetime.date(2020, 2, 29),
                datetime.datetime(2020, 1, 2, 3, 4, 5, 6, datetime.UTC), datetime.timedelta(-1, 2, 3),
                pathlib.PurePosixPath("/a"), uuid.UUID(int=5), decimal.Decimal("1.50"), fractions.Fraction(2, 3),
                torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3]), np.float32(1.5),
                np.datetime64("2020-01-01"),
            ],
            "sharded": _sharded(),
            "nothing": {},
        }  # fmt: skip


def _sharded() -> dict[str, Any]:
    """A rank's shards, without a process group: it is rank 1 of 4."""
    line = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("dp",), _init_backend=False, _rank=1)
    plane = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False, _rank=1)
    return {
        "rows": DTensor.from_local(torch.randn(2, 6), line, [Shard(0)], run_check=False),
        "cells": DTensor.from_local(torch.randn(3, 2), plane, [Shard(0), Shard(1)], run_check=False),
        "copy": DTensor.from_local(torch.randn(5), line, [Replicate()], run_check=False),
        "box": Block(torch.randn(2, 3), start=(2, 0), shape=(5, 4)),
        "dot": Block(torch.tensor(1.5), start=(), shape=()),
        "plain": torch.randn(3),
    }


def offer_of(described: manifest.Described, *, with_memory: bool = False) -> messages.Offer:
    """What a source offers of a state."""
    routes = {"memory": LEASE.describe(described.addresses).encode()} if with_memory else {}
    wire = described.manifest.encode()
    digest = wire.digest()
    coordinates = list(described.manifest.coordinates)
    likeness = described.manifest.likeness(wire)
    offer = messages.Offer(4, PARCEL, PARCEL, PARCEL, 2, 5.0, True, routes, None, wire, digest, likeness, coordinates)
    return msgspec.structs.replace(offer, structure=wire.structure())


STATES = _states()
DESCRIBED = {name: manifest.describe(state, Limits()) for name, state in STATES.items()}
OFFERS = {name: offer_of(described) for name, described in DESCRIBED.items()}


def _wants() -> list[bytes]:
    """All of each state, and in each of two ways a part of it."""
    found = []
    for described in DESCRIBED.values():
        for apart in ([], [0] if len(described.manifest.storages) else []):
            tensors = np.flatnonzero(np.isin(described.manifest.tensors.storage, apart)).tolist()
            cut = parcels.cut(lay_out(described.manifest, apart, tensors), PARCEL)
            numbers = messages.pairs_of(range(len(cut)))
            found.append(
                messages.encode(
                    messages.Want(parcels.fingerprint(cut), PARCEL, PARCEL, True, apart, tensors, numbers, True, 7)
                )
            )
    return found


def wanted_blocks_of(described: manifest.Described) -> WantedBlocks:
    """All that a rank holds, in halves."""
    rows = []
    m, held = described.manifest, Holdings(described.manifest)
    for leaf in range(len(m)):
        for tensor in range(held.count(leaf)):
            with contextlib.suppress(ValueError):  # What is no shard of plain tensors.
                for _, runs in held.of(leaf, tensor).shards:
                    rows += [(leaf, tensor, half) for block, _ in blocks_of(runs) for half in _halves(block)]
    columns = (
        [leaf for leaf, _, _ in rows],
        [tensor for _, tensor, _ in rows],
        [len(block.start) for _, _, block in rows],
        [n for _, _, block in rows for n in block.start],
        [n for _, _, block in rows for n in block.sizes],
    )
    leaves, tensors, ndim, starts, sizes = (np.array(column, dtype=np.int64) for column in columns)
    begins = (np.arange(len(leaves)) % 3 == 0).astype(np.int64)
    return WantedBlocks.of(leaves, tensors, ndim, starts, sizes, [None], np.zeros_like(leaves), begins)


def _halves(block: Box) -> list[Box]:
    if not block.numel:
        return []
    if not block.sizes or block.sizes[0] < 2:
        return [block]
    (start, *rest), (size, *sizes) = block.start, block.sizes
    return [
        Box((start, *rest), (size // 2, *sizes)),
        Box((start + size // 2, *rest), (size - size // 2, *sizes)),
    ]


def _wants_of_blocks() -> list[bytes]:
    found = []
    for described in DESCRIBED.values():
        blocks = wanted_blocks_of(described)
        cut = parcels.cut(regions_in(Holdings(described.manifest), blocks), PARCEL, all_staged=True)
        numbers = messages.pairs_of(range(len(cut)))
        fingerprint = parcels.fingerprint(cut, blocks.fingerprint())
        found.append(
            messages.encode(messages.Want(fingerprint, PARCEL, PARCEL, True, [], [], numbers, False, 7, blocks))
        )
    return found


def _bodies() -> dict[type, list[bytes]]:
    link = messages.Link(3, 0x60000005, 99)
    return {
        messages.Offer: [messages.encode(offer) for offer in OFFERS.values()]
        + [messages.encode(offer_of(DESCRIBED["flat"], with_memory=True))]
        + [messages.encode(messages.brief(offer)) for offer in OFFERS.values()],
        messages.Want: _wants() + _wants_of_blocks(),
        messages.Refusal: [messages.encode(messages.Refusal("StepMismatch", "no"))],
        messages.Verdict: [messages.encode(messages.Verdict({"memory": 100}))],
        messages.Agreed: [messages.encode(messages.Agreed()), messages.encode(messages.Agreed(link, link, 0.5))],
        messages.More: [messages.encode(messages.More([0, 3, 5, 6]))],
        messages.Digests: [messages.encode(messages.Digests(bytes(32)))],
    }


BODIES = _bodies()


def seeds_for(target: str) -> list[bytes]:
    """Inputs that a target begins with, in the shape that it takes."""
    if target == "canary":
        return [b"a", b"ab"]
    if target == "header":
        return [messages.seal(kind, 5, 7, b"body") + b"body" for kind in Message]
    if target == "record":
        return [bytes([n]) + messages.seal_record(5, messages.Intent.GO_ON, list(range(n))) for n in (0, 1, 7)]
    if target == "body":
        return [bytes([i]) + body for i, bodies in enumerate(BODIES.values()) for body in bodies]
    if target == "numbers":
        return [msgspec.msgpack.encode(pairs) for pairs in ([9, [0, 3, 5, 6]], [4, []], [5, [0, 5]], [1 << 40, [2, 4]])]
    if target == "offer":
        # Fresh, and in three ways into a target of its own kind.
        return [bytes([4 * (i % len(STATES)) + mode]) + body for i, body in enumerate(BODIES[messages.Offer])
                for mode in range(4)]  # fmt: skip
    if target == "want":
        wholes, n = BODIES[messages.Want], len(STATES)
        return [bytes([i // 2 if i < 2 * n else i - 2 * n]) + body for i, body in enumerate(wholes)]
    if target == "blocks":
        return [
            bytes([i]) + msgspec.msgpack.encode(wanted_blocks_of(described))
            for i, described in enumerate(DESCRIBED.values())
        ]
    if target == "sharding":
        return [msgspec.msgpack.encode(case) for case in (
            [[8, 6], [4], [["S", 0]], [1], 0, 2, 5],
            [[7, 9], [2, 3], [["S", 0], ["S", 1]], [1, 2], 1, 0, 9],
            [[24], [2, 2], [["X", 0, 2], ["S", 0]], [0, 1], 0, 3, 20],
            [[5, 5], [3], [["R"]], [0], 0, 0, 5],
            [[1 << 40], [2], [["X", 0, 64]], [1], 0, 0, 1 << 40],
            [[6], [2], [["P", "sum"]], [1], 0, 0, 6],
        )]  # fmt: skip
    if target == "tree":
        return [msgspec.msgpack.encode(offer.described.tree) for offer in OFFERS.values()]
    if target == "value":
        return [msgspec.msgpack.encode(value) for value in OFFERS["values"].described.details]
    if target == "memory":
        return [bytes([2]) + LEASE.describe(DESCRIBED["flat"].addresses).encode()]
    if target == "device":
        entry = DeviceEntry(LEASE.describe(np.zeros(0, dtype=np.int64)), "phantom", [b"7", b"x" * 66], bytes(32))
        return [bytes([2]) + msgspec.msgpack.encode(entry)]
    raise ValueError(target)
