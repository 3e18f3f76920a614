"""Conversations over a stream, with parcels on an accelerator's backend: what travels where."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import transfuse
from device.group import DeviceRanks, backend_of
from device.simple_moves import bits, causes_of, receive, send, state, zeros
from transfuse._memory.digest import digest_of
from transfuse._session import incoming
from transfuse._wire.channel import Channel
from transfuse._wire.group import Group
from transfuse._wire.operations import Operations
from transfuse._wire.stream import Stream

pytestmark = pytest.mark.usefixtures("device", "small_parcels", "nothing_is_left", "group_route")

KINDS = [
    pytest.param(True, False, id="hybrid"),
    pytest.param(True, True, id="hybrid, bound"),
    pytest.param(False, False, id="alone"),
    pytest.param(False, True, id="alone, bound"),
]
every_kind = pytest.mark.parametrize(("cpu", "eager"), KINDS)
NBYTES = sum(tensor.nbytes for tensor in state("cpu").values())
SECONDS = 10.0


class Traffic:
    """The bytes that all ranks send: over streams, and over groups by the kind of device, before and after moving."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        post_send, write = Operations.post_send, Channel.write

        def posts(channel: Channel, tensor: torch.Tensor, tag: int | None = None) -> Any:
            moved = "then" if channel.stream is not None else "first"
            self._count(f"{tensor.device.type}, {moved}", tensor.nbytes)
            return post_send(channel, tensor, tag)

        def writes(channel: Channel, *parts: Any) -> None:
            sizes = [part[1] if isinstance(part, tuple) else len(part) for part in parts]
            self._count("stream", sum(sizes))
            write(channel, *parts)

        monkeypatch.setattr(Operations, "post_send", posts)
        monkeypatch.setattr(Channel, "write", writes)

    def _count(self, what: str, nbytes: int) -> None:
        with self._lock:
            self.bytes[what] += nbytes


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    return Traffic(monkeypatch)


def move(rank: int, pg: Any, **options: Any) -> Any:
    if rank == 0:
        return send(pg, 1, state(), SECONDS, **options)
    return bits(receive(pg, 0, SECONDS, zeros(state("cpu")), **options))


def exact() -> dict[str, bytes]:
    return bits(state("cpu"))


@every_kind
@pytest.mark.usefixtures("needs_streams")
def test_only_parcels_stay_on_the_group(cpu: bool, eager: bool, traffic: Traffic) -> None:
    with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
        assert ranks.run(lambda rank, pg: move(rank, pg, verify=True))[1] == exact()
    where = traffic.bytes
    assert where["phantom, then"] == NBYTES
    # Records with digests, the offer and the rest.
    assert 0 < where["stream"] < NBYTES // 100
    assert where["cpu, then"] == 0
    # The two have met over the group.
    assert 0 < where["cpu, first" if cpu else "phantom, first"] < 40_000
    assert where["phantom, first" if cpu else "cpu, first"] == 0


@every_kind
def test_without_streams_all_is_on_the_group(cpu: bool, eager: bool, traffic: Traffic) -> None:
    with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
        assert ranks.run(lambda rank, pg: move(rank, pg, streams=False))[1] == exact()
    where = traffic.bytes
    assert where["phantom, first"] >= NBYTES
    assert (where["phantom, first"] == NBYTES) == cpu
    assert where["stream"] == where["phantom, then"] == where["cpu, then"] == 0


class Stuck:
    """An operation that a lost peer never answers, until the test is over."""

    is_over = False

    def is_complete(self) -> bool:
        return self.is_over


@contextmanager
def stuck(pg: Any, rank: int) -> Iterator[None]:
    group, operation = Group(pg, torch.device("phantom", rank)), Stuck()
    group.leave_stuck(1 - rank, [operation])
    try:
        yield
    finally:
        operation.is_over = True
        assert not group.is_stuck(1 - rank)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.usefixtures("needs_streams")
def test_parcels_that_cannot_go_on_the_accelerator_go_over_the_stream(who: int, eager: bool, traffic: Traffic) -> None:
    with DeviceRanks(2, eager=eager) as ranks:
        with stuck(ranks.pgs[who], who):
            assert ranks.run(move)[1] == exact()
        assert traffic.bytes["stream"] > NBYTES
        assert traffic.bytes["phantom, then"] == 0
        # When nothing blocks them any more, they are on the accelerator again.
        assert ranks.run(move)[1] == exact()
        assert traffic.bytes["phantom, then"] == NBYTES


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.usefixtures("needs_streams")
def test_parcels_change_over_in_the_middle(who: int, traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first parcel seems to be damaged. When the receiver asks for it again, the accelerator is blocked."""
    held = list[Any]()
    with DeviceRanks(2) as ranks:

        def lies(data: Any) -> int:
            if held:
                return digest_of(data)
            held.append(stuck(ranks.pgs[who], who))
            held[0].__enter__()
            return digest_of(data) + 1

        monkeypatch.setattr(incoming, "digest_of", lies)
        try:
            assert ranks.run(lambda rank, pg: move(rank, pg, verify=True))[1] == exact()
        finally:
            held[0].__exit__(None, None, None)
    assert traffic.bytes["phantom, then"] == NBYTES
    assert 256 << 10 <= traffic.bytes["stream"] < NBYTES // 2


@every_kind
def test_a_target_that_does_not_fit_is_told_to_both_ends(cpu: bool, eager: bool) -> None:
    def wrong(rank: int, pg: Any) -> Any:
        if rank == 0:
            return send(pg, 1, state(), SECONDS)
        return receive(pg, 0, SECONDS, {**zeros(state("cpu")), "w0": torch.zeros(3, device="phantom")})

    with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
        sent, received = ranks.outcomes(wrong)
        assert isinstance(received.error, transfuse.TargetMismatch)
        refused = causes_of(sent.error)[1]
        assert isinstance(refused, transfuse.PeerRefused)
        assert refused.kind == "TargetMismatch"
        assert ranks.run(move)[1] == exact()


@every_kind
@pytest.mark.usefixtures("needs_streams")
def test_a_stream_that_breaks_is_noticed_at_once(cpu: bool, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the source had been killed while the receiver waits for a parcel on the accelerator: no timeout passes."""
    streams: list[Stream] = []
    move_to = Channel.move_to

    def notes(channel: Channel, stream: Stream) -> None:
        if channel.is_source:
            streams.append(stream)
        move_to(channel, stream)

    monkeypatch.setattr(Channel, "move_to", notes)

    def breaks(rank: int, pg: Any) -> Any:
        def show(progress: dict[int, transfuse.Progress]) -> None:
            if any(one.bytes for one in progress.values()):
                backend_of(pg).freeze()
                streams[0].cut()

        if rank == 0:
            return send(pg, 1, state(), 60.0, progress=show, max_bytes_per_second=12.0 * (1 << 20))
        return receive(pg, 0, 60.0)

    with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
        sent, received = ranks.outcomes(breaks, deadline=30.0)
        assert isinstance(causes_of(sent.error)[1], transfuse.PeerLost)
        assert isinstance(causes_of(received.error)[0], transfuse.PeerLost)
        for pg in ranks.pgs:
            backend_of(pg).thaw()
            assert not backend_of(pg).process_would_end


# Without gloo, in a group that is bound to a device, a source that has not met by then cannot meet any more.
@pytest.mark.parametrize(("cpu", "eager"), KINDS[:3])
@pytest.mark.usefixtures("needs_streams")
def test_a_source_whose_accelerator_freezes_midway_is_replaced_by_the_other(
    cpu: bool, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen_midway = threading.Event()
    posted: Counter[int | None] = Counter()
    post_send = Operations.post_send

    def posts(channel: Channel, tensor: torch.Tensor, tag: int | None = None) -> Any:
        if channel.stream is not None:
            rank = channel.group.rank()
            posted[rank] += 1
            if rank == 0 and posted[rank] == 2:
                backend_of(ranks.pgs[0]).freeze()
                frozen_midway.set()
            elif rank == 1 and posted[rank] == 1:
                frozen_midway.wait(2.0)  # Otherwise it brings everything before the other one has sent twice.
        return post_send(channel, tensor, tag)

    monkeypatch.setattr(Operations, "post_send", posts)

    def work(rank: int, pg: Any) -> Any:
        if rank == 2:
            return bits(receive(pg, [0, 1], 6.0, zeros(state("cpu"))))
        return send(pg, 2, state(), 6.0)

    with DeviceRanks(3, cpu=cpu, eager=eager) as ranks:
        frozen, other, received = ranks.outcomes(work, deadline=60.0)
        assert received.get() == exact()
        other.get()
        assert causes_of(frozen.error).keys() == {2}
        backend_of(ranks.pgs[0]).thaw()
