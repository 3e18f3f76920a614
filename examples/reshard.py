"""Weights go from FSDP2 trainers on two ranks to tensor-parallel inference on three: other shards, names and types.

The trainers hold float32 rows of separate q, k and v. Inference holds bfloat16, with q, k and v of each head side by
side in one fused weight, and splits its matrices by columns or rows over three ranks, in unequal shards. The weights
move twice: whole, and after more training with `delta=True`, which does not send the frozen embedding again.

torchrun --nproc-per-node 5 examples/reshard.py
(or python examples/reshard.py)
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from transfuse import Concat, PGTransport, Slice

TRAINERS, SERVERS = [0, 1], [2, 3, 4]
VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS = 2000, 96, 6, 250, 2
SIZE = WIDTH // HEADS

#: Of every head its q, k and v, one after another: so three ranks get two whole heads each. `.*` at the end stands for
#: weight and bias.
RULES = [
    Concat(
        [
            Slice(f"blocks.*.{name}.*", dim=0, start=head * SIZE, stop=(head + 1) * SIZE)
            for head in range(HEADS)
            for name in ("q", "k", "v")
        ],
        "blocks.*.qkv.*",
    )
]


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y: torch.Tensor = self.norm1(x)
        if self.fused:
            q, k, v = self.qkv(y).view(batch, length, -1, 3, SIZE).transpose(1, 2).unbind(3)
        else:
            q, k, v = (f(y).view(batch, length, -1, SIZE).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y


class Transformer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batch = tokens(2 * step + dist.get_rank())
        loss = nn.CrossEntropyLoss()(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_and_send(mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = Transformer(fused=False)
    model.embedding.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    transport = PGTransport(group, timedelta(seconds=60), torch.device("cpu"))
    for steps in (range(5), range(5, 8)):
        train(model, optimizer, steps)
        transport.send_checkpoint(SERVERS, model.state_dict(), step=steps.stop)
        publish({name: whole(tensor) for name, tensor in model.state_dict().items()})
        collect(None)


def receive_and_serve(mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    torch.manual_seed(dist.get_rank())
    model = Transformer(fused=True).to(torch.bfloat16)
    block: dict[str, ParallelStyle] = {
        "qkv": ColwiseParallel(),
        "out": RowwiseParallel(),
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(),
    }
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        **{f"blocks.*.{name}": style for name, style in block.items()},
    }
    parallelize_module(model, mesh, plan)
    transport = PGTransport(
        group, timedelta(seconds=60), torch.device("cpu"), model.state_dict, cast=True, map_path=RULES, delta=True
    )
    for step in (5, 8):
        transport.recv_checkpoint(TRAINERS, step=step)
        report = transport.report
        assert report is not None
        mine = ", ".join(f"{count / 1024:,.1f} KiB from {source}" for source, count in sorted(report.by_source.items()))
        check(model, publish(None))
        collect(f"step {step}: rank {dist.get_rank()} got {mine}, and kept {report.kept_bytes / 1024:,.1f} KiB")


# ---------------------------------------------------------------------------------------- what follows checks the above


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def publish(state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """The whole weights of rank 0, for everybody."""
    region = [state]
    dist.broadcast_object_list(region, src=0)
    assert region[0] is not None
    return region[0]


def collect(line: str | None) -> None:
    """Gather a line from each rank and print them in the order of ranks."""
    lines: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print("\n".join(filter(None, lines)), flush=True)


def check(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """The trainers' weights, fused and converted by torch, equal the servers' bit for bit, and the logits are close."""
    expected = {}
    for name, tensor in weights.items():
        *path, module, kind = name.split(".")
        if module in ("k", "v"):
            continue
        if module == "q":
            qkv = [weights[".".join([*path, each, kind])].view(HEADS, SIZE, *tensor.shape[1:]) for each in "qkv"]
            module, tensor = "qkv", torch.stack(qkv, 1).flatten(0, 2)
        expected[".".join([*path, module, kind])] = tensor.to(torch.bfloat16)
    actual = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    wrong = [n for n in expected if not torch.equal(actual[n].view(torch.int16), expected[n].view(torch.int16))]
    if actual.keys() != expected.keys() or wrong:
        raise SystemExit(f"other weights than the trainers': {wrong or actual.keys() ^ expected.keys()}")

    single = Transformer(fused=True).to(torch.bfloat16)
    single.load_state_dict(expected)
    with torch.no_grad():
        logits, alone = model(tokens(99)).float(), single(tokens(99)).float()
    # Three ranks sum in another order than one, in bfloat16.
    if not torch.allclose(logits, alone, rtol=0, atol=0.05 * float(alone.abs().max())):
        raise SystemExit(f"logits differ by up to {(logits - alone).abs().max()}")


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    # Every rank takes part in making both meshes.
    trainers, servers = DeviceMesh("cpu", TRAINERS), DeviceMesh("cpu", SERVERS)
    if dist.get_rank() in TRAINERS:
        train_and_send(trainers, group)
    else:
        receive_and_serve(servers, group)
    if dist.get_rank() == 0:
        print("weights equal bit for bit, logits as in a single process")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node=5", __file__])
