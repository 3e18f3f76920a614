"""RL: weights go from FSDP2 trainers on two ranks to tensor-parallel inference on three, every few steps.

The two are jobs of their own, with no group in common. The trainers hold float32 rows of separate q, k and v. Inference
holds bfloat16, with q, k and v of each head side by side in one fused weight, and splits its matrices by columns or
rows over three ranks, in unequal shards. The weights move twice: whole, and after more training with `delta=True`,
which does not send the frozen embedding again.

torchrun --nproc-per-node 5 examples/reshard.py
(or python examples/reshard.py)
"""

import io
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import transfuse
from transfuse import Concat, Slice

TRAINERS, ENGINES = 2, 3
#: After these steps inference gets the weights.
SYNCS = (5, 8)
TOKEN = os.environ.get("TRANSFUSE_TOKEN")
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


def train(store: Store, rank: int) -> None:
    torch.manual_seed(0)
    model = Transformer(fused=False)
    model.embedding.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0

    with transfuse.serve({"model": model, "optimizer": optimizer}, step=lambda: step, token=TOKEN, history=1) as server:
        for sync in SYNCS:
            while step < sync:
                batch = tokens(2 * step + rank)
                loss = nn.CrossEntropyLoss()(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                with server.mutating():  # The step changes together with the weights.
                    optimizer.step()
                    step += 1
            publish(store, model, step)
            store.set(f"trainer {rank} at step {step}", server.address)
            # In a real job: until their rollouts are here.
            store.wait([f"engine {engine} has step {step}" for engine in range(ENGINES)])


def infer(store: Store, rank: int) -> None:
    torch.manual_seed(1 + rank)  # Other weights than the trainers'.
    model = Transformer(fused=True).to(torch.bfloat16)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.qkv": ColwiseParallel(),
        "blocks.*.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(use_local_output=False),
        "blocks.*.down": RowwiseParallel(),
    }
    parallelize_module(model, init_device_mesh("cpu", (ENGINES,)), plan)

    for step in SYNCS:
        # Waits until the trainers are there.
        addresses = [store.get(f"trainer {trainer} at step {step}").decode() for trainer in range(TRAINERS)]
        fetched = transfuse.fetch(
            addresses, model, entry="model", step=step, token=TOKEN, cast=True, map_path=RULES, delta=True
        )
        check(model, store, step)
        verified = transfuse.verify(
            addresses, model, entry="model", expected=step, token=TOKEN, cast=True, map_path=RULES
        )
        if not verified:
            raise SystemExit(f"the engine's weights are not the trainers':\n{verified}")
        tell(rank, fetched)
        store.set(f"engine {rank} has step {step}", "")


# ---------------------------------------------------------------------------------------- what follows checks the above


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def publish(store: Store, model: nn.Module, step: int) -> None:
    """The whole weights of the trainers, past transfuse."""
    weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(weights, buffer := io.BytesIO())
        store.set(f"weights of step {step}", buffer.getvalue())  # type: ignore[arg-type]


def tell(rank: int, fetched: transfuse.Fetched) -> None:
    """Print what each engine got, in the order of ranks."""
    sources = sorted(fetched.report.by_source.items())
    mine = ", ".join(f"{count / 1024:,.1f} KiB from trainer {source}" for source, count in sources)
    kept = fetched.report.kept_bytes / 1024
    lines = [""] * ENGINES
    dist.all_gather_object(lines, f"step {fetched.step}: engine {rank} got {mine}, and kept {kept:,.1f} KiB")
    if rank == 0:
        print("\n".join(lines), flush=True)


def check(model: nn.Module, store: Store, step: int) -> None:
    """The trainers' weights, fused and converted by torch, equal the engines' bit for bit, and the logits are close."""
    weights = torch.load(io.BytesIO(store.get(f"weights of step {step}")))
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
    store, rank, _ = next(rendezvous("env://"))
    is_trainer = rank < TRAINERS
    name, rank, size = ("trainers", rank, TRAINERS) if is_trainer else ("engines", rank - TRAINERS, ENGINES)
    # Two jobs, as two torchruns would start them. What they share is the store, in which they say how far they are.
    dist.init_process_group("gloo", store=PrefixStore(name, store), rank=rank, world_size=size)
    (train if is_trainer else infer)(store, rank)
    if (name, rank) == ("engines", 0):
        print("weights equal bit for bit, logits as in a single process")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node=5", __file__])
