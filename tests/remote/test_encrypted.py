"""serve and fetch with ``tls=``: what arrives, who is refused and hears why, and what somebody in between can see."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transfuse
from certificates import certificate, directory, environment_of, tls
from connections import WAIT, InThread
from serving import SHORT, TOKEN, some_state, wait_until
from transfuse import TLS
from transfuse._wire.handshake import split_address
from transfuse.testing.exact import assert_exact

#: Eight bytes that a state repeats: nobody in between may find them.
PATTERN = b"\x13TENSOR\x37"


def large_state(numel: int = 1_500_000) -> dict[str, Any]:
    return {**some_state(), "large": torch.arange(numel, dtype=torch.float32), "name": PATTERN.hex()}


@contextlib.contextmanager
def served(state: Any, **options: Any) -> Iterator[transfuse.Server]:
    chosen: Any = {"token": TOKEN, "tls": tls(), "same_host": False, "timeout": WAIT, **options}
    with transfuse.serve(state, **chosen) as one:
        yield one


def fetched(server: transfuse.Server | str, state: Any = None, **options: Any) -> transfuse.Fetched:
    address = server if isinstance(server, str) else server.address
    chosen: Any = {"token": TOKEN, "tls": tls(), "timeout": WAIT, **options}
    found: transfuse.Fetched = transfuse.fetch(address, state, **chosen)
    return found


# ------------------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.usefixtures("small_parcels")
def test_what_arrives_is_what_was_served(lanes: int) -> None:
    state, target = large_state(), large_state()
    target["large"].zero_()
    with served(state, lanes=lanes) as server:
        found = fetched(server, target, lanes=lanes)
        assert_exact(state, found.state)
        assert found.state["large"] is target["large"]
        assert found.report.connections == lanes
        assert_exact(state["model"], fetched(server, entry="model").state)
        assert transfuse.peek(server.address, token=TOKEN, tls=tls()).manifest.paths


def test_the_environment_says_it_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(tls(accepts=["localhost"])).items():
        monkeypatch.setenv(name, value)
    state = some_state()
    with served(state, tls=None) as server:
        assert_exact(state, fetched(server, tls=None).state)
        with pytest.raises(transfuse.PeerNotTrusted, match="this end does not"):
            fetched(server, tls=False)


def test_nobody_in_between_sees_a_byte_of_it() -> None:
    """A proxy that keeps all it passes on finds what is served without encryption, and nothing of it with."""
    tensor = torch.frombuffer(bytearray(PATTERN * 50_000), dtype=torch.uint8)
    for options, is_seen in (({"tls": False}, True), ({}, False)):
        with served({"w": tensor}, **options) as server, Proxy(server.address) as between:
            assert torch.equal(fetched(between.address, lanes=1, **options).state["w"], tensor)
            seen = bytes(between.seen)
        assert len(seen) > tensor.nbytes
        assert (PATTERN in seen) is is_seen
        assert (b"TFUSDOOR" in seen) is is_seen


# ------------------------------------------------------------------------------------------------------ who is refused

#: By name: what the reader gives, what the reader is told, and what the server logs.
OF_READERS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "no TLS": (lambda: False, "encrypts, and this end does not", "does not encrypt, and this end does"),
    "foreign CA": (
        lambda: tls(ca="foreign"),
        "the certificate of this end is not from a CA that it knows",
        "has a certificate that is not from a CA in ",
    ),
    "expired": (
        lambda: tls(days=-1),
        "the certificate of this end has expired",
        "has a certificate that has expired",
    ),
    "wrong name": (
        lambda: tls("DNS:stranger", accepts=["localhost"]),
        "does not accept this end, which has a certificate for stranger: see names= there",
        "has a certificate for stranger, and names= allows only spiffe://tests/job, localhost",
    ),
    "no name": (
        lambda: tls("", accepts=["localhost"]),
        "does not accept this end, which has a certificate for no name",
        "has a certificate for no name, and names= allows only spiffe",
    ),
    "wrong use": (
        lambda: tls(use="serverAuth"),
        "does not accept the certificate of this end",
        "is not made for this use",
    ),
    "trusts others": (
        lambda: tls(trusts="foreign"),
        "has a certificate that is not from a CA in ",
        "the certificate of this end is not from a CA that it knows",
    ),
    "expects others": (
        lambda: tls(accepts=["*.elsewhere.example"]),
        r"has a certificate for spiffe://tests/job, localhost, 127.0.0.1, and names= allows only \*.elsewhere",
        "does not accept this end, which has a certificate for spiffe://tests/job, localhost, 127.0.0.1: see",
    ),
}


@pytest.mark.parametrize("who", OF_READERS)
def test_who_is_refused_knows_why_at_both_ends(who: str, caplog: pytest.LogCaptureFixture) -> None:
    given, told, logged = OF_READERS[who]
    caplog.set_level(logging.DEBUG, logger="transfuse")
    target = some_state()
    before = [tensor.clone() for tensor in target["model"].values()]
    with served({**some_state(), "lr": 7.0}) as server:
        with pytest.raises(transfuse.PeerNotTrusted, match=told):
            fetched(server, target, tls=given())
        wait_until(lambda: any(logged in record.getMessage() for record in caplog.records))
        wait_until(lambda: not server._listener.strangers)
        assert_exact(some_state()["model"], fetched(server, entry="model").state)  # Others are served as before.
    assert all(torch.equal(one, other) for one, other in zip(before, target["model"].values(), strict=True))


def test_a_reader_that_encrypts_at_a_server_that_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with served(some_state(), tls=False) as server:
        with pytest.raises(transfuse.PeerNotTrusted, match="it was started without tls=, or is another service"):
            fetched(server)
        wait_until(lambda: "encrypts, and this end does not: give both the same tls=" in caplog.text)


@pytest.mark.parametrize("name", ["expired", "wrong name"])
def test_a_server_whose_certificate_is_not_accepted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    given = tls(days=-1) if name == "expired" else tls("DNS:stranger", accepts=["localhost"])
    told = "has a certificate that has expired" if name == "expired" else "has a certificate for stranger, and names="
    logged = "the certificate of this end has expired" if name == "expired" else "which has a certificate for stranger"
    with served(some_state(), tls=given) as server:
        with pytest.raises(transfuse.PeerNotTrusted, match=told):
            fetched(server)
        wait_until(lambda: logged in caplog.text)


def test_the_token_counts_within_tls() -> None:
    with served(some_state()) as server, pytest.raises(transfuse.PeerRefused, match="WrongToken"):
        fetched(server, token="another")


def test_files_that_cannot_be_used_are_refused_in_the_call(tmp_path: Path) -> None:
    good, key = certificate()
    for wrong, says in (
        (TLS(tmp_path / "none.pem", key, directory() / "ca.pem"), "none.pem cannot be read: No such file"),
        (TLS(directory() / "foreign.pem", key, directory() / "ca.pem"), "do not go together"),
        (TLS(good, key, key), "holds no certificates in PEM"),
    ):
        for call in (lambda tls=wrong: transfuse.serve({}, tls=tls), lambda tls=wrong: fetched("127.0.0.1:1", tls=tls)):
            with pytest.raises(ValueError, match=says):
                call()
    with pytest.raises(TypeError, match=r"tls takes a transfuse.TLS\(certificate, key, ca\), False or None, got True"):
        fetched("127.0.0.1:1", tls=True)


# ---------------------------------------------------------------------------------------------------- stalls and ends


def test_who_stalls_in_the_handshake_keeps_nobody_out() -> None:
    """Both ends give up within their deadlines: a server on readers, and a reader on a server that says nothing."""
    with served(some_state(), timeout=SHORT) as server:
        idle = [socket.create_connection(split_address(server.address)) for _ in range(3)]
        idle[1].sendall(b"\x16")
        idle[2].sendall(b"\x16\x03\x01\x02\x00\x01\x00")
        assert fetched(server).step is None
        for one in idle:
            one.settimeout(WAIT)
            with contextlib.suppress(ConnectionError):
                while one.recv(1 << 16):
                    pass
            one.close()
        wait_until(lambda: not server._listener.connections)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(transfuse.PeerTimeout, match="agreeing on TLS"):
            fetched(address, timeout=0.3)


def test_a_trickle_is_no_progress_in_the_handshake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as trickling:
        over = threading.Event()

        def trickle() -> None:
            sock, _ = trickling.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(b"\x16\x03\x03\x40\x00")
                while not over.wait(0.05):
                    sock.sendall(b"\0")

        thread = InThread(trickle)
        started = time.monotonic()
        with pytest.raises(transfuse.PeerTimeout, match="agreeing on TLS"):
            fetched(f"127.0.0.1:{trickling.getsockname()[1]}", timeout=0.5)
        assert time.monotonic() - started < WAIT / 2
        over.set()
        thread.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.usefixtures("small_parcels")
def test_a_reader_that_dies_or_freezes_in_the_middle(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """The server goes on: the next reader gets everything."""
    state = large_state(4_000_000)
    with served(state, timeout=SHORT, max_bytes_per_second=20e6) as server:
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                fetched(server.address)
            os._exit(0)
        wait_until(lambda: any(control.is_released for control in server._listener.connections.values()))
        time.sleep(0.1)
        os.kill(child, number)
        wait_until(lambda: "reader" in caplog.text)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wait_until(lambda: not server._listener.connections)
        assert_exact(state["model"], fetched(server, entry="model").state)


@pytest.mark.usefixtures("interruptible", "small_parcels")
def test_an_interrupted_fetch_leaves_nothing() -> None:
    state = large_state(4_000_000)
    with served(state, max_bytes_per_second=20e6) as server:

        def interrupt(progress: Any) -> None:
            if progress[0].bytes:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            fetched(server, progress=interrupt)
        wait_until(lambda: not server._listener.connections)
        assert_exact(state["model"], fetched(server, entry="model").state)


# ------------------------------------------------------------------------------------------------------------ rotation


def test_certificates_that_are_renewed_are_used_from_the_next_connection_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """First an expired one, then a good one; then half of a new pair, which changes nothing; then the other half."""
    own = [tmp_path / name for name in ("tls.crt", "tls.key")]

    def put(pair: tuple[Path, ...], *which: int) -> None:
        for at in which or (0, 1):
            shutil.copy(pair[at], tmp_path / "new")
            os.replace(tmp_path / "new", own[at])

    put(certificate(days=-1))
    with served(some_state(), tls=TLS(own[0], own[1], directory() / "ca.pem")) as server:
        with pytest.raises(transfuse.PeerNotTrusted, match="has expired"):
            fetched(server)
        put(certificate())
        assert fetched(server).step is None
        put(certificate(number=1), 0)
        assert fetched(server).step is None
        assert caplog.text.count("going on with the certificates from before") == 1
        put(certificate(number=1), 1)
        assert fetched(server).step is None
        put(certificate("DNS:another", number=2))
        with pytest.raises(transfuse.PeerNotTrusted, match="a certificate for another"):
            fetched(server)


# ------------------------------------------------------------------------------------------------------- in between


class Proxy:
    """Passes connections on, and keeps what it sees."""

    def __init__(self, address: str) -> None:
        self._to = split_address(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self._open: list[socket.socket] = []

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                come, _ = self._listener.accept()
                go = socket.create_connection(self._to)
                self._open += (come, go)
                for ends in ((come, go), (go, come)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, come: socket.socket, go: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := come.recv(1 << 16):
                self.seen += data
                go.sendall(data)
            go.shutdown(socket.SHUT_WR)
