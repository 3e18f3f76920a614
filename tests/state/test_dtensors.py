"""DTensors, where nobody has imported ``torch.distributed.tensor`` yet."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import transfuse
from transfuse._state.leaves.dtensors import is_dtensor

FETCH = """
import sys, transfuse
assert "torch.distributed.tensor" not in sys.modules
state = transfuse.fetch(sys.argv[1], token="t").state
print(type(state["w"]).__name__, state["w"].placements, state["w"].to_local().tolist(), type(state["b"]).__name__)
"""


def test_a_process_that_has_never_heard_of_dtensors_builds_them() -> None:
    mesh = DeviceMesh("cpu", torch.tensor([0]), _init_backend=False, _rank=0)
    w = DTensor.from_local(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)], run_check=False)
    assert is_dtensor(w)
    assert not is_dtensor(w.to_local())
    with transfuse.serve({"w": w, "b": torch.ones(2)}, token="t") as server:
        command = [sys.executable, "-W", "ignore", "-c", FETCH, server.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "DTensor (Shard(dim=0),) [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]] Tensor\n", done.stderr
