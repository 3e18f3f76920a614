"""Keepers with ``tls=``: what goes between hosts, and to readers, is encrypted. A keeper without it is refused."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import transfuse
from certificates import certificate, directory, environment_of, tls
from keeping import SECONDS, Home, Job, exact, home, keepers_in, same, threaded, until  # noqa: F401
from transfuse import TLS
from transfuse._keeper import client, door
from transfuse._wire.handshake import ControlConnection

pytestmark = pytest.mark.usefixtures("threaded")


@pytest.fixture
def by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(tls()).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "KEEP_REVIVE_SECONDS", 0.05)
    monkeypatch.setattr(door, "DOOR_LONGEST_PAUSE_SECONDS", 0.2)


def commit_until_confirmed(home: Home, job: Job, states: list[Any], *hosts: str) -> int:  # noqa: F811
    step = 0

    def is_confirmed() -> bool:
        nonlocal step
        step += 1
        for rank, state in enumerate(states):
            state["w"].fill_(100 * step + rank)
        job.commit(step)
        return all((home.status(host)["confirmed_step"] or 0) > 1 for host in hosts)

    until(is_confirmed, 2 * SECONDS)
    return step


@pytest.mark.usefixtures("by_environment", "impatient")
def test_a_lost_host_is_restored_from_an_encrypted_replica(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """No connection between keepers, and between keepers and workers of other hosts, speaks in plain."""
    opened, encrypt = [], ControlConnection.encrypt
    say = ControlConnection._say_hello

    def encrypts(control: ControlConnection, *arguments: Any, **options: Any) -> None:
        opened.append(control.name)
        encrypt(control, *arguments, **options)

    def says(control: ControlConnection, deadline: float) -> bytes:
        assert hasattr(control._socket, "cipher"), control.name
        return say(control, deadline)

    monkeypatch.setattr(ControlConnection, "encrypt", encrypts)
    monkeypatch.setattr(ControlConnection, "_say_hello", says)
    keepers = [home.start(host) for host in ("a", "b")]
    states = [{"w": torch.zeros(5000)} for _ in range(2)]
    with Job(2) as job:
        job.start(same(*states), [{"run": "a"}, {"run": "b"}])
        commit_until_confirmed(home, job, states, "a", "b")
    assert opened
    keepers[1].stop()
    assert home.ended(keepers[1])
    home.start("c")
    targets = [{"w": torch.zeros(5000)} for _ in range(2)]
    with Job(2) as job:
        job.start(same(*targets), [{"run": "a"}, {"run": "c"}])
        restored = job.restore()
        assert restored is not None
        for rank, target in enumerate(targets):
            assert exact(target, {"w": torch.full((5000,), 100.0 * restored + rank)})
        job.all(lambda keep: keep.close())


@pytest.mark.usefixtures("impatient")
def test_a_keeper_that_does_not_encrypt_replicates_with_nobody_that_does(
    home: Home,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training goes on; both keepers say why no step is confirmed."""
    caplog.set_level(logging.DEBUG, logger="transfuse")
    home.start("a", tls=tls())
    home.start("b", tls=False)
    states = [{"w": torch.zeros(500)} for _ in range(2)]
    with Job(2) as job:
        job.start(same(*states), [{"run": "a", "tls": tls()}, {"run": "b", "tls": False}])
        assert job.commit(1)
        until(lambda: "the keeper of host 1" in caplog.text and "it was started without tls=" in caplog.text)
        until(lambda: "encrypts, and this end does not: give both the same tls=" in caplog.text)
        assert home.status("a")["confirmed_step"] is None
        job.all(lambda keep: keep.detach())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("other", "told", "says"),
    [
        (
            lambda: tls(ca="foreign"),
            "has a certificate that is not from a CA in ",
            "the certificate of this end is not from a CA that it knows",
        ),
        (
            lambda: tls("DNS:stranger", accepts=["localhost"]),
            "has a certificate for stranger, and names= allows only spiffe://tests/job, localhost",
            "does not accept this end, which has a certificate for stranger: see names= there",
        ),
        (lambda: tls(days=-1), "has a certificate that has expired", "the certificate of this end has expired"),
    ],
    ids=["foreign CA", "wrong name", "expired"],
)
def test_a_keeper_that_is_not_trusted_gets_nothing_and_both_say_why(
    home: Home,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    other: Callable[[], TLS],
    told: str,
    says: str,
) -> None:
    caplog.set_level(logging.DEBUG, logger="transfuse")
    home.start("a", tls=tls())
    home.start("b", tls=other())
    states = [{"w": torch.zeros(500)} for _ in range(2)]
    with Job(2) as job:
        job.start(same(*states), [{"run": "a", "tls": tls()}, {"run": "b", "tls": other()}])
        assert job.commit(1)
        until(lambda: "the keeper of host 1" in caplog.text and told in caplog.text)
        until(lambda: says in caplog.text)
        assert [home.status(host)["confirmed_step"] for host in "ab"] == [None, None]
        job.all(lambda keep: keep.detach())


def test_a_worker_and_its_keeper_agree_on_it(home: Home) -> None:  # noqa: F811
    home.start("a", tls=tls())
    home.start("b", tls=False)
    for host, given, says in (
        ("a", False, "encrypts, .* without tls="),
        ("b", tls(), "does not encrypt, .* with tls="),
    ):
        with pytest.raises(transfuse.TransfuseError, match=f"the keeper of this host {says}"), Job(1) as job:
            job.start(same({"w": torch.zeros(3)}), [{"run": host, "tls": given}])


@pytest.mark.processes
def test_a_keepers_own_process_gets_the_files_and_reads_them_again(home: Home, tmp_path: Path) -> None:  # noqa: F811
    """Readers outside get in by certificate and token. A certificate that expires and is renewed needs no restart."""
    own = [tmp_path / name for name in ("tls.crt", "tls.key")]

    def put(pair: tuple[Path, Path]) -> None:
        for source, target in zip(pair, own, strict=True):
            shutil.copy(source, tmp_path / "new")
            os.replace(tmp_path / "new", target)

    put(certificate())
    state = {"w": torch.arange(5000.0)}
    with Job(1) as job:
        job.start(same(state), [{"tls": TLS(own[0], own[1], directory() / "ca.pem")}])
        assert job.commit(3)
        until(lambda: home.status()["confirmed_step"] == 3)
        status = home.status()
        assert status["encrypts"]
        asked: Any = {"token": (Path(status["directory"]) / "token").read_text(), "timeout": SECONDS}
        fetched = transfuse.fetch(status["address"], tls=tls(), **asked)
        assert fetched.step == 3
        assert exact(fetched.state, state)
        with pytest.raises(transfuse.PeerNotTrusted, match="this end does not"):
            transfuse.fetch(status["address"], tls=False, **asked)
        put(certificate(days=-1))
        with pytest.raises(transfuse.PeerNotTrusted, match="has a certificate that has expired"):
            transfuse.fetch(status["address"], tls=tls(), **asked)
        put(certificate(number=1))
        assert transfuse.fetch(status["address"], tls=tls(), **asked).step == 3
        job.all(lambda keep: keep.close())
    until(lambda: not keepers_in(home.base))
