"""AdamW as a torch optimizer among torch's own tools, and torch's own optimizers by import path."""

import copy
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import nn

from forge_core.optim import AdamW, OptimizerConfig, build_optimizer, check_optimizer, set_lr
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def twins(**options: object) -> tuple[nn.Module, AdamW, nn.Module, torch.optim.AdamW]:
    """A model with AdamW, and the same with torch's class."""
    mine, theirs = model_of(), model_of()
    config = OptimizerConfig(lr=0.01, **options)
    groups = [
        {"params": [theirs[0].weight, theirs[2].weight], "weight_decay": 0.1},
        {"params": [theirs[0].bias, *theirs[1].parameters(), theirs[2].bias], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(
        groups, lr=0.01, betas=config.resolved_betas, eps=config.eps, fused=True
    )
    return mine, build_optimizer(mine, config), theirs, other


def test_F114_state_has_the_form_of_torch_and_goes_both_ways() -> None:
    model, optimizer, theirs, other = twins()
    assert isinstance(optimizer, torch.optim.Optimizer)
    train(model, optimizer, 3)
    train(theirs, other, 3)
    assert same(model, theirs)
    mine, wanted = optimizer.state_dict(), other.state_dict()
    assert mine["state"].keys() == wanted["state"].keys()
    assert [g["params"] for g in mine["param_groups"]] == [
        g["params"] for g in wanted["param_groups"]
    ]
    optimizer.load_state_dict(copy.deepcopy(wanted))
    other.load_state_dict(copy.deepcopy(mine))
    train(model, optimizer, 2)
    train(theirs, other, 2)
    assert same(model, theirs)


def test_F114_state_is_complete_before_a_step_and_after_a_load_of_less() -> None:
    model, optimizer, _, other = twins()
    assert len(optimizer.state_dict()["state"]) == 6
    optimizer.load_state_dict(other.state_dict())  # torch's own has none before its first step
    assert {slots["step"] for slots in optimizer.named_state().values()} == {0.0}
    train(model, optimizer, 1)
    twin = copy.deepcopy(optimizer)
    assert {slots["step"] for slots in twin.named_state().values()} == {1.0}


def test_F114_schedulers_hooks_and_closures() -> None:
    model, optimizer, theirs, other = twins()
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=6)
        for o in (optimizer, other)
    ]
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    for seed in range(4):
        train(model, optimizer, 1, seed)
        train(theirs, other, 1, seed)
        for scheduler in schedulers:
            scheduler.step()
    assert same(model, theirs)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] != 0.01
    assert calls == ["step"] * 4
    assert optimizer.step(lambda: 3.5) == 3.5


def test_F114_the_loss_scaler_of_torch_skips_what_overflowed() -> None:
    model, optimizer, theirs, other = twins()
    for one, its in ((model, optimizer), (theirs, other)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for value in (1.0, float("inf"), 2.0):
            scaler.scale((one(torch.ones(2, 4)) * value).sum()).backward()
            scaler.step(its)
            scaler.update()
            its.zero_grad()
        assert scaler.get_scale() == 4.0
    assert same(model, theirs)
    assert {slots["step"] for slots in optimizer.named_state().values()} == {2.0}


def test_F114_what_accelerate_does_in_prepare() -> None:
    """It asks for the class, moves the state and puts it back, and steps with a positional closure."""
    model, optimizer, theirs, other = twins()
    for its in (optimizer, other):
        assert isinstance(its, torch.optim.Optimizer)
        its.load_state_dict(copy.deepcopy(its.state_dict()))
        its.param_groups = its.param_groups
    for one, its in ((model, optimizer), (theirs, other)):
        one(torch.ones(2, 4)).sum().backward()
        its.step(None)
        its.zero_grad(set_to_none=True)
    assert same(model, theirs)


@pytest.mark.parametrize("flat", [False, True])
def test_F114_distributed_checkpoints_read_and_write_its_state(flat: bool) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer, _, _ = twins()
    train(model, optimizer, 2)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    again, fresh, _, _ = twins()
    again.load_state_dict(model.state_dict())
    set_optimizer_state_dict(again, fresh, state, options=options)
    for each, its in ((model, optimizer), (again, fresh)):
        train(each, its, 2, seed=5)
    assert same(model, again)


def test_F114_set_lr_keeps_the_scale_of_a_group() -> None:
    groups = [{"params": [p]} for p in nn.Linear(2, 2).parameters()]
    groups[1]["lr_scale"] = 0.1
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(1.0))
    groups = optimizer.param_groups
    groups[0]["lr"] = 1.0
    set_lr(optimizer, 0.5)
    assert groups[0]["lr"] == 0.5
    assert float(groups[1]["lr"]) == pytest.approx(0.05)
    model = model_of()
    mine = build_optimizer(model)
    mine.param_groups[1]["lr_scale"] = 2.0
    set_lr(mine, 0.25)
    assert [group["lr"] for group in mine.param_groups] == [0.25, 0.5]
    assert mine.lr == 0.25


def test_F114_a_class_of_torch_by_import_path() -> None:
    model, config = model_of(), OptimizerConfig("torch.optim:SGD", lr=0.5, weight_decay=0.2)
    check_optimizer(model_of().to("meta"), config)
    optimizer = build_optimizer(model, config)
    assert isinstance(optimizer, torch.optim.SGD)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0]
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "2.weight"]
    adam = build_optimizer(model, OptimizerConfig("torch.optim:Adam", betas=(0.5, 0.6)))
    assert adam.param_groups[0]["betas"] == (0.5, 0.6)
    assert build_optimizer(model, OptimizerConfig("torch.optim:Adam")).defaults["betas"] == (
        0.9,
        0.95,
    )
    train(model, optimizer, 1)


def test_a_class_with_three_betas_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Three(torch.optim.SGD):
        def __init__(self, params, lr, betas=(0.9, 0.8, 0.7), weight_decay=0.0) -> None:
            super().__init__(params, lr, weight_decay=weight_decay)
            self.betas = betas

    lab = types.ModuleType("example_lab")
    lab.Three = Three
    monkeypatch.setitem(sys.modules, "example_lab", lab)
    config = OptimizerConfig("example_lab:Three")
    assert build_optimizer(model_of(), config).betas == (0.9, 0.8, 0.7)
    own = replace(config, options={"betas": (0.1, 0.2, 0.3)})
    assert build_optimizer(model_of(), own).betas == (0.1, 0.2, 0.3)
    with rejects("optimizer.betas", (0.5, 0.6), "unsupported"):
        check_optimizer(model_of(), replace(config, betas=(0.5, 0.6)))


class Strict(torch.optim.SGD):
    """Its signature takes what it refuses when it is called."""

    def __init__(self, params, lr, **options) -> None:
        raise TypeError("lr")


@pytest.mark.parametrize(
    ("name", "settings", "key", "code"),
    [
        ("torch.optim:SGD", {"betas": (0.5, 0.6)}, "betas", "unsupported"),
        ("torch.optim:Adafactor", {"eps": 1e-4}, "eps", "unsupported"),
        ("torch.optim:LBFGS", {}, "name", "closure"),
        ("torch.optim:Optimizer", {}, "options.defaults", "missing"),
        ("example_lab:Strict", {}, "name", "arguments"),
        ("example_lab:Bare", {}, "name", "methods"),
        ("example_lab:number", {}, "name", "type"),
    ],
)
def test_F114_factories_that_give_no_optimizer_are_rejected_on_the_meta_device(
    name: str, settings: dict, key: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = types.ModuleType("example_lab")
    lab.Bare = type("Bare", (), {"step": lambda self: None})
    lab.number, lab.Strict = 3, Strict
    monkeypatch.setitem(sys.modules, "example_lab", lab)
    value = {**settings, "name": name}.get(key, ...)
    with rejects(f"optimizer.{key}", value, code):
        check_optimizer(model_of().to("meta"), OptimizerConfig(name, **settings))
    with pytest.raises(ValueError, match="2D"):  # torch's own
        check_optimizer(model_of().to("meta"), OptimizerConfig("torch.optim:Muon"))


def test_F114_a_builder_that_returns_no_optimizer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = types.ModuleType("example_lab")
    lab.build = lambda model, config: model
    lab.sgd = lambda model, config: torch.optim.SGD(model.parameters(), config.lr)
    monkeypatch.setitem(sys.modules, "example_lab", lab)
    with rejects("optimizer.name", "example_lab:build", "methods", where="Sequential"):
        build_optimizer(model_of(), OptimizerConfig("example_lab:build"))
    assert isinstance(
        build_optimizer(model_of(), OptimizerConfig("example_lab:sgd")), torch.optim.SGD
    )
