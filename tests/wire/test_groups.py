"""Groups other than torch's own: torchft's managed ones, and anything with send and recv."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import transfuse
from moves import CPU, TIMEOUT
from transfuse.testing.exact import assert_exact

pytestmark = pytest.mark.usefixtures("group_route")


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(3_000_000)
    return {
        "w": weight,
        "tied": weight,
        "small": [torch.randn(5) for _ in range(10)],
        "t": torch.randn(40, 30).t(),
        "n": 1,
    }


def in_threads(*work: Any) -> list[Any]:
    results: list[Any] = [None] * len(work)

    def one(i: int) -> None:
        try:
            results[i] = work[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


class Mailboxes:
    """Queues instead of a network: for each (from, to, tag), receives are served in the order they were posted in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._letters: dict[Any, deque[torch.Tensor]] = defaultdict(deque)
        self._waiting: dict[Any, deque[Delivery]] = defaultdict(deque)
        #: How many bytes were sent.
        self.nbytes = 0

    def put(self, key: Any, tensor: torch.Tensor) -> None:
        with self._lock:
            self.nbytes += tensor.nbytes
            self._letters[key].append(tensor)
            self._deliver(key)

    def ask(self, key: Any, delivery: Delivery) -> None:
        with self._lock:
            self._waiting[key].append(delivery)
            self._deliver(key)

    def _deliver(self, key: Any) -> None:
        while self._letters[key] and self._waiting[key]:
            delivery = self._waiting[key].popleft()
            delivery.tensor.copy_(self._letters[key].popleft())
            delivery.done.set()


class Delivery:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.done = tensor, threading.Event()

    def wait(self, timeout: timedelta) -> bool:
        if not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out waiting for a letter")
        return True


class Mailbox:
    """A group with nothing but send and recv; it does not even know its rank."""

    def __init__(self, rank: int, regions: Mailboxes) -> None:
        self._me, self._regions = rank, regions

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Delivery:
        self._regions.put((self._me, rank, tag), tensors[0].clone())
        delivery = Delivery(tensors[0])
        delivery.done.set()
        return delivery

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Delivery:
        delivery = Delivery(tensors[0])
        self._regions.ask((rank, self._me, tag), delivery)
        return delivery


def test_any_object_with_send_and_recv() -> None:
    regions = Mailboxes()
    groups = [Mailbox(rank, regions) for rank in range(2)]
    sent = state()
    own = {"w": torch.zeros(3_000_000), "t": torch.zeros(30, 40)}
    _, fresh = in_threads(
        lambda: transfuse.PGTransport(groups[0], TIMEOUT, CPU).send_checkpoint([1], sent),
        lambda: transfuse.PGTransport(groups[1], TIMEOUT, CPU).recv_checkpoint(0),
    )
    assert_exact(sent, fresh)
    del sent["tied"]
    _, arrived = in_threads(
        lambda: transfuse.PGTransport(groups[0], TIMEOUT, CPU).send_checkpoint([1], sent),
        lambda: transfuse.PGTransport(groups[1], TIMEOUT, CPU, lambda: own).recv_checkpoint(0),
    )
    assert_exact(sent, arrived, in_place=True)
    started = time.monotonic()
    (error,) = in_threads(lambda: transfuse.PGTransport(groups[1], timedelta(seconds=1), CPU).recv_checkpoint(0))
    assert isinstance(error, transfuse.PeerTimeout)
    assert time.monotonic() - started < 5


class Knowing(Mailbox):
    """A group that knows its rank, and ignores tags: two ranks agree whose turn it is."""

    def rank(self) -> int:
        return self._me

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Delivery:
        return super().send(tensors, rank, 0)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Delivery:
        return super().recv(tensors, rank, 0)


class Serial(Mailbox):
    """A group that says it is one of torchft's in a child process: one operation at a time."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "torchft-baby-gloo"


class Messages(Mailbox):
    """A group with tags that is not gloo."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "mpi"


@pytest.mark.usefixtures("needs_streams")
@pytest.mark.parametrize("kind", [Mailbox, Knowing, Serial, Messages])
def test_a_group_is_free_as_soon_as_a_transfer_has_a_stream(kind: type[Mailbox]) -> None:
    """One transfer waits in the middle. Meanwhile another one between the same two ranks begins and ends."""
    regions = Mailboxes()
    groups = [kind(rank, regions) for rank in range(2)]
    waits, goes_on = threading.Event(), threading.Event()
    own = {"w": torch.zeros(3_000_000)}

    def permit(*_: object) -> None:
        waits.set()
        assert goes_on.wait(30)

    def second() -> Any:
        assert waits.wait(30)
        _, arrived = in_threads(
            lambda: transfuse.PGTransport(groups[0], TIMEOUT, CPU).send_checkpoint([1], {"n": torch.arange(5)}),
            lambda: transfuse.PGTransport(groups[1], TIMEOUT, CPU).recv_checkpoint(0),
        )
        goes_on.set()
        return arrived

    sent = {"w": torch.randn(3_000_000)}
    outcome, first, other = in_threads(
        lambda: transfuse.PGTransport(groups[0], TIMEOUT, CPU).send_checkpoint([1], sent),
        lambda: transfuse.PGTransport(groups[1], TIMEOUT, CPU, lambda: own).receive(0, permit=permit),
        second,
    )
    assert outcome is None
    assert_exact(sent, first, in_place=True)
    assert_exact({"n": torch.arange(5)}, other)
    # Only what the two said before they had a stream went over the group.
    assert regions.nbytes < 40_000


@pytest.mark.parametrize("kind", [Mailbox, Knowing, Serial, Messages])
def test_without_streams_the_group_carries_all(kind: type[Mailbox]) -> None:
    regions = Mailboxes()
    groups = [kind(rank, regions) for rank in range(2)]
    sent = state()
    outcome, arrived = in_threads(
        lambda: transfuse.PGTransport(groups[0], TIMEOUT, CPU, streams=False).send_checkpoint([1], sent),
        lambda: transfuse.PGTransport(groups[1], TIMEOUT, CPU).recv_checkpoint(0),
    )
    assert outcome is None
    assert_exact(sent, arrived)
    assert regions.nbytes > sent["w"].nbytes


@pytest.mark.parametrize("kind", ["ProcessGroupGloo", "ProcessGroupBabyGloo"])
@pytest.mark.filterwarnings("ignore")
def test_torchfts_groups(kind: str) -> None:
    """In the same process, and with the backend in a child process of its own."""
    torchft = pytest.importorskip("torchft.process_group", reason="torchft is not installed")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = [getattr(torchft, kind)(timeout=timedelta(seconds=60)) for _ in range(3)]
    address = f"127.0.0.1:{store.port}/{kind}"
    try:
        for result in in_threads(*(lambda r=r: groups[r].configure(address, "replica", r, 3) for r in range(3))):
            assert result is None, result
        sent = state()
        outcome, *fresh = in_threads(
            lambda: transfuse.PGTransport(groups[0], TIMEOUT, CPU).send_checkpoint([1, 2], sent),
            lambda: transfuse.PGTransport(groups[1], TIMEOUT, CPU).recv_checkpoint(0),
            lambda: transfuse.PGTransport(groups[2], TIMEOUT, CPU).recv_checkpoint(0),
        )
        assert outcome is None, outcome
        for arrived in fresh:
            assert_exact(sent, arrived)
        own = {"w": torch.zeros(3_000_000), "tied": torch.zeros(3_000_000), "t": torch.zeros(40, 30).t()}
        outcome, arrived = in_threads(
            lambda: transfuse.PGTransport(groups[0], TIMEOUT, CPU).send_checkpoint([1], sent),
            lambda: transfuse.PGTransport(groups[1], TIMEOUT, CPU, lambda: own).recv_checkpoint(0),
        )
        assert outcome is None, outcome
        assert_exact(sent, arrived, in_place=True)
        # A child process sees shared memory only. What is moved there is none of the caller's.
        assert not any(tensor.is_shared() for tensor in (sent["w"], sent["t"], *sent["small"], *own.values()))
    finally:
        for group in groups:
            group.shutdown()
