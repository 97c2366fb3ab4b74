"""In eval a row is a function of itself, whatever shares the call, and leaves no trace in training."""

from types import SimpleNamespace

import pytest
import torch

from forge_moe import MoE, MoEConfig, update_expert_bias
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

DEPENDENT = {
    "capacity by position": {"capacity_factor": 0.5},
    "capacity by probability": {"capacity_factor": 0.5, "drop_policy": "probability"},
    "expert choice": {"router": "expert_choice"},
    "expert choice of odd rows": {"router": "expert_choice", "num_experts": 7, "top_k": 3},
}


def build(**options) -> MoE:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(**{"dim": 8, "hidden_dim": 16, "num_experts": 4, **options}))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return moe


def test_F217_the_uniform_router_evaluates_each_row_by_itself() -> None:
    moe, x = build(router="uniform", num_experts=7), torch.randn(6, 5, 8)
    with torch.no_grad():
        assert not torch.equal(moe(x)[2:], torch.cat([moe(row[None]) for row in x[2:]]))
        moe.eval()
        torch.testing.assert_close(moe(x), torch.cat([moe(row[None]) for row in x]))


@pytest.mark.parametrize("backend", ["grouped_mm", "loop"])
@pytest.mark.parametrize("case", DEPENDENT)
@pytest.mark.parametrize("pads", [False, True])
def test_F91_a_sequence_in_eval_depends_only_on_itself(case: str, backend: str, pads: bool) -> None:
    moe = build(backend=backend, **DEPENDENT[case])
    x = torch.randn(6, 5, 8)
    valid = torch.ones(6, 5, dtype=torch.bool)
    valid[2, 3:] = valid[5, 1:] = not pads

    def outputs(size: int) -> torch.Tensor:
        parts = zip(x.split(size), valid.split(size))
        return torch.cat([moe(rows, SimpleNamespace(valid=some)) for rows, some in parts])

    with torch.no_grad():
        trained = outputs(6), outputs(2)
        moe.eval()
        moe.statistics(reset=True)
        together = outputs(6)
        dropped = moe.statistics()["dropped"]
        for size in (1, 2, 4):
            torch.testing.assert_close(outputs(size), together, rtol=1e-6, atol=1e-6)
    assert (trained[0] - trained[1]).abs().max() > 1e-2, (
        "the case must depend on the call in training"
    )
    assert dropped == 0


def test_F91_expert_choice_takes_its_fraction_of_every_sequence() -> None:
    """ceil of each row, which is more than the ceil of all: no slot may be cut off."""
    moe, rows = build(router="expert_choice", num_experts=7, top_k=3).eval(), []
    moe.experts.register_forward_pre_hook(lambda _, given: rows.append(given[0].size(0)))
    moe(torch.randn(6, 5, 8))
    assert rows == [6 * 7 * 3]  # ceil(5 x 3 / 7) = 3
    assert moe.statistics()["counts"].tolist() == [18] * 7


def test_F91_expert_choice_rejects_sequences_split_over_ranks() -> None:
    moe = build(router="expert_choice").eval()
    moe.sequence_group = object()
    with rejects("router", "expert_choice", "split_rows"):
        moe(torch.randn(2, 4, 8))
    assert moe.needs_whole_rows
    assert not build().needs_whole_rows


def test_F91_an_evaluation_does_not_change_the_step() -> None:
    """Counts that move biases are those of training forwards."""
    moe = build(bias_update_rate=0.1)
    x = torch.randn(4, 5, 8)
    moe(x)
    wanted = moe.counters.step_counts.clone()
    moe.eval()
    with torch.no_grad():
        moe(torch.randn(9, 5, 8))
    moe.train()
    assert torch.equal(moe.counters.step_counts, wanted)
    update_expert_bias(moe, 0, 1)
    assert torch.equal(moe.router.expert_bias, 0.1 * torch.sign(wanted.sum() / 4 - wanted))
