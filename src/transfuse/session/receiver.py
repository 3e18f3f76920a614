"""The receiver's end of the conversation with one source."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress

import numpy as np

from transfuse.errors import CorruptData, PeerError, PeerLost, ProtocolError, SourceMutated
from transfuse.memory import packing, vm
from transfuse.memory.digest import WIDE_BYTES
from transfuse.phases import RELAYING, Phase
from transfuse.plan import parcels
from transfuse.plan.parcels import Parcels
from transfuse.session.accepting import compares_digests, read_offer
from transfuse.session.bursts import Incoming, Shape, nothing_more
from transfuse.session.chains import this_host
from transfuse.session.ledger import Ledger
from transfuse.session.receive import Compare, Confirm, Fetch, Gathering
from transfuse.session.relay import Relay
from transfuse.state.manifest import Manifest
from transfuse.state.tensors import Bools
from transfuse.wire import messages
from transfuse.wire.group import OFFER_TAG, Line, valid_link_tag
from transfuse.wire.memory import Malformed, Reader, SourceEnded, Unreadable
from transfuse.wire.memory_read import Reading
from transfuse.wire.messages import Message, Offer
from transfuse.wire.rate_limit import Pace

__all__ = ["describe", "receive"]

logger = logging.getLogger("transfuse")

#: After so many bytes read from memory the lease is looked at, and they are known to be good.
READ_BYTES = 512 << 20


def receive(line: Line, gathering: Gathering) -> None:
    """Hear an offer, take from this source what it is to bring, and tell it how the receive has ended."""
    gathering.join(line)
    gathering.prepare(line)
    try:
        _Conversation(line, gathering, _hear(line, gathering)).run()
    except BaseException as error:
        left = gathering.left(line.peer)
        if left is not None:
            line.refuse(left)  # It has come back, too late.
            gathering.give_back(line.peer)
        else:
            if not line.broken:
                line.refuse(error)
            gathering.lost(line.peer, error)
        raise


def _hear(line: Line, gathering: Gathering) -> Offer:
    """Hear the source's offer, and that it is what the other sources offer too."""
    with gathering.phase(line, Phase.WAIT_FOR_OFFER):
        try:
            _, body = line.expect(Message.OFFER, tag=OFFER_TAG)
        except ProtocolError as error:
            if line.tag != OFFER_TAG:
                line.refuse(error)  # The header was sound: the source can be told.
            else:
                line.broken = True
            raise
    gathering.may_leave(line, None)
    with gathering.phase(line, Phase.PLAN):
        if gathering.request.failure is not None:
            gathering.fail(gathering.request.failure)
            raise gathering.request.failure
        line.peer_timeout = messages.timeout_in(body) or line.timeout
        with line.holding_turn():
            offer = read_offer(body, line.limits, line.peer)
            del body
            gathering.agree(line, offer, lambda: describe(line, offer))
        gathering.caller.lend(line.peer)
    return offer


def describe(line: Line, offer: Offer) -> Offer:
    """Ask a source for what its offer left out."""
    if offer.manifest is not None:
        return offer
    line.send(Message.DESCRIBE)
    _, body = line.expect(Message.OFFER)
    described = read_offer(body, line.limits, line.peer)
    if described.manifest is None or described.likeness != offer.likeness or described.digest != offer.digest:
        raise ProtocolError(line.peer, f"rank {line.peer} describes another state than it has offered")
    return described


class _Conversation:
    """With one source, from its offer on."""

    def __init__(self, line: Line, gathering: Gathering, offer: Offer) -> None:
        self._line = line
        self._gathering = gathering
        self._offer = offer
        self._caller = gathering.caller
        self._accepted = gathering.accepted
        self._ledger: Ledger = gathering.ledger
        self._report = gathering.report
        self._progress = gathering.progress[line.peer]
        self._pace = Pace(offer.max_bytes_per_second)
        self._read_bytes = 0
        #: Which parcels can be read from its memory.
        self._readable: Bools = np.zeros(len(self._ledger), dtype=bool)
        #: What it can bring, if that is not everything.
        self._portion = gathering.portion(line.peer)
        self._want: messages.Want | None = None
        self._shape: Shape | None = None
        self._relay: Relay | None = None
        #: How often each parcel has arrived wrong.
        self._wrong: dict[int, int] = {}

    def run(self) -> None:
        line, gathering = self._line, self._gathering
        cause: BaseException | None = None
        # Where nothing is needed from anybody, whoever comes first ends it.
        needed = self._portion is None or bool(self._portion.held.any()) or not len(self._ledger)
        if not needed:
            gathering.release(line.peer)
        try:
            if needed:
                self._read()
            while needed:
                with line.holding_turn(lambda: self._progress.bytes):
                    task = gathering.next_task(line, self._share())
                if task is None:
                    break
                if isinstance(task, Fetch) and self._readable[np.asarray(task.numbers)].any():
                    # Somebody else owed them.
                    self._ledger.give_back(line.peer)
                    self._read()
                elif isinstance(task, Fetch):
                    self._fetch(task.numbers)
                elif isinstance(task, Compare):
                    self._compare(task.numbers)
                elif isinstance(task, Confirm):
                    self._confirm()
        except BaseException as error:
            cause = error
            raise
        finally:
            self._pass_on(cause)
        with suppress(PeerError), gathering.phase(line, Phase.VERDICT):
            # Everything is here and verified: whether the source still lives no longer matters.
            line.send(Message.VERDICT, messages.encode(messages.Verdict(self._read_bytes)))
            if gathering.several:
                gathering.may_leave(line, line.abandon)  # A frozen one takes no verdict.
            line.settle()

    def _share(self) -> float:
        """How much to ask this source for at a time: all, unless there are others."""
        if not self._gathering.several:
            return float("inf")
        return self._burst_bytes() * self._offer.bursts_ahead

    def _burst_bytes(self) -> int:
        """With several sources bursts are small: all of them are staged, and the last ones should end together."""
        sources = len(self._gathering.ranks)
        if sources == 1:
            return self._offer.burst_bytes
        staged = self._line.limits.staging_bytes // (sources * self._offer.bursts_ahead)
        fair = self._accepted.cut.total_bytes // (16 * sources)
        # One that takes half the timeout is left as silent.
        timely = int(self._line.timeout / 4 * self._line.limits.slowest_bytes_per_second)
        return max(min(self._offer.burst_bytes, staged, fair, timely), min(self._accepted.parcel_bytes, staged), 1)

    # -- memory

    def _read(self) -> None:
        """Read from the source's memory whatever can be read."""
        line, gathering, memory = self._line, self._gathering, self._offer.memory
        try:
            if memory is None or not gathering.request.options.same_host or not len(self._ledger):
                return
            if self._pace.rate is not None and self._pace.rate * line.timeout < line.limits.min_parcel_bytes:
                return  # Slower than the timeout allows: over the group such a source is noticed.
            line.phase = self._progress.phase = Phase.READ.doing
            self._offer = describe(line, self._offer)
            memory = self._offer.memory
            if memory is None:
                raise Malformed("an offer whose memory is gone")
            manifest, theirs = self._seen_from_there()
            # One reader uses all threads, unless it is limited.
            turn = gathering.reading if self._pace.rate is None else nullcontext()
            with line.holding_turn(lambda: self._progress.bytes), turn, gathering.phase(line, Phase.READ):
                if self._ledger.complete:
                    return
                call_bytes = self._pace.at_once(vm.CALL_BYTES)
                with Reader(memory, len(manifest.storages), call_bytes) as reader:
                    self._read_with(reader, theirs)
        except Unreadable as reason:
            self._readable[:] = False
            self._ledger.give_back(line.peer)
            if isinstance(reason, SourceEnded) and self._progress.bytes:
                raise PeerLost(line.peer, f"rank {line.peer} ended while its memory was being read") from reason
            logger.info("rank %d: %s; using the group route", line.peer, reason)
        except Malformed as error:
            raise ProtocolError(line.peer, f"rank {line.peer}: {error}") from error
        finally:
            self._progress.bytes = self._ledger.bytes_from(line.peer)
            gathering.done_reading(line.peer)

    def _seen_from_there(self) -> tuple[Manifest, Parcels]:
        """The source's own manifest, and all parcels with their boxes in its memory."""
        accepted = self._accepted
        if self._portion is None or accepted.assembled is None:
            return accepted.manifest, accepted.cut
        try:
            manifest = Manifest.decode(self._offer.described, self._line.limits, self._offer.coordinates)
            return manifest, accepted.assembled.seen_from(self._portion, manifest)
        except ValueError as error:
            raise Malformed(f"a malformed offer: {error}") from error

    def _read_with(self, reader: Reader, theirs: Parcels) -> None:
        accepted, report, line, ledger = self._accepted, self._report, self._line, self._ledger
        staging = line.limits.staging_bytes
        reading = Reading(reader, theirs, accepted.landing, staging, self._pace_or_stop, self._went_on)
        readable = self._readable
        if not readable.any():
            readable[reading.readable()] = True
            if self._portion is not None:
                readable &= self._portion.held
        unreadable = 0
        rate = self._pace.rate
        share = READ_BYTES if rate is None else min(READ_BYTES, int(rate * line.timeout / 8))
        while len(numbers := self._gathering.read_share(line.peer, share, readable)):
            failed = set(reading.read(numbers))
            if self._gathering.request.options.verify:
                failed |= self._settle_differences(reading, [n for n in numbers if n not in failed])
            reader.check()
            done = [n for n in numbers if n not in failed]
            ledger.land(line.peer, done)
            ledger.give_back(line.peer)
            readable[list(failed)] = False
            unreadable += len(failed)
            nbytes = ledger.bytes_of(done)
            self._read_bytes += nbytes
            if done:
                report.count(line.peer, nbytes, len(done), "memory")
            report.read_bytes += nbytes
            report.verified = bool(self._gathering.request.options.verify)
        if unreadable:
            logger.info("rank %d: %d parcels cannot be read, they come over the group", line.peer, unreadable)

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
        leaves = self._leaves_of(numbers)
        raise SourceMutated(
            self._line.peer,
            leaves,
            f"rank {self._line.peer} changed its tensors while it sent them: {_some(leaves)}. Nothing may step the "
            "optimizer or write to the state before send_checkpoint has returned",
        )

    def _went_on(self, nbytes: int) -> None:
        self._progress.bytes += nbytes
        self._caller.tick()
        self._pace_or_stop(nbytes)

    def _pace_or_stop(self, nbytes: int) -> None:
        self._pace.take(nbytes, lambda: self._caller.cause is not None)
        if self._caller.cause is not None:
            raise self._caller.cause

    # -- group

    def _fetch(self, numbers: Sequence[int]) -> None:
        """Ask for these parcels and receive them, or what comes of them."""
        agreed = self._ask(numbers)
        assert self._want is not None
        shape = self._shape = self._shape or Shape.of(self._offer, self._want, agreed)
        report, gathering, line = self._report, self._gathering, self._line
        report.verified = shape.digests and (report.verified or not report.read_bytes)
        if agreed.downstream is not None or agreed.upstream is not None:
            self._relay = Relay(line, self._accepted.cut, self._accepted.landing, shape, self._caller)
            if agreed.downstream is not None:
                self._relay.start(agreed.downstream, numbers)
        with gathering.phase(line, Phase.RECEIVE):
            if agreed.upstream is not None:
                self._take_relayed(agreed, numbers)
                return
            incoming = Incoming(
                line,
                self._accepted.cut,
                self._accepted.landing,
                shape,
                self._caller,
                self._progress,
                landed=self._landed,
                always_staged=gathering.several or line.group.moves_tensors,
            )
            gathering.may_leave(line, incoming.leave if gathering.several else None)
            try:
                incoming.take(numbers, self._more if gathering.several else nothing_more)
            except PeerLost:
                self._check_own_memory()
                raise
            finally:
                gathering.may_leave(line, None)
        self._sort_out(incoming.wrong)

    def _check_own_memory(self) -> None:
        """Raise if a connection broke because the backend could not write where it was told to."""
        landing, boxes = self._accepted.landing, self._accepted.cut.boxes
        here = np.flatnonzero(landing.addresses > 0)
        packing.check_reach(landing, here, vm.ranges(landing.addresses[here], boxes.nbytes[here]), write=True)

    def _more(self) -> tuple[int, Sequence[int]]:
        """What to ask for in addition: the number that the source has for the first, and the numbers here."""
        run = self._gathering.more(self._line.peer, self._burst_bytes())
        return run.start, run if self._portion is None else self._portion.numbers[run.start : run.stop].tolist()

    def _pairs(self, numbers: Sequence[int]) -> list[int]:
        """Parcels by the numbers that the source has for them."""
        if self._portion is not None:
            numbers = np.searchsorted(self._portion.numbers, np.asarray(numbers, dtype=np.int64)).tolist()
        return messages.pairs_of(numbers)

    def _landed(self, numbers: Sequence[int], digests: Sequence[int], wrong: Sequence[int]) -> None:
        """A burst has landed; of its parcels, these are wrong."""
        if self._relay is not None:
            self._relay.gate.landed(numbers, digests)
        self._ledger.damaged(self._line.peer, wrong)
        good = [i for i, n in enumerate(numbers) if n not in wrong] if wrong else range(len(numbers))
        done = [numbers[i] for i in good]
        self._ledger.land(self._line.peer, done)
        self._report.count(self._line.peer, self._ledger.bytes_of(numbers), len(numbers), "group")

    def _sort_out(self, wrong: Sequence[int]) -> None:
        """Let parcels that arrived wrong be wanted again, here or elsewhere; but not from here without end."""
        line = self._line
        self._report.repaired += len(wrong)
        for number in wrong:
            self._wrong[number] = self._wrong.get(number, 0) + 1
        lasting = [number for number in wrong if self._wrong[number] > line.limits.max_repairs]
        if lasting:
            self._report.repaired -= len(lasting)
            leaves = self._leaves_of(lasting)
            raise CorruptData(
                line.peer,
                leaves,
                f"rank {line.peer}: {len(lasting)} parcels were still wrong after {line.limits.max_repairs} repairs; "
                f"leaves: {_some(leaves)}. The bytes are damaged on the way",
            )
        self._ledger.give_back(line.peer)
        self._progress.bytes = self._ledger.bytes_from(line.peer)

    def _ask(self, numbers: Sequence[int]) -> messages.Agreed:
        """Ask for parcels; what the source agrees to."""
        line, accepted = self._line, self._accepted
        with self._gathering.phase(line, Phase.WANT):
            if self._want is not None:
                line.send(Message.MORE, messages.encode(messages.More(self._pairs(numbers))))
                self._expect_agreed()
                return messages.Agreed()
            alone = not self._gathering.several and self._portion is None
            want = self._want = messages.Want(
                parcels.fingerprint(accepted.cut) if self._portion is None else self._portion.fingerprint,
                accepted.parcel_bytes,
                self._burst_bytes(),
                compares_digests(self._offer, self._gathering.request, line.group.device),
                accepted.apart,
                accepted.parts,
                self._pairs(numbers),
                self._gathering.request.options.relay
                and line.group.relays
                and alone
                and len(numbers) == len(self._ledger),
                this_host(),
                None if self._portion is None else self._portion.picks,
            )
            line.send(Message.WANT, messages.encode(want))
            agreed = line.decode(self._expect_agreed(), messages.Agreed)
        links = [link for link in (agreed.upstream, agreed.downstream) if link is not None]
        if links and not want.relay:
            raise ProtocolError(line.peer, f"rank {line.peer} agreed to a chain that was not wanted")
        if not all(valid_link_tag(link.tag) and line.group.has(link.rank) for link in links):
            raise ProtocolError(line.peer, f"rank {line.peer} agreed to a chain with impossible links")
        if not 0 <= agreed.patience < float("inf"):
            raise ProtocolError(line.peer, f"rank {line.peer} agreed to a chain with an impossible patience")
        return agreed

    def _expect_agreed(self, *kinds: Message) -> bytearray:
        """Wait for an answer, during which nothing of ours is in flight."""
        line = self._line
        self._gathering.may_leave(line, line.abandon)
        try:
            _, body = line.expect(*(kinds or (Message.AGREED,)))
        finally:
            self._gathering.may_leave(line, None)
        left = self._gathering.left(line.peer)
        if left is not None:
            raise left
        return body

    def _take_relayed(self, agreed: messages.Agreed, numbers: Sequence[int]) -> None:
        """Take parcels from the neighbour; what does not come from there is wanted from the source."""
        assert agreed.upstream is not None
        assert self._relay is not None
        line = self._line
        line.phase = self._progress.phase = RELAYING
        with line.holding_turn(lambda: self._progress.bytes):
            # Whatever the source thinks: no silence is longer than the caller allows.
            patience = min(agreed.patience, line.timeout)
            wrong = self._relay.take(agreed.upstream, numbers, self._progress, self._landed, patience)
        self._report.relayed_bytes = self._ledger.bytes_of(self._relay.gate.landed_among(numbers))
        self._report.repaired += len(wrong)
        self._ledger.give_back(line.peer)

    def _pass_on(self, cause: BaseException | None = None) -> None:
        """Wait until the neighbour after has everything; with a cause, until it has been told."""
        relay, self._relay = self._relay, None
        if relay is None:
            return
        if cause is not None:
            relay.finish(cause)
            return
        with self._gathering.phase(self._line, Phase.PASS_ON), self._line.holding_turn():
            relay.finish()

    # -- questions

    def _compare(self, numbers: Sequence[int]) -> None:
        """Find out which of these parcels, of which something is here already, are as the source has them."""
        line = self._line
        if self._want is None:
            self._ask(())
        with self._gathering.phase(line, Phase.COMPARE):
            line.send(Message.COMPARE, messages.encode(messages.More(self._pairs(numbers))))
            # Both ends hash at the same time.
            mine = packing.wide_digests_of(self._accepted.cut, self._accepted.landing, numbers)
            theirs = line.decode(self._expect_agreed(Message.DIGESTS), messages.Digests).digests
        if len(theirs) != WIDE_BYTES * len(numbers):
            raise ProtocolError(line.peer, f"rank {line.peer} compared parcels that it was not asked about")
        ours = np.frombuffer(b"".join(mine), dtype="V16")
        self._gathering.compared(line.peer, numbers, ours == np.frombuffer(theirs, dtype="V16"))

    def _confirm(self) -> None:
        """Ask the source whether its tensors are still what they were when it described them."""
        line = self._line
        self._pass_on()
        with self._gathering.phase(line, Phase.CONFIRM):
            line.send(Message.CHECK)
            self._expect_agreed()
        self._gathering.confirmed(line.peer)

    def _leaves_of(self, numbers: Sequence[int]) -> list[str]:
        boxes = [piece.box for number in numbers for piece in self._accepted.cut.pieces(number)]
        return self._accepted.landing.paths_of(boxes)


def _some(leaves: Sequence[str]) -> str:
    return f"{', '.join(leaves[:10])}{', …' if len(leaves) > 10 else ''}"
