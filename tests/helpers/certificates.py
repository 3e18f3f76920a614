"""Certificates for tests, made once by the ``openssl`` command: a CA, a foreign one, and what they sign."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from transfuse import TLS

__all__ = ["JOB", "certificate", "directory", "environment_of", "tls"]

#: The names of a job's certificate: of a workload, and of this machine.
JOB = "URI:spiffe://tests/job,DNS:localhost,IP:127.0.0.1"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _run(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@cache
def directory() -> Path:
    """Where they are, with two CAs: ``ca`` and ``foreign``."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    made = Path(mkdtemp(prefix="transfuse-certificates-"))
    for name in ("ca", "foreign"):
        _run(
            *("req", "-x509", *CURVE, "-days", 2, "-subj", f"/CN={name}"),
            *("-keyout", made / f"{name}.key", "-out", made / f"{name}.pem"),
        )
    return made


@cache
def certificate(
    names: str = JOB, *, ca: str = "ca", days: int = 2, use: str = "", number: int = 0
) -> tuple[Path, Path]:
    """A certificate and its key. Less than 0 days: it has expired. ``number``: another one of the same kind."""
    base = directory() / f"{abs(hash((names, ca, days, use, number))):x}"
    request, key, signed, extensions = (base.with_suffix(end) for end in (".csr", ".key", ".pem", ".ext"))
    _run("req", *CURVE, "-subj", "/CN=test", "-keyout", key, "-out", request)
    lines = {"subjectAltName": names, "extendedKeyUsage": use, "basicConstraints": "CA:FALSE"}
    extensions.write_text("".join(f"{name}={value}\n" for name, value in lines.items() if value))
    _run(
        *("x509", "-req", "-in", request, "-days", days, "-out", signed, "-extfile", extensions),
        *("-CA", directory() / f"{ca}.pem", "-CAkey", directory() / f"{ca}.key"),
    )
    return signed, key


def tls(
    names: str = JOB,
    *,
    ca: str = "ca",
    days: int = 2,
    use: str = "",
    trusts: str = "ca",
    accepts: list[str] | None = None,
) -> TLS:
    """What ``tls=`` takes: with a certificate for these names, that trusts one of the CAs."""
    return TLS(*certificate(names, ca=ca, days=days, use=use), directory() / f"{trusts}.pem", names=accepts)


def environment_of(given: TLS) -> dict[str, str]:
    """The same, as variables of the environment."""
    found = {"CERT": given.certificate, "KEY": given.key, "CA": given.ca}
    names = {} if given.names is None else {"NAMES": ",".join(given.names)}
    return {f"TRANSFUSE_TLS_{name}": str(value) for name, value in (found | names).items()}
