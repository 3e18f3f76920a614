"""Accepting offers: read and check them, match them with the target, and plan, before a byte of data moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from transfuse.errors import ProtocolError, StateError, StepMismatch, TransfuseError
from transfuse.limits import Limits
from transfuse.memory.arena import Supply
from transfuse.memory.as_is import AsIs
from transfuse.memory.assembled import assemble
from transfuse.memory.digest import WIDE_BYTES
from transfuse.memory.landing import Landing, Plan
from transfuse.options import Options
from transfuse.plan.cohorts import Cohort
from transfuse.plan.match import Match, Prepared, compare, prepare
from transfuse.plan.parcels import Parcels
from transfuse.plan.shares import Shares
from transfuse.session.context import Context, Request
from transfuse.state.leaves.codec import BuildContext
from transfuse.state.leaves.registry import Registry
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
    """The plan that was made from the offers. No byte of data has moved."""

    #: The offer of a source that has described the state.
    offer: messages.Offer
    parcel_bytes: int
    manifest: Manifest
    build_context: BuildContext
    kinds: Registry
    landing: Landing

    @property
    def cut(self) -> Parcels:
        return self.landing.cut

    @property
    def shares(self) -> Shares:
        """The share of each source: what it can send."""
        return self.landing.shares


def read_offer(body: bytes | bytearray, limits: Limits, peer: int) -> messages.Offer:
    """Decode an offer and check its numbers; a hostile peer may have written it. The manifest is checked later."""
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
    """An offer and its manifest, decoded. The manifest describes all offers with the same likeness."""

    offer: messages.Offer
    manifest: Manifest


def read_description(offer: messages.Offer, limits: Limits, peer: int) -> Described:
    """Decode an offer's manifest, and check that the offer's digests are those of this manifest."""
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
    """Raise if the offer itself shows that the source does not have what the caller asked for."""
    if request.options.verify and not offer.digests:
        raise StateError(
            "the receiver has verify=True, but the source has verify=False and offers no digests: leave verify= out at "
            "one of the two"
        )
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
    """Make a plan from the offers of sources that agree, or raise a ``transfuse`` error.

    ``described`` is the offer that brought the first cohort's manifest.
    """
    options, limits = request.options, context.limits
    peer, manifest = next(iter(cohorts[0].members)), cohorts[0].manifest
    build_context = BuildContext(manifest.shared, manifest.coordinates, options.mesh, options.weights_only_objects)
    kinds = Registry(limits)
    supply = Supply(context.device, limits, None if request.resume is None else request.resume.memory)
    try:
        target = request.target if isinstance(request.target, Prepared) else prepare(request.target, limits)
        found: Match | TransfuseError | None = None
        if _all_have_the_same(cohorts, offers, request):
            found = compare(manifest, target, build_context=build_context, kinds=kinds, strict=options.strict)
            if isinstance(found, TransfuseError) and not _may_be_assembled(manifest, target, options):
                raise found
        plan: Plan
        if isinstance(found, Match):
            plan = AsIs(manifest, found, supply, parcel_bytes=parcel_bytes, atomic=options.atomic)
        else:
            plan = assemble(
                cohorts, target, build_context, kinds, options, supply, parcel_bytes=parcel_bytes, late=request.late
            )
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    return Accepted(described, parcel_bytes, manifest, build_context, kinds, Landing(plan))


def _all_have_the_same(cohorts: Sequence[Cohort], offers: Mapping[int, messages.Offer], request: Request) -> bool:
    """Whether all sources have the same manifest and coordinates, and no rules apply: the state may land as it is."""
    if len(cohorts) > 1 or request.options.map_path is not None or request.late is not None:
        return False
    return len({(offer.digest, tuple(offer.coordinates)) for offer in offers.values()}) == 1


def _may_be_assembled(manifest: Manifest, target: Prepared, options: Options) -> bool:
    """Whether a state that cannot land as it is may be assembled instead: converted, or sharded differently."""
    if options.cast or manifest.is_sharded:
        return True
    return any(isinstance(leaf, (DTensor, ShardedTensor)) for leaf in target.leaves)


def compares_digests(offer: messages.Offer, request: Request, device: torch.device) -> bool:
    """Whether the receiver compares digests on the group route."""
    # On an accelerator, hashing first copies every byte to the host, so it is done only with verify=True.
    return offer.digests and (device.type == "cpu" if request.options.verify is None else request.options.verify)
