"""Serving and fetching: what arrives, who is kept out, who holds up whom, and how it ends.

Readers, servers and strangers are real: threads where that is enough, processes where they are frozen or killed.
"""

from __future__ import annotations

import enum
import socket
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.tensor import Shard

import transfuse
from hub_asking import ask
from serving import DEADLINE, LONG, TOKEN, Halt, big_state, plain_state, servers, some_state, zeros_like
from shards import mesh_of, shard
from transfuse._wire.handshake import split_address
from transfuse.testing.exact import differences

# What arrives


@pytest.mark.usefixtures("either_route")
def test_what_arrives_is_what_is_there() -> None:
    state = some_state()
    with transfuse.serve(state, token=TOKEN, step=7) as server:
        fresh = transfuse.fetch(server.address, token=TOKEN, step=7)
        assert not differences(state, fresh.state)
        target = zeros_like(state)
        weights = dict(target["model"])
        landed = transfuse.fetch(server.address, target, token=TOKEN).state
        assert not differences(state, landed)
        assert all(landed["model"][name] is weight for name, weight in weights.items())
        again = transfuse.fetch(server.address, lambda: target, token=TOKEN, delta=True)
        assert not differences(state, again.state)
    assert [one.step for one in (fresh, again, fresh.report, again.report)] == [7] * 4
    assert fresh.report.bytes > 0
    assert again.report.kept_bytes > 0
    with pytest.raises(TypeError, match=r"Fetched: the entry is \.state\['model'\]"):
        fresh["model"]


def test_another_step_is_refused() -> None:
    with transfuse.serve(some_state(), step=lambda: 7) as server:
        with pytest.raises(transfuse.StepMismatch, match="7"):
            transfuse.fetch(server.address, step=8)
        assert transfuse.peek(server.address).step == 7


class Key(enum.StrEnum):
    LR = "lr"


@pytest.mark.usefixtures("either_route")
def test_one_entry_alone() -> None:
    state = {**some_state(), "other": {"x": torch.arange(3)}}
    with transfuse.serve(lambda: state) as server:
        got = transfuse.fetch(server.address, entry="other")
        assert not differences(state["other"], got.state)
        target = zeros_like(state)["model"]
        weight = target["w0"]
        landed = transfuse.fetch(server.address, target, entry="model")
        assert landed.state["w0"] is weight
        assert not differences(state["model"], landed.state)
        # A lone tensor and a lone value are states too.
        assert torch.equal(transfuse.fetch(server.address, entry="tied").state, state["tied"])
        assert transfuse.fetch(server.address, entry="lr").state == 0.1
        # Keys may be members of an enum.
        assert transfuse.fetch(server.address, entry=Key.LR).state == 0.1
    assert got.report.bytes == 3 * 8
    assert landed.report.leaves == len(state["model"])


def test_an_entry_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    state: Any = defaultdict(dict, model=some_state()["model"])
    with transfuse.serve(state) as server:
        with pytest.raises(transfuse.PeerRefused, match="StateError: the state has no entry 'optimizer'"):
            transfuse.fetch(server.address, entry="optimizer")
        assert list(state) == ["model"]
        assert not differences(state["model"], transfuse.fetch(server.address, entry="model").state)
    assert "(entry 'optimizer')" in caplog.text
    with (
        transfuse.serve([torch.ones(2)]) as server,
        pytest.raises(transfuse.PeerRefused, match="a list and has no entries: fetch it without entry="),
    ):
        transfuse.fetch(server.address, entry="0")


def test_an_entry_is_a_short_text() -> None:
    with pytest.raises(TypeError, match="entry takes a key"):
        transfuse.fetch("127.0.0.1:1", entry=0)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="entry is at most 4096 bytes long, got 5000"):
        transfuse.fetch("127.0.0.1:1", entry="e" * 5000)
    with pytest.raises(ValueError, match=r"entry is a text that UTF-8 cannot write, got 'a\\udc80'"):
        transfuse.fetch("127.0.0.1:1", entry="a\udc80")


def test_several_readers_at_once(executor: ThreadPoolExecutor) -> None:
    """More of them than there are places."""
    state = some_state()
    reports: list[transfuse.Report] = []
    with transfuse.serve(state, max_readers=3, on_report=reports.append) as server:
        fetches = [executor.submit(transfuse.fetch, server.address, same_host=bool(i % 2)) for i in range(9)]
        for fetch in fetches:
            assert not differences(state, fetch.result(DEADLINE).state)
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
        assert not differences(state, first.result(DEADLINE))
        assert not differences(state, second.result(DEADLINE).state)


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
        addresses = [dead, one.address, stranger.address, other.address]
        fetched = transfuse.fetch(addresses, token=TOKEN)
        assert not differences(state, fetched.state)
        assert fetched.report.peers == (1, 3), "ranks are numbers of addresses"
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
        fetched = transfuse.fetch([one.address, other.address], target).state
        assert not differences({"w": whole, "lr": 0.1}, fetched)
        # Sharded in another way, by one reader of three.
        mine: dict[str, Any] = {"w": shard(torch.zeros(40, 6), [0, 1, 2], 1, Shard(1)), "lr": 0.0}
        transfuse.fetch([one.address, other.address], mine)
        assert torch.equal(mine["w"].to_local(), whole[:, 2:4])
        with pytest.raises(transfuse.NotCovered):
            transfuse.fetch(one.address, {"w": torch.zeros(40, 6), "lr": 0.0})
        fresh = transfuse.fetch(one.address, mesh=mesh_of([0, 1], 0)).state
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
        assert f"['b']: {dead} may hold it, but cannot be reached" in str(raised.value)
        assert not target["a"].any(), "nothing was written"
        transfuse.fetch([one.address, other.address], target, token=TOKEN)
        assert bool(target["a"].all() and target["b"].all())
        # Where nobody is absent, a tensor that no server has keeps its values if the caller says so.
        more = {"a": torch.zeros(5), "mine": torch.full((3,), 7.0)}
        transfuse.fetch(one.address, more, token=TOKEN, strict=False)
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


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_server_that_is_lost_midway_costs_nothing_but_its_part(fault: str) -> None:
    with servers(3) as (fleet, addresses):
        done: list[bool] = []

        def strike(progress: dict[int, transfuse.Progress]) -> None:
            if not done and progress[1].bytes:
                getattr(fleet, fault)(1)
                done.append(True)

        timeout = timedelta(seconds=3)
        fetched = transfuse.fetch(addresses, token=TOKEN, timeout=timeout, same_host=False, progress=strike)
        assert done
        assert not differences(big_state(), fetched.state)


def test_a_frozen_server_does_not_cost_the_others_that_are_there(caplog: pytest.LogCaptureFixture) -> None:
    """It takes a connection and never says a word. Meanwhile the others wait, for less than their patience."""
    with servers(2, seconds=3.0, rate=None) as (fleet, addresses):
        fleet.freeze(0)
        fetched = transfuse.fetch(addresses, token=TOKEN, timeout=timedelta(seconds=3)).state
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
        assert raised.value.report.bytes > 1 << 20
        fetched = transfuse.fetch(addresses[1], target, token=TOKEN, timeout=LONG, resume=raised.value.partial)
        assert not differences(big_state(), fetched.state)
        assert 0 < fetched.report.bytes < 16 << 20


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
            fetched = transfuse.fetch(server.address, timeout=LONG).state
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
        assert not differences(state, transfuse.fetch(server.address).state)
        with server.mutating():
            pass


def test_a_state_that_cannot_be_had_is_told_in_its_words(caplog: pytest.LogCaptureFixture) -> None:
    answer: Any = ValueError("no \udcff state today")

    def state_dict() -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match="state today"):
        transfuse.serve(state_dict)
    answer = plain_state()
    with transfuse.serve(state_dict) as server:
        answer = ValueError("no \udcff state today")
        for _ in range(2):
            with server.mutating():  # Training goes on, and the log says once what readers are told.
                pass
            with pytest.raises(transfuse.PeerRefused, match=r"ValueError: no .* state today"):
                transfuse.fetch(server.address)
        answer = some_state()
        with server.mutating():
            pass
        assert not differences(some_state(), transfuse.fetch(server.address).state)
    assert len([one for one in caplog.messages if "the state cannot be had: ValueError: no" in one]) == 1


@pytest.mark.parametrize("what", ["serve", "hub"])
def test_callables_are_called_in_the_thread_that_trains_only(what: str) -> None:
    """At the start, and where mutating() begins and ends: what readers find is what was returned then."""
    threads: set[int] = set()
    state, step = {"layer.0.weight": torch.zeros(100)}, 0

    def state_dict() -> dict[str, torch.Tensor]:
        threads.add(threading.get_ident())
        return dict(state)

    def step_now() -> int:
        threads.add(threading.get_ident())
        return step

    def read() -> tuple[dict[str, Any], int | None]:
        if what == "hub":
            found: dict[str, Any] = safetensors.torch.load(
                ask(serving.endpoint, "GET", "/live/model/resolve/main/model.safetensors").body
            )
            commits = ask(serving.endpoint, "GET", "/api/models/live/model/commits/main").json
            return found, int(commits[0]["title"].removeprefix("step "))
        fetched = transfuse.fetch(serving.address, timeout=LONG)
        return fetched.state, fetched.step

    serving: Any = getattr(transfuse, what)(state_dict, step=step_now)
    with serving:
        for _ in range(3):
            found, told = read()
            assert told == step
            assert not differences(state, {name: found[name] for name in state})
            with serving.mutating(), serving.mutating():
                step += 1
                state["layer.0.weight"].fill_(100 * step)
                # A new entry, as an optimizer makes them at its first step.
                state[f"layer.{step}.weight"] = torch.full((3,), 100.0 * step + step)
        assert read()[1] == 3
    assert threads == {threading.get_ident()}


def test_a_step_that_moves_on_outside_of_mutating_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    step = 0
    with transfuse.serve(plain_state(), step=lambda: step) as server:
        for _ in range(3):
            with server.mutating():
                pass
            step += 1
    (warning,) = caplog.messages
    assert warning.startswith("transfuse: the step went from 0 to 1 outside of mutating(), and readers were told 0")


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
    with pytest.raises(TypeError, match="token takes text or bytes, got int"):
        serve({}, token=5)
    for address in ("", "host", "host:", ":5", "host:0", "host:99999", "host:x", "::1:5", "[::1]", "host:-1", "host:²"):
        with pytest.raises(ValueError, match=r"an address is host:port"):
            fetch(address)
        with pytest.raises(ValueError, match=r"an address is host:port"):
            transfuse.peek(address)
    with pytest.raises(ValueError, match="address is empty"):
        fetch([])
    with pytest.raises(ValueError, match="twice"):
        fetch(["127.0.0.1:5", "127.0.0.1:5"])
    with pytest.raises(ValueError, match="timeout must be positive"):
        fetch("127.0.0.1:5", timeout=timedelta(seconds=-1))
    with pytest.raises(ValueError, match="map_path"):
        fetch("127.0.0.1:5", map_path={"a": "b"})
    with transfuse.serve({}) as server, pytest.raises(OSError, match=r"[Aa]ddress"):
        serve({}, port=split_address(server.address)[1])


def test_waiting_for_a_turn_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_MAX_WORKING_RECORDS", "2")
    with transfuse.serve(some_state()) as server, server.mutating():
        with pytest.raises(transfuse.PeerTimeout, match="hold still") as raised:
            transfuse.fetch(server.address, timeout=timedelta(seconds=1))
        assert server.address in str(raised.value)


@pytest.mark.parametrize("step", [1 << 63, -(1 << 63) - 1])
def test_a_step_that_no_message_can_carry(step: int) -> None:
    for given in (step, lambda: step):
        with pytest.raises(ValueError, match="64 bits"):
            transfuse.serve(some_state(), step=given)
