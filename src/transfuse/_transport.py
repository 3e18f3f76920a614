"""PGTransport: send_checkpoint and recv_checkpoint, and their options."""

from __future__ import annotations

import copy
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal, Self, SupportsIndex, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from transfuse import _arguments
from transfuse._arguments import check_step
from transfuse._errors import ReceiveFailed, SendFailed, StateError, TornState, TransfuseError, let_go
from transfuse._limits import Limits
from transfuse._memory.mutation import MutationWatch
from transfuse._memory.streams import Streams, devices_of
from transfuse._metrics.reports import tell
from transfuse._metrics.under_way import under_way
from transfuse._options import Options, slowest_rate
from transfuse._phases import DONE, FAILED, Phase, trace_name
from transfuse._plan.catalogue import Late
from transfuse._progress import Progress, Show, showing
from transfuse._report import Report, failed_with, routes_of, said, trace_range
from transfuse._rules import MapPath
from transfuse._session import receive_from_one, source, threads
from transfuse._session.content import KnownContent, version_of
from transfuse._session.context import Context, Partial, Permit, ReceiveRequest
from transfuse._session.held_state import HeldState
from transfuse._session.pending import Brought, Pending
from transfuse._session.receive_from_all import Receive
from transfuse._session.relay import Chains, this_host
from transfuse._session.remembered import Remembered
from transfuse._sizes import Sizes
from transfuse._state.leaves.codec import MeshDescription
from transfuse._state.manifest import Described
from transfuse._timeouts import Patience
from transfuse._tls import Encryption
from transfuse._wire import messages, nixl_agent
from transfuse._wire.channel import Channel
from transfuse._wire.group import Group, ProcessGroupLike
from transfuse._wire.pool import Pool
from transfuse._wire.route_table import Leases
from transfuse._wire.turns import SourceOrder

logger = logging.getLogger("transfuse")


class PGTransport:
    """Moves a state between ranks of a process group, from memory to memory.

    One rank calls :meth:`send_checkpoint`, the others :meth:`recv_checkpoint`, as often as they like. The state that
    arrives equals the state that was sent, or both ends raise an error that says why not.

    Args:
        pg: a process group, or anything with its ``send(tensors, rank, tag)`` and ``recv(tensors, rank, tag)``.
            All ranks below are ranks within this group.
        timeout: how long a transfer may go without progress before it fails, as a timedelta or in seconds. The source's
            timeout begins when it has described its state, the receiver's when its ``state_dict`` callback has
            returned. So each end's timeout must allow for the time that the other end needs for that.
        device: where the backend wants its tensors (``cpu`` for gloo, an accelerator for NCCL).
        state_dict: a function that is called at the start of a receive. The bytes land in the tensors of the tree that
            it returns. Without this function, tensors arrive fresh.
        same_host: receivers on the source's host may read straight from the source's memory (the memory route). Both
            ends must allow it, and ``TRANSFUSE_SAME_HOST=0`` in the environment forbids it.
        device_memory: receivers on the source's host may map the memory of its accelerators, and copy on the device
            (the device memory route). Both ends must allow it, and ``same_host``. It has run on an imitation only.
        nixl: receivers on any host may read the source's memory through NIXL (the NIXL route). Both ends must allow
            it. None: if ``TRANSFUSE_NIXL`` in the environment is 1. True where NIXL is not installed is an error.
        verify: check the bytes that have landed: on the group route by a digest of every parcel, on the memory route by
            reading a second time, on the NIXL route by comparing with the source's digests. None: on the NIXL route,
            and on the group route on the CPU. True: always. False: never.
        delta: compare 128-bit digests of parcels, keep those that the targets hold already, and fetch the rest; from a
            source with ``history`` only the items that have changed, where that is less.
        cast: convert floating values for targets of another floating type, at the end where fewer bytes travel.
        map_path: translates the source's key paths into the target's: a mapping, rules (:class:`Rename`,
            :class:`Concat`, :class:`Split`, with :class:`Slice`), or a callable. Needs ``state_dict``.
        atomic: write to no target before everything has arrived and been verified. Needs memory for a second copy.
        strict: None: a leaf of the target that no source has is an error, and a leaf that only the source has arrives
            fresh. True: both are errors. False: neither is; a leaf that only the target has keeps its value.
        mesh: the DeviceMesh for DTensors that arrive fresh, or a callable that makes one from a
            :class:`MeshDescription`. Receiving never creates process groups by itself.
        weights_only_objects: accept Python objects that ``torch.load(weights_only=True)`` accepts.
        relay: receivers that want the same parcels may pass them on to each other, so that the source sends each byte
            once.
        streams: conversations that begin over the group go on over TCP connections of our own, if the two ends can
            connect; parcels on an accelerator stay on its backend. False: all bytes go over the group.
        lanes: how many connections a source and a receiver use, at most as many as the other end allows. None: several
            if they move much in main memory, by the number of cores and whether they share a host.
        max_bytes_per_second: the most that a source sends, to all its receivers together.
        history: 1: the source remembers what it last gave out to receivers with ``delta``, in a copy of its shard as it
            travels. To a receiver that still holds this it sends positions and values of what has changed.
        max_receive_bytes: the most that one receive may allocate for fresh tensors. None: this machine's memory.
        tls: a :class:`TLS`: connections of our own are encrypted, and a conversation that gets none ends. Both ends
            need it. What stays on the backend stays plain: parcels on an accelerator, the first words over the group.
            Without it: what ``TRANSFUSE_TLS_CERT``, ``_KEY``, ``_CA`` and ``_NAMES`` say. With False nothing is
            encrypted, whatever they say.
        progress: True for a bar, or a callable that gets a dict from rank to :class:`Progress`, in the calling thread,
            at least every 100 ms and once at the end. An exception that the callable raises ends the transfer: the call
            raises it, and the peers are refused.
    """

    def __init__(
        self,
        pg: ProcessGroupLike,
        timeout: timedelta | float,
        device: torch.device | str,
        state_dict: Callable[[], object] | None = None,
        *,
        same_host: bool = True,
        device_memory: bool = False,
        nixl: bool | None = None,
        verify: bool | None = None,
        delta: bool = False,
        cast: bool = False,
        map_path: MapPath | None = None,
        atomic: bool = False,
        strict: bool | None = None,
        mesh: DeviceMesh | Callable[[MeshDescription], DeviceMesh] | None = None,
        weights_only_objects: bool = False,
        relay: bool = True,
        streams: bool = True,
        lanes: int | None = None,
        max_bytes_per_second: float | None = None,
        history: int = 0,
        max_receive_bytes: int | None = None,
        tls: Encryption = None,
        progress: bool | Show = False,
    ) -> None:
        _arguments.check_group(pg)
        _arguments.check_state_dict(state_dict)
        timeout = _arguments.duration(timeout)
        limits = Limits.from_environment()
        options = Options(
            same_host=same_host,
            device_memory=device_memory,
            nixl=nixl,
            verify=verify,
            delta=delta,
            cast=cast,
            map_path=map_path,
            atomic=atomic,
            strict=strict,
            mesh=mesh,
            weights_only_objects=weights_only_objects,
            relay=relay,
            streams=streams,
            lanes=lanes,
            max_bytes_per_second=max_bytes_per_second,
            history=history,
            max_receive_bytes=max_receive_bytes,
            tls=tls,
            progress=progress,
        )
        self._options = options.check(timeout, limits, in_place=state_dict is not None)
        if self._options.nixl:
            nixl_agent.begin()
        self._limits = self._options.apply_to(limits)
        self._seconds = timeout.total_seconds()
        self._group = Group(pg, _arguments.device_of(device))
        self._state_dict = state_dict
        self._lanes = Pool(self._group, allowed=self._options.streams, tls=self._options.tls or None)
        weakref.finalize(self, self._lanes.close)
        self._remembered = Remembered()
        #: Which entry of a served state this sends: states of one structure have a history each.
        self.entry: str | None = None
        self._report: Report | None = None
        #: Target leaves that a failed receive left half-written. Until a receive succeeds, it does not send.
        self._torn: tuple[str, ...] = ()

    @property
    def report(self) -> Report | None:
        """The report of this transport's last transfer, also if it failed. None before the first transfer."""
        return self._report

    def close(self) -> None:
        """Close the connections that this transport has made beside the group's own. It goes on without them."""
        self._lanes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def remembered(self) -> Remembered:
        """What this transport remembers of its transfers, to do nothing twice. It holds no tensor.

        Set it on a new transport that goes on in the place of this one.
        """
        return self._remembered

    @remembered.setter
    def remembered(self, remembered: Remembered) -> None:
        self._remembered = remembered

    @property
    def torn(self) -> tuple[str, ...]:
        """Target leaves that a failed receive left half-written. While there are any, ``send_checkpoint`` refuses.

        Set it on a new transport that goes on with the same tensors.
        """
        return self._torn

    @torn.setter
    def torn(self, leaves: tuple[str, ...]) -> None:
        self._torn = leaves

    def send_checkpoint(
        self,
        dst_ranks: SupportsIndex | Sequence[SupportsIndex],
        state_dict: object,
        *,
        step: SupportsIndex | None = None,
    ) -> None:
        """Send a state to one rank or to several. Each of them calls :meth:`recv_checkpoint`.

        Returns when every receiver has everything. A receiver that fails does not disturb the others: once they are
        done, this raises :class:`SendFailed`, which maps each failed rank to its cause. The caller may change the
        tensors as soon as this returns or raises, and not before.

        ``step`` says which step the state is of. Receivers that ask for a step refuse a source that does not give one.
        """
        self.send(dst_ranks, lambda: state_dict, step=step)

    def send(
        self,
        dst_ranks: SupportsIndex | Sequence[SupportsIndex],
        state_dict: Callable[[], object],
        *,
        step: SupportsIndex | None = None,
        watch: Callable[[], object] = lambda: None,
        content: KnownContent | None = None,
    ) -> None:
        """As :meth:`send_checkpoint`, but with a function that returns the state. If it raises, receivers are told.

        ``watch`` is called now and then, and may raise to end the transfer. ``content``: what is known of the content
        of this state, if it was sent before.
        """
        caller, began = None, False
        try:
            caller = self._new_caller()
            self._follow_group()
            ranks = self._check_ranks("dst_ranks", dst_ranks)
            step = check_step(step)
            self._report = report = Report("send", ranks, step)
            if not ranks:
                return
            self._check_rate(len(ranks))
            began = True
            self._send(state_dict, report, caller, watch, content or KnownContent())
        except BaseException as error:
            if _is_untold(error, caller, began):
                self._tell(error, caller, "dst_ranks", dst_ranks, is_source=True)
            caller = None
            if began and isinstance(error, TransfuseError):
                error.report = self._report
            let_go(error)
            raise

    def _check_rate(self, receivers: int) -> None:
        rate, least = self._options.max_bytes_per_second, receivers * slowest_rate(self._limits, self._seconds)
        if rate is not None and rate < least:
            raise ValueError(
                f"max_bytes_per_second={rate:g} is too slow for {receivers} receivers with a timeout of "
                f"{self._seconds:g} s: expected at least {least:.0f}"
            )

    def _send(
        self,
        state_dict: Callable[[], object],
        report: Report,
        caller: threads.Caller,
        watch: Callable[[], object],
        content: KnownContent,
    ) -> None:
        patience = Patience(self._seconds).queued_work
        with self._call(report, caller) as context, Leases(self._options, patience) as leases:
            self._send_to_all(state_dict, context, leases, watch, content)

    def _send_to_all(
        self,
        state_dict: Callable[[], object],
        context: Context,
        leases: Leases,
        watch: Callable[[], object],
        content: KnownContent,
    ) -> None:
        ranks, report, progress, caller = context.ranks, context.report, context.progress, context.caller
        offered, failure = None, None
        with _calling(context, Phase.DESCRIBE):
            try:
                context.show()
                offered = self._load(state_dict(), report.step, ranks, leases, content)
                if offered.sent_before:
                    report.reuse("description")
                report.leaves = len(offered.described.manifest)
            except BaseException as error:
                failure = error
                if not isinstance(error, Exception):
                    caller.stop(error)
        reports = {rank: report.part(rank) for rank in ranks}

        channels = {rank: Channel(self._group, rank, self._seconds, self._limits, is_source=True) for rank in ranks}
        offer = failure if offered is None else offered
        assert offer is not None
        try:
            failed = threads.run(
                {rank: partial(self._talk_to, channels[rank], offer, context, reports[rank]) for rank in ranks},
                caller,
                context.show,
                watch,
                park=lambda rank: channels[rank].park(caller.cause),
                streams=Streams(self._involved(() if offered is None else offered.described.devices)),
            )
        finally:
            leases.end()
            _sum_up(report, list(reports.values()))
        if failure is not None:
            failed = dict.fromkeys(ranks, failure)
            for one in progress.values():
                one.phase = FAILED
        report.failed = failed_with(failed)
        if offered is not None:
            report.version = version_of(report.step, [content.known(offered.offer.digest)])
        context.show()
        if failure is not None:
            raise failure
        if failed:
            raise SendFailed(failed, [rank for rank in ranks if rank not in failed])

    # Conversations are methods: the frame of an inner function keeps what that refers to, as long as an error is kept.
    def _talk_to(
        self, channel: Channel, offer: source.OfferedState | BaseException, context: Context, report: Report
    ) -> None:
        progress = context.progress[channel.peer]
        with (
            _noting(progress),
            self._group.turn(channel, self._group.rank() or 0, several=len(context.ranks) > 1),
            channel,
        ):
            channel.transfer, channel.tag = secrets.randbits(63), self._group.new_tag(channel.peer)
            if isinstance(offer, BaseException):
                source.refuse(channel, offer)
            else:
                source.SourceEnd(channel, offer, context.caller, progress, report).run()

    @overload
    def recv_checkpoint(
        self,
        src_rank: SupportsIndex | Sequence[SupportsIndex],
        *,
        step: SupportsIndex | None = None,
        resume: Partial | None = None,
        wait: Literal[True] = True,
    ) -> Any: ...

    @overload
    def recv_checkpoint(
        self,
        src_rank: SupportsIndex | Sequence[SupportsIndex],
        *,
        step: SupportsIndex | None = None,
        resume: Partial | None = None,
        wait: Literal[False],
    ) -> Pending[Any]: ...

    def recv_checkpoint(
        self,
        src_rank: SupportsIndex | Sequence[SupportsIndex],
        *,
        step: SupportsIndex | None = None,
        resume: Partial | None = None,
        wait: bool = True,
    ) -> Any:
        """Receive the state that ``src_rank`` sends: one rank, or several with replicas, shards or stages of one state.

        With a ``state_dict`` callback the result holds the receiver's own tensors with the source's values. Leaves that
        only the source has arrive fresh. Leaves that only the receiver has are an error, unless ``strict=False``. A
        list of the result is as long as the source's.

        With several sources each brings a share. If one is lost, the others send its share; if no other source holds
        it, this raises :class:`ReceiveFailed`.

        With ``step``, a source that sends another step, or does not say which, is refused with :class:`StepMismatch`.
        None accepts any step.

        On failure, the error's ``torn`` lists the targets that may hold new bytes; ``received`` and ``missing`` list
        the leaves that have arrived and those that have not. A later receive with ``resume=error.partial``, by this or
        a new transport, fetches only what is missing, if the sources offer the same state at the same step.

        With ``wait=False`` it returns a :class:`Pending` at once: the bytes arrive aside while the caller works, and
        its ``install()`` writes them and returns the state. The ``state_dict`` callback is called before. Until
        everything is here, start no other receive from the same ranks.
        """
        if wait is True:
            return self.receive(src_rank, step=step, resume=resume)
        _arguments.check_flags(wait=wait)
        return self._ahead(src_rank, step, resume)

    def _ahead(
        self, src_rank: SupportsIndex | Sequence[SupportsIndex], step: SupportsIndex | None, resume: Partial | None
    ) -> Pending[Any]:
        """Receive in a thread, with the target of this moment."""
        self._follow_group()
        if not self._group.tagged or self._group.serial or self._group.device.type != "cpu":
            raise ValueError(
                "wait=False needs a group that carries a transfer beside the caller's own operations: gloo with "
                'device="cpu"; or serve() the state, and fetch(..., wait=False)'
            )
        ranks = self._check_ranks("src_rank", src_rank)
        step, resume = check_step(step), check_resume(resume)
        ahead = copy.copy(self)
        if self._state_dict is not None:
            ahead._state_dict = _asked(self._state_dict)

        def receive(watch: Callable[[], object]) -> Brought:
            found = ahead.receive(ranks, step=step, resume=resume, watch=watch, hold=True)
            assert ahead._report is not None
            return Brought(found, ahead._report)

        def finish(state: Any, report: Report) -> Any:
            self._report, self._torn = report, ()
            return state

        return Pending(receive, finish)

    def receive(
        self,
        src_rank: SupportsIndex | Sequence[SupportsIndex],
        *,
        step: SupportsIndex | None = None,
        resume: Partial | None = None,
        late: Late | None = None,
        absent: Mapping[str, BaseException] | None = None,
        permit: Permit | None = None,
        watch: Callable[[], object] = lambda: None,
        version: bool = False,
        only_compares: bool = False,
        hold: bool = False,
    ) -> Any:
        """As :meth:`recv_checkpoint`, with more arguments.

        ``late`` chooses the targets once the sources have offered: it is called with the catalogue of their leaves.
        ``absent`` names sources that cannot be reached, and why. If only they may hold a leaf, the receive fails
        instead of leaving that leaf as it was. ``permit`` is asked before a target is written, and may raise.
        ``watch`` is called now and then, and may raise to end the transfer. ``version``: ask each source for the digest
        of its content. ``only_compares``: fetch and write nothing, and return how the targets differ. With ``hold`` no
        target is written: the result is a :class:`~transfuse._session.held_state.HeldState`, if there is a target.
        """
        caller, began = None, False
        try:
            caller = self._new_caller()
            self._follow_group()
            ranks = self._check_ranks("src_rank", src_rank)
            if not ranks:
                raise ValueError("src_rank is empty: a receive needs at least one source")
            step = check_step(step)
            check_resume(resume)
            if resume is not None:
                self._torn = resume.torn or self._torn
            self._report = report = Report("receive", ranks, step)
            # If everything arrives fresh, there is no target that ``atomic`` would protect.
            in_place = self._state_dict is not None or late is not None
            request = ReceiveRequest(
                step=step,
                late=late,
                resume=resume,
                absent=absent or {},
                permit=permit,
                version=version,
                only_compares=only_compares,
                hold=hold and in_place,
                options=replace(self._options, atomic=self._options.atomic and in_place and not hold),
            )
            began = True
            return self._receive(request, report, caller, watch)
        except BaseException as error:
            if _is_untold(error, caller, began):
                self._tell(error, caller, "src_rank", src_rank, is_source=False)
            caller = None
            if began and isinstance(error, TransfuseError):
                error.report = self._report
            let_go(error)
            raise

    def _ask_for_target(self, request: ReceiveRequest, context: Context) -> ReceiveRequest:
        """Call the user's callback. If it raises, the receive first tells the sources, then raises that error."""
        assert self._state_dict is not None
        with _calling(context, Phase.STATE_DICT):
            try:
                context.show()
                target = self._state_dict()
                if target is None:
                    raise StateError("the state_dict callback returned None; it must return the tree to receive into")
                _arguments.check_no_module(target, "the state_dict callback returns model.state_dict()")
            except BaseException as error:
                if not isinstance(error, Exception):
                    context.caller.stop(error)
                return replace(request, failure=error)
        return replace(request, target=target)

    def _receive(
        self, request: ReceiveRequest, report: Report, caller: threads.Caller, watch: Callable[[], object]
    ) -> Any:
        with self._call(report, caller) as context:
            if self._state_dict is not None and request.late is None:
                request = self._ask_for_target(request, context)
            return self._receive_from_all(request, context, watch)

    def _receive_from_all(self, request: ReceiveRequest, context: Context, watch: Callable[[], object]) -> Any:
        ranks, report = context.ranks, context.report
        receive = Receive(request, context)
        line = SourceOrder([rank for rank in ranks if rank != self._group.rank()], Patience(self._seconds).decision())

        def look() -> None:
            receive.watch()
            watch()

        try:
            failed = threads.run(
                {rank: partial(self._talk_with, rank, receive, context, line) for rank in ranks},
                context.caller,
                context.show,
                look,
                receive.roster.park,
                Streams(self._involved(devices_of(request.target))),
            )
            report.failed = failed_with(failed)
            if not receive.result:
                context.show()
                raise receive.roster.failure or (failed[ranks[0]] if len(ranks) == 1 else ReceiveFailed(failed))
            context.show()
        except BaseException as error:
            if receive.result:
                self._torn = ()  # The caller stopped after everything had arrived.
                writes = not request.hold and not request.only_compares
                if (request.target is not None or request.late is not None) and writes:
                    error.add_note("everything had arrived before this error: the targets hold the new state, whole")
            else:
                receive.account_for(error)
                self._torn = report.torn or self._torn
            raise
        finally:
            receive.close()
        (found,) = receive.result
        report.version = version_of(report.step, receive.contents.values())
        if isinstance(found, HeldState):
            found.remember = receive.roster.accepted.remember if not failed else found.remember
            return found
        self._torn = ()
        if not failed:
            receive.roster.accepted.remember()
        return found

    def _talk_with(self, rank: int, receive: Receive, context: Context, line: SourceOrder) -> None:
        channel = Channel(self._group, rank, self._seconds, self._limits)
        with (
            _noting(context.progress[rank]),
            self._group.turn(channel, rank, line, several=len(context.ranks) > 1),
            channel,
        ):
            receive_from_one.run(channel, receive)

    # ----------------------------------------------------------------------------------------------------- helpers

    def _new_caller(self) -> threads.Caller:
        return threads.Caller(watching=self._options.progress is not False)

    def _tell(
        self,
        error: BaseException,
        ended: threads.Caller | None,
        name: str,
        peers: SupportsIndex | Sequence[SupportsIndex],
        *,
        is_source: bool,
    ) -> None:
        """Tell the peers why a call has ended before its conversations began: they would wait for their whole timeout.

        Best effort: whatever happens meanwhile, a second interrupt too, the call ends with its first error.
        """
        with suppress(BaseException):
            begun = () if ended is None else ended.begun
            ranks = [rank for rank in self._check_ranks(name, peers) if rank not in begun]
            caller = threads.Caller(watching=False)
            if not isinstance(error, Exception):
                caller.stop(error)
            channels = {
                rank: Channel(self._group, rank, self._seconds, self._limits, is_source=is_source) for rank in ranks
            }

            def talk(rank: int) -> None:
                channel = channels[rank]
                with self._group.turn(channel, (self._group.rank() or 0) if is_source else rank), channel:
                    if is_source:
                        channel.transfer, channel.tag = secrets.randbits(63), self._group.new_tag(rank)
                        source.refuse(channel, error)
                    else:
                        receive_from_one.refuse(channel, error)

            threads.run(
                {rank: partial(talk, rank) for rank in ranks},
                caller,
                lambda: None,
                park=lambda rank: channels[rank].park(caller.cause),
            )

    def _follow_group(self) -> None:
        """If the group has been reconfigured since the last call, go on with its new ranks and connections."""
        group = self._group.in_present_configuration()
        if group is not self._group:
            self._group, self._lanes = group, self._lanes.in_configuration(group)
            weakref.finalize(self, self._lanes.close)

    def _load(
        self,
        state_dict: object,
        step: int | None,
        ranks: Sequence[int],
        leases: Leases,
        content: KnownContent | None = None,
    ) -> source.OfferedState:
        content = content or KnownContent()
        if self._torn:
            raise TornState(self._torn)
        _arguments.check_no_module(state_dict, "pass model.state_dict()")
        described = (
            state_dict if isinstance(state_dict, Described) else self._remembered.describe(state_dict, self._limits)
        )
        nbytes = int(described.manifest.storages.nbytes.sum())
        options = self._options
        relay = options.relay and self._group.relays and len(ranks) > 1 and nbytes >= self._limits.min_relay_bytes
        rate = options.max_bytes_per_second
        sizes = Sizes(self._limits, self._seconds).offered(
            len(ranks), chained_bytes=nbytes if relay else None, rate=rate
        )
        manifest = described.manifest.encode()
        structure = described.manifest.structure
        known = self._remembered.sent(structure)
        digest = manifest.digest()
        offer = messages.Offer(
            step=step,
            parcel_bytes=sizes.parcel_bytes,
            burst_bytes=sizes.burst_bytes,
            staged_bytes=sizes.staged_bytes,
            bursts_ahead=sizes.bursts_ahead,
            timeout=self._seconds,
            digests=options.verify is not False,
            routes=leases.export(described),
            max_bytes_per_second=None if rate is None else rate / len(ranks),
            manifest=manifest,
            digest=digest,
            likeness=described.manifest.likeness(manifest),
            coordinates=list(described.manifest.coordinates),
            connections=options.lanes or messages.MOST_LANES + 1,
            host=this_host(),
            structure=structure,
            history=bool(options.history),
            content=content.known(digest),
        )
        # All receivers share one copy. A long offer goes only to receivers that ask for it.
        whole = cache(lambda: self._encode(offer))
        wire = None
        if known or len(whole()) > self._limits.brief_bytes:
            # A receiver that has received this structure before needs only the values, and where the bytes lie.
            wire = _wire(messages.encode(messages.brief(offer, manifest.values if known else None)))
        chains = Chains(ranks, nbytes, self._seconds, offer.max_bytes_per_second) if relay else None
        return source.OfferedState(
            described,
            offer,
            whole() if wire is None else wire,
            whole,
            chains,
            MutationWatch(described),
            partial(content.of, described, self._seconds),
            sent_before=known,
            remembered=self._remembered,
            history=self._remembered.history_of(self.entry) if options.history else None,
            lanes=self._lanes,
        )

    def _encode(self, offer: messages.Offer) -> torch.Tensor:
        """The whole offer."""
        body = messages.encode(offer)
        if len(body) > self._limits.max_message_bytes:
            raise TransfuseError(
                f"the state's description takes {len(body)} bytes, more than TRANSFUSE_MAX_MESSAGE_BYTES="
                f"{self._limits.max_message_bytes}: raise that limit at both ends, or send fewer leaves"
            )
        return _wire(body)

    def _involved(self, devices: Iterable[torch.device]) -> list[torch.device]:
        """The devices that a transfer involves: where the state or the target lies, and the wire's."""
        return [*devices, self._group.device]

    @contextmanager
    def _call(self, report: Report, caller: threads.Caller) -> Iterator[Context]:
        """Run a call: give it a range in the trace and its progress; at the end set its time and log its report."""
        started, wanted = time.perf_counter(), self._options.progress
        progress = {rank: Progress() for rank in report.peers}
        try:
            with (
                trace_range(trace_name(report.direction)),
                under_way(report, progress),
                showing(wanted, report.title, progress) as show,
            ):
                yield Context(
                    ranks=report.peers,
                    limits=self._limits,
                    device=self._group.device,
                    timeout=self._seconds,
                    caller=caller,
                    report=report,
                    progress=progress,
                    show=show,
                    one_by_one=self._group.serial,
                    lanes=self._lanes,
                    remembered=self._remembered,
                )
        except BaseException as error:
            report.error = said(error)
            raise
        finally:
            report.end(time.perf_counter() - started)
            # A receive that went on without some sources is a recovery: users see it without configuring a log.
            recovered = report.error is None and report.failed
            tell(report, logging.WARNING if recovered else logging.INFO)

    def _check_ranks(self, name: str, given: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
        ranks, size = _arguments.ranks_of(name, given), self._group.size()
        for rank in ranks:
            if rank < 0 or (size is not None and rank >= size):
                raise ValueError(
                    f"{name}: rank {rank} is not in the group of {size} (ranks are ranks within the group)"
                )
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"{name}: expected each rank once, but ranks appear twice in {list(ranks)}")
        return ranks


def _asked(state_dict: Callable[[], object]) -> Callable[[], object]:
    """Call the user's callback now, in this thread. What it returns, or raises, comes when the result is called."""
    try:
        target = state_dict()
    except Exception as error:
        failure = error

        def fail() -> object:
            raise failure

        return fail
    return lambda: target


def _wire(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _is_untold(error: BaseException, caller: threads.Caller | None, began: bool) -> bool:
    """Whether an error came when no conversation could tell it. Wrong arguments end a call that has not begun."""
    return (caller is None or not caller.talking) and (began or not isinstance(error, Exception))


@contextmanager
def _calling(context: Context, phase: Phase) -> Iterator[None]:
    """Run a phase in the calling thread, and show it in the progress of all peers."""
    for one in context.progress.values():
        one.phase = phase.doing
    with context.report.phase(phase):
        yield


@contextmanager
def _noting(progress: Progress) -> Iterator[None]:
    """Set a conversation's progress to done or failed when it ends."""
    try:
        yield
    except BaseException:
        progress.phase = FAILED
        raise
    progress.phase = DONE


def check_resume(resume: Partial | None) -> Partial | None:
    """Refuse a ``resume=`` that a receive cannot resume from."""
    if resume is not None and not isinstance(resume, Partial):
        raise TypeError(f"resume takes error.partial of an earlier receive, or None, got {type(resume).__name__}")
    if resume is not None and resume.spent:
        raise ValueError(
            "this partial has been resumed from before, and its memory belongs to that receive: if that receive "
            "failed, resume from its own error.partial"
        )
    return resume


def _sum_up(report: Report, single: list[Report]) -> None:
    """Add the reports of the single receivers to the report of the send."""
    for one in single:
        report.bytes += one.bytes
        report.read_bytes += one.read_bytes
        report.patch_bytes += one.patch_bytes
        report.history_bytes = max(report.history_bytes, one.history_bytes)
        report.parcels += one.parcels
        report.connections = max(report.connections, one.connections)
        report.repaired += one.repaired
        report.verified = report.verified or one.verified
        report.route = routes_of(report.route, one.route)
        for what in one.reused:
            report.reuse(what)


def settings_of(transport: PGTransport) -> tuple[Options, float]:
    """A transport's options, and its timeout in seconds, for readers that receive with it."""
    return transport._options, transport._seconds
