"""Targets in memory that is read-only or gone: refused by name, never written, never the peer's fault.

A write there ends the process, so all of it runs in processes of the pool. Functions here run in its workers.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import pathlib
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import transfuse
from transfuse._state.memory_maps import Mappings
from transfuse.dcp import PeerReader
from transfuse.dropin.torch import PGTransport as DropIn
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Fleet, ProcessPool

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=20)
PAGE = mmap.PAGESIZE
#: Bytes of a target: it is packed with others, or travels by itself in several parcels.
SIZES = {"small": 2 * PAGE, "large": 12 << 20}
NOT_WRITABLE = "the target's memory cannot be written: "

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
#: Where no system puts anything by itself, so that what is unmapped stays unmapped.
_addresses = itertools.count(0x1000_0000_0000, 1 << 30)


# ------------------------------------------------------------------------------------------------------------- memory


def anonymous(nbytes: int) -> torch.Tensor:
    """A tensor in a mapping of its own, which is never given back."""
    address = next(_addresses)
    writable, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    assert _libc.mmap(address, nbytes, writable, private, -1, 0) == address
    array = np.ctypeslib.as_array((ctypes.c_float * (nbytes // 4)).from_address(address))
    return torch.from_numpy(array)


def protect(tensor: torch.Tensor, permits: int, *, skip: int = 0) -> torch.Tensor:
    assert _libc.mprotect(tensor.data_ptr() + skip, tensor.nbytes - skip, permits) == 0
    return tensor


def read_only_file(nbytes: int) -> torch.Tensor:
    with tempfile.NamedTemporaryFile(suffix=" weights.bin") as file:
        file.write(np.full(nbytes // 4, 7, dtype=np.float32).tobytes())
        file.flush()
        return torch.from_numpy(np.memmap(file.name, dtype=np.float32, mode="r"))


def half_read_only(nbytes: int) -> torch.Tensor:
    return protect(anonymous(nbytes), mmap.PROT_READ, skip=nbytes // 2)


def without_access(nbytes: int) -> torch.Tensor:
    return protect(anonymous(nbytes), 0)


def unmapped(nbytes: int) -> torch.Tensor:
    tensor = anonymous(nbytes)
    assert _libc.munmap(tensor.data_ptr(), nbytes) == 0
    return tensor


def freed(nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(nbytes // 4)
    tensor.untyped_storage().resize_(0)
    return tensor


#: How a target may be unwritable, and what is said about it.
WAYS: dict[str, tuple[Callable[[int], torch.Tensor], str]] = {
    "file": (read_only_file, f"{NOT_WRITABLE}it is mapped read-only from /"),
    "half": (half_read_only, f"{NOT_WRITABLE}it is mapped read-only;"),
    "no access": (without_access, f"{NOT_WRITABLE}it is mapped without access;"),
    "unmapped": (unmapped, f"{NOT_WRITABLE}it is not mapped: it has been freed while the tensor was in use;"),
    "freed": (freed, "the target's storage has been freed or shrunk"),
}


# ------------------------------------------------------------------------------------------------------ conversations


def transport(target: Any = None, **options: Any) -> transfuse.PGTransport:
    callback = None if target is None else lambda: target
    return transfuse.PGTransport(cast(Any, dist.group.WORLD), TIMEOUT, CPU, callback, **options)


def what(nbytes: int) -> dict[str, Any]:
    """What the sources have."""
    n = nbytes // 4
    small = [torch.full((5,), float(i)) for i in range(20)]
    return {"w": torch.arange(n, dtype=torch.float32), "good": small, "v": torch.ones(n), "new": torch.ones(3)}


def failure(act: Callable[[], object]) -> transfuse.TransfuseError:
    try:
        act()
    except transfuse.TransfuseError as error:
        return error
    raise AssertionError("nothing was refused")


def refuse_then_move(rank: int, way: str, size: str, sources: int, options: dict[str, Any]) -> Any:
    """The last rank cannot be written; then it can, over the same group. What both ends were told."""
    nbytes, route = SIZES[size], {"same_host": options.get("same_host", True)}
    if rank < sources:
        error = failure(lambda: transport(**route).send_checkpoint([sources], what(nbytes)))
        transport(**route).send_checkpoint([sources], what(nbytes))
        return str(error)
    bad = WAYS[way][0]
    good = [torch.full((5,), -1.0) for _ in range(20)]
    target = {"w": bad(nbytes), "good": good, "v": bad(nbytes)}
    wrong = failure(lambda: transport(target, **options).recv_checkpoint(list(range(sources))))
    assert not wrong.torn
    assert all(torch.equal(one, torch.full((5,), -1.0)) for one in good)
    own = {"w": torch.zeros(nbytes // 4), "good": good, "v": torch.zeros(nbytes // 4)}
    arrived = transport(own, **options).recv_checkpoint(list(range(sources)))
    assert_exact(what(nbytes), arrived)
    assert arrived["w"] is own["w"]
    return wrong


def meet(pool: ProcessPool, act: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    return [outcome.get() for outcome in pool.run(act, *args, ranks=range(ranks))]


def meet_once(act: Callable[..., Any], *args: Any) -> list[Any]:
    """The same in processes of their own, for what leaves the group unusable."""
    with Fleet(2) as fleet:
        fleet.start(act, *args)
        return [outcome.get() for outcome in fleet.outcomes()]


def judge(told: list[Any], way: str, paths: tuple[str, ...] = ("['w']", "['v']")) -> None:
    *sources, error = told
    assert type(error) is transfuse.TargetMismatch, repr(error)
    assert len(error.mismatches) == len(paths), error.mismatches
    for path, line in zip(paths, error.mismatches, strict=True):
        assert line.startswith(f"{path}: {WAYS[way][1]}"), line
    for source in sources:
        assert "TargetMismatch" in source, source
        assert paths[0] in source, source


@pytest.mark.parametrize("route", ["memory", "group"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_targets_that_cannot_be_written_are_all_named(pool4: ProcessPool, way: str, size: str, route: str) -> None:
    judge(meet(pool4, refuse_then_move, way, size, 1, {"same_host": route == "memory"}), way)


OPTIONS: dict[str, dict[str, Any]] = {
    "atomic": {"atomic": True},
    "delta": {"delta": True},
    "atomic delta": {"atomic": True, "delta": True},
    "cast": {"cast": True},
    "verify": {"verify": True},
    "rules": {"map_path": {}},
    "rules atomic": {"map_path": {}, "atomic": True},
}


@pytest.mark.parametrize("way", ["file", "unmapped", "freed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_whatever_else_is_asked_for(pool4: ProcessPool, name: str, way: str) -> None:
    # With rules nothing arrives fresh.
    act = refuse_by_rules if "map_path" in OPTIONS[name] else refuse_then_move
    judge(meet(pool4, act, way, "small", 1, OPTIONS[name]), way)


def refuse_by_rules(rank: int, way: str, size: str, sources: int, options: dict[str, Any]) -> Any:
    nbytes = SIZES[size]
    if rank == 0:
        error = failure(lambda: transport().send_checkpoint([1], what(nbytes)))
        transport().send_checkpoint([1], what(nbytes))
        return str(error)
    target = {"w": WAYS[way][0](nbytes), "v": WAYS[way][0](nbytes)}
    wrong = failure(lambda: transport(target, **options).recv_checkpoint(0))
    own = {"w": torch.zeros(nbytes // 4)}
    arrived = transport(own, **options).recv_checkpoint(0)
    assert_exact({"w": what(nbytes)["w"]}, arrived)
    return wrong


@pytest.mark.parametrize("route", ["memory", "group"])
@pytest.mark.parametrize("size", SIZES)
def test_from_several_sources(pool4: ProcessPool, size: str, route: str) -> None:
    judge(meet(pool4, refuse_then_move, "file", size, 2, {"same_host": route == "memory"}, ranks=3), "file")


def refuse_shard(rank: int, way: str, size: str, sharded_source: bool, options: dict[str, Any]) -> Any:
    """A DTensor whose local tensor cannot be written."""
    whole = what(SIZES[size])["w"].reshape(-1, 2)

    def rows(local: torch.Tensor, coordinate: int) -> DTensor:
        mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=coordinate)
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    half = len(whole) // 2
    if rank == 0:
        state = {"w": rows(whole[:half], 0) if sharded_source else whole, "b": torch.ones(3)}
        error = failure(lambda: transport().send_checkpoint([1], state))
        transport().send_checkpoint([1], state)
        return str(error)
    bad = rows(WAYS[way][0](whole.nbytes // 2).view(-1, 2), 0)
    target = {"w": bad, "b": torch.zeros(3)}
    wrong = failure(lambda: transport(target, **options).recv_checkpoint(0))
    assert not wrong.torn
    assert not target["b"].any()
    local = torch.zeros(half, 2)
    transport({"w": rows(local, 0), "b": torch.zeros(3)}, **options).recv_checkpoint(0)
    assert torch.equal(local, whole[:half])
    return wrong


@pytest.mark.parametrize("options", [{}, {"same_host": False}, {"atomic": True}, {"delta": True}], ids=str)
@pytest.mark.parametrize("source", ["the same shard", "whole"])
@pytest.mark.parametrize("way", ["file", "unmapped"])
def test_shards(pool4: ProcessPool, way: str, source: str, options: dict[str, Any]) -> None:
    judge(meet(pool4, refuse_shard, way, "large", source == "the same shard", options), way, ("['w']",))


def refuse_with_others(rank: int) -> Any:
    nbytes = SIZES["small"]
    if rank == 0:
        return str(failure(lambda: transport().send_checkpoint([1], what(nbytes))))
    bad = read_only_file(nbytes)
    target = {"w": bad, "good": [torch.zeros(4)] * 20, "v": torch.zeros(nbytes // 4)}
    return failure(lambda: transport(target).recv_checkpoint(0))


def test_they_are_listed_with_all_other_mismatches(pool4: ProcessPool) -> None:
    _, error = meet(pool4, refuse_with_others)
    assert type(error) is transfuse.TargetMismatch
    lines = sorted(error.mismatches)
    assert len(lines) == 21
    assert lines[0].startswith("['good'][0]: shape: source (5,), target (4,)")
    assert lines[-1].startswith(f"['w']: {WAYS['file'][1]}")


def receive_only_what_is_offered(rank: int) -> None:
    """A read-only tensor that the source does not have is nobody's target."""
    nbytes = SIZES["small"]
    if rank == 0:
        transport().send_checkpoint([1], {"w": torch.ones(3)})
        return
    target = {"w": torch.zeros(3), "table": read_only_file(nbytes), "empty": unmapped(nbytes)[:0]}
    arrived = transport(target, strict=False).recv_checkpoint(0)
    assert torch.equal(arrived["w"], torch.ones(3))
    assert arrived["table"] is target["table"]


def test_what_gets_nothing_may_be_read_only(pool4: ProcessPool) -> None:
    meet(pool4, receive_only_what_is_offered)


# ----------------------------------------------------------------------------------------------- memory that is usable


def receive_into_mappings(rank: int, directory: str) -> None:
    """All that looks like a file, or is several mappings, and can be written all the same."""
    n = SIZES["large"] // 4
    names = ["private", "shared", "loaded", "memory", "pieces"]
    state = {name: torch.arange(n, dtype=torch.float32) + i for i, name in enumerate(names)}
    if rank == 0:
        transport().send_checkpoint([1], state)
        transport(same_host=False).send_checkpoint([1], state)
        return
    for route in (True, False):
        path = pathlib.Path(directory, f"{route}.bin")
        path.write_bytes(bytes(4 * n))
        torch.save({"w": torch.zeros(n)}, path.with_suffix(".pt"))
        pieces = anonymous(4 * n)
        # Made executable, a page is a mapping of its own, between two others.
        executable = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        assert _libc.mprotect(pieces.data_ptr() + 4 * PAGE, PAGE, executable) == 0
        target = {
            "private": torch.from_file(str(path), shared=False, size=n),
            "shared": torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r+")),
            "loaded": torch.load(path.with_suffix(".pt"), mmap=True)["w"],
            "memory": torch.zeros(n).share_memory_(),  # type: ignore[no-untyped-call]
            "pieces": pieces,
        }
        transport(target, same_host=route).recv_checkpoint(0)
        assert_exact(state, target)


def test_mappings_that_can_be_written_are_targets(pool4: ProcessPool, tmp_path: pathlib.Path) -> None:
    meet(pool4, receive_into_mappings, str(tmp_path))


def send_read_only(rank: int, size: str) -> None:
    nbytes = SIZES[size]
    if rank == 0:
        state = {"file": read_only_file(nbytes), "half": half_read_only(nbytes), "good": [torch.ones(5)] * 20}
        transport().send_checkpoint([1], state)
        transport(same_host=False).send_checkpoint([1], state)
        return
    for route in (True, False):
        n = nbytes // 4
        expected = {"file": torch.full((n,), 7.0), "half": torch.zeros(n), "good": [torch.ones(5)] * 20}
        target = {"file": torch.empty(n), "half": torch.empty(n), "good": [torch.empty(5)] * 20}
        assert_exact(expected, transport(target, same_host=route).recv_checkpoint(0))


@pytest.mark.parametrize("size", SIZES)
def test_a_source_may_be_read_only(pool4: ProcessPool, size: str) -> None:
    meet(pool4, send_read_only, size)


def send_what_is_gone(rank: int, way: str, size: str) -> Any:
    if rank == 0:
        state = {"good": torch.ones(3), "w": WAYS[way][0](SIZES[size])}
        error = failure(lambda: transport().send_checkpoint([1], state))
        transport().send_checkpoint([1], {"good": torch.ones(3)})
        return error
    error = failure(lambda: transport().recv_checkpoint(0))
    assert_exact({"good": torch.ones(3)}, transport().recv_checkpoint(0))
    return error


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("way", "why"),
    [("unmapped", "its memory cannot be read: it is not mapped"), ("no access", "it is mapped without access")],
)
def test_a_source_whose_memory_is_gone_says_so(pool4: ProcessPool, way: str, why: str, size: str) -> None:
    sent, received = meet(pool4, send_what_is_gone, way, size)
    assert type(sent) is transfuse.UnsupportedLeaf, repr(sent)
    assert sent.path == "['w']"
    assert why in str(sent)
    assert type(received) is transfuse.PeerRefused, repr(received)
    assert "['w']" in str(received)


# -------------------------------------------------------------------------------------------------------- other ways in


def fetch_into(rank: int, directory: str) -> Any:
    nbytes = SIZES["large"]
    with transfuse.serve(what(nbytes), token="a secret") as server:
        wrong = failure(
            lambda: (
                transfuse.fetch(server.address, {"w": read_only_file(nbytes)}, token="a secret", timeout=TIMEOUT).state
            )
        )
        own = {"w": torch.zeros(nbytes // 4)}
        transfuse.fetch(server.address, own, token="a secret", timeout=TIMEOUT)
    assert torch.equal(own["w"], what(nbytes)["w"])
    return wrong


def test_fetch(pool4: ProcessPool, tmp_path: pathlib.Path) -> None:
    judge(meet(pool4, fetch_into, str(tmp_path), ranks=1), "file", ("['w']",))


def load_into(rank: int) -> Any:
    nbytes = SIZES["small"]
    if rank == 0:
        return str(failure(lambda: transport().send_checkpoint([1], {"w": what(nbytes)["w"]})))
    with PeerReader(transport(), 0) as reader:
        with pytest.raises(CheckpointException, match="mapped read-only"):
            load({"w": read_only_file(nbytes)}, storage_reader=reader, no_dist=True)
        return str(reader.failure)


def test_dcp(pool4: ProcessPool) -> None:
    sent, received = meet(pool4, load_into)
    assert "TargetMismatch" in sent
    assert f"['w']: {WAYS['file'][1]}" in received


def drop_in(rank: int, size: str) -> Any:
    n = SIZES[size] // 4
    ours = DropIn(cast(Any, dist.group.WORLD), timedelta(seconds=2), CPU)
    if rank == 0:
        gone = failure(lambda: ours.send_checkpoint([1], {"w": unmapped(4 * n)}))
        assert "['w']: its memory cannot be read: it is not mapped" in str(gone)
        state = {"w": torch.ones(n), "t": torch.ones(n // 2, 2)}
        try:
            ours.send_checkpoint([1], state)  # On this wire the sender is not told.
        except transfuse.SendFailed as error:
            return error
        return None
    target = {"w": read_only_file(4 * n), "t": half_read_only(4 * n).view(2, -1).t()}
    theirs = DropIn(cast(Any, dist.group.WORLD), TIMEOUT, CPU, lambda: target)
    return failure(lambda: theirs.recv_checkpoint(0))


@pytest.mark.parametrize("size", SIZES)
def test_the_drop_in(size: str) -> None:
    _, error = meet_once(drop_in, size)
    assert type(error) is transfuse.TargetMismatch, repr(error)
    first, second = error.mismatches
    assert first.startswith("['w']: expected a target with memory to write to, but it is mapped read-only from /")
    assert second.startswith("['t']: expected a target with memory to write to, but it is mapped read-only")


# ------------------------------------------------------------------------------- memory that changes during a transfer


def protect_midway(rank: int, end: int, size: str, same_host: bool) -> Any:
    """One end's memory is usable when it is checked, and no longer when the last bytes move."""
    os.environ["TRANSFUSE_PARCEL_BYTES"] = os.environ["TRANSFUSE_BURST_BYTES"] = str(1 << 16)
    try:
        nbytes, count = (SIZES["large"], 1) if size == "large" else (4 * PAGE, 256)
        memory = [anonymous(nbytes) for _ in range(16)]
        state = {"w": [piece for one in memory for piece in one.chunk(count)]}
        done: list[torch.Tensor] = []

        def show(progress: dict[int, transfuse.Progress]) -> None:
            if rank == end and progress[1 - rank].bytes and not done:
                done.extend(protect(one, mmap.PROT_READ if rank == 1 else 0) for one in memory)

        if rank == 0:
            slow = transport(same_host=same_host, max_bytes_per_second=64.0 * nbytes, progress=show)
            return failure(lambda: slow.send_checkpoint([1], state))
        return failure(lambda: transport(state, same_host=same_host, progress=show).recv_checkpoint(0))
    finally:
        del os.environ["TRANSFUSE_PARCEL_BYTES"], os.environ["TRANSFUSE_BURST_BYTES"]


@pytest.mark.parametrize(("size", "route"), [("small", "group"), ("small", "memory"), ("large", "memory")])
def test_protected_in_the_middle(pool4: ProcessPool, size: str, route: str) -> None:
    sent, received = meet(pool4, protect_midway, 1, size, route == "memory")
    assert type(received) is transfuse.StateError, repr(received)
    assert "could no longer be written in the middle of the transfer: it is mapped read-only" in str(received)
    assert "['w'][" in str(received)
    assert received.torn
    assert "could no longer be written" in str(sent)


def test_a_source_protected_in_the_middle(pool4: ProcessPool) -> None:
    sent, received = meet(pool4, protect_midway, 0, "small", False)
    why = "could no longer be read in the middle of the transfer: it is mapped without access"
    assert why in str(sent), repr(sent)
    assert "['w'][" in str(sent)
    assert type(received) is transfuse.PeerRefused, repr(received)
    assert why in received.cause


def test_a_backend_that_cannot_write_is_not_the_peers_fault() -> None:
    """gloo writes into the target by itself, and takes its connection for broken."""
    _, received = meet_once(protect_midway, 1, "large", False)
    assert type(received) is transfuse.StateError, repr(received)
    assert "could no longer be written in the middle of the transfer: it is mapped read-only" in str(received)


# ----------------------------------------------------------------------------------------------------------- the list


def ends(*tensors: torch.Tensor) -> tuple[Any, Any]:
    start = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
    return start, start + np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)


def test_windows_of_all_kinds() -> None:
    half, gone, none = half_read_only(4 * PAGE), unmapped(2 * PAGE), without_access(PAGE)
    first, second = half[: len(half) // 2], half[len(half) // 2 :]
    windows = ends(half, first, second, torch.ones(5), gone, none)
    assert set(Mappings().faults(*windows, write=True)) == {0, 2, 4, 5}
    assert set(Mappings().faults(*windows, write=False)) == {4, 5}
    assert Mappings().faults(*ends(), write=True) == {}
    # From one mapping over its end into nothing.
    start, end = ends(first)
    assert set(Mappings().faults(start, end + (4 << 20), write=False)) == {0}


def test_a_system_that_lists_no_mappings_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfuse._state.memory_maps.MAPS", "/proc/self/no such list")
    assert Mappings().faults(*ends(unmapped(PAGE)), write=True) == {}
