"""Builds the make-believe accelerator with this machine's compiler, once per torch and per state of the source."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from types import ModuleType

import torch

__all__ = ["Unavailable", "load"]

_SOURCE = pathlib.Path(__file__).parent / "source"
_NAME = "phantom_device"
# No optimisation: building takes longer than running.
_FLAGS = ["-std=c++20", "-O0", "-fPIC", "-Wall", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={_NAME}"]


class Unavailable(Exception):
    """The device cannot be built here, and why."""


def load() -> ModuleType:
    """The extension module. Building it takes some seconds, once."""
    if (loaded := sys.modules.get(_NAME)) is not None:
        return loaded
    library = _built()
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    return module


def _built() -> pathlib.Path:
    directory = pathlib.Path(tempfile.gettempdir()) / f"{_NAME}-{_fingerprint()}"
    library = directory / f"{_NAME}.so"
    if library.exists():
        return library
    if (compiler := shutil.which("g++") or shutil.which("c++")) is None:
        raise Unavailable("there is no C++ compiler")
    directory.mkdir(exist_ok=True)
    # Several workers of pytest may want it at the same time: one builds, the others wait.
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(compiler, directory, library)
    return library


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {torch.__file__} {sys.version} {_FLAGS}".encode())
    for path in sorted(_SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: str, directory: pathlib.Path, library: pathlib.Path) -> None:
    root = pathlib.Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [part for path in include for part in ("-isystem", str(path))]

    # All sources at once: most of the time goes into torch's headers, which they share.
    everything = directory / "everything.cpp"
    everything.write_text("".join(f'#include "{source}"\n' for source in sorted(_SOURCE.glob("*.cpp"))))
    objects = [str(everything.with_suffix(".o"))]
    _run(compiler, *flags, "-c", str(everything), "-o", *objects)
    libraries = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    unfinished = library.with_suffix(".unfinished")
    where = str(root / "lib")
    _run(compiler, "-shared", *objects, f"-L{where}", f"-Wl,-rpath,{where}", *libraries, "-o", str(unfinished))
    unfinished.rename(library)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
