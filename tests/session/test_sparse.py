"""Sparse delta: a source with ``history=1`` sends only the items that have changed since it last gave a parcel out."""

from __future__ import annotations

import copy
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import transfuse
from moves import CPU, TIMEOUT
from serving import wait_until
from shards import plain, shard
from transfuse import Concat
from transfuse._memory import patches
from transfuse._report import Report
from transfuse._session import history
from transfuse._sizes import Sizes
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse.testing.ranks import Ranks

TOKEN = "correct horse battery staple"
#: As many values as four parcels of bf16 have.
VALUES = 1 << 18
PARCEL = 128 << 10


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_BLOCK_BYTES", str(PARCEL // Sizes.PATCHED_BLOCKS))


def weights(seed: int = 0, values: int = VALUES) -> torch.Tensor:
    return torch.randn(values, generator=torch.Generator().manual_seed(seed)) * 0.02


def step(tensor: torch.Tensor, seed: int, size: float = 1e-6) -> None:
    """Move each weight a little, as Adam does with such a learning rate."""
    tensor += size * (2 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) - 1)


def fetched(server: transfuse.Server | list[str], target: Any, **options: Any) -> Report:
    address = server.address if isinstance(server, transfuse.Server) else server
    options = {"cast": True, "delta": True, "same_host": False, **options}
    found: transfuse.Fetched = transfuse.fetch(address, target, token=TOKEN, **options)
    return found.report


@pytest.fixture(params=[False, True], ids=["stream", "memory"])
def same_host(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_what_has_changed_travels_as_positions_and_values(same_host: bool) -> None:
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)
    sent: list[Report] = []
    with transfuse.serve({"w": w}, token=TOKEN, history=1, on_report=sent.append) as server:
        first = fetched(server, {"w": held}, same_host=same_host)
        assert (first.patched_bytes, first.bytes) == (0, held.nbytes)
        for round_number in range(3):
            with server.mutating():
                step(w, round_number)
            report = fetched(server, {"w": held}, same_host=same_host)
            assert torch.equal(held, w.bfloat16())
            assert (report.patched_bytes, report.kept_bytes) == (held.nbytes, 0)
            assert report.bytes == report.patch_bytes == sum(report.by_source.values())
            assert report.bytes < 0.07 * held.nbytes
            assert "patches" in str(report)
        again = fetched(server, {"w": held}, same_host=same_host)
        assert (again.bytes, again.kept_bytes) == (0, held.nbytes)
    assert all(held.nbytes <= report.history_bytes <= held.nbytes * (1 + history.KEPT_PART) for report in sent)
    assert sent[-2].bytes == sent[-2].patch_bytes == report.bytes
    assert "history" in str(sent[-1])


def test_without_history_whole_blocks_travel() -> None:
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)
    with transfuse.serve({"w": w}, token=TOKEN) as server:
        fetched(server, {"w": held})
        with server.mutating():
            step(w, 0)
        report = fetched(server, {"w": held})
    assert torch.equal(held, w.bfloat16())
    assert (report.bytes, report.patch_bytes) == (held.nbytes, 0)


def test_a_base_is_proved() -> None:
    """One receiver misses a round, one writes to its tensors, one is new: each gets the blocks whole that it needs."""
    w = weights()
    steady, late, scribbler = (torch.zeros(VALUES, dtype=torch.bfloat16) for _ in range(3))
    with transfuse.serve({"w": w}, token=TOKEN, history=1) as server:
        for held in (steady, late, scribbler):
            fetched(server, {"w": held})
        scribbler[3] += 1
        for round_number in range(2):
            with server.mutating():
                step(w, round_number)
            assert fetched(server, {"w": steady}).patched_bytes == steady.nbytes
            if not round_number:
                report = fetched(server, {"w": scribbler})
                assert report.patched_bytes == scribbler.nbytes - PARCEL
                assert report.bytes == report.patch_bytes + PARCEL
        report = fetched(server, {"w": late})
        assert (report.patched_bytes, report.bytes) == (0, late.nbytes)
        new = torch.zeros(VALUES, dtype=torch.bfloat16)
        assert fetched(server, {"w": new}).bytes == new.nbytes
        fetched(server, {"w": scribbler})
    for held in (steady, late, scribbler, new):
        assert torch.equal(held, w.bfloat16())


def test_receivers_at_once_share_one_history() -> None:
    w, held = weights(), [torch.zeros(VALUES, dtype=torch.bfloat16) for _ in range(4)]
    sent: list[Report] = []
    with (
        transfuse.serve({"w": w}, token=TOKEN, history=1, on_report=sent.append) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        for round_number in range(4):
            reports = list(pool.map(lambda tensor: fetched(server, {"w": tensor}), held))
            assert [report.patched_bytes for report in reports] == 4 * [held[0].nbytes if round_number else 0]
            with server.mutating():
                step(w, round_number)
    size = held[0].nbytes
    assert all(size <= report.history_bytes <= size * (1 + history.KEPT_PART) for report in sent)


def test_plans_for_which_there_is_room_are_remembered_until_nobody_has_them_any_more() -> None:
    """Three plans, two of which have as many bytes together as the state."""
    w = {name: weights(i) for i, name in enumerate("abc")}
    targets = [{name: torch.zeros(VALUES) for name in names} for names in ("ab", "c", "bc")]
    sent: list[Report] = []

    def change_and_fetch(*numbers: int) -> list[bool]:
        with server.mutating():
            for tensor in w.values():
                tensor[5] += 1
        rules = [{name: name for name in target} for target in targets]
        return [fetched(server, targets[n], map_path=rules[n]).patched_bytes > 0 for n in numbers]

    with transfuse.serve(w, token=TOKEN, history=1, on_report=sent.append) as server:
        assert change_and_fetch(0, 1, 2) == [False, False, False]
        for _ in range(3):
            assert change_and_fetch(0, 1, 2) == [True, True, False]
        for _ in range(history.MOST_IDLE):
            change_and_fetch(1)
        assert change_and_fetch(1, 2) == [True, False]
        assert change_and_fetch(1, 2) == [True, True]
        assert change_and_fetch(0, 1) == [False, True]
    size = sum(tensor.nbytes for tensor in w.values())
    assert size <= max(report.history_bytes for report in sent) <= size * (1 + history.KEPT_PART)
    for name, tensor in {**targets[0], **targets[1]}.items():
        assert torch.equal(tensor, w[name])


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"lanes": 3}, {"verify": True}], ids=str)
def test_two_shards_into_fused_bf16_weights(options: dict[str, Any], same_host: bool) -> None:
    """Two sources, each with half of the rows; a receiver with two weights fused, and one with half of the columns."""
    whole = {name: weights(i).view(512, -1) for i, name in enumerate(("q", "k", "v"))}
    shards: list[dict[str, Any]] = [
        {name: shard(tensor, [0, 1], rank, Shard(0)) for name, tensor in whole.items()} for rank in range(2)
    ]
    fused = {"qk": torch.zeros(1024, VALUES // 512, dtype=torch.bfloat16), "v": torch.zeros_like(whole["v"])}
    halves = {"q": shard(torch.zeros_like(whole["q"], dtype=torch.bfloat16), [0, 1], 1, Shard(1))}
    rules = [Concat(["q", "k"], "qk")]
    servers = [transfuse.serve(one, token=TOKEN, history=1, max_readers=8) for one in shards]
    try:
        for round_number in range(3):
            addresses = [server.address for server in servers]
            one = fetched(addresses, fused, map_path=rules, same_host=same_host, **options)
            two = fetched(addresses, halves, map_path={"q": "q"}, same_host=same_host, **options)
            gathered = {name: torch.cat([plain(part[name]) for part in shards]) for name in whole}
            assert torch.equal(fused["qk"], torch.cat([gathered["q"], gathered["k"]]).bfloat16())
            assert torch.equal(fused["v"], gathered["v"])
            assert torch.equal(plain(halves["q"]), gathered["q"][:, VALUES // 1024 :].bfloat16())
            if round_number:
                assert one.patched_bytes == fused["qk"].nbytes  # In float32 every value has changed.
                assert two.patched_bytes == plain(halves["q"]).nbytes
                assert two.bytes < 0.07 * two.patched_bytes
            for server, part in zip(servers, shards, strict=True):
                with server.mutating():
                    for tensor in part.values():
                        assert isinstance(tensor, DTensor)
                        step(tensor.to_local(), round_number)
    finally:
        for server in servers:
            server.close()


@pytest.mark.parametrize("streams", [True, False])
def test_transports_of_a_group(streams: bool) -> None:
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)
    options: dict[str, Any] = {"streams": streams, "same_host": False}
    with Ranks(2) as ranks:
        source = transfuse.PGTransport(ranks.pgs[0], TIMEOUT, CPU, history=1, **options)
        receiver = transfuse.PGTransport(
            ranks.pgs[1], TIMEOUT, CPU, lambda: {"w": held}, cast=True, delta=True, **options
        )

        def work(rank: int, _: Any) -> Any:
            return source.send_checkpoint([1], {"w": w}) if rank == 0 else receiver.recv_checkpoint(0)

        for round_number in range(3):
            for outcome in ranks.outcomes(work):
                outcome.get()
            assert torch.equal(held, w.bfloat16())
            assert receiver.report is not None
            assert receiver.report.patched_bytes == (held.nbytes if round_number else 0)
            step(w, round_number)


def test_a_wrong_patch_costs_a_whole_block_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)

    def wrong(before: Any, after: Any, item: int) -> bytes | None:
        patch = patches.patch_of(before, after, item)
        return None if patch is None else patch[:-1] + bytes([patch[-1] ^ 1])

    with transfuse.serve({"w": w}, token=TOKEN, history=1) as server:
        fetched(server, {"w": held})
        with server.mutating():
            step(w, 0)
        monkeypatch.setattr(history, "patch_of", wrong)
        report = fetched(server, {"w": held})
    assert torch.equal(held, w.bfloat16())
    assert (report.patched_bytes, report.repaired) == (0, held.nbytes // PARCEL)
    assert report.bytes == held.nbytes + report.patch_bytes


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda digests, patches: [digests, patches[:-1]], "compared parcels that it was not asked about"),
        (lambda digests, patches: [digests, [b"\x02" + bytes(9) for _ in patches]], "a patch of 10 bytes"),
        (lambda digests, patches: [digests, [b"\x01" + 1999 * b"\xff" for _ in patches]], "a patch writes to item"),
        (lambda digests, patches: [digests, [7 for _ in patches]], "malformed digests"),
    ],
)
def test_a_source_that_sends_no_patches(answer: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)
    encode = messages.encode

    def lie(body: Any) -> bytes:
        if isinstance(body, messages.Digests) and body.patches:
            import msgspec

            return msgspec.msgpack.encode(answer(body.digests, body.patches))
        return encode(body)

    with transfuse.serve({"w": w}, token=TOKEN, history=1) as server:
        fetched(server, {"w": held})
        with server.mutating():
            step(w, 0)
        monkeypatch.setattr(messages, "encode", lie)
        with pytest.raises(transfuse.ProtocolError, match=words):
            fetched(server, {"w": held})


def test_a_receiver_that_is_cut_off_in_the_middle_gets_the_rest_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was patched is as the source's, and what was not is as before: the next fetch finds both."""
    w = weights(values=64 * VALUES)
    held = torch.zeros(64 * VALUES, dtype=torch.bfloat16)
    decode, answers = Channel.decode, []

    def cut(channel: Channel, body: Any, cls: Any) -> Any:
        found = decode(channel, body, cls)
        if isinstance(found, messages.Digests):
            answers.append(found)
            if len(answers) == 1 and any(found.patches):
                raise KeyboardInterrupt
        return found

    with transfuse.serve({"w": w}, token=TOKEN, history=1) as server:
        fetched(server, {"w": held})
        with server.mutating():
            step(w, 0)
        with monkeypatch.context() as patching:
            patching.setattr(Channel, "decode", cut)
            with pytest.raises(KeyboardInterrupt):
                fetched(server, {"w": held})
        fetched(server, {"w": held})
    assert torch.equal(held, w.bfloat16())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def test_any_states_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves of all kinds and sizes, receivers of all kinds: after each fetch the values are those of the source."""
    monkeypatch.setenv("TRANSFUSE_BLOCK_BYTES", str(4 << 10))
    chosen = random.Random(28)
    torch.manual_seed(28)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.int16]
    state: dict[str, Any] = {}
    for i in range(40):
        dtype, numel = chosen.choice(dtypes), chosen.choice([0, 1, 7, 300, 9000, 70_000])
        made = (torch.randn(numel + 1) * 50).to(dtype)[1:]
        state[f"{i}"] = made.view(-1, 2).t() if numel % 2 == 0 and chosen.random() < 0.3 else made
    state["tied"] = state["3"]
    narrow = {torch.float32: torch.bfloat16, torch.float64: torch.float32}
    receivers = []
    for _ in range(3):
        target = {
            name: torch.zeros_like(tensor, dtype=narrow.get(tensor.dtype, tensor.dtype))
            if chosen.random() < 0.5
            else torch.zeros_like(tensor)
            for name, tensor in state.items()
        }
        receivers.append((target, {"atomic": chosen.random() < 0.3, "same_host": chosen.random() < 0.3}))
    patched = 0
    with transfuse.serve(state, token=TOKEN, history=1) as server:
        for _ in range(12):
            with server.mutating():
                for tensor in state.values():
                    at = torch.randperm(tensor.numel())[: int(tensor.numel() * chosen.choice([0, 0, 0.01, 0.2, 1]))]
                    changed = tensor.contiguous().view(-1).clone()
                    changed[at] = (torch.randn(len(at)) * 50).to(tensor.dtype)
                    tensor.copy_(changed.view(tensor.shape))
            for target, options in receivers:
                if chosen.random() < 0.2:
                    continue
                if chosen.random() < 0.2:
                    target[chosen.choice(list(target))].zero_()
                patched += fetched(server, target, **options).patched_bytes
                for name, tensor in state.items():
                    due, here = (one.to(target[name].dtype).contiguous() for one in (tensor, target[name]))
                    assert torch.equal(bits(due), bits(here)), name
    assert patched > 0


def test_history_is_let_go_with_its_server() -> None:
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)
    server = transfuse.serve({"w": w}, token=TOKEN, history=1)
    fetched(server, {"w": held})
    remembered = server._remembered
    assert remembered.history_of(None).nbytes == held.nbytes
    server.close()
    assert server._remembered is not remembered


def test_the_thread_of_a_mutating_trainer_does_not_wait_longer_than_for_any_reader() -> None:
    """The copy is made while readers read, in their threads: mutating() copies nothing."""
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)
    gave: list[str] = []
    give = history.GivenOut.give

    def noted(*args: Any) -> tuple[bytes, bytes]:
        gave.append(threading.current_thread().name)
        return give(*args)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(history.GivenOut, "give", noted)
        with transfuse.serve({"w": w}, token=TOKEN, history=1) as server:
            fetched(server, {"w": held})
            count = len(gave)
            with server.mutating():
                step(w, 0)
            assert len(gave) == count
    assert threading.main_thread().name not in gave


def test_states_that_are_copies_are_no_base() -> None:
    """A state of the same structure, from another server, has a history of its own."""
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)
    other = copy.deepcopy(w)
    step(other, 0)
    with (
        transfuse.serve({"w": w}, token=TOKEN, history=1) as one,
        transfuse.serve({"w": other}, token=TOKEN, history=1) as two,
    ):
        fetched(one, {"w": held})
        assert fetched(two, {"w": held}).patched_bytes == 0
    assert torch.equal(held, other.bfloat16())


def test_to_verify_writes_nothing_and_takes_no_room() -> None:
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)
    with transfuse.serve({"w": w}, token=TOKEN, history=1) as server:
        assert not transfuse.verify(server.address, {"w": held}, token=TOKEN, cast=True)
        assert server._remembered.history_of(None).nbytes == 0
        fetched(server, {"w": held})
        with server.mutating():
            step(w, 0)
        before = held.clone()
        assert not transfuse.verify(server.address, {"w": held}, token=TOKEN, cast=True)
        assert torch.equal(held, before)
        assert fetched(server, {"w": held}).patched_bytes == held.nbytes
        assert transfuse.verify(server.address, {"w": held}, token=TOKEN, cast=True)


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "ahead"])
def test_patches_are_held_in_the_place_of_parcels(atomic: bool) -> None:
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)
    with transfuse.serve({"w": w}, token=TOKEN, history=1) as server:
        fetched(server, {"w": held})
        with server.mutating():
            step(w, 0)
        if atomic:
            report = fetched(server, {"w": held}, atomic=True)
        else:
            before = held.clone()
            pending = transfuse.fetch(
                server.address, {"w": held}, token=TOKEN, cast=True, delta=True, same_host=False, wait=False
            )
            with pending:
                wait_until(pending.done)
                assert torch.equal(held, before)
                report = pending.install().report
        assert torch.equal(held, w.bfloat16())
        assert report.patched_bytes == held.nbytes
        assert 0 < report.held_bytes == report.patch_bytes < 0.07 * held.nbytes


def test_a_target_that_is_changed_before_it_is_installed() -> None:
    w, held = weights(), torch.zeros(VALUES, dtype=torch.bfloat16)
    with transfuse.serve({"w": w}, token=TOKEN, history=1) as server:
        fetched(server, {"w": held})
        with server.mutating():
            step(w, 0)
        with transfuse.fetch(server.address, {"w": held}, token=TOKEN, cast=True, delta=True, wait=False) as pending:
            wait_until(pending.done)
            held[7] += 1
            with pytest.raises(transfuse.StateError, match=r"1 leaves have changed .*\['w'\]"):
                pending.install()
        fetched(server, {"w": held})
    assert torch.equal(held, w.bfloat16())


def test_what_is_examined_is_made_of_its_patch_before_it_is_installed() -> None:
    """The indices of a sparse tensor are checked before a target is written: patched ones too."""
    torch.manual_seed(0)
    values, indices = torch.randn(VALUES // 4), torch.arange(VALUES // 4)
    made = torch.sparse_coo_tensor(indices[None], values, (VALUES,), is_coalesced=True)
    state, target = {"s": made}, {"s": made.clone()}
    target["s"]._values().zero_()
    with transfuse.serve(state, token=TOKEN, history=1) as server:
        fetched(server, target, cast=False)
        for _ in range(2):
            with server.mutating():
                made._values()[3] += 1
                made._indices()[0, -1] += 1
            report = fetched(server, target, cast=False, atomic=True)
            assert torch.equal(target["s"]._indices(), made._indices())
            assert torch.equal(target["s"]._values(), made._values())
    assert report.patched_bytes > 0


def test_replicas_compare_the_same_parcels_every_time() -> None:
    w = weights()
    replicas = [{"w": w.clone()} for _ in range(3)]
    held = {"w": torch.zeros(VALUES, dtype=torch.bfloat16)}
    servers = [transfuse.serve(one, token=TOKEN, history=1) for one in replicas]
    try:
        for round_number in range(4):
            report = fetched([server.address for server in servers], held)
            assert torch.equal(held["w"], replicas[0]["w"].bfloat16())
            assert report.patched_bytes == (held["w"].nbytes if round_number else 0)
            for server, one in zip(servers, replicas, strict=True):
                with server.mutating():
                    step(one["w"], round_number)
        assert len(report.by_source) == 3
        servers.pop().close()
        fetched([server.address for server in servers], held)
        assert torch.equal(held["w"], replicas[0]["w"].bfloat16())
    finally:
        for server in servers:
            server.close()


def test_entries_of_one_structure_have_a_history_each() -> None:
    state = {"model": {"w": weights(1)}, "average": {"w": weights(2)}}
    held = {name: {"w": torch.zeros(VALUES, dtype=torch.bfloat16)} for name in state}
    with transfuse.serve(state, token=TOKEN, history=1) as server:
        for round_number in range(3):
            for name, target in held.items():
                report = fetched(server, target, entry=name)
                assert torch.equal(target["w"], state[name]["w"].bfloat16())
                assert report.patched_bytes == (target["w"].nbytes if round_number else 0)
            with server.mutating():
                for number, one in enumerate(state.values()):
                    step(one["w"], 10 * round_number + number)


@pytest.mark.parametrize("way", ["atomic", "ahead"])
def test_a_receive_that_failed_is_resumed_with_patches(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parcels that lie aside from a failed fetch, and parcels in the targets, each with patches of their own."""
    options: dict[str, Any] = {"atomic": True} if way == "atomic" else {"wait": False}
    w = {name: weights(i) for i, name in enumerate("ab")}
    held = {name: torch.zeros(VALUES, dtype=torch.bfloat16) for name in w}
    decode, compared = Channel.decode, threading.Event()

    def cut(channel: Channel, body: Any, cls: Any) -> Any:
        found = decode(channel, body, cls)
        if isinstance(found, messages.Agreed) and compared.is_set():
            raise transfuse.PeerLost(0, "cut off by the test")
        if isinstance(found, messages.Digests):
            compared.set()
        return found

    def fetch_and_install(resume: Any = None) -> None:
        common: dict[str, Any] = {"token": TOKEN, "cast": True, "delta": True, "same_host": False, **options}
        found: Any = transfuse.fetch(server.address, held, resume=resume, **common)
        if way == "ahead":
            found.install()

    with transfuse.serve(w, token=TOKEN, history=1) as server:
        fetched(server, held)
        with server.mutating():
            w["a"] += 1  # All of it arrives whole, and b is patched.
            step(w["b"], 0)
        before = {name: tensor.clone() for name, tensor in held.items()}
        with monkeypatch.context() as patching:
            patching.setattr(Channel, "decode", cut)
            with pytest.raises(transfuse.TransfuseError, match="cut off") as failed:
                fetch_and_install()
        assert all(torch.equal(held[name], before[name]) for name in held)
        resume = failed.value.partial
        for round_number in range(2):
            with server.mutating():
                step(w["a"], 5 + round_number)
                step(w["b"], 7 + round_number)
            fetch_and_install(None if round_number else resume)
            assert all(torch.equal(held[name], w[name].bfloat16()) for name in w)
