"""``import transfuse`` imports no torch, and all that it offers is found, whichever of the two comes first."""

from __future__ import annotations

import ast
import importlib.metadata
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import transfuse

HOME = Path(transfuse.__file__)


def run(*lines: str) -> str:
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_imports_neither_torch_nor_numpy() -> None:
    assert run("import sys, transfuse", "print({'torch', 'numpy', 'msgspec'} & set(sys.modules))") == "set()"


@pytest.mark.parametrize("first", ["transfuse", "torch.distributed"])
def test_a_group_is_formed_by_our_scheme_in_either_order(first: str) -> None:
    """And torch's module is as it would be without us."""
    lines = [
        f"import {first}",
        "import os, sys, transfuse; from datetime import timedelta",
        "finders = len(sys.meta_path)",
        "import torch.distributed as dist",
        "from transfuse.testing.ranks import loopback_store",
        "store = loopback_store(timedelta(seconds=30))",
        "agent = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(store.port), 'TORCHELASTIC_USE_AGENT_STORE': 'True'}",
        "os.environ.update(agent)",
        "dist.init_process_group('gloo', init_method='transfuse://', rank=0, world_size=1)",
        "theirs = sys.modules['torch.distributed.rendezvous']",
        "assert theirs.__loader__ is theirs.__spec__.loader",
        "print(dist.get_world_size(), type(theirs.__loader__).__name__, finders - len(sys.meta_path))",
    ]
    assert run(*lines) == f"1 SourceFileLoader {int(first == 'transfuse')}"


def test_whoever_only_looks_for_torchs_module_does_not_take_the_scheme_away() -> None:
    lines = [
        "import importlib.util, transfuse",
        "assert importlib.util.find_spec('torch.distributed.rendezvous')",
        "from torch.distributed.rendezvous import register_rendezvous_handler as register",
        "try: register('transfuse', print)",
        "except RuntimeError as error: print(error)",
    ]
    assert "transfuse" in run(*lines)


def test_type_checkers_and_python_are_told_the_same() -> None:
    (block,) = [node for node in ast.parse(HOME.read_text()).body if isinstance(node, ast.If) and not node.orelse][:1]
    told = {
        str(node.module): tuple(alias.name for alias in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert told == {f"transfuse.{home}": names for home, names in transfuse._HOMES.items()}
    assert dir(transfuse) == sorted(transfuse.__all__)


def test_the_first_name_that_needs_torch_brings_all_others() -> None:
    """So no call reads a module's file later, when no descriptor may be free, or the process is another user."""
    lines = [
        "import sys, transfuse",
        "transfuse.heal",
        "before = set(sys.modules)",
        "from transfuse import *",
        "print(sorted(set(transfuse.__all__) - set(vars(transfuse)) - set(globals())), set(sys.modules) - before)",
    ]
    assert run(*lines) == "[] set()"


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'transfuse' has no attribute 'Keeper'"):
        _ = transfuse.Keeper  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="Keeper"):
        from transfuse import Keeper  # type: ignore[attr-defined]  # noqa: F401


def test_public_classes_are_named_and_pickled_as_they_are_found() -> None:
    classes = [one for one in map(transfuse.__dict__.get, dir(transfuse)) if isinstance(one, type)]
    assert {one.__module__ for one in classes} == {"transfuse"}
    sent = transfuse.PeerLost(1, "gone"), transfuse.KeptStep(7, {0: "rng"}, 1)
    assert run("import sys, pickle", f"print(*pickle.loads({pickle.dumps(sent)!r}))") == f"gone {sent[1]}"
    # By what they were called in an earlier version.
    assert pickle.loads(b"ctransfuse._errors\nPeerLost\n.") is transfuse.PeerLost
    assert pickle.loads(b"ctransfuse._keeper.restoring\nKeptStep\n.") is transfuse.KeptStep


@pytest.mark.parametrize("first", ["transfuse", "torch"])
def test_what_a_fresh_process_pickles_is_loaded_here(first: str) -> None:
    made = "transfuse.PeerLost(1, 'gone'), transfuse.KeptStep(7, {}, 1)"
    error, step = pickle.loads(
        bytes.fromhex(run(f"import {first}, pickle, transfuse", f"print(pickle.dumps(({made})).hex())"))
    )
    assert type(error) is transfuse.PeerLost
    assert step == transfuse.KeptStep(7, {}, 1)
    assert run(f"import {first}, transfuse", "print(transfuse.PeerLost, transfuse.Keep)") == (
        "<class 'transfuse.PeerLost'> <class 'transfuse.Keep'>"
    )


def test_entry_points_resolve() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="transfuse")
    assert callable(command.load())
