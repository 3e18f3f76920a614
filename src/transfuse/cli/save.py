"""``transfuse save``: write the state of a running job as a step to a directory, once."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

import transfuse
from transfuse._keeper.save_once import next_label, save_once
from transfuse._keeper.storage import Storage
from transfuse._sizes import human_bytes
from transfuse.cli import reaching
from transfuse.cli.errors import Failed, warnings_shown
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

__all__ = ["save"]


def save(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS",
            help="A server's host:port. Several, if they serve one state. Or `keeper:RUN` for the keeper of a run.",
        ),
    ],
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A directory that exists, or its URL. Other steps in it stay.")
    ],
    token_file: TokenFile = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Accept this step of the state only. A server that names none is at it.")
    ] = None,
    timeout: Seconds = 30,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Refuse states that are larger. Default: this machine's memory.")
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_names: TlsNames = None,
    as_json: AsJson = False,
) -> None:
    """Write the newest step of a running job to a directory, as keepers write steps there.

    The state is put together first: DTensors are written whole, by one rank. What belongs to single ranks alone
    (`rank_state=`) is not part of it. Everything that reads directories of steps reads it; `keep(directory=DIR)`
    restores it on any number of ranks.
    """
    encrypt_by(tls_cert, tls_key, tls_ca, tls_names)
    check_settings()
    check_step(step)
    largest = bytes_of(max_size) if max_size is not None else None
    storage = Storage.at(directory)
    storage.check()
    found = reaching.resolved(addresses)
    with warnings_shown("save"), reaching.reached(found, token_file, timeout) as servers:
        said = transfuse.peek(servers.addresses[0], token=servers.token, timeout=duration_of(timeout)).step
        if said is None and step is None:
            raise Failed(f"{addresses[0]} does not say at which step it is: name it with --step")
        fetched = transfuse.fetch(
            servers.addresses if len(servers.addresses) > 1 else servers.addresses[0],
            token=servers.token,
            timeout=duration_of(timeout),
            step=None if said is None else step,
            max_receive_bytes=largest,
            progress=sys.stderr.isatty(),
        )
        number = step if fetched.step is None else fetched.step
        assert number is not None
        saved = save_once(reaching.whole(fetched.state), storage, next_label(storage, number))
    if as_json:
        about = {"directory": storage.where, "step": saved.step, "generation": saved.label.generation}
        print(json.dumps(about | {"bytes": saved.nbytes, "report": fetched.report.to_dict()}, indent=2))
        return
    moved = f"{count_leaves(fetched.report.leaves)}, {human_bytes(fetched.report.bytes)}"
    print(f"fetched {moved} in {fetched.report.duration}")
    print(f"wrote {saved} ({human_bytes(saved.nbytes)})")
