"""Options that several commands have in common."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from transfuse._limits import TLS_VARIABLES, check_environment
from transfuse._tls import TLS, tls_of
from transfuse._tuning import CLI_LONGEST_SECONDS
from transfuse.cli.errors import Failed, reading

__all__ = [
    "TOKEN_VARIABLE",
    "AsJson",
    "Seconds",
    "TlsCa",
    "TlsCert",
    "TlsKey",
    "TlsNames",
    "TokenFile",
    "available_bytes",
    "bytes_of",
    "check_settings",
    "check_step",
    "duration_of",
    "encrypt_by",
    "token_of",
]

TOKEN_VARIABLE = "TRANSFUSE_TOKEN"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Seconds = Annotated[
    float,
    typer.Option(
        min=0.1, max=CLI_LONGEST_SECONDS, metavar="SECONDS", help="How long the other end may go without progress."
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=f"Holds the secret that both ends share. Without it: the variable {TOKEN_VARIABLE}.",
    ),
]

TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="Encrypt, with this certificate. Without it: the variable TRANSFUSE_TLS_CERT.",
    ),
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="The certificate's private key.")]
TlsCa = Annotated[
    Path | None, typer.Option("--tls-ca", metavar="FILE", help="The CA that the other end's certificate must be from.")
]
TlsNames = Annotated[
    str | None,
    typer.Option(
        "--tls-names",
        metavar="NAME,…",
        help="Names that the other end's certificate may have. Without them: those in one's own.",
    ),
]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([kmg]i?)?b?(?:/s)?", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """Parse a number of bytes: ``100MiB``, ``2.5GB`` or ``4096``."""
    found = _SIZE.fullmatch(text.strip())
    count = 0 if found is None else int(float(found[1]) * _UNITS[(found[2] or "").lower()])
    if count < 1:
        raise typer.BadParameter(f"{text!r} is not a number of bytes; write 100MiB, 2.5GB or 4096")
    return count


def check_settings() -> None:
    """Check the settings now: one line here is better than an error from the first transfer."""
    try:
        check_environment()
    except ValueError as error:
        raise Failed(f"{error} (in the environment)") from None


def encrypt_by(certificate: Path | None, key: Path | None, ca: Path | None, names: str | None) -> TLS | None:
    """What is given here counts in place of the environment's, for all that this process does."""
    for variable, value in zip(TLS_VARIABLES, (certificate, key, ca, names), strict=True):
        if value is not None:
            os.environ[variable] = str(value)
    try:
        return tls_of(None)
    except ValueError as error:
        raise Failed(str(error)) from None


def check_step(step: int | None) -> None:
    """Check the options before a file is read or a server is asked."""
    from transfuse import _arguments  # Which imports torch.

    try:
        _arguments.check_step(step)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--step") from None


def duration_of(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def token_of(file: Path | None, variable: str = TOKEN_VARIABLE) -> bytes | None:
    """The shared secret, or None. As bytes: it need not be text."""
    if file is None:
        token = os.environb.get(variable.encode())
        where = variable
    else:
        with reading(file):
            token = file.read_bytes().removesuffix(b"\n").removesuffix(b"\r")
        where = str(file)
    if token == b"":
        raise typer.BadParameter(
            f"{where} is empty; make a secret with: python -c 'import secrets; print(secrets.token_hex())'"
        )
    return token


def available_bytes() -> int | None:
    """The memory of this machine that is available without swapping, if Linux tells it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
