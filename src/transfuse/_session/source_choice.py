"""Choosing: which of several sources offer the same state, and how the others differ. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transfuse._errors import SourcesDiffer, TransfuseError
from transfuse._plan.apply_rules import link
from transfuse._plan.catalogue import Catalogue
from transfuse._plan.cohorts import Cohort, difference
from transfuse._plan.local_blocks import global_shape
from transfuse._plan.match import Prepared
from transfuse._session.context import ReceiveRequest
from transfuse._session.offers import OfferWithManifest, check
from transfuse._session.planning import Accepted
from transfuse._state import trees
from transfuse._state.manifest import Manifest
from transfuse._wire.messages import Offer


class Choice(NamedTuple):
    """The sources that agree, their cohorts and offers, and why the other sources are not used."""

    cohorts: list[Cohort]
    offers: dict[int, Offer]
    dropped: dict[int, TransfuseError]


class _AtStep(NamedTuple):
    """A cohort, and the step that its sources offer."""

    step: int | None
    cohort: Cohort


def choose(
    ranks: Sequence[int],
    offers: Mapping[int, Offer],
    described: Mapping[bytes, OfferWithManifest],
    request: ReceiveRequest,
) -> Choice:
    """Choose the largest set of sources that agree. Sources that do not offer the requested step do not count.

    Sources agree if they describe the same state, or shards or parts of it that complete each other. ``described`` has
    one offer of each likeness. Raises :class:`SourcesDiffer` if no majority agrees: nothing says who is right in a tie.
    """
    dropped: dict[int, TransfuseError] = {}
    groups: dict[tuple[int | None, bytes], dict[int, Offer]] = {}
    for rank in [rank for rank in ranks if rank in offers]:
        try:
            check(offers[rank], request)
        except TransfuseError as mismatch:
            dropped[rank] = mismatch
            continue
        groups.setdefault((offers[rank].step, offers[rank].likeness), {})[rank] = offers[rank]
    cohorts: list[_AtStep] = []
    for (step, likeness), group in groups.items():
        members = {rank: offer.coordinates for rank, offer in group.items()}
        cohorts.append(_AtStep(step, Cohort(described[likeness].manifest, members)))
    cohorts.sort(key=lambda one: -len(one.cohort.members))
    families: list[list[_AtStep]] = []
    for one in cohorts:
        for family in families:
            if all(_difference(other, one, request) is None for other in family):
                family.append(one)
                break
        else:
            families.append([one])
    families.sort(key=lambda family: -_count(family))
    if len(families) > 1:
        first = families[0][0]
        for one in [one for family in families[1:] for one in family]:
            for other in one.cohort.members:
                dropped[other] = SourcesDiffer(
                    f"source {other} offers another state than source {next(iter(first.cohort.members))}, with which "
                    f"{_count(families[0])} of {len(offers)} agree: "
                    + next(filter(None, (_difference(other_one, one, request) for other_one in families[0])), "")
                )
        if 2 * _count(families[0]) <= sum(map(_count, families)):
            raise dropped[next(iter(families[1][0].cohort.members))]  # No majority: nothing says who is right.
    chosen = [cohort for _, cohort in families[0]] if families else []
    if len(chosen) > 1 and isinstance(request.target, Prepared):
        # The first cohort describes the state: put the one first that has most of the target's leaves.
        wanted = set(trees.paths(request.target.root))
        chosen.sort(key=lambda cohort: -len(wanted & cohort.numbers.keys()))
    return Choice(chosen, {rank: offers[rank] for cohort in chosen for rank in cohort.members}, dropped)


def _count(family: Sequence[_AtStep]) -> int:
    return sum(len(cohort.members) for _, cohort in family)


def lacking(cohorts: Sequence[Cohort], request: ReceiveRequest) -> list[str]:
    """Leaves of the target that get nothing from these sources, after the rules if there are any."""
    target, rules = request.target, request.options.map_path
    if not isinstance(target, Prepared) or target.target is None:
        return []
    paths = trees.paths(target.root)
    if rules is None:
        return sorted(set(paths).difference(*(cohort.numbers.keys() for cohort in cohorts)))
    there = Catalogue(cohorts)
    shapes = [global_shape(leaf) for leaf in target.leaves]
    linked = link(rules, there.names, there.shapes, trees.dotted(target.root), shapes)
    return sorted(paths[leaf] for leaf in linked.untouched)


def would_bring(manifest: Manifest, cohorts: Sequence[Cohort], request: ReceiveRequest) -> list[str]:
    """Leaves of the target that get something only if a source with this manifest is used too."""
    with_it = lacking([*cohorts, Cohort(manifest, {})], request)
    return sorted(set(lacking(cohorts, request)).difference(with_it))


def why_not(rank: int, offer: Offer, accepted: Accepted, request: ReceiveRequest) -> TransfuseError | None:
    """Why a source that offers after the decision is not used; None if it is used."""
    try:
        check(offer, request)
    except TransfuseError as mismatch:
        return mismatch
    decided = accepted.offer
    if offer.step != decided.step:
        return SourcesDiffer(f"source {rank} offers another state than the others: {_steps(decided.step, offer.step)}")
    if not accepted.landing.shares.joinable:
        return SourcesDiffer(f"source {rank} came late: the receiver had already decided what each of the others sends")
    if (offer.digest, offer.coordinates) != (decided.digest, decided.coordinates):
        return SourcesDiffer(f"source {rank} came late and offers another state or another shard than the others")
    if offer.parcel_bytes < accepted.parcel_bytes:
        return SourcesDiffer(
            f"source {rank} came late and offers parcels of {offer.parcel_bytes} bytes, smaller than the "
            f"{accepted.parcel_bytes} bytes that were decided on"
        )
    return None


def _steps(one: int | None, other: int | None) -> str:
    return f"step {one} against {other}"


def _difference(one: _AtStep, other: _AtStep, request: ReceiveRequest) -> str | None:
    """How two cohorts differ; None if they describe one state or complete each other."""
    if one.step != other.step:
        return _steps(one.step, other.step)
    mine, theirs = one.cohort, other.cohort
    try:
        found = difference(mine, theirs)
        if found is not None:
            return found
        if mine.numbers.keys() == theirs.numbers.keys():
            return None
        # Different leaves: parts of one state (stages of a pipeline), unless each cohort has all leaves of the target.
        if request.late is not None or request.options.map_path is not None:
            return None
        if isinstance(request.target, Prepared) and request.target.target is not None:
            wanted = set(trees.paths(request.target.root))
            if not (wanted <= mine.numbers.keys() and wanted <= theirs.numbers.keys()):
                return None
        return first_difference(mine.manifest, theirs.manifest)
    except Exception as error:
        return f"a malformed description: {error}"


def first_difference(one: Manifest, other: Manifest) -> str:
    """The first difference between two manifests that are not the same."""
    for i, (mine, theirs) in enumerate(zip(one.paths, other.paths, strict=False)):
        if mine != theirs:
            return f"leaf {i} is {mine} in one and {theirs} in the other"
        a, b = _leaf(one, i), _leaf(other, i)
        if a != b:
            return f"leaf {mine}: {a} against {b}"
    if len(one) != len(other):
        longer = one if len(one) > len(other) else other
        return f"{len(one)} leaves against {len(other)}; {longer.paths[min(len(one), len(other))]} is in one only"
    return "their leaves are alike, but they share memory or lie in it differently"


def _leaf(manifest: Manifest, leaf: int) -> str:
    """A short description of a leaf."""
    words, tensors = [], manifest.tensors
    for row in range(*manifest.first_tensors[leaf : leaf + 2].tolist()):
        flags = f", flags {tensors.flags[row]}" if tensors.flags[row] else ""
        words.append(
            f"{manifest.dtype_of(row)} {list(tensors.shape(row))} with strides {list(tensors.stride(row))}{flags}"
        )
    detail = manifest.detail(leaf)
    if detail:
        text = repr(detail)
        words.append(text if len(text) <= 200 else f"{text[:200]}…")
    return "; ".join(words)
