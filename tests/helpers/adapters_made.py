"""Tiny adapters of the real peft, built without a download; the base is the same in every process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

peft: Any = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
transformers: Any = pytest.importorskip("transformers")

__all__ = ["IDS", "adapted", "base_model", "peft"]

IDS = torch.arange(20).reshape(2, 10)


def base_model() -> Any:
    """A tiny model, the same in every process."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False)
    )


def adapted(**options: Any) -> Any:
    given = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | options
    return peft.get_peft_model(base_model(), peft.LoraConfig(**given))
