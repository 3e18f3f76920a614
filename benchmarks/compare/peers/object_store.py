"""Ray's object store."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Any

import torch

from benchmarks.compare.peers.peer import Peer

__all__ = ["Ray"]


class Ray(Peer):
    key, name, package, module = "ray", "Ray object store, numpy", "ray", "ray"
    whole = False
    note = "get gives read-only memory, so that it is copied, also if fresh"

    def prepare(self) -> None:
        # A private cluster with a token of its own. Ray reads the variables once, on import.
        token = self.scene.tell(secrets.token_hex(32))
        if "ray" not in sys.modules:
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        import ray

        self.ray: Any = ray
        options: dict[str, Any] = {"namespace": "bench", "log_to_driver": False, "logging_level": "error"}
        if self.scene.sending:
            room = 2 * sum(t.nbytes for t in self.scene.tensors.values()) + (256 << 20)
            options |= {"num_cpus": 1, "include_dashboard": False, "object_store_memory": room}
            ray.init("local", _temp_dir=str(self.scene.folder / "ray"), **options)
            self.shelf = _shelf(ray)
            self.scene.tell(ray.get_runtime_context().gcs_address)
        else:
            ray.init(self.scene.tell(), **options)
            self.shelf = ray.get_actor("shelf")

    def send(self) -> None:
        arrays = {name: tensor.numpy() for name, tensor in self.scene.tensors.items()}
        self.ray.get(self.shelf.keep.remote([self.ray.put(arrays)]))
        self.scene.meet()

    def receive(self) -> Any:
        self.scene.meet()
        (reference,) = self.ray.get(self.shelf.show.remote())
        arrays = self.ray.get(reference)
        if self.scene.mode == "fresh":
            return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        own = self.scene.tensors
        torch._foreach_copy_(list(own.values()), [torch.from_numpy(arrays[name]) for name in own])
        return own

    def tidy(self) -> None:
        if self.scene.sending:
            self.ray.get(self.shelf.keep.remote([]))

    def close(self) -> None:
        # The source's process ends the store; the others should have left it by then.
        if not self.scene.sending:
            self.ray.shutdown()
        self.scene.meet()
        if self.scene.sending:
            self.ray.shutdown()


def _shelf(ray: Any) -> Any:
    """An actor through which the receivers' processes find the object."""

    class Shelf:
        def keep(self, references: list[Any]) -> None:
            self.references = references

        def show(self) -> list[Any]:
            return self.references

    shelf = ray.remote(Shelf).options(name="shelf", num_cpus=0).remote()
    # The actor has started once it answers.
    ray.get(shelf.keep.remote([]))
    return shelf
