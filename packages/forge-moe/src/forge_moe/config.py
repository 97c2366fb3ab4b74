"""Configurations of a router and of a mixture-of-experts layer, validated when made."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from forge_moe._shared.fields import field
from forge_moe._shared.problems import Problem, raise_problems

__all__ = ["AMONG_TOKENS", "MoEConfig", "MoEOptions", "RouterConfig", "RoutingOptions"]

#: Routers whose choice for a token depends on other tokens.
AMONG_TOKENS = ("expert_choice", "uniform")

# Least and largest values. The largest are far above any model: a typing error fails before memory is allocated.
_WIDTH, _COUNT = (1, 2**20), (1, 2**16)
_ABOVE_0: dict[str, Any] = {"range": "finite and above 0"}
_FROM_0: dict[str, Any] = {"range": "a finite number, 0 or more"}
_LOSS_WEIGHTS = ("aux_loss_weight", "sequence_loss_weight", "z_loss_weight")
_GROUPS = ("num_groups", "top_groups", "group_score")
#: Keys that have no effect with a router: a bias of an expert does not change the order of its tokens.
_WITHOUT_EFFECT = {
    "expert_choice": (*_GROUPS, "normalize", "expert_bias", "bias_update_rate"),
    "uniform": (*_GROUPS, "expert_bias", "bias_update_rate"),
}


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """Options of routing, which `RouterConfig` and `MoEOptions` inherit."""

    top_k: int = field(2, "experts per token", _COUNT)
    normalize: Literal["after_top_k", "before_top_k"] = field(
        "after_top_k", "weights of the chosen experts sum to 1, or keep their value among all"
    )
    num_groups: int = field(1, "groups of neighboring experts; 1: no limit", _COUNT)
    top_groups: int = field(1, "groups that a token may choose experts from", _COUNT)
    group_score: Literal["top2_sum", "max"] = field(
        "top2_sum", "score of a group: the sum of its two best experts' scores, or the best one"
    )
    route_scale: float = field(1.0, "factor on the weights of the chosen experts", **_ABOVE_0)
    expert_bias: bool = field(
        False, "selection bias without balancing; bias_update_rate above 0 adds one too"
    )
    router_bias: bool = field(False, "bias in the router's projection (gpt-oss)")


@dataclass(frozen=True)
class RouterConfig(RoutingOptions):
    """Shape and options of a router. Raises ValueError with a line for each problem.

    RouterConfig(dim=512, num_experts=64, name="sigmoid_topk", top_k=6)
    """

    dim: int = dataclasses.field(metadata={"help": "width of a token", "between": _WIDTH})
    num_experts: int = dataclasses.field(
        metadata={"help": "experts to choose from", "between": _COUNT}
    )
    name: str = field("softmax_topk", "registered router, or module:attribute")

    def __post_init__(self) -> None:
        raise_problems("router", _type_problems(self))
        raise_problems("router", [*_value_problems(self), *_routing_problems(self, self.name)])


@dataclass(frozen=True, kw_only=True)
class MoEOptions(RoutingOptions):
    """Options of a mixture-of-experts layer, without its shape: a base class for tables of a configuration.

    Nothing is checked here; MoEConfig checks them together with the shape.
    """

    router: str = field("softmax_topk", "registered router, or module:attribute")
    activation: Literal["swiglu", "gelu", "clamped_swiglu"] = field(
        "swiglu", "activation of the experts; clamped_swiglu is that of gpt-oss"
    )
    swiglu_alpha: float = field(1.702, "clamped_swiglu: factor inside its sigmoid", **_ABOVE_0)
    swiglu_limit: float = field(
        7.0, "clamped_swiglu: value that gate and up are clamped to", **_ABOVE_0
    )
    bias: bool = field(False, "biases in the experts' projections")
    num_shared_experts: int = field(0, "experts that see every token", (0, 2**16))
    shared_hidden_dim: int | None = field(
        None, "width inside one shared expert; empty: hidden_dim", _WIDTH
    )
    shared_gate: bool = field(False, "a sigmoid of the token scales the shared output (Qwen2-MoE)")
    capacity_factor: float | None = field(
        None,
        "limit on the tokens of an expert in training, over an even load; empty: drop nothing",
        range="a finite number above 0",
    )
    drop_policy: Literal["position", "probability"] = field(
        "position", "tokens that a full expert keeps: earlier ones, or those with larger weights"
    )
    aux_loss_weight: float = field(0.0, "weight of the balance loss", **_FROM_0)
    aux_scope: Literal["sequence", "micro_batch", "global_batch", "global_batch_lagged"] = field(
        "micro_batch",
        "tokens whose choices the balance loss counts; micro_batch and global_batch depend on micro-batches and ranks",
    )
    sequence_loss_weight: float = field(0.0, "weight of DeepSeek-V3's loss per sequence", **_FROM_0)
    z_loss_weight: float = field(0.0, "weight of the squared log-sum-exp of the logits", **_FROM_0)
    bias_update_rate: float = field(0.0, "step of the loss-free bias; 0: no bias", **_FROM_0)
    bias_center: bool = field(False, "keep the mean of the bias at 0")
    bias_schedule: Literal["constant", "cosine", "linear_warmup"] = field(
        "constant", "schedule of bias_update_rate over training"
    )
    backend: str = field(
        "auto",
        "the experts' matmuls: auto, grouped_mm, loop, batched, float8, registered, or module:attribute",
    )

    def whole_batch(self, key: str) -> dict[str, str]:
        """Return {option below `key`, with its value: replacement} for options that need a full micro-batch on each rank."""
        found = {}
        if self.capacity_factor is not None:
            found[f"{key}.capacity_factor {self.capacity_factor}"] = "no capacity"
        if self.router in AMONG_TOKENS:
            found[f"{key}.router {self.router!r}"] = "another router"
        return found


@dataclass(frozen=True)
class MoEConfig(MoEOptions):
    """Shape and options of a mixture-of-experts layer.

    Raises ValueError with a line for each problem.

        MoEConfig(dim=512, hidden_dim=1024, num_experts=8, top_k=2)
    """

    dim: int = dataclasses.field(metadata={"help": "width of a token", "between": _WIDTH})
    hidden_dim: int = dataclasses.field(
        metadata={"help": "width inside one expert", "between": _WIDTH}
    )
    num_experts: int = dataclasses.field(metadata={"help": "routed experts", "between": _COUNT})
    aux: Literal["return", "attach", "none"] = dataclasses.field(
        default="return",
        kw_only=True,
        metadata={"help": "router losses: handed to the caller, or added to the gradient"},
    )

    def __post_init__(self) -> None:
        raise_problems("moe", _type_problems(self))
        raise_problems("moe", [*_value_problems(self), *_moe_problems(self)])

    @property
    def router_config(self) -> RouterConfig:
        """Configuration of the layer's router, with a selection bias if `bias_update_rate` needs one."""
        options = {f.name: getattr(self, f.name) for f in fields(RoutingOptions)}
        options["expert_bias"] = self.expert_bias or self.bias_update_rate > 0.0
        return RouterConfig(self.dim, self.num_experts, self.router, **options)

    @property
    def resolved_shared_hidden_dim(self) -> int:
        """Width inside all shared experts together."""
        return self.num_shared_experts * (self.shared_hidden_dim or self.hidden_dim)


_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _type_problems(config: RouterConfig | MoEConfig) -> Iterator[Problem]:
    """A problem for each field that is not of its annotated type.

    True is not a number and 2.0 not an integer; an integer is a number. `_value_problems` checks the Literals.
    """
    hints = get_type_hints(type(config))
    for name, value in vars(config).items():
        annotation = hints[name]
        allowed = get_args(annotation) or (annotation,)
        expected = next((kind for kind in allowed if kind in _TYPE_NAMES), None)
        if expected is None or type(value) in (*allowed, int if expected is float else expected):
            continue
        empty = ", or leave it empty" if type(None) in allowed else ""
        rule, fix = f"must be {_TYPE_NAMES[expected]}", f"write it as one{empty}"
        yield Problem(name, "type", value, rule, fix)


def _value_problems(config: RouterConfig | MoEConfig) -> Iterator[Problem]:
    """A problem for each field that is out of its range, or not a value of its Literal."""
    hints = get_type_hints(type(config))
    for name, annotation, given in ((f.name, hints[f.name], f.metadata) for f in fields(config)):
        value, between, kind = getattr(config, name), given.get("between"), given.get("range")

        if between and value is not None:
            low, high = between
            if not low <= value <= high:
                rule = f"must be {low} to {high}"
                yield Problem(name, "range", value, rule, "use a number in that range")
        elif kind == _ABOVE_0["range"] and not 0.0 < value < math.inf:
            fix = f"use {getattr(type(config), name)}"
            yield Problem(name, "range", value, f"must be {kind}", fix)
        # NaN compares false, so it is out of every range.
        elif kind == _FROM_0["range"] and not 0.0 <= value < math.inf:
            yield Problem(name, "range", value, f"must be {kind}", "use 0 to switch it off")
        elif get_origin(annotation) is Literal and value not in get_args(annotation):
            fix = f"use one of {', '.join(get_args(annotation))}"
            yield Problem(name, "unknown", value, "is unknown", fix)


def _routing_problems(c: RouterConfig | MoEConfig, router: str) -> Iterator[Problem]:
    """Problems of the keys that router and layer have in common."""
    softmax_or_sigmoid = router in ("softmax_topk", "sigmoid_topk")
    if c.top_k == 1 < c.num_experts and c.normalize == "after_top_k" and softmax_or_sigmoid:
        yield Problem(
            "top_k",
            "normalize",
            c.top_k,
            "must go with normalize 'before_top_k': the weight of a single expert, divided by itself, is 1 and gives "
            "the router no gradient",
            "set normalize = 'before_top_k', or top_k = 2",
        )
    if c.top_k > c.num_experts >= 1:
        rule = f"must not be above num_experts {c.num_experts}"
        yield Problem("top_k", "above_experts", c.top_k, rule, "lower top_k or add experts")

    defaults = {f.name: f.default for f in fields(c)}
    for name in _WITHOUT_EFFECT.get(router, ()):
        value, rule = getattr(c, name, None), f"has no effect with router {router!r}"
        if value != defaults.get(name):
            yield Problem(name, "foreign", value, rule, "remove it, or use another router")

    # Groups. Numbers below 1 have a problem of their own, and none here.
    divisible = c.num_groups >= 1 and c.num_experts % c.num_groups == 0
    if c.num_groups >= 1 and not divisible:
        rule = f"must be divisible by num_groups {c.num_groups}"
        yield Problem("num_experts", "divides", c.num_experts, rule, "use a divisor of num_experts")
    if c.top_groups > c.num_groups >= 1:
        rule = f"must not be above num_groups {c.num_groups}"
        fix = "lower top_groups, or raise num_groups to limit routing"
        yield Problem("top_groups", "above_groups", c.top_groups, rule, fix)

    # All experts of a token come from its top_groups groups.
    if divisible and c.num_groups >= c.top_groups >= 1:
        reachable = c.num_experts // c.num_groups * c.top_groups
        if reachable < c.top_k <= c.num_experts:
            rule = (
                f"must fit into top_groups {c.top_groups} of num_groups {c.num_groups} with num_experts "
                f"{c.num_experts}"
            )
            yield Problem("top_k", "groups", c.top_k, rule, "raise top_groups or lower top_k")


def _moe_problems(c: MoEConfig) -> Iterator[Problem]:
    yield from _routing_problems(c, c.router)

    clamped = c.activation == "clamped_swiglu"
    for name in ("swiglu_alpha", "swiglu_limit"):
        value = getattr(c, name)
        if not clamped and 0.0 < value < math.inf and value != getattr(MoEOptions, name):
            rule = f"is a key of activation 'clamped_swiglu', and activation is {c.activation!r}"
            yield Problem(name, "foreign", value, rule, "remove it, or use clamped_swiglu")

    if clamped and c.num_shared_experts:
        rule = "must be 0 with activation 'clamped_swiglu', which shared experts do not compute"
        fix = "use swiglu, or no shared experts"
        yield Problem("num_shared_experts", "activation", c.num_shared_experts, rule, fix)
    if c.shared_gate and c.num_shared_experts == 0:
        rule = "must go with shared experts, and num_shared_experts is 0"
        fix = "set num_shared_experts = 1, or shared_gate = false"
        yield Problem("shared_gate", "needs_experts", c.shared_gate, rule, fix)

    if c.capacity_factor is not None and not 0.0 < c.capacity_factor < 1e6:
        fix = "use 1.25, or leave it empty to drop nothing"
        yield Problem("capacity_factor", "range", c.capacity_factor, "must be above 0", fix)
    weights = {name: getattr(c, name) for name in _LOSS_WEIGHTS}
    if c.aux == "none" and any(weights.values()):
        given = ", ".join(f"{name} {value}" for name, value in weights.items())
        rule = f"must go without loss weights ({given})"
        fix = "use aux = 'return' or 'attach', or set the weights to 0"
        yield Problem("aux", "weights", c.aux, rule, fix)
