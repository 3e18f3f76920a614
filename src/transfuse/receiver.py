"""The receiver's end of the conversation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from transfuse import messages, parcels, vm
from transfuse.accepting import Accepted, Wishes, accept
from transfuse.bursts import Incoming, Shape
from transfuse.chains import this_host
from transfuse.errors import CorruptData, PeerError, PeerLost, ProtocolError, TransfuseError
from transfuse.matching import prepare
from transfuse.messages import Message
from transfuse.pace import Pace
from transfuse.progress import Progress
from transfuse.reading import Reading
from transfuse.relay import Relay
from transfuse.report import Report
from transfuse.routes.group import OFFER_TAG, Line, valid_link_tag
from transfuse.routes.memory import Malformed, Reader, SourceEnded, Unreadable
from transfuse.talks import Caller

__all__ = ["receive"]

logger = logging.getLogger("transfuse")


def receive(line: Line, wishes: Wishes, caller: Caller, progress: Progress, report: Report, result: list[Any]) -> None:
    """Hear an offer, take what is wanted of it, verify it, and put the state into ``result``."""
    if wishes.failure is None:
        with report.phase("prepare"):
            # Before the offer: the source is describing its state meanwhile.
            try:
                wishes = replace(wishes, target=prepare(wishes.target, line.limits))
            except Exception as error:
                wishes = replace(wishes, failure=error)
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
    landing = accepted.landing
    try:
        missing = _Reading(line, wishes, accepted, caller, progress, report).read()
        if missing:
            _Taking(line, wishes, accepted, caller, progress, report).take(missing)
        with report.phase("finish"):
            result.append(_finish(line, accepted, report))
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


def _finish(line: Line, accepted: Accepted, report: Report) -> Any:
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
        line.send(Message.VERDICT, messages.encode(messages.Verdict([], report.read_bytes)))
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


class _Reading:
    """The memory route: everything that can be read where the source has it."""

    def __init__(
        self, line: Line, wishes: Wishes, accepted: Accepted, caller: Caller, progress: Progress, report: Report
    ) -> None:
        self._line = line
        self._wishes = wishes
        self._accepted = accepted
        self._caller = caller
        self._progress = progress
        self._report = report
        self._pace = Pace(accepted.offer.max_bytes_per_second)

    def read(self) -> Sequence[int]:
        """Read what can be read; the numbers of the parcels that have to be asked for."""
        everything = range(len(self._accepted.cut))
        memory, line = self._accepted.offer.memory, self._line
        if memory is None or not self._wishes.same_host or not everything:
            return everything
        if self._pace.rate is not None and self._pace.rate * line.timeout < line.limits.min_parcel_bytes:
            return everything  # Slower than the timeout allows: over the group such a source is noticed.
        line.phase = self._progress.phase = "reading the source's memory"
        try:
            with (
                self._report.phase("read"),
                line.holding_turn(lambda: self._progress.bytes),
                Reader(memory, len(self._accepted.manifest.storages), self._pace.at_once(vm.CALL_BYTES)) as reader,
            ):
                return self._read_with(reader)
        except Unreadable as reason:
            if isinstance(reason, SourceEnded) and self._progress.bytes:
                raise PeerLost(line.peer, f"rank {line.peer} ended while its memory was being read") from reason
            logger.info("rank %d: %s; using the group route", line.peer, reason)
        except Malformed as error:
            raise ProtocolError(line.peer, f"rank {line.peer}: {error}") from error
        except BaseException as error:
            line.refuse(error)
            raise
        self._progress.bytes = 0
        return everything

    def _read_with(self, reader: Reader) -> Sequence[int]:
        accepted, report = self._accepted, self._report
        staging = self._line.limits.staging_bytes
        reading = Reading(reader, accepted.cut, accepted.landing, staging, self._pace_or_stop, self._went_on)
        numbers = reading.readable()
        failed = set(reading.read(numbers))
        if self._wishes.verify:
            failed |= self._settle_differences(reading, [n for n in numbers if n not in failed])
        reader.check()
        done = [n for n in numbers if n not in failed]
        if failed:
            logger.info("rank %d: %d parcels cannot be read, they come over the group", self._line.peer, len(failed))
        if done:
            report.route = "memory"
        report.parcels += len(done)
        report.read_bytes = int(accepted.cut.nbytes[done].sum())
        report.bytes += report.read_bytes
        report.verified = bool(self._wishes.verify)
        self._progress.bytes = report.read_bytes
        missing: list[int] = np.setdiff1d(np.arange(len(accepted.cut)), np.array(done, dtype=np.int64)).tolist()
        return missing

    def _settle_differences(self, reading: Reading, numbers: list[int]) -> set[int]:
        """Read again what differs from a second look at the source; the parcels that cannot be read any more."""
        gone: set[int] = set()
        for _ in range(self._line.limits.max_repairs + 1):
            numbers = reading.differing(numbers)
            if not numbers:
                return gone
            self._report.repaired += len(numbers)
            gone |= set(reading.read(numbers))
            numbers = [n for n in numbers if n not in gone]
        reading.check()  # What a source that has left does with its tensors is its own business.
        raise _corrupt(self._line, self._accepted, numbers, "The source's tensors change while it sends")

    def _went_on(self, nbytes: int) -> None:
        self._progress.bytes += nbytes
        self._caller.tick()
        self._pace_or_stop(nbytes)

    def _pace_or_stop(self, nbytes: int) -> None:
        self._pace.take(nbytes, lambda: self._caller.cause is not None)
        if self._caller.cause is not None:
            raise self._caller.cause


class _Taking:
    """The group route: parcels that the source sends, or a receiver that has them already."""

    def __init__(
        self, line: Line, wishes: Wishes, accepted: Accepted, caller: Caller, progress: Progress, report: Report
    ) -> None:
        self._line = line
        self._wishes = wishes
        self._accepted = accepted
        self._caller = caller
        self._progress = progress
        self._report = report

    def take(self, numbers: Sequence[int]) -> None:
        """Ask for these parcels, receive them, and ask again for what arrived wrong."""
        line, accepted, report = self._line, self._accepted, self._report
        with report.phase("want"):
            agreed = self._ask(numbers)
        shape = Shape.of(accepted.offer, agreed, accepted.digests)
        report.verified = accepted.digests and (report.verified or not report.read_bytes)
        report.route = "memory+group" if report.read_bytes else "group"
        relay = Relay(line, accepted.cut, accepted.landing, shape, self._caller)
        try:
            if agreed.downstream is not None:
                relay.start(agreed.downstream, numbers)
            with report.phase("receive"):
                if agreed.upstream is not None:
                    numbers = self._take_relayed(relay, agreed, numbers)
                if numbers:
                    self._take_from_source(shape, relay, numbers)
        except BaseException as error:
            relay.finish(error)
            raise
        with report.phase("pass on"), line.holding_turn():
            relay.finish()

    def _ask(self, numbers: Sequence[int]) -> messages.Agreed:
        line, accepted = self._line, self._accepted
        line.phase = self._progress.phase = "sending the want"
        want = messages.Want(
            parcels.fingerprint(accepted.cut),
            accepted.digests,
            accepted.apart,
            accepted.parts,
            messages.pairs_of(numbers),
            self._wishes.relay and line.group.relays,
            this_host(),
        )
        line.send(Message.WANT, messages.encode(want))
        _, body = line.expect(Message.AGREED)
        agreed = line.decode(body, messages.Agreed)
        links = [link for link in (agreed.upstream, agreed.downstream) if link is not None]
        if links and not want.relay:
            raise ProtocolError(line.peer, f"rank {line.peer} agreed to a chain that was not wanted")
        if not all(valid_link_tag(link.tag) and line.group.has(link.rank) for link in links):
            raise ProtocolError(line.peer, f"rank {line.peer} agreed to a chain with impossible links")
        if not 0 <= agreed.patience < float("inf"):
            raise ProtocolError(line.peer, f"rank {line.peer} agreed to a chain with an impossible patience")
        return agreed

    def _take_relayed(self, relay: Relay, agreed: messages.Agreed, numbers: Sequence[int]) -> Sequence[int]:
        """Take parcels from the neighbour; the numbers of those that the source has to send after all."""
        assert agreed.upstream is not None
        line, report = self._line, self._report
        line.phase = self._progress.phase = "receiving relayed parcels"
        try:
            with line.holding_turn(lambda: self._progress.bytes):
                # Whatever the source thinks: no silence is longer than the caller allows.
                patience = min(agreed.patience, line.timeout)
                wrong = relay.take(agreed.upstream, numbers, self._progress, patience)
        except BaseException as error:
            line.refuse(error)
            raise
        arrived = relay.gate.landed_among(numbers)
        self._count(arrived)
        report.relayed_bytes = self._bytes_of(arrived)
        missing = sorted({*numbers} - {*arrived} | {*wrong})
        if missing:
            report.repaired += len(wrong)
            self._ask_again(missing)
        return missing

    def _take_from_source(self, shape: Shape, relay: Relay, numbers: Sequence[int]) -> None:
        line, accepted = self._line, self._accepted
        incoming = Incoming(
            line,
            accepted.cut,
            accepted.landing,
            shape,
            self._caller,
            self._progress,
            landed=relay.gate.landed,
        )
        for attempt in range(line.limits.max_repairs + 1):
            line.phase = self._progress.phase = "receiving parcels"
            wrong = incoming.take(numbers)
            self._count(numbers)
            if not wrong:
                return
            if attempt == line.limits.max_repairs:
                break
            self._report.repaired += len(wrong)
            self._ask_again(wrong)
            numbers = wrong
        why = "The bytes are damaged on the way, or the source's tensors change while it sends"
        error = _corrupt(line, accepted, wrong, why)
        line.refuse(error)
        raise error

    def _ask_again(self, numbers: Sequence[int]) -> None:
        self._line.phase = "sending the verdict"
        self._line.send(Message.VERDICT, messages.encode(messages.Verdict(messages.pairs_of(numbers))))
        self._line.expect(Message.AGREED)

    def _count(self, numbers: Sequence[int]) -> None:
        self._report.bytes += self._bytes_of(numbers)
        self._report.parcels += len(numbers)

    def _bytes_of(self, numbers: Sequence[int]) -> int:
        return int(self._accepted.cut.nbytes[np.array(numbers, dtype=np.int64)].sum())


def _corrupt(line: Line, accepted: Accepted, wrong: Sequence[int], why: str) -> CorruptData:
    """The error for parcels that stay wrong."""
    boxes = [piece.box for number in wrong for piece in accepted.cut.pieces(number)]
    leaves = accepted.landing.paths_of(boxes)
    return CorruptData(
        line.peer,
        leaves,
        f"rank {line.peer}: {len(wrong)} parcels were still wrong after {line.limits.max_repairs} repairs; "
        f"leaves: {', '.join(leaves[:10])}{', …' if len(leaves) > 10 else ''}. {why}",
    )
