"""Processes of another user, in a read-only system and a memory cgroup, as a unit or a container confines a keeper."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from keeping import until
from transfuse._memory.available import _groups

__all__ = ["OTHER", "USER", "as_user", "confined", "memory_group"]

#: The user of the keeper and its workers, and one who is nobody to them. Neither has a name.
USER, OTHER = 62001, 62002
ROOT = pathlib.Path(__file__).parents[2]
NEEDED = ("unshare", "setpriv", "mount")

#: Its arguments: a file of a cgroup to join, directories that stay writable, ``--``, and the command.
SCRIPT = r"""
set -e
if [ -n "$1" ]; then echo $$ > "$1"; fi
shift
OPEN
while [ "$1" != -- ]; do mount --bind "$1" "$1"; shift; done
shift
if [ -n "$READ_ONLY" ]; then mount -o remount,bind,ro /; fi
exec "$@"
"""


def as_user(
    user: int,
    *command: str,
    writable: Sequence[pathlib.Path] = (),
    group: pathlib.Path | None = None,
    read_only: bool = False,
) -> list[str]:
    """A command as another user, where that user can reach Python. The test is skipped where that cannot be."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"other users need root, and {', '.join(NEEDED)}")
    script = SCRIPT.replace("OPEN", "\n".join(_open_to_others()))
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs", "--bounding-set=-all",
            "--inh-caps=-all"]  # fmt: skip
    joined = "" if group is None else str(group / "cgroup.procs")
    mode = ["env", f"READ_ONLY={'1' if read_only else ''}"]
    places = [joined, *map(str, writable), "--"]
    return ["unshare", "--mount", "--propagation=private", *mode, "sh", "-c", script, "-", *places, *drop, *command]


def _open_to_others() -> Iterator[str]:
    """Lines of shell that let every user reach Python and this repository, though a home around them is closed."""
    needed = [pathlib.Path(path).resolve() for path in (sys.base_prefix, sys.prefix, ROOT)]
    closed = {above for path in needed for above in path.parents if not above.stat().st_mode & 0o001}
    for top in sorted(one for one in closed if not closed & set(one.parents)):
        inside = [path for path in needed if top in path.parents]
        yield "KEPT=$(mktemp -d)"
        for number, path in enumerate(inside):
            yield f"mkdir $KEPT/{number}; mount --bind '{path}' $KEPT/{number}"
        yield f"mount -t tmpfs -o mode=755 tmpfs '{top}'"
        for number, path in enumerate(inside):
            yield f"mkdir -p '{path}'; mount --move $KEPT/{number} '{path}'"
        yield "rm -r $KEPT"


@contextmanager
def memory_group(most: int) -> Iterator[pathlib.Path]:
    """A memory cgroup with a limit, below our own. Skips, with the reason, where none can be made."""
    mine = next((group for group, _ in _groups(pathlib.Path("/proc"))), None)
    if mine is None:
        pytest.skip("no memory cgroup is mounted here")
    made = mine / f"transfuse-test-{os.getpid()}"
    try:
        made.mkdir()
        limit = next(name for name in ("memory.limit_in_bytes", "memory.max") if (made / name).exists())
        (made / limit).write_text(str(most))
    except (OSError, StopIteration) as error:
        with suppress(OSError):
            made.rmdir()
        pytest.skip(f"no memory cgroup can be made in {mine}: {error!r}")
    try:
        yield made
    finally:
        until(lambda: _is_removed(made))  # The last process may be a moment in ending.


def _is_removed(group: pathlib.Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def confined(unit: dict[str, list[str]], keepers: pathlib.Path, group: pathlib.Path) -> list[str]:
    """What a unit's service runs under, as far as it can be had without systemd."""
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["NoNewPrivileges"] == ["yes"]
    assert unit["CapabilityBoundingSet"] == [""]
    return as_user(USER, writable=[keepers], group=group, read_only=True)
