"""The public face: names, versions, and which module imports which."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import transfuse

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "transfuse"


def modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.walk_packages(transfuse.__path__, "transfuse.")]
    found = [transfuse]
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:  # An integration whose library is not installed says which extra to install.
            assert re.fullmatch(r"transfuse\.integrations\.\w+", name), name
            assert f"pip install 'transfuse[{name.rpartition('.')[2]}]'" in str(error)  # noqa: PT017
    return found


@pytest.mark.filterwarnings("ignore")
def test_all_is_what_there_is() -> None:
    for module in modules():
        names = getattr(module, "__all__", None)
        if names is None:
            continue
        assert len(set(names)) == len(names), module
        missing = [name for name in names if not hasattr(module, name)]
        assert not missing, f"{module.__name__}.__all__ names {missing}"


def test_everything_public_at_the_top_is_listed() -> None:
    public = {
        name
        for name, value in vars(transfuse).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public <= set(transfuse.__all__)


def test_every_error_is_exported_and_has_one_root() -> None:
    from transfuse import _errors

    for name in _errors.__all__:
        assert issubclass(getattr(_errors, name), transfuse.TransfuseError)
        assert getattr(transfuse, name) is getattr(_errors, name)


def test_the_signature_is_torchs_plus_keywords() -> None:
    from torch.distributed.checkpoint._pg_transport import PGTransport

    ours = inspect.signature(transfuse.PGTransport).parameters
    theirs = inspect.signature(PGTransport).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name in list(ours)[len(theirs) :]:
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY, name
    for method in ("send_checkpoint", "recv_checkpoint"):
        mine = list(inspect.signature(getattr(transfuse.PGTransport, method)).parameters)
        other = list(inspect.signature(getattr(PGTransport, method)).parameters)
        assert mine[: len(other)] == other


def test_version_changelog_and_package_agree() -> None:
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert declared is not None
    assert newest is not None
    assert declared[1] == newest[1] == transfuse.__version__


def imports(path: Path) -> set[str]:
    """The package's own modules that a file imports at its top, annotations aside."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transfuse"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if _is_module(name) else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("transfuse")}
    return found


def _is_module(name: str) -> bool:
    path = ROOT / "src" / Path(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_modules_import_only_from_below() -> None:
    """No circles: modules can be put into an order in which each imports only from those before it."""
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        graph[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = imports(path)
    while graph:
        ready = {name for name, needs in graph.items() if not (needs & graph.keys()) - {name}}
        assert ready, f"a circle among {sorted(graph)}"
        for name in ready:
            del graph[name]


#: The rooms of the package, bottom to top. A module imports from its own room and from those before it.
ROOMS = (
    (
        "_errors",
        "_limits",
        "_sizes",
        "_timeouts",
        "_tuning",
        "_phases",
        "_rules",
        "_arguments",
        "_log",
        "_progress",
        "_report",
        "_tls",
        "_workers",
    ),
    ("_state",),
    ("_options",),
    ("_plan",),
    ("_memory",),
    ("_wire",),
    ("_metrics",),
    ("_session",),
    ("_transport",),
    ("_job",),
    ("_heal",),
    ("_remote", "dropin"),
    ("_keeper", "_hub"),
    ("dcp",),
    ("",),
    ("integrations",),
    ("testing",),
    ("cli",),
)
MOST_FILES_AT_THE_TOP = 18
MOST_ROOMS = 14


def test_rooms_import_only_from_below() -> None:
    floor = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        room = parts[0].replace("__init__", "")
        for name in imports(path):
            other = name.split(".")[1] if "." in name else ""
            if room == "testing":
                assert other == "testing", f"{path} imports {name}: the conformance suite imports nothing else of ours"
            elif other != room:
                assert floor[other] < floor[room] or floor[other] == floor[room] == 0, f"{path} imports {name}"


#: Names of torch's and Python's own objects that are also private names of ours.
NOT_OURS = {"_C", "_devices", "_fields", "_make", "_timeout", "_values", "_version", "_work"}


@functools.cache
def private_names(tree: ast.AST) -> set[str]:
    """The private names that a class or a module defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_what_is_private_is_used_where_it_is_defined() -> None:
    """In its class, in functions of the same module, and among the classes of a module that are private themselves."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    ours = set().union(*map(private_names, trees.values())) - NOT_OURS
    reaches = []
    for path, tree in trees.items():
        private = [top for top in tree.body if isinstance(top, ast.ClassDef) and top.name.startswith("_")]
        for top in tree.body:
            homes = [top, *private] if isinstance(top, ast.ClassDef) else [tree]
            away = ours - set().union(*map(private_names, homes))
            for node in ast.walk(top):
                if isinstance(node, ast.Attribute) and node.attr in away:
                    whose = ast.unparse(node.value)
                    if whose not in ("self", "cls", "super()"):
                        reaches.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {whose}.{node.attr}")
    assert reaches == []


def test_the_listing_is_short() -> None:
    files = [path.name for path in PACKAGE.glob("*.py")]
    rooms = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert len(files) <= MOST_FILES_AT_THE_TOP, files
    assert len(rooms) <= MOST_ROOMS, rooms


#: Public classes that do the same for different callers, and are told apart by their module.
SHARED_NAMES = {"KeepCallback", "PGTransport"}


def test_a_class_name_has_one_home() -> None:
    """No two modules have classes of the same name, a leading underscore ignored."""
    homes: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1 and name not in SHARED_NAMES} == {}


def test_importing_starts_and_configures_nothing() -> None:
    """And brings nothing that takes long to import."""
    script = (
        "import logging, threading, transfuse; transfuse.heal\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not logging.getLogger('transfuse').handlers\n"
        "import sys; assert not {'rich', 'typer', 'torch.distributed.tensor', 'torch._dynamo'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


#: Lengths that a format fixes, and sums of others: they are with the format.
FIXED = {
    "BLOCK_BYTES", "DIGEST_BYTES", "HEADER_BYTES", "HEAD_BYTES", "HELLO_BYTES", "KEY_BYTES", "MARK_BYTES",
    "MAX_BASE_BYTES", "MAX_HEADER_BYTES", "MAX_SOCKET_NAME_BYTES", "MAX_SOCKET_PATH_BYTES", "NONCE_BYTES",
    "PROOF_BYTES", "ROW_BYTES", "TOKEN_BYTES", "WIDE_BYTES",
}  # fmt: skip


#: Two rules are tables of their own, and the launcher of ranks imports no room.
OTHER_TABLES = ("_tuning.py", "_sizes.py", "_timeouts.py", "testing")
#: What a call of these waits, or is willing to wait, is a time.
WAITS = {"acquire", "join", "settimeout", "sleep", "timedelta", "wait"}


def chosen_in(path: Path) -> Iterator[str]:
    """Each second and each byte that somebody chose here: constants by their names, and times that a call is given."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            if isinstance(node.value, ast.Constant | ast.BinOp | ast.Tuple):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
                numbers = [each for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
                yield from (name for name in names if re.search(r"_(SECONDS|BYTES)$", name))
                if any(type(number.value) in (int, float) for number in numbers):
                    yield from (name for name in names if re.search("TIMEOUT|PAUSE|PROBE", name))
        elif isinstance(node, ast.Call):
            waits = (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in WAITS
            times = [word.value for word in node.keywords if waits or word.arg in ("timeout", "seconds")]
            for time in [*node.args, *times] if waits else times:
                if any(is_chosen(part) for part in summands(time)):
                    yield f"line {node.lineno}: {ast.unparse(time)}"


def summands(time: ast.expr) -> Iterator[ast.expr]:
    """A time, and what it is the sum, the least or the largest of. A multiple of another time is that one's share."""
    yield time
    parts: list[ast.expr] = []
    if isinstance(time, ast.BinOp) and isinstance(time.op, ast.Add | ast.Sub):
        parts = [time.left, time.right]
    elif isinstance(time, ast.Call) and isinstance(time.func, ast.Name) and time.func.id in ("max", "min"):
        parts = time.args
    for part in parts:
        yield from summands(part)


def is_chosen(time: ast.expr) -> bool:
    parts = list(ast.walk(time))
    numbers = [part for part in parts if isinstance(part, ast.Constant) and type(part.value) in (int, float)]
    return any(number.value for number in numbers) and not any(isinstance(part, ast.Name) for part in parts)


def test_every_second_and_every_byte_that_somebody_chose_is_in_one_table() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in OTHER_TABLES:
            found += [f"{path.name}: {name}" for name in chosen_in(path) if name.lstrip("_") not in FIXED]
    assert found == []


def test_a_second_that_somebody_chose_is_found(tmp_path: Path) -> None:
    (tmp_path / "room.py").write_text(
        "WAIT_SECONDS = 3\nFIRST_PAUSE, AGAIN = 1, 2\nsleep(0.1)\ndone.wait(min(2, left))\nask(timeout=5)\n"
        "sleep(PAUSE)\ndone.wait(2 * PAUSE)\nlock.acquire(timeout=0)\nask(number=5)\nsleep(60 * 60)\n"
    )
    assert [found.partition(":")[0] for found in chosen_in(tmp_path / "room.py")] == [
        "WAIT_SECONDS", "FIRST_PAUSE", "line 3", "line 4", "line 5", "line 10",
    ]  # fmt: skip
