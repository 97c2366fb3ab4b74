"""What a user may get wrong: the sentence names the value, the rule and the fix."""

import dataclasses
import math

import pytest
import torch

from forge_moe import MoE, MoEConfig, RouterConfig, expert_parallelize

pytestmark = pytest.mark.lane("test")

GOOD = {"dim": 8, "hidden_dim": 16, "num_experts": 4}
WHOLE = "must be an integer; write it as one"
TYPES = [
    ({"top_k": 2.0}, f"top_k 2.0 {WHOLE}"),
    ({"top_k": True}, f"top_k True {WHOLE}"),
    ({"top_k": None}, f"top_k None {WHOLE}"),
    ({"dim": "64"}, f"dim '64' {WHOLE}"),
    ({"num_experts": math.nan}, f"num_experts nan {WHOLE}"),
    ({"shared_hidden_dim": 2.5}, f"shared_hidden_dim 2.5 {WHOLE}, or leave it empty"),
    ({"route_scale": "1"}, "route_scale '1' must be a number"),
    ({"capacity_factor": True}, "capacity_factor True must be a number; write it as one, or leave"),
    ({"bias": 1}, "bias 1 must be true or false"),
    ({"router": 3}, "router 3 must be text"),
    ({"normalize": ["after_top_k"]}, r"normalize \['after_top_k'\] is unknown"),
]


@pytest.mark.parametrize(("wrong", "message"), TYPES)
def test_F109_values_of_another_type_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"moe: {message}"):
        MoEConfig(**{**GOOD, **wrong})


def test_F109_a_router_is_as_strict_and_lists_all() -> None:
    with pytest.raises(ValueError, match=r"router: dim '8' .*\nrouter: top_k 2.0 "):
        RouterConfig("8", 4, top_k=2.0)
    assert MoEConfig(**GOOD, route_scale=2, capacity_factor=1).route_scale == 2  # a number


@pytest.mark.parametrize(
    "name", ["dim", "hidden_dim", "num_experts", "num_shared_experts", "shared_hidden_dim"]
)
def test_F107_sizes_beyond_reason_are_refused_by_name(name: str) -> None:
    limit = 2**20 if name.endswith("dim") else 2**16
    with pytest.raises(ValueError, match=f"moe: {name} {10**9} must be [01] to {limit}"):
        MoEConfig(**{**GOOD, name: 10**9})


@pytest.mark.parametrize("router", ["softmax_topk", "sigmoid_topk"])
def test_F92_one_expert_whose_weight_is_always_1_is_refused(router: str) -> None:
    """Its router would get no gradient from the task."""
    message = "top_k 1 must go with normalize 'before_top_k'.*; set normalize = 'before_top_k'"
    with pytest.raises(ValueError, match=f"moe: {message}"):
        MoEConfig(**GOOD, router=router, top_k=1)
    with pytest.raises(ValueError, match=f"router: {message}"):
        RouterConfig(8, 4, name=router, top_k=1)
    moe = MoE(MoEConfig(**GOOD, router=router, top_k=1, normalize="before_top_k"))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    moe(torch.randn(12, 8)).square().sum().backward()
    assert moe.router.weight.grad.abs().max() > 1e-3


def test_F92_is_about_choices_alone() -> None:
    MoEConfig(**{**GOOD, "num_experts": 1}, top_k=1)  # nothing to choose
    MoEConfig(**GOOD, top_k=1, router="expert_choice")  # weights are never divided
    MoEConfig(**GOOD, top_k=1, router="uniform")


def test_F109_a_wrong_width_and_integers_are_told_so() -> None:
    moe = MoE(MoEConfig(**GOOD))
    for called, x in ((moe, torch.randn(2, 3, 6)), (moe.router, torch.randn(3, 6))):
        with pytest.raises(ValueError, match=r"the width dim 8 that .*build it with dim = 6, or"):
            called(x)
        with pytest.raises(
            ValueError, match=r"x is torch\.int64 and must be floating point; give emb"
        ):
            called(x.long())
    with pytest.raises(ValueError, match=r"x \(2, 3, 8\) must be \(T, 8\); flatten it"):
        moe.router(torch.randn(2, 3, 8))
    with pytest.raises(ValueError, match=r"x \(8,\) must be \(\.\.\., 8\)"):
        moe(torch.randn(8))


def test_F109_a_mesh_by_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"mesh 'ep' must be a DeviceMesh of one axis; pass mesh\['"
    ):
        expert_parallelize(MoE(MoEConfig(**GOOD)), "ep")


def test_F109_every_field_has_a_type_that_is_checked_or_its_choices() -> None:
    for config in (MoEConfig(**GOOD), RouterConfig(8, 4)):
        for field in dataclasses.fields(config):
            with pytest.raises(ValueError, match=field.name):
                dataclasses.replace(config, **{field.name: object()})


def test_options_go_by_name() -> None:
    """A fourth number by position was once top_k; it must not become another option."""
    with pytest.raises(TypeError, match="positional arguments"):
        MoEConfig(8, 16, 4, 2)  # type: ignore[misc]
