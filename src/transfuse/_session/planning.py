"""Accepting offers: read and check them, match them with the target, and plan, before a byte of data moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from transfuse._errors import ProtocolError, StateError, StepMismatch, TransfuseError
from transfuse._limits import Limits
from transfuse._memory import streams
from transfuse._memory.as_is import AsIs, ReusablePlan
from transfuse._memory.assembled import Assembly, assemble
from transfuse._memory.digest import WIDE_BYTES
from transfuse._memory.fresh import MemorySupply
from transfuse._memory.landing import Landing
from transfuse._options import Options
from transfuse._plan.cohorts import Cohort
from transfuse._plan.match import Match, Prepared, compare, prepare, promise_fresh
from transfuse._plan.outline import Outline, outline
from transfuse._plan.parcels import Parcels
from transfuse._plan.shares import Shares
from transfuse._session.context import Context, ReceiveRequest
from transfuse._session.remembered import PlanKey, Remembered, Structure
from transfuse._state.leaves.codec import BuildContext, Coordinate
from transfuse._state.leaves.dtensors import is_dtensor_class
from transfuse._state.leaves.registry import Registry
from transfuse._state.manifest import Manifest, Wire
from transfuse._wire import messages


@dataclass
class Accepted:
    """The plan that was made from the offers. No byte of data has moved."""

    #: The offer of a source that has described the state.
    offer: messages.Offer
    parcel_bytes: int
    manifest: Manifest
    build_context: BuildContext
    registry: Registry
    landing: Landing
    #: All cohorts, and the target that they were matched with.
    cohorts: Sequence[Cohort]
    target: Prepared
    #: Remembers the plan for a later receive. Called when this receive has ended well, and needs the plan no more.
    remember: Callable[[], None] | None = None

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
        if (len(offer.digest), len(offer.likeness), len(offer.structure)) != (WIDE_BYTES, WIDE_BYTES, 32):
            raise ValueError("digests of an impossible length")
        if max(offer.burst_bytes, offer.parcel_bytes) * offer.bursts_ahead > limits.staging_bytes:
            raise ValueError(
                f"{offer.bursts_ahead} bursts of {offer.burst_bytes} bytes do not fit into "
                f"TRANSFUSE_STAGING_BYTES={limits.staging_bytes}"
            )
    except (ValueError, RuntimeError) as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    return offer


class OfferWithManifest(NamedTuple):
    """An offer and its manifest, decoded. The manifest describes all offers with the same likeness."""

    offer: messages.Offer
    manifest: Manifest


def is_described(offer: messages.Offer, remembered: Remembered) -> bool:
    """Whether an offer has a manifest, or only the values of a structure that this end remembers."""
    return offer.manifest is not None or (
        offer.values is not None and remembered.structure(offer.structure) is not None
    )


def read_description(
    offer: messages.Offer, limits: Limits, peer: int, remembered: Remembered | None = None
) -> OfferWithManifest:
    """The manifest of an offer that :func:`is_described`. The offer's digests must be those of this manifest."""
    try:
        wire, manifest = read_manifest(offer, limits, remembered or Remembered())
        if wire.digest() != offer.digest or manifest.likeness(wire) != offer.likeness:
            raise ValueError("its digests are those of another state")
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    return OfferWithManifest(offer, manifest)


def read_manifest(offer: messages.Offer, limits: Limits, remembered: Remembered) -> Structure:
    """The manifest of an offer that :func:`is_described`, read or remembered; ``ValueError`` if it is malformed."""
    wire, known = offer.manifest, remembered.structure(offer.structure)
    if known is None:
        if wire is None:
            raise ValueError("it has no description")
        manifest = Manifest.decode(wire, limits, offer.coordinates)
        _check_structure(wire, offer)
        manifest.structure, manifest.structure_likeness = offer.structure, manifest.likeness(wire.without_values())
        known = Structure(wire, manifest)
        remembered.keep_structure(known)
        return known
    if wire is None:
        manifest = known.manifest.with_values(offer.values or [], offer.coordinates)
        return Structure(msgspec.structs.replace(known.wire, details=manifest.details), manifest)
    _check_structure(wire, offer)
    if len(wire.details) != len(known.wire.details):
        raise ValueError(f"{len(wire.details)} details for {len(known.wire.details)} leaves that need one")
    return Structure(wire, known.manifest.with_values(wire.values, offer.coordinates))


def _check_structure(wire: Wire, offer: messages.Offer) -> None:
    if wire.structure() != offer.structure:
        raise ValueError("its digests are those of another state")


def check(offer: messages.Offer, request: ReceiveRequest) -> None:
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
    request: ReceiveRequest,
    context: Context,
    parcel_bytes: int,
) -> Accepted:
    """Make a plan from the offers of sources that agree, or raise a ``transfuse`` error.

    ``described`` is the offer that brought the first cohort's manifest.
    """
    options, limits = request.options, context.limits
    peer, manifest = next(iter(cohorts[0].members)), cohorts[0].manifest
    build_context = BuildContext(manifest.shared, manifest.coordinates, options.mesh, options.weights_only_objects)
    registry = Registry(limits)
    supply = MemorySupply(context.device, limits, None if request.resume is None else request.resume.memory)
    try:
        target = request.target if isinstance(request.target, Prepared) else prepare(request.target, limits)
        as_is = _all_have_the_same(cohorts, offers, request)
        assembles = _may_be_assembled(manifest, target, options)
        key = _key(cohorts, request, parcel_bytes, as_is=as_is, anybody=as_is and not assembles)
        mine = None if key is None else request.outline or outline(target, limits)
        kept = None if key is None or mine is None else context.remembered.take_plan(key, mine)
        found: Match | TransfuseError | None = None
        if isinstance(kept, ReusablePlan):
            assert mine is not None
            found = kept.match(mine, target.leaves)
            unsupported = promise_fresh(manifest, found, build_context, registry)
            if unsupported is not None:
                raise unsupported
        elif kept is None and as_is:
            found = compare(manifest, target, build_context=build_context, registry=registry, strict=options.strict)
            if isinstance(found, TransfuseError) and not assembles:
                raise found
        if kept is not None:
            context.report.reuse("plan")
        plan: AsIs | Assembly
        with streams.for_the_caller():
            if isinstance(found, Match):
                before = kept if isinstance(kept, ReusablePlan) else None
                plan = AsIs(manifest, found, supply, parcel_bytes=parcel_bytes, atomic=options.atomic, kept=before)
            elif isinstance(kept, Assembly):
                assert mine is not None
                plan = kept
                plan.bind(cohorts, target, mine)
            else:
                plan = assemble(
                    cohorts,
                    target,
                    build_context,
                    registry,
                    options,
                    supply,
                    parcel_bytes=parcel_bytes,
                    late=request.late,
                )
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    remember = None if key is None or mine is None else partial(_keep, context.remembered, key, mine, plan)
    return Accepted(
        described, parcel_bytes, manifest, build_context, registry, Landing(plan), cohorts, target, remember
    )


def _keep(remembered: Remembered, key: PlanKey, mine: Outline, plan: AsIs | Assembly) -> None:
    kept = plan.keep(mine)
    if kept is not None:
        remembered.keep_plan(key, mine, kept)


def _key(
    cohorts: Sequence[Cohort], request: ReceiveRequest, parcel_bytes: int, *, as_is: bool, anybody: bool
) -> PlanKey | None:
    """The key of a plan; None if it depends on more than can be compared.

    ``as_is``: all sources have the same manifest, and where bytes lie in their memory counts. ``anybody``: the plan is
    the same whichever sources are used.
    """
    rules = request.options.map_path
    if request.late is not None or request.resume is not None or callable(rules):
        return None
    if not all(cohort.manifest.structure for cohort in cohorts):
        return None
    sources = tuple(
        (
            cohort.manifest.structure if as_is else cohort.manifest.structure_likeness,
            tuple(cohort.manifest.coordinates) if as_is else (),
            () if anybody else _members(cohort),
        )
        for cohort in cohorts
    )
    options = request.options
    return PlanKey(sources, parcel_bytes, options.atomic, options.strict, options.cast, repr(rules))


def _members(cohort: Cohort) -> tuple[tuple[int, tuple[Coordinate, ...]], ...]:
    return tuple((rank, tuple(coordinates)) for rank, coordinates in sorted(cohort.members.items()))


def _all_have_the_same(
    cohorts: Sequence[Cohort], offers: Mapping[int, messages.Offer], request: ReceiveRequest
) -> bool:
    """Whether all sources have the same manifest and coordinates, and no rules apply: the state may land as it is."""
    if len(cohorts) > 1 or request.options.map_path is not None or request.late is not None:
        return False
    return len({(offer.digest, tuple(offer.coordinates)) for offer in offers.values()}) == 1


def _may_be_assembled(manifest: Manifest, target: Prepared, options: Options) -> bool:
    """Whether a state that cannot land as it is may be assembled instead: converted, or sharded differently."""
    if options.cast or manifest.is_sharded:
        return True
    return any(is_dtensor_class(cls) or issubclass(cls, ShardedTensor) for cls in set(map(type, target.leaves)))


def compares_digests(offer: messages.Offer, request: ReceiveRequest, device: torch.device) -> bool:
    """Whether the receiver compares digests on the group route."""
    # On an accelerator, hashing first copies every byte to the host, so it is done only with verify=True.
    return offer.digests and (device.type == "cpu" if request.options.verify is None else request.options.verify)
