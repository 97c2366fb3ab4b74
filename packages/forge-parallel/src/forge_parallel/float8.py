"""Float8 linear layers by torchao: which layers gain, and the swap.

Shapes: N outputs and K inputs of a linear layer on one rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from forge_parallel._shared.problems import invalid
from forge_parallel.axes.roles import Matched, find_roles
from forge_parallel.structure import mark

__all__ = ["Float8Row", "convert_float8", "float8_table"]

RECIPES = ("tensorwise", "rowwise")
#: Reasons of a Float8Row.
TOO_SMALL, SHARED = "too small to gain", "kept: its weight is shared"
OWN_DTYPE = "kept: computes in a dtype of its own"
#: Output heads, routers and gates: few FLOPs, and sensitive.
KEEP = ("*lm_head", "output", "score", "*router*", "*.gate", "*.shared_expert_gate")
# dim of the weight that tp shards
_SHARDED_DIM = {"colwise": 0, "sharded_logits": 0, "gather_output": 0, "rowwise": 1}


class Float8Row(NamedTuple):
    """The result for one linear layer: its weight's (N, K) on one rank, and why it stays in bf16 ("" if
    it was converted)."""

    name: str
    shape: tuple[int, int]
    reason: str

    @property
    def converted(self) -> bool:
        """Whether the layer computes in float8."""
        return not self.reason


def convert_float8(
    model: nn.Module,
    recipe: str = "tensorwise",
    *,
    all_gather: bool = False,
    emulate: bool | None = None,
    device: torch.device | str | None = None,
    tp: int = 1,
    roles: Mapping[str, Any] | None = None,
    matched: Matched | None = None,
    min_dim: int | None = None,
    divisible_by: int = 16,
    keep: Sequence[str] = KEEP,
) -> list[Float8Row]:
    """Let the linear layers that gain from it multiply in float8, in place; parameters keep their names.

        print(float8_table(convert_float8(model, "rowwise", tp=8)))

    "tensorwise" scales each tensor by one number, "rowwise" each row and column by its own (more exact,
    gains on larger layers only). Weights, gradients and optimizer state keep their dtype: operands of a
    matmul are rounded as it is computed. Works on the meta device, before tensor parallelism and FSDP2.

    Not converted, each with its reason in the returned rows: layers whose N or K on a rank is no multiple of
    `divisible_by` (the kernels need 16) or too small to gain, names that match a pattern of `keep`, roles other
    than colwise, rowwise and opaque (head, gate), modules with a `compute_dtype`, shared weights. `tp` and `roles`
    (default: `model.parallel_roles()`) determine the size
    on a rank. Too small is, by torchao's measurements on H100 (the source is `_auto_filter_for_recipe`
    in torchao.float8; casts cost more than the matmul saves): tensorwise N <= 1024 with K <= 4096;
    rowwise N <= 2048, or K <= 1024, or N <= 4096 with K <= 2048. `min_dim` replaces that rule.

    `emulate` rounds the operands and multiplies in the compute dtype, a reference and no speed-up; by
    default where `device` (default: the GPU if there is one) has no float8 kernel. The kernels also want
    the tokens of a micro-batch on a rank to be a multiple of 16, which the caller must ensure.
    `all_gather` lets FSDP2 gather the weights in float8 (half the bytes; tensorwise, CUDA, no tp).

    Raises ValueError for an unknown recipe or a combination that is not supported, ImportError without torchao.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _check(model, recipe, all_gather, target, tp)
    torchao = _torchao()
    if matched is None:
        matched = find_roles(model, roles, sharded=tp > 1)
    mark(model, "float8")

    gains = _gains(recipe, min_dim)
    holders = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    rows = []
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        role = matched.parameters.get(f"{name}.weight")
        shape = _local_shape(linear, role, tp)
        odd = [size for size in shape if size % divisible_by]

        # the first reason counts
        reason = _reason_to_keep(model, name, role, keep)
        if not reason and holders[id(linear.weight)] > 1:
            reason = SHARED
        if not reason and odd:
            reason = f"{odd[0]} is no multiple of {divisible_by}"
        if not reason and not gains(*shape):
            reason = TOO_SMALL
        rows.append(Float8Row(name, shape, reason))

    chosen = {row.name for row in rows if row.converted}
    config = replace(
        torchao.Float8LinearConfig.from_recipe_name(recipe),
        emulate=_without_kernel(target, recipe) if emulate is None else emulate,
        enable_fsdp_float8_all_gather=all_gather,
    )
    torchao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in chosen
    )
    return rows


def float8_table(rows: Iterable[Float8Row]) -> str:
    """The rows as text for a log, one line for layers of all depths with the same result, with their number."""
    alike = Counter(
        (re.sub(r"\b\d+\b", "*", row.name), row.shape, row.reason or "converted") for row in rows
    )
    lines = [(f"{n} x", name, f"({s[0]}, {s[1]})", why) for (name, s, why), n in alike.items()]
    table = [("", "linear layer", "N, K on a rank", "float8"), *lines]
    widths = [max(len(line[i]) for line in table) for i in range(3)]
    return "\n".join(
        f"{n:>{widths[0]}} {name:<{widths[1]}}  {shape:<{widths[2]}}  {why}"
        for n, name, shape, why in table
    )


def _check(model: nn.Module, recipe: str, all_gather: bool, device: torch.device, tp: int) -> None:
    """Raise ValueError for an unknown recipe, and for float8 all-gathers that cannot work."""
    if recipe not in RECIPES:
        rule = f"must be one of {', '.join(RECIPES)}"
        raise invalid("float8", "unknown", recipe, rule, "use tensorwise")
    if isinstance(model, nn.Linear):
        rule = "must hold the linear layers that float8 replaces, and is one itself"
        raise invalid("model", "type", "Linear", rule, "put it into a module")
    if not all_gather:
        return

    backend = dist.get_backend() if dist.is_initialized() else "nccl"
    if device.type != "cuda" or "nccl" not in backend:
        rule = (
            f"must have CUDA and nccl, and this is {device.type} with {backend}: gloo has no float8"
        )
        raise invalid("float8_all_gather", "device", True, rule, "use float8_all_gather = false")

    if recipe != "tensorwise":
        rule = f"must go with tensorwise, and float8 is {recipe}: ranks with shards of a row cannot scale it"
        fix = "use tensorwise, or float8_all_gather = false"
        raise invalid("float8_all_gather", "recipe", True, rule, fix)
    if tp > 1:
        rule = f"must go with tp 1, and tp is {tp}"
        raise invalid("float8_all_gather", "tp", True, rule, "use float8_all_gather = false")


def _torchao() -> Any:
    """The module torchao.float8; ImportError that names the extra to install."""
    try:
        return import_module("torchao.float8")
    except ImportError as error:
        raise ImportError(
            "float8 needs torchao; pip install 'forge-parallel[float8]' (torchao 0.18 or later)"
        ) from error


def _without_kernel(device: torch.device, recipe: str) -> bool:
    """True unless the device is a GPU that multiplies float8: SM 8.9, scaled by rows SM 9.0."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) < ((8, 9) if recipe == "tensorwise" else (9, 0))


def _gains(recipe: str, min_dim: int | None) -> Callable[[int, int], bool]:
    """Whether a layer with N outputs and K inputs is faster in float8."""
    if min_dim is not None:
        return lambda n, k: min(n, k) >= min_dim
    if recipe == "tensorwise":
        return lambda n, k: n > 1024 or k > 4096
    return lambda n, k: n > 2048 and k > 1024 and (n > 4096 or k > 2048)


def _reason_to_keep(model: nn.Module, name: str, role: str | None, keep: Sequence[str]) -> str:
    """Why a layer stays in bf16 regardless of its size, or ""."""
    linear = model.get_submodule(name)
    pattern = next((p for p in keep if fnmatchcase(name, p)), None)
    if pattern is not None:
        return f"kept: {pattern}"
    if role not in (None, "colwise", "rowwise", "opaque"):
        return f"kept: role {role}"
    if type(linear) is not nn.Linear:
        return f"kept: a {type(linear).__name__}"
    parts = name.split(".")
    inside = (model.get_submodule(".".join(parts[:i])) for i in range(len(parts)))
    if any(isinstance(getattr(m, "compute_dtype", None), torch.dtype) for m in inside):
        return OWN_DTYPE
    return ""


def _local_shape(linear: nn.Linear, role: str | None, tp: int) -> tuple[int, int]:
    """(N, K) on one of `tp` ranks."""
    shape = [linear.out_features, linear.in_features]
    if role in _SHARDED_DIM:
        shape[_SHARDED_DIM[role]] = -(-shape[_SHARDED_DIM[role]] // tp)
    return shape[0], shape[1]
