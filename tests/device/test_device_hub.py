"""A Hub whose state lies on accelerators: what is copied, that no commit is torn, and that captures are left alone.

Each case is a process of its own, with counters of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from device.processes import run_program

pytestmark = pytest.mark.usefixtures("device")

#: What the programs share. ``tell`` ends one of them.
_HUB = """
import contextlib, threading, time, urllib.error, urllib.request
import safetensors.torch
KIB, MIB = 1 << 10, 1 << 20

def state(count, nbytes, devices=(0,), value=1):
    return {f"w{i}": torch.full((nbytes,), value, dtype=torch.uint8, device=f"phantom:{devices[i % len(devices)]}")
            for i in range(count)}

def hub(tree, **options):
    return transfuse.hub(tree, step=0, host="127.0.0.1", timeout=options.pop("timeout", 30), **options)

def get(opened, again=True):
    url = f"{opened.endpoint}/live/model/resolve/main/model.safetensors"
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return safetensors.torch.load(answer.read())
        except urllib.error.HTTPError as error:
            # On a busy machine the copy takes longer than a request waits: ask again.
            if error.code != 503 or not again:
                raise

def get_new(opened, tree, work):
    # What a client finds after the next step.
    with opened.mutating():
        work(tree)
    return get(opened)

def counted(call):
    torch.accelerator.synchronize(0), torch.accelerator.synchronize(1)
    phantom.reset_counters()
    result = call()
    return result, phantom.counters()

def add(tree):
    torch._foreach_add_(list(tree.values()), 1)

def values(found):
    return sorted({int(value) for tensor in found.values() for value in tensor.unique()})

def tell(*found):
    print(json.dumps(found))
"""


def run(program: str) -> Any:
    return run_program(_HUB + program)


@pytest.mark.parametrize(
    ("count", "nbytes", "devices", "registered"),
    [
        (512, 4096, "0,", True),
        (512, 3001, "1, 0", True),
        (8, 4 << 20, "1, 0", True),
        (512, 4096, "1,", False),
        (8, 4 << 20, "0, 1", False),
    ],
)
def test_a_commit_is_copied_once_into_pinned_memory(count: int, nbytes: int, devices: str, registered: bool) -> None:
    """The first, and a later one. Also on a device that is not current, and where memory cannot be registered."""
    first, later, found = run(f"""
phantom.set_registration({registered})
tree = state({count}, {nbytes}, ({devices}))
with hub(tree) as opened:
    _, first = counted(lambda: get(opened))
    found, later = counted(lambda: get_new(opened, tree, add))
assert len(found) == {count} and all(tensor.numel() == {nbytes} for tensor in found.values())
tell(first, later, values(found))
""")
    total = count * nbytes
    for counters in (first, later):
        assert counters["host_syncs"] == counters["fallbacks"] == counters["pageable_bytes"] == 0
        # The watch for changes outside of mutating() reads 64 bytes of each tensor, now and before, some times.
        assert total <= counters["bytes_to_host"] <= total + 4 * 128 * count
        if registered:
            assert counters["pinned_most_bytes"] <= 1 << 20
        else:
            assert counters["pinned_most_bytes"] <= 20 << 20
    assert found == [2]


def test_every_kind_of_tensor_is_exact() -> None:
    """Several devices and main memory in one state, and what is no run of memory."""
    assert run("""
lots = torch.Generator().manual_seed(1)
def some(*shape, dtype=torch.float32): return torch.randn(shape, generator=lots).to(dtype)
held = {"a": some(300, 7), "b": some(64, dtype=torch.bfloat16), "c": some(5, 5).t(), "d": some(600, 600)[:, 3:300],
        "e": torch.tensor(7), "f": torch.empty(0, 3), "g": some(3, dtype=torch.float64), "h": some(9) > 0,
        "i": some(2 * MIB // 4), "j": torch.arange(3, dtype=torch.int8), "k": some(40, 50).t()}
tree = {name: tensor if place == "x" else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype,
        device=f"phantom:{place}").copy_(tensor) for (name, tensor), place in zip(held.items(), "10x100x11x0")}
tree["tied"] = tree["a"]
tree["view"] = tree["i"][1000:2000]
assert not tree["d"].is_contiguous() and not tree["k"].is_contiguous()
with hub(tree) as opened:
    found = get(opened)
held["view"] = held["i"][1000:2000]
assert found.keys() == held.keys(), found.keys()
tell(all(torch.equal(found[name], tensor) for name, tensor in held.items()))
""") == [True]


@pytest.mark.parametrize("registered", [True, False])
def test_strided_tensors_of_a_full_device_are_copied_in_pieces(registered: bool) -> None:
    counters, equal = run(f"""
phantom.set_registration({registered})
held = {{"turned": torch.arange(1_500_000).view(1500, 1000).t(), "every": torch.arange(10_001, dtype=torch.int16)[::2]}}
tree = {{name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="phantom:1").copy_(tensor)
         for name, tensor in held.items()}}
torch.accelerator.synchronize(1)
with hub(tree) as opened:
    phantom.set_most_bytes(1, phantom.memory_allocated(1) + 256 * KIB)
    found, counters = counted(lambda: get(opened, again=False))
tell(counters, [torch.equal(found[name], tensor) for name, tensor in held.items()])
""")
    assert equal == [True, True]
    assert counters["host_syncs"] == counters["pageable_bytes"] == 0


def test_small_tensors_between_those_of_main_memory_are_not_overwritten() -> None:
    assert run("""
tree = {f"w{i}": torch.full((9,), i, dtype=torch.uint8, device="cpu" if i % 3 == 1 else "phantom:0") for i in range(99)}
with hub(tree) as opened:
    found = get(opened)
tell(all(torch.equal(found[name], tensor.cpu()) for name, tensor in tree.items()))
""") == [True]


@pytest.mark.parametrize("copies", ["fast", "slow"])
def test_the_next_step_waits_until_the_copies_have_landed(copies: str) -> None:
    """Steps on a side stream with work pending on it, one after the other, while a client asks again and again."""
    rate = {"fast": "0", "slow": "60 * MIB"}[copies]
    found, last = run(f"""
tree = state(40, 64 * KIB, (0, 1))
seen, over = [], threading.Event()
def ask():
    while not over.is_set():
        seen.append(values(get(opened)))
side = [torch.Stream(device=f"phantom:{{i}}") for i in range(2)]
with hub(tree, hold=0.01) as opened:
    phantom.set_copy_rate({rate})
    thread = threading.Thread(target=ask)
    thread.start()
    for step in range(2, 12):
        with side[0], side[1]:
            phantom.sleep(0.02)
            with opened.mutating():
                phantom.slow_fill_(tree["w0"], step, 0.02)
                for tensor in list(tree.values())[1:]: tensor.fill_(step)
        time.sleep(0.02)
    over.set()
    thread.join()
    last = values(get(opened))
tell(seen, last)
""")
    assert all(len(step) == 1 for step in found), found
    assert last == [11]


@pytest.mark.parametrize("reader", ["hub", "serve"])
def test_readers_come_after_all_blocks_on_whatever_streams_they_ended(reader: str) -> None:
    """Two blocks on two streams that know nothing of each other, as two optimizers are; the first one is slow."""
    found = run(f"""
tree = state(4, 64 * KIB, (0, 1))
first, second = ([torch.Stream(device=f"phantom:{{device}}") for device in (0, 1)] for _ in range(2))
with transfuse.{reader}(tree, step=0, host="127.0.0.1", timeout=30) as opened:
    with first[0], first[1], opened.mutating():
        for device in (0, 1):
            with torch.accelerator.device_index(device): phantom.sleep(0.3)
        add(tree)
    with second[0], second[1], opened.mutating(): pass
    found = get(opened) if {reader == "hub"} else transfuse.fetch(opened.address, timeout=30).state
tell(values(found))
""")
    assert found == [[2]]


def test_a_device_that_is_late_fails_the_commit_and_nothing_else() -> None:
    """The memory of the late copies stays until they have landed. Then there are commits again."""
    status, found = run("""
tree = state(4, 2 * MIB, (1,))
with hub(tree, timeout=0.5) as opened:
    phantom.set_copy_rate(4 * MIB)
    status = []
    for _ in range(2):
        try:
            get(opened, again=False)
        except urllib.error.HTTPError as error:
            status.append([error.code, error.read().decode()])
        phantom.set_copy_rate(0)
    with opened.mutating(): add(tree)
    torch.accelerator.synchronize(1)
    found, until = None, time.monotonic() + 30
    while found is None and time.monotonic() < until:
        with contextlib.suppress(urllib.error.HTTPError): found = values(get(opened))
        time.sleep(0.05)
tell(status, found)
""")
    assert [code for code, _ in status] == [503, 503]
    assert "has not ended after 0.5 s" in status[0][1]
    assert "an earlier commit" in status[1][1]
    assert found == [2]


def test_an_error_between_two_copies_keeps_the_memory_until_they_have_landed() -> None:
    said, found = run("""
from transfuse._memory import device_copies
tree = state(8, MIB)
with hub(tree) as opened:
    phantom.set_copy_rate(4 * MIB)
    queue = device_copies.to_host
    def broken(runs, padding=64):
        queue(list(runs)[:6], padding)
        if padding == 1: raise RuntimeError("the driver")  # Not where samples are read.
    device_copies.to_host = broken
    said = []
    for _ in range(2):
        try:
            get(opened, again=False)
        except urllib.error.HTTPError as error:
            said.append(error.read().decode())
        device_copies.to_host = queue
    phantom.set_copy_rate(0)
    torch.accelerator.synchronize()
    found = values(get(opened))
tell(said, found)
""")
    assert "the driver" in said[0]
    assert "an earlier commit" in said[1]
    assert found == [1]


def test_memory_is_let_go_when_the_state_grows() -> None:
    """The old registration ends before its memory is freed: other memory there can be registered."""
    assert run("""
tree = state(4, 2 * MIB)
with hub(tree, hold=0.01) as opened:
    for step in range(3):
        with opened.mutating():
            tree[f"more{step}"] = torch.full((4 * MIB,), 1, dtype=torch.uint8, device="phantom:1")
        time.sleep(0.05)
        found, counters = counted(lambda: get(opened))
        assert counters["pageable_bytes"] == 0
tell(len(found), values(found))
""") == [7, [1]]


_READERS = {
    "a hub": """
def ask():
    get(opened)
opened = hub(tree, hold=0.01)
""",
    "a server": """
def ask():
    transfuse.fetch(opened.address, timeout=30)
opened = transfuse.serve(tree, step=0, host="127.0.0.1", timeout=30)
""",
}


@pytest.mark.parametrize("reader", _READERS)
def test_nothing_is_asked_during_a_capture_inside_of_mutating(reader: str) -> None:
    """Clients come all the time, most of them in the middle of a capture."""
    forbidden, failures, asked, found = run(f"""
tree = state(24, 64 * KIB, (0, 1))
{_READERS[reader]}
failures, asked, over = [], [], threading.Event()
def visit():
    while not over.is_set():
        try:
            ask()
            asked.append(1)
        except Exception as error:
            failures.append(repr(error))
with opened:
    threads = [threading.Thread(target=visit) for _ in range(2)]
    for thread in threads: thread.start()
    phantom.reset_counters()
    until = time.monotonic() + 30
    for step in range(15):
        with opened.mutating():
            phantom.capturing(True)
            time.sleep(0.02)
            add(tree)
            phantom.capturing(False)
        seen = len(asked)
        while len(asked) == seen and time.monotonic() < until: time.sleep(0.002)
    over.set()
    for thread in threads: thread.join()
    forbidden = phantom.counters()["forbidden"]
torch.accelerator.synchronize(0), torch.accelerator.synchronize(1)
tell(forbidden, failures, len(asked), values({{name: tensor.cpu() for name, tensor in tree.items()}}))
""")
    assert (forbidden, failures, found) == (0, [], [16])
    assert asked >= 15
