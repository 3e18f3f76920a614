"""The receiver's end of the conversation with one source."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from transfuse.errors import CorruptData, PeerError, PeerLost, ProtocolError
from transfuse.memory import packing, vm
from transfuse.memory.digest import WIDE_BYTES
from transfuse.phases import RELAYING, Phase
from transfuse.session.bursts import Incoming, Shape, nothing_more
from transfuse.session.ledger import Ledger
from transfuse.session.planning import compares_digests, read_offer
from transfuse.session.pulling import Pulling, leaves_of, some_of
from transfuse.session.receive_from_all import Compare, Confirm, Fetch, Receive
from transfuse.session.relay import Relay, this_host
from transfuse.sizes import Sizes
from transfuse.wire import messages
from transfuse.wire.channel import Channel
from transfuse.wire.group import OFFER_TAG, valid_link_tag
from transfuse.wire.messages import Message, Offer

__all__ = ["describe", "receive"]


def receive(channel: Channel, shared: Receive) -> None:
    """Run the conversation with one source: get its offer, do its tasks, and tell it how the receive has ended."""
    shared.roster.join(channel)
    shared.negotiator.prepare(channel)
    try:
        _Conversation(channel, shared, _hear(channel, shared)).run()
    except BaseException as error:
        left = shared.roster.why_abandoned(channel.peer)
        if left is not None:
            channel.refuse(left)  # The source was abandoned and has come back too late.
            shared.give_back(channel.peer)
        else:
            if not channel.broken:
                channel.refuse(error)
            shared.lost(channel.peer, error)
        raise


def _hear(channel: Channel, shared: Receive) -> Offer:
    """Wait for the source's offer, and for the decision that this source is used."""
    with shared.roster.phase(channel, Phase.WAIT_FOR_OFFER):
        try:
            _, body = channel.expect(Message.OFFER, tag=OFFER_TAG)
        except ProtocolError as error:
            if channel.tag != OFFER_TAG:
                channel.refuse(error)  # The header was valid and gave a tag, so the refusal can be sent.
            else:
                channel.broken = True
            raise
    shared.roster.may_abandon(channel, None)
    with shared.roster.phase(channel, Phase.PLAN):
        if shared.request.failure is not None:
            shared.roster.fail(shared.request.failure)
            raise shared.request.failure
        channel.peer_timeout = messages.timeout_in(body) or channel.timeout
        with channel.holding_turn():
            offer = read_offer(body, channel.limits, channel.peer)
            del body
            shared.agree(channel, offer, lambda: describe(channel, offer))
        shared.roster.caller.lend(channel.peer)
    return offer


def describe(channel: Channel, offer: Offer) -> Offer:
    """Ask a source for its description, if its offer came without one."""
    if offer.manifest is not None:
        return offer
    channel.send(Message.DESCRIBE)
    _, body = channel.expect(Message.OFFER)
    described = read_offer(body, channel.limits, channel.peer)
    if described.manifest is None or described.likeness != offer.likeness or described.digest != offer.digest:
        raise ProtocolError(channel.peer, f"rank {channel.peer} describes another state than it has offered")
    return described


class _Conversation:
    """The conversation with one source, from its offer on."""

    def __init__(self, channel: Channel, shared: Receive, offer: Offer) -> None:
        self._channel = channel
        self._receive = shared
        self._offer = offer
        self._caller = shared.roster.caller
        self._accepted = shared.accepted
        self._ledger: Ledger = shared.ledger
        self._report = shared.roster.report
        self._progress = shared.roster.progress[channel.peer]
        self._pulling = Pulling(channel, shared, offer, partial(describe, channel))
        #: What this source can send.
        self._share = shared.share(channel.peer)
        self._want: messages.Want | None = None
        self._shape: Shape | None = None
        self._relay: Relay | None = None
        #: How often each parcel has arrived from this source with a wrong digest.
        self._wrong: dict[int, int] = {}

    def run(self) -> None:
        channel, shared = self._channel, self._receive
        cause: BaseException | None = None
        # If there are no parcels at all, every conversation counts as needed, and the first one finishes the receive.
        needed = bool(self._share.held.any()) or not len(self._ledger)
        if not needed:
            shared.release(channel.peer)
        try:
            if needed:
                self._pulling.pull()
            while needed:
                with channel.holding_turn(lambda: self._progress.bytes):
                    task = shared.next_task(channel, self._task_bytes())
                if task is None:
                    break
                if isinstance(task, Fetch) and self._pulling.can_pull(task.numbers):
                    # These parcels were another source's task when this conversation pulled. Pull them now.
                    self._ledger.give_back(channel.peer)
                    self._pulling.pull()
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
        with suppress(PeerError), shared.roster.phase(channel, Phase.VERDICT):
            # Everything is here and verified. It no longer matters whether the source is still alive.
            channel.send(Message.VERDICT, messages.encode(messages.Verdict(self._pulling.pulled)))
            if shared.roster.several:
                shared.roster.may_abandon(channel, channel.abandon)  # A frozen source takes no verdict.
            channel.settle()

    def _task_bytes(self) -> float:
        """How many bytes to ask this source for at a time: everything, if it is the only source."""
        if not self._receive.roster.several:
            return float("inf")
        return self._burst_bytes() * self._offer.bursts_ahead

    def _burst_bytes(self) -> int:
        """The size of a burst. With several sources it is small: all bursts are staged, and should end together."""
        return Sizes(self._channel.limits, self._channel.timeout).burst(
            self._offer.burst_bytes,
            self._accepted.cut.total_bytes,
            self._accepted.parcel_bytes,
            sources=len(self._receive.roster.ranks),
            ahead=self._offer.bursts_ahead,
        )

    # -- the group route

    def _fetch(self, numbers: Sequence[int]) -> None:
        """Ask the source for these parcels, and receive them from it or from a neighbour."""
        agreed = self._ask(numbers)
        assert self._want is not None
        shape = self._shape = self._shape or Shape.of(self._offer, self._want, agreed)
        report, shared, channel = self._report, self._receive, self._channel
        report.verified = shape.digests and (report.verified or not report.read_bytes)
        if agreed.downstream is not None or agreed.upstream is not None:
            self._relay = Relay(channel, self._accepted, self._ledger, shape, self._caller)
            if agreed.downstream is not None:
                self._relay.pass_on(agreed.downstream, numbers)
        with shared.roster.phase(channel, Phase.RECEIVE):
            if agreed.upstream is not None:
                self._take_relayed(agreed, numbers)
                return
            incoming = Incoming(
                channel,
                self._accepted.cut,
                self._accepted.landing,
                shape,
                self._caller,
                self._progress,
                landed=partial(self._landed, channel.peer),
                always_staged=shared.roster.several or channel.group.moves_tensors,
            )
            several = shared.roster.several
            with shared.roster.abandonable(channel, incoming.leave if several else None):
                try:
                    incoming.take(numbers, self._more if several else nothing_more)
                except PeerLost:
                    self._check_own_memory()
                    raise
        self._sort_out(incoming.wrong)

    def _check_own_memory(self) -> None:
        """Raise if the connection broke because our own target memory can no longer be written."""
        landing, regions = self._accepted.landing, self._accepted.cut.regions
        here = np.flatnonzero(landing.addresses > 0)
        packing.check_reach(landing, here, vm.ranges(landing.addresses[here], regions.nbytes[here]), write=True)

    def _more(self) -> tuple[int, Sequence[int]]:
        """Further parcels to ask for: the source's number of the first one, and our numbers of all."""
        run = self._receive.more(self._channel.peer, self._burst_bytes())
        return run.start, self._share.ours(run)

    def _pairs(self, numbers: Sequence[int]) -> list[int]:
        """These parcels as ranges of the source's numbers."""
        return messages.pairs_of(self._share.theirs(numbers))

    def _landed(self, rank: int, numbers: Sequence[int], digests: Sequence[int], wrong: Sequence[int]) -> None:
        """Record a burst that the source, or the neighbour with this rank, has brought; ``wrong`` parcels included."""
        self._ledger.land(rank, numbers, wrong, digests)
        nbytes = self._ledger.bytes_of(numbers)
        self._report.count(self._channel.peer, nbytes, len(numbers), "group")
        if rank != self._channel.peer:
            self._report.relayed_bytes += nbytes

    def _sort_out(self, wrong: Sequence[int]) -> None:
        """Release parcels that arrived wrong, so that any source may be asked again; give up after ``max_repairs``."""
        channel = self._channel
        self._report.repaired += len(wrong)
        for number in wrong:
            self._wrong[number] = self._wrong.get(number, 0) + 1
        lasting = [number for number in wrong if self._wrong[number] > channel.limits.max_repairs]
        if lasting:
            self._report.repaired -= len(lasting)
            leaves = leaves_of(self._accepted, lasting)
            raise CorruptData(
                channel.peer,
                leaves,
                f"rank {channel.peer}: {len(lasting)} parcels were still wrong after "
                f"{channel.limits.max_repairs} repairs; leaves: {some_of(leaves)}. The bytes are damaged on the way",
            )
        self._ledger.give_back(channel.peer)
        self._progress.bytes = self._ledger.bytes_from(channel.peer)

    def _ask(self, numbers: Sequence[int]) -> messages.Agreed:
        """Ask for parcels, and return the source's answer."""
        channel, accepted = self._channel, self._accepted
        with self._receive.roster.phase(channel, Phase.WANT):
            if self._want is not None:
                channel.send(Message.MORE, messages.encode(messages.More(self._pairs(numbers))))
                self._expect_agreed()
                return messages.Agreed()
            share = self._share
            alone = not self._receive.roster.several and share.is_everything
            relay = self._receive.request.options.relay
            want = self._want = messages.Want(
                fingerprint=share.fingerprint,
                parcel_bytes=accepted.parcel_bytes,
                burst_bytes=self._burst_bytes(),
                digests=compares_digests(self._offer, self._receive.request, channel.group.device),
                apart=share.apart,
                parts=share.parts,
                parcels=self._pairs(numbers),
                relay=relay and channel.group.relays and alone and len(numbers) == len(self._ledger),
                host=this_host(),
                wanted_blocks=share.wanted_blocks,
            )
            channel.send(Message.WANT, messages.encode(want))
            agreed = channel.decode(self._expect_agreed(), messages.Agreed)
        links = [link for link in (agreed.upstream, agreed.downstream) if link is not None]
        if links and not want.relay:
            raise ProtocolError(channel.peer, f"rank {channel.peer} agreed to a chain that was not wanted")
        if not all(valid_link_tag(link.tag) and channel.group.has(link.rank) for link in links):
            raise ProtocolError(channel.peer, f"rank {channel.peer} agreed to a chain with impossible links")
        if not 0 <= agreed.patience < float("inf"):
            raise ProtocolError(channel.peer, f"rank {channel.peer} agreed to a chain with an impossible patience")
        return agreed

    def _expect_agreed(self, *kinds: Message) -> bytearray:
        """Wait for an answer. The source may be abandoned meanwhile, since no parcel is in flight."""
        channel = self._channel
        with self._receive.roster.abandonable(channel, channel.abandon):
            _, body = channel.expect(*(kinds or (Message.AGREED,)))
        return body

    def _take_relayed(self, agreed: messages.Agreed, numbers: Sequence[int]) -> None:
        """Receive parcels from the neighbour. Parcels that it does not bring are wanted from the source again."""
        assert agreed.upstream is not None
        assert self._relay is not None
        channel = self._channel
        channel.phase = self._progress.phase = RELAYING
        with channel.holding_turn(lambda: self._progress.bytes):
            # The source proposes the patience, but it is never longer than the caller's timeout.
            patience = min(agreed.patience, channel.timeout)
            landed = partial(self._landed, agreed.upstream.rank)
            wrong = self._relay.take(agreed.upstream, numbers, self._progress, landed, patience)
        self._report.repaired += len(wrong)

    def _pass_on(self, cause: BaseException | None = None) -> None:
        """Wait until the next neighbour has everything or, with a cause, until it has been told the cause."""
        relay, self._relay = self._relay, None
        if relay is None:
            return
        if cause is not None:
            relay.finish(cause)
            return
        with self._receive.roster.phase(self._channel, Phase.PASS_ON), self._channel.holding_turn():
            relay.finish()

    # -- questions

    def _compare(self, numbers: Sequence[int]) -> None:
        """Find out which of these parcels, which may be here already, equal the source's."""
        channel = self._channel
        if self._want is None:
            self._ask(())
        with self._receive.roster.phase(channel, Phase.COMPARE):
            channel.send(Message.COMPARE, messages.encode(messages.More(self._pairs(numbers))))
            # Both ends hash at the same time.
            mine = packing.wide_digests_of(self._accepted.cut, self._accepted.landing, numbers)
            theirs = channel.decode(self._expect_agreed(Message.DIGESTS), messages.Digests).digests
        if len(theirs) != WIDE_BYTES * len(numbers):
            raise ProtocolError(channel.peer, f"rank {channel.peer} compared parcels that it was not asked about")
        ours = np.frombuffer(b"".join(mine), dtype="V16")
        self._receive.compared(channel.peer, numbers, ours == np.frombuffer(theirs, dtype="V16"))

    def _confirm(self) -> None:
        """Ask the source whether its tensors are unchanged since it described them."""
        channel = self._channel
        self._pass_on()
        with self._receive.roster.phase(channel, Phase.CONFIRM):
            channel.send(Message.CHECK)
            self._expect_agreed()
        self._receive.confirmed(channel.peer)
