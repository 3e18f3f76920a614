"""The order in which a receive asks for its turns, on groups without tags."""

from __future__ import annotations

import threading
import time

from transfuse._wire.turns import SourceOrder


def order(line: SourceOrder, sources: list[int], stays: frozenset[int] = frozenset()) -> list[int]:
    """In which order the sources get through, all asking at once; those in ``stays`` never leave the line."""
    came: list[int] = []

    def one(source: int) -> None:
        line.wait(source)
        came.append(source)
        if source not in stays:
            line.leave(source)

    threads = [threading.Thread(target=one, args=(source,)) for source in reversed(sources)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return came


def test_the_lowest_source_first() -> None:
    for _ in range(20):
        assert order(SourceOrder([5, 1, 3], 60), [5, 1, 3]) == [1, 3, 5]


def test_a_source_that_does_not_answer_holds_the_others_up_only_for_a_while() -> None:
    began = time.monotonic()
    assert sorted(order(SourceOrder([0, 1, 2], 0.3), [0, 1, 2], frozenset([0]))) == [0, 1, 2]
    assert time.monotonic() - began >= 0.3
