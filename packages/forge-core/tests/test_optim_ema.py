"""The average of weights equals its formula in float64, through masks, looks at it and a resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_nets import load_evaluated
from torch import Tensor, nn

from forge_core import EMA, AdamW, EMAConfig, OptimizerConfig, build_optimizer, param_groups
from forge_core.optim import check_optimizer
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

DECAY = 0.8


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def _optimizer(model: nn.Module, decay: float | None = DECAY) -> Any:
    return build_optimizer(model, OptimizerConfig(lr=0.05, ema=EMAConfig(decay)))


def _step(model: nn.Module, optimizer: Any, number: int, skip: Tensor | None = None) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step(skip=skip)


def _values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_it_equals_its_formula_in_float64() -> None:
    plain, model = _model(), _model()
    reference = _optimizer(plain, None)
    assert isinstance(reference, AdamW)
    optimizer = _optimizer(model)
    averages: list[Tensor] = []
    for number in range(30):
        _step(plain, reference, number)
        _step(model, optimizer, number)
        weights = [p.detach().double() for p in plain.parameters()]
        d = min(DECAY, number / (number + 9))
        averages = [d * a + (1 - d) * w for a, w in zip(averages or weights, weights)]
    assert all(map(torch.equal, _values(model), _values(plain)))
    optimizer.eval()
    for value, average, weight in zip(_values(model), averages, _values(plain)):
        assert (value - average).abs().max() / average.abs().max() < 1e-6
        assert (value - weight).abs().max() > 1e-3
    optimizer.train()
    assert all(map(torch.equal, _values(model), _values(plain)))


def test_a_masked_update_changes_no_bit() -> None:
    model, twin = _model(), _model()
    optimizer, other = _optimizer(model), _optimizer(twin)
    for number in range(6):
        _step(model, optimizer, number, skip=torch.tensor(float(number in (0, 3))))
        if number not in (0, 3):
            _step(twin, other, number)
    optimizer.eval(), other.eval()
    assert all(map(torch.equal, _values(model), _values(twin)))


def _assert_same_steps(model: Any, optimizer: Any, resumed: Any, again: Any) -> None:
    """Steps 5 to 8 of both have the same bits, and so have their averages."""
    for number in range(5, 9):
        _step(model, optimizer, number)
        _step(resumed, again, number)
    assert all(map(torch.equal, _values(model), _values(resumed)))
    optimizer.eval(), again.eval()
    assert all(map(torch.equal, _values(model), _values(resumed)))


def test_a_resume_goes_on_with_the_same_bits() -> None:
    model = _model()
    optimizer = _optimizer(model)
    for number in range(5):
        _step(model, optimizer, number)
    optimizer.eval()
    weights = _values(model)
    state = copy.deepcopy(optimizer.named_state())
    optimizer.train()
    resumed = _model()
    again = _optimizer(resumed)
    load_evaluated(resumed, again, weights, state)
    _assert_same_steps(model, optimizer, resumed, again)


def test_weights_loaded_before_the_first_update_are_both() -> None:
    model = _model()
    optimizer = _optimizer(model)
    optimizer.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer.train()
    assert all((p == 0.5).all() for p in model.parameters())
    optimizer.eval()
    assert all((p == 0.5).all() for p in model.parameters())


def test_settings_of_the_other_weights_are_rejected() -> None:
    model = _model()
    optimizer = _optimizer(model)
    _step(model, optimizer, 0)
    with pytest.raises(RuntimeError, match=r"\.eval\(\)"):
        optimizer.named_state()
    optimizer.eval()
    with pytest.raises(RuntimeError, match=r"\.train\(\)"):
        optimizer.step()
    state = AdamW(param_groups(model)).named_state()
    with rejects("0.weight.trained", ..., "missing"):
        optimizer.load_named_state(state)


def test_optimizers_that_it_cannot_average_are_rejected() -> None:
    config = OptimizerConfig("torch.optim:SGD", ema=EMAConfig(0.9))
    for check in (build_optimizer, check_optimizer):
        with rejects("optimizer.ema.decay", 0.9, "unsupported"):
            check(_model(), config)
    with rejects("ema.decay", 0.9, "excludes"):
        OptimizerConfig("schedule_free_adamw", ema=EMAConfig(0.9))
    with rejects("decay", 1.0, "range"):
        EMAConfig(1.0)


def test_groups_and_rates_reach_the_optimizer() -> None:
    optimizer = _optimizer(_model())
    optimizer.set_lr(0.25)
    assert optimizer.lr == 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25] * 2


def test_the_form_of_torch_holds_the_average_too() -> None:
    """Saved at either point; loaded beside the weights that were saved with it."""
    for at in ("train", "eval"):
        model = _model()
        optimizer = _optimizer(model)
        for number in range(5):
            _step(model, optimizer, number)
        getattr(optimizer, at)()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.train()
        resumed = _model()
        again = _optimizer(resumed)
        resumed.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        again.train()
        _assert_same_steps(model, optimizer, resumed, again)
    with rejects("", ..., "no_average"):
        again.load_state_dict(AdamW(param_groups(model)).state_dict())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = _model()
    optimizer = _optimizer(model)
    for number in range(3):
        _step(model, optimizer, number)
    optimizer.eval()
    state = copy.deepcopy(optimizer.named_state())
    before = copy.deepcopy(state)
    for slots in state.values():
        slots["exp_avg"].zero_()
    state["0.weight"]["trained"] = torch.zeros(3)
    with rejects("0.weight.trained", (3,), "shape"):
        optimizer.load_named_state(state)
    for name, slots in optimizer.named_state().items():
        assert torch.equal(slots["exp_avg"], before[name]["exp_avg"])


def test_it_does_not_look_at_memory_that_was_empty_when_it_was_made() -> None:
    model = _model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    optimizer = _optimizer(model)
    model.load_state_dict(_model().state_dict())
    _step(model, optimizer, 0)
    optimizer.eval()
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_optimizer_of_your_own_needs_no_mask() -> None:
    class Plain(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)

        def named_state(self) -> dict[str, Any]:
            return {}

    model, twin = _model(), _model()
    averaged = EMA(Plain(model.named_parameters(), lr=0.1), EMAConfig(DECAY))
    plain = Plain(twin.named_parameters(), lr=0.1)
    for number in range(4):
        _step(model, averaged, number, skip=torch.tensor(float(number == 1)))
        if number != 1:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
            plain.zero_grad()
            twin(x).square().sum().backward()
            plain.step()
    assert all(map(torch.equal, _values(model), _values(twin)))
    with rejects("optimizer.ema.decay", DECAY, "unsupported"):
        EMA(Plain(model.parameters(), lr=0.1), EMAConfig(DECAY))
