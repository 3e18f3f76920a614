"""What a transfer asks of the device and of the bus: host syncs and copied bytes, counted at each end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from device import kind
from device.kind import imitation_only
from device.processes import run_program, run_two

pytestmark = imitation_only

MIB = 1 << 20

#: By name: the device of the wire, the bytes of a tensor, the number of tensors, and the options.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "large": ("phantom", 32 * MIB, 2, {}),
    "large over main memory": ("cpu", 32 * MIB, 2, {}),
    "small over main memory": ("cpu", 4096, 16 * MIB // 4096, {}),
    "delta": ("phantom", 4 * MIB, 8, {"delta": True}),
    "delta over main memory": ("cpu", 4 * MIB, 8, {"delta": True}),
    "atomic": ("phantom", 4 * MIB, 8, {"atomic": True}),
    "atomic over main memory": ("cpu", 4 * MIB, 8, {"atomic": True}),
    "verified": ("phantom", 8 * MIB, 4, {"verify": True}),
}

#: The watch for changed tensors packs and copies at most 64 bytes of each, twice.
SAMPLE = 128

_PROGRAM = """
def count(wire, size, number, options, turn):
    # With delta, the receiver holds half of it already.
    wrong = lambda i: rank == 1 and not (options.get("delta") and i % 2)
    held = {f"w{i}": torch.full((size,), i % 250 + turn + 3 * wrong(i), dtype=torch.uint8).to("phantom")
            for i in range(number)}
    torch.accelerator.synchronize()
    dist.barrier()
    phantom.reset_counters()
    if rank == 0:
        verify = options.get("verify")
        transfuse.PGTransport(pg, 60, wire, same_host=False, verify=verify).send_checkpoint([1], held)
    else:
        transfuse.PGTransport(pg, 60, wire, lambda: held, same_host=False, **options).recv_checkpoint(0)
    counted = phantom.counters()
    for i in range(number):
        assert torch.equal(held[f"w{i}"].cpu(), torch.full((size,), i % 250 + turn, dtype=torch.uint8)), i
    return counted

found = {}
for name, case in json.loads(sys.argv[1]).items():
    count(*case, 0)  # Makes communicators and pools.
    found[name] = count(*case, 1)
print(json.dumps(found), flush=True)
"""

Counts = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def ends() -> tuple[Counts, Counts]:
    """The counters of the source and of the receiver in all cases."""
    kind.load()
    kind.unload()
    source, receiver = run_two(_PROGRAM, json.dumps(CASES))
    print(json.dumps({name: (source[name], receiver[name]) for name in CASES}, indent=1))  # See it with -rA.
    return source, receiver


@pytest.mark.parametrize("name", CASES)
def test_nobody_waits_for_the_device(name: str, ends: tuple[Counts, Counts]) -> None:
    assert [end[name]["host_syncs"] for end in ends] == [0, 0]
    assert [end[name]["fallbacks"] for end in ends] == [0, 0]


@pytest.mark.parametrize("name", CASES)
def test_all_main_memory_is_pinned(name: str, ends: tuple[Counts, Counts]) -> None:
    assert [end[name]["pageable_bytes"] for end in ends] == [0, 0]


@pytest.mark.parametrize("name", [name for name in CASES if "delta" not in name])
def test_each_byte_is_copied_at_most_once(name: str, ends: tuple[Counts, Counts]) -> None:
    """From device to device no byte is, unless it is to be verified. Over main memory each is, once at each end."""
    wire, size, number, options = CASES[name]
    most = size * number if wire == "cpu" or "verify" in options else 0
    for end in ends:
        copied = end[name]["bytes_to_host"] + end[name]["bytes_to_device"]
        assert most <= copied <= most + SAMPLE * number


@pytest.mark.parametrize("name", CASES)
def test_only_small_tensors_are_packed_on_the_device(name: str, ends: tuple[Counts, Counts]) -> None:
    """And once. With ``atomic`` large ones are copied there, too, if the copies lie on the device."""
    _, size, number, _ = CASES[name]
    total, small = size * number, "small" in name
    source, receiver = (end[name]["inner_bytes"] for end in ends)
    assert source <= total * small + SAMPLE * number
    assert receiver == total * (small or name == "atomic")


def test_delta_copies_each_byte_at_most_once(ends: tuple[Counts, Counts]) -> None:
    _, size, number, _ = CASES["delta"]
    for end in ends:
        assert end["delta"]["bytes_to_host"] <= size * number + SAMPLE * number
        assert end["delta"]["bytes_to_device"] == 0


def test_delta_over_main_memory_copies_what_has_changed_once_more(ends: tuple[Counts, Counts]) -> None:
    """Everything is hashed, at both ends. Then what has changed is packed again, to be sent."""
    name = "delta over main memory"
    _, size, number, _ = CASES[name]
    total, changed = size * number, size * number // 2
    source, receiver = ends[0][name], ends[1][name]
    assert source["bytes_to_host"] <= total + changed + SAMPLE * number
    assert receiver["bytes_to_host"] <= total
    assert receiver["bytes_to_device"] <= changed


_FETCH = """
size, number = json.loads(sys.argv[1])
held, own = ({f"w{i}": torch.full((size,), value, dtype=torch.uint8, device=f"phantom:{rank}") for i in range(number)}
             for rank, value in ((0, 7), (1, 0)))
with transfuse.serve(held, step=lambda: 1, token="a long secret") as server:
    torch.accelerator.synchronize(0), torch.accelerator.synchronize(1)
    phantom.reset_counters()
    transfuse.fetch(server.address, own, token="a long secret", same_host=False)
    counted = phantom.counters()
assert all(bytes(tensor.cpu().numpy()) == bytes([7]) * size for tensor in own.values())
print(json.dumps(counted), flush=True)
"""


@pytest.mark.parametrize(("size", "number"), [(4 * MIB, 8), (4096, 1024)])
def test_serve_and_fetch_are_pinned_and_nobody_waits(size: int, number: int) -> None:
    """Both ends are counted together: each byte once from a device, and once to one."""
    kind.load()
    kind.unload()
    counted = run_program(_FETCH, json.dumps([size, number]))
    assert counted["host_syncs"] == counted["fallbacks"] == counted["pageable_bytes"] == 0
    assert size * number <= counted["bytes_to_host"] <= size * number + SAMPLE * number
    assert counted["bytes_to_device"] == size * number
    small = 2 * size * number if size < MIB else 0
    assert counted["inner_bytes"] <= small + SAMPLE * number


_RESTORE = """
size, number = json.loads(sys.argv[1])
held = {f"w{i}": torch.full((size,), i % 250, dtype=torch.uint8, device=f"phantom:{i % 2}") for i in range(number)}
with transfuse.keep(transfuse.State(held), run=f"counted-restore-{os.getpid()}", timeout=60) as keep:
    keep.commit(1)
    with keep.mutating():
        torch._foreach_zero_(list(held.values()))
    phantom.reset_counters()
    assert keep.restore() == 1
    counted = phantom.counters()
assert all(bytes(tensor.cpu().numpy()) == bytes([i % 250]) * size for i, tensor in enumerate(held.values()))
print(json.dumps(counted), flush=True)
"""


@pytest.mark.parametrize(("size", "number"), [(4 * MIB, 8), (4096, 1024)])
def test_restore_is_pinned_and_nobody_waits(size: int, number: int) -> None:
    kind.load()
    kind.unload()
    counted = run_program(_RESTORE, json.dumps([size, number]))
    assert counted["host_syncs"] == counted["fallbacks"] == counted["pageable_bytes"] == counted["bytes_to_host"] == 0
    assert counted["bytes_to_device"] == counted["pinned_bytes"] == size * number
    assert counted["inner_bytes"] == (0 if size >= MIB else size * number)
    # Two buffers for each of the threads that read.
    assert counted["pinned_most_bytes"] <= 64 * MIB
