"""What docs/cli.md shows is what the command prints: its blocks are run, and compared in all that does not vary."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from commands import Running
from keeping import Home, home  # noqa: F401
from transfuse.cli.app import COMMANDS, app
from transfuse.cli.doctor import trial
from transfuse.testing.ranks import listening

GUIDE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()

#: What differs from run to run: times, rates, the route where a machine has only one, and sizes of zip files.
VARYING = (
    (r"in [\d.]+ s( \([\d.]+ \w+/s while bytes moved\))?", "in …"),
    (r"by (memory|group)", "by …"),
    (r"\(torch\.save, [\d.]+ \w+\)", "(torch.save, …)"),
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.S)


def steady(text: str) -> list[str]:
    for pattern, instead in VARYING:
        text = re.sub(pattern, instead, text)
    return [line.rstrip() for line in text.splitlines()]


def steps() -> list[tuple[str, str]]:
    """All commands of the guide, in order, each with what it is said to print."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def free_ports(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(one.getsockname()[1]) for one in sockets]


def test_commands_print_what_the_guide_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks("python"):
        exec(compile(code, "docs/cli.md", "exec"), {})
    ports = dict(zip(("4711", "4712"), free_ports(2), strict=True))
    servers: list[tuple[Running, list[str], list[str]]] = []
    ran = []
    with ExitStack() as stack:
        for command, output in steps():
            for shown, real in ports.items():
                command, output = command.replace(shown, real), output.replace(shown, real)
            program, *arguments = command.split()
            ran.append(" ".join([program, *arguments[:1]]))
            if program == "python":
                subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True, timeout=60)
            elif arguments[0] == "serve":
                server = stack.enter_context(Running(*arguments, cwd=tmp_path))
                servers.append((server, [server.line()], steady(output)))
            elif arguments[0] != "doctor":  # has a test of its own
                assert steady(CliRunner().invoke(app, arguments).output) == steady(output), command
        for server, first, expected in servers:
            out, err, exit_code = server.end()
            assert exit_code == 0, err
            # Its two streams come in any order.
            assert sorted(first + steady(out) + steady(err)) == sorted(expected)
    assert {"transfuse inspect", "transfuse serve", "transfuse fetch", "transfuse doctor"} <= set(ran)


def test_doctor_finds_what_the_guide_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "listening", partial(listening, method="forkserver"))
    (shown,) = [output for command, output in steps() if command == "transfuse doctor"]
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    about = re.compile(r"^(?:ok|note|warn|fail) +(\S+(?: \S+)?)  ", re.M)
    assert about.findall(done.stdout) == about.findall(shown)


def test_exit_codes_and_commands_are_those_that_there_are() -> None:
    from transfuse.cli.errors import Exit

    assert {int(code) for code in re.findall(r"^\| (\d+) \|", GUIDE, re.M)} == {0, *map(int, Exit)}
    named = set(re.findall(r"^\| `transfuse (\w+)", GUIDE, re.M))
    assert named == set(COMMANDS)


def test_the_list_of_commands_says_what_each_says_first() -> None:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert command.help == " ".join(command.real().help.split("\n\n")[0].split()), name


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["keep", "--status"], ["keep", "--stop", "nobody"]])
def test_what_needs_no_torch_imports_none(words: list[str], home: Home) -> None:  # noqa: F811
    lines = [
        "import sys; from transfuse import cli",
        f"sys.argv = {['transfuse', *words]}",
        "try: cli.main()",
        "finally: print('torch' in sys.modules)",
    ]
    home.start()
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert done.returncode == int("nobody" in words), done.stderr
