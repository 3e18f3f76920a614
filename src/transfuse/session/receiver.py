"""The receiver's end of the conversation with one source."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np

from transfuse.errors import CorruptData, PeerError, PeerLost, ProtocolError, SourceMutated
from transfuse.limits import Sizes
from transfuse.memory import packing, vm
from transfuse.memory.digest import WIDE_BYTES
from transfuse.phases import RELAYING, Phase
from transfuse.plan.parcels import Parcels
from transfuse.session.accepting import compares_digests, read_offer
from transfuse.session.bursts import Incoming, Shape, nothing_more
from transfuse.session.ledger import Ledger
from transfuse.session.receive import Compare, Confirm, Fetch, Receive
from transfuse.session.relay import Relay, this_host
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


def receive(line: Line, shared: Receive) -> None:
    """Hear an offer, take from this source what it is to bring, and tell it how the receive has ended."""
    shared.roster.join(line)
    shared.negotiator.prepare(line)
    try:
        _Conversation(line, shared, _hear(line, shared)).run()
    except BaseException as error:
        left = shared.roster.why_abandoned(line.peer)
        if left is not None:
            line.refuse(left)  # It has come back, too late.
            shared.give_back(line.peer)
        else:
            if not line.broken:
                line.refuse(error)
            shared.lost(line.peer, error)
        raise


def _hear(line: Line, shared: Receive) -> Offer:
    """Hear the source's offer, and that it is what the other sources offer too."""
    with shared.roster.phase(line, Phase.WAIT_FOR_OFFER):
        try:
            _, body = line.expect(Message.OFFER, tag=OFFER_TAG)
        except ProtocolError as error:
            if line.tag != OFFER_TAG:
                line.refuse(error)  # The header was sound: the source can be told.
            else:
                line.broken = True
            raise
    shared.roster.may_abandon(line, None)
    with shared.roster.phase(line, Phase.PLAN):
        if shared.request.failure is not None:
            shared.roster.fail(shared.request.failure)
            raise shared.request.failure
        line.peer_timeout = messages.timeout_in(body) or line.timeout
        with line.holding_turn():
            offer = read_offer(body, line.limits, line.peer)
            del body
            shared.agree(line, offer, lambda: describe(line, offer))
        shared.roster.caller.lend(line.peer)
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

    def __init__(self, line: Line, shared: Receive, offer: Offer) -> None:
        self._line = line
        self._receive = shared
        self._offer = offer
        self._caller = shared.roster.caller
        self._accepted = shared.accepted
        self._ledger: Ledger = shared.ledger
        self._report = shared.roster.report
        self._progress = shared.roster.progress[line.peer]
        self._pace = Pace(offer.max_bytes_per_second)
        self._read_bytes = 0
        #: Which parcels can be read from its memory.
        self._readable: Bools = np.zeros(len(self._ledger), dtype=bool)
        #: What it can send.
        self._share = shared.share(line.peer)
        self._want: messages.Want | None = None
        self._shape: Shape | None = None
        self._relay: Relay | None = None
        #: How often each parcel has arrived wrong.
        self._wrong: dict[int, int] = {}

    def run(self) -> None:
        line, shared = self._line, self._receive
        cause: BaseException | None = None
        # Where nothing is needed from anybody, whoever comes first ends it.
        needed = bool(self._share.held.any()) or not len(self._ledger)
        if not needed:
            shared.release(line.peer)
        try:
            if needed:
                self._read()
            while needed:
                with line.holding_turn(lambda: self._progress.bytes):
                    task = shared.next_task(line, self._task_bytes())
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
        with suppress(PeerError), shared.roster.phase(line, Phase.VERDICT):
            # Everything is here and verified: whether the source still lives no longer matters.
            line.send(Message.VERDICT, messages.encode(messages.Verdict(self._read_bytes)))
            if shared.roster.several:
                shared.roster.may_abandon(line, line.abandon)  # A frozen one takes no verdict.
            line.settle()

    def _task_bytes(self) -> float:
        """How much to ask this source for at a time: all, unless there are others."""
        if not self._receive.roster.several:
            return float("inf")
        return self._burst_bytes() * self._offer.bursts_ahead

    def _burst_bytes(self) -> int:
        """With several sources bursts are small: all of them are staged, and the last ones should end together."""
        return Sizes(self._line.limits, self._line.timeout).burst(
            self._offer.burst_bytes,
            self._accepted.cut.total_bytes,
            self._accepted.parcel_bytes,
            sources=len(self._receive.roster.ranks),
            ahead=self._offer.bursts_ahead,
        )

    # -- memory

    def _read(self) -> None:
        """Read from the source's memory whatever can be read."""
        line, shared, memory = self._line, self._receive, self._offer.memory
        try:
            if memory is None or not shared.request.options.same_host or not len(self._ledger):
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
            turn = shared.reading if self._pace.rate is None else nullcontext()
            with line.holding_turn(lambda: self._progress.bytes), turn, shared.roster.phase(line, Phase.READ):
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
            shared.done_reading(line.peer)

    def _seen_from_there(self) -> tuple[Manifest, Parcels]:
        """The source's own manifest, and all parcels with their boxes in its memory."""
        offer = self._offer
        try:
            return self._share.seen_from_source(
                lambda: Manifest.decode(offer.described, self._line.limits, offer.coordinates)
            )
        except ValueError as error:
            raise Malformed(f"a malformed offer: {error}") from error

    def _read_with(self, reader: Reader, theirs: Parcels) -> None:
        accepted, report, line, ledger = self._accepted, self._report, self._line, self._ledger
        staging = line.limits.staging_bytes
        reading = Reading(reader, theirs, accepted.landing, staging, self._pace_or_stop, self._went_on)
        readable = self._readable
        if not readable.any():
            readable[reading.readable()] = True
            readable &= self._share.held
        unreadable = 0
        share = Sizes(line.limits, line.timeout).read(self._pace.rate)
        while len(numbers := self._receive.read_share(line.peer, share, readable)):
            failed = set(reading.read(numbers))
            if self._receive.request.options.verify:
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
            report.verified = bool(self._receive.request.options.verify)
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
        report, shared, line = self._report, self._receive, self._line
        report.verified = shape.digests and (report.verified or not report.read_bytes)
        if agreed.downstream is not None or agreed.upstream is not None:
            self._relay = Relay(line, self._accepted, self._ledger, shape, self._caller)
            if agreed.downstream is not None:
                self._relay.pass_on(agreed.downstream, numbers)
        with shared.roster.phase(line, Phase.RECEIVE):
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
                landed=partial(self._landed, line.peer),
                always_staged=shared.roster.several or line.group.moves_tensors,
            )
            several = shared.roster.several
            with shared.roster.abandonable(line, incoming.leave if several else None):
                try:
                    incoming.take(numbers, self._more if several else nothing_more)
                except PeerLost:
                    self._check_own_memory()
                    raise
        self._sort_out(incoming.wrong)

    def _check_own_memory(self) -> None:
        """Raise if a connection broke because the backend could not write where it was told to."""
        landing, boxes = self._accepted.landing, self._accepted.cut.boxes
        here = np.flatnonzero(landing.addresses > 0)
        packing.check_reach(landing, here, vm.ranges(landing.addresses[here], boxes.nbytes[here]), write=True)

    def _more(self) -> tuple[int, Sequence[int]]:
        """What to ask for in addition: the number that the source has for the first, and the numbers here."""
        run = self._receive.more(self._line.peer, self._burst_bytes())
        return run.start, self._share.ours(run)

    def _pairs(self, numbers: Sequence[int]) -> list[int]:
        """Parcels by the numbers that the source has for them."""
        return messages.pairs_of(self._share.theirs(numbers))

    def _landed(self, rank: int, numbers: Sequence[int], digests: Sequence[int], wrong: Sequence[int]) -> None:
        """A burst of the source or of the neighbour with this rank has landed; of its parcels, these are wrong."""
        self._ledger.land(rank, numbers, wrong, digests)
        nbytes = self._ledger.bytes_of(numbers)
        self._report.count(self._line.peer, nbytes, len(numbers), "group")
        if rank != self._line.peer:
            self._report.relayed_bytes += nbytes

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
        with self._receive.roster.phase(line, Phase.WANT):
            if self._want is not None:
                line.send(Message.MORE, messages.encode(messages.More(self._pairs(numbers))))
                self._expect_agreed()
                return messages.Agreed()
            share = self._share
            alone = not self._receive.roster.several and share.is_everything
            relay = self._receive.request.options.relay
            want = self._want = messages.Want(
                fingerprint=share.fingerprint,
                parcel_bytes=accepted.parcel_bytes,
                burst_bytes=self._burst_bytes(),
                digests=compares_digests(self._offer, self._receive.request, line.group.device),
                apart=share.apart,
                parts=share.parts,
                parcels=self._pairs(numbers),
                relay=relay and line.group.relays and alone and len(numbers) == len(self._ledger),
                host=this_host(),
                picks=share.picks,
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
        with self._receive.roster.abandonable(line, line.abandon):
            _, body = line.expect(*(kinds or (Message.AGREED,)))
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
            landed = partial(self._landed, agreed.upstream.rank)
            wrong = self._relay.take(agreed.upstream, numbers, self._progress, landed, patience)
        self._report.repaired += len(wrong)

    def _pass_on(self, cause: BaseException | None = None) -> None:
        """Wait until the neighbour after has everything; with a cause, until it has been told."""
        relay, self._relay = self._relay, None
        if relay is None:
            return
        if cause is not None:
            relay.finish(cause)
            return
        with self._receive.roster.phase(self._line, Phase.PASS_ON), self._line.holding_turn():
            relay.finish()

    # -- questions

    def _compare(self, numbers: Sequence[int]) -> None:
        """Find out which of these parcels, of which something is here already, are as the source has them."""
        line = self._line
        if self._want is None:
            self._ask(())
        with self._receive.roster.phase(line, Phase.COMPARE):
            line.send(Message.COMPARE, messages.encode(messages.More(self._pairs(numbers))))
            # Both ends hash at the same time.
            mine = packing.wide_digests_of(self._accepted.cut, self._accepted.landing, numbers)
            theirs = line.decode(self._expect_agreed(Message.DIGESTS), messages.Digests).digests
        if len(theirs) != WIDE_BYTES * len(numbers):
            raise ProtocolError(line.peer, f"rank {line.peer} compared parcels that it was not asked about")
        ours = np.frombuffer(b"".join(mine), dtype="V16")
        self._receive.compared(line.peer, numbers, ours == np.frombuffer(theirs, dtype="V16"))

    def _confirm(self) -> None:
        """Ask the source whether its tensors are still what they were when it described them."""
        line = self._line
        self._pass_on()
        with self._receive.roster.phase(line, Phase.CONFIRM):
            line.send(Message.CHECK)
            self._expect_agreed()
        self._receive.confirmed(line.peer)

    def _leaves_of(self, numbers: Sequence[int]) -> list[str]:
        boxes = [piece.box for number in numbers for piece in self._accepted.cut.pieces(number)]
        return self._accepted.landing.paths_of(boxes)


def _some(leaves: Sequence[str]) -> str:
    return f"{', '.join(leaves[:10])}{', …' if len(leaves) > 10 else ''}"
