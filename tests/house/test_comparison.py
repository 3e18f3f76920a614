"""docs/comparison.md, cell by cell: each row asks questions, and a cell says what running the contender answers.

A row's questions are functions that raise if the answer is no. All of them yes is "yes", none "no", some "partly". What
the table says otherwise, in either direction, fails here.
"""

from __future__ import annotations

import ast
import functools
import gc
import logging
import pathlib
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from contenders import CONTENDERS, FILES, TORCHFT, Contender, Damaging
from states import Pair
from transfuse.testing import CASES, assert_exact
from transfuse.testing._group import CPU, CountingGroup
from transfuse.testing._stage import Stage, expect, expect_failed, value
from transfuse.testing.ranks import Late, Outcome

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "comparison.md").read_text()

#: Seconds. Half of it is how long one may wait whose peer has failed, a quarter the timeout of who waits in vain.
PATIENCE = 6.0

MIB = 1 << 20
BY_NAME = {case.name: case for case in CASES}

Question = Callable[[Contender], None]


# -------------------------------------------------------------------------------------------------- questions


def cases(*names: str) -> tuple[Question, ...]:
    """Those of the conformance suite."""

    def question(name: str) -> Question:
        def ask(contender: Contender) -> None:
            BY_NAME[name].run(contender.make(), patience=PATIENCE)

        ask.__name__ = name
        return ask

    return tuple(map(question, names))


def stage(contender: Contender, wish: str = "", **options: Any) -> Stage:
    return Stage(contender.make(wish, **options), PATIENCE)


def large(count: int = 12, fill: float = 1.0) -> dict[str, Tensor]:
    """More than sockets hold, in pieces of 1 MiB."""
    return {f"w{i:02}": torch.full((MIB // 4,), fill + i) for i in range(count)}


def a_wrapper_subclass_arrives(contender: Contender) -> None:
    state = {"pair": Pair(torch.randn(3, 2), torch.randn(3, 2), {"dtype": torch.float32})}
    assert_exact(state, stage(contender).move(state))


def values_of_conj_and_neg_views_arrive(contender: Contender) -> None:
    numbers = torch.randn(4, dtype=torch.complex64)
    state = {"conj": numbers.conj(), "neg": torch._neg_view(torch.randn(3))}
    assert_exact(state, stage(contender).move(state), in_place=True)


def a_flipped_bit_is_found(contender: Contender) -> None:
    # One tensor, so that the middle of whatever carries it is its values, and not what a format says about them.
    state, target = {"w": torch.ones(MIB)}, {"w": torch.zeros(MIB)}
    at = stage(contender)
    with at.ranks(2) as ranks:
        wire: Any = Damaging(ranks.groups[0])
        jobs = {0: lambda _: at.transport(wire).send_checkpoint([1], state), 1: at.receiver(target)}
        end = ranks.run(jobs, at.limit, all_well=True)[1]
    expect(wire.damaged, "nothing large enough to be damaged passed")
    if end.error is None:
        assert_exact(state, end.value, in_place=True)
    else:
        # That an error of any kind came is enough, unless the rank just never ended.
        expect(not isinstance(end.error, Late), str(end.error))


def another_step_is_refused(contender: Contender) -> None:
    def run(wanted: int) -> dict[int, Outcome[Any]]:
        at = stage(contender)
        state = {"w": torch.ones(3)}
        with at.ranks(2) as ranks:
            return ranks.run(
                {
                    0: lambda group: at.transport(group, timeout=at.short).send_checkpoint([1], state, step=7),  # type: ignore[call-arg]
                    1: lambda group: at.transport(group, timeout=at.short).recv_checkpoint(0, step=wanted),  # type: ignore[call-arg]
                },
                at.limit,
            )

    value(run(7)[1])
    expect_failed(run(8)[1])


def a_change_during_the_transfer_is_noticed(contender: Contender) -> None:
    state, expected = large(), large()
    at = stage(contender)

    def change(group: CountingGroup) -> None:
        if group.sent > 6 * MIB:
            state["w00"].zero_()
            state["w11"].zero_()

    with at.ranks(2) as ranks:
        ranks.groups[0].trap = change
        ended = ranks.run({0: at.source(state), 1: at.receiver()}, at.limit, all_well=True)
    if ended[1].error is None:
        assert_exact(expected, ended[1].value)


def from_two(contender: Contender, trap: Callable[[CountingGroup], None] | None) -> None:
    state, target = large(), large(fill=0.0)
    at = stage(contender)
    with at.ranks(3) as ranks:
        ranks.groups[1].trap = trap
        jobs = {rank: at.source(state, (2,)) for rank in (0, 1)}
        jobs[2] = lambda group: at.transport(group, lambda: target).recv_checkpoint([0, 1])  # type: ignore[arg-type]
        value(ranks.run(jobs, at.limit, only=2)[2])
    assert_exact(state, target, in_place=True)


def a_receiver_names_two_sources(contender: Contender) -> None:
    from_two(contender, None)


def stop_midway(group: CountingGroup) -> None:
    """The end of a process, as far as the others see: all its connections close."""
    if max(group.sent, group.received) > 3 * MIB:
        if not group.closed.is_set():
            group.hang_up()
        raise ConnectionError("this rank was made to stop")


def cut_off(group: CountingGroup) -> None:
    """The end of a file, of which the group brings no more than the name."""
    raise ConnectionError("this rank was made to stop")


def one_of_two_sources_stops(contender: Contender) -> None:
    from_two(contender, stop_midway)


def the_receiver_hears_of_a_source_that_cannot(contender: Contender) -> None:
    at = stage(contender)
    with at.ranks(2) as ranks:
        jobs = {0: at.source({"fine": torch.ones(3), "culprit": lambda: 3}), 1: at.receiver()}
        expect_failed(ranks.run(jobs, at.limit)[1])


def the_others_get_everything(contender: Contender, jobs: Callable[[Stage], dict[int, Any]], trapped: int) -> None:
    state, at = large(), stage(contender)
    with at.ranks(4) as ranks:
        ranks.groups[trapped].trap = stop_midway
        source = {0: at.source(state, (1, 2, 3), at.short)}
        ended = ranks.run(source | jobs(at), at.limit)
    for rank in (1, 3):
        assert_exact(state, value(ended[rank]))


def one_of_three_receivers_is_absent(contender: Contender) -> None:
    the_others_get_everything(contender, lambda at: {rank: at.receiver(timeout=at.short) for rank in (1, 3)}, 2)


def one_of_three_receivers_stops(contender: Contender) -> None:
    the_others_get_everything(contender, lambda at: {rank: at.receiver(timeout=at.short) for rank in (1, 2, 3)}, 2)


def ends_in_time(contender: Contender, sends: bool, comes: bool) -> None:
    """A contender whose peer does not come, or stops moving midway, ends, with an error or without."""
    at = stage(contender)

    def stall(group: CountingGroup) -> None:
        if max(group.sent, group.received) > 3 * MIB:
            group.closed.wait(60)
            raise ConnectionError("this rank was made to stall")

    judged = 0 if sends else 1
    jobs = {0: at.source(large(), timeout=at.short), 1: at.receiver(timeout=at.short)}
    if contender.of_nothing is not None and not comes and not sends:
        jobs[1] = lambda _: contender.of_nothing(timedelta(seconds=at.short))  # type: ignore[misc]
    with at.ranks(2) as ranks:
        ranks.groups[1 - judged].trap = stall
        ended = ranks.run(jobs if comes else {judged: jobs[judged]}, at.limit, only=judged)[judged]
    if isinstance(ended.error, Late):
        raise ended.error


def a_receiver_without_source_ends(contender: Contender) -> None:
    ends_in_time(contender, sends=False, comes=False)


def a_source_without_receiver_ends(contender: Contender) -> None:
    ends_in_time(contender, sends=True, comes=False)


def a_receiver_whose_source_stalls_ends(contender: Contender) -> None:
    ends_in_time(contender, sends=False, comes=True)


def a_source_whose_receiver_stalls_ends(contender: Contender) -> None:
    ends_in_time(contender, sends=True, comes=True)


def a_transfer_that_breaks_off_leaves_the_targets_alone(contender: Contender) -> None:
    state, target = large(), large(fill=100.0)
    at = stage(contender, "atomic")
    with at.ranks(2) as ranks:
        ranks.groups[0].trap = stop_midway if contender.meet else cut_off
        jobs = {0: at.source(state, timeout=at.short), 1: at.receiver(target, timeout=at.short)}
        ranks.run(jobs, at.limit)
    assert_exact(large(fill=100.0), target)


WHOLE = torch.arange(35.0).reshape(7, 5)


def a_shard_is_filled_from_a_whole_tensor(contender: Contender) -> None:
    own = torch.zeros(3, 5)
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=1)
    shard = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride())
    stage(contender).move({"w": WHOLE}, {"w": shard})
    assert_exact(WHOLE[4:].clone(), own)


def a_target_of_another_floating_type_is_filled(contender: Contender) -> None:
    source, target = torch.randn(50), torch.zeros(50, dtype=torch.bfloat16)
    stage(contender, "cast").move({"w": source}, {"w": target})
    assert_exact(source.to(torch.bfloat16), target)


def a_tensor_of_another_name_is_filled(contender: Contender) -> None:
    """The target's tensors under the source's names."""
    own = torch.zeros(3)
    stage(contender).move({"theirs": torch.ones(3)}, {"theirs": own})
    assert_exact(torch.ones(3), own)


def parts_of_a_fused_tensor_are_filled(contender: Contender) -> None:
    fused = torch.zeros(5, 4)
    stage(contender).move({"q": torch.ones(2, 4), "k": torch.full((3, 4), 2.0)}, {"q": fused[:2], "k": fused[2:]})
    assert_exact(torch.cat([torch.ones(2, 4), torch.full((3, 4), 2.0)]), fused)


def sent(contender: Contender, wish: str, receivers: int = 1, target: Any = None) -> float:
    """What leaves the source, in units of the state."""
    state, at = large(), stage(contender, wish)
    with at.ranks(receivers + 1) as ranks:
        others = range(1, receivers + 1)
        arrived = at.all_well(ranks, {0: at.source(state, others)} | {rank: at.receiver(target) for rank in others})
        for rank in others:
            assert_exact(state, arrived[rank], in_place=True)
        return ranks.groups[0].sent / sum(tensor.nbytes for tensor in state.values())


def what_is_there_already_is_not_sent(contender: Contender) -> None:
    share = sent(contender, "delta", target=large())
    expect(share < 0.1, f"{share:.2f} of the state were sent to a receiver that had it")


def on_one_host_nothing_passes_through_a_socket(contender: Contender) -> None:
    share = sent(contender, "same host")
    expect(share < 0.1, f"{share:.2f} of the state were sent")


def a_cap_can_be_given(contender: Contender) -> None:
    expect("rate" in contender.options, "none of its parameters is a rate")
    sent(contender, "rate")


def one_outside_the_group_gets_the_state(contender: Contender) -> None:
    state = {"w": torch.randn(1000)}
    if contender.outside is not None:
        assert_exact(state, contender.outside(state))
    else:
        contender.make()(None, timedelta(seconds=1), CPU).recv_checkpoint(0)


def a_callable_is_told_how_far_it_is(contender: Contender) -> None:
    expect(contender.progress is not None, "none of its parameters is a callable for that")
    told: list[Any] = []
    stage(contender, "", **{contender.progress or "": told.append}).move(large())
    expect(len(told) > 0, "it was not called")


# Those below look at or change the whole process, and are asked one at a time.


def no_file_is_written(contender: Contender) -> None:
    before, state = set(FILES.rglob("*")), {"w": torch.ones(3)}
    assert_exact(state, stage(contender).move(state))
    expect(before == set(FILES.rglob("*")), "what arrived was in a file")


def three_receivers_cost_the_source_less_than_two(contender: Contender) -> None:
    with contender.apart():
        share = sent(contender, "", receivers=3)
    expect(share < 2, f"the source sent its state {share:.2f} times")


def the_log_says_how_long_it_took(contender: Contender) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    keep = Keep()
    known = (logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger))
    loggers = {logger: (logger.level, logger.propagate) for logger in (logging.root, *known)}
    for logger in loggers:
        # Wherever a library has turned its own down.
        logger.setLevel(logging.DEBUG)
        logger.propagate = True
    logging.root.addHandler(keep)
    try:
        stage(contender).move(large(4))
    finally:
        logging.root.removeHandler(keep)
        for logger, (level, propagate) in loggers.items():
            logger.setLevel(level)
            logger.propagate = propagate
    expect(any(re.search(r"\d[\d.e-]* ?m?s\b|times_spent", line) for line in lines), f"the log says {lines}")


def in_place_takes_less_than_half_the_state_more(contender: Contender) -> None:
    def status(name: str) -> int:
        lines = pathlib.Path("/proc/self/status").read_text()
        return int(re.findall(rf"^{name}:\s*(\d+) kB", lines, re.M)[0]) << 10

    state, target = ({f"w{i}": torch.full((8 * MIB,), fill) for i in range(8)} for fill in (1.0, 0.0))
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = status("VmRSS")
    Stage(contender.make(), 60.0).move(state, target)
    extra = status("VmHWM") - before
    total = sum(tensor.nbytes for tensor in state.values())
    expect(all(bool((tensor == 1).all()) for tensor in target.values()), "it did not arrive")
    expect(extra < total / 2, f"it took {extra >> 20} MiB more for {total >> 20} MiB")


ALONE = (
    no_file_is_written,
    three_receivers_cost_the_source_less_than_two,
    the_log_says_how_long_it_took,
    in_place_takes_less_than_half_the_state_more,
)


@dataclass(frozen=True)
class Row:
    questions: tuple[Question, ...]
    #: Nothing to ask where the two ends are never there together.
    meet: bool = False
    #: Nothing to ask where nothing lands in the receiver's own tensors.
    in_place: bool = False


IN_PLACE = "lands in the receiver's own tensors"

ROWS: dict[str, Row] = {
    "from memory to memory": Row((no_file_is_written,)),
    "any `state_dict`": Row(
        cases(
            *("fresh/training-state", "fresh/tree/namedtuple", "fresh/tree/keys"),
            *("fresh/value/numbers", "fresh/value/text", "fresh/value/enum"),
        )
    ),
    IN_PLACE: Row(cases("in-place/training-state", "in-place/order")),
    "targets are checked first": Row(
        cases(
            *("in-place/dtype-mismatch", "in-place/shape-mismatch", "in-place/size-mismatch"),
            *("in-place/shared-element", "in-place/untied-into-tied"),
        ),
        in_place=True,
    ),
    "views as targets": Row(cases("in-place/strides", "in-place/guard", "in-place/into/offset"), in_place=True),
    "strides and offsets": Row(
        cases(*(f"fresh/layout/{n}" for n in ("transposed", "stepped", "offset", "expanded", "channels-last")))
    ),
    "views cost what they show": Row(cases("fresh/view-sends-what-it-shows")),
    "tied weights": Row(cases("fresh/tied", "fresh/tied-sent-once")),
    "conj and neg views": Row(
        (
            values_of_conj_and_neg_views_arrive,
            *cases(*(f"fresh/layout/{n}" for n in ("conj", "neg", "conj-and-neg", "imag-of-conj"))),
        )
    ),
    "`Parameter`, `requires_grad`": Row(
        cases(*(f"fresh/role/{n}" for n in ("requires-grad", "parameter", "frozen-parameter", "buffer")))
    ),
    "sparse, jagged, wrapper subclasses": Row(
        (
            *cases("fresh/sparse/coo", "fresh/sparse/csr", "fresh/sparse/bsc", "fresh/jagged"),
            a_wrapper_subclass_arrives,
        )
    ),
    "damage on the way is found": Row((a_flipped_bit_is_found,)),
    "another step is refused": Row((another_step_is_refused,), meet=True),
    "a source that changes is noticed": Row((a_change_during_the_transfer_is_noticed,), meet=True),
    "several sources for one receiver": Row((a_receiver_names_two_sources,), meet=True),
    "a source is lost, another goes on": Row((one_of_two_sources_stops,), meet=True),
    "an error reaches the other end": Row(
        (the_receiver_hears_of_a_source_that_cannot, *cases("refusal/callback-raises")), meet=True
    ),
    "one receiver fails, the others do not": Row(
        (one_of_three_receivers_is_absent, one_of_three_receivers_stops), meet=True
    ),
    "its own timeout bounds every wait": Row(
        (
            a_receiver_without_source_ends,
            a_source_without_receiver_ends,
            a_receiver_whose_source_stalls_ends,
            a_source_whose_receiver_stalls_ends,
        ),
        meet=True,
    ),
    "nothing of a peer executes": Row(cases("refusal/nothing-executes")),
    "atomic": Row((a_transfer_that_breaks_off_leaves_the_targets_alone,)),
    "bounded memory": Row((in_place_takes_less_than_half_the_state_more,), in_place=True),
    "other shardings": Row((a_shard_is_filled_from_a_whole_tensor,)),
    "other floating types": Row((a_target_of_another_floating_type_is_filled,), in_place=True),
    "other names, fused tensors": Row(
        (a_tensor_of_another_name_is_filled, parts_of_a_fused_tensor_are_filled), in_place=True
    ),
    "only what differs": Row((what_is_there_already_is_not_sent,)),
    "the source sends once to many": Row((three_receivers_cost_the_source_less_than_two,), meet=True),
    "a path of its own on one host": Row((on_one_host_nothing_passes_through_a_socket,), meet=True),
    "a cap on the rate": Row((a_cap_can_be_given,)),
    "a receiver outside the group": Row((one_outside_the_group_gets_the_state,)),
    "progress and report": Row((a_callable_is_told_how_far_it_is, the_log_says_how_long_it_took)),
}


# ---------------------------------------------------------------------------------------------------- answers

Answers = dict[tuple[str, str], dict[str, Exception | None]]


def ask(question: Question, contender: Contender) -> Exception | None:
    try:
        question(contender)
    except Exception as error:
        return error.with_traceback(None)  # Whose frames hold states and groups.
    return None


def applies(row: str, contender: Contender) -> bool:
    return (contender.meet or not ROWS[row].meet) and (contender.in_place or not ROWS[row].in_place)


def everything() -> Answers:
    """For each contender and row, each question's answer: None for yes."""
    asked = [
        (title, row, question)
        for row, asks in ROWS.items()
        for title, contender in CONTENDERS.items()
        if applies(row, contender)
        for question in asks.questions
    ]
    answers: Answers = {(title, row): {} for title, row, _ in asked}

    def answer(title: str, row: str, question: Question) -> None:
        answers[title, row][question.__name__] = ask(question, CONTENDERS[title])

    with ThreadPoolExecutor(10, "comparison") as pool:
        list(pool.map(lambda one: answer(*one), (one for one in asked if one[2] not in ALONE)))
    for one in asked:
        if one[2] in ALONE:
            answer(*one)
    return answers


def verdict(answers: Answers, title: str, row: str) -> str:
    if (title, row) not in answers:
        return "–"
    errors = answers[title, row].values()
    yes = sum(error is None for error in errors)
    return "yes" if yes == len(errors) else "partly" if yes else "no"


# ----------------------------------------------------------------------------------------------------- the page

WORDS = ("yes", "no", "partly", "–", "?")
#: What cannot be run here.
UNRUN = ("GPU-direct RDMA", "published runs on accelerators")


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def table(heading: str) -> dict[str, dict[str, str]]:
    """Cells by column, then by row."""
    lines = [line.strip("|").split("|") for line in section(heading).splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    assert all(len(row) == len(head) for row in rows), "a row has too many cells, or too few"
    return {title: {row[0]: row[place] for row in rows} for place, title in enumerate(head) if place}


def items(heading: str) -> dict[str, str]:
    return dict(re.findall(r"^- \*\*([^*]+)\*\*:\s+(.+?)(?=^- |^\S|\Z)", section(heading) + "\n", re.M | re.S))


def word(cell: str) -> str:
    return re.split(r"[,:†]|\s", cell, maxsplit=1)[0]


RUN, READ = table("Run"), table("Read, not run")


# One test, because several workers would each ask everything.
@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Others warn about their pickles, in ways that are not thread-safe.
def test_every_cell_says_what_running_it_says() -> None:
    try:
        answers = everything()
    finally:
        shutil.rmtree(FILES, ignore_errors=True)
    wrong = []
    for title, contender in CONTENDERS.items():
        assert contender.in_place == (verdict(answers, title, IN_PLACE) != "no"), title
        assert contender.meet == (verdict(answers, title, "from memory to memory") == "yes"), title
        for row in ROWS:
            said, found = RUN[title][row], verdict(answers, title, row)
            if word(said) != found:
                wrong.append(f"{title}, {row}: the table says {said!r}, found {found}")
                details = answers.get((title, row), {}).items()
                wrong += [f"    {name}: {'yes' if error is None else repr(error)}" for name, error in details]
    assert not wrong, "\n".join(("", *wrong))


def test_no_question_answers_itself() -> None:
    """In every row transfuse says yes, and somebody who is asked does not: both ways are open."""
    for row in ROWS:
        assert word(RUN["transfuse"][row]) == "yes", row
        others = {word(cells[row]) for cells in RUN.values()}
        # In place within bounded memory is what all are capable of that are capable of in place.
        assert row == "bounded memory" or {"no", "partly"} & others, row


def test_rows_and_columns_are_those_that_were_asked() -> None:
    assert set(RUN) >= set(CONTENDERS)
    assert (set(RUN) == set(CONTENDERS)) == TORCHFT, "only torchft may be missing"
    for cells in RUN.values():
        assert list(cells) == [*ROWS, *UNRUN]
    for cells in READ.values():
        assert set(cells) <= {*ROWS, *UNRUN}
        assert all(word(cell) in WORDS for cell in cells.values())


def test_what_is_not_run_is_marked() -> None:
    assert all(title.endswith("†") for title in READ)
    assert not any("†" in cell for title, cells in RUN.items() for row, cell in cells.items() if row in ROWS)
    marked = [RUN[title][row] for title in RUN for row in UNRUN if title != "transfuse"]
    assert all(cell == "–" or "†" in cell for cell in marked)
    # Nothing has run on an accelerator yet; when that changes, this line changes.
    assert all(word(RUN["transfuse"][row]) == "no" for row in UNRUN)


def test_every_source_is_given() -> None:
    assert set(items("Where it was read")) == {title.removesuffix("†") for title in READ}
    numbers = {
        int(number)
        for cells in (*RUN.values(), *READ.values())
        for cell in cells.values()
        for number in re.findall(r"\[(\d+)\]", cell)
    }
    given = [int(number) for number in re.findall(r"\[(\d+)\] ", section("Where it was read").replace("\n", " "))]
    assert given == sorted(numbers)


def test_every_row_is_explained() -> None:
    explained = items("What each row asks")
    assert list(explained) == list(ROWS)
    for row, asks in ROWS.items():
        for question in asks.questions:
            if question.__name__ in BY_NAME and "fresh/layout/" not in question.__name__:
                last = question.__name__.rpartition("/")[2]
                assert re.search(rf"[`/]{re.escape(last)}`", explained[row]), f"{row}: {question.__name__}"


@functools.cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_what_proves_our_own_column_is_there() -> None:
    proofs = items("What proves transfuse's column")
    assert list(proofs) == list(ROWS)
    for row, text in proofs.items():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
        assert named, row
        for file, name in named:
            assert name in functions(file), f"{file}::{name}"


@pytest.mark.parametrize("title", CONTENDERS)
def test_no_parameter_has_come_that_nobody_looked_at(title: str) -> None:
    assert CONTENDERS[title].unknown() == []
