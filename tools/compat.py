"""Run the ordinary tests on two versions of torch, and print what differs: ``make compat TORCH=2.15.0``.

``python -m tools.compat OTHER`` runs them with this interpreter, which has the pinned torch, and with OTHER, the
interpreter of another environment. A test that fails among many others runs again alone before it counts as failed:
on a busy machine some are late. The pinned run is recorded, and done again only when a file of the project is newer.

Arguments for pytest may follow: ``python -m tools.compat .venv-2.15.0/bin/python --workers 2 tests/wire -k lanes``.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

__all__ = ["FAILED", "Outcome", "differences", "main", "recorded", "run", "summary"]

RECORDS = Path("build/compat")
PASSED, FAILED, SKIPPED, ABSENT = "passed", "failed", "skipped", "absent"
#: It failed among the others, and passed alone.
ALONE = "passed alone"


class Outcome(NamedTuple):
    """What became of a test, and the first line of what pytest said about it."""

    kind: str
    said: str = ""


def recorded(record: Path) -> dict[str, Outcome]:
    """The outcome of every test, by its name, from the record of a run and that of its failed tests alone."""
    found = _read(record)
    alone = _again(record)
    for name, outcome in (_read(alone) if alone.exists() else {}).items():
        if outcome.kind == PASSED and name in found:
            found[name] = Outcome(ALONE, found[name].said)
    return found


def _read(record: Path) -> dict[str, Outcome]:
    if not record.exists():
        raise SystemExit(f"pytest has written no {record}: it says above why")
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(record).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = Outcome(PASSED)
        for tag, kind in (("failure", FAILED), ("error", FAILED), ("skipped", SKIPPED)):
            element = case.find(tag)
            if element is not None:
                outcome = Outcome(kind, (element.get("message") or "").split("\n")[0])
                break
        # A test that passes and whose fixture fails afterwards appears twice.
        if name not in found or found[name].kind != FAILED:
            found[name] = outcome
    return found


def _again(record: Path) -> Path:
    return record.with_suffix(".alone.xml")


def run(python: str, record: Path, workers: int, options: Sequence[str]) -> dict[str, Outcome]:
    """Run the tests with an interpreter, and those that failed once more, one after the other."""
    record.parent.mkdir(parents=True, exist_ok=True)
    alone = _again(record)
    for old in (record, alone):
        old.unlink(missing_ok=True)
    pytest = [python, "-m", "pytest", "-q", "-o", f"cache_dir={record.absolute().with_suffix('.cache')}"]
    together = ["--numprocesses", str(workers), "--dist", "worksteal", f"--junitxml={record}"]
    subprocess.run([*pytest, *together, *options], check=False)
    if any(outcome.kind == FAILED for outcome in recorded(record).values()):
        failed_only = ["--last-failed", "--last-failed-no-failures", "none", f"--junitxml={alone}"]
        subprocess.run([*pytest, *failed_only, *options], check=False)
    return recorded(record)


def run_pinned(workers: int, options: Sequence[str]) -> dict[str, Outcome]:
    """The run with this interpreter, or its record if no file of the project is newer."""
    chosen = hashlib.sha256("\0".join(options).encode()).hexdigest()[:8]
    record = RECORDS / f"pinned-{chosen}.xml"
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    files = [Path(name) for name in listed.split("\0") if name]
    if record.exists() and record.stat().st_mtime > max(path.stat().st_mtime for path in files if path.exists()):
        print(f"The pinned run is that of {record}.")
        return recorded(record)
    return run(sys.executable, record, workers, options)


def differences(before: Mapping[str, Outcome], after: Mapping[str, Outcome]) -> list[str]:
    """A line for each test that ended differently, and for each that only one run has."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name, Outcome(ABSENT)), after.get(name, Outcome(ABSENT))
        if was.kind != now.kind and not {was.kind, now.kind} <= {PASSED, ALONE}:
            lines.append(f"{name}: {was.kind} -> {now.kind}" + (f": {now.said}" if now.said else ""))
    return lines


def summary(outcomes: Mapping[str, Outcome]) -> str:
    counts = Counter(outcome.kind for outcome in outcomes.values())
    return ", ".join(f"{counts[kind]} {kind}" for kind in (PASSED, ALONE, FAILED, SKIPPED))


def _version(python: str) -> str:
    asked = [python, "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests on two versions of torch, and print what differs.")
    parser.add_argument("other", help="the interpreter of the other environment")
    parser.add_argument("--workers", type=int, default=5, help="how many tests run at once")
    arguments, options = parser.parse_known_args()
    pinned, other = _version(sys.executable), _version(arguments.other)
    before = run_pinned(arguments.workers, options)
    after = run(arguments.other, RECORDS / f"{other}.xml", arguments.workers, options)
    lines = differences(before, after)
    print(f"\nFrom torch {pinned} to {other}, {len(lines)} tests differ:", *lines, sep="\n  ")
    print(f"torch {pinned}: {summary(before)}", f"torch {other}: {summary(after)}", sep="\n")
    return int(any(outcome.kind == FAILED for outcome in after.values()))


if __name__ == "__main__":
    sys.exit(main())
