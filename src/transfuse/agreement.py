"""Agreement: which of several sources offer the same state, and in what the others differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transfuse.accepting import Accepted, Wishes, check
from transfuse.errors import ProtocolError, SourcesDiffer, TransfuseError
from transfuse.limits import Limits
from transfuse.manifest import Manifest
from transfuse.messages import Offer

__all__ = ["Choice", "choose", "first_difference", "why_not"]


class Choice(NamedTuple):
    """The sources that agree, and why the others are not used."""

    chosen: dict[int, Offer]
    dropped: dict[int, TransfuseError]


def choose(ranks: Sequence[int], offers: Mapping[int, Offer], wishes: Wishes, limits: Limits) -> Choice:
    """The sources of which more agree than of any others. Those of another step than the wanted do not count.

    :class:`SourcesDiffer` if no majority does: nothing says who is right.
    """
    dropped: dict[int, TransfuseError] = {}
    groups: list[dict[int, Offer]] = []
    for rank in [rank for rank in ranks if rank in offers]:
        try:
            check(offers[rank], wishes)
        except TransfuseError as mismatch:
            dropped[rank] = mismatch
            continue
        for group in groups:
            if _same(offers[rank], next(iter(group.values()))):
                group[rank] = offers[rank]
                break
        else:
            groups.append({rank: offers[rank]})
    if len(groups) > 1:
        groups = [group for group in groups if _makes_sense(group, dropped, limits)]
    groups.sort(key=len, reverse=True)
    if len(groups) > 1:
        first = next(iter(groups[0]))
        for other in [rank for group in groups[1:] for rank in group]:
            dropped[other] = SourcesDiffer(
                f"source {other} offers another state than source {first}, with which {len(groups[0])} of "
                f"{len(offers)} agree: {_difference(offers[first], offers[other], limits)}"
            )
        if len(groups[0]) == len(groups[1]):
            raise dropped[next(iter(groups[1]))]
    return Choice(groups[0] if groups else {}, dropped)


def why_not(rank: int, offer: Offer, accepted: Accepted, wishes: Wishes, limits: Limits) -> TransfuseError | None:
    """Why a source that comes after it has been decided is not used, if it is not."""
    try:
        check(offer, wishes)
    except TransfuseError as mismatch:
        return mismatch
    if not _same(offer, accepted.offer):
        difference = _difference(accepted.offer, offer, limits)
        return SourcesDiffer(f"source {rank} offers another state than the others: {difference}")
    if offer.parcel_bytes < accepted.parcel_bytes:
        return SourcesDiffer(f"source {rank} came late and offers smaller parcels than the others")
    return None


def _same(one: Offer, other: Offer) -> bool:
    """Whether two offers are of the same state, as far as can be told without its bytes."""
    return one.step == other.step and one.manifest.of_any_device() == other.manifest.of_any_device()


def _makes_sense(group: dict[int, Offer], dropped: dict[int, TransfuseError], limits: Limits) -> bool:
    """Whether what these sources offer can be a state. Otherwise they have no vote."""
    try:
        Manifest.decode(next(iter(group.values())).manifest, limits)
    except Exception as error:
        for rank in group:
            dropped[rank] = ProtocolError(rank, f"rank {rank} sent a malformed offer: {error}")
        return False
    return True


def _difference(one: Offer, other: Offer, limits: Limits) -> str:
    if one.step != other.step:
        return f"step {one.step} against {other.step}"
    try:
        return first_difference(*(Manifest.decode(offer.manifest, limits) for offer in (one, other)))
    except Exception as error:
        return f"a malformed description: {error}"


def first_difference(one: Manifest, other: Manifest) -> str:
    """In what two manifests that are not the same differ first."""
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
    """A leaf in a few words."""
    words = []
    for part in range(*manifest.first_parts[leaf : leaf + 2].tolist()):
        p = manifest.parts
        flags = f", flags {p.flags[part]}" if p.flags[part] else ""
        words.append(f"{manifest.dtype_of(part)} {list(p.shape(part))} with strides {list(p.stride(part))}{flags}")
    detail = manifest.detail(leaf)
    if detail:
        text = repr(detail)
        words.append(text if len(text) <= 200 else f"{text[:200]}…")
    return "; ".join(words)
