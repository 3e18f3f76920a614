"""Events of torch.monitor: one for each transfer and commit, and what a handler does wrong harms nobody."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import torch
from torch import monitor

import transfuse
from keeping import Home, Job, home, same, threaded  # noqa: F401
from transfuse._metrics import reports
from transfuse.testing.ranks import Ranks

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=20)


@pytest.fixture
def heard() -> Iterator[list[monitor.Event]]:
    events: list[monitor.Event] = []
    handle = monitor.register_event_handler(events.append)
    try:
        yield events
    finally:
        monitor.unregister_event_handler(handle)


def move(rank: int, pg: Any) -> Any:
    transport = transfuse.PGTransport(pg, TIMEOUT, CPU)
    if rank == 0:
        transport.send_checkpoint([1], {"w": torch.zeros(1000)}, step=7)
        return None
    return transport.recv_checkpoint(0, step=8 if rank == 2 else 7)


def test_an_event_for_each_end_of_a_transfer(heard: list[monitor.Event]) -> None:
    with Ranks(2) as ranks:
        ranks.run(move)
    sent, received = sorted(heard, key=lambda event: str(event.data["direction"]), reverse=True)
    for event, direction in ((sent, "send"), (received, "receive")):
        assert event.name == "transfuse.transfer"
        assert abs(event.timestamp - datetime.now()) < timedelta(hours=1)
        assert event.data["direction"] == direction
        assert (event.data["outcome"], event.data["error"]) == ("complete", "")
        assert (event.data["bytes"], event.data["step"], event.data["peers"]) == (4000, 7, 1)
        assert event.data["seconds"] > 0  # type: ignore[operator]


def test_a_failed_transfer_says_why(heard: list[monitor.Event]) -> None:
    def work(rank: int, pg: Any) -> Any:
        transport = transfuse.PGTransport(pg, TIMEOUT, CPU, None if rank == 0 else lambda: {"w": torch.zeros(3)})
        return transport.send_checkpoint([1], {"w": torch.zeros(4)}) if rank == 0 else transport.recv_checkpoint(0)

    with Ranks(2) as ranks:
        ranks.outcomes(work)
    assert [event.data["outcome"] for event in heard] == ["failed", "failed"]
    said = {event.data["direction"]: str(event.data["error"]) for event in heard}
    assert "TargetMismatch" in said["receive"]
    assert {event.data["lost_peers"] for event in heard if event.data["direction"] == "send"} == {1}


@pytest.mark.usefixtures("threaded")
def test_an_event_for_each_commit(home: Home, heard: list[monitor.Event]) -> None:  # noqa: F811
    home.start()
    with Job(1) as job:
        job.start(same({"w": torch.zeros(1000)}))
        job.commit(3)
        job.commit(3)
        report = job.keeps[0].report
    first, second = [event for event in heard if event.name == "transfuse.commit"]
    assert (first.data["step"], first.data["outcome"], first.data["cause"]) == (3, "committed", "")
    assert first.data["copied_bytes"] >= 4000  # type: ignore[operator]
    assert first.data["stalled_seconds"] >= first.data["copy_seconds"]  # type: ignore[operator]
    assert report is not None
    assert (second.data["outcome"], second.data["cause"], second.data["why"]) == ("skipped", "not_newer", report.why)


def test_a_handler_that_raises_is_named_once_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reports, "_has_complained", False)

    def fail(event: monitor.Event) -> None:
        raise ValueError("the handler's own error")

    handle = monitor.register_event_handler(fail)
    try:
        with Ranks(2) as ranks:
            _, received = ranks.run(move)
    finally:
        monitor.unregister_event_handler(handle)
    assert received["w"].numel() == 1000
    said = [one.getMessage() for one in caplog.records if "a handler of torch.monitor's events has failed" in one.msg]
    assert len(said) == 1
    assert "ValueError: the handler's own error" in said[0]
