"""Transformers' Trainer under a real torchrun: ranks are killed, and the end is that of an undisturbed run."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest

from framework_runs import compare, play_all, run, run_example
from keeping import Home, home, keepers_in, until  # noqa: F401

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="Transformers is not installed"),
    pytest.mark.processes,
    pytest.mark.timeout(900),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "forked",
    [["transformers.trainer", "transfuse.integrations.transformers"], pytest.param([], marks=pytest.mark.soak)],
    ids=["forked", "torchrun"],
)
def test_the_example(home: Home, forked: list[str]) -> None:  # noqa: F811
    said = run_example("keep_transformers.py", forked)
    assert sorted(line for line in said if line.startswith("rank ")) == [
        f"rank {rank} trained 7 of 16 steps after the restart" for rank in (0, 1)
    ]
    assert said[-1] == "kept: losses, weights and moments are those of the undisturbed run, bit for bit"
    until(lambda: not keepers_in(home.base))


#: What is done, and the step that the last restart goes on from. An epoch has 20 steps, with two ranks 10.
CASES: list[tuple[dict[str, Any], int]] = [
    ({"ranks": 1, "deaths": [(0, "backward", 14), (0, "backward", 20), (0, "backward", 21)]}, 21),
    ({"ranks": 2, "deaths": [(1, "backward", 14)]}, 14),
    # After train(), which has closed the run: only the last step, which no other one has followed, is done again.
    ({"ranks": 1, "deaths": [(0, "trained", 0)]}, 59),
    (
        {
            "ranks": 2,
            "deaths": [(0, "backward", 7), (1, "evaluate", 12), (0, "save", 16)],
            "arguments": {
                "max_steps": 18,
                "gradient_accumulation_steps": 2,
                "save_strategy": "steps",
                "save_steps": 4,
                "dataloader_num_workers": 2,
            },
        },
        15,
    ),
    # Processes that stay draw a random number in the first epoch only.
    (
        {
            "ranks": 1,
            "deaths": [(0, "backward", 9), (0, "backward", 27)],
            "arguments": {
                "num_train_epochs": 3,
                "dataloader_num_workers": 1,
                "dataloader_persistent_workers": True,
            },
        },
        27,
    ),
    # Steps of three batches; the last of an epoch has two.
    ({"ranks": 1, "deaths": [(0, "backward", 9)], "arguments": {"max_steps": 16, "gradient_accumulation_steps": 3}}, 9),
    ({"ranks": 1, "deaths": [(0, "backward", 15)], "keep": {"every": 4}}, 12),
    (
        {
            "ranks": 1,
            "deaths": [(0, "backward", 15)],
            "arguments": {"eval_on_start": True, "eval_strategy": "epoch", "lr_scheduler_type": "cosine"},
        },
        15,
    ),
]


@pytest.mark.soak
def test_many_deaths(home: Home) -> None:  # noqa: F811
    play_all("kept_transformers", CASES)


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [[], ["--standalone"]], ids=["plain", "standalone"])
def test_by_torchrun(home: Home, tmp_path: pathlib.Path, arguments: list[str]) -> None:  # noqa: F811
    import kept_transformers
    from kept_transformers import Plan

    plain = run(kept_transformers.__file__, Plan(str(tmp_path / "plain")), arguments)
    plan = Plan(str(tmp_path / "killed"), deaths=[(1, "backward", 6), (0, "backward", 7)])
    compare(run(kept_transformers.__file__, plan, arguments), plain, 7)
    until(lambda: not keepers_in(home.base))


@pytest.mark.soak
def test_four_ranks_meet_again(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    """With torch's own rendezvous no restart of four ranks comes up. TrainingArguments make the group here."""
    import kept_transformers
    from kept_transformers import Plan

    plan = Plan(str(tmp_path / "killed"), ranks=4, deaths=[(3, "backward", 4)])
    assert {some[-1]["restored"] for some in run(kept_transformers.__file__, plan)} == {4}
