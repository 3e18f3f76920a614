"""``transfuse fetch``: write the state of servers, of a keeper or in a directory of steps to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import transfuse
from transfuse._limits import Limits
from transfuse._plan.regions import lay_out
from transfuse._report import Report
from transfuse._sizes import human_bytes
from transfuse._state.manifest import Manifest, describe
from transfuse.cli import files, reaching, safetensors_file
from transfuse.cli.errors import Failed, warnings_shown
from transfuse.cli.files import SUFFIXES, Format
from transfuse.cli.options import (
    AsJson,
    Seconds,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsNames,
    TokenFile,
    bytes_of,
    check_settings,
    check_step,
    duration_of,
    encrypt_by,
)
from transfuse.cli.tables import count_leaves

__all__ = ["fetch"]

#: How many reasons a refusal lists.
MAX_NAMED = 3


@dataclass(frozen=True)
class Goal:
    """The file to write."""

    path: Path
    how: Format


def fetch(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS|DIR",
            help="A server's host:port. Several, if they serve one state. Or `keeper:RUN` for the keeper of a run. Or "
            "a directory of steps, or its URL.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "--output",
            "-o",
            metavar="FILE",
            help="`.safetensors`, or `.pt`, `.pth`, `.bin` for torch.save. Without such a suffix one is chosen.",
        ),
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    token_file: TokenFile = None,
    step: Annotated[int | None, typer.Option(min=0, help="Accept this step of the state only.")] = None,
    timeout: Seconds = 30,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Refuse states that are larger. Default: this machine's memory.")
    ] = None,
    same_host: Annotated[bool, typer.Option(help="Read straight from the memory of a server on this host.")] = True,
    verify: Annotated[
        bool | None, typer.Option(help="Compare digests. Default: of all that comes over the network.")
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_names: TlsNames = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a state and write it to a file, whole or not at all.

    Whether the state fits into the file is checked before a tensor moves. safetensors holds dicts of plain tensors,
    nested too (their keys are joined by dots, and kept in the metadata), but no values, no tied tensors, no sparse
    ones. What it cannot hold is refused with the reason; torch.save holds everything. DTensors are written whole, as
    plain tensors.
    """
    found = reaching.resolved(addresses, step)
    encrypt_by(tls_cert, tls_key, tls_ca, tls_names)
    check_settings()
    check_step(step)
    largest = bytes_of(max_size) if max_size is not None else None
    with warnings_shown("fetch"), reaching.reached(found, token_file, timeout) as servers:
        # Without a known suffix the command writes another file, beside this one.
        files.check_place(out, overwrite or out.suffix not in SUFFIXES)
        seen = reaching.manifests(servers, timeout)
        goal = _goal(out, seen)
        files.check_place(goal.path, overwrite)
        # Replicas bring the same bytes, so the file is at least as large as the largest server's state.
        files.check_room(goal.path, max(int(lay_out(manifest).nbytes.sum()) for manifest in seen))
        fetched = transfuse.fetch(
            servers.addresses if len(servers.addresses) > 1 else servers.addresses[0],
            token=servers.token,
            timeout=duration_of(timeout),
            step=step,
            same_host=same_host,
            verify=verify,
            max_receive_bytes=largest,
            progress=sys.stderr.isatty(),
        )
        state = reaching.whole(fetched.state)
        if goal.how is Format.SAFETENSORS:
            # The server's state may have changed since the check.
            _refuse(goal.path, safetensors_file.misfits(describe(state, Limits()).manifest))
        files.save(state, goal.path, goal.how, overwrite)
    _tell(goal, fetched.report, as_json)


def _goal(out: Path, seen: Sequence[Manifest]) -> Goal:
    misfits = [reason for manifest in seen for reason in safetensors_file.misfits(manifest)]
    if out.suffix not in SUFFIXES:
        how = Format.TORCH if misfits else Format.SAFETENSORS
        suffix = next(suffix for suffix, format_ in SUFFIXES.items() if format_ is how)
        return Goal(out.with_name(out.name + suffix), how)
    how = SUFFIXES[out.suffix]
    if how is Format.SAFETENSORS:
        _refuse(out, misfits)
    return Goal(out, how)


def _refuse(path: Path, misfits: Sequence[str]) -> None:
    if misfits:
        shown = "; ".join(misfits[:MAX_NAMED])
        more = f"; and {len(misfits) - MAX_NAMED} more" if len(misfits) > MAX_NAMED else ""
        instead = path.with_suffix(".pt")
        raise Failed(f"a safetensors file cannot hold this state: {shown}{more}. Use --out {instead}")


def _tell(goal: Goal, report: Report, as_json: bool) -> None:
    nbytes = goal.path.stat().st_size
    if as_json:
        said = {"file": str(goal.path), "format": goal.how.value, "bytes": nbytes, "report": report.to_dict()}
        print(json.dumps(said, indent=2))
        return
    moved = f"{count_leaves(report.leaves)}, {human_bytes(report.bytes)} by {report.route or 'description alone'}"
    print(f"fetched {moved} in {report.duration}")
    print(f"wrote {goal.path} ({goal.how.value}, {human_bytes(nbytes)})")
