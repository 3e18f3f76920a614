"""States in files: read without running code from them, and written whole or not at all.

A file is known by its first bytes, not by its name. What is read is mapped, not copied: bytes that nobody asks for
stay on the disk.
"""

from __future__ import annotations

import enum
import errno
import os
import pickle
import secrets
import shutil
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from transfuse.cli import flat
from transfuse.cli.errors import Failed
from transfuse.contents import Contents, printable
from transfuse.limits import Limits
from transfuse.manifest import describe
from transfuse.report import human_bytes

__all__ = ["SUFFIXES", "Format", "check_place", "check_room", "contents_of", "format_of", "load", "save"]


class Format(enum.Enum):
    SAFETENSORS = "safetensors"
    TORCH = "torch.save"


#: What a name's end says about a file that is to be written.
SUFFIXES = {
    ".safetensors": Format.SAFETENSORS,
    ".pt": Format.TORCH,
    ".pth": Format.TORCH,
    ".bin": Format.TORCH,
}

#: Names in a refusal.
MAX_NAMED = 5


def format_of(path: Path) -> Format:
    """What a file is, from its first bytes."""
    if path.is_fifo() or path.is_char_device() or path.is_socket():
        # It is read more than once, and mapped.
        raise Failed(f"{path} is no regular file; write what it gives to one")
    with path.open("rb") as file:
        first = file.read(9)
    # A zip, or the pickle that older versions of torch wrote.
    if first.startswith((b"PK\x03\x04", b"\x80\x02")):
        return Format.TORCH
    if len(first) == 9 and first[8:] == b"{":
        return Format.SAFETENSORS
    raise Failed(f"{path} is neither a safetensors file nor one that torch.save wrote")


def contents_of(path: Path) -> tuple[Contents, dict[str, str]]:
    """What a file holds, and its metadata. No tensor is read."""
    if format_of(path) is Format.SAFETENSORS:
        return flat.contents_of(path)
    return Contents.of(describe(load(path), Limits()).manifest), {}


def load(path: Path) -> Any:
    """The state in a file, its tensors mapped from it."""
    if format_of(path) is Format.SAFETENSORS:
        return flat.load(path)
    try:
        # Older files are no zip, and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise Failed(_refused(path)) from error
    except OSError:
        raise
    except Exception as error:  # torch raises nearly anything for a damaged file
        first = str(error).strip().split("\n")[0]
        raise Failed(f"{path} cannot be read: {type(error).__name__}: {first}") from error


def _refused(path: Path) -> str:
    names: list[str] = []
    with suppress(Exception):  # a damaged file has no list of names
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    shown = ", ".join(map(printable, names[:MAX_NAMED])) + (", …" if len(names) > MAX_NAMED else "")
    return (
        f"{path} holds more than tensors and plain data{f' ({shown})' if shown else ''}, which "
        "torch.load(weights_only=True) refuses. To load it would be to run code that the file brings, so there is no "
        "option for it: load it in a program of yours that trusts it, and save a plain state_dict."
    )


# -------------------------------------------------------------------------------------------------------------- writing


def check_place(path: Path, overwrite: bool) -> None:
    """Whether a file can be written here: better known before the bytes have come over the network."""
    if path.is_dir():
        raise Failed(f"{path} is a directory; name a file in it")
    if path.exists() and not overwrite:
        raise Failed(f"{path} exists; --overwrite replaces it")
    if not path.parent.is_dir():
        raise Failed(f"{path.parent} is no directory; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise Failed(f"{path.parent} cannot be written to")


def check_room(path: Path, nbytes: int) -> None:
    """Whether there is room for a file of this size."""
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise Failed(f"{path.parent} has {human_bytes(free)} left, the state is {human_bytes(nbytes)}")


def save(state: Any, path: Path, how: Format, overwrite: bool) -> None:
    """Write a state. What is there before stays as it is until everything is on the disk."""
    with _in_place_of(path, overwrite) as unfinished:
        try:
            if how is Format.SAFETENSORS:
                flat.save(state, unfinished)
            else:
                with unfinished.open("wb") as file:
                    torch.save(state, file)
        except OSError:
            raise
        except (RuntimeError, flat.SafetensorError) as error:
            raise Failed(f"{path} cannot be written: {_cause(error)}; nothing is left of it") from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise Failed(f"{path} cannot be written: torch.save refuses the state: {error}") from error


def _cause(error: BaseException) -> str:
    """What lies behind an error. torch's writer says only that it ended too early."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror
        behind = behind.__cause__ or behind.__context__
    return str(error).strip().split("\n")[0]


@contextmanager
def _in_place_of(path: Path, overwrite: bool) -> Iterator[Path]:
    """A file beside ``path`` that takes its name when it is written, and is gone when it is not."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mode = stat.S_IMODE(unfinished.stat().st_mode)
    try:
        yield unfinished
        # Some writers put a file of their own in its place, which nobody else may read.
        unfinished.chmod(mode)
        _sync(unfinished)
        if overwrite:
            unfinished.replace(path)
        else:
            _take_name(unfinished, path)
        _sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _take_name(unfinished: Path, path: Path) -> None:
    """Give a file its name unless somebody has it meanwhile."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise Failed(f"{path} exists by now; --overwrite replaces it") from None
    except OSError as error:
        # Some filesystems have no hard links.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK) or path.exists():
            raise
        unfinished.rename(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
