"""``make gpu``: the page and the JSON of a visit, and a whole visit to the imitation."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
from benchmarks import gpu
from benchmarks.gpu_parts import PARTS, Visit

from device import kind
from device.kind import imitation_only
from device.processes import run_program

_JUNIT = """<testsuites><testsuite>
<testcase classname="tests.device.test_a" name="test_one"/>
<testcase classname="tests.device.test_a" name="test_two"><failure message="AssertionError: 3 | 4&#10;more"/></testcase>
<testcase classname="tests.device.test_b" name="test_three"><skipped message="needs 4 CUDA devices"/></testcase>
<testcase classname="tests.device.test_b" name="test_four"><skipped message="needs 4 CUDA devices"/></testcase>
</testsuite></testsuites>"""


def _row(result: str, found: Any = None, log: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"title": "a part", "result": result, "seconds": 1.25, "found": found or {}, "log": list(log)}


def _told(imitation: bool, **parts: Any) -> dict[str, Any]:
    nccl = {"NCCL_DEBUG": "WARN"}
    return {"date": "2026-11-18", "kind": "cuda", "imitation": imitation, "mib": 64, "nccl": nccl, "parts": parts}


def test_the_page_says_what_happened() -> None:
    figures = {"seconds": 0.5, "bytes": 1 << 30, "of a bare step": 0.015}
    told = _told(
        False,
        machine=_row("ok", {"devices": ["H100, 80 GiB"] * 2, "topology": "GPU0\nGPU1"}),
        commit=_row("ok", {"large: first commit": figures, "large: restore": {"seconds": 1.0, "bytes": 1 << 29}}),
        hub=_row("failed", log=("Traceback", "ValueError: a | b")),
        delta=_row("timed out after 30 s", log=("waiting",)),
        nixl=_row("skipped: nixl is not installed", log=("quiet",)),
        tests=_row("failed: 1 of 4", {**gpu.counts(_JUNIT), "was_running": "device/test_c.py::test_five"}),
    )
    text = gpu.page(told, "abc123")
    assert text.startswith("# Transfuse on 2 × H100, 80 GiB\n")
    assert "imitation" not in text
    assert "SHA-256 of the JSON: `abc123`" in text
    for line in (
        "| a part | timed out after 30 s | 1 |",
        "| a part | skipped: nixl is not installed | 1 |",
        "| | s | bytes | of a bare step | GiB/s |",
        "| large: first commit | 0.5000 | 1,024.0 MiB | 1.5% | 2.0000 |",
        "| large: restore | 1.0000 | 512.0 MiB |  | 0.5000 |",
        "1 passed, 1 failed, 2 skipped.",
        "- failed: `device.test_a::test_two`: AssertionError: 3 \\| 4",
        "- was running when time ran out: `device/test_c.py::test_five`",
        "- 2 skipped: needs 4 CUDA devices",
        "- `NCCL_DEBUG=WARN`",
        "ValueError: a | b",
        "waiting",
    ):
        assert line in text.splitlines(), line
    assert "quiet" not in text, "the log of a part that went well"


def test_the_page_of_the_imitation_begins_with_what_it_is_worth() -> None:
    text = gpu.page(_told(True, machine=_row("ok", {"devices": ["phantom"]})), "")
    assert text.splitlines()[0] == "**imitation: counts only, times mean nothing**"


def test_nothing_tells_whose_machine_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer-17.example.org")
    monkeypatch.setattr(gpu, "user", lambda: "erika")
    said = [
        'File "/home/erika/src/transfuse/keep.py", line 3, in commit',
        "trainer-17:4711:4711 [0] NCCL WARN no route from 10.1.2.3 to fe80:0:0:0:1:2:3:4 (trainer-17.example.org)",
        "erika: file:///tmp/visit-x/meeting at 12:30:45, 1/2 done, 4 MiB/s, torch 2.13.0, 127.0.0.1",
    ]
    assert gpu.clean({"/opt/x/y.so": said}) == {
        "…/y.so": [
            'File "…/keep.py", line 3, in commit',
            "(host):4711:4711 [0] NCCL WARN no route from (address) to (address) ((host))",
            "(user): …/meeting at 12:30:45, 1/2 done, 4 MiB/s, torch 2.13.0, 127.0.0.1",
        ]
    }


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("print('fine')", "failed"),  # It has left no figures.
        ("raise SystemExit(3)", "failed"),
        ("import time; print('begun', flush=True); time.sleep(60)", "timed out after 1 s"),
        ("import os; print('begun', flush=True); os.getppid() and os.abort()", "failed"),
    ],
)
def test_a_part_that_does_not_behave_costs_only_itself(program: str, result: str, tmp_path: pathlib.Path) -> None:
    visit = Visit("phantom", 1, str(tmp_path))
    ended = gpu.run("a", [[sys.executable, "-S", "-c", program]], visit, 1.0 if "sleep" in program else 30.0)
    row = gpu.judged("a part", ended, None, 1.0)
    assert row["result"] == result
    assert not ("print" in program and not row["log"])


def test_a_rank_that_has_failed_ends_its_part(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LAST_WORDS_SECONDS", 0.2)
    program = "import os, time; assert os.environ['RANK'] == '0'; time.sleep(100)"
    ended = gpu.run("a", [[sys.executable, "-S", "-c", program]] * 2, Visit("phantom", 1, str(tmp_path)), 60.0)
    assert gpu.judged("a part", ended, None, 60.0)["result"] == "failed"
    assert ended["codes"] == [None, 1]


def test_an_accelerator_that_the_visit_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imitation would be visited in its place otherwise, and the page would say nothing of it."""
    found = {"check_available": torch.device("xpu")}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found["check_available"])
    with pytest.raises(SystemExit, match=r"'xpu'.*--kind phantom"):
        gpu.main(["--only", "machine"])
    found["check_available"] = torch.device("cuda")
    assert gpu.present() == "cuda"


def test_a_container_gets_nothing_that_git_ignores() -> None:
    """Environments, caches and the history itself would be copied into the image."""
    ignored = {line.removeprefix("**/") for line in (gpu.ROOT / ".dockerignore").read_text().splitlines()}
    for line in (gpu.ROOT / ".gitignore").read_text().split():
        name = line.rstrip("/")
        assert any(fnmatch.fnmatch(name, pattern) for pattern in ignored), name
    assert ".git" in ignored


@imitation_only
def test_a_commit_that_is_not_waited_for_is_compared(tmp_path: pathlib.Path) -> None:
    told = run_program(
        """
from pathlib import Path
from benchmarks.gpu_parts import Visit, commit
print(json.dumps(commit(Visit("phantom", 1, sys.argv[1]))))
""",
        str(tmp_path),
    )
    for name in ("large", "small"):
        for how in ("the same stream", "another stream"):
            assert told[f"{name}: changed at once, on {how}"]["commits"] == 1
        assert told[f"{name}: changed at once, on a stream that waits for nobody"]["commits"] in (0, 1)


@imitation_only
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_visit_to_the_imitation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind.load()
    kind.unload()
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    data, page = tmp_path / "gpu.json", tmp_path / "gpu.md"
    options = ["--kind", "phantom", "--mib", "4", "--minutes", "8", "--tests", "tests/device/test_absent.py"]
    assert gpu.main([*options, "--json", str(data), "--page", str(page)]) == 0, page.read_text()
    told = json.loads(data.read_text())
    results = {name: row["result"] for name, row in told["parts"].items()}
    assert set(results) == {*PARTS, "tests"}
    assert {name for name, result in results.items() if result != "ok"} <= {"nixl"}, results
    found = {name: row["found"] for name, row in told["parts"].items()}
    assert found["tests"]["passed"] > 0
    assert found["commit"]["small: first commit"]["pageable_bytes"] == 0
    assert found["commit"]["large: 4 steps with wait=False"]["commits"] == 4
    assert found["register"]["registered"] is True
    assert found["delta"]["1 % has changed, over the device"]["moved_bytes"] < 4 << 20
    text = page.read_text()
    assert hashlib.sha256(data.read_bytes()).hexdigest() in text
    for private in (str(tmp_path), str(gpu.ROOT), os.environ.get("HOME", "/root") + "/"):
        assert private not in text + data.read_text()


@imitation_only
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_benchmark_of_slow_copies_keeps_every_step(tmp_path: pathlib.Path) -> None:
    kind.load()
    kind.unload()
    data = tmp_path / "slow.json"
    options = ["--ranks", "2", "--step", "0.1", "--rate", "1000", "--steps", "1", "--turns", "1", "--json", str(data)]
    command = [sys.executable, "-m", "benchmarks.slow_copies", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(gpu.ROOT), str(gpu.ROOT / "src")])}
    subprocess.run(command, cwd=gpu.ROOT, env=environment, check=True, timeout=280)
    told = json.loads(data.read_text())
    assert [one["tensors"] for one in told] == [16, 512, 8192]
    assert all(one["committed"] == one["commits"] > 0 for one in told)
