"""The source's end of the conversation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from transfuse import messages, parcels, places, plan
from transfuse.digest import digest_of
from transfuse.errors import PeerError, ProtocolError, TransfuseError
from transfuse.manifest import Described
from transfuse.messages import Intent, Message
from transfuse.parcels import Parcels
from transfuse.places import Place, Staging
from transfuse.plan import Boxes
from transfuse.progress import Progress
from transfuse.report import Report
from transfuse.routes.group import OFFER_TAG, Line, Posted
from transfuse.talks import Caller

__all__ = ["Cargo", "refuse", "serve"]


@dataclass(frozen=True)
class Cargo:
    """What a source offers, the same to all its receivers."""

    described: Described
    offer: messages.Offer
    body: bytes


class _Memory:
    """The source's own memory, as places."""

    def __init__(self, described: Described, boxes: Boxes) -> None:
        self._described = described
        self._boxes = boxes

    def places(self, box: int) -> Sequence[Place]:
        storage = int(self._boxes.storage[box])
        window = int(self._described.windows[storage])
        return [places.place_in_storage(self._described.storages[storage], window, self._boxes.box(box))]


def refuse(line: Line, transfer: int, tag: int, cause: BaseException) -> None:
    """Instead of an offer: there will be none, and why."""
    line.phase = "sending a refusal"
    line.transfer, line.tag = transfer, tag
    line.refuse(cause, tag=OFFER_TAG)


def serve(
    line: Line, transfer: int, tag: int, cargo: Cargo, caller: Caller, progress: Progress, report: Report
) -> None:
    """Offer, hear what is wanted, send it, and hear that it arrived."""
    line.transfer, line.tag = transfer, tag
    with report.phase("offer"):
        line.phase = progress.phase = "sending the offer"
        line.send(Message.OFFER, cargo.body, note=tag, tag=OFFER_TAG)
    with report.phase("wait for want"):
        line.phase = progress.phase = "waiting for the want"
        _, body = line.expect(Message.WANT)
    want = line.decode(body, messages.Want)
    try:
        cut = _plan(line, cargo, want)
    except TransfuseError as error:
        line.refuse(error)
        raise
    progress.total_bytes = cut.total_bytes
    sender = _Sender(line, cargo, want, cut, caller, progress)
    numbers: Sequence[int] = range(len(cut))
    report.verified = want.digests
    caller.holding.add(line.peer)
    try:
        for attempt in range(line.limits.max_repairs + 1):
            line.phase = progress.phase = "sending parcels"
            with report.phase("send"):
                sender.send(numbers)
            report.bytes += sum(int(cut.nbytes[n]) for n in numbers)
            report.parcels += len(numbers)
            line.phase = progress.phase = "waiting for the verdict"
            with report.phase("verdict"):
                _, body = line.expect(Message.VERDICT)
            numbers = line.decode(body, messages.Verdict).missing
            if not numbers:
                return
            _check_missing(line, numbers, len(cut), attempt)
            report.repaired += len(numbers)
    finally:
        # The caller may change its tensors once this returns or raises: nothing of them may still be under way.
        line.drain()
        caller.holding.discard(line.peer)


def _check_missing(line: Line, numbers: list[int], count: int, attempt: int) -> None:
    if sorted(set(numbers)) != numbers or numbers[-1] >= count or numbers[0] < 0:
        raise ProtocolError(line.peer, f"rank {line.peer} asked again for parcels that do not exist")
    if attempt == line.limits.max_repairs:
        raise ProtocolError(line.peer, f"rank {line.peer} asked again for parcels more than {attempt} times")


def _plan(line: Line, cargo: Cargo, want: messages.Want) -> Parcels:
    manifest = cargo.described.manifest
    for numbers, count in ((want.apart, len(manifest.storages)), (want.parts, len(manifest.parts))):
        if numbers and (sorted(set(numbers)) != numbers or numbers[0] < 0 or numbers[-1] >= count):
            raise ProtocolError(line.peer, f"rank {line.peer} wants tensors that were not offered")
    if want.digests and not cargo.offer.digests:
        raise ProtocolError(line.peer, f"rank {line.peer} wants digests that were not offered")
    cut = parcels.cut(plan.lay_out(manifest, want.apart, want.parts), cargo.offer.parcel_bytes)
    if parcels.fingerprint(cut) != want.fingerprint:
        raise ProtocolError(
            line.peer,
            f"rank {line.peer} derived other parcels from the same offer (different transfuse versions?)",
        )
    return cut


class _Sender:
    """Sends parcels in bursts, with a window of them in flight, and exchanges a record after each burst."""

    def __init__(
        self, line: Line, cargo: Cargo, want: messages.Want, cut: Parcels, caller: Caller, progress: Progress
    ) -> None:
        self._line = line
        self._cut = cut
        self._memory = _Memory(cargo.described, cut.boxes)
        self._staging = Staging(cargo.offer.parcel_bytes, line.group.device)
        self._burst_bytes = cargo.offer.burst_bytes
        self._digests = want.digests
        self._caller = caller
        self._progress = progress
        self._flying: deque[tuple[Posted, torch.Tensor | None, int]] = deque()
        self._failure: BaseException | None = None

    def send(self, numbers: Sequence[int]) -> None:
        rounds = parcels.bursts(self._cut, numbers, self._burst_bytes)
        if not rounds:
            return
        digests = self._burst(rounds[0])
        for i, _ in enumerate(rounds):
            cause = self._caller.cause or self._failure
            self._flying.append((self._line.post_sent(Intent.CANCEL if cause else Intent.GO_ON, digests), None, 0))
            last = i + 1 == len(rounds)
            if not last:
                # The receiver may have posted receives for this burst already: it comes whatever happens.
                digests = self._burst(rounds[i + 1])
            self._caller.tick()
            header, _ = self._line.expect(Message.GOT)
            if cause is not None:
                self._land()
                self._line.refuse(cause)
                raise cause
            if header.note == Intent.CANCEL:
                if not last:
                    self._flying.append((self._line.post_sent(Intent.GO_ON, digests), None, 0))
                self._land()
                self._line.expect()
                raise ProtocolError(self._line.peer, f"rank {self._line.peer} cancelled without saying why")
        self._land()

    def _burst(self, numbers: Sequence[int]) -> list[int]:
        """Post one burst; the digests of its parcels."""
        digests: list[int] = []
        for number in numbers:
            data, buffer = self._fetch(number)
            self._flying.append((self._line.post_send(data), buffer, data.numel()))
            if self._digests:
                digests.append(digest_of(data))
            while len(self._flying) > self._line.limits.window_parcels:
                self._retire()
        return digests

    def _fetch(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A parcel's bytes on the wire's device, and the staging buffer that holds them, if any."""
        size, buffer = int(self._cut.nbytes[number]), None
        try:
            direct = places.as_bytes(self._memory, self._cut, number, self._line.group.device)
            if direct is not None:
                return direct, None
            buffer = self._staging.take()
            return places.pack(self._memory, self._cut, number, buffer), buffer
        except PeerError:
            raise
        except BaseException as error:
            # The burst has been promised: complete it, and cancel in the record after it.
            self._failure = self._failure or error
            if buffer is None:
                buffer = torch.empty(size, dtype=torch.uint8, device=self._line.group.device)
            return buffer[:size], buffer

    def _retire(self) -> None:
        posted, buffer, size = self._flying.popleft()
        posted.wait()
        if buffer is not None:
            self._staging.give_back(buffer)
        self._progress.bytes += size

    def _land(self) -> None:
        while self._flying:
            self._retire()
