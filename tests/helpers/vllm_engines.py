"""What tests of the vLLM integration share: the models of a trainer and of an engine, both halves in processes.

A weight's values follow from its name and from the round in which the trainer sent it. So of any weight that an engine
has, a test can say which round it is of.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import transfuse
from transfuse import Concat
from transfuse.testing.ranks import hear, say

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # What vLLM's imports warn of is not ours.
    from vllm.config import DeviceConfig, VllmConfig, WeightTransferConfig
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        ParamMeta,
        WeightSource,
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    from transfuse.integrations.vllm import (
        ShardSource,
        TransfuseTrainerInitInfo,
        TransfuseTrainerWeightTransferEngine,
        TransfuseWeightTransferEngine,
    )

LAYERS = 3
FETCH = "fetch"
#: The weights of a layer that an engine's model has in one.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
RULES = tuple(Concat([f"**.{one}.weight" for one in parts], f"**.{fused}.weight") for fused, parts in FUSED.items())


class Node(torch.nn.Module):
    """A weight, or modules with weights."""

    def __init__(self, *shape: int, **children: torch.nn.Module) -> None:
        super().__init__()
        if shape:
            self.weight = torch.nn.Parameter(torch.zeros(shape))
        for name, child in children.items():
            self.add_module(name, child)


def trainers_model(width: int = 24, layers: int = LAYERS, tied: bool = False) -> Node:
    """As a checkpoint names them. The number of rows is odd, so that shards are of unequal sizes."""
    half = width // 2 + 1

    def layer() -> Node:
        attention = Node(q_proj=Node(width + 1, width), k_proj=Node(half, width), v_proj=Node(half, width))
        return Node(self_attn=attention, mlp=Node(gate_proj=Node(width, width), up_proj=Node(width, width)))

    stack = torch.nn.ModuleList(layer() for _ in range(layers))
    model = Node(model=Node(embed_tokens=Node(31, width), layers=stack, norm=Node(width)), lm_head=Node(31, width))
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight  # type: ignore[union-attr]
    return model


class EnginesModel(Node):
    """As vLLM has them: q, k and v in one, gate and up in one. ``load_weights`` takes the trainer's names."""

    def __init__(self, width: int = 24, layers: int = LAYERS, tied: bool = False, dtype: Any = torch.float32) -> None:
        half = width // 2 + 1

        def layer() -> Node:
            attention = Node(qkv_proj=Node(width + 1 + 2 * half, width))
            return Node(self_attn=attention, mlp=Node(gate_up_proj=Node(2 * width, width)))

        stack = torch.nn.ModuleList(layer() for _ in range(layers))
        super().__init__(model=Node(embed_tokens=Node(31, width), layers=stack, norm=Node(width)))
        self.lm_head = Node(31, width)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight  # type: ignore[union-attr, assignment]
        self.to(dtype).requires_grad_(False)
        #: The names and bytes of every call.
        self.loads: list[tuple[list[str], int]] = []
        #: Called before every load.
        self.before: Any = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        weights = list(weights)
        if self.before is not None:
            self.before(len(self.loads))
        self.loads.append(([name for name, _ in weights], sum(one.nbytes for _, one in weights)))
        own = dict(self.named_parameters(remove_duplicate=False))
        for name, weight in weights:
            fused, part = _fused(name)
            own_loader = getattr(own[fused], "weight_loader", load)
            own_loader(own[fused], weight, part)
        return {name for name, _ in weights}


def load(param: torch.Tensor, weight: torch.Tensor, part: Sequence[int]) -> None:
    """Copy a weight into its part of a parameter: number ``part[0]`` of ``part[1]``; the first takes what remains."""
    number, count = part
    rows = weight.shape[0]
    start = 0 if number == 0 else param.shape[0] - (count - number) * rows
    param.data[start : start + rows].copy_(weight)


def _fused(name: str) -> tuple[str, tuple[int, int]]:
    for fused, parts in FUSED.items():
        for number, part in enumerate(parts):
            if f".{part}." in name:
                return name.replace(part, fused), (number, len(parts))
    return name, (0, 1)


def values(name: str, shape: Sequence[int], number: int) -> torch.Tensor:
    """The weight of this name in the trainer's round ``number``."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + number)
    return torch.randn(tuple(shape), generator=generator)


def set_round(model: torch.nn.Module, number: int) -> None:
    """Train: give all weights, sharded or not, their values of this round."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for name, weight in model.named_parameters():
            whole = values(name, weight.shape, number)
            if isinstance(weight, DTensor):
                whole = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
                weight.to_local().copy_(whole)
            else:
                weight.copy_(whole)


def rounds_of(weights: Mapping[str, torch.Tensor], trainer: torch.nn.Module, most: int = 9) -> set[int | None]:
    """The rounds that an engine's weights are of, part by part. None: of none, bit for bit."""
    found: set[int | None] = set()
    for name, weight in trainer.named_parameters(remove_duplicate=False):
        fused, (number, count) = _fused(name)
        if fused == "lm_head.weight" and fused not in weights:
            continue
        whole = weights[fused]
        start = 0 if number == 0 else whole.shape[0] - (count - number) * weight.shape[0]
        part = whole[start : start + weight.shape[0]]
        names = [name, "model.embed_tokens.weight"] if name == "lm_head.weight" else [name]
        fits = (
            number
            for number in range(1, most)
            for one in names
            if torch.equal(values(one, weight.shape, number).to(part.dtype), part)
        )
        found.add(next(fits, None))
    return found


def engine_for(model: torch.nn.Module, config: VllmConfig | None = None) -> TransfuseWeightTransferEngine:
    """By vLLM's factory, from vLLM's config."""
    wanted = WeightTransferConfig(backend="transfuse")
    config = config or VllmConfig(device_config=DeviceConfig(device="cpu"), weight_transfer_config=wanted)
    engine = WeightTransferEngineFactory.create_engine(wanted, config, torch.device("cpu"), model)
    assert isinstance(engine, TransfuseWeightTransferEngine)
    return engine


class Direct:
    """A client of an engine in this process. What it says goes through JSON, as over HTTP."""

    def __init__(self, model: torch.nn.Module, config: VllmConfig | None = None) -> None:
        self.engine = engine_for(model, config)
        self.said: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.said.append("init")
        self.engine.init_transfer_engine(self.engine.parse_init_info(plain(init_info)))

    def start_weight_update(self) -> None:
        self.said.append("start")
        self.engine.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.said.append("update")
        self.engine.update_weights(plain(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.said.append("finish" if weight_version is None else f"finish {weight_version}")
        self.engine.finish_weight_update()


def plain(info: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(info))
    return found


@contextmanager
def trainer_of(
    model: torch.nn.Module, client: Any, source: Any = None, **options: Any
) -> Iterator[TransfuseTrainerWeightTransferEngine]:
    """A trainer of one rank, in this process."""
    options = {"install": "load_weights", "timeout": 20.0, **options}
    info = TransfuseTrainerInitInfo(rank=0, **options)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source or ModuleSource(model))
    try:
        yield trainer
    finally:
        trainer.shutdown()


@contextmanager
def over_http(direct: Direct, fail: Callable[[Exception], object]) -> Iterator[str]:
    """An engine behind the routes of vLLM's server: its URL."""
    routes: dict[str, Callable[[Any], None]] = {
        "/init_weight_transfer_engine": lambda body: direct.init_weight_transfer_engine(body["init_info"]),
        "/start_weight_update": lambda body: direct.start_weight_update(),
        "/update_weights": lambda body: direct.update_weights(body["update_info"]),
        "/finish_weight_update": lambda body: direct.finish_weight_update(body and body["weight_version"]),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                routes[self.path](msgspec.json.decode(raw or b"null"))
                self.send_response(200)
            except Exception as error:
                self.send_response(500)
                fail(error)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


# ---------------------------------------------------------------------------------------------- in processes


def infer(rank: int, options: dict[str, Any], pause_at: int | str | None = None) -> dict[str, Any]:
    """In a process: an engine behind vLLM's HTTP routes, until the parent says "stop".

    With ``pause_at`` it says "paused" before its load of that number, or, if that is "fetch", within its first fetch,
    and waits until the parent says "go on". If an update fails, it says "failed".
    """
    torch.set_num_threads(1)
    model = EnginesModel(**options)
    direct = Direct(model)
    errors: list[str] = []
    go_on = threading.Event()

    once = threading.Lock()

    def pause(loads: int | str) -> None:
        if loads == pause_at:
            if once.acquire(blocking=False):
                say("paused")
            go_on.wait(600)

    def pause_midway(progress: dict[int, transfuse.Progress]) -> None:
        if sum(one.bytes for one in progress.values()):
            pause(FETCH)

    if pause_at == FETCH:
        transfuse.fetch = partial(transfuse.fetch, progress=pause_midway)  # type: ignore[assignment]
    model.before = pause

    def fail(error: Exception) -> None:
        errors.append(f"{type(error).__name__}: {error}")
        say("failed")

    with over_http(direct, fail) as url:
        say(url)
        while (word := hear()) != "stop":
            if word == "go on":
                go_on.set()
                continue
            if word == "watch":
                reset_peak()
            say(peak_bytes())
    weights = {name: one.detach().clone() for name, one in model.named_parameters(remove_duplicate=False)}
    if sum(one.nbytes for one in weights.values()) > 1 << 24:
        weights = {}  # Too much to send, and not looked at.
    return {"weights": weights, "errors": errors, "loads": model.loads}


def train(rank: int, options: dict[str, Any], placed: bool = False, **info: Any) -> list[str]:
    """In a process: a rank of an FSDP2 trainer that does what the parent says, until it says "stop".

    With ``placed`` vLLM's placements say what it holds, in place of DTensors.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    model = trainers_model(**options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trainer: Any = None
    clients: dict[str, Any] = {}
    while (word := hear()) != "stop":
        kind, given = word
        try:
            if kind == "init":
                start = TransfuseTrainerInitInfo(rank=rank, **{"install": "load_weights", "timeout": 20.0, **info})
                clients = {url: HTTPVLLMWeightSyncClient(url) for url in given}
                first, *others = clients.values()
                source = PlacedSource(model, rank) if placed else ModuleSource(model)
                trainer = WeightTransferTrainerFactory.trainer_init(start, client=first, source=source)
                for other in others:
                    trainer.attach(other)
                say(("init", trainer.addresses))
            elif kind == "attach":
                clients[given] = HTTPVLLMWeightSyncClient(given)
                trainer.attach(clients[given])
                say(("attach", None))
            else:
                set_round(model, given)
                trainer.send_weights()
                lost = [url for url, client in clients.items() if any(client is one for one, _ in trainer.lost)]
                say(("sent", lost))
        except transfuse.TransfuseError as error:
            say(("failed", str(error)))
    if trainer is not None:
        trainer.shutdown()
    return []


class PlacedSource(WeightSource):  # type: ignore[misc]
    """A source as vLLM 0.33 has them: names, owners and placements, and this rank's piece of each weight."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Weights lie in rows, in columns, whole on both ranks, or whole on one, in turns."""
        from vllm.distributed.weight_transfer import Replicate, Shard

        kinds: list[dict[str, Any]] = [
            {"owners": (0, 1), "placements": (Shard(0),)},
            {"owners": (1, 0), "mesh_shape": (1, 2), "placements": (Replicate(), Shard(1))},
            {"owners": (0, 1), "placements": (Replicate(),)},
            {"owners": (1,), "placements": (Replicate(),)},
            {},
        ]
        named = self._model.named_parameters()
        return [
            ParamMeta(name, one.dtype, tuple(one.shape), **(kinds[i % 5] if one.ndim > 1 else {}))
            for i, (name, one) in enumerate(named)
        ]

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        wholes = dict(ModuleSource(self._model).iter_full())
        for one in self.metadata:
            whole = wholes[one.name]
            owners = one.owners or (0, 1)
            if self._rank not in owners:
                continue
            for kind in one.placements or ():
                if hasattr(kind, "dim"):
                    whole = whole.chunk(2, kind.dim)[owners.index(self._rank)]
            yield one.name, whole.detach().clone()


# ---------------------------------------------------------------------------------------------- tensor-parallel workers


def tensor_parallel_trainer() -> Node:
    """As a checkpoint names them. Both ranks need the one key-value head whole, and the norm."""

    def layer() -> Node:
        attention = {"q_proj": Node(32, 24), "k_proj": Node(8, 24), "v_proj": Node(8, 24), "o_proj": Node(24, 32)}
        mlp = {"gate_proj": Node(16, 24), "up_proj": Node(16, 24), "down_proj": Node(24, 16)}
        return Node(**attention, **mlp, norm=Node(24))

    return Node(embed=Node(128, 24), layers=torch.nn.ModuleList(layer() for _ in range(LAYERS)), extra=Node(40, 24))


class TensorParallelModel(Node):
    """Layers of vLLM, with their own loaders, and a ``load_weights`` as its models have them."""

    def __init__(self) -> None:
        from vllm.model_executor.layers import linear
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        def layer() -> Node:
            return Node(
                qkv_proj=linear.QKVParallelLinear(24, 8, 4, 1, bias=False),
                o_proj=linear.RowParallelLinear(32, 24, bias=False),
                gate_up_proj=linear.MergedColumnParallelLinear(24, [16, 16], bias=False),
                down_proj=linear.RowParallelLinear(16, 24, bias=False),
                norm=Node(24),
            )

        stack = torch.nn.ModuleList(layer() for _ in range(LAYERS))
        super().__init__(embed=VocabParallelEmbedding(128, 24), layers=stack)
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        stacked = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": 0, "up_proj": 1}
        own = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            fused, _ = _fused(name)
            if fused not in own:
                continue
            given = [stacked[part] for part in stacked if f".{part}." in name]
            getattr(own[fused], "weight_loader", default_weight_loader)(own[fused], weight, *given)
            loaded.add(fused)
        return loaded


def loaded_whole(number: int) -> dict[str, torch.Tensor]:
    """What this rank's model has after it has loaded the whole weights of a round."""
    model = TensorParallelModel()
    trainer = tensor_parallel_trainer()
    model.load_weights((name, values(name, one.shape, number)) for name, one in trainer.named_parameters())
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def work(rank: int, is_reload: bool) -> dict[str, Any]:
    """In a process: one of two tensor-parallel workers of an engine, which does what the parent says until "stop"."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    torch.set_num_threads(1)
    wanted = WeightTransferConfig(backend="transfuse")
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), weight_transfer_config=wanted)
    # The configuration itself asks for as many accelerators as it has workers.
    config.parallel_config.tensor_parallel_size = 2
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world_size=2, rank=rank, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, backend="gloo")
        try:
            model = TensorParallelModel()
            if is_reload:
                record_metadata_for_reloading(model)
                model.load_weights((name, one) for name, one in tensor_parallel_trainer().named_parameters())
            direct = Direct(model, config)
            say("ready")
            while (word := hear()) != "stop":
                call, given = word
                try:
                    getattr(direct, call)(*given)
                except Exception as error:
                    say(f"{type(error).__name__}: {error}")
                    continue
                if call != "finish_weight_update":
                    say(None)
                    continue
                whole, own = loaded_whole(int(given[0])), dict(model.named_parameters())
                assert own.keys() == whole.keys()
                wrong = [name for name, one in own.items() if not torch.equal(one, whole[name])]
                moved = (sum(one.bytes for one in of) for of in (direct.engine.reports, direct.engine.passed_on))
                say((*moved, wrong))
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state._WORLD = None
    return {}


def train_with_a_broken_rank(rank: int, taken: str) -> list[str]:
    """In a process: what all ranks are told if rank 1 is taken for another, cannot serve, or has lost a shard."""
    host, _, port = taken.rpartition(":")
    errors: list[str] = []
    owns: list[dict[str, Any]] = [{"rank": 0}, {"host": host, "port": int(port)} if rank == 1 else {}, {}]

    def weights() -> dict[str, torch.Tensor]:
        if rank == 1 and len(errors) == 2:
            raise OSError("a shard is missing")
        return {"w": torch.zeros(2)}

    for own in owns:
        try:
            start = TransfuseTrainerInitInfo(**{"rank": rank, **own})
            trainer = TransfuseTrainerWeightTransferEngine.trainer_init(start, client=None, source=ShardSource(weights))
            trainer.send_weights()
        except (transfuse.TransfuseError, ValueError) as error:
            errors.append(str(error))
    trainer.shutdown()
    return errors


def reset_peak() -> None:
    """From here on, measure. Memory that malloc keeps for later would hide what is allocated again."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes() -> int:
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
