"""States of a device through what is built on the transport: serve and fetch, DCP's reader, torchft's transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

import transfuse
from device import kind
from device.kind import imitation_only, slow_fill_
from device.mirror import devices_of
from device.moving import FEW, Setting, assert_same, blank, mine, sample, there, transport
from device.processes import run_plain
from transfuse.dcp import PeerReader
from transfuse.testing.exact import assert_exact

pytestmark = [
    pytest.mark.usefixtures("accelerator", "nothing_is_left"),
    # Threads of one process are no ranks to torch.distributed: they load without it.
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable or uninitialized"),
]

each_setting = pytest.mark.parametrize("setting", [pytest.param(setting, id=str(setting)) for setting in FEW])

TOKEN = "a token for these tests"


class TestServing:
    @pytest.mark.parametrize("same_host", [False, True])
    @pytest.mark.parametrize("verify", [None, True])
    def test_serve_and_fetch(self, same_host: bool, verify: bool | None) -> None:
        kind.set_device(0)
        state = sample()
        options: dict[str, Any] = {"same_host": same_host, "verify": verify}
        with transfuse.serve(there(state, 0), token=TOKEN, **options) as server:
            got = transfuse.fetch(server.address, token=TOKEN, **options).state
            assert_exact(state, got)
            assert devices_of(got) == {"cpu"}
            for index in range(2):
                own = there(blank(state), index)
                got = transfuse.fetch(server.address, own, token=TOKEN, **options).state
                assert_same(state, own, in_place=True)
                assert got["w"] is own["w"]

    def test_delta_and_resumed_steps(self) -> None:
        kind.set_device(0)
        state = sample()
        own = there(state, 1)
        with transfuse.serve(there(state, 0), token=TOKEN, step=3) as server:
            fetched = transfuse.fetch(server.address, own, token=TOKEN, step=3, delta=True)
        assert_same(state, own, in_place=True)
        assert fetched.report.bytes == 0

    def test_readers_see_what_a_change_has_queued(self) -> None:
        """Within ``mutating`` the state changes on the device. The next reader waits for that, on the device."""
        kind.set_device(0)
        held = {"w": torch.zeros(100_000, device=mine(0))}
        with transfuse.serve(held, token=TOKEN, same_host=False) as server:
            for turn in range(3):
                with torch.Stream(device=mine(0)) if turn == 2 else torch.accelerator.current_stream():
                    with server.mutating():
                        slow_fill_(held["w"], float(turn), 0.1)
                    got = transfuse.fetch(server.address, token=TOKEN, same_host=False).state
                assert torch.equal(got["w"], torch.full((100_000,), float(turn)))

    def test_readers_and_changes_at_once(self) -> None:
        """A reader sees all of a change or nothing of it."""
        held = {f"w{i}": torch.zeros(50_000, device=mine(0)) for i in range(4)}
        done = threading.Event()
        wrong: list[set[float]] = []

        def read() -> None:
            while not done.is_set():
                got = transfuse.fetch(server.address, token=TOKEN, same_host=False).state
                values = {float(v) for leaf in got.values() for v in (leaf.min(), leaf.max())}
                if len(values) != 1:
                    wrong.append(values)

        with transfuse.serve(held, token=TOKEN, same_host=False) as server:
            reader = threading.Thread(target=read)
            reader.start()
            for turn in range(20):
                with server.mutating():
                    for leaf in held.values():
                        slow_fill_(leaf, float(turn), 0.001)
            done.set()
            reader.join()
        assert not wrong

    @imitation_only
    def test_a_reader_that_does_not_know_the_device(self) -> None:
        kind.set_device(0)
        state = {"w": torch.arange(300_000.0), "t": torch.arange(600.0).view(20, 30).t()}
        program = (
            "got = transfuse.fetch(sys.argv[1], token=sys.argv[2]).state\n"
            "assert torch.equal(got['w'], torch.arange(300_000.0))\n"
            "assert torch.equal(got['t'], torch.arange(600.0).view(20, 30).t())\n"
            "print(json.dumps([str(leaf.device) for leaf in got.values()]))\n"
        )
        with transfuse.serve(there(state, 0), token=TOKEN) as server:
            assert run_plain(program, server.address, TOKEN) == ["cpu", "cpu"]


@each_setting
def test_dcp_loads_into_targets_on_the_device(setting: Setting) -> None:
    torch.manual_seed(0)
    state = {"model": {"w": torch.randn(300, 200), "b": torch.randn(7).bfloat16()}, "step": 3}
    target = there({"model": {"w": torch.zeros(300, 200), "b": torch.zeros(7).bfloat16()}, "step": 0}, 1)

    def work(rank: int, pg: Any) -> None:
        if rank == 0:
            transport(pg, setting).send_checkpoint([1], there(state, 0))
        else:
            with PeerReader(transport(pg, setting), [0]) as reader:
                load(target, storage_reader=reader, no_dist=True)

    with setting.ranks() as ranks:
        ranks.run(work)
    assert_same(state, target, in_place=True)
    assert devices_of(target) == {str(mine(1))}


@each_setting
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_torchft(setting: Setting, in_place: bool) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed")
    from torchft.process_group import ProcessGroupWrapper

    from transfuse.dropin.torchft import PGTransport

    state = {"user": {"default": sample()}, "torchft": {"step": 3, "batches_committed": 6}}

    def work(rank: int, pg: Any) -> Any:
        group = ProcessGroupWrapper(pg=pg)
        own = {"user": {"default": there(blank(sample()), rank)}, "torchft": {"step": 0, "batches_committed": 0}}
        give: Callable[[], object] | None = (lambda: own) if in_place else None
        through: Any = PGTransport(group, timedelta(seconds=20), setting.wire, give, same_host=False)
        if rank == 0:
            through.send_checkpoint([1], 3, there(state, 0), timedelta(seconds=20))
            return None
        return through.recv_checkpoint(0, through.metadata(), 3, timedelta(seconds=20))

    with setting.ranks() as ranks:
        got = ranks.run(work)[1]
    assert_same(state, got, in_place=in_place)
    assert devices_of(got) == {str(mine(1)) if in_place or setting.direct else "cpu"}
