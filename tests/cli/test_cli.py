"""The command line, as a user meets it: output, exit codes and files. Demo and benchmark have tests of their own."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import struct
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import nn
from torch.distributed.tensor import Shard
from typer.testing import CliRunner

import certificates
import transfuse
from commands import Running
from serving import wait_until
from shards import shard
from transfuse import cli
from transfuse._hub import safetensors_layout
from transfuse._limits import TLS_VARIABLES, Limits
from transfuse._state.manifest import describe
from transfuse.cli import files, safetensors_file
from transfuse.cli.app import app
from transfuse.cli.errors import Failed
from transfuse.cli.options import bytes_of
from transfuse.testing.exact import assert_exact

DTYPES = tuple(safetensors_layout.DTYPES.values())


def run(*arguments: object, code: int = 0, **environ: str) -> str:
    """What a command prints. If it fails as it should, its words on stderr, and nothing is on stdout."""
    done = CliRunner().invoke(app, [*map(str, arguments)], env=environ)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    if code:
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        return done.stderr
    return done.stdout


def job_state() -> dict[str, Any]:
    """What a training job would save: tied weights, moments under int keys, values."""
    weight = torch.arange(12.0).reshape(4, 3)
    return {
        "model": {"embed.weight": weight, "head.weight": weight, "bias": torch.ones(4, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1},
        "step": 3,
    }


@pytest.fixture
def job(tmp_path: Path) -> Path:
    torch.save(job_state(), tmp_path / "job.pt")
    return tmp_path / "job.pt"


@contextmanager
def serving(state: object, **options: Any) -> Iterator[str]:
    with transfuse.serve(state, **options) as server:
        yield server.address


# --------------------------------------------------------------------------------------------------- the command itself


def test_help_and_version() -> None:
    assert run("--version") == f"transfuse {transfuse.__version__}\n"
    top = run("--help", COLUMNS="200", TERM="dumb")
    commands = ("inspect", "serve", "fetch", "doctor")
    assert all(command in top for command in commands)
    assert all(f"{code} " in top for code in (0, 1, 2, 130, 141))
    for command in commands:
        assert "--help" in run(command, "--help", COLUMNS="200", TERM="dumb")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def no_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_rich)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "pip install 'transfuse[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect",),
        ("inspect", "x", "--depth", "0"),
        ("fetch", "127.0.0.1:1"),
        ("fetch", "nowhere", "--out", "x.pt"),
        ("fetch", "127.0.0.1:1", "127.0.0.1:1", "--out", "x.pt"),
        ("fetch", "127.0.0.1:1", "--out", "x.pt", "--max-size", "much"),
        ("serve", "x.pt", "--max-rate", "-1"),
        ("serve", "x.pt", "--port", "65536"),
        ("serve", "x.pt", "--host", ""),
        ("serve", "x.pt", "--step", "9" * 20),
        ("fetch", "127.0.0.1:1", "--out", "x.pt", "--step", "9" * 20),
        ("inspect", "127.0.0.1:1", "--timeout", "inf"),
        ("inspect", "127.0.0.1:1", "--timeout", "nan"),
        ("fetch", "127.0.0.1:1", "--out", "x.pt", "--max-size", "9" * 400),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    run(*arguments, code=2)


def test_tracebacks_are_for_who_asks_for_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    with pytest.raises(transfuse.PeerLost):
        run("--debug", "inspect", address)
    with pytest.raises(transfuse.PeerLost):
        run("inspect", address, TRANSFUSE_DEBUG="1")
    said = run("inspect", address, code=1)
    assert said.startswith(f"transfuse inspect: {address} cannot be reached")
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", [("inspect", "x"), ("serve", "x"), ("fetch", "127.0.0.1:1", "--out", "x")])
def test_a_wrong_setting_is_one_line(command: tuple[str, ...]) -> None:
    said = run(*command, code=1, TRANSFUSE_CHUNK_BYTES="many")
    expected = "TRANSFUSE_CHUNK_BYTES must be a whole number, got 'many' (in the environment)"
    assert said == f"transfuse {command[0]}: {expected}\n"


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("100MiB", 100 << 20), ("2.5GB", 2_500_000_000), ("1 kib/s", 1024)]
)
def test_sizes(text: str, count: int) -> None:
    assert bytes_of(text) == count


def test_a_closed_pipe_is_silent(tmp_path: Path) -> None:
    torch.save({f"leaf {i}": i for i in range(20_000)}, tmp_path / "long.pt")
    with Running("inspect", str(tmp_path / "long.pt")) as running:
        assert running.line().endswith("(torch.save)")
        assert running.process.stdout is not None
        running.process.stdout.close()
        assert running.process.stderr is not None
        assert running.process.stderr.read() == ""
        assert running.process.wait(30) == 141


def test_who_wants_only_the_address_is_served(job: Path, tmp_path: Path) -> None:
    with Running("serve", str(job), "--once") as running:
        address = running.line()
        assert running.process.stdout is not None
        running.process.stdout.close()
        run("fetch", address, "--out", tmp_path / "x.pt")
        assert running.process.wait(60) == 0
        assert running.process.stderr is not None
        assert running.process.stderr.read() == f"transfuse serve: {job}: 6 leaves, 60 B; Ctrl-C ends it\n"
    assert_exact(job_state(), files.load(tmp_path / "x.pt"))


# ------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_table(job: Path) -> None:
    assert run("inspect", job) == (
        f"{job} (torch.save)\n"
        "\n"
        "leaf                    kind    dtype     shape or value  size  shares\n"
        "model.embed.weight      tensor  float32   4×3             48 B  #1\n"
        "model.head.weight       tensor  float32   4×3             48 B  #1\n"
        "model.bias              tensor  bfloat16  4                8 B\n"
        "optimizer.state.0.step  tensor  float32   scalar           4 B\n"
        "optimizer.lr            value   float     0.1\n"
        "step                    value   int       3\n"
        "6 leaves, 4 of them tensors: 108 B, each byte counted once 60 B\n"
    )


def test_inspect_less(job: Path) -> None:
    folded = run("inspect", job, "--depth", "1").splitlines()[3:]
    assert [line.split()[:2] for line in folded[:2]] == [["model.…", "3"], ["optimizer.…", "2"]]
    chosen = run("inspect", job, "--filter", "model.*.weight").splitlines()
    assert len(chosen) == 3 + 2 + 2
    assert chosen[-2] == "model.*.weight: 2 of 6 leaves, 96 B"


def test_inspect_json(job: Path) -> None:
    found = json.loads(run("inspect", job, "--json"))
    assert found["kind"] == "torch.save"
    assert found["totals"] == {"leaves": 6, "tensors": 4, "bytes": 108, "bytes_once": 60}
    assert found["leaves"][0] | {"device": "cpu"} == {
        "path": "['model']['embed.weight']",
        "name": "model.embed.weight",
        "kind": "tensor",
        "dtype": "float32",
        "shape": [4, 3],
        "nbytes": 48,
        "role": "",
        "requires_grad": False,
        "device": "cpu",
        "value": None,
        "shares": [1],
        "sharding": None,
    }
    assert len(json.loads(run("inspect", job, "--json", "--filter", "step"))["leaves"]) == 1


def test_inspect_reads_only_the_header_of_safetensors(tmp_path: Path) -> None:
    """A file of 256 GiB, of which only the header was ever written."""
    size = 256 << 30
    entry = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": {"format": "pt", "\x1b[2J": "x"}, "layer.weight": entry}).encode()
    path = tmp_path / "huge.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + size)
    said = run("inspect", path)
    assert "layer.weight  tensor  bfloat16  137438953472    256.0 GiB" in said
    assert r"  \x1b[2J: x" in said
    assert json.loads(run("inspect", path, "--json"))["totals"]["bytes"] == size


def test_inspect_a_server() -> None:
    whole = torch.arange(40.0).reshape(10, 4)
    state = {"w": shard(whole, [0, 1], 1, Shard(0)), "n": nn.Parameter(torch.zeros(2))}
    with serving(state, step=41) as address:
        said = run("inspect", address)
        found = json.loads(run("inspect", address, "--json"))
    assert said.startswith(f"{address} (server, step 41)\n")
    assert re.search(r"^w +DTensor +float32 +10×4 +80 B +Shard\(0\) on 2: \[5:10, 0:4\]$", said, re.M)
    assert re.search(r"^n +parameter +float32 +2 +8 B$", said, re.M)
    assert (found["step"], found["totals"]["bytes"]) == (41, 88)


def test_older_files_of_torch_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.bin"
    torch.save(job_state(), path, _use_new_zipfile_serialization=False)
    assert "6 leaves" in run("inspect", path)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PLACE_OF_HARM"],)


def test_code_in_a_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harm = tmp_path / "harm"
    monkeypatch.setenv("PLACE_OF_HARM", str(harm))
    path = tmp_path / "harmful.pt"
    torch.save({"x": Harmful()}, path)
    for command in ("inspect", "serve"):
        said = run(command, path, code=1)
        assert "posix.mkdir" in said
        assert "there is no option for it" in said
    assert not harm.exists()
    # The file is as bad as it looks.
    torch.load(path, weights_only=False)
    assert harm.exists()


def _saved(old: bool = False, size: int = 12) -> bytes:
    buffer = io.BytesIO()
    torch.save(job_state() | {"w": torch.randn(size)}, buffer, _use_new_zipfile_serialization=not old)
    return buffer.getvalue()


def _zip_of(pickled: bytes) -> bytes:
    """As torch.save writes it, with another pickle in it."""
    writer = torch._C.PyTorchFileWriter(buffer := io.BytesIO())
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_record("byteorder", b"little", 6)
    writer.write_end_of_file()
    return buffer.getvalue()


def _other_zip() -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("notes.txt", "no state")
    return buffer.getvalue()


def _flipped(data: bytes, word: bytes) -> bytes:
    """One letter of a word is another."""
    assert word in data
    return data.replace(word, word[:-1] + bytes([word[-1] ^ 1]), 1)


_WHOLE, _OLD, _LARGE, _FLAT = _saved(), _saved(old=True), _saved(size=100_000), save({"w": torch.arange(100.0)})
_OBJECT_AT = _OLD.index(b"model") - 20
_DAMAGED = {
    "empty": b"",
    "short": b"PK",
    **{f"zip, {n} bytes": _WHOLE[:n] for n in (4, 100, len(_WHOLE) // 2, len(_WHOLE) - 1)},
    **{f"large zip, {n} bytes": _LARGE[:n] for n in (5_000, 60_000, 200_000, len(_LARGE) - 30)},
    "zip, a letter": _flipped(_WHOLE, b"_rebuild_tensor_v2"),
    **{f"old, {n} bytes": _OLD[:n] for n in (2, 10, 40, *range(_OBJECT_AT, _OBJECT_AT + 200, 7), len(_OLD) - 1)},
    "old, garbage": _OLD[:_OBJECT_AT] + b"\xff\xfe" * 500,
    "zip of a short pickle": _zip_of(b"\x80\x02}q\x00(X\x01\x00\x00\x00a"),
    "zip of garbage": _zip_of(b"\x80\x02}\xff\xfe\xff"),
    **{f"safetensors, {n} bytes": _FLAT[:n] for n in (7, 9, 30, len(_FLAT) - 1)},
    "safetensors, long header": struct.pack("<Q", 1 << 40) + b"{}",
    "safetensors, garbage": struct.pack("<Q", 20) + b"{" + b"x" * 40,
}


def said_of(path: Path) -> Iterator[str]:
    """What commands that read this file say about it: one line, which names it."""
    for command in ("inspect", "serve"):
        said = run(command, path, code=1)
        assert said.startswith(f"transfuse {command}: {path} ")
        assert said.count("\n") == 1
        yield said


@pytest.mark.parametrize("name", _DAMAGED)
def test_damaged_files_are_called_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(_DAMAGED[name])
    for said in said_of(path):
        assert "is damaged or incomplete: " in said
        assert "copy or save it again" in said
        assert "run code" not in said


_STRANGE: dict[str, tuple[bytes, str]] = {
    "pickle": (pickle.dumps({"a": 1}, protocol=2), "not torch.save's; save what it holds with torch.save"),
    "other zip": (_other_zip(), "is a zip, but not one that torch.save wrote"),
    "text": (b"this is no state at all", "neither a safetensors file nor one that torch.save wrote; save the state"),
    "newer pickle": (_zip_of(pickle.dumps({"a": 1}, protocol=4)), "does not read: Unsupported operand 149; load it in"),
    "newer safetensors": (_flipped(_FLAT, b"F32"), "install a newer one"),
}


@pytest.mark.parametrize("name", _STRANGE)
def test_files_of_other_kinds_are_not_called_damaged(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.pt"
    data, says = _STRANGE[name]
    path.write_bytes(data)
    for said in said_of(path):
        assert says in said
        assert "damaged" not in said


class Fine:
    """A class that does nothing, but is not torch's."""


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
def test_classes_are_named_in_every_format(tmp_path: Path, old: bool) -> None:
    path = tmp_path / "file.pt"
    torch.save({"x": Fine()}, path, _use_new_zipfile_serialization=not old)
    for said in said_of(path):
        assert f"holds more than tensors and plain data ({__name__}.Fine)" in said
    os.truncate(path, path.stat().st_size - 30)
    for said in said_of(path):
        assert "damaged or incomplete" in said


def test_a_torchscript_archive_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls TorchScript deprecated. The files of others stay.
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), path)  # type: ignore[no-untyped-call]
    for said in said_of(path):
        assert "is a TorchScript archive, which holds code; load it in a program of yours with torch.jit.load" in said


def test_a_name_says_nothing_about_a_file(tmp_path: Path) -> None:
    """torch.load goes by the end of a name."""
    path = tmp_path / "job.safetensors"
    path.write_bytes(_WHOLE)
    assert "7 leaves" in run("inspect", path)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    path = tmp_path / "job.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(job_state(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert "6 leaves" in run("inspect", path)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    directory, checkpoint, gone, loop = (tmp_path / name for name in ("directory", "checkpoint", "gone", "loop"))
    directory.mkdir()
    checkpoint.mkdir()
    (checkpoint / ".metadata").touch()
    gone.symlink_to(tmp_path / "nowhere")
    loop.symlink_to(loop)
    for path, says in (
        (directory, "is a directory; no step is saved in it: name a file in it"),
        (checkpoint, "is a directory; it looks like a checkpoint of torch.distributed.checkpoint"),
        (gone, "cannot be read: No such file or directory; is the name right?"),
        (loop, "cannot be read: Too many levels of symbolic links"),
        # The system does not say with which file it could not go on.
        (Path("/proc/self/mem"), "cannot be read: Input/output error; its disk may be failing"),
    ):
        assert all(f"{path} {says}" in said for said in said_of(path))
    absent = tmp_path / "absent"
    assert f"{absent} cannot be read: No such file" in run("serve", absent, code=1)
    assert f"{absent} is neither a file here nor the host:port of a server" in run("inspect", absent, code=1)
    for path in (directory, Path("/proc/self/mem")):
        assert f"inspect: {path} " in run("inspect", "127.0.0.1:1", "--token-file", path, code=1)


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Not the file beside it that would have taken its name."""
    path = tmp_path / ("x" * 250 + ".pt")
    with serving(job_state()) as address:
        said = run("fetch", address, "--out", path, code=1)
    assert f"fetch: {path} cannot be written: File name too long; nothing is left of it" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_named(job: Path) -> None:
    job.chmod(0)
    assert all("cannot be read: Permission denied; read it as a user who may" in said for said in said_of(job))


# --------------------------------------------------------------------------------------------------------------- files


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64).mul(37).to(torch.uint8)
    # A bool is 0 or 1.
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def nested(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "z.first": numbers(dtype, 3, 5),
        "model": {"layer.0": {"weight": numbers(dtype, 4), "scalar": numbers(dtype)}, "empty": numbers(dtype, 0, 2)},
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_keep_bits_and_tree(dtype: torch.dtype, tmp_path: Path) -> None:
    path, state = tmp_path / "x.safetensors", nested(dtype)
    assert safetensors_file.misfits(describe(state, Limits()).manifest) == []
    files.save(state, path, files.Format.SAFETENSORS, overwrite=False)
    assert_exact(state, files.load(path))
    # Others see the names that they are used to.
    assert set(load_file(path)) == {"z.first", "model.layer.0.weight", "model.layer.0.scalar", "model.empty"}
    contents, metadata = files.contents_of(path)
    assert metadata["format"] == "pt"
    shown = {row.name: (row.dtype, row.shape, row.nbytes) for row in contents.rows}
    assert shown["z.first"] == (str(dtype).removeprefix("torch."), (3, 5), 15 * dtype.itemsize)
    assert contents.rows[1].path == "['model']['layer.0']['weight']"


def test_every_dtype_that_safetensors_reads_is_known(tmp_path: Path) -> None:
    """Of torch's dtypes with an even number of items in a byte: all that survive a file, and no other."""
    whole = {getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    survivors = set()
    for dtype in whole - {torch.float4_e2m1fn_x2}:
        if "quint" in str(dtype) or "qint" in str(dtype):
            continue
        try:
            save_file({"x": torch.zeros(16, dtype=torch.uint8).view(dtype)}, tmp_path / "x")
            survivors |= {dtype} if load_file(tmp_path / "x")["x"].dtype is dtype else set()
        except (KeyError, RuntimeError, TypeError):
            continue
    assert survivors == set(DTYPES)


def test_strides_and_roles_are_no_reason_to_refuse(tmp_path: Path) -> None:
    path, halves, comb = tmp_path / "x.safetensors", torch.arange(8.0), torch.arange(8.0)
    # Two of these share a storage, and two are even interleaved; but no byte is shown twice.
    state = OrderedDict(
        t=nn.Parameter(torch.arange(12.0).reshape(3, 4).T), a=halves[:4], b=halves[4:], even=comb[::2], odd=comb[1::2]
    )
    assert safetensors_file.misfits(describe(state, Limits()).manifest) == []
    files.save(state, path, files.Format.SAFETENSORS, overwrite=False)
    got = files.load(path)
    assert list(got) == list(state)
    assert all(torch.equal(got[name], state[name]) for name in got)


_tied = torch.zeros(2)
_NOT_FLAT: dict[str, tuple[Any, str]] = {
    "list": ([torch.zeros(1)], "the state is no dict"),
    "inner list": ({"a": [torch.zeros(1)]}, "['a'] is a list, not a dict"),
    "int key": ({0: torch.zeros(1)}, "[0] has a key that is no str"),
    "surrogate": ({"\udc80": torch.zeros(1)}, "is called what UTF-8 cannot write"),
    "value": ({"a": torch.zeros(1), "step": 3}, "['step'] is a value, not a plain tensor"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, "['a'] is a coo, not a plain tensor"),
    "dtype": ({"a": torch.zeros(2, dtype=torch.complex128)}, "['a'] is complex128, which safetensors does not have"),
    "conjugate": ({"a": torch.zeros(2, dtype=torch.complex64).conj()}, "['a'] is a conjugate or negative view"),
    "tied": ({"a": _tied, "b": _tied}, "['a'] and ['b'] share memory"),
    "overlap": ({"a": _tied, "b": _tied[1:]}, "['a'] and ['b'] share memory"),
    "names": ({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, "['a.b'] is called 'a.b', as ['a']['b'] is"),
    "empty": ({"a": torch.zeros(1), "b": {}}, "['b'] is an empty dict"),
    "reserved": ({"__metadata__": torch.zeros(1)}, "called __metadata__"),
}


@pytest.mark.parametrize("name", _NOT_FLAT)
def test_what_safetensors_cannot_hold_is_refused_by_name(name: str, tmp_path: Path) -> None:
    state, reason = _NOT_FLAT[name]
    with serving(state) as address:
        said = run("fetch", address, "--out", tmp_path / "x.safetensors", code=1)
        assert reason in said
        assert said.endswith(f"Use --out {tmp_path / 'x.pt'}\n")
        assert list(tmp_path.iterdir()) == []
        # What it is advised to do works.
        run("fetch", address, "--out", tmp_path / "x.pt")
    assert_exact(state, files.load(tmp_path / "x.pt"))


def test_metadata_that_others_have_left_behind_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for keys in ('[["a"], ["b"]]', '[["a", "b"], ["a"]]', '[["a"], ["a"]]', "[[]]", "nonsense", '[["a", 1]]'):
        save_file({"a": torch.zeros(1), "a.b": torch.ones(1)}, path, metadata={safetensors_file.KEYS: keys})
        assert list(files.load(path)) == ["a", "a.b"]
        assert "2 leaves" in run("inspect", path)


# --------------------------------------------------------------------------------------------------- serve and fetch


def test_fetch_keeps_everything_in_a_pt_file(tmp_path: Path) -> None:
    state, path = job_state(), tmp_path / "got.pt"
    with serving(state, step=3) as address:
        said = run("fetch", address, "--out", path, "--step", "3")
        assert re.search(r"^fetched 6 leaves, 60 B by (memory|group) in ", said)
        assert f"wrote {path} (torch.save, " in said
        assert "the source sends step 3" in run("fetch", address, "--out", tmp_path / "b.pt", "--step", "4", code=1)
    assert_exact(state, torch.load(path, weights_only=True))
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("route", ["memory", "group"])
def test_fetch_json_and_routes(route: str, tmp_path: Path) -> None:
    state = nested(torch.bfloat16)
    option = "--no-same-host" if route == "group" else "--same-host"
    with serving(state) as address:
        done = json.loads(run("fetch", address, "--out", tmp_path / "got", "--json", option))
    assert (done["format"], done["report"]["route"]) == ("safetensors", route)
    assert Path(done["file"]) == tmp_path / "got.safetensors"
    assert (tmp_path / "got.safetensors").stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert_exact(state, files.load(tmp_path / "got.safetensors"))


def test_without_a_known_end_one_is_chosen(tmp_path: Path) -> None:
    with serving({"a": torch.zeros(1), "step": 3}) as address:
        assert f"wrote {tmp_path / 'v1.2.pt'} (torch.save, " in run("fetch", address, "--out", tmp_path / "v1.2")


@pytest.mark.parametrize("boxes", [False, True])
def test_shards_of_several_servers_become_one_file(tmp_path: Path, boxes: bool) -> None:
    whole = torch.arange(42.0).reshape(7, 6)
    shards: list[Any] = [shard(whole, [[0, 1], [2, 3]], rank, Shard(1), Shard(0)) for rank in range(4)]
    shards = [transfuse.Block.of(one)[0] for one in shards] if boxes else shards
    servers = [transfuse.serve({"m": {"w": one, "b": torch.ones(2)}}) for one in shards]
    try:
        addresses = [server.address for server in servers]
        said = run("fetch", addresses[0], "--out", tmp_path / "x.pt", code=1)
        assert ("is a part; fetch from all the servers that hold parts of it" if boxes else "nobody holds") in said
        assert not (tmp_path / "x.pt").exists()
        run("fetch", *addresses, "--out", tmp_path / "x.safetensors")
    finally:
        for server in servers:
            server.close()
    assert_exact({"m": {"w": whole, "b": torch.ones(2)}}, files.load(tmp_path / "x.safetensors"))


def test_an_existing_file_stays_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_text("precious")
    # Known before anybody is asked.
    assert f"{path} exists; --overwrite replaces it" in run("fetch", "127.0.0.1:1", "--out", path, code=1)
    with serving(job_state()) as address:
        assert "not a directory" in run("fetch", address, "--out", tmp_path / "no" / "x.pt", code=1)
        assert f"{tmp_path} is a directory" in run("fetch", address, "--out", tmp_path, code=1)
        assert path.read_text() == "precious"
        run("fetch", address, "--out", path, "--overwrite")
    assert_exact(job_state(), files.load(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.pt"]


@contextmanager
def files_end_at(nbytes: int) -> Iterator[None]:
    """As on a full disk: nothing can be written beyond here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("end", [".pt", ".safetensors"])
@pytest.mark.parametrize("old", [None, "precious"])
def test_a_full_disk_leaves_nothing_half(end: str, old: str | None, tmp_path: Path) -> None:
    path = tmp_path / f"x{end}"
    if old is not None:
        path.write_text(old)
    with serving({"a": torch.ones(1 << 20)}) as address, files_end_at(1 << 20):
        said = run("fetch", address, "--out", path, "--overwrite", code=1)
    assert f"{path} cannot be written" in said
    assert "File too large" in said
    assert [entry.name for entry in tmp_path.iterdir()] == ([path.name] if old else [])
    assert old is None or path.read_text() == old


def test_too_little_room_is_known_before_anything_moves(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    files.check_room(tmp_path / "x.pt", 1)
    with pytest.raises(Failed, match="of free space, the state needs"):
        files.check_room(tmp_path / "x.pt", 2 * free + 1)


def test_a_state_too_large_is_refused(tmp_path: Path) -> None:
    with serving({"a": torch.zeros(1000)}) as address:
        said = run("fetch", address, "--out", tmp_path / "x.pt", "--max-size", "1KiB", code=1)
    assert "4000" in said
    assert list(tmp_path.iterdir()) == []


def test_tokens(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("long and random\n")
    with serving(job_state(), token="long and random") as address:
        assert "no token was given here" in run("inspect", address, code=1)
        assert "another token" in run("fetch", address, "--out", tmp_path / "x.pt", code=1, TRANSFUSE_TOKEN="wrong")
        assert "6 leaves" in run("inspect", address, TRANSFUSE_TOKEN="long and random")
        # The file counts before the environment.
        run("fetch", address, "--out", tmp_path / "x.pt", "--token-file", secret, TRANSFUSE_TOKEN="wrong")
        assert str(tmp_path / "none") in run("inspect", address, "--token-file", tmp_path / "none", code=1)
        # What is no text is a secret as well.
        secret.write_bytes(b"\xff\n")
        assert "another token" in run("inspect", address, "--token-file", secret, code=1)
        assert "another token" in run("inspect", address, code=1, TRANSFUSE_TOKEN="\udcff")
        secret.write_text("\n")
        assert "empty" in run("inspect", address, "--token-file", secret, code=2)


def test_serve_once_with_a_token(job: Path, tmp_path: Path) -> None:
    with Running("serve", str(job), "--once", "--step", "3", environ={"TRANSFUSE_TOKEN": "secret"}) as running:
        address = running.line()
        assert "secret" not in "".join(running.alive().values())
        # Who only looks is no reader yet, nor is who is turned away.
        assert "step 3" in run("inspect", address, TRANSFUSE_TOKEN="secret")
        said = run("inspect", address, code=1)
        assert "NoToken: no token was given here" in said
        assert "TRANSFUSE_TOKEN" in said
        run("fetch", address, "--out", tmp_path / "x.pt", TRANSFUSE_TOKEN="secret")
        out, err, code = running.end()
    assert code == 0
    assert out.splitlines()[:2] == ["sent the description"] * 2
    assert re.fullmatch(r"sent 60 B by (memory|group) in \S+ s( \(.+/s while bytes moved\))?", out.splitlines()[2])
    assert f"{job}: 6 leaves, 60 B" in err
    assert "gave no token, and this server was started with one" in err
    assert_exact(job_state(), files.load(tmp_path / "x.pt"))


def test_serve_and_fetch_with_certificates(job: Path, tmp_path: Path) -> None:
    """Given as options or by the environment; the Hub asks its server by them, too, whatever its clients use."""
    given = certificates.tls()
    files_of = ["--tls-cert", given.certificate, "--tls-key", given.key, "--tls-ca", given.ca]
    unset: Any = dict.fromkeys(TLS_VARIABLES, "")  # What the options set is gone with the command.
    with Running("serve", str(job), "--step", "3", *map(str, files_of), "--tls-names", "localhost") as running:
        address = running.line()
        assert "step 3" in run("inspect", address, *files_of, **unset)
        run("fetch", address, "--out", tmp_path / "x.pt", **unset | certificates.environment_of(given))
        assert "encrypts, and this end does not" in run("inspect", address, code=1, **unset)
        assert "names= allows only no-one" in run(
            "inspect", address, *files_of, "--tls-names", "no-one", code=1, **unset
        )
        missing = run("inspect", address, "--tls-cert", given.certificate, code=1, **unset)
        assert "encryption needs all of TRANSFUSE_TLS_CERT, _KEY and _CA" in missing
        with Running("hub", address, "--no-https", *map(str, files_of)) as hub:
            assert hub.line().startswith("http://")
    assert_exact(job_state(), files.load(tmp_path / "x.pt"))


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.soak) for other in (signal.SIGINT, signal.SIGHUP))],
)
def test_serve_ends_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0)}, tmp_path / "a.safetensors")
    with Running("serve", str(tmp_path / "a.safetensors"), "--json", "--max-rate", "1MiB") as running:
        first = json.loads(running.line())
        assert (first["leaves"], first["bytes"]) == (1, 12)
        run("fetch", first["address"], "--out", tmp_path / "b.safetensors")
        reports = [json.loads(running.line()) for _ in range(2)]
        assert [report["bytes"] for report in reports] == [0, 12]
        running.process.send_signal(number)
        _, err, code = running.end()
    assert (code, err) == (0, "transfuse serve: ending\n")


def test_serve_refuses_what_cannot_be_served(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "x.pt")
    assert "holds no tensors" in run("serve", tmp_path / "x.pt", code=1)
    torch.save({"a": torch.zeros(1)}, tmp_path / "y.pt")
    assert "192.0.2.77" in run("serve", tmp_path / "y.pt", "--host", "192.0.2.77", code=1)
    assert "at least" in run("serve", tmp_path / "y.pt", "--max-rate", "1", code=2)
    # A dtype that torch does not have.
    header = json.dumps({"a\n": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "z.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(3))
    assert "a\\n cannot be read as a tensor of torch" in run("serve", tmp_path / "z.safetensors", code=1)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in run("serve", tmp_path / "pipe", code=1)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_an_interrupted_fetch_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    looked = threading.Semaphore(0)
    state = {"a": torch.zeros(64 << 20, dtype=torch.uint8)}
    # At a mebibyte a second there is a minute to interrupt it in.
    with transfuse.serve(state, max_bytes_per_second=1 << 20, on_report=lambda _: looked.release()) as server:
        with Running("fetch", server.address, "--out", str(tmp_path / "x.pt")) as running:
            # First it only looks.
            assert looked.acquire(timeout=60)
            wait_until(lambda: bool(server._live.rwlock._readers))
            running.process.send_signal(number)
            out, err, code = running.end()
        assert (code, out, err) == (130, "", "transfuse fetch: interrupted\n")
        assert list(tmp_path.iterdir()) == []
        server.close(cancel=True)
