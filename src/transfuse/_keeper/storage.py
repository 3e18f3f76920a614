"""Steps on storage: files that outlive all hosts. No keeper, thread or clock here: only what is written and read.

    DIR/writer.json             who writes here
    DIR/step-300-gen-2/         a step of a generation
        rank-0.slot …           a slot of each rank (:mod:`.slot_file`), with the bundles that this rank writes
        step.json               the record, written last: it makes the step count, and names every file with its digest

The record's digest covers the heads of the files, and a head the digests of its bundles: so a reader checks every byte
that it uses, and no other. Nobody knows who has written a directory: names, numbers and kinds of files are checked
before they are used, and no symbolic link in it is followed. docs/storage.md is the format's page.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import xxhash

from transfuse._errors import TransfuseError
from transfuse._keeper.bundle_table import NO_DIGEST
from transfuse._keeper.slot_file import PAGE, Brief, Label, SlotView, head_of, round_up
from transfuse._limits import Limits
from transfuse._memory.blocks import digests_at
from transfuse._sizes import MOST_RUNS
from transfuse._state.region import Ints
from transfuse._tuning import STORAGE_PIECE_BYTES

FORMAT = 1
RECORD_NAME, WRITER_NAME = "step.json", "writer.json"
_NUMBER = r"(0|[1-9]\d{0,17})"
_FOLDER = re.compile(f"step-{_NUMBER}-gen-{_NUMBER}", re.ASCII)
_OURS = re.compile(r"(rank-\d+\.slot|step\.json)(\.[0-9a-f]+\.tmp)?", re.ASCII)

#: A piece of a file: runs of memory, one behind the other.
Piece: TypeAlias = list[memoryview]


class StorageTrouble(TransfuseError):
    """Storage that cannot be reached, read or written. It says what to do."""


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the record says of a rank's file."""

    rank: int
    nbytes: int
    #: The header, the brief and the description: they stand in front of the bundles.
    head_bytes: int
    #: XXH3 of 128 bits, in hexadecimal digits.
    head_digest: str


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Makes a step count. It is in JSON."""

    format: int
    step: int
    generation: int
    world_size: int
    #: When the record was made, and by which version.
    written: str
    version: str
    #: By the file's name.
    files: dict[str, SavedFile]
    #: Of the record's own text, in which zeros stand in the place of these digits.
    digest: str = NO_DIGEST.hex()

    @classmethod
    def of(cls, label: Label, world_size: int, files: Iterable[SavedFile]) -> Record:
        from transfuse import __version__  # The package has been imported as soon as somebody calls this.

        written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        named = {file_name(file.rank): file for file in sorted(files, key=lambda one: one.rank)}
        return cls(FORMAT, label.step, label.generation, world_size, written, __version__, named)

    @property
    def label(self) -> Label:
        return Label(self.generation, self.step)


class StepWriter(msgspec.Struct, frozen=True):
    """Who writes to a directory. Unknown fields are left out: a later version may have more."""

    #: Random: no two jobs have the same.
    id: str
    host: str
    pid: int
    started: str
    #: Counts on for as long as the writer lives.
    beat: int


_record, _writer = msgspec.json.Decoder(Record), msgspec.json.Decoder(StepWriter)


def file_name(rank: int) -> str:
    return f"rank-{rank}.slot"


def folder_of(label: Label) -> str:
    return f"step-{label.step}-gen-{label.generation}"


def label_of(folder: str) -> Label | None:
    """The step of a folder of this name; None if it is somebody else's folder."""
    found = _FOLDER.fullmatch(folder)
    return None if found is None else Label(int(found[2]), int(found[1]))


class Storage:
    """A directory of steps."""

    def __init__(self, where: str, files: _Files) -> None:
        #: For messages.
        self.where = where
        self._files = files

    @classmethod
    def at(cls, directory: str | os.PathLike[str]) -> Storage:
        """``directory``: a local path, ``file://`` and a path, or a URL of fsspec."""
        where = os.fspath(directory)
        scheme, separator, path = where.partition("://")
        if not separator:
            return cls(where, _LocalFiles(where))
        if scheme == "file":
            return cls(path, _LocalFiles(path))
        return cls(where, _RemoteFiles(where))

    def check(self, *, writes: bool = True) -> None:
        """Refuse what is no folder, or cannot be written. It is never made: a mount that is missing is no new run."""
        with self._reaching("cannot be used"):
            self._files.check()
            if writes:
                name = f"check-{secrets.token_hex(8)}"
                try:
                    self._files.write(name, [[memoryview(b"transfuse")]])
                finally:
                    with suppress(OSError):
                        self._files.remove(name)

    # -- what there is

    def labels(self) -> list[Label]:
        """The steps that have a record, newest first."""
        with self._reaching("cannot be listed"):
            found = self._files.tree()
        return sorted((label for label, names in _steps(found) if RECORD_NAME in names), reverse=True)

    def unfinished(self) -> list[Label]:
        """The steps that have files and no record: they are being written, or their writer has died."""
        with self._reaching("cannot be listed"):
            found = self._files.tree()
        return sorted(label for label, names in _steps(found) if RECORD_NAME not in names)

    def record(self, label: Label) -> Record:
        """The record of a step. ``ValueError`` names the file if it is damaged."""
        path = self._path(label, RECORD_NAME)
        with self._reaching(f"{path} cannot be read"):
            text = self._read(path)
        try:
            record = _record.decode(text)
            if record.format != FORMAT:
                raise ValueError(f"it has format {record.format}, and this version reads format {FORMAT}")
            if _seal(text, record.digest) != record.digest:
                raise ValueError("its digest is wrong")
            _check_record(record, label)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{self.where}/{path} is damaged: {error}") from error
        return record

    def present(self, label: Label, record: Record) -> list[int]:
        """The ranks whose files are here with the right size."""
        with self._reaching(f"{folder_of(label)} cannot be listed"):
            sizes = self._files.sizes(folder_of(label))
        return sorted(file.rank for name, file in record.files.items() if sizes.get(name) == file.nbytes)

    def open(self, label: Label, record: Record, rank: int, *, only_head: bool = False) -> int:
        """A descriptor of a rank's file, which the caller closes. What lies elsewhere is brought into memory.

        Its head is checked: ``ValueError`` names the file. ``only_head``: nothing behind it is needed.
        """
        path, file = self._path(label, file_name(rank)), record.files[file_name(rank)]
        with self._reaching(f"{path} cannot be read"):
            fd = self._files.open(path, file.head_bytes if only_head else None)
        try:
            with self._reaching(f"{path} cannot be read"):
                nbytes = os.fstat(fd).st_size
                head = _read(fd, file.head_bytes)
            if nbytes != file.nbytes and not only_head:
                raise ValueError(f"{self.where}/{path} is damaged: it has {nbytes} bytes instead of {file.nbytes}")
            if xxhash.xxh3_128_hexdigest(head) != file.head_digest:
                raise ValueError(f"{self.where}/{path} is damaged: the digest of its head is wrong")
        except BaseException:
            os.close(fd)
            raise
        return fd

    # -- writing

    def write_rank(
        self, label: Label, view: SlotView, brief: Brief, owners: Ints, pace: Callable[[int], None]
    ) -> SavedFile:
        """Write the bundles of a slot that ``owners`` gives to this rank. It is there whole afterwards, or not at all.

        ``owners``: for each of the rank's bundles, the rank whose file has it. ``pace`` is called with the number of
        bytes after each piece; it may wait, or raise.
        """
        if label_of(folder_of(label)) != label:
            raise ValueError(f"step {label.step} of generation {label.generation} has no name that a folder may have")
        head, runs = _compact(label, view, brief, owners)
        path = self._path(label, file_name(brief.rank))
        with self._reaching(f"{path} cannot be written"):
            if self._files.exists(self._path(label, RECORD_NAME)):
                raise StorageTrouble(
                    f"{self.where}: step {label.step} of generation {label.generation} is whole already: it is not "
                    "overwritten"
                )
            self._files.write(path, _paced(_pieces([memoryview(head), *runs]), pace))
        nbytes = len(head) + sum(map(len, runs))
        return SavedFile(brief.rank, nbytes, len(head), xxhash.xxh3_128_hexdigest(head))

    def write_record(self, label: Label, record: Record) -> None:
        """From now on the step counts. Several hosts may write the same record."""
        _check_record(record, label)
        text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(record, digest=NO_DIGEST.hex())))
        sealed = text.replace(NO_DIGEST.hex().encode(), _seal(text, NO_DIGEST.hex()).encode())
        path = self._path(label, RECORD_NAME)
        with self._reaching(f"{path} cannot be written"):
            self._files.write(path, [[memoryview(sealed)]])

    def remove(self, label: Label) -> None:
        """Remove a step: its record first, so what is left of it never counts. Other files in its folder stay."""
        folder = folder_of(label)
        with self._reaching(f"{folder} cannot be removed"):
            names = [name for name in self._files.sizes(folder) if _OURS.fullmatch(name)]
            for name in sorted(names, key=lambda one: one != RECORD_NAME):
                self._files.remove(f"{folder}/{name}")
            self._files.remove_folder(folder)

    # -- who writes here

    def writer(self) -> StepWriter | None:
        """Who has written here last; None if nobody has, or if that cannot be told any more."""
        try:
            with self._reaching(f"{WRITER_NAME} cannot be read"):
                text = self._read(WRITER_NAME)
            return _writer.decode(text)
        except StorageTrouble as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def take(self, writer: StepWriter) -> None:
        """Say that this one writes here."""
        text = msgspec.json.format(msgspec.json.encode(writer))
        with self._reaching(f"{WRITER_NAME} cannot be written"):
            self._files.write(WRITER_NAME, [[memoryview(text)]])

    def _read(self, path: str) -> bytes:
        longest = Limits.from_environment().max_message_bytes
        text = self._files.read(path, longest + 1)
        if len(text) > longest:
            raise OSError(errno.EFBIG, f"it has more than {longest} bytes (TRANSFUSE_MAX_MESSAGE_BYTES)")
        return text

    def _path(self, label: Label, name: str) -> str:
        return f"{folder_of(label)}/{name}"

    @contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageTrouble(f"the directory {self.where}: {what}: {error}{_cure(error)}") from error


def _cure(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ". Make room there, or keep fewer steps (keep_saved=)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f". Let user {os.getuid()} read and write there"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN, errno.EIO, errno.ETIMEDOUT):
        return ". Look whether it is mounted and can be reached; transfuse never makes it"
    return ""


def _steps(tree: Mapping[str, Iterable[str]]) -> Iterator[tuple[Label, Iterable[str]]]:
    for folder, names in tree.items():
        label = label_of(folder)
        if label is not None:
            yield label, names


def _seal(text: bytes, digest: str) -> str:
    """The digest of a record's text that has ``digest`` in it."""
    return xxhash.xxh3_128_hexdigest(text.replace(digest.encode(), NO_DIGEST.hex().encode()))


def _check_record(record: Record, label: Label) -> None:
    if record.label != label:
        raise ValueError(f"it is the record of step {record.step} of generation {record.generation}")
    ranks = {file.rank for file in record.files.values() if 0 <= file.rank < record.world_size}
    is_named = all(name == file_name(file.rank) for name, file in record.files.items())
    if not is_named or not len(record.files) == len(ranks) == record.world_size:
        raise ValueError(f"it does not name one file for each of {record.world_size} ranks")
    longest = Limits.from_environment().max_message_bytes
    for name, file in record.files.items():
        if not PAGE <= file.head_bytes <= min(file.nbytes, longest):
            raise ValueError(
                f"it gives {name} {file.head_bytes} bytes of its {file.nbytes} as head: at least {PAGE}, and at "
                f"most {longest} (TRANSFUSE_MAX_MESSAGE_BYTES)"
            )


# ------------------------------------------------------------------------------------------------- what a file holds


def _compact(label: Label, view: SlotView, brief: Brief, owners: Ints) -> tuple[bytes, list[memoryview]]:
    """The head of a file, and what follows it: the bundles of this rank, each at the beginning of a page."""
    bundles, text = brief.bundles, view.text()
    mine = np.flatnonzero(owners == brief.rank)
    if len(owners) != len(bundles) or (bundles.places[mine] < 0).any():
        raise ValueError(f"rank {brief.rank} is to write bundles that its slot does not hold")
    digests = list(bundles.digests) or [NO_DIGEST] * len(bundles)
    bare = np.array([number for number in mine.tolist() if digests[number] == NO_DIGEST], dtype=np.int64)
    for number, digest in zip(bare, digests_at(view.address + bundles.places[bare], bundles.nbytes[bare]), strict=True):
        digests[number] = digest
    places = np.full(len(bundles), -1, dtype=np.int64)

    def encoded() -> bytes:
        return msgspec.msgpack.encode(Brief(brief.rank, brief.world_size, bundles.laid(owners, places).hashed(digests)))

    # Where the bundles lie does not change how long the table is.
    head_bytes = end = PAGE + len(encoded()) + len(text)
    runs, memory, zeros = [], memoryview(view.memory), memoryview(bytes(PAGE))
    for number in mine.tolist():
        places[number] = round_up(end)
        runs.append(zeros[: places[number] - end])
        start, nbytes = int(bundles.places[number]), int(bundles.nbytes[number])
        runs.append(memory[start : start + nbytes])
        end = int(places[number]) + nbytes
    head = head_of(label, encoded(), text)
    assert len(head) == head_bytes
    return head, runs


def _pieces(runs: Iterable[memoryview]) -> Iterator[Piece]:
    """Cut into pieces of one size, of which each is written at once."""
    piece, room = Piece(), STORAGE_PIECE_BYTES
    for run in runs:
        while len(run):
            piece.append(run[:room])
            room -= len(piece[-1])
            run = run[len(piece[-1]) :]
            if not room or len(piece) == MOST_RUNS:
                yield piece
                piece, room = Piece(), STORAGE_PIECE_BYTES
    if piece:
        yield piece


def _paced(pieces: Iterable[Piece], pace: Callable[[int], None]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        pace(sum(map(len, piece)))


def _read(fd: int, nbytes: int) -> bytes:
    """The first bytes of a file; fewer if it is shorter."""
    found = bytearray()
    while len(found) < nbytes and (more := os.pread(fd, nbytes - len(found), len(found))):
        found += more
    return bytes(found)


def _write(fd: int, piece: Piece) -> None:
    while piece:
        written = os.writev(fd, piece)
        while piece and written >= len(piece[0]):
            written -= len(piece.pop(0))
        if written:
            piece[0] = piece[0][written:]


# ------------------------------------------------------------------------------------------------- where files lie


class _Files(Protocol):
    """A place for files. What goes wrong is an ``OSError``."""

    def check(self) -> None:
        """Raise if the directory cannot be listed."""

    def tree(self) -> dict[str, set[str]]:
        """By step folder: the names in it."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The sizes of a folder's files. Empty if there is no such folder."""

    def exists(self, path: str) -> bool: ...

    def read(self, path: str, most: int) -> bytes:
        """The first bytes of a file."""

    def open(self, path: str, most: int | None) -> int:
        """A descriptor of the file. ``most``: the number of bytes at its beginning that are needed; None: all."""

    def write(self, path: str, pieces: Iterable[Piece]) -> None:
        """Write a file, and the folder that it is in. It is there whole afterwards, or not at all."""

    def remove(self, path: str) -> None: ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder, unless something is left in it."""


class _LocalFiles:
    """Files in the folders of a directory. No symbolic link in it is followed: it may lead anywhere."""

    def __init__(self, root: str) -> None:
        self._root = root

    def check(self) -> None:
        os.listdir(self._root)

    def tree(self) -> dict[str, set[str]]:
        found = {}
        for name in os.listdir(self._root):
            if label_of(name) is not None:
                # Somebody removes steps meanwhile; or it is a file of this name, or a link.
                with suppress(FileNotFoundError, NotADirectoryError, _LinkFound), self._folder(name) as folder:
                    found[name] = set(os.listdir(folder))
        return found

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            with self._folder(folder) as fd, os.scandir(fd) as entries:
                found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
        except FileNotFoundError:
            return {}
        return {name: about.st_size for name, about in found if stat.S_ISREG(about.st_mode)}

    def exists(self, path: str) -> bool:
        try:
            with self._at(path) as (folder, name):
                os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def read(self, path: str, most: int) -> bytes:
        with open(self.open(path, most), "rb") as file:
            return file.read(most)

    def open(self, path: str, most: int | None) -> int:
        with self._at(path) as (folder, name):
            fd = _open(name, os.O_RDONLY | os.O_NONBLOCK, folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is no regular file")
        return fd

    def write(self, path: str, pieces: Iterable[Piece]) -> None:
        folder = os.path.dirname(path)
        if folder:
            with self._folder("") as root:
                try:
                    os.mkdir(folder, 0o700, dir_fd=root)
                    os.fsync(root)
                except FileExistsError:  # Another host writes the same step.
                    pass
        with self._at(path) as (fd, name):
            self._write(fd, name, pieces)

    def _write(self, folder: int, name: str, pieces: Iterable[Piece]) -> None:
        # A name of its own: several hosts may write the same record at the same time.
        new = f"{name}.{secrets.token_hex(4)}.tmp"
        fd = _open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder)
        try:
            try:
                for piece in pieces:
                    _write(fd, list(piece))
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(new, dir_fd=folder)
            raise
        os.fsync(folder)

    def remove(self, path: str) -> None:
        with self._at(path) as (folder, name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            os.fsync(folder)

    def remove_folder(self, folder: str) -> None:
        with self._folder("") as root:
            try:
                os.rmdir(folder, dir_fd=root)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
            os.fsync(root)

    @contextmanager
    def _at(self, path: str) -> Iterator[tuple[int, str]]:
        """The descriptor of the folder that a file is in, and its name there."""
        folder, name = os.path.split(path)
        with self._folder(folder) as fd:
            yield fd, name

    @contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        """A descriptor of a step's folder; without a name, of the directory itself. What is done in it is settled by
        ``fsync``: it outlives a loss of power from there on.
        """
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if name:
                root, fd = fd, -1
                try:
                    fd = _open(name, os.O_RDONLY | os.O_NONBLOCK, root)
                finally:
                    os.close(root)
            yield fd
        finally:
            if fd >= 0:
                os.close(fd)


class _LinkFound(OSError):
    """A symbolic link where none is followed."""


def _open(name: str, flags: int, folder: int) -> int:
    """Open something in a folder, for this user alone if it is made. ``O_NONBLOCK``: a FIFO would never answer."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _LinkFound(errno.ELOOP, f"{name} is a symbolic link, and transfuse follows none there") from error


class _RemoteFiles:
    """Files behind a URL of fsspec. A folder is what the names of files begin with: none has to be there before."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ModuleNotFoundError as error:
            raise StorageTrouble(
                f"the directory {url} is a URL, and fsspec is not installed: pip install 'transfuse[remote]', or give "
                "a local path"
            ) from error
        try:
            self._fs: Any
            self._fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise StorageTrouble(f"the directory {url} cannot be reached: {error}") from error
        self._root = root.rstrip("/")

    def check(self) -> None:
        with _as_oserror(), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.ls(self._root)

    def tree(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        with _as_oserror():
            self._fs.invalidate_cache()
            paths = self._fs.find(self._root, maxdepth=2)
        for path in paths:
            folder, _, name = path.removeprefix(self._root).strip("/").rpartition("/")
            if label_of(folder) is not None:
                found.setdefault(folder, set()).add(name)
        return found

    def sizes(self, folder: str) -> dict[str, int]:
        with _as_oserror():
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._at(folder), detail=True)
            except FileNotFoundError:
                return {}
        return {one["name"].rpartition("/")[2]: one["size"] for one in entries if one["type"] == "file"}

    def exists(self, path: str) -> bool:
        with _as_oserror():
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._at(path)))

    def read(self, path: str, most: int) -> bytes:
        with _as_oserror():
            found: bytes = self._fs.cat_file(self._at(path), end=most)
            return found

    def open(self, path: str, most: int | None) -> int:
        fd = os.memfd_create("transfuse-saved", os.MFD_CLOEXEC)
        try:
            with _as_oserror():
                if most is not None:
                    _write(fd, [memoryview(self._fs.cat_file(self._at(path), end=most))])
                    return fd
                with self._fs.open(self._at(path), "rb") as file:
                    while data := file.read(STORAGE_PIECE_BYTES):
                        _write(fd, [memoryview(data)])
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write(self, path: str, pieces: Iterable[Piece]) -> None:
        target = self._at(path)
        with _as_oserror():
            if "/" in path:
                with suppress(FileExistsError):
                    self._fs.mkdir(target.rpartition("/")[0], create_parents=False)
            file = self._fs.open(target, "wb")
        try:
            for piece in pieces:
                with _as_oserror():
                    for run in piece:
                        file.write(run)
            with _as_oserror():
                file.close()
        except BaseException:
            # To close it may make a file of what has come so far. Without a record it would not count.
            with suppress(Exception):
                file.close()
            with suppress(Exception):
                self._fs.rm_file(target)
            raise

    def remove(self, path: str) -> None:
        with _as_oserror(), suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def remove_folder(self, folder: str) -> None:
        with suppress(Exception):  # Where files have no folders there is none to remove.
            self._fs.rmdir(self._at(folder))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"


@contextmanager
def _as_oserror() -> Iterator[None]:
    """Each store has errors of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
