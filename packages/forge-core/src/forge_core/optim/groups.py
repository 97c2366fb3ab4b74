"""Parameters of a model and of any torch optimizer by name, their groups, learning rates, and freezing them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_core._shared.names import match_names, nearest_names
from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core.kinds import ParameterKind, is_matrix, parameter_kinds, stacked_vectors
from forge_core.optim.config import OptimizerConfig, OptimizerGroupConfig

#: A member of a list of layers in a parameter's name: a number, or a cross-attention block before one.
_BLOCK = re.compile(r"(^|\.)(cross_)?\d+\.")


def trainable_parameters(model: nn.Module, *, rounds: bool = False) -> dict[str, nn.Parameter]:
    """Return the parameters to train by name; a tied one counts once, under its first name.

    Raises ValueError without any, and for one that is neither fp32 nor, for an optimizer that `rounds` its updates
    stochastically, bf16.
    """
    allowed = (torch.float32, *([torch.bfloat16] if rounds else []))
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        rule = "is set for every parameter, and an optimizer needs one to train"
        raise invalid("requires_grad", "frozen", False, rule, "leave it True on some")
    for name, parameter in parameters.items():
        if parameter.dtype not in allowed:
            raise invalid_dtype(name, parameter.dtype)
    return parameters


def invalid_dtype(name: str, dtype: torch.dtype) -> ValueError:
    """The error for weights in a dtype in which an optimizer would lose small steps."""
    rule = "must be fp32, as a plain update in another dtype loses small steps"
    fix = "keep the model in fp32 and let the forward compute in bf16, or train weights in bf16 with adamw, lion or muon, which round updates stochastically"
    return invalid(name, "dtype", dtype, rule, fix, where="parameter")


def named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters of an optimizer by name; ValueError if its groups have no `param_names`."""
    groups = optimizer.param_groups
    if any("param_names" not in group for group in groups):
        rule = "must be in every group, and the optimizer was built over parameters without names"
        fix = "build it over model.named_parameters() or param_groups(model)"
        raise invalid("param_names", "missing", ..., rule, fix, where="optimizer")
    return {n: p for group in groups for n, p in zip(group["param_names"], group["params"])}


def set_lr(optimizer: Any, lr: float) -> None:
    """Set the learning rate of the next step, in each group.

    A group with an "lr_multiplier" or an "lr_scale" (timm's name) gets `lr` times both. An optimizer that defines a
    method `set_lr` gets `lr` through that.
    """
    own = getattr(optimizer, "set_lr", None)
    if own is not None:
        own(lr)
    else:
        set_group_lrs(optimizer.param_groups, lr)


def set_group_lrs(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Set the rates of a torch optimizer's groups as `set_lr`; a rate that is a tensor is filled."""
    for group in groups:
        rate = lr * group.get("lr_multiplier", 1.0) * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def match_groups(model: nn.Module, groups: Mapping[str, OptimizerGroupConfig]) -> dict[str, str]:
    """Return {parameter name: group} of every parameter that a group's patterns match.

        match_groups(model, {"head": OptimizerGroupConfig(("lm_head.*",))}) == {"lm_head.weight": "head"}

    A tied parameter has several names; a pattern that matches one of them counts for all. Raises one ValueError that
    lists every parameter that two groups match, and every pattern that matches nothing.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)

    found: dict[str, str] = {}
    problems: list[Problem] = []
    for aliases in names.values():
        owners = [group for group, own in groups.items() if match_names(own.patterns, aliases)]
        if len(owners) > 1:
            listed = " and ".join(f"optimizer.groups.{owner}" for owner in owners)
            rule = f"must be in one group at most, and patterns of {listed} match it"
            fix = "make one of them narrower"
            problems.append(Problem("optimizer.groups", "duplicate", aliases[0], rule, fix))
        found.update(dict.fromkeys(aliases, owners[0]) if owners else {})

    known = [name for aliases in names.values() for name in aliases]
    for group, config in groups.items():
        for pattern in (p for p in config.patterns if not match_names([p], known)):
            key = f"optimizer.groups.{group}.patterns"
            rule = "must match a parameter of the model, and matches none"
            near = ", ".join(nearest_names(pattern, known)) or "none: it has no parameter"
            fix = f"the nearest names are {near}"
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
    """Return the groups and patterns that match a submodule whose parameters have the names of the full model.

    `build_optimizer(stage, replace(config, groups=groups_of_part(stage, config)))` on a rank of a pipeline, after
    `match_groups` on the full model, which raises for patterns that match nothing anywhere.
    """
    names = [name for name, _ in part.named_parameters(remove_duplicate=False)]
    found = {}
    for group, own in config.groups.items():
        patterns = tuple(p for p in own.patterns if match_names([p], names))
        if patterns:
            found[group] = replace(own, patterns=patterns)
    return found


#: Optimizers whose update of an element is of the size of the learning rate, whatever the gradient: the rule of `lr_scales`.
_SIZED_BY_RATE = ("adamw", "lion", "schedule_free_adamw")


def lr_scales(model: nn.Module, config: OptimizerConfig) -> Mapping[str, float]:
    """Return {parameter: factor of its learning rate} of a model's parametrization (`model.lr_scales()`), if it has one.

    Raises ValueError for an optimizer to whose update the rule does not apply.
    """
    scales: dict[str, float] = {}
    for prefix, module in model.named_modules():  # the model itself, or one inside of a wrapper
        if hasattr(type(module), "lr_scales"):
            own: Mapping[str, float] = module.lr_scales()
            scales |= {f"{prefix}.{n}" if prefix else n: scale for n, scale in own.items()}
    if scales and config.name not in _SIZED_BY_RATE:
        rule = "has no rule for learning rates that scale with the model's width (parametrization 'mup')"
        fix = f"use {' or '.join(_SIZED_BY_RATE)}, or parametrization 'standard'"
        raise invalid("optimizer.name", "parametrization", config.name, rule, fix)
    return scales


def param_groups(
    model: nn.Module,
    config: OptimizerConfig | None = None,
    *,
    weight_decay: float | None = None,
    groups: Mapping[str, OptimizerGroupConfig] | None = None,
    muon: bool | None = None,
    rounds: bool = True,
) -> list[dict[str, Any]]:
    """Return torch's parameter groups over the trainable parameters of a model, with names, for any torch optimizer.

        optimizer = AdamW(param_groups(model, weight_decay=0.1), lr=3e-4)
        heads = OptimizerGroupConfig(("*.embedding.*", "lm_head.*"), lr_multiplier=0.1)
        optimizer = Muon(param_groups(model, groups={"heads": heads}, muon=True), lr=3e-4)

    Args:
        config: has weight_decay and groups; by default those of `OptimizerConfig`, 0.1 and none.
        weight_decay: in place of `config.weight_decay`. Without groups, matrices and embeddings decay by it, and vectors,
            norms, biases and stacks of them do not (see `forge_core.kinds`).
        groups: in place of `config.groups`, {name: parameters by patterns}. Each is one of torch's groups, or two if it
            sets no decay, with the keys "group" (its name) and "lr_multiplier".
        muon: whether groups are split into those of `hidden_matrices`, with the key "muon" True, and others, False, for
            `Muon` (default: whether `config.name` is "muon").
        rounds: whether the optimizer rounds updates of bf16 weights stochastically, as those of Forge do; False raises
            for such weights.

    A model that scales learning rates (`lr_scales`) has one group for each factor, with the key "lr_scale". Forge's
    optimizers apply "lr_multiplier" and "lr_scale" themselves; for others call `set_lr(optimizer, lr)` once.

    Raises ValueError as `match_groups`, `lr_scales` and `trainable_parameters`.
    """
    if config is None:
        config = OptimizerConfig("muon" if muon else "adamw")
    given: dict[str, Any] = {"weight_decay": weight_decay, "groups": groups}
    config = replace(config, **{key: value for key, value in given.items() if value is not None})

    parameters, scales = trainable_parameters(model, rounds=rounds), lr_scales(model, config)
    owners, kinds = match_groups(model, config.groups), parameter_kinds(model)
    others = {n: p for n, p in parameters.items() if n not in owners}
    found = _by_decay(others, kinds, config.weight_decay)

    for group, own in config.groups.items():
        members = {n: p for n, p in parameters.items() if owners.get(n) == group}
        if own.weight_decay is None:
            entries = _by_decay(members, kinds, config.weight_decay)
        else:
            entries = [{"params": list(members.items()), "weight_decay": own.weight_decay}]
        marks = {"group": group, "lr_multiplier": own.lr_multiplier}
        found += [{**entry, **marks} for entry in entries]

    if scales:
        found = [group for own in found for group in _by_scale(own, scales)]
    if config.name == "muon" if muon is None else muon:
        names = hidden_matrices(model, config)
        found = [group for own in found for group in _by_optimizer(own, names)]
    return [group for group in found if group["params"]]


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, *, rounds: bool = False
) -> list[dict[str, Any]]:
    """Old name of `param_groups`, until 0.3.0."""
    warnings.warn("parameter_groups is param_groups now", DeprecationWarning, stacklevel=2)
    return param_groups(model, config, muon=False, rounds=rounds)


def hidden_matrices(model: nn.Module, config: OptimizerConfig) -> set[str]:
    """Return the names of the parameters that Muon updates.

    They are matrices (R, C) and stacks of matrices (E, R, C), by `parameter_kinds`, below a member of a list of modules:
    a part of the name is a number, or `cross_` and a number (forge_vlm's cross-attention blocks). AdamW updates the
    embedding and head of a model, which are outside of its blocks, vectors, norms, biases and convolutions. `muon` of a
    group overrides this for its matrices, embeddings included. Raises ValueError if there is no matrix, frozen or not.
    """
    owners, kinds = match_groups(model, config.groups), parameter_kinds(model)
    found, matrices = set(), False
    for name, parameter in model.named_parameters():
        group = config.groups.get(owners.get(name, ""))
        chosen = None if group is None else group.muon
        hidden = in_block(name) and kinds[name] in ("matrix", "stacked_matrix")
        if parameter.ndim in (2, 3) and is_matrix(kinds[name]):
            matrices |= hidden or chosen is not None
            if hidden if chosen is None else chosen:
                found.add(name)

    if not matrices:
        rule = "must have a matrix below a block (layers.0.weight), and the model has none"
        fix = "name some in a group: [optimizer.groups.hidden] with patterns and muon = true, or use adamw"
        raise invalid("optimizer.name", "no_matrix", "muon", rule, fix)
    return found


def in_block(name: str) -> bool:
    """Whether a parameter is below a member of a list of modules, or a cross-attention block before one."""
    return _BLOCK.search(name) is not None


def set_multipliers(optimizer: Any, multipliers: Mapping[str, float]) -> None:
    """Set the factors of groups' learning rates from the next step on; 0 freezes a group, more than 0 trains it.

        set_multipliers(optimizer, {"vision": 0.0, "head": 1.0})    # between steps; then set_lr
        set_multipliers(optimizer, {"vision": 0.1})                 # later: train it too

    Frozen parameters get `requires_grad` False and lose their gradient, so nothing is computed, sent, counted in the
    norm or decayed, and their state stays as it is. Trained again, they continue with their moments and step count; if
    they never were trained these are 0, so AdamW corrects the bias of their first steps as at the start of a run. Groups
    that are not named here, or not in this optimizer (on a rank of a pipeline), do not change. Under FSDP2 call
    `forge_parallel.follow_requires_grad(model)` next.
    """
    for group in optimizer.param_groups:
        multiplier = multipliers.get(group.get("group"))
        if multiplier is None:
            continue
        group["lr_multiplier"] = multiplier
        freeze_by_multiplier(group)


def freeze_by_multiplier(group: Mapping[str, Any]) -> None:
    """Freeze the parameters of a group whose "lr_multiplier" is 0; train those of another."""
    multiplier = group["lr_multiplier"]
    for parameter in group["params"]:
        parameter.requires_grad_(multiplier != 0.0)
        if multiplier == 0.0:
            parameter.grad = None


def register_groups(
    optimizer: Any, model: nn.Module, config: OptimizerConfig, settings: Collection[str] = ()
) -> None:
    """Apply the groups of `config` to an optimizer that was just built; ValueError for a parameter that its `param_groups` have under another name than its group.

    Also register a hook: a torch optimizer that loads torch's form of state keeps the groups and factors of `config`,
    and its `settings` (keys of `param_groups`), where torch would take those of the state.
    """
    # an optimizer of another package may have its own groups: freezing and multipliers need these
    owners = match_groups(model, config.groups)
    if owners:
        _check_groups(optimizer, model, config.name, owners)
        set_multipliers(optimizer, {name: own.lr_multiplier for name, own in config.groups.items()})
    if isinstance(optimizer, torch.optim.Optimizer):
        moved = stacked_vectors(model)
        keep = partial(keep_settings, keys=frozenset(settings), moved=moved)
        optimizer.register_load_state_dict_pre_hook(keep)
        if owners:
            set_group_lrs(optimizer.param_groups, config.lr)


def _check_groups(
    optimizer: Any, model: nn.Module, built_by: str, owners: Mapping[str, str]
) -> None:
    """ValueError if a parameter is not in an entry of `param_groups` that has the name of its group."""
    entries = [e for e in getattr(optimizer, "param_groups", ()) if isinstance(e, dict)]
    group_of = {p: entry.get("group") for entry in entries for p in entry["params"]}
    lost = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and name in owners and group_of.get(p) != owners[name]
    ]
    if lost:
        built = f"{built_by!r} built a {type(optimizer).__name__}"
        rule = f"must be a group of the optimizer: {built} whose param_groups do not hold {lost[0]} there"
        fix = "build it over param_groups(model, config), or remove optimizer.groups"
        raise invalid(f"optimizer.groups.{owners[lost[0]]}", "param_groups", ..., rule, fix)


#: Keys of `param_groups` for groups of the configuration, factors of learning rates, and stochastic rounding.
_MARKS = ("group", "lr_multiplier", "lr_scale", "state_dtype", "rounding_seed")


def keep_settings(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keys: Collection[str],
    moved: Collection[str],
) -> dict[str, Any]:
    """Return the state to load with the `_MARKS` and settings of this optimizer, where torch would take the saved ones.

    Parameters `moved` were in other groups in an earlier version.
    """
    saved = _regrouped(state["param_groups"], optimizer.param_groups, moved)
    if len(saved) != len(optimizer.param_groups):
        return state  # torch raises ValueError
    kept = []
    for old, mine in zip(saved, optimizer.param_groups):
        unmarked = {key: value for key, value in old.items() if key not in _MARKS}
        kept.append({**unmarked, **{key: mine[key] for key in (*_MARKS, *keys) if key in mine}})
    return {**state, "param_groups": kept}


#: Keys of a group that depend on its parameters.
_OF_MEMBERS = ("params", "param_names", "weight_decay", "muon")


def _regrouped(
    saved: list[dict[str, Any]], groups: list[dict[str, Any]], moved: Collection[str]
) -> list[dict[str, Any]]:
    """Saved groups, with the members of `groups` by name where only the parameters `moved` changed their group (F146)."""
    ids = {n: i for g in saved for n, i in zip(g.get("param_names") or (), g["params"])}
    unmoved = [
        [
            left
            for group in either
            if (left := [n for n in group.get("param_names") or () if n not in moved])
        ]
        for either in (saved, groups)
    ]
    if not moved or not ids.keys() >= {*moved} or unmoved[0] != unmoved[1]:
        return saved  # torch compares them

    # settings that all saved groups share also hold for the groups of today
    shared = {k: v for k, v in saved[0].items() if all(k in g and g[k] == v for g in saved)}
    kept = {k: v for k, v in shared.items() if k not in _OF_MEMBERS}
    return [{**g, **kept, "params": [ids[n] for n in g["param_names"]]} for g in groups]


def _by_decay(
    parameters: Mapping[str, nn.Parameter],
    kinds: Mapping[str, ParameterKind],
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and vectors, norms, biases and stacks of them, which do not."""
    decayed = [(name, p) for name, p in parameters.items() if is_matrix(kinds[name])]
    plain = [(name, p) for name, p in parameters.items() if not is_matrix(kinds[name])]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def _by_optimizer(group: Mapping[str, Any], names: Collection[str]) -> list[dict[str, Any]]:
    """Split a group into the parameters of Muon, which have `names`, and those of AdamW."""
    hidden = [(name, p) for name, p in group["params"] if name in names]
    others = [(name, p) for name, p in group["params"] if name not in names]
    return [{**group, "params": hidden, "muon": True}, {**group, "params": others, "muon": False}]


def _by_scale(group: Mapping[str, Any], scales: Mapping[str, float]) -> list[dict[str, Any]]:
    """Split a group by the factor of the learning rate."""
    of_scale: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in group["params"]:
        of_scale.setdefault(scales.get(name, 1.0), []).append((name, parameter))
    return [{**group, "params": members, "lr_scale": scale} for scale, members in of_scale.items()]
