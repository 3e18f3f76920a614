"""Lightning's Trainer under torchrun: ranks are killed, and the end is that of an undisturbed run."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest

from framework_runs import compare, play_all, run, run_example
from keeping import Home, home, keepers_in, until  # noqa: F401

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"),
    pytest.mark.processes,
    pytest.mark.timeout(900),
]

RANKS: Any = {"ranks": 2, "strategy": "ddp"}


@pytest.mark.long
@pytest.mark.parametrize(
    "forked",
    [["lightning.pytorch", "transfuse.integrations.lightning"], pytest.param([], marks=pytest.mark.soak)],
    ids=["forked", "torchrun"],
)
def test_the_example(home: Home, forked: list[str]) -> None:  # noqa: F811
    said = run_example("keep_lightning.py", forked)
    assert sorted(line for line in said if line.startswith("rank ")) == [
        f"rank {rank} trained 9 of 18 steps after the restart" for rank in (0, 1)
    ]
    assert said[-1] == "kept: losses, weights and moments are those of the undisturbed run, bit for bit"
    until(lambda: not keepers_in(home.base))


#: What is done, and the step that the last restart goes on from. An epoch has 10 batches, with two ranks 5.
CASES: list[tuple[dict[str, Any], int]] = [
    ({"ranks": 1, "deaths": [(0, "backward", 14)]}, 14),
    # At the beginning of an epoch, and in the first step after a restart.
    ({"ranks": 1, "deaths": [(0, "backward", 10), (0, "backward", 11)]}, 11),
    # Steps of three batches; the last of an epoch has one.
    ({"ranks": 1, "deaths": [(0, "backward", 25)], "trainer": {"max_steps": 13, "accumulate_grad_batches": 3}}, 9),
    # Validation in the middle of an epoch is done again, once.
    ({"ranks": 1, "deaths": [(0, "validate", 9)], "trainer": {"max_epochs": 3, "val_check_interval": 3}}, 12),
    ({"ranks": 1, "deaths": [(0, "backward", 15)], "workers": 2, "keep": {"every": 4}}, 12),
    ({**RANKS, "deaths": [(1, "backward", 7)]}, 7),
    # The last checkpoint is older than what the keeper holds.
    ({**RANKS, "deaths": [(1, "backward", 8)], "checkpoints": True}, 8),
    ({**RANKS, "deaths": [(1, "backward", 8)], "workers": 2}, 8),
    (
        {
            **RANKS,
            "deaths": [(1, "validate", 9), (0, "epoch_end", 9), (1, "backward", 10), (0, "backward", 16)],
            "trainer": {"max_epochs": 4, "val_check_interval": 2},
        },
        16,
    ),
    # DDP's first forward pass broadcasts rank 0's statistics; during manual optimization no other one does.
    ({**RANKS, "deaths": [(1, "backward", 7)], "manual": True}, 7),
    # Processes that stay draw a random number in the first epoch only: killed there, later, and between two.
    ({"ranks": 1, "deaths": [(0, "backward", 4), (0, "backward", 15)], "workers": 1, "persistent": True}, 15),
    ({"ranks": 1, "deaths": [(0, "backward", 10)], "workers": 1, "persistent": True}, 10),
    ({"ranks": 2, "strategy": "fsdp2", "deaths": [(1, "backward", 7)]}, 7),
    # After fit(), which has closed the run: only the last step, which no other one has followed, is done again.
    ({"ranks": 1, "deaths": [(0, "fitted", 0)]}, 29),
]


@pytest.mark.soak
def test_many_deaths(home: Home) -> None:  # noqa: F811
    play_all("kept_lightning", CASES)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("arguments", [[], ["--standalone"]], ids=["plain", "standalone"])
def test_by_torchrun(home: Home, tmp_path: pathlib.Path, strategy: str, arguments: list[str]) -> None:  # noqa: F811
    import kept_lightning
    from kept_lightning import Plan

    plain = run(kept_lightning.__file__, Plan(str(tmp_path / "plain"), strategy=strategy), arguments)
    plan = Plan(str(tmp_path / "killed"), strategy=strategy, deaths=[(1, "backward", 6), (0, "backward", 7)])
    compare(run(kept_lightning.__file__, plan, arguments), plain, 7)
    until(lambda: not keepers_in(home.base))


@pytest.mark.soak
def test_four_ranks_meet_again(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    """With torch's own rendezvous no restart of four ranks comes up. Their sums differ in the last bits."""
    import kept_lightning
    from kept_lightning import Plan

    plan = Plan(str(tmp_path / "killed"), strategy="ddp", ranks=4, deaths=[(3, "backward", 4)], samples=64)
    assert {some[-1]["restored"] for some in run(kept_lightning.__file__, plan)} == {4}
