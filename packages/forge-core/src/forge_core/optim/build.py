"""Optimizers by name."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from forge_core._shared.problems import Problem, invalid, problems_of, raise_problems
from forge_core.kinds import parameter_kinds
from forge_core.optim.adamw import build_adamw
from forge_core.optim.base import NamedOptimizer, set_rounding_seed
from forge_core.optim.config import OptimizerConfig, ScheduleConfig
from forge_core.optim.ema import EMA, unnamed
from forge_core.optim.groups import lr_scales, match_groups, parameter_groups, take_part
from forge_core.optim.lion import build_lion
from forge_core.optim.muon import build_muon, hidden_matrices
from forge_core.optim.schedule_free import build_schedule_free_adamw
from forge_core.optim.stages import (
    StageConfig,
    check_something_trains,
    freeze_never_trained,
    stage_problems,
)
from forge_core.registry import Registry

_LAYER = re.compile(r"(?<![^.])\d+(?=\.)")  # its number in a name
#: Without them an object cannot be an optimizer; a torch optimizer needs no `set_lr`.
_METHODS = ("step", "zero_grad", "set_lr", "state_dict", "load_state_dict")


def build_optimizer(
    model: nn.Module, config: OptimizerConfig | None = None, *, seed: int = 0
) -> Any:
    """Return the optimizer `config.name` over the trainable parameters of `model` (default: AdamW).

    `optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))`

    A name is one of Forge, or leads to one of these:

    - a class of torch optimizers (`torch.optim:SGD`): built over groups in which matrices decay and other
      parameters do not (`forge_core.kinds`), with those of lr, betas, eps and weight_decay that it takes, and the options;
    - a callable `builder(model, config, **config.options)` that returns a torch optimizer, or an object with
      `step()`, `zero_grad()`, `set_lr(lr)`, `state_dict()` and `load_state_dict(state)`.

    A `step(skip=...)` that masks an update (see `NamedOptimizer.step`) saves the runner a host sync per step. State
    by parameter name, `named_state()` and `load_named_state(state)` complete before the first step, is
    what a checkpoint holds where both are offered; it fits any layout of ranks.

    Weights that are bf16, and state with `config.state_dtype`, are rounded stochastically by adamw, lion and muon (state
    by schedule_free_adamw, too): by random bits that are a function of `seed`, name, step and element (see `rounding`).

    Raises: ValueError for an unknown name, for a setting that a torch class does not take, for groups that
        do not fit the model or that a builder's optimizer does not show, and what the optimizer refuses.
    """
    config = OptimizerConfig() if config is None else config
    built = find_optimizer(config.name)
    lr_scales(model, config)
    settings: tuple[str, ...] = ()
    if _is_torch_class(built):
        optimizer: Any = _over_groups(built, model, config)
        settings = (*(key for key in _settings(config) if key != "lr"), *config.options)
    else:
        OPTIMIZERS.check(built, config.name, config.options)
        optimizer = built(model, config, **config.options)
        _check_methods(optimizer, config.name, f"built a {type(optimizer).__name__}, which ")
    if isinstance(optimizer, NamedOptimizer):  # which took part as it was made
        set_rounding_seed(optimizer, seed)
    else:
        take_part(optimizer, model, config, settings)
    return optimizer if config.ema.decay is None else EMA(optimizer, config.ema, seed=seed)


def check_optimizer(model: nn.Module, config: OptimizerConfig) -> None:
    """Raise the ValueErrors that `build_optimizer` would, as far as they show without a value.

    `model` may be on the meta device; torch classes are tried on it, builders are only looked at.
    """
    built = find_optimizer(config.name)
    check_parameters(model, config)
    if _is_torch_class(built):
        _over_groups(built, model, config)
        if config.ema.decay is not None:
            raise unnamed(config.ema, config.name)
    else:
        if isinstance(built, type):
            _check_methods(built, config.name)
        OPTIMIZERS.check(built, config.name, config.options)


def optimizer_problems(config: OptimizerConfig) -> list[Problem]:
    """The problems of a name and its options without a model, for each of the groups."""
    # a block with a matrix without values: an optimizer checks some options only with parameters
    stand_in = nn.Sequential(nn.Linear(1, 1, device="meta"))
    single = [{name: replace(own, patterns=("*",))} for name, own in config.groups.items()]
    found: dict[str, Problem] = {}
    for groups in single or [{}]:
        try:
            check_optimizer(stand_in, replace(config, groups=groups))
        except (ValueError, ImportError) as error:
            found |= {str(problem): problem for problem in problems_of(error)}
    return list(found.values())


def schedule_warnings(optimizer: OptimizerConfig, schedule: ScheduleConfig) -> list[str]:
    """A warning where the learning rate falls and the optimizer has an average in place of that; usually none."""
    if optimizer.name != "schedule_free_adamw" or schedule.name in ("constant", "none"):
        return []
    return [
        f"schedule.name {schedule.name!r} goes with optimizer.name {optimizer.name!r}, whose average replaces the decay of "
        "the learning rate; 'constant' with warmup_steps is usual"
    ]


def check_parameters(model: nn.Module, config: OptimizerConfig) -> None:
    """Raise the ValueErrors of `build_optimizer` about names and shapes: groups, factors of rates, Muon's matrices.

    `model` is the whole one, of any dtype, on the meta device or not.
    """
    match_groups(model, config.groups)
    lr_scales(model, config)
    if config.name == "muon":
        hidden_matrices(model, config)


def find_optimizer(name: str) -> Any:
    """The builder that `optimizer.name` names; ValueError with the key for an unknown name."""
    return OPTIMIZERS.find(name)


def freeze_groups(
    model: nn.Module,
    config: OptimizerConfig,
    stages: Mapping[str, StageConfig],
    total_steps: int | None = None,
) -> None:
    """Check names, groups and stages on the full model, and freeze the groups that no stage trains.

    Raises ValueError as `check_parameters` and `check_something_trains`, and for `stage_problems`.
    """
    check_parameters(model, config)
    if config.groups:
        raise_problems("", stage_problems(config, stages, total_steps))
        check_something_trains(model, config, stages)
        freeze_never_trained(model, config, stages)


def saves_by_name(name: str) -> bool:
    """Whether the optimizer of a name has state by parameter name, as far as its class shows.

    True for a name that leads nowhere, which `check_optimizer` reports; False for a function, which shows nothing.
    """
    if name in OPTIMIZERS.built_in:
        return True
    try:
        found = find_optimizer(name)
    except ValueError:
        return True
    methods = ("named_state", "load_named_state")
    return isinstance(found, type) and all(callable(getattr(found, m, None)) for m in methods)


def describe_parameters(model: nn.Module, config: OptimizerConfig) -> list[str]:
    """A table of text: kind, weight decay and optimizer of each parameter.

    One line for parameters whose names differ in numbers of layers only. Raises ValueError as `build_optimizer`.
    """
    kinds = parameter_kinds(model)
    hidden = hidden_matrices(model, config) if config.name == "muon" else ()
    groups = parameter_groups(model, config, rounds=True)
    decays = {n: group["weight_decay"] for group in groups for n, _ in group["params"]}
    others = "adamw" if config.name == "muon" else config.name

    counts: Counter[tuple[str, ...]] = Counter()
    for name, parameter in model.named_parameters():
        decay, by = "", "none: frozen"
        if name in decays:
            decay, by = f"{decays[name]:g}", "muon" if name in hidden else others
        shape = " x ".join(map(str, parameter.shape)) or "1"
        counts[_LAYER.sub("*", name), shape, kinds[name], decay, by] += 1

    head = ("parameter", "number", "shape", "kind", "weight decay", "trained by")
    table = [head, *((name, str(number), *rest) for (name, *rest), number in counts.items())]
    widths = [max(map(len, column)) for column in zip(*table)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths)).rstrip() for line in table]


def _is_torch_class(built: Any) -> bool:
    """Whether it is called with parameters, and not with (model, config)."""
    torch_class = isinstance(built, type) and issubclass(built, torch.optim.Optimizer)
    return torch_class and "params" in inspect.signature(built).parameters


def _over_groups(
    kind: type[torch.optim.Optimizer], model: nn.Module, config: OptimizerConfig
) -> torch.optim.Optimizer:
    taken = inspect.signature(kind).parameters
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        rule = "needs a closure that runs the model again, and a step has none"
        raise invalid(
            "optimizer.name", "closure", config.name, rule, "use an optimizer with step()"
        )

    settings, defaults = _settings(config), _settings(OptimizerConfig(config.name))
    given = {key: value for key, value in settings.items() if _takes(taken.get(key), value)}
    ignored = {k: v for k, v in settings.items() if k not in given and v != defaults[k]}
    if "weight_decay" not in given:
        ignored |= {
            f"groups.{name}.weight_decay": group.weight_decay
            for name, group in config.groups.items()
            if group.weight_decay is not None
        }
    rule = f"cannot be given: {config.name} takes none like it"
    odd = (
        Problem(f"optimizer.{k}", "unsupported", v, rule, "leave it out")
        for k, v in ignored.items()
    )
    raise_problems("", odd)

    OPTIMIZERS._replace(arguments=("params",)).check(kind, config.name, config.options, given)
    groups = parameter_groups(model, config)
    if "weight_decay" not in given:
        for group in groups:
            del group["weight_decay"]

    try:
        return kind(groups, **given, **config.options)
    except TypeError as error:
        rule = f"cannot be called: {error}"
        fix = (
            "name a function builder(model, config) that calls it with the arguments that it needs"
        )
        raise invalid("optimizer.name", "arguments", config.name, rule, fix) from error


def _settings(config: OptimizerConfig) -> dict[str, Any]:
    """What a torch class may be called with."""
    names = ("lr", "eps", "weight_decay", "state_dtype")
    return {"betas": config.resolved_betas, **{name: getattr(config, name) for name in names}}


def _takes(parameter: inspect.Parameter | None, value: Any) -> bool:
    """Whether a class takes a setting: Adafactor's eps, for one, is a pair and another thing, and Adan has three
    betas."""
    if parameter is None:
        return False
    return _length(parameter.default) == _length(value)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, tuple) else None


def _check_methods(optimizer: Any, name: str, built: str = "") -> None:
    needed = [name for name in _METHODS if not callable(getattr(optimizer, name, None))]
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(kind, torch.optim.Optimizer) and "set_lr" in needed:
        needed.remove("set_lr")
    if needed:
        rule = f"{built}has no {', '.join(needed)}"
        fix = f"give it {', '.join(_METHODS)}, or use a torch optimizer"
        raise invalid("optimizer.name", "methods", name, rule, fix)


OPTIMIZERS = Registry(
    "optimizer.name",
    "forge.optimizers",
    ("model", "config"),
    {
        "adamw": build_adamw,
        "lion": build_lion,
        "muon": build_muon,
        "schedule_free_adamw": build_schedule_free_adamw,
    },
)
