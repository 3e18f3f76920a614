"""The public face: names, versions, and which module imports which."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
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
    "DIGEST_BYTES", "HEADER_BYTES", "HEAD_BYTES", "HELLO_BYTES", "KEY_BYTES", "MARK_BYTES", "MAX_HEADER_BYTES",
    "MAX_SOCKET_NAME_BYTES", "MAX_SOCKET_PATH_BYTES", "MAX_BASE_BYTES", "NONCE_BYTES", "PROOF_BYTES",
    "ROW_BYTES", "TOKEN_BYTES", "WIDE_BYTES", "BLOCK_BYTES",
}  # fmt: skip


#: Two rules are tables of their own; the launcher of ranks, and what stands on the public face alone, import no room.
OTHER_TABLES = ("_tuning.py", "_sizes.py", "_timeouts.py", "integrations", "testing")


def test_every_second_and_every_byte_that_somebody_chose_is_in_one_table() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in OTHER_TABLES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp | ast.Tuple):
                targets: list[ast.expr] = node.targets
            elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant | ast.BinOp | ast.Tuple):
                targets = [node.target]
            else:
                continue
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            chosen = [name for name in names if re.search(r"_(SECONDS|BYTES)$", name)]
            found += [f"{path.name}: {name}" for name in chosen if name.lstrip("_") not in FIXED]
    assert found == []
