"""Optimizers by name, and what they do to each parameter of a model."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from forge_core._shared.names import without_layer_number
from forge_core._shared.problems import Problem, invalid, problems_of, raise_problems
from forge_core.kinds import parameter_kinds, stacked_vectors
from forge_core.optim.adamw import AdamW
from forge_core.optim.base import NamedOptimizer, set_rounding_seed
from forge_core.optim.config import OptimizerConfig, ScheduleConfig, class_settings, torch_settings
from forge_core.optim.ema import EMA, unnamed
from forge_core.optim.groups import (
    hidden_matrices,
    in_block,
    lr_scales,
    match_groups,
    param_groups,
    register_groups,
)
from forge_core.optim.lion import Lion
from forge_core.optim.muon import Muon
from forge_core.optim.schedule_free import ScheduleFreeAdamW
from forge_core.optim.stages import (
    StageConfig,
    check_something_trains,
    freeze_never_trained,
    stage_problems,
)
from forge_core.registry import Registry

#: Methods of every optimizer; a torch optimizer needs no `set_lr`.
_METHODS = ("step", "zero_grad", "set_lr", "state_dict", "load_state_dict")


def build_optimizer(
    model: nn.Module, config: OptimizerConfig | None = None, *, seed: int = 0
) -> Any:
    """Return the optimizer `config.name` over the trainable parameters of `model` (default: AdamW).

    `optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))`

    A name is one of Forge's, an entry point of forge.optimizers, or an import path, of

    - a class of torch optimizers (`torch.optim:SGD`): built over groups in which matrices decay and other parameters do
      not (`forge_core.kinds`), with its options, and with lr, betas, eps and weight_decay as far as it takes them;
    - a callable `builder(model, config, **config.options)` that returns a torch optimizer, or an object with `step()`,
      `zero_grad()`, `set_lr(lr)`, `state_dict()` and `load_state_dict(state)`.

    A `step(skip=...)` that masks an update (see `NamedOptimizer.step`) saves the runner a host sync per step. Where an
    optimizer defines `named_state()` and `load_named_state(state)`, state by parameter name that is complete before the
    first step, a checkpoint holds that; it fits any layout of ranks.

    adamw, lion and muon round bf16 weights stochastically, and state with `config.state_dtype`, as schedule_free_adamw
    does: by random bits that are a function of `seed`, name, step and element (see `rounding`).

    Raises ValueError for an unknown name, a setting that a torch class does not take, groups that do not fit the model or
    that the `param_groups` of a builder's optimizer do not show, and for what the optimizer itself checks.
    """
    config = OptimizerConfig() if config is None else config
    built = find_optimizer(config.name)
    lr_scales(model, config)

    settings: tuple[str, ...] = ()
    if _is_named_class(built):
        _check_options(built, config)
        optimizer: Any = built(**built.config_arguments(built, model, config), **config.options)
        optimizer.follow_model(model)
    elif _is_torch_class(built):
        optimizer = _build_torch_optimizer(built, model, config)
        settings = (*(key for key in torch_settings(config) if key != "lr"), *config.options)
    else:
        OPTIMIZERS.check(built, config.name, config.options)
        optimizer = built(model, config, **config.options)
        _check_methods(optimizer, config.name, f"built a {type(optimizer).__name__}, which ")

    if isinstance(optimizer, NamedOptimizer):  # its groups have their rates and keep them
        set_rounding_seed(optimizer, seed)
    else:
        register_groups(optimizer, model, config, settings)
    return optimizer if config.ema.decay is None else EMA(optimizer, config.ema, seed=seed)


def check_optimizer(model: nn.Module, config: OptimizerConfig) -> None:
    """Raise the ValueErrors of `build_optimizer`, as far as they need no values of parameters.

    `model` may be on the meta device; torch classes are built on it, builders are not called.
    """
    built = find_optimizer(config.name)
    check_parameters(model, config)
    if _is_named_class(built):
        _check_options(built, config)
    elif _is_torch_class(built):
        _build_torch_optimizer(built, model, config)
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
    """Raise the ValueErrors of `build_optimizer` about names and shapes: groups, factors of learning rates, Muon's matrices.

    `model` is the unsharded one, of any dtype, on the meta device or not.
    """
    match_groups(model, config.groups)
    lr_scales(model, config)
    if config.name == "muon":
        hidden_matrices(model, config)


def find_optimizer(name: str) -> Any:
    """Return the builder or class for `optimizer.name`; ValueError for an unknown name."""
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

    True for an unknown name, which `check_optimizer` reports; False for a function, which shows no class.
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
    """Return a table of text, in lines: kind, weight decay and optimizer of each parameter.

    Parameters whose names differ only in the number of a layer share a line. Raises ValueError as `build_optimizer`.
    """
    kinds = parameter_kinds(model)
    hidden = hidden_matrices(model, config) if config.name == "muon" else ()
    groups = param_groups(model, config, muon=False)
    decays = {n: group["weight_decay"] for group in groups for n, _ in group["params"]}
    others = "adamw" if config.name == "muon" else config.name

    counts: Counter[tuple[str, ...]] = Counter()
    for name, parameter in model.named_parameters():
        decay, by = "", "none: frozen"
        if name in decays:
            decay, by = f"{decays[name]:g}", "muon" if name in hidden else others
        shape = " x ".join(map(str, parameter.shape)) or "1"
        counts[without_layer_number(name), shape, kinds[name], decay, by] += 1

    head = ("parameter", "number", "shape", "kind", "weight decay", "trained by")
    table = [head, *((name, str(number), *rest) for (name, *rest), number in counts.items())]
    widths = [max(map(len, column)) for column in zip(*table)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths)).rstrip() for line in table]


def changes_of_older_run(model: nn.Module, config: OptimizerConfig) -> list[str]:
    """Return lines for a user: parameters whose decay, optimizer or learning rate differs from that of an earlier version.

    They are trainable norms, biases and vectors in stacks, which were taken for matrices (F146), and matrices of
    cross-attention blocks (F218). `model` is the unsharded model. Empty where nothing changed.
    Usage: `changes_of_older_run(model, OptimizerConfig("muon"))`.
    """
    owners, shapes = match_groups(model, config.groups), dict(model.named_parameters())
    own = {n: config.groups.get(owners.get(n, "")) for n in sorted(stacked_vectors(model))}

    # stacks of vectors without a decay of their group, and those that Muon took for matrices
    decayed = [n for n, group in own.items() if group is None or group.weight_decay is None]
    orthogonalized = [
        name
        for name, group in own.items()
        if shapes[name].ndim in (2, 3) and not name.endswith("bias")
        if (in_block(name) if group is None or group.muon is None else group.muon)
    ]
    scales = lr_scales(model, config)

    lines = []
    if decayed and config.weight_decay:
        decay = f"weight_decay = {config.weight_decay:g}"
        keep = f"an [optimizer.groups] table with these patterns and {decay} keeps it"
        lines.append(f"{_patterns(decayed)} had {decay}, and now do not decay: {keep}")
    if orthogonalized and config.name == "muon":
        lines.append(f"{_patterns(orthogonalized)} were trained by Muon, and now are by AdamW with new moments")  # fmt: skip

    # matrices of cross-attention blocks, unless a group chooses their optimizer
    crossed = [
        name
        for name in shapes
        if ".cross_" in name
        and getattr(config.groups.get(owners.get(name, "")), "muon", None) is None
    ]
    if config.name == "muon" and crossed and (new := hidden_matrices(model, config) & {*crossed}):
        lines.append(f"{_patterns(sorted(new))} were trained by AdamW, and now are by Muon with new moments")  # fmt: skip
    if scaled := [n for n in own if n in scales and len(set(scales.values())) > 1]:
        lines.append(f"{_patterns(scaled)} had the learning rate of matrices of this width, and now have that of vectors")  # fmt: skip
    return lines


def _patterns(names: Iterable[str]) -> str:
    """The names, with one pattern for all layers."""
    return ", ".join(dict.fromkeys(map(without_layer_number, names)))


def _check_options(kind: type[NamedOptimizer], config: OptimizerConfig) -> None:
    """ValueError for options that a class of Forge's base does not take, next to the settings of `config`."""
    given = class_settings(config)
    OPTIMIZERS._replace(arguments=("params",)).check(kind, config.name, config.options, given)


def _is_named_class(built: Any) -> bool:
    """Whether `built` is a class of `NamedOptimizer` that is called with parameters."""
    return _is_torch_class(built) and issubclass(built, NamedOptimizer)


def _is_torch_class(built: Any) -> bool:
    """Whether `built` is called with parameters, and not with (model, config)."""
    torch_class = isinstance(built, type) and issubclass(built, torch.optim.Optimizer)
    return torch_class and "params" in inspect.signature(built).parameters


def _build_torch_optimizer(
    kind: type[torch.optim.Optimizer], model: nn.Module, config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build a class of torch optimizers over `param_groups`, with the settings that its signature takes."""
    taken = inspect.signature(kind).parameters
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        rule = "needs a closure that runs the model again, and a step has none"
        fix = "use an optimizer with step()"
        raise invalid("optimizer.name", "closure", config.name, rule, fix)

    # a setting that the class does not take is an error, unless it is at its default: a file holds all keys
    settings, defaults = torch_settings(config), torch_settings(OptimizerConfig(config.name))
    given = {key: value for key, value in settings.items() if _takes(taken.get(key), value)}
    ignored = {k: v for k, v in settings.items() if k not in given and v != defaults[k]}
    if "weight_decay" not in given:
        ignored |= {
            f"groups.{name}.weight_decay": group.weight_decay
            for name, group in config.groups.items()
            if group.weight_decay is not None
        }

    rule = f"cannot be given: {config.name} takes none like it"
    problems = [
        Problem(f"optimizer.{key}", "unsupported", value, rule, "leave it out")
        for key, value in ignored.items()
    ]
    raise_problems("", problems)
    OPTIMIZERS._replace(arguments=("params",)).check(kind, config.name, config.options, given)

    groups = param_groups(model, config, muon=False, rounds=False)
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


def _takes(parameter: inspect.Parameter | None, value: Any) -> bool:
    """Whether a class takes a setting under this name: its default has as many numbers.

    Adafactor's eps is a pair with another meaning, and Adan has three betas.
    """

    def length(value: Any) -> int | None:
        return len(value) if isinstance(value, tuple) else None

    return parameter is not None and length(parameter.default) == length(value)


def _check_methods(optimizer: Any, name: str, built: str = "") -> None:
    """ValueError for a class or an object that lacks a method of optimizers."""
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
        "adamw": AdamW,
        "lion": Lion,
        "muon": Muon,
        "schedule_free_adamw": ScheduleFreeAdamW,
    },
)
