"""Arguments of the wrong kind: accepted where they can work, refused where they are given, by name, otherwise."""

from __future__ import annotations

import inspect
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh

import transfuse
from tampering import Passing
from transfuse import _arguments
from transfuse._options import FetchKeywords, ServeKeywords
from transfuse._report import Report
from transfuse.dcp import PeerReader
from transfuse.testing.ranks import Outcome, Ranks

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=10)
#: What a wrong call gets. Made by somebody who does not look at types, as callers do.
Transport: Any = transfuse.PGTransport
serve: Any = transfuse.serve
fetch: Any = transfuse.fetch
Reader: Any = PeerReader

INTEGERS = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.int16)]
NO_INTEGERS = [
    True,
    np.True_,
    torch.tensor(True),
    3.0,
    np.float32(3),
    torch.tensor(3.0),
    torch.tensor(3, device="meta"),
    np.timedelta64(3, "s"),
    "3",
    b"3",
    [3],
    {},
    slice(3),
]


@pytest.fixture
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def meet(ranks: Ranks, *ends: Callable[[Any], object]) -> list[Outcome[Any]]:
    """Rank ``i`` makes a transport and calls the i-th of these with it."""
    return ranks.outcomes(lambda rank, pg: ends[rank](Transport(pg, TIMEOUT, CPU)))


def got(outcome: Outcome[Any]) -> Any:
    return outcome.get()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def nobody() -> str:
    """An address at which nobody listens: a call that is refused has not gone there."""
    return f"127.0.0.1:{free_port()}"


# --------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("given", INTEGERS, ids=repr)
def test_whatever_is_an_integer_is_a_step(two: Ranks, given: Any) -> None:
    def send(transport: Any) -> Report:
        transport.send_checkpoint([1], {"w": torch.ones(2)}, step=given)
        return transport.report  # type: ignore[no-any-return]

    def receive(transport: Any) -> Report:
        transport.recv_checkpoint(0, step=given)
        return transport.report  # type: ignore[no-any-return]

    for outcome in meet(two, send, receive):
        assert type(got(outcome).step) is int
        assert got(outcome).step == 3
        assert got(outcome).to_dict()["step"] == 3


@pytest.mark.parametrize("given", NO_INTEGERS, ids=repr)
def test_whatever_is_none_is_refused_where_it_is_given(two: Ranks, given: Any) -> None:
    transport = Transport(two.pgs[0], TIMEOUT, CPU)
    address = nobody()
    calls: list[Callable[[], object]] = [
        lambda: transport.send_checkpoint([1], {"w": torch.ones(2)}, step=given),
        lambda: transport.recv_checkpoint(1, step=given),
        lambda: transport.receive(1, step=given),
        lambda: serve({}, step=given),
        lambda: fetch(address, step=given),
        lambda: Reader(transport, 1, step=given),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"^step takes an int or None, got ") as raised:
            call()
        assert str(raised.value).endswith(type(given).__name__) or type(given).__name__ in str(raised.value)


@pytest.mark.parametrize("given", [1 << 63, -(1 << 63) - 1, np.uint64(1 << 63)])
def test_a_step_beyond_64_bits_is_a_value_error(two: Ranks, given: Any) -> None:
    transport = Transport(two.pgs[0], TIMEOUT, CPU)
    address = nobody()
    calls: list[Callable[[], object]] = [
        lambda: transport.send_checkpoint([1], {}, step=given),
        lambda: transport.recv_checkpoint(1, step=given),
        lambda: serve({}, step=given),
        lambda: fetch(address, step=given),
        lambda: Reader(transport, 1, step=given),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="step must be a number of 64 bits"):
            call()


def test_a_served_step_may_be_any_integer_and_what_its_callable_gives_is_checked_too() -> None:
    state = {"w": torch.ones(3)}
    for step in (np.int64(3), lambda: torch.tensor(3)):
        with serve(state, step=step) as server:
            assert fetch(server.address, step=torch.tensor(3)).step == 3
    says = r"what step\(\) gives takes an int or None, got float 3\.0"
    with pytest.raises(TypeError, match=says):
        serve(state, step=lambda: 3.0)


# ---------------------------------------------------------------------------------------------- sources without a step


def test_a_source_that_does_not_say_its_step_is_refused_by_who_names_one(two: Ranks) -> None:
    own = {"w": torch.zeros(2)}

    def work(rank: int, pg: Any) -> None:
        if rank == 0:
            Transport(pg, TIMEOUT, CPU).send_checkpoint([1], {"w": torch.ones(2)})
        else:
            Transport(pg, TIMEOUT, CPU, lambda: own).recv_checkpoint(0, step=2)

    sent, received = two.outcomes(work)
    assert isinstance(received.error, transfuse.StepMismatch)
    assert "expects step 2, but the source does not say which step it sends: pass step=2" in str(received.error)
    assert received.error.torn == ()
    assert isinstance(sent.error, transfuse.SendFailed)
    assert isinstance(sent.error.causes[1], transfuse.StepMismatch)
    assert "pass step=2 to send_checkpoint" in str(sent.error)
    assert not own["w"].any()


def test_of_several_sources_those_that_do_not_say_their_step_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int, pg: Any) -> Any:
        transport = Transport(pg, TIMEOUT, CPU)
        if rank == 2:
            return transport.recv_checkpoint([0, 1], step=2)["w"]
        return transport.send_checkpoint([2], {"w": torch.full((1000,), float(rank))}, step=2 if rank else None)

    with Ranks(3, 40) as ranks, caplog.at_level(logging.WARNING, "transfuse"):
        silent, named, received = ranks.outcomes(work)
    assert bool((received.get() == 1).all())
    named.get()
    assert isinstance(silent.error, transfuse.SendFailed)
    assert isinstance(silent.error.causes[2], transfuse.StepMismatch)
    assert "source 0 is not used: the receiver expects step 2" in caplog.text


def test_a_source_that_comes_late_and_does_not_say_its_step_is_not_used(group_route: None) -> None:
    moving = threading.Event()

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            sender = Transport(pg, TIMEOUT, CPU, max_bytes_per_second=4 << 20)
            return sender.send_checkpoint([2], {"w": torch.ones(4 << 20)}, step=2)
        if rank == 1:
            assert moving.wait(30)
            return Transport(pg, TIMEOUT, CPU).send_checkpoint([2], {"w": torch.zeros(4 << 20)})

        def show(progress: dict[int, transfuse.Progress]) -> None:
            if progress[0].bytes:
                moving.set()

        return Transport(pg, TIMEOUT, CPU, progress=show).recv_checkpoint([0, 1], step=2)["w"]

    with Ranks(3, 40) as ranks:
        named, silent, received = ranks.outcomes(work)
    assert bool((received.get() == 1).all())
    named.get()
    assert isinstance(silent.error, transfuse.SendFailed)
    assert isinstance(silent.error.causes[2], transfuse.StepMismatch)
    assert "does not say which step" in str(silent.error)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_server_and_a_load_that_do_not_say_their_step(two: Ranks) -> None:
    with transfuse.serve({"w": torch.ones(2)}) as server:
        with pytest.raises(transfuse.StepMismatch, match="or step= to serve"):
            transfuse.fetch(server.address, step=2)
        assert transfuse.fetch(server.address).state["w"].sum() == 2
    reader = PeerReader(Transport(two.pgs[1], TIMEOUT, CPU), np.int64(0), step=np.int64(2))
    own = {"w": torch.zeros(2)}

    def work(rank: int, pg: Any, step: int | None) -> Any:
        if rank == 0:
            return Transport(pg, TIMEOUT, CPU).send_checkpoint(1, {"w": torch.ones(2)}, step=step)
        with reader:
            return load(own, storage_reader=reader, no_dist=True)

    failed = two.outcomes(work, [None, None])[1]
    assert isinstance(failed.error, CheckpointException)
    assert isinstance(reader.failure, transfuse.StepMismatch)
    assert not own["w"].any()
    for outcome in two.outcomes(work, [2, 2]):
        outcome.get()
    assert own["w"].all()


def test_what_is_resumed_keeps_its_promise_too(group_route: None, two: Ranks) -> None:
    """The refusal hands the partial back: it is not spent on a source that does not say its step."""
    state = {"w": torch.arange(1 << 20)}

    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes > 1 << 20:
            raise transfuse.TransfuseError("enough")

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            with pytest.raises(transfuse.SendFailed):
                Transport(pg, TIMEOUT, CPU, max_bytes_per_second=16 << 20).send_checkpoint(1, state, step=5)
            with pytest.raises(transfuse.SendFailed, match="does not say which step"):
                Transport(pg, TIMEOUT, CPU).send_checkpoint(1, state)
            return Transport(pg, TIMEOUT, CPU).send_checkpoint(1, state, step=5)
        with pytest.raises(transfuse.TransfuseError, match="enough") as first:
            Transport(pg, TIMEOUT, CPU, progress=stop).recv_checkpoint(0, step=5)
        partial = first.value.partial
        assert partial is not None
        transport = Transport(pg, TIMEOUT, CPU)
        with pytest.raises(transfuse.StepMismatch) as second:
            transport.recv_checkpoint(0, step=5, resume=partial)
        assert second.value.partial is partial
        return transport.recv_checkpoint(0, step=5, resume=partial)

    sent, received = two.outcomes(work)
    sent.get()
    assert torch.equal(received.get()["w"], state["w"])


# --------------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("to", [1, np.int64(1), torch.tensor(1), [1], (np.int32(1),), torch.tensor([1]), np.array([1])])
@pytest.mark.parametrize("of", [0, np.int64(0), [torch.tensor(0)], range(1)])
def test_integers_of_any_kind_are_ranks_alone_and_in_sequences(two: Ranks, to: Any, of: Any) -> None:
    def send(transport: Any) -> Any:
        transport.send_checkpoint(to, {"w": torch.ones(2)})
        return transport.report.peers

    sent, received = meet(two, send, lambda transport: transport.recv_checkpoint(of)["w"].sum())
    assert sent.get() == (1,)
    assert type(sent.get()[0]) is int
    assert received.get() == 2


def test_an_iterator_of_ranks_is_used_once(two: Ranks) -> None:
    sent, received = meet(
        two,
        lambda transport: transport.send_checkpoint((rank for rank in [1]), {"n": 1}),
        lambda transport: transport.recv_checkpoint(iter([0])),
    )
    sent.get()
    assert received.get() == {"n": 1}


@pytest.mark.parametrize(
    "given",
    [True, [True], 1.0, [1.0], "1", b"\x01", ["1"], None, [None], torch.tensor(1.0), torch.tensor([True]), slice(1)],
    ids=repr,
)
def test_what_is_no_rank_is_refused(two: Ranks, given: Any) -> None:
    transport = Transport(two.pgs[0], TIMEOUT, CPU)
    with pytest.raises(TypeError, match=r"^dst_ranks takes a rank, which is an int, or several of them, got"):
        transport.send_checkpoint(given, {})
    with pytest.raises(TypeError, match=r"^src_rank takes a rank, which is an int, or several of them, got"):
        transport.recv_checkpoint(given)
    with pytest.raises(TypeError, match=r"^src_ranks takes a rank, which is an int, or several of them, got"):
        Reader(transport, given)
    for wrong in (2, np.int64(-1)):
        with pytest.raises(ValueError, match="not in the group of 2"):
            transport.send_checkpoint(wrong, {})


def test_a_reader_takes_a_transport_and_a_source(two: Ranks) -> None:
    with pytest.raises(TypeError, match=r"transport takes a transfuse\.PGTransport, got a ProcessGroup"):
        Reader(two.pgs[0], 1)
    with pytest.raises(ValueError, match="src_ranks is empty"):
        Reader(Transport(two.pgs[0], TIMEOUT, CPU), [])


# --------------------------------------------------------------------------------------- all that is made with options


class Half:
    """Has one of the two calls."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None: ...


WRONG_OPTIONS: list[tuple[str, Any, type[Exception], str]] = [
    ("timeout", "30", TypeError, r"timeout takes a timedelta, or a number of seconds, got str '30'"),
    ("timeout", True, TypeError, r"timeout takes .*, got bool True"),
    ("timeout", None, TypeError, r"timeout takes .*, got None"),
    ("timeout", np.timedelta64(30_000, "ms"), TypeError, r"timeout takes .*, got timedelta64"),
    ("timeout", float("nan"), ValueError, r"timeout must be positive, and a finite number of seconds, got nan"),
    ("timeout", float("inf"), ValueError, r"timeout must be positive, and a finite number of seconds, got inf"),
    ("timeout", 1e300, ValueError, r"timeout must be positive, and a finite"),
    ("timeout", 10**400, ValueError, r"timeout must be positive, and a finite"),
    ("timeout", 0, ValueError, r"timeout must be positive"),
    ("timeout", -1.5, ValueError, r"timeout must be positive"),
    ("timeout", 1e-9, ValueError, r"timeout must be positive, a microsecond at least"),
    ("same_host", 1, TypeError, r"same_host takes True or False, got int 1"),
    ("device_memory", None, TypeError, r"device_memory takes True or False, got None"),
    ("nixl", "yes", TypeError, r"nixl takes True, False or None, got str 'yes'"),
    ("nixl", 1, TypeError, r"nixl takes True, False or None, got int 1"),
    ("verify", "no", TypeError, r"verify takes True, False or None, got str 'no'"),
    ("verify", 1, TypeError, r"verify takes True, False or None, got int 1"),
    ("delta", None, TypeError, r"delta takes True or False, got None"),
    ("cast", torch.bfloat16, TypeError, r"cast takes True or False, got a dtype"),
    ("atomic", "yes", TypeError, r"atomic takes True or False, got str 'yes'"),
    ("strict", 0, TypeError, r"strict takes True, False or None, got int 0"),
    ("weights_only_objects", np.True_, TypeError, r"weights_only_objects takes True or False, got bool"),
    ("relay", [], TypeError, r"relay takes True or False, got a list"),
    ("streams", None, TypeError, r"streams takes True or False, got None"),
    ("tls", 5, TypeError, r"tls takes a transfuse.TLS\(certificate, key, ca\), False or None, got 5"),
    ("history", "1", TypeError, r"history takes 0 or 1, a number of versions, got str '1'"),
    ("history", 2, ValueError, r"history must be 0 or 1, got 2: a source remembers one version at most"),
    ("lanes", 2.5, TypeError, r"lanes takes an int, a number of connections, or None, got float 2.5"),
    ("lanes", 0, ValueError, r"lanes must be from 1 to 16, got 0"),
    ("mesh", "cpu", TypeError, r"mesh takes a DeviceMesh, a function .*, or None, got str 'cpu'"),
    ("mesh", (2, 2), TypeError, r"mesh takes a DeviceMesh, .*, got a tuple"),
    ("max_bytes_per_second", "1MiB", TypeError, r"max_bytes_per_second takes a number of bytes, or None, got str"),
    ("max_bytes_per_second", True, TypeError, r"max_bytes_per_second takes .*, got bool True"),
    (
        "max_bytes_per_second",
        float("nan"),
        ValueError,
        r"max_bytes_per_second must be at least .*, and finite, got nan",
    ),
    ("max_bytes_per_second", float("inf"), ValueError, r"max_bytes_per_second must be at least .*, and finite"),
    ("max_bytes_per_second", 10**400, ValueError, r"max_bytes_per_second must be at least .*, and finite"),
    ("max_receive_bytes", "1GiB", TypeError, r"max_receive_bytes takes an int, a number of bytes, or None, got str"),
    ("max_receive_bytes", 1e9, TypeError, r"max_receive_bytes takes an int, .*, got float 1000000000\.0"),
    ("max_receive_bytes", False, TypeError, r"max_receive_bytes takes an int, .*, got bool False"),
    ("max_receive_bytes", 0, ValueError, r"max_receive_bytes must be positive"),
    ("progress", None, TypeError, r"progress takes True, False, or a function .*, got None"),
    ("progress", "bar", TypeError, r"progress takes True, False, or a function .*, got str 'bar'"),
    ("map_path", 5, TypeError, r"map_path"),
]


def makers(pg: Any) -> dict[str, Callable[..., object]]:
    """All that takes the options of a transport, in a call that would work, or that goes to nobody."""
    address = nobody()

    def make(cls: Any, options: dict[str, Any]) -> object:
        return cls(**{"pg": pg, "timeout": TIMEOUT, "device": CPU, "state_dict": dict} | options)

    found: dict[str, Callable[..., object]] = {
        "transport": lambda **options: make(Transport, options),
        "serve": lambda **options: serve({}, **options).close(),
        "fetch": lambda **options: fetch(address, {}, **options),
    }
    try:
        from transfuse.dropin import torchft
    except ImportError:
        return found
    return found | {"torchft": lambda **options: make(torchft.PGTransport, options)}


@pytest.mark.parametrize(("name", "value", "error", "says"), WRONG_OPTIONS, ids=lambda value: repr(value)[:40])
def test_what_cannot_work_is_refused_wherever_the_option_is(
    two: Ranks, name: str, value: Any, error: type[Exception], says: str
) -> None:
    takes = {"serve": ServeKeywords.__annotations__, "fetch": FetchKeywords.__annotations__}
    asked = 0
    for maker, make in makers(two.pgs[0]).items():
        if maker in takes and name not in {"timeout", *takes[maker]}:
            continue
        with pytest.raises(error, match=says):
            make(**{name: value})
        asked += 1
    assert asked


def test_every_option_is_covered() -> None:
    options = set(inspect.signature(transfuse.PGTransport).parameters) - {"pg", "device", "state_dict"}
    assert options == {name for name, *_ in WRONG_OPTIONS}


WRONG_GROUPS: list[tuple[Any, type[Exception], str]] = [
    (
        None,
        TypeError,
        r"pg is None: pass a process group, such as torch\.distributed\.group\.WORLD \(which is None until",
    ),
    (dist.GroupMember.NON_GROUP_MEMBER, ValueError, r"this rank is not in the group that new_group made"),
    (0, TypeError, r"pg takes a process group, .* send and recv, got int 0: pass for instance torch\.distributed"),
    ("gloo", TypeError, r"pg takes a process group, .*, got str 'gloo'"),
    (Half(), TypeError, r"pg takes a process group, .*, got a Half"),
    (dist, TypeError, r"pg takes a process group, .*, got the module torch\.distributed"),
    (dist.ProcessGroup, TypeError, r"pg takes a process group, .*, got the class ProcessGroup"),
    (dist.group, TypeError, r"pg takes a process group, .*, got the class"),
    (
        DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0),
        TypeError,
        r"pg takes a process group, .*, got a DeviceMesh: pass for instance mesh\.get_group\(\)",
    ),
]
WRONG_CALLBACKS: list[tuple[Any, str]] = [
    (torch.nn.Linear(2, 2), r"state_dict takes a function .*, got a Linear: pass `model\.state_dict`, not the module"),
    (
        {"w": torch.ones(2)},
        r"state_dict takes a function .*, got a dict: pass a function that returns it, such as lambda",
    ),
    (torch.optim.SGD([torch.ones(2)], 0.1), r"state_dict takes a function .*, got a SGD: pass its method `state_dict`"),
    (True, r"state_dict takes a function .*, got bool True"),
]
WRONG_DEVICES: list[Any] = [
    (None, TypeError, r"device takes a torch\.device or its name, such as 'cpu' for gloo .*, got None"),
    (True, TypeError, r"device takes .*, got bool True"),
    (1.5, TypeError, r"device takes .*, got float 1\.5"),
    ("gpu", ValueError, r"device takes .*, got str 'gpu': "),
    ("meta", ValueError, r"device takes .*, got meta, on which tensors have no values"),
    pytest.param(
        "cuda",
        ValueError,
        r"device takes .*, got cuda, and this process has no such device",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here"),
    ),
]


def with_groups(pg: Any) -> list[Callable[..., object]]:
    return [make for name, make in makers(pg).items() if name in ("transport", "torchft")]


@pytest.mark.parametrize(("pg", "error", "says"), WRONG_GROUPS)
def test_what_is_no_group_is_refused(pg: Any, error: type[Exception], says: str) -> None:
    for make in with_groups(pg):
        with pytest.raises(error, match=says):
            make()


@pytest.mark.parametrize(("callback", "says"), WRONG_CALLBACKS)
def test_what_is_no_callback_is_refused(two: Ranks, callback: Any, says: str) -> None:
    for make in with_groups(two.pgs[0]):
        with pytest.raises(TypeError, match=says):
            make(state_dict=callback)


@pytest.mark.parametrize(("device", "error", "says"), WRONG_DEVICES)
def test_what_is_no_device_is_refused(two: Ranks, device: Any, error: type[Exception], says: str) -> None:
    for make in with_groups(two.pgs[0]):
        with pytest.raises(error, match=says):
            make(device=device)


# ---------------------------------------------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("timeout", [30, 30.5, np.int64(30), np.float32(30.5), torch.tensor(30)], ids=repr)
def test_a_timeout_may_be_seconds(two: Ranks, timeout: Any) -> None:
    def work(rank: int, pg: Any) -> Any:
        transport = Transport(pg, timeout, "cpu")
        assert transport._seconds == pytest.approx(float(timeout))
        return transport.send_checkpoint(1, {"n": 1}) if rank == 0 else transport.recv_checkpoint(0)

    sent, received = two.outcomes(work)
    sent.get()
    assert received.get() == {"n": 1}
    with serve({"n": 1}, timeout=timeout) as server:
        assert fetch(server.address, timeout=timeout).state == {"n": 1}
        assert transfuse.peek(server.address, timeout=timeout).step is None


def test_groups_are_what_has_their_two_calls(two: Ranks) -> None:
    """Whatever wraps one, and however it hides that it does."""

    class Bare:
        def __init__(self, pg: Any) -> None:
            self.send, self.recv = pg.send, pg.recv

    for wrap in (Passing, Bare):
        sent, received = two.outcomes(
            lambda rank, pg, wrap=wrap: (
                Transport(wrap(pg), TIMEOUT, CPU).send_checkpoint([1], {"n": 1})
                if rank == 0
                else Transport(wrap(pg), TIMEOUT, CPU).recv_checkpoint(0)
            )
        )
        sent.get()
        assert received.get() == {"n": 1}


def test_limits_may_be_numbers_of_any_kind(two: Ranks) -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            sender = Transport(pg, TIMEOUT, CPU, max_bytes_per_second=np.int64(1 << 30))
            return sender.send_checkpoint(1, {"w": torch.ones(2)})
        return Transport(pg, TIMEOUT, CPU, max_receive_bytes=np.int64(1 << 20)).recv_checkpoint(0)

    sent, received = two.outcomes(work)
    sent.get()
    assert received.get()["w"].sum() == 2


# ----------------------------------------------------------------------------------------------------- serve and fetch


def test_other_arguments_of_a_server() -> None:
    for options, says in (
        ({"max_readers": 2.0}, r"max_readers takes an int, got float 2\.0"),
        ({"max_readers": True}, "max_readers takes an int, got bool True"),
        ({"port": "80"}, "port takes an int, got str '80'"),
        ({"host": None}, "host takes an address to listen on, got None"),
        ({"on_report": "print"}, "on_report takes a function or None, got str 'print'"),
    ):
        with pytest.raises(TypeError, match=says):
            serve({}, **options)
    with serve({"n": 1}, max_readers=np.int64(2), port=np.int64(free_port())) as server:
        assert fetch(server.address).state == {"n": 1}


def test_a_wrong_fetch_asks_nobody_for_anything() -> None:
    """Neither a server, which would hold still for it, nor the callback."""
    called: list[int] = []
    with serve({"n": 1}, on_report=lambda report: called.append(1)) as server:
        for options, says in (
            ({"step": "3"}, "step takes"),
            ({"resume": 5}, "resume takes"),
            ({"on_report": print}, r"fetch\(\) has no on_report= any more: the report is \.report of what is returned"),
            ({"state_dict": dict}, r"fetch\(\) has no state_dict= any more: state= takes it"),
            ({"timeout": "30"}, "timeout takes"),
            ({"delta": 1}, "delta takes"),
        ):
            with pytest.raises(TypeError, match=says):
                fetch(server.address, lambda: called.append(2), **options)
        for wrong in (5, None, [5], b"127.0.0.1:80"):
            with pytest.raises(TypeError, match="or the URL of a directory of steps, got"):
                fetch(wrong)
        with pytest.raises(TypeError, match="address takes"):
            transfuse.peek(5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="timeout takes"):
            transfuse.peek(server.address, timeout="1")  # type: ignore[arg-type]
    assert called == []


# ------------------------------------------------------------------------------------------------------- by themselves


def test_an_error_shows_short_values_only() -> None:
    with pytest.raises(TypeError) as raised:
        _arguments.whole("n", "x" * 10_000)
    assert len(str(raised.value)) < 200
    with pytest.raises(TypeError, match=r"got a Tensor of torch\.float32 and shape \(1000,\)$"):
        _arguments.whole("n", torch.zeros(1000))
