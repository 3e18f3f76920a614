"""What encryption costs: two processes on this machine move a state with ``tls=`` and without, by serve and fetch.

python -m benchmarks.tls [--mib N] [--runs N] [--json FILE]

Beside it Python's own ``ssl``, which moves the same bytes over as many sockets: ``sendall`` of 1 MiB into
``recv_into``, a thread for each socket at both ends, TLS 1.3 with the same certificates. All ways take turns within one
run. Seconds and CPU seconds (of both processes) are medians for each GiB; moves are in place, and compared bit for bit.
Needs the ``openssl`` command.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import transfuse
from benchmarks.compare import machine
from transfuse import TLS
from transfuse._limits import MIB

CALL_BYTES = MIB
CONNECTIONS = (1, 2)
#: The part of the rate of Python's ``ssl`` over two sockets that transfuse is to reach over two connections.
GOAL = 0.7


def make_certificates(directory: Path) -> TLS:
    """A CA, and one certificate for both ends."""
    names = {name: str(directory / name) for name in ("ca.pem", "ca.key", "job.pem", "job.key", "job.csr", "names")}
    Path(names["names"]).write_text("subjectAltName=DNS:job\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for command in (
        ["req", "-x509", *curve, "-subj", "/CN=ca", "-keyout", names["ca.key"], "-out", names["ca.pem"]],
        ["req", *curve, "-subj", "/CN=job", "-keyout", names["job.key"], "-out", names["job.csr"]],
        ["x509", "-req", "-in", names["job.csr"], "-CA", names["ca.pem"], "-CAkey", names["ca.key"],
         "-extfile", names["names"], "-out", names["job.pem"]],
    ):  # fmt: skip
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return TLS(names["job.pem"], names["job.key"], names["ca.pem"])


def state_of(nbytes: int) -> torch.Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (nbytes // 8,), generator=torch.Generator().manual_seed(1))


# ----------------------------------------------------------------------------------------------- Python's own ssl


def bare_context(tls: TLS, *, listens: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_cert_chain(tls.certificate, tls.key)
    context.load_verify_locations(tls.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def in_threads(work: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def halves(memory: memoryview, count: int) -> list[memoryview]:
    size = -(-len(memory) // count)
    return [memory[at * size : (at + 1) * size] for at in range(count)]


class BareSender:
    """Accepts connections, makes TLS of each if asked to, and sends its share whenever a byte comes."""

    def __init__(self, memory: memoryview, tls: TLS, *, encrypted: bool) -> None:
        self._memory, self._encrypted = memory, encrypted
        self._context = bare_context(tls, listens=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._send, args=(sock,), daemon=True).start()

    def _send(self, sock: socket.socket) -> None:
        if self._encrypted:
            sock = self._context.wrap_socket(sock, server_side=True)
        while asked := sock.recv(2):
            part = halves(self._memory, asked[1])[asked[0]]
            for at in range(0, len(part), CALL_BYTES):
                sock.sendall(part[at : at + CALL_BYTES])


class BareReceiver:
    def __init__(self, where: Any, count: int, tls: TLS, *, encrypted: bool) -> None:
        socks = [socket.create_connection(where) for _ in range(count)]
        context = bare_context(tls, listens=False)
        self._socks = [context.wrap_socket(sock) for sock in socks] if encrypted else socks

    def receive(self, memory: memoryview) -> None:
        count = len(self._socks)

        def take(number: int, part: memoryview) -> None:
            self._socks[number].sendall(bytes([number, count]))
            at = 0
            while at < len(part):
                at += self._socks[number].recv_into(part[at : at + CALL_BYTES])

        in_threads([lambda pair=pair: take(*pair) for pair in enumerate(halves(memory, count))])  # type: ignore[misc]

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


# ------------------------------------------------------------------------------------------------------ the two ends


def send(pipe: Connection, nbytes: int, tls: TLS) -> None:
    """The sender's process: serves in all ways, and says how much CPU it has used whenever it is asked."""
    tensor = state_of(nbytes)
    memory = memoryview(tensor.numpy().data).cast("B")
    options: dict[str, Any] = {"same_host": False, "timeout": 120}
    with (
        transfuse.serve({"w": tensor}, tls=tls, **options) as encrypted,
        transfuse.serve({"w": tensor}, tls=False, **options) as plain,
    ):
        bare = [BareSender(memory, tls, encrypted=one).address for one in (True, False)]
        pipe.send((encrypted.address, plain.address, bare))
        while pipe.recv():
            pipe.send(time.process_time())


def ways(pipe: Connection, target: torch.Tensor, tls: TLS, stack: ExitStack) -> dict[str, Callable[[], object]]:
    encrypted, plain, (bare_encrypted, bare_plain) = pipe.recv()
    memory = memoryview(target.numpy().data).cast("B")

    def fetch(address: str, lanes: int, given: TLS | None) -> Callable[[], object]:
        options: dict[str, Any] = {"lanes": lanes, "tls": given or False, "same_host": False, "timeout": 120}
        return lambda: transfuse.fetch(address, {"w": target}, **options)

    found: dict[str, Callable[[], object]] = {}
    for count in CONNECTIONS:
        ssl_ways = [
            BareReceiver(where, count, tls, encrypted=one)
            for where, one in ((bare_encrypted, True), (bare_plain, False))
        ]
        for receiver in ssl_ways:
            stack.callback(receiver.close)
        found[f"transfuse with tls, {count}"] = fetch(encrypted, count, tls)
        found[f"Python's ssl, {count}"] = lambda one=ssl_ways[0]: one.receive(memory)  # type: ignore[misc]
        found[f"transfuse, {count}"] = fetch(plain, count, None)
        found[f"plain sockets, {count}"] = lambda one=ssl_ways[1]: one.receive(memory)  # type: ignore[misc]
    return found


def measure(nbytes: int, runs: int) -> dict[str, Any]:
    expected, target = state_of(nbytes), torch.zeros(nbytes // 8, dtype=torch.int64)
    scale = (1 << 30) / nbytes
    with TemporaryDirectory() as directory, ExitStack() as stack:
        tls = make_certificates(Path(directory))
        here, there = multiprocessing.get_context("spawn").Pipe()
        stack.callback(here.close)
        sender = multiprocessing.get_context("spawn").Process(target=send, args=(there, nbytes, tls), daemon=True)
        sender.start()
        found, times = ways(here, target, tls, stack), dict[str, list[tuple[float, float]]]()
        for turn in range(runs + 1):
            for name, way in found.items():
                target.zero_()
                here.send(True)
                before = here.recv() + time.process_time()
                started = time.perf_counter()
                way()
                seconds = time.perf_counter() - started
                here.send(True)
                used = here.recv() + time.process_time() - before
                if not torch.equal(target, expected):
                    raise SystemExit(f"{name}: what has arrived is not what was sent")
                if turn:  # The first turn warms up.
                    times.setdefault(name, []).append((scale * seconds, scale * used))
        here.send(False)
        sender.join(30)
    return {
        name: {
            "seconds_per_gib": statistics.median(seconds for seconds, _ in some),
            "cpu_seconds_per_gib": statistics.median(used for _, used in some),
        }
        for name, some in times.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found = measure(given.mib * MIB, given.runs)
    print(f"{'way, connections':28} {'s/GiB':>7} {'GB/s':>6} {'CPU s/GiB':>10}")
    for name, one in found.items():
        rate = (1 << 30) / 1e9 / one["seconds_per_gib"]
        print(f"{name:28} {one['seconds_per_gib']:7.2f} {rate:6.2f} {one['cpu_seconds_per_gib']:10.2f}")
    reached = found["Python's ssl, 2"]["seconds_per_gib"] / found["transfuse with tls, 2"]["seconds_per_gib"]
    print(f"over two connections: {reached:.2f} of the rate of Python's ssl (goal {GOAL})")
    if given.json is not None:
        about = {**machine.about("benchmarks.tls", sys.argv[1:]), "ssl": ssl.OPENSSL_VERSION}
        given.json.write_text(json.dumps({**about, "ways": found, "reached": reached}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
