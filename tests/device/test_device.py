"""The make-believe accelerator behaves as a real one does where programs go wrong."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from device.processes import fork, run_two
from transfuse.testing.ranks import Ended

pytestmark = pytest.mark.usefixtures("device")

_TESTS = pathlib.Path(__file__).parents[1]
KIND = "phantom"


#: What a program in a process of its own begins with.
BEGIN = "import os, torch\nfrom device import phantom\nphantom.load()\n"


def in_new_process(program: str) -> Ended:
    """Run a program that begins with the device loaded."""
    return fork(BEGIN + program)[0]


def filled(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), value, device=KIND)


class TestMemory:
    def test_the_host_cannot_touch_it(self) -> None:
        done = in_new_process("import ctypes\nctypes.string_at(torch.ones(4, device='phantom').data_ptr(), 4)")
        assert done.code == -signal.SIGSEGV

    def test_freed_memory_is_poisoned_and_reused_in_order(self, device: ModuleType) -> None:
        first = filled(1.0)
        address, copy = first.data_ptr(), first.clone()
        del first
        again = torch.empty(4, device=KIND)
        assert again.data_ptr() == address
        assert set(device.read(again)) == {0xCD}
        assert copy.tolist() == [1.0] * 4

    def test_another_stream_reads_poison_unless_the_tensor_was_recorded_there(self, device: ModuleType) -> None:
        side = torch.Stream(device=KIND)
        values = []
        for recorded in (False, True):
            source, target = filled(1.0), filled(0.0)
            torch.accelerator.synchronize()
            with side:
                device.sleep(0.1)
                target.copy_(source)
            if recorded:
                source.record_stream(side)
            del source
            torch.accelerator.synchronize()
            values.append(target.tolist()[0])
        assert values[0] != 1.0
        assert values[1] == 1.0

    def test_memory_is_overwritten_in_the_order_of_the_stream_that_allocated_it(self, device: ModuleType) -> None:
        """What that stream still has to do sees it whole, whichever stream is current when it is freed."""
        side = torch.Stream(device=KIND)
        with side:
            source, target = filled(1.0), filled(0.0)
            device.sleep(0.1)
            target.copy_(source)
        address = source.data_ptr()
        del source
        with side:
            again = torch.empty(4, device=KIND)
        assert again.data_ptr() == address
        side.synchronize()
        assert target.tolist() == [1.0] * 4
        assert set(device.read(again)) == {0xCD}

    def test_recorded_memory_is_not_reused_before_the_other_stream_is_done(self, device: ModuleType) -> None:
        side = torch.Stream(device=KIND)
        one = torch.empty(12345, device=KIND)
        address = one.data_ptr()
        with side:
            device.sleep(0.1)
        one.record_stream(side)
        del one
        other = torch.empty(12345, device=KIND)
        assert other.data_ptr() != address
        side.synchronize()
        assert torch.empty(12345, device=KIND).data_ptr() == address

    def test_the_most_that_was_allocated(self) -> None:
        done = in_new_process(
            "def empty(size, **where): return torch.empty(size << 20, dtype=torch.uint8, **where)\n"
            "held = empty(2, device='phantom')\n"
            "freed = empty(8, device='phantom')\n"
            "del freed\n"
            "assert phantom.max_memory_allocated() == 10 << 20\n"
            "phantom.reset_peak_memory_stats()\n"
            "assert phantom.max_memory_allocated() == 2 << 20\n"
            "freed = empty(4, device='phantom')\n"
            "del freed\n"
            "empty(2, device='phantom')\n"
            "assert phantom.memory_allocated() == 2 << 20\n"
            "assert phantom.max_memory_allocated() == 6 << 20\n"
            # Pinned memory is another matter.
            "held, freed = (empty(size, pin_memory=True) for size in (2, 3))\n"
            "del freed\n"
            "counted = phantom.counters()\n"
            "assert (counted['pinned_allocations'], counted['pinned_most_bytes']) == (2, 5 << 20)\n"
            "phantom.reset_counters()\n"
            "empty(1, pin_memory=True)\n"
            "counted = phantom.counters()\n"
            "assert (counted['pinned_allocations'], counted['pinned_most_bytes']) == (1, 3 << 20)\n"
        )
        assert done.code == 0, done.err

    def test_a_full_device_refuses_until_something_is_freed(self, device: ModuleType) -> None:
        tensor = torch.empty(4 << 20, dtype=torch.uint8, device=KIND)
        device.set_most_bytes(0, device.memory_allocated(0) + (2 << 20))
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty_like(tensor)
        torch.empty_like(tensor, device="phantom:1")
        assert torch.empty(2 << 20, dtype=torch.uint8, device=KIND).numel() == 2 << 20
        del tensor
        assert torch.empty(4 << 20, dtype=torch.uint8, device=KIND).numel() == 4 << 20

    def test_storages_are_resized_and_set(self) -> None:
        tensor = torch.arange(4.0, device=KIND)
        tensor.untyped_storage().resize_(64)
        assert tensor.tolist() == [0, 1, 2, 3]
        view = torch.empty(0, device=KIND).set_(tensor.untyped_storage(), 1, (2,), (2,))
        assert view.tolist() == [1, 3]


class TestStreams:
    def test_streams_run_side_by_side(self, device: ModuleType) -> None:
        tensor, side = filled(0.0), torch.Stream(device=KIND)
        torch.accelerator.synchronize()
        with side:
            device.slow_fill_(tensor, 7.0, 0.2)
        assert not side.query()
        assert tensor.tolist() == [0.0] * 4
        side.synchronize()
        assert tensor.tolist() == [7.0] * 4

    def test_an_event_orders_them(self, device: ModuleType) -> None:
        tensor, side = filled(0.0), torch.Stream(device=KIND)
        torch.accelerator.synchronize()
        with side:
            device.slow_fill_(tensor, 7.0, 0.1)
            event = side.record_event()
        assert not event.query()
        torch.accelerator.current_stream().wait_event(event)
        assert tensor.tolist() == [7.0] * 4
        assert event.query()

    def test_queries_count(self, device: ModuleType) -> None:
        event = torch.accelerator.current_stream().record_event()
        event.query()
        torch.accelerator.current_stream().query()
        assert device.counters()["queries"] == 2
        assert device.counters()["host_syncs"] == 0

    def test_a_stream_that_waited_for_another_was_stalled(self, device: ModuleType) -> None:
        late, waits, passes = (torch.Stream(device=KIND) for _ in range(3))
        comes, gate = threading.Event(), threading.Event()
        device.launch(late, gate.wait)
        event = late.record_event()
        device.launch(waits, comes.set)
        waits.wait_event(event)
        comes.wait()
        time.sleep(0.05)
        gate.set()
        waits.synchronize()
        passes.wait_event(event)
        passes.synchronize()
        count, seconds = device.stalled(waits)
        assert count == 1
        assert seconds > 0
        assert device.stalled(passes) == device.stalled(late) == (0, 0.0)
        device.reset_counters()
        assert device.stalled(waits) == (0, 0.0)

    def test_kernels_return_before_they_are_done(self, device: ModuleType) -> None:
        tensor = filled(0.0)
        device.slow_fill_(tensor, 3.0, 1.0)
        doubled = torch.cat([tensor * 2, tensor.to(torch.int64)])
        assert not torch.accelerator.current_stream().query()
        assert device.counters()["host_syncs"] == 0
        assert doubled.tolist() == [6.0] * 4 + [3.0] * 4

    def test_each_thread_has_its_own_current_stream_and_device(self) -> None:
        side, seen = torch.Stream(device=KIND), list[object]()

        def look() -> None:
            seen.append((torch.accelerator.current_stream().stream_id, torch.accelerator.current_device_index()))

        with torch.accelerator.device_index(1), side:
            assert torch.accelerator.current_stream(0) == side
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        assert seen == [(0, 0)]

    def test_streams_are_distinct_up_to_64(self) -> None:
        done = in_new_process(
            "ids = [torch.Stream(device='phantom').stream_id for _ in range(70)]\n"
            "assert len(set(ids)) == len(set(ids[:64])) == 64 and 0 not in ids"
        )
        assert done.code == 0, done.err

    def test_a_function_runs_in_stream_order_and_its_error_is_reported(
        self, device: ModuleType, capfd: pytest.CaptureFixture[str]
    ) -> None:
        side, seen = torch.Stream(device=KIND), list[int]()
        device.launch(side, lambda: seen.append(1))
        device.launch(side, lambda: seen[5])
        device.launch(side, lambda: seen.append(2))
        with pytest.raises(RuntimeError, match="IndexError"):
            side.synchronize()
        side.synchronize()
        assert seen == [1, 2]
        assert "IndexError" in capfd.readouterr().err


class TestCopies:
    def test_to_pageable_memory_they_synchronise(self, device: ModuleType) -> None:
        tensor, host = filled(1.0), torch.zeros(4)
        device.reset_counters()
        host.copy_(tensor, non_blocking=True)
        tensor.copy_(host, non_blocking=True)
        assert host.tolist() == [1.0] * 4
        counted = device.counters()
        assert (counted["host_syncs"], counted["async_copies"]) == (2, 0)
        assert (counted["bytes_to_host"], counted["bytes_to_device"]) == (16, 16)
        assert (counted["pinned_bytes"], counted["pageable_bytes"]) == (0, 32)

    def test_to_pinned_memory_they_are_asynchronous(self, device: ModuleType) -> None:
        host = torch.zeros(4, pin_memory=True)
        assert host.is_pinned()
        assert torch.zeros(4).pin_memory().is_pinned()
        assert not torch.zeros(4).is_pinned()
        tensor = device.slow_fill_(filled(0.0), 5.0, 0.1)
        device.reset_counters()
        host.copy_(tensor, non_blocking=True)
        assert host.tolist() == [0.0] * 4
        assert device.counters()["async_copies"] == 1
        assert device.counters()["host_syncs"] == 0
        torch.accelerator.synchronize()
        assert host.tolist() == [5.0] * 4
        assert device.counters()["host_syncs"] == 1
        assert (device.counters()["pinned_bytes"], device.counters()["pageable_bytes"]) == (16, 0)

    def test_a_pinned_tensor_with_gaps_is_pageable(self, device: ModuleType) -> None:
        host = torch.zeros(4, 2, pin_memory=True)[:, 0]
        host.copy_(filled(1.0), non_blocking=True)
        assert host.tolist() == [1.0] * 4
        assert (device.counters()["pinned_bytes"], device.counters()["pageable_bytes"]) == (0, 16)
        assert device.counters()["async_copies"] == 0

    def test_inside_a_device_and_between_two_they_count_apart(self, device: ModuleType) -> None:
        tensor = filled(1.0)
        kept = tensor.clone()
        tensor.to("phantom:1")
        tensor.untyped_storage().resize_(64)
        counted = device.counters()
        assert kept.tolist() == [1.0] * 4
        assert counted["inner_bytes"] == 3 * 16
        assert counted["bytes_to_host"] == counted["bytes_to_device"] == 0

    def test_at_the_rate_they_were_queued_with(self, device: ModuleType) -> None:
        tensor, host = filled(7.0), torch.zeros(4, pin_memory=True)
        stream = torch.accelerator.current_stream()
        before, after = (torch.Event(KIND, enable_timing=True) for _ in range(2))
        device.sleep(0.1)
        device.set_copy_rate(tensor.nbytes / 0.2)
        stream.record_event(before)
        host.copy_(tensor, non_blocking=True)
        stream.record_event(after)
        device.set_copy_rate(0)
        assert device.counters()["host_syncs"] == 0
        stream.synchronize()
        assert before.elapsed_time(after) >= 200
        assert host.tolist() == [7.0] * 4

    def test_synchronisations_count(self, device: ModuleType) -> None:
        stream = torch.accelerator.current_stream()
        stream.synchronize()
        stream.record_event().synchronize()
        torch.accelerator.synchronize()
        filled(1.0).sum().item()
        assert device.counters()["host_syncs"] == 4

    def test_strides_types_and_devices(self) -> None:
        source = torch.arange(12.0).view(3, 4)
        moved = source.to(KIND).t().to(torch.bfloat16).to("phantom:1")
        assert moved.device == torch.device("phantom:1")
        assert torch.equal(moved.cpu(), source.t().to(torch.bfloat16))

    def test_devices_do_not_mix(self) -> None:
        with pytest.raises(RuntimeError, match="same device"):
            filled(1.0) + torch.ones(4)
        with torch.inference_mode():
            assert (filled(1.0) + 1).tolist() == [2.0] * 4


class TestRegistration:
    """Memory of the program, pinned where it is."""

    def test_copies_into_it_are_asynchronous_until_it_ends(self, device: ModuleType) -> None:
        host, tensor = torch.zeros(4), filled(1.0)
        device.host_register(host.data_ptr(), host.nbytes)
        assert host.is_pinned()
        host.copy_(tensor, non_blocking=True)
        torch.accelerator.synchronize()
        assert host.tolist() == [1.0] * 4
        device.host_unregister(host.data_ptr())
        assert not host.is_pinned()
        host.copy_(tensor, non_blocking=True)
        counted = device.counters()
        assert (counted["pinned_bytes"], counted["pageable_bytes"], counted["async_copies"]) == (16, 16, 1)
        assert (counted["registrations"], counted["pinned_allocations"]) == (1, 0)

    def test_a_copy_must_lie_in_one_of_them(self, device: ModuleType) -> None:
        host = torch.zeros(8)
        device.host_register(host.data_ptr(), 16)
        device.host_register(host.data_ptr() + 16, 16)
        host[4:].copy_(filled(1.0), non_blocking=True)
        assert device.counters()["async_copies"] == 1
        host.copy_(filled(2.0, 8), non_blocking=True)
        assert device.counters()["async_copies"] == 1
        for address in (host.data_ptr(), host.data_ptr() + 16):
            device.host_unregister(address)

    @pytest.mark.parametrize(("begin", "end"), [(16, 32), (0, 17), (31, 48), (0, 48), (20, 24)])
    def test_what_overlaps_is_refused(self, begin: int, end: int, device: ModuleType) -> None:
        host = torch.zeros(48, dtype=torch.uint8)
        device.host_register(host.data_ptr() + 16, 16)
        with pytest.raises(RuntimeError, match="already mapped"):
            device.host_register(host.data_ptr() + begin, end - begin)
        for around in (0, 32):
            device.host_register(host.data_ptr() + around, 16)
        for address in (0, 16, 32):
            device.host_unregister(host.data_ptr() + address)

    def test_what_is_pinned_otherwise_is_refused(self, device: ModuleType) -> None:
        host = torch.zeros(16, dtype=torch.uint8, pin_memory=True)
        with pytest.raises(RuntimeError, match="already mapped"):
            device.host_register(host.data_ptr(), 16)
        with pytest.raises(RuntimeError, match="registered"):
            device.host_unregister(host.data_ptr())
        assert host.is_pinned()

    def test_it_may_be_impossible(self, device: ModuleType) -> None:
        host = torch.zeros(4)
        device.set_registration(False)
        with pytest.raises(RuntimeError, match="cannot be registered"):
            device.host_register(host.data_ptr(), 16)
        assert not host.is_pinned()
        device.reset_settings()
        device.host_register(host.data_ptr(), 16)
        device.host_unregister(host.data_ptr())


class TestCaptures:
    def test_other_threads_must_not_disturb_them(self, device: ModuleType) -> None:
        tensor, host, pageable = filled(1.0), torch.zeros(4, pin_memory=True), torch.zeros(4)
        stream = torch.accelerator.current_stream()
        event = stream.record_event()
        forbidden: list[tuple[str, Callable[[], object]]] = [
            ("a query of an event", event.query),
            ("a query of a stream", stream.query),
            ("a synchronisation", event.synchronize),
            ("a synchronisation", stream.synchronize),
            ("a synchronisation", torch.accelerator.synchronize),
            ("a copy that the host waits for", lambda: pageable.copy_(tensor, non_blocking=True)),
            ("a copy that the host waits for", lambda: host.copy_(tensor)),
            ("an allocation of pinned memory", lambda: torch.empty(4, pin_memory=True)),
            ("a registration of host memory", lambda: device.host_register(pageable.data_ptr(), 16)),
            ("the end of a registration", lambda: device.host_unregister(pageable.data_ptr())),
        ]
        raised = []

        def disturb() -> None:
            for _, act in forbidden:
                with pytest.raises(RuntimeError) as error:
                    act()
                raised.append(str(error.value))

        device.reset_counters()
        with torch.Stream(device=KIND):
            device.capturing(True)
        thread = threading.Thread(target=disturb)
        thread.start()
        thread.join()
        # These do no harm.
        host.copy_(tensor * 2, non_blocking=True)
        stream.record_event()
        counted = device.counters()
        device.capturing(False)
        assert len(raised) == len(forbidden)
        for (what, _), message in zip(forbidden, raised, strict=True):
            assert f"not permitted when stream is capturing: {what}" in message
        assert counted["forbidden"] == len(forbidden)
        assert counted["queries"] == counted["host_syncs"] == counted["pinned_allocations"] == 0
        stream.synchronize()
        assert host.tolist() == [2.0] * 4

    def test_streams_join_them_and_they_wait_for_nothing_else(self, device: ModuleType) -> None:
        captured, joins, apart = (torch.Stream(device=KIND) for _ in range(3))
        outside = apart.record_event()
        with captured:
            device.capturing(True)
            joins.wait_event(captured.record_event())
            assert [one.is_capturing() for one in (captured, joins, apart)] == [True, True, False]
            captured.wait_stream(joins)
            with pytest.raises(RuntimeError, match="not captured"):
                joins.wait_event(outside)
            apart.wait_event(outside)
            device.capturing(False)
        assert not captured.is_capturing()
        assert not joins.is_capturing()
        joins.wait_event(outside)
        assert device.counters()["forbidden"] == 1


# Rank 1 looks at the memory of rank 0. It begins somewhere in a page.
_TWO_PROCESSES = """
def agree(value=None):
    box = [value]
    dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
    return box[0]

if rank == 0:
    whole = torch.arange(100_000, dtype=torch.int32, device="phantom")
    mine = whole[1000:]
    torch.accelerator.synchronize()
    agree((os.getpid(), *phantom.export_memory(mine)))
    dist.barrier()
    mine.fill_(7)
    torch.accelerator.synchronize()
    dist.barrier()
    dist.barrier()
    del whole, mine
    torch.accelerator.synchronize()
    phantom.read(torch.empty(1, device="phantom"))
    dist.barrier()
    dist.barrier()
    print("null")
else:
    pid, file, offset, nbytes = agree()
    theirs = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    allocated = phantom.memory_allocated(1)
    mapped = phantom.import_memory(1, theirs, offset, nbytes).view(torch.int32)
    assert phantom.memory_allocated(1) == allocated and mapped.device.index == 1

    def refused(act, *arguments):
        try:
            act(*arguments)
        except RuntimeError as error:
            return str(error)

    own = torch.zeros(10, device="phantom")
    refusals = [
        refused(phantom.import_memory, 1, theirs, (64 << 30) - 4, 8),
        refused(phantom.import_memory, 1, 0, 0, 8),
        refused(phantom.import_memory, 1, *phantom.export_memory(own)),
        refused(phantom.export_memory, mapped),
    ]
    os.close(theirs)

    first = mapped.clone()
    counted = phantom.counters()
    exact = torch.equal(first.cpu(), torch.arange(1000, 100_000, dtype=torch.int32))
    dist.barrier()
    dist.barrier()
    changed = mapped.cpu().unique().tolist()
    # It goes in stream order: what was queued before sees it.
    again = phantom.import_memory(1, os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR), offset, nbytes).view(torch.int32)
    with torch.accelerator.device_index(1):
        phantom.sleep(0.1)
    late = torch.empty_like(again)
    late.copy_(again)
    del again
    kept = late.cpu().unique().tolist()
    dist.barrier()
    dist.barrier()
    freed = mapped.view(torch.uint8).cpu().unique().tolist()
    dist.barrier()
    print(json.dumps([exact, counted["inner_bytes"] == nbytes, counted["bytes_to_host"] == counted["host_syncs"] == 0,
                      changed, kept, freed, refusals]))
"""


class TestTwoProcesses:
    def test_one_maps_the_memory_of_the_other(self) -> None:
        *seen, refusals = run_two(_TWO_PROCESSES)[1]
        assert seen == [True, True, True, [7], [7], [0xCD]]
        wanted = ["not memory", "not memory", "its own memory", "can export it"]
        assert all(what in refusal for what, refusal in zip(wanted, refusals, strict=True)), refusals


class TestProcess:
    def test_asking_does_not_initialise(self) -> None:
        done = in_new_process(
            "assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2\n"
            "torch.manual_seed(1)\n"
            "assert not phantom.is_initialized()\n"
            "torch.accelerator.current_stream()\n"
            "assert phantom.is_initialized()\n"
        )
        assert done.code == 0, done.err

    def test_a_fork_of_a_process_that_used_it_fails(self) -> None:
        done = in_new_process(
            "tensor = torch.ones(4, device='phantom')\n"
            "if os.fork() == 0:\n"
            "    assert phantom._is_in_bad_fork()\n"
            "    try:\n"
            "        tensor + 1\n"
            "    except RuntimeError as error:\n"
            "        print(error, flush=True)\n"
            "    os._exit(0)\n"
            "os.wait()"
        )
        assert "Cannot re-initialize phantom in forked subprocess" in done.out, done.err

    def test_a_busy_stream_does_not_keep_the_process(self) -> None:
        started = time.monotonic()
        # A fork leaves without the interpreter's own end, so this needs a process that was started.
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-c", BEGIN + "phantom.sleep(100)"]
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=60)
        assert time.monotonic() - started < 50


# In a process of its own: see phantom.load.
_TRAINING = """
for kind in ("cpu", "phantom"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    batch = torch.randn(16, 4)
    model.to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(batch.to(kind)) ** 2).mean()
        loss.backward()
        optimizer.step()
    print(loss.item())
"""


class TestTraining:
    def test_an_optimizer_trains_as_on_the_cpu(self) -> None:
        done = in_new_process(_TRAINING)
        assert done.code == 0, done.err
        on_cpu, on_device = map(float, done.out.split())
        assert on_cpu == pytest.approx(on_device, rel=1e-4)

    def test_random_state_is_saved_and_set(self, device: ModuleType) -> None:
        state = device.get_rng_state(0)
        first = torch.randn(3, device=KIND)
        device.set_rng_state(state, 0)
        assert torch.equal(first, torch.randn(3, device=KIND))
        with torch.random.fork_rng(devices=[0]):
            inside = torch.rand(3, device=KIND)
        assert torch.equal(inside, torch.rand(3, device=KIND))

    def test_it_is_saved_and_loaded(self, tmp_path: pathlib.Path) -> None:
        path = tmp_path / "state"
        torch.save({"a": filled(2.0)}, path)
        loaded = torch.load(path)["a"]
        assert loaded.device == torch.device("phantom:0")
        assert loaded.tolist() == [2.0] * 4
        assert torch.load(path, map_location="cpu")["a"].tolist() == [2.0] * 4
