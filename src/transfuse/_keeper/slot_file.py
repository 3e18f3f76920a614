"""Slots: files in memory that hold one committed state of one rank each. The keeper makes them, the worker writes them.

    header      what the slot holds. Written last: it is the marker that makes a commit count.
    brief       the table of the bundles: where each lies, who holds it, its digest. All that the keeper reads.
    described   the manifest: what is needed to restore the state from the bundles
    data        the bundles that this rank has copied itself

A worker that is killed in the middle of a commit leaves a header that says "being written", or a header whose digest is
wrong. In both cases the slot holds nothing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from transfuse._keeper.bundle_table import Bundles
from transfuse._state.mapped_file import MappedFile

MAGIC = b"TFUSSLOT"
VERSION = 2
PAGE = 4096
EMPTY, WRITING, COMMITTED = range(3)

#: Magic, version, state, generation, step, bytes of the brief, bytes of the description, digest of both; a digest of
#: all this.
_HEADER = struct.Struct("<8sIIqqQQQ")
_SEAL = struct.Struct("<Q")


class Label(NamedTuple):
    """Which commit: the generation of the job's processes, and the step. Labels are compared in this order."""

    generation: int
    step: int


class Brief(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, dict=True):
    """Whose state a slot holds, and the bundles of it: those in this file, and those in other ranks' files."""

    rank: int
    world_size: int
    bundles: Bundles

    @cached_property
    def own(self) -> dict[bytes, int]:
        """The bundles that lie in this file: from key to number."""
        keys, owners = self.bundles.keys, self.bundles.owners
        return {keys[number]: number for number in np.flatnonzero(owners == self.rank).tolist()}


_brief = msgspec.msgpack.Decoder(Brief)


def round_up(nbytes: int, unit: int = PAGE) -> int:
    return -(-nbytes // unit) * unit


def room_for(text_bytes: int) -> int:
    """How much room to give the brief and the description: values may grow a little from step to step."""
    return round_up(text_bytes + text_bytes // 2 + (64 << 10))


@dataclass(frozen=True)
class SlotContents:
    """What the header of a committed slot says."""

    label: Label
    brief_bytes: int
    text_bytes: int
    digest: int


class SlotView:
    """A slot file, mapped into this process."""

    def __init__(self, fd: int, *, writable: bool, populate: bool = False) -> None:
        nbytes = os.fstat(fd).st_size
        # A reader's mapping is private: nothing that it does can reach the slot.
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
        flags |= mmap.MAP_POPULATE if populate else 0
        self.memory = mmap.mmap(fd, nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        self.nbytes = nbytes
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        #: Whether accelerators may copy to it directly.
        self.is_pinned = False
        #: A reader's descriptor of the file.
        self.file = None if writable else MappedFile(self.address, nbytes, fd)

    # -- the worker

    def begin(self, label: Label) -> None:
        """From now on the slot holds nothing, until :meth:`commit`."""
        self._write_header(WRITING, label, 0, 0, 0)

    def commit(self, label: Label, brief: bytes, text: bytes) -> None:
        """Write the brief and the description, and last the marker. The bundles are there already."""
        end = PAGE + len(brief) + len(text)
        self.memory[PAGE : PAGE + len(brief)] = brief
        self.memory[PAGE + len(brief) : end] = text
        self._write_header(COMMITTED, label, len(brief), len(text), _digest(brief, text))

    def _write_header(self, state: int, label: Label, brief: int, text: int, digest: int) -> None:
        head = _header(state, label, brief, text, digest)
        self.memory[: len(head)] = head

    # -- everybody

    def contents(self) -> SlotContents | None:
        """What the slot holds; None if it holds nothing."""
        if self.nbytes < PAGE:
            return None
        head = bytes(self.memory[: _HEADER.size])
        (seal,) = _SEAL.unpack_from(self.memory, _HEADER.size)
        if seal != xxhash.xxh3_64_intdigest(head):
            return None
        magic, version, state, generation, step, brief, text, digest = _HEADER.unpack(head)
        if (magic, version, state) != (MAGIC, VERSION, COMMITTED) or PAGE + brief + text > self.nbytes:
            return None
        return SlotContents(Label(generation, step), brief, text, digest)

    def brief(self) -> Brief:
        """The slot's brief. ``ValueError`` if the slot holds nothing or is damaged."""
        contents = self._checked()
        brief: Brief = decode(_brief, self.memory[PAGE : PAGE + contents.brief_bytes])
        return brief

    def text(self) -> bytes:
        """The slot's description, of which every byte is checked. ``ValueError`` as above."""
        contents = self._checked()
        start = PAGE + contents.brief_bytes
        brief, data = self.memory[PAGE:start], self.memory[start : start + contents.text_bytes]
        if _digest(brief, data) != contents.digest:
            raise ValueError("the description of a kept state is damaged: its digest is wrong")
        return data

    def _checked(self) -> SlotContents:
        contents = self.contents()
        if contents is None:
            raise ValueError("a slot that should hold a state holds none")
        return contents


class SlotFile(SlotView):
    """A slot in the process that made it: the keeper."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("transfuse-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            # Every page now: to touch a page for the first time takes five times as long as to copy it.
            os.posix_fallocate(self.fd, 0, nbytes)
            # A file that somebody shortened would end every process that has it mapped.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            super().__init__(self.fd, writable=True)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Give the memory back, as soon as no other process has it mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            # The array refers to the mapping, so the mapping ends with it.
            self.bytes = np.empty(0, dtype=np.uint8)
            # If a reader still has a tensor over it, the mapping ends with that.
            with suppress(BufferError):
                self.memory.close()


def make_slots(sizes: Sequence[int]) -> list[SlotFile]:
    """Slots of these sizes, all or none: if memory or descriptors run out, those that were made are given back."""
    files: list[SlotFile] = []
    try:
        files.extend(map(SlotFile, sizes))
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def head_of(label: Label, brief: bytes, text: bytes) -> bytes:
    """What stands in front of the bundles of a committed slot."""
    header = _header(COMMITTED, label, len(brief), len(text), _digest(brief, text))
    return header.ljust(PAGE, b"\0") + brief + text


def _header(state: int, label: Label, brief: int, text: int, digest: int) -> bytes:
    head = _HEADER.pack(MAGIC, VERSION, state, label.generation, label.step, brief, text, digest)
    return head + _SEAL.pack(xxhash.xxh3_64_intdigest(head))


def _digest(brief: bytes, text: bytes) -> int:
    digest = xxhash.xxh3_64(brief)
    digest.update(text)
    return digest.intdigest()


def decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the description of a kept state is damaged: {error}") from error
