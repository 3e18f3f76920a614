"""From offers to a decision, in every order: no plan depends on which thread is quicker."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

import transfuse
from moves import CPU
from schedules import Director, Judge, explore
from transfuse._errors import NotCovered, PeerLost, ReceiveFailed, StepMismatch
from transfuse._limits import Limits
from transfuse._options import Options
from transfuse._progress import Progress
from transfuse._report import Report
from transfuse._session import negotiation, planning
from transfuse._session.context import Context, ReceiveRequest
from transfuse._session.negotiation import Decide, Decided, Describe, Negotiation, WaitForChange
from transfuse._session.offers import OfferWithManifest
from transfuse._session.receive_from_all import Receive
from transfuse._session.threads import Caller
from transfuse._sizes import Sizes
from transfuse._state.manifest import describe
from transfuse._wire.channel import Channel
from transfuse._wire.group import Group
from transfuse._wire.messages import Offer
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Ranks

LIMITS = Limits()


def offer_of(state: object, step: int | None = None) -> Offer:
    """What a source offers, as the transport writes it."""
    manifest = describe(state, LIMITS).manifest
    wire = manifest.encode()
    sizes = Sizes(LIMITS, 10.0).offered(1)
    return Offer(
        step,
        sizes.parcel_bytes,
        sizes.burst_bytes,
        sizes.staged_bytes,
        sizes.bursts_ahead,
        10.0,
        True,
        {},
        None,
        wire,
        wire.digest(),
        manifest.likeness(wire),
        list(manifest.coordinates),
        structure=wire.structure(),
    )


def stage(number: int) -> dict[str, torch.Tensor]:
    """What one stage of a pipeline holds: no two have a leaf in common."""
    return {f"layer{number}.{name}": torch.full((3 + number,), float(number)) for name in ("weight", "bias")}


# ------------------------------------------------------------------------------- the state machine alone, in all orders


class Model:
    """A negotiation, where each conversation with it stands, and what was decided. Cheap to copy."""

    def __init__(self, offers: dict[int, Offer]) -> None:
        self.sources = offers
        self.negotiation = Negotiation(offers, patience=1.0)
        self.at: dict[int, str] = dict.fromkeys(offers, "new")
        self.over_at = 0.0  # What the clock says.
        self.turns: dict[int, Decide] = {}
        self.decided: frozenset[int] | None = None
        self.failed = False

    def copy(self) -> Model:
        other = copy.copy(self)
        other.at, other.turns = dict(self.at), dict(self.turns)
        other.negotiation = copy.copy(self.negotiation)
        for name, value in vars(self.negotiation).items():
            if isinstance(value, (dict, set)):
                setattr(other.negotiation, name, value.copy())
        return other

    def key(self) -> object:
        """Equal for two models that will behave alike."""
        state = {
            name: tuple(sorted(value, key=repr)) if isinstance(value, (dict, set)) else value
            for name, value in vars(self.negotiation).items()
            if name not in ("_deciding",)
        }
        asked = tuple(sorted(vars(self.negotiation)["_asked"].items()))
        deciding = tuple(sorted((rank, tuple(sorted(turn.offers))) for rank, turn in self.turns.items()))
        at = tuple(sorted(self.at.items()))
        return repr((state, asked, deciding, at, self.over_at, self.decided, self.failed))

    # -- steps

    def steps(self, lossy: Sequence[int], hurried: bool) -> Iterator[Callable[[Model], None]]:
        """All that can happen next."""
        for rank, at in self.at.items():
            if at in ("new", "turn", "described", "decided"):
                yield partial(Model.step, rank=rank)
            if rank in lossy and at in ("new", "turn", "described"):
                yield partial(Model.lose, rank=rank)
        if hurried and self.over_at == 0.0 and any(at != "new" for at in self.at.values()):
            yield Model.expire

    def step(self, rank: int) -> None:
        """One critical section of one conversation."""
        at, negotiation = self.at[rank], self.negotiation
        if at == "new":
            negotiation.hand_in(rank, self.sources[rank], 0.0)
            self.at[rank] = "turn"
        elif at == "described":
            offer = self.sources[rank]
            negotiation.hand_in_description(rank, OfferWithManifest(offer, None))  # type: ignore[arg-type]
            self.at[rank] = "turn"
        elif at == "decided":
            self.decide(rank)
            self.at[rank] = "turn"
        else:
            self.take_turn(rank)

    def take_turn(self, rank: int) -> None:
        if self.failed:
            self.at[rank] = "done"
            return
        turn = self.negotiation.next_turn(rank, self.over_at)
        if isinstance(turn, Describe):
            self.at[rank] = "described"
        elif isinstance(turn, Decide):
            here = {rank for rank, at in self.at.items() if at not in ("new", "lost")}
            assert turn.offers.keys() == here, "a decision is about all who are here"
            assert {offer.likeness for offer in turn.offers.values()} <= turn.described.keys(), "and all are described"
            assert not self.turns, "and only one is taken at a time"
            self.turns[rank] = turn
            self.at[rank] = "decided"
        elif isinstance(turn, Decided):
            assert self.decided is not None
            assert turn.late == (rank not in self.decided)
            self.at[rank] = "done"
        else:
            assert isinstance(turn, WaitForChange)

    def decide(self, rank: int) -> None:
        """All are needed: as with stages of a pipeline."""
        turn = self.turns.pop(rank)
        if turn.offers.keys() == self.sources.keys():
            self.decided = frozenset(turn.offers)
            self.negotiation.decide(dropped={}, stands=True)
        elif self.negotiation.may_still_change():
            self.negotiation.postpone()
        else:
            self.failed = True

    def lose(self, rank: int) -> None:
        self.negotiation.lose(rank, PeerLost(rank, "gone"))
        self.at[rank] = "lost"

    def expire(self) -> None:
        self.over_at = math.inf


@pytest.mark.parametrize("hurried", [False, True], ids=["all in time", "patience may be over"])
@pytest.mark.parametrize("likenesses", [[0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize("lossy", [[], [0], [1, 3]], ids=lambda ranks: f"may be lost: {ranks}")
def test_no_order_of_steps_decides_without_an_offer_that_is_here(
    likenesses: list[int], lossy: list[int], hurried: bool
) -> None:
    start = Model({rank: offer_of(stage(number)) for rank, number in enumerate(likenesses)})
    open_models, seen, ends = [start], {start.key()}, 0
    while open_models:
        model = open_models.pop()
        moved = False
        for step in model.steps(lossy, hurried):
            then = model.copy()
            step(then)
            key = then.key()
            moved = moved or key != model.key()
            if key not in seen:
                seen.add(key)
                open_models.append(then)
        if not moved:
            ends += 1
            assert set(model.at.values()) <= {"done", "lost"}, f"nobody goes on: {model.at}"
            nobody_lost = "lost" not in model.at.values()
            assert (model.decided == model.sources.keys()) or not nobody_lost
    assert ends
    assert len(seen) > 50, "orders were tried"


# ------------------------------------------------------------------ the receive's own threads, by a scheduler's order


class Silent:
    """A group that carries nothing: no byte moves before it has been decided."""

    def name(self) -> str:
        return "gloo"

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        raise AssertionError("nothing is sent")

    recv = send


class Scheduled:
    """A receive whose condition is a scheduler's, and one thread for each of its sources."""

    def __init__(
        self, director: Director, states: Sequence[object], target: object, timeout: float = 60.0, **request: Any
    ) -> None:
        ranks = tuple(range(len(states)))
        self.director = director
        context = Context(
            ranks=ranks,
            limits=LIMITS,
            device=CPU,
            timeout=timeout,
            caller=Caller(),
            report=Report("receive", ranks),
            progress={rank: Progress() for rank in ranks},
        )
        self.receive = Receive(ReceiveRequest(target=target, **request), context)
        group = Group(Silent(), CPU)
        self.channels = [Channel(group, rank, 60.0, LIMITS) for rank in ranks]
        self.receive.negotiator.prepare(self.channels[0])
        for channel in self.channels:
            self.receive.roster.join(channel)
        self.receive.roster.changed = director.condition  # type: ignore[assignment]

    def converse(self, rank: int, offer: Offer, fails: BaseException | None = None) -> None:
        """What receiver.receive does up to the decision, without a word over the wire."""
        channel = self.channels[rank]
        try:
            self.receive.roster.may_abandon(channel, None)
            vars(channel)["fails"] = fails
            self.receive.negotiator.agree(channel, offer)
        except BaseException as error:
            if self.receive.roster.why_abandoned(rank) is None:
                self.receive.lost(rank, error)
            raise


@pytest.fixture(autouse=True)
def descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source describes its state without a word over the wire, or fails."""

    def describe(channel: Channel, offer: Offer) -> Offer:
        fails: BaseException | None = vars(channel).get("fails")
        if fails is not None:
            raise fails
        return offer

    monkeypatch.setattr(negotiation, "describe", describe)


def all_stages(count: int) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    states = [stage(number) for number in range(count)]
    return states, {name: torch.zeros_like(leaf) for state in states for name, leaf in state.items()}


@pytest.mark.parametrize("rules", [None, {"layer*.*": "layer*.*"}], ids=["names", "rules"])
@pytest.mark.parametrize("timeout", [60.0, 1e-6], ids=["in time", "late"])
@pytest.mark.parametrize(("count", "deviations"), [(2, 2), (3, 1), pytest.param(4, 2, marks=pytest.mark.soak)], ids=str)
def test_every_stage_that_is_here_is_in_the_plan_in_any_order(
    count: int, deviations: int, timeout: float, rules: dict[str, str] | None
) -> None:
    """Also where the time for the others is over before they come: they may come while it is being decided."""
    states, target = all_stages(count)
    offers = [offer_of(state) for state in states]

    def scenario(director: Director) -> Judge:
        scheduled = Scheduled(director, states, target, timeout, options=Options(map_path=rules))
        for rank, offer in enumerate(offers):
            director.start(partial(scheduled.converse, rank, offer))

        def judge(errors: list[BaseException | None]) -> None:
            assert errors == [None] * count
            receive = scheduled.receive
            assert receive.roster.present == set(range(count))
            for rank in range(count):
                assert receive.share(rank).held.any(), f"nothing is wanted from rank {rank}"

        return judge

    runs = explore(scenario, deviations=deviations)
    assert runs > 30


@pytest.mark.parametrize("states", ["replicas and a stage", "stages"])
def test_a_source_that_is_lost_at_any_moment_ends_the_receive_or_is_replaced(states: str) -> None:
    numbers = [0, 0, 1] if states == "replicas and a stage" else [0, 1]
    lost = 0
    sources = [stage(number) for number in numbers]
    offers = [offer_of(state) for state in sources]
    target = {name: torch.zeros_like(leaf) for state in sources for name, leaf in state.items()}

    def scenario(director: Director) -> Judge:
        scheduled = Scheduled(director, sources, target)
        for rank, offer in enumerate(offers):
            fails = PeerLost(rank, f"rank {rank} is gone") if rank == lost else None
            director.start(partial(scheduled.converse, rank, offer, fails))

        def judge(errors: list[BaseException | None]) -> None:
            receive = scheduled.receive
            if states == "stages":
                assert isinstance(errors[0], PeerLost)
                assert isinstance(errors[1], NotCovered)
                assert "['layer0.weight']: source 0 may hold it, but is lost" in str(errors[1])
                return
            # Either the lost one was never asked to describe itself and is here, or its replica takes its part.
            assert errors[1:] == [None, None]
            assert receive.roster.failure is None
            assert lost in receive.roster.present or isinstance(errors[0], PeerLost)

        return judge

    assert explore(scenario, deviations=1) > 3


def test_a_source_that_is_left_just_as_its_offer_comes_is_not_counted_on() -> None:
    states, _ = all_stages(1)
    sources = [states[0], states[0]]
    offers = [offer_of(state) for state in sources]

    def scenario(director: Director) -> Judge:
        scheduled = Scheduled(director, sources, {name: torch.zeros_like(leaf) for name, leaf in states[0].items()})
        receive = scheduled.receive

        scheduled.channels[0].waiting_since = scheduled.channels[
            0
        ].heard_at = -1e9  # Silent for longer than any timeout.
        director.start(partial(scheduled.converse, 0, offers[0]))
        director.start(partial(scheduled.converse, 1, offers[1]))
        director.start(receive.watch)
        director.start(receive.watch)

        def judge(errors: list[BaseException | None]) -> None:
            assert errors[1] is None
            assert errors[2] is None
            assert (receive.roster.why_abandoned(0) is None) == (0 in receive.roster.present)
            assert (errors[0] is None) == (receive.roster.why_abandoned(0) is None)

        return judge

    explore(scenario, deviations=1)


def test_a_source_that_is_lost_while_it_is_planned_what_it_brings_ends_the_receive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else holds its stage: the others would wait for it without end."""
    states, target = all_stages(2)
    offers = [offer_of(state) for state in states]
    accept = planning.accept

    def scenario(director: Director) -> Judge:
        scheduled = Scheduled(director, states, target)

        def lose_one(*args: Any) -> Any:
            accepted = accept(*args)
            scheduled.receive.lost(0, PeerLost(0, "rank 0 is gone"))
            return accepted

        monkeypatch.setattr(negotiation, "accept", lose_one)
        for rank, offer in enumerate(offers):
            director.start(partial(scheduled.converse, rank, offer))

        def judge(errors: list[BaseException | None]) -> None:
            failure = scheduled.receive.roster.failure
            assert isinstance(failure, ReceiveFailed)
            assert "rank 0 is gone" in str(failure)
            assert errors[1] is failure

        return judge

    explore(scenario, deviations=1)


def test_sources_of_another_step_are_dropped_in_every_order() -> None:
    state, steps = stage(0), [5, 5, 4]
    offers = [offer_of(state, step) for step in steps]

    def scenario(director: Director) -> Judge:
        target = {name: torch.zeros_like(leaf) for name, leaf in state.items()}
        scheduled = Scheduled(director, [state] * 3, target, step=5)
        for rank, offer in enumerate(offers):
            director.start(partial(scheduled.converse, rank, offer))

        def judge(errors: list[BaseException | None]) -> None:
            assert errors[:2] == [None, None]
            assert isinstance(errors[2], StepMismatch)
            assert scheduled.receive.roster.present == {0, 1}

        return judge

    explore(scenario, deviations=1)


# ----------------------------------------------------------------------------------- whole receives, threads in a hurry


@pytest.fixture
def hurry() -> Iterator[None]:
    """Threads change turns every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("rounds", [60, pytest.param(600, marks=pytest.mark.soak)])
def test_every_stage_arrives_when_threads_change_turns_every_microsecond(hurry: None, rounds: int) -> None:
    count = 4
    states, _ = all_stages(count)
    whole = {name: leaf for state in states for name, leaf in state.items()}

    def work(rank: int, pg: Any) -> None:
        for step in range(rounds):
            if rank < count:
                transport = transfuse.PGTransport(pg, timedelta(seconds=30), CPU)
                transport.send_checkpoint([count], states[rank], step=step)
            else:
                target = {name: torch.full_like(leaf, -1.0) for name, leaf in whole.items()}
                transport = transfuse.PGTransport(pg, timedelta(seconds=30), CPU, partial(dict, target))
                assert_exact(whole, transport.recv_checkpoint(list(range(count)), step=step))

    with Ranks(count + 1, 40) as ranks:
        ranks.run(work, deadline=100.0)
