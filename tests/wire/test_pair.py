"""Pairs that are being formed when the process ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import socket
import struct
import threading
import time

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from transfuse.wire import pair

# A port that answers no more: as many wait to be accepted as may.
silent = socket.create_server(("127.0.0.1", 0), backlog=0)
ends = [socket.socket() for _ in range(3)]
for end in ends:
    end.setblocking(False)
    end.connect_ex(silent.getsockname())
forming = threading.Event()


class Silent(Store):
    def set(self, key, value):
        (name,) = struct.unpack_from("<Q", value)
        port = 8 + name + 8 + 2  # After the name and its length, the network address's length and its family.
        self.theirs = value[:port] + struct.pack(">H", silent.getsockname()[1]) + value[port + 2:]

    def get(self, key):
        forming.set()
        return self.theirs

    def wait(self, keys, timeout=None):
        pass


def form(rank):
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)
    try:
        pair.form(Silent(), rank, 1.0, device)
    except RuntimeError as error:
        print(f"rank {rank}: {type(error).__name__}", flush=True)


# One connects, the other one waits to be connected to.
for rank in range(2):
    threading.Thread(target=form, args=(rank,), daemon=True).start()
forming.wait()
time.sleep(2)  # gloo gives up three seconds later, while the process ends.
"""


def test_a_process_may_end_while_gloo_connects() -> None:
    """Behind a firewall gloo tries for five seconds. A thread that comes back while the interpreter ends aborts it."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended
    assert sorted(ended.stdout.splitlines()) == ["rank 0: RuntimeError", "rank 1: RuntimeError"]
