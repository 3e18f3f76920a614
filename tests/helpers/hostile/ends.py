"""The two ends: wires that a test feeds, and an audit of what is done on a peer's behalf."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import random
import re
import struct
import sys
import tokenize
import zoneinfo
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from torch import Tensor

from hostile.classes import CAP, CPU, LIMITS, MAX_PLANNED, PEER, Nowhere, TooMuch, _Done
from hostile.corpus import Member
from hostile.forging import ABSENT_PID, INTS
from transfuse._errors import PeerLost, ProtocolError, ReceiveFailed, TransfuseError
from transfuse._limits import Limits
from transfuse._memory.arena import ALIGNMENT
from transfuse._memory.digest import WIDE_BYTES, digest_of, wide_digest_of
from transfuse._options import Options
from transfuse._plan import parcels
from transfuse._plan.holdings import Holdings
from transfuse._plan.parcels import Extent, Parcels
from transfuse._plan.wanted_blocks import WantedBlocks, regions_in
from transfuse._progress import Progress
from transfuse._report import Report
from transfuse._session import negotiation, offers, planning, receive_from_one, source, threads
from transfuse._session.context import Context, Partial, ReceiveRequest
from transfuse._session.planning import Accepted
from transfuse._session.receive_from_all import Receive
from transfuse._session.relay import Chains
from transfuse._session.threads import Caller
from transfuse._state import memory_maps
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.group import FIRST_LINK_TAG, FIRST_TAG, Group
from transfuse._wire.memory_route import MemoryEntry
from transfuse._wire.messages import Agreed, Header, Intent, Link, Message
from transfuse._wire.operations import Posted
from transfuse._wire.pool import Pool
from transfuse._wire.rate_limit import RateLimit
from transfuse._wire.route import MalformedEntry
from transfuse._wire.switchboard import Waits


class Recorder(Nowhere):
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.said = bytearray()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
        self.said += tensors[0].numpy().tobytes()
        return _Done()


def spoken(kind: Message, body: bytes, transfer: int, note: int) -> bytes:
    """A message as it goes over the wire."""
    channel = Channel(Group(group := Recorder(), CPU), PEER, 1.0, LIMITS)
    channel.transfer, channel.tag = transfer, FIRST_TAG
    channel.send(kind, body, note=note)
    return bytes(group.said)


class Stream(Nowhere):
    """A peer that has said ``data`` and then fallen silent."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
        (tensor,) = tensors
        data = self._data[self._at : self._at + tensor.numel()]
        if len(data) < tensor.numel():
            raise RuntimeError("timed out")
        self._at += len(data)
        if data:
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return _Done()


class Lined(Chains):
    """Chains in which everybody is told the same at once."""

    def __init__(self, agreed: Agreed) -> None:
        super().__init__([PEER], 0, 1.0)
        self._agreed = agreed

    def join(self, rank: int, key: Hashable, host: int) -> tuple[Agreed, RateLimit]:
        return self._agreed, RateLimit(None)


#: What one receiver may be told of its neighbours.
AGREED = [
    Agreed(upstream, downstream, 0.01)
    for upstream in (None, Link(1, FIRST_LINK_TAG, 1))
    for downstream in (None, Link(2, FIRST_LINK_TAG + 1, 2))
]


Said = bytes | tuple[Message, bytes]


class Wire(Channel):
    """A line to a peer that says ``answers`` in turn, sends made-up parcels, and tells the truth about them.

    Answers are bodies of the first kind that is due, or come with their kind. A number among them is a sign of life.
    A source's answers to questions are said by themselves: what ``said`` has for that kind of question, once, and
    otherwise nothing special or the truth. After ``bursts`` bursts it cancels. A receiver that gets parcels asks for
    ``more`` meanwhile.
    """

    def __init__(
        self,
        rng: random.Random,
        member: Member,
        answers: Sequence[Said | int],
        *,
        said: Mapping[Message, Said] | None = None,
        bursts: int | None = None,
        more: Sequence[int] = (),
        relays: bool = False,
        peer: int = PEER,
    ) -> None:
        super().__init__(Group(Nowhere(), CPU), peer, 1.0, LIMITS)
        self.group.tagged = relays
        self._rng, self._member, self._answers = rng, member, deque(answers)
        self._said, self._bursts, self._more = dict(said or {}), bursts, deque(more)
        self._filling = rng.choice(["random", "honest", "honest", "zero", "small", "full", "edges"])
        self._asked: Message | None = None
        self._true_digests: bytes = b""
        #: How the member cuts what is wanted from it, if it has that at all.
        self._cut: Parcels | None = None
        self._digests: list[int] = []
        self._due: deque[int] = deque()
        self.accepted: Accepted | None = None

    def ask_last(self, kind: Message, body: bytes, answer: Message) -> None:
        self.send(kind, body)
        self.expect(answer)

    def expect(self, *kinds: Message, tag: int | None = None, early: Posted | None = None) -> tuple[Header, bytearray]:
        self.transfer, self.tag = 1, FIRST_TAG
        if Message.GOT in kinds:
            # Perhaps with parcels that it wants in addition.
            note = self._more.popleft() if self._more and self._rng.random() < 0.5 else int(Intent.GO_ON)
            return Header(Message.GOT, 1, note, 0, 0), bytearray()
        if Message.AGREED in kinds or Message.DIGESTS in kinds:
            assert self._asked is not None
            plain = self._true_digests if Message.DIGESTS in kinds else messages.encode(Agreed())
            return self._say(self._said.pop(self._asked, plain), kinds)
        while self._answers:
            answer = self._answers.popleft()
            if not isinstance(answer, int):
                return self._say(answer, kinds)
            if self.on_working is not None:
                self.on_working(answer)
        raise PeerLost(self.peer, f"rank {self.peer}: has no more to say")

    def _say(self, answer: Said, kinds: tuple[Message, ...]) -> tuple[Header, bytearray]:
        kind, body = answer if isinstance(answer, tuple) else (kinds[0], answer)
        if kind is Message.REFUSAL:
            self._refused = True
            raise self.refused(self.decode(body, messages.Refusal))
        if kind not in kinds:
            raise ProtocolError(self.peer, f"rank {self.peer} sent {kind.name}, which was not due")
        return Header(kind, 1, FIRST_TAG, len(body), 0), bytearray(body)

    def send(self, kind: Message, body: bytes | Tensor = b"", *, note: int = 0, tag: int | None = None) -> None:
        if kind is Message.GOT:
            answer = messages.Answer.of(note)
            self._due += range(answer.first, answer.first + answer.number)
        if kind in (Message.WANT, Message.MORE, Message.COMPARE):
            assert isinstance(body, bytes)
            assert self.accepted is not None
            count = len(self.accepted.landing.cut)
            if kind is Message.WANT:
                want = messages.decode(body, messages.Want)
                self._cut = (
                    self.accepted.landing.cut
                    if want.wanted_blocks is None
                    else self._picked(want.wanted_blocks, want.parcel_bytes)
                )
                self._due = deque(messages.numbers_in(want.parcels, count))
            elif kind is Message.MORE:
                self._due += messages.numbers_in(messages.decode(body, messages.More).parcels, count)
            else:
                numbers = messages.numbers_in(messages.decode(body, messages.HeldParcels).parcels, count)
                self._true_digests = messages.encode(messages.Digests(b"".join(map(self._true_digest, numbers))))
        if kind in (Message.WANT, Message.MORE, Message.COMPARE, Message.CHECK, Message.VERDICT):
            self._asked = kind
        super().send(kind, body, note=note, tag=tag)

    def post_recv(self, tensor: Tensor, tag: int | None = None, *, lent: bool = False) -> Posted:
        data = self._parcel(self._due.popleft(), tensor.numel(), self._made_up)
        if data:
            tensor.copy_(torch.frombuffer(data, dtype=torch.uint8))
        self._digests.append(digest_of(tensor))
        return super().post_recv(tensor, tag, lent=lent)

    def post_recv_sent(self, digests: int) -> Waits:
        said = self._digests if digests else []
        assert len(said) == digests
        self._digests = []
        intent = Intent.CANCEL if self._bursts == 0 else Intent.GO_ON
        self._bursts = None if self._bursts is None else max(self._bursts - 1, 0)
        record = messages.seal_record(self.transfer, intent, said)
        return super().post_recv(torch.frombuffer(bytearray(record), dtype=torch.uint8))

    def _picked(self, wanted_blocks: WantedBlocks, parcel_bytes: int) -> Parcels | None:
        try:
            return parcels.cut(
                regions_in(Holdings(self._member.manifest), wanted_blocks), parcel_bytes, all_staged=True
            )
        except ValueError:  # What was offered is not what the member has.
            return None

    def _parcel(self, number: int, nbytes: int, fill: Callable[[Extent], bytes]) -> bytearray:
        data = bytearray(nbytes)
        if self._cut is None or number >= len(self._cut):
            return bytearray(self._rng.randbytes(nbytes))
        for extent in self._cut.extents(number):
            data[extent.position : extent.position + extent.high - extent.low] = fill(extent)
        return data[:nbytes].ljust(nbytes, b"\0")

    def _true_digest(self, number: int) -> bytes:
        """Of a parcel as the member has it."""
        assert self.accepted is not None
        if self._cut is None or number >= len(self._cut):
            return bytes(WIDE_BYTES)
        data = self._parcel(number, int(self._cut.nbytes[number]), self._honest)
        return wide_digest_of(torch.frombuffer(data, dtype=torch.uint8))

    def _made_up(self, extent: Extent) -> bytes:
        size = extent.high - extent.low
        if self._filling == "random":
            return self._rng.randbytes(size)
        if self._filling == "honest":
            return self._honest(extent)
        pattern = {"zero": b"\0", "full": b"\xff"}.get(self._filling)
        if pattern is None:
            ints = range(4) if self._filling == "small" else INTS
            pattern = struct.pack("<9Q", *(self._rng.choice(ints) & (1 << 64) - 1 for _ in range(9)))
        return (pattern * (size // len(pattern) + 1))[:size]

    def _honest(self, extent: Extent) -> bytes:
        return self._region(extent)[extent.low : extent.high].ljust(extent.high - extent.low, b"\0")

    def _region(self, extent: Extent) -> bytes:
        """What the member's own storages hold where the box says, as far as there is such a thing."""
        assert self._cut is not None
        regions, windows = self._cut.regions, self._member.windows
        storage, region = int(regions.storage[extent.region]), regions.region(extent.region)
        if storage >= len(windows) or region.end > len(windows[storage]):
            return b""
        strides = (*(s * region.item for s in region.strides), 1)
        window = np.frombuffer(windows[storage], np.uint8)[region.start :]
        return np.lib.stride_tricks.as_strided(window, (*region.sizes, region.item), strides).tobytes()


def context(
    ranks: tuple[int, ...],
    limits: Limits,
    timeout: float = 60.0,
    caller: Caller | None = None,
    report: Report | None = None,
    pool: Pool | None = None,
) -> Context:
    """What a transport makes for each call."""
    return Context(
        ranks=ranks,
        limits=limits,
        device=CPU,
        timeout=timeout,
        caller=caller or Caller(),
        report=report or Report("receive", ranks),
        progress={rank: Progress() for rank in ranks},
        lanes=pool,
    )


def serve(
    channel: Channel,
    offered: source.OfferedState,
    caller: Caller | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
    *,
    transfer: int = 1,
    tag: int = FIRST_TAG,
) -> None:
    """Send to one receiver, as a transport does."""
    channel.transfer, channel.tag = transfer, tag
    report = report or Report("send", (channel.peer,))
    source.SourceEnd(channel, offered, caller or Caller(), progress or Progress(), report).run()


def gather(
    lines: Sequence[Channel],
    request: ReceiveRequest,
    caller: Caller | None = None,
    report: Report | None = None,
    pool: Pool | None = None,
) -> list[Any]:
    """Receive over these lines, as a transport does; the state in a list."""
    ranks = tuple(channel.peer for channel in lines)
    caller = caller or Caller()
    receive = Receive(request, context(ranks, lines[0].limits, lines[0].timeout, caller, report, pool))
    failed: dict[int, BaseException] = {}
    try:
        if len(lines) == 1:
            try:
                receive_from_one.run(lines[0], receive)
            except TransfuseError as error:
                failed[ranks[0]] = error
        else:
            talking = {channel.peer: functools.partial(receive_from_one.run, channel, receive) for channel in lines}
            failed = threads.run(talking, caller, lambda: None, receive.watch, receive.roster.park)
        if not receive.result:
            raise receive.roster.failure or (failed[ranks[0]] if len(lines) == 1 else ReceiveFailed(failed))
    except BaseException as error:
        receive.account_for(error)
        raise
    finally:
        receive.close()
    return receive.result


@contextlib.contextmanager
def patched_accept(*wires: Wire) -> Iterator[None]:
    """Tell the wires what was accepted. No case allocates more than it may, or looks at other processes."""

    def read_offer(*args: Any) -> messages.Offer:
        offer = offers.read_offer(*args)
        with contextlib.suppress(MalformedEntry):
            entry = MemoryEntry.decode(offer.routes.get("memory", b""))
            if 0 < entry.pid < 1 << 31 and entry.pid != os.getpid():
                # Other processes are none of a test's business.
                absent = msgspec.structs.replace(entry, pid=ABSENT_PID).encode()
                offer = msgspec.structs.replace(offer, routes={**offer.routes, "memory": absent})
        return offer

    def accept_offer(*args: Any) -> Accepted:
        accepted = planning.accept(*args)
        memory = accepted.landing.memory
        fresh = sum(map(len, memory.arena.mappings))
        fresh += sum(storage.nbytes() for storage in memory.arena._storages.values())
        fresh += sum(tensor.nbytes for tensor in memory.local_tensors.values())
        assert fresh <= CAP + ALIGNMENT * len(accepted.landing.manifest.storages), f"{fresh} bytes allocated"
        if accepted.landing.cut.total_bytes > MAX_PLANNED:
            raise TooMuch("planned")
        for wire in wires:
            wire.accepted = accepted
        return accepted

    with (
        mock.patch.object(receive_from_one, "read_offer", read_offer),
        mock.patch.object(negotiation, "accept", accept_offer),
    ):
        yield


def interrupted(rng: random.Random, member: Member, target: object | None, bursts: int | None) -> Partial | None:
    """What is left of an honest receive that ended after this number of bursts, or when all had come."""
    wire = Wire(rng, member, [member.body], bursts=bursts)
    wire._filling = "honest"
    request = ReceiveRequest(target=target, options=Options(weights_only_objects=True, same_host=False))
    try:
        with patched_accept(wire), mock.patch.object(Receive, "_build", side_effect=TransfuseError), torch.no_grad():
            gather([wire], request)
    except TransfuseError as error:
        left: Partial | None = error.partial
        return left
    raise AssertionError("it was built all the same")


class Audit:
    """Records what the interpreter does on behalf of a peer: imports, code, files, processes, sockets."""

    _WATCHED = re.compile(
        r"import|exec|compile|open|os\..*|subprocess\..*|shutil\..*|socket\..*|urllib\..*|pty\..*|marshal\..*"
        r"|pickle\.find_class|ctypes\.(dlopen|dlsym|call_function)|code\.__new__|signal\..*|mmap\.__new__|tempfile\..*"
    )
    _installed: list[Audit] = []  # noqa: RUF012 - a hook stays for the life of the process, so there is one

    def __init__(self) -> None:
        self.active = False
        self.events: list[tuple[Any, ...]] = []
        self._zones = tuple(str(path) for path in zoneinfo.TZPATH)
        sys.addaudithook(self._hear)

    @classmethod
    def get(cls) -> Audit:
        if not cls._installed:
            cls._installed.append(Audit())
        return cls._installed[0]

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.active and self._WATCHED.fullmatch(event) and not self._benign(event, args):
            frame, trail = sys._getframe(1), list[str]()
            while frame is not None and len(trail) < 8:
                trail.append(f"{pathlib.PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}")
                frame = frame.f_back  # type: ignore[assignment]
            self.events.append((event, *(str(a)[:200] for a in args), " < ".join(trail)))

    def _benign(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "mmap.__new__":
            return bool(args[0] == -1)  # Memory, and no file.
        if event != "open" or not isinstance(args[0], str) or args[1] not in ("r", "rb"):
            return False
        # A known time zone is a file of the time zone database; torch quotes source lines where it reports errors.
        quoting = args[0].endswith(".py") and sys._getframe(2).f_code is tokenize.open.__code__
        # Which memory of this process can be written, no peer has a say in.
        return quoting or args[0] == memory_maps.MAPS or args[0].startswith(self._zones)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        self.active = True
        try:
            yield
        finally:
            self.active = False
