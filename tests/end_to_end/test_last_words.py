"""A source that dies at the very moment at which its receiver says its last word to it.

gloo then forgets the word: who waits until it has been sent waits for ever. A stream takes the word, and then ends.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transfuse
from transfuse._wire.channel import Channel
from transfuse._wire.messages import Header, Message
from transfuse.testing.ranks import Fleet, announce
from wires import threads_left

TIMEOUT = 3.0
SECONDS = 60.0


def state() -> dict[str, Any]:
    return {"w": torch.arange(1000.0), "step": 1}


def die_at(kind: Message, receiver: int) -> None:
    """In a source: freeze the receiver when its last word begins to come, ask for the rest of the word, and die."""
    opened = Channel._open

    def open_header(self: Channel, data: bytes) -> Header:
        header = opened(self, data)
        if header.kind is kind:
            os.kill(receiver, signal.SIGSTOP)
            posted = []
            if self.stream is None:
                posted = [self.post_recv(self.empty(header.length)), self.post_recv(self.empty(1))]
            announce("dies")
            time.sleep(0.1)  # gloo has to tell the receiver about these before the end.
            os.kill(os.getpid(), signal.SIGKILL)
            assert not posted
        return header

    Channel._open = open_header  # type: ignore[method-assign]


def take_part(rank: int, sources: int, kind: Message, pids: list[int]) -> tuple[Any, list[str]]:
    """In a worker: what it got or raised, and its threads afterwards."""
    if rank == 0:
        die_at(kind, pids[sources])
    target = state() if kind is Message.VERDICT else {"other": torch.zeros(3)}
    world: Any = dist.group.WORLD
    transport = transfuse.PGTransport(world, TIMEOUT, "cpu", lambda: target, same_host=False, strict=True)
    got: Any = None
    try:
        if rank < sources:
            transport.send_checkpoint([sources], state())
        else:
            got = transport.recv_checkpoint(list(range(sources)))
    except transfuse.TransfuseError as error:
        got = type(error).__name__
    return got, threads_left(5.0)


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("kind", [Message.VERDICT, Message.REFUSAL], ids=lambda kind: kind.name)
def test_a_source_that_dies_with_the_last_word_holds_up_nobody(kind: Message, sources: int) -> None:
    with Fleet(sources + 1) as fleet:
        pids = fleet.pids
        fleet.start(take_part, sources, kind, pids)
        fleet.wait_for(0, "dies", SECONDS)
        until = time.monotonic() + SECONDS
        while _is_alive(pids[0]) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(pids[sources], signal.SIGCONT)
        got, threads = fleet.outcomes(SECONDS, [sources])[0].get()
    if kind is Message.VERDICT:
        assert torch.equal(got["w"], state()["w"])
        assert threads == []
    else:
        assert got == "TargetMismatch"


def _is_alive(pid: int) -> bool:
    """Whether the process still has its connections."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
