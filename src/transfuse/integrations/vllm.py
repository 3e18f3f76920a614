"""Weight transfer for vLLM: trainer ranks serve the shards that they hold, inference workers fetch them.

vLLM finds both halves under the name "transfuse": the entry point ``vllm.general_plugins`` calls :func:`register` in
each of its processes, and importing this module does so in a trainer.

An update is a round with a number. A trainer rank offers its weights under that number while ``send_weights`` runs, and
nothing at other times. Workers fetch an update in groups of weights, and ask for the round's number in every group. So
a worker that is still busy when the trainer goes on is refused: it never mixes weights of two rounds.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import msgspec
import torch
import torch.distributed as dist

import transfuse
from transfuse import Block, Concat, Rename, Slice, Split, TransfuseError
from transfuse._errors import as_utf8
from transfuse._session.relay import this_host
from transfuse._state.leaves.layout import Box
from transfuse._tuning import VLLM_GROUP_BYTES
from transfuse._wire.roll_call import Agreement
from transfuse.integrations import check_series
from transfuse.integrations.watched_weights import ReadingLog, WatchedWeight, settle, whole_box

#: vLLM's interfaces for weight transfer change with each version. This file is written for those of these.
SERIES = ("0.32", "0.33")
check_series("vllm", *SERIES)
try:
    from vllm.distributed.weight_transfer.base import (
        ModuleSource,
        ParamMeta,
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        VLLMWeightSyncClient,
        WeightSource,
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
        layerwise_groups,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
except ImportError as error:
    raise ImportError(
        f"transfuse.integrations.vllm needs vLLM {' or '.join(SERIES)}, which cannot be imported here ({error}): "
        "pip install 'transfuse[vllm]'"
    ) from error

__all__ = [
    "ShardSource",
    "TransfuseInitInfo",
    "TransfuseTrainerInitInfo",
    "TransfuseTrainerWeightTransferEngine",
    "TransfuseUpdateInfo",
    "TransfuseWeightTransferEngine",
    "register",
]

logger = logging.getLogger("transfuse")

BACKEND = "transfuse"
#: Both ends read their token here. If a trainer has none, it makes one, and sends it with the init info.
TOKEN_VARIABLE = "TRANSFUSE_TOKEN"
#: The types that ``dtype`` converts: weights of other types (float8, integers) have scales beside them.
CONVERTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

#: The ways to install weights. ``reload``: vLLM's layerwise reload around ``model.load_weights``, right for every model
#: of vLLM. ``load_weights``: that call alone. ``in_place``: into the parameters, by their names and by rules.
RELOAD, LOAD_WEIGHTS, IN_PLACE = "reload", "load_weights", "in_place"

AnyRule = Rename | Concat | Split
#: By the names of weights: the box that is needed of each; None: nothing.
Boxes = dict[str, Box | None]
RULES: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (Rename, Concat, Split, Slice)}


def register() -> None:
    """Register both halves with vLLM. Further calls do nothing."""
    for factory, name in (
        (WeightTransferEngineFactory, "TransfuseWeightTransferEngine"),
        (WeightTransferTrainerFactory, "TransfuseTrainerWeightTransferEngine"),
    ):
        with suppress(ValueError):  # It is registered already.
            factory.register_engine(BACKEND, __name__, name)


# -------------------------------------------------------------------------------------------- what both halves say


@dataclass
class TransfuseTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What a trainer rank chooses. All ranks choose the same, except ``rank``, ``host`` and ``port``.

    Args:
        rank: this trainer's rank in ``group``. Rank 0 talks to the engines.
        host: the address of this host by which the workers reach it.
        port: 0 takes a free one.
        timeout: how long a transfer may go without progress, in seconds.
        update_timeout: how long an engine may take for an update, in seconds. Then the trainer goes on without it, when
            its workers have ended the fetch of the group that they are reading.
        max_bytes: the most bytes of weights that a worker fetches at once. None: 1 GiB, or the largest weight.
        dtype: floating weights travel in this type. None: each in its own.
        install: "reload", "load_weights" or "in_place".
        rules: for "in_place": how the trainer's names become those of the engine's model.
        max_readers: how many workers read from this rank at once. At least as many as there are workers.
        group: the trainer's process group. None: the default group, or, if there is none, a single rank.
    """

    backend: ClassVar[str] = BACKEND

    host: str = "127.0.0.1"
    port: int = 0
    timeout: float = 60.0
    update_timeout: float = 600.0
    max_bytes: int | None = None
    dtype: torch.dtype | None = None
    install: str = RELOAD
    rules: Sequence[AnyRule] = ()
    max_readers: int = 64
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.host in ("0.0.0.0", "::"):
            raise ValueError(f"host={self.host!r} is no address: give the one by which the workers reach this host")
        if self.max_bytes is not None and not isinstance(self.max_bytes, int):
            raise TypeError(f"max_bytes takes a number of bytes, or None, got {self.max_bytes!r}")
        if wrong := [rule for rule in self.rules if not isinstance(rule, AnyRule)]:
            raise TypeError(f"rules takes Rename, Concat and Split, got {wrong[0]!r}")
        if self.dtype is not None and self.dtype not in CONVERTED:
            raise ValueError(f"dtype must be one of {', '.join(map(str, CONVERTED))} or None, got {self.dtype}")


@dataclass
class TransfuseInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What a trainer tells an engine once, as plain JSON. ``run`` is a name that no other start of a trainer has."""

    addresses: list[str]
    run: str
    token: str | None = field(default=None, repr=False)
    timeout: float = 60.0
    max_bytes: int | None = None
    install: str = RELOAD
    rules: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("addresses is empty: give host:port of every trainer rank")
        if self.install not in (RELOAD, LOAD_WEIGHTS, IN_PLACE):
            raise ValueError(f"install must be {RELOAD!r}, {LOAD_WEIGHTS!r} or {IN_PLACE!r}, got {self.install!r}")
        if self.rules and self.install != IN_PLACE:
            raise ValueError(f"rules are for install={IN_PLACE!r}: with {self.install!r} the model translates names")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, or None, got {self.max_bytes}")
        _decode(self.rules)

    @property
    def secret(self) -> str:
        """The token of this run: a worker never takes another start of the trainer for this one."""
        return f"{self.token or os.environ.get(TOKEN_VARIABLE, '')}/{self.run}"


@dataclass
class TransfuseUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What a trainer tells an engine in each round: the round's number, and all weights as they travel."""

    round: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"expected as many dtype_names and shapes as names, got {len(self.dtype_names)} and {len(self.shapes)} "
                f"for {len(self.names)}"
            )
        if len(set(self.names)) < len(self.names):
            twice = next(name for i, name in enumerate(self.names) if name in self.names[:i])
            raise ValueError(f"the weight {twice!r} appears twice: give each name once")

    @classmethod
    def of(cls, number: int, weights: Sequence[ParamMeta], dtype: torch.dtype | None) -> TransfuseUpdateInfo:
        travels = [dtype if dtype is not None and one.dtype in CONVERTED else one.dtype for one in weights]
        return cls(
            number,
            [one.name for one in weights],
            [str(one).removeprefix("torch.") for one in travels],
            [list(one.shape) for one in weights],
        )

    def weights(self) -> dict[str, _Weight]:
        """All weights by name."""
        found = {}
        for name, dtype_name, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"weight {name!r}: {dtype_name!r} is no dtype of this torch ({torch.__version__})")
            found[name] = _Weight(tuple(shape), dtype)
        return found


@dataclass(frozen=True)
class _Weight:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _encode(rule: AnyRule | Slice) -> dict[str, Any]:
    """A rule as JSON."""

    def value(one: Any) -> Any:
        if isinstance(one, Slice):
            return _encode(one)
        return list(map(value, one)) if isinstance(one, tuple) else one

    return {"rule": type(rule).__name__, **{name: value(one) for name, one in vars(rule).items()}}


def _decode(rules: Iterable[Mapping[str, Any]]) -> list[AnyRule]:
    def value(one: Any) -> Any:
        if isinstance(one, Mapping):
            return build(one)
        return list(map(value, one)) if isinstance(one, list) else one

    def build(one: Mapping[str, Any]) -> Any:
        kind = RULES.get(one.get("rule", ""))
        if kind is None:
            raise ValueError(f"rules: expected one of {', '.join(RULES)} as 'rule', got {one!r}")
        return kind(**{name: value(item) for name, item in one.items() if name != "rule"})

    return [build(one) for one in rules]


# -------------------------------------------------------------------------------------------- in an inference worker


class TransfuseWeightTransferEngine(WeightTransferEngine[TransfuseInitInfo, TransfuseUpdateInfo]):  # type: ignore[misc]
    """Fetches weights from the trainer's ranks and installs them in this worker's model."""

    init_info_cls = TransfuseInitInfo
    update_info_cls = TransfuseUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init: TransfuseInitInfo | None = None
        #: The model that a layerwise reload has begun on, and its config, until the reload has been finalized.
        self._reloading: tuple[torch.nn.Module, Any] | None = None
        #: The reports of the fetches of the last update: one for each group, and one for each weight of which the model
        #: read more than before.
        self.reports: list[transfuse.Report] = []
        #: Which weights this worker has: of which round, and their digest, if the trainer knew it. None: of no update
        #: that has succeeded.
        self.version: transfuse.Version | None = None
        #: The reports of what workers of this host passed on to this one in the last update.
        self.passed_on: list[transfuse.Report] = []
        #: Of each model the weights of its last update, and the box that it read of each. None: it gets them whole.
        self._known: WeakKeyDictionary[torch.nn.Module, tuple[dict[str, _Weight], Boxes] | None] = WeakKeyDictionary()
        #: The weights of the update that is under way, and what the model reads of them.
        self._watched: tuple[dict[str, _Weight], dict[str, ReadingLog]] | None = None

    def init_transfer_engine(self, init_info: TransfuseInitInfo) -> None:
        """Check that every trainer rank can be reached, and that the token is theirs. Nothing stays open."""
        for address in init_info.addresses:
            try:
                transfuse.peek(address, token=init_info.secret, timeout=init_info.timeout)
            except TransfuseError as error:
                raise TransfuseError(
                    f"the trainer rank at {address} does not answer this worker: {error}. Both ends need the same "
                    f"{TOKEN_VARIABLE}, or neither; a trainer that was started again sends a new init info"
                ) from error
        self._init = init_info

    def start_weight_update(self) -> None:
        if self._initialized().install == RELOAD:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            self._finalize()
            initialize_layerwise_reload(self.model)
            self._reloading = self.model, self.model_config

    def finish_weight_update(self) -> None:
        version, self.version = self.version, None
        self._finalize()
        if self._watched is not None:
            (weights, logs), self._watched = self._watched, None
            unseen = settle(logs)
            self._known[self.model] = weights, {name: log.box for name, log in logs.items()}
            if unseen:
                raise TransfuseError(
                    f"the model has kept {unseen[0]!r}, of which this worker had brought a part only: do not serve "
                    "this model until an update has succeeded; the next one brings this weight whole"
                )
        self.version = version

    def _finalize(self) -> None:
        if self._reloading is not None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            model, config = self._reloading
            self._reloading = None
            finalize_layerwise_reload(model, config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The inherited one synchronizes an accelerator, and raises where there is none.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TransfuseUpdateInfo) -> None:
        """Fetch all weights of a round, and install them. All of them are of this round, or an error is raised."""
        init, weights = self._initialized(), update_info.weights()
        self.reports, self.passed_on, self._watched, self.version = [], [], None, None
        since = time.monotonic()
        try:
            if init.install == IN_PLACE:
                self._receive_in_place(init, update_info.round, weights)
            else:
                workers = _Workers(self.parallel_config.tensor_parallel_size, init.timeout)
                work = partial(self._receive_groups, init, update_info.round, weights, workers)
                workers.together(f"receiving round {update_info.round}", work)
        except BaseException as error:
            if self._watched is not None and not isinstance(error, TransfuseError):
                logger.warning("from now on this model gets whole weights, because it failed to load: %s", error)
                self._known[self.model] = None
            self._watched = None
            # vLLM forgets an update that failed. Its layerwise reload does not: parameters stay without memory, and
            # layers of which it has a part would be completed from the next update.
            self._finalize()
            raise
        told = [report.version for report in self.reports if report.version is not None]
        self.version = told[-1] if told else transfuse.Version(update_info.round)
        logger.info(
            "round %d: %d weights, %d bytes in %d groups, %d bytes of other workers, %.2f s",
            update_info.round,
            len(weights),
            sum(report.bytes for report in self.reports),
            len(self.reports),
            sum(report.bytes for report in self.passed_on),
            time.monotonic() - since,
        )

    def shutdown(self) -> None:
        self._init = None

    def _initialized(self) -> TransfuseInitInfo:
        if self._init is None:
            raise RuntimeError("weight transfer is not initialized: call init_weight_transfer_engine first")
        return self._init

    def _boxes(self, weights: dict[str, _Weight]) -> Boxes:
        """What this worker needs of each weight: what the model read in the last update. At first all."""
        known = self._known.get(self.model)
        if known is not None and known[0] == weights:
            return known[1]
        return {name: whole_box(one.shape) for name, one in weights.items()}

    def _receive_groups(
        self, init: TransfuseInitInfo, number: int, weights: dict[str, _Weight], workers: _Workers
    ) -> None:
        boxes = self._boxes(weights)
        sizes = workers.tell(boxes, weights)
        groups = list(_groups(sizes, init.max_bytes))
        watches = self._known.get(self.model, weights) is not None
        logs: dict[str, ReadingLog] = {}
        if watches:
            self._watched = weights, logs

        def bring(name: str, whole: torch.Tensor) -> None:
            logger.warning("round %d: the model reads more of %r than before: it is fetched whole", number, name)
            self._fetch(init, number, {name: whole}, lambda path: path if path == name else None)

        done = 0
        for i, names in enumerate(groups, 1):
            # Fresh memory for every weight: a layerwise reload keeps them until it has the whole layer.
            fresh = {
                name: WatchedWeight(weights[name].shape, weights[name].dtype, boxes[name], partial(bring, name))
                for name in names
            }
            logs.update((name, one.log) for name, one in fresh.items())
            try:
                self._bring_group(init, number, i, fresh, workers)
            except TransfuseError as error:
                where = f"group {i} of {len(groups)} ({names[0]} to {names[-1]})"
                raise _failed(init, number, where, f"{done} of {len(weights)} weights", error) from error
            with _without_completeness_check():
                self.model.load_weights([(name, one.tensor if watches else one.whole) for name, one in fresh.items()])
            done += len(names)
            del fresh

    def _bring_group(
        self, init: TransfuseInitInfo, number: int, i: int, fresh: dict[str, WatchedWeight], workers: _Workers
    ) -> None:
        """Bring what this worker needs of a group: from the trainer, or from the worker of this host that has it."""
        leader = workers.mates[i % len(workers.mates)]
        shared = {name: one.piece for name, one in fresh.items() if name in workers.shared}
        targets = {
            name: one.target
            for name, one in fresh.items()
            if one.log.here is not None and (leader == workers.rank or name not in shared)
        }
        if targets:
            self._fetch(init, number, targets, lambda path: path if path in targets else None)
        if workers.size > 1:
            workers.gather(b"", f"group {i}")  # The leader has it, or its error.
        if shared and (report := workers.pass_on(leader, shared, number)) is not None:
            self.passed_on.append(report)

    def _receive_in_place(self, init: TransfuseInitInfo, number: int, weights: Mapping[str, _Weight]) -> None:
        targets = dict(self.model.named_parameters())
        # Of tied parameters torch lists one. The others are targets if the trainer has them by the same name.
        several = self.model.named_parameters(remove_duplicate=False)
        targets.update({name: one for name, one in several if name in weights})
        try:
            self._fetch(init, number, targets, _decode(init.rules) or None)
        except TransfuseError as error:
            touched = len({*error.torn, *error.received})
            raise _failed(init, number, "in place", f"{touched} of {len(targets)} weights", error) from error

    def _fetch(
        self, init: TransfuseInitInfo, number: int, targets: Mapping[str, object], rules: transfuse.MapPath | None
    ) -> None:
        fetched = transfuse.fetch(
            init.addresses,
            targets,
            token=init.secret,
            timeout=init.timeout,
            step=number,
            cast=True,
            strict=True,
            map_path=rules,
        )
        self.reports.append(fetched.report)


class _Workers(Agreement):
    """The workers of a tensor-parallel group. What all of them need alike on a host, one fetches and passes on."""

    def __init__(self, size: int, seconds: float) -> None:
        group = None
        if size > 1:
            from vllm.distributed.parallel_state import get_tp_group

            group = get_tp_group().cpu_group
        super().__init__(group, seconds)
        #: The workers on this host, and the names of the weights of which all of them need the same box.
        self.mates, self.shared = [self.rank], set[str]()

    def _has_group(self) -> bool:
        return self._group is not None

    def tell(self, boxes: Boxes, weights: Mapping[str, _Weight]) -> dict[str, int]:
        """Tell each other what each worker needs. Returns the most bytes that one of them needs of each weight."""
        sizes = [0 if box is None else box.numel * weights[name].dtype.itemsize for name, box in boxes.items()]
        mine = _Needs(this_host(), [str(box or "") for box in boxes.values()], sizes)
        given = self.gather(msgspec.msgpack.encode(mine), "what each worker needs")
        try:
            told = [msgspec.msgpack.decode(one, type=_Needs) for one in given]
        except msgspec.ValidationError as error:
            raise TransfuseError(f"the workers of this engine run different versions of transfuse: {error}") from error
        if any(not len(one.boxes) == len(one.sizes) == len(boxes) for one in told):
            raise TransfuseError("the workers of this engine got different weights: send all of them the same update")
        self.mates = [rank for rank, one in enumerate(told) if one.host == mine.host]
        if len(self.mates) > 1:
            of_all = zip(boxes, *(told[rank].boxes for rank in self.mates), strict=True)
            self.shared = {name for name, box, *others in of_all if box and set(others) <= {box}}
        return {name: max(several) for name, *several in zip(boxes, *(one.sizes for one in told), strict=True)}

    def pass_on(self, leader: int, shared: dict[str, torch.Tensor], number: int) -> transfuse.Report | None:
        """The leader sends what all of this host need to its mates, into their tensors."""
        timeout, others = timedelta(seconds=self.seconds), [rank for rank in self.mates if rank != leader]
        with transfuse.PGTransport(self._group, timeout, torch.device("cpu"), lambda: shared, strict=True) as transport:
            if leader == self.rank:
                transport.send_checkpoint(others, shared, step=number)
                return None
            transport.recv_checkpoint(leader, step=number)
            return transport.report


class _Needs(msgspec.Struct, array_like=True, frozen=True):
    """What a worker needs of each weight, in the order of the update, as text and in bytes."""

    host: int
    boxes: list[str]
    sizes: list[int]


def _failed(init: TransfuseInitInfo, number: int, where: str, new: str, error: TransfuseError) -> TransfuseError:
    """The error of an update. One text, because vLLM passes on texts only, without notes and causes."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return TransfuseError(
        f"round {number}, {where}, did not arrive from the trainer at {', '.join(init.addresses)}: "
        f"{type(error).__name__}: {error}{notes}\n"
        f"{new} of this model may have changed already: do not serve it until an update has succeeded"
    )


def _groups(sizes: Mapping[str, int], max_bytes: int | None) -> Iterator[list[str]]:
    """Names of weights that are fetched together, layer by layer, each group of at most ``max_bytes``."""
    if not sizes:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    most = max(VLLM_GROUP_BYTES, sizes[largest]) if max_bytes is None else max_bytes
    if sizes[largest] > most:
        raise ValueError(
            f"the weight {largest!r} has {sizes[largest]} bytes, and max_bytes is {most}: load_weights takes "
            "whole weights, so max_bytes must be at least that"
        )
    group: list[str] = []
    total = 0
    for name in (name for layer in layerwise_groups(list(sizes)) for name in layer):
        if group and total + sizes[name] > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += sizes[name]
    yield group


def _without_completeness_check() -> AbstractContextManager[None]:
    """vLLM's models with MTP layers refuse a ``load_weights`` of a part, unless told so."""
    # If nobody has imported the module, no model here can ask it; and importing it imports all of vLLM's loaders.
    validation = sys.modules.get("vllm.model_executor.model_loader.mtp_validation")
    return nullcontext() if validation is None else validation.disable_mtp_completeness_check()


# -------------------------------------------------------------------------------------------- in a trainer rank


class ShardSource(ModuleSource):  # type: ignore[misc]
    """The weights that a rank holds, as they are: plain tensors, or DTensors of which it holds shards.

    Args:
        weights: a mapping from the names of a checkpoint to tensors, or a callable that returns it, such as
            ``model.state_dict``. It is called in every ``send_weights``, on the thread that calls that.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]) -> None:
        super().__init__(self)  # What vLLM asks a module for is ``named_parameters()``.
        self._weights = weights

    def shards(self) -> dict[str, torch.Tensor]:
        """What this rank holds, by name. Any source with this method will do."""
        return dict(self._weights() if callable(self._weights) else self._weights)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.shards().items()


def _described(source: WeightSource) -> list[ParamMeta]:
    """What a source says of the whole model: by a method in vLLM 0.32, by a cached property since."""
    described = source.metadata
    return list(described() if callable(described) else described)


Shards = dict[str, torch.Tensor | Block]


def _shards_of(source: WeightSource, rank: int) -> Callable[[], Shards]:
    """What returns what this rank of the trainer holds, by name."""
    if callable(shards := getattr(source, "shards", None)):
        return lambda: dict(shards())
    # DTensors say more than vLLM's placements do: of strided shards vLLM's own source would gather every weight.
    if type(source) is ModuleSource and isinstance(module := getattr(source, "_module", None), torch.nn.Module):
        return lambda: dict(module.named_parameters())
    if getattr(source, "implements_iter_local", bool)():
        described = {one.name: one for one in _described(source)}
        return lambda: {
            name: piece for name, local in source.iter_local() for piece in _placed(described[name], local, rank)
        }
    raise TypeError(
        f"source is a {type(source).__name__}, which yields gathered weights: give a ModuleSource, "
        "transfuse.integrations.vllm.ShardSource, a WeightSource with iter_local() (vLLM 0.33), or one with a method "
        "shards() that returns what this rank holds by name"
    )


def _placed(described: Any, local: torch.Tensor, rank: int) -> Sequence[torch.Tensor | Block]:
    """A rank's piece of a weight, as vLLM 0.33 places it. Empty if there is nothing left for this rank."""
    if described.placements is None:
        return [local]
    place, coordinate = described.owners.index(rank), list[int]()
    for size in reversed(described.mesh_shape):
        place, at = divmod(place, size)
        coordinate.insert(0, at)
    return Block.placed(local, described.shape, described.mesh_shape, described.placements, coordinate)


class _Engine:
    """An inference engine that the trainer updates, as seen through its client."""

    def __init__(self, client: VLLMWeightSyncClient) -> None:
        self.client = client
        #: Whether it has the init info. After a failure it gets it again: it may have been started anew.
        self.initialized = False
        self.busy: threading.Thread | None = None

    def __str__(self) -> str:
        """Its name in messages: where vLLM's HTTP client sends its requests."""
        return str(getattr(self.client, "base_url", None) or repr(self.client))

    def initialize(self, info: TransfuseInitInfo) -> None:
        self.client.init_weight_transfer_engine(asdict(info))
        self.initialized = True

    def update(self, info: TransfuseInitInfo, update: TransfuseUpdateInfo, version: str | None) -> None:
        try:
            if not self.initialized:
                self.initialize(info)
            self.client.start_weight_update()
            try:
                self.client.update_weights(asdict(update))
                self.client.finish_weight_update(*(() if version is None else (version,)))
            except Exception:
                # Workers that had no error are still in this update, and would refuse to start the next.
                with suppress(Exception):
                    self.client.finish_weight_update()
                raise
        except BaseException:
            self.initialized = False
            raise


class TransfuseTrainerWeightTransferEngine(TrainerWeightTransferEngine[TransfuseTrainerInitInfo]):  # type: ignore[misc]
    """Serves what this trainer rank holds to the workers of any number of engines, one round at a time.

    :meth:`attach` adds engines, :meth:`detach` removes them; :attr:`lost` says which did not get the last round, and
    why. A failed engine is asked again in the next round, from its initialization on.
    """

    init_info_cls = TransfuseTrainerInitInfo

    def __init__(
        self, info: TransfuseTrainerInitInfo, client: VLLMWeightSyncClient | None, source: WeightSource
    ) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self.rank = info.rank
        self._shards = _shards_of(source, info.rank)
        self._info = info
        self._ranks = _TrainerRanks(info.group, info.update_timeout)
        self._engines: list[_Engine] = []
        self._lock = threading.Lock()
        self._last = 0
        #: The round that readers may fetch now, and the weights: changed while no reader is active.
        self._round: int | None = None
        self._offered: Shards = {}
        #: The engines that did not get the last round, each with the cause.
        self.lost: list[tuple[VLLMWeightSyncClient, Exception]] = []
        self._init = self._ranks.together("beginning to serve", self._serve)

    def _serve(self) -> TransfuseInitInfo:
        """Begin to serve, on all ranks; what the engines are told of it."""
        info = self._info
        self._ranks.check_rank(info.rank)
        run, given = secrets.token_hex(8), os.environ.get(TOKEN_VARIABLE)
        made = None if given else secrets.token_hex(32)
        run, made = self._ranks.texts(f"{run} {made or ''}")[0].split(" ")
        init = TransfuseInitInfo(
            ["none yet"], run, made or None, info.timeout, info.max_bytes, info.install, list(map(_encode, info.rules))
        )
        with ExitStack() as stack:
            problem = ""
            try:
                self._server = transfuse.serve(
                    lambda: self._offered,
                    host=info.host,
                    port=info.port,
                    token=init.secret,
                    timeout=info.timeout,
                    step=lambda: self._round,
                    max_readers=info.max_readers,
                )
                stack.callback(self._server.close, cancel=True)
            except Exception as error:
                problem = f"rank {info.rank} cannot serve at {info.host}:{info.port}: {type(error).__name__}: {error}"
            self._ranks.check(problem)
            init.addresses = self._ranks.texts(self._server.address)
            stack.pop_all()
        return init

    @classmethod
    def trainer_init(
        cls,
        init_info: TransfuseTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient | None,
        source: WeightSource | None = None,
    ) -> Self:
        """On every trainer rank: serve, and initialize the engine behind ``client``, if there is one already."""
        if source is None:
            raise ValueError("transfuse serves a source: pass source=ModuleSource(model), or a ShardSource")
        engine = cls(init_info, client, source)
        problem = ""
        if engine.is_sender and client is not None:
            first = _Engine(client)
            try:
                first.initialize(engine._init)
            except Exception as error:
                problem = f"the engine behind {first} could not be initialized: {type(error).__name__}: {error}"
            engine._engines.append(first)
        try:
            engine._ranks.check(problem)
        except BaseException:
            engine.shutdown()
            raise
        return engine

    @property
    def addresses(self) -> list[str]:
        """``host:port`` of every trainer rank's server."""
        return list(self._init.addresses)

    def attach(self, client: VLLMWeightSyncClient) -> None:
        """From the next round on, update this engine, too. On ranks other than 0 this does nothing."""
        if self.is_sender:
            with self._lock:
                self._engines.append(_Engine(client))

    def detach(self, client: VLLMWeightSyncClient) -> None:
        """From the next round on, leave this engine out."""
        with self._lock:
            self._engines = [one for one in self._engines if one.client is not client]

    def send_weights(self, *, weight_version: str | None = None) -> None:
        """On every trainer rank: one round. The weights must not change before it returns.

        It returns on all ranks when every engine has the weights or has failed. It raises on all ranks if every engine
        has failed; the trainer may go on, and try again.
        """
        self._ranks.together("sending weights", lambda: self._send(weight_version))

    def _send(self, weight_version: str | None) -> None:
        assert self.source is not None
        self._last += 1
        problem = ""
        try:
            try:
                described = _described(self.source)
                self._offer(self._last, self._shards())
            except Exception as error:
                problem = f"rank {self._info.rank} cannot offer its weights: {type(error).__name__}: {error}"
            self._ranks.check(problem)
            self._ranks.check_equal(f"round {self._last}")  # Every rank offers it now.
            if self.is_sender:
                try:
                    self._drive(TransfuseUpdateInfo.of(self._last, described, self._info.dtype), weight_version)
                except Exception as error:
                    problem = str(error) or type(error).__name__
            self._ranks.check(problem)
        finally:
            self._offer(None, {})

    def shutdown(self) -> None:
        """Stop serving. Workers that are still reading get an error."""
        self._server.close(cancel=True)

    def _offer(self, number: int | None, shards: Shards) -> None:
        with self._server.mutating():
            self._round, self._offered = number, shards

    def _drive(self, update: TransfuseUpdateInfo, version: str | None) -> None:
        """Have every engine fetch this round, all at once, each in a thread."""
        with self._lock:
            engines = list(self._engines)
        results: queue.SimpleQueue[tuple[_Engine, Exception | None]] = queue.SimpleQueue()

        def work(engine: _Engine) -> None:
            try:
                engine.update(self._init, update, version)
                results.put((engine, None))
            except Exception as error:
                results.put((engine, error))

        failed: dict[int, Exception] = {}
        waiting = {}
        for engine in engines:
            if engine.busy is not None and engine.busy.is_alive():
                failed[id(engine)] = TransfuseError("its client has not returned from an earlier round")
                continue
            # A daemon: a client that never returns must not keep the trainer from ending.
            engine.busy = threading.Thread(target=work, args=(engine,), name="transfuse-engine", daemon=True)
            waiting[id(engine)] = engine
            engine.busy.start()
        until = time.monotonic() + self._info.update_timeout
        while waiting and (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                engine, error = results.get(timeout=left)
                del waiting[id(engine)]
                engine.busy = None  # It has returned. Its thread may still be about to end.
                if error is not None:
                    failed[id(engine)] = error
        for number in waiting:
            failed[number] = TransfuseError(f"its client has not returned in {self._info.update_timeout:g} s")
        self.lost = [(one.client, failed[id(one)]) for one in engines if id(one) in failed]
        names = [str(one) for one in engines if id(one) in failed]
        for name, (_, cause) in zip(names, self.lost, strict=True):
            logger.warning("round %d: the engine behind %s failed: %s", update.round, name, cause)
        if engines and len(self.lost) == len(engines):
            told = zip(names, self.lost, strict=True)
            causes = "".join(f"\n{name}: {type(cause).__name__}: {cause}" for name, (_, cause) in told)
            raise TransfuseError(f"round {update.round} reached no engine:{causes}")


class _TrainerRanks(Agreement):
    """The trainer's ranks."""

    def check_rank(self, told: int) -> None:
        """Raise on all ranks if one of them was told that it is another one."""
        wrong = self.texts("" if told == self.rank else f"rank={told}, but this process is rank {self.rank}")
        if any(wrong):
            which = "of its group" if self.size > 1 else "without other ranks there is rank 0 only"
            raise ValueError(f"{next(filter(None, wrong))}: {which}")

    def texts(self, text: str) -> list[str]:
        """Every rank's text."""
        return [one.decode() for one in self.gather(as_utf8(text).encode(), "agreement of the trainer's ranks")]

    def check(self, problem: str) -> None:
        """Raise on all ranks if one has a problem."""
        if problems := [one for one in self.texts(problem) if one]:
            raise TransfuseError(problems[0])

    def check_equal(self, text: str) -> None:
        """Raise on all ranks if they do not say the same."""
        if len(set(said := self.texts(text))) > 1:
            raise TransfuseError(f"the trainer's ranks are at different rounds: {', '.join(said)}")


register()
