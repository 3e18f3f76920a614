"""``python -m benchmarks.compare`` runs, tiny, checks what it measures, and outlives peers that do not behave."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from benchmarks import bf16, callbacks, keeper, loopback, pending, planning, resharding, saving, storage, tls
from benchmarks.compare import command, machine, plot, run, table
from benchmarks.compare.cases import cases
from benchmarks.compare.checks import differences, digests
from benchmarks.compare.command import app
from benchmarks.compare.peers import LIMIT, OURS, PEERS, REFERENCE, Peer, tensors_of
from benchmarks.compare.peers.bare import BareRead
from benchmarks.compare.peers.ours import Memory
from benchmarks.compare.results import Limit, Move, Outcome, Result
from benchmarks.hosts import Unavailable
from typer.testing import CliRunner

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_bench(tmp_path: pathlib.Path) -> None:
    """The real thing: everything here that needs no daemon, in place and fresh."""
    data, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    keys = ("memory", "group*", "torch*", "http", "dcp", "safetensors")
    only = [option for key in keys for option in ("--only", f"gpt2*/{key}")]
    files = ["--json", str(data), "--plot", str(picture)]
    done = CliRunner().invoke(app, ["--scale", "0.002", "--runs", "1", *only, *files])
    assert done.exit_code == 0, done.output + done.stderr
    written = json.loads(data.read_text())
    assert {"date", "command", "machine", "versions", "limits", "peers", "load_average"} <= set(written)
    assert {"memcpy_one", "memcpy_all", "readv_one", "readv_all", "tcp", "touch_one"} <= set(written["limits"])
    assert [case["key"] for case in written["cases"]] == ["gpt2", "gpt2-fresh"]
    for case in written["cases"]:
        mode = {"dcp"} if case["mode"] == "in place" else {"http"}
        results = {result["peer"]: result for result in case["results"]}
        assert {"memory", "group", "group-unverified", "torch", "torchft", "torch-save", "readv"} | mode <= set(results)
        for result in results.values():
            assert result["verified"], result
            assert len(result["seconds"]) == 1
        assert results["group"]["routes"] == ["group"]
    assert done.output.count("exact") == sum(len(case["results"]) for case in written["cases"])
    assert "warm" in done.output
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


# ------------------------------------------------------------------------------------------------------- unruly peers


class Hangs(Memory):
    key, name = "hangs", "one that hangs"

    def send(self) -> None:
        time.sleep(600)


class Raises(Memory):
    key, name = "raises", "one that raises"

    def receive(self) -> Any:
        raise LookupError("on purpose")


class Lies(BareRead):
    key, name = "lies", "one that is wrong in one bit"

    def receive(self) -> Any:
        got = super().receive()
        next(iter(tensors_of(got).values())).view(torch.int32)[0] ^= 1
        return got


@pytest.mark.soak  # Every peer that misbehaves costs new processes.
@pytest.mark.timeout(300)
def test_unruly_peers_do_not_end_the_run(tmp_path: pathlib.Path) -> None:
    (case,) = (case for case in cases(0.001) if case.key == "1gib")
    unruly: list[type[Peer]] = [Hangs, Raises, Lies]
    (outcome,) = run.measure([(case, [*unruly, LIMIT])], 1, 4.0, tmp_path, lambda _: None)
    hangs, raises, lies, limit = outcome.results
    assert hangs.failed == "not done within 4 s"
    assert raises.failed == "LookupError: on purpose"
    assert lies.wrong == ["rank 1: ['tensor0'] differs"] * 2, "the warm-up's bits count as well"
    assert lies.median is None
    assert limit.median is not None


def test_the_cause_of_a_failure_is_one_line(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    log.write_text("terminate called\nout of luck\n\n")
    lost = "failed: RuntimeError: Connection closed by peer"
    assert run._reason({0: lost, 1: "failed: OSError: no\nreally"}, 9, log) == "OSError: no really"
    assert run._reason({0: lost, 1: "died: exit code 1"}, 9, log) == "not done within 9 s"
    assert run._reason({0: "died: signal SIGABRT", 1: lost}, 9, log) == "died: signal SIGABRT (out of luck)"


def test_a_wrong_result_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in cases(0.001) if case.key == "1gib")
    wrong = Outcome(case, 1, 1, [Result(Memory, [1.0], wrong=["rank 1: ['tensor0'] differs"])])
    monkeypatch.setattr(command, "run", lambda *_: ([wrong], {}))
    done = CliRunner().invoke(app, ["--only", "1gib/memory", "--scale", "0.001"])
    assert (done.exit_code, "1gib/memory: rank 1: ['tensor0'] differs" in done.stderr) == (1, True)


# ------------------------------------------------------------------------------------------------------------ the parts


def test_cases_are_what_they_say() -> None:
    found = {case.key: case for case in cases()}
    assert found["1gib"].size() == (1 << 30, 1)
    assert found["64x16mib"].size() == (1 << 30, 64)
    assert found["20000x4kib"].size() == (20_000 << 12, 20_000)
    assert [found[f"to{n}"].size()[0] for n in (1, 2, 3, 4)] == [256 << 20] * 4
    size, count = found["gpt2"].size()
    parameters = 148
    assert count == 4 * parameters
    assert (size - 4 * parameters) // 12 == 124_439_808, "GPT-2 small's"
    assert {case.mode for case in found.values()} == {"in place", "fresh"}
    state = {case.key: case for case in cases(0.01)}["gpt2"].state()
    assert state["model"]["lm_head.weight"] is state["model"]["transformer.wte.weight"]


def test_every_difference_is_found() -> None:
    case = {case.key: case for case in cases(0.001)}["gpt2"]
    state, again = case.state(), case.state()
    expected, unique = digests(state), set(tensors_of(state))
    assert not differences(expected, unique, again, True, again)
    assert not differences(expected, unique, tensors_of(again), False, again)
    assert differences(expected, unique, tensors_of(again), True, None), "a whole state has more than tensors"
    assert differences(expected, unique, again, True, state) == [f"{len(unique)} tensors are not the target's own"]
    again["step"] += 1
    assert differences(expected, unique, again, True, None) == ["['step'] differs"]
    again["step"] -= 1
    again["optimizer"]["state"][0]["step"] = again["optimizer"]["state"][0]["step"].double()
    assert differences(expected, unique, again, True, None) == ["['optimizer']['state'][0]['step'] differs"]
    del again["optimizer"]["state"][0]["step"]
    assert differences(expected, unique, again, True, None) == ["['optimizer']['state'][0]['step'] is missing"]


def test_ratios() -> None:
    (case,) = (case for case in cases() if case.key == "1gib")
    ours, torchs, limit = (
        Result(Memory, [0.2, 0.1, 9.0], [0.3, 0.5, 0.4]),
        Result(REFERENCE, [1.0]),
        Result(LIMIT, [0.1]),
    )
    outcome = Outcome(case, 1000, 1, [ours, torchs, limit])
    limits = {"tcp": Limit("tcp", "", 4000, [1.0])}
    assert (ours.median, ours.cpu_median) == (0.2, 0.4)
    assert outcome.speed(ours) == pytest.approx(5)
    assert outcome.of_limit(ours, limits) == pytest.approx(0.5)
    assert outcome.of_limit(torchs, limits) == pytest.approx(0.25)
    ours.add(Move("1gib", "memory", True, 0.1, 0.2, ["wrong"], "memory"))
    assert (len(ours.seconds), len(ours.cpu_seconds), ours.routes) == (3, 3, {"memory"})
    assert (outcome.median(Memory), ours.cpu_median) == (None, None)


def test_cpu_of_this_process_and_of_what_it_has_started() -> None:
    def use(seconds: float) -> None:
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

    before = machine.cpu_seconds()
    use(0.1)
    assert machine.cpu_seconds() - before >= 0.1
    lines = ["import sys, time", "while time.process_time() < 0.5: pass", "print(flush=True)", "sys.stdin.read()"]
    with subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert machine.cpu_seconds() - before >= 0.55
        child.communicate()


def test_only_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "absent", classmethod(lambda cls: "not installed" if cls.key == "nixl" else None))
    entries, absent = command.choose(1.0, False, ["gpt2/*", "to?/nixl", "*-fresh/dcp"])
    assert [case.key for case, _ in entries] == ["gpt2"]
    assert entries[0][1][-1] is LIMIT
    assert {peer.key: reason for peer, reason in absent.items()} == {"nixl": "not installed"}
    done = CliRunner().invoke(app, ["--only", "gpt3"])
    assert done.exit_code == 2
    assert "nothing is called 'gpt3'. Cases: 1gib," in done.stderr


def test_quick_is_small_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def note(*arguments: object) -> tuple[list[Outcome], dict[str, Limit]]:
        seen.append(arguments)
        return [], {}

    monkeypatch.setattr(command, "run", note)
    monkeypatch.setattr(Peer, "absent", classmethod(lambda _: None))
    done = CliRunner().invoke(app, ["--quick"])
    assert done.exit_code == 0, done.output
    _, entries, runs, scale, _ = seen[0]
    assert (runs, scale) == (3, 0.125)
    assert {peer for _, peers in entries for peer in peers} >= {*OURS, REFERENCE}
    assert "Left out:" in done.output


def test_help() -> None:
    usage = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert usage.exit_code == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", usage.output)
    assert all(option in text for option in ("--quick", "--only", "--json", "--plot", "--runs", "--timeout"))
    for arguments in (["--runs", "0"], ["--scale", "-1"]):
        assert CliRunner().invoke(app, [*arguments]).exit_code == 2


def test_help_of_callbacks_runs_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["callbacks", "--help"])
    with pytest.raises(SystemExit) as ended:
        callbacks.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m benchmarks.callbacks")


def test_a_file_that_cannot_be_written_is_said_beforehand(tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(app, ["--json", str(tmp_path / "nowhere" / "x.json")])
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr


def test_every_peer_is_told_apart() -> None:
    for names in ([peer.key for peer in (*PEERS, LIMIT)], [plot.label(peer) for peer in PEERS]):
        assert len(set(names)) == len(names)
    assert table.duration(1.5) == "1,500 ms"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.name)
def test_stored_results_say_where_they_come_from(path: pathlib.Path) -> None:
    written = json.loads(path.read_text())
    assert path.name.startswith(written["date"])
    assert {"command", "machine", "versions"} <= set(written)


# ------------------------------------------------------------------------------------------- resharding and planning


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_resharding_on_one_host(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "resharding.json"
    assert resharding.main(["--part", "host", "--part", "delta", "--quick", "--runs", "1", "--json", str(path)]) == 0
    assert "DIFFERS" not in capsys.readouterr().out
    parts = json.loads(path.read_text())["parts"]
    (layout,) = parts["host"].values()
    assert [move["name"] for move in layout["moves"]] == list(resharding.MOVES["host"])
    assert all(move["verified"] for move in layout["moves"])
    for route in ("memory", "group"):
        changes = parts["delta"]["changes"][f"one host, {route}"]
        assert list(changes) == [change.name for change in resharding.CHANGES]
        moved = {name: change["moved_bytes"] for name, change in changes.items()}
        assert moved["nothing changed"] == 0
        assert moved["without delta"] == moved["all changed"] == 2 << 20
        assert 0 < moved["1 % changed"] <= 0.1 * moved["all changed"]


def test_resharding_sees_what_arrives_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    result = resharding.Result(resharding.GROUP, [1.0], [1.0], [4], 4, ["rank 2, transfuse: q differs"])
    assert "DIFFERS" in resharding.table("links", {"rows": resharding.Measured(4, 4, 1.0, {result.name: result})})
    kept = resharding.Kept(1, resharding.CHANGES[0].name, "group", 1.0, 1.0, 4, 0, 0, ["tensor0 differs"])
    assert "DIFFERS" in resharding.delta_table({"one host": {kept.change: [kept]}})


def test_of_bf16_weights_only_what_has_changed_moves(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(*_: object) -> None:
        raise Unavailable("not here")

    monkeypatch.setattr(bf16, "Hosts", nowhere)
    path = tmp_path / "bf16.json"
    assert bf16.main(["--values", str(1 << 18), "--runs", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["found"]
    assert list(found) == ["loopback"]
    moved = {way: one["moved_bytes"] for way, one in found["loopback"].items()}
    assert moved["whole"] == moved["by blocks"] == 1 << 19
    assert 0.02 * moved["whole"] < moved["sparse"] < 0.07 * moved["whole"]
    held = {way: one["history_bytes"] for way, one in found["loopback"].items()}
    assert held["whole"] == held["by blocks"] == 0
    assert 1 << 19 <= held["sparse"] <= 9 << 16  # And at most an eighth for patches.
    said = capsys.readouterr()
    assert "of 262,144 bf16 values changed, in 4 of 4 blocks" in said.out
    assert "no limited link: not here" in said.err


@pytest.mark.parametrize("count", loopback.CONNECTIONS)
def test_plain_sockets_move_a_tensor(count: int) -> None:
    pairs = [socket.socketpair() for _ in range(count)]
    ends = [[pair[rank] for pair in pairs] for rank in (0, 1)]
    states = [torch.arange(1_000_003.0), torch.zeros(1_000_003)]
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        for end in (*ends[0], *ends[1]):
            stack.enter_context(end)
        list(threads.map(loopback.over, ends, (0, 1), states))
    assert torch.equal(*states)


@pytest.mark.soak
@pytest.mark.processes
def test_loopback(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way moves the tensor, or a rank raises."""
    path = tmp_path / "loopback.json"
    assert loopback.main(["--mib", "3.5", "--runs", "1", "--json", str(path)]) == 0
    assert "plain sockets, 2 connections, no digests" in capsys.readouterr().out
    ways = json.loads(path.read_text())["ways"]
    assert len(ways) == 2 + 3 * len(loopback.CONNECTIONS)
    assert all(len(way["all"]) == 1 for way in ways.values())


@pytest.mark.soak
def test_the_keeper(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keeper.json"
    assert keeper.main(["--mib", "32", "--runs", "1", "--neighbour", "0", "--json", str(path)]) == 0
    assert "of the bare copy out" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert {"commit, with digests", "commit, declared shared", "restore", "restore, verified"} <= set(
        written["medians"]
    )


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks choose a directory for keepers of their own."""
    monkeypatch.setenv("TRANSFUSE_KEEPER_DIR", "replaced")


@pytest.mark.processes
@pytest.mark.usefixtures("keepers")
def test_storage(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "storage.json"
    arguments = ["--mib", "12", "--runs", "1", "--directory", str(tmp_path), "--json", str(path)]
    assert storage.main(arguments) == 0
    assert "of torch.load(mmap=True)" in capsys.readouterr().out
    found = {(one["what"], one["way"]): one for one in json.loads(path.read_text())["medians"]}
    assert {("write", "a keeper's save"), ("write", "dd"), ("read", "keep.restore()"), ("read", "dcp.load")} <= set(
        found
    )
    assert all(one["seconds"] > 0 for one in found.values())
    assert [one.name for one in tmp_path.iterdir()] == ["storage.json"]


@pytest.mark.processes
@pytest.mark.usefixtures("keepers")
def test_saving(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "saving.json"
    assert saving.main(["--mib", "16", "--runs", "1", "--directory", str(tmp_path), "--json", str(path)]) == 0
    assert "where dd costs" in capsys.readouterr().out
    assert {"step", "step_while_saving", "cost", "cost_of_dd"} <= set(json.loads(path.read_text())["saving"])


@pytest.mark.processes
def test_tls(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    path = tmp_path / "tls.json"
    assert tls.main(["--mib", "4", "--runs", "1", "--json", str(path)]) == 0
    assert "of the rate of Python's ssl" in capsys.readouterr().out
    assert json.loads(path.read_text())["reached"] > 0


@pytest.mark.soak
def test_planning(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "planning.json"
    arguments = ["--quick", "--runs", "1", "--case", "shard 8 x tensor 8, 200", "--case", "to replica 64"]
    assert planning.main([*arguments, "--json", str(path)]) == 0
    assert "shard 64 to shard 8 x tensor 8, 200 tensors" in capsys.readouterr().out
    for case in json.loads(path.read_text())["cases"]:
        assert set(case["receiver_seconds"]) == set(planning.RECEIVER_PHASES)
        assert set(case["source_seconds"]) == set(planning.SOURCE_PHASES)
        assert case["refused"] == ""
        assert case["pieces"] >= case["tensors"]
        assert 1 <= case["sources_needed"] <= case["sources"]
        assert case["brief_bytes"] < 200 < case["description_bytes"]


@pytest.mark.parametrize(
    ("case", "count"),
    [("shard 8 to shard 8, 100", 1), ("shard 8 to replica 8, 2", 8)],
)
@pytest.mark.soak
def test_planning_knows_how_much_is_needed(case: str, count: int) -> None:
    """Of 8 ranks with rows each, a receiver that holds the same rows needs one, and one that holds all needs all."""
    (found,) = (one for one in planning.cases(100, 8) if case in one.name)
    assert planning.measure(found, 1).sources_needed == count


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--ranks", "12"], ["--tensors", "3"], ["--case", "moon"]])
def test_planning_refuses_nonsense(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        planning.main(arguments)


def test_installs_are_measured_into_all_kinds_of_targets(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pending.json"
    assert pending.main(["--mib", "2", "--runs", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["cases"]
    assert len(found) == 8
    held = {title: case["held_bytes"] / case["nbytes"] for title, case in found.items()}
    assert held.pop("16 large tensors, 1 % changed, delta") <= 1.0
    assert held.pop("bfloat16 into float32") == 0.5
    assert set(held.values()) == {1.0}
