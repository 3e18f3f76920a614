"""The parent's part: runs scenarios, strikes, and judges."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, Self

import transfuse
from chaos.scenarios import SLACK, Scenario, undisturbed
from chaos.wires import Boom
from chaos.worker import Evidence, Leftovers, act, inspect, prepare
from transfuse.testing.ranks import Died, Fleet, Outcome

# ----------------------------------------------------------------------------------------------- the parent's part


@dataclasses.dataclass
class Result:
    """What came of a scenario."""

    plan: Scenario
    complaints: list[str]
    evidence: dict[int, Evidence]
    #: Ranks whose process ended.
    died: list[int]
    struck: bool
    payload: int = 0

    @property
    def receive_seconds(self) -> float:
        return max((e.seconds for rank, e in self.evidence.items() if rank >= self.plan.sources), default=0.0)

    def receiver(self, rank: int) -> Evidence | None:
        return self.evidence.get(rank)

    def describe(self) -> str:
        lines = [f"seed {self.plan.seed}", self.plan.lines(), f"  struck: {self.struck}, died: {self.died}"]
        for rank, e in sorted(self.evidence.items()):
            what = "ok" if e.error is None else f"{type(e.error).__name__}: {e.error}"
            role = "source" if rank < self.plan.sources else "receiver"
            lines.append(f"  {role} {rank}: {e.seconds:.3f} s, {what}")
        return "\n".join(lines + [f"  COMPLAINT: {line}" for line in self.complaints])


class Yard:
    """Processes in which scenarios run, kept as long as nothing has happened to them."""

    def __init__(self) -> None:
        self._fleets: dict[int, Fleet] = {}
        self.launched = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for size in list(self._fleets):
            self._end(size)

    def _end(self, size: int) -> None:
        fleet = self._fleets.pop(size)
        pids = fleet.pids
        fleet.close()
        for pid in pids:
            assert not pathlib.Path(f"/proc/{pid}").exists(), f"process {pid} is still there"
        left = [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]
        assert not left, f"left in /dev/shm: {left}"

    def _fleet(self, size: int) -> Fleet:
        if size not in self._fleets:
            fleet = Fleet(size)
            fleet.launch()
            self.launched += 1
            self._fleets[size] = fleet
        return self._fleets[size]

    def _renew(self, size: int) -> None:
        """A new group among the same processes: after an error connections may be closed for good."""
        if not self._fleets[size].renew(30):
            self._end(size)

    def run(self, plan: Scenario) -> Result:
        """Run one scenario and judge it. Whatever goes wrong with the run itself is a complaint too."""
        complaints: list[str] = []
        try:
            result = self._run(plan, complaints)
        except AssertionError as error:
            if plan.size in self._fleets:
                self._end(plan.size)
            return Result(plan, [*complaints, f"{error}"], {}, [], True)
        except BaseException:
            if plan.size in self._fleets:
                self._end(plan.size)
            raise
        fleet = self._fleets.get(plan.size)
        if fleet is not None:
            if result.complaints or any(worker.dead or worker.busy for worker in fleet.workers):
                self._end(plan.size)
            elif any(e.error is not None for e in result.evidence.values()) or plan.fault.kind == "freeze":
                self._renew(plan.size)
        if plan.resume and not result.complaints and plan.size in self._fleets:
            self._resume(plan, result)
        return result

    def _run(self, plan: Scenario, complaints: list[str]) -> Result:
        fleet, fault = self._fleet(plan.size), plan.fault
        payload = _values(self._all(fleet, prepare, plan))[0]
        fleet.start(act, plan, fleet.pids, payload)
        bound = plan.timeout + SLACK + plan.patience
        struck = fault.kind in ("none", "delay")
        frozen = False
        if fault.kind == "freeze":
            frozen = self._wait_for_freeze(fleet, plan, bound)
            if frozen and fault.thaw == "soon":
                time.sleep(fault.thaw_seconds)
                fleet.thaw(fault.victim)
                frozen = False
        others = [rank for rank in range(plan.size) if not (frozen and rank == fault.victim)]
        ended = dict(zip(others, fleet.outcomes(bound + 10, others), strict=True))
        if frozen:
            # One that never comes back is left with a thread; its own death ends that.
            complaints += self._inspect(fleet, plan, [rank for rank in others if not _died(ended[rank])], 1)
            if fault.thaw == "late":
                fleet.thaw(fault.victim)
            else:
                fleet.kill(fault.victim)
            ended[fault.victim] = fleet.outcomes(bound + 10, [fault.victim])[0]
        alive = [rank for rank, outcome in ended.items() if not _died(outcome)]
        complaints += self._inspect(fleet, plan, alive, 0)
        evidence: dict[int, Evidence] = {}
        died = []
        for rank, outcome in sorted(ended.items()):
            if _died(outcome):
                died.append(rank)
                if fault.kind not in ("kill", "freeze") or rank != fault.victim:
                    complaints.append(f"rank {rank} died: {outcome.error}")
            elif outcome.error is not None:
                complaints.append(f"rank {rank}: the harness itself failed: {outcome.error!r}\n{_notes(outcome.error)}")
            else:
                evidence[rank] = outcome.get()
        struck = struck or bool(died) or frozen or any(e.struck for e in evidence.values())
        complaints += _Judge(plan, evidence, died, bound).complaints()
        return Result(plan, complaints, evidence, died, struck, payload)

    def _wait_for_freeze(self, fleet: Fleet, plan: Scenario, bound: float) -> bool:
        announcer = plan.sources if plan.fault.when == "progress" else plan.fault.victim
        try:
            fleet.wait_for(announcer, "struck", bound + 10)
        except AssertionError:
            return False
        # The signal follows its announcement.
        until = time.monotonic() + 2
        stat = pathlib.Path(f"/proc/{fleet.pids[plan.fault.victim]}/stat")
        while time.monotonic() < until:
            if stat.read_text().rsplit(")", 1)[1].split()[0] in "tT":
                return True
            time.sleep(0.001)
        return False

    @staticmethod
    def _all(fleet: Fleet, fn: Callable[..., Any], *args: Any) -> list[Outcome[Any]]:
        fleet.start(fn, *args)
        return fleet.outcomes(30)

    @staticmethod
    def _inspect(fleet: Fleet, plan: Scenario, ranks: list[int], allowed: int) -> list[str]:
        if not ranks:
            return []
        fleet.start(inspect, plan, allowed, 0.5 if plan.plant else 3.0, ranks=ranks)
        complaints = []
        for rank, outcome in zip(ranks, fleet.outcomes(30, ranks), strict=True):
            left: Leftovers = outcome.get()
            if len(left.threads) > allowed:
                complaints.append(f"rank {rank} has threads left: {left.threads}")
            if left.files > 0:
                complaints.append(f"rank {rank} has {left.files} more files open than before")
            if left.late:
                complaints.append(f"rank {rank}: changed after the call had returned: {left.late[:5]}")
            if left.watches:
                complaints.append(f"rank {rank} still watches {left.watches} groups")
            if left.left_behind > allowed:
                complaints.append(f"rank {rank} has left {left.left_behind} lines behind")
            if left.children:
                complaints.append(f"rank {rank} has children: {left.children}")
        return complaints

    def _resume(self, plan: Scenario, result: Result) -> None:
        """Those that failed receive once more, and go on from where they were: now nothing disturbs them."""
        failed = [rank for rank, e in result.evidence.items() if rank >= plan.sources and e.error is not None]
        if not failed or plan.fault.kind == "mutate":
            return
        again = undisturbed(plan)
        fleet = self._fleets[plan.size]
        fleet.start(act, again, fleet.pids, result.payload)
        try:
            outcomes = fleet.outcomes(plan.timeout + SLACK + plan.patience + 10)
        except AssertionError as error:
            result.complaints.append(f"resuming: {error}")
            self._end(plan.size)
            return
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                result.complaints.append(f"resuming, rank {rank}: {outcome.error!r}\n{_notes(outcome.error)}")
                continue
            e: Evidence = outcome.get()
            if e.error is not None:
                result.complaints.append(f"resuming, rank {rank}: {e.error!r}")
            result.complaints += [f"resuming, rank {rank}: {line}" for line in e.differences[:5]]
            if e.strays:
                result.complaints.append(f"resuming, rank {rank}: {e.strays} stray bytes changed")
        if result.complaints:
            self._end(plan.size)


def _values(outcomes: list[Outcome[Any]]) -> list[Any]:
    return [outcome.get() for outcome in outcomes]


def _died(outcome: Outcome[Any]) -> bool:
    return isinstance(outcome.error, Died)


def _notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


class _Judge:
    """Says what is not as it must be."""

    def __init__(self, plan: Scenario, evidence: dict[int, Evidence], died: list[int], bound: float) -> None:
        self.plan, self.evidence, self.died, self.bound = plan, evidence, died, bound
        self.lines: list[str] = []

    def complaints(self) -> list[str]:
        for rank, e in sorted(self.evidence.items()):
            if e.seconds > self.bound and not (rank == self.plan.fault.victim and self.plan.fault.kind == "freeze"):
                self.lines.append(f"rank {rank} took {e.seconds:.2f} s, more than {self.bound:.2f}")
            if rank < self.plan.sources:
                self._judge_source(rank, e)
            else:
                self._judge_receiver(rank, e)
        return self.lines

    def _say(self, rank: int, what: str) -> None:
        self.lines.append(f"{'source' if rank < self.plan.sources else 'receiver'} {rank}: {what}")

    def _harmless(self) -> bool:
        """Faults that nobody should notice, the victim least of all."""
        fault = self.plan.fault
        return fault.kind in ("none", "delay") or (
            fault.kind == "freeze" and fault.thaw == "soon" and fault.thaw_seconds < self.plan.timeout / 3
        )

    def _must_be_exact(self, rank: int) -> bool:
        plan, fault = self.plan, self.plan.fault
        if self._harmless():
            return True
        if fault.victim >= plan.sources:
            return rank != fault.victim
        if plan.sources > 1:
            return True
        # Of a single source only damage that can be repaired is survived.
        return fault.kind == "corrupt" and fault.what in ("parcel", "digests", "mark") and fault.count == 1

    def _judge_receiver(self, rank: int, e: Evidence) -> None:
        how, fault = self.plan.receivers[rank - self.plan.sources], self.plan.fault
        if e.strays:
            self._say(rank, f"{e.strays} bytes changed that belong to no leaf")
        if e.error is None:
            for line in e.differences[:5]:
                self._say(rank, f"returned something else than was sent: {line}")
            return
        if self._must_be_exact(rank):
            self._say(rank, f"failed, and had no reason to: {type(e.error).__name__}: {e.error}")
        if isinstance(e.error, Boom) and fault.kind == "raise" and fault.victim == rank:
            torn = list(e.report.get("torn", ()))
        elif isinstance(e.error, transfuse.TransfuseError):
            torn = list(e.error.torn)
            self._judge_account(rank, e, e.error)
        else:
            self._say(rank, f"raised {e.error!r}")
            return
        if how.atomic and (torn or e.changed):
            self._say(rank, f"atomic, and torn={torn[:5]}, changed={e.changed[:5]}")
        if unsaid := set(e.changed) - set(torn):
            self._say(rank, f"changed, but not in torn: {sorted(unsaid)[:5]}")
        if invented := set(torn) - set(e.targets):
            self._say(rank, f"in torn, but no leaf of the target: {sorted(invented)[:5]}")

    def _judge_account(self, rank: int, e: Evidence, error: transfuse.TransfuseError) -> None:
        received, missing = list(error.received), list(error.missing)
        if not received and not missing:
            if e.changed or error.torn:
                self._say(rank, f"no account, though leaves changed: {e.changed[:5]}")
            return
        if set(received) & set(missing):
            self._say(rank, "a leaf is both received and missing")
        if set(received) | set(missing) != set(e.leaves) or len(received) + len(missing) != len(e.leaves):
            odd = (set(received) | set(missing)) ^ set(e.leaves)
            self._say(rank, f"received and missing are not all leaves: {sorted(odd)[:5]}")
        how = self.plan.receivers[rank - self.plan.sources]
        if how.mode != "fresh" and not how.atomic and (lies := set(received) & set(e.targets) - set(e.whole)):
            self._say(rank, f"said to be received, but not what the source has: {sorted(lies)[:5]}")

    def _judge_source(self, rank: int, e: Evidence) -> None:
        plan, fault = self.plan, self.plan.fault
        receivers = set(range(plan.sources, plan.size))
        victim = fault.victim == rank and not self._harmless()
        if e.error is None:
            completed, causes = receivers, {}
        elif isinstance(e.error, transfuse.SendFailed):
            completed, causes = set(e.error.completed), e.error.causes
        else:
            if not (isinstance(e.error, Boom) and fault.kind == "raise" and victim):
                self._say(rank, f"raised {e.error!r}")
            return
        if completed | set(causes) != receivers or completed & set(causes):
            self._say(rank, f"completed {sorted(completed)} and failed {sorted(causes)} are not all receivers")
        for peer, cause in causes.items():
            if not isinstance(cause, transfuse.TransfuseError):
                self._say(rank, f"receiver {peer} failed with {cause!r}")
            if not victim and (peer != fault.victim or self._harmless()):
                mine = self.evidence.get(peer)
                if mine is None or mine.error is None:
                    self._say(rank, f"says that receiver {peer} failed, which did not: {cause!r}")
        for peer in completed:
            theirs = self.evidence.get(peer)
            if theirs is not None and theirs.error is not None and not isinstance(theirs.error, Boom):
                self._say(rank, f"says that receiver {peer} is complete, which raised {theirs.error!r}")
            early = fault.when == "bytes" and fault.at < 0.9 and not plan.memory
            if peer in self.died and fault.kind == "kill" and (fault.when == "start" or early):
                self._say(rank, f"says that receiver {peer} is complete, which died half-way")
