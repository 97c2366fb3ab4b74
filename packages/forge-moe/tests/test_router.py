"""Routers alone: choices, weights, ties, groups, names, dtypes."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from forge_moe import MoE, MoEConfig, Router, RouterConfig, RoutingRule
from forge_moe.router import top_k_ids, within_best_groups
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def router(**settings) -> Router:
    torch.manual_seed(0)
    built = Router(RouterConfig(dim=8, num_experts=8, **settings))
    torch.nn.init.normal_(built.weight)
    return built


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_lower_id(dtype: torch.dtype) -> None:
    scores = torch.tensor([[1, 3, 3, 3], [0, -0.0, -1, 0], [-2, -2, -1, -2]], dtype=dtype)
    assert top_k_ids(scores, 3).tolist() == [[1, 2, 3], [0, 1, 3], [2, 0, 1]]


def test_top_k_is_topk_where_nothing_ties() -> None:
    for scores in (torch.randn(50, 64) * 1e-38, torch.randn(50, 64) * 1e30, torch.randn(50, 64)):
        assert torch.equal(top_k_ids(scores, 6), scores.topk(6).indices)


def test_infinities_and_one_column() -> None:
    inf = float("inf")
    assert top_k_ids(torch.tensor([[-inf, inf, 0.0, -inf]]), 4).tolist() == [[1, 2, 0, 3]]
    assert top_k_ids(torch.randn(3, 1), 1).tolist() == [[0], [0], [0]]


def test_groups_are_limited_by_their_two_best_or_their_best() -> None:
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.6, 0.1]])
    two = within_best_groups(scores, 3, 1, "top2_sum").isfinite()
    one = within_best_groups(scores, 3, 1, "max").isfinite()
    assert two.tolist() == [[False, False, True, True, False, False]]
    assert one.tolist() == [[True, True, False, False, False, False]]


def test_softmax_weights_before_and_after() -> None:
    x = torch.randn(5, 8)
    after, before = router(), router(normalize="before_top_k", route_scale=2.0)
    probabilities = F.linear(x, after.weight).softmax(-1)
    best, ids = probabilities.topk(2)
    weights, found = after(x)
    assert torch.equal(found, ids)
    torch.testing.assert_close(weights, best / best.sum(-1, keepdim=True))
    torch.testing.assert_close(before(x)[0], 2.0 * best)


def test_F21_the_bias_selects_and_is_not_in_the_weights() -> None:
    x = torch.randn(6, 8)
    biased = router(name="sigmoid_topk", expert_bias=True, route_scale=2.5)
    biased.expert_bias[3] = 10.0  # everybody must take expert 3
    weights, ids = biased(x)
    scores = torch.sigmoid(F.linear(x, biased.weight)).gather(1, ids)
    assert (ids == 3).any(1).all()
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(-1, keepdim=True))


def test_weights_do_not_vanish_where_the_bias_selects_unlikely_experts() -> None:
    one = router(expert_bias=True)
    one.weight.data.mul_(100.0)
    one.expert_bias[:2] = 1e3
    weights, ids = one(torch.randn(9, 8))
    assert (ids < 2).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))


def test_F18_the_bias_is_no_parameter_and_lies_in_the_state() -> None:
    one = router(expert_bias=True)
    assert [name for name, _ in one.named_parameters()] == ["weight"]
    assert list(one.state_dict()) == ["weight", "expert_bias"]
    assert "expert_bias" not in router().state_dict()
    optimizer = torch.optim.AdamW(one.parameters(), lr=1.0, weight_decay=0.5)
    one.expert_bias.fill_(0.25)
    one(torch.randn(4, 8))[0].sum().backward()
    optimizer.step()
    assert (one.expert_bias == 0.25).all()


def test_F19_the_bias_stays_fp32_through_every_cast() -> None:
    one = router(expert_bias=True)
    one.expert_bias.fill_(1.0)
    parent = torch.nn.Sequential(one)
    for cast in (parent.bfloat16, parent.half, parent.double, lambda: parent.to(torch.bfloat16)):
        cast()
        one.expert_bias += 1e-3
    assert one.expert_bias.dtype == torch.float32
    torch.testing.assert_close(one.expert_bias, torch.full((8,), 1.004))
    assert one.weight.dtype == torch.bfloat16


def test_logits_are_fp32_in_bf16_and_under_autocast() -> None:
    one, x = router(), torch.randn(7, 8).bfloat16()
    exact = F.linear(x.float(), one.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routed = one.route(x)
    assert torch.equal(routed.logits, exact)
    assert {t.dtype for t in (routed.weights, routed.probabilities)} == {torch.float32}
    assert one.double().route(x.double()).weights.dtype == torch.float64


def test_pads_are_dropped_with_weight_0_and_no_gradient() -> None:
    one, x = router(), torch.randn(4, 8, requires_grad=True)
    valid = torch.tensor([True, False, True, False])
    routed = one.route(x, valid)
    assert (routed.ids[~valid] == 8).all()
    assert (routed.ids[valid] < 8).all()
    routed.weights[:, 0].sum().backward()
    assert (x.grad[~valid] == 0).all()


def test_uniform_fills_experts_evenly_and_skips_pads() -> None:
    valid = torch.tensor([True, False] * 8)
    ids = router(name="uniform").route(torch.randn(16, 8), valid).ids[valid]
    assert torch.bincount(ids.flatten(), minlength=8).tolist() == [2] * 8


def test_F91_expert_choice_in_eval_gives_each_expert_its_fraction_of_each_sequence() -> None:
    one, x = router(name="expert_choice"), torch.randn(12, 8)
    ids = one.route(x).ids
    assert torch.bincount(ids[ids < 8].flatten(), minlength=8).tolist() == [3] * 8
    one.eval()
    ids = one.route(x, rows=3).ids
    for row, alone in zip(ids.view(3, 4, 8), x.view(3, 4, 8)):
        assert torch.bincount(row[row < 8].flatten(), minlength=8).tolist() == [1] * 8
        assert torch.equal(row, one.route(alone, rows=1).ids)
    with rejects("rows", None, "missing"):
        one(x)


def test_probabilities_of_sigmoid_sum_to_1() -> None:
    routed = router(name="sigmoid_topk").route(torch.randn(5, 8))
    torch.testing.assert_close(routed.probabilities.sum(-1), torch.ones(5))


def test_F27_gradient_scale_is_rejected_with_the_reason() -> None:
    with rejects("router", "gradient_scale", "unsupported"):
        MoE(MoEConfig(8, 8, 4, router="gradient_scale"))


def test_a_custom_router_by_path_and_by_entry_point(monkeypatch) -> None:
    module = types.ModuleType("some_lab")
    module.first = RoutingRule(
        torch.sigmoid,
        lambda s, c, valid: torch.arange(c.top_k).expand(s.size(0), -1),
        lambda logits, scores, ids, c: scores.gather(1, ids),
    )
    module.number = 3
    monkeypatch.setitem(sys.modules, "some_lab", module)
    assert router(name="some_lab:first")(torch.randn(3, 8))[1].tolist() == [[0, 1]] * 3

    class Point:
        name = "first"

        def load(self) -> RoutingRule:
            return module.first

    monkeypatch.setattr("forge_moe._registered.entry_points", lambda group: [Point()])
    assert router(name="first").rule is module.first
    with rejects("router", "fist", "unknown") as caught:
        router(name="fist")
    assert "first" in caught.value.problems[0].fix
    with rejects("router", "some_lab:number", "type"):
        router(name="some_lab:number")
    with rejects("router", "some_lab:nothing", "not_found"):
        router(name="some_lab:nothing")


@pytest.mark.parametrize(
    ("settings", "key", "value", "code"),
    [
        ({"top_k": 9}, "top_k", 9, "above_experts"),
        ({"num_groups": 3}, "num_experts", 8, "divides"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups", 3, "above_groups"),
        ({"num_groups": 8, "top_k": 2}, "top_k", 2, "groups"),
        ({"normalize": "never"}, "normalize", "never", "unknown"),
        ({"group_score": "sum"}, "group_score", "sum", "unknown"),
        ({"route_scale": 0.0}, "route_scale", 0.0, "range"),
    ],
)
def test_rules(settings: dict, key: str, value: object, code: str) -> None:
    with rejects(key, value, code):
        RouterConfig(**{"dim": 8, "num_experts": 8, **settings})


def test_shapes_that_do_not_fit_are_rejected() -> None:
    with rejects("x", (2, 3, 8), "dims"):
        router().route(torch.randn(2, 3, 8))


@pytest.mark.parametrize("name", ["softmax_topk", "expert_choice"])
def test_a_router_takes_sequences_as_the_layer_does(name: str) -> None:
    chosen = router(name=name).eval()
    x = torch.randn(2, 3, 8)
    weights, ids = chosen(x)
    by_rows = chosen.route(x.flatten(0, 1), rows=2)
    assert weights.shape == ids.shape == (2, 3, weights.shape[-1])
    assert torch.equal(weights.flatten(0, 1), by_rows.weights)
    assert torch.equal(ids.flatten(0, 1), by_rows.ids)
