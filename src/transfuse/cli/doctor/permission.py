"""Why one process may not read another's memory here: the rules of the kernel and the container."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from transfuse._memory import vm

__all__ = ["Facts", "facts", "reasons"]

_PR_GET_DUMPABLE = 3
#: The number of CAP_SYS_PTRACE.
_SYS_PTRACE = 19
#: The uid_map range of all users: this process is in no user namespace.
_ALL_USERS = ["0", "0", "4294967295"]


class Facts(NamedTuple):
    """All that decides whether ``process_vm_readv`` is allowed."""

    available: bool
    #: Yama's ptrace_scope; None without Yama.
    yama: int | None
    #: Whether system calls are filtered, as in containers.
    filtered: bool
    #: Whether this process may read any other (CAP_SYS_PTRACE).
    capable: bool
    user_namespace: bool
    dumpable: bool


def facts() -> Facts:
    status = dict(line.split(":", 1) for line in _read("/proc/self/status").splitlines() if ":" in line)
    yama = _read("/proc/sys/kernel/yama/ptrace_scope").strip()
    libc: Any = ctypes.CDLL(None)
    return Facts(
        available=vm.AVAILABLE,
        yama=int(yama) if yama.isdecimal() else None,
        filtered=status.get("Seccomp", "0").strip() == "2",
        capable=bool(int(status.get("CapEff", "0").strip(), 16) >> _SYS_PTRACE & 1),
        user_namespace=_read("/proc/self/uid_map").split() != _ALL_USERS,
        dumpable=libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1,
    )


def reasons(found: Facts) -> Iterator[tuple[str, str]]:
    """The possible obstacles on this machine, each with its remedy; the likeliest first."""
    if not found.available:
        yield "this system has no process_vm_readv", "nothing to be done: the group route serves everyone"
        return
    if found.yama == 3:
        yield (
            "Yama's ptrace_scope is 3: no process may",
            "it can be lowered only at boot: sysctl kernel.yama.ptrace_scope=1",
        )
    if found.yama == 2 and not found.capable:
        remedy = "sysctl kernel.yama.ptrace_scope=1, or give the job CAP_SYS_PTRACE"
        yield "Yama's ptrace_scope is 2: only processes with CAP_SYS_PTRACE may", remedy
    if found.filtered:
        remedy = "docker run --cap-add SYS_PTRACE, or a seccomp profile that allows process_vm_readv"
        yield "system calls are filtered (a container's seccomp profile)", remedy
    if found.user_namespace:
        yield "a user namespace: memory outside of it is out of reach", "run both ends in the same container"
    if not found.dumpable:
        yield "this process is not dumpable", "start it without setuid, and without prctl(PR_SET_DUMPABLE, 0)"


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text()
    return ""
