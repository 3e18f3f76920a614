"""The interface of codecs: how a composite leaf is opened into tensors, built again, and compared with a target.

A leaf that is a plain strided tensor needs no codec. The codec of any other leaf opens it into plain data and children.
Each child is a plain strided tensor, or a leaf that is opened in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh


class CannotCarry(Exception):
    """The reason why a leaf cannot be carried exactly, and the remedy. Callers add the leaf's path."""


class MeshDescription(NamedTuple):
    """A DeviceMesh as plain data; the argument of a ``mesh=`` callable. ``ranks`` are global, in row-major order."""

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dim_names: tuple[str, ...] | None


#: A rank's coordinate in a mesh; None for a rank outside the mesh.
Coordinate = tuple[int, ...] | None


@dataclass
class Shared:
    """Meshes that many leaves use (each may have thousands of ranks), kept once each, with this rank's coordinate."""

    items: list[MeshDescription] = field(default_factory=list)
    coordinates: list[Coordinate] = field(default_factory=list)
    numbers: dict[MeshDescription, int] = field(default_factory=dict)
    #: Results of codecs that serve all leaves of one mesh, shape and placement.
    known: dict[Any, Any] = field(default_factory=dict)
    #: Meshes that have a number, by the ``id()`` of the DeviceMesh.
    _known: dict[int, tuple[DeviceMesh, int]] = field(default_factory=dict)

    def number(self, mesh: DeviceMesh) -> int:
        known = self._known.get(id(mesh))
        if known is not None:
            return known[1]
        names, ranks, coordinate = mesh.mesh_dim_names, mesh.mesh, mesh.get_coordinate()
        described = MeshDescription(
            mesh.device_type, tuple(ranks.shape), tuple(ranks.flatten().tolist()), tuple(names) if names else None
        )
        if described not in self.numbers:
            self.numbers[described] = len(self.items)
            self.items.append(described)
            self.coordinates.append(None if coordinate is None else tuple(coordinate))
        self._known[id(mesh)] = mesh, self.numbers[described]
        return self.numbers[described]


@dataclass(frozen=True)
class BuildContext:
    """What codecs need to build leaves at the receiver: the source's meshes, and the caller's options."""

    shared: Sequence[Any] = ()
    #: The source's coordinate in each mesh of ``shared``.
    coordinates: Sequence[Coordinate] = ()
    mesh: DeviceMesh | Callable[[MeshDescription], DeviceMesh] | None = None
    weights_only_objects: bool = False


class Opened(NamedTuple):
    """An opened leaf: plain data that msgpack can carry, and its children."""

    meta: Any
    children: list[Any]


class Codec(Protocol):
    """One kind of composite leaf. ``ValueError`` from any method on received data means that the data is malformed."""

    name: str
    #: Whether received data may be invalid by itself (indices out of range), so that :meth:`settle` must check it.
    checks_data: bool

    def takes(self, leaf: object) -> bool:
        """Whether this codec handles ``leaf``."""

    def open(self, leaf: Any, shared: Shared) -> Opened:
        """Take ``leaf`` apart; :class:`CannotCarry` if that would lose something."""

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        """Check, before a byte moves, that :meth:`close` can build the leaf; :class:`CannotCarry` if it cannot."""

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> Any:
        """Build the leaf from data that has arrived."""

    def differences(self, source: Any, target: Any, build_context: BuildContext, target_shared: Shared) -> list[str]:
        """The reasons why data opened as ``source`` must not be written into a leaf opened as ``target``."""

    def settle(self, meta: Any, target: Any) -> None:
        """After all bytes have landed in ``target``: check them, and update what depends on them."""


def tensor_type(tensor: torch.Tensor) -> str:
    cls = type(tensor)
    return cls.__name__ if cls.__module__.startswith("torch") else f"{cls.__module__}.{cls.__qualname__}"
