"""Schedule-free AdamW against float64 by hand and against the authors' package, its points, mask and state."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from optim_nets import DECAYED, Small, error, load_evaluated, recorded
from torch import Tensor, nn

from forge_core.optim import (
    SCHEDULES,
    OptimizerConfig,
    OptimizerGroupConfig,
    ScheduleConfig,
    ScheduleFreeAdamW,
    ScheduleFreeConfig,
    build_optimizer,
    build_schedule,
    set_multipliers,
)
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

NAME = "schedule_free_adamw"
RATES = [0.01 * min(1.0, (k + 1) / 4) for k in range(12)]  # a warm-up of four steps


def run(model, optimizer, gradients, rates=RATES, skips=()) -> None:
    for number, step in enumerate(gradients):
        for name, parameter in model.named_parameters():
            parameter.grad = step[name].clone()
        optimizer.set_lr(rates[number])
        optimizer.step(skip=torch.tensor(1.0 if number in skips else 0.0))


def by_hand(model, gradients, config, rates=RATES) -> dict[str, tuple[Tensor, Tensor]]:
    """Algorithm 1 of the paper in float64, with the averaging weights of its section 4: {name: (x, y)}."""
    b1, b2 = config.resolved_betas
    own, found = config.schedule_free, {}
    for name, parameter in model.named_parameters():
        x = z = y = parameter.detach().double()
        v, total, highest = torch.zeros_like(x), 0.0, 0.0
        decay = config.weight_decay if name in DECAYED else 0.0
        for t, (step, lr) in enumerate(zip(gradients, rates), 1):
            g = step[name].double()
            v = b2 * v + (1 - b2) * g**2
            z = z - lr * (g / ((v / (1 - b2**t)).sqrt() + config.eps) + decay * y)
            highest = max(highest, lr)
            weight = t**own.r * highest**own.weight_lr_power
            total += weight
            x = (1 - weight / total) * x + weight / total * z
            y = (1 - b1) * z + b1 * x
        found[name] = (x, y)
    return found


@pytest.mark.parametrize(("r", "power"), [(0.0, 2.0), (0.0, 0.0), (2.0, 1.0)])
def test_twelve_steps_equal_float64(r: float, power: float) -> None:
    config = OptimizerConfig(
        NAME, weight_decay=0.3, schedule_free=ScheduleFreeConfig(r=r, weight_lr_power=power)
    )
    assert config.resolved_betas == (0.9, 0.999)
    model = Small()
    gradients = recorded(model, 12)
    rates = [*RATES[:8], *(rate / 3 for rate in RATES[8:])]  # the weight is of the greatest so far
    wanted = by_hand(model, gradients, config, rates)
    optimizer = build_optimizer(model, config)
    assert isinstance(optimizer, ScheduleFreeAdamW)
    run(model, optimizer, gradients, rates)
    for name, parameter in model.named_parameters():
        assert error(parameter.detach(), wanted[name][1]) <= 1e-6, name
    optimizer.eval()
    for name, parameter in model.named_parameters():
        assert error(parameter.detach(), wanted[name][0]) <= 1e-6, name


@pytest.mark.parametrize("schedule", SCHEDULES.built_in)
def test_F198_it_equals_the_authors_package_with_its_rate_set_each_step(schedule: str) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    ours, theirs = Small(), Small()
    gradients = recorded(ours, 12)
    warmup = 0 if schedule == "none" else 4
    floor = {"min_lr_ratio": 0.0} if schedule in ("cosine", "linear", "wsd", "rex") else {}
    factor = build_schedule(ScheduleConfig(schedule, warmup_steps=warmup, **floor), 12)
    rates = [0.01 * factor(step) for step in range(1, 13)]
    mine = build_optimizer(ours, OptimizerConfig(NAME, lr=0.01, weight_decay=0.3))
    run(ours, mine, gradients, rates)
    groups = [
        {"params": [p for n, p in theirs.named_parameters() if n in DECAYED], "weight_decay": 0.3},
        {
            "params": [p for n, p in theirs.named_parameters() if n not in DECAYED],
            "weight_decay": 0.0,
        },
    ]
    reference = schedulefree.AdamWScheduleFree(groups, lr=0.01)
    reference.train()
    for step, rate in zip(gradients, rates):
        for group in reference.param_groups:
            group["lr"] = rate
        for name, parameter in theirs.named_parameters():
            parameter.grad = step[name].clone()
        reference.step()
    for _ in ("y", "x"):
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert error(p.detach(), q.detach()) <= 1e-6, name
        mine.eval()
        reference.eval()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_look_at_the_average_changes_no_training() -> None:
    model, other = Small(), Small()
    gradients = recorded(model, 6)
    plain, looked = (build_optimizer(m, OptimizerConfig(NAME)) for m in (model, other))
    for number, step in enumerate(gradients):
        run(model, plain, [step], [RATES[number]])
        run(other, looked, [step], [RATES[number]])
        training = weights(other)
        looked.eval()
        if number > 1:  # after the first step x = z = y
            assert not same(weights(other), training)
        looked.eval()
        looked.train()
        looked.train()
        assert same(weights(other), training)
    assert same(weights(model), weights(other))


def test_named_state_goes_with_the_average_and_back() -> None:
    model, other = Small(), Small()
    gradients = recorded(model, 6)
    optimizer = build_optimizer(model, OptimizerConfig(NAME))
    with pytest.raises(RuntimeError, match=r"\.eval\(\)"):
        optimizer.named_state()
    run(model, optimizer, gradients[:3])
    optimizer.eval()
    state = copy.deepcopy(optimizer.named_state())
    assert set(state["table"]) == {"z", "exp_avg_sq", "step", "lr_max", "weight_sum"}
    average = weights(model)
    optimizer.train()
    second = build_optimizer(other, OptimizerConfig(NAME))
    with pytest.raises(RuntimeError, match=r"\.eval\(\)"):
        second.load_named_state(state)
    load_evaluated(other, second, average, state)
    assert same(weights(model), weights(other))
    for m, o in ((model, optimizer), (other, second)):
        run(m, o, gradients[3:], RATES[3:])
        o.eval()
    assert same(weights(model), weights(other))


def test_torchs_form_of_state_holds_both_points() -> None:
    model = Small()
    gradients = recorded(model, 6)
    optimizer = build_optimizer(model, OptimizerConfig(NAME))
    run(model, optimizer, gradients[:3])
    other = copy.deepcopy(model)
    second = build_optimizer(other, OptimizerConfig(NAME))
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, second)):
        run(m, o, gradients[3:], RATES[3:])
        o.eval()
    assert same(weights(model), weights(other))


def test_weights_that_come_after_it_was_built_are_where_both_points_begin() -> None:
    torch.manual_seed(3)
    values = [torch.randn_like(p) for p in Small().parameters()]
    results = []
    for late in (False, True, "eval"):
        model = Small()
        optimizer = build_optimizer(model, OptimizerConfig(NAME)) if late else None
        if late == "eval":
            optimizer.eval()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values):
                parameter.copy_(value)
        optimizer = optimizer or build_optimizer(model, OptimizerConfig(NAME))
        optimizer.train()
        run(model, optimizer, recorded(model, 3))
        optimizer.eval()
        results.append(weights(model))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("first", [0, 2])
def test_a_skipped_step_changes_nothing(first: int, value: float) -> None:
    model, other = Small(), Small()
    gradients = recorded(model, 6)
    bad = [{n: g * value for n, g in gradients[0].items()}]
    optimizers = [build_optimizer(m, OptimizerConfig(NAME)) for m in (model, other)]
    run(model, optimizers[0], gradients[:first])
    run(other, optimizers[1], gradients[:first])
    run(other, optimizers[1], bad, [99.0], skips=(0,))
    assert same(weights(model), weights(other))
    run(model, optimizers[0], gradients[first:], RATES[first:])
    run(other, optimizers[1], gradients[first:], RATES[first:])
    for optimizer in optimizers:
        optimizer.eval()
    assert same(weights(model), weights(other))
    assert optimizers[0].named_state()["table"]["step"] == 6.0
    assert optimizers[1].named_state()["table"]["lr_max"] == pytest.approx(RATES[5])


def test_F32_nothing_is_divided_by_zero() -> None:
    for power in (0.0, 2.0):
        model = Small()
        start = weights(model)
        own = ScheduleFreeConfig(weight_lr_power=power)
        optimizer = build_optimizer(model, OptimizerConfig(NAME, schedule_free=own))
        zeros = [{n: torch.zeros_like(p) for n, p in model.named_parameters()}]
        run(model, optimizer, zeros, [0.0])  # no rate, no gradient
        optimizer.eval()
        assert same(weights(model), start)
        optimizer.train()
        run(model, optimizer, recorded(model, 2))
        optimizer.eval()
        assert all(w.isfinite().all() for w in weights(model))
        assert not same(weights(model), start)


def test_a_group_that_is_frozen_keeps_both_points() -> None:
    model = Small()
    groups = {"tables": OptimizerGroupConfig(("table",), lr_multiplier=0.5)}
    optimizer = build_optimizer(model, OptimizerConfig(NAME, groups=groups))
    run(model, optimizer, recorded(model, 3))
    before = model.table.detach().clone()
    set_multipliers(optimizer, {"tables": 0.0})
    for parameter in (model.experts, model.norm.weight, model.norm.bias):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(model.table, before)
    optimizer.eval()
    assert not torch.equal(model.table, before)
    state = optimizer.named_state()
    assert (state["table"]["step"], state["experts"]["step"]) == (3.0, 4.0)
    assert state["table"]["lr_max"] == pytest.approx(0.5 * RATES[2])


def test_a_step_at_the_average_is_rejected() -> None:
    model = Small()
    optimizer = build_optimizer(model, OptimizerConfig(NAME))
    optimizer.eval()
    with pytest.raises(RuntimeError, match=r"\.train\(\)"):
        run(model, optimizer, recorded(model, 1))


def test_impossible_arguments_are_rejected() -> None:
    for key, value in (("r", -1.0), ("weight_lr_power", math.inf)):
        with rejects(key, value, "range"):
            ScheduleFreeConfig(**{key: value})
    with rejects("schedule_free.r", 1.0, "foreign"):
        OptimizerConfig("adamw", schedule_free=ScheduleFreeConfig(r=1.0))


def test_a_copy_goes_on_with_the_same_bits() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = build_optimizer(model, OptimizerConfig("schedule_free_adamw"))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    twin, other = copy.deepcopy((model, optimizer))
    for one, its in ((model, optimizer), (twin, other)):
        one(torch.ones(2, 4)).square().sum().backward()
        its.step()
    assert torch.equal(model.weight, twin.weight)
