"""Weights that were changed around a forward without grad are the weights of the next forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import Residual
from torch import Tensor, nn

from forge_parallel import ParallelConfig, make_meshes, parallelize, reshard
from forge_testing import device, run_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]


def around_an_evaluation(options: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a forward sees what was put in, and one with grad afterwards what was put back."""
    config = ParallelConfig(**{"device": device().type, "precision": "fp32", **options})
    model, rows = (
        parallelize(Residual(2), config, make_meshes(config)),
        torch.ones(2, 6, device=device()),
    )
    before = model(rows)
    before.sum().backward()  # which leaves nothing gathered, as a step of training does
    parameters = list(model.parameters())  # held, as an optimizer does
    own = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2.0)
        evaluated = model(rows)
        reshard(model)
        for parameter, value in zip(parameters, own, strict=True):
            parameter.copy_(value)
    return torch.equal(evaluated, before), torch.equal(model(rows), before)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(("ranks", "precision"), [(2, "fp32"), (1, "bf16"), (1, "fp32")])
def test_F88_weights_put_back_after_an_evaluation_are_used(ranks: int, precision: str) -> None:
    found = run_on_ranks(ranks, around_an_evaluation, {"precision": precision})
    assert found == [(False, True)] * ranks


def test_F88_stages_of_a_pipeline_are_resharded_too() -> None:
    gathered = run_on_ranks(2, gathered_after_reshard)
    assert gathered == [(True, False)] * 2


def gathered_after_reshard() -> tuple[bool, bool]:
    class Parts(Residual):
        def pipeline_parts(self) -> dict[str, Any]:
            return {"first": ("first",), "blocks": "middle", "last": ("last",)}

        def forward(self, x: Tensor) -> Tensor:
            x = x if self.first is None else self.first(x)
            for block in self.middle:
                x = x + torch.tanh(block(x))
            return x if self.last is None else self.last(x)

    config = ParallelConfig(device=device().type, precision="bf16", pp=2, pp_schedule="1f1b")
    model: Any = parallelize(Parts(2), config, make_meshes(config))
    with torch.no_grad():
        model(torch.ones(2, 6 if model.first is not None else 8, device=device()))
    held = [type(p) is nn.Parameter and not hasattr(p, "placements") for p in model.parameters()]
    reshard(model)
    return any(held), not all(hasattr(p, "placements") for p in model.parameters())
