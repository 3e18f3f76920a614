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
from transfuse.target import Landing

__all__ = ["Accepted", "Wishes", "accept"]


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


@dataclass
class Accepted:
    """An offer that has been read, checked, matched and planned. No byte of data has moved."""

    offer: messages.Offer
    manifest: Manifest
    room: Room
    kinds: Kinds
    cut: Parcels
    landing: Landing
    #: Whether digests are compared on the group route.
    digests: bool
    #: Storages of which only some parts are asked for, and which.
    apart: list[int]
    parts: list[int]


def accept(body: bytes | bytearray, wishes: Wishes, limits: Limits, peer: int, device: torch.device) -> Accepted:
    """Turn an offer's bytes, which anybody may have written, into a plan; or raise a ``transfuse`` error."""
    try:
        offer = messages.decode(body, messages.Offer)
        if wishes.step is not None and offer.step is not None and wishes.step != offer.step:
            raise StepMismatch(f"the source sends step {offer.step}, the receiver expects step {wishes.step}")
        if not 0 < offer.timeout < float("inf"):
            raise ValueError("an impossible timeout")
        if offer.parcel_bytes < limits.min_parcel_bytes or offer.parcel_bytes % 16 or offer.bursts_ahead < 1:
            raise ValueError("impossible sizes of parcels or bursts")
        rate = offer.max_bytes_per_second
        if rate is not None and not 0 < rate < float("inf"):
            raise ValueError("an impossible rate")
        if not 0 < offer.staged_bytes <= offer.burst_bytes:
            raise ValueError("impossible sizes of bursts")
        if max(offer.burst_bytes, offer.parcel_bytes) * offer.bursts_ahead > limits.staging_bytes:
            raise ValueError(
                f"{offer.bursts_ahead} bursts of {offer.burst_bytes} bytes do not fit into "
                f"TRANSFUSE_STAGING_BYTES={limits.staging_bytes}"
            )
        manifest = Manifest.decode(offer.manifest, limits)
        room = Room(manifest.shared, wishes.mesh, wishes.weights_only_objects)
        kinds = Kinds(limits)
        found = match(manifest, wishes.target, room=room, kinds=kinds, strict=wishes.strict, limits=limits)
        if wishes.atomic:
            found.apart, found.wanted = [], []
        boxes = plan.lay_out(manifest, found.apart, found.wanted)
        landing = Landing(manifest, found, boxes, device=device, atomic=wishes.atomic, limits=limits)
        cut = parcels.cut(boxes, offer.parcel_bytes)
        digests = _digests(offer, wishes, device)
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    return Accepted(offer, manifest, room, kinds, cut, landing, digests, found.apart, found.wanted)


def _digests(offer: messages.Offer, wishes: Wishes, device: torch.device) -> bool:
    if wishes.verify and not offer.digests:
        raise StateError("verify=True, but the source was made with verify=False and offers no digests")
    # Elsewhere than on the CPU a digest would first copy every byte to the host: only on request.
    return offer.digests and (device.type == "cpu" if wishes.verify is None else wishes.verify)
