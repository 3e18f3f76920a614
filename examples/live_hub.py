"""A tiny language model trains, and is a Hugging Face Hub meanwhile. Another process asks it for the weights every few
steps, as it would ask huggingface.co, and lets them write: no file in between, and no transfuse on its side.

Run with: python examples/live_hub.py
Needs:    pip install transformers (or at least huggingface_hub and safetensors)

``--picture FILE`` draws what both have seen. Every loss that the reader computes is compared, bit for bit, with the
trainer's at the same step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import transfuse

TEXT = "a state that lives in memory need not be written to be read; whoever asks gets one step, whole and unbroken. "
ALPHABET = sorted(set(TEXT))
STEPS, LENGTH, LINES = 240, 64, 8
REPO = "live/model"
#: ``--plain`` does without, as where it is not installed.
HAS_TRANSFORMERS = "--plain" not in sys.argv and importlib.util.find_spec("transformers") is not None


def encode(text: str) -> torch.Tensor:
    return torch.tensor([[ALPHABET.index(letter) for letter in text]])


#: What both processes measure the model on.
PROBE = encode((TEXT * 2)[17 : 17 + LENGTH])


class Letters(nn.Module):
    """The model where transformers is not installed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 64)
        self.memory = nn.GRU(64, 96, batch_first=True)
        self.head = nn.Linear(96, len(ALPHABET))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.memory(self.embedding(letters))[0]
        return self.head(hidden)  # type: ignore[no-any-return]


def make_model(assets: Path) -> nn.Module:
    """A new model, and the files that its weights need."""
    if not HAS_TRANSFORMERS:
        return Letters()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    config.save_pretrained(assets)
    llama: Any = LlamaForCausalLM
    return llama(config)  # type: ignore[no-any-return]


def logits_of(model: nn.Module, letters: torch.Tensor) -> torch.Tensor:
    result: Any = model(letters)
    return result.logits if HAS_TRANSFORMERS else result  # type: ignore[no-any-return]


def loss_of(model: nn.Module, letters: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits_of(model, letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())


# ------------------------------------------------------------------------------------------------------- the trainer


@dataclass
class Seen:
    """All that the picture shows: the trainer's losses by step, and what the reader said."""

    losses: list[float] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)


def train(seen: Seen) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        model = make_model(Path(folder))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        with transfuse.hub(model, name=REPO, assets=folder, step=lambda: len(seen.losses)) as hub:
            print(f"the trainer is a Hub at {hub.endpoint}", flush=True)
            with reader(hub.endpoint, cache, seen) as process:
                while len(seen.losses) < STEPS:
                    loss: Any = loss_of(model, batch(len(seen.losses)))
                    optimizer.zero_grad()
                    loss.backward()
                    with hub.mutating():  # Waits only while a copy is made.
                        optimizer.step()
                        with torch.no_grad():
                            seen.losses.append(float(loss_of(model, PROBE)))
                    pace(len(seen.losses), seen)
                process.terminate()


def batch(step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT), (LINES,), generator=draw).tolist()
    return torch.cat([encode((TEXT * 2)[at : at + LENGTH]) for at in starts])


# The trainer would be done before the reader has started: let it wait for answers here and there.
answered = threading.Condition()


def pace(step: int, seen: Seen) -> None:
    with answered:
        if step % 20 == 1 or step == STEPS:
            enough = step // 20 + 1
            if not answered.wait_for(lambda: len(seen.answers) >= enough, 120):
                raise RuntimeError("the reader has not answered in 120 s")


def reader(endpoint: str, cache: str, seen: Seen) -> subprocess.Popen[str]:
    """Start the other process, which finds the trainer as it finds huggingface.co. Collect what it says."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": cache, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, "--read", *([] if HAS_TRANSFORMERS else ["--plain"])],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            print(f"step {answer['step']:>3}  loss {answer['loss']:.3f}  {answer['text']!r}", flush=True)
            with answered:
                seen.answers.append(answer)
                answered.notify_all()

    threading.Thread(target=listen, daemon=True).start()
    return process


# -------------------------------------------------------------------------------------------------------- the reader


def read() -> None:
    """Ask for the model again and again. Nothing here knows of transfuse."""
    from huggingface_hub import HfApi

    api = HfApi()
    last = ""
    while True:
        commit = api.model_info(REPO).sha
        assert commit is not None
        if commit == last:
            continue
        last = commit
        model = load(commit)
        with torch.no_grad():
            loss = float(loss_of(model, PROBE))
            letters = encode("a ")
            for _ in range(60):
                best = logits_of(model, letters)[:, -1].argmax(-1, keepdim=True)
                letters = torch.cat([letters, best], dim=1)
        text = "".join(ALPHABET[i] for i in letters[0].tolist())
        (about,) = api.list_repo_commits(REPO, revision=commit)
        step = int(about.title.removeprefix("step "))
        print(json.dumps({"step": step, "loss": loss, "text": text}), flush=True)


def load(commit: str) -> nn.Module:
    if HAS_TRANSFORMERS:
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(REPO, revision=commit)
        return model
    from huggingface_hub import hf_hub_download
    from safetensors.torch import load_file

    model = Letters()
    model.load_state_dict(load_file(hf_hub_download(REPO, "model.safetensors", revision=commit)))
    return model


# ------------------------------------------------------------------------------------------------------- the picture

WIDTH, LEFT, RIGHT, TOP, PLOT, LINE = 960, 60, 910, 76, 240, 21
INK, FAINT, RULE, TRAINER, READER = "#24292f", "#57606a", "#d0d7de", "#54aeff", "#cf222e"


def draw(seen: Seen) -> str:
    most = max(seen.losses)
    shown = seen.answers[:: max(1, len(seen.answers) // 9)]
    height = TOP + PLOT + 76 + LINE * len(shown) + 16

    def x(step: int) -> float:
        return LEFT + (RIGHT - LEFT) * step / len(seen.losses)

    def y(loss: float) -> float:
        return TOP + PLOT * (1 - loss / most)

    def text(left: float, top: float, words: str, color: str = INK, size: int = 12, more: str = "") -> str:
        return f'<text x="{left:.1f}" y="{top:.1f}" font-size="{size}" fill="{color}" {more}>{escape(words)}</text>'

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
        "<title>A model trains; another process asks the live Hub for it</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(20, 28, "A tiny language model trains, and is a Hub meanwhile", size=17, more='font-weight="600"'),
        text(20, 50, f"Another process loads it by from_pretrained({REPO!r}) while training goes on.", FAINT),
    ]
    for loss in range(int(most) + 1):
        lines.append(f'<path d="M{LEFT} {y(loss):.1f} H{RIGHT}" stroke="{RULE}"/>')
        lines.append(text(LEFT - 8, y(loss) + 4, str(loss), FAINT, 11, 'text-anchor="end"'))
    lines += [
        text(x(step), TOP + PLOT + 18, f"step {step}", FAINT, 11, 'text-anchor="middle"')
        for step in range(0, len(seen.losses) + 1, 40)
    ]
    path = " ".join(f"{x(step + 1):.1f},{y(loss):.1f}" for step, loss in enumerate(seen.losses))
    lines.append(f'<polyline points="{path}" fill="none" stroke="{TRAINER}" stroke-width="2"/>')
    for answer in seen.answers:
        center = f'cx="{x(answer["step"]):.1f}" cy="{y(answer["loss"]):.1f}"'
        lines.append(f'<circle {center} r="4.5" fill="none" stroke="{READER}" stroke-width="1.8"/>')
    lines.append(text(RIGHT - 330, TOP + 10, "— the trainer's loss, at every step", TRAINER))
    lines.append(text(RIGHT - 330, TOP + 28, "○ the reader's, computed from what it has downloaded", READER))
    top = TOP + PLOT + 50
    lines.append(text(20, top, "What the reader's copy of the model writes after “a ”:", more='font-weight="600"'))
    for number, answer in enumerate(shown):
        at = top + 22 + LINE * number
        lines.append(text(20, at, f"step {answer['step']}", FAINT))
        lines.append(text(90, at, answer["text"], more='font-family="ui-monospace, monospace" xml:space="preserve"'))
    return "\n".join([*lines, "</svg>\n"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--plain", action="store_true", help="a model of plain torch, and no transformers")
    options.add_argument("--picture", type=Path)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.read:
        return read()
    for needed in ("huggingface_hub", "safetensors"):
        if importlib.util.find_spec(needed) is None:
            raise SystemExit(f"the reader needs {needed}: pip install transformers")
    seen = Seen()
    train(seen)
    assert len(seen.answers) > STEPS // 20
    for answer in seen.answers:
        assert answer["step"] == 0 or seen.losses[answer["step"] - 1] == answer["loss"], answer
    told = f"{len(seen.answers)} times while it trained {STEPS} steps"
    print(f"live: the reader loaded the model {told}, and computed the trainer's losses bit for bit")
    if chosen.picture is not None:
        chosen.picture.write_text(draw(seen))
    return None


if __name__ == "__main__":
    main()
