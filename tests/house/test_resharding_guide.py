"""What docs/resharding.md says is so: its rules, errors and refusals are real."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import transfuse
from transfuse._plan.apply_rules import link
from transfuse._rules import Rule
from transfuse.testing.ranks import Ranks

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "resharding.md").read_text()

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=20)
WHOLE = torch.arange(35.0).reshape(7, 5)


# ------------------------------------------------------------------------------------------------- rules


def test_rules_do_what_the_table_says() -> None:
    rows = re.findall(r"^\| `(.+?)` \| (`.+?) \| (`.+?) \|$", GUIDE, re.M)
    assert len(rows) >= 8
    for text, *sides in rows:
        rule = eval(text, {name: getattr(transfuse, name) for name in ("Concat", "Rename", "Slice", "Split")})
        source, target = (
            {name: eval(shape) for name, shape in re.findall(r"`(\S+?)` (\(.*?\))", side)} for side in sides
        )
        assert source, text
        assert target, text
        rules = [rule] if isinstance(rule, Rule) else rule
        linked = link(rules, list(source), list(source.values()), list(target), list(target.values()))
        assert linked.problems == [], text
        assert linked.untouched == [], text


# ------------------------------------------------------------------------------------ what is said to be


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


def over_two(rank: int, placement: Any, local: torch.Tensor) -> DTensor:
    """A part of WHOLE on a mesh of ranks 0 and 1."""
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=rank)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride())


def rows(rank: int) -> DTensor:
    return over_two(rank, Shard(0), WHOLE[:4] if rank == 0 else WHOLE[4:])


def receive(
    ranks: Ranks,
    sources: Sequence[object],
    target: object,
    asked: Sequence[int] = (0, 1),
    steps: Sequence[int | None] = (None, None),
    **options: Any,
) -> transfuse.Report:
    """Receive on rank 2 from those of ranks 0 and 1 that are asked."""

    def work(rank: int, pg: Any) -> Any:
        if rank < 2:
            if rank in asked:
                transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint([2], sources[rank], step=steps[rank])
            return None
        taker = transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target, **options)
        taker.recv_checkpoint(asked)
        return taker.report

    outcome = ranks.outcomes(work)[2]
    report = outcome.get()
    assert isinstance(report, transfuse.Report)
    return report


def said(error: pytest.ExceptionInfo[BaseException]) -> None:
    """The guide has the row, and every quoted sentence of it is in the message."""
    name = type(error.value).__name__
    quotes = re.findall(rf"^\| `{name}`: “(.+?)”", GUIDE, re.M)
    assert quotes, name
    words = [[part.strip() for part in quote.split("…")] for quote in quotes]
    assert any(all(part in str(error.value) for part in parts) for parts in words), str(error.value)


def test_shards_become_whole_and_whole_becomes_shards(ranks: Ranks) -> None:
    target = torch.zeros(7, 5)
    report = receive(ranks, [{"w": rows(0)}, {"w": rows(1)}], {"w": target})
    assert torch.equal(target, WHOLE)
    assert report.by_source == {0: 80, 1: 60}


def test_only_what_is_needed_moves(ranks: Ranks) -> None:
    """A rank that wants the last three rows gets these, from who has them."""
    target = torch.zeros(3, 5)
    shard = over_two(1, Shard(0), target)
    report = receive(ranks, [{"w": WHOLE}, {"w": WHOLE}], {"w": shard})
    assert torch.equal(target, WHOLE[4:])
    assert report.bytes == 60


def test_fresh_dtensors_without_a_mesh_are_whole(ranks: Ranks) -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank < 2:
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint([2], {"w": rows(rank)})
        return transfuse.PGTransport(pg, TIMEOUT, CPU).recv_checkpoint([0, 1])

    fresh = ranks.run(work)[2]["w"]
    assert fresh.placements == (Shard(0),)
    assert torch.equal(fresh.to_local(), WHOLE)


def test_casts(ranks: Ranks) -> None:
    target = torch.zeros(7, 5, dtype=torch.bfloat16)
    report = receive(ranks, [{"w": rows(0)}, {"w": rows(1)}], {"w": target}, cast=True)
    assert torch.equal(target, WHOLE.to(torch.bfloat16))
    assert report.bytes == 70
    with pytest.raises(transfuse.TargetMismatch, match="cast=True converts") as error:
        receive(ranks, [{"w": rows(0)}, {"w": rows(1)}], {"w": target})
    said(error)
    with pytest.raises(transfuse.TargetMismatch, match="only floating types are converted"):
        receive(ranks, [{"w": WHOLE}] * 2, {"w": torch.zeros(7, 5, dtype=torch.int32)}, cast=True)


def test_delta_keeps_what_the_source_converts_and_not_what_the_receiver_does(ranks: Ranks) -> None:
    narrow, wide = WHOLE.to(torch.bfloat16), WHOLE.to(torch.float64)
    report = receive(ranks, [{"w": WHOLE}] * 2, {"w": narrow}, cast=True, delta=True)
    assert (report.bytes, report.kept_bytes) == (0, 70)
    report = receive(ranks, [{"w": WHOLE}] * 2, {"w": wide}, cast=True, delta=True)
    assert (report.bytes, report.kept_bytes) == (140, 0)


def test_not_covered(ranks: Ranks) -> None:
    target = torch.zeros(7, 5)
    with pytest.raises(transfuse.NotCovered) as error:
        receive(ranks, [{"w": rows(0)}, {"w": rows(1)}], {"w": target}, asked=[0])
    said(error)
    assert not target.any()


def test_sources_differ(ranks: Ranks) -> None:
    with pytest.raises(transfuse.SourcesDiffer) as error:
        receive(ranks, [{"w": rows(0)}, {"w": rows(1)}], {"w": torch.zeros(7, 5)}, steps=[7, 8])
    said(error)


def test_another_shape(ranks: Ranks) -> None:
    with pytest.raises(transfuse.TargetMismatch, match="global shape") as error:
        receive(ranks, [{"w": rows(0)}, {"w": rows(1)}], {"w": torch.zeros(7, 6)})
    said(error)


def test_partial(ranks: Ranks) -> None:
    sources = [{"w": over_two(rank, Partial(), WHOLE.clone())} for rank in range(2)]
    with pytest.raises(transfuse.TargetMismatch, match="redistribute") as error:
        receive(ranks, sources, {"w": torch.zeros(7, 5)})
    said(error)
    with pytest.raises(transfuse.TargetMismatch, match="redistribute") as error:
        receive(ranks, sources, {"w": over_two(0, Replicate(), torch.zeros(7, 5))})
    said(error)


def test_a_rule_that_matches_nothing(ranks: Ranks) -> None:
    with pytest.raises(transfuse.TargetMismatch, match="matches no leaf") as error:
        receive(ranks, [{"w": WHOLE}] * 2, {"w": torch.zeros(7, 5)}, map_path={"v": "w"})
    said(error)


def test_with_rules_what_only_the_sources_have_stays_there(ranks: Ranks) -> None:
    target = {"w": torch.zeros(7, 5)}
    state = {"v": WHOLE, "extra": torch.ones(3)}
    receive(ranks, [state] * 2, target, map_path={"v": "w"})
    assert torch.equal(target["w"], WHOLE)
    with pytest.raises(transfuse.TargetMismatch, match="missing in the target"):
        receive(ranks, [state] * 2, target, map_path={"v": "w"}, strict=True)


def test_stages_of_a_pipeline(ranks: Ranks) -> None:
    target = {"first": torch.zeros(7, 5), "second": torch.zeros(7, 5)}
    report = receive(ranks, [{"first": WHOLE}, {"second": WHOLE + 1}], target)
    assert torch.equal(target["first"], WHOLE)
    assert torch.equal(target["second"], WHOLE + 1)
    assert report.by_source == {0: 140, 1: 140}
