"""Hostile peers of a receive that is put together: forged wants of blocks, forged coordinates in meshes, and sources
that lie about, or die with, what only they hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import hostile
from hostile import LIMITS, PEER, Member, Wire
from hostile_cases import little_memory, one_tensor, refuse_out_of_memory, want, with_leaf
from hostile_conversations import (
    HONEST_SECONDS,
    WIRES,
    Liar,
    altered,
    in_turn,
    instead,
    new_transport,
    refusing,
    serve_by,
    use_wire,
)
from transfuse import Block
from transfuse._errors import (
    CorruptData,
    NotCovered,
    PeerError,
    PeerRefused,
    PeerTimeout,
    ProtocolError,
    ReceiveFailed,
    SourceMutated,
    TransfuseError,
)
from transfuse._limits import MIB
from transfuse._options import Options
from transfuse._plan import parcels
from transfuse._plan.holdings import Holdings
from transfuse._plan.wanted_blocks import MOST_TIMES, WantedBlocks, regions_in
from transfuse._report import Report
from transfuse._session.context import ReceiveRequest
from transfuse._state.leaves.block import tensor_in
from transfuse._state.leaves.codec import MeshDescription
from transfuse._state.leaves.layout import MAX_RANKS, Layout
from transfuse._wire import messages
from transfuse._wire.messages import Agreed, Message
from transfuse.testing.ranks import Ranks


def shard(full: torch.Tensor, ranks: int, rank: int, placement: Placement | None = None) -> DTensor:
    """A rank's shard of rows, without a process group."""
    mesh = DeviceMesh("cpu", torch.arange(ranks), _init_backend=False, _rank=rank)
    local = full if isinstance(placement, Replicate) else full.chunk(ranks)[rank].clone()
    return DTensor.from_local(
        local, mesh, [placement or Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
    )


# ------------------------------------------------------------------------------------------------------------- blocks

FULL = torch.arange(32.0).view(8, 4)
FLOAT, INTS, NEGATIVE, PLAIN, VALUE = range(5)


@pytest.fixture(scope="module")
def sharded() -> Member:
    """Rank 1 of 4: rows 2 and 3."""
    negative = shard(FULL, 4, 1)
    negative._local_tensor = torch._neg_view(negative._local_tensor)
    state = {"f": shard(FULL, 4, 1), "i": shard(FULL.long(), 4, 1), "n": negative, "p": torch.randn(6), "v": 5}
    return hostile.member("shards", state, {})


def columns(*rows: tuple[int, int, list[int], list[int]], **changes: Any) -> dict[str, Any]:
    """Wanted blocks, from rows of leaf, tensor, start and sizes."""

    def pack(code: str, column: list[int]) -> bytes:
        return np.array(column, dtype=code).tobytes()

    return {
        "leaf": pack("<i4", [leaf for leaf, _, _, _ in rows]),
        "tensor": pack("<i4", [tensor for _, tensor, _, _ in rows]),
        "ndim": pack("<u1", [len(sizes) for _, _, _, sizes in rows]),
        "starts": pack("<i8", [n for _, _, start, _ in rows for n in start]),
        "sizes": pack("<i8", [n for _, _, _, sizes in rows for n in sizes]),
        "dtype": bytes(len(rows)),
        "dtypes": [],
        "begins": bytes(len(rows)),
    } | changes


def want_of(member: Member, plain: dict[str, Any], **changes: Any) -> bytes:
    """A want of these, with the fingerprint that they have if they can be had."""
    try:
        wanted_blocks = WantedBlocks(**plain)
        cut = parcels.cut(
            regions_in(Holdings(member.manifest), wanted_blocks), member.offered.offer.parcel_bytes, all_staged=True
        )
        fingerprint, count = parcels.fingerprint(cut, wanted_blocks.fingerprint()), len(cut)
    except (ValueError, TypeError):
        fingerprint, count = 0, 1
    fields: dict[str, Any] = {
        "fingerprint": fingerprint,
        "parcels": [0, count] if count else [],
        "wanted_blocks": list(plain.values()),
    }
    return want(member, digests=True, **fields | changes)[0]


def serve(member: Member, body: bytes) -> Report:
    """What becomes of a want at an honest source."""
    wire = Wire(random.Random(0), member, [body, (Message.VERDICT, msgspec.msgpack.encode([{}]))])
    report = Report("send", (PEER,))
    hostile.serve(wire, member.offered, report=report)
    return report


ROW = (FLOAT, 0, [2, 0], [1, 4])
HELD = "does not hold block"

PICK_LIES: dict[str, tuple[dict[str, Any], str]] = {
    "a leaf beyond the last": (columns((5, 0, [2, 0], [1, 4])), "leaf 5 does not exist; the state has 5 leaves"),
    "leaf -1": (columns((-1, 0, [2, 0], [1, 4])), "leaf -1 does not exist"),
    "the least of all leaves": (columns((-(1 << 31), 0, [2, 0], [1, 4])), "leaf -2147483648"),
    "a tensor beyond the last": (columns((FLOAT, 1, [2, 0], [1, 4])), f"tensor 1 of leaf {FLOAT} does not exist"),
    "tensor -1": (columns((FLOAT, -1, [2, 0], [1, 4])), f"tensor -1 of leaf {FLOAT} does not exist"),
    "a tensor of a value": (columns((VALUE, 0, [], [])), "the leaf has 0 tensors"),
    "too few dimensions": (columns((FLOAT, 0, [2], [1])), "1 dimensions of a tensor of 2"),
    "too many dimensions": (columns((FLOAT, 0, [2, 0, 0], [1, 1, 1])), "3 dimensions of a tensor of 2"),
    "255 dimensions": (columns((FLOAT, 0, [0] * 255, [1] * 255)), "255 dimensions of a tensor of 2"),
    "the shard before": (columns((FLOAT, 0, [1, 0], [1, 4])), HELD),
    "the shard after": (columns((FLOAT, 0, [4, 0], [1, 4])), HELD),
    "into the shard after": (columns((FLOAT, 0, [3, 0], [2, 4])), HELD),
    "all of the tensor": (columns((FLOAT, 0, [0, 0], [8, 4])), HELD),
    "beyond the tensor": (columns((FLOAT, 0, [2, 4], [1, 1])), HELD),
    "where the local tensor would be": (columns((FLOAT, 0, [0, 0], [2, 4])), HELD),
    "where 64 bits wrap": (columns((FLOAT, 0, [(1 << 63) - 1, 0], [(1 << 63) - 1, 4])), HELD),
    "huge": (columns((FLOAT, 0, [2, 0], [1 << 40, 1 << 40])), HELD),
    "no rows": (columns((FLOAT, 0, [2, 0], [0, 4])), "a size below 1 or a start below 0"),
    "less than no rows": (columns((FLOAT, 0, [2, 0], [-1, 4])), "a size below 1 or a start below 0"),
    "before the first row": (columns((FLOAT, 0, [-1, 0], [1, 4])), "a size below 1 or a start below 0"),
    "a leaf too many": (columns(ROW, leaf=bytes(8)), "have different lengths"),
    "no tensors": (columns(ROW, tensor=b""), "have different lengths"),
    "a beginning too many": (columns(ROW, begins=bytes(2)), "have different lengths"),
    "a type too many": (columns(ROW, dtype=bytes(2)), "have different lengths"),
    "a start too few": (columns(ROW, starts=bytes(8)), "for blocks of 2 dimensions in all"),
    "a size too many": (columns(ROW, sizes=bytes(24)), "for blocks of 2 dimensions in all"),
    "half a number": (columns(ROW, starts=bytes(15)), "wants blocks that were not offered"),
    "a type that was not named": (columns(ROW, dtype=b"\x01"), "a dtype that is not listed"),
    "type 255": (columns(ROW, dtype=b"\xff", dtypes=["float32"]), "a dtype that is not listed"),
    "a type that does not exist": (columns(ROW, dtype=b"\x01", dtypes=["float99"]), "float99"),
    "a function": (columns(ROW, dtype=b"\x01", dtypes=["load"]), "load"),
    "an unknown type that nobody needs": (columns(ROW, dtypes=["float99"]), "float99"),
    "integers as floats": (columns((INTS, 0, [2, 0], [1, 4]), dtype=b"\x01", dtypes=["float32"]), "cannot be sent as"),
    "floats as integers": (columns(ROW, dtype=b"\x01", dtypes=["int8"]), "cannot be sent as"),
    "floats as complex numbers": (columns(ROW, dtype=b"\x01", dtypes=["complex64"]), "cannot be sent as"),
    "the whole state and a row more": (
        columns(*[(leaf, 0, [2, 0], [2, 4]) for leaf in (FLOAT, INTS, NEGATIVE)] * (2 * MOST_TIMES)),
        f"more than {MOST_TIMES} times the whole state",
    ),
    "an element thousands of times": (
        columns(*[(FLOAT, 0, [2, 0], [1, 1])] * 5000, *[(INTS, 0, [2, 0], [2, 4])] * 3 * MOST_TIMES),
        f"more than {MOST_TIMES} times the whole state",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PICK_LIES)
def test_forged_blocks_are_refused(name: str, sharded: Member) -> None:
    plain, text = PICK_LIES[name]
    before = [bytes(window) for window in sharded.windows]
    with pytest.raises(ProtocolError, match=text) as caught:
        serve(sharded, want_of(sharded, plain))
    assert caught.value.rank == PEER
    assert sharded.windows == before


@pytest.mark.parametrize("change", ["fingerprint", "parcels", "parcel_bytes", "no blocks", "other blocks"])
def test_blocks_and_the_rest_of_a_want_fit(change: str, sharded: Member) -> None:
    plain = columns(ROW, (PLAIN, 0, [1], [5]))
    assert serve(sharded, want_of(sharded, plain)).bytes == 36
    changes: dict[str, dict[str, Any]] = {
        "fingerprint": {"fingerprint": 1},
        "parcels": {"parcels": [0, 2]},
        "parcel_bytes": {"parcel_bytes": 16},
        "no blocks": {"wanted_blocks": None},
        "other blocks": {"wanted_blocks": list(columns(ROW, (PLAIN, 0, [0], [5])).values())},
    }
    with pytest.raises(ProtocolError):
        serve(sharded, want_of(sharded, plain, **changes[change]))


@pytest.mark.parametrize(
    "name", [str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)]
)
def test_a_cast_to_any_type_ends_in_words_or_bytes(name: str, sharded: Member) -> None:
    """Not every pair of types has a conversion in torch."""
    try:
        report = serve(sharded, want_of(sharded, columns(ROW, dtype=b"\x01", dtypes=[name])))
    except TransfuseError as error:
        refuse_out_of_memory(error)
    else:
        assert report.bytes == 4 * getattr(torch, name).itemsize


def test_many_blocks_take_memory_in_proportion(sharded: Member) -> None:
    large = hostile.member("many", {"w": torch.zeros(100_000)})
    body = want_of(large, columns(*[(0, 0, [i % 1000], [1]) for i in range(20_000)]), fingerprint=1)
    for trace in (False, True):
        gc.collect()
        began = time.monotonic()
        if trace:
            tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match="derived other parcels"):
                serve(large, body)
        finally:
            seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert trace or seconds < 5, f"{seconds:.1f} s"
        assert peak < 64 * len(body) + 16 * MIB, f"{len(body)} bytes of message, {peak} bytes of memory"


def test_random_blocks_stay_in_bounds(sharded: Member) -> None:
    """Whatever is wanted: blocks of the shard, or an error of the library."""
    rng, outcomes = random.Random(3), {"boxes": 0, "refused": 0}
    sizes = sharded.manifest.storages.nbytes
    for _ in range(1500):
        rows = []
        for _ in range(rng.randrange(1, 5)):
            if rng.random() < 0.3:
                first = rng.randrange(6)
                rows.append((PLAIN, 0, [first], [rng.randrange(1, 8 - first)]))
            else:
                low = [rng.randrange(2, 4), rng.randrange(4)]
                rows.append((rng.randrange(3), 0, low, [rng.randrange(1, 5 - low[0]), rng.randrange(1, 5 - low[1])]))
        plain = columns(*rows)
        if rng.random() < 0.5:
            name = rng.choice([name for name, column in plain.items() if isinstance(column, bytes)])
            plain[name] = hostile.mutate_bytes(rng, plain[name], [plain[rng.choice(["starts", "sizes"])]])
        try:
            regions = regions_in(Holdings(sharded.manifest), WantedBlocks(**plain))
        except ValueError as error:
            refuse_out_of_memory(error)
            outcomes["refused"] += 1
            continue
        outcomes["boxes"] += 1
        for i in range(len(regions)):
            region = regions.region(i)
            assert region.start >= 0
            assert region.end <= sizes[regions.storage[i]]
    assert min(outcomes.values()) > 200, outcomes


# ----------------------------------------------------------------------------------------------------- meshes, places


def with_mesh(shape: list[int], ranks: int, placements: list[Any], size: int, coordinate: Any) -> list[Any]:
    """An offer of one DTensor of bytes on a mesh."""
    plain = with_leaf("dtensor", [[size], [1], placements, 0], [("uint8", [1], [1])])
    plain[hostile.MANIFEST][hostile.SHARED] = [["cpu", shape, list(range(ranks)), None]]
    plain[hostile.COORDINATES] = [coordinate]
    return plain


MESHES: dict[str, Callable[[], list[Any]]] = {
    "a split factor of 2**40": lambda: with_mesh([2], 2, [["X", 0, 1 << 40]], 1 << 40, [0]),
    "a split factor of 2**40, at the other coordinate": lambda: with_mesh([2], 2, [["X", 0, 1 << 40]], 1 << 40, [1]),
    "a split factor of 2**40 of little": lambda: with_mesh([2], 2, [["X", 0, 1 << 40]], 1 << 19, [1]),
    "a split factor of 2**62": lambda: with_mesh([1], 1, [["X", 0, 1 << 62]], 1 << 19, [0]),
    "two large split factors": lambda: with_mesh([2, 2], 4, [["X", 0, 60000]] * 2, 1 << 19, [0, 0]),
    "a large split factor for many": lambda: with_mesh([1000], 1000, [["X", 0, 60000]], 1 << 19, [0]),
    "a split factor of nothing": lambda: with_mesh([2], 2, [["X", 0, 0]], 64, [0]),
    "a negative split factor": lambda: with_mesh([2], 2, [["X", 0, -1]], 64, [0]),
    "2**20 ranks": lambda: with_mesh([1 << 20], 1 << 20, [["S", 0]], 1 << 19, [0]),
    "2**20 ranks in two dimensions": lambda: with_mesh(
        [1 << 10, 1 << 10], 1 << 20, [["S", 0], ["S", 0]], 1 << 19, [0, 0]
    ),
    "more ranks than any mesh": lambda: with_mesh([MAX_RANKS + 1], MAX_RANKS + 1, [["S", 0]], 64, [0]),
    "a shape of more ranks than there are": lambda: with_mesh([1 << 40], 2, [["S", 0]], 64, [0]),
    "a shape of fewer ranks": lambda: with_mesh([2], 3, [["S", 0]], 64, [0]),
    "a shape whose product wraps": lambda: with_mesh([1 << 32, 1 << 32], 0, [["S", 0], ["R"]], 64, [0, 0]),
    "no ranks": lambda: with_mesh([0], 0, [["S", 0]], 64, [0]),
    "a negative shape": lambda: with_mesh([-1, -2], 2, [["S", 0], ["R"]], 64, [0, 0]),
    "a coordinate beyond the mesh": lambda: with_mesh([2], 2, [["S", 0]], 64, [2]),
    "coordinate -1": lambda: with_mesh([2], 2, [["S", 0]], 64, [-1]),
    "a far coordinate": lambda: with_mesh([2], 2, [["S", 0]], 64, [(1 << 63) - 1]),
    "a coordinate of two dimensions": lambda: with_mesh([2], 2, [["S", 0]], 64, [0, 0]),
    "a coordinate of no dimensions": lambda: with_mesh([2], 2, [["S", 0]], 64, []),
    "a coordinate of 2**16 dimensions": lambda: with_mesh([2], 2, [["S", 0]], 64, [0] * (1 << 16)),
    "outside of the mesh": lambda: with_mesh([2], 2, [["S", 0]], 64, None),
    "more placements than the mesh has dimensions": lambda: with_mesh([2], 2, [["S", 0], ["S", 0]], 64, [0]),
    "a dimension that the tensor has not": lambda: with_mesh([2], 2, [["S", 1]], 64, [0]),
    "a local tensor that is not the shard": lambda: with_mesh([1], 1, [["S", 0]], 64, [0]),
    "more elements than any tensor": lambda: with_mesh([2], 2, [["S", 0]], (1 << 63) - 1, [0]),
}


def with_box(start: Any, shape: Any, size: int = 1, *more: Any) -> list[Any]:
    """An offer of one Block of bytes."""
    return with_leaf("block", [start, shape, *more], [("uint8", [size], [1])])


BOXES: dict[str, Callable[[], list[Any]]] = {
    "a box beyond the tensor": lambda: with_box([64], [64]),
    "a box that ends beyond the tensor": lambda: with_box([60], [64], 5),
    "a box that begins before the tensor": lambda: with_box([-1], [64]),
    "a far box": lambda: with_box([(1 << 63) - 1], [(1 << 63) - 1]),
    "a box of a huge tensor": lambda: with_box([0], [1 << 50]),
    "a box of a tensor with too many elements": lambda: with_box([0, 0], [1 << 40, 1 << 40]),
    "a box of a tensor of negative shape": lambda: with_box([0], [-64]),
    "a box of 2**16 dimensions": lambda: with_box([0] * (1 << 16), [1] * (1 << 16)),
    "a box of no dimensions": lambda: with_box([], []),
    "a box that starts at nothing": lambda: with_box(None, [64]),
    "a box that starts at a fraction": lambda: with_box([0.5], [64]),
    "a box with a third field": lambda: with_box([0], [64], 1, 0),
    "a box of two tensors": lambda: with_leaf("block", [[0], [64]], [("uint8", [1], [1])] * 2),
    "a box of none": lambda: with_leaf("block", [[0], [64]], []),
}


@pytest.mark.parametrize("name", [*MESHES, *BOXES])
@pytest.mark.parametrize("into", ["fresh", "a tensor", "a shard", "a box"])
def test_impossible_meshes_and_boxes_demand_little(name: str, into: str) -> None:
    body = hostile.resealed(msgspec.msgpack.encode((MESHES | BOXES)[name]()))
    targets: dict[str, list[Any] | None] = {"fresh": None, "a tensor": [torch.zeros(64, dtype=torch.uint8)]}
    targets["a shard"] = [shard(torch.zeros(64, dtype=torch.uint8), 2, 1)]
    targets["a box"] = [Block(torch.zeros(2, dtype=torch.uint8), start=(62,), shape=(64,))]
    target = targets[into]
    member = hostile.member("one", [torch.zeros(64, dtype=torch.uint8)])
    wire = Wire(random.Random(0), member, [body])
    began = time.monotonic()
    caught: TransfuseError | None = None
    with little_memory(), hostile.patched_accept(wire):
        try:
            hostile.gather([wire], ReceiveRequest(target=target))
        except TransfuseError as error:
            caught = error
    seconds = time.monotonic() - began
    if caught is not None:
        refuse_out_of_memory(caught)
        assert len(str(caught)) < 20_000
        if target is not None and not caught.torn:
            local = target[0].to_local() if isinstance(target[0], DTensor) else tensor_in(target[0])
            assert not local.any()
    assert seconds < 3 + len(body) / MIB * 3, f"{seconds:.1f} s for {len(body)} bytes"


def test_a_mesh_is_cut_in_time() -> None:
    """As many ranks as a mesh may have, asked for what each of them holds."""
    mesh = MeshDescription("cpu", (1 << 16,), tuple(range(1 << 16)), None)
    began = time.monotonic()
    for placement in (("S", 0), ("X", 0, 1 << 16), ("X", 0, 4)):
        with contextlib.suppress(ValueError):
            layout = Layout((1 << 30,), mesh, (placement,))
            layout.runs((1,))
            layout.cuts(0, 0, 1 << 30)
    assert time.monotonic() - began < 15


def test_other_places_hold_what_they_held_before() -> None:
    """Honest, so that the lies above are worth something: an interleaved shard, from both its ranks."""
    full = torch.arange(24, dtype=torch.uint8)
    mesh = [DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=rank) for rank in range(2)]
    pieces = [torch.cat([full[:12].chunk(2)[rank], full[12:].chunk(2)[rank]]) for rank in range(2)]
    states = [
        {"w": DTensor.from_local(pieces[rank], mesh[rank], [_StridedShard(0, split_factor=2)], run_check=False)}
        for rank in range(2)
    ]
    members = [hostile.member(f"rank {rank}", state, {}) for rank, state in enumerate(states)]
    wires = [Wire(random.Random(0), member, [member.body], peer=PEER + i) for i, member in enumerate(members)]
    for wire in wires:
        wire._filling = "honest"
    target = torch.zeros(24, dtype=torch.uint8)
    with hostile.patched_accept(*wires):
        hostile.gather(wires, ReceiveRequest(target={"w": target}, options=Options(same_host=False)))
    assert torch.equal(target, full)


# ------------------------------------------------------------------------------------------------ whole conversations

ROWS = torch.arange(200_000.0).view(200, 1000)


def put_together(
    liar: dict[str, Any], *, holders: tuple[int, ...] = (0, 1), delta: bool = False
) -> tuple[BaseException | None, torch.Tensor, float]:
    """A receive of all rows from sources that hold the halves of these numbers, of which the first lies."""
    target, ended, took = torch.full_like(ROWS, -1.0), threading.Event(), [0.0]
    if delta:
        target.copy_(ROWS)

    def one(rank: int, pg: Any) -> None:
        if rank == 0:
            began = time.monotonic()
            try:
                transport = new_transport(pg, {"w": target})
                transport._options = dataclasses.replace(transport._options, delta=delta)
                transport.recv_checkpoint(tuple(range(1, len(holders) + 1)))
            finally:
                took[0] = time.monotonic() - began
                ended.set()
            return
        state = {"w": shard(ROWS, 2, holders[rank - 1])}
        with contextlib.suppress(TransfuseError):
            if rank > 1:
                new_transport(pg, seconds=2 * HONEST_SECONDS).send_checkpoint([0], state)
                return
            with Liar(pg, 0, ended=ended, **liar) as line:
                serve_by(line, new_transport(pg, seconds=HONEST_SECONDS), state)

    with Ranks(1 + len(holders)) as ranks:
        error = ranks.outcomes(one)[0].error
    return error, target, took[0]


def wrong(digest: int) -> int:
    return digest ^ 1


#: What a source does that alone holds half of the rows, and the error that names it.
ALONE: dict[str, tuple[dict[str, Any], type[PeerError], str]] = {
    "wrong bytes for ever": ({"said": wrong}, CorruptData, "still wrong after 3 repairs"),
    "refuses": ({"message": refusing("Spite")}, PeerRefused, "Spite: why not"),
    "has changed": ({"message": refusing("SourceMutated"), "honest": 2}, SourceMutated, "why not"),
    "cancels": ({"record": lambda data: b"HTTP" + data[4:]}, ProtocolError, "not a transfuse message"),
    "garbage": ({"message": instead(Message.AGREED, b"\xc1" * 9)}, ProtocolError, "malformed agreed"),
    "a chain": (
        {"message": instead(Message.AGREED, messages.encode(Agreed(messages.Link(2, 0x6000_0000, 1))))},
        ProtocolError,
        "a chain that was not wanted",
    ),
    "never agrees": ({"deaf": Message.WANT}, PeerTimeout, "timed out"),
    "a brief offer, and then nothing": (
        {
            "message": altered(Message.OFFER, messages.Offer, manifest=None, likeness=bytes(16)),
            "deaf": Message.DESCRIBE,
        },
        PeerTimeout,
        "timed out",
    ),
    "a brief offer of a likeness of its own": (
        {"message": altered(Message.OFFER, messages.Offer, manifest=None, likeness=bytes(16))},
        ProtocolError,
        "describes another state",
    ),
}  # fmt: skip


def named(error: BaseException | None, rank: int) -> PeerError:
    """What an error says about this source."""
    if isinstance(error, ReceiveFailed):
        error = error.causes[rank]
    assert isinstance(error, PeerError), repr(error)
    assert error.rank == rank
    return error


def untouched(error: BaseException | None, target: torch.Tensor) -> None:
    """What was written is listed as torn."""
    assert isinstance(error, TransfuseError), repr(error)
    assert error.torn == ("['w']",) or bool((target == -1).all())


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", ALONE)
def test_a_source_that_alone_holds_something_is_named(name: str, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_wire(monkeypatch, wire)
    how, kind, text = ALONE[name]
    error, target, took = put_together(how)
    untouched(error, target)
    assert took < 2 * HONEST_SECONDS + 1
    if isinstance(error, NotCovered):  # It was lost before it had been decided who brings what.
        assert "nobody holds [0:100, 0:1000]" in str(error)
        return
    cause = named(error, 1)
    assert isinstance(cause, kind), repr(cause)
    assert text in str(cause)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", ALONE)
def test_a_source_of_what_others_hold_too_is_done_without(
    name: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_wire(monkeypatch, wire)
    error, target, took = put_together(ALONE[name][0], holders=(0, 1, 0))
    assert error is None, repr(error)
    assert torch.equal(target, ROWS)
    assert took < 2 * HONEST_SECONDS + 1


PLACES: dict[str, list[Any]] = {
    "the coordinate of the other": [[1]],
    "beyond the mesh": [[2]],
    "far beyond the mesh": [[(1 << 63) - 1]],
    "before the mesh": [[-1]],
    "two dimensions": [[0, 0]],
    "no dimensions": [[]],
    "outside": [None],
    "no coordinate": [],
    "a mesh too many": [[0], [0]],
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("brief", [False, True])
def test_a_source_in_another_place_than_it_says(name: str, brief: bool) -> None:
    """Nothing but an error comes of it, and nothing is written that is not told."""
    lie: Any = altered(Message.OFFER, messages.Offer, coordinates=PLACES[name])
    if brief:
        short = altered(Message.OFFER, messages.Offer, coordinates=PLACES[name], manifest=None)
        lie = in_turn(short, lie)
    error, target, took = put_together({"message": lie})
    if error is None:  # Nobody looked at what it says about a mesh that there is not.
        assert name == "a mesh too many"
        assert torch.equal(target, ROWS)
        return
    untouched(error, target)
    assert took < 2 * HONEST_SECONDS + 1
    if isinstance(error, NotCovered):
        assert "nobody holds [0:100, 0:1000]" in str(error)
    elif isinstance(error, (ReceiveFailed, PeerError)):
        named(error, 1)
    else:
        raise AssertionError(repr(error))


@pytest.mark.parametrize("name", PLACES)
def test_a_wrong_place_costs_nothing_that_others_hold(name: str) -> None:
    lie = altered(Message.OFFER, messages.Offer, coordinates=PLACES[name])
    error, target, took = put_together({"message": lie}, holders=(0, 1, 0))
    assert error is None, repr(error)
    assert torch.equal(target, ROWS)
    assert took < 2 * HONEST_SECONDS + 1


@pytest.mark.parametrize("digests", [None, "zero", "short", "long", "garbage"])
def test_forged_digests_in_a_delta(digests: str | None) -> None:
    """What the source says it has differently is fetched; it may not say it about other parcels than it was asked."""

    def forge(kind: Message, body: bytes) -> tuple[Message, bytes]:
        if kind is not Message.DIGESTS:
            return kind, body
        said = messages.decode(body, messages.Digests).digests
        forged = {"zero": bytes(len(said)), "short": said[:-1], "long": said + bytes(16), "garbage": b""}
        return kind, messages.encode(messages.Digests(forged[str(digests)]))

    error, target, _ = put_together({} if digests is None else {"message": forge}, delta=True)
    assert torch.equal(target, ROWS)  # It was there already.
    if digests in (None, "zero"):
        assert error is None, repr(error)
        return
    assert "compared parcels that it was not asked" in str(named(error, 1))


def test_one_that_speaks_for_others_is_not_believed() -> None:
    """It claims to be like the honest sources, and describes their leaves under each other's names."""
    a, b = torch.arange(1000.0), -torch.arange(1000.0)
    honest = hostile.member("honest", {"a": a, "b": b})
    liar = hostile.put(honest.plain, (hostile.MANIFEST, hostile.TREE, 2), ["b", "a"])
    for order in ([1, 0, 0], [0, 1, 0], [0, 0, 1]):
        wires = []
        for i, lies in enumerate(order):
            body = msgspec.msgpack.encode(liar) if lies else honest.body
            wires.append(Wire(random.Random(0), honest, [body], peer=PEER + i))
            wires[-1]._filling = "honest"
        target = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
        with hostile.patched_accept(*wires), torch.no_grad():
            hostile.gather(wires, ReceiveRequest(target=target, options=Options(same_host=False)))
        assert torch.equal(target["a"], a)
        assert torch.equal(target["b"], b)


def test_one_that_is_like_no_other_is_outvoted() -> None:
    honest = hostile.member("honest", {"a": torch.arange(1000.0)})
    plain = hostile.put(one_tensor(4000, [1000], [1]), (), honest.plain)
    plain = hostile.put(plain, (hostile.MANIFEST, hostile.TREE, 2), ["z"])
    body = hostile.resealed(msgspec.msgpack.encode(plain))
    wires = [Wire(random.Random(0), honest, [b], peer=PEER + i) for i, b in enumerate([body, honest.body, honest.body])]
    for wire in wires:
        wire._filling = "honest"
    target = {"a": torch.zeros(1000)}
    with hostile.patched_accept(*wires), torch.no_grad():
        hostile.gather(wires, ReceiveRequest(target=target, options=Options(same_host=False)))
    assert torch.equal(target["a"], torch.arange(1000.0))
    assert LIMITS.max_receive_bytes == hostile.CAP
