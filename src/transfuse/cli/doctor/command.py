"""The command: print every finding, with a remedy for what is wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transfuse._limits import allows_same_host, allows_streams
from transfuse._sizes import human_bytes
from transfuse.cli.doctor import network, nixl, permission, setup, trial
from transfuse.cli.doctor.finding import Finding
from transfuse.cli.errors import Exit
from transfuse.cli.options import AsJson
from transfuse.cli.tables import printable

__all__ = ["doctor"]

STYLES = {"ok": "green", "note": "dim", "warn": "yellow", "fail": "red"}


def doctor(as_json: AsJson = False) -> None:
    """Say which routes work on this machine and why not, which network interface gloo takes, and what is installed.

    Two processes move a state between them by each route: straight from memory, and over a gloo group as a job would
    make it with this environment. Takes some ten seconds.

    Exit code 0 if transfers work here, by whatever route; 1 if none does: nothing moves without a group.
    """
    settings = list(setup.variables(os.environ))
    if any(finding.status == "fail" for finding in settings):
        outcome = trial.TrialOutcome({}, (), False, "", "not tried, because a setting is wrong")
    else:
        with Console(stderr=True, quiet=not sys.stderr.isatty()).status("Trying the routes between two processes …"):
            outcome = trial.try_routes()
    findings = [*_routes(outcome), nixl.look(), *setup.look_around(), *settings]
    group = outcome.tried.get("group")
    works = group is not None and group.bytes_per_second is not None
    if as_json:
        print(json.dumps({"works": works, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _show(findings)
    if not works:
        raise typer.Exit(Exit.FAILED)


def _routes(outcome: trial.TrialOutcome) -> Iterator[Finding]:
    memory, group = outcome.tried.get("memory"), outcome.tried.get("group")
    if outcome.error:
        yield Finding("fail", "routes", printable(outcome.error))
    if memory is not None:
        yield _memory(memory)
    host, there = network.addresses_of_host(), network.interfaces()
    ifname = os.environ.get(network.IFNAME_VARIABLE)
    if group is not None and group.bytes_per_second is None:
        names = ", ".join(there)
        remedy = f"set {network.IFNAME_VARIABLE} to an interface that there is: {names}"
        yield Finding("fail", "group route", f"no gloo group can be made: {printable(group.reason)}", remedy)
    elif group is not None and group.bytes_per_second is not None:
        yield Finding(
            "ok", "group route", f"works: {human_bytes(group.bytes_per_second)}/s between two ranks of a gloo group"
        )
        yield _streams(outcome.port)
        yield network.judge(outcome.addresses, ifname, host, there)
        yield Finding(
            "ok" if outcome.chains else "warn",
            "chains",
            "receivers on several hosts can pass a state on over gloo and MPI; over NCCL each is served by the source",
        )
    shown = "; ".join(f"{name} {', '.join(addresses)}" for name, addresses in there.items())
    yield Finding("note", "interfaces", shown or "none")


def _streams(port: str) -> Finding:
    about = "streams"
    if port:
        return Finding(
            "ok", about, f"ranks that have met over a group go on over connections of their own, here to {port}"
        )
    if not allows_streams():
        why = "TRANSFUSE_STREAMS=0" if os.environ.get("TRANSFUSE_STREAMS") else "GLOO_DEVICE_TRANSPORT=TCP_TLS"
        return Finding("note", about, f"switched off by {why}: the group carries everything")
    ports = os.environ.get("TRANSFUSE_PORT", "any")
    return Finding(
        "warn",
        about,
        f"this process cannot listen (TRANSFUSE_PORT: {ports}): the group carries everything, more slowly",
        "let it listen on some port, or set TRANSFUSE_STREAMS=0 so that nobody tries",
    )


def _memory(tried: trial.Tried) -> Finding:
    about = "memory route"
    if tried.bytes_per_second is not None:
        rate = human_bytes(tried.bytes_per_second)
        return Finding("ok", about, f"works: {rate}/s between two processes of this machine")
    try:
        allowed = allows_same_host()
    except ValueError:
        allowed = True
    if not allowed:
        return Finding(
            "warn", about, "switched off by TRANSFUSE_SAME_HOST=0", "unset it: everything goes over the group"
        )
    found = list(permission.reasons(permission.facts()))
    because = f": {'; '.join(cause for cause, _ in found)}" if found else ""
    remedy = "; ".join(dict.fromkeys(remedy for _, remedy in found)) or "transfers on one host go over the group"
    return Finding("warn", about, f"does not work here: {printable(tried.reason)}{because}", remedy)


def _show(findings: Sequence[Finding]) -> None:
    if sys.stdout.isatty():
        table = Table.grid(padding=(0, 2, 0, 0))
        for finding in findings:
            text = Text(finding.text)
            if finding.remedy:
                text.append(f"\n→ {finding.remedy}", style="bold" if finding.status in ("warn", "fail") else "")
            table.add_row(Text(finding.status, style=STYLES[finding.status]), Text(finding.about), text)
        Console(highlight=False).print(table)
        return
    width = max(len(finding.about) for finding in findings)
    for finding in findings:
        print(f"{finding.status:<4}  {finding.about:<{width}}  {finding.text}")
        if finding.remedy:
            print(f"{'':<{width + 8}}→ {finding.remedy}")
