"""What a keeper gives to strangers, who do not know its token or do not speak as its workers do: nothing."""

from __future__ import annotations

import os
import pathlib
import pickle
import socket
import struct
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch

import transfuse
from keeping import SECONDS, Home, Job, home, threaded  # noqa: F401
from transfuse._keeper import frames
from transfuse._keeper.process import Keeper


class Runs:
    """As a pickle: makes a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def keeper(home: Home) -> Keeper:  # noqa: F811
    return home.start()


def said_to(keeper: Keeper, body: bytes, head: bytes | None = None) -> bytes:
    """What comes back from the socket until it is closed."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SECONDS)
        sock.connect(str(keeper.directory / "socket"))
        sock.sendall((struct.pack("<II", len(body), 0) if head is None else head) + body)
        sock.shutdown(socket.SHUT_WR)
        found = b""
        with suppress(ConnectionResetError):  # It has not read all.
            while data := sock.recv(1 << 16):
                found += data
        return found


def test_frames_that_are_no_frames_are_not_answered_and_run_nothing(
    home: Home,  # noqa: F811
    keeper: Keeper,
    tmp_path: pathlib.Path,
) -> None:
    payload = pickle.dumps(Runs(tmp_path / "ran"))
    status = msgspec.msgpack.encode(frames.Status())
    bodies = [
        payload,
        msgspec.msgpack.encode(["Status", payload]),
        msgspec.msgpack.encode(["Hello", *[payload] * 12]),
        msgspec.msgpack.encode(["os.system", "true"]),
        b"\x91" * 10_000,
        b"",
    ]
    for body in bodies:
        assert said_to(keeper, body) == b""
    # More bytes, or descriptors, than there may be: nothing is allocated for them.
    assert said_to(keeper, status, struct.pack("<II", 1 << 31, 0)) == b""
    assert said_to(keeper, status, struct.pack("<II", len(status), 1 << 20)) == b""
    assert not (tmp_path / "ran").exists()
    assert home.status()["pid"] == os.getpid()
    assert said_to(keeper, status)


@pytest.mark.usefixtures("threaded")
def test_a_reader_without_the_token_gets_nothing(keeper: Keeper) -> None:
    with Job(1) as job:
        job.start([lambda: {"w": torch.ones(2)}])
        assert job.commit(1) == ["committed"]
        for token in (None, "wrong", keeper.token[:-1]):
            with pytest.raises(transfuse.TransfuseError, match="token"):
                transfuse.fetch(keeper.address, token=token, timeout=SECONDS)
        assert keeper._server is None  # It was not even made for them.
        job.all(lambda keep: keep.close())


def test_the_path_of_a_run_depends_on_its_name_alone(home: Home) -> None:  # noqa: F811
    """Operators mount it, and docs/operating.md names it."""
    assert home.directory("llama") == home.base / "llama-dd3356e6da06"
