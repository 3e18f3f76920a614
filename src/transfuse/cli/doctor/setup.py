"""All that is installed and set here: versions, backends, the machine, and the environment."""

from __future__ import annotations

import difflib
import mmap
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

import transfuse
from transfuse._limits import OTHER_VARIABLES, Limits, check_environment
from transfuse._sizes import human_bytes
from transfuse._wire.messages import WIRE_VERSION
from transfuse.cli.doctor.finding import Finding
from transfuse.cli.errors import DEBUG_VARIABLE
from transfuse.cli.options import TOKEN_VARIABLE, available_bytes

__all__ = ["look_around", "variables"]

PREFIX = "TRANSFUSE_"
PACKAGES = ("numpy", "msgspec", "xxhash", "safetensors", "torchft")
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
#: A build of torch whose gloo has TLS reads the key's file name from this variable.
TLS_KEY_VARIABLE = "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY"
#: Files with a container's memory limit, for the two versions of control groups.
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def look_around() -> Iterator[Finding]:
    """All findings that need no trial."""
    yield Finding("note", "transfuse", f"{transfuse.__version__}, wire version {WIRE_VERSION}")
    kernel = platform.release().partition("-")[0]
    yield Finding("note", "python", f"{platform.python_version()} on {platform.system()} {kernel}")
    yield Finding("note", "torch", torch.__version__)
    yield Finding("note", "packages", ", ".join(f"{name} {_version_of(name)}" for name in PACKAGES))
    yield _backends()
    yield _encryption()
    yield _accelerator()
    yield _cores(os.environ)
    yield _memory()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _backends() -> Finding:
    if not dist.is_available():
        return Finding("fail", "backends", "this torch is built without torch.distributed", "install another build")
    there = [name for name in BACKENDS if getattr(dist, f"is_{name}_available")()]
    text = f"{', '.join(there) or 'none'}; absent: {', '.join(name for name in BACKENDS if name not in there)}"
    if not there:
        return Finding("fail", "backends", text, "install a build of torch with gloo")
    return Finding("ok", "backends", text)


def _encryption() -> Finding:
    """Whether gloo can encrypt. Making a device would tell too, but a process chooses its transport only once."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            there = data.find(TLS_KEY_VARIABLE.encode()) >= 0
    except (OSError, ValueError):
        return Finding("note", "encryption", "whether this gloo has TLS could not be found out")
    if there:
        how = f"GLOO_DEVICE_TRANSPORT=TCP_TLS, {TLS_KEY_VARIABLE}=…"
        return Finding("ok", "encryption", f"this gloo has TLS for groups (for all else: tls=): {how}")
    remedy = "tls= encrypts all but the group's own bytes; for these use a network that nobody else reads, or a tunnel"
    return Finding("note", "encryption", "this gloo is built without TLS: what it moves is not encrypted", remedy)


def _accelerator() -> Finding:
    """What accelerators there are, and how messages and parcels would travel in the default group."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return Finding("note", "accelerator", "none: states are moved between CPUs")
    text = f"{torch.accelerator.device_count()} of kind {device.type}"
    backend = dist.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        remedy = f"pass device='cpu': states on {device.type} then travel through main memory"
        return Finding("warn", "accelerator", f"{text}; torch has no backend for it by default", remedy)
    if not dist.is_gloo_available():
        remedy = "install a build of torch with gloo: without it a lost peer ends the group (docs/accelerators.md)"
        return Finding("warn", "accelerator", f"{text}; messages and parcels both travel by {backend}", remedy)
    return Finding(
        "note",
        "accelerator",
        f"{text}; init_process_group() makes a group in which messages travel by gloo and parcels by {backend}; a "
        f"group of {backend} alone cannot go on after a lost peer",
    )


def _cores(environ: Mapping[str, str]) -> Finding:
    count, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    bound = f", of which this process may use {usable}" if usable < count else ""
    threads = environ.get("OMP_NUM_THREADS")
    text = f"{count}{bound}; OMP_NUM_THREADS is {threads or 'not set'}"
    if usable == 1:
        return Finding("warn", "cores", text, "both ends of a transfer share one core: give the job more")
    return Finding("note", "cores", text)


def _memory() -> Finding:
    total = Limits().max_receive_bytes
    text = f"{human_bytes(total)}{_available()}"
    for file in CGROUP_LIMITS:
        limit = _read(file).strip()
        if limit.isdecimal() and int(limit) < total:
            return Finding(
                "warn",
                "memory",
                f"{text}; this container may use {human_bytes(int(limit))}",
                f"a receive refuses only what exceeds the machine's memory: set {PREFIX}MAX_RECEIVE_BYTES lower",
            )
    return Finding("note", "memory", text)


def _available() -> str:
    free = available_bytes()
    return f", {human_bytes(free)} of it available" if free is not None else ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The settings in the environment, and which of them are wrong."""
    limits = {f"{PREFIX}{item.name.upper()}" for item in fields(Limits)}
    known = {*limits, *OTHER_VARIABLES, TOKEN_VARIABLE, DEBUG_VARIABLE}
    given = sorted(name for name in environ if name.startswith(PREFIX))
    for name in given:
        if name not in known:
            alike = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {alike[0]}?" if alike else "remove it; transfuse._limits names those that there are"
            yield Finding("warn", "setting", f"{name} is not a setting of transfuse", remedy)
        elif name == TOKEN_VARIABLE:
            yield Finding("note", "setting", f"{name} is set")
        else:
            yield Finding("note", "setting", f"{name}={environ[name]}")
    try:
        check_environment(environ)
    except ValueError as error:
        yield Finding("fail", "setting", str(error), "correct it: every transfer fails with it")
    if not given:
        yield Finding("note", "setting", f"no {PREFIX}… variable is set")
