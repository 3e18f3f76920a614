"""``transfuse serve``: serve the state in a file to readers."""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

import transfuse
from transfuse._limits import Limits
from transfuse._report import Report
from transfuse._sizes import human_bytes
from transfuse._state.manifest import describe
from transfuse._wire.handshake import is_loopback
from transfuse.cli import files
from transfuse.cli.contents import Contents
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
    token_of,
)
from transfuse.cli.tables import count_leaves

__all__ = ["serve"]


def serve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors or .pt file.", show_default=False)],
    host: Annotated[
        str, typer.Option(help="The address to listen on. Others reach only what is not loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    token_file: TokenFile = None,
    once: Annotated[bool, typer.Option("--once", help="End after one reader has everything.")] = False,
    step: Annotated[int | None, typer.Option(min=0, help="The step that readers are told.")] = None,
    timeout: Seconds = 30,
    max_rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Give away at most this number of bytes a second: `100MiB`.")
    ] = None,
    max_readers: Annotated[int, typer.Option(min=1, help="How many read at once; others wait.")] = 4,
    same_host: Annotated[
        bool, typer.Option(help="Let readers on this host read straight from this process's memory.")
    ] = True,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_names: TlsNames = None,
    as_json: AsJson = False,
) -> None:
    """Serve the state in a file to `transfuse fetch` and `transfuse.fetch`, until Ctrl-C.

    The first line is the address; then there is a line for every reader. The file is mapped, not loaded: do not write
    to it meanwhile (a file that is renamed into its place does no harm).

    Without a token, and without --tls-cert, anybody who reaches the address gets the state; and without --tls-cert
    nothing is encrypted.
    """
    tls = encrypt_by(tls_cert, tls_key, tls_ca, tls_names)
    check_settings()
    if not host:
        raise typer.BadParameter(
            "it is empty, which would mean every interface: write 0.0.0.0 for that", param_hint="--host"
        )
    check_step(step)
    token, rate = token_of(token_file), bytes_of(max_rate) if max_rate is not None else None
    state = files.load(file)
    totals = Contents.of(describe(state, Limits()).manifest).totals
    if not totals.bytes:
        raise Failed(f"{file} holds no tensors: there is nothing to move")
    if token is None and tls is None and not is_loopback(host):
        print(f"transfuse serve: without a token: anybody who reaches {host} gets the state", file=sys.stderr)
    done = threading.Event()

    def tell(report: Report) -> None:
        # A reader of stdout that wanted only the address has closed the pipe. Go on serving.
        with suppress(BrokenPipeError):
            _tell(report, as_json)
        # With --once, a reader that only asks for the description does not count.
        if once and report.error is None and report.bytes:
            done.set()

    try:
        server = transfuse.serve(
            state,
            host=host,
            port=port,
            token=token,
            timeout=duration_of(timeout),
            step=step,
            max_readers=max_readers,
            same_host=same_host,
            max_bytes_per_second=rate,
            on_report=tell,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with warnings_shown("serve"), server:
        try:
            if as_json:
                about = {"file": str(file), "leaves": totals.leaves, "bytes": totals.bytes_once}
                print(json.dumps({"address": server.address, **about}), flush=True)
            else:
                print(server.address, flush=True)
                held = f"{count_leaves(totals.leaves)}, {human_bytes(totals.bytes_once)}"
                print(f"transfuse serve: {file}: {held}; Ctrl-C ends it", file=sys.stderr)
            done.wait()
        except KeyboardInterrupt:
            # Active readers may finish; a second Ctrl-C does not wait for them.
            print("transfuse serve: ending", file=sys.stderr)


def _tell(report: Report, as_json: bool) -> None:
    """Print a line about a reader. The server logs failures itself, with the reader's address."""
    if as_json:
        print(json.dumps(report.to_dict()), flush=True)
    elif report.error is None and report.bytes:
        print(f"sent {human_bytes(report.bytes)} by {report.route} in {report.duration}", flush=True)
    elif report.error is None:
        print("sent the description", flush=True)
