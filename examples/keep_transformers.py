"""Transformers' Trainer under torchrun: a worker is killed, torchrun starts all again, and it goes on from memory.

All that it takes is `callbacks=[KeepCallback()]`. In the end the logged losses, weights and moments equal those of an
undisturbed run, bit for bit.

torchrun --nproc-per-node 2 --max-restarts 3 examples/keep_transformers.py
"""

import os
import signal
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

from transfuse.integrations.transformers import KeepCallback

STEPS, FATAL_STEP = 16, 9


class Mortal(Trainer):  # type: ignore[misc]
    """A Trainer whose rank 1 kills itself in the middle of a step, if this is the first start of the job."""

    steps = 0

    def training_step(self, *words: Any, **options: Any) -> Any:
        loss = super().training_step(*words, **options)
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and os.environ["RANK"] == "1" and self.state.global_step == FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        return loss


def train(directory: str, *, kept: bool) -> tuple[Tensor, int]:
    """Train. Returns logged losses, weights and moments as bits, and how many steps this process has trained."""
    torch.manual_seed(7)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (40, 8))]
    sizes = {"vocab_size": 64, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Mortal(model, arguments, train_dataset=data, callbacks=[KeepCallback()] if kept else [])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [torch.tensor(one["loss"]) for one in trainer.state.log_history if "loss" in one]
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    tensors = [torch.stack(losses), *model.state_dict().values(), *moments]
    return torch.cat([tensor.flatten().double() for tensor in tensors]).view(torch.int64), trainer.steps


def main() -> None:
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        raise SystemExit(
            "torchrun starts this: torchrun --nproc-per-node 2 --max-restarts 3 examples/keep_transformers.py"
        )
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as directory:
        kept, trained = train(directory, kept=True)
        # The same training in the same processes, which nobody disturbs and nobody keeps.
        undisturbed, steps = train(directory, kept=False)
    print(f"rank {dist.get_rank()} trained {trained} of {steps} steps after the restart\n", end="", flush=True)
    equal = torch.tensor(torch.equal(kept, undisturbed))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    if not equal:
        raise SystemExit("other losses, weights or moments than in the undisturbed run")
    if dist.get_rank() == 0:
        print("kept: losses, weights and moments are those of the undisturbed run, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
