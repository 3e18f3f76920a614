"""DTensor and ShardedTensor: a rank's shard of a global tensor, compared by its blocks in the global tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device

from transfuse._state.leaves import values
from transfuse._state.leaves.codec import BuildContext, CannotCarry, Coordinate, MeshDescription, Opened, Shared
from transfuse._state.leaves.dtensors import is_dtensor
from transfuse._state.leaves.layout import Box, Layout, Run, blocks_of
from transfuse._state.leaves.spec import DTENSOR, SHARDED_TENSOR

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

#: The most elements of a global tensor.
HUGE = 1 << 56

#: The most dimensions of a mesh: building a mesh costs the square of them.
MAX_MESH_DIMS = 16

REMEDY = "receive in place (a state_dict callback whose leaf holds this shard), or pass mesh="


class DTensorMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Equal on all ranks of a mesh: a rank's coordinate in the mesh says which shard it holds."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    placements: tuple[tuple[str | int, ...], ...]
    mesh: int


class ShardedMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """``shards`` are (offsets, sizes, placement) of all shards; ``local`` are the numbers of the shards that travel."""

    sizes: tuple[int, ...]
    dtype: str
    shards: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]
    local: tuple[int, ...]
    requires_grad: bool


# ---------------------------------------------------------------------------------------------------------- DTensor


def encode_placement(placement: Placement) -> tuple[str | int, ...]:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

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


def check_placement(code: tuple[str | int, ...], dims: int) -> None:
    match code:
        case ("R",):
            return
        case ("S", int(dim)) if 0 <= dim < dims:
            return
        case ("X", int(dim), int(factor)) if 0 <= dim < dims and factor > 0:
            return
        case ("P", "sum" | "avg" | "product" | "max" | "min"):
            return
    raise ValueError(f"unknown placement {code!r}")


def _decode_placement(code: tuple[Any, ...]) -> Placement:
    """A placement from its code, which has been checked."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kind, *numbers = code
    if kind == "R":
        return Replicate()
    if kind == "S":
        return Shard(*numbers)
    if kind == "X":
        return _StridedShard(numbers[0], split_factor=numbers[1])
    return Partial(*numbers)


def read_meshes(plain: Any) -> list[MeshDescription]:
    """Read a peer's descriptions of meshes; ``ValueError`` for what no codec writes."""
    meshes = msgspec.convert(plain, list[MeshDescription])
    for mesh in meshes:
        if any(n < 1 for n in mesh.shape) or math.prod(mesh.shape) != len(mesh.ranks):
            raise ValueError(f"the {len(mesh.ranks)} ranks that a mesh lists do not fill its shape")
        if len(mesh.shape) > MAX_MESH_DIMS:
            raise ValueError(f"a mesh has {len(mesh.shape)} dimensions, more than {MAX_MESH_DIMS}")
    return meshes


def layout_of(meta: Any, shared: Sequence[MeshDescription]) -> Layout:
    """How a DTensor is spread over its mesh; ``ValueError`` for what no codec writes."""
    m = msgspec.convert(meta, DTensorMeta)
    if not 0 <= m.mesh < len(shared):
        raise ValueError(f"a DTensor is on mesh {m.mesh}, but {len(shared)} meshes are described")
    mesh = shared[m.mesh]
    if len(m.placements) != len(mesh.shape) or len(m.shape) != len(m.strides):
        raise ValueError(
            f"a DTensor has {len(m.placements)} placements on a mesh of {len(mesh.shape)} dimensions, and "
            f"{len(m.strides)} strides for {len(m.shape)} sizes"
        )
    if any(n < 0 for n in (*m.shape, *m.strides)) or math.prod(m.shape) > HUGE:
        raise ValueError("a DTensor has a negative size or stride, or too many elements")
    for code in m.placements:
        check_placement(code, len(m.shape))
    return Layout(m.shape, mesh, m.placements)


def layout_in(leaf: DTensor, shared: Shared) -> tuple[Layout, int]:
    """How a live DTensor of this process is spread over its mesh, and the mesh's number in ``shared``."""
    number = shared.number(leaf.device_mesh)
    key = (number, leaf.shape, leaf.placements)
    known = shared.known.get(key)
    if known is None:
        codes = tuple(map(encode_placement, leaf.placements))
        known = shared.known[key] = Layout(tuple(leaf.shape), shared.items[number], codes)
    return known, number


def check_coordinate(mesh: MeshDescription, coordinate: Coordinate) -> None:
    """``ValueError`` for a coordinate that a mesh does not have."""
    if coordinate is not None and (
        len(coordinate) != len(mesh.shape)
        or not all(0 <= index < size for index, size in zip(coordinate, mesh.shape, strict=True))
    ):
        raise ValueError(f"a rank's coordinate is outside its mesh of shape {mesh.shape}")


def checked_coordinate(layout: Layout, coordinate: Coordinate) -> Coordinate:
    """Check a peer's coordinate in the layout's mesh, and return it."""
    check_coordinate(layout.mesh, coordinate)
    return coordinate


class DTensorCodec:
    name = DTENSOR
    checks_data = False

    def takes(self, leaf: object) -> bool:
        return is_dtensor(leaf)

    def open(self, leaf: DTensor, shared: Shared) -> Opened:
        local = leaf._local_tensor
        layout, number = layout_in(leaf, shared)
        coordinate, placements = shared.coordinates[number], layout.placements
        if coordinate is not None:
            shape = layout.local_shape(coordinate)
            if tuple(local.shape) != shape:
                raise CannotCarry(
                    f"a DTensor whose local shape {tuple(local.shape)} is not the {shape} that its mesh and placements "
                    f"{leaf.placements} give this rank; build it with distribute_tensor() or with matching local shards"
                )
        return Opened(DTensorMeta(tuple(leaf.shape), tuple(leaf.stride()), placements, number), [local])

    def _read(self, meta: Any, build_context: BuildContext) -> tuple[DTensorMeta, Layout, Coordinate]:
        m, layout = msgspec.convert(meta, DTensorMeta), layout_of(meta, build_context.shared)
        coordinate = build_context.coordinates[m.mesh] if m.mesh < len(build_context.coordinates) else None
        return m, layout, checked_coordinate(layout, coordinate)

    def mesh_for(self, meta: Any, build_context: BuildContext) -> tuple[DeviceMesh, list[Placement]]:
        """The mesh on which this receiver builds a DTensor, and the placements."""
        layout = layout_of(meta, build_context.shared)
        description = layout.mesh
        placements = [_decode_placement(code) for code in layout.placements]
        if build_context.mesh is not None:
            try:
                mesh = (
                    build_context.mesh
                    if isinstance(build_context.mesh, DeviceMesh)
                    else build_context.mesh(description)
                )
            except Exception as error:
                raise CannotCarry(f"the mesh= callable failed for {description}: {error!r}") from error
            if not isinstance(mesh, DeviceMesh):
                raise CannotCarry(f"the mesh= callable returned {mesh!r} for {description}, not a DeviceMesh")
            if mesh.ndim != len(placements):
                raise CannotCarry(
                    f"the mesh given has {mesh.ndim} dimensions, the source's mesh {description.shape} has "
                    f"{len(placements)}; {REMEDY} with a mesh of as many dimensions"
                )
            if layout.partial and tuple(mesh.mesh.shape) != description.shape:
                raise CannotCarry(
                    "a Partial DTensor travels only onto a mesh of the same shape; redistribute() it first"
                )
            return mesh, placements
        if layout.partial and math.prod(description.shape) != 1:
            raise CannotCarry(
                f"a Partial DTensor has no value of its own on another mesh; {REMEDY}, or redistribute() it"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        # With _init_backend=False no process group is made. A mesh of one rank needs none, and a group that only one
        # rank creates would break the next new_group() of all ranks.
        ranks = torch.tensor([rank]).reshape([1] * len(placements))
        device_type = description.device_type if _has_device(description.device_type) else "cpu"
        return (
            DeviceMesh(device_type, ranks, mesh_dim_names=description.dim_names, _init_backend=False, _rank=rank),
            placements,
        )

    def layout_here(self, meta: Any, build_context: BuildContext) -> tuple[Layout, Coordinate]:
        """How a DTensor that this receiver builds is spread over its mesh, and this rank's coordinate in that mesh."""
        mesh, _ = self.mesh_for(meta, build_context)
        theirs = layout_of(meta, build_context.shared)
        shared = Shared()
        number = shared.number(mesh)
        return Layout(theirs.shape, shared.items[number], theirs.placements), shared.coordinates[number]

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        if children != 1:
            raise ValueError(f"a DTensor has one local tensor, got {children}")
        m, theirs, their_coordinate = self._read(meta, build_context)
        here, coordinate = self.layout_here(meta, build_context)
        if _runs(theirs, their_coordinate) != _runs(here, coordinate):
            if build_context.mesh is not None:
                raise CannotCarry(
                    f"the source's shard is {_say(theirs, their_coordinate)} of {m.shape}, this rank's on the mesh "
                    f"given is {_say(here, coordinate)}; receive from all the ranks that hold parts of it"
                )
            raise CannotCarry(
                f"a DTensor of which the source holds only {_say(theirs, their_coordinate)} of {m.shape} cannot be "
                f"built on a mesh of one rank; {REMEDY}, or receive from all the ranks that hold parts of it"
            )

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> DTensor:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        mesh, placements = self.mesh_for(meta, build_context)
        m, (local,) = msgspec.convert(meta, DTensorMeta), children
        here, coordinate = self.layout_here(meta, build_context)
        if coordinate is not None and tuple(local.shape) != here.local_shape(coordinate):
            raise ValueError(
                f"a DTensor's local tensor has shape {tuple(local.shape)}, expected {here.local_shape(coordinate)}"
            )
        if coordinate is None:
            # On a rank outside the mesh, from_local() would replace the local tensor with an empty one.
            meta_of_all = TensorMeta(torch.Size(m.shape), m.strides, local.dtype)
            spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta_of_all)
            return DTensor(local, spec, requires_grad=local.requires_grad)  # type: ignore[no-untyped-call]
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(m.shape), stride=m.strides)

    def differences(
        self, source: Any, target: DTensorMeta, build_context: BuildContext, target_shared: Shared
    ) -> list[str]:
        m, theirs, their_coordinate = self._read(source, build_context)
        if m.shape != target.shape:
            return [f"global shape: source {m.shape}, target {target.shape}"]
        mine, coordinate = layout_of(target, target_shared.items), target_shared.coordinates[target.mesh]
        if _runs(theirs, their_coordinate) != _runs(mine, coordinate):
            return [
                f"sharding: source holds {_say(theirs, their_coordinate)} of {m.shape} ({theirs.placements} on mesh "
                f"{theirs.mesh.shape}), target {_say(mine, coordinate)} ({target.placements}); receive from all the "
                "ranks that hold parts of it"
            ]
        partial = theirs.partial or mine.partial
        source_side = (theirs.placements, theirs.mesh.shape, their_coordinate)
        if partial and source_side != (mine.placements, mine.mesh.shape, coordinate):
            return [partial_remedy(theirs, mine)]
        return []

    def settle(self, meta: Any, target: Any) -> None:
        pass


def partial_remedy(source: Layout, target: Layout) -> str:
    return (
        "sharding: a Partial DTensor travels only onto the same placements, mesh shape and mesh coordinate, source "
        f"{source.placements} on {source.mesh.shape}, target {target.placements} on {target.mesh.shape}; "
        "redistribute() it first"
    )


def _runs(layout: Layout, coordinate: Coordinate) -> tuple[tuple[Run, ...], ...] | None:
    """The runs that a rank holds; None for a rank outside the mesh."""
    return None if coordinate is None else layout.runs(coordinate)


def _say(layout: Layout, coordinate: Coordinate) -> str:
    if coordinate is None:
        return "nothing (outside the mesh)"
    blocks = [str(block) for block, _ in blocks_of(layout.runs(coordinate))]
    return " and ".join(blocks[:3]) + (" and more" if len(blocks) > 3 else "") if blocks else "nothing"


def _has_device(kind: str) -> bool:
    if kind == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == kind


# ---------------------------------------------------------------------------------------------------- ShardedTensor


class ShardedTensorCodec:
    name = SHARDED_TENSOR
    checks_data = False

    def takes(self, leaf: object) -> bool:
        return isinstance(leaf, ShardedTensor)

    def open(self, leaf: ShardedTensor, shared: Shared) -> Opened:
        metadata = leaf.metadata()
        regions = [(tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in metadata.shards_metadata]
        shards = leaf.local_shards()
        local: list[int] = []
        for shard in shards:
            region = (tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
            # Several empty shards may have the same offsets and sizes.
            local.append(next(i for i, other in enumerate(regions) if other == region and i not in local))
        meta = ShardedMeta(
            tuple(metadata.size),
            values.dtype_name(metadata.tensor_properties.dtype),
            tuple((*region, str(s.placement)) for region, s in zip(regions, metadata.shards_metadata, strict=True)),
            tuple(local),
            metadata.tensor_properties.requires_grad,
        )
        return Opened(meta, [s.tensor for s in shards])

    @staticmethod
    def read(meta: Any) -> ShardedMeta:
        m = msgspec.convert(meta, ShardedMeta)
        for offsets, sizes, _ in m.shards:
            if not len(offsets) == len(sizes) == len(m.sizes):
                raise ValueError("a shard of a ShardedTensor has another number of dimensions than the tensor")
            if any(o < 0 or n < 0 or o + n > g for o, n, g in zip(offsets, sizes, m.sizes, strict=True)):
                raise ValueError("a shard of a ShardedTensor reaches beyond the tensor")
        if len(set(m.local)) != len(m.local) or any(not 0 <= i < len(m.shards) for i in m.local):
            raise ValueError("a ShardedTensor lists a local shard twice, or one that was not described")
        return m

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        m = self.read(meta)
        if children != len(m.local):
            raise ValueError(f"a ShardedTensor has {children} local tensors for {len(m.local)} local shards")
        if not dist.is_initialized():
            raise CannotCarry(
                "a ShardedTensor can only be built with a default process group; call init_process_group() on the "
                "receiver, or receive in place"
            )
        rank = dist.get_rank()
        claimed = {i for i, (_, _, placement) in enumerate(m.shards) if _rank_of(placement) == rank}
        if not claimed <= set(m.local):
            first = m.shards[min(claimed - set(m.local))]
            raise CannotCarry(
                f"a ShardedTensor whose metadata gives this rank ({rank}) the shard {Box(*first[:2])}, while the "
                f"source sent {[str(Box(*m.shards[i][:2])) for i in m.local]}; receive in place, or from the rank "
                "that holds the same shard"
            )

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> ShardedTensor:
        m = self.read(meta)
        rank = dist.get_rank()
        metadata = [
            ShardMetadata(list(offsets), list(sizes), _remote_device(placement))
            for offsets, sizes, placement in m.shards
        ]
        shards = []
        for i, tensor in zip(m.local, children, strict=True):
            if tuple(tensor.shape) != m.shards[i][1]:
                raise ValueError(f"a shard arrived with shape {tuple(tensor.shape)}, expected {m.shards[i][1]}")
            # The shard lives on this rank now. Its metadata says so, and so does the global metadata.
            placement = _remote_device(f"rank:{rank}/{tensor.device}")
            metadata[i] = ShardMetadata(list(m.shards[i][0]), list(m.shards[i][1]), placement)
            shards.append(LocalShard(tensor, metadata[i]))
        properties = TensorProperties(dtype=values.dtype_named(m.dtype), requires_grad=m.requires_grad)
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, ShardedTensorMetadata(metadata, torch.Size(m.sizes), properties)
        )

    def differences(
        self, source: Any, target: ShardedMeta, build_context: BuildContext, target_shared: Shared
    ) -> list[str]:
        m = self.read(source)
        if m.sizes != target.sizes:
            return [f"global shape: source {m.sizes}, target {target.sizes}"]
        mine = [target.shards[i][:2] for i in target.local]
        theirs = [m.shards[i][:2] for i in m.local]
        if mine != theirs:
            return [
                f"sharding: source holds {[str(Box(*b)) for b in theirs]} of {m.sizes}, target "
                f"{[str(Box(*b)) for b in mine]}; receive from the rank that holds the same shards"
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
