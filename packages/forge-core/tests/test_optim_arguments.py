"""Optimizers are built as in torch: over parameters, (name, parameter) pairs or groups, with keyword arguments."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from forge_core import (
    AdamW,
    Lion,
    Muon,
    OptimizerConfig,
    OptimizerGroupConfig,
    ScheduleFreeAdamW,
    build_optimizer,
    param_groups,
)
from forge_core.optim import NamedOptimizer, parameter_groups, set_multipliers
from forge_core.optim.base import Slots
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

CLASSES = {
    "adamw": AdamW,
    "lion": Lion,
    "muon": Muon,
    "schedule_free_adamw": ScheduleFreeAdamW,
}
every_class = pytest.mark.parametrize("name", CLASSES)


class Tiny(nn.Module):
    """A table, two blocks with a stack of experts, a norm and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                grad = torch.randn(parameter.shape, generator=generator)
                parameter.grad = grad.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


def groups_of(name: str, model: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    return param_groups(model, muon=name == "muon", **settings)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def without_params(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.8, 0.9), "eps": 1e-6},
    "lion": {"betas": (0.8, 0.9)},
    "muon": {"betas": (0.8, 0.9), "eps": 1e-6, "momentum": 0.8, "adjust_lr_fn": "original"},
    "schedule_free_adamw": {"betas": (0.8, 0.9), "eps": 1e-6, "r": 1.0},
}


@every_class
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_the_new_form_is_the_old_form_bit_for_bit(name: str, state_dtype: Any) -> None:
    own = SETTINGS[name]
    heads = {"head": OptimizerGroupConfig(("head.*",), lr_multiplier=0.5, weight_decay=0.0)}
    tables: dict[str, Any] = {"muon": {"momentum": 0.8, "adjust": "original"}}
    config = OptimizerConfig(
        name, 0.01, own["betas"], own.get("eps", 1e-8), 0.2, state_dtype, groups=heads
    )
    if name == "muon":
        config = replace(config, muon=replace(config.muon, **tables["muon"]))
    if name == "schedule_free_adamw":
        config = replace(config, schedule_free=replace(config.schedule_free, r=1.0))

    models = [Tiny(), Tiny(), Tiny()]
    with pytest.warns(DeprecationWarning, match="param_groups") as caught:
        old = CLASSES[name](models[0], config)  # type: ignore[operator]
    assert [w.filename for w in caught] == [__file__]
    groups = groups_of(name, models[1], weight_decay=0.2, groups=heads)
    new = CLASSES[name](groups, lr=0.01, state_dtype=state_dtype, **own)
    runner = build_optimizer(models[2], config)
    assert without_params(old) == without_params(new) == without_params(runner)

    for model, optimizer in zip(models, (old, new, runner)):
        step(model, optimizer, 3)
        getattr(optimizer, "eval", lambda: None)()
    for model, optimizer in zip(models[1:], (new, runner)):
        assert_same(models[0], model)
        mine, theirs = old.named_state(), optimizer.named_state()
        assert mine.keys() == theirs.keys()
        for parameter, slots in mine.items():
            for slot, value in slots.items():
                torch.testing.assert_close(theirs[parameter][slot], value, rtol=0, atol=0)


def test_the_old_name_of_param_groups_warns() -> None:
    with pytest.warns(DeprecationWarning, match="param_groups"):
        (matrices, _) = parameter_groups(Tiny(), OptimizerConfig(weight_decay=0.3))
    assert matrices["weight_decay"] == 0.3
    with rejects("embedding.weight", torch.bfloat16, "dtype"):
        param_groups(Tiny().bfloat16(), rounds=False)


def params_as(form: str, model: nn.Module) -> Any:
    if form == "groups":
        return [
            {"params": model.embedding.weight, "lr": 0.03, "weight_decay": 0.5},
            {"params": list(model.layers.parameters()), "betas": (0.5, 0.6)},
            {"params": model.head.parameters()},
        ]
    return model.named_parameters() if form == "names" else model.parameters()


@pytest.mark.parametrize("form", ["tensors", "names", "groups"])
@pytest.mark.parametrize("settings", [{}, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.3}])
def test_adamw_is_the_adamw_of_torch(form: str, settings: dict[str, Any]) -> None:
    mine, theirs = Tiny(), Tiny()
    optimizer = AdamW(params_as(form, mine), **settings)
    reference = torch.optim.AdamW(params_as(form, theirs), **settings, fused=True)
    schedulers = [CosineAnnealingLR(o, T_max=4) for o in (optimizer, reference)]
    for seed in range(3):
        step(mine, optimizer, seed=seed)
        step(theirs, reference, seed=seed)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(mine, theirs)

    # state of either, by index, goes on in the other
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    reference.load_state_dict(saved)
    step(mine, optimizer, 2, seed=7)
    step(theirs, reference, 2, seed=7)
    assert_same(mine, theirs)


@pytest.mark.parametrize(
    "kind", [{"fused": False, "foreach": False}, {"foreach": True}, {"fused": True}]
)
def test_the_implementations_of_torch(kind: dict[str, bool]) -> None:
    models = [Tiny(), Tiny()]
    for model, build in zip(models, (AdamW, torch.optim.AdamW)):
        optimizer = build(model.parameters(), lr=0.01, **kind)
        step(model, optimizer, 3)
    assert_same(*models)


@every_class
def test_schedulers_of_torch_set_the_rates(name: str) -> None:
    model, other = Tiny(), Tiny()
    tables = {"tables": OptimizerGroupConfig(("embedding.*",), lr_multiplier=0.5)}
    optimizer = CLASSES[name](groups_of(name, model, groups=tables), lr=0.1)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)

    def schedules(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        yield LambdaLR(optimizer, lambda step: 1 / (1 + step))
        warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=2)
        yield SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, T_max=4)], [2])

    for scheduler, reference in zip(schedules(optimizer), schedules(plain)):
        for _ in range(4):
            step(model, optimizer)
            step(other, plain)
            scheduler.step()
            reference.step()
            rate = plain.param_groups[0]["lr"]
            rates = {g.get("group"): g["lr"] for g in optimizer.param_groups}
            assert rates == {None: pytest.approx(rate), "tables": pytest.approx(rate / 2)}


@every_class
@pytest.mark.parametrize("named", [False, True])
def test_state_of_torch_goes_on_with_the_same_bits(name: str, named: bool) -> None:
    def build(model: nn.Module) -> NamedOptimizer:
        groups = groups_of(name, model)
        if not named:
            groups = [{**g, "params": [p for _, p in g["params"]]} for g in groups]
        return CLASSES[name](groups, lr=0.01)

    straight, resumed = Tiny(), Tiny()
    optimizer = build(straight)
    assert optimizer.state_dict()["state"] == {}  # allocated in the first step, as in torch
    step(straight, optimizer, 2)
    saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
    step(straight, optimizer, 2, seed=5)

    resumed.load_state_dict(saved[0])
    again = build(resumed)
    again.load_state_dict(saved[1])
    step(resumed, again, 2, seed=5)
    assert_same(straight, resumed)

    twin = copy.deepcopy(again)
    assert without_params(twin) == without_params(again)
    if not named:
        getattr(again, "eval", lambda: None)()
        with rejects("param_names", ..., "missing", where="optimizer: "):
            again.named_state()


@every_class
def test_a_group_is_added_as_in_torch(name: str) -> None:
    model, other = Tiny(), Tiny()
    build = CLASSES[name]
    new = {"params": [("more.0.weight", nn.Parameter(torch.ones(3, 3)))], "lr_multiplier": 0.5}
    optimizer = build(groups_of(name, model), lr=0.01)
    optimizer.add_param_group(new)
    assert new.keys() == {"params", "lr_multiplier"}  # the caller's is not changed
    at_once = build([*groups_of(name, other), {**new, "params": new["params"]}], lr=0.01)
    assert without_params(optimizer) == without_params(at_once)
    assert optimizer.param_groups[-1]["lr"] == 0.005

    weight = new["params"][0][1]
    weight.grad = torch.randn(3, 3)
    step(model, optimizer)
    assert not torch.equal(weight, torch.ones(3, 3))
    count = len(optimizer.param_groups)
    with rejects("betas", (2.0, 3.0), "range", where="optimizer: "):
        half = nn.Parameter(torch.ones(2, 2))
        optimizer.add_param_group({"params": [("x.0.weight", half)], "betas": (2.0, 3.0)})
    assert len(optimizer.param_groups) == count


def test_a_rate_of_a_group_is_its_own_and_keeps_its_ratio() -> None:
    model = Tiny()
    groups = [{"params": model.head.parameters(), "lr": 0.02}, {"params": model.norm.parameters()}]
    optimizer = AdamW(groups, lr=0.1)
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.1]
    optimizer.set_lr(0.5)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.5])
    later = AdamW([{"params": model.norm.parameters(), "lr": 0.0}], lr=0.1)
    assert all(p.requires_grad for p in model.norm.parameters())
    assert later.lr == 0.0


def test_a_multiplier_of_zero_freezes() -> None:
    model = Tiny()
    frozen = {"tables": OptimizerGroupConfig(("embedding.*",), lr_multiplier=0.0)}
    optimizer = AdamW(param_groups(model, groups=frozen), lr=0.1)
    assert not model.embedding.weight.requires_grad
    before = model.embedding.weight.clone()
    step(model, optimizer)
    assert torch.equal(model.embedding.weight, before)
    set_multipliers(optimizer, {"tables": 1.0})
    assert model.embedding.weight.requires_grad


def test_muon_takes_matrices_as_that_of_torch() -> None:
    mine, theirs = Tiny(), Tiny()
    settings: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.2}
    optimizer = Muon([m.weight for m in mine.layers], **settings, adjust_lr_fn="match_rms_adamw")
    reference = torch.optim.Muon(
        [m.weight for m in theirs.layers], **settings, adjust_lr_fn="match_rms_adamw"
    )
    step(mine, optimizer, 3)
    step(theirs, reference, 3)
    for a, b in zip(mine.layers, theirs.layers):  # theirs iterates in bf16, transposed
        torch.testing.assert_close(a.weight, b.weight, rtol=0, atol=5e-4)


@pytest.mark.parametrize(
    ("form", "key", "shape"),
    [
        ("tensors", "params[2]", (4,)),
        ("names", "embedding.weight", (5, 4)),
        ("groups", "embedding.weight", (5, 4)),
    ],
)
def test_muon_rejects_parameters_that_are_no_matrix_of_a_block(
    form: str, key: str, shape: Any
) -> None:
    model = Tiny()
    given = param_groups(model) if form == "groups" else params_as(form, model)
    with rejects(key, shape, "no_matrix", where="parameter"):
        Muon(given)


def test_bf16_weights_without_names_are_rounded_stochastically() -> None:
    model, twin = Tiny().bfloat16(), Tiny().bfloat16()
    for each in (model, twin):
        nn.init.ones_(each.head.weight)
        optimizer = AdamW(each.parameters(), lr=1e-4, weight_decay=0.0)
        for _ in range(5):  # a change of 1e-4 is below half of the distance of bf16 numbers at 1
            each.head.weight.grad = torch.ones_like(each.head.weight)
            optimizer.step()
    assert (model.head.weight != 1).any()
    assert_same(model, twin)
    with rejects("params[0]", torch.bfloat16, "dtype"):
        ScheduleFreeAdamW(model.parameters())


def test_parameters_may_be_replaced_before_the_first_step() -> None:
    """accelerate shards the model after it was given the optimizer, and puts the new parameters into its groups."""
    model, twin = Tiny(), Tiny(3)
    optimizer, reference = AdamW(model.parameters()), AdamW(twin.parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["params"] = list(twin.parameters())
    step(twin, optimizer)
    assert len(optimizer.state_dict()["state"]) == len(reference.param_groups[0]["params"])


class Momentum(NamedOptimizer):
    """The example of the base class."""

    def slots(self, group: Any) -> Slots:
        return Slots(("momentum",))

    def update(self, group: Any, parameters: list[Tensor], skip: Tensor | None) -> None:
        for parameter in parameters:
            momentum = self.state_of(parameter, group)["momentum"]
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(momentum, alpha=group["lr"])


class OldMomentum(Momentum):
    """A constructor of 0.1."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        super().__init__(model, config, nesterov=True)  # type: ignore[arg-type]


def test_an_optimizer_of_a_user_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_core.optim.Momentum", Momentum, raising=False)
    monkeypatch.setattr("forge_core.optim.OldMomentum", OldMomentum, raising=False)
    models = [Tiny(), Tiny(), Tiny()]
    reference = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    new = build_optimizer(models[1], OptimizerConfig("forge_core.optim:Momentum", lr=0.1))
    with pytest.warns(DeprecationWarning, match="param_groups"):
        old = build_optimizer(models[2], OptimizerConfig("forge_core.optim:OldMomentum", lr=0.1))
    assert old.param_groups[0]["nesterov"]
    for model, optimizer in zip(models, (reference, new, old)):
        step(model, optimizer, 3)
    for model in models[1:]:
        for a, b in zip(models[0].parameters(), model.parameters()):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [*CLASSES, "base"])
def test_models_that_cannot_be_trained_are_rejected(name: str) -> None:
    build = {**CLASSES, "base": Momentum}[name]
    model = Tiny()
    for given, kind in (
        (model, "Tiny"),
        (model.head.weight, "Parameter"),
        ([model.head], "Linear"),
    ):
        with rejects("params", kind, "type", where="optimizer: "):
            build(given)
    weight = nn.Parameter(torch.ones(2, 2))
    with rejects("params[0]", torch.float16, "dtype"):
        build([weight.half().detach().requires_grad_()])
    with rejects("params[0]", ..., "meta"):
        build([nn.Parameter(torch.ones(2, 2, device="meta"))])
    for key, value in {"lr": -1.0, "weight_decay": -0.1, "betas": (1.0, 0.9)}.items():
        with rejects(key, value, "range", where="optimizer: "):
            build([weight], **{key: value})
    with pytest.raises(ValueError, match="empty"):  # prose: torch's own
        build([])
    if name != "base":
        with pytest.raises(TypeError, match="learning_rate"):
            build([weight], learning_rate=1e-3)
    else:
        with rejects("optimizer.state_dtype", "bf16", "unsupported"):
            build([weight], state_dtype="bf16")
