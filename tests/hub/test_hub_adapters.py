"""An adapter's versions: what the real peft saves, and the real clients load, at every step of a job that trains on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import certificates
import transfuse
from adapters_made import IDS, adapted, base_model, peft
from commands import Running
from hub_asking import Page, Reply, ask, environment, sharded_job, step_in, visit, wait_until

pytest.importorskip("peft", reason="peft is not installed: pip install peft")
huggingface_hub: Any = pytest.importorskip("huggingface_hub")
client_errors: Any = pytest.importorskip("huggingface_hub.errors")
safetensors: Any = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def filled(model: Any) -> Any:
    """A model whose trainable tensors are none of them zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model


class Training:
    """A job that trains an adapter, and remembers what it was at every step."""

    def __init__(self, model: Any) -> None:
        self.model, self.step = model, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.were = {0: self.now()}

    def now(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(self.model).items()}

    def advance(self, hub: transfuse.Hub) -> None:
        self.optimizer.zero_grad()
        self.model(IDS, labels=IDS).loss.backward()
        with hub.mutating():
            self.optimizer.step()
            self.step += 1
        self.were[self.step] = self.now()


def get(hub: transfuse.Hub, name: str, file: str) -> Reply:
    return ask(hub.endpoint, "GET", f"/{name}/resolve/main/{file}")


def tensors(hub: transfuse.Hub, name: str) -> dict[str, torch.Tensor]:
    reply = get(hub, name, WEIGHTS)
    assert reply.status == 200, reply.body
    return dict(safetensors.load(reply.body))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(tensor, expected[name].cpu()), name


def digests(of: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in of.items()}


# --------------------------------------------------------------------------------------- as save_pretrained writes it


def sorted_lists(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the order of what peft holds in sets."""
    return {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()}


KINDS: dict[str, Any] = {
    "lora": lambda: adapted(),
    "dora, modules and patterns": lambda: adapted(
        use_dora=True, modules_to_save=["lm_head"], rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 3}, bias="all"
    ),
    "an embedding": lambda: adapted(target_modules=["embed_tokens", "q_proj"]),
    "rows of an embedding": lambda: adapted(trainable_token_indices=[1, 5]),
    "no task": lambda: adapted(task_type=None, use_rslora=True),
    "bf16": lambda: adapted().to(torch.bfloat16),
    "ia3": lambda: peft.get_peft_model(
        base_model(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    ),
    "prompt": lambda: peft.get_peft_model(
        base_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ),
    "within another module": lambda: torch.nn.Sequential(adapted()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_those_that_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    made: Any = filled(KINDS[kind]())
    with transfuse.hub(adapter=made, step=3) as hub:
        assert hub.adapters == ["live/policy-v3"]
        found, config = tensors(hub, "live/policy-v3"), get(hub, "live/policy-v3", CONFIG).json
    model: Any = made[0] if isinstance(made, torch.nn.Sequential) else made
    assert model.peft_config["default"].inference_mode is False  # The job's own config is as it was.
    model.save_pretrained(tmp_path)
    assert_equal(found, safetensors.load_file(tmp_path / WEIGHTS))
    assert sorted_lists(config) == sorted_lists(json.loads((tmp_path / CONFIG).read_text()))


def test_several_adapters_of_a_model(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("critic", peft.LoraConfig(target_modules=["o_proj"], r=2, task_type="CAUSAL_LM"))
    filled(model)
    with pytest.raises(ValueError, match="give adapter_name=: the model's adapters are 'default', 'critic'"):
        transfuse.hub(adapter=model)
    with pytest.raises(ValueError, match=r"adapter_name='none' is not there: .*'critic'"):
        transfuse.hub(adapter=model, adapter_name="none")
    model.save_pretrained(tmp_path)
    with transfuse.hub(adapter=model, adapter_name="critic", name="acme/judge", step=7) as hub:
        assert hub.adapters == ["acme/judge-v7"]
        assert_equal(tensors(hub, "acme/judge-v7"), safetensors.load_file(tmp_path / "critic" / WEIGHTS))
    with transfuse.hub(adapter=model, adapter_name=["default", "critic"], step=7) as hub:
        assert hub.adapters == ["live/policy-default-v7", "live/policy-critic-v7"]
        assert_equal(tensors(hub, hub.adapters[0]), safetensors.load_file(tmp_path / WEIGHTS))
        assert_equal(tensors(hub, hub.adapters[1]), safetensors.load_file(tmp_path / "critic" / WEIGHTS))
        assert get(hub, hub.adapters[1], CONFIG).json["r"] == 2
        assert b"policy-default-v7" in get(hub, "live/policy-v7", CONFIG).body  # That is none of them.


# ------------------------------------------------------------------------------------------------ the real clients


def test_peft_loads_each_version_by_its_name(tmp_path: Path) -> None:
    """In a process of its own, whose logits equal those of the trainer at that step; old names, and unknown ones."""
    training = Training(adapted(use_dora=True, modules_to_save=["lm_head"]))
    logits = {}
    with (
        transfuse.hub(adapter=training.model, step=lambda: training.step, versions=2, hold=0.1) as hub,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HELPERS / "adapter_engine.py"), str(tmp_path / "got.pt")],
            env=environment(hub, tmp_path / "home", OMP_NUM_THREADS="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as engine,
    ):

        def load(name: str) -> str:
            assert engine.stdin is not None
            assert engine.stdout is not None
            engine.stdin.write(f"{name}\n")
            engine.stdin.flush()
            return engine.stdout.readline()

        for _ in range(3):
            training.advance(hub)
            with torch.no_grad():
                logits[training.step] = training.model.eval()(IDS).logits
        assert hub.adapters == ["live/policy-v3", "live/policy-v2"]
        for step in (3, 2):
            assert load(f"live/policy-v{step}") == "loaded\n"
            state, computed = torch.load(tmp_path / "got.pt")
            assert_equal(state, training.were[step])
            assert torch.equal(computed, logits[step])
        for name in ("live/policy-v1", "live/policy-v4", "live/policy", "live/policy-v03", "live/other-v3"):
            said = load(name)
            assert said.startswith("unknown"), said
            assert "this hub has live/policy-v3, live/policy-v2" in said
        assert engine.stdin is not None
        engine.stdin.close()


@pytest.mark.parametrize("rounds", [pytest.param(12, id="12"), pytest.param(300, id="300", marks=pytest.mark.soak)])
def test_every_version_that_is_downloaded_is_the_state_of_its_step(rounds: int, tmp_path: Path) -> None:
    """A process downloads the newest and the oldest version in a loop, while the job trains on."""
    training = Training(adapted(use_dora=True))
    shared = transfuse.State({"model": training.model, "optimizer": training.optimizer})
    with (
        transfuse.hub(adapter=shared, step=lambda: training.step, versions=3) as hub,
        subprocess.Popen(
            [sys.executable, str(HELPERS / "adapter_reader.py"), str(rounds)],
            env=environment(hub, tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as reader,
    ):
        # Read aside: a reader whose pipe is full does not end.
        out: list[str] = []
        listening = threading.Thread(target=lambda: out.extend(reader.communicate()))
        listening.start()
        while listening.is_alive():
            training.advance(hub)
            assert hub.adapters[0] == f"live/policy-v{training.step}"
            assert len(hub.adapters) <= 6
            listening.join(0.02)
        assert reader.returncode == 0, out[1]
    lines = [json.loads(line) for line in out[0].splitlines()]
    commits: dict[str, str] = {}
    for line in lines:
        assert line["digests"] == digests(training.were[int(line["name"].removeprefix("live/policy-v"))])
        assert commits.setdefault(line["name"], line["commit"]) == line["commit"]
    assert len(commits) > 1
    assert len(set(commits.values())) == len(commits)


# --------------------------------------------------------------------------------------------------- steps and names


class Tensors:
    """An adapter without peft: tensors, every element of which is a known function of the step."""

    def __init__(self, size: int = 100) -> None:
        self.step = 0
        self.state = {f"layer.{i}.weight": torch.full((size + i,), float(i)) for i in range(3)}

    def open(self, **options: Any) -> transfuse.Hub:
        given: dict[str, Any] = {"step": lambda: self.step, "adapter_config": {"peft_type": "LORA", "r": 8}} | options
        return transfuse.hub(adapter=self.state, **given)

    def advance(self, hub: transfuse.Hub, step: int | None = None) -> None:
        with hub.mutating():
            self.step = self.step + 1 if step is None else step
            for i, tensor in enumerate(self.state.values()):
                tensor.fill_(self.step * 100 + i)


def test_tensors_and_a_config_need_no_peft() -> None:
    mine = Tensors()
    with mine.open(step=None, name="policy", adapter_config=peft.LoraConfig(r=4, target_modules={"b", "a"})) as hub:
        assert hub.adapters == ["policy-v0"]  # Without a step it is the number of changes.
        for _ in range(2):
            mine.advance(hub)
        assert hub.adapters == ["policy-v2", "policy-v1", "policy-v0"]
        assert step_in(tensors(hub, "policy-v1")) == 1
        config = get(hub, "policy-v1", CONFIG).json
        assert (config["r"], config["peft_type"], config["target_modules"]) == (4, "LORA", ["a", "b"])


def test_blocks_within_blocks_and_blocks_that_raise() -> None:
    mine = Tensors()
    with mine.open() as hub:
        with hub.mutating():
            mine.advance(hub)
            assert hub.adapters == ["live/policy-v0"]  # Not before the outermost block ends.
            mine.advance(hub)
        assert hub.adapters == ["live/policy-v2", "live/policy-v0"]
        with contextlib.suppress(KeyError), hub.mutating():
            mine.step += 1
            raise KeyError
        assert hub.adapters[0] == "live/policy-v2"
        mine.advance(hub)
        assert hub.adapters[0] == "live/policy-v4"
        assert step_in(tensors(hub, "live/policy-v4")) == 4


def test_a_name_never_stands_for_other_bytes(caplog: pytest.LogCaptureFixture) -> None:
    mine = Tensors()
    with mine.open(versions=2, hold=1e-6) as hub:
        mine.advance(hub)
        before = get(hub, "live/policy-v1", WEIGHTS)
        with hub.mutating():
            pass  # Nothing has changed, so nobody is warned.
        assert not caplog.records
        with hub.mutating():
            mine.state["layer.1.weight"].fill_(-1)  # Another state of the same step.
        assert "live/policy-v1 stands for other values already" in caplog.text
        assert get(hub, "live/policy-v1", WEIGHTS).body == before.body
        for _ in range(4):
            mine.advance(hub)
        assert hub.adapters == ["live/policy-v5", "live/policy-v4"]
        # A job that went back: what was told under a name is told again, and nothing else.
        mine.advance(hub, step=1)
        assert hub.adapters == ["live/policy-v1", "live/policy-v5"]
        again = get(hub, "live/policy-v1", WEIGHTS)
        assert (again.body, again.headers["X-Repo-Commit"]) == (before.body, before.headers["X-Repo-Commit"])
        for _ in range(4):
            mine.advance(hub)
        assert get(hub, "live/policy-v1", WEIGHTS).status == 404
        with hub.mutating():
            mine.step = 1
        assert get(hub, "live/policy-v1", WEIGHTS).status == 404
        mine.advance(hub)
        assert step_in(tensors(hub, "live/policy-v2")) == 2  # Nobody had asked for the first one.


def connection(hub: transfuse.Hub) -> socket.socket:
    host, port = hub.endpoint.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_steps_that_are_taken_during_a_download() -> None:
    """A version stays for who reads it, and for at most as many readers of old versions as there are new ones."""
    mine = Tensors(size=2_000_000)
    path = "/live/policy-v{}/resolve/main/" + WEIGHTS
    with mine.open(versions=1, hold=1e-6) as hub, contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(connection(hub)) for _ in range(3))
        request = "GET {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        first.sendall(request.format(path.format(0)).encode())
        whole = first.recv(100)
        assert whole
        for _ in range(3):
            mine.advance(hub)
        assert hub.adapters == ["live/policy-v3", "live/policy-v0"]
        second.sendall(request.format(path.format(3)).encode())
        assert second.recv(100)
        while piece := first.recv(1 << 20):
            whole += piece
        head, _, body = whole.partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        assert step_in(safetensors.load(body)) == 0
        # Now one version may be read beside the newest, and a second reader takes its place.
        mine.advance(hub)
        third.sendall(request.format(path.format(4)).encode())
        assert third.recv(100)
        mine.advance(hub)
        assert hub.adapters == ["live/policy-v5", "live/policy-v4"]
        got = 0
        with contextlib.suppress(ConnectionError):
            while piece := second.recv(1 << 20):
                got += len(piece)
        assert got < sum(tensor.nbytes for tensor in mine.state.values())
        whole = b""
        while piece := third.recv(1 << 20):
            whole += piece
        assert whole.endswith(mine.state["layer.2.weight"].fill_(402).numpy().tobytes()[-1000:])


def test_an_optimizer_in_the_state_and_a_state_that_serves_too() -> None:
    training = Training(adapted())
    shared = transfuse.State({"model": training.model, "optimizer": training.optimizer})
    with transfuse.serve(shared, step=1, token="secret"), transfuse.hub(adapter=shared) as hub:
        training.model(IDS, labels=IDS).loss.backward()
        training.optimizer.step()
        assert hub.adapters == ["live/policy-v1", "live/policy-v0"]
        assert_equal(tensors(hub, "live/policy-v1"), training.now())
        assert_equal(tensors(hub, "live/policy-v0"), training.were[0])
    assert not training.optimizer._optimizer_step_pre_hooks
    training.optimizer.step()  # After close() nobody reads.


def test_a_copy_that_fails_is_told_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    mine = Tensors()
    with mine.open() as hub:
        good = mine.state["layer.1.weight"]
        mine.state["layer.1.weight"] = torch.zeros(2, dtype=torch.complex128)
        with hub.mutating():
            mine.step = 1
        assert "no version of live/policy for this step: UnsupportedLeaf" in caplog.text
        assert "layer.1.weight" in caplog.text
        mine.state["layer.1.weight"] = good
        mine.advance(hub)
        assert hub.adapters == ["live/policy-v2", "live/policy-v0"]


def test_the_lines_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    """The third program of docs/hub.md; tests/hub/test_hub_clients.py runs the others."""
    program = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hub.md").read_text(), re.S)[2]
    model = adapted()
    optimizer = torch.optim.AdamW(model.parameters())
    exec(
        program,
        {"peft_model": model, "optimizer": optimizer, "step": 6, "batches": [{"input_ids": IDS, "labels": IDS}] * 2},
    )
    assert capsys.readouterr().out == "load live/policy-v7\nload live/policy-v8\n"


# ------------------------------------------------------------------------------------ with a model, at servers, pages


@pytest.fixture
def quiet() -> Iterator[None]:
    yield
    # Its connections stay open otherwise, and a warning about them fails a later test.
    huggingface_hub.close_session()


@pytest.mark.usefixtures("quiet")
def test_a_model_and_its_adapter_in_one_hub(tmp_path: Path) -> None:
    training = Training(adapted())
    base = training.model.get_base_model().model.embed_tokens
    with transfuse.hub(base, adapter=training.model, step=lambda: training.step, token="s3cret", name="a/b") as hub:
        training.advance(hub)
        api = huggingface_hub.HfApi(endpoint=hub.endpoint, token="s3cret")
        assert [one.id for one in api.list_models()] == ["a/b", "a/b-v1", "a/b-v0"]
        assert [one.id for one in api.list_models(author="nobody")] == []
        for name, files in (("a/b", ["model.safetensors"]), ("a/b-v1", [CONFIG, WEIGHTS])):
            folder = Path(api.snapshot_download(name, cache_dir=tmp_path))
            assert sorted(path.name for path in folder.iterdir()) == files
        assert torch.equal(safetensors.load_file(next(tmp_path.rglob("model.safetensors")))["weight"], base.weight)
        assert [one.title for one in api.list_repo_commits("a/b-v0")] == ["step 0"]
        info = api.model_info("a/b-v1", revision=api.model_info("a/b-v1").sha)
        assert {one.rfilename for one in info.siblings} == {CONFIG, WEIGHTS}
        with pytest.raises(client_errors.RevisionNotFoundError):
            api.model_info("a/b-v1", revision=api.model_info("a/b-v0").sha)
        with pytest.raises(client_errors.RemoteEntryNotFoundError):
            api.hf_hub_download("a/b-v1", "tokenizer.json", cache_dir=tmp_path)
        with pytest.raises(client_errors.HfHubHTTPError, match="401"):
            huggingface_hub.HfApi(endpoint=hub.endpoint, token=False).model_info("a/b-v1")
        page = Page(visit(hub, Authorization="Bearer s3cret").body)
        assert "Step 1 of a running job" in page.text
        assert [link for link in page.links if "-v" in link] == ["/a/b-v1", "/a/b-v0"]


def test_a_browser_sees_the_versions() -> None:
    mine = Tensors()
    with mine.open() as hub:
        mine.advance(hub)
        page = Page(visit(hub).body)
        assert [link for link in page.links if link.startswith("/")] == ["/live/policy-v1", "/live/policy-v0"]
        assert 'PeftModel.from_pretrained(base, "live/policy-v1")' in page.text
        assert f"HF_ENDPOINT={hub.endpoint}\n" in page.text
        one = Page(visit(hub, "/live/policy-v0").body)
        assert "Step 0 of a running job" in one.text
        assert "These files never change." in one.text
        files = [f"/live/policy-v0/resolve/main/{name}" for name in (WEIGHTS, CONFIG)]
        assert [link for link in one.links if link.startswith("/")] == files
        gone = visit(hub, "/live/policy-v7")
        assert gone.status == 404
        assert "This Hub has live/policy-v1, live/policy-v0." in Page(gone.body).text


def test_shards_of_an_adapter_are_put_together(tmp_path: Path) -> None:
    """DTensors of a job that trains on: a version is made when somebody asks for the servers' present step."""
    with (
        sharded_job(tmp_path, 2) as addresses,
        transfuse.hub(
            adapter=addresses,
            adapter_config={"peft_type": "LORA"},
            prefix="model.",
            server_token="between servers",
            versions=2,
        ) as hub,
    ):
        with pytest.raises(RuntimeError, match="the servers'"), hub.mutating():
            pass
        seen: list[int] = []
        while len(set(seen)) < 2:
            name = ask(hub.endpoint, "GET", "/api/models").json[0]["id"]
            found = tensors(hub, name)
            # What the job ties is there under both names, as peft writes it.
            assert torch.equal(found.pop("layer.9.weight"), found["layer.0.weight"])
            seen.append(step_in(found))
            assert name == f"live/policy-v{seen[-1]}"
        assert seen == sorted(seen)
        assert len(hub.adapters) <= 4


@pytest.mark.soak
def test_an_adapter_that_fsdp2_shards(tmp_path: Path) -> None:
    """The ranks of a job shard a model of peft, and write down what its adapter was at every step."""
    with (
        sharded_job(tmp_path, 2, "sharded_adapter_job.py") as addresses,
        transfuse.hub(adapter=addresses, adapter_config=adapted().peft_config["default"]) as hub,
    ):
        seen: set[str] = set()
        while len(seen) < 3:
            name = ask(hub.endpoint, "GET", "/api/models").json[0]["id"]
            found = tensors(hub, name)
            written = tmp_path / f"step{name.removeprefix('live/policy-v')}.pt"
            wait_until(written.exists)
            assert_equal(found, torch.load(written))
            assert found.keys() == peft.get_peft_model_state_dict(adapted()).keys()
            seen.add(name)


def test_clients_come_by_https() -> None:
    mine = Tensors()
    with mine.open(tls=certificates.tls()) as hub:
        path = f"{hub.endpoint}/live/policy-v0/resolve/main/{CONFIG}"
        with urllib.request.urlopen(path, timeout=60, context=certificates.tls().client_context()) as answer:
            assert json.load(answer)["r"] == 8


def test_servers_that_are_gone() -> None:
    config = {"peft_type": "LORA"}
    with (
        transfuse.serve({"w": torch.ones(3)}, step=5) as server,
        transfuse.hub(adapter=server.address, adapter_config=config, timeout=5) as hub,
    ):
        assert get(hub, "live/policy-v4", WEIGHTS).status == 404
        assert torch.equal(tensors(hub, "live/policy-v5")["w"], torch.ones(3))
        server.close()
        assert torch.equal(tensors(hub, "live/policy-v5")["w"], torch.ones(3))
        wait_until(lambda: get(hub, "live/policy-v6", WEIGHTS).status == 503)  # Their step is believed for a moment.


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text('{"peft_type": "LORA", "r": 2}')
    with transfuse.serve({"adapter": {"w": torch.ones(3)}, "n": 1}, step=5) as server:
        arguments = ["--adapter-config", str(tmp_path / CONFIG), "--prefix", "adapter.", "--name", "acme/math"]
        with Running("hub", server.address, *arguments) as command:
            endpoint = command.line()
            found = safetensors.load(ask(endpoint, "GET", f"/acme/math-v5/resolve/main/{WEIGHTS}").body)
            assert torch.equal(found["w"], torch.ones(3))
            assert ask(endpoint, "GET", f"/acme/math-v5/resolve/main/{CONFIG}").json["r"] == 2


# ---------------------------------------------------------------------------------------------------------- arguments


def test_what_is_refused(tmp_path: Path) -> None:
    model, config = adapted(), {"peft_type": "LORA"}
    bare = {"adapter": {"w": torch.ones(3)}}
    mine: dict[str, Any] = bare | {"adapter_config": config}
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "state takes a mapping", {}),
        (TypeError, "together with adapter_config=", bare),
        (TypeError, "together with adapter_config=", {"adapter": torch.nn.Linear(2, 2)}),
        (TypeError, "adapter_config takes a mapping or a config of peft, got list", bare | {"adapter_config": [1]}),
        (TypeError, "JSON: it holds a Tensor", bare | {"adapter_config": {"r": torch.ones(1)}}),
        (TypeError, "takes the name of an adapter, or several, got int", {"adapter": model, "adapter_name": 3}),
        (ValueError, "adapter_name= belongs to a PeftModel", mine | {"adapter_name": "a"}),
        (ValueError, "has a config of its own", mine | {"adapter": model}),
        (ValueError, "holds 2 models of peft", {"adapter": {"a": model, "b": adapted()}}),
        (ValueError, "versions must be at least 1", {"adapter": model, "versions": 0}),
        (ValueError, "no name that clients take", {"adapter": model, "name": "live/a--b"}),
        (ValueError, "no name that clients take", {"adapter": model, "name": "live/" + "a" * 80}),
        (ValueError, "assets= belongs to a model", {"adapter": model, "assets": tmp_path}),
        (ValueError, "belongs to addresses of servers", {"adapter": model, "server_token": "secret"}),
        (ValueError, "servers tell their own", mine | {"adapter": "localhost:1", "step": 1}),
    ]
    for error, match, options in refused:
        with pytest.raises(error, match=match):
            transfuse.hub(**options)
    with pytest.raises(transfuse.UnsupportedLeaf, match="complex128"):
        transfuse.hub(adapter={"w": torch.ones(3, dtype=torch.complex128)}, adapter_config=config)
