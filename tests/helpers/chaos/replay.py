"""Campaigns, and scenarios played again."""

from __future__ import annotations

import argparse
import collections
import math
import time
from collections.abc import Callable, Sequence

from chaos.scenarios import Scenario, corrupt, freeze_a_source, kill_a_receiver, kill_a_source
from chaos.yard import Yard

# ------------------------------------------------------------------------------------------------------------- replay


#: How a scenario is drawn from a seed, by name.
CAMPAIGNS: dict[str, Callable[[int], Scenario]] = {
    "anything": Scenario.draw,
    "kill-a-source": kill_a_source,
    "freeze-a-source": freeze_a_source,
    "kill-a-receiver": kill_a_receiver,
    "corrupt": corrupt,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description="Replay scenarios of chaos.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from this one on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after this number of seconds")
    parser.add_argument("--campaign", choices=list(CAMPAIGNS), default="anything", help="how scenarios are drawn")
    parser.add_argument("--fault", help="only scenarios with this fault")
    parser.add_argument("--quiet", action="store_true", help="show only those with complaints")
    options = parser.parse_args(arguments)
    failed: list[int] = []
    counts: collections.Counter[str] = collections.Counter()
    until = time.monotonic() + options.seconds
    with Yard() as yard:
        for seed in range(options.seed, options.seed + options.count):
            plan = CAMPAIGNS[options.campaign](seed)
            if options.fault is not None and plan.fault.kind != options.fault:
                continue
            if time.monotonic() > until:
                break
            result = yard.run(plan)
            counts[plan.fault.kind] += 1
            counts["struck"] += result.struck
            if result.complaints:
                failed.append(seed)
            if result.complaints or not options.quiet:
                print(result.describe(), flush=True)
    print(f"{dict(counts)}; processes started {yard.launched} times; failed: {failed}")
    return 1 if failed else 0
