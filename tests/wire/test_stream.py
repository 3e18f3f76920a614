"""A stream over real connections: every partial count, signals, silence, cutting, closing, forks, descriptors."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import mmap
import os
import random
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from connections import WAIT, InThread, connected, descriptors, ended, forked, interrupting, one_byte_at_a_time, streams
from serving import wait_until
from transfuse._wire import stream as module
from transfuse._wire.stream import Stream

CANARY = 0x5A

Pair = tuple[Stream, Stream]


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ends = streams(encrypted=request.param == "tls")
    yield ends
    for end in ends:
        end.close()


def tensors_of(sizes: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def receive(stream: Stream, tensors: list[torch.Tensor], seconds: float = WAIT) -> None:
    stream.read(tensors, seconds)


def use_of(direction: str, stream: Stream, tensors: list[torch.Tensor]) -> Callable[[], None]:
    return functools.partial(receive if direction == "read" else Stream.write, stream, tensors)


def move(sender: Stream, receiver: Stream, sizes: list[int]) -> None:
    """Send tensors of these sizes, in one call, into others of other sizes. What arrives is what was sent."""
    sent = tensors_of(sizes)
    got = [torch.full((size,), CANARY, dtype=torch.uint8) for size in reversed(sizes)]
    thread = threading.Thread(target=sender.write, args=(sent,))
    thread.start()
    receive(receiver, got)
    thread.join(WAIT)
    assert torch.equal(torch.cat(got), torch.cat(sent))


# ------------------------------------------------------------------------------------------------------ partial counts

SIZES = [1, 0, 7, 16, 0, 0, 3, 1, 13]


class FewBytes:
    """The kernel's calls, but none moves more bytes than the next of ``counts``; 0: a signal came before any byte."""

    def __init__(self, counts: Iterator[int]) -> None:
        self._counts = counts
        self._real = ctypes.CDLL(None, use_errno=True)
        for call in (self._real.sendmsg, self._real.recvmsg):
            call.restype, call.argtypes = ctypes.c_ssize_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
        self.calls = 0
        self._lock = threading.Lock()  # Both ends take from one generator.

    def _few(self, call: Any, number: int, head: Any, flags: int) -> int:
        with self._lock:
            self.calls += 1
            left = count = next(self._counts)
        if not count:
            ctypes.set_errno(4)  # EINTR
            return -1
        head = head._obj  # It is passed by reference.
        rows = (ctypes.c_int64 * (2 * head.count)).from_address(head.runs)
        few = []
        for where, length in zip(rows[::2], rows[1::2], strict=True):
            few += [where, min(length, left)]
            left -= few[-1]
        mine = (ctypes.c_int64 * len(few))(*few)
        short = module._Head()
        short.runs, short.count = ctypes.addressof(mine), head.count
        moved: int = call(number, ctypes.addressof(short), flags)
        assert moved <= count
        return moved

    def sendmsg(self, number: int, head: Any, flags: int) -> int:
        return self._few(self._real.sendmsg, number, head, flags)

    def recvmsg(self, number: int, head: Any, flags: int) -> int:
        return self._few(self._real.recvmsg, number, head, flags)


@pytest.mark.parametrize("count", range(1, sum(SIZES) + 1))
def test_every_partial_count(pair: Pair, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few = FewBytes(itertools.repeat(count))
    monkeypatch.setattr(module, "_libc", few)
    move(*pair, SIZES)
    assert few.calls >= 2 * -(-sum(SIZES) // count)


@pytest.mark.parametrize("seed", range(20))
def test_odd_counts_and_signals_in_between(pair: Pair, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    counts = (chance.choice([0, 1, 2, 3, 5, 8, 1000]) for _ in itertools.count())
    monkeypatch.setattr(module, "_libc", FewBytes(counts))
    move(*pair, [chance.choice([0, 1, 2, 15, 64, 1001]) for _ in range(200)] + [1])


def test_somebody_passes_on_one_byte_at_a_time() -> None:
    with one_byte_at_a_time() as (left, right):
        move(left, right, [*SIZES, 1000, 0, 333])
        move(right, left, [700, *SIZES])


def test_somebody_passes_on_odd_numbers_of_bytes() -> None:
    chance = random.Random(1)
    with one_byte_at_a_time(sizes=lambda: chance.choice([1, 3, 4097, 65537])) as (left, right):
        move(left, right, [300_001, 1, 0, 77, 1 << 20])


def test_small_buffers_of_the_kernel() -> None:
    ends = streams(buffer=4096)
    move(*ends, [1 << 20, 3, 0, 999_999])
    for end in ends:
        end.close()


def test_more_runs_than_one_call_takes(pair: Pair) -> None:
    move(*pair, [number % 8 for number in range(5000)])
    move(*pair, [1] * 1024)
    move(*pair, [1] * 1025)


def test_longer_runs_than_one_call_takes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STREAM_MOST_BYTES", 5)
    move(*pair, [1, 4, 5, 6, 0, 10, 11, 10_001])


def test_nothing_at_all(pair: Pair) -> None:
    one, other = pair
    one.write([])
    one.write([torch.empty(0)])
    receive(other, [torch.empty(0), torch.empty((3, 0))])
    move(*pair, [5])


def test_tensors_of_any_type_and_shape(pair: Pair) -> None:
    one, other = pair
    sent = [torch.randn(3, 5), torch.tensor(7), torch.randn(4).to(torch.bfloat16), torch.arange(10)[3:7]]
    one.write(sent)
    got = [torch.zeros_like(tensor) for tensor in sent]
    receive(other, got)
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def test_runs_of_memory_by_address(pair: Pair) -> None:
    one, other = pair
    data, got = tensors_of([1000])[0], torch.full((1000,), CANARY, dtype=torch.uint8)
    one.write([(data.data_ptr() + 10, 700), (data.data_ptr(), 0), (data.data_ptr() + 900, 50)])
    other.read([(got.data_ptr() + 1, 3), (got.data_ptr() + 100, 747)], WAIT)
    assert torch.equal(torch.cat([got[1:4], got[100:847]]), torch.cat([data[10:710], data[900:950]]))
    assert (torch.cat([got[:1], got[4:100], got[847:]]) == CANARY).all()


def test_messages_and_tensors_in_one_call(pair: Pair) -> None:
    one, other = pair
    data = tensors_of([1000])[0]
    one.write([b"head", b"", data, b"end"])
    head, got, end = bytearray(4), torch.zeros_like(data), bytearray(3)
    other.read([head, bytearray(), got, end], WAIT)
    assert (bytes(head), bytes(end)) == (b"head", b"end")
    assert torch.equal(got, data)
    head.append(0)  # Nothing holds its memory any more.


def test_what_two_threads_write_is_not_mixed(pair: Pair) -> None:
    one, other = pair
    size, times = 300_000, 10

    def write(value: int) -> None:
        for _ in range(times):
            one.write([torch.full((size,), value)] * 2)

    writers = [InThread(functools.partial(write, value)) for value in (1, 2)]
    seen = []
    for _ in range(2 * times):
        got = torch.zeros(2 * size, dtype=torch.int64)
        receive(other, [got])
        assert (got == got[0]).all()
        seen.append(int(got[0]))
    assert sorted(seen) == [1] * times + [2] * times
    assert [writer.end() for writer in writers] == [None, None]


# ------------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("direction", ["read", "write"])
def test_signals_all_the_time(direction: str) -> None:
    """The main thread is in a call, and signals come all the time: nothing is lost, and nothing comes twice."""
    count = 0

    def handle() -> None:
        nonlocal count
        count += 1

    ours, theirs = streams(buffer=16384)
    data = tensors_of([200_000] * 4)
    got = [torch.zeros_like(tensor) for tensor in data]

    def other_end() -> None:
        for tensor, into in zip(data, got, strict=True):
            time.sleep(0.05)
            if direction == "read":
                theirs.write([tensor])
            else:
                receive(theirs, [into])

    with interrupting(handle):
        thread = InThread(other_end)
        if direction == "read":
            receive(ours, got)
        else:
            ours.write(data)
        assert thread.end() is None
    assert count > 20
    assert torch.equal(torch.cat(got), torch.cat(data))
    ours.close()
    theirs.close()


class Stop(BaseException):
    pass


@pytest.mark.parametrize("direction", ["read", "write"])
def test_an_interrupted_call_is_the_last_one(direction: str) -> None:
    """Nobody knows which bytes have moved. So the next call must not begin there, and no pool may keep the stream."""

    def stop() -> None:
        raise Stop

    ours, theirs = streams(buffer=4096)
    half = torch.zeros(1000, dtype=torch.uint8)
    theirs.write([half])
    use = use_of(direction, ours, [torch.zeros(10_000_000, dtype=torch.uint8)])
    with pytest.raises(Stop), interrupting(stop, every=0.2):
        use()
    assert not ours.is_alive()
    target = torch.full((1000,), CANARY, dtype=torch.uint8)
    theirs.write([half])
    with pytest.raises(ConnectionAbortedError, match="interrupted"):
        receive(ours, [target])
    with pytest.raises(ConnectionAbortedError, match="interrupted"):
        ours.write([half])
    assert (target == CANARY).all()
    ours.close()
    theirs.close()


# ------------------------------------------------------------------------------------------------------------- silence


def test_a_peer_that_sends_little_by_little_is_not_late(pair: Pair) -> None:
    one, other = pair
    bytes_ = tensors_of([1] * 6)

    def trickle() -> None:
        for tensor in bytes_:
            time.sleep(0.25)  # Some calls into the kernel return without a byte.
            one.write([tensor])

    thread, got, started = InThread(trickle), torch.zeros(6, dtype=torch.uint8), time.monotonic()
    receive(other, [got], seconds=1.0)
    assert time.monotonic() - started > 1.0, "this has shown nothing"
    assert torch.equal(got, torch.cat(bytes_))
    assert thread.end() is None


def test_a_peer_that_takes_little_by_little_is_not_late() -> None:
    ours, theirs = connected(buffer=4096)
    stream, data = Stream(ours, seconds=1.0), tensors_of([150_000])[0]
    taken = bytearray()

    def take() -> None:
        for number in itertools.count():
            if len(taken) == len(data):
                return
            if number % 8 == 0:
                time.sleep(0.25)
            taken.extend(theirs.recv(4000))

    thread, started = InThread(take), time.monotonic()
    stream.write([data])
    assert time.monotonic() - started > 1.0, "this has shown nothing"
    assert thread.end() is None
    assert bytes(taken) == data.numpy().tobytes()
    stream.close()
    theirs.close()


def test_a_peer_that_sends_nothing_is_late(pair: Pair) -> None:
    one, other = pair
    one.write(tensors_of([3]))
    got, started = torch.full((5,), CANARY, dtype=torch.uint8), time.monotonic()
    with pytest.raises(TimeoutError):
        receive(other, [got], seconds=0.3)
    assert time.monotonic() - started >= 0.3
    # What is encrypted lands when all of it is here.
    assert torch.equal(got[:3], tensors_of([3])[0]) or torch.equal(got, torch.full((5,), CANARY, dtype=torch.uint8))
    assert (got[3:] == CANARY).all()
    # Where the next message begins nobody knows.
    one.write(tensors_of([20]))
    with pytest.raises(TimeoutError):
        receive(other, [got], seconds=WAIT)
    assert (got[3:] == CANARY).all()
    assert not other.is_alive()


def test_a_peer_that_takes_nothing_is_late() -> None:
    ours, theirs = connected(buffer=4096)
    stream, started = Stream(ours, seconds=0.4), time.monotonic()
    with pytest.raises(TimeoutError):
        stream.write([torch.zeros(10_000_000, dtype=torch.uint8)])
    assert time.monotonic() - started >= 0.4
    assert not stream.is_alive()
    stream.close()
    theirs.close()


def test_patience_can_be_changed() -> None:
    ours, theirs = connected(buffer=4096)
    stream = Stream(ours, seconds=1e6)
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 32767
    stream.set_patience(0.2)
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 200
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
    with pytest.raises(TimeoutError):
        stream.write([torch.zeros(10_000_000, dtype=torch.uint8)])
    stream.close()
    stream.set_patience(3.0)
    theirs.close()


# ------------------------------------------------------------------------------------------------------------- cutting


def test_cutting_wakes_a_read(pair: Pair) -> None:
    one, other = pair
    reading = InThread(lambda: receive(other, [torch.zeros(5)]))
    time.sleep(0.05)
    assert reading.runs
    other.cut()
    error = reading.end()
    assert isinstance(error, ConnectionAbortedError)
    assert "this end" in str(error)
    with pytest.raises(ConnectionResetError):
        receive(one, [torch.zeros(5)])


def test_cutting_wakes_a_write() -> None:
    ours, theirs = streams(buffer=4096)
    writing = InThread(lambda: ours.write([torch.zeros(10_000_000)]))
    time.sleep(0.05)
    assert writing.runs
    ours.cut()
    error = writing.end()
    assert isinstance(error, ConnectionAbortedError)
    assert "this end" in str(error)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("after", [0.0, 0.001, 0.01, 0.05])
@pytest.mark.parametrize("close", [False, True])
def test_a_target_is_free_when_the_call_has_returned(pair: Pair, after: float, close: bool) -> None:
    """Under a sender that goes on, the moment is any. Around the targets, between them, and later in them: no byte."""
    one, other = pair
    size, gap, count = 1 << 20, 4096, 8
    memory = torch.full((gap + count * (size + gap),), CANARY, dtype=torch.uint8)
    gaps = [memory[at : at + gap] for at in range(0, len(memory), size + gap)]
    targets = [memory[at : at + size] for at in range(gap, len(memory), size + gap)]
    junk = torch.full((size,), 0xEE, dtype=torch.uint8)

    def send() -> None:
        while True:
            one.write([junk])

    def read() -> None:
        while True:
            receive(other, targets)

    sending, reading = InThread(send), InThread(read)
    time.sleep(after)
    other.close() if close else other.cut()
    assert isinstance(reading.end(), ConnectionAbortedError)
    memory.fill_(CANARY)
    # What the kernel still has is not written by later calls either.
    for _ in range(3):
        with pytest.raises(ConnectionAbortedError):
            receive(other, targets)
    time.sleep(0.05)
    assert (memory == CANARY).all()
    assert all((one == CANARY).all() for one in gaps)
    other.close()
    assert isinstance(sending.end(), OSError)


def test_a_sender_learns_at_once_that_the_connection_was_broken_off() -> None:
    """Also if it waits for room, and what it has sent is read after the cut: then the kernel would not tell it."""
    ours, theirs = streams(buffer=1 << 16)
    sending = InThread(lambda: theirs.write([torch.zeros(10_000_000)]))
    wait_until(ours.has_news)
    time.sleep(0.1)  # No room is left.
    ours.cut()
    while ours._socket.recv(1 << 20):
        pass
    ours.close()
    assert isinstance(sending.end(), ConnectionError)
    theirs.close()


def test_gaps_between_targets_are_not_written(pair: Pair) -> None:
    one, other = pair
    memory = torch.full((64 * 48,), CANARY, dtype=torch.uint8)
    rows = memory.view(64, 48)
    sent = tensors_of([16] * 64)
    one.write(sent)
    receive(other, [row[16:32] for row in rows])
    assert torch.equal(rows[:, 16:32].reshape(-1), torch.cat(sent))
    assert (rows[:, :16] == CANARY).all()
    assert (rows[:, 32:] == CANARY).all()


# ------------------------------------------------------------------------------------------------------------- closing


class Held:
    """The kernel's calls, which return only when they are let go."""

    def __init__(self) -> None:
        self._real = module._libc
        self.inside, self.go = threading.Event(), threading.Event()

    def recvmsg(self, *arguments: Any) -> int:
        self.inside.set()
        assert self.go.wait(WAIT)
        moved: int = self._real.recvmsg(*arguments)
        return moved

    def sendmsg(self, *arguments: Any) -> int:
        self.inside.set()
        assert self.go.wait(WAIT)
        moved: int = self._real.sendmsg(*arguments)
        return moved


@pytest.mark.parametrize("direction", ["read", "write"])
def test_closing_waits_for_calls(pair: Pair, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pair
    held = Held()
    monkeypatch.setattr(module, "_libc", held)
    using = InThread(use_of(direction, one, [torch.zeros(5)]))
    assert held.inside.wait(WAIT)
    number = one._socket.fileno()
    closing = InThread(one.close)
    time.sleep(0.1)
    assert closing.runs
    assert using.runs
    assert number in descriptors(), "the number is free, and a call that begins now would use it"
    held.go.set()
    assert closing.end() is None
    assert isinstance(using.end(), ConnectionAbortedError)
    assert number not in descriptors()


def test_a_descriptors_number_that_is_used_again(pair: Pair) -> None:
    """After it is closed, a stream does not touch the file that has its number now."""
    one, _ = pair
    number = one._socket.fileno()
    one.close()
    mine, theirs = connected()
    if mine.fileno() != number:
        os.dup2(mine.fileno(), number)
        mine.close()
        mine = socket.socket(fileno=number)
    assert mine.fileno() == number
    theirs.sendall(b"hello")
    one.cut()
    one.set_patience(1.0)
    one.stop()
    one.say_goodbye(1.0)
    assert one.has_news()
    assert not one.is_alive()
    with pytest.raises(ConnectionAbortedError):
        one.write([torch.zeros(5)])
    with pytest.raises(ConnectionAbortedError):
        receive(one, [torch.zeros(5)])
    one.close()
    assert mine.recv(5) == b"hello"
    mine.sendall(b"hello")
    assert theirs.recv(100) == b"hello"
    mine.close()
    theirs.close()


def test_closing_twice_and_from_many_threads(pair: Pair) -> None:
    one, other = pair
    reading = InThread(lambda: receive(one, [torch.zeros(5)]))
    closing = [InThread(one.close) for _ in range(8)]
    assert [each.end() for each in closing] == [None] * 8
    assert isinstance(reading.end(), ConnectionAbortedError)
    with pytest.raises(ConnectionResetError):
        receive(other, [torch.zeros(5)])


def test_a_failed_stream_keeps_no_tensors() -> None:
    """Nor does an error in it: else a failed receive's memory would wait until garbage is collected."""
    ours, theirs = streams()
    gc.disable()
    try:
        target = torch.zeros(1000)
        alive = weakref.ref(target)
        theirs.close()
        for _ in range(2):
            with pytest.raises(OSError, match="closed"):
                receive(ours, [target])
        ours.close()
        del target
        assert alive() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------------- goodbyes


def test_stopping_waits_for_calls(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pair
    held = Held()
    monkeypatch.setattr(module, "_libc", held)
    using = InThread(lambda: receive(one, [torch.zeros(5)]))
    assert held.inside.wait(WAIT)
    stopping = InThread(one.stop)
    time.sleep(0.05)
    assert stopping.runs
    held.go.set()
    assert stopping.end() is None
    assert isinstance(using.end(), ConnectionAbortedError)


def test_last_words_arrive_although_the_other_end_sends(pair: Pair) -> None:
    """Without a goodbye the reset, which the unread bytes cause, would overtake them."""
    one, other = pair
    count = 0

    def send() -> None:
        nonlocal count
        while True:
            other.write([torch.zeros(1 << 16)])
            count += 1

    sending = InThread(send)
    while count < 3:
        time.sleep(0.01)
    one.write([b"last words"])

    def leave() -> None:
        one.say_goodbye(WAIT)
        one.close()

    leaving = InThread(leave)
    got = bytearray(10)
    other.read([got], WAIT)
    assert got == b"last words"
    while other.is_alive():  # The end of the connection comes after the words.
        time.sleep(0.01)
    other.close()
    assert isinstance(sending.end(), ConnectionAbortedError)
    assert leaving.end() is None


@pytest.mark.parametrize("sends", [False, True])
def test_a_goodbye_ends_although_the_other_end_does_not_answer(pair: Pair, sends: bool) -> None:
    one, other = pair

    def send() -> None:
        while True:
            other.write([torch.zeros(1 << 16)])

    sending, started = InThread(send) if sends else None, time.monotonic()
    one.say_goodbye(0.3)
    assert time.monotonic() - started >= 0.3
    one.close()
    assert sending is None or isinstance(sending.end(), ConnectionError)


def test_a_goodbye_ends_when_the_connection_is_cut(pair: Pair) -> None:
    one, _ = pair
    leaving = InThread(lambda: one.say_goodbye(10 * WAIT))
    time.sleep(0.05)
    assert leaving.runs
    one.cut()
    assert leaving.end() is None


# -------------------------------------------------------------------------------------------------- peers that are gone


def test_a_peer_that_closes_in_the_middle() -> None:
    ours, theirs = connected()
    stream, got = Stream(ours, seconds=WAIT), torch.full((10,), CANARY, dtype=torch.uint8)
    theirs.sendall(b"abc")
    theirs.close()
    with pytest.raises(ConnectionResetError, match="closed"):
        receive(stream, [got])
    assert bytes(got[:3].numpy()) == b"abc"
    assert (got[3:] == CANARY).all()
    stream.close()


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_peer_that_is_killed(direction: str) -> None:
    """Its end of the connection is the kernel's then. SIGPIPE, which would end this process, does not come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def other_end() -> None:
            with socket.create_connection(listener.getsockname()):
                time.sleep(WAIT)

        before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            with forked(other_end) as child:
                stream = Stream(listener.accept()[0], seconds=WAIT)
                using = InThread(use_of(direction, stream, [torch.zeros(30_000_000)]))
                time.sleep(0.05)
                assert using.runs
                os.kill(child, signal.SIGKILL)
                error = using.end()
            assert isinstance(error, ConnectionError)
            with pytest.raises(ConnectionError):
                stream.write([torch.zeros(5)])
            stream.close()
        finally:
            signal.signal(signal.SIGPIPE, before)


def test_a_peer_that_resets_the_connection() -> None:
    ours, theirs = connected()
    stream = Stream(ours, seconds=WAIT)
    assert stream.is_alive()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    assert not stream.is_alive()
    with pytest.raises(ConnectionResetError):
        receive(stream, [torch.zeros(5)])
    with pytest.raises(ConnectionResetError):
        stream.write([torch.zeros(5)])
    stream.close()


# ----------------------------------------------------------------------------------------------------- idle connections


def test_an_idle_connection_is_alive_until_the_peer_closes_it(pair: Pair) -> None:
    one, other = pair
    move(*pair, [1000])
    assert one.is_alive()
    assert other.is_alive()
    other.close()
    assert not other.is_alive()
    assert not one.is_alive()


def test_an_idle_connection_on_which_something_was_sent_is_of_no_use(pair: Pair) -> None:
    one, other = pair
    one.write(tensors_of([1]))
    assert one.is_alive()
    assert not other.is_alive()


def test_an_idle_connection_that_was_cut_is_not_alive(pair: Pair) -> None:
    pair[0].cut()
    assert not pair[0].is_alive()
    assert not pair[1].is_alive()


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("direction", ["read", "write"])
def test_memory_that_cannot_be_used(pair: Pair, direction: str) -> None:
    """The second of two tensors lies in pages that nobody may read or write. The first one moves; the process lives."""
    one, other = pair
    size = mmap.PAGESIZE
    with mmap.mmap(-1, size) as pages:
        bad, good = torch.frombuffer(pages, dtype=torch.uint8), tensors_of([100])[0]
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        address = ctypes.c_void_p(bad.data_ptr())
        assert protect(address, ctypes.c_size_t(size), 0) == 0
        other.write([good, torch.zeros(size, dtype=torch.uint8)])
        use = use_of(direction, one, [torch.zeros(100, dtype=torch.uint8), bad])
        try:
            with pytest.raises(OSError, match="Bad address"):
                use()
        finally:
            assert protect(address, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE) == 0
        assert not bad.any()
        del bad
    assert not one.is_alive()
    with pytest.raises(OSError, match="Bad address"):
        one.write([good])


# ---------------------------------------------------------------------------------------------------------------- forks


def test_a_forked_child_cannot_use_the_stream(pair: Pair) -> None:
    """Nor can it cut or close the connection, which is its parent's."""
    one, other = pair
    reading = InThread(lambda: receive(other, [torch.zeros(3)]))
    numbers = [end._socket.fileno() for end in pair]

    def in_child() -> None:
        assert not set(numbers) & set(descriptors())
        for end in pair:
            assert not end.is_alive()
            with pytest.raises(ConnectionAbortedError, match="forked"):
                end.write([torch.zeros(5)])
            with pytest.raises(ConnectionAbortedError, match="forked"):
                receive(end, [torch.zeros(5)])
            end.cut()
            end.close()

    with forked(in_child) as child:
        assert ended(child) == 0
    assert reading.runs
    one.write([torch.zeros(3)])
    assert reading.end() is None
    move(*pair, [1000])


def test_a_forked_child_does_not_hide_its_parents_death() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reads, writes = os.pipe()

        def sleep() -> None:
            os.write(writes, b"%d\n" % os.getpid())
            time.sleep(WAIT)

        def other_end() -> None:
            with socket.create_connection(listener.getsockname()) as sock:
                stream = Stream(sock, seconds=WAIT)
                listener.close()
                with forked(sleep):
                    stream.write([torch.zeros(5)])
                    time.sleep(WAIT)

        with forked(other_end) as child:
            stream = Stream(listener.accept()[0], seconds=WAIT)
            receive(stream, [torch.zeros(5)])
            grandchild = int(os.read(reads, 100))
            os.kill(child, signal.SIGKILL)
            started = time.monotonic()
            try:
                with pytest.raises(ConnectionError):
                    receive(stream, [torch.zeros(5)])
                assert time.monotonic() - started < WAIT / 2
                os.kill(grandchild, 0)  # It still is there.
            finally:
                os.kill(grandchild, signal.SIGKILL)
        stream.close()
        os.close(reads)
        os.close(writes)


def test_a_fork_while_all_locks_are_held(pair: Pair) -> None:
    one, _ = pair
    with one._reading, one._writing, one._ending, forked(one.close) as child:
        assert ended(child) == 0
