"""docs/encryption.md: the five commands and the program after them, as somebody who tries it out runs them."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

import certificates
import transfuse
from keeping import home  # noqa: F401
from transfuse.testing.ranks import Ranks

NAMES = ("tls.crt", "tls.key", "ca.crt")
GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "encryption.md"


@pytest.fixture
def as_on_the_page(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory with the files that the page names."""
    for source, name in zip((*certificates.certificate(), certificates.directory() / "ca.pem"), NAMES, strict=True):
        shutil.copy(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.processes
@pytest.mark.usefixtures("as_on_the_page", "home")
def test_every_call_takes_it() -> None:
    """The first program of the page, with an address of this machine."""
    found = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert found is not None
    model = torch.nn.Linear(3, 2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    program = found[1].replace("10.0.0.7", "127.0.0.1").replace("4711", port)
    with Ranks(1) as ranks:
        has: dict[str, Any] = {"transfuse": transfuse, "state": {"w": torch.ones(3)}, "model": model, "token": "secret"}
        exec(program, has | {"group": ranks.pgs[0]}, has)
        assert has["hub"].endpoint.startswith("https://")
        assert torch.equal(has["fetched"].state["w"], torch.ones(3))
        for made in ("server", "transport", "kept", "hub"):
            has[made].close()


@pytest.mark.usefixtures("as_on_the_page")
def test_the_hubs_client_is_told() -> None:
    hub, client = pytest.importorskip("huggingface_hub"), pytest.importorskip("httpx2")
    from huggingface_hub.utils._http import default_client_factory

    _, _, part = GUIDE.read_text().partition("## Clients of the Hub")
    found = re.search(r"```python\n(.*?)```", part, re.S)
    assert found is not None
    with transfuse.hub({"w": torch.ones(3)}, step=1, tls=certificates.tls()) as live:
        exec(found[1], {"transfuse": transfuse, "huggingface_hub": hub, "httpx2": client})
        try:
            assert hub.HfApi(endpoint=live.endpoint, token=False).model_info(live.name).sha
        finally:
            hub.set_client_factory(default_client_factory)
            hub.close_session()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_five_commands_and_a_program(tmp_path: pathlib.Path) -> None:
    _, _, part = GUIDE.read_text().partition("## To try it out")
    found = re.search(r"```sh\n(.*?)```\n\n```python\n(.*?)```", part, re.S)
    assert found is not None
    commands, program = found.groups()
    assert len(commands.splitlines()) == 5
    (tmp_path / "program.py").write_text(program)
    script = f"set -e\n{commands}\nexec {sys.executable} -W ignore program.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFUSE_TLS")}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    state, refusal = done.stdout.splitlines()
    assert state == "{'w': tensor([0., 1., 2., 3., 4., 5.])}"
    assert refusal.endswith("encrypts, and this end does not: give both the same tls=")


def test_the_table_quotes_what_is_said() -> None:
    """Each refusal stands in the source as the guide quotes it, apart from what varies."""
    source = pathlib.Path(__file__).parents[2] / "src" / "transfuse" / "_wire"
    said = (source / "secure.py").read_text() + (source / "handshake.py").read_text()
    for quote in (
        "encrypts, and this end does not: give both the same tls=",
        "it has no TLS 1.3: it was started without tls=, or is another service",
        "the certificate of this end is not from a CA that it knows",
        "the certificate of this end has expired",
        "does not accept this end, which ",
        ": see names= there",
        "agreeing on TLS",
    ):
        assert quote in said, quote
        assert quote in GUIDE.read_text(), quote
