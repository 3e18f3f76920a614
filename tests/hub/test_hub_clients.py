"""The real clients: huggingface_hub, safetensors and transformers read a job that trains on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import transfuse
from hub_asking import Steps, environment, main_commit

huggingface_hub: Any = pytest.importorskip(
    "huggingface_hub", reason="the Hub's clients are not installed: pip install huggingface_hub transformers"
)
client_errors: Any = pytest.importorskip("huggingface_hub.errors")
client_tools: Any = pytest.importorskip("huggingface_hub.utils")
safetensors: Any = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "tests" / "helpers" / "hub_client.py"


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    folder = tmp_path / "assets"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    client_tools.disable_progress_bars()
    yield
    # Its connections stay open otherwise, and a warning about them fails a later test.
    huggingface_hub.close_session()


@pytest.mark.usefixtures("quiet")
def test_huggingface_hub_reads_everything(assets: Path, tmp_path: Path) -> None:
    steps = Steps()
    with steps.open(assets=assets, max_shard_bytes=9000) as hub:
        api = huggingface_hub.HfApi(endpoint=hub.endpoint)
        names = {
            "config.json",
            "model.safetensors.index.json",
            *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        }
        assert set(api.list_repo_files("live/model")) == names
        info = api.model_info("live/model", files_metadata=True)
        assert info.sha == main_commit(hub.endpoint)
        sizes = {one.rfilename: one.size for one in info.siblings}
        folder = Path(api.snapshot_download("live/model", cache_dir=tmp_path / "cache"))
        assert folder.name == info.sha
        assert {path.name: path.stat().st_size for path in folder.iterdir()} == sizes
        for file in folder.glob("*.safetensors"):
            for name, tensor in safetensors.load_file(file).items():
                assert torch.equal(tensor, steps.state[name])
        metadata = api.get_safetensors_metadata("live/model")
        assert metadata.sharded
        assert metadata.parameter_count == {"F32": sum(tensor.numel() for tensor in steps.state.values())}
        assert metadata.weight_map.keys() == steps.state.keys()
        assert api.file_exists("live/model", "config.json")
        assert not api.file_exists("live/model", "none")
        assert [one.path for one in api.get_paths_info("live/model", ["config.json", "none"])] == ["config.json"]
        assert [one.title for one in api.list_repo_commits("live/model")] == ["step 0"]
        (branch,) = api.list_repo_refs("live/model").branches
        assert (branch.name, branch.target_commit) == ("main", info.sha)

        files = huggingface_hub.HfFileSystem(endpoint=hub.endpoint, skip_instance_cache=True)
        assert {path.rpartition("/")[2] for path in files.ls("live/model", detail=False)} == names
        with files.open("live/model/model-00001-of-00003.safetensors", "rb", block_size=100) as file:
            file.seek(-10, 2)
            assert file.read() == (folder / "model-00001-of-00003.safetensors").read_bytes()[-10:]
        assert files.cat_file("live/model/config.json", start=2, end=12) == b"model_type"


@pytest.mark.usefixtures("quiet")
def test_a_new_step_is_a_new_commit_and_what_has_not_changed_is_not_fetched_again(assets: Path, tmp_path: Path) -> None:
    steps = Steps()
    with steps.open(assets=assets, max_shard_bytes=9000) as hub:
        cache = tmp_path / "cache"
        first = Path(huggingface_hub.snapshot_download("live/model", endpoint=hub.endpoint, cache_dir=cache))
        with hub.mutating():
            steps.step += 1
            steps.state["layer.0.weight"].fill_(-1)
        second = Path(huggingface_hub.snapshot_download("live/model", endpoint=hub.endpoint, cache_dir=cache))
        assert first.name != second.name
        changed = [path.name for path in second.iterdir() if path.resolve() != (first / path.name).resolve()]
        assert changed == ["model-00001-of-00003.safetensors"]
        assert safetensors.load_file(second / changed[0])["layer.0.weight"].eq(-1).all()


@pytest.mark.usefixtures("quiet")
def test_errors_are_those_of_the_real_hub(assets: Path, tmp_path: Path) -> None:
    with Steps().open(assets=assets, token="s3cret") as hub:

        def download(file: str, repo: str = "live/model", token: str | bool = "s3cret", **options: Any) -> str:
            return str(
                huggingface_hub.hf_hub_download(
                    repo, file, endpoint=hub.endpoint, token=token, cache_dir=tmp_path / "cache", **options
                )
            )

        assert Path(download("config.json")).read_text() == '{"model_type": "none"}'
        with pytest.raises(client_errors.RemoteEntryNotFoundError):
            download("tokenizer.model")
        with pytest.raises(client_errors.RevisionNotFoundError):
            download("config.json", revision="0" * 40)
        with pytest.raises(client_errors.RepositoryNotFoundError):
            download("config.json", repo="live/other")
        for wrong, said in (("wrong", "another token was sent"), (False, "no token was sent")):
            with pytest.raises(client_errors.HfHubHTTPError, match=f"(?s)401.*{said}: set HF_TOKEN to the token"):
                huggingface_hub.HfApi(endpoint=hub.endpoint, token=wrong).model_info("live/model")


@pytest.mark.usefixtures("quiet")
def test_one_client_sees_every_step(tmp_path: Path) -> None:
    steps = Steps()
    with steps.open() as hub:
        for _ in range(4):
            steps.advance()
            folder = Path(huggingface_hub.snapshot_download("live/model", endpoint=hub.endpoint, cache_dir=tmp_path))
            found = safetensors.load_file(folder / "model.safetensors")
            assert all(torch.equal(found[name], tensor) for name, tensor in steps.state.items())


@pytest.mark.parametrize(
    ("clients", "rounds"), [pytest.param(8, 2, id="8"), pytest.param(8, 30, id="8-long", marks=pytest.mark.soak)]
)
def test_eight_clients_at_once_while_training_steps(assets: Path, tmp_path: Path, clients: int, rounds: int) -> None:
    """Each gets all files of one step, whatever happens meanwhile."""
    steps = Steps(size=100_000)
    with steps.open(assets=assets, max_shard_bytes=900_000) as hub, contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(CLIENT), str(rounds)],
                    env=environment(hub, tmp_path / f"home{i}"),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for i in range(clients)
        ]
        for one in running:
            stack.callback(one.kill)
        while any(one.poll() is None for one in running):
            steps.advance()
            time.sleep(0.005)  # The clients need the machine, too.
        seen: dict[str, int] = {}
        for one in running:
            out, err = one.communicate()
            assert one.returncode == 0, err
            lines = [json.loads(line) for line in out.splitlines()]
            assert len(lines) == rounds
            for line in lines:
                assert len(line["values"]) == len(steps.state)
                step = _step(line["values"])
                assert seen.setdefault(line["commit"], step) == step
        assert all(0 <= step <= steps.step for step in seen.values())
        print(f"{len(seen)} commits of {steps.step} steps: {sorted(seen.values())}")


def _step(values: dict[str, list[float]]) -> int:
    found = {(value - int(name.split(".")[1])) / 100 for name, both in values.items() for value in both}
    assert len(found) == 1, f"steps {sorted(found)} in one commit"
    return int(found.pop())


#: A process that loads the model by its name whenever it is told to.
LOADER = textwrap.dedent(
    """
    import sys, torch, transformers
    ids = torch.arange(20).reshape(2, 10)
    for line in sys.stdin:
        model = transformers.AutoModelForCausalLM.from_pretrained("live/model")
        assert transformers.AutoTokenizer.from_pretrained("live/model")("a")["input_ids"] == [0]
        with torch.no_grad():
            torch.save(model(ids).logits, sys.argv[1])
        print("done", flush=True)
    """
)


def _tiny_model(transformers: Any, folder: Path) -> Any:
    """A model's config and tokenizer in a directory."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    config.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return config


@pytest.mark.filterwarnings("ignore")
def test_from_pretrained_and_one_forward_pass_equal_the_trainers(tmp_path: Path) -> None:
    """A tiny model trains on; another process loads it by its name, with its tokenizer, and computes the same bits."""
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path / "assets"
    config = _tiny_model(transformers, folder)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(20).reshape(2, 10)
    results = []
    with (
        transfuse.hub(model.state_dict, assets=folder, max_shard_bytes=4000) as hub,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", LOADER, str(tmp_path / "got.pt")],
            env=environment(hub, tmp_path / "home", OMP_NUM_THREADS="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client,
    ):
        assert client.stdin is not None
        assert client.stdout is not None
        for _ in range(2):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            with hub.mutating():
                optimizer.step()
            with torch.no_grad():
                expected = model(ids).logits
            client.stdin.write("load\n")
            client.stdin.flush()
            assert client.stdout.readline() == "done\n"
            results.append(torch.load(tmp_path / "got.pt"))
            assert torch.equal(results[-1], expected)
        assert not torch.equal(*results)
        client.stdin.close()
        assert client.wait(60) == 0
    names = {name for path in (tmp_path / "home").rglob("*.json") for name in [path.name]}
    assert "model.safetensors.index.json" in names


# ------------------------------------------------------------------------------------------------- what docs promise


@pytest.mark.parametrize(
    "plain", [pytest.param(True, id="plain"), pytest.param(False, id="transformers", marks=pytest.mark.soak)]
)
def test_the_example(plain: bool, tmp_path: Path) -> None:
    if not plain:
        pytest.importorskip("transformers")
    picture = tmp_path / "picture.svg"
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "live_hub.py"), "--picture", str(picture)]
    done = subprocess.run([*command, *["--plain"] * plain], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("and computed the trainer's losses bit for bit\n")
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


@pytest.mark.soak
def test_the_ten_lines_of_the_guide(tmp_path: Path) -> None:
    """Pasted into two files and run, as docs/hub.md says."""
    transformers: Any = pytest.importorskip("transformers")
    job, reader, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hub.md").read_text(), re.S)
    _tiny_model(transformers, tmp_path / "assets")
    (tmp_path / "job.py").write_text(job)
    (tmp_path / "reader.py").write_text(reader + "print(sum(p.numel() for p in model.parameters()), tokenizer('a'))\n")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "job.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        endpoint = running.stdout.readline().strip()
        variables = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "reader.py"], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        running.terminate()
    assert done.returncode == 0, done.stderr
    assert "input_ids" in done.stdout
