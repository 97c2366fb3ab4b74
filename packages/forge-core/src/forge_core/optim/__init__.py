"""Optimizers with named state, and learning-rate schedules."""

from forge_core.optim.adamw import AdamW
from forge_core.optim.build import build_optimizer, check_optimizer, find_optimizer
from forge_core.optim.config import (
    OPTIMIZER_RULES,
    SCHEDULE_RULES,
    OptimizerConfig,
    ScheduleConfig,
)
from forge_core.optim.named import set_lr
from forge_core.optim.schedule import build_schedule, check_schedule

__all__ = [
    "OPTIMIZER_RULES",
    "SCHEDULE_RULES",
    "AdamW",
    "OptimizerConfig",
    "ScheduleConfig",
    "build_optimizer",
    "build_schedule",
    "check_optimizer",
    "check_schedule",
    "find_optimizer",
    "set_lr",
]
