"""What an optimizer and a schedule are made from."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from forge_core._rules import Rule, check


def _field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class OptimizerGroupConfig:
    """Parameters by name, with a learning rate and weight decay of their own.

    `OptimizerGroupConfig(("*.embedding.*", "lm_head.*"), lr_multiplier=0.1, weight_decay=0.0)`
    """

    patterns: tuple[str, ...] = field(
        metadata={"help": "full names of parameters, as in fnmatch: 'vision.*', '*.norm.weight'"}
    )
    lr_multiplier: float = _field(
        1.0, "times optimizer.lr and the schedule; 0 freezes: no gradient, no decay, no change"
    )
    weight_decay: float | None = _field(
        None, "of all parameters of the group (default: optimizer.weight_decay, of matrices alone)"
    )

    def __post_init__(self) -> None:
        check(asdict(self), OPTIMIZER_GROUP_RULES, "group")


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of an optimizer; a ValueError lists every one that cannot be."""

    name: str = _field(
        "adamw", "optimizer: adamw, an entry point of forge.optimizers, or module:attr"
    )
    lr: float = _field(3e-4, "peak learning rate, which the schedule multiplies")
    betas: tuple[float, float] = _field(
        (0.9, 0.95), "decay per step of the averages of gradient and squared gradient"
    )
    eps: float = _field(1e-8, "added to the root of the averaged squared gradient")
    weight_decay: float = _field(
        0.1, "decoupled weight decay, times lr, of parameters with two dims or more"
    )
    options: dict[str, Any] = field(
        default_factory=dict,
        hash=False,
        metadata={"help": "keyword arguments of an optimizer that is not built in"},
    )
    groups: dict[str, OptimizerGroupConfig] = field(
        default_factory=dict,
        hash=False,
        metadata={"help": "parameters with settings of their own, by name"},
    )

    def __post_init__(self) -> None:
        check(asdict(self), OPTIMIZER_RULES, "optimizer")


@dataclass(frozen=True)
class ScheduleConfig:
    """Settings of a learning-rate schedule; a ValueError lists every one that cannot be."""

    name: str = _field(
        "cosine", "schedule: cosine, constant, an entry point of forge.schedules, or module:attr"
    )
    warmup_steps: int = _field(
        0, "steps of linear warm-up; step 1 has 1/warmup_steps of the peak rate"
    )
    min_lr_ratio: float = _field(0.1, "last learning rate of a cosine, as a part of the peak rate")
    options: dict[str, Any] = field(
        default_factory=dict,
        hash=False,
        metadata={"help": "keyword arguments of a schedule that is not built in"},
    )

    def __post_init__(self) -> None:
        check(asdict(self), SCHEDULE_RULES, "schedule")


OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule(
        "optimizer_name",
        lambda c: not c["name"],
        "name {name!r} is empty",
        "use adamw or an import path module:attr",
    ),
    Rule(
        "lr",
        lambda c: not 0.0 < c["lr"] < math.inf,
        "lr {lr} must be a positive number",
        "use 3e-4 or so",
    ),
    Rule(
        "betas",
        lambda c: not all(0.0 <= beta < 1.0 for beta in c["betas"]),
        "betas {betas} must both be in [0, 1)",
        "use 0.9 and 0.95",
    ),
    Rule(
        "eps",
        lambda c: not 0.0 < c["eps"] < math.inf,
        "eps {eps} must be a positive number, or a zero gradient divides by zero",
        "use 1e-8",
    ),
    Rule(
        "weight_decay",
        lambda c: not 0.0 <= c["weight_decay"] < math.inf,
        "weight_decay {weight_decay} must not be negative",
        "use 0.1, or 0 to switch it off",
    ),
)

OPTIMIZER_GROUP_RULES: tuple[Rule, ...] = (
    Rule(
        "group_patterns",
        lambda c: isinstance(c["patterns"], str) or not c["patterns"] or not all(c["patterns"]),
        "patterns {patterns!r} must be a list of one or more names",
        "use ['vision.*'] for all below a module vision",
    ),
    Rule(
        "group_lr_multiplier",
        lambda c: not 0.0 <= c["lr_multiplier"] < math.inf,
        "lr_multiplier {lr_multiplier} must be a finite number of at least 0",
        "use 0.1 for a tenth of the rate, or 0 to freeze the group",
    ),
    Rule(
        "group_weight_decay",
        lambda c: c["weight_decay"] is not None and not 0.0 <= c["weight_decay"] < math.inf,
        "weight_decay {weight_decay} must not be negative",
        "use 0.1, or 0 to switch it off",
    ),
)

SCHEDULE_RULES: tuple[Rule, ...] = (
    Rule(
        "schedule_name",
        lambda c: not c["name"],
        "name {name!r} is empty",
        "use cosine, constant or an import path module:attr",
    ),
    Rule(
        "warmup_steps",
        lambda c: c["warmup_steps"] < 0,
        "warmup_steps {warmup_steps} must not be negative",
        "use 0 for none",
    ),
    Rule(
        "min_lr_ratio",
        lambda c: not 0.0 <= c["min_lr_ratio"] <= 1.0,
        "min_lr_ratio {min_lr_ratio} must be in [0, 1]",
        "use 0.1",
    ),
    Rule(  # its default stands in every configuration that was ever written
        "min_lr_ratio_of_cosine",
        lambda c: c["name"] == "constant" and c["min_lr_ratio"] != ScheduleConfig.min_lr_ratio,
        "min_lr_ratio {min_lr_ratio} is a key of name 'cosine', and name is {name!r}",
        "remove it, or use cosine",
    ),
)
