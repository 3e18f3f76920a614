"""The receiver's end of the conversation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from transfuse import messages, parcels, places, plan
from transfuse.digest import digest_of
from transfuse.errors import CorruptData, PeerError, ProtocolError, StateError, StepMismatch, TransfuseError
from transfuse.leaves.codec import MeshDescription, Room
from transfuse.leaves.kinds import Kinds
from transfuse.limits import Limits
from transfuse.manifest import Manifest
from transfuse.matching import match
from transfuse.messages import Intent, Message
from transfuse.parcels import Parcels
from transfuse.places import Staging
from transfuse.progress import Progress
from transfuse.report import Report
from transfuse.routes.group import OFFER_TAG, Line, Posted
from transfuse.talks import Caller
from transfuse.target import Landing

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
        if not 0 < offer.timeout < float("inf"):
            raise ValueError("an impossible timeout")
        if offer.parcel_bytes < limits.min_parcel_bytes or offer.parcel_bytes % 16 or offer.bursts_ahead < 1:
            raise ValueError("impossible sizes of parcels or bursts")
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
            line.peer_timeout = messages.timeout_in(body) or line.timeout
            with line.holding_turn():
                accepted = accept(body, wishes, line.limits, line.peer, line.group.device)
            caller.lend(line.peer)
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
        line.expect(Message.AGREED)
    landing = accepted.landing
    try:
        with report.phase("receive"):
            _Taker(line, accepted, caller, progress).take(report)
        with report.phase("finish"):
            result.append(_finish(line, accepted))
    except BaseException as error:
        if isinstance(error, ProtocolError) and not line.broken:
            line.refuse(error)
        report.torn = landing.torn()
        if isinstance(error, TransfuseError):
            error.torn = report.torn
        elif report.torn:
            error.add_note(f"torn target leaves: {', '.join(report.torn[:100])}")
        raise
    finally:
        landing.bump_versions()


def _finish(line: Line, accepted: Accepted) -> Any:
    try:
        with line.holding_turn():
            state = _build(line.peer, accepted)
    except TransfuseError as error:
        if not isinstance(error, ProtocolError):
            line.refuse(error)
        raise
    line.phase = "sending the verdict"
    with suppress(PeerError):
        # Everything is here and verified: whether the source still lives no longer matters.
        line.send(Message.VERDICT, messages.encode(messages.Verdict([])))
        line.settle()
    return state


def _build(peer: int, accepted: Accepted) -> Any:
    """Build the state from what has landed, which may still be nonsense: indices of a sparse tensor are data."""
    try:
        return accepted.landing.finish(accepted.room, accepted.kinds)
    except TransfuseError:
        raise
    except Exception as error:
        raise ProtocolError(peer, f"rank {peer} sent data that cannot be built: {error}") from error


class _Burst(NamedTuple):
    """A burst under way: for each parcel its number, its receive, and the staging buffer if it has one."""

    parcels: list[tuple[int, Posted, torch.Tensor | None]]
    record: Posted


class _Taker:
    """Receives parcels in bursts, several of them posted ahead, and answers the record after each."""

    def __init__(self, line: Line, accepted: Accepted, caller: Caller, progress: Progress) -> None:
        self._line = line
        self._cut = accepted.cut
        self._landing = accepted.landing
        self._burst_bytes = accepted.offer.burst_bytes
        self._ahead = accepted.offer.bursts_ahead
        self._digests = accepted.want.digests
        self._staging = Staging(accepted.offer.burst_bytes, line.group.device)
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
            line.expect(Message.AGREED)
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
        """Receive the bursts of these parcels; the numbers of those with a wrong digest."""
        line = self._line
        rounds = deque(parcels.bursts(self._cut, numbers, self._burst_bytes))
        wrong: list[int] = []
        flying: deque[_Burst] = deque()
        while rounds and len(flying) < self._ahead:
            flying.append(self._post(rounds.popleft()))
        cause: BaseException | None = None
        source_stops = False
        while flying:
            burst = flying.popleft()
            intent, digests = line.read_sent(burst.record.wait())
            computed = [self._land(*parcel) for parcel in burst.parcels]
            if self._digests:
                pairs = zip(burst.parcels, computed, digests, strict=True)
                wrong += [number for (number, _, _), mine, theirs in pairs if mine != theirs]
            if cause is not None or source_stops:
                continue  # What was posted ahead is completed, and no longer answered.
            if intent is Intent.CANCEL:
                source_stops = True
                continue
            cause = self._caller.cause or self._failure
            try:
                line.send(Message.GOT, note=Intent.CANCEL if cause else Intent.GO_ON)
            except PeerError:
                # With nothing more to come, a source that is gone by now no longer matters.
                if rounds or cause is not None:
                    raise
            if rounds and cause is None:
                flying.append(self._post(rounds.popleft()))
            self._caller.tick()
        if source_stops:
            line.expect()
            raise ProtocolError(line.peer, f"rank {line.peer} cancelled without saying why")
        if cause is not None:
            line.refuse(cause)
            raise cause
        return wrong

    def _post(self, numbers: Sequence[int]) -> _Burst:
        """Post the receives of a burst and of the record that follows it."""
        posted: list[tuple[int, Posted, torch.Tensor | None]] = []
        for number in numbers:
            self._landing.touch([piece.box for piece in self._cut.pieces(number)])
            data = places.as_bytes(self._landing, self._cut, number, self._line.group.device)
            buffer = None
            if data is None:
                size = int(self._cut.nbytes[number])
                buffer = self._staging.take(size)
                data = buffer[:size]
            posted.append((number, self._line.post_recv(data), buffer))
        return _Burst(posted, self._line.post_recv_sent(len(numbers) if self._digests else 0))

    def _land(self, number: int, posted: Posted, buffer: torch.Tensor | None) -> int:
        """Take one parcel, which is here, to its places; the digest of what lies there then."""
        data = posted.wait()
        self._progress.bytes += data.numel()
        try:
            if buffer is not None and self._failure is None:
                places.unpack(self._landing, self._cut, number, data)
                if self._digests:
                    data = places.pack(self._landing, self._cut, number, buffer)
            return digest_of(data) if self._digests else 0
        except Exception as error:
            if not isinstance(error, TransfuseError):
                peer = self._line.peer
                error = ProtocolError(peer, f"rank {peer} sent data that cannot be put in its place: {error}")
            self._failure = self._failure or error
            return 0
        finally:
            if buffer is not None:
                self._staging.give_back(buffer)
