"""The scheduler that other tests rest on: it runs every order, and finds races that need one."""

from __future__ import annotations

from functools import partial

import pytest

from schedules import Director, Judge, Stuck, explore


def test_every_order_of_two_threads_with_three_sections_each() -> None:
    orders: set[str] = set()

    def scenario(director: Director) -> Judge:
        seen: list[str] = []

        def work(name: str) -> None:
            for _ in range(3):
                with director.condition, director.condition:
                    seen.append(name)

        for name in "ab":
            director.start(partial(work, name))

        def judge(errors: list[BaseException | None]) -> None:
            assert errors == [None, None]
            orders.add("".join(seen))

        return judge

    explore(scenario)
    assert len(orders) == 20, "6! / (3! 3!)"
    bounded = set(orders)
    orders.clear()
    explore(scenario, deviations=1)
    assert orders < bounded
    assert {"aaabbb", "bbbaaa", "abbbaa"} <= orders
    assert "ababab" not in orders


def test_a_value_that_is_read_and_written_in_two_sections_gets_lost_in_some_order() -> None:
    results: set[int] = set()

    def scenario(director: Director) -> Judge:
        value = [0]

        def work() -> None:
            with director.condition:
                mine = value[0]
            with director.condition:
                value[0] = mine + 1

        director.start(work)
        director.start(work)
        return lambda errors: results.add(value[0])

    explore(scenario)
    assert results == {1, 2}


def test_waits_end_by_notice_and_threads_that_only_wait_are_stuck() -> None:
    def scenario(director: Director) -> Judge:
        flag: list[bool] = []

        def wait() -> None:
            with director.condition:
                while not flag:
                    director.condition.wait()

        def notify() -> None:
            with director.condition:
                flag.append(True)
                director.condition.notify_all()

        director.start(wait)
        director.start(notify)

        def judge(errors: list[BaseException | None]) -> None:
            assert errors == [None, None]

        return judge

    assert explore(scenario) > 1

    def stuck(director: Director) -> Judge:
        def wait() -> None:
            with director.condition:
                while True:
                    director.condition.wait(0.1)

        director.start(wait)
        return lambda errors: None

    with pytest.raises(Stuck):
        explore(stuck)
