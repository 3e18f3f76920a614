"""Actors of a real Ray exchange tensors over transfuse."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

# A cluster of our own that asks for a token of its own. Its workers compete with other tests: with Ray's niceness of 15
# they would not start within minutes, and Ray would end actors that wait for an object for a minute. Ray reads these
# once, on import.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_rdt_fetch_fail_timeout_milliseconds": "200000",
}
pytest.importorskip("ray", reason="needs transfuse[ray]")

import ray
from ray.exceptions import GetTimeoutError, RayDirectTransportError, RayTaskError
from ray.experimental import set_target_for_ref
from ray.experimental.rdt.rdt_store import __ray_abort_transport__

import ray_actors
import transfuse
from ray_actors import BIG, Phoenix, Worker, some_tensors
from transfuse.integrations import ray as over_transfuse
from transfuse.testing.exact import differences

ROOT = pathlib.Path(__file__).parents[2]
HELPERS = pathlib.Path(ray_actors.__file__).parent
DEADLINE = 240.0

pytestmark = [pytest.mark.timeout(600), pytest.mark.processes]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets need a short path.
    with pytest.MonkeyPatch.context() as patch:
        # Workers inherit it.
        paths = [str(HELPERS), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("OMP_NUM_THREADS", "1")
        try:
            ray.init(
                "local",
                num_cpus=2,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=128 << 20,
                log_to_driver=False,
                logging_level="error",
                _temp_dir=folder,
            )
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def started(cluster: None) -> list[Any]:
    """All actors that tests need: they start side by side."""
    made = [Worker.remote(), Worker.remote(), Worker.remote(), Worker.options(name="victim").remote()]
    get([one.pid.remote() for one in made])
    return made


@pytest.fixture(scope="module")
def workers(started: list[Any]) -> list[Any]:
    """A sender and a receiver."""
    return started[:2]


def get(refs: Any) -> Any:
    return ray.get(refs, timeout=DEADLINE)


def until(fact: Callable[[], object]) -> None:
    """Wait for a fact."""
    end = time.monotonic() + DEADLINE
    while not fact():
        assert time.monotonic() < end, "it has not come to be"
        time.sleep(0.02)


# -------------------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("method", ["some", "some_over_the_network"])
def test_what_arrives_is_what_was_returned(workers: list[Any], method: str) -> None:
    sender, receiver = workers
    made = getattr(sender, method).remote()
    assert get([receiver.compare.remote(made), receiver.same.remote(made)]) == [[], True]
    assert not differences(some_tensors(), get(made))


def test_by_which_route(workers: list[Any]) -> None:
    """64 MiB from memory to memory on one host, and over the network if the memory route is ruled out."""
    sender, receiver = workers
    assert get(receiver.is_count.remote(sender.count.remote(BIG), BIG))
    near = get(receiver.reports.remote())[-1]
    assert (near.direction, near.route, near.bytes, near.error) == ("receive", "memory", 4 * BIG, None)
    assert get(receiver.is_count.remote(sender.count_over_the_network.remote(BIG), BIG))
    far = get(receiver.reports.remote())[-1]
    assert (far.route, far.bytes, far.verified) == ("group", 4 * BIG, True)
    until(lambda: [one.route for one in get(sender.reports.remote()) if one.bytes == 4 * BIG] == ["memory", "group"])


def test_an_object_comes_alone(workers: list[Any]) -> None:
    """However many others the sender holds."""
    sender, receiver = workers
    others = [sender.count.remote(1000 + i) for i in range(20)]
    assert get(receiver.is_count.remote(sender.count.remote(10), 10))
    report = get(receiver.reports.remote())[-1]
    assert (report.leaves, report.bytes) == (1, 40)
    del others


def test_within_one_actor_nothing_moves(workers: list[Any]) -> None:
    sender, _ = workers
    before = len(get(sender.reports.remote()))
    assert get(sender.is_count.remote(sender.count.remote(100), 100))
    assert len(get(sender.reports.remote())) == before


def test_an_object_without_tensors(workers: list[Any]) -> None:
    sender, receiver = workers
    made = sender.nothing.remote()
    assert get(receiver.take.remote(made)) == "dict"
    assert get(made) == {"no": "tensor"}


def test_from_actor_to_actor_to_actor(workers: list[Any]) -> None:
    first, second = workers
    doubled = first.double.remote(second.double.remote(first.count.remote(100)))
    assert get(second.sizes.remote(doubled)) == [4 * 99 * 100 / 2]


def test_the_driver_puts_and_gets(workers: list[Any]) -> None:
    _, receiver = workers
    put = ray.put(some_tensors(), _tensor_transport="local")
    assert get(receiver.compare.remote(put)) == []
    ones = [ray.put(torch.ones(7), _tensor_transport="local") for _ in range(3)]
    assert get(receiver.fetch_whole.remote(ones)) == [True] * 3


def test_many_at_once(workers: list[Any]) -> None:
    """Every actor sends to every other one, several objects in one call; and the driver gets all of them at once."""
    made = {(sender, i): workers[sender].count.remote(1000 + i, 100 * sender) for sender in (0, 1) for i in range(6)}
    sums = {(sender, i): float(sum(range(100 * sender, 100 * sender + 1000 + i))) for sender, i in made}
    answers = [
        (sender, workers[1 - sender].sizes.remote(*(made[sender, i] for i in range(6)))) for sender in (0, 1) * 3
    ]
    for sender, answer in answers:
        assert get(answer) == [sums[sender, i] for i in range(6)]
    assert [float(one.sum()) for one in get(list(made.values()))] == list(sums.values())


def test_the_nodes_own_address_is_the_default(workers: list[Any]) -> None:
    """Receivers of other hosts can reach it."""
    put = ray.put(torch.ones(7), _tensor_transport="transfuse")
    assert ray_actors.manager("TRANSFUSE")._server.address.startswith(ray.util.get_node_ip_address() + ":")
    assert get(workers[0].sizes.remote(put)) == [7.0]


# ------------------------------------------------------------------------------------------------------------- targets


def test_tensors_land_in_buffers(workers: list[Any]) -> None:
    made, buffer = workers[0].count.remote(1000), torch.zeros(1000)
    set_target_for_ref(made, [buffer])
    assert get(made) is buffer
    assert torch.equal(buffer, torch.arange(1000.0))


def test_a_buffer_of_another_shape_is_refused(workers: list[Any]) -> None:
    made, buffer = workers[0].count.remote(1000), torch.zeros(999)
    set_target_for_ref(made, [buffer])
    with pytest.raises(ValueError, match=r"Shape of tensor_buffer at index 0 .*999.* does not match .*1000"):
        get(made)
    # Also if Ray did not look.
    transport = ray_actors.manager()
    served = ray._private.worker.global_worker.rdt_manager.get_rdt_metadata(made.hex()).tensor_transport_meta
    with pytest.raises(RayDirectTransportError, match=r"TargetMismatch(.|\n)*\['tensor 0'\].*999") as told:
        transport.recv_multiple_tensors(made.hex(), served, None, [buffer])
    assert f"object {made.hex()} of Actor" in str(told.value)
    assert f"at {served.address} has not arrived" in str(told.value)
    assert not buffer.any()


def test_after_a_timeout_a_buffer_is_left_alone(workers: list[Any]) -> None:
    sender, _ = workers
    made, buffer = sender.count_slowly.remote(), torch.zeros(BIG)
    set_target_for_ref(made, [buffer])
    get(sender.pid.remote())
    transport = ray_actors.manager("SLOW")
    with ThreadPoolExecutor(1) as thread:
        seen = thread.submit(until, lambda: any(fetch._landing for fetch in list(transport._fetches)))
        with pytest.raises(GetTimeoutError):
            ray.get(made, timeout=3)
        seen.result()
    then = buffer.clone()
    # The sender learns of it, and the buffer stays as it is.
    until(lambda: any(one.error is not None for one in get(sender.reports.remote())))
    assert torch.equal(buffer, then)
    assert buffer[-1] == 0


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_example(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("ray_transport", ROOT / "examples" / "ray_transport.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.show()
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"receive from 0, any step: 4\.0 MiB by memory in .*, 2 leaves, .*", said.pop(1))
    assert [line for line in said if "(raylet)" not in line] == [
        "the generator has the trainer's weights: True",
        "the trainer is dead",
        "the generator got an error that names the trainer: True",
        "the generator lives on: True",
    ]
    # Actors that are up, and objects that are not ready when the task that needs them is sent.
    trainer, generator = example.Trainer.remote(), example.Generator.remote()
    checksum = get([trainer.checksum.remote(), generator.__ray_ready__.remote()])[0]
    for _ in range(3):
        assert get(generator.update.remote(trainer.weights.remote())) == checksum


def test_without_ray_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['ray'] = None; import transfuse.integrations.ray"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert "pip install 'transfuse[ray]'" in ended.stderr


# -------------------------------------------------------------------------------------------------- freed, and refused


def test_an_object_that_nobody_names_is_freed(workers: list[Any]) -> None:
    sender, receiver = workers
    until(lambda: get(sender.held.remote()) == 0)
    made = sender.watched.remote(1000)
    assert get(receiver.sizes.remote(made)) == [1000.0]
    assert get(sender.held.remote()) == 1
    assert not get(sender.freed.remote())
    del made
    until(lambda: get(sender.held.remote()) == 0)
    assert get(sender.freed.remote())


def test_a_freed_object_is_refused(workers: list[Any]) -> None:
    sender, _ = workers
    made = sender.count.remote(10)
    get(made)
    served = ray._private.worker.global_worker.rdt_manager.get_rdt_metadata(made.hex()).tensor_transport_meta
    assert served.token not in repr(served)
    gone = made.hex()
    del made
    until(lambda: get(sender.held.remote()) == 0)
    with pytest.raises(
        RayDirectTransportError, match=rf"object {gone} of Actor.* refused: StateError: .* no entry"
    ) as told:
        ray_actors.manager().recv_multiple_tensors(gone, served, None)
    assert "rank" not in str(told.value)


def test_a_stranger_without_the_token_gets_nothing(workers: list[Any]) -> None:
    made = workers[0].count.remote(10)
    get(made)
    served = ray._private.worker.global_worker.rdt_manager.get_rdt_metadata(made.hex()).tensor_transport_meta
    with pytest.raises(transfuse.PeerRefused, match="WrongToken"):
        transfuse.fetch(served.address, token="a guess", entry=made.hex())


def test_another_device_is_refused_where_the_object_is_made(workers: list[Any]) -> None:
    sender, receiver = workers
    with pytest.raises((RayTaskError, ValueError), match=r"registered for tensors on \['cpu'\], got one on meta"):
        get(receiver.take.remote(sender.meta.remote()))
    assert get(receiver.is_count.remote(sender.count.remote(10), 10))


def test_registering_twice_is_once() -> None:
    ray_actors.register()
    with pytest.raises(ValueError, match="TRANSFUSE is registered already with other settings"):
        over_transfuse.register(timeout=61)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"timeout": "30"}, r"timeout takes a timedelta, or a number of seconds, got str '30'"),
        ({"max_readers": 0}, "max_readers must be at least 1"),
        ({"verify": "sometimes"}, "verify takes"),
        ({"max_bytes_per_second": "1G"}, "max_bytes_per_second takes"),
        ({"name": 7}, "name takes a text, got 7"),
        ({"name": ""}, "name takes a text, got ''"),
        ({"name": "gloo"}, "GLOO is a transport of Ray's own: choose another name"),
        ({"name": "object_store"}, "OBJECT_STORE is a transport of Ray's own: choose another name"),
        ({"devices": "cpu"}, "devices takes types of device as .*, got 'cpu'"),
        ({"devices": []}, r"devices takes types of device as .*, got \[\]"),
        ({"devices": ["cpu", "cpuu"]}, "got 'cpuu' among"),
        ({"devices": ["cuda:0"]}, "got 'cuda:0' among"),
        ({"host": 5}, "host takes an address as a text, got 5"),
    ],
)
def test_wrong_settings_are_refused_where_they_are_given(wrong: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        over_transfuse.register(**{"name": "WRONG", **wrong})


def test_an_address_of_another_node_is_named() -> None:
    over_transfuse.register("AWAY", host="192.0.2.77")
    with pytest.raises(OSError, match=r"the driver on node \w+ cannot listen on 192.0.2.77 for the transport AWAY: "):
        ray.put(torch.ones(3), _tensor_transport="AWAY")


# -------------------------------------------------------------------------------------------------------- killed actors


def test_a_sender_is_killed_while_it_is_read(workers: list[Any], started: list[Any]) -> None:
    (sender, receiver), victim = workers, started[3]
    answer = receiver.take.remote(victim.count_slowly.remote())
    until(lambda: get(receiver.fetching.remote("SLOW")))
    ray.kill(victim)
    with pytest.raises(RayDirectTransportError, match=r"Actor\(.*named 'victim'.* has not arrived: PeerLost") as told:
        get(answer)
    assert "rank 0" not in str(told.value)
    assert "PeerLost" in str(get(receiver.reports.remote())[-1].error)
    # The receiver lives on, and can receive.
    assert get(receiver.is_count.remote(sender.count.remote(10), 10))


def test_a_receiver_is_killed_while_it_reads(workers: list[Any], started: list[Any]) -> None:
    (sender, receiver), victim = workers, started[2]
    before = len(get(sender.reports.remote()))
    answer = victim.take.remote(sender.count_slowly.remote())
    until(lambda: get(victim.fetching.remote("SLOW")))
    os.kill(get(victim.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.ActorDiedError):
        get(answer)
    # The sender hears of it, lives on, and serves others.
    until(lambda: any(one.error is not None for one in get(sender.reports.remote())[before:]))
    assert get(receiver.is_count.remote(sender.count.remote(10), 10))


def test_ray_aborts_a_transfer_and_both_actors_live_on(workers: list[Any]) -> None:
    sender, receiver = workers
    pids = get([sender.pid.remote(), receiver.pid.remote()])
    made = sender.count_slowly.remote()
    answer = receiver.take.remote(made)
    until(lambda: get(receiver.fetching.remote("SLOW")))
    before = len(get(sender.reports.remote()))
    # As Ray does it when a transfer takes too long.
    get(
        receiver.__ray_call__.options(concurrency_group="_ray_system_error").remote(
            __ray_abort_transport__, made.hex(), None, "SLOW"
        )
    )
    with pytest.raises(RayDirectTransportError, match="InterruptedError: Ray has aborted the transfer"):
        get(answer)
    until(lambda: any("Ray has aborted" in str(one.failed) for one in get(sender.reports.remote())[before:]))
    until(lambda: not get(receiver.fetching.remote("SLOW")))
    assert get([sender.pid.remote(), receiver.pid.remote()]) == pids
    assert get(receiver.is_count.remote(sender.count.remote(10), 10))


def settings_of(timeout: float) -> over_transfuse.Settings:
    return over_transfuse.Settings(
        name="X",
        devices=("cpu",),
        host=None,
        timeout=timeout,
        max_readers=1,
        same_host=False,
        verify=None,
        max_bytes_per_second=None,
    )


def test_an_error_speaks_of_the_object_the_sender_and_the_tensor() -> None:
    """Ray's users know no ranks, and no leaves of a list."""

    def told(address: str, entry: str, targets: list[torch.Tensor] | None, timeout: float = 30.0) -> str:
        served = over_transfuse.Served([], "cpu", address=address, token="t", sender="the actor")
        fetch = over_transfuse._ObjectFetch(settings_of(timeout), entry, served, targets)
        fetch.run()
        with pytest.raises(RayDirectTransportError) as error:
            fetch.wait(DEADLINE)
        assert f"object {entry} of the actor at {address} has not arrived: " in str(error.value)
        assert "rank" not in str(error.value)
        return str(error.value)

    made = over_transfuse._named([torch.ones(2), torch.ones(3)])
    with transfuse.serve({"one": made}, token="t") as server:
        text = told(server.address, "one", [torch.zeros(2), torch.zeros(4)])
        assert "TargetMismatch" in text
        assert "['tensor 1']: shape" in text
        assert "no entry" in told(server.address, "two", None)
    assert "PeerLost" in told(server.address, "one", None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        text = told(f"127.0.0.1:{silent.getsockname()[1]}", "one", None, 0.5)
    assert "PeerTimeout: the sender made no progress for " in text
    assert "longer timeout=" in text


def test_a_fetch_that_its_own_thread_cancels_ends() -> None:
    """The garbage collector drops a request in any thread, also in the one that fetches, with the fetch's lock held."""
    source = over_transfuse._named([torch.ones(1 << 20)])
    settings = settings_of(30.0)
    with transfuse.serve({"one": source}, token="t") as server:
        served = over_transfuse.Served([], "cpu", address=server.address, token="t")

        class Dropped(over_transfuse._ObjectFetch):
            def _show(self, progress: dict[int, transfuse.Progress]) -> None:
                super()._show(progress)
                if progress:
                    with self._lock:
                        self.cancel("nobody waits for it any more")

        fetch = Dropped(settings, "one", served, [torch.zeros(1 << 20)])
        thread = threading.Thread(target=fetch.run, daemon=True)
        thread.start()
        with pytest.raises(RayDirectTransportError, match="nobody waits"):
            fetch.wait(DEADLINE)
        thread.join(DEADLINE)
        assert not thread.is_alive()


@pytest.mark.soak
def test_ray_gives_up_a_transfer_that_takes_too_long(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by Ray's own watch, which would kill both actors of a transport that cannot be aborted."""
    sender, receiver = workers
    pids = get([sender.pid.remote(), receiver.pid.remote()])
    made = sender.count_slowly.remote()
    get(sender.pid.remote())
    # Ray gives a transfer a minute. This process watches over it.
    monkeypatch.setattr(ray._private.ray_constants, "RDT_FETCH_FAIL_TIMEOUT_SECONDS", 5.0)
    with pytest.raises(RayDirectTransportError, match="InterruptedError: Ray has aborted the transfer"):
        get(receiver.take.remote(made))
    assert get([sender.pid.remote(), receiver.pid.remote()]) == pids
    assert get(receiver.is_count.remote(sender.count.remote(10), 10))


@pytest.mark.soak
def test_an_actor_that_ray_restarts_sends_and_receives_again(workers: list[Any]) -> None:
    sender, receiver = workers
    phoenix = Phoenix.remote()  # type: ignore[attr-defined]
    first = get(phoenix.pid.remote())
    assert get(receiver.sizes.remote(phoenix.ones.remote())) == [7.0]
    os.kill(first, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return bool(get(phoenix.pid.remote()) != first)
        except ray.exceptions.ActorUnavailableError:
            return False

    until(is_back)
    assert get(receiver.sizes.remote(phoenix.ones.remote())) == [7.0]
    assert get(phoenix.total.remote(sender.count.remote(4))) == 6.0


@pytest.mark.soak
def test_a_frozen_sender_is_given_up_and_wakes_up_unharmed(workers: list[Any], started: list[Any]) -> None:
    """Ray has no part in this: the receiver's own timeout ends the fetch."""
    sender, receiver = workers
    made = sender.count_quickly_given_up.remote()
    get(sender.pid.remote())
    pid = get(sender.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(
            RayDirectTransportError, match=r"(?s)PeerTimeout: the sender made .*HASTY allows 3 s"
        ) as told:
            get(receiver.take.remote(made))
        assert "rank" not in str(told.value)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert get(receiver.is_count.remote(made, 1000))
    assert get(sender.pid.remote()) == pid
