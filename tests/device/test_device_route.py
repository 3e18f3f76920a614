"""The device memory route: a receiver in another process maps the source's memory and copies it on the device.

All of it on the imitation. What that cannot show is listed in ``docs/accelerators.md``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from device import kind
from device.in_processes import Plan
from device.kind import imitation_only
from device.processes import run_several, run_two
from device.test_device_failures import check, lose
from transfuse._memory import device_handles
from transfuse._wire.device_route import DeviceEntry
from transfuse._wire.memory_route import MemoryEntry
from transfuse._wire.route import MalformedEntry

pytestmark = imitation_only

MIB = 1 << 20
#: The watch for changed tensors packs and copies at most 64 bytes of each, twice.
SAMPLE = 128

_MOVE = """
import logging, time
from device.mirror import Mirror, devices_of, to_cpu
from device.moving import blank, sample
from transfuse.testing.exact import assert_exact

def transport(wire, target=None, **options):
    return transfuse.PGTransport(pg, options.pop("timeout", 20), wire, None if target is None else lambda: target,
                                 device_memory=options.pop("device_memory", True), **options)

def counted(call):
    torch.accelerator.synchronize()
    dist.barrier()
    phantom.reset_counters()
    result = call()
    found = phantom.counters()
    torch.accelerator.synchronize()
    return result, found

def tell(*found):
    print(json.dumps(found), flush=True)
"""

# -------------------------------------------------------------------------------------------- what it costs, and counts

#: By name: the device of the wire, the bytes of a tensor, the number of tensors, and the receiver's options.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "large": ("phantom", 16 * MIB, 2, {}),
    "large beside a wire in main memory": ("cpu", 16 * MIB, 2, {}),
    "small": ("phantom", 4096, 1024, {}),
    "atomic": ("phantom", 4 * MIB, 4, {"atomic": True}),
    "verified": ("phantom", 4 * MIB, 4, {"verify": True}),
    "delta": ("phantom", 4 * MIB, 8, {"delta": True}),
    "limited": ("phantom", 2 * MIB, 4, {"rate": 40 * MIB}),
}

_COUNT = """
def count(wire, size, number, options, turn):
    options = dict(options)
    rate = options.pop("rate", None)
    wrong = lambda i: rank == 1 and not (options.get("delta") and i % 2)
    held = {f"w{i}": torch.full((size,), i % 250 + turn + 3 * wrong(i), dtype=torch.uint8).to("phantom")
            for i in range(number)}

    def move():
        if rank == 0:
            one = transport(wire, verify=options.get("verify"), max_bytes_per_second=rate)
            one.send_checkpoint([1], held)
        else:
            one = transport(wire, held, **options)
            one.recv_checkpoint(0)
        return one.report.route

    route, counts = counted(move)
    for i in range(number):
        assert torch.equal(held[f"w{i}"].cpu(), torch.full((size,), i % 250 + turn, dtype=torch.uint8)), i
    return route, counts

found = {}
for name, case in json.loads(sys.argv[1]).items():
    count(*case, 0)  # Makes pools.
    found[name] = count(*case, 1)
tell(found)
"""


@pytest.fixture(scope="module")
def ends() -> tuple[Any, Any]:
    """The routes and the counters of the source and of the receiver in all cases."""
    kind.load()
    kind.unload()
    (source,), (receiver,) = run_two(_MOVE + _COUNT, json.dumps(CASES))
    return source, receiver


@pytest.mark.parametrize("name", CASES)
def test_no_byte_reaches_main_memory(name: str, ends: tuple[Any, Any]) -> None:
    """But for samples and, with ``verify``, a byte for each parcel that says whether it differs."""
    _, size, number, options = CASES[name]
    for route, counts in (end[name] for end in ends):
        assert route == "device_memory"
        assert counts["host_syncs"] == counts["fallbacks"] == counts["pageable_bytes"] == counts["bytes_to_device"] == 0
        hashed = size * number if "delta" in options else 0
        answers = 64 * number if "verify" in options else 0
        assert counts["bytes_to_host"] <= SAMPLE * number + hashed + answers


@pytest.mark.parametrize("name", CASES)
def test_each_byte_is_copied_once_on_the_device_by_the_receiver(name: str, ends: tuple[Any, Any]) -> None:
    _, size, number, options = CASES[name]
    (_, source), (_, receiver) = (end[name] for end in ends)
    assert source["inner_bytes"] <= SAMPLE * number
    # With delta half of it was there; with atomic the copies are copied into the targets.
    times = 0.5 if "delta" in options else 2 if "atomic" in options else 1
    answers = number if "verify" in options else 0
    assert receiver["inner_bytes"] == size * number * times + answers


# ------------------------------------------------------------------------------------------------------------ exactness

_STATES = """
signed = torch.randn(64, dtype=torch.complex64).conj()
whole = torch.randn(40, 60)
states = {
    "sample": sample(3),
    "views": {"a": whole[3:9, 5:50:2], "b": whole.t()[::3], "c": whole.view(-1)[7:900]},
    "signs": {"c": signed, "n": torch._neg_view(torch.randn(8)), "i": torch.arange(10, dtype=torch.int16)},
    "dtypes": {str(d): torch.arange(37).to(d) for d in (torch.uint8, torch.bool, torch.float16, torch.bfloat16,
               torch.float64, torch.float8_e4m3fn, torch.complex128)},
}
for seed, state in enumerate(states.values()):
    torch.manual_seed(seed)
    state["host"] = torch.arange(1000)  # Main memory, in the same state.
found = []
for name, state in states.items():
    for in_place in (True, False):
        if rank == 0:
            held = Mirror("phantom:1").there({k: v for k, v in state.items() if k != "host"}) | {"host": state["host"]}
            transport("phantom:0").send_checkpoint([1], held)
            continue
        mirror, target = Mirror("phantom:0"), None
        own = blank(state)
        if in_place:
            target = mirror.there({k: v for k, v in own.items() if k != "host"}) | {"host": own["host"]}
        one = transport("phantom:0", target)
        got = one.recv_checkpoint(0)
        torch.accelerator.synchronize()
        assert_exact(state, to_cpu(got), in_place=in_place)
        found.append((name, in_place, one.report.route, sorted(devices_of(got))))
tell(found)
"""


def test_views_tied_strided_and_signed_tensors_arrive_exactly() -> None:
    """Also on a device that is not the current one, and with main memory in the same state."""
    _, (found,) = run_two(_MOVE + "torch.manual_seed(0)\n" + _STATES)
    assert len(found) == 8
    for name, in_place, route, devices in found:
        assert route == "memory+device_memory", (name, in_place)
        assert devices == ["cpu", "phantom:0"]


_RESHARD = """
import torch.distributed.tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

def shard(whole, ranks, placement):
    mesh = DeviceMesh("phantom", torch.tensor(ranks), _init_backend=False, _rank=rank)
    if isinstance(placement, Shard):
        whole = placement._split_tensor(whole, len(ranks), with_padding=False)[0][ranks.index(rank)]
    return whole.contiguous().to("phantom"), mesh

def dtensor(whole, ranks, placement):
    local, mesh = shard(whole, ranks, placement)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())

torch.manual_seed(5)
w, b = torch.randn(240, 900), torch.randn(900)
q, k = torch.randn(30, 20), torch.randn(30, 20)
before, after = [0, 1], [2, 3]
found = []
for options in ({}, {"cast": True}, {"verify": True}, {"atomic": True}):
    if rank in before:
        held = {"w": dtensor(w, before, Shard(0)), "b": dtensor(b, before, Replicate()), "q": q.to("phantom"),
                "k": k.to("phantom")}
        transport("phantom", verify=options.get("verify")).send_checkpoint(after, held)
        continue
    kind = torch.bfloat16 if "cast" in options else torch.float32
    own = {"w": dtensor(torch.zeros(240, 900, dtype=kind), after, Shard(1)),
           "b": dtensor(torch.zeros(900, dtype=kind), after, Replicate()),
           "qk": torch.zeros(60, 20, dtype=kind, device="phantom")}
    one = transport("phantom", own, map_path=[transfuse.Concat(["q", "k"], "qk")], **options)
    got = one.recv_checkpoint(before)
    wanted = {"w": shard(w, after, Shard(1))[0].cpu(), "b": b, "qk": torch.cat([q, k])}
    for name, tensor in wanted.items():
        mine = got[name]._local_tensor if isinstance(got[name], DTensor) else got[name]
        assert torch.equal(mine.cpu(), tensor.to(kind)), (options, name)
    found.append(one.report.route)
dist.barrier()
tell(*found)
"""


def test_shards_that_change_and_casts() -> None:
    """Two sources, two receivers, each a process of its own. Each receiver copies from both sources."""
    *_, one, other = run_several(4, _MOVE + _RESHARD)
    assert one == other == ["device_memory"] * 4


_SEVERAL = """
torch.manual_seed(1)
state = {f"w{i}": torch.randn(100_000) for i in range(4)}
if rank == 0:
    one = transport("phantom")
    one.send_checkpoint([1, 2, 3], {name: tensor.to("phantom") for name, tensor in state.items()})
else:
    own = {name: torch.zeros(100_000, device="phantom") for name in state}
    one = transport("phantom", own)
    one.recv_checkpoint(0)
    assert all(torch.equal(own[name].cpu(), state[name]) for name in state)
dist.barrier()
tell(one.report.route)
"""


def test_several_receivers_at_once() -> None:
    assert run_several(4, _MOVE + _SEVERAL) == [["device_memory"]] * 4


# ------------------------------------------------------------------------------------------------------ order and proof

_PENDING = """
found = []
for seconds, timeout in ((0.5, 20), (1.5, 4)):
    own = torch.zeros(1000, device="phantom")
    side = torch.Stream(device="phantom")
    with side:
        if rank == 0:
            phantom.slow_fill_(own, 3.0, seconds)
            one = transport("phantom", timeout=timeout)
            one.send_checkpoint([1], {"w": own})
        else:
            # What the receiver had queued comes first, too.
            phantom.slow_fill_(own, 9.0, 0.3)
            one = transport("phantom", {"w": own}, timeout=timeout)
            one.recv_checkpoint(0)
            assert own.cpu().unique().tolist() == [3.0]
    found.append(one.report.route)
    dist.barrier()
tell(*found)
"""


def test_work_that_was_queued_comes_first() -> None:
    """A source that would have to wait too long for it does not offer this route: the group has its order."""
    assert run_two(_MOVE + _PENDING) == [["device_memory", "group"]] * 2


#: Rank 1 copies by itself, in steps that the two ranks agree on.
_BY_HAND = """
import numpy as np
from transfuse._limits import Limits
from transfuse._memory import streams
from transfuse._memory.packing import RegionPlace
from transfuse._plan import parcels
from transfuse._plan.regions import lay_out
from transfuse._state import manifest
from transfuse._state.leaves import dense
from transfuse._wire.device_route import DeviceEntry, DeviceRoute
from transfuse._wire.route import Pull, Unreadable

def agree(value=None, source=0):
    box = [value]
    dist.broadcast_object_list(box, source, device=torch.device("cpu"))
    return box[0]

class Land:
    writes_targets = True

    def __init__(self, tensor, count):
        self.tensor, self.addresses, self.convert = tensor, np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)

    def touch(self, regions):
        pass

    def run(self, region, low, high):
        return dense.over(self.tensor.untyped_storage(), torch.uint8, low, (high - low,), (1,))

def opened(entry, described, tensor, went_on, at_once=lambda most: most):
    cut = parcels.cut(lay_out(described.manifest), 1 << 16)
    pull = Pull(manifest=described.manifest, cut=cut, landing=Land(tensor, len(cut.regions)), staging_bytes=1 << 26,
                rate_limit=lambda n: None, went_on=went_on, at_once=at_once, timeout=10.0)
    return DeviceRoute().open(entry, pull), list(range(len(cut)))
"""

_REVOKED = """
own = torch.full((1 << 18,), 5, dtype=torch.uint8, device="phantom")
described = manifest.describe({"w": own}, Limits())
if rank == 0:
    with DeviceRoute().lease(5.0) as lease:
        agree(lease.export(described))
        dist.barrier()  # It has copied everything.
        own[: 1 << 16] = 6
        torch.accelerator.synchronize()
        dist.barrier()
        dist.barrier()  # It has copied the first half again.
        lease.end()
        del own, described
        torch.accelerator.synchronize()
        phantom.read(torch.empty(1, device="phantom"))
        dist.barrier()
        dist.barrier()
    tell()
else:
    entry = agree()
    here = torch.zeros(1 << 18, dtype=torch.uint8, device="phantom")
    torch.accelerator.synchronize()
    seen = []

    def went_on(nbytes):
        seen.append(nbytes)
        if len(seen) == 2:
            dist.barrier()
            dist.barrier()

    with streams.Streams([here.device]).conversation():
        reading, numbers = opened(entry, described, here, lambda nbytes: None)
        same = [reading.pull(numbers), reading.differing(numbers)]
        dist.barrier()
        dist.barrier()
        changed = reading.differing(numbers)
        reading.close()
        reading, numbers = opened(entry, described, here, went_on, lambda most: 1 << 16)
        reading.recheck()
        assert reading.readable() == numbers and not reading.pull(numbers)
        try:
            reading.recheck()
        except Unreadable as error:
            refused = str(error)
        reading.close()
        try:
            opened(entry, described, here, went_on)
        except Unreadable as error:
            again = str(error)
    bytes_ = here.cpu()
    dist.barrier()
    tell(same, changed, refused, again, seen, bytes_[: 1 << 17].unique().tolist(), bytes_[1 << 17 :].unique().tolist())
"""


def test_a_lease_that_ends_in_the_middle_is_found_out() -> None:
    """The imitation shows what was copied after that: memory that has been freed and overwritten.

    Before that the source changes its tensor, and a second read finds it.
    """
    _, (same, changed, refused, again, seen, first, rest) = run_two(_MOVE + _BY_HAND + _REVOKED)
    assert same == [[], []]
    assert changed == [0]
    assert "does not hold the token" in refused
    assert "does not hold the token" in again
    assert seen == [1 << 16] * 4
    assert first == [5, 6]
    assert rest == [0xCD]


_HOSTILE = """
own = torch.full((1 << 18,), 5, dtype=torch.uint8, device="phantom")
described = manifest.describe({"w": own}, Limits())
if rank == 0:
    with DeviceRoute().lease(5.0) as lease:
        pipe = os.pipe()
        agree((lease.export(described), pipe[0], os.open("/dev/null", os.O_RDWR), os.open("/etc/passwd", os.O_RDONLY)))
        dist.barrier()
    tell()
else:
    import msgspec
    entry, *files = agree()
    honest = DeviceEntry.decode(entry)
    here = torch.zeros(1 << 18, dtype=torch.uint8, device="phantom")
    (handle,) = honest.handles
    forged = [{"handles": [b"%d" % file]} for file in (*files, 999)]
    forged += [{"handles": [b"-1"]}, {"handles": [b"x" * 66]}, {"handles": [b"../1"]}, {"kind": "cuda"}]
    forged += [{"storages": np.array([0, far], dtype="<i8").tobytes()} for far in (1 << 36, (64 << 30) - 8, 1 << 61)]
    forged += [{"proof": msgspec.structs.replace(honest.proof, **what)} for what in (
        {"token": bytes(32)}, {"pid": os.getpid()}, {"pid": os.getppid()}, {"token_address": 0})]
    refusals = []
    with streams.Streams([here.device]).conversation():
        for what in forged:
            try:
                changed = msgspec.msgpack.encode(msgspec.structs.replace(honest, **what))
                reading, numbers = opened(changed, described, here, lambda n: None)
                reading.pull(numbers)
            except Unreadable as error:
                refusals.append(str(error))
    assert here.cpu().unique().tolist() == [0]
    dist.barrier()
    tell(len(forged), refusals)
"""


def test_what_cannot_be_opened_is_left_to_the_group() -> None:
    """Also handles of files that are no memory: a pipe, a device, a file."""
    _, (count, refusals) = run_two(_MOVE + _BY_HAND + _HOSTILE)
    assert len(refusals) == count, refusals
    assert sum(one.endswith("is not memory") for one in refusals) == 2, refusals


def entry(**changes: Any) -> bytes:
    proof = MemoryEntry(1, 4096, bytes(32), b"")
    made = DeviceEntry(proof, "phantom", [b"7"], np.array([[0, 512], [-1, 0]], dtype="<i8").tobytes())
    return msgspec.msgpack.encode(msgspec.structs.replace(made, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": ""},
        {"kind": "CUDA"},
        {"kind": "../x"},
        {"kind": 5},
        {"handles": [b""]},
        {"handles": [b"x" * 5000]},
        {"handles": []},
        {"handles": "7"},
        {"storages": b""},
        {"storages": bytes(24)},
        {"storages": np.array([[0, -1], [-1, 0]], dtype="<i8").tobytes()},
        {"storages": np.array([[0, 1 << 62], [-1, 0]], dtype="<i8").tobytes()},
        {"storages": np.array([[1, 0], [-1, 0]], dtype="<i8").tobytes()},
        {"storages": np.array([[-2, 0], [-1, 0]], dtype="<i8").tobytes()},
        {"proof": None},
        {"proof": [1, 2]},
    ],
    ids=repr,
)
def test_malformed_entries_are_refused(changes: dict[str, Any]) -> None:
    DeviceEntry.decode(entry()).places(2)
    with pytest.raises(MalformedEntry, match="malformed description of device memory"):
        DeviceEntry.decode(entry(**changes)).places(2)


def test_a_kind_of_device_without_handles_has_none() -> None:
    assert device_handles.exported(torch.zeros(4).untyped_storage()) is None
    with pytest.raises(OSError, match="no memory of other processes can be opened on meta"):
        device_handles.opened(torch.device("meta"), 1, b"1", 0, 8)


def test_torch_still_has_what_cuda_needs() -> None:
    """That is all that can be known of it without CUDA."""
    for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"):
        assert callable(getattr(torch.UntypedStorage, name))


# ------------------------------------------------------------------------------------------------------ lost processes


@pytest.fixture
def parcels(small_parcels: None) -> Iterator[None]:
    kind.load()
    yield
    kind.unload()


@pytest.mark.usefixtures("parcels")
@pytest.mark.parametrize(
    ("sources", "receivers", "lost", "how"),
    [
        ((0, 1), (2,), 0, "killed"),
        ((0,), (1, 2), 2, "killed"),
        pytest.param((0,), (1,), 0, "killed", marks=pytest.mark.soak),
        pytest.param((0,), (1,), 1, "killed", marks=pytest.mark.soak),
        pytest.param((0, 1), (2,), 0, "frozen", marks=pytest.mark.soak),
        pytest.param((0,), (1, 2), 2, "frozen", marks=pytest.mark.soak),
    ],
)
def test_a_process_that_is_lost(sources: tuple[int, ...], receivers: tuple[int, ...], lost: int, how: str) -> None:
    plan = Plan(True, False, sources, receivers, lost, same_group=how == "killed", mapped=True)
    check(plan, how, lose(plan, how))
