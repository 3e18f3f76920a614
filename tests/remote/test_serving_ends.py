"""How serving and fetching end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import pytest
import torch

import transfuse
from serving import (
    DEADLINE,
    LONG,
    TOKEN,
    Halt,
    all_it_says,
    big_state,
    come_in,
    fetch_until_interrupted,
    get_ready,
    nothing_is_left,
    own_files,
    own_tasks,
    plain_state,
    wait_until,
)
from transfuse._session.source import OfferedState
from transfuse._wire.handshake import Ready, split_address
from transfuse.testing.exact import differences
from transfuse.testing.ranks import Fleet

# How it ends


def test_close_waits_for_who_reads_and_tells_who_waits(executor: ThreadPoolExecutor) -> None:
    state, halt = plain_state(), Halt()
    server = transfuse.serve(state, max_readers=1, timeout=LONG)
    reads = executor.submit(halt.fetch, server.address)
    assert halt.reached.wait(DEADLINE)
    waits = executor.submit(transfuse.fetch, server.address, timeout=LONG)
    stranger = socket.create_connection(split_address(server.address))
    wait_until(lambda: len(server._listener.connections) == 3)
    wait_until(lambda: len(server._listener.strangers) == 1)
    closes = executor.submit(server.close)
    with pytest.raises(transfuse.PeerRefused, match=f"{server.address} was closed"):
        waits.result(DEADLINE)
    assert all_it_says(stranger) == b""
    stranger.close()
    assert not closes.done()
    halt.go_on.set()
    assert not differences(state, reads.result(DEADLINE))
    closes.result(DEADLINE)
    server.close()
    with pytest.raises(transfuse.PeerLost, match=server.address):
        transfuse.fetch(server.address)


def test_cancel_cuts_off_who_reads(executor: ThreadPoolExecutor) -> None:
    """Also who has not begun yet. The state may be changed as soon as the block has been left."""
    halt, formed = Halt(), threading.Event()

    def form(address: str) -> None:
        with contextlib.closing(come_in(address)) as door:
            formed.set()
            door.expect(Ready, 20.0, "waiting", 400)

    def leave() -> None:
        with transfuse.serve(plain_state(), timeout=LONG) as server:
            cut.append(executor.submit(halt.fetch, server.address))
            cut.append(executor.submit(form, server.address))
            assert halt.reached.wait(DEADLINE)
            assert formed.wait(DEADLINE)
            raise ZeroDivisionError

    cut: list[Future[Any]] = []
    with pytest.raises(ZeroDivisionError):
        leave()
    halt.go_on.set()
    for one in cut:
        with pytest.raises(transfuse.PeerRefused, match=r"the server at 127.0.0.1:\d+ was closed"):
            one.result(DEADLINE)


@pytest.mark.parametrize("kind", ["server", "hub"])
def test_what_is_closed_holds_the_state_no_longer(kind: str) -> None:
    """At once, and not when Python next collects what refers to each other."""
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    gc.disable()
    try:
        closed: Any = transfuse.serve({"w": tensor}) if kind == "server" else transfuse.hub({"w": tensor})
        if kind == "server":
            transfuse.fetch(closed.address)
        else:
            urlopen(f"{closed.endpoint}/api/models/live/model").close()
        closed.close()
        del tensor
        wait_until(lambda: gone() is None)
    finally:
        gc.enable()
    assert closed, "it was there all the time"


def test_a_process_ends_with_a_server_still_open(executor: ThreadPoolExecutor) -> None:
    """While one reads, another waits, and a stranger says nothing."""
    script = """
        import torch, transfuse
        from datetime import timedelta
        server = transfuse.serve({"w": torch.arange(1000.0)}, max_readers=1, timeout=timedelta(seconds=20))
        transfuse.serve({})
        print(server.address, flush=True)
        input()
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with (
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environ, text=True, **pipes) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        address, halt = process.stdout.readline().strip(), Halt()
        reads = executor.submit(halt.fetch, address)
        stack.callback(halt.go_on.set)
        assert halt.reached.wait(DEADLINE)
        waits = executor.submit(transfuse.fetch, address)
        stack.enter_context(socket.create_connection(split_address(address)))
        with pytest.raises(TimeoutError):
            waits.result(0.5)
        said = process.communicate("end\n", timeout=DEADLINE)
        # Its log, and nothing that torch or the interpreter says.
        assert process.returncode == 0, said
        assert all("was closed" in line for line in "".join(said).splitlines()), said
        halt.go_on.set()
        for one in (reads, waits):
            with pytest.raises(transfuse.PeerError):
                one.result(DEADLINE)


def test_nothing_is_left_of_who_was_cut_off() -> None:
    """It never says what it wants. The thread that waits for it ends with the server, while the reader stays."""
    with transfuse.serve(plain_state(), timeout=LONG) as server:
        transfuse.fetch(server.address)
    gc.collect()
    tasks, files = own_tasks(), own_files()
    server = transfuse.serve(plain_state(), timeout=LONG)
    with contextlib.closing(get_ready(come_in(server.address), server.address)):
        server.close(cancel=True)
        wait_until(lambda: own_tasks() <= tasks)
    nothing_is_left(tasks, files)


def test_no_state_stays_until_garbage_is_collected() -> None:
    """A job may have switched the collector off, and what is served may be a copy."""
    gc.collect()
    gc.disable()
    try:
        with transfuse.serve(plain_state, step=3, timeout=LONG) as server:
            transfuse.fetch(server.address, same_host=False)
            transfuse.fetch(server.address)
            with pytest.raises(transfuse.StepMismatch):
                transfuse.fetch(server.address, step=4)
            wait_until(lambda: not server._listener.connections)
            assert not [one for one in gc.get_objects() if type(one) is OfferedState]
    finally:
        gc.enable()


def test_a_report_may_close_its_server(caplog: pytest.LogCaptureFixture) -> None:
    server = transfuse.serve(plain_state(), timeout=LONG, on_report=lambda report: server.close())
    assert not differences(plain_state(), transfuse.fetch(server.address).state)
    wait_until(lambda: not server._listener.connections)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with pytest.raises(transfuse.PeerLost, match="cannot be reached"):
        transfuse.fetch(server.address)
    server.close()


def test_the_end_of_a_fork_is_not_the_end_of_the_server() -> None:
    script = """
        import os, sys, torch, transfuse
        with transfuse.serve({"w": torch.arange(1000.0)}) as server:
            if (child := os.fork()) == 0:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            print(len(transfuse.fetch(server.address).state["w"]))
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    # Newer versions of Python warn of forks of processes with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)]
    said = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=DEADLINE, check=False)
    assert (said.returncode, said.stdout) == (0, "1000\n"), said.stderr


def test_ctrl_c_ends_a_fetch_and_the_server_goes_on() -> None:
    """At a door where nobody answers, before a state that is being changed, and in the middle of a transfer."""
    state = big_state()
    with (
        Fleet(3) as fleet,
        socket.create_server(("127.0.0.1", 0)) as silent,
        transfuse.serve(state, token=TOKEN, timeout=10 * LONG) as locked,
        transfuse.serve(state, token=TOKEN, timeout=10 * LONG, max_bytes_per_second=1e6, same_host=False) as slow,
    ):
        with locked.mutating(), contextlib.ExitStack() as stack:
            addresses = [f"127.0.0.1:{silent.getsockname()[1]}", locked.address, slow.address]
            fleet.start(fetch_until_interrupted, addresses)
            silent.settimeout(DEADLINE)
            visitor = stack.enter_context(silent.accept()[0])
            assert visitor.recv(1)
            wait_until(lambda: len(locked._live.rwlock._waiting) == 1)
            fleet.wait_for(2, "moving")
            for rank in range(3):
                fleet.signal(rank, signal.SIGINT)
            assert [outcome.get() for outcome in fleet.outcomes(DEADLINE)] == ["interrupted"] * 3
            wait_until(lambda: not locked._listener.connections and not slow._listener.connections)
        assert not differences(state, transfuse.fetch(locked.address, token=TOKEN).state)
        with slow.mutating():
            pass


def test_ctrl_c_leaves_nothing_of_a_fetch_from_a_server_that_says_nothing(interruptible: None) -> None:
    tasks, files = own_tasks(), own_files()
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def interrupt() -> None:
            with silent.accept()[0] as connection:
                connection.recv(1)  # It is in the handshake.
                signal.raise_signal(signal.SIGINT)
                nothing_is_left(tasks + 1, files + 2)  # This thread, this connection, and the port.

        with ThreadPoolExecutor(1) as stranger:
            left = stranger.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                transfuse.fetch(f"127.0.0.1:{silent.getsockname()[1]}", timeout=DEADLINE)
            left.result()
