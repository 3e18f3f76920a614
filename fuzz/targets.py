"""What is fuzzed: functions of bytes that raise nothing but what is documented.

Anything else (another exception, memory beyond the cap, a crash, a result that breaks its own promise) is a finding.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import torch

from fuzz.seeds import DESCRIBED, OFFERS, PARCEL, STATES
from transfuse._errors import ProtocolError, TransfuseError
from transfuse._limits import MIB, Limits
from transfuse._options import Options
from transfuse._plan import parcels
from transfuse._plan.holdings import Holdings
from transfuse._plan.match import prepare
from transfuse._plan.wanted_blocks import WantedBlocks, regions_in
from transfuse._progress import Progress
from transfuse._report import Report
from transfuse._session import offers, planning, source, source_choice
from transfuse._session.context import Context, ReceiveRequest
from transfuse._session.remembered import Remembered
from transfuse._session.threads import Caller
from transfuse._state import trees
from transfuse._state.leaves import values
from transfuse._state.leaves.distributed import checked_coordinate, layout_of, read_meshes
from transfuse._state.manifest import Manifest
from transfuse._wire import messages
from transfuse._wire.device_route import DeviceEntry
from transfuse._wire.memory_route import MemoryEntry, Reader
from transfuse._wire.route import MalformedEntry, Unreadable

__all__ = ["TARGETS", "mutate"]

CPU = torch.device("cpu")
PEER = 3
#: Most bytes that an offer may make a receiver allocate for fresh tensors.
LIMITS = Limits(max_receive_bytes=MIB, max_working_records=10)
CONTEXT = Context(
    ranks=(PEER,),
    limits=LIMITS,
    device=CPU,
    timeout=10.0,
    caller=Caller(),
    report=Report("receive", (PEER,)),
    progress={PEER: Progress()},
)
CLASSES = (
    messages.Offer,
    messages.Want,
    messages.Refusal,
    messages.Verdict,
    messages.Agreed,
    messages.More,
    messages.Digests,
)
#: Shape, mesh, placements, a coordinate in the mesh, a dimension, and two indices along it.
Sharding = tuple[list[int], list[int], list[list[str | int]], list[int] | None, int, int, int]
#: Other processes are none of a fuzzer's business.
ABSENT_PID = int(pathlib.Path("/proc/sys/kernel/pid_max").read_text()) - 1


class Finding(AssertionError):
    """A promise that was not kept."""


def _promised(holds: object, what: str) -> None:
    if not holds:
        raise Finding(what)


def _within_memory(error: BaseException | None) -> None:
    """An allocation that failed was one that the message did not justify."""
    while error is not None:
        _promised(
            not isinstance(error, MemoryError) and "allocate" not in str(error).lower(), f"out of memory: {error!r}"
        )
        error = error.__cause__ or error.__context__


def header(data: bytes) -> None:
    head = data[: messages.HEADER_BYTES].ljust(messages.HEADER_BYTES, b"\0")
    try:
        opened = messages.open_header(head)
        messages.verify(opened, data[messages.HEADER_BYTES :])
    except ValueError:
        return
    _promised(messages.seal(opened.kind, opened.transfer, opened.note, data[messages.HEADER_BYTES :])[:24] == head[:24],
              "a header that is not what seal makes")  # fmt: skip


def record(data: bytes) -> None:
    """Of a length that follows from a plan, as all records are."""
    count = data[0] % 32 if data else 0
    size = messages.record_bytes(count)
    found = messages.digests_in(data[1 : 1 + size].ljust(size, b"\0"))
    _promised(found is None or len(found) == count, f"{found} in a record of {count}")


def body(data: bytes) -> None:
    cls = CLASSES[(data[0] if data else 0) % len(CLASSES)]
    try:
        decoded: Any = messages.decode(data[1:], cls)  # type: ignore[type-var]
    except ValueError:
        return
    finally:
        timeout = messages.timeout_in(data[1:])
        _promised(timeout is None or 0 < timeout < float("inf"), f"a timeout of {timeout}")
    again: Any = messages.decode(messages.encode(decoded), cls)  # type: ignore[type-var]
    _promised(repr(again) == repr(decoded), f"{decoded} is {again} when it is said again")


def numbers(data: bytes) -> None:
    try:
        count, pairs = msgspec.msgpack.decode(data, type=tuple[int, list[int]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    count = min(max(count, 0), 10_000)
    try:
        found = messages.numbers_in(pairs, count)
    except ValueError:
        return
    _promised(len(found) <= count, "more numbers than there are")
    _promised(list(found) == sorted(set(found)) and all(0 <= n < count for n in found), f"{pairs} of {count}")
    _promised(list(messages.numbers_in(messages.pairs_of(found), count)) == list(found), f"{pairs} come back otherwise")


def tree(data: bytes) -> None:
    try:
        plain = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    try:
        root, leaves = trees.decode(plain, max_depth=LIMITS.max_depth)
    except ValueError as error:
        _within_memory(error)
        return
    if leaves < 10_000:
        _promised(len(trees.paths(root)) == leaves, "as many paths as leaves")
        trees.decode(trees.encode(root), max_depth=LIMITS.max_depth)


def value(data: bytes) -> None:
    try:
        plain = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    try:
        decoded = values.decode(plain)
    except ValueError as error:
        _within_memory(error)
        return
    again = values.decode(values.encode(decoded))
    _promised(type(again) is type(decoded), f"{type(decoded)} comes back as {type(again)}")


def resealed(read: messages.Offer) -> messages.Offer:
    """With the digests of what it says: a forger knows them too."""
    try:
        wire = read.described
        likeness = Manifest.decode(wire, LIMITS, read.coordinates).likeness(wire)
    except Exception:
        return read
    return msgspec.structs.replace(read, digest=wire.digest(), likeness=likeness, structure=wire.structure())


def offer(data: bytes) -> None:
    """From an offer's bytes to a plan; the first byte says into what it is received."""
    first = data[0] if data else 0
    mode = first % 4
    target = None if mode == 0 else list(STATES.values())[first // 4 % len(STATES)]
    prepared = None if target is None else prepare(target, LIMITS)
    request = ReceiveRequest(
        target=prepared, options=Options(strict=mode == 2, atomic=mode == 3, weights_only_objects=first >= 128)
    )
    try:
        read = offers.read_offer(data[1:], LIMITS, PEER)
        if read.manifest is None:
            return
        read = resealed(read)
        described = offers.read_description(read, LIMITS, PEER)
        choice = source_choice.choose([PEER], {PEER: read}, {read.likeness: described}, request)
        if not choice.cohorts:
            raise choice.dropped[PEER]
        size = min(read.parcel_bytes, PARCEL)
        accepted = planning.accept(choice.cohorts, choice.offers, read, request, CONTEXT, size, threading.Condition())
    except TransfuseError as error:
        _within_memory(error)
        str(error)
        return
    regions, cut = accepted.landing.cut.regions, accepted.landing.cut
    _promised((cut.nbytes > 0).all() and (cut.nbytes <= PARCEL).all(), "a parcel of an impossible size")
    share = accepted.landing.shares.of(PEER)
    _promised(share.held.all(), "parcels that nobody brings")
    if share.order is not None:
        _promised(len(share.order) == len(cut), "parcels that nobody brings")
        return
    _promised((regions.start >= 0).all(), "a box before its storage")
    ends = np.array([regions.region(i).end for i in range(min(len(regions), 500))], dtype=np.float64)
    sizes = accepted.landing.manifest.storages.nbytes[regions.storage][: len(ends)]
    _promised((ends <= sizes).all(), "a box beyond its storage")
    _promised(
        target is None or all(0 <= n < len(accepted.landing.manifest.tensors) for n in share.tensors), "wanted tensors"
    )
    if target is None and cut.total_bytes <= MIB:
        try:
            # Of whatever bytes the memory holds.
            accepted.landing.finish(accepted.build_context, accepted.registry)
        except Exception as error:
            _within_memory(error)


def want(data: bytes) -> None:
    """A want, as a source takes it; the first byte says which state it serves."""
    name = list(DESCRIBED)[(data[0] if data else 0) % len(DESCRIBED)]
    serving = SimpleNamespace(
        _channel=SimpleNamespace(peer=PEER, limits=LIMITS, holding_turn=contextlib.nullcontext),
        _offered=SimpleNamespace(
            described=DESCRIBED[name],
            offer=OFFERS[name],
            holdings=Holdings(DESCRIBED[name].manifest),
            remembered=Remembered(),
        ),
        _report=Report("send", (PEER,)),
    )
    serving._cut_from = partial(source.SourceEnd._cut_from, cast(Any, serving))
    try:
        asked = messages.decode(data[1:], messages.Want)
    except ValueError:
        return
    try:
        cut, found = source.SourceEnd._plan(cast(Any, serving), asked)
    except ProtocolError as error:
        _within_memory(error)
        return
    _promised(len(found) <= len(cut), "more parcels than there are")


def wanted_blocks(data: bytes) -> None:
    """Blocks that a receiver wants; the first byte says of which state."""
    described = list(DESCRIBED.values())[(data[0] if data else 0) % len(DESCRIBED)]
    try:
        wanted = msgspec.msgpack.decode(data[1:], type=WantedBlocks)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    wanted.fingerprint()
    try:
        regions = regions_in(Holdings(described.manifest), wanted)
    except ValueError as error:
        _within_memory(error)
        return
    sizes = described.manifest.storages.nbytes
    _promised((regions.start >= 0).all() and (regions.nbytes > 0).all(), "a box that is none")
    for i in range(min(len(regions), 500)):
        _promised(regions.region(i).end <= sizes[regions.storage[i]], "a box beyond its storage")
    cut = parcels.cut(regions, PARCEL, all_staged=True)
    _promised((cut.nbytes > 0).all() and (cut.nbytes <= PARCEL).all(), "a parcel of an impossible size")


def sharding(data: bytes) -> None:
    """Who holds what, of a layout and a coordinate in its mesh."""
    try:
        shape, mesh, placements, coordinate, dim, low, high = msgspec.msgpack.decode(data, type=Sharding)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    ranks = math.prod(mesh)
    if not 0 < ranks <= 64:  # As many as a message has.
        return
    began = time.monotonic()
    try:
        meshes = read_meshes([["cpu", mesh, list(range(ranks)), None]])
        layout = layout_of([shape, shape, placements, 0], meshes)
        here = checked_coordinate(layout, coordinate)
        runs = None if here is None else layout.runs(here)
        cuts = layout.cuts(dim, low, high) if 0 <= dim < len(shape) else []
    except ValueError as error:
        _within_memory(error)
        return
    finally:
        _promised(time.monotonic() - began < 5, "arithmetic that takes its time")
    _promised(all(low < cut < high for cut in cuts), f"cuts {cuts[:9]} between {low} and {high}")
    for some, size in zip(runs or (), shape, strict=False):
        _promised(all(a >= 0 and n > 0 and a + n <= size for a, n in some), f"runs {some[:9]} of {size}")


def memory(data: bytes) -> None:
    """A description of memory, as a receiver opens it."""
    try:
        count, described = data[0] if data else 0, MemoryEntry.decode(data[1:])
    except MalformedEntry:
        return
    if 0 < described.pid < 1 << 31 and described.pid != os.getpid():
        described = msgspec.structs.replace(described, pid=ABSENT_PID if described.pid % 2 else os.getpid())
    try:
        with Reader(described, count) as reader:
            reader.recheck()
    except (MalformedEntry, Unreadable):
        return


def device(data: bytes) -> None:
    """A description of memory on accelerators."""
    try:
        count, entry = data[0] if data else 0, DeviceEntry.decode(data[1:])
        handle, offset = entry.places(count)
    except MalformedEntry:
        return
    _promised(len(handle) == len(offset) == count, "a place for each storage")
    _promised(all(-1 <= one < len(entry.handles) for one in handle.tolist()), f"handles {handle}")
    _promised(all(0 <= one < 1 << 62 for one in offset.tolist()), f"offsets {offset}")


def canary(data: bytes) -> None:
    """Is found at once, or nothing ever is."""
    _promised(b"!" not in data, "the canary")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "canary": canary,
    "header": header,
    "record": record,
    "body": body,
    "numbers": numbers,
    "tree": tree,
    "value": value,
    "offer": offer,
    "want": want,
    "blocks": wanted_blocks,
    "sharding": sharding,
    "memory": memory,
    "device": device,
}


# ---------------------------------------------------------------------------------------------- mutations that fit

#: Numbers that are at some edge.
INTS = [*range(-2, 20), 63, 64, 65, 127, 128, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 56,
        (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63)]  # fmt: skip


def mutate(target: str, data: bytes, plainly: Callable[[bytes], bytes], seed: int) -> bytes:
    """Change one node of what the bytes say, where they say something; otherwise their bits."""
    rng = random.Random(seed)
    at = 1 if target in ("body", "offer", "want", "blocks") else 0
    if target in ("header", "record") or rng.random() < 0.3:
        return plainly(data)
    try:
        plain = msgspec.msgpack.decode(data[at:])
        paths = list(_paths(plain))
        changed = msgspec.msgpack.encode(_put(plain, rng.choice(paths), lambda node: _other(rng, node, plain, paths)))
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, LookupError, TypeError):
        return plainly(data)
    return data[:at] + changed


def _paths(node: Any, path: tuple[int, ...] = ()) -> Any:
    yield path
    if isinstance(node, list) and len(path) < 100:
        for i, child in enumerate(node):
            yield from _paths(child, (*path, i))


def _put(node: Any, path: tuple[int, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(node)
    copy = list(node)
    copy[path[0]] = _put(node[path[0]], path[1:], change)
    return copy


def _other(rng: random.Random, node: Any, plain: Any, paths: list[tuple[int, ...]]) -> Any:
    """Something in the place of a node: of the same kind, or another node, or anything."""
    if isinstance(node, bytes) and node and rng.random() < 0.7:
        return _other_column(rng, node)
    if isinstance(node, list) and rng.random() < 0.5:
        i = rng.randrange(len(node) + 1)
        return rng.choice([node[:i] + node[i + 1 :], node[:i] + node[i : i + 1] + node[i:], node[:i]])
    if type(node) is int and rng.random() < 0.7:
        return rng.choice([node + 1, node - 1, rng.choice(INTS)])
    found = plain
    for i in rng.choice(paths):
        found = found[i]
    return rng.choice(
        [found, rng.choice(INTS), None, True, 0.5, float("nan"), b"", rng.randbytes(8), "", "cpu", [], {}]
    )


def _other_column(rng: random.Random, column: bytes) -> bytes:
    """Another number in a column of one, four or eight bytes each, or one more or less."""
    width = rng.choice([w for w in (1, 4, 8) if len(column) % w == 0])
    at = rng.randrange(len(column) // width) * width
    number = (rng.choice(INTS) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    before, after = column[:at], column[at + width :]
    choices: list[bytes] = [before + number + after, before + after, column + number]
    return rng.choice(choices)
