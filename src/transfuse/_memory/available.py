"""How much memory this process may still take: of the host, and of each control group that it is in, v1 or v2."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

UNLIMITED = 1 << 62


class _CgroupFiles(NamedTuple):
    """How a version of control groups calls its files, and what of ``memory.stat`` the kernel takes back if needed."""

    most: str
    used: str
    reclaimable: tuple[str, ...]


#: The page cache of files that were read is in a group's usage. Slots are not in it: they are shared memory.
_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _CgroupFiles("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))


def free_memory(proc: pathlib.Path = pathlib.Path("/proc")) -> int:
    """How many bytes this process, and others of its control groups, may still take."""
    free = [UNLIMITED]
    with suppress(OSError, ValueError, StopIteration):
        lines = (proc / "meminfo").read_text().splitlines()
        free.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10)
    with suppress(OSError, ValueError):
        for group, names in _groups(proc):
            # A group without the memory controller, or without a limit ("max").
            with suppress(OSError, ValueError):
                free.append(_free_in(group, names))
    return min(free)


def _free_in(group: pathlib.Path, names: _CgroupFiles) -> int:
    most, used = (int((group / name).read_text()) for name in (names.most, names.used))
    with suppress(OSError, ValueError):
        rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= sum(int(count) for name, count in rows if name in names.reclaimable)
    return most - max(used, 0)


def _groups(proc: pathlib.Path) -> Iterator[tuple[pathlib.Path, _CgroupFiles]]:
    """The directories of this process's groups, and of all groups around them that can be seen from here."""
    mounts = [line.split() for line in (proc / "self" / "mountinfo").read_text().splitlines()]
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        for fields in mounts:
            kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
            if kind != ("cgroup2" if is_v2 else "cgroup") or not (is_v2 or "memory" in options):
                continue
            root, top = _unescape(fields[3]), pathlib.Path(_unescape(fields[4]))
            # A container may see a part of the hierarchy only: its own group is the top of that, or below.
            inside = path.removeprefix(root) if path.startswith(root) and ".." not in path else ""
            group = top / inside.lstrip("/")
            while True:
                yield group, _V2 if is_v2 else _V1
                if group == top:
                    break
                group = group.parent


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
