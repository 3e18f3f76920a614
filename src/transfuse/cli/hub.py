"""``transfuse hub``: be a Hugging Face Hub for a state in servers, in a keeper or in a file."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated

import typer

import transfuse
from transfuse._errors import TransfuseError
from transfuse._hub.hub import DEFAULT_NAME, Hub, HubSettings, check_shard_bytes
from transfuse._hub.sources import Reached, ServerSource
from transfuse._job.state import State
from transfuse._tuning import HUB_MAX_SHARD_BYTES
from transfuse._wire.handshake import is_loopback, split_address
from transfuse.cli import files, keepers
from transfuse.cli.errors import Failed, warnings_shown
from transfuse.cli.options import (
    TOKEN_VARIABLE,
    AsJson,
    Seconds,
    bytes_of,
    check_settings,
    check_step,
    duration_of,
    token_of,
)

__all__ = ["hub"]

HUB_TOKEN_VARIABLE = "TRANSFUSE_HUB_TOKEN"


def hub(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS|FILE",
            help="A server's host:port, or several if they serve one state; `keeper:RUN` for the keeper of a run; or a "
            ".safetensors or .pt file.",
            show_default=False,
        ),
    ],
    assets: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Holds the other files: config.json, the tokenizer. No weights."),
    ] = None,
    name: Annotated[str, typer.Option(help="What clients call the repository.")] = DEFAULT_NAME,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Others reach only what is not loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"Holds what clients send as HF_TOKEN. Without it: the variable {HUB_TOKEN_VARIABLE}.",
        ),
    ] = None,
    server_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=f"Holds the secret of the servers. Without it: the variable {TOKEN_VARIABLE}."
        ),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="Take only leaves whose names begin so, and leave it out of their names: `model.`")
    ] = "",
    step: Annotated[int | None, typer.Option(min=0, help="The step of the state in a file.")] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The most bytes of tensors in a file of the repository.")
    ] = f"{HUB_MAX_SHARD_BYTES // 1000**3}GB",
    hold: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long a client may go on with a commit.")
    ] = 30,
    timeout: Seconds = 30,
    as_json: AsJson = False,
) -> None:
    """Be a Hugging Face Hub whose one repository holds the weights of a running job, until Ctrl-C.

    The first line is the endpoint, for clients' `HF_ENDPOINT`. A copy of the state is fetched when a client asks for
    `main` and the step has moved on.

    Nothing is encrypted, and without a token anybody who reaches the endpoint gets the weights.
    """
    check_settings()
    check_step(step)
    secret = token_of(token_file, HUB_TOKEN_VARIABLE)
    shard_bytes = check_shard_bytes(bytes_of(max_shard_size))
    if secret is None and not is_loopback(host):
        print(f"transfuse hub: without a token: anybody who reaches {host} gets the weights", file=sys.stderr)
    try:
        settings = HubSettings(name, assets, secret, host, port, duration_of(hold), timeout)
        with warnings_shown("hub"):
            opened = _open(sources, settings, server_token_file, prefix, step, shard_bytes, timeout)
    except (ValueError, NotADirectoryError) as error:
        raise typer.BadParameter(str(error)) from None
    with warnings_shown("hub"), opened:
        try:
            if as_json:
                print(json.dumps({"endpoint": opened.endpoint, "name": opened.name}), flush=True)
            else:
                print(opened.endpoint, flush=True)
                told = f"HF_ENDPOINT={opened.endpoint}, and from_pretrained({opened.name!r}); Ctrl-C ends it"
                print(f"transfuse hub: {told}", file=sys.stderr)
            threading.Event().wait()
        except KeyboardInterrupt:
            print("transfuse hub: ending", file=sys.stderr)


def _open(
    sources: list[str],
    settings: HubSettings,
    token_file: Path | None,
    prefix: str,
    step: int | None,
    shard_bytes: int,
    timeout: float,
) -> Hub:
    only = sources[0] if len(sources) == 1 else None
    if only is not None and only.startswith(keepers.PREFIX):
        if step is not None:
            raise typer.BadParameter("the keeper tells the step", param_hint="--step")
        return _of_servers(_keeper(only, timeout), settings, prefix, shard_bytes, timeout)
    if only is not None and (Path(only).suffix in files.SUFFIXES or Path(only).exists()):
        state = files.load(Path(only))
        return Hub.of_state(State(state), settings, step=step, prefix=prefix, max_shard_bytes=shard_bytes)
    if step is not None:
        raise typer.BadParameter("the servers tell their step", param_hint="--step")
    for source in sources:
        try:
            split_address(source)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; and there is no file of this name") from None
    if len(set(sources)) != len(sources):
        raise typer.BadParameter("an address appears twice; give each server once")
    token = token_of(token_file)

    @contextmanager
    def reach() -> Iterator[Reached]:
        yield Reached(sources, token)

    return _of_servers(reach, settings, prefix, shard_bytes, timeout)


def _of_servers(
    reach: Callable[[], AbstractContextManager[Reached]],
    settings: HubSettings,
    prefix: str,
    shard_bytes: int,
    timeout: float,
) -> Hub:
    source = ServerSource(reach, prefix=prefix, max_shard_bytes=shard_bytes, seconds=timeout)
    source.mark(None)  # An address that leads nowhere is told now, not to the first client.
    return Hub(source, settings)


def _keeper(where: str, timeout: float) -> Callable[[], AbstractContextManager[Reached]]:
    @contextmanager
    def reach() -> Iterator[Reached]:
        try:
            with keepers.served(where, None, timeout) as (addresses, token):
                sharded = len(addresses) > 1 and transfuse.peek(addresses[0], token=token).manifest.is_sharded
                # Each rank has everything, and values of its own in part: take one rank's.
                yield Reached(addresses if sharded else addresses[:1], token)
        except Failed as error:
            raise TransfuseError(str(error)) from error

    return reach
