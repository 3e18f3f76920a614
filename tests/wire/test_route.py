"""A route that the library does not know is registered from outside, and moves a real state between real processes.

Its source publishes its tensors in a file, and its receivers read that file.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

import transfuse
from transfuse._memory import packing
from transfuse._memory.vm import Ranges
from transfuse._sizes import Sizes
from transfuse._state.manifest import Described
from transfuse._wire import route_table
from transfuse._wire.memory_route_read import RangeReader, Reading
from transfuse._wire.route import MalformedEntry, Pull, Puller, Route, Unreadable
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import ProcessPool

TIMEOUT = timedelta(seconds=20)
TOKEN_BYTES = 16
_files = itertools.count()


def state(seed: int) -> dict[str, Any]:
    random = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    return {
        "large": random(1 << 20),
        "small": [random(n) for n in range(1, 40)],
        "columns": random(300, 400)[:, 5:90],
        "turned": random(64, 48, 32).permute(2, 0, 1),
        "bytes": torch.arange(11, dtype=torch.uint8)[3:10],
        "step": 4,
    }


# ----------------------------------------------------------------------------------------------------- the toy route


class FileEntry(msgspec.Struct, array_like=True):
    path: str
    token: bytes
    #: Where in the file each storage begins.
    storages: list[int]


class FileLease:
    """Publishes everything in a file; the file begins with a token, which is wiped when the lease ends."""

    def __init__(self, folder: pathlib.Path, *, lies: bool) -> None:
        self._path = folder / f"{os.getpid()}-{next(_files)}"
        self._lies = lies

    def __enter__(self) -> FileLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._path.unlink(missing_ok=True)

    def export(self, described: Described) -> bytes:
        token, places = secrets.token_bytes(TOKEN_BYTES), []
        with self._path.open("wb") as file:
            file.write(bytes(TOKEN_BYTES) if self._lies else token)
            sizes = described.manifest.storages.nbytes.tolist()
            for storage, window, nbytes in zip(described.storages, described.windows.tolist(), sizes, strict=True):
                places.append(file.tell())
                data = bytes(torch.tensor([], dtype=torch.uint8).set_(storage)[window : window + nbytes].numpy())
                file.write(bytes(nbytes) if self._lies else data)
        return msgspec.msgpack.encode(FileEntry(str(self._path), token, places))

    def end(self) -> None:
        if self._path.exists():
            with self._path.open("r+b") as file:
                file.write(bytes(TOKEN_BYTES))


class FileReader(RangeReader):
    """Reads ranges of the file. After ``most_bytes`` it is broken."""

    def __init__(self, entry: FileEntry, most_bytes: float) -> None:
        self.storages = np.array(entry.storages, dtype=np.uint64)
        self._token = entry.token
        self._left = most_bytes
        try:
            self._file = open(entry.path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise Unreadable(f"there is no such file here: {error}") from error

    def recheck(self) -> None:
        if os.pread(self._file.fileno(), TOKEN_BYTES, 0) != self._token:
            raise Unreadable("the file does not hold the token")

    def close(self) -> None:
        self._file.close()

    def read(
        self,
        theirs: Ranges,
        mine: Ranges,
        *,
        begins: Callable[[int], object] = lambda upto: None,
        went_on: Callable[[int], object] = lambda nbytes: None,
    ) -> npt.NDArray[np.int64]:
        begins(int(mine[:, 1].sum()))
        for (place, nbytes), (address, _) in zip(theirs.tolist(), mine.tolist(), strict=True):
            self._left -= nbytes
            if self._left < 0:
                raise Unreadable("the file was taken away")
            ctypes.memmove(address, os.pread(self._file.fileno(), nbytes, place), nbytes)
            went_on(nbytes)
        return np.empty(0, dtype=np.int64)


@dataclasses.dataclass
class FileRoute:
    folder: pathlib.Path
    name: str = "file"
    same_host: bool = True
    opt_in: bool = False
    compared: bool = False
    #: What is wrong with it.
    lies: bool = False
    looks_first: bool = True
    most_bytes: float = float("inf")

    def lease(self, seconds: float) -> FileLease:
        return FileLease(self.folder, lies=self.lies)

    def open(self, entry: bytes, pull: Pull) -> Puller:
        try:
            found = msgspec.msgpack.decode(entry, type=FileEntry)
        except msgspec.MsgspecError as error:
            raise MalformedEntry(f"a malformed entry: {error}") from error
        if len(found.storages) != len(pull.manifest.storages) or len(found.token) != TOKEN_BYTES:
            raise MalformedEntry("a malformed entry")
        reader = FileReader(found, self.most_bytes)
        if self.looks_first:
            reader.recheck()
        return Reading(reader, pull)


class Runs:
    """A puller that is written from scratch, and brings only parcels of one box that is one run of memory."""

    def __init__(self, reader: FileReader, pull: Pull) -> None:
        self._reader, self._pull = reader, pull

    def readable(self) -> Sequence[int]:
        return [number for number, staged in enumerate(self._pull.cut.staged.tolist()) if not staged]

    def pull(self, numbers: Sequence[int]) -> Sequence[int]:
        pull, landing = self._pull, self._pull.landing
        for number in numbers:
            landing.touch([int(pull.cut.first[number])])
            packing.unpack(landing, pull.cut, number, self._fetch(number))
            pull.went_on(int(pull.cut.nbytes[number]))
        return ()

    def differing(self, numbers: Sequence[int]) -> Sequence[int]:
        cut, landing, differ = self._pull.cut, self._pull.landing, []
        for number in numbers:
            buffer = torch.empty(int(cut.nbytes[number]), dtype=torch.uint8)
            if not torch.equal(packing.pack(landing, cut, number, buffer), self._fetch(number)):
                differ.append(number)
        return differ

    def _fetch(self, number: int) -> torch.Tensor:
        cut = self._pull.cut
        (extent,) = cut.extents(number)
        place = (
            int(self._reader.storages[cut.regions.storage[extent.region]] + cut.regions.start[extent.region])
            + extent.low
        )
        buffer = torch.empty(extent.high - extent.low, dtype=torch.uint8)
        size = np.array([buffer.nbytes], dtype=np.uint64)
        theirs, mine = np.array([place], dtype=np.uint64), np.array([buffer.data_ptr()], dtype=np.uint64)
        self._reader.read(np.stack([theirs, size], axis=1), np.stack([mine, size], axis=1))
        return buffer

    def recheck(self) -> None:
        self._reader.recheck()

    def close(self) -> None:
        self._reader.close()


class RunsRoute(FileRoute):
    def open(self, entry: bytes, pull: Pull) -> Puller:
        return Runs(FileReader(msgspec.msgpack.decode(entry, type=FileEntry), self.most_bytes), pull)


class ElsewhereRoute(FileRoute):
    def open(self, entry: bytes, pull: Pull) -> Puller:
        raise Unreadable("this host has no such file")


# ------------------------------------------------------------------------------------------------------ in the ranks


@contextmanager
def registered(*table: Route) -> Iterator[None]:
    """In this process, these are all the routes that there are."""
    before = list(route_table.ROUTES)
    route_table.ROUTES[:] = table
    try:
        yield
    finally:
        route_table.ROUTES[:] = before


def move(rank: int, table: Sequence[Sequence[Route]], options: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Rank 0 sends a state to rank 1, once fresh and once in place; each knows its own table of routes."""
    environment = {"TRANSFUSE_PARCEL_BYTES": str(1 << 18), **settings.get("environment", {})}
    make = partial(transfuse.PGTransport, cast(Any, dist.group.WORLD), TIMEOUT, "cpu", **options)
    with registered(*table[rank]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sizes, "READ_BYTES", 1 << 20)
        for name, value in environment.items():
            patch.setenv(name, value)
        if rank == 0:
            sender = make()
            sender.send_checkpoint([1], state(1))
            sender.send_checkpoint([1], state(2))
            return said(sender)
        fresh = make()
        assert_exact(state(1), fresh.recv_checkpoint(0))
        own = state(3)
        in_place = make(state_dict=lambda: own)
        arrived = in_place.recv_checkpoint(0)
        assert_exact(state(2), arrived, in_place=True)
        assert arrived["large"] is own["large"]
        assert said(fresh) == said(in_place)
        return said(in_place)


def said(transport: transfuse.PGTransport) -> tuple[str, int, int]:
    assert transport.report is not None
    return transport.report.route, transport.report.bytes, transport.report.read_bytes


@pytest.fixture
def run(pool4: ProcessPool) -> Callable[..., tuple[str, int, int]]:
    def run(
        source: Sequence[Route], receiver: Sequence[Route], *, settings: Any = None, **options: Any
    ) -> tuple[str, int, int]:
        """What the report of both ends says."""
        outcomes = pool4.run(move, [source, receiver], options, settings or {}, ranks=[0, 1])
        sent, received = (outcome.get() for outcome in outcomes)
        assert sent == received
        return cast(tuple[str, int, int], received)

    return run


# --------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("verify", [None, True])
def test_a_state_moves_over_a_route_from_outside(run: Any, tmp_path: pathlib.Path, verify: bool | None) -> None:
    toy = FileRoute(tmp_path)
    route, nbytes, read_bytes = run([toy], [toy], verify=verify)
    assert route == "file"
    assert read_bytes == nbytes > 4 << 20
    assert not list(tmp_path.iterdir()), "a lease was not given back"


def test_what_an_offer_leaves_out_is_asked_for(run: Any, tmp_path: pathlib.Path) -> None:
    """A long description is sent to receivers that ask for it, and with it what the routes have to know."""
    toy = FileRoute(tmp_path)
    assert run([toy], [toy], settings={"environment": {"TRANSFUSE_BRIEF_BYTES": "1024"}})[0] == "file"


def test_a_route_that_cannot_be_opened_leaves_it_to_the_group(run: Any, tmp_path: pathlib.Path) -> None:
    route, nbytes, read_bytes = run([FileRoute(tmp_path)], [ElsewhereRoute(tmp_path)])
    assert (route, read_bytes) == ("group", 0)
    assert nbytes > 4 << 20


def test_a_route_that_one_end_does_not_know_or_allow_is_not_used(run: Any, tmp_path: pathlib.Path) -> None:
    toy = FileRoute(tmp_path)
    assert run([toy], [])[0] == "group"
    assert run([], [toy])[0] == "group"
    assert run([toy], [FileRoute(tmp_path, name="another")])[0] == "group"
    assert run([toy], [toy], same_host=False)[0] == "group"
    beyond = FileRoute(tmp_path, same_host=False)
    assert run([beyond], [beyond], same_host=False)[0] == "file"


@pytest.mark.parametrize("verify", [None, True])
def test_what_a_route_fails_to_bring_comes_over_the_group(
    run: Any, tmp_path: pathlib.Path, verify: bool | None
) -> None:
    breaks = FileRoute(tmp_path, most_bytes=6 << 20 if verify else 3 << 20)
    route, nbytes, read_bytes = run([FileRoute(tmp_path)], [breaks], verify=verify)
    assert route == "group+file"
    assert 0 < read_bytes < nbytes


@pytest.mark.parametrize("looks_first", [True, False], ids=["at once", "after the first bytes"])
def test_nothing_counts_of_a_route_that_lies(run: Any, tmp_path: pathlib.Path, looks_first: bool) -> None:
    """The file holds zeros, and not the token that the offer names."""
    lying, trusting = FileRoute(tmp_path, lies=True), FileRoute(tmp_path, looks_first=looks_first)
    route, nbytes, read_bytes = run([lying], [trusting])
    assert (route, read_bytes) == ("group", 0)
    assert nbytes > 4 << 20


def test_what_one_route_cannot_bring_is_brought_by_the_next(run: Any, tmp_path: pathlib.Path) -> None:
    runs, whole = RunsRoute(tmp_path, name="runs"), FileRoute(tmp_path)
    route, nbytes, read_bytes = run([runs], [runs], verify=True)
    assert route == "runs+group"
    assert 0 < read_bytes < nbytes
    route, nbytes, read_bytes = run([runs, whole], [runs, whole])
    assert route == "runs+file"
    assert read_bytes == nbytes


def test_the_table_of_the_library() -> None:
    assert [route.name for route in route_table.ROUTES] == ["memory", "device_memory", "nixl"]
