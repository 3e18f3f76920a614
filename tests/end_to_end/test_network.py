"""Ranks on several hosts, which are network namespaces of this machine, and the benchmark that uses them.

Skipped, with the reason, where namespaces cannot be made.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import socket
import threading
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from benchmarks import hosts as hosts_module
from benchmarks import network, resharding
from benchmarks.hosts import LINK, Hosts, Unavailable, traffic

import transfuse
from several_hosts import SECONDS, make, ranks_on, run
from transfuse.testing.exact import differences
from transfuse.testing.ranks import Fleet, announce

NOBODY = 65534


@pytest.fixture
def available() -> None:
    with make(1):
        pass


def made_by(pid: int) -> list[str]:
    """Namespaces of this process."""
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir("/var/run/netns") if name.startswith(f"transfuse-{pid}-")]
    return []


# The harness


def meet(rank: int, addresses: list[str]) -> tuple[set[str], set[str]]:
    """Connect to all others; the addresses that connected to this rank, and the interfaces it has."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((addresses[rank], 0)))
        server.settimeout(SECONDS)
        ports: list[Any] = [None] * len(addresses)
        dist.all_gather_object(ports, server.getsockname()[1])
        others = [other for other in range(len(addresses)) if other != rank]
        for other in others:
            stack.enter_context(socket.create_connection((addresses[other], ports[other]), SECONDS))
        came = [server.accept() for _ in others]
        for connection, _ in came:
            connection.close()
        return {address for _, (address, _) in came}, {name for _, name in socket.if_nameindex()}


def test_hosts_reach_each_other_over_their_links() -> None:
    with make(3) as hosts, ranks_on(hosts, [0, 1, 2]) as fleet:
        addresses = [hosts.address(host) for host in range(3)]
        for rank, (came, interfaces) in enumerate(run(fleet, meet, addresses)):
            assert came == {address for address in addresses if address != addresses[rank]}
            assert interfaces == {"lo", LINK}


def test_every_link_is_limited_in_both_directions() -> None:
    with make(2):
        shown = [hosts_module.call("tc", "-n", name, "qdisc", "show") for name in made_by(os.getpid())]
        limited = [line for text in shown for line in text.splitlines() if " tbf " in line and "rate 1Gbit" in line]
        assert sorted(line.split(" dev ")[1].split()[0] for line in limited) == ["port0", "port1", LINK, LINK]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_leaving_removes_everything(error: type[BaseException]) -> None:
    outside = socket.if_nameindex()
    with contextlib.suppress(error), make(2):
        assert len(made_by(os.getpid())) == 3
        assert socket.if_nameindex() == outside
        raise error
    assert made_by(os.getpid()) == []
    assert socket.if_nameindex() == outside


@pytest.mark.usefixtures("available", "interruptible")
@pytest.mark.parametrize("calls", [1, 5, 12])
def test_an_interrupted_start_removes_everything(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call, left = hosts_module.call, calls

    def interrupted(*args: str) -> str:
        nonlocal left
        shown = call(*args)
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGINT)
        return shown

    monkeypatch.setattr(hosts_module, "call", interrupted)
    with pytest.raises(KeyboardInterrupt), Hosts(2):
        raise AssertionError("not interrupted")
    assert made_by(os.getpid()) == []


def hold(rank: int) -> None:
    with Hosts(1):
        announce("made")
        threading.Event().wait()


@pytest.mark.usefixtures("available")
def test_a_start_removes_what_killed_runs_left_and_nothing_else() -> None:
    with Fleet(2) as fleet:
        fleet.start(hold)
        for rank in range(2):
            fleet.wait_for(rank, "made", 120)
        killed, alive = fleet.pids
        fleet.kill(0)
        fleet.outcomes(SECONDS, [0])
        assert len(made_by(killed)) == len(made_by(alive)) == 2
        with Hosts(1):
            assert made_by(killed) == []
            assert len(made_by(alive)) == 2
    with Hosts(1):
        assert made_by(alive) == []


def test_unavailable_without_root() -> None:
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        with pytest.raises(Unavailable, match="root"), Hosts(1):
            pass
    finally:
        os.seteuid(before)


@pytest.mark.usefixtures("available")
def test_unavailable_to_a_root_that_may_not_make_namespaces() -> None:
    caught: list[BaseException] = []

    def enter() -> None:
        # For this thread and what it starts: PR_CAPBSET_DROP, CAP_SYS_ADMIN. As in most containers.
        assert ctypes.CDLL(None).prctl(24, 21, 0, 0, 0) == 0
        try:
            with Hosts(1):
                pass
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(SECONDS)
    (error,) = caught
    assert isinstance(error, Unavailable)
    assert "ip netns add" in str(error)
    assert "not permitted" in str(error)
    assert made_by(os.getpid()) == []


@pytest.mark.usefixtures("available")
def test_unavailable_without_iproute2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(Unavailable, match="apt-get install iproute2"), Hosts(1):
        pass


@pytest.mark.parametrize(("count", "mbit"), [(0, 400.0), (201, 400.0), (1, 0.0)])
def test_nonsense_is_refused(count: int, mbit: float) -> None:
    with pytest.raises(ValueError, match="got"):
        Hosts(count, mbit)


# Transfers


class Received(NamedTuple):
    wrong: list[str]
    #: Over the link of the receiver's host.
    link_bytes: int
    route: str


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"tensor{i}": torch.randn(1 << 17, generator=generator) for i in range(8)}


STATE_BYTES = sum(tensor.nbytes for tensor in state(0).values())


def transfer(rank: int, options: dict[str, Any]) -> Received | None:
    """From rank 0 to all others, in place."""
    group = dist.group.WORLD
    assert group is not None
    target = state(2)
    own = {name: tensor.data_ptr() for name, tensor in target.items()}
    transport = transfuse.PGTransport(group, timedelta(seconds=SECONDS), torch.device("cpu"), lambda: target, **options)
    dist.barrier()
    if rank == 0:
        transport.send_checkpoint(list(range(1, dist.get_world_size())), state(1))
        return None
    before = traffic().received
    got = transport.recv_checkpoint(0)
    link_bytes = traffic().received - before
    assert transport.report is not None
    assert {name: tensor.data_ptr() for name, tensor in got.items()} == own
    return Received(differences(state(1), got, in_place=True), link_bytes, transport.report.route)


def test_one_to_two_hosts_is_exact() -> None:
    with make(3) as hosts, ranks_on(hosts, [0, 1, 2]) as fleet:
        for received in run(fleet, transfer, {"same_host": False})[1:]:
            assert received.wrong == []
            assert received.route == "group"
            assert received.link_bytes >= STATE_BYTES


def test_another_network_of_the_same_host_is_read_from_memory() -> None:
    with make(2) as hosts, ranks_on(hosts, [0, 1]) as fleet:
        _, received = run(fleet, transfer, {})
        assert received.wrong == []
        assert received.route == "memory"
        assert received.link_bytes < STATE_BYTES


# The benchmark


@pytest.mark.usefixtures("available")
def test_benchmark(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "network.json"
    arguments = ["--mib", "1", "--mbit", "1000", "--runs", "1", "--topology", "one-to-one", "--json", str(path)]
    assert network.main(arguments) == 0
    assert capsys.readouterr().out.count("bit for bit") == len(network.NAMES)
    written = json.loads(path.read_text())
    assert {"date", "command", "machine", "versions", "runs"} <= set(written)
    (topology,) = written["topologies"].values()
    assert [move["name"] for move in topology["moves"]] == list(network.NAMES)
    for move in topology["moves"]:
        assert move["verified"]
        assert len(move["seconds"]) == 1
        assert 1 <= move["source_sent"][0] <= move["busiest_link"][0] < 2


def test_benchmark_fails_if_anything_arrives_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(placement: tuple[int, ...], *_: object) -> network.Measured:
        results = {name: network.Result(name, [1.0], [1.0], [1.0], [1.0]) for name in network.NAMES}
        results[network.RELAY].wrong.append("rank 1, transfuse: ['w']: expected 1, got 2")
        return network.Measured(placement, 4, 1.0, results)

    monkeypatch.setattr(network, "measure", measure)
    assert network.main(["--topology", "one-to-four"]) == 1
    out, err = capsys.readouterr()
    assert out.count("DIFFERS") == 1
    assert "expected 1, got 2" in err


def test_benchmark_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(*_: object) -> network.Measured:
        raise Unavailable("network namespaces need root")

    monkeypatch.setattr(network, "measure", measure)
    assert network.main([]) == 2
    assert "need root" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--mib", "-1"], ["--mbit", "0"], ["--topology", "ring"]])
def test_benchmark_refuses_nonsense(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        network.main(arguments)


# The benchmark of resharding


@pytest.mark.soak  # It measures; what it runs is run by tests of its own.
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("available")
def test_resharding_over_links(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "resharding.json"
    assert resharding.main(["--part", "links", "--quick", "--mbit", "1000", "--runs", "1", "--json", str(path)]) == 0
    assert capsys.readouterr().out.count("bit for bit") == len(resharding.MOVES["links"]) - 1
    written = json.loads(path.read_text())
    assert {"date", "command", "machine", "versions", "runs", "load_average"} <= set(written)
    (layout,) = written["parts"]["links"].values()
    moves = {move["name"]: move for move in layout["moves"]}
    assert list(moves) == list(resharding.MOVES["links"])
    assert all(move["verified"] and len(move["seconds"]) == 1 for move in moves.values())
    # Every byte once: what it takes at least, and what is around it.
    assert layout["busiest_bytes"] <= moves[resharding.GROUP]["busiest_link"][0] < 1.5 * layout["busiest_bytes"]
    assert moves[resharding.GATHER]["busiest_link"][0] > 2 * layout["busiest_bytes"]


def test_resharding_says_why_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    def run(part: str, *_: object) -> tuple[dict[str, Any], list[str]]:
        if part == "links":
            raise Unavailable("network namespaces need root")
        return {}, ["rank 1: differs"] if part == "delta" else []

    monkeypatch.setattr(resharding, "run", run)
    assert resharding.main(["--part", "links", "--json", str(tmp_path / "x.json")]) == 2
    assert "need root" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
    assert resharding.main(["--part", "links", "--part", "host"]) == 0
    assert resharding.main(["--part", "delta"]) == 1


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--links-mib", "-1"], ["--mbit", "0"], ["--part", "ring"]])
def test_resharding_refuses_nonsense(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        resharding.main(arguments)
