"""Numbers in the text format of Prometheus: read by its own parser, and by ours; and addresses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from scraping import Scrape
from transfuse._metrics import names
from transfuse._metrics.address import MetricsAddress, address_in, address_in_environment
from transfuse._metrics.names import Family
from transfuse._metrics.samples import Samples
from transfuse._wire.route_table import ROUTES

EVERY = (*names.KEEPER, *names.WORKERS_OWN)
ODD = 'a "run"\\ of\nmine, {x="1"} \udc80é'


def test_everything_is_read_as_it_was_counted() -> None:
    samples = Samples(EVERY)
    samples.add(names.SKIPPED, cause="no_room")
    samples.add(names.SKIPPED, 2, cause="no_room")
    samples.set(names.HELD, 1 << 60)
    samples.set(names.SLOT_SIZE, 7, rank=3, slot=0, kind="own")
    samples.set(names.INFO, 1, run=ODD, version="1", protocol="", python="", torch="")
    for seconds in (0.0005, 0.02, 1e9):
        samples.observe(names.STALLED, seconds)
        samples.observe(names.RESTORE_TIMES, seconds, outcome="restored")
    found = Scrape(samples.text())
    assert found("keeper_commits_skipped_total", cause="no_room") == 3
    assert found("keeper_bytes") == 1 << 60
    assert found("keeper_slot_bytes", rank="3", slot="0", kind="own") == 7
    assert found("keeper_info", run=ODD.encode("utf-8", "backslashreplace").decode()) == 1
    buckets = [
        found("keeper_commit_stalled_seconds_bucket", le=end) for end in ("0.001", "0.01", "0.03", "100", "+Inf")
    ]
    assert buckets == [1, 1, 2, 2, 3]
    assert found("keeper_restore_seconds_count", outcome="restored") == 3
    assert found("keeper_restore_seconds_sum") == pytest.approx(1e9 + 0.0205)
    assert found.families["transfuse_keeper_commit_stalled_seconds"].type == "histogram"
    again = Samples.read(EVERY, samples.text())
    assert again.text() == samples.text()
    again.take(samples)
    assert Scrape(again.text())("keeper_commits_skipped_total") == 6


def test_what_is_moved_is_counted_no_more() -> None:
    samples = Samples(EVERY)
    assert not samples
    samples.add(names.COMMITS, outcome="committed")
    moved = samples.move()
    assert moved
    assert not samples
    assert Scrape(moved.text())("keeper_commits_total") == 1


@pytest.mark.parametrize(
    ("family", "labels"),
    [
        (names.SKIPPED, {"cause": "the disk of host 7 is full"}),
        (names.SKIPPED, {}),
        (names.COPIED, {"rank": "0"}),
        (Family("transfuse_other_total", "counter", "Not in the table."), {}),
    ],
)
def test_what_is_not_in_the_table_is_refused(family: Family, labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=family.name):
        Samples(EVERY).add(family, **labels)


@pytest.mark.parametrize("text", ["transfuse_nothing 1\n", "transfuse_keeper_bytes x\n", "{}", "\x00", "a{"])
def test_what_somebody_else_wrote_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"none of ours|float"):
        Samples.read(EVERY, text)


def test_the_names_are_as_prometheus_wants_them() -> None:
    assert len({family.name for family in EVERY}) == len(EVERY)
    for family in EVERY:
        assert re.fullmatch(r"transfuse_[a-z_]+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.help.endswith("."), family.name
        # Only what names a part of the job may have any value.
        free = {label for label, values in family.labels.items() if values is None}
        assert free <= {"rank", "slot"} or family is names.INFO, family.name


def test_routes_are_those_that_there_are() -> None:
    said = {name for route in names.ROUTES for name in route.split("+")}
    assert said == {*(route.name for route in ROUTES), "group", "none"}


# ----------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9400", MetricsAddress("127.0.0.1", 9400, 9400)),
        (":9400", MetricsAddress("", 9400, 9400)),
        (":0", MetricsAddress("", 0, 0)),
        ("9400-9499", MetricsAddress("", 9400, 9499)),
        ("localhost:9400-9499", MetricsAddress("localhost", 9400, 9499)),
        ("[::1]:9400", MetricsAddress("::1", 9400, 9400)),
        ("/run/keeper.metrics", MetricsAddress(path="/run/keeper.metrics")),
        ("unix:/run/keeper.metrics", MetricsAddress(path="/run/keeper.metrics")),
    ],
)
def test_addresses(text: str, expected: MetricsAddress) -> None:
    assert address_in(text, "it") == expected
    assert address_in(str(expected), "it") == expected
    assert address_in_environment({"TRANSFUSE_KEEPER_METRICS": text}) == expected


@pytest.mark.parametrize(
    "text", ["", "host", "::1:9400", "host:", "host:70000", ":9499-9400", ":0-5", "unix:run", ":x"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"--metrics must be host:port, .*got"):
        address_in(text, "--metrics")


def test_without_a_variable_there_is_no_address() -> None:
    empty: list[dict[str, Any]] = [{}, {"TRANSFUSE_KEEPER_METRICS": ""}]
    assert [address_in_environment(environ) for environ in empty] == [None, None]
