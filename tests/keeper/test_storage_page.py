"""docs/storage.md: its reader, run as it is printed, reads what keepers write."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from keeping import Home, home, threaded  # noqa: F401
from saving import Committed, flip, state_of
from shards import shard
from transfuse._keeper.storage import Storage

pytestmark = pytest.mark.usefixtures("threaded")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "storage.md"


@pytest.fixture
def directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps").mkdir()
    return tmp_path / "steps"


def printed() -> dict[str, Any]:
    """What the page's programs define."""
    found: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(code, "docs/storage.md", "exec"), found)
    return found


def test_the_reader_of_the_page(home: Home, directory: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    whole = torch.randn(8, 6)
    half = torch.randn(7).bfloat16()
    states = [
        state_of(rank) | {"shard": shard(whole, range(2), rank, Shard(0)), "half": half, "view": whole[:, 2].clone()}
        for rank in range(2)
    ]
    Committed(home, states, rank_state=lambda: {"rng": torch.arange(9)}).write(Storage.at(directory))
    page = printed()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "steps/step-7-gen-1"
    assert "large float32 (524288,)" in shown
    for rank, state in enumerate(states):
        found = page["read"](directory / "step-7-gen-1", rank)
        assert found.keys() == {f"small.{n}" for n in range(20)} | state.keys() - {"small", "n"}
        for name in ("large", "mine", "odd", "none", "view"):
            assert torch.equal(torch.from_numpy(found[name].copy()), state[name])
        assert all(torch.equal(torch.from_numpy(found[f"small.{n}"].copy()), state["small"][n]) for n in range(20))
        assert torch.equal(torch.from_numpy(found["shard"].copy()), whole.chunk(2)[rank])
        assert torch.equal(torch.from_numpy(found["half"].copy()).view(torch.bfloat16), half)


def test_it_finds_damage(home: Home, directory: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    Committed(home, [state_of(0), state_of(1)]).write(Storage.at(directory))
    step = directory / "step-7-gen-1"
    page = printed()
    assert list(page["damage"](step)) == []
    for name, at, told in (
        ("step.json", (step / "step.json").read_bytes().index(b'"step": 7') + 8, "step.json"),
        ("rank-1.slot", 20, "rank-1.slot"),
        ("rank-0.slot", (step / "rank-0.slot").stat().st_size - 1, "rank-0.slot: "),
    ):
        flip(step / name, at, 4)
        (found,) = page["damage"](step)
        assert found.startswith(told)
        flip(step / name, at, 4)
