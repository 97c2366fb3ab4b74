"""Lion against float64 by hand and against lion-pytorch, its mask and its state."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from optim_nets import DECAYED, Small, assert_resumes, assert_same_weights, error, run
from torch import Tensor, nn

from forge_core import Lion, OptimizerConfig, build_optimizer
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

Gradients = list[dict[str, Tensor]]


def recorded(model: nn.Module, steps: int, seed: int = 1) -> Gradients:
    """Elements of size 0.5 to 2: a sign near zero is rounding, on which no two correct programs agree."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            n: (0.5 + 1.5 * torch.rand(p.shape, generator=generator))
            * torch.randn(p.shape, generator=generator).sign()
            for n, p in model.named_parameters()
        }
        for _ in range(steps)
    ]


def by_hand(model: nn.Module, gradients: Gradients, config: OptimizerConfig) -> dict[str, Tensor]:
    """The paper's Program 1 in float64."""
    found = {}
    b1, b2 = config.resolved_betas
    for name, parameter in model.named_parameters():
        w, m = parameter.detach().double(), torch.zeros(parameter.shape, dtype=torch.float64)
        decay = config.weight_decay if name in DECAYED else 0.0
        for step in gradients:
            g = step[name].double()
            w = w - config.lr * (torch.sign(b1 * m + (1 - b1) * g) + decay * w)
            m = b2 * m + (1 - b2) * g
        found[name], found[name + "/m"] = w, m
    return found


def test_twelve_steps_equal_float64() -> None:
    model, config = Small(), OptimizerConfig("lion", lr=0.01, weight_decay=0.3)
    assert config.resolved_betas == (0.9, 0.99)
    gradients = recorded(model, 12)
    wanted = by_hand(model, gradients, config)
    optimizer = build_optimizer(model, config)
    assert isinstance(optimizer, Lion)
    run(model, optimizer, gradients)
    state = optimizer.named_state()
    for name, parameter in model.named_parameters():
        assert error(parameter.detach(), wanted[name]) <= 1e-6, name
        assert error(state[name]["exp_avg"], wanted[name + "/m"]) <= 1e-6, name


def test_twelve_steps_equal_lion_pytorch() -> None:
    theirs = pytest.importorskip("lion_pytorch")
    mine, other = Small(), Small()
    config = OptimizerConfig("lion", lr=0.01, betas=(0.8, 0.95), weight_decay=0.3)
    gradients = recorded(mine, 12)
    reference = theirs.Lion(
        [
            {
                "params": [p for n, p in other.named_parameters() if n in DECAYED],
                "weight_decay": 0.3,
            },
            {
                "params": [p for n, p in other.named_parameters() if n not in DECAYED],
                "weight_decay": 0.0,
            },
        ],
        lr=0.01,
        betas=(0.8, 0.95),
    )
    run(mine, build_optimizer(mine, config), gradients)
    run(other, reference, gradients)
    for one, two in zip(mine.parameters(), other.parameters(), strict=True):
        assert error(one.detach(), two.detach()) <= 1e-6


def test_a_masked_step_changes_nothing_and_an_unmasked_one_is_bit_equal() -> None:
    model, twin = Small(), Small()
    config = OptimizerConfig("lion", lr=0.1, weight_decay=0.5)
    masked, plain = build_optimizer(model, config), build_optimizer(twin, config)
    for step in recorded(model, 3):
        bad = {n: torch.full_like(g, math.nan) for n, g in step.items()}
        for gradients, skip in ((step, 0.0), (bad, 1.0)):
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name].clone()
            masked.step(skip=torch.tensor(skip))
        run(twin, plain, [step])
    assert_same_weights(model, twin)
    for name, slots in plain.named_state().items():
        assert torch.equal(masked.named_state()[name]["exp_avg"], slots["exp_avg"])


def test_F32_after_a_load_the_steps_are_bit_equal() -> None:
    straight, resumed = Small(), Small()
    gradients = recorded(straight, 6)
    config = OptimizerConfig("lion")
    optimizer, other = build_optimizer(straight, config), build_optimizer(resumed, config)
    assert {tuple(slots) for slots in other.named_state().values()} == {("exp_avg",)}
    run(straight, optimizer, gradients[:3])
    assert_resumes(straight, optimizer, resumed, other, gradients[3:])


def test_gradients_of_another_memory_order() -> None:
    model, twin = Small(), Small()
    config = OptimizerConfig("lion", lr=0.1)
    mine, plain = build_optimizer(model, config), build_optimizer(twin, config)
    gradient = recorded(model, 1)[0]["table"]
    model.table.grad, twin.table.grad = gradient.T.contiguous().T, gradient
    mine.step()
    plain.step()
    assert torch.equal(model.table, twin.table)


def test_keys_of_another_optimizer_are_rejected() -> None:
    with rejects("eps", 1e-6, "foreign", where="'muon'"):
        OptimizerConfig("lion", eps=1e-6)
    assert OptimizerConfig("lion", betas=(0.5, 0.6)).betas == (0.5, 0.6)
    assert OptimizerConfig().resolved_betas == (0.9, 0.95)
    assert OptimizerConfig("torch.optim:Adam").resolved_betas == (0.9, 0.95)


def test_a_default_is_not_stored_as_if_it_were_given() -> None:
    """Else a configuration that was written and read under another name keeps the decays of the first."""
    adamw = OptimizerConfig()
    assert adamw.betas is None
    assert replace(adamw, name="lion").resolved_betas == (0.9, 0.99)
