"""Hugging Face folders in one process: `config.json` and safetensors as a model, and a model as such a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from forge_core._shared.hf_save import merged_config, write_folder
from forge_core._shared.hf_tensors import HFTensors, has_own_head, read_processor, rows_in
from forge_core._shared.paths import user_path
from forge_core._shared.problems import Problem, ProblemError, invalid, problems_of, raise_problems
from forge_core._shared.safetensors_headers import read_json
from forge_core.families.family import Family
from forge_core.model.init import check_init_tables, initialize

_M = TypeVar("_M", bound=nn.Module)
#: Problems of tensors that one error lists.
_SHOWN = 8
_LOADED = "_hf_config"  # config.json of the folder that a model was loaded from


class PretrainedFolder:
    """The model of a folder as transformers' `save_pretrained` writes it.

        folder = PretrainedFolder("Qwen3-0.6B", FAMILIES)
        model = folder.build(Transformer)          # in eval mode
        folder.config                              # TransformerConfig

    `families` are the families that it may be of, by `model_type`. Weights are read from safetensors, without the
    package of that name. Raises ValueError for a folder without them, an unknown architecture, and each key of
    `config.json` that cannot be held.
    """

    def __init__(self, path: str | os.PathLike[str], families: Mapping[str, Family]) -> None:
        self.path = user_path(path)
        self.hf = read_json(self.path / "config.json")
        name = self.hf.get("model_type")
        if not isinstance(name, str) or name not in families:
            fix = f"use one of {', '.join(families)}; forge_train.from_pretrained reads mixtures of experts, too"
            rule = "is not an architecture that this class reads"
            raise invalid("model_type", "unknown", name, rule, fix, where=self.path)
        self.family = families[name]
        self.config: Any = self.family.config_from_hf(self.hf)
        # as transformers 5, which does not tie a head that the files have with other values
        rows = self.family.rows_of(self.config)
        if self.config.tie_embeddings and has_own_head(self.path, rows):
            self.config = replace(self.config, tie_embeddings=False)

    def processor(self) -> dict[str, Any]:
        """Return the table of the folder's image processor; empty without one."""
        return read_processor(self.path)

    def build(
        self,
        make: Callable[[Any], _M],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> _M:
        """Return `make(config)` with the weights of the folder, in eval mode.

        device, dtype: of the parameters; by default torch's own, as for any module. Buffers keep their dtype.

        Raises ValueError for tensors that are missing, that the model does not have, or of other shapes, before memory
        is allocated. Memory: the model, and one tensor on the host.
        """
        rows = self.family.rows_of(self.config)
        images = hasattr(self.config, "vision")
        given = rows_in(self.path, self.hf, self.config, rows, self.family.beside, images)
        source = HFTensors(self.path, *given)
        with torch.device("meta"):
            model = make(self.config)
        check_init_tables(model)
        raise_problems(str(self.path), source.problems(model.state_dict())[:_SHOWN])

        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype or torch.get_default_dtype())
        model.to_empty(device=torch.get_default_device() if device is None else device)
        for part in model.children():
            if next(part.buffers(), None) is not None:  # which files need not have
                initialize(part, seed=0, strict=False)
        state = model.state_dict()
        with torch.no_grad():
            for name, tensor in source:
                state[name].copy_(tensor)
        model.__dict__[_LOADED] = self.hf
        return model.eval()


def save_folder(
    model: nn.Module,
    path: str | os.PathLike[str],
    families: Mapping[str, Family],
    family: str | None = None,
) -> None:
    """Write a model as a new folder that transformers loads: `config.json` and safetensors in the dtypes of the model.

    family: the `model_type`; by default that of the folder which the model was loaded from, or the first of `families`
    that can hold it. MTP modules are left out: transformers has no place for them. Tokenizer files are not written.

    Raises ValueError, before anything is written, for a folder that is not empty and for what the family cannot hold.
    Memory: one tensor on the host.
    """
    config: Any = model.config
    loaded: dict[str, Any] = model.__dict__.get(_LOADED, {})
    wanted = family or loaded.get("model_type")
    if wanted is not None and wanted not in families:
        fix = f"use one of {', '.join(families)}"
        raise invalid("family", "unknown", wanted, "is not a family that can be written", fix)
    found, written = _fitting(config, families if wanted is None else {wanted: families[wanted]})
    if found.beside:
        rule = f"needs tensors that are no part of the model: {', '.join(found.beside)}"
        fix = "use `forge-train export` of a run that began with such a folder"
        raise invalid("family", "requires", found.name, rule, fix)

    same = loaded if loaded.get("model_type") == found.name else {}
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    named = str(next(model.parameters()).dtype).removeprefix("torch.")
    table = {**merged_config(same, written), "dtype": named, "torch_dtype": named}
    files = {"config.json": json.dumps(table, indent=2, sort_keys=True).encode() + b"\n"}
    meta = {name: tensor.to("meta") for name, tensor in state.items()}
    rows = found.rows_of(config)
    write_folder(user_path(path), rows, meta, state.__getitem__, ignore=("mtp.*",), files=files)


def _fitting(config: Any, families: Mapping[str, Family]) -> tuple[Family, dict[str, Any]]:
    """The first of the families that holds a config, and its keys; ValueError with what keeps it from the first."""
    problems: tuple[Problem, ...] = ()
    for family in families.values():
        try:
            return family, family.config_to_hf(config)
        except ValueError as error:
            problems = problems or problems_of(error)
    raise ProblemError(problems, next(iter(families)))
