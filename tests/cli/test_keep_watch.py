"""``transfuse keep --status``, ``--watch`` and ``--check``: all hosts of a run, once and as a live view."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from commands import COMMAND, Running
from keeping import SECONDS, Home, Job, home, keepers_in, same, threaded, until  # noqa: F401
from transfuse._keeper import door, overview
from transfuse._keeper.process import Keeper
from transfuse.cli import keeper_table
from transfuse.cli.app import app
from transfuse.testing.ranks import FOREGROUND

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("threaded", "no_run")]


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFUSE_RUN", raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keep", *arguments, "--timeout", str(SECONDS)])


@contextmanager
def two_hosts(home: Home) -> Iterator[tuple[Job, dict[str, Keeper]]]:  # noqa: F811
    """A job whose two ranks are on two "hosts": each has the keeper of its own run's name."""
    keepers = {name: home.start(name) for name in ("a", "b")}
    states = [{"w": torch.full((4,), float(rank))} for rank in range(2)]
    with Job(2) as job:
        job.start(same(*states), [{"run": "a"}, {"run": "b"}])
        yield job, keepers
        job.all(lambda keep: keep.close())


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_the_status_shows_all_hosts(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(door, "DOOR_ASK_SECONDS", 1.0)
    monkeypatch.setattr(overview, "OVERVIEW_ASK_SECONDS", 1.0)
    with two_hosts(home) as (job, keepers):
        assert job.commit(7) == ["committed"] * 2
        until(lambda: [home.status(name)["confirmed_step"] for name in "ab"] == [7, 7])
        table = run("--status", "--run", "a").output.splitlines()
        head, first, second = map(cells, table[:3])
        assert head == [
            *("run", "host", "keeper", "pid", "attached", "step", "newest", "lag", "committed", "memory", "replicas"),
        ]
        assert first[:3] == ["a", "0", "alive"]
        assert second[:3] == ["a", "1", "alive"]
        assert first[4:8] == ["0", "7", "7", "0"]
        assert second[4:8] == ["1", "7", "7", "0"]
        assert "a: 127.0.0.1:" in table[3]
        assert "holds step 7 (rank 0), step 7 of host 1 (rank 1)" in table[3]
        (told,) = json.loads(run("--status", "--run", "a", "--json").output)
        assert [(one["host"], one["keeper"], one["confirmed_step"]) for one in told["hosts"]] == [(1, "alive", 7)]
        # A host that is lost is shown, and so is what follows from it.
        door_of_b = keepers["b"].ring._door
        assert door_of_b is not None
        door_of_b.close()
        lost = "the keepers of hosts [1] cannot be reached"
        until(lambda: any(lost in one for one in home.status("a")["trouble"]))
        table = run("--status", "--run", "a").output.splitlines()
        assert cells(table[2]) == ["a", "1", "unreachable", "1"]
        assert f"a, host 1: {door_of_b.address} does not answer: " in "\n".join(table)
        assert f"a, host 0: {lost}: no step is confirmed until they are back" in "\n".join(table)
        keepers["b"].ring._door = None
        keepers["b"].ring.listen(door_of_b.host, door_of_b.token)


def test_the_columns_of_saved_steps_of_pace_and_of_lag(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    """Both hosts show what is saved; the one whose ranks have not come as far shows by how much. And live, too."""
    for name in ("a", "b"):
        home.start(name)
    states = [{"w": torch.zeros(4)} for _ in range(2)]
    with Job(2, directory=tmp_path, save_every=2, replicas=0) as job:
        job.start(same(*states), [{"run": "a"}, {"run": "b"}])

        def columns() -> list[dict[str, str]]:
            head, *rows = map(cells, run("--status", "--run", "a").output.splitlines()[:3])
            return [dict(zip(head, row, strict=True)) for row in rows]

        for step in (1, 2):
            job.commit(step)
        until(lambda: [one["saved"] for one in columns()] == ["2", "2"])
        assert [one["lag"] for one in columns()] == ["0", "0"]
        assert all(re.fullmatch(r"[\d.e+]+/s", one["rate"]) for one in columns())
        with Running("keep", "--status", "--watch", "--run", "a", "--interval", "0.1") as watching:

            def row(host: str) -> list[str]:
                found: list[str] = until(lambda: (one := cells(watching.line()))[:2] == ["a", host] and one)
                return found

            assert row("0")[6:8] == ["2", "0"]
            for step in (3, 5):
                job.keeps[0].commit(step)
            until(lambda: row("0")[6:8] == ["5", "0"])
            until(lambda: row("1")[6:8] == ["2", "3"])
        assert [(one["newest"], one["lag"]) for one in columns()] == [("5", "0"), ("2", "3")]
        job.all(lambda keep: keep.detach())


def test_what_is_watched_is_printed_again_and_again_until_the_run_ends(home: Home) -> None:  # noqa: F811
    home.start()
    with Job(1, max_bytes=1 << 30) as job:
        job.start([lambda: {"w": torch.ones(2)}])
        assert job.commit(1) == ["committed"]
        with Running("keep", "--status", "--watch", "--interval", "0.1") as watching:
            lines = watching.read_until("job")
            assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", lines[0])
            assert cells(lines[1])[:3] == ["run", "keeper", "pid"]
            assert "of 1.0 GiB" in lines[2]
            assert job.commit(2) == ["committed"]
            until(lambda: cells(watching.read_until("alive")[-1])[4] == "2")
            job.all(lambda keep: keep.close())
            out, err, code = watching.end()
    assert (err, code) == ("", 0)
    assert out.endswith("job: the keeper has ended, and left nothing\n")


def test_a_watched_keeper_that_is_killed_or_frozen_is_shown(home: Home) -> None:  # noqa: F811
    with Job(1) as job:
        job.start([lambda: {"w": torch.ones(2)}])
        assert job.commit(1) == ["committed"]
        (pid,) = keepers_in(home.base)
        options = ("--interval", "0.1", "--timeout", "0.5", "--json")
        with Running("keep", "--status", "--watch", "--run", "job", *options) as watching:

            def until_it_is(state: str) -> Any:
                return until(lambda: (one := json.loads(watching.line())[0])["keeper"] == state and one)

            assert until_it_is("alive")["commit"]["step"] == 1
            os.kill(pid, signal.SIGSTOP)
            assert until_it_is("silent")["pid"] == pid
            os.kill(pid, signal.SIGCONT)
            until_it_is("alive")
            os.kill(pid, signal.SIGKILL)
            until_it_is("dead")
            watching.process.send_signal(signal.SIGINT)
            _, err, code = watching.end()
        assert (err, code) == ("", 0)


class Screen:
    """The command on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environ = os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "40", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [*FOREGROUND, *COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environ
        )
        os.close(slave)
        self.text = ""

    def until(self, fact: Callable[[str], object]) -> None:
        while not fact(self.text):
            ready, _, _ = select.select([self._master], [], [], SECONDS)
            assert ready, self.text
            try:
                self.text += os.read(self._master, 1 << 16).decode()
            except OSError:  # The other end is closed.
                assert fact(self.text), self.text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_on_a_terminal_it_redraws_in_place_and_ends_by_ctrl_c(home: Home) -> None:  # noqa: F811
    home.start()
    with Job(1) as job:
        job.start([lambda: {"w": torch.ones(2)}])
        assert job.commit(1) == ["committed"]
        screen = Screen("keep", "--status", "--watch", "--interval", "0.1")
        try:
            up = "\x1b[1A"  # The cursor goes up over what was drawn before.
            screen.until(lambda text: "alive" in text and up in text)
            assert job.commit(23) == ["committed"]
            screen.until(lambda text: re.search(r"\b23\b", text))
            screen.process.send_signal(signal.SIGINT)
            assert screen.process.wait(SECONDS) == 0
            screen.until(lambda text: "\x1b[?25h" in text)  # The cursor is shown again.
            assert "Traceback" not in screen.text
        finally:
            screen.close()
        job.all(lambda keep: keep.close())


def test_there_is_nothing_to_watch(home: Home) -> None:  # noqa: F811
    done = run("--status", "--watch")
    assert (done.exit_code, done.output) == (0, f"no keeper in {home.base}\n")
    done = run("--status", "--watch", "--run", "x")
    assert (done.exit_code, done.output) == (0, f"no keeper in {home.base} of a run x\n")
    done = run("--watch")
    assert done.exit_code == 2
    assert "give --status, too" in " ".join(done.output.split())


def test_watching_imports_no_torch(home: Home) -> None:  # noqa: F811
    home.start()
    program = (
        "import sys; from typer.testing import CliRunner; from transfuse.cli.app import app;"
        "done = CliRunner().invoke(app, ['keep', '--status', '--json']); assert done.exit_code == 0, done.output;"
        "done = CliRunner().invoke(app, ['keep', '--check', '--run', 'job']); assert done.exit_code == 0, done.output;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "False\n"


# ------------------------------------------------------------------------------------------------------------- check


def test_a_probe_by_exit_code(home: Home) -> None:  # noqa: F811
    absent = run("--check", "--run", "job")
    assert absent.exit_code == 1
    assert f"no keeper of run job listens at {home.directory('job')}/socket" in absent.output
    keeper = home.start()
    done = run("--check", "--run", "job")
    assert done.exit_code == 0
    assert done.output.startswith(f"the keeper of run job answers at {home.directory('job')}/socket: process")
    assert json.loads(run("--check", "--run", "job", "--json").output)["keeper"] == "alive"
    with Job(1) as job:
        job.start([lambda: {"w": torch.ones(2)}])
        job.commit(1)
        with keeper.changed:
            keeper.books.slot(0, 0).pins += 1  # Somebody reads.
        keeper.drain()
        until(lambda: keeper.is_draining)
        done = run("--check", "--run", "job")
        assert (done.exit_code, done.output) == (
            1,
            "transfuse keep: the keeper of run job was told to end, and takes no new commits\n",
        )
        assert "drains" in run("--status").output
        with keeper.changed:
            keeper.books.slot(0, 0).pins -= 1
        assert home.ended(keeper)


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (12.3, "12 s"), (150.0, "2 min"), (9000.0, "2 h")])
def test_times_are_short(seconds: float, text: str) -> None:
    assert keeper_table._seconds(seconds) == text
