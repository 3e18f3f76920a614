"""A worker for tests of the service: a job of one process, which does what the lines that it reads say."""

from __future__ import annotations

import logging
import os
import pathlib
import sys

import torch

import transfuse

logging.basicConfig(format="%(message)s", stream=sys.stderr)
model = {"w": torch.zeros(int(sys.argv[1]) // 4)}
directory = os.environ.get("SAVED")
keep = transfuse.keep(model, timeout=60, directory=directory, save_every=2 if directory else None)
step = keep.restore() or 0
print(f"begins after step {step}: {model['w'][0].item():g}", flush=True)
for word in map(str.strip, sys.stdin):
    if word == "commit":
        step += 1
        model["w"].fill_(step)
        report = keep.commit(step)
        assert report is not None
        print(report.outcome, flush=True)
    else:  # Of the run's directory: as `transfuse fetch keeper:NAME` does.
        address, token = (pathlib.Path(word, name).read_text() for name in ("address", "token"))
        fetched = transfuse.fetch(address, token=token)
        print(f"fetched step {fetched.step}: {fetched.state['w'][0].item():g}", flush=True)
keep.detach()
