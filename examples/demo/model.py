"""The model to train: a small language model, and text that it learns within a few dozen steps."""

from __future__ import annotations

import math
import random

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Transformer", "batch", "width_for"]

TEXT = "the quick brown fox jumps over the lazy dog. "
ALPHABET = sorted(set(TEXT))
LAYERS, HEADS = 4, 4
#: Small, since all workers share two cores.
LINES, LENGTH = 2, 40


class Transformer(nn.Module):
    """Predicts the next letter. Its output layer is tied to its embedding, and dropout draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        for embedding in (self.letters, self.positions):
            nn.init.normal_(embedding.weight, std=width**-0.5)
        self.head.weight = self.letters.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each letter from the letters before it."""
        seen, length = text[:, :-1], text.shape[1] - 1
        hidden = self.letters(seen) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def width_for(parameters: float) -> int:
    """The width at which the model has about this many parameters."""
    return max(16, 16 * round(math.sqrt(parameters / (12 * LAYERS)) / 16))


def batch(seed: int, step: int, rank: int) -> torch.Tensor:
    """A worker's text for one step. It depends on these three numbers only, so no reading position has to be saved."""
    draw = random.Random(f"{seed} {step} {rank}")
    starts = [draw.randrange(len(TEXT)) for _ in range(LINES)]
    endless = TEXT * (LENGTH // len(TEXT) + 2)
    return torch.tensor([[ALPHABET.index(letter) for letter in endless[at : at + LENGTH + 1]] for at in starts])
