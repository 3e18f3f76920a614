"""Errors midway: deaths, signs of life, cancels, and what was kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import hostile
import transfuse
from midway import SHORT, DamagedAnswer, big_state, cancel_at, die_after_the_last_burst, move_slowly
from moves import CPU, TIMEOUT, Pair, pair
from transfuse._limits import Limits
from transfuse._memory import packing
from transfuse._session import negotiation, planning, source
from transfuse._session.outgoing import Outgoing
from transfuse._session.receive_from_all import Receive
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.group import FIRST_TAG, Group
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Fleet, Ranks
from wires import is_of_a_transfer

pytestmark = pytest.mark.usefixtures("group_route")


@pytest.fixture
def two() -> Iterator[Pair]:
    with pair() as ranks:
        yield ranks


def test_a_source_that_dies_midway_leaves_an_error_that_lists_the_torn_leaves() -> None:
    with Fleet(2) as fleet:
        fleet.start(move_slowly, 250)
        fleet.wait_for(1, "moving")
        fleet.kill(0)
        died, received = fleet.outcomes(deadline=30)
    assert died.error is not None
    name, text, touched, torn = received.get()
    assert name in ("PeerLost", "PeerTimeout")
    assert "rank 0" in text
    assert touched <= torn
    assert 0 < len(torn) < 250
    assert len(torn - touched) <= 8, "beyond what was touched, only what was posted ahead"


def test_a_source_that_freezes_is_given_up_within_the_timeout() -> None:
    with Fleet(2) as fleet:
        fleet.start(move_slowly, 250)
        fleet.wait_for(1, "moving")
        fleet.freeze(0)
        started = time.monotonic()
        (received,) = fleet.outcomes(deadline=30, ranks=[1])
        assert time.monotonic() - started < 12
    name, text, touched, torn = received.get()
    assert name == "PeerTimeout"
    assert "timed out" in text
    assert touched <= torn


@pytest.mark.parametrize("when", ["before it agrees", "among its parcels"])
@pytest.mark.usefixtures("small_parcels")
def test_a_silent_source_of_two_is_left_before_the_timeout(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At half of it, on both wires: the connection's own wait would end after all of it."""
    left = threading.Event()
    agree, await_turn = source.SourceEnd._agree, Outgoing._await_turn

    def agrees(serving: Any, *args: Any) -> None:
        if serving._channel.home.rank() == 0 and when == "before it agrees":
            left.wait(30)
        agree(serving, *args)

    def awaits(outgoing: Any, numbers: Any) -> None:
        if outgoing._channel.home.rank() == 0 and outgoing.parcels:
            left.wait(30)
        await_turn(outgoing, numbers)

    monkeypatch.setattr(source.SourceEnd, "_agree", agrees)
    monkeypatch.setattr(Outgoing, "_await_turn", awaits)
    state = {"w": torch.randn(1 << 20)}

    def work(rank: int, pg: Any) -> Any:
        mover = transfuse.PGTransport(pg, timedelta(seconds=2), CPU, lanes=1)
        if rank < 2:
            return mover.send_checkpoint([2], state)
        try:
            assert_exact(state, mover.recv_checkpoint([0, 1]))
        finally:
            left.set()
        assert mover.report is not None
        return mover.report.failed

    with Ranks(3) as ranks:
        silent, other, received = ranks.outcomes(work)
    other.get()
    assert isinstance(silent.error, transfuse.SendFailed)
    assert isinstance(silent.error.causes[2], transfuse.PeerRefused)
    assert re.search(r"PeerTimeout: .* no progress for 1\.\d s", received.get()[0]), received.get()


def test_a_receiver_that_dies_does_not_disturb_the_others() -> None:
    with Fleet(4) as fleet:
        fleet.start(move_slowly, 60)
        fleet.wait_for(2, "moving")
        fleet.kill(2)
        outcomes = fleet.outcomes(deadline=60)
    assert isinstance(outcomes[0].error, transfuse.SendFailed)
    assert set(outcomes[0].error.causes) == {2}
    assert outcomes[1].get() is True
    assert outcomes[3].get() is True


def test_a_receiver_that_plans_for_longer_than_the_timeout_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source's timeout is 2.5 s; the receiver thinks for 6."""
    accept = planning.accept

    def slowly(*args: Any) -> Any:
        time.sleep(6)
        return accept(*args)

    monkeypatch.setattr(negotiation, "accept", slowly)
    with pair() as two:
        state = {"w": torch.randn(1000)}
        assert_exact(state, two.move(state, timeout=timedelta(seconds=2.5)))


def test_signs_of_life_keep_to_the_shorter_of_two_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source waits for 1 s, the receiver would for 20; it thinks for 3."""
    accept = planning.accept

    def slowly(*args: Any) -> Any:
        time.sleep(6)
        return accept(*args)

    def work(rank: int, pg: Any) -> Any:
        transport = transfuse.PGTransport(pg, timedelta(seconds=1 if rank == 0 else 20), CPU)
        return transport.send_checkpoint([1], {"n": 1}) if rank == 0 else transport.recv_checkpoint(0)

    monkeypatch.setattr(negotiation, "accept", slowly)
    with Ranks(2) as ranks:
        assert ranks.run(work)[1] == {"n": 1}


@pytest.mark.parametrize("who", ["source", "receiver", "both"])
@pytest.mark.parametrize("tagged", [True, False])
def test_a_cancel_at_any_burst_ends_both_and_leaves_the_group_usable(who: str, tagged: bool) -> None:
    """States of one to six bursts, three under way, cancelled at every tick by either end or both."""
    with Ranks(2) as ranks, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFUSE_BURST_BYTES", str(1 << 16))
        patch.setenv("TRANSFUSE_PARCEL_BYTES", str(1 << 16))
        for bursts in range(1, 7):
            state = {"w": torch.full((bursts << 14,), 1.0)}
            for tick in range(1, bursts + 1):
                outcomes = ranks.outcomes(cancel_at, [state] * 2, [tick] * 2, [who] * 2, [tagged] * 2)
                for outcome in outcomes:
                    text = f"{bursts} bursts, cancelled at {tick}: {outcome.error!r}"
                    assert outcome.error is None or "stop" in str(outcome.error), text
                again = ranks.run(cancel_at, [state] * 2, [99] * 2, [who] * 2, [tagged] * 2)
                assert_exact(state, again[1])


def test_a_receiver_that_holds_everything_succeeds_though_its_source_is_gone() -> None:
    with Fleet(2) as fleet:
        fleet.start(die_after_the_last_burst)
        died, received = fleet.outcomes(deadline=40)
    assert died.error is not None
    assert received.get() is True


def test_a_receiver_that_builds_for_long_shows_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = Receive._build

    def slowly(*args: Any) -> Any:
        time.sleep(6)
        return build(*args)

    monkeypatch.setattr(Receive, "_build", slowly)
    with pair() as two:
        state = {"w": torch.randn(1000)}
        assert_exact(state, two.move(state, timeout=timedelta(seconds=2.5)))


def test_a_call_that_was_interrupted_touches_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gives up while the receiver plans: no byte may land after the call has raised."""
    accept = planning.accept

    def slowly(*args: Any) -> Any:
        time.sleep(2.5)
        return accept(*args)

    monkeypatch.setattr(negotiation, "accept", slowly)
    own = torch.zeros(1000)

    def interrupt(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].phase == "planning":
            raise RuntimeError("stop")

    with pair() as two:
        sent, received = two.errors({"w": torch.ones(1000)}, {"w": own}, progress=interrupt)
        time.sleep(2.5)
        assert not own.any()
    assert "stop" in str(received)
    assert "stop" in str(sent)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("verify", [None, False])
def test_what_was_kept_counts_only_once_a_source_has_confirmed_it(two: Pair, verify: bool | None, same: bool) -> None:
    """The source has gone on meanwhile, or not, without saying a step; it compares also if it verifies nothing."""
    own = {name: torch.full((1 << 20,), -1.0) for name in big_state()}

    def interrupt(progress: dict[int, transfuse.Progress]) -> None:
        if progress[1].bytes > 0:
            raise RuntimeError("stop here")

    _, error = two.errors(big_state(), own, source={"progress": interrupt})
    assert isinstance(error, transfuse.PeerRefused)
    assert error.partial is not None
    later = {name: tensor + (0 if same else 1000) for name, tensor in big_state().items()}

    def work(rank: int, pg: Any) -> Any:
        mover = transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: own, verify=verify if rank == 0 else None)
        if rank == 0:
            return mover.send_checkpoint([1], later)
        assert_exact(later, mover.recv_checkpoint(0, resume=error.partial), in_place=True)
        assert mover.report is not None
        return mover.report.kept_bytes

    kept = two.ranks.run(work)[1]
    assert kept == (error.partial.received_bytes if same else 0)


@pytest.mark.parametrize("silent", [True, False])
def test_what_was_kept_is_no_state_if_its_source_leaves_before_it_has_compared_it(two: Pair, silent: bool) -> None:
    state, before = {"w": torch.ones(1000)}, set(threading.enumerate())

    def build(*_: object) -> None:
        raise transfuse.StateError("cannot be built")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receive, "_build", build)
        _, error = two.errors(state, timeout=SHORT)
    assert isinstance(error, transfuse.StateError)
    assert error.partial.received_bytes == 4000

    def leave(*_: object) -> None:
        time.sleep(2 * SHORT.total_seconds() if silent else 0)
        raise transfuse.StateError("no more")

    def work(rank: int, pg: Any) -> Any:
        mover = transfuse.PGTransport(pg, SHORT, CPU)
        return mover.send_checkpoint([1], state) if rank == 0 else mover.recv_checkpoint(0, resume=error.partial)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.SourceEnd, "_compare", leave)
        received = two.ranks.outcomes(work)[1].error
    if silent:
        assert isinstance(received, transfuse.PeerTimeout)
        assert received.seconds > 0.9 * SHORT.total_seconds()
    else:
        assert isinstance(received, transfuse.PeerRefused)
    assert not [thread for thread in set(threading.enumerate()) - before if is_of_a_transfer(thread)]


def test_an_interrupted_receive_still_says_what_it_tore(two: Pair) -> None:
    target = {name: torch.full((1 << 20,), -1.0) for name in big_state()}

    def interrupt(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes > 0:
            raise KeyboardInterrupt

    _, received = two.errors(big_state(), target, progress=interrupt)
    assert isinstance(received, KeyboardInterrupt)
    assert "['w00']" in "".join(received.__notes__)


def test_a_process_that_ends_after_a_failed_send_exits_cleanly(tmp_path: Path) -> None:
    """No thread of a call may outlive it and take the group down while the interpreter ends."""
    script = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist, transfuse

def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    if rank == 1:
        signal.pause()
    try:
        timeout = datetime.timedelta(seconds=0.5)
        transfuse.PGTransport(dist.group.WORLD, timeout, torch.device("cpu")).send_checkpoint([1], {"a": 1})
    except transfuse.SendFailed:
        sys.exit(7)

for attempt in range(3):
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            work(rank, f"{sys.argv[1]}{attempt}")
    _, status = os.waitpid(pids[0], 0)
    os.kill(pids[1], signal.SIGKILL)
    os.waitpid(pids[1], 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
"""
    # One process imports torch, and its forks end as any interpreter does.
    words = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "store")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("which", [0, 2, 4])
def test_a_parcel_that_cannot_be_packed_never_passes_for_one_that_could(
    which: int, two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the last burst: five bursts, packing fails in one of them."""
    calls: list[int] = []
    pack = packing.pack

    def fail(memory: Any, *args: Any) -> Any:
        if isinstance(memory, source._SourceMemory):
            calls.append(1)
            if len(calls) == which + 1:
                raise RuntimeError("out of memory")
        return pack(memory, *args)

    monkeypatch.setattr(packing, "pack", fail)
    monkeypatch.setenv("TRANSFUSE_BURST_BYTES", str(1 << 16))
    monkeypatch.setenv("TRANSFUSE_PARCEL_BYTES", str(1 << 16))
    sent, received = two.errors({"w": torch.ones(10 << 14)[::2]})
    assert "out of memory" in str(sent)
    assert "out of memory" in str(received)
    assert two.move({"still": "usable"}) == {"still": "usable"}


def test_a_receiver_that_talks_nonsense_does_not_spoil_the_digests_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_PARCEL_BYTES", str(256 << 10))
    monkeypatch.setenv("TRANSFUSE_BURST_BYTES", str(1 << 20))
    state = {"w": torch.randn(2 << 20)}

    def work(rank: int, pg: Any) -> Any:
        mover = transfuse.PGTransport(DamagedAnswer(pg) if rank == 1 else pg, TIMEOUT, CPU, relay=False)
        if rank == 0:
            return mover.send_checkpoint([1, 2], state)
        time.sleep(1.0 if rank == 2 else 0.0)
        assert_exact(state, mover.recv_checkpoint(0))
        return mover.report

    with Ranks(3) as ranks:
        outcomes = ranks.outcomes(work)
    assert isinstance(outcomes[0].error, transfuse.SendFailed)
    assert set(outcomes[0].error.causes) == {1}
    assert outcomes[2].get().repaired == 0


def test_signs_of_life_with_progress_are_listened_to_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of signs of life without bytes, only a few in a row."""
    monkeypatch.setenv("TRANSFUSE_MAX_WORKING_RECORDS", "2")
    monkeypatch.setenv("TRANSFUSE_SAME_HOST", "1")
    state = {"w": torch.randn(12 << 20)}
    with pair() as two:
        options = {"max_bytes_per_second": 6e6}
        assert_exact(state, two.move(state, source=options, timeout=timedelta(seconds=2.5)))


@pytest.mark.parametrize(("notes", "total"), [([0, 0], 1 << 20), ([1, 2], 1 << 20), ([1 << 40, 1 << 41], 0)])
def test_a_peer_that_only_says_it_is_working_is_given_up(notes: list[int], total: int) -> None:
    """However its count of bytes rises: a byte at a time is no progress, and more than there are is none either."""
    limits = Limits(max_working_records=2)
    signs = b"".join(hostile.spoken(messages.Message.WORKING, b"", 1, note) for note in notes)
    channel = Channel(Group(hostile.Stream(signs), CPU), 3, 1.0, limits)
    channel.transfer, channel.tag, channel.most_bytes = 1, FIRST_TAG, total
    with pytest.raises(transfuse.ProtocolError, match="signs of life without a message"):
        channel.expect(messages.Message.WANT)


@pytest.mark.parametrize("staging", [1 << 20, 16 << 20])
def test_a_small_staging_budget_is_kept_to(monkeypatch: pytest.MonkeyPatch, staging: int) -> None:
    monkeypatch.setenv("TRANSFUSE_STAGING_BYTES", str(staging))
    state = {"w": torch.randn(8 << 20), "s": torch.randn(1000, 1000)[:, ::2]}
    with pair() as two:
        assert_exact(state, two.move(state))
