"""What a caller sees of a transfer: progress and bars, the report, the line in the log, ranges in a trace."""

from __future__ import annotations

import copy
import fcntl
import itertools
import json
import logging
import os
import pathlib
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import tqdm.auto

import transfuse
from tampering import Tampering
from transfuse._phases import Phase, trace_name
from transfuse._progress import Bar, Progress
from transfuse._session import receive_from_one
from transfuse.testing.ranks import Outcome, Ranks, run_program
from wires import over_streams

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "observing.md").read_text()

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=20)
MIB = 1 << 20

Seen = list[dict[int, transfuse.Progress]]


pytestmark = pytest.mark.usefixtures("small_parcels")


def make_state(scale: float = 1.0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return {f"w{i}": torch.randn(MIB // 4, generator=generator) * scale for i in range(8)}


def blank() -> dict[str, Any]:
    return {name: torch.zeros_like(leaf) for name, leaf in make_state().items()}


class Move:
    """One transfer: ranks 0, 1, … below ``sources`` send to all others. Each rank's options, and what it shows."""

    def __init__(self, sources: int = 1, receivers: int = 1) -> None:
        self.sources, self.receivers = list(range(sources)), list(range(sources, sources + receivers))
        self.reports: dict[int, transfuse.Report] = {}
        #: What each rank's callable was called with, and in which threads.
        self.seen: dict[int, Seen] = {rank: [] for rank in (*self.sources, *self.receivers)}
        self.threads: dict[int, set[int]] = {rank: set() for rank in self.seen}
        self.copies: dict[int, Seen] = {rank: [] for rank in self.seen}

    def show(self, rank: int) -> Callable[[dict[int, transfuse.Progress]], None]:
        def show(progress: dict[int, transfuse.Progress]) -> None:
            self.threads[rank].add(threading.get_ident())
            self.seen[rank].append(progress)
            self.copies[rank].append(copy.deepcopy(progress))

        return show

    def outcomes(
        self,
        state: Callable[[int], object] = lambda rank: make_state(),
        target: Callable[[int], object] | None = None,
        *,
        wrap: Callable[[int, Any], Any] = lambda rank, pg: pg,
        around: Callable[[int, Callable[[], Any]], Any] = lambda rank, call: call(),
        options: Callable[[int], dict[str, Any]] = lambda rank: {},
        receive: Callable[[transfuse.PGTransport, Any], Any] = lambda mover, sources: mover.recv_checkpoint(sources),
    ) -> list[Outcome[Any]]:
        def work(rank: int, pg: Any) -> Any:
            mine = target(rank) if target is not None and rank in self.receivers else None
            callback = None if mine is None else lambda: mine
            chosen = {"progress": self.show(rank), **options(rank)}
            mover = transfuse.PGTransport(wrap(rank, pg), TIMEOUT, CPU, callback, **chosen)
            try:
                if rank in self.sources:
                    return around(rank, lambda: mover.send_checkpoint(self.receivers, state(rank), step=3))
                sources = self.sources[0] if len(self.sources) == 1 else self.sources
                return around(rank, lambda: receive(mover, sources))
            finally:
                assert mover.report is not None
                self.reports[rank] = mover.report

        with Ranks(len(self.seen), 60) as ranks:
            return ranks.outcomes(work)

    def run(self, *args: Any, **options: Any) -> list[Any]:
        return [outcome.get() for outcome in self.outcomes(*args, **options)]


def check(seen: Seen, moved: int) -> None:
    """Numbers that a UI can show: never beyond the total, and in the end exactly there."""
    for before, after in itertools.pairwise(seen):
        for rank, one in after.items():
            assert one.seconds >= before[rank].seconds
            assert one.total_bytes is None or one.bytes <= one.total_bytes
            assert one.fraction is None or 0 <= one.fraction <= 1
            assert one.seconds_left is None or one.seconds_left >= 0
    last = seen[-1]
    assert {one.phase for one in last.values()} == {"done"}
    assert {one.fraction for one in last.values()} == {1.0}
    assert sum(one.bytes for one in last.values()) == moved
    assert all(one.bytes_per_second > 0 and one.seconds_left == 0 for one in last.values() if one.bytes)


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_callable_gets_the_numbers_at_both_ends(in_place: bool) -> None:
    move = Move()
    move.run(target=(lambda rank: blank()) if in_place else None)
    for rank in (0, 1):
        check(move.seen[rank], 8 * MIB)
        assert len(move.threads[rank]) == 1, "only the calling thread calls"
        assert move.seen[rank] == move.copies[rank], "what was shown does not change afterwards"
    assert move.seen[0][0][1].phase == "describing the state"
    assert move.seen[1][0][0].phase == ("calling state_dict" if in_place else move.seen[1][0][0].phase)


def test_it_is_called_as_long_as_nothing_happens() -> None:
    """A source comes only when the receiver has said five times that it waits for it."""
    move, waited = Move(), threading.Event()
    calls: list[str] = []

    def show(progress: dict[int, transfuse.Progress]) -> None:
        calls.append(progress[0].phase)
        assert progress[0].fraction is None
        if calls.count("waiting for the offer") >= 5:
            waited.set()
            raise InterruptedError("seen enough")

    def around(rank: int, call: Callable[[], Any]) -> Any:
        assert rank == 1 or waited.wait(30)
        return call()

    _, received = move.outcomes(around=around, options=lambda rank: {"progress": show} if rank == 1 else {})
    assert isinstance(received.error, InterruptedError)


@pytest.mark.usefixtures("group_route", "patient_chains")
def test_receivers_in_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_from_one, "this_host", lambda: 1)
    monkeypatch.setenv("TRANSFUSE_MIN_RELAY_BYTES", "1")
    move = Move(receivers=3)
    move.run()
    assert [move.reports[rank].relayed_bytes for rank in move.receivers].count(0) == 1
    check(move.seen[0], 3 * 8 * MIB)
    for rank in move.receivers:
        check(move.seen[rank], 8 * MIB)


@pytest.mark.usefixtures("either_route")
def test_what_is_kept_is_not_to_move() -> None:
    def target(rank: int) -> dict[str, Any]:
        return {**blank(), **{name: make_state()[name] for name in ("w2", "w5", "w6")}}

    move = Move()
    move.run(target=target, options=lambda rank: {"delta": rank == 1})
    assert move.reports[1].kept_bytes == 3 * MIB
    check(move.seen[1], 5 * MIB)
    check(move.seen[0], 5 * MIB)
    assert move.seen[1][-1][0].kept_bytes == 3 * MIB


@pytest.mark.usefixtures("group_route")
def test_a_resumed_receive() -> None:
    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if progress[1].bytes:
            raise InterruptedError("once")

    # Slow enough for the caller to see some of it before it is over.
    slow, own = {"max_bytes_per_second": 8.0 * MIB, "progress": stop}, blank()
    _, received = Move().outcomes(target=lambda rank: own, options=lambda rank: slow if rank == 0 else {})
    error = received.error
    assert isinstance(error, transfuse.PeerRefused)
    assert error.partial is not None

    move = Move()
    move.run(target=lambda rank: own, receive=lambda mover, sources: mover.recv_checkpoint(0, resume=error.partial))
    kept = move.reports[1].kept_bytes
    assert kept == error.partial.received_bytes > 0
    check(move.seen[1], 8 * MIB - kept)
    check(move.seen[0], 8 * MIB - kept)


@pytest.mark.usefixtures("either_route")
def test_several_sources() -> None:
    move = Move(sources=3)
    move.run(target=lambda rank: blank())
    check(move.seen[3], 8 * MIB)
    by_source = {rank: move.reports[3].by_source.get(rank, 0) for rank in range(3)}
    assert {rank: one.bytes for rank, one in move.seen[3][-1].items()} == by_source
    for rank in range(3):
        check(move.seen[rank], by_source[rank])


@pytest.mark.usefixtures("group_route")
def test_a_source_that_gives_up_halfway() -> None:
    """What it owed stands with the others then; nothing is counted twice."""

    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if progress[2].bytes:
            raise InterruptedError("enough")

    # Slow enough for the caller to see some of it long before it is over.
    slow: dict[str, Any] = {"max_bytes_per_second": 8.0 * MIB}
    options: list[dict[str, Any]] = [{**slow, "progress": stop}, slow, {}]
    move = Move(sources=2)
    first, second, received = move.outcomes(target=lambda rank: blank(), options=lambda rank: options[rank])
    assert isinstance(first.error, InterruptedError)
    second.get()
    received.get()
    report, last = move.reports[2], move.seen[2][-1]
    assert (last[0].phase, last[1].phase) == ("failed", "done")
    assert sum(one.bytes for one in last.values()) == sum(one.total_bytes or 0 for one in last.values()) == 8 * MIB
    assert report.error is None
    assert report.failed == {0: "PeerRefused: rank 0 refused: InterruptedError: enough"}
    assert "; without 0" in report.line()


@pytest.mark.usefixtures("group_route")
def test_damaged_parcels_count_once() -> None:
    damaged: list[int] = []

    def tamper(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 256 << 10 and len(damaged) < 3:
            damaged.append(1)
            tensor[7] ^= 1
        return tensor

    move = Move()
    move.run(target=lambda rank: blank(), wrap=lambda rank, pg: Tampering(pg, tamper) if rank == 0 else pg)
    assert move.reports[1].repaired == 3
    check(move.seen[0], 8 * MIB)
    check(move.seen[1], 8 * MIB)


def test_what_follows_from_the_numbers() -> None:
    assert Progress().fraction is None
    assert Progress().seconds_left is None
    assert Progress(total_bytes=100).fraction == 0
    assert Progress(total_bytes=100).seconds_left is None
    assert Progress(total_bytes=0, phase="planning").fraction == 0
    assert Progress(total_bytes=0, phase="done").fraction == 1
    half = Progress(total_bytes=100, bytes=50, seconds=20, moving_seconds=5)
    assert (half.fraction, half.bytes_per_second, half.seconds_left) == (0.5, 10, 5)


# ------------------------------------------------------------------------------------------ a callable that raises


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("when", ["at first", "while it waits"])
def test_what_the_callable_raises_ends_the_transfer_at_both_ends(end: int, when: str) -> None:
    begun = threading.Event()
    move, own = Move(), blank()

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if when == "at first" or "waiting" in progress[1 - end].phase:
            begun.set()
            raise ArithmeticError("no more")

    def around(rank: int, call: Callable[[], Any]) -> Any:
        # The other end comes when this one has been seen to wait.
        assert rank == end or begun.wait(30)
        return call()

    outcomes = move.outcomes(
        target=lambda rank: own, around=around, options=lambda rank: {"progress": show} if rank == end else {}
    )
    assert isinstance(outcomes[end].error, ArithmeticError)
    assert move.reports[end].error == "ArithmeticError: no more"
    told = outcomes[1 - end].error
    if told is None:
        # A receiver that has read everything while the source was saying goodbye has all it wants.
        assert (end, when, move.reports[1].route) == (0, "while it waits", "memory")
        assert all(torch.equal(own[name], leaf) for name, leaf in make_state().items())
        return
    assert isinstance(told, transfuse.PeerRefused if end == 0 else transfuse.SendFailed)
    assert "ArithmeticError: no more" in str(told)
    assert not any(leaf.any() for leaf in own.values())


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("end", [0, 1])
def test_what_it_raises_when_all_is_over_is_raised_here_alone(end: int) -> None:
    def show(progress: dict[int, transfuse.Progress]) -> None:
        if all(one.phase == "done" for one in progress.values()):
            raise ArithmeticError("too late")

    move, own = Move(), blank()
    outcomes = move.outcomes(target=lambda rank: own, options=lambda rank: {"progress": show} if rank == end else {})
    assert isinstance(outcomes[end].error, ArithmeticError)
    outcomes[1 - end].get()
    assert move.reports[1].torn == (), "everything is here"
    assert all(torch.equal(own[name], leaf) for name, leaf in make_state().items())


# ----------------------------------------------------------------------------------------------------------- bars


class Terminal:
    """A pseudo terminal in place of stderr, and all that was written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        self._file = os.fdopen(slave, "w", encoding="utf-8")
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        monkeypatch.setattr(sys, "stderr", self._file)

    def _read(self) -> None:
        # The end of a pseudo terminal whose other end is closed is an error.
        try:
            while data := os.read(self._master, 4096):
                self._parts.append(data)
        except OSError:
            pass

    def close(self) -> str:
        self._file.close()
        self._reader.join()
        os.close(self._master)
        return b"".join(self._parts).decode()


def pictures(text: str, label: str) -> list[str]:
    """All states of the bar with this label."""
    return [part.strip() for part in re.split(r"[\r\n]|\x1b\[A", text) if part.strip().startswith(f"{label}:")]


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("end", [0, 1])
def test_a_bar_in_a_terminal(end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, came = Terminal(monkeypatch), threading.Event()
    move = Move()

    def around(rank: int, call: Callable[[], Any]) -> Any:
        if rank != end:
            # Not before the bar has been drawn waiting.
            came.wait(30)
        return call()

    def draw(bar: Bar, progress: dict[int, Progress], real: Any = Bar.__call__) -> None:
        real(bar, progress)
        if "waiting" in progress[1 - end].phase:
            came.set()

    monkeypatch.setattr(Bar, "__call__", draw)
    move.run(around=around, options=lambda rank: {"progress": rank == end})
    text = terminal.close()
    meets = "waiting for the receiver" if over_streams() else "waiting for the want"
    label, waits = ("send to 1", meets) if end == 0 else ("receive from 0", "waiting for the offer")
    drawn = pictures(text, label)
    assert any(waits in picture for picture in drawn)
    percents = [int(found[1]) for picture in drawn if (found := re.search(r"(\d+)%", picture))]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    assert re.search(r"100%\|█+\| 8.00M/8.00M \[00:\d\d<00:00, +[\d.]+[kMG]?B/s\]$", drawn[-1]), drawn[-1]
    assert text.endswith("\n")


def test_a_bar_over_several_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    Move(receivers=2).run(options=lambda rank: {"progress": rank == 0})
    assert "100%" in pictures(terminal.close(), "send to 1, 2")[-1]


def test_a_bar_is_closed_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    target = {"w0": torch.zeros(3)}
    _, received = Move().outcomes(target=lambda rank: target, options=lambda rank: {"progress": rank == 1})
    assert isinstance(received.error, transfuse.TargetMismatch)
    text = terminal.close()
    assert pictures(text, "receive from 0")[-1].endswith("failed: TargetMismatch]")
    assert text.endswith("\n")


def test_a_terminal_that_goes_away_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)

    def draw(bar: Bar, progress: dict[int, Progress], real: Any = Bar.__call__) -> None:
        if not sys.stderr.closed:
            terminal.close()
        real(bar, progress)

    monkeypatch.setattr(Bar, "__call__", draw)
    Move().run(options=lambda rank: {"progress": rank == 1})


def test_ranks_that_share_a_terminal_have_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    terminal = Terminal(monkeypatch)
    Move().run(options=lambda rank: {"progress": rank == 1})
    text = terminal.close().replace("\r\n", "\n")
    # Two lines down, drawn, and up again, in one piece; the last picture stays where the cursor is.
    assert re.search("\n\n\rreceive from 0: [^\n]*\x1b\\[A\x1b\\[A", text)
    *_, last = text.split("\x1b[A")
    assert re.fullmatch("\rreceive from 0: 100%[^\n]*\n", last), last


@pytest.mark.parametrize("progress", [True, False])
def test_nothing_is_written_where_nothing_is_shown(progress: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a terminal there is no bar, and without progress there is nothing anywhere."""
    Move().run(options=lambda rank: {"progress": progress})
    assert capfd.readouterr() == ("", "")


def test_without_progress_nothing_is_written_to_a_terminal_either(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    Move().run(options=lambda rank: {"progress": False})
    assert terminal.close() == ""


def test_the_bar_is_the_one_that_tqdm_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook ``tqdm.auto`` is a widget; whatever it is, it is asked for when a transfer begins."""
    made: list[Any] = []
    totals: list[float | None] = []

    class Chosen(tqdm.auto.tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

        def reset(self, total: float | None = None) -> None:
            totals.append(total)
            super().reset(total)

    monkeypatch.setattr(tqdm.auto, "tqdm", Chosen)
    terminal = Terminal(monkeypatch)
    Move().run(options=lambda rank: {"progress": rank == 1})
    terminal.close()
    (bar,) = made
    assert (bar.desc, bar.n, bar.total, bar.disable) == ("receive from 0", 8 * MIB, 8 * MIB, True)
    assert totals == [8 * MIB], "a widget is told of its total by this alone"


# --------------------------------------------------------------------------------------------------------- report


def as_json(report: transfuse.Report) -> dict[str, Any]:
    """A report as a reader of JSON gets it; its table and its line are what they should be, too."""
    read = json.loads(json.dumps(report.to_dict()))
    assert isinstance(read, dict)
    assert read["bytes"] == report.bytes
    assert read["bytes_per_second"] == report.bytes_per_second
    assert "\n" not in report.line()
    rows = str(report).splitlines()
    assert len(rows) == len(report.rows())
    assert max(map(len, rows)) < 300
    assert rows[0].split("  ")[0] == "transfer"
    assert rows[0].endswith(report.title)
    return read


@pytest.mark.usefixtures("either_route")
def test_reports_of_both_ends() -> None:
    move = Move()
    move.run(target=lambda rank: blank())
    sent, received = (as_json(move.reports[rank]) for rank in (0, 1))
    route = "memory" if move.reports[1].read_bytes else "group"
    for report, direction, peers in ((sent, "send", [1]), (received, "receive", [0])):
        assert (report["direction"], report["peers"], report["step"]) == (direction, peers, 3)
        assert (report["bytes"], report["route"], report["leaves"]) == (8 * MIB, route, 8)
        assert (report["error"], report["failed"]) == (None, {})
        assert set(report["phases"]) <= {phase.label for phase in Phase}
    assert received["by_source"] == {"0": 8 * MIB}


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize(("sources", "receivers"), [(1, 1), (3, 1), (1, 3), (2, 2)])
def test_phases_add_up_to_the_time(sources: int, receivers: int) -> None:
    move = Move(sources=sources, receivers=receivers)
    move.run(target=lambda rank: blank())
    for report in move.reports.values():
        assert sum(report.phases.values()) <= report.seconds
        assert report.seconds == pytest.approx(sum(report.phases.values()) + report.other_seconds)
        rows = dict(report.rows())
        assert rows["  other"] == f"{report.other_seconds:.3f} s"


@pytest.mark.usefixtures("either_route")
def test_a_rate_does_not_count_waiting() -> None:
    move = Move()
    move.run(target=lambda rank: blank())
    sent, received = (move.reports[rank] for rank in (0, 1))
    waited = received.phases["wait for offer"]
    assert 0 < received.moving_seconds <= received.seconds - waited
    assert received.bytes_per_second == received.bytes / received.moving_seconds
    assert f"{received.seconds:.3f} s (" in dict(received.rows())["time"]
    assert "/s while bytes moved)" in received.line()
    if received.read_bytes:
        assert sent.bytes_per_second == 0, "the receiver read alone"
        assert dict(sent.rows())["time"] == f"{sent.seconds:.3f} s"
    else:
        assert sent.bytes_per_second == sent.bytes / sent.moving_seconds


def test_a_report_of_delta_several_sources_and_casts() -> None:
    def target(rank: int) -> dict[str, Any]:
        return {**make_state(), "w0": torch.zeros(MIB // 4, dtype=torch.bfloat16), "w1": torch.zeros(MIB // 4)}

    move = Move(sources=2)
    move.run(target=target, options=lambda rank: {"delta": True, "cast": True} if rank == 2 else {})
    report = as_json(move.reports[2])
    assert report["kept_bytes"] == 6 * MIB
    assert report["bytes"] == sum(report["by_source"].values()) == MIB + MIB // 2
    assert f"kept{' ' * 4}" in str(move.reports[2])


def test_a_report_of_a_failure() -> None:
    def target(rank: int) -> dict[str, Any]:
        return {f"w{i}": torch.zeros(3) for i in range(8)} if rank == 1 else blank()

    move = Move(receivers=2)
    sent, refused, received = move.outcomes(target=target)
    received.get()
    assert isinstance(refused.error, transfuse.TargetMismatch)
    assert str(refused.error).count("\n") > 2, "one line for each leaf"
    report = as_json(move.reports[1])
    assert report["error"] == f"TargetMismatch: {refused.error}"
    assert list(report["failed"]) == ["0"]
    assert report["seconds"] > 0
    assert isinstance(sent.error, transfuse.SendFailed)
    report = as_json(move.reports[0])
    assert report["error"].startswith("SendFailed: ")
    assert list(report["failed"]) == ["1"]
    assert "TargetMismatch" in report["failed"]["1"]
    assert report["bytes"] == 8 * MIB, "the other receiver's"
    assert as_json(move.reports[2])["error"] is None


def test_a_report_of_a_state_that_cannot_be_described() -> None:
    move = Move(receivers=2)
    sent, *refused = move.outcomes(state=lambda rank: {"a lambda": lambda: None})
    assert isinstance(sent.error, transfuse.TransfuseError)
    assert all(isinstance(one.error, transfuse.PeerRefused) for one in refused)
    report = as_json(move.reports[0])
    assert list(report["failed"]) == ["1", "2"]
    assert {one.phase for one in move.seen[0][-1].values()} == {"failed"}


# ------------------------------------------------------------------------------------------------------------ log


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return sorted((r for r in caplog.records if r.name == "transfuse"), key=lambda record: record.getMessage())


@pytest.mark.usefixtures("either_route")
def test_one_line_for_each_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="transfuse")
    move = Move()
    move.run()
    received, sent = lines(caplog)
    assert received.levelno == sent.levelno == logging.INFO
    assert (received.getMessage(), sent.getMessage()) == (move.reports[1].line(), move.reports[0].line())
    route = move.reports[1].route
    pattern = (
        rf"receive from 0, step 3: 8\.0 MiB by {route} in [\d.]+ s \([\d.]+ .?i?B/s while bytes moved\), "
        r"8 leaves, 0 parcels repaired, 0 B kept"
    )
    assert re.fullmatch(pattern, received.getMessage())
    assert getattr(received, "transfuse_report", None) is move.reports[1]


def test_one_line_for_each_end_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="transfuse")
    move = Move()
    move.outcomes(target=lambda rank: {f"w{i}": torch.zeros(3) for i in range(8)})
    received, sent = lines(caplog)
    assert received.levelno == sent.levelno == logging.INFO
    assert re.match(r"receive from 0, .*; failed: TargetMismatch: ", received.getMessage())
    assert re.match(r"send to 1, step 3: .*; failed: SendFailed: .*TargetMismatch", sent.getMessage())
    assert not any("\n" in record.getMessage() for record in (received, sent))


def test_the_logger_is_left_alone() -> None:
    logger = logging.getLogger("transfuse")
    assert logger.handlers == []
    assert logger.propagate
    assert logger.level == logging.NOTSET


# ---------------------------------------------------------------------------------------------------------- traces


class Traced:
    """Runs one rank's call under a profiler; its ranges. The profiler begins before all other calls.

    ``until``: and it ends after this many of them.
    """

    def __init__(self, end: int, path: pathlib.Path, until: int = 0, **options: Any) -> None:
        self._end, self._path, self._until, self._options = end, path, until, options
        self.ranges: list[dict[str, Any]] = []
        self.thread = 0
        self._records, self._ended = threading.Event(), threading.Semaphore(0)

    def __call__(self, rank: int, call: Callable[[], Any]) -> Any:
        if rank != self._end:
            assert self._records.wait(30), "a range that began before the profiler would be missing"
            try:
                return call()
            finally:
                self._ended.release()
        self.thread = threading.get_native_id()
        activities = [torch.profiler.ProfilerActivity.CPU]
        try:
            with torch.profiler.profile(activities=activities, **self._options) as profiler:
                self._records.set()
                result = call()
                for _ in range(self._until):
                    assert self._ended.acquire(timeout=30), "a range that ends after the profiler would be missing"
                return result
        finally:
            profiler.export_chrome_trace(str(self._path))
            events = json.loads(self._path.read_text())["traceEvents"]
            ours = [event for event in events if str(event.get("name")).startswith("transfuse::")]
            self.ranges = sorted(ours, key=lambda event: event["ts"])

    @property
    def names(self) -> set[str]:
        return {event["name"] for event in self.ranges}


def nested(ranges: Sequence[dict[str, Any]]) -> bool:
    """Whether ranges of one thread lie within each other or apart, as a trace's viewers need them."""
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in ranges]
    return all(b[0] >= a[1] or b[1] <= a[1] for a, b in itertools.combinations(spans, 2))


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("end", [0, 1])
def test_every_phase_is_a_range_of_the_calling_thread(end: int, tmp_path: pathlib.Path) -> None:
    traced, move = Traced(end, tmp_path / "trace.json"), Move()
    move.run(target=lambda rank: blank(), around=traced)
    report = move.reports[end]
    call = trace_name(report.direction)
    assert traced.names == {call, *(f"{call}/{label}" for label in report.phases)}
    assert {event["tid"] for event in traced.ranges} == {traced.thread}
    (whole,) = (event for event in traced.ranges if event["name"] == call)
    for event in traced.ranges:
        assert event["cat"] == "user_annotation"
        assert whole["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= whole["ts"] + whole["dur"]
    assert nested(traced.ranges)
    group = move.reports[1].route == "group"
    moving = {0: {"send"} if group else set[str](), 1: {"receive" if group else "read"}}[end]
    told = "meet" if over_streams() else "offer"
    first = {0: {"describe", told}, 1: {"state_dict callback", "wait for offer", "plan", "finish"}}[end]
    assert moving | first <= set(report.phases)


@pytest.mark.usefixtures("group_route")
@pytest.mark.parametrize("end", [0, 2, 3])
def test_phases_of_several_conversations_lie_within_each_other(end: int, tmp_path: pathlib.Path) -> None:
    """Two sources and two receivers: each conversation enters and leaves phases as it likes."""
    traced, move = Traced(end, tmp_path / "trace.json"), Move(sources=2, receivers=2)
    move.run(around=traced)
    report = move.reports[end]
    call = trace_name(report.direction)
    assert traced.names == {call, *(f"{call}/{label}" for label in report.phases)}
    assert nested(traced.ranges)


@pytest.mark.usefixtures("either_route")
def test_a_profiler_of_all_threads_sees_the_conversations_own_ranges(tmp_path: pathlib.Path) -> None:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    traced, move = Traced(1, tmp_path / "trace.json", until=1, experimental_config=config), Move()
    move.run(around=traced)
    labels = {f"transfuse::{report.direction}/{label}" for report in move.reports.values() for label in report.phases}
    assert traced.names == {"transfuse::send", "transfuse::receive"} | labels
    assert all(nested(list(of_one)) for _, of_one in itertools.groupby(traced.ranges, lambda event: event["tid"]))
    assert sum(event["name"] == "transfuse::receive/plan" for event in traced.ranges) == 1


def test_a_failed_call_closes_its_ranges(tmp_path: pathlib.Path) -> None:
    traced, move = Traced(1, tmp_path / "trace.json"), Move()
    move.outcomes(target=lambda rank: {"w0": torch.zeros(3)}, around=traced)
    assert {"transfuse::receive", "transfuse::receive/plan"} <= traced.names
    assert nested(traced.ranges)


# ------------------------------------------------------------------------------------------------------------ docs


def test_code_of_the_guide_is_from_the_example() -> None:
    example = (ROOT / "examples" / "observe.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    assert len(blocks) >= 5
    for block in blocks:
        wanted = [line.strip() for line in block.strip().splitlines()]
        there = [line.strip() for line in example.splitlines()]
        found = any(there[at : at + len(wanted)] == wanted for at in range(len(there)))
        assert found, f"not in the example:\n{block}"


def test_the_guide_names_every_phase() -> None:
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+?) \|", GUIDE, re.M))
    assert {label: rows.get(label) for label in (phase.label for phase in Phase)} == {
        phase.label: phase.doing for phase in Phase
    }


@pytest.mark.timeout(200)
def test_the_example_runs() -> None:
    ended = run_program(ROOT / "examples" / "observe.py", 2)
    assert all(rank.code == 0 for rank in ended), "\n".join(map(str, ended))
    *table, line, stopped, told, sent, received = ended[1].out.splitlines()
    assert re.search(r"^kept +13.0 MiB$", "\n".join(table), re.M)
    assert re.fullmatch(r"receive from 0, step 10: 16.0 MiB by (memory|group) in .*, 17 leaves, .*", line)
    assert stopped == "rank 0 has stopped"
    assert told.endswith("rank 0 refused: InterruptedError: this node is wanted for something else")
    assert sent.startswith("transfuse::send, transfuse::send/describe, ")
    assert received.startswith("transfuse::receive, ")
    assert received.endswith("transfuse::receive/verdict")
