"""Statistics against loops over tokens."""

import math
from itertools import product

import pytest
import torch
from torch import nn

from forge_moe import MoE, MoEConfig
from forge_moe.statistics import coactivation, collect, drop_rate, load_summary

pytestmark = pytest.mark.lane("test")


def random_ids(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """Distinct experts per token; about a fifth of the slots are dropped."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    ids = scores.topk(top_k, dim=1).indices
    return ids.where(torch.rand(ids.shape, generator=generator) > 0.2, num_experts)


CASES = [(0, 4, 2), (1, 1, 1), (50, 8, 2), (33, 12, 4)]


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), CASES)
def test_coactivation_equals_a_loop(num_tokens: int, num_experts: int, top_k: int) -> None:
    ids = random_ids(num_tokens, num_experts, top_k)
    pairs = [[0] * num_experts for _ in range(num_experts)]
    for token in ids.tolist():
        chosen = [e for e in token if e < num_experts]
        for a, b in product(chosen, chosen):
            pairs[a][b] += 1
    assert coactivation(ids, num_experts).tolist() == pairs


def test_load_summary() -> None:
    summary = load_summary(torch.tensor([6, 2, 0, 0]))
    assert summary.max_over_mean == 3.0
    assert summary.min_over_mean == 0.0
    assert (summary.dead, summary.total) == (2, 8)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert float(summary.entropy) == pytest.approx(entropy, rel=1e-6)


@pytest.mark.parametrize("counts", [[5, 5, 5], [0, 0, 0], [7]])
def test_even_and_empty_counts(counts: list[int]) -> None:
    summary = load_summary(torch.tensor(counts))
    assert [float(x) for x in summary[:3]] == pytest.approx([1.0, 1.0, 1.0])


def test_drop_rate_and_summary_of_a_layer() -> None:
    moe = MoE(MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, capacity_factor=0.5))
    assert drop_rate(moe.statistics()) == 0.0
    moe(torch.randn(16, 8))
    found = collect(nn.ModuleDict({"a": moe, "b": nn.Linear(1, 1)}))["a"]
    kept = found["counts"].clamp(max=4).sum()  # half of the even share of 8 rows
    assert float(drop_rate(found)) == pytest.approx(1.0 - float(kept) / 32.0)
    assert load_summary(found["counts"]).total == 32
