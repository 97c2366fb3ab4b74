"""What a user may get wrong: the problem names the key, the value and the rule."""

import dataclasses
import math

import pytest
import torch

from forge_moe import MoE, MoEConfig, RouterConfig, expert_parallelize
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

GOOD = {"dim": 8, "hidden_dim": 16, "num_experts": 4}
TYPES = [
    ("top_k", 2.0),
    ("top_k", True),
    ("top_k", None),
    ("dim", "64"),
    ("num_experts", math.nan),
    ("shared_hidden_dim", 2.5),
    ("route_scale", "1"),
    ("capacity_factor", True),
    ("bias", 1),
    ("router", 3),
]


@pytest.mark.parametrize(("key", "value"), TYPES)
def test_F109_values_of_another_type_are_rejected(key: str, value: object) -> None:
    with rejects(key, value, "type"):
        MoEConfig(**{**GOOD, key: value})


def test_F109_a_choice_is_one_of_its_texts() -> None:
    with rejects("normalize", ["after_top_k"], "unknown"):
        MoEConfig(**GOOD, normalize=["after_top_k"])


def test_F109_a_router_is_as_strict_and_lists_all() -> None:
    with rejects("dim", "8", "type") as caught:
        RouterConfig("8", 4, top_k=2.0)
    assert {(p.key, p.value) for p in caught.value.problems} == {("dim", "8"), ("top_k", 2.0)}
    assert MoEConfig(**GOOD, route_scale=2, capacity_factor=1).route_scale == 2  # a number


@pytest.mark.parametrize(
    "name", ["dim", "hidden_dim", "num_experts", "num_shared_experts", "shared_hidden_dim"]
)
def test_F107_sizes_beyond_reason_are_rejected_by_name(name: str) -> None:
    limit = 2**20 if name.endswith("dim") else 2**16
    assert getattr(MoEConfig(**{**GOOD, name: limit}), name) == limit
    with rejects(name, limit + 1, "range"):
        MoEConfig(**{**GOOD, name: limit + 1})


@pytest.mark.parametrize(
    ("router", "key", "value"),
    [
        *(("expert_choice", key, value) for key, value in (
            ("num_groups", 2), ("group_score", "max"), ("normalize", "before_top_k"), ("expert_bias", True),
            ("bias_update_rate", 0.01),
        )),
        *(("uniform", key, value) for key, value in (
            ("num_groups", 2), ("group_score", "max"), ("expert_bias", True), ("bias_update_rate", 0.01),
        )),
    ],
)  # fmt: skip
def test_F221_a_key_that_the_router_does_not_read(router: str, key: str, value: object) -> None:
    with rejects(key, value, "foreign"):
        MoEConfig(8, 16, 4, router=router, **{key: value})
    if key != "bias_update_rate":
        with rejects(key, value, "foreign"):
            RouterConfig(8, 4, name=router, **{key: value})
    MoEConfig(8, 16, 4, router="softmax_topk", **{key: value})


@pytest.mark.parametrize("router", ["softmax_topk", "sigmoid_topk"])
def test_F92_one_expert_whose_weight_is_always_1_is_rejected(router: str) -> None:
    """Its router would get no gradient from the task."""
    with rejects("top_k", 1, "normalize"):
        MoEConfig(**GOOD, router=router, top_k=1)
    with rejects("top_k", 1, "normalize"):
        RouterConfig(8, 4, name=router, top_k=1)
    moe = MoE(MoEConfig(**GOOD, router=router, top_k=1, normalize="before_top_k"))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    moe(torch.randn(12, 8)).square().sum().backward()
    assert moe.router.weight.grad.abs().max() > 1e-3


def test_F92_only_choices_are_rejected() -> None:
    MoEConfig(**{**GOOD, "num_experts": 1}, top_k=1)  # nothing to choose
    MoEConfig(**GOOD, top_k=1, router="expert_choice")  # weights are never divided
    MoEConfig(**GOOD, top_k=1, router="uniform")


def test_F109_a_wrong_width_and_integers_are_rejected() -> None:
    moe = MoE(MoEConfig(**GOOD))
    for called, x in ((moe, torch.randn(2, 3, 6)), (moe.router, torch.randn(3, 6))):
        with rejects("x", tuple(x.shape), "shape"):
            called(x)
        with rejects("x", torch.int64, "dtype"):
            called(x.long())
    with rejects("x", (2, 3, 8), "dims"):
        moe.router.route(torch.randn(2, 3, 8))
    with rejects("x", (8,), "shape"):
        moe(torch.randn(8))


def test_F109_a_mesh_by_name_is_rejected() -> None:
    with rejects("mesh", "ep", "type"):
        expert_parallelize(MoE(MoEConfig(**GOOD)), "ep")


def test_F109_every_field_has_a_type_that_is_checked_or_its_choices() -> None:
    for config in (MoEConfig(**GOOD), RouterConfig(8, 4)):
        for field in dataclasses.fields(config):
            value = object()
            with rejects(field.name, value):
                dataclasses.replace(config, **{field.name: value})


def test_options_go_by_name() -> None:
    """A fourth number by position was once top_k; it must not become another option."""
    with pytest.raises(TypeError, match="positional arguments"):
        MoEConfig(8, 16, 4, 2)  # type: ignore[misc]
