"""Memory that may still be taken: the smallest of what the host and all control groups around the process leave."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from transfuse._memory import available

MIB = 1 << 20
V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
V2_FILES = ("memory.max", "memory.current", "inactive_file", "active_file")


class Tree:
    """A /proc and a hierarchy of control groups, as files."""

    def __init__(self, base: pathlib.Path, version: int, root: str, path: str) -> None:
        self.proc, self.top = base / "proc", base / "control groups"
        (self.proc / "self").mkdir(parents=True)
        self.top.mkdir()
        self.files = V1_FILES if version == 1 else V2_FILES
        mounted = str(self.top).replace(" ", "\\040")
        kind = "cgroup cgroup rw,memory" if version == 1 else "cgroup2 cgroup rw"
        mounts = [
            "22 1 0:21 / /proc rw,nosuid - proc proc rw",
            "31 22 0:27 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu",
            f"32 22 0:28 {root} {mounted} rw,nosuid shared:9 master:3 - {kind}",
        ]
        (self.proc / "self" / "mountinfo").write_text("\n".join(mounts) + "\n")
        groups = ["5:cpu,cpuacct:/elsewhere", f"4:memory:{path}", "0::/"] if version == 1 else [f"0::{path}"]
        (self.proc / "self" / "cgroup").write_text("\n".join(groups) + "\n")
        (self.proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {1000 * 1024} kB\n")

    def group(self, path: str, most: int | str, used: int, inactive: int = 0, active: int = 0) -> None:
        """All in MiB."""
        where = self.top / path
        where.mkdir(parents=True, exist_ok=True)
        limit, usage, first, second = self.files
        (where / limit).write_text(f"{most if isinstance(most, str) else most * MIB}\n")
        (where / usage).write_text(f"{used * MIB}\n")
        (where / "memory.stat").write_text(f"shmem 7\n{first} {inactive * MIB}\n{second} {active * MIB}\n")

    def free(self) -> float:
        return available.free_memory(self.proc) / MIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_of_all_ancestors_counts_and_the_page_cache_does_not(
    tmp_path: pathlib.Path, version: int
) -> None:
    tree = Tree(tmp_path, version, "/", "/job/step:0/worker")
    assert tree.free() == 1000
    tree.group("job/step:0/worker", "max" if version == 2 else 1 << 42, 90)
    assert tree.free() == 1000
    tree.group("job", 500, 400, inactive=250, active=50)
    assert tree.free() == 400
    tree.group("job/step:0", 300, 100)
    assert tree.free() == 200
    tree.group("job/step:0/worker", 100, 90, inactive=5)
    assert tree.free() == 15
    # What others of a group have taken beyond its limit is not free either.
    tree.group("job", 500, 600)
    assert tree.free() == -100


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("root", "path", "group"),
    [
        ("/docker/abc", "/docker/abc", ""),
        ("/docker/abc", "/docker/abc/inner", "inner"),
        ("/", "/../../elsewhere", ""),
        ("/docker/abc", "/", ""),
    ],
)
def test_a_container_sees_a_part_of_the_hierarchy(
    tmp_path: pathlib.Path, version: int, root: str, path: str, group: str
) -> None:
    tree = Tree(tmp_path, version, root, path)
    tree.group(group, 64, 4)
    assert tree.free() == 60


def test_without_control_groups_the_host_counts(tmp_path: pathlib.Path) -> None:
    tree = Tree(tmp_path, 2, "/", "/")
    (tree.proc / "self" / "cgroup").unlink()
    assert tree.free() == 1000
    (tree.proc / "meminfo").unlink()
    assert tree.free() == available.UNLIMITED / MIB


CHILD = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("available", sys.argv[1])
available = importlib.util.module_from_spec(spec)
spec.loader.exec_module(available)
print(available.free_memory())
with open(sys.argv[2], "wb") as file:
    file.write(bytes(64 << 20))
    os.fsync(file.fileno())
print(available.free_memory())
taken = os.memfd_create("slot")
os.posix_fallocate(taken, 0, 64 << 20)
print(available.free_memory())
"""


@pytest.fixture
def own_group() -> Iterator[pathlib.Path]:
    """A real control group inside our own, with a limit of 256 MiB."""
    group, names = next(available._groups(pathlib.Path("/proc")), (None, None))
    if group is None or names is None:
        pytest.skip("no control groups here")
    made = group / f"transfuse-{os.getpid()}"
    try:
        made.mkdir()
        (made / names.most).write_text(str(256 * MIB))
    except OSError as error:
        with suppress(OSError):
            made.rmdir()
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield made
    finally:
        made.rmdir()


def test_a_real_control_group(own_group: pathlib.Path, tmp_path: pathlib.Path) -> None:
    enter = f'echo $$ > {own_group}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", enter, "sh", sys.executable, "-c", CHILD, available.__file__, str(tmp_path / "data")]
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60)
    begun, read, taken = (int(line) / MIB for line in ran.stdout.split())
    assert 128 < begun <= 256
    # What the page cache holds can be taken; what a slot holds cannot.
    assert begun - read < 32
    assert 48 < read - taken < 96
