"""Configuration of optimizers and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from forge_core._config import (
    foreign_keys,
    foreign_table,
    is_finite,
    is_size,
    raise_problems,
    setting,
)

_BETAS = {
    "adamw": (0.9, 0.95),
    "lion": (0.9, 0.99),
    "muon": (0.9, 0.95),
    "schedule_free_adamw": (0.9, 0.999),
}
#: Keys of [optimizer] that not all built-in optimizers read; parts from outside are asked as they are built.
_READERS = {"eps": ("adamw", "muon", "schedule_free_adamw")}
#: Tables of [optimizer] that one optimizer alone reads.
_TABLES = {"muon": "muon", "schedule_free": "schedule_free_adamw"}


@dataclass(frozen=True)
class OptimizerGroupConfig:
    """Parameters by name, with a learning rate and weight decay of their own.

    `OptimizerGroupConfig(("*.embedding.*", "lm_head.*"), lr_multiplier=0.1, weight_decay=0.0)`
    """

    patterns: tuple[str, ...] = field(
        metadata={"help": "full names of parameters, as in fnmatch: 'vision.*', '*.norm.weight'"}
    )
    lr_multiplier: float = setting(
        1.0, "times optimizer.lr and the schedule; 0 freezes: no gradient, no decay, no change"
    )
    weight_decay: float | None = setting(
        None, "of all parameters of the group (default: optimizer.weight_decay, of matrices alone)"
    )
    muon: bool | None = setting(
        None,
        "whether Muon updates the group's matrices, else AdamW (default: matrices of blocks, no embedding)",
    )

    def __post_init__(self) -> None:
        raise_problems("group", _group_problems(self))


@dataclass(frozen=True)
class MuonConfig:
    """Settings of Muon beside lr and weight_decay: `MuonConfig(momentum=0.9, adjust="original")`.

    betas and eps of the optimizer are those of AdamW, which updates the parameters that are not Muon's.
    """

    momentum: float = setting(0.95, "decay per step of the average of gradients")
    nesterov: bool = setting(True, "orthogonalise the average one step ahead")
    ns_steps: int = setting(5, "Newton-Schulz iterations in an update")
    ns_dtype: Literal["bf16", "fp32"] = setting(
        "bf16", "dtype of the Newton-Schulz iterations, and of what ranks exchange for them"
    )
    adjust: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw",
        "size of an update: of AdamW's size, so its lr fits, or Keller Jordan's, for lr 0.02 or so",
    )
    adamw_lr_multiplier: float = setting(
        1.0, "lr of the parameters that are AdamW's, as a part of lr"
    )

    def __post_init__(self) -> None:
        raise_problems("muon", _muon_problems(self))


@dataclass(frozen=True)
class ScheduleFreeConfig:
    """The average of schedule-free AdamW: `ScheduleFreeConfig(r=0.0, weight_lr_power=2.0)`."""

    r: float = setting(0.0, "step t weighs t ** r in the average; more than 0 favours late steps")
    weight_lr_power: float = setting(
        2.0,
        "and its learning rate to this power, so that a warm-up weighs less; 0: all weigh the same",
    )

    def __post_init__(self) -> None:
        raise_problems("schedule_free", _schedule_free_problems(self))


@dataclass(frozen=True)
class EMAConfig:
    """An exponential moving average of the weights: `EMAConfig(decay=0.999)`."""

    decay: float | None = setting(
        None,
        "part of the average that stays in each step; the average is evaluated and saved in place of the weights, "
        "which the optimizer's state keeps (default: no average)",
    )

    def __post_init__(self) -> None:
        raise_problems("ema", _ema_problems(self))


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of an optimizer; a ValueError lists every one that cannot be."""

    name: str = setting(
        "adamw",
        "optimizer: adamw, lion, muon, schedule_free_adamw, an entry point of forge.optimizers, or module:attr",
    )
    lr: float = setting(3e-4, "peak learning rate, which the schedule multiplies")
    betas: tuple[float, float] | None = setting(
        None,
        "decay per step of the averages of gradient and squared gradient; lion: of update and momentum; "
        "schedule_free_adamw: part of the average in the training point, and of squares (default: 0.9, 0.95; lion: "
        "0.9, 0.99; schedule_free_adamw: 0.9, 0.999)",
    )
    eps: float = setting(
        1e-8, "adamw, muon, schedule_free_adamw: added to the root of the averaged squared gradient"
    )
    weight_decay: float = setting(
        0.1, "decoupled weight decay, times lr, of parameters with two dims or more"
    )
    state_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "dtype in which the averages of gradients and squares are stored; bf16: computed in fp32 and rounded "
        "stochastically, half the memory",
    )
    muon: MuonConfig = field(
        default_factory=MuonConfig, metadata={"help": "settings of Muon alone"}
    )
    schedule_free: ScheduleFreeConfig = field(
        default_factory=ScheduleFreeConfig, metadata={"help": "the average of schedule_free_adamw"}
    )
    ema: EMAConfig = field(
        default_factory=EMAConfig, metadata={"help": "an average of the weights, of any optimizer"}
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
        raise_problems("optimizer", _optimizer_problems(self))

    @property
    def resolved_betas(self) -> tuple[float, float]:
        """Both betas: as given, or of the optimizer's name."""
        return _BETAS.get(self.name, _BETAS["adamw"]) if self.betas is None else self.betas


@dataclass(frozen=True)
class WSDConfig:
    """The decay at the end of a warmup-stable-decay schedule: `WSDConfig(decay_steps=2000, decay="linear")`."""

    decay_steps: int | None = setting(
        None,
        "last steps of the run, over which the rate falls (default: decay_fraction of the run)",
    )
    decay_fraction: float = setting(
        0.2, "part of the run over which the rate falls, rounded to whole steps, at least one"
    )
    decay: Literal["cosine", "linear", "sqrt"] = setting(
        "sqrt", "shape of the fall; sqrt is 1 - sqrt(x), of Haegele et al. 2024"
    )

    def __post_init__(self) -> None:
        raise_problems("wsd", _wsd_problems(self))


@dataclass(frozen=True)
class ScheduleConfig:
    """Settings of a learning-rate schedule; a ValueError lists every one that cannot be."""

    name: str = setting(
        "cosine",
        "schedule: cosine, linear, wsd, rex, inverse_sqrt, constant, none, an entry point of forge.schedules, or "
        "module:attr",
    )
    warmup_steps: int = setting(
        0, "steps of linear warm-up; step 1 has 1/warmup_steps of the peak rate"
    )
    min_lr_ratio: float = setting(
        0.1, "last learning rate of cosine, linear, wsd and rex, as a part of the peak rate"
    )
    wsd: WSDConfig = field(
        default_factory=WSDConfig, metadata={"help": "the decay of warmup-stable-decay"}
    )
    options: dict[str, Any] = field(
        default_factory=dict,
        hash=False,
        metadata={"help": "keyword arguments of a schedule that is not built in"},
    )

    def __post_init__(self) -> None:
        raise_problems("schedule", _schedule_problems(self))


_DECAYS = get_args(get_type_hints(WSDConfig)["decay"])
_NO_FLOOR = ("constant", "inverse_sqrt", "none")


def _group_problems(c: OptimizerGroupConfig) -> Iterator[str]:
    if isinstance(c.patterns, str) or not c.patterns or not all(c.patterns):
        yield (
            f"patterns {c.patterns!r} must be a list of one or more names; use ['vision.*'] for all below a "
            "module vision"
        )
    if not 0.0 <= c.lr_multiplier < math.inf:
        yield (
            f"lr_multiplier {c.lr_multiplier} must be a finite number of at least 0; use 0.1 for a tenth of the "
            "rate, or 0 to freeze the group"
        )
    if c.weight_decay is not None:
        yield from _weight_decay_problems(c.weight_decay)


def _weight_decay_problems(value: float) -> Iterator[str]:
    if not 0.0 <= value < math.inf:
        yield f"weight_decay {value} must not be negative; use 0.1, or 0 to switch it off"


def _optimizer_problems(c: OptimizerConfig) -> Iterator[str]:
    if not c.name:
        yield f"name {c.name!r} is empty; use adamw or an import path module:attr"
    if not 0.0 < c.lr < math.inf:
        yield f"lr {c.lr} must be a positive number; use 3e-4 or so"
    if c.betas is not None and not _are_betas(c.betas):
        yield f"betas {c.betas!r} must be two numbers in [0, 1); use 0.9 and 0.95"
    if not 0.0 < c.eps < math.inf:
        yield (
            f"eps {c.eps} must be a positive number, or a zero gradient divides by zero; use 1e-8"
        )
    yield from _weight_decay_problems(c.weight_decay)
    if c.ema.decay is not None and c.name == "schedule_free_adamw":
        yield f"ema.decay {c.ema.decay} cannot go with {c.name!r}, which has an average of its own; leave it out"
    allowed = get_args(get_type_hints(OptimizerConfig)["state_dtype"])
    if c.state_dtype not in allowed:
        yield f"state_dtype {c.state_dtype!r} must be {' or '.join(allowed)}; use fp32"
    yield from foreign_keys(c, _READERS, tuple(_BETAS))
    for table, reader in _TABLES.items():
        yield from foreign_table(c, table, reader)
    for name, group in c.groups.items():
        if c.name != "muon" and group.muon is not None:
            yield (
                f"groups.{name}.muon {group.muon} is a key of name 'muon', and name is {c.name!r}; remove it, or use "
                "muon"
            )


def _are_betas(value: object) -> bool:
    """Whether `value` is two decays: what every built-in optimizer reads."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return all(is_finite(beta) and 0.0 <= beta < 1.0 for beta in value)


def _muon_problems(c: MuonConfig) -> Iterator[str]:
    if not 0.0 <= c.momentum < 1.0:
        yield f"momentum {c.momentum} must be in [0, 1); use 0.95"
    if not is_size(c.ns_steps, 99):
        yield f"ns_steps {c.ns_steps!r} must be a whole number from 1 to 99; use 5"
    for key in ("ns_dtype", "adjust"):
        allowed = get_args(get_type_hints(MuonConfig)[key])
        if getattr(c, key) not in allowed:
            yield (
                f"{key} {getattr(c, key)!r} must be {' or '.join(allowed)}; use {getattr(MuonConfig, key)}"
            )
    if not 0.0 < c.adamw_lr_multiplier < math.inf:
        yield f"adamw_lr_multiplier {c.adamw_lr_multiplier} must be a positive number; use 1.0"


def _ema_problems(c: EMAConfig) -> Iterator[str]:
    if c.decay is not None and not 0.0 < c.decay < 1.0:
        yield f"decay {c.decay} must be above 0 and below 1; use 0.999, or none for no average"


def _schedule_free_problems(c: ScheduleFreeConfig) -> Iterator[str]:
    for key, value in vars(c).items():
        if not 0.0 <= value < math.inf:
            yield f"{key} {value} must be a finite number of at least 0; use {getattr(type(c), key)}"


def _wsd_problems(c: WSDConfig) -> Iterator[str]:
    if c.decay_steps is not None and c.decay_steps < 1:
        yield f"decay_steps {c.decay_steps} must be at least 1; use a fifth of the run"
    if not 0.0 < c.decay_fraction <= 1.0:
        yield f"decay_fraction {c.decay_fraction} must be above 0 and at most 1; use 0.2"
    if c.decay_steps is not None and c.decay_fraction != WSDConfig.decay_fraction:
        yield (
            f"decay_steps {c.decay_steps} and decay_fraction {c.decay_fraction} say the same thing; remove one"
        )
    if c.decay not in _DECAYS:
        yield f"decay {c.decay!r} must be one of {', '.join(_DECAYS)}; use sqrt"


def _schedule_problems(c: ScheduleConfig) -> Iterator[str]:
    if not c.name:
        yield f"name {c.name!r} is empty; use cosine, constant or an import path module:attr"
    if c.warmup_steps < 0:
        yield f"warmup_steps {c.warmup_steps} must not be negative; use 0 for none"
    if not 0.0 <= c.min_lr_ratio <= 1.0:
        yield f"min_lr_ratio {c.min_lr_ratio} must be in [0, 1]; use 0.1"
    if c.name == "none" and c.warmup_steps > 0:
        yield (
            f"warmup_steps {c.warmup_steps} is no key of name 'none', whose rate is the peak from the first step; "
            "remove it, or use constant"
        )
    # defaults stand in every configuration that was ever written, so they pass under any name
    if c.name in _NO_FLOOR and c.min_lr_ratio != ScheduleConfig.min_lr_ratio:
        yield (
            f"min_lr_ratio {c.min_lr_ratio} is a key of names cosine, linear, wsd and rex, and name is {c.name!r}; "
            "remove it, or use one of them"
        )
    yield from foreign_table(c, "wsd", "wsd")
