"""The source's end of the conversation with one receiver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np
import torch

from transfuse._errors import PeerError, ProtocolError, SourceMutated, some_of
from transfuse._memory import packing, streams
from transfuse._memory.digest import WIDE_BYTES, Run, digest_of
from transfuse._memory.mutation import MutationWatch
from transfuse._memory.packing import RegionPlace, digests_of, wide_digests_of
from transfuse._phases import READS, Phase
from transfuse._plan import parcels
from transfuse._plan.holdings import Holdings
from transfuse._plan.parcels import Parcels
from transfuse._plan.regions import Regions, lay_out
from transfuse._plan.wanted_blocks import regions_in
from transfuse._progress import Progress
from transfuse._report import Report, routes_of
from transfuse._session.connections import SourceLanes, check_wanted
from transfuse._session.history import GivenOut, History, Plan
from transfuse._session.movers import outgoing_on
from transfuse._session.outgoing import Outgoing, ParcelSupply
from transfuse._session.relay import Chains, this_host
from transfuse._session.remembered import Remembered
from transfuse._session.shape import Shape
from transfuse._session.threads import Caller
from transfuse._state.leaves import dense
from transfuse._state.manifest import Described
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools
from transfuse._timeouts import Patience
from transfuse._wire import messages
from transfuse._wire.channel import Channel, bytes_in
from transfuse._wire.group import OFFER_TAG
from transfuse._wire.introduction import introduce
from transfuse._wire.lanes import accept
from transfuse._wire.messages import Message
from transfuse._wire.pool import Pool
from transfuse._wire.rate_limit import RateLimit


@dataclass(frozen=True)
class OfferedState:
    """What a source offers. All receivers of one send share it."""

    described: Described
    offer: messages.Offer
    #: The offer as it is sent first; and a function that returns the whole offer, for receivers that ask for it.
    body: torch.Tensor
    whole: Callable[[], torch.Tensor]
    chains: Chains | None
    mutation_watch: MutationWatch
    #: Returns the digest of the state's content, computed at most once.
    content: Callable[[], bytes]
    #: Whether the transport has sent this structure before, and what it remembers of its earlier transfers.
    sent_before: bool = False
    remembered: Remembered = field(default_factory=Remembered)
    #: What was given out of it before, if the source remembers that.
    history: History | None = None
    #: The transport's lanes.
    lanes: Pool | None = None
    #: Digests of parcels that were sent, by the plan's fingerprint: each parcel is hashed once for all receivers.
    digests: dict[int, dict[int, int]] = field(default_factory=dict)

    @cached_property
    def holdings(self) -> Holdings:
        """What this rank holds of each global tensor, for receivers that want blocks of it."""
        return Holdings(self.described.manifest)

    @cached_property
    def short(self) -> bytes:
        """The offer, if it is short enough to travel with a meeting."""
        return bytes_in(self.body) if self.body.numel() <= messages.MOST_WITH_MEET else b""

    @property
    def total_bytes(self) -> int:
        return int(self.described.manifest.storages.nbytes.sum())


class _SourceMemory:
    """The source's own memory, in the form that packing reads."""

    def __init__(self, described: Described, regions: Regions) -> None:
        self._described = described
        self._regions = regions
        base = described.addresses[regions.storage] if len(regions) else regions.start
        self.addresses: Ints = np.where(base > 0, base + regions.start, 0)
        self.addresses[list(regions.strided)] = 0

    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        if region in self._regions.strided:
            return None
        storage = int(self._regions.storage[region])
        start = int(self._described.windows[storage]) + int(self._regions.start[region])
        return dense.over(self._described.storages[storage], torch.uint8, start + low, (high - low,), (1,))

    def places(self, region: int) -> Sequence[RegionPlace]:
        storage = int(self._regions.storage[region])
        window = int(self._described.windows[storage])
        return [packing.place_of_region(self._described.storages[storage], window, self._regions, region)]

    def paths_of(self, regions: Sequence[int]) -> list[str]:
        manifest = self._described.manifest
        rows = np.flatnonzero(np.isin(manifest.tensors.storage, self._regions.storage[list(regions)]))
        return [manifest.paths[leaf] for leaf in np.unique(manifest.leaves_of(rows)).tolist()]


def refuse(channel: Channel, cause: BaseException) -> None:
    """Tell the receiver, instead of an offer, that there is none and why."""
    channel.phase = "sending a refusal"
    channel.refuse(cause, tag=OFFER_TAG)


def _nothing_to_send(_: Channel) -> Outgoing:
    raise AssertionError("the receiver has not sent its want")


class SourceEnd:
    """The conversation with one receiver: offer, answer its requests, send parcels, and wait for its verdict."""

    def __init__(
        self, channel: Channel, offered: OfferedState, caller: Caller, progress: Progress, report: Report
    ) -> None:
        self._channel = channel
        self._offered = offered
        self._caller = caller
        self._progress = progress
        self._report = report
        #: Known once the receiver has sent its want: how parcels are cut, and where they lie in memory.
        self._cut: Parcels | None = None
        self._memory: _SourceMemory | None = None
        self._outgoing: Outgoing | None = None
        self._new_outgoing: Callable[[Channel], Outgoing] = _nothing_to_send
        self._known: dict[int, int] = {}
        #: For each parcel, how often the receiver has asked for it, and for its digest.
        self._sent: Ints | None = None
        self._asked: Ints | None = None
        #: What was given out before by the receiver's plan, if this source remembers that.
        self._given: GivenOut | None = None
        self._plan_key: Plan = (b"",)
        self._was_told = False
        self._rate_limit = RateLimit(None)
        #: How many other requests the receiver has sent.
        self._requests = 0
        #: Payload of the parcels that the receiver has asked for, each counted once.
        self._asked_bytes = 0
        #: This rank's queue on an accelerator's backend, reserved while parcels are sent.
        self._queue = ExitStack()
        #: The parcels to send next.
        self._numbers: Sequence[int] = ()
        #: Further connections to the receiver, and what is counted by the threads of all of them.
        self._lanes: SourceLanes | None = None
        self._lock = threading.Lock()
        progress.total_bytes = offered.total_bytes
        channel.most_bytes = offered.total_bytes
        channel.on_working = self._heard

    def _heard(self, nbytes: int) -> None:
        """Handle a sign of life of a receiver that reads by itself or gets its parcels from a neighbour."""
        if self._caller.cause is not None:
            raise self._caller.cause
        most = self._offered.total_bytes if self._progress.total_bytes is None else self._progress.total_bytes
        self._progress.bytes = max(self._progress.bytes, min(nbytes, most))
        if nbytes and self._cut is None:
            self._progress.phase = READS
        self._caller.tick()

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        self._channel.phase = self._progress.phase = phase.doing
        with self._caller.phase(self._report, phase):
            yield

    @property
    def _short(self) -> bytes:
        """The offer, if it is to travel with the meeting: over the group, where nothing is encrypted."""
        pool = self._offered.lanes
        return b"" if pool is not None and pool.must_move(self._channel.peer) else self._offered.short

    def _meet(self) -> bool:
        """Meet the receiver, to go on over a stream. Whether it has been told anything."""
        pool, channel = self._offered.lanes, self._channel
        if pool is None or not (pool.can_move(channel.peer) or pool.must_move(channel.peer)):
            return False
        try:
            with self._phase(Phase.MEET):
                met = introduce(channel, pool, OFFER_TAG, self._short)
            if self._caller.cause is not None:
                raise self._caller.cause
        except BaseException as error:
            if not channel.broken:
                channel.refuse(error)
            raise
        return met

    def run(self) -> None:
        channel, chains = self._channel, self._offered.chains
        if self._caller.cause is not None:
            refuse(channel, self._caller.cause)
            raise self._caller.cause
        well = False
        try:
            self._talk()
            well = True
        finally:
            self._close(well=well)
            channel.leave_stream(self._offered.lanes if well else None)
            if chains is not None:
                chains.leave(channel.peer)

    def _talk(self) -> None:
        channel = self._channel
        met = self._meet()
        if not met or not self._short:
            with self._phase(Phase.OFFER):
                channel.send(Message.OFFER, self._offered.body, note=channel.tag, tag=None if met else OFFER_TAG)
        while True:
            try:
                with self._phase(Phase.WAIT_FOR_WANT if self._cut is None else Phase.WAIT_FOR_VERDICT):
                    header, body = channel.expect(*self._due())
                if header.kind is Message.VERDICT:
                    self._hear_verdict(body)
                    break
                with self._phase(Phase.ANSWER):
                    self._answer(header.kind, body)
            except BaseException as error:
                # If this end failed first, that failure is the cause, and this error is its consequence.
                cause = (self._outgoing.failure if self._outgoing is not None else None) or error
                if not channel.broken:
                    channel.refuse(cause)
                try:
                    if cause is not error:
                        raise cause from error
                    raise
                finally:
                    # The error refers to this frame. A reference back to the error would be a cycle that keeps the
                    # whole state in memory.
                    del cause
            self._send()
        with suppress(PeerError):  # The receiver has everything. It no longer matters whether it is still there.
            channel.send_last(Message.AGREED)

    def _close(self, *, well: bool) -> None:
        """Wait until no lane uses the state any more, and break the reference cycle through ``_outgoing``.

        The cycle would keep the state until garbage is collected.
        """
        if (lanes := self._lanes) is not None:
            self._lanes = None  # They refer to this.
            lanes.end(well=well)
            self._report.connections = 1 + lanes.used
        self._queue.close()
        self._outgoing = None
        del self._new_outgoing

    def _due(self) -> list[Message]:
        """The messages that the receiver may send now. It may ask for more parcels only after its want."""
        asks = [Message.MORE, Message.COMPARE] if self._cut is not None else [Message.WANT, Message.DESCRIBE]
        return [*asks, Message.VERSION, Message.CHECK, Message.VERDICT]

    def _answer(self, kind: Message, body: bytearray) -> None:
        """Answer a request. Parcels that it asks for are put into ``_numbers``, to be sent next."""
        channel, self._numbers = self._channel, ()
        if self._caller.cause is not None:
            raise self._caller.cause
        # Requests for parcels are limited per parcel. An honest receiver needs few other requests.
        self._requests += kind not in (Message.MORE, Message.COMPARE)
        if kind not in (Message.WANT, Message.DESCRIBE, Message.VERSION) and self._offered.chains is not None:
            self._offered.chains.leave(channel.peer)
        if self._requests > channel.limits.max_working_records:
            raise ProtocolError(channel.peer, f"rank {channel.peer} sent {self._requests} requests without a verdict")
        if self._outgoing is not None and self._outgoing.failure is not None:
            channel.refuse(self._outgoing.failure)
            raise self._outgoing.failure
        if kind is Message.DESCRIBE:
            channel.send(Message.OFFER, self._offered.whole())
        elif kind is Message.CHECK:
            self._check_unchanged()
            channel.send(Message.AGREED, messages.encode(messages.Agreed()))
        elif kind is Message.VERSION:
            with channel.holding_turn():
                streams.complete(channel.timeout)
                digest = self._offered.content()
            channel.send(Message.DIGESTS, messages.encode(messages.Digests(digest)))
        elif kind is Message.COMPARE:
            self._compare(channel.decode(body, messages.HeldParcels))
        elif kind is Message.MORE:
            numbers = self._read_again(channel, body)
            self._lend()
            self._agree(messages.Agreed(), numbers)
            self._numbers = numbers
        else:
            self._accept(channel.decode(body, messages.Want))

    def _accept(self, want: messages.Want) -> None:
        channel, offered = self._channel, self._offered
        cut, numbers = self._plan(want)
        alone = messages.Agreed(), RateLimit(offered.offer.max_bytes_per_second)
        chained = self._line_up(want)
        agreed, rate_limit = chained or alone
        self._rate_limit = rate_limit
        if chained is None and want.lanes is not None:
            agreed = self._agree_to_lanes(want.lanes) or agreed
            numbers = numbers if agreed.lanes is None else numbers[: max(want.lanes.first, 1)]
        self._count_sent(cut, numbers)
        self._lend()
        known = self._known = offered.digests.setdefault(want.fingerprint, {})

        def digest(number: int, data: torch.Tensor | Run) -> int:
            if number not in known:
                known[number] = digest_of(data)
            return known[number]

        self._cut = cut
        self._memory = _SourceMemory(offered.described, cut.regions)
        shape = Shape.of(offered.offer, want, agreed)
        supply = ParcelSupply(
            self._memory, digest, count_more=self._count_more, confirms=self._confirms, rate_limit=rate_limit
        )

        def outgoing(channel: Channel) -> Outgoing:
            moves = channel.group.moves_tensors
            return outgoing_on(channel)(channel, cut, supply, shape, self._caller, self._progress, always_staged=moves)

        self._outgoing = outgoing(channel)
        self._new_outgoing = outgoing
        # The receiver posts receives for parcels only after this answer: a refusal must never arrive in such a receive.
        self._agree(agreed, numbers)
        if self._lanes is not None:
            self._lanes.start()
        self._report.verified = want.digests
        self._numbers = () if agreed.upstream is not None else numbers

    def _agree_to_lanes(self, wanted: messages.Lanes) -> messages.Agreed | None:
        """Begin to form the lanes that the receiver wants. None: there are none."""
        channel, pool = self._channel, self._offered.lanes
        if pool is None or not channel.streams_parcels or not pool.can_form(channel.peer):
            return None
        assert channel.stream is not None
        check_wanted(channel.peer, wanted, self._offered.offer.connections - 1)
        dials = channel.stream.source_dials
        entrances = accept(pool, channel.peer, wanted, Patience(channel.timeout), dials=dials)
        if not entrances:
            return None
        self._lanes = SourceLanes(
            pool,
            channel,
            entrances,
            self._caller,
            place=wanted.place,
            outgoing=lambda lane: self._new_outgoing(lane),
            read=self._read_again,
            count=self._count_moved,
        )
        known = [entrance.number for entrance in entrances if not entrance.is_new]
        new = [entrance.number for entrance in entrances if entrance.is_new]
        place = None if dials or not new else pool.place(channel.peer)
        return messages.Agreed(lanes=messages.Lanes(known, new, place=place))

    def _read_again(self, channel: Channel, body: bytearray) -> Sequence[int]:
        """Read which further parcels the receiver asks for, over this channel."""
        numbers = self._read_more(body)
        self._look_again(numbers, channel)
        return numbers

    def _agree(self, agreed: messages.Agreed, numbers: Sequence[int]) -> None:
        """Say that the parcels come now. On an accelerator's backend both ends first reserve their queues."""
        channel = self._channel
        if not channel.agrees or not numbers:
            channel.send(Message.AGREED, messages.encode(agreed))
            return
        self._queue.enter_context(channel.queue())
        if channel.through_host or self._outgoing is None:
            channel.through_host = False  # Each request is decided anew: there may be room by now.
            self._outgoing = self._new_outgoing(channel)
        avoided = channel.group.avoids(channel.peer) or not self._outgoing.has_room(numbers)
        channel.send(Message.AGREED, messages.encode(msgspec.structs.replace(agreed, through_host=avoided)))
        header, _ = channel.expect(Message.GO)
        if header.note not in (0, 1) or header.note < avoided:
            raise ProtocolError(channel.peer, f"rank {channel.peer} chose a wire that does not exist")
        if channel.through_host != bool(header.note):
            channel.through_host = bool(header.note)
            self._outgoing = self._new_outgoing(channel)

    def _lend(self) -> None:
        try:
            self._caller.lend(self._channel.peer)
        except BaseException as cause:
            self._channel.refuse(cause)
            raise

    def _send(self) -> None:
        numbers, self._numbers = self._numbers, ()
        if not numbers:
            return
        assert self._outgoing is not None
        channel, report = self._channel, self._report
        report.route = "group"
        try:
            with self._phase(Phase.SEND):
                self._outgoing.send(numbers)
            self._caller.returned(channel.peer)  # The backend holds none of the tensors any more.
        finally:
            self._queue.close()
            self._count_moved(self._outgoing)

    def _count_moved(self, outgoing: Outgoing) -> None:
        """Count what was sent since the last call."""
        with self._lock:
            self._report.bytes += outgoing.nbytes
            self._report.parcels += outgoing.parcels
            outgoing.nbytes = outgoing.parcels = 0

    def _read_more(self, body: bytearray) -> Sequence[int]:
        """Read which further parcels the receiver asks for, or asks for again."""
        assert self._cut is not None
        peer = self._channel.peer
        try:
            numbers = messages.numbers_in(self._channel.decode(body, messages.More).parcels, len(self._cut))
        except ValueError as error:
            raise ProtocolError(peer, f"rank {peer} asks for parcels that do not exist") from error
        if not numbers:
            raise ProtocolError(peer, f"rank {peer} asks for nothing")
        self._count_sent(self._cut, numbers)
        return numbers

    def _count_more(self, more: range) -> None:
        """Count parcels that the receiver asks for while others are under way."""
        assert self._cut is not None
        if more.stop > len(self._cut):
            peer = self._channel.peer
            raise ProtocolError(peer, f"rank {peer} asks for parcels that do not exist")
        self._count_sent(self._cut, more)
        if more:
            # The receiver has other sources too and asks for a little at a time: the total is unknown.
            self._progress.total_bytes = None

    def _count_sent(self, cut: Parcels, numbers: Sequence[int]) -> None:
        chosen = np.asarray(numbers, dtype=np.int64)
        with self._lock:
            if self._sent is None:
                self._sent = np.zeros(len(cut), dtype=np.int64)
            self._expect_to_move(cut.payload[chosen], self._sent[chosen] > 0)
            self._sent[chosen] += 1
            times = self._channel.limits.max_repairs
            if (self._sent[chosen] > times + 1).any():
                peer = self._channel.peer
                raise ProtocolError(peer, f"rank {peer} asked again for parcels more than {times} times")
            self._report.repaired += int((self._sent[chosen] > 1).sum())

    def _expect_to_move(self, payload: Ints, again: Bools) -> None:
        """Update the progress for parcels that the receiver asks for, some of them ``again``."""
        progress, new = self._progress, int(payload[~again].sum())
        if not self._asked_bytes:
            # Until now the total was the whole state. From here on it is what the receiver has read by itself, plus
            # what it asks for.
            progress.total_bytes = progress.bytes if new else None
        self._asked_bytes += new
        progress.bytes = max(progress.bytes - int(payload[again].sum()), 0)
        if progress.total_bytes is not None:
            progress.total_bytes += new

    def _look_again(self, numbers: Sequence[int], channel: Channel) -> None:
        """Raise if parcels that the receiver asks for again have changed since they were sent."""
        assert self._cut is not None
        assert self._memory is not None
        with channel.holding_turn():
            streams.complete(channel.timeout)
            again = [n for n in numbers if n in self._known]
            now = digests_of(self._cut, self._memory, again, channel.timeout)
            differ = [n for n, digest in zip(again, now, strict=True) if digest != self._known[n]]
        if differ:
            regions = {extent.region for number in differ for extent in self._cut.extents(number)}
            storages = np.unique(self._cut.regions.storage[sorted(regions)])
            manifest = self._offered.described.manifest
            rows = np.flatnonzero(np.isin(manifest.tensors.storage, storages))
            leaves = np.unique(manifest.leaves_of(rows)).tolist()[:100]
            self._blame([manifest.paths[leaf] for leaf in leaves], channel)

    def _check_unchanged(self) -> None:
        with self._channel.holding_turn():
            streams.complete(self._channel.timeout)
            changed = self._offered.mutation_watch.changed(self._channel.timeout)
        if changed:
            self._blame(changed, self._channel)

    def _confirms(self) -> bool:
        """Whether the tensors are known to be unchanged, as far as that takes no time. If not, the receiver asks."""
        watch = self._offered.mutation_watch
        return self._lanes is None and not streams.are_involved() and watch.is_quick and not watch.changed()

    def _blame(self, leaves: list[str], channel: Channel) -> None:
        own = self._channel.group.rank()
        error = SourceMutated(
            -1 if own is None else own,
            leaves,
            f"the source's tensors were changed while it sent them: {some_of(leaves)}. Nothing may step the "
            "optimizer or write to the state before send_checkpoint has returned",
        )
        channel.refuse(error)
        raise error

    def _compare(self, compare: messages.HeldParcels) -> None:
        """Send digests of parcels that the receiver may hold already, and patches for those that it holds of before."""
        channel, cut = self._channel, self._cut
        assert cut is not None
        assert self._memory is not None
        try:
            numbers = messages.numbers_in(compare.parcels, len(cut))
        except ValueError as error:
            raise ProtocolError(channel.peer, f"rank {channel.peer} compares parcels that do not exist") from error
        if self._asked is None:
            self._asked = np.zeros(len(cut), dtype=np.int64)
        chosen = np.asarray(numbers, dtype=np.int64)
        self._asked[chosen] += 1
        if not len(chosen) or (self._asked[chosen] > channel.limits.max_repairs).any():
            raise ProtocolError(
                channel.peer,
                f"rank {channel.peer} asked to compare no parcels, or the same parcels more than "
                f"{channel.limits.max_repairs} times",
            )
        # A receiver that only compares says no digests, and takes no patches.
        told = bool(compare.digests)
        if told and (not self._offered.offer.history or len(compare.digests) != WIDE_BYTES * len(numbers)):
            raise ProtocolError(channel.peer, f"rank {channel.peer} compares parcels by digests of a wrong length")
        with channel.holding_turn():
            streams.complete(channel.timeout)
            if told and not self._was_told:
                self._was_told = True
                assert self._offered.history is not None
                self._given = self._offered.history.of(self._plan_key, cut, self._offered.total_bytes)
            if self._given is None or not told:
                answer = messages.Digests(b"".join(wide_digests_of(cut, self._memory, numbers, channel.timeout)))
            else:
                answer = self._give_out(self._given, numbers, compare.digests)
        channel.send(Message.DIGESTS, messages.encode(answer))

    def _give_out(self, given: GivenOut, numbers: Sequence[int], held: bytes) -> messages.Digests:
        """Compare parcels with those that the receiver holds, and with what was given out before."""
        assert self._cut is not None
        assert self._memory is not None

        def give(i: int, data: torch.Tensor, is_copy: bool) -> tuple[bytes, bytes]:
            return given.give(numbers[i], data, held[WIDE_BYTES * i : WIDE_BYTES * (i + 1)])

        with given.lock:
            found = packing.visit(self._cut, self._memory, numbers, give, self._channel.timeout)
        nbytes = sum(len(patch) for _, patch in found)
        self._rate_limit.take(nbytes, lambda: self._caller.cause is not None)
        with self._lock:
            self._report.bytes += nbytes
            self._report.patch_bytes += nbytes
            self._report.parcels += sum(1 for _, patch in found if patch)
            self._report.history_bytes = 0 if self._offered.history is None else self._offered.history.nbytes
            self._report.route = routes_of(self._report.route, "group") if nbytes else self._report.route
            self._asked_bytes += nbytes
            self._progress.bytes += nbytes
        return messages.Digests(b"".join(digest for digest, _ in found), [patch for _, patch in found])

    def _line_up(self, want: messages.Want) -> tuple[messages.Agreed, RateLimit] | None:
        """Put this receiver into a chain. Return the answer to it, and the chain's rate limit. None: no chain."""
        chains, peer = self._offered.chains, self._channel.peer
        # On the source's own host a chain would save no network traffic, and would cost a hop.
        if chains is None or not want.relay or not want.parcels or want.wanted_blocks or want.host == this_host():
            if chains is not None:
                chains.leave(peer)
            return None
        key = (want.fingerprint, want.digests, *want.apart, -1, *want.tensors, -1, *want.parcels)
        return chains.join(peer, key, want.host)

    def _hear_verdict(self, body: bytearray) -> None:
        report = self._report
        verdict = self._channel.decode(body, messages.Verdict)
        if self._outgoing is not None and self._outgoing.failure is not None:
            raise self._outgoing.failure
        pulled = {name: nbytes for name, nbytes in verdict.pulled.items() if name in self._offered.offer.routes}
        nbytes = sum(pulled.values())
        if min(pulled.values(), default=0) > 0 and nbytes <= self._offered.total_bytes:
            report.read_bytes = nbytes
            report.bytes += nbytes
            report.route = routes_of(report.route, *pulled)
        # Only the verdict tells how much the receiver has taken, from this source or through neighbours.
        self._progress.total_bytes = self._progress.bytes = report.read_bytes + self._asked_bytes

    def _plan(self, want: messages.Want) -> tuple[Parcels, Sequence[int]]:
        peer, manifest = self._channel.peer, self._offered.described.manifest
        for numbers, count in ((want.apart, len(manifest.storages)), (want.tensors, len(manifest.tensors))):
            if numbers and (sorted(set(numbers)) != numbers or numbers[0] < 0 or numbers[-1] >= count):
                raise ProtocolError(peer, f"rank {peer} wants tensors that were not offered")
        if want.digests and not self._offered.offer.digests:
            raise ProtocolError(peer, f"rank {peer} wants digests that were not offered")
        offer, least = self._offered.offer, self._channel.limits.min_parcel_bytes
        if not least <= want.parcel_bytes <= offer.parcel_bytes or want.parcel_bytes % 16:
            raise ProtocolError(peer, f"rank {peer} wants parcels of an impossible size")
        if not 0 < want.burst_bytes <= offer.burst_bytes:
            raise ProtocolError(peer, f"rank {peer} wants bursts of an impossible size")
        blocks = None if want.wanted_blocks is None else msgspec.msgpack.encode(want.wanted_blocks)
        wanted = (tuple(want.apart), tuple(want.tensors), blocks)
        key = (self._offered.offer.structure, tuple(manifest.coordinates), want.parcel_bytes, *wanted)
        cut, picked, known = self._offered.remembered.cut(key, lambda: self._cut_from(want))
        if known:
            self._report.reuse("parcels")
        self._plan_key = key
        if parcels.fingerprint(cut, picked) != want.fingerprint:
            raise ProtocolError(
                peer, f"rank {peer} derived other parcels from the same offer (different transfuse versions?)"
            )
        try:
            return cut, messages.numbers_in(want.parcels, len(cut))
        except ValueError as error:
            raise ProtocolError(peer, f"rank {peer} wants parcels that do not exist") from error

    def _cut_from(self, want: messages.Want) -> tuple[Parcels, int | None]:
        """Cut parcels from everything, or from the blocks that the receiver wants."""
        peer, manifest = self._channel.peer, self._offered.described.manifest
        if want.wanted_blocks is None:
            return parcels.cut(lay_out(manifest, want.apart, want.tensors), want.parcel_bytes), None
        try:
            with self._channel.holding_turn():
                regions = regions_in(self._offered.holdings, want.wanted_blocks)
        except ValueError as error:
            raise ProtocolError(peer, f"rank {peer} wants blocks that were not offered: {error}") from error
        return parcels.cut(regions, want.parcel_bytes, all_staged=True), want.wanted_blocks.fingerprint()
