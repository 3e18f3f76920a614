"""The door: where keepers of other hosts ask, and strangers get nothing."""

from __future__ import annotations

import logging
import secrets
import socket
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from ring_hosts import SECONDS, TOKEN, Job, Worker, contents, until
from transfuse._errors import PeerLost, TransfuseError
from transfuse._keeper import door
from transfuse._keeper.door import connect
from transfuse._keeper.questions import HostState, Lend, Lent, No, Round
from transfuse._keeper.slot_file import Label
from transfuse._wire.handshake import key_of
from transfuse._wire.listener import MAX_STRANGERS


def test_the_door_stays_over_generations_and_a_later_keeper_opens_the_same(job: Job) -> None:
    host = job.add_host()
    worker = Worker(host.directory, 0)
    door = worker.expose()
    assert worker.expose() == door
    other = worker.expose(secrets.token_hex(32))
    worker.link.close()
    port = (host.directory / "port").read_text()
    host.stop()
    # A keeper that was killed leaves this behind; one that ends well does not.
    host.directory.mkdir(mode=0o700, exist_ok=True)
    (host.directory / "port").write_text(port)
    host.start()
    worker = Worker(host.directory, 0)
    assert worker.expose() == other
    worker.link.close()


def test_garbage_and_strangers_at_the_door_get_nothing_and_break_nothing(job: Job) -> None:
    for _ in range(2):
        job.add_host()
    workers = job.meet([0, 1])
    address = job.peers[0].keepers[1]
    host, _, port = address.rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(MAX_STRANGERS + 10)]
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, secrets.token_bytes(1 << 16)):
        with socket.create_connection((host, int(port))) as sock:
            sock.settimeout(SECONDS)
            got = b""
            with suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while chunk := sock.recv(4096):
                    got += chunk
            assert got == b""
    with pytest.raises(TransfuseError):
        connect(address, key_of("another token"), SECONDS, 1, None)
    # A caller that knows the token, but asks nonsense, gets a refusal, and the connection ends.
    for body in (b"", b"\xc1", b"\x91\xa4Lend", secrets.token_bytes(1000), msgspec.msgpack.encode(No("no"))):
        control = connect(address, key_of(TOKEN), SECONDS, 1, None)
        control.send(msgspec.Raw(body), SECONDS)
        assert isinstance(control.expect(No, SECONDS, "waiting", most_waits=0), No)
        with pytest.raises(PeerLost):
            control.expect(No, SECONDS, "waiting", most_waits=0)
        control.close()
    control = connect(address, key_of(TOKEN), SECONDS, 1, None)
    with pytest.raises(TransfuseError, match="not at generation 99"):
        door.ask(control, Lend(99, 1), SECONDS)
    with pytest.raises(TransfuseError, match="is not here"):
        door.ask(control, Lend(job.generation, 77), SECONDS)
    # A leader of an earlier generation decides nothing.
    stale = Round(job.generation - 1, None, True, Label(job.generation, 5), None, True, False, [], [])
    assert isinstance(door.ask(control, stale, SECONDS), HostState)
    job.commit(1)
    job.until_confirmed(1)
    # A connection borrows once.
    lent = door.ask(control, Lend(job.generation, 1), SECONDS)
    assert isinstance(lent, Lent)
    assert len(lent.slots) == 1
    with pytest.raises(TransfuseError, match="has borrowed already"):
        door.ask(control, Lend(job.generation, 1), SECONDS)
    control.close()
    assert not any(one.keeper is not None and one.keeper.ring.is_over() for one in job.hosts)
    for sock in idle:
        sock.close()
    assert np.array_equal(workers[1].read(0, 1), contents(0, 1))


def test_a_keeper_with_another_token_is_a_stranger(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        job.add_host()
    workers = job.meet([0, 1])
    # The other keeper's door is opened anew, under another token.
    other = workers[1].expose(secrets.token_hex(32))
    assert other == job.peers[0].keepers[1]
    with caplog.at_level(logging.WARNING, "transfuse.keeper"):
        job.commit(1)
        until(lambda: workers[0].status()["replicas"]["unreachable"] == [1], "the leader cannot reach it")
    assert len([record for record in caplog.records if "cannot be reached" in record.message]) == 1
    assert workers[0].confirmed() is None
    workers[1].expose()
    job.until_confirmed(1)
