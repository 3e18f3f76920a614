"""``transfuse doctor``: what it finds is so, also where a route is really shut."""

from __future__ import annotations

import json
import platform
import re
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import filtered
from commands import Running
from transfuse._wire import nixl_agent
from transfuse.cli.app import app
from transfuse.cli.doctor import command, network, nixl, permission, setup, trial
from transfuse.cli.doctor.permission import Facts
from transfuse.testing.ranks import listening

THERE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5"]}
FREE = Facts(available=True, yama=None, filtered=False, capable=False, user_namespace=False, dumpable=True)


def findings(out: str) -> dict[str, dict[str, str]]:
    return {finding["about"]: finding for finding in json.loads(out)["findings"]}


@pytest.mark.soak
def test_a_filter_that_forbids_reading_is_named() -> None:
    if platform.machine() not in filtered.NUMBERS:
        pytest.skip(f"the number of process_vm_readv on {platform.machine()} is not known here")
    with Running("doctor", "--json", under=[sys.executable, filtered.__file__]) as running:
        out, err, code = running.end()
    assert (code, err) == (0, "")
    found = findings(out)
    assert found["memory route"]["status"] == "warn"
    assert "not permitted" in found["memory route"]["text"]
    assert "seccomp" in found["memory route"]["text"]
    assert "--cap-add SYS_PTRACE" in found["memory route"]["remedy"]
    assert found["group route"]["status"] == "ok"
    assert "/s between two ranks" in found["group route"]["text"]
    assert found["streams"]["status"] == "ok"
    # gloo listens somewhere, and that is an address of this machine.
    assert any(name in found["gloo address"]["text"] for name in network.interfaces())
    assert {"torch", "backends", "accelerator", "cores", "memory", "chains", "encryption"} <= found.keys()


def test_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Really tried, by a process that has no free port; with one, above."""
    monkeypatch.delenv("TRANSFUSE_STREAMS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        monkeypatch.setenv("TRANSFUSE_PORT", port := str(taken.getsockname()[1]))
        monkeypatch.setattr(trial, "listening", partial(listening, method="forkserver"))
        outcome = trial.try_routes()
    assert outcome.tried["group"].bytes_per_second is not None, outcome
    found = command._streams(outcome.port)
    assert (found.status, f"TRANSFUSE_PORT: {port}" in found.text) == ("warn", True)
    monkeypatch.setenv("TRANSFUSE_STREAMS", "0")
    assert "switched off by TRANSFUSE_STREAMS=0" in command._streams("").text


def test_an_interface_that_is_not_there_is_exit_code_1() -> None:
    with Running("doctor", environ={"GLOO_SOCKET_IFNAME": "nowhere0", "TRANSFUSE_TOKEN": "hush"}) as running:
        out, err, code = running.end()
    assert (code, err) == (1, "")
    assert "fail  group route   no gloo group can be made: " in out
    assert "nowhere0" in out
    assert f"→ set GLOO_SOCKET_IFNAME to an interface that there is: {', '.join(network.interfaces())}" in out
    # Nothing is shut here but the group.
    assert "ok    memory route  works: " in out
    assert "TRANSFUSE_TOKEN is set" in out
    assert "hush" not in out


def test_wrong_settings_are_named_and_nothing_is_tried() -> None:
    environ = {"TRANSFUSE_PARCEL_BYTES": "many", "TRANSFUSE_BURSTBYTES": "1", "TRANSFUSE_SAME_HOST": "0"}
    done = CliRunner().invoke(app, ["doctor"], env=environ)
    assert done.exit_code == 1
    assert "fail  routes" in done.stdout
    assert "TRANSFUSE_PARCEL_BYTES must be a whole number, got 'many'" in done.stdout
    assert "→ did you mean TRANSFUSE_BURST_BYTES?" in done.stdout


def test_settings_that_are_right_are_shown() -> None:
    shown = list(setup.variables({"TRANSFUSE_PARCEL_BYTES": "65536", "TRANSFUSE_DEBUG": "1", "PATH": "x"}))
    assert [finding.text for finding in shown] == ["TRANSFUSE_DEBUG=1", "TRANSFUSE_PARCEL_BYTES=65536"]
    assert {finding.status for finding in shown} == {"note"}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("TRANSFUSE_SAME_HOST", "0", "no"),
        ("TRANSFUSE_STREAMS", "0", "off"),
        ("TRANSFUSE_NIXL", "1", "yes"),
        ("TRANSFUSE_PORT", "29600-29699", "70000"),
    ],
)
def test_settings_that_are_no_numbers_are_checked_too(name: str, right: str, wrong: str) -> None:
    assert [finding.status for finding in setup.variables({name: right})] == ["note"]
    told = [finding for finding in setup.variables({name: wrong}) if finding.status == "fail"]
    assert [finding.text.split(" must be ")[0] for finding in told] == [name]


def test_a_containers_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(setup, "CGROUP_LIMITS", (tmp_path / "none", limit))
    for text, status in (("max\n", "note"), (f"{1 << 60}\n", "note"), (f"{1 << 28}\n", "warn")):
        limit.write_text(text)
        (found,) = [finding for finding in setup.look_around() if finding.about == "memory"]
        assert found.status == status
    assert "256.0 MiB" in found.text
    assert "TRANSFUSE_MAX_RECEIVE_BYTES" in found.remedy


@pytest.mark.parametrize(
    ("taken", "ifname", "host", "there", "status", "words"),
    [
        (["10.0.0.5"], None, ["10.0.0.5"], THERE, "ok", "10.0.0.5 on eth0, since the name"),
        (["10.0.0.5"], "eth0", ["127.0.1.1"], THERE, "ok", "as GLOO_SOCKET_IFNAME=eth0 says"),
        (["127.0.1.1"], None, ["127.0.1.1"], THERE, "warn", "127.0.1.1 on lo, since the name"),
        (["127.0.0.1"], None, [], THERE, "warn", "leads to no address"),
        (["127.0.0.1"], None, ["203.0.113.9"], THERE, "warn", "leads to 203.0.113.9, which is not of this machine"),
        (["127.0.0.1"], "lo", ["10.0.0.5"], THERE, "warn", "as GLOO_SOCKET_IFNAME=lo says"),
        (["127.0.0.1"], None, ["127.0.0.1"], {"lo": ["127.0.0.1"]}, "ok", "no other interface"),
        ([], None, [], THERE, "note", "could not be found out"),
    ],
)
def test_where_gloo_listens(
    taken: list[str], ifname: str | None, host: list[str], there: Any, status: str, words: str
) -> None:
    found = network.judge(taken, ifname, host, there)
    assert found.status == status
    assert words in found.text
    assert ("GLOO_SOCKET_IFNAME=eth0" in found.remedy) is (status == "warn")


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_ones_own_sockets_are_found(family: socket.AddressFamily, address: str) -> None:
    before = network.listening()
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {address}")
    with server:
        assert [one for number, one in network.listening().items() if number not in before] == [address]
    assert network.listening() == before


def test_interfaces() -> None:
    assert "127.0.0.1" in network.interfaces()["lo"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (FREE, []),
        (FREE._replace(yama=0), []),
        # Under 1 a source permits its readers.
        (FREE._replace(yama=1), []),
        (FREE._replace(yama=2), ["ptrace_scope is 2"]),
        (FREE._replace(yama=2, capable=True), []),
        (FREE._replace(yama=3, capable=True), ["ptrace_scope is 3"]),
        (FREE._replace(filtered=True, user_namespace=True), ["seccomp", "user namespace"]),
        (FREE._replace(dumpable=False), ["not dumpable"]),
        (FREE._replace(available=False, filtered=True), ["no process_vm_readv"]),
    ],
)
def test_reasons(facts: Facts, words: list[str]) -> None:
    found = list(permission.reasons(facts))
    assert len(found) == len(words)
    for (cause, remedy), word in zip(found, words, strict=True):
        assert word in cause
        assert remedy


def test_facts_of_this_machine() -> None:
    facts = permission.facts()
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    assert facts.yama == (int(yama.read_text()) if yama.exists() else None)
    assert facts.dumpable


def test_nixl_is_tried_or_said_to_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    if nixl_agent.installed() is not None:
        found = nixl.look()
        assert found.status == "ok", found.text
        assert re.match(r"NIXL \d[\w.]* works: an agent reads another's memory through .*\w+/\w+", found.text)
        # A transport that there is not: UCX has nothing to connect with.
        monkeypatch.setenv("UCX_TLS", "rc")
        assert nixl.look().status == "warn"
    monkeypatch.setattr(nixl_agent, "installed", lambda: None)
    found = nixl.look()
    assert found.status == "note"
    assert "pip install transfuse[nixl]" in found.remedy
