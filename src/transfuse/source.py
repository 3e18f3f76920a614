"""The source's end of the conversation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from transfuse import messages, parcels, places, plan
from transfuse.digest import digest_of
from transfuse.errors import ProtocolError
from transfuse.leaves import dense
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
    body: torch.Tensor


class _Memory:
    """The source's own memory, as places."""

    def __init__(self, described: Described, boxes: Boxes) -> None:
        self._described = described
        self._boxes = boxes

    def run(self, box: int, low: int, high: int) -> torch.Tensor | None:
        if box in self._boxes.strided:
            return None
        storage = int(self._boxes.storage[box])
        start = int(self._described.windows[storage]) + int(self._boxes.start[box])
        return dense.over(self._described.storages[storage], torch.uint8, start + low, (high - low,), (1,))

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
        try:
            _, body = line.expect(Message.WANT)
            want = line.decode(body, messages.Want)
            cut = _plan(line, cargo, want)
        except ProtocolError as error:
            line.refuse(error)
            raise
    try:
        caller.lend(line.peer)
    except BaseException as cause:
        line.refuse(cause)
        raise
    # Only now may the receiver post for parcels: a refusal must never meet a receive that was posted for data.
    line.send(Message.AGREED)
    progress.total_bytes = cut.total_bytes
    sender = _Sender(line, cargo, want, cut, caller, progress)
    numbers: Sequence[int] = range(len(cut))
    report.verified = want.digests
    for attempt in range(line.limits.max_repairs + 1):
        line.phase = progress.phase = "sending parcels"
        with report.phase("send"):
            sender.send(numbers)
        report.bytes += sum(int(cut.nbytes[n]) for n in numbers)
        report.parcels += len(numbers)
        line.phase = progress.phase = "waiting for the verdict"
        try:
            with report.phase("verdict"):
                _, body = line.expect(Message.VERDICT)
            numbers = line.decode(body, messages.Verdict).missing
            if sender.failure is not None:
                if numbers:
                    line.refuse(sender.failure)
                raise sender.failure
            if not numbers:
                return
            _check_missing(line, numbers, len(cut), attempt)
        except ProtocolError as error:
            if error is not sender.failure:
                line.refuse(error)
            raise
        line.send(Message.AGREED)
        report.repaired += len(numbers)


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


class _Burst(NamedTuple):
    """A burst under way: its sends and its record's, the staging buffers they use, and how many bytes it carries."""

    posted: list[Posted]
    buffers: list[torch.Tensor]
    nbytes: int


class _Sender:
    """Sends parcels in bursts, several of them under way, each followed by a record and answered by one.

    Both ends post in one order, for backends that know no other. With ``ahead`` bursts under way: burst 0, sent 0,
    … burst ahead - 1, sent ahead - 1, got 0, burst ahead, sent ahead, got 1, … So whoever cancels still completes
    what the other end may have posted already.
    """

    def __init__(
        self, line: Line, cargo: Cargo, want: messages.Want, cut: Parcels, caller: Caller, progress: Progress
    ) -> None:
        self._line = line
        self._cut = cut
        self._memory = _Memory(cargo.described, cut.boxes)
        self._staging = Staging(cargo.offer.burst_bytes, line.group.device)
        self._burst_bytes = cargo.offer.burst_bytes
        self._ahead = cargo.offer.bursts_ahead
        self._digests = want.digests
        self._caller = caller
        self._progress = progress
        self._flying: deque[_Burst] = deque()
        #: What went wrong here and the receiver has not been told yet.
        self.failure: BaseException | None = None

    def send(self, numbers: Sequence[int]) -> None:
        rounds = parcels.bursts(self._cut, numbers, self._burst_bytes)
        cause: BaseException | None = None
        sent, end, first_cancelled = 0, len(rounds), 0
        while sent < end or self._flying:
            if sent < end and len(self._flying) < self._ahead:
                stopping = self._post(rounds[sent])
                if cause is None and stopping is not None:
                    cause, first_cancelled, end = stopping, sent, min(end, sent + self._ahead)
                sent += 1
            elif cause is not None and sent - len(self._flying) >= first_cancelled:
                break  # What is still under way says that it is cancelled, and is not answered.
            else:
                self._hear_answer()
        if cause is not None:
            self._line.refuse(cause)
            raise cause

    def _hear_answer(self) -> None:
        """The receiver's record about the oldest burst: it has arrived, and more may come or not."""
        note = int(Intent.GO_ON)
        try:
            header, _ = self._line.expect(Message.GOT)
            note = header.note
        except ProtocolError as error:
            # The receiver has receives for parcels posted: no refusal may meet these. Cancel with the next record; if
            # there is none, after its verdict.
            self.failure = self.failure or error
        burst = self._flying.popleft()
        for posted in burst.posted:
            posted.wait()
        for buffer in burst.buffers:
            self._staging.give_back(buffer)
        self._progress.bytes += burst.nbytes
        self._caller.tick()
        if note == Intent.CANCEL:
            self._line.expect()
            raise ProtocolError(self._line.peer, f"rank {self._line.peer} cancelled without saying why")

    def _post(self, numbers: Sequence[int]) -> BaseException | None:
        """Post a burst and the record after it; why this end stops with it, if it does."""
        burst = _Burst([], [], sum(int(self._cut.nbytes[n]) for n in numbers))
        digests: list[int] = []
        for number in numbers:
            data, buffer = self._fetch(number)
            if buffer is not None:
                burst.buffers.append(buffer)
            burst.posted.append(self._line.post_send(data))
            if self._digests:
                digests.append(digest_of(data))
        # Decided now, not before: a parcel that could not be packed must not pass for one that could.
        cause = self._caller.cause or self.failure
        burst.posted.append(self._line.post_sent(Intent.CANCEL if cause else Intent.GO_ON, digests))
        self._flying.append(burst)
        return cause

    def _fetch(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A parcel's bytes on the wire's device, and the staging buffer that holds them, if any."""
        size, buffer = int(self._cut.nbytes[number]), None
        try:
            direct = places.as_bytes(self._memory, self._cut, number, self._line.group.device)
            if direct is not None:
                return direct, None
            buffer = self._staging.take(size)
            return places.pack(self._memory, self._cut, number, buffer), buffer
        except Exception as error:
            # The burst has been promised: complete it, and cancel with its record.
            self.failure = self.failure or error
            buffer = self._staging.take(size) if buffer is None else buffer
            return buffer[:size], buffer
