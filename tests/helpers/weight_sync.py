"""A job that trains with FSDP2 on two ranks and serves its weights, and engines that fetch them: see test_weight_sync.

Trainers take a step when there is a file ``go STEP``. Then rank 0 writes what an engine must have to ``due STEP``, and
each rank its address, with the step, to ``trainer RANK``. An engine does what it reads from its standard input, and
says what it has.
"""

from __future__ import annotations

import json
import pathlib
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import transfuse
from transfuse import Concat
from transfuse._state.whole_file import write_whole

TOKEN = "weights for engines"
LAYERS, WIDTH = 2, 160
RULES = [Concat(["layers.*.q", "layers.*.k", "layers.*.v"], "*.qkv"), transfuse.Rename("layers.*.norm", "*.norm")]
#: Steps of very different sizes: from nothing to everything changes in bf16.
RATES = (0.0, 1e-7, 1e-6, 1e-5, 1e-3)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.02) for _ in range(3))
        self.norm = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.q + x @ self.k) @ self.v * self.norm


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def fused(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an engine has of these weights."""
    result = {}
    for i in range(LAYERS):
        result[f"{i}.qkv"] = torch.cat([whole[f"layers.{i}.{name}"] for name in "qkv"]).bfloat16()
        result[f"{i}.norm"] = whole[f"layers.{i}.norm"].bfloat16()
    return result


def until(path: pathlib.Path) -> str:
    while not path.exists():
        time.sleep(0.002)
    return path.read_text()


def train(rank: int, folder: pathlib.Path, seed: int) -> None:
    """One of the trainers, until it is told to end."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    chosen = random.Random(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    step = 0
    state = {"model": model, "optimizer": optimizer}
    with transfuse.serve(state, step=lambda: step, token=TOKEN, history=1, max_readers=8) as server:
        while (said := until(folder / f"go {step + 1}")) != "end":
            model(torch.randn(16, WIDTH)).square().mean().backward()
            optimizer.param_groups[0]["lr"] = chosen.choice(RATES)
            with server.mutating():
                optimizer.step()
                step += 1
            optimizer.zero_grad()
            whole = {}
            for name, parameter in model.state_dict().items():
                assert isinstance(parameter, DTensor)
                whole[name] = parameter.full_tensor()
            if rank == 0:
                torch.save(fused(whole), folder / "part")
                (folder / "part").rename(folder / f"due {step}")
            write_whole(folder / f"trainer {rank} {step}", server.address)
            assert said == "go"


def engine(folder: pathlib.Path) -> None:
    """One engine: it does what each line says, and answers with a line."""
    torch.set_num_threads(1)
    held = {f"{i}.qkv": torch.zeros(3 * WIDTH, WIDTH, dtype=torch.bfloat16) for i in range(LAYERS)}
    held |= {f"{i}.norm": torch.zeros(WIDTH, dtype=torch.bfloat16) for i in range(LAYERS)}
    print("up", flush=True)
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        step = told["step"]
        addresses = [until(folder / f"trainer {rank} {step}") for rank in range(2)]
        if told["scribbles"]:
            held["0.qkv"][told["scribbles"]] += 1
        before = {name: tensor.clone() for name, tensor in held.items()}
        options: Any = {"entry": "model", "step": step, "token": TOKEN, "cast": True, "map_path": RULES, "delta": True}
        if told["ahead"]:
            with transfuse.fetch(addresses, held, wait=False, same_host=told["same_host"], **options) as pending:
                while not pending.done():
                    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
                fetched = pending.install()
        else:
            fetched = transfuse.fetch(addresses, held, same_host=told["same_host"], atomic=told["atomic"], **options)
        due = torch.load(folder / f"due {fetched.step}")
        wrong = [name for name in due if not torch.equal(held[name].view(torch.int16), due[name].view(torch.int16))]
        report = fetched.report
        answer = {"step": fetched.step, "wrong": wrong, "bytes": report.bytes, "patched": report.patched_bytes}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    engine(pathlib.Path(sys.argv[1]))
