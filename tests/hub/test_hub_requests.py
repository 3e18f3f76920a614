"""The Hub's answers, asked by hand: ranges at every edge, errors by their codes, secrets, assets, hostile requests."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import transfuse
from hub_asking import Reply, Steps, ask, connect, kept, main_commit
from transfuse._hub import assets as assets_module
from transfuse._hub.repository import range_of
from transfuse._wire import http_server

WEIGHTS = "/live/model/resolve/main/model.safetensors"


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    folder = tmp_path / "assets"
    (folder / "chat").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "chat" / "a b%.txt").write_text("hello")
    (folder / ".secret").write_text("no")
    (tmp_path / "outside.txt").write_text("outside")
    return folder


@pytest.fixture
def hub(assets: Path) -> Iterator[transfuse.Hub]:
    with Steps().open(assets=assets) as opened:
        yield opened


# -------------------------------------------------------------------------------------------------------------- ranges


def test_ranges_at_every_edge(hub: transfuse.Hub) -> None:
    whole = ask(hub.endpoint, "GET", WEIGHTS)
    size = len(whole.body)
    assert whole.status == 200
    assert whole.headers["Accept-Ranges"] == "bytes"
    cases = {
        "bytes=0-0": (0, 1),
        "bytes=0-": (0, size),
        f"bytes=0-{size - 1}": (0, size),
        f"bytes=0-{size}": (0, size),
        f"bytes={size - 1}-": (size - 1, size),
        f"bytes={size - 1}-{size - 1}": (size - 1, size),
        "bytes=-1": (size - 1, size),
        f"bytes=-{size}": (0, size),
        f"bytes=-{size + 5}": (0, size),
        "bytes=7-100000": (7, min(size, 100001)),
    }
    for asked, (low, high) in cases.items():
        part = ask(hub.endpoint, "GET", WEIGHTS, {"Range": asked})
        assert part.status == 206, asked
        assert part.body == whole.body[low:high], asked
        assert part.headers["Content-Range"] == f"bytes {low}-{high - 1}/{size}"
        assert int(part.headers["Content-Length"]) == high - low
        assert part.headers["ETag"] == whole.headers["ETag"]
    for asked in (f"bytes={size}-", f"bytes={size}-{size + 1}", "bytes=-0", f"bytes={10**17}-"):
        part = ask(hub.endpoint, "GET", WEIGHTS, {"Range": asked})
        assert (part.status, part.headers["Content-Range"], part.body) == (416, f"bytes */{size}", b""), asked
    # What is malformed, or asks for several ranges, is ignored.
    for asked in ("bytes=5-2", "bytes=-", "bytes=", "items=0-1", "bytes=a-b", "bytes=0-1,3-4", "bytes=0-0x10", "-"):
        assert ask(hub.endpoint, "GET", WEIGHTS, {"Range": asked}).body == whole.body, asked
    # A file that has changed since is sent whole.
    etag = whole.headers["ETag"]
    assert ask(hub.endpoint, "GET", WEIGHTS, {"Range": "bytes=0-0", "If-Range": etag}).status == 206
    assert ask(hub.endpoint, "GET", WEIGHTS, {"Range": "bytes=0-0", "If-Range": '"other"'}).status == 200


def test_a_range_of_an_empty_file() -> None:
    assert range_of("bytes=0-", 0) == range(0)
    assert range_of("bytes=-5", 0) == range(0)
    assert range_of(f"bytes={10**40}-", 5) == range(0)


def test_head_says_what_get_sends(hub: transfuse.Hub) -> None:
    for path in (WEIGHTS, "/live/model/resolve/main/config.json"):
        head, got = ask(hub.endpoint, "HEAD", path), ask(hub.endpoint, "GET", path)
        assert head.body == b""
        assert int(head.headers["Content-Length"]) == len(got.body)
        for name in ("ETag", "X-Repo-Commit", "Content-Length"):
            assert head.headers[name] == got.headers[name]
        assert not [name for name in head.headers if "xet" in name.lower() or name.lower() == "link"]
        assert len(head.headers["X-Repo-Commit"]) == 40
        # A range is a thing of GET alone.
        ranged = ask(hub.endpoint, "HEAD", path, {"Range": "bytes=0-1"})
        assert (ranged.status, ranged.headers["Content-Length"]) == (200, head.headers["Content-Length"])


# -------------------------------------------------------------------------------------------------------------- errors


def code(reply: Reply) -> tuple[int, str | None]:
    return reply.status, reply.headers["X-Error-Code"]


def test_errors_have_the_codes_that_clients_know(hub: transfuse.Hub) -> None:
    unknown = "0" * 40
    for path in (
        "/live/other/resolve/main/a",
        "/api/models/live/other",
        "/",
        "/api/agent-harnesses",
        "/api/models/live",
    ):
        assert code(ask(hub.endpoint, "GET", path)) == (404, "RepoNotFound"), path
    for path in (
        f"/live/model/resolve/{unknown}/model.safetensors",
        "/live/model/resolve/dev/model.safetensors",
        "/live/model/resolve/refs%2Fpr%2F1/model.safetensors",
        f"/api/models/live/model/revision/{unknown}",
        "/api/models/live/model/tree/dev",
    ):
        assert code(ask(hub.endpoint, "GET", path)) == (404, "RevisionNotFound"), path
    missing = ask(hub.endpoint, "HEAD", "/live/model/resolve/main/tokenizer.model")
    assert code(missing) == (404, "EntryNotFound")
    assert missing.headers["X-Repo-Commit"] == main_commit(hub.endpoint)
    assert code(ask(hub.endpoint, "GET", "/api/models/live/model/tree/main/none")) == (404, "EntryNotFound")
    assert ask(hub.endpoint, "DELETE", WEIGHTS).status in (405, 501)
    assert ask(hub.endpoint, "POST", WEIGHTS, body=b"x").status == 405


def test_an_older_revision_is_not_found_and_never_other_bytes() -> None:
    steps = Steps()
    with steps.open() as hub, contextlib.closing(connection(hub)) as mine, contextlib.closing(connection(hub)) as other:
        first = main_commit(mine)
        seen: dict[str, bytes] = {}
        for _ in range(4):
            steps.advance()
            for one in (mine, other):
                commit = main_commit(one)
                path = f"/live/model/resolve/{commit}/model.safetensors"
                assert seen.setdefault(commit, ask(one, "GET", path).body) == ask(one, "GET", path).body
        assert code(ask(hub.endpoint, "GET", f"/live/model/resolve/{first}/model.safetensors")) == (
            404,
            "RevisionNotFound",
        )
        assert len(seen) == 4


def connection(hub: transfuse.Hub) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(hub.endpoint.removeprefix("http://"), timeout=60)


def test_a_step_that_raises_is_told_and_the_next_one_is_served() -> None:
    told: list[int] = []

    def step() -> int:
        return told[0]  # An IndexError while it is empty.

    told.append(1)
    with transfuse.hub({"w": torch.ones(3)}, step=step) as hub:
        assert ask(hub.endpoint, "GET", "/api/models/live/model").status == 200
        told.clear()
        with hub.mutating():
            pass
        answer = ask(hub.endpoint, "GET", "/api/models/live/model")
        assert answer.status == 503
        assert b"IndexError: list index out of range" in answer.body
        told.append(2)
        with hub.mutating():
            pass
        assert ask(hub.endpoint, "GET", "/api/models/live/model").status == 200


# -------------------------------------------------------------------------------------------------------------- assets


def test_assets_are_there_and_nothing_else_is(hub: transfuse.Hub, assets: Path, tmp_path: Path) -> None:
    (assets / "link.txt").symlink_to(tmp_path / "outside.txt")
    (assets / "inside.txt").symlink_to("config.json")
    (assets / "hidden.txt").symlink_to(".secret")
    os.mkfifo(assets / "pipe")
    listed = [one["rfilename"] for one in ask(hub.endpoint, "GET", "/api/models/live/model").json["siblings"]]
    assert sorted(listed) == ["chat/a b%.txt", "config.json", "inside.txt", "model.safetensors"]
    assert ask(hub.endpoint, "GET", "/live/model/resolve/main/chat/a%20b%25.txt").body == b"hello"
    assert ask(hub.endpoint, "GET", "/live/model/resolve/main/inside.txt").body == b'{"model_type": "none"}'
    for path in (
        "../outside.txt",
        "%2e%2e/outside.txt",
        "..%2foutside.txt",
        "%2e%2e%2foutside.txt",
        "chat/../../outside.txt",
        "chat/%2e%2e/%2e%2e/outside.txt",
        "./config.json",
        "chat//a%20b%25.txt",
        "/" + str(tmp_path / "outside.txt"),
        "%2f" + str(tmp_path / "outside.txt").replace("/", "%2f"),
        ".secret",
        "link.txt",
        "hidden.txt",
        "pipe",
        "chat",
        "chat/",
        "config.json%00.txt",
        "config.json/",
        "",
    ):
        assert code(ask(hub.endpoint, "GET", f"/live/model/resolve/main/{path}")) == (404, "EntryNotFound"), path
    # Read when asked for.
    before = ask(hub.endpoint, "HEAD", "/live/model/resolve/main/config.json").headers["ETag"]
    (assets / "config.json").write_text("{}")
    after = ask(hub.endpoint, "GET", "/live/model/resolve/main/config.json")
    assert after.body == b"{}"
    assert after.headers["ETag"] != before


@pytest.mark.parametrize(
    "name", ["model.safetensors", "x.safetensors", "model.safetensors.index.json", "sub/pytorch_model.bin"]
)
def test_an_asset_named_like_weights_is_refused_at_start(assets: Path, name: str) -> None:
    (assets / name).parent.mkdir(exist_ok=True)
    (assets / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{name}, which is named like a file of weights"):
        Steps().open(assets=assets)


def test_assets_that_cannot_be_served_are_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, assets: Path, tmp_path: Path
) -> None:
    with pytest.raises(NotADirectoryError, match="no directory"):
        Steps().open(assets=tmp_path / "none")
    (assets / "link.json").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(ValueError, match=r"link\.json.*leads out"):
        Steps().open(assets=assets)
    (assets / "link.json").unlink()
    raw_name = assets / os.fsdecode(b"raw\xff.txt")
    raw_name.write_text("")
    with pytest.raises(ValueError, match=r"raw.udcff\.txt.*not UTF-8"):
        Steps().open(assets=assets)
    raw_name.unlink()
    monkeypatch.setattr(assets_module, "MAX_FILES", 1)
    with pytest.raises(ValueError, match="more than 1 files"):
        Steps().open(assets=assets)


def test_files_that_no_client_may_have_are_not_listed_if_they_come_later(hub: transfuse.Hub, assets: Path) -> None:
    (assets / "model-00001-of-00002.safetensors").write_text("old weights")
    (assets / os.fsdecode(b"raw\xff.txt")).write_text("")
    listed = [one["rfilename"] for one in ask(hub.endpoint, "GET", "/api/models/live/model").json["siblings"]]
    assert sorted(listed) == ["chat/a b%.txt", "config.json", "model.safetensors"]
    path = "/live/model/resolve/main/model-00001-of-00002.safetensors"
    assert code(ask(hub.endpoint, "GET", path)) == (404, "EntryNotFound")


def test_folders_and_paths(hub: transfuse.Hub) -> None:
    top = ask(hub.endpoint, "GET", "/api/models/live/model/tree/main?recursive=false").json
    assert {(one["type"], one["path"]) for one in top} == {
        ("file", "config.json"),
        ("file", "model.safetensors"),
        ("directory", "chat"),
    }
    (inner,) = ask(hub.endpoint, "GET", "/api/models/live/model/tree/main/chat").json
    assert (inner["path"], inner["size"]) == ("chat/a b%.txt", 5)
    body = b"paths=chat&paths=config.json&paths=none&expand=False"
    for headers, data in (
        ({"Content-Type": "application/x-www-form-urlencoded"}, body),
        ({"Content-Type": "application/json"}, b'{"paths": ["chat", "config.json", "none"]}'),
    ):
        found = ask(hub.endpoint, "POST", "/api/models/live/model/paths-info/main", headers, data).json
        assert sorted(one["path"] for one in found) == ["chat", "config.json"]
    for data in (b"[1]", b"{", b'{"paths": [1]}', b"[" * 500_000):
        assert (
            ask(
                hub.endpoint,
                "POST",
                "/api/models/live/model/paths-info/main",
                {"Content-Type": "application/json"},
                data,
            ).status
            == 400
        )


# ------------------------------------------------------------------------------------------------------------ the token


def test_the_token_opens_and_everything_else_says_nothing() -> None:
    with Steps().open(token="s3cret") as hub:
        refused = [
            ask(hub.endpoint, "GET", path, headers)
            for path in (WEIGHTS, "/api/models/live/model", "/live/other/x", "/nonsense")
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "s3cret"},
                {"Authorization": "Basic s3cret"},
            )
        ]
        for reply in refused:
            assert (reply.status, reply.body) == (401, b"")
            said = {"WWW-Authenticate", "X-Error-Message"}
            assert set(reply.headers) == {"Server", "Date", "Content-Length", "Connection", *said}
            assert "token was sent: set HF_TOKEN" in reply.headers["X-Error-Message"]
        assert ask(hub.endpoint, "GET", WEIGHTS, {"Authorization": "Bearer s3cret"}).status == 200
    for token in ("two words", "s\u00e9cret", "s\u00e9cret".encode(), "line\n"):
        with pytest.raises(ValueError, match="of ASCII, without spaces: clients send it in a header"):
            Steps().open(token=token)
    for wrong in ({"token": 5}, {"token": ["s3cret"]}):
        with pytest.raises(TypeError, match=r"token takes text or bytes, got (int|list)$"):
            Steps().open(**wrong)
    with pytest.raises(TypeError, match="server_token takes text or bytes, got int"):
        transfuse.hub("h:1", server_token=5)  # type: ignore[arg-type]


def test_a_hub_without_a_config_warns(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with Steps().open(assets=tmp_path):
        assert not caplog.messages
    (tmp_path / "config.json").unlink()
    for assets in (None, tmp_path):
        caplog.clear()
        with Steps().open(assets=assets):
            (said,) = caplog.messages
        assert "the hub has no config.json, without which from_pretrained('live/model') cannot" in said
        assert "pass assets=" in said


def test_pages_in_a_browser_cannot_come_by_a_name_of_their_own(hub: transfuse.Hub) -> None:
    for host, status in (("evil.example", 403), ("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:5", 200), ("", 403)):
        assert ask(hub.endpoint, "GET", WEIGHTS, {"Host": host}).status == status, host


# ----------------------------------------------------------------------------------------------------- hostile requests


def raw(hub: transfuse.Hub, data: bytes, *, shut: bool = True) -> bytes:
    """What the Hub says to these bytes, until it closes."""
    with connect(hub.endpoint) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            if shut:
                sock.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while more := sock.recv(65536):
                received += more
        return received


def test_malformed_requests_are_refused_and_the_hub_lives(hub: transfuse.Hub) -> None:
    get = b"GET " + WEIGHTS.encode() + b" HTTP/1.1\r\nHost: localhost\r\n"
    cases = {
        b"\r\n\r\n": b"",
        b"nonsense\r\n\r\n": b" 400 ",
        b"GET / HTTP/9.9\r\n\r\n": b" 505 ",
        b"GET /\r\n\r\n": b"",
        b"\x00\xff\xfe" * 50 + b"\r\n\r\n": b" 400 ",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n": b" 431 ",
        get + b"X: " + b"a" * 100_000 + b"\r\n\r\n": b" 431 ",
        get + b"".join(b"X%d: 1\r\n" % i for i in range(20_000)) + b"\r\n": b" 431 ",
        get + b"".join(b"X%d: 1\r\n" % i for i in range(500)) + b"\r\n": b" 431 ",
        get + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n": b" 411 ",
        get + b"Content-Length: -1\r\n\r\n": b" 411 ",
        get + b"Content-Length: 1e3\r\n\r\n": b" 411 ",
        get + b"Content-Length: 99999999999999\r\n\r\n": b" 413 ",
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n": b" 404 ",
        b"GET //host/%ff%zz HTTP/1.1\r\nHost: localhost\r\n\r\n": b" 404 ",
    }
    for data, answer in cases.items():
        said = raw(hub, data).split(b"\r\n")[0]
        assert answer in said if answer else not said.startswith(b"HTTP/1.1 2"), (data[:60], said)
    assert ask(hub.endpoint, "GET", WEIGHTS).status == 200


def test_pipelined_requests_are_answered_in_order(hub: transfuse.Hub) -> None:
    paths = ["config.json", "none", "config.json", "chat/a%20b%25.txt"]
    data = b"".join(
        f"GET /live/model/resolve/main/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths
    )
    said = raw(hub, data)
    assert re.findall(rb"HTTP/1\.1 (\d+)", said) == [b"200", b"404", b"200", b"200"]
    assert said.endswith(b"hello")
    # A body that belongs to a request is not taken for the next request.
    inside = b"GET /live/model/resolve/main/config.json HTTP/1.1\r\n\r\n"
    smuggled = b"GET /live/model/resolve/main/none HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
        inside
    )
    assert raw(hub, smuggled + inside).count(b"HTTP/1.1 ") == 1


def test_a_request_that_trickles_in_is_dropped(monkeypatch: pytest.MonkeyPatch, hub: transfuse.Hub) -> None:
    monkeypatch.setattr(http_server, "HTTP_REQUEST_SECONDS", 0.5)
    with connect(hub.endpoint) as sock:
        until = time.monotonic() + 60
        sock.setblocking(False)
        gone = False
        while not gone:
            assert time.monotonic() < until
            try:
                sock.send(b"a")
                gone = sock.recv(1) == b""
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                gone = True


def test_idle_connections_make_room_and_busy_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)
    with Steps().open() as hub, contextlib.ExitStack() as stack:
        idle = []
        for _ in range(100):
            idle.append(stack.enter_context(connect(hub.endpoint)))
            # However fast they come.
            assert len(hub._server.connections) <= 4
        assert ask(hub.endpoint, "GET", WEIGHTS).status == 200
        assert idle[0].recv(1) == b""  # The oldest was closed.
    with Steps(tensors=2, size=4 << 20).open(timeout=60) as hub, contextlib.ExitStack() as stack:
        for _ in range(4):
            busy = stack.enter_context(connect(hub.endpoint))
            busy.sendall(b"GET " + WEIGHTS.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert busy.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
        until = time.monotonic() + 60
        while ask(hub.endpoint, "GET", WEIGHTS).status != 503:
            assert time.monotonic() < until
        stack.close()
        hub.close(cancel=True)


# ----------------------------------------------------------------------------------------------------- stalled clients


def stall(hub: transfuse.Hub) -> socket.socket:
    """Ask for the weights, and take no more than the first bytes."""
    sock = connect(hub.endpoint)
    sock.sendall(b"GET " + WEIGHTS.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert sock.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
    return sock


def test_stalled_clients_never_stop_training() -> None:
    steps = Steps(tensors=2, size=8 << 20)
    began = time.monotonic()
    with steps.open(timeout=120) as hub, contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(stall(hub)) for _ in range(3)]
        for _ in range(10):
            steps.advance()
        stalled.append(stack.enter_context(stall(hub)))
        for _ in range(10):
            steps.advance()
        # Two commits are held by clients that take nothing; all others get the newer one.
        assert ask(hub.endpoint, "HEAD", WEIGHTS).status == 200
        assert steps.step == 20
        assert all(hub._server.connections)
        assert time.monotonic() - began < 120
        hub.close(cancel=True)


def test_a_client_that_takes_too_little_is_dropped() -> None:
    steps = Steps(tensors=2, size=8 << 20)
    with steps.open(timeout=0.5) as hub, stall(hub) as sock:
        until = time.monotonic() + 60
        while any(one.idle_since is None for one in hub._server.connections.values()):
            assert time.monotonic() < until
            sock.recv(100)  # It trickles: never silent for as long as the timeout.
            time.sleep(0.1)
        steps.advance()


def test_closing_lets_downloads_end_and_cancelling_does_not() -> None:
    steps = Steps(tensors=2, size=4 << 20)
    hub = steps.open(timeout=60)
    with contextlib.closing(connection(hub)) as asking, contextlib.closing(connection(hub)) as idle:
        assert ask(idle, "GET", "/api/models/live/model").status == 200
        asking.request("GET", WEIGHTS)
        response = asking.getresponse()
        closing = threading.Thread(target=hub.close)
        closing.start()
        assert len(response.read()) == int(response.headers["Content-Length"]) > 8 << 22
        closing.join(60)
        assert not closing.is_alive()
    assert not kept(hub)  # The memory is free, though the Hub is still referred to.
    hub = steps.open(timeout=600)
    with stall(hub):
        hub.close(cancel=True)
        assert not hub._server.connections
    with pytest.raises(ConnectionError):
        connect(hub.endpoint)
    hub.close()


def test_closing_does_not_wait_for_a_stalled_client_for_ever_and_frees_the_copies() -> None:
    hub = Steps(tensors=2, size=8 << 20).open(timeout=600, hold=0.01)
    with stall(hub):
        assert kept(hub)
        closing = threading.Thread(target=hub.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
    assert not kept(hub)


# ------------------------------------------------------------------------------------------------------------ arguments


def test_arguments_are_checked() -> None:
    state = {"w": torch.zeros(2)}
    for options, why in (
        ({"name": "a/b/c"}, "live/model"),
        ({"name": "../x"}, "live/model"),
        ({"name": "api/models"}, "live/model"),
        ({"host": ""}, "every interface"),
        ({"port": 70000}, "port must be"),
        ({"max_shard_bytes": 0}, "max_shard_bytes must be at least 1"),
        ({"hold": 0}, "hold must be"),
        ({"server_token": "x"}, "addresses"),
    ):
        with pytest.raises(ValueError, match=why):
            transfuse.hub(state, **options)
    with pytest.raises(ValueError, match="host:port"):
        transfuse.hub("nowhere")
    with pytest.raises(ValueError, match="twice"):
        transfuse.hub(["h:1", "h:1"])
    with pytest.raises(ValueError, match="servers tell their own"):
        transfuse.hub("h:1", step=3)
    with transfuse.hub(state, name="alone") as hub:
        assert ask(hub.endpoint, "GET", "/alone/resolve/main/model.safetensors").status == 200
        assert ask(hub.endpoint, "GET", "/api/models/alone/revision/main").json["id"] == "alone"


def test_the_secret_and_the_state_are_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"), Steps().open(token="s3cret") as hub:
        ask(hub.endpoint, "GET", WEIGHTS, {"Authorization": "Bearer s3cret"})
        ask(hub.endpoint, "GET", WEIGHTS, {"Authorization": "Bearer wr0ng"})
    assert "s3cret" not in caplog.text
    assert "wr0ng" not in caplog.text


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_close_it(hub: transfuse.Hub) -> None:
    pid = os.fork()
    if not pid:
        hub.close(cancel=True)
        os._exit(0)
    os.waitpid(pid, 0)
    assert ask(hub.endpoint, "GET", WEIGHTS).status == 200
