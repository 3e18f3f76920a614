"""The benchmarks run, tiny, and check what they measure."""

from __future__ import annotations

import importlib
import json
import pathlib
from types import ModuleType

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.core")


def test_core(core: ModuleType, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "core.json"
    assert core.main(["--scale", "0.01", "--runs", "1", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("bit for bit") == 9
    written = json.loads(path.read_text())
    assert len(written["cases"]) == 3
    assert all(move["verified"] for moves in written["cases"].values() for move in moves)
    assert {"date", "command", "machine", "versions", "runs"} <= set(written)


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--scale", "-1"]])
def test_core_refuses_nonsense(core: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        core.main(arguments)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.name)
def test_stored_results_say_where_they_come_from(path: pathlib.Path) -> None:
    written = json.loads(path.read_text())
    assert path.name.startswith(written["date"])
    assert {"command", "machine", "versions"} <= set(written)
