"""Metrics of real keepers: during commits, restores and after a death; their health; and a port that is taken.

Ranks are threads, a host is a keeper, and each keeper is a process that the first rank starts.
"""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

import transfuse
from commands import Running
from keeping import SECONDS, Home, Job, home, keepers_in, same, threaded, until  # noqa: F401
from scraping import Scrape, free_port, get, metrics_of, scrape
from transfuse._keeper import client, frames, measured
from transfuse._keeper.attach import LOG_NAME, SOCKET_NAME
from transfuse._keeper.commits import CommitReport
from transfuse._keeper.frames import KeeperLink
from transfuse._metrics import names
from transfuse.cli.app import app

pytestmark = pytest.mark.usefixtures("threaded", "impatient", "measured_keepers")


@pytest.fixture
def measured_keepers(monkeypatch: pytest.MonkeyPatch, home: Home) -> None:  # noqa: F811
    monkeypatch.setenv("TRANSFUSE_KEEPER_METRICS", "127.0.0.1:0")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "KEEP_REVIVE_SECONDS", 0.05)


def states(n: int) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.zeros(5000), "mine": torch.full((100,), float(rank))} for rank in range(n)]


def change(keep: transfuse.Keep) -> None:
    with keep.mutating():
        pass


def test_commits_and_restores_of_a_host(home: Home) -> None:  # noqa: F811
    home.start()
    with Job(2) as job:
        job.start(same(*states(2)), [{"max_bytes": 1 << 30}] * 2)
        address = metrics_of(home)
        before = scrape(address)
        assert (before("keeper_workers"), before("keeper_workers_expected")) == (2, 2)
        assert (before("keeper_committed_step"), before("keeper_confirmed_step")) == (None, None)
        assert (before("keeper_commits_total"), before("keeper_commits_skipped_total", cause="no_room")) == (0, 0)
        assert job.restore() is None
        # Somebody asks all the time.
        ended, seen = threading.Event(), []

        def ask() -> None:
            while not ended.is_set():
                seen.append(scrape(address)("keeper_committed_step"))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for step in range(1, 9):
                if step % 2:  # (The first commit copies everything at once.)
                    job.all(change)  # What does not change outside of such a block is copied while training goes on.
                job.commit(step, wait=step % 2 == 0)
        finally:
            ended.set()
            asking.join()
        assert job.commit(8) == ["skipped"] * 2
        found = until(lambda: (now := scrape(address))("keeper_commits_total") == 18 and now)
        assert [step for step in seen if step is not None] == sorted(step for step in seen if step is not None)
        assert job.restore() == 8

    assert found("keeper_commits_total", outcome="committed") == 16
    assert found("keeper_commits_skipped_total") == 2
    assert found("keeper_commits_skipped_total", cause="not_newer") == 2
    assert found("keeper_committed_step") == found("keeper_complete_step") == found("keeper_confirmed_step") == 8
    for phase, count in (("copy", 16), ("describe", 16), ("background", 6), ("other", 0)):
        assert found("keeper_commit_seconds_count", phase=phase) == count, phase
    # What training waits for is the sum of all phases but the background.
    waited = sum(found("keeper_commit_seconds_sum", phase=phase) or 0 for phase in names.COMMIT_PHASES.values())
    assert found("keeper_commit_stalled_seconds_sum") == pytest.approx(waited)
    assert found("keeper_commit_stalled_seconds_count") == 18
    assert (found("keeper_copied_bytes_total") or 0) + (found("keeper_shared_bytes_total") or 0) > 16 * 20_000
    assert found("keeper_slot_bytes", kind="own") == found("keeper_bytes")
    assert {one.labels["slot"] for one in found.samples if one.name == "transfuse_keeper_slot_bytes"} == {"0", "1", "2"}
    assert found("keeper_limit_bytes") == 1 << 30
    assert found("keeper_info", run="job", version=transfuse.__version__, protocol=str(frames.VERSION)) == 1
    assert found("keeper_draining") == 0
    assert found("keeper_replicated_step") is None

    found = until(lambda: (now := scrape(address))("keeper_restores_total") == 4 and now)
    assert found("keeper_restores_total", outcome="nothing", source="none") == 2
    assert found("keeper_restores_total", outcome="restored", source="local") == 2
    assert (found("keeper_restored_step"), found("keeper_restore_seconds_count", outcome="restored")) == (8, 2)
    assert found("keeper_saved_step") is None  # Nothing is saved.
    assert until(lambda: scrape(address)("keeper_workers") == 0)


def test_a_keeper_with_metrics_imports_no_torch(home: Home) -> None:  # noqa: F811
    with Job(1) as job:
        job.start(same(*states(1)))
        assert job.commit(1) == ["committed"]
        assert get(metrics_of(home), "/healthz") == (200, "ok\n")
        assert scrape(metrics_of(home))("keeper_info", torch=torch.__version__) == 1
        assert f"metrics and health: {metrics_of(home)}" in (home.directory("job") / LOG_NAME).read_text()
        mapped = pathlib.Path(f"/proc/{home.status()['pid']}/maps").read_text()
        assert "libtorch" not in mapped
        assert "numpy" in mapped


def restored_at(address: str) -> Scrape | None:
    found = scrape(address)
    return found if found("keeper_restores_total") else None


def has_neighbours(address: str, count: int) -> bool:
    return scrape(address)("keeper_neighbours_up") == count


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_two_hosts_one_of_which_is_lost(home: Home, *, real: bool) -> None:  # noqa: F811
    """``real``: each keeper is a process, and is killed."""
    keepers = {} if real else {host: home.start(host) for host in ("a", "b", "c")}
    with Job(2) as job:
        job.start(same(*states(2)), [{"run": host} for host in ("a", "b")])
        step = 0

        def confirmed() -> list[Scrape] | None:
            nonlocal step
            step += 1
            job.commit(step)
            found = [scrape(metrics_of(home, host)) for host in ("a", "b")]
            ends = [one(f"keeper_{name}_step") for one in found for name in ("confirmed", "replicated")]
            return None if None in ends else found

        for one in until(confirmed, 2 * SECONDS):
            assert (one("keeper_neighbours"), one("keeper_neighbours_up")) == (1, 1)
            assert (one("keeper_replicated_hosts"), one("keeper_without_room")) == (1, 0)
            assert one("keeper_slot_bytes", kind="replica")
            assert one("keeper_pulls_total", outcome="complete") == one("keeper_pull_seconds_count")
            assert one("keeper_pulled_bytes_total")
    if real:
        os.kill(lost := home.status("b")["pid"], signal.SIGKILL)
        until(lambda: lost not in keepers_in(home.base))
    else:
        keepers["b"].stop()
        assert home.ended(keepers["b"])
    until(partial(has_neighbours, metrics_of(home, "a"), 0))
    # Another host takes its place. What its rank had is at host a.
    with Job(2) as job:
        job.start(same(*states(2)), [{"run": host} for host in ("a", "c")])
        assert job.restore()
        for host, source in (("a", "local"), ("c", "remote")):
            address = metrics_of(home, host)
            found = until(partial(restored_at, address))
            assert found("keeper_restores_total", outcome="restored", source=source) == 1, host
            until(partial(has_neighbours, address, 1))


def test_what_a_lost_keeper_has_not_heard_the_next_one_is_told(home: Home) -> None:  # noqa: F811
    with Job(1) as job:
        job.start(same(*states(1)))
        assert job.commit(1) == ["committed"]
        os.kill(lost := home.status()["pid"], signal.SIGKILL)
        until(lambda: lost not in keepers_in(home.base))
        assert job.commit(2) == ["skipped"]
        step = 2

        def is_kept() -> bool:
            nonlocal step
            step += 1
            return job.commit(step) == ["committed"]

        until(is_kept)
        assert home.status()["pid"] != lost
        told = until(lambda: (now := scrape(metrics_of(home)))("keeper_commits_total", outcome="committed") and now)
        assert told("keeper_commits_skipped_total", cause="keeper_lost") >= 1


# ------------------------------------------------------------------------------------------------ health and addresses


def test_a_keeper_that_ends_says_so_and_one_that_is_stuck_too(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured, "METRICS_HEALTH_SECONDS", 0.1)
    keeper = home.start()
    address = metrics_of(home)
    assert get(address, "/healthz") == (200, "ok\n")
    holding, held = threading.Event(), threading.Event()

    def hold() -> None:
        with keeper.changed:
            held.set()
            holding.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(SECONDS)
    assert get(address, "/healthz") == (503, "stuck: the keeper's lock was not free for 0.1 s\n")
    holding.set()
    thread.join()
    assert get(address, "/healthz") == (200, "ok\n")
    with keeper.changed:  # It looks for the end now and then, under the lock.
        keeper.stop()
        assert get(address, "/healthz") == (503, "draining: the keeper ends\n")
        assert keeper.measured.text().count("transfuse_keeper_draining 1\n") == 1
    assert home.ended(keeper)
    with pytest.raises(OSError, match="refused"):
        get(address, "/healthz")


def test_keepers_share_a_range_and_one_without_a_port_warns_once_and_gets_it_later(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("transfuse._keeper.process.KEEPER_METRICS_SECONDS", 0.0)
    port = free_port()
    monkeypatch.setenv("TRANSFUSE_KEEPER_METRICS", f"127.0.0.1:{port}")
    first, second = home.start("first"), home.start("second")
    assert metrics_of(home, "first") == f"127.0.0.1:{port}"
    said = until(lambda: [one.getMessage() for one in caplog.records if "no metrics" in one.getMessage()])
    assert f"nobody can listen at 127.0.0.1:{port}" in said[0]
    assert "give a range of them (:9400-9499" in said[0]
    assert home.status("second")["metrics"] is None
    first.stop()
    assert home.ended(first)
    assert metrics_of(home, "second") == f"127.0.0.1:{port}"
    assert second.run_name == "second"
    assert sum("no metrics" in one.getMessage() for one in caplog.records) == 1


def test_a_wrong_address_is_refused_before_a_keeper_is_started(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRANSFUSE_KEEPER_METRICS", "9499-9400")
    with pytest.raises(ValueError, match=r"TRANSFUSE_KEEPER_METRICS must be host:port, .*got '9499-9400'"):
        transfuse.keep({"w": torch.zeros(1)}, run="job")
    assert list(home.base.iterdir()) == []


def test_in_the_foreground(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("TRANSFUSE_KEEPER_METRICS", ":1")
    with Running("keep", "--run", "job", "--metrics", "127.0.0.1:0") as keeper:
        keeper.line()
        address = home.status()["metrics"]
        assert get(address, "/healthz") == (200, "ok\n")
        done = CliRunner().invoke(app, ["keep", "--run", "other", "--metrics", address])
        assert done.exit_code == 1
        assert f"nobody can listen at {address}" in " ".join(done.output.split())
        done = CliRunner().invoke(app, ["keep", "--run", "other", "--metrics", "nowhere"])
        assert done.exit_code == 2
        os.kill(home.status()["pid"], signal.SIGTERM)
        _, err, code = keeper.end()
        assert code == 0
    assert f"metrics and health at {address}" in err
    assert "other-" not in "".join(path.name for path in home.base.iterdir())


# ---------------------------------------------------------------------------------------------------------- what counts


def test_words_that_a_keeper_does_not_know_count_as_others(home: Home) -> None:  # noqa: F811
    """A worker of another version, or one that lies, fills no keeper with series."""
    keeper = home.start()
    link = KeeperLink.to(str(home.directory("job") / SOCKET_NAME), SECONDS)
    commit = frames.CommitNumbers("skipped", "the moon", {"the sun": 1.0, "copy": 2.0}, 0.0, 3, 4)
    restore = frames.RestoreNumbers("restored", "the moon", 7, 1.0)
    for _ in range(3):
        link.send(frames.Numbers([commit], [restore]), SECONDS)
    assert home.status()["pid"] == os.getpid()
    found = until(lambda: (now := Scrape(keeper.measured.text()))("keeper_restores_total") == 3 and now)
    assert found("keeper_commits_skipped_total", cause="other") == 3
    assert found("keeper_commit_seconds_sum", phase="other") == 3
    assert found("keeper_restores_total", source="none") == 3
    link.close()


def test_every_cause_of_a_commit_that_does_not_count_is_in_the_table() -> None:
    source = "".join(path.read_text() for path in pathlib.Path(client.__file__).parent.glob("*.py"))
    for name in ("NO_SLOT", "NO_ROOM", "KEEPER_LOST", "PARTNER", "NOT_NEWER", "DEVICE", "CHANGED", "OTHER"):
        assert f"names.{name}" in source, name
        assert getattr(names, name) in names.SKIP_CAUSES
        assert f'"{getattr(names, name)}"' in pathlib.Path(client.__file__).with_name("commits.py").read_text(), name
    report = CommitReport(3)
    report.leave_out("skipped", names.NO_SLOT, "all slots are full")
    assert report.event()[1]["cause"] == "no_free_slot"
    # Nowhere is an outcome set without a cause.
    assert 'outcome, report.why = "skipped"' not in source
    assert 'report.outcome = "dropped"' not in source


@pytest.mark.usefixtures("threaded")
def test_what_is_saved_is_told_as_the_status_tells_it(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    keeper = home.start()
    assert Scrape(keeper.measured.text())("keeper_save_failures_total") is None  # This run saves nothing.
    with Job(1) as job:
        job.start(same({"w": torch.zeros(1000)}), [{"directory": str(tmp_path), "save_every": 1}])
        job.commit(1)
        until(lambda: home.status()["storage"]["saved"])
        found, told = Scrape(keeper.measured.text()), home.status()["storage"]
        expected = max(told["saved"]), told["last"]["seconds"], 0
        assert expected == tuple(
            found(f"keeper_{name}") for name in ("saved_step", "save_seconds", "save_failures_total")
        )
