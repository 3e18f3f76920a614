"""The receiver's end of the conversation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from transfuse import messages, parcels, places, plan
from transfuse.digest import digest_of
from transfuse.errors import CorruptData, PeerError, ProtocolError, StateError, StepMismatch, TransfuseError
from transfuse.leaves.codec import MeshDescription, Room
from transfuse.leaves.kinds import Kinds
from transfuse.limits import Limits
from transfuse.manifest import Manifest
from transfuse.messages import Intent, Message
from transfuse.parcels import Parcels
from transfuse.places import Staging
from transfuse.progress import Progress
from transfuse.report import Report
from transfuse.routes.group import OFFER_TAG, Line, Posted
from transfuse.talks import Caller
from transfuse.target import Landing, match

__all__ = ["Accepted", "Wishes", "accept", "receive"]


@dataclass(frozen=True)
class Wishes:
    """What the receiver's caller asked for."""

    step: int | None = None
    #: The state_dict callback's tree, or None to receive fresh; ``failure`` if the callback raised.
    target: object | None = None
    failure: BaseException | None = None
    verify: bool | None = None
    strict: bool = False
    atomic: bool = False
    mesh: DeviceMesh | Callable[[MeshDescription], DeviceMesh] | None = None
    weights_only_objects: bool = False


@dataclass
class Accepted:
    """An offer that has been read, checked, matched and planned. No byte of data has moved."""

    offer: messages.Offer
    manifest: Manifest
    room: Room
    kinds: Kinds
    cut: Parcels
    landing: Landing
    want: messages.Want


def accept(body: bytes | bytearray, wishes: Wishes, limits: Limits, peer: int, device: torch.device) -> Accepted:
    """Turn an offer's bytes, which anybody may have written, into a plan; or raise a ``transfuse`` error."""
    try:
        offer = messages.decode(body, messages.Offer)
        if wishes.step is not None and offer.step is not None and wishes.step != offer.step:
            raise StepMismatch(f"the source sends step {offer.step}, the receiver expects step {wishes.step}")
        if not limits.min_parcel_bytes <= offer.parcel_bytes <= limits.staging_bytes // (limits.window_parcels + 1):
            raise ValueError(f"parcels of {offer.parcel_bytes} bytes, outside what this end's staging allows")
        if offer.parcel_bytes % 16 or not 0 < offer.burst_bytes <= 1 << 30:
            raise ValueError("impossible sizes of parcels or bursts")
        manifest = Manifest.decode(offer.manifest, limits)
        room = Room(manifest.shared, wishes.mesh, wishes.weights_only_objects)
        kinds = Kinds(limits)
        found = match(manifest, wishes.target, room=room, kinds=kinds, strict=wishes.strict, limits=limits)
        if wishes.atomic:
            found.apart, found.wanted = [], []
        boxes = plan.lay_out(manifest, found.apart, found.wanted)
        landing = Landing(manifest, found, boxes, device=device, atomic=wishes.atomic, limits=limits)
        cut = parcels.cut(boxes, offer.parcel_bytes)
        want = messages.Want(parcels.fingerprint(cut), _digests(offer, wishes, device), found.apart, found.wanted)
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent a malformed offer: {error}") from error
    return Accepted(offer, manifest, room, kinds, cut, landing, want)


def _digests(offer: messages.Offer, wishes: Wishes, device: torch.device) -> bool:
    if wishes.verify and not offer.digests:
        raise StateError("verify=True, but the source was made with verify=False and offers no digests")
    # Elsewhere than on the CPU a digest would first copy every byte to the host: only on request.
    return offer.digests and (device.type == "cpu" if wishes.verify is None else wishes.verify)


def receive(line: Line, wishes: Wishes, caller: Caller, progress: Progress, report: Report, result: list[Any]) -> None:
    """Hear an offer, say what is wanted, receive it, verify it, and put the state into ``result``."""
    with report.phase("wait for offer"):
        line.phase = progress.phase = "waiting for the offer"
        try:
            _, body = line.expect(Message.OFFER, tag=OFFER_TAG)
        except ProtocolError as error:
            if line.tag != OFFER_TAG:
                line.refuse(error)  # The header was sound: the source can be told.
            raise
    with report.phase("plan"):
        line.phase = progress.phase = "planning"
        try:
            if wishes.failure is not None:
                raise wishes.failure
            if caller.cause is not None:
                raise caller.cause
            with line.holding_turn():
                accepted = accept(body, wishes, line.limits, line.peer, line.group.device)
        except BaseException as error:
            line.refuse(error)
            raise
        del body
        progress.total_bytes = accepted.cut.total_bytes
        report.leaves = len(accepted.manifest)
        report.step = accepted.offer.step if wishes.step is None else wishes.step
        report.verified = accepted.want.digests
        line.phase = progress.phase = "sending the want"
        line.send(Message.WANT, messages.encode(accepted.want))
    landing = accepted.landing
    caller.holding.add(line.peer)
    try:
        with report.phase("receive"):
            _Taker(line, accepted, caller, progress).take(report)
        with report.phase("finish"):
            result.append(_finish(line, accepted))
    except BaseException as error:
        # Memory under an outstanding receive is not ours to return.
        line.drain()
        if isinstance(error, TransfuseError):
            error.torn = landing.torn()
        raise
    finally:
        landing.bump_versions()
        caller.holding.discard(line.peer)


def _finish(line: Line, accepted: Accepted) -> Any:
    try:
        state = _build(line.peer, accepted)
    except TransfuseError as error:
        line.refuse(error)
        raise
    line.phase = "sending the verdict"
    with suppress(PeerError):
        # Everything is here and verified: whether the source still lives no longer matters.
        line.send(Message.VERDICT, messages.encode(messages.Verdict([])))
    return state


def _build(peer: int, accepted: Accepted) -> Any:
    """Build the state from what has landed, which may still be nonsense: indices of a sparse tensor are data."""
    try:
        return accepted.landing.finish(accepted.room, accepted.kinds)
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent data that cannot be built: {error}") from error


#: Receives under way: the parcel's number, its receive, and the staging buffer if it has one.
_Flying = deque[tuple[int, Posted, torch.Tensor | None]]


class _Taker:
    """Receives parcels in bursts, a window of receives posted ahead, and exchanges a record after each burst."""

    def __init__(self, line: Line, accepted: Accepted, caller: Caller, progress: Progress) -> None:
        self._line = line
        self._cut = accepted.cut
        self._landing = accepted.landing
        self._burst_bytes = accepted.offer.burst_bytes
        self._digests = accepted.want.digests
        self._staging = Staging(accepted.offer.parcel_bytes, line.group.device)
        self._caller = caller
        self._progress = progress
        self._failure: BaseException | None = None

    def take(self, report: Report) -> None:
        """Receive everything; ask again for what arrived wrong."""
        line = self._line
        numbers: Sequence[int] = range(len(self._cut))
        for attempt in range(line.limits.max_repairs + 1):
            line.phase = self._progress.phase = "receiving parcels"
            wrong = self._bursts(numbers)
            report.bytes += sum(int(self._cut.nbytes[n]) for n in numbers)
            report.parcels += len(numbers)
            if not wrong:
                return
            if attempt == line.limits.max_repairs:
                break
            report.repaired += len(wrong)
            line.phase = "sending the verdict"
            line.send(Message.VERDICT, messages.encode(messages.Verdict(wrong)))
            numbers = wrong
        boxes = [piece.box for number in wrong for piece in self._cut.pieces(number)]
        leaves = self._landing.paths_of(boxes)
        error = CorruptData(
            line.peer,
            leaves,
            f"rank {line.peer}: {len(wrong)} parcels still had wrong digests after {line.limits.max_repairs} repairs; "
            f"leaves: {', '.join(leaves[:10])}{', …' if len(leaves) > 10 else ''}. The bytes are damaged on the way, "
            "or the source's tensors change while it sends",
        )
        line.refuse(error)
        raise error

    def _bursts(self, numbers: Sequence[int]) -> list[int]:
        """Receive the bursts of these parcels; the numbers of those with a wrong digest.

        Both ends post in one order, for backends that know no other: burst 0, sent 0, burst 1, got 0, sent 1,
        burst 2, got 1, … So a record speaks of the burst after the next: when it is read, the next is under way.
        """
        line = self._line
        rounds = parcels.bursts(self._cut, numbers, self._burst_bytes)
        wrong: list[int] = []
        flying: _Flying = deque()
        due: deque[int] = deque(rounds[0] if rounds else ())
        answer: Posted | None = None
        source_stops, cause = False, None
        for i, burst in enumerate(rounds):
            computed: list[int] = []
            record: Posted | None = None
            all_posted = False
            while len(computed) < len(burst):
                self._post_ahead(flying, due)
                if not due and not all_posted:
                    # All of this burst is posted: now the answer to the record before it, then its own record.
                    all_posted = True
                    if i:
                        answer = line.post_message(Message.GOT, Intent.CANCEL if cause else Intent.GO_ON)
                    if not source_stops:
                        record = line.post_recv_sent(len(burst) if self._digests else 0)
                        if not cause and i + 1 < len(rounds):
                            due.extend(rounds[i + 1])
                computed.append(self._land(*flying.popleft()))
            if answer is not None:
                answer.wait()
            if source_stops:
                break
            assert record is not None
            intent, digests = line.read_sent(record.wait())
            if cause is not None:
                break
            if self._digests:
                wrong += [n for n, mine, theirs in zip(burst, computed, digests, strict=True) if mine != theirs]
            self._caller.tick()
            source_stops, cause = intent is Intent.CANCEL, self._caller.cause or self._failure
        else:
            if rounds:
                line.post_message(Message.GOT, Intent.CANCEL if cause else Intent.GO_ON).wait()
        if source_stops:
            line.expect()
            raise ProtocolError(line.peer, f"rank {line.peer} cancelled without saying why")
        if cause is not None:
            line.refuse(cause)
            raise cause
        return wrong

    def _post_ahead(self, flying: _Flying, due: deque[int]) -> None:
        while due and len(flying) < self._line.limits.window_parcels:
            number = due.popleft()
            size = int(self._cut.nbytes[number])
            self._landing.touch([piece.box for piece in self._cut.pieces(number)])
            data = places.as_bytes(self._landing, self._cut, number, self._line.group.device)
            buffer = None
            if data is None:
                buffer = self._staging.take()
                data = buffer[:size]
            flying.append((number, self._line.post_recv(data), buffer))

    def _land(self, number: int, posted: Posted, buffer: torch.Tensor | None) -> int:
        """Complete one parcel: to its places, and the digest of what lies there then."""
        data = posted.wait()
        self._progress.bytes += data.numel()
        try:
            if buffer is not None and self._failure is None:
                places.unpack(self._landing, self._cut, number, data)
                if self._digests:
                    data = places.pack(self._landing, self._cut, number, buffer)
            return digest_of(data) if self._digests else 0
        except Exception as error:
            self._failure = self._failure or error
            return 0
        finally:
            if buffer is not None:
                self._staging.give_back(buffer)
