"""A Hub over the servers of a job: it puts shards together, and fetches a new step when somebody asks for it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch

import transfuse
from commands import Running
from hub_asking import ask, step_in
from keeping import Job, home, threaded  # noqa: F401
from transfuse._hub import commits as commits_module
from transfuse.testing.ranks import run_program
from transfuse.testing.ranks.programs import Ended

HELPERS = Path(__file__).parents[1] / "helpers"
WEIGHTS = "/live/model/resolve/main/model.safetensors"


@contextlib.contextmanager
def sharded_job(folder: Path, ranks: int, program: str = "sharded_job.py") -> Iterator[list[str]]:
    """The addresses of a job that trains on."""
    ended: list[list[Ended]] = []
    thread = threading.Thread(
        target=lambda: ended.append(run_program(HELPERS / program, ranks, arguments=[str(folder)], timeout=200))
    )
    thread.start()
    try:
        files = [folder / f"address{rank}" for rank in range(ranks)]
        wait_until(lambda: bool(ended) or all(file.exists() for file in files))
        assert not ended, ended
        yield [file.read_text() for file in files]
    finally:
        (folder / "stop").touch()
        thread.join(120)
    assert [one.code for one in ended[0]] == [0] * ranks, list(map(str, ended[0]))


def wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


def weights(endpoint: str) -> dict[str, torch.Tensor]:
    reply = ask(endpoint, "GET", WEIGHTS)
    assert reply.status == 200, (reply.status, reply.body)
    return dict(safetensors.torch.load(reply.body))


def test_shards_of_a_job_that_trains_on_are_put_together(tmp_path: Path) -> None:
    shapes = {"layer.0.weight": (7, 300), "layer.1.weight": (64, 9), "layer.2.weight": (5,), "layer.3.weight": (11,)}
    with (
        sharded_job(tmp_path, 2) as addresses,
        transfuse.hub(addresses, prefix="model.", server_token="between servers", timeout=60) as hub,
    ):
        seen: list[int] = []
        while len(seen) < 4 or len(set(seen)) < 2:
            found = weights(hub.endpoint)
            assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
            seen.append(step_in(found))
            assert seen == sorted(seen)
        # Half of the servers is not enough, and nobody gets half of the weights.
        with transfuse.hub(addresses[:1], prefix="model.", server_token="between servers") as half:
            reply = ask(half.endpoint, "GET", WEIGHTS)
            assert reply.status == 503
            assert "layer.0.weight" in reply.headers["X-Error-Message"]
        with transfuse.hub(addresses, prefix="model.", server_token="wrong", timeout=5) as wrong:
            assert ask(wrong.endpoint, "GET", WEIGHTS).status == 503


def test_reading_does_not_disturb_the_forward_pass_of_fsdp2(tmp_path: Path) -> None:
    """torch's state_dict() reshards the module: called from another thread, it ends a pass that is under way."""
    with (
        sharded_job(tmp_path, 2, "fsdp_job.py") as addresses,
        transfuse.hub(addresses, server_token="between servers", timeout=60) as hub,
    ):
        seen: list[int] = []
        while len(seen) < 12 or len(set(seen)) < 2:  # Readings may be quicker than a step.
            seen.append(step_in(weights(hub.endpoint)))
            transfuse.peek(addresses[0], token="between servers")
        assert seen == sorted(seen)


def test_one_server_and_its_end() -> None:
    weight, step = torch.zeros(1000), [0]
    state = {"layer.0.weight": weight, "n": 1}
    with transfuse.serve(state, step=lambda: step[0]) as server, transfuse.hub(server.address) as hub:
        first = ask(hub.endpoint, "HEAD", WEIGHTS).headers["X-Repo-Commit"]
        time.sleep(0.3)  # longer than a step is believed
        assert ask(hub.endpoint, "HEAD", WEIGHTS).headers["X-Repo-Commit"] == first
        with server.mutating():
            step[0] = 1
            weight.fill_(100)
        wait_until(lambda: step_in(weights(hub.endpoint)) == 1)
        with pytest.raises(RuntimeError, match="the servers'"), hub.mutating():
            pass
        held = ask(hub.endpoint, "HEAD", WEIGHTS).headers["X-Repo-Commit"]
        server.close()
        time.sleep(0.3)
        assert ask(hub.endpoint, "HEAD", WEIGHTS).status == 503
        assert ask(hub.endpoint, "HEAD", f"/live/model/resolve/{held}/model.safetensors").status == 200
    with transfuse.serve(state) as silent, transfuse.hub(silent.address) as hub:
        assert "give it step=" in ask(hub.endpoint, "GET", WEIGHTS).headers["X-Error-Message"]
    with (
        transfuse.serve({"x": torch.zeros(1, dtype=torch.complex128)}, step=1) as odd,
        transfuse.hub(odd.address) as hub,
    ):
        assert "complex128" in ask(hub.endpoint, "GET", WEIGHTS).headers["X-Error-Message"]


def test_blocks_of_several_servers_are_put_together_and_of_one_job_refused() -> None:
    whole = torch.arange(12.0)
    low, high = (transfuse.Block(whole[a:b].clone(), start=(a,), shape=(12,)) for a, b in ((0, 5), (4, 12)))
    with transfuse.serve({"w": low}, step=1) as first, transfuse.serve({"w": high}, step=1) as second:
        with transfuse.hub([first.address, second.address]) as hub:
            assert torch.equal(weights(hub.endpoint)["w"], whole)
        with transfuse.hub(first.address) as hub:
            assert "nobody holds [5:12]" in ask(hub.endpoint, "GET", WEIGHTS).headers["X-Error-Message"]
    with transfuse.hub({"w": transfuse.Block(whole, start=(0,), shape=(12,))}, step=lambda: 1) as hub:
        assert torch.equal(weights(hub.endpoint)["w"], whole)
    with (
        pytest.raises(transfuse.UnsupportedLeaf, match=r"a Block\(\[0:5\] of \(12,\), torch.float32\): this rank has"),
        transfuse.hub({"w": low}, step=lambda: 1) as hub,
    ):
        weights(hub.endpoint)


def test_servers_that_do_not_answer_hold_up_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client waits 10 s for an answer to HEAD, however many ask and however long the servers may take."""
    monkeypatch.setattr(commits_module, "HUB_COMMIT_WAIT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        hub = transfuse.hub(f"127.0.0.1:{frozen.getsockname()[1]}", timeout=100)
        with ThreadPoolExecutor(4) as pool:
            began = time.monotonic()
            assert [reply.status for reply in pool.map(lambda _: ask(hub.endpoint, "HEAD", WEIGHTS), range(4))] == [
                503
            ] * 4
            assert time.monotonic() - began < 50
        hub.close(cancel=True)
    state = {"layer.0.weight": torch.zeros(1000)}
    with transfuse.serve(state, step=lambda: 1) as server, transfuse.hub(server.address) as hub:
        # The first copy may take longer than a client waits here.
        wait_until(lambda: ask(hub.endpoint, "HEAD", WEIGHTS).status == 200)
        held = ask(hub.endpoint, "HEAD", WEIGHTS).headers["X-Repo-Commit"]
        time.sleep(0.3)  # longer than a step is believed
        with server.mutating():
            reply = ask(hub.endpoint, "HEAD", WEIGHTS)
        assert (reply.status, reply.headers["X-Repo-Commit"]) == (200, held)


# ---------------------------------------------------------------------------------------------------------- the command


def command(*arguments: str, **environ: str) -> Running:
    clean = {"TRANSFUSE_TOKEN": "", "TRANSFUSE_HUB_TOKEN": ""}
    for name in clean:
        os.environ.pop(name, None)
    return Running("hub", *arguments, environ=environ)


def end(running: Running) -> str:
    running.process.terminate()
    _, err, code = running.end()
    assert code == 0, err
    return err


def test_the_command_with_a_file_and_with_servers(tmp_path: Path) -> None:
    state = {"layer": {"0": {"weight": torch.full((50,), 300.0)}}, "n": 3}
    torch.save(state, tmp_path / "state.pt")
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    with transfuse.serve(state, step=3, token="t0") as server:
        of_file = command(
            str(tmp_path / "state.pt"), "--assets", str(tmp_path / "assets"), "--step", "3", "--name", "my/model"
        )
        of_server = command(server.address, TRANSFUSE_TOKEN="t0", TRANSFUSE_HUB_TOKEN="t1")
        with of_file, of_server:
            endpoint = of_file.line()
            reply = ask(endpoint, "GET", "/my/model/resolve/main/model.safetensors")
            assert step_in(safetensors.torch.load(reply.body)) == 3
            assert ask(endpoint, "GET", "/my/model/resolve/main/config.json").body == b"{}"
            assert ask(endpoint, "GET", "/api/models/my/model/commits/main").json[0]["title"] == "step 3"
            endpoint = of_server.line()
            assert ask(endpoint, "GET", WEIGHTS).status == 401
            reply = ask(endpoint, "GET", WEIGHTS, {"Authorization": "Bearer t1"})
            assert step_in(safetensors.torch.load(reply.body)) == 3
            for one in (of_file, of_server):
                assert "HF_ENDPOINT=http://127.0.0.1:" in end(one)


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["nowhere"], 2, "no file of this name"),
        (["127.0.0.1:1", "127.0.0.1:1"], 2, "twice"),
        (["127.0.0.1:1", "--step", "3"], 2, "tell their step"),
        (["none.pt"], 1, "none.pt"),
        (["keeper:nobody"], 1, "no keeper of a run nobody"),
        (["127.0.0.1:1", "--assets", "/none"], 2, "no directory"),
    ],
)
@pytest.mark.usefixtures("home")
def test_wrong_usage_of_the_command(arguments: list[str], code: int, why: str) -> None:
    from typer.testing import CliRunner

    from transfuse.cli.app import app

    done = CliRunner().invoke(app, ["hub", "--timeout", "5", *arguments])
    assert done.exit_code == code, done.output
    assert why in " ".join(done.output.replace("│", " ").split())


@pytest.mark.usefixtures("home", "threaded")
def test_a_keepers_newest_step_is_a_commit() -> None:
    weight = torch.zeros(500)
    state = {"model": {"layer.0.weight": weight}, "optimizer": torch.zeros(2, dtype=torch.complex128)}
    with Job(2) as job:
        job.start([lambda: state, lambda: state])
        assert job.commit(1) == ["committed"] * 2
        with command("keeper:job", "--prefix", "model.", TRANSFUSE_RUN="job") as running:
            endpoint = running.line()
            assert step_in(weights(endpoint)) == 0
            weight.fill_(200)
            assert job.commit(2) == ["committed"] * 2
            wait_until(lambda: step_in(weights(endpoint)) == 2)
            end(running)
        job.all(lambda keep: keep.close())
