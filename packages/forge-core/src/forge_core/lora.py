"""Low-rank adapters of linear layers (Hu et al. 2021), by pattern, in any model.

Shapes: I inputs and O outputs of a layer, R rank of its adapter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core._config import is_finite, is_size
from forge_core._shared.fields import field
from forge_core._shared.names import match_names, matches, nearest_names, without_layer_number
from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core.kinds import ParameterKind, parameter_kinds
from forge_core.model.init import Init

__all__ = [
    "FACTORS",
    "LoRAConfig",
    "LoRALinear",
    "adapter_lines",
    "adapter_names",
    "frozen_names",
    "lora",
    "merge",
    "merged_weight",
    "without_adapter",
]

#: Names of an adapter's parameters in its layer: (R, I) and (O, R).
FACTORS = ("lora_a", "lora_b")
_MAX_RANK = 2**16


@dataclass(frozen=True)
class LoRAConfig:
    """Which linear layers get an adapter, and its size; a ValueError lists every problem."""

    patterns: tuple[str, ...] = field(
        ("*.mixer.*_proj", "!*.kv_b_proj"),
        "names of linear layers that get an adapter, as in fnmatch; '!' excludes",
    )
    rank: int = field(8, "rank of the adapters")
    alpha: float = field(16.0, "an adapter's output is multiplied by alpha / rank")

    def __post_init__(self) -> None:
        raise_problems("lora", _problems(self))

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / self.rank


def _problems(c: LoRAConfig) -> Iterator[Problem]:
    taken = () if isinstance(c.patterns, str) else [p for p in c.patterns if not p.startswith("!")]
    if not taken or not all(c.patterns):
        rule = "must be a list with a name that '!' does not exclude"
        yield Problem("patterns", "type", c.patterns, rule, "use ['*.q_proj', '*.v_proj']")
    if not is_size(c.rank, _MAX_RANK):
        rule = f"must be a whole number from 1 to {_MAX_RANK}"
        yield Problem("rank", "range", c.rank, rule, "use 8")
    if not (is_finite(c.alpha) and c.alpha > 0.0):
        rule = "must be a finite number above 0"
        yield Problem("alpha", "range", c.alpha, rule, "use twice the rank")


class LoRALinear(nn.Module):
    """A linear layer with an adapter: weight x + bias + scale * lora_b (lora_a x); (..., I) -> (..., O).

    Hu et al. 2021, equation 3. `weight` and `bias` are the given layer's parameters under their old names; `lora_a` (R, I)
    starts normal with the variance 1 / 3I and `lora_b` (O, R) at zero, so the output starts as it was. It is not an
    `nn.Linear`: code that replaces linear layers by type (float8) would lose the adapter.
    """

    def __init__(self, linear: nn.Linear, config: LoRAConfig) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.rank, self.scale = config.rank, config.scale
        self.weight, self.bias = linear.weight, linear.bias

        device = linear.weight.device
        self.lora_a = nn.Parameter(torch.empty(config.rank, self.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(self.out_features, config.rank, device=device))
        self._reset_adapter()

    def reset_parameters(self) -> None:
        """Draw initial values of the layer and its adapter, also after `to_empty`."""
        nn.Linear.reset_parameters(cast(nn.Linear, self))
        self._reset_adapter()

    def _reset_adapter(self) -> None:
        """Draw `lora_a`, and set `lora_b` to 0."""
        nn.init.normal_(self.lora_a, std=self._std)
        nn.init.zeros_(self.lora_b)

    @property
    def _std(self) -> float:
        # the variance of peft's kaiming_uniform_(a=sqrt(5)), uniform in +-1 / sqrt(I)
        return 1.0 / math.sqrt(3.0 * self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            # a frozen base in bf16 without FSDP2, which would have cast it
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)

        # the adapter computes in its own dtype, fp32, unless autocast casts both
        low = F.linear(x.to(self.lora_a.dtype), self.lora_a)  # (..., R)
        out = F.linear(x, weight, bias)  # (..., O)
        return out + (F.linear(low, self.lora_b) * self.scale).to(out.dtype)

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Kinds of its parameters, see `forge_core.kinds`."""
        bias: dict[str, ParameterKind] = {} if self.bias is None else {"bias": "bias"}
        return {"weight": "matrix", **bias, "lora_a": "matrix", "lora_b": "matrix"}

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Initial values of the adapter."""
        return {"lora_a": Init("normal", self._std), "lora_b": Init("constant", 0.0)}

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs for one token: the layer's and the adapter's."""
        width = self.in_features + self.out_features
        return 2.0 * (self.in_features * self.out_features + self.rank * width)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, scale={self.scale:g}"


def lora(
    model: nn.Module,
    config: LoRAConfig,
    base_dtype: torch.dtype | None = torch.bfloat16,
    trained: Sequence[str] = (),
) -> list[str]:
    """Freeze `model` and add adapters to the linear layers that match, in place; return their names.

        lora(model, LoRAConfig(("*.q_proj", "*.v_proj"), rank=8, alpha=16))
        optimizer = AdamW(param_groups(model), lr=2e-4)                 # trains only the adapters

    Call it before the model is sharded (`parallelize` keeps frozen parameters in their dtype); the meta device is fine.
    Frozen floating-point parameters are cast to `base_dtype`; None keeps their dtype. Parameters that match a pattern of
    `trained` do not change, and stay trainable. Names of parameters stay, so checkpoints of the model load; adapters are
    next to their weight (`*.lora_a`, `*.lora_b`).

    Raises ValueError, before any change, for a pattern that matches no module or parameter, for a matched module that is
    not a plain `nn.Linear` (an output head that computes a loss, a stack of experts), for a weight with a second name, and
    for a parameter of `trained` in a layer that gets an adapter.

    Cost: per layer R (I + O) fp32 parameters; in a forward, 2 R (I + O) FLOPs per token.
    """
    matched = _matched(model, config)
    names = [name for name, _ in model.named_parameters()]
    for pattern in trained:
        if not match_names([pattern], names):
            fix = f"the nearest names are {', '.join(nearest_names(pattern, names))}"
            raise invalid("lora.whole", "not_found", pattern, "must match a weight", fix)
    kept = set(match_names(trained, names))
    of_adapted = {f"{layer}.{kind}" for layer in matched for kind in ("weight", "bias")}
    if both := sorted(of_adapted & kept):
        rule = "is a weight of a layer that has an adapter by lora.patterns"
        raise invalid("lora.whole", "excludes", both[0], rule, "leave it out of one of them")

    # from here on the model changes: all problems are known
    for name, parameter in model.named_parameters():
        if name in kept:
            continue
        parameter.requires_grad_(False)
        if base_dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(base_dtype)
    for name, linear in matched.items():
        _replace(model, name, LoRALinear(linear, config))
    return list(matched)


def adapter_lines(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return lines for a user: layers with adapters, counted by name, and stacks that `patterns` match, which get none."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    found = Counter(name.rpartition(".")[2] for name in layers)
    kinds = ", ".join(f"{number} {kind}" for kind, number in found.items())
    ranks = ", ".join(str(rank) for rank in sorted({m.rank for m in layers.values()}))
    lines = [f"{len(layers)} linear layers have an adapter of rank {ranks}: {kinds}"]

    left = Counter(map(without_layer_number, without_adapter(model, patterns)))
    if left:
        shown = ", ".join(f"{number} {name}" for name, number in left.items())
        lines.append(f"lora.patterns match stacks of matrices, which get no adapter: {shown}")
    return lines


def without_adapter(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of matrices outside of linear layers that `patterns` match: stacks of experts get no adapter."""
    linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear | LoRALinear)}
    kinds = parameter_kinds(model)
    return [
        name
        for name, parameter in model.named_parameters()
        if kinds[name] in ("matrix", "stacked_matrix") and parameter not in linear
        if name.rpartition(".")[2] not in FACTORS and matches(name, patterns)
    ]


def merge(model: nn.Module) -> None:
    """Add every adapter to its weight, in place; leave plain linear layers, with all parameters trainable.

    The model must not be sharded. The sum is computed in fp32 and rounded to the weight's dtype.
    """
    if isinstance(model, LoRALinear):
        rule = "is an adapted layer, and merge replaces layers inside of a model"
        raise invalid("model", "layer", ..., rule, "give the model")
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            _replace(model, name, _merged(module))
    model.requires_grad_(True)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return weight (O, I) + scale * b (O, R) @ a (R, I), computed in fp32, in the dtype of `weight`."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of the adapters' parameters: all that a checkpoint of a fine-tuning needs next to its base."""
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[2] in FACTORS]


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that do not require gradients, every name of a tied one."""
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def _merged(module: LoRALinear) -> nn.Linear:
    """A plain linear layer with the adapter in its weight."""
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    with torch.no_grad():
        weight = merged_weight(module.weight, module.lora_a, module.lora_b, module.scale)
    linear.weight, linear.bias = nn.Parameter(weight), module.bias
    return linear


def _matched(model: nn.Module, config: LoRAConfig) -> dict[str, nn.Linear]:
    """The linear layers that get an adapter, by name; ValueError with the problems of all patterns."""
    modules = {name: module for name, module in model.named_modules() if name}
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found: dict[str, nn.Linear] = {}

    problems: list[Problem] = []
    key = "lora.patterns"
    excluding = [pattern for pattern in config.patterns if pattern.startswith("!")]
    for pattern in (p for p in config.patterns if not p.startswith("!")):
        fits = match_names([pattern, *excluding], modules)
        if not fits and (stacks := without_adapter(model, [pattern, *excluding])):
            rule = f"must match a linear layer, and matches only {stacks[0]}, which can have no adapter"
            fix = "remove it: experts in stacks stay frozen"
            problems.append(Problem(key, "stack", pattern, rule, fix))
        elif not fits:
            linear = [name for name, module in modules.items() if type(module) is nn.Linear]
            rule = "must match a linear layer, and matches no module"
            near = ", ".join(nearest_names(pattern, linear))
            fix = f"the nearest names are {near or 'none: the model has no linear layer'}"
            problems.append(Problem(key, "not_found", pattern, rule, fix))

        others = [name for name in fits if type(modules[name]) is not nn.Linear]
        if others:
            kinds = ", ".join(f"{name} ({type(modules[name]).__name__})" for name in others[:3])
            rule = f"must match only nn.Linear, and matches {kinds}{', ...' * (len(others) > 3)}"
            problems.append(Problem(key, "type", pattern, rule, f"exclude them, as '!{others[0]}'"))

        for name in (name for name in fits if name not in others):
            module: Any = modules[name]
            if len(names[module.weight]) > 1:
                other = next(n for n in names[module.weight] if n != f"{name}.weight")
                rule = f"must not match {name}: its weight is also {other}, and an adapter would change only one"
                problems.append(Problem(key, "tied", pattern, rule, "exclude it"))
            else:
                found[name] = module

    raise_problems("", dict.fromkeys(problems))
    return {name: found[name] for name in modules if name in found}


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Set a submodule by its dotted name."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
