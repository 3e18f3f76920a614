"""A server in the reader's own process, and memory that is mapped from a file."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import transfuse
from transfuse._limits import Limits
from transfuse._memory import vm
from transfuse._remote.client import FetchSettings, fetch_if
from transfuse._remote.in_process import InProcess
from transfuse._session.remembered import Remembered
from transfuse._state.manifest import Described
from transfuse._state.mapped_file import MappedFile
from wires import is_of_a_transfer

LONG = timedelta(seconds=60)


def described(state: object) -> Described:
    return Remembered().describe(state, Limits.from_environment())


def server(state: object, step: int | None = None, timeout: timedelta = LONG) -> InProcess:
    return InProcess(described(state), "a state of this process", step=step, timeout=timeout, verify=None)


@pytest.fixture(autouse=True)
def earlier() -> set[threading.Thread]:
    """Threads of tests before: one that was left with a frozen peer may take its timeout to end."""
    _earlier.clear()
    _earlier.update(threading.enumerate())
    return _earlier


_earlier: set[threading.Thread] = set()


def threads() -> set[str]:
    """The threads that a test has left."""
    return {thread.name for thread in set(threading.enumerate()) - _earlier if is_of_a_transfer(thread)}


@pytest.mark.parametrize("same_host", [True, False])
def test_a_state_lands_in_place(same_host: bool) -> None:
    state: dict[str, Any] = {"w": torch.randn(300_000), "n": 7}
    target: dict[str, Any] = {"w": torch.zeros(300_000), "n": 0}
    with server(state, step=3) as here:
        got = fetch_if(
            None, FetchSettings(address=[here], state=target, step=3, options={"same_host": same_host})
        ).state
    assert got["w"] is target["w"]
    assert torch.equal(target["w"], state["w"])
    assert got["n"] == 7
    assert not threads()


def test_two_servers_of_this_process_and_one_at_an_address_are_sources_of_one_fetch() -> None:
    torch.manual_seed(0)
    state = {"w": torch.randn(1 << 20)}
    with server(state) as one, server(state) as other, transfuse.serve(state, token="t") as third:
        got = fetch_if(None, FetchSettings(address=[one, third.address, other], token="t")).state
    assert torch.equal(got["w"], state["w"])


def test_an_error_names_the_server_and_leaves_no_thread() -> None:
    target = {"w": torch.zeros(3)}
    with (
        server({"w": torch.ones(4)}) as here,
        pytest.raises(transfuse.TargetMismatch, match=r"shape") as caught,
    ):
        fetch_if(None, FetchSettings(address=[here], state=target))
    assert "w" in str(caught.value)
    assert not target["w"].any()
    assert not threads()


def test_a_server_that_nobody_reads_ends_at_once() -> None:
    with server({"w": torch.ones(4)}) as here:
        here.begin()  # It offers, and nobody answers.
    assert not threads()


def test_a_permit_that_refuses_ends_both() -> None:
    class No(Exception):
        pass

    def permit(*_: Any) -> None:
        raise No("not now")

    target = {"w": torch.zeros(4)}
    with server({"w": torch.ones(4)}) as here, pytest.raises(No):
        fetch_if(permit, FetchSettings(address=[here], state=target))
    assert not target["w"].any()
    assert not threads()


# ------------------------------------------------------------------------------------------------------ mapped files


def test_a_mapped_file_is_read_through_its_descriptor_and_closed_at_the_end() -> None:
    fd = os.memfd_create("test")
    data = np.arange(1 << 20, dtype=np.uint8)
    os.write(fd, data.tobytes())
    memory = mmap.mmap(fd, len(data), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    view = np.frombuffer(memory, dtype=np.uint8)
    start = int(view.ctypes.data)
    file = MappedFile(start, len(data), fd)
    os.close(fd)
    into = np.zeros(len(data), dtype=np.uint8)
    assert vm.read_file([file], start + 17, int(into.ctypes.data), 100_000)
    assert np.array_equal(into[:100_000], data[17:100_017])
    # What does not lie in the file is not read.
    assert not vm.read_file([file], start + 17, int(into.ctypes.data), len(data))
    assert not vm.read_file([file], int(into.ctypes.data), int(into.ctypes.data), 8)
    rows = vm.read(
        os.getpid(),
        vm.ranges(np.array([start, int(data.ctypes.data)]), np.array([len(data), len(data)])),
        vm.ranges(np.array([int(into.ctypes.data)] * 2), np.array([len(data), len(data)])),
        files=[file],
    )
    assert rows.tolist() == [1]  # Long, and in no file.
    descriptor = file.fd
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
