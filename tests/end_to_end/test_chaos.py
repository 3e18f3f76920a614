"""Scenarios of chaos, a few of each kind here and many in the soak; and that the judge of them is awake.

A scenario that fails is printed with its seed; ``python -m chaos --campaign NAME --seed N`` in this folder replays it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

import chaos
from chaos import CAMPAIGNS, KIB, MIB, Fault, Make, Plant, Receiving, Result, Scenario, Yard


@pytest.fixture(scope="module")
def yard() -> Iterator[Yard]:
    with Yard() as one:
        yield one


def check(result: Result, campaign: str = "anything") -> Result:
    __tracebackhide__ = True
    if result.complaints:
        replay = f"python -m chaos --campaign {campaign} --seed {result.plan.seed}"
        pytest.fail(f"{replay}\n{result.describe()}", pytrace=False)
    return result


PLAIN = Scenario(
    seed=-1,
    make=Make(5, 1 * MIB, 30),
    sources=1,
    receivers=(Receiving("same"),),
    verify=None,
    memory=False,
    hosts=False,
    parcel_bytes=16 * KIB,
    burst_bytes=32 * KIB,
    paced=None,
    timeout=3.0,
    fault=Fault(),
)
#: The source stops when half is sent: the receiver is torn.
TORN = dataclasses.replace(PLAIN, paced=0.5, fault=Fault("raise", 0, "bytes", 0.5))


# ------------------------------------------------------------------------------------------------------- the judge


@pytest.mark.parametrize(
    ("plan", "plant", "complaint"),
    [
        (PLAIN, "byte", "something else than was sent"),
        (dataclasses.replace(PLAIN, receivers=(Receiving("fresh"),)), "byte", "something else than was sent"),
        (PLAIN, "stray", "belong to no leaf"),
        (PLAIN, "late", "after the call had returned"),
        (PLAIN, "thread", "threads left"),
        (PLAIN, "file", "more files open"),
        (PLAIN, "slow", "more than"),
        (TORN, "byte", "not in torn"),
        (TORN, "late", "after the call had returned"),
        (TORN, "torn", "not in torn"),
        (TORN, "received", "said to be received"),
        (TORN, "missing", "not all leaves"),
    ],
)
def test_the_judge_finds_what_was_planted(yard: Yard, plan: Scenario, plant: Plant, complaint: str) -> None:
    result = yard.run(dataclasses.replace(plan, plant=plant))
    assert any(complaint in line for line in result.complaints), result.describe()


@pytest.mark.parametrize("plan", [PLAIN, TORN])
def test_the_judge_finds_nothing_where_nothing_was_planted(yard: Yard, plan: Scenario) -> None:
    assert check(yard.run(plan)).struck


def test_the_judge_finds_a_source_that_calls_a_failed_receiver_complete(yard: Yard) -> None:
    plan = dataclasses.replace(PLAIN, fault=Fault("corrupt", 0, "ops", 1, what="parcel", count=10_000))
    check(yard.run(plan))
    result = yard.run(dataclasses.replace(plan, plant="completed"))
    assert any("says that receiver 1 is complete" in line for line in result.complaints), result.describe()


# ------------------------------------------------------------------------------------------------------------ some


@pytest.mark.parametrize(
    ("campaign", "seed"),
    [
        ("kill-a-source", 0),
        ("kill-a-source", 1),
        ("kill-a-receiver", 0),
        ("corrupt", 0),
        ("corrupt", 1),
        ("freeze-a-source", 0),
    ],
)
def test_some_of_each_campaign(yard: Yard, campaign: str, seed: int) -> None:
    check(yard.run(CAMPAIGNS[campaign](seed)), campaign)


@pytest.mark.parametrize("seed", range(4))
def test_some_of_anything(yard: Yard, seed: int) -> None:
    check(yard.run(Scenario.draw(seed, ["none", "kill", "corrupt", "delay", "mutate", "raise"])))


# ------------------------------------------------------------------------------------------------------------ many


class Tally:
    """Counts what came of many scenarios, and shows it at the end."""

    def __init__(self, campaign: str) -> None:
        self.campaign, self.started = campaign, time.monotonic()
        self.counts: Counter[str] = Counter()
        self.failed: list[Result] = []

    def add(self, result: Result) -> None:
        self.counts["runs"] += 1
        self.counts["struck"] += result.struck
        if result.complaints:
            self.failed.append(result)
            print(result.describe(), flush=True)
        plan = result.plan
        for rank, e in result.evidence.items():
            if rank >= plan.sources:
                self.counts["exact" if e.error is None else type(e.error).__name__] += 1

    def done(self) -> None:
        seeds = [result.plan.seed for result in self.failed]
        print(f"\n{self.campaign}: {dict(self.counts)} in {time.monotonic() - self.started:.0f} s; failed: {seeds}")
        assert not seeds, f"{self.campaign}: complaints for seeds {seeds}, which are shown above"


def usual_seconds(yard: Yard, plans: list[Scenario]) -> float:
    """How long the receives of these take when nothing happens."""
    return statistics.median(check(yard.run(chaos.undisturbed(plan))).receive_seconds for plan in plans)


def strike(yard: Yard, campaign: str, number: int, limit: Callable[[Scenario, float], float]) -> None:
    """Play a campaign until ``number`` sources were struck; every receive is exact, and none takes too long."""
    draw, tally, slowest = CAMPAIGNS[campaign], Tally(campaign), 0.0
    usual = {kind: usual_seconds(yard, [draw(seed) for seed in range(kind, 28, 4)]) for kind in range(4)}
    for seed in range(2 * number):
        result = yard.run(draw(seed))
        if not result.struck:
            continue
        tally.add(result)
        allowed = limit(result.plan, usual[seed % 4])
        slowest = max(slowest, result.receive_seconds / allowed)
        if result.receive_seconds > allowed:
            result.complaints.append(f"took {result.receive_seconds:.2f} s, more than {allowed:.2f}")
            tally.failed.append(result)
        if tally.counts["struck"] == number:
            break
    print(f"undisturbed: {usual}; slowest: {slowest:.0%} of what it may take")
    tally.done()
    assert tally.counts["exact"] == tally.counts["struck"] == number


@pytest.mark.soak
def test_two_hundred_sources_are_killed_and_every_receive_is_exact(yard: Yard) -> None:
    strike(yard, "kill-a-source", 200, lambda plan, usual: 1.5 * usual + 1)


@pytest.mark.soak
def test_a_hundred_sources_freeze_and_every_receive_is_exact(yard: Yard) -> None:
    strike(yard, "freeze-a-source", 100, lambda plan, usual: plan.timeout + 1.5 * usual)


@pytest.mark.soak
def test_a_hundred_receivers_die_and_the_other_three_are_exact(yard: Yard) -> None:
    tally = Tally("kill-a-receiver")
    for seed in range(200):
        result = yard.run(chaos.kill_a_receiver(seed))
        if result.died:
            tally.add(result)
        if tally.counts["runs"] == 100:
            break
    tally.done()
    assert tally.counts["exact"] == 300


@pytest.mark.soak
def test_a_thousand_corruptions_are_found(yard: Yard) -> None:
    tally = Tally("corrupt")
    for seed in range(1300):
        result = yard.run(chaos.corrupt(seed))
        if not any(e.damaged for e in result.evidence.values()) and not result.complaints:
            continue  # There was nothing of that kind to damage any more.
        if not result.complaints and not found(result):
            # Everything is exact, bit for bit: what was damaged lay between the tensors of a packed parcel.
            tally.counts["in the gaps of a parcel"] += 1
            continue
        tally.add(result)
        repaired = any(e.report.get("repaired") for e in result.evidence.values())
        tally.counts["repaired" if repaired else "another source or an error"] += 1
        if tally.counts["runs"] == 1000:
            break
    tally.done()
    assert tally.counts["runs"] == 1000


def found(result: Result) -> bool:
    """Whether damage was noticed: repaired, or said in an error at one end or the other."""
    return any(e.error is not None or e.report.get("repaired") for e in result.evidence.values())


@pytest.mark.soak
def test_anything_for_ten_minutes(yard: Yard) -> None:
    tally, until = Tally("anything"), time.monotonic() + 600
    for seed in range(1000, 3000):
        if time.monotonic() > until:
            break
        result = yard.run(Scenario.draw(seed))
        tally.counts[f"fault {result.plan.fault.kind}"] += 1
        tally.add(result)
    tally.done()
