"""A visit to a machine with accelerators: what Transfuse does there, as one JSON and one page for an issue.

python -m benchmarks.gpu [--kind cuda|phantom] [--minutes 10] [--mib N] [--json FILE] [--page FILE] [--only PART]

Each part runs in a process of its own (two, if it needs two ranks) and has a deadline, so that a hang costs one part.
Both files are free of host names, paths, addresses and the environment, except for variables that begin with NCCL_.
``phantom`` is the imitation of ``tests/device``: there the counts mean something, and the times do not.
"""

from __future__ import annotations

import argparse
import datetime
import getpass
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.gpu_parts import PARTS, Visit

__all__ = ["clean", "main", "page"]

ROOT = Path(__file__).parents[1]
IMITATION = "imitation: counts only, times mean nothing"
#: The part that is pytest, its share of the time, and the longest that one test may take.
TESTS, TESTS_SHARE, TEST_SECONDS = "tests", 0.45, 60
LOG_LINES = 15
#: Parts begin with many imports, and the first builds the imitation.
LEAST_SECONDS, BUILD_SECONDS = 30.0, 120.0
#: A part that is told to end has this long to write what it has found.
LAST_WORDS_SECONDS = 10.0
MIB = 1 << 20


# -------------------------------------------------------------------------------------------------------- the processes


def run(name: str, commands: Sequence[Sequence[str]], visit: Visit, seconds: float) -> dict[str, Any]:
    """Run a part's processes; say how they ended, and the last lines of what they have printed."""
    folder = Path(visit.folder)
    paths = [ROOT, ROOT / "src", ROOT / "tests", ROOT / "tests" / "helpers"]
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",
        **{name: value for name, value in os.environ.items() if name != "RANK"},
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRANSFUSE_TEST_DEVICE": visit.kind,
        "TRANSFUSE_KEEPER_DIR": str(folder / "keeper"),
        "VISIT_PART": name,
    }
    logs = [folder / f"{name}-{rank}.log" for rank in range(len(commands))]
    began = time.monotonic()
    processes = []
    for rank, command in enumerate(commands):
        with logs[rank].open("w") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment | ({"RANK": str(rank)} if len(commands) > 1 else {}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    late = not wait(processes, began + seconds)
    codes = [process.poll() for process in processes]
    if late:
        for process in processes:
            process.send_signal(signal.SIGINT)
        wait(processes, time.monotonic() + LAST_WORDS_SECONDS)
    for process in processes:
        end(process)
    took = time.monotonic() - began
    return {"late": late, "codes": codes, "seconds": took, "log": [line for log in logs for line in tail(log)]}


def wait(processes: Sequence[subprocess.Popen[bytes]], until: float) -> bool:
    """Whether all have ended in time. When one has failed, the others are not waited for much longer."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            until = min(until, time.monotonic() + LAST_WORDS_SECONDS)
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path) -> list[str]:
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-LOG_LINES:]


# ------------------------------------------------------------------------------------------------------------ the parts


def part(name: str, visit: Visit, seconds: float) -> dict[str, Any]:
    """A part of the table, as its result."""
    command = [sys.executable, "-m", "benchmarks.gpu_parts", name, visit.folder]
    ended = run(name, [command] * PARTS[name].ranks, visit, seconds)
    file = Path(visit.folder, f"{name}.json")
    return judged(PARTS[name].title, ended, json.loads(file.read_text()) if file.exists() else None, seconds)


def judged(title: str, ended: Mapping[str, Any], found: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    bad = [code for code in ended["codes"] if code]
    if bad:
        result = "failed"
    elif ended["late"]:
        result = f"timed out after {seconds:.0f} s"
    elif found is None:
        result = "failed"
    elif "skipped" in found:
        result = f"skipped: {found.pop('skipped')}"
    else:
        result = "ok"
    return {"title": title, "result": result, "seconds": ended["seconds"], "found": found or {}, "log": ended["log"]}


def is_fine(row: Mapping[str, Any]) -> bool:
    return str(row["result"]).startswith(("ok", "skipped"))


def device_tests(visit: Visit, seconds: float, paths: Sequence[str]) -> dict[str, Any]:
    """The device tests, by pytest. When time runs out, the tests that have ended count."""
    file = Path(visit.folder, "tests.xml")
    command = [sys.executable, "-m", "pytest", "-v", "-rf", "-m", "gpu or not soak", f"--timeout={TEST_SECONDS}"]
    command += ["-p", "no:cacheprovider", f"--junitxml={file}", *paths]
    ended = run(TESTS, [command], visit, seconds)
    counted = counts(file.read_text()) if file.exists() else None
    if ended["late"]:
        begun = re.findall(r"^tests/(\S+::\S+)", Path(visit.folder, f"{TESTS}-0.log").read_text(errors="replace"), re.M)
        counted = {**(counted or counts("<none/>")), "was_running": begun[-1] if begun else "none"}
    row = judged("device tests", ended, counted, seconds)
    if row["result"] == "failed" and counted and counted["failed"]:
        row["result"] = f"failed: {counted['failed']} of {counted['tests']}"
    return row


def counts(xml: str) -> dict[str, Any]:
    """What pytest's report says: how many, which have failed, and why tests were skipped."""
    cases = list(ElementTree.fromstring(xml).iter("testcase"))
    failed: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    for case in cases:
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                failed[name] = (found.get("message") or "").partition("\n")[0][:200]
        if (found := case.find("skipped")) is not None:
            skipped[found.get("message") or "no reason"] += 1
    passed = len(cases) - len(failed) - skipped.total()
    return {"tests": len(cases), "passed": passed, "failed": len(failed), "failures": failed, "skips": dict(skipped)}


# --------------------------------------------------------------------------------------------------------- what is told


def clean(value: Any) -> Any:
    """The same without host names, users, paths and addresses of networks."""
    if isinstance(value, Mapping):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    if not isinstance(value, str):
        return value
    # Of a path the last name is left, which is a module or a test.
    value = re.sub(r"(?<![\w<])(?:file://)?/(?:[\w.+@~-]+/)+([\w.+@~-]*)", r"…/\1", value)
    value = re.sub(r"\b(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b", "(address)", value)
    value = re.sub(r"\b(?:[0-9a-f]{1,4}:){3,7}(?::?[0-9a-f]{1,4})+\b", "(address)", value)
    host = socket.gethostname()
    for name, instead in ((host, "(host)"), (host.partition(".")[0], "(host)"), (user(), "(user)")):
        # Short names are part of too many words.
        if len(name) > 2 and name not in ("root", "localhost"):
            value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, value)
    return value


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def page(told: Mapping[str, Any], digest: str) -> str:
    """The page: first what it is worth, then the parts, their figures, and the logs of those that are not ok."""
    about, parts = told["parts"].get("machine", {}).get("found", {}), told["parts"]
    devices = Counter(about.get("devices", []))
    named = ", ".join(f"{count} × {name}" for name, count in devices.items()) or f"no device of the kind {told['kind']}"
    lines = [f"**{IMITATION}**", ""] if told["imitation"] else []
    lines += [f"# Transfuse on {named}", ""]
    lines += [f"{told['date']}, {told['mib']} MiB of state. Attach this page and the JSON to an issue."]
    lines += [f"SHA-256 of the JSON: `{digest}`", "", "| part | result | seconds |", "|---|---|---:|"]
    lines += [f"| {row['title']} | {_cell(row['result'])} | {row['seconds']:.0f} |" for row in parts.values()]
    lines += [
        "",
        "`s`: seconds until the call has returned and the device is idle. `returned after`: until the call has.",
    ]
    lines += ["Figures and counts are of the process that commits, serves or receives."]
    for name, row in parts.items():
        if row["found"]:
            lines += ["", f"## {row['title'][0].upper() + row['title'][1:]}", ""]
            lines += _tests(row["found"]) if name == TESTS else _figures(row["found"], not told["imitation"])
    if told["nccl"]:
        lines += ["", "## NCCL's environment", "", *(f"- `{name}={value}`" for name, value in told["nccl"].items())]
    for row in parts.values():
        if not is_fine(row):
            lines += ["", f"## The end of the log: {row['title']} ({row['result']})", "", "```", *row["log"], "```"]
    return "\n".join(lines) + "\n"


def _tests(found: Mapping[str, Any]) -> list[str]:
    skipped = found["tests"] - found["passed"] - found["failed"]
    lines = [f"{found['passed']} passed, {found['failed']} failed, {skipped} skipped.", ""]
    if "was_running" in found:
        lines += [f"- was running when time ran out: `{found['was_running']}`"]
    lines += [f"- failed: `{name}`: {_cell(why)}" for name, why in found["failures"].items()]
    return lines + [f"- {count} skipped: {_cell(why)}" for why, count in found["skips"].items()]


def _figures(found: Mapping[str, Any], rates: bool) -> list[str]:
    """Rows of figures as a table with a column for each that any of them has; the rest as a list."""
    rows = {name: dict(row) for name, row in found.items() if isinstance(row, Mapping)}
    for row in rows.values() if rates else ():
        row["GiB/s"] = row["bytes"] / row["seconds"] / (1 << 30)
    lines = [
        f"- {name.replace('_', ' ')}: {_number(name, value)}"
        if "\n" not in str(value)
        else f"- {name}:\n\n```\n{value}\n```\n"
        for name, value in found.items()
        if name not in rows
    ]
    if not rows:
        return lines
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines += [""] * bool(lines)
    heads = [column.replace("_", " ").replace("seconds", "s") for column in columns]
    lines += [f"| | {' | '.join(heads)} |", "|---" + "|---:" * len(columns) + "|"]
    for name, row in rows.items():
        lines += [f"| {name} | {' | '.join(_number(key, row.get(key, '')) for key in columns)} |"]
    return lines


def _number(key: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if key.startswith("of ") else f"{value:.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value / MIB:,.1f} MiB" if "bytes" in key and value >= MIB // 10 else f"{value:,}"
    return _cell(", ".join(map(str, value)) if isinstance(value, list) else value)


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


# ------------------------------------------------------------------------------------------------------------ the visit


def present() -> str:
    """The kind of device to visit: CUDA, or the imitation where torch finds no accelerator at all."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type not in ("cuda", "phantom"):
        raise SystemExit(
            f"torch finds accelerators of the kind {found.type!r}, and a visit knows only CUDA's: nothing was run on "
            f"{found.type!r}. --kind phantom visits the imitation instead"
        )
    return "cuda" if found is not None and found.type == "cuda" else "phantom"


def size(kind: str) -> int:
    """How many MiB to move: an eighth of the free memory of the fullest device and of main memory, 4 GiB at most."""
    if kind != "cuda" or not torch.cuda.is_available():
        return 64
    # In a process of its own: a context in this one would take memory of the devices during the whole visit.
    program = "import torch; print(min(torch.cuda.mem_get_info(n)[0] for n in range(torch.cuda.device_count())))"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    free = int(asked.stdout) if asked.returncode == 0 else 8 * 512 * MIB
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(16, min(4096, free // (8 * MIB), host // (8 * MIB)))


def tell(visit: Visit, minutes: float, only: Sequence[str], tests: Sequence[str]) -> dict[str, Any]:
    """Run the parts, and say of each how it went as soon as it has ended."""
    parts: dict[str, Any] = {}
    shares = {name: one.share for name, one in PARTS.items()} | {TESTS: TESTS_SHARE}
    for name in [name for name in shares if not only or name in only]:
        seconds = max(LEAST_SECONDS, 60 * minutes * shares[name])
        seconds += BUILD_SECONDS if visit.imitation and not parts else 0
        print(f"{name}, {seconds:.0f} s at most …", flush=True)
        parts[name] = device_tests(visit, seconds, tests) if name == TESTS else part(name, visit, seconds)
        print(f"  {parts[name]['result']}, {parts[name]['seconds']:.1f} s", flush=True)
    told = {
        "date": datetime.date.today().isoformat(),
        "kind": visit.kind,
        "imitation": visit.imitation,
        "note": IMITATION if visit.imitation else "",
        "mib": visit.mib,
        "nccl": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
        "parts": parts,
    }
    cleaned = clean(told)
    assert isinstance(cleaned, dict)
    return cleaned


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    options.add_argument("--kind", choices=("cuda", "phantom"), help="else cuda if torch finds it, or phantom")
    options.add_argument("--minutes", type=float, default=10.0, help="about how long all parts together may take")
    options.add_argument("--mib", type=int, help="the size of the state; else as much as fits well, 4 GiB at most")
    options.add_argument("--json", type=Path, default=Path("gpu.json"))
    options.add_argument("--page", type=Path, default=Path("gpu.md"))
    options.add_argument("--only", action="append", default=[], choices=[*PARTS, TESTS], help="a part; several times")
    options.add_argument(
        "--tests", action="append", default=[], help="what pytest runs in the place of all device tests"
    )
    chosen = options.parse_args(argv)
    kind = chosen.kind or present()
    tests = chosen.tests or ["tests/device", "tests/memory/test_devices.py"]
    with tempfile.TemporaryDirectory(prefix="visit-") as folder:
        visit = Visit(kind, chosen.mib or size(kind), folder)
        Path(folder, "visit.json").write_text(json.dumps(vars(visit)))
        told = tell(visit, chosen.minutes, chosen.only, tests)
    text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
    chosen.json.write_text(text)
    chosen.page.write_text(page(told, hashlib.sha256(text.encode()).hexdigest()))
    print(f"Attach both to an issue: {chosen.page} and {chosen.json}")
    return int(not all(map(is_fine, told["parts"].values())))


if __name__ == "__main__":
    sys.exit(main())
