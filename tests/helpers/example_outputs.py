"""What each example says, on how many ranks it runs, and what checks it."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


# ----------------------------------------------------------------------------------------------- what each says


def heal(output: str) -> None:
    assert output.splitlines() == ["healed: ranks agree bit for bit"]


def fanout(output: str) -> None:
    # Under torchrun three ranks write to one pipe: their lines may run into each other.
    assert "rank 1: received everything: True" in output
    assert "source: complete for ranks [1]" in output
    assert "rank 2: refused, target untouched: True" in output
    assert "source: rank 2 has nothing: PeerRefused" in output


def reshard(output: str) -> None:
    *moves, last = output.splitlines()
    assert last == "weights equal bit for bit, logits as in a single process"
    assert [line.split(" got ")[0] for line in moves] == [f"step {s}: engine {e}" for s in (5, 8) for e in (0, 1, 2)]
    got, kept = [], []
    for line in moves:
        *parts, here = map(float, re.findall(r"([\d.]+) KiB", line))
        got.append(sum(parts))
        kept.append(here)
    # The embedding is frozen: 2000 rows of 96 bfloat16, of which the ranks have 667, 667 and 666.
    assert kept == [0, 0, 0, 125.1, 125.1, 124.9]
    assert [a + b for a, b in zip(got[3:], kept[3:], strict=True)] == pytest.approx(got[:3], abs=0.2)


def heal_hsdp(output: str) -> None:
    move, loss, last = output.splitlines()
    assert last == "healed: every loss on every rank as in the undisturbed run"
    assert re.fullmatch(r"loss in step 10: [\d.]+, in the last [\d.]+", loss)
    # Weights and two moments of 49 of the 99 rows; the last layer's only row is at the first rank of a replica. And six
    # counters of steps, which every rank has.
    floats = 3 * (49 * 33 + 49 * 100) + 6
    assert move.startswith(f"rank 3: {4 * floats:,} bytes, by source ")


def shrink(output: str) -> None:
    *moves, gone, losses, last = output.splitlines()
    assert last == "shrunk: state and losses as from a checkpoint, bit for bit"
    assert gone == "rank 3 has sent what it held"
    assert re.fullmatch(r"losses: [\d.]+ to [\d.]+; with four, [\d.]+ to [\d.]+", losses)
    found = [re.fullmatch(r"rank (\d) has ([\d,]+) bytes: ([\d,]+) of its own, ([\d,]+) from others", m) for m in moves]
    numbers = [[int(group.replace(",", "")) for group in match.groups()] for match in found if match is not None]
    # Weights and two moments of 34, 34 and 32 of the 100 rows, the last layer at rank 0; and six counters of steps.
    floats = [3 * (rows * 33 + rows * 101 + more) + 6 for rows, more in ((34, 101), (34, 0), (32, 0))]
    assert [row[:2] for row in numbers] == [[rank, 4 * count] for rank, count in enumerate(floats)]
    assert all(total == own + others for _, total, own, others in numbers)


def from_pgtransport(output: str) -> None:
    ways = ("before", "receiver_first", "source_first", "after")
    assert output.splitlines() == [f"{way}: equal: True" for way in ways]


def resume(output: str) -> None:
    assert "rank 0 gave up: something is wrong with this source\n" in output
    assert "torn: [\"['weight']\"" in output
    assert "some was kept: True, the rest came: True, everything is right: True\n" in output


def heal_ddp(output: str) -> None:
    assert all(f"rank {rank} goes on with step 5\n" in output for rank in range(3))
    assert output.endswith("healed: every loss and weight on every rank as in the undisturbed run\n")


def keep(output: str) -> None:
    *restored, last = output.splitlines()
    assert last == "kept: losses, weights and moments are those of the undisturbed run, bit for bit", output
    # The kill comes in the middle of step 17. All steps before it were committed, so none of them is done again.
    assert sorted(restored) == [f"rank {rank} goes on with step 17" for rank in range(2)], output


def serve(output: str) -> None:
    assert output.splitlines() == [
        "joined in the middle: True",
        "fetched from both: equal bit for bit to a run that nobody joined",
    ]


#: What is run on how many ranks, and what starts its own processes.
RANKS: dict[Callable[[str], None], int] = {
    heal: 2,
    fanout: 3,
    reshard: 5,
    shrink: 4,
    from_pgtransport: 2,
    resume: 3,
}


ALONE = [heal_ddp, heal_hsdp, serve]


#: What torchrun itself restarts, and on how many ranks.
RESTARTED: dict[Callable[[str], None], int] = {keep: 2}


#: What other tests run.
ELSEWHERE = {
    "keep_lightning": "integrations/test_lightning.py",
    "keep_transformers": "integrations/test_transformers.py",
    "live_hub": "hub/test_hub_clients.py",
    "observe": "session/test_progress.py",
    "ray_transport": "integrations/on_ray.py",
    "torchft_heal": "dropin/test_dropin_torchft.py",
    "rejoin": "end_to_end/test_examples.py",
}
