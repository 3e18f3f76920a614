"""``transfuse hub``: be a Hugging Face Hub for a state in servers, in a keeper, in a directory or in a file."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from transfuse._errors import TransfuseError
from transfuse._hub.adapters import config_text
from transfuse._hub.assets import Assets
from transfuse._hub.hub import DEFAULT_ADAPTER, DEFAULT_NAME, Hub, HubSettings
from transfuse._hub.sources import Reached
from transfuse._tuning import HUB_MAX_SHARD_BYTES
from transfuse._wire.handshake import check_addresses, is_loopback, split_address
from transfuse.cli import files, keepers, reaching
from transfuse.cli.errors import Failed, warnings_shown
from transfuse.cli.options import (
    TOKEN_VARIABLE,
    AsJson,
    Seconds,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsNames,
    bytes_of,
    check_settings,
    check_step,
    encrypt_by,
    token_of,
)

__all__ = ["hub"]

HUB_TOKEN_VARIABLE = "TRANSFUSE_HUB_TOKEN"


def hub(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS|DIR|FILE",
            help="A server's host:port, or several if they serve one state; `keeper:RUN` for the keeper of a run; a "
            "directory of steps, or its URL; or a .safetensors or .pt file.",
            show_default=False,
        ),
    ],
    assets: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Holds the other files: config.json, the tokenizer. No weights."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help=f"What clients call the repository: {DEFAULT_NAME}, or for an adapter {DEFAULT_ADAPTER}.",
            show_default=False,
        ),
    ] = None,
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
    adapter_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The weights are those of an adapter, and this is its adapter_config.json: each step is a repository "
            "of its own.",
        ),
    ] = None,
    versions: Annotated[int, typer.Option(min=1, help="How many steps of an adapter are held.")] = 4,
    https: Annotated[
        bool, typer.Option(help="With --tls-cert: clients come by https. The servers are asked by TLS in any case.")
    ] = True,
    hold: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long a client may go on with a commit.")
    ] = 30,
    timeout: Seconds = 30,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_names: TlsNames = None,
    as_json: AsJson = False,
) -> None:
    """Be a Hugging Face Hub whose one repository holds the weights of a running job, until Ctrl-C.

    The first line is the endpoint, for clients' `HF_ENDPOINT`. A copy of the state is fetched when a client asks for
    `main` and the step has moved on.

    Without a token, and without --tls-cert, anybody who reaches the endpoint gets the weights; and without --tls-cert,
    or with --no-https, nothing of it is encrypted.
    """
    tls = encrypt_by(tls_cert, tls_key, tls_ca, tls_names)
    check_settings()
    check_step(step)
    secret = token_of(token_file, HUB_TOKEN_VARIABLE)
    if secret is None and not is_loopback(host) and not (tls is not None and https):
        print(f"transfuse hub: without a token: anybody who reaches {host} gets the weights", file=sys.stderr)
    try:
        given = HubSettings(
            step=step,
            name=name,
            assets=Assets(assets),
            prefix=prefix,
            max_shard_bytes=bytes_of(max_shard_size),
            adapter=None if adapter_config is None else sources,
            adapter_config=None if adapter_config is None else _config_in(adapter_config),
            versions=versions,
            hold=hold,
            host=host,
            port=port,
            token=secret,
            tls=tls if https and tls is not None else False,
            timeout=timeout,
        )
        with warnings_shown("hub"):
            opened = _open(sources, given, server_token_file)
    except (ValueError, NotADirectoryError) as error:
        raise typer.BadParameter(str(error)) from None
    with warnings_shown("hub"), opened:
        try:
            if as_json:
                print(json.dumps({"endpoint": opened.endpoint, "name": opened.name}), flush=True)
            else:
                print(opened.endpoint, flush=True)
                called = opened.name if adapter_config is None else f"{opened.name}-vSTEP"
                told = f"HF_ENDPOINT={opened.endpoint}, and from_pretrained({called!r}); Ctrl-C ends it"
                print(f"transfuse hub: {told}", file=sys.stderr)
            threading.Event().wait()
        except KeyboardInterrupt:
            print("transfuse hub: ending", file=sys.stderr)


def _config_in(path: Path) -> bytes:
    """An adapter's config as a file says it."""
    try:
        return config_text("the config", json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise typer.BadParameter(f"{path} is no config of an adapter: {error}", param_hint="--adapter-config") from None


def _open(sources: list[str], given: HubSettings, token_file: Path | None) -> Hub:
    only = sources[0] if len(sources) == 1 else None
    if only is not None and only.startswith(keepers.PREFIX):
        if given.step is not None:
            raise typer.BadParameter("the keeper tells the step", param_hint="--step")
        return Hub.of(given, _keeper(only, given.timeout))
    step = given.step if isinstance(given.step, int) else None
    directory = None if only is None else reaching.directory_of(only, step)
    if directory is not None:
        return Hub.of(given, lambda: nullcontext(Reached([directory], None)))
    if only is not None and (Path(only).suffix in files.SUFFIXES or Path(only).exists()):
        loaded = files.load(Path(only))
        return Hub.of(replace(given, state=loaded) if given.has_model else replace(given, adapter=loaded))
    if given.step is not None:
        raise typer.BadParameter("the servers tell their step", param_hint="--step")
    for source in sources:
        try:
            split_address(source)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; and there is no file of this name") from None
    check_addresses(sources)
    token = token_of(token_file)
    return Hub.of(given, lambda: nullcontext(Reached(sources, token)))


def _keeper(where: str, timeout: float) -> Callable[[], AbstractContextManager[Reached]]:
    @contextmanager
    def reach() -> Iterator[Reached]:
        try:
            with reaching.reached([where], None, timeout) as servers:
                yield servers
        except Failed as error:
            raise TransfuseError(str(error)) from error

    return reach
