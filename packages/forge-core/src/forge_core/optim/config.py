"""Configuration of optimizers and learning-rate schedules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

import torch

from forge_core._config import (
    choice_problems,
    foreign,
    foreign_keys,
    foreign_table,
    is_finite,
    is_size,
)
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems

#: Optimizers that keep their state in bf16, rounded stochastically.
HALF_STATE = ("adamw", "lion", "muon", "schedule_free_adamw")
#: Averages of gradients and squares that an optimizer keeps; others, and the rest of Muon's parameters, count as AdamW.
_AVERAGES = {"lion": 1, "schedule_free_adamw": 1, "sgd": 1}
#: Dtypes by the names that configurations use.
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_BETAS = {
    "adamw": (0.9, 0.95),
    "lion": (0.9, 0.99),
    "muon": (0.9, 0.95),
    "schedule_free_adamw": (0.9, 0.999),
}
#: Keys of [optimizer] that not all built-in optimizers read; optimizers from other packages are checked when built.
_READERS = {"eps": ("adamw", "muon", "schedule_free_adamw")}
#: Tables of [optimizer] that only one optimizer reads.
_TABLES = {"muon": "muon", "schedule_free": "schedule_free_adamw"}


@dataclass(frozen=True)
class OptimizerGroupConfig:
    """Parameters by name, with a learning rate and weight decay of their own.

    `OptimizerGroupConfig(("*.embedding.*", "lm_head.*"), lr_multiplier=0.1, weight_decay=0.0)`
    """

    patterns: tuple[str, ...] = dataclasses.field(
        metadata={"help": "full names of parameters, as in fnmatch: 'vision.*', '*.norm.weight'"}
    )
    lr_multiplier: float = field(
        1.0, "times optimizer.lr and the schedule; 0 freezes: no gradient, no decay, no change"
    )
    weight_decay: float | None = field(
        None,
        "decoupled weight decay, times lr, of all parameters of the group (default: optimizer.weight_decay, of matrices only)",
    )
    muon: bool | None = field(
        None,
        "whether Muon updates the group's matrices, else AdamW (default: matrices of blocks, no embedding)",
    )

    def __post_init__(self) -> None:
        raise_problems("group", _group_problems(self))


@dataclass(frozen=True)
class MuonConfig:
    """Settings of Muon next to lr and weight_decay: `MuonConfig(momentum=0.9, adjust="original")`.

    betas and eps of the optimizer are those of AdamW, which updates the parameters that are not Muon's.
    """

    momentum: float = field(0.95, "decay per step of the average of gradients")
    nesterov: bool = field(True, "orthogonalize the average one step ahead")
    ns_steps: int = field(5, "Newton-Schulz iterations in an update")
    ns_dtype: Literal["bf16", "fp32"] = field(
        "bf16", "dtype of the Newton-Schulz iterations, and of what ranks exchange for them"
    )
    adjust: Literal["match_rms_adamw", "original"] = field(
        "match_rms_adamw",
        "size of an update: of AdamW's size, so its lr fits, or Keller Jordan's, for lr 0.02 or so",
    )
    adamw_lr_multiplier: float = field(
        1.0, "lr of the parameters that are AdamW's, as a part of lr"
    )

    def __post_init__(self) -> None:
        raise_problems("muon", _muon_problems(self))


@dataclass(frozen=True)
class ScheduleFreeConfig:
    """The average of schedule-free AdamW: `ScheduleFreeConfig(r=0.0, weight_lr_power=2.0)`."""

    r: float = field(0.0, "step t weighs t ** r in the average; more than 0 favours late steps")
    weight_lr_power: float = field(
        2.0,
        "and its learning rate to this power, so that a warm-up weighs less; 0: all weigh the same",
    )

    def __post_init__(self) -> None:
        raise_problems("schedule_free", _schedule_free_problems(self))


@dataclass(frozen=True)
class EMAConfig:
    """Exponential moving average of the weights: `EMAConfig(decay=0.999)`."""

    decay: float | None = field(
        None,
        "part of the average that stays in each step; the average is evaluated and saved in place of the weights, "
        "which the optimizer's state keeps (default: no average)",
    )

    def __post_init__(self) -> None:
        raise_problems("ema", _ema_problems(self))


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of an optimizer; a ValueError lists every one that cannot be."""

    name: str = field(
        "adamw",
        "optimizer: adamw, lion, muon, schedule_free_adamw, an entry point of forge.optimizers, or module:attr",
    )
    lr: float = field(3e-4, "peak learning rate, which the schedule multiplies")
    betas: tuple[float, float] | None = field(
        None,
        "decay per step of the averages of gradient and squared gradient; lion: of update and momentum; "
        "schedule_free_adamw: part of the average in the training point, and of squares (default: 0.9, 0.95; lion: "
        "0.9, 0.99; schedule_free_adamw: 0.9, 0.999)",
    )
    eps: float = field(
        1e-8, "adamw, muon, schedule_free_adamw: added to the root of the averaged squared gradient"
    )
    weight_decay: float = field(
        0.1, "decoupled weight decay, times lr, of matrices and embeddings, also in stacks"
    )
    state_dtype: Literal["fp32", "bf16"] = field(
        "fp32",
        "dtype in which the averages of gradients and squares are stored; bf16: computed in fp32 and rounded "
        "stochastically, half the memory",
    )
    muon: MuonConfig = field(MuonConfig, "settings of Muon alone")
    schedule_free: ScheduleFreeConfig = field(
        ScheduleFreeConfig, "the average of schedule_free_adamw"
    )
    ema: EMAConfig = field(EMAConfig, "an average of the weights, of any optimizer")
    options: dict[str, Any] = field(dict, "keyword arguments of an optimizer that is not built in")
    groups: dict[str, OptimizerGroupConfig] = field(
        dict, "parameters with settings of their own, by name"
    )

    def __post_init__(self) -> None:
        raise_problems("optimizer", _optimizer_problems(self))

    @property
    def resolved_betas(self) -> tuple[float, float]:
        """Both betas: as given, or of the optimizer's name."""
        return _BETAS.get(self.name, _BETAS["adamw"]) if self.betas is None else self.betas

    def state_bytes(self, weight: float, matrix: bool = False) -> float:
        """Bytes of state of a parameter that has `weight` bytes, and of an average of the weights.

        matrix: of the matrices that Muon trains.
        """
        averages = 1 if matrix else _AVERAGES.get(self.name, 2)
        further = 2 * (self.name == "schedule_free_adamw") + (self.ema.decay is not None)
        return averages * DTYPES[self.state_dtype].itemsize + further * weight


def torch_settings(config: OptimizerConfig) -> dict[str, Any]:
    """The settings that a class of torch optimizers may take, by its names of them."""
    names = ("lr", "eps", "weight_decay", "state_dtype")
    return {"betas": config.resolved_betas, **{name: getattr(config, name) for name in names}}


def class_settings(config: OptimizerConfig) -> dict[str, Any]:
    """The settings that one of Forge's classes may take, by the names of its arguments."""
    tables = {**dataclasses.asdict(config.muon), **dataclasses.asdict(config.schedule_free)}
    tables["adjust_lr_fn"] = tables.pop("adjust")
    return {**torch_settings(config), **tables}


@dataclass(frozen=True)
class WSDConfig:
    """The decay at the end of a warmup-stable-decay schedule: `WSDConfig(decay_steps=2000, decay="linear")`."""

    decay_steps: int | None = field(
        None,
        "last steps of the run, over which the rate falls (default: decay_fraction of the run)",
    )
    decay_fraction: float = field(
        0.2, "part of the run over which the rate falls, rounded to whole steps, at least one"
    )
    decay: Literal["cosine", "linear", "sqrt"] = field(
        "sqrt", "shape of the fall; sqrt is 1 - sqrt(x), of Haegele et al. 2024"
    )

    def __post_init__(self) -> None:
        raise_problems("wsd", _wsd_problems(self))


@dataclass(frozen=True)
class ScheduleConfig:
    """Settings of a learning-rate schedule; a ValueError lists every one that cannot be."""

    name: str = field(
        "cosine",
        "schedule: cosine, linear, wsd, rex, inverse_sqrt, constant, none, an entry point of forge.schedules, or "
        "module:attr",
    )
    warmup_steps: int = field(
        0, "steps of linear warm-up; step 1 has 1/warmup_steps of the peak rate"
    )
    min_lr_ratio: float = field(
        0.1, "last learning rate of cosine, linear, wsd and rex, as a part of the peak rate"
    )
    wsd: WSDConfig = field(WSDConfig, "the decay of warmup-stable-decay")
    options: dict[str, Any] = field(dict, "keyword arguments of a schedule that is not built in")

    def __post_init__(self) -> None:
        raise_problems("schedule", _schedule_problems(self))


_NO_FLOOR = ("constant", "inverse_sqrt", "none")
_FALLING = ("cosine", "linear", "wsd", "rex")


def _group_problems(c: OptimizerGroupConfig) -> Iterator[Problem]:
    if isinstance(c.patterns, str) or not c.patterns or not all(c.patterns):
        fix = "use ['vision.*'] for all below a module vision"
        rule = "must be a list of one or more names"
        yield Problem("patterns", "type", c.patterns, rule, fix)
    if not 0.0 <= c.lr_multiplier < math.inf:
        fix = "use 0.1 for a tenth of the rate, or 0 to freeze the group"
        rule = "must be a finite number of at least 0"
        yield Problem("lr_multiplier", "range", c.lr_multiplier, rule, fix)
    if c.weight_decay is not None:
        yield from _weight_decay_problems(c.weight_decay)


def _weight_decay_problems(value: float) -> Iterator[Problem]:
    if not 0.0 <= value < math.inf:
        fix = "use 0.1, or 0 to switch it off"
        yield Problem("weight_decay", "range", value, "must be at least 0", fix)


def _optimizer_problems(c: OptimizerConfig) -> Iterator[Problem]:
    if not c.name:
        fix = "use adamw or an import path module:attr"
        yield Problem("name", "missing", c.name, "must not be empty", fix)
    if not 0.0 < c.lr < math.inf:
        yield Problem("lr", "range", c.lr, "must be a positive number", "use 3e-4 or so")
    if c.betas is not None and not _are_betas(c.betas):
        yield Problem(
            "betas", "range", c.betas, "must be two numbers in [0, 1)", "use 0.9 and 0.95"
        )
    if not 0.0 < c.eps < math.inf:
        rule = "must be a positive number, or a zero gradient divides by zero"
        yield Problem("eps", "range", c.eps, rule, "use 1e-8")

    yield from _weight_decay_problems(c.weight_decay)
    if c.ema.decay is not None and c.name == "schedule_free_adamw":
        rule = f"cannot go with {c.name!r}, which has an average of its own"
        yield Problem("ema.decay", "excludes", c.ema.decay, rule, "leave it out")

    yield from _literal_problems(c, "state_dtype")
    yield from foreign_keys(c, _READERS, tuple(_BETAS))
    for table, reader in _TABLES.items():
        yield from foreign_table(c, table, reader)
    for name, group in c.groups.items():
        if c.name != "muon" and group.muon is not None:
            yield foreign(c.name, f"groups.{name}.muon", group.muon, ("muon",))


def _literal_problems(config: Any, name: str) -> Iterator[Problem]:
    """The problem of a field whose value is not in its Literal."""
    return choice_problems(config, name, get_args(get_type_hints(type(config))[name]))


def _are_betas(value: object) -> bool:
    """Whether `value` is two decays: what every built-in optimizer reads."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return all(is_finite(beta) and 0.0 <= beta < 1.0 for beta in value)


def _muon_problems(c: MuonConfig) -> Iterator[Problem]:
    if not 0.0 <= c.momentum < 1.0:
        yield Problem("momentum", "range", c.momentum, "must be in [0, 1)", "use 0.95")
    if not is_size(c.ns_steps, 99):
        yield Problem(
            "ns_steps", "range", c.ns_steps, "must be a whole number from 1 to 99", "use 5"
        )
    for key in ("ns_dtype", "adjust"):
        yield from _literal_problems(c, key)
    value = c.adamw_lr_multiplier
    if not 0.0 < value < math.inf:
        yield Problem("adamw_lr_multiplier", "range", value, "must be a positive number", "use 1.0")


def _ema_problems(c: EMAConfig) -> Iterator[Problem]:
    if c.decay is not None and not 0.0 < c.decay < 1.0:
        fix = "use 0.999, or leave it out for no average"
        yield Problem("decay", "range", c.decay, "must be above 0 and below 1", fix)


def _schedule_free_problems(c: ScheduleFreeConfig) -> Iterator[Problem]:
    for key, value in vars(c).items():
        if not 0.0 <= value < math.inf:
            fix = f"use {getattr(type(c), key)}"
            yield Problem(key, "range", value, "must be a finite number of at least 0", fix)


def _wsd_problems(c: WSDConfig) -> Iterator[Problem]:
    steps, fraction = c.decay_steps, c.decay_fraction
    if steps is not None and steps < 1:
        yield Problem("decay_steps", "range", steps, "must be at least 1", "use a fifth of the run")
    if not 0.0 < fraction <= 1.0:
        yield Problem(
            "decay_fraction", "range", fraction, "must be above 0 and at most 1", "use 0.2"
        )
    if steps is not None and fraction != WSDConfig.decay_fraction:
        rule = f"and decay_fraction {fraction} set the same thing"
        yield Problem("decay_steps", "excludes", steps, rule, "remove one")
    yield from _literal_problems(c, "decay")


def _schedule_problems(c: ScheduleConfig) -> Iterator[Problem]:
    """Yield problems of ranges, and of keys that the named schedule does not have."""
    if not c.name:
        fix = "use cosine, constant or an import path module:attr"
        yield Problem("name", "missing", c.name, "must not be empty", fix)
    if c.warmup_steps < 0:
        yield Problem("warmup_steps", "range", c.warmup_steps, "must be at least 0", "use 0")
    if not 0.0 <= c.min_lr_ratio <= 1.0:
        yield Problem("min_lr_ratio", "range", c.min_lr_ratio, "must be in [0, 1]", "use 0.1")
    if c.name == "none" and c.warmup_steps > 0:
        rule = "is not a key of name 'none', whose rate is the peak from the first step"
        fix = "remove it, or use constant"
        yield Problem("warmup_steps", "foreign", c.warmup_steps, rule, fix)
    # defaults stand in every configuration that was ever written, so they pass under any name
    if c.name in _NO_FLOOR and c.min_lr_ratio != ScheduleConfig.min_lr_ratio:
        yield foreign(c.name, "min_lr_ratio", c.min_lr_ratio, _FALLING)
    yield from foreign_table(c, "wsd", "wsd")
