"""Ray actors exchange tensors over transfuse: a trainer's weights reach an inference actor, and errors reach both.

    python examples/ray_transport.py

Weights go from actor to actor, from memory to memory, without Ray's object store. Then the trainer dies, and the
weights that it had made die with it: the actor that asks for them gets an error that names the trainer, and lives on.
"""

import os
from typing import Any

import ray
import torch
from torch import nn

from transfuse.integrations import ray as over_transfuse

over_transfuse.register()  # Before @ray.method names the transport.


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(1024, 1024)

    @ray.method(tensor_transport="TRANSFUSE")
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())

    def checksum(self) -> float:
        return sum(float(tensor.double().sum()) for tensor in self.model.state_dict().values())

    def die(self) -> None:
        os._exit(1)


@ray.remote(num_cpus=0, enable_tensor_transport=True)  # It returns no tensors itself, so Ray has to be told.
class Generator:
    def __init__(self) -> None:
        self.model = nn.Linear(1024, 1024)

    def update(self, weights: dict[str, torch.Tensor]) -> float:
        self.model.load_state_dict(weights)
        return sum(float(tensor.double().sum()) for tensor in self.model.state_dict().values())

    def report(self) -> str:
        return over_transfuse.reports()[-1].line()


def show() -> None:
    trainer, generator = Trainer.remote(), Generator.remote()  # type: ignore[attr-defined]
    weights = trainer.weights.remote()
    equal = ray.get(generator.update.remote(weights)) == ray.get(trainer.checksum.remote())
    print("the generator has the trainer's weights:", equal)
    print(ray.get(generator.report.remote()))

    try:
        ray.get(trainer.die.remote())
    except ray.exceptions.ActorDiedError:
        print("the trainer is dead")
    try:
        ray.get(generator.update.remote(weights))
    except ray.exceptions.RayDirectTransportError as error:
        print("the generator got an error that names the trainer:", "Actor(Trainer" in str(error))
    print("the generator lives on:", bool(ray.get(generator.report.remote())))


if __name__ == "__main__":
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    ray.init("local", num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=80 << 20, **options)
    show()
    ray.shutdown()
