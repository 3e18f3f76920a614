"""The NIXL route, with the real library over UCX: exact, under a lease, bounded in time, or left to the group."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarks.hosts import Hosts, Unavailable, settle

import transfuse
from transfuse._arguments import INSTALL_NIXL
from transfuse._limits import Limits
from transfuse._memory import vm
from transfuse._state.manifest import Described, describe
from transfuse._wire import nixl_agent, nixl_route
from transfuse._wire.memory_route_read import TOKEN_BYTES
from transfuse._wire.nixl_agent import Agent
from transfuse._wire.nixl_route import NixlEntry, NixlLease, NixlReader
from transfuse._wire.route import MalformedEntry, Pull, Unreadable
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Fleet, announce

pytestmark = pytest.mark.skipif(nixl_agent.installed() is None, reason=f"NIXL is not installed: {INSTALL_NIXL}")

TIMEOUT = timedelta(seconds=20)
MIB = 1 << 20
#: Through the sockets of UCX, not through shared memory or the other process's memory.
TCP = {"UCX_TLS": "tcp"}


def state(seed: int) -> dict[str, Any]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    wide = draw(300, 400)
    return {
        "large": draw(3 << 20),
        "small": [draw(n) for n in range(1, 200)],
        "rows": wide[10:200],
        "columns": wide[:, 5:90],
        "sparse columns": draw(500, 300)[:, ::7],
        "turned": draw(64, 48, 32).permute(2, 0, 1),
        "bytes": torch.arange(11, dtype=torch.uint8)[3:10],
        "complex": draw(100, dtype=torch.complex128)[::3],
        "step": 4,
    }


def transport(give: Any = None, **given: Any) -> transfuse.PGTransport:
    options: dict[str, Any] = {"nixl": True, "same_host": False, "timeout": TIMEOUT, **given}
    made = transfuse.PGTransport(cast(Any, dist.group.WORLD), options.pop("timeout"), "cpu", give, **options)
    if options["nixl"]:
        nixl_agent.get(60)  # The first transfer of a process would not wait that long.
    dist.barrier()
    return made


class Lines(logging.Handler):
    """What is logged, in a process that ends with its test: it stays."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("transfuse")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def ranks(count: int, environment: dict[str, str] | None = None) -> Iterator[Fleet]:
    """Processes whose agents see this environment."""
    with Fleet(count) as fleet:
        fleet.start(settle_in, environment or {})
        for outcome in fleet.outcomes(deadline=60):
            outcome.get()
        yield fleet


def settle_in(rank: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)


def run(fleet: Fleet, function: Any, *args: Any) -> list[Any]:
    fleet.start(function, *args)
    return [outcome.get() for outcome in fleet.outcomes(deadline=120)]


# -------------------------------------------------------------------------------------------------------- what it moves


def move(rank: int) -> list[str]:
    """Rank 0 sends in every way that there is. The routes that were taken."""
    routes: list[str] = []

    def said(one: transfuse.PGTransport) -> None:
        assert one.report is not None
        assert one.report.verified or not one.report.bytes, "digests were not compared"
        routes.append(one.report.route)

    def exchange(sent: Any, expected: Any, target: Any, **options: Any) -> transfuse.PGTransport:
        one = transport(None if target is None else lambda: target, **options if rank else {})
        if rank == 0:
            one.send_checkpoint([1], sent)
            routes.append(one.report.route if one.report else "")
        else:
            arrived = one.recv_checkpoint(0)
            assert_exact(expected, arrived, in_place=target is not None)
            said(one)
        return one

    exchange(state(1), state(1), None)
    own = state(2)
    exchange(state(3), state(3), own)
    exchange(state(4), state(4), own, atomic=True)
    before = own["large"].clone()
    kept = exchange(state(4), state(4), own, delta=True)
    assert kept.report is not None
    if rank == 1:
        assert kept.report.kept_bytes > 12 * MIB
        assert torch.equal(before, own["large"])
    some = state(4) | {"large": state(5)["large"]}
    delta = exchange(some, some, own, delta=True, atomic=True)
    assert delta.report is not None
    if rank == 1:
        assert 12 * MIB <= delta.report.read_bytes < 13 * MIB
    halves = {"a": torch.zeros(1000, 300, dtype=torch.bfloat16), "b": torch.zeros(64, 64, dtype=torch.float64)}
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(9))
    wide = {"a": draw(1000, 300), "b": draw(64, 64)}
    narrowed = {"a": wide["a"].bfloat16(), "b": wide["b"].double()}
    exchange(wide, narrowed, halves, cast=True)
    return routes


@pytest.mark.parametrize("environment", [{}, TCP], ids=["default", "tcp"])
def test_all_that_moves_is_exact(environment: dict[str, str]) -> None:
    with ranks(2, environment) as fleet:
        sent, received = run(fleet, move)
    # The fourth was all kept.
    assert received == ["nixl", "nixl", "nixl", "", "nixl", "nixl"]
    assert sent == received


def gather(rank: int) -> Any:
    """Ranks 1 and 2 send the same to rank 0."""
    own = {f"w{i:02}": torch.zeros(1 << 20) for i in range(32)}
    one = transport(lambda: own)
    if rank:
        return one.send_checkpoint([0], {name: torch.full((1 << 20,), float(i)) for i, name in enumerate(own)})
    one.recv_checkpoint([1, 2])
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(own.values()))
    assert one.report is not None
    return one.report.route, set(one.report.by_source), sum(one.report.by_source.values())


def test_several_sources_share_the_work() -> None:
    with ranks(3, TCP) as fleet:
        route, sources, nbytes = run(fleet, gather)[0]
    assert route == "nixl"
    assert sources == {1, 2}
    assert nbytes == 32 * 4 * MIB


def which_route(rank: int, options: Sequence[dict[str, Any]]) -> str:
    one = transport(**options[rank])
    if rank == 0:
        one.send_checkpoint([1], {"w": torch.arange(1 << 16)})
    else:
        assert torch.equal(one.recv_checkpoint(0)["w"], torch.arange(1 << 16))
    assert one.report is not None
    return one.report.route


def test_both_ends_must_ask_for_it_and_memory_goes_first() -> None:
    with ranks(2) as fleet:
        for options, route in (
            (({}, {}), "nixl"),
            (({"nixl": False}, {}), "group"),
            (({}, {"nixl": None}), "group"),
            (({"same_host": True}, {"same_host": True}), "memory"),
            (({"same_host": True}, {"same_host": False}), "nixl"),
        ):
            assert run(fleet, which_route, options) == [route, route], options


def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**options: Any) -> Any:
        group: Any = type("Group", (), {"send": print, "recv": print})()
        return transfuse.PGTransport(group, TIMEOUT, "cpu", **options)._options.nixl

    assert make() is None
    monkeypatch.setenv("TRANSFUSE_NIXL", "1")
    assert make() is True
    assert make(nixl=False) is False
    monkeypatch.setenv("TRANSFUSE_NIXL", "yes")
    with pytest.raises(ValueError, match="TRANSFUSE_NIXL must be 0 or 1, got 'yes'"):
        make()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("pip install transfuse[nixl]")):
        make(nixl=True)


# -------------------------------------------------------------------------------------------- sources that fall silent


def read_slowly(rank: int, bytes_per_second: float, seconds: float) -> Any:
    """Rank 1 reads 64 MiB; both announce when bytes move."""
    announced: list[int] = []
    lines = Lines()

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if any(p.bytes for p in progress.values()) and not announced:
            announced.append(1)
            announce("moving")

    tensors = {f"w{i:02}": torch.full((1 << 18,), float(i + 1 if rank == 0 else 0)) for i in range(64)}
    mover = transport(lambda: tensors, timeout=seconds, max_bytes_per_second=bytes_per_second, progress=show)
    if rank == 0:
        return mover.send_checkpoint([1], tensors)
    began = time.monotonic()
    try:
        mover.recv_checkpoint(0)
    except transfuse.TransfuseError as error:
        touched = {f"['{name}']" for name, tensor in tensors.items() if tensor.any()}
        return type(error).__name__, time.monotonic() - began, touched, set(error.torn)
    assert mover.report is not None
    exact = all(bool((tensor == i + 1).all()) for i, tensor in enumerate(tensors.values()))
    fell_back = [line for line in lines.lines if "using the group route" in line]
    return mover.report.route, exact, fell_back, nixl_agent.get(0).left


@pytest.mark.parametrize("environment", [{}, TCP], ids=["default", "tcp"])
def test_a_source_that_dies_while_it_is_read_is_noticed(environment: dict[str, str]) -> None:
    with ranks(2, environment) as fleet:
        fleet.start(read_slowly, 5e6, 20.0)
        fleet.wait_for(1, "moving")
        fleet.kill(0)
        died, received = fleet.outcomes(deadline=60)
    assert died.error is not None
    name, seconds, touched, torn = received.get()
    assert name == "PeerLost"
    assert seconds < 20
    assert touched <= torn
    assert 0 < len(torn) < 64


def test_a_source_that_freezes_is_given_up_and_the_group_brings_the_rest_when_it_thaws() -> None:
    """What the given up reads write when the source thaws is staging that nobody uses any more."""
    with ranks(2, TCP) as fleet:
        fleet.start(read_slowly, 20e6, 16.0)
        fleet.wait_for(1, "moving")
        fleet.freeze(0)
        time.sleep(7)  # The receiver gives up after 4 s, and the source's conversation after 16 s.
        fleet.thaw(0)
        sent, received = fleet.outcomes(deadline=90)
    sent.get()
    route, exact, fell_back, left = received.get()
    assert "group" in route
    assert exact
    assert len(fell_back) == 1
    assert "NIXL read nothing for 4.0 s" in fell_back[0]
    assert left > 0, "reads that were given up must be kept"


def test_a_source_that_freezes_for_good_is_a_timeout() -> None:
    with ranks(2, TCP) as fleet:
        fleet.start(read_slowly, 20e6, 4.0)
        fleet.wait_for(1, "moving")
        fleet.freeze(0)
        (received,) = fleet.outcomes(deadline=60, ranks=[1])
    name, _, touched, torn = received.get()
    assert name in ("PeerTimeout", "PeerLost")
    assert touched <= torn


def stop_midway(rank: int) -> Any:
    """The source's caller stops when bytes have moved."""

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if rank == 0 and any(p.bytes for p in progress.values()):
            raise KeyError("enough")

    tensors = {f"w{i:02}": torch.full((1 << 18,), float(i + 1 if rank == 0 else 0)) for i in range(64)}
    mover = transport(lambda: tensors, timeout=8.0, max_bytes_per_second=5e6, progress=show)
    try:
        if rank == 0:
            mover.send_checkpoint([1], tensors)
        else:
            mover.recv_checkpoint(0)
    except (KeyError, transfuse.TransfuseError) as error:
        for tensor in tensors.values():
            tensor.fill_(-1.0)  # From now on this is allowed.
        return type(error).__name__, len(nixl_agent.get(0)._lingering)
    return "nothing was raised", 0


def test_a_source_that_stops_takes_its_lease_back() -> None:
    with ranks(2) as fleet:
        sent, received = run(fleet, stop_midway)
    assert sent == ("KeyError", 1), "the source keeps what may still be read"
    assert received[0] == "PeerLost" or issubclass(getattr(transfuse, received[0]), transfuse.PeerError)


def test_a_served_state_is_read_too() -> None:
    nixl_agent.get(60)
    with transfuse.serve(state(1), nixl=True, same_host=False) as server:
        fetched = transfuse.fetch(server.address, nixl=True, same_host=False)
    assert_exact(state(1), fetched.state)
    assert fetched.report.route == "nixl"


def lose_payload(rank: int, names: Sequence[str]) -> Any:
    """NIXL says that reads are done, but the first of 4 MiB have brought nothing."""
    skipped: list[int] = []

    def prepare(self: Agent, name: str, theirs: vm.Ranges, mine: vm.Ranges) -> Any:
        if int(theirs[:, 1].sum()) > MIB and len(skipped) < 2:
            skipped.append(1)
            theirs, mine = theirs[-1:].copy(), mine[-1:].copy()
            theirs[:, 1] = mine[:, 1] = 16
        return real(self, name, theirs, mine)

    own = {name: torch.zeros(1 << 20) for name in names}
    one = transport(lambda: own)
    if rank == 0:
        return one.send_checkpoint([1], {name: torch.rand(1 << 20) + 1 for name in names})
    real = Agent.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "prepare", prepare)
        one.recv_checkpoint(0)
    assert one.report is not None
    whole = all(bool((tensor >= 1).all()) for tensor in own.values())
    return len(skipped), whole, one.report.route, one.report.repaired > 0


def test_reads_that_bring_nothing_are_found_by_the_sources_digests() -> None:
    with ranks(2) as fleet:
        _, received = run(fleet, lose_payload, [f"w{i}" for i in range(8)])
    assert received == (2, True, "nixl+group", True)


# ------------------------------------------------------------------------------------------------- proof and lease


def ignore(nbytes: int) -> None:
    """Nobody limits or watches."""


def told(described: Described) -> Pull:
    never: Any = None
    return Pull(
        manifest=described.manifest,
        cut=never,
        landing=never,
        staging_bytes=64 * MIB,
        rate_limit=ignore,
        went_on=ignore,
        at_once=lambda most: most,
        timeout=4.0,
    )


@pytest.fixture
def leased() -> Iterator[tuple[NixlLease, NixlEntry, Pull]]:
    nixl_agent.get(60)
    described = describe({"w": torch.arange(1 << 16), "v": torch.ones(5)}, Limits())
    with NixlLease() as lease:
        entry = lease.export(described)
        assert entry is not None
        yield lease, NixlEntry.decode(entry), told(described)


def test_a_reader_reads_this_processes_own_memory(leased: tuple[NixlLease, NixlEntry, Pull]) -> None:
    _, entry, pull = leased
    reader = NixlReader(entry, pull)
    found = np.zeros(1 << 16, dtype=np.int64)
    size = np.array([found.nbytes])
    theirs = vm.ranges(reader.storages[:1], size)
    begun: list[int] = []
    failed = reader.read(theirs, vm.ranges(np.array([found.ctypes.data]), size), begins=begun.append)
    assert not len(failed)
    assert found.tolist() == list(range(1 << 16))
    assert begun[-1] == found.nbytes
    reader.close()
    reader.close()


def test_a_reader_notices_that_the_lease_has_ended(leased: tuple[NixlLease, NixlEntry, Pull]) -> None:
    lease, entry, pull = leased
    reader = NixlReader(entry, pull)
    reader.recheck()
    lease.end()
    with pytest.raises(Unreadable, match="does not hold the token"):
        reader.recheck()
    reader.close()
    with pytest.raises(Unreadable, match="does not hold the token"):
        NixlReader(entry, pull)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token": bytes(TOKEN_BYTES)}, "does not hold the token"),
        ({"token_address": 4096}, "NIXL could not prepare a read"),
        ({"version": "0.1"}, "NIXL has version .* here, and 0.1 at the source"),
    ],
)
def test_what_is_not_so_is_unreadable(
    leased: tuple[NixlLease, NixlEntry, Pull], changes: dict[str, Any], says: str
) -> None:
    _, entry, pull = leased
    with pytest.raises(Unreadable, match=says):
        NixlReader(msgspec.structs.replace(entry, **changes), pull)


@pytest.mark.parametrize(
    "changes",
    [
        {"token": b"short"},
        {"token_address": -1},
        {"token_address": 1 << 63},
        {"storages": bytes(8)},
        {"storages": bytes(17)},
        {"storages": b"\xff" * 16},
    ],
)
def test_addresses_that_cannot_be_are_refused(
    leased: tuple[NixlLease, NixlEntry, Pull], changes: dict[str, Any]
) -> None:
    _, entry, pull = leased
    with pytest.raises(MalformedEntry):
        NixlReader(msgspec.structs.replace(entry, **changes), pull)


def test_damaged_entries_never_reach_nixl(leased: tuple[NixlLease, NixlEntry, Pull]) -> None:
    """UCX ends the process for much of this."""
    _, entry, _ = leased
    whole, draw = entry.encode(), random.Random(7)
    refused = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 8])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.2:
            data = data[: draw.randrange(len(data))]
        try:
            read = NixlEntry.decode(bytes(data))
        except MalformedEntry:
            refused += 1
            continue
        # What was damaged is checked later: by the version, the token or the addresses.
        assert (read.agent, read.metadata) == (entry.agent, entry.metadata)
    assert refused > 2000
    for size in (0, 1, 100, 1000):
        with pytest.raises(MalformedEntry):
            NixlEntry.decode(draw.randbytes(size))
    other = f"transfuse-{'0' * 32}"
    for changes in ({"agent": other}, {"agent": "x"}, {"metadata": b""}, {"metadata": bytes(50), "digest": bytes(16)}):
        with pytest.raises(MalformedEntry):
            NixlEntry.decode(msgspec.structs.replace(entry, **changes).encode())


# -------------------------------------------------------------------------------------------------- the agent's care


def test_storages_stay_registered_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = nixl_agent.get(60)
    gc.collect()
    agent.drop_dead()
    registered: list[int] = []
    real = Agent.register

    def register(self: Agent, windows: Sequence[nixl_agent.Window]) -> None:
        registered.append(len(windows))
        real(self, windows)

    monkeypatch.setattr(Agent, "register", register)
    before = len(agent._registered)
    kept = {"a": torch.ones(1000), "b": torch.ones(2000)}

    def offer() -> None:
        with NixlLease() as lease:
            assert lease.export(describe(kept, Limits())) is not None

    offer()
    assert registered == [2, 1], "two storages, and the token"
    offer()
    assert registered == [2, 1, 1], "they are still registered"
    assert len(agent._registered) == before + 2
    del kept["b"]
    gc.collect()
    offer()
    assert len(agent._registered) == before + 1


ALONE = """
import os, sys, time
import torch
from transfuse._wire import nixl_agent
agent = nixl_agent.get(60)
data = torch.ones(1 << 20)
agent.register([(data.data_ptr(), data.nbytes)])
{}
print("well")
"""
FORK = """
child = os.fork()
if child == 0:
    assert nixl_agent._holder.agent is None
    sys.exit(3)
until = time.monotonic() + 30
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    assert time.monotonic() < until, "the child hangs"
    time.sleep(0.05)
assert os.waitstatus_to_exitcode(ended[1]) == 3
"""
LEFT = "agent.leave(None, data)"
IDLE = """
before = time.process_time()
time.sleep(1)
used = time.process_time() - before
assert used < 0.5, f"an idle agent used {used} s of a second"
"""


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(FORK, id="fork"),
        pytest.param("", id="plain", marks=pytest.mark.soak),
        pytest.param(LEFT, id="left", marks=pytest.mark.soak),
        pytest.param(IDLE, id="idle", marks=pytest.mark.soak),
    ],
)
def test_a_process_with_an_agent_ends_well(work: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(work)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def test_an_agent_that_is_still_being_made_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(nixl_agent._Holder):
        def make(self) -> None:
            """Never ready."""

    monkeypatch.setattr(nixl_agent, "_holder", Late())
    monkeypatch.setattr(nixl_route, "NIXL_AGENT_SECONDS", 0.05)
    described = describe({"w": torch.ones(10)}, Limits())
    with caplog.at_level(logging.INFO, "transfuse"), NixlLease() as lease:
        assert lease.export(described) is None
    assert caplog.messages[-1:] == [
        "this source does not offer the NIXL route: this process's NIXL agent is still being made"
    ]


# ------------------------------------------------------------------------------------------------------ several hosts


@contextmanager
def on_hosts(*environments: dict[str, str]) -> Iterator[Fleet]:
    """A rank on each host, with its environment."""
    try:
        hosts = Hosts(len(environments), mbit=1000)
        hosts.__enter__()
    except Unavailable as error:
        pytest.skip(str(error))
    try:
        with Fleet(len(environments)) as fleet:
            run(fleet, move_in, [hosts.namespace(i) for i in range(len(environments))], environments)
            yield fleet
    finally:
        hosts.__exit__(None, None, None)


def move_in(rank: int, namespaces: list[str], environments: Sequence[dict[str, str]]) -> None:
    settle_in(rank, environments[rank])
    settle(namespaces[rank], TIMEOUT)
    # UCX looks for interfaces in /sys, which shows those of the namespace in which it was mounted.
    libc = ctypes.CDLL(None, use_errno=True)
    private = 1 << 18 | 1 << 14
    for failed in (
        libc.unshare(0x20000),
        libc.mount(b"none", b"/", None, private, None),
        libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
    ):
        assert not failed, os.strerror(ctypes.get_errno())


def between_hosts(rank: int) -> Any:
    lines = Lines()
    own = state(5)
    one = transport(lambda: own)
    if rank == 0:
        return one.send_checkpoint([1], state(6))
    assert_exact(state(6), one.recv_checkpoint(0), in_place=True)
    assert one.report is not None
    return one.report.route, [line for line in lines.lines if "using the group route" in line]


def test_between_hosts_over_tcp() -> None:
    with on_hosts(TCP, TCP) as fleet:
        assert run(fleet, between_hosts)[1] == ("nixl", [])


def test_a_source_that_cannot_be_reached_through_nixl_is_served_by_the_group() -> None:
    """The source's agent listens on loopback only, so no other host reaches it."""
    with on_hosts(TCP | {"UCX_NET_DEVICES": "lo"}, TCP) as fleet:
        route, lines = run(fleet, between_hosts)[1]
    assert route == "group"
    assert len(lines) == 1
