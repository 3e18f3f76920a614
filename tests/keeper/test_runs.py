"""Which run a worker belongs to, and the directory where that run's keeper is found."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

import transfuse
from transfuse._errors import TransfuseError
from transfuse._keeper import runs
from transfuse._keeper.runs import Process, Run, base_directory, find_run, list_runs, make_directory

SECONDS = 120
#: A program that prints what `find_run` finds. It leaves out the package's own imports: torch takes seconds.
WHO = f"""
import json, os, sys, types
package = types.ModuleType("transfuse")
package.__path__ = {list(transfuse.__path__)!r}
sys.modules["transfuse"] = package
from transfuse._keeper.runs import find_run
run = find_run()
print(json.dumps([run.name, run.is_named, run.agent, os.getpid(), os.getppid(), run.directory.name]), flush=True)
"""


@pytest.fixture(scope="module")
def who(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command that runs this program."""
    path = tmp_path_factory.mktemp("who") / "who.py"
    path.write_text(WHO)
    return f"{sys.executable} {path}"


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A directory of keepers for this test. It is short, because socket paths are."""
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC_", "PET_", "TRANSFUSE_RUN")):
            monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="tf") as above:
        monkeypatch.setenv("TRANSFUSE_KEEPER_DIR", f"{above}/k")
        yield pathlib.Path(above, "k")


# --------------------------------------------------------------------------------------------- processes


@contextlib.contextmanager
def program(*command: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A process that is dead in the end. The test writes to it and reads from it."""
    with subprocess.Popen(  # type: ignore[call-overload]
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_is_known_by_pid_and_start_time() -> None:
    with program("cat") as process:
        found = Process.of(process.pid)
        assert found is not None
        assert found.alive()
        assert not Process(found.pid, found.started + 1).alive()
        assert found == Process.of(process.pid)
        process.kill()
        # It is a zombie from now on, until somebody waits for it.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Process.of(process.pid) == found
        assert not found.alive()
        process.wait(SECONDS)
        assert not found.alive()
        assert Process.of(process.pid) is None


@pytest.mark.parametrize("name", ["a b", ") R 1 1 1", "x) S 9 (", "((("])
def test_a_program_may_have_any_name(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / name
    path.symlink_to("/bin/cat")
    with program(str(path)) as process:
        # An answer says that the program runs under its new name.
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("x\n")
        process.stdin.flush()
        process.stdout.readline()
        assert name[:15] in pathlib.Path(f"/proc/{process.pid}/stat").read_text()
        found = Process.of(process.pid)
        mine = Process.of(os.getpid())
        assert found is not None
        assert mine is not None
        assert found.alive()
        assert found.started >= mine.started


def test_no_process_has_pid_0() -> None:
    assert Process.of(0) is None


# ------------------------------------------------------------------------------------------------- agents


def ask(*command: str, environ: dict[str, str] | None = None, **options: object) -> tuple[Run, int, int, int]:
    """The run that a program finds, its pid, its parent's pid, and the pid of the command that was started."""
    with program(*command, env=os.environ | (environ or {}), **options) as process:
        out, _ = process.communicate(timeout=SECONDS)
        name, is_named, agent, pid, parent, _ = json.loads(out.splitlines()[-1])
        return Run(name, is_named, Process(*agent)), pid, parent, process.pid


def agent_of(run: Run) -> int:
    assert run.agent is not None
    return run.agent.pid


def test_a_program_of_a_script_belongs_to_the_script(who: str) -> None:
    run, pid, _, script = ask("sh", "-c", f"{who}; true", start_new_session=True)
    assert agent_of(run) == script != pid
    assert not run.is_named
    assert str(script) in run.name


def directories(script: str) -> list[str]:
    """The directories of the programs that a script starts, one after the other."""
    with program("sh", "-c", f"{script}; true", start_new_session=True) as process:
        out, _ = process.communicate(timeout=SECONDS)
        return [json.loads(line)[-1] for line in out.splitlines()]


def test_restarts_by_one_script_are_one_run_and_two_scripts_are_two(who: str) -> None:
    one, again = directories(f"{who}; {who}")
    (other,) = directories(who)
    assert one == again != other


def test_other_commands_of_one_script_are_other_runs(who: str) -> None:
    """A loop over learning rates, given as an argument, by the environment, or as a directory."""
    found = directories(
        f"{who} --lr 1; {who} --lr 2; SEED=1 {who} --lr 1; SEED=2 {who} --lr 1; cd /; {who} --lr 1; "
        f"cd - > /dev/null; {who} --lr 1; MASTER_PORT=1234 {who} --lr 1"
    )
    assert len(set(found[:5])) == 5
    assert found[5] == found[6] == found[0]


def test_all_ranks_of_one_agent_have_the_run_of_the_first() -> None:
    """A launcher may give each rank an argument, or variables, of its own."""
    one, other = (Run(f"agent {number}", False, Process(number, 1), f"rank {number}") for number in range(2))
    ranks = [one, replace(one, command="rank 1"), other]
    assert [runs.agreed(run, ranks) for run in ranks] == [one, one, other]
    named = Run("a name", True, Process(1, 1))
    assert runs.agreed(named, [named, one]) == named


def test_launches_from_one_process_by_torchruns_api_are_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for job in ("1", "2", "1"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        found.append(find_run().directory)
    assert found[0] == found[2] != found[1]


def test_a_program_with_a_group_of_its_own_belongs_to_its_parent(who: str) -> None:
    run, pid, parent, started = ask(*who.split(), process_group=0)
    assert pid == started
    assert agent_of(run) == parent == os.getpid()


def test_what_multiprocessing_starts_belongs_to_the_starter() -> None:
    # The parent of these processes is the fork server, which is not their agent.
    context = multiprocessing.get_context("forkserver")
    found = []
    for _ in range(2):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found.append(pool.submit(find_run_of_worker).result(SECONDS))
    assert {agent for agent, _ in found} == {os.getpid()}
    assert len({name for _, name in found}) == 1


def find_run_of_worker() -> tuple[int, str]:
    assert multiprocessing.parent_process() is not None
    run = find_run()
    return agent_of(run), run.directory.name


def test_a_program_of_torchrun_belongs_to_the_parent_of_its_session(who: str) -> None:
    # As torchrun does: a session for each worker. Between the two there may be a shell.
    run, pid, _, leader = ask(
        *("sh", "-c", f"{who}; true"),
        environ={"TORCHELASTIC_RUN_ID": "none"},
        start_new_session=True,
    )
    assert leader != pid
    assert agent_of(run) == os.getpid()
    assert not run.is_named


# -------------------------------------------------------------------------------------------------- names


def as_if_under(who: str, *words: str, used: str) -> Run:
    """The run of a worker whose agent has this command line."""
    command = ["sh", "-c", f"{who}; true"]
    starter = f"import subprocess; subprocess.run({command!r}, start_new_session=True)"
    run, *_, agent = ask(sys.executable, "-c", starter, *words, environ={"TORCHELASTIC_RUN_ID": used})
    assert agent_of(run) == agent
    return run


@pytest.mark.parametrize(
    "words", [["--rdzv-id=a job"], ["--rdzv_id", "a job"], ["--standalone", "--rdzv-id", "a job", "train.py"]]
)
def test_an_explicit_id_is_a_name(who: str, words: list[str]) -> None:
    run = as_if_under(who, *words, used="a job")
    assert (run.name, run.is_named) == ("a job", True)


@pytest.mark.parametrize(
    ("words", "used"),
    [
        ([], "none"),
        (["--rdzv-id=none"], "none"),
        # --standalone: torchrun ignores what was given.
        (["--standalone", "--rdzv-id=a job"], "5dd6b8f4"),
        # A program's own words.
        (["train.py", "--id", "a job"], "a job"),
        (["--rdzv-id"], "a job"),
    ],
)
def test_everything_else_is_not(who: str, words: list[str], used: str) -> None:
    run = as_if_under(who, *words, used=used)
    assert not run.is_named
    assert used not in run.name


def test_the_callers_name_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "by torchrun")
    monkeypatch.setenv("PET_RDZV_ID", "by torchrun")
    assert find_run().name == "by torchrun"
    monkeypatch.setenv("TRANSFUSE_RUN", "by environment")
    assert find_run(None).name == "by environment"
    run = find_run("by caller")
    assert (run.name, run.is_named) == ("by caller", True)
    assert run.agent is not None


def test_names_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "  "):
        with pytest.raises(ValueError, match="run= is empty"):
            find_run(name)
    find_run("x" * 200)
    with pytest.raises(ValueError, match="run= has 201 characters; a run's name has at most 200"):
        find_run("x" * 201)
    with pytest.raises(ValueError, match="not valid Unicode"):
        find_run("\udc80")
    with pytest.raises(TypeError, match="run= must be a str, not int"):
        find_run(7)  # type: ignore[arg-type]
    monkeypatch.setenv("TRANSFUSE_RUN", "")
    with pytest.raises(ValueError, match="TRANSFUSE_RUN is empty"):
        find_run()


# -------------------------------------------------------------------------------------------- directories


@pytest.mark.parametrize("name", ["..", ".", "../../etc", "/", "a/b", "a\0b", "a\nb", "ü", "-rf", "x" * 200, "~"])
def test_no_name_leads_elsewhere(base: pathlib.Path, name: str) -> None:
    path = make_directory(Run(name, True, None))
    assert path.parent == base
    assert path.name.isascii()
    assert path.name[0] not in ".-~"
    assert path.stat().st_mode & 0o777 == 0o700
    assert base.stat().st_mode & 0o777 == 0o700


def test_every_run_has_a_directory_of_its_own() -> None:
    names = ["a", "a ", "A", "a/b", "a-b", "a.b", "x" * 199, "x" * 200]
    paths = {Run(name, named, None).directory for name in names for named in (False, True)}
    assert len(paths) == 2 * len(names)
    assert Run("a", True, Process(1, 2)).directory == Run("a", True, None).directory


def test_a_socket_fits_wherever_a_directory_is_accepted(base: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(length: int) -> None:
        monkeypatch.setenv("TRANSFUSE_KEEPER_DIR", f"{base}".ljust(length, "x"))

    longer(runs._MAX_BASE_BYTES)
    path = make_directory(Run("x" * 200, True, None))
    assert len(bytes(path)) + 1 + runs.MAX_SOCKET_NAME_BYTES == runs.MAX_SOCKET_PATH_BYTES
    longer(runs._MAX_BASE_BYTES + 1)
    with pytest.raises(TransfuseError, match="Set TRANSFUSE_KEEPER_DIR to a shorter one"):
        base_directory()


def test_runs_are_listed(base: pathlib.Path) -> None:
    assert list_runs() == []
    known = [Run("a", True, Process(1, 2)), Run("ü/b", True, None), Run("boot 1", False, Process(3, 4))]
    for run in reversed(known):
        make_directory(run)
        make_directory(run)
    (base / "stranger").mkdir()
    (base / "file").touch()
    (base / "copy").mkdir()
    (base / "copy" / runs.RUN_FILE).write_bytes((known[0].directory / runs.RUN_FILE).read_bytes())
    (base / "damaged").mkdir()
    (base / "damaged" / runs.RUN_FILE).write_text('{"name": 3}')
    assert list_runs() == known
    assert [path.name for path in known[0].directory.iterdir()] == [runs.RUN_FILE]


def test_the_base_is_found(monkeypatch: pytest.MonkeyPatch, base: pathlib.Path) -> None:
    monkeypatch.setenv("TRANSFUSE_KEEPER_DIR", str(base / "several" / "more"))
    assert base_directory() == base / "several" / "more"
    # This one is deleted when its user logs out. A job that was started there goes on, and must find its keeper.
    runtime = base.parent / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("TRANSFUSE_KEEPER_DIR")
    made: list[pathlib.Path] = []
    monkeypatch.setattr(runs, "_make_private", made.append)
    assert base_directory() == made[-1] == pathlib.Path(f"/tmp/transfuse-{os.geteuid()}")


def test_a_directory_that_others_can_enter_is_refused(base: pathlib.Path) -> None:
    base.mkdir(mode=0o700)
    base_directory()
    base.chmod(0o750)
    with pytest.raises(TransfuseError, match=r"is open to others \(mode 0750 instead of 0700\)"):
        base_directory()


def test_a_link_or_a_file_is_refused(base: pathlib.Path) -> None:
    (base.parent / "mine").mkdir(mode=0o700)
    base.symlink_to(base.parent / "mine")
    with pytest.raises(TransfuseError, match="is a symbolic link"):
        base_directory()
    base.unlink()
    base.touch()
    with pytest.raises(TransfuseError, match="is not a directory"):
        base_directory()


def test_somebody_elses_directory_is_refused(base: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base.mkdir(mode=0o700)
    owner = base.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(TransfuseError, match=f"belongs to user {owner}, not to user {owner + 1}"):
        base_directory()


def test_a_run_directory_is_checked_too(base: pathlib.Path) -> None:
    run = Run("a", True, None)
    make_directory(run).chmod(0o755)
    with pytest.raises(TransfuseError, match="is open to others"):
        make_directory(run)
