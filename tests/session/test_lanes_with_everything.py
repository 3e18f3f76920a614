"""Lanes together with all else that a transfer may have. Every test sees parcels arrive over several connections."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import transfuse
from laned import NBYTES, TIMEOUT, hold_back_the_group, move, reports, state
from shards import move as move_shards
from shards import plain, shard
from transfuse.testing.exact import assert_exact, differences

LONG = timedelta(seconds=TIMEOUT)
LANES = 3

pytestmark = pytest.mark.usefixtures("needs_streams")


@pytest.fixture(autouse=True)
def lanes_are_used(monkeypatch: pytest.MonkeyPatch, group_route: None) -> None:
    """Many parcels and bursts in a small state, and the first of them over a lane."""
    monkeypatch.setenv("TRANSFUSE_PARCEL_BYTES", str(64 * 1024))
    monkeypatch.setenv("TRANSFUSE_BURST_BYTES", str(256 * 1024))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    hold_back_the_group(monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"verify": False},
        {"atomic": True},
        {"delta": True},
        {"delta": True, "atomic": True},
        {"max_bytes_per_second": NBYTES * 4.0},
        {"strict": True, "relay": False},
        {"map_path": {"large": "large"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("sources", [1, 2])
def test_options(sources: int, options: dict[str, Any]) -> None:
    outcomes, _ = move(sources, lanes=LANES, **options)
    received = reports(outcomes)[-1]
    assert received.connections > 1
    assert received.verified == options.get("verify", True)
    assert sum(received.by_source.values()) == received.bytes


def test_fresh() -> None:
    outcomes, _ = move(lanes=LANES, target=None)
    assert [report.connections > 1 for report in reports(outcomes)] == [True, True]


def test_what_is_here_already_stays() -> None:
    """A delta in which every other MiB is right."""

    def target() -> dict[str, Any]:
        half = state(0)
        half["large"].view(-1, 1 << 18)[::2] = 0
        return half

    outcomes, _ = move(lanes=LANES, target=target, delta=True)
    received = reports(outcomes)[-1]
    assert received.connections > 1
    assert NBYTES / 2 - (1 << 18) < received.kept_bytes < NBYTES / 2 + (1 << 18)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_casts(dtype: torch.dtype) -> None:
    def cast(seed: int, zeros: bool = False) -> dict[str, Any]:
        tree = state(seed, zeros)
        return {**tree, "large": tree["large"].to(dtype)}

    outcomes, _ = move(lanes=LANES, target=lambda: cast(7, zeros=True), arrives=cast, cast=True)
    assert reports(outcomes)[-1].connections > 1


def test_resharding_from_several_sources() -> None:
    """Rows of three sources become columns of a mesh of two."""
    whole = torch.randn(768, 2048)
    sources = {rank: {"w": shard(whole, [0, 1, 2], rank, Shard(0)), "step": 4} for rank in range(3)}
    targets = {rank: {"w": shard(torch.zeros_like(whole), [3, 4], rank, Shard(1)), "step": 0} for rank in (3, 4)}
    outcomes = move_shards(
        sources, targets, seconds=TIMEOUT, source_options={"lanes": LANES, "relay": False}, lanes=LANES, relay=False
    )
    for rank, half in ((3, whole[:, :1024]), (4, whole[:, 1024:])):
        moved = outcomes[rank].get()
        assert_exact(half.contiguous(), plain(moved.state["w"]).contiguous())
        assert moved.report.connections > 1
        assert set(moved.report.by_source) == {0, 1, 2}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"verify": False}, {"atomic": True}], ids=str)
def test_serve_and_fetch(servers: int, options: dict[str, Any]) -> None:
    there, heard = state(3), list[transfuse.Report]()
    with (
        transfuse.serve(there, token="a token of many letters", lanes=LANES) as one,
        transfuse.serve(there, token="a token of many letters", lanes=LANES) as other,
    ):
        addresses = [one.address, other.address][:servers]
        target = state(7, zeros=True)
        for _ in range(2):
            target["large"].zero_()
            fetched = transfuse.fetch(
                addresses, target, token="a token of many letters", timeout=LONG, lanes=LANES, **options
            )
            heard.append(fetched.report)
            assert not differences(there, fetched.state, in_place=True)
    assert heard[0].connections > 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("in_place", [False, True])
def test_the_drop_in_for_torchft(in_place: bool) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft.process_group import ProcessGroupGloo

    from transfuse.dropin.torchft import PGTransport

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    groups = [ProcessGroupGloo(timeout=timedelta(seconds=80)) for _ in range(2)]
    own = state(7, zeros=True)
    made: list[Any] = [PGTransport(groups[0], LONG, "cpu", lanes=LANES)]
    made.append(PGTransport(groups[1], LONG, "cpu", (lambda: own) if in_place else None, lanes=LANES))
    with ThreadPoolExecutor(2) as threads:
        address = f"localhost:{store.port}/quorum"
        list(threads.map(lambda rank: groups[rank].configure(address, f"replica{rank}", rank, 2), range(2)))
        for step in (1, 2):
            own["large"].zero_()
            sending = threads.submit(made[0].send_checkpoint, [1], step, state(step), LONG)
            arrived = threads.submit(made[1].recv_checkpoint, 0, made[0].metadata(), step, LONG).result()
            sending.result()
            assert_exact(state(step), arrived)
            assert (arrived["large"] is own["large"]) == in_place
            if step == 1:
                assert made[1].report.connections > 1
    for transport, group in zip(made, groups, strict=True):
        transport.shutdown()
        group.shutdown()
