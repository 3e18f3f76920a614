"""``transfuse inspect``: show the contents of a state, in a file or at a server."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

import transfuse
from transfuse._keeper.saved import DamagedStep, SavedStep, StepsAddress, look, steps, unfinished
from transfuse._keeper.slot_file import Label
from transfuse._sizes import human_bytes
from transfuse._wire.handshake import split_address
from transfuse.cli import files, keepers, reaching
from transfuse.cli.contents import Contents, Folded, Row, fold
from transfuse.cli.errors import Failed
from transfuse.cli.options import (
    AsJson,
    Seconds,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsNames,
    TokenFile,
    check_settings,
    duration_of,
    encrypt_by,
)
from transfuse.cli.tables import Column, count_leaves, printable, say, show

__all__ = ["inspect"]

#: How many characters of a value, and of metadata, a table shows.
MAX_SHOWN = 40

COLUMNS = (
    Column("leaf", wraps=True),
    Column("kind"),
    Column("dtype"),
    Column("shape or value", wraps=True),
    Column("size", right=True),
    Column("shares"),
    Column("sharding", wraps=True),
)


STEP_COLUMNS = (
    Column("step", right=True),
    Column("generation", right=True),
    Column("ranks", right=True),
    Column("size", right=True),
    Column("written"),
    Column("version"),
    Column("state", wraps=True),
)
#: What is said of a step: every byte of it is right; its files are all there; it has no record; it is damaged.
WHOLE, COMPLETE, UNFINISHED, DAMAGED = "whole", "complete", "unfinished", "damaged"


@dataclass(frozen=True)
class StepRow:
    """A step in a directory."""

    step: int
    generation: int
    state: str
    why: str = ""
    ranks: int | None = None
    bytes: int | None = None
    written: str = ""
    version: str = ""

    @classmethod
    def of(cls, label: Label, found: SavedStep | DamagedStep, *, verify: bool) -> StepRow:
        if isinstance(found, DamagedStep):
            return cls(label.step, label.generation, DAMAGED, printable(str(found)))
        record, state, why = found.record, WHOLE if verify else COMPLETE, ""
        try:
            found.check_files()
            if verify:
                found.check_bytes(found.states())
        except DamagedStep as error:
            state, why = DAMAGED, printable(str(error))
        written, version = printable(record.written), printable(record.version)
        return cls(label.step, label.generation, state, why, record.world_size, found.nbytes, written, version)

    def cells(self) -> tuple[str, ...]:
        ranks, size = (
            ("", "") if self.ranks is None or self.bytes is None else (str(self.ranks), human_bytes(self.bytes))
        )
        return str(self.step), str(self.generation), ranks, size, self.written, self.version, self.why or self.state


@dataclass(frozen=True)
class Inspected:
    """A state's contents, and where the state is."""

    where: str
    kind: str
    contents: Contents
    step: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    #: Of a directory: its steps, newest first, and the rank whose leaves are shown.
    steps: Sequence[StepRow] = ()
    rank: int = 0

    def to_dict(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {
            "where": self.where,
            "kind": self.kind,
            "step": self.step,
            "metadata": self.metadata,
            **({"steps": [asdict(one) for one in self.steps]} if self.steps else {}),
            "totals": asdict(self.contents.totals),
            "leaves": [row.to_dict() for row in rows],
        }


def inspect(
    where: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS|DIR|FILE",
            help="A server's host:port, `keeper:RUN` for the keeper of a run, a directory of steps or its URL, or a "
            ".safetensors or .pt file.",
        ),
    ],
    depth: Annotated[
        int | None, typer.Option(min=1, help="Fold leaves whose names agree in this number of steps between dots.")
    ] = None,
    pattern: Annotated[
        str | None, typer.Option("--filter", metavar="GLOB", help="Only leaves with such names: `model.*.weight`.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Of a directory: the leaves of this step, not of the newest one.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Of a directory: read every byte, and compare it with its digest.")
    ] = False,
    token_file: TokenFile = None,
    timeout: Seconds = 30,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_names: TlsNames = None,
    as_json: AsJson = False,
) -> None:
    """Show what a state holds: names, kinds, dtypes, shapes, sizes, what shares memory, and how it is sharded.

    Of a directory all steps are listed first, and what is damaged; then come the leaves of the lowest rank.

    No tensor is read or moved, but with `--verify`. Of a .safetensors file only the header is read; a .pt file is
    mapped, and refused if it holds more than plain data. Of a server only the description of its state is asked for; of
    a keeper, that of its lowest rank.

    Leaves with the same number under *shares* have a storage in common. Sizes of sharded leaves are those of the part
    that the described rank holds. In JSON there are always all leaves that the filter leaves.
    """
    encrypt_by(tls_cert, tls_key, tls_ca, tls_names)
    check_settings()
    directory = reaching.directory_of(where, step)
    if directory is None and (step is not None or verify):
        raise typer.BadParameter(f"{where} is no directory of steps: --step and --verify belong to one")
    found = _look_into(where, directory, verify=verify) if directory else _look(where, token_file, timeout)
    rows = found.contents.rows if pattern is None else found.contents.matching(pattern)
    if as_json:
        print(json.dumps(found.to_dict(rows), indent=2))
        return
    _say_where(found)
    if found.steps:
        show(STEP_COLUMNS, [one.cells() for one in found.steps])
        if found.step is None:
            return
        say(f"\nstep {found.step}, rank {found.rank}:\n")
    show(COLUMNS, [_cells(row) for row in (rows if depth is None else fold(rows, depth))])
    _say_totals(found, rows, pattern)


def _look_into(where: str, directory: str, *, verify: bool) -> Inspected:
    """A directory: its steps, and the leaves of one rank in one step."""
    place = StepsAddress.of(directory)
    rows = [StepRow.of(label, found, verify=verify) for label, found in steps(place.directory)]
    rows += [StepRow(one.step, one.generation, UNFINISHED) for one in unfinished(place.directory)]
    if not rows:
        raise Failed(f"{where} holds no steps")
    if place.step is None and all(row.state in (DAMAGED, UNFINISHED) for row in rows):
        return Inspected(where, "directory", Contents.apart([]), steps=rows)
    step, manifest = look(directory)
    return Inspected(where, "directory", Contents.of(manifest), step=step, steps=rows, rank=place.rank or 0)


def _look(where: str, token_file: Path | None, timeout: float) -> Inspected:
    path = Path(where)
    if os.path.lexists(path):
        kind = files.format_of(path).value
        contents, metadata = files.contents_of(path)
        return Inspected(where, kind, contents, metadata=metadata)
    if not where.startswith(keepers.PREFIX):
        try:
            split_address(where)
        except ValueError:
            raise Failed(f"{where} is neither a file here nor the host:port of a server; is the name right?") from None
    with keepers.served(where, token_file, timeout) as (addresses, token):
        peeked = transfuse.peek(addresses[0], token=token, timeout=duration_of(timeout))
    try:
        return Inspected(where, "server", Contents.of(peeked.manifest), step=peeked.step)
    except ValueError as error:
        raise Failed(f"{where} sent an invalid description of its state: {error}") from error


def _cells(row: Row | Folded) -> tuple[str, ...]:
    if isinstance(row, Folded):
        dtypes = _short(", ".join(row.dtypes))
        return f"{row.name}.…", count_leaves(row.leaves), dtypes, "", human_bytes(row.nbytes), _marks(row.shares), ""
    if row.value is not None:
        shown = _short(row.value)
    else:
        shown = "×".join(map(str, row.shape)) if row.shape else "scalar" if row.shape == () else ""
    size = human_bytes(row.nbytes) if row.kind != "value" or row.nbytes else ""
    sharding = str(row.sharding) if row.sharding is not None else ""
    return row.label, row.what, row.dtype, shown, size, _marks(row.shares), sharding


def _marks(shares: tuple[int, ...]) -> str:
    return " ".join(f"#{number}" for number in shares)


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _say_where(found: Inspected) -> None:
    step = f", step {found.step}" if found.step is not None and not found.steps else ""
    say(f"{found.where} ({found.kind}{step})")
    for key, value in found.metadata.items():
        say(f"  {printable(key)}: {_short(printable(value))}")
    say()


def _say_totals(found: Inspected, rows: Sequence[Row], pattern: str | None) -> None:
    totals = found.contents.totals
    if pattern is not None:
        nbytes = human_bytes(sum(row.nbytes for row in rows))
        say(f"{pattern}: {len(rows):,} of {count_leaves(totals.leaves)}, {nbytes}")
    once = ", each byte counted once " + human_bytes(totals.bytes_once) if totals.bytes_once != totals.bytes else ""
    say(f"{count_leaves(totals.leaves)}, {totals.tensors:,} of them tensors: {human_bytes(totals.bytes)}{once}")
