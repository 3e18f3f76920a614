"""``init_method="transfuse://"``: how the ranks of a restarted job find each other, and nobody who is dead.

torchrun restarts the workers, but not the store through which they find each other: its agent keeps that store for as
long as the job runs. The new workers find the addresses of dead ones in it, and gloo tries to connect to them. So the
ranks first agree on a round, and then use only the part of the store that belongs to this round:

    rank r                                     rank 0
      | -- I have come, with a nonce ----------> |
      | <- this nonce belongs to this round ---- |  a round is new for each call of rank 0, and named by its nonce
      | -- I am in this round -----------------> |
      | <- begin ------------------------------- |  as soon as every rank is in the round

Every message is a key of the store, which its sender overwrites. What dead workers have written stays there, and
disturbs nobody: a rank believes only an answer to its own nonce, and rank 0 counts only ranks that are in its own
round. If a rank dies on the way and is started again, its new nonce gets an answer too. No rank leaves before the
last one has come, so nobody writes an address into a round that a rank may still have to join anew.

Without an agent's store everything is as with ``env://``: rank 0 hosts a store of its own, which dies with it.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from transfuse._errors import PeerTimeout, TransfuseError
from transfuse._keeper.scheme import SCHEME
from transfuse._tuning import RENDEZVOUS_MAX_PAUSE_SECONDS, RENDEZVOUS_MIN_PAUSE_SECONDS

#: Torch's own way under torchrun, and its choice where a caller names none.
ENVIRONMENT = "env://"
#: Rank 0 removes at most this many keys of old rounds in one call. What remains waits for the next call.
MOST_KEYS_REMOVED = 10_000

#: Whether :func:`form_group` has formed a default group.
_formed = False
#: The rounds that this process has joined. Groups that are still in use may have their keys there.
_joined: set[str] = set()


def is_needed() -> bool:
    """Whether a restart of this job would fail because its default group was formed through ``env://``.

    True if torchrun may restart this process, keeps its store over restarts, and the group found its ranks there. A
    group of one rank finds nobody who is dead; nor do groups that were formed in another way.
    """
    if not (_may_restart() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    method = distributed_c10d._default_pg_init_method
    return method is not None and method.startswith(ENVIRONMENT)


def check_group(group: Any) -> None:
    """See to it that there is a group, and that a restarted job can form it again."""
    if group is None and not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") != "1":
        if not dist.is_torchelastic_launched():
            raise TransfuseError("keep() needs the job's process group: call init_process_group() first")
        form_group()
    if is_needed():
        raise TransfuseError(
            "if torchrun restarted this job, it could not form its process group again: torchrun keeps its store, and "
            "the new workers would find the addresses of dead ones there. Form the group by "
            f'dist.init_process_group("{dist.get_backend()}", init_method="transfuse://"). If a framework forms it, '
            "call transfuse.rendezvous_by_default() before that; importing and making a KeepCallback does it too"
        )


def form_group() -> None:
    """Form the default group of a job that torchrun has started: by ``transfuse://``, with torch's choice of backends.

    A caller that forms it again is told why there is one.
    """
    global _formed
    rendezvous_by_default()
    dist.init_process_group(init_method=f"{SCHEME}://")
    _formed = True


def rendezvous_by_default() -> None:
    """Let ``init_process_group`` without ``init_method=`` and ``store=`` use ``transfuse://`` from now on.

    For jobs whose group is made by a framework that does not ask its user for an ``init_method``. ``env://`` counts as
    none. Only calls in a process that torchrun may restart are changed. Calls after the first one do nothing. If the
    group has been formed already, so that a restarted job could not form it again, this raises.
    """
    if is_needed():
        raise TransfuseError(
            "this comes too late: the process group has been formed already, and if torchrun restarted this job, it "
            "could not form the group again. Import and make the KeepCallback (or call "
            "transfuse.rendezvous_by_default()) before the framework forms the group: in Transformers before "
            "TrainingArguments(), in Lightning before Trainer.fit()"
        )
    original: Any = dist.init_process_group
    if getattr(original, "is_of_transfuse", False):
        return

    @functools.wraps(original)
    def init_process_group(
        backend: str | None = None, init_method: str | None = None, *args: Any, **options: Any
    ) -> None:
        if _formed and dist.is_initialized():
            raise TransfuseError(
                "keep() has formed the default process group, as there was none. Call init_process_group() before it"
            )
        # After these two come timeout, world_size, rank and store.
        has_store = options.get("store") is not None or args[3:4] not in ((), (None,))
        if init_method in (None, ENVIRONMENT) and not has_store and _may_restart():
            init_method = f"{SCHEME}://"
        original(backend, init_method, *args, **options)

    init_process_group.is_of_transfuse = True  # type: ignore[attr-defined]
    dist.init_process_group = init_process_group


# ------------------------------------------------------------------------------------------ what torch calls


def join(url: str, timeout: timedelta = default_pg_timeout, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Yield the store, the rank and the number of ranks, as torch expects of a rendezvous handler."""
    query = parse_qs(urlparse(url).query)
    rank = _number(query, "rank", "RANK")
    world_size = _number(query, "world_size", "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise _error(f"rank {rank} is not one of {world_size} ranks")
    if _has_agent_store():
        host, port = _variable("MASTER_ADDR"), int(_variable("MASTER_PORT"))
        # A connection that nobody else uses.
        store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        # One store may serve several jobs.
        named = PrefixStore(f"{SCHEME}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
        round_ = join_round(named, rank, world_size, timeout.total_seconds())
        _joined.add(round_)
        if rank == 0:
            remove_old_rounds(named, _joined)
        yield round_store(named, round_), rank, world_size
    else:
        settings = f"rank={rank}&world_size={world_size}"
        if "use_libuv" in query:
            settings += f"&use_libuv={query['use_libuv'][-1]}"
        yield from rendezvous(f"{ENVIRONMENT}?{settings}", timeout=timeout)
    raise RuntimeError(f"{SCHEME}:// cannot repeat a rendezvous: call init_process_group again")


def _may_restart() -> bool:
    """Whether torchrun may restart this process, and keeps its store over restarts."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return _has_agent_store() and restarts.isdecimal() and int(restarts) > 0


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _number(query: dict[str, list[str]], name: str, variable: str) -> int:
    """A number that the caller of ``init_process_group`` has given, or that stands in the environment."""
    text = query[name][-1] if name in query else _variable(variable)
    try:
        return int(text)
    except ValueError:
        raise _error(f"{name} must be a number, not {text!r}") from None


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise _error(f"the environment variable {name} is not set. Start the job with torchrun, or set it")
    return value


def _error(message: str) -> ValueError:
    return ValueError(f"init_method {SCHEME}://: {message}")


# ---------------------------------------------------------------------------------------------- the round


def join_round(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """Meet the other ranks of this start of the job in ``store``; return the name of the round that is theirs alone.

    ``store`` must be a client that nobody else uses. A rank that does not come within ``seconds`` is named by a
    ``PeerTimeout``.
    """
    nonce = secrets.token_hex(8)
    store.set(_rank_key(rank), nonce)
    if rank == 0:
        _gather(store, nonce, world_size, seconds)
        return nonce
    return _follow(store, nonce, rank, world_size, seconds)


def _gather(store: Store, nonce: str, world_size: int, seconds: float) -> None:
    """Rank 0: invite every rank into the round ``nonce`` until all are in it, then let all begin."""
    missing: list[int] = []
    for _ in _polls(seconds):
        own, *others = _read(store, [_rank_key(rank) for rank in range(world_size)])
        _check_owner(own, nonce, 0)
        missing = [rank for rank, said in enumerate(others, 1) if not _is_in(said, nonce)]
        if not missing:
            store.set("begin", nonce)
            return
        # A rank that was started again has written a new nonce since the last look.
        come = {_answer_key(rank): f"{_nonce_in(others[rank - 1])} {nonce}" for rank in missing if others[rank - 1]}
        if come:
            store.multi_set(list(come), list(come.values()))  # type: ignore[attr-defined]
    raise _timeout(missing, world_size, 0, seconds)


def _follow(store: Store, nonce: str, rank: int, world_size: int, seconds: float) -> str:
    """Every other rank: enter the round that rank 0 names, and wait until all are in it."""
    said = nonce
    round_ = ""
    for _ in _polls(seconds):
        own, answer, begin = _read(store, [_rank_key(rank), _answer_key(rank), "begin"])
        _check_owner(own, nonce, rank)
        if _nonce_in(answer) == nonce and not _is_in(said, _round_in(answer)):
            # The first answer, or that of a rank 0 which was started again.
            round_ = _round_in(answer)
            entered = f"{nonce} {round_}"
            _check_owner(store.compare_set(_rank_key(rank), said, entered).decode(), nonce, rank)
            said = entered
        elif round_ and begin == round_:
            return round_
    if not round_:
        raise _timeout([0], world_size, rank, seconds)
    all_said = _read(store, [_rank_key(other) for other in range(1, world_size)])
    missing = [other for other, text in enumerate(all_said, 1) if not _is_in(text, round_)]
    # If all have come in the last moment, then rank 0 has gone before it could let them begin.
    raise _timeout(missing or [0], world_size, rank, seconds)


def round_store(store: Store, round_: str) -> Store:
    """The part of ``store`` that belongs to this round."""
    return PrefixStore(f"round/{round_}", store)


def remove_old_rounds(store: Store, keep: Collection[str]) -> None:
    """Rank 0, when all ranks are in a new round: remove what dead workers have written into other rounds than these.

    The other keys here are overwritten at each start and need no removal: there are two for each rank, and one more.
    """
    kept = tuple(f"round/{round_}/" for round_ in keep)
    old = (key for key in store.list_keys() if key.startswith("round/") and not key.startswith(kept))
    for key in itertools.islice(old, MOST_KEYS_REMOVED):
        store.delete_key(key)


# ------------------------------------------------------------------------------------------------ the keys


def _rank_key(rank: int) -> str:
    """The key in which a rank says "<nonce>" when it has come, and "<nonce> <round>" when it is in a round."""
    return f"rank/{rank}"


def _answer_key(rank: int) -> str:
    """The key in which rank 0 answers "<nonce> <round>"."""
    return f"answer/{rank}"


def _nonce_in(said: str) -> str:
    return said.partition(" ")[0]


def _round_in(said: str) -> str:
    return said.partition(" ")[2]


def _is_in(said: str, round_: str) -> bool:
    return _round_in(said) == round_


def _read(store: Store, keys: Sequence[str]) -> list[str]:
    """The values of these keys, without waiting: a key that is not there has the value ""."""
    # Each of these keys, once written, stays. `get` waits for a key that is not there, and a wait that times out
    # makes torch print two lines.
    if store.check(list(keys)):
        return [value.decode() for value in store.multi_get(list(keys))]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]


def _polls(seconds: float) -> Iterator[None]:
    """Yield until ``seconds`` have passed, and once more after that: often at first, then ever less often."""
    deadline = time.monotonic() + seconds
    pause = RENDEZVOUS_MIN_PAUSE_SECONDS
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, RENDEZVOUS_MAX_PAUSE_SECONDS)


def _check_owner(said: str, nonce: str, rank: int) -> None:
    if _nonce_in(said) != nonce:
        raise TransfuseError(
            f"init_method {SCHEME}://: another process has come as rank {rank} after this one. Either this process "
            "belongs to an earlier start of the job and may end, or two processes have the same rank"
        )


def _timeout(missing: Sequence[int], world_size: int, rank: int, seconds: float) -> PeerTimeout:
    names = ", ".join(map(str, missing[:20])) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
    ranks = "rank" if len(missing) == 1 else "ranks"
    phase = f"rank {rank} waited for {ranks} {names} of {world_size} to come (init_method {SCHEME}://)"
    return PeerTimeout(missing[0], phase, seconds)
