"""The memory route: read straight from the source's address space, under a lease, or not at all."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

import transfuse
from moves import CPU, Pair, pair
from transfuse._memory import vm
from transfuse._wire import memory_route
from transfuse._wire.memory_route import MemoryLease, Reader
from transfuse._wire.route import Unreadable
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Fleet, ProcessPool, Ranks, announce

TIMEOUT = timedelta(seconds=10)
NONE = np.zeros(0, dtype=np.int64)


@pytest.fixture
def two() -> Iterator[Pair]:
    with pair() as ranks:
        yield ranks


def transport(give: Any = None, **options: Any) -> transfuse.PGTransport:
    return transfuse.PGTransport(cast(Any, dist.group.WORLD), TIMEOUT, CPU, give, **options)


def state(seed: int) -> dict[str, Any]:
    random = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    wide = random(300, 400)
    return {
        "large": random(3 << 20),
        "small": [random(n) for n in range(1, 200)],
        "rows": wide[10:200],
        "columns": wide[:, 5:90],
        "sparse columns": random(500, 300)[:, ::7],
        "turned": random(64, 48, 32).permute(2, 0, 1),
        "bytes": torch.arange(11, dtype=torch.uint8)[3:10],
        "complex": random(100, dtype=torch.complex128)[::3],
        "step": 4,
    }


# -------------------------------------------------------------------------------------------------------- who uses it


def move_between_processes(rank: int, same_host: bool) -> Any:
    if rank == 0:
        sender = transport(same_host=same_host)
        sender.send_checkpoint([1, 2, 3], state(1))
        sender.send_checkpoint([1, 2, 3], state(2))
        assert sender.report is not None
        return sender.report.route, sender.report.bytes, sender.report.read_bytes
    fresh = transport()
    assert_exact(state(1), fresh.recv_checkpoint(0))
    own = state(3)
    in_place = transport(lambda: own)
    arrived = in_place.recv_checkpoint(0)
    assert_exact(state(2), arrived, in_place=True)
    assert arrived["large"] is own["large"]
    assert fresh.report is not None
    assert in_place.report is not None
    return fresh.report.route, in_place.report.route, in_place.report.read_bytes


def test_processes_of_one_host_read_from_memory(pool4: ProcessPool) -> None:
    sent, *received = (outcome.get() for outcome in pool4.run(move_between_processes, True))
    nbytes = received[0][2]
    assert received == [("memory", "memory", nbytes)] * 3
    assert sent == ("memory", 3 * nbytes, 3 * nbytes)


def test_a_source_that_does_not_allow_it_uses_the_group(pool4: ProcessPool) -> None:
    sent, *received = (outcome.get() for outcome in pool4.run(move_between_processes, False))
    assert received == [("group", "group", 0)] * 3
    assert sent[0] == "group"


def test_ranks_that_are_threads_of_one_process_use_it(two: Pair) -> None:
    sent, received = two.outcomes(state(1))
    assert_exact(state(1), received.get())
    assert sent.get().report.route == "memory"


def test_a_receiver_or_the_environment_can_turn_it_off(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, received = two.outcomes(state(1), same_host=False)
    assert_exact(state(1), received.get())
    assert sent.get().report.route == "group"
    monkeypatch.setenv("TRANSFUSE_SAME_HOST", "0")
    sent, received = two.outcomes(state(1))
    assert_exact(state(1), received.get())
    assert sent.get().report.route == "group"
    monkeypatch.setenv("TRANSFUSE_SAME_HOST", "perhaps")
    with pytest.raises(ValueError, match="TRANSFUSE_SAME_HOST must be 0 or 1"):
        transfuse.PGTransport(cast(Any, two.ranks.pgs[0]), TIMEOUT, CPU)


def test_threads_follow_the_cpus_that_the_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert vm.threads() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert vm.threads() == min(len(before), vm.MAX_THREADS)


# ---------------------------------------------------------------------------------------------- why it cannot be used


class Lines(logging.Handler):
    """What is logged, in a process that ends with its test: it stays."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.channels: list[str] = []
        logger = logging.getLogger("transfuse")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.channels.append(record.getMessage())


def receive_as_nobody(rank: int) -> Any:
    if rank == 0:
        return transport().send_checkpoint([1], state(1))
    channels = Lines()
    os.setgid(65534)
    os.setuid(65534)
    taker = transport()
    assert_exact(state(1), taker.recv_checkpoint(0))
    assert taker.report is not None
    return taker.report.route, [line for line in channels.channels if "group route" in line]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_by_the_kernel_and_served_over_the_group_with_one_log_line() -> None:
    with Fleet(2) as fleet:
        fleet.start(receive_as_nobody)
        sent, received = fleet.outcomes(deadline=60)
    sent.get()
    route, channels = received.get()
    assert route == "group"
    assert len(channels) == 1
    assert "not permitted" in channels[0]
    assert "rank 0" in channels[0]


def test_a_process_that_does_not_hold_the_token_is_not_read() -> None:
    with MemoryLease() as lease:
        mine = lease.describe(NONE)
        Reader(mine, 0).close()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            stranger = type(mine)(other.pid, mine.token_address, mine.token, b"")
            with pytest.raises(Unreadable, match=r"does not hold the token|not permitted"):
                Reader(stranger, 0)
            other.communicate(b"\n")
        with pytest.raises(Unreadable, match=f"no process {other.pid}"):
            Reader(stranger, 0)
        wrong = type(mine)(mine.pid, mine.token_address, bytes(32), b"")
        with pytest.raises(Unreadable, match="does not hold the token"):
            Reader(wrong, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("pid", 0), ("pid", 1 << 40), ("token", b"short"), ("storages", b"12345678"), ("token_address", -1)],
)
def test_a_malformed_description_of_memory_is_refused(field: str, value: Any) -> None:
    with MemoryLease() as lease:
        mine = lease.describe(NONE)
        fields = {name: getattr(mine, name) for name in mine.__struct_fields__}
        with pytest.raises(ValueError, match=r"malformed|impossible"):
            Reader(type(mine)(**{**fields, field: value}), 0)


# ---------------------------------------------------------------------------------------------------------- the lease


def test_a_lease_ends_with_its_block_whatever_ends_it() -> None:
    lease = MemoryLease()
    mine = lease.describe(NONE)

    def work() -> None:
        with lease:
            Reader(mine, 0).close()
            raise KeyError

    with pytest.raises(KeyError):
        work()
    with pytest.raises(Unreadable, match="does not hold the token"):
        Reader(mine, 0)


def test_a_reader_notices_that_the_lease_has_ended() -> None:
    with MemoryLease() as lease, Reader(lease.describe(NONE), 0) as reader:
        reader.recheck()
        lease.end()
        with pytest.raises(Unreadable, match="does not hold the token"):
            reader.recheck()


def test_permission_under_yama_is_asked_for_while_any_lease_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This kernel may be without Yama: what is asked of it is recorded."""
    asked: list[int] = []
    monkeypatch.setattr(memory_route, "_permission", memory_route._Permission())
    monkeypatch.setattr(memory_route._Permission, "_set", staticmethod(lambda who: asked.append(who.value)))
    with MemoryLease():
        with MemoryLease():
            assert asked == [2**64 - 1]
        assert asked == [2**64 - 1]
    assert asked == [2**64 - 1, 0]


def test_a_source_that_stops_takes_its_lease_back(two: Pair) -> None:
    """The source's progress callback raises while a slow receiver reads: nothing read after that passes for good."""

    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if progress[1].bytes:
            raise RuntimeError("stop here")

    large = {"w": torch.randn(16 << 20)}
    own = torch.zeros(16 << 20)
    # It reads for 3 s: longer than the source waits for a goodbye.
    options = {"progress": stop, "max_bytes_per_second": 20e6}
    sent, received = two.errors(large, {"w": own}, source=options, timeout=timedelta(seconds=2))
    assert isinstance(sent, RuntimeError)
    assert isinstance(received, transfuse.PeerError)
    assert "stop here" in str(received)
    assert received.torn == ("['w']",)


# ---------------------------------------------------------------------------------------------- sources that are gone


def read_slowly(rank: int, bytes_per_second: float) -> Any:
    """Rank 1 reads 200 MiB; both announce when bytes move."""
    announced: list[int] = []

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if any(p.bytes for p in progress.values()) and not announced:
            announced.append(1)
            announce("moving")

    tensors = {f"w{i:02}": torch.full((1 << 20,), float(i + 1 if rank == 0 else 0)) for i in range(50)}
    mover = transport(lambda: tensors, max_bytes_per_second=bytes_per_second, progress=show)
    dist.barrier()
    if rank == 0:
        return mover.send_checkpoint([1], tensors)
    try:
        mover.recv_checkpoint(0)
    except transfuse.TransfuseError as error:
        touched = {f"['{name}']" for name, tensor in tensors.items() if tensor.any()}
        return type(error).__name__, str(error), touched, set(error.torn)
    assert mover.report is not None
    return mover.report.route, all(bool((tensor == i + 1).all()) for i, tensor in enumerate(tensors.values()))


def test_a_source_that_dies_while_it_is_read_is_noticed_and_named() -> None:
    with Fleet(2) as fleet:
        # Slow enough to be far from done when the source is dead, however busy the machine is.
        fleet.start(read_slowly, 10e6)
        fleet.wait_for(1, "moving")
        fleet.kill(0)
        fleet.outcomes(deadline=30, ranks=[0])
        started = time.monotonic()
        died, received = fleet.outcomes(deadline=30)
        assert time.monotonic() - started < TIMEOUT.total_seconds()
    assert died.error is not None
    name, text, touched, torn = received.get()
    assert name == "PeerLost"
    assert "rank 0 ended while its memory was being read" in text
    assert touched <= torn
    assert 0 < len(torn) < 50


def test_a_source_that_freezes_while_it_is_read_stays_readable() -> None:
    with Fleet(2) as fleet:
        fleet.start(read_slowly, 100e6)
        fleet.wait_for(1, "moving")
        fleet.freeze(0)
        (received,) = fleet.outcomes(deadline=30, ranks=[1])
    assert received.get() == ("memory", True)


# ------------------------------------------------------------------------------------------- memory that cannot be read


def secret_memory(nbytes: int) -> mmap.mmap:
    """Memory of this process that the kernel reads for nobody (memfd_secret)."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(447, 0)
    if descriptor < 0:
        pytest.skip(f"no memfd_secret here: {os.strerror(ctypes.get_errno())}")
    os.ftruncate(descriptor, nbytes)
    return mmap.mmap(descriptor, nbytes)


def test_what_cannot_be_read_comes_over_the_group(two: Pair) -> None:
    secret = torch.frombuffer(secret_memory(8 << 20), dtype=torch.float32)
    secret.normal_()
    mixed = {"plain": torch.randn(2 << 20), "secret": secret, "small": torch.randn(5)}
    sent, received = two.outcomes(mixed)
    assert_exact(mixed, received.get())
    assert sent.get().report.route == "memory+group"


def test_an_address_that_is_wrong_falls_back_for_that_region_alone(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Reader.__init__

    def misled(self: Reader, *args: Any) -> None:
        real(self, *args)
        self.storages = self.storages.copy()
        self.storages[1] = 4096

    monkeypatch.setattr(Reader, "__init__", misled)
    mixed = {"a": torch.randn(2 << 20), "b": torch.randn(2 << 20), "c": torch.randn(2 << 20)}
    sent, received = two.outcomes(mixed)
    assert_exact(mixed, received.get())
    report = sent.get().report
    assert report.route == "memory+group"
    assert report.read_bytes == 16 << 20
    assert report.bytes == 24 << 20


def receive_with_many_files(rank: int) -> Any:
    if rank == 0:
        return transport().send_checkpoint([1], state(1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    taker = transport()
    assert_exact(state(1), taker.recv_checkpoint(0))
    assert taker.report is not None
    for file in files:
        os.close(file)
    return taker.report.route


def test_a_receiver_with_many_open_files_reads_too(pool4: ProcessPool) -> None:
    outcomes = pool4.run(receive_with_many_files, ranks=[0, 1])
    outcomes[0].get()
    assert outcomes[1].get() == "memory"


@pytest.mark.parametrize("kind", [ValueError, OSError])
def test_what_the_callers_own_callback_raises_is_nobody_elses_fault(two: Pair, kind: type[Exception]) -> None:
    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes:
            raise kind("my own")

    options = {"max_bytes_per_second": 40e6}
    sent, received = two.errors({"w": torch.randn(4 << 20)}, progress=stop, source=options)
    assert type(received) is kind
    assert isinstance(sent, transfuse.SendFailed)
    assert kind.__name__ in str(sent.causes[1])


# ---------------------------------------------------------------------------------------------------------- verifying


def test_verify_reads_twice_and_says_so(two: Pair) -> None:
    def receive(rank: int, pg: Any, verify: bool | None) -> Any:
        mover = transfuse.PGTransport(pg, TIMEOUT, CPU, verify=verify)
        if rank == 0:
            return mover.send_checkpoint([1], state(1))
        assert_exact(state(1), mover.recv_checkpoint(0))
        assert mover.report is not None
        return mover.report.verified

    assert two.ranks.run(receive, [True, True])[1] is True
    assert two.ranks.run(receive, [None, None])[1] is False


def test_verify_names_a_leaf_that_changes_while_it_is_read(two: Pair) -> None:
    moving, done = torch.zeros(8 << 20), threading.Event()

    def change() -> None:
        while not done.is_set():
            moving.add_(1)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        while not moving[0]:  # A busy machine lets the thread wait.
            time.sleep(0.001)
        sent, received = two.errors({"still": torch.ones(8 << 20), "moving": moving}, verify=True)
    finally:
        done.set()
        thread.join()
    assert isinstance(received, transfuse.SourceMutated)
    assert received.rank == 0
    assert received.leaves == ("['moving']",)
    assert "rank 0 changed its tensors while it sent them: ['moving']" in str(received)
    assert isinstance(sent, transfuse.SendFailed)
    assert isinstance(sent.causes[1], transfuse.SourceMutated)
    assert "['moving']" in str(sent)


# ------------------------------------------------------------------------------------------------- reading by address


def ranges(*rows: tuple[int, int]) -> vm.Ranges:
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)


def test_ranges_are_read_in_order_and_bad_ones_are_named() -> None:
    source = np.arange(50_000, dtype=np.uint8)
    target = np.zeros(50_000, dtype=np.uint8)
    base, to = source.ctypes.data, target.ctypes.data
    theirs = ranges((base + 100, 50), (64, 20), (base, 100), (base + 500, 0), (4096, 7), (base + 40_000, 9000))
    mine = ranges((to, 50), (to + 50, 20), (to + 70, 100), (to + 170, 0), (to + 170, 7), (to + 200, 9000))
    assert vm.read(os.getpid(), theirs, mine, workers=2).tolist() == [1, 4]
    assert (target[:50] == source[100:150]).all()
    assert (target[70:170] == source[:100]).all()
    assert (target[200:9200] == source[40_000:49_000]).all()


def test_more_ranges_and_bytes_than_one_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm, "VM_CALL_BYTES", 10_000)
    monkeypatch.setattr("transfuse._wire.memory_route.VM_CALL_BYTES", 10_000)
    monkeypatch.setattr(vm, "VM_THREAD_BYTES", 1)
    source = np.random.default_rng(1).integers(0, 256, 400_000, dtype=np.uint8)
    target = np.zeros_like(source)
    starts = np.arange(3000) * 100
    size = np.full(3000, 60)
    size[-1] = 90_000
    seen: list[int] = []
    failed = vm.read(
        os.getpid(),
        vm.ranges(source.ctypes.data + starts, size),
        vm.ranges(target.ctypes.data + starts, size),
        workers=3,
        went_on=seen.append,
    )
    assert not len(failed)
    assert sum(seen) == size.sum()
    for start, length in zip(starts, size, strict=True):
        assert (target[start : start + length] == source[start : start + length]).all()
        assert not target[start + length : start + length + 40].any() or length > 60


def test_neighbours_on_both_sides_are_joined() -> None:
    theirs = ranges((100, 10), (110, 5), (115, 0), (115, 5), (130, 5), (135, 5))
    mine = ranges((900, 10), (910, 5), (1, 0), (915, 5), (920, 5), (930, 5))
    joined = vm.join(theirs, mine)
    assert joined[0].tolist() == [[100, 20], [130, 5], [135, 5]]
    assert joined[1].tolist() == [[900, 20], [920, 5], [930, 5]]


def test_what_a_watcher_raises_ends_the_read() -> None:
    source, target = np.zeros(40 << 20, dtype=np.uint8), np.zeros(40 << 20, dtype=np.uint8)

    def stop(nbytes: int) -> None:
        raise KeyError(nbytes)

    one = ranges((source.ctypes.data, source.nbytes))
    with pytest.raises(KeyError):
        vm.read(os.getpid(), one, ranges((target.ctypes.data, target.nbytes)), workers=2, went_on=stop)


def test_concurrent_transfers_hold_leases_of_their_own() -> None:
    with Ranks(4) as ranks:

        def work(rank: int, pg: Any) -> Any:
            mover = transfuse.PGTransport(pg, TIMEOUT, CPU)
            if rank < 2:
                return mover.send_checkpoint([rank + 2], state(rank))
            assert_exact(state(rank - 2), mover.recv_checkpoint(rank - 2))
            assert mover.report is not None
            return mover.report.route

        assert ranks.run(work)[2:] == ["memory", "memory"]
