"""Groups of parameters by pattern: who is in which, what torch sees of them, freezing, and stages as functions of a step."""

from __future__ import annotations

import copy
import math
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from forge_core._shared.problems import raise_problems
from forge_core.optim import (
    IdleOptimizer,
    MuonConfig,
    OptimizerConfig,
    OptimizerGroupConfig,
    StageConfig,
    Stages,
    build_optimizer,
    check_groups_train,
    check_optimizer,
    check_something_trains,
    freeze_groups,
    freeze_never_trained,
    groups_of_part,
    match_groups,
    multipliers_at,
    never_trained,
    optimizer_problems,
    param_groups,
    set_lr,
    set_multipliers,
    stage_problems,
    trains_nothing,
)
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


def group(*patterns: str, **options: Any) -> OptimizerGroupConfig:
    return OptimizerGroupConfig(patterns, **options)


class Net(nn.Module):
    """The head is tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.table(ids))))


def train(model: nn.Module, optimizer: Any, steps: int, lr: float = 0.1) -> None:
    for step in range(steps):
        set_lr(optimizer, lr / (step + 1))
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


PLAN = {
    "body": group("body.0.*", lr_multiplier=0.5),
    "norm": group("body.1.*", weight_decay=0.7),
    "table": group("table.*", weight_decay=0.0),  # a decay of zero is one that is given
}


def test_patterns_find_parameters_by_all_of_their_names() -> None:
    found = match_groups(Net(), {"out": group("head.*"), "rest": group("body.*")})
    assert {n for n, owner in found.items() if owner == "out"} == {"table.weight", "head.weight"}
    assert found["body.1.bias"] == "rest"


def test_wrong_patterns_are_named_all_at_once() -> None:
    groups = {"a": group("table.*", "boddy.*"), "b": group("head.*"), "c": group("body.1.*")}
    with rejects("optimizer.groups", "table.weight", "duplicate") as caught:
        check_optimizer(Net(), OptimizerConfig(groups=groups))
    two, none = str(caught.value).splitlines()
    assert all(f"optimizer.groups.{name}" in two for name in "ab")
    assert_problem(caught.value, "optimizer.groups.a.patterns", "boddy.*", "not_found")
    assert " body." in none


def test_a_submodule_keeps_the_patterns_that_match_it() -> None:
    config = OptimizerConfig(groups={"a": group("body.*", "table.*"), "b": group("head.*")})
    part = Net()
    del part.table, part.head
    assert groups_of_part(part, config) == {"a": group("body.*")}


def test_torch_sees_groups_with_rates_and_decay() -> None:
    model, config = Net(), OptimizerConfig(lr=0.4, weight_decay=0.2, groups=PLAN)
    seen = [
        (
            g["params"][0][0],
            len(g["params"]),
            g["weight_decay"],
            g.get("group"),
            g.get("lr_multiplier"),
        )
        for g in param_groups(model, config)
    ]
    assert seen == [
        ("body.0.weight", 1, 0.2, "body", 0.5),
        ("body.0.bias", 1, 0.0, "body", 0.5),
        ("body.1.weight", 2, 0.7, "norm", 1.0),
        ("table.weight", 1, 0.0, "table", 1.0),
    ]
    for name in ("adamw", "torch.optim:SGD", "torch.optim:Adam"):
        optimizer = build_optimizer(model, OptimizerConfig(name, lr=0.4, groups=PLAN))
        assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.2, 0.4, 0.4]
        set_lr(optimizer, 0.1)
        assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.05, 0.1, 0.1]


@pytest.mark.parametrize("name", ["adamw", "torch.optim:Adam"])
def test_a_frozen_group_keeps_bits_and_state_and_goes_on_from_it(name: str) -> None:
    groups = {"body": group("body.*", weight_decay=0.5, lr_multiplier=0.0)}
    model = Net()
    optimizer = build_optimizer(model, OptimizerConfig(name, groups=groups))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, 2)
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) == n.startswith("body"), n
        assert p.grad is None
    set_multipliers(optimizer, {"body": 0.5, "elsewhere": 1.0})
    train(model, optimizer, 3)
    assert not torch.equal(model.body[0].weight, before["body.0.weight"])
    model(torch.arange(5)).sum().backward()
    state = {n: copy.deepcopy(optimizer.state[p]) for n, p in model.named_parameters()}
    set_multipliers(optimizer, {"body": 0.0})
    assert model.body[0].weight.grad is None
    train(model, optimizer, 2)
    assert int(optimizer.state[model.table.weight]["step"]) == 7
    for n, p in model.named_parameters():
        if n.startswith("body"):
            assert int(optimizer.state[p]["step"]) == 3
            assert all(torch.equal(v, state[n][k]) for k, v in optimizer.state[p].items())
    set_multipliers(optimizer, {"body": 1.0})
    train(model, optimizer, 1)
    assert int(optimizer.state[model.body[0].weight]["step"]) == 4


def test_the_first_step_after_a_thaw_is_that_of_a_fresh_adam() -> None:
    model, fresh = Net(), Net()
    plan = {"body": group("body.*", lr_multiplier=0.0)}
    optimizer = build_optimizer(model, OptimizerConfig(eps=1e-3, groups=plan))
    train(model, optimizer, 4)
    fresh.load_state_dict(model.state_dict())
    set_multipliers(optimizer, {"body": 1.0})
    other = build_optimizer(fresh, OptimizerConfig(eps=1e-3))
    train(model, optimizer, 1)
    train(fresh, other, 1)
    assert torch.equal(model.body[0].weight, fresh.body[0].weight)
    assert not torch.equal(model.table.weight, fresh.table.weight)


@pytest.mark.parametrize("name", ["adamw", "torch.optim:Adam"])
def test_state_in_the_form_of_torch_keeps_the_groups_of_this_configuration(name: str) -> None:
    """Also a state that was saved before there were groups."""
    all_of_it = {"all": group("*", lr_multiplier=0.5, weight_decay=0.1)}
    model, old = Net(), Net()
    optimizer = build_optimizer(model, OptimizerConfig(name, groups=all_of_it))
    plain = getattr(torch.optim, "Adam" if ":" in name else "AdamW")(old.parameters(), lr=0.3)
    train(old, plain, 2)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    (row,) = optimizer.param_groups
    assert (row["group"], row["lr_multiplier"]) == ("all", 0.5)
    set_lr(optimizer, 0.2)
    assert row["lr"] == 0.1
    again = build_optimizer(
        Net(), OptimizerConfig(name, groups={"all": group("*", lr_multiplier=0.25)})
    )
    assert len(again.param_groups) == 2
    with pytest.raises(ValueError, match="parameter groups"):  # torch's own
        again.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["adamw", "torch.optim:Adam"])
def test_state_in_the_form_of_torch_brings_no_groups_along(name: str) -> None:
    """Those of a run whose groups were removed: their rates would stay for good, unseen."""
    plan = {"all": group("*", lr_multiplier=0.5)}
    saved = build_optimizer(Net(), OptimizerConfig(name, groups=plan))
    plain = build_optimizer(Net(), OptimizerConfig(name))
    plain.load_state_dict(saved.state_dict())
    set_lr(plain, 0.2)
    for row in plain.param_groups:
        assert row["lr"] == 0.2
        assert not {"group", "lr_multiplier", "lr_scale"} & row.keys()


def test_state_in_the_form_of_torch_keeps_factors_of_rates_without_groups() -> None:
    def muon(factor: float) -> Any:
        return build_optimizer(
            Net(), OptimizerConfig("muon", muon=MuonConfig(adamw_lr_multiplier=factor))
        )

    mine = muon(0.25)
    mine.load_state_dict(muon(0.5).state_dict())
    set_lr(mine, 1.0)
    assert {row["lr"] for row in mine.param_groups if not row["muon"]} == {0.25}


def test_a_class_of_torch_has_the_settings_of_this_configuration_after_a_load() -> None:
    """As Forge's optimizers, whose named state has none."""
    before = OptimizerConfig("torch.optim:Adam", weight_decay=0.1, options={"amsgrad": True})
    model, old = Net(), build_optimizer(Net(), before)
    now = OptimizerConfig("torch.optim:Adam", betas=(0.5, 0.6), weight_decay=0.2, eps=1e-3)
    optimizer = build_optimizer(model, now)
    optimizer.load_state_dict(old.state_dict())
    wide, vectors = optimizer.param_groups
    assert (wide["betas"], wide["eps"]) == ((0.5, 0.6), 1e-3)
    assert (wide["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
    assert wide["amsgrad"] is True  # not said by this configuration
    off = build_optimizer(Net(), replace(before, options={"amsgrad": False}))
    off.load_state_dict(old.state_dict())
    assert off.param_groups[0]["amsgrad"] is False


def test_named_state_holds_frozen_groups_too() -> None:
    plan = {"body": group("body.*", lr_multiplier=0.0)}
    model, twin = Net(), Net()
    optimizer = build_optimizer(model, OptimizerConfig(groups=plan))
    train(model, optimizer, 2)
    state = optimizer.named_state()
    assert {n: s["step"] for n, s in state.items() if n.startswith("body")} == {
        f"body.{i}.{kind}": 0.0 for i in (0, 1) for kind in ("weight", "bias")
    }
    other = build_optimizer(twin)  # an optimizer without groups has the same names
    other.load_named_state(state)
    assert other.named_state()["table.weight"]["step"] == 2.0


def test_an_outside_builder_takes_groups_or_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    lab: Any = types.ModuleType("example_lab")
    lab.deaf = lambda model, config: torch.optim.SGD(model.parameters(), config.lr)
    lab.listens = lambda model, config: torch.optim.SGD(param_groups(model, config), config.lr)
    monkeypatch.setitem(sys.modules, "example_lab", lab)
    plan = {"body": group("body.*", lr_multiplier=0.0)}
    with rejects("optimizer.groups.body", ..., "param_groups", where="'example_lab:deaf'"):
        build_optimizer(Net(), OptimizerConfig("example_lab:deaf", groups=plan))
    model = Net()
    optimizer = build_optimizer(model, OptimizerConfig("example_lab:listens", groups=plan))
    before = copy.deepcopy(model.body.state_dict())
    train(model, optimizer, 1)
    assert all(torch.equal(v, before[n]) for n, v in model.body.state_dict().items())


# ---- stages


STAGES = {
    "late": StageConfig(5, {"body": 0.5}),
    "early": StageConfig(2, {"body": 0.0, "norm": 0.0}),
}


def test_a_group_keeps_what_the_latest_stage_that_names_it_gave() -> None:
    config = OptimizerConfig(
        groups={"body": group("body.0.*"), "norm": group("body.1.*", lr_multiplier=2.0)}
    )
    assert multipliers_at(config, STAGES, 1) == {"body": 1.0, "norm": 2.0}
    assert multipliers_at(config, STAGES, 2) == {"body": 0.0, "norm": 0.0}
    assert multipliers_at(config, STAGES, 4) == {"body": 0.0, "norm": 0.0}
    assert multipliers_at(config, STAGES, 5) == {"body": 0.5, "norm": 0.0}
    assert stage_problems(config, STAGES, 5) == []
    assert never_trained(config, STAGES) == []


def test_what_is_never_trained_gets_no_state() -> None:
    plan = {
        "body": group("body.0.*", lr_multiplier=0.0),
        "norm": group("body.1.*", lr_multiplier=0.0),
    }
    config, stages = OptimizerConfig(groups=plan), {"s": StageConfig(3, {"norm": 1.0})}
    assert never_trained(config, stages) == ["body"]
    model = Net()
    freeze_never_trained(model, config, stages)
    optimizer = build_optimizer(model, config)
    assert set(optimizer.named_state()) == {"table.weight", "body.1.weight", "body.1.bias"}


def test_groups_are_checked_before_they_are_frozen() -> None:
    config = OptimizerConfig(groups={"all": group("*")})
    stages = {"s": StageConfig(3, {"other": 1.0})}
    with rejects("train.stages.s.lr_multipliers", "other", "unknown"):
        freeze_groups(Net(), config, stages)
    with rejects("train.stages.s.start_step", 3, "above_steps"):
        freeze_groups(Net(), config, {"s": StageConfig(3, {"all": 1.0})}, 2)
    freeze_groups(Net(), OptimizerConfig(), stages, 2)  # nothing to freeze without groups


def test_a_group_of_frozen_weights_is_rejected() -> None:
    groups = {"all": group("*"), "none": group("none")}
    with rejects("optimizer.groups.none.patterns", "none", "not_found"):
        check_groups_train(Net(), groups)
    with rejects("optimizer.groups.all.patterns", ..., "frozen"):
        check_groups_train(Net().requires_grad_(False), {"all": group("*")})


def test_options_are_checked_without_a_model_once_for_all_groups() -> None:
    groups = {"a": group("a"), "b": group("b")}
    assert optimizer_problems(OptimizerConfig(groups=groups)) == []
    wrong = OptimizerConfig(name="torch.optim:SGD", options={"momentun": 0.9}, groups=groups)
    (problem,) = optimizer_problems(wrong)
    assert problem.key == "optimizer.options.momentun"


def test_a_step_that_trains_nothing_is_rejected() -> None:
    config = OptimizerConfig(groups={"all": group("*")})
    check_something_trains(Net(), config, {})
    with rejects("train.stages.s", ..., "frozen", where=" 3 "):
        check_something_trains(Net(), config, {"s": StageConfig(3, {"all": 0.0})})


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("patterns", (), "type"),
        ("patterns", "body.*", "type"),
        ("patterns", ("",), "type"),
        ("lr_multiplier", -1.0, "range"),
        ("lr_multiplier", math.nan, "range"),
        ("lr_multiplier", math.inf, "range"),
        ("weight_decay", -0.1, "range"),
        ("weight_decay", math.nan, "range"),
    ],
)
def test_wrong_groups_are_rejected(key: str, value: Any, code: str) -> None:
    with rejects(key, value, code):
        OptimizerGroupConfig(**{"patterns": ("body.*",), key: value})


@pytest.mark.parametrize(
    ("step", "multipliers", "key", "value", "code"),
    [
        (0, {"a": 1.0}, "start_step", 0, "range"),
        (1, {}, "lr_multipliers", {}, "missing"),
        (1, {"a": -1.0}, "lr_multipliers.a", -1.0, "range"),
        (1, {"a": math.nan}, "lr_multipliers.a", math.nan, "range"),
    ],
)
def test_wrong_stages_are_rejected(
    step: int, multipliers: dict[str, float], key: str, value: Any, code: str
) -> None:
    with rejects(key, value, code):
        StageConfig(step, multipliers)


def test_stages_that_do_not_fit_are_all_named() -> None:
    config = OptimizerConfig(groups={"body": group("body.*")})
    stages = {
        "a": StageConfig(2, {"body": 0.0}),
        "b": StageConfig(2, {"bodi": 1.0}),
        "c": StageConfig(9, {"body": 1.0}),
    }
    with rejects("train.stages.b.start_step", 2, "duplicate", where="train.stages.a") as caught:
        raise_problems("", stage_problems(config, stages, total_steps=8))
    assert_problem(caught.value, "train.stages.b.lr_multipliers", "bodi", "unknown")
    assert_problem(caught.value, "train.stages.c.start_step", 9, "above_steps")
    assert len(caught.value.problems) == 3


def test_stages_are_entered_once_and_in_the_middle_of_a_run() -> None:
    model = Net()
    config = OptimizerConfig(groups={"body": group("body.*", lr_multiplier=0.5)})
    stages = {"late": StageConfig(5, {"body": 1.0}), "cold": StageConfig(3, {"body": 0.0})}
    optimizer = build_optimizer(model, config)
    run = Stages(config, stages, optimizer)
    seen, trained = {}, {}
    for step in range(1, 7):
        seen[step] = run.enter(step)
        trained[step] = model.body[0].weight.requires_grad
    assert trained == {1: True, 2: True, 3: False, 4: False, 5: True, 6: True}
    changes = {step: change for step, change in seen.items() if change is not None}
    assert changes == {
        1: (None, {"body": 0.5}),
        3: ("cold", {"body": 0.0}),
        5: ("late", {"body": 1.0}),
    }
    resumed = Stages(config, stages, build_optimizer(Net(), config))
    assert resumed.enter(4) == ("cold", {"body": 0.0})
    assert resumed.enter(4) is None


def test_an_idle_optimizer_changes_nothing_and_masks_like_the_others() -> None:
    model = Net().requires_grad_(False)
    assert trains_nothing(model)
    assert not trains_nothing(Net())
    before, idle = copy.deepcopy(model.state_dict()), IdleOptimizer()
    set_lr(idle, 0.1)
    set_multipliers(idle, {"body": 0.0})
    idle.step(skip=torch.zeros(()))
    idle.zero_grad()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
