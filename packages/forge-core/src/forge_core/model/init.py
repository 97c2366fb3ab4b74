"""Initial weights as plain data: every parameter is a function of (seed, its name).

Layout, device, order of construction and the other parameters do not enter, so a model begins with
the same weights whether it was built plainly, on the meta device, or sharded over ranks.
"""

import hashlib
import math
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core._shared.shards import local_tensor, shard_like
from forge_core.kinds import is_matrix, own_kinds, parameter_kinds
from forge_core.protocols import DeclaresKinds

_KNOWN = (nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm, nn.GroupNorm)


class Init(NamedTuple):
    """How a parameter begins: normal with mean 0 and standard deviation `value`, constant `value`, or (buffers) with
    the values of a tensor."""

    kind: Literal["normal", "constant", "values"]
    value: Any


def linear_rows(name: str, linear: nn.Linear, std: float) -> dict[str, Init]:
    """Rows of a table for a linear layer: normal weight, zero bias."""
    rows = {f"{name}.weight": Init("normal", std)}
    if linear.bias is not None:
        rows[f"{name}.bias"] = Init("constant", 0.0)
    return rows


def initialise(
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

    A module may offer `init_table(std, residual_std) -> {local name: (kind, value)}` for parameters
    (and buffers) below it; an outer table wins over an inner one. With `by_kind` what no table names begins by its kind, in
    modules that declare kinds (`forge_core.kinds`) and in Linear, Embedding and torch's norms: matrices and embeddings
    are normal, weights of norms ones, the rest zeros. Defaults of `std` and `residual_std` are
    `hidden_std` (or `init_std`) and `residual_std` of `model.config`, or 0.02 for both.
    `whole` are the names of the whole model's tensors where `model` is a part of it (a pipeline stage): a
    table may name those that another part has.

    Each parameter is drawn in fp32 on the CPU as a whole, so the peak extra memory is the largest
    parameter, and a DTensor keeps only its own shard: no communication. Buffers without a row are
    left as they are. Raises ValueError naming a parameter that nothing describes (with strict=False it keeps its
    value), a row that names nothing, a parameter still on the meta device.
    """
    config = getattr(model, "config", None)
    if std is None:
        std = getattr(config, "hidden_std", getattr(config, "init_std", 0.02))
    if residual_std is None:
        residual_std = getattr(config, "residual_std", std)
    table = _table(model, std, residual_std, whole, by_kind=by_kind)
    targets = {**dict(model.named_parameters()), **_named_rows(model, table)}
    problems = [_without_row(name) for name in targets if name not in table and strict]
    rule, fix = "is still on the meta device", "call model.to_empty(device=...) first"
    meta = [name for name, target in targets.items() if target.is_meta]
    raise_problems("", problems + [Problem(name, "meta", ..., rule, fix) for name in meta])
    for name, target in targets.items():
        if name in table:
            _fill(target, Init(*table[name]), seed, name)


def _without_row(name: str) -> Problem:
    rule, fix = "is in no init_table of a module", "add a row (kind, value) for it"
    return Problem(name, "missing", ..., rule, fix)


@torch.no_grad()
def reset_by_table(module: Any, std: float = 0.02) -> None:
    """Fill the tensors that `module.init_table` names, normal ones from torch's generator: for a `reset_parameters`."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, (kind, value) in module.init_table(std, std).items():
        if kind == "normal":
            nn.init.normal_(tensors[name], std=value)
        else:
            tensors[name].copy_(torch.as_tensor(value))


def check_init_tables(model: nn.Module) -> None:
    """ValueError that names each parameter, and each buffer on the meta device, that no init_table describes, and as
    `parameter_kinds`.

    What was built on the meta device has no value but that of its row. Nothing is drawn.
    """
    table = _table(model, 0.02, 0.02)
    lost = [name for name, b in model.named_buffers() if b.is_meta]
    nameless = (n for n in (*dict(model.named_parameters()), *lost) if n not in table)
    raise_problems("", map(_without_row, nameless))


def _fill(target: Tensor, how: Init, seed: int, name: str) -> None:
    """Write the initial value of one named parameter (plain or DTensor) in place."""
    if how.kind == "values":
        with torch.no_grad():
            target.copy_(how.value)
        return
    full = torch.empty(target.shape, dtype=torch.float32, device="cpu")
    if how.kind == "constant":
        full.fill_(how.value)
    elif how.kind == "normal":
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        full.normal_(0.0, how.value, generator=generator)
    else:
        rule, fix = "is not a kind of initial values", "use 'normal', 'constant' or 'values'"
        raise invalid(name, "unknown", how.kind, rule, fix)

    if not math.isfinite(how.value):
        rule, fix = "is its initial value and must be finite", "check the config's stds"
        raise invalid(name, "finite", how.value, rule, fix)
    with torch.no_grad():
        if hasattr(target, "device_mesh"):
            local_tensor(target).copy_(shard_like(full, target))
        else:
            target.copy_(full)


def _named_rows(model: nn.Module, table: dict[str, Init]) -> dict[str, Tensor]:
    """Buffers that a table names."""
    return {name: buffer for name, buffer in model.named_buffers() if name in table}


def _table(
    model: nn.Module,
    std: float,
    residual_std: float,
    whole: Collection[str] = (),
    by_kind: bool = True,
) -> dict[str, Init]:
    parameter_kinds(model)  # raises where a declared one does not fit
    table: dict[str, Init] = {}
    for prefix, module in model.named_modules():  # outer modules come first, and win
        offer = getattr(module, "init_table", None)
        rows = {} if offer is None else offer(std, residual_std)
        dot = f"{prefix}." if prefix else ""
        if offer is not None:
            known = {n for n, _ in module.named_parameters()} | {
                n for n, _ in module.named_buffers()
            }
            for unknown in {dot + name for name in set(rows) - known}.difference(whole):
                raise invalid(unknown, "not_found", ..., "is in an init_table, and does not exist")

        kind = _rows_by_kind(module, std) if by_kind else {}
        for name, row in {**kind, **rows}.items():
            table.setdefault(dot + name, row)
    return table


def _rows_by_kind(module: nn.Module, std: float) -> dict[str, Init]:
    """Rows of a module that declares its kinds, and of torch's linear layers, embeddings and norms."""
    declares = isinstance(module, DeclaresKinds)
    if not declares and not isinstance(module, _KNOWN):
        return {}
    rows = {}
    for name, kind in own_kinds(module).items():
        if not declares and name != "weight":
            kind = "bias"  # of a subclass of torch's
        rows[name] = (
            Init("normal", std)
            if is_matrix(kind)
            else Init("constant", float(kind.endswith("norm")))
        )
    return rows
