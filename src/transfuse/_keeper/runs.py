"""Which run a worker belongs to, and the directory in which the keeper of that run is found on this host.

A run is a job with all its restarts. It has a name if somebody gave it one: ``run=``, ``TRANSFUSE_RUN``, or torchrun's
``--rdzv-id``. Otherwise it is known by its agent: the process that starts the workers, and starts them again when one
has failed. A process is known by its pid and its start time, because pids are used again.

==================================  ================================================================================
how the worker was started          its agent
==================================  ================================================================================
torchrun                            torchrun: the parent of the worker's session leader, since torchrun starts each
                                    worker in a session of its own
torchrun's Python API, with a       the process that called it
function instead of a program
``multiprocessing``, ``mp.spawn``   the process that called it
a script, ``make``, a loop          the leader of the worker's process group: what a shell calls a job
a launcher that gives each worker   the launcher: the worker's parent
a group of its own, such as mpirun
by hand, from a terminal            the worker itself: nobody would start it again
==================================  ================================================================================

An agent other than torchrun may start several jobs: a shell loop over learning rates, a server of notebooks. So a run
without a name is known by its command, too: the command line, the working directory and the environment with which it
was started; of what ``multiprocessing`` starts, those of the starter. A restart of the same command by the same agent
goes on. Commands may differ between the ranks of a job (``--local_rank=1``): all ranks of one agent take that of the
first (`agreed`). Of torchrun's jobs only the id counts, which is a new one for each launch from Python.

Two runs without a name that have one agent and one command are one run. Two such jobs at once, and the ranks of one job
that are started from several terminals, need names.

``TORCHELASTIC_RUN_ID`` alone names nothing: it is "none" for every job without a name on several hosts, and a new one
for every job on one host.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import pathlib
import re
import select
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from transfuse._errors import TransfuseError

MAX_NAME_LENGTH = 200
#: Linux allows 108 bytes for the path of a unix socket, the last of which is zero.
MAX_SOCKET_PATH_BYTES = 107
#: A socket's name within the directory of a run has at most this many bytes.
MAX_SOCKET_NAME_BYTES = 12
#: In the directory of each run, for `list_runs`.
RUN_FILE = "run.json"

_DIGEST_LENGTH = 12
_PREFIX_LENGTH = 12
_MAX_BASE_BYTES = MAX_SOCKET_PATH_BYTES - len("/") - _PREFIX_LENGTH - len("-") - _DIGEST_LENGTH - len("/")
_MAX_BASE_BYTES -= MAX_SOCKET_NAME_BYTES


# --------------------------------------------------------------------------------------------- processes


class Process(NamedTuple):
    """A process of this host. Its start time, in clock ticks since the boot, tells it from others with the same pid."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has this pid now; None if there is none, or if it is hidden from us."""
        found = _look_up(pid)
        return None if found is None else cls(pid, found.started)

    def alive(self) -> bool:
        """Whether this very process runs. A zombie does not."""
        found = _look_up(self.pid)
        return found is not None and found.started == self.started and found.state not in "ZXx"


class WatchedProcess(Process):
    """A process that is hidden from us, as those of another namespace of pids are: only a descriptor tells of it."""

    _fd = -1

    @classmethod
    def by(cls, process: Process, fd: int) -> WatchedProcess:
        """``fd``: what ``pidfd_open`` returned where the process can be seen. This object closes it."""
        made = cls(*process)
        made._fd = fd
        return made

    def alive(self) -> bool:
        look = select.poll()
        look.register(self._fd, select.POLLIN)
        return not look.poll(0)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


@contextmanager
def watched(processes: Sequence[Process]) -> Iterator[list[int]]:
    """Descriptors that tell of these processes in any namespace of pids; none, if the system does not give them."""
    with ExitStack() as stack:
        found: list[int] = []
        with suppress(OSError):
            for process in processes:
                fd = os.pidfd_open(process.pid)
                stack.callback(os.close, fd)
                found.append(fd)
        yield found if len(found) == len(processes) else []


class _Stat(NamedTuple):
    """Fields of ``/proc/<pid>/stat``."""

    state: str
    parent: int
    group: int
    session: int
    terminal: int
    started: int


def _look_up(pid: int) -> _Stat | None:
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the name of the program in parentheses. It may hold spaces and parentheses of its own.
    fields = text[text.rindex(b")") + 1 :].split()
    parent, group, session, terminal = map(int, fields[1:5])
    return _Stat(fields[0].decode(), parent, group, session, terminal, int(fields[19]))


def _find_agent() -> Process:
    """The process that started this worker and would start it again. The module's docstring has the table."""
    me = os.getpid()
    mine = _look_up(me)
    if mine is None:
        raise TransfuseError("/proc/self/stat cannot be read: the keeper needs /proc to tell one run from another")
    starter = multiprocessing.parent_process()
    leader = _look_up(mine.session)
    candidate = 0
    if "TORCHELASTIC_RUN_ID" in os.environ and (starter is None or _was_started_by_torchrun(mine.session)):
        candidate = mine.parent if leader is None else leader.parent
    elif starter is not None and starter.pid is not None:
        candidate = starter.pid
    elif mine.group != me:
        candidate = mine.group
    else:
        parent = _look_up(mine.parent)
        is_shell = parent is not None and parent.session == mine.parent and parent.terminal != 0
        # A service is started by init, as are all others.
        candidate = me if is_shell or mine.parent == 1 else mine.parent
    # A parent that belongs to somebody else may be hidden, and the leader of a process group may be gone.
    return Process.of(candidate) or Process(me, mine.started)


def _was_started_by_torchrun(pid: int) -> bool:
    """Whether this process was started as a program by the torchrun that we run under."""
    try:
        environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.fsencode(f"TORCHELASTIC_RUN_ID={os.environ['TORCHELASTIC_RUN_ID']}") in environ


def boot_id() -> str:
    """A name for the time from one boot of this host to the next."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# -------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Run:
    """A job with all its restarts. ``name`` stays the same over restarts; ``agent`` is who started this worker."""

    name: str
    is_named: bool
    agent: Process | None
    #: A digest of what else tells a run without a name from others of its agent.
    command: str = ""
    #: Whether torchrun has started it: then a new worker is a restart, and never another job.
    is_torchruns: bool = False
    #: The name of its directory, if somebody gave that in place of a name.
    folder: str = ""

    @property
    def directory(self) -> pathlib.Path:
        """Where this run's keeper is found. `make_directory` makes it."""
        if self.folder:
            return base_directory() / self.folder
        kind = b"named" if self.is_named else b"unnamed"
        text = "\0".join([self.name, self.command] if self.command else [self.name])
        digest = hashlib.sha256(kind + b"\0" + text.encode()).hexdigest()[:_DIGEST_LENGTH]
        if self.is_named:
            prefix = re.sub(r"[^A-Za-z0-9_]+", "-", self.name).strip("-")[:_PREFIX_LENGTH]
        else:
            prefix = f"pid{self.agent.pid}"[:_PREFIX_LENGTH] if self.agent else ""
        return base_directory() / f"{prefix or 'run'}-{digest}"

    def stays(self, linger: float) -> float:
        """How many seconds the newest step is kept when all ranks have closed, as long as the agent lives.

        Only torchrun starts the same training again by itself. A process that calls its Python API lives longer.
        """
        if not self.is_torchruns:
            return 0.0
        return math.inf if multiprocessing.parent_process() is None else linger


def find_run(run: str | None = None) -> Run:
    """The run that this worker belongs to. ``run`` is its name; None: find out."""
    agent = _find_agent()
    is_torchruns = "TORCHELASTIC_RUN_ID" in os.environ
    source = "run="
    if run is None and "TRANSFUSE_RUN" in os.environ:
        run, source = os.environ["TRANSFUSE_RUN"], "TRANSFUSE_RUN"
    if run is None:
        run, source = _explicit_rendezvous_id(agent), "torchrun's --rdzv-id"
    if run is not None:
        _check_name(run, source)
        return _unnamed_run(run, agent, is_torchruns) or Run(run, True, agent, is_torchruns=is_torchruns)
    # Pids mean something only within their namespace, and containers of one host have the same boot id.
    boot = boot_id()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    name = f"boot {boot}, pid namespace {namespace}, pid {agent.pid}, start {agent.started}"
    return Run(name, False, agent, _command(), is_torchruns)


def agreed(run: Run, of_all: Sequence[Run]) -> Run:
    """The run of a rank, given those that all ranks of its job have found: all ranks of one agent have one."""
    if run.is_named:
        return run
    return replace(run, command=next(one.command for one in of_all if one.name == run.name))


#: Variables that are new with each start, though the job is the same.
_NEW_EACH_TIME = (b"_", b"SHLVL", b"OLDPWD", b"MASTER_PORT", b"INVOCATION_ID", b"SLURM_RESTART_COUNT")
#: The working directory when this was imported: a program may go elsewhere later, each time to another directory.
_directory_at_start = ""
with suppress(OSError):
    _directory_at_start = os.getcwd()


def _command() -> str:
    """A digest of what tells this job from others that its agent starts."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job is not None:
        return hashlib.sha256(b"torchrun\0" + os.fsencode(job)).hexdigest()
    starter = multiprocessing.parent_process()
    pid = os.getpid() if starter is None else starter.pid
    parts = [os.fsencode(_directory_at_start)]
    # The environment with which the process was started: what its program sets later may depend on its rank.
    for name in ("cmdline", "environ"):
        with suppress(OSError):
            words = pathlib.Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
            if name == "environ":
                words = sorted(one for one in words if one.partition(b"=")[0] not in _NEW_EACH_TIME)
            parts += [name.encode(), *words]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _unnamed_run(folder: str, agent: Process, is_torchruns: bool) -> Run | None:
    """A run without a name whose directory somebody has named, to go on with it under another agent."""
    for found in list_runs():
        if not found.is_named and found.directory.name == folder:
            return Run(found.name, False, agent, found.command, is_torchruns, folder)
    return None


def how_to_come_again(run: Run, seconds: float) -> str:
    """How a later job comes to this run: the end of a sentence that says what is kept."""
    kept = f", and stay for {seconds:g} s after the job has ended"
    return kept if run.is_named else f"{kept}. A new torchrun goes on from them with TRANSFUSE_RUN={run.directory.name}"


def _explicit_rendezvous_id(agent: Process) -> str | None:
    """The ``--rdzv-id`` that somebody gave to torchrun, if torchrun uses it."""
    used = os.environ.get("TORCHELASTIC_RUN_ID")
    # "none" is torchrun's own default.
    if not used or used == "none":
        return None
    try:
        words = pathlib.Path(f"/proc/{agent.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    given = []
    for word, following in zip(words, [*words[1:], b""], strict=True):
        option, equals, value = word.partition(b"=")
        if option in (b"--rdzv-id", b"--rdzv_id"):
            given.append(os.fsdecode(value if equals else following))
    # torchrun takes every option from the environment too.
    given.append(os.environ.get("PET_RDZV_ID", ""))
    return used if used in given else None


def _check_name(name: str, source: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{source} must be a str, not {type(name).__name__}")
    if not name.strip():
        raise ValueError(f"{source} is empty: give the run a name, or leave it out")
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"{source} has {len(name)} characters; a run's name has at most {MAX_NAME_LENGTH}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{source} is not valid Unicode: {name!r}") from None


# ------------------------------------------------------------------------------------------- directories


def base_directory() -> pathlib.Path:
    """The directory of this user's keepers on this host. It is made if it is not there.

    It is ``TRANSFUSE_KEEPER_DIR`` if that is set, else ``/tmp/transfuse-<uid>``. A user who can write there can pretend
    to be the keeper, so it must be open to us alone. ``XDG_RUNTIME_DIR`` would not do: it is deleted when its user logs
    out, and jobs go on.
    """
    chosen = os.environ.get("TRANSFUSE_KEEPER_DIR")
    if chosen:
        path = pathlib.Path(os.path.abspath(chosen))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_make(path, error) from error
    else:
        path = pathlib.Path(f"/tmp/transfuse-{os.geteuid()}")
    length = len(os.fsencode(path))
    if length > _MAX_BASE_BYTES:
        raise TransfuseError(
            f"the keepers' directory {path} has a path of {length} bytes; at most {_MAX_BASE_BYTES} leave room for "
            "the path of a unix socket. Set TRANSFUSE_KEEPER_DIR to a shorter one"
        )
    _make_private(path)
    return path


def make_directory(run: Run) -> pathlib.Path:
    """Make the directory of this run if it is not there, and note there whose it is."""
    path = run.directory
    note = path / f"{RUN_FILE}.{os.getpid()}"
    while True:
        _make_private(path)
        try:
            note.write_bytes(msgspec.json.encode(run))
            # Several workers write the same at once. Readers see a whole file.
            note.replace(path / RUN_FILE)
            return path
        except FileNotFoundError:
            continue  # A keeper that ends just now has removed the directory meanwhile.
        except OSError:
            with suppress(OSError):
                note.unlink()
            raise


def remake_directory(path: pathlib.Path, note: bytes) -> None:
    """Make the directory of a run again that somebody has deleted. ``note``: what its `RUN_FILE` said."""
    _make_private(path.parent)
    _make_private(path)
    if note and not (path / RUN_FILE).exists():
        (path / RUN_FILE).write_bytes(note)


def list_runs() -> list[Run]:
    """The runs that have a directory on this host, sorted by name. Their keepers may be dead."""
    base = base_directory()
    found = []
    for path in base.iterdir():
        # A directory without a note is being made or removed just now.
        with suppress(OSError, msgspec.MsgspecError):
            run = msgspec.json.decode((path / RUN_FILE).read_bytes(), type=Run)
            if run.directory == path:
                found.append(run)
    return sorted(found, key=lambda run: (not run.is_named, run.name))


def _make_private(path: pathlib.Path) -> None:
    """Make a directory that only we may enter; raise if there is something else in its place."""
    try:
        status = None
        while status is None:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            # A keeper that ends just now may have removed it again.
            with suppress(FileNotFoundError):
                status = path.lstat()
    except OSError as error:
        raise _cannot_make(path, error) from error
    wrong = None
    if stat.S_ISLNK(status.st_mode):
        wrong = "is a symbolic link"
    elif not stat.S_ISDIR(status.st_mode):
        wrong = "is not a directory"
    elif status.st_uid != os.geteuid():
        wrong = f"belongs to user {status.st_uid}, not to user {os.geteuid()}"
    elif status.st_mode & 0o077:
        wrong = f"is open to others (mode {stat.S_IMODE(status.st_mode):04o} instead of 0700)"
    if wrong:
        raise TransfuseError(
            f"the keepers' directory {path} {wrong}: another user could pose as the keeper. {_ELSEWHERE}"
        )


def _cannot_make(path: pathlib.Path, error: OSError) -> TransfuseError:
    return TransfuseError(f"the keepers' directory {path} cannot be made: {error}. {_ELSEWHERE}")


_ELSEWHERE = "Remove it, or set TRANSFUSE_KEEPER_DIR to a directory of your own"
