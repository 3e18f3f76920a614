"""The page for torch's debug server: with the real server, while a transfer is under way."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import pickle
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transfuse
from keeping import SECONDS, Home, Job, home, same, threaded  # noqa: F401
from scraping import free_port
from transfuse._keeper import view
from transfuse._metrics import under_way
from transfuse.testing.ranks import Ranks

pytest.importorskip("jinja2", reason="torch's debug server needs jinja2")
pytest.importorskip("tabulate", reason="torch's debug server needs tabulate")
if importlib.util.find_spec("torch.distributed.debug") is None:
    pytest.skip("this torch has no debug server", allow_module_level=True)

from transfuse.integrations import debug_server

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=SECONDS)


class Held:
    """A transfer between two ranks whose receiver waits in the middle, until it is let go."""

    def __init__(self) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].total_bytes:
            self.is_there.set()
            self.may_go_on.wait(SECONDS)

    def move(self, rank: int, pg: dist.ProcessGroup) -> None:
        if rank == 0:
            transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint([1], {"w": torch.zeros(1 << 20)}, step=7)
        else:
            transfuse.PGTransport(pg, TIMEOUT, CPU, progress=self).recv_checkpoint(0, step=7)


def test_transfers_that_are_under_way_are_seen_by_any_thread() -> None:
    held = Held()
    assert under_way.transfers_under_way() == []
    with Ranks(2) as ranks:
        moving = threading.Thread(target=ranks.run, args=(held.move,))
        moving.start()
        assert held.is_there.wait(SECONDS)
        seen = {one["transfer"]: one for one in json.loads(json.dumps(under_way.transfers_under_way()))}
        held.may_go_on.set()
        moving.join()
    assert set(seen) <= {"send to 1", "receive from 0"}  # The source may have done all by then.
    assert seen["receive from 0"]["step"] == 7
    assert seen["receive from 0"]["seconds"] > 0
    assert seen["receive from 0"]["peers"]["0"]["total_bytes"] == 4 << 20
    assert under_way.transfers_under_way() == []


@pytest.mark.usefixtures("threaded")
def test_the_keepers_view_and_a_keeper_that_does_not_answer(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = home.start()
    with Job(2) as job:
        job.start(same(*[{"w": torch.zeros(100)}] * 2))
        job.commit(3)
        (found,) = view.keepers_seen(SECONDS)
        assert (found["pid"], found["confirmed_step"], found["attached"]) == (os.getpid(), 3, [0, 1])
        text = "\n".join(debug_server._lines(debug_server.seen()))
        assert f"keeper {os.getpid()} in {found['directory']}" in text
        assert "generation 1, attached ranks [0, 1], confirmed step 3" in text
        assert "rank 1: step 3 in a slot of " in text
        job.all(lambda keep: monkeypatch.setattr(keep, "_revive", lambda: None))
        keeper.stop()
        assert home.ended(keeper)
        (lost,) = view.keepers_seen(SECONDS)
        assert "no keeper answers" in lost["error"]
        assert lost["error"] in "\n".join(debug_server._lines(debug_server.seen()))
    assert view.keepers_seen(SECONDS) == []  # The job has left it.


PROGRAM = """
import os, sys, threading, time, urllib.request
from datetime import timedelta

import torch
import transfuse.integrations.debug_server
from torch.distributed import debug
from transfuse.testing.ranks import Ranks, loopback_store

SECONDS, CPU = timedelta(seconds=60), torch.device("cpu")
store = loopback_store(SECONDS)
os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"})
port = int(sys.argv[1])
handlers = transfuse.integrations.debug_server.handlers()
debug.start_debug_server(port=port, handlers=handlers)
has_asked = threading.Event()

def get(path):
    return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60).read().decode()

for _ in range(600):
    try:
        print(get("/"))
        break
    except OSError:  # It does not listen yet.
        time.sleep(0.1)

def ask(progress):
    if not has_asked.is_set() and progress[0].total_bytes:
        has_asked.set()
        print(get("/transfuse"))

def move(rank, pg):
    if rank == 0:
        transfuse.PGTransport(pg, SECONDS, CPU).send_checkpoint([1], {"w": torch.zeros(1 << 20)}, step=7)
    else:
        transfuse.PGTransport(pg, SECONDS, CPU, progress=ask).recv_checkpoint(0, step=7)

with Ranks(2, timeout=60) as ranks:
    ranks.run(move)
print("afterwards:", handlers[-1].dump())
debug.stop_debug_server()
"""


def test_the_page_of_torchs_own_server(tmp_path: pathlib.Path) -> None:
    """As its users start it, in a process of its own, which ends as it should: torch's registry outlives Python."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * SECONDS)
    assert done.returncode == 0, done.stderr
    page, _, afterwards = done.stdout.partition("afterwards: ")
    assert "transfers under way: " in page
    assert "receive from 0, step 7, for " in page
    assert " of 4.0 MiB" in page
    assert f", transfuse {transfuse.__version__}" in page
    assert '<a href="/transfuse">transfuse</a>' in page
    assert afterwards.startswith("=== Rank 0: http://")
    assert "transfers under way: 0" in afterwards


def test_its_handler_can_go_to_a_process_that_is_spawned() -> None:
    handlers = debug_server.handlers()
    assert isinstance(handlers[-1], debug_server.TransfuseHandler)
    assert len(handlers) > 5
    assert pickle.loads(pickle.dumps(handlers[-1])).dump_filename() == "transfuse"


def test_what_a_keeper_says_is_escaped_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frontend:
        @staticmethod
        def render_template(template: str, **more: Any) -> bytes:
            return b"".join(one.text.encode() for one in more["resps"])

    class Asking:
        frontend = Frontend

    from torch.distributed.debug._frontend import Response

    told = {"pid": 1, "version": "1", "transfers": [], "keepers": [{"directory": "<script>", "error": "&"}]}
    answers = [Response(200, json.dumps(told)), Response(503, "<b>gone")]
    monkeypatch.setattr("torch.distributed.debug._frontend.fetch_all", lambda name, timeout: (["a", "b"], [*answers]))
    page = debug_server.TransfuseHandler()._show(Asking())
    assert b"<script>" not in page
    assert b"keeper in &lt;script&gt;: &amp;" in page
    assert b"&lt;b&gt;gone" in page
