"""What a person sees who opens the Hub's address in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
import torch

import transfuse
from hub_asking import ACCEPT, Page, Steps, ask, kept, visit

HOSTILE = "<img src=x onerror=document.title='owned'> & \"\u202etxt.exe"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    folder = tmp_path / "assets"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", HOSTILE):
        (folder / name).write_text("{}")
    return folder


def test_a_browser_sees_the_step_the_files_and_how_to_read_them(assets: Path) -> None:
    steps = Steps()
    with steps.open(assets=assets, max_shard_bytes=10_000) as hub:
        for _ in range(3):
            steps.advance()
        for path in ("/", "/live/model", "/live/model/", "/?from=afar"):
            reply = visit(hub, path)
            assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
            assert int(ask(hub.endpoint, "HEAD", path, {"Accept": ACCEPT}).headers["Content-Length"]) == len(reply.body)
            page = Page(reply.body)
            for said in (
                "live/model",
                "Step 3 of a running job",
                f"export HF_ENDPOINT={hub.endpoint}\n",
                "export HF_HUB_DISABLE_IMPLICIT_TOKEN=1",
                'AutoModelForCausalLM.from_pretrained("live/model")',
                'AutoTokenizer.from_pretrained("live/model")',
                'snapshot_download("live/model")',
                "model-00001-of-00003.safetensors",
            ):
                assert said in page.text, said
        assert not kept(hub)  # Nothing was copied for that.
        assert hub.version is None
        listed = {name: ask(hub.endpoint, "GET", name) for name in page.links if name.startswith("/")}
        assert len(listed) == 7
        assert {reply.status for reply in listed.values()} == {200}
        steps.advance()
        assert "Step 4 of a running job" in Page(visit(hub).body).text
        about = json.loads(ask(hub.endpoint, "GET", "/api/models/live/model").body)
        assert about["transfuse"] == {"step": 4, "version": about["sha"]}
        assert hub.version == transfuse.Version(4, about["sha"])
        assert f"Newest commit: {about['sha']}, of step 4." in Page(visit(hub).body).text


def test_the_page_gives_the_address_by_which_the_browser_came() -> None:
    with Steps().open() as hub:
        said = {
            "localhost:8080": "HF_ENDPOINT=http://localhost:8080\n",
            "[::1]:80": "HF_ENDPOINT=http://[::1]:80\n",
        }
        for host, line in said.items():
            assert line in Page(visit(hub, Host=host).body).text
        behind = visit(hub, **{"X-Forwarded-Proto": "https", "Host": "localhost"})
        assert "HF_ENDPOINT=https://localhost\n" in Page(behind.body).text
        refused = visit(hub, Host="evil.example")
        assert refused.status == 403
        assert "only to localhost" in Page(refused.body).text
    with Steps().open(token="s3cret") as hub:
        reply = visit(hub, Host="a;rm -rf /", Authorization="Bearer s3cret")
        assert "HF_ENDPOINT=http://HOST:PORT\n" in Page(reply.body).text


def test_hostile_names_stay_text(assets: Path) -> None:
    with Steps().open(assets=assets) as hub:
        reply = visit(hub)
        page = Page(reply.body)
    assert HOSTILE.replace("\u202e", "\ufffd") in page.text
    assert page.tags.isdisjoint({"img", "script", "iframe", "object", "form", "base"})
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert all(link.startswith(("/live/model/resolve/main/", "data:,")) for link in page.links)


def test_without_the_token_nothing_is_shown(assets: Path) -> None:
    with Steps().open(assets=assets, token="s3cret", name="secret/name") as hub:
        for path in ("/", "/secret/name", "/secret/name/resolve/main/config.json", "/other"):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                reply = visit(hub, path, **headers)
                assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
                text = Page(reply.body).text
                assert "needs a token" in text
                assert f"export HF_ENDPOINT={hub.endpoint}\nexport HF_TOKEN=" in text
                assert not [told for told in ("s3cret", "secret/name", "config", "safetensors") if told in text]
        shown = Page(visit(hub, Authorization="Bearer s3cret").body).text
        assert "export HF_TOKEN=" in shown
        assert "IMPLICIT" not in shown
        assert "s3cret" not in shown


def test_clients_get_what_they_got_before() -> None:
    with Steps().open() as hub:
        for accept in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
            for path in ("/", "/live/model", "/live/other"):
                reply = ask(hub.endpoint, "GET", path, accept)
                assert (reply.status, reply.headers["X-Error-Code"]) == (404, "RepoNotFound")
        # Files and the API are the same for all who ask.
        for path in ("/api/models/live/model", "/live/model/resolve/main/model.safetensors"):
            assert "html" not in visit(hub, path).headers["Content-Type"]
        other = visit(hub, "/live/other")
        assert other.status == 404
        assert "one repository, live/model" in Page(other.body).text


def test_without_a_config_the_page_does_not_promise_a_model() -> None:
    with Steps().open() as hub:
        text = Page(visit(hub).body).text
    assert "There is no config.json here" in text
    assert "import transformers" not in text
    assert "snapshot_download" in text


def test_a_state_that_cannot_be_read_is_said() -> None:
    state = {"w": torch.zeros(2)}
    broken = False

    def give() -> dict[str, torch.Tensor]:
        if broken:
            raise ZeroDivisionError("<b>gone</b>")
        return state

    with transfuse.hub(give) as hub:
        broken = True
        with hub.mutating():
            pass
        reply = visit(hub)
        page = Page(reply.body)
        assert reply.status == 503
        assert "ZeroDivisionError: <b>gone</b>" in page.text
        assert "b" not in page.tags


def test_servers_are_asked_for_their_files_and_no_bytes() -> None:
    """Two stages of one state: all their files are listed."""
    stages = [{"model": {f"layer.{i}": torch.zeros(1000)}} for i in range(2)]
    with (
        transfuse.serve(stages[0], step=7) as first,
        transfuse.serve(stages[1], step=7) as second,
        transfuse.hub([first.address, second.address], prefix="model.", max_shard_bytes=4000) as hub,
    ):
        text = Page(visit(hub).body).text
        assert "Step 7" in text
        assert "model-00002-of-00002.safetensors" in text
        assert not kept(hub)


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium here")
def test_in_a_browser(assets: Path, tmp_path: Path) -> None:
    """The page is drawn in the colours that the person prefers, and no name becomes an element or a script."""
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]

    def browse(*options: str) -> str:
        ran = subprocess.run([*command, *options, hub.endpoint], capture_output=True, timeout=120, check=True)
        return ran.stdout.decode()

    with Steps().open(assets=assets) as hub:
        drawn = browse("--dump-dom")
        page = Page(drawn.encode())
        assert "<title>live/model, step 0</title>" in drawn
        assert HOSTILE.replace("\u202e", "\ufffd") in page.text
        assert "img" not in page.tags
        for scheme, colour in ((1, "ffffff"), (0, "16181c")):
            picture = tmp_path / "page.png"
            browse(f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}")
            assert first_pixel(picture.read_bytes()) == colour


def first_pixel(png: bytes) -> str:
    """The colour in the upper left corner: whatever its row is filtered by, this one has no neighbours."""
    at, data = 8, b""
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4]), png[at + 4 : at + 8]
        data += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += 12 + size
    return zlib.decompress(data)[1:4].hex()
