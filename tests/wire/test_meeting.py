"""The port for streams, as strangers, replayers, men in the middle and many honest ranks at once see it."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import hmac
import logging
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import transfuse
from connections import WAIT, InThread, descriptors, ended, forked
from descriptor_limits import leaving
from serving import all_it_says, hello, wait_until
from transfuse._tuning import HANDSHAKE_MAX_FRAME_BYTES
from transfuse._wire import meeting
from transfuse._wire.framed import AnySocket
from transfuse._wire.handshake import (
    HELLO_BYTES,
    PROOF_BYTES,
    VERSION,
    Come,
    Frame,
    Join,
    ReaderRefused,
    Ready,
    Wait,
    connect,
    key_of,
    split_address,
)
from transfuse._wire.listener import MAX_STRANGERS, Listener
from transfuse._wire.meeting import Expected, NoPort, OwnPort, dial_place, new_number, own_port
from transfuse._wire.messages import Place
from transfuse.testing.ranks import Ranks

HERE = "127.0.0.1"


def in_plain(sock: AnySocket | None) -> socket.socket:
    """A connection that has come, and is not encrypted."""
    assert isinstance(sock, socket.socket)
    return sock


def dial(address: str, key: bytes, number: int, seconds: float) -> socket.socket:
    return in_plain(meeting.dial(address, key, number, seconds))


@pytest.fixture
def port() -> Iterator[OwnPort]:
    own = OwnPort(HERE)
    yield own
    for thread in own._listener.close(cancel=True):
        thread.join(WAIT)


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has no port yet. What it gets is closed at the end."""
    ports: dict[str, OwnPort] = {}
    monkeypatch.setattr(meeting, "_ports", ports)
    monkeypatch.setattr(meeting, "_refused", {})
    yield
    for own in ports.values():
        own._listener.close(cancel=True)


def dialled(port: OwnPort, number: int, *, token: bytes | None = None) -> socket.socket:
    place = port.place()
    return dial(place.address, key_of(place.token if token is None else token), number, WAIT)


def talks(one: socket.socket | None, other: socket.socket | None) -> bool:
    """Whether these are the two ends of one connection."""
    assert one is not None
    assert other is not None
    said, answered = secrets.token_bytes(20), secrets.token_bytes(20)
    for end in (one, other):
        end.settimeout(WAIT)
    one.sendall(said)
    other.sendall(answered)
    return other.recv(20, socket.MSG_WAITALL) == said and one.recv(20, socket.MSG_WAITALL) == answered


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes, and says nothing before."""
    sock.settimeout(WAIT)
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def lets_in(port: OwnPort) -> bool:
    """Whether an honest end gets through."""
    number = new_number()
    port.expected.add(number)
    with dialled(port, number) as mine, in_plain(port.expected.wait(number, WAIT)) as theirs:
        return talks(mine, theirs)


def nobody_comes(port: OwnPort, number: int) -> bool:
    return port.expected.wait(number, 0.1) is None


def test_a_connection_of_the_number_that_is_expected(port: OwnPort) -> None:
    numbers = [new_number() for _ in range(3)]
    for number in numbers:
        port.expected.add(number)
    mine = {number: dialled(port, number) for number in reversed(numbers)}
    for number in numbers:
        with mine[number], in_plain(port.expected.wait(number, WAIT)) as theirs:
            assert talks(mine[number], theirs)


def test_numbers_and_tokens_are_secrets() -> None:
    assert len({new_number() for _ in range(1000)}) == 1000
    assert all(0 < new_number() < 1 << 62 for _ in range(1000))
    assert sum(new_number().bit_length() for _ in range(100)) > 100 * 58


# ------------------------------------------------------------------------------------------------------------ strangers


def test_a_wrong_token(port: OwnPort) -> None:
    number = new_number()
    port.expected.add(number)
    right = port.place().token
    for token in (bytes(32), secrets.token_bytes(32), right[:-1] + bytes([right[-1] ^ 1])):
        with pytest.raises(transfuse.PeerRefused):
            dialled(port, number, token=token)
    with pytest.raises(transfuse.PeerRefused):
        dial(port.place().address, key_of(None), number, WAIT)
    assert nobody_comes(port, number)
    assert lets_in(port)


@pytest.mark.parametrize(
    ("words", "heard"),
    [
        (secrets.token_bytes(1000), 0),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100), 0),
        (hello(VERSION + 1), HELLO_BYTES),
        (hello() + bytes(PROOF_BYTES), HELLO_BYTES),
        (hello() + secrets.token_bytes(1 << 20), HELLO_BYTES),
    ],
    ids=["rubbish", "http", "another version", "a wrong proof", "much"],
)
def test_a_stranger_hears_a_hello_at_most(port: OwnPort, words: bytes, heard: int) -> None:
    before = descriptors()
    with socket.create_connection(split_address(port.place().address)) as sock:
        said = all_it_says(sock, words)
    # A connection that closes on unread bytes may take what was said before with it.
    assert len(said) in {heard, 0}
    wait_until(lambda: not port._listener.connections)
    assert lets_in(port)
    wait_until(lambda: descriptors() == before)


def test_strangers_who_say_nothing_delay_nobody(port: OwnPort) -> None:
    number, where = new_number(), split_address(port.place().address)
    port.expected.add(number)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(where)) for _ in range(3)]
        with dialled(port, number) as mine, in_plain(port.expected.wait(number, WAIT)) as theirs:
            assert talks(mine, theirs)
        assert len(port._listener.strangers) == len(silent), "they had left before: this has shown nothing"
        for _ in range(2 * MAX_STRANGERS):
            stack.enter_context(socket.create_connection(where))
        for _ in range(5):
            assert lets_in(port)
        wait_until(lambda: len(port._listener.strangers) <= MAX_STRANGERS)
    wait_until(lambda: not port._listener.connections)


# ---------------------------------------------------------------------------------------- replays, reflections, changes


@contextlib.contextmanager
def in_the_middle(
    address: str, change: Callable[[bytes, int], bytes] = lambda data, at: data
) -> Iterator[tuple[str, bytearray]]:
    """Somebody between two ends, and all that the dialling end said. ``change``: what becomes of that, from byte
    ``at`` on."""
    said = bytearray()

    def pass_on(come: socket.socket, go: socket.socket, dials: bool) -> None:
        with contextlib.suppress(OSError):
            while data := come.recv(1 << 16):
                at = len(said)
                if dials:
                    said.extend(data)
                go.sendall(change(data, at) if dials else data)
        for end in (come, go):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with socket.create_server((HERE, 0)) as listener, contextlib.ExitStack() as stack:

        def take() -> None:
            with contextlib.suppress(OSError):
                one = stack.enter_context(listener.accept()[0])
                other = stack.enter_context(socket.create_connection(split_address(address)))
                ways = [InThread(lambda: pass_on(one, other, True)), InThread(lambda: pass_on(other, one, False))]
                for way in ways:
                    way.end()

        taking = InThread(take)
        yield f"{HERE}:{listener.getsockname()[1]}", said
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        taking.end()


JOIN_AT = HELLO_BYTES + PROOF_BYTES


def test_a_replay_of_all_that_an_honest_end_said(port: OwnPort) -> None:
    number, key = new_number(), key_of(port.place().token)
    port.expected.add(number)
    with (
        in_the_middle(port.place().address) as (address, said),
        dial(address, key, number, WAIT) as mine,
        in_plain(port.expected.wait(number, WAIT)) as theirs,
    ):
        assert talks(mine, theirs)
    assert len(said) > JOIN_AT
    # The same number is expected again, as it never is.
    port.expected.add(number)
    for words in (said, said[:JOIN_AT], said[:HELLO_BYTES]):
        with socket.create_connection(split_address(port.place().address)) as sock:
            sock.sendall(words)
            if len(words) == HELLO_BYTES:
                sock.shutdown(socket.SHUT_WR)
            assert len(all_it_says(sock)) in {HELLO_BYTES, 0}
    assert nobody_comes(port, number)


def test_a_listener_that_gives_back_what_it_hears() -> None:
    """The proof of the end that listens is another one."""
    with socket.create_server((HERE, 0)) as fake:
        dialling = InThread(lambda: dial(f"{HERE}:{fake.getsockname()[1]}", key_of(b"token"), 5, WAIT))
        with fake.accept()[0] as sock, contextlib.suppress(ConnectionError):
            while data := sock.recv(1 << 16):
                sock.sendall(data)
        assert isinstance(dialling.end(), transfuse.ProtocolError)


def test_the_ports_own_proof_given_back(port: OwnPort) -> None:
    """Somebody who could make the port prove itself would still not have the proof of an end that dials."""
    number, key = new_number(), key_of(port.place().token)
    port.expected.add(number)
    for role in (b"server", b"session", b""):
        with socket.create_connection(split_address(port.place().address)) as sock:
            mine = hello()
            sock.sendall(mine)
            theirs = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
            proof = hmac.digest(key, b"transfuse " + role + b" " + mine + theirs, hashlib.sha256)
            assert all_it_says(sock, proof) == b""
    assert nobody_comes(port, number)


@pytest.mark.parametrize("at", ["my nonce", "the proof", "the length", "the number", "the mark"])
def test_a_man_in_the_middle_changes_a_byte(port: OwnPort, at: str) -> None:
    """The proof is of both nonces, and the number travels under a key that is made of them."""
    number, key = new_number(), key_of(port.place().token)
    place = {
        "my nonce": HELLO_BYTES - 1,
        "the proof": HELLO_BYTES,
        "the length": JOIN_AT,
        "the number": JOIN_AT + 4 + 20,
        "the mark": -1,
    }[at]
    frame = bytearray()

    def change(data: bytes, start: int) -> bytes:
        changed = bytearray(data)
        where = start + len(data) - 1 if place < 0 and start >= JOIN_AT else place
        if 0 <= where - start < len(data):
            changed[where - start] ^= 1
            frame.extend(data)
        return bytes(changed)

    port.expected.add(number)
    port.expected.add(number ^ 1)
    with in_the_middle(port.place().address, change) as (address, _):
        try:
            sock = dial(address, key, number, WAIT)
        except transfuse.PeerError:
            assert at in ("my nonce", "the proof")
        else:
            with sock:
                assert is_closed(sock)
    assert frame, "nothing was changed"
    assert nobody_comes(port, number)
    assert nobody_comes(port, number ^ 1)


def test_a_proof_for_one_port_is_none_for_another(port: OwnPort) -> None:
    """A false listener passes on what it hears to another port, which has another token."""
    number = new_number()
    port.expected.add(number)
    with in_the_middle(port.place().address) as (address, _), pytest.raises(transfuse.PeerRefused):
        dial(address, key_of(secrets.token_bytes(32)), number, WAIT)
    assert nobody_comes(port, number)


@pytest.mark.parametrize(
    "frame", [Come(), Wait(), Ready(), ReaderRefused("kind", "cause")], ids=lambda frame: str(frame)
)
def test_other_frames_than_the_number(port: OwnPort, frame: Frame) -> None:
    control = connect(port.place().address, key_of(port.place().token), WAIT, -1)
    control.send(frame, WAIT)
    with in_plain(control.release()) as sock:
        assert is_closed(sock)
    assert lets_in(port)


@pytest.mark.parametrize("length", [0, HANDSHAKE_MAX_FRAME_BYTES, HANDSHAKE_MAX_FRAME_BYTES + 1, (1 << 32) - 1])
def test_frames_of_any_length(port: OwnPort, length: int) -> None:
    """A caller that knows the token announces a long frame, sends what is no frame, and goes."""
    control = connect(port.place().address, key_of(port.place().token), WAIT, -1)
    with in_plain(control.release()) as sock:
        sock.sendall(length.to_bytes(4, "little") + bytes(min(length, HANDSHAKE_MAX_FRAME_BYTES) + PROOF_BYTES))
        assert is_closed(sock)
    assert lets_in(port)


@pytest.mark.parametrize("number", [0, -1, (1 << 64) - 1, -(1 << 63)])
def test_numbers_that_cannot_be(port: OwnPort, number: int) -> None:
    with dialled(port, number) as sock:
        assert is_closed(sock)
    assert lets_in(port)


# ------------------------------------------------------------------------------------------------------------- expected


def test_a_number_that_nobody_expects(port: OwnPort) -> None:
    before = descriptors()
    with dialled(port, new_number()) as sock:
        assert is_closed(sock)
    wait_until(lambda: descriptors() == before)


def test_the_same_number_twice(port: OwnPort) -> None:
    number = new_number()
    port.expected.add(number)
    with dialled(port, number) as first:
        wait_until(lambda: not port._listener.connections)
        with dialled(port, number) as second:
            assert is_closed(second)
        with in_plain(port.expected.wait(number, WAIT)) as theirs:
            assert talks(first, theirs)
            with dialled(port, number) as third:
                assert is_closed(third)
            assert talks(first, theirs)


def test_a_number_that_is_forgotten(port: OwnPort) -> None:
    """Before its connection comes, after it has come, and while somebody waits for it."""
    before, number = descriptors(), new_number()
    port.expected.add(number)
    port.expected.forget(number)
    with dialled(port, number) as sock:
        assert is_closed(sock)
    port.expected.add(number)
    with dialled(port, number) as sock:
        wait_until(lambda: not port._listener.connections)
        port.expected.forget(number)
        assert is_closed(sock)
    assert port.expected.wait(number, WAIT) is None
    port.expected.add(number)
    got: list[AnySocket | None] = []
    waiting = InThread(lambda: got.append(port.expected.wait(number, WAIT)))
    time.sleep(0.05)
    assert waiting.runs
    port.expected.forget(number)
    assert waiting.end() is None
    assert got == [None]
    port.expected.forget(number)
    wait_until(lambda: descriptors() == before)


def test_a_number_that_is_forgotten_while_its_connection_is_under_way(port: OwnPort) -> None:
    """It has proved itself, and has not yet said which one it is."""
    before, number = descriptors(), new_number()
    port.expected.add(number)
    control = connect(port.place().address, key_of(port.place().token), WAIT, -1)
    port.expected.forget(number)
    control.send(Join(number), WAIT)
    with in_plain(control.release()) as sock:
        assert is_closed(sock)
    wait_until(lambda: descriptors() == before)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_forgotten_at_any_moment(port: OwnPort, seed: int) -> None:
    """Each connection is handed over, or closed. No descriptor stays behind."""
    gc.collect()  # Of what other tests have left.
    chance, before = random.Random(seed), descriptors()
    numbers = [new_number() for _ in range(60)]
    for number in numbers:
        port.expected.add(number)
    taken: list[AnySocket | None] = []
    mine: list[socket.socket] = []
    jobs: list[Callable[[], object]] = []
    for number in numbers:
        jobs.append(lambda number=number: mine.append(dialled(port, number)))  # type: ignore[misc]
        jobs.append(lambda number=number: taken.append(port.expected.wait(number, chance.random() / 10)))  # type: ignore[misc]
        jobs.append(lambda number=number: port.expected.forget(number))  # type: ignore[misc]
    chance.shuffle(jobs)
    assert [job.end() for job in [InThread(job) for job in jobs]] == [None] * len(jobs)
    wait_until(lambda: not port._listener.connections)
    there = {in_plain(sock).getpeername() for sock in taken if sock is not None}
    for sock in mine:
        assert sock.getsockname() in there or is_closed(sock)
        sock.close()
    for one in taken:
        if one is not None:
            one.close()
    mine.clear()
    wait_until(lambda: descriptors() == before)


def test_an_interrupt_while_waiting_for_a_connection(interruptible: None) -> None:
    expected = Expected()
    expected.add(5)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        expected.wait(5, WAIT)
    expected.forget(5)
    assert expected.wait(5, WAIT) is None


# ------------------------------------------------------------------------------------------------------ many, and ports


def test_many_connections_at_once(port: OwnPort) -> None:
    """As many as the ranks of a large job."""
    processes, each = 4, 50
    numbers = [new_number() for _ in range(processes * each)]
    for number in numbers:
        port.expected.add(number)
    reads, writes = os.pipe()
    place = port.place()

    def dial_all(mine: list[int]) -> None:
        made: list[socket.socket] = []
        threads = [
            InThread(lambda number=number: made.append(dial(place.address, key_of(place.token), number, 10.0)))  # type: ignore[misc]
            for number in mine
        ]
        assert [thread.end() for thread in threads] == [None] * len(mine)
        os.write(writes, b"x")
        time.sleep(WAIT)

    with contextlib.ExitStack() as stack:
        for number in range(processes):
            some = numbers[number::processes]
            stack.enter_context(forked(lambda some=some: dial_all(some)))  # type: ignore[misc]
        come = [port.expected.wait(number, WAIT) for number in numbers]
        assert None not in come
        assert sum(len(os.read(reads, 1)) for _ in range(processes)) == processes
    for sock in come:
        assert sock is not None
        sock.close()
    os.close(reads)
    os.close(writes)


def test_nobody_waits_for_a_port_that_is_busy() -> None:
    """The kernel takes connections while the process does not. A caller without room tries again a second later."""
    listener = Listener(
        (HERE, 0), b"", lambda _: None, name="busy", rank=-1, prove_seconds=WAIT, complain=lambda *_: None
    )
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close, cancel=True)
        for _ in range(300):
            stack.enter_context(socket.create_connection((HERE, listener.port), timeout=WAIT / 3))


def free_ports(count: int) -> list[int]:
    """Ports in a row on which nobody listens."""
    for _ in range(100):
        first = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(count):
                stack.enter_context(socket.create_server((HERE, first + number)))
            return list(range(first, first + count))
    pytest.fail("no free ports were found")


def test_one_port(monkeypatch: pytest.MonkeyPatch, nothing_known: None) -> None:
    (number,) = free_ports(1)
    monkeypatch.setenv("TRANSFUSE_PORT", str(number))
    own = own_port(HERE)
    assert isinstance(own, OwnPort)
    assert own.place().address == f"{HERE}:{number}"
    assert own_port(HERE) is own
    assert lets_in(own)


def test_the_first_free_port_of_several(monkeypatch: pytest.MonkeyPatch, nothing_known: None) -> None:
    ports = free_ports(3)
    monkeypatch.setenv("TRANSFUSE_PORT", f"{ports[0]}-{ports[-1]}")
    with socket.create_server((HERE, ports[0])), socket.create_server((HERE, ports[1])):
        own = own_port(HERE)
        assert isinstance(own, OwnPort)
        assert own.place().address == f"{HERE}:{ports[2]}"
        assert lets_in(own)


def test_no_free_port(
    monkeypatch: pytest.MonkeyPatch, nothing_known: None, caplog: pytest.LogCaptureFixture, port: OwnPort
) -> None:
    """One line, and this process still connects to others. For a while it does not try again."""
    ports = free_ports(2)
    monkeypatch.setenv("TRANSFUSE_PORT", f"{ports[0]}-{ports[-1]}")
    with socket.create_server((HERE, ports[0])), socket.create_server((HERE, ports[1])):
        own = own_port(HERE)
        assert isinstance(own, NoPort)
    assert own_port(HERE) is own
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"cannot listen on {HERE}" in caplog.text
    assert own.place() is None
    number = new_number()
    port.expected.add(number)
    with in_plain(own.dial(port.place(), number, WAIT)) as mine, in_plain(port.expected.wait(number, WAIT)) as theirs:
        assert talks(mine, theirs)
    monkeypatch.setattr(meeting, "MEETING_AGAIN_SECONDS", 0.0)
    assert isinstance(own_port(HERE), OwnPort)


def test_no_address_and_no_descriptors(nothing_known: None, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(own_port(None), NoPort)
    assert isinstance(own_port("192.0.2.1"), NoPort)  # An address that no host has.
    with leaving(0):
        assert isinstance(own_port(HERE), NoPort)
    assert len(caplog.records) == 2
    assert "ulimit -n" in caplog.text


@pytest.mark.parametrize("text", ["x", "-1", "65536", "5-4", "1-", "-", "0-5", "80,81"])
def test_a_wrong_setting_is_refused_before_the_first_transfer(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_PORT", text)
    with Ranks(1) as ranks, pytest.raises(ValueError, match="TRANSFUSE_PORT must be a port"):
        transfuse.PGTransport(ranks.pgs[0], 5.0, "cpu")


# ------------------------------------------------------------------------------------------------------------- dialling


@pytest.mark.parametrize(
    "address",
    [
        *("", "x", "localhost:80", "nobody.invalid:80", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:x"),
        *("1.2.3:80", "::1:80", "[::1]", "a\0b:80", "a" * 127, "127.1:80", ":80", "[nobody.invalid]:80"),
    ],
)
def test_places_that_are_none(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are not looked up: that could take longer than the group."""
    monkeypatch.setattr(meeting, "dial", lambda *_: pytest.fail("it was dialled"))
    with pytest.raises(transfuse.TransfuseError, match="which is no address"):
        dial_place(Place(address, bytes(32)), 5, WAIT)


def test_an_end_that_does_not_listen() -> None:
    with pytest.raises(transfuse.TransfuseError, match="does not listen"):
        dial_place(None, 5, WAIT)


def test_an_end_that_is_silent_refuses_or_closes() -> None:
    before = descriptors()
    with socket.create_server((HERE, 0)) as silent:
        place = Place(f"{HERE}:{silent.getsockname()[1]}", bytes(32))
        started = time.monotonic()
        with pytest.raises(transfuse.PeerTimeout):
            dial_place(place, 5, 0.2)
        assert time.monotonic() - started < WAIT / 2

        def close() -> None:
            for _ in range(2):
                silent.accept()[0].close()

        closing = InThread(close)
        with pytest.raises(transfuse.PeerError):
            dial_place(place, 5, WAIT)
        assert closing.end() is None
    with pytest.raises(transfuse.PeerLost):
        dial_place(place, 5, WAIT)
    assert descriptors() == before


# ---------------------------------------------------------------------------------------------------------------- forks


def test_a_forked_child_holds_nothing_of_its_parents(nothing_known: None) -> None:
    """Neither the port, nor connections that strangers make, that were brought, or that this process makes."""
    before = descriptors()
    own, number = own_port(HERE), new_number()
    assert isinstance(own, OwnPort)
    own.expected.add(number)
    place = own.place()
    with (
        socket.create_connection(split_address(place.address)) as stranger,
        socket.create_server((HERE, 0)) as silent,
        dialled(own, number) as mine,
    ):
        wait_until(lambda: len(own._listener.connections) == 1 and not own.expected._numbers[number].empty())
        dialling = InThread(lambda: dial(f"{HERE}:{silent.getsockname()[1]}", key_of(b"x"), 5, WAIT))
        with silent.accept()[0] as other:
            plain = {sock.fileno() for sock in (stranger, silent, other)}

            def in_child() -> None:
                assert set(descriptors()) - set(before) == plain
                theirs = own_port(HERE)
                assert isinstance(theirs, OwnPort)
                assert theirs.place().address != place.address
                assert theirs.place().token != place.token
                assert lets_in(theirs)

            with forked(in_child) as child:
                assert ended(child) == 0
        assert isinstance(dialling.end(), transfuse.PeerError)
        with in_plain(own.expected.wait(number, WAIT)) as theirs:
            assert talks(mine, theirs)
        assert lets_in(own)


def test_a_forked_child_does_not_keep_its_parents_port() -> None:
    reads, writes = os.pipe()

    def parent() -> None:
        own = OwnPort(HERE)
        with forked(lambda: time.sleep(WAIT)) as child:
            os.write(writes, f"{own.place().address} {child}".encode())
            time.sleep(WAIT)

    with forked(parent) as process:
        address, child = os.read(reads, 100).decode().split()
        socket.create_connection(split_address(address)).close()
        os.kill(process, signal.SIGKILL)
        try:
            assert ended(process) == -signal.SIGKILL
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(split_address(address))
            os.kill(int(child), 0)  # It still is there.
        finally:
            os.kill(int(child), signal.SIGKILL)
    os.close(reads)
    os.close(writes)
