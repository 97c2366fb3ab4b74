"""Ranks whose rows take different ways through a model have the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import train_sharded, whole
from torch import Tensor, nn

from forge_parallel import ParallelConfig, accumulate, make_meshes, parallelize
from forge_testing import run_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]


class Branches(nn.Module):
    """Two equal ways, of which a row takes the one that it names; a third that no row takes."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.spare = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, rows: Tensor, ways: list[str]) -> Tensor:
        return torch.stack([getattr(self, way)(row) for row, way in zip(rows, ways, strict=True)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.middle = nn.ModuleList([Branches(), Branches()])

    def blocks(self) -> list[nn.Module]:
        return list(self.middle)

    def forward(self, rows: Tensor, ways: list[str]) -> Tensor:
        x = torch.tanh(self.first(rows))
        for block in self.middle:
            x = x + torch.tanh(block(x, ways))
        return x


# Ways of four rows in each of two micro-batches, by step; nobody takes `image` in the third step.
STEPS = [
    (["text", "image", "text", "text"], ["text", "text", "image", "text"]),
    (["image", "text", "image", "image"], ["image", "image", "image", "image"]),
    (["text", "text", "text", "text"], ["text", "text", "text", "text"]),
    (["image", "image", "text", "text"], ["text", "text", "text", "text"]),
]


def train(model: Any, rank: int, ranks: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Gradients of each step, None where there is none, and the weights after AdamW with decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, eps=1e-2)
    found = []
    for step, micro_batches in enumerate(STEPS):
        for micro, ways in enumerate(micro_batches):
            rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + micro))
            mine = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
            accumulate(model, last=micro == 1)
            model(rows[mine], ways[mine]).square().sum().backward()
        found.append(
            {n: p.grad if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}
        )
        optimizer.step()
        optimizer.zero_grad()
    return found, {n: whole(p) for n, p in model.named_parameters()}


def spread(options: dict[str, Any]) -> Any:
    return train_sharded(train, Net(), options)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (2, {"precision": "bf16"}),
        (2, {"dp_replicate": 2}),
        (4, {"dp_replicate": 2}),
        (4, {"recompute": "full"}),
    ],
    ids=str,
)
def test_F86_ranks_that_take_different_branches_have_the_gradients_of_one_process(
    ranks: int, options: dict[str, Any]
) -> None:
    wanted, weights = train(Net(), 0, 1)
    exact = "precision" not in options
    for got, ends in run_on_ranks(ranks, spread, options):
        for step, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            assert [n for n in mine if mine[n] is None] == [n for n in theirs if theirs[n] is None]
            for name, gradient in theirs.items():
                if gradient is not None and (exact or step == 0):
                    error = (mine[name] - gradient).abs().max() / gradient.abs().max()
                    assert error <= (1e-5 if exact else 5e-2), (step, name)
        if exact:
            torch.testing.assert_close(ends, weights, rtol=1e-4, atol=1e-5)


def reduced_late() -> list[str]:
    """Parameters without a gradient in the third step, of a unit that reduces after the last backward."""
    config = ParallelConfig(device="cpu", precision="fp32")
    meshes = make_meshes(config)
    model: Any = parallelize(Net(), config, meshes)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    for ways in STEPS[2]:
        model(torch.ones(4, 6), ways).square().sum().backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.15 has finalize_backward")
def test_F86_a_stage_of_a_pipeline_clears_what_no_rank_used() -> None:
    unused = [n for n, _ in Net().named_parameters() if "image" in n or "spare" in n]
    assert run_on_ranks(2, reduced_late) == [unused, unused]
