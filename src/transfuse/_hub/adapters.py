"""Adapters: which tensors of a job are one, under which names, and the config that says how they are loaded.

A ``PeftModel`` says all of that by itself: what is served is what its ``save_pretrained`` would write. Tensors alone
need a config. peft is imported only for a model of its own, so it is there already.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from transfuse._job.state import State

#: What peft calls the files of an adapter.
WEIGHTS_NAME, CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
#: Where the tensors are in the tree that readers see; :data:`CONFIG_NAME` is beside them.
TENSORS = "adapter"


class PeftAdapter:
    """One adapter of a ``PeftModel``."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = model, name
        #: Whether resized embeddings are a part of it. peft finds out by asking the Hub for the base model's config.
        self._has_embeddings: bool | None = None

    def tree(self) -> dict[str, object]:
        """The tensors, under the names that ``save_pretrained`` gives them, and the config as a file."""
        if self._has_embeddings is None:
            self._has_embeddings = self._tensors("auto").keys() != self._tensors(False).keys()
        return {TENSORS: self._tensors(self._has_embeddings), CONFIG_NAME: self._config()}

    def _tensors(self, embeddings: bool | str) -> dict[str, Any]:
        from peft import get_peft_model_state_dict

        found = get_peft_model_state_dict(self._model, adapter_name=self._name, save_embedding_layers=embeddings)
        return dict(found)

    def _config(self) -> bytes:
        """The config as ``PeftModel.save_pretrained`` writes it."""
        model, config = self._model, copy.copy(self._model.peft_config[self._name])
        is_prompt = config.is_prompt_learning
        if config.base_model_name_or_path is None:
            base = model.base_model if is_prompt else model.base_model.model
            config.base_model_name_or_path = vars(base).get("name_or_path") or None
        config.inference_mode = True
        said = config.to_dict()
        if config.task_type is None:
            kind = model._get_base_model_class(is_prompt_tuning=is_prompt)
            said["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        return config_text("adapter", said)


def peft_models(state: State) -> list[Any]:
    """The models of peft in a state, each once: by themselves, or within another module."""
    peft = sys.modules.get("peft")
    modules = [place.value for place in state.places() if isinstance(place.value, torch.nn.Module)]
    if peft is None:
        return []
    found = [next((one for one in module.modules() if isinstance(one, peft.PeftModel)), None) for module in modules]
    return list({id(model): model for model in found if model is not None}.values())


def names_of(model: Any, asked: tuple[str, ...]) -> tuple[str, ...]:
    """The adapters of a model that were asked for; without any, its only one."""
    there = tuple(model.peft_config)
    unknown = [name for name in asked if name not in there]
    if unknown or not (asked or len(there) == 1):
        wanted = f"adapter_name={unknown[0]!r} is not there" if unknown else "give adapter_name="
        raise ValueError(f"{wanted}: the model's adapters are {', '.join(map(repr, there)) or 'none'}")
    return asked or there


def config_text(what: str, config: object) -> bytes:
    """A config as the bytes of its file. Sets become lists, in one order: the same config is the same bytes."""
    if isinstance(config, bytes):
        return config
    said = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(said, Mapping) or not said:
        raise TypeError(f"{what} takes a mapping or a config of peft, got {type(said).__name__}")
    try:
        return json.dumps(dict(said), indent=2, sort_keys=True, default=_listed).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} cannot be written as JSON: {error}") from None


def _listed(value: object) -> list[Any]:
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    raise TypeError(f"it holds a {type(value).__name__}")
