"""The endpoint of a keeper's metrics, and clients that are slow, huge, many, or not wanted."""

from __future__ import annotations

import contextlib
import http.client
import os
import pathlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from scraping import free_port, get
from transfuse._metrics.address import MetricsAddress, address_in
from transfuse._metrics.endpoint import MetricsEndpoint
from transfuse._wire import http_server

TEXT = "x 1\n" * 100_000


class Health:
    is_well = True

    def __call__(self) -> tuple[bool, str]:
        return self.is_well, "ok" if self.is_well else "draining"


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def endpoint(health: Health) -> Iterator[MetricsEndpoint]:
    made = opened(MetricsAddress("127.0.0.1"), health)
    try:
        yield made
    finally:
        made.close()


def opened(where: MetricsAddress, health: Health | None = None) -> MetricsEndpoint:
    return MetricsEndpoint(where, metrics=lambda: TEXT, health=health or Health())


def connect(endpoint: MetricsEndpoint) -> socket.socket:
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_what_it_answers(endpoint: MetricsEndpoint, health: Health) -> None:
    assert get(endpoint.address, "/metrics") == (200, TEXT)
    assert get(endpoint.address, "/metrics?a=b")[0] == 200
    assert get(endpoint.address, "/healthz") == (200, "ok\n")
    health.is_well = False
    assert get(endpoint.address, "/healthz") == (503, "draining\n")
    assert get(endpoint.address, "/") == (404, "a keeper answers /metrics and /healthz\n")
    with contextlib.closing(http.client.HTTPConnection(endpoint.address, timeout=60)) as asking:
        asking.request("HEAD", "/metrics")
        answer = asking.getresponse()
        assert (answer.status, answer.headers["Content-Length"], answer.read()) == (200, str(len(TEXT)), b"")
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        asking.request("POST", "/metrics", b"x")
        assert asking.getresponse().status == 405


def test_a_page_in_a_browser_cannot_come_by_a_name_of_its_own(endpoint: MetricsEndpoint) -> None:
    for host, status in (("evil.example", 403), ("localhost:9400", 200), (endpoint.address, 200)):
        with contextlib.closing(http.client.HTTPConnection(endpoint.address, timeout=60)) as asking:
            asking.request("GET", "/healthz", headers={"Host": host})
            assert asking.getresponse().status == status, host


def test_a_unix_socket(tmp_path: pathlib.Path, health: Health) -> None:
    path = tmp_path / "metrics"
    endpoint = opened(address_in(f"unix:{path}", "it"), health)
    assert endpoint.address == str(path)

    def ask() -> bytes:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(60)
            asking.connect(str(path))
            asking.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            return b"".join(iter(lambda: asking.recv(4096), b""))

    assert ask().endswith(b"\r\n\r\nok\n")
    # It is somebody's, as long as somebody answers.
    with pytest.raises(OSError, match="Address already in use"):
        opened(MetricsAddress(path=str(path)))
    endpoint.close()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # Of a keeper that was killed.
    endpoint = opened(MetricsAddress(path=str(path)))
    assert ask().endswith(b"ok\n")
    endpoint.close()
    path.write_text("a file of the user's")
    with pytest.raises(OSError, match="Address already in use"):
        opened(MetricsAddress(path=str(path)))
    assert path.read_text() == "a file of the user's"


def test_a_range_gives_each_its_own_port_until_it_is_used_up() -> None:
    first = free_port()
    where = MetricsAddress("127.0.0.1", first, first + 1)
    with contextlib.ExitStack() as stack:
        some = []
        for _ in range(3):
            with contextlib.suppress(OSError):  # Somebody else may have taken the second one.
                some.append(opened(where))
                stack.callback(some[-1].close)
        ports = [int(one.address.rpartition(":")[2]) for one in some]
        assert ports in ([first], [first, first + 1])
        with pytest.raises(OSError, match="Address already in use"):
            opened(where)


def test_all_addresses_of_this_machine() -> None:
    endpoint = opened(address_in(":0", "it"))
    port = endpoint.address.removeprefix(":")
    try:
        assert get(f"127.0.0.1:{port}", "/healthz") == (200, "ok\n")
        if socket.has_dualstack_ipv6() and pathlib.Path("/proc/net/if_inet6").exists():
            with contextlib.suppress(OSError):
                socket.create_connection(("::1", int(port)), timeout=5).close()
    finally:
        endpoint.close()


# ------------------------------------------------------------------------------------------------------ hostile clients


def test_a_huge_header_is_refused(endpoint: MetricsEndpoint) -> None:
    with connect(endpoint) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"a" * (1 << 20))
        assert sock.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 431"
    assert get(endpoint.address, "/healthz") == (200, "ok\n")


def test_slow_clients_keep_nobody_out(monkeypatch: pytest.MonkeyPatch, endpoint: MetricsEndpoint) -> None:
    """Some say nothing, some stop in the middle of a request, and some take nothing of the answer."""
    monkeypatch.setattr(http_server, "HTTP_REQUEST_SECONDS", 0.3)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(endpoint)) for _ in range(20)]
        halves = [stack.enter_context(connect(endpoint)) for _ in range(20)]
        for sock in halves:
            with contextlib.suppress(OSError):
                sock.sendall(b"GET /met")
        deadline = time.monotonic() + 60
        while get(endpoint.address, "/metrics")[0] != 200:
            assert time.monotonic() < deadline
        assert len(silent) + len(halves) > 16
        for _ in range(8):
            sock = stack.enter_context(connect(endpoint))
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while get(endpoint.address, "/healthz") != (200, "ok\n"):
            assert time.monotonic() < deadline
        # A keeper that ends does not wait for them for long.
        began = time.monotonic()
        endpoint.close()
        assert time.monotonic() - began < 30
    names = [thread.name for thread in threading.enumerate() if "metrics endpoint" in thread.name]
    assert names == []


def test_a_child_of_a_fork_does_not_hold_the_port(endpoint: MetricsEndpoint) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        where = address_in(endpoint.address, "it")
        endpoint.close()
        opened(where).close()
    finally:
        os.close(writing)
        os.waitpid(child, 0)
