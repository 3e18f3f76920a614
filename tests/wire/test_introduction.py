"""Two ranks meet over the group: which of them connects, what they do if none can, and that both always agree."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import transfuse
from connections import WAIT, descriptors
from laned import hold_back_the_group
from serving import wait_until
from transfuse._errors import TransfuseError
from transfuse._wire import pool as pools
from transfuse._wire.channel import Channel
from transfuse._wire.handshake import key_of
from transfuse._wire.meeting import Expected, NoPort, dial, own_port
from transfuse._wire.messages import MOST_KNOWN, Message, Place
from transfuse._wire.pool import Pool
from transfuse._wire.stream import Stream
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Outcome, Ranks

pytestmark = pytest.mark.usefixtures("group_route", "small_parcels")

TIMEOUT = 20.0
SOURCE, RECEIVER = 0, 1


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(300_000, generator=generator)
    return {"large": large, "small": [torch.randn(41, generator=generator) for _ in range(20)], "step": seed}


class Wires:
    """What the two ends of each conversation have gone on over, and what they said over the group before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._moves: list[tuple[int, int, bool]] = []
        self.said: list[Message] = []
        move_to, send = Channel.move_to, Channel.send

        def moves(channel: Channel, stream: Stream) -> None:
            with self._lock:
                self._moves.append((channel.home.rank() or 0, stream.number, stream.source_dials))
            move_to(channel, stream)

        def sends(channel: Channel, kind: Message, *arguments: Any, **options: Any) -> None:
            if kind in (Message.MEET, Message.MET, Message.GO):
                with self._lock:
                    self.said.append(kind)
            send(channel, kind, *arguments, **options)

        monkeypatch.setattr(Channel, "move_to", moves)
        monkeypatch.setattr(Channel, "send", sends)

    def take(self) -> tuple[str, int]:
        """The wire of the conversation since the last call, which both ends must agree on, and the stream's number."""
        moves, self._moves = self._moves, []
        if not moves:
            return "group", 0
        assert sorted(rank for rank, _, _ in moves) == [SOURCE, RECEIVER], moves
        assert len({(number, by_source) for _, number, by_source in moves}) == 1, moves
        _, number, by_source = moves[0]
        return "the source dials" if by_source else "the receiver dials", number


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Wires:
    return Wires(monkeypatch)


class Two:
    """A source and a receiver, with a transport each, over one group."""

    def __init__(self, ranks: Ranks, **options: Any) -> None:
        self._ranks = ranks
        self.options: list[dict[str, Any]] = [options, options]
        self.made: list[transfuse.PGTransport] = []

    def make(self, rank: int, **options: Any) -> None:
        assert rank == len(self.made)
        target = state(0) if rank == RECEIVER else None
        call = None if target is None else lambda: target
        chosen = {"lanes": 1} | options
        self.made.append(transfuse.PGTransport(self._ranks.pgs[rank], TIMEOUT, "cpu", call, **chosen))

    def outcomes(self, seed: int) -> list[Outcome[Any]]:
        def work(rank: int, _: Any) -> Any:
            if rank == SOURCE:
                return self.made[SOURCE].send_checkpoint([RECEIVER], state(seed))
            return self.made[RECEIVER].recv_checkpoint(SOURCE)

        return self._ranks.outcomes(work)

    def move(self, seed: int) -> None:
        """A transfer that succeeds. The bytes are those that were sent."""
        sent, got = self.outcomes(seed)
        sent.get()
        assert_exact(state(seed), got.get())

    def pools(self) -> list[Pool]:
        return [transport._lanes for transport in self.made]


@contextlib.contextmanager
def two(*options: dict[str, Any]) -> Iterator[Two]:
    """Options: of both ends, or one for each end."""
    with Ranks(2) as ranks:
        ends = Two(ranks)
        for rank in (SOURCE, RECEIVER):
            ends.make(rank, **(options[min(rank, len(options) - 1)] if options else {}))
        yield ends
        for transport in ends.made:
            transport.close()


class Walled:
    """A meeting at an end that cannot connect to others, cannot listen, or both."""

    def __init__(self, meeting: Any, *, dials: bool, place: Callable[[Any], Place | None] | None) -> None:
        self._meeting, self._dials, self._place = meeting, dials, place
        self.expected: Expected = meeting.expected
        self.tries = 0

    def place(self) -> Place | None:
        found: Place | None = self._meeting.place() if self._place is None else self._place(self._meeting)
        return found

    def dial(self, place: Place | None, number: int, seconds: float) -> socket.socket:
        self.tries += 1
        if not self._dials:
            raise TransfuseError("no route to host")
        sock: socket.socket = self._meeting.dial(place, number, seconds)
        return sock


def wall(
    monkeypatch: pytest.MonkeyPatch,
    *ranks: int,
    dials: bool = True,
    place: Callable[[Any], Place | None] | None = None,
) -> dict[int, Walled]:
    """These ranks get a wall around them. The others' meetings are as they were."""
    original = Pool.meeting
    walls: dict[int, Walled] = {}

    def meeting(pool: Pool, peer: int) -> Any:
        found, rank = original(pool, peer), pool.group.rank()
        if rank not in ranks:
            return found
        return walls.setdefault(rank, Walled(found, dials=dials, place=place))

    monkeypatch.setattr(Pool, "meeting", meeting)
    return walls


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """What was said about the wire since the last call."""
    found = [(record.levelno, record.getMessage()) for record in caplog.records if "over the group" in record.message]
    caplog.clear()
    return found


# ------------------------------------------------------------------------------------------------------- who connects


def test_the_receiver_connects_and_the_next_transfer_uses_the_stream_again(wires: Wires) -> None:
    with two() as ends:
        ends.move(1)
        how, number = wires.take()
        assert how == "the receiver dials"
        assert wires.said == [Message.MEET, Message.MET]
        for seed in (2, 3):
            ends.move(seed)
            assert wires.take() == (how, number)
        assert [len(pool) for pool in ends.pools()] == [1, 1]


def test_the_source_connects_if_the_receiver_cannot(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    walls = wall(monkeypatch, RECEIVER, dials=False)
    with two() as ends:
        ends.move(1)
        how, number = wires.take()
        assert how == "the source dials"
        assert wires.said == [Message.MEET, Message.MET, Message.GO]
        ends.move(2)
        assert wires.take() == (how, number)
        assert walls[RECEIVER].tries == 1
    assert lines(caplog) == []


def test_lanes_are_formed_in_the_direction_that_works(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a later transfer, whose own stream has been a lane before."""
    walls = wall(monkeypatch, RECEIVER, dials=False)
    with two({"lanes": 3}) as ends:
        for seed in (1, 2):
            with monkeypatch.context() as patch:
                hold_back_the_group(patch)
                ends.move(seed)
            how, number = wires.take()
            assert how == "the source dials"
            assert [transport.report.connections > 1 for transport in ends.made if transport.report] == [True, True]
            for pool in ends.pools():
                streams = [stream for some in pool._idle.values() for stream in some.values()]
                assert all(stream.source_dials for stream in streams)
                # Only lanes are left.
                (some,) = pool._idle.values()
                some.pop(number).close()
        assert walls[RECEIVER].tries == 1


def test_the_receiver_connects_if_the_source_cannot(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    walls = wall(monkeypatch, SOURCE, dials=False)
    with two() as ends:
        ends.move(1)
        assert wires.take()[0] == "the receiver dials"
        assert walls[SOURCE].tries == 0


@pytest.mark.parametrize("what", ["refused", "silent", "closes", "another service", "another token", "a name", "none"])
def test_a_place_of_the_source_that_leads_nowhere(wires: Wires, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The receiver finds out within a second, and the source connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if what == "refused":
            listener.close()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock = stack.enter_context(listener.accept()[0])
                    if what == "another service":
                        sock.sendall(b"220 mail ESMTP\r\n" + bytes(200))
                    if what == "closes":
                        sock.close()

        if what in ("closes", "another service"):
            threading.Thread(target=answer, daemon=True).start()
        places = {
            "another token": lambda own: Place(own.place().address, bytes(32)),
            "a name": lambda own: Place(f"localhost:{own.place().address.rpartition(':')[2]}", own.place().token),
            "none": lambda own: None,
        }
        wall(monkeypatch, SOURCE, place=places.get(what, lambda own: Place(address, bytes(32))))
        with two() as ends:
            ends.move(1)
            assert wires.take()[0] == "the source dials"
            ends.move(2)
            assert wires.take()[0] == "the source dials"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("who", [(SOURCE,), (RECEIVER,), (SOURCE, RECEIVER)])
def test_ends_that_cannot_listen(wires: Wires, monkeypatch: pytest.MonkeyPatch, who: tuple[int, ...]) -> None:
    """One of them can still connect to the other."""
    original, none = Pool.meeting, NoPort()
    monkeypatch.setattr(Pool, "meeting", lambda pool, peer: none if pool.group.rank() in who else original(pool, peer))
    with two() as ends:
        for seed in (1, 2):
            ends.move(seed)
            assert (
                wires.take()[0]
                == {
                    (SOURCE,): "the source dials",
                    (RECEIVER,): "the receiver dials",
                    (SOURCE, RECEIVER): "group",
                }[who]
            )
    assert not none.expected._numbers


# ------------------------------------------------------------------------------------------------------- the fallback


def test_neither_end_can_connect(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both go on over the group, say so once, and do not try again for a while. Then they do."""
    caplog.set_level(logging.INFO)
    walls = wall(monkeypatch, SOURCE, RECEIVER, dials=False)
    with two() as ends:
        own_port("127.0.0.1")
        before = descriptors()
        ends.move(1)
        assert wires.take() == ("group", 0)
        assert wires.said == [Message.MEET, Message.MET, Message.GO]
        said = lines(caplog)
        assert [level for level, _ in said] == [logging.WARNING] * 2
        assert {line.split(":")[-2].strip() for _, line in said} == {"rank 0", "rank 1"}
        assert all("in either direction" in line for _, line in said)
        for seed in (2, 3):
            ends.move(seed)
            assert wires.take() == ("group", 0)
        assert [one.tries for one in walls.values()] == [1, 1]
        assert wires.said == [Message.MEET, Message.MET, Message.GO]
        assert lines(caplog) == []
        # Later they try again, and say less.
        monkeypatch.setattr(pools, "POOL_AGAIN_SECONDS", 0.0)
        ends.move(4)
        assert wires.take() == ("group", 0)
        assert [one.tries for one in walls.values()] == [2, 2]
        assert [level for level, _ in lines(caplog)] == [logging.INFO] * 2
        # Nothing is left of all that.
        assert descriptors() == before
        assert not any(one.expected._numbers for one in walls.values())
        for one in walls.values():
            one._dials = True
        ends.move(5)
        assert wires.take()[0] == "the receiver dials"


@pytest.mark.parametrize("forgets", [SOURCE, RECEIVER])
def test_only_one_end_remembers_that_no_connection_could_be_made(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, forgets: int
) -> None:
    walls = wall(monkeypatch, SOURCE, RECEIVER, dials=False)
    with two() as ends:
        ends.move(1)
        ends.pools()[forgets]._failed.clear()
        for one in walls.values():
            one._dials = True
        for seed in (2, 3):
            ends.move(seed)
            assert wires.take() == ("group", 0)
        # The source, which proposes, asks once more, and remembers the answer.
        assert wires.said.count(Message.MEET) == (2 if forgets == SOURCE else 1)
        assert [one.tries for one in walls.values()] == [1, 1]


@pytest.mark.parametrize("by", ["option", "environment"])
@pytest.mark.parametrize("who", [(SOURCE,), (RECEIVER,), (SOURCE, RECEIVER)])
def test_ends_that_may_not_use_streams(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by: str, who: tuple[int, ...]
) -> None:
    """That is somebody's will, not a fault: no warning. The other end follows."""
    caplog.set_level(logging.INFO)
    with Ranks(2) as ranks:
        ends = Two(ranks)
        for rank in (SOURCE, RECEIVER):
            if by == "option":
                ends.make(rank, streams=rank not in who, lanes=3)
            else:
                monkeypatch.setenv("TRANSFUSE_STREAMS", "0" if rank in who else "1")
                ends.make(rank, lanes=3)
        for seed in (1, 2, 3):
            ends.move(seed)
            assert wires.take() == ("group", 0)
            assert [transport.report.connections for transport in ends.made if transport.report] == [1, 1]
        # A source that may not does not ask; one that may asks once, and remembers the answer.
        assert wires.said == ([] if SOURCE in who else [Message.MEET, Message.MET])
        assert [level for level, _ in lines(caplog)] == ([] if SOURCE in who else [logging.INFO])
        assert [len(pool) for pool in ends.pools()] == [0, 0]


# --------------------------------------------------------------------------------------------------- pooled streams


def kept(pool: Pool) -> Stream:
    (some,) = pool._idle.values()
    (stream,) = some.values()
    return stream


@pytest.mark.parametrize("rank", [SOURCE, RECEIVER])
@pytest.mark.parametrize("what", ["closed", "said something"])
def test_a_stream_that_one_end_has_left(wires: Wires, rank: int, what: str) -> None:
    """Between two transfers. It is not used again, and closed at both ends."""
    with two() as ends:
        own_port("127.0.0.1")
        before = descriptors()
        ends.move(1)
        _, number = wires.take()
        if what == "closed":
            kept(ends.pools()[rank]).close()
        else:
            kept(ends.pools()[rank]).write([b"hello?"])
        ends.move(2)
        how, other = wires.take()
        assert how == "the receiver dials"
        assert other != number
        ends.move(3)
        assert wires.take() == (how, other)
        for transport in ends.made:
            transport.close()
        wait_until(lambda: descriptors() == before)


@pytest.mark.parametrize("rank", [SOURCE, RECEIVER])
def test_a_stream_that_only_one_end_still_knows(wires: Wires, rank: int) -> None:
    """It is open, and the other end has forgotten it: both take another one."""
    with two() as ends:
        ends.move(1)
        _, number = wires.take()
        stream = kept(ends.pools()[rank])
        ends.pools()[rank]._idle.clear()
        ends.move(2)
        how, other = wires.take()
        assert (how, other != number) == ("the receiver dials", True)
        ends.move(3)
        assert wires.take() == (how, other)
        stream.close()


@pytest.mark.parametrize("rank", [SOURCE, RECEIVER])
def test_a_transport_that_was_closed(wires: Wires, rank: int) -> None:
    with two() as ends:
        ends.move(1)
        assert wires.take()[0] == "the receiver dials"
        ends.made[rank].close()
        ends.move(2)
        assert wires.take() == ("group", 0)


@pytest.mark.parametrize("rank", [SOURCE, RECEIVER])
def test_a_stream_that_dies_after_both_have_chosen_it(wires: Wires, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Both ends are told by a typed error, and the next transfer is good."""
    with two() as ends:
        ends.move(1)
        wires.take()
        stream = kept(ends.pools()[rank])
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "is_alive", lambda _: True)
            stream.cut()
            sent, got = ends.outcomes(2)
        assert isinstance(sent.error, transfuse.SendFailed)
        assert isinstance(sent.error.causes[RECEIVER], transfuse.PeerLost)
        assert isinstance(got.error, transfuse.PeerLost)
        wires.take()
        ends.move(3)
        assert wires.take()[0] == "the receiver dials"


def test_more_streams_than_a_message_names(wires: Wires) -> None:
    """Many transfers at once have left them."""
    with two() as ends:
        ends.move(1)
        meeting = own_port("127.0.0.1")
        place = meeting.place()
        assert place is not None
        for number in range(1, MOST_KNOWN + 10):
            meeting.expected.add(number)
            mine = dial(place.address, key_of(place.token), number, WAIT)
            theirs = meeting.expected.wait(number, WAIT)
            assert theirs is not None
            for rank, sock in ((SOURCE, theirs), (RECEIVER, mine)):
                stream = Stream(sock, seconds=WAIT)
                stream.number = number
                ends.pools()[rank].keep(1 - rank, stream, is_source=rank == SOURCE)
        wires.take()
        ends.move(2)
        assert wires.take() == ("the receiver dials", 1)


def test_another_pool_after_a_reconfiguration(wires: Wires) -> None:
    """Behind a rank there may be another process: no stream is used again."""
    with two() as ends:
        ends.move(1)
        _, number = wires.take()
        for transport in ends.made:
            transport._lanes = transport._lanes.in_configuration(transport._group)
        ends.move(2)
        how, other = wires.take()
        assert (how, other != number) == ("the receiver dials", True)


# --------------------------------------------------------------------------------------------------- several at once


def test_a_transfer_that_begins_while_lanes_are_formed(wires: Wires, caplog: pytest.LogCaptureFixture) -> None:
    """It forms no lanes of its own then, but it has its stream, and nobody is taken for unreachable."""
    with two() as ends:
        with ends.pools()[SOURCE].forming(RECEIVER), ends.pools()[RECEIVER].forming(SOURCE):
            ends.move(1)
        assert wires.take()[0] == "the receiver dials"
        assert [pool.may_meet(1 - rank) for rank, pool in enumerate(ends.pools())] == [True, True]
    assert lines(caplog) == []


def test_transfers_in_both_directions_at_once() -> None:
    with Ranks(2) as ranks:
        made = [transfuse.PGTransport(pg, TIMEOUT, "cpu", lanes=2) for pg in ranks.pgs]

        def work(rank: int, _: Any) -> None:
            sending = threading.Thread(target=lambda: made[rank].send_checkpoint([1 - rank], state(rank)))
            sending.start()
            assert_exact(state(1 - rank), made[rank].recv_checkpoint(1 - rank))
            sending.join(WAIT)

        for _ in range(3):
            ranks.run(work)
        for transport in made:
            transport.close()


def test_one_source_and_receivers_that_can_and_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 connects, rank 2 is connected to, rank 3 uses the group since it may not use streams."""
    walls = wall(monkeypatch, 2, dials=False)
    with Ranks(4) as ranks:
        made = [transfuse.PGTransport(pg, TIMEOUT, "cpu", streams=rank != 3) for rank, pg in enumerate(ranks.pgs)]

        def work(rank: int, _: Any) -> None:
            if rank == 0:
                made[0].send_checkpoint([1, 2, 3], state(5))
            else:
                assert_exact(state(5), made[rank].recv_checkpoint(0))

        for _ in range(2):
            ranks.run(work)
        assert walls[2].tries == 1
        assert {peer for peer, _ in made[0]._lanes._idle} == {1, 2}
        for transport in made:
            transport.close()
