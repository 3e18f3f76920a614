"""The mesh for DTensors that arrive fresh, such as moments of a new optimizer: one of the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.device_mesh import DeviceMesh

from transfuse._limits import Limits
from transfuse._state import trees
from transfuse._state.leaves.codec import MeshDescription
from transfuse._state.leaves.dtensors import is_dtensor


def own_mesh(target: object) -> Callable[[MeshDescription], DeviceMesh] | None:
    """For the option ``mesh``: a function that chooses among the meshes of a target's DTensors; None if it has none."""
    _, leaves = trees.flatten(target, max_depth=Limits.from_environment().max_depth)
    found = (leaf.device_mesh for leaf in leaves if is_dtensor(leaf))
    meshes = list({id(mesh): mesh for mesh in found}.values())
    return (lambda described: _most_like(described, meshes)) if meshes else None


def _most_like(described: MeshDescription, meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh for a DTensor that was on another one: of the same names and shape, or of as many dimensions."""

    def likeness(mesh: DeviceMesh) -> tuple[bool, bool, bool]:
        names, shape = mesh.mesh_dim_names, tuple(mesh.shape)
        return mesh.ndim == len(described.shape), names == described.dim_names, shape == described.shape

    return max(meshes, key=likeness)
