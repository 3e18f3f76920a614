"""The vLLM integration, against vLLM's own base classes, factories, config and HTTP client. No engine of vLLM runs."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from transfuse import Concat, Rename, Slice, TransfuseError
from transfuse.testing.ranks import Died, ProcessPool, preload

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.distributed.weight_transfer", exc_type=ImportError)

from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightSource,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

from transfuse.integrations import vllm as integration
from transfuse.integrations.vllm import ShardSource, TransfuseInitInfo, TransfuseTrainerInitInfo, TransfuseUpdateInfo
from vllm_engines import (
    LAYERS,
    RULES,
    Direct,
    EnginesModel,
    PlacedSource,
    engine_for,
    infer,
    load,
    over_http,
    rounds_of,
    set_round,
    tensor_parallel_trainer,
    train,
    train_with_a_broken_rank,
    trainer_of,
    trainers_model,
    values,
    work,
)

DEADLINE = 300.0

# Importing vLLM takes ten seconds of a core: once for all processes of this module.
preload("vllm.config", "transfuse.integrations.vllm")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# Registration


def test_the_entry_point_registers_both_halves_with_vllm() -> None:
    points = [one for one in metadata.entry_points(group="vllm.general_plugins") if one.name == "transfuse"]
    if not points:
        pytest.skip("transfuse's metadata is not installed here")
    assert {one.value for one in points} == {"transfuse.integrations.vllm:register"}
    script = (
        "from vllm.plugins import load_general_plugins; load_general_plugins(); load_general_plugins()\n"
        "from vllm.distributed.weight_transfer.factory import *\n"
        "for factory in (WeightTransferEngineFactory, WeightTransferTrainerFactory):\n"
        "    print(factory._registry['transfuse']().__name__)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE)
    names = ["TransfuseWeightTransferEngine", "TransfuseTrainerWeightTransferEngine"]
    assert ended.stdout.split()[-2:] == names, ended.stderr


def test_registering_again_does_nothing() -> None:
    before = dict(WeightTransferEngineFactory._registry), dict(WeightTransferTrainerFactory._registry)
    integration.register()
    assert before == (WeightTransferEngineFactory._registry, WeightTransferTrainerFactory._registry)


def test_vllms_config_and_arguments_accept_the_name() -> None:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(weight_transfer_config={"backend": "transfuse"})
    assert arguments.weight_transfer_config.backend == "transfuse"
    assert isinstance(engine_for(EnginesModel()), integration.TransfuseWeightTransferEngine)


def test_no_abstract_method_is_left() -> None:
    for kind in (
        integration.TransfuseWeightTransferEngine,
        integration.TransfuseTrainerWeightTransferEngine,
        ShardSource,
    ):
        assert not kind.__abstractmethods__


# One trainer rank and engines in this process


def weights_of(client: Direct) -> dict[str, torch.Tensor]:
    return dict(client.engine.model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("options", [{}, {"max_bytes": 5000}, {"install": "in_place", "rules": RULES}])
def test_every_round_arrives_exactly(options: dict[str, Any]) -> None:
    model, client = trainers_model(), Direct(EnginesModel())
    with trainer_of(model, client, **options) as trainer:
        for number in (1, 2):
            set_round(model, number)
            trainer.send_weights(weight_version=f"v{number}")
            assert rounds_of(weights_of(client), model) == {number}
    assert client.said == ["init", "start", "update", "finish v1", "start", "update", "finish v2"]
    assert trainer.lost == []


def test_groups_go_layer_by_layer_and_stay_within_max_bytes() -> None:
    model, client = trainers_model(), Direct(EnginesModel())
    with trainer_of(model, client, max_bytes=5000) as trainer:
        trainer.send_weights()
    loads = client.engine.model.loads
    assert len(loads) > LAYERS
    assert max(size for _, size in loads) <= 5000
    loaded = [name for names, _ in loads for name in names]
    assert sorted(loaded) == sorted(name for name, _ in model.named_parameters())
    layers = [int(found[1]) for name in loaded if (found := re.search(r"layers\.(\d+)", name))]
    assert layers == sorted(layers)


def test_a_weight_larger_than_max_bytes_is_named() -> None:
    client = Direct(EnginesModel())
    with (
        trainer_of(trainers_model(), client, max_bytes=100) as trainer,
        pytest.raises(TransfuseError, match=r"embed_tokens.weight' has 2976 bytes, and max_bytes is 100"),
    ):
        trainer.send_weights()
    assert client.engine.model.loads == []


@pytest.mark.parametrize("install", ["load_weights", "in_place"])
def test_float32_masters_arrive_as_bfloat16(install: str) -> None:
    model, client = trainers_model(), Direct(EnginesModel(dtype=torch.bfloat16))
    rules = RULES if install == "in_place" else ()
    with trainer_of(model, client, install=install, rules=rules, dtype=torch.bfloat16) as trainer:
        set_round(model, 1)
        trainer.send_weights()
    assert rounds_of(weights_of(client), model) == {1}
    assert client.engine.version is not None
    assert client.engine.version.step == client.engine.reports[-1].step
    # They are converted before they travel: half of the bytes.
    moved = sum(report.bytes for report in client.engine.reports)
    assert moved == 2 * sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("install", ["load_weights", "in_place"])
def test_tied_weights(install: str) -> None:
    model, client = trainers_model(tied=True), Direct(EnginesModel(tied=True))
    rules = RULES if install == "in_place" else ()
    for source in (ModuleSource(model), ShardSource(model.state_dict)):
        with trainer_of(model, client, source, install=install, rules=rules) as trainer:
            set_round(model, 1)
            trainer.send_weights()
        own = weights_of(client)
        assert rounds_of(own, model) == {1}
        assert own["lm_head.weight"].data_ptr() == own["model.embed_tokens.weight"].data_ptr()


def test_in_place_refuses_names_that_do_not_fit() -> None:
    client = Direct(EnginesModel())
    before = {name: one.clone() for name, one in weights_of(client).items()}
    with (
        trainer_of(trainers_model(), client, install="in_place") as trainer,
        pytest.raises(TransfuseError, match=r"qkv_proj.*only in the target(.|\n)*0 of 9 weights of this model may"),
    ):
        trainer.send_weights()
    assert all(torch.equal(one, before[name]) for name, one in weights_of(client).items())


def test_rules_survive_json() -> None:
    rules: list[Any] = [
        Concat(["a", Slice("b", 0, 1, None)], "ab", dim=1),
        Rename(Slice("c", 0, 0, 2), "d"),
        Rename("x.**", "**"),
    ]
    assert integration._decode([integration._encode(rule) for rule in rules]) == rules


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"addresses": []}, "addresses is empty"),
        ({"install": "push"}, "install must be 'reload', 'load_weights' or 'in_place', got 'push'"),
        ({"rules": [{"rule": "Rename", "source": "a", "target": "b"}]}, "rules are for install='in_place'"),
        ({"install": "in_place", "rules": [{"rule": "Paste"}]}, "expected one of Rename, Concat, Split, Slice"),
        ({"max_bytes": 0}, "max_bytes must be at least 1"),
        ({"packed": True}, "packed"),
    ],
)
def test_wrong_init_info_is_refused(given: dict[str, Any], text: str) -> None:
    engine = engine_for(EnginesModel())
    with pytest.raises(ValueError, match=re.escape(text)):
        engine.parse_init_info({"addresses": ["127.0.0.1:1"], "run": "r", **given})


def test_wrong_update_info_is_refused() -> None:
    engine = engine_for(EnginesModel())
    with pytest.raises(ValueError, match="appears twice"):
        engine.parse_update_info({"round": 1, "names": ["a", "a"], "dtype_names": ["int8"] * 2, "shapes": [[1]] * 2})
    with pytest.raises(ValueError, match="expected as many dtype_names"):
        engine.parse_update_info({"round": 1, "names": ["a"], "dtype_names": [], "shapes": [[1]]})
    with pytest.raises(ValueError, match="'load' is no dtype"):
        TransfuseUpdateInfo(1, ["a"], ["load"], [[1]]).weights()
    with pytest.raises(RuntimeError, match="call init_weight_transfer_engine first"):
        engine.start_weight_update()


def test_a_trainer_refuses_what_it_cannot_serve() -> None:
    class Gathered(WeightSource):  # type: ignore[misc]
        """A source of whole weights alone, as vLLM 0.32 and 0.33 ask for them."""

        metadata: Any = cached_property(lambda self: [])
        __iter__ = iter_full = lambda self: iter(())

    with pytest.raises(TypeError, match=r"Gathered.*with a method shards"):
        WeightTransferTrainerFactory.trainer_init(TransfuseTrainerInitInfo(rank=0), client=None, source=Gathered())
    with pytest.raises(ValueError, match="pass source="):
        WeightTransferTrainerFactory.trainer_init(TransfuseTrainerInitInfo(rank=0), client=None)
    with pytest.raises(ValueError, match=r"rank=1, but this process is rank 0"), trainer_of(trainers_model(), None):
        WeightTransferTrainerFactory.trainer_init(
            TransfuseTrainerInitInfo(rank=1), client=None, source=ModuleSource(trainers_model())
        )
    with pytest.raises(ValueError, match="is no address"):
        TransfuseTrainerInitInfo(rank=0, host="0.0.0.0")
    with pytest.raises(ValueError, match="dtype must be one of"):
        TransfuseTrainerInitInfo(rank=0, dtype=torch.int8)
    with pytest.raises(TypeError, match="max_bytes takes a number of bytes, or None, got '1GiB'"):
        TransfuseTrainerInitInfo(rank=0, max_bytes="1GiB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rules takes Rename, Concat and Split, got 1"):
        TransfuseTrainerInitInfo(rank=0, rules=[1])  # type: ignore[list-item]


def test_a_source_with_shards_of_its_own_will_do() -> None:
    model, client = trainers_model(), Direct(EnginesModel())
    source = ShardSource(lambda: {name: one.detach() for name, one in model.named_parameters()})
    assert isinstance(source, WeightSource)
    iterated = source.iter_full() if hasattr(source, "iter_full") else source
    assert [name for name, _ in iterated] == [one.name for one in integration._described(source)]
    with trainer_of(model, client, source) as trainer:
        set_round(model, 3)
        trainer.send_weights()
    assert rounds_of(weights_of(client), model) == {3}


# What a worker fetches


class ReadingModel(EnginesModel):
    """Of the first half of the rows of ``lm_head`` it has no use; of ``embed_tokens`` for none, if told so."""

    ignores = False
    reads = "half"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        weights = list(weights)
        for name, weight in weights:
            own = self.get_parameter(name) if "layers" not in name else None
            if name == "lm_head.weight" and own is not None:
                if self.reads == "half":
                    own[16:].copy_(weight[16:])
                elif self.reads == "all":
                    own.copy_(weight)
                elif self.reads == "unseen":
                    own.data = weight
                else:
                    raise OSError("no room")
            elif name == "model.norm.weight" or (name == "model.embed_tokens.weight" and self.ignores):
                continue
            else:
                super().load_weights([(name, weight)])
        return set()


def fetched(client: Direct) -> int:
    return sum(report.bytes for report in client.engine.reports)


def test_a_worker_fetches_what_its_model_has_read() -> None:
    """And more, if the model reads more; whole weights, if it keeps what it was given, or fails to load it."""
    model: Any = trainers_model()
    own: Any = ReadingModel()
    client = Direct(own)
    whole = sum(one.nbytes for one in model.parameters())
    head, norm = model.lm_head.weight, model.model.norm.weight
    part = whole - norm.nbytes - head[:16].nbytes
    got: list[int] = []

    def send(number: int) -> bool:
        set_round(model, number)
        trainer.send_weights()
        got.append(fetched(client))
        return torch.equal(own.lm_head.weight[16:], head[16:])

    with trainer_of(model, client, max_bytes=5000) as trainer:
        assert send(1)
        assert send(2)
        assert got == [whole, part]
        own.reads = "all"
        assert send(3)
        assert send(4)
        assert torch.equal(own.lm_head.weight, head)
        assert got[2:] == [part + head.nbytes, whole - norm.nbytes]
        # It forgets what it has not read for once, and learns of it again.
        own.reads = "half"
        assert send(5)
        assert send(6)
        assert got[4:] == [whole - norm.nbytes, part]
        own.reads = "unseen"
        with pytest.raises(TransfuseError, match=r"has kept 'lm_head.weight', of which this worker had brought a part"):
            send(7)
        assert send(8)
        assert torch.equal(own.lm_head.weight, head)
        assert got[-1] == whole - norm.nbytes
        own.lm_head.weight.data = own.lm_head.weight.data.clone()
        own.reads = "fails"
        with pytest.raises(TransfuseError, match="no room"):
            send(9)
        own.reads = "half"
        assert [send(10), send(11)] == [True, True]
        assert got[-2:] == [whole, whole]


# Tokens and runs


def test_a_worker_with_another_token_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_TOKEN", "the trainer's")
    with trainer_of(trainers_model(), None) as trainer:
        sent = trainer._init
        assert sent.token is None  # A token of the environment does not travel.
        client = Direct(EnginesModel())
        client.engine.init_transfer_engine(sent)
        monkeypatch.setenv("TRANSFUSE_TOKEN", "another")
        with pytest.raises(
            TransfuseError, match=rf"{re.escape(sent.addresses[0])} does not answer.*same TRANSFUSE_TOKEN"
        ):
            client.engine.init_transfer_engine(sent)
        trainer.attach(client)
        with pytest.raises(TransfuseError, match="reached no engine"):
            trainer.send_weights()
    assert client.engine.model.loads == []


def test_a_trainer_without_a_token_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFUSE_TOKEN", raising=False)
    with trainer_of(trainers_model(), Direct(EnginesModel())) as one, trainer_of(trainers_model(), None) as other:
        assert len(one._init.token or "") == 64
        assert one._init.secret != other._init.secret


def test_another_start_of_the_trainer_on_the_same_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_TOKEN", "shared")
    client, model = Direct(EnginesModel()), trainers_model()
    with trainer_of(model, client) as trainer:
        port = int(trainer.addresses[0].split(":")[1])
    with trainer_of(model, None, port=port) as trainer:
        set_round(model, 1)
        trainer._offer(1, dict(model.named_parameters()))
        update = TransfuseUpdateInfo.of(1, integration._described(ModuleSource(model)), None)
        with pytest.raises(TransfuseError, match="round 1, group 1 of 1"):
            client.engine.receive_weights(update)
    assert client.engine.model.loads == []


# Rounds are never mixed


def test_a_worker_that_the_trainer_no_longer_waits_for_gets_no_weight_of_another_round() -> None:
    """It has loaded a group of round 1 when the trainer goes on, trains, and sends round 2 to another engine."""
    model, slow, other = trainers_model(), Direct(EnginesModel()), Direct(EnginesModel())
    loading, go_on = threading.Event(), threading.Event()

    def stall(loads: int) -> None:
        if loads == 1:
            loading.set()
            assert go_on.wait(DEADLINE)

    slow.engine.model.before = stall
    with trainer_of(model, slow, max_bytes=5000, update_timeout=20.0) as trainer:
        trainer.attach(other)
        set_round(model, 1)
        trainer.send_weights()
        assert loading.is_set()
        ((lost, cause),) = trainer.lost
        assert lost is slow
        assert "has not returned in 20 s" in str(cause)
        # The trainer goes on, first without a round, then within one.
        trainer._info.update_timeout = DEADLINE
        set_round(model, 2)
        seen: list[str] = []

        def resume(loads: int) -> None:
            if loads == 0:  # Round 2 is offered now.
                go_on.set()
                busy: Any = trainer._engines[0].busy
                busy.join(DEADLINE)
                seen.append("ended" if not busy.is_alive() else "busy")

        other.engine.model.loads.clear()
        other.engine.model.before = resume
        trainer.send_weights()
        assert seen == ["ended"]
        assert "has not returned from an earlier round" in str(trainer.lost[0][1])
        # One group of round 1 and the one that it was loading; nothing of round 2. The rest is as it was: zeros.
        assert rounds_of(weights_of(slow), model) == {1, None}
        assert rounds_of(weights_of(other), model) == {2}
        # The next round initializes it again, and brings all.
        other.engine.model.before = slow.engine.model.before = None
        set_round(model, 3)
        trainer.send_weights()
        assert trainer.lost == []
        assert rounds_of(weights_of(slow), model) == rounds_of(weights_of(other), model) == {3}


def test_between_rounds_nothing_is_offered() -> None:
    model, client = trainers_model(), Direct(EnginesModel())
    with trainer_of(model, client) as trainer:
        set_round(model, 1)
        trainer.send_weights()
        client.engine.model.loads.clear()
        set_round(model, 2)
        update = TransfuseUpdateInfo.of(1, integration._described(ModuleSource(model)), None)
        with pytest.raises(TransfuseError, match=r"round 1, group 1 of 1(.|\n)*step(.|\n)*0 of 18 weights"):
            client.engine.receive_weights(update)
    assert client.engine.model.loads == []


# Engines come and go


def test_a_failed_engine_is_told_so_and_gets_the_next_round() -> None:
    model, good, bad = trainers_model(), Direct(EnginesModel()), Direct(EnginesModel())

    def fail(loads: int) -> None:
        raise OSError("no room")

    bad.engine.model.before = fail
    with trainer_of(model, good) as trainer:
        trainer.attach(bad)
        set_round(model, 1)
        trainer.send_weights()
        assert [(client, str(cause)) for client, cause in trainer.lost] == [(bad, "no room")]
        assert rounds_of(weights_of(good), model) == {1}
        bad.engine.model.before = None
        set_round(model, 2)
        trainer.send_weights()
        # It ended the update that had failed, and was initialized again.
        assert bad.said == ["init", "start", "update", "finish", "init", "start", "update", "finish"]
        assert rounds_of(weights_of(bad), model) == {2}
        trainer.detach(bad)
        set_round(model, 3)
        trainer.send_weights()
        assert rounds_of(weights_of(bad), model) == {2}


def test_without_engines_a_round_does_nothing() -> None:
    with trainer_of(trainers_model(), None) as trainer:
        trainer.send_weights()
        assert trainer.lost == []


def test_an_engine_that_cannot_be_initialized_is_named() -> None:
    class Gone:
        def __repr__(self) -> str:
            return "engine 7"

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            raise ConnectionError("refused")

    with pytest.raises(TransfuseError, match="engine 7 could not be initialized: ConnectionError: refused"):
        trainer_of(trainers_model(), Gone()).__enter__()


def test_messages_name_the_engines_url_and_not_the_secret() -> None:
    client = HTTPVLLMWeightSyncClient("http://127.0.0.1:1")
    with pytest.raises(TransfuseError, match=r"the engine behind http://127\.0\.0\.1:1 could not be initialized"):
        trainer_of(trainers_model(), client).__enter__()
    with trainer_of(trainers_model(), None) as trainer:
        trainer.attach(client)
        with pytest.raises(TransfuseError, match=r"reached no engine:\nhttp://127\.0\.0\.1:1: "):
            trainer.send_weights()
    assert "s3cret" not in repr(TransfuseInitInfo(["h:1"], "run", "s3cret"))


# vLLM's own layerwise reload, where all that it imports is installed


@pytest.fixture
def reload() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("vllm.model_executor.model_loader.reload", exc_type=ImportError)


def test_vllms_layerwise_reload(reload: Any) -> None:
    model, client = trainers_model(), Direct(EnginesModel())
    own = client.engine.model
    for one in own.parameters():
        one.weight_loader = load
    reload.record_metadata_for_reloading(own)
    places = {name: one.data_ptr() for name, one in own.named_parameters()}
    with trainer_of(model, client, install="reload", max_bytes=5000) as trainer:
        for number in (1, 2):
            set_round(model, number)
            trainer.send_weights()
            assert rounds_of(weights_of(client), model) == {number}
        # An update that fails between two parts of a layer, and the next: nothing of the first is left.
        fails = {"count": 0}

        def fail(loads: int) -> None:
            fails["count"] += 1
            if fails["count"] == 3:
                raise OSError("no room")

        own.before = fail
        set_round(model, 3)
        with pytest.raises(TransfuseError, match="no room"):
            trainer.send_weights()
        assert {name: one.data_ptr() for name, one in own.named_parameters()} == places
        own.before = None
        set_round(model, 4)
        trainer.send_weights()
        assert rounds_of(weights_of(client), model) == {4}
    assert {name: one.data_ptr() for name, one in own.named_parameters()} == places


# An FSDP2 trainer of two processes, and engines in two others


@pytest.fixture(scope="module")
def trainers() -> Iterator[ProcessPool]:
    with ProcessPool(2, method="forkserver") as pool:
        yield pool


@pytest.fixture(scope="module")
def engines() -> Iterator[ProcessPool]:
    with ProcessPool(2, method="forkserver") as pool:
        yield pool


def test_what_fails_on_one_rank_is_told_to_all(trainers: ProcessPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        outcomes = trainers.run(train_with_a_broken_rank, where, deadline=DEADLINE)
    told = [outcome.get() for outcome in outcomes]
    assert told[0] == told[1]
    assert told[0][0] == "rank=0, but this process is rank 1: of its group"
    assert re.match(r"rank 1 cannot serve at 127\.0\.0\.1:\d+: OSError", told[0][1])
    assert told[0][2] == "rank 1 cannot offer its weights: OSError: a shard is missing"


class Job:
    """Both pools at work: the parent tells trainers and engines what to do, and hears what they say."""

    def __init__(self, *pools: ProcessPool) -> None:
        self.trainers, self.engines = pools[0], pools[-1]
        for pool in pools:
            pool._refresh()
            pool._suspect = True

    def infer(self, *args: Any, ranks: tuple[int, ...] = (0, 1)) -> list[str]:
        self.engines.start(infer, *args, ranks=ranks)
        return list(self.hear(self.engines, ranks).values())

    def hear(self, pool: ProcessPool, ranks: tuple[int, ...] = (0, 1)) -> dict[int, Any]:
        heard: dict[int, Any] = {}
        while len(heard) < len(ranks):
            said = pool.said(DEADLINE)
            assert said is not None
            heard[said[0]] = said[1]
        return dict(sorted(heard.items()))

    def tell_trainers(self, kind: str, given: Any) -> dict[int, Any]:
        self.order(kind, given)
        return self.answer()

    def order(self, kind: str, given: Any) -> None:
        for rank in (0, 1):
            self.trainers.tell(rank, (kind, given))

    def answer(self) -> dict[int, Any]:
        return self.hear(self.trainers)

    def stop(self, pool: ProcessPool, *ranks: int) -> list[Any]:
        for rank in ranks:
            pool.tell(rank, "stop")
        found = [one.get() for one in pool.outcomes(DEADLINE, ranks)]
        pool._suspect = pool._suspect and len(ranks) < 2
        return found


def test_two_fsdp_ranks_update_two_engines_in_other_processes(trainers: ProcessPool, engines: ProcessPool) -> None:
    job = Job(trainers, engines)
    urls = job.infer({})
    trainers.start(train_with, {}, {"max_bytes": 5000})
    job.tell_trainers("init", urls)
    for number in (1, 2):
        assert job.tell_trainers("send", number) == {0: ("sent", []), 1: ("sent", [])}
    model = trainers_model()
    for found in job.stop(engines, 0, 1):
        assert found["errors"] == []
        assert rounds_of(found["weights"], model) == {2}
        assert max(size for _, size in found["loads"]) <= 5000
    job.stop(trainers, 0, 1)


def train_with(rank: int, options: dict[str, Any], info: dict[str, Any]) -> list[str]:
    return train(rank, options, **info)


def test_memory_stays_within_the_bound(trainers: ProcessPool, engines: ProcessPool) -> None:
    """An engine whose weights are 64 MiB fetches them 6 MiB at a time."""
    job = Job(trainers, engines)
    size: dict[str, Any] = {"width": 1024, "layers": 4}
    total = sum(one.nbytes for one in trainers_model(**size).parameters())
    assert round(total / (1 << 20)) == 64, total  # As the page says.
    grown = []
    for bound in (6 << 20, None):
        (url,) = job.infer(size, ranks=(0,))
        trainers.start(train_with, size, {"max_bytes": bound})
        job.tell_trainers("init", [url])
        job.tell_trainers("send", 1)  # What is allocated once is allocated now.
        engines.tell(0, "watch")
        before = job.hear(engines, (0,))[0]
        assert job.tell_trainers("send", 2)[0] == ("sent", [])
        engines.tell(0, "peak")
        grown.append(job.hear(engines, (0,))[0] - before)
        (found,) = job.stop(engines, 0)
        assert found["errors"] == []
        job.stop(trainers, 0, 1)
    print("the worker grew by", grown, "bytes")
    assert grown[0] < 16 << 20, grown
    # The measure shows it: without a bound below its size, all of the model is in memory a second time.
    assert grown[1] > 0.9 * total, grown


def test_an_engine_that_is_killed_does_not_stop_the_trainer(trainers: ProcessPool, engines: ProcessPool) -> None:
    """SIGKILL in the middle of a fetch. The others get the round; a new engine joins, and gets the next."""
    job = Job(trainers, engines)
    (dying,) = job.infer({}, "fetch", ranks=(0,))
    (living,) = job.infer({}, ranks=(1,))
    trainers.start(train_with, {}, {"max_bytes": 5000})
    job.tell_trainers("init", [dying, living])
    job.order("send", 1)
    assert job.hear(engines, (0,)) == {0: "paused"}
    engines.kill(0)
    assert job.answer()[0] == ("sent", [dying])
    assert isinstance(engines.outcomes(DEADLINE, [0])[0].error, Died)
    engines.restart(0)
    (joining,) = job.infer({}, ranks=(0,))
    job.tell_trainers("attach", joining)
    assert job.tell_trainers("send", 2)[0] == ("sent", [dying])
    model = trainers_model()
    for found in job.stop(engines, 0, 1):
        assert found["errors"] == []
        assert rounds_of(found["weights"], model) == {2}
    job.stop(trainers, 0, 1)


def test_a_frozen_engine_does_not_hold_up_the_trainer(trainers: ProcessPool, engines: ProcessPool) -> None:
    """SIGSTOP in the middle of a fetch. The trainer goes on and names it; thawed, it fails, and gets a later round."""
    job = Job(trainers, engines)
    (freezing,) = job.infer({}, "fetch", ranks=(0,))
    (living,) = job.infer({}, ranks=(1,))
    trainers.start(train_with, {}, {"max_bytes": 5000, "timeout": 5.0, "update_timeout": 5.0})
    job.tell_trainers("init", [freezing, living])
    job.order("send", 1)
    assert job.hear(engines, (0,)) == {0: "paused"}
    engines.freeze(0)
    assert job.answer() == {0: ("sent", [freezing]), 1: ("sent", [])}
    # Its client is still waiting for an answer: the next round goes without it, and at once.
    assert job.tell_trainers("send", 2)[0] == ("sent", [freezing])
    engines.thaw(0)
    engines.tell(0, "go on")
    assert job.hear(engines, (0,)) == {0: "failed"}
    number = 3
    while job.tell_trainers("send", number)[0] != ("sent", []):  # Until its client has heard of the failure.
        number += 1
    model = trainers_model()
    frozen, other = job.stop(engines, 0, 1)
    (error,) = frozen["errors"]
    assert re.search(r"round 1, group [12] of 8", error)  # All bytes of group 1 may have been here when it froze.
    assert other["errors"] == []
    for found in (frozen, other):
        assert rounds_of(found["weights"], model) == {number}
    job.stop(trainers, 0, 1)


def test_a_trainer_that_dies_is_named(trainers: ProcessPool, engines: ProcessPool) -> None:
    """Rank 1 is killed between two groups. The worker says which address is gone, and how much it has loaded."""
    job = Job(trainers, engines)
    (url,) = job.infer({}, 1, ranks=(0,))
    trainers.start(train_with, {}, {"max_bytes": 5000, "timeout": 6.0})
    addresses = job.tell_trainers("init", [url])[0][1]
    job.order("send", 1)
    assert job.hear(engines, (0,)) == {0: "paused"}
    trainers.kill(1)
    assert isinstance(trainers.outcomes(DEADLINE, [1])[0].error, Died)
    engines.tell(0, "go on")
    assert job.hear(engines, (0,)) == {0: "failed"}
    trainers.end(0)
    (found,) = job.stop(engines, 0)
    (error,) = found["errors"]
    assert "round 1, group 3 of 8" in error
    assert addresses[1] in error.split("did not arrive")[1]
    assert re.search(r"\b[1-9]\d* of 18 weights of this model may have changed already", error)


def test_a_source_with_vllms_placements(trainers: ProcessPool) -> None:
    """Two ranks hold rows, columns and whole weights, and no mesh of torch says so. vLLM 0.33 knows such sources."""
    if not hasattr(WeightSource, "iter_local"):
        pytest.skip("vLLM 0.32 has no placements")
    model, client, failures = trainers_model(), Direct(EnginesModel()), list[Exception]()
    job = Job(trainers)
    with over_http(client, failures.append) as url:
        trainers.start(train_with, {}, {"placed": True, "max_bytes": 5000})
        job.tell_trainers("init", [url])
        for number in (1, 2):
            assert job.tell_trainers("send", number) == {0: ("sent", []), 1: ("sent", [])}
            assert rounds_of(weights_of(client), model) == {number}
        job.stop(trainers, 0, 1)
    assert failures == []
    row = replace(PlacedSource(model, 1).metadata[0], shape=(1, 24))
    assert integration._placed(row, torch.zeros(0, 24), 1) == []  # One row for two ranks: nothing is left.
    # Nothing travels twice, although some weights lie on both ranks.
    assert fetched(client) == sum(one.nbytes for one in model.parameters())


# Tensor-parallel workers, with layers of vLLM


class TwoWorkers:
    """A client of an engine of two workers, in processes: each call goes to both, as vLLM's executor does it."""

    def __init__(self, pool: ProcessPool) -> None:
        self.pool = pool
        self.moved: dict[int, Any] = {}

    def hear(self) -> list[Any]:
        heard: dict[int, Any] = {}
        while len(heard) < 2:
            said = self.pool.said(DEADLINE)
            assert said is not None
            heard[said[0]] = said[1]
        return [heard[0], heard[1]]

    def call(self, name: str, *given: Any) -> None:
        for rank in (0, 1):
            self.pool.tell(rank, (name, given))
        said = self.hear()
        self.errors = [one for one in said if isinstance(one, str)]
        if self.errors:
            raise RuntimeError(str(self.errors))
        if name == "finish_weight_update":
            self.moved[int(given[0])] = said

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version or "0")


@pytest.mark.parametrize("install", ["reload", "load_weights"])
def test_two_tensor_parallel_workers_fetch_every_byte_once(
    engines: ProcessPool, install: str, request: pytest.FixtureRequest
) -> None:
    """At first what all need whole, which one fetches and passes on. Then each its part, by vLLM's own loaders."""
    request.getfixturevalue("reload")
    model, client = tensor_parallel_trainer(), TwoWorkers(engines)
    engines._refresh()
    engines._suspect = True
    engines.start(work, install == "reload")
    assert client.hear() == ["ready", "ready"]
    sizes = {name: one.nbytes for name, one in model.named_parameters()}
    total, extra = sum(sizes.values()), sizes["extra.weight"]
    # The norms, and the one head of keys and values, which the second worker has from the first or the other way round.
    alike = sum(size for name, size in sizes.items() if "norm" in name or "k_proj" in name or "v_proj" in name)
    with trainer_of(model, client, install=install, max_bytes=13000) as trainer:
        for number in (1, 2, 3):
            set_round(model, number)
            trainer.send_weights(weight_version=str(number))
        # A round that is over: both workers say so, also the one that would have got it from the other.
        client.start_weight_update()
        stale = TransfuseUpdateInfo.of(3, integration._described(ModuleSource(model)), None)
        with pytest.raises(RuntimeError):
            client.update_weights(asdict(stale))
        assert ["round 3, group 1 of" in error for error in client.errors] == [True, True], client.errors
        for rank in (0, 1):
            engines.tell(rank, "stop")
        for outcome in engines.outcomes(DEADLINE):
            outcome.get()
    for number, fetched, passed_on in ((1, total, total), (2, total - extra, alike), (3, total - extra, alike)):
        moved = client.moved[number]
        assert [wrong for _, _, wrong in moved] == [[], []]
        assert sum(from_trainer for from_trainer, _, _ in moved) == fetched, moved
        assert sum(from_mate for _, from_mate, _ in moved) == passed_on, moved
    # Each has its part: neither fetches all.
    assert max(from_trainer for from_trainer, _, _ in client.moved[3]) < 0.7 * total


# The page


def test_the_code_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "vllm.md").read_text()
    assert "No engine of vLLM has run here" in page
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    own = EnginesModel(dtype=torch.bfloat16)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    except ImportError:
        code = code.replace("rank=rank", "rank=rank, install='load_weights'")  # Not all that vLLM imports is installed.
    else:
        for one in own.parameters():
            one.weight_loader = load  # type: ignore[attr-defined]
        record_metadata_for_reloading(own)
    model, client, failures = trainers_model(), Direct(own), list[Exception]()
    rounds = iter((1, 2))
    with over_http(client, failures.append) as url:
        given = {
            "rank": 0,
            "url": url,
            "model": model,
            "steps": 2,
            "train": lambda model: set_round(model, next(rounds)),
        }
        exec(compile(code, "docs/integrations/vllm.md", "exec"), given)
    assert failures == []
    assert rounds_of(weights_of(client), model) == {2}
    assert client.said == ["init", "start", "update", "finish 0", "start", "update", "finish 1"]


def test_values_differ_by_round_and_name() -> None:
    assert not torch.equal(values("a", (3,), 1), values("a", (3,), 2))
    assert not torch.equal(values("a", (3,), 1), values("b", (3,), 1))


def test_the_secret_of_an_init_info_is_of_its_run() -> None:
    one, other = (TransfuseInitInfo(["h:1"], run, "t") for run in "ab")
    assert one.secret != other.secret
