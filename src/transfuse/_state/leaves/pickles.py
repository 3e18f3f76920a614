"""Why ``torch.load(weights_only=True)`` refuses a pickle: it is damaged, or it names classes that are not allowed."""

from __future__ import annotations

import io
import pickletools
import zipfile
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO, NamedTuple

import torch
from torch import _weights_only_unpickler as unpickler

#: The older format of torch.save begins with this many pickles: a magic number, a version, sizes of types, the object.
PICKLES = 4


class Reason(NamedTuple):
    """The reason why a pickle is refused."""

    #: The damage that was found, or "".
    damage: str
    #: Classes and functions that the pickle names and that are not allowed.
    names: list[str]
    #: torch's own reason, in one line.
    text: str


def explain(file: BinaryIO, error: Exception) -> Reason:
    """Why torch.load refused this file, which torch.save has written and which may be damaged. Loads nothing."""
    return Reason(damage(file), _unsafe(file), _own_words(str(error)))


def damage(file: BinaryIO, pickles: int = PICKLES) -> str:
    """The damage of the pickle in this file, or "". The bytes of its tensors are not checked."""
    file.seek(0)
    try:
        for stream in islice(_pickles(file), pickles):
            for _ in pickletools.genops(stream):
                pass
    except Exception as error:  # nearly anything
        return _line(str(error)) or type(error).__name__
    return ""


def _pickles(file: BinaryIO) -> Iterator[BinaryIO]:
    """The pickles in a file, one after the other. ``ValueError`` if the archive around them is damaged."""
    start = file.read(4)
    file.seek(0)
    if start != b"PK\x03\x04":
        for _ in range(PICKLES):
            yield file
        return
    with zipfile.ZipFile(file) as archive:
        info = next((info for info in archive.infolist() if info.filename.endswith("/data.pkl")), None)
    file.seek(0)
    data = torch._C.PyTorchFileReader(file).get_record("data.pkl")
    # torch writes 0 if it was told not to compute checksums.
    if info is not None and info.CRC and zlib.crc32(data) != info.CRC:
        raise ValueError("the checksum of data.pkl is wrong")
    yield io.BytesIO(data)


def _unsafe(file: BinaryIO) -> list[str]:
    """All globals that the file names and weights_only does not allow, as far as the file can be read."""
    allowed = {*unpickler._get_allowed_globals(), *unpickler._get_user_allowed_globals()}  # type: ignore[no-untyped-call]
    found: dict[str, None] = {}
    file.seek(0)
    try:
        for stream in _pickles(file):
            for code, argument, _ in pickletools.genops(stream):
                if code.name == "GLOBAL":
                    found[str(argument).replace(" ", ".", 1)] = None
    except Exception:  # nearly anything
        pass
    return [name for name in found if name not in allowed]


def _own_words(text: str) -> str:
    """torch's reason without torch's advice, which is to load without ``weights_only``."""
    text = text.rpartition("WeightsUnpickler error:")[2].partition("\n\nCheck the documentation")[0].strip()
    return _line(text.removeprefix("Weights only load failed. "))


def _line(text: str) -> str:
    lines = [line.strip() for line in text.split("\n")]
    return next(filter(None, lines), "")
