"""States in files: read without running code from the file, and written whole or not at all.

A file's first bytes say what it is, not its name. Files are mapped, not loaded: bytes that nobody asks for stay on
the disk.
"""

from __future__ import annotations

import enum
import errno
import os
import pickle
import secrets
import shutil
import stat
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from transfuse._limits import Limits
from transfuse._sizes import human_bytes
from transfuse._state.leaves import pickles
from transfuse._state.manifest import describe
from transfuse.cli import safetensors_file
from transfuse.cli.contents import Contents
from transfuse.cli.errors import Failed, reading
from transfuse.cli.tables import printable

__all__ = ["SUFFIXES", "Format", "check_place", "check_room", "contents_of", "format_of", "load", "save"]


class Format(enum.Enum):
    SAFETENSORS = "safetensors"
    TORCH = "torch.save"


#: Which format a suffix means, for a file to be written.
SUFFIXES = {
    ".safetensors": Format.SAFETENSORS,
    ".pt": Format.TORCH,
    ".pth": Format.TORCH,
    ".bin": Format.TORCH,
}

#: The first bytes of a zip.
ZIP = b"PK\x03\x04"

#: What to do about an incomplete file.
AGAIN = "copy or save it again"

#: How many names a refusal lists.
MAX_NAMED = 5


def format_of(path: Path) -> Format:
    """The format of a file, from its first bytes."""
    with reading(path):
        if path.is_fifo() or path.is_char_device() or path.is_socket():
            # The file is read more than once, and mapped.
            raise Failed(f"{path} is not a regular file; write its contents to one")
        with path.open("rb") as file:
            first = file.read(9)
    # A zip, or the pickle that older versions of torch wrote.
    if first.startswith((ZIP, b"\x80\x02")):
        return Format.TORCH
    if len(first) == 9 and first[8:] == b"{":
        return Format.SAFETENSORS
    if len(first) < 9:
        size = f"only {len(first)} bytes long" if first else "empty"
        raise Failed(f"{path} is damaged or incomplete: it is {size}; {AGAIN}")
    raise Failed(
        f"{path} is neither a safetensors file nor one that torch.save wrote; save the state with one of these, or, if "
        f"it was one, {AGAIN}"
    )


def contents_of(path: Path) -> tuple[Contents, dict[str, str]]:
    """The contents of a file, and its metadata. No tensor is read."""
    if format_of(path) is Format.SAFETENSORS:
        with reading(path):
            return safetensors_file.contents_of(path)
    return Contents.of(describe(load(path), Limits()).manifest), {}


def load(path: Path) -> Any:
    """The state in a file, with tensors mapped from the file."""
    how = format_of(path)
    with reading(path):
        return safetensors_file.load(path) if how is Format.SAFETENSORS else _load_torch(path)


def _load_torch(path: Path) -> Any:
    with path.open("rb") as file:
        zipped = file.read(len(ZIP)) == ZIP
        if zipped:
            _check_zip(path)
        # An older file is not a zip and cannot be mapped. And torch takes a file with this suffix for another format.
        mapped = zipped and path.suffix != ".safetensors"
        file.seek(0)
        try:
            with warnings.catch_warnings():
                # If a warning matters, an error follows.
                warnings.simplefilter("ignore")
                return torch.load(path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            raise Failed(_refused(path, pickles.explain(file, error))) from error
        except OSError as error:
            # torch reads at offsets that the file would have if it were complete.
            if error.errno != errno.EINVAL:
                raise
            raise Failed(damaged(path, error)) from error
        except Exception as error:  # torch raises nearly anything for a damaged file
            if "Invalid magic number" in str(error) and not pickles.damage(file, pickles=1):
                raise Failed(f"{path} is a pickle, but not torch.save's; save what it holds with torch.save") from error
            raise Failed(damaged(path, pickles.damage(file) or error)) from error


def _check_zip(path: Path) -> None:
    """Check that a zip is torch.save's and complete, as far as possible without reading the tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.rpartition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise Failed(damaged(path, "the directory at its end is missing or broken")) from error
    if "constants.pkl" in names:
        raise Failed(
            f"{path} is a TorchScript archive, which holds code; load it in a program of yours with torch.jit.load, "
            "and save its state_dict()"
        )
    if "data.pkl" not in names:
        raise Failed(
            f"{path} is a zip, but not one that torch.save wrote; unpack it, or save the state with torch.save"
        )
    with path.open("rb") as file:
        broken = pickles.damage(file)
    if broken:
        raise Failed(damaged(path, broken))


def damaged(path: Path, error: BaseException | str) -> str:
    """The message for a file that should be readable, but is not."""
    said = str(error).strip().split("\n")[0] or type(error).__name__
    return f"{path} is damaged or incomplete: {said.rstrip('.')}; {AGAIN}"


def _refused(path: Path, why: pickles.Reason) -> str:
    if why.damage:
        return damaged(path, why.damage)
    names = ", ".join(map(printable, why.names[:MAX_NAMED])) + (", …" if len(why.names) > MAX_NAMED else "")
    if not names:
        return (
            f"{path} is pickled in a way that torch.load(weights_only=True) does not read: {why.text}; load it in a "
            "program of yours that trusts it, and save a plain state_dict with torch.save"
        )
    return (
        f"{path} holds more than tensors and plain data ({names}), which "
        "torch.load(weights_only=True) refuses. To load it would be to run code that the file brings, so there is no "
        "option for it: load it in a program of yours that trusts it, and save a plain state_dict."
    )


# -------------------------------------------------------------------------------------------------------------- writing


def check_place(path: Path, overwrite: bool) -> None:
    """Check that a file can be written here, before the bytes come over the network."""
    if path.is_dir():
        raise Failed(f"{path} is a directory; name a file in it")
    if path.exists() and not overwrite:
        raise Failed(f"{path} exists; --overwrite replaces it")
    if not path.parent.is_dir():
        raise Failed(f"{path.parent} is not a directory; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise Failed(f"{path.parent} cannot be written to; choose another directory, or change its mode")


def check_room(path: Path, nbytes: int) -> None:
    """Check that the disk has space for a file of this size."""
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise Failed(f"{path.parent} has {human_bytes(free)} of free space, the state needs {human_bytes(nbytes)}")


def save(state: Any, path: Path, how: Format, overwrite: bool) -> None:
    """Write a state. A file of this name stays as it is until the new one is complete on the disk."""
    try:
        with _in_place_of(path, overwrite) as unfinished:
            if how is Format.SAFETENSORS:
                safetensors_file.save(state, unfinished)
            else:
                with unfinished.open("wb") as file:
                    torch.save(state, file)
    except (OSError, RuntimeError, safetensors_file.SafetensorError) as error:
        raise Failed(f"{path} cannot be written: {_cause(error)}; nothing is left of it") from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Failed(f"{path} cannot be written: torch.save refuses the state: {error}") from error


def _cause(error: BaseException) -> str:
    """The cause behind an error: torch's writer says only that it ended too early."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror
        behind = behind.__cause__ or behind.__context__
    return str(error).strip().split("\n")[0]


@contextmanager
def _in_place_of(path: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary file beside ``path``. It takes the name ``path`` once it is complete, and is deleted otherwise."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mode = stat.S_IMODE(unfinished.stat().st_mode)
    try:
        yield unfinished
        # Some writers replace it by a file of their own, which nobody else may read.
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
    """Give a file its name, unless another file has taken the name meanwhile."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise Failed(f"{path} exists by now: another program has made it; --overwrite replaces it") from None
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
