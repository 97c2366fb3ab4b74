"""Optimizers with named state, and learning-rate schedules."""

from forge_core.optim.adamw import AdamW
from forge_core.optim.base import IdleOptimizer, NamedOptimizer, trains_nothing
from forge_core.optim.build import (
    OPTIMIZERS,
    build_optimizer,
    changes_of_older_run,
    check_optimizer,
    check_parameters,
    describe_parameters,
    find_optimizer,
    freeze_groups,
    optimizer_problems,
    saves_by_name,
    schedule_warnings,
)
from forge_core.optim.config import (
    HALF_STATE,
    EMAConfig,
    MuonConfig,
    OptimizerConfig,
    OptimizerGroupConfig,
    ScheduleConfig,
    ScheduleFreeConfig,
    WSDConfig,
)
from forge_core.optim.ema import EMA
from forge_core.optim.groups import (
    check_groups_train,
    groups_of_part,
    hidden_matrices,
    match_groups,
    param_groups,
    parameter_groups,
    set_lr,
    set_multipliers,
)
from forge_core.optim.lion import Lion
from forge_core.optim.muon import Muon
from forge_core.optim.rates_picture import draw_rates
from forge_core.optim.schedule import SCHEDULES, build_schedule, check_schedule
from forge_core.optim.schedule_free import ScheduleFreeAdamW
from forge_core.optim.stages import (
    StageConfig,
    Stages,
    check_something_trains,
    freeze_never_trained,
    in_order,
    multipliers_at,
    never_trained,
    stage_problems,
)

__all__ = [
    "EMA",
    "HALF_STATE",
    "OPTIMIZERS",
    "SCHEDULES",
    "AdamW",
    "EMAConfig",
    "IdleOptimizer",
    "Lion",
    "Muon",
    "MuonConfig",
    "NamedOptimizer",
    "OptimizerConfig",
    "OptimizerGroupConfig",
    "ScheduleConfig",
    "ScheduleFreeAdamW",
    "ScheduleFreeConfig",
    "StageConfig",
    "Stages",
    "WSDConfig",
    "build_optimizer",
    "build_schedule",
    "changes_of_older_run",
    "check_groups_train",
    "check_optimizer",
    "check_parameters",
    "check_schedule",
    "check_something_trains",
    "describe_parameters",
    "draw_rates",
    "find_optimizer",
    "freeze_groups",
    "freeze_never_trained",
    "groups_of_part",
    "hidden_matrices",
    "in_order",
    "match_groups",
    "multipliers_at",
    "never_trained",
    "optimizer_problems",
    "param_groups",
    "parameter_groups",
    "saves_by_name",
    "schedule_warnings",
    "set_lr",
    "set_multipliers",
    "stage_problems",
    "trains_nothing",
]
