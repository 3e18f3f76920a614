"""``init_method="transfuse://"``: ranks that are started again meet in a round of their own, and nobody who is dead.

Under torchrun this file is also the worker's program: ``test_rendezvous.py <directory> <deaths>``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

import transfuse
from keeping import Home, home  # noqa: F401
from transfuse._errors import PeerTimeout, TransfuseError
from transfuse._keeper import rendezvous, runs
from transfuse.testing.ranks import loopback_store, run_program

HOST = "127.0.0.1"
SECONDS = 120.0
TIMEOUT = timedelta(seconds=SECONDS)

# ----------------------------------------------------------------------------------------- ranks as threads


class Agent:
    """A store that outlives ranks, and ranks as threads. Each test has a part of the store to itself."""

    def __init__(self) -> None:
        self.server = loopback_store(TIMEOUT)
        self.threads = ThreadPoolExecutor(8)
        self.tests = 0
        # Few connections: torch asks the name service about each, and some answers take seconds.
        self.connections = [self._connect() for _ in range(6)]

    def _connect(self) -> TCPStore:
        return TCPStore(HOST, self.server.port, None, False, TIMEOUT, wait_for_workers=False)

    def client(self, rank: int) -> Store:
        return PrefixStore(f"job {self.tests}", self.connections[rank])

    @property
    def hand(self) -> Store:
        """For the test itself."""
        return self.client(-1)

    def start(self, rank: int, world_size: int, seconds: float = SECONDS) -> Future[str]:
        return self.threads.submit(rendezvous.join_round, self.client(rank), rank, world_size, seconds)

    def round(self, world_size: int) -> str:
        """All ranks come and meet."""
        (found,) = {future.result(SECONDS) for future in [self.start(rank, world_size) for rank in range(world_size)]}
        return found

    def read(self, key: str) -> str:
        return rendezvous._read(self.hand, [key])[0]

    def until(self, key: str, is_right: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + SECONDS
        while not is_right(self.read(key)):
            assert time.monotonic() < deadline, (key, self.read(key))
            time.sleep(0.002)
        return self.read(key)


@pytest.fixture(scope="module")
def shared_agent() -> Iterator[Agent]:
    made = Agent()
    with made.threads:
        yield made


@pytest.fixture
def agent(shared_agent: Agent) -> Agent:
    shared_agent.tests += 1
    return shared_agent


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """When it is set, the time of all who wait is over."""
    event = threading.Event()

    def polls(seconds: float) -> Iterator[None]:
        while not event.wait(0.002):
            yield
        yield

    monkeypatch.setattr(rendezvous, "_polls", polls)
    return event


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_start_has_a_round_of_its_own(agent: Agent, world_size: int) -> None:
    rounds = [agent.round(world_size) for _ in range(3)]
    assert len(set(rounds)) == 3
    stores = [rendezvous.round_store(agent.hand, name) for name in rounds]
    for number, store in enumerate(stores):
        store.set("address", str(number))
    assert [store.get("address") for store in stores] == [b"0", b"1", b"2"]


def test_ranks_may_come_in_any_order(agent: Agent) -> None:
    agent.round(3)
    last = agent.start(2, 3)
    agent.until("rank/2", lambda said: " " not in said)
    first = agent.start(0, 3)
    # Rank 2 has its answer, and waits for rank 1 all the same.
    agent.until("rank/2", lambda said: " " in said)
    assert not first.done()
    assert not last.done()
    middle = agent.start(1, 3)
    assert first.result(SECONDS) == middle.result(SECONDS) == last.result(SECONDS)


def test_a_rank_that_dies_on_the_way_is_replaced(agent: Agent) -> None:
    old = agent.round(3)
    first, last = agent.start(0, 3), agent.start(2, 3)
    agent.hand.set("rank/1", "dead")
    answer = agent.until("answer/1", lambda said: said.startswith("dead "))
    agent.hand.set("rank/1", answer)
    # The dead one was in the round, so the ranks begin, and the group fails. That is one restart, and no more.
    new = first.result(SECONDS)
    assert new == last.result(SECONDS) != old
    assert agent.round(3) not in (old, new)


def test_a_dead_rank_does_not_count_once_its_successor_has_come(agent: Agent, late: threading.Event) -> None:
    first = agent.start(0, 3)
    agent.hand.set("rank/1", "dead")
    answer = agent.until("answer/1", lambda said: said.startswith("dead "))
    agent.hand.set("rank/1", answer)
    second = agent.start(1, 3)
    agent.until("rank/1", lambda said: not said.startswith("dead") and " " in said)
    assert not first.done()
    third = agent.start(2, 3)
    assert first.result(SECONDS) == second.result(SECONDS) == third.result(SECONDS)


def test_who_was_in_an_old_round_is_not_in_the_new_one(agent: Agent, late: threading.Event) -> None:
    agent.round(3)
    assert " " in agent.read("rank/1")
    first = agent.start(0, 3)
    agent.until("answer/2", lambda said: said.split()[1] == agent.read("rank/0"))
    late.set()
    with pytest.raises(PeerTimeout, match="rank 0 waited for ranks 1, 2 of 3") as caught:
        first.result(SECONDS)
    assert caught.value.rank == 1


def test_rank_0_dies_and_is_started_again(agent: Agent) -> None:
    second = agent.start(1, 2)
    nonce = agent.until("rank/1", bool)
    agent.hand.set("rank/0", "dead")
    agent.hand.set("answer/1", f"{nonce} dead")
    agent.until("rank/1", lambda said: said == f"{nonce} dead")
    first = agent.start(0, 2)
    assert first.result(SECONDS) == second.result(SECONDS) != "dead"


def test_answers_to_other_nonces_are_not_believed(agent: Agent, late: threading.Event) -> None:
    agent.hand.set("answer/1", "dead round")
    agent.hand.set("begin", "round")
    second = agent.start(1, 2)
    agent.until("rank/1", bool)
    late.set()
    with pytest.raises(PeerTimeout, match="rank 1 waited for rank 0 of 2"):
        second.result(SECONDS)
    assert " " not in agent.read("rank/1")


def test_all_who_have_come_name_those_who_have_not(agent: Agent, late: threading.Event) -> None:
    first, second = agent.start(0, 4), agent.start(1, 4)
    agent.until("rank/1", lambda said: " " in said)
    late.set()
    for rank, future in enumerate([first, second]):
        with pytest.raises(PeerTimeout, match=f"rank {rank} waited for ranks 2, 3 of 4 to come"):
            future.result(SECONDS)


def test_hundreds_of_missing_ranks_are_counted() -> None:
    error = rendezvous._timeout(range(1, 300), 300, 0, 1.0)
    assert "19, 20 and 279 more of 300" in str(error)


def test_the_time_is_bounded(agent: Agent) -> None:
    with pytest.raises(PeerTimeout, match="rank 0 waited for rank 1 of 2"):
        agent.start(0, 2, 0.05).result(SECONDS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_rank_has_been_taken_gives_up(agent: Agent, rank: int) -> None:
    old = agent.start(rank, 3)
    agent.until(f"rank/{rank}", bool)
    agent.hand.set(f"rank/{rank}", "newer")
    with pytest.raises(TransfuseError, match=f"another process has come as rank {rank}"):
        old.result(SECONDS)


def test_hundreds_of_restarts_do_not_fill_the_store(agent: Agent) -> None:
    sizes = set()
    for _ in range(20):
        found = agent.round(2)
        for number in range(5):
            rendezvous.round_store(agent.hand, found).set(f"address {number}", "x")
        rendezvous.remove_old_rounds(agent.hand, {found})
        sizes.add(len(agent.hand.list_keys()))
    assert len(sizes) == 1
    assert rendezvous.round_store(agent.hand, found).get("address 4") == b"x"


def test_only_keys_of_rounds_are_removed(agent: Agent) -> None:
    agent.hand.set("round/a/1", "x")
    agent.hand.set("round/ab/1", "x")
    agent.hand.set("other", "x")
    agent.server.set("round/c/1", "x")
    rendezvous.remove_old_rounds(agent.hand, {"a"})
    assert sorted(agent.hand.list_keys()) == ["other", "round/a/1"]
    assert agent.server.check(["round/c/1"])


# ----------------------------------------------------------------------------------------- what torch calls


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not made a group, and that torchrun has not started."""
    monkeypatch.setattr(rendezvous, "_joined", set())
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC_") or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)


@pytest.fixture
def under_torchrun(fresh: None, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    # One store for all tests: each is another job.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"run {agent.tests}")
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(agent.server.port))


def meet(rank: int, world_size: int) -> tuple[Store, int, int]:
    found: Iterator[tuple[Store, int, int]] = torch_rendezvous("transfuse://", rank, world_size, timeout=TIMEOUT)
    return next(found)


def test_torch_finds_the_handler(under_torchrun: None, agent: Agent) -> None:
    for word in (b"first", b"second"):
        futures = [agent.threads.submit(meet, rank, 2) for rank in range(2)]
        (one, rank, world_size), (other, *_) = [future.result(SECONDS) for future in futures]
        assert (rank, world_size) == (0, 2)
        assert not one.check(["word"])
        one.set("word", word.decode())
        assert other.get("word") == word


def test_rank_and_number_of_ranks_come_from_the_environment(
    under_torchrun: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert meet(-1, -1)[1:] == (0, 1)


def test_a_group_is_made_twice_in_one_process(under_torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for _ in range(2):
        dist.init_process_group("gloo", init_method="transfuse://", rank=0, world_size=1, timeout=TIMEOUT)
        dist.destroy_process_group()


def test_rounds_in_use_are_kept(under_torchrun: None, agent: Agent) -> None:
    first, *_ = meet(0, 1)
    first.set("word", "still here")
    meet(0, 1)
    assert first.get("word") == b"still here"


def test_two_jobs_may_share_a_store(under_torchrun: None, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = meet(0, 1)
    first.set("word", "mine")
    monkeypatch.setattr(rendezvous, "_joined", set())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another run")
    meet(0, 1)
    assert first.get("word") == b"mine"


GROUPS = """
import os, torch.distributed as dist, transfuse
from transfuse._keeper import rendezvous

def needed(method, **options):
    dist.init_process_group("gloo", method, **options)
    found = rendezvous.is_needed()
    end()
    return found

def end():
    dist.barrier()  # Nobody leaves a group that another one is still forming.
    dist.destroy_process_group()

rank = int(os.environ["RANK"])
os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
assert not rendezvous.is_needed()
agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
assert not needed("transfuse://")
assert not needed(None, store=dist.PrefixStore("of the caller", agent), rank=rank, world_size=2)
if rank == 0:
    assert not needed(None, store=dist.HashStore(), rank=0, world_size=1)
init_process_group = dist.init_process_group
transfuse.rendezvous_by_default()
assert not needed(None)
assert not needed("env://")

# torch's own function, imported before, forms a group that keep() refuses. Only once: another one would not form.
init_process_group("gloo")
assert rendezvous.is_needed()
try:
    transfuse.keep(dict)
except transfuse.TransfuseError as error:
    assert 'dist.init_process_group("gloo", init_method="transfuse://")' in str(error), error
    print("refused")
try:
    transfuse.rendezvous_by_default()
except transfuse.TransfuseError as error:
    assert "this comes too late: the process group has been formed already" in str(error), error
    assert "make the KeepCallback" in str(error), error
    print("late")
os.environ["TORCHELASTIC_MAX_RESTARTS"] = "0"
assert not rendezvous.is_needed()
os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
assert not rendezvous.is_needed()
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
end()

# Without a group, keep() forms one.
with transfuse.keep(dict, run="groups") as keep:
    assert (keep.rank, keep.world_size) == (rank, 2)
    assert keep.restore() is None
assert not rendezvous.is_needed()
try:
    dist.init_process_group("gloo")
except transfuse.TransfuseError as error:
    assert "keep() has formed the default process group" in str(error), error
    print("formed")
end()
dist.init_process_group("gloo")
end()
"""


def test_groups_that_a_restarted_job_could_not_form_again(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    program = tmp_path / "groups.py"
    program.write_text(GROUPS)
    ended = run_program(program, 2)
    assert [(rank.code, rank.out.split()) for rank in ended] == [(0, ["refused", "late", "formed"])] * 2, ended


def test_a_framework_that_names_no_method_gets_ours(under_torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *words, **options: seen.append((words, options)))
    for _ in range(2):
        transfuse.rendezvous_by_default()
    dist.init_process_group("gloo", rank=0, world_size=1)
    dist.init_process_group("gloo", init_method="env://")
    dist.init_process_group("gloo", "tcp://here")
    dist.init_process_group(backend="gloo", store=HashStore())
    dist.init_process_group("gloo", None, None, 1, 0, HashStore())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    dist.init_process_group("gloo")
    assert [words[:2] for words, _ in seen] == [
        ("gloo", "transfuse://"),
        ("gloo", "transfuse://"),
        ("gloo", "tcp://here"),
        ("gloo", None),
        ("gloo", None),
        ("gloo", None),
    ]
    assert seen[0][1] == {"rank": 0, "world_size": 1}


def test_without_an_agent_rank_0_hosts_the_store(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(meet, 1, 2)
        store, rank, world_size = meet(0, 2)
        assert (rank, world_size) == (0, 2)
        store.set("word", "x")
        assert other.result(SECONDS)[0].get("word") == b"x"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(under_torchrun: None, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"transfuse://: the environment variable {missing} is not set"):
        meet(-1, -1)


def test_a_rank_that_cannot_be_is_refused(under_torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        meet(2, 2)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ValueError, match="rank must be a number, not 'one'"):
        meet(-1, 2)


# ---------------------------------------------------------------------------------------------- real torchruns

#: A death: a map from rank to the moment at which it dies. Each death is in another start of the job.
Death = dict[str, str]

PLAIN: list[str] = []
ALONE = ["--standalone"]
STATIC = ["--master-addr", HOST, "--master-port", "{port}"]
C10D = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}", "--rdzv-id", "a name"]

SEVERAL: list[Death] = [
    {"1": "run"},
    {"1": "nonce", "3": "nonce"},
    {"0": "nonce"},
    {"2": "round"},
    {"3": "before"},
    {"1": "init", "2": "init"},
    {"0": "run", "3": "run"},
]


def run_torchruns(
    directory: pathlib.Path, arguments: list[str], deaths: list[Death], ranks: int, *, agents: int = 1
) -> list[dict[str, Any]]:
    """Run the job on several torchruns with several ranks each; return what the ranks say in the end."""
    from commands import Running

    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    # Who meets a dead rank fails too, and static agents count that as a restart.
    most = 4 * sum(map(len, deaths))
    words = [word.format(port=port) for word in arguments]
    words += [f"--nnodes={agents}", f"--nproc-per-node={ranks}", f"--max-restarts={most}", "--monitor-interval=0.05"]
    directory.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        running = []
        for number in range(agents):
            node = [f"--node-rank={number}"] if "--master-port" in words else []
            job = Running(
                *(words + node + [__file__, str(directory), json.dumps(deaths)]),
                command=[sys.executable, "-m", "torch.distributed.run"],
                environ={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            running.append(stack.enter_context(job))
        said: list[dict[str, Any]] = []
        for job in running:
            out, err, code = job.end()
            assert code == 0, (out, err)
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            assert all(line["agent"] == job.process.pid for line in lines[-ranks:]), lines
            said += lines[-ranks:]
    # Each death took place.
    assert len(list(directory.iterdir())) == sum(map(len, deaths))
    assert sorted(line["rank"] for line in said) == list(range(ranks * agents))
    assert {line["ranks"] for line in said} == {ranks * agents}
    return said


@pytest.mark.soak  # `test_keep_torchrun` restarts a job in the ordinary run.
def test_a_restarted_job_has_a_group(tmp_path: pathlib.Path) -> None:
    said = run_torchruns(tmp_path / "deaths", PLAIN, [{"1": "run"}], 2)
    assert {line["name"] for line in said} == {""}


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [PLAIN, ALONE, STATIC, C10D], ids=["plain", "standalone", "static", "c10d"])
def test_four_ranks_survive_all_deaths(tmp_path: pathlib.Path, arguments: list[str]) -> None:
    said = run_torchruns(tmp_path / "deaths", arguments, SEVERAL, 4)
    once = run_torchruns(tmp_path / "none", arguments, [], 4)
    assert {line["keys"] for line in said} == {line["keys"] for line in once}
    assert {line["name"] for line in said} == {"a name" if arguments is C10D else ""}


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [C10D, STATIC], ids=["c10d", "static"])
def test_two_agents_survive_all_deaths(tmp_path: pathlib.Path, arguments: list[str]) -> None:
    # Static agents do not end each other's workers: gloo waits until its timeout for a rank that dies after the round
    # has begun, and before the group is there.
    deaths = [death for death in SEVERAL if arguments is C10D or not {"round", "init"} & set(death.values())]
    run_torchruns(tmp_path / "deaths", arguments, deaths, 2, agents=2)


# ------------------------------------------------------------------------------- a worker, started by torchrun


def work(directory: pathlib.Path, deaths: list[Death]) -> None:
    """A worker that dies as ``deaths`` say. ``directory`` notes who has died. When all have, say what there is."""
    rank = os.environ["RANK"]
    undone = (
        (number, death)
        for number, death in enumerate(deaths)
        if not all((directory / f"{number}-{one}").exists() for one in death)
    )
    number, death = next(undone, (0, {}))
    note = directory / f"{number}-{rank}"
    moment = None if note.exists() else death.get(rank)

    def die() -> None:
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def check_owner(said: str, nonce: str, rank: int) -> None:
        # Called when this rank looks for the others, and when it is in a round.
        if moment == "nonce" or (moment == "round" and " " in said):
            die()

    if moment == "before":
        die()
    if moment in ("nonce", "round"):
        rendezvous._check_owner = check_owner
    dist.init_process_group("gloo", init_method="transfuse://", timeout=TIMEOUT)
    assert not rendezvous.is_needed()
    if moment == "init":
        die()
    seen = torch.tensor([1, int(moment == "run")])
    dist.all_reduce(seen)
    ranks, dying = seen.tolist()
    if moment == "run":
        die()
    if dying:
        # Either torchrun ends this process, because another one dies, or this fails. (Static agents do not tell each
        # other, so that only those of the same agent are ended.)
        dist.barrier()
        threading.Event().wait()
    run = runs.find_run()
    assert run.agent is not None
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, wait_for_workers=False)
    said = {"rank": int(rank), "ranks": ranks, "keys": store.num_keys(), "agent": run.agent.pid}
    said["name"] = run.name if run.is_named else ""
    # In one call, so that the lines of several ranks do not mix.
    os.write(1, f"{json.dumps(said)}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))
