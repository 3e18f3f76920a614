"""The make-believe accelerator behaves as a real one does where programs go wrong."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from types import ModuleType

import pytest
import torch

from device.processes import fork
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
