"""What a router and a mixture-of-experts layer are made of, validated when described."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from forge_moe._rules import Rule, check, check_types


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _between(name: str, minimum: int, maximum: int) -> Rule:
    return Rule(
        f"{name}_range",
        lambda c: c[name] is not None and not minimum <= c[name] <= maximum,
        f"{name} {{{name}}} must be {minimum} to {maximum}",
        "use a number in that range",
    )


def _not_negative(name: str) -> Rule:
    return Rule(
        f"{name}_range",
        lambda c: not 0.0 <= c[name] < float("inf"),
        f"{name} {{{name}}} must be a finite number, 0 or more",
        "use 0 to switch it off",
    )


def _one_of(name: str, *choices: str) -> Rule:
    return Rule(
        f"{name}_name",
        lambda c: c[name] not in choices,
        f"{name} {{{name}!r}} is unknown",
        "use one of " + ", ".join(choices),
    )


# Far above any model; a slip of the pen stops here, before memory is asked for.
_WIDEST, _MOST = 2**20, 2**16

_SHARED_KEYS_RULES: tuple[Rule, ...] = (
    _between("dim", 1, _WIDEST),
    *(_between(n, 1, _MOST) for n in ("num_experts", "top_k", "num_groups", "top_groups")),
    Rule(
        "top_1_keeps_its_weight",
        lambda c: (
            c["top_k"] == 1 < c["num_experts"]
            and c["normalize"] == "after_top_k"
            and c.get("router", c.get("name")) in ("softmax_topk", "sigmoid_topk")
        ),
        "top_k 1 must go with normalize 'before_top_k': the weight of a single expert, divided by itself, is 1 "
        "and gives the router no gradient",
        "set normalize = 'before_top_k', or top_k = 2",
    ),
    Rule(
        "top_k_fits",
        lambda c: c["top_k"] > c["num_experts"] >= 1,
        "top_k {top_k} must not be above num_experts {num_experts}",
        "lower top_k or add experts",
    ),
    Rule(
        "groups_divide_experts",
        lambda c: c["num_groups"] >= 1 and c["num_experts"] % c["num_groups"] != 0,
        "num_experts {num_experts} must be divisible by num_groups {num_groups}",
        "use a divisor of num_experts",
    ),
    Rule(
        "top_groups_fit",
        lambda c: c["top_groups"] > c["num_groups"] >= 1,
        "top_groups {top_groups} must not be above num_groups {num_groups}",
        "lower top_groups, or raise num_groups to limit routing",
    ),
    Rule(
        "groups_hold_top_k",
        lambda c: (
            c["num_groups"] >= c["top_groups"] >= 1
            and c["num_experts"] % c["num_groups"] == 0
            and c["top_k"] <= c["num_experts"]
            and c["top_k"] > c["num_experts"] // c["num_groups"] * c["top_groups"]
        ),
        "top_k {top_k} must fit into top_groups {top_groups} of num_groups {num_groups} "
        "with num_experts {num_experts}",
        "raise top_groups or lower top_k",
    ),
    _one_of("normalize", "after_top_k", "before_top_k"),
    _one_of("group_score", "top2_sum", "max"),
    Rule(
        "route_scale_range",
        lambda c: not 0.0 < c["route_scale"] < float("inf"),
        "route_scale {route_scale} must be finite and above 0",
        "use 1.0",
    ),
)

ROUTER_RULES = _SHARED_KEYS_RULES

MOE_RULES: tuple[Rule, ...] = (
    *_SHARED_KEYS_RULES,
    _between("hidden_dim", 1, _WIDEST),
    _between("num_shared_experts", 0, _MOST),
    _between("shared_hidden_dim", 1, _WIDEST),
    _one_of("activation", "swiglu", "gelu"),
    Rule(
        "shared_gate_needs_shared",
        lambda c: c["shared_gate"] and c["num_shared_experts"] == 0,
        "shared_gate must go with shared experts, and num_shared_experts is 0",
        "set num_shared_experts = 1, or shared_gate = false",
    ),
    Rule(
        "capacity_factor_range",
        lambda c: c["capacity_factor"] is not None and not 0.0 < c["capacity_factor"] < 1e6,
        "capacity_factor {capacity_factor} must be above 0",
        "use 1.25, or leave it empty to drop nothing",
    ),
    _one_of("drop_policy", "position", "probability"),
    _one_of("aux", "return", "attach", "none"),
    _one_of("aux_scope", "sequence", "micro_batch", "global_batch", "global_batch_lagged"),
    *(
        _not_negative(n)
        for n in ("aux_loss_weight", "sequence_loss_weight", "z_loss_weight", "bias_update_rate")
    ),
    Rule(
        "aux_none_has_no_weights",
        lambda c: (
            c["aux"] == "none"
            and (c["aux_loss_weight"] or c["sequence_loss_weight"] or c["z_loss_weight"])
        ),
        "aux 'none' must go without loss weights (aux_loss_weight {aux_loss_weight}, "
        "sequence_loss_weight {sequence_loss_weight}, z_loss_weight {z_loss_weight})",
        "use aux = 'return' or 'attach', or set the weights to 0",
    ),
    _one_of("bias_schedule", "constant", "cosine", "linear_warmup"),
    _one_of("backend", "auto", "grouped_mm", "loop", "batched", "float8"),
)

CAPABILITIES: tuple[Rule, ...] = MOE_RULES


@dataclass(frozen=True)
class RouterConfig:
    """Shape and options of a router. Raises ValueError listing every broken rule, one per line.

    RouterConfig(dim=512, num_experts=64, name="sigmoid_topk", top_k=6)
    """

    dim: int = field(metadata={"help": "width of a token"})
    num_experts: int = field(metadata={"help": "experts to choose from"})
    name: str = _field("softmax_topk", "registered router, or module:attribute")
    top_k: int = _field(2, "experts per token")
    normalize: Literal["after_top_k", "before_top_k"] = _field(
        "after_top_k", "weights of the chosen experts sum to 1, or keep their value among all"
    )
    num_groups: int = _field(1, "groups of neighbouring experts; 1: no limit")
    top_groups: int = _field(1, "groups that a token may choose experts from")
    group_score: Literal["top2_sum", "max"] = _field(
        "top2_sum", "what ranks groups: their two best experts together, or the best one"
    )
    route_scale: float = _field(1.0, "factor on the weights of the chosen experts")
    expert_bias: bool = _field(False, "buffer added to the scores for selection only")

    def __post_init__(self) -> None:
        check_types(self, "router")
        check(vars(self), ROUTER_RULES, "router")


@dataclass(frozen=True)
class MoEConfig:
    """Shape and options of a mixture-of-experts layer.

    Raises ValueError listing every broken rule, one per line.

        MoEConfig(dim=512, hidden_dim=1024, num_experts=8, top_k=2)
    """

    dim: int = field(metadata={"help": "width of a token"})
    hidden_dim: int = field(metadata={"help": "width inside one expert"})
    num_experts: int = field(metadata={"help": "routed experts"})
    top_k: int = _field(2, "experts per token")
    router: str = _field("softmax_topk", "registered router, or module:attribute")
    normalize: Literal["after_top_k", "before_top_k"] = _field(
        "after_top_k", "weights of the chosen experts sum to 1, or keep their value among all"
    )
    num_groups: int = _field(1, "groups of neighbouring experts; 1: no limit")
    top_groups: int = _field(1, "groups that a token may choose experts from")
    group_score: Literal["top2_sum", "max"] = _field(
        "top2_sum", "what ranks groups: their two best experts together, or the best one"
    )
    route_scale: float = _field(1.0, "factor on the weights of the chosen experts")
    expert_bias: bool = _field(
        False, "selection bias without balancing; bias_update_rate brings its own"
    )
    activation: Literal["swiglu", "gelu"] = _field("swiglu", "kind of expert")
    bias: bool = _field(False, "biases in the experts' projections")
    num_shared_experts: int = _field(0, "experts that see every token")
    shared_hidden_dim: int | None = _field(
        None, "width inside one shared expert; empty: hidden_dim"
    )
    shared_gate: bool = _field(False, "a sigmoid of the token scales the shared output (Qwen2-MoE)")
    capacity_factor: float | None = _field(
        None, "rows an expert takes at most in training, over its even share; empty: drop nothing"
    )
    drop_policy: Literal["position", "probability"] = _field(
        "position", "who stays when an expert is full: earlier tokens, or likelier ones"
    )
    aux: Literal["return", "attach", "none"] = _field(
        "return", "router losses: handed to the caller, or added to the gradient"
    )
    aux_loss_weight: float = _field(0.0, "weight of the balance loss")
    aux_scope: Literal["sequence", "micro_batch", "global_batch", "global_batch_lagged"] = _field(
        "micro_batch", "over which tokens the balance loss counts"
    )
    sequence_loss_weight: float = _field(0.0, "weight of DeepSeek-V3's loss per sequence")
    z_loss_weight: float = _field(0.0, "weight of the squared log-sum-exp of the logits")
    bias_update_rate: float = _field(0.0, "step of the loss-free bias; 0: no bias")
    bias_center: bool = _field(False, "keep the mean of the bias at 0")
    bias_schedule: Literal["constant", "cosine", "linear_warmup"] = _field(
        "constant", "course of bias_update_rate over training"
    )
    backend: Literal["auto", "grouped_mm", "loop", "batched", "float8"] = _field(
        "auto", "how the experts' matrix products are computed"
    )

    def __post_init__(self) -> None:
        check_types(self, "moe")
        check(vars(self), MOE_RULES, "moe")

    @property
    def router_config(self) -> RouterConfig:
        """The router's part."""
        same = {f.name for f in fields(RouterConfig)} - {"name", "expert_bias"}
        return RouterConfig(
            name=self.router,
            expert_bias=self.expert_bias or self.bias_update_rate > 0.0,
            **{name: getattr(self, name) for name in same},
        )

    @property
    def resolved_shared_hidden_dim(self) -> int:
        """Width inside all shared experts together."""
        return self.num_shared_experts * (self.shared_hidden_dim or self.hidden_dim)
