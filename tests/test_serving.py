"""Serving and fetching: what arrives, who is kept out, who holds up whom, and how it ends.

Readers, servers and strangers are real: threads where that is enough, processes where they are frozen or killed.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import hmac
import logging
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from benchmarks.hosts import Hosts, Unavailable, settle
from torch.distributed.tensor import Shard

import transfuse
from shards import mesh_of, shard
from transfuse.limits import Limits
from transfuse.remote import server as serving
from transfuse.remote.handshake import (
    HELLO_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    PROOF_BYTES,
    VERSION,
    Call,
    Door,
    Ready,
    key_of,
    knock,
    split_address,
)
from transfuse.remote.pair_group import READER, Private, Several
from transfuse.session.source import Cargo
from transfuse.testing.exact import differences
from transfuse.testing.ranks import Fleet, announce
from transfuse.wire.channel import Line
from transfuse.wire.group import OFFER_TAG, Group
from transfuse.wire.messages import Message

TOKEN = "correct horse battery staple"
#: Long enough for everything that should succeed, on a busy machine.
LONG = timedelta(seconds=20)
#: Of servers that give up somebody.
SHORT = timedelta(seconds=1.5)
DEADLINE = 60.0
CPU = torch.device("cpu")


def some_state(count: int = 4, numel: int = 5000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(count)
    weights = {f"w{i}": torch.randn(numel, generator=generator) for i in range(count)}
    return {"model": weights, "tied": weights["w0"], "part": weights["w1"][10:20], "lr": 0.1, "names": ("a", None, 3)}


def plain_state() -> dict[str, Any]:
    return {"w": torch.arange(1000.0)}


def zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    weights = {name: torch.zeros_like(weight) for name, weight in state["model"].items()}
    return {"model": weights, "tied": weights["w0"], "part": weights["w1"][10:20], "lr": 0.0, "names": ("b", 1, 2)}


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as threads:
        yield threads


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.01)


class Halt:
    """A ``map_path=`` that stops a fetch which has heard the offer, until it may go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, path: str) -> str:
        self.reached.set()
        assert self.go_on.wait(DEADLINE)
        return path

    def fetch(self, address: str) -> Any:
        return transfuse.fetch(address, {"w": torch.zeros(1000)}, timeout=LONG, map_path=self)


# What arrives


@pytest.mark.usefixtures("either_route")
def test_what_arrives_is_what_is_there() -> None:
    state = some_state()
    reports: list[transfuse.Report] = []
    with transfuse.serve(state, token=TOKEN, step=7) as server:
        fresh = transfuse.fetch(server.address, token=TOKEN, step=7, on_report=reports.append)
        assert not differences(state, fresh)
        target = zeros_like(state)
        weights = dict(target["model"])
        landed = transfuse.fetch(server.address, target, token=TOKEN)
        assert not differences(state, landed)
        assert all(landed["model"][name] is weight for name, weight in weights.items())
        landed = transfuse.fetch(server.address, lambda: target, token=TOKEN, delta=True, on_report=reports.append)
        assert not differences(state, landed)
    assert [report.step for report in reports] == [7, 7]
    assert reports[0].bytes > 0
    assert reports[1].kept_bytes > 0


def test_another_step_is_refused() -> None:
    with transfuse.serve(some_state(), step=lambda: 7) as server:
        with pytest.raises(transfuse.StepMismatch, match="7"):
            transfuse.fetch(server.address, step=8)
        assert transfuse.peek(server.address).step == 7


def test_several_readers_at_once(executor: ThreadPoolExecutor) -> None:
    """More of them than there are places."""
    state = some_state()
    reports: list[transfuse.Report] = []
    with transfuse.serve(state, max_readers=3, on_report=reports.append) as server:
        fetches = [executor.submit(transfuse.fetch, server.address, same_host=bool(i % 2)) for i in range(9)]
        for fetch in fetches:
            assert not differences(state, fetch.result(DEADLINE))
    assert [report.direction for report in reports] == ["send"] * 9
    assert {report.route for report in reports} == {"group", "memory"}


def test_who_finds_no_place_waits_for_longer_than_its_timeout(executor: ThreadPoolExecutor) -> None:
    state, halt = plain_state(), Halt()
    with transfuse.serve(state, max_readers=1, timeout=LONG) as server:
        first = executor.submit(halt.fetch, server.address)
        assert halt.reached.wait(DEADLINE)
        second = executor.submit(transfuse.fetch, server.address, timeout=timedelta(seconds=1))
        with pytest.raises(TimeoutError):
            second.result(2)
        halt.go_on.set()
        for fetch in (first, second):
            assert not differences(state, fetch.result(DEADLINE))


def test_peek_moves_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    state = some_state()
    reports: list[transfuse.Report] = []
    with transfuse.serve(state, step=3, token=TOKEN, on_report=reports.append) as server:
        seen = transfuse.peek(server.address, token=TOKEN)
        assert seen.step == 3
        assert len(seen.manifest) == 4 + 2 + 1 + 3
        # A description that is sent only to who asks for it.
        monkeypatch.setenv("TRANSFUSE_BRIEF_BYTES", "100")
        assert transfuse.peek(server.address, token=TOKEN).manifest.encode().digest() == seen.manifest.encode().digest()
    assert [report.bytes for report in reports] == [0, 0]
    assert [report.error for report in reports] == [None, None]


@pytest.mark.soak
def test_peek_at_many_tensors() -> None:
    state = {f"layer.{i}.weight": torch.zeros(1) for i in range(50_000)}
    with transfuse.serve(state) as server:
        assert len(transfuse.peek(server.address).manifest) == 50_000


# Several servers


def test_replicas_of_which_some_are_not_there(caplog: pytest.LogCaptureFixture) -> None:
    state = some_state()
    with (
        socket.create_server(("127.0.0.1", 0)) as nobody,
        transfuse.serve(state, token=TOKEN) as one,
        transfuse.serve(state, token=TOKEN) as other,
        transfuse.serve(state, token="another") as stranger,
    ):
        dead = f"127.0.0.1:{nobody.getsockname()[1]}"
        nobody.close()
        reports: list[transfuse.Report] = []
        addresses = [dead, one.address, stranger.address, other.address]
        fetched = transfuse.fetch(addresses, token=TOKEN, on_report=reports.append)
        assert not differences(state, fetched)
        assert reports[0].peers == (1, 3), "ranks are numbers of addresses"
        for address in (dead, stranger.address):
            assert f"going on without {address}" in caplog.text
        with pytest.raises(transfuse.ReceiveFailed) as raised:
            transfuse.fetch([dead, stranger.address], token=TOKEN)
        causes = raised.value.causes
        assert isinstance(causes[0], transfuse.PeerLost)
        assert isinstance(causes[1], transfuse.PeerRefused)
        assert dead in str(raised.value)
        assert stranger.address in str(raised.value)


def test_shards_of_one_tensor(executor: ThreadPoolExecutor) -> None:
    whole = torch.randn(40, 6)
    shards = [{"w": shard(whole, [0, 1], rank, Shard(0)), "lr": 0.1} for rank in range(2)]
    with transfuse.serve(shards[0]) as one, transfuse.serve(shards[1]) as other:
        target = {"w": torch.zeros(40, 6), "lr": 0.0}
        fetched = transfuse.fetch([one.address, other.address], target)
        assert not differences({"w": whole, "lr": 0.1}, fetched)
        # Sharded in another way, by one reader of three.
        mine: dict[str, Any] = {"w": shard(torch.zeros(40, 6), [0, 1, 2], 1, Shard(1)), "lr": 0.0}
        transfuse.fetch([one.address, other.address], mine)
        assert torch.equal(mine["w"].to_local(), whole[:, 2:4])
        with pytest.raises(transfuse.NotCovered):
            transfuse.fetch(one.address, {"w": torch.zeros(40, 6), "lr": 0.0})
        fresh = transfuse.fetch(one.address, mesh=mesh_of([0, 1], 0))
        assert not differences(shards[0], fresh)


def test_a_stage_whose_server_is_not_there_does_not_leave_its_targets_as_they_were() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as nobody,
        transfuse.serve({"a": torch.ones(5)}, token=TOKEN) as one,
        transfuse.serve({"b": torch.ones(6)}, token=TOKEN) as other,
    ):
        dead = f"127.0.0.1:{nobody.getsockname()[1]}"
        nobody.close()
        target = {"a": torch.zeros(5), "b": torch.zeros(6)}
        with pytest.raises(transfuse.NotCovered) as raised:
            transfuse.fetch([one.address, dead], target, token=TOKEN)
        assert f"['b']: {dead} may hold it, but is not there" in str(raised.value)
        assert not target["a"].any(), "nothing was written"
        transfuse.fetch([one.address, other.address], target, token=TOKEN)
        assert bool(target["a"].all() and target["b"].all())
        # Where nobody is absent, a tensor that no server has keeps its values: strict= is for those.
        more = {"a": torch.zeros(5), "mine": torch.full((3,), 7.0)}
        transfuse.fetch(one.address, more, token=TOKEN)
        assert more["mine"].eq(7).all()


def test_servers_at_different_steps_are_told_apart() -> None:
    states = [{"w": torch.full((1000,), float(step))} for step in (5, 6)]
    with (
        transfuse.serve(states[0], step=5) as one,
        transfuse.serve(states[1], step=6) as other,
        pytest.raises(transfuse.TransfuseError) as raised,
    ):
        transfuse.fetch([one.address, other.address])
    text = str(raised.value) + "".join(raised.value.__notes__)
    assert "5" in text
    assert "6" in text
    assert one.address in text


def serve_slowly(rank: int, seconds: float, rate: float | None) -> None:
    """In a process: serve until the process ends."""
    torch.set_num_threads(1)
    server = transfuse.serve(
        big_state(), token=TOKEN, timeout=timedelta(seconds=seconds), max_bytes_per_second=rate, same_host=False
    )
    announce(server.address)
    time.sleep(10 * DEADLINE)


def big_state() -> dict[str, Any]:
    return some_state(count=16, numel=1 << 18)


@contextlib.contextmanager
def servers(count: int, seconds: float = 20.0, rate: float | None = 16e6) -> Iterator[tuple[Fleet, list[str]]]:
    with Fleet(count) as fleet:
        fleet.start(serve_slowly, seconds, rate)
        for rank in range(count):
            fleet._until(lambda rank=rank: bool(fleet.workers[rank].reached), DEADLINE)  # type: ignore[misc]
        yield fleet, [next(iter(worker.reached)) for worker in fleet.workers]


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_server_that_is_lost_midway_costs_nothing_but_its_part(fault: str) -> None:
    with servers(3) as (fleet, addresses):
        done: list[bool] = []

        def strike(progress: dict[int, transfuse.Progress]) -> None:
            if not done and progress[1].bytes:
                getattr(fleet, fault)(1)
                done.append(True)

        reports: list[transfuse.Report] = []
        timeout = timedelta(seconds=3)
        fetched = transfuse.fetch(
            addresses, token=TOKEN, timeout=timeout, same_host=False, progress=strike, on_report=reports.append
        )
        assert done
        assert not differences(big_state(), fetched)


def test_a_frozen_server_does_not_cost_the_others_that_are_there(caplog: pytest.LogCaptureFixture) -> None:
    """It takes a connection and never says a word. Meanwhile the others wait, for less than their patience."""
    with servers(2, seconds=3.0, rate=None) as (fleet, addresses):
        fleet.freeze(0)
        fetched = transfuse.fetch(addresses, token=TOKEN, timeout=timedelta(seconds=3))
        assert not differences(big_state(), fetched)
        assert f"going on without {addresses[0]}" in caplog.text
        with pytest.raises(transfuse.PeerTimeout, match=addresses[0]):
            transfuse.fetch(addresses[0], token=TOKEN, timeout=timedelta(seconds=1))


def test_a_fetch_goes_on_elsewhere_from_what_it_has() -> None:
    with servers(2) as (fleet, addresses):
        done: list[bool] = []

        def strike(progress: dict[int, transfuse.Progress]) -> None:
            if not done and progress[0].bytes > 1 << 20:
                fleet.kill(0)
                done.append(True)

        target = zeros_like(big_state())
        with pytest.raises(transfuse.PeerLost) as raised:
            transfuse.fetch(addresses[0], target, token=TOKEN, timeout=LONG, same_host=False, progress=strike)
        assert raised.value.received
        assert raised.value.torn
        reports: list[transfuse.Report] = []
        fetched = transfuse.fetch(
            addresses[1], target, token=TOKEN, timeout=LONG, resume=raised.value.partial, on_report=reports.append
        )
        assert not differences(big_state(), fetched)
        assert 0 < reports[0].bytes < 16 << 20


# The lock


@pytest.mark.usefixtures("either_route")
def test_no_reader_ever_sees_a_mix(executor: ThreadPoolExecutor) -> None:
    state = {f"w{i}": torch.zeros(20_000) for i in range(8)}
    step, stop = [0], threading.Event()

    def train(server: transfuse.Server) -> int:
        while not stop.is_set():
            with server.mutating():
                step[0] += 1
                for weight in state.values():
                    weight.fill_(step[0])
        return step[0]

    def read(server: transfuse.Server) -> list[int]:
        seen = []
        for _ in range(6):
            fetched = transfuse.fetch(server.address, timeout=LONG)
            values = {float(value) for weight in fetched.values() for value in weight.unique()}
            assert len(values) == 1
            seen.append(int(values.pop()))
        return seen

    with transfuse.serve(state, step=lambda: step[0], timeout=LONG) as server:
        training = executor.submit(train, server)
        readers = [executor.submit(read, server) for _ in range(3)]
        try:
            seen = [reader.result(DEADLINE) for reader in readers]
        finally:
            stop.set()
        steps = training.result(DEADLINE)
    for one in seen:
        assert one == sorted(one)
    # Neither keeps the other out: training goes on between the readers' turns.
    assert len({step for one in seen for step in one}) > 1
    assert steps >= max(max(one) for one in seen)


def test_mutating_within_mutating_and_what_is_raised_in_it() -> None:
    state = some_state()
    with transfuse.serve(state) as server:
        with pytest.raises(ZeroDivisionError), server.mutating(), server.mutating():
            raise ZeroDivisionError
        assert not differences(state, transfuse.fetch(server.address))
        with server.mutating():
            pass


def test_a_state_that_cannot_be_had_is_told_in_its_words(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Any] = [ValueError("no \udcff state today"), None]

    def state_dict() -> object:
        if isinstance(answers[0], Exception):
            raise answers[0]
        if answers[0] is None:
            with server.mutating():
                pytest.fail("a reader changed the state")
        return answers[0]

    with transfuse.serve(state_dict) as server:
        for words in ("ValueError: no .* state today", "read by this thread"):
            with pytest.raises(transfuse.PeerRefused, match=words):
                transfuse.fetch(server.address)
            answers.pop(0)
        answers.append(some_state())
        assert not differences(some_state(), transfuse.fetch(server.address))
    assert "state today" in caplog.text


# Readers that stall, or die


def go_as_far_as(rank: int, address: str, fault: int) -> None:
    """In a process: be a reader up to a moment, and no further."""
    torch.set_num_threads(1)
    moment = MOMENTS[rank]

    def stay(*_: object) -> None:
        announce("there")
        os.kill(os.getpid(), fault)

    def stay_midway(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes:
            stay()

    if moment in ("memory", "group"):
        same_host = moment == "memory"
        transfuse.fetch(address, token=TOKEN, timeout=LONG, same_host=same_host, progress=stay_midway)
    if moment in ("connected", "greeted"):
        with socket.create_connection(split_address(address)) as sock:
            if moment == "greeted":
                sock.sendall(MAGIC + bytes([VERSION]) + bytes(32))
                sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
            stay()
    door = knock(address, key_of(TOKEN), 20.0, 0)
    if moment == "proved":
        stay()
    if moment == "forming":
        door.expect(Call, 20.0, "forming a group", 0)
        stay()
    group = Private(door, READER, 20.0, 0)
    if moment == "formed":
        stay()
    door.send(Ready(), 20.0)
    door.expect(Ready, 20.0, "waiting", 400)
    assert moment == "ready"
    stay(group)


MOMENTS = ["connected", "greeted", "proved", "forming", "formed", "ready", "memory", "group"]


def own_tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def own_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def nothing_is_left(tasks: int, files: int) -> None:
    """No more threads and files than before. What a failed transfer holds is garbage, and goes with it."""
    # Again and again: on a busy machine it becomes garbage late.
    wait_until(lambda: gc.collect() >= 0 and own_tasks() <= tasks and own_files() <= files)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_who_stalls_or_dies_holds_up_training_no_longer_than_the_timeout(
    fault: int,
) -> None:
    state = big_state()
    with Fleet(len(MOMENTS)) as fleet, transfuse.serve(state, token=TOKEN, timeout=SHORT, max_readers=20) as server:
        assert not differences(state, transfuse.fetch(server.address, token=TOKEN))
        tasks, files = own_tasks(), own_files()
        fleet.start(go_as_far_as, server.address, fault)
        for rank in range(len(MOMENTS)):
            fleet.wait_for(rank, "there")
        started = time.monotonic()
        with server.mutating():
            state["model"]["w0"].add_(1)
        # The bound is for a busy machine: it would be as long as a reader's own timeout if nobody looked.
        assert time.monotonic() - started < 15
        for _ in range(3):
            with server.mutating():
                state["model"]["w0"].add_(1)
            assert not differences(state, transfuse.fetch(server.address, token=TOKEN))
        wait_until(lambda: not server._readers)
        nothing_is_left(tasks, files)


def test_signs_of_life_alone_buy_no_time() -> None:
    """A reader that says again and again that it works, and takes nothing."""
    with transfuse.serve(some_state(), timeout=SHORT) as server, contextlib.ExitStack() as stack:
        door = knock(server.address, key_of(None), 20.0, 0)
        stack.callback(door.close)
        group = Private(door, READER, 20.0, 0)
        door.send(Ready(), 20.0)
        door.expect(Ready, 20.0, "waiting", 400)
        stop = threading.Event()

        def pretend() -> None:
            with Line(Group(Several({0: group}, 1), CPU), 0, 5.0, Limits()) as line:
                line.expect(Message.OFFER, tag=OFFER_TAG)
                with contextlib.suppress(transfuse.PeerError):
                    while not stop.wait(0.2):
                        line.send(Message.WORKING, note=0)
                        line.settle()
                line.broken = True

        pretending = threading.Thread(target=pretend, daemon=True)
        pretending.start()
        started = time.monotonic()
        with server.mutating():
            assert time.monotonic() - started < 15
        stop.set()
        pretending.join(DEADLINE)
        assert not differences(some_state(), transfuse.fetch(server.address))


@pytest.mark.soak
def test_many_readers_die_and_nothing_is_left_of_them() -> None:
    state = big_state()
    with transfuse.serve(state, token=TOKEN, timeout=SHORT, max_readers=20) as server:
        for turn in range(4):
            with Fleet(len(MOMENTS)) as fleet:
                fleet.start(go_as_far_as, server.address, signal.SIGKILL)
                for rank in range(len(MOMENTS)):
                    fleet.wait_for(rank, "there")
            with server.mutating():
                pass
            assert not differences(state, transfuse.fetch(server.address, token=TOKEN))
            wait_until(lambda: not server._readers)
            if turn == 0:
                # The first fleet has started a server of its own to fork from.
                gc.collect()
                tasks, files = own_tasks(), own_files()
        nothing_is_left(tasks, files)


# Strangers


def hello(version: int = VERSION) -> bytes:
    return MAGIC + bytes([version]) + secrets.token_bytes(32)


def all_it_says(sock: socket.socket, to_say: bytes = b"") -> bytes:
    """Say something, and hear everything until the other end closes."""
    said = b""
    sock.settimeout(DEADLINE)
    with contextlib.suppress(ConnectionError):
        sock.sendall(to_say)
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(1 << 16):
            said += chunk
    return said


@contextlib.contextmanager
def listened_to(address: str) -> Iterator[tuple[str, list[bytes]]]:
    """A relay before a server, and all the bytes that the reader said: a replay needs them."""
    said: list[bytes] = []

    def pass_on(source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                if keep:
                    said.append(chunk)
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as relay, contextlib.ExitStack() as stack:

        def take() -> None:
            with contextlib.suppress(OSError):
                one, _ = relay.accept()
                other = socket.create_connection(split_address(address))
                stack.callback(one.close)
                stack.callback(other.close)
                ways = [threading.Thread(target=pass_on, args=way) for way in ((one, other, True), (other, one, False))]
                for way in ways:
                    way.start()
                for way in ways:
                    way.join()

        taking = threading.Thread(target=take)
        taking.start()
        yield f"127.0.0.1:{relay.getsockname()[1]}", said
        with contextlib.suppress(OSError):
            relay.shutdown(socket.SHUT_RDWR)
        taking.join(DEADLINE)


def test_a_stranger_hears_a_hello_and_no_more() -> None:
    state, asked = some_state(), []

    def state_dict() -> object:
        asked.append(True)
        return state

    with transfuse.serve(state_dict, token=TOKEN, timeout=SHORT) as server:
        with listened_to(server.address) as (relay, said):
            assert not differences(state, transfuse.fetch(relay, token=TOKEN))
        good = b"".join(said)[: HELLO_BYTES + PROOF_BYTES]
        asked.clear()
        attempts = {
            "nothing": (b"", 0),
            "rubbish": (secrets.token_bytes(1000), 0),
            "half a hello": (hello()[:20], 0),
            "another version": (hello(VERSION + 1), HELLO_BYTES),
            "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100), 0),
            "no proof": (hello(), HELLO_BYTES),
            "a wrong proof": (hello() + bytes(PROOF_BYTES), HELLO_BYTES),
            "a replay": (good, HELLO_BYTES),
            "much": (hello() + secrets.token_bytes(1 << 20), HELLO_BYTES),
        }
        for name, (words, heard) in attempts.items():
            with socket.create_connection(split_address(server.address)) as sock:
                said_back = all_it_says(sock, words)
            # A connection that closes on unread bytes may take what was said before with it.
            assert len(said_back) in ({heard, 0} if len(words) > HELLO_BYTES + PROOF_BYTES else {heard}), name
            assert said_back[: len(MAGIC)] in (MAGIC, b""), name
        # Its own nonce given back, and its own proof, if it gave one: no end's proof passes for the other's.
        with socket.create_connection(split_address(server.address)) as sock:
            mine = hello()
            sock.sendall(mine)
            theirs = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
            proof = hmac.digest(key_of(TOKEN), b"transfuse server " + mine + theirs, hashlib.sha256)
            assert all_it_says(sock, proof) == b""
        assert not asked
        assert not differences(state, transfuse.fetch(server.address, token=TOKEN))


def test_two_hellos_are_never_the_same() -> None:
    with transfuse.serve(some_state(), token=TOKEN) as server:
        heard = set()
        for _ in range(8):
            with socket.create_connection(split_address(server.address)) as sock:
                sock.sendall(hello())
                heard.add(sock.recv(HELLO_BYTES, socket.MSG_WAITALL))
    assert len(heard) == 8


def hear_to_the_end(door: Door) -> None:
    while True:
        door.expect(Call, 20.0, "waiting", 0)


@pytest.mark.parametrize("what", ["mark", "counter", "length", "malformed", "kind", "late hello"])
def test_frames_that_are_not_from_who_has_proved_itself(what: str) -> None:
    with transfuse.serve(some_state(), token=TOKEN, timeout=LONG) as server:
        door = knock(server.address, key_of(TOKEN), 20.0, 0)
        body = bytes([0x81, 0xA4]) + b"type" + bytes([0xA5]) + b"ready"
        length = len(body)
        if what == "length":
            length = MAX_FRAME_BYTES + 1
        if what == "malformed":
            body = body[:-1] + b"\xff"
        head = length.to_bytes(4, "little")
        counter = 1 if what == "counter" else 0
        mark = hmac.digest(door._sending, counter.to_bytes(8, "little") + head + body, hashlib.sha256)
        if what == "mark":
            mark = bytes(PROOF_BYTES)
        words = hello() + bytes(PROOF_BYTES) if what == "late hello" else head + body + mark
        door._socket.sendall(words)
        # The server's own address comes first, if it was quicker.
        with pytest.raises(transfuse.PeerError) as raised:
            hear_to_the_end(door)
        # Whether the reset that follows leaves it time to be read is not said.
        assert isinstance(raised.value, transfuse.PeerLost | transfuse.PeerRefused)
        if isinstance(raised.value, transfuse.PeerRefused):
            assert raised.value.kind == "ProtocolError"
        door.close()
        assert not differences(some_state(), transfuse.fetch(server.address, token=TOKEN))


def test_a_crowd_of_strangers_keeps_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    state = some_state()
    with transfuse.serve(state, token=TOKEN, timeout=LONG) as server, contextlib.ExitStack() as stack:
        transfuse.fetch(server.address, token=TOKEN)
        tasks, files = own_tasks(), own_files()
        where = split_address(server.address)
        crowd = [stack.enter_context(socket.create_connection(where)) for _ in range(200)]
        for _ in range(3):
            assert not differences(state, transfuse.fetch(server.address, token=TOKEN))
        wait_until(lambda: len(server._strangers) <= serving.MAX_STRANGERS)
        for one in crowd:
            one.close()
        wait_until(lambda: not server._readers)
        nothing_is_left(tasks, files)
    assert len([record for record in caplog.records if "turned away" in record.message]) < 60


def test_tokens_are_proved_both_ways(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "wrong horse"
    with transfuse.serve(some_state(), token=TOKEN) as server, transfuse.serve(some_state()) as open_server:
        for address, token in ((server.address, wrong), (server.address, None), (open_server.address, TOKEN)):
            with pytest.raises(transfuse.PeerRefused, match=r"token") as raised:
                transfuse.fetch(address, token=token)
            assert raised.value.kind == "WrongToken"
            assert address in str(raised.value)
            text = caplog.text + repr(raised.value)
            for secret in (TOKEN, wrong, key_of(TOKEN).hex(), repr(key_of(TOKEN))[2:-1], repr(server)):
                assert secret not in text
        assert TOKEN not in repr(vars(server))
        assert not differences(some_state(), transfuse.fetch(server.address, token=TOKEN.encode()))


def test_a_server_that_does_not_know_the_token_gets_a_proof_and_no_more(executor: ThreadPoolExecutor) -> None:
    rubbish = secrets.token_bytes(200)
    for answer in (hello() + rubbish[:PROOF_BYTES], b"", rubbish, hello(VERSION + 1) + rubbish[:PROOF_BYTES], None):
        with socket.create_server(("127.0.0.1", 0)) as fake:
            address = f"127.0.0.1:{fake.getsockname()[1]}"
            fetch = executor.submit(transfuse.fetch, address, token=TOKEN, timeout=SHORT)
            sock, _ = fake.accept()
            with sock:
                if answer is None:
                    # Its own words back.
                    answer = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
                    sock.sendall(answer)
                    proof = sock.recv(PROOF_BYTES, socket.MSG_WAITALL)
                    heard = answer + proof + all_it_says(sock, proof)
                else:
                    heard = all_it_says(sock, answer)
            assert len(heard) <= HELLO_BYTES + PROOF_BYTES
            with pytest.raises(transfuse.PeerError, match=address):
                fetch.result(DEADLINE)


# A reader that knows the token and means no good


def serve_here(rank: int) -> None:
    server = transfuse.serve(some_state(), token=TOKEN, timeout=timedelta(seconds=1), max_readers=300)
    announce(server.address)
    time.sleep(10 * DEADLINE)


def give_a_false_address(address: str, tamper: Callable[[bytearray], bytearray]) -> None:
    door = knock(address, key_of(TOKEN), 20.0, 0)
    try:
        theirs = door.expect(Call, 20.0, "forming a group", 400)
        with contextlib.suppress(transfuse.PeerError):
            door.send(Call(theirs.key.replace("0/0", "0/1"), bytes(tamper(bytearray(theirs.value)))), 20.0)
            while True:
                door.expect(Ready, 20.0, "waiting", 400)
    finally:
        door.close()


def flipped(at: int, bits: int) -> Callable[[bytearray], bytearray]:
    def tamper(data: bytearray) -> bytearray:
        data[at % len(data)] ^= bits
        return data

    return tamper


FALSE_ADDRESSES: list[Callable[[bytearray], bytearray]] = [
    lambda data: bytearray(),
    lambda data: data[:-1],
    lambda data: data + bytes(8),
    lambda data: bytearray(len(data)),
    lambda data: bytearray(b"\xff" * len(data)),
    lambda data: bytearray(secrets.token_bytes(len(data))),
    lambda data: data[:8] + bytearray(secrets.token_bytes(len(data) - 8)),
    lambda data: data[:18] + bytearray(b"\xff" * (len(data) - 18)),
    lambda data: bytearray((1 << 62).to_bytes(8, "little")) + data[8:],
    lambda data: bytearray(MAX_FRAME_BYTES - 100),
    lambda data: data,
]


def false_addresses(tampers: Sequence[Callable[[bytearray], bytearray]]) -> None:
    with Fleet(1) as fleet, ThreadPoolExecutor(32) as threads:
        fleet.start(serve_here)
        fleet._until(lambda: bool(fleet.workers[0].reached), DEADLINE)
        (address,) = fleet.workers[0].reached
        for future in [threads.submit(give_a_false_address, address, tamper) for tamper in tampers]:
            future.result(DEADLINE)
        assert not differences(some_state(), transfuse.fetch(address, token=TOKEN))
        fleet._until(lambda: True, 0)
        assert fleet.workers[0].busy, fleet.workers[0].outcome


def test_a_false_address_does_not_end_the_server() -> None:
    false_addresses([*FALSE_ADDRESSES, *(flipped(at, 0xFF) for at in range(0, 170, 9))])


@pytest.mark.soak
def test_no_false_address_ends_the_server() -> None:
    false_addresses([flipped(at, bits) for at in range(170) for bits in (1, 0x80, 0xFF)])


# Where it listens


def own_sockets() -> set[str]:
    """The local addresses of all TCP sockets of this process."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].split(":")[0])
    return found


@pytest.mark.parametrize(
    ("host", "there"), [("127.0.0.1", {"0100007F"}), ("::1", {"00000000000000000000000001000000"})]
)
def test_it_listens_where_it_is_told_and_nowhere_else(
    host: str, there: set[str], executor: ThreadPoolExecutor, group_route: None
) -> None:
    before, halt, state = own_sockets(), Halt(), plain_state()
    if host == "::1" and not pathlib.Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with transfuse.serve(state, host=host, timeout=LONG) as server:
        fetch = executor.submit(halt.fetch, server.address)
        assert halt.reached.wait(DEADLINE)
        during = own_sockets()
        halt.go_on.set()
        assert not differences(state, fetch.result(DEADLINE))
    assert during - before <= there
    assert during >= there


def serve_on(rank: int, host: str) -> None:
    with transfuse.serve(some_state(), token=TOKEN, host=host, timeout=LONG) as server:
        announce(server.address)
        time.sleep(10 * DEADLINE)


def fetch_from(rank: int, address: str) -> int:
    return len(list(differences(some_state(), transfuse.fetch(address, token=TOKEN, timeout=LONG))))


def move_in(rank: int, namespaces: list[str]) -> None:
    settle(namespaces[rank], LONG)


@pytest.mark.parametrize("everywhere", [False, True])
def test_from_host_to_host(everywhere: bool) -> None:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(2, mbit=1000))
        except Unavailable as error:
            pytest.skip(str(error))
        fleet = stack.enter_context(Fleet(2))
        fleet.start(move_in, [hosts.namespace(host) for host in range(2)])
        for outcome in fleet.outcomes():
            outcome.get()
        fleet.start(serve_on, "0.0.0.0" if everywhere else hosts.address(0), ranks=[0])
        fleet._until(lambda: bool(fleet.workers[0].reached), DEADLINE)
        (address,) = fleet.workers[0].reached
        address = f"{hosts.address(0)}:{split_address(address)[1]}"
        fleet.start(fetch_from, address, ranks=[1])
        assert [outcome.get() for outcome in fleet.outcomes(ranks=[1])] == [0]


# How it ends


def test_close_waits_for_who_reads_and_tells_who_waits(executor: ThreadPoolExecutor) -> None:
    state, halt = plain_state(), Halt()
    server = transfuse.serve(state, max_readers=1, timeout=LONG)
    reads = executor.submit(halt.fetch, server.address)
    assert halt.reached.wait(DEADLINE)
    waits = executor.submit(transfuse.fetch, server.address, timeout=LONG)
    stranger = socket.create_connection(split_address(server.address))
    wait_until(lambda: len(server._readers) == 3)
    wait_until(lambda: len(server._strangers) == 1)
    closes = executor.submit(server.close)
    with pytest.raises(transfuse.PeerRefused, match=f"{server.address} was closed"):
        waits.result(DEADLINE)
    assert all_it_says(stranger) == b""
    stranger.close()
    assert not closes.done()
    halt.go_on.set()
    assert not differences(state, reads.result(DEADLINE))
    closes.result(DEADLINE)
    server.close()
    with pytest.raises(transfuse.PeerLost, match=server.address):
        transfuse.fetch(server.address)


def test_cancel_cuts_off_who_reads(executor: ThreadPoolExecutor) -> None:
    """Also who has not begun yet. The state may be changed as soon as the block has been left."""
    halt, formed = Halt(), threading.Event()

    def form(address: str) -> None:
        door = knock(address, key_of(None), 20.0, 0)
        with contextlib.closing(door), contextlib.closing(Private(door, READER, 20.0, 0)):
            formed.set()
            door.expect(Ready, 20.0, "waiting", 400)

    def leave() -> None:
        with transfuse.serve(plain_state(), timeout=LONG) as server:
            cut.append(executor.submit(halt.fetch, server.address))
            cut.append(executor.submit(form, server.address))
            assert halt.reached.wait(DEADLINE)
            assert formed.wait(DEADLINE)
            raise ZeroDivisionError

    cut: list[Future[Any]] = []
    with pytest.raises(ZeroDivisionError):
        leave()
    halt.go_on.set()
    for one in cut:
        with pytest.raises(transfuse.PeerRefused, match=r"the server at 127.0.0.1:\d+ was closed"):
            one.result(DEADLINE)


def test_a_process_ends_with_a_server_still_open(executor: ThreadPoolExecutor) -> None:
    """While one reads, another waits, and a stranger says nothing."""
    script = """
        import torch, transfuse
        from datetime import timedelta
        server = transfuse.serve({"w": torch.arange(1000.0)}, max_readers=1, timeout=timedelta(seconds=20))
        transfuse.serve({})
        print(server.address, flush=True)
        input()
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with (
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environ, text=True, **pipes) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        address, halt = process.stdout.readline().strip(), Halt()
        reads = executor.submit(halt.fetch, address)
        stack.callback(halt.go_on.set)
        assert halt.reached.wait(DEADLINE)
        waits = executor.submit(transfuse.fetch, address)
        stack.enter_context(socket.create_connection(split_address(address)))
        with pytest.raises(TimeoutError):
            waits.result(0.5)
        said = process.communicate("end\n", timeout=DEADLINE)
        # Its log, and nothing that torch or the interpreter says.
        assert process.returncode == 0, said
        assert all("was closed" in line for line in "".join(said).splitlines()), said
        halt.go_on.set()
        for one in (reads, waits):
            with pytest.raises(transfuse.PeerError):
                one.result(DEADLINE)


def test_nothing_is_left_of_who_was_cut_off() -> None:
    """It never says what it wants. The thread that waits for it outlives the server, and goes when the reader does."""
    with transfuse.serve(plain_state(), timeout=LONG) as server:
        transfuse.fetch(server.address)
    gc.collect()
    tasks, files = own_tasks(), own_files()
    server = transfuse.serve(plain_state(), timeout=LONG)
    door = knock(server.address, key_of(None), 20.0, 0)
    with contextlib.closing(door), contextlib.closing(Private(door, READER, 20.0, 0)):
        door.send(Ready(), 20.0)
        door.expect(Ready, 20.0, "waiting", 400)
        server.close(cancel=True)
        assert own_tasks() > tasks
    nothing_is_left(tasks, files)


def test_no_state_stays_until_garbage_is_collected() -> None:
    """A job may have switched the collector off, and what is served may be a copy."""
    gc.collect()
    gc.disable()
    try:
        with transfuse.serve(plain_state, step=3, timeout=LONG) as server:
            transfuse.fetch(server.address, same_host=False)
            transfuse.fetch(server.address)
            with pytest.raises(transfuse.StepMismatch):
                transfuse.fetch(server.address, step=4)
            wait_until(lambda: not server._readers)
            assert not [one for one in gc.get_objects() if type(one) is Cargo]
    finally:
        gc.enable()


def test_a_report_may_close_its_server(caplog: pytest.LogCaptureFixture) -> None:
    server = transfuse.serve(plain_state(), timeout=LONG, on_report=lambda report: server.close())
    assert not differences(plain_state(), transfuse.fetch(server.address))
    wait_until(lambda: not server._readers)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with pytest.raises(transfuse.PeerLost, match="cannot be reached"):
        transfuse.fetch(server.address)
    server.close()


def test_the_end_of_a_fork_is_not_the_end_of_the_server() -> None:
    script = """
        import os, sys, torch, transfuse
        with transfuse.serve({"w": torch.arange(1000.0)}) as server:
            if (child := os.fork()) == 0:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            print(len(transfuse.fetch(server.address)["w"]))
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    # Newer versions of Python warn of forks of processes with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)]
    said = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=DEADLINE, check=False)
    assert (said.returncode, said.stdout) == (0, "1000\n"), said.stderr


def fetch_until_interrupted(rank: int, addresses: list[str]) -> str:
    torch.set_num_threads(1)

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes:
            announce("moving")

    try:
        transfuse.fetch(addresses[rank], token=TOKEN, timeout=10 * LONG, same_host=False, progress=show)
    except KeyboardInterrupt:
        return "interrupted"
    return "fetched"


def test_ctrl_c_ends_a_fetch_and_the_server_goes_on() -> None:
    """At a door where nobody answers, before a state that is being changed, and in the middle of a transfer."""
    state = big_state()
    with (
        Fleet(3) as fleet,
        socket.create_server(("127.0.0.1", 0)) as silent,
        transfuse.serve(state, token=TOKEN, timeout=10 * LONG) as locked,
        transfuse.serve(state, token=TOKEN, timeout=10 * LONG, max_bytes_per_second=1e6, same_host=False) as slow,
    ):
        with locked.mutating(), contextlib.ExitStack() as stack:
            addresses = [f"127.0.0.1:{silent.getsockname()[1]}", locked.address, slow.address]
            fleet.start(fetch_until_interrupted, addresses)
            silent.settimeout(DEADLINE)
            visitor = stack.enter_context(silent.accept()[0])
            assert visitor.recv(1)
            wait_until(lambda: len(locked._turns._waiting) == 1)
            fleet.wait_for(2, "moving")
            for rank in range(3):
                fleet.signal(rank, signal.SIGINT)
            assert [outcome.get() for outcome in fleet.outcomes(DEADLINE)] == ["interrupted"] * 3
            wait_until(lambda: not locked._readers and not slow._readers)
        assert not differences(state, transfuse.fetch(locked.address, token=TOKEN))
        with slow.mutating():
            pass


# Options


def test_options_that_make_no_sense() -> None:
    serve: Any = transfuse.serve
    fetch: Any = transfuse.fetch
    for options in (
        {"max_readers": 0},
        {"timeout": timedelta(0)},
        {"timeout": timedelta(seconds=-1)},
        {"token": ""},
        {"token": b""},
        {"max_bytes_per_second": 0},
        {"host": ""},
    ):
        with pytest.raises(ValueError, match=r"max_readers|timeout|token|max_bytes_per_second|every interface"):
            serve({}, **options)
    with pytest.raises(TypeError, match="token is str or bytes, got int"):
        serve({}, token=5)
    for address in ("", "host", "host:", ":5", "host:0", "host:99999", "host:x", "::1:5", "[::1]", "host:-1", "host:²"):
        with pytest.raises(ValueError, match=r"an address is host:port"):
            fetch(address)
        with pytest.raises(ValueError, match=r"an address is host:port"):
            transfuse.peek(address)
    with pytest.raises(ValueError, match="needs an address"):
        fetch([])
    with pytest.raises(ValueError, match="twice"):
        fetch(["127.0.0.1:5", "127.0.0.1:5"])
    with pytest.raises(ValueError, match="timeout must be positive"):
        fetch("127.0.0.1:5", timeout=timedelta(seconds=-1))
    with pytest.raises(ValueError, match="map_path"):
        fetch("127.0.0.1:5", map_path={"a": "b"})
    with transfuse.serve({}) as server, pytest.raises(OSError, match=r"[Aa]ddress"):
        serve({}, port=split_address(server.address)[1])


def test_a_module_is_no_state() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"model\.state_dict"):
        transfuse.serve(model)
    with pytest.raises(TypeError, match=r"model\.state_dict"):
        transfuse.fetch("127.0.0.1:1", model)


def test_waiting_for_a_turn_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_MAX_WORKING_RECORDS", "2")
    with transfuse.serve(some_state()) as server, server.mutating():
        with pytest.raises(transfuse.PeerTimeout, match="hold still") as raised:
            transfuse.fetch(server.address, timeout=timedelta(seconds=1))
        assert server.address in str(raised.value)


@pytest.mark.parametrize("step", [1 << 63, -(1 << 63) - 1])
def test_a_step_that_no_message_can_carry(step: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        transfuse.serve(some_state(), step=step)
    serving = transfuse.serve(some_state(), step=lambda: step)
    with serving as server, pytest.raises(transfuse.PeerRefused, match="64 bits"):
        transfuse.fetch(server.address, timeout=LONG)
