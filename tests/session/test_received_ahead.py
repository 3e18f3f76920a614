"""``recv_checkpoint(…, wait=False)``: the target has its old values until ``install()``, and then all new ones."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

import transfuse
from gathering import MIB, blank, state
from moves import CPU, TIMEOUT
from shards import plain, shard
from transfuse import Concat, Pending, Rename, Slice
from transfuse._memory.held import HeldLanding
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Outcome, Ranks

each_route = pytest.mark.parametrize("same_host", [False, True], ids=["group", "memory"])


def bits(tree: Any) -> list[bytes]:
    """All bytes of all tensors of a tree."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if torch.is_tensor(leaf)]
    dense = [leaf for leaf in leaves if leaf.layout is torch.strided]
    dense += [part for leaf in leaves if leaf.is_sparse for part in (leaf.indices(), leaf.values())]
    return [leaf.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for leaf in dense]


class Here:
    """Two ranks: one sends, and the other one receives ahead."""

    def __init__(self, ranks: Ranks, same_host: bool) -> None:
        self._ranks = ranks
        self._same_host = same_host

    def receive(
        self,
        sent: Any,
        target: Any,
        during: Callable[[Pending[Any]], Any],
        source: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[Outcome[Any], Outcome[Any]]:
        """Send, and let ``during`` do what it wants with what is received ahead; the outcomes of both."""
        give = None if target is None else lambda: target

        def work(rank: int, pg: Any) -> Any:
            if rank == 0:
                sender = transfuse.PGTransport(pg, TIMEOUT, CPU, same_host=self._same_host, **(source or {}))
                return sender.send_checkpoint(1, sent)
            receiver = transfuse.PGTransport(pg, TIMEOUT, CPU, give, same_host=self._same_host, **options)
            return during(receiver.recv_checkpoint(0, wait=False))

        one, other = self._ranks.outcomes(work)
        return one, other

    def move(self, sent: Any, target: Any, **options: Any) -> tuple[Any, transfuse.Report]:
        """Nothing of the target may change before everything is here, and the source has gone on."""
        before, is_sent = bits(target), threading.Event()

        def during(pending: Pending[Any]) -> tuple[Any, transfuse.Report]:
            while not pending.done():
                assert bits(target) == before
            assert pending.error is None
            assert bits(target) == before
            arrived = pending.install()
            assert pending.report is not None
            assert pending.install() is arrived
            return arrived, pending.report

        source, receiver = self.receive(sent, target, during, **options)
        source.get()
        is_sent.set()
        result: tuple[Any, transfuse.Report] = receiver.get()
        return result

    def at_once(self, sent: Any, target: Any, **options: Any) -> transfuse.Report:
        """The same with ``wait=True``."""

        def work(rank: int, pg: Any) -> Any:
            mover = transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target, same_host=self._same_host, **options)
            if rank == 0:
                mover.send_checkpoint(1, sent)
            else:
                mover.recv_checkpoint(0)
            return mover.report

        report: transfuse.Report = self._ranks.run(work)[1]
        return report


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, 40) as two:
        yield two


@pytest.fixture(params=[False, True], ids=["group", "memory"])
def here(ranks: Ranks, request: pytest.FixtureRequest) -> Here:
    return Here(ranks, request.param)


def odd_state() -> dict[str, Any]:
    weight, tied = torch.randn(300, 200), torch.randn(100, 40)
    return {
        "transposed": weight,
        "apart": tied,
        "also apart": tied.t(),
        "strided": torch.randn(64, 64)[::2, 1::3],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "conjugated": torch.randn(30, dtype=torch.complex64).conj(),
        "sparse": torch.eye(30).to_sparse().coalesce(),
        "nothing": torch.empty(0, 3),
        "single": torch.tensor(3.0),
        "fresh": torch.randn(5000),
        "small": {f"s{i}": torch.randn(7 * i + 1).to(torch.float64 if i % 2 else torch.float16) for i in range(30)},
        "n": 3,
    }


def odd_target() -> dict[str, Any]:
    return {
        "transposed": torch.zeros(200, 300).t(),
        "apart": torch.zeros(100, 40),
        "also apart": torch.zeros(100, 40).t(),
        "strided": torch.zeros(32, 21),
        "expanded": torch.zeros(4, 5),
        "conjugated": torch.zeros(30, dtype=torch.complex64),
        "sparse": (torch.eye(30) * 2).to_sparse().coalesce(),
        "nothing": torch.empty(0, 3),
        "single": torch.tensor(0.0),
        "small": {f"s{i}": torch.zeros(7 * i + 1).to(torch.float64 if i % 2 else torch.float16) for i in range(30)},
        "n": 0,
    }


@pytest.mark.parametrize("delta", [False, True], ids=["all", "delta"])
def test_all_kinds_of_targets(here: Here, delta: bool) -> None:
    sent, target = odd_state(), odd_target()
    if delta:
        target["transposed"].copy_(sent["transposed"])
        target["small"]["s7"].copy_(sent["small"]["s7"])
    arrived, report = here.move(sent, target, delta=delta)
    for name in ("transposed", "apart", "also apart", "strided", "expanded", "single"):
        assert torch.equal(sent[name], target[name]), name
        assert arrived[name] is target[name]
        assert target[name]._version > 0
    assert torch.equal(sent["conjugated"].resolve_conj(), target["conjugated"])
    assert torch.equal(sent["sparse"].to_dense(), target["sparse"].to_dense())
    assert_exact(sent["small"], arrived["small"], in_place=True)
    assert torch.equal(sent["fresh"], arrived["fresh"])
    assert arrived["n"] == 3
    assert report.held_bytes > 0
    assert report.install_seconds > 0


@pytest.mark.parametrize("option", ["wait", "atomic"])
def test_what_delta_keeps_of_a_sparse_tensor_is_examined_with_what_is_held(here: Here, option: str) -> None:
    """Its indices are kept, and its values are held."""
    sent = {"s": sparse(1.0)}
    target = {"s": sparse(2.0)}
    if option == "wait":
        _, report = here.move(sent, target, delta=True)
    else:
        report = here.at_once(sent, target, delta=True, atomic=True)
    assert_exact(sent["s"], target["s"], in_place=True)
    assert report.held_bytes == sent["s"].values().nbytes
    assert report.kept_bytes == sent["s"].indices().nbytes


def sparse(value: float, count: int = 100_000) -> torch.Tensor:
    places = torch.arange(count).expand(2, count).contiguous()
    return torch.sparse_coo_tensor(places, torch.full((count,), value), (count, count)).coalesce()


def test_casts_and_rules(here: Here) -> None:
    sent = {"q": torch.randn(40, 30), "k": torch.randn(40, 30), "old": torch.randn(4000, 50)}
    target = {"qk": torch.zeros(80, 30, dtype=torch.bfloat16), "new": torch.zeros(50, 4000, dtype=torch.bfloat16).t()}
    rules = [Concat(["q", Slice("k", dim=0, start=0, stop=40)], "qk"), Rename("old", "new")]
    _, report = here.move(sent, target, map_path=rules, cast=True)
    assert torch.equal(target["qk"], torch.cat([sent["q"], sent["k"]]).bfloat16())
    assert torch.equal(target["new"], sent["old"].bfloat16())
    assert report.held_bytes == report.bytes == target["qk"].nbytes + target["new"].nbytes  # As it travels.


@each_route
def test_other_shards_from_several_sources(same_host: bool) -> None:
    whole = torch.randn(512, 900)
    targets = {rank: {"w": shard(torch.zeros_like(whole), [2, 3, 4], rank, Shard(1))} for rank in (2, 3, 4)}

    def work(rank: int, pg: Any) -> Any:
        if rank < 2:
            sender = transfuse.PGTransport(pg, TIMEOUT, CPU, same_host=same_host)
            return sender.send_checkpoint([2, 3, 4], {"w": shard(whole, [0, 1], rank, Shard(0))})
        receiver = transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: targets[rank], same_host=same_host)
        with receiver.recv_checkpoint([0, 1], wait=False) as pending:
            while not pending.done():
                assert not plain(targets[rank]["w"]).any()
            return pending.install()

    with Ranks(5, 40) as ranks:
        for rank, outcome in enumerate(ranks.outcomes(work)):
            outcome.get()
            if rank > 1:
                assert torch.equal(plain(targets[rank]["w"]), plain(shard(whole, [2, 3, 4], rank, Shard(1))))


def resident(address: int, nbytes: int) -> int:
    """How much of this range of addresses takes memory, as the kernel says."""
    found = inside = 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if "-" in first and not first.endswith(":"):
                low, high = (int(end, 16) for end in first.split("-"))
                inside = low < address + nbytes and address < high
            elif inside and first == "Rss:":
                found += 1024 * int(rest.split()[0])
    return found


def test_with_delta_only_what_has_changed_takes_memory(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {"w": torch.randn(16 * MIB)}
    target = {"w": sent["w"].clone()}
    blocks = target["w"].view(-1, 32 << 10)  # Of 128 KiB.
    blocks[torch.arange(0, len(blocks), 100), 0] += 1
    measured: list[int] = []
    whole = HeldLanding.build

    def build(held: HeldLanding, *args: Any) -> Any:
        measured.append(resident(held._held.here.data_ptr(), held._held.here.numel()))
        return whole(held, *args)

    monkeypatch.setattr(HeldLanding, "build", build)
    _, report = here.move(sent, target, delta=True)
    assert torch.equal(target["w"], sent["w"])
    assert 0.009 * sent["w"].nbytes < report.held_bytes < 0.015 * sent["w"].nbytes
    assert measured[0] <= report.held_bytes + 64 * 4096


def test_what_was_kept_is_compared_again_before_anything_is_written(here: Here) -> None:
    """The write is one of which torch's version counters know nothing."""
    sent = state()
    target = {name: leaf.clone() if torch.is_tensor(leaf) else leaf for name, leaf in sent.items()}
    target["w00"].zero_()

    def during(pending: Pending[Any]) -> None:
        while not pending.done():
            pass
        target["w07"].data[5] += 1
        before = bits(target)
        with pytest.raises(transfuse.StateError, match=r"1 leaves have changed.*w07") as caught:
            pending.install()
        assert bits(target) == before
        target["w07"].data[5] = sent["w07"][5]
        target["w00"].fill_(9.0)  # This is written whole, whatever it holds.
        assert "w07" in str(caught.value)
        pending.install()

    source, receiver = here.receive(sent, target, during, delta=True)
    source.get()
    receiver.get()
    assert_exact(sent, target, in_place=True)


def test_a_target_that_has_moved_is_refused(here: Here) -> None:
    sent, target = state(), blank(state())

    def during(pending: Pending[Any]) -> None:
        while not pending.done():
            pass
        target["w00"].data = torch.zeros_like(target["w00"])
        target["w01"].untyped_storage().resize_(0)
        with pending, pytest.raises(transfuse.StateError, match="not what it was"):
            pending.install()

    for outcome in here.receive(sent, target, during):
        outcome.get()
    assert not any(bool(leaf.any()) for name, leaf in target.items() if torch.is_tensor(leaf) and name != "w01")


def test_the_later_of_two_wins_and_with_delta_it_is_refused_if_it_would_mix(ranks: Ranks) -> None:
    old, new = state(), state(2.0)
    for name in ("w00", "w01"):
        new[name] = old[name].clone()

    def fetch_both(delta: bool) -> tuple[Any, list[Outcome[Any]]]:
        target = {name: leaf.clone() if torch.is_tensor(leaf) else leaf for name, leaf in old.items()}
        target["w00"].zero_()

        def work(rank: int, pg: Any) -> Any:
            if rank == 0:
                for sent in (old, new):
                    transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint(1, sent)
                return None
            receiver = transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target, delta=delta)
            with receiver.recv_checkpoint(0, wait=False) as one:
                while not one.done():
                    pass
                with receiver.recv_checkpoint(0, wait=False) as other:
                    other.install()
                    one.install()
            return None

        return target, ranks.outcomes(work)

    target, outcomes = fetch_both(delta=False)
    assert outcomes[1].error is None
    assert_exact(old["w05"], target["w05"])
    target, outcomes = fetch_both(delta=True)
    assert isinstance(outcomes[1].error, transfuse.StateError)
    assert_exact(new["w05"], target["w05"])


@each_route
def test_closed_on_the_way_both_ends_know_and_nothing_was_written(ranks: Ranks, same_host: bool) -> None:
    target = blank(state())

    def during(pending: Pending[Any]) -> None:
        reached.wait(20)
        pending.close()
        pending.close()
        assert repr(pending) == "<transfuse.Pending: closed>"
        assert pending.error is None
        with pytest.raises(transfuse.StateError, match="was closed"):
            pending.install()

    reached = threading.Event()

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes:
            reached.set()

    slow = {"max_bytes_per_second": 4.0 * MIB}
    source, receiver = Here(ranks, same_host).receive(state(), target, during, slow, progress=show)
    receiver.get()
    assert isinstance(source.error, transfuse.SendFailed)
    assert "the receiver has closed what it was fetching ahead" in str(source.error)
    assert not any(bool(leaf.any()) for leaf in target.values() if torch.is_tensor(leaf))


def test_forgotten_it_is_closed_with_a_warning(here: Here) -> None:
    sent, target = state(), blank(state())
    mapped: list[int] = []

    def during(pending: Pending[Any]) -> None:
        while not pending.done():
            pass
        held = pending._ahead.brought.found._landing._held.here  # type: ignore[union-attr]
        mapped.append(held.data_ptr())

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        for outcome in here.receive(sent, target, during):
            outcome.get()
        gc.collect()
    assert ["neither installed nor closed" in str(one.message) for one in seen if "transfuse" in str(one.message)] == [
        True
    ]
    assert not any(bool(leaf.any()) for leaf in target.values() if torch.is_tensor(leaf))
    with open("/proc/self/maps") as maps:
        assert not any(line.startswith(f"{mapped[0]:x}-") for line in maps)


def test_its_memory_is_bounded(here: Here) -> None:
    sent, target = state(), blank(state())
    size = sum(leaf.nbytes for name, leaf in sent.items() if name.startswith("w"))

    def during(pending: Pending[Any]) -> Any:
        return pending.install()

    _, receiver = here.receive(sent, target, during, max_receive_bytes=size)
    assert isinstance(receiver.error, transfuse.LimitExceeded)
    assert "held aside" in str(receiver.error)
    _, receiver = here.receive(sent, target, during, max_receive_bytes=size // 2, delta=True)
    assert isinstance(receiver.error, transfuse.LimitExceeded)
    assert not any(bool(leaf.any()) for leaf in target.values() if torch.is_tensor(leaf))
    for name, leaf in sent.items():
        if torch.is_tensor(leaf) and name != "w00":
            target[name].copy_(leaf)
    _, receiver = here.receive(sent, target, during, max_receive_bytes=size // 2, delta=True)
    assert_exact(sent, receiver.get(), in_place=True)


def test_without_a_target_it_is_fetched_in_the_background_and_nothing_is_held(here: Here) -> None:
    arrived: list[Any] = []

    def during(pending: Pending[Any]) -> None:
        arrived.append(pending.install())
        assert pending.report is not None
        assert pending.report.held_bytes == 0

    for outcome in here.receive(state(), None, during):
        outcome.get()
    assert_exact(state(), arrived[0])


def test_an_error_of_the_callback_is_told_to_the_source(ranks: Ranks) -> None:
    def fail() -> Any:
        raise KeyError("no state")

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint(1, state())
        pending = transfuse.PGTransport(pg, TIMEOUT, CPU, fail).recv_checkpoint(0, wait=False)
        with pytest.raises(KeyError, match="no state"):
            pending.install()
        assert pending.done()
        assert isinstance(pending.error, KeyError)
        return repr(pending)

    source, receiver = ranks.outcomes(work)
    assert "failed" in receiver.get()
    assert "no state" in str(source.error)


@pytest.mark.usefixtures("group_route")
def test_what_has_arrived_when_the_source_is_lost_is_resumed_from(ranks: Ranks) -> None:
    """The partial of what was held is no partial of a receive in place, and the other way round."""
    sent, target = state(), blank(state())
    stop = threading.Event()

    def watch(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes > 2 * MIB:
            stop.set()
            raise transfuse.TransfuseError("enough")

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            source = transfuse.PGTransport(pg, TIMEOUT, CPU, max_bytes_per_second=8.0 * MIB)
            with pytest.raises(transfuse.SendFailed):
                source.send_checkpoint(1, sent)
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint(1, sent)
        pending = transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target, progress=watch).recv_checkpoint(0, wait=False)
        with pytest.raises(transfuse.TransfuseError, match="enough") as caught:
            pending.install()
        partial = caught.value.partial
        assert partial is not None
        assert partial.received_bytes > 0
        assert caught.value.torn == ()
        again = transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target)
        pending = again.recv_checkpoint(0, resume=partial, wait=False)
        while not pending.done():
            assert not target["w00"].any()
        assert_exact(sent, pending.install(), in_place=True)
        assert again.report is not None
        assert again.report.kept_bytes == partial.received_bytes
        return None

    for outcome in reversed(ranks.outcomes(work)):
        outcome.get()


def test_a_group_that_has_one_order_for_everything_is_refused(ranks: Ranks) -> None:
    class Untagged:
        def __init__(self, pg: Any) -> None:
            self._pg = pg

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            return "other"

        def send(self, *args: Any) -> Any: ...

        def recv(self, *args: Any) -> Any: ...

        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

    transport = transfuse.PGTransport(Untagged(ranks.pgs[1]), TIMEOUT, CPU)
    with pytest.raises(ValueError, match="wait=False needs a group"):
        transport.recv_checkpoint(0, wait=False)
