"""``transfuse fetch``: write the state of one server, or of several that hold parts of it, to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import transfuse
from transfuse._errors import PeerError
from transfuse._limits import Limits
from transfuse._plan.regions import lay_out
from transfuse._report import Report
from transfuse._sizes import human_bytes
from transfuse._state import trees
from transfuse._state.leaves.dtensors import is_dtensor
from transfuse._state.manifest import Manifest, describe
from transfuse._wire.handshake import split_address
from transfuse.cli import files, keepers, safetensors_file
from transfuse.cli.errors import Failed, warnings_shown
from transfuse.cli.files import SUFFIXES, Format
from transfuse.cli.options import (
    AsJson,
    Seconds,
    TokenFile,
    bytes_of,
    check_settings,
    check_step,
    duration_of,
    token_of,
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
            metavar="ADDRESS",
            help="A server's host:port. Several, if they serve one state. Or `keeper:RUN` for the keeper of a run.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
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
    as_json: AsJson = False,
) -> None:
    """Fetch a state and write it to a file, whole or not at all.

    Whether the state fits into the file is checked before a tensor moves. safetensors holds dicts of plain tensors,
    nested too (their keys are joined by dots, and kept in the metadata), but no values, no tied tensors, no sparse
    ones. What it cannot hold is refused with the reason; torch.save holds everything. DTensors are written whole, as
    plain tensors.
    """
    _check(addresses)
    is_keeper = addresses[0].startswith(keepers.PREFIX)
    check_settings()
    check_step(step)
    largest = bytes_of(max_size) if max_size is not None else None
    with warnings_shown("fetch"), _reached(addresses, token_file, timeout) as (reached, token):
        # Without a known suffix the command writes another file, beside this one.
        files.check_place(out, overwrite or out.suffix not in SUFFIXES)
        seen = _peek(reached, token, timeout)
        if is_keeper and not any(manifest.is_sharded for manifest in seen):
            # Each rank has everything, and values of its own in part: take one rank's.
            reached, seen = reached[:1], seen[:1]
        goal = _goal(out, seen)
        files.check_place(goal.path, overwrite)
        # Replicas bring the same bytes, so the file is at least as large as the largest server's state.
        files.check_room(goal.path, max(int(lay_out(manifest).nbytes.sum()) for manifest in seen))
        fetched = transfuse.fetch(
            reached if len(reached) > 1 else reached[0],
            token=token,
            timeout=duration_of(timeout),
            step=step,
            same_host=same_host,
            verify=verify,
            max_receive_bytes=largest,
            progress=sys.stderr.isatty(),
        )
        state = _whole(fetched.state)
        if goal.how is Format.SAFETENSORS:
            # The server's state may have changed since the check.
            _refuse(goal.path, safetensors_file.misfits(describe(state, Limits()).manifest))
        files.save(state, goal.path, goal.how, overwrite)
    _tell(goal, fetched.report, as_json)


@contextmanager
def _reached(addresses: list[str], token_file: Path | None, timeout: float) -> Iterator[tuple[list[str], bytes | None]]:
    """The addresses of servers, and the token for them."""
    if len(addresses) == 1:
        with keepers.served(addresses[0], token_file, timeout) as (reached, token):
            yield reached, token
    else:
        yield addresses, token_of(token_file)


def _check(addresses: Sequence[str]) -> None:
    if len(addresses) == 1 and addresses[0].startswith(keepers.PREFIX):
        return
    for address in addresses:
        try:
            split_address(address)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    if len(set(addresses)) != len(addresses):
        raise typer.BadParameter("an address appears twice; give each server once")


def _peek(addresses: Sequence[str], token: bytes | None, timeout: float) -> list[Manifest]:
    """The descriptions of the servers that answer. Whether these servers hold enough is known later."""
    found, last = [], None
    for address in addresses:
        try:
            found.append(transfuse.peek(address, token=token, timeout=duration_of(timeout)).manifest)
        except PeerError as error:
            last = error
    if not found and last is not None:
        raise last
    return found


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


def _whole(state: Any) -> Any:
    """The state with each DTensor replaced by its tensor, which is whole: its mesh is this process alone."""
    root, leaves = trees.flatten(state, max_depth=Limits().max_depth)
    if not any(is_dtensor(leaf) for leaf in leaves):
        return state
    return trees.unflatten(root, [_plain(leaf) if is_dtensor(leaf) else leaf for leaf in leaves])


def _plain(leaf: Any) -> Any:
    local = leaf.to_local().detach()
    return nn.Parameter(local, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else local


def _tell(goal: Goal, report: Report, as_json: bool) -> None:
    nbytes = goal.path.stat().st_size
    if as_json:
        said = {"file": str(goal.path), "format": goal.how.value, "bytes": nbytes, "report": report.to_dict()}
        print(json.dumps(said, indent=2))
        return
    moved = f"{count_leaves(report.leaves)}, {human_bytes(report.bytes)} by {report.route or 'description alone'}"
    print(f"fetched {moved} in {report.duration}")
    print(f"wrote {goal.path} ({goal.how.value}, {human_bytes(nbytes)})")
