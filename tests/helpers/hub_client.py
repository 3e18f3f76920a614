"""A client of a Hub, as a process that knows nothing of transfuse: run with HF_ENDPOINT and HF_HOME set.

``python hub_client.py ROUNDS`` downloads the repository ROUNDS times, and prints a line of JSON for each: the commit,
and the smallest and the largest value of each tensor that the real libraries find in its files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import huggingface_hub
from safetensors.numpy import load_file


def main(rounds: int) -> None:
    for _ in range(rounds):
        folder = Path(huggingface_hub.snapshot_download("live/model"))
        commit = folder.name
        values = {}
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                values[name] = [float(tensor.min()), float(tensor.max())]
        print(json.dumps({"commit": commit, "values": values}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
