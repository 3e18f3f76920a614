"""The receiver's end of the conversation with one source."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np

from transfuse._errors import PeerError, PeerLost, ProtocolError
from transfuse._memory import packing, streams, vm
from transfuse._memory.digest import WIDE_BYTES, WideDigests
from transfuse._memory.patches import Patch
from transfuse._phases import RELAYING, Phase
from transfuse._session.connections import ReceiverLanes, how_many
from transfuse._session.conversation import Conversation
from transfuse._session.incoming import Incoming, nothing_more
from transfuse._session.offers import ask_content, read_offer
from transfuse._session.pulling import Pulling
from transfuse._session.receive_from_all import Compare, Confirm, Fetch, Receive
from transfuse._session.relay import Relay, this_host
from transfuse._session.shape import Shape
from transfuse._state.tensors import Bools
from transfuse._timeouts import Patience
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.group import OFFER_TAG, valid_link_tag
from transfuse._wire.introduction import answer, check_plain
from transfuse._wire.lanes import enter
from transfuse._wire.messages import Message, Offer


def run(channel: Channel, receive: Receive) -> None:
    """Run the conversation with one source: get its offer, do its tasks, and tell it how the receive has ended."""
    roster, rank = receive.roster, channel.peer
    roster.join(channel)
    receive.negotiator.prepare(channel)
    well = False
    try:
        _Tasks(Conversation(channel, receive, _hear(channel, receive))).run()
        well = True
    except BaseException as error:
        left = roster.why_abandoned(rank)
        if left is not None:
            channel.refuse(left)  # The source was abandoned and has come back too late.
            if roster.plan is not None:
                roster.plan.ledger.give_back(rank)
            raise left from error  # On a stream this error only says that this end has cut it.
        if channel.may_still_refuse:
            # The source may not take messages either: the others go on first.
            receive.lost(rank, error)
            if roster.several:
                roster.may_abandon(channel, channel.abandon)
            channel.refuse(error)
        else:
            if not channel.broken:
                channel.refuse(error)
            receive.lost(rank, error)
        raise
    finally:
        channel.leave_stream(roster.context.lanes if well else None)


def refuse(channel: Channel, cause: BaseException) -> None:
    """Wait for the source's offer, and tell it that there is no receive and why."""
    channel.phase = Phase.WAIT_FOR_OFFER.doing
    channel.expect(Message.OFFER, Message.MEET, tag=OFFER_TAG)
    channel.refuse(cause)


def _hear(channel: Channel, receive: Receive) -> Offer:
    """Wait for the source's offer, and for the decision that this source is used."""
    roster = receive.roster
    with roster.phase(channel, Phase.WAIT_FOR_OFFER):
        try:
            header, body = channel.expect(Message.OFFER, Message.MEET, tag=OFFER_TAG)
            pool = roster.context.lanes
            if header.kind is Message.OFFER and pool is not None:
                check_plain(channel, pool)
            if header.kind is Message.MEET:
                body = bytearray(answer(channel, pool, body)) or channel.expect(Message.OFFER)[1]
        except ProtocolError as error:
            if channel.tag != OFFER_TAG:
                channel.refuse(error)  # The header was valid and gave a tag, so the refusal can be sent.
            else:
                channel.broken = True
            raise
    roster.may_abandon(channel, None)
    roster.check_caller()
    with roster.phase(channel, Phase.PLAN):
        if roster.request.failure is not None:
            roster.fail(roster.request.failure)
            raise roster.request.failure
        channel.peer_timeout = messages.timeout_in(body) or channel.timeout
        with channel.holding_turn():
            offer = read_offer(body, channel.limits, channel.peer)
            del body
            receive.negotiator.agree(channel, offer)
        roster.caller.lend(channel.peer)
    return offer


class _Tasks:
    """Does what a receive needs from one source, task by task."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._channel = conversation.channel
        self._receive = conversation.receive
        self._roster = conversation.roster
        self._offer = conversation.offer
        self._ledger = conversation.ledger
        self._progress = conversation.progress
        self._report = conversation.report
        self._pulling = Pulling(conversation)
        self._want: messages.Want | None = None
        self._relay: Relay | None = None
        self._lanes: ReceiverLanes | None = None
        #: What receives the parcels that were asked for last, if that is on an accelerator.
        self._incoming: Incoming | None = None

    def run(self) -> None:
        channel, receive = self._channel, self._receive
        cause: BaseException | None = None
        # If there are no parcels at all, every conversation counts as needed, and the first one finishes the receive.
        needed = bool(self._conversation.share.held.any()) or not len(self._ledger)
        if not needed:
            self._roster.drop(channel.peer)
        try:
            receive.contents[channel.peer] = self._content()
            with channel.holding_turn():
                receive.ask_permission(atomic=False)
            if needed:
                self._pulling.pull()
            while needed:
                with channel.holding_turn(lambda: self._progress.bytes):
                    conversation = self._conversation
                    task = receive.next_task(channel, conversation.request_bytes(), conversation.compared_bytes)
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
            if self._lanes is not None:
                self._lanes.end(well=cause is None)
                self._report.connections = max(self._report.connections, 1 + self._lanes.used)
            self._pass_on(cause)
        with suppress(PeerError), self._roster.phase(channel, Phase.VERDICT):
            # Everything is here and verified. It no longer matters whether the source is still alive.
            if self._roster.several:
                self._roster.may_abandon(channel, channel.abandon)  # A frozen source takes no verdict.
            # Never wait for the verdict itself: if the source dies just now, gloo forgets it. A receive learns of that.
            verdict = messages.encode(messages.Verdict(self._pulling.pulled))
            channel.ask_last(Message.VERDICT, verdict, Message.AGREED)

    # -- the group route

    def _fetch(self, numbers: Sequence[int]) -> None:
        """Ask the source for these parcels, and receive them from it or from a neighbour."""
        with ExitStack() as queue:
            agreed = self._ask(numbers, queue)
            if agreed.lanes is not None:
                numbers = self._share_with_lanes(numbers)
            self._receive_parcels(numbers, agreed)

    def _receive_parcels(self, numbers: Sequence[int], agreed: messages.Agreed) -> None:
        assert self._want is not None
        shape = self._conversation.shape = self._conversation.shape or Shape.of(self._offer, self._want, agreed)
        report, channel = self._report, self._channel
        report.verified = shape.digests and (report.verified or not report.read_bytes)
        if agreed.downstream is not None or agreed.upstream is not None:
            self._relay = Relay(self._conversation, shape)
            if agreed.downstream is not None:
                self._relay.pass_on(agreed.downstream, numbers)
        with self._roster.phase(channel, Phase.RECEIVE):
            if agreed.upstream is not None:
                self._take_relayed(agreed, numbers)
                return
            incoming, self._incoming = self._incoming, None
            if incoming is None or channel.through_host:
                incoming = self._conversation.incoming(channel, channel.peer)
            several = self._roster.several
            by_and_by = several or self._lanes is not None
            more = partial(self._conversation.more, channel.peer) if by_and_by else nothing_more
            with self._roster.abandonable(channel, partial(self._leave, incoming) if several else None):
                try:
                    incoming.take(numbers, more)
                except PeerLost:
                    self._check_own_memory()
                    raise
        if incoming.confirmed and self._lanes is None:
            self._receive.confirmed(channel.peer)
        self._conversation.sort_out(channel.peer, incoming.wrong)

    def _leave(self, incoming: Incoming) -> None:
        """Abandon the source, from another thread. After this call, nothing of it lands; others bring the rest."""
        if self._lanes is not None:
            self._lanes.leave()
        incoming.leave()

    # -- lanes

    def _want_lanes(self, numbers: Sequence[int]) -> messages.Lanes | None:
        """Begin to form lanes, if they pay. Return what the source has to know."""
        channel, pool = self._channel, self._roster.context.lanes
        same_host = self._offer.host == this_host()
        more = how_many(self._conversation, self._ledger.bytes_of(numbers), same_host=same_host) - 1
        if more < 1 or pool is None or not channel.streams_parcels or not pool.can_form(channel.peer):
            return None
        assert channel.stream is not None
        dials = not channel.stream.source_dials
        entrances = enter(pool, channel.peer, more, Patience(channel.timeout), dials=dials)
        if not entrances:
            return None
        self._conversation.connections = 1 + len(entrances)
        self._lanes = ReceiverLanes(pool, entrances, self._conversation)
        return messages.Lanes(
            known=[entrance.number for entrance in entrances if not entrance.is_new],
            new=[entrance.number for entrance in entrances if entrance.is_new],
            first=self._first_request(numbers),
            place=None if dials else pool.place(channel.peer),
        )

    def _meet_lanes(self, agreed: messages.Agreed) -> None:
        """Go on with the source's answer about lanes."""
        theirs, lanes = agreed.lanes, self._lanes
        if theirs is not None and (lanes is None or agreed.upstream is not None or agreed.downstream is not None):
            raise ProtocolError(self._channel.peer, f"rank {self._channel.peer} agreed to lanes that were not wanted")
        if lanes is None:
            return
        if theirs is not None:
            lanes.connect(theirs)
        else:
            lanes.connect(messages.Lanes([], []))
            self._lanes, self._conversation.connections = None, 1

    def _first_request(self, numbers: Sequence[int]) -> int:
        """How many of these parcels the group's own connection brings at first."""
        sizes = self._conversation.cut.nbytes[np.asarray(numbers, dtype=np.int64)]
        return int((np.cumsum(sizes) - sizes < self._conversation.request_bytes(int(sizes.sum()))).sum())

    def _share_with_lanes(self, numbers: Sequence[int]) -> Sequence[int]:
        """Leave all but the first of these parcels to the lanes and to later requests."""
        first = self._first_request(numbers)
        self._ledger.give_back_some(self._channel.peer, numbers[first:])
        return numbers[:first]

    def _check_own_memory(self) -> None:
        """Raise if the connection broke because our own target memory can no longer be written."""
        landing, regions = self._conversation.landing, self._conversation.cut.regions
        here = np.flatnonzero(landing.addresses > 0)
        packing.check_reach(landing, here, vm.ranges(landing.addresses[here], regions.nbytes[here]), write=True)

    def _ask(self, numbers: Sequence[int], queue: ExitStack) -> messages.Agreed:
        """Ask for parcels, and return the source's answer. On an accelerator's backend, reserve this rank's queue."""
        channel = self._channel
        agrees = channel.agrees and bool(numbers)
        # All ranks reserve queues in the same order, the lower rank of a pair first. The source does before it answers.
        if agrees and channel.is_lower:
            queue.enter_context(channel.queue())
        agreed = self._ask_source(numbers)
        if agrees:
            if not channel.is_lower:
                queue.enter_context(channel.queue())
            channel.through_host = agreed.through_host or channel.group.avoids(channel.peer)
            if not channel.through_host:
                self._incoming = self._conversation.incoming(channel, channel.peer)
                channel.through_host = not self._incoming.has_room(numbers)
            channel.send(Message.GO, note=channel.through_host)
        return agreed

    def _ask_source(self, numbers: Sequence[int]) -> messages.Agreed:
        channel, accepted = self._channel, self._conversation.accepted
        with self._roster.phase(channel, Phase.WANT):
            if self._want is not None:
                channel.send(Message.MORE, messages.encode(messages.More(self._conversation.pairs(numbers))))
                agreed = channel.decode(self._expect_agreed(), messages.Agreed)
                if agreed.lanes is not None or agreed.upstream is not None or agreed.downstream is not None:
                    raise ProtocolError(channel.peer, f"rank {channel.peer} agreed to more than it was asked for")
                return agreed
            share = self._conversation.share
            lanes = self._want_lanes(numbers)
            alone = not self._roster.several and share.is_everything
            relay = self._roster.request.options.relay
            want = self._want = messages.Want(
                fingerprint=share.fingerprint,
                parcel_bytes=accepted.parcel_bytes,
                burst_bytes=self._conversation.burst_bytes,
                digests=self._conversation.compares_digests,
                apart=share.apart,
                tensors=share.tensors,
                parcels=self._conversation.pairs(numbers),
                relay=relay and channel.home.relays and alone and len(numbers) == len(self._ledger),
                host=this_host(),
                wanted_blocks=share.wanted_blocks,
                lanes=lanes,
            )
            channel.send(Message.WANT, messages.encode(want))
            agreed = channel.decode(self._expect_agreed(), messages.Agreed)
        self._conversation.shape = Shape.of(self._offer, want, agreed)
        self._meet_lanes(agreed)
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
        with self._roster.abandonable(channel, channel.abandon):
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
            landed = partial(self._conversation.landed, agreed.upstream.rank)
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
        with self._roster.phase(self._channel, Phase.PASS_ON), self._channel.holding_turn():
            relay.finish()

    # -- questions

    def _content(self) -> bytes:
        """The digest of the source's content; nothing if the source does not know it and nobody wants it."""
        channel = self._channel
        if self._offer.content or not self._roster.request.version:
            return self._offer.content
        with (
            self._roster.phase(channel, Phase.COMPARE),
            self._roster.abandonable(channel, channel.abandon),
        ):
            return ask_content(channel, self._offer)

    def _compare(self, numbers: Sequence[int]) -> None:
        """Find out which of these parcels, which may be here already, equal the source's."""
        channel = self._channel
        if self._want is None:
            self._ask_source(())
        conversation, count = self._conversation, len(numbers)
        with self._roster.phase(channel, Phase.COMPARE):
            pairs = conversation.pairs(numbers)
            may_patch = self._receive.patches_from(channel.peer)
            if not may_patch:  # Both ends hash at the same time.
                channel.send(Message.COMPARE, messages.encode(messages.HeldParcels(pairs)))
            streams.complete(channel.timeout)  # Copies for the hash then have a deadline of their own.
            mine = self._conversation.accepted.digests_of(numbers, channel.timeout)
            if may_patch:
                channel.send(Message.COMPARE, messages.encode(messages.HeldParcels(pairs, mine.tobytes())))
            answer = channel.decode(self._expect_agreed(Message.DIGESTS), messages.Digests)
            patches = answer.patches if may_patch and answer.patches else [b""] * count
            if len(answer.digests) != WIDE_BYTES * count or len(patches) != count:
                raise ProtocolError(channel.peer, f"rank {channel.peer} compared parcels that it was not asked about")
            theirs = np.frombuffer(answer.digests, dtype=mine.dtype)
            same = mine == theirs
            patched = np.array([bool(patch) for patch in patches]) & ~same
            with channel.holding_turn():
                patched[patched] = self._patch(numbers, np.flatnonzero(patched).tolist(), patches, theirs)
        self._receive.compared(channel.peer, numbers, same, patched, sum(map(len, patches)))

    def _patch(self, numbers: Sequence[int], which: Sequence[int], patches: Sequence[bytes], due: WideDigests) -> Bools:
        """Apply the patches of ``which`` of these parcels. Return which of those then have the digest that is due."""
        peer, accepted = self._channel.peer, self._conversation.accepted
        chosen = [Patch(numbers[i], patches[i], due[i].tobytes()) for i in which]
        try:
            brought = accepted.patch(chosen, self._channel.timeout)
        except ValueError as error:
            raise ProtocolError(peer, f"rank {peer} sent {error}") from error
        self._report.repaired += int((~brought).sum())
        return brought

    def _confirm(self) -> None:
        """Ask the source whether its tensors are unchanged since it described them."""
        channel = self._channel
        self._pass_on()
        with self._roster.phase(channel, Phase.CONFIRM):
            channel.send(Message.CHECK)
            if not self._roster.several:
                # Everything has landed, and the source needs some time: it looks at all its tensors.
                accepted = self._conversation.accepted
                accepted.landing.work_ahead(accepted.build_context, accepted.registry)
            self._expect_agreed()
        self._receive.confirmed(channel.peer)
