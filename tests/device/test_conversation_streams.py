"""Streams of conversations: used again, entered by helper threads too, and awaited with a deadline."""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any

import pytest
import torch

import transfuse
from transfuse._memory import streams

pytestmark = pytest.mark.usefixtures("device")


def test_streams_are_used_again(device: ModuleType) -> None:
    used = set()
    for _ in range(3):
        call = streams.Streams([torch.device("phantom", 0)])
        with call.conversation():
            mine = torch.accelerator.current_stream(torch.device("phantom", 0))
        call.join()
        assert streams.poll(mine.query, time.monotonic() + 10)  # Then it is idle.
        used.add(mine)
    assert len(used) == 1


def test_a_stream_that_is_busy_is_not_used_again_yet(device: ModuleType) -> None:
    busy, later = streams.Streams([torch.device("phantom", 0)]), streams.Streams([torch.device("phantom", 0)])
    with busy.conversation():
        mine = torch.accelerator.current_stream(torch.device("phantom", 0))
        device.sleep(0.5)
    with later.conversation():
        assert torch.accelerator.current_stream(torch.device("phantom", 0)) != mine


def test_helper_threads_work_where_their_thread_does(device: ModuleType) -> None:
    seen: list[tuple[int, torch.Stream]] = []
    call = streams.Streams([torch.device("phantom", 1)])

    def look(inherited: Any) -> None:
        with inherited():
            seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream()))

    with call.conversation():
        mine = torch.accelerator.current_stream(torch.device("phantom", 1))
        helper = threading.Thread(target=look, args=(streams.inherit(),))
        helper.start()
        helper.join()
    assert seen == [(1, mine)]


def test_work_that_never_ends_is_an_error(device: ModuleType) -> None:
    call = streams.Streams([torch.device("phantom", 0)])
    with call.conversation():
        device.sleep(1.0)
        with pytest.raises(transfuse.TransfuseError, match=r"phantom:0: the work that was queued .* 0.1 s"):
            streams.complete(0.1)
        streams.complete(10)


def test_no_accelerator_is_asked_for_without_need(device: ModuleType) -> None:
    before = device.counters()
    call = streams.Streams([torch.device("cpu")])
    with call.conversation():
        assert not streams.are_involved()
        assert streams.inherit()() is not None
    call.join()
    assert device.counters() == before
