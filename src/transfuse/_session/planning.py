"""Planning: match the offers of sources that agree with the target, before a byte of data moves.

The outcome is :class:`Accepted`: where everything lands, and the ledger of what is still to come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from transfuse._errors import ProtocolError, TransfuseError
from transfuse._memory import packing, streams
from transfuse._memory.as_is import AsIs, ReusablePlan
from transfuse._memory.assembled import Assembly, assemble
from transfuse._memory.compared import compared_landing
from transfuse._memory.digest import WIDE_BYTES, WideDigests
from transfuse._memory.fresh import MemorySupply
from transfuse._memory.held import HeldLanding
from transfuse._memory.landing import Landing
from transfuse._memory.patches import Patch, apply_all
from transfuse._options import Options
from transfuse._plan.cohorts import Cohort
from transfuse._plan.match import Match, Prepared, compare, prepare, promise_fresh
from transfuse._plan.outline import Outline, outline
from transfuse._session.comparing import ComparingLedger
from transfuse._session.context import Context, ReceiveRequest
from transfuse._session.ledger import Ledger
from transfuse._session.remembered import PlanKey, Remembered
from transfuse._state.leaves.block import Block
from transfuse._state.leaves.codec import BuildContext, Coordinate
from transfuse._state.leaves.dtensors import is_dtensor_class
from transfuse._state.leaves.registry import Registry
from transfuse._state.manifest import Manifest
from transfuse._state.tensors import Bools
from transfuse._wire.messages import Offer

logger = logging.getLogger("transfuse")


@dataclass
class Accepted:
    """The plan that was made from the offers, and its ledger. No byte of data has moved."""

    #: The offer of a source that has described the state.
    offer: Offer
    parcel_bytes: int
    build_context: BuildContext
    registry: Registry
    landing: Landing
    ledger: Ledger
    #: Which parcels an earlier receive left, or False if this receive does not resume.
    resumed: Bools | bool
    #: All cohorts, and the target that they were matched with.
    cohorts: Sequence[Cohort]
    target: Prepared
    #: Remembers the plan for a later receive. Called when this receive has ended well, and needs the plan no more.
    remember: Callable[[], None]

    def covered_by(self, ranks: set[int]) -> bool:
        """Whether these sources hold all parcels that have not landed. Call it under the ledger's lock."""
        return bool((self.ledger.landed | self.landing.shares.covered_by(frozenset(ranks))).all())

    @property
    def kept(self) -> Bools:
        """Which parcels lie in the targets since before this receive, and are right, if need be with their patches."""
        patched = self.ledger.patched & self.landing.patched if isinstance(self.landing, HeldLanding) else False
        kept: Bools = (self.ledger.kept & ~np.asarray(self.resumed)) | patched
        return kept

    def check_room(self) -> None:
        """Raise if more has to be held aside than may be allocated. Call it under the ledger's lock."""
        if isinstance(self.landing, HeldLanding):
            self.landing.check_room(self.kept | (self.ledger.uncompared & ~np.asarray(self.resumed)))

    def digests_of(self, numbers: Sequence[int], seconds: float) -> WideDigests:
        """Digests of parcels that may be here already. Those that were in the targets are remembered."""
        chosen, before = np.asarray(numbers, dtype=np.int64), self._were_here(numbers)
        result = np.zeros(len(chosen), dtype=f"V{WIDE_BYTES}")
        for landing, some in ((self.landing.before, before), (self.landing, ~before)):
            digests = packing.wide_digests_of(self.landing.cut, landing, chosen[some].tolist(), seconds)
            result[some] = np.frombuffer(b"".join(digests), dtype=result.dtype)
        if isinstance(self.landing, HeldLanding):
            self.landing.keep_digests(chosen[before], result[before])
        return result

    def _were_here(self, numbers: Sequence[int]) -> Bools:
        """Which of these parcels may lie in the targets since before this receive."""
        chosen = np.asarray(numbers, dtype=np.int64)
        result: Bools = (self.ledger.doubted(numbers) < 0) & ~np.broadcast_to(self.resumed, len(self.ledger))[chosen]
        return result

    def patch(self, patches: Sequence[Patch], seconds: float) -> Bools:
        """Apply patches to parcels that were compared, or hold them aside. Return which are right then."""
        result = np.zeros(len(patches), dtype=bool)
        held = self.landing if isinstance(self.landing, HeldLanding) else None
        before = self._were_here([patch.number for patch in patches]) & (held is not None)
        for some, is_held in ((before, True), (~before, False)):
            chosen = [patches[i] for i in np.flatnonzero(some).tolist()]
            if held is not None and is_held:
                result[some] = held.hold_patches(chosen, seconds)
            elif chosen:
                result[some] = apply_all(self.landing.cut, self.landing, chosen, seconds)
        return result

    def leaves_of(self, numbers: Sequence[int]) -> list[str]:
        """Paths of the leaves to which these parcels belong."""
        regions = [extent.region for number in numbers for extent in self.landing.cut.extents(number)]
        return self.landing.paths_of(regions)


def accept(
    cohorts: Sequence[Cohort],
    offers: Mapping[int, Offer],
    described: Offer,
    request: ReceiveRequest,
    context: Context,
    parcel_bytes: int,
    changed: threading.Condition,
) -> Accepted:
    """Make a plan from the offers of sources that agree, or raise a ``transfuse`` error.

    ``described`` is the offer that brought the first cohort's manifest. ``changed`` is the ledger's lock.
    """
    options, limits = request.options, context.limits
    peer, manifest = next(iter(cohorts[0].members)), cohorts[0].manifest
    build_context = BuildContext(manifest.shared, manifest.coordinates, options.mesh, options.weights_only_objects)
    registry = Registry(limits)
    supply = MemorySupply(context.device, limits, None if request.resume is None else request.resume.memory)
    try:
        target = request.target if isinstance(request.target, Prepared) else prepare(request.target, limits)
        if request.only_compares:
            with streams.for_the_caller():
                compared = compared_landing(
                    cohorts, target, build_context, registry, options, supply, parcel_bytes=parcel_bytes
                )
            streams.catch_up()
            every = ComparingLedger.of_all(compared.cut.payload, changed)
            return Accepted(
                described,
                parcel_bytes,
                build_context,
                registry,
                compared,
                every,
                False,
                cohorts,
                target,
                lambda: None,
            )
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
        landing: AsIs | Assembly
        with streams.for_the_caller():
            if isinstance(found, Match):
                before = kept if isinstance(kept, ReusablePlan) else None
                landing = AsIs(manifest, found, supply, parcel_bytes=parcel_bytes, kept=before)
            elif isinstance(kept, Assembly):
                assert mine is not None
                landing = kept
                landing.bind(cohorts, target, mine)
            else:
                landing = assemble(
                    cohorts,
                    target,
                    build_context,
                    registry,
                    options,
                    supply,
                    parcel_bytes=parcel_bytes,
                    late=request.late,
                )
            lands: Landing = landing
            if (request.hold or options.atomic) and landing.in_targets.any():
                lands = HeldLanding(landing, supply, delta=options.delta)
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    ledger, resumed = _open_ledger(lands, request, context, changed)
    accepted = Accepted(
        described,
        parcel_bytes,
        build_context,
        registry,
        lands,
        ledger,
        resumed,
        cohorts,
        target,
        partial(_remember, context.remembered, key, mine, landing),
    )
    accepted.check_room()
    return accepted


def _remember(remembered: Remembered, key: PlanKey | None, mine: Outline | None, landing: AsIs | Assembly) -> None:
    kept = None if key is None or mine is None else landing.keep(mine)
    if kept is not None:
        assert key is not None
        assert mine is not None
        remembered.keep_plan(key, mine, kept)


def _open_ledger(
    landing: Landing, request: ReceiveRequest, context: Context, changed: threading.Condition
) -> tuple[Ledger, Bools | bool]:
    """Make the ledger, and mark parcels that may be here already: left by an earlier receive, or in the targets.

    A comparison with the sources' digests then shows which of these parcels are right. The second result says which of
    them an earlier receive left.
    """
    cut, resume = landing.cut, request.resume
    ledger = Ledger(cut.payload, changed)
    claimed: Bools = np.zeros(len(cut), dtype=bool)
    resumed: Bools | bool = False
    streams.catch_up()
    if resume is not None:
        resume.spent = True
        if resume.fingerprint == landing.fingerprint and len(resume.landed) == len(cut):
            claimed |= resume.landed & cut.of_all_regions(landing.has_single_place)
            resumed = claimed.copy()
            for number in np.flatnonzero(claimed).tolist():
                landing.touch(range(int(cut.first[number]), int(cut.first[number] + cut.count[number])))
        else:
            logger.warning("the target or the plan differs from the receive to resume: everything is fetched")
    if request.options.delta:
        claimed |= cut.of_all_regions(landing.held)
    if claimed.any():
        ledger.keep(np.flatnonzero(claimed))
    return ledger, resumed


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
    return PlanKey(sources, parcel_bytes, options.strict, options.cast, repr(rules))


def _members(cohort: Cohort) -> tuple[tuple[int, tuple[Coordinate, ...]], ...]:
    return tuple((rank, tuple(coordinates)) for rank, coordinates in sorted(cohort.members.items()))


def _all_have_the_same(cohorts: Sequence[Cohort], offers: Mapping[int, Offer], request: ReceiveRequest) -> bool:
    """Whether all sources have the same manifest and coordinates, and no rules apply: the state may land as it is."""
    if len(cohorts) > 1 or request.options.map_path is not None or request.late is not None:
        return False
    return len({(offer.digest, tuple(offer.coordinates)) for offer in offers.values()}) == 1


def _may_be_assembled(manifest: Manifest, target: Prepared, options: Options) -> bool:
    """Whether a state that cannot land as it is may be assembled instead: converted, or sharded differently."""
    if options.cast or manifest.is_sharded:
        return True
    return any(
        is_dtensor_class(cls) or issubclass(cls, (ShardedTensor, Block)) for cls in set(map(type, target.leaves))
    )
