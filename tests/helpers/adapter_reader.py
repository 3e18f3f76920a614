"""A reader of an adapter's versions, as a process that knows nothing of transfuse: HF_ENDPOINT and HF_HOME are set.

``python adapter_reader.py ROUNDS`` asks which versions there are, downloads the newest and the oldest, and prints a
line of JSON for each: its name, and the digest of every tensor. It ends after ROUNDS lines. A version that is gone by
then is no error, and no line.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from safetensors.numpy import load_file


def main(rounds: int) -> None:
    done = 0
    while done < rounds:
        there = [one.id for one in huggingface_hub.HfApi().list_models(author="live")]
        for name in dict.fromkeys((there[0], there[-1])):
            try:
                folder = Path(huggingface_hub.snapshot_download(name))
            except (RepositoryNotFoundError, RevisionNotFoundError):
                continue
            assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
            found = load_file(folder / "adapter_model.safetensors")
            digests = {key: hashlib.sha256(value.tobytes()).hexdigest() for key, value in found.items()}
            print(json.dumps({"name": name, "commit": folder.name, "digests": digests}), flush=True)
            done += 1


if __name__ == "__main__":
    main(int(sys.argv[1]))
