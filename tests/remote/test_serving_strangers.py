"""Who is kept out: strangers, false proofs, false words, other interfaces."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import pathlib
import random
import re
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from benchmarks.hosts import Hosts, Unavailable

import transfuse
from serving import (
    DEADLINE,
    FALSE_NUMBERS,
    LONG,
    RUBBISH,
    SHORT,
    TOKEN,
    Halt,
    all_it_says,
    false_words,
    fetch_from,
    hello,
    listened_to,
    move_in,
    nothing_is_left,
    own_files,
    own_sockets,
    own_tasks,
    plain_state,
    serve_on,
    some_state,
    wait_until,
)
from transfuse._tuning import HANDSHAKE_MAX_FRAME_BYTES
from transfuse._wire import listener
from transfuse._wire.handshake import HELLO_BYTES, MAGIC, PROOF_BYTES, VERSION, Come, connect, key_of, split_address
from transfuse.testing.exact import differences
from transfuse.testing.ranks import Fleet


def test_a_stranger_hears_a_hello_and_no_more() -> None:
    state, asked = some_state(), []

    def state_dict() -> object:
        asked.append(True)
        return state

    with transfuse.serve(state_dict, token=TOKEN, timeout=SHORT) as server:
        with listened_to(server.address) as (relay, said):
            assert not differences(state, transfuse.fetch(relay, token=TOKEN).state)
        good = b"".join(said)[: HELLO_BYTES + PROOF_BYTES]
        asked.clear()
        attempts = {
            "nothing": (b"", 0),
            "rubbish": (secrets.token_bytes(1000), 0),
            "half a hello": (hello()[:20], 0),
            "another version": (hello(VERSION + 1), HELLO_BYTES),
            "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100), 0),
            "no proof": (hello(), HELLO_BYTES),
            "a wrong proof": (hello() + bytes(PROOF_BYTES), HELLO_BYTES),
            "a replay": (good, HELLO_BYTES),
            "much": (hello() + secrets.token_bytes(1 << 20), HELLO_BYTES),
        }
        for name, (words, heard) in attempts.items():
            with socket.create_connection(split_address(server.address)) as sock:
                said_back = all_it_says(sock, words)
            # A connection that closes on unread bytes may take what was said before with it.
            assert len(said_back) in ({heard, 0} if len(words) > HELLO_BYTES + PROOF_BYTES else {heard}), name
            assert said_back[: len(MAGIC)] in (MAGIC, b""), name
        # Its own nonce given back, and its own proof, if it gave one: no end's proof passes for the other's.
        with socket.create_connection(split_address(server.address)) as sock:
            mine = hello()
            sock.sendall(mine)
            theirs = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
            proof = hmac.digest(key_of(TOKEN), b"transfuse server " + mine + theirs, hashlib.sha256)
            assert all_it_says(sock, proof) == b""
        assert not asked
        assert not differences(state, transfuse.fetch(server.address, token=TOKEN).state)


def test_two_hellos_are_never_the_same() -> None:
    with transfuse.serve(some_state(), token=TOKEN) as server:
        heard = set()
        for _ in range(8):
            with socket.create_connection(split_address(server.address)) as sock:
                sock.sendall(hello())
                heard.add(sock.recv(HELLO_BYTES, socket.MSG_WAITALL))
    assert len(heard) == 8


@pytest.mark.parametrize("what", ["mark", "counter", "length", "malformed", "kind", "late hello"])
def test_frames_that_are_not_from_who_has_proved_itself(what: str) -> None:
    with transfuse.serve(some_state(), token=TOKEN, timeout=LONG) as server:
        door = connect(server.address, key_of(TOKEN), 20.0, 0)
        body = bytes([0x81, 0xA4]) + b"type" + bytes([0xA5]) + b"ready"
        length = len(body)
        if what == "length":
            length = HANDSHAKE_MAX_FRAME_BYTES + 1
        if what == "malformed":
            body = body[:-1] + b"\xff"
        head = length.to_bytes(4, "little")
        counter = 1 if what == "counter" else 0
        mark = hmac.digest(door._sending_key, counter.to_bytes(8, "little") + head + body, hashlib.sha256)
        if what == "mark":
            mark = bytes(PROOF_BYTES)
        words = hello() + bytes(PROOF_BYTES) if what == "late hello" else head + body + mark
        door._socket.sendall(words)
        with pytest.raises(transfuse.PeerError) as raised:
            door.expect(Come, 20.0, "waiting", 0)
        # Whether the reset that follows leaves it time to be read is not said.
        assert isinstance(raised.value, transfuse.PeerLost | transfuse.PeerRefused)
        if isinstance(raised.value, transfuse.PeerRefused):
            assert raised.value.kind == "ProtocolError"
        door.close()
        assert not differences(some_state(), transfuse.fetch(server.address, token=TOKEN).state)


def test_a_crowd_of_strangers_keeps_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    state = some_state()
    with transfuse.serve(state, token=TOKEN, timeout=LONG) as server, contextlib.ExitStack() as stack:
        transfuse.fetch(server.address, token=TOKEN)
        tasks, files = own_tasks(), own_files()
        where = split_address(server.address)
        crowd = [stack.enter_context(socket.create_connection(where)) for _ in range(200)]
        for _ in range(3):
            assert not differences(state, transfuse.fetch(server.address, token=TOKEN).state)
        wait_until(lambda: len(server._listener.strangers) <= listener.MAX_STRANGERS)
        for one in crowd:
            one.close()
        wait_until(lambda: not server._listener.connections)
        nothing_is_left(tasks, files)
    assert len([record for record in caplog.records if "turned away" in record.message]) < 60


def test_tokens_are_proved_both_ways(caplog: pytest.LogCaptureFixture) -> None:
    def has_logged(pattern: str) -> bool:
        return re.search(pattern, caplog.text) is not None

    caplog.set_level(logging.DEBUG)
    wrong = "wrong horse"
    with transfuse.serve(some_state(), token=TOKEN) as server, transfuse.serve(some_state()) as open_server:
        for address, token, kind, told, logged in (
            (server.address, wrong, "WrongToken", "another token than the one given here", "does not know the token"),
            (server.address, None, "NoToken", "no token was given here.* pass token= ", "gave no token, and this"),
            (open_server.address, TOKEN, "WrongToken", "or with none", "gave a token, and this server .* without one"),
        ):
            with pytest.raises(transfuse.PeerRefused, match=told) as raised:
                transfuse.fetch(address, token=token)
            assert raised.value.kind == kind
            wait_until(partial(has_logged, logged))
            assert address in str(raised.value)
            text = caplog.text + repr(raised.value)
            for secret in (TOKEN, wrong, key_of(TOKEN).hex(), repr(key_of(TOKEN))[2:-1], repr(server)):
                assert secret not in text
        assert TOKEN not in repr(vars(server))
        assert not differences(some_state(), transfuse.fetch(server.address, token=TOKEN.encode()).state)


def test_a_server_that_does_not_know_the_token_gets_a_proof_and_no_more(executor: ThreadPoolExecutor) -> None:
    rubbish = secrets.token_bytes(200)
    for answer in (hello() + rubbish[:PROOF_BYTES], b"", rubbish, hello(VERSION + 1) + rubbish[:PROOF_BYTES], None):
        with socket.create_server(("127.0.0.1", 0)) as fake:
            address = f"127.0.0.1:{fake.getsockname()[1]}"
            fetch = executor.submit(transfuse.fetch, address, token=TOKEN, timeout=SHORT)
            sock, _ = fake.accept()
            with sock:
                if answer is None:
                    # Its own words back.
                    answer = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
                    sock.sendall(answer)
                    proof = sock.recv(PROOF_BYTES, socket.MSG_WAITALL)
                    heard = answer + proof + all_it_says(sock, proof)
                else:
                    heard = all_it_says(sock, answer)
            assert len(heard) <= HELLO_BYTES + PROOF_BYTES
            with pytest.raises(transfuse.PeerError, match=address):
                fetch.result(DEADLINE)


def test_false_words_of_a_reader_do_not_end_the_server() -> None:
    false_words(FALSE_NUMBERS, RUBBISH)


@pytest.mark.soak
def test_no_false_words_end_the_server() -> None:
    draw = random.Random(0)
    false_words([draw.getrandbits(62) for _ in range(200)], [draw.randbytes(draw.randrange(300)) for _ in range(200)])


@pytest.mark.parametrize(
    ("host", "there"), [("127.0.0.1", {"0100007F"}), ("::1", {"00000000000000000000000001000000"})]
)
def test_it_listens_where_it_is_told_and_nowhere_else(
    host: str, there: set[str], executor: ThreadPoolExecutor, group_route: None
) -> None:
    before, halt, state = own_sockets(), Halt(), plain_state()
    if host == "::1" and not pathlib.Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with transfuse.serve(state, host=host, timeout=LONG) as server:
        fetch = executor.submit(halt.fetch, server.address)
        assert halt.reached.wait(DEADLINE)
        during = own_sockets()
        halt.go_on.set()
        assert not differences(state, fetch.result(DEADLINE))
    assert during - before <= there
    assert during >= there


@pytest.mark.parametrize("everywhere", [False, True])
def test_from_host_to_host(everywhere: bool) -> None:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(2, mbit=1000))
        except Unavailable as error:
            pytest.skip(str(error))
        fleet = stack.enter_context(Fleet(2))
        fleet.start(move_in, [hosts.namespace(host) for host in range(2)])
        for outcome in fleet.outcomes():
            outcome.get()
        fleet.start(serve_on, "0.0.0.0" if everywhere else hosts.address(0), ranks=[0])
        fleet._until(lambda: bool(fleet.workers[0].reached), DEADLINE)
        (address,) = fleet.workers[0].reached
        address = f"{hosts.address(0)}:{split_address(address)[1]}"
        fleet.start(fetch_from, address, ranks=[1])
        assert [outcome.get() for outcome in fleet.outcomes(ranks=[1])] == [0]
