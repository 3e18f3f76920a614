"""DTensor and ShardedTensor: a rank's shard of a global tensor, compared by its box in the global tensor."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from transfuse.leaves import values
from transfuse.leaves.codec import CannotCarry, MeshDescription, Opened, Room, Shared

__all__ = ["DTensorCodec", "ShardedTensorCodec"]

#: Building a mesh costs the square of its dimensions.
MAX_MESH_DIMS = 16

REMEDY = "receive in place (a state_dict callback whose leaf holds this shard), or pass mesh="


class DTensorMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """``offsets`` and ``sizes`` are the local shard's box in the global tensor, None on a rank outside the mesh."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    placements: tuple[tuple[str | int, ...], ...]
    mesh: int
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...] | None


class ShardedMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """``shards`` are (offsets, sizes, placement) of all shards, ``local`` the numbers of those that travel."""

    sizes: tuple[int, ...]
    dtype: str
    shards: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]
    local: tuple[int, ...]
    requires_grad: bool


# ---------------------------------------------------------------------------------------------------------- DTensor


def describe_mesh(mesh: DeviceMesh) -> MeshDescription:
    names = mesh.mesh_dim_names
    ranks = mesh.mesh
    return MeshDescription(
        mesh.device_type, tuple(ranks.shape), tuple(ranks.flatten().tolist()), tuple(names) if names else None
    )


def _encode_placement(placement: Placement) -> tuple[str | int, ...]:
    kind = type(placement)
    if kind is Replicate:
        return ("R",)
    if kind is Shard:
        return ("S", placement.dim)  # type: ignore[attr-defined]
    if kind is _StridedShard:
        return ("X", placement.dim, placement.split_factor)  # type: ignore[attr-defined]
    if kind is Partial:
        return ("P", placement.reduce_op)  # type: ignore[attr-defined]
    raise CannotCarry(f"a DTensor with placement {placement!r}; redistribute() it to Replicate or Shard first")


def _decode_placement(code: tuple[str | int, ...], dims: int) -> Placement:
    match code:
        case ("R",):
            return Replicate()
        case ("S", int(dim)) if 0 <= dim < dims:
            return Shard(dim)
        case ("X", int(dim), int(factor)) if 0 <= dim < dims and factor > 0:
            return _StridedShard(dim, split_factor=factor)
        case ("P", str(reduce_op)) if reduce_op in ("sum", "avg", "product", "max", "min"):
            return Partial(reduce_op)
    raise ValueError(f"unknown placement {code!r}")


def _box_on(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offsets, sizes) of this rank's shard in the global tensor; None for a rank outside the mesh."""
    if mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(offsets), tuple(sizes)


class DTensorCodec:
    name = "dtensor"
    checks_data = False

    def takes(self, leaf: object) -> bool:
        return isinstance(leaf, DTensor)

    def open(self, leaf: DTensor, shared: Shared) -> Opened:
        local = leaf._local_tensor
        box = _box_on(tuple(leaf.shape), leaf.device_mesh, leaf.placements)
        if box is not None and tuple(local.shape) != box[1]:
            raise CannotCarry(
                f"a DTensor whose local shape {tuple(local.shape)} is not the {box[1]} that its mesh and placements "
                f"{leaf.placements} give this rank; build it with distribute_tensor() or with matching local shards"
            )
        meta = DTensorMeta(
            tuple(leaf.shape),
            tuple(leaf.stride()),
            tuple(_encode_placement(p) for p in leaf.placements),
            shared.number(describe_mesh(leaf.device_mesh)),
            box[0] if box else None,
            box[1] if box else None,
        )
        return Opened(meta, [local])

    def _read(self, meta: Any, room: Room) -> tuple[DTensorMeta, MeshDescription, list[Placement]]:
        m = msgspec.convert(meta, DTensorMeta)
        if len(m.placements) > MAX_MESH_DIMS:
            raise ValueError("a mesh of too many dimensions")
        if not 0 <= m.mesh < len(room.shared):
            raise ValueError("a DTensor on a mesh that was not described")
        mesh = msgspec.convert(room.shared[m.mesh], MeshDescription)
        if len(m.placements) != len(mesh.shape) or len(m.shape) != len(m.strides):
            raise ValueError("a DTensor whose placements or strides do not match its mesh or shape")
        if any(n < 0 for n in (*m.shape, *m.strides, *(m.offsets or ()), *(m.sizes or ()))):
            raise ValueError("a DTensor with negative sizes")
        if (m.offsets is None) != (m.sizes is None):
            raise ValueError("a DTensor with half a box")
        if m.sizes is not None and m.offsets is not None:
            if not len(m.sizes) == len(m.offsets) == len(m.shape):
                raise ValueError("a DTensor whose box has other dimensions")
            if any(o + n > g for o, n, g in zip(m.offsets, m.sizes, m.shape, strict=True) if n):
                raise ValueError("a DTensor whose box reaches beyond its shape")
        return m, mesh, [_decode_placement(p, len(m.shape)) for p in m.placements]

    def _mesh_for(self, meta: Any, room: Room) -> tuple[DTensorMeta, DeviceMesh, list[Placement]]:
        m, description, placements = self._read(meta, room)
        if room.mesh is not None:
            try:
                mesh = room.mesh if isinstance(room.mesh, DeviceMesh) else room.mesh(description)
            except Exception as error:
                raise CannotCarry(f"the mesh= callable failed for {description}: {error!r}") from error
            if not isinstance(mesh, DeviceMesh):
                raise CannotCarry(f"the mesh= callable returned {mesh!r} for {description}, not a DeviceMesh")
            if mesh.ndim != len(placements):
                raise CannotCarry(
                    f"the mesh given has {mesh.ndim} dimensions, the source's {description.shape} has "
                    f"{len(placements)}; {REMEDY} with a mesh of as many dimensions"
                )
            if any(isinstance(p, Partial) for p in placements) and tuple(mesh.mesh.shape) != description.shape:
                raise CannotCarry(
                    "a Partial DTensor travels only onto a mesh of the same shape; redistribute() it first"
                )
            box = _box_on(m.shape, mesh, placements)
            if box != ((m.offsets, m.sizes) if m.offsets is not None else None):
                raise CannotCarry(
                    f"the source's shard is {_say_box(m.offsets, m.sizes)} of {m.shape}, this rank's on the mesh given "
                    f"is {_say_box(*(box or (None, None)))}; receive from the rank that holds the same shard"
                )
            return m, mesh, placements
        if any(isinstance(p, Partial) for p in placements) and math.prod(description.shape) != 1:
            raise CannotCarry(
                f"a Partial DTensor has no value of its own on another mesh; {REMEDY}, or redistribute() it"
            )
        if m.sizes != m.shape:
            raise CannotCarry(
                f"a DTensor of which the source holds only {_say_box(m.offsets, m.sizes)} of {m.shape} cannot be built "
                f"on a mesh of one rank; {REMEDY}"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        # Without backends no process group is made: a mesh of one rank needs none, and creating groups on one rank
        # alone would break everyone's next new_group().
        ranks = torch.tensor([rank]).reshape([1] * len(placements))
        device_type = description.device_type if _has_device(description.device_type) else "cpu"
        mesh = DeviceMesh(device_type, ranks, mesh_dim_names=description.dim_names, _init_backend=False, _rank=rank)
        return m, mesh, placements

    def promise(self, meta: Any, children: int, room: Room) -> None:
        if children != 1:
            raise ValueError("a DTensor has one local tensor")
        self._mesh_for(meta, room)

    def close(self, meta: Any, children: list[Any], room: Room) -> DTensor:
        m, mesh, placements = self._mesh_for(meta, room)
        (local,) = children
        if m.sizes is not None and tuple(local.shape) != m.sizes:
            raise ValueError("a DTensor whose local tensor is not its box")
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(m.shape), stride=m.strides)

    def differences(self, source: Any, target: DTensorMeta, room: Room, target_shared: Shared) -> list[str]:
        m, mesh, placements = self._read(source, room)
        if m.shape != target.shape:
            return [f"global shape: source {m.shape}, target {target.shape}"]
        if (m.offsets, m.sizes) != (target.offsets, target.sizes):
            return [
                f"sharding: source holds {_say_box(m.offsets, m.sizes)} of {m.shape} "
                f"({placements} on mesh {mesh.shape}), target {_say_box(target.offsets, target.sizes)} "
                f"({target.placements}); receive from the rank that holds the same shard"
            ]
        partial = any(p[0] == "P" for p in (*m.placements, *target.placements))
        if partial and (m.placements, mesh.shape) != (target.placements, target_shared.items[target.mesh].shape):
            return [
                f"sharding: a Partial DTensor travels only onto the same placements and mesh shape, source "
                f"{m.placements} on {mesh.shape}, target {target.placements}; redistribute() it first"
            ]
        return []

    def settle(self, meta: Any, target: Any) -> None:
        pass


def _has_device(kind: str) -> bool:
    if kind == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == kind


def _say_box(offsets: tuple[int, ...] | None, sizes: tuple[int, ...] | None) -> str:
    if offsets is None or sizes is None:
        return "nothing (outside the mesh)"
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(offsets, sizes, strict=True)) + "]"


# ---------------------------------------------------------------------------------------------------- ShardedTensor


class ShardedTensorCodec:
    name = "sharded"
    checks_data = False

    def takes(self, leaf: object) -> bool:
        return isinstance(leaf, ShardedTensor)

    def open(self, leaf: ShardedTensor, shared: Shared) -> Opened:
        metadata = leaf.metadata()
        boxes = [(tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in metadata.shards_metadata]
        shards = leaf.local_shards()
        local = [boxes.index((tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes))) for s in shards]
        meta = ShardedMeta(
            tuple(metadata.size),
            values.dtype_name(metadata.tensor_properties.dtype),
            tuple((*box, str(s.placement)) for box, s in zip(boxes, metadata.shards_metadata, strict=True)),
            tuple(local),
            metadata.tensor_properties.requires_grad,
        )
        return Opened(meta, [s.tensor for s in shards])

    def _read(self, meta: Any) -> ShardedMeta:
        m = msgspec.convert(meta, ShardedMeta)
        for offsets, sizes, _ in m.shards:
            if not len(offsets) == len(sizes) == len(m.sizes):
                raise ValueError("a shard of other dimensions than its tensor")
            if any(o < 0 or n < 0 or o + n > g for o, n, g in zip(offsets, sizes, m.sizes, strict=True)):
                raise ValueError("a shard that reaches beyond its tensor")
        if len(set(m.local)) != len(m.local) or any(not 0 <= i < len(m.shards) for i in m.local):
            raise ValueError("local shards that were not described")
        return m

    def promise(self, meta: Any, children: int, room: Room) -> None:
        m = self._read(meta)
        if children != len(m.local):
            raise ValueError("a ShardedTensor with other shards than described")
        if not dist.is_initialized():
            raise CannotCarry("a ShardedTensor needs a default process group here; receive in place")
        rank = dist.get_rank()
        claimed = {i for i, (_, _, placement) in enumerate(m.shards) if _rank_of(placement) == rank}
        if not claimed <= set(m.local):
            first = m.shards[min(claimed - set(m.local))]
            raise CannotCarry(
                f"a ShardedTensor whose metadata gives this rank ({rank}) the shard {_say_box(*first[:2])}, while the "
                f"source sent {[_say_box(*m.shards[i][:2]) for i in m.local]}; receive in place, or from the rank that "
                "holds the same shard"
            )

    def close(self, meta: Any, children: list[Any], room: Room) -> ShardedTensor:
        m = self._read(meta)
        rank = dist.get_rank()
        metadata = [
            ShardMetadata(list(offsets), list(sizes), _remote_device(placement))
            for offsets, sizes, placement in m.shards
        ]
        shards = []
        for i, tensor in zip(m.local, children, strict=True):
            if tuple(tensor.shape) != m.shards[i][1]:
                raise ValueError("a shard that is not of its described size")
            # The shard lives here now: say so, in the global metadata too.
            placement = _remote_device(f"rank:{rank}/{tensor.device}")
            metadata[i] = ShardMetadata(list(m.shards[i][0]), list(m.shards[i][1]), placement)
            shards.append(LocalShard(tensor, metadata[i]))
        properties = TensorProperties(dtype=values.dtype_named(m.dtype), requires_grad=m.requires_grad)
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, ShardedTensorMetadata(metadata, torch.Size(m.sizes), properties)
        )

    def differences(self, source: Any, target: ShardedMeta, room: Room, target_shared: Shared) -> list[str]:
        m = self._read(source)
        if m.sizes != target.sizes:
            return [f"global shape: source {m.sizes}, target {target.sizes}"]
        mine = [target.shards[i][:2] for i in target.local]
        theirs = [m.shards[i][:2] for i in m.local]
        if mine != theirs:
            return [
                f"sharding: source holds {[_say_box(*b) for b in theirs]} of {m.sizes}, target "
                f"{[_say_box(*b) for b in mine]}; receive from the rank that holds the same shards"
            ]
        return []

    def settle(self, meta: Any, target: Any) -> None:
        pass


def _rank_of(placement: str) -> int | None:
    try:
        rank = _remote_device(placement).rank()
    except ValueError as error:
        raise ValueError(f"unknown shard placement {placement!r}") from error
    return None if rank is None else int(rank)
