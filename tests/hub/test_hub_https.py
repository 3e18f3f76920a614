"""A Hub with ``tls=``: clients come by https and show certificates; the servers behind it are asked by TLS."""

from __future__ import annotations

import logging
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transfuse
from certificates import certificate, directory, environment_of, tls
from hub_asking import ask
from serving import wait_until
from transfuse import TLS

huggingface_hub: Any = pytest.importorskip("huggingface_hub", reason="the Hub's client is not installed")
httpx: Any = pytest.importorskip("httpx2", reason="huggingface_hub's own client of HTTP is another one")
client_tools: Any = pytest.importorskip("huggingface_hub.utils")
safetensors: Any = pytest.importorskip("safetensors.torch")

NUMEL = 700_000


@pytest.fixture
def shows_a_certificate() -> Iterator[None]:
    """huggingface_hub connects as its own client does, with our certificate."""
    from huggingface_hub.utils._http import default_client_factory

    context = tls().client_context()
    huggingface_hub.set_client_factory(lambda: httpx.Client(verify=context, follow_redirects=True, timeout=60))
    client_tools.disable_progress_bars()
    yield
    huggingface_hub.set_client_factory(default_client_factory)
    huggingface_hub.close_session()


def snapshot(hub: transfuse.Hub, folder: Path) -> torch.Tensor:
    found = huggingface_hub.snapshot_download(hub.name, endpoint=hub.endpoint, cache_dir=folder, token=False)
    loaded: dict[str, torch.Tensor] = safetensors.load_file(next(Path(found).glob("*.safetensors")))
    return loaded["w"]


def get(hub: transfuse.Hub, context: ssl.SSLContext) -> bytes:
    with urllib.request.urlopen(f"{hub.endpoint}/api/models/live/model", timeout=60, context=context) as answer:
        return bytes(answer.read())


@pytest.mark.usefixtures("shows_a_certificate")
def test_the_real_client_reads_everything(tmp_path: Path) -> None:
    state = {"w": torch.arange(NUMEL, dtype=torch.float32)}
    with transfuse.hub(state, step=3, tls=tls()) as hub:
        assert hub.endpoint.startswith("https://127.0.0.1:")
        assert torch.equal(snapshot(hub, tmp_path), state["w"])
        # Its page tells others to come by https.
        page = urllib.request.Request(f"{hub.endpoint}/", headers={"Accept": "text/html"})
        with urllib.request.urlopen(page, timeout=60, context=tls().client_context()) as answer:
            assert f"HF_ENDPOINT={hub.endpoint}".encode() in answer.read()


def test_servers_behind_it_are_asked_by_tls() -> None:
    """By arguments, with plain HTTP for clients on the same host; and all by the environment."""
    state = {"w": torch.arange(1000, dtype=torch.float32)}
    with transfuse.serve(state, step=1, token="secret", tls=tls()) as server:
        options: Any = {"server_token": "secret", "tls": False}
        with transfuse.hub(server.address, server_tls=tls(), **options) as hub:
            assert hub.endpoint.startswith("http://")
            assert ask(hub.endpoint, "GET", "/api/models/live/model").status == 200
        with transfuse.hub(server.address, server_tls=False, **options) as hub:
            assert ask(hub.endpoint, "GET", "/api/models/live/model").status == 503
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment_of(tls()).items():
                patch.setenv(name, value)
            with transfuse.hub(server.address, server_token="secret") as hub:
                assert b"sha" in get(hub, tls().client_context())


def test_who_is_refused_knows_why_at_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    only_ca = ssl.create_default_context(cafile=str(directory() / "ca.pem"))
    with transfuse.hub({"w": torch.zeros(3)}, step=1, tls=tls(accepts=["spiffe://tests/job"])) as hub:
        for context, told, logged in (
            (only_ca, "CERTIFICATE_REQUIRED|certificate required", "has shown no certificate"),
            (tls(ca="foreign").client_context(), "UNKNOWN_CA|unknown ca", "is not from a CA in "),
            (tls(days=-1).client_context(), "CERTIFICATE_EXPIRED|certificate expired", "has expired"),
            (tls(trusts="foreign").client_context(), "CERTIFICATE_VERIFY_FAILED", "from a CA that it knows"),
        ):
            with pytest.raises((OSError, urllib.error.URLError), match=told):
                get(hub, context)
            wait_until(lambda logged=logged: logged in caplog.text)  # type: ignore[misc]
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            get(hub, tls("DNS:stranger").client_context())
        assert refused.value.read() == b"This hub does not accept you: your client has a certificate for stranger\n"
        wait_until(lambda: "a certificate for stranger, and names= allows only spiffe://tests/job" in caplog.text)
        with pytest.raises(urllib.error.HTTPError, match="400: Bad Request"):
            urllib.request.urlopen(hub.endpoint.replace("https", "http"), timeout=60)
        wait_until(lambda: "does not encrypt, and this end does" in caplog.text)
        assert b"sha" in get(hub, tls().client_context())


def test_a_client_that_encrypts_at_a_hub_that_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with transfuse.hub({"w": torch.zeros(3)}, step=1, tls=False) as hub:
        with pytest.raises(urllib.error.URLError, match=r"PROTOCOL_VERSION|protocol version"):
            urllib.request.urlopen(hub.endpoint.replace("http", "https"), timeout=60)
        wait_until(lambda: "comes by https, and this server has no tls=" in caplog.text)


def test_silent_clients_keep_nobody_out_and_a_renewed_certificate_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="transfuse")
    monkeypatch.setattr("transfuse._wire.http_server.HTTP_REQUEST_SECONDS", 0.5)
    own = tmp_path / "tls.crt", tmp_path / "tls.key"
    for source, target in zip(certificate(days=-1), own, strict=True):
        target.write_bytes(source.read_bytes())
    with transfuse.hub({"w": torch.zeros(3)}, step=1, tls=TLS(*own, directory() / "ca.pem")) as hub:
        host, _, port = hub.endpoint.removeprefix("https://").rpartition(":")
        silent = socket.create_connection((host, int(port)))
        with pytest.raises(urllib.error.URLError, match="expired"):
            get(hub, tls().client_context())
        for source, target in zip(certificate(), own, strict=True):
            target.write_bytes(source.read_bytes())
        assert b"sha" in get(hub, tls().client_context())
        silent.settimeout(60)
        assert not silent.recv(1)
        silent.close()
