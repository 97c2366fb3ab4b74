"""Adapters in the model of a run, which freeze all other weights."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from forge_core.lora import LoRALinear, lora, without_adapter
from forge_core.optim import match_groups
from forge_train._shared.problems import Problem, invalid, raise_problems
from forge_train.config.lora import LoRASection
from forge_train.config.schema import JobConfig
from forge_train.errors import config_errors

#: Of a layer, in the name of a parameter.
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
_DTYPES = {"bf16": torch.bfloat16, "fp32": None}


def add_adapters(model: nn.Module, config: JobConfig) -> None:
    """Freeze a whole model and give it the adapters of [lora], in place; nothing without any. ConfigError."""
    adapters = config.lora.adapters
    if adapters is None:
        return
    with config_errors():
        add_lora(model, config.lora, _DTYPES[config.lora.base_dtype])
        _refuse_frozen_groups(model, config)


def add_lora(model: nn.Module, section: LoRASection, base_dtype: torch.dtype | None) -> None:
    """`lora`, and the weights of `section.whole` trained as they were; ValueError for a pattern that matches none."""
    before = {name: (p, p.data) for name, p in model.named_parameters()}
    whole = _whole_names(list(before), section.whole)
    assert section.adapters is not None
    layers = lora(model, section.adapters, base_dtype)
    both = sorted(whole & {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")})
    if both:
        rule = "is a weight of a layer that has an adapter by lora.patterns"
        raise invalid("lora.whole", "excludes", both[0], rule, "leave it out of one of them")
    for name in whole:
        parameter, value = before[name]
        parameter.data = value
        parameter.requires_grad_(True)


def adapter_lines(model: nn.Module, section: LoRASection) -> list[str]:
    """What has adapters, counted by names of layers, and which matrices the patterns match in vain; none without [lora]."""
    if section.adapters is None:
        return []
    names = [name for name, m in model.named_modules() if isinstance(m, LoRALinear)]
    found = Counter(name.rpartition(".")[2] for name in names)
    kinds = ", ".join(f"{number} {kind}" for kind, number in found.items())
    lines = [f"{len(names)} linear layers have an adapter of rank {section.rank}: {kinds}"]
    left = Counter(
        _NUMBER.sub("*", name) for name in without_adapter(model, section.adapters.patterns)
    )
    if left:
        shown = ", ".join(f"{number} {name}" for name, number in left.items())
        lines.append(f"lora.patterns match stacks of matrices, which get no adapter: {shown}")
    return lines


def _whole_names(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if idle:
        near = ", ".join(difflib.get_close_matches(idle[0], names, n=3, cutoff=0.0))
        fix = f"the nearest names are {near}"
        raise invalid("lora.whole", "not_found", idle[0], "must match a weight", fix)
    return {name for name in names if any(fnmatchcase(name, p) for p in patterns)}


def _refuse_frozen_groups(model: nn.Module, config: JobConfig) -> None:
    """ValueError for a group without an adapter: its rate would change nothing."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    owners = match_groups(model, config.optimizer.groups)
    idle = set(config.optimizer.groups) - {owners.get(name) for name in trained}
    rule = f"match weights that lora.rank {config.lora.rank} freezes, and no adapter"
    fix = "use a pattern as '*.lora_b', or remove the group"
    keys = [f"optimizer.groups.{group}.patterns" for group in sorted(idle)]
    raise_problems("", [Problem(key, "frozen", ..., rule, fix) for key in keys])


def frozen_names(model: nn.Module) -> set[str]:
    """Names of the parameters that [lora] freezes, all of a tied one; asked before groups freeze others."""
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}
