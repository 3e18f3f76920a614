"""Steps in directories for tests, written as keepers write them: out of slots that workers have filled."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import xxhash

from keeping import Home, Job, same
from transfuse._keeper.slot_file import Label
from transfuse._keeper.slot_policy import Kept
from transfuse._keeper.storage import Record, Storage

MIB = 1 << 20
LABEL = Label(1, 7)


def state_of(rank: int) -> dict[str, Any]:
    """Some of it is the same on all ranks, and some is not."""
    torch.manual_seed(7)
    state = {"none": torch.empty(0), "small": [torch.randn(n % 7) for n in range(20)], "large": torch.randn(MIB // 2)}
    torch.manual_seed(rank)
    own = {"mine": torch.randn(1000 + rank), "odd": torch.randint(9, (MIB + 5,), dtype=torch.uint8), "n": 3}
    return state | own


class Committed:
    """A step of all ranks' states, in slots, as the workers have committed it. It is written as any step."""

    def __init__(self, home: Home, states: Sequence[Any], **options: Any) -> None:
        self.states = list(states)
        keeper = home.start()
        with Job(len(states), **options) as job:
            job.start(same(*states))
            assert job.commit(LABEL.step) == ["committed"] * len(states)
        found = [keeper.books.find(rank, LABEL) for rank in range(len(states))]
        self.kept: list[Kept] = [one for one in found if one is not None]

    def write(
        self,
        storage: Storage,
        pace: Callable[[int], None] = lambda nbytes: None,
        label: Label = LABEL,
    ) -> Record:
        files = []
        for kept in self.kept:
            assert kept.brief is not None
            files.append(storage.write_rank(label, kept.file, kept.brief, kept.brief.bundles.owners, pace))
        record = Record.of(label, len(self.kept), files)
        storage.write_record(label, record)
        return record


def places(tmp_path: pathlib.Path) -> Iterator[str]:
    """The same directory, named in all ways that there are; the last one is in this process's memory."""
    yield str(tmp_path)
    yield f"file://{tmp_path}"
    yield f"local://{tmp_path}"
    yield f"memory://{tmp_path}"


def flip(path: pathlib.Path, at: int, bit: int = 1) -> None:
    """Flip a bit of a byte."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def seal(path: pathlib.Path, **changes: Any) -> None:
    """Change a record, and give it the digest that belongs to it: as somebody does who knows the format."""
    zeros = "0" * 32
    text = json.dumps(json.loads(path.read_text()) | changes | {"digest": zeros})
    path.write_text(text.replace(zeros, xxhash.xxh3_128_hexdigest(text.encode())))


def seal_file(path: pathlib.Path, data: bytes, head_bytes: int | None = None) -> None:
    """Put other bytes in the place of a rank's file, with a record that names them. By default all are its head."""
    path.write_bytes(data)
    head = data[:head_bytes]
    record = path.with_name("step.json")
    files = json.loads(record.read_text())["files"]
    files[path.name] |= {
        "nbytes": len(data),
        "head_bytes": len(head),
        "head_digest": xxhash.xxh3_128_hexdigest(head),
    }
    seal(record, files=files)


def seal_slot(data: bytearray) -> None:
    """Give a slot's header the digests that belong to what is in it."""
    brief, text = struct.unpack_from("<QQ", data, 32)
    struct.pack_into("<Q", data, 48, xxhash.xxh3_64_intdigest(bytes(data[4096 : 4096 + brief + text])))
    struct.pack_into("<Q", data, 56, xxhash.xxh3_64_intdigest(bytes(data[:56])))
