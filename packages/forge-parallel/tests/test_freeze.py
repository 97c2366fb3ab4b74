"""Parameters that are frozen and trained again after `parallelize`: gradients of one process, no traffic for the frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import Residual as Net
from nets import train_sharded, whole
from torch.distributed.tensor import DTensor

from forge_parallel import (
    ParallelConfig,
    follow_requires_grad,
    global_grad_norm,
    make_meshes,
    parallelize,
)
from forge_parallel.axes.fsdp import apply_fsdp
from forge_parallel.meshes import with_one_rank
from forge_testing import device, run_on_ranks
from forge_testing.problems import assert_problem

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]


#: What is frozen in each step: nothing reaches first and middle.0 at first, later they alone are trained.
STEPS = [
    ("first", "middle.0"),
    ("first", "middle.0"),
    ("middle.1", "middle.2", "last"),
    (),
    ("middle.1.weight",),
]


def train(model: Any, rank: int, ranks: int) -> list[dict[str, Any]]:
    """Of each step the gradients (dtype and value), their norm, and how many reduce-scatters there were."""
    from torch.distributed.tensor.debug import CommDebugMode

    parameters, found = dict(model.named_parameters()), []
    for step, frozen in enumerate(STEPS):
        for name, parameter in parameters.items():
            parameter.requires_grad_(not name.startswith(frozen or ("-",)))
            parameter.grad = None
        follow_requires_grad(model)
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(device())
        mine = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        with CommDebugMode() as counted:
            model(rows[mine]).float().square().sum().backward()
        sent = {str(op): n for op, n in counted.get_comm_counts().items()}
        norm, _ = global_grad_norm(parameters.values())
        gradients = {n: whole(p.grad) for n, p in parameters.items() if p.grad is not None}
        sums = sum(n for op, n in sent.items() if "reduce_scatter" in op)
        found.append({"gradients": gradients, "norm": norm.item(), "sums": sums})
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
            model(rows)  # leaves the root gathered, as an evaluation does
    return found


def spread(options: dict[str, Any]) -> Any:
    return train_sharded(train, Net(), options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (2, {"reshard_after_forward": False}),
        (4, {"dp_replicate": 2}),
        (2, {"recompute": "full"}),
        (2, {"compile": True}),
        pytest.param(2, {"precision": "bf16"}, marks=pytest.mark.lane("ci")),
        (1, {"precision": "bf16"}),
    ],
    ids=str,
)
def test_freezing_has_the_gradients_of_one_process(ranks: int, options: dict[str, Any]) -> None:
    (wanted,) = run_on_ranks(1, spread, {})
    bound = 3e-2 if options.get("precision") == "bf16" else 1e-5
    for got in run_on_ranks(ranks, spread, options, timeout=120):
        for step, (mine, its) in enumerate(zip(got, wanted, strict=True)):
            assert mine["gradients"].keys() == its["gradients"].keys(), step
            assert mine["norm"] == pytest.approx(its["norm"], rel=bound)
            for name, value in its["gradients"].items():
                assert mine["gradients"][name].dtype == torch.float32, (step, name)
                difference = (mine["gradients"][name] - value).abs().max()
                assert difference <= bound * value.abs().max(), (step, name)


def test_a_unit_that_is_frozen_sends_no_gradients() -> None:
    """The root (first and last) and three blocks are four units."""
    for got in run_on_ranks(2, spread, {}):
        assert [step["sums"] for step in got] == [3, 3, 2, 4, 4]


def thawed(precision: str) -> ValueError | None:
    config = ParallelConfig(device=device().type, precision=precision)  # type: ignore[arg-type]
    net = Net()
    net.middle.bfloat16().requires_grad_(False)
    model = parallelize(net, config, make_meshes(config))
    model(torch.ones(2, 6, device=device())).float().sum().backward()
    follow_requires_grad(model)
    model.requires_grad_(True)
    try:
        follow_requires_grad(model)
    except ValueError as error:
        return error
    return None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_kept_in_16_bits_is_not_thawed(precision: str) -> None:
    (error,) = run_on_ranks(1, thawed, precision)
    assert_problem(error, "middle.0.weight", ..., "frozen")


def gathered(reshards: bool) -> list[bool]:
    """After a forward, whether each block holds whole weights."""
    config = ParallelConfig(device=device().type, precision="fp32")
    meshes = with_one_rank(config, make_meshes(config))
    net = Net()
    for block in net.middle:
        block.weight.data = block.weight.data.bfloat16()
        block.weight.requires_grad_(False)
    apply_fsdp(net, meshes.fsdp(meshes.dense), reshard_after_forward=reshards)
    net(torch.ones(2, 6))
    return [not isinstance(block.weight, DTensor) for block in net.middle]


def test_F125_weights_stay_gathered_between_halves_of_a_backward_with_frozen_16_bits() -> None:
    """Freed there, trained parameters beside them got no gradient (zero-bubble schedules, adapters)."""
    assert run_on_ranks(1, gathered, False) == [[True, True, True]]
    assert run_on_ranks(1, gathered, True) == [[False, False, False]]
