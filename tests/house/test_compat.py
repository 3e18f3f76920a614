"""``make compat``: what differs between two runs of the tests, with real runs of a small suite."""

from __future__ import annotations

import pathlib
import sys

import pytest
from tools import compat

SUITE = """
import os, pathlib, pytest

OTHER = os.environ["WHICH"] == "other"
SEEN = pathlib.Path(__file__).parent / ("seen-" + os.environ["WHICH"])

def test_same(): pass

def test_breaks(): assert not OTHER, "it broke"

def test_broken(): assert False

@pytest.mark.skipif(not OTHER, reason="only there")
def test_new(): pass

@pytest.mark.parametrize("dtype", ["float", "bcomplex32"] if OTHER else ["float"])
def test_each(dtype): pass

def test_late():
    if OTHER and not SEEN.exists():
        SEEN.touch()
        assert False, "busy"

@pytest.fixture
def fixture():
    yield
    assert not OTHER, "left behind"

def test_end(fixture): pass
"""


def test_what_differs_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    options = [str(suite), f"--rootdir={tmp_path}", "-c", str(tmp_path / "pytest.ini")]
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    runs = []
    for which in ("pinned", "other"):
        monkeypatch.setenv("WHICH", which)
        runs.append(compat.run(sys.executable, tmp_path / f"{which}.xml", 2, options))
        assert compat.recorded(tmp_path / f"{which}.xml") == runs[-1]
    assert compat.differences(*runs) == [
        "test_suite::test_breaks: passed -> failed: AssertionError: it broke",
        "test_suite::test_each[bcomplex32]: absent -> passed",
        'test_suite::test_end: passed -> failed: failed on teardown with "AssertionError: left behind',
        "test_suite::test_new: skipped -> passed",
    ]
    assert compat.summary(runs[0]) == "5 passed, 0 passed alone, 1 failed, 1 skipped"
    assert compat.summary(runs[1]) == "4 passed, 1 passed alone, 3 failed, 0 skipped"


def test_a_run_without_a_record_is_no_success(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit, match=r"pytest has written no .*none\.xml"):
        compat.recorded(tmp_path / "none.xml")
