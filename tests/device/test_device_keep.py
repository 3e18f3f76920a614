"""Commits of a state on an accelerator: what is copied, how, who waits for it, and that no step is torn.

Each case is a process of its own, with counters of its own and a keeper of its own.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from device.processes import BEGIN, fork, run_program, run_two

pytestmark = pytest.mark.usefixtures("device")

#: What the programs share. ``tell`` ends one of them.
_KEEP = """
import contextlib, logging, threading, time
KIB, MIB = 1 << 10, 1 << 20

def state(count, nbytes, devices=(0,), value=1):
    return {f"w{i}": torch.full((nbytes,), value, dtype=torch.uint8, device=f"phantom:{devices[i % len(devices)]}")
            for i in range(count)}

def keep(tree, **options):
    return transfuse.keep(transfuse.State(tree), run=sys.argv[1], timeout=options.pop("timeout", 30), **options)

def counted(call):
    torch.accelerator.synchronize()
    phantom.reset_counters()
    call()
    found = phantom.counters()
    torch.accelerator.synchronize()
    return found

def add(tree):
    torch._foreach_add_(list(tree.values()), 1)

def values(tree):
    return sorted({int(byte) for tensor in tree.values() for byte in (tensor.cpu()[0], tensor.cpu()[-1])})

def tell(*found):
    print(json.dumps(found))
"""


def run(program: str) -> Any:
    return run_program(_KEEP + program, f"device-{uuid.uuid4()}")


@pytest.mark.parametrize(
    ("count", "nbytes", "devices", "copies"),
    [(8192, 4096, (0,), 2), (8, 4 << 20, (0, 1), 8), (3, 40 << 20, (1,), 3), (3000, 700, (1, 0), 4)],
)
def test_a_commit_is_few_copies_into_pinned_memory(
    count: int, nbytes: int, devices: tuple[int, ...], copies: int
) -> None:
    """Also the first: nothing is read twice, nothing is pageable, and the host synchronises with nothing."""
    first, later, loose, outcome, found, extra = run(f"""
tree = state({count}, {nbytes}, {devices})
kept = keep(tree)
first = counted(lambda: kept.commit(1))
later = counted(lambda: kept.commit(2))
with kept.mutating(): add(tree)
torch.accelerator.synchronize(0), torch.accelerator.synchronize(1)
for device in (0, 1): phantom.reset_peak_memory_stats(device)
before = [phantom.memory_allocated(device) for device in (0, 1)]
def step():
    kept.commit(3, wait=False)
    with kept.mutating(): add(tree)
loose = counted(step)
extra = max(phantom.max_memory_allocated(device) - before[device] for device in (0, 1))
kept.restore()
outcome = kept.report.outcome
found = values(tree)
kept.close()
tell(first, later, loose, outcome, found, extra)
""")
    total = count * nbytes
    for counters in (first, later, loose):
        assert (counters["host_syncs"], counters["pageable_bytes"]) == (0, 0)
        assert total <= counters["bytes_to_host"] < 1.01 * total
    # What a stream could change before it is copied is fingerprinted: weights to each device, and sums from there.
    fingerprints = 2 * len(devices)
    assert [first["async_copies"], later["async_copies"], loose["async_copies"]] == [
        copies,
        copies,
        copies + fingerprints,
    ]
    assert loose["bytes_to_device"] == len(devices) * (32 << 10)
    # Small tensors are read three times on the device and written twice, large ones read once.
    assert loose["inner_bytes"] == (2 * total if nbytes < 1 << 20 else 0)
    assert extra <= 16 << 20
    assert (outcome, found) == ("committed", [2])


def test_without_registration_a_commit_goes_through_little_pinned_memory() -> None:
    counters, most, found = run("""
phantom.set_registration(False)
tree = state(40, 4 * MIB, (0, 1))
kept = keep(tree)
kept.commit(1)
with kept.mutating(): add(tree)
counters = counted(lambda: kept.commit(2))
most = counters["pinned_most_bytes"]
with kept.mutating(): add(tree)
kept.commit(3, wait=False)
with kept.mutating(): add(tree)
kept.restore()
tell(counters, most, values(tree))
kept.close()
""")
    assert counters["pageable_bytes"] == 0
    assert counters["bytes_to_host"] < 1.05 * 160 * (1 << 20)
    assert most <= 64 << 20
    assert found == [3]


_NEXT_STEP = {
    "the same stream": "with kept.mutating(): add(tree)",
    "other streams": """
with contextlib.ExitStack() as entered:
    for device in (0, 1):
        other = torch.Stream(device=f"phantom:{device}")
        other.wait_stream(torch.accelerator.current_stream(device))
        entered.enter_context(other)
    with kept.mutating(): add(tree)
""",
    "another thread": """
def work():
    with kept.mutating(): add(tree)
thread = threading.Thread(target=work)
thread.start()
thread.join()
""",
}


@pytest.mark.parametrize("how", _NEXT_STEP)
def test_the_next_step_is_queued_at_once_and_waits_on_the_device(how: str) -> None:
    """Two devices, neither of them current for half of the tensors; the copies are slow."""
    before, queries, outcome, found, then = run(f"""
tree = state(200, 64 * KIB, (0, 1))
kept = keep(tree)
kept.commit(1)
with kept.mutating(): add(tree)
phantom.set_copy_rate(20 * MIB)
kept.commit(2, wait=False)
phantom.reset_counters()
{_NEXT_STEP[how]}
before, queries = kept.report.outcome, phantom.counters()["host_syncs"]
torch.accelerator.synchronize(0), torch.accelerator.synchronize(1)
then = values(tree)
phantom.set_copy_rate(0)
step = kept.restore()
tell(before, queries, [int(step), kept.report.outcome], values(tree), then)
kept.close()
""")
    assert before == "pending"  # The step was queued while the copies were under way.
    assert queries == 0
    assert outcome == [2, "committed"]
    assert found == [2]
    assert then == [3]


_STEPS = {
    "a block": """
def step():
    with side[0], side[1], kept.mutating(): change()
""",
    "an optimizer": """
def step():
    with side[0], side[1]:
        slow()
        for tensor in tree.values(): tensor.grad = torch.full_like(tensor, -1)
        optimizer.step()
""",
    "a block within a block": """
def step():
    with kept.mutating():
        with side[0], side[1], kept.mutating(): change()
""",
    "two blocks on two streams": """
def step():
    with side[0], side[1], kept.mutating(): change()
    with other[0], other[1], kept.mutating(): pass
""",
}


@pytest.mark.parametrize("how", _STEPS)
def test_a_commit_comes_after_the_step_on_whatever_streams_they_are(how: str) -> None:
    """The step is slow, on side streams of two devices, and the stream of commit() does not wait for them.

    Both for the first commit, when the keeper does not know yet where the state lies, and for a later one.
    """
    found = run(f"""
side, other = ([torch.Stream(device=f"phantom:{{device}}") for device in (0, 1)] for _ in range(2))
def slow():
    for device in (0, 1):
        with torch.accelerator.device_index(device): phantom.sleep(0.1)
def change():
    for i, tensor in enumerate(tree.values()):
        tensor.add_(1)
        if i == 3: slow()
{_STEPS[how]}
found = []
for wait in (True, False):
    tree = {{name: tensor.float() for name, tensor in state(8, 16 * KIB, (0, 1)).items()}}
    optimizer = torch.optim.SGD(tree.values(), lr=1.0, foreach=False)
    held = transfuse.State({{"tree": tree, "optimizer": optimizer}})
    kept = transfuse.keep(held, run=sys.argv[1] + str(wait), timeout=30)
    for number in (1, 2):
        for device in (0, 1): side[device].wait_stream(torch.accelerator.current_stream(device))
        step()
        kept.commit(number, wait=wait)
        for device in (0, 1): torch.accelerator.current_stream(device).wait_stream(side[device])
        with kept.mutating(): torch._foreach_zero_(list(tree.values()))
        restored = int(kept.restore())
        found.append([restored, kept.report.outcome, values(tree)])
    kept.close()
tell(*found)
""")
    assert found == [[1, "committed", [2]], [2, "committed", [3]]] * 2


def test_a_restore_comes_after_the_step_on_whatever_stream_it_is() -> None:
    """What a block on a side stream had queued does not overwrite what is restored."""
    found = run("""
tree = state(4, 64 * KIB)
kept = keep(tree)
kept.commit(1)
side = torch.Stream(device="phantom:0")
side.wait_stream(torch.accelerator.current_stream(0))
with side, kept.mutating(): phantom.slow_fill_(tree["w1"], 7, 0.3)
kept.restore()
torch.accelerator.synchronize(0)
tell(values(tree))
kept.close()
""")
    assert found == [[1]]


def test_an_optimizer_in_the_state_waits_on_the_device() -> None:
    outcome, equal = run("""
torch.manual_seed(0)
model = torch.nn.Linear(512, 512).to("phantom:0")
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
kept = keep({"model": model, "optimizer": optimizer})
def step():
    for parameter in model.parameters(): parameter.grad = torch.ones_like(parameter)
    optimizer.step()
step()
kept.commit(1)
step()
phantom.set_copy_rate(4 * MIB)
expected = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
kept.commit(2, wait=False)
step()
phantom.set_copy_rate(0)
step = kept.restore()
tell([int(step), kept.report.outcome], all(torch.equal(expected[n], t.cpu()) for n, t in model.state_dict().items()))
kept.close()
""")
    assert outcome == [2, "committed"]
    assert equal


def test_what_changes_outside_of_mutating_is_dropped_and_copied_first_from_then_on() -> None:
    """Buffers that a forward pass writes (BatchNorm): the device orders the write after their copy."""
    dropped, outcome, found = run("""
tree = state(40, 64 * KIB)
kept = keep(tree)
kept.commit(1)
with kept.mutating(): add(tree)
phantom.set_copy_rate(10 * MIB)
kept.commit(2, wait=False)
tree["w3"].add_(1)
with kept.mutating(): add(tree)
kept.restore()
dropped = kept.report.outcome
kept.commit(3)
for step in (4, 5):
    with kept.mutating(): add(tree)
    kept.commit(step, wait=False)
    tree["w3"].add_(1)
with kept.mutating(): add(tree)
phantom.set_copy_rate(0)
step = kept.restore()
tell(dropped, [int(step), kept.report.outcome], [values({"w": tree["w3"]}), values({"w": tree["w4"]})])
kept.close()
""")
    assert dropped == "dropped"
    assert outcome == [5, "committed"]
    assert found == [[4], [3]]


def test_what_changes_outside_of_mutating_is_known_after_a_restore_and_a_lost_keeper() -> None:
    """Commits go on at once: none is dropped to find out again."""
    reports = run("""
reports = []
tree = state(8, 64 * KIB)
kept = keep(tree, on_report=lambda report: reports.append([report.step, report.outcome]))
def once(step, outside=True):
    with kept.mutating(): add(tree)
    phantom.set_copy_rate(4 * MIB)
    kept.commit(step, wait=False)
    if outside: tree["w3"].add_(1)
    phantom.set_copy_rate(0)
    kept._join()
once(1, outside=False)
once(2)
once(3)
kept.restore()
once(4)
kept._lose(transfuse.CommitReport(0), transfuse._keeper.frames.KeeperLost("the test has lost it"))
kept._reviving.join()
once(5)
tell(*reports)
kept.close()
""")
    assert reports == [[1, "committed"], [2, "dropped"], [3, "committed"], [4, "committed"], [5, "committed"]]


def test_a_restore_has_a_deadline_on_the_device() -> None:
    """Something else is queued on a device that is not current, and does not end. Later it can be restored."""
    error, found = run("""
tree = state(8, MIB, (1,))
kept = keep(tree)
kept.commit(1)
with kept.mutating(): add(tree)
kept._seconds = 0.5
with torch.accelerator.device_index(1): phantom.sleep(4)
try:
    kept.restore()
except transfuse.TransfuseError as failed:
    error = str(failed)
torch.accelerator.synchronize(1)
kept._seconds = 30
step = kept.restore()
tell(error, [int(step), values(tree)])
kept.close()
""")
    assert "phantom:1" in error
    assert "0.5 s" in error
    assert found == [1, [1]]


def test_a_stream_that_waits_for_nobody_is_found_and_from_then_on_the_host_waits() -> None:
    reports, later, found = run("""
tree = state(8, MIB)  # Smaller ones would be packed on the device first, and that takes no time.
reports = []
kept = keep(tree, on_report=lambda report: reports.append([report.step, report.outcome, report.why]))
kept.commit(1)
with kept.mutating(): add(tree)
phantom.set_copy_rate(8 * MIB)
kept.commit(2, wait=False)
other = torch.Stream(device="phantom:0")
with kept.mutating():
    with other: add(tree)
kept.commit(3)
with kept.mutating(): add(tree)
kept.commit(4, wait=False)
with kept.mutating():
    with other: add(tree)
phantom.set_copy_rate(0)
step = kept.restore()
tell(reports, int(step), values(tree))
kept.close()
""")
    assert [report[:2] for report in reports] == [[1, "committed"], [2, "dropped"], [3, "committed"], [4, "committed"]]
    assert "on a stream that did not wait" in reports[1][2]
    assert (later, found) == (4, [4])


@pytest.mark.parametrize(
    ("change", "busy"),
    [
        ("torch._foreach_add_([tensor[64:] for tensor in tree.values()], 1)", 0),
        ("tree['w6'][-1:].add_(1)", 0),
        ("torch._foreach_add_([tensor[64:] for tensor in tree.values()], 1)", 0.4),
    ],
    ids=["all but the first bytes", "one byte", "while the stream of commit() is busy"],
)
@pytest.mark.parametrize(("count", "nbytes"), [(8, 1 << 20), (1000, 8 << 10)], ids=["large", "small"])
def test_no_byte_changes_unseen_before_it_is_copied(change: str, busy: float, count: int, nbytes: int) -> None:
    """A stream that waits for nobody changes the state in a block. A step that it could tear is dropped."""
    outcome, why, step, found = run(f"""
reports = []
tree = state({count}, {nbytes})
kept = keep(tree, on_report=lambda report: reports.append([report.outcome, report.why]))
kept.commit(1)
with kept.mutating(): add(tree)
phantom.set_copy_rate(8 * MIB)
if {busy}: phantom.sleep({busy})  # Work of the job's that has nothing to do with its state.
kept.commit(2, wait=False)
other = torch.Stream(device="phantom:0")
with kept.mutating():
    with other: {change}
torch.accelerator.synchronize(0)
kept._join()
with kept.mutating(): add(tree)
phantom.set_copy_rate(0)
step = kept.restore()
tell(*reports[1], int(step), sorted({{int(byte) for tensor in tree.values() for byte in tensor.cpu().unique()}}))
kept.close()
""")
    # Small tensors are packed into one piece at once, before a stream can change them: that is the step, whole.
    assert (outcome, step, found) in [("dropped", 1, [1]), ("committed", 2, [2])]
    assert outcome == "committed" or "on a stream that did not wait" in why
    assert count > 8 or outcome == "dropped"


def test_a_copy_that_comes_late_harms_no_later_commit() -> None:
    """Until the device has ended, nobody else gets the slot: not even a state of another structure."""
    reports, step, found = run("""
reports = []
tree = state(8, 256 * KIB)
kept = keep(tree, on_report=lambda report: reports.append([report.step, report.outcome, report.why]))
kept.commit(1)
with kept.mutating(): add(tree)
object.__setattr__(kept._committer, "seconds", 0.5)
phantom.sleep(3)
with contextlib.suppress(transfuse.TransfuseError):
    kept.commit(2)
del tree["w7"]
kept.commit(3)
torch.accelerator.synchronize()
with kept.mutating(): add(tree)
kept.commit(4)
with kept.mutating(): add(tree)
step = kept.restore()
tell(reports, int(step), values(tree))
kept.close()
""")
    assert [report[:2] for report in reports] == [[1, "committed"], [3, "skipped"], [4, "committed"]]
    assert "has not ended" in reports[1][2]
    assert (step, found) == (4, [3])


@pytest.mark.parametrize(
    ("error", "wait"), [("KeyboardInterrupt", True), ("RuntimeError", False), ("KeyboardInterrupt", False)]
)
def test_an_error_between_two_copies_gives_the_slot_to_nobody_until_they_have_landed(error: str, wait: bool) -> None:
    """Not even to a state in main memory, which the devices' copies would overwrite."""
    reports, found = run(f"""
from transfuse._memory import device_copies
reports = []
tree = state(8, MIB)
kept = keep(tree, on_report=lambda report: reports.append([report.step, report.outcome, report.why]))
kept.commit(1)
with kept.mutating(): add(tree)
phantom.set_copy_rate(4 * MIB)
queue = device_copies.to_host
def interrupted(runs, padding):
    queue(list(runs)[:6], padding)
    raise {error}
device_copies.to_host = interrupted
with contextlib.suppress({error}): kept.commit(2, wait={wait})
kept._join()
device_copies.to_host = queue
phantom.set_copy_rate(0)
other = {{name: torch.full((MIB,), 9, dtype=torch.uint8) for name in tree}}
for step in range(3, 7): kept.commit(step, state=other)
torch.accelerator.synchronize()
for step in range(7, 9): kept.commit(step, state=other)
kept.detach()
found = {{name: torch.zeros(MIB, dtype=torch.uint8) for name in tree}}
kept = keep(found)
step = kept.restore()
tell(reports, [int(step), values(found)])
kept.close()
""")
    skipped = [report for report in reports if report[1] == "skipped"]
    assert [report[0] for report in skipped] == [3, 4, 5, 6]
    assert all("has not ended" in report[2] for report in skipped)
    assert found == [8, [9]]


def test_during_a_capture_no_thread_asks_a_device() -> None:
    """A graph is captured inside mutating() while copies of a commit are under way."""
    forbidden, outcome, refused, late, found = run("""
tree = state(16, 256 * KIB)
kept = keep(tree)
kept.commit(1)
with kept.mutating(): add(tree)
phantom.set_copy_rate(8 * MIB)
kept.commit(2, wait=False)
phantom.reset_counters()
with kept.mutating():
    phantom.capturing(True)
    time.sleep(1)
    refused = ""
    try:
        kept.commit(3)
    except transfuse.TransfuseError as error:
        refused = str(error)
    with kept.mutating(): add(tree)  # As an optimizer's step in a graph is.
    phantom.capturing(False)
    forbidden = phantom.counters()["forbidden"]
phantom.set_copy_rate(0)
step = kept.restore()
found = values(tree)
kept.commit(3)
with kept.mutating(): add(tree)
phantom.set_copy_rate(8 * MIB)
kept.commit(4, wait=False)
phantom.capturing(True)  # Outside of mutating(): this commit may be lost.
try:
    with kept.mutating(): add(tree)
except transfuse.TransfuseError as error:
    late = str(error)
phantom.capturing(False)
phantom.set_copy_rate(0)
tell(forbidden, [int(step)], refused, late, found)
kept.close()
""")
    assert forbidden == 0
    assert "capture" in refused
    assert "before the capture begins" in late
    assert outcome == [2]
    assert found == [2]


def test_a_step_that_takes_longer_than_the_copy_never_waits_for_it() -> None:
    waits, longer = run("""
tree = state(16, 256 * KIB)
kept = keep(tree)
kept.commit(1)
with kept.mutating(): add(tree)
stream = torch.accelerator.current_stream(0)
phantom.set_copy_rate(40 * MIB)
def stalled(seconds):
    for step in range(3):
        kept.commit(stalled.step, wait=False)
        stalled.step += 1
        phantom.sleep(seconds)
        with kept.mutating(): add(tree)
        torch.accelerator.synchronize()
        kept._join()
    return phantom.stalled(stream)[0]
stalled.step = 2
stalled(0.01)
phantom.reset_counters()
waits = stalled(0.6)
phantom.reset_counters()
longer = stalled(0.0)
tell(waits, longer)
kept.close()
""")
    assert waits == 0
    assert longer >= 1  # Otherwise the copies would not have been slow.


def test_a_commit_of_many_small_tensors_looks_at_none_of_them_before_it_returns() -> None:
    """Python calls for each tensor take longer than all copies. The commit's thread makes them, once for each."""
    before, later, found = run("""
from transfuse._keeper.copying import StateMemory
tree = state(4096, 700, (0, 1))
kept = keep(tree)
kept.commit(1)
with kept.mutating(): add(tree)
bring, calls = StateMemory.bring, []
def counted_bring(memory, storage):
    calls.append(threading.current_thread() is threading.main_thread())
    return bring(memory, storage)
StateMemory.bring = counted_bring
kept.commit(2, wait=False)
with kept.mutating(): add(tree)
kept._join()
before, later = calls.count(True), calls.count(False)
StateMemory.bring = bring
kept.restore()
tell(before, later, values(tree))
kept.close()
""")
    assert (before, later) == (0, 4096)
    assert found == [2]


def test_a_state_of_all_kinds_of_memory_is_exact() -> None:
    """Bundles of main memory and devices, odd sizes, views, empty tensors, and copies that state_dict() returns."""
    equal, counters = run("""
torch.manual_seed(0)
def made(i):
    where = ("cpu", "phantom:0", "phantom:1")[i % 3]
    size = (3, 700, 0, 65_537, 1_500_001, 12)[i % 6]
    return torch.randint(0, 256, (size + 5,), dtype=torch.uint8).to(where)[2:size + 2]
tree = {str(i): made(i) for i in range(60)}
kept = transfuse.keep(lambda: {name: tensor.clone() for name, tensor in tree.items()}, run=sys.argv[1], timeout=30,
                      load=lambda found: [tree[name].copy_(tensor) for name, tensor in found.items()])
kept.commit(1)
for step in (2, 3):
    with kept.mutating():
        for tensor in tree.values(): tensor.add_(1)
    expected = {name: tensor.cpu() for name, tensor in tree.items()}
    counters = counted(lambda: kept.commit(step, wait=False))
    with kept.mutating():
        for tensor in tree.values(): tensor.add_(1)
kept.restore()
tell([name for name, tensor in tree.items() if not torch.equal(tensor.cpu(), expected[name])], counters)
kept.close()
""")
    assert equal == []
    assert counters["pageable_bytes"] == 0


def test_equal_ranks_share_the_copying_and_read_everything_once() -> None:
    """Also in their first commit. What the other rank keeps passes through little memory, and is only hashed."""
    name = f"device-{uuid.uuid4()}"
    program = (
        _KEEP
        + """
tree = state(24, 4 * MIB)
kept = keep(tree, group=pg)
first = counted(lambda: kept.commit(1))
with kept.mutating(): add(tree)
later = counted(lambda: kept.commit(2))
with kept.mutating(): add(tree)
kept.commit(3, wait=False)
shared = kept.report.shared_bytes
with kept.mutating(): add(tree)
step = kept.restore()
tell(first, later, shared, int(step), values(tree))
kept.close()
"""
    )
    total = 24 * (4 << 20)
    for first, later, shared, step, found in run_two(program, name):
        assert shared == total // 2
        assert (step, found) == (3, [3])
        for counters in (first, later):
            assert counters["pageable_bytes"] == 0
            assert total <= counters["bytes_to_host"] < 1.05 * total
            assert counters["host_syncs"] <= 4
            # Two buffers of 16 MiB, and sums. The half that the other rank keeps has 48.
            assert counters["pinned_most_bytes"] <= 40 << 20


def test_eight_equal_ranks_take_little_memory_each() -> None:
    """Each keeps an eighth, and hashes the rest: pinned and ordinary memory beside the state, while it commits."""
    program = (
        BEGIN
        + _KEEP
        + """
dist.init_process_group("gloo")
tree = state(10, 12 * MIB)
def ordinary():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * KIB
most, over = ordinary(), threading.Event()
def watch():
    global most
    while not over.is_set():
        most = max(most, ordinary())
        time.sleep(0.01)
kept = keep(tree)
before = ordinary()
watching = threading.Thread(target=watch)
watching.start()
kept.commit(1)
phantom.reset_counters()
with kept.mutating(): add(tree)
kept.commit(2)
pinned, shared = phantom.counters()["pinned_most_bytes"], kept.report.shared_bytes
over.set()
watching.join()
kept.close()
tell(pinned, most - before, shared)
"""
    )
    total = 10 * (12 << 20)  # What a rank does not keep is far more than the limit.
    found = [json.loads(ended.out.splitlines()[-1]) for ended in fork(program, 8, [f"device-{uuid.uuid4()}"])]
    assert sum(total - shared for _, _, shared in found) == total
    for pinned, ordinary, _ in found:
        assert pinned <= 40 << 20
        # The imitation's pinned memory is ordinary memory, too, and so is what its kernels take for a moment.
        assert ordinary <= 64 << 20


def test_a_block_that_stays_open_keeps_no_commit_waiting() -> None:
    """A step that raises leaves its block to the next one; and a job may commit inside of mutating()."""
    outcomes, found = run("""
model = torch.nn.Linear(64, 64).to("phantom:0")
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
kept = keep({"model": model, "optimizer": optimizer})
def closure(): raise RuntimeError("a bad batch")
with contextlib.suppress(RuntimeError): optimizer.step(closure)
outcomes = [kept.commit(1).outcome, kept.commit(2, wait=False).step]
with kept.mutating(): outcomes.append(kept.commit(3).outcome)
found = int(kept.restore())
tell(outcomes, found)
kept.close()
""")
    assert (outcomes, found) == (["committed", 2, "committed"], 3)


def test_a_full_device_and_one_with_empty_tensors_only() -> None:
    outcome, found = run("""
tree = state(40, 64 * KIB) | {"empty": torch.empty(0, dtype=torch.uint8, device="phantom:1")}
for device in (0, 1): phantom.set_most_bytes(device, phantom.memory_allocated(device))
kept = keep(tree)
kept.commit(1)
for step in (2, 3):
    with kept.mutating(): [tensor.add_(1) for tensor in tree.values()]
    kept.commit(step, wait=False)
with kept.mutating(): [tensor.add_(1) for tensor in tree.values()]
step = kept.restore()
phantom.reset_settings()
tell([int(step), kept.report.outcome], values({name: tree[name] for name in tree if name != "empty"}))
kept.close()
""")
    assert (outcome, found) == ([3, "committed"], [3])


def test_two_blocks_for_each_commit_are_no_changes_outside_of_them() -> None:
    volatile = run("""
tree = state(16, 64 * KIB)
kept = keep(tree)
kept.commit(1)
for step in (2, 3, 4):
    with kept.mutating(): add(tree)
    with kept.mutating(): add(tree)
    kept.commit(step, wait=False)
tell(len(kept._layout.volatile))
kept.close()
""")
    assert volatile == [0]


def test_a_commit_holds_no_device_memory_when_it_has_ended() -> None:
    loose, tight, closed = run("""
tree = state(8, MIB)
kept = transfuse.keep(lambda: {name: tensor.clone() for name, tensor in tree.items()}, run=sys.argv[1], timeout=30,
                      load=lambda found: None)
def allocated():
    torch.accelerator.synchronize()
    return phantom.memory_allocated(0)
before = allocated()
kept.commit(1)
tight = allocated() - before
with kept.mutating(): add(tree)
kept.commit(2, wait=False)
kept._copying.join()
loose = allocated() - before
kept.close()
tell(loose, tight, allocated() - before)
""")
    assert (loose, tight, closed) == (0, 0, 0)


def test_rank_state_on_a_device_comes_back_through_little_pinned_memory() -> None:
    counters, equal = run("""
noise = torch.arange(6 << 20)
tree, turned = state(4, MIB), torch.randn(300, 200, dtype=torch.complex64)
mine = {"noise": noise.to("phantom:1"), "turned": turned.to("phantom:0").t()}
mine["one"] = torch.tensor(3.5, device="phantom:1")
kept = keep(tree, rank_state=mine)
kept.commit(1)
with kept.mutating(): [tensor.zero_() for tensor in mine.values()]
counters = counted(lambda: kept.restore())
equal = [torch.equal(mine["noise"].cpu(), noise), torch.equal(mine["turned"].cpu(), turned.t()), mine["one"].item()]
tell(counters, equal)
kept.close()
""")
    assert equal == [True, True, 3.5]
    assert counters["pageable_bytes"] == 0
    assert counters["pinned_most_bytes"] <= 40 << 20
