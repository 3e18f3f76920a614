"""What tests of serving share: states, tokens, readers that stall, servers in processes."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from benchmarks.hosts import settle

import transfuse
from transfuse._remote.ends import ServedStream, ToServer
from transfuse._wire.framed import AnySocket
from transfuse._wire.handshake import (
    HELLO_BYTES,
    MAGIC,
    READER,
    VERSION,
    Come,
    ControlConnection,
    Join,
    Ready,
    connect,
    key_of,
    split_address,
)
from transfuse._wire.messages import HEADER_BYTES
from transfuse.testing.exact import differences
from transfuse.testing.ranks import Fleet, announce

TOKEN = "correct horse battery staple"


#: Long enough for everything that should succeed, on a busy machine.
LONG = timedelta(seconds=20)


#: Of servers that give up somebody.
SHORT = timedelta(seconds=1.5)


DEADLINE = 60.0


CPU = torch.device("cpu")


def some_state(count: int = 4, numel: int = 5000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(count)
    weights = {f"w{i}": torch.randn(numel, generator=generator) for i in range(count)}
    return {"model": weights, "tied": weights["w0"], "part": weights["w1"][10:20], "lr": 0.1, "names": ("a", None, 3)}


def plain_state() -> dict[str, Any]:
    return {"w": torch.arange(1000.0)}


def zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    weights = {name: torch.zeros_like(weight) for name, weight in state["model"].items()}
    return {"model": weights, "tied": weights["w0"], "part": weights["w1"][10:20], "lr": 0.0, "names": ("b", 1, 2)}


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.01)


class Halt:
    """A ``map_path=`` that stops a fetch which has heard the offer, until it may go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, path: str) -> str:
        self.reached.set()
        assert self.go_on.wait(DEADLINE)
        return path

    def fetch(self, address: str) -> Any:
        return transfuse.fetch(address, {"w": torch.zeros(1000)}, timeout=LONG, map_path=self).state


def serve_slowly(rank: int, seconds: float, rate: float | None) -> None:
    """In a process: serve until the process ends."""
    torch.set_num_threads(1)
    server = transfuse.serve(
        big_state(), token=TOKEN, timeout=timedelta(seconds=seconds), max_bytes_per_second=rate, same_host=False
    )
    announce(server.address)
    time.sleep(10 * DEADLINE)


def big_state() -> dict[str, Any]:
    return some_state(count=16, numel=1 << 18)


@contextlib.contextmanager
def servers(count: int, seconds: float = 20.0, rate: float | None = 16e6) -> Iterator[tuple[Fleet, list[str]]]:
    with Fleet(count) as fleet:
        fleet.start(serve_slowly, seconds, rate)
        for rank in range(count):
            fleet._until(lambda rank=rank: bool(fleet.workers[rank].reached), DEADLINE)  # type: ignore[misc]
        yield fleet, [next(iter(worker.reached)) for worker in fleet.workers]


# Readers that stall, or die


def go_as_far_as(rank: int, address: str, fault: int) -> None:
    """In a process: be a reader up to a moment, and no further."""
    torch.set_num_threads(1)
    moment = MOMENTS[rank]

    def stay(*_: object) -> None:
        announce("there")
        os.kill(os.getpid(), fault)

    def stay_midway(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes:
            stay()

    if moment in ("memory", "group"):
        same_host = moment == "memory"
        transfuse.fetch(address, token=TOKEN, timeout=LONG, same_host=same_host, progress=stay_midway)
    if moment in ("connected", "greeted"):
        with socket.create_connection(split_address(address)) as sock:
            if moment == "greeted":
                sock.sendall(MAGIC + bytes([VERSION]) + bytes(32))
                sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
            stay()
    control = connect(address, key_of(TOKEN), 20.0, 0)
    if moment == "proved":
        stay()
    control.send(Come(), 20.0)
    if moment == "coming":
        stay()
    control.expect(Come, 20.0, "waiting for room", 400)
    if moment == "there":
        stay()
    assert moment == "ready"
    stay(get_ready(control, address))


MOMENTS = ["connected", "greeted", "proved", "coming", "there", "ready", "memory", "group"]


def come_in(address: str, token: str | None = None) -> ControlConnection:
    """Be a reader for which the server has room."""
    control = connect(address, key_of(token), 20.0, 0)
    control.send(Come(), 20.0)
    control.expect(Come, 20.0, "waiting for room", 400)
    return control


def get_ready(control: ControlConnection, address: str) -> ServedStream:
    """Be a reader for which the server holds its state still. From now on the connection is a stream."""
    control.send(Ready(), 20.0)
    control.expect(Ready, 20.0, "waiting", 400)
    return ServedStream(control, READER, 20.0, ToServer(address, key_of(None)))


def own_tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def own_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def nothing_is_left(tasks: int, files: int) -> None:
    """No more threads and files than before. What a failed transfer holds is garbage, and goes with it."""
    # Again and again: on a busy machine it becomes garbage late.
    wait_until(lambda: gc.collect() >= 0 and own_tasks() <= tasks and own_files() <= files)


# Strangers


def hello(version: int = VERSION) -> bytes:
    return MAGIC + bytes([version]) + secrets.token_bytes(32)


def all_it_says(sock: AnySocket, to_say: bytes = b"") -> bytes:
    """Say something, and hear everything until the other end closes."""
    said = b""
    sock.settimeout(DEADLINE)
    with contextlib.suppress(ConnectionError):
        sock.sendall(to_say)
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(1 << 16):
            said += chunk
    return said


@contextlib.contextmanager
def listened_to(address: str) -> Iterator[tuple[str, list[bytes]]]:
    """A relay before a server, and all the bytes that the reader said: a replay needs them."""
    said: list[bytes] = []

    def pass_on(source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                if keep:
                    said.append(chunk)
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as relay, contextlib.ExitStack() as stack:

        def take() -> None:
            with contextlib.suppress(OSError):
                one, _ = relay.accept()
                other = socket.create_connection(split_address(address))
                stack.callback(one.close)
                stack.callback(other.close)
                ways = [threading.Thread(target=pass_on, args=way) for way in ((one, other, True), (other, one, False))]
                for way in ways:
                    way.start()
                for way in ways:
                    way.join()

        taking = threading.Thread(target=take)
        taking.start()
        yield f"127.0.0.1:{relay.getsockname()[1]}", said
        with contextlib.suppress(OSError):
            relay.shutdown(socket.SHUT_RDWR)
        taking.join(DEADLINE)


# A reader that knows the token and means no good


def serve_here(rank: int) -> None:
    server = transfuse.serve(some_state(), token=TOKEN, timeout=timedelta(seconds=1), max_readers=300)
    announce(server.address)
    time.sleep(10 * DEADLINE)


def join_as(address: str, number: int) -> None:
    """Connect as a stream that nobody expects. The server hangs up."""
    control = connect(address, key_of(TOKEN), 20.0, 0)
    try:
        control.send(Join(number), 20.0)
        assert all_it_says(control.release()) == b""
    finally:
        control.release().close()


def speak_rubbish(address: str, words: bytes) -> None:
    """Be let in as a reader, and then say this in the place of an answer to the offer. The server hangs up."""
    control = connect(address, key_of(TOKEN), 20.0, 0)
    try:
        with contextlib.suppress(transfuse.PeerError):  # On a busy machine the server may have given up before.
            control.send(Come(), 20.0)
            control.expect(Come, 20.0, "waiting for room", 400)
            control.send(Ready(), 20.0)
            control.expect(Ready, 20.0, "waiting", 400)
            all_it_says(control.release(), words)
    finally:
        control.release().close()


#: Numbers of connections, all of them false.
FALSE_NUMBERS = [0, 1, -1, 1 << 61, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1]


RUBBISH = [
    b"",
    b"\0",
    bytes(HEADER_BYTES),
    bytes(HEADER_BYTES + 1),
    b"\xff" * HEADER_BYTES,
    b"\xff" * (1 << 20),
    secrets.token_bytes(HEADER_BYTES - 1),
    secrets.token_bytes(HEADER_BYTES),
    secrets.token_bytes(1 << 20),
    MAGIC + bytes([VERSION]) + bytes(32),
]


def false_words(numbers: Sequence[int], rubbish: Sequence[bytes]) -> None:
    """Nothing that a reader who knows the token says ends the server."""
    with Fleet(1) as fleet, ThreadPoolExecutor(32) as threads:
        fleet.start(serve_here)
        fleet._until(lambda: bool(fleet.workers[0].reached), DEADLINE)
        (address,) = fleet.workers[0].reached
        doings = [threads.submit(join_as, address, number) for number in numbers]
        doings += [threads.submit(speak_rubbish, address, words) for words in rubbish]
        for future in doings:
            future.result(DEADLINE)
        assert not differences(some_state(), transfuse.fetch(address, token=TOKEN).state)
        fleet._until(lambda: True, 0)
        assert fleet.workers[0].busy, fleet.workers[0].outcome


# Where it listens


def own_sockets() -> set[str]:
    """The local addresses of all TCP sockets of this process."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].split(":")[0])
    return found


def serve_on(rank: int, host: str) -> None:
    with transfuse.serve(some_state(), token=TOKEN, host=host, timeout=LONG) as server:
        announce(server.address)
        time.sleep(10 * DEADLINE)


def fetch_from(rank: int, address: str) -> int:
    return len(list(differences(some_state(), transfuse.fetch(address, token=TOKEN, timeout=LONG).state)))


def move_in(rank: int, namespaces: list[str]) -> None:
    settle(namespaces[rank], LONG)


def fetch_until_interrupted(rank: int, addresses: list[str]) -> str:
    torch.set_num_threads(1)

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes:
            announce("moving")

    try:
        transfuse.fetch(addresses[rank], token=TOKEN, timeout=10 * LONG, same_host=False, progress=show)
    except KeyboardInterrupt:
        return "interrupted"
    return "fetched"
