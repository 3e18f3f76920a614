"""Commits: made when somebody asks, never changed, at most two, given up after a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import safetensors.torch
import torch

from hub_asking import step_in
from transfuse._hub import commits as commits_module
from transfuse._hub.commits import Commit, Commits, Unavailable, Visitor
from transfuse._hub.safetensors_layout import FileLayout
from transfuse._hub.sources import Buffer, CopiedState, Layouts, LiveSource
from transfuse._remote.live_state import LiveState

MAIN = "main"


class Job:
    """A state that trains, and its commits."""

    def __init__(self, hold: float = 60.0) -> None:

        self.step = 0
        self.copies = 0
        #: How long a copy takes at least.
        self.seconds = 0.0
        self.state = {f"w.{i}": torch.zeros(1000) for i in range(4)}
        self._fill()
        self.live = LiveState(lambda: self.state, lambda: self.step, 30.0)
        self._source = LiveSource(self.live, Layouts("", 1 << 30))
        self.commits = Commits(self, hold)

    def mark(self, seconds: float | None) -> object:
        return self._source.mark(seconds)

    def take(self, buffer: Buffer, meanwhile: Callable[[], object]) -> CopiedState:
        self.copies += 1
        time.sleep(self.seconds)
        return self._source.take(buffer, meanwhile)

    def glance(self, meanwhile: Callable[[], object]) -> tuple[FileLayout, int | None]:
        return self._source.glance(meanwhile)

    def free(self, buffers: Sequence[Buffer]) -> None:
        self._source.free(buffers)

    def _fill(self) -> None:
        for i, tensor in enumerate(self.state.values()):
            tensor.fill_(self.step * 100 + i)

    def advance(self) -> None:
        with self.live.changing():
            self.step += 1
            self._fill()

    def forget_mutating(self) -> None:
        self.step += 1
        self._fill()

    @contextmanager
    def get(self, revision: str = MAIN, visitor: Visitor | None = None) -> Iterator[Commit]:
        with self.commits.reading(revision, visitor or Visitor(lambda: None)) as commit:
            assert commit is not None
            yield commit

    def has(self, revision: str) -> bool:
        with self.commits.reading(revision, Visitor(lambda: None)) as commit:
            return commit is not None

    def main(self, visitor: Visitor) -> str:
        with self.get(MAIN, visitor) as commit:
            assert step_of(commit) == commit.step
            return commit.id


def step_of(commit: Commit) -> int:
    data = commit.bytes("model.safetensors")
    assert data is not None
    return step_in(safetensors.torch.load(bytes(data)))


def visitor() -> Visitor:
    return Visitor(lambda: None)


def test_a_copy_is_made_when_somebody_asks_and_the_state_has_moved_on() -> None:
    job = Job()
    job.advance()
    assert job.copies == 0
    me = visitor()
    first = job.main(me)
    made = job.copies
    assert job.main(me) == first
    assert job.main(visitor()) == first
    assert job.copies == made
    job.advance()
    job.advance()
    assert job.copies == made
    second = job.main(me)
    assert second != first
    with job.get(second) as commit:
        assert commit.step == 3
    assert len(first) == 40


def test_one_client_in_turn_sees_every_step_and_one_buffer_serves() -> None:
    job, me = Job(), visitor()
    buffers = set()
    for _ in range(5):
        job.advance()
        with job.get(MAIN, me) as commit:
            assert commit.step == job.step == step_of(commit)
            buffers.add(commit.buffer.address)
    assert len(buffers) == 1


def test_a_commit_does_not_change_while_it_is_read_and_there_are_at_most_two() -> None:
    job = Job()
    with job.get() as old:
        before = bytes(old.bytes("model.safetensors") or b"")
        job.advance()
        with job.get() as newer:
            for _ in range(3):
                job.advance()
                # Both are in use: main is the newer of the two, not a third one.
                with job.get() as again:
                    assert again is newer
            assert step_of(newer) == 1
            assert bytes(old.bytes("model.safetensors") or b"") == before
        assert job.has(old.id)


def test_an_older_commit_goes_when_nobody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits_module, "HUB_COMMIT_SHORT_SECONDS", 0.0)
    job, me, other = Job(), visitor(), visitor()
    first = job.main(me)
    job.advance()
    second = job.main(other)
    assert job.has(first)
    # A reader that asks for main again lets go of what it had.
    job.advance()
    third = job.main(me)
    assert not job.has(first)
    assert job.has(second)
    job.advance()
    # A visitor that has left holds nothing.
    job.commits.leave(other)
    fourth = job.main(visitor())
    assert job.has(third)
    assert not job.has(second)
    assert len({first, second, third, fourth}) == 4


def test_listing_main_in_between_keeps_the_commit() -> None:
    """As transformers does it: a commit, main's files, and then files of the commit that it had."""
    job, me = Job(), visitor()
    first = job.main(me)
    for _ in range(3):
        job.advance()
        with job.commits.reading(MAIN, me, lists=True) as listed:
            assert listed is not None
            assert listed.id == first
    assert job.has(first)
    with job.commits.reading(MAIN, visitor(), lists=True) as fresh:
        assert fresh is not None
        assert fresh.step == 3


def test_a_visitor_that_goes_silent_holds_for_a_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits_module, "HUB_COMMIT_SHORT_SECONDS", 0.0)
    job = Job(hold=0.05)
    silent = [visitor(), visitor()]
    first = job.main(silent[0])
    job.advance()
    job.main(silent[1])
    job.advance()
    until = time.monotonic() + 60
    while job.has(first):
        assert time.monotonic() < until
        job.main(visitor())
        job.advance()


def test_a_reader_that_never_ends_is_cut_off_before_its_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commits_module, "HUB_COMMIT_SHORT_SECONDS", 1.0)
    job = Job(hold=0.01)
    ended = threading.Event()
    stuck = Visitor(ended.set)
    with ExitStack() as stack:
        old = stack.enter_context(job.get(MAIN, stuck))
        before = bytes(old.bytes("model.safetensors") or b"")
        job.advance()
        with job.get() as newer:
            until = time.monotonic() + 60
            while not ended.is_set():
                assert time.monotonic() < until
                job.advance()
                job.main(visitor())
            # It was told, but as long as its thread has not left the block, the bytes stay.
            assert old.revoked
            assert not job.has(old.id)
            assert bytes(old.bytes("model.safetensors") or b"") == before
            assert step_of(newer) == newer.step
            stack.close()
            job.advance()
            job.main(visitor())
            with job.get() as newest:
                assert newest.buffer is old.buffer
                assert step_of(newest) == newest.step


def test_etags_follow_the_bytes() -> None:
    job, me = Job(), visitor()
    with job.get(MAIN, me) as commit:
        first = dict(commit.etags)
    with job.live.changing():  # A step that changes nothing is a commit all the same.
        pass
    with job.get(MAIN, me) as commit:
        assert commit.etags == first
    job.advance()
    with job.get(MAIN, me) as commit:
        assert commit.etags.keys() == first.keys()
        assert commit.etags != first


def test_who_waits_for_a_long_change_gets_the_newest_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits_module, "HUB_COMMIT_WAIT_SECONDS", 0.3)
    job = Job()
    with job.live.changing(), pytest.raises(Unavailable, match="ask again"):
        _elsewhere(lambda: job.main(visitor()))
    first = job.main(visitor())
    job.advance()
    with job.live.changing():
        assert _elsewhere(lambda: job.main(visitor())) == first


def test_a_copy_that_takes_longer_than_clients_wait_is_had_by_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits_module, "HUB_COMMIT_WAIT_SECONDS", 0.1)
    job = Job(hold=0.1)
    job.seconds = 0.3
    seen: list[int] = []
    asked = 0
    while len(seen) < 3:
        asked += 1
        assert asked < 30
        job.advance()
        try:
            with job.get() as commit:
                assert step_of(commit) == commit.step
                seen.append(commit.step or 0)
        except Unavailable:
            # Once there is a commit, it stays until there is a newer one.
            assert not seen
    assert seen == sorted(seen)
    assert len(job.commits._kept) <= 2


def test_main_never_goes_back_to_an_older_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits_module, "HUB_COMMIT_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(commits_module, "HUB_COMMIT_SHORT_SECONDS", 0.0)
    job, me = Job(), visitor()
    with job.get(MAIN) as old:
        job.advance()
        assert job.main(me) != old.id
        superseded_at = old.superseded_at
        job.advance()
        job.commits.leave(me)
        with job.live.changing(), pytest.raises(Unavailable, match="ask again"):
            # The newest commit has made room, and the copy waits for training: only the old one is there.
            _elsewhere(lambda: job.main(visitor()))
        monkeypatch.setattr(commits_module, "HUB_COMMIT_WAIT_SECONDS", 60.0)
        with job.get(MAIN) as newest:
            assert newest.step == job.step == step_of(newest)
        # How long the old one may still be read counts from the first newer one.
        assert old.superseded_at == superseded_at


def test_a_copy_for_which_there_is_no_thread_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Unavailable, match="can't start new thread"):
        job.main(visitor())
    monkeypatch.setattr(threading.Thread, "start", start)
    job.main(visitor())


def test_a_state_that_can_no_longer_be_copied_is_an_error_and_then_may_be_again() -> None:

    job, me = Job(), visitor()
    job.main(me)
    with job.live.changing():
        job.state["w.0"] = torch.zeros(2, dtype=torch.complex128)
    with pytest.raises(Unavailable, match=r"w\.0.*complex128"):
        job.main(me)
    with job.live.changing():
        job.state["w.0"] = torch.zeros(5000)
        job.step = 0
        for i, tensor in enumerate(job.state.values()):
            tensor.fill_(i)
    job.main(me)


def test_memory_is_freed_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    job, me = Job(hold=0.01), visitor()
    first = job.main(me)
    job.commits.tidy()
    assert job.has(first)
    monkeypatch.setattr(commits_module, "HUB_COMMIT_FREE_SECONDS", 0.0)
    monkeypatch.setattr(commits_module, "HUB_COMMIT_SHORT_SECONDS", 0.0)
    job.commits.leave(me)
    until = time.monotonic() + 60
    while job.commits._kept:
        assert time.monotonic() < until
        job.commits.tidy()
    assert job.main(me) != first


def test_closing_ends_the_wait() -> None:
    job = Job()
    with job.live.changing():
        result: list[BaseException] = []

        def wait() -> None:
            try:
                job.main(visitor())
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not job.live.rwlock._waiting:
            time.sleep(0.01)
        job.commits.close()
        thread.join(60)
    assert isinstance(result[0], Unavailable)


def _elsewhere(work: Callable[[], str]) -> str:
    """Run in another thread: the owner of a change may not read."""
    result: list[str] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    if errors:
        raise errors[0]
    return result[0]


def test_a_state_that_changes_without_mutating_is_a_commit_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    for turn in range(2):
        with job.get() as commit:
            assert (commit.step, commit.is_loose, step_of(commit)) == (0, turn > 0, job.step)
        with job.get() as again:
            assert again.id == commit.id
        job.forget_mutating()
    (warning,) = caplog.messages
    assert "the hub's state has changed outside of mutating() (['w.0'], ['w.1'], ['w.2'], …): " in warning
