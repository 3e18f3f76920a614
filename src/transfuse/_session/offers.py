"""Offers: a source's first message, read and checked as what a hostile peer may have written.

An offer is *described* if it brings a manifest, or only the values of a structure that this end remembers. A source
whose offer is not described is asked for its description.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from transfuse._errors import ProtocolError, StateError, StepMismatch, TransfuseError
from transfuse._limits import Limits
from transfuse._memory.digest import WIDE_BYTES
from transfuse._session.context import ReceiveRequest
from transfuse._session.remembered import Remembered, Structure
from transfuse._state.manifest import Manifest, Wire
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.messages import Message, Offer


def read_offer(body: bytes | bytearray, limits: Limits, peer: int) -> Offer:
    """Decode an offer and check its numbers; a hostile peer may have written it. The manifest is checked later."""
    try:
        offer = messages.decode(body, Offer)
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
        if len(offer.content) not in (0, WIDE_BYTES):
            raise ValueError("a digest of its content of an impossible length")
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

    offer: Offer
    manifest: Manifest


def is_described(offer: Offer, remembered: Remembered) -> bool:
    """Whether an offer has a manifest, or only the values of a structure that this end remembers."""
    return offer.manifest is not None or (
        offer.values is not None and remembered.structure(offer.structure) is not None
    )


def read_description(
    offer: Offer, limits: Limits, peer: int, remembered: Remembered | None = None
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


def read_manifest(offer: Offer, limits: Limits, remembered: Remembered) -> Structure:
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


def _check_structure(wire: Wire, offer: Offer) -> None:
    if wire.structure() != offer.structure:
        raise ValueError("its digests are those of another state")


def check(offer: Offer, request: ReceiveRequest) -> None:
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


def describe(channel: Channel, offer: Offer) -> Offer:
    """Ask a source for its description, if its offer came without one."""
    if offer.manifest is not None:
        return offer
    channel.send(Message.DESCRIBE)
    _, body = channel.expect(Message.OFFER)
    described = read_offer(body, channel.limits, channel.peer)
    same = (described.structure, described.likeness, described.digest) == (
        offer.structure,
        offer.likeness,
        offer.digest,
    )
    if described.manifest is None or not same:
        raise ProtocolError(channel.peer, f"rank {channel.peer} describes another state than it has offered")
    return described


def ask_content(channel: Channel, offer: Offer) -> bytes:
    """The digest of the source's content. If the offer came without, the source computes it now."""
    if offer.content:
        return offer.content
    channel.send(Message.VERSION)
    _, body = channel.expect(Message.DIGESTS)
    digest = channel.decode(body, messages.Digests).digests
    if len(digest) != WIDE_BYTES:
        raise ProtocolError(channel.peer, f"rank {channel.peer} sent a digest of its content of {len(digest)} bytes")
    return digest
