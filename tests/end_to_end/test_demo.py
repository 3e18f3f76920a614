"""The demo as a user meets it, and what judges and measures in it. No process is left, however it ends."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import signal
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from examples.demo.command import app
from examples.demo.generation import Generation, GenerationOver, Parent
from examples.demo.job import Job
from examples.demo.kept import recoveries
from examples.demo.kept_words import Said
from examples.demo.model import batch, width_for
from examples.demo.outcome import differences, healings, restart
from examples.demo.run import Course, Event, Kill, run
from examples.demo.screen import Screen
from examples.demo.words import (
    Begun,
    Done,
    Finished,
    Formed,
    Go,
    Healed,
    Healing,
    Killed,
    Left,
    Loaded,
    Lost,
    Over,
    Ready,
    Saved,
    Settings,
    Started,
    Word,
)
from typer.testing import CliRunner

from commands import DEMO, Running
from transfuse._report import Report
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import RanksFailed, interrupts_held, loopback_store

#: Every worker imports torch, on a machine that may be busy with other tests.
pytestmark = pytest.mark.timeout(300)

SVG = "{http://www.w3.org/2000/svg}"


# ----------------------------------------------------------------------------------------------------- the real command


@pytest.mark.long
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["first act", "whole"])
def test_a_killed_worker_is_healed_bit_for_bit(whole: bool, tmp_path: pathlib.Path) -> None:
    """The whole has the restart from a file, to compare with, and the keeper: other tests have these, too."""
    picture, steps = tmp_path / "demo.svg", 8
    options = ["--workers", "2", "--victim", "0", "--size", "tiny", "--steps", str(steps)]
    options += [] if whole else ["--no-compare", "--no-keeper"]
    with Running(
        *options, "--picture", str(picture), "--json", environ={"TMPDIR": str(tmp_path)}, command=DEMO
    ) as running:
        out, err, code = running.end()
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["equal"] is True
    assert result["differences"] == []
    runs = result["losses"]
    assert runs["undisturbed"] == runs["killed"]
    assert [len(row) for row in runs["killed"]] == [2] * steps
    assert sum(runs["killed"][-1]) < 0.9 * sum(runs["killed"][0]), "it learns"
    (kill,) = result["kills"]
    assert (kill["worker"], kill["during_healing"]) == (0, False)
    # In step 4; on a busy machine the kill may come later.
    assert 4 <= kill["step"] < steps
    (healing,) = result["healings"]
    assert list(healing["parts"]) == ["noticing", "starting", "forming the group", "transfer", "steps"]
    assert healing["seconds"] == pytest.approx(sum(healing["parts"].values()))
    (report,) = healing["reports"]
    cut_off = kill["step"]
    assert report["step"] in (cut_off, cut_off + 1), "the step cut off, or the next if the other worker had applied it"
    assert report["bytes"] >= result["model"]["state_bytes"]
    if whole:
        restarted = result["restart_from_file"]
        assert list(restarted["parts"])[:3] == ["noticing", "ending the others", "starting"]
        assert (restarted["step"], restarted["steps"]) == (4, 2), "one step since the file was lost"
        # If the kill comes late, a step that had been saved is done and saved again.
        assert sorted({save["step"] for save in result["saves"]}) == [1, 3, 5, 7]
        second = result["keeper"]
        assert second["equal"] is True
        assert [second[way]["steps"] for way in ("from_memory", "from_file")] == [1, 5], "only the file loses steps"
        assert list(second["from_memory"]["parts"]) == list(second["from_file"]["parts"])
    # The folder for these files is gone.
    assert not list(tmp_path.glob("transfuse*"))
    root = ElementTree.parse(picture).getroot()
    kinds = [element.get("class") for element in root.iter() if element.get("class")]
    told = {title.text for title in root.iter(f"{SVG}title")}
    assert {f"worker 1, step {step}" for step in range(steps)} <= told
    assert kinds.count("loss") == steps
    assert [kinds.count(kind) for kind in ("kill", "start", "transfer")] == [1, 1, 1]
    text = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    assert "equal bit for bit" in text


@pytest.mark.soak  # Sources that are killed midway have tests of their own; this is the demo's telling of it.
def test_a_source_is_killed_during_the_healing() -> None:
    with Running(
        "--workers", "3", "--chaos", "--size", "tiny", "--steps", "4", "--no-compare", "--no-keeper", command=DEMO
    ) as running:
        out, err, code = running.end()
    assert (code, err) == (0, "")
    happened = [
        r"worker 2 \(process \d+\) gets SIGKILL in the middle of step 2",
        r"worker 2 starts again as process \d+",
        r"worker 2 heals at step [23] from ",
        r"worker \d \(process \d+\) gets SIGKILL in the middle of the transfer",
        r"worker 2: source \d is lost, the others bring what it owed",
        r"worker 2 is healed, in place: ",
        r"a group of all 3 workers is formed",
        r"worker \d heals at step [23] from ",
        r"worker \d is healed, in place: ",
        r"equal bit for bit: the loss of each of 3 workers at each of 4 steps",
    ]
    at = 0
    for pattern in happened:
        found = re.compile(pattern).search(out, at)
        assert found is not None, f"{pattern!r} is not where it should be in:\n{out}"
        at = found.end()
    assert "\x1b" not in out


@pytest.mark.soak  # The ordinary tests interrupt other commands, and kill this one.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupted_in_a_restart_it_leaves_nothing_behind(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    with Running(
        "--workers", "2", "--size", "tiny", "--steps", "4", environ={"TMPDIR": str(tmp_path)}, command=DEMO
    ) as running:
        running.read_until("starts again")
        running.process.send_signal(number)
        _, err, code = running.end()
    assert code == 130
    assert err == "demo: interrupted\n"
    assert not list(tmp_path.glob("transfuse*"))


@pytest.fixture
def short_path() -> Iterator[pathlib.Path]:
    """pytest's own paths leave no room for the path of the keeper's socket: the demo would use /tmp."""
    with tempfile.TemporaryDirectory(prefix="demo-", dir="/tmp") as folder:
        yield pathlib.Path(folder)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_in_the_second_act_it_leaves_nothing_behind(
    number: signal.Signals, short_path: pathlib.Path
) -> None:
    options = ("--workers", "2", "--size", "tiny", "--steps", "4", "--no-compare")
    with Running(*options, environ={"TMPDIR": str(short_path)}, command=DEMO) as running:
        running.read_until("from the keeper's memory")
        running.process.send_signal(number)
        if number == signal.SIGKILL:
            running.until(lambda: not running.alive())
            return
        _, err, code = running.end()
    assert (code, err) == (130, "demo: interrupted\n")
    assert not [path for path in short_path.iterdir() if path.name.startswith(("transfuse", "torchelastic"))]


def test_killed_it_leaves_no_process_behind(tmp_path: pathlib.Path) -> None:
    # Its empty folder stays: nobody is left to remove it.
    with Running("--workers", "2", "--size", "tiny", environ={"TMPDIR": str(tmp_path)}, command=DEMO) as running:
        running.until(lambda: len(running.workers()) == 2)
        running.process.kill()
        # A worker notices once it has imported what it needs.
        running.until(lambda: not running.workers())


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_at_any_moment(number: signal.Signals) -> None:
    for seed in range(6):
        with Running("--workers", "3", "--chaos", "--size", "tiny", "--steps", "6", command=DEMO) as running:
            running.read_until("million parameters")
            time.sleep(random.Random(seed).uniform(0, 50))
            running.process.send_signal(number)
            _, err, code = running.end()
        # It may have been over.
        assert (code, err) in [(130, "demo: interrupted\n"), (0, "")]


@pytest.mark.soak
def test_a_worker_killed_by_somebody_else_is_healed_too() -> None:
    options = ("--workers", "3", "--size", "tiny", "--steps", "300", "--no-compare", "--no-keeper")
    with Running(*options, command=DEMO) as running:
        running.read_until("and a worker is killed")
        running.read_until("is formed")
        os.kill(running.workers()[0], signal.SIGKILL)
        lines = running.read_until("is healed, in place")
        out, err, code = running.end()
    assert (code, err) == (0, "")
    assert any("died: signal SIGKILL" in line for line in lines)
    assert "equal bit for bit" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--workers", "1"), "--workers"),
        (("--workers", "2", "--chaos"), "it needs 3"),
        (("--victim", "4"), "there are workers 0 to 3"),
        (("--kills", "3", "--steps", "7"), "3 kills need at least 8 steps"),
        (("--size", "huge"), "neither tiny, small, medium nor"),
        (("--size", "nan"), "neither tiny, small, medium nor"),
    ],
)
def test_options_that_do_not_go(options: Sequence[str], said: str) -> None:
    done = CliRunner().invoke(app, list(options))
    assert done.exit_code == 2
    # Within a box, and broken at its width.
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_what_cannot_work_is_said_beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(app, ["--picture", str(tmp_path / "no" / "such.svg")])
    assert (done.exit_code, done.stderr) == (1, f"demo: {tmp_path}/no/such.svg cannot be written\n")
    done = CliRunner().invoke(app, ["--picture", str(tmp_path)])
    assert (done.exit_code, done.stderr) == (1, f"demo: {tmp_path} is a directory; name a file in it\n")
    monkeypatch.setattr(pathlib.Path, "read_text", lambda _: "MemTotal: 9 kB\nMemAvailable: 1048576 kB\n")
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 1
    assert "4 workers with 2 million parameters need about 1.8 GiB of memory, 1.0 GiB are available" in done.stderr


# ------------------------------------------------------------------------------------------------------------- the job


class Deaf:
    """A parent that does not listen."""

    def __init__(self) -> None:
        self.words: list[Word] = []

    def say(self, word: Word) -> None:
        self.words.append(word)


class Alone:
    """A group of which nobody else contributes anything."""

    number = 0

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def sum(self, *_: torch.Tensor) -> None:
        pass


def job(folder: pathlib.Path) -> Any:
    parent: Any = Deaf()
    return Job(0, Settings(1, width_for(50_000), 10, 5, folder), parent)


def test_a_file_holds_all_that_training_needs(tmp_path: pathlib.Path) -> None:
    one = job(tmp_path)
    one.begin()
    for _ in range(2):
        one.train(Alone())
    one.save()
    one.train(Alone())
    other = job(tmp_path)
    assert other.digests() != one.digests(), "a new process has other weights"
    other.load(2)
    other.train(Alone())
    assert_exact(one.state(), other.state())
    assert one.parent.words[-1] == replace(other.parent.words[-1], when=one.parent.words[-1].when)


def test_training_depends_on_the_random_numbers_that_are_healed(tmp_path: pathlib.Path) -> None:
    one, other = job(tmp_path), job(tmp_path)
    for each in (one, other):
        each.begin()
    other.rng[0] = torch.Generator().manual_seed(1).get_state()
    for each in (one, other):
        torch.manual_seed(0)  # What a process's own generator holds does not matter.
        each.train(Alone())
    assert one.digests() != other.digests()


def test_a_state_has_all_its_leaves_before_the_first_step(tmp_path: pathlib.Path) -> None:
    """A worker may be killed in the very first step, or be healed before it."""
    one, fresh = job(tmp_path), job(tmp_path)
    one.begin()
    before = one.digests()
    one.train(Alone())
    after = one.digests()
    assert before.keys() == after.keys() == fresh.digests().keys()
    moments = [path for path in before if "exp_avg" in path]
    assert len(moments) == 2 * len(list(one.model.parameters()))
    assert all(before[path] != after[path] for path in moments)


def test_a_file_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    lost = job(tmp_path / "nowhere")
    lost.begin()
    with pytest.raises(OSError, match=r"the state cannot be saved in .*nowhere .*; set TMPDIR to a roomier place"):
        lost.save()


def test_text_is_a_function_of_seed_step_and_rank() -> None:
    assert torch.equal(batch(1, 2, 3), batch(1, 2, 3))
    others = [batch(*key) for key in ((0, 2, 3), (1, 0, 3), (1, 2, 0))]
    assert not any(torch.equal(batch(1, 2, 3), other) for other in others)


# --------------------------------------------------------------------------------------------------------- generations


class Ranks:
    """Jobs in threads of this process, each with a pipe to its parent, and a store for their groups."""

    def __init__(self, count: int, folder: pathlib.Path) -> None:
        self._store = loopback_store(timedelta(seconds=60))
        self.pipes = [multiprocessing.Pipe() for _ in range(count)]
        self.parents = [Parent(theirs.send, theirs.recv) for _, theirs in self.pipes]
        settings = Settings(count, width_for(50_000), 10, 5, folder)
        self.jobs = [Job(rank, settings, parent) for rank, parent in enumerate(self.parents)]

    def form(self, number: int, rank: int) -> Generation:
        return Generation(number, rank, len(self.jobs), self._store.port, self.parents[rank])

    def heal(self, number: int) -> None:
        def one(rank: int) -> None:
            generation = self.form(number, rank)
            self.jobs[rank].heal(generation, Go(number, "as you are", 10))

        with ThreadPoolExecutor(len(self.jobs)) as pool:
            for done in [pool.submit(one, rank) for rank in range(len(self.jobs))]:
                done.result()

    def heard(self, rank: int) -> list[Word]:
        ours, _ = self.pipes[rank]
        return [ours.recv() for _ in iter(ours.poll, False)]


def test_the_newest_heal_those_a_step_behind(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = Ranks(4, tmp_path)
    newest, as_new, behind, fresh = ranks.jobs
    newest.begin()
    for _ in range(2):
        newest.save()
        newest.train(cast(Generation, Alone(4)))
    newest.save()
    as_new.load(2)
    # One did not get the last step any more, another has just been started.
    behind.load(1)
    owned = [[parameter.data_ptr() for parameter in job.model.parameters()] for job in (behind, fresh)]
    assert [job.step for job in ranks.jobs] == [2, 2, 1, -1]
    ranks.heal(0)
    assert [job.step for job in ranks.jobs] == [2] * 4
    assert_exact(newest.state(), behind.state())
    assert_exact(newest.state(), fresh.state())
    assert owned == [[parameter.data_ptr() for parameter in job.model.parameters()] for job in (behind, fresh)]
    for rank in (2, 3):
        assert [word.sources for word in ranks.heard(rank) if isinstance(word, Healing)] == [(0, 1)]
    # And now there is nothing to heal.
    ranks.heal(1)
    assert not any(isinstance(word, Healing) for rank in range(4) for word in ranks.heard(rank))


def test_healed_before_the_first_step(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = Ranks(2, tmp_path)
    source, fresh = ranks.jobs
    source.begin()
    ranks.heal(0)
    assert_exact(source.state(), fresh.state())


def test_without_any_state_it_is_over(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(RuntimeError, match="no worker is left that has a state"):
        Ranks(2, tmp_path).heal(0)


def test_what_waits_for_the_dead_can_be_left(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = Ranks(2, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        generation, _ = pool.map(lambda rank: ranks.form(0, rank), range(2))
        waiting = pool.submit(generation.gather, 1)
        # The other one never comes, and the parent says so.
        ranks.pipes[0][0].send(Over(0))
        with pytest.raises(GenerationOver, match="the parent said so"):
            waiting.result(20)
    # Nor is a generation formed that is over before it has begun.
    with pytest.raises(GenerationOver):
        ranks.form(0, 0)


# ----------------------------------------------------------------------------------------- what judges, and what counts


def finished_run(losses: Sequence[tuple[float, float]], digest: str = "a") -> list[Event]:
    steps = [Event(rank, Done(0, step, row, when=float(step))) for step, row in enumerate(losses) for rank in range(2)]
    return [*steps, *(Event(rank, Finished(0, {"w": digest}, when=9.0)) for rank in range(2))]


def test_differences_are_found() -> None:
    run = finished_run([(1.0, 2.0), (0.5, 0.25)])
    assert differences(run, run) == []
    one_bit = finished_run([(1.0, 2.0), (0.5, 0.25000000000000006)])
    assert differences(run, one_bit) == [f"killed run, step 1: worker {rank} has other losses" for rank in (0, 1)]
    assert differences(run, finished_run([(1.0, 2.0)])) == ["killed run: steps [1] are missing"]
    assert len(differences(run, finished_run([(1.0, 2.0), (0.5, 0.25)], digest="b"))) == 2
    # Zeros of either sign are equal, and not the same.
    assert differences(finished_run([(0.0, 1.0)]), finished_run([(-0.0, 1.0)]))
    # Nor may the workers of one run differ.
    torn = [*run[:-1], Event(1, Finished(0, {"w": "c"}))]
    assert differences(torn, run)


def test_parts_of_a_healing_add_up() -> None:
    report = Report("receive", (0,))
    events = [
        Event(1, Killed(0, 3, when=10.0)),
        Event(1, Lost("signal SIGKILL", when=10.1)),
        Event(1, Started(7, when=10.2)),
        Event(0, Left(0, 3, "", when=10.5)),
        Event(0, Ready(when=10.6)),
        Event(1, Ready(when=12.5)),
        Event(0, Formed(1, when=12.75)),
        Event(1, Formed(1, when=13.0)),
        Event(1, Healing(3, (0,), when=13.1)),
        Event(1, Healed(1, 3, report, when=13.5)),
        Event(0, Done(1, 3, (1.0, 1.0), when=14.0)),
        Event(1, Done(1, 3, (1.0, 1.0), when=14.25)),
        Event(0, Done(1, 4, (1.0, 1.0), when=20.0)),
    ]
    (healing,) = healings(events, 2)
    parts = {"noticing": 0.5, "starting": 2.0, "forming the group": 0.5, "transfer": 0.5, "steps": 0.75}
    assert healing.parts == parts
    assert healing.seconds == 4.25
    assert (healing.rank, healing.step, healing.reports) == (1, 3, (report,))


def test_parts_of_a_restart_add_up() -> None:
    events = [
        Event(0, Ready(when=1.0)),
        Event(0, Loaded(1, when=2.0)),
        Event(1, Killed(0, 3, when=10.0)),
        Event(1, Lost("signal SIGKILL", when=10.25)),
        *(Event(rank, Started(7, when=10.5 + rank)) for rank in range(2)),
        *(Event(rank, Ready(when=14.0 + rank)) for rank in range(2)),
        *(Event(rank, Loaded(1, when=15.5 + rank)) for rank in range(2)),
        *(Event(rank, Formed(1, when=17.0)) for rank in range(2)),
        *(Event(rank, Done(1, step, (1.0, 1.0), when=16.0 + step)) for step in (1, 2, 3) for rank in range(2)),
    ]
    found = restart(events)
    parts = [0.25, 0.25, 4.5, 1.5, 0.5, 2.0]
    names = ["noticing", "ending the others", "starting", "loading", "forming the group", "steps"]
    assert found.parts == dict(zip(names, parts, strict=True))
    assert found.steps == 3


def test_recoveries_of_the_second_act_add_up() -> None:
    def life(number: int, start: float, begun: str, first: int, fatal: int | None) -> list[Said]:
        when = itertools.count(start)
        told = [("started", 0), ("ready", 0), ("formed", 0), (begun, first)]
        told += [("done", step) for step in range(first, 16 if fatal is None else fatal)]
        said = [Said(number, rank, 7, what, step, next(when)) for what, step in told for rank in range(2)]
        return said if fatal is None else [*said, Said(number, 1, 7, "killed", fatal, start + 100)]

    said = [*life(0, 0.0, "begun", 0, 5), *life(1, 110.0, "restored", 5, 12), *life(2, 220.0, "loaded", 8, None)]
    memory, file = recoveries(said)
    parts = {"ending the others": 11.0, "starting": 2.0, "forming the group": 2.0, "loading": 2.0}
    assert memory.parts == {**parts, "steps": 2.0}
    assert file.parts == {**parts, "steps": 10.0}
    assert [(one.step, one.steps) for one in (memory, file)] == [(5, 1), (12, 5)]
    with pytest.raises(RanksFailed, match=r"went on from steps \[\] after the kill in step 5"):
        recoveries([one for one in said if one.what != "restored"])


class Scripted:
    """Workers that do as they are told within a run: what they say is a script, and who is killed says no more.

    Told to go, a worker says at once all that it ever says. So a kill, however soon, comes when its victim has
    finished: as on a machine where the parent is not served for a while.
    """

    def __init__(self, count: int) -> None:
        self.ranks = range(count)
        self._there: set[int] = set()
        self._words: deque[tuple[int, Word]] = deque()
        self._generations = itertools.count()

    def __contains__(self, rank: int) -> bool:
        return rank in self._there

    def next_generation(self) -> int:
        return next(self._generations)

    def start(self, rank: int) -> Started:
        self._there.add(rank)
        self._words.append((rank, Ready()))
        return Started(1000 + rank)

    def kill(self, rank: int) -> None:
        self._words.append((rank, Lost("signal SIGKILL")))

    def order(self, rank: int, order: Go | Over) -> None:
        if isinstance(order, Over):
            return
        first = order.begin if isinstance(order.begin, int) else order.until if order.begin == "as you are" else 0
        words: list[Word] = [Loaded(first)] if isinstance(order.begin, int) else []
        words.append(Formed(order.generation))
        for step in range(first, order.until):
            words += [Begun(step), Done(order.generation, step, (1.0,) * len(self.ranks))]
        words += [Finished(order.generation, {"w": "a"}), Ready()]
        self._words += [(rank, word) for word in words]

    def hear(self, seconds: float) -> Iterator[tuple[int, Word]]:
        if not self._words:
            time.sleep(seconds)
        while self._words:
            rank, word = self._words.popleft()
            if isinstance(word, Lost):
                self._there.discard(rank)
            yield rank, replace(word, when=time.monotonic())

    def end(self) -> None:
        self._there.clear()
        self._words.clear()


class Unseen:
    def tell(self, event: Event) -> None: ...

    def tick(self) -> None: ...


def test_a_kill_that_comes_when_all_have_finished() -> None:
    """On a busy machine the parent may hear of the step only when the run is over. The death counts all the same."""
    crew: Any = Scripted(2)
    kill = Kill(1, 3)
    healed = run(crew, Course(4, kills=(kill,)), Unseen())
    kinds = [type(event.word) for event in healed]
    assert kinds.index(Finished) < kinds.index(Killed) < kinds.index(Lost)
    (healing,) = healings(healed, 2)
    assert {"noticing", "starting", "forming the group"} <= healing.parts.keys()
    restarted = run(crew, Course(4, begin=2, remedy="restart", kills=(kill,)), Unseen())
    kinds = [type(event.word) for event in restarted]
    assert kinds.index(Finished) < kinds.index(Killed) < kinds.index(Lost) < kinds.index(Started)
    found = restart(restarted)
    assert (found.rank, found.step, found.steps) == (1, 3, 2)
    assert all(seconds >= 0 for seconds in found.parts.values())


def test_what_is_said_before_a_death_is_noticed_is_not_part_of_the_restart() -> None:
    events = [
        Event(1, Killed(0, 3, when=10.0)),
        # Of the run that is cut off, heard late.
        Event(0, Ready(when=9.0)),
        Event(0, Loaded(0, when=9.5)),
        Event(0, Done(0, 3, (1.0, 1.0), when=30.0)),
        Event(1, Lost("signal SIGKILL", when=10.25)),
        *(Event(rank, Started(7, when=10.5)) for rank in range(2)),
        *(Event(rank, Ready(when=14.0)) for rank in range(2)),
        *(Event(rank, Loaded(1, when=15.0)) for rank in range(2)),
        *(Event(rank, Formed(1, when=16.0)) for rank in range(2)),
        *(Event(rank, Done(1, step, (1.0, 1.0), when=15.0 + step)) for step in (1, 2, 3) for rank in range(2)),
    ]
    found = restart(events)
    assert list(found.parts.values()) == [0.25, 0.25, 3.5, 1.0, 1.0, 2.0]
    assert found.steps == 3


def test_the_live_view_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen(2, 10, quiet=False)
    screen.console = type(screen.console)(width=40, force_terminal=True, record=True, no_color=True)
    for rank in range(2):
        screen.tell(Event(rank, Started(1234 + rank)))
    screen.tell(Event(0, Done(0, 7, (1.5, 2.5))))
    screen.tell(Event(0, Saved(7, 0.5, 1 << 20)))
    screen.console.print(screen.render())
    lines = screen.console.export_text().splitlines()
    assert max(map(len, lines)) <= 40
    assert any("training" in line and "1.5000" in line for line in lines)
    assert any(line.startswith("loss") and line.endswith("2.0000") for line in lines)


@pytest.mark.usefixtures("interruptible")
def test_interrupts_are_held_and_not_lost() -> None:
    reached = []

    def interrupted() -> None:
        with interrupts_held(), interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
