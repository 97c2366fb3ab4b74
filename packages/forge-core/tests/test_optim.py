"""AdamW against float64, and its state."""

import copy
import math
from dataclasses import fields

import pytest
import torch
from torch import nn

from forge_core.optim import (
    AdamW,
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    describe_parameters,
    hidden_matrices,
    saves_by_name,
)
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


DECAYED = {"embedding.weight", "experts"}


class Tiny(nn.Module):
    """A matrix used twice, a norm, a bias, and an expert stack."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        self.experts = nn.Parameter(torch.randn(2, 3, 4))
        self.experts_bias = nn.Parameter(torch.randn(2, 4))  # F146: a vector for each expert


def _gradients(model, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
        for _ in range(steps)
    ]


def _run(model, optimizer, gradients, lrs=None):
    for index, step in enumerate(gradients):
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = step[name].clone()
        if lrs:
            optimizer.set_lr(lrs[index])
        optimizer.step()


def _reference(model, gradients, lrs, config):
    """The paper's loop in float64, one parameter at a time."""
    weights = {n: p.detach().double() for n, p in model.named_parameters()}
    (b1, b2), moments = config.resolved_betas, {n: (0.0, 0.0) for n in weights}
    for t, (grads, lr) in enumerate(zip(gradients, lrs), start=1):
        for name, w in weights.items():
            g = grads[name].double()
            m, v = moments[name]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            moments[name] = (m, v)
            decay = config.weight_decay if name in DECAYED else 0.0
            update = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + config.eps)
            weights[name] = w - lr * decay * w - lr * update
    return weights, moments


def test_twelve_steps_equal_float64():
    model, config = Tiny(), OptimizerConfig(lr=0.01, weight_decay=0.3)
    gradients, lrs = _gradients(model, 12), [0.01 / (1 + i) for i in range(12)]
    expected, moments = _reference(model, gradients, lrs, config)
    optimizer = build_optimizer(model, config)
    _run(model, optimizer, gradients, lrs)
    state = optimizer.named_state()
    for name, parameter in model.named_parameters():
        # fp32 arithmetic, 12 steps: relative to the largest element.
        for got, want in (
            (parameter, expected[name]),
            (state[name]["exp_avg"], moments[name][0]),
            (state[name]["exp_avg_sq"], moments[name][1]),
        ):
            assert (got.double() - want).abs().max() <= 1e-6 * want.abs().max(), name
        assert state[name]["step"] == 12.0


def test_decay_is_for_matrices_only():
    model = Tiny()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    _run(model, optimizer, [{n: torch.zeros_like(p) for n, p in model.named_parameters()}])
    for name, parameter in model.named_parameters():
        factor = 0.95 if name in DECAYED else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name], rtol=1e-6, atol=0)


def test_F32_state_is_complete_before_the_first_step_and_changes_nothing():
    asked, not_asked = Tiny(), Tiny()
    gradients = _gradients(asked, 3)
    first, second = build_optimizer(asked), build_optimizer(not_asked)
    state = first.named_state()
    assert set(state) == {n for n, _ in asked.named_parameters()}
    for name, parameter in asked.named_parameters():
        assert set(state[name]) == {"exp_avg", "exp_avg_sq", "step"}
        assert state[name]["step"] == 0.0
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name][moment], torch.zeros_like(parameter))
            assert state[name][moment].dtype == torch.float32
    _run(asked, first, gradients)
    _run(not_asked, second, gradients)
    _assert_same(asked, not_asked)


@pytest.mark.parametrize("stepped_before_load", [False, True])
def test_F32_after_a_load_the_steps_are_bit_equal(stepped_before_load):
    straight, resumed = Tiny(), Tiny()
    gradients = _gradients(straight, 8)
    optimizer = build_optimizer(straight)
    _run(straight, optimizer, gradients[:4])
    weights, state = copy.deepcopy(straight.state_dict()), copy.deepcopy(optimizer.named_state())
    _run(straight, optimizer, gradients[4:])

    other = build_optimizer(resumed)
    if stepped_before_load:
        _run(resumed, other, _gradients(resumed, 2, seed=9))
    resumed.load_state_dict(weights)
    other.load_named_state(state)
    _run(resumed, other, gradients[4:])
    _assert_same(straight, resumed)
    for name, slots in optimizer.named_state().items():
        assert torch.equal(slots["exp_avg_sq"], other.named_state()[name]["exp_avg_sq"])


def test_a_load_copies_its_values():
    model = Tiny()
    optimizer = build_optimizer(model)
    state = {n: {**s, "exp_avg": s["exp_avg"] + 1} for n, s in optimizer.named_state().items()}
    optimizer.load_named_state(state)
    state["norm.bias"]["exp_avg"].fill_(7)
    assert optimizer.named_state()["norm.bias"]["exp_avg"].eq(1).all()


def test_a_state_that_does_not_fit_is_rejected_and_changes_nothing():
    model = Tiny()
    optimizer = build_optimizer(model)
    _run(model, optimizer, _gradients(model, 1))
    before = copy.deepcopy(optimizer.named_state())
    state = copy.deepcopy(before)
    del state["norm.weight"]
    del state["norm.bias"]["step"]
    state["head.bias"]["exp_avg"] = torch.zeros(5)
    state["head.bias"]["momentum"] = 0.0
    state["stranger"] = {}
    state["experts"]["exp_avg"] = 1.0
    state["head.bias"]["exp_avg_sq"].placements = ()  # as a DTensor has them
    with rejects("norm.weight", ..., "missing", where="optimizer state: ") as error:
        optimizer.load_named_state(state)
    for wanted in (
        ("norm.bias.step", ..., "missing"),
        ("head.bias.exp_avg", (5,), "shape"),
        ("head.bias.momentum", ..., "extra"),
        ("stranger", ..., "extra"),
        ("experts.exp_avg", 1.0, "type"),
        ("head.bias.exp_avg_sq", ..., "placements"),
    ):
        assert_problem(error.value, *wanted)
    for name, slots in optimizer.named_state().items():
        assert torch.equal(slots["exp_avg"], before[name]["exp_avg"])


def test_tied_and_frozen_parameters():
    model = Tiny()
    model.experts.requires_grad_(False)
    names = set(build_optimizer(model).named_state())
    assert names == {"embedding.weight", "norm.weight", "norm.bias", "head.bias", "experts_bias"}


def test_a_parameter_without_gradient_does_not_change():
    model = Tiny()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    before = model.experts.detach().clone()
    model.norm.weight.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(model.experts, before)
    assert optimizer.named_state()["experts"]["step"] == 0.0
    assert optimizer.named_state()["norm.weight"]["step"] == 1.0


def test_a_masked_step_changes_nothing_and_is_not_counted():
    """Neither weights, moments, decay nor step counts, whatever the gradients hold."""
    model, twin = Tiny(), Tiny()
    twin.load_state_dict(model.state_dict())
    config = OptimizerConfig(lr=0.1, weight_decay=0.5)
    masked, plain = build_optimizer(model, config), build_optimizer(twin, config)
    for bad in (False, True, False, True):
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad = torch.full_like(parameter, math.nan if bad else 0.5)
            other.grad = torch.full_like(other, 0.5)
        masked.step(skip=torch.tensor(float(bad)))
        if not bad:
            plain.step()
    _assert_same(model, twin)
    mine, theirs = masked.named_state(), plain.named_state()
    assert {n: s["step"] for n, s in mine.items()} == dict.fromkeys(theirs, 2.0)
    for name, slots in theirs.items():
        assert all(torch.equal(mine[name][m], slots[m]) for m in ("exp_avg", "exp_avg_sq"))


def test_lr_and_zero_grad():
    model = Tiny()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
    assert optimizer.lr == 0.1
    optimizer.set_lr(0.02)
    assert optimizer.lr == 0.02
    model.norm.weight.grad = torch.ones(4)
    optimizer.zero_grad()
    assert model.norm.weight.grad is None


def test_masters_in_fp16_are_rejected():
    with rejects("experts", torch.float16, "dtype"):
        build_optimizer(Tiny().half())


def test_meta_and_frozen_models_are_rejected():
    with rejects("experts", ..., "meta"):
        build_optimizer(Tiny().to("meta"))
    with rejects("requires_grad", False, "frozen"):
        build_optimizer(Tiny().requires_grad_(False))


def test_all_problems_of_a_config_in_one_error():
    given = {"name": "", "lr": 0.0, "betas": (0.9, 1.0), "eps": -1.0, "weight_decay": math.nan}
    with rejects("lr", 0.0, "range", where="optimizer: ") as error:
        OptimizerConfig(**given)
    assert {problem.key for problem in error.value.problems} == given.keys()
    assert_problem(error.value, "name", "", "missing")
    assert_problem(error.value, "eps", -1.0, "range")


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.95, 0.1), (0.9, math.nan), (0.9, "0.95"), 0.9])
def test_betas_are_two_numbers(betas):
    with rejects("betas", betas, "range", where="optimizer: "):
        OptimizerConfig(betas=betas)


def test_every_field_has_a_help_text():
    for config in (OptimizerConfig, ScheduleConfig):
        assert all(field.metadata["help"] for field in fields(config))


def test_a_name_from_an_entry_point(monkeypatch):
    class Entry:
        name = "theirs"

        def load(self):
            return lambda model, config: torch.optim.SGD(model.parameters(), config.lr)

    asked = []
    monkeypatch.setattr(
        "forge_core.registry.entry_points", lambda group: asked.append(group) or [Entry()]
    )
    assert isinstance(build_optimizer(Tiny()), AdamW)
    assert asked == []  # not looked up for a built-in name
    theirs = build_optimizer(Tiny(), OptimizerConfig("theirs", lr=0.5))
    assert theirs.param_groups[0]["lr"] == 0.5
    assert asked == ["forge.optimizers"]
    with rejects("optimizer.name", "adam", "unknown", where="'adamw'") as error:
        build_optimizer(Tiny(), OptimizerConfig("adam"))
    assert all(name in str(error.value) for name in ("adamw, lion", "theirs"))


def _assert_same(one, other):
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "schedule_free_adamw"])
def test_bytes_of_state_are_what_an_optimizer_holds(name, state):
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(6, 4), "layers": nn.ModuleList([nn.Linear(4, 4)])}
    )
    config = OptimizerConfig(name, state_dtype=state)
    optimizer = build_optimizer(model, config)
    _run(model, optimizer, _gradients(model, 1))
    slots = [value for slots in optimizer.state.values() for value in slots.values()]
    held = sum(value.nbytes for value in slots if torch.is_tensor(value) and value.ndim)
    matrices = hidden_matrices(model, config) if name == "muon" else ()
    counts = {n: p.numel() for n, p in model.named_parameters()}
    assert held == sum(config.state_bytes(4, n in matrices) * count for n, count in counts.items())


def test_optimizers_from_outside_whose_state_has_no_names():
    names = ("adamw", "nowhere:at_all", "torch.optim:SGD", "forge_core.optim:build_optimizer")
    assert [saves_by_name(name) for name in names] == [True, True, False, False]


def test_parameters_are_described_by_kind_decay_and_optimizer():
    model = Tiny()
    model.norm.requires_grad_(False)
    head, *rows = (line.split() for line in describe_parameters(model, OptimizerConfig()))
    assert head[:2] == ["parameter", "number"]
    found = {row[0]: row[-2:] for row in rows}
    assert found["experts"] == ["0.1", "adamw"]
    assert found["experts_bias"] == ["0", "adamw"]
    assert found["norm.weight"] == ["none:", "frozen"]
