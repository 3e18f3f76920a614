"""``fetch(…, wait=False)``: from other processes, into objects; deaths, interrupts, forks and exits."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import transfuse
from serving import (
    DEADLINE,
    LONG,
    TOKEN,
    big_state,
    nothing_is_left,
    own_files,
    own_tasks,
    servers,
    some_state,
    wait_until,
    zeros_like,
)
from transfuse import Fetched, Pending
from transfuse._memory.held import HeldLanding
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import run_program

MIB = 1 << 20


def weights(state: dict[str, Any]) -> list[torch.Tensor]:
    return list(state["model"].values())


def wait_for(pending: Pending[Any]) -> None:
    wait_until(pending.done)
    assert pending.error is None


class Moving:
    """A ``progress=`` that tells when bytes arrive."""

    def __init__(self) -> None:
        self.bytes = threading.Event()

    def __call__(self, progress: dict[int, transfuse.Progress]) -> None:
        if any(one.bytes for one in progress.values()):
            self.bytes.set()


def ahead(addresses: list[str], target: Any, moving: Moving) -> Pending[Fetched]:
    return transfuse.fetch(addresses, target, token=TOKEN, timeout=LONG, same_host=False, wait=False, progress=moving)


# ----------------------------------------------------------------------------------------------------------- processes


def test_all_old_while_bytes_arrive_from_another_process_and_all_new_afterwards() -> None:
    target = zeros_like(big_state())
    moving, seen = Moving(), 0
    with servers(1, rate=64e6) as (_, addresses):
        pending = ahead(addresses, target, moving)
        while not pending.done():
            assert not any(bool(weight.any()) for weight in weights(target))
            assert target["lr"] == 0.0
            seen += moving.bytes.is_set()
            time.sleep(0.01)
        assert seen > 3
        assert pending.report is not None
        assert pending.report.held_bytes == sum(weight.nbytes for weight in weights(target))
        fetched = pending.install()
        assert_exact(big_state(), fetched.state, in_place=True)
        assert target["lr"] == 0.1
        assert fetched.report is pending.report


def test_a_source_that_is_killed_leaves_the_target_as_it_was() -> None:
    target, moving = zeros_like(big_state()), Moving()
    with servers(1) as (fleet, addresses):
        pending = ahead(addresses, target, moving)
        assert moving.bytes.wait(DEADLINE)
        fleet.kill(0)
        wait_until(pending.done)
    assert isinstance(pending.error, transfuse.PeerError)
    with pytest.raises(transfuse.PeerError) as caught:
        pending.install()
    assert caught.value is pending.error
    assert caught.value.torn == ()
    assert not any(bool(weight.any()) for weight in weights(target))
    assert target["lr"] == 0.0


def test_one_of_two_sources_is_killed_and_the_other_one_brings_the_rest() -> None:
    target, moving = zeros_like(big_state()), Moving()
    with servers(2) as (fleet, addresses):
        pending = ahead(addresses, target, moving)
        assert moving.bytes.wait(DEADLINE)
        fleet.kill(1)
        assert_exact(big_state(), pending.install().state, in_place=True)


def test_closed_in_the_middle_the_server_goes_on_and_nothing_is_left() -> None:
    target, moving = zeros_like(big_state()), Moving()
    with servers(1) as (_, addresses):
        transfuse.fetch(addresses[0], token=TOKEN, timeout=LONG, entry="lr")  # Threads and modules that stay.
        tasks, files = own_tasks(), own_files()
        with ahead(addresses, target, moving) as pending:
            assert moving.bytes.wait(DEADLINE)
        wait_until(pending.done)
        nothing_is_left(tasks, files)
        assert not any(bool(weight.any()) for weight in weights(target))
        assert transfuse.fetch(addresses[0], token=TOKEN, timeout=LONG, entry="lr").state == 0.1


def test_closed_while_nobody_answers() -> None:
    with transfuse.serve(some_state(), token=TOKEN, timeout=LONG) as server, server.mutating():
        with transfuse.fetch(
            server.address, zeros_like(some_state()), token=TOKEN, timeout=LONG, wait=False
        ) as pending:
            assert not pending.done()
        wait_until(pending.done)


# ------------------------------------------------------------------------------------------------------------- objects


class Counted:
    """An object that says how often it was given its state."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.loads = state["count"], self.loads + 1


def test_objects_values_and_the_step_are_installed_together_and_training_goes_on_meanwhile() -> None:
    torch.manual_seed(0)
    trainer, engine = nn.Linear(300, 300), nn.Linear(300, 300)
    state, counted = {"model": engine, "counter": Counted(0), "epoch": 0}, [0]
    before = engine.weight.detach().clone()
    served = {"model": trainer, "counter": Counted(7), "epoch": 5}
    with transfuse.serve(served, step=lambda: counted[0], timeout=LONG) as server:
        pending = transfuse.fetch(server.address, state, wait=False)
        wait_for(pending)
        weight = trainer.weight.detach().clone()
        with server.mutating():  # The server's lock is free: nobody reads.
            trainer.weight.data.add_(1)
            counted[0] = 1
        assert torch.equal(engine.weight, before)
        assert (state["counter"].count, state["epoch"]) == (0, 0)  # type: ignore[attr-defined]
        fetched = pending.install()
    assert fetched.step == 0
    assert torch.equal(engine.weight, weight)
    assert not torch.equal(engine.weight, trainer.weight)
    assert (state["counter"].count, state["counter"].loads, state["epoch"]) == (7, 1, 5)  # type: ignore[attr-defined]


def test_a_model_whose_parameters_have_moved_is_refused() -> None:
    """What ``state_dict()`` returned at first still lies where it lay."""
    trainer, engine = nn.Linear(30, 30), nn.Linear(30, 30)
    with transfuse.serve(trainer) as server, transfuse.fetch(server.address, engine, wait=False) as pending:
        wait_for(pending)
        engine.weight.data = engine.weight.data.clone()
        before = engine.bias.detach().clone()
        with pytest.raises(transfuse.StateError, match="not what it was when this was fetched"):
            pending.install()
        assert torch.equal(engine.bias, before)


def test_a_load_that_raises_may_be_tried_again() -> None:
    class Failing(Counted):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            if self.loads == 1:
                raise OSError("not now")

    state = {"w": torch.zeros(10), "object": Failing(0)}
    with transfuse.serve({"w": torch.ones(10), "object": Counted(3)}) as server:
        pending = transfuse.fetch(server.address, state, wait=False)
        with pytest.raises(transfuse.StateError, match="not now"):
            pending.install()
        assert isinstance(pending.install(), Fetched)
    assert state["object"].loads == 2  # type: ignore[attr-defined]


def test_a_callable_with_load_takes_it_at_install() -> None:
    taken: list[Any] = []
    with transfuse.serve({"w": torch.ones(5)}) as server:
        pending = transfuse.fetch(server.address, lambda: {"w": torch.zeros(5)}, load=taken.append, wait=False)
        wait_for(pending)
        assert taken == []
        pending.install()
    assert torch.equal(taken[0]["w"], torch.ones(5))


# ------------------------------------------------------------------------------------------------------ wrong calls


def test_wrong_arguments_are_refused_at_once_and_missing_servers_by_install() -> None:
    with pytest.raises(TypeError, match="wait takes True or False"):
        transfuse.fetch("127.0.0.1:1", wait=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="cast"):
        transfuse.fetch("127.0.0.1:1", {}, wait=False, cast=3)  # type: ignore[call-overload]
    pending = transfuse.fetch("127.0.0.1:1", {}, wait=False, timeout=5)
    wait_until(pending.done)
    assert isinstance(pending.error, transfuse.PeerError)
    with pytest.raises(transfuse.PeerError):
        pending.install()


# ------------------------------------------------------------------------------------------ interrupts, forks, exits


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_install_waits_changes_nothing() -> None:
    target, moving = zeros_like(big_state()), Moving()

    def interrupt() -> None:
        moving.bytes.wait(DEADLINE)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with servers(1) as (_, addresses), ahead(addresses, target, moving) as pending:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            pending.install()
        thread.join()
        assert not any(bool(weight.any()) for weight in weights(target))
        assert_exact(big_state(), pending.install().state, in_place=True)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_the_target_is_written_comes_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, target, write = some_state(), zeros_like(some_state()), HeldLanding.install
    interrupted: list[bool] = []

    def install(held: HeldLanding, *args: Any) -> None:
        if not interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.append(True)
        write(held, *args)

    monkeypatch.setattr(HeldLanding, "install", install)
    with transfuse.serve(sent) as server:
        pending = transfuse.fetch(server.address, target, wait=False)
        with pytest.raises(KeyboardInterrupt):
            pending.install()
        assert_exact(sent["model"], target["model"], in_place=True)
        assert target["lr"] == 0.0  # What is given to objects and mappings has not been given yet.
        pending.install()
    assert target["lr"] == 0.1


def test_a_fork_installs_nothing_and_disturbs_nothing() -> None:
    sent, target = some_state(), zeros_like(some_state())
    with transfuse.serve(sent) as server:
        pending = transfuse.fetch(server.address, target, wait=False)
        wait_for(pending)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pending.install()
            except transfuse.StateError as error:
                pending.close()
                code = 0 if "forked" in str(error) and not target["model"]["w0"].any() else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert_exact(sent, pending.install().state, in_place=True)


def test_a_process_may_end_while_bytes_arrive(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "ends.py"
    program.write_text(
        "import sys, threading, transfuse\n"
        "moving = threading.Event()\n"
        "def show(progress):\n"
        "    if progress[0].bytes:\n"
        "        moving.set()\n"
        "pending = transfuse.fetch(sys.argv[1], token=sys.argv[2], same_host=False, wait=False, progress=show)\n"
        "assert moving.wait(60)\n"
        "print(pending)\n"
    )
    with servers(1) as (_, addresses):
        (ended,) = run_program(program, arguments=[addresses[0], TOKEN])
    assert (ended.code, ended.out, ended.err) == (0, "<transfuse.Pending: under way>\n", ""), str(ended)
