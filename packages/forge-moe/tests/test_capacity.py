"""Capacity: what is dropped, by which policy, and that it costs nothing afterwards."""

from types import SimpleNamespace

import pytest
import torch

from forge_moe import MoE, MoEConfig
from forge_moe.router import drop_over_capacity, expert_capacity

pytestmark = pytest.mark.lane("test")

IDS = torch.tensor(
    [[0, 1], [1, 0], [0, 2], [3, 0]]
)  # expert 0 is wanted four times, E = 3: 3 is dropped
WEIGHTS = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.0, 0.7]])


def test_F25_rows_are_counted_over_all_slots_together() -> None:
    kept = drop_over_capacity(IDS, WEIGHTS, 3, 2, "position")
    assert kept.tolist() == [[0, 1], [1, 0], [3, 2], [3, 3]]


def test_likelier_tokens_stay_and_equal_ones_by_position() -> None:
    kept = drop_over_capacity(IDS, WEIGHTS, 3, 1, "probability")
    assert kept.tolist() == [[3, 3], [1, 3], [0, 2], [3, 3]]  # 0.7 twice: the earlier one


def test_limits() -> None:
    assert expert_capacity(10, 2, 4, 1.0) == 5
    assert expert_capacity(10, 2, 4, 1.05) == 6
    assert expert_capacity(torch.tensor(10), 2, 4, 1.05) == 6
    assert expert_capacity(0, 2, 4, 1.0) == 0
    for tokens in (1000, torch.tensor(1000)):  # in floats 1000 x (1.1 / 10) is above 110
        assert expert_capacity(tokens, 1, 10, 1.1) == 110


@pytest.mark.parametrize("policy", ["position", "probability"])
def test_F25_dropped_rows_are_not_computed(policy: str) -> None:
    moe = MoE(MoEConfig(8, 8, 4, capacity_factor=0.5, drop_policy=policy))
    moe.router.weight.data.normal_()
    seen = []
    moe.experts.register_forward_pre_hook(lambda _, given: seen.append(given[1].clone()))
    x = torch.randn(16, 8, requires_grad=True)
    y = moe(x)
    y.sum().backward()
    statistics = moe.statistics()
    assert (seen[0] <= 4).all()
    assert seen[0].sum() + statistics["dropped"] == 32 == statistics["counts"].sum()
    assert statistics["dropped"] >= 16


def test_a_token_that_is_dropped_everywhere_gets_0_and_the_others_keep_their_weights() -> None:
    moe = MoE(MoEConfig(8, 8, 2, top_k=1, capacity_factor=1.0, normalize="before_top_k"))
    free = MoE(MoEConfig(8, 8, 2, top_k=1, normalize="before_top_k"))
    free.load_state_dict(moe.state_dict())
    moe.router.weight.data[0], moe.router.weight.data[1] = 1.0, -1.0
    free.router.weight.data.copy_(moe.router.weight.data)
    x = torch.rand(6, 8)  # all want expert 0, which takes three
    y = moe(x)
    torch.testing.assert_close(y[:3], free(x)[:3])
    assert (y[3:] == 0).all()


def test_pads_take_no_capacity() -> None:
    moe = MoE(MoEConfig(8, 8, 2, top_k=1, capacity_factor=1.0, normalize="before_top_k"))
    moe.router.weight.data[0], moe.router.weight.data[1] = 1.0, -1.0
    valid = torch.tensor([[False, False, True, True, True, True]])
    y = moe(torch.rand(1, 6, 8), SimpleNamespace(valid=valid))
    assert (y.abs().sum(-1) > 0).tolist() == [[False, False, True, True, False, False]]
