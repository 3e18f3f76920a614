"""vLLM's own code finds an adapter's version by its name, and reads it. `make vllm` runs this; no engine starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import transfuse

pytest.importorskip("vllm.lora.lora_model", exc_type=ImportError)

#: What an engine's worker does with the path of a request. Where there is no accelerator no memory is pinned.
WORKER = textwrap.dedent(
    """
    import sys, torch
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import get_adapter_absolute_path

    torch.Tensor.pin_memory = lambda self: self
    path = get_adapter_absolute_path("live/policy-v7")
    helper = PEFTHelper.from_local_dir(path, 128)
    options = {"peft_helper": helper, "lora_model_id": 1, "device": "cpu", "dtype": torch.float32}
    model = LoRAModel.from_local_checkpoint(path, {"q_proj"}, **options)
    torch.save({name: (one.lora_a, one.lora_b, one.rank) for name, one in model.loras.items()}, sys.argv[1])
    """
)


def test_vllm_loads_a_version_by_its_name(tmp_path: Path) -> None:
    begin = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {f"{begin}.lora_A.weight": torch.randn(4, 16), f"{begin}.lora_B.weight": torch.randn(16, 4)}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    with transfuse.hub(adapter=state, adapter_config=config, step=7) as hub:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        subprocess.run(
            [sys.executable, "-c", WORKER, str(tmp_path / "got.pt")],
            env=ours | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)},
            check=True,
        )
    ((name, (first, second, rank)),) = torch.load(tmp_path / "got.pt").items()
    assert (f"base_model.model.{name}", rank) == (begin, 4)
    assert torch.equal(first, state[f"{begin}.lora_A.weight"])
    assert torch.equal(second, state[f"{begin}.lora_B.weight"])
