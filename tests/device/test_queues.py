"""Queues: a silent peer loses its turn on the accelerator, and its conversation posts nothing there again."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from device.group import DeviceRanks
from transfuse._errors import PeerLost
from transfuse._limits import Limits
from transfuse._memory.streams import Streams
from transfuse._wire.channel import Channel
from transfuse._wire.group import Group

pytestmark = pytest.mark.usefixtures("device", "nothing_is_left")

TIMEOUT = 2.0


def test_a_peer_that_wakes_up_has_lost_its_turn(device: ModuleType) -> None:
    """The peer answers after T/2. By then another conversation has the queue, so this one must not post any more."""
    other_has_queue = threading.Event()
    ended = threading.Event()

    def work(rank: int, pg: dist.ProcessGroup) -> str:
        here = torch.device("phantom", rank)
        group = Group(pg, here)
        if rank == 0:
            with Channel(group, 1, TIMEOUT, Limits(), is_source=True) as channel:
                assert other_has_queue.wait(30)
                channel.post_send(channel.wire(b"x")).wait()
                assert ended.wait(30)
            return ""
        streams = Streams([here])

        def beside() -> None:
            with streams.conversation(), Channel(group, 0, TIMEOUT, Limits()) as second, second.queue():
                other_has_queue.set()
                assert ended.wait(30)
                second.broken = True  # Nobody reads its signs of life, so it must not wait for them.

        with streams.conversation(), Channel(group, 0, TIMEOUT, Limits()) as channel, channel.queue():
            other = threading.Thread(target=beside)
            other.start()
            channel.post_recv(channel.empty(1)).wait()
            with pytest.raises(PeerLost) as caught:
                channel.post_recv(torch.empty(4, dtype=torch.uint8, device=here))
            assert not channel.unanswered()
            ended.set()
            other.join(30)
        return str(caught.value)

    with DeviceRanks(2) as ranks:
        said = ranks.run(work)[1]
    assert "rank 0 was silent for too long while starting, and its turn on phantom:1 was given to others" in said


def test_work_that_takes_long_keeps_its_turn(device: ModuleType) -> None:
    """A busy stream holds an operation up for longer than T/2. The peer is not silent, so nobody takes the queue."""
    sent = torch.arange(1000, dtype=torch.uint8)

    def work(rank: int, pg: dist.ProcessGroup) -> torch.Tensor:
        here = torch.device("phantom", rank)
        group = Group(pg, here)
        streams = Streams([here])
        with streams.conversation(), Channel(group, 1 - rank, TIMEOUT, Limits()) as channel, channel.queue():
            if rank == 0:
                device.sleep(0.8 * TIMEOUT)
            tensors = [sent.to(here) if rank == 0 else torch.empty_like(sent, device=here) for _ in range(2)]
            for tensor in tensors:
                (channel.post_send if rank == 0 else channel.post_recv)(tensor).wait()
            return tensors[1].cpu()

    with DeviceRanks(2) as ranks:
        assert torch.equal(ranks.run(work)[1], sent)
