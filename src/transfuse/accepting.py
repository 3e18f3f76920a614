"""Accepting an offer: read, checked, matched with the target, and planned, before a byte of data moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from transfuse import messages, parcels, plan
from transfuse.errors import ProtocolError, StateError, StepMismatch, TransfuseError
from transfuse.leaves.codec import MeshDescription, Room
from transfuse.leaves.kinds import Kinds
from transfuse.limits import Limits
from transfuse.manifest import Manifest
from transfuse.matching import match
from transfuse.parcels import Parcels
from transfuse.partial import Partial
from transfuse.target import Landing

__all__ = ["Accepted", "Wishes", "accept", "check", "compares_digests", "read_offer"]


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
    #: What an earlier receive has left.
    resume: Partial | None = None


@dataclass
class Accepted:
    """An offer that has been read, checked, matched and planned. No byte of data has moved."""

    offer: messages.Offer
    parcel_bytes: int
    manifest: Manifest
    room: Room
    kinds: Kinds
    cut: Parcels
    landing: Landing
    #: Storages of which only some parts are asked for, and which.
    apart: list[int]
    parts: list[int]


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
        for name in offer.manifest.devices:  # In these alone, sources of the same state may differ.
            torch.device(name)
        if max(offer.burst_bytes, offer.parcel_bytes) * offer.bursts_ahead > limits.staging_bytes:
            raise ValueError(
                f"{offer.bursts_ahead} bursts of {offer.burst_bytes} bytes do not fit into "
                f"TRANSFUSE_STAGING_BYTES={limits.staging_bytes}"
            )
    except (ValueError, RuntimeError) as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    return offer


def check(offer: messages.Offer, wishes: Wishes) -> None:
    """Raise unless a source has what the caller asked for, as far as the offer itself says."""
    if wishes.verify and not offer.digests:
        raise StateError("verify=True, but the source was made with verify=False and offers no digests")
    if wishes.step is not None and offer.step is not None and wishes.step != offer.step:
        raise StepMismatch(f"the source sends step {offer.step}, the receiver expects step {wishes.step}")


def accept(
    offer: messages.Offer, wishes: Wishes, limits: Limits, peer: int, device: torch.device, parcel_bytes: int
) -> Accepted:
    """Turn an offer into a plan; or raise a ``transfuse`` error."""
    try:
        manifest = Manifest.decode(offer.manifest, limits)
        room = Room(manifest.shared, wishes.mesh, wishes.weights_only_objects)
        kinds = Kinds(limits)
        found = match(manifest, wishes.target, room=room, kinds=kinds, strict=wishes.strict, limits=limits)
        if wishes.atomic:
            found.apart, found.wanted = [], []
        boxes = plan.lay_out(manifest, found.apart, found.wanted)
        kept = None if wishes.resume is None else wishes.resume.memory
        landing = Landing(manifest, found, boxes, device=device, atomic=wishes.atomic, limits=limits, kept=kept)
        cut = parcels.cut(boxes, parcel_bytes)
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    return Accepted(offer, parcel_bytes, manifest, room, kinds, cut, landing, found.apart, found.wanted)


def compares_digests(offer: messages.Offer, wishes: Wishes, device: torch.device) -> bool:
    """Whether digests are compared on the group route."""
    # Elsewhere than on the CPU a digest would first copy every byte to the host: only on request.
    return offer.digests and (device.type == "cpu" if wishes.verify is None else wishes.verify)
