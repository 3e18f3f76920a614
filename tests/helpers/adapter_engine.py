"""What an engine does with an adapter's name, as a process that has nothing else: HF_ENDPOINT and HF_HOME are set.

``python adapter_engine.py FILE`` reads names from its input, loads each with peft, saves the adapter's tensors and the
logits to FILE, and says ``loaded``, or ``unknown`` and why.
"""

from __future__ import annotations

import sys

import huggingface_hub
import torch
from huggingface_hub.errors import RepositoryNotFoundError

from adapters_made import IDS, base_model, peft


def load(name: str, file: str) -> None:
    info, refs = huggingface_hub.model_info(name), huggingface_hub.list_repo_refs(name)
    assert refs.branches[0].target_commit == info.sha
    assert info.library_name == "peft"
    assert info.sha in huggingface_hub.hf_hub_download(name, "adapter_config.json")
    model = peft.PeftModel.from_pretrained(base_model(), name)
    with torch.no_grad():
        torch.save((peft.get_peft_model_state_dict(model), model(IDS).logits), file)


def main(file: str) -> None:
    for line in sys.stdin:
        try:
            load(line.strip(), file)
            print("loaded", flush=True)
        except RepositoryNotFoundError as error:
            print("unknown", " ".join(str(error).split()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
