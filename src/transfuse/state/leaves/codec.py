"""What every codec of a composite leaf is: how to open it into parts, close it again, and check a target.

A *part* is a plain strided tensor. A leaf that is one is carried as it is; every other leaf is opened by the codec
of its kind into plain data and children, each child a part or a leaf to be opened in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["BuildContext", "CannotCarry", "Codec", "Coordinate", "MeshDescription", "Opened", "Shared"]


class CannotCarry(Exception):
    """Why a leaf cannot be carried exactly, and the remedy. Callers add the leaf's path."""


class MeshDescription(NamedTuple):
    """A DeviceMesh as plain data: what a ``mesh=`` callable is given. ``ranks`` are global, in row-major order."""

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dim_names: tuple[str, ...] | None


#: A rank's place in a mesh; None outside of it.
Coordinate = tuple[int, ...] | None


@dataclass
class Shared:
    """Meshes that many leaves have in common (of a thousand ranks, perhaps), each kept once, with this rank's place."""

    items: list[MeshDescription] = field(default_factory=list)
    coordinates: list[Coordinate] = field(default_factory=list)
    numbers: dict[MeshDescription, int] = field(default_factory=dict)
    #: What codecs have worked out about leaves that are alike.
    known: dict[Any, Any] = field(default_factory=dict)
    #: Meshes that have been described, by their id.
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
    """What a receiver gives codecs to build leaves with."""

    shared: Sequence[Any] = ()
    #: The source's place in each of these meshes.
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
    #: Whether data that has landed may be wrong in itself (indices out of range), so that :meth:`settle` checks it.
    checks_data: bool

    def takes(self, leaf: object) -> bool:
        """Whether this codec is the one for ``leaf``."""

    def open(self, leaf: Any, shared: Shared) -> Opened:
        """Take ``leaf`` apart; :class:`CannotCarry` if that would lose something."""

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        """Called before a byte moves: :class:`CannotCarry` if :meth:`close` would not be able to build the leaf."""

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> Any:
        """Build the leaf from data that has arrived."""

    def differences(self, source: Any, target: Any, build_context: BuildContext, target_shared: Shared) -> list[str]:
        """Why data opened as ``source`` must not be written into a leaf opened as ``target``."""

    def settle(self, meta: Any, target: Any) -> None:
        """Called after all bytes have landed in ``target``: check and finish what depends on them."""


def tensor_type(tensor: torch.Tensor) -> str:
    cls = type(tensor)
    return cls.__name__ if cls.__module__.startswith("torch") else f"{cls.__module__}.{cls.__qualname__}"
