"""Accepting an offer: read, checked, matched with the target, and planned, before a byte of data moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from transfuse.errors import ProtocolError, StateError, StepMismatch, TargetMismatch, TransfuseError, UnsupportedLeaf
from transfuse.limits import Limits
from transfuse.memory.assembly import Assembled, assemble
from transfuse.memory.digest import WIDE_BYTES
from transfuse.memory.landing import Landing
from transfuse.memory.needs import Late
from transfuse.plan import regions
from transfuse.plan.cohorts import Cohort
from transfuse.plan.match import Prepared, match, prepare
from transfuse.plan.parcels import Parcels
from transfuse.rules import MapPath
from transfuse.session.partial import Partial
from transfuse.state.leaves.codec import MeshDescription, Room
from transfuse.state.leaves.registry import Kinds
from transfuse.state.manifest import Manifest
from transfuse.wire import messages

__all__ = [
    "Accepted",
    "Described",
    "Wishes",
    "accept",
    "check",
    "compares_digests",
    "read_description",
    "read_offer",
]


@dataclass(frozen=True)
class Wishes:
    """What the receiver's caller asked for."""

    step: int | None = None
    #: The state_dict callback's tree (later prepared), or None to receive fresh; ``failure`` if the callback raised.
    target: object | None = None
    failure: BaseException | None = None
    verify: bool | None = None
    strict: bool = False
    atomic: bool = False
    mesh: DeviceMesh | Callable[[MeshDescription], DeviceMesh] | None = None
    weights_only_objects: bool = False
    same_host: bool = True
    relay: bool = True
    #: Keep what already matches; convert what is of another floating type; translate the source's names.
    delta: bool = False
    cast: bool = False
    map_path: MapPath | None = None
    #: Instead of a target: called with what there is, says what of it goes where.
    late: Late | None = None
    #: What an earlier receive has left.
    resume: Partial | None = None
    #: Sources that the caller named and that cannot even be asked, and why.
    absent: Mapping[str, BaseException] = field(default_factory=dict)


@dataclass
class Accepted:
    """Offers that have been read, checked, matched and planned. No byte of data has moved."""

    #: Of a source that has described the state.
    offer: messages.Offer
    parcel_bytes: int
    manifest: Manifest
    room: Room
    kinds: Kinds
    cut: Parcels
    landing: Landing | Assembled
    #: Storages of which only some parts are asked for, and which.
    apart: list[int]
    parts: list[int]

    @property
    def assembled(self) -> Assembled | None:
        """If each source brings its own part of the whole."""
        return self.landing if isinstance(self.landing, Assembled) else None


def read_offer(body: bytes | bytearray, limits: Limits, peer: int) -> messages.Offer:
    """Read an offer's bytes, which anybody may have written. Its manifest is looked at later."""
    try:
        offer = messages.decode(body, messages.Offer)
        if not 0 < offer.timeout < float("inf"):
            raise ValueError("an impossible timeout")
        if offer.parcel_bytes < limits.min_parcel_bytes or offer.parcel_bytes % 16 or offer.bursts_ahead < 1:
            raise ValueError("impossible sizes of parcels or bursts")
        rate = offer.max_bytes_per_second
        if rate is not None and not 0 < rate < float("inf"):
            raise ValueError("an impossible rate")
        if not 0 < offer.staged_bytes <= offer.burst_bytes:
            raise ValueError("impossible sizes of bursts")
        for name in offer.manifest.devices if offer.manifest is not None else ():
            torch.device(name)
        if len(offer.digest) != WIDE_BYTES or len(offer.likeness) != WIDE_BYTES:
            raise ValueError("digests of an impossible length")
        if max(offer.burst_bytes, offer.parcel_bytes) * offer.bursts_ahead > limits.staging_bytes:
            raise ValueError(
                f"{offer.bursts_ahead} bursts of {offer.burst_bytes} bytes do not fit into "
                f"TRANSFUSE_STAGING_BYTES={limits.staging_bytes}"
            )
    except (ValueError, RuntimeError) as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    return offer


class Described(NamedTuple):
    """An offer with its description, which has been read and speaks for all that claim to be like it."""

    offer: messages.Offer
    manifest: Manifest


def read_description(offer: messages.Offer, limits: Limits, peer: int) -> Described:
    """Read an offer's manifest, and make sure that it is what the offer's digests claim."""
    wire = offer.described
    try:
        manifest = Manifest.decode(wire, limits, offer.coordinates)
        if wire.digest() != offer.digest or manifest.likeness(wire) != offer.likeness:
            raise ValueError("its digests are those of another state")
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    return Described(offer, manifest)


def check(offer: messages.Offer, wishes: Wishes) -> None:
    """Raise unless a source has what the caller asked for, as far as the offer itself says."""
    if wishes.verify and not offer.digests:
        raise StateError("verify=True, but the source was made with verify=False and offers no digests")
    if wishes.step is None or wishes.step == offer.step:
        return
    if offer.step is None:
        raise StepMismatch(
            f"the receiver expects step {wishes.step}, but the source does not say which step it sends: pass "
            f"step={wishes.step} to send_checkpoint, or step= to serve"
        )
    raise StepMismatch(f"the source sends step {offer.step}, the receiver expects step {wishes.step}")


def accept(
    cohorts: Sequence[Cohort],
    offers: Mapping[int, messages.Offer],
    described: messages.Offer,
    wishes: Wishes,
    limits: Limits,
    device: torch.device,
    parcel_bytes: int,
) -> Accepted:
    """Turn offers of sources that agree into a plan; or raise a ``transfuse`` error.

    ``described`` is the offer whose manifest the first cohort has.
    """
    peer = next(iter(cohorts[0].members))
    alike = len(cohorts) == 1 and wishes.map_path is None and wishes.late is None
    alike = alike and len({(offer.digest, tuple(offer.coordinates)) for offer in offers.values()}) == 1
    try:
        if alike:
            try:
                return _accept_as_is(cohorts[0].manifest, described, wishes, limits, device, parcel_bytes)
            except (TargetMismatch, UnsupportedLeaf):
                if not wishes.cast and not _any_sharded(cohorts[0].manifest, wishes.target):
                    raise
        return _assemble(cohorts, described, wishes, limits, device, parcel_bytes)
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error


def _accept_as_is(
    manifest: Manifest,
    offer: messages.Offer,
    wishes: Wishes,
    limits: Limits,
    device: torch.device,
    parcel_bytes: int,
) -> Accepted:
    """A state that lands as it is."""
    room = Room(manifest.shared, manifest.coordinates, wishes.mesh, wishes.weights_only_objects)
    kinds = Kinds(limits)
    found = match(manifest, wishes.target, room=room, kinds=kinds, strict=wishes.strict, limits=limits)
    if wishes.atomic:
        found.apart, found.wanted = [], []
    boxes = regions.lay_out(manifest, found.apart, found.wanted)
    kept = None if wishes.resume is None else wishes.resume.memory
    landing = Landing(
        manifest, found, boxes, parcel_bytes, device=device, atomic=wishes.atomic, limits=limits, kept=kept
    )
    return Accepted(offer, parcel_bytes, manifest, room, kinds, landing.cut, landing, found.apart, found.wanted)


def _assemble(
    cohorts: Sequence[Cohort],
    offer: messages.Offer,
    wishes: Wishes,
    limits: Limits,
    device: torch.device,
    parcel_bytes: int,
) -> Accepted:
    """A state that is put together from what each source holds."""
    kinds, target = Kinds(limits), wishes.target
    cut, landing, room = assemble(
        cohorts,
        target if isinstance(target, Prepared) else prepare(target, limits),
        map_path=wishes.map_path,
        late=wishes.late,
        cast=wishes.cast,
        strict=wishes.strict,
        atomic=wishes.atomic,
        mesh=wishes.mesh,
        weights_only_objects=wishes.weights_only_objects,
        kinds=kinds,
        limits=limits,
        device=device,
        parcel_bytes=parcel_bytes,
        kept=None if wishes.resume is None else wishes.resume.memory,
    )
    return Accepted(offer, parcel_bytes, cohorts[0].manifest, room, kinds, cut, landing, [], [])


def _any_sharded(manifest: Manifest, target: object) -> bool:
    leaves = target.leaves if isinstance(target, Prepared) else []
    return manifest.is_sharded or any(isinstance(leaf, (DTensor, ShardedTensor)) for leaf in leaves)


def compares_digests(offer: messages.Offer, wishes: Wishes, device: torch.device) -> bool:
    """Whether digests are compared on the group route."""
    # Elsewhere than on the CPU a digest would first copy every byte to the host: only on request.
    return offer.digests and (device.type == "cpu" if wishes.verify is None else wishes.verify)
