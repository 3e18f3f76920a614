"""Two ranks of a group with ``tls=``: their conversations are encrypted, or do not take place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import transfuse
from certificates import environment_of, tls
from transfuse._errors import TransfuseError
from transfuse._session import receive_from_one
from transfuse._wire.channel import Channel
from transfuse._wire.meeting import OwnPort
from transfuse._wire.stream import Stream
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Outcome, Ranks

pytestmark = pytest.mark.usefixtures("group_route", "small_parcels")

TIMEOUT = 20.0


def state(seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"large": torch.randn(600_000, generator=generator), "small": [torch.ones(3)], "step": seed}


def move(*given: dict[str, Any], times: int = 1) -> list[Outcome[Any]]:
    """Rank 0 sends to all others, each with its own options. Returns what has become of each."""
    ranks = len(given)

    def work(rank: int, pg: Any) -> Any:
        target = state(0)
        options = {"lanes": 1, **given[rank]}
        with transfuse.PGTransport(pg, TIMEOUT, "cpu", (lambda: target) if rank else None, **options) as transport:
            for number in range(times):
                if rank:
                    assert_exact(state(number), transport.recv_checkpoint(0))
                else:
                    transport.send_checkpoint(list(range(1, ranks)), state(number))
            return transport.report

    with Ranks(ranks, 60) as group:
        return group.outcomes(work)


@pytest.fixture
def streams_are_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream moves bytes in plain, and no message goes over the group but those that make streams."""
    write, send = Stream.write, Channel.send

    def writes(stream: Stream, parts: Any) -> None:
        assert stream._cipher is not None
        write(stream, parts)

    def sends(channel: Channel, kind: Any, body: Any = b"", **options: Any) -> None:
        assert channel.stream is not None or kind.name in ("MEET", "MET", "GO"), kind
        assert channel.stream is not None or len(body) < 300, "an offer went with a meeting"
        send(channel, kind, body, **options)

    monkeypatch.setattr(Stream, "write", writes)
    monkeypatch.setattr(Channel, "send", sends)


@pytest.mark.usefixtures("streams_are_encrypted", "patient_chains")
@pytest.mark.parametrize(("ranks", "lanes"), [(2, 1), (2, 3), (4, 1)])
def test_what_arrives_is_what_was_sent(ranks: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, over the same streams; with four ranks the receivers pass it on to each other."""
    monkeypatch.setenv("TRANSFUSE_MIN_RELAY_BYTES", "1000")
    monkeypatch.setattr(receive_from_one, "this_host", lambda: 1)  # Receivers on the source's own host do not relay.
    outcomes = move(*[{"tls": tls(), "lanes": lanes}] * ranks, times=2)
    reports = [outcome.get() for outcome in outcomes]
    if ranks == 2:
        assert {report.connections for report in reports} == {lanes}
    else:
        assert sum(report.relayed_bytes for report in reports[1:]) > 0


@pytest.mark.usefixtures("streams_are_encrypted")
def test_heal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(tls()).items():
        monkeypatch.setenv(name, value)

    def work(rank: int, pg: Any) -> Any:
        mine = state(rank)
        assert transfuse.heal(mine, step=rank, group=pg, timeout=TIMEOUT) == 2
        return mine["large"]

    with Ranks(3, 60) as group:
        for outcome in group.outcomes(work):
            assert torch.equal(outcome.get(), state(2)["large"])


@pytest.mark.parametrize(
    ("source", "receiver", "says"),
    [
        ({"tls": tls}, {"tls": lambda: False}, "and this end does not|does not encrypt"),
        ({"tls": lambda: False}, {"tls": tls}, "started without tls=|and this end does not"),
        ({"tls": tls}, {"tls": lambda: tls(days=-1)}, "has expired"),
        ({"tls": lambda: tls(days=-1)}, {"tls": tls}, "has expired"),
        ({"tls": tls}, {"tls": lambda: tls(ca="foreign")}, "not from a CA"),
        ({"tls": tls}, {"tls": lambda: tls("DNS:stranger", accepts=["localhost"])}, "certificate for stranger"),
        ({"tls": lambda: tls("DNS:stranger", accepts=["localhost"])}, {"tls": tls}, "certificate for stranger"),
        ({"tls": lambda: False, "streams": lambda: False}, {"tls": tls}, "with tls= nothing goes over the process"),
        ({"tls": tls}, {"tls": lambda: False, "streams": lambda: False}, "with tls= nothing goes over the process"),
    ],
    ids=["no", "no-source", "old", "old-source", "foreign", "name", "name-source", "group-source", "group"],
)
def test_who_is_refused_gets_nothing_and_both_know_why(source: Any, receiver: Any, says: str) -> None:
    sent, got = move(*({name: make() for name, make in given.items()} for given in (source, receiver)))
    assert isinstance(sent.error, transfuse.SendFailed), sent
    assert isinstance(got.error, TransfuseError), got
    for error in (sent.error.causes[1], got.error):
        assert re.search(says, str(error)), error
    assert not got.error.torn


def test_ranks_that_cannot_connect_do_not_go_on_in_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def dial(*_: Any) -> Any:
        raise TransfuseError("no route to host")

    monkeypatch.setattr(OwnPort, "dial", dial)
    sent, got = move(*[{"tls": tls()}] * 2)
    for error in (sent.error.causes[1], got.error):  # type: ignore[union-attr]
        assert "with tls= nothing goes over the process group" in str(error)
    monkeypatch.setattr(OwnPort, "dial", dial)
    for outcome in move(*[{"tls": False}] * 2):
        outcome.get()


def test_tls_and_no_streams_do_not_go_together() -> None:
    with Ranks(1, 60) as group, pytest.raises(ValueError, match="tls= encrypts connections of our own, and streams="):
        transfuse.PGTransport(group.pgs[0], TIMEOUT, "cpu", streams=False, tls=tls())
