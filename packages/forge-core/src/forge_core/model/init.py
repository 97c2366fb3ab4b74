"""Initial weights: every parameter is a function of (seed, its name).

Layout, device, order of construction and other parameters do not matter, so initial weights are
the same whether a model was built plainly, on the meta device, or sharded over ranks.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from forge_core._renamed import renamed
from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core._shared.shards import local_tensor
from forge_core.kinds import declares_kinds, is_matrix, own_kinds, parameter_kinds
from forge_core.random_bits import fill_normal

_KNOWN = (nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm, nn.GroupNorm)


class Init(NamedTuple):
    """Initial value: normal with mean 0 and standard deviation `value`, constant `value`, or (buffers) a tensor."""

    kind: Literal["normal", "constant", "values"]
    value: Any


def linear_rows(name: str, linear: nn.Linear, std: float) -> dict[str, Init]:
    """Entries of an `init_table` for a linear layer: normal weight, zero bias."""
    rows = {f"{name}.weight": Init("normal", std)}
    if linear.bias is not None:
        rows[f"{name}.bias"] = Init("constant", 0.0)
    return rows


def initialize(
    model: nn.Module,
    seed: int,
    *,
    std: float | None = None,
    residual_std: float | None = None,
    strict: bool = True,
    by_kind: bool = True,
    whole: Collection[str] = (),
) -> None:
    """Fill every parameter of `model` in place from (seed, name).

    A module may have `init_table(std, residual_std) -> {local name: (kind, value)}` for parameters (and buffers) below
    it; an outer table wins over an inner one. With `by_kind` a parameter in no table is filled by its kind, in modules
    that declare kinds (`forge_core.kinds`) and in Linear, Embedding and torch's norms: matrices and embeddings are
    normal, weights of norms ones, the rest zeros. Defaults of `std` and `residual_std` are `hidden_std` (or `init_std`)
    and `residual_std` of `model.config`, or 0.02 for both.
    whole: names of the tensors of the full model, if `model` is a stage of it: a table may then name tensors of other
    stages.

    Raises ValueError for each parameter in no table (with strict=False it keeps its value), each entry without a
    parameter, each parameter that is still on the meta device.
    Cost: of a DTensor only its own shard is drawn, on its device, without communication; 150 MB of extra memory
    (`random_bits.fill_normal`). Buffers in no table are left as they are.
    """
    config = getattr(model, "config", None)
    if std is None:
        std = getattr(config, "hidden_std", getattr(config, "init_std", 0.02))
    if residual_std is None:
        residual_std = getattr(config, "residual_std", std)
    table = _initial_values(model, std, residual_std, whole, by_kind=by_kind)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in table}
    targets = {**dict(model.named_parameters()), **buffers}

    # all problems before the first value is written
    missing = [name for name in targets if name not in table and strict]
    problems = [*_missing_problems(model, missing)]
    rule, fix = "is still on the meta device", "call model.to_empty(device=...) first"
    meta = [name for name, target in targets.items() if target.is_meta]
    raise_problems("", problems + [Problem(name, "meta", ..., rule, fix) for name in meta])
    for name, target in targets.items():
        if name in table:
            _fill_parameter(target, Init(*table[name]), seed, name)


def _missing_problems(model: nn.Module, names: Iterable[str]) -> Iterator[Problem]:
    """A problem for each kind of module and its tensor without an initial value, not one for each layer."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        owner, _, local = name.rpartition(".")
        kind = type(model.get_submodule(owner)).__name__
        found.setdefault((kind, local), []).append(name)
    for (kind, local), (first, *others) in found.items():
        more = f" (and {len(others)} more like it)" if others else ""
        fix = f'let init_table(std, residual_std) of {kind} return {{"{local}": (kind, value)}}'
        yield Problem(first, "missing", ..., f"is in no init_table of a module{more}", fix)


def reset_children(module: nn.Module) -> None:
    """Call `reset_parameters` of every module below `module` that has it."""
    for below in module.modules():
        reset: Any = getattr(below, "reset_parameters", None)
        if below is not module and reset is not None:
            reset()


@torch.no_grad()
def reset_by_table(module: Any, std: float = 0.02) -> None:
    """Fill the tensors of `module.init_table`, normal ones from torch's generator: for a `reset_parameters`."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, (kind, value) in module.init_table(std, std).items():
        if kind == "normal":
            nn.init.normal_(tensors[name], std=value)
        else:
            tensors[name].copy_(torch.as_tensor(value))


def check_init_tables(model: nn.Module) -> None:
    """Raise ValueError for parameters, and buffers on the meta device, in no init_table, and as `parameter_kinds`.

    A tensor that was built on the meta device has no other initial value. Nothing is drawn.
    """
    table = _initial_values(model, 0.02, 0.02)
    lost = [name for name, b in model.named_buffers() if b.is_meta]
    nameless = (n for n in (*dict(model.named_parameters()), *lost) if n not in table)
    raise_problems("", _missing_problems(model, nameless))


@torch.no_grad()
def _fill_parameter(target: Any, how: Init, seed: int, name: str) -> None:
    """Write the initial value of one named parameter (plain or DTensor) in place."""
    if how.kind == "values":
        target.copy_(how.value)
        return

    if how.kind not in ("constant", "normal"):
        rule, fix = "is not a kind of initial values", "use 'normal', 'constant' or 'values'"
        raise invalid(name, "unknown", how.kind, rule, fix)
    if not math.isfinite(how.value):
        rule, fix = "is its initial value and must be finite", "check the config's stds"
        raise invalid(name, "finite", how.value, rule, fix)
    if how.kind == "constant":
        local_tensor(target).fill_(how.value)
    else:
        fill_normal(target, how.value, name, seed)


def _initial_values(
    model: nn.Module,
    std: float,
    residual_std: float,
    whole: Collection[str] = (),
    by_kind: bool = True,
) -> dict[str, Init]:
    """{name: initial value} of all tables of a model's modules, and by kind of what no table has."""
    parameter_kinds(model)  # raises where a declared one does not fit
    table: dict[str, Init] = {}
    for prefix, module in model.named_modules():  # outer modules come first, and win
        dot = f"{prefix}." if prefix else ""
        method: Any = getattr(module, "init_table", None)
        own = {} if method is None else method(std, residual_std)
        if own:
            known = {*dict(module.named_parameters()), *dict(module.named_buffers())}
            for unknown in {dot + name for name in set(own) - known}.difference(whole):
                raise invalid(unknown, "not_found", ..., "is in an init_table, and does not exist")
        for name, how in {**(_values_by_kind(module, std) if by_kind else {}), **own}.items():
            table.setdefault(dot + name, how)
    return table


def _values_by_kind(module: nn.Module, std: float) -> dict[str, Init]:
    """Initial values by kind, in a module that declares kinds, and in torch's linear layers, embeddings and norms."""
    declares = declares_kinds(module)
    if not declares and not isinstance(module, _KNOWN):
        return {}
    found = {}
    for name, kind in own_kinds(module).items():
        if not declares and name != "weight":
            kind = "bias"  # of a subclass of torch's
        constant = Init("constant", float(kind.endswith("norm")))
        found[name] = Init("normal", std) if is_matrix(kind) else constant
    return found


__getattr__ = renamed(__name__)
