"""The options of a transfer between devices, and states and targets on several of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree

import transfuse
from device.kind import KIND
from device.mirror import devices_of, to_cpu
from device.moving import FEW, Setting, assert_same, beside, blank, changed, mine, move, sample, there, transport
from transfuse._memory import fresh
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Ranks

pytestmark = pytest.mark.usefixtures("accelerator", "nothing_is_left")

each_setting = pytest.mark.parametrize(
    "setting",
    [pytest.param(setting, id=str(setting), marks=pytest.mark.soak if i % 2 else ()) for i, setting in enumerate(FEW)],
)


def nbytes(state: Any) -> int:
    """The bytes that a state has, without counting tied leaves twice."""
    sizes = {leaf.untyped_storage()._cdata: leaf.nbytes for leaf in _pytree.tree_iter(state) if _is_tensor(leaf)}
    return sum(sizes.values())


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


@each_setting
@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"verify": True}], ids=["", "atomic", "verified"])
def test_delta(setting: Setting, options: dict[str, Any]) -> None:
    state = sample()
    own = there(changed(state), 1)
    with setting.ranks() as ranks:
        ((got, report),) = move(ranks, setting, {0: there(state, 0)}, {1: own}, delta=True, **options).values()
        assert_same(state, got, in_place=True)
        assert got["w"] is own["w"]
        assert 0 < report.bytes < nbytes(state)
        assert report.bytes + report.kept_bytes == nbytes(state)
        # The second time there is nothing to fetch. With ``atomic``, a parcel that shares memory of another layout is.
        ((got, report),) = move(ranks, setting, {0: there(state, 0)}, {1: own}, delta=True, **options).values()
        assert_same(state, got, in_place=True)
        assert report.bytes + report.kept_bytes == nbytes(state)
        assert report.bytes < state["w"].nbytes if options.get("atomic") else report.bytes == 0


@each_setting
def test_atomic(setting: Setting) -> None:
    state = sample()
    own = there(blank(state), 1)
    with setting.ranks() as ranks:
        ((got, _),) = move(ranks, setting, {0: there(state, 0)}, {1: own}, atomic=True).values()
    assert_same(state, got, in_place=True)
    assert_same(state, own, in_place=True)


@each_setting
@pytest.mark.parametrize(("source", "target"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float64)])
def test_cast(setting: Setting, source: torch.dtype, target: torch.dtype) -> None:
    values = torch.randn(1000, 30).to(source)
    state = {"w": values, "t": values.t()}
    own = {name: torch.zeros(leaf.shape, dtype=target) for name, leaf in state.items()}
    with setting.ranks() as ranks:
        ((got, _),) = move(ranks, setting, {0: there(state, 0)}, {1: there(own, 1)}, cast=True).values()
    assert_same({name: leaf.to(target) for name, leaf in state.items()}, got, in_place=True)
    assert devices_of(got) == {str(mine(1))}


@each_setting
def test_rules(setting: Setting) -> None:
    q, k, w = (torch.randn(40, 30) for _ in range(3))
    state = {"q": q, "k": k, "old": w, "both": torch.cat([q, w])}
    own = {"qk": torch.zeros(80, 30), "new": torch.zeros(40, 30), "a": torch.zeros(40, 30), "b": torch.zeros(40, 30)}
    rules = [
        transfuse.Concat(["q", "k"], "qk"),
        transfuse.Rename("old", "new"),
        transfuse.Split("both", ["a", "b"]),
    ]
    with setting.ranks() as ranks:
        ((got, _),) = move(
            ranks, setting, {0: there(state, 0)}, {1: there(own, 1)}, map_path=rules, strict=True
        ).values()
    assert_same({"qk": torch.cat([q, k]), "new": w, "a": q, "b": w}, got, in_place=True)


@each_setting
def test_strict(setting: Setting) -> None:
    state = sample()
    with setting.ranks() as ranks:
        ((got, _),) = move(ranks, setting, {0: there(state, 0)}, {1: there(blank(state), 1)}, strict=True).values()
        assert_same(state, got, in_place=True)
        lacking = there({name: leaf for name, leaf in blank(state).items() if name != "t"}, 1)

        def work(rank: int, pg: Any) -> Any:
            if rank == 0:
                return transport(pg, setting).send_checkpoint([1], there(state, 0))
            return transport(pg, setting, lacking, strict=True).recv_checkpoint(0)

        sent, received = ranks.outcomes(work)
    assert isinstance(sent.error, transfuse.SendFailed)
    assert isinstance(received.error, transfuse.StateError)
    assert "t" in str(received.error)
    assert not any(leaf.any() for leaf in _pytree.tree_iter(to_cpu(lacking)) if _is_tensor(leaf)), "nothing was written"


class Enough(transfuse.TransfuseError):
    """Raised by a progress callback."""


@each_setting
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("small_parcels")
def test_resume(setting: Setting, in_place: bool) -> None:
    """The caller stops the receive halfway. A second receive fetches what is missing."""
    state = {f"w{i}": torch.randn(400_000) for i in range(6)}
    total = nbytes(state)
    own = there({name: torch.zeros_like(leaf) for name, leaf in state.items()}, 1) if in_place else None

    def stop(progress: Any) -> None:
        if any(one.bytes > total // 3 for one in progress.values()):
            raise Enough

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            held = there(state, 0)
            with pytest.raises(transfuse.SendFailed):
                # Slow enough that the callback comes in between.
                transport(pg, setting, max_bytes_per_second=3e7).send_checkpoint([1], held, step=4)
            return transport(pg, setting).send_checkpoint([1], held, step=4)
        with pytest.raises(Enough) as stopped:
            transport(pg, setting, own, progress=stop).recv_checkpoint(0, step=4)
        partial: Any = stopped.value.partial
        again = transport(pg, setting, own)
        got = again.recv_checkpoint(0, step=4, resume=partial)
        assert again.report is not None
        return got, partial.received_bytes, again.report

    with setting.ranks() as ranks:
        _, (got, held_bytes, report) = ranks.run(work)
    assert_same(state, got, in_place=in_place)
    assert 0 < held_bytes < total
    assert report.kept_bytes == held_bytes
    assert report.bytes == total - held_bytes


@each_setting
def test_too_much_is_refused_and_then_fits_in_place(setting: Setting) -> None:
    state = sample()

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            with pytest.raises(transfuse.SendFailed):
                transport(pg, setting).send_checkpoint([1], there(state, 0))
            return transport(pg, setting).send_checkpoint([1], there(state, 0))
        with pytest.raises(transfuse.LimitExceeded, match="receive in place"):
            transport(pg, setting, max_receive_bytes=1000).recv_checkpoint(0)
        return transport(pg, setting, there(blank(state), 1), max_receive_bytes=1000).recv_checkpoint(0)

    with setting.ranks() as ranks:
        assert_same(state, ranks.run(work)[1], in_place=True)


@each_setting
def test_a_rank_that_is_its_own_source(setting: Setting) -> None:
    state = sample()

    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            return None
        with beside(rank) as pool:
            sending = pool.submit(transport(pg, setting).send_checkpoint, [0], there(state, 0))
            got = transport(pg, setting, there(blank(state), 0)).recv_checkpoint(0)
            sending.result()
        return got

    with setting.ranks() as ranks:
        assert_same(state, ranks.run(work)[0], in_place=True)


def spread(state: dict[str, Any], first: int, second: int) -> dict[str, Any]:
    """A state whose leaves lie in turns in main memory and on two devices. What is tied stays together."""
    homes = {name: i % 3 for i, name in enumerate(name for name in state if name != "tied")}
    parts = [{n: leaf for n, leaf in state.items() if homes.get(n, homes["w"]) == i} for i in range(3)]
    placed = [there(parts[0], first), parts[1], there(parts[2], second)]
    found = {name: leaf for part in placed for name, leaf in part.items()}
    return {name: found[name] for name in state}


@each_setting
@pytest.mark.parametrize("verify", [None, True])
def test_states_on_several_devices(setting: Setting, verify: bool | None) -> None:
    """The source's leaves lie on both devices and in main memory, the target's elsewhere than on the wire."""
    state = sample()
    held, own = spread(state, 0, 1), spread(blank(state), 1, 0)
    assert devices_of(held) == devices_of(own) == {f"{KIND}:0", f"{KIND}:1", "cpu"}
    with setting.ranks() as ranks:
        ((got, _),) = move(ranks, setting, {0: held}, {1: own}, verify=verify).values()
        assert_same(state, got, in_place=True)
        assert {name: str(leaf.device) for name, leaf in got.items() if _is_tensor(leaf)} == {
            name: str(leaf.device) for name, leaf in own.items() if _is_tensor(leaf)
        }
        # Fresh leaves of the source's devices come to the wire's device; leaves of main memory stay there.
        ((got, _),) = move(ranks, setting, {0: held}, {1: None}, verify=verify).values()
        assert_same(state, got)
        assert devices_of(got) == ({str(mine(1)), "cpu"} if setting.direct else {"cpu"})


@each_setting
def test_between_main_memory_and_a_device(setting: Setting) -> None:
    state = sample()
    with setting.ranks() as ranks:
        ((got, _),) = move(ranks, setting, {0: state}, {1: there(blank(state), 1)}).values()
        assert_same(state, got, in_place=True)
        own = blank(state)
        ((got, _),) = move(ranks, setting, {0: there(state, 0)}, {1: own}).values()
        assert_exact(state, own, in_place=True)


def test_the_memory_route_takes_what_lies_in_main_memory() -> None:
    """By default a receiver on the same host reads main memory directly. The device's leaves cannot be read so."""
    state = sample()

    def work(rank: int, pg: Any) -> Any:
        setting: dict[str, Any] = {"device": KIND, "timeout": 20}
        held = spread(state, 0, 0)
        if rank == 0:
            return transfuse.PGTransport(pg, **setting).send_checkpoint([1], held)
        return transfuse.PGTransport(pg, **setting).recv_checkpoint(0)

    with Setting().ranks() as ranks:
        got = ranks.run(work)[1]
    assert_same(state, got)
    assert devices_of(got) == {str(mine(1)), "cpu"}


def warnings_of(setting: Setting, target: Any, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    caplog.clear()
    with setting.ranks() as ranks:
        for _ in range(2):
            move(ranks, setting, {0: there(sample(), 0)}, {1: target}, **options)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_fresh_leaves_in_main_memory_are_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    fresh._say_once.cache_clear()
    through_main_memory, own = Setting(direct=False), there(blank(sample()), 1)
    assert warnings_of(Setting(), None, caplog) == []
    assert warnings_of(through_main_memory, own, caplog) == []
    assert warnings_of(through_main_memory, own, caplog, atomic=True) == []
    (said,) = warnings_of(through_main_memory, None, caplog)
    assert said.startswith(f"transfuse: the source has tensors on {KIND}: fresh ones arrive in main memory")
    assert "receive into targets" in said


def test_a_group_without_a_backend_for_the_device_is_refused() -> None:
    with Ranks(2) as ranks, pytest.raises(ValueError, match=f"pass device='cpu'.*backend for {KIND}"):
        transfuse.PGTransport(ranks.pgs[0], 20, KIND)
    with Setting(cpu=False).ranks() as alone, pytest.raises(ValueError, match=f"it has {KIND}: .*init_process_group"):
        transfuse.PGTransport(alone.pgs[0], 20, "cpu")
    with Setting().ranks() as both:
        for name in ("cpu", KIND, f"{KIND}:0"):
            transfuse.PGTransport(both.pgs[0], 20, name)
