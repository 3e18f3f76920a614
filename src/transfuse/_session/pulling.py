"""Pulling: a receiver reads parcels from one source by the routes that allow it, and asks the group for the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing, nullcontext

import numpy as np

from transfuse._errors import PeerLost, ProtocolError, SourceMutated, some_of
from transfuse._phases import Phase
from transfuse._plan.parcels import Parcels
from transfuse._session.conversation import Conversation
from transfuse._session.offers import describe, is_described, read_manifest
from transfuse._sizes import Sizes
from transfuse._state.manifest import Manifest
from transfuse._state.tensors import Bools
from transfuse._wire import route_table
from transfuse._wire.rate_limit import RateLimit
from transfuse._wire.route import MalformedEntry, Pull, Puller, Route, SourceEnded, Unreadable

logger = logging.getLogger("transfuse")


class Pulling:
    """Pulls parcels from one source, by every route that both ends know and allow, in the order of the table."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._channel = conversation.channel
        self._offer = offer = conversation.offer
        self._roster = roster = conversation.roster
        self._ledger = conversation.ledger
        self._progress = conversation.progress
        self._rate_limit = RateLimit(offer.max_bytes_per_second)
        self._routes = route_table.usable(offer.routes, roster.request.options)
        #: Which parcels each route can pull, for the routes of which this is known.
        self._readable: dict[str, Bools] = {}
        #: Which parcels lie in memory as they travel. What is converted as it lands cannot be compared.
        self._comparable = conversation.cut.of_all_regions(~conversation.landing.convert)
        #: How many bytes were pulled by each route.
        self.pulled: dict[str, int] = {}

    def can_pull(self, numbers: Sequence[int]) -> bool:
        """Whether any route can pull any of these parcels."""
        chosen = np.asarray(numbers)
        return any(readable[chosen].any() for readable in self._readable.values())

    def pull(self) -> None:
        """Pull all wanted parcels that any route can pull."""
        channel, receive, roster = self._channel, self._conversation.receive, self._roster
        try:
            if not self._routes or not len(self._ledger):
                return
            if (
                self._rate_limit.rate is not None
                and self._rate_limit.rate * channel.timeout < channel.limits.min_parcel_bytes
            ):
                return  # The rate is too slow for this timeout. The group route reports such a source.
            channel.phase = self._progress.phase = Phase.READ.doing
            # Until this source answers, other sources are not asked for what could be pulled from it. So it may be
            # abandoned if it is silent for long.
            if not is_described(self._offer, roster.context.remembered):
                with roster.abandonable(channel, channel.abandon if roster.several else None):
                    self._offer = describe(channel, self._offer)
            manifest, theirs = self._seen_from_there()
            with channel.holding_turn(lambda: self._progress.bytes):
                for route in self._routes:
                    # On one host a reader uses all threads, so readers take turns, unless a rate limit holds this one
                    # back anyway.
                    turn = receive.reading if route.same_host and self._rate_limit.rate is None else nullcontext()
                    with turn, roster.phase(channel, Phase.READ):
                        if not self._ledger.complete:
                            self._pull_by(route, manifest, theirs)
        except MalformedEntry as error:
            raise ProtocolError(channel.peer, f"rank {channel.peer}: {error}") from error
        finally:
            self._progress.bytes = self._ledger.bytes_from(channel.peer)
            receive.done_reading(channel.peer)

    def _seen_from_there(self) -> tuple[Manifest, Parcels]:
        """The source's own manifest, and all parcels with their regions in the source's memory."""
        limits, remembered = self._channel.limits, self._roster.context.remembered
        try:
            share = self._conversation.share
            return share.seen_from_source(lambda: read_manifest(self._offer, limits, remembered).manifest)
        except ValueError as error:
            raise MalformedEntry(f"a malformed offer: {error}") from error

    def _pull_by(self, route: Route, manifest: Manifest, theirs: Parcels) -> None:
        """Pull all that one route can bring. If the route stops working, leave the rest to the next one."""
        channel = self._channel
        readable = self._readable.get(route.name)
        if readable is not None and not readable.any():
            return
        entry = self._offer.routes.get(route.name)
        if entry is None:
            raise MalformedEntry(f"its description lacks the {route.name} route that its offer had")
        try:
            with closing(route.open(entry, self._told(manifest, theirs))) as puller:
                if readable is None:
                    readable = self._readable[route.name] = np.zeros(len(self._ledger), dtype=bool)
                    readable[puller.readable()] = True
                    readable &= self._conversation.share.held
                self._pull_shares(route, puller, readable)
        except Unreadable as reason:
            self._readable[route.name] = np.zeros(len(self._ledger), dtype=bool)
            self._ledger.give_back(channel.peer)
            if isinstance(reason, SourceEnded) and self._progress.bytes:
                raise PeerLost(channel.peer, f"rank {channel.peer} ended while its memory was being read") from reason
            self._progress.bytes = self._ledger.bytes_from(channel.peer)
            logger.info("rank %d: %s; using the group route", channel.peer, reason)

    def _told(self, manifest: Manifest, theirs: Parcels) -> Pull:
        return Pull(
            manifest=manifest,
            cut=theirs,
            landing=self._conversation.landing,
            staging_bytes=self._channel.limits.staging_bytes,
            rate_limit=self._pace_or_stop,
            went_on=self._went_on,
            at_once=self._rate_limit.at_once,
            timeout=self._channel.timeout,
        )

    def _pull_shares(self, route: Route, puller: Puller, readable: Bools) -> None:
        """Pull parcels while there are any. They count as landed only after a check that the lease still holds."""
        conversation, channel, ledger = self._conversation, self._channel, self._ledger
        report, name = conversation.report, route.name
        sizes = Sizes(channel.limits, channel.timeout)
        unreadable, share = 0, sizes.read(self._rate_limit.rate, same_host=route.same_host)
        verify = self._roster.request.options.verify
        compared = route.compared and verify is not False and self._offer.digests
        while len(numbers := conversation.receive.read_share(channel.peer, share, readable)):
            failed = set(puller.pull(numbers))
            if verify and not compared:
                failed |= self._settle_differences(puller, [n for n in numbers if n not in failed])
            puller.recheck()
            done = [n for n in numbers if n not in failed]
            if compared:
                # Compared later, over the group. Those that turn out wrong come over the group too.
                readable[done] = False
                ledger.doubt(channel.peer, [n for n in done if self._comparable[n]])
            ledger.land(channel.peer, done)
            ledger.give_back(channel.peer)
            readable[list(failed)] = False
            unreadable += len(failed)
            nbytes = ledger.bytes_of(done)
            if done:
                self.pulled[name] = self.pulled.get(name, 0) + nbytes
                report.count(channel.peer, nbytes, len(done), name)
            report.read_bytes += nbytes
            report.verified = bool(verify) or compared
        if unreadable:
            logger.info("rank %d: %d parcels cannot be read; they come over the group", channel.peer, unreadable)

    def _settle_differences(self, puller: Puller, numbers: Sequence[int]) -> set[int]:
        """Read a second time, and pull parcels that differ again. Return the parcels that can no longer be pulled."""
        gone: set[int] = set()
        for _ in range(self._channel.limits.max_repairs + 1):
            numbers = puller.differing(numbers)
            if not numbers:
                return gone
            self._conversation.report.repaired += len(numbers)
            gone |= set(puller.pull(numbers))
            numbers = [n for n in numbers if n not in gone]
        puller.recheck()  # Raises if the lease has ended: after that the source may change its tensors.
        leaves = self._conversation.accepted.leaves_of(numbers)
        raise SourceMutated(
            self._channel.peer,
            leaves,
            f"rank {self._channel.peer} changed its tensors while it sent them: {some_of(leaves)}. Nothing may step "
            "the optimizer or write to the state before send_checkpoint has returned",
        )

    def _went_on(self, nbytes: int) -> None:
        self._progress.bytes += nbytes
        self._roster.caller.tick()
        self._pace_or_stop(nbytes)

    def _pace_or_stop(self, nbytes: int) -> None:
        self._rate_limit.take(nbytes, lambda: self._roster.caller.cause is not None)
        if self._roster.caller.cause is not None:
            raise self._roster.caller.cause
