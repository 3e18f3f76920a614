"""What all ranks tell each other, and the one error of all: among ranks that live, that leave, and that disagree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from transfuse._errors import PeerLost, TransfuseError
from transfuse._wire import roll_call
from transfuse._wire.roll_call import Agreement
from transfuse.testing.ranks import Outcome, ProcessPool, Ranks

SECONDS = 20.0


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("transfuse-roll-call"):
            thread.join(SECONDS)  # One that was left behind ends when its rank goes on.
            assert not thread.is_alive(), thread.name


def all_ranks(n: int, work: Callable[[Agreement], Any], ranks: Ranks | None = None) -> list[Outcome[Any]]:
    def one(rank: int, pg: Any) -> Any:
        return work(Agreement(pg, SECONDS))

    if ranks is not None:
        return ranks.outcomes(one)
    with Ranks(n) as made:
        return made.outcomes(one)


def word(rank: int, nbytes: int) -> bytes:
    return bytes([rank]) * (nbytes * (rank + 1))


@pytest.mark.parametrize("nbytes", [0, 1, 3000, 1 << 20], ids=["nothing", "a byte", "blocks", "chunks"])
def test_all_hear_all_in_the_order_of_ranks(nbytes: int) -> None:
    outcomes = all_ranks(3, lambda mine: mine.gather(word(mine.rank, nbytes), "trying"))
    assert [outcome.get() for outcome in outcomes] == [[word(rank, nbytes) for rank in range(3)]] * 3


def test_a_call_gathers_as_often_as_it_likes_and_another_one_follows() -> None:
    def call(mine: Agreement) -> list[list[bytes]]:
        return [mine.gather(b"%d of %d" % (number, mine.rank), "trying") for number in range(4)]

    with Ranks(3) as ranks:
        for _ in range(3):
            for outcome in all_ranks(3, lambda mine: mine.together("trying", lambda: call(mine)), ranks):
                assert outcome.get() == [[b"%d of %d" % (n, rank) for rank in range(3)] for n in range(4)]


def test_an_error_of_all_ranks_is_the_error_of_each_and_the_group_stays_usable() -> None:
    def work(mine: Agreement) -> Any:
        def call() -> None:
            mine.gather(b"", "trying")
            raise ValueError(f"as agreed, on rank {mine.rank}")

        with pytest.raises(ValueError, match=f"as agreed, on rank {mine.rank}"):
            mine.together("trying", call)
        return mine.gather(bytes([mine.rank]), "trying again")

    assert [outcome.get() for outcome in all_ranks(3, work)] == [[b"\0", b"\1", b"\2"]] * 3


class Interrupted(BaseException):
    """As if by Ctrl-C."""


@pytest.mark.parametrize("cause", [OSError("no room"), Interrupted("here")], ids=["error", "interrupt"])
def test_a_rank_that_leaves_is_lost_to_the_others_who_hear_why(cause: BaseException) -> None:
    def work(mine: Agreement) -> Any:
        def call() -> Any:
            mine.gather(b"", "trying")
            if mine.rank == 1:
                raise cause
            return mine.gather(b"", "waiting")

        return mine.together("trying", call)

    outcomes = all_ranks(3, work)
    assert outcomes[1].error is cause
    assert str(outcomes[0].error) == str(outcomes[2].error)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, PeerLost)
        assert error.rank == 1
        assert str(error) == (
            f"waiting failed, on all ranks:\n  rank 1 is lost: {type(cause).__name__}: {cause.args[0]}"
        )


def test_ranks_that_make_different_calls_are_told_so() -> None:
    def work(mine: Agreement) -> Any:
        return mine.together("restoring" if mine.rank else "looking", lambda: mine.gather(b"", "trying"))

    for rank, outcome in enumerate(all_ranks(2, work)):
        there, here = ("looking", "restoring") if rank else ("restoring", "looking")
        assert f"rank {1 - rank} is {there}, and rank {rank} is {here}" in str(outcome.error)


def gather_collectively(rank: int) -> tuple[list[bytes], str]:
    tagged, roll_call._tagged = roll_call._tagged, lambda pg: None
    try:
        mine = Agreement(dist.new_group(backend="gloo"), SECONDS)
        assert (mine.rank, mine.size) == (rank, dist.get_world_size())
        told = mine.together("trying", lambda: mine.gather(word(rank, 3000), "trying"))
        mine.seconds = 0.5
        if rank == 0:
            with pytest.raises(TransfuseError, match=r"could not agree within 0\.5 s, or one was lost: do all") as late:
                mine.gather(b"", "waiting")
            return told, str(late.value)
        return told, ""
    finally:
        roll_call._tagged = tagged


def test_a_group_without_tags_gathers_by_a_collective(pool4: ProcessPool) -> None:
    outcomes = [outcome.get() for outcome in pool4.run(gather_collectively)]
    assert [told for told, _ in outcomes] == [[word(rank, 3000) for rank in range(4)]] * 4
    assert outcomes[0][1].startswith("waiting: ")


def test_one_that_works_is_waited_for_and_one_whose_own_code_hangs_is_not() -> None:
    """The others wait three times their timeout for a rank that says that it lives."""
    over = threading.Event()

    def work(mine: Agreement) -> Any:
        mine.seconds = 0.5

        def call() -> Any:
            if mine.rank == 1:
                over.wait(1.5)
            told = mine.gather(b"done", "working")
            if mine.rank == 1:
                with mine.quiet():
                    assert over.wait(SECONDS)
            try:
                return told, mine.gather(b"", "waiting")
            except PeerLost as error:
                over.set()
                return told, str(error)

        return mine.together("trying", call)

    outcomes = [outcome.get() for outcome in all_ranks(2, work)]
    assert outcomes[0][0] == outcomes[1][0] == [b"done"] * 2
    assert "rank 1 is lost: rank 1 timed out: no progress for 0.5 s while trying" in outcomes[0][1]
    assert outcomes[0][1] == outcomes[1][1], "who was only slow hears of it"
