"""Match a table {pattern of parameter names: role} to a model, and check that it can be sharded over tp.

colwise             a linear layer sharded by outputs
rowwise             a linear layer sharded by inputs
shared_heads        colwise by heads; more ranks than heads hold a whole copy, and each computes one head
sharded_logits      a colwise layer whose outputs are logits; each rank keeps its part
gather_output       the same, but outputs are gathered except in training
vocab               an embedding sharded by ids
sequence            a norm that may see a part of the tokens
by_heads            parameters with a number for each head, or output, of a colwise layer beside them
norm_over_heads     an RMS norm over all outputs of a colwise layer, which has `mean_over_ranks` (see `_wrong_kind`)
replicate_sum_grad  a copy on each rank, which sees other heads or tokens; gradients are summed
enter               a module without parameters, whose output the heads of all ranks read: all tokens
opaque              a module that must see all tokens
expert              a stack of experts; its parent sees disjoint tokens

A linear layer may hold an adapter of low rank R (LoRA) as parameters `lora_a` (R, in) and `lora_b` (out, R), which
are sharded as its role needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from forge_parallel._problems import merge_layers
from forge_parallel._shared.problems import Problem, invalid, raise_problems
from forge_parallel.axes.hf_plan import has_plan, roles_of_plan
from forge_parallel.legal import ShardedDim, uneven_vocab, uneven_width, width_of

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
_LINEAR = ("colwise", "rowwise", *HEADS)
#: Parameters of a linear layer: its own, and those of an adapter.
LOW_RANK = ("lora_a", "lora_b")
_OF_LINEAR = {"weight", "bias", *LOW_RANK}
_WITHOUT_PARAMETERS = (*HEADS, "sequence", "replicate_sum_grad", "enter", "opaque")


def cut_factor(role: str) -> str:
    """The matrix of an adapter that is cut in a layer of this role; of the other each rank has all."""
    return "lora_b" if role in BY_ROWS else "lora_a"


class Role(NamedTuple):
    """A role. Each rank's part of the sharded dim must be a multiple of `multiple_of` (width of a head). With `shared`
    there may be more ranks than heads, and several ranks share one."""

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

    def within(self, part: nn.Module) -> Matched:
        """The entries of modules and parameters in `part`, a stage of the model."""
        names = {name for name, _ in part.named_modules(remove_duplicate=False)}
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
    model: nn.Module, roles: Mapping[str, Any] | None = None, *, cut: bool = True
) -> Matched:
    """The roles of `model` by the table `roles` or its own (`table_of`). Match once and pass the result on.

    Raises ValueError as `match_roles`, and for a model without a table. With `cut` False (no tp) the model's own
    table may be incomplete, missing, or in another form.
    """
    if not cut:
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


def check_cuts(model: nn.Module, matched: Matched, size: int) -> None:
    """One ValueError with all `cut_problems`."""
    raise_problems("", merge_layers(cut_problems(model, matched, size)))


def cut_problems(model: nn.Module, matched: Matched, size: int, shards: int = 1) -> list[Problem]:
    """Every linear layer and embedding that cannot be sharded over `size` ranks, and every dropout.

    Outputs (colwise) and inputs (rowwise) must be divisible, below a module with `head_dim` into whole heads; so
    fewer heads than ranks are refused unless the role shares them. A vocabulary may be uneven, but no rank empty,
    and its width must be divisible by FSDP2's `shards` if torch would compute wrong offsets for shards of ids
    (`legal.uneven_vocab`).
    """
    problems = [
        Problem(name, "sharded", ..., "is a DTensor already", "shard a model once, before FSDP")
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "device_mesh") and not matched.is_expert(name)
    ]
    problems += _tied_apart(model, matched) + dropout_problems(model)
    for name, role in matched.leaves.items():
        module: Any = model.get_submodule(name)
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if wrong := _wrong_kind(name, module, role.name):
            problems.append(wrong)
        elif role.name in ("colwise", "rowwise"):
            whole = module.weight.size(0 if role.name == "colwise" else 1)
            unit = _unit(model, name, role, whole)
            if wrong := uneven_width(_sharded_dim(name, role, whole, unit), size):
                problems.append(wrong)
        elif role.name in ("by_heads", "norm_over_heads"):
            for parameter, vector in module.named_parameters(recurse=False):
                whole = vector.size(0)
                unit = _unit(model, name, role, whole) if role.name == "norm_over_heads" else 1
                if wrong := uneven_width(
                    _sharded_dim(f"{name}.{parameter}", role, whole, unit), size
                ):
                    problems.append(wrong)
        elif role.name in ("vocab", *HEADS):
            whole = module.weight.size(0)
            for parameter, table in module.named_parameters(recurse=False):
                if parameter == "lora_a":  # a whole copy on each rank
                    continue
                here = name if parameter == "weight" else f"{name}.{parameter}"
                dim = ShardedDim(here, whole, width=width_of(table.shape), what="ids")
                if wrong := uneven_vocab(dim, size, shards):
                    problems.append(wrong)
                    break
            cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
            if role.name in HEADS and whole % size and cap is not None:
                rule = (
                    f"ids must be divisible by tp {size} under final_logit_softcapping {cap}, which would make logits of "
                    "the ids that fill up the last rank"
                )
                problems.append(Problem(name, "softcap", whole, rule, "pad the vocabulary"))
    return problems


def dropout_problems(model: nn.Module) -> list[Problem]:
    """Modules with dropout: tp ranks have the same seed and would drop the same positions of different heads."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        dot = f"{name}." if name else ""
        found |= {
            f"{dot}{k}": v for k, v in vars(module).items() if "dropout" in k or k.endswith("pdrop")
        }
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found[f"{dot}p"] = module.p
    # in a function that reads the model's config
    if not any(_drops(value) for value in found.values()):
        config = getattr(model, "config", None)
        names = ("attention_dropout", "attn_pdrop")
        found = {f"config.{name}": getattr(config, name, None) for name in names}
    rule = "must be 0 under tp, whose ranks would drop the same of different heads and tokens"
    fix = "set this dropout to 0, or use tp = 1"
    return [Problem(n, "dropout", value, rule, fix) for n, value in found.items() if _drops(value)]


def _drops(value: Any) -> bool:
    return isinstance(value, float) and value > 0.0


def _tied_apart(model: nn.Module, matched: Matched) -> list[Problem]:
    """Parameters with several names whose roles need different placements."""
    roles: dict[nn.Parameter, dict[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        role = matched.leaves.get(name.rpartition(".")[0])
        kind = "opaque" if role is None else role.name
        roles.setdefault(parameter, {})[name] = "by rows" if kind in BY_ROWS else kind
    problems = []
    for first, *others in (list(names.items()) for names in roles.values()):
        if len({first[1], *(kind for _, kind in others)}) > 1:
            names, kinds = zip(first, *others, strict=True)
            rule = f"and {' and '.join(names[1:])} are one parameter and must be sharded alike, not {' and '.join(kinds)}"
            fix = "give an embedding 'vocab' and its head 'sharded_logits'"
            problems.append(Problem(first[0], "tied", ..., rule, fix))
    return problems


def _role(pattern: str, value: Any) -> Role:
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


def _wrong_kind(name: str, module: Any, role: str) -> Problem | None:
    """Why a module cannot have its role, or None."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    shape = tuple(getattr(module.weight, "shape", ())) if "weight" in names else ()
    found = f"and it is {_say(module)}"
    if role in _LINEAR:
        want = (getattr(module, "out_features", None), getattr(module, "in_features", None))
        if shape != want or not names <= _OF_LINEAR:
            rule = f"must be the role of a linear layer, weight (out, in), {found}"
            return Problem(name, "linear", role, rule)
    if role == "norm_over_heads" and (len(shape) != 1 or not hasattr(module, "mean_over_ranks")):
        rule = (
            "must be the role of an RMS norm with a weight (D,) that takes the mean of squares from "
            f"`mean_over_ranks(sums)` where that is set, {found}"
        )
        return Problem(name, "norm", role, rule)
    if role == "enter":
        rule = f"must be the role of a module without parameters, {found}"
        return Problem(name, "enter", role, rule)
    if role == "vocab":
        if not isinstance(module, nn.Embedding):
            return Problem(name, "embedding", role, f"must be the role of an nn.Embedding, {found}")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            rule = "must be an embedding's role without max_norm, scale_grad_by_freq and sparse"
            return Problem(name, "options", role, rule, "unset it")
    return None


def _say(module: nn.Module) -> str:
    shapes = ", ".join(f"{n} {tuple(p.shape)}" for n, p in module.named_parameters(recurse=False))
    return f"{type(module).__name__} ({shapes})"


def _unit(model: nn.Module, name: str, role: Role, whole: int) -> int:
    """A rank's part must be a multiple of this: the row's multiple_of, or the parent's head_dim."""
    if role.multiple_of > 1:
        return role.multiple_of
    head: Any = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    return head if isinstance(head, int) and head > 0 and whole % head == 0 else 1


def shared_head(model: nn.Module, name: str, role: Role, size: int) -> int:
    """Rows of the one head that a rank computes if `size` ranks share fewer heads; otherwise 0."""
    if not role.shared or (weight := getattr(model.get_submodule(name), "weight", None)) is None:
        return 0
    unit = _unit(model, name, role, int(weight.size(0)))
    return unit if unit > 1 and int(weight.size(0)) // unit < size else 0


def _sharded_dim(name: str, role: Role, whole: int, unit: int) -> ShardedDim:
    what = "inputs" if role.name == "rowwise" else "outputs"
    what = what if unit == 1 else f"{what} ({whole // unit} heads of {unit})"
    return ShardedDim(name, whole, unit, role.shared and unit > 1, what=what)


def _within(name: str, region: str) -> bool:
    return region in ("", name) or name.startswith(f"{region}.")
