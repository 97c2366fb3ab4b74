"""Match a table {pattern of parameter names: role} to a model, or make one from a Hugging Face model's plan.

colwise             a linear layer sharded by outputs
rowwise             a linear layer sharded by inputs
shared_heads        colwise by heads; more ranks than heads replicate it, and each computes one head
sharded_logits      a colwise layer whose outputs are logits; each rank keeps its shard
gather_output       the same, but outputs are gathered except in training
vocab               an embedding sharded by ids
sequence            a norm that may see a shard of the tokens
by_heads            parameters with a number for each head, or output, of a colwise layer next to them
norm_over_heads     an RMS norm over all outputs of a colwise layer, which has `mean_over_ranks` (see check_model.py)
replicate_sum_grad  a replica on each rank, which sees other heads or tokens; gradients are summed
enter               a module without parameters, whose output the heads of all ranks read: all tokens
opaque              a module that must see all tokens
expert              a stack of experts; its parent sees disjoint tokens

A linear layer may hold an adapter of low rank R (LoRA) as parameters `lora_a` (R, in) and `lora_b` (out, R), which
are sharded as its role needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from forge_parallel._shared.problems import Problem, invalid, raise_problems

ROLES = (
    "colwise",
    "shared_heads",
    "rowwise",
    "vocab",
    "sequence",
    "by_heads",
    "norm_over_heads",
    "replicate_sum_grad",
    "sharded_logits",
    "gather_output",
    "enter",
    "expert",
    "opaque",
)
HEADS = ("sharded_logits", "gather_output")
BY_ROWS = ("colwise", "vocab", "by_heads", "norm_over_heads", *HEADS)
LINEAR = ("colwise", "rowwise", *HEADS)
#: Parameters of a linear layer: its own, and those of an adapter.
LOW_RANK = ("lora_a", "lora_b")
OF_LINEAR = {"weight", "bias", *LOW_RANK}
_WITHOUT_PARAMETERS = (*HEADS, "sequence", "replicate_sum_grad", "enter", "opaque")


def sharded_factor(role: str) -> str:
    """The matrix of an adapter that is sharded in a layer of this role; the other is replicated."""
    return "lora_b" if role in BY_ROWS else "lora_a"


class Role(NamedTuple):
    """A role. The sharded dim on a rank must be a multiple of `multiple_of` (width of a head). With `shared`
    there may be more ranks than heads, and several ranks replicate one."""

    name: str
    multiple_of: int = 1
    shared: bool = False


class Matched(NamedTuple):
    """Modules by name: `leaves` with their role, `opaque` regions, `experts` and `routed`, their parents; and
    the role of each parameter under each of its names."""

    leaves: Mapping[str, Role] = {}
    opaque: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    routed: tuple[str, ...] = ()
    parameters: Mapping[str, str] = {}

    @property
    def expert_parameters(self) -> list[str]:
        """Names of the parameters with the role `expert`."""
        return [name for name, role in self.parameters.items() if role == "expert"]

    def within(self, stage: nn.Module) -> Matched:
        """The entries of modules and parameters in a stage of the model."""
        names = {name for name, _ in stage.named_modules(remove_duplicate=False)}
        opaque, experts, routed = (tuple(n for n in some if n in names) for some in self[1:4])
        leaves = {name: role for name, role in self.leaves.items() if name in names}
        parameters = {n: r for n, r in self.parameters.items() if n.rpartition(".")[0] in names}
        return Matched(leaves, opaque, experts, routed, parameters)

    def is_routed(self, name: str) -> bool:
        """Whether a module is in a region of disjoint tokens."""
        return any(_within(name, region) for region in self.routed)

    def is_expert(self, name: str) -> bool:
        """Whether a parameter belongs to experts."""
        return any(_within(name, region) for region in self.experts)


def find_roles(
    model: nn.Module, roles: Mapping[str, Any] | None = None, *, sharded: bool = True
) -> Matched:
    """The roles of `model` by the table `roles` or its own (`table_of`). Match once and pass the result on.

    Raises ValueError as `match_roles`, and for a model without a table. With `sharded` False (no tp) the model's own
    table may be incomplete, missing, or in another form.
    """
    if not sharded:
        try:
            return _resolve(*_match(model, table_of(model, roles))[:2])[0]
        except ValueError:
            if roles is not None:  # an error of the caller's own table is raised in any case
                raise
            return Matched()
    table = table_of(model, roles)
    if not table:
        rule = f"must be given for the parameters of {type(model).__name__}"
        fix = "give it a method parallel_roles(), or pass roles"
        raise invalid("roles", "missing", ..., rule, fix)
    return match_roles(model, table, strict=roles is not None)


def match_roles(model: nn.Module, table: Mapping[str, Any], *, strict: bool = False) -> Matched:
    """The role of every module of `model` that a table names; nothing is changed.

        matched = match_roles(model, {"*.q_proj.*": "colwise", "*.o_proj.*": "rowwise", ...})

    Keys are patterns of parameter names as in fnmatch, or of the names of modules without parameters;
    values a role, a `Role`, or {"role": ..., "multiple_of": ...}. Raises one ValueError that lists every
    parameter without a row or with two, and unknown roles; with `strict` also rows that fit nothing.
    """
    found, rows, problems = _match(model, table, strict)
    raise_problems("", merge_layers(problems))
    matched, problems = _resolve(found, rows)
    raise_problems("", merge_layers(problems))
    return matched


def _match(
    model: nn.Module, table: Mapping[str, Any], strict: bool = False
) -> tuple[dict[str, str], dict[str, Role], list[Problem]]:
    """(the one row that each name matches, all rows, problems)."""
    rows = {pattern: _role(pattern, value) for pattern, value in table.items()}
    patterns = [pattern for pattern in rows if any(sign in pattern for sign in "*?[")]
    found: dict[str, str] = {}  # name: pattern
    problems: list[Problem] = []
    used: set[str] = set()

    for name, _ in model.named_parameters(remove_duplicate=False):
        fits = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        fits += [name] * (name in rows)
        used.update(fits)
        if len(fits) == 1:
            found[name] = fits[0]
        elif fits:
            listed = " and ".join(repr(pattern) for pattern in fits)
            rule = f"must match one row, and {listed} do"
            problems.append(Problem(name, "rows", ..., rule, "make one narrower"))
        else:
            fix = f"add one with a role of {', '.join(ROLES)}"
            problems.append(Problem(name, "no_row", ..., "must have a role, and has none", fix))

    # patterns that match no parameter may name modules without parameters
    bare = [n for n, m in model.named_modules() if n and not any(True for _ in m.parameters())]
    for pattern in [pattern for pattern in rows if pattern not in used]:
        named = [name for name in bare if fnmatchcase(name, pattern)]
        found |= {f"{name}.": pattern for name in named}
        role = rows[pattern].name
        if named and role not in _WITHOUT_PARAMETERS:
            rule = "is a role of modules with parameters, and it has none"
            problems.append(Problem(named[0], "parameters", role, rule))
        if strict and not named:
            rule = "is a row that matches no parameter"
            problems.append(Problem(pattern, "not_found", ..., rule, "remove or correct it"))
    return found, rows, problems


def table_of(model: Any, roles: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """`roles`, or `model.parallel_roles()`, or the plan of a Hugging Face model, or an empty table."""
    if roles is not None:
        return roles
    if hasattr(model, "parallel_roles"):
        table: Mapping[str, Any] = model.parallel_roles()
        return table
    return roles_of_plan(model) if has_plan(model) else {}


def _role(pattern: str, value: Any) -> Role:
    """The role that a value of a table means; ValueError for an unknown one."""
    if isinstance(value, Mapping):
        unknown = set(value) - {"role", "multiple_of"}
        if unknown or "role" not in value:
            rule = "must have the key role, and may have multiple_of"
            raise invalid(pattern, "keys", dict(value), rule)
        role = Role(value["role"], value.get("multiple_of", 1))
    else:
        if not isinstance(value, str | tuple | list):
            rule = "must be a role's name, or a table with the key role"
            raise invalid(pattern, "type", value, rule)
        role = Role(value) if isinstance(value, str) else Role(*value)

    if role.name == "shared_heads":
        role = Role("colwise", role.multiple_of, shared=True)
    if role.name not in ROLES:
        raise invalid(pattern, "unknown", role.name, "is no role", f"use {', '.join(ROLES)}")
    if role.multiple_of < 1:
        key = f"{pattern}.multiple_of"
        raise invalid(key, "range", role.multiple_of, "must be at least 1", "use 1")
    return role


def _resolve(found: Mapping[str, str], rows: Mapping[str, Role]) -> tuple[Matched, list[Problem]]:
    """Modules by role, from the rows of their parameters, and problems: roles that contradict each other."""
    leaves: dict[str, Role] = {}
    opaque: dict[str, None] = {}
    experts: dict[str, None] = {}
    problems = []
    for name, pattern in found.items():
        owner, role = name.rpartition(".")[0], rows[pattern]
        if role.name == "opaque":
            opaque[_named(name, pattern)] = None
        elif role.name == "expert":
            experts[_named(name, pattern)] = None
        elif leaves.setdefault(owner, role) != role:
            rule = f"must have one role for its parameters, and has {leaves[owner].name!r} and {role.name!r}"
            problems.append(Problem(owner, "roles", ..., rule, "name the module in one row"))

    # of nested opaque regions only the outermost counts
    opaque = {r: None for r in opaque if not any(r != o and _within(r, o) for o in opaque)}
    routed = dict.fromkeys(name.rpartition(".")[0] for name in experts)
    for region in opaque:
        inside = [n for n in (*leaves, *routed) if _within(n, region)]
        if region == "":
            rule = "must be the role of a module below the model"
            problems.append(Problem("opaque", "model", ..., rule, "write a row as 'mixer.*'"))
        elif inside:
            rule = f"is opaque, and {inside[0]} inside has a role"
            problems.append(Problem(region, "nested", ..., rule, "use one of them"))
        elif any(_within(region, r) for r in routed):
            rule = "is opaque and must not stand among experts, where ranks have different tokens"
            problems.append(Problem(region, "experts", ..., rule, "use replicate_sum_grad"))

    parameters = {n: rows[p].name for n, p in found.items() if not n.endswith(".")}
    return Matched(leaves, tuple(opaque), tuple(experts), tuple(routed), parameters), problems


def _named(parameter: str, pattern: str) -> str:
    """The outermost module that `module.*` names, else the parameter's owner."""
    parts = parameter.split(".")[:-1]
    if pattern.endswith(".*"):
        for depth in range(1, len(parts) + 1):
            if fnmatchcase(".".join(parts[:depth]), pattern[:-2]):
                return ".".join(parts[:depth])
    return ".".join(parts) if pattern != "*" else ""


def unit_of(model: nn.Module, name: str, role: Role, size: int) -> int:
    """The size on a rank must be a multiple of this: the role's multiple_of, or the parent's head_dim."""
    if role.multiple_of > 1:
        return role.multiple_of
    head: Any = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    return head if isinstance(head, int) and head > 0 and size % head == 0 else 1


def shared_head(model: nn.Module, name: str, role: Role, size: int) -> int:
    """Rows of the one head that a rank computes if `size` ranks share fewer heads; otherwise 0."""
    if not role.shared or (weight := getattr(model.get_submodule(name), "weight", None)) is None:
        return 0
    unit = unit_of(model, name, role, int(weight.size(0)))
    return unit if unit > 1 and int(weight.size(0)) // unit < size else 0


def _within(name: str, region: str) -> bool:
    """Whether a module is the region or inside of it."""
    return region in ("", name) or name.startswith(f"{region}.")


#: transformers' styles that are one of the roles; others raise ValueError.
STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "gather_output",
    "colwise_rep": "gather_output",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "replicate_sum_grad",
    "sequence": "sequence",
}


def has_plan(model: Any) -> bool:
    """Whether a model has a tensor-parallel plan (transformers 4.51 to 5.23)."""
    return bool(
        getattr(model, "_tp_plan", None)
        or getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    )


def roles_of_plan(model: nn.Module, plan: Mapping[str, Any] | None = None) -> dict[str, str]:
    """{name of a parameter: role} of `model`, from its config's `base_model_tp_plan` and its `_tp_plan`, or from `plan`.

        tensor_parallel(model, mesh, roles=roles_of_plan(model))    # its default for such a model

    Embeddings without a row are sharded by ids, other modules without one are replicated. A replicated module is
    right on the full residual stream only, so one next to colwise layers (a norm of heads) raises ValueError, as do
    unknown styles. Values of `plan` may be styles of torch.distributed.tensor.parallel.
    """
    named = _tp_plan_of(model) if plan is None else {}
    for pattern, style in (plan or {}).items():
        named[pattern] = style if isinstance(style, str) else _name_of_style(pattern, style)
        if plan and not any(fnmatchcase(name, pattern) for name, _ in model.named_modules()):
            rule, fix = "matches no module", "correct or remove it"
            raise invalid(pattern, "not_found", ..., rule, fix, where="plan")

    found: dict[str, str] = {}
    colwise_parents = set()
    problems: list[Problem] = []
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        styles = {s for p, s in named.items() if fnmatchcase(owner, p) or fnmatchcase(name, p)}
        unknown = styles - set(STYLES)
        if unknown or len(styles) > 1:
            listed = ", ".join(sorted(styles))
            rule = f"must be a tp style: one of {', '.join(STYLES)}"
            problems.append(Problem(owner, "style", listed, rule, "pass roles for this model"))

        elif styles:
            found[name] = STYLES[styles.pop()]
            if found[name] == "colwise":
                colwise_parents.add(owner.rpartition(".")[0])

    # modules without a style: replicated is wrong next to layers whose heads are sharded
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        if name in found or any(problem.key == owner for problem in problems):
            continue
        if owner.rpartition(".")[0] in colwise_parents:
            rule = "has no tp style and must have one next to colwise layers, where ranks have different heads"
            problems.append(Problem(owner, "missing", ..., rule, "pass roles for this model"))
        module = model.get_submodule(owner)
        ids = isinstance(module, nn.Embedding) and _looks_up_ids(model, module)
        found[name] = "vocab" if ids else "opaque"
    raise_problems("", merge_layers(dict.fromkeys(problems)))
    return found


def _name_of_style(pattern: str, style: Any) -> str:
    """The name of one of torch's styles; ValueError for another, and for layouts, which follow from the config."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    names: dict[type[Any], str] = {
        ColwiseParallel: "colwise",
        RowwiseParallel: "rowwise",
        SequenceParallel: "sequence",
    }
    if type(style) not in names:
        rule = f"must be ColwiseParallel, RowwiseParallel, SequenceParallel or one of {', '.join(STYLES)}"
        raise invalid(pattern, "style", type(style).__name__, rule, "remove it", where="plan")
    own = {key: str(value) for key, value in vars(style).items()}
    if own != {key: str(value) for key, value in vars(type(style)()).items()}:
        rule, fix = "must have no arguments: layouts follow from the config", "remove them"
        raise invalid(pattern, "layouts", type(style).__name__, rule, fix, where="plan")
    return names[type(style)]


def _looks_up_ids(model: Any, embedding: nn.Embedding) -> bool:
    """Whether it is the table of ids, not of positions."""
    get = getattr(model, "get_input_embeddings", None)
    return get is not None and get() is embedding


def _tp_plan_of(model: Any) -> dict[str, str]:
    """{pattern of module names: style}, with the names of this model: those of the config are relative to its base model."""
    config_rows = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    dot = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    rows = {dot + pattern: style for pattern, style in config_rows.items()}
    own = getattr(model, "_tp_plan", None) or {}
    return rows | {pattern: style for pattern, style in own.items() if pattern not in rows}


def merge_layers(problems: Iterable[Problem]) -> list[Problem]:
    """One problem for those that differ only in the number of the layer: the first of them, with a count."""
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(re.sub(r"\.\d+(?=\.)", ".*", str(problem)), []).append(problem)
    return [
        replace(first, fix=f"{first.fix} (and {len(others)} more like it)") if others else first
        for first, *others in alike.values()
    ]
