"""Accepting an offer: read, checked, matched with the target, and planned, before a byte of data moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from transfuse.errors import ProtocolError, StateError, StepMismatch, TargetMismatch, TransfuseError, UnsupportedLeaf
from transfuse.limits import Limits
from transfuse.memory.assembly import Assembled, assemble
from transfuse.memory.digest import WIDE_BYTES
from transfuse.memory.landing import Landing
from transfuse.plan import regions
from transfuse.plan.cohorts import Cohort
from transfuse.plan.match import Prepared, match, prepare
from transfuse.plan.parcels import Parcels
from transfuse.session.context import Context, Request
from transfuse.state.leaves.codec import Room
from transfuse.state.leaves.registry import Kinds
from transfuse.state.manifest import Manifest
from transfuse.wire import messages

__all__ = [
    "Accepted",
    "Described",
    "accept",
    "check",
    "compares_digests",
    "read_description",
    "read_offer",
]


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


def check(offer: messages.Offer, request: Request) -> None:
    """Raise unless a source has what the caller asked for, as far as the offer itself says."""
    if request.options.verify and not offer.digests:
        raise StateError("verify=True, but the source was made with verify=False and offers no digests")
    if request.step is None or request.step == offer.step:
        return
    if offer.step is None:
        raise StepMismatch(
            f"the receiver expects step {request.step}, but the source does not say which step it sends: pass "
            f"step={request.step} to send_checkpoint, or step= to serve"
        )
    raise StepMismatch(f"the source sends step {offer.step}, the receiver expects step {request.step}")


def accept(
    cohorts: Sequence[Cohort],
    offers: Mapping[int, messages.Offer],
    described: messages.Offer,
    request: Request,
    context: Context,
    parcel_bytes: int,
) -> Accepted:
    """Turn offers of sources that agree into a plan; or raise a ``transfuse`` error.

    ``described`` is the offer whose manifest the first cohort has.
    """
    peer = next(iter(cohorts[0].members))
    alike = len(cohorts) == 1 and request.options.map_path is None and request.late is None
    alike = alike and len({(offer.digest, tuple(offer.coordinates)) for offer in offers.values()}) == 1
    try:
        if alike:
            try:
                return _accept_as_is(cohorts[0].manifest, described, request, context, parcel_bytes)
            except (TargetMismatch, UnsupportedLeaf):
                if not request.options.cast and not _any_sharded(cohorts[0].manifest, request.target):
                    raise
        return _assemble(cohorts, described, request, context, parcel_bytes)
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error


def _accept_as_is(
    manifest: Manifest,
    offer: messages.Offer,
    request: Request,
    context: Context,
    parcel_bytes: int,
) -> Accepted:
    """A state that lands as it is."""
    options, limits, device = request.options, context.limits, context.device
    room = Room(manifest.shared, manifest.coordinates, options.mesh, options.weights_only_objects)
    kinds = Kinds(limits)
    found = match(manifest, request.target, room=room, kinds=kinds, strict=options.strict, limits=limits)
    if options.atomic:
        found.apart, found.wanted = [], []
    boxes = regions.lay_out(manifest, found.apart, found.wanted)
    kept = None if request.resume is None else request.resume.memory
    landing = Landing(
        manifest, found, boxes, parcel_bytes, device=device, atomic=options.atomic, limits=limits, kept=kept
    )
    return Accepted(
        offer=offer,
        parcel_bytes=parcel_bytes,
        manifest=manifest,
        room=room,
        kinds=kinds,
        cut=landing.cut,
        landing=landing,
        apart=found.apart,
        parts=found.wanted,
    )


def _assemble(
    cohorts: Sequence[Cohort],
    offer: messages.Offer,
    request: Request,
    context: Context,
    parcel_bytes: int,
) -> Accepted:
    """A state that is put together from what each source holds."""
    limits, target = context.limits, request.target
    kinds = Kinds(limits)
    cut, landing, room = assemble(
        cohorts,
        target if isinstance(target, Prepared) else prepare(target, limits),
        request.options,
        late=request.late,
        kinds=kinds,
        limits=limits,
        device=context.device,
        parcel_bytes=parcel_bytes,
        kept=None if request.resume is None else request.resume.memory,
    )
    return Accepted(
        offer=offer,
        parcel_bytes=parcel_bytes,
        manifest=cohorts[0].manifest,
        room=room,
        kinds=kinds,
        cut=cut,
        landing=landing,
        apart=[],
        parts=[],
    )


def _any_sharded(manifest: Manifest, target: object) -> bool:
    leaves = target.leaves if isinstance(target, Prepared) else []
    return manifest.is_sharded or any(isinstance(leaf, (DTensor, ShardedTensor)) for leaf in leaves)


def compares_digests(offer: messages.Offer, request: Request, device: torch.device) -> bool:
    """Whether digests are compared on the group route."""
    # Elsewhere than on the CPU a digest would first copy every byte to the host: only on request.
    return offer.digests and (device.type == "cpu" if request.options.verify is None else request.options.verify)
