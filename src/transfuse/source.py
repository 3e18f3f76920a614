"""The source's end of the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from transfuse import messages, parcels, places, plan
from transfuse.bursts import Outgoing, Shape
from transfuse.chains import Chains, this_host
from transfuse.digest import digest_of
from transfuse.errors import ProtocolError
from transfuse.leaves import dense
from transfuse.manifest import Described, Ints
from transfuse.messages import Message
from transfuse.pace import Pace
from transfuse.parcels import Parcels
from transfuse.places import Place
from transfuse.plan import Boxes
from transfuse.progress import Progress
from transfuse.report import Report
from transfuse.routes.group import OFFER_TAG, Line
from transfuse.talks import Caller

__all__ = ["Cargo", "refuse", "serve"]


@dataclass(frozen=True)
class Cargo:
    """What a source offers, the same to all its receivers."""

    described: Described
    offer: messages.Offer
    body: torch.Tensor
    chains: Chains | None
    #: Digests of parcels that were sent already, by fingerprint of the plan: each is hashed once for all receivers.
    digests: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return int(self.described.manifest.storages.nbytes.sum())


class _Memory:
    """The source's own memory, as places."""

    def __init__(self, described: Described, boxes: Boxes) -> None:
        self._described = described
        self._boxes = boxes
        base = described.addresses[boxes.storage]
        self.addresses: Ints = np.where(base > 0, base + boxes.start, 0)
        self.addresses[list(boxes.strided)] = 0

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
    try:
        _Serving(line, transfer, tag, cargo, caller, progress, report).serve()
    finally:
        if cargo.chains is not None:
            cargo.chains.leave(line.peer)


class _Serving:
    """The conversation with one receiver."""

    def __init__(
        self, line: Line, transfer: int, tag: int, cargo: Cargo, caller: Caller, progress: Progress, report: Report
    ) -> None:
        self._line = line
        line.transfer, line.tag = transfer, tag
        self._cargo = cargo
        self._caller = caller
        self._progress = progress
        self._report = report
        progress.total_bytes = cargo.total_bytes
        line.most_bytes = cargo.total_bytes
        line.on_working = self._heard

    def _heard(self, nbytes: int) -> None:
        """The receiver reads by itself, or gets its parcels from another."""
        self._progress.bytes = max(self._progress.bytes, min(nbytes, self._cargo.total_bytes))
        self._caller.tick()

    def serve(self) -> None:
        line, report = self._line, self._report
        with report.phase("offer"):
            line.phase = self._progress.phase = "sending the offer"
            line.send(Message.OFFER, self._cargo.body, note=line.tag, tag=OFFER_TAG)
        with report.phase("wait for want"):
            line.phase = self._progress.phase = "waiting for the want"
            try:
                header, body = line.expect(Message.WANT, Message.VERDICT)
                if header.kind is Message.VERDICT:
                    # It has read everything by itself.
                    if self._hear_verdict(body, 0):
                        raise ProtocolError(line.peer, f"rank {line.peer} misses parcels that it never wanted")
                    return
                want = line.decode(body, messages.Want)
                cut, numbers = self._plan(want)
            except ProtocolError as error:
                line.refuse(error)
                raise
        self._send(want, cut, numbers)

    def _send(self, want: messages.Want, cut: Parcels, numbers: Sequence[int]) -> None:
        line, report, cargo = self._line, self._report, self._cargo
        alone = messages.Agreed(), Pace(cargo.offer.max_bytes_per_second)
        agreed, pace = (self._line_up(want) if numbers else None) or alone
        try:
            self._caller.lend(line.peer)
        except BaseException as cause:
            line.refuse(cause)
            raise
        # Only now may the receiver post for parcels: a refusal must never meet a receive that was posted for data.
        line.send(Message.AGREED, messages.encode(agreed))
        shape = Shape.of(cargo.offer, agreed, want.digests)
        memory = _Memory(cargo.described, cut.boxes)
        known = cargo.digests.setdefault(want.fingerprint, {})

        def digest(number: int, data: torch.Tensor) -> int:
            if number not in known:
                known[number] = digest_of(data)
            return known[number]

        outgoing = Outgoing(line, cut, memory, shape, self._caller, self._progress, pace=pace, digest=digest)
        report.verified = want.digests
        report.route = "group"
        if agreed.upstream is not None:
            numbers = self._await_verdict(outgoing, cut)
        for attempt in range(line.limits.max_repairs + 1):
            if not numbers:
                return
            line.phase = self._progress.phase = "sending parcels"
            with report.phase("send"):
                outgoing.send(numbers)
            report.bytes += int(cut.nbytes[np.array(numbers)].sum())
            report.parcels += len(numbers)
            numbers = self._await_verdict(outgoing, cut, last=attempt == line.limits.max_repairs)

    def _line_up(self, want: messages.Want) -> tuple[messages.Agreed, Pace] | None:
        """Find this receiver's place among those that want the same; what it is told, and their pace. None: alone."""
        chains, peer = self._cargo.chains, self._line.peer
        # Within this host a chain would save no link, and cost every hop.
        if chains is None or not want.relay or want.host == this_host():
            if chains is not None:
                chains.leave(peer)
            return None
        key = (want.fingerprint, want.digests, *want.apart, -1, *want.parts, -1, *want.parcels)
        return chains.join(peer, key, want.host)

    def _await_verdict(self, outgoing: Outgoing, cut: Parcels, *, last: bool = False) -> Sequence[int]:
        """The parcels that the receiver asks for again, which has been agreed to; or none."""
        line = self._line
        line.phase = self._progress.phase = "waiting for the verdict"
        try:
            with self._report.phase("verdict"):
                _, body = line.expect(Message.VERDICT)
            numbers = self._hear_verdict(body, len(cut))
            if outgoing.failure is not None:
                if numbers:
                    line.refuse(outgoing.failure)
                raise outgoing.failure
            if numbers and last:
                times = line.limits.max_repairs
                raise ProtocolError(line.peer, f"rank {line.peer} asked again for parcels more than {times} times")
        except ProtocolError as error:
            if error is not outgoing.failure:
                line.refuse(error)
            raise
        if numbers:
            line.send(Message.AGREED, messages.encode(messages.Agreed()))
            self._report.repaired += len(numbers)
        return numbers

    def _hear_verdict(self, body: bytearray, count: int) -> Sequence[int]:
        line, report = self._line, self._report
        verdict = line.decode(body, messages.Verdict)
        try:
            numbers = messages.numbers_in(verdict.missing, count)
        except ValueError as error:
            message = f"rank {line.peer} asked again for parcels that do not exist"
            raise ProtocolError(line.peer, message) from error
        if not numbers and 0 < verdict.read_bytes <= self._cargo.total_bytes:
            report.read_bytes = verdict.read_bytes
            report.bytes += verdict.read_bytes
            report.route = "memory+group" if report.route else "memory"
            self._progress.bytes = self._cargo.total_bytes
        return numbers

    def _plan(self, want: messages.Want) -> tuple[Parcels, Sequence[int]]:
        peer, manifest = self._line.peer, self._cargo.described.manifest
        for numbers, count in ((want.apart, len(manifest.storages)), (want.parts, len(manifest.parts))):
            if numbers and (sorted(set(numbers)) != numbers or numbers[0] < 0 or numbers[-1] >= count):
                raise ProtocolError(peer, f"rank {peer} wants tensors that were not offered")
        if want.digests and not self._cargo.offer.digests:
            raise ProtocolError(peer, f"rank {peer} wants digests that were not offered")
        cut = parcels.cut(plan.lay_out(manifest, want.apart, want.parts), self._cargo.offer.parcel_bytes)
        if parcels.fingerprint(cut) != want.fingerprint:
            raise ProtocolError(
                peer, f"rank {peer} derived other parcels from the same offer (different transfuse versions?)"
            )
        try:
            return cut, messages.numbers_in(want.parcels, len(cut))
        except ValueError as error:
            raise ProtocolError(peer, f"rank {peer} wants parcels that do not exist") from error
