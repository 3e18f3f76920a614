"""The keepers of runs as a table: a row for each host, and below it what is wrong and what each holds."""

from __future__ import annotations

from typing import Any

from transfuse._keeper.files import read_past
from transfuse._sizes import human_bytes
from transfuse.cli.keepers import ALIVE, DEAD, FoundRun
from transfuse.cli.tables import Column, printable

__all__ = ["COLUMNS", "holdings", "name_of", "rows", "trouble"]

COLUMNS = (
    Column("run", wraps=True),
    Column("host", right=True),
    Column("keeper"),
    Column("pid", right=True),
    Column("attached"),
    Column("step", right=True),
    Column("newest", right=True),
    Column("lag", right=True),
    Column("committed"),
    Column("rate", right=True),
    Column("saved", right=True),
    Column("memory", right=True),
    Column("replicas", right=True),
)


def name_of(found: FoundRun) -> str:
    return printable(found.run.name) if found.run.is_named else f"(no name: {found.directory.name})"


def rows(found: FoundRun) -> list[tuple[str, ...]]:
    """A row for each host of a run, this one and those that its keeper knows."""
    if found.state != ALIVE:
        return [(name_of(found), "", found.state, str(found.pid or ""), *[""] * (len(COLUMNS) - 4))]
    hosts = _hosts(found)
    steps = [one["commit"]["step"] for one in hosts if one.get("commit") and one["commit"]["step"] is not None]
    return [_row(found, one, len(hosts), max(steps, default=None)) for one in hosts]


def trouble(found: FoundRun) -> list[str]:
    """What is wrong, a line each."""
    name = name_of(found)
    if found.state == DEAD:
        past = read_past(found.directory)
        told = "its keeper is dead; its log may say why" if past is None else past.tell(None)
        return [f"{found.directory}: {told}; --stop removes it"]
    if found.state != ALIVE:
        return [f"{name}: its keeper does not answer: it was stopped, or the machine is too busy"]
    hosts, lines = _hosts(found), []
    for one in hosts:
        where = f"{name}, host {one['host']}" if len(hosts) > 1 else name
        if "why" in one:
            lines.append(f"{where}: {one['door']} does not answer: {printable(one['why'])}")
        of_storage = (one.get("storage") or {}).get("trouble", "")
        lines += [f"{where}: {printable(text)}" for text in (*one.get("trouble", ()), of_storage) if text]
    return lines


def _hosts(found: FoundRun) -> list[dict[str, Any]]:
    states = found.status["states"]
    own = {
        **found.status,
        "host": found.status["replicas"].get("host", 0),
        "keeper": found.state,
        "replicas_held": sum(one["replica"] for one in states),
    }
    return sorted([own, *found.hosts], key=lambda one: one["host"])


def _row(found: FoundRun, one: dict[str, Any], hosts: int, newest: int | None) -> tuple[str, ...]:
    head = name_of(found), str(one["host"]) if hosts > 1 else ""
    if "why" in one:
        return (*head, one["keeper"], "", ranges(one["ranks"]), *[""] * (len(COLUMNS) - 5))
    state, commit = one["keeper"], one["commit"]
    if one["draining"] is not None:
        state = "drains"
    elif one["ended_step"] is not None:
        state = f"ended at step {one['ended_step']}"
    mine, most = commit["step"], one["max_bytes"]
    return (
        *head,
        state,
        str(one["pid"]),
        ranges(one["attached"]) or "none",
        _step(one["confirmed_step"]),
        _step(mine),
        str(newest - mine) if hosts > 1 and newest is not None and mine is not None else "",
        "" if commit["seconds_ago"] is None else f"{_seconds(commit['seconds_ago'])} ago",
        f"{commit['per_second']:.2g}/s" if commit["per_second"] else "",
        _saved(one),
        human_bytes(one["bytes"]) + ("" if most is None else f" of {human_bytes(most)}"),
        str(one["replicas_held"]) if one["replicas"]["hosts"] > 1 else "",
    )


def _step(step: int | None) -> str:
    return "none" if step is None else str(step)


def _saved(one: dict[str, Any]) -> str:
    """The newest step on storage, where the keepers save any."""
    storage = one.get("storage")
    return "" if storage is None else _step(max(storage["saved"], default=None))


def stored(storage: dict[str, Any]) -> str:
    """What is on storage: ``has saved steps 300, 200 in /data; saving step 400``. Only the leader knows all of it."""
    steps = ", ".join(map(str, storage["saved"]))
    told = f"has saved step{'s' * (len(storage['saved']) > 1)} {steps}" if steps else "has saved nothing yet"
    told += f" in {storage['directory']}" if storage["every"] is not None else f", and reads {storage['directory']}"
    if storage.get("saving") is not None:
        told += f"; saving step {storage['saving']}, {human_bytes(storage['written_bytes'])} so far"
    return told


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def holdings(states: list[dict[str, Any]]) -> str:
    """What a keeper holds, newest first: ``step 4 (rank 0), step 4 of host 1 (rank 1), step 3 (rank 0, not whole)``."""
    ranks: dict[tuple[int, int, bool, int, bool], list[int]] = {}
    for one in states:
        host = -1 if one["host"] is None else one["host"]
        key = (-one["generation"], -one["step"], one["replica"], host, not one["whole"])
        ranks.setdefault(key, []).append(one["rank"])
    told = []
    for (_, step, is_replica, host, is_torn), some in sorted(ranks.items()):
        whose = "" if not is_replica else f" of host {host}" if host >= 0 else " of a host that is gone"
        plural = "s" if len(some) > 1 else ""
        told.append(f"step {-step}{whose} (rank{plural} {ranges(some)}{', not whole' if is_torn else ''})")
    return ", ".join(told)


def ranges(ranks: list[int]) -> str:
    """Ranks in few characters: ``0-3 6``."""
    runs_of: list[list[int]] = []
    for rank in ranks:
        if runs_of and rank == runs_of[-1][-1] + 1:
            runs_of[-1].append(rank)
        else:
            runs_of.append([rank])
    return " ".join(str(some[0]) if len(some) == 1 else f"{some[0]}-{some[-1]}" for some in runs_of)
