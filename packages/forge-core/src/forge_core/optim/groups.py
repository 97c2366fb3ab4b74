"""Groups of parameters by patterns of their names: who belongs to which, and freezing them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core.kinds import ParameterKind, is_matrix, parameter_kinds, stacked_vectors
from forge_core.optim.config import OptimizerConfig, OptimizerGroupConfig
from forge_core.optim.named import set_group_lrs, trainable


def match_groups(model: nn.Module, groups: Mapping[str, OptimizerGroupConfig]) -> dict[str, str]:
    """{parameter name: group} of every parameter that a group's patterns match.

        match_groups(model, {"head": OptimizerGroupConfig(("lm_head.*",))}) == {"lm_head.weight": "head"}

    A tied parameter has several names: a pattern of one of them is about all. Raises one ValueError that
    lists every parameter that two groups match, and every pattern that matches nothing.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found: dict[str, str] = {}
    problems: list[Problem] = []
    for aliases in names.values():
        owners = [
            group for group, config in groups.items() if any(_fits(n, config) for n in aliases)
        ]
        if len(owners) > 1:
            listed = " and ".join(f"optimizer.groups.{owner}" for owner in owners)
            rule = f"must be in one group at most, and patterns of {listed} match it"
            fix = "make one of them narrower"
            problems.append(Problem("optimizer.groups", "duplicate", aliases[0], rule, fix))
        found.update(dict.fromkeys(aliases, owners[0]) if owners else {})

    known = [name for aliases in names.values() for name in aliases]
    for group, config in groups.items():
        for pattern in config.patterns:
            if not any(fnmatchcase(name, pattern) for name in known):
                key, near = (
                    f"optimizer.groups.{group}.patterns",
                    ", ".join(_nearest(pattern, known)),
                )
                rule = "must match a parameter of the model, and matches none"
                fix = f"the nearest names are {near or 'none: it has no parameter'}"
                problems.append(Problem(key, "not_found", pattern, rule, fix))
    raise_problems("", problems)
    return found


def check_groups_train(model: nn.Module, groups: Mapping[str, OptimizerGroupConfig]) -> None:
    """ValueError for a group of frozen parameters, as of a model with adapters: its rate would change nothing."""
    owners = match_groups(model, groups)
    idle = set(groups) - {owners.get(n) for n, p in model.named_parameters() if p.requires_grad}
    rule, fix = "match frozen weights only", "use a pattern as '*.lora_b', or remove the group"
    keys = [f"optimizer.groups.{group}.patterns" for group in sorted(idle)]
    raise_problems("", [Problem(key, "frozen", ..., rule, fix) for key in keys])


def groups_of_part(part: nn.Module, config: OptimizerConfig) -> dict[str, OptimizerGroupConfig]:
    """The groups and patterns that match a part of a model, which has the names of the whole model.

    `build_optimizer(stage, replace(config, groups=groups_of_part(stage, config)))` on a rank of a pipeline,
    after `match_groups` on the whole model, which refuses patterns that match nothing anywhere.
    """
    names = [name for name, _ in part.named_parameters(remove_duplicate=False)]
    found = {}
    for group, own in config.groups.items():
        patterns = tuple(p for p in own.patterns if any(fnmatchcase(n, p) for n in names))
        if patterns:
            found[group] = replace(own, patterns=patterns)
    return found


#: Their update of an element is of the size of the rate, whatever the gradient's: `lr_scales` are made for these.
_SIZED_BY_RATE = ("adamw", "lion", "schedule_free_adamw")


def lr_scales(model: nn.Module, config: OptimizerConfig) -> Mapping[str, float]:
    """{parameter: factor of its rate} that a model's parametrization asks for (`model.lr_scales()`), if any.

    Raises ValueError for an optimizer that they are not made for.
    """
    scales: dict[str, float] = {}
    for prefix, module in model.named_modules():  # the model itself, or one inside of a wrapper
        if hasattr(type(module), "lr_scales"):
            offered: Mapping[str, float] = module.lr_scales()
            scales |= {f"{prefix}.{n}" if prefix else n: scale for n, scale in offered.items()}
    if scales and config.name not in _SIZED_BY_RATE:
        rule = "has no rule for learning rates that scale with the model's width (parametrization 'mup')"
        fix = f"use {' or '.join(_SIZED_BY_RATE)}, or parametrization 'standard'"
        raise invalid("optimizer.name", "parametrization", config.name, rule, fix)
    return scales


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, *, rounds: bool = False
) -> list[dict[str, Any]]:
    """Torch's parameter groups over the trainable parameters, with names, for any torch optimizer.

        optimizer = torch.optim.SGD(parameter_groups(model, config), lr=config.lr)

    Without a group of the configuration matrices and embeddings decay by `config.weight_decay`, and vectors, norms,
    biases and stacks of them do not (see `forge_core.kinds`). A group of its own becomes one of torch's, or two where it names no decay;
    they have the keys "group", its name, and "lr_multiplier". Where the model scales rates (`lr_scales`) there is
    one for each factor, with the key "lr_scale". Raises ValueError as `match_groups` and `lr_scales`, for
    a model without a trainable parameter, and for parameters that are not fp32, nor bf16 for an optimizer that
    `rounds` its updates stochastically.
    """
    parameters, scales = trainable(model, rounds=rounds), lr_scales(model, config)
    owners, kinds = match_groups(model, config.groups), parameter_kinds(model)
    others = {n: p for n, p in parameters.items() if n not in owners}
    found = _by_decay(others, kinds, config.weight_decay)
    for group, own in config.groups.items():
        members = {n: p for n, p in parameters.items() if owners.get(n) == group}
        if own.weight_decay is None:
            rows = _by_decay(members, kinds, config.weight_decay)
        else:
            rows = [{"params": list(members.items()), "weight_decay": own.weight_decay}]
        marks = {"group": group, "lr_multiplier": own.lr_multiplier}
        found += [{**row, **marks} for row in rows]
    if scales:
        found = [part for row in found for part in _by_scale(row, scales)]
    return [group for group in found if group["params"]]


def set_multipliers(optimizer: Any, multipliers: Mapping[str, float]) -> None:
    """Give groups other learning rates from the next step on; 0 freezes a group, more than 0 trains it.

        set_multipliers(optimizer, {"vision": 0.0, "head": 1.0})    # between steps; then set_lr
        set_multipliers(optimizer, {"vision": 0.1})                 # later: train it too

    Frozen parameters get `requires_grad` False and lose their gradient, so nothing is computed, sent, counted
    in the norm or decayed, and their state stays as it is. Trained again they go on with the moments and the
    step count that they had: zeros and 0 if they never were trained, so AdamW corrects the bias of their
    first steps as at the start of a run. Groups that are not named here, or not in this optimizer (on a rank
    of a pipeline), are left alone. Under FSDP2 call `forge_parallel.follow_requires_grad(model)` next.
    """
    for group in optimizer.param_groups:
        multiplier = multipliers.get(group.get("group"))
        if multiplier is None:
            continue
        group["lr_multiplier"] = multiplier
        for parameter in group["params"]:
            parameter.requires_grad_(multiplier != 0.0)
            if multiplier == 0.0:
                parameter.grad = None


def take_part(
    optimizer: Any, model: nn.Module, config: OptimizerConfig, settings: Collection[str] = ()
) -> None:
    """Start the groups of an optimizer that was just built; ValueError if it does not keep them apart.

    A torch optimizer that loads torch's form of state goes on with the groups and factors of `config`, not with those
    of the state, and so with its `settings`: keys of `param_groups`.
    """
    owners = match_groups(model, config.groups)
    if owners:
        _check_groups(optimizer, model, config.name, owners)
        set_multipliers(optimizer, {name: own.lr_multiplier for name, own in config.groups.items()})
    if isinstance(optimizer, torch.optim.Optimizer):
        moved = stacked_vectors(model)
        kept = partial(_keep_settings, keys=frozenset(settings), moved=moved)
        optimizer.register_load_state_dict_pre_hook(kept)
        if owners:
            set_group_lrs(optimizer, config.lr)


def _check_groups(
    optimizer: Any, model: nn.Module, built_by: str, owners: Mapping[str, str]
) -> None:
    """ValueError if a parameter is not in a row of `param_groups` that has the name of its group."""
    rows = [row for row in getattr(optimizer, "param_groups", ()) if isinstance(row, dict)]
    group_of = {p: row.get("group") for row in rows for p in row["params"]}
    lost = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and name in owners and group_of.get(p) != owners[name]
    ]
    if lost:
        built = f"{built_by!r} built a {type(optimizer).__name__}"
        rule = f"must be a group of the optimizer: {built} whose param_groups do not hold {lost[0]} there"
        fix = "build it over parameter_groups(model, config), or remove optimizer.groups"
        raise invalid(f"optimizer.groups.{owners[lost[0]]}", "param_groups", ..., rule, fix)


#: Keys by which a row of `param_groups` is a group of the configuration, has a factor of its rate, or is rounded.
_MARKS = ("group", "lr_multiplier", "lr_scale", "state_dtype", "rounding_seed")


def _keep_settings(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keys: Collection[str],
    moved: Collection[str],
) -> dict[str, Any]:
    """A state to load with the marks and settings of this optimizer: torch would take the saved ones.

    Parameters `moved` were in other groups in a version before.
    """
    saved = _regrouped(state["param_groups"], optimizer.param_groups, moved)
    if len(saved) != len(optimizer.param_groups):
        return state  # torch refuses it
    rows = []
    for old, mine in zip(saved, optimizer.param_groups):
        unmarked = {key: value for key, value in old.items() if key not in _MARKS}
        rows.append({**unmarked, **{key: mine[key] for key in (*_MARKS, *keys) if key in mine}})
    return {**state, "param_groups": rows}


#: Keys of a group that say what its parameters are.
_OF_MEMBERS = ("params", "param_names", "weight_decay", "muon")


def _regrouped(
    saved: list[dict[str, Any]], groups: list[dict[str, Any]], moved: Collection[str]
) -> list[dict[str, Any]]:
    """Saved groups with the members of `groups`, by name, if only the parameters `moved` are in others (F146)."""
    ids = {n: i for row in saved for n, i in zip(row.get("param_names") or (), row["params"])}
    partitions = [
        [
            left
            for row in rows
            if (left := [n for n in row.get("param_names") or () if n not in moved])
        ]
        for rows in (saved, groups)
    ]
    if not moved or not ids.keys() >= {*moved} or partitions[0] != partitions[1]:
        return saved  # torch compares them
    shared = {k: v for k, v in saved[0].items() if all(k in row and row[k] == v for row in saved)}
    kept = {k: v for k, v in shared.items() if k not in _OF_MEMBERS}
    return [{**g, **kept, "params": [ids[n] for n in g["param_names"]]} for g in groups]


def _by_decay(
    parameters: Mapping[str, nn.Parameter],
    kinds: Mapping[str, ParameterKind],
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Matrices decay; vectors, norms, biases and stacks of them do not."""
    decayed = [(name, p) for name, p in parameters.items() if is_matrix(kinds[name])]
    plain = [(name, p) for name, p in parameters.items() if not is_matrix(kinds[name])]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def _by_scale(row: Mapping[str, Any], scales: Mapping[str, float]) -> list[dict[str, Any]]:
    """A group in parts whose rates have one factor each."""
    parts: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in row["params"]:
        parts.setdefault(scales.get(name, 1.0), []).append((name, parameter))
    return [{**row, "params": members, "lr_scale": scale} for scale, members in parts.items()]


def _fits(name: str, group: OptimizerGroupConfig) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in group.patterns)


def _nearest(pattern: str, names: list[str]) -> list[str]:
    """Names like a pattern, one of each kind of layer."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), name)
    return [kinds[kind] for kind in difflib.get_close_matches(pattern, kinds, n=3, cutoff=0.0)]
