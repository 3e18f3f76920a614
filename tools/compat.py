"""Run the ordinary tests on two versions of torch, and print what differs: ``make compat TORCH=2.15.0``.

``python -m tools.compat OTHER`` runs them with this interpreter, which has the pinned torch, and with OTHER, the
interpreter of another environment. A test that fails among many others runs again alone before it counts as failed:
on a busy machine some are late. The pinned run is recorded, and done again only when a file of the project is newer.

Options of pytest may follow: ``python -m tools.compat .venv-2.15.0/bin/python --workers 2 tests/wire -k lanes``.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["differences", "main", "outcomes", "run", "summary"]

RECORDS = Path("build/compat")
PASSED, FAILED, SKIPPED, ABSENT = "passed", "failed", "skipped", "absent"
#: Tests that failed among the others and passed alone.
LATE = "passed alone"

#: By the test's name: what became of it, and what pytest said.
Outcomes = Mapping[str, tuple[str, str]]


def outcomes(record: Path) -> dict[str, tuple[str, str]]:
    """The outcome of every test in a record that pytest has written."""
    found: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(record).getroot().iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        for kind, outcome in (("failure", FAILED), ("error", FAILED), ("skipped", SKIPPED)):
            said = case.find(kind)
            if said is not None:
                found[name] = outcome, (said.get("message") or "").split("\n")[0]
                break
        else:
            # A test that passed and whose fixture failed afterwards appears twice.
            found.setdefault(name, (PASSED, ""))
    return found


def run(python: str, record: Path, workers: int, options: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Run the tests with an interpreter, and those that failed once more, one after the other."""
    record.parent.mkdir(parents=True, exist_ok=True)
    again = record.with_suffix(".again.xml")
    for old in (record, again):
        old.unlink(missing_ok=True)
    pytest = [python, "-m", "pytest", "-q", "-o", f"cache_dir={record.with_suffix('.cache')}"]
    subprocess.run(
        [*pytest, "--numprocesses", str(workers), "--dist", "worksteal", f"--junitxml={record}", *options], check=False
    )
    found = outcomes(record)
    if any(outcome == FAILED for outcome, _ in found.values()):
        failed_only = ("--last-failed", "--last-failed-no-failures", "none")
        subprocess.run([*pytest, *failed_only, f"--junitxml={again}", *options], check=False)
        for name, (outcome, _) in outcomes(again).items():
            if outcome == PASSED:
                found[name] = LATE, found[name][1]
    return found


def pinned(workers: int, options: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The run with this interpreter, from its record if no file of the project is newer."""
    chosen = hashlib.sha256("\0".join(options).encode()).hexdigest()[:8]
    record = RECORDS / f"pinned-{chosen}.xml"
    files = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    newest = max(Path(name).stat().st_mtime for name in files.split("\0") if name and Path(name).exists())
    if record.exists() and record.stat().st_mtime > newest:
        print(f"The pinned run is that of {record}.")
        found, again = outcomes(record), record.with_suffix(".again.xml")
        for name, (outcome, _) in (outcomes(again) if again.exists() else {}).items():
            if outcome == PASSED:
                found[name] = LATE, found[name][1]
        return found
    return run(sys.executable, record, workers, options)


def differences(before: Outcomes, after: Outcomes) -> list[str]:
    """A line for each test that ended differently, and for each that only one run has."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        (was, _), (now, said) = before.get(name, (ABSENT, "")), after.get(name, (ABSENT, ""))
        if {was, now} <= {PASSED, LATE} or was == now:
            continue
        lines.append(f"{name}: {was} -> {now}" + (f": {said}" if said else ""))
    return lines


def summary(name: str, found: Outcomes) -> str:
    counts = Counter(outcome for outcome, _ in found.values())
    return f"torch {name}: " + ", ".join(
        f"{counts[kind]} {kind}" for kind in (PASSED, LATE, FAILED, SKIPPED) if counts[kind] or kind in (PASSED, FAILED)
    )


def version_of(python: str) -> str:
    asked = [python, "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests on two versions of torch, and print what differs.")
    parser.add_argument("other", help="the interpreter of the other environment")
    parser.add_argument("--workers", type=int, default=5, help="how many tests run at once")
    arguments, options = parser.parse_known_args()
    names = version_of(sys.executable), version_of(arguments.other)
    before = pinned(arguments.workers, options)
    after = run(arguments.other, RECORDS / f"{names[1]}.xml", arguments.workers, options)
    lines = differences(before, after)
    print(f"\nFrom torch {names[0]} to {names[1]}, {len(lines)} tests differ:", *lines, sep="\n  ")
    print(summary(names[0], before), summary(names[1], after), sep="\n")
    failed = [name for name, (outcome, _) in after.items() if outcome == FAILED and before.get(name, ("",))[0] != FAILED]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
