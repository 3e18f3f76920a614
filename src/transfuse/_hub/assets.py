"""Assets: the files of a repository that are no weights (config.json, the tokenizer), read from a directory when asked.

No file outside of the directory is ever read: no ``..``, no link that leads out, no names that begin with a dot.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import xxhash

from transfuse._tuning import HUB_ASSET_MAX_BYTES

#: Names of files that hold weights, or say where they are. The weights come from the state, and from nowhere else.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
MAX_FILES = 10_000


@dataclass(frozen=True)
class Asset:
    """A file, read."""

    data: bytes
    etag: str


class Assets:
    """The files of one directory, at any depth."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._root = None if directory is None else Path(directory).resolve()
        #: Digests of files that have not changed since: by device, inode, size and time of change.
        self._etags: dict[tuple[int, ...], str] = {}
        if self._root is None:
            return
        if not self._root.is_dir():
            raise NotADirectoryError(f"assets={str(directory)!r} is no directory")
        for count, name in enumerate(self._walk()):
            if count == MAX_FILES:
                raise ValueError(f"assets={str(directory)!r} holds more than {MAX_FILES} files: give another directory")
            if not _is_text(name):
                raise ValueError(
                    f"assets={str(directory)!r} holds {name!a}, a name that is not UTF-8, so no client can ask for it: "
                    "rename the file, or move it away"
                )
            if _is_weights(name):
                raise ValueError(
                    f"assets={str(directory)!r} holds {name}, which is named like a file of weights: these come from "
                    "the state; move the file away, or give a directory without it"
                )
            opened = self._open(name)
            if opened is None:
                raise ValueError(
                    f"assets={str(directory)!r} holds {name}, which cannot be read, or is a link that leads out of the "
                    "directory: copy the files themselves (cp -rL)"
                )
            os.close(opened[0])
            if opened[1].st_size > HUB_ASSET_MAX_BYTES:
                raise ValueError(f"assets={str(directory)!r} holds {name} of {opened[1].st_size} bytes, too large")

    @property
    def are_given(self) -> bool:
        return self._root is not None

    def sizes(self) -> dict[str, int]:
        """The names and sizes of all files that can be read now."""
        found = {}
        for name in islice(self._walk(), MAX_FILES):
            opened = self._open(name)
            if opened is not None:
                os.close(opened[0])
                found[name] = opened[1].st_size
        return found

    def read(self, name: str) -> Asset | None:
        """A file by its name; None if there is none."""
        opened = self._open(name)
        if opened is None:
            return None
        descriptor, about = opened
        with open(descriptor, "rb") as file:
            if about.st_size > HUB_ASSET_MAX_BYTES:
                return None
            data = file.read(HUB_ASSET_MAX_BYTES + 1)
        return Asset(data, xxhash.xxh3_128_hexdigest(data))

    def etag(self, name: str) -> str | None:
        """The digest of a file, remembered as long as the file does not change."""
        opened = self._open(name)
        if opened is None:
            return None
        os.close(opened[0])
        about = opened[1]
        key = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        if key not in self._etags:
            asset = self.read(name)
            if asset is None:
                return None
            if len(self._etags) > MAX_FILES:
                self._etags.clear()
            self._etags[key] = asset.etag
        return self._etags[key]

    def _walk(self) -> Iterator[str]:
        if self._root is None:
            return
        for folder, folders, files in os.walk(self._root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if not name.startswith("."):
                    yield str(Path(folder, name).relative_to(self._root))

    def _open(self, name: str) -> tuple[int, os.stat_result] | None:
        """A descriptor of a regular file inside the directory."""
        if self._root is None or not _is_inside(name.split("/")) or not _is_text(name) or _is_weights(name):
            return None
        try:
            # Without blocking: a pipe would wait for a writer.
            descriptor = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError):
            return None
        try:
            about = os.fstat(descriptor)
            # Where the opened file really is: nobody can change that between a check and the read.
            place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            # A link may lead to another place in the directory, but not to one that is hidden.
            shown = place.is_relative_to(self._root) and _is_inside(place.relative_to(self._root).parts)
            if stat.S_ISREG(about.st_mode) and shown:
                return descriptor, about
        except OSError:
            pass
        os.close(descriptor)
        return None


def _is_inside(parts: Sequence[str]) -> bool:
    return all(part and not part.startswith(".") and "\0" not in part and "/" not in part for part in parts)


def _is_weights(name: str) -> bool:
    return any(fnmatch.fnmatch(name.rpartition("/")[2], pattern) for pattern in WEIGHTS)


def _is_text(name: str) -> bool:
    """Whether a file's name is UTF-8: what is not arrives as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)
